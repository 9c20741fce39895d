# SPDX-License-Identifier: MIT
"""Masked cross-entropy on Triton kernels: masked_ce.py's names, signatures and meaning, faster.

Copy this file beside masked_ce.py and change one import line. Validation, weights, reductions and
the chunk loop are masked_ce's; here are its two row functions as kernels, and the custom ops that
make torch.compile(fullgraph=True) work. Symbols (z, m, s, q, t, tm, ts, x) are masked_ce's.
B in the kernels' heads is the size in bytes of N*V logits, or of as many target values.
Needs a GPU; CPU tensors run where TRITON_INTERPRET=1 was set before anything imported triton.
"""
from types import SimpleNamespace

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

shift_labels, token_weights, count_items = (
    reference.shift_labels, reference.token_weights, reference.count_items)

INF = tl.constexpr(float("inf"))


# ------------------------------------------------------------------------------- device functions
@triton.jit
def _finite(m):  # see masked_ce._finite
    return tl.where(m == -INF, 0.0, m)


@triton.jit
def _exp(x):
    """In float32 three of tl.exp's five instructions are for results under 1.2e-38; here 0."""
    return tl.exp2(x * 1.4426950408889634) if x.dtype == tl.float32 else tl.exp(x)


@triton.jit
def _tanh(x):
    """-e / (2 + e), e = expm1(-2|x|), Kahan's expm1. (The interpreter lacks libdevice's tanh, and
    2*sigmoid(2x)-1 loses the low bits of a small x.)"""
    y = -2.0 * tl.abs(x)
    u = tl.exp(y)
    e = tl.where(u == 1.0, y, (u - 1.0) * y / tl.log(tl.where(u == 1.0, 0.5, u)))
    e = tl.where(y > -1.0, e, u - 1.0)
    return tl.where(x < 0, e, -e) / (2.0 + e)


@triton.jit
def _transformed(z, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    if SOFTCAP > 0.0:
        z = SOFTCAP * _tanh(z / SOFTCAP)
    if TEMPERATURE != 1.0:
        z = z / TEMPERATURE
    return z


@triton.jit
def _load(row, columns, V, MASKED: tl.constexpr, ACC: tl.constexpr, SOFTCAP: tl.constexpr,
          TEMPERATURE: tl.constexpr, EVICT: tl.constexpr):
    """z. Lanes past the end become -inf after softcap, which would make them -softcap."""
    z = tl.load(row + columns, mask=columns < V if MASKED else None, eviction_policy=EVICT)
    z = _transformed(z.to(ACC), SOFTCAP, TEMPERATURE)
    return tl.where(columns < V, z, -INF) if MASKED else z


@triton.jit
def _column(target, first, V):
    """The label's column among those held here, or -1; in 32 bits, for every column meets it."""
    column = tl.load(target).to(tl.int64) - first
    return tl.where((column >= 0) & (column < V), column, -1).to(tl.int32)


@triton.jit
def _target(row, columns, MASKED: tl.constexpr, ACC: tl.constexpr, O: tl.constexpr,
            EVICT: tl.constexpr):
    """Teacher logits t, or q: probabilities, or a label's one-hot ones, smoothed."""
    _, target, column, V, vocab_size = row
    if O.target_format == "logits":
        t = _load(target, columns, V, MASKED, ACC, O.teacher_softcap, O.temperature, EVICT)
    elif O.target_format == "probabilities":
        # + 0.0: on the sum of a bare load, Triton 3.6's OptimizeThreadLocality pass fails.
        t = tl.load(target + columns, mask=columns < V, other=0.0, eviction_policy=EVICT)
        t = t.to(ACC) + 0.0
    else:  # the constants meet a tensor of type ACC, or they would be float32
        each = tl.full([], O.label_smoothing, ACC) / vocab_size
        t = tl.where(columns == column, 1.0, 0.0).to(ACC) * (1.0 - O.label_smoothing) + each
        t = tl.where(columns < V, t, 0.0)
    return t


@triton.jit
def _moved(state, new_m, new_tm, O: tl.constexpr):
    """State relative to the maxima m, tm -> relative to new_m, new_tm (see masked_ce.merge)."""
    TEACHER: tl.constexpr = O.target_format == "logits"
    x, m, s, tm, ts = state
    dm = m - _finite(new_m)
    scale = _exp(dm)
    if O.target_format != "labels" or O.label_smoothing > 0.0:
        t_scale = _exp(tm - _finite(new_tm)) if TEACHER else 1.0
        shift = -_finite(dm)
        if TEACHER and O.divergence != "cross_entropy":
            shift += _finite(tm - _finite(new_tm))
        if O.divergence == "reverse_kl":
            x = tl.where(scale > 0, (x - tl.where(s != 0, s * shift, 0.0)) * scale, 0.0)
        else:
            x = (x + tl.where(ts != 0, ts * shift, 0.0)) * t_scale
            x = tl.where(t_scale > 0, x, 0.0) if TEACHER else x
        ts = ts * t_scale
    return x, s * scale, ts


@triton.jit
def _statistics_block(row, columns, state, MASKED: tl.constexpr, O: tl.constexpr,
                      EVICT: tl.constexpr):
    """The running state, (lanes,) each, after one more block of columns (lanes, VECTOR)."""
    DISTRIBUTION: tl.constexpr = O.target_format != "labels" or O.label_smoothing > 0.0
    logits, _, _, V, _ = row
    _, m, _, new_tm, _ = state
    ACC: tl.constexpr = m.dtype
    z = _load(logits, columns, V, MASKED, ACC, O.softcap, O.temperature, EVICT)
    new_m = tl.maximum(m, tl.max(z, 1))
    if DISTRIBUTION:
        t = _target(row, columns, MASKED, ACC, O, EVICT)
        if O.target_format == "logits":
            new_tm = tl.maximum(new_tm, tl.max(t, 1))
    x, s, ts = _moved(state, new_m, new_tm, O)
    below = z - _finite(new_m)[:, None]
    e = _exp(below)
    s += tl.sum(e, 1)
    if DISTRIBUTION:
        if O.target_format == "logits":
            log_q = t - _finite(new_tm)[:, None]
            q = _exp(log_q)
        else:
            q = t
            log_q = tl.log(t) if O.divergence != "cross_entropy" else t
        ts += tl.sum(q, 1)
        if O.divergence == "reverse_kl":
            x += tl.sum(tl.where(e != 0, e * (below - log_q), 0.0), 1)
        elif O.divergence == "forward_kl":
            x += tl.sum(tl.where(q != 0, q * (log_q - below), 0.0), 1)
        else:
            x += tl.sum(tl.where(q != 0, -q * below, 0.0), 1)
    return x, new_m, s, new_tm, ts


@triton.jit
def _gradient_block(row, out, columns, c, state, MASKED: tl.constexpr, O: tl.constexpr):
    """Stores c * dl/dlogits of some columns, rounded here and nowhere before."""
    logits, _, column, V, _ = row
    x, m, s, tm, ts = state
    logit = _load(logits, columns, V, MASKED, m.dtype, 0.0, 1.0, "evict_first")
    z = _transformed(logit, O.softcap, O.temperature)
    below = z - m
    p = _exp(below) * (1.0 / s)
    if O.target_format == "labels":
        grad = p * (1.0 + 2.0 * O.z_loss * (m + tl.log(s))) if O.z_loss > 0.0 else p
        if O.label_smoothing > 0.0:
            grad -= _target(row, columns, MASKED, m.dtype, O, "")
        else:
            grad = tl.where(columns == column, grad - 1.0, grad)
    else:
        t = _target(row, columns, MASKED, m.dtype, O, "evict_first")
        TEACHER: tl.constexpr = O.target_format == "logits"
        if O.divergence == "reverse_kl":
            log_q = (t - tm) - tl.log(ts) if TEACHER else tl.log(t)
            grad = tl.where(p != 0, p * (below - log_q - (tl.log(s) + x)), 0.0)
        else:
            grad = p - _exp(t - tm) * (1.0 / ts) if TEACHER else p * ts - t
    if O.softcap > 0.0:
        e = _exp(-2.0 * tl.abs(logit / O.softcap))  # 1 - tanh^2, from tanh, would cancel near 1
        grad *= 4.0 * e / ((1.0 + e) * (1.0 + e))
    grad = (grad * (c / O.temperature)).to(out.dtype.element_ty)
    tl.store(out + columns, grad, mask=columns < V if MASKED else None,
             eviction_policy="evict_first")


@triton.jit
def _store_zeros(out, V, BLOCK: tl.constexpr):
    zero = tl.zeros([BLOCK], out.dtype.element_ty)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        tl.store(out + columns, zero, mask=columns < V, eviction_policy="evict_first")


# ------------------------------------------------------------ kernels; O is a masked_ce.Options
@triton.jit
def _statistics_kernel(
    logits_ptr, target_ptr, w_ptr,  # (N, V), (N, V) or (N,), (N,)
    stats_ptr, out_ptr,  # (6, N): five statistics and w * loss, (N, V) which may be the logits
    logits_stride, target_stride, out_stride, V, first, vocab_size, O: tl.constexpr,
    PARTIAL: tl.constexpr, GRADIENT: tl.constexpr, ZEROED: tl.constexpr, BLOCK: tl.constexpr,
):
    """w * loss and the statistics of a row, online (Milakov and Gimelshein, arXiv 1805.02867), and
    with GRADIENT w * dl/dlogits after them.

    Grid (N,), a program a row. One pass: reads B, with a distribution 2B, and writes 6 numbers a
    row. The running maxima and sums are vectors, a lane for each VECTOR columns that a thread loads
    at once, so that the loop needs no reduction across threads. GRADIENT, a second pass, in blocks
    of so many columns from the row's end: reads them again and writes B, in all 3B, with a
    distribution 5B; but what was read last is still in the L2 cache, where a pass from the start
    would find each block just evicted. Of a row of weight 0 it reads the weight alone, and writes
    zeros (ZEROED: out has them). PARTIAL: the columns are a shard, and masked_ce finishes.
    """
    ACC: tl.constexpr = w_ptr.dtype.element_ty
    VECTOR: tl.constexpr = 128 // logits_ptr.dtype.element_ty.primitive_bitwidth  # 16 bytes
    LABELS: tl.constexpr = O.target_format == "labels"
    TEACHER: tl.constexpr = O.target_format == "logits"
    N, at = tl.num_programs(0), tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + at)
    logits_ptr += at * logits_stride
    target_ptr += at * target_stride
    out_ptr += at * out_stride
    if w == 0:
        for k in tl.static_range(6):
            tl.store(stats_ptr + k * N + at, w)
        if GRADIENT and not ZEROED:
            _store_zeros(out_ptr, V, BLOCK)
        return
    column = _column(target_ptr, first, V) if LABELS else -1
    row = (logits_ptr, target_ptr, column, V, vocab_size)
    zero, lowest = tl.zeros([BLOCK // VECTOR], ACC), tl.full([BLOCK // VECTOR], -INF, ACC)
    state = (zero, lowest, zero, lowest if TEACHER else zero, zero)
    tile = tl.arange(0, BLOCK // VECTOR)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = V // BLOCK * BLOCK  # up to here no column needs a mask
    EVICT: tl.constexpr = "evict_last" if GRADIENT else ""
    STAGES: tl.constexpr = 1 if LABELS else 3  # two streams of loads gain by it, one loses
    for start in tl.range(0, whole, BLOCK, num_stages=STAGES):
        state = _statistics_block(row, start + tile, state, False, O, EVICT)
    if whole < V:
        state = _statistics_block(row, whole + tile, state, True, O, EVICT)
    row_m, row_tm = tl.max(state[1], 0), tl.max(state[3], 0)
    x, s, ts = _moved(state, row_m, row_tm, O)
    # Reverse KL is the small difference of x / s and log s.
    WIDE: tl.constexpr = tl.float64 if O.divergence == "reverse_kl" else ACC
    x, s, ts = tl.sum(x.to(WIDE), 0), tl.sum(s.to(WIDE), 0), tl.sum(ts.to(WIDE), 0)
    if LABELS and O.label_smoothing == 0.0:
        z = tl.load(logits_ptr + column, mask=column >= 0, other=0.0).to(ACC)
        x = tl.where(column >= 0, _finite(row_m) - _transformed(z, O.softcap, O.temperature), 0.0)
        ts = tl.where(column >= 0, 1.0, 0.0).to(ACC)
    if not PARTIAL:
        mass = ts if O.target_format == "probabilities" else 1.0
        if O.divergence == "reverse_kl":
            x = x / s - tl.log(s)
            x += tl.log(ts) if TEACHER else 0.0
        else:
            x = (x / ts if TEACHER else x) + tl.log(s) * mass
            x -= tl.log(ts) if TEACHER and O.divergence == "forward_kl" else 0.0
        if LABELS:
            if O.z_loss > 0.0:
                lse = row_m + tl.log(s)
                x += O.z_loss * lse * lse
            x = tl.where(column >= 0, x, float("nan"))
            s = tl.where(column >= 0, s, float("nan"))  # takes it to the gradient
        tl.store(stats_ptr + 5 * N + at, w * x)
    final = (x.to(ACC), row_m, s.to(ACC), row_tm, ts.to(ACC))
    for k in tl.static_range(5):
        tl.store(stats_ptr + k * N + at, final[k])
    if GRADIENT:
        tl.debug_barrier()  # in place: all have read the label's logit before it is overwritten
        if whole < V:
            _gradient_block(row, out_ptr, whole + tl.arange(0, BLOCK), w, final, True, O)
        columns = tl.arange(0, GRADIENT)
        for start in range(0, whole, GRADIENT):
            _gradient_block(row, out_ptr, whole - GRADIENT - start + columns, w, final, False, O)


@triton.jit
def _gradient_kernel(
    logits_ptr, target_ptr, w_ptr, upstream_ptr, stats_ptr, out_ptr,
    logits_stride, target_stride, upstream_stride, out_stride, V, first, vocab_size,
    O: tl.constexpr, UPSTREAM: tl.constexpr, BLOCK: tl.constexpr,
):
    """w * upstream * dl/dlogits of one block of a row.

    Grid (N * blocks,), blocks = cdiv(V, BLOCK); only the first dimension may pass 65535. One pass:
    reads B, with a distribution 2B, and writes B; in all 2B or 3B. Of a row of weight 0 it reads
    the weight alone, and writes zeros.
    """
    blocks = tl.cdiv(V, BLOCK)
    N = tl.num_programs(0) // blocks
    at = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK
    columns = start + tl.arange(0, BLOCK)
    out_ptr += at * out_stride
    w = tl.load(w_ptr + at)
    c = w * tl.load(upstream_ptr + at * upstream_stride) if UPSTREAM else w
    if (w == 0) | (c == 0):
        tl.store(out_ptr + columns, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=columns < V)
        return
    logits_ptr += at * logits_stride
    target_ptr += at * target_stride
    column = _column(target_ptr, first, V) if O.target_format == "labels" else -1
    row = (logits_ptr, target_ptr, column, V, vocab_size)
    stats = stats_ptr + at
    state = (tl.load(stats), tl.load(stats + N), tl.load(stats + 2 * N), tl.load(stats + 3 * N),
             tl.load(stats + 4 * N))
    if start + BLOCK <= V:
        _gradient_block(row, out_ptr, columns, c, state, False, O)
    else:
        _gradient_block(row, out_ptr, columns, c, state, True, O)


@triton.jit
def _scale_kernel(x_ptr, out_ptr, upstream_ptr, n, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """out = x * upstream. In place, an upstream of 1, the usual one, is all that it reads.

    Grid (at most 2048 programs,), each strides over the blocks. One pass: reads and writes n.
    """
    upstream = tl.load(upstream_ptr)
    if (upstream == 1) & IN_PLACE:
        return
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n).to(upstream.dtype)
        x = tl.where(x == 0, x, x * upstream)  # a masked row stays 0, even times inf
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _prepare_kernel(
    keep_ptr, w_ptr, index_ptr, out_ptr,  # (N,), (N,), (N + 1,), (N, V)
    void, N, V, WEIGHTS: tl.constexpr, INDEX: tl.constexpr, BLOCK: tl.constexpr,
):
    """A row is kept where `keep` (labels, or weights) is not `void`.

    Program 0, with WEIGHTS: w = kept / max(number of kept, 1). With INDEX: the kept rows' places in
    order, then N; index[N] = their number. It reads 2N numbers and writes N of each.
    The others, of a grid (1 + N,): zeros in the rows of out that are not kept, written while the
    host prepares the next launch.
    """
    row, lanes = tl.program_id(0).to(tl.int64) - 1, tl.arange(0, BLOCK)
    if row >= 0:
        if tl.load(keep_ptr + row) == void:
            _store_zeros(out_ptr + row * V, V, BLOCK)
        return
    count = tl.full([], 0, tl.int64)
    for start in range(0, N, BLOCK):
        at = start + lanes
        kept = ((tl.load(keep_ptr + at, mask=at < N, other=0) != void) & (at < N)).to(tl.int64)
        if INDEX:
            tl.store(index_ptr + count + tl.cumsum(kept, 0) - 1, at.to(tl.int64), mask=kept != 0)
        count += tl.sum(kept, 0)
    if INDEX:
        tl.store(index_ptr + N, count)
    divisor = tl.maximum(count, 1).to(w_ptr.dtype.element_ty)
    for start in range(0, N, BLOCK):
        at = start + lanes
        if INDEX:
            tl.store(index_ptr + at, tl.zeros([BLOCK], tl.int64) + N, mask=(at >= count) & (at < N))
        if WEIGHTS:
            kept = tl.load(keep_ptr + at, mask=at < N, other=0) != void
            tl.store(w_ptr + at, kept.to(w_ptr.dtype.element_ty) / divisor, mask=at < N)


# --------------------------------------------------------------------------------------- launches
INTERPRETED = not isinstance(_statistics_kernel, triton.JITFunction)
ROCM, _compiled = torch.version.hip is not None, {}


def _launch(kernel, grid: int, tensors, numbers, known, plan) -> None:
    """The GPU waits for this, so a launch like an earlier one is one look in a dictionary. Its key
    has all that Triton specialises a kernel on; `known` stands in it for numbers and plan."""
    if not grid:
        return
    addresses = [x.data_ptr() for x in tensors]
    key = (kernel.__name__, tensors[0].device, known, *[x % 16 for x in addresses],
           *[x.dtype for x in tensors])
    if ROCM:
        key += tuple(x.untyped_storage().nbytes() < 2**31 for x in tensors)
    compiled, constants = _compiled.get(key, (None, ()))
    with torch.cuda.device_of(tensors[0]):
        if compiled is not None:
            compiled[(grid, 1, 1)](*addresses, *numbers, *constants)
            return
        constants, more = plan()
        compiled = kernel[(grid,)](*tensors, *numbers, *constants, **more)
    _compiled[key] = compiled, constants  # the interpreter gives None


def _kind(n: int):
    """What Triton sees of a number; the number itself, a token count, would grow the dictionary."""
    return n % 16 == 0, n == 1, n < 2**31


def _rows(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch_statistics(logits, target, w, gradient, o, out=None, partial=False):
    """-> statistics (6, n), w * gradient or None. out: logits, or 0 where w is 0."""
    zeroed = out is not None and out is not logits
    logits, target, w = _rows(logits), _rows(target), w.contiguous()
    (N, V), stats = logits.shape, w.new_empty((6, logits.shape[0]))
    out = out if out is not None else logits.new_empty((N, V)) if gradient else logits

    def plan():
        # Measured on an H200. A second pass hopes for the L2 cache: few, wide programs, few rows.
        item, labels = logits.element_size(), gradient and o.target_format == "labels"
        wide = labels and V * item >= 2**17
        narrow = labels and not (wide or o.softcap or o.label_smoothing)  # those need registers
        size = 8192 if not gradient else 32768 if narrow or wide else 16384
        warps = 32 if wide else 8 if narrow or not gradient else 16
        block = min(triton.next_power_of_2(max(V, 32)), size // item)
        second = gradient and block // (2 if narrow else 1)
        more = dict(maxnreg=80) if narrow and not ROCM else {}  # three programs at a time, not two
        more["num_warps"] = max(warps * block * item // size, 1)
        constant = reference.Options(*o[:7], dtype=None)  # Triton's hooks write it out as JSON
        return (constant, partial, second, zeroed, block), more

    numbers = logits.stride(0), target.stride(0), out.stride(0), V, *o.shard(V)[1:]
    _launch(_statistics_kernel, N, (logits, target, w, stats, out), numbers,
            (o[:7], gradient, partial, zeroed, numbers), plan)
    return stats, out if gradient else None


def _launch_gradient(logits, target, w, upstream, stats, o, out=None):
    """-> w * upstream * gradient, in `out` if given. No upstream is one of 1."""
    logits, target, w = _rows(logits), _rows(target), w.contiguous()
    N, V = logits.shape
    out = logits.new_empty((N, V)) if out is None else out
    upstream, scaled = w if upstream is None else upstream, upstream is not None
    block = min(triton.next_power_of_2(max(V, 16)), 2048 // logits.element_size())
    strides = logits.stride(0), target.stride(0), upstream.stride(0), out.stride(0)
    numbers = *strides, V, *o.shard(V)[1:]
    _launch(_gradient_kernel, N * -(-V // block), (logits, target, w, upstream, stats, out),
            numbers, (o[:7], scaled, numbers), lambda: (
                (reference.Options(*o[:7], dtype=None), scaled, block), dict(num_warps=1)))
    return out


def _launch_prepare(keep, void=0, w=None, out=None, indexed=True):
    """Fills w and the void rows of out, where given. -> index, count if `indexed`."""
    n, V, keep = keep.numel(), 0 if out is None else out.shape[1], keep.contiguous()
    index = keep.new_empty(n + 1, dtype=torch.int64) if indexed else keep
    tensors = keep, keep if w is None else w, index, keep if out is None else out
    flags = w is not None, indexed
    _launch(_prepare_kernel, 1 if out is None else 1 + n, tensors, (void, n, V),
            (void, _kind(n), V, flags), lambda: ((*flags, 4096), dict(num_warps=8)))
    return (index[:n], index[n]) if indexed else None


# --------------------------------------------------------------------------- front door, custom ops
class TritonCrossEntropy(reference.MaskedCrossEntropy):
    """The reference's front door over the kernels; under torch.compile over the custom ops."""

    # float16 would round w * (softmax - target) before upstream, a loss scale, can lift it.
    fused = (torch.bfloat16, torch.float32, torch.float64)
    row_gradient, kept = staticmethod(_launch_gradient), staticmethod(_launch_prepare)

    def loss(self, o, prepared, *tensors):
        if torch.compiler.is_compiling():
            return loss_op(*tensors, *o)[0]
        return super().loss(o, prepared, *tensors)

    def prepare(self, o, linear, *args):
        x, target, loss_mask, ignore_index, reduction, cu_seqlens, num_items = args
        if x.device.type == "cpu" and not INTERPRETED:
            raise RuntimeError(
                "masked_ce_triton runs on GPU tensors, got CPU ones: import masked_ce instead, or "
                "set TRITON_INTERPRET=1 before anything imports triton")
        plain = (reduction == "mean" and o.target_format == "labels" and loss_mask is None
                 and cu_seqlens is None and num_items is None)
        if not plain or torch.compiler.is_compiling():  # super() fails in some Pythons' dynamo
            return reference.MaskedCrossEntropy.prepare(self, o, linear, *args)
        n, early = target.numel(), o.early and not (linear or o.vocab_group)
        w = x.new_empty(n, dtype=reference._accumulator(x.dtype))
        out = x.new_empty((n, x.shape[-1])) if early else None
        found = _launch_prepare(target, int(ignore_index), w, out, linear and o.skip == "rows")
        return w, found if linear else out

    def row_statistics(self, logits, target, w, o):
        if o.vocab_group:
            return reference.row_statistics(logits, target, w, o, lambda *args: _launch_statistics(
                *args[:3], False, o, partial=True)[0][:5])
        return _launch_statistics(logits, target, w, False, o)[0]

    def row_pass(self, logits, target, w, gradient, o, out=None):
        if o.vocab_group:
            return super().row_pass(logits, target, w, gradient, o, out)
        return _launch_statistics(logits, target, w, gradient, o, out)

    def scaled(self, ctx, grad, upstream, dtype):
        """In place where nobody else holds the gradient: an upstream of 1 then costs nothing."""
        alone, n = grad.dtype == dtype and not ctx.options.retain_graph, grad.numel()
        ctx.spent |= alone
        out = grad if alone else torch.empty_like(grad, dtype=dtype)
        _launch(_scale_kernel, min(-(-n // 8192), 2048), (grad, out, upstream), (n,),
                (alone, _kind(n)), lambda: ((alone, 8192), dict(num_warps=8)))
        return out.data  # with a version of its own: ctx's stays as it was, whatever is done to it


_losses = TritonCrossEntropy()
_traced = SimpleNamespace(  # what the ops' backward calls: an op, and nothing in place
    scaled=super(TritonCrossEntropy, _losses).scaled,
    gradients=lambda o, *tensors: loss_gradients_op(*tensors, *o))
masked_cross_entropy = _losses.masked_cross_entropy
masked_cross_entropy_from_distribution = _losses.masked_cross_entropy_from_distribution
masked_linear_cross_entropy = _losses.masked_linear_cross_entropy
masked_linear_distillation = _losses.masked_linear_distillation

# A namespace of this module's own: with a fixed one, a second copy of this file in the process
# would register its kernels over the first one's.
NAMESPACE = "masked_ce_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in __name__)
TENSORS = ("Tensor x, Tensor? weight, Tensor? bias, Tensor target, Tensor? teacher_weight, "
           "Tensor? teacher_bias, Tensor w")
KINDS = {str: "str", float: "float", bool: "bool", int: "SymInt", torch.dtype: "ScalarType"}
OPTIONS = ", ".join(f"{KINDS.get(kind, 'bool[]')} {name}"
                    for name, kind in reference.Options.__annotations__.items())
COUNT = len(reference.Options._fields)


def _fake_gradients(o, x, weight, *args):
    w, (need_x, need_weight, need_bias) = args[4], o.needs
    if weight is None:
        return x.new_empty(x.shape) if need_x else None, None, None
    (N, H), V = x.shape, weight.shape[0]  # not len(), which would make a dynamic size a constant
    dtype = w.dtype if o.dtype == torch.float16 else None
    return (x.new_empty(N if need_x else 0, H, dtype=dtype),
            weight.new_empty(V if need_weight else 0, H, dtype=dtype),
            w.new_empty(V if need_bias else 0))


def _fake_loss(o, x, weight, *args):
    w, forward = args[4], o if o.early else o._replace(needs=(False,) * 3)
    loss, stats = w.new_empty(w.shape if o.per_token else ()), w.new_empty(6, *w.shape)
    return (loss, stats if weight is None or o.per_token else None,
            None if weight is None else torch.empty(1, dtype=torch.int64, device="cpu"),
            *_fake_gradients(forward, x, weight, *args))


def _op(function):
    """Of tensors and an Options' fields; an op has no None to return."""
    return lambda *args: tuple(
        torch.empty(0, device="cpu") if x is None else x
        for x in function(reference.Options(*args[-COUNT:]), *args[:-COUNT]))


def _setup(ctx, inputs, output):
    ctx.mark_non_differentiable(*output[1:])
    o = reference.Options(*inputs[-COUNT:])
    reference.loss_setup(ctx, _traced, inputs[:-COUNT], o, output)


loss_op = torch.library.custom_op(
    f"{NAMESPACE}::loss", _op(lambda *args: reference.loss_pass(_losses, *args)), mutates_args=(),
    schema=f"({TENSORS}, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")
loss_op.register_fake(_op(_fake_loss))
loss_op.register_autograd(reference.loss_backward, setup_context=_setup)
loss_gradients_op = torch.library.custom_op(
    f"{NAMESPACE}::loss_gradients", _op(_losses.gradients), mutates_args=(),
    schema=f"({TENSORS}, Tensor upstream, Tensor stats, Tensor count, {OPTIONS})"
           " -> (Tensor, Tensor, Tensor)")
loss_gradients_op.register_fake(_op(_fake_gradients))
