# SPDX-License-Identifier: MIT
"""Masked cross-entropy in plain PyTorch: the specification, which masked_ce_triton.py must equal.

Every masked loss is a weighted sum of per-token losses,

    L = sum_i w_i * l_i            dL/dlogits_i = w_i * (softmax(logits_i) - target_i)

and mask, reduction, micro-batches, data-parallel ranks and packing only choose w. (target_i is 1 at
the label, else 0.) w_i = 0 means that the token is not there: nothing in its row reaches a result,
and its gradient is exactly 0, even where the row holds NaN. So rows are *selected* by w before any
arithmetic; `loss * mask` computes 0 * NaN.
Autograd makes all gradients, but for the two steps of part 4 that cross ranks: the formula above
(of plain cross-entropy) is the only one to read here.

Symbols  N tokens, K labels a token (1, or target's last dimension), V vocabulary, H hidden size;
         a_i token weight (the mask), w_i its weight in the loss; z logits after softcap and
         temperature, p = softmax(z), lse = log sum exp z; q the target's probabilities
Counts   "2R 1W" beside a step: it reads N*V elements twice and writes them once
Order    1 weights  2 losses of rows  3 the linear path, in chunks of rows  4 a vocabulary that is
         split over ranks  5 checks  6 the public losses
"""
import functools
from contextlib import nullcontext
from numbers import Integral, Real
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.utils.checkpoint import checkpoint

__all__ = [
    "shift_labels", "token_weights", "count_items", "masked_cross_entropy",
    "masked_cross_entropy_from_distribution", "masked_log_probs", "masked_linear_cross_entropy",
    "masked_linear_log_probs", "masked_linear_distillation", "LogProbs"]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
NAN, INF = float("nan"), float("inf")


# -------------------------------------------------------------------------------------- 1 weights
def shift_labels(
    labels: Tensor,  # (..., T)
    ignore_index: int = -100,
    cu_seqlens: Optional[Tensor] = None,  # (samples + 1,) int
) -> Tensor:  # (..., T)
    """Position i gets the label of token i + 1, the last position of a sample `ignore_index`.

    A loss mask shifts the same way, with ignore_index=0. With cu_seqlens a sample is a segment of
    the flattened tokens. ValueError: no token axis; an ignore_index that the dtype cannot hold.

    >>> shift_labels(torch.tensor([5, 6, 7, 8, 9]), cu_seqlens=torch.tensor([0, 3, 5])).tolist()
    [6, 7, -100, 9, -100]
    """
    check_tensor("labels", labels, (...,))
    if labels.dim() == 0:
        raise ValueError(f"labels must have an axis of tokens, got shape {tuple(labels.shape)}")
    is_mask = labels.is_floating_point() or labels.dtype == torch.bool
    if not is_mask:
        check_ignore_index(ignore_index, labels.dtype)
    elif ignore_index != 0:
        raise ValueError(f"a mask of {labels.dtype} shifts with ignore_index=0, got {ignore_index}")
    flat = labels if cu_seqlens is None else labels.reshape(-1)
    padded = torch.constant_pad_nd(flat, (0, 1), ignore_index)  # one more at the end
    if cu_seqlens is not None:
        offsets, valid = sample_offsets(flat, flat.shape, cu_seqlens)
        padded[offsets] = ignore_index  # the first token of a sample is nobody's next token
        if not is_mask:  # bad segments on a GPU: labels that no vocabulary has, for a loss of NaN
            padded = torch.where(valid, padded, torch.iinfo(labels.dtype).min)
    return padded[..., 1:].contiguous().view(labels.shape)


def token_weights(
    keep: Tensor,  # (...) bool or any number type: the token weights a
    reduction: str = "mean",
    *, cu_seqlens: Optional[Tensor] = None, num_items=None, process_group=None,
) -> Tensor:  # (...) float32, float64 where keep is
    """w = a / sum(a) for "mean", else a; for "sample_mean" a / (its sample's sum of a) / (number of
    samples that keep a token). For a loss: loss_mask=w, reduction="sum".

    num_items, a number or a tensor of one, replaces the divisor: what the whole step keeps, over
    all micro-batches and ranks (of "sample_mean": samples that keep a token). process_group is for
    context parallelism: each rank has other tokens of the *same* samples. Other samples on each
    rank (data parallelism) take num_items=count_items(..., process_group=...).
    Bad values (a negative weight under a mean, a bad cu_seqlens): ValueError on CPU, elsewhere NaN.

    >>> token_weights(torch.tensor([[1, 1], [1, 0]]), "sample_mean").tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    check_options(reduction=reduction)
    check_mask("keep", keep, (...,))
    w = item_weights(keep.double(), keep.shape, reduction, cu_seqlens, num_items, process_group)
    return w.to(math_dtype(keep.dtype))


def count_items(
    keep: Tensor, reduction="mean", *, cu_seqlens: Optional[Tensor] = None, process_group=None
) -> Tensor:  # 0-dim, int64 (float64 for "mean" where keep holds floats)
    """num_items of a step: kept tokens (the sum of `keep`), or samples that keep one; added up over
    the ranks of process_group, of which each has *other* samples (data parallelism).

    >>> count_items(torch.tensor([[True, True], [False, False]]), "sample_mean").item()
    1
    """
    if reduction not in ("mean", "sample_mean"):
        raise ValueError(f"reduction must be 'mean' or 'sample_mean', got {reduction!r}")
    check_mask("keep", keep, (...,))
    a = keep.double()  # exact: in bfloat16 257 ones sum to 256
    offsets, valid = sample_offsets(a, a.shape, cu_seqlens, process_group)
    if reduction == "mean":
        count = a.sum() if keep.is_floating_point() else a.sum().long()
    else:
        count = (sample_sums(a, offsets) != 0).sum()
    # Bad cu_seqlens: so negative that the sum over ranks is too, of which item_weights makes NaN.
    count = torch.where(valid, count, -(2**40))
    return sum_over_ranks(count, process_group)


def item_weights(a, tokens: torch.Size, reduction, cu_seqlens, num_items, group=None) -> Tensor:
    """w of each item, in float64, from a: an item is a token, or one of its K labels, where a has
    one dimension more than `tokens`."""
    num_items = check_num_items(num_items, reduction)
    offsets, valid = sample_offsets(a, tokens, cu_seqlens, group)
    if reduction in ("sum", "none"):
        return torch.where(valid, a, NAN)
    if reduction == "mean":
        share, divisor = a, sum_over_ranks(a.sum(), group)
    else:
        sums = sum_over_ranks(sample_sums(a, offsets), group)
        own_sum = sums.repeat_interleave(offsets.diff(), output_size=a.numel())
        share = a / own_sum.view(a.shape)  # 0 / 0 where a sample keeps nothing: 0 below
        divisor = (sums != 0).sum()
    # After the sums over ranks, or the others would wait for a rank that raises.
    wrong, K = ~((0 <= a) & (a < INF)), labels_per_token(a, tokens)
    check_values(wrong, lambda i: f"{reduction!r} takes token weights from 0 up, "
                                  f"got {a.flatten()[i].item()} at token {i // K}")
    if isinstance(num_items, Tensor):
        divisor = num_items.to(a.device, torch.float64)  # from another device: it may sync
    elif num_items is not None:
        divisor = a.new_ones(()) * num_items  # torch.full would compile again for each number
    out_of_range = ~((0 <= divisor) & (divisor < INF))
    if num_items is not None:
        check_values(out_of_range, lambda _: f"num_items={num_items} is out of range")
    w = torch.where((a != 0) & (divisor != 0), share / divisor, 0.0)  # nothing kept: no 0 / 0
    return torch.where(valid & ~wrong & ~out_of_range, w, NAN)


def labels_per_token(items: Tensor, tokens: torch.Size) -> int:
    return items.shape[-1] if items.dim() > len(tokens) else 1


def sample_offsets(a: Tensor, tokens: torch.Size, cu_seqlens, group=None):
    """-> offsets, valid. offsets[s] to offsets[s + 1] are sample s's items in a.flatten(). valid,
    a 0-dim bool: are cu_seqlens right? A sample is an index of the first dimension of `tokens`, or
    all of a 1-D one, or a segment that cu_seqlens cut out of the flattened tokens."""
    K = labels_per_token(a, tokens)
    n = a.numel() // K  # (tokens.numel() would make torch.export take it for a constant)
    if cu_seqlens is None:
        samples = tokens[0] if len(tokens) > 1 else 1
        offsets = torch.arange(samples + 1, device=a.device) * (n // max(samples, 1))
        return offsets * K, torch.ones((), dtype=torch.bool, device=a.device)
    check_tensor("cu_seqlens", cu_seqlens, (ANY,), INTS, a.device)
    if len(cu_seqlens) < (2 if n else 1):
        raise ValueError(f"cu_seqlens must be (samples + 1,), got {tuple(cu_seqlens.shape)}")
    wrong = torch.cat([cu_seqlens[:1] != 0, cu_seqlens[1:] < cu_seqlens[:-1]])
    wrong[-1] |= cu_seqlens[-1] != n
    if group is None:  # (other ranks would wait for one that raises: NaN says it, too)
        check_values(wrong, lambda i: f"cu_seqlens must rise from 0 to the {n} tokens; position {i}"
                                      f" of {cu_seqlens.tolist()} does not")
    valid = ~wrong.any()
    offsets = torch.where(valid, cu_seqlens.long(), 0)
    offsets[-1] = n  # if they are wrong: the last sample has all tokens, no index is out of bounds
    return offsets * K, valid


def sample_sums(a: Tensor, offsets: Tensor) -> Tensor:  # -> (samples,)
    """The sum of each sample's items, in an order that is always the same. initial: what a sample
    without items sums to. unsafe: no check of the offsets, which would wait for the GPU;
    sample_offsets has seen to them."""
    items = a.reshape(-1).contiguous()
    return torch.segment_reduce(items, "sum", offsets=offsets, initial=0, unsafe=True)


def sum_over_ranks(x: Tensor, group) -> Tensor:
    if group is not None:
        distributed.all_reduce(x, group=check_group(group))
    return x


# -------------------------------------------------------------------------------- 2 losses of rows
# logits (n, V) of selected rows; w (n, K), 0 where an item is not there. A loss is given
# all options of a call and ignores those of others (`**_`); it gives a tuple of tensors (n, ...).
def selected(x: Tensor, w: Tensor) -> Tensor:
    """0 in the rows of which no item counts: nothing that they hold goes any further. 1R 1W

    >>> selected(torch.tensor([[1.0], [NAN]]), torch.tensor([[0.5], [0.0]])).tolist()
    [[1.0], [0.0]]
    """
    return torch.where((w != 0).any(1, keepdim=True), x, 0.0)


def weighted(w: Tensor, losses: Tensor) -> Tensor:
    """w * losses, and 0 where w is 0: if only some of a row's K labels are masked, the loss of one
    of these may be inf. (Rows that are masked as a whole are 0 already: `selected`.)"""
    return torch.where(w != 0, w * losses, 0.0)


def expected(p: Tensor, x: Tensor) -> Tensor:  # (n, V), (n, V) -> (n, 1)
    """sum p * x, where 0 * inf is 0: x becomes 0 *before* the product, or 0 * inf would still be in
    the gradient."""
    return (p * torch.where(p != 0, x, 0.0)).sum(1, keepdim=True)


def transformed(logits: Tensor, softcap=None, temperature=1.0) -> Tensor:
    """z, in float32 (float64 stays). 1R 1W, with softcap about 10R 10W"""
    z = logits.to(math_dtype(logits.dtype))
    if softcap is not None:
        z = softcap * tanh(z / softcap)
    return z if temperature == 1 else z / temperature


def tanh(x: Tensor) -> Tensor:
    """torch.tanh with a better gradient: near 1 tanh has lost the digits of its slope 1 - tanh^2.
    So where |x| >= 1 we use tanh |x| = 1 - 2 s, s = sigmoid(-2 |x|): s is tiny but has all its
    digits, and autograd's slope is 4 s (1 - s), the same number."""
    saturated = x.sign() * (1 - 2 * torch.sigmoid(-2 * x.abs()))
    return torch.where(x.abs() < 1, torch.tanh(x), saturated)


def label_losses(
    logits, labels, w, *, label_smoothing, z_loss, softcap, temperature, **_
) -> tuple[Tensor]:  # ((n, K),)
    """l = lse - z_y for each label, smoothed as in F.cross_entropy, plus z_loss * lse^2."""
    z = transformed(logits, softcap, temperature)
    log_p = z.log_softmax(1)  # subtracts the maximum first. 1R 1W, backward 2R 1W
    losses = -log_p.gather(1, labels)  # backward 1W
    if label_smoothing:  # 1R, backward 1R 1W
        uniform = -log_p.mean(1, keepdim=True)
        losses = (1 - label_smoothing) * losses + label_smoothing * uniform
    if z_loss:  # 1R, backward 2R 2W
        losses = losses + z_loss * z.logsumexp(1, keepdim=True) ** 2
    return (weighted(w, losses),)


def distribution_losses(
    logits, target, w, *, divergence, softcap, temperature, target_format="logits",
    teacher_softcap=None, **_
) -> tuple[Tensor]:  # ((n, 1),)
    """target (n, V): the probabilities q; or a teacher's logits, whose softmax (after softcap and
    temperature) is q."""
    log_p = transformed(logits, softcap, temperature).log_softmax(1)
    target = target.to(log_p.dtype)
    if target_format == "logits":
        log_q = transformed(target, teacher_softcap, temperature).log_softmax(1)
        q = log_q.exp()
    else:
        q, log_q = target, target.log()
        w = torch.where(negative_rows(q), NAN, w)
    if divergence == "cross_entropy":
        losses = expected(q, -log_p)
    elif divergence == "forward_kl":
        losses = expected(q, log_q - log_p)
    else:
        losses = expected(log_p.exp(), log_p - log_q)
    if divergence != "cross_entropy" and target_format == "logits":
        # A divergence is never negative. Where rounding made it so: 0, with the same gradient.
        losses = torch.where(losses < 0, losses - losses.detach(), losses)
    return (weighted(w, losses),)


def negative_rows(q: Tensor) -> Tensor:  # (n, V) -> (n, 1)
    """Where a row of probabilities holds a negative one."""
    negative = (q < 0).any(1, keepdim=True)
    check_values(negative, lambda i: f"row {i} of the probabilities holds {q[i].min().item()}: are "
                                     "they log-probabilities?")
    return negative


class LogProbs(NamedTuple):
    """What masked_log_probs gives for each token: 0, 0 and False where masked. Of K labels each has
    a log_prob; the entropy is 0 where none counts; correct is about the first."""

    log_prob: Tensor  # log p of its label, in target's shape
    entropy: Tensor  # -sum p log p, in the shape of the tokens
    correct: Tensor  # is no logit larger than the (first) label's? In the shape of the tokens


def log_probs(logits, labels, w, *, softcap, temperature, **_) -> LogProbs:  # (n, K), (n,), (n,)
    """w is 1, 0, or NaN where a label is wrong; so w.amax(1) is 1 where any counts, or NaN."""
    z = transformed(logits, softcap, temperature)
    log_p = z.log_softmax(1)
    log_prob = log_p.gather(1, labels)
    entropy = expected(log_p.exp(), -log_p)[:, 0]
    correct = (z.gather(1, labels[:, :1])[:, 0] == z.amax(1)) & (w[:, 0] == 1)
    return LogProbs(weighted(w, log_prob), weighted(w.amax(1), entropy), correct)


# ----------------------------------------------------- 3 the linear path: logits in chunks of rows
CHUNK_BYTES = 2**29  # of a chunk's logits in float32; backward holds three such tensors
BLOCK = 65536  # columns of logits that one GEMM makes


def head_logits(weight: Tensor, bias: Optional[Tensor], v: "Vocabulary", logits_dtype=None):
    """-> a function: rows (n, H) -> logits (n, V), F.linear in blocks of columns.

    A head that learns is copied first, into float32 blocks:
    - float32, because autograd adds up the gradients of all chunks in the copy's dtype
    - blocks, because to add a gradient takes a second tensor of its size: now only of a block's
    - a copy even of float32, because backward computes logits again, and must find the weight that
      forward used, even if an optimizer has changed it since
    """
    def blocks(x):
        if len(x) > v.here:  # (to slice all of it would cost backward a copy)
            x = x[: v.here]  # padding, which may hold NaN, meets no GEMM
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x.split(BLOCK)
        return [block.to(math_dtype(x.dtype), copy=True) for block in x.split(BLOCK)]

    weights = blocks(weight)
    biases = [None] * len(weights) if bias is None else blocks(bias)

    def logits(rows):
        autocast = autocast_dtype(rows)
        gemm_dtype = autocast or rows.dtype
        out_dtype = torch.promote_types(gemm_dtype, logits_dtype or gemm_dtype)

        def cast(x):  # rounds to gemm_dtype, then widens: the GEMM runs in out_dtype
            return None if x is None else x.to(gemm_dtype).to(out_dtype)

        # autocast, which would round float32 logits, is off here: cast does its work
        with torch.autocast(rows.device.type, enabled=False) if autocast else nullcontext():
            parts = [F.linear(cast(rows), cast(block), cast(b))
                     for block, b in zip(weights, biases)]
        return whole_rows(parts[0] if len(parts) == 1 else torch.cat(parts, 1), v)

    return logits


def chunk_rows(n: int, limit: int) -> int:
    """Rows of a chunk: at most `limit`, and no thin last chunk."""
    chunks = max(-(-n // limit), 1)
    return max(-(-n // chunks), 1)


def kept_first(keep: Tensor) -> Tensor:
    """An index that puts the rows to keep first, in order. No sync, a fixed shape."""
    return (~keep).byte().argsort(stable=True)


def whole_chunks(keep: Tensor, size: int) -> Tensor:
    """True for every row of a chunk of `size` rows in which one is kept."""
    chunks = F.pad(keep, (0, -keep.shape[0] % size)).view(-1, size)
    return chunks.any(1).repeat_interleave(size)[: keep.shape[0]]


def kept_rows(keep: Tensor, skip: str, size: int, max_kept=None) -> Optional[Tensor]:
    """The indices of the rows to compute, or None for all of them. size: rows in a chunk."""
    if skip == "none":
        return None
    if max_kept is not None:  # where fewer are kept, masked rows fill up
        return kept_first(keep)[: max(max_kept, 1)]  # 1: max_kept=0 needs a row for its NaN
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"skip={skip!r} reads how many rows are kept. For one full "
                                      "graph give max_kept, or skip='none'")
    elif keep.is_meta or hasattr(keep, "fake_mode"):  # tensors with a shape but no values
        return None
    if skip == "chunks":
        keep = whole_chunks(keep, size)
    return keep.nonzero()[:, 0]  # the one host sync


def on_kept_rows(chunk_losses, hidden, targets, w, limit, *, group=None, skip="rows",
                 max_kept=None, recompute=False, **_) -> list[Tensor]:  # (N, ...) each
    """chunk_losses(hidden, targets, w) of the rows that `skip` chooses, in chunks of up to `limit`
    rows; 0 in all other rows."""
    N, keep, too_many = w.shape[0], (w != 0).any(1), None
    if max_kept is not None:  # more are kept: a factor of NaN makes all their gradients NaN
        too_many = keep & (keep.sum() > max_kept)
        hidden = hidden * torch.where(too_many, NAN, 1.0)[:, None].to(hidden.dtype)
    size = chunk_rows(N, limit)
    index = kept_rows(keep, skip, size, max_kept)
    if index is not None:
        hidden, targets, w = (x.index_select(0, index) for x in (hidden, targets, w))
        size = chunk_rows(w.shape[0], limit) if skip == "rows" else size
    results = in_chunks(chunk_losses, hidden, targets, w, size, recompute, group)
    if index is not None:
        results = [x.new_zeros(N, *x.shape[1:]).index_copy(0, index, x) for x in results]
    if too_many is not None:  # and their results
        results = [x if x.dtype == torch.bool else
                   torch.where(too_many if x.dim() == 1 else too_many[:, None], NAN, x)
                   for x in results]
    return results


def in_chunks(chunk_losses, hidden, targets, w, size, recompute, group) -> list[Tensor]:
    """chunk_losses of `size` rows at a time.

    Under `checkpoint` a chunk's logits are freed after forward, and backward computes them again.
    It begins with the last chunk, so forward keeps that one's logits, unless recompute is True.
    """
    def chunks_of(x):  # hidden states of masked rows become 0 before any GEMM
        parts = zip(x.split(size), w.split(size))
        return [selected(x, w) if x.is_floating_point() else x for x, w in parts]

    *chunks, last = zip(chunks_of(hidden), chunks_of(targets), w.split(size))
    freed = functools.partial(
        checkpoint, chunk_losses, use_reentrant=False, preserve_rng_state=False)
    if group is not None and not hidden.requires_grad:
        # Logits over ranks cannot be freed here: to compute them again all ranks must gather, but
        # where hidden learns nothing, a rank with a frozen head runs no backward.
        freed = chunk_losses
    parts = [freed(*chunk) for chunk in chunks]
    parts.append(freed(*last) if recompute else chunk_losses(*last))
    return [torch.cat(part) for part in zip(*parts)]


# --------------------------------------------------------- 4 a vocabulary that is split over ranks
class Vocabulary(NamedTuple):
    """Rank r holds columns [r * each, r * each + here), and maybe padding after them."""

    size: int  # V, over all ranks
    each: int  # ceil(size / ranks)
    here: int  # columns that count on this rank, at most `each`
    dtype: torch.dtype  # of logits or hidden states: all ranks must agree
    group: Optional[distributed.ProcessGroup]


class GatherColumns(torch.autograd.Function):
    """The columns of all ranks side by side. Each rank then computes the same loss of all columns,
    so in backward each has the same whole gradient, and takes its own columns: no all_reduce."""

    @staticmethod
    def forward(ctx, x, group):  # (n, each) -> (n, ranks * each)
        x = x.contiguous()
        ctx.own = group.rank() * x.shape[1], x.shape[1]  # first column, columns
        parts = [torch.empty_like(x) for _ in range(group.size())]
        distributed.all_gather(parts, x, group=group)
        return torch.cat(parts, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return grad.narrow(1, *ctx.own), None


class SumGradient(torch.autograd.Function):
    """Every rank has the same rows and other columns: the rows' gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        total = grad.to(math_dtype(grad.dtype), copy=True)
        distributed.all_reduce(total, group=ctx.group)
        return total.to(grad.dtype), None


def whole_rows(logits: Tensor, v: Vocabulary) -> Tensor:  # (n, columns here) -> (n, V)
    """Without padding, and with the columns of all ranks."""
    if logits.shape[1] > v.here:
        logits = logits[:, : v.here]
    if v.group is None:
        return logits
    return GatherColumns.apply(F.pad(logits, (0, v.each - v.here)), v.group)[:, : v.size]


def on_every_rank(group, check):
    """check(), whose first result is a Vocabulary. If a rank raises, or they do not agree on the
    vocabulary, all raise: the others would wait for ever in the next collective."""
    result = error = own = None
    try:
        result = check()
        own = result[0]._replace(here=None, group=None)  # what must be the same on all ranks
    except (TypeError, ValueError) as caught:
        error, own = caught, repr(caught)
    said = [None] * check_group(group).size()
    distributed.all_gather_object(said, own, group=group)
    if error:
        raise error
    if any(other != own for other in said):
        raise ValueError(f"the ranks of vocab_group hold different vocabularies: {said}")
    return result


# --------------------------------------------------------------------------------------- 5 checks
ANY = "any size"  # in a shape, where `...` stands for any leading sizes
CHOICES = {
    "reduction": ("mean", "sum", "none", "sample_mean"), "skip": ("rows", "chunks", "none"),
    "target_format": ("probabilities", "logits"), "logits_dtype": (None, torch.float32),
    "divergence": ("cross_entropy", "forward_kl", "reverse_kl")}
INTEGER, NUMBER = (Integral, torch.SymInt), (Real, torch.SymInt, torch.SymFloat)
NUMBERS = {  # type and range
    "ignore_index": (INTEGER, lambda x: True), "vocab_size": (INTEGER, lambda x: x > 0),
    "chunk_size": (INTEGER, lambda x: x > 0), "max_kept": (INTEGER, lambda x: x >= 0),
    "num_items": (NUMBER, lambda x: 0 <= x < INF), "z_loss": (NUMBER, lambda x: 0 <= x < INF),
    "label_smoothing": (NUMBER, lambda x: 0 <= x <= 1),
    "temperature": (NUMBER, lambda x: 0 < x < INF), "softcap": (NUMBER, lambda x: 0 < x < INF),
    "teacher_softcap": (NUMBER, lambda x: 0 < x < INF)}
MAY_BE_NONE = ("vocab_size", "chunk_size", "max_kept", "softcap", "teacher_softcap")


def check_options(**options) -> None:
    """TypeError or ValueError for a value that the tables above do not allow; others pass."""
    for name, x in options.items():
        if name in CHOICES:
            if x not in CHOICES[name]:
                raise ValueError(f"{name} must be one of {CHOICES[name]}, got {x!r}")
        elif name in NUMBERS and not (x is None and name in MAY_BE_NONE):
            types, in_range = NUMBERS[name]
            if isinstance(x, bool) or not isinstance(x, types):
                kind = "an integer" if types is INTEGER else "a number"
                raise TypeError(f"{name} must be {kind}, got {x!r:.200}")
            if not in_range(x):
                raise ValueError(f"{name}={x} is out of range")


def check_tensor(name: str, x, shape, dtypes=None, device=None) -> None:
    """TypeError or ValueError unless x is a tensor of that shape, of one of dtypes, on device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {x!r:.200}")
    if hasattr(x, "full_tensor"):
        raise TypeError(f"{name} is a DTensor: pass {name}.to_local(), with vocab_group if it is a "
                        "shard of the vocabulary, or let a module's hooks gather it (FSDP)")
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one with layout {x.layout}")
    if dtypes and x.dtype not in dtypes:
        raise TypeError(f"{name} must be of {dtypes}, got {x.dtype}")
    sizes = tuple(shape)
    if sizes and sizes[0] is ...:
        sizes = (*x.shape[: max(x.dim() - len(sizes) + 1, 0)], *sizes[1:])
    if x.dim() != len(sizes) or any(m is not ANY and m != n for m, n in zip(sizes, x.shape)):
        wanted = str(tuple(shape)).replace("Ellipsis", "...").replace("'", "")
        raise ValueError(f"{name} must be of shape {wanted}, got {tuple(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, as the rest is, got {x.device}")


def check_values(wrong: Tensor, message) -> None:
    """ValueError(message(i)) if wrong is True anywhere; i is the first place, of wrong.flatten().

    Only where it costs nothing to read values. On an accelerator the host would wait, and while a
    graph is traced there are none: then nothing is raised, and the callers make NaN. (torch.equal
    and not `if wrong.any()`, which counts as a sync.)"""
    if wrong.device.type != "cpu" or torch.compiler.is_compiling():
        return
    try:
        fine = torch.equal(wrong, torch.zeros_like(wrong))
    except RuntimeError:  # a fake tensor's, or under torch.func.vmap
        return
    if not fine:
        raise ValueError(message(int(wrong.flatten().nonzero()[0])))


def check_mask(name: str, mask, shape, device=None) -> None:
    check_tensor(name, mask, shape, None, device)
    if mask.is_complex():
        raise TypeError(f"{name} must hold real numbers, got {mask.dtype}")
    if mask.requires_grad:
        raise ValueError(f"{name} must not require grad, got {mask!r:.200}")


def check_group(group):
    if not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"a group must be a ProcessGroup that this rank is in, got {group!r:.200}")
    return group


def check_ignore_index(ignore_index, dtype) -> None:
    check_options(ignore_index=ignore_index)
    limits = torch.iinfo(dtype)
    if not limits.min <= ignore_index <= limits.max:
        raise ValueError(f"{dtype} cannot hold ignore_index={ignore_index}")


def check_num_items(num_items, reduction):
    """-> None, a number, or a 0-dim tensor. Of shape (n, 1), n times the same number, as Trainer
    makes it for nn.DataParallel, the first. No value in a tensor is looked at."""
    if num_items is None:
        return None
    if reduction in ("sum", "none"):
        raise ValueError(f"num_items={num_items} replaces the divisor, {reduction!r} has none")
    if not isinstance(num_items, Tensor):
        check_options(num_items=num_items)
        return num_items
    one = num_items.numel() == 1 or (num_items.dim() == 2 and num_items.shape[1] == 1)
    real = num_items.dtype != torch.bool and not num_items.is_complex()
    if not (one and real) or num_items.numel() == 0 or num_items.requires_grad:
        raise ValueError(f"num_items must be one number without grad, got {num_items!r:.200}")
    return num_items.reshape(-1)[0] if num_items.dim() else num_items


def check_head(names, hidden, weight, bias, tokens=(...,), columns=ANY, device=None) -> None:
    """Hidden states and their head, which has a row of weight for each column of logits."""
    check_tensor(names[0], hidden, (*tokens, ANY), FLOATS, device)
    dtypes = (hidden.dtype,) if autocast_dtype(hidden) is None else FLOATS
    check_tensor(names[1], weight, (columns, hidden.shape[-1]), dtypes, hidden.device)
    if bias is not None:
        check_tensor(names[2], bias, weight.shape[:1], dtypes, hidden.device)


def check_vocabulary(name, dtype, held: int, vocab_size, group) -> Vocabulary:
    """held: columns of the logits, or rows of linear_weight, that this rank's tensor has."""
    rank, ranks = (0, 1) if group is None else (check_group(group).rank(), group.size())
    size = held * ranks if vocab_size is None else vocab_size
    each = -(-size // ranks)  # as torch.chunk splits
    here = min(max(size - rank * each, 0), each)
    if size == 0 or held < here or (group is not None and held not in (here, each)):
        raise ValueError(f"vocab_size={vocab_size}: rank {rank} of {ranks} has {here} columns, "
                         f"{each} with padding, but its {name} has {held}")
    return Vocabulary(size, each, here, dtype, group)


def check_call(x, target, loss_mask, head=None, teacher_head=None, *, vocab_size=None,
               vocab_group=None, cu_seqlens=None, num_items=None, **options) -> Vocabulary:
    """All that can be wrong with a call but for the values in its tensors; cu_seqlens and num_items
    are checked where they are used. x: logits; or hidden states, then head is (weight, bias)."""
    has_labels = "ignore_index" in options  # else the target is a distribution
    check_options(vocab_size=vocab_size, **options)
    if options.get("max_kept") is not None and options.get("skip", "rows") != "rows":
        raise ValueError(f"max_kept={options['max_kept']} goes with skip='rows', "
                         f"got skip={options['skip']!r}")
    if head is None:
        check_tensor("logits", x, (..., ANY), FLOATS)
        v = check_vocabulary("logits", x.dtype, x.shape[-1], vocab_size, vocab_group)
    else:
        check_head(("hidden", "linear_weight", "linear_bias"), x, *head)
        v = check_vocabulary("linear_weight", x.dtype, len(head[0]), vocab_size, vocab_group)
    items = tokens = x.shape[:-1]
    if has_labels:
        if isinstance(target, Tensor) and target.dim() == x.dim():
            items = (*tokens, target.shape[-1] or 1)  # several labels a token
        check_tensor("target", target, items, INTS, x.device)
        check_ignore_index(options["ignore_index"], target.dtype)
    elif head is None:
        check_tensor("target", target, x.shape, FLOATS, x.device)
    else:
        names = "teacher_hidden", "teacher_weight", "teacher_bias"
        check_head(names, target, *teacher_head, tokens, len(head[0]), x.device)
    if loss_mask is not None:
        check_mask("loss_mask", loss_mask, items, x.device)
    return v


def call_items(x, target, loss_mask, v: Vocabulary, *, ignore_index=None, reduction=None,
               cu_seqlens=None, num_items=None, **_):
    """After check_call. -> labels, w. labels (N, K) in [0, V), or None if the target is a
    distribution. w (N, K): 0 where masked, NaN where a label is wrong."""
    tokens, has_labels = x.shape[:-1], ignore_index is not None
    if has_labels:
        a = (target != ignore_index).double()
    else:
        a = torch.ones(tokens, dtype=torch.float64, device=x.device)
    if loss_mask is not None:
        a = torch.where(a != 0, loss_mask.double(), 0.0)
    if reduction is None:  # log-probabilities are kept or not, and not weighted
        w = (a != 0).double()
    else:
        w = item_weights(a, tokens, reduction, cu_seqlens, num_items)
    K, labels = labels_per_token(a, tokens), None
    if has_labels:
        known = (0 <= target) & (target < v.size)
        wrong = (w != 0) & ~known
        check_values(wrong, lambda i: f"label {target.flatten()[i].item()} at token {i // K} must "
                                      f"be in [0, {v.size}) or ignored")
        w = torch.where(wrong, NAN, w)
        labels = torch.where(known, target, 0).long().reshape(-1, K)
    return labels, w.to(math_dtype(x.dtype)).reshape(-1, K)


def checked_call(x, target, loss_mask, head=None, teacher_head=None, **options):
    """check_call and call_items -> Vocabulary, labels, w. If one rank of vocab_group fails, all
    raise."""
    def check():
        v = check_call(x, target, loss_mask, head, teacher_head, **options)
        return (v, *call_items(x, target, loss_mask, v, **options))

    group = options.get("vocab_group")
    return check() if group is None else on_every_rank(group, check)


def autocast_dtype(x: Tensor) -> Optional[torch.dtype]:
    """What autocast, where it is on, makes of a GEMM's operands."""
    device = x.device.type
    on = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on and x.dtype != torch.float64 else None


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ----------------------------------------------------------------------------- 6 the public losses
def given_logits(row_losses, logits, target, loss_mask, **options):
    """`row_losses` of all rows at once, reduced."""
    v, labels, w = checked_call(logits, target, loss_mask, **options)

    def rows(x):  # (..., V) -> (N, V)
        return selected(whole_rows(x.reshape(w.shape[0], x.shape[-1]), v), w)

    targets = rows(target.detach()) if labels is None else labels
    return reduced(row_losses(rows(logits), targets, w, **options), target, logits, **options)


def from_hidden(row_losses, hidden, target, loss_mask, head, teacher_head=None, *, chunk_size=None,
                logits_dtype=None, **options):
    """`row_losses` of logits that are made from hidden rows chunk by chunk, reduced. With a
    teacher_head the target is the teacher's hidden states."""
    v, labels, w = checked_call(hidden, target, loss_mask, head, teacher_head,
                                chunk_size=chunk_size, logits_dtype=logits_dtype, **options)
    logits_of = head_logits(*head, v, logits_dtype)
    if teacher_head is None:
        targets, columns = labels, v.size
    else:
        teacher_weight, teacher_bias = teacher_head
        teacher_logits_of = head_logits(
            teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach(), v)
        targets = target.detach().reshape(w.shape[0], target.shape[-1])
        columns = 2 * v.size  # a chunk holds the logits of both

    def chunk_losses(hidden, targets, w):
        if teacher_head is not None:
            targets = teacher_logits_of(targets)
        return row_losses(logits_of(hidden), targets, w, **options)

    rows = hidden.reshape(w.shape[0], hidden.shape[-1])
    if v.group is not None:
        rows = SumGradient.apply(rows, v.group)
    limit = chunk_size or max(CHUNK_BYTES // (4 * columns), 1)
    results = on_kept_rows(chunk_losses, rows, targets, w, limit, group=v.group, **options)
    return reduced(results, target, hidden, **options)


def reduced(results, target, x, reduction=None, ignore_index=None, **_):
    """One loss; for reduction="none" the losses in the shape of the items; for log-probabilities,
    where reduction is None, a LogProbs."""
    tokens = x.shape[:-1]
    items = tokens if ignore_index is None else target.shape
    if reduction is None:
        return LogProbs(results[0].view(items), *(y.view(tokens) for y in results[1:]))
    return results[0].view(items) if reduction == "none" else results[0].sum()


# What the arguments share:
# loss_mask    token weights a, bool or any number type, in exactly target's shape
# reduction    "mean" over what is kept, "sum", "none" (a_i * l_i, in target's shape); "sample_mean"
#              is the mean of the samples' own means; a sample is an index of dimension 0, a segment
#              of cu_seqlens, or all of 1-D tokens
# num_items    the divisor over everything that is added up (see token_weights)
# softcap      z = softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118), then / temperature
# vocab_size   columns from there on are padding: they take no part, whatever they hold
# vocab_group  ranks that each hold a part of the columns (or rows of linear_weight), in rank order;
#              all pass the same tokens, labels and mask
# Math and losses are in float32 (float64 for float64 inputs); where nothing is kept the loss is 0.
# Bad types, shapes, devices and options always raise TypeError or ValueError. Bad values (labels,
# weights, cu_seqlens) raise on CPU, and give NaN on other devices.
def masked_cross_entropy(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (...) int32 or int64, or (..., K): several labels a token
    loss_mask: Optional[Tensor] = None,  # like target
    *, ignore_index=-100, reduction="mean", cu_seqlens=None, num_items=None, label_smoothing=0.0,
    z_loss=0.0, softcap=None, temperature=1.0, vocab_size=None, vocab_group=None,
) -> Tensor:
    """l = lse - z_y. ignore_index masks too; label_smoothing is F.cross_entropy's; z_loss adds
    z_loss * lse^2 (PaLM, arXiv 2204.02311).

    >>> masked_cross_entropy(torch.zeros(2, 2), torch.tensor([1, -100])).item()
    0.6931471824645996
    """
    return given_logits(
        label_losses, logits, target, loss_mask, ignore_index=ignore_index, reduction=reduction,
        cu_seqlens=cu_seqlens, num_items=num_items, label_smoothing=label_smoothing, z_loss=z_loss,
        softcap=softcap, temperature=temperature, vocab_size=vocab_size, vocab_group=vocab_group)


def masked_cross_entropy_from_distribution(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (..., V) probabilities, or the teacher's logits
    loss_mask: Optional[Tensor] = None,  # (...)
    *, target_format="probabilities", divergence="cross_entropy", reduction="mean",
    cu_seqlens=None, num_items=None, softcap=None, temperature=1.0, vocab_size=None,
    vocab_group=None,
) -> Tensor:
    """"cross_entropy" -sum q log p, "forward_kl" sum q log(q/p), "reverse_kl" sum p log(p/q).

    q is target, which need not sum to 1, or softmax(target / temperature); it gets no gradient, and
    softcap is not applied to it. The factor temperature^2 of distillation (Hinton et al., arXiv
    1503.02531) is not applied.

    >>> t = torch.tensor([[0.5, 0.25]])
    >>> masked_cross_entropy_from_distribution(torch.zeros(1, 2), t).item()
    0.5198603868484497
    """
    return given_logits(
        distribution_losses, logits, target, loss_mask, target_format=target_format,
        divergence=divergence, reduction=reduction, cu_seqlens=cu_seqlens, num_items=num_items,
        softcap=softcap, temperature=temperature, vocab_size=vocab_size, vocab_group=vocab_group)


def masked_log_probs(
    logits: Tensor,  # (..., V)
    target: Tensor,  # (...) int32 or int64, or (..., K): several labels a token
    loss_mask: Optional[Tensor] = None,  # like target; says only which are kept
    *, ignore_index=-100, softcap=None, temperature=1.0, vocab_size=None, vocab_group=None,
) -> LogProbs:
    """log p of each label; of each token the entropy -sum p log p, and whether no logit is larger
    than its (first) label's. log_prob and entropy are differentiable, both at once or either.

    >>> masked_log_probs(torch.zeros(1, 2), torch.tensor([1])).entropy.tolist()
    [0.6931471824645996]
    """
    return given_logits(
        log_probs, logits, target, loss_mask, ignore_index=ignore_index, softcap=softcap,
        temperature=temperature, vocab_size=vocab_size, vocab_group=vocab_group)


def masked_linear_cross_entropy(
    hidden: Tensor,  # (..., H)
    linear_weight: Tensor,  # (V, H)
    target: Tensor,  # (...) int32 or int64, or (..., K): several labels a token
    loss_mask: Optional[Tensor] = None,  # like target
    *, linear_bias: Optional[Tensor] = None,  # (V,)
    ignore_index=-100, reduction="mean", cu_seqlens=None, num_items=None, label_smoothing=0.0,
    z_loss=0.0, softcap=None, temperature=1.0, vocab_size=None, vocab_group=None, chunk_size=None,
    skip="rows", max_kept=None, logits_dtype=None, recompute=False, allow_retain_graph=False,
) -> Tensor:
    """masked_cross_entropy(F.linear(hidden, linear_weight, linear_bias)), but never all its logits.

    chunk_size    rows whose logits are held at once
    skip          "rows" computes the kept rows (one host sync, for their count), "chunks" the
                  chunks that keep any (one sync), "none" every row
    max_kept      an upper bound on the number of kept rows, known beforehand: no sync; needs
                  skip="rows"; if more are kept, NaN
    logits_dtype  torch.float32: logits are not rounded to bfloat16 (the GEMM's operands are); twice
                  the memory
    recompute     backward computes the logits of the last chunk again, too: least memory
    allow_retain_graph   only masked_ce_triton needs it, for a second backward


    >>> h, w = torch.ones(1, 2), torch.zeros(2, 2)
    >>> masked_linear_cross_entropy(h, w, torch.tensor([1])).item()
    0.6931471824645996
    """
    return from_hidden(
        label_losses, hidden, target, loss_mask, (linear_weight, linear_bias),
        ignore_index=ignore_index, reduction=reduction, cu_seqlens=cu_seqlens, num_items=num_items,
        label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, temperature=temperature,
        vocab_size=vocab_size, vocab_group=vocab_group, chunk_size=chunk_size, skip=skip,
        max_kept=max_kept, logits_dtype=logits_dtype, recompute=recompute)


def masked_linear_log_probs(
    hidden: Tensor,  # (..., H)
    linear_weight: Tensor,  # (V, H)
    target: Tensor,  # (...) int32 or int64, or (..., K): several labels a token
    loss_mask: Optional[Tensor] = None,  # like target; says only which are kept
    *, linear_bias: Optional[Tensor] = None,  # (V,)
    ignore_index=-100, softcap=None, temperature=1.0, vocab_size=None, vocab_group=None,
    chunk_size=None, skip="rows", max_kept=None, logits_dtype=None, recompute=False,
    allow_retain_graph=False,
) -> LogProbs:
    """masked_log_probs(F.linear(hidden, linear_weight, linear_bias)), but never all its logits.
    From chunk_size on the options are those of masked_linear_cross_entropy.

    >>> h, w = torch.ones(1, 2), torch.zeros(2, 2)
    >>> masked_linear_log_probs(h, w, torch.tensor([1])).log_prob.tolist()
    [-0.6931471824645996]
    """
    return from_hidden(
        log_probs, hidden, target, loss_mask, (linear_weight, linear_bias),
        ignore_index=ignore_index, softcap=softcap, temperature=temperature, vocab_size=vocab_size,
        vocab_group=vocab_group, chunk_size=chunk_size, skip=skip, max_kept=max_kept,
        logits_dtype=logits_dtype, recompute=recompute)


def masked_linear_distillation(
    hidden: Tensor,  # (..., H)
    linear_weight: Tensor,  # (V, H)
    teacher_hidden: Tensor,  # (..., H_teacher)
    teacher_weight: Tensor,  # (V, H_teacher)
    loss_mask: Optional[Tensor] = None,  # (...)
    *, linear_bias: Optional[Tensor] = None, teacher_bias: Optional[Tensor] = None,  # (V,)
    divergence="cross_entropy", reduction="mean", cu_seqlens=None, num_items=None, softcap=None,
    teacher_softcap=None, temperature=1.0, chunk_size=None, max_kept=None, recompute=False,
    allow_retain_graph=False,
) -> Tensor:
    """masked_cross_entropy_from_distribution(student's logits, teacher's logits, loss_mask,
    target_format="logits"), a chunk of both at a time. The teacher gets no gradient.
    From chunk_size on the options are those of masked_linear_cross_entropy.

    >>> h, w = torch.ones(1, 2), torch.zeros(2, 2)
    >>> masked_linear_distillation(h, w, h, w, divergence="forward_kl").item()
    0.0
    """
    return from_hidden(
        distribution_losses, hidden, teacher_hidden, loss_mask, (linear_weight, linear_bias),
        (teacher_weight, teacher_bias), divergence=divergence, reduction=reduction,
        cu_seqlens=cu_seqlens, num_items=num_items, softcap=softcap,
        teacher_softcap=teacher_softcap, temperature=temperature, chunk_size=chunk_size,
        max_kept=max_kept, recompute=recompute)
