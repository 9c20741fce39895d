# SPDX-License-Identifier: MIT
"""Masked cross-entropy on Triton kernels: masked_ce.py's names, signatures and meaning, faster.

Copy this file beside masked_ce.py and change one import line. It replaces the reference's losses
of rows (63 lines of plain PyTorch) and its chunks under torch.utils.checkpoint (72), which hold
float32 copies of the logits and compute them twice, by

  two kernels   the statistics of a row in one pass, online; the gradient of a row from them. Where
                a loss is one number both are one launch, and the gradient is there after forward
  small ones    _prepare (weights, and which rows count), _merge (shards), _scale, _rows
  GEMMs         of cuBLAS, around the kernels: see Call.plan, and linear_forward for a drawing

Checks, weights, the choice of rows and all docstrings are masked_ce's. What differs: gradients are
written by hand, so there are no second derivatives and no torch.func (an error says so), and a
second backward may need allow_retain_graph=True. Needs a GPU; CPU tensors run where
TRITON_INTERPRET=1 was set before triton was imported, for tests. Tested with Triton 3.6 (on an
H200) and 3.9 (interpreted).

Order    device functions; kernels; launches; Call, one call's options; given logits; the linear
         path; autograd; custom ops for torch.compile; the public functions
Symbols  N tokens, V vocabulary, K labels a token; w_k an item's weight: 0 is "not there"
         z = softcap * tanh(logit / softcap) / temperature, p = softmax(z), lse = logsumexp(z)
         t a teacher's logits after the same, q the target's probabilities
B in the kernels' heads is the size in bytes of N*V logits, or of as many target values.

A row's statistics, its `state`, are five numbers, always in this order:
    m   max z                   s   sum e^(z - m), so lse = m + log s
    x   the target's sum (_statistics_block); of a whole row what _finished makes of it
    tm  max t                   ts  sum of q before it is normalised: of e^(t - tm), of the given
                                    probabilities, or with label smoothing of a 1 for each column
"""
import functools
import inspect
import os
from typing import NamedTuple, Optional, Tuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "masked_ce_triton needs triton. masked_ce has the same names without it") from error
try:
    from . import masked_ce as reference  # copied into a package
except ImportError:
    import masked_ce as reference

__all__ = list(reference.__all__)
shift_labels, token_weights, count_items, LogProbs = (
    reference.shift_labels, reference.token_weights, reference.count_items, reference.LogProbs)

INF = tl.constexpr(float("inf"))


def power_of_2(n: int) -> int:
    """The smallest that is n or more."""
    return 1 << max(n - 1, 0).bit_length()


class Form(NamedTuple):
    """What a kernel is compiled for. Words, ints and bools: Triton's hooks write it out as JSON."""

    kind: str
    divergence: str
    lanes: int  # labels a row, rounded up to a power of 2; 0 for a distribution
    x: str  # the sum x runs over "p", over "q", or is not needed: ""
    smoothed: bool  # and the other numbers of a Loss: is it used?
    z_loss: bool
    softcap: bool
    teacher_softcap: bool
    temperature: bool
    upstream: bool = False  # is there an upstream gradient of the items?
    entropy: bool = False  # is there one of the entropy?


class Loss(NamedTuple):
    """What is computed of each row."""

    kind: str = "labels"  # or "log_probs"; or a distribution: "probabilities", a teacher's "logits"
    divergence: str = "cross_entropy"  # or of a distribution "forward_kl", "reverse_kl"
    label_smoothing: Optional[float] = None
    z_loss: Optional[float] = None
    softcap: Optional[float] = None
    teacher_softcap: Optional[float] = None
    temperature: Optional[float] = None
    vocab_size: int = 0  # columns that take part, over all shards; those after it are padding

    def form(self, K: int, upstream=False, entropy=False) -> Form:
        labels = self.kind in ("labels", "log_probs")
        if self.kind == "log_probs" or self.divergence == "reverse_kl":
            x = "p"
        else:
            x = "" if labels and not self.label_smoothing else "q"
        return Form(self.kind, self.divergence, power_of_2(K) if labels else 0, x,
                    bool(self.label_smoothing), bool(self.z_loss), self.softcap is not None,
                    self.teacher_softcap is not None, self.temperature not in (None, 1), upstream,
                    entropy)

    def numbers(self):
        """The kernels' float64 arguments: a change of them compiles nothing."""
        return (float(self.softcap or 1), float(self.teacher_softcap or 1),
                1.0 / (self.temperature or 1), float(self.label_smoothing or 0),
                float(self.z_loss or 0))


# ------------------------------------------------------------------------------- device functions
@triton.jit
def _numbers(softcap, teacher_softcap, scale, smoothing, z_loss, ACC: tl.constexpr):
    """A Loss's numbers in the accumulator's type. (The interpreter has Python floats here.)"""
    return (tl.full([], softcap, ACC), tl.full([], teacher_softcap, ACC), tl.full([], scale, ACC),
            tl.full([], smoothing, ACC), tl.full([], z_loss, ACC))


@triton.jit
def _finite(m):
    """A maximum to subtract: -inf - -inf is NaN, exp(-inf - 0) is the 0 that is meant."""
    return tl.where(m == -INF, 0.0, m)


@triton.jit
def _exp(x):
    """In float32 three of tl.exp's five instructions are for results under 1.2e-38; here 0."""
    return tl.exp2(x * 1.4426950408889634) if x.dtype == tl.float32 else tl.exp(x)


@triton.jit
def _tanh(x):
    """1 - 2e / (1 + e), e = exp(-2|x|). It cancels near 0: there a polynomial, 1.4 units in the
    last place; in float64 -u / (2 + u) by Kahan's u = expm1(-2|x|). (The interpreter lacks
    libdevice's tanh.)"""
    y = tl.abs(x)
    e = _exp(-2.0 * y)
    large = 1.0 - 2.0 * e * (1.0 / (1.0 + e))
    if x.dtype == tl.float32:
        square = x * x
        small = -0.05267181 + square * 0.01643758
        small = -0.33332947 + square * (0.13320725 + square * small)
        small = y + y * (square * small)
    else:
        u = tl.where(e == 1.0, -2.0 * y, (e - 1.0) * -2.0 * y / tl.log(tl.where(e == 1, 0.5, e)))
        small = -u / (2.0 + u)
    tanh = tl.where(y < 0.55, small, large)
    return tl.where(x < 0, -tanh, tanh)


@triton.jit
def _transformed(logit, softcap, scale, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """z. Products with 1 / softcap and scale = 1 / temperature: no division for each column."""
    z = logit
    if SOFTCAP:
        z = softcap * _tanh(z * (1.0 / softcap))
    if TEMPERATURE:
        z = z * scale
    return z


@triton.jit
def _load(pointer, columns, V, MASKED: tl.constexpr, ACC: tl.constexpr, EVICT: tl.constexpr):
    return tl.load(pointer + columns, mask=columns < V if MASKED else None,
                   eviction_policy=EVICT).to(ACC)


@triton.jit
def _load_target(row, columns, MASKED: tl.constexpr, ACC: tl.constexpr, O: tl.constexpr,
                 EVICT: tl.constexpr):
    """A distribution's block: a teacher's t, or q, or with label smoothing a 1 for each column."""
    _, target, V, _, numbers = row
    if O.kind == "logits":
        t = _load(target, columns, V, MASKED, ACC, EVICT)
        t = _transformed(t, numbers[1], numbers[2], O.teacher_softcap, O.temperature)
        t = tl.where(columns < V, t, -INF) if MASKED else t
    elif O.kind == "probabilities":
        t = tl.load(target + columns, mask=columns < V, other=0.0, eviction_policy=EVICT).to(ACC)
        # Also: on the sum of a bare load Triton 3.6's OptimizeThreadLocality pass fails.
        t = tl.where(t < 0, float("nan"), t)
    else:
        t = tl.full(columns.shape, 1.0, ACC)
        t = tl.where(columns < V, t, 0.0) if MASKED else t
    return t


@triton.jit
def _rebased(state, new_m, new_tm, O: tl.constexpr):
    """The sums s, x, ts of a state, which are relative to its maxima m and tm, as they are relative
    to larger ones. With dm = m - new_m <= 0, dt = tm - new_tm <= 0:

        s   sum e^(z - m)                          times e^dm
        ts  sum q, of a teacher q = e^(t - tm)     times e^dt
        x   over p: sum e^(z - m) (z - m - log q)  each bracket grows by dm - dt, all times e^dm
            over q: sum q (log q - (z - m))        each bracket grows by dt - dm, all times e^dt

    (log q is left out where the divergence has none.) Nothing moves where nothing has been summed:
    there dm or dt is -inf, and 0 * inf would be NaN.
    """
    m, s, x, tm, ts = state
    TEACHER: tl.constexpr = O.kind == "logits"
    dm = m - _finite(new_m)
    m_scale = _exp(dm)
    if O.x != "":
        dt = tm - _finite(new_tm) if TEACHER else 0.0
        t_scale = _exp(dt) if TEACHER else 1.0
        growth = _finite(dm)
        if TEACHER and O.divergence != "cross_entropy":
            growth -= _finite(dt)
        if O.x == "p":
            x = tl.where(m_scale > 0, (x + tl.where(s != 0, s * growth, 0.0)) * m_scale, 0.0)
        else:
            x = (x - tl.where(ts != 0, ts * growth, 0.0)) * t_scale
            x = tl.where(t_scale > 0, x, 0.0) if TEACHER else x
        ts = ts * t_scale
    return s * m_scale, x, ts


@triton.jit
def _statistics_block(row, columns, state, MASKED: tl.constexpr, O: tl.constexpr,
                      EVICT: tl.constexpr):
    """The running state, (lanes,) each, after one more block of columns (lanes, VECTOR)."""
    logits, _, V, _, numbers = row
    new_m, new_tm = state[0], state[3]
    ACC: tl.constexpr = new_m.dtype
    TARGET: tl.constexpr = O.x != "" and O.kind != "log_probs"
    z = _load(logits, columns, V, MASKED, ACC, EVICT)
    z = _transformed(z, numbers[0], numbers[2], O.softcap, O.temperature)
    z = tl.where(columns < V, z, -INF) if MASKED else z  # after softcap, which makes -inf finite
    new_m = tl.maximum(new_m, tl.max(z, 1))
    if TARGET:
        t = _load_target(row, columns, MASKED, ACC, O, EVICT)
        if O.kind == "logits":
            new_tm = tl.maximum(new_tm, tl.max(t, 1))
    s, x, ts = _rebased(state, new_m, new_tm, O)
    below = z - _finite(new_m)[:, None]
    e = _exp(below)
    s += tl.sum(e, 1)
    term = below  # x sums it where e, or minus it where q is not 0: 0 * inf is 0
    if TARGET:
        if O.kind == "logits":
            log_q = t - _finite(new_tm)[:, None]
            q = _exp(log_q)
        else:
            q = t
            log_q = tl.log(t) if O.divergence != "cross_entropy" else t
        ts += tl.sum(q, 1)
        term = below - log_q if O.divergence != "cross_entropy" else below
        if O.x == "q":
            x += tl.sum(tl.where(q != 0, -q * term, 0.0), 1)
    if O.x == "p":
        x += tl.sum(tl.where(e != 0, e * term, 0.0), 1)
    return new_m, s, x, new_tm, ts


@triton.jit
def _finished(state, O: tl.constexpr):
    """What becomes of x when a row is complete. log_probs: the entropy; a distribution: the loss;
    with label smoothing: the mean of m - z over the vocabulary."""
    _, s, x, _, ts = state
    log_s = tl.log(s)
    if O.kind == "labels":
        x = x / ts if O.smoothed else x
    elif O.kind == "log_probs":
        x = log_s - x / s
    elif O.divergence == "reverse_kl":
        # A negative probability made ts NaN, and log q where p is not 0.
        x = x / s - log_s + (tl.log(ts) if O.kind == "logits" else ts * 0.0)
    elif O.kind == "probabilities":
        x = x + log_s * ts
    else:
        x = x / ts + log_s - (tl.log(ts) if O.divergence == "forward_kl" else 0.0)
    if O.kind == "logits" and O.divergence != "cross_entropy":
        x = tl.where(x < 0, 0.0, x)  # rounding; tl.maximum would turn NaN into 0
    return x


@triton.jit
def _item(z, w, state, numbers, O: tl.constexpr):
    """w * l, or w * log p, of items whose labels have the logits z; 0 where w is. x is finished."""
    m, s, x, _, _ = state
    _, _, _, smoothing, z_loss = numbers
    log_s = tl.log(s)
    if O.kind == "labels":
        item = log_s + (m - z)
        if O.smoothed:  # eps / V sum (lse - z) = eps (log s + mean (m - z))
            item = log_s + (m - z) * (1.0 - smoothing) + smoothing * x
        if O.z_loss:
            item += z_loss * (m + log_s) * (m + log_s)
    elif O.kind == "log_probs":
        item = (z - m) - log_s
    else:
        item = x
    return tl.where(w != 0, w * item, 0.0)


@triton.jit
def _sum(x, O: tl.constexpr):  # over a row's labels, which are a scalar where there is one
    return tl.sum(x, 0) if O.lanes > 1 else x


@triton.jit
def _store_row(state, z, w, stats, items, N, k, K, numbers, O: tl.constexpr,
               PARTIAL: tl.constexpr):
    """Stores a row's statistics, and its items, whose labels have the logits z -> its state."""
    m, s, x, tm, ts = state
    ACC: tl.constexpr = w.dtype
    if PARTIAL:
        tl.store(stats + (5 + k) * N, z, mask=k < K)
    else:
        x = _finished(state, O)
        if O.kind == "log_probs":
            there, total = _sum(tl.where(w != 0, 1, 0), O) > 0, _sum(w, O)
            x = tl.where(there, tl.where(total == total, x, total), 0.0)  # NaN where a weight is
            first = tl.where((z == m) & (w == 1) & (k == 0), 1.0, 0.0).to(ACC)
            ts = _sum(first, O)  # is it correct?
        item = _item(z, w, (m, s, x, tm, ts), numbers, O)
        tl.store(items + k, item.to(ACC), mask=k < K)
    state = (m.to(ACC), s.to(ACC), x.to(ACC), tm.to(ACC), ts.to(ACC))
    for i in tl.static_range(5):
        tl.store(stats + i * N, state[i])
    return state


@triton.jit
def _load_state(stats, N):
    return (tl.load(stats), tl.load(stats + N), tl.load(stats + 2 * N), tl.load(stats + 3 * N),
            tl.load(stats + 4 * N))


@triton.jit
def _label_columns(target, first, V, k, K):
    """The columns of labels k among the V held here, or -1; 32 bits, for every column meets it."""
    column = tl.load(target + k, mask=k < K, other=-1).to(tl.int64) - first
    return tl.where((column >= 0) & (column < V), column, -1).to(tl.int32)


@triton.jit
def _coefficients(items, k, K, numbers, O: tl.constexpr):
    """c_k = w_k * upstream_k / temperature, 0 where w_k is; log_probs sum -l, so there -c_k."""
    w_ptr, upstream_ptr, stride = items
    w = tl.load(w_ptr + k, mask=k < K, other=0.0)
    c = w
    if O.upstream:
        c = w * tl.load(upstream_ptr + k * stride, mask=k < K, other=0.0).to(w.dtype)
    elif O.kind == "log_probs":
        c = w * 0.0  # NaN where the weight is
    c = tl.where(w != 0, c, 0.0)
    c = c * numbers[2] if O.temperature else c
    return -c if O.kind == "log_probs" else c


@triton.jit
def _label_terms(total, own, v, state, numbers, O: tl.constexpr):
    """A, B, C, S of _gradient_kernel's head. total: the sum of all c_k, own: of a column's."""
    m, s, _, _, ts = state
    _, _, _, smoothing, z_loss = numbers
    A, B, S = total, own, total
    if O.z_loss:
        A = total * (1.0 + 2.0 * z_loss * (m + tl.log(s)))
    if O.smoothed:
        B, S = own * (1.0 - smoothing), total * (smoothing / ts)
    return A, B, v, S


@triton.jit
def _label_gradient(z, at_label, terms, state, EQUAL: tl.constexpr, O: tl.constexpr):
    """p (A - C (log p + entropy)) - S, minus B where at_label. EQUAL: B = A."""
    A, B, C, S = terms
    m, s, entropy, _, _ = state
    below = z - m
    p = _exp(below) * (1.0 / s)
    if at_label is None:
        grad = p * A
    elif EQUAL:
        grad = tl.where(at_label, p - 1.0, p) * A  # p - 1 first: where p is near 1 nothing is lost
    else:
        grad = tl.where(at_label, (p - 1.0) * B + p * (A - B), p * A)
    if O.smoothed:
        grad -= S
    if O.entropy:
        # log p = below - log s; at p = 0 a large number instead of inf: 0 times it is 0
        grad -= p * (tl.maximum(below, -1e30) * C + (entropy - tl.log(s)) * C)
    return grad


@triton.jit
def _distribution_gradient(row, columns, z, c, state, MASKED: tl.constexpr, O: tl.constexpr):
    m, s, loss, tm, ts = state
    TEACHER: tl.constexpr = O.kind == "logits"
    below = z - m
    p = _exp(below) * (1.0 / s)
    t = _load_target(row, columns, MASKED, m.dtype, O, "evict_first")
    if O.divergence == "reverse_kl":
        log_q = (t - tm) - tl.log(ts) if TEACHER else tl.log(t)
        grad = tl.where(p != 0, p * (below - log_q - (tl.log(s) + loss)), 0.0)
    else:
        grad = p - _exp(t - tm) * (1.0 / ts) if TEACHER else p * ts - t
    return grad * c


@triton.jit
def _through_softcap(grad, logit, softcap):
    e = _exp(-2.0 * tl.abs(logit * (1.0 / softcap)))  # 1 - tanh^2, from tanh, would cancel near 1
    r = 1.0 / (1.0 + e)  # both as in _tanh: computed once
    return grad * (4.0 * e * r * r)


@triton.jit
def _gradient_block(row, out, columns, column, terms, state, MASKED: tl.constexpr,
                    O: tl.constexpr):
    """Stores the gradient of some columns, rounded here and nowhere before; 0 from column V on.
    Of a row with several labels it leaves out B: see _gradient_at_labels."""
    logits, _, V, width, numbers = row
    logit = _load(logits, columns, V, MASKED, state[0].dtype, "evict_first")
    z = _transformed(logit, numbers[0], numbers[2], O.softcap, O.temperature)
    if O.lanes > 1:
        grad = _label_gradient(z, None, terms, state, False, O)
    elif O.lanes == 1:
        grad = _label_gradient(z, columns == column, terms, state, not (O.z_loss or O.smoothed), O)
    else:
        grad = _distribution_gradient(row, columns, z, terms[0], state, MASKED, O)
    if O.softcap:
        grad = _through_softcap(grad, logit, numbers[0])
    grad = tl.where(columns < V, grad, 0.0) if MASKED else grad
    tl.store(out + columns, grad.to(out.dtype.element_ty), mask=columns < width if MASKED else None,
             eviction_policy="evict_first")


@triton.jit
def _gradient_at_labels(row, items, first, K, v, state, O: tl.constexpr):
    """-> the columns of a row's several labels and the gradient there. It reads their logits, so
    before these are overwritten. Labels that name one column all get the same number."""
    logits, target, V, _, numbers = row
    ACC: tl.constexpr = state[0].dtype
    LANES: tl.constexpr = O.lanes  # Triton 3.6 takes no field of a tuple for a shape
    SOME: tl.constexpr = 16 if LANES > 16 else LANES  # all pairs would fill the registers
    column = _label_columns(target, first, V, tl.arange(0, LANES), K)
    own, others = tl.zeros([LANES], ACC), tl.zeros([LANES], ACC)
    for start in range(0, LANES, SOME):
        some = start + tl.arange(0, SOME)
        same = column[:, None] == _label_columns(target, first, V, some, K)[None, :]
        c = _coefficients(items, some, K, numbers, O)[None, :]
        own += tl.sum(tl.where(same, c, 0.0), 1)
        others += tl.sum(tl.where(same, 0.0, c), 1)
    logit = tl.load(logits + column, mask=column >= 0, other=0.0).to(ACC)
    z = _transformed(logit, numbers[0], numbers[2], O.softcap, O.temperature)
    terms = _label_terms(own + others, own, v, state, numbers, O)
    grad = _label_gradient(z, column >= 0, terms, state, False, O)
    grad = _through_softcap(grad, logit, numbers[0]) if O.softcap else grad
    return column, grad


@triton.jit
def _store_zeros(out, V, BLOCK: tl.constexpr):
    zero = tl.zeros([BLOCK], out.dtype.element_ty)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(out + columns, zero, mask=columns < V, eviction_policy="evict_first")


# ------------------------------------------------------------------------ kernels; O is a Form
@triton.jit
def _statistics_kernel(
    logits_ptr, target_ptr, w_ptr,  # (N, width), (N, V) or labels (N, K), (N, K)
    stats_ptr, items_ptr, out_ptr,  # (5, N), (N, K), (N, width), which may be the logits
    logits_stride, target_stride, out_stride, V, width, first, K,
    softcap: tl.float64, teacher_softcap: tl.float64, scale: tl.float64, smoothing: tl.float64,
    z_loss: tl.float64, O: tl.constexpr, PARTIAL: tl.constexpr, GRADIENT: tl.constexpr,
    ZEROED: tl.constexpr, BLOCK: tl.constexpr,
):
    """A row's statistics and items w * l, online (Milakov and Gimelshein, arXiv 1805.02867), and
    with GRADIENT w * dl/dlogits after them.

    Grid (N,), a program a row. One pass: reads B, with a distribution 2B, and writes 5 + K numbers
    a row. Column j belongs to lane j // VECTOR of its block, VECTOR being the columns that a thread
    loads at once, and each lane has a running state of its own:

        lane      0       1     ...                          state, (lanes,) each
        block 0   z z z z z z z z ...  one tile (lanes,      m_0 s_0  m_1 s_1 ...
        block 1   z z z z z z z z ...  VECTOR) an iteration  rebased on new maxima, added to

    so that the loop needs no reduction across threads; after it the lanes are merged.
    GRADIENT, a second pass, from the row's end: what was read last is still in the L2 cache, where
    a pass from the start would find each block just evicted (1.8 ms for 1.3, 8192 x 128256). It
    reads the same again and writes B, in all 3B, with a distribution 5B.
    Of a row without weight it reads the weights alone, and writes zeros (ZEROED: out has them).
    PARTIAL: the columns are a shard, from vocabulary column `first` on. x is not finished, and rows
    5 to 5 + K of stats get the labels' z, or -inf where the label is not here: see _merge_kernel.
    """
    ACC: tl.constexpr = w_ptr.dtype.element_ty
    VECTOR: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth  # 16 bytes
    TEACHER: tl.constexpr = O.kind == "logits"
    N, at = tl.num_programs(0), tl.program_id(0).to(tl.int64)
    numbers = _numbers(softcap, teacher_softcap, scale, smoothing, z_loss, ACC)
    row = (logits_ptr + at * logits_stride, target_ptr + at * target_stride, V, width, numbers)
    stats_ptr, items_ptr, out_ptr = stats_ptr + at, items_ptr + at * K, out_ptr + at * out_stride
    items = (w_ptr + at * K, w_ptr, 0)  # without upstream gradients
    k = tl.arange(0, O.lanes) if O.lanes > 1 else 0
    w = tl.load(items[0] + k, mask=k < K, other=0.0)
    if _sum(tl.where(w != 0, 1, 0), O) == 0:
        none, one = tl.zeros([], ACC), tl.full([], 1, ACC)  # whose logarithm is 0
        _store_row((none, one, none, none, one), w, w, stats_ptr, items_ptr, N, k, K, numbers, O,
                   PARTIAL)
        if GRADIENT and not ZEROED:
            _store_zeros(out_ptr, width, BLOCK)
        return
    zero, lowest = tl.zeros([BLOCK // VECTOR], ACC), tl.full([BLOCK // VECTOR], -INF, ACC)
    state = (lowest, zero, zero, lowest if TEACHER else zero, zero)
    tile = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = V // BLOCK * BLOCK  # up to here no column needs a mask
    EVICT: tl.constexpr = "evict_last" if GRADIENT else ""
    for start in tl.range(0, whole, BLOCK, num_stages=1):
        state = _statistics_block(row, start + tile, state, False, O, EVICT)
    if whole < V:
        state = _statistics_block(row, whole + tile, state, True, O, EVICT)
    m, tm = tl.max(state[0], 0), tl.max(state[3], 0)
    s, x, ts = _rebased(state, m, tm, O)
    # Reverse KL is the small difference of x / s and log s.
    WIDE: tl.constexpr = tl.float64 if O.divergence == "reverse_kl" else ACC
    state = (m, tl.sum(s.to(WIDE), 0), tl.sum(x.to(WIDE), 0), tm, tl.sum(ts.to(WIDE), 0))
    column, z = -1, w
    if O.lanes > 0:
        column = _label_columns(row[1], first, V, k, K)
        z = tl.load(row[0] + column, mask=column >= 0, other=0.0).to(ACC)
        z = _transformed(z, numbers[0], numbers[2], O.softcap, O.temperature)
        z = tl.where(column >= 0, z, -INF)
    state = _store_row(state, z, w, stats_ptr, items_ptr, N, k, K, numbers, O, PARTIAL)
    if GRADIENT:
        c = _coefficients(items, k, K, numbers, O)
        terms = _label_terms(_sum(c, O), c, 0.0, state, numbers, O)
        if O.lanes > 1:
            column, at_labels = _gradient_at_labels(row, items, first, K, 0.0, state, O)
        tl.debug_barrier()  # in place: all have read the labels' logits before they are overwritten
        for start in range(whole, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            _gradient_block(row, out_ptr, columns, column, terms, state, True, O)
        for start in tl.range(0, whole, BLOCK, num_stages=1):
            columns = whole - BLOCK - start + tl.arange(0, BLOCK)
            _gradient_block(row, out_ptr, columns, column, terms, state, False, O)
        if O.lanes > 1:
            tl.debug_barrier()  # another thread stored these columns
            tl.store(out_ptr + column, at_labels.to(out_ptr.dtype.element_ty), mask=column >= 0)


@triton.jit
def _gradient_kernel(
    logits_ptr, target_ptr, w_ptr, upstream_ptr, v_ptr,  # ..., (N, K), (N,): upstream gradients
    stats_ptr, out_ptr,  # (5, N) of whole rows, (N, width), which may be the logits
    logits_stride, target_stride, upstream_stride, item_stride, v_stride, out_stride,
    V, width, first, K,
    softcap: tl.float64, teacher_softcap: tl.float64, scale: tl.float64, smoothing: tl.float64,
    z_loss: tl.float64, O: tl.constexpr, BLOCK: tl.constexpr,
):
    """The gradient of one block of a row. With labels it is always

            p (A - C (log p + entropy)) - S - sum_k B_k delta_k

        labels      A = sum c_k (1 + 2 z_loss lse)   B_k = (1 - eps) c_k   S = sum c_k eps / V
        log_probs   A = sum c_k   B_k = c_k   C = v, the entropy's upstream gradient

    with c_k = w_k * upstream_k / temperature, of log_probs its negative (their l is -log p).

    Grid (N * blocks,), blocks = cdiv(width, BLOCK); only the first dimension may pass 65535. One
    pass: reads B, with a distribution 2B, and writes B; in all 2B or 3B. Of a row without weight it
    reads the weights alone, and writes zeros. The columns may be a shard, from vocabulary column
    `first` on.
    """
    ACC: tl.constexpr = w_ptr.dtype.element_ty
    blocks = tl.cdiv(width, BLOCK)
    N, at = tl.num_programs(0) // blocks, (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK
    columns = start + tl.arange(0, BLOCK)
    numbers = _numbers(softcap, teacher_softcap, scale, smoothing, z_loss, ACC)
    row = (logits_ptr + at * logits_stride, target_ptr + at * target_stride, V, width, numbers)
    out_ptr += at * out_stride
    items = (w_ptr + at * K, upstream_ptr + at * upstream_stride, item_stride)
    k, v = tl.arange(0, O.lanes) if O.lanes > 1 else 0, 0.0
    c = _coefficients(items, k, K, numbers, O)
    needed = _sum(tl.where(c != 0, 1, 0), O) > 0
    if O.entropy:
        w = tl.load(items[0] + k, mask=k < K, other=0.0)
        v = tl.load(v_ptr + at * v_stride).to(ACC)
        v = v * numbers[2] if O.temperature else v
        needed = (needed | (v != 0)) & (_sum(tl.where(w != 0, 1, 0), O) > 0)
    if not needed:
        zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
        tl.store(out_ptr + columns, zeros, mask=columns < width)
        return
    state = _load_state(stats_ptr + at, N)
    terms = _label_terms(_sum(c, O), c, v, state, numbers, O)
    column, some_here = -1, False
    if O.lanes > 0:
        column = _label_columns(row[1], first, V, k, K)
    if O.lanes > 1:  # most blocks hold none of the labels
        here, at_labels = (column >= start) & (column < start + BLOCK), tl.zeros_like(c)
        some_here = tl.sum(here.to(tl.int32), 0) > 0
        if some_here:
            column, at_labels = _gradient_at_labels(row, items, first, K, v, state, O)
            tl.debug_barrier()  # in place: all have read the labels' logits
    if start + BLOCK <= V:
        _gradient_block(row, out_ptr, columns, column, terms, state, False, O)
    else:
        _gradient_block(row, out_ptr, columns, column, terms, state, True, O)
    if O.lanes > 1:
        if some_here:
            tl.debug_barrier()  # another thread stored these columns
            tl.store(out_ptr + column, at_labels.to(out_ptr.dtype.element_ty), mask=here)


@triton.jit
def _merge_kernel(
    parts_ptr, w_ptr, stats_ptr, items_ptr,  # (shards, 5 + K, N), (N, K), (5, N), (N, K)
    shards, K, softcap: tl.float64, teacher_softcap: tl.float64, scale: tl.float64,
    smoothing: tl.float64, z_loss: tl.float64, O: tl.constexpr,
):
    """Partial statistics of the vocabulary's shards to those of whole rows, and their items.

    Grid (N,), a program a row; few numbers, so in float64. A shard without a column, or with -inf
    in all of them, has m = -inf and s = 0 and adds nothing.
    """
    N, at = tl.num_programs(0), tl.program_id(0).to(tl.int64)
    size = N.to(tl.int64) * (5 + K)
    numbers = _numbers(softcap, teacher_softcap, scale, smoothing, z_loss, tl.float64)
    k = tl.arange(0, O.lanes) if O.lanes > 1 else 0
    w = tl.load(w_ptr + at * K + k, mask=k < K, other=0.0)
    zero, z = tl.zeros([], tl.float64), w.to(tl.float64) * 0.0 - INF
    state = (zero - INF, zero, zero, zero - INF if O.kind == "logits" else zero, zero)
    for shard in range(0, shards):
        part = parts_ptr + shard * size + at
        m, s, x, tm, ts = _load_state(part, N)
        more = (m.to(tl.float64), s.to(tl.float64), x.to(tl.float64), tm.to(tl.float64),
                ts.to(tl.float64))
        m, tm = tl.maximum(state[0], more[0]), tl.maximum(state[3], more[3])
        s, x, ts = _rebased(state, m, tm, O)
        more_s, more_x, more_ts = _rebased(more, m, tm, O)
        state = (m, s + more_s, x + more_x, tm, ts + more_ts)
        more_z = tl.load(part + (5 + k) * N, mask=k < K, other=0.0).to(tl.float64)
        z = tl.where((more_z > z) | (more_z != more_z), more_z, z)  # one shard, or none, has it
    _store_row(state, z, w, stats_ptr + at, items_ptr + at * K, N, k, K, numbers, O, False)


@triton.jit
def _scaled(x_ptr, out_ptr, upstream, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n).to(upstream.dtype)
        x = tl.where(x == 0, x, x * upstream)  # a masked row stays 0, even times inf
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _scale_kernel(
    x_ptr, y_ptr, z_ptr, x_out_ptr, y_out_ptr, z_out_ptr, upstream_ptr,  # (n,), (m,), (k,); 0-dim
    n, m, k, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):
    """out = x * upstream, of three tensors. In place, an upstream of 1, the usual one, is all that
    it reads.

    Grid (at most 2048 programs,), each strides over the blocks. One pass: reads and writes each.
    """
    upstream = tl.load(upstream_ptr)
    if (upstream == 1) & IN_PLACE:
        return
    _scaled(x_ptr, x_out_ptr, upstream, n, BLOCK)
    _scaled(y_ptr, y_out_ptr, upstream, m, BLOCK)
    _scaled(z_ptr, z_out_ptr, upstream, k, BLOCK)


@triton.jit
def _token_weights(target_ptr, mask_ptr, at, inside, ignore_index, TARGET: tl.constexpr,
                   MASK: tl.constexpr):
    """a: the mask's value, 0 where the label is ignored. float64, which counts exactly."""
    a = tl.where(inside, 1.0, 0.0).to(tl.float64)
    if MASK:
        a = tl.load(mask_ptr + at, mask=inside, other=0).to(tl.float64)
    if TARGET:
        a = tl.where(tl.load(target_ptr + at, mask=inside, other=0) == ignore_index, 0.0, a)
    return a


@triton.jit
def _prepare_kernel(
    target_ptr, mask_ptr, num_items_ptr,  # (N, K), (N, K), 0-dim
    w_ptr, index_ptr, count_ptr, out_ptr,  # (N, K), (N,), 0-dim, (N, V)
    ignore_index, vocab_size, max_kept, N, K, V, num_items: tl.float64,
    TARGET: tl.constexpr, MASK: tl.constexpr, DIVISOR: tl.constexpr, INDEX: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    """All between the caller's tensors and the main kernel, in one launch.

    DIVISOR "": w = a. "sum": w = a / sum(a). "number" and "tensor": w = a / num_items.
    w is NaN where the label is out of range, or under a mean the token weight negative or not
    finite; NaN everywhere where the divisor is; NaN in all kept rows where more than max_kept are.
    INDEX: a permutation, the kept rows first, in order, and the others from its end; count: how
    many are kept. A row is kept if one of its weights is not 0.

    Program 0 makes these, alone, so that sums have one order: reads 1 or 2 times N * K numbers of
    each input. The others, of a grid (1 + N,), write zeros in the rows of out that are not kept,
    while the host prepares the next launch.
    """
    divisor = tl.full([], num_items, tl.float64)
    if DIVISOR == "tensor":
        divisor = tl.load(num_items_ptr).to(tl.float64)
    row, k = tl.program_id(0) - 1, tl.arange(0, LANES)
    if row >= 0:
        a = _token_weights(target_ptr, mask_ptr, row * K + k, k < K, ignore_index, TARGET, MASK)
        # Zeros too many do no harm, for the main kernel writes the kept rows later.
        if (tl.max(tl.where(a != 0, 1, 0), 0) == 0) | (divisor == 0):
            _store_zeros(out_ptr + row.to(tl.int64) * V, V, BLOCK)
        return
    dtype: tl.constexpr = w_ptr.dtype.element_ty
    ROWS: tl.constexpr = BLOCK // LANES
    lanes, k = tl.arange(0, ROWS), k[None, :]
    if DIVISOR == "sum":
        sums = tl.zeros([ROWS, LANES], tl.float64)
        for start in range(0, N, ROWS):
            i = (start + lanes)[:, None]
            sums += _token_weights(target_ptr, mask_ptr, i * K + k, (i < N) & (k < K),
                                   ignore_index, TARGET, MASK)
        divisor = tl.sum(tl.sum(sums, 1), 0)
    count = tl.full([], 0, tl.int32)
    for start in range(0, N, ROWS):
        rows = start + lanes
        i = rows[:, None]
        at, inside = i * K + k, (i < N) & (k < K)
        a = _token_weights(target_ptr, mask_ptr, at, inside, ignore_index, TARGET, MASK)
        exact = a
        if DIVISOR != "":
            exact = tl.where(a == 0, 0.0, a * (1.0 / divisor))
            if DIVISOR != "sum":
                exact = tl.where(divisor == 0, 0.0, exact)
            # (exact is inf where negative weights made a sum of 0.)
            exact = tl.where((a >= 0) & (a < INF) & (exact < INF), exact, float("nan"))
            exact = tl.where((divisor >= 0) & (divisor < INF), exact, float("nan"))
        if TARGET:
            label = tl.load(target_ptr + at, mask=inside, other=0).to(tl.int64)
            known = (label >= 0) & (label < vocab_size)
            exact = tl.where(known | (exact == 0), exact, float("nan"))
        w = exact.to(dtype)
        # What rounds to 0 stays there, or nobody would write its row of out.
        w = tl.where((w == 0) & (exact != 0), 1.2e-38, w).to(dtype)
        tl.store(w_ptr + at, w, mask=inside)
        if INDEX:
            kept = tl.max(tl.where((w != 0) & inside, 1, 0), 1)
            so_far = count + tl.cumsum(kept, 0)
            place = tl.where(kept != 0, so_far - 1, N - 1 - (rows - so_far))
            tl.store(index_ptr + place, rows.to(tl.int64), mask=rows < N)
            count += tl.sum(kept, 0)
    if INDEX:
        tl.store(count_ptr, count.to(tl.int64))
        if (max_kept >= 0) & (count > max_kept):
            tl.debug_barrier()  # other threads may have stored what is read here
            for start in range(0, N * K, BLOCK):
                at = start + tl.arange(0, BLOCK)
                w = tl.load(w_ptr + at, mask=at < N * K, other=0.0)
                tl.store(w_ptr + at, w * float("nan"), mask=(at < N * K) & (w != 0))


@triton.jit
def _rows_kernel(
    x_ptr, w_ptr, index_ptr, out_ptr,  # (n, H) or (N, H), (N, K), (N,), (N, H) or (n, H)
    labels_ptr, labels_out_ptr, w_out_ptr,  # (N, K), (n, K), (n, K)
    n, H, K, x_stride, INDEXED: tl.constexpr, SCATTER: tl.constexpr, ITEMS: tl.constexpr,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    """Moves rows: gathered, out[i] = x[index[i]] for i < n, with ITEMS their labels and weights
    too; or scattered, out[index[i]] = x[i], and where i >= n nothing. A row of weight 0 becomes 0,
    and NaN where it should have been computed (its weight is NaN, as max_kept was too small).

    Grid (n,), or to scatter (N,). One pass: reads and writes the rows once.
    """
    i, k = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    row = tl.load(index_ptr + i) if INDEXED else i
    w = tl.load(w_ptr + row * K + k, mask=k < K, other=0.0)
    if ITEMS:
        tl.store(w_out_ptr + i * K + k, w, mask=k < K)
        labels = tl.load(labels_ptr + row * K + k, mask=k < K, other=0)
        tl.store(labels_out_ptr + i * K + k, labels, mask=k < K)
    x_ptr += (i if SCATTER else row) * x_stride
    out_ptr += (row if SCATTER else i) * H
    if (tl.max(tl.where(w != 0, 1, 0), 0) > 0) & (i < n):
        for start in range(0, H, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + columns, mask=columns < H)
            tl.store(out_ptr + columns, x.to(out_ptr.dtype.element_ty), mask=columns < H)
    else:
        blank = tl.sum(w * 0, 0) if SCATTER else 0.0
        for start in range(0, H, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = tl.zeros([BLOCK], w.dtype) + blank
            tl.store(out_ptr + columns, x.to(out_ptr.dtype.element_ty), mask=columns < H)


# --------------------------------------------------------------------------------------- launches
INTERPRETED = not isinstance(_statistics_kernel, triton.JITFunction)
ROCM = torch.version.hip is not None
# Where a launch may skip Triton's own look at its arguments: it repeats Triton's rules for them, so
# only versions that the tests ran with. A wrong guess would compute garbage, silently.
FAST_LAUNCH = ("3.6.", "3.9.")
fast_launch = triton.__version__.startswith(FAST_LAUNCH)
_compiled = {}  # key of _launch -> the compiled kernel


def _launch(kernel, grid: int, tensors, integers, floats, constants, seen, **options) -> None:
    """kernel[(grid,)](*tensors, *integers, *floats, *constants, **options).

    Triton compiles a kernel for each combination of: device; the tensors' dtypes; whether an
    address, or an integer, is a multiple of 16; whether an integer is 1 or needs 64 bits; the
    constants. (float64 arguments make no difference.) To find that out takes Triton longer than
    many of these kernels run, so _compiled keeps what it compiled under a key of the same facts,
    and a compiled kernel takes addresses for tensors. `seen`: the integers, or what _seen says of
    them. The options follow from constants and `seen`.
    """
    if not grid:
        return
    device = tensors[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(kernel, grid, tensors, integers, floats, constants, seen, **options)
    if not fast_launch:
        kernel[(grid,)](*tensors, *integers, *floats, *constants, **options)
        return
    addresses = [x.data_ptr() for x in tensors]
    key = (kernel.__name__, device, constants, seen, *[x % 16 for x in addresses],
           *[x.dtype for x in tensors])
    if ROCM:  # there Triton also looks whether 32 bits reach all of a tensor
        key += tuple(x.untyped_storage().nbytes() < 2**31 for x in tensors)
    compiled = _compiled.get(key)
    if compiled is not None:
        stream = torch._C._cuda_getCurrentRawStream(device.index)  # or Triton looks it up
        compiled[(grid, 1, 1)](*addresses, *integers, *floats, *constants, stream=stream)
        return
    compiled = kernel[(grid,)](*tensors, *integers, *floats, *constants, **options)
    # Not of the interpreter, and not while Triton still compiles in the background.
    if isinstance(compiled, triton.compiler.CompiledKernel):
        _compiled[key] = compiled


def _seen(n: int):
    """What Triton sees of an integer: a key with token counts themselves would fill _compiled."""
    return n % 16 == 0, n == 1, n < 2**31


def _rows(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def _arguments(logits, target, w, o: Loss, first: int):
    """-> logits, target, w as the kernels take them, and N, K, width, V: the columns that count."""
    N, width = logits.shape
    labels = o.kind in ("labels", "log_probs")
    target = target.contiguous() if labels else _rows(target)
    K = w.shape[1] if w.dim() == 2 else 1
    V = max(min(width, o.vocab_size - first), 0)
    return _rows(logits), target, K if labels else target.stride(0), w.contiguous(), N, K, width, V


def launch_statistics(logits, target, w, o: Loss, gradient=False, out=None, zeroed=False, first=0,
                      partial=False):
    """-> statistics (5, N), items (N, K), and w * gradient (N, width), in `out` if given, or None.

    log_probs: the statistics hold the entropy in row 2 and whether it is correct, 1 or 0, in row 4.
    zeroed: out has zeros already where a row has no weight. partial: -> (5 + K, N) for
    launch_merge, None, None.
    """
    logits, target, target_stride, w, N, K, width, V = _arguments(logits, target, w, o, first)
    if partial:
        items = stats = w.new_empty((5 + K, N))
    else:
        stats, items = w.new_empty((5, N)), w.new_empty((N, K))
    if not gradient:
        out = logits
    elif out is None:
        out = logits.new_empty((N, width))
    form = o.form(K)

    # Measured on an H200, bf16 (bytes in a block, warps), against the logits' reads and writes:
    #   no gradient                                8192   8  0.96
    #   softcap, which is bound by arithmetic      8192   8  1.65 (16384: 1.74)
    #   a gradient                                16384  16  V = 32000: 0.79, a teacher 0.97
    #   of labels in rows of 128 KiB and more     32768  32  V = 128256: 0.87 (16384: 0.94)
    # A second pass hopes for the L2 cache: few programs, few rows, so wide ones. With 32 registers
    # two of the widest fit a multiprocessor.
    item = logits.element_size()
    wide = gradient and o.kind == "labels" and V * item >= 2**17 and not form.softcap
    size, warps = (32768, 32) if wide else (16384, 16)
    if form.softcap or not gradient:
        size, warps = 8192, 8
    block = min(power_of_2(max(V, 32)), size // item)
    options = dict(num_warps=max(warps * block * item // size, 1))
    if wide and not ROCM:
        options["maxnreg"] = 32
    constants = form, partial, gradient, zeroed, block
    integers = logits.stride(0), target_stride, out.stride(0), V, width, first, K
    _launch(_statistics_kernel, N, (logits, target, w, stats, items, out), integers, o.numbers(),
            constants, integers, **options)
    return stats, None if partial else items, out if gradient else None


def launch_gradient(logits, target, w, upstream, v, stats, o: Loss, out=None, first=0):
    """-> w * upstream * gradient (N, width), in `out` if given.

    upstream (N, K), (N,) or 0-dim; None is 1, of log_probs 0. v (N,) or 0-dim, the entropy's, or
    None. stats are whole rows', logits may be the columns from vocabulary column `first` on.
    """
    logits, target, target_stride, w, N, K, width, V = _arguments(logits, target, w, o, first)
    out = logits.new_empty((N, width)) if out is None else out
    strides = [0, 0]
    if upstream is not None:
        strides[: upstream.dim()] = upstream.stride()
    v_stride = v.stride(0) if v is not None and v.dim() else 0
    # Bytes in a block, warps (H200, bf16, against a copy of the logits, V = 128256): 1.05, with an
    # entropy's upstream 1.10, with softcap 1.64 (one warp: 3.0). Several labels are looked at by
    # each program, so there are fewer, larger ones.
    size, warps = (16384, 8) if K > 1 else (2048, 2)
    block = min(power_of_2(max(width, 16)), size // logits.element_size())
    constants = o.form(K, upstream is not None, v is not None), block
    tensors = (logits, target, w, w if upstream is None else upstream, w if v is None else v, stats,
               out)
    integers = (logits.stride(0), target_stride, *strides, v_stride, out.stride(0), V, width, first,
                K)
    _launch(_gradient_kernel, N * -(-width // block), tensors, integers, o.numbers(),
            constants, integers, num_warps=warps)
    return out


def launch_merge(parts, w, o: Loss):
    """Partial statistics (shards, 5 + K, N) -> statistics and items, as of launch_statistics."""
    (shards, rows, N), K = parts.shape, parts.shape[1] - 5
    parts, w = parts.contiguous(), w.contiguous()
    stats, items = w.new_empty((5, N)), w.new_empty((N, K))
    _launch(_merge_kernel, N, (parts, w, stats, items), (shards, K), o.numbers(), (o.form(K),),
            (shards, K), num_warps=1)
    return stats, items


def launch_scale(grads, upstream, in_place):
    """Three tensors, or None, times upstream (0-dim), 0 where they are 0 -> the products."""
    outs = grads if in_place else [x if x is None else torch.empty_like(x) for x in grads]
    sizes = [0 if x is None else x.numel() for x in grads]
    tensors = [upstream if x is None else x for x in (*grads, *outs, upstream)]
    _launch(_scale_kernel, min(-(-max(sizes) // 8192), 2048), tensors, sizes, (), (in_place, 8192),
            tuple(map(_seen, sizes)), num_warps=8)
    return outs


def launch_prepare(target, loss_mask, shape, ignore_index, vocab_size, reduction, num_items,
                   max_kept, out, dtype, device, indexed=True):
    """-> w (N * K,), and if `indexed` the permutation (N,) and the count of _prepare_kernel, else
    None. shape is (N, K). Zeros go to the rows of out (N, V), if given, that are not kept."""
    N, K = shape
    w = torch.empty(N, K, dtype=dtype, device=device)
    index = torch.empty(N, dtype=torch.int64, device=device) if indexed else None
    count = torch.empty((), dtype=torch.int64, device=device) if indexed else None
    tensor = isinstance(num_items, torch.Tensor)
    divisor = "tensor" if tensor else "sum" if num_items is None else "number"
    divisor = divisor if reduction == "mean" else ""
    V = 0 if out is None else out.shape[1]
    lanes = power_of_2(K)
    block = 1024 if N * K <= 1024 else max(8192, lanes)
    constants = target is not None, loss_mask is not None, divisor, indexed, lanes, block
    tensors = (w if target is None else target.contiguous(),
               w if loss_mask is None else loss_mask.contiguous(), num_items if tensor else w, w,
               index if indexed else w, count if indexed else w, w if out is None else out)
    limit = -1 if max_kept is None else max_kept
    number = 1.0 if divisor != "number" else float(num_items)
    _launch(_prepare_kernel, 1 if out is None else 1 + N, tensors,
            (ignore_index, vocab_size, limit, N, K, V), (number,),
            constants, (ignore_index, vocab_size, _seen(limit), _seen(N), K, V),
            num_warps=min(block // 256, 32))
    return w, index, count


def launch_rows(x, index, w, out, scatter=False, items=None):
    """_rows_kernel: rows of x (n or N, H) to out. items: labels (N, K), and where those of the rows
    go, with their weights."""
    N, K, n = *w.shape, x.shape[0] if scatter else out.shape[0]
    H = out.shape[1]
    constants = index is not None, scatter, items is not None, power_of_2(K), 2048
    x = _rows(x)
    tensors = (x, w, w if index is None else index, out, *(items or (w, w, w)))
    _launch(_rows_kernel, N if scatter else n, tensors, (n, H, K, x.stride(0)), (),
            constants, (_seen(n), H, K, x.stride(0)), num_warps=4)
    return out


# ------------------------------------------------------------------------ one call, as plain values
class Call(NamedTuple):
    """A call's options, checked: plain values, so that they pass through a custom op. The first
    eight are a Loss."""

    kind: str
    divergence: str
    label_smoothing: float
    z_loss: float
    softcap: Optional[float]
    teacher_softcap: Optional[float]
    temperature: float
    vocab_size: int
    each: int  # columns of a rank's shard, with padding
    here: int  # of these, how many count
    group: Optional[str]  # a process group's name
    per_token: bool  # not one number, but items or log-probabilities
    needs: Tuple[bool, bool, bool]  # gradients of hidden (or logits), weight, bias
    skip: str
    chunk_size: Optional[int]
    max_kept: Optional[int]
    dtype: torch.dtype  # of the GEMMs' operands: autocast's, or the tensors' own
    logits_dtype: torch.dtype
    recompute: bool
    retain_graph: bool
    traced: bool  # by torch.compile: every output has a shape that is known beforehand

    @property
    def loss(self) -> Loss:
        return Loss(*self[:8])

    @property
    def math(self) -> torch.dtype:
        return reference.math_dtype(self.dtype)

    def shard(self):
        """-> the process group or None, and the column of the vocabulary that is the first here."""
        if self.group is None:
            return None, 0
        group = torch.distributed.distributed_c10d._resolve_process_group(self.group)
        return group, group.rank() * self.each

    def chunk(self, n: int, H: int) -> int:
        """Rows in a chunk: at most 2 H, or as many as 2.5 GiB of logits hold. But twice as many
        stay one chunk if they can: a second one costs a sum of grad_weight in float32."""
        limit = self.chunk_size
        if limit is None:
            buffers = 2 if self.kind == "logits" else 1
            row = max(self.each, 1) * self.logits_dtype.itemsize
            limit = max(max(2 * H, 5 * 2**29 // row) // buffers, 1)
            if n <= 2 * limit and self.needs[0] and self.dtype.itemsize == 2:
                limit *= 2
        return reference.chunk_rows(n, limit)

    def plan(self, n: int, size: int, H: int) -> str:
        """When and how the gradients of the linear path are made:

        "loss"     not at all: one GEMM for each chunk
        "logits"   in backward, from the logits that forward kept: three GEMMs, one chunk
        "early"    in forward, while a chunk's logits are there: three GEMMs; a sum's upstream
                   gradient is one number, which can be applied later
        "columns"  in backward, which computes the logits again, a block of columns at a time, so
                   that no column's gradient is a sum over chunks: four GEMMs, least memory
        float16 is never early: what is small must be rounded after the loss scale has lifted it.
        """
        if not any(self.needs):
            return "loss"
        early = self.is_early(linear=True)
        # One chunk is early, too, where the host takes longer than the GPU, for it has less to do
        # then; or where H is small: 1.11 of three GEMMs instead of 1.15 at 16384 x 896 x 151936.
        small = n * self.here * self.logits_dtype.itemsize <= 2**26 or H <= 1024
        if self.recompute or self.traced or n > size or early and small:
            return "early" if early else "columns"
        return "logits"

    def is_early(self, linear: bool) -> bool:
        late = self.per_token or self.dtype == torch.float16
        return any(self.needs) and not (late or (self.recompute if linear else self.group))


# --------------------------------------------------------------------- forward and backward of rows
def _statistics(o: Call, logits, target, w, gradient=False, out=None, zeroed=False):
    """launch_statistics, also of a vocabulary over ranks: one all_gather of 5 + K numbers a row."""
    group, first = o.shard()
    if group is None:
        return launch_statistics(logits, target, w, o.loss, gradient, out, zeroed)
    parts, _, _ = launch_statistics(logits, target, w, o.loss, first=first, partial=True)
    # In float64, whatever a rank's dtype; one more column says what it holds: where ranks do not
    # hold parts of the same thing all get NaN, and none waits for one that has raised.
    held = o.vocab_size * 8 + reference.FLOATS.index(logits.dtype)
    mine = torch.nn.functional.pad(parts.double(), (0, 1), value=held)
    ranks = mine.new_empty(group.size(), *mine.shape)
    torch.distributed.all_gather(list(ranks.unbind(0)), mine, group=group)
    alike = (ranks[:, :, -1] == held).all()
    stats, items = launch_merge(
        torch.where(alike, ranks[:, :, :-1], float("nan")).to(parts.dtype), w, o.loss)
    if gradient:
        out = launch_gradient(logits, target, w, None, None, stats, o.loss, out, first)
    return stats, items, out if gradient else None


def _results(o: Call, items, stats):
    """-> loss or items; of log-probabilities also entropy, and whether the label is likeliest."""
    if o.kind == "log_probs":
        return items, stats[2].clone(), stats[4] == 1
    return (items if o.per_token else items.sum()), None, None


def logits_forward(o: Call, logits, target, w, out=None):
    """-> results (3), stats, the gradient where it is made now. out: has zeros where w is 0."""
    early = o.is_early(linear=False)
    stats, items, grad = _statistics(o, logits, target, w, early, out, out is not None)
    return *_results(o, items, stats), stats, grad


# ------------------------------------------------------------------ the linear path, rows in chunks
def gemm(out, a, b, add=None):
    """out = a @ b, or add + a @ b, accumulated in float32 and rounded once to out's dtype."""
    cast = {} if a.dtype == out.dtype else dict(out_dtype=out.dtype)
    if cast and not a.is_cuda:  # only CUDA has out_dtype
        a, b, cast = a.to(out.dtype), b.to(out.dtype), {}
    if add is None:
        return torch.mm(a, b, out=out, **cast)
    return torch.addmm(add.to(out.dtype), a, b, out=out, **cast)


class Rows:
    """The rows that are computed, and the ways there and back. Masked rows among them hold 0."""

    def __init__(self, o: Call, hidden, w, index, count, n=None):
        (self.N, H), self.w = hidden.shape, w
        size = o.chunk(self.N, H)
        if o.skip == "chunks":
            keep = reference.whole_chunks((w != 0).any(1), size)
            index, count = reference.kept_first(keep), keep.sum()
        if o.max_kept is not None:
            n = min(max(o.max_kept, 1), self.N)
        elif n is None:
            n = self.N if o.skip == "none" else int(count)  # the one host sync
        self.n, self.size = n, size if o.skip == "chunks" else o.chunk(n, H)
        self.index = index if n < self.N else None  # a permutation, of which n rows are computed
        self.as_they_are = self.index is None and o.skip == "rows" and o.max_kept is None

    def gather(self, x):  # (N, ...) -> (n, ...)
        return x if self.index is None or x is None else x.index_select(0, self.index[: self.n])

    def gather_hidden(self, x, dtype, items=None):  # (N, H) -> (n, H), 0 where masked
        if self.as_they_are:
            return x.to(dtype)
        out = x.new_empty(self.n, x.shape[1], dtype=dtype)
        return launch_rows(x, self.index, self.w, out, items=items)

    def gather_all(self, hidden, target, dtype):
        """-> hidden, target and weights of the rows; labels and weights go with hidden's launch."""
        if target.is_floating_point():  # the teacher's hidden states
            return (self.gather_hidden(hidden, dtype), self.gather_hidden(target, dtype),
                    self.gather(self.w))
        if self.index is None:
            return self.gather_hidden(hidden, dtype), target, self.w
        n, target = self.n, target.contiguous()
        moved = target.new_empty(n, *target.shape[1:]), self.w.new_empty(n, self.w.shape[1])
        return self.gather_hidden(hidden, dtype, (target, *moved)), *moved

    def scatter_hidden(self, d, dtype):  # (n, H) -> (N, H), 0 where masked, NaN if max_kept is low
        if self.as_they_are:
            return d.to(dtype)
        out = d.new_empty(self.N, d.shape[1], dtype=dtype)
        return launch_rows(d, self.index, self.w, out, scatter=True)

    def scatter(self, items):  # (n, ...) -> (N, ...)
        if self.index is None or items is None:
            return items
        blank = 0 * self.w if items.dim() > 1 else 0 * self.w.amax(1)  # NaN if max_kept is too low
        blank = blank > 0 if items.dtype == torch.bool else blank.to(items.dtype)
        return blank.index_copy_(0, self.index[: self.n], items)


def part(x, at: slice, dim=0):
    """x[at] of a dimension, and x itself where that is all of it: views cost the host time."""
    if x is None or at.start == 0 and at.stop >= x.shape[dim]:
        return x
    return x[at] if dim == 0 else x[:, at]


def operands(o: Call, columns: slice, *heads):
    """Weights and biases of some columns, in the dtype of the GEMMs."""
    return [x if x is None else part(x, columns).to(o.dtype) for x in heads]


class Gradients:
    """grad_hidden of computed rows, grad_weight, grad_bias: those that are needed, else None."""

    def __init__(self, o: Call, needs, n, weight, hidden_dtype, weight_dtype):
        V, H = weight.shape
        empty = weight.new_zeros if o.here < V else weight.new_empty  # padding gets zeros
        self.hidden = weight.new_empty(n, H, dtype=hidden_dtype) if needs[0] else None
        self.weight = empty(V, H, dtype=weight_dtype) if needs[1] else None
        self.bias = weight.new_zeros(V, dtype=o.math) if needs[2] else None

    def add(self, g, h, weight, rows, columns, more_columns=False, more_rows=False):
        """Multiplies out g, the gradient of logits [rows, columns]. more_columns: these rows have
        had others, whose products are in grad_hidden; more_rows: these columns, in grad_weight."""
        if self.hidden is not None:
            d = part(self.hidden, rows)
            gemm(d, g, weight, d if more_columns else None)
        if self.weight is not None:
            d = part(self.weight, columns)
            gemm(d, g.t(), h, d if more_rows else None)
        if self.bias is not None:
            self.bias[columns] += g.sum(0, dtype=self.bias.dtype)

    def finished(self, o: Call, rows: Rows, hidden, *head):
        """-> in their tensors' dtypes, grad_hidden of all rows and summed over ranks."""
        if self.hidden is not None:
            group, _ = o.shard()
            if group is not None:
                torch.distributed.all_reduce(self.hidden, group=group)
            self.hidden = rows.scatter_hidden(self.hidden, hidden.dtype)
        grads = zip((self.weight, self.bias), head)
        return self.hidden, *(None if grad is None else grad.to(x.dtype) for grad, x in grads)


def linear_forward(o: Call, hidden, weight, bias, target, teacher_weight, teacher_bias, w, index,
                   count):
    """-> results (3); what backward needs (5): statistics (5, n), n, logits and the teacher's where
    they are kept, rows of hidden where they were moved; gradients (3) where they are made now.

    One chunk:   hidden (rows, H) --GEMM--> logits (rows, V) --kernel--> items, statistics
    early, more: the same launch turns the logits into their gradient g in place, then
                 g --GEMM with weight--> grad_hidden,  g^T --GEMM with hidden--> grad_weight
    """
    rows, teacher = Rows(o, hidden, w, index, count), teacher_weight is not None
    n, size, plan = rows.n, rows.size, o.plan(rows.n, rows.size, hidden.shape[1])
    early = plan == "early"
    if plan == "columns":  # forward holds as little as backward will
        size = min(size, max(2**28 // (max(o.each, 1) * o.logits_dtype.itemsize), 1))
    h, t, w = rows.gather_all(hidden, target, o.dtype)
    g = logits = h.new_empty(min(n, size), o.here, dtype=o.logits_dtype)
    teacher_logits = torch.empty_like(logits) if teacher else None
    if early and o.logits_dtype != o.dtype:
        g = h.new_empty(logits.shape)  # in place it would have the wrong dtype
    here = slice(0, o.here)
    W, b, teacher_W, teacher_b = operands(o, here, weight, bias, teacher_weight, teacher_bias)
    grads = Gradients(o, o.needs if early else (False,) * 3, n, weight,
                      hidden.dtype if o.group is None else o.math,
                      o.math if n > size else weight.dtype)
    parts = []
    for start in range(0, max(n, 1), size):
        at, some = slice(start, start + size), slice(0, min(size, n - start))
        h_at, t_at = part(h, at), part(t, at)
        z = gemm(part(logits, some), h_at, W.t(), b)
        if teacher:
            t_at = gemm(part(teacher_logits, some), t_at, teacher_W.t(), teacher_b)
        *part_results, g_at = _statistics(o, z, t_at, part(w, at), early, part(g, some))
        parts.append(part_results)
        grads.add(g_at, h_at, W, at, here, more_rows=start > 0)
    stats, items = parts[0]
    if len(parts) > 1:
        stats, items = torch.cat([x for x, _ in parts], 1), torch.cat([x for _, x in parts])
    results = _results(o, items, stats)
    if o.per_token:
        results = [rows.scatter(x) for x in results]
    if o.traced:  # n is a secret of this pass, so it returns as many statistics as there are rows
        stats = torch.nn.functional.pad(stats, (0, rows.N - n))
    kept = (logits, teacher_logits, None if h is hidden else h) if plan == "logits" else (None,) * 3
    return *results, stats, n, *kept, *grads.finished(o, rows, hidden, weight, bias)


def linear_backward(o: Call, hidden, weight, bias, target, teacher_weight, teacher_bias, w, index,
                    count, stats, n, logits, teacher_logits, h, upstream, v):
    """Late gradients -> of hidden, weight, bias. Of the logits that forward kept, which become g in
    place unless the graph is retained; or computed again, a block of columns at a time: to the
    kernels a block is what a rank's shard of the vocabulary is."""
    rows, teacher = Rows(o, hidden, w, index, count, int(n)), teacher_weight is not None
    n, kept = rows.n, logits is not None
    h, w = rows.gather_hidden(hidden, o.dtype) if h is None else h, rows.gather(w)
    t = rows.gather_hidden(target, o.dtype) if teacher and not kept else rows.gather(target)
    if o.per_token:
        upstream, v = rows.gather(upstream), rows.gather(v)
    if stats.shape[1] != n:
        stats = stats[:, :n].contiguous()
    width = max(o.here, 1)
    if not kept:  # 128 MiB of logits, in steps of 1024 columns
        width = min(max(2**27 // (max(n, 1) * o.logits_dtype.itemsize) // 1024, 1) * 1024, width)
        logits = h.new_empty(n, width, dtype=o.logits_dtype)
        teacher_logits = torch.empty_like(logits) if teacher else None
    g = logits
    if o.logits_dtype != o.dtype or kept and o.retain_graph:
        g = h.new_empty(n, width)
    in_parts = width < o.here or o.group is not None
    grads = Gradients(
        o, o.needs, n, weight, o.math if in_parts else hidden.dtype, weight.dtype)
    _, first = o.shard()
    for start in range(0, max(o.here, 1), width):
        columns = slice(start, min(start + width, o.here))
        some = slice(0, columns.stop - start)
        W, b, teacher_W, teacher_b = operands(
            o, columns, weight, bias, teacher_weight, teacher_bias)
        z, g_here = part(logits, some, 1), part(g, some, 1)
        t_here = part(teacher_logits, some, 1) if teacher else t
        if not kept:
            gemm(z, h, W.t(), b)
        if teacher and not kept:
            gemm(t_here, t, teacher_W.t(), teacher_b)
        launch_gradient(z, t_here, w, upstream, v, stats, o.loss, g_here, first + start)
        grads.add(g_here, h, W, slice(0, n), columns, more_columns=start > 0)
    return grads.finished(o, rows, hidden, weight, bias)


# ----------------------------------------------------------------------------------------- autograd
def forward(o: Call, *tensors, out=None):
    """tensors: x, weight, bias, target, teacher_weight, teacher_bias, w, index, count; x are hidden
    states, or where weight is None logits. -> results (3), then what backward needs (8): stats, n,
    logits, teacher's logits, moved rows of hidden, and where they are made now the gradients of x,
    weight, bias."""
    x, weight, _, target, _, _, w, _, _ = tensors
    with torch.no_grad():
        if weight is not None:
            return linear_forward(o, *tensors)
        *results, stats, grad = logits_forward(o, x, target, w, out)
        return *results, stats, None, None, None, None, grad, None, None


def backward(o: Call, *tensors):
    """tensors: forward's, then stats, n, logits, teacher's logits, and two upstream gradients, of
    the items (or log-probabilities) and of the entropies. -> gradients of x, weight, bias"""
    x, weight, _, target, _, _, w, _, _, stats, *_, upstream, v = tensors
    if weight is not None:
        return linear_backward(o, *tensors)
    grad = launch_gradient(x, target, w, upstream, v, stats, o.loss, first=o.shard()[1])
    return grad, None, None


def setup(ctx, o: Call, tensors, outputs):
    """Keeps what backward needs. Early gradients of a head need nothing else; given logits are kept
    for a second backward, for they stay with the caller anyway."""
    ctx.set_materialize_grads(False)
    ctx.o, ctx.spent, ctx.linear = o, False, tensors[1] is not None
    ctx.early = any(x is not None for x in outputs[-3:])
    inputs = (None,) * 9 if ctx.early and ctx.linear else tensors
    # autograd does not save what was made under inference_mode (and n is a number)
    ctx.unsaved = [x if x is not None and x.is_inference() else None for x in inputs]
    inputs = [x if y is None else None for x, y in zip(inputs, ctx.unsaved)]
    stats, ctx.n, *others = outputs[3:]
    ctx.save_for_backward(*inputs, stats, *others)


def gradients(ctx, upstream, v, *_):
    """-> the gradients of x, weight and bias, None where nobody needs them."""
    saved, o = ctx.saved_tensors, ctx.o
    if torch.is_grad_enabled():
        raise RuntimeError("masked losses on Triton are once_differentiable: they have no "
                           "create_graph=True and no second derivatives. masked_ce has")
    no_func_transforms(upstream, v)
    v = None if v is None else none(v)  # of an op's output that stands for no entropy
    if upstream is None and v is None:
        return (None,) * 3
    if ctx.early and not ctx.spent:
        ctx.spent = not (o.retain_graph or o.traced)
        return scaled(o, saved[-3:], upstream)
    if ctx.spent and ctx.linear:
        raise RuntimeError("the first backward used up what forward had kept: for a second one the "
                           "loss takes allow_retain_graph=True")
    inputs = [x if y is None else y for x, y in zip(saved, ctx.unsaved)]
    stats, logits, teacher_logits, h = saved[9:13]
    ctx.spent = ctx.spent or logits is not None and not o.retain_graph
    tensors = (*inputs, stats, ctx.n, logits, teacher_logits, h, upstream, v)
    grads = backward_op(*tensors, *ctx.numbers_apart) if o.traced else backward(o, *tensors)
    return [x if need else None for x, need in zip(grads, o.needs)]


def scaled(o: Call, grads, upstream):
    """Early gradients, or None, times the upstream one; in place an upstream of 1, the usual one,
    is free. 0 stays 0 even times inf."""
    if o.traced:
        return [x if x is None else torch.where(
            x == 0, 0.0, x.to(upstream.dtype) * upstream).to(x.dtype) for x in grads]
    outs = launch_scale(grads, upstream, not o.retain_graph)
    # .data: with a version of its own, for it is given away
    return [x if x is None else x.data for x in outs]


class Losses(torch.autograd.Function):
    """Takes forward's outputs: after the kernels autograd's own work runs beside the GPU's."""

    @staticmethod
    def forward(ctx, x, weight, bias, o, tensors, outputs):
        setup(ctx, o, tensors, outputs)
        if outputs[2] is not None:
            ctx.mark_non_differentiable(outputs[2])
        return outputs[:3]

    @staticmethod
    def backward(ctx, *upstream):
        return *gradients(ctx, *upstream), None, None, None


# -------------------------------------------------------- custom ops: what torch.compile sees of it
# A namespace of this module's own: with a fixed one, a second copy of this file in the process
# would register its kernels over the first one's.
NAMESPACE = "masked_ce_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in __name__)
TENSORS = ("Tensor x, Tensor? weight, Tensor? bias, Tensor target, Tensor? teacher_weight, "
           "Tensor? teacher_bias, Tensor w, Tensor? index, Tensor? count")
KEPT = "Tensor stats, Tensor? n, Tensor? logits, Tensor? teacher_logits, Tensor? rows"
KINDS = {str: "str", float: "float", bool: "bool", int: "SymInt", torch.dtype: "ScalarType",
         Tuple[bool, bool, bool]: "bool[]", Optional[float]: "float?", Optional[int]: "SymInt?",
         Optional[str]: "str?"}
CALL = ", ".join(f"{KINDS[kind]} {name}" for name, kind in Call.__annotations__.items())
NUMBERS = Call._fields[2:7]  # label_smoothing to temperature


def numbers_apart(o: Call):
    """-> a tensor of o's numbers, and o with others in their place, which only say what is used. A
    graph would be compiled again for each value of a number, of a tensor's not."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    values = [getattr(o, name) for name in NUMBERS]
    numbers = torch.stack([one * (0.0 if x is None else x) for x in values])
    used = [None if x is None else 0.0 if x == 0 else 1.0 if x == 1 else 2.0 for x in values]
    return numbers, *o._replace(**dict(zip(NUMBERS, used)))


def op(name, function, fake, schema):
    """A custom op of tensors, numbers and a Call's fields. Ops return no None: an empty tensor
    stands for it."""
    fields = len(Call._fields)

    def as_tensor(x):
        if x is None:
            return torch.empty(0, device="cpu")
        return torch.tensor(x, device="cpu") if isinstance(x, int) else x

    def run(*args):
        o = Call(*args[-fields:])
        numbers = zip(NUMBERS, args[-fields - 1].tolist())
        o = o._replace(**{name: x for name, x in numbers if getattr(o, name) is not None})
        return tuple(map(as_tensor, function(o, *args[: -fields - 1])))

    def run_fake(*args):
        return tuple(map(as_tensor, fake(Call(*args[-fields:]), *args[: -fields - 1])))

    made = torch.library.custom_op(f"{NAMESPACE}::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(run_fake)
    return made


def none(x):
    return None if x.dim() == 1 and not x.numel() else x


def fake_gradients(o, x, weight, bias):
    return [y.new_empty(y.shape) if need else None for y, need in zip((x, weight, bias), o.needs)]


def fake_forward(o, x, weight, bias, target, teacher_weight, teacher_bias, w, *_):
    results = w.new_empty(w.shape if o.per_token else ()), None, None
    if o.kind == "log_probs":
        N = w.shape[0]
        results = w.new_empty(w.shape), w.new_empty(N), w.new_empty(N, dtype=torch.bool)
    n = None if weight is None else torch.empty((), dtype=torch.int64, device="cpu")
    early = o.is_early(weight is not None)
    grads = fake_gradients(o, x, weight, bias) if early else (None,) * 3
    return *results, w.new_empty(5, w.shape[0]), n, None, None, None, *grads


def traced_setup(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[2:])
    fields = len(Call._fields)
    ctx.numbers_apart = inputs[-fields - 1 :]
    setup(ctx, Call(*inputs[-fields:]), inputs[: -fields - 1], [none(x) for x in output])


forward_op = op("forward", forward, fake_forward,
                f"({TENSORS}, Tensor numbers, {CALL}) -> ({', '.join(['Tensor'] * 11)})")
backward_op = op(
    "backward", backward, lambda o, *tensors: fake_gradients(o, *tensors[:3]),
    f"({TENSORS}, {KEPT}, Tensor? upstream, Tensor? v, Tensor numbers, {CALL})"
    " -> (Tensor, Tensor, Tensor)")
forward_op.register_autograd(
    lambda ctx, *upstream: (*gradients(ctx, *upstream), *(None,) * (7 + len(Call._fields))),
    setup_context=traced_setup)


# ----------------------------------------------------------------------------- the public functions
def no_func_transforms(*upstream):
    """Raises under torch.func, and in backward for is_grads_batched: kernels would read an address
    that a batch of tensors does not have."""
    batched = torch._C._functorch.is_legacy_batchedtensor
    if torch._C._are_functorch_transforms_active() or any(
            x is not None and batched(x) for x in upstream):
        raise RuntimeError("masked_ce_triton does not work under torch.func (grad, vjp, jvp, vmap, "
                           "is_grads_batched): its gradients are written by hand. masked_ce does")


def why_not_on_cpu():
    """What is in the way of Triton's interpreter, or None."""
    if not INTERPRETED:
        late = " (it is set now, but was not then)" if os.getenv("TRITON_INTERPRET") == "1" else ""
        return ("masked_ce_triton runs on GPU tensors, got CPU ones: import masked_ce instead, or "
                f"set TRITON_INTERPRET=1 before anything imports triton{late}")
    import numpy
    old_triton = triton.__version__.startswith(("3.0", "3.1", "3.2", "3.3", "3.4", "3.5", "3.6"))
    if old_triton and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        return (f"Triton {triton.__version__}'s interpreter fails with NumPy {numpy.__version__}: "
                "install 'numpy<2.4', or Triton 3.7 or newer")
    return None


NO_CPU = why_not_on_cpu()


def is_traced(x) -> bool:
    """By torch.compile, make_fx or a FakeTensorMode: then kernels run inside custom ops."""
    mode, key = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey
    return torch.compiler.is_compiling() or hasattr(x, "fake_mode") or bool(
        mode(key.PROXY) or mode(key.FAKE))


def checked(kind, x, target, loss_mask, head, teacher_head, **options):
    """reference.check_call -> a Call, whose checks need no look at a value."""
    v = reference.check_call(x, target, loss_mask, head, teacher_head, **options)
    get, group = options.get, options.get("vocab_group")
    dtype = (reference.autocast_dtype(x) if head else None) or x.dtype
    inputs = (x, *head) if head else (x, None, None)
    needs = [torch.is_grad_enabled() and y is not None and y.requires_grad for y in inputs]
    o = Call(
        kind, get("divergence", "cross_entropy"), get("label_smoothing", 0.0), get("z_loss", 0.0),
        get("softcap"), get("teacher_softcap"), get("temperature"), v.size, v.each, v.here,
        None if group is None else group.group_name, get("reduction", "none") == "none",
        tuple(needs), get("skip", "rows"), get("chunk_size"), get("max_kept"), dtype,
        torch.promote_types(dtype, get("logits_dtype") or dtype), get("recompute", False),
        get("allow_retain_graph", False), is_traced(x))
    return v, o


_checked = {}  # all that a call's checks depend on -> what checked() made of an earlier one


def known_call(*args, **options):
    """checked(), looked up, because the GPU waits meanwhile."""
    autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
    inputs = [*args[:4], *(args[4] or ()), *(args[5] or ())]
    key = (torch.is_grad_enabled(), autocast, *options.values(), *map(type, options.values()), *[
        (type(x), x.shape, x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else x
        for x in inputs])
    try:
        found = _checked.get(key)
    except TypeError:  # an argument without a hash is a wrong one
        return checked(*args, **options)
    if found is None:
        if len(_checked) > 1000:
            _checked.clear()
        found = _checked[key] = checked(*args, **options)
    return found


def call(kind, x, target, loss_mask, head=None, teacher_head=None, *, cu_seqlens=None,
         num_items=None, **options):
    """One call of any of the losses -> results (3), of which two may be None."""
    no_func_transforms()
    args, items = (kind, x, target, loss_mask, head, teacher_head), None
    weights = dict(options, cu_seqlens=cu_seqlens, num_items=num_items)
    traced, device = is_traced(x), x.device.type if isinstance(x, torch.Tensor) else None
    if device == "cpu" and NO_CPU:
        raise RuntimeError(NO_CPU)
    if device == "cpu" and not traced:
        # values can be looked at, and every rank can hear of another's error
        _, *items = reference.checked_call(*args[1:], **weights)
        if kind == "probabilities" and options["vocab_group"] is None:
            q = target.detach().reshape(-1, target.shape[-1])[:, : options["vocab_size"]]
            reference.negative_rows(reference.selected(q, items[1]))
    v, o = known_call(*args, **options) if device == "cuda" and not traced else checked(
        *args, **options)
    labels, w, index, count, out = prepare(
        o, x, target, loss_mask, v, items, head is not None, weights)
    N = w.shape[0]
    x = x if x.dim() == 2 else x.reshape(N, x.shape[-1])
    if kind in ("probabilities", "logits"):
        labels = target.detach().reshape(N, target.shape[-1])
    weight, bias = head or (None, None)
    teacher = [None if y is None else y.detach() for y in teacher_head or (None, None)]
    tensors = (x, weight, bias, labels, *teacher, w, index, count)
    if traced:
        loss, *others = forward_op(*tensors, *numbers_apart(o))[:3]
        return loss.clone(), *others  # or autograd forbids `loss *= 2`
    outputs = forward(o, *tensors, out=out)
    return Losses.apply(x, weight, bias, o, tensors, outputs) if any(o.needs) else outputs[:3]


def prepare(o: Call, x, target, loss_mask, v, items, linear, options):
    """-> labels, w (N, K), the rows in an order that begins with the kept ones, how many these are,
    and a gradient of zeros where nothing is kept; in one launch for all but the rarer options."""
    N, reduction = x.shape[:-1].numel(), options.get("reduction")
    ignore_index, indexed = options.get("ignore_index"), linear and o.skip == "rows"
    K = target.shape[-1] if ignore_index is not None and target.dim() == x.dim() else 1
    rare = options["cu_seqlens"] is not None or reduction == "sample_mean" or N * K > 2**20
    if o.traced or rare:
        labels, w = items or reference.call_items(x, target, loss_mask, v, **options)
        keep = (w != 0).any(1)
        index, count = (reference.kept_first(keep), keep.sum()) if indexed else (None, None)
        if o.max_kept is not None:
            w = torch.where((count > o.max_kept) & (w != 0), float("nan"), w)
        return labels, w, index, count, None
    num_items = reference.check_num_items(options["num_items"], reduction)
    if isinstance(num_items, torch.Tensor):
        num_items = num_items.to(x.device)
    if reduction is None and loss_mask is not None:  # log-probabilities: kept or not
        loss_mask = loss_mask != 0
    dtype = reference.math_dtype(x.dtype)
    labels = None if ignore_index is None else target.reshape(N, K) if K > 1 else target.reshape(N)
    out = None if linear or not o.is_early(linear) else x.new_empty(N, x.shape[-1])
    w, index, count = launch_prepare(
        labels, loss_mask, (N, K), ignore_index or 0, o.vocab_size, reduction or "none", num_items,
        o.max_kept, out, dtype, x.device, indexed)
    return labels, w, index, count, out


def public(function):
    """`function` with the name, signature, defaults and docstring that it has in masked_ce."""
    model = getattr(reference, function.__name__)
    defaults, known = model.__kwdefaults__, list(inspect.signature(model).parameters)

    @functools.wraps(model)
    def with_defaults(*args, **options):
        unknown = [name for name in options if name not in known]
        if unknown:
            raise TypeError(f"{model.__name__}() has no argument {unknown}")
        if any(isinstance(x, torch.Tensor) and x.is_meta for x in args):
            return model(*args, **options)  # no values: there is nothing for a kernel to do
        return function(*args, **(defaults | options))

    with_defaults.__module__ = __name__  # where pickle finds it
    return with_defaults


@public
def masked_cross_entropy(logits, target, loss_mask=None, **options):
    loss = call("labels", logits, target, loss_mask, **options)[0]
    return loss.view(target.shape) if loss.dim() else loss


@public
def masked_cross_entropy_from_distribution(
        logits, target, loss_mask=None, *, target_format, **options):
    reference.check_options(target_format=target_format)
    loss = call(target_format, logits, target, loss_mask, **options)[0]
    return loss.view(logits.shape[:-1]) if loss.dim() else loss


@public
def masked_log_probs(logits, target, loss_mask=None, **options):
    log_prob, *others = call("log_probs", logits, target, loss_mask, **options)
    return LogProbs(log_prob.view(target.shape), *(x.view(logits.shape[:-1]) for x in others))


@public
def masked_linear_cross_entropy(
        hidden, linear_weight, target, loss_mask=None, *, linear_bias, **options):
    loss = call("labels", hidden, target, loss_mask, (linear_weight, linear_bias), **options)[0]
    return loss.view(target.shape) if loss.dim() else loss


@public
def masked_linear_log_probs(
        hidden, linear_weight, target, loss_mask=None, *, linear_bias, **options):
    log_prob, *others = call(
        "log_probs", hidden, target, loss_mask, (linear_weight, linear_bias), **options)
    return LogProbs(log_prob.view(target.shape), *(x.view(hidden.shape[:-1]) for x in others))


@public
def masked_linear_distillation(
        hidden, linear_weight, teacher_hidden, teacher_weight, loss_mask=None, *, linear_bias,
        teacher_bias, **options):
    loss = call("logits", hidden, teacher_hidden, loss_mask, (linear_weight, linear_bias),
                (teacher_weight, teacher_bias), **options)[0]
    return loss.view(hidden.shape[:-1]) if loss.dim() else loss
