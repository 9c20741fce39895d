# SPDX-License-Identifier: MIT
"""Masked cross-entropy in plain PyTorch: the reference, and what masked_ce_triton.py must equal.

Every masked loss is a weighted sum of per-token losses,

    L = sum_i w_i * l_i            dL/dlogits_i = w_i * (softmax(logits_i) - target_i)

and mask, reduction, micro-batches, ranks and packing only choose w. w_i = 0 means that the token is
not there: nothing in its row reaches a result, and its gradient is exactly 0, even where the row
holds NaN. So rows are *selected* by w before any arithmetic; `loss * mask` computes 0 * NaN.

Symbols  N tokens, V vocabulary, H hidden size; a_i token weight (the mask), w_i = a_i / divisor
         z = logits after softcap and temperature, m = max z, s = sum exp(z - m), lse = m + log s
         q target probabilities (a label is a one-hot q), t teacher logits, tm = max t
Counts   "2R 1W" beside a step: it reads N*V elements twice and writes them once
Order    weights; row statistics and gradient; the chunked linear path; autograd; the front door
"""
from functools import lru_cache
from numbers import Integral, Real
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.nn.functional import pad

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
REDUCTIONS = ("mean", "sum", "none", "sample_mean")
NAN, INF = float("nan"), float("inf")


# ------------------------------------------------------------------------------------ weights
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
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, got {labels!r}")
    is_mask = labels.is_floating_point() or labels.dtype == torch.bool
    integers = torch.iinfo(torch.int64 if is_mask else labels.dtype)
    fits = isinstance(ignore_index, Integral) and integers.min <= ignore_index <= integers.max
    if labels.dim() == 0 or not (ignore_index == 0 if is_mask else fits):
        raise ValueError(f"labels {tuple(labels.shape)} of {labels.dtype} do not shift with "
                         f"ignore_index={ignore_index}; a mask takes 0")
    flat = labels if cu_seqlens is None else labels.reshape(-1)
    shifted = torch.cat([flat[..., 1:], torch.full_like(flat[..., :1], ignore_index)], -1)
    if cu_seqlens is not None:
        segment, valid = _segments(cu_seqlens, flat)
        shifted[:-1].masked_fill_(segment[1:] != segment[:-1], ignore_index)
        if not is_mask:  # no finite loss from bad segments: a label out of every range
            shifted.masked_fill_(~valid, integers.min)
    return shifted.view(labels.shape)


def token_weights(
    keep: Tensor,  # (...) bool or any number type: the token weights a
    reduction: str = "mean",
    *, cu_seqlens: Optional[Tensor] = None, num_items=None, process_group=None,
) -> Tensor:  # (...) float32, float64 where keep is
    """w = a / sum(a) for "mean", a / (its sample's sum of a) / samples for "sample_mean", else a.

    num_items, a number or 0-dim tensor, replaces the divisor: kept tokens, or samples that keep
    one, over all that is added up. process_group: ranks with other tokens of the *same* samples.

    >>> token_weights(torch.tensor([[1, 1], [1, 0]]), "sample_mean").tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    _choice("reduction", reduction, REDUCTIONS)
    a, divisor = _countable(keep), num_items
    w = a.to(_accumulator(a.dtype), copy=a is keep)
    if num_items is not None:
        if reduction in ("sum", "none"):
            raise ValueError(f"num_items={num_items} replaces the divisor, {reduction!r} has none")
        if not isinstance(num_items, Tensor):
            number = _number("num_items", num_items, lambda n: 0 <= n < INF)
            divisor = w.new_full((), number)  # a fill on the device, where tensor() would copy
        odd = divisor.dtype == torch.bool or divisor.is_complex()
        if divisor.dim() or divisor.requires_grad or odd:
            raise ValueError(f"num_items must be a 0-dim number without grad, got {num_items!r}")
        _check(divisor, lambda n: (n >= 0) & (n < INF),
               lambda _: f"num_items={num_items} is out of range")
    segments = None if cu_seqlens is None else _segments(cu_seqlens, a)
    if reduction in ("mean", "sample_mean"):
        _check(a, lambda a: a >= 0, lambda i: f"{reduction!r} takes token weights of 0 or more, "
                                              f"got {a.reshape(-1)[i].item()} at token {i}")
        if reduction == "sample_mean":
            sums, of_token = _sample_sums(a, cu_seqlens, segments)
            sums = _sum_over(sums, process_group)
            w, samples = (w / of_token(sums)).to(w.dtype), (sums != 0).sum()
        if num_items is None:
            divisor = samples if reduction == "sample_mean" else _sum_over(a.sum(), process_group)
        if a.dtype == torch.bool and reduction == "mean" and num_items is None:
            w = w / divisor.clamp(min=1)  # a count of 0 keeps nothing: no 0/0
        else:
            w = (w / divisor).to(w.dtype).masked_fill((a == 0) | (divisor == 0), 0.0)
            w = w.masked_fill((a < 0) | (divisor < 0) | (divisor == INF), NAN)
    return w if segments is None else torch.where(segments[1], w, NAN)


def count_items(
    keep: Tensor, reduction="mean", *, cu_seqlens: Optional[Tensor] = None, process_group=None
) -> Tensor:  # 0-dim, int64 (floating for "mean" where keep is)
    """The divisor: kept tokens (the sum of `keep`) or samples that keep one, over process_group.

    >>> count_items(torch.tensor([[True, True], [False, False]]), "sample_mean").item()
    1
    """
    _choice("reduction", reduction, ("mean", "sample_mean"))
    a = _countable(keep)
    segments = None if cu_seqlens is None else _segments(cu_seqlens, a)
    counted = a if reduction == "mean" else _sample_sums(a != 0, cu_seqlens, segments)[0] != 0
    count = counted.sum()
    if segments is not None:  # a negative count makes every weight NaN
        count = torch.where(segments[1], count, -1)
    return _sum_over(count, process_group)


def _countable(keep: Tensor) -> Tensor:
    """Bools and integers sum to int64; smaller floats become float32: bf16 cannot hold 257."""
    if not isinstance(keep, Tensor) or keep.is_complex():
        raise TypeError(f"a mask must be a real tensor, got {getattr(keep, 'dtype', type(keep))}")
    if keep.requires_grad:
        raise ValueError(f"a mask must not require grad, got {keep!r}")
    if keep.dtype == torch.bool:
        return keep
    # contiguous, so that a sum adds in the same order however the mask lies in memory
    dtype = _accumulator(keep.dtype) if keep.is_floating_point() else torch.int64
    return keep.to(dtype).contiguous()


def _sample_sums(a: Tensor, cu_seqlens, segments):
    """-> the sum of `a` in each sample, and a function that hands each token its sample's value."""
    if cu_seqlens is None:  # a sample is an index of the first dimension, or the whole of a 1-D one
        shape = (a.shape[0] if a.dim() > 1 else 1, *[1] * (a.dim() - 1))
        sums = a.reshape(shape[0], a.numel() // max(shape[0], 1))
        sums = sums.sum(1, dtype=torch.float64 if a.is_floating_point() else None)
        return sums, lambda x: x.view(shape) if a.dim() else x[0]
    segment, valid = segments
    # float64 counts exactly; segment_reduce adds in a fixed order (index_add_ does not).
    # unsafe=True skips a check that synchronises: offsets that failed ours become empty segments.
    sums = torch.segment_reduce(
        a.reshape(-1).double(), "sum", offsets=cu_seqlens * valid, unsafe=True, initial=0)
    return sums, lambda x: x[segment].view(a.shape)


def _segments(cu_seqlens: Tensor, tokens: Tensor):
    """-> the segment of each flattened token, and a 0-dim bool: do cu_seqlens rise from 0 to N?"""
    n = tokens.numel()
    _expect("cu_seqlens", _meta(cu_seqlens), (None,), tokens.device, INTS)
    if len(cu_seqlens) < 2 and n:
        raise ValueError(f"cu_seqlens must be (samples + 1,), got {tuple(cu_seqlens.shape)}")
    ok = torch.cat([cu_seqlens[:1] == 0, cu_seqlens[1:] >= cu_seqlens[:-1], cu_seqlens[-1:] == n])
    _check(ok, lambda ok: ok, lambda i: f"cu_seqlens must rise from 0 to the {n} tokens; position "
           f"{min(i, len(cu_seqlens) - 1)} of {cu_seqlens.tolist()} does not")
    position = torch.arange(n, device=tokens.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].cummax(0)[0], position, right=True)
    return segment.clamp(max=max(len(cu_seqlens) - 2, 0)), ok.all()


def _sum_over(x: Tensor, group) -> Tensor:
    if _group(group) is not None:
        torch.distributed.all_reduce(x, group=group)
    return x


def _group(group):
    if group is not None and not isinstance(group, torch.distributed.ProcessGroup):
        raise TypeError(f"a group must be a ProcessGroup that this rank is in, got {group!r}")
    return group


# ------------------------------------------------------------------ row statistics and gradient
class Options(NamedTuple):
    """One call's options, checked. Plain values only, so that they pass through a custom op."""

    target_format: str = "labels"  # or "probabilities", "logits"
    divergence: str = "cross_entropy"  # or "forward_kl", "reverse_kl"
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0  # 0: none
    teacher_softcap: float = 0.0
    temperature: float = 1.0
    vocab_group: str = ""  # a process group's name
    per_token: bool = False  # reduction="none"
    early: bool = False  # gradients are made in forward
    needs: Tuple[bool, bool, bool] = (False,) * 3  # gradients of hidden (or logits), weight, bias
    # and for the linear path
    skip: str = "rows"  # or "chunks", "none"
    chunk_size: int = 0  # 0: see chunk()
    max_kept: int = -1  # -1: not given
    dtype: torch.dtype = torch.float32  # of the GEMM operands: autocast's, or the tensors' own
    retain_graph: bool = False

    def shard(self, columns: int):
        """-> process group or None, the first column held here, the whole vocabulary's size."""
        if not self.vocab_group:
            return None, 0, columns
        group = torch.distributed.distributed_c10d._resolve_process_group(self.vocab_group)
        return group, group.rank() * columns, group.size() * columns

    def chunk(self, rows: int, weight: Tensor, buffers: int) -> int:
        """Rows in a chunk, all even: at most 2H, or as many as 2.5 GiB of logits hold. Twice that
        stays one chunk where a second would need a grad_weight in float32, and passes over it."""
        vocab, hidden = weight.shape
        limit = self.chunk_size
        if not limit:
            limit = max(2 * hidden, 5 * 2**29 // (vocab * self.dtype.itemsize)) // buffers
            if self.needs[1] and weight.dtype == torch.bfloat16 and rows <= 2 * limit:
                limit *= 2
        chunks = max(-(-rows // limit), 1)
        return max(-(-rows // chunks), 1)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _finite(m: Tensor) -> Tensor:
    """A maximum to subtract: -inf - -inf is NaN, exp(-inf - 0) is the 0 that is meant."""
    return torch.where(m == -INF, 0.0, m)


def _selected(x: Tensor, w: Tensor, softcap=0.0, temperature=1.0) -> Tensor:
    """Rows of weight 0 become zeros; then softcap and temperature. 2R 2W"""
    x = torch.where((w != 0)[:, None], x, 0.0).to(_accumulator(x.dtype)).contiguous()
    return (softcap * torch.tanh(x / softcap) if softcap else x) / temperature


def _target(target, z, w, o: Options, tm=None):
    """-> q and log q before q is divided by its row sum, and tm. 2R 2W"""
    if o.target_format == "logits":
        t = _selected(target.to(z.dtype), w, o.teacher_softcap, o.temperature)
        tm = t.amax(1, keepdim=True) if tm is None else tm
        return (t - _finite(tm)).exp(), t - _finite(tm), tm
    if o.target_format == "labels":
        _, first, vocab_size = o.shard(z.shape[1])
        columns = torch.arange(first, first + z.shape[1], device=z.device)
        q = (columns == target[:, None]).to(z.dtype) * (1 - o.label_smoothing)
        q = q + o.label_smoothing / vocab_size
    else:
        q = _selected(target.to(z.dtype), w)
    log_q = None if o.divergence == "cross_entropy" else q.log()
    return q, log_q, torch.zeros_like(z[:, :1])


def shard_statistics(logits, target, w, o: Options) -> Tensor:  # (n, V), ..., (n,) -> (5, n)
    """x, m, s, tm and ts = sum q of the columns held here; `finish` makes the loss of them.

    x is what the target needs, relative to the maxima, or a common offset of 1e8 would eat it:
    sum q (m - z), forward KL sum q (log q + m - z), reverse KL sum e^(z - m) (z - m - log q).
    """
    z = _selected(logits, w, o.softcap, o.temperature)
    q, log_q, tm = _target(target, z, w, o)
    m = z.amax(1, keepdim=True)  # 1R
    below = z - _finite(m)  # 1R 1W
    e = below.exp()  # 1R 1W
    if o.divergence == "reverse_kl":  # where, because 0 * -inf is 0 here: 4R 3W
        x = torch.where(e != 0, e * (below - log_q), 0.0)
    else:
        log_ratio = (log_q if o.divergence == "forward_kl" else 0.0) - below
        x = torch.where(q != 0, q * log_ratio, 0.0)
    return torch.stack([x.sum(1), m[:, 0], e.sum(1), tm[:, 0], q.sum(1)])  # 3R


def merge(parts: Tensor, o: Options) -> Tensor:  # (ranks, 5, n) -> (5, n)
    """Statistics of vocabulary shards to those of the whole: terms move to the common m and tm."""
    x, m, s, tm, ts = parts.unbind(1)
    dm, dt = m - _finite(m.amax(0)), tm - _finite(tm.amax(0))
    s_scale, t_scale = dm.exp(), dt.exp()
    dm, dt = _finite(dm), _finite(dt) if o.divergence != "cross_entropy" else 0.0
    reverse = o.divergence == "reverse_kl"
    scale, mass, shift = (s_scale, s, dm - dt) if reverse else (t_scale, ts, dt - dm)
    # Where the mass or its scale is 0 there is nothing to move, and inf * 0 would be NaN.
    x = torch.where(scale != 0, (x + torch.where(mass != 0, mass * shift, 0.0)) * scale, 0.0).sum(0)
    return torch.stack([x, m.amax(0), (s * s_scale).sum(0), tm.amax(0), (ts * t_scale).sum(0)])


def finish(stats: Tensor, target, w, o: Options, vocab_size: int):
    """-> the statistics with the loss in place of x, and w * loss after them: (6, n)."""
    x, m, s, tm, ts = stats
    mass, whole = _sums(ts, o)
    if o.divergence == "reverse_kl":
        loss = x / s - s.log() + whole.log()
    else:
        loss = x / whole + s.log() * mass - (whole.log() if o.divergence == "forward_kl" else 0.0)
    if o.target_format == "labels":
        loss = loss + o.z_loss * (m + s.log()) ** 2 if o.z_loss else loss
        known = (0 <= target) & (target < vocab_size)
        loss, s = torch.where(known, loss, NAN), torch.where(known, s, NAN)  # s: for the gradient
    return torch.stack([loss, m, s, tm, ts, torch.where(w != 0, w * loss, 0.0)])


def _sums(ts: Tensor, o: Options):
    """-> what q sums to (probabilities need not sum to 1), and what it is yet to be divided by."""
    one = torch.ones_like(ts)
    return {"labels": (one, one), "probabilities": (ts, one), "logits": (one, ts)}[o.target_format]


@torch.no_grad()
def row_statistics(logits, target, w, o: Options, shard=shard_statistics) -> Tensor:  # (6, n)
    """See `finish`. With a vocab_group: one all_gather of 5 floats a row."""
    stats = shard(logits, target, w, o)
    group, _, vocab_size = o.shard(logits.shape[1])
    if group is not None:  # one more column tells the width, so that uneven shards give NaN
        mine = torch.cat([stats, stats.new_full((5, 1), logits.shape[1])], 1)
        parts = mine.new_empty(group.size(), *mine.shape)
        torch.distributed.all_gather(list(parts.unbind(0)), mine, group=group)
        even = (parts[:, :, -1] == logits.shape[1]).all()
        stats = torch.where(even, merge(parts[:, :, :-1], o), NAN)
    return finish(stats, target, w, o, vocab_size)


@torch.no_grad()
def row_gradient(logits, target, w, upstream, stats, o: Options, out=None) -> Tensor:  # (n, V)
    """c * dl/dlogits, c = w * upstream, rounded once, 0 where c is. `out` may be the logits."""
    c = w if upstream is None else torch.where(w != 0, w * upstream, 0.0)
    loss, m, s, tm, ts, _ = stats[:, :, None]
    z = _selected(logits, w, o.softcap, o.temperature)
    p = (z - m).exp() / s  # 3R 3W
    q, log_q, _ = _target(target, z, w, o, tm)
    mass, whole = _sums(ts, o)
    if o.divergence == "reverse_kl":  # 5R 5W
        grad = torch.where(p != 0, p * ((z - m) - s.log() - (log_q - whole.log()) - loss), 0.0)
    else:  # softmax - 1 before anything is rounded: 3R 3W
        grad = p * (mass + 2 * o.z_loss * (m + s.log()) if o.z_loss else mass) - q / whole
    if o.softcap:
        # 1 - tanh^2, from the logit: from tanh nothing would be left of it near 1. 6R 6W
        e = (-2 / o.softcap * _selected(logits, w).abs()).exp()
        grad = grad * (4 * e / (1 + e) ** 2)
    grad = grad * (c / o.temperature)[:, None]  # 1R 1W
    grad = torch.where((c != 0)[:, None], grad, 0.0).to(logits.dtype)  # 2R 2W
    return grad if out is None else out.copy_(grad)


# ------------------------------------------------------------------------ the chunked linear path
HALF_SCALE = 256.0  # float16 rows are held times this, so that p = 6e-8 has more than one bit


def gemm(out: Tensor, a: Tensor, b: Tensor, add: Optional[Tensor] = None) -> Tensor:
    """out = a @ b, or add + a @ b, accumulated in float32 and rounded once to out's dtype."""
    cast = {} if a.dtype == out.dtype else dict(out_dtype=out.dtype)
    if cast and not a.is_cuda:  # only CUDA has out_dtype
        a, b, cast = a.to(out.dtype), b.to(out.dtype), {}
    if add is None:
        return torch.mm(a, b, out=out, **cast)
    return torch.addmm(add, a, b, out=out, **cast)


def linear_chunks(kernels, o: Options, hidden, weight, bias, target, teacher_weight, teacher_bias,
                  w, upstream=None, stats=None, count=None, *, prepared=None):
    """A pass over chunks of rows: logits into one buffer, statistics, and (if a gradient is wanted)
    the buffer turned into w * (softmax - target) in place and multiplied out while it is there.

    Legal because the loss is a scalar: its upstream gradient can be applied later. reduction="none"
    has a vector of them; then forward keeps the statistics, and backward passes again with both.
    float16: rows stay of order 1 in the buffer. The coefficients c go to hidden, relative to the
    largest, and to grad_hidden, and gradients stay float32 until the upstream gradient is applied.

    See loss_pass for what it returns: here a gradient is empty where not wanted.
    """
    (N, H), V, acc, forward = hidden.shape, len(weight), w.dtype, stats is None
    half = o.dtype == torch.float16
    padded, teacher = int(o.max_kept >= 0), int(teacher_weight is not None)  # dynamo adds no bools
    needs = [need and (o.early or not forward) for need in o.needs]
    (need_hidden, need_weight, need_bias), group = needs, o.shard(V)[0]
    scale = HALF_SCALE * min(o.temperature, 1.0)
    coefficients = w if forward else torch.where(w != 0, w * upstream, 0.0)

    heads = [None if x is None else x.to(o.dtype)
             for x in (weight, bias, teacher_weight, teacher_bias)]
    n, size, index, fill = N, o.chunk(N, weight, 1 + teacher), None, 0.0  # n rows are computed
    if o.skip != "none":
        keep = w
        if o.skip == "chunks":
            chunks = pad(w != 0, (0, -N % size)).view(-1, size)
            keep = chunks.any(1, keepdim=True).expand_as(chunks).reshape(-1)[:N]
        index, kept = prepared or kernels.kept(keep)
        if padded:  # more kept rows than max_kept: NaN everywhere instead of a silent drop
            n = min(max(o.max_kept, 1), N)  # one row at least, to be NaN
            fill = torch.where(kept > o.max_kept, NAN, 0.0).to(acc)
            coefficients = pad(coefficients + fill, (0, 1))
        elif count is None:
            n = int(kept)  # the one host sync
        else:
            n = count.tolist()[0]  # backward takes forward's rows without another look
        index = index[:n] if padded or n < N else None  # padding points one past the end
        size = o.chunk(n, weight, 1 + teacher) if o.skip == "rows" else size
    every = forward and o.skip == "rows" and not padded  # every computed row counts

    def rows(x, at):
        return x[at] if index is None else x.index_select(0, at)

    def head(x, at, void, weight, bias, out):
        x = rows(x, at).to(o.dtype)
        x = x if void is None else x.masked_fill(void, 0.0)
        return x, gemm(out[: len(x)], x, weight.t(), bias)

    parts = []
    buffers = w.new_empty((1 + teacher, min(n, size), V), dtype=o.dtype)
    for start in range(0, max(n, 1), size):  # no row at all is a chunk of none
        to = at = slice(start, start + size) if index is None else index[start : start + size]
        if padded:
            at = to.clamp(max=N - 1)
        c = rows(coefficients, to)
        void = None if every else (c == 0)[:, None]
        h, z = head(hidden, at, void, *heads[:2], buffers[0])
        if start == 0:  # what follows was left until the first GEMM is on its way
            peak = coefficients.abs().amax() if half and N else 1.0
            grad_hidden = hidden.new_empty((N + padded if need_hidden else 0, H),
                                           dtype=acc if half else hidden.dtype).fill_(fill)
            grad_weight = weight.new_empty((V if need_weight else 0, H),
                                           dtype=acc if half or n > size else weight.dtype)
            grad_bias = w.new_empty(1, V if need_bias else 0)
        t = head(target, at, void, *heads[2:], buffers[1])[1] if teacher else rows(target, at)
        if forward and not half:
            part, g = kernels.row_pass(z, t, c, any(needs), o, z)
        else:
            part = kernels.row_statistics(z, t, c, o) if forward else stats[:, at].contiguous()
            flat = c  # the coefficient in the buffer
            if half:  # over the factor by which an entry can exceed 1: no overflow
                loss, m, s = part[:3]
                excess = loss if o.divergence == "reverse_kl" else o.z_loss * (m + s.log())
                bound = (1 + 2 * excess.abs()).clamp(max=1e30)
                bound = torch.where(c != 0, bound, 1.0)
                flat, c = torch.where(c != 0, scale / bound, 0.0).to(acc), c * bound
            g = kernels.row_gradient(z, t, flat, None, part, o, z) if any(needs) else None
        parts.append(part)
        if need_hidden:
            direct = index is None and group is None
            d = grad_hidden[to] if direct else h.new_empty(
                h.shape, dtype=acc if half or group is not None else hidden.dtype)
            d = _sum_over(gemm(d, g, heads[0]), group)
            d = d.mul_((c / scale)[:, None]) if half else d
            d = d if void is None else d.masked_fill_(void, 0.0)
            if index is not None:
                grad_hidden.index_copy_(0, to, d.to(grad_hidden.dtype))
            elif not direct:
                grad_hidden[to].copy_(d)
        if half or need_bias:  # c in hidden
            share = torch.where(c != 0, c / peak if half else 1.0, 0.0).to(o.dtype)[:, None]
        if need_weight:
            gemm(grad_weight, g.t(), h * share if half else h, grad_weight if start else None)
        if need_bias:
            gemm(grad_bias, share.t(), g, grad_bias if start else None)
    if half:
        grad_weight, grad_bias = (x.mul_(peak / scale) for x in (grad_weight, grad_bias))
    grads = grad_hidden[:N], grad_weight if half else grad_weight.to(weight.dtype), grad_bias[0]
    if not forward:
        return grads
    stats = torch.cat(parts, 1)
    if o.per_token and index is not None:
        whole = w.new_empty((6, N + padded)).fill_(fill)
        stats = whole.index_copy_(1, index, stats)[:, :N].contiguous()
    loss, stats = (stats[5].clone(), stats) if o.per_token else (stats[5].sum(), None)
    return loss, stats, torch.tensor([n], device="cpu"), *grads


# --------------------------------------------------------------------------------------- autograd
def loss_pass(kernels, o: Options, *tensors, prepared=None):
    """-> the loss, and what backward may need: stats, count, three gradients; None where unused.

    tensors: x, weight, bias, target, teacher_weight, teacher_bias, w; x are hidden states, or where
    weight is None logits. Then in backward upstream, stats, count: only the gradients are given.
    """
    if tensors[1] is not None:
        with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            return linear_chunks(kernels, o, *tensors, prepared=prepared)
    x, _, _, target, _, _, w, *saved = tensors
    if saved:
        upstream, stats = saved[0].expand(len(w)), saved[1]
        return kernels.row_gradient(x, target, w, upstream, stats, o), None, None
    stats, grad = kernels.row_pass(x, target, w, o.early, o, prepared)
    return stats[5].clone() if o.per_token else stats[5].sum(), stats, None, grad, None, None


def loss_setup(ctx, kernels, tensors, o: Options, output):
    ctx.set_materialize_grads(False)
    again = tensors[1] is None or not o.early  # given logits stay with the caller anyway
    wanted = [x if need else None for x, need in zip(tensors, o.needs)]
    ctx.save_for_backward(*(tensors if again else wanted), *output[1:])
    ctx.kernels, ctx.options, ctx.again, ctx.spent = kernels, o, again, False


def loss_gradients(ctx, saved, upstream):
    o, kernels = ctx.options, ctx.kernels
    if o.early and not ctx.spent:
        return [kernels.scaled(ctx, grad, upstream, x.dtype) if need else None
                for grad, x, need in zip(saved[-3:], saved, o.needs)]
    if not ctx.again:
        raise RuntimeError("the first backward scaled the saved gradients in place and gave them "
                           "away: a second one needs allow_retain_graph=True")
    grads = kernels.gradients(o, *saved[:7], upstream, *saved[7:9])
    return [grad.to(x.dtype) if need else None for grad, x, need in zip(grads, saved, o.needs)]


class FirstOrder(torch.autograd.Function):
    """loss_gradients, which nobody may differentiate, by upstream or the three inputs.
    (torch's once_differentiable cuts them off from the inputs: asked for those, it gives zeros.)"""

    @staticmethod
    def forward(ctx, loss_ctx, saved, upstream, *inputs):
        grads = loss_gradients(loss_ctx, saved, upstream)
        return tuple(x if x is None else x.data for x in grads)  # no views: one may change them

    @staticmethod
    def backward(ctx, *_):
        raise RuntimeError("masked losses are once_differentiable: their gradients are not")


def loss_backward(ctx, upstream, *_):
    """Gradients of the first three inputs, None for the others."""
    grads = (None,) * 3
    if upstream is not None:
        saved = ctx.saved_tensors  # once: under torch.utils.checkpoint a second look is an error
        if torch.is_grad_enabled():  # create_graph=True
            grads = FirstOrder.apply(ctx, saved, upstream, *saved[:3])
        else:
            grads = loss_gradients(ctx, saved, upstream)
    return (*grads, *(None,) * (len(ctx.needs_input_grad) - 3))


class Loss(torch.autograd.Function):
    """Takes loss_pass's output: after the pass autograd's own work runs beside the GPU's."""

    @staticmethod
    def forward(ctx, x, weight, bias, kernels, tensors, o, output):
        loss_setup(ctx, kernels, tensors, o, output)
        return output[0]

    backward = staticmethod(loss_backward)


# -------------------------------------------------------------------------------------- front door
class Meta(NamedTuple):
    """What the checks may see of a tensor. It has a hash: a call like an earlier one skips them,
    for the GPU waits meanwhile."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def _meta(x):
    return Meta(x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, Tensor) else x


def _expect(name, x, shape, device=None, dtypes=FLOATS) -> None:
    """TypeError or ValueError unless x is such a Meta. None: any dtype, any size but 0."""
    if not isinstance(x, Meta) or dtypes and x.dtype not in dtypes:
        raise TypeError(f"{name} must be a tensor of {dtypes or 'any dtype'}, got {x!r:.200}")
    sizes = zip(x.shape, shape)
    if len(x.shape) != len(shape) or any(not n if m is None else n != m for n, m in sizes):
        raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")


def _choice(name, x, choices) -> None:
    if x not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {x!r}")


def _number(name, x, valid, kind=Real, none=None):
    """x, or `none` where x may be None and is; TypeError or ValueError if it is not valid."""
    if x is None and none is not None:
        return none
    if not isinstance(x, kind) or isinstance(x, bool):
        raise TypeError(f"{name} must be a number, got {x!r}")
    number = int(x) if kind is Integral else float(x)
    if not valid(number):
        raise ValueError(f"{name}={x} is out of range")
    return number


def _check(x: Tensor, valid, message) -> None:
    """ValueError(message(first offender)) on CPU. Elsewhere it would synchronise, and under
    torch.compile it cannot raise: there the callers make NaN. (torch.equal needs no item().)"""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        ok = valid(x)
        if not torch.equal(ok, torch.ones_like(ok)):
            raise ValueError(message(int((~ok).flatten().nonzero()[0])))


@lru_cache(maxsize=1024, typed=True)  # typed: True is not 1 here
def _options(
    linear, fused, grad_mode, autocast, x, target, loss_mask, weight, bias, teacher_weight,
    teacher_bias, reduction, softcap, temperature, ignore_index, vocab_group, *,
    target_format="labels", divergence="cross_entropy", label_smoothing=0.0, z_loss=0.0,
    teacher_softcap=None, chunk_size=None, skip="rows", max_kept=None, retain_graph=False,
) -> Options:
    """Checks all that needs no look at a value. Tensors come as Meta."""
    labels, shape = target_format == "labels", getattr(x, "shape", ())[:-1]
    _expect("hidden" if linear else "logits", x, (*shape, None))
    _choice("divergence", divergence, ("cross_entropy", "forward_kl", "reverse_kl"))
    _choice("skip", skip, ("rows", "chunks", "none"))
    _choice("reduction", reduction, REDUCTIONS)
    if max_kept is not None and skip != "rows":
        raise ValueError(f"max_kept={max_kept} goes with skip='rows', got skip={skip!r}")
    dtype, device = x.dtype, x.device
    if linear:
        dtypes = (dtype,) if autocast is None else FLOATS
        if autocast is not None and dtype != torch.float64:
            dtype = autocast
        _expect("linear_weight", weight, (None, x.shape[-1]), device, dtypes)
        for name, b in ("linear_bias", bias), ("teacher_bias", teacher_bias):
            if b is not None:
                _expect(name, b, weight.shape[:1], device, dtypes)
    if labels:
        _expect("target", target, shape, device, INTS)
        limits = torch.iinfo(target.dtype)
        _number("ignore_index", ignore_index, lambda i: limits.min <= i <= limits.max, Integral)
    elif linear:
        _expect("teacher_hidden", target, (*shape, None), device, dtypes)
        vocab, width = weight.shape[0], target.shape[-1]
        _expect("teacher_weight", teacher_weight, (vocab, width), device, dtypes)
    else:
        _expect("target", target, x.shape, device)
    if loss_mask is not None:
        _expect("loss_mask", loss_mask, shape, device, dtypes=None)
    needs = tuple(grad_mode and y is not None and y.requires_grad for y in (x, weight, bias))
    fused = linear or dtype in fused
    return Options(
        target_format, divergence,
        _number("label_smoothing", label_smoothing, lambda x: 0 <= x <= 1),
        _number("z_loss", z_loss, lambda x: 0 <= x < INF),
        _number("softcap", softcap, lambda x: 0 < x < INF, none=0.0),
        _number("teacher_softcap", teacher_softcap, lambda x: 0 < x < INF, none=0.0),
        _number("temperature", temperature, lambda x: 0 < x < INF),
        vocab_group, per_token=reduction == "none", needs=needs,
        early=reduction != "none" and any(needs) and fused, skip=skip, dtype=dtype,
        retain_graph=bool(retain_graph),
        chunk_size=_number("chunk_size", chunk_size, lambda x: x >= 1, Integral, none=0),
        max_kept=_number("max_kept", max_kept, lambda x: x >= 0, Integral, none=-1))


class MaskedCrossEntropy:
    """The four losses over one set of row kernels; a subclass replaces the methods before them.

    loss_mask    (...) token weights a, bool or any number type, in exactly the shape of the tokens
    reduction    "mean" over kept tokens, "sum", "none" (a_i * l_i, (...)), "sample_mean": the mean
                 of the samples' means; a sample: an index of dimension 0, a segment of cu_seqlens
    num_items    the divisor over everything that is added up (see token_weights)
    softcap      z = softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118), / temperature
    vocab_group  ranks that each hold V / ranks columns (rows of linear_weight), in rank order
    All: math in float32 (float64 for it), TypeError or ValueError for bad types, shapes, devices
    and options; for bad values (labels, weights, cu_seqlens) on CPU, but elsewhere NaN.
    """

    row_statistics = staticmethod(row_statistics)
    row_gradient = staticmethod(row_gradient)
    gradients = loss_pass  # with upstream, stats and count
    fused = ()  # dtypes of given logits whose gradient row_pass makes together with the loss

    def loss(self, o, prepared, *tensors):
        output = loss_pass(self, o, *tensors, prepared=prepared)
        return Loss.apply(*tensors[:3], self, tensors, o, output)

    def row_pass(self, logits, target, w, gradient, o, out=None):
        """Statistics, and if asked for the gradient, in `out` (logits, or `prepared`)."""
        stats = self.row_statistics(logits, target, w, o)
        return stats, self.row_gradient(
            logits, target, w, None, stats, o, out) if gradient else None

    def kept(self, keep):  # (N,) -> (N,), 0-dim, both int64
        """The indices where `keep` is not 0, then N; and how many they are."""
        index = torch.nonzero_static(keep, size=len(keep), fill_value=len(keep))[:, 0]
        return index, (keep != 0).sum()

    def __reduce__(self):  # pickled by name: there is one a module
        return "_losses"

    def scaled(self, ctx, grad, upstream, dtype):
        """A gradient that was made in forward, times the upstream one; 0 stays 0 even times inf."""
        return torch.where(grad == 0, 0.0, grad.to(_accumulator(grad.dtype)) * upstream).to(dtype)

    def masked_cross_entropy(
        self, logits: Tensor,  # (..., V)
        target: Tensor,  # (...) int32 or int64
        loss_mask: Optional[Tensor] = None,  # (...)
        *, ignore_index=-100, reduction="mean", cu_seqlens=None, num_items=None,
        label_smoothing=0.0, z_loss=0.0, softcap=None, temperature=1.0, vocab_group=None,
    ) -> Tensor:
        """l = lse - z_y. ignore_index masks too; label_smoothing is F.cross_entropy's; z_loss adds
        z_loss * lse^2 (PaLM, arXiv 2204.02311).

        >>> masked_cross_entropy(torch.zeros(2, 2), torch.tensor([1, -100])).item()
        0.6931471824645996
        """
        return self._loss(
            logits, target, loss_mask, reduction, cu_seqlens, num_items, softcap, temperature,
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss,
            vocab_group=vocab_group)

    def masked_cross_entropy_from_distribution(
        self, logits: Tensor,  # (..., V)
        target: Tensor,  # (..., V) probabilities, or the teacher's logits
        loss_mask: Optional[Tensor] = None,  # (...)
        *, target_format="probabilities", divergence="cross_entropy", reduction="mean",
        cu_seqlens=None, num_items=None, softcap=None, temperature=1.0, vocab_group=None,
    ) -> Tensor:
        """-sum q log p, "forward_kl" sum q log(q/p), "reverse_kl" sum p log(p/q); no T^2 (Hinton,
        arXiv 1503.02531). q = target, which need not sum to 1, or softmax(target / temperature).

        >>> t = torch.tensor([[0.5, 0.25]])
        >>> masked_cross_entropy_from_distribution(torch.zeros(1, 2), t).item()
        0.5198603868484497
        """
        _choice("target_format", target_format, ("probabilities", "logits"))
        return self._loss(
            logits, target, loss_mask, reduction, cu_seqlens, num_items, softcap, temperature,
            target_format=target_format, divergence=divergence, vocab_group=vocab_group)

    def masked_linear_cross_entropy(
        self, hidden: Tensor,  # (..., H)
        linear_weight: Tensor,  # (V, H)
        target: Tensor,  # (...) int32 or int64
        loss_mask: Optional[Tensor] = None,  # (...)
        *, linear_bias: Optional[Tensor] = None,  # (V,)
        ignore_index=-100, reduction="mean", cu_seqlens=None, num_items=None, label_smoothing=0.0,
        z_loss=0.0, softcap=None, temperature=1.0, vocab_group=None, chunk_size=None, skip="rows",
        max_kept=None, allow_retain_graph=False,
    ) -> Tensor:
        """masked_cross_entropy(F.linear(hidden, linear_weight, linear_bias)) without its (N, V).

        skip="rows" gathers the kept rows (one host sync, for their count); "chunks" leaves out
        chunks that keep nothing (one sync); "none" computes every row. max_kept: a bound on the
        kept rows that the caller knows, no sync; more than that give NaN. allow_retain_graph: a
        second backward through the same graph is right (else it may be an error).

        >>> h, w = torch.ones(1, 2), torch.zeros(2, 2)
        >>> masked_linear_cross_entropy(h, w, torch.tensor([1])).item()
        0.6931471824645996
        """
        return self._loss(
            hidden, target, loss_mask, reduction, cu_seqlens, num_items, softcap, temperature,
            heads=(linear_weight, linear_bias, None, None), ignore_index=ignore_index,
            label_smoothing=label_smoothing, z_loss=z_loss, vocab_group=vocab_group,
            chunk_size=chunk_size, skip=skip, max_kept=max_kept, retain_graph=allow_retain_graph)

    def masked_linear_distillation(
        self, hidden: Tensor,  # (..., H)
        linear_weight: Tensor,  # (V, H)
        teacher_hidden: Tensor,  # (..., H_teacher)
        teacher_weight: Tensor,  # (V, H_teacher)
        loss_mask: Optional[Tensor] = None,  # (...)
        *, linear_bias: Optional[Tensor] = None, teacher_bias: Optional[Tensor] = None,  # (V,)
        divergence="cross_entropy", reduction="mean", cu_seqlens=None, num_items=None, softcap=None,
        teacher_softcap=None, temperature=1.0, chunk_size=None, max_kept=None,
        allow_retain_graph=False,
    ) -> Tensor:
        """masked_cross_entropy_from_distribution on both heads' logits, a chunk of each at a time.

        The teacher gets no gradient. The rest is as in masked_linear_cross_entropy.

        >>> h, w = torch.ones(1, 2), torch.zeros(2, 2)
        >>> masked_linear_distillation(h, w, h, w, divergence="forward_kl").item()
        0.0
        """
        return self._loss(
            hidden, teacher_hidden, loss_mask, reduction, cu_seqlens, num_items, softcap,
            temperature, heads=(linear_weight, linear_bias, teacher_weight, teacher_bias),
            target_format="logits", divergence=divergence, teacher_softcap=teacher_softcap,
            chunk_size=chunk_size, max_kept=max_kept, retain_graph=allow_retain_graph)

    def prepare(
        self, o, linear, x, target, loss_mask, ignore_index, reduction, cu_seqlens, num_items
    ):
        """-> w of each token, (n,), and what else a subclass found for the pass, or None."""
        labels, acc = o.target_format == "labels", _accumulator(x.dtype)
        if loss_mask is not None:
            a = _countable(loss_mask)
            a = a.masked_fill(target == ignore_index, 0) if labels else a
        elif labels:
            a = target != ignore_index
        elif reduction == "mean" and cu_seqlens is None and num_items is None:  # 1 / N, all of them
            n = x.numel() // x.shape[-1]
            return x.new_full((n,), 1 / max(n, 1), dtype=acc), None
        else:
            a = x.new_ones(x.shape[:-1], dtype=torch.bool)
        a = a.double() if x.dtype == torch.float64 else a
        w = token_weights(a, reduction, cu_seqlens=cu_seqlens, num_items=num_items)
        return w.to(acc).reshape(-1), None

    def _loss(
        self, x, target, loss_mask, reduction, cu_seqlens, num_items, softcap, temperature, *,
        heads=None, ignore_index=-100, vocab_group=None, **options,
    ):
        """Checks, weights, the op. x are logits (..., V), or with heads hidden states (..., H)."""
        linear = heads is not None
        weight, bias, teacher_weight, teacher_bias = heads or (None,) * 4
        compiling, autocast = torch.compiler.is_compiling(), None
        if linear and isinstance(x, Tensor) and torch.is_autocast_enabled(x.device.type):
            autocast = torch.get_autocast_dtype(x.device.type)
        args = (
            linear, () if compiling else self.fused, torch.is_grad_enabled(), autocast,
            *map(_meta, (x, target, loss_mask, weight, bias, teacher_weight, teacher_bias)),
            reduction, softcap, temperature, ignore_index,
            "" if _group(vocab_group) is None else vocab_group.group_name)
        try:
            o = None if compiling else _options(*args, **options)
        except TypeError:  # maybe an argument has no hash: _options says which, and what is wrong
            o = None
        o = _options.__wrapped__(*args, **options) if o is None else o
        w, prepared = self.prepare(
            o, linear, x, target, loss_mask, ignore_index, reduction, cu_seqlens, num_items)
        shape = x.shape[:-1]
        if o.target_format == "labels":
            target = target if target.dim() == 1 else target.reshape(-1)
            vocab = lambda: o.shard(len(weight) if linear else x.shape[-1])[2]
            _check(target, lambda y: (w == 0) | ((0 <= y) & (y < vocab())), lambda i: f"label "
                   f"{target[i].item()} at token {i}, not in [0, {vocab()}) or ignored")
        else:
            target = target.detach().reshape(-1, target.shape[-1])
        x = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        x = x.contiguous() if linear else x
        teacher = [None if y is None else y.detach() for y in (teacher_weight, teacher_bias)]
        loss = self.loss(o, prepared, x, weight, bias, target, *teacher, w)
        return loss.view(shape) if reduction == "none" else loss


_losses = MaskedCrossEntropy()
masked_cross_entropy = _losses.masked_cross_entropy
masked_cross_entropy_from_distribution = _losses.masked_cross_entropy_from_distribution
masked_linear_cross_entropy = _losses.masked_linear_cross_entropy
masked_linear_distillation = _losses.masked_linear_distillation
