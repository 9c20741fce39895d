"""The lesson: what goes wrong in a masked loss, what is right, and what it costs. All computed.

    python demo.py                       every chapter, half a minute on two CPU cores or one GPU
    python demo.py nan chunks            some of them; --help lists them
    python demo.py --export lesson.svg   a picture of nan and chunks, or of the chapters named

A chapter's docstring asks, its body experiments, and what it returns is the answer. A check passes
if error <= 2 * (eager's error + eps), both over max|oracle| of their row; a count's budget is 0.
"""
import argparse
import ast
import os
import pkgutil
import re
import sys
import warnings
from collections import namedtuple
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("TRITON_INTERPRET", str(int(DEVICE == "cpu")))  # before triton is imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers would take seconds to stop

import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text  # for code: elsewhere rich would take z[mask] for markup
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

import masked_ce as reference

CHAPTERS = "data nan partition samples chunks logprobs distribution triton speed".split()
CUT, IGNORE, INF = 1024, -100, torch.inf
Sample = namedtuple("Sample", "prompt answer")  # a function without its docstring; the docstring
verdicts, console = [], Console(record=True, highlight=False)
say = console.print


@cache
def corpus():
    """Every documented function in the standard library's top-level modules, shuffled."""
    found = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        for node in ast.walk(ast.parse("\n".join(lines))):
            text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if text and node.body[0].lineno > node.lineno:
                first, last = node.body[0].lineno - 1, node.body[0].end_lineno
                code = lines[node.lineno - 1:first] + lines[last:node.end_lineno] + ['"""']
                found.append(Sample("\n".join(code), text + '"""'))
    return [found[i] for i in torch.randperm(len(found)).tolist()]


def byte_tensor(texts):
    return torch.tensor(list("".join(texts).encode()), device=DEVICE)


def encode(sample, cut=None):  # -> tokens; labels: the next token, IGNORE where that is prompt
    tokens = byte_tensor(sample)[:cut]
    is_prompt = torch.arange(len(tokens), device=DEVICE) < len(sample.prompt.encode())
    return tokens, reference.shift_labels(tokens.masked_fill(is_prompt, IGNORE))


def eager(*args):  # of (logits, labels), or of (hidden, weight, labels)
    z = F.linear(*args[:2]) if len(args) == 3 else args[0]
    return F.cross_entropy(z.to(torch.promote_types(z.dtype, torch.float32)), args[-1])


def gradients(loss_fn, *leaves, dtype=None):  # -> the loss, and its gradient for each leaf
    leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in leaves]
    loss = loss_fn(*leaves)
    loss.backward()
    return (loss.detach(), *(x.grad for x in leaves))


def compare(loss_fn, plain, *leaves):
    # -> error and budget of the worst tensor: the loss or a gradient, beside `plain` in float64.
    # Both relative to their row's largest number: else a row of small gradients could be all wrong.
    pairs = []
    for got, same, oracle in zip(gradients(loss_fn, *leaves), gradients(plain, *leaves),
                                 gradients(plain, *leaves, dtype=torch.float64), strict=True):
        eps, rows = torch.finfo(got.dtype).eps, oracle.shape[0] if oracle.dim() > 1 else 1
        got, same, oracle = (x.double().reshape(rows, -1) for x in (got, same, oracle))
        size = oracle.abs().amax(1, keepdim=True).clamp(min=1e-300)
        error, eager_error = (((x - oracle) / size).abs().max().item() for x in (got, same))
        pairs.append((error, 2 * (eager_error + eps)))
    return pairs[torch.tensor([error / budget for error, budget in pairs]).argmax()]  # NaN wins


def table(*columns):  # numbers to the right; a name that begins with < is of a column of text
    made = [Column(c.lstrip("<"), justify="left" if c[:1] == "<" else "right") for c in columns]
    return Table(*made, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def number(x):
    return "[bold red]NaN[/]" if x.isnan() else f"{x:.3f}"


def nan_row(code, *tensors):  # of a table: the largest number of each, and whether one is NaN
    largest = [x.abs().max() for x in tensors]
    return Text(code), *map(number, largest), "[red]✗" if sum(largest).isnan() else "[green]✓"


closing = table("<check", "error", "budget", "")


def check(name, error, budget=0.0):
    verdicts.append(float(error) <= float(budget))  # NaN never passes
    mark = "[green]✓" if verdicts[-1] else "[bold red]✗"
    closing.add_row(f"  {name}", f"{error:.1e}", f"{budget:.1e}", mark)
    return mark


def syncs_and_peak(step):  # -> how often the host waited, and the most bytes held at once
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
            torch.cuda.set_sync_debug_mode("default")
        syncs = sum("called a synchronizing" in str(w.message) for w in caught)
        return syncs, torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    held = torch.tensor([e.nbytes() for e in events if e.name() == "[memory]"]).cumsum(0)
    syncs = sum(e.name() in ("aten::nonzero", "aten::_local_scalar_dense") for e in events)
    return syncs, held.max().item()


@cache
def triton_file():  # -> masked_ce_triton; or None, and why its kernels do not run here
    try:
        import masked_ce_triton as fast
        fast.masked_cross_entropy(torch.zeros(1, 2, device=DEVICE), byte_tensor("\0"))
        return fast, ""
    except ImportError as error:
        return None, escape(f"Not run: {error} (pip install -r requirements.txt).")
    except RuntimeError as error:
        if DEVICE == "cuda":
            raise  # a fault; on a CPU the interpreter does not fit NumPy, and it says what does
        return None, escape(f"Not run: {error}")


def data():
    """What should a fine-tuned model learn from, and what should it only read?"""
    s = next(s for s in corpus() if len(s.prompt) < 300 and s.answer.count("\n") == 2)
    say(Text.assemble((s.prompt, "dim"), (s.answer, "bold yellow"), "\n"))
    lengths = sorted(len(s.answer) - 3 for s in corpus())
    share = sum(lengths) / sum(len(s.prompt + s.answer) for s in corpus())
    say(f"{len(lengths):,} functions of the standard library: the [dim]code is the prompt[/], the "
        f"[bold yellow]docstring the answer[/] of {lengths[0]} to {lengths[-1]:,} characters, half "
        f"under {lengths[len(lengths) // 2]}. Answers are {share:.0%} of all characters:\n\n"
        f"{'░' * round(60 * (1 - share))}[yellow]{'█' * round(60 * share)}")
    spelt = bytes(y for y in encode(s)[1].tolist() if y != IGNORE).decode()
    check("the labels that are kept spell the answer", spelt != s.answer)
    return ("From the answer. The label of token i is token i + 1, and where that is still prompt "
            f"it is {IGNORE}: [bold]masked[/].")


def nan():
    """Where does a masked loss turn into NaN?"""
    empty = [len(s.prompt.encode()) >= CUT for s in corpus()]
    say(f"Cut at {CUT:,} bytes, {sum(empty)} of {len(empty):,} samples keep no label: as many "
        f"empty batches of one, and {sum(map(min, zip(empty[::2], empty[1::2])))} of two.\n")
    ours = reference.masked_linear_cross_entropy

    def run(recipe, h, y, tokens, W):
        # Who masks losses afterwards computes the prompt's too. That takes labels for all tokens:
        # the next token everywhere, before any was replaced by IGNORE.
        unmasked_labels = tokens.roll(-1)
        z, mask = h @ W.T, y != IGNORE
        loss = F.cross_entropy(z, unmasked_labels, reduction="none")
        return recipe(SimpleNamespace(h=h, W=W, y=y, z=z, mask=mask, n=mask.sum(), loss=loss))

    recipes = [
        ("F.cross_entropy(z, y)", lambda c: F.cross_entropy(c.z, c.y)),
        ("(loss * mask).sum() / n", lambda c: (c.loss * c.mask).sum() / c.n),
        ("where(mask, loss, 0).sum() / n", lambda c: torch.where(c.mask, c.loss, 0).sum() / c.n),
        ("F.cross_entropy(h[mask] @ W.T, y[mask])",
         lambda c: F.cross_entropy(c.h[c.mask] @ c.W.T, c.y[c.mask])),
        ("masked_linear_cross_entropy(h, W, y)", lambda c: ours(c.h, c.W, c.y))]
    embedding, weight = (torch.randn(256, 32, device=DEVICE) / k for k in (1, 6))
    prompt, unlabelled = encode(corpus()[empty.index(True)], CUT)
    tokens, labels = encode(corpus()[empty.index(False)], CUT)
    clean, overflow, keep = embedding[prompt], embedding[tokens], labels != IGNORE
    overflow[0] = INF  # in a row of the prompt
    results = table("<z = h @ W.T", "empty:\nloss", "\ngrad", "inf:\nloss", "\ngrad", "")
    for code, recipe in recipes:
        of_empty = gradients(partial(run, recipe, clean, unlabelled, prompt), weight)
        loss, grad = gradients(partial(run, recipe, overflow, labels, tokens), weight)
        if loss.isfinite() and grad.isnan().any():
            lost = (weight - 0.1 * grad).isnan().float().mean()
        results.add_row(*nan_row(code, *of_empty, loss, grad))
    say(results)
    check("no label: all 0", *compare(
        partial(ours, target=unlabelled), lambda h, w: 0 * (h.sum() + w.sum()), clean, weight))
    check("inf in a masked row", *compare(partial(ours, target=labels), lambda h, w: eager(
        h[keep], w, labels[keep]), overflow, weight))
    return ("As soon as a masked token takes part in arithmetic: 0/0 if no token counts, 0 * NaN in"
            f" backward (one step of SGD, and {lost:.0%} of W is NaN behind a finite loss). "
            "[bold]Select rows first[/], and let a sum over none be 0.")


def partition():
    """A batch is split (micro-batches, ranks, chunks). Is the mean of means its mean?"""
    short_first = sorted(corpus()[:100], key=lambda s: len(s.answer))
    parts = [encode(s)[1] for s in short_first[:4] + short_first[-4:]]
    labels, kept = torch.cat(parts), [int((y != IGNORE).sum()) for y in parts]
    z = (byte_tensor(s.prompt for s in corpus()).bincount(minlength=256) + 1.0).log()
    def split(parts, z, num_items=None):
        losses = [reference.masked_cross_entropy(z.expand(len(y), -1), y, num_items=num_items)
                  for y in parts if (y != IGNORE).any()]
        return sum(losses) / (len(losses) if num_items is None else 1)
    whole, count = partial(split, [labels]), reference.count_items(labels != IGNORE)
    right, right_grad = gradients(whole, z)
    results = table("<the same 8 samples", "loss", "off by", "gradient off by")
    for name, loss_fn in (("one batch", whole), ("mean of 8 means", partial(split, parts)),
                          ("mean of 64-token means", partial(split, labels.split(64))),
                          ("8 parts, num_items=count", partial(split, parts, num_items=count))):
        loss, grad = gradients(loss_fn, z)
        off = (grad - right_grad).norm() / right_grad.norm()
        results.add_row(name, f"{loss:.4f}", f"{abs(loss / right - 1):.2%}", f"{off:.2%}")
    say(results)
    check(name, *compare(loss_fn, lambda z: eager(z.expand(len(labels), -1), labels), z))
    return (f"No: in it a token of the shortest answer weighs {max(kept) / min(kept):.0f} times one"
            " of the longest. Divide each [bold]sum[/] by the count over [bold]all[/] parts.")


def samples():
    """Per token or per sample: does the reduction change what a model learns?"""
    context, steps, reductions = 8, 80, ("mean", "sample_mean")
    seeds = range(torch.initial_seed(), torch.initial_seed() + 3)
    by_length = {"under 60": range(63), "60 to 300": range(63, 304),
                 "over 300": range(304, 513)}  # with the three quotes that end an answer
    # For each of an answer's bytes, up to the 512th: the `context` bytes before it, and it.
    answers = [byte_tensor(s).unfold(0, context + 1, 1)[-len(s.answer.encode()):][:512]
               for s in corpus()]
    training = [x for i, x in enumerate(answers) if i % 10]  # every tenth is held out

    def batch(answers):  # -> x (N, context): the bytes before y; y (N,); cu_seqlens of the answers
        cu_seqlens = torch.tensor([0, *map(len, answers)], device=DEVICE).cumsum(0)
        return torch.cat(answers)[:, :-1], torch.cat(answers)[:, -1], cu_seqlens

    def train(reduction, seed):  # the same seed: the same start, the same batches
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(context * 16, 64),
                              nn.ReLU(), nn.Linear(64, 256)).to(DEVICE)
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for ids in torch.randint(len(training), (steps, 16)).tolist():
            x, y, cu_seqlens = batch([training[i] for i in ids])
            loss = reference.masked_cross_entropy(
                model(x), y, reduction=reduction, cu_seqlens=cu_seqlens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            return [F.cross_entropy(model(x), y) for x, y, _ in held_out]

    held_out = [batch([x for x in answers[::10] if len(x) in r]) for r in by_length.values()]
    with Console().status("Six small models learn to write docstrings"):  # ours would record it
        losses = torch.tensor([[train(r, seed) for seed in seeds] for r in reductions])
    _, y, cu_seqlens = batch(answers)
    length = cu_seqlens.diff().repeat_interleave(cu_seqlens.diff())  # of each token's answer
    weights = [reference.token_weights(y >= 0, r, cu_seqlens=cu_seqlens) for r in reductions]
    results = table("<answer's\nbytes", "<weight:\nper token", "<\nper sample",
                    "held out:\nper token", "\nper sample", "\ngap", "\n±")
    for (name, group), (token, sample) in zip(by_length.items(), losses.permute(2, 0, 1)):
        here = (length >= group.start) & (length < group.stop)
        shares, gaps = [w[here].sum().item() for w in weights], token - sample
        results.add_row(name, *(f"{'█' * round(14 * x)} {x:.0%}" for x in shares),
                        *map(number, (token.mean(), sample.mean(), gaps.mean(), gaps.std())))
        if name != "60 to 300":
            better = gaps.mean() if name == "under 60" else -gaps.mean()
            check(f"{name} bytes: spread < gap", gaps.std(), better)
    say(results)
    return ("Yes, each is better where its weight is. Choose [bold]per token[/] if tokens count "
            "alike (pretraining, perplexity), [bold]per sample[/] if answers do (chat, rewards).")


def chunks():
    """How often must the host look at the mask to skip what it hides, and what is computed then?"""
    n, hidden_size, v, chunk = 2048, 64, 2048, 64
    h, w = (torch.randn(k, hidden_size, device=DEVICE) / 2 for k in (n, v))
    y = torch.cat([encode(s)[1] for s in corpus()[:40] if len(s.prompt) < CUT])[:n]
    keep = y != IGNORE
    every, in_chunks = keep | True, keep.view(-1, chunk).any(1).repeat_interleave(chunk)
    kept, some, first = int(keep.sum()), int(in_chunks.sum()), int(keep.nonzero()[0])
    bound = -(-kept // 128) * 128

    def look_at_each(h, w, y):
        losses = [F.cross_entropy(F.linear(h, w), y, reduction="sum")
                  for h, y in zip(h.split(chunk), y.split(chunk)) if (y != IGNORE).any()]  # a sync
        return sum(losses) / (y != IGNORE).sum()

    def again(rows):  # all chunks but the last; chunks are even
        chunks = -(-rows // chunk)
        return (chunks - 1) * -(-rows // chunks)

    ours, inputs = partial(reference.masked_linear_cross_entropy, chunk_size=chunk), (h, w, y)
    cases = [  # what it computes, how many rows that is, how many of them twice, host syncs
        ("F.cross_entropy", eager, inputs, every, n, 0, 0),
        ("look at each chunk", look_at_each, inputs, in_chunks, some, 0, n // chunk),
        ('skip="chunks"', partial(ours, skip="chunks"), inputs, in_chunks, some, again(some), 1),
        ('skip="rows"', ours, inputs, keep, kept, again(kept), 1),
        (f"max_kept={bound}", partial(ours, max_kept=bound), inputs, keep, bound, again(bound), 0),
        ('skip="none"', partial(ours, skip="none"), inputs, every, n, again(n), 0)]
    fast, not_run = triton_file()
    if fast:
        ours = fast.masked_linear_cross_entropy
        # Its interpreter can bear 12 rows, of which 8 are kept, and 256 words.
        few = slice(first - 4, first + 8)
        inputs = h[few], w[:256], y[few]
        of_each = lambda *inputs: ours(*inputs, reduction="none").sum() / 8
        cases += [("Triton chunk_size=4", partial(ours, chunk_size=4), inputs, None, 8, 0, 1),
                  ('  reduction="none"', of_each, inputs, None, 8, 0, 1),
                  ("  recompute=True", partial(ours, recompute=True), inputs, None, 8, 8, 1)]
    results = table("<", "syncs", "rows", "GEMMs", "multiply-adds", "peak,\nfloat32", "")
    strips = ""
    for name, loss_fn, (h, w, y), rows, computed, twice, promised in cases:
        loss_of = lambda h, w: loss_fn(h, w, y)
        same = check(name.strip(), *compare(loss_of, lambda h, w: eager(h, w, y), h, w))
        syncs, peak = syncs_and_peak(partial(gradients, loss_of, h, w))
        leaves = [x.clone().requires_grad_() for x in (h, w)]
        with FlopCounterMode(display=False) as in_forward:
            loss = loss_of(*leaves)
        with FlopCounterMode(display=False) as in_backward:
            loss.backward()
        early, late = (x.get_total_flops() // 2 // w.numel() for x in (in_forward, in_backward))
        check(f"{name.strip()}: {twice} rows twice, {promised} syncs",
              abs(early + late - 3 * computed - twice) + abs(syncs - promised))
        gemms = f"{early / computed:.3g} + {late / computed:.3g}"
        multiply_adds = f"{(early + late) * w.numel() / 1e6:,.1f} M"
        results.add_row(name, str(syncs), f"{computed:,}", gemms, multiply_adds,
                        f"{peak / 2**20:.1f} MiB", same)
        if rows is not None:
            cells = zip(*(x.float().chunk(min(console.width, 120) - 20) for x in (rows, keep)))
            marks = ["·" if r.mean() < 0.5 else "▒" if k.mean() < 0.5 else "█" for r, k in cells]
            strips += f"{name:20}{''.join(marks)}\n"
    strips += "█ kept  ▒ computed though masked  · not computed"
    say(results, not_run, strips.replace("█", "[green]█[/]").replace("▒", "[red]▒[/]"), sep="\n")
    return (f"Once for all, or never if the data loader knows a bound. The logits (N, V), here "
            f"{n * v >> 18} MiB in float32, for 8,192 tokens of Llama 3 "
            f"{8192 * 128256 * 2 / 1e9:.1f} GB in bfloat16, are never held: backward computes all "
            "chunks but the last again, at most a fourth GEMM. The Triton file saves it: of a "
            "scalar loss it makes the gradients in forward, of a single chunk it can keep the "
            "logits.")


def logprobs():
    """A policy's log-probabilities: what do bfloat16 logits do to them, and a tool's NaN?"""
    def log_prob_of(z, y):
        return z.log_softmax(1).gather(1, y[:, None])[:, 0]

    ours, n, size, v = reference.masked_linear_log_probs, 512, 64, 4096
    h, w = (torch.randn(k, size, device=DEVICE) / 2 for k in (n, v))
    results = table("largest\nlogit", "spacing of\nbfloat16", "bfloat16 logits:\nmean", "\nworst",
                    "\nover 0.2", "float32 logits:\nworst")
    for level in (0, 16, 64):  # added to every logit: the policy stays what it is
        h[:, 0], w[:, 0] = 1, level
        low_h, low_w = h.bfloat16(), w.bfloat16()
        z = F.linear(low_h.double(), low_w.double())
        y = z.softmax(1).multinomial(1)[:, 0]  # a policy learns from what it samples
        off, off_float32, off_eager = (((x - log_prob_of(z, y)).exp() - 1).abs() for x in (
            ours(low_h, low_w, y).log_prob,
            ours(low_h, low_w, y, logits_dtype=torch.float32).log_prob,
            log_prob_of(F.linear(low_h.float(), low_w.float()), y)))
        spacing = 2 ** z.max().log2().floor() * torch.finfo(torch.bfloat16).eps
        results.add_row(f"{z.max():.1f}", f"{spacing:.3f}", f"{off.mean():.3f}", f"{off.max():.3f}",
                        f"{(off > 0.2).double().mean():.0%}", f"{off_float32.max():.0e}")
        check(f"float32 logits up to {z.max():.0f}", off_float32.max(),
              2 * (off_eager.max() + torch.finfo(torch.float32).eps))
    say("A policy beside itself: the ratio exp(log_prob - exact log_prob) should be 1. PPO would "
        "clip it where it is off by over 0.2. It is off by:\n", results, sep="\n")

    h, w = (torch.randn(k, 32, device=DEVICE) / 4 for k in (48, 256))
    y, advantage = torch.randint(256, (48,), device=DEVICE), torch.randn(48, device=DEVICE)
    old = log_prob_of(F.linear(h + 0.1, w), y)  # of the policy that sampled
    mask = torch.arange(48, device=DEVICE) // 16 != 1  # 16 tokens of the model, a tool, the model
    h[~mask], n = torch.nan, mask.sum()

    def gain(log_prob):  # of each token
        return (log_prob - old).exp() * advantage

    def eager_gain(h, w):
        return gain(log_prob_of(F.linear(h, w), y))

    results = table("<gain = exp(log_prob - old) * A", "gain", "grad", "")
    for code, recipe in (
        ("log_softmax: (gain * mask).sum() / n",
         lambda h, w: (eager_gain(h, w) * mask).sum() / n),
        ("log_softmax: where(mask, gain, 0).sum() / n",
         lambda h, w: torch.where(mask, eager_gain(h, w), 0).sum() / n),
        ("masked_linear_log_probs: (gain * mask).sum() / n",
         lambda h, w: (gain(ours(h, w, y, mask).log_prob) * mask).sum() / n)):
        value, _, grad = gradients(recipe, h, w)
        results.add_row(*nan_row(code, value, grad))
    say("\nA tool's tokens are masked, and their hidden states hold NaN:\n", results, sep="\n")
    check("policy gradient beside NaN", *compare(recipe, lambda h, w: (
        eager_gain(torch.where(mask[:, None], h, 0), w) * mask).sum() / n, h, w))
    return ("Rounding grows with the logits, even with a part that they all share and that softmax "
            "takes away: ask for [bold]logits_dtype=torch.float32[/]. And mask [bold]before[/] "
            "log_softmax: then a masked token's log-probability is 0, and so is its gradient.")


def distribution():
    """The target is a teacher's distribution, with logits of -inf. What breaks, what changes?"""
    text = byte_tensor(s.answer for s in corpus())
    pairs = (text[:-1] * 256 + text[1:]).bincount(minlength=256 * 256).view(256, 256)
    teacher = pairs[pairs.sum(1) > 1000].log()
    z = torch.randn_like(teacher).masked_fill(teacher == -INF, -INF)
    share = (z == -INF).float().mean()
    say(f"Teacher: which byte follows which in docstrings. {share:.0%} never do, in both: -inf.\n")
    def by_hand(divergence, t, z, careful=True):
        a, b = ((x.to(z.dtype) / t).log_softmax(1) for x in (teacher, z))
        a, b = (b, a) if divergence == "reverse_kl" else (a, b)
        terms = -b if divergence == "cross_entropy" else a - b
        return (a.exp() * (terms.masked_fill(z == -INF, 0) if careful else terms)).sum(1).mean()
    results = table("<", "T", "by hand", "ours", "gradient", "x T²")
    for divergence in ("cross_entropy", "forward_kl", "reverse_kl"):
        for t in (1, 4):
            plain = partial(by_hand, divergence, t)
            ours = partial(reference.masked_cross_entropy_from_distribution, target=teacher,
                           target_format="logits", divergence=divergence, temperature=t)
            check(f"{divergence}, T = {t}", *compare(ours, plain, z))
            loss, grad = gradients(ours, z)
            size = grad.norm()
            results.add_row(divergence, str(t), *map(number, (
                plain(z, careful=False), loss, size, size * t**2)))
    say(results)
    top_k()
    return ("0 * -inf, which must be 0, is NaN: leave those terms out. A temperature shrinks the "
            "gradient by about T²: beside a label loss, multiply by T² yourself. Of a large "
            "teacher keep the likeliest words: K labels a token, with their probabilities as "
            "loss_mask.")


def top_k():
    """How many of its words must one keep of a teacher that knows many?"""
    words = [word for s in corpus() for word in re.findall(r"\w+|\S", s.answer)]
    numbers = {word: i for i, word in enumerate(dict.fromkeys(words))}
    ids, v = torch.tensor([numbers[word] for word in words], device=DEVICE), len(numbers)
    common = ids.bincount().topk(32).indices  # 32 tokens: what follows each of these words?
    follows = torch.stack([ids[1:][ids[:-1] == i].bincount(minlength=v) for i in common])
    q = follows / follows.sum(1, keepdim=True)
    z = torch.randn(len(q), v, device=DEVICE)
    _, whole = gradients(lambda z: F.cross_entropy(z, q, reduction="sum"), z)
    results = table("K", "hold", "bytes a token", "gradient off by", "agrees")
    for k in (8, 64, 512, v):
        probabilities, labels = q.topk(k)
        dense = torch.zeros_like(q).scatter(1, labels, probabilities)
        ours = partial(reference.masked_cross_entropy, target=labels, loss_mask=probabilities,
                       reduction="sum")
        same = check(f"top {k:,} beside dense", *compare(
            ours, lambda z: F.cross_entropy(z, dense.to(z.dtype), reduction="sum"), z))
        off = (gradients(ours, z)[1] - whole).norm() / whole.norm()
        size = min(k * (4 + 2), v * 2)  # an int32 and a bfloat16 each; all of them need no ids
        held = probabilities.sum(1).mean()
        results.add_row(f"{k:,}", f"{held:.1%}", f"{size:,}", f"{off:.1%}", same)
    say(f"\nTeacher: which of {v:,} words follows which. Of these only the K likeliest:\n", results,
        sep="\n")


def triton():
    """Do the Triton kernels compute what the reference does?"""
    fast, not_run = triton_file()
    if not_run:
        return not_run
    n, v, dtype = (24, 300, torch.float32) if DEVICE == "cpu" else (512, 32000, torch.bfloat16)
    h, w = (torch.randn(k, 64, device=DEVICE, dtype=dtype) for k in (n, v))
    y = torch.randint(v, (n,), device=DEVICE)
    y[::3], h[::3] = IGNORE, torch.nan
    z, teacher, keep = F.linear(h, w), F.linear(h.flip(1), w), y != IGNORE
    results = table("<masked rows hold NaN", "agrees")
    for name, leaves, others, options in (
        ("masked_cross_entropy", (z,), (y,), dict(softcap=30.0, label_smoothing=0.1)),
        ("masked_cross_entropy_from_distribution", (z,), (teacher, keep),
         dict(target_format="logits")),
        ("masked_linear_cross_entropy", (h, w), (y,), dict(z_loss=0.1, max_kept=n)),
        ("masked_linear_log_probs", (h, w), (y,), dict(temperature=2.0)),
    ):
        def loss(module, *leaves):
            result = getattr(module, name)(*leaves, *others, **options)
            return result if torch.is_tensor(result) else (result.log_prob + result.entropy).sum()
        same = check(name, *compare(partial(loss, fast), partial(loss, reference), *leaves))
        results.add_row(name, same)
    say(results)
    return f"Yes, {'compiled' if DEVICE == 'cuda' else 'in the interpreter; a GPU compiles them'}."


def speed():
    """What does it cost, beside eager, torch.compile and other libraries?"""
    if DEVICE == "cpu":
        return "No CPU can show it: Triton's kernels are interpreted here, and GB/s mean nothing."
    v, size, liger = 128256, 2048, "liger_kernel.transformers.functional:liger_"
    n = min(4096, torch.cuda.mem_get_info()[0] // (100 * v) // 64 * 64)  # the oracle needs most
    h, w = (torch.randn(k, size, device=DEVICE).bfloat16() / size**0.25 for k in (n, v))
    y, kept = torch.randint(v, (n,), device=DEVICE), n // 4
    y[kept:] = IGNORE
    moved, flop = (2 * kept + n) * v * 2, 6 * kept * v * size
    say(f"logits: {kept:,} rows read twice, {n:,} written, {v:,} bfloat16 each: {moved:,} bytes\n"
        f"hidden: 3 GEMMs of {kept:,} x {size:,} x {v:,}: {flop:,} FLOP\n")
    results, times = table("<loss, gradients", "<rate in", "ms", "rate", "error / budget"), {}
    known = {"eager": eager, "compile": torch.compile(eager)}
    for leaves, work, unit, paths in (
        ((F.linear(h, w),), moved / 1e9, "GB/s", (
            "masked_ce_triton:masked_cross_entropy", liger + "cross_entropy")),
        ((h, w), flop / 1e12, "TFLOP/s", (
            "masked_ce_triton:masked_linear_cross_entropy", liger + "fused_linear_cross_entropy",
            "cut_cross_entropy:linear_cross_entropy")),
    ):
        for path in (*known, *paths):
            package = path.replace(":", ".").split(".")[0]
            if package not in known and not find_spec(package):
                continue
            f = known.get(path) or pkgutil.resolve_name(path)
            error, budget = compare(lambda *x: f(*x, y), lambda *x: eager(*x, y), *leaves)
            if package == "masked_ce_triton":
                check(path.split(":")[1], error, budget)
            names = dict(grad=torch.autograd.grad, f=f, x=[x.requires_grad_() for x in leaves], y=y)
            times[package] = Timer("grad(f(*x, y), x)", globals=names).timeit(10).median
            results.add_row(package, unit, f"{times[package] * 1e3:.2f}",
                            f"{work / times[package]:,.0f}", f"{error / budget:.2g}")
    say(results)
    return f"From hidden, eager takes {times['eager'] / times['masked_ce_triton']:.1f}x as long."


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=", ".join(CHAPTERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export", metavar="FILE.svg", help="save a picture of these chapters")
    args = parser.parse_args()
    names = args.chapters or (["nan", "chunks"] if args.export else CHAPTERS)
    if not set(names) <= set(CHAPTERS):
        parser.error(f"{names}: the chapters are {', '.join(CHAPTERS)}")
    warnings.simplefilter("ignore")  # of other people's source; of NaN in Triton's interpreter
    sys.stdout.reconfigure(errors="replace")
    # The profiler's C++ code reports to file descriptor 2, where it would break a table in two.
    # So sys.stderr, for tracebacks, goes on with a copy of 2, and 2 itself leads nowhere.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    console.width = 88 if args.export else console.width
    torch.set_num_threads(1)  # for tensors this small more of them would wait for each other
    torch.manual_seed(args.seed)
    corpus()
    try:
        for name in names:
            torch.manual_seed(args.seed)
            closing.add_row(f"[bold]{name}")
            console.rule(f"[bold]{name}", align="left", style="cyan")
            say(f"[bold cyan]{globals()[name].__doc__}\n")
            say(f"\n[bold green]→[/] {globals()[name]()}\n")
    except KeyboardInterrupt:
        say("\nStopped.")
        return 130
    if args.export:
        console.save_svg(args.export, title=f"python demo.py {' '.join(names)}")
    say(closing, f"\n{sum(verdicts)} of {len(verdicts)} checks passed on {DEVICE}.", sep="\n")
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
