# SPDX-License-Identifier: MIT
"""Masked cross-entropy on Triton kernels: masked_ce.py's names, signatures and meaning, faster.

Copy this file beside masked_ce.py and change one import line. Validation, weights, reductions and the
chunk loop are masked_ce's; here are its two row functions as kernels, and the custom ops that make
torch.compile(fullgraph=True) work. Symbols (z, m, s, q, t, tm, ts, x) are masked_ce's.

Needs a GPU; CPU tensors run where TRITON_INTERPRET=1 was set before anything imported triton.
"""
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("masked_ce_triton needs triton. masked_ce has the same names without it") from error
try:
    from . import masked_ce as reference  # copied into a package
except ImportError:
    import masked_ce as reference

shift_labels, token_weights, count_items = (
    reference.shift_labels, reference.token_weights, reference.count_items)

INF = tl.constexpr(float("inf"))


# ----------------------------------------------------------------------------------- device functions
@triton.jit
def _finite(m):
    """A maximum to subtract: -inf - -inf is NaN, exp(-inf - 0) is the 0 that is meant."""
    return tl.where(m == -INF, 0.0, m)


@triton.jit
def _tanh(x):
    """-e / (2 + e), e = expm1(-2|x|), Kahan's expm1. (The interpreter lacks libdevice's tanh; 2*sigmoid(2x)-1
    loses the low bits of a small x.)"""
    y = -2.0 * tl.abs(x)
    u = tl.exp(y)
    e = tl.where(u == 1.0, y, (u - 1.0) * y / tl.log(tl.where(u == 1.0, 0.5, u)))
    e = tl.where(y > -1.0, e, u - 1.0)
    return tl.where(x < 0, e, -e) / (2.0 + e)


@triton.jit
def _load(row, columns, inside, ACC: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """z. Lanes past the end become -inf after softcap, which would make them -softcap."""
    z = tl.load(row + columns, mask=inside, other=0.0).to(ACC)
    if SOFTCAP > 0.0:
        z = SOFTCAP * _tanh(z / SOFTCAP)
    if TEMPERATURE != 1.0:
        z = z / TEMPERATURE
    return tl.where(inside, z, -INF)


@triton.jit
def _target(row, columns, inside, column, ACC: tl.constexpr, TARGET: tl.constexpr, SMOOTHING: tl.constexpr,
            SMOOTH_EACH: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr):
    """Teacher logits t, or q: probabilities, or a label's one-hot ones, smoothed."""
    if TARGET == "logits":
        t = _load(row, columns, inside, ACC, SOFTCAP, TEMPERATURE)
    elif TARGET == "probabilities":
        t = tl.load(row + columns, mask=inside, other=0.0).to(ACC)
    else:
        t = tl.where(columns == column, 1.0 - SMOOTHING, 0.0).to(ACC) + SMOOTH_EACH
        t = tl.where(inside, t, 0.0)
    return t


@triton.jit
def _moved(x, m, s, tm, ts, new_m, new_tm, TARGET: tl.constexpr, DIVERGENCE: tl.constexpr):
    """x, s, ts relative to the maxima m, tm -> relative to new_m, new_tm (see masked_ce.merge)."""
    dm = m - _finite(new_m)
    scale = tl.exp(dm)
    if TARGET != "labels":
        t_scale = tl.exp(tm - _finite(new_tm)) if TARGET == "logits" else 1.0
        shift = -_finite(dm)
        if TARGET == "logits" and DIVERGENCE != "cross_entropy":
            shift += _finite(tm - _finite(new_tm))
        if DIVERGENCE == "reverse_kl":
            x = tl.where(scale > 0, (x - tl.where(s != 0, s * shift, 0.0)) * scale, 0.0)
        else:
            x = (x + tl.where(ts != 0, ts * shift, 0.0)) * t_scale
            x = tl.where(t_scale > 0, x, 0.0) if TARGET == "logits" else x
        ts = ts * t_scale
    return x, s * scale, ts


# ------------------------------------------------------------------------------------------- kernels
@triton.jit
def _statistics_kernel(
    logits_ptr, target_ptr, w_ptr,  # (N, V), (N, V) or (N,), (N,)
    loss_ptr, stats_ptr,  # (N,), (5, N)
    logits_stride, target_stride, N, V, first, vocab_size,
    TARGET: tl.constexpr, DIVERGENCE: tl.constexpr, SMOOTHING: tl.constexpr, SMOOTH_EACH: tl.constexpr,
    Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr,
    PARTIAL: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    """w * loss and the statistics of a row, online (Milakov and Gimelshein, arXiv 1805.02867).

    Grid (N,), a program a row, one pass: reads B, from a distribution 2B; writes 6 numbers. The running
    maxima and sums are vectors, a lane for each VECTOR columns that a thread loads at once, so that the
    loop needs no reduction across threads. PARTIAL: the columns are a shard; masked_ce finishes.
    """
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(w_ptr + row)
    if w == 0:
        tl.store(loss_ptr + row, w)
        for k in tl.static_range(5):
            tl.store(stats_ptr + k * N + row, w)
        return
    logits_ptr += row * logits_stride
    target_ptr += row * target_stride
    LABEL: tl.constexpr = TARGET == "labels" or TARGET == "smoothed"
    column = tl.load(target_ptr).to(tl.int64) - first if LABEL else 0

    lanes = tl.arange(0, BLOCK // VECTOR)
    m = tl.full([BLOCK // VECTOR], -INF, ACC)
    s = tl.zeros([BLOCK // VECTOR], ACC)
    x = tl.zeros([BLOCK // VECTOR], ACC)
    tm = tl.full([BLOCK // VECTOR], -INF if TARGET == "logits" else 0.0, ACC)
    ts = tl.zeros([BLOCK // VECTOR], ACC)
    for start in range(0, V, BLOCK):
        columns = start + lanes[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
        inside = columns < V
        z = _load(logits_ptr, columns, inside, ACC, SOFTCAP, TEMPERATURE)
        new_m = tl.maximum(m, tl.max(z, 1))
        new_tm = tm
        if TARGET != "labels":
            t = _target(target_ptr, columns, inside, column, ACC, TARGET, SMOOTHING, SMOOTH_EACH,
                        TEACHER_SOFTCAP, TEMPERATURE)
            if TARGET == "logits":
                new_tm = tl.maximum(tm, tl.max(t, 1))
        x, s, ts = _moved(x, m, s, tm, ts, new_m, new_tm, TARGET, DIVERGENCE)
        m = new_m
        tm = new_tm
        below = z - _finite(m)[:, None]
        e = tl.exp(below)
        s += tl.sum(e, 1)
        if TARGET != "labels":
            if TARGET == "logits":
                log_q = t - _finite(tm)[:, None]
                q = tl.exp(log_q)
            else:
                q = t
                log_q = tl.log(t) if DIVERGENCE != "cross_entropy" else t
            ts += tl.sum(q, 1)
            if DIVERGENCE == "reverse_kl":
                x += tl.sum(tl.where(e != 0, e * (below - log_q), 0.0), 1)
            elif DIVERGENCE == "forward_kl":
                x += tl.sum(tl.where(q != 0, q * (log_q - below), 0.0), 1)
            else:
                x += tl.sum(tl.where(q != 0, -q * below, 0.0), 1)

    row_m = tl.max(m, 0)
    row_tm = tl.max(tm, 0)
    x, s, ts = _moved(x, m, s, tm, ts, row_m, row_tm, TARGET, DIVERGENCE)
    x = tl.sum(x, 0)
    s = tl.sum(s, 0)
    ts = tl.sum(ts, 0)
    if TARGET == "labels":
        here = (column >= 0) & (column < V)
        z = _load(logits_ptr, column, here, ACC, SOFTCAP, TEMPERATURE)
        x = tl.where(here, _finite(row_m) - z, 0.0)
        ts = tl.where(here, 1.0, 0.0).to(ACC)
    if not PARTIAL:
        mass = ts if TARGET == "probabilities" else 1.0
        if DIVERGENCE == "reverse_kl":
            x = x / s - tl.log(s)
            x += tl.log(ts) if TARGET == "logits" else 0.0
        else:
            x = (x / ts if TARGET == "logits" else x) + tl.log(s) * mass
            x -= tl.log(ts) if TARGET == "logits" and DIVERGENCE == "forward_kl" else 0.0
        if LABEL:
            if Z_LOSS > 0.0:
                lse = row_m + tl.log(s)
                x += Z_LOSS * lse * lse
            known = (column + first >= 0) & (column + first < vocab_size)
            x = tl.where(known, x, float("nan"))
            s = tl.where(known, s, float("nan"))
        tl.store(loss_ptr + row, w * x)
    tl.store(stats_ptr + row, x)
    tl.store(stats_ptr + N + row, row_m)
    tl.store(stats_ptr + 2 * N + row, s)
    tl.store(stats_ptr + 3 * N + row, row_tm)
    tl.store(stats_ptr + 4 * N + row, ts)


@triton.jit
def _gradient_kernel(
    logits_ptr, target_ptr, w_ptr, upstream_ptr, stats_ptr, out_ptr,  # out (N, V) may be the logits
    logits_stride, target_stride, upstream_stride, out_stride, N, V, first, blocks,
    TARGET: tl.constexpr, DIVERGENCE: tl.constexpr, SMOOTHING: tl.constexpr, SMOOTH_EACH: tl.constexpr,
    Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, TEACHER_SOFTCAP: tl.constexpr, TEMPERATURE: tl.constexpr,
    UPSTREAM: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):
    """w * upstream * dl/dlogits of one block of a row, rounded once, when it is stored.

    Grid (N * blocks,) with blocks = cdiv(V, BLOCK); the first dimension of a grid alone may pass 65535.
    Reads B (from a distribution 2B), writes B; rows of weight 0 read nothing and write zeros.
    """
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    logits_ptr += row * logits_stride
    target_ptr += row * target_stride
    out_ptr += row * out_stride
    w = tl.load(w_ptr + row)
    if w == 0:
        tl.store(out_ptr + columns, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=inside)
        return
    m = tl.load(stats_ptr + N + row)
    s = tl.load(stats_ptr + 2 * N + row)
    tm = tl.load(stats_ptr + 3 * N + row)
    ts = tl.load(stats_ptr + 4 * N + row)
    z = _load(logits_ptr, columns, inside, ACC, SOFTCAP, TEMPERATURE)
    below = z - m
    p = tl.exp(below) * (1.0 / s)
    if TARGET == "labels" or TARGET == "smoothed":
        column = tl.load(target_ptr).to(tl.int64) - first
        grad = p * (1.0 + 2.0 * Z_LOSS * (m + tl.log(s))) if Z_LOSS > 0.0 else p
        if TARGET == "labels":
            grad = tl.where(columns == column, grad - 1.0, grad)
        else:
            grad -= _target(target_ptr, columns, inside, column, ACC, TARGET, SMOOTHING, SMOOTH_EACH, 0.0, 1.0)
    else:
        t = _target(target_ptr, columns, inside, 0, ACC, TARGET, 0.0, 0.0, TEACHER_SOFTCAP, TEMPERATURE)
        if DIVERGENCE == "reverse_kl":
            log_q = t - tm - tl.log(ts) if TARGET == "logits" else tl.log(t)
            grad = tl.where(p != 0, p * (below - tl.log(s) - log_q - tl.load(stats_ptr + row)), 0.0)
        else:
            grad = p - tl.exp(t - tm) / ts if TARGET == "logits" else p * ts - t
    if SOFTCAP > 0.0:
        tanh = z * (TEMPERATURE / SOFTCAP)
        grad *= 1.0 - tanh * tanh
    c = w / TEMPERATURE
    if UPSTREAM:
        c *= tl.load(upstream_ptr + row * upstream_stride)
    tl.store(out_ptr + columns, (grad * c).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(x_ptr, out_ptr, upstream_ptr, n, IN_PLACE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """out = x * upstream. In place and with an upstream of 1, the usual one, it reads 1 number and leaves.

    Grid (a few programs a multiprocessor,), each strides over the blocks: one read, one write of n.
    """
    upstream = tl.load(upstream_ptr)
    if IN_PLACE:
        if upstream == 1:
            return
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < n)
        tl.store(out_ptr + at, (x.to(ACC) * upstream).to(out_ptr.dtype.element_ty), mask=at < n)


# ----------------------------------------------------------------------------------------- launches
INTERPRETED = not isinstance(_statistics_kernel, triton.JITFunction)


def _constants(logits: Tensor, target: Tensor, o, vocab_size: int) -> dict:
    smoothed = o.target_format == "labels" and o.label_smoothing > 0
    return dict(
        TARGET="smoothed" if smoothed else o.target_format, DIVERGENCE=o.divergence,
        SMOOTHING=o.label_smoothing, SMOOTH_EACH=o.label_smoothing / vocab_size, Z_LOSS=o.z_loss,
        SOFTCAP=o.softcap, TEACHER_SOFTCAP=o.teacher_softcap, TEMPERATURE=o.temperature,
        ACC=tl.float64 if logits.dtype == torch.float64 else tl.float32)


def _row_contiguous(x: Tensor) -> Tensor:
    return x if x.dim() < 2 or x.stride(1) == 1 else x.contiguous()


def _launch_statistics(logits, target, w, o, partial=False):
    logits, target, w = _row_contiguous(logits), _row_contiguous(target), w.contiguous()
    (N, V), (_, first, vocab_size) = logits.shape, o.shard(logits.shape[1])
    losses, stats = w.new_empty(N), w.new_empty(5, N)
    vector = 16 // logits.element_size()
    block = 2048
    if N:
        with torch.cuda.device_of(logits):
            _statistics_kernel[(N,)](
                logits, target, w, losses, stats, logits.stride(0), target.stride(0), N, V, first, vocab_size,
                **_constants(logits, target, o, vocab_size), PARTIAL=partial, BLOCK=block, VECTOR=vector, num_warps=4)
    return losses, stats


def _launch_gradient(logits, target, w, upstream, stats, o, out=None):
    logits, target, w = _row_contiguous(logits), _row_contiguous(target), w.contiguous()
    (N, V), (_, first, vocab_size) = logits.shape, o.shard(logits.shape[1])
    out = torch.empty((N, V), dtype=logits.dtype, device=logits.device) if out is None else out
    block = 2048
    blocks = triton.cdiv(V, block)
    if N:
        with torch.cuda.device_of(logits):
            _gradient_kernel[(N * blocks,)](
                logits, target, w, w if upstream is None else upstream, stats, out, logits.stride(0),
                target.stride(0), 0 if upstream is None else upstream.stride(0), out.stride(0), N, V, first, blocks,
                **_constants(logits, target, o, vocab_size), UPSTREAM=upstream is not None, BLOCK=block, num_warps=4)
    return out


def _scaled(grad: Tensor, upstream: Tensor, out: Tensor) -> Tensor:
    n, block = grad.numel(), 8192
    acc = tl.float64 if grad.dtype == torch.float64 else tl.float32
    if n:
        with torch.cuda.device_of(grad):
            programs = min(triton.cdiv(n, block), 4096)
            _scale_kernel[(programs,)](grad, out, upstream, n, IN_PLACE=out is grad, ACC=acc, BLOCK=block,
                                       num_warps=8)
    return out


# ------------------------------------------------------------------------------------- custom ops
# A namespace of this module's own: with a fixed one, a second copy of this file in the process would
# register its kernels over the first one's.
NAMESPACE = "masked_ce_" + "".join(c if c.isalnum() else f"_{ord(c)}_" for c in __name__)
_OPTIONS = ("str target_format, str divergence, float label_smoothing, float z_loss, float softcap, "
            "float teacher_softcap, float temperature, str vocab_group, str skip, SymInt chunk_size, "
            "SymInt max_kept, bool per_token, bool need_hidden, bool need_weight, bool need_bias, "
            "ScalarType dtype, bool retain_graph")
_LINEAR = ("Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? teacher_weight, "
           "Tensor? teacher_bias, Tensor w")


class TritonCrossEntropy(reference.MaskedCrossEntropy):
    """The reference's front door over the kernels above, each step that autograd sees a custom op."""

    def __init__(self):
        self.row_gradient_op = self._op(
            "row_gradient", f"(Tensor logits, Tensor target, Tensor w, Tensor upstream, Tensor stats, {_OPTIONS})"
            " -> Tensor",
            lambda logits, target, w, upstream, stats, *o: _launch_gradient(
                logits, target, w, upstream, stats, reference.Options(*o)),
            lambda logits, *_: logits.new_empty(logits.shape))
        self.row_loss = self._op(
            "row_loss", f"(Tensor logits, Tensor target, Tensor w, {_OPTIONS}) -> (Tensor, Tensor)",
            lambda logits, target, w, *o: self.row_statistics(logits, target, w, reference.Options(*o)),
            lambda logits, target, w, *_: (w.new_empty(w.shape), w.new_empty(5, len(w))),
            reference.row_setup, reference.row_backward)
        self.linear_gradients_op = self._op(
            "linear_gradients", f"(Tensor upstream, {_LINEAR}, Tensor stats, Tensor count, {_OPTIONS})"
            " -> (Tensor, Tensor, Tensor)",
            lambda *args: reference.linear_gradients(self, *args),
            lambda upstream, *args: _fake_gradients(args[:7], reference.Options(*args[9:])))
        self.linear_loss = self._op(
            "linear_loss", f"({_LINEAR}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
            lambda *args: reference.linear_forward(self, *args), _fake_linear,
            reference.linear_setup, TritonCrossEntropy.linear_backward)

    def _op(self, name, schema, run, fake, setup=None, backward=None):
        def on_device(*args):
            device = next(x for x in args if isinstance(x, Tensor)).device
            if device.type == "cpu" and not INTERPRETED:
                raise RuntimeError("masked_ce_triton runs on GPU tensors, got CPU ones: import masked_ce instead, "
                                   "or set TRITON_INTERPRET=1 before triton is imported")
            return run(*args)

        op = torch.library.custom_op(f"{NAMESPACE}::{name}", on_device, mutates_args=(), schema=schema)
        op.register_fake(fake)
        if backward is not None:
            op.register_autograd(reference.first_order(lambda *args: backward(self, *args)), setup_context=setup)
        return op

    def row_statistics(self, logits, target, w, o):
        if o.vocab_group:
            return reference.row_statistics(
                logits, target, w, o, lambda *args: _launch_statistics(*args, partial=True)[1])
        return _launch_statistics(logits, target, w, o)

    def row_gradient(self, logits, target, w, upstream, stats, o, out=None):
        return _launch_gradient(logits, target, w, upstream, stats, o, out)

    def scaled(self, ctx, grad, upstream, dtype):
        """In place where nobody else holds the gradient: an upstream of 1 then costs nothing."""
        if upstream is None or type(grad) is not Tensor:  # a tracer's tensor: inductor writes this kernel
            return super().scaled(ctx, grad, upstream, dtype)
        if grad.dtype != dtype or ctx.options.retain_graph:
            return _scaled(grad, upstream, torch.empty_like(grad, dtype=dtype))
        ctx.spent = True
        return _scaled(grad, upstream, grad)

    def linear_backward(self, ctx, upstream):
        if getattr(ctx, "spent", False):
            raise RuntimeError("the first backward scaled the saved gradients in place and gave them away; "
                               "a second one needs allow_retain_graph=True")
        return reference.linear_backward(self, ctx, upstream)


def _fake_gradients(inputs, o):
    hidden, weight, bias, *_, w = inputs
    half = o.dtype == torch.float16
    acc = reference._accumulator(o.dtype)

    def like(x, shape, need):
        return x.new_empty(shape if need else (0, *shape[1:]), dtype=acc if half else x.dtype)
    return (like(hidden, hidden.shape, o.need_hidden), like(weight, weight.shape, o.need_weight),
            like(weight, weight.shape[:1], o.need_bias))


def _fake_linear(*args):
    o, hidden, w = reference.Options(*args[7:]), args[0], args[6]
    forward = o._replace(**dict.fromkeys(("need_hidden", "need_weight", "need_bias"), False)) if o.per_token else o
    return (w.new_empty(w.shape if o.per_token else ()), w.new_empty(len(w) if o.per_token else 0, 5),
            torch.empty(1, dtype=torch.int64), *_fake_gradients(args[:7], forward))


_triton = TritonCrossEntropy()
masked_cross_entropy = _triton.masked_cross_entropy
masked_cross_entropy_from_distribution = _triton.masked_cross_entropy_from_distribution
masked_linear_cross_entropy = _triton.masked_linear_cross_entropy
masked_linear_distillation = _triton.masked_linear_distillation
