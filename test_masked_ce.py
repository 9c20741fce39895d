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
import warnings
from datetime import timedelta
from itertools import product
from math import exp, inf, log, nan, prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton; torch._dynamo does

import pytest
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import masked_ce

HALF, BFLOAT, FLOAT, DOUBLE = DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
torch.set_num_threads(1)  # the sizes are small, and threads on busy cores wait for each other
torch.use_deterministic_algorithms(True, warn_only=True)  # and torch.empty gives NaN, so that an
assert torch.empty(1, device=DEVICE).isnan()  # output which a kernel does not write shows
tensor = functools.partial(torch.tensor, device=DEVICE)
leaf = functools.partial(tensor, dtype=FLOAT, requires_grad=True)
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
IGN = -100
LABELED = "labels", "linear", "probabilities"  # the paths that a label loss can take
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
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
    if rel is None:
        rel = max(8 * torch.finfo(result.dtype).eps, 2e-10)  # the numbers have ten digits
    right = (result - expected).abs() <= rel * expected.abs().max().clamp(max=1e300)
    right |= (result == expected) | result.isnan() & expected.isnan()
    assert result.shape == expected.shape and right.all(), f"{result} is not {expected}"
    assert (result[expected == 0] == 0).all()


def gradients(loss, *x, upstream=1.0):
    return torch.autograd.grad(loss, x, torch.as_tensor(upstream).to(loss).expand_as(loss))


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
    for name, x in c.items():
        if name in TOKEN_WISE:
            x = x.masked_fill(masked[:, None], nan) if x.dim() > 1 else x
            x = x.view(*shape, *x.shape[1:])
        c[name] = x.to(DEVICE).requires_grad_(name in ("logits", *PATHS["linear"]))
    return SimpleNamespace(**c)


def call(api, path, c, r=None, **o):  # r: c is this rank's part of the vocabulary
    o |= {} if r is None else dict(vocab_group=r.group)
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


def plain(path, c, dtype, reduction="mean", upstream=1.0, *, divergence="cross_entropy",
          softcap=None, teacher_softcap=None, temperature=1.0, label_smoothing=0.0, z_loss=0.0,
          **strategy):  # chunk_size, skip, max_kept and f: they must not change a result
    """-> loss and gradients by name, rows for `within`: torch's autograd on kept rows only.
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
    w = torch.where(c.keep, vars(c).get("mask", 1), 0).to(z.dtype)
    divisors = dict(mean=w.sum(), sample_mean=w.sum(1, keepdim=True) * c.keep.any(1).sum())
    w = torch.where(c.keep, w / divisors.get(reduction, 1), 0)
    losses = torch.zeros_like(w).masked_scatter(c.keep, loss)
    loss = losses * w if reduction == "none" else (losses * w).sum()
    results = loss.detach(), *gradients(loss, *x, upstream=upstream)
    w = torch.where(c.keep, w * upstream, 0)
    rows = w * (1 + losses.detach())  # p - 1, or p * (log p/q - loss)
    return dict(zip(("loss", *PATHS[path]), results)), rows


CUT = dict(logits=-1, teacher=-1, probabilities=-1, weight=0, bias=0)  # the vocabulary's dimension


def part(r, x, dim=0):  # of rank r
    return x if r is None or dim is None else x.chunk(r.world, dim)[r.rank]


def outcome(api, path, c, r=None, wanted=(True,) * 3, upstream=1.0, f=call, grad=True, **o):
    """-> by name, the loss and the gradients that are wanted: of copies of c, or with r of this
    rank's part of the vocabulary, which stay as they were. grad: is f to make a graph?"""
    mine = {name: part(r, x, CUT.get(name)).detach().clone() for name, x in vars(c).items()}
    before = copy.deepcopy(mine)
    x = {name: mine[name].requires_grad_() for name, wants in zip(PATHS[path], wanted) if wants}
    loss = f(api, path, SimpleNamespace(**dict(mask=None) | mine), r, **o)
    assert loss.requires_grad == (bool(x) and grad)
    grads = gradients(loss, *x.values(), upstream=upstream) if loss.requires_grad else ()
    same(mine, before)
    return dict(zip(("loss", *x), (loss.detach(), *grads)))


def check(api, path, c, r=None, wanted=(True,) * 3, reduction="mean", **o):
    """Loss and gradients by the rule, in their dtypes; 0 where masked. One loss on all ranks."""
    upstream = torch.linspace(-1, 2, c.keep.numel(), device=DEVICE).view_as(c.keep)
    upstream = upstream.where(c.keep, nan) if reduction == "none" else tensor(-1.0)
    results = outcome(api, path, c, r, wanted, upstream, reduction=reduction, **o)
    loss = results["loss"]
    if r is not None:
        dist.all_gather(losses := [torch.empty_like(loss) for _ in range(r.world)], loss)
        assert all(torch.equal(x, loss) for x in losses)
    rights, rows = plain(path, c, DOUBLE, reduction, upstream, **o)
    others, _ = plain(path, c, c.logits.dtype, reduction, upstream, **o)
    assert loss.dtype == others["loss"].dtype
    for name, result in results.items():
        right, other = (part(r, y[name], CUT.get(name)) for y in (rights, others))
        # weight: columns with small p are exp of a z, up to 30 here, that was rounded
        terms = dict(loss=None, weight=32 * right.abs().amax(-1), bias=None).get(name, rows)
        within(result, right, other, terms)
        assert result.shape[:2] != c.keep.shape or (result[~c.keep] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rule_has_teeth(dtype):
    c = make_case(dtype)
    rights, rows = plain("labels", c, DOUBLE)
    grad, eager = rights["logits"], plain("labels", c, dtype)[0]["logits"]
    within(grad.to(dtype), grad, eager, rows)
    confident = c.logits.amax(-1, keepdim=True) > 9
    for fault in (0 * grad, grad.clamp(max=0), grad * c.keep.sum() / c.keep.numel(),
                  grad.masked_fill(confident, 0), grad.masked_fill((c.mask < 0.1)[..., None], 0)):
        with pytest.raises(AssertionError):  # also without softmax, divided by all rows
            within(fault.to(dtype), grad, eager, rows)


# ------------------------------------------------------------------------------------------ values
STRATEGIES = [  # 12 tokens, 6 kept: one chunk, spare rows; even chunks, empty ones, spare ones
    {}, dict(skip="none"), dict(max_kept=6), dict(max_kept=99), dict(chunk_size=3),
    dict(skip="chunks", chunk_size=2), dict(skip="none", chunk_size=4),
    dict(max_kept=9, chunk_size=4)]
VALUES = [
    *((path, {}) for path in PATHS),
    *product(("probabilities", "teacher"),
             (dict(divergence="forward_kl"), dict(divergence="reverse_kl"))),
    ("labels", dict(reduction="none", label_smoothing=0.1, z_loss=0.01)),
    ("labels", dict(reduction="sample_mean", softcap=5.0, temperature=0.7)),
    ("probabilities", dict(reduction="none", softcap=5.0, temperature=1.7)),
    ("teacher", dict(divergence="reverse_kl", temperature=1.7)),
    ("linear", dict(reduction="none", chunk_size=3)),
    ("linear", dict(label_smoothing=0.1, z_loss=0.01, skip="none", chunk_size=4)),
    ("linear", dict(reduction="sample_mean", skip="chunks", chunk_size=2)),
    ("linear", dict(reduction="sum", softcap=15.0, temperature=0.7, max_kept=99)),
    ("linear", dict(reduction="none", max_kept=9, chunk_size=4)),
    ("distillation", dict(divergence="forward_kl", reduction="none", temperature=2, chunk_size=3)),
    ("distillation", dict(divergence="reverse_kl", softcap=15.0, teacher_softcap=3.0, max_kept=9,
                          chunk_size=4))]


@pytest.mark.parametrize("size, value", [
    *product([(dtype, (3, 4), 67) for dtype in DTYPES], VALUES), *product([
        (BFLOAT, (2, 5), 2), (DOUBLE, (2, 5), 4096), (DOUBLE, (2, 5), 4099)],  # less than a block;
        VALUES[:9]),  # whole blocks; an odd tail. Of a wide row's GEMM eager may round luckily.
    *product([(FLOAT, (2, 5), 2**15 + 5)], VALUES[:3] + VALUES[5:9])], ids=str)
def test_values(api, size, value):
    path, o = value
    check(api, path, make_case(*size), **o)


@pytest.mark.parametrize("dtype, path", [*product(DTYPES, ["labels", "linear"])], ids=str)
def test_values_without_a_mask(api, dtype, path):  # whose weights Triton has a kernel for
    c = make_case(dtype)
    c.target.masked_fill_(~c.keep, IGN)
    del c.mask
    check(api, path, c)


# ----------------------------------------------- known_faults.md, by number: faults that people met
def through(api, path, z, y, mask=None, r=None, **o):
    """A loss of z by each path, y labels or a distribution. The linear ones: hidden z, weight 1;
    for one row (long, with inf) weight 0, bias z."""
    x, W, b = (z, torch.eye(z.shape[-1]).to(z), None) if z[..., 0].numel() > 1 else (
        torch.ones_like(z[:, :1]), torch.zeros_like(z.t()), z[0])
    c = SimpleNamespace(logits=z, target=y, mask=mask, hidden=x, weight=W, bias=b, teacher=y,
                        probabilities=y, teacher_hidden=x, teacher_weight=W, teacher_bias=y[0])
    if path == "probabilities" and not y.is_floating_point():
        V = z.shape[-1] * (r.world if r else 1)
        c.probabilities = part(r, F.one_hot(y.clamp(min=0), V).to(z.dtype), -1)
        c.keep, c.mask = y != IGN, torch.ones_like(y) if mask is None else mask
    return call(api, path, c, r, **o)


LOST = {loss: [0, log(exp(loss) - 1)] for loss in (1, 2, 3, 9, 10)}  # logits: label 0 loses this
Q, TEACHER, RETAIN = ["probabilities"], ["teacher", "distillation"], dict(allow_retain_graph=True)
FOUR = ([[0, 0]] * 6, [0, 0, 0, 1, IGN, IGN])
DZ_4 = [[-0.125, 0.125]] * 3 + [[0.125, -0.125]] + [[0, 0]] * 2
FIVE_AND_ONE, UNEQUAL = [LOST[2]] * 5 + [LOST[10]], [LOST[1]] * 18 + [LOST[3]] * 2
DEAD = [[0, 1, -inf, -inf], [-inf, -inf, 0, 1]]
DZ_DEAD = [[0.2689414214, -0.2689414214, 0, 0], [0, 0, 0.2689414214, -0.2689414214]]
DZ_11 = [0.0320586033, 0.0871443187, 0.2368828181, -0.3560857401]
DZ_1, DZ_2 = [0.0900305732, 0.2447284711, -0.3347590442], [[-1 / 6, 1 / 3, -1 / 6]]
FAULTS = {  # paths, z, target, options (or the test's: dtype, rel, loss_rel), loss, its gradient
    "1": (LABELED, [[1, 2, 3], [nan, inf, -inf]], [2, IGN], {}, 0.4076059644, [DZ_1, [0] * 3]),
    "1 kept": (LABELED, [[1, 2, 3], [nan] * 3], [IGN, 1], {}, nan, [[0] * 3, [nan] * 3]),
    "2": (Q, [[0, 1, -inf]], [[0.25, 0.75, 0]], dict(rel=4e-6), 0.5632616875,
          [[0.0189414214, -0.0189414214, 0]]),  # .75 - .7310585786
    "2 mass on -inf": (Q, [[0, 1, -inf]], [[0.25, 0.7, 0.05]], {}, inf, None),
    **{f"2 {d}": (TEACHER, [[0] * 3], [[0, -inf, 0]], dict(divergence=d), loss, dz)
       for d, loss, dz in (("cross_entropy", log(3), DZ_2), ("forward_kl", log(1.5), DZ_2),
                           ("reverse_kl", inf, None))},
    "2 offset": (TEACHER, [[0, 0]], [[1e8, 1e8]], dict(divergence="reverse_kl"), 0, [[0, 0]]),
    "17": (["linear"], [[0, 1, 2]], [2], RETAIN, 0.4076059644, [DZ_1]),
    "17 teacher": (["distillation"], [[0] * 3], [[0, -inf, 0]], RETAIN, log(3), DZ_2),
    "3": (Q, [[0, 0]], [[0.5, 0.25]], {}, 0.5198603854, [[-0.125, 0.125]]),
    "4": (LABELED, *FOUR, {}, log(2), DZ_4),
    **{f"4 {skip} {n}": (["linear"], *FOUR, dict(chunk_size=n, skip=skip), log(2), DZ_4)
       for skip in ("rows", "chunks", "none") for n in (1, 2, 3, 4, 5, 6, 100)},
    **{f"6 {z}": (LABELED, [[z, z]], [0], {}, log(2), [[-0.5, 0.5]]) for z in (1e4, 1e6, 1e8)},
    "6 close": (LABELED, [[1e6 + 2, 1e6 - 1]], [0], dict(rel=2e-6), 0.0485873516,
                [[-0.0474258732, 0.0474258732]]),
    "7 padding": (LABELED, [[-100] * 3], [0], dict(softcap=1.0), log(3), [[0, 0, 0]]),  # flat tanh
    "7 saturated": (LABELED, [[1e4, 0, -1e4]], [1], dict(softcap=30.0), 30, [[0, -1, 0]]),
    "7 slope": (LABELED, [[30, 0]], [1], dict(softcap=30.0), 22.8478246788, [[0.4199743416, -1]]),
    "7 flat": (LABELED, [[240, 225, 270]], [0], dict(  # 1 - tanh^2, from tanh, has no bit left
        softcap=30.0, rel=tensor([1e-4, 1e-4, 5e-6]), loss_rel=8e-6), 1.0986103675,
               [[-3.00094e-7, 4.07866e-7, 2.03068e-8]]),
    "10": (LABELED, [[[0, log(3)], [nan] * 2, [nan] * 2], [[0, 0]] * 3],
           [[0, IGN, IGN], [0] * 3], dict(reduction="mean"), 0.8664339757,
           [[[-0.1875, 0.1875], [0, 0], [0, 0]], [[-0.125, 0.125]] * 3]),
    "11": (["labels"], [[0, 1, 2, 3]], [3], dict(label_smoothing=0.1), 0.5901896986, None),
    "11 plain": (LABELED, [[0, 1, 2, 3]], [3], {}, 0.4401896986, [DZ_11]),
    "20": (LABELED, [[-inf] * 50_000 + [10] + [-inf] * 49_999], [50_000], {}, 0, [[0] * 100_000]),
    # Half the columns are -inf: over ranks, whole shards.
    **{f"dead {i}": (LABELED, [DEAD[i]], [2 * i + 1], {}, 0.3132616875, [DZ_DEAD[i]])
       for i in (0, 1)},
    **{f"dead {low} {d}": (["teacher"], DEAD, [[0, 0, low, low], [low, low, 0, 0]], dict(
        divergence=d, reduction="sum"), 2 * loss, [[-dz, dz, 0, 0], [0, 0, -dz, dz]])
       for low in (-inf, -1e5) for d, loss, dz in (
           ("cross_entropy", 0.8132616875, 0.2310585786),
           ("forward_kl", 0.1201145070, 0.2310585786), ("reverse_kl", 0.1109440717, 0.1966119332))},
    # A policy gradient's weights; a sum of weights that is inf must not make a loss of 0.
    "negative weights": (LABELED, [[0, 1], [2, 0]], [0, 1], dict(
        mask=tensor([-2.0, 3]), reduction="sum"), -2 * 1.3132616875 + 3 * 2.1269280110, None),
    "huge weights": (LABELED, [[0] * 3] * 2, [0, 1], dict(mask=tensor([3e38, 3e38])), nan, None),
    "float64 weights": (LABELED, [[0, 0]] * 2, [0, 1], dict(
        mask=tensor([1.0, 1], dtype=DOUBLE), dtype=BFLOAT), log(2), [[-0.25, 0.25], [0.25, -0.25]]),
    # Rows that exceed 1 by far, in the half buffer.
    "float16 temperature": (["linear"], [[0, 1], [0, 0]], [0, IGN], dict(
        temperature=0.003, dtype=HALF, rel=5e-4), 1000 / 3, [[-333.25, 333.25], [0, 0]]),
    "float16 z_loss": (["linear"], [[200, 0], [0, 0]], [0, IGN], dict(
        z_loss=1.0, dtype=HALF, rel=1e-6), 40_000, [[400, 0], [0, 0]])}
for how, right, unequal in (("mean", 10 / 3, 1.2), ("sample_mean", 6, 2)):
    FAULTS |= {
        f"14 {how}": (LABELED, [[LOST[1]] * 4, [LOST[9]] * 4], [[0] * 4, [IGN] * 4],
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
    dtype, rel, loss_rel = (DOUBLE, 1e-9, 1e-9) if r else (
        o.get("dtype", FLOAT), o.get("rel"), o.get("loss_rel"))
    o = {key: tensor(x, dtype=torch.int32) if key == "cu_seqlens" else x
         for key, x in o.items() if key not in ("dtype", "rel", "loss_rel")}
    z = part(r, tensor(z, dtype=dtype), -1).clone().requires_grad_()
    y = part(r, tensor(y), -1 if tensor(y).is_floating_point() else None)
    y = y.double() if path in ("probabilities", "teacher") and y.is_floating_point() else y
    loss = through(api, path, z, y, r=r, **o)  # a float64 target makes no float64 loss
    close(loss, right, loss_rel)
    assert loss.dtype == torch.promote_types(dtype, FLOAT)
    if dz:  # 17: backward twice
        dz = part(r, tensor(dz, dtype=DOUBLE), -1)
        first = torch.autograd.grad(2 * loss, z, retain_graph=True)[0]
        close(first / 2, dz, rel)
        first.zero_()  # which is the caller's
        try:
            second = torch.autograd.grad(3 * loss, z, create_graph=True)[0]
            close(second.detach() / 3, dz, rel)
            with pytest.raises(RuntimeError, match="once_differentiable"):  # no zeros for z alone
                torch.autograd.grad(second.mul_(2).sum(), z)
        except RuntimeError as error:  # or an error that names the cure
            assert path in ("linear", "distillation") and "allow_retain_graph" not in o
            assert "allow_retain_graph=True" in str(error)


XWY = [[1], [2], [3]], [[1], [0]], [IGN, 0, 1]
LINEAR_FAULTS = {  # hidden, weight, target, reduction, upstream, loss, gradients (a bias is 0)
    "1": ([[1, 2], [nan, inf]], [[1, 0], [0, 1], [1, 1]], [2, IGN], "mean", 1, 0.4076059644,
          [[-0.2447284711, -0.0900305732], [0, 0]], [[x, 2 * x] for x in DZ_1], DZ_1),
    "8": (*XWY, "none", [5, 1, 2], [0, 0.1269280110, 3.0485873516],  # an upstream for each token
          [[0], [-0.1192029220], [1.9051482536]], [[5.4770389169], [-5.4770389169]],
          [1.7859453316, -1.7859453316]),
    "12": ([[1, 2]], [[0, 0], [1, 0], [0, 1], [1, 1]], [3], "mean", 1, 0.4401896986,
           [[-0.2689414214, -0.1192029220]], [[x, 2 * x] for x in DZ_11], DZ_11),
    "18": (*XWY, "sum", 1, 3.1755153625, [[0], [-0.1192029220], [0.9525741268]],
           [[2.6193165364], [-2.6193165364]], [0.8333712048, -0.8333712048])}


@pytest.mark.parametrize("name, strategy", [*product(LINEAR_FAULTS, STRATEGIES)], ids=str)
def test_linear_faults(api, name, strategy, r=None):
    x, W, y, reduction, upstream, *rights = LINEAR_FAULTS[name]
    rights = dict(zip(("loss", *PATHS["linear"]), rights))
    c = SimpleNamespace(hidden=tensor(x, dtype=FLOAT), weight=tensor(W, dtype=FLOAT),
                        bias=torch.zeros(len(W), device=DEVICE), target=tensor(y))
    # 18: in every mode, and only the gradients that are asked for
    modes = torch.enable_grad, torch.no_grad, torch.inference_mode
    for mode, *wanted in product(modes, *[(True, False)] * 3):
        results = outcome(api, "linear", c, r, wanted, tensor(upstream), mode()(call),
                          mode is torch.enable_grad, reduction=reduction, **strategy)
        for x, result in results.items():
            close(result, part(r, tensor(rights[x], dtype=DOUBLE), CUT.get(x)))


@pytest.mark.parametrize("dtype, reduction, x, few", [
    (BFLOAT, "sum", [1] * 8192, [512] + [1] * 16), (HALF, "mean", [16] * 8192, [8192] * 16)])
def test_fault_5_long_sums(api, dtype, reduction, x, few):
    # A bf16 sum of steps of 8 stalls at 2048. In float16 8192 * 16 / 2 overflows before the mean
    # divides. The interpreter gets few rows: after 256, a bf16 sum does not see halves.
    x, size = (few, 1) if DEVICE == "cpu" and api is not masked_ce else (x, 16)
    hidden, W, y = tensor([x], dtype=dtype).t(), leaf([[0], [0]], dtype=dtype), tensor([0] * len(x))
    for o in (dict(chunk_size=size), {}):
        loss = api.masked_linear_cross_entropy(hidden, W, y, reduction=reduction, **o)
        right = sum(x) / 2 / (1 if reduction == "sum" else len(x))
        close(gradients(loss, W)[0], [[-right], [right]])


@pytest.mark.parametrize("layout", [
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    lambda x: F.pad(x, (1, 2), value=1)[..., 1:-2],  # starts at an odd offset
    lambda x: x[:1].expand(3, *x.shape[1:])], ids="transposed every_other cut expanded".split())
@pytest.mark.parametrize("path", PATHS)
@mean_and_none
def test_fault_9_strides(api, path, layout, reduction):
    c, results = make_case(BFLOAT), []
    for finish in (torch.Tensor.contiguous, lambda x: x):  # inside the graph, back to the same leaf
        new = {name: finish(layout(getattr(c, name))) for name in TOKEN_WISE}
        loss = call(api, path, SimpleNamespace(**vars(c) | new), reduction=reduction)
        results.append([loss, *gradients(loss, *leaves(c, path))])
    same(*results)
    assert all(x.any() for x in results[0])


EMPTY = "ignored", "ignored, no mask", "mask", "no tokens", "num_items"


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("path", PATHS)
def test_fault_13_nothing_kept(api, path, empty, r=None):
    c = make_case(shape=(2, 2), V=68)
    if empty == "no tokens":
        vars(c).update((name, getattr(c, name).detach()[:0]) for name in TOKEN_WISE)
    elif empty != "num_items":
        c.keep.fill_(False)
        c.mask.zero_() if empty == "mask" else c.target.fill_(IGN)
    if empty == "ignored, no mask" and path in ("labels", "linear"):
        del c.mask
    o = dict(num_items=0) if empty == "num_items" else {}
    strategies = dict(linear=STRATEGIES, distillation=[{}, dict(max_kept=9, chunk_size=4)])
    for reduction, strategy in product(["mean", "sample_mean"] + ["sum", "none"] * (not o),
                                       strategies.get(path, [{}])):
        results = outcome(api, path, c, r, upstream=inf, reduction=reduction, **strategy, **o)
        assert all((x == 0).all() for x in results.values())


@mean_and_none
def test_fault_18_nothing_allocated_for_a_frozen_weight(api, reduction):
    W, x = torch.zeros(50, 2**16, device=DEVICE), leaf([[1] * 2**16] * 2)
    with torch.profiler.profile(profile_memory=True) as profile:
        api.masked_linear_cross_entropy(x, W, tensor([0, 1]), reduction=reduction).sum().backward()
    usage = "device_memory_usage" if DEVICE == "cuda" else "cpu_memory_usage"
    assert x.numel() * 4 <= max(getattr(e, usage) for e in profile.events()) < W.numel() * 4


def test_weights_and_fault_16(api):
    labels, cu = tensor([1, 2, 3, 4, 5]), tensor([0, 3, 5])
    shifted = api.shift_labels(labels, cu_seqlens=cu)
    assert shifted.tolist() == [2, 3, IGN, 5, IGN] and api.count_items(shifted != IGN) == 3
    with pytest.raises(ValueError, match=r"\(\)"):
        api.shift_labels(labels[0])
    assert api.shift_labels(labels.view(1, 5)).tolist() == [[2, 3, 4, 5, IGN]]
    assert api.shift_labels(labels > 2, 0, cu).tolist() == [False, True, False, True, False]
    keep = tensor([[1] * 8, [1, 1] + [0] * 6])  # times 80: 8 for "mean"; 5 and 20 for "sample_mean"
    close(api.token_weights(keep) * 80, keep * 8)
    close(api.token_weights(keep, "sample_mean") * 80, keep * tensor([[5], [20]]))
    for n in (4, 4.0, tensor(4), tensor(4.0), torch.tensor(4).numpy()[()]):  # NumPy's int64
        close(api.token_weights(keep, num_items=n) * 4, keep)
        close(api.token_weights(keep, "sample_mean", num_items=n) * 32, keep * tensor([[1], [4]]))
    ones, cu = torch.ones(257, dtype=BFLOAT, device=DEVICE), tensor([0, 0, 2, 2, 3])
    assert api.count_items(ones) == api.count_items(ones.bool()) == 257  # in bf16, 256
    close(api.token_weights(ones), [1 / 257] * 257)
    a = tensor([1.0, 3, 2])
    close(api.token_weights(a, "sample_mean", cu_seqlens=cu), [0.125, 0.375, 0.5])
    assert [api.count_items(a, x, cu_seqlens=cu).item() for x in ("mean", "sample_mean")] == [6, 2]


def count_syncs(step):
    step()  # compiles
    if DEVICE == "cpu":
        with torch.profiler.profile() as profile:
            step()
        return sum(event.name in ("aten::nonzero", "aten::_local_scalar_dense")
                   for event in profile.events())
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


@pytest.mark.parametrize("path, o", VALUES)
def test_host_syncs(api, path, o):
    c, linear = make_case(BFLOAT), len(PATHS[path]) > 1
    syncs = int(linear and "max_kept" not in o and o.get("skip") != "none")
    assert syncs == count_syncs(lambda: call(api, path, c, **o).sum().backward())


@pytest.mark.parametrize("path", ["labels", "linear"])
def test_float16_keeps_the_gradient_of_small_classes(api, path):
    z = leaf([[0, -16.625]], dtype=HALF)  # p = 6e-8, float16's smallest number
    dz = gradients(through(api, path, z, tensor([0])), z, upstream=2.0**16)[0]  # GradScaler's
    close(dz[:, 1], [exp(-16.625) * 2**16], rel=2**-7)


@mean_and_none
def test_autocast(api, reduction):
    autocast = torch.autocast(DEVICE, BFLOAT)(call)
    results = outcome(api, "linear", make_case(), f=autocast, reduction=reduction)
    assert all(x.dtype == FLOAT and x.isfinite().all() for x in results.values())
    wide, right = (call(api, "linear", make_case(x), reduction=reduction) for x in (FLOAT, BFLOAT))
    assert torch.equal(results["loss"], right) and not torch.equal(results["loss"], wide)


@mean_and_none
@pytest.mark.parametrize("path", ["linear", "distillation"])
def test_more_kept_than_max_kept_is_loud(api, path, reduction):
    c = make_case()
    for x in outcome(api, path, c, max_kept=5, reduction=reduction).values():
        assert (x[c.keep] if x.shape[:2] == c.keep.shape else x).isnan().all()


# --------------------------------------------------------------------------------------- bad input
CE, DIST, LINEAR, KD = ("masked_cross_entropy", "masked_cross_entropy_from_distribution",
                        "masked_linear_cross_entropy", "masked_linear_distillation")
Z, H1 = [[0.0, 0, 0], [0, 0, 0]], [[0.0], [0], [0]]  # lists become tensors
GOOD = {CE: dict(logits=Z, target=[0, 1]), DIST: dict(logits=Z, target=Z),
        LINEAR: dict(hidden=Z, linear_weight=Z, target=[0, 1]),
        KD: dict(hidden=Z, linear_weight=Z, teacher_hidden=Z, teacher_weight=Z)}
BAD = {  # argument -> bad values; the message names the argument, then a number or a word itself
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


@pytest.mark.parametrize("error, f, change, says", [
    *((error, f, {name: x}, name[-4:] + (".*" + repr(x)) * (type(x) in (int, float, str)))
      for (error, f), arguments in BAD.items() for name in arguments for x in arguments[name]),
    (ValueError, CE, dict(num_items=2, reduction="sum"), "num_items=2"),
    (TypeError, CE, dict(softcap={}), "softcap.*{}"),  # what has no hash
    (TypeError, LINEAR, dict(loss_mask=(1, 1)), r"loss_mask.*\(1, 1\)"),
    (ValueError, LINEAR, dict(max_kept=1, skip="none"), "max_kept=1"),
    (ValueError, CE, dict(logits=[Z[:1]] * 2, target=[[0], [1]], loss_mask=[1, 0]),  # fault 19
     r"\(2, 1\).*\(2,\)"),
    *(("data", *row) for row in (  # on a GPU NaN, because a look would synchronise
        (CE, dict(target=[0, 3]), "label 3 at token 1"), (CE, dict(target=[-1, 0]), "label -1"),
        (LINEAR, dict(target=[0, 2]), "label 2 at token 1"),
        (DIST, dict(loss_mask=[0.5, -1.0], reduction="sample_mean"), "-1.0 at token 1"),
        (KD, dict(cu_seqlens=[0, 3], reduction="sample_mean"), "from 0 to the 2 .*position 1"),
        (CE, dict(cu_seqlens=[0, 2, 1, 2], reduction="sample_mean"), "position 2"),
        (CE, dict(num_items=tensor(-1.0)), "num_items=-1.0")))])
def test_bad_input(api, error, f, change, says):
    o = {k: tensor(x) if isinstance(x, list) else x for k, x in (GOOD[f] | change).items()}
    if error == "data" and DEVICE == "cuda":
        return close(getattr(api, f)(**o), nan)
    with pytest.raises(ValueError if error == "data" else error, match=says):
        getattr(api, f)(**o)


@pytest.mark.parametrize("path, o", [*((path, {}) for path in PATHS), ("linear", dict(max_kept=9))])
@mean_and_none
def test_custom_ops(triton_api, path, o, reduction):
    """torch.compile(fullgraph=True) gives eager's numbers; what it calls passes opcheck."""
    torch._dynamo.reset()
    calls, graphs = {}, []

    class Recorder(torch.fx.Interpreter):
        def call_function(self, op, args, kwargs):
            calls.update({op: args} if "masked_ce" in str(op) else {})
            return op(*args, **kwargs)

    record = aot_autograd(
        fw_compiler=lambda graph, _: graphs.append(graph) or Recorder(graph).run)
    loss = functools.partial(call, triton_api, path, reduction=reduction, **o)
    for backend in [record] + ["inductor"] * (DEVICE == "cuda"):
        compiled = torch.compile(loss, fullgraph=True, backend=backend)
        for c in (make_case(FLOAT, (n,)) for n in ((5, 7, 8) if backend == record else (5,))):
            results = [[y, *gradients(y, *leaves(c, path))] for y in (compiled(c), loss(c))]
            for x, right in zip(*results):
                close(x, right.detach().double())
    assert calls and len(graphs) == 4  # forward and backward, of 5 tokens and of any number
    for op, args in calls.items():
        wanted = 0 if "gradient" in str(op) else 3  # nobody differentiates those
        torch.library.opcheck(op, [x.detach().requires_grad_(i < wanted) if isinstance(
            x, torch.Tensor) else x for i, x in enumerate(args)])


def test_two_copies_do_not_mix(triton_api, tmp_path, monkeypatch):
    (tmp_path / "a_package").mkdir()
    for module in (masked_ce, triton_api):
        shutil.copy(module.__file__, tmp_path / "a_package")
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module("a_package.masked_ce_triton")
    assert other.reference.__name__ == "a_package.masked_ce"
    for loss in (x.masked_cross_entropy for x in (masked_ce, triton_api, other, other.reference)):
        assert pickle.loads(pickle.dumps(loss)) == loss
    monkeypatch.setattr(other.TritonCrossEntropy, "row_pass", None)  # what its operations call
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

        def step():
            loss = call(api, path, c, **o)
            return loss, *torch.autograd.grad(loss, leaves(c, path))

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        with torch.cuda.graph(graph):  # synchronises first
            captured = step()
        for weight in (1, 0, 3):
            c.mask[0, ::2] = weight
            graph.replay()
            same(captured, step())

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

    @two_gpus
    def test_runs_on_the_tensors_own_device(self, api):
        z = torch.zeros(1, 2, device="cuda:1", requires_grad=True)
        loss = api.masked_cross_entropy(z, torch.tensor([0], device="cuda:1"))
        assert torch.cuda.current_device() == 0
        close(loss, log(2))
        close(gradients(loss, z)[0], [[-0.5, 0.5]])


# ------------------------------------------------------------------------------------------- ranks
def in_rank(rank, world, backend, store, files):
    """Every case; r holds api, rank, world and group."""
    torch.cuda.set_device(rank) if backend == "nccl" else None
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank,
                            world_size=world, timeout=timedelta(seconds=60))
    cases = [vocabulary_parallel, ddp_and_sequence_parallel, fsdp] + [two_parts] * (world == 2)
    for case, api in product(cases, map(importlib.import_module, files)):
        print(f"rank {rank} of {world}:", api.__name__, case.__name__, flush=True)
        case(SimpleNamespace(api=api, rank=rank, world=world, group=dist.group.WORLD))
    dist.destroy_process_group()


@pytest.mark.parametrize("backend, world", [
    ("gloo", 2), ("gloo", 4), pytest.param("nccl", 2, marks=two_gpus)])
def test_ranks(tmp_path, monkeypatch, backend, world):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "") if backend == "gloo" else None
    # Beside a GPU the interpreter may be one that fails (Triton 3.6's with numpy 2.4): NCCL's part.
    native = backend == "nccl" or DEVICE == "cpu" and importlib.util.find_spec("triton")
    files = ["masked_ce"] + ["masked_ce_triton"] * bool(native)
    torch.multiprocessing.spawn(in_rank, (world, backend, f"{tmp_path}/store", files), world)


def vocabulary_parallel(r):
    c, first = make_case(DOUBLE, (2, 5), V=12, H=5), r.rank == 0
    for path, o in VALUES:
        if path != "distillation":
            check(r.api, path, c, r, **o)
    for name, (paths, z, *_) in FAULTS.items():
        for path in paths:
            whole = path == "distillation" or path == "linear" and len(z) > 1  # see `through`
            if torch.tensor(z).shape[-1] % r.world == 0 and not whole:
                test_faults(r.api, path, name, r)
    test_linear_faults(r.api, "12", {}, r)
    uneven = torch.zeros(1, 2 + first, device=DEVICE)
    close(r.api.masked_cross_entropy(uneven, tensor([0]), vocab_group=r.group), nan)
    if r.world == 2:  # to save time
        if r.api is not masked_ce:
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            check(r.api, "labels", c, r, f=compiled)
            check(r.api, "linear", c, r, f=compiled, max_kept=9)
        for path, empty in product(LABELED, EMPTY):
            test_fault_13_nothing_kept(r.api, path, empty, r)
        for strategy, reduction in product(STRATEGIES[4:], ("mean", "none")):
            for wanted in ((True, first, not first), (False, first, first)):  # frozen on some ranks
                check(r.api, "linear", c, r, wanted, reduction=reduction, **strategy)


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
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Embedding(11, 11, device=DEVICE, dtype=DOUBLE))
        block("sequence", r.api, dist=dist, model=model, tokens=tokens, labels=labels,
              world=r.group, sequence_group=dist.new_subgroups(size)[0])["loss"].backward()
        single, weight = model.module, model.module.weight
        right = masked_ce.masked_cross_entropy(single(TOKENS), LABELS, reduction="sample_mean")
        close(weight.grad, *gradients(right, weight), 1e-6)  # the token weights are float32


def fsdp(r):
    """README's recipe against float64, by a plain bfloat16 model's error."""
    mask, model, results = (TOKENS + LABELS) % 5 != 0, torch.nn.Module(), []
    model.layers = torch.nn.ModuleList([torch.nn.Embedding(11, 6, device=DEVICE)])
    model.forward = lambda tokens, *labels: model.head(model.layers[0](tokens), *labels)
    block("fsdp", r.api, dist=dist, model=model, hidden_size=6, vocab_size=11,
          fully_shard=fully_shard, MixedPrecisionPolicy=MixedPrecisionPolicy,
          tokens=part(r, TOKENS), labels=part(r, LABELS), mask=part(r, mask))
    for dtype in (DOUBLE, BFLOAT):
        x, W = (p.detach().full_tensor().bfloat16().to(dtype).requires_grad_()
                for p in model.parameters())
        z = F.linear(F.embedding(TOKENS, x), W).to(torch.promote_types(dtype, FLOAT))
        labels = LABELS.masked_fill(~mask, IGN)
        results.append(gradients(F.cross_entropy(z.flatten(0, 1), labels.flatten()), x, W))
    for p, oracle, eager in zip(model.parameters(), *results, strict=True):
        within(p.grad.full_tensor().bfloat16(), oracle, eager)


# --------------------------------------------------------------------------- README, word for word
README = Path(masked_ce.__file__).with_name("README.md").read_text()
BLOCKS = dict(re.findall(r"<!-- block: (\w+)[^\n]*\n```python\n(.*?)```", README, re.DOTALL))


def block(name, api, **names):
    """Runs a block of README.md with the names that it takes for granted. -> its names."""
    exec(compile(BLOCKS[name], f"README.md, {name}", "exec"), names := vars(api) | names)
    return names


def test_readme_and_docstrings(api):
    assert doctest.testmod(masked_ce).failed == 0 < doctest.testmod(masked_ce).attempted
    assert " ".join(sorted(BLOCKS)) == "accumulation fsdp linear lm_head sequence start trainer"
    assert README.count("```python") == len(BLOCKS)
    names = block("start", masked_ce)
    close(names["loss"], 0.4076059644)
    close(names["logits"].grad, [[0.0900305732, 0.2447284711, -0.3347590442], [0, 0, 0]], 1e-6)
    # accumulation: uneven micro-batches
    model = torch.nn.Embedding(11, 11, device=DEVICE, dtype=DOUBLE)
    loader = [list(zip(TOKENS.split([1, 5, 2]), LABELS.split([1, 5, 2])))]
    block("accumulation", api, model=model, loader=loader, optimizer=Mock())
    right = F.cross_entropy(model(TOKENS).flatten(0, 1), LABELS.flatten())
    close(model.weight.grad, *gradients(right, model.weight), 4e-12)
    # linear: the four lines agree, and read the device as often as they say
    hidden, weight = (torch.randn(*x, 4, device=DEVICE, dtype=DOUBLE) for x in ((8, 6), (11,)))
    names = vars(api) | dict(
        F=F, logits=(z := F.linear(hidden, weight)), teacher=torch.randn_like(z), labels=LABELS,
        mask=LABELS != IGN, hidden=hidden, weight=weight,
        advantage=torch.linspace(-1, 1, 6, device=DEVICE),
        token_loss=F.cross_entropy(z.mT, LABELS, reduction="none"))
    for line in BLOCKS["linear"].splitlines():
        assert count_syncs(lambda: exec(line, names)) == int(re.search(r"# (\d)", line)[1])
        close(names.pop("loss"), F.cross_entropy(z.mT, LABELS).item())
    # instead of this, write that
    rows = re.findall(r"^\| `(\S*F\.[^`]+|\(token[^`]+)` \| `([^`]+)` \|$", README, re.MULTILINE)
    assert len(rows) == 5  # the rest are calls of packages that requirements.txt does not name
    for old, new in rows:
        close(eval(new, names), eval(old, names).item(), 1e-6)


def test_readme_hugging_face(api, tmp_path):
    """lm_head and trainer: the loss and the training step of transformers' own loss."""
    hf = pytest.importorskip("transformers", reason="README's recipes for transformers need it")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    model = hf.LlamaForCausalLM(hf.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2)).to(DEVICE, torch.float64)
    inputs = dict(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS), labels=LABELS,
                  num_items_in_batch=20)
    close(block("lm_head", api, model=model, **inputs)["loss"], model(**inputs).loss.item(), 1e-6)
    args = hf.TrainingArguments(  # one step of uneven micro-batches, some of them empty
        tmp_path, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=8,
        optim="sgd", learning_rate=1.0, max_grad_norm=0, use_cpu=DEVICE == "cpu", report_to=[])
    dataset = [dict(input_ids=x, labels=y) for x, y in zip(TOKENS.cpu(), LABELS.cpu())]
    mine, theirs = copy.deepcopy(model), copy.deepcopy(model)
    names = dict(Trainer=hf.Trainer, model=mine, args=args, dataset=dataset)
    for trainer in block("trainer", api, **names)["trainer"], hf.Trainer(
            theirs, args, train_dataset=dataset):
        trainer.train()
    for before, *after in zip(*(m.parameters() for m in (model, mine, theirs)), strict=True):
        close(*(p.detach() - before.detach() for p in after), 1e-4)
