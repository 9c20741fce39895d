"""Every path of masked_ce.py and masked_ce_triton.py against a float64 oracle. `pytest` runs it.

Tests that take `api` run on both files: on a GPU if there is one, else on CPU, where Triton's
interpreter needs milliseconds a row: sizes are small, and comments say why they are what they are.
Functions of `r` run on both files in 2 or 4 ranks: gloo on CPU, and NCCL where there are two GPUs.
"""
import copy
import doctest
import functools
import importlib
import os
import pickle
import re
import shutil
import sys
import warnings
from datetime import timedelta
from itertools import product
from math import exp, inf, log, nan, prod
from pathlib import Path
from types import SimpleNamespace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton; torch._dynamo does

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import masked_ce

HALF, BFLOAT, FLOAT, DOUBLE = DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
torch.set_num_threads(1)  # the sizes are small, and threads on busy cores wait for each other
torch.use_deterministic_algorithms(True, warn_only=True)  # and torch.empty gives NaN, so that an
assert torch.empty(1, device=DEVICE).isnan()  # output which a kernel does not write shows
tensor = functools.partial(torch.tensor, device=DEVICE)
leaf = functools.partial(torch.tensor, device=DEVICE, dtype=FLOAT, requires_grad=True)
IGN = -100
LABELED = "labels", "linear", "probabilities"  # the paths that a label loss can take
DIVERGENCES = "cross_entropy", "forward_kl", "reverse_kl"
all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
mean_and_none = pytest.mark.parametrize("reduction", ["mean", "none"])


@pytest.fixture
def triton_api():
    return pytest.importorskip("triton") and importlib.import_module("masked_ce_triton")


@pytest.fixture(params=["reference", "triton"])
def api(request):
    return masked_ce if request.param == "reference" else request.getfixturevalue("triton_api")


# ------------------------------------------------------------------------- the rule and the oracle
def within(result, oracle, eager, rows=None):
    """error <= 2 * (eager's error + eps * max|oracle|); `assert err <= tol`, so that NaN fails.

    rows: each row by itself, or a whole confident row could vanish. They hold the size of the terms
    that cancelled in a row, whose float32 rounding is left: eager may be lucky in a single row.
    """
    eps, math_eps = torch.finfo(result.dtype).eps, torch.finfo(FLOAT).eps
    if result.dtype == DOUBLE:  # the oracle's own: against it, a result is right to 2^-46
        eps = math_eps = 2.0**-46
    assert result.shape == oracle.shape
    err, eager_err, size = (x.abs().max() if rows is None else x.abs().amax(-1) for x in (
        result.double() - oracle, eager.double() - oracle, oracle))
    tol = 2 * (eager_err + eps * size + (0 if rows is None else math_eps * rows.abs()))
    assert (err <= tol).all(), f"error {err.tolist()} > {tol.tolist()}"


def close(result, expected, rel=None):
    """Equal to numbers worked out by hand, relative to the largest of them; where they say 0, 0."""
    expected = torch.as_tensor(expected, dtype=DOUBLE, device=result.device)
    rel = rel or max(8 * torch.finfo(result.dtype).eps, 2e-10)  # the numbers have ten digits
    right = (result - expected).abs() <= rel * expected.abs().max().clamp(max=1e300)
    right |= (result == expected) | result.isnan() & expected.isnan()
    assert result.shape == expected.shape and right.all(), f"{result} is not {expected}"
    assert (result[expected == 0] == 0).all()


def same(x, y):  # bit for bit, NaN equal to NaN
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())


def gradients(loss, *x, upstream=1.0):
    return torch.autograd.grad(loss, x, loss.new_tensor(upstream).expand_as(loss))


PATHS = dict(labels=["logits"], probabilities=["logits"], teacher=["logits"],
             linear=["hidden", "weight", "bias"], distillation=["hidden", "weight", "bias"])
TOKEN_WISE = "logits probabilities teacher hidden teacher_hidden target mask keep".split()


def leaves(c, path):
    return [getattr(c, name) for name in PATHS[path]]


def make_case(dtype=FLOAT, shape=(3, 4), V=67, H=16):
    """Confident rows (p near 1), token weights from .01 to 10, labels 0 and V - 1, odd sizes; a
    third of the tokens and the whole last sample masked: rows of NaN, bad labels."""
    rng, n = torch.Generator().manual_seed(0), prod(shape)  # on CPU: one case for every device
    randn = functools.partial(torch.randn, generator=rng)
    tokens, target = torch.arange(n), torch.randint(V, (n,), generator=rng)
    target[0], target[1], confident = 0, V - 1, tokens % 5 == 1
    weight, logits, hidden = randn(V, H), 2 * randn(n, V), randn(n, H) / 2
    logits[tokens[confident], target[confident]] += 14
    hidden[confident] = 1.5 * weight[target[confident]]
    c = dict(logits=logits, hidden=hidden, weight=weight, bias=randn(V), teacher=2 * randn(n, V),
             probabilities=randn(n, V).softmax(1) * (1 + randn(n, 1).abs()),  # sums are not 1
             teacher_hidden=randn(n, H + 3), teacher_weight=randn(V, H + 3) / 2,
             teacher_bias=randn(V))
    c = {name: x.to(dtype) for name, x in c.items()}
    masked = (tokens % 3 == 2) | (tokens >= n - shape[-1] * (len(shape) - 1))
    by_label = masked & (tokens % 2 == 0)  # the others by a weight of 0
    c["target"] = target.where(~masked, 10**6).masked_fill(by_label, IGN)
    a = (10 ** torch.linspace(-2, 1, n))[torch.randperm(n, generator=rng)]
    c["mask"], c["keep"] = a.where(~masked | by_label, 0), ~masked
    for name in TOKEN_WISE:
        c[name] = c[name].masked_fill(masked[:, None], nan) if c[name].dim() > 1 else c[name]
        c[name] = c[name].view(*shape, *c[name].shape[1:])
    c = {name: x.to(DEVICE) for name, x in c.items()}
    for name in ("logits", *PATHS["linear"]):
        c[name].requires_grad_()
    return SimpleNamespace(**c)


def call(api, path, c, **o):
    if path == "labels":
        return api.masked_cross_entropy(c.logits, c.target, c.mask, **o)
    o |= dict(linear_bias=c.bias) if len(PATHS[path]) > 1 else {}
    if path == "linear":
        return api.masked_linear_cross_entropy(c.hidden, c.weight, c.target, c.mask, **o)
    mask = None if c.mask is None else torch.where(c.keep, c.mask, 0)  # there are no labels
    if path == "distillation":
        teacher = c.teacher_hidden, c.teacher_weight, mask
        return api.masked_linear_distillation(
            c.hidden, c.weight, *teacher, teacher_bias=c.teacher_bias, **o)
    o |= dict(target_format="logits") if path == "teacher" else {}
    return api.masked_cross_entropy_from_distribution(c.logits, getattr(c, path), mask, **o)


def plain(path, c, dtype, reduction="mean", upstream=None, *, divergence="cross_entropy",
          softcap=None, teacher_softcap=None, temperature=1.0, label_smoothing=0.0, z_loss=0.0):
    """-> [loss, *gradients], the gradients' rows for `within`: torch's autograd on kept rows only.
    In float64, the oracle. In the inputs' dtype, eager: GEMMs of that dtype, losses in float32."""
    x = [y.detach().to(dtype).requires_grad_() for y in leaves(c, path)]

    def logits(cap, x, *head):
        z = F.linear(x[c.keep], *head) if head else x[c.keep]
        z = z.to(torch.promote_types(dtype, FLOAT))
        return (cap * torch.tanh(z / cap) if cap else z) / temperature

    z = logits(softcap, *x)
    log_p = z.log_softmax(1)
    if path in ("labels", "linear"):
        loss = z_loss * z.logsumexp(1) ** 2 + F.cross_entropy(
            z, c.target[c.keep], reduction="none", label_smoothing=label_smoothing)
    else:
        t = [c.teacher_hidden, c.teacher_weight, c.teacher_bias]
        t = [y.to(dtype) for y in ([c.teacher] if path == "teacher" else t)]
        log_q = (logits(teacher_softcap, *t).log_softmax(1) if path != "probabilities" else
                 c.probabilities[c.keep].to(z.dtype).log())
        loss = {"cross_entropy": -log_q.exp() * log_p, "forward_kl": log_q.exp() * (log_q - log_p),
                "reverse_kl": log_p.exp() * (log_p - log_q)}[divergence].sum(1)
    w = torch.where(c.keep, c.mask, 0).to(z.dtype)
    if reduction == "mean":
        w = w / w.sum()
    elif reduction == "sample_mean":
        w = torch.where(c.keep, w / w.sum(1, keepdim=True), 0) / c.keep.any(1).sum()
    losses = torch.zeros_like(w).masked_scatter(c.keep, loss)
    loss = losses * w if reduction == "none" else (losses * w).sum()
    results = [loss.detach(), *torch.autograd.grad(loss, x, upstream)]
    w = torch.where(c.keep, w if upstream is None else w * upstream, 0)
    rows = [w * (1 + losses.detach()), None, None]  # p - 1, or p * (log p/q - loss)
    if len(x) > 1:  # columns with small p: exp of a z, up to 30 here, that was rounded
        rows[1] = 32 * results[2].abs().amax(1)
    return results, rows


CUT = dict(logits=-1, teacher=-1, probabilities=-1, weight=0, bias=0)  # the vocabulary's dimension


def part(r, x, dim=0):  # of rank r
    return x if r is None or dim is None else x.chunk(r.world, dim)[r.rank]


def shard(r, c, path, wanted=(True,) * 3, low=-inf):
    """This rank's part of the vocabulary, as leaves. -1e5 in c becomes -inf, which means the same
    but for the oracle's 0 * inf (in the teacher `low`: -1e5 is 0 in the whole, not in a shard)."""
    mine = {name: part(r, x, CUT.get(name)).detach().clone() for name, x in vars(c).items()}
    for name in CUT:
        mine[name][mine[name] == -1e5] = low if name == "teacher" else -inf
    for name, wants in zip(PATHS[path], wanted):
        mine[name].requires_grad_(wants)
    return SimpleNamespace(**mine)


def check(api, path, c, reduction="mean", strategy={}, r=None, cut={}, **o):
    """Loss and every gradient by the rule, in their dtypes; 0 where masked; inputs untouched.
    With r: of this rank's shard, and one loss on all ranks."""
    mine, group = shard(r, c, path, **cut), {} if r is None else dict(vocab_group=r.group)
    before = copy.deepcopy(mine)
    loss = call(api, path, mine, reduction=reduction, **strategy, **group, **o)
    upstream = torch.linspace(-1, 2, loss.numel(), device=DEVICE, dtype=loss.dtype).view(loss.shape)
    if reduction == "none":
        assert (loss[~c.keep] == 0).all()
        upstream = upstream.where(c.keep, nan)
    if r is not None:
        dist.all_gather(losses := [torch.empty_like(loss) for _ in range(r.world)], loss.detach())
        assert all(torch.equal(x, loss) for x in losses)
    (oracle, *rights), rows = plain(path, c, DOUBLE, reduction, upstream.double(), **o)
    (eager, *others), _ = plain(path, c, leaves(c, path)[0].dtype, reduction, upstream, **o)
    within(loss.detach(), oracle, eager)
    assert loss.dtype == eager.dtype
    loss.backward(upstream) if loss.requires_grad else None
    for name, x, row, *pair in zip(PATHS[path], leaves(mine, path), rows, rights, others):
        if x.requires_grad:
            row = part(r, row) if name == "weight" else row
            within(x.grad, *(part(r, y, CUT.get(name)) for y in pair), row)
        if x.requires_grad and name in TOKEN_WISE:
            assert (x.grad[~c.keep] == 0).all()
    assert all(map(same, vars(mine).values(), vars(before).values()))


@all_dtypes
def test_the_rule_has_teeth(dtype):
    c = make_case(dtype)
    (_, grad), (rows, *_) = plain("labels", c, DOUBLE)
    (_, eager), _ = plain("labels", c, dtype)
    within(grad.to(dtype), grad, eager, rows)
    confident = c.logits.amax(-1, keepdim=True) > 9
    for fault in (0 * grad, grad.clamp(max=0), grad * c.keep.sum() / c.keep.numel(),
                  grad.masked_fill(confident, 0), grad.masked_fill((c.mask < 0.1)[..., None], 0)):
        with pytest.raises(AssertionError):  # also without softmax, divided by all rows
            within(fault.to(dtype), grad, eager, rows)


# ------------------------------------------------------------------------------------------ values
STRATEGIES = dict(  # 12 tokens, 6 kept: one chunk, even chunks, empty chunks, spare rows
    rows={}, rows3=dict(chunk_size=3), chunks2=dict(skip="chunks", chunk_size=2),
    none=dict(skip="none"), none4=dict(skip="none", chunk_size=4), max_kept=dict(max_kept=6),
    max_kept9=dict(max_kept=9, chunk_size=4), max_kept99=dict(max_kept=99))
VALUES = [
    ("labels", "rows", dict(reduction="none", label_smoothing=0.1, z_loss=0.01)),
    ("labels", "rows", dict(reduction="sample_mean", softcap=5.0, temperature=0.7)),
    ("probabilities", "rows", dict(reduction="none", softcap=5.0, temperature=1.7)),
    ("teacher", "rows", dict(divergence="reverse_kl", temperature=1.7)),
    ("linear", "rows", {}),
    ("linear", "rows3", dict(reduction="none")),
    ("linear", "none4", dict(label_smoothing=0.1, z_loss=0.01)),
    ("linear", "chunks2", dict(reduction="sample_mean")),
    ("linear", "max_kept99", dict(reduction="sum", softcap=15.0, temperature=0.7)),
    ("linear", "max_kept9", dict(reduction="none")),
    ("distillation", "rows", {}),
    ("distillation", "rows3", dict(divergence="forward_kl", reduction="none", temperature=1.7)),
    ("distillation", "max_kept9", dict(divergence="reverse_kl", softcap=15.0, teacher_softcap=3.0))]


@pytest.mark.parametrize("path, name, o", VALUES)
@all_dtypes
def test_values(api, dtype, path, name, o):
    check(api, path, make_case(dtype), strategy=STRATEGIES[name], **o)


@pytest.mark.parametrize("dtype, V", [  # less than a block; whole blocks; an odd tail; a wide row
    (BFLOAT, 2), (FLOAT, 67), (DOUBLE, 4096), (DOUBLE, 4099), (FLOAT, 2**15 + 5)], ids=str)
@pytest.mark.parametrize("path, o", [("labels", {}), *(
    (path, dict(divergence=d)) for path in ("probabilities", "teacher") for d in DIVERGENCES)])
def test_vocabulary_sizes(api, path, o, dtype, V):
    check(api, path, make_case(dtype, (5,), V), **o)


@pytest.mark.parametrize("path", PATHS)
def test_gradcheck(api, path):
    c = make_case(DOUBLE, (2, 2), V=3, H=2)  # tiny, for the interpreter
    # Finite differences need numbers, masked or not.
    x = [y.detach().nan_to_num(0.5).requires_grad_() for y in leaves(c, path)]
    o = dict(reduction="sum") | (dict(allow_retain_graph=True) if len(x) > 1 else {})

    def loss(*x):
        return call(api, path, SimpleNamespace(**vars(c) | dict(zip(PATHS[path], x))), **o)

    assert torch.autograd.gradcheck(loss, x, atol=1e-8, rtol=1e-5)
    grad = torch.autograd.grad(loss(*x), x[0], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


# ----------------------------------------------- known_faults.md, by number: faults that people met
def through(api, path, z, y, mask=None, **o):
    """A loss of z by each path, y labels or a distribution. The linear ones: hidden z, weight 1;
    for one row (long, with inf) weight 0, bias z."""
    x, W, b = (z, torch.eye(z.shape[-1]).to(z), None) if z[..., 0].numel() > 1 else (
        torch.ones_like(z[:, :1]), torch.zeros_like(z.t()), z[0])
    c = SimpleNamespace(logits=z, target=y, mask=mask, hidden=x, weight=W, bias=b, teacher=y,
                        probabilities=y, teacher_hidden=x, teacher_weight=W, teacher_bias=y[0])
    if path == "probabilities" and not y.is_floating_point():
        c.probabilities = F.one_hot(y.clamp(min=0), z.shape[-1]).to(z.dtype)
        c.keep, c.mask = y != IGN, torch.ones_like(y) if mask is None else mask
    return call(api, path, c, **o)


def lost(*losses):  # -> logits that give label 0 these losses
    return [[0, log(exp(loss) - 1)] for loss in losses]


Q, TEACHER = ["probabilities"], ["teacher", "distillation"]
TEN = [-inf] * 50_000 + [10] + [-inf] * 49_999
FOUR = ([[0, 0]] * 6, [0, 0, 0, 1, IGN, IGN])
DZ_4 = [[-0.125, 0.125]] * 3 + [[0.125, -0.125]] + [[0, 0]] * 2
FIVE_AND_ONE, UNEQUAL = lost(2, 2, 2, 2, 2, 10), lost(*[1] * 18, 3, 3)
FAULTS = {  # paths, z, target, options, loss, its gradient
    "1": (LABELED, [[1, 2, 3], [nan, inf, -inf]], [2, IGN], {}, 0.4076059644,
          [[0.0900305732, 0.2447284711, -0.3347590442], [0, 0, 0]]),
    "1 kept": (LABELED, [[1, 2, 3], [nan] * 3], [IGN, 1], {}, nan, [[0] * 3, [nan] * 3]),
    "2": (Q, [[0, 1, -inf]], [[0.25, 0.75, 0]], {}, 0.5632616875,
          [[0.0189414214, -0.0189414214, 0]]),  # .75 - .7310585786
    "2 mass on -inf": (Q, [[0, 1, -inf]], [[0.25, 0.7, 0.05]], {}, inf, None),
    **{f"2 {d}": (TEACHER, [[0] * 3], [[0, -inf, 0]], dict(divergence=d), loss, dz)
       for d, loss, dz in (("cross_entropy", log(3), [[-1 / 6, 1 / 3, -1 / 6]]),
                           ("forward_kl", log(1.5), [[-1 / 6, 1 / 3, -1 / 6]]),
                           ("reverse_kl", inf, None))},
    "17": (["linear"], [[0, 1, 2]], [2], dict(allow_retain_graph=True), 0.4076059644,
           [[0.0900305732, 0.2447284711, -0.3347590442]]),
    "3": (Q, [[0, 0]], [[0.5, 0.25]], {}, 0.5198603854, [[-0.125, 0.125]]),
    "4": (LABELED, *FOUR, {}, log(2), DZ_4),
    **{f"4 {skip} {n}": (["linear"], *FOUR, dict(chunk_size=n, skip=skip), log(2), DZ_4)
       for skip in ("rows", "chunks", "none") for n in (1, 2, 3, 4, 5, 6, 100)},
    **{f"6 {z}": (LABELED, [[z, z]], [0], {}, log(2), [[-0.5, 0.5]]) for z in (1e4, 1e6, 1e8)},
    "6 close": (LABELED, [[1e6 + 2, 1e6 - 1]], [0], {}, 0.0485873516,
                [[-0.0474258732, 0.0474258732]]),
    "7 padding": (LABELED, [[-100] * 3], [0], dict(softcap=1.0), log(3), [[0, 0, 0]]),  # flat tanh
    "7 saturated": (LABELED, [[1e4, 0, -1e4]], [1], dict(softcap=30.0), 30, [[0, -1, 0]]),
    "7 slope": (LABELED, [[30, 0]], [1], dict(softcap=30.0), 22.8478246788, [[0.4199743416, -1]]),
    "10": (LABELED, [[[0, log(3)], [nan] * 2, [nan] * 2], [[0, 0]] * 3],
           [[0, IGN, IGN], [0] * 3], dict(reduction="mean"), 0.8664339757,
           [[[-0.1875, 0.1875], [0, 0], [0, 0]], [[-0.125, 0.125]] * 3]),
    "11": (["labels"], [[0, 1, 2, 3]], [3], dict(label_smoothing=0.1), 0.5901896986, None),
    "11 plain": (LABELED, [[0, 1, 2, 3]], [3], {}, 0.4401896986,
                 [[0.0320586033, 0.0871443187, 0.2368828181, -0.3560857401]]),
    "20": (LABELED, [TEN], [50_000], {}, 0, [[0] * 100_000])}
for how, right, unequal in (("mean", 10 / 3, 1.2), ("sample_mean", 6, 2)):
    FAULTS |= {
        f"14 {how}": (LABELED, [lost(1, 1, 1, 1), lost(9, 9, 9, 9)], [[0] * 4, [IGN] * 4],
                      dict(reduction=how), 1, None),
        f"15 {how}": (LABELED, [FIVE_AND_ONE[:5], FIVE_AND_ONE[5:] * 5],
                      [[0] * 5, [0] + [IGN] * 4], dict(reduction=how), right, None),
        **{f"15 {how} {cu}": (LABELED, FIVE_AND_ONE, [0] * 6, dict(reduction=how, cu_seqlens=cu),
                              right, None) for cu in ([0, 5, 6], [0, 0, 5, 5, 6, 6])},
        f"15 {how} chunks": (["linear"], UNEQUAL, [0] * 20, dict(  # means of chunks would differ
            reduction=how, cu_seqlens=[0, 18, 20], chunk_size=13), unequal, None)}


@pytest.mark.parametrize("path, name", [(path, x) for x in FAULTS for path in FAULTS[x][0]])
def test_faults(api, path, name, r=None):
    _, z, y, o, right, dz = FAULTS[name]
    z, y = tensor(z, dtype=DOUBLE if r else FLOAT), tensor(y)
    rel = 1e-9 if r else {"2": 4e-6, "6 close": 2e-6}.get(name)
    o = {key: tensor(x, dtype=torch.int32) if key == "cu_seqlens" else x for key, x in o.items()}
    o |= dict(vocab_group=r.group) if r else {}
    loss = through(api, path, z := part(r, z, -1).clone().requires_grad_(), y, **o)
    close(loss, right, rel if r else None)
    if dz:  # 17: backward twice
        dz = part(r, tensor(dz, dtype=DOUBLE), -1)
        first = torch.autograd.grad(2 * loss, z, retain_graph=True)[0]
        try:
            close(torch.autograd.grad(3 * loss, z)[0] / 3, dz, rel)
        except RuntimeError as error:  # or an error that names the cure
            assert path in ("linear", "distillation") and name != "17"
            assert "allow_retain_graph=True" in str(error)
        close(first / 2, dz, rel)


XWB, Y = ([[1], [2], [3]], [[1], [0]], [0, 0]), [IGN, 0, 1]  # of faults 8 and 18


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
def test_faults_1_and_8_linear(api, strategy):
    x, W = leaf([[1, 2], [nan, inf]]), leaf([[1, 0], [0, 1], [1, 1]])
    loss = api.masked_linear_cross_entropy(x, W, tensor([2, IGN]), **strategy)
    dx, dW = gradients(loss, x, W)
    close(loss, 0.4076059644)
    close(dx, [[-0.2447284711, -0.0900305732], [0, 0]])
    close(dW, [[0.0900305732, 0.1800611463], [0.2447284711, 0.4894569421],
               [-0.3347590442, -0.6695180885]])
    x, W, b = map(leaf, XWB)  # 8: each token has its own upstream gradient
    loss = api.masked_linear_cross_entropy(
        x, W, tensor(Y), linear_bias=b, reduction="none", **strategy)
    dx, dW, db = gradients(loss, x, W, b, upstream=[5, 1, 2])
    close(loss, [0, 0.1269280110, 3.0485873516])
    close(dx, [[0], [-0.1192029220], [1.9051482536]])
    close(dW, [[5.4770389169], [-5.4770389169]])
    close(db, [1.7859453316, -1.7859453316])


@pytest.mark.parametrize("dtype, h", [(BFLOAT, 1), (HALF, 16)], ids=["bfloat16", "float16"])
def test_fault_5_long_sums(api, dtype, h):
    # A bf16 sum of steps of 8 stalls at 2048. In float16 8192 * 16 / 2 overflows before the mean
    # divides. The interpreter gets few rows: after 256, a bf16 sum does not see halves.
    slow, bf16 = DEVICE == "cpu" and api is not masked_ce, dtype == BFLOAT
    x = ([512] + [1] * 16 if bf16 else [8192] * 16) if slow else [h] * 8192
    hidden, W, y = tensor([x], dtype=dtype).t(), leaf([[0], [0]], dtype=dtype), tensor([0] * len(x))
    for o in (dict(chunk_size=1 if slow else 16), {}):
        loss = api.masked_linear_cross_entropy(
            hidden, W, y, reduction="sum" if bf16 else "mean", **o)
        right = sum(x) / 2 / (1 if bf16 else len(x))
        close(gradients(loss, W)[0], [[-right], [right]])


LAYOUTS = dict(
    transposed=lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    every_other=lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    wider_buffer=lambda x: F.pad(x, (1, 2), value=1)[..., 1:-2],  # starts at an odd offset
    expanded=lambda x: x[:1].expand(3, *x.shape[1:]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", PATHS)
def test_fault_9_strides(api, path, layout):
    c, results = make_case(BFLOAT), []
    for finish in (torch.Tensor.contiguous, lambda x: x):  # inside the graph, back to the same leaf
        new = {name: finish(LAYOUTS[layout](getattr(c, name))) for name in TOKEN_WISE}
        loss = call(api, path, SimpleNamespace(**vars(c) | new), reduction="none")
        results.append([loss, *gradients(loss, *leaves(c, path))])
    assert all(same(x, y) and x.any() for x, y in zip(*results))


@pytest.mark.parametrize("empty", ["ignored", "mask", "no tokens", "num_items"])
@pytest.mark.parametrize("path", PATHS)
def test_fault_13_nothing_kept(api, path, empty, r=None):
    c = make_case(shape=(2, 2), V=68)
    if empty == "no tokens":
        for name in TOKEN_WISE:
            setattr(c, name, getattr(c, name).detach()[:0])
    elif empty != "num_items":
        c.keep.fill_(False)
        c.target.fill_(IGN) if empty == "ignored" else c.mask.zero_()
    c, o = shard(r, c, path), dict(num_items=0) if empty == "num_items" else {}
    o |= dict(vocab_group=r.group) if r else {}
    names = dict(linear=STRATEGIES, distillation=["rows", "max_kept9"]).get(path, ["rows"])
    for reduction, name in product(["mean", "sample_mean"] + ["sum", "none"] * (not o), names):
        loss = call(api, path, c, reduction=reduction, **STRATEGIES[name], **o)
        x = leaves(c, path)
        assert (loss == 0).all() and loss.requires_grad
        assert all(torch.equal(g, torch.zeros_like(y)) for g, y in zip(gradients(loss, *x), x))


@pytest.mark.parametrize("name", ["rows", "none", "max_kept"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_fault_18_requires_grad(api, name, mode):
    right = []  # of the first pattern: every gradient
    for pattern in product([True, False], repeat=3):
        x, W, b = leaves = [leaf(y).requires_grad_(wants) for y, wants in zip(XWB, pattern)]
        with mode():
            loss = api.masked_linear_cross_entropy(
                x, W, tensor(Y), linear_bias=b, reduction="sum", **STRATEGIES[name])
        close(loss.detach(), 3.1755153625)
        assert loss.requires_grad == (any(pattern) and mode is torch.enable_grad)
        if loss.requires_grad:
            loss.backward()
            right = right or [y.grad for y in leaves]
            for y, wants, grad in zip(leaves, pattern, right):
                assert torch.equal(y.grad, grad) if wants else y.grad is None


@mean_and_none
def test_fault_18_nothing_allocated_for_a_frozen_weight(api, reduction):
    W = torch.zeros(50, 2**16, device=DEVICE)
    x = torch.ones_like(W[:2]).requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        api.masked_linear_cross_entropy(x, W, tensor([0, 1]), reduction=reduction).sum().backward()
    used = [getattr(e, f"{'device' if DEVICE == 'cuda' else 'cpu'}_memory_usage")
            for e in profile.events()]
    assert x.numel() * 4 <= max(used) < W.numel() * 4


def test_a_teacher_with_an_offset_and_a_student_that_saturates(api):
    z, teacher = leaf([[0, 0]]), tensor([[1e8, 1e8]])  # log of the teacher's sum lost beside 1e8
    api.masked_cross_entropy_from_distribution(
        z, teacher, target_format="logits", divergence="reverse_kl").backward()
    assert (z.grad == 0).all()
    z = leaf([[240, 225, 270]])  # 1 - tanh^2, taken from tanh, has no bit left here
    api.masked_cross_entropy(z, tensor([0]), softcap=30.0).backward()
    right = tensor([[-3.00094e-7, 4.07866e-7, 2.03068e-8]], dtype=DOUBLE)
    assert ((z.grad - right).abs() <= 1e-4 * right.abs()).all()


@pytest.mark.parametrize("h, right, o", [  # rows that exceed 1 by far, in the half buffer
    ([0, 1], [-333.25, 333.25], dict(temperature=0.003)), ([200, 0], [400, 0], dict(z_loss=1.0))])
def test_float16_rows_beyond_1(api, h, right, o):
    h, eye = tensor([h], dtype=HALF).requires_grad_(), torch.eye(2, device=DEVICE, dtype=HALF)
    api.masked_linear_cross_entropy(h, eye, tensor([0]), **o).backward()
    assert h.grad.tolist() == [right]


def test_weights_beyond_float32_and_of_float64(api):
    z, y = torch.zeros(2, 2, device=DEVICE, dtype=BFLOAT, requires_grad=True), tensor([0, 1])
    assert api.masked_cross_entropy(z, y, tensor([3e38, 3e38])).isnan()  # not 0: their sum is inf
    loss = api.masked_cross_entropy(z, y, torch.ones(2, dtype=DOUBLE, device=DEVICE))
    loss.backward()
    assert loss.dtype == FLOAT and z.grad.tolist() == [[-0.25, 0.25], [0.25, -0.25]]
    assert pickle.loads(pickle.dumps(api.masked_cross_entropy)) == api.masked_cross_entropy


def test_examples():
    assert doctest.testmod(masked_ce).failed == 0 < doctest.testmod(masked_ce).attempted


# --------------------------------------------------------------------- weights, host syncs, dtypes
def test_weights_and_faults_16_and_19(api):
    labels, cu = tensor([1, 2, 3, 4, 5]), tensor([0, 3, 5])
    shifted = api.shift_labels(labels, cu_seqlens=cu)
    assert shifted.tolist() == [2, 3, IGN, 5, IGN] and api.count_items(shifted != IGN) == 3
    assert api.shift_labels(labels.view(1, 5)).tolist() == [[2, 3, 4, 5, IGN]]
    assert api.shift_labels(labels > 2, 0, cu).tolist() == [False, True, False, True, False]
    keep = tensor([[1] * 8, [1, 1] + [0] * 6])  # times 80: 8 for "mean"; 5 and 20 for "sample_mean"
    close(api.token_weights(keep) * 80, keep * 8)
    close(api.token_weights(keep, "sample_mean") * 80, keep * tensor([[5], [20]]))
    for n in (4, 4.0, tensor(4), tensor(4.0)):
        close(api.token_weights(keep, num_items=n) * 4, keep)
        close(api.token_weights(keep, "sample_mean", num_items=n) * 32, keep * tensor([[1], [4]]))
    ones, cu = torch.ones(257, dtype=BFLOAT, device=DEVICE), tensor([0, 0, 2, 2, 3])
    assert api.count_items(ones) == api.count_items(ones.bool()) == 257  # in bf16, 256
    close(api.token_weights(ones), [1 / 257] * 257)
    a = tensor([1.0, 3, 2])
    close(api.token_weights(a, "sample_mean", cu_seqlens=cu), [0.125, 0.375, 0.5])
    assert [api.count_items(a, x, cu_seqlens=cu).item() for x in ("mean", "sample_mean")] == [6, 2]
    z = leaf([[0, 1], [2, 0]])  # negative weights, as a policy gradient has
    loss = api.masked_cross_entropy(z, tensor([0, 1]), tensor([-2.0, 3]), reduction="sum")
    close(loss, -2 * 1.3132616875 + 3 * 2.1269280110)
    with pytest.raises(ValueError, match=r"(?s)\(2, 1\).*\(2,\)"):  # fault 19: both shapes
        api.masked_cross_entropy(z[:, None], tensor([[0], [1]]), tensor([1, 0]))


def count_syncs(step):
    step()  # compiles
    if DEVICE == "cpu":
        with torch.profiler.profile() as profile:
            step()
        syncs = ("aten::nonzero", "aten::_local_scalar_dense")
        return sum(event.name in syncs for event in profile.events())
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


@pytest.mark.parametrize("path, name, o", VALUES)
def test_host_syncs(api, path, name, o):
    c, linear = make_case(BFLOAT), len(PATHS[path]) > 1
    syncs = int(linear and name in ("rows", "rows3", "chunks2"))
    o = STRATEGIES[name] | o
    assert syncs == count_syncs(lambda: call(api, path, c, **o).sum().backward())


@pytest.mark.parametrize("path", ["labels", "linear"])
def test_float16_keeps_the_gradient_of_small_classes(api, path):
    z = leaf([[0, -16.625]], dtype=HALF)  # p = 6e-8, float16's smallest number
    dz = gradients(through(api, path, z, tensor([0])), z, upstream=2.0**16)[0]  # GradScaler's
    close(dz[:, 1], [exp(-16.625) * 2**16], rel=2**-7)


@mean_and_none
def test_autocast(api, reduction):
    c = make_case()
    with torch.autocast(DEVICE, BFLOAT):
        loss = call(api, "linear", c, reduction=reduction)
    grads = gradients(loss, *leaves(c, "linear"))
    assert loss.dtype == FLOAT and all(g.dtype == FLOAT and g.isfinite().all() for g in grads)
    assert not torch.equal(loss, call(api, "linear", c, reduction=reduction))
    for name in PATHS["linear"]:
        setattr(c, name, getattr(c, name).to(BFLOAT))
    assert torch.equal(loss, call(api, "linear", c, reduction=reduction))  # these were the operands


@mean_and_none
@pytest.mark.parametrize("path", ["linear", "distillation"])
def test_more_kept_than_max_kept_is_loud(api, path, reduction):
    c = make_case()
    loss = call(api, path, c, max_kept=5, reduction=reduction)
    dx, *grads = gradients(loss, *leaves(c, path))
    loss = loss[c.keep] if reduction == "none" else loss
    assert all(y.isnan().all() for y in (loss, dx[c.keep], *grads))


# --------------------------------------------------------------------------------------- bad input
CE, DIST, LINEAR, KD = ("masked_cross_entropy", "masked_cross_entropy_from_distribution",
                        "masked_linear_cross_entropy", "masked_linear_distillation")
Z, H1 = [[0.0, 0, 0], [0, 0, 0]], [[0.0], [0], [0]]  # lists become tensors
GOOD = {CE: dict(logits=Z, target=[0, 1]), DIST: dict(logits=Z, target=Z),
        LINEAR: dict(hidden=Z, linear_weight=Z, target=[0, 1]),
        KD: dict(hidden=Z, linear_weight=Z, teacher_hidden=Z, teacher_weight=Z)}
BAD = {  # argument -> bad values; the message names the argument and the value, its shape or dtype
    (TypeError, CE): dict(logits=[None, [[0, 0]]], target=[[0.0, 1]], loss_mask=[[1 + 1j, 0]],
                          cu_seqlens=[[0.0, 2]], temperature=[None]),
    (TypeError, LINEAR): dict(chunk_size=[2.0], linear_bias=[tensor([0, 0], dtype=DOUBLE)]),
    (ValueError, CE): dict(
        target=[[0]], reduction=["avg"], loss_mask=[leaf([1, 1])], num_items=[-1, nan, [1, 2]],
        cu_seqlens=[[2]], softcap=[0.0], temperature=[-1.0], z_loss=[-1], label_smoothing=[1.5]),
    (ValueError, DIST): dict(target=[H1], target_format=["labels"], divergence=["js"]),
    (ValueError, LINEAR): dict(
        linear_weight=[H1, torch.ones(0, 3, device=DEVICE)], linear_bias=[[0.0]], skip=["some"],
        chunk_size=[0], max_kept=[-1]),
    (ValueError, KD): dict(teacher_weight=[H1], teacher_hidden=[H1], teacher_bias=[[0.0]])}
PACKED = dict(reduction="sample_mean")
ROWS = [
    *((error, f, {name: x}, [name[-4:], *[repr(x)] * (type(x) in (int, float, str))])
      for (error, f), arguments in BAD.items() for name in arguments for x in arguments[name]),
    (ValueError, CE, dict(num_items=2, reduction="sum"), ["num_items=2"]),
    (ValueError, LINEAR, dict(max_kept=1, skip="none"), ["max_kept=1"]),
    *(("data", *row) for row in (  # on a GPU NaN, because a look would synchronise
        (CE, dict(target=[0, 3]), ["label 3 at token 1"]), (CE, dict(target=[-1, 0]), ["label -1"]),
        (LINEAR, dict(target=[0, 2]), ["label 2 at token 1"]),
        (DIST, dict(loss_mask=[0.5, -1.0], **PACKED), ["-1.0 at token 1"]),
        (KD, dict(cu_seqlens=[0, 3], **PACKED), ["from 0 to the 2 tokens", "position 1"]),
        (CE, dict(cu_seqlens=[0, 2, 1, 2], **PACKED), ["position 2"]),
        (CE, dict(num_items=tensor(-1.0)), ["num_items=-1.0"])))]


@pytest.mark.parametrize("error, f, change, says", ROWS)
def test_bad_input(api, error, f, change, says):
    o = {k: tensor(x) if isinstance(x, list) else x for k, x in (GOOD[f] | change).items()}
    if error == "data" and DEVICE == "cuda":
        return close(getattr(api, f)(**o), nan)
    with pytest.raises(ValueError if error == "data" else error) as caught:
        getattr(api, f)(**o)
    assert all(text in str(caught.value) for text in says)


# ------------------------------------------------------------------------------------- Triton only
@pytest.mark.parametrize("path, o", [("labels", {}), ("probabilities", {}), ("linear", {}),
                                     ("linear", dict(max_kept=9)), ("distillation", {})])
@mean_and_none
def test_custom_ops(triton_api, path, o, reduction):
    """torch.compile(fullgraph=True) gives eager's numbers; what it calls passes opcheck."""
    c, calls = make_case(FLOAT, (5,)), []
    torch._dynamo.reset()

    class Recorder(torch.fx.Interpreter):
        def call_function(self, op, args, kwargs):
            calls.append((op, args)) if "masked_ce" in str(op) else None
            return op(*args, **kwargs)

    def loss():
        return call(triton_api, path, c, reduction=reduction, **o)

    record = aot_autograd(fw_compiler=lambda graph, _: Recorder(graph).run)
    for backend in [record] + ["inductor"] * (DEVICE == "cuda"):
        results = [[y, *gradients(y, *leaves(c, path))]
                   for y in (torch.compile(loss, fullgraph=True, backend=backend)(), loss())]
        for compiled, right in zip(*results):
            close(compiled, right.detach().double())
    for op, args in calls:
        args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
        if "gradient" not in str(op):  # nobody differentiates those
            args[:3] = [x if x is None else x.requires_grad_() for x in args[:3]]
        torch.library.opcheck(op, args)
    assert calls


def test_two_copies_do_not_mix(triton_api, tmp_path, monkeypatch):
    (tmp_path / "a_package").mkdir()
    for module in (masked_ce, triton_api):
        shutil.copy(module.__file__, tmp_path / "a_package")
    with open(tmp_path / "a_package/masked_ce_triton.py", "a") as file:
        file.write("TritonCrossEntropy.row_pass = None  # what its operations call\n")
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module("a_package.masked_ce_triton")
    assert "a_package.masked_ce" in sys.modules
    z, y, o = tensor([[0.0, 0.0]]), tensor([0]), dict(fullgraph=True, backend="eager")
    close(torch.compile(triton_api.masked_cross_entropy, **o)(z, y), log(2))
    with pytest.raises(TypeError):
        torch.compile(other.masked_cross_entropy, **o)(z, y)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
class TestGPU:
    def test_cpu_tensors_do_not_fall_back(self, triton_api):
        with pytest.raises(RuntimeError, match="import masked_ce instead"):
            triton_api.masked_cross_entropy(torch.ones(1, 2), torch.tensor([0]))

    @pytest.mark.parametrize("path", ["labels", "linear", "distillation"])
    def test_cuda_graph_replays_with_another_mask(self, api, path):
        c, o = make_case(BFLOAT), dict(max_kept=9) if path != "labels" else {}
        x = leaves(c, path)

        def step():
            loss = call(api, path, c, **o)
            return loss, *torch.autograd.grad(loss, x)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        with torch.cuda.graph(graph):  # synchronises first
            captured = step()
        for weight in (1, 0, 3):
            c.mask[0, ::2] = weight
            graph.replay()
            assert all(same(y, right) for y, right in zip(captured, step(), strict=True))

    def test_more_than_2_to_the_31_elements(self, triton_api):
        V = 2**17
        z = torch.zeros(2**14 + 1, V, dtype=HALF, device=DEVICE)
        z[0] = z[-1] = torch.linspace(-5, 5, V)
        alone, y = z[:1].clone().requires_grad_(), torch.full((len(z),), IGN, device=DEVICE)
        y[0] = y[-1] = V - 7
        right = triton_api.masked_cross_entropy(alone, y[:1], reduction="sum")
        (right_grad,) = torch.autograd.grad(right, alone)
        far_apart = z.view(-1).as_strided((2, V), (2**31, 1))
        for rows, labels in ((z, y), (far_apart, y[[0, -1]])):
            loss = triton_api.masked_cross_entropy(rows.requires_grad_(), labels, reduction="sum")
            (grad,) = torch.autograd.grad(loss, rows)
            close(loss, 2 * right.item())
            assert torch.equal(grad[-1:], right_grad) and not grad[1:-1].any()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_runs_on_the_tensors_own_device(api):
    z = torch.zeros(1, 2, device="cuda:1", requires_grad=True)
    loss = api.masked_cross_entropy(z, torch.tensor([0], device="cuda:1"))
    assert torch.cuda.current_device() == 0
    close(loss, log(2))
    close(gradients(loss, z)[0], [[-0.5, 0.5]])


# ------------------------------------------------------------------------------------------- ranks
def in_rank(rank, world, backend, store):
    """Every case; r holds api, rank, world and group."""
    torch.cuda.set_device(rank) if backend == "nccl" else None
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank,
                            world_size=world, timeout=timedelta(seconds=60))
    names = ["masked_ce"] + ["masked_ce_triton"] * bool(importlib.util.find_spec("triton"))
    for case, api in product(CASES[world], map(importlib.import_module, names)):
        print(f"rank {rank} of {world}:", api.__name__, case.__name__, flush=True)
        case(SimpleNamespace(api=api, rank=rank, world=world, group=dist.group.WORLD))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend, world", [("gloo", 2), ("gloo", 4), ("nccl", 2)])
def test_ranks(tmp_path, monkeypatch, backend, world):
    if backend == "nccl" and torch.cuda.device_count() < world:
        pytest.skip("needs two GPUs")
    env = dict(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1") if backend == "gloo" else {}
    for key, value in (env | dict(OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")).items():
        monkeypatch.setenv(key, value)
    torch.multiprocessing.spawn(in_rank, (world, backend, f"{tmp_path}/store"), world)


def vocabulary_parallel(r):
    c, o = make_case(DOUBLE, (2, 5), V=12, H=5), dict(r=r)
    for path, name, more in VALUES:
        if path != "distillation":
            check(r.api, path, c, strategy=STRATEGIES[name], **o, **more)
    for path, divergence in product(("probabilities", "teacher"), DIVERGENCES):
        check(r.api, path, c, reduction="sample_mean", divergence=divergence, **o)
    for dead in (0, r.world - 1):  # a shard of -inf
        c = make_case(DOUBLE, (2, 5), V=12, H=5)
        for x in (c.logits, c.teacher, c.bias):
            x.detach().chunk(r.world, -1)[dead].fill_(-1e5)
        c.probabilities = c.teacher.softmax(-1)
        c.keep &= c.target // (12 // r.world) != dead  # their loss is infinite
        c.mask = c.mask * c.keep
        for path in LABELED:
            check(r.api, path, c, **o)
        for divergence, low in product(DIVERGENCES, (-inf, -1e5)):
            check(r.api, "teacher", c, cut=dict(low=low), divergence=divergence, **o)


def two_shards(r):
    c, first = make_case(DOUBLE, (2, 5), V=12, H=5), r.rank == 0
    for name, reduction in product(("rows3", "max_kept9", "chunks2", "none4"), ("mean", "none")):
        for wanted in ((True, first, not first), (False, first, first)):  # frozen on some ranks
            check(r.api, "linear", c, reduction, STRATEGIES[name], r, dict(wanted=wanted))
    for path, empty in product(LABELED, ("ignored", "mask", "no tokens", "num_items")):
        test_fault_13_nothing_kept(r.api, path, empty, r)
    for name, (paths, z, *_) in FAULTS.items():
        if "labels" in paths and torch.tensor(z).shape[-1] % 2 == 0:
            test_faults(r.api, "labels", name, r)
    W = tensor([[[0, 0], [1, 0]], [[0, 1], [1, 1]]], dtype=DOUBLE)[r.rank]  # fault 12
    x = leaf([[1, 2]], dtype=DOUBLE)
    loss = r.api.masked_linear_cross_entropy(x, W, tensor([3]), vocab_group=r.group)
    close(gradients(loss, x)[0], [[-0.2689414214, -0.1192029220]])


def two_parts(r):
    """Faults 10 and 15: samples, and packed samples cut at a token."""
    names = "10", "15 mean", "15 sample_mean", "15 mean [0, 5, 6]", "15 sample_mean [0, 5, 6]"
    for name, path in product(names, LABELED):
        _, z, y, o, right, dz = FAULTS[name]
        z, y = part(r, tensor(z, dtype=DOUBLE)).clone().requires_grad_(), part(r, tensor(y))
        count = dict(reduction=o["reduction"], process_group=r.group)
        if "cu_seqlens" in o:
            count["cu_seqlens"] = tensor([[0, 3, 3], [0, 2, 3]][r.rank])
            o = dict(reduction="sum", mask=r.api.token_weights((y != IGN).double(), **count))
        else:
            o = o | dict(num_items=r.api.count_items(y != IGN, **count))
        loss = through(r.api, path, z, y, **o)
        if dz:  # of the sum: that is times the ranks, then averaged
            close(gradients(loss, z)[0], part(r, tensor(dz)))
        dist.all_reduce(loss := loss.detach())
        close(loss, right)


TOKENS = (torch.arange(48, device=DEVICE) * 7 % 11).view(8, 6)  # of 8 samples
LABELS = (TOKENS * 3 % 11).masked_fill(TOKENS % 3 == 0, IGN)
LABELS[4:] = IGN  # the later ranks keep nothing


def ddp_and_sequence_parallel(r):
    for size in (1, 2):  # ranks that share a sample
        tokens, labels = (x.chunk(r.world // size)[r.rank // size].chunk(size, 1)[r.rank % size]
                          for x in (TOKENS, LABELS))
        single = torch.nn.Embedding(11, 11, device=DEVICE, dtype=DOUBLE)
        model = DistributedDataParallel(copy.deepcopy(single))
        dist.broadcast(single.weight.detach(), 0)  # as DDP does
        block("sequence", r.api, dist=dist, model=model, tokens=tokens, labels=labels,
              world=r.group, sequence_group=dist.new_subgroups(size)[0])["loss"].backward()
        masked_ce.masked_cross_entropy(single(TOKENS), LABELS, reduction="sample_mean").backward()
        close(model.module.weight.grad, single.weight.grad, 1e-6)  # the weights are float32


class Model(torch.nn.Module):
    def __init__(self, dtype=DOUBLE):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Embedding(11, 6)])
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.to(DEVICE, dtype)

    def forward(self, tokens, *labels):  # -> logits, or with README's head the loss
        return self.head(self.layers[0](tokens), *labels)


def fsdp(r):
    """README's recipe against float64, by a plain bfloat16 model's error."""
    mask, eager, oracle = (TOKENS + LABELS) % 5 != 0, Model(BFLOAT), Model()
    model = block("fsdp", r.api, dist=dist, model=Model(FLOAT), hidden_size=6, vocab_size=11,
                  fully_shard=fully_shard, MixedPrecisionPolicy=MixedPrecisionPolicy,
                  tokens=part(r, TOKENS), labels=part(r, LABELS), mask=part(r, mask))["model"]
    for other in (eager, oracle):
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            p.data.copy_(q.full_tensor().bfloat16())
        z = other(TOKENS).to(FLOAT if other is eager else DOUBLE)
        F.cross_entropy(z.flatten(0, 1), LABELS.masked_fill(~mask, IGN).flatten()).backward()
    for p, e, o in zip(*(m.parameters() for m in (model, eager, oracle)), strict=True):
        within(p.grad.full_tensor().bfloat16(), o.grad, e.grad)


CASES = {4: [vocabulary_parallel, ddp_and_sequence_parallel, fsdp]}
CASES[2] = [*CASES[4], two_shards, two_parts]

# --------------------------------------------------------------------------- README, word for word
README = Path(masked_ce.__file__).with_name("README.md").read_text()
BLOCKS = dict(re.findall(r"<!-- block: (\w+)[^\n]*\n```python\n(.*?)```", README, re.DOTALL))


def block(name, api, **names):
    """Runs a block of README.md with the names that it takes for granted. -> its names."""
    exec(compile(BLOCKS[name], f"README.md, {name}", "exec"), names := vars(api) | names)
    return names


def test_readme(api):
    assert " ".join(sorted(BLOCKS)) == "accumulation fsdp linear lm_head sequence start trainer"
    assert README.count("```python") == len(BLOCKS)
    names = block("start", masked_ce)
    close(names["loss"], 0.4076059644)
    close(names["logits"].grad, [[0.0900305732, 0.2447284711, -0.3347590442], [0, 0, 0]], 1e-6)
    # accumulation: uneven micro-batches
    grads, model = [], torch.nn.Embedding(11, 11, device=DEVICE, dtype=DOUBLE)
    step = SimpleNamespace(step=lambda: grads.append(model.weight.grad), zero_grad=model.zero_grad)
    loader = [list(zip(TOKENS.split([1, 5, 2]), LABELS.split([1, 5, 2])))]
    block("accumulation", api, model=model, loader=loader, optimizer=step)
    F.cross_entropy(model(TOKENS).flatten(0, 1), LABELS.flatten()).backward()
    close(grads[0], model.weight.grad, 4e-12)
    # lm_head and trainer, with stand-ins for what transformers has
    head = torch.nn.Linear(4, 11, bias=False, device=DEVICE)
    output = SimpleNamespace(last_hidden_state=torch.randn(8, 6, 4, device=DEVICE))
    output.logits = head(output.last_hidden_state)
    names = dict.fromkeys("input_ids attention_mask args dataset".split()) | dict(
        labels=LABELS, num_items_in_batch=20,
        model=SimpleNamespace(model=lambda *_, attention_mask: output, lm_head=head),
        Trainer=lambda *_, compute_loss_func, **__: compute_loss_func)
    z = output.logits[:, :-1].flatten(0, 1)
    right = F.cross_entropy(z, LABELS[:, 1:].flatten(), reduction="sum").double() / 20
    close(block("lm_head", api, **names)["loss"], right)
    close(block("trainer", api, **names)["trainer"](output, LABELS, num_items_in_batch=20), right)
    # linear: the four lines agree, and read the device as often as they say
    c = make_case(DOUBLE)
    names = vars(api) | dict(hidden=c.hidden, weight=c.weight, labels=c.target.where(c.keep, IGN))
    right = F.cross_entropy(F.linear(c.hidden[c.keep], c.weight), c.target[c.keep]).item()
    for line in BLOCKS["linear"].splitlines():
        assert count_syncs(lambda: exec(line, names)) == int(re.search(r"# (\d)", line)[1])
        close(names.pop("loss"), right)


def test_readme_instead_of_this_write_that(api):
    mask = torch.arange(10, device=DEVICE).view(2, 5) % 3 > 0
    logits, teacher, labels = *torch.randn(2, 2, 5, 7, device=DEVICE), tensor([[1, 6, 0, 2, 3]] * 2)
    names = vars(api) | dict(
        F=F, logits=logits, teacher=teacher, mask=mask, labels=labels.where(mask, IGN),
        hidden=torch.randn(2, 5, 4, device=DEVICE), weight=torch.randn(7, 4, device=DEVICE),
        advantage=torch.linspace(-1, 1, 5, device=DEVICE),
        token_loss=F.cross_entropy(logits.mT, labels, reduction="none"))
    rows = re.findall(r"^\| `(\S*F\.[^`]+|\(token[^`]+)` \| `([^`]+)` \|$", README, re.MULTILINE)
    assert len(rows) == 5  # the rest are calls of packages that requirements.txt does not name
    for old, new in rows:
        close(eval(new, names), eval(old, names).item(), 1e-6)
