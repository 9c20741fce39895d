"""Every path of masked_ce.py and masked_ce_triton.py against float64. `pytest` runs it.

The reference is held to torch's own functions and to worked values, the Triton file to the
reference in float64. Tests that take `api` run on both: on a GPU if there is one, else on CPU,
where Triton's interpreter needs milliseconds a row: sizes are small, and comments say why so.
Functions of `r` run on both files in 2 or 4 ranks: gloo on CPU, and NCCL where there are two GPUs.
"""
import copy
import doctest
import functools
import importlib
import inspect
import math
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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DeviceMesh, Partial, Replicate, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import masked_ce

HALF, BFLOAT, FLOAT, DOUBLE = DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
torch.set_num_threads(1)  # the sizes are small, and threads on busy cores wait for each other
torch.use_deterministic_algorithms(True, warn_only=True)  # and torch.empty gives NaN, so that an
assert torch.empty(1, device=DEVICE).isnan()  # output which a kernel does not write shows
tensor = functools.partial(torch.tensor, device=DEVICE)
leaf = functools.partial(tensor, dtype=FLOAT, requires_grad=True)
same = functools.partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
IGN = -100
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


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
    worst = (err / tol.clamp(min=1e-300)).argmax()
    assert (err <= tol).all(), f"error {err.flatten()[worst]} > {tol.flatten()[worst]}"


def close(result, expected, rel=None):
    """Equal to numbers worked out by hand, relative to the largest of them; where they say 0, 0.
    Of a tuple of results, each."""
    if isinstance(result, tuple):
        for x, right in zip(result, expected, strict=True):
            close(x, right, rel)
        return
    expected = torch.as_tensor(expected, dtype=DOUBLE, device=result.device)
    if rel is None:
        rel = max(8 * torch.finfo(result.dtype).eps, 2e-10)  # the numbers have ten digits
    size = expected.abs().max().clamp(max=1e300) if expected.numel() else 0
    right = (result - expected).abs() <= rel * size
    right |= (result == expected) | result.isnan() & expected.isnan()
    assert result.shape == expected.shape and right.all(), f"{result} is not {expected}"
    assert (result[expected == 0] == 0).all()


def gradients(results, *x, upstream=1.0):
    """Of one result, or of several by name that have an upstream gradient each."""
    if not isinstance(results, dict):
        results, upstream = dict(loss=results), dict(loss=upstream)
    y = [results[name] for name in upstream]
    return torch.autograd.grad(y, x, [  # full_like: a number copied to a GPU would be a sync
        u.to(y).expand_as(y) if torch.is_tensor(u) else torch.full_like(y, u)
        for y, u in zip(y, upstream.values())])


def all_of(result, c, path):
    """A call's results, and the gradients of the sum of their squares."""
    y = [*outputs(result).values()]
    return [*y, *gradients(sum((x.float() ** 2).sum() for x in y), *leaves(c, path))]


LINEAR_INPUTS = ["hidden", "weight", "bias"]
PATHS = dict(  # what each differentiates
    labels=["logits"], probabilities=["logits"], teacher=["logits"], log_probs=["logits"],
    linear=LINEAR_INPUTS, distillation=LINEAR_INPUTS, linear_log_probs=LINEAR_INPUTS)
LOSSES = [path for path in PATHS if not path.endswith("log_probs")]
DISTRIBUTIONS = "probabilities", "teacher", "distillation"
LABELED = "labels", "linear", "probabilities", "log_probs", "linear_log_probs"  # of given labels
ROWS = "logits probabilities teacher hidden teacher_hidden".split()
TOKEN_WISE = ROWS + ["target", "mask", "keep", "items"]
CUT = dict(logits=-1, teacher=-1, probabilities=-1, weight=0, bias=0)  # the vocabulary's dimension


def leaves(c, path):
    return [getattr(c, name) for name in PATHS[path]]


def outputs(result):  # by name; a LogProbs has three
    return result._asdict() if isinstance(result, tuple) else dict(loss=result)


def make_case(dtype=FLOAT, shape=(3, 4), V=67, H=16, K=None, padding=0):
    """Confident rows (p near 1), token weights from .01 to 10, labels 0 and V - 1, odd sizes; a
    third of the tokens and the whole last sample masked: rows of NaN, bad labels. With K labels a
    token some of a kept token's are masked too, and some repeat. The last columns are padding."""
    rng, n, size = torch.Generator().manual_seed(0), prod(shape), V - padding
    randn = functools.partial(torch.randn, generator=rng)  # on CPU: one case for every device
    token, item = torch.arange(n)[:, None], torch.arange(K or 1)
    target = torch.randint(size, (n, K or 1), generator=rng)
    target[0, 0], target[1, 0] = 0, size - 1
    target[3::4, -1] = target[3::4, 0]
    weight, logits, hidden = randn(V, H), 2 * randn(n, V), randn(n, H) / 2
    confident = torch.arange(1, n, 5)
    logits[confident, target[confident, 0]] += 14
    hidden[confident] = 1.5 * weight[target[confident, 0]]
    c = dict(logits=logits, hidden=hidden, weight=weight, bias=randn(V), teacher=2 * randn(n, V),
             probabilities=randn(n, V).softmax(1) * (1 + randn(n, 1).abs()),  # sums are not 1
             teacher_hidden=randn(n, H + 3), teacher_weight=randn(V, H + 3) / 2,
             teacher_bias=randn(V))
    c = {name: x.to(dtype) for name, x in c.items()}
    masked = (token % 3 == 2) | (token >= (n - prod(shape[1:]) if len(shape) > 1 else n))
    items = ~masked & ((item == token % len(item)) | ((token + item) % 3 != 0))
    by_label = ~items & ((token + item) % 2 == 0)  # the others by a weight of 0
    a = (10 ** torch.linspace(-2, 1, items.numel()))[torch.randperm(items.numel(), generator=rng)]
    c |= dict(target=target.where(items, 10**6).masked_fill(by_label, IGN), items=items,
              mask=a.view_as(items).where(items | by_label, 0), keep=~masked[:, 0])
    for name, x in c.items():
        if padding and name in CUT:
            x.narrow(CUT[name], size, padding).fill_(inf if name == "bias" else nan)
        if name in ROWS:
            x.masked_fill_(masked, nan)
        if name in TOKEN_WISE:
            x = x.reshape(*shape, *x.shape[1:] if K or name in ROWS else ())
        c[name] = x.to(DEVICE).requires_grad_(name in ("logits", *LINEAR_INPUTS))
    return SimpleNamespace(**c)


def call(api, path, c, r=None, **o):  # r: c is this rank's part of the vocabulary
    o |= {} if r is None else dict(vocab_group=r.group)
    o |= dict(linear_bias=c.bias) if len(PATHS[path]) > 1 else {}
    mask = vars(c).get("mask")
    if path == "labels":
        return api.masked_cross_entropy(c.logits, c.target, mask, **o)
    if path == "log_probs":
        return api.masked_log_probs(c.logits, c.target, mask, **o)
    if path == "linear":
        return api.masked_linear_cross_entropy(c.hidden, c.weight, c.target, mask, **o)
    if path == "linear_log_probs":
        return api.masked_linear_log_probs(c.hidden, c.weight, c.target, mask, **o)
    mask = None if mask is None else torch.where(c.keep, mask, 0)  # there are no labels
    if path == "distillation":
        teacher = c.teacher_hidden, c.teacher_weight, mask
        return api.masked_linear_distillation(
            c.hidden, c.weight, *teacher, teacher_bias=c.teacher_bias, **o)
    o |= dict(target_format="logits") if path == "teacher" else {}
    return api.masked_cross_entropy_from_distribution(c.logits, getattr(c, path), mask, **o)


def plain(path, c, dtype, upstream, *, reduction="mean", divergence="cross_entropy", softcap=None,
          teacher_softcap=None, temperature=1.0, label_smoothing=0.0, z_loss=0.0, vocab_size=None,
          logits_dtype=None):
    """-> results and gradients by name, rows for `within`: torch's autograd on kept rows only.
    In float64, the oracle. In the inputs' dtype, eager: GEMMs of that dtype, losses in float32."""
    x = [y.detach().to(dtype).requires_grad_() for y in leaves(c, path)]
    wide = torch.promote_types(dtype, logits_dtype or dtype)

    def logits(cap, x, *head):
        x = x[c.keep]
        z = F.linear(*(y.to(wide) for y in (x, *(y[:vocab_size] for y in head)))) if head else (
            x[:, :vocab_size])
        z = z.to(torch.promote_types(dtype, FLOAT))
        return (cap * torch.tanh(z / cap) if cap else z) / temperature

    def everywhere(keep, x):
        return torch.zeros_like(keep, dtype=x.dtype).masked_scatter(keep, x)

    z = logits(softcap, *x)
    log_p, items = z.log_softmax(1), c.keep
    if path in DISTRIBUTIONS:
        t = [c.teacher_hidden, c.teacher_weight, c.teacher_bias]
        t = [y.to(dtype) for y in ([c.teacher] if path == "teacher" else t)]
        log_q = (logits(teacher_softcap, *t).log_softmax(1) if path != "probabilities" else
                 c.probabilities[c.keep][:, :vocab_size].to(z.dtype).log())
        loss = {"cross_entropy": -log_q.exp() * log_p, "forward_kl": log_q.exp() * (log_q - log_p),
                "reverse_kl": log_p.exp() * (log_p - log_q)}[divergence].sum(1)
    else:
        items, kept = c.items, c.items[c.keep].view(len(z), -1)  # (n, K)
        labels = torch.where(kept, c.target[c.keep].view_as(kept), 0)
        loss = z_loss * z.logsumexp(1, keepdim=True) ** 2 + F.cross_entropy(
            z.repeat_interleave(kept.shape[1], 0), labels.flatten(), reduction="none",
            label_smoothing=label_smoothing).view_as(kept)
        loss = loss[kept]
    losses = everywhere(items, loss)
    if path in LOSSES:
        w = torch.where(items, vars(c).get("mask", 1), 0).to(z.dtype)
        dims = tuple(range(w.dim()))[c.keep.dim() > 1:]  # of a sample
        divisors = dict(mean=w.sum(), sample_mean=w.sum(dims, keepdim=True) * items.any(
            dims).sum())
        w = torch.where(items, w / divisors.get(reduction, 1), 0)
        results = dict(loss=losses * w if reduction == "none" else (losses * w).sum())
        sizes = dict(loss=w * (1 + losses))  # p - 1, or p * (log p/q - loss)
    else:
        entropy = torch.distributions.Categorical(logits=z, validate_args=False).entropy()
        right = (z.gather(1, labels) == z.amax(1, keepdim=True)) & kept
        results = dict(log_prob=-losses, entropy=everywhere(c.keep, entropy),
                       correct=everywhere(c.keep, right[:, 0]))
        # log p in the entropy's gradient holds the rounding of z
        sizes = dict(log_prob=1 + losses, entropy=1 + everywhere(c.keep, z.abs().amax(1)))
    grads = gradients(results, *x, upstream=upstream)
    rows = sum((sizes[name].detach() * u).nan_to_num().abs().view(*c.keep.shape, -1).sum(-1)
               for name, u in upstream.items())
    results = {name: y.detach() for name, y in results.items()}
    return results | dict(zip(PATHS[path], grads)), rows


def part(r, x, dim=0):  # of rank r: as torch.chunk splits, and nothing for ranks beyond the last
    if r is None or dim is None:
        return x
    parts = x.chunk(r.world, dim)
    return parts[r.rank] if r.rank < len(parts) else x.narrow(dim, 0, 0)


def outcome(api, path, c, r=None, wanted=(True,) * 3, upstream=1.0, f=call, grad=True, **o):
    """-> by name, the results and the gradients that are wanted: of copies of c, or with r of this
    rank's part of the vocabulary, which stay as they were. grad: is f to make a graph?"""
    mine = {name: part(r, x, CUT.get(name)).detach().clone() for name, x in vars(c).items()}
    before = copy.deepcopy(mine)
    x = {name: mine[name].requires_grad_() for name, wants in zip(PATHS[path], wanted) if wants}
    results = outputs(f(api, path, SimpleNamespace(**mine), r, **o))
    for name, y in results.items():
        assert y.requires_grad == (bool(x) and grad and name != "correct")
    grads = ()
    if x and grad:
        if not isinstance(upstream, dict):
            upstream = {name: upstream for name in results if name != "correct"}
        grads = gradients(results, *x.values(), upstream=upstream)
    same(mine, before)
    return {name: y.detach() for name, y in results.items()} | dict(zip(x, grads))


STRATEGY = "chunk_size skip max_kept recompute allow_retain_graph f".split()  # change no result


def check(api, path, c, r=None, wanted=(True,) * 3, of=("log_prob", "entropy"), **o):
    """Results and gradients by the rule, in their dtypes; 0 where masked. One result on all ranks.
    of: the log-probabilities' outputs that are differentiated."""
    up, down = (torch.linspace(-1, 2, x.numel(), device=DEVICE).view_as(x).where(x, nan)
                for x in (c.keep if path in DISTRIBUTIONS else c.items, c.keep))
    upstream = dict(loss=up if o.get("reduction") == "none" else -1.0)
    if path not in LOSSES:
        upstream = {name: dict(log_prob=up, entropy=0.7 - down)[name] for name in of}
    results = outcome(api, path, c, r, wanted, upstream, **o)
    # late gradients: a confident row's p - 1 is of logits that another GEMM computed again
    late = api is not masked_ce and "hidden" in PATHS[path] and (
        o.get("reduction") == "none" or "recompute" in o or path not in LOSSES)
    o = {name: x for name, x in o.items() if name not in STRATEGY}
    rights, rows = plain(path, c, DOUBLE, upstream, **o)
    others, _ = plain(path, c, c.logits.dtype, upstream, **o)
    if api is not masked_ce:
        wide = {n: x.double() if x.is_floating_point() else x for n, x in vars(c).items()}
        rights = outcome(masked_ce, path, SimpleNamespace(**wide), upstream=upstream, **o)
    for name, result in results.items():
        is_gradient = name in PATHS[path]
        right, other = (part(r, y[name], CUT.get(name)) for y in (rights, others))
        assert result.dtype == other.dtype
        if name in ROWS:
            assert not result[~c.keep].any()
        for keep in (c.keep, c.items):
            assert is_gradient or result.shape != keep.shape or not result[~keep].any()
        if "vocab_size" in o and name in CUT:  # padding
            assert not result[right == 0].any()
        if r is not None and not is_gradient:
            dist.all_gather(every := [torch.empty_like(result) for _ in range(r.world)], result)
            assert all(torch.equal(x, result) for x in every)
        if result.dtype == torch.bool:
            assert torch.equal(result, right)
        elif result.numel():
            gemm = 2 if "hidden" in PATHS[path] else 1  # its sums meet weights of up to 2
            terms = rows * (128 if late else gemm) if is_gradient else None
            if name in ("weight", "bias"):  # sums over rows of exp of a z, up to 30, rounded
                terms = 32 * right.abs().amax(-1) + (late or "entropy" in upstream) * terms.max()
            within(result, right, other, terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rule_has_teeth(dtype):
    c, upstream = make_case(dtype), dict(loss=1.0)
    rights, rows = plain("labels", c, DOUBLE, upstream)
    grad, eager = rights["logits"], plain("labels", c, dtype, upstream)[0]["logits"]
    within(grad.to(dtype), grad, eager, rows)
    confident = c.logits.amax(-1, keepdim=True) > 9
    for fault in (0 * grad, grad.clamp(max=0), grad * c.keep.sum() / c.keep.numel(),
                  grad.masked_fill(confident, 0), grad.masked_fill((c.mask < 0.1)[..., None], 0)):
        with pytest.raises(AssertionError):  # also without softmax, divided by all rows
            within(fault.to(dtype), grad, eager, rows)


# ------------------------------------------------------------------------------------------ values
STRATEGIES = [  # of 2 to 12 rows: one chunk, several, some of them empty or of spare rows
    {}, dict(recompute=True), dict(chunk_size=1), dict(recompute=True, chunk_size=1),
    dict(skip="none", chunk_size=2), dict(skip="chunks", chunk_size=2),
    dict(max_kept=9, chunk_size=2), dict(allow_retain_graph=True, max_kept=2)]
VALUES = [
    *((path, {}) for path in PATHS),
    *product(("probabilities", "teacher"),
             (dict(divergence="forward_kl"), dict(divergence="reverse_kl"))),
    ("labels", dict(reduction="none", label_smoothing=0.1, z_loss=0.01)),
    ("labels", dict(reduction="sample_mean", softcap=5.0, temperature=0.7)),
    ("labels", dict(padding=1, softcap=5.0, label_smoothing=0.1)),
    ("labels", dict(unmasked=True)), ("linear", dict(unmasked=True)),
    ("labels", dict(K=3, padding=1, label_smoothing=0.1, z_loss=0.01)),
    ("labels", dict(K=1, reduction="none", softcap=5.0)),
    ("labels", dict(K=4, reduction="sample_mean", temperature=0.7)),
    ("probabilities", dict(reduction="none", softcap=5.0, temperature=1.7)),
    ("probabilities", dict(padding=1, divergence="forward_kl")),
    ("teacher", dict(divergence="reverse_kl", temperature=1.7)),
    ("teacher", dict(padding=1, divergence="reverse_kl", softcap=5.0)),
    ("log_probs", dict(softcap=5.0, temperature=0.7)),
    ("log_probs", dict(of=["log_prob"], padding=1, softcap=5.0)),
    ("log_probs", dict(of=["entropy"], K=3)),
    ("linear", dict(reduction="none", chunk_size=2)),
    ("linear", dict(label_smoothing=0.1, z_loss=0.01, skip="none", chunk_size=4)),
    ("linear", dict(reduction="sample_mean", skip="chunks", chunk_size=2)),
    ("linear", dict(K=2, reduction="sum", softcap=15.0, temperature=0.7, max_kept=99)),
    ("linear", dict(reduction="none", max_kept=5, chunk_size=2)),
    ("linear", dict(K=3, padding=1, reduction="none", label_smoothing=0.1, chunk_size=2)),
    ("linear", dict(K=3, logits_dtype=FLOAT, recompute=True, reduction="sample_mean")),
    ("linear", dict(padding=1, softcap=15.0, max_kept=5, chunk_size=2)),
    ("linear_log_probs", dict(logits_dtype=FLOAT, softcap=15.0, temperature=0.7)),
    ("linear_log_probs", dict(of=["log_prob"], K=3, padding=1, skip="none", chunk_size=4)),
    ("linear_log_probs", dict(of=["entropy"], skip="chunks", chunk_size=2, logits_dtype=FLOAT)),
    ("linear_log_probs", dict(padding=1, max_kept=5, chunk_size=2, recompute=True)),
    ("distillation", dict(divergence="forward_kl", reduction="none", temperature=2, chunk_size=2)),
    ("distillation", dict(divergence="reverse_kl", softcap=15.0, teacher_softcap=3.0, max_kept=5,
                          chunk_size=2)),
    ("distillation", dict(reduction="sample_mean", recompute=True))]


def case_of(o, dtype=FLOAT, shape=(3, 4), V=67, H=16):  # -> the case and the options of a value
    K, padding = o.get("K"), o.get("padding", 0)
    size = dict(vocab_size=V - padding) if padding else {}
    c = make_case(dtype, shape, V, H, K, padding)
    if "unmasked" in o:  # labels alone decide, for whose weights Triton has a kernel
        c.target.masked_fill_(~c.keep, IGN)
        del c.mask
    return c, size | {name: x for name, x in o.items() if name not in (
        "K", "padding", "of", "unmasked")}


def check_value(api, path, o, *size, r=None):
    c, options = case_of(o, *size)
    check(api, path, c, r, of=o.get("of", ("log_prob", "entropy")), **options)


WIDE = (3,) if DEVICE == "cpu" else (2, 5)  # few tokens for the interpreter


@pytest.mark.parametrize("size, value", [  # of 6 tokens 3 are kept
    *product([(FLOAT, (3, 2), 67)], VALUES),
    *product([(BFLOAT, (3, 2), 67)], VALUES[:7] + VALUES[12::2]),  # of them all with logits_dtype
    *product([(HALF, (3, 2), 67)], VALUES[:7] + VALUES[7::2]),
    *product([(DOUBLE, (3, 2), 67)], VALUES[:7] + VALUES[8::2]),
    *product([(FLOAT, (3, 4), 67)], VALUES[:7]),
    *product([(BFLOAT, (2, 2), 2), (DOUBLE, WIDE, 4099)],  # less than a block; blocks, an odd tail
             [*VALUES[:7], VALUES[8], *VALUES[10:13]]),
    *product([(DOUBLE, WIDE, 4096)], [VALUES[0], VALUES[2], VALUES[11]]),  # whole blocks
    *product([(FLOAT, WIDE, 2**15 + 5)], [VALUES[0], VALUES[8], VALUES[10]]),
    *product([(FLOAT, (7,), 67), (BFLOAT, (2, 1, 2), 67)], [
        VALUES[4], *VALUES[12:15], *VALUES[16:19]]),
    ((FLOAT, (3,), 300), ("labels", dict(K=64, padding=44)))], ids=str)
def test_values(api, size, value):
    path, o = value
    check_value(api, path, o, *size)


# ----------------------------------------------- known_faults.md, by number: faults that people met
def label_loss(api, path, c, r=None, *, reduction="mean", cu_seqlens=None, **o):
    """call, or where that gives log-probabilities the loss that their user would make of them."""
    if path in LOSSES:
        return call(api, path, c, r, reduction=reduction, cu_seqlens=cu_seqlens, **o)
    a = (c.target != IGN).double() * (1 if vars(c).get("mask") is None else c.mask)
    log_prob = call(api, path, c, r, **o).log_prob
    w = api.token_weights(a, reduction, cu_seqlens=cu_seqlens).to(log_prob)
    losses = torch.where(w != 0, -w * log_prob, 0)
    return losses if reduction == "none" else losses.sum()


def through(api, path, z, y, mask=None, r=None, **o):
    """A loss of z by each path, y labels or a distribution. The linear ones: hidden z, weight 1;
    for one row (long, with inf) weight 0, bias z."""
    x, W, b = (z, torch.eye(z.shape[-1]).to(z), None) if z.shape[:-1].numel() > 1 else (
        z.new_ones(1, 1), torch.zeros_like(z.t()), z[0])
    c = SimpleNamespace(logits=z, target=y, mask=mask, hidden=x, weight=W, bias=b, teacher=y,
                        probabilities=y, teacher_hidden=x, teacher_weight=W, teacher_bias=y[0])
    if path == "probabilities" and not y.is_floating_point():
        V = max(z.shape[-1] * (r.world if r else 1), o.get("vocab_size", 0))
        c.probabilities = part(r, F.one_hot(y.clamp(min=0), V).to(z.dtype), -1)[..., :z.shape[-1]]
        c.keep, c.mask = y != IGN, torch.ones_like(y) if mask is None else mask
    return label_loss(api, path, c, r, **o)


LOST = {loss: [0, log(exp(loss) - 1)] for loss in (1, 2, 3, 9, 10)}  # logits: label 0 loses this
Q, TEACHER, RETAIN = ["probabilities"], ["teacher", "distillation"], dict(allow_retain_graph=True)
LOSS_ONLY = LABELED[:2]  # paths with label smoothing and z-loss
FOUR = ([[0, 0]] * 6, [0, 0, 0, 1, IGN, IGN])
DZ_4 = [[-0.125, 0.125]] * 3 + [[0.125, -0.125]] + [[0, 0]] * 2
TWO_EACH = [[0, 0], [0, IGN], [0, 0], [IGN, 0]]  # labels, five and one
FIVE_AND_ONE, UNEQUAL = [LOST[2]] * 5 + [LOST[10]], [LOST[1]] * 18 + [LOST[3]] * 2
DEAD = [[0, 1, -inf, -inf], [-inf, -inf, 0, 1]]
DZ_DEAD = [[0.2689414214, -0.2689414214, 0, 0], [0, 0, 0.2689414214, -0.2689414214]]
DZ_11 = [0.0320586033, 0.0871443187, 0.2368828181, -0.3560857401]
DZ_22 = [0.011656230956, 0.031684920796, 0.086128544436, 0.234121657253, -0.363591353441]
DZ_1, DZ_2 = [0.0900305732, 0.2447284711, -0.3347590442], [[-1 / 6, 1 / 3, -1 / 6]]
FAULTS = {  # paths, z, target, options (or the test's: dtype, rel, loss_rel), loss, its gradient
    "1": (LABELED, [[1, 2, 3], [nan, inf, -inf]], [2, IGN], {}, 0.4076059644, [DZ_1, [0] * 3]),
    "1 kept": (LABELED, [[1, 2, 3], [nan] * 3], [IGN, 1], {}, nan, [[0] * 3, [nan] * 3]),
    "2": (Q, [[0, 1, -inf]], [[0.25, 0.75, 0]], dict(rel=8e-6), 0.5632616875,
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
    **{f"4 {skip} {n}": (["linear", "linear_log_probs"][:1 + (n == 4)], *FOUR, dict(
        chunk_size=n, skip=skip), log(2), DZ_4)
       for skip in ("rows", "chunks", "none") for n in (1, 2, 4, 100)},
    **{f"6 {z:.0e}": (LABELED, [[z, z]], [0], {}, log(2), [[-0.5, 0.5]]) for z in (1e4, 1e6, 1e8)},
    "6 close": (LABELED, [[1e6 + 2, 1e6 - 1]], [0], dict(rel=2e-6), 0.0485873516,
                [[-0.0474258732, 0.0474258732]]),
    "7 padding": (LABELED, [[-100] * 3], [0], dict(softcap=1.0), log(3), [[0, 0, 0]]),  # flat tanh
    "7 saturated": (LABELED, [[1e4, 0, -1e4]], [1], dict(softcap=30.0), 30, [[0, -1, 0]]),
    "7 slope": (LABELED, [[30, 0]], [1], dict(softcap=30.0), 22.8478246788, [[0.4199743416, -1]]),
    "7 flat": (LABELED, [[240, 225, 270]], [0], dict(  # 1 - tanh^2, from tanh, has no bit left
        softcap=30.0, rel=tensor([1e-4, 1e-4, 5e-6]), loss_rel=8e-6), 1.0986103675,
               [[-3.00094e-7, 4.07866e-7, 2.03068e-8]]),
    "10": (LOSS_ONLY, [[[0, log(3)], [nan] * 2, [nan] * 2], [[0, 0]] * 3],
           [[0, IGN, IGN], [0] * 3], dict(reduction="mean"), 0.8664339757,
           [[[-0.1875, 0.1875], [0, 0], [0, 0]], [[-0.125, 0.125]] * 3]),
    "11": (LOSS_ONLY, [[0, 1, 2, 3]], [3], dict(label_smoothing=0.1), 0.5901896986, None),
    "11 plain": (LABELED, [[0, 1, 2, 3]], [3], {}, 0.4401896986, [DZ_11]),
    "20": (["labels", "linear_log_probs"], [[-inf] * 50_000 + [10] + [-inf] * 49_999], [50_000],
           {}, 0, [[0] * 100_000]),
    "20 shorter": (LABELED, [[-inf] * 5000 + [10] + [-inf] * 4999], [5000], {}, 0, [[0] * 10_000]),
    "22": (LABELED, [[0, 1, 2, 3, 4]], [4], dict(vocab_size=5), 0.4519143959, [DZ_22]),
    "26": (LABELED, [[0, 1], [2, 0], [0, 0]], [1, 1, IGN], dict(mask=tensor([2e38, 2e38, 1])),
           (0.3132616875 + 2.1269280110) / 2, None),
    "27": (LABELED, [[0, 1], [2, 0], [nan, inf]], [0, 1, 0], dict(  # a policy gradient's weights
        mask=torch.where(tensor([True, True, False]), tensor([-2, 3, nan]), 0), reduction="sum"),
           3.7542606581, None),
    **{f"29 {low}": (LOSS_ONLY, [[1, 2, 3, low]], [0], dict(label_smoothing=0.1, vocab_size=3),
                     2.3076059644, None) for low in (-inf, nan, inf)},
    **{f"29 capped {low}": (LABELED, [[-100, -100, -100, low]], [0], dict(
        softcap=30.0, vocab_size=3), log(3), None) for low in (-inf, nan, inf)},
    # Half the columns are -inf: over ranks, whole shards.
    **{f"dead {i}": (LABELED, [DEAD[i]], [2 * i + 1], {}, 0.3132616875, [DZ_DEAD[i]])
       for i in (0, 1)},
    **{f"dead {low} {d}": (["teacher"], DEAD, [[0, 0, low, low], [low, low, 0, 0]], dict(
        divergence=d, reduction="sum"), 2 * loss, [[-dz, dz, 0, 0], [0, 0, -dz, dz]])
       for low in (-inf, -1e5) for d, loss, dz in (
           ("cross_entropy", 0.8132616875, 0.2310585786),
           ("forward_kl", 0.1201145070, 0.2310585786), ("reverse_kl", 0.1109440717, 0.1966119332))},
    "float64 weights": (LABELED, [[0, 0]] * 2, [0, 1], dict(
        mask=tensor([1.0, 1], dtype=DOUBLE), dtype=BFLOAT), log(2), [[-0.25, 0.25], [0.25, -0.25]]),
    "float16 temperature": (["linear"], [[0, 1], [0, 0]], [0, IGN], dict(  # rows that exceed 1
        temperature=0.003, dtype=HALF, rel=5e-4), 1000 / 3, [[-333.25, 333.25], [0, 0]]),
    "float16 z_loss": (["linear"], [[200, 0], [0, 0]], [0, IGN], dict(
        z_loss=1.0, dtype=HALF, rel=1e-6), 40_000, [[400, 0], [0, 0]])}
for how, right, unequal, divisor in (("mean", 10 / 3, 1.2, 6), ("sample_mean", 6, 2, 2)):
    FAULTS |= {
        f"14 {how}": (LOSS_ONLY, [[LOST[1]] * 4, [LOST[9]] * 4], [[0] * 4, [IGN] * 4],
                      dict(reduction=how), 1, None),
        f"15 {how}": (LOSS_ONLY, [FIVE_AND_ONE[:5], FIVE_AND_ONE[5:] * 5],
                      [[0] * 5, [0] + [IGN] * 4], dict(reduction=how), right, None),
        **{f"15 {how} {cu}": (LOSS_ONLY, FIVE_AND_ONE, [0] * 6, dict(
            reduction=how, cu_seqlens=cu), right, None) for cu in ([0, 5, 6], [0, 0, 5, 5, 6, 6])},
        f"15 {how} chunks": (["linear"], UNEQUAL, [0] * 20, dict(  # means of chunks would differ
            reduction=how, cu_seqlens=[0, 18, 20], chunk_size=13), unequal, None),
        # cu_seqlens counts tokens, num_items labels or samples
        **{f"15 {how} labels {o}": (LOSS_ONLY, FIVE_AND_ONE[2:], TWO_EACH, dict(reduction=how, **o),
                                    loss, None)
           for o, loss in (({}, 10 / 3), (dict(cu_seqlens=[0, 3, 3, 4]), right),
                           (dict(cu_seqlens=[0, 3, 3, 4], num_items=4), right * divisor / 4))}}


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
    assert path not in LOSSES or loss.dtype == torch.promote_types(dtype, FLOAT)
    if dz:  # 17: backward twice
        dz = part(r, tensor(dz, dtype=DOUBLE), -1)
        (first,) = torch.autograd.grad(2 * loss, z, retain_graph=True)
        close(first / 2, dz, rel)
        first.zero_()  # which is the caller's
        try:
            close(torch.autograd.grad(3 * loss, z)[0] / 3, dz, rel)
        except RuntimeError as error:  # or an error that names the cure
            assert api is not masked_ce and "hidden" in PATHS[path]
            assert "allow_retain_graph" not in o
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


@pytest.mark.parametrize("path, name, strategy", [
    *product(["linear"], LINEAR_FAULTS, STRATEGIES), ("linear_log_probs", "18", {}),
    *product(["linear_log_probs"], ["8"], STRATEGIES)], ids=str)
def test_linear_faults(api, path, name, strategy, r=None):
    x, W, y, reduction, upstream, *rights = LINEAR_FAULTS[name]
    rights = dict(zip(("loss", *PATHS["linear"]), rights))
    c = SimpleNamespace(hidden=tensor(x, dtype=FLOAT), weight=tensor(W, dtype=FLOAT),
                        bias=torch.zeros(len(W), device=DEVICE), target=tensor(y))
    patterns = [(torch.enable_grad, True, True, True)]
    if name == "18":  # in every mode, and only the gradients that are asked for
        patterns = [*product([torch.enable_grad], *[(True, False)] * 3),
                    *((mode, True, True, True) for mode in (torch.no_grad, torch.inference_mode))]
        patterns = patterns if strategy in STRATEGIES[:3] else patterns[-2:]
    for mode, *wanted in patterns:
        results = outcome(api, path, c, r, wanted, tensor(upstream), mode()(label_loss),
                          mode is torch.enable_grad, reduction=reduction, **strategy)
        for x, result in results.items():
            close(result, part(r, tensor(rights[x], dtype=DOUBLE), CUT.get(x)))


@pytest.mark.parametrize("dtype, reduction, x, few", [
    (BFLOAT, "sum", [1] * 8192, [512] + [2] * 24), (HALF, "mean", [16] * 8192, [8192] * 16)])
def test_fault_5_long_sums(api, dtype, reduction, x, few):
    # A bf16 sum of steps of 8 stalls at 2048. In float16 8192 * 16 / 2 overflows before the mean
    # divides. The interpreter gets few rows: after 256, a bf16 sum does not see ones.
    x, size = (few, 1) if DEVICE == "cpu" and api is not masked_ce else (x, 16)
    hidden, W, y = tensor([x], dtype=dtype).t(), leaf([[0], [0]], dtype=dtype), tensor([0] * len(x))
    for o in (dict(chunk_size=size), {}):
        loss = api.masked_linear_cross_entropy(hidden, W, y, reduction=reduction, **o)
        right = sum(x) / 2 / (1 if reduction == "sum" else len(x))
        close(gradients(loss, W)[0], [[-right], [right]])


@pytest.mark.parametrize("K, reduction", [(1, "mean"), (1, "sum"), (3, "mean")])
def test_weights_of_many_items(triton_api, K, reduction):
    """Counted over more than one block of the kernel that prepares them."""
    N, V = 8200, 5
    labels = torch.randint(V, (N, K), device=DEVICE)
    labels[torch.rand(N, K) < 0.5] = IGN
    mask = 10 * torch.rand(N, K, device=DEVICE)
    mask[torch.rand(N, K) < 0.3] = 0
    x, o = torch.zeros(N, V, device=DEVICE), dict(ignore_index=IGN, reduction=reduction)
    v = masked_ce.check_vocabulary("logits", FLOAT, V, None, None)
    _, right = masked_ce.call_items(x, labels, mask, v, **o)
    keep = (right != 0).any(1).nonzero()[:, 0]
    for max_kept in (len(keep), len(keep) - 1):
        w, index, count = triton_api.launch_prepare(
            labels, mask, (N, K), IGN, V, reduction, None, max_kept, None, FLOAT, x.device)
        wanted = right if max_kept == len(keep) else torch.where(right != 0, nan, 0.0)
        same(w, wanted, rtol=1e-6)
        assert count == len(keep) and torch.equal(index[: len(keep)], keep)
        assert torch.equal(index.sort()[0], torch.arange(N, device=DEVICE))


@pytest.mark.parametrize("layout", [
    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    lambda x: F.pad(x, (1, 2), value=1)[..., 1:-2],  # starts at an odd offset
    lambda x: x[:1].expand(3, *x.shape[1:])], ids="transposed every_other cut expanded".split())
@pytest.mark.parametrize("path, K, o", [
    *((path, None, {}) for path in PATHS), ("labels", 2, dict(reduction="none"))], ids=str)
def test_fault_9_strides(api, path, layout, K, o):
    c, results = make_case(BFLOAT, (2, 2), K=K), []
    for finish in (torch.Tensor.contiguous, lambda x: x):  # inside the graph, back to the same leaf
        new = {name: finish(layout(getattr(c, name))) for name in TOKEN_WISE}
        results.append(all_of(call(api, path, SimpleNamespace(**vars(c) | new), **o), c, path))
    same(*results)
    assert all(x.any() for x in results[0])


EMPTY = "ignored", "ignored, no mask", "no tokens", "mask", "num_items"


@pytest.mark.parametrize("path, K, empty", [
    (path, K, empty) for path, K in [*((path, None) for path in PATHS), ("labels", 3)]
    for empty in EMPTY if path in LOSSES or empty != "num_items"])
def test_fault_13_nothing_kept(api, path, K, empty, r=None):
    c = make_case(shape=(2, 2), V=68, K=K)
    if empty == "no tokens":
        vars(c).update((name, getattr(c, name).detach()[:0]) for name in TOKEN_WISE)
    elif empty != "num_items":
        c.keep.fill_(False)
        c.mask.zero_() if empty == "mask" else c.target.fill_(IGN)
    if empty == "ignored, no mask" and path not in DISTRIBUTIONS:
        del c.mask
    reductions = [dict(reduction=x) for x in ("mean", "sample_mean", "sum", "none")]
    if empty == "num_items":
        reductions = [x | dict(num_items=0) for x in reductions[:2]]
    if path not in LOSSES:
        reductions = [{}]
    strategies = STRATEGIES[3:7] if "linear" in path else []
    if path == "distillation":  # has no skip
        strategies = STRATEGIES[1], STRATEGIES[6]
    for o in [*reductions, *(x | y for x, y in product(reductions[::3], strategies))]:
        upstream = inf if path in LOSSES else dict(log_prob=inf, entropy=nan)
        results = outcome(api, path, c, r, upstream=upstream, **o)
        assert not any(x.any() for x in results.values())


@pytest.mark.parametrize("path, o", [
    ("linear", {}), ("linear", dict(reduction="none")), ("linear_log_probs", {})])
def test_fault_18_nothing_allocated_for_a_frozen_weight(api, path, o):
    c = SimpleNamespace(weight=torch.zeros(50, 2**16, device=DEVICE), bias=None,
                        hidden=leaf([[1] * 2**16] * 2), target=tensor([0, 1]))
    with torch.profiler.profile(profile_memory=True) as profile:
        y = call(api, path, c, **o)
        (y if path == "linear" else y.log_prob + y.entropy).sum().backward()
    usage = "device_memory_usage" if DEVICE == "cuda" else "cpu_memory_usage"
    most = max(getattr(e, usage) for e in profile.events())
    assert c.hidden.numel() * 4 <= most < c.weight.numel() * 4


def test_fault_16_weights(api):
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
    for n in (4, 4.0, tensor(4), tensor(4.0), torch.tensor(4).numpy()[()],  # NumPy's int64
              tensor([4.0]), tensor([[4]]), tensor([[4.0], [4.0]]), torch.tensor(4.0)):  # 23
        close(api.token_weights(keep, num_items=n) * 4, keep)
        close(api.token_weights(keep, "sample_mean", num_items=n) * 32, keep * tensor([[1], [4]]))
    ones, cu = torch.ones(257, dtype=BFLOAT, device=DEVICE), tensor([0, 0, 2, 2, 3])
    assert [api.count_items(x).item() for x in (ones, ones.bool())] == [257, 257]  # in bf16, 256
    close(api.token_weights(ones), [1 / 257] * 257)
    a = tensor([1.0, 3, 2])
    close(api.token_weights(a, "sample_mean", cu_seqlens=cu), [0.125, 0.375, 0.5])
    assert [api.count_items(a, x, cu_seqlens=cu).item() for x in ("mean", "sample_mean")] == [6, 2]


@pytest.mark.parametrize("path", LOSSES)
def test_fault_23_num_items_of_trainers(api, path):
    c = make_case(shape=(2, 2))
    right = outcome(api, path, c, num_items=3)
    for n in (3.0, tensor([[3.0], [3.0]]), tensor([3]), torch.tensor(3)):
        same(outcome(api, path, c, num_items=n), right)


@pytest.mark.parametrize("path", PATHS)
def test_fault_24_inference_mode(api, path):
    """What needs no gradient may be made there: a teacher, a frozen model's hidden states."""
    reductions = ("mean", "none", "sample_mean") if path in LOSSES else [None]
    for reduction, first in product(reductions, (0, 1)[:len(PATHS[path])]):
        learn, results = PATHS[path][first:], []
        for mode in (torch.enable_grad, torch.inference_mode):
            c = make_case(shape=(2, 2))
            with mode():
                vars(c).update((name, x.detach().clone()) for name, x in vars(c).items()
                               if name not in learn)
            y = outputs(call(api, path, c, **dict(reduction=reduction) if reduction else {}))
            results.append(gradients(
                sum(x.sum() for x in y.values()), *(getattr(c, name) for name in learn)))
        same(*results)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize("path", TEACHER)
@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl"])
def test_fault_25_a_divergence_is_never_negative(api, dtype, path, divergence):
    rng, n = torch.Generator().manual_seed(1), 200 if api is masked_ce else 5
    z, noise = (torch.randn(n, 50, generator=rng) for _ in range(2))
    for size, offset in ((0, 300), (1e-4, 0), (1e-4, 300)):
        student, teacher = ((z + x + offset).to(DEVICE, dtype) for x in (0, size * noise))
        c = SimpleNamespace(logits=student, teacher=teacher, hidden=student, teacher_hidden=teacher,
                            weight=torch.eye(50).to(student), bias=None)
        c.teacher_weight, c.teacher_bias = c.weight, None
        loss = call(api, path, c, reduction="none", divergence=divergence)
        assert (loss >= 0).all() and (size > 0 or not loss.any())
        log_p, log_q = (x.double().log_softmax(1) for x in (student, teacher))
        if divergence == "reverse_kl":
            log_p, log_q = log_q, log_p
        right = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(1)
        close(loss - right, torch.zeros(n).to(loss) + (loss - right).clamp(-4e-6, 4e-6))


# ------------------------------------------------------------- log-probabilities, and what is taken
ENTROPIES = [  # logits, label, its log-probability, entropy, correct
    ([0, 1, -inf], 1, -0.3132616875, 0.5822031089, True),
    ([0, 1, -inf], 2, -inf, 0.5822031089, False),
    ([0, 0, 0], 2, -log(3), log(3), True), ([1e8, 1e8, 0], 0, -log(2), log(2), True),
    ([-inf, -inf, 5], 2, 0, 0, True), ([-inf, -inf, 5], 0, -inf, 0, False),
    ([0, -1e4, -1e4], 0, 0, 0, True), ([0, -1e4, -1e4], 1, -1e4, 0, False)]


@pytest.mark.parametrize("path", ["log_probs", "linear_log_probs"])
@pytest.mark.parametrize("z, y, log_prob, entropy, correct", ENTROPIES, ids=str)
def test_entropies(api, path, z, y, log_prob, entropy, correct, r=None):
    p = tensor([z], dtype=DOUBLE).softmax(1)
    z = part(r, tensor([z], dtype=FLOAT), -1).clone().requires_grad_()
    c = SimpleNamespace(logits=z, target=tensor([y]), hidden=z.new_ones(1, 1),
                        weight=torch.zeros_like(z.t()), bias=z[0])
    results = call(api, path, c, r, vocab_size=3)
    for result, right in zip(results, ([log_prob], [entropy], [correct])):
        close(result.double(), right, 1e-6)
    dz = -p * (torch.where(p > 0, p.log(), 0) + entropy), F.one_hot(tensor([y]), 3) - p
    for right, result in zip(dz, (results.entropy, call(api, path, c, r, vocab_size=3).log_prob)):
        grad, right = gradients(result, z)[0], part(r, right, -1)
        if result > -inf and right.numel():
            within(grad, right, right, torch.ones(1, device=DEVICE))  # the size of the terms


def test_types_and_dimensions(api):
    """Any number type as mask, labels of both integer types, tokens of no dimension, negative
    probabilities in a masked row, negative weights of a sum."""
    c = make_case()
    masks = c.mask > 1, (c.mask > 1).to(torch.uint8), (c.mask > 1).half(), (c.mask > 1).double()
    for path in LOSS_ONLY:
        results = [call(api, path, SimpleNamespace(**vars(c) | dict(mask=mask, target=target)))
                   for mask in masks[:2] for target in (c.target, c.target.int())]
        assert all(torch.equal(x, results[0]) for x in results)
    for mask in masks:
        assert api.count_items(mask) == masks[0].sum()
        close(api.token_weights(mask).float(), masks[0] / masks[0].sum())
    z, y = c.logits[0, 0], c.target[0, 0]
    for loss in (api.masked_cross_entropy(z, y), -api.masked_log_probs(z, y).log_prob,
                 api.masked_linear_cross_entropy(z, torch.eye(67, device=DEVICE), y),
                 api.masked_cross_entropy_from_distribution(z, F.one_hot(y, 67).float())):
        close(loss, F.cross_entropy(z.double(), y).item())
    q = tensor([[0.5, 0.5, 0], [-2.0, 3, nan]])
    loss = api.masked_cross_entropy_from_distribution(torch.zeros_like(q), q, tensor([1, 0]))
    close(loss, log(3))
    close(api.token_weights(tensor([1.0, -2, 3]), "sum"), [1, -2, 3])


# ------------------------------------------------------------------------------- what autograd asks
GIVEN_LOGITS = [path for path in PATHS if PATHS[path] == ["logits"]]
TRANSFORMS = dict(
    grad=torch.func.grad, vjp=lambda f: lambda z: torch.func.vjp(f, z)[1](torch.ones_like(f(z)))[0],
    jvp=lambda f: lambda z: torch.func.jvp(f, (z,), (z / 9,))[1], jacrev=torch.func.jacrev,
    vmap=lambda f: lambda z: torch.func.vmap(f)(torch.stack([z, z])),
    compiled=lambda f: torch.compile(torch.func.grad(f), backend="aot_eager"),
    hessian=torch.func.hessian,
    second=lambda f: torch.func.grad(lambda z: torch.func.grad(f)(z)[0, 1]),
    **{f"traced {mode}": lambda f, mode=mode: lambda z: make_fx(
        f, tracing_mode=mode, _allow_non_fake_inputs=True)(z)(z / 2) for mode in ("real", "fake")})


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("path", PATHS)
def test_fault_21_function_transforms(api, path, name):
    """The values are torch's own, or Triton's file says that it has none."""
    torch._dynamo.reset()
    rng = torch.Generator().manual_seed(0)
    z, t = (torch.randn(4, 7, generator=rng).to(DEVICE) for _ in range(2))
    one, q = torch.eye(7, device=DEVICE), t.softmax(1)
    c = SimpleNamespace(target=tensor([1, 2, IGN, 3]), keep=tensor([True, True, False, True]),
                        mask=torch.ones(4, device=DEVICE), teacher=t, probabilities=q,
                        weight=one, bias=one[0], teacher_hidden=t, teacher_weight=one,
                        teacher_bias=None)
    o = {} if path in GIVEN_LOGITS else dict(max_kept=4)

    def ours(z):
        y = call(api, path, SimpleNamespace(**vars(c), logits=z, hidden=z), **o)
        return y if path in LOSSES else (y.log_prob * 2 + y.entropy).sum()

    def theirs(z):
        z = (z if path in GIVEN_LOGITS else z + one[0])[[0, 1, 3]]
        y = (c.target if path in LOSS_ONLY else c.probabilities)[[0, 1, 3]]
        if path in LOSSES:
            return F.cross_entropy(z, y)
        log_p = z.log_softmax(1)
        return 2 * (log_p * one[c.target[[0, 1, 3]]]).sum() - (log_p.exp() * log_p).sum()

    transform = TRANSFORMS[name]
    if api is masked_ce or "traced" in name:
        torch.testing.assert_close(transform(ours)(z), TRANSFORMS[
            name if name != "compiled" else "grad"](theirs)(z))
    else:
        with pytest.raises(Exception, match="torch.func"):
            transform(ours)(z)


@pytest.mark.parametrize("path, o", [
    *((path, {}) for path in PATHS), ("linear", dict(chunk_size=3)),
    ("linear", dict(max_kept=9, recompute=True))])
def test_second_derivatives(api, path, o):
    """Of each input's gradient by all inputs, from float64; Triton's file says that it has none."""
    c = make_case(DOUBLE, shape=(2, 3), V=5, H=3)
    for name in ROWS:  # gradcheck cannot perturb NaN
        getattr(c, name).data.nan_to_num_(0.3)
    x = [y.detach().requires_grad_() for y in leaves(c, path)]

    def loss(*x):
        y = outputs(call(api, path, SimpleNamespace(**vars(c) | dict(zip(PATHS[path], x))), **o))
        return tuple(y for y in y.values() if y.dtype != torch.bool)

    if api is masked_ce:
        assert torch.autograd.gradgradcheck(loss, x)
        return
    y, z = loss(*x)[0], loss(*x)[0]
    one = torch.ones_like(y)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(torch.autograd.grad(y, x, one, create_graph=True)[0].sum(), x)
    with pytest.raises(RuntimeError, match="torch.func"):
        torch.autograd.grad(z, x, torch.stack([one, one]), is_grads_batched=True)


@pytest.mark.parametrize("path", PATHS)
def test_inputs_changed_before_backward(api, path):
    """Right, or torch's error that something was changed. Given logits, F.cross_entropy allows it,
    so the reference is right; the Triton file reads the logits again, and says so."""
    target = dict(probabilities=["probabilities"], teacher=["teacher"],
                  distillation=["teacher_hidden", "teacher_weight"]).get(path, ["target"])
    c, cases = make_case(shape=(2, 2)), [({}, x) for x in (None, *PATHS[path], *target, "mask")]
    if "hidden" in PATHS[path]:
        cases += [(dict(chunk_size=1), name) for name in (None, "hidden", "weight")]
    for o, name in cases:
        copies = SimpleNamespace(**{n: x.clone() for n, x in vars(c).items()})
        y = outputs(call(api, path, copies, **o))
        if name:
            getattr(copies, name).detach().mul_(2)  # which counts as a change too
        try:
            grads = gradients(sum(x.sum() for x in y.values()), *leaves(c, path))
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            assert name and (api is not masked_ce or path != "labels")
            continue
        assert api is masked_ce or name != "logits"
        right = right if name else grads
        same(grads, right)


def count_syncs(step):
    if DEVICE == "cpu":
        with torch.profiler.profile() as profile:
            step()
        return sum(event.name in ("aten::nonzero", "aten::_local_scalar_dense")
                   for event in profile.events())
    step()  # compiles
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


@pytest.mark.parametrize("path, o", [x for x in VALUES if "hidden" in PATHS[x[0]] or not x[1]])
def test_host_syncs(api, path, o):
    c, o = case_of(o, BFLOAT, (2, 2))
    syncs = int("hidden" in PATHS[path] and "max_kept" not in o and o.get("skip") != "none")
    assert syncs == count_syncs(lambda: all_of(call(api, path, c, **o), c, path))


@pytest.mark.parametrize("path", ["labels", "linear"])
def test_float16_keeps_the_gradient_of_small_classes(api, path):
    z = leaf([[0, -16.625]], dtype=HALF)  # p = 6e-8, float16's smallest number
    dz = gradients(through(api, path, z, tensor([0])), z, upstream=2.0**16)[0]  # GradScaler's
    close(dz[:, 1], [exp(-16.625) * 2**16], rel=2**-7)


LINEAR_WAYS = pytest.mark.parametrize("path, o", [  # one number, or an upstream for each token
    ("linear", {}), ("linear", dict(reduction="none")), ("distillation", {}),
    ("linear_log_probs", {})])


@LINEAR_WAYS
def test_autocast(api, path, o):
    results = outcome(api, path, make_case(), f=torch.autocast(DEVICE, BFLOAT)(call), **o)
    assert all(x.dtype in (FLOAT, torch.bool) and x.isfinite().all() for x in results.values())
    for name, x in outputs(call(api, path, make_case(BFLOAT), **o)).items():
        if api is masked_ce or DEVICE == "cuda" or name == "correct":
            assert torch.equal(results[name], x)
        else:  # the interpreter truncates to bfloat16
            close(results[name], x.double(), 2.0**-6)
    wide = next(iter(outputs(call(api, path, make_case(), **o)).values()))
    assert not torch.equal(next(iter(results.values())), wide)


@LINEAR_WAYS
def test_more_kept_than_max_kept_is_loud(api, path, o):
    c = make_case()
    for size in (None, 2):
        for name, x in outcome(api, path, c, max_kept=5, chunk_size=size, **o).items():
            if x.shape[:2] == c.keep.shape:
                assert not x[~c.keep].any()
                x = x[c.keep]
            assert not x.any() if name == "correct" else x.isnan().all()


# --------------------------------------------------------------------------------------- bad input
CE, DIST, LINEAR, KD, LP, LLP = (
    "masked_cross_entropy", "masked_cross_entropy_from_distribution", "masked_linear_cross_entropy",
    "masked_linear_distillation", "masked_log_probs", "masked_linear_log_probs")
Z, H1 = [[0.0, 0, 0], [0, 0, 0]], [[0.0], [0], [0]]  # lists become tensors
GOOD = {CE: dict(logits=Z, target=[0, 1]), DIST: dict(logits=Z, target=Z),
        LP: dict(logits=Z, target=[0, 1]), LLP: dict(hidden=Z, linear_weight=Z, target=[0, 1]),
        LINEAR: dict(hidden=Z, linear_weight=Z, target=[0, 1]),
        KD: dict(hidden=Z, linear_weight=Z, teacher_hidden=Z, teacher_weight=Z)}
BAD = {  # argument -> bad values; the message names the argument, then a number or a word itself
    (TypeError, CE): dict(logits=[None, [[0, 0]], torch.eye(2, device=DEVICE).to_sparse()],
                          target=[[0.0, 1]], loss_mask=[[1 + 1j, 0]], cu_seqlens=[[0.0, 2]],
                          temperature=[None], vocab_size=[2.0], ignore_index=[1.5],
                          vocab_group=["world"]),
    (TypeError, LINEAR): dict(chunk_size=[2.0, True], max_kept=[2.0],
                              linear_bias=[tensor([0, 0], dtype=DOUBLE)]),
    (TypeError, LLP): dict(hidden=[None], linear_weight=[None, tensor(Z, dtype=DOUBLE)]),
    (ValueError, CE): dict(
        target=[[0], [[[0], [1]]]], reduction=["avg"], loss_mask=[leaf([1, 1]), [[1], [1]]],
        num_items=[-1, nan, [1, 2], leaf([1.0])], cu_seqlens=[[2]], softcap=[0.0],
        temperature=[-1.0], z_loss=[-1], label_smoothing=[1.5], vocab_size=[0, 4]),
    (ValueError, LP): dict(target=[[0]], loss_mask=[[1]], softcap=[-1.0], vocab_size=[4]),
    (ValueError, DIST): dict(target=[H1], target_format=["labels"], divergence=["js"],
                             vocab_size=[4]),
    (ValueError, LINEAR): dict(
        linear_weight=[H1, torch.ones(0, 3, device=DEVICE)], linear_bias=[[0.0]], skip=["some"],
        chunk_size=[0], max_kept=[-1], vocab_size=[3], logits_dtype=[DOUBLE]),
    (ValueError, LLP): dict(linear_weight=[H1], target=[[0]], skip=["all"], logits_dtype=[HALF]),
    (ValueError, KD): dict(teacher_weight=[H1], teacher_hidden=[H1], teacher_bias=[[0.0]])}


@pytest.mark.parametrize("error, f, change, says", [
    *((error, f, {name: x}, name[-4:] + (".*" + repr(x)) * (type(x) in (int, float, str)))
      for (error, f), arguments in BAD.items() for name in arguments for x in arguments[name]),
    *((ValueError, f, {name: torch.ones_like(tensor(GOOD[f][name]), device="meta")},
       f"{name}.*on {DEVICE}.*meta") for f in GOOD for name in [*GOOD[f]][1:]),  # two devices
    (ValueError, CE, dict(num_items=2, reduction="sum"), "num_items=2"),
    (TypeError, CE, dict(softcap={}), "softcap.*{}"),  # what has no hash
    (TypeError, LINEAR, dict(loss_mask=(1, 1)), r"loss_mask.*\(1, 1\)"),
    (TypeError, LINEAR, dict(chunk_size=2.0), "chunk_size must be an integer"),
    (ValueError, LINEAR, dict(max_kept=1, skip="none"), "max_kept=1"),
    (ValueError, CE, dict(logits=[Z[:1]] * 2, target=[[0], [1]], loss_mask=[1, 0]),  # fault 19
     r"\(2, 1\).*\(2,\)"),
    *(("data", *row) for row in (  # on a GPU NaN, because a look would synchronise
        *((f, dict(target=[0, 3]), "label 3 at token 1") for f in (CE, LP)),
        *((f, dict(target=[-1, 0]), "label -1 at token 0") for f in (CE, LP)),
        *((f, dict(target=[0, 2]), "label 2 at token 1") for f in (LINEAR, LLP)),
        *((f, dict(target=[[0, 1], [1, 7]]), "label 7 at token 1") for f in (CE, LP, LINEAR)),
        *((f, dict(target=[0, 2], vocab_size=2), "label 2 at token 1") for f in (CE, LP)),
        (DIST, dict(loss_mask=[0.5, -1.0], reduction="sample_mean"), "-1.0 at token 1"),
        (CE, dict(loss_mask=[inf, 1.0]), "weights.*inf at token 0"),
        (LINEAR, dict(loss_mask=[0.5, nan]), "weights.*nan at token 1"),
        (KD, dict(cu_seqlens=[0, 3], reduction="sample_mean"), "from 0 to the 2 .*position 1"),
        (CE, dict(cu_seqlens=[0, 2, 1, 2], reduction="sample_mean"), "position 2"),
        (CE, dict(num_items=tensor(-1.0)), "num_items=-1.0"),
        *((DIST, dict(target=[[0.5, 0.5, 0], [2, -0.5, 0]], divergence=x), "row 1 .*-0.5.*log-prob")
          for x in ("cross_entropy", "forward_kl", "reverse_kl"))))])  # fault 30
def test_bad_input(api, error, f, change, says):
    o = {k: tensor(x) if isinstance(x, list) else x for k, x in (GOOD[f] | change).items()}
    if error == "data" and DEVICE == "cuda":
        result = getattr(api, f)(**o)
        return close(result if f != LP and f != LLP else result.log_prob.sum(), nan)
    with pytest.raises(ValueError if error == "data" else error, match=says):
        getattr(api, f)(**o)


@pytest.fixture
def one_rank(tmp_path):
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(f"{tmp_path}/store", 1), rank=0,
                            world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_dtensor_is_named_with_the_cure(api, one_rank):
    mesh = DeviceMesh(DEVICE, [0])
    for f, good in GOOD.items():
        o = {name: tensor(x) for name, x in good.items()}
        for name, x in o.items():
            with pytest.raises(TypeError, match=f"{name} is a DTensor.*{name}.to_local"):
                getattr(api, f)(**o | {name: distribute_tensor(x, mesh, [Replicate()])})


def test_a_vocabulary_group_of_one_rank(api, one_rank):
    r = SimpleNamespace(rank=0, world=1, group=one_rank)
    for path in ("labels", "teacher", "log_probs", "linear", "linear_log_probs"):
        check(api, path, make_case(), r)


@pytest.mark.parametrize("path, o", VALUES)
def test_meta_and_fake_tensors(api, path, o):
    """Shapes and dtypes of results and gradients without a value."""
    c, o = case_of(o, BFLOAT, (2, 2))
    real, fake = all_of(call(masked_ce, path, c, **o), c, path), FakeTensorMode()
    for mode, convert in ((torch.enable_grad(), lambda x: x.to("meta")), (fake, fake.from_tensor)):
        copies = SimpleNamespace(**{name: convert(x.detach()).requires_grad_(x.requires_grad)
                                    for name, x in vars(c).items()})
        with mode:
            results = all_of(call(api, path, copies, **o), copies, path)
        for x, y in zip(results, real, strict=True):
            assert (x.shape, x.dtype, x.requires_grad) == (y.shape, y.dtype, y.requires_grad)
            assert x.device == copies.target.device


def test_public_names(api, triton_api):
    assert sorted(api.__all__) == sorted(masked_ce.__all__)
    for name in masked_ce.__all__:
        ours, reference = getattr(api, name), getattr(masked_ce, name)
        assert inspect.signature(ours) == inspect.signature(reference)
        assert ours.__doc__ and ours.__name__ == name
        assert pickle.loads(pickle.dumps(ours)) == ours
    log_probs = api.masked_log_probs(torch.zeros(1, 2, device=DEVICE), tensor([1]))
    assert isinstance(log_probs, masked_ce.LogProbs)
    same(pickle.loads(pickle.dumps(log_probs)), log_probs)


# --------------------------------------------------------------------------------- torch.compile
def compiled_steps(f, path, cases):
    """Each case's call of f, compiled, gives eager's results and gradients. -> the graphs that were
    made; and the custom operations that they call, with arguments."""
    graphs, calls = [], {}

    class Recorder(torch.fx.Interpreter):
        def call_function(self, op, args, kwargs):
            calls.update({op: args} if "masked_ce" in str(op) else {})
            return super().call_function(op, args, kwargs)

    torch._dynamo.reset()
    record = aot_autograd(
        fw_compiler=lambda graph, _: graphs.append(graph) or Recorder(graph).run)
    compiled = torch.compile(f, fullgraph=True, backend=record)
    for case in cases:
        close(step(compiled, path, *case), step(f, path, *case), 1e-5)
    return graphs, calls


def step(f, path, c, *arguments):
    return tuple(x.detach().to(FLOAT) for x in all_of(f(c, *arguments), c, path))


NO_SYNC = [*((path, {}) for path in GIVEN_LOGITS if path != "probabilities"),
           ("probabilities", dict(reduction="none")), ("linear", dict(max_kept=9)),
           ("linear", dict(skip="none", chunk_size=3, reduction="none")),
           ("distillation", dict(max_kept=9)),
           ("linear_log_probs", dict(recompute=True, max_kept=9, K=2))]
ONE_SYNC = [("linear", {})]


@pytest.mark.parametrize("path, o", NO_SYNC + ONE_SYNC)
def test_compiled(api, path, o):
    """In one graph, of any number of tokens, eager's numbers, in a loss that may be changed."""
    def twice(c):
        result = call(api, path, c, **o)
        if path in LOSSES:
            result *= 2
        return result

    o, K = {name: x for name, x in o.items() if name != "K"}, o.get("K")
    cases = [[make_case(FLOAT, (n,), K=K)] for n in (3, 4)]
    if api is masked_ce and (path, o) in ONE_SYNC:
        with pytest.raises(Exception, match="max_kept"):  # names the cure
            compiled_steps(twice, path, cases)
        return
    graphs, calls = compiled_steps(twice, path, cases)
    assert len(graphs) == 4  # forward and backward, of 3 tokens and of any number
    assert calls or api is masked_ce
    for op, args in calls.items():
        wanted = 0 if re.search("gradient|backward", str(op)) else 3  # nobody differentiates those
        # aot_dispatch is what was compiled above; whole, it is slow, and runs for two paths
        some = {} if (path, o) in (ONE_SYNC[0], NO_SYNC[0]) else dict(
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))
        torch.library.opcheck(op, [x.detach().requires_grad_(i < wanted) if isinstance(
            x, torch.Tensor) else x for i, x in enumerate(args)], **some)
    if DEVICE == "cuda":
        torch._dynamo.reset()
        compiled = torch.compile(twice, fullgraph=True)
        close(step(compiled, path, *cases[0]), step(twice, path, *cases[0]), 1e-5)


ANNEALED = "num_items temperature softcap z_loss label_smoothing".split()


@pytest.mark.parametrize("path", LOSS_ONLY)
def test_annealed_options_do_not_recompile(api, path):
    def loss(c, *values):
        o = dict(max_kept=9) if path == "linear" else {}
        return call(api, path, c, **dict(zip(ANNEALED, values)), **o)

    cases = [(make_case(shape=(3,)), *(0.1 + i / 9 + n / 30 for i in range(5))) for n in range(4)]
    graphs, _ = compiled_steps(loss, path, cases)
    assert len(graphs) <= 6  # of given numbers, and of any


# ------------------------------------------------------------------------ the Triton file by itself
def test_two_copies_do_not_mix(triton_api, tmp_path, monkeypatch):
    (tmp_path / "a_package").mkdir()
    for module in (masked_ce, triton_api):
        shutil.copy(module.__file__, tmp_path / "a_package")
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module("a_package.masked_ce_triton")
    ops = []
    for module in (triton_api, other):
        loss = functools.partial(call, module, "labels")
        _, calls = compiled_steps(loss, "labels", [[make_case(shape=(3,))]])
        again = pickle.loads(pickle.dumps(module.masked_cross_entropy))
        assert again is module.masked_cross_entropy
        ops.append(set(calls))
    assert all(ops) and not ops[0] & ops[1]  # each calls its own


@pytest.mark.parametrize("path", PATHS)
def test_the_same_bits_every_run(api, monkeypatch, path):
    """Also where another version of Triton has to launch in the ordinary way."""
    c = make_case(BFLOAT)
    first, second = outcome(api, path, c), outcome(api, path, c)
    same(first, second)
    if api is not masked_ce:
        monkeypatch.setattr(api, "fast_launch", False)
        same(first, outcome(api, path, c))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
class TestGPU:
    def test_cpu_tensors_do_not_fall_back(self, triton_api):
        with pytest.raises(RuntimeError, match="import masked_ce instead"):
            triton_api.masked_cross_entropy(torch.ones(1, 2), torch.tensor([0]))

    @pytest.mark.parametrize("path", ["labels", "linear", "distillation", "log_probs",
                                      "linear_log_probs"])
    def test_cuda_graph_replays_with_another_mask(self, api, path):
        c, o = make_case(BFLOAT), {} if PATHS[path] == ["logits"] else dict(max_kept=9)

        def step():
            return all_of(call(api, path, c, **o), c, path)

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
    cases = [no_rank_waits, vocabulary_parallel, sequence_parallel, wrappers]
    cases += [two_parts] * (world == 2)
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


SPLIT = [path for path in PATHS if path != "distillation"]  # has no vocab_group


def no_rank_waits(r):
    """22: where one rank's call is wrong, or theirs differ, each raises, or each gets NaN. (A rank
    that waited would raise another error after a minute.)"""
    last = r.rank == r.world - 1
    for path in SPLIT:
        def fails(o={}, **change):
            c = make_case(FLOAT, (5,), V=3, H=4)
            vars(c).update((name, x.to(DEVICE)) for name, x in change.items())
            try:
                y = next(iter(outputs(call(r.api, path, c, r, **o)).values()))
                assert r.api is not masked_ce and y.sum().isnan(), y
            except (TypeError, ValueError):
                pass
            dist.barrier()

        wider = make_case(FLOAT, (5,), V=3 + (r.rank == 0), H=4)  # V = 5 as 3 + 2, unsaid
        fails(**{name: getattr(wider, name).detach() for name in CUT})
        fails(dict(vocab_size=3 * r.world + 5))
        fails(dict(softcap=-1.0) if last else {})
        narrow = make_case(DOUBLE if last else FLOAT, (5,), V=3, H=4)
        fails(**{name: getattr(narrow, name).detach() for name in (*CUT, "hidden")})
        if path not in DISTRIBUTIONS:
            fails(target=tensor([-7 if last else 0, 1, 0, 1, 0]))


def vocabulary_parallel(r):
    two = r.world == 2  # in 4 ranks less, to save time: shards that merge twice, or hold nothing
    for path, o in VALUES:
        once = two and not {"chunk_size", "unmasked"} & {*o}  # chunks: below, by strategies
        if path in SPLIT and (once or "padding" in o):
            check_value(r.api, path, o, DOUBLE, (2, 2), 12, 5, r=r)
    some = r"2 offset|3|6 close|7.*|11.*|22|29.*nan|dead.*" if two else r"11.*|22|dead 0"
    for name in filter(re.compile(some).fullmatch, FAULTS):
        paths, z, _, o, *_ = FAULTS[name]
        for path in paths:
            whole = path == "distillation" or "linear" in path and len(z) > 1  # see `through`
            even = torch.tensor(z).shape[-1] % r.world == 0 or "vocab_size" in o
            if even and not whole:
                test_faults(r.api, path, name, r)
    test_linear_faults(r.api, "linear", "12", {}, r)
    for path, case in product(["log_probs", "linear_log_probs"], ENTROPIES[::2 if two else 4]):
        test_entropies(r.api, path, *case, r)
    if two:
        c, first = make_case(DOUBLE, (2, 2), V=12, H=5), r.rank == 0
        if r.api is not masked_ce:
            compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
            check(r.api, "labels", c, r, f=compiled)
            check(r.api, "linear", c, r, f=compiled, max_kept=9)
        for path, empty in [*product(["labels"], EMPTY), ("probabilities", "ignored"),
                            ("linear", "ignored")]:
            test_fault_13_nothing_kept(r.api, path, None, empty, r)
        for strategy, reduction in product(STRATEGIES[2:7], ("mean", "none")):
            for wanted in ((True, first, not first), (False, first, first)):  # frozen on some ranks
                check(r.api, "linear", c, r, wanted, reduction=reduction, **strategy)


def two_parts(r):
    """Faults 10 and 15: samples, and packed samples cut at a token."""
    names = "10", "15 mean", "15 sample_mean", "15 mean [0, 5, 6]", "15 sample_mean [0, 5, 6]"
    for name, path in product(names, ("labels", "linear", "probabilities")):
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
    # bad values on one rank: it raises after the sums over ranks, or gets NaN; none waits
    ones, cu, first = torch.ones(3, device=DEVICE), tensor([0, 3]), int(r.rank == 0)
    for keep, cu in ((ones - 3 * first, None), (ones, cu - first)):
        try:
            w = r.api.token_weights(keep, "sample_mean", cu_seqlens=cu, process_group=r.group)
            assert w.isnan().any().item() == first
        except ValueError:
            assert first


# --------------------------------------------------------------------------- README, word for word
README = Path(masked_ce.__file__).with_name("README.md").read_text()
BLOCKS = dict(re.findall(r"<!-- block: (\w+)[^\n]*\n```python\n(.*?)```", README, re.DOTALL))
TOKENS = (torch.arange(24, device=DEVICE) * 7 % 11).view(4, 6)  # of 4 samples
LABELS = (TOKENS * 3 % 11).masked_fill(TOKENS % 3 == 0, IGN)
LABELS[2:] = IGN  # the later ranks keep nothing


def block(name, api, **names):
    """Runs a block of README.md with the names that it takes for granted. -> its names."""
    exec(compile(BLOCKS[name], f"README.md, {name}", "exec"), names := vars(api) | names)
    return names


def found(pattern):  # the code in README that this matches
    return re.search(pattern, README)[1]


def test_readme_and_docstrings(api):
    assert doctest.testmod(masked_ce).failed == 0 < doctest.testmod(masked_ce).attempted
    assert " ".join(sorted(BLOCKS)) == (
        "accumulation linear metrics models policy samples sequence several start")
    assert README.count("```python") == len(BLOCKS)
    functions = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert sorted([*functions, "LogProbs"]) == sorted(masked_ce.__all__)
    names = block("start", masked_ce)
    close(names["loss"], 0.4076059644)
    close(names["logits"].grad, [[0.0900305732, 0.2447284711, -0.3347590442], [0, 0, 0]], 1e-6)
    # accumulation: uneven micro-batches
    model = torch.nn.Embedding(11, 11, device=DEVICE, dtype=DOUBLE)
    loader = [list(zip(TOKENS.split([1, 2, 1]), LABELS.split([1, 2, 1])))]
    block("accumulation", api, model=model, loader=loader, optimizer=Mock())
    right = F.cross_entropy(model(TOKENS).flatten(0, 1), LABELS.flatten())
    close(model.weight.grad, *gradients(right, model.weight), 4e-12)
    # linear: the four lines agree, and read the device as often as they say
    hidden, weight = (torch.randn(*x, 4, device=DEVICE, dtype=DOUBLE) for x in ((4, 6), (11,)))
    names = vars(api) | dict(
        F=F, torch=torch, logits=(z := F.linear(hidden, weight)), teacher=torch.randn_like(z),
        labels=LABELS, ids=LABELS.clamp(min=0), mask=LABELS != IGN, hidden=hidden, weight=weight,
        advantage=torch.linspace(-1, 1, 6, device=DEVICE), c=torch.rand(11).to(z) + 0.5,
        T=torch.rand(4, 6).to(z) + 0.5, token_loss=F.cross_entropy(z.mT, LABELS, reduction="none"))
    for line in BLOCKS["linear"].splitlines():
        assert count_syncs(lambda: exec(line, names)) == int(re.search(r"# (\d)", line)[1])
        close(names.pop("loss"), F.cross_entropy(z.mT, LABELS).item())
    # instead of this, write that; the last row is of TRL, which requirements.txt does not name
    rows = re.findall(r"^\| `([^`]+)`[^|]*\| `(masked_[^`]+)`[^|]*\|$", README, re.MULTILINE)
    assert len(rows) == 8
    if trl := importlib.util.find_spec("trl"):
        names |= vars(importlib.import_module("trl.trainer.utils"))
    for instead_of_this, write_that in rows if trl else rows[:-1]:
        close(eval(write_that, names), eval(instead_of_this, names), 1e-6)
    # 27: a masked advantage of NaN
    names |= dict(labels=tensor([0, 1, 0]), mask=tensor([True, True, False]),
                  logits=leaf([[0, 1], [2, 0], [0, 0]]), advantage=tensor([-2, 3, nan]))
    loss = eval(found(r"`(masked_cross_entropy\([^`]*advantage[^`]*)`"), names)
    close(loss, 3.7542606581, 1e-6)
    assert gradients(loss, names["logits"])[0].isfinite().all()


def test_readme_log_probs(api):
    """Each loss against the formula that it stands for. What is masked holds NaN."""
    n, V, count, cuts = 9, 13, 20, [0, 2, 2, 5, 9]  # the second sample has no token
    randn = functools.partial(torch.randn, dtype=DOUBLE, device=DEVICE)
    hidden, weight = randn(n, 5).requires_grad_(), randn(V, 5).requires_grad_()
    keep = tensor([1, 1, 1, 1, 0, 1, 1, 0, 0]) > 0
    labels, hidden.data[~keep] = (torch.arange(n, device=DEVICE) * 5 % V).where(keep, IGN), nan
    old, ref, advantage = randn(3, n).where(keep, nan) - 2
    top, ids = randn(n, V).log_softmax(1).topk(3)
    names = dict(
        torch=torch, F=F, math=math, hidden=hidden, weight=weight, labels=labels, keep=keep,
        cu_seqlens=tensor(cuts), beta=0.1, num_items=count, text_bytes=40,
        old_log_prob=old, ref_log_prob=ref, advantage=advantage, sample_advantage=randn(4),
        top_log_probs=top.where(keep[:, None], nan), top_ids=ids.where(keep[:, None], 10**6))
    for recipe in ("policy", "samples", "metrics", "several"):
        names = block(recipe, api, **names)
    log_p = F.linear(hidden[keep], weight).log_softmax(1)
    y, old, ref, advantage = (x[keep] for x in (labels, old, ref, advantage))
    parts = torch.arange(len(y)).split([2, 0, 2, 2])  # what each sample keeps
    lp, q, p = log_p.gather(1, y[:, None])[:, 0], top[keep].exp(), log_p.gather(1, ids[keep])
    entropy = -(log_p.exp() * log_p).sum(1)

    def surrogate(log_ratio, gain):
        return -torch.min(log_ratio.exp() * gain, log_ratio.exp().clamp(0.8, 1.2) * gain)

    each = surrogate(lp - old, advantage) - 0.01 * entropy
    each = each + 0.1 * ((ref - lp).exp() - 1 - (ref - lp))
    log_ratios = torch.stack([(lp - old)[i].sum() / max(len(i), 1) for i in parts])
    rest = 1 - q.sum(1)
    a, b, c, d = (0.1 * (lp - ref)[i].sum() for i in parts)
    right = dict(
        ppo=sum(each[i].mean() for i in parts if len(i)) / 3,
        gspo=surrogate(log_ratios, names["sample_advantage"]).mean(),
        dpo=-((a - c).sigmoid().log() + (b - d).sigmoid().log()) / 2, loss=-lp.sum() / count,
        accuracy=(log_p.argmax(1) == y).sum() / count, entropy=entropy.detach().sum() / count,
        bits_per_byte=-lp.detach().sum() / log(2) / 40, top_k=-(q * p).sum() / count,
        top_k_and_rest=-(q * p).sum() / count - (rest * (1 - p.exp().sum(1)).log()).sum() / count,
        multi_token=-(lp.sum() + sum(log_p[i[:-1], y[i[1:]]].sum() for i in parts)) / 9)
    for name, value in right.items():
        close(names[name], value.item(), 2e-6)
    totals = (sum(k * losses[name] for k, name in enumerate(right, 1)) for losses in (names, right))
    close(*(gradients(total, hidden, weight) for total in totals), 1e-5)


class Toy(torch.nn.Module):  # all that README's lean way asks of a model
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([torch.nn.Embedding(11, 6)])
        self.lm_head = torch.nn.Linear(6, 11, bias=False)

    def base_model(self, input_ids, attention_mask):
        return SimpleNamespace(last_hidden_state=self.layers[0](input_ids))

    def get_output_embeddings(self):
        return self.lm_head


def tiny(name, **config):
    """A model of transformers, made from a config: no download."""
    hf = pytest.importorskip("transformers", reason="README's recipes for its models need it")
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                 num_attention_heads=2, num_key_value_heads=2, head_dim=4, initializer_range=0.5,
                 pad_token_id=0, bos_token_id=1, eos_token_id=2, experts_implementation="eager")
    torch.manual_seed(0)
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**sizes | config))
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    return model.to(DEVICE, DOUBLE)


def both_ways(api, model, **options):
    """-> models that make their loss in README's safe way and in its lean one."""
    safe, lean = copy.deepcopy(model), copy.deepcopy(model)
    base = block("models", api, model=safe)["LinearLoss"]
    lean.__class__ = type(f"Linear{type(lean).__name__}", (base, type(lean)), {})
    lean.loss_options = options
    return safe, lean


@pytest.mark.parametrize("name, config, lora", [
    ("Llama", dict(tie_word_embeddings=True), False), ("Granite", dict(logits_scaling=8.0), False),
    ("Cohere", dict(logit_scale=1 / 16), True), ("Gemma2", dict(final_logit_softcapping=2.0), True),
    ("Phi", {}, True), ("Mixtral", dict(output_router_logits=True), False)])
def test_readme_models(api, monkeypatch, name, config, lora):
    """The loss and the gradients of the model's own loss, in float64 and under autocast."""
    model, options = tiny(name, **config), {}
    if name in ("Granite", "Cohere", "Gemma2"):
        options = found(rf"\({name.replace('2', ' 2')}\) \| `([^`]+)`")
        options = eval(f"dict({options})", dict(model=model))
    if name == "Mixtral":
        term, end = found(r"before the return: `(.*?)`"), "        return dict"
        code = BLOCKS["models"].replace(end, f"        {term}\n{end}")
        monkeypatch.setitem(BLOCKS, "models", code)
        f = importlib.import_module(type(model).__module__).load_balancing_loss_func
        monkeypatch.setattr(api, f.__name__, f, raising=False)
    models, results = (model, *both_ways(api, model, **options)), []
    if lora:
        peft = pytest.importorskip("peft", reason="README's recipe for LoRA needs it")
        lora = peft.LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        models = [peft.get_peft_model(model, lora) for model in models]
        for other in models[1:]:
            other.load_state_dict(models[0].state_dict())
    inputs = dict(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS), labels=LABELS,
                  num_items_in_batch=20)
    for dtype, model in product((DOUBLE, FLOAT), models):
        with torch.autocast(DEVICE, BFLOAT, enabled=dtype == FLOAT):
            loss = model.to(dtype)(**inputs)["loss"]
        learn = [p for p in model.parameters() if p.requires_grad]
        results.append([loss.detach(), *gradients(loss, *learn)])
    for oracle, safe, lean, eager, *others in zip(*results, strict=True):
        close((safe, lean), (oracle, oracle), 1e-6)  # the models make their own loss in float32
        for other in others:
            within(other.bfloat16(), oracle.double(), eager)
    for switch in ("disable_adapter_layers", "merge_adapter") if lora else ():
        for model in models:
            getattr(model.base_model, switch)()
        right, *others = (model(**inputs)["loss"].detach() for model in models)
        close(torch.stack(others), right.expand(2), 1e-5)
        for model in models:
            model.base_model.enable_adapter_layers()


def test_readme_trainers(api, tmp_path):
    """A step of uneven micro-batches, some of them empty. TRL packs documents into a row."""
    hf = pytest.importorskip("transformers", reason="README's recipe for Trainer needs it")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs it")
    before = tiny("Llama")
    models = before, *both_ways(api, before)
    data = [dict(input_ids=x, labels=y) for x, y in zip(TOKENS.tolist(), LABELS.tolist())]

    def check_step(trainers, arguments, **names):
        arguments = arguments(
            output_dir=tmp_path, max_steps=1, per_device_train_batch_size=1, learning_rate=1.0,
            gradient_accumulation_steps=4, optim="sgd", max_grad_norm=0, bf16=False, report_to=[],
            use_cpu=DEVICE == "cpu")
        trained = [copy.deepcopy(model) for model in models]
        for trainer, model in zip(trainers, trained):
            trainer(model, arguments, **names).train()
        for p, right, *others in zip(*(m.parameters() for m in (before, *trained)), strict=True):
            assert not torch.equal(right, p)
            for other in others:
                close((other - p).detach(), (right - p).detach(), 1e-6)

    check_step(3 * [hf.Trainer], hf.TrainingArguments, train_dataset=data)
    if importlib.util.find_spec("trl"):
        import datasets, tokenizers, trl
        exec(found(r"`(class \w+\(SFTTrainer\)[^`]+)`"), names := dict(
            Trainer=hf.Trainer, SFTTrainer=trl.SFTTrainer))
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"0": 0}, "0"))
        check_step([trl.SFTTrainer, names["Tuner"], names["Tuner"]],
                   functools.partial(trl.SFTConfig, packing=True, max_length=13),
                   train_dataset=datasets.Dataset.from_list(9 * data),
                   processing_class=hf.PreTrainedTokenizerFast(
                       tokenizer_object=words, pad_token="0", eos_token="0"))


def wrappers(r):
    """README's lean way inside DDP and FSDP2: the gradients of one process with all tokens."""
    llama = r.world == 2 and importlib.util.find_spec("transformers")
    shifted = masked_ce.shift_labels(LABELS)
    num_items = r.api.count_items(part(r, shifted) != IGN, process_group=r.group)
    models = [Toy(), tiny("Llama")] if llama else [Toy()]
    for plain, wrapper in product(models, ("DDP", DOUBLE, BFLOAT)[: 3 if r.world == 2 else 1]):
        plain = plain.to(DEVICE, BFLOAT).double()  # numbers that bfloat16 has
        model, right, eager = (both_ways(r.api, plain)[1] for _ in range(3))
        if wrapper == "DDP":
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(wrapper, torch.promote_types(wrapper, FLOAT))
            for module in (*getattr(model, "model", model).layers, model):
                wrapped = fully_shard(module, mp_policy=policy)
        inputs = dict(labels=part(r, LABELS), num_items_in_batch=num_items)
        (wrapped(part(r, TOKENS), **inputs)["loss"] * r.world).backward()
        for single in (right, eager.bfloat16()):
            single(TOKENS, labels=LABELS)["loss"].backward()
        for p, *single in zip(*(m.parameters() for m in (model, right, eager)), strict=True):
            grad = p.grad if wrapper == "DDP" else p.grad.full_tensor()
            if wrapper == BFLOAT:
                within(grad.bfloat16(), *(x.grad for x in single))
            else:
                close(grad, single[0].grad, 1e-6)
    # the head alone, gathered by hand
    head = Toy().to(DEVICE, DOUBLE).lm_head
    hidden = F.one_hot(TOKENS, 11)[..., :6].to(DOUBLE)
    right = masked_ce.masked_linear_cross_entropy(hidden, head.weight, shifted)
    right = gradients(right, head.weight)
    weight = eval("weight." + found(r"`(full_tensor\(grad_placements=[^`]+)`"),
                  dict(weight=fully_shard(head).weight, Partial=Partial))
    loss = r.api.masked_linear_cross_entropy(
        part(r, hidden), weight, part(r, shifted), num_items=num_items)
    (loss * r.world).backward()
    close(head.weight.grad.full_tensor(), *right, 1e-6)


def sequence_parallel(r):
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
