"""The lesson: what goes wrong in a masked loss, what is right, and what it costs. All computed.

    python demo.py                       every chapter, under a minute on two CPU cores or one GPU
    python demo.py nan chunks            some of them; --help lists them
    python demo.py --export lesson.svg   a picture of nan and chunks, or of the chapters named

A chapter's docstring asks, its body experiments, and what it returns is the answer. A check passes
if error <= 2 * (eager's error + eps), both over max|oracle| of their row; a count's budget is 0.
"""
import argparse, ast, copy, functools, importlib.util, itertools, os, pkgutil, sys, warnings
from collections import namedtuple
from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("TRITON_INTERPRET", str(int(DEVICE == "cpu")))  # before triton is imported
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # workers would take seconds to stop

import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from rich.text import Text  # for code: elsewhere rich would take z[mask] for markup
from torch import nn
from torch.utils.benchmark import Timer
from torch.utils.flop_counter import FlopCounterMode

import masked_ce as reference

CHAPTERS = "data nan partition samples chunks distribution triton speed".split()
CUT, IGNORE, INF = 1024, -100, torch.inf
Sample = namedtuple("Sample", "prompt answer")  # a function without its docstring; the docstring
partial, verdicts, console = functools.partial, [], Console(record=True, highlight=False)
say = console.print


@functools.cache
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


def eager(*args):  # (z, y), or (h, w, y)
    z = F.linear(*args[:2]) if len(args) == 3 else args[0]
    return F.cross_entropy(z.to(torch.promote_types(z.dtype, torch.float32)), args[-1])


def gradients(loss_fn, *leaves, dtype=None):  # -> the loss, and its gradient for each leaf
    leaves = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in leaves]
    loss = loss_fn(*leaves)
    loss.backward()
    return (loss.detach(), *(x.grad for x in leaves))


def compare(loss_fn, plain, *leaves):  # -> the worst tensor's error and budget
    pairs = []
    for got, same, oracle in zip(gradients(loss_fn, *leaves), gradients(plain, *leaves),
                                 gradients(plain, *leaves, dtype=torch.float64), strict=True):
        eps, rows = torch.finfo(got.dtype).eps, oracle.shape[0] if oracle.dim() > 1 else 1
        got, same, oracle = (x.double().reshape(rows, -1) for x in (got, same, oracle))
        size = oracle.abs().amax(1, keepdim=True).clamp(min=1e-300)  # of a row: none may vanish
        error, eager_error = (((x - oracle) / size).abs().max().item() for x in (got, same))
        pairs.append((error, 2 * (eager_error + eps)))
    return pairs[torch.tensor([error / budget for error, budget in pairs]).argmax()]  # NaN wins


def table(*columns):  # numbers to the right; a name that begins with < is of a column of text
    made = [Column(c.lstrip("<"), justify="left" if c[:1] == "<" else "right") for c in columns]
    return Table(*made, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


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


def data():
    """What should a fine-tuned model learn from, and what should it only read?"""
    s = next(s for s in corpus() if len(s.prompt) < 300 and s.answer.count("\n") == 2)
    say(Text.assemble((s.prompt, "dim"), (s.answer, "bold yellow"), "\n"))
    lengths = sorted(len(s.answer) - 3 for s in corpus())
    share = sum(lengths) / sum(len(s.prompt + s.answer) for s in corpus())
    say(f"{len(lengths):,} functions of the standard library: the [dim]code is the prompt[/], the "
        f"[bold yellow]docstring the answer[/] of {lengths[0]} to {lengths[-1]:,} characters, half "
        f"under {lengths[len(lengths) // 2]}. Prompts and answers ({share:.0%}) together:\n\n"
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
    embedding, weight = (torch.randn(256, 32, device=DEVICE) / k for k in (1, 6))
    (prompt, unlabelled), (tokens, labels) = (
        encode(corpus()[empty.index(e)], CUT) for e in (True, False))
    clean, overflow, keep = embedding[prompt], embedding[tokens], labels != IGNORE
    overflow[0] = INF  # in a row of the prompt
    results = table("<z = h @ W.T", "empty:\nloss", "\ngrad", "inf:\nloss", "\ngrad", "")
    for code in (
            "F.cross_entropy(z, y)", "(loss * mask).sum() / n", "where(mask, loss, 0).sum() / n",
            "F.cross_entropy(h[mask] @ W.T, y[mask])", "masked_linear_cross_entropy(h, W, y)"):
        def run(h, y, following, W):
            z, mask, n = h @ W.T, y != IGNORE, (y != IGNORE).sum()
            loss = F.cross_entropy(z, following, reduction="none")
            return eval(code, vars(torch) | vars(reference) | {"F": F}, locals())
        first = gradients(partial(run, clean, unlabelled, prompt.roll(-1)), weight)
        loss, grad = gradients(partial(run, overflow, labels, tokens.roll(-1)), weight)
        cells = [x.abs().max() for x in (*first, loss, grad)]
        if loss.isfinite() and grad.isnan().any():
            lost = (weight - 0.1 * grad).isnan().float().mean()
        text = [f"{x:.3f}".replace("nan", "[bold red]NaN") for x in cells]
        results.add_row(Text(code), *text, "[red]✗" if sum(cells).isnan() else "[green]✓")
    say(results)
    ours = reference.masked_linear_cross_entropy
    check("no label: all 0", *compare(
        partial(ours, target=unlabelled), lambda h, w: 0 * (h.sum() + w.sum()), clean, weight))
    check("inf in a masked row", *compare(partial(ours, target=labels), lambda h, w: eager(
        h[keep], w, labels[keep]), overflow, weight))
    return ("Where a token that does not count is computed with: 0/0 if none counts, 0 * NaN in "
            f"backward (one step of SGD, and {lost:.0%} of W is NaN behind a finite loss). "
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
    context, steps, seeds = 16, 120, 3
    reductions = {"mean": "[cyan]per token[/] ", "sample_mean": "[magenta]per sample[/]"}
    text = byte_tensor(part for s in corpus() for part in s)
    sizes = torch.tensor([[len(x.encode()) for x in s] for s in corpus()], device=DEVICE)
    starts, lengths = sizes.sum(1).cumsum(0) - sizes[:, 1], sizes[:, 1].clamp(max=512)
    groups = {"under 60": lengths < 63, "60 to 300": (lengths > 62) & (lengths < 304),
              "over 300": lengths > 303}  # with the three quotes that end an answer
    def batch(ids):  # the positions in answers, no others
        cu = F.pad(lengths[ids].cumsum(0), (1, 0))
        position = torch.arange(int(cu[-1]), device=DEVICE)
        position += (starts[ids] - cu[:-1]).repeat_interleave(lengths[ids])
        before = position[:, None] - torch.arange(context, 0, -1, device=DEVICE)
        return text[before], text[position], cu
    fifth = torch.arange(len(lengths), device=DEVICE) % 5 == 0
    training, losses, screen = (~fifth).nonzero()[:, 0], [], Console()  # which records nothing
    held_out = [batch((fifth & here).nonzero()[:, 0])[:2] for here in groups.values()]
    (_, y, cu), each = batch(training[:16]), lengths[training[:16]].tolist()
    check("sample_mean is the mean of means", *compare(
        lambda z: reference.masked_cross_entropy(z, y, reduction="sample_mean", cu_seqlens=cu),
        lambda z: sum(map(F.cross_entropy, z.split(each), y.split(each))) / len(each),
        torch.randn(len(y), 256, device=DEVICE)))
    with Progress(transient=True, console=screen, disable=not screen.is_terminal) as bars:
        tasks = [bars.add_task("", total=seeds * steps) for _ in reductions]
        for seed in range(torch.initial_seed(), torch.initial_seed() + seeds):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Embedding(256, 16), nn.Flatten(), nn.Linear(context * 16, 128),
                                  nn.ReLU(), nn.Linear(128, 256)).to(DEVICE)
            models = nn.ModuleList([model, copy.deepcopy(model)])
            optimizer = torch.optim.AdamW(models.parameters(), lr=4e-3)
            decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
            for _ in range(steps):
                x, y, cu = batch(training[torch.randint(len(training), (16,))])
                optimizer.zero_grad()
                for task, r, model in zip(tasks, reductions, models):
                    w = reference.token_weights(y >= 0, r, cu_seqlens=cu)
                    loss = w @ F.cross_entropy(model(x), y, reduction="none")
                    loss.backward()
                    bars.update(task, advance=1, description=f"{reductions[r]}  loss {loss:.2f}")
                optimizer.step(), decay.step()
            with torch.no_grad():
                losses.append([[F.cross_entropy(m(x), y) for m in models] for x, y in held_out])
    results = table("<answer's\nbytes", "<weight:\nper token", "<\nper sample",
                    "held out:\nper token", "\nper sample", "\ngap", "\n±")
    _, y, cu = batch(torch.arange(len(lengths), device=DEVICE))
    weights = [reference.token_weights(y >= 0, r, cu_seqlens=cu) for r in reductions]
    for i, (name, here) in enumerate(groups.items()):
        share = [w[here.repeat_interleave(lengths)].sum().item() for w in weights]
        token, sample = torch.tensor(losses)[:, i].T
        gap, spread = (token - sample).mean(), (token - sample).std()
        results.add_row(name, *(f"{'█' * round(14 * x)} {x:.0%}" for x in share),
                        *(f"{x:.3f}" for x in (token.mean(), sample.mean(), gap, spread)))
        if i != 1:
            check(f"{name} bytes: spread < gap", spread, (1 - i) * gap)
    say(results)
    return ("Yes, each is better where its weight is. Choose [bold]per token[/] if tokens count "
            "alike (pretraining, perplexity), [bold]per sample[/] if answers do (chat, rewards).")


def chunks():
    """How often must the host look at the mask, to skip what it hides?"""
    n, hidden_size, v, chunk = 2048, 64, 4096, 64
    h, w = (torch.randn(k, hidden_size, device=DEVICE) / 2 for k in (n, v))
    y = torch.cat([encode(s)[1] for s in corpus()[:40] if len(s.prompt) < CUT])[:n]
    keep = y != IGNORE
    every, in_chunks = keep | True, keep.view(-1, chunk).any(1).repeat_interleave(chunk)
    bound = -(-int(keep.sum()) // 128) * 128
    def look_at_each(h, w, y):
        losses = [F.cross_entropy(F.linear(h, w), y, reduction="sum")
                  for h, y in zip(h.split(chunk), y.split(chunk)) if (y != IGNORE).any()]  # a sync
        return sum(losses) / (y != IGNORE).sum()
    ours = partial(reference.masked_linear_cross_entropy, chunk_size=chunk)
    results, strips = table("<", "syncs", "rows", "multiply-adds", "peak memory", "agrees"), []
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **kwargs: 2 * a[0] * a[1] * b[1]}
    for name, loss_fn, rows, promised in (
        ("F.cross_entropy", eager, every, 0),
        ("look at each chunk", look_at_each, in_chunks, n // chunk),
        ('skip="chunks"', partial(ours, skip="chunks"), in_chunks, 1),
        ('skip="rows"', ours, keep, 1),
        (f"max_kept={bound}", partial(ours, max_kept=bound), keep, 0),
        ('skip="none"', partial(ours, skip="none"), every, 0),
    ):
        step = partial(gradients, lambda h, w: loss_fn(h, w, y), h, w)
        same = check(name, *compare(step.args[0], lambda h, w: eager(h, w, y), h, w))
        syncs, peak = syncs_and_peak(step)
        with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
            step()
        multiply_adds = counter.get_total_flops() // 2
        computed = multiply_adds / (3 * hidden_size * v)  # forward and two gradients
        drawn = bound if "max_kept" in name else rows.sum()
        check(f"{name}: rows and {promised} syncs", abs(computed - drawn) + abs(syncs - promised))
        results.add_row(name, str(syncs), f"{computed:,.0f}", f"{multiply_adds / 1e6:,.0f} M",
                        f"{peak / 2**20:.1f} MiB", same)
        cells = zip(*(x.float().chunk(min(console.width, 120) - 20) for x in (rows, keep)))
        marks = ["·" if r.mean() < 0.5 else "▒" if k.mean() < 0.5 else "█" for r, k in cells]
        strips.append(f"\n{name:20}{''.join(marks)}")
    strips.append("\n█ kept  ▒ computed though masked  · not computed")
    say(results, "".join(strips).replace("█", "[green]█[/]").replace("▒", "[red]▒[/]"))
    return (f"Once for all, or never if the data loader knows a bound. (N, V), {n * v >> 18} MiB "
            f"here, {8192 * 128256 / 2**28:.1f} GiB for 8,192 tokens of Llama 3, never exists.")


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
    for divergence, t in itertools.product(("cross_entropy", "forward_kl", "reverse_kl"), (1, 4)):
        plain = partial(by_hand, divergence, t)
        ours = partial(reference.masked_cross_entropy_from_distribution, target=teacher,
                       target_format="logits", divergence=divergence, temperature=t)
        check(f"{divergence}, T = {t}", *compare(ours, plain, z))
        loss, grad = gradients(ours, z)
        numbers = (plain(z, careful=False), loss, grad.norm(), grad.norm() * t**2)
        results.add_row(divergence, str(t), *(f"{x:.4f}" for x in numbers))
    say(results)
    return ("0 * -inf, which must be 0, is NaN: leave those terms out. A temperature shrinks the "
            "gradient by about T²: beside a label loss, multiply by T² yourself.")


def triton():
    """Do the Triton kernels compute what the reference does?"""
    if not importlib.util.find_spec("triton"):
        return "Not shown: Triton is not installed."
    import masked_ce_triton as fast
    n, v, dtype = (24, 300, torch.float32) if DEVICE == "cpu" else (512, 32000, torch.bfloat16)
    h, w = (torch.randn(k, 64, device=DEVICE, dtype=dtype) for k in (n, v))
    y = torch.randint(v, (n,), device=DEVICE)
    y[::3], h[::3] = IGNORE, torch.nan
    z, teacher = F.linear(h, w), dict(target=F.linear(h.flip(1), w), target_format="logits")
    results = table("<masked rows hold NaN", "agrees")
    for name, leaves, kwargs in (
        ("masked_cross_entropy", (z,), dict(target=y, softcap=30.0, label_smoothing=0.1)),
        ("masked_cross_entropy_from_distribution", (z,), dict(loss_mask=y != IGNORE, **teacher)),
        ("masked_linear_cross_entropy", (h, w), dict(target=y, z_loss=0.1, max_kept=n)),
    ):
        ours, theirs = (partial(getattr(m, name), **kwargs) for m in (fast, reference))
        results.add_row(name, check(name, *compare(ours, theirs, *leaves)))
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
            if package not in known and not importlib.util.find_spec(package):
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
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # ours; the profiler writes to 2 itself
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    console.width = 88 if args.export else console.width
    torch.manual_seed(args.seed), corpus()
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
