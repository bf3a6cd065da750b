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
import io
import json
import os
import platform
import random
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

# Threads that wait for another one soon give up their core: on a busy machine that one may have none. GNU's
# OpenMP reads this when torch is imported. A user's own setting wins.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import SafetensorError, safe_open
from torch import Tensor

import compress
import kernels
import model as model_file
from compress import Cache, CacheContext, cache_bytes, dense_bytes, load_artifact, method_named, settings_from
from model import Llama, ModelConfig, StreamDecoder, UserError, free_memory, human

NANO = Path(__file__).resolve().parent / "checkpoints" / "nano"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
COUNT = re.compile("[0-9]{1,4000}")  # as a prompt: so many random tokens
FIRST = torch.zeros(1, dtype=torch.int64)  # an index: kernels copy by it, which reach host memory, too


class Progress:
    """How far a long job is: a line on stderr every ten seconds."""

    def __init__(self, label: str, total: float):
        self.label, self.total, self.done, self.started = label, total, 0, time.time()
        self.shown = self.started

    def tick(self, n: float = 1) -> None:
        self.done, now = min(self.done + n, self.total), time.time()
        if now - self.shown > 10:
            self.shown = now
            left = (now - self.started) / self.done * (self.total - self.done)
            print(f"{self.label} {self.done:.0f}/{self.total:.0f}, {left:.0f} s left", file=sys.stderr)


# --------------------------------------------------------------------------------------------------- sampling


def greedy(logits: Tensor) -> Tensor:
    """logits [B, V] -> ids [B] of the largest, the first of equal ones."""
    parts = 64  # a whole row of logits would be one multiprocessor's
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


def import_hopper(device: torch.device) -> ModuleType | None:
    """extras/hopper.py, which registers its faster functions with kernels.py; None if the device is no Hopper
    GPU, or there is no such file."""
    if kernels.nvidia_generation(device) != 9:
        return None
    try:
        import extras.hopper as hopper
    except ModuleNotFoundError as error:
        if error.name not in ("extras", "extras.hopper"):  # a broken one says what it lacks
            raise
        return None
    return hopper


class Engine:
    """A model, its caches, and the decode step over static buffers: tokens [B] int64 and pos [B] int32.

    `tokens` are the next to be written, at `pos`. On CUDA the step is captured once as a CUDA graph, before
    any prompt is read; the graph is right for every length, because lengths are read on the device."""

    def __init__(
        self,
        model: Llama,
        caches: list,
        context: CacheContext,
        sampling: Sampling,
        compiled=False,
        graphed=False,
    ):
        self.model, self.caches, self.context, self.sampling = model, caches, context, sampling
        self.tokens, self.pos = context.zeros(dtype=torch.int64), context.zeros(dtype=torch.int32)
        self.logits = context.zeros(model.config.vocab_size)  # of the last step
        started = time.time()
        hopper = import_hopper(context.device) if context.kernel else None
        # Its decode step makes the same logits.
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
        if graphed:
            self.step = self._capture()
        if compiled and not graphed:
            self.step()
        # What warm-up wrote lies beyond every row's length: prefill and decode overwrite it.
        self.tokens.zero_()
        self.pos.zero_()
        self.capture_s = time.time() - started if compiled or graphed else 0.0

    def step(self) -> None:
        """Writes `tokens` at `pos`, and replaces them by the next ones."""
        self.logits.copy_(self.decode(self.model, self.tokens, self.pos, self.caches, *self.steps))
        self._sample()
        self.pos += 1

    def _sample(self) -> None:
        """Replaces `tokens` by the next ones."""
        self.tokens.copy_(self.sampling(self.logits))

    def _capture(self) -> Callable[[], None]:
        """The step as one CUDA graph; warmed up on a side stream first, as capture requires."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
                self.pos.zero_()  # a cache may have room for no more
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has threads of its own
            self.step()
        return graph.replay

    def prefill(self, prompts: list[list[int]]) -> None:
        """Reads one prompt a row; afterwards `tokens` holds each row's first new token."""
        self.pos.zero_()
        self.feed(prompts)

    def feed(self, prompts: list[list[int]]) -> None:
        """Reads more tokens of each row, none for []; then `tokens` holds the next of each that got some."""
        pending = self.tokens.clone()
        fed_rows = [row for row, ids in enumerate(prompts) if ids]
        bar = Progress("reading", len(fed_rows) * len(self.model.layers))
        for row in fed_rows:
            tokens = torch.tensor(prompts[row], device=self.context.device)
            start = int(self.pos[row])
            self.logits[row] = self.model.extend(tokens, row, start, self.caches, bar.tick)
            self.pos[row] += len(tokens)
        self.check_logits()
        self._sample()
        fed = torch.tensor([len(ids) > 0 for ids in prompts], device=self.context.device)
        self.tokens.copy_(self.tokens.where(fed, pending))

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        """Views of all that a row of n tokens is: its part of every cache, its place, what comes next."""
        parts = {"pos": self.pos[row], "next": self.tokens[row], "logits": self.logits[row]}
        for i, cache in enumerate(self.caches):
            parts |= {f"{i}.{name}": x for name, x in cache.row_state(row, n).items()}
        return parts

    def put(self, row: int, n: int, parts: dict[str, Tensor]) -> None:
        """Makes a row one of n tokens, of the parts that `used` gave of another."""
        self.pos[row] = parts["pos"]
        self.tokens[row] = parts["next"]
        self.logits[row] = parts["logits"]
        for i, cache in enumerate(self.caches):
            names = cache.row_state(row, n)
            cache.restore_row(row, n, {name: parts[f"{i}.{name}"] for name in names})

    def check_logits(self) -> None:
        """Raises UserError where the last logits are no numbers to choose by."""
        if not self.logits.isfinite().all():
            raise UserError(f"the logits are not finite in {self.logits.dtype}; use --dtype bf16 or fp32")


@dataclass
class Output:
    """What was generated in each row, and the seconds it took."""

    token_ids: list[list[int]]
    text: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)  # the row's other tokens: earlier answers, too
    prefill_s: float = 0.0
    first_token_s: float = 0.0  # from the start of reading
    decode_s: float = 0.0
    steps: int = 0
    stopped: dict[int, list[int]] = field(default_factory=dict)  # row -> its stop token, not in token_ids
    llm: "LLM | None" = field(default=None, repr=False)

    @property
    def report(self) -> dict:
        """The run in figures (LLM.report)."""
        return self.llm.report(self)

    def then(self, more: "Output") -> "Output":
        """This one and what follows it in the same rows, as one."""
        token_ids = [a + b for a, b in zip(self.token_ids, more.token_ids, strict=True)]
        text = [a + b for a, b in zip(self.text, more.text, strict=True)]
        given = [n - len(ids) for n, ids in zip(more.prompt_tokens, self.token_ids, strict=True)]
        first_token_s = self.first_token_s or self.prefill_s + more.first_token_s
        decode_s, steps = self.decode_s + more.decode_s, self.steps + more.steps
        return Output(token_ids, text, given, self.prefill_s, first_token_s, decode_s, steps, llm=self.llm)


def decode_tokens(
    engine: Engine, output: Output, max_new_tokens: int, stops: Callable[[list[int]], bool], stride: int = 1
) -> Iterator[tuple[int, int]]:
    """Generates until every row has stopped or has max_new_tokens; yields (row, token) of each token that is
    part of the output, and fills that.

    stops(ids) sees all ids that the row has made. stride: steps between two looks at the tokens: more than 1
    spares the device the wait for the host, but leaves tokens after the stop in the cache."""
    rows, stopped = range(engine.context.batch_size), output.stopped
    started, made, first_token_s = clock(engine.context.device), 0, 0.0
    while made < max_new_tokens and len(stopped) < len(rows):
        block = []
        for _ in range(min(stride, max_new_tokens - made)):
            block.append(engine.tokens.clone())
            made += 1
            if made < max_new_tokens:
                engine.step()
        tokens_of_block = torch.stack(block).tolist()
        first_token_s = first_token_s or time.time() - started
        for tokens in tokens_of_block:
            for row in (row for row in rows if row not in stopped):
                ids = output.token_ids[row]
                ids.append(tokens[row])
                if stops(ids):
                    stopped[row] = [ids.pop()]
                else:
                    yield row, tokens[row]
    output.first_token_s = output.prefill_s + first_token_s
    output.decode_s, output.steps = time.time() - started, made - 1
    engine.check_logits()


def decode_rows(engine: Engine, max_new_tokens: int, stops: Callable, stride: int = 1) -> Output:
    """All of decode_tokens at once."""
    output = Output([[] for _ in range(engine.context.batch_size)])
    for _ in decode_tokens(engine, output, max_new_tokens, stops, stride):
        pass
    return output


# ----------------------------------------------------------------------------------------------- chat prompts


def render_chat(template: str, **variables) -> str:
    """The text that a chat template makes, given what transformers gives it.

    Raises UserError in the template's own words, if it refuses the chat or fails."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    jinja.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    jinja.globals["raise_exception"] = raise_exception
    jinja.globals["strftime_now"] = strftime_now
    # {% generation %} ... {% endgeneration %} is around what is trained on; here it is a plain block.
    template = re.sub(r"({%[-+]?\s*)endgeneration\b", r"\1endif", template)
    template = re.sub(r"({%[-+]?\s*)generation\b", r"\1if true", template)
    try:
        return jinja.from_string(template).render(variables, tools=None, documents=None)
    except Exception as error:  # a template is a program, which can fail in any way
        raise UserError(f"the model's chat template refuses this chat: {error}") from error


def encode_chat(tokenizer, chat: list[dict[str, str]]) -> list[int]:
    """Token ids of the prompt for the next answer, by the model's own template; UserError if it has none.

    chat: dicts with role and content: maybe system first, user and assistant in turn, user last."""
    template = tokenizer.chat_template
    if not template:
        raise UserError("this model has no chat template; put a chat_template.jinja into its folder")
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    said = "".join([template, *names, *(message["content"] for message in chat)])
    mark = unused_character(said)
    messages = []
    for message in chat:
        content = mark_control_tokens(message["content"], names, mark)
        messages.append(message | {"content": content})
    text = render_chat(template, messages=messages, add_generation_prompt=True, **tokenizer.chat_variables)
    return tokenizer.encode_segments(split_control_tokens(text, names, mark), bos=False)


def unused_character(text: str) -> str:
    """A character that the text does not have: the first one from those for private use on."""
    return next(chr(code) for code in range(0xE000, 0x110000) if chr(code) not in text)


def mark_control_tokens(content: str, names: list[str], mark: str) -> str:
    """A message in which no control token's name is whole, so that it stays text in the rendered chat.

    Each name gets a mark after its first character: <|eot_id|> becomes <MARK|eot_id|>. A template moves
    the content about, trims and splits it, and the mark goes with it; `split_control_tokens`, which tells the
    template's names from the user's, takes it out again. names: the longest first."""
    if not names:
        return content
    any_name = "|".join(map(re.escape, names))
    return re.sub(f"(?={any_name})(.)", rf"\1{mark}", content, flags=re.DOTALL)


def split_control_tokens(text: str, names: list[str], mark: str) -> list[tuple[str, bool]]:
    """A rendered chat in pieces, without marks, each with whether it is a control token.

    A name of one character is marked behind it, so a name that a mark follows is the user's, too."""
    if not names:
        return [(text, False)]
    any_name = "|".join(map(re.escape, names))
    segments = []
    for i, part in enumerate(re.split(f"({any_name})(?!{mark})", text)):
        if part:  # every second part is what the group found
            segments.append((part.replace(mark, ""), i % 2 == 1))
    return segments


# --------------------------------------------------------------------------------- from a folder to an engine


def device_and_dtype(device: str, dtype: str = "auto") -> tuple[torch.device, torch.dtype]:
    """device: cpu or cuda. dtype: as in --dtype."""
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device here; use --device cpu")
    return torch.device(device), DTYPES.get(dtype, DTYPES["bf16" if device == "cuda" else "fp32"])


def load(
    source: Path | ModelConfig, device: str, dtype: str = "auto", weights: str | None = None, method="dense",
    options: dict | None = None, seed=0
) -> tuple[Llama, object]:  # fmt: skip
    """The model and its tokenizer of a checkpoint folder; of a config random weights and None.

    weights: None for the dtype's, or "int8", after which the model serves this method alone."""
    row = method_named(method)
    place = device_and_dtype(device, dtype)
    settings = settings_from(method, options or {})
    build = model_file.build
    if weights == "int8":
        from extras import int8

        artifact_of = lru_cache(partial(load_artifact, source, method))  # read once for all layers

        def fold(model: Llama, i: int) -> None:
            row.fold_all(model, settings, artifact_of(model), [i])

        build = partial(int8.build, fold=fold)
    if isinstance(source, ModelConfig):
        config = replace(source, max_positions=1 << 20)
        return model_file.random_model(config, *place, seed, build), None
    if not source.is_dir():
        raise UserError(f"{source}: there is no such folder; give a Hugging Face checkpoint")
    return model_file.load_model(source, *place, build), model_file.load_tokenizer(source)


def plan_caches(model: Llama, method: str, settings, artifact: dict, capacity: int) -> list[Cache]:
    """The method's caches of one row on the meta device: bytes and refusals, without the memory."""
    with torch.device("meta"):
        shadow = Llama(model.config).to(model.norm.weight.dtype)
    return method_named(method).build(shadow, settings, CacheContext(shadow, 1, capacity), artifact)


def row_bytes(model: Llama, method: str, settings, artifact: dict, capacity: int) -> dict[str, int]:
    """Bytes that the caches take of each kind of memory, cpu or cuda, for one row."""
    caches, device = plan_caches(model, method, settings, artifact, capacity), model.norm.weight.device
    needs = {"cpu": sum(cache.bytes_host() for cache in caches)}
    return needs | {device.type: needs.get(device.type, 0) + sum(cache.bytes_formula() for cache in caches)}


def check_memory(model: Llama, method: str, settings, artifact: dict, rows: int, capacity: int) -> None:
    """Raises UserError, with what would fit, where the caches would not. Takes no memory itself."""
    for kind, needed in row_bytes(model, method, settings, artifact, capacity).items():
        share = free_memory(torch.device(kind)) / max(1, rows * needed)
        if share < 1:
            size = f"{rows} rows x {capacity} tokens needs {human(rows * needed)} ({kind})"
            fits = f"{int(rows * share)} rows or {int(capacity * share)} tokens a row would fit"
            raise UserError(f"not enough memory: the {method} cache of {size}; {fits}")


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


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that CUDA's allocator held, or this process's largest resident size (0: not known)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    with suppress(ImportError):  # Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0


def device_name(device: torch.device) -> str:
    is_cpu = device.type == "cpu"
    return f"cpu ({torch.get_num_threads()} threads)" if is_cpu else torch.cuda.get_device_name(device)


class SavedFacts(NamedTuple):
    """What a file of `LLM.save` says about its rows."""

    lengths: list[int]  # tokens that the cache holds of each row
    context: int  # tokens that the saved cache had room for
    note: object  # what the caller of `save` added, or None


def saved_facts(path: Path) -> SavedFacts:
    """Reads the facts of a file of `LLM.save`, without its tensors. UserError where it is no such file."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise UserError(f"{path}: truncated or damaged ({error}); save it again") from None
    if "rows" not in metadata:
        raise UserError(f"{path}: this is no saved cache; give a file of --save_cache")
    return SavedFacts(*json.loads(metadata["rows"]))


class LLM:
    """A model and a cache: prompts in, text out. The command line is a thin user of it.

    source: a Hugging Face folder, None for the embedded model, or a ModelConfig, whose weights are random.
    batch_size: rows (None: as many as there are prompts). context: tokens a row can hold (None: 4096, or what
    the first prompts need). settings: the method's. All else, and what raises UserError, is the command
    line's. A prompt is a text, token ids, or the messages of a chat, dicts with role and content."""

    def __init__(
        self, source: str | Path | ModelConfig | None = None, method: str = "dense", *, batch_size=None,
        context=None, device: str | None = None, dtype: str = "auto", weights: str | None = None, seed=0,
        temperature=0.0, top_k=0, top_p=1.0, compile=None, kernels=None, **settings
    ):  # fmt: skip
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.source = source if isinstance(source, ModelConfig) else Path(source or NANO)
        self.method, self.options, self.seed, self.weights = method, settings, seed, weights
        self.model, self.tokenizer = load(self.source, device, dtype, weights, method, settings, seed)
        self.settings, self.batch_size, self.capacity = settings_from(method, settings), batch_size, context
        self.compile, self.kernels = compile, kernels
        self.sampling, self.engine = Sampling(temperature, top_k, top_p), None  # `open` builds the engine
        self.told: list[list[int]] = []  # ids that each row was given and made; most are in its cache

    def open(self, rows: int, need: int = 0) -> "LLM":
        """Builds the caches of so many rows, once; it may change the model's weights. need: tokens of a row,
        where no context was given. UserError, before anything is built, where something does not fit."""
        model, c, settings = self.model, self.model.config, self.settings
        shortest = min(4096, c.max_positions, c.sliding_window or 4096)
        capacity = self.capacity or max(need, shortest)
        check_capacity(capacity, c, "--context")
        artifact = load_artifact(self.source, self.method, model)
        check_memory(model, self.method, settings, artifact, rows, capacity)
        context = CacheContext(model, rows, capacity, self.kernels)
        caches = method_named(self.method).build(model, settings, context, artifact)
        if hasattr(settings, "budget") and sum(settings.budget(capacity)) >= capacity:
            print(f"note: the budget covers {capacity} tokens: every token is attended", file=sys.stderr)
        graphed = context.device.type == "cuda"
        compiled = graphed if self.compile is None else self.compile
        if compiled and not graphed:
            for cache in caches:  # Inductor's code for a CPU drops some of KIVI's keys: caches stay eager
                cache.decode = torch.compiler.disable(cache.decode)
        try:
            self.engine = Engine(model, caches, context, self.sampling, compiled, graphed)
        except torch._dynamo.exc.TorchDynamoException as error:
            cause = str(error).split("\n")[0]
            raise UserError(f"the step cannot be compiled ({cause}); use --no-compile") from error
        self.capacity, self.told = capacity, [[] for _ in range(rows)]
        torch.manual_seed(self.seed)
        return self

    def encode(self, prompt: str | list, after: list[int] = ()) -> list[int]:
        """Token ids of a prompt, with those that it follows."""
        if isinstance(prompt, str):
            return [*after, *(self.tokenizer.encode_continuation if after else self.tokenizer.encode)(prompt)]
        is_chat = prompt and isinstance(prompt[0], dict)
        return encode_chat(self.tokenizer, prompt) if is_chat else [*after, *prompt]

    def read(self, prompts: list, max_new_tokens: int = 0, follow: bool = False) -> Output:
        """Reads a prompt a row, of the first rows if there are fewer; where each begins with all that its row
        holds, only what is new. follow: the prompts come after that. UserError where they do not fit."""
        ids = [*map(self.encode, prompts, self.told if follow else [()] * len(prompts))]
        need = check_lengths(ids, max_new_tokens, self.capacity, self.model.config)
        engine = self.engine or self.open(self.batch_size or len(ids), need).engine
        started, idle = clock(engine.context.device), [[]] * (len(self.told) - len(ids))
        rows = [*zip(ids, self.told, engine.pos.tolist(), strict=False)]
        if all(0 < n <= len(old) and new[:n] == old[:n] for new, old, n in rows):
            if any(more := [new[n:] for new, _, n in rows]):
                engine.feed(more + idle)
            self.told[: len(ids)] = ids
        else:
            engine.prefill(ids + idle)
            self.told = ids + idle
        return self.begun(started)

    def begun(self, started: float) -> Output:
        """The output of rows that were read, and have made nothing yet."""
        told, took = self.told, clock(self.engine.context.device) - started
        self.output = Output([[] for _ in told], [""] * len(told), [*map(len, told)], took)
        self.output.llm = weakref.proxy(self)  # else `del llm` would not free the model
        return self.output

    def tokens(
        self, prompts: list, max_new_tokens=100, *, follow=False, ignore_eos=False, line=False
    ) -> Iterator[tuple[int, int]]:  # fmt: skip
        """Reads the prompts, which fill the rows in turn, then yields (row, token) as they are made; at last
        `output` has all. line: its first line of text ends an answer. ignore_eos: nothing else does."""
        rows = len(self.told) or self.batch_size or len(prompts)
        if not prompts:
            raise UserError("there is no prompt; give one")
        if len(prompts) > rows:
            raise UserError(f"{len(prompts)} prompts are more than {rows} rows; set a larger batch_size")
        prompts = [prompts[i % len(prompts)] for i in range(rows)]
        output, decode = self.read(prompts, max_new_tokens, follow), self.tokenizer and self.tokenizer.decode
        stop_ids = self.tokenizer.stop_ids if decode and not ignore_eos else set()

        def stops(ids: list[int]) -> bool:
            return ids[-1] in stop_ids or line and "\n" in decode(ids).lstrip()

        # Tokens after a stop would stay in the cache, and a follow-up would read all of it again.
        stride = 16 if self.model.norm.weight.is_cuda and not (stop_ids or line) else 1
        try:
            yield from decode_tokens(self.engine, output, max_new_tokens, stops, stride)
        except GeneratorExit:  # the caller takes no more: the rows hold what it took
            self._finish(output)
            raise
        self._finish(output)

    def _finish(self, output: Output) -> None:
        """Gives the output its text, and each row what it has made."""
        for row, ids in enumerate(output.token_ids):
            if self.tokenizer:
                output.text[row] = self.tokenizer.decode(ids, self.told[row])
            self.told[row] = self.told[row] + ids + output.stopped.get(row, [])

    def generate(self, prompts: str | list, max_new_tokens: int = 100, **how) -> Output:
        """Text after each prompt. how: as in `tokens`."""
        prompts = [prompts] if isinstance(prompts, str) else prompts
        for _ in self.tokens(prompts, max_new_tokens, **how):
            pass
        return self.output

    def stream(self, prompt: str | list, max_new_tokens: int = 100, **how) -> Iterator[str]:
        """The text after one prompt, piece by piece as tokens are made (ignore_eos on CUDA: 16 at once)."""
        pieces = None
        for row, token in self.tokens([prompt], max_new_tokens, **how):
            pieces = pieces or StreamDecoder(self.tokenizer, self.told[0])
            if not row:
                yield pieces.push(token)
        yield pieces.flush() if pieces else ""

    def chat(self, messages: list[dict[str, str]], max_new_tokens: int = 100, **how) -> Output:
        """The next message of a chat, by the model's own template."""
        return self.generate([messages], max_new_tokens, **how)

    def ask(self, questions: list[str], max_new_tokens: int = 100, **how) -> tuple[Output, list[str]]:
        """An answer of one line to each question about what row 0 holds: one after another in it; or, if
        there are more rows, all at once, each in a copy of it. The output is the last one and this."""
        if not self.told:
            raise UserError("nothing was read that could be asked about; read or load it first")
        rows, output, answers = len(self.told), self.output, []
        if rows > 1:
            self.fork(0, rows)
        for group in [questions] if rows > 1 else [[question] for question in questions]:
            group = [f"\n{question}" for question in group]
            made = self.generate(group, max_new_tokens, follow=True, line=True, **how)
            output, answers = output.then(made), answers + [text.strip() for text in made.text]
        return output, answers[: len(questions)]

    def fork(self, row: int, n: int) -> None:
        """Makes the first n rows copies of one."""
        length = int(self.engine.pos[row])
        parts = self.engine.used(row, length)
        for other in {*range(n)} - {row}:
            self.engine.put(other, length, parts)
            self.told[other] = self.told[row]

    def held(self) -> dict[str, float]:
        """Of all rows: tokens held; their bytes in all memory; these as a share of dense's."""
        lengths, caches, context = self.engine.pos.tolist(), self.engine.caches, self.engine.context
        parts = (cache.row_state(row, n) for cache in caches for row, n in enumerate(lengths) if n)
        size, tokens = sum(x.nbytes for part in parts for x in part.values()), sum(lengths)
        dense = dense_bytes(context) * len(caches) * tokens / (len(lengths) * context.max_seq_length)
        return {"tokens": tokens, "bytes": size, "share": size / max(1, dense)}

    def identity(self) -> dict[str, str]:
        """What a saved cache must agree on with this one."""
        own = {"method": self.method, "settings": str(self.settings), "weights": str(self.weights)}
        own["dtype"] = str(self.model.norm.weight.dtype)
        if isinstance(self.source, Path) and (name := method_named(self.method).artifact):
            own["artifact"] = model_file.fingerprint([compress.artifact_path(self.source, name)])
        return compress.model_identity(self.model) | own

    def save(self, path: str | Path, note: object = None) -> None:
        """Writes what the rows hold, and no more, as one safetensors file; OSError where it cannot be.
        note: what else the file shall tell, in JSON (`saved_facts` reads it)."""
        tensors = {}
        lengths = []
        for row, n in enumerate(self.engine.pos.tolist()):
            if n == 0:
                continue
            parts = self.engine.used(row, n) | {"ids": torch.tensor(self.told[row])}
            for name, x in parts.items():
                tensors[f"{len(lengths)}.{name}"] = x[None][FIRST][0].cpu()
            lengths.append(n)
        facts = SavedFacts(lengths, self.engine.context.max_seq_length, note)
        compress.save_artifact(tensors, Path(path), self.identity() | {"rows": json.dumps(facts)})

    def load(self, path: str | Path, max_new_tokens: int = 0) -> Output:
        """Makes the rows those of a file of `save`, in turn, with room for max_new_tokens more. UserError
        where the file is of another model, method or settings, or its rows do not fit."""
        started, remedy = time.time(), "load it with the options that saved it, or save it again"
        metadata, tensors = compress.read_tensors(Path(path), self.identity(), remedy)
        lengths, context, _ = SavedFacts(*json.loads(metadata["rows"]))
        if not self.engine:
            self.capacity = self.capacity or max(context, max(lengths) + max_new_tokens)
            self.open(self.batch_size or len(lengths))
        rows, capacity, saved = len(self.told), self.capacity, []
        for what, wanted, given in (("batch_size", len(lengths), rows), ("context", max(lengths), capacity)):
            if wanted > given:
                raise UserError(f"{path} needs a --{what} of {wanted}, not {given}; raise --{what}")
        for i, n in enumerate(lengths):
            here = self.engine.used(0, n)
            saved.append({name: tensors.get(f"{i}.{name}") for name in [*here, "ids"]})
            if any(saved[i][name] is None or saved[i][name].shape != x.shape for name, x in here.items()):
                fault = f"saved with --context {context}, for which the budget is not that of {capacity}"
                raise UserError(f"{path}: {fault}; give --context {context}")
        for row in range(rows):
            self.engine.put(row, lengths[row % len(saved)], saved[row % len(saved)])
            self.told[row] = saved[row % len(saved)]["ids"].tolist()
        return self.begun(started)

    def report(self, output: Output) -> dict:
        """The run in figures: counts are per row, bytes are this process's."""
        context = self.engine.context
        caches = self.engine.caches
        new_tokens = [len(ids) for ids in output.token_ids]
        lengths = [given + new for given, new in zip(output.prompt_tokens, new_tokens, strict=True)]
        sizes = {
            **cache_bytes(caches),
            "bytes_read_per_step": sum(cache.bytes_read(n) for cache in caches for n in lengths),
            "peak_memory_bytes": peak_memory(context.device),
        }
        miss_rates = [cache.miss_rate() for cache in caches]
        miss_rates = [rate for rate in miss_rates if rate is not None]
        miss_rate = None
        if miss_rates:
            miss_rate = round(sum(miss_rates) / len(miss_rates), 4)

        tokens_per_s = None
        if output.steps:
            tokens_per_s = round(context.batch_size * output.steps / output.decode_s, 2)

        model_name = str(self.source)
        for name, shape in model_file.SHAPES.items():
            if self.source is shape:
                model_name = name

        return {
            "method": self.method,
            "settings": dataclasses.asdict(self.settings),
            "model": model_name,
            "seed": self.seed,
            "device": device_name(context.device),
            "dtype": str(context.dtype).removeprefix("torch."),
            "prompt_tokens": output.prompt_tokens,
            "new_tokens": new_tokens,
            "token_ids": output.token_ids,
            "text": output.text,
            "prefill_s": round(output.prefill_s, 4),
            "first_token_s": round(output.first_token_s, 4),
            "decode_tokens_per_s": tokens_per_s,
            **sizes,
            "miss_rate": miss_rate,
            "capture_s": round(self.engine.capture_s, 3),
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


def add_settings(parser: Parser, method: str) -> None:
    """One option for each field of the method's settings dataclass."""
    row = method_named(method)
    about = f"settings of --method {method}", row.settings.__doc__
    add = parser.add_argument_group(*about, argument_default=argparse.SUPPRESS).add_argument
    for f in dataclasses.fields(row.settings):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": f.type}
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


def add_engine_options(parser: Parser) -> None:
    parser.flag("--compile", "compile the step (default: on CUDA)", argparse.BooleanOptionalAction)
    parser.flag("--kernels", "Triton kernels, or PyTorch (default: on CUDA)", argparse.BooleanOptionalAction)


def add_sampling_options(parser: Parser) -> None:
    parser.option("--max_new_tokens", whole(1), 100, "tokens to make for each prompt")
    parser.option("--temperature", number_in("[0, inf)"), 0.0, "0 is greedy")
    parser.option("--top_k", whole(0), 0, "sample among the k likeliest tokens; 0: all")
    parser.option("--top_p", fraction, 1.0, "sample among the tokens that hold this probability")
    parser.option("--seed", whole(0), 0, "of sampling, random prompts and random weights")


def add_chat_options(parser: Parser) -> None:
    parser.flag("--chat", "wrap prompts as the model's chats are, by its own template")
    parser.option("--system", str, "", "a system message for the chat; it implies --chat", metavar="TEXT")


def parser_of_methods(doc: str, argv: list[str]) -> Parser:
    """A parser with --method and the settings of the method that argv names. Its help lists all methods.

    doc: a module's docstring, whose second paragraph becomes the end of the help."""
    description, epilog = doc.split("\n\n")
    if "-h" in argv or "--help" in argv:
        description += "\n\nmethods:"
        for name in compress.method_names():
            description += f"\n  {name:13}{method_named(name).settings.__doc__}"
    parser = Parser(description=description, epilog=epilog)
    parser.option("--method", str, "dense", "what the cache stores; its settings appear below")
    # The method decides which settings exist, so it is read first.
    early = Parser(add_help=False)
    early.add_argument("--method", default="dense")
    add_settings(parser, early.parse_known_args(argv)[0].method)
    return parser


def given_settings(args: argparse.Namespace) -> dict:
    """The settings of the method that a command line names, as `LLM` takes them."""
    names = ["variant"] + [f.name for f in dataclasses.fields(method_named(args.method).settings)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = parser_of_methods(__doc__, argv)
    add_model_options(parser)
    add_weights_option(parser)
    parser.option("--random_weights", str, None, "of this shape, to time a step", choices=model_file.SHAPES)
    parser.flag("--json", "print the report as one JSON object, the last line of stdout")
    about = "text, a file, stdin, or N random tokens; repeat it for a batch (default: the folder's demo.txt)"
    parser.option("--prompt", str, [], about, action="append", metavar="TEXT|@FILE|-|N")
    parser.option("--ask", str, [], "a question after it, answered in a line; repeat it", action="append")
    parser.option("--batch_size", whole(1), None, "rows; prompts, or --ask, are repeated to fill them")
    parser.option("--save_cache", Path, None, "writes the cache of the prompt, once read", metavar="FILE")
    parser.option("--load_cache", Path, None, "goes on after such a prompt: no --prompt then", metavar="FILE")
    add_chat_options(parser)
    add_sampling_options(parser)
    parser.flag("--ignore_eos", "always make max_new_tokens tokens")
    parser.option("--context", whole(1), None, "tokens that the cache can hold (default: the prompts' need)")
    add_engine_options(parser)
    args = parser.parse_args(argv)
    args.options = given_settings(args)
    args.chat = args.chat or args.system != ""

    all_random = all(COUNT.fullmatch(text) for text in args.prompt)
    if args.random_weights and (not args.prompt or not all_random or args.ask or args.chat):
        parser.error("random weights have no tokenizer; give --prompt N")
    if args.random_weights and args.checkpoint != NANO:
        parser.error("give --random_weights or --checkpoint, not both")
    if args.batch_size and args.batch_size < len(args.prompt):
        parser.error("--batch_size is at least the number of prompts")
    if args.ask and len(args.prompt) > 1:
        parser.error("--ask takes one --prompt")
    if args.load_cache and args.prompt:
        parser.error("--load_cache has the prompt; give --ask, or nothing")
    if args.chat and (args.ask or not args.prompt):
        parser.error("--chat needs a --prompt, and takes no --ask")
    return args


def read_text(path: Path, errors: str = "strict") -> str:
    """A file's text without a byte-order mark and with \\n for each line end, as stdin's."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: no regular file; copy the text into one")
    try:
        return path.read_text(encoding="utf-8-sig", errors=errors)
    except UnicodeError as error:
        raise UserError(f"{path}: not UTF-8 text; convert it first ({error})") from None


def read_prompts(args: argparse.Namespace, llm: LLM) -> tuple[list[list[int]], list[str]]:
    """Token ids of the prompts, and the questions to ask after them."""
    texts = args.prompt
    asks = args.ask
    if not texts and not args.load_cache:
        path = args.checkpoint / "demo.txt"
        if not path.is_file():
            raise UserError("give a --prompt: this checkpoint has no demo.txt")
        document, *questions = read_text(path).split("\nQuestion:")
        texts = [document]
        asks = asks or [f"Question:{text}".rstrip("\n") for text in questions]
    if 1 < (args.batch_size or 1) < len(asks):
        raise UserError(f"--batch_size is at least the number of questions, {len(asks)}")

    prompts = []
    for i, text in enumerate(texts):
        if COUNT.fullmatch(text) and not args.chat:
            prompts.append(random_prompt(int(text), args.seed + i, llm.model.config))
            continue
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            text = read_text(Path(text[1:]))
        if not text:
            raise UserError("the prompt is empty; give some text, @FILE, - or a number of tokens")
        if args.chat:
            messages = [{"role": "user", "content": text}]
            if args.system:
                messages.insert(0, {"role": "system", "content": args.system})
            prompts.append(llm.encode(messages))
        else:
            prompts.append(llm.encode(text))
    return prompts, asks


def random_prompt(n: int, seed: int, config: ModelConfig) -> list[int]:
    """n random token ids; one more than the model takes, where n is larger."""
    rng = random.Random(seed)
    n = min(n, config.max_positions + 1)
    return [rng.randrange(3, config.vocab_size) for _ in range(n)]


def llm_of(args: argparse.Namespace, method: str, settings: dict) -> LLM:
    """The LLM that a command line describes, with this method and these of its settings."""
    source = args.checkpoint
    if args.random_weights:
        source = model_file.SHAPES[args.random_weights]
    return LLM(
        source,
        method,
        batch_size=args.batch_size,
        context=args.context,
        device=args.device,
        dtype=args.dtype,
        weights=args.weights,
        seed=args.seed,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        compile=args.compile,
        kernels=args.kernels,
        **settings,
    )


def begin(llm: LLM, args: argparse.Namespace, prompts: list[list[int]], asks: list[str]) -> Output:
    """Reads or loads the prompts, with room for what comes after."""
    rows = args.batch_size or len(prompts)
    room = args.max_new_tokens
    if asks:
        needs = [len(llm.encode(f"\n{ask}", [0])) - 1 + args.max_new_tokens for ask in asks]
        room = max(needs) if rows > 1 else sum(needs)  # a question a row, or all in the only one
    if args.load_cache:
        return llm.load(args.load_cache, room)
    llm.capacity = check_lengths(prompts, room, args.context, llm.model.config)
    llm.open(rows)  # says whether so many rows fit, before there is a prompt for each
    if asks:
        return llm.read(prompts)
    return llm.read([prompts[i % len(prompts)] for i in range(rows)])


def run_generate(args: argparse.Namespace) -> None:
    llm = llm_of(args, args.method, args.options)
    prompts, asks = read_prompts(args, llm)
    output = begin(llm, args, prompts, asks)
    if args.save_cache:
        llm.save(args.save_cache)

    answers = {}  # of each method
    streamed = llm.tokenizer is not None and len(llm.told) == 1 and not asks and not args.json
    if asks:
        output, answers[args.method] = llm.ask(
            asks, max_new_tokens=args.max_new_tokens, ignore_eos=args.ignore_eos
        )
    elif streamed:
        for piece in llm.stream(
            [], max_new_tokens=args.max_new_tokens, follow=True, ignore_eos=args.ignore_eos
        ):
            print(piece, end="", flush=True)
        print()
        output = output.then(llm.output)
    else:
        llm.generate([[]], max_new_tokens=args.max_new_tokens, follow=True, ignore_eos=args.ignore_eos)
        output = output.then(llm.output)
    figures = output.report

    # The same questions without compression, to compare with.
    is_compressed = args.method != "dense" and not llm.model.config.elitekv
    if asks and is_compressed and not args.json and not args.load_cache:
        del llm, output  # the method may have changed the weights
        llm = llm_of(args, "dense", {})
        begin(llm, args, prompts, asks)
        _, answers["dense"] = llm.ask(asks, max_new_tokens=args.max_new_tokens, ignore_eos=args.ignore_eos)

    for i, ask in enumerate(asks):
        print(ask.split("\n")[0])
        for method, said in answers.items():
            print(f"  {method + ':':10} {said[i]}")
    if llm.tokenizer and not asks and not streamed:
        for i, text in enumerate(figures["text"]):
            print(f"[row {i}] {text}")
    print(file=sys.stderr)
    for name, value in figures.items():
        if value and not isinstance(value, list | dict):
            print(f"{name:21} {human(value) if 'bytes' in name else value}", file=sys.stderr)
    if args.json:
        print(json.dumps(figures, separators=(",", ":")))


def run_command(run: Callable[[], None]) -> None:
    """Runs a command, in each process where torchrun has started several. What a user gets wrong ends in one
    line on stderr and exit code 2."""
    if is_one_of_several_processes():
        from extras import parallel

        parallel.run_together(run)  # ends the process
    run_alone(run)


def is_one_of_several_processes() -> bool:
    """Did torchrun start this process, and others with it?"""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"


def run_alone(run: Callable[[], None]) -> None:
    """Runs a command in this process."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", newline=None)  # as files are read
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may know fewer characters than a model
    try:
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


def leave(code: int, line: str) -> None:
    """Ends the process with a line on stderr, of characters that move no terminal."""
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    sys.exit(code)


def main() -> None:
    run_command(lambda: run_generate(parse_args(sys.argv[1:])))


if __name__ == "__main__":
    sys.modules["generate"] = sys.modules["__main__"]  # an extra that imports generate gets this one
    main()
