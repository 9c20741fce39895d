"""The lesson: what goes wrong in a masked loss, what is right, and what it costs. All computed.

    python demo.py                       every chapter: 20 s on two CPU cores, two minutes on a GPU
    python demo.py nan chunks            some of them; --help lists them
    python demo.py --export lesson.svg   a picture of nan and chunks, or of the chapters named

A chapter's docstring asks, its body experiments, and what it returns is the answer. A check passes
if error <= budget: 0 for counts, 2 * (eager's error + eps) for losses, over max|oracle| of a row.
"""
import argparse
import ast
import math
import os
import pkgutil
import sys
import warnings
from collections import namedtuple
from functools import cache, partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

# Torch reads these when it is imported. Else its profiler's notes would break a table in two.
os.environ |= {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("TRITON_INTERPRET", str(int(DEVICE == "cpu")))  # before triton is imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers would take seconds to stop

import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.markup import escape  # else rich would take z[mask] for markup
from rich.table import Column, Table
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

import masked_ce as reference

CUT, IGNORE, INF = 1024, -100, torch.inf
randn = partial(torch.randn, device=DEVICE)
Sample = namedtuple("Sample", "prompt answer")  # a function without its docstring; the docstring


# ------------------------------------------------------------------------------- data and losses
@cache
def corpus():
    """Every documented function in the standard library's top-level modules, shuffled."""
    found = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                answer = ast.get_docstring(node) + '"""'
                del node.body[0]
                found.append(Sample(ast.unparse(node) + '\n"""', answer))
    return [found[i] for i in torch.randperm(len(found)).tolist()]


def byte_tensor(texts):
    return torch.tensor(list("".join(texts).encode()), device=DEVICE)


def encode(sample, cut=None):
    """-> tokens; labels: for each token the next one, or IGNORE where that is prompt."""
    tokens = byte_tensor(sample)[:cut]
    is_prompt = torch.arange(len(tokens), device=DEVICE) < len(sample.prompt.encode())
    return tokens, reference.shift_labels(tokens.masked_fill(is_prompt, IGNORE))


def eager(logits, labels):
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def eager_linear(hidden, weight, labels):
    return eager(F.linear(hidden, weight), labels)


# ----------------------------------------------------------------------------- measuring, showing
def gradients(loss_fn, *leaves, dtype=None):
    """-> the loss, and its gradient for each leaf."""
    leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in leaves]
    loss = loss_fn(*leaves)
    loss.backward()
    return loss.detach(), *(x.grad for x in leaves)


def compare(loss_fn, plain, *leaves):
    """-> error, budget of the worst tensor (the loss or a gradient), beside `plain` in float64.

    Both are relative to the largest number in a row, or a row of small ones might be all wrong.
    """
    errors, budgets = [], []
    for got, eagers, oracle in zip(gradients(loss_fn, *leaves), gradients(plain, *leaves),
                                   gradients(plain, *leaves, dtype=torch.float64), strict=True):
        size = oracle.abs().amax(-1, keepdim=True).clamp(min=1e-300)  # of a row
        errors.append(((got - oracle) / size).abs().max())
        eager_error = ((eagers - oracle) / size).abs().max()
        budgets.append(2 * (eager_error + torch.finfo(got.dtype).eps))
    worst = (torch.stack(errors) / torch.stack(budgets)).argmax()  # a NaN counts as the largest
    return errors[worst], budgets[worst]


def syncs_and_peak(step):
    """-> how often the host waited for the device, and the most bytes held at once."""
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
    syncs = sum(e.name() in ("aten::nonzero", "aten::_local_scalar_dense") for e in events)
    held = torch.tensor([e.nbytes() for e in events if e.name() == "[memory]"]).cumsum(0)
    return syncs, held.max().item()


console = Console(record=True, highlight=False)
say = console.print


def table(name, *numbers):
    columns = [Column(title, justify="right") for title in numbers]
    return Table(name, *columns, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def number(x):
    return "[bold red]NaN[/]" if x.isnan() else f"{x:.3f}"


def mark(passed):
    return "[green]✓[/]" if passed else "[bold red]✗[/]"


verdicts, closing = [], table("check", "error", "budget", "")


def check(name, error, budget=0.0):
    """-> the mark that this check gets in the chapter's own table."""
    verdicts.append(float(error) <= float(budget))  # NaN never passes
    closing.add_row(f"  {escape(name)}", f"{error:.1e}", f"{budget:.1e}", mark(verdicts[-1]))
    return mark(verdicts[-1])


# --------------------------------------------------------------------------------------- chapters
def data():
    """What should a fine-tuned model learn from, and what should it only read?"""
    example = next(s for s in corpus() if len(s.prompt) < 150 and s.answer.count("\n") == 2)
    say(f"[dim]{escape(example.prompt)}[/][bold yellow]{escape(example.answer)}[/]\n")
    share = sum(len(s.answer) for s in corpus()) / sum(len(s.prompt + s.answer) for s in corpus())
    say(f"{len(corpus()):,} functions of the standard library: the [dim]code is the prompt[/], the "
        f"[bold yellow]docstring the answer[/]. Answers are {share:.0%} of all characters.")
    _, labels = encode(example)
    spelt = bytes(labels[labels != IGNORE].tolist()).decode()
    check("the labels that are kept spell the answer", spelt != example.answer)
    return ("From the answer. The label of token i is token i + 1, and where that is still prompt "
            f"it is {IGNORE}: [bold]masked[/].")


def masked_losses(h, W, tokens, y):
    """-> {code: the loss that it computes}, from hidden states h and a head W."""
    # Who masks losses afterwards computes the prompt's too. That takes labels for all tokens:
    # the next token everywhere, before any was replaced by IGNORE.
    unmasked_labels = tokens.roll(-1)
    z, mask = h @ W.T, y != IGNORE
    loss = F.cross_entropy(z, unmasked_labels, reduction="none")
    n, w = mask.sum(), reference.token_weights(mask)  # w: 1 / n where the mask is True, else 0
    A = torch.linspace(-1, 1, len(y), device=DEVICE)  # a policy gradient's advantages
    log_prob = reference.masked_linear_log_probs(h, W, y).log_prob
    return {
        "F.cross_entropy(z, y)": F.cross_entropy(z, y),
        "(loss * mask).sum() / n": (loss * mask).sum() / n,
        "where(mask, loss, 0).sum() / n": torch.where(mask, loss, 0).sum() / n,
        "F.cross_entropy(h[mask] @ W.T, y[mask])": F.cross_entropy(h[mask] @ W.T, y[mask]),
        "masked_linear_cross_entropy(h, W, y)": reference.masked_linear_cross_entropy(h, W, y),
        "where(mask, loss * A, 0).sum() / n": torch.where(mask, loss * A, 0).sum() / n,
        "-(w * A * log_prob).sum()": -(w * A * log_prob).sum()}


def nan():
    """Where does a masked loss turn into NaN?"""
    empty = [len(s.prompt.encode()) >= CUT for s in corpus()]
    say(f"Cut at {CUT:,} bytes, {sum(empty)} of {len(empty):,} samples keep no label, as the empty "
        "one below. In another a masked row of h holds inf. The last two are a policy gradient's, "
        "with advantages A and masked_linear_log_probs; a tool may have written what is masked.\n")
    no_label = encode(corpus()[empty.index(True)], CUT)
    batch = encode(corpus()[empty.index(False)], CUT)
    embedding, W = randn(256, 32), randn(256, 32) / 6
    clean, overflow = embedding[no_label[0]], embedding[batch[0]]
    overflow[0] = INF  # in a row of the prompt

    def loss_fn(code, batch):
        return lambda h, W: masked_losses(h, W, *batch)[code]

    results = table("z = h @ W.T", "empty:\nloss", "\ngrad", "inf:\nloss", "\ngrad", "")
    for code in masked_losses(clean, W, *no_label):
        empty_loss, _, empty_grad = gradients(loss_fn(code, no_label), clean, W)
        loss, _, grad = gradients(loss_fn(code, batch), overflow, W)
        row = [x.abs().max() for x in (empty_loss, empty_grad, loss, grad)]
        results.add_row(escape(code), *map(number, row), mark(not sum(row).isnan()))
    say(results)
    for ours, plain in (
        ("masked_linear_cross_entropy(h, W, y)", "F.cross_entropy(h[mask] @ W.T, y[mask])"),
        ("-(w * A * log_prob).sum()", "where(mask, loss * A, 0).sum() / n"),
    ):
        zeros = gradients(loss_fn(ours, no_label), clean, W)
        check(f"{ours}, empty", sum(x.abs().sum() for x in zeros))
        finite = lambda h, W: loss_fn(plain, batch)(h.masked_fill(h.isinf(), 0), W)
        check(f"{ours}, inf", *compare(loss_fn(ours, batch), finite, overflow, W))
    return ("As soon as a masked token takes part in arithmetic: 0 * NaN, often only in backward, "
            "and 0/0 if no token counts. [bold]Select rows first[/]; let a sum over none be 0.")


def partition():
    """A batch is split (micro-batches, ranks, chunks). Is the mean of means its mean?"""
    short_first = sorted(corpus()[:100], key=lambda s: len(s.answer))
    parts = [encode(s)[1] for s in short_first[:4] + short_first[-4:]]
    labels = torch.cat(parts)
    chunks = [y for y in labels.split(64) if (y != IGNORE).any()]
    count = reference.count_items(labels != IGNORE)
    z = (byte_tensor(s.prompt for s in corpus()).bincount(minlength=256) + 1.0).log()

    def loss(y, z, **options):  # every token gets the same logits z
        return reference.masked_cross_entropy(z.expand(len(y), -1), y, **options)

    recipes = {
        "one batch": lambda z: loss(labels, z),
        "mean of 8 means": lambda z: sum(loss(y, z) for y in parts) / len(parts),
        "mean of 64-token means": lambda z: sum(loss(y, z) for y in chunks) / len(chunks),
        "8 parts, num_items=count": lambda z: sum(loss(y, z, num_items=count) for y in parts)}
    whole, whole_grad = gradients(recipes["one batch"], z)
    results = table("the same 8 samples", "loss", "off by", "gradient off by")
    for name, recipe in recipes.items():
        value, grad = gradients(recipe, z)
        off = (grad - whole_grad).norm() / whole_grad.norm()
        results.add_row(name, f"{value:.4f}", f"{abs(value / whole - 1):.2%}", f"{off:.2%}")
    say(results)
    name = "8 parts, num_items=count"
    check(name, *compare(recipes[name], lambda z: eager(z.expand(len(labels), -1), labels), z))
    kept = [int((y != IGNORE).sum()) for y in parts]
    return (f"No: in it a token of the shortest answer weighs {max(kept) / min(kept):.0f} times one"
            " of the longest. Divide each [bold]sum[/] by the count over [bold]all[/] parts.")


def samples():
    """Per token or per sample: does the reduction change what a model learns?"""
    answers = sorted((byte_tensor(s.answer) for s in corpus()), key=len)
    tokens, lengths = torch.cat(answers), [len(x) for x in answers]
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)

    def learn(reduction):  # -> each token's loss
        w = reference.token_weights(tokens >= 0, reduction, cu_seqlens=cu_seqlens)
        probability = tokens.bincount(w, minlength=256)  # of a byte, for the weights add up to 1
        return -probability.log()[tokens]

    per_token, per_sample = learn("mean"), learn("sample_mean")
    middle = sum(lengths[:len(lengths) // 2])
    say("A model of how common each byte is. To learn is to count, each token by its weight.\n")
    results = table("answers", "of all tokens", "loss,\nper token", "\nper sample", "\ngap")
    for name, half, sign in (("shorter half", slice(0, middle), 1),
                             ("longer half", slice(middle, None), -1)):
        gaps = (per_token - per_sample)[half]
        results.add_row(name, f"{len(gaps) / len(tokens):.0%}", *map(number, (
            per_token[half].mean(), per_sample[half].mean(), gaps.mean())))
        check(f"{name}: standard error < gap", gaps.std() / len(gaps) ** 0.5, sign * gaps.mean())
    say(results)
    return ("Yes, each is better where its weight is. Choose [bold]per token[/] if tokens count "
            "alike (pretraining, perplexity), [bold]per sample[/] if answers do (chat, rewards).")


def measured(h, w, y, cases):
    """-> a table of what each case takes: (name, loss_fn, rows that get logits, GEMMs, syncs).

    The last two are promises. Three GEMMs are one in forward and one for each gradient.
    """
    results = table("", "syncs", "rows", "GEMMs", "peak,\nfloat32", "")
    for name, loss_fn, rows, promised_gemms, promised_syncs in cases:
        loss = lambda h, w: loss_fn(h, w, y)
        same = check(name, *compare(loss, lambda h, w: eager_linear(h, w, y), h, w))
        syncs, peak = syncs_and_peak(lambda: gradients(loss, h, w))
        with FlopCounterMode(display=False) as counter:
            gradients(loss, h, w)
        gemms = counter.get_total_flops() / (2 * rows * w.numel())
        check(f"{name}: {promised_syncs} syncs, {promised_gemms:.3g} GEMMs",
              abs(syncs - promised_syncs) + abs(round(gemms - promised_gemms, 9)))
        mebibytes = f"{peak / 2**20:.1f} MiB"
        results.add_row(name, str(syncs), f"{rows:,}", f"{gemms:.3g}", mebibytes, same)
    return results


def chunks():
    """How often must the host look at the mask to skip what it hides, and what is computed then?"""
    n, v, size = 2048, 2048, 64
    h, w = randn(n, 64) / 2, randn(v, 64) / 2
    y = torch.cat([encode(s)[1] for s in corpus()[:40] if len(s.prompt) < CUT])[:n]
    keep = y != IGNORE
    in_chunks = keep.view(-1, size).any(1).repeat_interleave(size)
    kept, some = int(keep.sum()), int(in_chunks.sum())
    bound = math.ceil(kept / 128) * 128

    def four(rows):  # GEMMs, but backward does not compute the last of the even chunks again
        chunks = math.ceil(rows / size)
        return 3 + (chunks - 1) * math.ceil(rows / chunks) / rows

    def look_at_each(h, w, y):
        losses = [F.cross_entropy(F.linear(h, w), y, reduction="sum")
                  for h, y in zip(h.split(size), y.split(size)) if (y != IGNORE).any()]  # a sync
        return sum(losses) / (y != IGNORE).sum()

    ours = partial(reference.masked_linear_cross_entropy, chunk_size=size)
    say(measured(h, w, y, (
        ("F.cross_entropy", eager_linear, n, 3, 0),
        ("look at each chunk", look_at_each, some, 3, n // size),
        ('skip="chunks"', partial(ours, skip="chunks"), some, four(some), 1),
        ('skip="rows"', ours, kept, four(kept), 1),
        (f"max_kept={bound}", partial(ours, max_kept=bound), bound, four(bound), 0),
        ('skip="none"', partial(ours, skip="none"), n, four(n), 0))))
    marks = "·", "[red]▒[/]", "[green]█[/]"
    say("\nA mark is half a chunk: {} skipped  {} computed though masked  {} kept".format(*marks))
    for name, computed in (("none", keep | True), ("chunks", in_chunks), ("rows", keep)):
        halves = (computed.long() + keep).view(-1, size // 2).amax(1)  # indices of marks
        say(f'skip="{name}"'.ljust(15) + "".join(marks[i] for i in halves.tolist()))
    return ("Once for all, or never if the data loader knows a bound. The logits (N, V) are never "
            f"held: here {n * v >> 18} MiB, and {8192 * 128256 >> 18:,} MiB for 8,192 tokens of "
            "Llama 3. So backward makes all chunks but the last again, at most a fourth GEMM.")


def logprobs():
    """What do bfloat16 logits do to a policy's log-probabilities?"""
    say("The ratio exp(log_prob - exact log_prob) should be 1. PPO clips it where it is off by "
        "over 0.2. It is off by:\n")

    def log_prob_of(z, y):
        return -F.cross_entropy(z, y, reduction="none")

    def off(log_prob, exact):
        return ((log_prob - exact).exp() - 1).abs()

    ours = reference.masked_linear_log_probs
    h, w = randn(512, 64) / 2, randn(4096, 64) / 2
    results = table("largest\nlogit", "spacing of\nbfloat16", "bfloat16 logits:\nworst",
                    "\nover 0.2", "float32 logits:\nworst")
    for level in (0, 16, 64):  # added to every logit: the policy stays what it is
        h[:, 0], w[:, 0] = 1, level
        low_h, low_w = h.bfloat16(), w.bfloat16()
        z = F.linear(low_h.double(), low_w.double())
        y = z.softmax(1).multinomial(1)[:, 0]  # a policy learns from what it samples
        exact = log_prob_of(z, y)
        bfloat16 = off(ours(low_h, low_w, y).log_prob, exact)
        float32 = off(ours(low_h, low_w, y, logits_dtype=torch.float32).log_prob, exact)
        eagers = off(log_prob_of(F.linear(low_h.float(), low_w.float()), y), exact)
        spacing = 2 ** z.max().log2().floor() * torch.finfo(torch.bfloat16).eps
        clipped = (bfloat16 > 0.2).double().mean()
        results.add_row(f"{z.max():.1f}", f"{spacing:.3f}", f"{bfloat16.max():.3f}",
                        f"{clipped:.0%}", f"{float32.max():.0e}")
        check(f"float32 logits up to {z.max():.0f}", float32.max(),
              2 * (eagers.max() + torch.finfo(torch.float32).eps))
    say(results)
    return ("Rounding grows with the logits, even with a part that they all share and that softmax "
            "takes away: ask for [bold]logits_dtype=torch.float32[/].")


def distribution():
    """The target is a teacher's distribution, with logits of -inf. What breaks, what changes?"""
    text = byte_tensor(s.answer for s in corpus())
    pairs = (256 * text[:-1] + text[1:]).bincount(minlength=256 * 256).view(256, 256)
    counts = pairs[pairs.sum(1) > 1000]
    q = counts / counts.sum(1, keepdim=True)
    never = (q == 0).double().mean()
    say(f"Teacher: which byte follows which in docstrings. {never:.0%} never do: there its logit "
        "is -inf, and so is the student's.\n")
    teacher, student = q.log(), torch.randn_like(q).masked_fill(q == 0, -INF)

    def by_torch(divergence, t, teacher, z):
        log_p, log_q = (z / t).log_softmax(1), (teacher.to(z.dtype) / t).log_softmax(1)
        if divergence == "cross_entropy":
            return F.cross_entropy(z / t, log_q.exp())
        if divergence == "forward_kl":
            return F.kl_div(log_p, log_q, log_target=True, reduction="batchmean")
        return F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")

    results = table("", "T", "torch", "ours", "gradient", "x T²")
    for divergence, t in product(("cross_entropy", "forward_kl", "reverse_kl"), (1, 4)):
        ours = partial(reference.masked_cross_entropy_from_distribution, target=teacher,
                       target_format="logits", divergence=divergence, temperature=t)
        plain = partial(by_torch, divergence, t)
        finite = lambda z: plain(teacher.clamp(min=-1e4), z.clamp(min=-1e4))  # exp(-1e4) is 0 too
        check(f"{divergence}, T = {t}", *compare(ours, finite, student))
        loss, grad = gradients(ours, student)
        size = grad.norm()
        results.add_row(divergence, str(t), *map(number, (
            plain(teacher, student), loss, size, size * t**2)))
    say(results)
    top_k(q)
    return ("0 * -inf is NaN: leave those terms out. A temperature shrinks the gradient, roughly "
            "by T²: beside a label loss, multiply by T² yourself. Of a large teacher keep the K "
            "likeliest tokens: labels, with their probabilities as loss_mask.")


def top_k(q):
    """How much of a teacher is lost where only its K likeliest tokens are kept?"""
    logits = torch.randn_like(q)
    results = table("", "hold", "agrees with dense")
    for k in (4, 16, 64, 256):
        probabilities, labels = q.topk(k)
        ours = partial(reference.masked_cross_entropy, target=labels, loss_mask=probabilities,
                       reduction="sum")
        dense = torch.zeros_like(q).scatter(1, labels, probabilities)
        plain = lambda z: F.cross_entropy(z, dense.to(z.dtype), reduction="sum")
        same = check(f"top {k} beside dense", *compare(ours, plain, logits))
        results.add_row(f"top {k}", f"{dense.sum(1).mean():.1%}", same)
    say("\nOf the teacher's tokens only the K likeliest:\n", results, sep="\n")


def triton():
    """Do the Triton kernels compute what the reference does, and with how many GEMMs?"""
    try:
        import masked_ce_triton as fast
        fast.masked_cross_entropy(torch.zeros(1, 2, device=DEVICE), byte_tensor("\0"))
    except ImportError as error:
        return escape(f"Not run: {error} (pip install -r requirements.txt).")
    except RuntimeError as error:
        if DEVICE == "cuda":
            raise  # a fault; on a CPU the interpreter does not fit NumPy, and it says what does
        return escape(f"Not run: {error}")
    n, v, dtype = (24, 300, torch.float32) if DEVICE == "cpu" else (512, 32000, torch.bfloat16)
    h, w = randn(n, 64, dtype=dtype), randn(v, 64, dtype=dtype)
    y = torch.randint(v, (n,), device=DEVICE)
    y[::3], h[::3] = IGNORE, torch.nan
    z, teacher, keep = F.linear(h, w), F.linear(h.flip(1), w), y != IGNORE
    for name, leaves, call in (
        ("masked_cross_entropy", (z,), lambda f, z: f(z, y, softcap=30.0, label_smoothing=0.1)),
        ("masked_cross_entropy_from_distribution", (z,),
         lambda f, z: f(z, teacher, keep, target_format="logits")),
        ("masked_linear_cross_entropy", (h, w), lambda f, *x: f(*x, y, z_loss=0.1, max_kept=n)),
        ("masked_linear_log_probs", (h, w),  # the sum of log_prob and entropy
         lambda f, *x: sum(f(*x, y, temperature=2.0)[:2]).sum()),
    ):
        ours, plain = (partial(call, getattr(module, name)) for module in (fast, reference))
        say(check(name, *compare(ours, plain, *leaves)), name)
    h, w = randn(12, 64) / 2, randn(256, 64) / 2
    y = torch.randint(256, (12,), device=DEVICE)
    y[:4] = IGNORE
    ours = fast.masked_linear_cross_entropy
    say("", measured(h, w, y, (
        ("chunk_size=4", partial(ours, chunk_size=4), 8, 3, 1),
        ('reduction="none"', lambda *x: ours(*x, reduction="none").sum() / 8, 8, 3, 1),
        ("recompute=True", partial(ours, recompute=True), 8, 4, 1))))
    how = "compiled" if DEVICE == "cuda" else "in the interpreter; a GPU compiles them"
    return (f"Yes, {how}. With three: a scalar loss gets its gradients in forward, and a single "
            "chunk's logits are kept. A fourth saves memory.")


def speed():
    """What does it cost, beside other losses, and beside the least that it can cost?"""
    if DEVICE == "cpu":
        return "No CPU can show it: Triton's kernels are interpreted here."
    import masked_ce_triton as fast

    def milliseconds(step):
        timer = Timer("step()", globals=dict(step=step))
        timer.timeit(10)  # a GPU that was idle is faster at first
        return timer.timeit(10).median * 1e3

    def peer(package, path):  # if it is installed
        return [(package, pkgutil.resolve_name(f"{package}.{path}"))] if find_spec(package) else []

    liger = "transformers.functional.liger_"
    v, size = 128256, 4096  # Llama 3's
    n = min(8192, torch.cuda.mem_get_info()[0] // (100 * v) // 64 * 64)  # the oracle needs most
    h, w = (randn(k, size).bfloat16() / size**0.25 for k in (n, v))
    z = F.linear(h, w)
    compiled = torch.compile(eager), torch.compile(eager_linear)
    copy = milliseconds(lambda: z.clone())
    say(f"{n:,} tokens x {size:,} x {v:,} in bfloat16. The floor: three GEMMs over the rows that "
        "are kept; of given logits, to read these twice and write all once, at the "
        f"{4 * z.numel() / copy / 1e6:,.0f} GB/s of a copy.\n")
    results = table("", "masked", "ms", "floor", "ratio", "peak,\nGiB", "error /\nbudget")
    for share, linear in product((0, 0.75), (False, True)):
        kept = n - int(share * n)
        y = torch.randint(v, (n,), device=DEVICE)
        y[kept:] = IGNORE
        if linear:
            floor = milliseconds(lambda: (h[:kept] @ w.T, z[:kept] @ w, z[:kept].T @ h[:kept]))
            ours = fast.masked_linear_cross_entropy
            leaves, plain = (h, w), eager_linear
            cases = [("ours, from hidden", ours),
                     ("  chunk_size=1024", partial(ours, chunk_size=1024)),
                     ("  recompute=True", partial(ours, recompute=True)),
                     ("  masked_ce.py", reference.masked_linear_cross_entropy),
                     *peer("liger_kernel", liger + "fused_linear_cross_entropy"),
                     *peer("cut_cross_entropy", "linear_cross_entropy")]
        else:
            floor = copy * (2 * kept + n) / (2 * n)
            leaves, plain = (z,), eager
            cases = [("ours, given logits", fast.masked_cross_entropy),
                     ("  masked_ce.py", reference.masked_cross_entropy),
                     *peer("liger_kernel", liger + "cross_entropy")]
        for name, f in (*cases, ("eager", plain), ("compile", compiled[linear])):
            loss = lambda *x: f(*x, y)
            error, budget = compare(loss, lambda *x: plain(*x, y), *leaves)
            if f in (fast.masked_cross_entropy, fast.masked_linear_cross_entropy):
                check(f"{name}, {share:.0%} masked", error, budget)
            x = [x.clone().requires_grad_() for x in leaves]  # Liger's gradient goes into its input
            step = lambda: torch.autograd.grad(loss(*x), x)
            ms, (_, peak) = milliseconds(step), syncs_and_peak(step)
            above = (peak - 2 * sum(x.numel() for x in leaves)) / 2**30  # inputs and gradients
            results.add_row(name, f"{share:.0%}", f"{ms:.2f}", f"{floor:.2f}", f"{ms / floor:.2f}",
                            f"{max(above, 0):.2f}", f"{error / budget:.2g}")
    say(results)
    return "Ratio 1 is the floor, lower is better. What is masked costs nothing from hidden."


CHAPTERS = {f.__name__: f for f in (
    data, nan, partition, samples, chunks, logprobs, distribution, triton, speed)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=", ".join(CHAPTERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export", metavar="FILE.svg", help="save a picture of these chapters")
    args = parser.parse_args()
    names = args.chapters or (["nan", "chunks"] if args.export else list(CHAPTERS))
    if not set(names) <= set(CHAPTERS):
        parser.error(f"{names}: the chapters are {', '.join(CHAPTERS)}")
    warnings.simplefilter("ignore")  # of other people's source; of NaN in Triton's interpreter
    sys.stdout.reconfigure(errors="replace")  # a terminal without these characters gets a ?
    console.width = 88 if args.export else console.width
    torch.set_num_threads(1)  # for tensors this small more of them would wait for each other
    torch.manual_seed(args.seed)
    corpus()
    for name in names:
        torch.manual_seed(args.seed)  # a chapter alone shows what it shows among the others
        closing.add_row(f"[bold]{name}")
        console.rule(f"[bold]{name}", align="left", style="cyan")
        say(f"[bold cyan]{CHAPTERS[name].__doc__}\n")
        say(f"\n[bold green]→[/] {CHAPTERS[name]()}\n")
    if args.export:
        console.save_svg(args.export, title=f"python demo.py {' '.join(names)}")
    say(closing, f"\n{sum(verdicts)} of {len(verdicts)} checks passed on {DEVICE}.", sep="\n")
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
