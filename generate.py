"""Generate text through a compressed cache.

    python generate.py --method sals                 the embedded model answers questions about demo.txt
    python generate.py --method sals --help          every option, with the method's own settings
    python generate.py --checkpoint FOLDER --prompt "Once upon a time" --max_new_tokens 100
    python generate.py --random_weights llama-3.1-8b --prompt 32768 --batch_size 8 --method sals --json
    torchrun --nproc_per_node 4 generate.py ...      the same on 4 GPUs, or in 4 processes of a CPU
Text goes to stdout, the report to stderr; --json adds the report as one JSON object, stdout's last line.
"""

import argparse
import dataclasses
import json
import os
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import lru_cache, partial
from pathlib import Path

# Threads that wait for another one soon give up their core: on a busy machine that one may have none. GNU's
# OpenMP reads this when torch is imported. A user's own setting wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

import compress
import kernels
import model as model_file
from compress import Cache, Context, dense_bytes, load_artifact, method_named, settings_from
from model import Llama, ModelConfig, StreamDecoder, UserError, free_memory, gathered, human, ranks

NANO = Path(__file__).resolve().parent / "checkpoints" / "nano"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COUNT = re.compile("[0-9]{1,4000}")  # as a prompt: so many random tokens
LONGEST_TEXT, LONGEST_PROMPT = 4 * 10**9, 10**8  # bytes, characters


class Progress:
    """How far a long job is: a line on stderr every ten seconds; silent within another one."""

    outer = None

    def __init__(self, label: str, total: float):
        self.label, self.total, self.done, self.started = label, total, 0, time.time()
        self.shown = self.started
        Progress.outer = Progress.outer or self

    def tick(self, n: float = 1) -> None:
        self.done, now = min(self.done + n, self.total), time.time()
        if self is Progress.outer and now - self.shown > 10:
            self.shown = now
            left = (now - self.started) / self.done * (self.total - self.done)
            done = f"{self.done:.0f}/{self.total:.0f}"
            print(f"{self.label} {done}, {left:.0f} s left", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self is Progress.outer:
            Progress.outer = None


# --------------------------------------------------------------------------------------------------- sampling


def greedy(logits: Tensor) -> Tensor:
    """logits [B, V] -> ids [B] of the largest, the first of equal ones; in parts first, since a row of logits
    would be one multiprocessor's."""
    parts = 64
    width = -(-logits.shape[-1] // parts)
    padded = F.pad(logits, (0, parts * width - logits.shape[-1]), value=-torch.inf)
    best, place = padded.unflatten(-1, (parts, width)).max(-1)
    part = best.argmax(-1, keepdim=True)
    return (part * width + place.gather(-1, part))[:, 0]


@dataclass
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [B, V] -> token ids [B]. Fixed shapes and no host sync: it can be part of a CUDA graph."""
        if self.temperature == 0:
            return greedy(logits)
        logits = logits.float()
        # What is below fp32's numbers would divide 0 by 0.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if self.top_k:
            worst = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < worst, -torch.inf)
        probs = logits.softmax(-1)
        if self.top_p < 1:
            ordered, order = probs.sort(descending=True)
            outside = ordered.cumsum(-1) - ordered >= self.top_p  # the token that crosses top_p stays
            probs = torch.zeros_like(probs).scatter(-1, order, ordered.masked_fill(outside, 0))
        # The largest of p / Exponential(1) is a draw from p; torch.multinomial would sync with the host.
        return (probs / torch.empty_like(probs).exponential_(1)).argmax(-1)


# ----------------------------------------------------------------------------------------------------- engine


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.time()


class Engine:
    """A model, its caches, and the decode step over static buffers: tokens [B] int64 and pos [B] int32.

    `tokens` are the next to be written, at `pos`. On CUDA the step is captured once as a CUDA graph, before
    any prompt is read; the graph is right for every length, because lengths are read on the device."""

    def __init__(
        self, model: Llama, caches: list, context: Context, sampling: Sampling, compiled=False, graphed=False,
        prefill_chunk: int | None = None
    ):  # fmt: skip
        self.model, self.caches, self.context, self.sampling = model, caches, context, sampling
        self.prefill_chunk = prefill_chunk or 1 << 32  # tokens of a prompt that are read at once
        self.tokens = torch.zeros(context.batch_size, dtype=torch.int64, device=context.device)
        self.pos = torch.zeros(context.batch_size, dtype=torch.int32, device=context.device)
        shape = (context.batch_size, model.config.vocab_size)
        self.logits = torch.zeros(shape, dtype=context.dtype, device=context.device)  # of the last step
        started = time.time()
        # extras/hopper.py may have a decode step of its own, with the same logits.
        hopper = kernels.hopper(context.device) if context.kernel else None
        chained = hopper and hopper.chained_decode(model, context.batch_size)
        self.decode, *steps = chained or (Llama.decode, model_file.decode_layer, model_file.decode_logits)
        # Layers of one kind share their compiled code: seconds, where the whole step would take far longer.
        self.steps = [torch.compile(step, dynamic=False) if compiled else step for step in steps]
        if compiled and sampling.temperature == 0:  # else the seed's random numbers would be others
            self.sampling = torch.compile(greedy, dynamic=False)
        if compiled:
            # Kinds of layers and shapes, over all engines of a process; beyond this they run uncompiled.
            dynamo = torch._dynamo.config
            dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1 << 12
        self.step = self._capture() if graphed else self._step
        if compiled and not graphed:
            self.step()
        # What warm-up wrote lies beyond every row's length: prefill and decode overwrite it.
        self.tokens.zero_()
        self.pos.zero_()
        self.capture_s = time.time() - started if compiled or graphed else 0.0

    def _step(self) -> None:
        """Writes `tokens` at `pos`, and replaces them by the next ones."""
        self.logits.copy_(self.decode(self.model, self.tokens, self.pos, self.caches, *self.steps))
        self._sample()
        self.pos += 1

    def _sample(self) -> None:
        """Replaces `tokens` by the next ones: on every rank those that rank 0 draws."""
        self.tokens.copy_(self.sampling(self.logits))
        if ranks()[1] > 1:
            dist.broadcast(self.tokens, 0)

    def _capture(self) -> Callable[[], None]:
        """The step as one CUDA graph; warmed up on a side stream first, as capture requires."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
                self.pos.zero_()  # a cache may have room for no more
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
            self._step()
        return graph.replay

    def prefill(self, prompts: list[list[int]]) -> None:
        """Reads one prompt a row; afterwards `tokens` holds each row's first new token."""
        self.pos.zero_()
        self.feed(prompts)

    def feed(self, prompts: list[list[int]]) -> None:
        """Reads more tokens of each row, none for []; then `tokens` holds the next of each that got some."""
        n, pending = self.prefill_chunk, self.tokens.clone()
        chunks = [(row, ids[i : i + n]) for row, ids in enumerate(prompts) for i in range(0, len(ids), n)]
        with Progress("reading", len(chunks) * len(self.model.layers)) as bar:
            hooks = [x.attention.register_forward_hook(lambda *_: bar.tick()) for x in self.model.layers]
            for row, ids in chunks:
                tokens = torch.tensor(ids, device=self.context.device)
                self.logits[row] = self.model.extend(tokens, row, int(self.pos[row]), self.caches)
                self.pos[row] += len(ids)
            for hook in hooks:
                hook.remove()
        self.check_logits()
        self._sample()
        fed = torch.tensor([len(ids) > 0 for ids in prompts], device=self.context.device)
        self.tokens.copy_(self.tokens.where(fed, pending))

    def check_logits(self) -> None:
        """Raises UserError where the last logits are no numbers to choose by."""
        if not self.logits.isfinite().all():
            kind = next(name for name, dtype in DTYPES.items() if dtype == self.logits.dtype)
            raise UserError(f"the logits are not finite in {kind}; use --dtype bf16 or fp32")


@dataclass
class Output:
    """What was generated in each row, and the seconds it took."""

    token_ids: list[list[int]]
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    answers: list[str] = field(default_factory=list)  # one for each --ask
    asked: int = 0  # tokens of all --ask
    stop_token: int | None = None  # of the last row that stopped


def decode_rows(
    engine: Engine, max_new_tokens: int, stops: Callable[[list[int]], bool], emit=None, stride: int = 1
) -> Output:
    """Generates until every row has stopped or has max_new_tokens; a stop token is not part of the output.

    stops(ids) sees all ids that the row has made; emit(row, token) is called for each token.
    stride: steps between two looks at the tokens: more than 1 spares the device the wait for the host, but
    leaves tokens after the stop in the cache."""
    rows = engine.context.batch_size
    output, stopped = Output([[] for _ in range(rows)]), [False] * rows
    started, made = clock(engine.context.device), 0
    while made < max_new_tokens and not all(stopped):
        block = []
        for _ in range(min(stride, max_new_tokens - made)):
            block.append(engine.tokens.clone())
            made += 1
            if made < max_new_tokens:
                engine.step()
        for tokens in torch.stack(block).tolist():
            for row in (row for row in range(rows) if not stopped[row]):
                ids = output.token_ids[row]
                ids.append(tokens[row])
                stopped[row] = stops(ids)
                if stopped[row]:
                    output.stop_token = ids.pop()
                elif emit:
                    emit(row, tokens[row])
        if made <= stride:
            output.first_token_s = time.time() - started
    output.decode_s, output.steps = time.time() - started, made - 1
    engine.check_logits()
    return output


# ----------------------------------------------------------------------------------------------- chat prompts


def render_chat(template: str, **variables) -> str:
    """A chat template's text, with all that transformers gives it; UserError in the template's own words."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    jinja.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    jinja.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    marks = r"({%[-+]?\s*)(end)?generation\b"  # of what is trained on
    template = re.sub(marks, lambda m: m[1] + ("endif" if m[2] else "if true"), template)
    try:
        return jinja.from_string(template).render(variables, tools=None, documents=None)
    except Exception as error:  # whatever a template does
        raise UserError(f"the model's chat template refuses this chat: {error}") from error


def encode_chat(tokenizer, chat: list[dict[str, str]], system: str | None = None) -> list[int]:
    """Token ids of the prompt for the next answer, by the model's own template. What a message says never
    becomes a control token.

    chat: dicts with role and content, user and assistant in turn, user last. Raises UserError where there is
    no template."""
    special, template = tokenizer.special_tokens, tokenizer.chat_template
    if not template:
        raise UserError("this model has no chat template; put a chat_template.jinja into its folder")
    chat = ([{"role": "system", "content": system}] if system else []) + chat
    # A mark in each control token's name that a message holds: no name is found there, all else stays.
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    said = "".join([template, *special, *(message["content"] for message in chat)])
    mark = next(c for c in map(chr, range(0xE000, 0x110000)) if c not in said)  # most are for private use
    start = re.compile(f"(?={names})(.)", re.DOTALL)
    chat = [message | {"content": start.sub(rf"\1{mark}", message["content"])} for message in chat]
    text = render_chat(template, messages=chat, add_generation_prompt=True, **tokenizer.chat_variables)
    parts = enumerate(re.split(f"({names})(?!{mark})", text))
    segments = [(part.replace(mark, ""), i % 2 == 1) for i, part in parts if part]
    return tokenizer.encode_segments(segments, bos=False)  # the template says what leads it


# --------------------------------------------------------------------------------- from a folder to an engine


def device_and_dtype(device: str, dtype: str = "auto") -> tuple[torch.device, torch.dtype]:
    """device: cpu or cuda, where each of several processes has a GPU of its own. dtype: as in --dtype."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device here; use --device cpu")
    if device == "cuda" and ranks()[1] > 1:
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count:
            raise UserError(f"each process needs a GPU of its own; use --nproc_per_node {count}")
        torch.cuda.set_device(local)
    return torch.device(device), DTYPES.get(dtype, DTYPES["bf16" if device == "cuda" else "fp32"])


def artifact_for(source: Path | ModelConfig, method: str, model: Llama) -> compress.Artifact:
    """What `calibrate.py fit` made for this method and model; of random weights random tensors."""
    if isinstance(source, ModelConfig):
        return compress.random_artifact(method, model.config)
    return load_artifact(source, method, model)


def load(
    source: Path | ModelConfig,
    device: str,
    dtype: str = "auto",
    weights=None,
    method="dense",
    options=None,
    seed=0,
) -> tuple[Llama, object]:
    """The model and its tokenizer of a checkpoint folder; of a config random weights and None.

    weights: None for the dtype's, or "int8": a method is folded into a layer before that is quantised, and
    the model serves no other one."""
    artifact, fold_all = lru_cache(partial(artifact_for, source, method)), method_named(method).fold_all
    place, settings = device_and_dtype(device, dtype), settings_from(method, options or {})
    fold = weights and (lambda model, i: fold_all(model, settings, artifact(model), [i]))
    if isinstance(source, ModelConfig):
        config = dataclasses.replace(source, max_positions=1 << 20)
        return model_file.random_model(config, *place, seed, fold), None
    if not source.is_dir():
        raise UserError(f"{source}: there is no such folder; give a Hugging Face checkpoint")
    return model_file.load_model(source, *place, fold), model_file.load_tokenizer(source)


def plan_caches(model: Llama, method: str, settings, artifact: dict, rows: int, capacity: int) -> list[Cache]:
    """The method's caches on the meta device: their bytes and their refusals, without their memory."""
    with torch.device("meta"):
        shadow = Llama(model.config).to(model.norm.weight.dtype)
    return method_named(method).build(shadow, settings, Context(shadow, rows, capacity), artifact)


def row_bytes(model: Llama, method: str, settings, artifact: dict, capacity: int) -> dict[str, int]:
    """Bytes that the caches take of each kind of memory, cpu or cuda, for one row."""
    caches, device = plan_caches(model, method, settings, artifact, 1, capacity), model.norm.weight.device
    needs = {"cpu": sum(cache.host_bytes() for cache in caches)}
    return needs | {device.type: needs.get(device.type, 0) + sum(cache.formula() for cache in caches)}


def check_memory(model: Llama, method: str, settings, artifact: dict, rows: int, capacity: int) -> None:
    """Raises UserError, with what would fit, where the caches would not. Takes no memory itself."""
    for kind, needed in row_bytes(model, method, settings, artifact, capacity).items():
        share = free_memory(torch.device(kind)) / max(1, rows * needed)
        if share < 1:
            size = (
                f"the {method} cache of {rows} rows x {capacity} tokens needs {human(rows * needed)} ({kind})"
            )
            fits = f"{int(rows * share)} rows or {int(capacity * share)} tokens a row would fit"
            raise UserError(f"not enough memory: {size}; {fits}")


def build_engine(
    source: Path | ModelConfig, model: Llama, method: str, options: dict, rows: int, capacity: int,
    sampling: Sampling, compiled: bool | None = None, kernel: bool | None = None, prefill_chunk=None
) -> Engine:  # fmt: skip
    """An engine for a model of `load`, whose weights it may change. compiled, kernel: None for where they
    pay, on CUDA. Raises UserError where options, artifact, model and memory do not fit one another, before
    anything is built."""
    settings, artifact = settings_from(method, options), artifact_for(source, method, model)
    check_memory(model, method, settings, artifact, rows, capacity)
    context = Context(model, rows, capacity, kernel)
    caches = method_named(method).build(model, settings, context, artifact)
    if hasattr(settings, "budget") and sum(settings.budget(capacity)) >= capacity:
        print(f"note: the budget covers {capacity} tokens: every token is attended", file=sys.stderr)
    graphed = context.device.type == "cuda"
    try:
        compiled = graphed if compiled is None else compiled
        return Engine(model, caches, context, sampling, compiled, graphed, prefill_chunk)
    except torch._dynamo.exc.TorchDynamoException as error:
        cause = str(error).split("\n")[0]
        raise UserError(f"the step cannot be compiled ({cause}); use --no-compile") from error


# --------------------------------------------------------------------------------- from prompts to a report


def check_capacity(capacity: int, c: ModelConfig, shorten: str = "the prompt or --max_new_tokens") -> None:
    """Raises UserError for more positions than the model was made for, with what to shorten."""
    most = min(c.max_positions, c.sliding_window or c.max_positions)
    if capacity > most:
        window = " (its sliding window)" if most == c.sliding_window else ""
        raise UserError(f"{capacity} positions are more than the model's {most}{window}; shorten {shorten}")


def check_lengths(prompts: list[list[int]], extra: int, capacity: int | None, config: ModelConfig) -> int:
    """The cache's capacity in tokens. Raises UserError where prompt and new tokens do not fit."""
    longest = max(map(len, prompts)) + extra
    if not all(prompts):
        raise UserError("the prompt has no tokens; give some text")
    if (largest := max(map(max, prompts))) >= (n := config.vocab_size):
        raise UserError(f"token id {largest} is outside the model's vocabulary of {n}: another's tokenizer?")
    if capacity and longest > capacity:
        raise UserError(f"prompt and new tokens need {longest} positions, not {capacity}; raise --context")
    check_capacity(capacity or longest, config, *["--context"] * bool(capacity))
    return capacity or longest


def run_prompts(
    engine: Engine, tokenizer, prompts: list[list[int]], asks: list[str], max_new_tokens: int,
    ignore_eos: bool = False, seed: int = 0, emit: Callable | None = None
) -> Output:  # fmt: skip
    """Reads the prompts, then generates: once, or a line after each of `asks`. emit: as in decode_rows."""
    torch.manual_seed(seed)
    device, output = engine.context.device, Output([[] for _ in prompts])
    stop_ids = set() if ignore_eos or tokenizer is None else tokenizer.stop_ids

    def stops(ids: list[int]) -> bool:
        return ids[-1] in stop_ids or bool(asks) and "\n" in tokenizer.decode(ids[-1:])

    started = clock(device)
    engine.prefill(prompts)
    output.prefill_s = clock(device) - started
    for question in [tokenizer.encode_continuation("\n" + ask) for ask in asks] or [[]]:
        if question:
            engine.feed([question])
        read_s = clock(device) - started
        stride = 16 if device.type == "cuda" and not asks else 1
        answer = decode_rows(engine, max_new_tokens, stops, emit, stride)
        output.first_token_s = output.first_token_s or read_s + answer.first_token_s
        output.token_ids = [a + b for a, b in zip(output.token_ids, answer.token_ids, strict=True)]
        output.decode_s, output.steps = output.decode_s + answer.decode_s, output.steps + answer.steps
        output.answers.append(tokenizer.decode(answer.token_ids[0]).strip() if question else "")
        output.asked += len(question)
    return output


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that CUDA's allocator held, or this process's largest resident size (0: not known)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    with suppress(ImportError):  # Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, counting what is read and what is written."""
    source = torch.ones(1 << (28 if device.type == "cuda" else 25), dtype=torch.float32, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(4):
        started = clock(device)
        target.copy_(source)
        times.append(clock(device) - started)
    return 2 * source.nbytes / min(times)


def device_name(device: torch.device) -> str:
    is_cpu = device.type == "cpu"
    return f"cpu ({torch.get_num_threads()} threads)" if is_cpu else torch.cuda.get_device_name(device)


def report(engine: Engine, tokenizer, prompts: list[list[int]], output: Output) -> dict:
    """The run in figures: counts are per row, bytes are those of all ranks, each rank's under "ranks"."""
    context, model, caches = engine.context, engine.model, engine.caches
    rows = list(zip(prompts, output.token_ids, strict=True))
    lengths = [len(p) + output.asked + len(t) for p, t in rows]
    table, weights = model.tok_embeddings.weight, sum(p.nbytes for p in model.parameters())
    per_step = output.decode_s / max(1, output.steps)
    rates = [rate for rate in (cache.miss_rate() for cache in caches) if rate is not None]
    local = {
        "cache_bytes_measured": sum(cache.measured() for cache in caches),
        "cache_bytes_formula": sum(cache.formula() for cache in caches),
        "cache_bytes_dense": dense_bytes(context) * len(caches),
        "cache_bytes_host": sum(cache.host_bytes() for cache in caches),
        "bytes_read_per_step": sum(cache.bytes_read(n) for cache in caches for n in lengths),
        "weights_bytes": weights,
        "peak_memory_bytes": peak_memory(context.device),
    }
    by_rank = gathered(local)
    read = local["bytes_read_per_step"] + weights - table.nbytes * (table is not model.output.weight)
    movable = output.steps and per_step * measure_bandwidth(context.device)  # after the peak was read
    return {
        "device": device_name(context.device),
        "dtype": str(context.dtype).removeprefix("torch."),
        "prompt_tokens": [len(p) + output.asked for p in prompts],
        "new_tokens": [len(t) for t in output.token_ids],
        "token_ids": output.token_ids,
        "text": [tokenizer.decode(t, after=p) if tokenizer else "" for p, t in rows],
        "prefill_s": round(output.prefill_s, 4),
        "first_token_s": round(output.first_token_s, 4),
        "decode_tokens_per_s": round(context.batch_size / per_step, 2) if output.steps else None,
        **{name: sum(each[name] for each in by_rank) for name in local},
        "ranks": by_rank,
        "miss_rate": round(sum(rates) / len(rates), 4) if rates else None,
        "cache_tokens": context.batch_size * context.capacity,
        "cache_share": round(local["cache_bytes_measured"] / local["cache_bytes_dense"], 4),
        "bandwidth_share": round(read / movable, 4) if movable else None,
        "capture_s": round(engine.capture_s, 3),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


# ------------------------------------------------------------------------------------------- the command line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and that takes options by their full names only."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see --help")

    def option(self, name: str, kind: Callable, default: object, about: str, **more) -> None:
        """An option of one value, or of several (nargs, or action "append"). Its help says its default."""
        if default not in (None, "", []):
            shown = default if not isinstance(default, tuple | list) else " ".join(map(str, default))
            about = f"{about} (default {shown})"
        self.add_argument(name, type=kind, default=default, help=about.replace("%", "%%"), **more)

    def flag(self, name: str, about: str, action: object = "store_true") -> None:
        self.add_argument(name, action=action, help=about)


def number_in(interval: str, kind: type = float) -> Callable[[str], float]:
    """Reads a number of the command line that lies in an interval such as "(0, 1]"."""

    def number(text: str) -> float:
        if not compress.inside(value := kind(text), interval):
            raise argparse.ArgumentTypeError(f"{text}: give a number in {interval}")
        return value

    return number


positive, fraction = number_in("(0, inf)"), number_in("(0, 1]")


def whole(least: int, most: int = 1 << 32) -> Callable[[str], int]:
    return number_in(f"[{least}, {most}]", int)


def value_type(kind: type) -> Callable[[str], object]:
    """What reads a setting of this type; settings_from holds it to the setting's own interval."""
    return number_in(f"({-1 << 32}, {1 << 32})", kind) if kind in (int, float) else kind


def add_settings(parser: Parser, method: str) -> None:
    """One option for each field of the method's settings dataclass."""
    row = method_named(method)
    add = partial(
        parser.add_argument_group(f"settings of --method {method}", row.settings.__doc__).add_argument,
        default=argparse.SUPPRESS,
    )
    if row.paper:
        about = "all settings as published, or those that are better on real models (default ours)"
        add("--variant", choices=compress.VARIANTS, help=about)
    for f in dataclasses.fields(row.settings):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": value_type(f.type)}
        paper = f"; paper {row.paper[f.name]}" if f.name in row.paper else ""
        default = ("off", "on")[f.default] if f.type is bool else f.default
        about = f"{f.metadata['help']} (default {default}{paper})".replace("%", "%%")
        add(f"--{f.name}", choices=f.metadata["choices"], help=about, **kind)


def add_device_option(parser: Parser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.option("--device", str, device, "what runs the model", choices=("cpu", "cuda"))


def add_model_options(parser: Parser) -> None:
    about = "a Hugging Face folder: config.json, *.safetensors, tokenizer (default: the embedded model)"
    parser.add_argument("--checkpoint", type=Path, default=NANO, metavar="FOLDER", help=about)
    add_device_option(parser)
    parser.option("--dtype", str, "auto", "auto: fp32 on the CPU, bf16 on a GPU", choices=("auto", *DTYPES))


def add_weights_option(parser: Parser) -> None:
    parser.option("--weights", str, None, "weights of the linear layers in 8 bits", choices=("int8",))


def parse_args(argv: list[str]) -> argparse.Namespace:
    names = compress.method_names() if {"-h", "--help"} & {*argv} else ()
    about = "\n".join(f"  {name:13}{method_named(name).settings.__doc__}" for name in names)
    title, epilog = __doc__.split("\n\n")
    parser = Parser(description=f"{title}\n\nmethods:\n{about}", epilog=epilog)
    parser.option("--method", str, "dense", "what the cache stores; its settings appear below")
    add_model_options(parser)
    add_weights_option(parser)
    parser.option("--random_weights", str, None, "of this shape, to time a step", choices=model_file.SHAPES)
    parser.option("--seed", whole(0), 0, "of sampling, random prompts and random weights")
    parser.flag("--json", "print the report as one JSON object, the last line of stdout")
    about = "text, a file, stdin, or N random tokens; repeat it for a batch (default: the folder's demo.txt)"
    parser.option("--prompt", str, None, about, action="append", metavar="TEXT|@FILE|-|N")
    parser.option("--ask", str, None, "a question after it, answered in a line; repeat it", action="append")
    parser.option("--batch_size", whole(1), None, "rows; the prompts are repeated to fill them")
    parser.option("--prefill_chunk", whole(1), None, "tokens of a prompt to read at once (default: all)")
    parser.option("--max_new_tokens", whole(1), 100, "tokens to make for each prompt")
    parser.option("--context", whole(1), None, "tokens that the cache can hold (default: the prompts' need)")
    parser.option("--temperature", number_in("[0, inf)"), 0.0, "0 is greedy")
    parser.option("--top_k", whole(0), 0, "sample among the k likeliest tokens; 0: all")
    parser.option("--top_p", fraction, 1.0, "sample among the tokens that hold this probability")
    parser.flag("--ignore_eos", "always make max_new_tokens tokens")
    parser.flag("--compile", "compile the step (default: on CUDA)", argparse.BooleanOptionalAction)
    parser.flag("--kernels", "Triton kernels, or PyTorch (default: on CUDA)", argparse.BooleanOptionalAction)
    parser.flag("--interactive", "read one turn a line from the terminal")
    parser.flag("--chat", "wrap prompts as the model's chats are, by its own template")
    parser.option("--system", str, "", "with --chat: the system message", metavar="TEXT")
    # The method decides which settings exist, so it is read first.
    early = Parser(add_help=False)
    early.add_argument("--method", default="dense")
    add_settings(parser, early.parse_known_args(argv)[0].method)
    args = parser.parse_args(argv)
    names = ["variant", *(f.name for f in dataclasses.fields(method_named(args.method).settings))]
    args.options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    texts = [*(args.prompt or ()), *(args.ask or ()), args.system]
    "".join(texts).encode()  # raises UnicodeError, as what reads files and stdin
    numbers = args.prompt and not (args.ask or args.chat) and all(map(COUNT.fullmatch, args.prompt))
    batch, one = args.prompt or args.ask or args.batch_size or args.json, args.prompt or args.interactive
    for wrong, fault in (
        (args.random_weights and not numbers, "random weights have no tokenizer; give --prompt N"),
        (args.random_weights and args.checkpoint != NANO, "give --random_weights or --checkpoint, not both"),
        (args.interactive and batch, "--interactive takes no --prompt, --ask, --batch_size, --json"),
        (args.chat and (args.ask or not one), "--chat needs a --prompt or --interactive, and takes no --ask"),
        (args.system and not args.chat, "--system needs --chat"),
    ):
        if wrong:
            raise UserError(fault)
    return args


def read_text(path: Path, errors: str = "strict") -> str:
    """A file's text without a byte-order mark and with \\n for each line end, as stdin's."""
    if path.exists() and not (path.is_file() and path.stat().st_size <= LONGEST_TEXT):  # some have no end
        most = human(LONGEST_TEXT)
        raise UserError(f"{path}: no regular file of at most {most}; copy what is needed into one")
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except UnicodeError as error:
        raise UserError(f"{path}: not UTF-8 text; convert it first ({error})") from None


def first_reads(read: Callable[[], str]) -> str:
    """What read() gives on rank 0, for all ranks: they have one stdin."""
    return gathered(None if ranks()[0] else read())[0]


def read_prompts(args, tokenizer, config: ModelConfig) -> tuple[list[list[int]], int, list[str]]:
    """Token ids of the prompts, the rows that they fill in turn, and the questions to ask after them."""
    texts, asks, prompts = args.prompt or [], args.ask or [], []
    if not texts:
        path = args.checkpoint / "demo.txt"
        if not path.is_file():
            raise UserError("give a --prompt: this checkpoint has no demo.txt")
        document, *questions = read_text(path).split("\nQuestion:")
        texts, asks = [document], asks or [f"Question:{text}".rstrip("\n") for text in questions]
    for i, text in enumerate(texts):
        if COUNT.fullmatch(text) and not args.chat:
            rng, count = random.Random(args.seed + i), min(int(text), config.max_positions + 1)
            prompts.append([rng.randrange(3, config.vocab_size) for _ in range(count)])
            continue
        if text == "-":
            text = first_reads(partial(sys.stdin.read, LONGEST_PROMPT + 1))  # it may have no end
        elif text.startswith("@"):
            text = read_text(Path(text[1:]))
        if not 0 < len(text) <= LONGEST_PROMPT:
            fault = "is longer than any model reads" if text else "is empty"
            raise UserError(f"the prompt {fault}; give some text, @FILE, - or a number of tokens")
        chat = [{"role": "user", "content": text}]
        prompts.append(encode_chat(tokenizer, chat, args.system) if args.chat else tokenizer.encode(text))
    rows = args.batch_size or len(prompts)
    if rows < len(prompts) or asks and rows > 1:
        raise UserError("--batch_size is at least the number of prompts, and with --ask 1")
    return prompts, rows, asks


def streamer(tokenizer, after: list[int]) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """emit(row, token) prints a row's text as it is made, finish() its end; `after` are the ids before it."""
    stream = StreamDecoder(tokenizer, after)
    return lambda row, token: print(stream.push(token), end="", flush=True), lambda: print(stream.flush())


def run_generate(args: argparse.Namespace) -> None:
    source = model_file.SHAPES[args.random_weights] if args.random_weights else args.checkpoint
    folder = source, args.device, args.dtype, args.weights
    model, tokenizer = load(*folder, args.method, args.options, args.seed)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    how = sampling, args.compile, args.kernels, args.prefill_chunk
    if args.interactive:
        c = model.config
        capacity = args.context or min(4096, c.max_positions, c.sliding_window or 4096)
        check_capacity(capacity, c, "--context")
        engine = build_engine(source, model, args.method, args.options, 1, capacity, *how)
        return run_interactive(engine, tokenizer, args)
    prompts, rows, asks = read_prompts(args, tokenizer, model.config)
    asked = sum(len(tokenizer.encode_continuation("\n" + ask)) + args.max_new_tokens for ask in asks)
    capacity = check_lengths(prompts, asked or args.max_new_tokens, args.context, model.config)

    engine = build_engine(source, model, args.method, args.options, rows, capacity, *how)
    prompts = [prompts[i % len(prompts)] for i in range(rows)]
    run = prompts, asks, args.max_new_tokens, args.ignore_eos, args.seed
    streamed = tokenizer is not None and rows == 1 and not asks and not args.json
    emit, finish = streamer(tokenizer, prompts[0]) if streamed else (None, None)
    output = run_prompts(engine, tokenizer, *run, emit)
    figures = {
        "method": args.method,
        "variant": args.options.get("variant", "ours"),
        "settings": dataclasses.asdict(settings_from(args.method, args.options)),
        "model": str(args.random_weights or args.checkpoint),
        "seed": args.seed,
        **report(engine, tokenizer, prompts, output),
    }
    figures["weights"] = args.weights or figures["dtype"]
    answers = {args.method: output.answers}
    if asks and args.method != "dense" and not args.json and not model.config.elitekv:
        del engine, model  # the method may have changed the weights
        engine = build_engine(source, load(*folder)[0], "dense", {}, rows, capacity, *how)
        answers["dense"] = run_prompts(engine, tokenizer, *run).answers
    for i, ask in enumerate(asks):
        print(ask.split("\n")[0])
        for method, said in answers.items():
            print(f"  {method + ':':10} {said[i]}")
    if streamed:
        finish()
    elif tokenizer and not asks:
        for i, text in enumerate(figures["text"]):
            print(f"[row {i}] {text}")
    print(file=sys.stderr)
    for name, value in figures.items():
        if value and not isinstance(value, list | dict):
            print(f"{name:21} {human(value) if 'bytes' in name else value}", file=sys.stderr)
    if args.json:
        print(json.dumps(figures, separators=(",", ":")))


def run_interactive(engine: Engine, tokenizer, args: argparse.Namespace) -> None:
    """One turn a line; the conversation stays in the cache. --chat wraps turns in the model's template."""
    capacity = engine.context.capacity
    history, transcript, held = [], [], 0  # messages, token ids, and how many of these the cache holds

    def read_history() -> list[int]:
        if args.chat:
            return encode_chat(tokenizer, history, args.system)
        return tokenizer.encode("".join(message["content"] for message in history).removeprefix("\n"))

    torch.manual_seed(args.seed)
    while line := first_reads(lambda: print("> ", end="", flush=True) or sys.stdin.readline()):
        if not (line := line.rstrip("\n")):
            continue
        history.append({"role": "user", "content": line if args.chat or not history else "\n" + line})
        goes_on = transcript and not args.chat
        ids = transcript + tokenizer.encode_continuation("\n" + line) if goes_on else read_history()
        while len(ids) + args.max_new_tokens > capacity and len(history) > 1:
            print("note: the cache is full; the oldest turn is forgotten", file=sys.stderr)
            del history[:2]
            ids = read_history()
        check_lengths([ids], args.max_new_tokens, capacity, engine.model.config)
        if held and ids[:held] == transcript[:held]:
            engine.feed([ids[held:]])
        else:  # the first turn, or a template that rewrites the past
            engine.prefill([ids])
        after = () if args.chat else ids
        emit, finish = streamer(tokenizer, after)
        output = decode_rows(engine, args.max_new_tokens, lambda ids: ids[-1] in tokenizer.stop_ids, emit)
        finish()
        made = output.token_ids[0]
        history.append({"role": "assistant", "content": tokenizer.decode(made, after)})
        stop = [] if output.stop_token is None else [output.stop_token]
        transcript, held = [*ids, *made, *stop], int(engine.pos[0])  # the last token may not be written yet
    print()


def leave(code: int, line: str) -> None:
    """Ends the process with a line on stderr, of characters that move no terminal. One of several ends at
    once: Python's own end may wait for the others."""
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    if ranks()[1] > 1:
        os._exit(code)
    sys.exit(code)


@contextmanager
def joined_ranks() -> Iterator[None]:
    """Around a command: joins the processes that torchrun started. Only rank 0 speaks; the first rank that
    fails says why and ends, and the others end without a word."""
    if not (dist.is_available() and dist.is_torchelastic_launched() and os.environ["WORLD_SIZE"] != "1"):
        yield
        return
    store, rank, n = next(rendezvous("env://"))
    # Gloo for what is on the CPU. The timeout is long because ranks may wait for a user who types; they need
    # none for one that failed.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=timedelta(days=1))
    stderr = sys.stderr
    if rank:
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        yield
    except Exception:
        if store.add("failed", 1) > 1:
            os._exit(2)
        sys.stderr = stderr
        raise
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def run_command(run: Callable[[], None]) -> None:
    """Runs a command; the user's mistakes end in one line on stderr and exit code 2."""
    as_files, known = {"encoding": "utf-8-sig", "newline": None}, {"errors": "replace"}
    for name, mode, how in (("stdin", "r", as_files), ("stdout", "w", known), ("stderr", "w", known)):
        setattr(sys, name, getattr(sys, name) or open(os.devnull, mode))  # None: it is closed
        with suppress(AttributeError):  # a terminal may know fewer characters than a model
            getattr(sys, name).reconfigure(**how)
    try:
        with joined_ranks():
            run()
    except UserError as error:
        leave(2, f"error: {error}")
    except UnicodeError as error:
        leave(2, f"error: not UTF-8 text; convert it first ({error})")
    except BrokenPipeError:  # whoever read stdout has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        leave(2, f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
    except (MemoryError, RuntimeError) as error:
        told = str(error) or "out of memory"
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in told:
            raise
        told = told.splitlines()[0]
        leave(2, f"error: not enough memory ({told}); use a smaller model, fewer or shorter rows")
    except KeyboardInterrupt:
        leave(130, "interrupted")


def main() -> None:
    run_command(lambda: run_generate(parse_args(sys.argv[1:])))


if __name__ == "__main__":
    main()
