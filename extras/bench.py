"""Time decode steps and one layer's attention over filled caches, look for needles, and draw
tables.

    python -m extras.bench step --row "sals|llama-3.1-8b|8|32768|--method sals" --row ... python -m
    extras.bench throughput --model llama-3.1-8b --lengths 8192 32768 --method sals kivi python -m
    extras.bench speed --rows FILE --csv speed.csv python -m extras.bench needle --method dense
    --method sals --lengths 2048 4096 8000 --csv needle.csv python -m extras.bench plot
    docs/eval-nano.csv docs/drift-nano.csv --out docs python -m extras.bench plot --overview
    docs/throughput.csv docs/eval-{smollm2,qwen}.csv --out docs
A row is LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS, with options of generate.py; a file has one a line.
SEQUENCES: a number, or max for as many as fit. No prompt is read: the caches are filled with random
numbers. Dense comes first for each shape, sequences and tokens.
"""

import argparse
import csv
import dataclasses
import gc
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import calibrate
from calibrate import save_csv, text_ids, writable_file, writable_folder
from compress import load_artifact, replacing
from extras.evaluate import (
    ANSWER_ROOM,
    TASKS,
    Candidate,
    Haystack,
    check_candidates,
    retrieval_scores,
    row_options,
)
from generate import LLM, NANO, Engine, Parser, ProgressLine, clock, whole
from model import SHAPES, UserError, free_memory, load_config, load_tokenizer

ROOM = 256  # tokens of a cache beyond those that it holds
COSTS = ("bytes/token", "read/step")  # columns of eval's table
PAINTED = {  # what the overview names
    "dense": ("dense", "#404040"),
    "kivi": ("KIVI", "#8c6d1f"),
    "sals": ("SALS", "#c2185b"),
    "lrqk": ("LRQK + host memory", "#1b7f3b"),
    "loki": ("Loki", "#e07b00"),
    "elitekv": ("EliteKV", "#6a3fb5"),
    "fdc": ("FDC", "#0b6fb8"),
}

# --------------------------------------------------------------------------------------------- rows


class Row(NamedTuple):
    label: str
    shape: str
    sequences: int  # 0: as many as fit
    tokens: int
    options: str = "--method dense"

    @classmethod
    def parse(cls, text: str) -> "Row":
        try:
            label, shape, sequences, tokens, options = map(str.strip, text.split("|"))
            return cls(
                label, shape, 0 if sequences == "max" else int(sequences), int(tokens), options
            )
        except ValueError:
            raise UserError(f"row {text!r}: write LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS") from None


def free_bytes(kind: str) -> float:
    """Bytes that are free on a GPU ("cuda") or, as Linux tells it, in host memory ("cpu")."""
    if kind == "cuda":
        return free_memory(torch.device(kind))
    available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    return int(available[1]) * 1024


def filled_engine(row: Row, device: str, *more: str, share: float = 1.0, **changes) -> Engine:
    """An engine over random weights. In each place its caches hold random numbers of the buffer's
    kind.
    more: options; changes: of the shape. share: of the free memory, for as many sequences as
    fit."""
    shapes = SHAPES | {"nano": load_config(NANO)}
    line = f"--prompt {row.tokens} {row.options}"
    if row.shape not in shapes:
        raise UserError(f"no shape {row.shape!r}; the shapes are: {', '.join(shapes)}")
    args = generate.parse_args([*line.split(), "--device", device, *more])
    config, capacity = dataclasses.replace(shapes[row.shape], **changes), row.tokens + ROOM
    llm = LLM(
        config,
        args.method,
        max_seq_length=capacity,
        device=device,
        dtype=args.dtype,
        weights=args.weights,
        use_compile=args.compile,
        use_kernels=args.kernels,
        **args.options,
    )
    sequences = row.sequences
    if not sequences:
        artifact = load_artifact(config, args.method, llm.model)
        needs = generate.row_bytes(llm.model, args.method, llm.settings, artifact, capacity).items()
        fits = (free_bytes(kind) / max(1, needed) for kind, needed in needs)
        sequences = max(1, int(share * min(fits)))
    engine = llm.build_engine(sequences)
    for name, buffer in itertools.chain(*(cache.named_buffers() for cache in engine.caches)):
        for part in buffer.view(-1).split(1 << 28) if buffer.is_contiguous() else buffer:
            if part.dtype == torch.float8_e4m3fn:  # which has no random_; from 127 on NaN
                part.view(torch.uint8).random_(0, 127)
            elif part.dtype in (torch.uint8, torch.int8):
                part.random_(*((0, 256) if part.dtype == torch.uint8 else (-127, 128)))
            elif part.is_floating_point():
                part.uniform_(0.001, 0.01) if "scale" in name else part.normal_()
    engine.pos.fill_(row.tokens)
    return engine


def times_of(run: Callable, device: torch.device, runs: int) -> list[float]:
    """Microseconds of each run but a first one, rising."""
    times = []
    for _ in range(1 + runs):
        started = clock(device)
        run()
        times.append((clock(device) - started) * 1e6)
    return sorted(times[1:])


def time_step(row: Row, device: str) -> Iterator[dict]:
    """Milliseconds of a decode step: the median, least and most of five times 24. Tokens a second
    of all rows. Bytes of all caches, and those that a step reads."""
    yield step_figures(filled_engine(row, device), row)


def time_throughput(row: Row, device: str) -> Iterator[dict]:
    """Tokens a second: a decode step over as many rows as fit the memory beside the weights.
    read_s: seconds to read their prompts, of which one is read and timed."""
    for share in (0.97, 0.9, 0.8, 0.6):  # what a step computes takes memory, too
        # unlike `except`, it does not keep the first try's caches
        with suppress(torch.OutOfMemoryError):
            yield capacity_figures(row, device, share)
            return
        gc.collect()
        torch.cuda.empty_cache()
    raise UserError("not enough memory")


def capacity_figures(row: Row, device: str, share: float) -> dict:
    engine = filled_engine(row, device, share=share)
    figures = step_figures(engine, row)
    prompts = [[7] * row.tokens, *[[]] * (figures["batch"] - 1)]
    seconds = times_of(lambda: engine.prefill(prompts), engine.pos.device, 1)[0] / 1e6
    return figures | {"read_s": seconds * len(prompts)}


def step_figures(engine: Engine, row: Row) -> dict:
    rows = engine.context.batch_size

    def steps() -> None:
        engine.pos.fill_(row.tokens)
        for _ in range(24):
            engine.step()

    times = [us / 24e3 for us in times_of(steps, engine.pos.device, 5)]
    held = sum(cache.bytes_stored() + cache.bytes_host() for cache in engine.caches)
    read = rows * sum(cache.bytes_read(row.tokens) for cache in engine.caches)
    figures = {"batch": rows, "ms": times[2], "least": times[0], "most": times[-1]}
    return figures | {"tokens_per_s": rows / times[2] * 1e3, "bytes": held, "bytes_read": read}


def given_rows(args: argparse.Namespace) -> list[Row]:
    lines = generate.read_text(args.rows).splitlines() if args.rows else []
    return [Row.parse(text) for text in (*args.row, *lines)]


def throughput_rows(args: argparse.Namespace) -> list[Row]:
    sizes = itertools.product(args.model, args.lengths)
    more = f" --weights {args.weights}" * bool(args.weights)
    every = [(size, method) for size in sizes for method in dict.fromkeys(("dense", *args.method))]
    return [Row(method, name, 0, n, f"--method {method}{more}") for (name, n), method in every]


@torch.no_grad()
def run_rows(args: argparse.Namespace) -> None:
    rows, table = args.rows_of(args), []
    for size in dict.fromkeys(row[1:4] for row in rows):
        alike = {"dense": Row("dense", *size)} | {
            row.label: row for row in rows if row[1:4] == size
        }
        for row in alike.values():
            about = {
                "model": row.shape,
                "batch": row.sequences,
                "length": row.tokens,
                "method": row.label,
            }
            try:
                for figures in args.measure(row, args.device):
                    table.append(about | figures)
                    told = {
                        k: f"{x:.4g}" if isinstance(x, float) else x for k, x in table[-1].items()
                    }
                    print("  ".join(f"{name} {x}" for name, x in told.items()), flush=True)
            except (UserError, RuntimeError) as error:  # most often for lack of memory
                told = generate.in_command_line_words(error)
                print(f"{row.label}: no figures: {told}".partition("\n")[0], file=sys.stderr)
            if args.csv and table:
                save_csv(args.csv, [*table[0]], table)
            gc.collect()
            torch.cuda.empty_cache()


# --------------------------------------------------------------------------- one layer's operations


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, counting what is read and what is written."""
    n = 1 << (28 if device.type == "cuda" else 25)
    source = torch.ones(n, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    fastest_us = times_of(lambda: target.copy_(source), device, 3)[0]
    return 2 * source.nbytes / (fastest_us / 1e6)


def median_us(calls: list[Callable], device: torch.device) -> float:
    """Microseconds of calls one after another, on CUDA as one graph."""

    def run() -> None:
        for call in calls:
            call()

    if device.type == "cuda":
        run()  # a capture cannot compile
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    return times_of(run, device, 15)[7]


class Recorder(TorchDispatchMode):
    """Keeps what is called of the kernels' operators: (operator, arguments, result)."""

    calls = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.namespace.startswith("kv_"):  # made by kernels.operator
            self.calls = (*self.calls, (function, args, out))
        return out


def bytes_moved(name: str, args: tuple, out) -> float:
    """The least that an operator moves: its arguments once, of a cache only the tokens and dims it
    reads."""
    tensors = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
    total = sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values()
    )
    tokens = max((x.shape[2] for x in tensors if x.ndim == 4), default=1)
    chosen = [x.shape[-1] for x in tensors if x.dtype == torch.int32 and x.ndim > 1]
    if name == "scores":  # the leading dims of latents or keys
        return total * args[0].shape[-1] / args[1].shape[-1]
    return total * (1 if name == "append" else min([tokens, *chosen])) / tokens


def time_layer(row: Row, device: str) -> Iterator[dict]:
    """Microseconds of a layer's attention in a decode step, from q, k and v to the heads' results,
    then of each operator in it, on data that no cache of the processor holds. dense_us: PyTorch's
    attention over plain K and V, on CUDA cuDNN's. limit_us: as many bytes in a large copy. share:
    limit_us / us."""
    engine = filled_engine(row, device, "--no-compile", n_layers=4, vocab_size=256)
    # first and last may be others
    layer, cache, pos = engine.model.layers[2], engine.caches[2], engine.pos
    c, like, cuda = cache.context.config, layer.attention.wqkv.weight, pos.is_cuda
    large = like.new_ones(4096, 1 << (15 if cuda else 8))
    reads = [partial(torch.amax, large, -1)] * 8
    reads_us = median_us(reads, pos.device)
    bandwidth = measure_bandwidth(pos.device)

    def cold_us(call: Callable) -> float:
        calls = [part for read in reads for part in (read, call)]
        return (median_us(calls, pos.device) - reads_us) / len(reads)

    def attention(qkv: Tensor) -> Tensor:
        return layer.attention.attend_heads(qkv, lambda *parts: cache.decode(pos, *parts))

    qkv = like.new_empty(row.sequences, len(like)).normal_()
    heads = (c.n_heads, 1), (c.n_kv_heads, row.tokens), (c.n_kv_heads, row.tokens)
    plain = [like.new_empty(row.sequences, *sizes, c.head_dim).normal_() for sizes in heads]
    dense = partial(F.scaled_dot_product_attention, *plain, enable_gqa=c.n_heads > c.n_kv_heads)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if cuda else SDPBackend.FLASH_ATTENTION):
        dense_us = cold_us(dense)
    with Recorder() as recorder:
        attention(qkv)
    whole = partial(torch.compile(attention, dynamic=False) if cuda else attention, qkv)
    timed = [("attention", whole, cache.bytes_read(row.tokens) * row.sequences)]
    for function, args, out in recorder.calls:
        name = function._opname
        timed.append((name, partial(function, *args), bytes_moved(name, args, out)))
    for name, call, nbytes in timed:
        us, limit = cold_us(call), nbytes / bandwidth * 1e6
        figures = {"us": us, "dense_us": dense_us, "limit_us": limit, "share": limit / us}
        yield {"operation": name, "bytes": round(nbytes)} | figures


# ------------------------------------------------------------------------------------------ needles


def run_needle(args: argparse.Namespace) -> None:
    """The per cent of single facts that a method finds, by a prompt's tokens and the fact's depth
    in it.

    length: tokens of a prompt. depth: per cent of it before the fact, the middle of one of --depths
    parts.
    found: per cent of such prompts whose answer is right.

        python -m extras.bench needle --method dense --method sals --lengths 2048 4096 --csv
        needle.csv"""
    tokenizer, config = load_tokenizer(args.checkpoint), load_config(args.checkpoint)
    held = calibrate.text_files(calibrate.STDLIB, held=True)
    hay = Haystack(tokenizer, [text_ids(tokenizer, held, 1 << 19, config.vocab_size)])
    candidates = [Candidate.parse(text, args.weights) for text in args.method or ["dense", "sals"]]
    check_candidates(candidates, args, {n + ANSWER_ROOM: 1 for n in args.lengths})
    args.samples, table = args.samples * args.depths, []  # depths rise with the samples
    n_tokens = len(candidates) * args.samples * sum(args.lengths)
    with ProgressLine("needle, tokens", n_tokens) as progress:
        for candidate, n in itertools.product(candidates, args.lengths):
            engine = candidate.engine(args, min(args.rows, args.samples), n + ANSWER_ROOM, least=1)
            found = retrieval_scores(engine, hay, args, args.task, n, progress)
            progress.clear()
            for i, share in enumerate(100 * found.view(args.depths, -1).mean(1)):
                depth = round(100 * (i + 0.5) / args.depths, 1)
                table.append(
                    {"method": candidate.label, "length": n, "depth": depth, "found": share.item()}
                )
                print(*table[-1].values(), flush=True)
            if args.csv:
                save_csv(args.csv, [*table[0]], table)


# ----------------------------------------------------------------------------------------- pictures


def method_of(row: dict) -> str:
    """A label without its settings."""
    return re.split(r"[,:@]|[- ]\d| [a-z] \d", row["method"])[0]


def points(rows: list[dict], name: str) -> Iterator[tuple[str, str, str, str, float, float]]:
    """What a table shows: title, labels of both axes, a line's label, and a point of it, x and y.

    An evaluation: retrieval as a part of dense's, and KL, against bytes/token and read/step, a line
    a method. With --generate KL and equal likeliest tokens against the place in what dense wrote.
    `speed`: a panel a method, its attention and PyTorch's. Losses of training: a line a run. Ranks:
    as they are."""
    if "loss" in rows[0]:
        for row in rows:
            yield "", "tokens", "training loss", row.get("run", name), row["tokens"], row["loss"]
    elif "layer" in rows[0]:
        for row, kind in itertools.product(rows, ("pre", "post")):
            yield (
                "",
                "layer",
                "dims that hold 90 % of the energy",
                f"{kind}-RoPE",
                row["layer"],
                row[kind],
            )
    elif "us" in rows[0]:
        for row, (kind, more) in itertools.product(
            rows, (("us", ""), ("dense_us", ", PyTorch's dense"))
        ):
            if row.get("operation", "attention") == "attention":
                line = f"{row['model']}, batch {row['batch']}{more}"
                yield row["method"], "tokens a row", "us a layer", line, row["length"], row[kind]
    elif drift := [column for column in rows[0] if "@" in column]:
        labels = {
            "kl": "KL to dense, nats",
            "argmax": "fraction of likeliest tokens that are dense's",
        }
        for row, (name, end) in itertools.product(
            rows[1:], (column.split("@") for column in drift)
        ):
            yield (
                "",
                "tokens that dense wrote",
                labels[name],
                row["method"],
                end,
                row[f"{name}@{end}"],
            )
    else:
        dense = {row["method"]: row for row in rows}["dense"]
        tasks = [c for c in dense if c.startswith(tuple(TASKS)) and float(dense[c] or 0) > 0]
        for row, cost in itertools.product(rows, COSTS):
            shares = [100 * float(row[task]) / float(dense[task]) for task in tasks if row[task]]
            losses = [float(row[c]) for c in row if c.startswith("kl ") and row[c]]
            if shares:
                yield "", cost, "retrieval, % of dense", method_of(row), row[cost], np.mean(shares)
            if any(losses):  # dense's 0 has no logarithm
                yield "", cost, "KL to dense, nats", method_of(row), row[cost], np.mean(losses)


def draw(png: Path, path: Path, *more: Path) -> None:
    """The picture of a table, or the overview of several."""
    from matplotlib.figure import Figure  # only now: nothing else needs it

    rows, *tables = (
        list(csv.DictReader(generate.read_text(file).splitlines())) for file in (path, *more)
    )
    if not all((rows, *tables)):
        raise UserError(f"{png.stem}: a table has no rows; give one that has some")
    figure = Figure(layout="constrained")
    if more:
        draw_overview(figure, rows, tables)
    elif "depth" in rows[0]:
        draw_needles(figure, rows)
    else:
        draw_lines(figure, rows, path.stem)
    with replacing(png.parent, png.name) as partial:
        figure.savefig(partial / png.name, dpi=150)
    print(png)


def draw_overview(figure, speeds: list[dict], tables: list[list[dict]]) -> None:
    """Left: tokens a second. Right: KL below 1 against stored bytes, a mark a table; a method's
    first row."""
    figure.set_size_inches(10, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    lengths, dense = [row["length"] for row in speeds if row["method"] == "dense"], None
    ticks, drawn = {}, {}
    for i, row in enumerate(speeds):
        rate, at = float(row["tokens_per_s"]), i + 1.3 * lengths.index(row["length"])
        if row["method"] == "dense":
            dense = rate
            left.text(0, at - 0.8, f"{int(row['length']):,} tokens a sequence", weight="bold")
        name, color = PAINTED[row["method"]]
        left.barh(at, rate, color=color)
        left.text(rate, at, f" {rate:,.0f} ({rate / dense:.2g} x)", va="center")
        ticks[at] = f"{name} x {row['batch']}"
    left.set(
        yticks=[*ticks], yticklabels=ticks.values(), ylim=(at + 0.7, -1.4), xmargin=0.4, xticks=[]
    )
    left.set_title("tokens a second, as many sequences as fit", loc="left")
    for rows, mark in zip(tables, "oDs^", strict=False):
        right.plot([], [], mark, color="black", label=rows[0]["model"].removesuffix("-Instruct"))
        for method, row in {method_of(row).lower(): row for row in reversed(rows)}.items():
            x = 100 * float(row["bytes/token"]) / float(rows[0]["bytes/token"])
            y = float(row["kl wikitext2_4096"] or 0)
            if 0 < y < 1:
                drawn.setdefault(method, []).append((x, y))
                name, color = PAINTED.get(method, ("", "0.8"))
                right.plot(
                    x, y, mark, color=color, markersize=9 if name else 6, zorder=3 if name else 2
                )
    for method in filter(drawn.get, PAINTED):
        (name, color), (x, y) = PAINTED[method], drawn[method][-1]
        right.plot(*zip(*drawn[method], strict=True), color=color)
        right.text(
            x, y, f"   {name}   ", color=color, weight="bold", ha="right" if 60 < x < 99 else "left"
        )
    right.text(98, 0.002, "dense: KL 0", weight="bold", ha="right")
    right.axvline(100, 0, 0.88, color=PAINTED["dense"][1], linestyle=":", zorder=1)
    right.set(yscale="log", ylim=(0.0015, 3), xlim=(0, 118), xlabel="stored bytes, % of dense's")
    right.yaxis.set_major_formatter("{x:g}")
    right.set_title("KL to dense, nats", loc="left")
    right.plot([], [], "s", color="0.8", label="others")
    right.legend(loc="upper left", ncols=3, frameon=False, handletextpad=0, columnspacing=1)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)


def draw_needles(figure, rows: list[dict]) -> None:
    """A panel a method: what is found at each length and depth."""
    axes = [list(dict.fromkeys(row[key] for row in rows)) for key in ("method", "length", "depth")]
    found = np.array([float(row["found"]) for row in rows]).reshape(*map(len, axes))
    methods, lengths, depths = axes
    figure.set_size_inches(3 * len(methods) + 1, 3.5)
    axes = figure.subplots(1, len(methods), sharey=True, squeeze=False)[0]
    for axis, method, of_method in zip(axes, methods, found, strict=True):
        image = axis.imshow(of_method.T, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        axis.set(title=method, xlabel="tokens", xticks=range(len(lengths)), xticklabels=lengths)
    axes[0].set(ylabel="depth of the fact, %", yticks=range(len(depths)), yticklabels=depths)
    figure.colorbar(image, ax=axes, label="facts found, %")


def draw_lines(figure, rows: list[dict], name: str) -> None:
    """A panel for each title and pair of axes, logarithmic where a range is wide."""
    panels, styles, shown = {}, {}, {}
    for *panel, line, x, y in points(rows, name):
        panels.setdefault(tuple(panel), {}).setdefault(line, []).append((float(x), float(y)))
        many = len(styles) // 10 % 8  # there are ten colours
        form = ("os^vDP*X"[many], "") if panel[1] in COSTS else (".", ("-", "--")[many % 2])
        styles.setdefault(
            line, {"color": f"C{len(styles)}", "marker": form[0], "linestyle": form[1]}
        )
    columns = 2 if len(panels) == 4 else min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure.set_size_inches(5.5 * columns, 4.5 * lines)
    for i, ((title, xlabel, ylabel), of_panel) in enumerate(panels.items(), 1):
        axis = figure.add_subplot(lines, columns, i, title=title, xlabel=xlabel, ylabel=ylabel)
        axis.grid(alpha=0.3)
        for line, at in of_panel.items():
            (shown[line],) = axis.plot(*zip(*sorted(at), strict=True), **styles[line])
        x, y = zip(*itertools.chain(*of_panel.values()), strict=True)
        axis.set_xscale("log" if max(x) > 8 * min(x) > 0 else "linear")
        axis.set_yscale("log" if max(y) > 20 * min(y) > 0 else "linear")
    labels = [line.replace("$", r"\$") for line in shown]  # matplotlib would read it as mathematics
    figure.legend(shown.values(), labels, loc="outside lower center", ncols=min(4, 2 * columns))


def run_plot(args: argparse.Namespace) -> None:
    if args.overview and len(args.tables) == 1:
        raise UserError(
            "--overview draws a table of throughput and tables of eval; give at least two tables"
        )
    pictures = (
        {"overview": args.tables} if args.overview else {path.stem: [path] for path in args.tables}
    )
    for name, paths in pictures.items():
        try:
            draw(args.out / f"{name}.png", *paths)
        except ImportError:
            raise UserError("pictures need matplotlib: pip install matplotlib") from None
        except (
            csv.Error,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise UserError(
                f"{name}: no table of eval, speed, needle, ranks or train --log ({error!r})"
            ) from None


# --------------------------------------------------------------------------------- the command line


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, measure in (
        ("step", time_step),
        ("throughput", time_throughput),
        ("speed", time_layer),
    ):
        p = commands.add_parser(
            name, help=measure.__doc__.split(":")[0], description=measure.__doc__
        )
        p.set_defaults(run=run_rows, measure=measure, rows_of=given_rows)
        generate.add_device_option(p)
        p.option("--csv", writable_file, None, "also write the table to this file")
        if measure is time_throughput:
            p.set_defaults(rows_of=throughput_rows)
            p.option("--model", str, ["llama-3.1-8b"], "shapes of random weights", nargs="+")
            p.option("--lengths", whole(1), [8192, 32768], "tokens of a row", nargs="+")
            p.option("--method", str, ["sals"], "beside dense", nargs="+")
            generate.add_weights_option(p)
        else:
            p.option("--row", str, [], "what to time; repeat it", action="append", metavar="ROW")
            p.option("--rows", Path, None, "a file of rows", metavar="FILE")
    p = commands.add_parser(
        "needle", help="find facts by length and depth", description=run_needle.__doc__
    )
    p.set_defaults(run=run_needle, facts=1)
    generate.add_model_options(p)
    row_options(p)
    p.option("--lengths", whole(1), [2048, 4096, 8192], "tokens of a prompt", nargs="+")
    p.option("--depths", whole(1), 10, "places of the fact, from the beginning to the end")
    p.option("--samples", whole(1), 5, "prompts a length and depth")
    p.option("--task", str, "single", "the fact's words", choices=("single", "reworded"))
    p.option("--csv", writable_file, None, "also write the table to this file")
    p = commands.add_parser(
        "plot", help="draw CSV files; each becomes NAME.png", description=points.__doc__
    )
    p.set_defaults(run=run_plot)
    p.add_argument(
        "tables", type=Path, nargs="+", help="a file of eval, speed, needle, ranks or train --log"
    )
    p.flag("--overview", "one picture: of a first table of throughput, and tables of eval")
    p.option("--out", writable_folder, ".", "folder of the pictures", metavar="FOLDER")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    args.run(args)


if __name__ == "__main__":
    generate.run_command(main)
