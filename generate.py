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
import math
import os
import platform
import random
import re
import stat
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
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

try:
    import resource
except ImportError:  # Windows
    resource = None

NANO = Path(__file__).resolve().parent / "checkpoints" / "nano"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LONGEST_TEXT, LONGEST_PROMPT = 4 * 10**9, 10**8  # bytes, characters
COMPILE_FROM = 4000  # new tokens: on two CPU cores compiling takes 6 to 22 s and gains 1 to 14 ms a token


class Progress:
    """A plain progress bar on stderr, in a with statement; silent for two seconds, and within another bar."""

    outer = None

    def __init__(self, label: str, total: float):
        self.label, self.total, self.done, self.started, self.shown = label, total, 0, time.time(), 0.0
        Progress.outer = Progress.outer or self

    def tick(self, n: float = 1) -> None:
        self.done = min(self.done + n, self.total)
        now = time.time()
        # On a terminal the bar moves in place; in a log file a line every ten seconds is enough.
        start, end, pause = ("\r", "  ", 0.1) if sys.stderr.isatty() else ("", "\n", 10)
        if self is Progress.outer and now - self.started > 2 and now - self.shown > pause:
            self.shown = now
            left = (now - self.started) / self.done * (self.total - self.done)
            bar = ("#" * int(30 * self.done / self.total)).ljust(30, ".")
            line = f"{start}{self.label} [{bar}] {self.done:.0f}/{self.total:.0f}, {left:.0f} s left"
            print(line, end=end, file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line of text above the bar."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.shown and sys.stderr.isatty():
            print("\r" + " " * 100 + "\r", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        if self is Progress.outer:
            Progress.outer = None
        self.clear()


def tracked(label: str, items: Collection) -> Iterator:
    """The items, one by one, with a progress bar."""
    with Progress(label, len(items)) as bar:
        for item in items:
            yield item
            bar.tick()


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


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()


class Engine:
    """A model, its caches, and the decode step over static buffers: tokens [B] int64 and pos [B] int32.

    `tokens` are the next to be written, at `pos`. On CUDA the step is captured once as a CUDA graph, before
    any prompt is read; the graph is right for every length, because lengths are read on the device."""

    def __init__(
        self, model: Llama, caches: list, context: Context, sampling: Sampling, compiled=False, graphed=False
    ):
        self.model, self.caches, self.context, self.sampling = model, caches, context, sampling
        self.tokens = torch.zeros(context.batch_size, dtype=torch.int64, device=context.device)
        self.pos = torch.zeros(context.batch_size, dtype=torch.int32, device=context.device)
        shape = (context.batch_size, model.config.vocab_size)
        self.logits = torch.zeros(shape, dtype=context.dtype, device=context.device)  # of the last step
        started = time.time()
        # extras/hopper.py may have a decode step of its own, with the same logits.
        hopper = kernels.hopper(context.device) if context.kernel else None
        chained = hopper and hopper.chained_decode(model, context.batch_size, model_file.shared_memory)
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
        n, pending = self.model.PROMPT_CHUNK, self.tokens.clone()
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
    synchronize(engine.context.device)
    started, made = time.time(), 0
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

CHAT_STYLES = {  # short chat templates, for folders that have none; Jinja drops the last line end of each
    "llama-3": "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n\n",
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n\n",
    "phi-3": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|assistant|>\n\n",
    "llama-2": "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {% if loop.index == 2 %}<<SYS>>\n"
    "{{ messages[0].content }}\n<</SYS>>\n\n{% endif %}{{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }} </s>{% endif %}{% endfor %}",
    "mistral": "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.index == 2 %}"
    "{{ messages[0].content }}\n\n{% endif %}{{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}",
}


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


def encode_chat(tokenizer, style: str, chat: list[dict[str, str]], system: str | None = None) -> list[int]:
    """Token ids of the prompt for the next answer. What a message says never becomes a control token.

    style: one of CHAT_STYLES, or "auto" for the tokenizer's own template. chat: dicts with role and content,
    user and assistant in turn, user last. Raises UserError where the template or a token of it is missing."""
    special, template = tokenizer.special_tokens, CHAT_STYLES.get(style, tokenizer.chat_template)
    if not template:
        styles = ", ".join(CHAT_STYLES)
        raise UserError(f"this model has no chat template; name one, such as --chat llama-2, of {styles}")
    needs = re.findall(r"</?s>|<\|\w+\|>", template) if style in CHAT_STYLES else []
    if missing := [name for name in needs if name not in special]:
        raise UserError(f"the tokenizer has no token {missing[0]}: choose the chat style of this model")
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
    return tokenizer.encode_segments(segments, bos=bool(needs))  # a model's own template says what leads it


# ------------------------------------------------------------------------------------------- the command line


def first_reads(read: Callable[[], str | None]) -> str | None:
    """What read() gives on rank 0, for all ranks: they have one stdin."""
    return gathered(None if ranks()[0] else read())[0]


def valid_text(read: Callable[[], str], source: str | Path) -> str:
    """What read() returns. Raises UserError where it is no UTF-8, as stdin and arguments may be."""
    try:
        text = read()
        text.encode()
    except UnicodeError:
        raise UserError(f"{source}: not UTF-8 text; convert it first") from None
    return text


def read_text(path: Path, most: int = LONGEST_TEXT, errors: str = "strict") -> str:
    """A file's text without a byte-order mark and with \\n for each line end, as run_command has stdin read.
    Raises UserError where it is no UTF-8, no regular file, or of more than `most` bytes."""
    if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > most:
        raise UserError(f"{path}: no regular file of at most {human(most)}; copy what is needed into one")
    return valid_text(lambda: path.read_text(encoding="utf-8-sig", errors=errors), path)


def prompt_text(prompt: str) -> str:
    """The text that TEXT, @file or - (stdin) stands for."""
    if prompt.startswith("@"):
        text = read_text(Path(prompt[1:]), LONGEST_PROMPT)
    else:
        stdin = partial(sys.stdin.read, LONGEST_PROMPT + 1)  # which may have no end
        text = valid_text(lambda: first_reads(stdin) if prompt == "-" else prompt, "--prompt")
    if not 0 < len(text) <= LONGEST_PROMPT:
        fault = "is longer than any model reads" if text else "is empty"
        raise UserError(f"the prompt {fault}; give some text, @file, - or a number of tokens")
    return text


def parse_prompt(prompt: str, tokenizer, config: ModelConfig, seed: int) -> list[int]:
    """TEXT, @file, - (stdin), or INTEGER: that many random token ids."""
    if prompt.isascii() and prompt.isdigit():
        count = int(prompt) if len(prompt) < 20 else 1 << 63  # Python reads no number of many digits
        if not count:
            raise UserError("--prompt 0: an empty prompt; give at least one token")
        check_capacity(count, config)
        rng = random.Random(seed)
        return [rng.randrange(3, config.vocab_size) for _ in range(count)]
    return tokenizer.encode(prompt_text(prompt))


def check_lengths(prompts: list[list[int]], extra: int, capacity: int | None, config: ModelConfig) -> int:
    """The cache's capacity in tokens. Raises UserError where prompt and new tokens do not fit."""
    longest = max(map(len, prompts)) + extra
    if not all(prompts):
        raise UserError("the prompt has no tokens; give some text")
    if outside := [i for ids in prompts for i in ids if not 0 <= i < config.vocab_size]:
        fault = f"token id {outside[0]} is outside the model's vocabulary of {config.vocab_size}"
        raise UserError(f"{fault}; the tokenizer belongs to another model")
    if not capacity:
        check_capacity(longest, config)
        return longest
    if longest > capacity:
        need = f"prompt and new tokens need {longest} positions"
        raise UserError(f"{need}, the cache has {capacity}; raise --context")
    check_capacity(capacity, config, "--context")
    return capacity


def check_capacity(capacity: int, c: ModelConfig, shorten: str = "the prompt or --max_new_tokens") -> None:
    """Raises UserError for more positions than the model was made for, with what to shorten."""
    if capacity > c.max_positions:
        fault = f"{capacity} positions are more than the model's {c.max_positions}"
        raise UserError(f"{fault}; shorten {shorten}")
    if c.sliding_window and capacity > c.sliding_window:
        fault = f"this model attends a sliding window of {c.sliding_window} tokens, and no more is supported"
        raise UserError(f"{fault}; shorten {shorten} to {c.sliding_window}")


def fold_of(method: str, options: dict, args: argparse.Namespace) -> Callable | None:
    """With --weights int8: what folds a method into layer i of a model, before its weights are quantised."""
    settings, artifact = settings_from(method, options), lru_cache(partial(artifact_for, method, args=args))
    fold_all = method_named(method).fold_all
    return args.weights and (lambda model, i: fold_all(model, settings, artifact(model), [i]))


def load(args, needs_tokenizer: bool = True, fold: Callable | None = None) -> tuple[Llama, object]:
    """The model and its tokenizer (None where it cannot be had, nor is needed). fold: what fold_of gives."""
    device, dtype = device_and_dtype(args)
    if args.random_weights:
        config = dataclasses.replace(model_file.SHAPES[args.random_weights], max_positions=1 << 20)
        return model_file.random_model(config, device, dtype, args.seed, fold), None
    if not args.checkpoint.is_dir():
        fault = "a file of another format" if args.checkpoint.is_file() else "there is no such folder"
        raise UserError(f"{args.checkpoint}: {fault}; give a Hugging Face checkpoint folder")
    model = model_file.load_model(args.checkpoint, device, dtype, fold)
    try:
        return model, model_file.load_tokenizer(args.checkpoint)
    except UserError:
        if needs_tokenizer:
            raise
        return model, None


def device_and_dtype(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    if not re.fullmatch(r"cpu|cuda(:\d\d?)?", args.device):
        raise UserError(f"--device {args.device} is not supported; use cpu or cuda")
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device here; use --device cpu")
    if device.type == "cuda" and ranks()[1] > 1:
        own, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if own >= count:
            raise UserError(f"a rank needs a CUDA device of its own; use --nproc_per_node {count}")
        torch.cuda.set_device(own)
        device = torch.device("cuda", own)
    return device, DTYPES.get(args.dtype) or (torch.float32 if device.type == "cpu" else torch.bfloat16)


def artifact_for(method: str, model: Llama, args: argparse.Namespace) -> dict[str, Tensor]:
    """The tensors that `calibrate.py fit` made for this method and model."""
    if args.random_weights:
        return compress.random_artifact(method, model.config)
    return load_artifact(args.checkpoint, method, model)


def plan_caches(
    model: Llama, method: str, settings: object, artifact: dict[str, Tensor], rows: int, capacity: int
) -> list[Cache]:
    """The method's caches on the meta device: their bytes and their refusals, without their memory."""
    with torch.device("meta"):
        shadow = Llama(model.config).to(model.norm.weight.dtype)
    return method_named(method).build(shadow, settings, Context(shadow, rows, capacity), artifact)


def check_memory(
    model: Llama, method: str, settings: object, artifact: dict[str, Tensor], rows: int, capacity: int
) -> None:
    """Raises UserError, with what would fit, where the caches would not. Takes no memory itself."""
    caches, device = plan_caches(model, method, settings, artifact, 1, capacity), model.norm.weight.device
    needs = {"cpu": sum(cache.host_bytes() for cache in caches)}
    needs[device.type] = needs.get(device.type, 0) + sum(cache.formula() for cache in caches)
    for kind, row_bytes in needs.items():
        needed, free = rows * row_bytes, free_memory(torch.device(kind))
        if needed > free:
            fewer, tokens = int(rows * free / needed), int(capacity * free / needed)
            fits = [f"{fewer} rows"] * (fewer > 0) + [f"{tokens} tokens a row"] * (tokens > 0) or ["nothing"]
            raise UserError(
                f"not enough memory: the {method} cache of {rows} rows x {capacity} tokens needs "
                f"{human(needed)} ({kind}), {human(free)} are free; {' or '.join(fits)} would fit"
            )


def prepare(
    model: Llama, method: str, options: dict, args, rows: int, capacity: int
) -> tuple[str, object, Context, dict[str, Tensor]]:
    """The method, its settings, context and artifact. Raises UserError where they do not fit one another, the
    model or the memory, before anything is built."""
    settings, artifact = settings_from(method, options), artifact_for(method, model, args)
    check_memory(model, method, settings, artifact, rows, capacity)
    return method, settings, Context(model, rows, capacity, args.kernels), artifact


def cost_shares(settings: object, caches: list[Cache]) -> dict[str, float]:
    """Bytes per token by formula, and tokens attended of a full row, as shares of dense."""
    capacity, dense = caches[0].context.capacity, len(caches) * dense_bytes(caches[0].context)
    budget = settings.budget(capacity) if hasattr(settings, "budget") else (capacity,)
    held = sum(cache.formula() for cache in caches)
    return {"bytes": held / dense, "tokens": min(1.0, sum(budget) / capacity)}


def idle_note(method: str, settings: object, caches: list[Cache]) -> str:
    """One line where a method's settings leave it nothing to do, else nothing."""
    context, n, costs = caches[0].context, len(caches), cost_shares(settings, caches)
    if hasattr(settings, "budget") and costs["tokens"] == 1:
        return f"the budget covers the context of {context.capacity} tokens: every token is attended"
    if hasattr(settings, "skip") and len(compress.skipped_layers(settings, n)) == n:
        return f"--skip {settings.skip} names all {n} layers: every token is attended"
    read = context.batch_size * sum(cache.bytes_read(context.capacity) for cache in caches)
    if method != "dense" and costs["bytes"] >= 1 and read >= n * dense_bytes(context):
        return f"with these settings {method} keeps no fewer bytes than dense, and reads no fewer in a step"
    return ""


def build_engine(
    model: Llama, args, method: str, settings: object, context: Context, artifact: dict[str, Tensor]
) -> Engine:
    """An engine of what prepare returned; it may change the model's weights."""
    caches = method_named(method).build(model, settings, context, artifact)
    if text := idle_note(method, settings, caches):
        print(f"note: {text}", file=sys.stderr)
    graphed = context.device.type == "cuda"
    compiled = (graphed or args.max_new_tokens >= COMPILE_FROM) if args.compile is None else args.compile
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    try:
        return Engine(model, caches, context, sampling, compiled, graphed)
    except (torch._dynamo.exc.TorchDynamoException, OSError) as error:
        first, *output = str(error).split("\nOutput:\n")  # what a C++ compiler said
        cause = ": ".join(text.split("\n")[0] for text in (first, *output))
        if args.compile:
            raise UserError(f"--compile failed ({cause}); use --no-compile") from error
    print(f"note: the step is not compiled ({cause})", file=sys.stderr)
    return Engine(model, caches, context, sampling, False, graphed)


def run_prompts(
    engine: Engine, prompts: list[list[int]], asks: list[str], args, tokenizer, emit=None
) -> Output:
    """Prefills the prompts, then generates: once, or after each of `asks`, one answer after another."""
    torch.manual_seed(args.seed)
    synchronize(engine.context.device)
    started = time.time()
    engine.prefill(prompts)
    synchronize(engine.context.device)
    prefill_s = time.time() - started
    stop_ids = set() if args.ignore_eos or tokenizer is None else tokenizer.stop_ids
    stop_text = args.stop or ("\n" if asks else "")
    window = 16 + len(stop_text.encode())  # tokens that surely hold a stop text that has just ended

    def stops(ids: list[int]) -> bool:
        said = tokenizer.decode(ids[-window:], after=prompts[0]) if stop_text else ""  # keeps a first space
        return ids[-1] in stop_ids or bool(stop_text) and stop_text in said

    if not asks:
        stride = 16 if engine.context.device.type == "cuda" else 1
        output = decode_rows(engine, args.max_new_tokens, stops, emit, stride)
    else:
        output = Output([[] for _ in prompts])
        for ask in asks:
            ids, started = tokenizer.encode_continuation("\n" + ask), time.time()
            engine.feed([ids])
            synchronize(engine.context.device)
            feed_s = time.time() - started
            part = decode_rows(engine, args.max_new_tokens, stops)
            output.token_ids = [a + b for a, b in zip(output.token_ids, part.token_ids, strict=True)]
            output.answers.append(tokenizer.decode(part.token_ids[0]).strip())
            output.decode_s, output.steps = output.decode_s + part.decode_s, output.steps + part.steps
            output.first_token_s = output.first_token_s or feed_s + part.first_token_s
            output.asked += len(ids)
    output.prefill_s = prefill_s
    output.first_token_s += prefill_s
    return output


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that CUDA's allocator held, or this process's largest resident size (0: not known)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if resource else 0


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of a large copy, counting what is read and what is written."""
    source = torch.ones(1 << (28 if device.type == "cuda" else 25), dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        synchronize(device)
        started = time.time()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.time() - started)
    return 2 * source.nbytes / best


def report(
    engine: Engine, method: str, options: dict, prompts: list[list[int]], output: Output, args, tokenizer
) -> dict:
    """The run in figures: counts are per row, bytes are those of all ranks, each rank's under "ranks"."""
    context, model = engine.context, engine.model
    rows = list(zip(prompts, output.token_ids, strict=True))
    lengths = [len(p) + output.asked + len(t) for p, t in rows]
    read = sum(cache.bytes_read(n) for cache in engine.caches for n in lengths)
    embeddings, weights = model.tok_embeddings.weight, sum(p.nbytes for p in model.parameters())
    weights_read = weights - (0 if model.output.weight is embeddings else embeddings.nbytes)
    per_step = output.decode_s / max(1, output.steps)
    rates = [rate for rate in (cache.miss_rate() for cache in engine.caches) if rate is not None]
    own = {
        "cache_bytes_measured": sum(cache.measured() for cache in engine.caches),
        "cache_bytes_formula": sum(cache.formula() for cache in engine.caches),
        "cache_bytes_dense": dense_bytes(context) * len(engine.caches),
        "cache_bytes_host": sum(cache.host_bytes() for cache in engine.caches),
        "bytes_read_per_step": read,
        "weights_bytes": weights,
        "peak_memory_bytes": peak_memory(context.device),
    }
    each = gathered(own)
    movable = output.steps and per_step * measure_bandwidth(context.device)  # after the peak was read
    return {
        "method": method,
        "variant": options.get("variant", "ours"),
        "settings": dataclasses.asdict(settings_from(method, options)),
        "model": args.random_weights or str(args.checkpoint),
        "device": device_name(context.device),
        "dtype": str(context.dtype).removeprefix("torch."),
        "weights": args.weights or str(context.dtype).removeprefix("torch."),
        "prompt_tokens": [len(p) + output.asked for p in prompts],
        "new_tokens": [len(t) for t in output.token_ids],
        "token_ids": output.token_ids,
        "text": [tokenizer.decode(t, after=p) if tokenizer else "" for p, t in rows],
        "prefill_s": round(output.prefill_s, 4),
        "first_token_s": round(output.first_token_s, 4),
        "decode_tokens_per_s": round(context.batch_size / per_step, 2) if output.steps else None,
        **{name: sum(rank[name] for rank in each) for name in own},
        "ranks": each,
        "miss_rate": round(sum(rates) / len(rates), 4) if rates else None,
        "cache_tokens": context.batch_size * context.capacity,
        "bandwidth_share": round((weights_read + read) / movable, 4) if movable else None,
        "capture_s": round(engine.capture_s, 3),
        "seed": args.seed,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def device_name(device: torch.device) -> str:
    is_cpu = device.type == "cpu"
    return f"cpu ({torch.get_num_threads()} threads)" if is_cpu else torch.cuda.get_device_name(device)


def print_report(r: dict) -> None:
    tokens, rows = r["cache_tokens"], len(r["prompt_tokens"])
    measured, formula, dense = (r[f"cache_bytes_{kind}"] for kind in ("measured", "formula", "dense"))
    share = f", {r['bandwidth_share']:.1%} of the memory bandwidth measured" if r["bandwidth_share"] else ""
    compiled = f", step compiled in {r['capture_s']:.1f} s" if r["capture_s"] else ""
    missed = "" if r["miss_rate"] is None else f"; {r['miss_rate']:.1%} of the selected rows come from there"
    most = {name: human(max(rank[name] for rank in r["ranks"])) for name in r["ranks"][0]}
    each_rank = (
        f"\n{len(r['ranks'])} ranks      each at most {most['cache_bytes_measured']} of cache, "
        f"{most['bytes_read_per_step']} a step, {most['peak_memory_bytes']} at the peak"
    )
    host = f"\nhost memory  {human(r['cache_bytes_host'])}{missed}" if r["cache_bytes_host"] else ""
    print(
        f"""
{r["method"]}{", as in the paper," * (r["variant"] == "paper")} on {r["model"]}, {r["dtype"]}, {r["device"]}
tokens       {sum(r["prompt_tokens"])} read, {sum(r["new_tokens"])} made, in {rows} row(s)
time         prefill {r["prefill_s"]:.2f} s, first token after {r["first_token_s"]:.2f} s{compiled}
decode       {r["decode_tokens_per_s"]} tokens/s{share}
weights      {human(r["weights_bytes"])}{" in int8, but for embeddings and norms" * (r["weights"] == "int8")}
cache        {human(measured)} measured, {human(dense)} dense ({measured / dense:.1%})
per token    {measured / tokens:.0f} B, {formula / tokens:.0f} by formula, {dense / tokens:.0f} dense{host}
each step    reads {human(r["bytes_read_per_step"])} of cache
peak memory  {human(r["peak_memory_bytes"])}{each_rank if len(r["ranks"]) > 1 else ""}""",
        file=sys.stderr,
    )


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, and that takes options by their full names only."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> None:
        raise UserError(f"{message}; see --help")

    def option(self, name: str, kind: Callable, default: object, about: str, **more) -> None:
        """An option of one value, or of several (nargs, or action "append"). Its help says its default."""
        if default is not None:
            shown = default if not isinstance(default, tuple | list) else " ".join(map(str, default))
            about = f"{about} (default {shown})"
        self.add_argument(name, type=kind, default=default, help=about.replace("%", "%%"), **more)

    def flag(self, name: str, about: str, action: object = "store_true") -> None:
        self.add_argument(name, action=action, help=about)


def number(kind: type, *rules: tuple[Callable, str]) -> Callable[[str], float]:
    """Reads a number of the command line. rules: what must hold of it, and what is said where it does not."""

    def read(text: str) -> float:
        value = kind(text)
        for holds, fault in rules:
            if not holds(value):
                raise argparse.ArgumentTypeError(f"{text} {fault}")
        return value

    read.__name__ = "whole number" if kind is int else "number"  # argparse's word where kind(text) fails
    return read


FINITE = (math.isfinite, "is not a finite number")
FITS = (lambda value: abs(value) < 1 << 32, "is too large a number")
finite, integer = number(float, FINITE), number(int, FITS)
positive = number(float, FINITE, (lambda value: value > 0, "is not above 0"))
fraction = number(float, (lambda value: 0 < value <= 1, "does not lie in (0, 1]"))


def whole(least: int, most: int = 1 << 32) -> Callable[[str], int]:
    """Reads a whole number of at least `least` and at most `most`."""
    enough = (lambda value: value >= least, f"is not a whole number of at least {least}")
    return number(int, FITS, enough, (lambda value: value <= most, f"is more than {most}"))


def value_type(kind: type) -> Callable[[str], object]:
    """What reads a setting of this type from the command line."""
    return {float: finite, int: integer}.get(kind, kind)


def add_settings(parser: argparse.ArgumentParser, method: str) -> None:
    """One option for each field of the method's settings dataclass."""
    row = method_named(method)
    group = parser.add_argument_group(f"settings of --method {method}", row.settings.__doc__)
    if row.paper:
        about = "all settings as published, or those that are better on real models (default ours)"
        group.add_argument("--variant", default=argparse.SUPPRESS, choices=compress.VARIANTS, help=about)
    for f in dataclasses.fields(row.settings):
        kind = {"action": argparse.BooleanOptionalAction} if f.type is bool else {"type": value_type(f.type)}
        default = f" (default {('off', 'on')[f.default] if f.type is bool else f.default}"
        default += f"; paper {row.paper[f.name]})" if f.name in row.paper else ")"
        group.add_argument(
            f"--{f.name}",
            default=argparse.SUPPRESS,
            choices=f.metadata["choices"],
            help=(f.metadata["help"] + default).replace("%", "%%"),
            **kind,
        )


def chosen_settings(args: argparse.Namespace, method: str) -> dict:
    names = ["variant", *(f.name for f in dataclasses.fields(method_named(method).settings))]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def add_device_option(parser: Parser) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.option("--device", str, device, "cpu or cuda")


def add_model_options(parser: Parser) -> None:
    about = "a Hugging Face folder: config.json, *.safetensors, tokenizer (default: the embedded model)"
    parser.add_argument("--checkpoint", type=Path, default=NANO, metavar="FOLDER", help=about)
    add_device_option(parser)
    about = "fp32, bf16 or fp16; auto: fp32 on the CPU, bf16 on a GPU"
    parser.option("--dtype", str, "auto", about, choices=("auto", *DTYPES))
    parser.set_defaults(weights=None, random_weights=None)


def add_weights_option(parser: Parser) -> None:
    about = "int8: weights of the linear layers in 8 bits, with a scale for each output (default: as --dtype)"
    parser.option("--weights", str, None, about, choices=("int8",))


def parse_args(argv: list[str]) -> argparse.Namespace:
    names = compress.method_names() if {"-h", "--help"} & {*argv} else ()
    about = "\n".join(f"  {name:13}{method_named(name).settings.__doc__}" for name in names)
    title, epilog = __doc__.split("\n\n")
    parser = Parser(description=f"{title}\n\nmethods:\n{about}", epilog=epilog)
    parser.option("--method", str, "dense", "what the cache stores; its settings appear below")
    add_model_options(parser)
    add_weights_option(parser)
    about = f"random weights of a published shape, to measure speed: {', '.join(model_file.SHAPES)}"
    parser.option("--random_weights", str, None, about, metavar="SHAPE", choices=list(model_file.SHAPES))
    parser.option("--seed", whole(0), 0, "of sampling, random prompts and random weights")
    parser.flag("--json", "print the report as one JSON object, the last line of stdout")
    about = "text, a file, stdin, or N random tokens; repeat it for a batch (default: the folder's demo.txt)"
    parser.option("--prompt", str, None, about, action="append", metavar="TEXT|@FILE|-|N")
    about = "a question to feed after the prompt through the cache; repeat it for several, one by one"
    parser.option("--ask", str, None, about, action="append", metavar="TEXT")
    about = "stop where this text is complete; its beginning may remain (default with --ask: a line end)"
    parser.option("--stop", str, None, about, metavar="TEXT")
    parser.option("--batch_size", whole(1), None, "rows; the prompts are repeated to fill them")
    parser.option("--prefill_chunk", whole(1), None, "tokens of a prompt to read at once (default: all)")
    parser.option("--max_new_tokens", whole(1), 100, "tokens to make for each prompt")
    parser.option("--context", whole(1), None, "tokens that the cache can hold (default: the prompts' need)")
    parser.option("--temperature", finite, 0.0, "0 is greedy")
    parser.option("--top_k", whole(0), 0, "sample among the k likeliest tokens; 0: all")
    parser.option("--top_p", fraction, 1.0, "sample among the tokens that hold this probability")
    parser.flag("--ignore_eos", "always make max_new_tokens tokens")
    about = f"compile the step, on CUDA to a graph (default: on CUDA, and from {COMPILE_FROM} new tokens on)"
    parser.flag("--compile", about, argparse.BooleanOptionalAction)
    about = "the Triton kernels, or plain PyTorch (default: kernels on CUDA)"
    parser.flag("--kernels", about, argparse.BooleanOptionalAction)
    parser.flag("--interactive", "read one turn a line from the terminal")
    about = "wrap prompts as the model's chats are; auto: by its own template"
    parser.option("--chat", str, None, about, nargs="?", const="auto", choices=("auto", *CHAT_STYLES))
    parser.option("--system", str, None, "with --chat: the system message", metavar="TEXT")
    # The method decides which settings exist, so it is read first.
    early = Parser(add_help=False)
    early.add_argument("--method", default="dense")
    add_settings(parser, early.parse_known_args(argv)[0].method)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(f"{unknown[0]} is neither an option nor a setting of {args.method}; see --help")
    made, texts = args.random_weights, args.chat or args.stop or args.ask or args.interactive
    numbers = args.prompt and all(p.isascii() and p.isdigit() for p in args.prompt)  # of random tokens
    args.needs_tokenizer = bool(texts or not numbers)
    batch = args.prompt or args.ask or args.stop or args.batch_size or args.json
    for wrong, fault in (
        (args.temperature < 0, "--temperature must be at least 0"),
        (made and args.needs_tokenizer, "random weights have no tokenizer; give --prompt INTEGER, not text"),
        (made and args.checkpoint != NANO, "--random_weights stands in for a --checkpoint; give one of them"),
        (args.interactive and batch, "--interactive takes no --prompt, --ask, --stop, --batch_size, --json"),
        (args.chat and not (args.interactive or args.prompt), "--chat needs a --prompt, or --interactive"),
        (args.chat and args.ask, "--ask is fed as it stands; ask in a --chat by --interactive"),
        (args.system and not args.chat, "--system needs --chat"),
    ):
        if wrong:
            raise UserError(fault)
    for text in (*(args.ask or ()), args.stop, args.system):
        if text is not None and not valid_text(lambda text=text: text, "--ask, --stop or --system"):
            raise UserError("--ask, --stop and --system need a text that is not empty")
    return args


def demo_prompt(checkpoint: Path) -> tuple[str, list[str]]:
    """The checkpoint's demo.txt: the document, and the questions at its end (each from "Question:" on)."""
    path = checkpoint / "demo.txt"
    if not path.is_file():
        raise UserError("give a --prompt: this checkpoint has no demo.txt")
    document, *asks = read_text(path).split("\nQuestion:")
    return document, [f"Question:{ask}".rstrip("\n") for ask in asks]


def read_prompts(args: argparse.Namespace, model: Llama, tokenizer) -> tuple[list[list[int]], int, list[str]]:
    """Token ids of the prompts, the rows that they fill in turn, and the questions to ask after them."""
    asks = args.ask or []
    if args.prompt is None:
        document, demo_asks = demo_prompt(args.checkpoint)
        prompts, asks = [tokenizer.encode(document)], asks or demo_asks
    elif args.chat:
        chats = ([{"role": "user", "content": prompt_text(p)}] for p in args.prompt)
        prompts = [encode_chat(tokenizer, args.chat, chat, args.system) for chat in chats]
    else:
        prompts = [parse_prompt(p, tokenizer, model.config, args.seed + i) for i, p in enumerate(args.prompt)]
    rows = args.batch_size or len(prompts)
    if asks and (tokenizer is None or rows > 1):
        raise UserError("--ask takes one prompt, one row and a model with a tokenizer")
    if rows < len(prompts):
        raise UserError(f"--batch_size {rows} is less than the {len(prompts)} prompts given")
    return prompts, rows, asks


def streamer(tokenizer, after: list[int]) -> tuple[Callable[[int, int], None], Callable[[], None]]:
    """emit(row, token) prints a row's text as it is made, finish() its end; `after` are the ids before it."""
    stream = StreamDecoder(tokenizer, after)
    return lambda row, token: print(stream.push(token), end="", flush=True), lambda: print(stream.flush())


def run_generate(args: argparse.Namespace) -> None:
    options = chosen_settings(args, args.method)
    model, tokenizer = load(args, args.needs_tokenizer, fold_of(args.method, options, args))
    model.PROMPT_CHUNK = args.prefill_chunk or model.PROMPT_CHUNK
    if args.interactive:
        return run_interactive(args, model, tokenizer)
    prompts, rows, asks = read_prompts(args, model, tokenizer)
    asked = sum(len(tokenizer.encode_continuation("\n" + ask)) + args.max_new_tokens for ask in asks)
    capacity = check_lengths(prompts, asked or args.max_new_tokens, args.context, model.config)

    answers, prepared = {}, prepare(model, args.method, options, args, rows, capacity)
    prompts = [prompts[i % len(prompts)] for i in range(rows)]
    if asks and args.method != "dense" and not args.json and not model.config.elitekv:
        # Dense goes first: building a method's caches may change the weights. In int8 they are changed now.
        plain = load(args, fold=fold_of("dense", {}, args))[0] if args.weights else model
        plain.PROMPT_CHUNK = model.PROMPT_CHUNK
        engine = build_engine(plain, args, *prepare(plain, "dense", {}, args, rows, capacity))
        answers["dense"] = run_prompts(engine, prompts, asks, args, tokenizer).answers
        del engine, plain
    engine = build_engine(model, args, *prepared)
    stream = tokenizer is not None and len(prompts) == 1 and not asks and not args.json
    emit, finish = streamer(tokenizer, prompts[0]) if stream else (None, None)
    output = run_prompts(engine, prompts, asks, args, tokenizer, emit)
    figures = report(engine, args.method, options, prompts, output, args, tokenizer)
    answers = {args.method: output.answers} | answers
    for i, ask in enumerate(asks):
        print(ask.split("\n")[0])
        for method, said in answers.items():
            print(f"  {method + ':':10} {said[i]}")
    if finish:
        finish()
    elif tokenizer and not asks:
        for i, text in enumerate(figures["text"]):
            print(f"[row {i}] {text}")
    print_report(figures)
    if args.json:
        print(json.dumps(figures, separators=(",", ":")))


def read_turn() -> str | None:
    """A line of the terminal; None at its end."""
    try:
        return valid_text(lambda: input("> "), "stdin")
    except EOFError:
        return None


def run_interactive(args: argparse.Namespace, model: Llama, tokenizer) -> None:
    """One turn a line; the conversation stays in the cache. --chat wraps turns in the model's template."""
    capacity = args.context or min(4096, model.config.max_positions, model.config.sliding_window or 4096)
    check_capacity(capacity, model.config, "--context")
    options = chosen_settings(args, args.method)
    engine = build_engine(model, args, *prepare(model, args.method, options, args, 1, capacity))
    history, transcript, held = [], [], 0  # messages, token ids, and how many of these the cache holds

    def read_history() -> list[int]:
        if args.chat:
            return encode_chat(tokenizer, args.chat, history, args.system)
        return tokenizer.encode("".join(message["content"] for message in history).removeprefix("\n"))

    torch.manual_seed(args.seed)
    while True:
        line = first_reads(read_turn)
        if line is None:
            return print()
        if not line:
            continue
        history.append({"role": "user", "content": line if args.chat or not history else "\n" + line})
        goes_on = transcript and not args.chat
        ids = transcript + tokenizer.encode_continuation("\n" + line) if goes_on else read_history()
        while len(ids) + args.max_new_tokens > capacity and len(history) > 1:
            print("note: the cache is full; the oldest turn is forgotten", file=sys.stderr)
            del history[:2]
            ids = read_history()
        check_lengths([ids], args.max_new_tokens, capacity, model.config)
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


def fail(message: object) -> None:
    """Ends with exit code 2 and one line on stderr: at most 300 characters, none that moves a terminal."""
    line = f"error: {message}"
    line = line if len(line) <= 300 else f"{line[:150]} ... {line[-145:]}"
    print("".join(c if c.isprintable() else "?" for c in line), file=sys.stderr)
    if ranks()[1] > 1:
        leave(2)
    sys.exit(2)


def leave(code: int) -> None:
    """Ends one of several ranks at once: Python's own end may wait for the others."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


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
            leave(2)
        sys.stderr = stderr
        raise
    dist.destroy_process_group()
    leave(0)


def run_command(run: Callable[[], None]) -> None:
    """Runs a command; the user's mistakes end in one line on stderr and exit code 2."""
    as_files, known = {"encoding": "utf-8-sig", "newline": None}, {"errors": "replace"}
    for name, mode, how in (("stdin", "r", as_files), ("stdout", "w", known), ("stderr", "w", known)):
        stream = getattr(sys, name) or open(os.devnull, mode)  # None: it is closed
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):  # a terminal may know fewer characters than a model
            stream.reconfigure(**how)
    try:
        with joined_ranks():
            run()
    except UserError as error:
        fail(error)
    except BrokenPipeError:  # whoever read stdout has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    except (MemoryError, RuntimeError) as error:
        told = str(error) or "out of memory"
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "allocate memory" not in told:
            raise
        fail(f"not enough memory ({told.splitlines()[0]}); use a smaller model, fewer or shorter rows")
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


def main() -> None:
    run_command(lambda: run_generate(parse_args(sys.argv[1:])))


if __name__ == "__main__":
    main()
