"""Time decode steps and one layer's attention over filled caches, and look for needles.

    python -m extras.bench step --row "sals|llama-3.1-8b|8|32768|--method sals" --row ...
    python -m extras.bench throughput --model llama-3.1-8b --lengths 8192 32768 --method sals kivi
    python -m extras.bench book --part steps misses
    python -m extras.bench speed --rows FILE --csv speed.csv
    python -m extras.bench needle --method dense --method sals --lengths 2048 4096 --csv needle.csv

What is timed needs no checkpoint and reads no prompt: weights are random, and the caches are filled
with random numbers. Each command says more: python -m extras.bench step --help.
"""

import argparse
import csv
import dataclasses
import gc
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import NamedTuple

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import calibrate
import kernels
from calibrate import add_command, save_csv, text_ids, writable_file, writable_folder
from compress import load_artifact, settings_from, triton_runs_on
from extras.evaluate import (
    ANSWER_ROOM,
    Candidate,
    Haystack,
    check_candidates,
    retrieval_scores,
    row_options,
)
from extras.parallel import all_gather_object, sum_of_processes
from generate import LLM, NANO, Engine, Parser, ProgressLine, clock, number_in, whole
from model import (
    SHAPES,
    Llama,
    ModelConfig,
    UserError,
    empty_model,
    free_memory,
    load_config,
    load_tokenizer,
)

# --------------------------------------------------------------------------------- rows of a table


class Row(NamedTuple):
    """What is timed: a method over a shape of random weights, and how full its cache is."""

    label: str
    shape: str
    sequences: int  # 0: as many as fit
    tokens: int  # of each sequence
    options: str = "--method dense"
    repeat: float = 0.0  # of the energy of queries: the share that all steps have in common

    @classmethod
    def parse(cls, text: str) -> "Row":
        """Reads LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS, where OPTIONS may end in --repeat SHARE.
        Raises UserError where it is not so."""
        at_least_one = whole(1)
        try:
            label, shape, sequences, tokens, options = text.split("|")
            sequences = sequences.strip()
            options, _, repeat = f" {options}".partition(" --repeat ")
            return cls(
                label=label.strip(),
                shape=shape.strip(),
                sequences=0 if sequences == "max" else at_least_one(sequences),
                tokens=at_least_one(tokens.strip()),
                options=options.strip(),
                repeat=number_in("[0, 1)")(repeat) if repeat else 0.0,
            )
        except (ValueError, argparse.ArgumentTypeError):
            form = "LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS, perhaps with --repeat 0 to below 1 last"
            raise UserError(f"row {text!r}: write {form}") from None

    def text(self) -> str:
        """What `parse` reads."""
        text = f"{self.label}|{self.shape}|{self.sequences or 'max'}|{self.tokens}|{self.options}"
        if self.repeat:
            text += f" --repeat {self.repeat}"
        return text

    def size(self) -> tuple[str, int, int]:
        """What rows must share to be compared."""
        return self.shape, self.sequences, self.tokens


def given_rows(args: argparse.Namespace) -> list[Row]:
    """The rows of --row, then those of the file of --rows. UserError where a shape is not known, or
    two rows of one size have the same label."""
    texts = list(args.row)
    if args.rows:
        texts += generate.read_text(args.rows).splitlines()
    rows = [Row.parse(text) for text in texts]
    seen = set()
    for row in rows:
        shape_named(row.shape)
        name = (row.label, row.size())
        if name in seen:
            raise UserError(f"two rows of one size are named {row.label!r}; name each differently")
        seen.add(name)
    return rows


def capacity_rows(
    shapes: list[str], lengths: list[int], methods: list[str], weights: str | None = None
) -> list[Row]:
    """Rows of as many sequences as fit: one for each shape, length and method, dense first."""
    rows = []
    methods = list(dict.fromkeys(["dense", *methods]))  # each once
    for shape in shapes:
        for n_tokens in lengths:
            for method in methods:
                options = f"--method {method}"
                if weights:
                    options += f" --weights {weights}"
                rows.append(Row(method, shape, 0, n_tokens, options))
    return rows


def by_size(rows: list[Row]) -> list[Row]:
    """The rows, those of one size one after another, with a dense one before them.

    A row with the label "dense" takes the place of the dense one."""
    ordered = []
    for size in dict.fromkeys(row.size() for row in rows):
        by_label = {"dense": Row("dense", *size)}
        for row in rows:
            if row.size() == size:
                by_label[row.label] = row
        ordered += by_label.values()
    return ordered


# ----------------------------------------------------------------------------- caches that are full

ROOM = 256  # tokens of a cache beyond those that it holds


def shape_named(name: str) -> ModelConfig:
    """A model's shape: one of SHAPES, or the embedded model's. UserError where there is none."""
    if name == "nano":
        return load_config(NANO)
    if name not in SHAPES:
        raise UserError(f"no shape {name!r}; the shapes are: {', '.join([*SHAPES, 'nano'])}")
    return SHAPES[name]


def llm_of(
    row: Row, device: str, more_options: tuple[str, ...] = (), changes: dict | None = None
) -> LLM:
    """Random weights of a row's shape, for its method.

    more_options: of generate.py, after the row's. changes: fields of the shape that have another
    value."""
    changes = dict(changes or {})
    if row.repeat:
        changes["qkv_bias"] = True
    line = f"--prompt {row.tokens} {row.options} --device {device}"
    args = generate.parse_args([*line.split(), *more_options])
    llm = LLM(
        dataclasses.replace(shape_named(row.shape), **changes),
        args.method,
        max_seq_length=row.tokens + ROOM,
        device=device,
        dtype=args.dtype,
        weights=args.weights,
        use_compile=args.compile,
        use_kernels=args.kernels,
        **args.options,
    )
    if row.repeat:
        share_queries(llm.model, row.repeat)
    return llm


def share_queries(model: Llama, share: float) -> None:
    """Makes the queries of different tokens alike, as those of a text are: a random query, the same
    for all tokens of a layer, is added as the bias of wqkv. It is this share of a query's energy.

    A method that selects tokens then selects many of the same ones in each step."""
    c = model.config
    # A query of random weights (model.random_model) has this size, since what it is made of was
    # normed.
    query_std = 0.02 * math.sqrt(c.dim)
    for layer in model.layers:
        bias_of_q = layer.attention.wqkv.bias[: c.n_heads * c.head_dim]
        bias_of_q.normal_(0, query_std * math.sqrt(share / (1 - share)))


def filled_engine(
    row: Row, device: str, more_options: tuple[str, ...] = (), changes: dict | None = None
) -> Engine:
    """An engine over random weights, whose caches hold random numbers in every place. The other
    arguments are those of llm_of."""
    llm = llm_of(row, device, more_options, changes)
    engine = llm.build_engine(row.sequences or sequences_that_fit(llm))
    fill_caches(engine)
    engine.pos.fill_(row.tokens)
    return engine


def sequences_that_fit(llm: LLM, kept_free: float = 0) -> int:
    """How many sequences fit into the memory that is free beside the weights, less so many bytes of
    the device's."""
    artifact = load_artifact(llm.source, llm.method, llm.model)
    needs_of_one = generate.row_bytes(
        llm.model, llm.method, llm.settings, artifact, llm.max_seq_length
    )
    device = llm.model.norm.weight.device.type
    fits = []
    for kind, needed in needs_of_one.items():
        free = free_bytes(kind)
        if kind == device:
            free -= kept_free
        fits.append(free / max(1, needed))
    # Several processes must agree: their GPUs differ in what is free.
    return min(all_gather_object(max(1, int(min(fits)))))


def reading_bytes(llm: LLM, n_tokens: int) -> int:
    """Bytes of a GPU that reading a prompt takes beside the weights and the caches: activations,
    and the keys and values of a layer before they are compressed."""
    engine = llm.build_engine(1)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine.prefill([[7] * n_tokens])  # any token
    llm.engine = None
    return torch.cuda.max_memory_allocated() - before


def free_bytes(kind: str) -> float:
    """Bytes that are free on a GPU ("cuda") or, as Linux tells it, in host memory ("cpu")."""
    if kind == "cuda":
        return free_memory(torch.device(kind))
    available = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    return int(available[1]) * 1024


def fill_caches(engine: Engine) -> None:
    """Writes random numbers into every place of the buffers of numbers and of codes.

    Tables of positions and slots stay as they are: not every number would be one."""
    for cache in engine.caches:
        for name, buffer in cache.named_buffers():
            # A part at a time: 2^28 numbers, or a row of the batch where the buffer is a view that
            # does not lie in one piece.
            parts = buffer
            if buffer.is_contiguous():
                parts = buffer.view(-1).split(1 << 28)
            for part in parts:
                fill_randomly(name, part)


def fill_randomly(name: str, x: Tensor) -> None:
    """Random numbers for a part of the buffer of this name."""
    if x.dtype == torch.float8_e4m3fn:
        x.view(torch.uint8).random_(0, 127)  # it has no random_ of its own; 127 is NaN
    elif x.dtype == torch.uint8:
        x.random_(0, 256)
    elif x.dtype == torch.int8:
        x.random_(-127, 128)
    elif x.is_floating_point() and "scale" in name:
        x.uniform_(0.001, 0.01)
    elif x.is_floating_point():
        x.normal_()


# ---------------------------------------------------------------------------- the time of a step


def times_of(run: Callable, device: torch.device, runs: int) -> list[float]:
    """Microseconds of each run, rising. One more run, the first, is not counted."""
    times = []
    for _ in range(1 + runs):
        started = clock(device)
        run()
        seconds = clock(device) - started
        times.append(seconds * 1e6)
    return sorted(times[1:])


STEPS = 24  # decode steps of a run


def step_figures(engine: Engine, row: Row) -> dict:
    """The columns of run_step, but for what names the row."""
    n_sequences = engine.context.batch_size

    def steps() -> None:
        engine.pos.fill_(row.tokens)
        for _ in range(STEPS):
            engine.step()

    times_ms = [us / 1000 / STEPS for us in times_of(steps, engine.pos.device, runs=5)]
    median_ms = times_ms[2]
    caches = engine.caches
    stored = sum_of_processes(sum(cache.bytes_stored() + cache.bytes_host() for cache in caches))
    read_by_one = sum_of_processes(sum(cache.bytes_read(row.tokens) for cache in caches))
    return {
        "batch": n_sequences,
        "ms": median_ms,
        "least": times_ms[0],
        "most": times_ms[-1],
        "tokens_per_s": n_sequences / median_ms * 1000,
        "bytes": stored,
        "bytes_read": n_sequences * read_by_one,
        "misses": generate.mean_miss_rate(engine.caches, n_sequences),
    }


def time_step(row: Row, device: str) -> list[dict]:
    """The line of run_step's table for a row."""
    return [step_figures(filled_engine(row, device), row)]


# Of the sequences that fit by the caches' formula, the share that is tried: what a step computes
# takes memory, too, and free memory may lie in pieces. A try takes about a minute on a GPU.
TRIED_SHARES = (0.99, 0.98, 0.96, 0.93, 0.9, 0.85, 0.8, 0.6)
MADE = [1024, 4096]  # tokens that a request makes


def time_throughput(row: Row, device: str, made: list[int]) -> list[dict]:
    """The line of run_throughput's table for a row. UserError where one sequence is too much."""
    most = most_sequences(row, device)
    for n_sequences in dict.fromkeys(max(1, round(share * most)) for share in TRIED_SHARES):
        free_unused_memory()
        # Unlike `except`, suppress does not hold the caches of a try that failed.
        with suppress(torch.OutOfMemoryError):
            return [capacity_figures(row._replace(sequences=n_sequences), device, made)]
    raise UserError("not enough memory")


def most_sequences(row: Row, device: str) -> int:
    """How many sequences fit while the prompt of one is read.

    What reading takes is measured. A prompt of 131072 tokens takes more than ten times as much as
    one of 8192 tokens, so that no share of the memory suits both."""
    llm = llm_of(row, device, ("--no-compile",))
    kept_free = 0
    if device == "cuda":  # of a CPU's memory the peak is not known
        kept_free = reading_bytes(llm, row.tokens)
    free_unused_memory()
    return sequences_that_fit(llm, kept_free)


def capacity_figures(row: Row, device: str, made: list[int]) -> dict:
    """step_figures, read_s, and the rate of whole requests."""
    engine = filled_engine(row, device)
    figures = step_figures(engine, row)
    prompts = [[] for _ in range(row.sequences)]
    prompts[0] = [7] * row.tokens  # any token
    times_us = times_of(lambda: engine.prefill(prompts), engine.pos.device, runs=1)
    figures["read_s"] = times_us[0] / 1e6 * row.sequences
    for n_made in made:
        figures[f"request_rate_{n_made}"] = request_rate(figures, n_made)
    return figures


def time_prompt(row: Row, device: str) -> list[dict]:
    """The line of a table of prompts: seconds in which the prompts of a row's sequences are read,
    the bytes of their caches, and the most memory of a GPU that was in use meanwhile."""
    llm = llm_of(row, device, ("--no-compile",))
    engine = llm.build_engine(row.sequences)
    generator = torch.Generator().manual_seed(0)
    size = (row.sequences, row.tokens)
    prompts = torch.randint(llm.model.config.vocab_size, size, generator=generator).tolist()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    # Reading 131072 tokens takes ten seconds and more, and varies little.
    runs = 3 if row.tokens < 1 << 17 else 1
    times_us = times_of(lambda: engine.prefill(prompts), engine.pos.device, runs)
    times_s = [us / 1e6 for us in times_us]
    caches = engine.caches
    return [
        {
            "read_s": times_s[runs // 2],
            "least_s": times_s[0],
            "most_s": times_s[-1],
            "bytes": sum_of_processes(sum(cache.bytes_stored() for cache in caches)),
            "host_bytes": sum_of_processes(sum(cache.bytes_host() for cache in caches)),
            "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        }
    ]


def request_rate(figures: dict, n_made: int) -> float:
    """Tokens a second of whole requests: all prompts are read, then n_made steps are made."""
    seconds = figures["read_s"] + n_made * figures["ms"] / 1000
    return figures["batch"] * n_made / seconds


def free_unused_memory() -> None:
    """Gives the memory of engines that nobody holds back to the GPU."""
    gc.collect()
    torch.cuda.empty_cache()


# --------------------------------------------------------------------------- one layer's operations


def time_layer(row: Row, device: str) -> Iterator[dict]:
    """The lines of run_speed's table for a row: a layer's attention, then its operators."""
    engine = filled_engine(
        row, device, more_options=("--no-compile",), changes={"n_layers": 4, "vocab_size": 256}
    )
    # Not the first layer nor the last, which a method may treat differently.
    layer = engine.model.layers[2]
    cache = engine.caches[2]
    pos = engine.pos
    n_sequences = engine.context.batch_size
    wqkv = layer.attention.wqkv.weight  # [n, dim]
    bandwidth = measure_bandwidth(pos.device)
    cold = ColdTimer(wqkv)

    def attention(qkv: Tensor) -> Tensor:
        return layer.attention.attend_heads(qkv, lambda *parts: cache.decode(pos, *parts))

    # 1. PyTorch's attention over plain K and V, for comparison.
    c = cache.context.config
    q = wqkv.new_empty(n_sequences, c.n_heads, 1, c.head_dim).normal_()
    k = wqkv.new_empty(n_sequences, c.n_kv_heads, row.tokens, c.head_dim).normal_()
    v = wqkv.new_empty(n_sequences, c.n_kv_heads, row.tokens, c.head_dim).normal_()
    is_grouped = c.n_heads > c.n_kv_heads
    dense = partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=is_grouped)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        flash_us = cold.us(dense)
    dense_us = flash_us
    if pos.is_cuda:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            dense_us = cold.us(dense)

    # 2. What is to be timed: the attention as a whole, and each operator that it calls.
    qkv = wqkv.new_empty(n_sequences, len(wqkv)).normal_()
    with Recorder() as recorder:
        attention(qkv)
    if pos.is_cuda:
        attention = torch.compile(attention, dynamic=False)
    nbytes = cache.bytes_read(row.tokens) * n_sequences
    timed = [Timed("attention", partial(attention, qkv), nbytes)]
    for function, args, result in recorder.calls:
        name = function._opname
        timed.append(Timed(name, partial(function, *args), bytes_moved(name, args, result)))

    # 3. Time it.
    for name, run, nbytes in timed:
        us = cold.us(run)
        limit_us = nbytes / bandwidth * 1e6
        yield {
            "operation": name,
            "bytes": round(nbytes),
            "us": us,
            "dense_us": dense_us,
            "flash_us": flash_us,
            "limit_us": limit_us,
            "share": limit_us / us,
        }


class Timed(NamedTuple):
    """An operation to be timed."""

    name: str
    run: Callable
    nbytes: float  # that it must move


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, counting what is read and what is written."""
    n = 1 << (28 if device.type == "cuda" else 25)
    source = torch.ones(n, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    fastest_us = times_of(lambda: target.copy_(source), device, runs=3)[0]
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
    return times_of(run, device, runs=15)[7]


class ColdTimer:
    """Times a call on data that no cache of the processor holds: before each call it reads a matrix
    that is larger than they are, whose time it takes off again."""

    N_CALLS = 8

    def __init__(self, like: Tensor):
        """like: a tensor of the device and dtype."""
        self.device = like.device
        width = 1 << (15 if like.is_cuda else 8)
        matrix = like.new_ones(4096, width)
        self.read = partial(torch.amax, matrix, -1)
        self.read_us = median_us([self.read] * self.N_CALLS, self.device)

    def us(self, call: Callable) -> float:
        """Microseconds of a call."""
        calls = [self.read, call] * self.N_CALLS
        return (median_us(calls, self.device) - self.read_us) / self.N_CALLS


class Call(NamedTuple):
    """What was called: an operator of torch.ops, with its arguments and its result."""

    function: Callable
    args: tuple
    result: object


class Recorder(TorchDispatchMode):
    """Keeps what is called of the kernels' operators."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace.startswith("kv_"):  # made by kernels.operator
            self.calls.append(Call(function, args, result))
        return result


def bytes_moved(name: str, args: tuple, result: object) -> float:
    """The least that an operator moves: its arguments once, of a cache only the tokens and dims it
    reads."""
    tensors = [x for x in tree_leaves((args, result)) if isinstance(x, Tensor)]
    bytes_of_storage = {}  # arguments may be views of one buffer
    for x in tensors:
        storage = x.untyped_storage()
        bytes_of_storage[storage.data_ptr()] = storage.nbytes()
    total = sum(bytes_of_storage.values())

    if name in ("scores", "block_scores"):
        # They read the leading dims of latents or keys: as many as queries have.
        queries, vectors, *_ = args
        return total * queries.shape[-1] / vectors.shape[-1]

    n_tokens = 1  # of a cache [B, H, S, width]
    n_read = []  # an index [B, ..., n] names what is read
    for x in tensors:
        if x.ndim == 4:
            n_tokens = max(n_tokens, x.shape[2])
        if x.dtype == torch.int32 and x.ndim > 1:
            n_read.append(x.shape[-1])
    if name == "append":
        return total / n_tokens
    return total * min([n_tokens, *n_read]) / n_tokens


# ------------------------------------------------------------------------------ tables of such rows


def run_step(args: argparse.Namespace) -> None:
    """Time a decode step over caches that are full, with a dense row for comparison.

    A row, of --row or of a line of the file of --rows, is LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS:

        sals|llama-3.1-8b|8|32768|--method sals --critical 444

    SHAPE is one of generate.py's --random_weights, or nano. SEQUENCES is a number, or max for as
    many as fit. OPTIONS are options of generate.py. Dense comes first for each shape, sequences and
    tokens.

    The columns:
      model, method   the shape, and the row's label
      batch, length   sequences, and tokens of each
      ms              milliseconds of a step, the median of five runs of 24 steps
      least, most     the least and the most of the five
      tokens_per_s    tokens a second, of all sequences
      bytes           of all caches, those in host memory included
      bytes_read      that a step must read of the caches
      misses          of LRQK's selected tokens the part that was fetched from host memory

    Of random weights nearly all selected tokens are fetched, since the queries of two steps have
    nothing in common. With --repeat a part of them is the same in all steps, so that fewer are, as
    in a text."""
    rows = [row._replace(repeat=row.repeat or args.repeat) for row in given_rows(args)]
    run_rows(rows, time_step, args)


def run_throughput(args: argparse.Namespace) -> None:
    """Time a decode step with as many sequences as the memory holds beside the weights.

    There is a row for each of --model, --lengths and --method, with dense before them. What reading
    a prompt takes of the memory is measured first, and left free.

    The columns:
      model, method   the shape, and the method
      batch, length   sequences, as many as fit, and tokens of each
      ms              milliseconds of a step, the median of five runs of 24 steps
      least, most     the least and the most of the five
      tokens_per_s    tokens a second, of all sequences
      bytes           of all caches, those in host memory included
      bytes_read      that a step must read of the caches
      misses          of LRQK's selected tokens the part that was fetched from host memory
      read_s          seconds to read the prompts of all sequences; one is read and timed
      request_rate_1024, request_rate_4096
                      tokens a second of whole requests that make 1024 or 4096 tokens each (--made):
                      batch * made / (read_s + made * ms / 1000). A step counts as over `length`
                      tokens, though the sequences grow by those that are made"""
    rows = capacity_rows(args.model, args.lengths, args.method, args.weights)
    run_rows(rows, partial(time_throughput, made=args.made), args)


def run_speed(args: argparse.Namespace) -> None:
    """Time one layer's attention in a decode step, and each operator in it.

    It goes from q, k and v to the heads' results, on data that no cache of the processor holds.

    A row, of --row or of a line of the file of --rows, is LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS:

        sals|llama-3.1-8b|8|32768|--method sals --critical 444

    SHAPE is one of generate.py's --random_weights, or nano; OPTIONS are options of generate.py.
    Dense comes first for each shape, sequences and tokens.

    The columns:
      model, method   the shape, and the row's label
      batch, length   sequences, and tokens of each
      operation       attention as a whole, or an operator of kernels.py
      bytes           that it must move
      us              microseconds that it takes
      dense_us        those of PyTorch's attention over plain K and V, on CUDA cuDNN's
      flash_us        those of PyTorch's FlashAttention-2 over the same
      limit_us        those of a large copy that moves as many bytes
      share           limit_us / us"""
    run_rows(given_rows(args), time_layer, args)


@torch.no_grad()
def run_rows(
    rows: list[Row],
    measure: Callable[[Row, str], Iterable[dict]],
    args: argparse.Namespace,
) -> None:
    """Prints the lines that `measure` has of each row, and writes them to --csv as they come.
    Raises UserError if no row has any."""
    rows = by_size(rows)
    table = []
    with ProgressLine("rows", len(rows)) as progress:
        for row in rows:
            for line in measured_lines(row, measure, args.device, progress):
                table.append(line)
            if args.csv and table:
                save_csv(args.csv, list(table[0]), table)
    if rows and not table:
        raise UserError("no row could be measured; why stands above")


def measured_lines(
    row: Row,
    measure: Callable[[Row, str], Iterable[dict]],
    device: str,
    progress: ProgressLine,
) -> Iterator[dict]:
    """The lines that `measure` has of a row, which are printed, too.

    A row that cannot be measured, most often for lack of memory, is named, and has none."""
    about = {
        "model": row.shape,
        "batch": row.sequences,
        "length": row.tokens,
        "method": row.label,
    }
    try:
        for figures in measure(row, device):
            line = about | figures
            progress.clear()
            print_line(line)
            yield line
    except (UserError, RuntimeError) as error:
        fault = f"{row.label}: no figures: {generate.in_command_line_words(error)}"
        progress.clear()
        print(fault.split("\n")[0], file=sys.stderr)
    free_unused_memory()
    progress.tick()


def print_line(figures: dict) -> None:
    """Prints a table's line, each figure with its name."""
    parts = []
    for name, figure in figures.items():
        if isinstance(figure, float):
            figure = f"{figure:.4g}"
        if figure is not None:
            parts.append(f"{name} {figure}")
    print("  ".join(parts), flush=True)


# ------------------------------------------------------------------------- the tables of results.md


class Part(NamedTuple):
    """One of the tables, which is a file NAME.csv: how its rows are measured, and which they are.

    A dense row of each size need not be among them (`by_size`)."""

    measure: Callable[[Row, str], Iterable[dict]]
    rows: list[Row]


M8B = "llama-3.1-8b"
M7B = "llama-2-7b"
SALS = "--method sals"
SALS_SUM = "--method sals --rank 0.125 --score sum --keep 0.125"
SALS_PAPER = "--method sals --variant paper --rank 0.125 --bits 2 --keep 0.125"
LOKI = "--method loki --k 0.125 --d 0.5"
LRQK = "--method lrqk --k 2048"

STEP_ROWS = [
    Row("sals", M8B, 8, 32768, SALS),
    Row("sals paper", M8B, 8, 32768, "--method sals --variant paper"),
    Row("sals sum", M8B, 8, 32768, "--method sals --score sum"),
    Row("loki", M8B, 8, 32768, LOKI),
    Row("loki group", M8B, 8, 32768, f"{LOKI} --share group"),
    Row("elitekv", M8B, 8, 32768, "--method elitekv"),
    Row("fdc", M8B, 8, 32768, "--method fdc"),
    Row("fdc by heads", M8B, 8, 32768, "--method fdc --no-balanced"),
    Row("fdc equal ranks", M8B, 8, 32768, "--method fdc --no-adaptive"),
    Row("topk", M8B, 8, 32768, "--method topk --keep 4096"),
    Row("kivi", M8B, 8, 32768, "--method kivi"),
    Row("kivi 2 bits", M8B, 8, 32768, "--method kivi --bits 2"),
    Row("quest", M8B, 8, 32768, "--method quest --keep 4096"),
    Row("doublesparse", M8B, 8, 32768, "--method doublesparse --keep 4096"),
    Row("h2o", M8B, 8, 32768, "--method h2o --keep 4096"),
    Row("palu", M8B, 8, 32768, "--method palu"),
    Row("fp8", M8B, 8, 32768, "--method fp8"),
    Row("fp8 centre", M8B, 8, 32768, "--method fp8 --centre"),
]
SHAPE_ROWS = [
    Row("sals", M8B, 1, 131072, SALS),
    Row("sals", M8B, 8, 4096, SALS),
    Row("sals", M8B, 8, 8192, SALS),
    Row("sals", M8B, 8, 16384, SALS),
    Row("sals", M8B, 64, 32768, SALS),
    Row("sals", M7B, 8, 4096, SALS),
    Row("sals", M7B, 4, 32768, f"{SALS} --critical 956"),
    Row("loki", M7B, 4, 32768, LOKI),
    Row("lrqk", M8B, 1, 65536, LRQK),
    Row("lrqk", M8B, 1, 32768, LRQK),
    Row("lrqk", M8B, 4, 32768, LRQK),
    Row("lrqk", M8B, 16, 32768, LRQK),
    Row("sals", M8B, 160, 32768, SALS),
    Row("sals", M8B, 512, 8192, SALS),
    Row("dense int8", M8B, 8, 32768, "--method dense --weights int8"),
    Row("sals int8", M8B, 8, 32768, f"{SALS} --weights int8"),
]
LIKE_FOR_LIKE_SIZES = [  # shape, sequences, tokens
    (M8B, 8, 32768),
    (M7B, 4, 32768),
    (M7B, 8, 4096),
    (M8B, 8, 4096),
    (M8B, 8, 8192),
    (M8B, 8, 16384),
]
LIKE_FOR_LIKE_ROWS = []  # the SALS paper's settings, by our codes and by its variant
for size in LIKE_FOR_LIKE_SIZES:
    LIKE_FOR_LIKE_ROWS.append(Row("sals sum 12.5 %", *size, SALS_SUM))
    LIKE_FOR_LIKE_ROWS.append(Row("sals paper 12.5 %", *size, SALS_PAPER))
MISS_ROWS = [  # the more queries have in common, the fewer tokens miss, as in a text
    Row("lrqk repeat 0.5", M8B, 1, 65536, LRQK, repeat=0.5),
    Row("lrqk repeat 0.9", M8B, 1, 65536, LRQK, repeat=0.9),
    Row("lrqk repeat 0.95", M8B, 1, 65536, LRQK, repeat=0.95),
    Row("lrqk repeat 0.99", M8B, 1, 65536, LRQK, repeat=0.99),
    Row("lrqk slots 0", M8B, 1, 65536, f"{LRQK} --slots 0"),
    # Every key and value comes from host memory in every step, as where all of them are offloaded.
    Row("all fetched", M8B, 1, 65536, "--method lrqk --k 65536 --slots 0"),
]
PROMPT_ROWS = [
    Row("sals", M8B, 1, 32768, SALS),
    Row("lrqk", M8B, 1, 32768, LRQK),
    Row("elitekv", M8B, 1, 32768, "--method elitekv"),
    Row("kivi", M8B, 1, 32768, "--method kivi"),
    Row("fp8", M8B, 1, 32768, "--method fp8"),
]
for prompt_tokens in (8192, 32768, 131072):
    PROMPT_ROWS += [
        Row("fdc", M8B, 1, prompt_tokens, "--method fdc"),
        Row("fdc by heads", M8B, 1, prompt_tokens, "--method fdc --no-balanced"),
        Row("fdc equal ranks", M8B, 1, prompt_tokens, "--method fdc --no-adaptive"),
        Row("palu", M8B, 1, prompt_tokens, "--method palu"),
    ]
CAPACITY_ROWS = capacity_rows(
    [M8B], [8192, 32768, 131072], ["fp8", "kivi", "sals", "elitekv", "fdc", "loki"]
)
CAPACITY_ROWS += [
    Row("palu", M8B, 0, 32768, "--method palu"),
    Row("fp8 centre", M8B, 0, 32768, "--method fp8 --centre"),
    # SALS attends to 512 tokens by default.
    Row("sals 1024", M8B, 0, 32768, f"{SALS} --critical 956"),
    Row("sals 2048", M8B, 0, 32768, f"{SALS} --critical 1980"),
]
CAPACITY_ROWS_INT8 = capacity_rows([M8B], [8192, 32768], ["sals"], weights="int8")

time_capacity = partial(time_throughput, made=MADE)
PARTS = {
    "steps": Part(time_step, STEP_ROWS + SHAPE_ROWS),
    "likeforlike": Part(time_step, LIKE_FOR_LIKE_ROWS),
    "misses": Part(time_step, MISS_ROWS),
    "prompts": Part(time_prompt, PROMPT_ROWS),
    "throughput": Part(time_capacity, CAPACITY_ROWS),
    "throughput-int8": Part(time_capacity, CAPACITY_ROWS_INT8),
}


def run_book(args: argparse.Namespace) -> None:
    """Measure the tables of docs/results.md on steps, prompts and throughput, on this machine.

    Each part is a list of rows in this file, and becomes a table NAME.csv in the folder of --out. A
    row is written as soon as it is measured. One that the table has already is left out, unless
    --again is given, so a run that ended early goes on where it was. A row that cannot be measured,
    most often for lack of memory, is named, and the others go on. A table keeps no rows that are
    not the part's.

    The part "prompts" times how long prompts are read: read_s, least_s and most_s, in seconds. Its
    bytes are those of the caches on the device, host_bytes those in host memory, and peak_bytes is
    the most of a GPU's memory that was in use meanwhile, weights and all.

    The columns are those of step, or of throughput, or these, and:
      row             as step takes it; where it has changed, it is measured again
      version         the commit of this repository, empty where git knows none
      date            the day, in UTC
      device          the GPU's name
      torch, triton   their versions"""
    generate.device_and_dtype(args.device)  # refused now, and not by each row
    for name in args.part:
        measure_part(name, args)


@torch.no_grad()
def measure_part(name: str, args: argparse.Namespace) -> None:
    """Measures the rows of a part that its table does not have."""
    part = PARTS[name]
    path = args.out / f"{name}.csv"
    args.out.mkdir(parents=True, exist_ok=True)
    rows = by_size(part.rows)
    written = {}
    if path.exists():
        for line in csv.DictReader(generate.read_text(path).splitlines()):
            written[line.get("row")] = line
    line_of = {row: written.get(row.text()) for row in rows}
    if all(line_of.values()) and not args.again:
        print(f"{path} has all rows of {name}; --again measures them anew", file=sys.stderr)
        return
    with ProgressLine(f"rows of {name}", len(rows)) as progress:
        for row in rows:
            if line_of[row] and not args.again:
                progress.tick()
                continue
            for line in measured_lines(row, part.measure, args.device, progress):
                line_of[row] = line | circumstances(row, args.device)
                table = [measured for measured in line_of.values() if measured]
                save_csv(path, list(line_of[row]), table)


def circumstances(row: Row, device: str) -> dict[str, str]:
    """The columns of run_book that say how a row was measured."""
    return {
        "row": row.text(),
        "version": source_version(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "device": generate.device_name(torch.device(device)),
        "torch": torch.__version__,
        "triton": kernels.triton.__version__ if kernels.triton else "",
    }


def source_version() -> str:
    """The commit of the repository of this file, or "" where git knows none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    with suppress(OSError):  # there may be no git
        folder = Path(__file__).parent
        return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()
    return ""


# ------------------------------------------------------------------------------------------ needles


def run_needle(args: argparse.Namespace) -> None:
    """Find single facts in long prompts, by the prompt's length and the fact's depth in it.

        python -m extras.bench needle --method dense --method sals --lengths 2048 4096

    The columns:
      method          as it is written on the command line
      length          tokens of a prompt
      depth           per cent of it that are before the fact: the middle of one of --depths parts
      found           per cent of such prompts whose answer is right"""
    tokenizer = load_tokenizer(args.checkpoint)
    config = load_config(args.checkpoint)
    files = calibrate.text_files(calibrate.STDLIB, held=True)
    hay = Haystack(tokenizer, [text_ids(tokenizer, files, 1 << 19, config.vocab_size)])
    candidates = [Candidate.parse(text, args.weights) for text in args.method or ["dense", "sals"]]
    check_candidates(candidates, args, {n + ANSWER_ROOM: 1 for n in args.lengths}, "--lengths")
    n_samples = args.depths * args.samples  # of all depths, which rise with the samples
    table = []
    n_tokens = len(candidates) * n_samples * sum(args.lengths)
    with ProgressLine("needle, tokens", n_tokens) as progress:
        for candidate in candidates:
            for n in args.lengths:
                rows = min(args.rows, n_samples)
                engine = candidate.engine(args, rows, n + ANSWER_ROOM, least=1)
                scores = retrieval_scores(
                    engine, hay, args.task, n, n_samples, n_facts=1, progress=progress
                )
                progress.clear()
                of_depths = 100 * scores.view(args.depths, -1).mean(1)
                for i, found in enumerate(of_depths.tolist()):
                    line = {
                        "method": candidate.label,
                        "length": n,
                        "depth": round(100 * (i + 0.5) / args.depths, 1),
                        "found": found,
                    }
                    table.append(line)
                    print(*line.values(), flush=True)
                if args.csv:
                    save_csv(args.csv, list(table[0]), table)


# --------------------------------------------------------------------------------- the command line


def add_row_options(parser: Parser) -> None:
    """Options of the commands that time rows of one's own."""
    row = "what to time, LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS; repeat it"
    parser.option("--row", str, [], row, action="append", metavar="ROW")
    parser.option("--rows", Path, None, "a file of rows, one a line", metavar="FILE")


def add_table_options(parser: Parser) -> None:
    """Options of every command that times rows."""
    generate.add_device_option(parser)
    add_csv_option(parser)


def add_csv_option(parser: Parser) -> None:
    parser.option("--csv", writable_file, None, "also write the table to this file", metavar="FILE")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    step = add_command(commands, "step", run_step)
    add_table_options(step)
    add_row_options(step)
    repeat = "share of a query's energy that all steps have in common"
    step.option("--repeat", number_in("[0, 1)"), 0.0, repeat, metavar="SHARE")

    throughput = add_command(commands, "throughput", run_throughput)
    add_table_options(throughput)
    shapes = "shapes of random weights, as generate.py's --random_weights has them, or nano"
    throughput.option("--model", str, ["llama-3.1-8b"], shapes, nargs="+", metavar="SHAPE")
    lengths = "tokens of a sequence"
    throughput.option("--lengths", whole(1), [8192, 32768], lengths, nargs="+", metavar="N")
    methods = "methods beside dense"
    throughput.option("--method", str, ["sals"], methods, nargs="+", metavar="METHOD")
    made = "tokens that a whole request makes"
    throughput.option("--made", whole(1), MADE, made, nargs="+", metavar="N")
    generate.add_weights_option(throughput)

    book = add_command(commands, "book", run_book)
    generate.add_device_option(book)
    book.option("--out", writable_folder, "book", "folder of the tables", metavar="FOLDER")
    parts = "parts to measure"
    book.option("--part", str, [*PARTS], parts, nargs="+", choices=[*PARTS], metavar="NAME")
    book.flag("--again", "also measure what the tables have already")

    speed = add_command(commands, "speed", run_speed)
    add_table_options(speed)
    add_row_options(speed)

    needle = add_command(commands, "needle", run_needle)
    generate.add_model_options(needle)
    row_options(needle)
    lengths = "tokens of a prompt"
    needle.option("--lengths", whole(1), [2048, 4096, 8192], lengths, nargs="+", metavar="N")
    depths = "places of the fact, from the beginning to the end"
    needle.option("--depths", whole(1), 10, depths, metavar="N")
    samples = "prompts of each length and depth"
    needle.option("--samples", whole(1), 5, samples, metavar="N")
    task = "the fact's words; reworded: other words than nano was trained on"
    needle.option("--task", str, "single", task, choices=("single", "reworded"))
    add_csv_option(needle)

    add_fit_table(commands)
    add_ragged(commands)
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    args.run(args)


# --------------------------------------------------------------------------- how many tokens fit

GIGABYTE = 10**9
KEPT_FREE = 0.1  # of a GPU's memory: what a step computes, and the CUDA context
FIT_SHAPES = {
    "llama-3.1-8b": SHAPES["llama-3.1-8b"],
    "llama-2-7b": SHAPES["llama-2-7b"],
    "qwen2.5-7b": ModelConfig(
        dim=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        head_dim=128,
        ffn_dim=18944,
        vocab_size=152064,
        max_positions=32768,
        rope_theta=1e6,
        norm_eps=1e-6,
        qkv_bias=True,
        family="qwen2",
    ),
}


def tokens_that_fit(config: ModelConfig, method: str, memories: list[float]) -> list[int]:
    """Tokens that GPUs of so many bytes hold beside the weights in bf16, where KEPT_FREE of a GPU
    stays free: in sequences of 32768 tokens, or of the model's window if that is less."""
    model = empty_model(config, torch.bfloat16)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    length = min(32768, config.max_positions)
    settings = settings_from(method, {})
    artifact = load_artifact(config, method, model)
    token = generate.row_bytes(model, method, settings, artifact, length)["meta"] / length
    return [max(0, int((memory * (1 - KEPT_FREE) - weights) / token)) for memory in memories]


def run_fit_table(args: argparse.Namespace) -> None:
    """Print how many thousand tokens of each model fit GPUs of some sizes, by the caches' formulas.

    A tenth of the memory is left free. Weights are in bf16. Tokens are counted in sequences of
    32768, or of the model's window if that is less. What LRQK keeps in host memory is not
    counted."""
    print("| model | GPU |", *(f"{method} |" for method in args.method))
    print("|---|---|" + "---|" * len(args.method))
    memories = [gigabytes * GIGABYTE for gigabytes in args.gigabytes]
    for name in args.model:
        config = FIT_SHAPES[name]
        columns = []
        for method in args.method:
            if method == "elitekv" and config.qkv_bias:  # it is uptrained, which refuses biases
                columns.append(["-"] * len(memories))
            else:
                fits = tokens_that_fit(config, method, memories)
                columns.append([f"{tokens // 1000}K" for tokens in fits])
        for i, gigabytes in enumerate(args.gigabytes):
            print(f"| {name} | {gigabytes:g} GB |", *(f"{column[i]} |" for column in columns))


def add_fit_table(commands: argparse._SubParsersAction) -> None:
    p = commands.add_parser(
        "fit_table", help="how many tokens fit a GPU", description=run_fit_table.__doc__
    )
    p.set_defaults(run=run_fit_table)
    p.option("--model", str, [*FIT_SHAPES], "shapes", nargs="+", choices=[*FIT_SHAPES])
    methods = ["dense", "fp8", "kivi", "sals", "elitekv", "lrqk"]
    p.option("--method", str, methods, "methods, with their default settings", nargs="+")
    sizes = [24.0, 48.0, 80.0, 141.0]
    p.option("--gigabytes", float, sizes, "memory of a GPU", nargs="+")


# -------------------------------------------------------------------------- heads of unequal rank

# Ranks of the eight KV heads of an 8B model, d_qk and d_v alike: as much for all heads together,
# but in `one`, where a wide head stands among narrow ones.
SPREADS = {
    "uniform": [64, 64, 64, 64, 64, 64, 64, 64],
    "mild": [48, 56, 56, 64, 64, 72, 72, 80],
    "wide": [16, 24, 32, 48, 64, 88, 112, 128],
    "two": [16, 16, 16, 16, 112, 112, 112, 112],
    "one": [32, 32, 32, 32, 32, 32, 32, 128],
}


def ragged_us(
    d_ranks: list[int], lengths: list[int], balanced: bool, device: torch.device
) -> float:
    """Microseconds in which kernels.launch_attend_ragged attends rows of these lengths, for four
    query heads a KV head. UserError where there is no GPU."""
    if not triton_runs_on(device):
        raise UserError("ragged times a Triton kernel, which needs a GPU")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    ranks = [*d_ranks, *d_ranks]  # of keys, then of values
    B = len(lengths)
    Hq = 4 * len(d_ranks)
    packed = torch.randn(B * max(lengths) * sum(ranks), device=device).to(dtype)
    q = torch.randn(B, Hq, max(ranks), device=device).to(dtype)
    pos = torch.tensor(lengths, dtype=torch.int32, device=device) - 1
    table = kernels.ragged_table(ranks, device, balanced)
    call = partial(kernels.launch_attend_ragged, q, packed, table, ranks, pos, 128**-0.5, balanced)
    return ColdTimer(q).us(call)


def run_ragged(args: argparse.Namespace) -> None:
    """Time FDC's attention over heads of unequal rank: with the work divided by bytes, and by heads
    (the paper's /KE).

    A line has the batch, the tokens of its shortest and its longest row, how the ranks spread, and
    the numbers of a token (K and V); then microseconds: balanced_us, by_heads_us, and by_bytes_us,
    which the same bytes take where all ranks and rows are equal. The shape is that of Llama-3.1-8B:
    32 query and 8 KV heads. A batch is measured twice, with rows of equal length and with rows from
    an eighth of it on."""
    generate.device_and_dtype(args.device)
    table = []
    for batch in args.batch:
        for length in args.lengths:
            for line in ragged_lines(batch, length, torch.device(args.device)):
                table.append(line)
                print_line(line)
                if args.csv:
                    save_csv(args.csv, list(line), table)


def ragged_lines(batch: int, length: int, device: torch.device) -> Iterator[dict]:
    """The lines of run_ragged's table for a batch and the tokens of its longest row."""
    cases = [[length] * batch]  # the lengths of the rows
    if batch > 1:
        cases.append(torch.linspace(length // 8, length, batch).int().tolist())
    us_of_number = None  # of the first line, where all rows and all ranks are equal
    for lengths in cases:
        for spread, d_ranks in SPREADS.items():
            balanced_us = ragged_us(d_ranks, lengths, True, device)
            n_numbers = sum(d_ranks) * sum(lengths)
            if us_of_number is None:
                us_of_number = balanced_us / n_numbers
            yield {
                "batch": batch,
                "shortest": min(lengths),
                "longest": max(lengths),
                "spread": spread,
                "numbers": 2 * sum(d_ranks),
                "balanced_us": balanced_us,
                "by_heads_us": ragged_us(d_ranks, lengths, False, device),
                "by_bytes_us": us_of_number * n_numbers,
            }


def add_ragged(commands: argparse._SubParsersAction) -> None:
    ragged = add_command(commands, "ragged", run_ragged)
    add_table_options(ragged)
    ragged.option("--batch", whole(1), [1, 8], "rows of a batch", nargs="+", metavar="N")
    lengths = "tokens of a row"
    ragged.option("--lengths", whole(1), [8192, 32768], lengths, nargs="+", metavar="N")


if __name__ == "__main__":
    generate.run_command(main)
