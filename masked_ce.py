# SPDX-License-Identifier: MIT
"""Masked cross-entropy in plain PyTorch: the reference, and the specification of masked_ce_triton.py.

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
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
NAN, INF = float("nan"), float("inf")


# ------------------------------------------------------------------------------------ weights
def shift_labels(
    labels: Tensor,  # (..., T)
    ignore_index: int = -100,
    cu_seqlens: Optional[Tensor] = None,  # (samples + 1,) int
) -> Tensor:  # (..., T)
    """Position i gets the label of token i + 1, the last position of a sample `ignore_index`.

    A loss mask shifts the same way, with ignore_index=0. With cu_seqlens a sample is a segment of the
    flattened tokens. ValueError: no token axis; an ignore_index that the dtype cannot hold.

    >>> shift_labels(torch.tensor([5, 6, 7, 8, 9]), cu_seqlens=torch.tensor([0, 3, 5])).tolist()
    [6, 7, -100, 9, -100]
    """
    is_mask = labels.is_floating_point() or labels.dtype == torch.bool
    low = 0 if is_mask else torch.iinfo(labels.dtype).min
    high = 0 if is_mask else torch.iinfo(labels.dtype).max
    if labels.dim() == 0 or not low <= ignore_index <= high:
        raise ValueError(f"labels {tuple(labels.shape)} of {labels.dtype} do not shift with "
                         f"ignore_index={ignore_index}; a mask takes 0")
    flat = labels if cu_seqlens is None else labels.reshape(-1)
    shifted = torch.cat([flat[..., 1:], torch.full_like(flat[..., :1], ignore_index)], -1)
    if cu_seqlens is not None:
        segment, valid = _segments(cu_seqlens, flat)
        shifted[:-1].masked_fill_(segment[1:] != segment[:-1], ignore_index)
        if not is_mask:  # no finite loss from bad segments: a label out of every range
            shifted.masked_fill_(~valid, low)
    return shifted.view(labels.shape)


def token_weights(
    keep: Tensor,  # (...) bool or any number type: the token weights a
    reduction: str = "mean",
    *, cu_seqlens: Optional[Tensor] = None, num_items=None, process_group=None,
) -> Tensor:  # (...) float32, float64 where keep is
    """w = a / sum(a) for "mean", a / (its sample's sum of a) / samples for "sample_mean", else a.

    num_items, a number or 0-dim tensor, replaces the divisor: kept tokens, or samples that keep one,
    over everything that is added up. process_group: ranks with other tokens of the *same* samples.

    >>> token_weights(torch.tensor([[1, 1], [1, 0]]), "sample_mean").tolist()
    [[0.25, 0.25], [0.5, 0.0]]
    """
    _choice("reduction", reduction, ("mean", "sum", "none", "sample_mean"))
    a, divisor = _countable(keep), num_items
    w = a.to(_accumulator(a.dtype))
    if num_items is not None:
        if reduction in ("sum", "none"):
            raise ValueError(f"num_items={num_items} replaces the divisor, {reduction!r} has none")
        if not isinstance(num_items, Tensor):
            _number("num_items", num_items, lambda n: 0 <= n < INF)
            divisor = w.new_full((), num_items)  # a fill on the device, where tensor() would copy
        if divisor.dim() or divisor.requires_grad or divisor.dtype == torch.bool:
            raise ValueError(f"num_items must be a 0-dim number without grad, got {num_items!r}")
        _check(divisor, lambda n: n >= 0, lambda _: f"num_items={num_items} must not be negative")
    if reduction in ("mean", "sample_mean"):
        _check(a, lambda a: a >= 0, lambda i: f"token weights under {reduction!r} must not be "
                                              f"negative, got {a.reshape(-1)[i].item()} at token {i}")
        if reduction == "sample_mean":
            sums, of_token = _sample_sums(a, cu_seqlens)
            sums = _sum_over(sums, process_group)
            w, samples = (w / of_token(sums)).to(w.dtype), (sums != 0).sum()
        if num_items is None:
            divisor = samples if reduction == "sample_mean" else _sum_over(a.sum(), process_group)
        if a.dtype == torch.bool and reduction == "mean" and num_items is None:
            w = w / divisor.clamp(min=1)  # a count of 0 keeps nothing: no 0/0
        else:
            w = (w / divisor).to(w.dtype).masked_fill((a == 0) | (divisor == 0), 0.0)
            w = w.masked_fill((a < 0) | (divisor < 0), NAN)
    return w if cu_seqlens is None else torch.where(_segments(cu_seqlens, a)[1], w, NAN)


def count_items(
    keep: Tensor, reduction="mean", *, cu_seqlens: Optional[Tensor] = None, process_group=None
) -> Tensor:  # 0-dim, int64 (floating for "mean" where keep is)
    """The divisor: kept tokens (the sum of `keep`) or samples that keep one, over process_group.

    >>> count_items(torch.tensor([[True, True], [False, False]]), "sample_mean").item()
    1
    """
    _choice("reduction", reduction, ("mean", "sample_mean"))
    a = _countable(keep)
    count = a.sum() if reduction == "mean" else (_sample_sums(a != 0, cu_seqlens)[0] != 0).sum()
    if cu_seqlens is not None:  # a negative count makes every weight NaN
        count = torch.where(_segments(cu_seqlens, keep)[1], count, -1)
    return _sum_over(count, process_group)


def _countable(keep: Tensor) -> Tensor:
    """Sums of bools and integers are int64; floats become float32 at least (257 ones are 256 in bf16)."""
    if not isinstance(keep, Tensor) or keep.is_complex():
        raise TypeError(f"a mask must be a real tensor, got {getattr(keep, 'dtype', type(keep))}")
    if keep.requires_grad:
        raise ValueError(f"a mask must not require grad, got {keep!r}")
    return keep.to(_accumulator(keep.dtype)) if keep.is_floating_point() else keep


def _sample_sums(a: Tensor, cu_seqlens):
    """-> the sum of `a` in each sample, and a function that hands each token its sample's value."""
    if cu_seqlens is None:  # a sample is one index of the first dimension, or the whole of a 1-D one
        shape = (a.shape[0] if a.dim() > 1 else 1, *[1] * (a.dim() - 1))
        sums = a.reshape(shape[0], a.numel() // max(shape[0], 1)).sum(1)
        return sums, lambda x: x.view(shape) if a.dim() else x[0]
    segment, valid = _segments(cu_seqlens, a)
    # float64 counts exactly; segment_reduce adds in a fixed order, index_add_ would not. unsafe=True
    # skips a check that synchronises: offsets that failed ours become empty segments first.
    sums = torch.segment_reduce(
        a.reshape(-1).double(), "sum", offsets=cu_seqlens * valid, unsafe=True, initial=0)
    return sums, lambda x: x[segment].view(a.shape)


def _segments(cu_seqlens: Tensor, tokens: Tensor):
    """-> the segment of each flattened token, and a 0-dim bool: do cu_seqlens rise from 0 to N?"""
    n = tokens.numel()
    _expect("cu_seqlens", cu_seqlens, None, tokens.device, INTS)
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be (samples + 1,), got {tuple(cu_seqlens.shape)}")
    ok = torch.cat([cu_seqlens[:1] == 0, cu_seqlens[1:] >= cu_seqlens[:-1], cu_seqlens[-1:] == n])
    _check(ok, lambda ok: ok, lambda i: f"cu_seqlens must rise from 0 to the {n} tokens; position "
                                        f"{min(i, len(cu_seqlens) - 1)} of {cu_seqlens.tolist()} does not")
    position = torch.arange(n, device=tokens.device, dtype=cu_seqlens.dtype)
    segment = torch.searchsorted(cu_seqlens[1:].cummax(0)[0], position, right=True)
    return segment.clamp(max=len(cu_seqlens) - 2), ok.all()


def _sum_over(x: Tensor, group) -> Tensor:
    if group is not None:
        torch.distributed.all_reduce(x, group=group)
    return x


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
    # and for the linear path
    skip: str = "rows"  # or "chunks", "none"
    chunk_size: int = 0  # 0: see chunk()
    max_kept: int = -1  # -1: not given
    per_token: bool = False  # reduction="none"
    early: bool = False  # gradients are made in forward
    need_hidden: bool = False  # or logits
    need_weight: bool = False
    need_bias: bool = False
    dtype: torch.dtype = torch.float32  # of the GEMM operands: autocast's, or the tensors' own
    retain_graph: bool = False

    @property
    def needs(self):
        return self.need_hidden, self.need_weight, self.need_bias

    def shard(self, columns: int):
        """-> process group or None, the first column held here, the size of the whole vocabulary."""
        if not self.vocab_group:
            return None, 0, columns
        group = torch.distributed.distributed_c10d._resolve_process_group(self.vocab_group)
        return group, group.rank() * columns, group.size() * columns

    def chunk(self, rows: int, weight: Tensor, buffers: int) -> int:
        """Rows in a chunk, all even. Up to 4H rows are one chunk: two halves and the float32 grad_weight
        that a second chunk needs take no less memory. More go in chunks of 2.5 GiB of logits or 2H."""
        vocab, hidden = weight.shape
        limit = self.chunk_size or 4 * hidden // buffers
        if not self.chunk_size and rows > limit:
            limit = max(limit // 2, 5 * 2**29 // (vocab * buffers * self.dtype.itemsize), 1)
        return max(-(-rows // max(-(-rows // limit), 1)), 1)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _finite(m: Tensor) -> Tensor:
    """A maximum to subtract: -inf - -inf is NaN where exp(-inf - 0), the 0 that is meant, is not."""
    return torch.where(m == -INF, 0.0, m)


def _selected(x: Tensor, w: Tensor, softcap=0.0, temperature=1.0) -> Tensor:
    """Rows of weight 0 become zeros; then softcap and temperature. 2R 2W"""
    x = torch.where((w != 0)[:, None], x, 0.0).to(_accumulator(x.dtype))
    return (softcap * torch.tanh(x / softcap) if softcap else x) / temperature


def _target(target, z, w, o: Options, tm=None):
    """-> q and log q before q is divided by its row sum, and tm. 2R 2W"""
    if o.target_format == "logits":
        t = _selected(target, w, o.teacher_softcap, o.temperature)
        tm = t.amax(1, keepdim=True) if tm is None else tm
        return (t - _finite(tm)).exp(), t - _finite(tm), tm
    if o.target_format == "labels":
        _, first, vocab_size = o.shard(z.shape[1])
        columns = torch.arange(first, first + z.shape[1], device=z.device)
        q = (columns == target[:, None]).to(z.dtype) * (1 - o.label_smoothing)
        q = q + o.label_smoothing / vocab_size
    else:
        q = _selected(target, w)
    return q, q.log(), torch.zeros_like(z[:, :1])


def shard_statistics(logits, target, w, o: Options) -> Tensor:  # (n, V), (n,) or (n, V), (n,) -> (5, n)
    """x, m, s, tm and ts = sum q of the columns held here; `finish` makes the loss of them.

    x is what the target needs, relative to the maxima, so that a common offset of 1e8 cannot eat it:
    sum q (m - z), for forward KL sum q (log q + m - z), for reverse KL sum e^(z - m) (z - m - log q).
    """
    z = _selected(logits, w, o.softcap, o.temperature)
    q, log_q, tm = _target(target, z, w, o)
    m = z.amax(1, keepdim=True)  # 1R
    below = z - _finite(m)  # 1R 1W
    e = below.exp()  # 1R 1W
    if o.divergence == "reverse_kl":  # where, because 0 * -inf is 0 here: 4R 3W
        x = torch.where(e != 0, e * (below - log_q), 0.0)
    else:
        x = torch.where(q != 0, q * ((log_q if o.divergence == "forward_kl" else 0.0) - below), 0.0)
    return torch.stack([x.sum(1), m[:, 0], e.sum(1), tm[:, 0], q.sum(1)])  # 3R


def merge(parts: Tensor, o: Options) -> Tensor:  # (ranks, 5, n) -> (5, n)
    """Statistics of vocabulary shards to those of the whole: terms move to the common m and tm."""
    x, m, s, tm, ts = parts.unbind(1)
    dm, dt = m - _finite(m.amax(0)), tm - _finite(tm.amax(0))
    s_scale, t_scale = dm.exp(), dt.exp()
    dm, dt = _finite(dm), _finite(dt) if o.divergence != "cross_entropy" else 0.0
    scale, mass, shift = (s_scale, s, dm - dt) if o.divergence == "reverse_kl" else (t_scale, ts, dt - dm)
    # Where the mass or its scale is 0 there is nothing to move, and inf * 0 would be NaN.
    x = torch.where(scale != 0, (x + torch.where(mass != 0, mass * shift, 0.0)) * scale, 0.0).sum(0)
    return torch.stack([x, m.amax(0), (s * s_scale).sum(0), tm.amax(0), (ts * t_scale).sum(0)])


def finish(stats: Tensor, target, w, o: Options, vocab_size: int):
    """-> w * loss (n,), and the statistics with the loss in place of x. Nothing of size N*V."""
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
    return torch.where(w != 0, w * loss, 0.0), torch.stack([loss, m, s, tm, ts])


def _sums(ts: Tensor, o: Options):
    """-> what q sums to (given probabilities need not sum to 1), and what it is yet to be divided by."""
    one = torch.ones_like(ts)
    return {"labels": (one, one), "probabilities": (ts, one), "logits": (one, ts)}[o.target_format]


def row_statistics(logits, target, w, o: Options, shard=shard_statistics):
    """-> w * loss (n,), statistics (5, n). With a vocab_group: one all_gather of 5 floats a row."""
    stats = shard(logits, target, w, o)
    group, _, vocab_size = o.shard(logits.shape[1])
    if group is not None:  # one more column tells the width, so that uneven shards give NaN
        mine = torch.cat([stats, stats.new_full((5, 1), logits.shape[1])], 1)
        parts = mine.new_empty(group.size(), *mine.shape)
        torch.distributed.all_gather(list(parts.unbind(0)), mine, group=group)
        even = (parts[:, :, -1] == logits.shape[1]).all()
        stats = torch.where(even, merge(parts[:, :, :-1], o), NAN)
    return finish(stats, target, w, o, vocab_size)


def row_gradient(logits, target, w, upstream, stats, o: Options, out=None) -> Tensor:  # (n, V)
    """w * upstream * dl/dlogits, rounded once, 0 where w is. `out` may be the logits themselves."""
    loss, m, s, tm, ts = stats[:, :, None]
    z = _selected(logits, w, o.softcap, o.temperature)
    p = (z - m).exp() / s  # 3R 3W
    q, log_q, _ = _target(target, z, w, o, tm)
    mass, whole = _sums(ts, o)
    if o.divergence == "reverse_kl":  # 5R 5W
        grad = torch.where(p != 0, p * ((z - m) - s.log() - (log_q - whole.log()) - loss), 0.0)
    else:  # softmax - 1 before anything is rounded: 3R 3W
        grad = p * (mass + 2 * o.z_loss * (m + s.log()) if o.z_loss else mass) - q / whole
    if o.softcap:
        grad = grad * (1 - (z * o.temperature / o.softcap) ** 2)  # 4R 4W
    grad = grad * ((w if upstream is None else w * upstream) / o.temperature)[:, None]  # 1R 1W
    grad = torch.where((w != 0)[:, None], grad, 0.0).to(logits.dtype)  # 2R 2W
    return grad if out is None else out.copy_(grad)


# ------------------------------------------------------------------------ the chunked linear path
HALF_SCALE = 256.0  # float16 rows are held times this, so that p = 6e-8 has more than one bit


def gemm(out: Tensor, a: Tensor, b: Tensor, add: bool = False) -> Tensor:
    """out = a @ b or out += a @ b, accumulated in float32 and rounded once to out's dtype."""
    if a.dtype == out.dtype:
        return torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    if a.is_cuda:
        cast = dict(out_dtype=out.dtype, out=out)
        return torch.addmm(out, a, b, **cast) if add else torch.mm(a, b, **cast)
    product = a.to(out.dtype) @ b.to(out.dtype)
    return out.add_(product) if add else out.copy_(product)


def linear_chunks(kernels, hidden, weight, bias, target, teacher_weight, teacher_bias, w, o: Options,
                  upstream=None, stats=None, count=None):
    """A pass over chunks of rows: logits into one buffer, statistics, and (where a gradient is wanted)
    the buffer turned into w * (softmax - target) in place and multiplied out while it is there.

    Legal because the loss is a scalar: its upstream gradient can be applied later. For reduction="none"
    it is a vector; then forward keeps the statistics, and backward passes again with both in hand.
    float16: rows stay of order 1 in the buffer; the coefficients c go to hidden, relative to the
    largest, and to grad_hidden, and the gradients stay float32 until the upstream gradient is applied.

    -> loss, stats (5, N), count, grad_hidden, grad_weight, grad_bias; empty where not wanted.
    """
    (N, H), V, acc, forward, keep = hidden.shape, len(weight), w.dtype, stats is None, w != 0
    half, padded, teacher = o.dtype == torch.float16, o.max_kept >= 0, teacher_weight is not None
    need_hidden, need_weight, need_bias = (need and (o.early or not forward) for need in o.needs)
    group = o.shard(V)[0]

    computed, n = keep, min(o.max_kept, N) if padded else N  # the rows that are computed, how many
    if o.skip != "rows":
        size = o.chunk(N, weight, 1 + teacher)
        chunks = torch.nn.functional.pad(keep, (0, -N % size)).view(-1, size)
        computed = chunks.any(1, keepdim=True).expand_as(chunks).reshape(-1)[:N]
    if count is not None:
        n = count.tolist()[0]  # backward takes forward's rows without another look
    elif o.skip != "none" and not padded:
        n = int(computed.sum())  # the one host sync
    if o.skip == "rows":
        size = o.chunk(n, weight, 1 + teacher)
    index = rows = None
    if padded or n < N:  # max_kept's padding points one past the end, where results have a row for it
        index = torch.nonzero_static(computed, size=n, fill_value=N)[:, 0]
        rows = index.clamp(max=N - 1) if padded else index
    # More kept rows than max_kept: NaN everywhere instead of a silent drop.
    fill = torch.where(keep.sum() > n, NAN, 0.0).to(acc) if padded else None

    def blank(*shape, dtype):
        return fill.to(dtype).expand(shape).clone() if padded else w.new_zeros(shape, dtype=dtype)

    def gather(x, dim=0):
        return x if rows is None else x.index_select(dim, rows)

    def inputs(x, part, void):
        x = (x[part] if rows is None else x.index_select(0, rows[part])).to(o.dtype)
        return x if void is None else x.masked_fill(void, 0.0)

    def head(x, weight, bias, out):
        out = out[: len(x)]
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    c = gather(w if forward else torch.where(keep, w * upstream, 0.0))
    c = (c + fill).masked_fill(index == N, 0.0) if padded else c
    losses, kept, several = [], [], n > size
    hidden_dtype, weight_dtype = (acc, acc) if half else (hidden.dtype, acc if several else weight.dtype)
    bias_dtype = acc if half or need_bias else weight.dtype

    with torch.autocast(hidden.device.type, enabled=False):
        heads = [None if x is None else x.to(o.dtype) for x in (weight, bias, teacher_weight, teacher_bias)]
        buffers = w.new_empty((1 + teacher, min(n, size), V), dtype=o.dtype)
        for start in range(0, n, size):
            part = slice(start, start + size)
            void = (c[part] == 0)[:, None] if padded or o.skip != "rows" else None  # computed, not kept
            h = inputs(hidden, part, void)
            z = head(h, *heads[:2], buffers[0])
            if start == 0:  # what follows was left until the first GEMM is on its way
                peak = c.abs().amax() if half else None
                flat = torch.where(c != 0, HALF_SCALE, 0.0).to(acc) if half else c  # of c, for the buffer
                if half or need_bias:  # of c, for hidden
                    share = torch.where(c != 0, c / peak if half else 1.0, 0.0).to(o.dtype)[:, None]
                labels, stats = None if teacher else gather(target), None if forward else gather(stats, 1)
                grad_hidden = blank(N + padded if need_hidden else 0, H, dtype=hidden_dtype)
                grad_weight = weight.new_empty((V if need_weight else 0, H), dtype=weight_dtype)
                grad_bias = blank(1, V if need_bias else 0, dtype=bias_dtype)
            t = head(inputs(target, part, void), *heads[2:], buffers[1]) if teacher else labels[part]
            if forward:
                wanted = need_hidden or need_weight or need_bias
                loss, chunk_stats, g = kernels.row_pass(z, t, c[part], flat[part] if wanted else None, o, z)
                losses.append(loss)
                kept.append(chunk_stats)
            else:
                g = kernels.row_gradient(z, t, flat[part], None, stats[:, part].contiguous(), o, z)
            if need_hidden:
                direct = index is None and void is None and group is None and not half
                d = grad_hidden[part] if direct else h.new_empty(
                    h.shape, dtype=acc if half or group is not None else hidden.dtype)
                d = _sum_over(gemm(d, g, heads[0]), group)
                d = d * (c[part] / HALF_SCALE)[:, None] if half else d
                d = d if void is None else d.masked_fill_(void, 0.0)
                if index is not None:
                    grad_hidden.index_copy_(0, index[part], d.to(hidden_dtype))
                elif not direct:
                    grad_hidden[part].copy_(d)
            if need_weight:
                gemm(grad_weight, g.t(), h * share[part] if half else h, add=start > 0)
            if need_bias:
                gemm(grad_bias, share[part].t(), g, add=start > 0)
    if n == 0:
        grad_hidden = blank(N if need_hidden else 0, H, dtype=hidden_dtype)
        grad_weight = blank(V if need_weight else 0, H, dtype=weight_dtype)
        grad_bias, peak = blank(1, V if need_bias else 0, dtype=bias_dtype), 1.0
    if half:
        grad_weight, grad_bias = (x * (peak / HALF_SCALE) for x in (grad_weight, grad_bias))
    elif several or need_bias:
        grad_weight, grad_bias = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
    loss = torch.cat(losses) if losses else w.new_zeros(0)
    stats = torch.cat(kept, 1) if kept and o.per_token else w.new_empty(5, 0)
    if not o.per_token:
        loss = loss.sum() + fill if padded else loss.sum()
    elif index is not None and forward:
        loss = blank(N + padded, dtype=acc).index_copy_(0, index, loss)[:N].clone()
        stats = w.new_zeros(5, N + padded).index_copy_(1, index, stats)[:, :N]
    return loss, stats, torch.tensor([n]), grad_hidden[: N * need_hidden], grad_weight, grad_bias[0]


# --------------------------------------------------------------------------------------- autograd
# Plain functions of seven tensors and Options: the reference makes an autograd Function of them, the
# Triton file custom ops too. On given logits, x are the logits and weight is None.
def loss_forward(kernels, x, weight, bias, target, teacher_weight, teacher_bias, w, o: Options):
    """-> the loss, and what backward may need: stats, count, the three gradients; empty where unused."""
    if weight is not None:
        return linear_chunks(kernels, x, weight, bias, target, teacher_weight, teacher_bias, w, o)
    losses, stats, grad = kernels.row_pass(x, target, w, w if o.early else None, o)
    grad = x.new_empty(0, 0) if grad is None else grad
    loss = losses if o.per_token else losses.sum()
    return loss, stats, torch.tensor([0]), grad, x.new_empty(0, 0), w.new_empty(0)


def loss_gradients(kernels, *args):
    """-> the three gradients again, from the seven tensors, upstream, stats, count, Options."""
    (x, weight, _, target, _, _, w), (upstream, stats, count, o) = args[:7], args[7:]
    if weight is not None:
        return linear_chunks(kernels, *args[:7], o, upstream, stats, count)[3:]
    grad = kernels.row_gradient(x, target, w, upstream.expand(len(w)), stats, o)
    return grad, x.new_empty(0, 0), w.new_empty(0)


def loss_setup(ctx, tensors, o: Options, output):
    ctx.mark_non_differentiable(*output[1:])
    again = tensors[1] is None or not o.early  # given logits stay with the caller anyway
    ctx.save_for_backward(*(tensors if again else ()), *output[1:])
    ctx.options, ctx.again, ctx.spent = o, again, False
    ctx.dtypes = [None if x is None else x.dtype for x in tensors[:3]]


def loss_backward(kernels, ctx, upstream):
    o, saved = ctx.options, ctx.saved_tensors
    if o.early and not ctx.spent:
        return [kernels.scaled(ctx, grad, upstream, dtype) if need else None
                for grad, dtype, need in zip(saved[-3:], ctx.dtypes, o.needs)]
    if not ctx.again:
        raise RuntimeError("the first backward scaled the saved gradients in place and gave them away: "
                           "a second one needs allow_retain_graph=True")
    grads = kernels.loss_gradients_op(*saved[:7], upstream, *saved[7:9], o)
    return [grad.to(dtype) if need else None for grad, dtype, need in zip(grads, ctx.dtypes, o.needs)]


def first_order(backward, inputs: int):
    """once_differentiable, for an upstream gradient that is a constant too; and a None for each other input."""
    once = once_differentiable(lambda *args: tuple(backward(*args)))

    def run(ctx, upstream, *_):
        if upstream is None:
            return (None,) * inputs
        if torch.is_grad_enabled() and not upstream.requires_grad:
            upstream = upstream.detach().requires_grad_()
        grads = once(ctx, upstream)
        grads = (grads,) if isinstance(grads, Tensor) else grads
        return (*grads, *(None,) * (inputs - len(grads)))
    return run


def function(kernels, forward, setup, backward, inputs: int):
    def run(ctx, *args):
        ctx.set_materialize_grads(False)
        output = forward(kernels, *args)
        setup(ctx, args[:-1], args[-1], output)
        return output
    return type(forward.__name__, (torch.autograd.Function,), dict(
        forward=staticmethod(run),
        backward=staticmethod(first_order(lambda *args: backward(kernels, *args), inputs)))).apply


# -------------------------------------------------------------------------------------- front door
def _expect(name, x, shape, device=None, dtypes=FLOATS) -> None:
    """TypeError or ValueError unless x is such a tensor. shape None: any that ends in columns."""
    if not isinstance(x, Tensor) or x.dtype not in dtypes:
        raise TypeError(f"{name} must be a tensor of {dtypes}, got {getattr(x, 'dtype', type(x))}")
    if not x.shape[-1:].numel() if shape is None else tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must be {tuple(shape or ('...', 'columns'))}, got {tuple(x.shape)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")


def _choice(name, x, choices) -> None:
    if x not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {x!r}")


def _number(name, x, valid, kind=(int, float)) -> None:
    if not isinstance(x, kind) or isinstance(x, bool):
        raise TypeError(f"{name} must be a number, got {x!r}")
    if not valid(x):
        raise ValueError(f"{name}={x} is out of range")


def _check(x: Tensor, valid, message) -> None:
    """ValueError(message(first offender)) on CPU. Elsewhere it would synchronise, and under
    torch.compile it cannot raise: there the callers make NaN. (torch.equal needs no item().)"""
    if x.device.type == "cpu" and not torch.compiler.is_compiling():
        ok = valid(x)
        if not torch.equal(ok, torch.ones_like(ok)):
            raise ValueError(message(int((~ok).flatten().nonzero()[0])))


class MaskedCrossEntropy:
    """The four losses over one set of row kernels; a subclass replaces the methods before them.

    loss_mask    (...) token weights a, bool or any number type, in exactly the shape of the tokens
    reduction    "mean" over kept tokens, "sum", "none" (a_i * l_i, (...)), "sample_mean": the mean of
                 the samples' means; a sample is an index of dimension 0 or a segment of cu_seqlens
    num_items    the divisor over everything that is added up (see token_weights)
    softcap      z = softcap * tanh(logits / softcap) (Gemma 2, arXiv 2408.00118), then / temperature
    vocab_group  ranks that each hold V / ranks columns (rows of linear_weight), in rank order
    All: math in float32 (float64 for it), TypeError or ValueError for bad types, shapes, devices and
    options; for bad values (labels, weights, cu_seqlens) on CPU, where elsewhere they give NaN.
    """

    row_statistics = staticmethod(row_statistics)
    row_gradient = staticmethod(row_gradient)
    fused = ()  # dtypes of given logits whose gradient row_pass makes together with the loss

    def __init__(self):
        self.loss = function(self, loss_forward, loss_setup, loss_backward, 8)

    def row_pass(self, logits, target, w, coefficient, o, out=None):
        """Losses, statistics, and the gradient times `coefficient` unless that is None."""
        losses, stats = self.row_statistics(logits, target, w, o)
        if coefficient is None:
            return losses, stats, None
        return losses, stats, self.row_gradient(logits, target, coefficient, None, stats, o, out)

    def loss_gradients_op(self, *args):
        return loss_gradients(self, *args)

    def scaled(self, ctx, grad, upstream, dtype):
        """A gradient that was made in forward, times the upstream one."""
        return (grad.to(_accumulator(grad.dtype)) * upstream).to(dtype)

    def masked_cross_entropy(
        self,
        logits: Tensor,  # (..., V)
        target: Tensor,  # (...) int32 or int64
        loss_mask: Optional[Tensor] = None,  # (...)
        *, ignore_index=-100, reduction="mean", cu_seqlens=None, num_items=None, label_smoothing=0.0,
        z_loss=0.0, softcap=None, temperature=1.0, vocab_group=None,
    ) -> Tensor:
        """l = lse - z_y. ignore_index masks too; label_smoothing is F.cross_entropy's; z_loss adds
        z_loss * lse^2 (PaLM, arXiv 2204.02311).

        >>> masked_cross_entropy(torch.zeros(2, 2), torch.tensor([1, -100])).item()
        0.6931471824645996
        """
        return self._loss(
            logits, target, loss_mask, ignore_index=ignore_index, reduction=reduction,
            cu_seqlens=cu_seqlens, num_items=num_items, label_smoothing=label_smoothing, z_loss=z_loss,
            softcap=softcap, temperature=temperature, vocab_group=vocab_group)

    def masked_cross_entropy_from_distribution(
        self,
        logits: Tensor,  # (..., V)
        target: Tensor,  # (..., V) probabilities, or the teacher's logits
        loss_mask: Optional[Tensor] = None,  # (...)
        *, target_format="probabilities", divergence="cross_entropy", reduction="mean", cu_seqlens=None,
        num_items=None, softcap=None, temperature=1.0, vocab_group=None,
    ) -> Tensor:
        """-sum q log p, "forward_kl" sum q log(q/p), "reverse_kl" sum p log(p/q); no T^2 (Hinton,
        arXiv 1503.02531). q = target, which need not sum to 1, or softmax(target / temperature).

        >>> t = torch.tensor([[0.5, 0.25]])
        >>> masked_cross_entropy_from_distribution(torch.zeros(1, 2), t).item()
        0.5198603868484497
        """
        _choice("target_format", target_format, ("probabilities", "logits"))
        return self._loss(
            logits, target, loss_mask, target_format=target_format, divergence=divergence,
            reduction=reduction, cu_seqlens=cu_seqlens, num_items=num_items, softcap=softcap,
            temperature=temperature, vocab_group=vocab_group)

    def masked_linear_cross_entropy(
        self,
        hidden: Tensor,  # (..., H)
        linear_weight: Tensor,  # (V, H)
        target: Tensor,  # (...) int32 or int64
        loss_mask: Optional[Tensor] = None,  # (...)
        *, linear_bias: Optional[Tensor] = None,  # (V,)
        ignore_index=-100, reduction="mean", cu_seqlens=None, num_items=None, label_smoothing=0.0,
        z_loss=0.0, softcap=None, temperature=1.0, vocab_group=None, chunk_size=None, skip="rows",
        max_kept=None, allow_retain_graph=False,
    ) -> Tensor:
        """masked_cross_entropy(F.linear(hidden, linear_weight, linear_bias), ...) without the (N, V).

        skip="rows" gathers the kept rows (one host sync, for their count); "chunks" leaves out chunks
        that keep nothing (one sync); "none" computes every row. max_kept: a bound on the kept rows
        that the caller knows, no sync; more than that give NaN. allow_retain_graph: a second backward
        through the same graph is right (else it may be an error).

        >>> h, w = torch.ones(1, 2), torch.zeros(2, 2)
        >>> masked_linear_cross_entropy(h, w, torch.tensor([1])).item()
        0.6931471824645996
        """
        return self._loss(
            hidden, target, loss_mask, weight=linear_weight, bias=linear_bias, ignore_index=ignore_index,
            reduction=reduction, cu_seqlens=cu_seqlens, num_items=num_items, z_loss=z_loss,
            label_smoothing=label_smoothing, softcap=softcap, temperature=temperature,
            vocab_group=vocab_group, chunk_size=chunk_size, skip=skip, max_kept=max_kept,
            retain_graph=allow_retain_graph)

    def masked_linear_distillation(
        self,
        hidden: Tensor,  # (..., H)
        linear_weight: Tensor,  # (V, H)
        teacher_hidden: Tensor,  # (..., H_teacher)
        teacher_weight: Tensor,  # (V, H_teacher)
        loss_mask: Optional[Tensor] = None,  # (...)
        *, linear_bias: Optional[Tensor] = None, teacher_bias: Optional[Tensor] = None,  # (V,)
        divergence="cross_entropy", reduction="mean", cu_seqlens=None, num_items=None, softcap=None,
        teacher_softcap=None, temperature=1.0, chunk_size=None, max_kept=None,
        allow_retain_graph=False,
    ) -> Tensor:
        """masked_cross_entropy_from_distribution on both heads' logits, one chunk of each at a time.

        The teacher gets no gradient. The rest is as in masked_linear_cross_entropy.

        >>> h, w = torch.ones(1, 2), torch.zeros(2, 2)
        >>> masked_linear_distillation(h, w, h, w, divergence="forward_kl").item()
        0.0
        """
        return self._loss(
            hidden, teacher_hidden, loss_mask, weight=linear_weight, bias=linear_bias,
            teacher_weight=teacher_weight, teacher_bias=teacher_bias, target_format="logits",
            divergence=divergence, reduction=reduction, cu_seqlens=cu_seqlens, num_items=num_items,
            softcap=softcap, teacher_softcap=teacher_softcap, temperature=temperature,
            chunk_size=chunk_size, max_kept=max_kept, retain_graph=allow_retain_graph)

    def _loss(
        self, x, target, loss_mask, *, reduction, cu_seqlens, num_items, softcap, temperature,
        ignore_index=-100, label_smoothing=0.0, z_loss=0.0, vocab_group=None, target_format="labels",
        divergence="cross_entropy", weight=None, bias=None, teacher_weight=None, teacher_bias=None,
        teacher_softcap=None, chunk_size=None, skip="rows", max_kept=None, retain_graph=False,
    ):
        """Checks, weights, the op. x are logits (..., V), or with a weight hidden states (..., H)."""
        linear, labels = weight is not None, target_format == "labels"
        _expect("hidden" if linear else "logits", x, None)
        shape, dtype, device, kind = x.shape[:-1], x.dtype, x.device, x.device.type
        _choice("divergence", divergence, ("cross_entropy", "forward_kl", "reverse_kl"))
        _choice("skip", skip, ("rows", "chunks", "none"))
        if max_kept is not None and skip != "rows":
            raise ValueError(f"max_kept={max_kept} goes with skip='rows', got skip={skip!r}")
        _number("label_smoothing", label_smoothing, lambda x: 0 <= x <= 1)
        _number("z_loss", z_loss, lambda x: 0 <= x < INF)
        for name, x_ in dict(softcap=softcap, teacher_softcap=teacher_softcap).items():
            if x_ is not None:
                _number(name, x_, lambda x: 0 < x < INF)
        _number("temperature", temperature, lambda x: 0 < x < INF)
        for name, x_, least in (("chunk_size", chunk_size, 1), ("max_kept", max_kept, 0)):
            if x_ is not None:
                _number(name, x_, lambda x: x >= least, int)
        if labels:
            _expect("target", target, shape, device, INTS)
        elif not linear:
            _expect("target", target, x.shape, device)
        if linear:
            if torch.is_autocast_enabled(kind) and dtype != torch.float64:
                dtype = torch.get_autocast_dtype(kind)
            dtypes = FLOATS if torch.is_autocast_enabled(kind) else (dtype,)
            _expect("linear_weight", weight, None, device, dtypes)
            vocab = max(len(weight), 1)
            heads = [("linear_weight", weight, (vocab, x.shape[-1])),
                     ("linear_bias", bias, (vocab,)), ("teacher_bias", teacher_bias, (vocab,))]
            if not labels:
                _expect("teacher_hidden", target, None, device, dtypes)
                heads += [("teacher_hidden", target, (*shape, target.shape[-1])),
                          ("teacher_weight", teacher_weight, (vocab, target.shape[-1]))]
            for name, head, size in heads:
                if head is not None:
                    _expect(name, head, size, device, dtypes)

        a = torch.ones(shape, dtype=torch.bool, device=device) if loss_mask is None and not labels \
            else target != ignore_index if loss_mask is None else _countable(loss_mask)
        if a.shape != shape or a.device != device:
            raise ValueError(f"loss_mask must have the tokens' shape {tuple(shape)} on {device}, "
                             f"got {tuple(a.shape)} on {a.device}")
        a = a.masked_fill(target == ignore_index, 0) if labels and loss_mask is not None else a
        a = a.double() if x.dtype == torch.float64 else a
        w = token_weights(a, reduction, cu_seqlens=cu_seqlens, num_items=num_items)
        group = "" if vocab_group is None else vocab_group.group_name
        needs = [torch.is_grad_enabled() and y is not None and y.requires_grad for y in (x, weight, bias)]
        fused = x.dtype in self.fused and not torch.compiler.is_compiling()
        o = Options(
            target_format, divergence, float(label_smoothing), float(z_loss), float(softcap or 0),
            float(teacher_softcap or 0), float(temperature), group, skip, chunk_size or 0,
            -1 if max_kept is None else max_kept, per_token=reduction == "none",
            early=reduction != "none" and any(needs) and (linear or fused), need_hidden=needs[0],
            need_weight=needs[1], need_bias=needs[2], dtype=dtype, retain_graph=retain_graph)
        if labels:
            vocab_size = o.shard(len(weight) if linear else x.shape[-1])[2]
            _check(target, lambda y: (w == 0) | ((0 <= y) & (y < vocab_size)), lambda i: f"label "
                   f"{target.reshape(-1)[i].item()} at token {i}, not in [0, {vocab_size}) or ignored")
        target = target.reshape(-1) if labels else target.detach().reshape(-1, target.shape[-1])
        teacher = [None if y is None else y.detach() for y in (teacher_weight, teacher_bias)]
        loss = self.loss(x.reshape(-1, x.shape[-1]), weight, bias, target, *teacher, w.reshape(-1), o)[0]
        return loss.view(shape) if reduction == "none" else loss


_reference = MaskedCrossEntropy()
masked_cross_entropy = _reference.masked_cross_entropy
masked_cross_entropy_from_distribution = _reference.masked_cross_entropy_from_distribution
masked_linear_cross_entropy = _reference.masked_linear_cross_entropy
masked_linear_distillation = _reference.masked_linear_distillation
