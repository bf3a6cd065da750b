"""Train the embedded model from scratch, or uptrain a checkpoint for EliteKV.

    python -m extras.train --out FOLDER --text books:0.3 code:0.7 --state nano.state --minutes 10
    python -m extras.train --from FOLDER --out NEW --distill --text books --stages 16x2048x6000

A document is plain text, repeated random segments, or facts with questions. Stages follow one another.
With --state a later call goes on where this one stopped. The tokenizer is --out's, or the embedded one.
"""

import argparse
import itertools
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
import model as model_file
from calibrate import input_roots, text_files, text_ids, writable_file, writable_folder
from compress import load_artifact, method_named, replacing, save_artifact, settings_from
from extras.evaluate import TASKS, TRAINED_TASKS, Candidate, Haystack
from generate import Parser, fraction, positive, whole
from model import Llama, ModelConfig, UserError, load_tokenizer

# -------------------------------------------------------------------------------------------------- documents

ANSWER_WEIGHT, FACT_WEIGHT = 3.0, 0.2  # of the loss, where a token of plain text has 1


def training_document(hay: Haystack, rng: random.Random, n: int) -> tuple[np.ndarray, np.ndarray]:
    """n token ids (BOS first) and loss weights: 40 % plain text, 10 % repeated segments, 50 % retrieval."""
    draw = rng.random()
    if draw >= 0.5:
        pieces = retrieval_document(hay, rng, n)
        ids = np.concatenate([p for p, _ in pieces])[-n:]
        weights = np.concatenate([np.full(len(p), w, np.float32) for p, w in pieces])[-n:]
    else:
        ids, weights = hay.sample(rng, n), np.ones(n, np.float32)
    if 0.4 <= draw < 0.5:
        longest = max(1, min(256, n // 4))
        length = rng.randint(min(8, longest), longest)
        segment = np.array([rng.randrange(3, len(hay.starts_word)) for _ in range(length)], np.int32)
        starts = range(0, max(1, n - length), length)
        for i, start in enumerate(sorted(rng.sample(starts, min(rng.randint(2, 3), len(starts))))):
            ids[start : start + length] = segment
            weights[start : start + length] = FACT_WEIGHT if i == 0 else 1.0
    ids[0] = hay.tokenizer.bos_id
    return ids, weights


def retrieval_document(hay: Haystack, rng: random.Random, n: int) -> list[tuple[np.ndarray, float]]:
    """Pieces of n tokens and their loss weights: a text with facts of one to three kinds, then questions."""
    kinds = rng.sample(TRAINED_TASKS, rng.choice((1, 1, 2, 3)) if n >= 1024 else 1)
    tasks = [TASKS[kind](rng, n // len(kinds), None) for kind in kinds]
    turns = [queue for group in tasks for queue in [iter(group[0].facts)] * len(group[0].facts)]
    rng.shuffle(turns)
    facts = [next(queue) for queue in turns]  # those of one kind in their order
    tail, questions = [], [task for group in tasks for task in group]
    for task in rng.sample(questions, len(questions)):
        tail.append((hay.encode(f"\nQuestion: {task.question}"), FACT_WEIGHT))
        tail.append((hay.encode(task.answer + "\n"), ANSWER_WEIGHT))
    context = n - sum(len(ids) for ids, _ in tail)
    return [(p, FACT_WEIGHT if i % 2 else 1.0) for i, p in enumerate(hay.bury(rng, facts, context))] + tail


@dataclass
class Stage:
    """steps batches of batch x length tokens."""

    batch: int
    length: int
    steps: int

    @classmethod
    def parse(cls, text: str) -> "Stage":
        try:
            return cls(*map(whole(1), text.split("x")))
        except (TypeError, ValueError, argparse.ArgumentTypeError):
            raise UserError(f"stage {text!r}: write BATCHxLENGTHxSTEPS, such as 64x2048x1000") from None


def training_batch(hay: Haystack, plan: list[Stage], seed: int, i: int) -> tuple[Tensor, Tensor]:
    """Batch i: tokens [B, S + 1] int64 and weights [B, S] fp32 of plan[i], made by any process."""
    rng, stage = random.Random(f"{seed}-{i}"), plan[i]
    documents = [training_document(hay, rng, stage.length + 1) for _ in range(stage.batch)]
    tokens, weights = (torch.from_numpy(np.stack(each)) for each in zip(*documents, strict=True))
    return tokens.long(), weights[:, 1:].contiguous()


# --------------------------------------------------------------------------------------------------- training

NANO = ModelConfig(256, 8, 4, 4, 64, 704, 4096, 32768, 500000.0, tied=True)
# Long documents come before the last stage: at the end, few and noisy, they undo what retrieval has learnt.
NANO_STAGES = ("128x512x3000", "64x2048x2500", "4x32768x300", "16x8192x7000")
HEAD_CHUNK = 4096  # tokens whose logits exist at once


def initialise(model: Llama, seed: int) -> None:
    """Normal weights of deviation 0.02; those that write into the residual stream over sqrt(2 layers)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:  # a norm's are ones already
            layers = model.config.n_layers if name.endswith(("wo.weight", "w2.weight")) else 0.5
            torch.nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * layers), generator)


def head_loss(x, labels, a, y, b, weight, teacher_weight) -> Tensor:
    """a [N] times the cross entropy of labels [N], plus b times the KL to the teacher's distribution, summed
    over tokens. Logits are x [N, dim] times weight [V, dim], the teacher's y times its own (or None)."""
    log_p = (x @ weight.T).float().log_softmax(-1)  # [N, V]
    loss = (a * F.nll_loss(log_p, labels, reduction="none")).sum()
    if y is not None:
        log_q = (y @ teacher_weight.T).float().log_softmax(-1)
        loss = loss + b * F.kl_div(log_p, log_q, reduction="sum", log_target=True)
    return loss


def attention_outputs(model: Llama, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of Llama.forward, and what each layer's heads give [B, S, Hq, D]."""
    outputs = []

    def attend(i: int, cos: Tensor, sin: Tensor, *qkv: Tensor) -> Tensor:
        outputs.append(model.layers[i].attention.causal(cos, sin)(*qkv))
        return outputs[-1]

    return model(tokens, attend), outputs


def training_loss(
    model, tokens, weights, teacher=None, share=0.0, layers=False, forward=attention_outputs, head=head_loss
) -> Tensor:
    """1 - share times the mean next-token cross entropy under weights [B, S], and share times the mean KL of
    the teacher's distribution to the model's; tokens [B, S + 1]. layers: and the mean relative squared error
    of what the heads give. forward, head: these functions, or compiled."""
    inputs, labels, y, targets = tokens[:, :-1], tokens[:, 1:].flatten(), None, []
    if teacher:
        with torch.no_grad(), torch.autocast(tokens.device.type, enabled=False):
            y, targets = forward(teacher, inputs)
    x, outputs = forward(model, inputs)
    a = (1 - share) * weights.flatten() / weights.sum()
    matrices = share / len(labels), model.output.weight, teacher and teacher.output.weight
    parts = [t.split(HEAD_CHUNK) for t in (x.flatten(0, 1), labels, a)]
    parts.append(y.flatten(0, 1).split(HEAD_CHUNK) if teacher else itertools.repeat(None))
    # Logits are made again for the gradients, so that few tokens' exist at a time.
    loss = sum(checkpoint(head, *part, *matrices, use_reentrant=False) for part in zip(*parts, strict=False))
    for x, y in zip(outputs, targets, strict=True) if layers else ():
        loss = loss + F.mse_loss(x.float(), y.float()) / y.float().square().mean() / len(outputs)
    return loss


def make_optimizer(model: Llama, lr: float) -> torch.optim.AdamW:
    """AdamW with weight decay 0.1 on matrices and none on norms."""
    matrices, norms = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=next(model.parameters()).is_cuda)


def save_state(path: Path, model: Llama, optimizer: torch.optim.AdamW, done: int) -> None:
    """Weights, both moments and the number of steps done, in one file of torch.save."""
    with replacing(path.parent, path.name) as partial:
        state = {"step": done, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, partial / path.name)


def load_state(path: Path, model: Llama, optimizer: torch.optim.AdamW) -> int:
    """Takes up what save_state left; returns the number of steps done."""
    try:
        with path.open("rb") as file:  # whose name does not say its format
            saved = torch.load(file, next(model.parameters()).device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return saved["step"]
    except (pickle.UnpicklingError, EOFError, LookupError, RuntimeError, TypeError, ValueError):
        raise UserError(f"--state {path}: not what training this model has left") from None


@contextmanager
def deferred_interrupts() -> Iterator[list]:
    """A list that takes the first Ctrl-C or SIGTERM, so that no step is cut in two; the second ends all."""
    stops = []

    def defer(number: int, _) -> None:
        if stops:
            raise KeyboardInterrupt
        stops.append(number)
        print("stopping after this step; Ctrl-C again: at once, nothing is kept", file=sys.stderr)

    with ExitStack() as after:
        for number in (signal.SIGINT, signal.SIGTERM):
            after.callback(signal.signal, number, signal.signal(number, defer))
        yield stops


def ignore_interrupts(*_) -> None:
    """For processes that make batches: they end with the one that takes them."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def train_model(
    model, hay, stages, lr, seed, workers, state, minutes, log=None, teacher=None, share=0.0
) -> bool:
    """AdamW under a warm-up and a cosine over all stages, weights in fp32 with bf16 autocast.
    state and log: files or None, as --state and --log; teacher and share: of training_loss.
    -> whether it is done, before `minutes` ran out, or a Ctrl-C or SIGTERM came."""
    device = next(model.parameters()).device
    compiled = partial(torch.compile, dynamic=False) if (cuda := device.type == "cuda") else lambda f: f
    forward, head = compiled(attention_outputs), compiled(head_loss)
    optimizer = make_optimizer(model, lr)
    done = load_state(state, model, optimizer) if state and state.is_file() else 0
    plan = [stage for stage in stages for _ in range(stage.steps)]
    total, started = len(plan), time.time()
    how = {"num_workers": workers, "worker_init_fn": ignore_interrupts, "pin_memory": cuda}
    batches = DataLoader(range(done, total), None, collate_fn=partial(training_batch, hay, plan, seed), **how)
    read, recent = sum(stage.batch * stage.length for stage in plan[:done]), []  # losses since the last line
    if log and not done:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("tokens,loss\n", encoding="utf-8")
    warm_up = max(1, min(200, total // 10))
    with deferred_interrupts() as stops:
        for tokens, weights in batches if done < total else ():
            warm, decay = min(1.0, (done + 1) / warm_up), 0.1 + 0.45 * (1 + math.cos(math.pi * done / total))
            for group in optimizer.param_groups:  # after the warm-up a cosine to a tenth
                group["lr"] = lr * warm * decay
            tokens, weights = (x.to(device, non_blocking=True) for x in (tokens, weights))
            with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):  # gradients add in fp32
                early = bool(teacher) and 10 * done < total
                loss = training_loss(model, tokens, weights, teacher, share, early, forward, head)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done, read = done + 1, read + weights.numel()
            recent.append(loss.detach())
            if done % 20 == 0 or done == total:
                mean = torch.stack(recent).mean().item()
                recent.clear()
                if log:
                    with log.open("a", encoding="utf-8") as file:
                        file.write(f"{read},{mean:.4f}\n")
                line = f"step {done}/{total}  {tokens.shape[0]}x{weights.shape[1]}  loss {mean:.3f}  "
                print(f"{line}{time.time() - started:.0f} s", file=sys.stderr, flush=True)
                if not math.isfinite(mean):
                    break
            if stops or done < total and time.time() - started > 60 * minutes:
                break
        if not all(p.isfinite().all() for p in model.parameters()):
            raise UserError(f"the weights are no numbers after step {done}; nothing is saved: lower --lr")
        if state and done:
            save_state(state, model, optimizer, done)
    return done >= total


# ------------------------------------------------------------------------------------------------ checkpoints


def dense_attention(elite: compress.EliteAttention) -> model_file.Attention:
    """The inverse of fold_elitekv, without biases: W_k and W_v expanded from A B, dims as they were."""
    c, r = elite.config, elite.r
    back = compress.elite_dims(elite.order, r).argsort(-1).expand(c.n_kv_heads, -1)  # [Hkv, D]
    q, k, a = elite.wqkv.weight.split(elite.widths)
    expanded = (elite.up.weight @ a).unflatten(0, (c.n_kv_heads, -1))
    rest, v = expanded.split((c.head_dim - 2 * r, c.head_dim), 1)
    k = k.unflatten(0, (-1, 2 * r)).expand(c.n_kv_heads, -1, -1)  # a shared elite key is every head's
    k = torch.cat((k, rest), 1).flatten(0, 1)  # [Hkv * D, dim]
    rows = [compress.in_order(x, back).flatten(0, 2) for x in (q, k)]
    attention = model_file.Attention(c)
    attention.wqkv, attention.wo = compress.linear_of(torch.cat((*rows, v.flatten(0, 1))), None), elite.wo
    return attention


@torch.no_grad()
def save_checkpoint(model: Llama, folder: Path, source: Path | None = None) -> None:
    """Writes config.json and model.safetensors (bf16) in the layout of a Hugging Face download.
    source: what the model, in EliteKV's form, was uptrained from; it becomes dense. Other files are copied,
    and the artifact has the elite pairs: EliteKV alone can run the checkpoint."""
    config = model_file.config_to_hf(model.config)
    config |= {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16"}
    with replacing(folder, "checkpoint") as partial:
        if source:
            for file in source.iterdir():
                if file.suffix in (".json", ".model", ".txt", ".jinja") and ".index." not in file.name:
                    shutil.copy(file, partial)
            config = model_file.read_json(partial / "config.json") | {"elitekv": True}
            elite = [layer.attention for layer in model.layers]
            sizes = {"r": torch.tensor(elite[0].r), "d_ckv": torch.tensor(elite[0].up.in_features)}
            artifact = sizes | {"elite": torch.stack([attention.order for attention in elite])}
            for layer in model.layers:
                layer.attention = dense_attention(layer.attention)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        weights = {name: slot.detach().bfloat16() for name, slot in model_file.weight_slots(model)}
        save_artifact(weights, partial / "model.safetensors", {"format": "pt"})
        if source:
            model.fingerprint = model_file.fingerprint(model_file.weight_files(partial))
            metadata = {"method": "elitekv"} | compress.model_identity(model)
            save_artifact(artifact, compress.artifact_path(partial, "elitekv"), metadata)


def uptraining_model(args: argparse.Namespace, device: torch.device, files: list[list[Path]]) -> tuple:
    """The model of --from in EliteKV's form, to train in fp32, and its tokenizer. files: of each text."""
    if not args.source.is_dir() or args.out.resolve() == args.source.resolve():
        raise UserError(f"--from {args.source}: give the folder of a checkpoint, and another one as --out")
    candidate = Candidate.parse(args.method or "elitekv")
    if candidate.method != "elitekv":
        raise UserError(f"--method {args.method}: only elitekv is uptrained")
    model = model_file.load_model(args.source, device, torch.float32)
    if model.config.qkv_bias or model.config.qk_norm or model.config.elitekv:
        raise UserError(f"--from {args.source}: give a dense checkpoint, without qkv biases or q/k norms")
    artifact, tokenizer = load_artifact(args.source, "elitekv", model), load_tokenizer(args.source)
    most, vocabulary = (1 << 17) // len(files), model.config.vocab_size
    texts = [text_ids(tokenizer, some, most, vocabulary, bos=True) for some in files]
    artifact |= input_roots(model, torch.from_numpy(np.concatenate(texts)).long())
    method_named("elitekv").fold_all(model, settings_from("elitekv", candidate.options), artifact)
    return model.requires_grad_(True), tokenizer


# ------------------------------------------------------------------------------------------- the command line


def text_share(text: str) -> tuple[Path, float]:
    """PATH:SHARE, or PATH for a fraction of 1. A path may hold colons: C:\\books, or a folder run:2."""
    path, _, share = text.rpartition(":")
    is_path = not path or re.search(r"[/\\]", share) or Path(text).exists()
    return (Path(text), 1.0) if is_path else (Path(path), positive(share))


def run_training(args: argparse.Namespace) -> None:
    if (args.method or args.distill) and not args.source:
        raise UserError("--method and --distill are for uptraining; give the checkpoint with --from FOLDER")
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
        model = Llama(NANO)
        generate.check_capacity(longest, model.config, "--stages")
        tokenizer_folder = args.out if (args.out / "tokenizer.model").is_file() else generate.NANO
        tokenizer = load_tokenizer(tokenizer_folder)
        initialise(model, args.seed)

    # 2. What it reads.
    vocabulary = model.config.vocab_size
    tokens = [text_ids(tokenizer, some, args.max_tokens, vocabulary, bos=True) for some in files]
    teacher = model_file.load_model(args.source, device, dtype) if args.distill else None

    # 3. Train, and save what there is, finished or not.
    done = train_model(
        model.to(device),
        Haystack(tokenizer, tokens, shares),
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
    if not args.source and tokenizer_folder != args.out:
        with replacing(args.out, "tokenizer") as partial:
            shutil.copy(tokenizer_folder / "tokenizer.model", partial)
    save_checkpoint(model, args.out, args.source)
    print("finished" if done else "not finished: the same command goes on, if it had a --state")


def parse_args(argv: list[str]) -> argparse.Namespace:
    p = Parser(description=__doc__)
    generate.add_device_option(p)
    p.option("--out", writable_folder, None, "folder for config.json and model.safetensors", required=True)
    p.option("--from", Path, None, "uptrain this calibrated checkpoint", dest="source", metavar="FOLDER")
    p.option("--method", str, None, "with --from: its settings", metavar="elitekv[:SETTING=VALUE,...]")
    about = "folders or files of text, and how much of the plain text to draw from each (default 1)"
    p.option("--text", text_share, None, about, nargs="+", required=True, metavar="PATH[:SHARE]")
    p.option("--stages", str, NANO_STAGES, "one after another", nargs="+", metavar="BATCHxLENGTHxSTEPS")
    p.option("--lr", positive, None, "peak learning rate (default 2e-3, with --from 5e-4)")
    about = "with --from: the fraction of the loss that is the KL to it (alone: 1), and not of labels"
    p.option("--distill", fraction, 0.0, about, nargs="?", const=1.0, metavar="SHARE")
    p.option("--seed", whole(0), 0, "of weights and batches")
    p.option("--workers", whole(1, 256), min(12, os.cpu_count() or 1), "processes that make batches")
    p.option("--state", writable_file, None, "file that keeps weights and moments, to stop and resume")
    p.option("--minutes", positive, math.inf, "stop (and keep the state) after this time")
    p.option("--log", writable_file, None, "CSV of tokens read and mean loss, a line every 20 steps")
    p.option("--max_tokens", whole(1), 200_000_000, "tokens read from each text")
    return p.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    if generate.is_one_of_several_processes():
        raise UserError("training runs in one process; start it with python, not with torchrun")
    run_training(args)


if __name__ == "__main__":
    generate.run_command(main)
