"""Train the embedded model from scratch, or uptrain a checkpoint for EliteKV.

    python -m extras.train --out FOLDER --text books:0.3 code:0.7 --state nano.state --minutes 10
    python -m extras.train --from FOLDER --out NEW --distill --text books --stages 16x2048x6000

From scratch: a Llama of nano's shape learns from documents of three kinds, which are plain text,
repeated random segments, and texts with facts in them and questions about those. Its tokenizer is
that of --out, or the embedded one. Stages follow one another, the longest documents not last.

With --from: a checkpoint that `calibrate.py fit --method elitekv` has fitted is put into EliteKV's
form, and all its weights are trained on. --distill teaches it what the checkpoint itself says.

With --state the same command goes on where the last one stopped: after --minutes, or Ctrl-C.
"""

import argparse
import json
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import compress
from calibrate import input_roots, text_files, text_ids, writable_file, writable_folder
from compress import (
    load_artifact,
    method_named,
    replacing,
    replacing_file,
    save_artifact,
    settings_from,
)
from extras.evaluate import TASKS, TRAINED_TASKS, Candidate, Haystack
from generate import Parser, fraction, positive, whole
from model import (
    Attention,
    Llama,
    ModelConfig,
    UserError,
    config_to_hf,
    fingerprint,
    load_model,
    load_tokenizer,
    read_json,
    weight_files,
    weight_slots,
)

# ---------------------------------------------------------------------------------------- documents

# Weights of the loss, where a token of plain text has 1.
ANSWER_WEIGHT = 3.0
FACT_WEIGHT = 0.2


def training_document(
    hay: Haystack,
    rng: random.Random,
    n: int,
) -> tuple[np.ndarray, np.ndarray]:
    """n token ids (int32, BOS first), and the weight of each in the loss (fp32).

    40 % of the documents are plain text, 10 % have repeated segments, 50 % facts and questions."""
    draw = rng.random()
    if draw < 0.4:
        ids = hay.sample(rng, n)
        weights = np.ones(n, np.float32)
    elif draw < 0.5:
        ids, weights = repeating_document(hay, rng, n)
    else:
        ids, weights = retrieval_document(hay, rng, n)
    ids[0] = hay.tokenizer.bos_id
    return ids, weights


def repeating_document(
    hay: Haystack,
    rng: random.Random,
    n: int,
) -> tuple[np.ndarray, np.ndarray]:
    """A text of n tokens, where random tokens come two or three times: ids and weights.

    What came before can be predicted by copying alone, which is how a model learns to."""
    ids = hay.sample(rng, n)
    weights = np.ones(n, np.float32)
    longest = max(1, min(256, n // 4))
    length = rng.randint(min(8, longest), longest)
    vocabulary = len(hay.starts_word)
    segment = np.array([rng.randrange(3, vocabulary) for _ in range(length)], np.int32)
    places = range(0, max(1, n - length), length)
    times = rng.randint(2, 3)
    starts = sorted(rng.sample(places, min(times, len(places))))
    for start in starts:
        ids[start : start + length] = segment
    # The first time the segment is noise, which cannot be predicted.
    weights[starts[0] : starts[0] + length] = FACT_WEIGHT
    return ids, weights


def in_random_turns(rng: random.Random, groups: list[list]) -> list:
    """The items of all groups, mixed at random; those of one group stay in their order."""
    turns = []  # numbers of the groups
    for i, group in enumerate(groups):
        turns += [i] * len(group)
    rng.shuffle(turns)
    iterators = [iter(group) for group in groups]
    return [next(iterators[i]) for i in turns]


def retrieval_document(
    hay: Haystack,
    rng: random.Random,
    n: int,
) -> tuple[np.ndarray, np.ndarray]:
    """A text of n tokens with facts of one to three kinds, then questions: ids and weights."""
    n_kinds = rng.choice((1, 1, 2, 3)) if n >= 1024 else 1
    kinds = rng.sample(TRAINED_TASKS, n_kinds)
    facts = []  # of each kind
    tasks = []
    for kind in kinds:
        of_kind = TASKS[kind](rng, n // n_kinds, None)
        facts.append(of_kind[0].facts)  # all tasks of a kind are about the same facts
        tasks += of_kind
    facts = in_random_turns(rng, facts)

    questions = []  # pieces of the text's end, with their weights
    for task in rng.sample(tasks, len(tasks)):
        questions.append((hay.encode(f"\nQuestion: {task.question}"), FACT_WEIGHT))
        questions.append((hay.encode(task.answer + "\n"), ANSWER_WEIGHT))
    n_text = n - sum(len(ids) for ids, _ in questions)

    pieces = []
    for i, ids in enumerate(hay.bury(rng, facts, n_text)):
        is_fact = i % 2 == 1
        pieces.append((ids, FACT_WEIGHT if is_fact else 1.0))
    pieces += questions
    ids = np.concatenate([ids for ids, _ in pieces])
    weights = np.concatenate([np.full(len(ids), weight, np.float32) for ids, weight in pieces])
    return ids[-n:], weights[-n:]  # where facts and questions alone are longer


@dataclass
class Stage:
    """A part of the training: `steps` steps, each over `batch` documents of `length` tokens."""

    batch: int
    length: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> "Stage":
        """Reads BATCHxLENGTHxSTEPS. Raises UserError for anything else."""
        read_number = whole(1)
        try:
            batch, length, steps = text.split("x")
            return cls(read_number(batch), read_number(length), read_number(steps))
        except (ValueError, argparse.ArgumentTypeError):
            fault = "write BATCHxLENGTHxSTEPS, such as 64x2048x1000"
            raise UserError(f"stage {text!r}: {fault}") from None


def training_batch(hay: Haystack, plan: list[Stage], seed: int, i: int) -> tuple[Tensor, Tensor]:
    """Batch i of the training, which any process can make: it depends on the seed and i alone.

    plan: the stage of each step. Returns tokens [B, S + 1] int64 and the weights [B, S] fp32 of
    what each of the first S tokens predicts."""
    rng = random.Random(f"{seed}-{i}")
    stage = plan[i]
    tokens = []
    weights = []
    for _ in range(stage.batch):
        document, document_weights = training_document(hay, rng, stage.length + 1)
        tokens.append(document)
        weights.append(document_weights)
    tokens = torch.from_numpy(np.stack(tokens))
    weights = torch.from_numpy(np.stack(weights))
    return tokens.long(), weights[:, 1:].contiguous()


# ------------------------------------------------------------------------------------------- losses

HEAD_CHUNK = 4096  # tokens whose logits exist at once


def label_loss(log_p: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The cross entropy of labels [N] under log-probabilities [N, V], weighted by [N], summed."""
    return (weights * F.nll_loss(log_p, labels, reduction="none")).sum()


def teacher_loss(log_p: Tensor, teacher_log_p: Tensor) -> Tensor:
    """The KL divergence of the model's distribution from the teacher's, both [N, V], summed."""
    return F.kl_div(log_p, teacher_log_p, reduction="sum", log_target=True)


def heads_loss(outputs: list[Tensor], teacher_outputs: list[Tensor]) -> Tensor:
    """The squared error of what heads give, relative to its mean square: the mean of all layers.

    Both are attention_outputs', one [B, S, Hq, D] for each layer."""
    total = 0.0
    for output, wanted in zip(outputs, teacher_outputs, strict=True):
        output = output.float()
        wanted = wanted.float()
        total = total + F.mse_loss(output, wanted) / wanted.square().mean() / len(outputs)
    return total


def logits_loss(
    x: Tensor,
    matrix: Tensor,
    labels: Tensor,
    weights: Tensor,
    teacher_x: Tensor | None,
    teacher_matrix: Tensor | None,
    teacher_weight: float,
) -> Tensor:
    """label_loss, and teacher_weight times teacher_loss if there is a teacher.

    Logits are hidden states x [N, dim] times the output matrix [V, dim], the teacher's likewise."""
    log_p = (x @ matrix.T).float().log_softmax(-1)  # [N, V]
    loss = label_loss(log_p, labels, weights)
    if teacher_x is not None:
        teacher_log_p = (teacher_x @ teacher_matrix.T).float().log_softmax(-1)
        loss = loss + teacher_weight * teacher_loss(log_p, teacher_log_p)
    return loss


def attention_outputs(model: Llama, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of Llama.forward, and what each layer's heads give, [B, S, Hq, D]."""
    outputs = []

    def attend(i: int, cos: Tensor, sin: Tensor, *qkv: Tensor) -> Tensor:
        output = model.layers[i].attention.causal(cos, sin)(*qkv)
        outputs.append(output)
        return output

    return model(tokens, attend), outputs


def training_loss(
    model: Llama,
    tokens: Tensor,
    weights: Tensor,
    teacher: Llama | None = None,
    teacher_share: float = 0.0,
    add_heads_loss: bool = False,
    run_model: Callable = attention_outputs,
    chunk_loss: Callable = logits_loss,
) -> Tensor:
    """The loss of a batch: tokens [B, S + 1], of which weights [B, S] weigh what is predicted.

    It is 1 - teacher_share times the weighted mean of label_loss, teacher_share times the mean of
    teacher_loss, and, if add_heads_loss, heads_loss. run_model, chunk_loss: these functions, or
    compiled."""
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:].flatten()  # [N], N = B S
    if teacher:
        # In the teacher's own numbers, also where the model trains in bf16.
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            teacher_x, teacher_outputs = run_model(teacher, inputs)
    x, outputs = run_model(model, inputs)

    # Logits of all tokens would be by far the largest tensors. A chunk's are made for its loss and
    # again for its gradients, so that only one chunk's exist at a time.
    label_weights = (1 - teacher_share) * weights.flatten() / weights.sum()
    x_chunks = x.flatten(0, 1).split(HEAD_CHUNK)
    label_chunks = labels.split(HEAD_CHUNK)
    weight_chunks = label_weights.split(HEAD_CHUNK)
    if teacher:
        teacher_matrix = teacher.output.weight
        teacher_chunks = teacher_x.flatten(0, 1).split(HEAD_CHUNK)
    else:
        teacher_matrix = None
        teacher_chunks = [None] * len(x_chunks)
    loss = 0.0
    for i in range(len(x_chunks)):
        loss = loss + checkpoint(
            chunk_loss,
            x_chunks[i],
            model.output.weight,
            label_chunks[i],
            weight_chunks[i],
            teacher_chunks[i],
            teacher_matrix,
            teacher_share / len(labels),
            use_reentrant=False,
        )
    if add_heads_loss:
        loss = loss + heads_loss(outputs, teacher_outputs)
    return loss


# ----------------------------------------------------------------------------------------- training

NANO_CONFIG = ModelConfig(
    dim=256,
    n_layers=8,
    n_heads=4,
    n_kv_heads=4,
    head_dim=64,
    ffn_dim=704,
    vocab_size=4096,
    max_positions=32768,
    rope_theta=500000.0,
    tied=True,
)
# Long documents come before the last stage: at the end, few and noisy, they undo what retrieval has
# learnt.
NANO_STAGES = ("128x512x3000", "64x2048x2500", "4x32768x300", "16x8192x7000")


def initialise(model: Llama, seed: int) -> None:
    """Gives matrices normal weights of deviation 0.02, and norms ones.

    Matrices that write into the residual stream have 0.02 / sqrt(2 layers), since that many of them
    add up."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:  # a norm's are ones already
            continue
        if name.endswith(("wo.weight", "w2.weight")):
            deviation = 0.02 / math.sqrt(2 * model.config.n_layers)
        else:
            deviation = 0.02
        torch.nn.init.normal_(parameter, 0.0, deviation, generator)


def make_optimizer(model: Llama, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay 0.1 on matrices and none on norms."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": norms, "weight_decay": 0.0},
    ]
    on_gpu = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=on_gpu)


def learning_rate(peak: float, done: int, total: int) -> float:
    """Of the step after `done` of `total` steps: it warms up for a tenth of them, at most 200,
    and falls by a cosine to a tenth of the peak."""
    warm_up_steps = max(1, min(200, total // 10))
    warm_up = min(1.0, (done + 1) / warm_up_steps)
    decay = 0.1 + 0.45 * (1 + math.cos(math.pi * done / total))
    return peak * warm_up * decay


def save_state(path: Path, model: Llama, optimizer: torch.optim.AdamW, done: int) -> None:
    """Writes weights, both moments and the number of steps done, in one file of torch.save."""
    state = {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with replacing_file(path) as new_file:
        torch.save(state, new_file)


def load_state(path: Path, model: Llama, optimizer: torch.optim.AdamW) -> int:
    """Takes up what save_state left, and returns the number of steps done.

    Raises UserError where the file is another one, or of another model."""
    device = next(model.parameters()).device
    try:
        with path.open("rb") as file:  # opened here, since torch would look at the file's name, too
            saved = torch.load(file, device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]
    except (pickle.UnpicklingError, EOFError, LookupError, RuntimeError, TypeError, ValueError):
        raise UserError(f"--state {path}: not what training this model has left") from None


INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def deferred_interrupts() -> Iterator[list[int]]:
    """Yields a list that takes the first Ctrl-C or SIGTERM, so that no step is cut in two.

    The second one ends all at once."""
    stops = []

    def defer(number: int, _) -> None:
        if stops:
            raise KeyboardInterrupt
        stops.append(number)
        print("stopping after this step; Ctrl-C again: at once, nothing is kept", file=sys.stderr)

    handlers = {}
    try:
        for number in INTERRUPTS:
            handlers[number] = signal.signal(number, defer)
        yield stops
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ignore_interrupts(*_) -> None:
    """For processes that make batches: they end with the one that takes them."""
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)


class LossLog:
    """The losses of steps, of which every 20 steps the mean is printed, and written to a CSV."""

    def __init__(self, path: Path | None, tokens_read: int):
        """tokens_read: by the steps before this run, whose lines stay in the file."""
        self.path = path
        self.recent = []  # losses since the last line
        self.started = time.time()
        if path:
            lines = ["tokens,loss"]
            if tokens_read and path.exists():
                lines += self.lines_up_to(tokens_read)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def lines_up_to(self, tokens_read: int) -> list[str]:
        """The file's losses of the first tokens_read tokens. A run that was killed may have written
        more, of steps that are made again."""
        lines = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            tokens = line.partition(",")[0]
            if tokens.isdigit() and int(tokens) <= tokens_read:
                lines.append(line)
        return lines

    def add(self, loss: Tensor) -> None:
        """Adds a step's loss. It stays on the device: to read it would wait for the step."""
        self.recent.append(loss.detach())

    def seconds(self) -> float:
        return time.time() - self.started

    def write(self, step: str, tokens_read: int) -> float:
        """Prints and writes the mean loss since the last line, and returns it."""
        mean = torch.stack(self.recent).mean().item()
        self.recent.clear()
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{tokens_read},{mean:.4f}\n")
        line = f"step {step}  loss {mean:.3f}  {self.seconds():.0f} s"
        print(line, file=sys.stderr, flush=True)
        return mean


def batch_loader(
    hay: Haystack,
    plan: list[Stage],
    seed: int,
    done: int,
    workers: int,
    pin_memory: bool,
) -> DataLoader:
    """The batches of the steps that are left, made by `workers` processes (0: by this one)."""
    return DataLoader(
        range(done, len(plan)),
        batch_size=None,
        collate_fn=partial(training_batch, hay, plan, seed),
        num_workers=workers,
        worker_init_fn=ignore_interrupts,
        pin_memory=pin_memory,
    )


def train_model(
    model: Llama,
    hay: Haystack,
    stages: list[Stage],
    lr: float,
    seed: int,
    workers: int,
    state: Path | None,
    minutes: float,
    log: Path | None = None,
    teacher: Llama | None = None,
    share: float = 0.0,
) -> bool:
    """Trains a model by AdamW, with weights in fp32 and bf16 autocast.

    lr: the peak. state, log: files, as of --state and --log. teacher, share: training_loss's; in
    the first tenth of the steps the layers learn from the teacher, too. Returns whether all steps
    are done, before `minutes` ran out, or a Ctrl-C or SIGTERM came. Raises UserError where the
    weights diverge, and then saves nothing."""
    # 1. What runs, and where a state says that it stopped.
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    run_model = attention_outputs
    chunk_loss = logits_loss
    if on_gpu:
        run_model = torch.compile(run_model, dynamic=False)
        chunk_loss = torch.compile(chunk_loss, dynamic=False)
    optimizer = make_optimizer(model, lr)
    done = 0
    if state and state.is_file():
        done = load_state(state, model, optimizer)

    # 2. The stage of each step, and the batches of those that are left.
    plan = []
    for stage in stages:
        plan += [stage] * stage.steps
    total = len(plan)
    tokens_read = sum(stage.batch * stage.length for stage in plan[:done])
    losses = LossLog(log, tokens_read)
    if done < total:
        batches = batch_loader(hay, plan, seed, done, workers, pin_memory=on_gpu)
    else:
        batches = []

    with deferred_interrupts() as stops:
        for tokens, weights in batches:
            # 3. A step.
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(lr, done, total)
            tokens = tokens.to(device, non_blocking=True)
            weights = weights.to(device, non_blocking=True)
            # Without its cache, autocast's gradients add up in fp32.
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                is_early = 10 * done < total
                loss = training_loss(
                    model,
                    tokens,
                    weights,
                    teacher,
                    share,
                    add_heads_loss=teacher is not None and is_early,
                    run_model=run_model,
                    chunk_loss=chunk_loss,
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done += 1
            tokens_read += weights.numel()

            # 4. Say how it goes, and stop where it has to.
            losses.add(loss)
            is_over = done == total or len(stops) > 0 or losses.seconds() > 60 * minutes
            if done % 20 == 0 or is_over:
                batch, length = weights.shape
                mean = losses.write(f"{done}/{total}  {batch}x{length}", tokens_read)
                is_over = is_over or not math.isfinite(mean)
            if is_over:
                break

        # 5. Keep the state, still safe from interrupts.
        if not all(p.isfinite().all() for p in model.parameters()):
            fault = f"the weights are not finite after step {done}"
            raise UserError(f"{fault}; nothing is saved; lower --lr")
        if state and done:
            save_state(state, model, optimizer, done)
    return done >= total


# -------------------------------------------------------------------------------------- checkpoints


def dense_attention(elite: compress.EliteAttention) -> Attention:
    """The inverse of fold_elitekv, without biases: W_k and W_v are A B, with dims as they were."""
    c = elite.config
    r = elite.r
    dims = compress.elite_dims(elite.order, r)  # [Hkv, D]: where each dim came from
    back = dims.argsort(-1)

    q, k_elite, a = elite.wqkv.weight.split(elite.widths)
    expanded = (elite.up.weight @ a).unflatten(0, (c.n_kv_heads, -1))  # [Hkv, 2D - 2r, dim]
    k_rest, v = expanded.split((c.head_dim - 2 * r, c.head_dim), 1)
    k_elite = k_elite.unflatten(0, (-1, 2 * r))  # [Hkv, 2r, dim]
    k = torch.cat((k_elite, k_rest), 1).flatten(0, 1)  # [Hkv*D, dim]

    q = compress.in_order(q, back).flatten(0, 2)  # [Hq*D, dim]
    k = compress.in_order(k, back).flatten(0, 2)
    v = v.flatten(0, 1)
    attention = Attention(c)
    attention.wqkv = compress.linear_of(torch.cat((q, k, v)), None)
    attention.wo = elite.wo
    return attention


def write_weights(model: Llama, folder: Path, config: dict) -> None:
    """Writes config.json and model.safetensors, in bf16 and in the layout of Hugging Face."""
    config_text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(config_text, encoding="utf-8")
    weights = {name: slot.detach().bfloat16() for name, slot in weight_slots(model)}
    save_artifact(weights, folder / "model.safetensors", {"format": "pt"})


HF_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}


@torch.no_grad()
def save_checkpoint(model: Llama, folder: Path) -> None:
    """Writes a model into a folder, in the layout of a Hugging Face download."""
    config = {**config_to_hf(model.config), **HF_TOKENS}
    with replacing(folder, "checkpoint") as partial_folder:
        write_weights(model, partial_folder, config)


@torch.no_grad()
def save_uptrained(model: Llama, folder: Path, source: Path) -> None:
    """Writes a model in EliteKV's form, which becomes dense, beside an artifact of its elite pairs.

    Other files are those of `source`, the checkpoint that it was uptrained from. EliteKV alone can
    run the new one, which its config.json says."""
    with replacing(folder, "checkpoint") as partial_folder:
        for file in source.iterdir():
            is_index = ".index." in file.name  # of weights in several files
            if file.suffix in (".json", ".model", ".txt", ".jinja") and not is_index:
                shutil.copy(file, partial_folder)
        first = model.layers[0].attention
        artifact = {
            "r": torch.tensor(first.r),
            "d_ckv": torch.tensor(first.up.in_features),
            "elite": torch.stack([layer.attention.order for layer in model.layers]),
        }
        for layer in model.layers:
            layer.attention = dense_attention(layer.attention)
        config = {**read_json(partial_folder / "config.json"), "elitekv": True}
        write_weights(model, partial_folder, config)

        # The artifact says of which weights it is: of these.
        model.fingerprint = fingerprint(weight_files(partial_folder))
        metadata = {"method": "elitekv", **compress.model_identity(model)}
        save_artifact(artifact, compress.artifact_path(partial_folder, "elitekv"), metadata)


def uptraining_model(
    args: argparse.Namespace,
    device: torch.device,
    files: list[list[Path]],
) -> tuple[Llama, object]:
    """The model of --from in EliteKV's form, to train in fp32, and its tokenizer.

    files: those of each text, some of which says what the attention's inputs are like."""
    if not args.source.is_dir() or args.out.resolve() == args.source.resolve():
        fault = "give the folder of a checkpoint, and another one as --out"
        raise UserError(f"--from {args.source}: {fault}")
    candidate = Candidate.parse(args.method or "elitekv")
    if candidate.method != "elitekv":
        raise UserError(f"--method {args.method}: only elitekv is uptrained")
    model = load_model(args.source, device, torch.float32)
    c = model.config
    if c.qkv_bias or c.qk_norm or c.elitekv:
        fault = "give a dense checkpoint, without qkv biases or q/k norms"
        raise UserError(f"--from {args.source}: {fault}")
    artifact = load_artifact(args.source, "elitekv", model)
    tokenizer = load_tokenizer(args.source)

    most = (1 << 17) // len(files)  # tokens of each text
    texts = [text_ids(tokenizer, some, most, c.vocab_size, bos=True) for some in files]
    sample = torch.from_numpy(np.concatenate(texts)).long()
    artifact.update(input_roots(model, sample))
    settings = settings_from("elitekv", candidate.options)
    method_named("elitekv").fold_all(model, settings, artifact)
    return model.requires_grad_(True), tokenizer


# --------------------------------------------------------------------------------- the command line


def text_share(text: str) -> tuple[Path, float]:
    """Reads PATH:SHARE, or PATH alone for a share of 1.

    A path may hold colons, too: C:\\books, or a folder run:2."""
    path, _, share = text.rpartition(":")
    if not path or re.search(r"[/\\]", share) or Path(text).exists():
        return Path(text), 1.0
    return Path(path), positive(share)


def run_training(args: argparse.Namespace) -> None:
    """Trains and saves what the options ask for."""
    if (args.method or args.distill) and not args.source:
        fault = "--method and --distill are for uptraining"
        raise UserError(f"{fault}; give the checkpoint with --from FOLDER")
    stages = [Stage.parse(text) for text in args.stages]
    longest = max(stage.length for stage in stages)
    device, dtype = generate.device_and_dtype(args.device)
    files = [text_files(path, held=False) for path, _ in args.text]
    shares = [share for _, share in args.text]

    # 1. The model to train, and its tokenizer.
    if args.source:
        model, tokenizer = uptraining_model(args, device, files)
        generate.check_capacity(longest, model.config, "--stages")
    else:
        model = Llama(NANO_CONFIG)
        generate.check_capacity(longest, model.config, "--stages")
        has_tokenizer = (args.out / "tokenizer.model").is_file()
        tokenizer_folder = args.out if has_tokenizer else generate.NANO
        tokenizer = load_tokenizer(tokenizer_folder)
        initialise(model, args.seed)

    # 2. What it reads.
    vocabulary = model.config.vocab_size
    tokens = [text_ids(tokenizer, some, args.max_tokens, vocabulary, bos=True) for some in files]
    hay = Haystack(tokenizer, tokens, shares)
    teacher = load_model(args.source, device, dtype) if args.distill else None

    # 3. Train.
    is_finished = train_model(
        model.to(device),
        hay,
        stages,
        lr=args.lr or (5e-4 if args.source else 2e-3),
        seed=args.seed,
        workers=args.workers,
        state=args.state,
        minutes=args.minutes,
        log=args.log,
        teacher=teacher,
        share=args.distill,
    )

    # 4. Save what there is, finished or not.
    if args.source:
        save_uptrained(model, args.out, args.source)
    else:
        if tokenizer_folder != args.out:
            with replacing(args.out, "tokenizer") as partial_folder:
                shutil.copy(tokenizer_folder / "tokenizer.model", partial_folder)
        save_checkpoint(model, args.out)
    if is_finished:
        print("finished")
    elif args.state:
        print("not finished; run the same command again to go on")
    else:
        print("not finished; without --state the next run begins anew")


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    generate.add_device_option(parser)
    out = "folder for config.json and model.safetensors"
    parser.option("--out", writable_folder, None, out, required=True, metavar="FOLDER")
    source = "uptrain this checkpoint, which has a fit of EliteKV"
    parser.option("--from", Path, None, source, dest="source", metavar="FOLDER")
    method = "with --from: EliteKV's settings (default: those of the fit)"
    parser.option("--method", str, None, method, metavar="elitekv[:SETTING=VALUE,...]")
    text = "folders or files of text, and how much of the plain text is drawn from each (default 1)"
    form = "PATH[:SHARE]"
    parser.option("--text", text_share, None, text, nargs="+", required=True, metavar=form)
    stages = "parts of the training, one after another"
    form = "BATCHxLENGTHxSTEPS"
    parser.option("--stages", str, NANO_STAGES, stages, nargs="+", metavar=form)
    lr = "peak learning rate (default 2e-3, with --from 5e-4)"
    parser.option("--lr", positive, None, lr, metavar="RATE")
    distill = "with --from: weight of the KL to that checkpoint, 0 to 1; the rest is on the text's"
    distill += " own tokens (--distill alone: 1)"
    parser.option("--distill", fraction, 0.0, distill, nargs="?", const=1.0, metavar="SHARE")
    parser.option("--seed", whole(0), 0, "of weights and batches", metavar="N")
    workers = "processes that make batches"
    n_workers = min(12, os.cpu_count() or 1)
    parser.option("--workers", whole(1, 256), n_workers, workers, metavar="N")
    state = "file that keeps weights and moments, to stop and resume"
    parser.option("--state", writable_file, None, state, metavar="FILE")
    minutes = "stop after this time, and keep the state"
    parser.option("--minutes", positive, math.inf, minutes, metavar="MINUTES")
    log = "CSV of tokens read and mean loss, a line every 20 steps"
    parser.option("--log", writable_file, None, log, metavar="FILE")
    parser.option("--max_tokens", whole(1), 200_000_000, "tokens read from each text", metavar="N")
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    if generate.is_one_of_several_processes():
        raise UserError("training runs in one process; start it with python, not with torchrun")
    run_training(args)


if __name__ == "__main__":
    generate.run_command(main)
