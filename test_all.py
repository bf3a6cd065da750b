"""All tests of the files beside this one. Run with: pytest -q test_all.py

First come helpers that several sections share: errors, tiny models, engines, single caches. Then a
page says how exactness is tested here, with one short test of each rung of the ladder. After it
each section tests one part of the project more closely, in the order of its files.

Tests assert mathematics and behaviour on the CPU in minutes. Those that need a GPU or ../shared
(real checkpoints and tokenizers) skip where there is none. Errors are scale-free: the rms of the
difference over the rms of the reference.

    B rows of a batch, S tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head dim
"""

import ast
import base64
import builtins
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import inspect
import io
import itertools
import json
import locale
import math
import os
import pickle
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
import unicodedata
import weakref
import zlib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

if not torch.cuda.is_available():  # kernels run on the CPU; it must be set before triton loads
    os.environ.setdefault("TRITON_INTERPRET", "1")

import calibrate
import compress
import generate
import kernels
import model as model_file
from calibrate import fit_sals, save_artifact
from compress import METHODS, CacheContext, DenseCache, load_artifact, method_named, quantize
from generate import Engine, Sampling, decode_rows, sample
from kernels import attend_plain_reference
from model import (
    SHAPES,
    Llama,
    UserError,
    apply_rope,
    load_config,
    load_model,
    load_tokenizer,
    rope_tables,
)

torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
ROOT = Path(__file__).parent
NANO = ROOT / "checkpoints" / "nano"
REAL = ROOT.parent / "shared" / "real"
CPU = torch.device("cpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ------------------------------------------------------------------------------- cases and errors


def over(arguments: str, cases: Callable) -> Callable:
    """Marks a test that runs over cases(tests), a list with the arguments of each run.

    `tests` is the module that pytest collects the test from: this one, or extras/test_extras.py,
    which imports all these tests and has lists of its own, of the same names, of the methods of
    extras/baselines.py."""

    def mark(test: Callable) -> Callable:
        test.over = (arguments, cases)
        return test

    return mark


def pytest_generate_tests(metafunc) -> None:
    """A hook of pytest's: gives a test that is marked by `over` its cases."""
    if not hasattr(metafunc.function, "over"):
        return
    arguments, cases = metafunc.function.over
    metafunc.parametrize(arguments, list(cases(metafunc.module)))


def error(result, reference) -> float:
    """rms(result - reference) / rms(reference), in fp64; a NaN anywhere is an infinite error."""
    result = torch.as_tensor(result).double()
    reference = torch.as_tensor(reference).double()
    difference = (result - reference).square().mean()
    value = (difference / reference.square().mean()).sqrt().item()
    if math.isnan(value):
        return math.inf
    return value


def pairwise(*axes: list) -> list[tuple]:
    """A few cases out of the product of some lists: any two values of two lists meet in at least
    one of them."""
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {}
    for place in places:
        pairs[place] = set(itertools.combinations(enumerate(place), 2))
    missing = set().union(*pairs.values())
    cases = []
    while missing:
        best = max(places, key=lambda place: len(pairs[place] & missing))
        missing -= pairs[best]
        cases.append(tuple(axis[i] for axis, i in zip(axes, best, strict=True)))
    return cases


# ------------------------------------------------------------------------- tiny models and tokens


def tiny_config(group: int = 2, head_dim: int = 16, **changes) -> model_file.ModelConfig:
    """Four layers of eight query heads, of which `group` share a KV head."""
    fields = {
        "dim": 48,
        "n_layers": 4,
        "n_heads": 8,
        "n_kv_heads": 8 // group,
        "head_dim": head_dim,
        "ffn_dim": 64,
        "vocab_size": 96,
        "max_positions": 512,
    }
    return model_file.ModelConfig(**(fields | changes))


def tiny_model(seed: int = 0, **changes) -> Llama:
    """A random model whose attention is sharp enough for its selection to matter."""
    torch.manual_seed(seed)
    model = Llama(tiny_config(**changes)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim > 1:
            parameter.copy_(0.3 * noise)
        elif "norm" in name:
            parameter.copy_(1.0 + 0.1 * noise)
        else:
            parameter.copy_(0.1 * noise)
    model.fingerprint = f"tiny-{seed}"
    return model


def save_checkpoint(model: Llama, folder: Path) -> None:
    """config.json and model.safetensors (bf16), as in a Hugging Face download."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model_file.config_to_hf(model.config)
    config["bos_token_id"] = 1
    config["eos_token_id"] = 2
    config["torch_dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(config))
    weights = {}
    for name, slot in model_file.weight_slots(model):
        weights[name] = slot.detach().bfloat16()
    save_artifact(weights, folder / "model.safetensors", {"format": "pt"})


def random_ids(n: int, seed: int = 0, vocab: int = 96) -> list[int]:
    """Random token ids of a tiny model."""
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def tiny_tokens(rows: int, length: int) -> torch.Tensor:
    """Random token ids of a tiny model, [rows, length]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 96, (rows, length), generator=generator)


def observed(model: Llama, tokens: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """q, k, v before RoPE of each layer, [N, S, heads, D], of tokens [N, S]."""
    seen = {}

    def see(layer, cos, sin, q, k, v):
        seen.setdefault(layer, []).append((q, k, v))

    calibrate.observe(model, [tokens], see)
    layers = []
    for layer in range(len(seen)):
        q, k, v = zip(*seen[layer], strict=True)
        layers.append((torch.cat(q), torch.cat(k), torch.cat(v)))
    return layers


def orthonormal(n: int, seed: int = 0) -> torch.Tensor:
    """A random orthonormal basis [n, n]."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(n, n, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(numbers).Q.float().contiguous()


def artifact_of(method: str, model: Llama) -> dict[str, torch.Tensor]:
    """An artifact without fitting: any rotation is exact at full rank, with any scale and mean."""
    c = model.config
    artifact = compress.random_artifact(method, c)
    if method == "sals":
        for i, name in enumerate(list(artifact)):
            if "basis" in name:
                artifact[name] = orthonormal(c.kv_dim, i)
    if method == "elitekv":
        generator = torch.Generator().manual_seed(0)
        numbers = torch.rand(c.n_layers, c.n_kv_heads, c.head_dim // 2, generator=generator)
        order = numbers.argsort(-1)
        artifact = {
            "elite": order,
            "contribution": order.flip(-1),
            "r": torch.tensor(2),
            "d_ckv": torch.tensor(16),
        }
    return artifact


# ----------------------------------------------------------------- the methods, and their settings
# Lists of the methods of compress.py. Tests marked by `over` run over them, and in
# extras/test_extras.py over that file's lists.

SPARSE = {  # SALS as published, but for a small budget
    "variant": "paper",
    "rank": 0.5,
    "score_rank": 0.5,
    "bits": 4,
    "sinks": 4,
    "critical": 20,
    "recent": 8,
}
CODES = SPARSE | {"variant": "ours"}
FULL = SPARSE | {"rank": 1.0, "score_rank": 1.0, "critical": 400, "exact_values": True}
LRQK = {"rank": 8, "k": 20, "recent": 8}

# Every method, in each way in which it stores and selects. A new method is tested by a line here.
CASES = [
    ("sals", SPARSE),
    ("sals", SPARSE | {"bits": 2}),
    ("sals", CODES),
    ("sals", CODES | {"bits": 2, "score": "sum"}),
    ("loki", {"k": 0.3, "d": 0.5}),
    ("loki", {"k": 12, "d": 0.25}),
    ("loki", {"k": 12, "d": 0.5, "share": "group"}),
    ("loki", {"d": 0.5, "reduced": True}),
    ("lrqk", LRQK),
    ("lrqk", LRQK | {"variant": "paper", "slots": 2.0}),
    ("lrqk", LRQK | {"slots": 0.0}),
    ("elitekv", {"r": 3, "d_ckv": 20}),
    ("elitekv", {"pairs": "uniform", "lrd": "separate"}),
    ("fdc", {"rate": 0.3}),
    ("dense", {}),
    ("topk", {"keep": 24}),
    ("kivi", {"bits": 2, "residual": 32}),
    ("kivi", {"bits": 4, "residual": 64}),
]

# Settings under which a method is dense attention: the rank is full, the budget covers all tokens.
EVERYTHING = [
    ("sals", FULL | {"skip": "0,-1"}),
    ("sals", FULL | {"skip": ""}),
    ("loki", {"k": 1.0, "d": 0.25}),
    ("loki", {"k": 500, "d": 0.5, "share": "group"}),
    ("loki", {"d": 1.0, "reduced": True}),
    ("lrqk", {"rank": 12}),
    ("lrqk", {"rank": 12, "variant": "paper", "slots": 1.5}),
    ("lrqk", {"rank": 12, "slots": 0.0}),
    ("elitekv", {"r": 8, "d_ckv": 48}),
    ("fdc", {"rate": 0.0}),
    ("topk", {}),
    ("kivi", {}),
]

# What tests must know of some methods. extras/test_extras.py adds its own methods to these.
WIDE = {"fdc"}  # whose ranks are multiples of 16: they differ in wide heads only
CODED = {"elitekv", "fdc"}  # whose prompts attend what is stored
BOUNDS = {"elitekv": 1e-4, "fdc": 1e-4}  # of errors that may be larger than 1e-5
FITTED_TO_PROMPTS = {"lrqk"}  # whose prompt alone decides its bases
OF_THE_PROMPT = set()  # buffers that a prompt alone decides, or that count what has happened since
OF_THE_CAPACITY = {"kivi": 1e-5}  # how far logits of a larger cache may be off: here by fp32's sums


def is_exact_in_sals(cache, places: torch.Tensor) -> torch.Tensor:
    """Which of 40 past tokens SPARSE keeps exactly: its sinks and its recent ones."""
    return (places < 4) | (places >= 32)


EXACT = {"sals": is_exact_in_sals}


def width_for(method: str) -> int:
    """A head dim at which the method's ranks differ."""
    return 48 if method in WIDE else 16


def options_for(c: model_file.ModelConfig, options: dict) -> dict:
    """The options, with no more dims of a latent than the model has."""
    if "d_ckv" not in options:
        return options
    most = c.n_kv_heads * 2 * (c.head_dim - options.get("r", 0))
    return options | {"d_ckv": min(options["d_ckv"], most)}


def skip_none(method: str) -> dict:
    """The option by which a method skips no layer, if it has one."""
    fields = method_named(method).settings.__dataclass_fields__
    return {"skip": ""} if "skip" in fields else {}


# ---------------------------------------------------------------------------- engines of any method


class PlainValues(compress.TokenStore):
    """Stands for CodedStore where a test needs values that lose nothing."""

    def __init__(self, context, n_heads, n_tokens, width, bits):
        super().__init__(context, n_heads, n_tokens, width)


class PlainValuesByToken(compress.ByToken, PlainValues):
    """Stands for the values of the paper's SALS, likewise."""


def make_engine(
    model: Llama,
    method: str,
    rows: int,
    capacity: int,
    artifact: dict | None = None,
    kernel: bool | None = None,
    *,
    compiled: bool = False,
    graphed: bool = False,
    exact_values: bool = False,
    block: int | None = None,
    least_tokens: int = 1,
    **options,
) -> Engine:
    """An engine over a method's caches, by default with an artifact_of the model.

    exact_values: SALS's values are no codes. block: tokens that share a query in SALS's scores; by
    default few in a short cache. least_tokens: of a fraction, 1 as in the papers. options: the
    method's settings."""
    context = CacheContext(model, rows, capacity, kernel)
    artifact = artifact or artifact_of(method, model)
    if block is None:
        block = 16 if capacity < 512 else 512
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compress, "SCORE_BLOCK", block)
        patch.setattr(compress, "LEAST_TOKENS", least_tokens)
        if exact_values:
            patch.setattr(compress, "CodedStore", PlainValues)
            patch.setattr(compress, "PaperSalsValues", PlainValuesByToken)
        settings = compress.settings_from(method, options)
        caches = method_named(method).build(model, settings, context, artifact)
    return Engine(model, caches, context, Sampling(), compiled, graphed)


def fitted_engine(
    folder: Path,
    method: str,
    rows: int,
    capacity: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    **options,
) -> Engine:
    """An engine with the model and the artifact of a folder; options as make_engine has them."""
    model = load_model(folder, torch.device(device), dtype)
    artifact = load_artifact(folder, method, model)
    return make_engine(model, method, rows, capacity, artifact, **options)


def part_of(tokens: list, i: int, parts: int) -> list:
    """The i-th of so many equal parts of a list; the last ones may be shorter, or empty."""
    size = math.ceil(len(tokens) / parts)
    return tokens[i * size : (i + 1) * size]


def logits_through(
    engine: Engine, prompts: list, continuation: list, parts: int = 1
) -> torch.Tensor:
    """Logits [1 + n, B, V] after the prompts, and after each of the n tokens that follow them.

    prompts and continuation: one list of token ids a row. The prompts are read in so many parts, of
    which some rows' later ones may be empty."""
    engine.prefill([part_of(prompt, 0, parts) for prompt in prompts])
    for i in range(1, parts):
        more = [part_of(prompt, i, parts) for prompt in prompts]
        if any(more):
            engine.append(more)
    logits = [engine.logits.clone()]
    for tokens in zip(*continuation, strict=True):  # one of each row
        engine.tokens.copy_(torch.tensor(tokens))
        engine.step()
        logits.append(engine.logits.clone())
    return torch.stack(logits)


def python(*argv, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python in another process, in which these variables have other values."""
    return subprocess.run(
        [sys.executable, *(str(argument) for argument in argv)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


# --------------------------------------------------------------- one cache, without a model around


def stream(
    n: int, group: int = 2, dim: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [n, 8, dim], k and v [n, 8 / group, dim] of n tokens in one layer, sharp enough for a
    selection to matter."""
    torch.manual_seed(0)
    q = torch.randn(n, 8, dim) * 2
    k = torch.randn(n, 8 // group, dim)
    v = torch.randn(n, 8 // group, dim)
    return q, k, v


def row_cache(method: str, model: Llama, rows: int, capacity: int, **options):
    """The cache of a model's first layer, which is not skipped. SALS folds nothing into it."""
    model.config.qk_norm |= method == "sals"
    engine = make_engine(model, method, rows, capacity, **(skip_none(method) | options))
    return engine.caches[0]


def reads(cache, n: int, q, k, v):
    """The cache, row 0 of which has now read the first n tokens of a stream as a prompt."""
    cache.prefill(0, 0, q[:n], k[:n], v[:n])
    return cache


def scene(
    method: str, n: int, total: int, capacity: int = 0, group: int = 2, dim: int = 16, **options
):
    """A method's cache that has read the first n tokens of a stream, and that stream of `total`
    tokens."""
    q, k, v = stream(total, group, dim)
    model = tiny_model(group=group, head_dim=dim)
    cache = row_cache(method, model, 1, capacity or total, **options)
    return reads(cache, n, q, k, v), (q, k, v)


def step(cache, n: int, q, k, v) -> torch.Tensor:
    """Decodes token n of a stream in every row."""
    rows = cache.context.batch_size
    pos = torch.full((rows,), n, dtype=torch.int32)
    return cache.decode(
        pos,
        q[n].expand(rows, *q[n].shape),
        k[n].expand(rows, *k[n].shape),
        v[n].expand(rows, *v[n].shape),
    )


def attended(cache, pos, index) -> torch.Tensor:
    """Which tokens each query head attends at a step whose `select` gave an index: [B, Hq, S]."""
    c = cache.config
    S = cache.context.max_seq_length
    index = index.long().expand(-1, c.n_kv_heads, c.group, -1)
    index = index.where(index >= 0, S)  # no token: one place more, which is cut off
    chosen = torch.zeros(*index.shape[:3], S + 1, dtype=torch.bool).scatter(3, index, True)
    chosen = chosen[..., :S].flatten(1, 2)
    n_recent = cache.exact[0].n_recent if cache.exact else 0
    age = pos.view(-1, 1, 1) - torch.arange(S)
    is_recent = (age >= 0) & (age < n_recent)
    return chosen | is_recent


def see_selections(cache, seen: list) -> None:
    """From now on each step of the cache adds to `seen` what it attends."""
    select = getattr(type(cache), "select", None)
    if select is None:  # it attends all
        return

    def select_and_see(pos, *args):
        index = select(cache, pos, *args)
        if index is not None:
            seen.append(attended(cache, pos, index))
        return index

    cache.select = select_and_see


def watched_step(cache, n: int, q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """The output of step n of row 0, and which tokens its query heads attend [Hq, S]."""
    seen = []
    see_selections(cache, seen)
    output = step(cache, n, q, k, v)
    return output, seen[0][0]


# ----------------------------------------------------------------------------- the exactness ladder
#
# A compressed cache loses a little, and is meant to: its logits are not dense's. How can a test
# then tell a loss that the method allows from a wrong sign? It does not ask whether something is
# close enough to dense. It compares two things that must be equal, up to rounding. Such comparisons
# stand on one another like the rungs of a ladder:
#
#   1. The model equals an oracle. transformers gives the same logits from the same weights.
#   2. A cache that keeps everything equals dense attention. At full rank, and with a budget for
#      all tokens, a method has nothing left to lose.
#   3. A cache equals its paper. The paper's algorithm is written as one pure function of plain
#      tensors (`loki_step`, ...); a cache, which has rows, fixed shapes and buffers, must give the
#      same output and choose the same tokens.
#   4. A row of a batch equals its prompt alone. Rows of other lengths around it change nothing, nor
#      does what the cache held before.
#   5. Any split of a text stores the same: a prompt, a follow-up, or tokens one by one.
#   6. Kernels equal PyTorch. Each operation is written twice, once to be read and once to be fast.
#   7. A compiled step equals an eager one; on a GPU a captured graph does, too, at every length.
#   8. Measured bytes equal the formula. The buffers in memory are as large as the method says.
#   9. Whole texts stay equal. Real weights still answer, through each cache, what they should.
#
# When something breaks, look at the lowest rung that fails: what a rung compares with has been
# tested by those below it.
#
# One short test of each rung follows. The lists CASES and EVERYTHING, above, name the methods and
# their settings; a new method is entered there, and in STEPS, where rung 3 is tested for all. The
# sections after this page test the same in more places, and what each method claims for itself.


def test_1_the_model_equals_an_oracle(tmp_path):
    """A Llama of random weights in transformers, saved, and loaded here."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path, CPU, torch.float32)
    token_ids = torch.tensor([random_ids(150)])
    with torch.no_grad():
        expected = theirs(token_ids).logits
    logits = ours.output(ours(token_ids))
    assert error(logits, expected) < 1e-4


SHAPES_OF_RUNG_2 = [  # G, whether projections have biases, parts in which prompts are read, dtype
    (1, False, 1, torch.float32),
    (2, True, 1, torch.bfloat16),
    (4, True, 2, torch.float32),
    (8, False, 3, torch.float32),
]


@pytest.mark.parametrize("group, has_bias, parts, dtype", SHAPES_OF_RUNG_2)
@over("method, options", lambda tests: tests.EVERYTHING)
def test_2_a_cache_that_keeps_everything_equals_dense(
    method, options, group, has_bias, parts, dtype
):
    """Four rows, whose prompts are shorter than any rank, or long, or have keys of rank 1, and
    which go on for 15 tokens."""
    prompts = [random_ids(1, 1), random_ids(5, 5), random_ids(60, 60), [7] * 40]
    continuation = [random_ids(15, 100 + row) for row in range(4)]
    shape = {
        "group": group,
        "head_dim": width_for(method),
        "qkv_bias": has_bias,
        "out_bias": has_bias,
    }
    dense = make_engine(tiny_model(**shape).to(dtype), "dense", rows=4, capacity=80)
    expected = logits_through(dense, prompts, continuation)
    model = tiny_model(**shape).to(dtype)
    engine = make_engine(model, method, rows=4, capacity=80, **options_for(model.config, options))
    logits = logits_through(engine, prompts, continuation, parts)
    assert logits.dtype == dtype
    bound = BOUNDS.get(method, 1e-5) if dtype == torch.float32 else 0.1
    assert error(logits, expected) < bound


def test_3_a_cache_equals_its_paper():
    """Loki's cache beside Algorithm 1 of the paper, over 40 steps. The test of all methods is
    test_a_cache_does_as."""
    cache = row_cache("loki", tiny_model(), rows=1, capacity=70, k=12, d=0.5)
    q, k, v = stream(70)
    cache.prefill(0, 0, q[:30], k[:30], v[:30])

    q_rotated = cache.rope_from(q, 0)
    k_rotated = cache.rope_from(k, 0)
    stored = []  # of each KV head: keys in its basis P, and values
    for h in range(4):
        stored.append((k_rotated[:30, h] @ cache.P[h], v[:30, h]))
    for n in range(30, 70):
        output, attends = watched_step(cache, n, q, k, v)
        for h in range(4):
            heads = slice(2 * h, 2 * h + 2)  # the query heads that share KV head h
            expected, chosen, stored[h] = compress.loki_step(
                q_rotated[n, heads],
                k_rotated[n, h],
                v[n, h],
                stored[h],
                P=cache.P[h],
                d=8,
                n_selected=12,
            )
            assert error(output[0, heads], expected) < 1e-5
            for query in range(2):
                tokens = attends[2 * h + query].nonzero().flatten()
                assert tokens.tolist() == sorted(chosen[query].tolist())


@over("method, options", lambda tests: tests.CASES)
def test_4_a_row_of_a_batch_equals_its_prompt_alone(method, options):
    """The row alone lies in a cache that held a longer prompt before. Steps go beyond a window of 8
    tokens and a block of 32."""
    # In fp64: in fp32 a sum in another order may move a value across a rounding boundary of the
    # quantiser, or flip the choice between two tokens of nearly the same score.
    prompts = [random_ids(1, 1), random_ids(47, 47), random_ids(90, 90)]
    continuation = [random_ids(8, 101), random_ids(8, 147), random_ids(8, 190)]
    batch = make_engine(tiny_model().double(), method, rows=3, capacity=110, **options)
    single = make_engine(tiny_model().double(), method, rows=1, capacity=110, **options)
    together = logits_through(batch, prompts, continuation, parts=2)
    for row in (2, 1, 0):  # the longest first
        alone = logits_through(single, [prompts[row]], [continuation[row]], parts=2)
        assert error(together[:, row], alone[:, 0]) < 1e-12


def not_fitted_to_prompts(tests) -> list:
    """The cases of methods that store the tokens of a prompt as they store any other."""
    return [case for case in tests.SPLITS if case[0] not in FITTED_TO_PROMPTS]


@over("method, options", not_fitted_to_prompts)
def test_5_any_split_of_a_text_stores_the_same(method, options):
    """A text of 48 tokens as a prompt of 47, 33 or 1, the others one by one: the same last logits.

    The model has one layer, since a prompt attends more than steps do: what that gives would reach
    the keys of a next layer."""
    token_ids = random_ids(48)
    logits = []
    for n_prompt in (47, 33, 1):
        model = tiny_model(n_layers=1, head_dim=width_for(method)).double()
        engine = make_engine(model, method, rows=1, capacity=64, **(options | skip_none(method)))
        prompt = token_ids[:n_prompt]
        rest = token_ids[n_prompt:]
        logits.append(logits_through(engine, [prompt], [rest])[-1])
    assert error(logits[1], logits[0]) < 1e-12
    assert error(logits[2], logits[0]) < 1e-12


def forms(tests) -> list:
    """The first case of each method, and of each form of its codes; all cases if COMPILE_ALL=1 is
    in the environment."""
    if "COMPILE_ALL" in os.environ:
        return tests.CASES
    found = {}
    for method, options in tests.CASES:
        form = (
            method,
            options.get("reduced"),
            options.get("residual"),
            options.get("variant"),
        )
        found.setdefault(form, (method, options))
    return list(found.values())


@over("method, options", forms)
def test_6_kernels_equal_pytorch(method, options):
    """Two steps of two rows. On a CPU kernels run in triton's interpreter."""
    prompts = [random_ids(5, 5), random_ids(40, 40)]
    continuation = [random_ids(2), random_ids(2)]
    logits = []
    for kernel in (False, True):
        model = tiny_model(n_layers=1).to(DEVICE)
        engine = make_engine(
            model,
            method,
            rows=2,
            capacity=64,
            kernel=kernel,
            **(options_for(model.config, options) | skip_none(method)),
        )
        logits.append(logits_through(engine, prompts, continuation))
    assert error(logits[1], logits[0]) < 1e-5


@over("method, options", forms)
def test_7_a_compiled_step_equals_an_eager_one(method, options):
    """Where a compiler errs first: G = 1, ragged rows, an odd capacity. A step reads what the last
    one wrote. CUDA graphs: test_graph_replay_equals_eager."""
    # Without Inductor on a CPU, which does not compile caches there.
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    prompts = [random_ids(2, 2), random_ids(31, 31), random_ids(97, 97)]
    continuation = [random_ids(2, 11), random_ids(2, 11), random_ids(2, 11)]
    logits = []
    for is_compiled in (False, True):
        model = tiny_model(n_layers=1, group=1, head_dim=width_for(method))
        engine = make_engine(
            model,
            method,
            rows=3,
            capacity=121,
            **(options_for(model.config, options) | skip_none(method)),
        )
        if is_compiled:
            cache = engine.caches[0]
            torch.compiler.reset()  # or it gives up after some caches
            cache.decode = torch.compile(
                cache.decode, dynamic=False, fullgraph=True, backend=backend
            )
        logits.append(logits_through(engine, prompts, continuation, parts=2))
    assert error(logits[1], logits[0]) < 1e-5


STORES = [  # other stores of a method than its defaults have
    ("sals", {"variant": "paper"}),
    ("lrqk", {"k": 20, "slots": 1.5}),
    ("elitekv", {"r": 1, "d_ckv": 33}),
    ("fdc", {"adaptive": False}),
]


def stores(tests) -> list:
    """All cases, every method by its defaults, and STORES."""
    defaults = [(method, {}) for method in tests.METHODS]
    return tests.CASES + defaults + tests.STORES


@pytest.mark.parametrize("group", [1, 4])
@over("method, options", stores)
def test_8_measured_bytes_equal_the_formula(method, options, group):
    """Of three rows of 200 tokens, which are allocated once."""
    model = tiny_model(group=group, head_dim=32)
    engine = make_engine(model, method, rows=3, capacity=200, **options_for(model.config, options))
    for cache in engine.caches:
        size = sum(buffer.nbytes for buffer in cache.buffers())
        on_the_device = size - cache.bytes_host()
        assert cache.bytes_stored() == on_the_device
        assert cache.bytes_formula() == on_the_device


@pytest.mark.parametrize("method", METHODS)
def test_9_whole_texts_stay_equal(method):
    """The model that comes with the project was trained to find facts in long texts. It still does,
    through every cache by its defaults, in about 1500 tokens; SALS attends a third of them."""
    folder = NANO
    if method == "elitekv":  # this method needs training: another checkpoint has had it
        folder = NANO.parent / "nano-elitekv"
    engine = fitted_engine(folder, method, rows=1, capacity=1600)
    engine.prefill([nano_question(4000, "silent harbor")])
    answer = decode_rows(engine, 8, lambda token_ids: False)[0]
    assert load_tokenizer(folder).decode(answer).startswith("52871.")


@over("method", lambda tests: tests.METHODS)
def test_every_method_is_on_the_ladder(method, request):
    assert method in {name for name, _ in request.module.CASES}


# ---------------------------------------------------------------------------- model and checkpoints


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
BETAS = {"beta_fast": 4, "beta_slow": 0.5, "truncate": False}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
LLAMA3_DEFAULT = {"rope_type": "default", "rope_theta": 500000.0}
FAMILIES = {  # transformers' class, changes to its config
    "llama-2": ("Llama", {"num_key_value_heads": 4}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3_DEFAULT}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-3.2-tied": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-linear": ("Llama", {"rope_parameters": YARN | {"rope_type": "linear", "factor": 2.0}}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "yi-yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {}),
    "qwen2-factor": ("Qwen2", {"rope_parameters": YARN | BETAS | {"attention_factor": 1.3}}),
    "qwen2-mscale": ("Qwen2", {"rope_parameters": YARN | {"mscale": 0.2, "mscale_all_dim": 1.0}}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-2}),
    "phi3": ("Phi3", {}),
}


def hf_model(family: str, **changes):
    """A random model of a family in transformers."""
    transformers = pytest.importorskip("transformers")
    name, extra = FAMILIES[family]
    fields = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "vocab_size": 96,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config_class(**(fields | extra | changes))).eval()
    for parameter in model.parameters():
        # Biases and norms start as 0 and 1: make them count.
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family, tmp_path):
    """Read at once, and through a cache token by token. Qwen 2's weights lie in several files."""
    theirs = hf_model(family)
    theirs.save_pretrained(tmp_path, max_shard_size="60KB" if family == "qwen2" else "1GB")
    ours = load_model(tmp_path, CPU, torch.float32)
    token_ids = torch.tensor([random_ids(150)])
    with torch.no_grad():
        expected = theirs(token_ids).logits
    assert error(ours.output(ours(token_ids)), expected) < 1e-4

    engine = make_engine(ours, "dense", 1, 150)
    prompt = token_ids[0, :100].tolist()
    continuation = token_ids[0, 100:].tolist()
    logits = logits_through(engine, [prompt], [continuation])
    assert error(logits[:, 0], expected[0, 99:]) < 1e-4


PUBLISHED_BILLIONS = {"llama-2-7b": 6.738, "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554}


def test_named_shapes_have_published_parameter_counts():
    assert SHAPES.keys() == PUBLISHED_BILLIONS.keys()
    for name, billions in PUBLISHED_BILLIONS.items():
        with torch.device("meta"):
            model = Llama(SHAPES[name])
        count = sum(parameter.numel() for parameter in model.parameters())
        assert round(count / 1e9, 3) == billions, name


def test_checkpoint_round_trip_and_dtypes(tmp_path):
    model = tiny_model(tied=True)
    slots = dict(model_file.weight_slots(model))
    save_checkpoint(model, tmp_path)
    loaded = load_model(tmp_path, CPU, torch.bfloat16)
    for name, slot in model_file.weight_slots(loaded):
        assert torch.equal(slot, slots[name].bfloat16()), name
    assert loaded.output.weight is loaded.tok_embeddings.weight


def test_a_fingerprint_is_of_every_byte(tmp_path):
    """A weight changes it, and so does the last bit of the file."""
    model = tiny_model()
    weights = tmp_path / WEIGHTS
    save_checkpoint(model, tmp_path)
    first = load_model(tmp_path, CPU, torch.bfloat16).fingerprint
    assert first == load_model(tmp_path, CPU, torch.float32).fingerprint

    model.norm.weight[0] += 1
    save_checkpoint(model, tmp_path)
    second = load_model(tmp_path, CPU, torch.float32).fingerprint
    assert second != first

    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert model_file.fingerprint([weights]) != second


LEAST_CONFIG = {  # what a config.json must have, besides its model_type
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "vocab_size": 96,
    "max_position_embeddings": 9999,
    "rms_norm_eps": 1e-6,
}
SLIDING_WINDOWS = [  # family, use_sliding_window, the window that the model has
    ("llama", False, None),
    ("llama", True, 32),
    ("mistral", False, 32),
    ("mistral", True, 32),
    ("qwen2", False, None),
    ("qwen2", True, 32),
]


@pytest.mark.parametrize("family, is_used, window", SLIDING_WINDOWS)
def test_what_a_config_leaves_out(family, is_used, window):
    window_facts = {"sliding_window": 32, "use_sliding_window": is_used}
    config = model_file.config_from_hf(LEAST_CONFIG | {"model_type": family} | window_facts)
    assert config.n_kv_heads == 4
    assert config.head_dim == 12
    assert config.rope_theta == 10000.0
    assert config.rope_scaling is None
    assert config.sliding_window == window
    assert not config.tied
    assert not config.out_bias


@pytest.mark.parametrize(
    "family, window", [("mistral", 4096), ("qwen2", 4096), ("phi3", None), ("llama", None)]
)
def test_a_window_that_a_config_leaves_out_is_that_of_transformers(family, window):
    """null says that there is none."""
    facts = LEAST_CONFIG | {"model_type": family, "use_sliding_window": True}
    assert model_file.config_from_hf(facts).sliding_window == window
    assert model_file.config_from_hf(facts | {"sliding_window": None}).sliding_window is None


SCALED_POSITIONS = [  # rope_scaling in config.json, positions of a model of 32768
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
    ({"type": "yarn", "factor": 2.5}, 81920),
    ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 32768),
    ({"rope_type": "linear", "factor": 2.0}, 65536),
    (LLAMA3_ROPE | {"original_max_position_embeddings": 32768}, 32768),
    ({"type": "default"}, 32768),
]


@pytest.mark.parametrize("scaling, positions", SCALED_POSITIONS)
def test_linear_and_yarn_scaling_extend_the_positions(scaling, positions):
    config = tiny_config(family="qwen2", qkv_bias=True, max_positions=32768)
    hf = model_file.config_to_hf(config)
    hf["rope_scaling"] = scaling
    hf["rope_parameters"] = LLAMA3_ROPE  # which counts less
    config = model_file.config_from_hf(hf)
    assert config.max_positions == positions
    assert (config.rope_scaling is None) == (scaling == {"type": "default"})
    # Once, and not again when it is saved and read.
    assert model_file.config_from_hf(model_file.config_to_hf(config)) == config


def resident_bytes(key: str) -> int:
    """Memory of this process on Linux: VmRSS is what it has now, VmHWM the most it has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, value = line.split(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def test_a_load_on_the_cpu_takes_little_more_memory_than_the_weights(tmp_path):
    """Of a file in bf16, loaded in fp32."""
    peak_of_the_process = Path("/proc/self/clear_refs")
    if not peak_of_the_process.exists():
        pytest.skip("no /proc")
    config = tiny_config(dim=512, n_layers=8, ffn_dim=2048, vocab_size=4096)
    model = Llama(config).requires_grad_(False)
    save_checkpoint(model, tmp_path)
    size = sum(parameter.nbytes for parameter in model.parameters())

    load_model(tmp_path, CPU, torch.bfloat16)  # what only a first load allocates
    peak_of_the_process.write_text("5")  # the peak begins again
    before = resident_bytes("VmRSS")
    loaded = load_model(tmp_path, CPU, torch.float32)
    assert resident_bytes("VmHWM") - before < 1.1 * size
    assert sum(parameter.nbytes for parameter in loaded.parameters()) == size


# --------------------------------------------------------------------------------------- tokenizers

LLAMA2 = "tokenizers/llama2"
LLAMA3 = "tokenizers/llama3"
QWEN = "tokenizers/qwen2.5"
STORIES = "stories260k"
TEXTS = [
    "",
    " leading and  double   spaces ",
    "\n\n\ttabs\r\nand lines\n",
    "def f(x):\n    return x**2  # ü",
    "0 12 345 6789 3.14159 1e-10 ²½",
    "I'll don't WE'RE it's naïve café Ångström İstanbul",
    "你好，世界。こんにちは 안녕하세요 Привет мир مرحبا नमस्ते",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 zero\u200bwidth \u00a0 nbsp \u3000 wide",
    "<|eot_id|> </s> <s> <|im_end|> [INST]" + "a" * 1000,
    "\x00\x01\x7f\U0001f9ffx\U00020000",
]


def folder_of(name: str | Path) -> Path:
    """A folder of ../shared/real, or skips the test."""
    if not (REAL / name).exists():
        pytest.skip(f"no {REAL / name}")
    return REAL / name


@functools.cache
def real(name: str | Path):
    """The tokenizer of such a folder."""
    return load_tokenizer(folder_of(name))


def source_code() -> str:
    """A long text of Python."""
    return Path(json.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def qwen(tmp_path_factory) -> Path:
    """A folder with Qwen's tokenizer.json, made from vocab.json and merges.txt by the command that
    the error gives."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen") / "folder"
    shutil.copytree(folder_of(QWEN), folder)
    message = r"merges\.txt without a tokenizer\.json; write one with: python -c"
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(folder)
    code = shlex.split(str(error.value))[-1]
    exec(code)
    return folder


def sentencepiece_of(name: str | Path) -> SentencePieceProcessor:
    """The oracle of a tokenizer.model, in a folder or under its name in REAL."""
    return SentencePieceProcessor(model_file=str(folder_of(name) / "tokenizer.model"))


def with_auto(folder: Path) -> tuple:
    """The tokenizer of a folder, ours and transformers'."""
    transformers = pytest.importorskip("transformers")
    return load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)


def encode_named(tokenizer, text: str, bos: bool = True) -> list[int]:
    """Token ids of text in which names such as <|eot_id|> are those tokens."""
    names = sorted(tokenizer.special_tokens, key=len, reverse=True)
    pattern = "|".join(re.escape(name) for name in names)
    segments = []
    for i, part in enumerate(re.split(f"({pattern})", text)):
        is_name = i % 2 == 1  # re.split gives text and names in turn
        if part:
            segments.append((part, is_name))
    return tokenizer.encode_segments(segments, bos)


# ---- files of a tokenizer, made here

# The 256 bytes as byte-level BPE writes them: characters that can be printed stand for themselves.
GPT2_BYTES = [chr(b) for b in range(256) if 33 <= b < 127 or 161 <= b < 173 or b >= 174]
GPT2_BYTES += [chr(256 + i) for i in range(68)]
MERGES = ["1 2", "Ġ 12", "t h", "th e", "Ġ the", "a .", ". .", "Ġ Ġ", "! !"]
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
UNSPLIT = BYTE_LEVEL | {"use_regex": False}
SPLIT = {"type": "Split", "pattern": {"String": "."}, "behavior": "Isolated", "invert": False}
ESCAPE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}


def write_tiktoken(folder: Path, merges: list[str]) -> Path:
    """A folder with a tokenizer.model like Llama 3's, of the 256 bytes and a few merges."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [bytes([byte]) for byte in range(256)]
    words += [word.encode() for word in merges]
    lines = []
    for rank, word in enumerate(words):
        lines.append(base64.b64encode(word) + b" %d\n" % rank)
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    return folder


def in_turn(*parts: dict) -> dict:
    """Several steps of a tokenizer.json, one after the other."""
    steps = list(parts)
    return {"type": "Sequence", "pretokenizers": steps, "normalizers": steps, "processors": steps}


def special_tokens(*names: str, first: int = 256) -> list[dict]:
    """Added tokens of a tokenizer.json, with ids from `first` on."""
    tokens = []
    for i, name in enumerate(names):
        token = {
            "id": first + i,
            "content": name,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        tokens.append(token)
    return tokens


def added_tokens_decoder(tokens: list[dict]) -> dict[int, dict]:
    """The same as a tokenizer_config.json has them: by their ids."""
    by_id = {}
    for token in tokens:
        fields = dict(token)
        by_id[fields.pop("id")] = fields
    return by_id


def tokenizer_json(
    vocab: dict | None = None,
    merges: list | tuple = (),
    pre_tokenizer: dict | None = BYTE_LEVEL,
    added: list | tuple = (),
    model: dict | None = None,
    **parts,
) -> dict:
    """The contents of a tokenizer.json; by default of single bytes.

    model: changes to its model. parts: such as its post_processor."""
    if vocab is None:
        words = GPT2_BYTES + [merge.replace(" ", "") for merge in merges]
        vocab = {word: i for i, word in enumerate(words)}
    bpe = {"type": "BPE", "vocab": vocab, "merges": list(merges)}
    data = {
        "version": "1.0",
        "added_tokens": list(added),
        "normalizer": None,
        "post_processor": None,
        "pre_tokenizer": pre_tokenizer,
        "decoder": BYTE_LEVEL,
        "model": bpe | (model or {}),
    }
    return data | parts


def tokenizer_of(folder: Path, **files: dict):
    """The tokenizer of a folder that gets these JSON files, beside those that it has."""
    folder.mkdir(exist_ok=True)
    for name, contents in files.items():
        (folder / f"{name}.json").write_text(json.dumps(contents), encoding="utf-8")
    return load_tokenizer(folder)


# ---- ids that are known


def test_llama3_vector_and_special_tokens():
    tokenizer = real(LLAMA3)
    ids = [128000, 2028, 374, 264, 1296, 11914, 13, 128001]
    assert encode_named(tokenizer, "This is a test sentence.<|end_of_text|>") == ids
    assert tokenizer.encode("This", bos=False) == [2028]
    assert tokenizer.vocab_size == 128256
    assert tokenizer.bos_id == 128000
    assert tokenizer.stop_ids == {128001, 128008, 128009}
    assert len(tokenizer.special_tokens) == 256
    assert tokenizer.special_tokens["<|python_tag|>"] == 128010
    assert tokenizer.special_tokens["<|reserved_special_token_246|>"] == 128255


# ---- oracles


def test_llama3_against_transformers():
    """It knows no control tokens of a bare tokenizer.model, so that their names are text to it."""
    tokenizer, oracle = with_auto(folder_of(LLAMA3))
    for text in [*TEXTS, "<|begin_of_text|><|eot_id|>", source_code()]:
        ids = oracle.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == [128000, *ids]
        assert tokenizer.encode_continuation(text) == ids
        assert tokenizer.decode(ids) == text
        assert oracle.decode(ids) == text


@pytest.mark.parametrize("name", [NANO, LLAMA2, STORIES])
def test_sentencepiece_oracle(name):
    tokenizer = real(name)
    oracle = sentencepiece_of(name)
    for text in TEXTS:
        ids = oracle.encode(text)
        assert tokenizer.encode(text, bos=False) == ids
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == oracle.decode(ids)


def test_qwen_against_transformers(qwen):
    tokenizer, oracle = with_auto(qwen)
    texts = [
        *TEXTS,
        "e\u0301 u\u0308 \u1100\u1161",
        "<|fim_prefix|>def f(<|fim_suffix|>):<|fim_middle|>",
        "<tool_call>{}</tool_call> <|im_end|>",
        source_code(),
    ]
    for path in sorted((REAL / "text").rglob("*.txt")):
        texts.append(path.read_text(encoding="utf-8")[:20_000])
    for text in texts:
        expected = oracle.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.encode(text) == expected  # and no BOS


def test_qwens_control_tokens_against_transformers(qwen):
    tokenizer, oracle = with_auto(qwen)
    text = "<|im_start|>user\nHi<|im_end|>\n<tool_call>"
    assert encode_named(tokenizer, text) == oracle.encode(text, add_special_tokens=False)
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.bos_id is None
    # <tool_call> is added but not special; <|im_start|> is special.
    assert tokenizer.decode([151657, 151644, 13048]) == "<tool_call>Hi"


def test_qwens_chat_against_transformers(qwen):
    tokenizer, oracle = with_auto(qwen)
    im_end = 151645
    messages = [
        {"role": "user", "content": "Hi <|im_end|>"},
        {"role": "assistant", "content": "<tool_call>"},
        {"role": "user", "content": " \u4f60\n"},
    ]
    for n in (1, 3):
        chat = messages[:n]
        ids = generate.encode_chat(tokenizer, chat)
        text = oracle.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode_ids(ids) == text
        # The template's own: one of the system's message, one of each message.
        assert ids.count(im_end) == n + 1

        plain = []  # transformers would take what the user wrote for a control token
        for message in chat:
            content = message["content"].replace("<|im_end|>", "")
            plain.append({"role": message["role"], "content": content})
        expected = oracle.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
        assert generate.encode_chat(tokenizer, plain) == expected


def llama2_folder(folder: Path, legacy: bool | None) -> Path:
    """Llama 2's tokenizer.model with the settings of a Hugging Face folder."""
    shutil.copy(folder_of(LLAMA2) / "tokenizer.model", folder)
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "added_tokens_decoder": added_tokens_decoder(
            special_tokens("<unk>", "<s>", "</s>", first=0)
        ),
        "add_bos_token": True,
    }
    if legacy is not None:
        settings["legacy"] = legacy
    tokenizer_of(folder, tokenizer_config=settings, config={"model_type": "llama"})
    return folder


@pytest.mark.parametrize("legacy", [False, True, None])
def test_llama2_and_mistral_against_transformers(legacy, tmp_path):
    """As a tokenizer.model, and as a tokenizer.json."""
    tokenizer, oracle = with_auto(llama2_folder(tmp_path, legacy))
    oracle.save_pretrained(tmp_path / "json")
    from_json = load_tokenizer(tmp_path / "json")
    for text in [*TEXTS, " ", " Hello", "Hello", "a <s> b", "\u2581a", "a  b"]:
        ids = oracle.encode(text, split_special_tokens=True)
        decoded = oracle.decode(ids, skip_special_tokens=True)
        assert from_json.encode(text) == ids
        assert from_json.decode(ids) == decoded
        if "  " not in text:  # transformers takes other merges of two spaces from a tokenizer.model
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == decoded

    named = "<s>[INST] Hi [/INST] Hello </s><s>[INST] "
    for each in (tokenizer, from_json):
        assert each.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
        assert each.stop_ids == {2}
        begun = each.decode(each.encode("a"))
        more = each.decode(each.encode_continuation(" b"), [1, 263])  # after those of "a"
        assert begun + more == "a b"
        assert encode_named(each, named) == oracle.encode(named, add_special_tokens=False)


# A vocabulary that lacks some of the bytes.
VOCAB = {word: i for i, word in enumerate([*GPT2_BYTES[:188], "12", "<|end|>"])}
UNIGRAM = [["<unk>", 0.0], ["<s>", 0.0], ["<|end|>", 0.0]]
UNIGRAM += [[character, -9.0] for character in "▁<>|/sendabht12."]
# Tokenizers whose library makes a control token of text: <|end|>, of this id.
MAKE_A_CONTROL_TOKEN = {
    "word": (
        VOCAB["<|end|>"],
        {
            "vocab": VOCAB,
            "pre_tokenizer": in_turn(SPLIT, UNSPLIT),
            "model": {"ignore_merges": True},
        },
    ),
    "unknown": (
        VOCAB["<|end|>"],
        {"vocab": VOCAB, "model": {"unk_token": "<|end|>"}},
    ),
    "unigram": (
        2,
        {
            "model": {"type": "Unigram", "vocab": UNIGRAM, "unk_id": 0},
            "pre_tokenizer": METASPACE,
        },
    ),
}


@pytest.mark.parametrize("name", MAKE_A_CONTROL_TOKEN)
def test_no_text_becomes_a_control_token_that_the_library_makes_of_it(name, tmp_path):
    end, parts = MAKE_A_CONTROL_TOKEN[name]
    data = tokenizer_json(**parts, added=special_tokens("<|end|>", first=end))
    tokenizer = tokenizer_of(tmp_path, tokenizer=data)
    for text in ("<|end|>", "a.<|end|>", "a<|end|>b", "你"):
        assert end not in tokenizer.encode(text)
    letters = []
    for character in "<|end|>":
        letters += tokenizer.encode_continuation(character)
    assert tokenizer.encode("a.<|end|>")[-7:] == letters
    assert encode_named(tokenizer, "<|end|>") == [end]


class Spaced(NamedTuple):
    """What puts a space before a text, in a tokenizer.json, and the same without it."""

    spaced: dict
    plain: dict
    comes_again: bool  # after a control token


SPACED = {
    "first": Spaced(
        {"pre_tokenizer": METASPACE | {"prepend_scheme": "first"}},
        {"pre_tokenizer": METASPACE | {"prepend_scheme": "never"}},
        comes_again=False,
    ),
    "always": Spaced(
        {"pre_tokenizer": METASPACE | {"prepend_scheme": "always"}},
        {"pre_tokenizer": METASPACE | {"prepend_scheme": "never"}},
        comes_again=True,
    ),
    "prepend": Spaced(
        {"normalizer": in_turn(PREPEND, ESCAPE)},
        {"normalizer": ESCAPE},
        comes_again=True,
    ),
    "bytes": Spaced(
        {"pre_tokenizer": BYTE_LEVEL | {"add_prefix_space": True}},
        {"pre_tokenizer": BYTE_LEVEL},
        comes_again=True,
    ),
}


@pytest.mark.parametrize("name", SPACED)
def test_text_that_goes_on_gets_no_space(name, tmp_path):
    case = SPACED[name]
    _, nano = with_auto(NANO)
    base = json.loads(nano.backend_tokenizer.to_str())
    base["normalizer"] = None
    base["pre_tokenizer"] = None
    base["post_processor"] = None
    base["added_tokens"] = special_tokens("<|end|>", first=4096)
    spaced = tokenizer_of(tmp_path / "spaced", tokenizer=base | case.spaced)
    plain = tokenizer_of(tmp_path / "plain", tokenizer=base | case.plain)
    for text in TEXTS:
        assert spaced.encode_continuation(text) == plain.encode(text)
    assert spaced.encode("the") != plain.encode("the")
    after = spaced if case.comes_again else plain
    expected = [*spaced.encode("the"), 4096, *after.encode("the")]
    assert encode_named(spaced, "the<|end|>the") == expected


ADDED = [  # name, which flags it has
    ("<think>", {}),
    ("  ", {"single_word": True}),
    ("xx", {"lstrip": True}),
    ("a<t", {"rstrip": True}),
    ("<t>", {"lstrip": True, "rstrip": True}),
    ("   ", {}),
    (" x", {"single_word": True}),
    ("e\u0301x", {"lstrip": True}),
    ("<t>>", {"rstrip": True}),
    ("<|end|>", {"lstrip": True, "rstrip": True}),
]


def random_texts(alphabet: list[str], count: int) -> list[str]:
    """Texts of one to eight entries of an alphabet."""
    rng = random.Random(0)
    texts = []
    for _ in range(count):
        entries = rng.choices(alphabet, k=rng.randrange(1, 9))
        texts.append("".join(entries))
    return texts


def test_a_tokenizer_model_with_added_tokens_is_as_transformers_has_it(tmp_path):
    shutil.copy(NANO / "tokenizer.model", tmp_path)
    tokens = special_tokens(*(name for name, _ in ADDED), first=4096)
    for token, (name, flags) in zip(tokens, ADDED, strict=True):
        token |= flags
        token["special"] = name == "<|end|>"
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": False,
        "added_tokens_decoder": added_tokens_decoder(tokens),
    }
    config = {"model_type": "llama", "vocab_size": 4120}
    tokenizer_of(tmp_path, config=config, tokenizer_config=settings)
    tokenizer, auto = with_auto(tmp_path)
    oracle = auto.backend_tokenizer
    oracle.encode_special_tokens = True

    alphabet = ["the", "  ", " ", "\n", "\u00e9", "<", "<t", "<t>", "<think>", "<|end|>", "<s>"]
    alphabet += ["xx", "x", "a", "A", "!", "."]
    for text in TEXTS + random_texts(alphabet, 500):
        ids = oracle.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, bos=False) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids)
    assert tokenizer.vocab_size == 4106
    assert tokenizer.stop_ids == {2, 4105}
    # The model has more ids, which stand for no text.
    assert tokenizer.decode([4105, *tokenizer.encode("Hello"), 4119]) == "Hello"
    for outside in (4120, -1):
        with pytest.raises(UserError, match=f"{outside} is outside"):
            tokenizer.decode([4, outside])


SENTENCEPIECE_KINDS = [  # model_type, normalization_rule_name
    ("bpe", "identity"),
    ("bpe", "nmt_nfkc"),
    ("unigram", "nmt_nfkc"),
]
SPACES = [  # add_dummy_prefix, remove_extra_whitespaces
    (False, False),
    (True, True),
    (True, False),
]


@pytest.mark.parametrize("kind, rule", SENTENCEPIECE_KINDS)
@pytest.mark.parametrize("adds_space, removes_spaces", SPACES)
def test_sentencepiece_models_of_other_kinds(kind, rule, adds_space, removes_spaces, tmp_path):
    """Words that users defined are found in text, but for a control token's name."""
    file = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["hello there", "hello world"] * 9),
        model_writer=file,
        model_type=kind,
        normalization_rule_name=rule,
        add_dummy_prefix=adds_space,
        remove_extra_whitespaces=removes_spaces,
        user_defined_symbols=["<|im_end|>", "<think>"],
        bos_id=-1,
        byte_fallback=True,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(file.getvalue())
    oracle = sentencepiece_of(tmp_path)
    end = oracle.piece_to_id("<|im_end|>")
    added = {str(end): {"content": "<|im_end|>", "special": True}}
    tokenizer = tokenizer_of(tmp_path, tokenizer_config={"added_tokens_decoder": added})
    for text in ("hello there", "  hello  world ", " ", "a<think>b", "\u00bd \ufb01\t\tx"):
        ids = oracle.encode(text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == oracle.decode(ids)
    assert end in oracle.encode("<|im_end|>a")
    assert end not in tokenizer.encode("hello<|im_end|> a")
    assert tokenizer.bos_id is None
    assert tokenizer.stop_ids == {2, end}
    in_two_parts = tokenizer.encode("hello") + tokenizer.encode_continuation(" world")
    assert in_two_parts == tokenizer.encode("hello world")


def test_a_long_run_of_one_character(tmp_path):
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, ["  "]))
    assert len(tokenizer.encode(" " * 400_000, bos=False)) == 200_000


# ---- decoding


@pytest.mark.parametrize("name", [NANO, LLAMA2, LLAMA3, QWEN, STORIES])
def test_stream_decoder(name, request):
    """It gives what decoding at once gives, which is the text (of all but the stories' few
    pieces)."""
    if name == QWEN:
        tokenizer = load_tokenizer(request.getfixturevalue("qwen"))
    else:
        tokenizer = real(name)
    for text in [*TEXTS, "👩‍👩‍👧‍👦你好🧿" * 5]:
        ids = tokenizer.encode(text)
        decoder = model_file.StreamDecoder(tokenizer)
        pieces = [decoder.push(token) for token in ids]
        assert decoder.flush() == ""
        for piece in pieces:
            assert "\ufffd" not in piece
        assert "".join(pieces) == tokenizer.decode(ids)
        if name != STORIES:
            assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)

    # Random words, of which none is a single byte.
    rng = random.Random(0)
    first = 259 if name in (NANO, LLAMA2, STORIES) else 0
    words = range(first, tokenizer.vocab_size)
    special = tokenizer.special_tokens.values()
    for _ in range(200):
        ids = [token for token in rng.choices(words, k=20) if token not in special]
        assert tokenizer.decode(ids) == tokenizer.decode_ids(ids)


def test_stream_gives_text_as_soon_as_it_is_final(tmp_path):
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, []))
    decoder = model_file.StreamDecoder(tokenizer)
    pieces = [decoder.push(byte) for byte in "a你b".encode()]
    assert pieces == ["a", "", "", "你", "b"]
    pieces = [decoder.push(byte) for byte in "👍".encode()[:3]]
    assert pieces == ["", "", ""]
    assert decoder.flush() == "\ufffd"


def test_a_stream_after_a_prompt_has_its_first_space():
    """In a sentencepiece model a text's first space is no part of the text."""
    tokenizer = load_tokenizer(NANO)
    before = tokenizer.encode("the")
    ids = tokenizer.encode_continuation(" world")
    decoder = model_file.StreamDecoder(tokenizer, before)
    pieces = [decoder.push(token) for token in ids]
    assert "".join(pieces) == " world"
    assert tokenizer.decode(ids, before) == " world"
    assert tokenizer.decode(ids) == "world"


# ---- BOS, stop ids, added tokens


def bos_first(ids: list) -> dict:
    """A post-processor that puts <s> first, which has these ids."""
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text_a = {"Sequence": {"id": "A", "type_id": 0}}
    text_b = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text_a],
        "pair": [bos, text_a, text_b],
        "special_tokens": {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"]}},
    }


PUTS_BOS = in_turn(BYTE_LEVEL, bos_first([256]))
BOS_CASES = {  # post-processor, tokenizer_config.json, the ids of "!"
    "plain": (None, {"bos_token": "<s>"}, [0]),
    "template": (PUTS_BOS, {}, [256, 0]),
    "off": (PUTS_BOS, {"add_bos_token": False}, [0]),
    "null": (PUTS_BOS, {"add_bos_token": None, "bos_token": "<x>"}, [256, 0]),
    "on": (None, {"bos_token": {"content": "<s>"}, "add_bos_token": True}, [256, 0]),
}


@pytest.mark.parametrize("name", BOS_CASES)
def test_bos_is_added_as_the_files_say(name, tmp_path):
    post_processor, settings, expected = BOS_CASES[name]
    data = tokenizer_json(added=special_tokens("<s>", "<x>"), post_processor=post_processor)
    tokenizer = tokenizer_of(tmp_path, tokenizer=data, tokenizer_config=settings)
    assert tokenizer.bos_id == 256
    assert tokenizer.encode("!") == expected
    assert tokenizer.encode("!", bos=False) == [0]
    assert encode_named(tokenizer, "<s>!") == [256, 0]  # never twice


BOS_AND_END = {"bos_token": "<bos>", "eos_token": "<end>"}
SPECIAL_TOKEN_SETTINGS = [  # tokenizer_config.json
    {
        "bos_token": {"content": "<bos>", "__type": "AddedToken"},
        "eos_token": {"content": "<end>", "__type": "AddedToken"},
    },
    {"bos_token": "<bos>", "eos_token": "<x>", "additional_special_tokens": ["<x>"]},
    BOS_AND_END | {"extra_special_tokens": ["<x>"]},
    BOS_AND_END | {"extra_special_tokens": {"image_token": "<x>"}},
]


@pytest.mark.parametrize("settings", SPECIAL_TOKEN_SETTINGS)
def test_special_tokens_are_those_that_transformers_knows(settings, tmp_path):
    """They are in the vocabulary, and no list of added tokens has them, or not as special."""
    words = [*GPT2_BYTES, "<bos>", "<end>", "<x>"]
    vocab = {word: i for i, word in enumerate(words)}
    added = special_tokens("<x>", first=258)
    added[0]["special"] = False
    tokenizer_of(
        tmp_path,
        tokenizer=tokenizer_json(vocab, added=added),
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"} | settings,
    )
    tokenizer, oracle = with_auto(tmp_path)
    assert tokenizer.special_tokens == {name: vocab[name] for name in oracle.all_special_tokens}
    assert tokenizer.chat_variables == oracle.special_tokens_map
    assert tokenizer.stop_ids == {oracle.eos_token_id}
    text = "a <bos><end> <x>"
    named = encode_named(tokenizer, text, bos=False)
    assert named == oracle.encode(text, add_special_tokens=False)
    special_ids = set(tokenizer.special_tokens.values())
    assert not special_ids & set(tokenizer.encode(text))


def test_stop_ids_come_from_every_file(tmp_path):
    tokenizer = tokenizer_of(
        tmp_path,
        tokenizer=tokenizer_json(added=special_tokens("<end>", "<|eom_id|>", "<x>")),
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [3, 4]},
        tokenizer_config={"eos_token": {"content": "<end>"}},
    )
    assert tokenizer.stop_ids == {3, 4, 7, 256, 257}
    # <|eom_id|> is known by its name.
    tokenizer = tokenizer_of(
        tmp_path, config={"eos_token_id": None}, generation_config={}, tokenizer_config={}
    )
    assert tokenizer.stop_ids == {257}


def test_a_tokenizer_model_has_the_names_that_llama_has():
    assert load_tokenizer(NANO).chat_variables == {"bos_token": "<s>", "eos_token": "</s>"}


# ---- chat

# What the templates of models do: text between tokens, refusals, dates, a look into answers.
TEMPLATES = {
    "Llama 2, Mistral": """{%- if messages[0].role == 'system' %}
        {%- set system = messages[0].content %}
        {%- set messages = messages[1:] %}{% endif %}{% for m in messages %}
        {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate!') }}
        {%- elif m.role == 'user' %}{{ bos_token + '[INST] ' }}
            {%- if system is defined and loop.last %}{{ system + '\n' }}{% endif %}
            {{- m.content + '[/INST]' }}
        {%- else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "Phi-3": "{% for m in messages %}"
    "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "Llama 3.1": """{{- bos_token }}
        {%- if not date is defined %}{% set date = strftime_now('%d %b %Y') %}{% endif %}
        {%- if tools is not none %}{{ raise_exception('tools') }}{% endif %}
        {{- '<|im_start|>Today: ' + date + '<|im_end|>' + messages | tojson(indent=2) }}
        {%- for m in messages %}{% if loop.index > 4 %}{% break %}{% endif %}
    {%- generation %}
    <|im_start|>{{ m['role'] }}:{{ m['content'] | trim }}<|im_end|>
    {% endgeneration %}
        {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}""",
}
TURNS = [
    {"role": "user", "content": "Hi, I'm  \u00fc"},
    {"role": "assistant", "content": " Four. "},
    {"role": "user", "content": "\nwhy?\n"},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nSo."},
    {"role": "user", "content": "a b c \ue000"},
]
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS = [
    TURNS[:1],
    TURNS[:3],
    TURNS,
    [SYSTEM, *TURNS[:1]],
    [SYSTEM, *TURNS[:3]],
    [SYSTEM, *TURNS],
]
CHAT_TOKENS = [  # name, flags in a sentencepiece model's folder
    ("[INST]", {}),
    ("[/INST]", {}),
    ("<|system|>", {"rstrip": True}),  # as Phi-3's
    ("<|user|>", {"rstrip": True}),
    ("<|assistant|>", {"rstrip": True}),
    ("<|end|>", {"rstrip": True, "lstrip": True}),  # as Phi-4's
    ("<|im_start|>", {}),
    ("<|im_end|>", {"lstrip": True}),
]


def chat_folder(folder: Path, kind: str, template: str) -> Path:
    """A folder with a chat template, and a tokenizer of this kind: a sentencepiece model that puts
    a space before the "first" text, or before "always" each, or a BPE of "bytes"."""
    names = [name for name, _ in CHAT_TOKENS]
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    if kind == "bytes":
        added = special_tokens("<s>", "</s>", *names, first=256 + len(MERGES))
        added[-1]["lstrip"] = True
        data = tokenizer_json(merges=MERGES, added=added)
        tokenizer_of(folder, tokenizer=data)
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings["legacy"] = False
        settings["added_tokens_decoder"] = {}
    else:
        shutil.copy(NANO / "tokenizer.model", folder)
        added = special_tokens(*names, first=4096)
        for token, (_, flags) in zip(added, CHAT_TOKENS, strict=True):
            token |= flags
        settings["tokenizer_class"] = "LlamaTokenizer"
        settings["legacy"] = kind == "always"
        settings["added_tokens_decoder"] = added_tokens_decoder(added)
    tokenizer_of(folder, tokenizer_config=settings, config={"model_type": "llama"})
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ["first", "always", "bytes"])
def test_chat_ids_are_those_of_transformers(name, kind, tmp_path):
    """And so are the chats that a template refuses."""
    tokenizer, oracle = with_auto(chat_folder(tmp_path, kind, TEMPLATES[name]))
    for messages in CHATS:
        try:
            expected = oracle.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:
            with pytest.raises(UserError, match=f"chat template refuses this chat: {error}"):
                generate.encode_chat(tokenizer, messages)
        else:
            assert generate.encode_chat(tokenizer, messages) == expected


def test_no_message_becomes_a_control_token(tmp_path):
    """Names of one character, within one another, side by side, and characters that might be
    marks."""
    names = ["你", "你你", "<a>", "b<a>", "[<a>]", "\ue001"]
    template = "<a>{% for m in messages %}{{ m.content | trim }}你你{% endfor %}"
    tokenizer = tokenizer_of(
        tmp_path,
        tokenizer=tokenizer_json(added=special_tokens(*names)),
        tokenizer_config={"chat_template": template},
    )
    alphabet = [*names, "<", "a", ">", "[", "]", "b", "x", " ", "\ue000", "\ue002", "\U000f0000"]
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=8))
        ids = generate.encode_chat(tokenizer, [{"role": "user", "content": text}])
        # The template's own <a> and 你你, and text between them.
        assert ids == [258, *tokenizer.encode(text.strip()), 257]


def test_where_a_chat_template_comes_from(tmp_path):
    """From tokenizer_config.json, of several the default; a file of its own counts more. It may not
    look into Python."""
    several = [{"name": "rag", "template": "a"}, {"name": "default", "template": "b"}]
    tokenizer = tokenizer_of(
        tmp_path, tokenizer=tokenizer_json(), tokenizer_config={"chat_template": several}
    )
    assert tokenizer.chat_template == "b"

    template = "{{ ''.__class__.mro() }}"
    tokenizer = tokenizer_of(tmp_path, tokenizer_config={"chat_template": template})
    with pytest.raises(UserError, match="unsafe"):
        generate.encode_chat(tokenizer, [{"role": "user", "content": "Hi"}])

    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load_tokenizer(tmp_path).chat_template == "file"


# ---- bad files

GOOD = json.dumps(tokenizer_json())
CUT_OFF = (NANO / "tokenizer.model").read_bytes()[:30_000].decode(errors="surrogateescape")
NOT_BYTES = "\udcff"  # which is written as a byte that no UTF-8 text has
NOT_VALID = ": not a valid tokenizer; download it again"
BAD_TOKENIZERS = [  # the files of a folder, what the error says
    ({"tokenizer.json": "{}"}, NOT_VALID),
    ({"tokenizer.json": tokenizer_json(model={"merges": 5})}, NOT_VALID),
    ({"tokenizer.json": tokenizer_json(model={"merges": ["a b"]})}, NOT_VALID),
    ({"tokenizer.model": "version https://git-lfs.github.com/spec/v1\noid sha256:12\n"}, NOT_VALID),
    ({"tokenizer.model": "YWI= 0\nYWM= 2\n"}, NOT_VALID),  # a rank is missing
    ({"tokenizer.model": "YQ== 0\nYg== 1\n"}, NOT_VALID),  # bytes are missing
    ({"tokenizer.model": "YQ== 0\nYg==\n"}, NOT_VALID),
    ({"tokenizer.model": CUT_OFF}, NOT_VALID),
    ({"tokenizer.model": ""}, "tokenizer.model: an empty file; download it again"),
    ({"tokenizer.json": "[]"}, ": not a JSON object; download it again"),
    ({"tokenizer.json": GOOD[:-9]}, "tokenizer.json: not valid JSON; download"),
    ({"tokenizer.json": NOT_BYTES}, "tokenizer.json: not valid JSON; download"),
    (
        {"tokenizer.json": tokenizer_json(added=special_tokens("<x>", first=300))},
        "<x> cannot have the id 300",
    ),
    ({}, "no tokenizer.json and no tokenizer.model"),
    ({"vocab.json": "{}"}, "no tokenizer.json and no tokenizer.model"),
    (
        {"vocab.json": '{"a": 0}', "merges.txt": "a b"},
        "merges.txt without a tokenizer.json; write one with: python",
    ),
    (
        {"tokenizer.json": GOOD, "tokenizer_config.json": "{"},
        "tokenizer_config.json: not valid JSON",
    ),
    (
        {"tokenizer.json": GOOD, "chat_template.jinja": NOT_BYTES},
        "chat_template.jinja: not UTF-8 text",
    ),
    ({"tokenizer.json": GOOD, "config.json": '{"a":'}, "config.json: not valid JSON"),
]


@pytest.mark.parametrize("files, message", BAD_TOKENIZERS)
def test_bad_files_end_in_one_line(tmp_path, capfd, files, message):
    """And a library that reads them prints nothing."""
    for name, contents in files.items():
        if isinstance(contents, dict):
            contents = json.dumps(contents)
        (tmp_path / name).write_text(contents, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError) as error:
        load_tokenizer(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------- the exactness ladder, in full


@functools.cache
def dense_logits(rows: tuple, more: tuple, dtype=torch.float32, **changes) -> torch.Tensor:
    """Dense logits of a tiny model after the rows' prompts, and after each token of `more`."""
    model = tiny_model(**changes).to(dtype)
    engine = make_engine(model, "dense", len(rows), 80)
    return logits_through(engine, rows, more)


def llm_over(method: str, rows: int, capacity: int, **options) -> generate.LLM:
    """An LLM of a tiny model, in fp64, without a tokenizer."""
    model = tiny_model(head_dim=width_for(method)).double()
    with mock.patch.object(generate, "load_checkpoint", lambda *_: (model, None)):
        llm = generate.LLM(model.config, method, device="cpu", max_seq_length=capacity, **options)
    llm.engine = make_engine(model, method, rows, capacity, block=16, **options)
    llm.token_ids = [[] for _ in range(rows)]
    return llm


def goes_on(engine: Engine) -> list[tuple[list[int], list[int], torch.Tensor]]:
    """What each row makes of what it holds: nine tokens, and six more after three that are given
    to it; and its last logits."""
    first = decode_rows(engine, 9, lambda token_ids: False)
    engine.append([[5, 6, 7]] * len(engine.tokens))
    then = decode_rows(engine, 6, lambda token_ids: False)
    return list(zip(first, then, engine.logits.clone(), strict=True))


@over("method, options", lambda tests: tests.CASES)
def test_rows_go_on_alike_after_they_were_saved_and_loaded_or_forked(method, options, tmp_path):
    """Ragged rows after some steps, into caches that have held others. In a cache of the same size
    they go on alike to the bit; in a larger one within OF_THE_CAPACITY."""
    saved = llm_over(method, 3, 110, **options)
    saved.generate([random_ids(70, 70), random_ids(9, 9), random_ids(33, 33)], 5)
    saved.save(tmp_path / "cache")
    same_size = llm_over(method, 3, 110, **options)
    larger = llm_over(method, 3, 150, **options)
    for llm in (same_size, larger):
        llm.generate([random_ids(30, 130), random_ids(90, 190), random_ids(50, 150)], 10)
        llm.load(tmp_path / "cache")
        assert llm.token_ids == saved.token_ids
        assert llm.engine.pos.equal(saved.engine.pos)

    expected = goes_on(saved.engine)
    in_same_size = goes_on(same_size.engine)
    in_larger = goes_on(larger.engine)
    bound = OF_THE_CAPACITY.get(method, 1e-12)
    for row, (first, then, logits) in enumerate(expected):
        same_first, same_then, same_logits = in_same_size[row]
        assert (same_first, same_then) == (first, then)
        assert same_logits.equal(logits)
        larger_first, larger_then, larger_logits = in_larger[row]
        if bound < math.inf:
            assert (larger_first, larger_then) == (first, then)
            assert error(larger_logits, logits) < bound

    # Row 2 again, in every row.
    same_size.load(tmp_path / "cache")
    same_size.fork(2, 2)
    first, then, logits = expected[2]
    for forked_first, forked_then, forked_logits in goes_on(same_size.engine):
        assert (forked_first, forked_then) == (first, then)
        assert error(forked_logits, logits) < 1e-12


@over("method, options", lambda tests: tests.CASES)
def test_a_saved_row_is_as_large_as_the_ledger_of_a_cache_that_it_fills(method, options, tmp_path):
    llm = llm_over(method, 2, 128, **options)
    for n in (64, 128):
        llm.prefill([random_ids(n)])
        llm.save(tmp_path / "cache")
        assert llm.held_memory().tokens == n

        of_row_0 = 0
        for name, tensor in load_file(tmp_path / "cache").items():
            assert not name.startswith("1.")  # an empty row
            if re.match(r"0\.\d+\.", name):
                of_row_0 += tensor.nbytes
        expected = 0
        for cache in llm_over(method, 1, n, **options).engine.caches:
            expected += cache.bytes_formula() + cache.bytes_host()
        assert of_row_0 == expected
        assert llm.held_memory().bytes == expected


def test_caches_stay_eager_where_a_cpu_compiles_the_step():
    """Inductor would drop the last of KIVI's keys here."""
    prompts = [random_ids(2, 2), random_ids(31, 31), random_ids(97, 97)]
    logits = []
    for is_compiled in (False, True):
        model = tiny_model(n_layers=1, group=1)
        with mock.patch.object(generate, "load_checkpoint", lambda *_, model=model: (model, None)):
            llm = generate.LLM(
                model.config,
                "kivi",
                bits=2,
                residual=32,
                max_seq_length=121,
                use_compile=is_compiled,
                device="cpu",
            )
        llm.generate(prompts, 4)
        logits.append(llm.engine.logits)
    assert error(logits[1], logits[0]) < 1e-5


# ---- the papers' algorithms: a cache does what the *_step does after which its test is named
#
# A pure_* function gives, of one row whose first n tokens were its prompt, what the paper's step
# makes of each token after them: its output [Hq * D], and for each KV head which tokens it attends,
# [tokens] or each query head's own [G, tokens]; None: all. It reads the cache's weights (bases,
# ranks), and nothing that the cache stores.


def by_head(cache, q, k, v, n: int, start, step):
    """Steps of one row, where each KV head is by itself. q [S, Hq, D]; k and v have an entry for
    each KV head of each token.

    start(h): what head h has stored of the first n tokens. step(i, h, q, k, v, stored): of token i
    the output, the tokens attended (None: all) and what is stored then."""
    n_kv_heads = cache.config.n_kv_heads
    q = q.unflatten(1, (n_kv_heads, -1))  # [S, Hkv, G, D]
    stored = [start(h) for h in range(n_kv_heads)]
    for i in range(n, len(q)):
        outputs = []
        chosen = []
        for h in range(n_kv_heads):
            output, tokens, stored[h] = step(i, h, q[i, h], k[i][h], v[i][h], stored[h])
            outputs.append(output)
            chosen.append(tokens)
        yield torch.cat(outputs).flatten(), chosen


def pure_sals(cache, row, n, q, k, v):
    v_codes, v_pairs = quantize(v[:n], cache.values.bits, 16)
    stored = compress.SalsStored(
        latents=k[:n].flatten(1) @ cache.U,
        v_codes=v_codes,
        v_pairs=v_pairs,
        k_exact=cache.rope_from(k[:n], 0),
        v_exact=v[:n],
    )
    for i in range(n, len(q)):
        output, chosen, stored = compress.sals_step(
            q[i],
            k[i],
            v[i],
            stored,
            U=cache.U,
            r_score=cache.r_score,
            bits=cache.values.bits,
            budget=cache.budget,
            rope=cache.rope,
        )
        yield output.flatten(), [chosen] * cache.config.n_kv_heads


def pure_sals_ours(cache, row, n, q, k, v):
    maps = compress.SalsMaps(cache.down, cache.keys.basis.flatten(0, 1), cache.mean)
    latents = (k[:n].flatten(1) - maps.mean) @ maps.down
    int8_dims, scale, int4_dims = kernels.quantize_mixed(latents, cache.r_score)
    v_codes, v_scale = kernels.quantize_spread(v[:n], cache.values.bits)
    stored = compress.SalsStoredOurs(
        int8_dims=int8_dims,
        scale=scale,
        int4_dims=int4_dims,
        v_codes=v_codes,
        v_scale=v_scale,
        k_exact=cache.rope_from(k[:n], 0),
        v_exact=v[:n],
    )
    for i in range(n, len(q)):
        output, chosen, stored = compress.sals_step_ours(
            q[i],
            k[i],
            v[i],
            stored,
            maps=maps,
            r_score=cache.r_score,
            bits=cache.values.bits,
            budget=cache.budget,
            rope=cache.rope,
            blocks=cache.blocks,
            mean_blocks=cache.mean_blocks,
        )
        yield output.flatten(), [chosen] * cache.config.n_kv_heads


def lrqk_bases(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The least squares B of X ~ A B (Eq. 6)."""
    return torch.linalg.solve(a.mT @ a, a.mT @ x)


def pure_lrqk(cache, row, n, q, k, v):
    q = cache.rope_from(q, 0).double()
    k = cache.rope_from(k, 0).double()
    v = v.double()
    grouped = q.unflatten(1, (k.shape[1], -1))  # [S, Hkv, G, D]
    G = grouped.shape[2]
    _, n_selected, n_recent = cache.budget
    n_old = max(0, n - n_recent)

    def start(h):
        """Algorithm 1, of all queries of the group; the last ones select."""
        queries = grouped[:n, h].flatten(0, 1)
        keys = k[:n, h]
        columns = (queries.abs().sum(0) + keys.abs().sum(0)).topk(cache.rank).indices
        a_q, a_k = explicit_lrqk(queries, keys, queries[:, columns], keys[:, columns], 2)
        bases = lrqk_bases(a_q, queries), lrqk_bases(a_k, keys)
        logits = a_q[-G:] @ a_k[:n_old].mT / 4  # D is 16
        scores = logits.log_softmax(-1).amax(0)
        chosen = scores.topk(min(n_selected, n_old)).indices
        omega = torch.cat((chosen, torch.arange(n_old, n)))
        return (a_k, keys, v[:n, h]), bases, omega

    def step(i, h, q, k, v, state):
        stored, bases, omega = state
        output, omega, stored, bases = compress.lrqk_step(
            q, k, v, stored, bases, omega, n_selected, n_recent
        )
        return output, omega, (stored, bases, omega)

    return by_head(cache, q, k, v, n, start, step)


def pure_lrqk_ours(cache, row, n, q, k, v):
    q = cache.rope_from(q, 0).double()
    k = cache.rope_from(k, 0).double()
    v = v.double()
    gram_q, _ = compress.lrqk_moments(q[:n].unflatten(1, (k.shape[1], -1)))
    gram_k, _ = compress.lrqk_moments(k[:n, :, None])
    w_q, w_k = compress.lrqk_optimum(gram_q, gram_k, cache.rank)
    _, n_selected, n_recent = cache.budget

    def start(h):
        return k[:n, h] @ w_k[h], k[:n, h], v[:n, h]

    def step(i, h, q, k, v, stored):
        return compress.lrqk_step_ours(q, k, v, stored, w_q[h], w_k[h], n_selected, n_recent)

    return by_head(cache, q, k, v, n, start, step)


def pure_loki(cache, row, n, q, k, v):
    q = cache.rope_from(q, 0)
    k = cache.rope_from(k, 0)
    basis = cache.P

    def start(h):
        return k[:n, h] @ basis[h], v[:n, h]

    def step(i, h, q, k, v, stored):
        n_selected = compress.kept_tokens(cache.settings.k, i + 1, least=1)
        return compress.loki_step(q, k, v, stored, basis[h], cache.d, n_selected)

    return by_head(cache, q, k, v, n, start, step)


def pure_loki_reduced(cache, row, n, q, k, v):
    """PCAAttn: all tokens, on the d components that are cached."""
    q = cache.rope_from(q, 0)
    k = cache.rope_from(k, 0)
    basis = cache.P

    def start(h):
        return k[:n, h] @ basis[h], v[:n, h]

    def step(i, h, q, k, v, stored):
        output, _, stored = compress.loki_step(q, k, v, stored, basis[h], cache.d, i + 1)
        return output, None, stored

    return by_head(cache, q, k, v, n, start, step)


def pure_kivi(cache, row, n, q, k, v):
    q = cache.rope_from(q, 0)
    k = cache.rope_from(k, 0)

    def start(h):
        return k[:n, h], v[:n, h]

    def step(i, h, q, k, v, stored):
        output, stored = compress.kivi_step(q, k, v, stored, cache.keys.bits, cache.keys.R)
        return output, None, stored

    return by_head(cache, q, k, v, n, start, step)


def pure_fdc(cache, row, n, q, k, v, latent):
    """latent [S, sum of d_v]: all heads' values; v is empty."""
    q = cache.rope_from(q, 0)
    k = cache.rope_from(k, 0)
    bases = [cache.R[h, :, :rank] for h, rank in enumerate(cache.k_ranks)]
    values = latent.split(cache.v_ranks, -1)  # of each head [S, d_v]

    def start(h):
        return k[:n, h] @ bases[h], values[h][:n]

    def step(i, h, q, k, v, stored):
        output, stored = compress.fdc_step(q, k, v, stored, bases[h])
        return output.flatten(), None, stored

    values_of_token = list(zip(*values, strict=True))
    return by_head(cache, q, k, values_of_token, n, start, step)


def pure_elitekv(cache, row, n, q, k, latent):
    """k [S, Hkv, 2r]: the elite dims; latent [S, d_ckv]: all else of K and V."""
    cos = cache.context.cos[: len(q)]
    sin = cache.context.sin[: len(q)]
    q = cache.attention.rotate(q, cos, sin)
    k = cache.attention.rotate(k, cos, sin)
    up = cache.attention.up.weight.unflatten(0, (cache.config.n_kv_heads, -1))
    b_k = up[:, :-16]  # D is 16
    b_v = up[:, -16:]
    stored = k[:n], latent[:n]
    for i in range(n, len(q)):
        output, stored = compress.elitekv_step(q[i], k[i], latent[i], stored, b_k, b_v)
        yield output.flatten(), None


def fdc_shapes(cache, group: int) -> list[tuple]:
    """Of a token's k, its v, which is empty, and the values of all heads."""
    return [(8 // group, 48), (0, 48), (sum(cache.v_ranks),)]


def elitekv_shapes(cache, group: int) -> list[tuple]:
    """Of a token's elite key and its latent."""
    return [(8 // group, 6), (20,)]


SALS_OURS = {"sinks": 3, "critical": 12, "recent": 6, "score_rank": 0.25}
# The step, and the case -> options, the steps of a row, and the shapes of what a token has beside q
# if that is not k and v. Options are over the paper's, or where the step is ours over the defaults.
STEPS = {
    "sals_step": ({"sinks": 3, "critical": 12, "recent": 6}, pure_sals, None),
    "sals_step_ours": (SALS_OURS, pure_sals_ours, None),
    "sals_step_ours biased": (SALS_OURS, pure_sals_ours, None),
    "lrqk_step": ({"rank": 4, "k": 12, "recent": 6}, pure_lrqk, None),
    "lrqk_step_ours": ({"rank": 4, "k": 12, "recent": 6, "slots": 1.5}, pure_lrqk_ours, None),
    "loki_step": ({"k": 0.4, "d": 0.5}, pure_loki, None),
    "loki_step reduced": ({"d": 0.5, "reduced": True}, pure_loki_reduced, None),
    "kivi_step": ({"bits": 4, "residual": 32}, pure_kivi, None),
    "kivi_step 2 bits": ({"bits": 2, "residual": 64}, pure_kivi, None),
    "fdc_step": ({"rate": 0.4}, pure_fdc, fdc_shapes),
    "elitekv_step": ({"r": 3, "d_ckv": 20}, pure_elitekv, elitekv_shapes),
}


def assert_attends(attends: torch.Tensor, chosen: torch.Tensor, place: tuple) -> None:
    """attends [G, S]: of the query heads of a KV head; chosen: positions [n], or [G, n]."""
    expected = torch.zeros_like(attends).scatter(1, chosen.expand(len(attends), -1), True)
    assert torch.equal(attends, expected), place


@pytest.mark.parametrize("group", [1, 2, 8])
@over("name", lambda tests: tests.STEPS)
def test_a_cache_does_as(name, group, request):
    """Over 40 steps of two ragged rows, across the budget's edge: equal outputs, equal tokens."""
    options, pure, other_shapes = request.module.STEPS[name]
    method = name.split("_step")[0]
    has_variants = "variant" in method_named(method).settings.__dataclass_fields__
    if has_variants and "ours" not in name:
        options = options | {"variant": "paper"}
    dim = width_for(method)
    model = tiny_model(group=group, head_dim=dim, qkv_bias="biased" in name)
    cache = row_cache(method, model, 2, 70, **options)

    # Of each row its prompt's length, and what attention computes of its 70 tokens: q, k, v, ...
    prompts = [8, 30]
    shapes = [(8, dim), (8 // group, dim), (8 // group, dim)]
    if other_shapes:
        shapes = [(8, dim), *other_shapes(cache, group)]
    torch.manual_seed(0)
    streams = []
    for _ in prompts:
        streams.append([torch.randn(70, *shape) * 2 for shape in shapes])

    # Prompts are read, then the paper's steps are made.
    expected = []
    for row, n in enumerate(prompts):
        cache.prefill(row, 0, *(x[:n] for x in streams[row]))
    for row, n in enumerate(prompts):
        steps = pure(cache, row, n, *streams[row])
        expected.append(list(itertools.islice(steps, 40)))

    # The cache's own.
    seen = []
    see_selections(cache, seen)
    for i in range(40):
        pos = torch.tensor([n + i for n in prompts], dtype=torch.int32)
        token = []
        for part in range(len(shapes)):
            of_rows = [streams[row][part][n + i] for row, n in enumerate(prompts)]
            token.append(torch.stack(of_rows))
        output = cache.decode(pos, *token)
        for row in range(len(prompts)):
            expected_output, chosen = expected[row][i]
            assert error(output[row].flatten(), expected_output) < 1e-5, (i, row)
            for h, tokens in enumerate(chosen or []):
                if tokens is not None:
                    attends = seen[-1][row, h * group : (h + 1) * group]
                    assert_attends(attends, tokens, (i, row, h))


def test_operations_keep_what_their_docstrings_promise():
    """An index is int32, and -1 where there is no token; only places of a store are written."""
    budget = compress.Budget(n_sinks=0, n_selected=0, n_recent=4)
    scores = torch.zeros(1, 1, 1, 8)
    index = kernels.select(scores, torch.tensor([1]), budget, recent=True, kernel=False)
    assert index.dtype == torch.int32
    assert index.flatten().tolist() == [1, 0, -1, -1]

    kernels.check_positions(torch.tensor([-1, 3]), 4)  # a row of no tokens may be read
    for pos in ([-1, 3], [0, 4]):
        with pytest.raises(ValueError, match="do not fit into 0 to 3"):
            kernels.check_positions(torch.tensor(pos), 4, least=0)
    with pytest.raises(ValueError, match="no rule sum"):
        q = torch.zeros(1, 1, 4)
        kernels.scores(q, scores[0], None, torch.tensor([1]), 1.0, "sum", kernel=False)


def test_the_callers_time_is_no_time_of_decoding():
    """Between two pieces of a stream."""
    llm = generate.LLM(NANO, "dense", device="cpu")
    pieces = 0
    for _ in llm.stream("The", max_new_tokens=6, ignore_eos=True):
        pieces += 1
        time.sleep(0.5)
    assert pieces > 2
    assert llm.last_run.decode_s < 0.5 * pieces / 2


def test_progress_that_has_not_begun_is_shown(capsys):
    with generate.ProgressLine("reading", 4) as progress:
        progress.tick(0)
        progress.tick(4)


def test_qwens_window_survives_a_round_trip():
    c = tiny_config(family="qwen2", sliding_window=32)
    assert model_file.config_from_hf(model_file.config_to_hf(c)).sliding_window == 32


@pytest.mark.parametrize("capacity", [64, 80, 96, 128, 256])
def test_kivis_last_tokens_are_exact_at_every_capacity(capacity):
    """Also where the cache has room for fewer than R tokens: then no block is ever full, and keys
    are exact."""
    cache = row_cache("kivi", tiny_model(), 1, capacity, bits=2, residual=128)
    c = cache.config
    q = torch.randn(64, c.n_heads, c.head_dim)
    k = torch.randn(64, c.n_kv_heads, c.head_dim)
    v = torch.randn(64, c.n_kv_heads, c.head_dim)
    cache.prefill(0, 0, q[:63], k[:63], v[:63])
    output = cache.decode(torch.tensor([63]), q[63:], k[63:], v[63:])
    ((expected, _),) = itertools.islice(pure_kivi(cache, 0, 63, q, k, v), 1)
    assert error(output.flatten(), expected) < 1e-5
    assert cache.bytes_stored() == cache.bytes_formula()


def test_a_cache_that_attends_all_tokens_reads_what_dense_does():
    """A budget that covers the cache scores nothing."""
    dense = row_cache("dense", tiny_model(), 1, 40)
    for method, options in (("loki", {"k": 1.0}), ("topk", {"keep": 1.0})):
        cache = row_cache(method, tiny_model(), 1, 40, **options)
        assert cache.covers_all()
        assert cache.bytes_read(40) == dense.bytes_read(40)


def test_folding_no_layers_changes_none():
    folded = []

    def fold(attention, c, settings, artifact, i):
        folded.append(i)
        return attention

    model = tiny_model()
    method = dataclasses.replace(method_named("fdc"), fold=fold)
    method.fold_all(model, None, {}, layers=[])
    assert folded == []
    method.fold_all(model, None, {}, layers=[1])
    assert folded == [1]
    method.fold_all(model, None, {})
    assert folded == [1, *range(len(model.layers))]


SPLITS = [case for case in CASES if case[0] not in FITTED_TO_PROMPTS]
# Tokens of the prompt, and those once a follow-up is read, too; the rest of 48 comes one by one.
# At and beside the edges of pages, chunks, windows and blocks, and across them.
SPLIT_ENDS = [
    (48, 48),
    (1, 1),
    (3, 40),
    (7, 40),
    (8, 48),
    (9, 30),
    (31, 33),
    (32, 32),
    (33, 48),
    (1, 31),
]


def stored_of_48(engine: Engine, method: str) -> dict[str, torch.Tensor]:
    """By name, all that the cache of an engine's first layer holds of 48 tokens. Of keys that wait
    to be packed it is how they are read. Where a prompt attends what is stored, logits are equal,
    too: that makes EliteKV's absorbed decode equal its naive attention."""
    cache = engine.caches[0]
    stored = dict(cache.named_buffers())
    if "keys.codes" in stored:
        keys, values = cache.past(0, 48)
        stored = {"keys": keys, "values": values}
    if method in CODED:
        stored["logits"] = engine.logits
    return stored


@over("method, options", lambda tests: tests.SPLITS)
def test_any_split_of_prompt_follow_up_and_decode_leaves_the_same_cache(method, options):
    """Codes to the bit, and other numbers up to rounding."""
    options = options | skip_none(method)
    token_ids = random_ids(48)
    groups = [1, 2, 8] if method in CODED else [2]
    for group in groups:
        expected = None
        for first, second in SPLIT_ENDS:
            model = tiny_model(
                n_layers=1, head_dim=width_for(method), qkv_bias=True, group=group
            ).double()
            engine = make_engine(model, method, 1, 64, **options_for(model.config, options))
            engine.prefill([token_ids[:first]])
            engine.append([token_ids[first:second]])
            for token in token_ids[second:]:
                engine.tokens.fill_(token)
                engine.step()
            stored = stored_of_48(engine, method)
            if expected is None:
                expected = stored
            assert stored.keys() == expected.keys()
            for name, found in stored.items():
                if name in OF_THE_PROMPT:
                    continue
                if found.is_floating_point():
                    is_same = torch.allclose(expected[name], found, atol=1e-5)
                else:
                    is_same = expected[name].equal(found)
                assert is_same, (group, first, second, name)


def not_coded(tests) -> list:
    """The cases of methods whose prompts attend exact keys."""
    return [(method, options) for method, options in tests.CASES if method not in CODED]


@over("method, options", not_coded)
def test_past_is_what_the_stores_read_and_exact_where_tokens_are_kept_exactly(method, options):
    cache, (_, k, _) = scene(method, 40, 57, 60, **(options | skip_none(method)))
    past_k, _ = cache.past(0, 40)
    for store in cache.modules():
        is_store = isinstance(store, (compress.TokenStore, compress.RebuiltKeys))
        if is_store and store not in cache.exact:
            of_row = store.of_row(0, 40)
            all_tokens = store.read_all()[0].transpose(0, 1)
            assert error(of_row, all_tokens[: len(of_row)]) < 1e-6, store

    exact_k = cache.rope_from(k[:40], 0)[: len(past_k)]
    is_exact = (past_k - exact_k).abs().amax(-1) < 1e-5  # [n, Hkv]
    if method in EXACT:
        expected = EXACT[method](cache, torch.arange(40)[:, None])
        assert torch.equal(is_exact, expected.expand_as(is_exact))


@over("method, options", not_coded)
def test_a_follow_up_attends_what_the_cache_keeps_and_itself(method, options):
    """Exactly, for each of its 17 queries: past() in any order, then the new tokens up to its
    own."""
    cache, (q, k, v) = scene(method, 40, 57, 60, **(options | skip_none(method)))
    past_k, past_v = (x.clone() for x in cache.past(0, 40))
    output = cache.prefill(0, 40, q[40:], k[40:], v[40:])

    keys = torch.cat((past_k, cache.rope_from(k[40:], 40)))  # [n, Hkv, D]
    values = torch.cat((past_v, v[40:]))
    last = len(past_k) + torch.arange(17)  # of what each query attends
    live = torch.arange(len(keys)) <= last[:, None]  # [17, n]
    expected = attend_plain_reference(
        cache.rope_from(q[40:], 40),
        keys.transpose(0, 1).expand(17, -1, -1, -1),
        values.transpose(0, 1).expand(17, -1, -1, -1),
        live,
    )
    assert error(output, expected) < 1e-5


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_attend_takes_an_index_of_every_shape(heads, kernel):
    """[B, Hkv or 1, G or 1, n], -1 for no token: as attention of each query head over its own
    tokens."""
    context = CacheContext(tiny_model().to(DEVICE), 2, 40, kernel)
    keys = compress.TokenStore(context, 4, 40, 16)
    values = compress.TokenStore(context, 4, 40, 16)
    torch.manual_seed(0)
    keys.vectors.copy_(torch.randn(2, 4, 40, 16))
    values.vectors.copy_(torch.randn(2, 4, 40, 16))
    q = torch.randn(2, 8, 16).to(DEVICE)
    index = torch.rand(2, *heads, 40).argsort(-1)[..., :12].int()
    index[1, ..., 5:] = -1
    pos = torch.tensor([39, 39], dtype=torch.int32, device=DEVICE)
    out = compress.attend(q, keys, values, pos, index.to(DEVICE), scale=0.25, kernel=kernel)

    index = index.long().expand(-1, 4, 2, -1).flatten(1, 2)  # [B, Hq, n]
    live = torch.zeros(2, 8, 41, dtype=torch.bool).scatter(2, index.where(index >= 0, 40), True)
    k = keys.vectors.repeat_interleave(2, 1)
    v = values.vectors.repeat_interleave(2, 1)
    assert error(out, attend_plain_reference(q, k, v, live[..., :40].to(DEVICE))) < 1e-5


@pytest.mark.parametrize("n_sinks", [0, 1, 4])
@pytest.mark.parametrize("n_recent", [1, 8])
def test_a_ring_store_writes_each_of_its_slots_once(n_sinks, n_recent):
    context = CacheContext(tiny_model(), 1, 60)
    store = compress.RingStore(context, 1, 16, n_sinks, n_recent)
    for start, stop in itertools.combinations((0, 2, 4, 7, 30, 31, 33, 60), 2):
        kept = store.kept(start, stop)
        expected = []
        for position in range(start, stop):
            if position < n_sinks or position >= stop - n_recent:
                expected.append(position)
        assert kept.tolist() == expected
        slots = set(store.slot(kept).tolist())
        assert len(slots) == len(kept)


class Selector(NamedTuple):
    """What a method that selects says about the tokens that it attends."""

    method: str
    options: dict
    budget: int  # of tokens in all
    sinks: int = 0
    recent: int = 0
    free: int = 0  # how much of the budget may stay free beyond its edge
    # The rule by which it takes exactly the best: those of a group's "largest" weight, of its
    # "largest old" one (of tokens that are not recent), or "each" head's; "": it only estimates.
    # "early": likewise, and some of the budget may stay free before its edge, too.
    best: str = ""


SELECTORS = [
    Selector("topk", {"keep": 24.8}, budget=24, recent=1, best="largest"),  # rounded down
    Selector("loki", {"k": 12, "d": 0.25}, budget=12),
    Selector("loki", {"k": 9, "d": 1.0}, budget=9, best="each"),
    Selector("loki", {"k": 9, "d": 1.0, "share": "group"}, budget=9, best="largest"),
    Selector("lrqk", {"k": 10, "recent": 5, "rank": 16}, budget=15, recent=5, best="largest old"),
    Selector(
        "lrqk",
        {"k": 10, "recent": 5, "variant": "paper", "rank": 16},
        budget=15,
        recent=5,
        best="largest old",
    ),
    Selector("lrqk", {"k": 10, "recent": 5, "variant": "paper", "rank": 6}, budget=15, recent=5),
    Selector("sals", FULL | {"sinks": 2, "critical": 20}, budget=30, sinks=2, recent=8),
]


def selections(tests) -> list:
    """SELECTORS by groups and lengths of prompts."""
    return pairwise(tests.SELECTORS, [1, 2], [1, 10, 15, 23, 40])


@over("selector, group, n_prompt", selections)
def test_a_method_attends_what_it_says_within_its_budget(selector, group, n_prompt):
    """All tokens up to the budget's edge; then the sinks, the recent ones and the best, once
    each."""
    said = Selector(*selector)
    settings = dict(said.options)
    settings.pop("exact_values", None)
    assert said.budget == sum(compress.settings_from(said.method, settings).budget(80))

    bound = BOUNDS.get(said.method, 1e-5)
    cache, (q, k, v) = scene(said.method, n_prompt, 75, 80, group=group, **said.options)
    dense = reads(DenseCache(cache.context), n_prompt, q, k, v)
    for n in range(n_prompt, 75):
        output, attends = watched_step(cache, n, q, k, v)
        dense_output = step(dense, n, q, k, v)
        rotated = dense.rope(q[n], torch.tensor(n))  # [Hq, D]
        keys = dense.keys.vectors.repeat_interleave(group, 1)  # [1, Hq, S, D]
        values = dense.values.vectors.repeat_interleave(group, 1)

        # The output is attention over what it attends. This is all up to the budget's edge.
        expected = attend_plain_reference(rotated[None], keys, values, attends[None])
        assert error(output, expected) < bound, n
        least = said.budget  # tokens, if there are as many
        if n >= said.budget or said.best == "early":
            least -= said.free
        is_dense = error(output, dense_output) < bound
        if n < least or n >= said.budget:
            assert is_dense == (n < said.budget), n

        # As many tokens as it says, none of the future, the first ones and the last ones.
        count = attends.sum(-1)
        assert (count <= min(n + 1, said.budget)).all()
        assert (count >= min(n + 1, least)).all()
        assert not attends[:, n + 1 :].any()
        assert attends[:, : min(said.sinks, n + 1)].all()
        assert attends[:, max(0, n + 1 - said.recent) : n + 1].all()

        # LRQK has its full rank from the prompt.
        if said.best not in ("", "early") and n_prompt > 1:
            logits = torch.einsum("hd,hsd->hs", rotated, keys[0]) / 4  # D is 16
            assert_the_best_are_attended(said, n, logits, attends, group)


def assert_the_best_are_attended(said: Selector, n: int, logits, attends, group: int) -> None:
    """logits, attends [Hq, S]: of the query at position n. No token that was left out has a higher
    score than one that was taken, sinks and recent tokens aside."""
    position = torch.arange(logits.shape[1])
    last_ranked = n - said.recent if said.best == "largest old" else n
    scores = logits.masked_fill(position > last_ranked, -torch.inf).log_softmax(-1)
    if said.best != "each":
        of_groups = scores.unflatten(0, (-1, group))
        scores = of_groups.amax(1, keepdim=True).expand_as(of_groups).flatten(0, 1)
    is_ranked = (position >= said.sinks) & (position <= n - said.recent)
    is_taken = attends & is_ranked
    is_left = ~attends & is_ranked
    lowest_taken = scores.masked_fill(~is_taken, torch.inf).amin(-1)
    highest_left = scores.masked_fill(~is_left, -torch.inf).amax(-1)
    assert (lowest_taken >= highest_left).all()


# --------------------------------------------------------------------------------------- the ledger
# That measured bytes equal the formula is rung 8 of the ladder.


def test_keep_is_the_share_of_tokens_attended():
    """And the full layers are the paper's."""
    assert compress.SalsSettings().budget(4096) == (4, 444, 64)
    assert compress.SalsSettings(keep=0.125).budget(4096) == (4, 444, 64)
    assert sum(compress.SalsSettings(keep=0.25).budget(8192)) == 2048
    paper = compress.settings_from("sals", {"variant": "paper"})
    assert paper.budget(4096) == (16, 432, 64)  # on LongBench
    assert compress.skipped_layers(compress.SalsSettings(), 32) == {0, 1, 31}
    # Sinks and recent tokens alone.
    left = compress.left_to_select(keep=24, total=24, max_seq_length=80, n_sinks=16, n_recent=8)
    assert left == 0


TABLE_2 = [  # rank, bits -> a token's bytes over dense's: 0.28 and 0.15 in the paper
    (0.25, 4, 0.28125),
    (0.125, 2, 0.15625),  # 1 / 0.15625 is the abstract's 6.4 times
]


@pytest.mark.parametrize("rank, bits, ratio", TABLE_2)
def test_bytes_of_the_paper(rank, bits, ratio):
    """SALS Table 2, of Llama-2-7B in bf16."""
    norm = SimpleNamespace(weight=torch.empty(0, dtype=torch.bfloat16))
    model = SimpleNamespace(config=SHAPES["llama-2-7b"], norm=norm)
    context = CacheContext(model, 1, 4096)
    settings = compress.settings_from("sals", {"variant": "paper", "rank": rank, "bits": bits})
    basis = torch.zeros(4096, round(4096 * rank))
    cache = compress.PaperSalsCache(context, settings, True, basis)
    dense = 2 * 4096 * 2  # K and V, of 4096 numbers of two bytes
    assert cache.compressed_bytes_per_token() == ratio * dense


# Method, options, tokens -> bytes that a step reads, by hand. In fp32 with 4 KV heads of 16 dims,
# K and V of a token have 2 * 4 * 16 * 4 = 512 bytes.
PAPER_TOKEN = 32 * 4 + 32 + 16  # a latent, 4-bit codes of V, a minimum and scale a head
OUR_TOKEN = 16 + 8 + 4 + 32 + 4 * 2  # a latent in int8 and 4 bits, its scale, V, a scale a head
BYTES_READ = [
    ("dense", {}, 80, 80 * 512),
    # Layer 0 attends every token: 72 as they are stored, and 8 recent ones exactly.
    ("sals", SPARSE, 80, 72 * PAPER_TOKEN + 8 * 512),
    # Scores read 16 dims of each latent. 20 tokens are selected, 4 + 8 are exact.
    ("sals", SPARSE | {"skip": ""}, 80, 80 * 16 * 4 + 20 * PAPER_TOKEN + (4 + 8) * 512),
    ("sals", CODES | {"skip": ""}, 80, 80 * 20 + 20 * OUR_TOKEN + (4 + 8) * 512),
    # All keys, then the values of 24 tokens.
    ("topk", {"keep": 24}, 80, (80 + 24) * 256),
    # A quarter of each key, then K and V of 12 tokens a query head.
    ("loki", {"k": 12, "d": 0.25}, 80, (80 // 4 + 24 + 24) * 256),
    # Codes of 2 bits, minimum and scale of 32 numbers for K and of 16 for V; and the rings.
    ("kivi", {"bits": 2, "residual": 32}, 80, 48 * (64 * 3 / 8 + 64 * 4 / 8) + 32 * 512),
    # Three elite pairs a head, and the latent.
    ("elitekv", {"r": 3, "d_ckv": 20}, 80, 80 * (2 * 3 * 4 + 20) * 4),
    # In numbers of four bytes, for each of 4 heads: A_K of 72 tokens, K and V of 28, three tables
    # of the slots, two bases.
    ("lrqk", LRQK, 80, 4 * 4 * (72 * 8 + 28 * 32 + 3 * 20 + 2 * 8 * 16)),
]


@over("method, options, length, expected", lambda tests: tests.BYTES_READ)
def test_bytes_read_by_hand(method, options, length, expected):
    engine = make_engine(tiny_model(), method, 1, 100, **options)
    assert engine.caches[0].bytes_read(length) == expected


# ------------------------------------------------------------------------------------- quantisation


def coded(
    x: torch.Tensor, bits: int, dim: int = -1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, the minima and scales of groups of 32, and what they stand for."""
    codes, low_scale = quantize(x, bits, 32, dim)
    return codes, low_scale, compress.dequantize(codes, low_scale, bits, 32, torch.float32, dim)


def spread(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, ...]:
    """What quantize_spread gives, and what it stands for."""
    codes, scale = kernels.quantize_spread(x, bits)
    levels = 2.0 * kernels.unpack(codes, bits) - 2**bits + 1
    return codes, scale, levels * scale[..., None].float()


@pytest.mark.parametrize("bits", [2, 4])
def test_quantiser_bounds(bits):
    """A code errs by half a scale at most, beside the fp16 rounding of the minimum and the
    scale."""
    torch.manual_seed(bits)
    x = torch.randn(5, 3, 64) * torch.logspace(-3, 3, 64)
    codes, low_scale, back = coded(x, bits)
    assert codes.shape == (5, 3, 64 * bits // 8)
    assert codes.dtype == torch.uint8
    low, scale = low_scale.float().unbind(-1)
    bound = scale / 2 + (low.abs() + scale * 2**bits) * 2**-10
    errors = (back - x).unflatten(-1, (2, 32)).abs().amax(-1)
    assert (errors <= bound).all()
    # What codes stand for is coded again with little loss.
    assert error(coded(back, bits)[2], back) < 2e-3

    # An outlier touches its own group of 32 only.
    outlier = x.clone()
    outlier[0, 0, 40] = 1e4
    changed = coded(outlier, bits)[2] != back
    assert not changed[0, 0, :32].any()
    assert not changed[0, 1:].any()
    assert not changed[1:].any()


@pytest.mark.parametrize("bits", [2, 4])
def test_quantiser_bounds_where_codes_are_exact(bits):
    """Constant groups, and groups of whole numbers from 0 to the largest code."""
    constant = torch.full((1, 1, 64), 0.75)
    assert torch.equal(coded(constant, bits)[2], constant)
    constant = torch.full((2, 32, 8), 0.75)
    assert torch.equal(coded(constant, bits, dim=-2)[2], constant)

    every_code = torch.arange(256).remainder(2**bits).float().view(-1, 64)
    every_code[:, ::32] = 0
    every_code[:, 1::32] = 2**bits - 1
    assert torch.equal(coded(every_code, bits)[2], every_code)


@pytest.mark.parametrize("bits", [2, 4])
def test_quantiser_bounds_where_the_scale_rounds_down(bits):
    """Of numbers near fp16's smallest, as which scales are stored: to 0, or so far that codes must
    be clamped."""
    smallest = 2.0**-24
    highest_code = 2**bits - 1
    is_odd = torch.arange(64) % 2
    # Every second number is the smallest one: a step would be less than half of it.
    back = coded((smallest * is_odd)[None], bits)[2]
    assert (back[0, 1::2] == 0).all()
    # A step of 1.45 of the smallest one becomes one of 1.
    steps = int(1.45 * highest_code)
    back = coded((steps * smallest * is_odd)[None], bits)[2]
    assert (back[0, 1::2] == highest_code * smallest).all()


def test_compiled_codes_are_of_the_minimum_and_scale_that_are_stored():
    """They equal the eager ones to the bit, and so does what they stand for."""
    torch.manual_seed(0)
    x = torch.randn(4, 64, 128) * torch.logspace(-9, 1, 128)

    def codes():
        return [*coded(x, bits=2, dim=-2), *coded(x, bits=8, dim=-1)]

    torch.compiler.reset()
    compiled = torch.compile(codes, dynamic=False, fullgraph=True)()
    for found, expected in zip(compiled, codes(), strict=True):
        assert torch.equal(found, expected)


# Bits, and the share of normal numbers' energy that the best uniform code loses (Max's table).
LEAST_LOSSES = [(2, 0.1188), (4, 0.01154)]


@pytest.mark.parametrize("bits, lost", LEAST_LOSSES)
def test_spread_codes_keep_the_length_of_a_row_and_lose_as_little_as_a_uniform_code_can(bits, lost):
    torch.manual_seed(bits)
    x = torch.randn(100, 4, 512) * torch.logspace(-1, 3, 100)[:, None, None]
    x[3] = 0
    codes, scale, back = spread(x, bits)
    assert codes.shape == (100, 4, 64 * bits)
    assert scale.shape == (100, 4)
    assert scale.dtype == torch.float16
    assert not back[3].any()

    live = torch.arange(100) != 3
    energy = x.square().sum(-1)
    length_along_x = (x * back).sum(-1) / energy
    assert (length_along_x - 1)[live].abs().max() < 2**-10
    # A row that is not shortened has 1 / (1 - lost) times the least error.
    share = ((back - x).square().sum(-1) / energy)[live].mean()
    assert abs(share * (1 - lost) / lost - 1) < 0.05


def test_mixed_codes_are_int8_numbers_with_one_scale():
    """Int8 numbers to half a step, and odd multiples of 4 to four steps, or clamped. Latents that
    are as large as int4_gain makes them lose little more of the others than Max's 4 bits,
    .01154."""
    n_int8 = 16
    n_int4 = 48
    energy = torch.logspace(3, -2, 64)
    gain = float(compress.int4_gain(energy, n_int8, 64))
    rotation = compress.random_rotation(n_int8, n_int4)
    made_again = compress.random_rotation.__wrapped__(n_int8, n_int4)
    assert torch.equal(rotation, made_again)  # the same in every run

    torch.manual_seed(0)
    x = torch.randn(2000, 64) * energy.sqrt() @ rotation
    x[:, n_int8:] *= gain
    x *= torch.logspace(-3, 3, 2000)[:, None]
    x[0] = 0
    x[1, :n_int8] = 0
    x[2, n_int8:] = 0
    int8_dims, scale, int4_dims = kernels.quantize_mixed(x, n_int8)
    back = kernels.dequantize_mixed(int8_dims, scale, int4_dims)
    assert int8_dims.dtype == torch.int8
    assert int4_dims.dtype == torch.uint8
    assert int4_dims.shape == (2000, n_int4 // 2)
    assert not back[0].any()

    # The scale is the least that is enough for the first dims, and good for the others.
    leading = x[:, :n_int8]
    others = x[:, n_int8:]
    for_leading = leading.abs().amax(-1) / 127
    for_others = others.square().mean(-1).sqrt() * 0.3352 / 8
    assert torch.allclose(scale, torch.maximum(for_leading, for_others))

    # Each number.
    step = scale[:, None]
    leading_error = (back - x)[:, :n_int8].abs()
    others_error = (back - x)[:, n_int8:].abs()
    assert (leading_error <= 0.501 * step).all()
    clamped = others.abs() - 59.99 * step
    assert (others_error <= torch.maximum(4.001 * step, clamped)).all()

    # The energy lost, of rows that are not 0.
    def energy_in_steps(part):
        return (part / step)[3:].square().sum().item()

    assert energy_in_steps(leading_error) / energy_in_steps(leading) < 2e-4
    assert 0.0105 < energy_in_steps(others_error) / energy_in_steps(others) < 0.015


# ------------------------------------------------------------------------ codes, settings, refusals


def test_group_scores_rank_weights_that_underflow():
    """As weights, exp(-400) and exp(-500) are both 0 in fp32. Their logarithms differ."""
    logits = torch.tensor([0.0, -500.0, -400.0]).view(1, 1, 1, 3)  # [B, Hkv, G, S]
    live = torch.ones(1, 3, dtype=torch.bool)
    scores = kernels.group_scores(logits, live)
    assert scores[0, 0].argsort().tolist() == [1, 2, 0]
    # By logits the second head would drown the first. By weights it gives each token a third.
    logits = torch.tensor([[0.0, -500.0, -400.0], [100.0, 100.0, 100.0]]).view(1, 1, 2, 3)
    scores = kernels.group_scores(logits, live)
    assert torch.allclose(scores[0, 0].exp(), torch.tensor([1.0, 1 / 3, 1 / 3]))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 160])
def test_a_weighted_sum_of_codes_is_that_of_the_decoded_values(head_dim, bits):
    """mix_codes multiplies codes, and applies each group's minimum and scale afterwards."""
    torch.manual_seed(0)
    values = torch.randn(2, 3, 40, head_dim)
    weights = torch.rand(2, 3, 4, 40)
    group = min(32, head_dim)
    codes, min_and_scale = quantize(values, bits, group)
    decoded = compress.dequantize(codes, min_and_scale, bits, group, torch.float32)
    mixed = compress.mix_codes(weights, codes, min_and_scale, bits)
    assert error(mixed, weights @ decoded) < 1e-5


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.float16, 2e-3)])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 160])
def test_logits_of_int8_codes_are_those_of_the_decoded_keys(head_dim, dtype, bound):
    """Of queries along a key, too, whose sums of products are beyond fp16's largest number."""
    torch.manual_seed(0)
    keys = torch.randn(2, 3, 40, head_dim)
    codes, scale = kernels.quantize_int8(keys)
    q = (30 * torch.sign(keys[:, :, :4])).to(dtype)
    logits = kernels.token_logits(q, codes, scale[..., 0])
    assert error(logits.float(), q.float() @ (codes * scale).mT) < bound


def command_line_options(options: dict) -> str:
    """Settings as the command line takes them: --name VALUE, or --name and --no-name for a bool."""
    words = []
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False:
            words.append(f"--no-{name}")
        else:
            words.append(f"--{name} '{value}'")
    return " ".join(words)


@over("method, options", lambda tests: tests.CASES)
def test_methods_run_from_the_command_line(method, options, cli):
    """Every setting is an option that reaches the report; measured bytes are the formula's."""
    settings = command_line_options(options)
    report = cli.json(
        f"generate --method {method} --prompt 70 --prompt 5 --max_new_tokens 8 {settings}"
    )
    for name, value in options.items():
        assert report["settings"][name] == value
    assert report["bytes_read_per_step"] > 0
    assert report["cache_bytes_measured"] == report["cache_bytes_formula"]


REFUSED_SETTINGS = [  # method, options, what the error says, and changes to the model, if any
    ("topk", {"keep": 0}, r"--keep 0: give a number in \(0, inf\)"),
    ("sals", {"keep": 0.25}, "--keep 0.25 of 80 tokens is fewer than 4 sinks and 64 recent"),
    ("sals", {"variant": "paper", "score": "softmax"}, "leave --score out"),
    ("kivi", {"residual": 48}, "a multiple of 32"),
    ("fdc", {"rate": -0.5}, "--rate -0.5: give 0 to below 1, or -1"),
    ("elitekv", {}, "q/k norms", {"qk_norm": True}),
    ("elitekv", {}, "yarn", {"rope_scaling": YARN}),
    ("kivi", {}, "bit values need a head dim that groups of 32", {"head_dim": 48}),
    # narrower than a tensor core's tile
    ("dense", {"kernel": True}, "--no-kernels", {"head_dim": 8}),
]


@over("case", lambda tests: tests.REFUSED_SETTINGS)
def test_methods_refuse_what_does_not_fit(case):
    method, options, message, *model_changes = case
    model = tiny_model(**dict(*model_changes)).to(DEVICE)
    with pytest.raises(UserError, match=message) as refusal:
        make_engine(model, method, 1, 80, **options)
    assert "\n" not in str(refusal.value)


SMALL_MODELS = [  # head dim, layers, and tokens that a row can hold
    (8, 2, 24),
    (16, 1, 24),
    (8, 2, 3),
]


@pytest.mark.parametrize("head_dim, n_layers, max_seq_length", SMALL_MODELS)
@over("method", lambda tests: tests.METHODS)
def test_every_method_runs_at_its_defaults_on_a_small_model(
    method, head_dim, n_layers, max_seq_length
):
    """A default gives way to a small model or a short cache; only what was asked for is refused."""
    model = tiny_model(head_dim=head_dim, n_layers=n_layers)
    artifact = compress.random_artifact(method, model.config)
    engine = make_engine(model, method, 1, max_seq_length, artifact)
    prompt = random_ids(max_seq_length - 2)
    assert logits_through(engine, [prompt], [[7]]).isfinite().all()
    settings = compress.settings_from(method, {})
    if hasattr(settings, "budget"):
        assert sum(settings.budget(max_seq_length)) <= max_seq_length


@over("method", lambda tests: tests.METHODS)
def test_huge_and_negative_settings_run_or_are_refused_at_once(method):
    """A setting has a limit, or is cut to the cache: it takes neither minutes nor gigabytes."""
    for field in dataclasses.fields(method_named(method).settings):
        if field.type not in (int, float):
            continue
        for value in (1 << 31, 1 << 62, -1):
            started = time.time()
            with contextlib.suppress(UserError):
                engine = make_engine(tiny_model(), method, 1, 60, **{field.name: value})
                assert logits_through(engine, [random_ids(50)], [[7]]).isfinite().all()
                for cache in engine.caches:
                    assert cache.bytes_stored() + cache.bytes_host() < 1 << 20
            assert time.time() - started < 20, (field.name, value)


# ---------------------------------------------------------------------------------- Loki invariants


@pytest.mark.parametrize("kind", ["post", "pre"])
def test_loki_fit_is_a_centred_pca_of_each_head(kind):
    """Of keys after RoPE, or before it, which have a bias: the mean key is taken off first."""
    layer = 2
    head = 1
    model = tiny_model(qkv_bias=True)
    model.layers[layer].attention.wqkv.bias.fill_(3)  # keys that are far from centred
    tokens = tiny_tokens(8, 64)
    tensors, _ = calibrate.fit_loki(model, tokens)

    _, keys, _ = observed(model, tokens)[layer]  # [N, S, Hkv, D] before RoPE
    if kind == "post":
        cos, sin = rope_tables(model.config, 64, CPU)
        keys = apply_rope(keys, cos, sin)
    keys = keys.flatten(0, 1)[:, head].double()
    centred = keys - keys.mean(0)
    basis = tensors[f"{kind}.basis"][layer, head]
    eigenvalues = tensors[f"{kind}.eigenvalues"][layer, head].double()
    assert_best_basis(centred, basis, (1, 4, 12), eigenvalues)


# ---------------------------------------------------------------------------------- SALS invariants


def assert_best_basis(
    x: torch.Tensor, basis: torch.Tensor, ranks, values=None, bound: float = 1e-4
) -> None:
    """Eckart-Young: the columns of `basis` are orthonormal, and for each r of `ranks` no other r
    directions lose less of the rows of x [n, d]. values [d]: the eigenvalues of x^T x / n."""
    x = x.double()
    basis = basis.double()
    assert error(basis.T @ basis, torch.eye(basis.shape[1])) < 1e-5
    spectrum = torch.linalg.svdvals(x).square()
    if values is not None:
        assert error(values, spectrum / len(x)) < 1e-5
    for r in ranks:
        leading = basis[:, :r]
        lost = (x - x @ leading @ leading.T).square().sum()
        least = spectrum[r:].sum()
        assert abs(lost / least - 1) < bound


def pair_energy(x: torch.Tensor) -> torch.Tensor:
    """Squared length of each pair of dims that RoPE rotates: [..., D] -> [..., D / 2]."""
    return x.square().unflatten(-1, (2, -1)).sum(-2)


def queries_that_need_some_pairs_more(model: Llama) -> None:
    """Scales the pairs of each query head unequally, and one to nothing."""
    pairs = [4.0, 1.0, 0.2, 0.1, 0.1, 0.1, 0.1, 0.0]
    of_head = torch.tensor([*pairs, *pairs])  # pair c is the dims c and c + D/2
    of_all_heads = of_head.repeat(model.config.n_heads)
    for layer in model.layers:
        q_rows = layer.attention.wqkv.weight[: len(of_all_heads)]
        q_rows *= of_all_heads[:, None]


@dataclasses.dataclass
class SalsFit:
    """A fit of SALS, and what it has seen."""

    model: Llama
    tensors: dict[str, torch.Tensor]
    queries: list[torch.Tensor]  # of each layer [n, Hq, D], before RoPE
    keys: list[torch.Tensor]  # of each layer [n, Hkv, D], before RoPE


@pytest.fixture(scope="module", params=[1, 2])
def sals_fit(request):
    """At full rank, of query groups of 1 and of 2 heads; in fp64."""
    model = tiny_model(group=request.param)
    queries_that_need_some_pairs_more(model)
    tokens = tiny_tokens(6, 64)
    tensors, _ = fit_sals(model, tokens, 1.0)
    queries = []
    keys = []
    for q, k, _ in observed(model, tokens):
        queries.append(q.double().flatten(0, 1))
        keys.append(k.double().flatten(0, 1))
    return SalsFit(model, tensors, queries, keys)


def pair_weights(fit: SalsFit, i: int) -> torch.Tensor:
    """What an error in each pair of layer i's keys counts: the energy of the group's queries there,
    [Hkv, D / 2], in the unit that the fit's scales have."""
    config = fit.model.config
    of_group = fit.queries[i].unflatten(1, (config.n_kv_heads, -1))  # [n, Hkv, G, D]
    energy = pair_energy(of_group).sum((0, 2))
    scale = fit.tensors["scale"][i].double()
    return energy * (scale.square().sum() / (2 * energy.sum()))


def test_sals_fit_has_the_best_basis_of_keys(sals_fit):
    """The paper's Eq. 1, of keys that are not centred."""
    for i, keys in enumerate(sals_fit.keys):
        basis = sals_fit.tensors[f"{i}.key_basis"]
        eigenvalues = sals_fit.tensors["key_eigenvalues"][i]
        assert_best_basis(keys.flatten(1), basis, (8, 16, 32), eigenvalues)


def test_sals_fit_weighs_keys_by_the_energy_of_their_queries(sals_fit):
    """An error of a key counts as much as the queries are large in its pair (ours)."""
    for i, keys in enumerate(sals_fit.keys):
        scale = sals_fit.tensors["scale"][i].double()
        of_dims = pair_weights(sals_fit, i).repeat(1, 2).flatten()  # both dims of a pair alike
        assert error(scale.square(), of_dims) < 1e-5
        assert error(sals_fit.tensors["mean"][i], keys.mean(0).flatten()) < 1e-5


def test_sals_latents_fit_the_codes_of_both_their_parts(sals_fit):
    """A latent's 8-bit and 4-bit codes share one scale. The first part needs the scale largest /
    127, the second one at which 4-bit levels, 8 steps apart, are 0.3352 deviations apart (the best
    for normal numbers). The maps make the two the same."""
    config = sals_fit.model.config
    settings = compress.SalsSettings()
    r, r_score = settings.ranks(config)
    for i, keys in enumerate(sals_fit.keys):
        maps = compress.sals_layer_maps(config, settings, sals_fit.tensors, i, CPU)
        latents = (keys - keys.mean(0)).flatten(1) @ maps.down.double()
        int8_deviation = latents[:, :r_score].square().mean().sqrt()
        int4_deviation = latents[:, r_score:r].square().mean().sqrt()
        largest = math.sqrt(2 * math.log(2 * r_score))  # of so many normal numbers, in deviations
        int8_scale = int8_deviation * largest / 127
        int4_scale = int4_deviation * 0.3352 / 8
        assert error(int4_scale, int8_scale) < 1e-4


def lost_energy(
    keys: torch.Tensor, down: torch.Tensor, up: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What is lost of keys [n, Hkv, D] in latents: the energy of each pair, times its weight."""
    rebuilt = (keys.flatten(1) @ down @ up.T).view_as(keys)
    return (pair_energy(keys - rebuilt) * weights).sum()


@pytest.mark.parametrize("fraction", [8, 4])
def test_sals_maps_of_ours_keep_the_logits_best(sals_fit, fraction, monkeypatch):
    """Of all maps of rank r they lose the least of the keys, weighted by the queries' energy
    (Eckart-Young), and far less than the paper's basis. Without the maps' codes."""

    def exact_basis(basis: torch.Tensor):
        return basis, torch.ones(len(basis), 16, 1)

    monkeypatch.setattr(compress, "quantize_basis", exact_basis)
    config = sals_fit.model.config
    r = config.kv_dim // fraction
    rank = r / config.kv_dim
    ours = compress.SalsSettings(rank=rank)
    paper = compress.SalsSettings(variant="paper", score="sum", rank=rank)
    for i, keys in enumerate(sals_fit.keys):
        weights = pair_weights(sals_fit, i)
        maps = compress.sals_layer_maps(config, ours, sals_fit.tensors, i, CPU)
        down = maps.down.double()
        up = maps.up.double()
        assert error(down.T @ up, torch.eye(r)) < 1e-5  # latents come back as they were

        lost_by_ours = lost_energy(keys - keys.mean(0), down, up, weights)
        least = len(keys) * sals_fit.tensors["query_eigenvalues"][i, r:].sum()
        assert abs(lost_by_ours / least - 1) < 1e-4

        U_r = compress.paper_basis(config, paper, sals_fit.tensors, i, CPU).double()
        assert lost_by_ours < 0.8 * lost_energy(keys, U_r, U_r, weights)


def sals_cache_of_random_keys(rope_scaling, qkv_bias: bool, block: int = 16, **options):
    """A SALS cache of two rows that hold the latents of 40 random keys each, and these keys
    [2, 40, Hkv, D] as scoring sees them: rebuilt from the r* leading dims, before RoPE."""
    model = tiny_model(rope_scaling=rope_scaling, qkv_bias=qkv_bias)
    cache = row_cache("sals", model, 2, 40, block=block, **CODES | options)
    if rope_scaling is not None:
        assert cache.context.cos[0, 0] > 1.1  # yarn scales keys and queries
    k = torch.randn(2, 40, 4, 16)
    for row in range(2):
        latents = cache.latent(k[row])
        cache.latents.write_prompt(row, 0, latents[:, None])
    up = cache.U_score if options["variant"] == "paper" else cache.up
    stored = cache.latents.read_all()[:, 0, :, : cache.r_score]
    return cache, (stored @ up.T).unflatten(-1, (4, 16))


def queries_in_two_orders() -> list[torch.Tensor]:
    """Random queries [2, Hq, D], and the same with the two heads of each group exchanged."""
    q = torch.randn(2, 8, 16)
    exchanged = q.unflatten(1, (4, 2)).flip(2).flatten(1, 2)
    return [q, exchanged]


def assert_scores_up_to(pos: torch.Tensor, scores: torch.Tensor, truth: torch.Tensor) -> None:
    """scores [B, 1, 1, S] are truth [B, S] of the tokens up to pos [B], and -inf after them."""
    for row, last in enumerate(pos.tolist()):
        n = last + 1
        assert error(scores[row, 0, 0, :n], truth[row, :n]) < 1e-5
        assert scores[row, 0, 0, n:].eq(-torch.inf).all()


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("rope_scaling", [None, YARN])
@pytest.mark.parametrize("variant", ["paper", "ours"])
def test_sals_sum_scores_are_the_sums_of_all_heads_logits_without_rope(
    variant, rope_scaling, qkv_bias
):
    """All keys stand at the query's place; not even yarn's factor counts. The mean key, which our
    latents lack, would add the same to every token."""
    cache, keys = sals_cache_of_random_keys(rope_scaling, qkv_bias, variant=variant, score="sum")
    pos = torch.tensor([36, 24])
    for q in queries_in_two_orders():
        scores = cache.score(pos, q, cache.rope(q, pos))
        of_group = q.unflatten(1, (4, 2))  # [2, Hkv, G, D]
        logits = torch.einsum("bhgd,bjhd->bjhg", of_group, keys) / 4  # 4 is sqrt(D)
        assert_scores_up_to(pos, scores, logits.sum((2, 3)))


def mean_logits_in_places(cache, q, keys, pos, span: int) -> torch.Tensor:
    """Logits [B, S, Hq], times sqrt(D), of keys [B, S, Hkv, D] for queries q [B, Hq, D] at pos,
    both before RoPE: of a token's key the mean over all places of the `span` tokens that it is
    among, as if it stood in each of them."""
    B, S, Hkv, D = keys.shape
    P = -(-S // span) * span  # places: the last tokens may not fill their block
    cos, sin = rope_tables(cache.config, P, CPU)
    in_each_place = keys[:, :, None].expand(B, S, P, Hkv, D)  # the key of token j in place p
    turned = apply_rope(in_each_place, cos, sin)
    turned = turned.repeat_interleave(q.shape[1] // Hkv, dim=3)  # [B, S, P, Hq, D]
    logits = torch.einsum("bhd,bjphd->bjph", cache.rope(q, pos), turned)
    places = torch.arange(P)
    is_near = places // span == places[:S, None] // span  # [j, p]
    share = is_near / is_near.sum(1, keepdim=True)
    return torch.einsum("bjph,jp->bjh", logits, share)


@pytest.mark.parametrize("rope_scaling", [None, YARN])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_sals_softmax_scores_are_of_mean_logits_over_a_block(qkv_bias, rope_scaling):
    """A score is the sum of all heads' attention weights. Their logits are means over the places of
    a key's block of tokens, because a query is turned back once for each block. So it is with the
    mean key; but where keys have biases it is large, and stands in each token's own place."""
    block = 16
    cache, keys = sals_cache_of_random_keys(
        rope_scaling, qkv_bias, block, variant="ours", score="softmax"
    )
    mean_block = 1 if qkv_bias else block
    mean = cache.mean.view(4, 16).expand_as(keys)
    pos = torch.tensor([36, 24])
    is_later = torch.arange(40) > pos[:, None]  # [2, S]
    for q in queries_in_two_orders():
        scores = cache.score(pos, q, cache.rope(q, pos))
        logits = mean_logits_in_places(cache, q, keys, pos, block)
        logits = logits + mean_logits_in_places(cache, q, mean, pos, mean_block)
        logits = logits.masked_fill(is_later[..., None], -torch.inf) / 4  # 4 is sqrt(D)
        weights = logits.softmax(1)  # [2, S, Hq]
        assert_scores_up_to(pos, scores, weights.sum(2))


def best_tokens(scores: list[float], tokens: range, n: int) -> list[int]:
    """The n of these tokens that have the largest scores, or fewer: -inf and NaN are none."""
    candidates = [token for token in tokens if scores[token] > -math.inf]
    candidates.sort(key=lambda token: scores[token], reverse=True)
    return candidates[:n]


@pytest.mark.parametrize("length", [1, 7, 8, 12, 13, 14, 40])
@pytest.mark.parametrize("wanted", [None, (6, 2), (0, 1)])
def test_selection_has_the_sinks_and_the_best_and_no_repeats(length, wanted):
    """Of each row and head, in plain Python. A score of -inf or NaN is never chosen.

    wanted: how many each row may select, of the y for which there is room; None: y."""
    n_sinks = 3
    n_selected = 6
    n_recent = 4
    torch.manual_seed(length)
    scores = torch.randn(2, 3, 40)
    chance = torch.rand(2, 3, 40)
    scores = scores.masked_fill(chance < 0.2, -torch.inf)
    scores = scores.masked_fill(chance > 0.9, torch.nan)
    pos = torch.tensor([length - 1, max(0, length - 2)])
    chosen = kernels.select_reference(
        scores,
        pos,
        x=n_sinks,
        y=n_selected,
        z=n_recent,
        wanted=None if wanted is None else torch.tensor(wanted),
    )
    assert chosen.shape == (2, 3, n_sinks + n_selected)

    for row in range(2):
        n_tokens = int(pos[row]) + 1
        n_old = max(0, n_tokens - n_recent)
        most = n_selected if wanted is None else wanted[row]
        for head in range(3):
            sinks = range(min(n_sinks, n_old))
            best = best_tokens(scores[row, head].tolist(), range(n_sinks, n_old), most)
            expected = [*sinks, *best]
            found = [token for token in chosen[row, head].tolist() if token >= 0]
            assert sorted(found) == sorted(expected)


SCORED = [("paper", "sum"), ("ours", "sum"), ("ours", "softmax")]  # variant and score


@pytest.mark.parametrize("group, biases, scored", pairwise([1, 2, 8], [False, True], SCORED))
def test_folded_projections_equal_unfolded(group, biases, scored):
    """wqkv makes latents, and for the score "sum" queries of latents, but where q and k have norms.
    Values turned in W_V and W_O change no logit of a prompt, which attends exactly."""
    variant, score = scored
    options = SPARSE | {"variant": variant, "score": score}
    shape = {"group": group, "qkv_bias": biases, "out_bias": biases}
    prompt = tuple(random_ids(50))
    more = random_ids(10, 1)
    dense = dense_logits((prompt,), ((0,),), **shape)[0]

    logits = {}
    rows_of_wqkv = {}
    for is_folded in (True, False):
        model = tiny_model(**shape)
        model.config.qk_norm = not is_folded  # the weights have none: this says what is folded
        engine = make_engine(model, "sals", 1, 64, **options)
        logits[is_folded] = logits_through(engine, [prompt], [more])
        rows_of_wqkv[is_folded] = len(model.layers[2].attention.wqkv.weight)
        assert error(logits[is_folded][0], dense) < 1e-5
    # Ours has codes, and one may round otherwise.
    bound = 1e-4 if variant == "paper" else 0.02
    assert error(logits[True], logits[False]) < bound

    kv_dim = 128 // group
    r = kv_dim // 2
    r_score = r // 2
    assert rows_of_wqkv[False] == 128 + 2 * kv_dim
    added = r + r_score if score == "sum" else r
    assert rows_of_wqkv[True] == rows_of_wqkv[False] + added


@pytest.mark.parametrize("variant", ["ours", "paper"])
def test_prefill_holds_one_layers_keys_and_values_at_a_time(variant, monkeypatch):
    """No tensor of a layer's k may live on when the next layer's prefill runs."""
    keys_seen = []
    engine = make_engine(tiny_model(), "sals", 1, 64, **SPARSE | {"variant": variant})
    cache_class = type(engine.caches[1])
    prefill = cache_class.prefill

    def watched_prefill(cache, row, start, q, k, *rest):
        for earlier in keys_seen:
            assert earlier() is None
        keys_seen.append(weakref.ref(k))
        return prefill(cache, row, start, q, k, *rest)

    monkeypatch.setattr(cache_class, "prefill", watched_prefill)
    engine.prefill([random_ids(60)])
    assert len(keys_seen) == 4  # layers


def test_a_rank_is_the_nearest_to_its_share():
    assert compress.rank_of(1, 256) == 256
    assert compress.rank_of(0.25, 256) == 64
    assert compress.rank_of(0.0059, 256) == 2
    assert compress.rank_of(0.001, 256) == 1  # at least


SALS_SIZES = [  # KV heads of 16 dims, and the default r and r*
    (1, (10, 8)),
    (4, (40, 32)),  # five eighths of narrow keys, and at least 32 dims that scores read
    (12, (120, 32)),
    (15, (150, 32)),  # scores read at most an eighth of the keys' 240 dims
    (16, (128, 32)),  # half of 256 dims
    (64, (512, 128)),
    (256, (1024, 256)),  # a quarter of 4096 dims, as in the paper
]


@pytest.mark.parametrize("n_heads, sizes", SALS_SIZES)
def test_sals_sizes_follow_from_the_keys_width(n_heads, sizes):
    """Where keys are narrow, values have 4 bits, else 2, and the layers that attend all have
    latents, too, else KIVI's codes."""
    config = tiny_config(n_heads=n_heads, n_kv_heads=n_heads)
    assert compress.SalsSettings().ranks(config) == sizes
    kivi = compress.kivi_layers(config, compress.SalsSettings(skip="0"))
    is_narrow = config.kv_dim < 256
    assert kivi == (set() if is_narrow else {0})
    assert compress.SalsSettings().value_bits(config) == (4 if is_narrow else 2)
    assert compress.SalsSettings(bits=2).value_bits(config) == 2


# ---------------------------------------------------------------------------------- LRQK invariants


def explicit_lrqk(q, k, a_q, a_k, rounds: int):
    """A_Q and A_K of Algorithm 1 as it is written: on the matrices themselves, of all tokens.

    q, k [n, D]; a_q, a_k [n, r]: the factors to start from."""
    solve = torch.linalg.solve
    for _ in range(rounds):
        # B_Q and B_K, by least squares (lines 3, 4).
        b_q = solve(a_q.mT @ a_q, a_q.mT @ q)
        b_k = solve(a_k.mT @ a_k, a_k.mT @ k)
        # A_K, then A_Q with the new A_K (lines 5, 6).
        a_k = solve(a_q.mT @ a_q + b_k @ b_k.mT, (k @ (q.mT @ a_q + b_k.mT)).mT).mT
        a_q = solve(a_k.mT @ a_k + b_q @ b_q.mT, (q @ (k.mT @ a_k + b_q.mT)).mT).mT
    return a_q, a_k


def test_lrqk_moments_count_every_token():
    x = torch.randn(5000, 2, 3, 4)  # [S, Hkv, G, D]: longer than a part that is summed at once
    gram, total = compress.lrqk_moments(x)
    rows = x.double().transpose(0, 1).flatten(1, 2)  # [Hkv, S * G, D]
    assert error(gram, compress.add_ridge(rows.mT @ rows, 1e-6)) < 1e-12
    assert error(total, rows.abs().sum(1)) < 1e-12


@pytest.mark.parametrize("group", [1, 4])
def test_lrqks_closed_form_is_the_optimum(group, monkeypatch):
    """Invariant 2 (Eckart-Young): no product of rank r loses less of R_Q R_K^T than the tail of its
    singular values. The closed form loses just that, with one W_Q for all heads of a group. Of the
    many pairs that do, its A_Q and A_K have the same Gram matrix, which is diagonal."""
    monkeypatch.setattr(compress, "add_ridge", lambda m, fraction: m)
    r = 6
    generator = torch.Generator().manual_seed(group)
    q, k = torch.randn(2, 2, 300 * group, 16, generator=generator, dtype=torch.float64)
    # Two KV heads [2, n, D], of spectra that fall, in bases of their own.
    mix = orthonormal(16).double() * torch.logspace(1, -1, 16, dtype=torch.float64)
    q = q @ mix
    k = k[:, :300] @ mix.roll(1, 1)
    w_q, w_k = compress.lrqk_optimum(q.mT @ q, k.mT @ k, r)
    a_q = q @ w_q
    a_k = k @ w_k

    logits = q @ k.mT
    lost = (logits - a_q @ a_k.mT).square().sum()
    tail = torch.linalg.svdvals(logits)[:, r:].square().sum()
    assert abs(lost - tail) < 1e-9 * logits.square().sum()

    gram_q = a_q.mT @ a_q
    gram_k = a_k.mT @ a_k
    diagonal = gram_q.diagonal(dim1=1, dim2=2)
    assert error(gram_q, gram_k) < 1e-6
    assert error(torch.diag_embed(diagonal), gram_q) < 1e-6
    assert (diagonal.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("ratio", [1, 1.5, 2])
def test_lrqk_slot_table(ratio):
    """Invariant 7, over 60 steps whose selections drift: hits stay, exactly the selected are
    stamped, slots hold what host memory has of their tokens, and what goes was unused for the
    longest time."""
    B = 2
    Hkv = 3
    S = 80
    k = 8
    C = int(ratio * k)
    rng = np.random.default_rng(0)
    host = torch.randn(B, Hkv, S, 8)  # K and V of every token
    hot = torch.zeros(B, Hkv, C, 8)
    slot_of = torch.full((B, Hkv, S), -1, dtype=torch.int32)
    pos_of = torch.full((B, Hkv, C), -1, dtype=torch.int32)
    stamp = torch.full((B, Hkv, C), -1, dtype=torch.int32)
    residents = {}  # of each row and head: a token in a slot -> the last step that used it
    for head in np.ndindex(B, Hkv):
        residents[head] = {}

    for step in range(60):
        distance = abs(np.arange(S) - step)
        scores = torch.from_numpy(rng.normal(size=(B, Hkv, S)) - distance / 4)
        scores[0, :, 3 + step :] = -torch.inf  # a short row: fewer candidates than k at first
        best, index = scores.topk(k, sorted=False)
        live = best > -torch.inf
        index = index.where(live, S - 1)  # a token without a slot stands for none, as in `fetch`
        now = torch.tensor(step, dtype=torch.int32)
        place, miss = compress.take_slots(index, live, slot_of, pos_of, stamp, now)
        kernels.fetch_rows_reference(host, index, place, miss, hot)

        for head, before in residents.items():
            chosen = set(index[head][live[head]].tolist())
            missed = set(index[head][miss[head]].tolist())
            slots = (pos_of[head] >= 0).nonzero()[:, 0]
            tokens = pos_of[head][slots]

            # The two tables are inverse to each other.
            assert torch.equal(slot_of[head][tokens], slots.int())
            assert (slot_of[head] >= 0).sum() == len(slots)

            # What had a slot is a hit. Hits were not fetched, and are still right: they stayed.
            assert missed == chosen - set(before)
            assert torch.equal(hot[head][slots], host[head][tokens])

            # No more goes than must, the longest unused first. Which of equal ones is left open.
            gone = set(before) - set(tokens.tolist())
            n_gone = max(0, len(set(before) | chosen) - C)
            unused_since = sorted(before[token] for token in set(before) - chosen)
            assert sorted(before[token] for token in gone) == unused_since[:n_gone]

            # The selected have this step's stamp, and the others keep theirs.
            after = dict(before)
            for token in gone:
                del after[token]
            for token in chosen:
                after[token] = step
            stamps = stamp[head][slots].tolist()
            assert dict(zip(tokens.tolist(), stamps, strict=True)) == after
            residents[head] = after


def lrqk_caches_of_slots(variant: str, slots: list[float]) -> list:
    """LRQK caches that differ in how many hot slots they have."""
    options = {"variant": variant, "rank": 6, "k": 10, "recent": 5}
    return [row_cache("lrqk", tiny_model(), 1, 64, slots=n, **options) for n in slots]


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_output_does_not_depend_on_where_rows_lie(variant):
    """Invariant 9: twice as many slots, or none that is kept from step to step."""
    cache, *others = lrqk_caches_of_slots(variant, [1.0, 2.0, 0.0])
    qkv = stream(64)
    for each in (cache, *others):
        reads(each, 40, *qkv)
    for n in range(40, 60):
        expected = step(cache, n, *qkv)
        for other in others:
            assert error(step(other, n, *qkv), expected) < 1e-5


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_misses_fewer_tokens_with_more_slots(variant):
    qkv = stream(64)
    rates = []
    for cache in lrqk_caches_of_slots(variant, [2.0, 1.0, 0.0]):
        reads(cache, 40, *qkv)
        for n in range(40, 60):
            step(cache, n, *qkv)
        rates.append(cache.miss_rate())
    with_many, with_k, with_none = rates
    assert 0 < with_many < with_k < with_none == 1


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqks_miss_rate_begins_anew_with_a_prompt(variant):
    (cache,) = lrqk_caches_of_slots(variant, [1.0])
    qkv = stream(64)
    rates = []
    for n_prompt in (40, 20, 40):
        reads(cache, n_prompt, *qkv)
        for n in range(n_prompt, n_prompt + 20):
            step(cache, n, *qkv)
        rates.append(cache.miss_rate())
    assert rates[2] == rates[0]


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_holds_the_keys_and_values_of_all_tokens_in_host_memory(variant):
    (cache,) = lrqk_caches_of_slots(variant, [1.0])
    numbers = 4 * 64 * 2 * 16  # Hkv, S, K and V, D
    assert cache.bytes_host() == 4 * numbers  # in fp32


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqks_proxies_fit_fp16_where_its_keys_do(variant):
    """Of keys near fp16's largest number, 65504."""
    cache = row_cache("lrqk", tiny_model().half(), 1, 80, rank=8, k=20, recent=8, variant=variant)
    q, k, v = stream(80)
    q[..., 3] += 300
    k[..., 3] += 6e4
    q = q.half()
    k = k.half()
    v = v.half()
    reads(cache, 60, q, k, v)
    for n in range(60, 80):
        assert step(cache, n, q, k, v).isfinite().all()
    largest_key = cache.kv.vectors.abs().max()
    assert largest_key < torch.inf
    assert cache.a_k.abs().max() <= 1.01 * largest_key


def test_lrqk_says_that_weights_are_damaged():
    model = tiny_model()
    model.layers[1].attention.wqkv.weight[130:140] = 3e38  # of the keys
    engine = make_engine(model, "lrqk", 1, 60, rank=6)
    with pytest.raises(UserError, match="^[^\n]*are not finite; the weights are damaged$"):
        engine.prefill([random_ids(40)])


def lrqk_caches_after_a_follow_up(variant: str):
    """Two caches after the same 40 tokens of a prompt and the same 20 more: the first one has read
    these at once, the second one in steps."""
    options = LRQK | {"variant": variant}
    at_once, (q, k, v) = scene("lrqk", 40, 60, **options)
    in_steps, _ = scene("lrqk", 40, 60, **options)
    at_once.prefill(0, 40, q[40:], k[40:], v[40:])
    for n in range(40, 60):
        step(in_steps, n, q, k, v)
    return at_once, in_steps


@pytest.mark.parametrize("variant", compress.VARIANTS)
def test_lrqk_stores_a_follow_up_as_decode_does(variant):
    at_once, in_steps = lrqk_caches_after_a_follow_up(variant)
    assert torch.allclose(at_once.kv.vectors, in_steps.kv.vectors, atol=1e-5)
    for i in range(2):  # the exact keys, the exact values
        assert torch.allclose(at_once.exact[i].vectors, in_steps.exact[i].vectors, atol=1e-5)


def test_lrqk_of_ours_projects_a_follow_up_as_decode_does():
    """By the prompt's projections. The slots of this step have the same tokens, in any order."""
    at_once, in_steps = lrqk_caches_after_a_follow_up("ours")
    assert torch.allclose(at_once.a_k, in_steps.a_k, atol=1e-4)
    selected = []
    for cache in (at_once, in_steps):
        tokens = cache.pos_of.where(cache.stamp == cache.step, -1)
        selected.append(tokens.sort(-1).values)
    assert torch.equal(selected[0], selected[1])


def test_lrqk_of_the_paper_projects_a_follow_up_by_least_squares():
    """Its bases move in each step, so there is no projection of the prompt's. What B_K leaves of a
    new key is orthogonal to it."""
    cache, _ = lrqk_caches_after_a_follow_up("paper")
    new_keys = cache.kv.vectors[..., 40:, :16]
    residual = new_keys - cache.a_k[..., 40:, :] @ cache.basis_k
    along_b_k = residual @ cache.basis_k.mT
    assert along_b_k.abs().max() < 1e-3 * residual.abs().max()


# ------------------------------------------------------------------------------------------ EliteKV


def elite_tables(pairs: torch.Tensor, n: int, c) -> tuple[torch.Tensor, torch.Tensor]:
    """RoPE tables of each KV head [S, Hkv, D/2] that rotate only its pairs [Hkv, r]: of the others
    cos = 1 and sin = 0."""
    cos, sin = rope_tables(c, n, CPU)
    Hkv = len(pairs)
    cos = cos[:, None].expand(-1, Hkv, -1)
    sin = sin[:, None].expand(-1, Hkv, -1)
    is_elite = torch.zeros(Hkv, cos.shape[-1], dtype=torch.bool).scatter(1, pairs, True)
    return torch.where(is_elite, cos, 1.0), torch.where(is_elite, sin, 0.0)


def elite_reference(attention, pairs: torch.Tensor, x: torch.Tensor, c) -> torch.Tensor:
    """RoPElite without factors: the dense attention of one layer, of which only these pairs
    [Hkv, r] of each head are rotated."""
    cos, sin = elite_tables(pairs, x.shape[-2], c)

    def rotate(t):  # [S, heads, D]
        by_kv_head = t.unflatten(-2, (len(pairs), -1))
        return apply_rope(by_kv_head, cos, sin).flatten(-3, -2)

    def attend(q, k, v):
        return model_file.causal_attention(rotate(q), rotate(k), v)

    return attention(x, attend)


@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("qkv_bias", [False, True])
def test_elitekv_at_full_rank_rotates_the_elite_pairs_only(group, qkv_bias, r):
    model = tiny_model(group=group, qkv_bias=qkv_bias)
    c = model.config
    artifact = artifact_of("elitekv", model)
    dense = [layer.attention for layer in model.layers]
    full_rank = min(48, c.n_kv_heads * (32 - 2 * r))  # dim, or the columns of [W_k^n | W_v]
    settings = compress.EliteSettings(r=r, d_ckv=full_rank)
    method_named("elitekv").fold_all(model, settings, artifact)

    x = torch.randn(40, 48)
    cos, sin = rope_tables(c, 57, CPU)
    for i, layer in enumerate(model.layers):
        elite = layer.attention
        output = elite(x, elite.causal(cos[:40], sin[:40]))
        pairs = artifact["elite"][i][:, :r]
        assert error(output, elite_reference(dense[i], pairs, x, c)) < 1e-4
        # RoPE knows distances alone: 17 places further on it is the same.
        assert error(elite(x, elite.causal(cos[17:], sin[17:])), output) < 1e-4


def test_ropelite_takes_the_best_pair_in_each_round():
    """Brute force, from the definition, over the queries at some positions."""
    torch.manual_seed(1)
    q = torch.randn(2, 24, 2, 16)  # [N, S, G, D]
    k = torch.randn(2, 24, 1, 16)
    rows = torch.randperm(24)[:15]
    cos, sin = rope_tables(tiny_config(), 24, CPU)
    deltas = calibrate.rope_deltas(q[:, rows], k[:, :, 0], rows, cos, sin)
    assert deltas.shape == (8, 2, 2, 15, 24)  # [D / 2, N, G, I, S]
    order = calibrate.ropelite(deltas).tolist()
    all_pairs = set(range(8))
    assert sorted(order) == list(range(8))

    def logits(pairs: list[int]) -> torch.Tensor:
        """Causal ones, if these pairs alone turn."""
        tables = elite_tables(torch.tensor([pairs], dtype=torch.long), 24, tiny_config())
        q_turned = apply_rope(q[:, :, None], *tables)
        k_turned = apply_rope(k[:, :, None], *tables)
        return torch.einsum("nihgd,njhod->nhgij", q_turned, k_turned).tril() / 4

    wanted = logits(list(all_pairs))
    assert error(deltas.sum(0), (wanted - logits([]))[:, 0, :, rows]) < 1e-5
    for n in range(7):  # the last pair is the only one that is left
        best = order[:n]
        losses = {}
        for pair in all_pairs - set(best):
            losses[pair] = (logits([*best, pair]) - wanted)[..., rows, :].abs().mean()
        assert min(losses, key=losses.get) == order[n]


def test_elite_orders_are_those_of_each_head_alone():
    """Of one KV head of one layer, by its group's queries: the search does not know the others."""
    layer = 2
    head = 1
    model = tiny_model(group=4)
    tokens = tiny_tokens(3, 40)
    orders = calibrate.elite_orders(model, tokens)
    assert orders["elite"].shape == orders["contribution"].shape == (4, 2, 8)

    q, k, _ = observed(model, tokens)[layer]
    q = q[:, :, 4 * head : 4 * head + 4]
    k = k[:, :, head]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randperm(40, generator=generator)[: calibrate.ELITE_QUERIES]
    cos, sin = rope_tables(model.config, 40, CPU)
    elite = calibrate.ropelite(calibrate.rope_deltas(q[:, rows], k, rows, cos, sin))
    assert torch.equal(orders["elite"][layer, head], elite)

    q_norm = pair_energy(q).sqrt().flatten(0, -2).mean(0)  # of each pair, [D / 2]
    k_norm = pair_energy(k).sqrt().flatten(0, -2).mean(0)
    by_contribution = (q_norm * k_norm).argsort(descending=True)
    assert torch.equal(orders["contribution"][layer, head], by_contribution)


def test_uniform_order_of_pairs():
    """12 of 64 pairs, spread evenly (int(linspace(0, 63, 12)), sec. 4.3.1); then the others."""
    order = compress.uniform_order(64, 12).tolist()
    assert order[:12] == [0, 5, 11, 17, 22, 28, 34, 40, 45, 51, 57, 63]
    assert sorted(order) == list(range(64))


def key_and_value_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """k [48, 4, 10], v [48, 4, 15]: weights of 48 inputs, which share directions."""
    torch.manual_seed(0)
    mix = torch.randn(10, 60)
    k = torch.randn(48, 10) @ mix[:, :40] + torch.randn(48, 40)
    v = torch.randn(48, 10) @ mix + torch.randn(48, 60)
    return k.unflatten(1, (4, 10)), v.unflatten(1, (4, 15))


def squared_singular_values(m: torch.Tensor) -> torch.Tensor:
    """Of weights [dim, ...] as a matrix [dim, n], the largest first."""
    return torch.linalg.svdvals(m.double().flatten(1)).square()


LATENT_SIZES = [1, 7, 20, 40, 48]  # d_ckv, of 48 inputs, 40 numbers of keys and 60 of values


@pytest.mark.parametrize("d_ckv", LATENT_SIZES)
def test_joint_factors_are_optimal_and_beat_separate_ones(d_ckv):
    """Eckart-Young, for [W_k^n | W_v] as one matrix."""
    k, v = key_and_value_weights()
    m = torch.cat((k, v), -1).double().flatten(1)
    a, b = compress.low_rank(k, v, d_ckv, "joint")
    assert b.shape == (d_ckv, 4, 25)
    assert error(a.T @ a, torch.eye(d_ckv)) < 1e-8
    lost = (m - a @ b.flatten(1)).square().sum()
    tail = squared_singular_values(m)[d_ckv:].sum()
    assert abs(lost - tail) < 1e-6 * m.square().sum()

    separate_a, separate_b = compress.low_rank(k, v, d_ckv, "separate")
    lost_apart = (m - separate_a @ separate_b.flatten(1)).square().sum()
    assert lost_apart > lost - 1e-6


@pytest.mark.parametrize("d_ckv", LATENT_SIZES)
def test_separate_factors_are_optimal_and_of_keys_or_values_alone(d_ckv):
    """Of all ways to share out d_ckv dims, n of them to keys and the rest to values, none loses
    less."""
    k, v = key_and_value_weights()
    m = torch.cat((k, v), -1).double().flatten(1)
    a, b = compress.low_rank(k, v, d_ckv, "separate")
    lost = (m - a @ b.flatten(1)).square().sum()

    of_k = squared_singular_values(k)
    of_v = squared_singular_values(v)
    losses = []
    for n in range(max(0, d_ckv - 48), min(40, d_ckv) + 1):
        losses.append(of_k[n:].sum() + of_v[d_ckv - n :].sum())
    assert abs(lost - min(losses)) < 1e-6 * m.square().sum()

    b_k, b_v = b.split((10, 15), -1)
    makes_keys = b_k.flatten(1).abs().sum(1) > 1e-9
    makes_values = b_v.flatten(1).abs().sum(1) > 1e-9
    assert not (makes_keys & makes_values).any()  # [W_k^n | W_v] is block-diagonal in the latent


@pytest.mark.parametrize("d_ckv", LATENT_SIZES)
def test_joint_factors_are_optimal_for_inputs_that_were_seen(d_ckv):
    """For inputs x whose E x x^T is root^2 (ours), nothing loses less of x [W_k^n | W_v]."""
    k, v = key_and_value_weights()
    m = torch.cat((k, v), -1).double().flatten(1)
    root = torch.randn(48, 48, dtype=torch.float64)
    root = root @ root.T + torch.eye(48)
    a, b = compress.low_rank(k, v, d_ckv, "joint", root)
    assert error(a.T @ a, torch.eye(d_ckv)) < 1e-8  # as training wants it
    lost = (root @ (m - a @ b.flatten(1))).square().sum()
    tail = squared_singular_values(root @ m)[d_ckv:].sum()
    assert abs(lost - tail) < 1e-6 * lost.clamp(min=m.square().sum())


def test_elitekv_numbers_of_parameters():
    """App. C: K and V take 2r Hkv d + c d + c Hkv (2D - 2r), with d = dim and c = d_ckv."""
    model = tiny_model(group=2)
    attention = model.layers[0].attention
    before = sum(p.numel() for p in attention.parameters())
    make_engine(model, "elitekv", 3, 50, r=3, d_ckv=20)
    attention = model.layers[0].attention
    after = sum(p.numel() for p in attention.parameters())
    r = 3
    c = 20
    Hkv = 4
    D = 16
    d = 48
    of_dense = 2 * d * Hkv * D
    assert after - before == 2 * r * Hkv * d + c * d + c * Hkv * (2 * D - 2 * r) - of_dense


LLAMA2_SIZES = [  # of Llama-2-7B: a fraction of the cache, and (r, d_ckv) that the paper has for it
    (0.5, (26, 2432)),
    (0.34375, (12, 2048)),
    (0.25, (8, 1536)),
    (0.125, (4, 768)),
]


@pytest.mark.parametrize("fraction, papers", LLAMA2_SIZES)
def test_elitekv_sizes_of_llama_2_are_the_papers(fraction, papers):
    sizes = calibrate.elite_allocations(SHAPES["llama-2-7b"], fraction)
    assert papers in sizes
    for r, d_ckv in sizes:
        assert 2 * r * 32 + d_ckv == fraction * 2 * 32 * 128  # of 32 heads of 128 dims
        assert d_ckv % 128 == 0


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.9])
def test_elitekv_sizes_add_no_parameters(fraction):
    for c in (SHAPES["llama-2-7b"], SHAPES["llama-3.1-8b"], load_config(NANO)):
        for r, d_ckv in calibrate.elite_allocations(c, fraction):
            rotated = 2 * r * c.n_kv_heads
            of_elite_keys = rotated * c.dim
            of_factors = d_ckv * (c.dim + 2 * c.kv_dim - rotated)
            assert of_elite_keys + of_factors <= 2 * c.dim * c.kv_dim


def test_elitekv_sizes_of_nano_are_multiples_of_less():
    """Multiples of 128 would leave it no choice of sizes."""
    sizes = calibrate.elite_allocations(load_config(NANO), 0.25)
    assert (8, 64) in sizes
    assert len(sizes) >= 4


def test_the_fit_of_elitekv_takes_the_size_of_the_lowest_perplexity():
    """Of three or more. That perplexity is of the factors for the inputs of this text. The trials
    leave the model as it was."""
    model = tiny_model()
    tokens = tiny_tokens(4, 40)
    dense = [layer.attention for layer in model.layers]
    tensors, facts = calibrate.fit_elitekv(model, tokens)
    for layer, attention in zip(model.layers, dense, strict=True):
        assert layer.attention is attention

    trials = {name: facts[name] for name in facts if name.startswith("perplexity_")}
    r = int(tensors["r"])
    d_ckv = int(tensors["d_ckv"])
    lowest = min(trials.values())
    assert len(trials) >= 3
    assert trials[f"perplexity_{r}_{d_ckv}"] == lowest

    artifact = tensors | calibrate.input_roots(model, tokens.flatten())
    method_named("elitekv").fold_all(model, compress.EliteSettings(r, d_ckv), artifact)
    assert calibrate.measure_text(model, tokens).perplexity == pytest.approx(lowest, rel=1e-3)


def test_elitekv_with_all_pairs_and_a_full_latent_has_the_dense_perplexity():
    model = tiny_model()
    tokens = tiny_tokens(4, 40)
    logits = model.output(model(tokens[:, :-1]))
    dense = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).exp().item()
    artifact = calibrate.elite_orders(model, tokens)
    method_named("elitekv").fold_all(model, compress.EliteSettings(8, 48), artifact)
    assert calibrate.measure_text(model, tokens).perplexity == pytest.approx(dense, rel=1e-3)


# ----------------------------------------------------------------------------------- FDC invariants


@dataclasses.dataclass
class FdcFit:
    """A fit of FDC, and what it is of."""

    model: Llama
    tokens: torch.Tensor  # [6, 48]
    tensors: dict[str, torch.Tensor]
    facts: dict[str, float]


@pytest.fixture(scope="module")
def fdc_fit():
    """On text that the model itself would write, since a random model predicts no other text."""
    model = tiny_model(head_dim=48, qkv_bias=True)
    engine = make_engine(model, "dense", 6, 48)
    engine.prefill([[first] for first in range(6)])
    written = decode_rows(engine, 47, lambda _: False)
    texts = [[first, *ids] for first, ids in enumerate(written)]
    tokens = torch.tensor(texts)
    tensors, facts = calibrate.fit_fdc(model, tokens, 0.5)
    return FdcFit(model, tokens, tensors, facts)


def test_fdc_bases_come_from_random_tokens_or_from_the_text(fdc_fit):
    """The paper takes random tokens, so the text does not count; the option takes the text."""
    model = fdc_fit.model
    of_text = calibrate.fdc_bases(model, fdc_fit.tokens, model.config.max_positions)
    by_option, _ = calibrate.fit_fdc(model, fdc_fit.tokens, 0.5, bases_from="text")
    for name in ("qk.basis", "qk.values"):
        assert error(by_option[name], of_text[name]) < 1e-6
        assert error(fdc_fit.tensors[name], of_text[name]) > 1e-2


def queries_and_keys_at_random_positions(model: Llama, layer: int, head: int) -> torch.Tensor:
    """After RoPE [n, D] in fp64: of one KV head its keys and its group's queries, of random tokens
    that stand in any of the model's positions."""
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(0, model.config.max_positions, (20, 64), generator=generator)
    tokens = torch.tensor(random_ids(20 * 64)).view(20, 64)
    cos, sin = rope_tables(model.config, model.config.max_positions, CPU)
    cos = cos[places]
    sin = sin[places]
    q, k, _ = observed(model, tokens)[layer]
    q = apply_rope(q, cos, sin).double().unflatten(2, (model.config.n_kv_heads, -1))
    k = apply_rope(k, cos, sin).double()
    return torch.cat((q[:, :, head].flatten(0, 2), k[:, :, head].flatten(0, 1)))


@pytest.mark.parametrize("layer, head", [(0, 1), (3, 2)])
def test_fdc_basis_is_a_rotation_that_keeps_the_most_energy(fdc_fit, layer, head):
    """Of random tokens that the fit has not seen, up to the last position: R belongs to the model,
    not to a text."""
    basis = fdc_fit.tensors["qk.basis"][layer, head].double()
    energy = fdc_fit.tensors["qk.values"][layer, head].double().square()
    assert error(basis.T @ basis, torch.eye(48)) < 1e-5

    x = queries_and_keys_at_random_positions(fdc_fit.model, layer, head)

    def kept(rotation: torch.Tensor, p: int) -> float:
        """The fraction of the energy of x in the leading p columns."""
        return ((x @ rotation[:, :p]).square().sum() / x.square().sum()).item()

    for p in (16, 32):
        fitted = (energy[:p].sum() / energy.sum()).item()
        assert kept(basis, p) == pytest.approx(fitted, rel=0.02)
        for seed in range(5):
            assert kept(basis, p) > kept(orthonormal(48, seed).double(), p)


def test_fdc_basis_of_values_is_the_best_of_the_weights(fdc_fit):
    layer = 1
    head = 1
    attention = fdc_fit.model.layers[layer].attention
    _, _, w_v = attention.wqkv.weight.split(attention.widths)
    of_head = w_v.unflatten(0, (4, 48))[head]  # [D, dim]
    basis = fdc_fit.tensors["v.basis"][layer, head]
    squares = fdc_fit.tensors["v.values"][layer, head].square()
    assert_best_basis(of_head.T, basis, (8, 16, 40), squares / len(of_head.T), 1e-3)


def falling_values() -> torch.Tensor:
    """Singular values [L, Hkv, D] of 2 layers and 3 heads, the largest first."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(2, 3, 80, generator=generator).sort(-1, descending=True).values


def test_fdc_rates_are_where_ranks_change():
    """Each rate is the least one at which some head goes down by 16 columns."""
    values = falling_values()
    rates = calibrate.fdc_rates(values)
    assert rates[0] == 0
    assert len(rates) == 1 + 2 * 3 * 4  # from 80 columns, a head can lose 16 four times

    def total(rate: float) -> int:
        return int(compress.fdc_ranks(values, rate).sum())

    for rate, next_rate in itertools.pairwise(rates):
        assert total(rate) - total(next_rate) == 16
        assert total((rate + next_rate) / 2) == total(rate)


FDC_RATES = [0.0, 0.01, 0.1, 0.3, 0.6, 0.99]


@pytest.mark.parametrize("rate", FDC_RATES)
def test_fdc_ranks_obey_equation_1(rate):
    values = falling_values()
    values[0, 0, 20:] = 0  # a head that is of rank 20
    ranks = compress.fdc_ranks(values, rate)
    for layer in range(2):
        for head in range(3):
            theta = values[layer, head].double()
            # The least number of columns beside which at most `rate` is lost, rounded up to 16.
            m = 1
            while theta[m:].sum() > rate * theta.sum():
                m += 1
            assert ranks[layer, head] == min(80, math.ceil(m / 16) * 16)


@pytest.mark.parametrize("rate", FDC_RATES)
def test_fdc_ranks_fall_with_the_rate(rate):
    values = falling_values()
    assert (compress.fdc_ranks(values, rate) >= compress.fdc_ranks(values, rate + 0.005)).all()


@pytest.mark.parametrize("rate", FDC_RATES)
def test_fdc_without_adaptive_ranks_gives_all_heads_their_mean(rate):
    """To the nearest multiple of 8, which the kernel takes: any other rank would be attended by
    PyTorch, a step of 8B in 329 ms in place of 9."""
    values = falling_values()
    values[0, 0, 20:] = 0
    ranks = compress.fdc_ranks(values, rate)
    equal = compress.fdc_ranks(values, rate, adaptive=False)
    assert equal.shape == ranks.shape
    assert (equal == equal[0, 0]).all()
    assert equal[0, 0] % 8 == 0
    assert abs(ranks.double().mean() - equal[0, 0]) <= 4


@pytest.mark.parametrize("head_dim", [4, 20, 100])
def test_fdc_without_adaptive_ranks_loses_nothing_where_no_head_does(head_dim):
    values = torch.ones(2, 3, head_dim)
    assert (compress.fdc_ranks(values, 0.0, adaptive=False) == head_dim).all()


@pytest.mark.parametrize("head_dim", [48, 64, 128])
def test_fdc_ranks_are_those_that_the_kernel_takes(head_dim):
    """Whatever the rate, adaptive or not: else a step would silently be slow."""
    values = torch.arange(head_dim, 0, -1.0).expand(2, 3, -1)
    for rate in FDC_RATES:
        for adaptive in (True, False):
            ranks = compress.fdc_ranks(values, rate, adaptive)
            assert math.gcd(8, *ranks.flatten().tolist()) == 8


def number_of_weights(model: Llama) -> int:
    """Of its matrices, without biases and norms."""
    return sum(p.numel() for p in model.parameters() if p.ndim == 2)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
def test_fdc_search_measures_what_the_cache_does(fdc_fit, rate):
    """One forward pass with projectors has the perplexity of decoding token by token through the
    cache."""
    model = tiny_model(head_dim=48, qkv_bias=True)
    tokens = fdc_fit.tokens
    _, searched = calibrate.measure_fdc(model, tokens, fdc_fit.tensors, rate)

    engine = make_engine(model, "fdc", *tokens.shape, fdc_fit.tensors, rate=rate)
    first = tokens[:, :1]
    rest = tokens[:, 1:]
    logits = logits_through(engine, first.tolist(), rest.tolist())[:-1]  # [n, B, V]
    loss = F.cross_entropy(logits.flatten(0, 1), rest.T.flatten())
    assert math.exp(loss) == pytest.approx(searched, 1e-4)


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3])
def test_fdc_stores_and_multiplies_each_head_at_its_rank(fdc_fit, rate):
    """In the cache, and in the weights of V and of the output."""
    model = tiny_model(head_dim=48, qkv_bias=True)
    k_ranks = compress.fdc_ranks(fdc_fit.tensors["qk.values"], rate)
    v_ranks = compress.fdc_ranks(fdc_fit.tensors["v.values"], rate)
    before = number_of_weights(model)
    engine = make_engine(model, "fdc", 6, 48, fdc_fit.tensors, rate=rate)

    stored = sum(cache.bytes_stored() for cache in engine.caches)
    numbers_of_a_token = int((k_ranks + v_ranks).sum())
    assert stored == 6 * 48 * numbers_of_a_token * 4  # rows, tokens, fp32

    columns_lost = int((48 - v_ranks).sum())
    dim = 48
    of_w_v = columns_lost * dim
    of_w_o = columns_lost * dim * 2  # for both heads of a group
    assert number_of_weights(model) == before - of_w_v - of_w_o


def test_fdc_search_finds_the_largest_rate_above_the_floor(fdc_fit):
    def accuracy(rate: float) -> float:
        figures = calibrate.measure_fdc(fdc_fit.model, fdc_fit.tokens, fdc_fit.tensors, rate)
        return figures.accuracy

    rates = calibrate.fdc_rates(fdc_fit.tensors["qk.values"], fdc_fit.tensors["v.values"])
    found = rates.index(float(fdc_fit.tensors["rate"]))
    assert found > 0
    dense = accuracy(0.0)
    assert dense > 0.95  # the model wrote the text itself
    floor = 0.5 * dense  # as fdc_fit asks
    assert accuracy(rates[found]) >= floor
    assert accuracy(rates[found + 1]) < floor
    assert fdc_fit.facts["accuracy of dense's"] == pytest.approx(accuracy(rates[found]) / dense)


def test_fdc_search_finds_a_smaller_rate_for_a_higher_floor(fdc_fit):
    rate, kept_accuracy, _ = calibrate.fdc_search(
        fdc_fit.model, fdc_fit.tokens, fdc_fit.tensors, 1.0
    )
    assert rate < float(fdc_fit.tensors["rate"])
    assert kept_accuracy >= 1


# -------------------------------------------------------------------------- sampling and the engine


@pytest.mark.parametrize("vocabulary", [1, 5, 63, 64, 65, 1000, 4096])
def test_greedy_takes_the_first_of_the_largest(vocabulary):
    """As argmax does, though parts of a row are searched side by side: of vocabularies that fill
    them, of logits that are alike, -inf, or NaN, which argmax takes for the largest."""
    logits = randn(7, vocabulary)
    rounded = logits.round()
    least = torch.full((2, vocabulary), -torch.inf)
    broken = logits.masked_fill(logits > 1, NAN)
    for each in (logits, rounded, least, broken):
        assert torch.equal(sample(each, Sampling()), each.argmax(-1))


LOGITS = [0.1, 3.0, 2.0, -1.0, 2.9]  # probabilities .02, .42, .15, .01, .38
DRAWN_IDS = [  # sampling, and all ids that are drawn from LOGITS in the end
    (Sampling(1.0), {0, 1, 2, 3, 4}),
    (Sampling(1.0, top_k=2), {1, 4}),
    (Sampling(1.0, top_k=9), {0, 1, 2, 3, 4}),  # more than there are: all
    (Sampling(1.0, top_p=0.5), {1, 4}),  # the id that crosses top_p is one of them
    (Sampling(1.0, top_p=0.3), {1}),
    (Sampling(1e-300), {1}),  # less than fp32 can hold
    (Sampling(1.0, top_p=1e-300), {1}),
    (Sampling(Fraction(1, 10**9), top_p=Fraction(1, 2)), {1}),
]


@pytest.mark.parametrize("sampling, expected", DRAWN_IDS)
def test_top_k_and_top_p_leave_the_likeliest(sampling, expected):
    torch.manual_seed(0)
    logits = torch.tensor([LOGITS]).repeat(4000, 1)
    assert set(sample(logits, sampling).tolist()) == expected


def test_top_p_leaves_no_more_than_hold_it():
    """Of two equal ids the first one holds just .5."""
    drawn = sample(torch.zeros(99, 2), Sampling(1.0, top_p=0.5))
    assert len(set(drawn.tolist())) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_draw_is_of_the_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.tensor(LOGITS)
    drawn = sample(logits.repeat(4000, 1), Sampling(temperature))
    frequency = torch.bincount(drawn, minlength=5) / 4000
    probability = (logits / temperature).softmax(-1)
    assert (frequency - probability).abs().max() < 0.03


def test_a_capture_warms_up_in_a_cache_of_one_token(monkeypatch):
    """It runs the step four times, and each time in the first place."""
    for name in ("Stream", "current_stream", "CUDAGraph", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    engine = make_engine(tiny_model(), "dense", 2, 1, graphed=True)
    assert engine.pos.tolist() == [0, 0]
    assert engine.tokens.tolist() == [0, 0]


GRAPHED = CASES


@needs_cuda
@over("method, options", lambda tests: tests.GRAPHED)
def test_graph_replay_equals_eager(method, options):
    """One graph over 300 steps of a ragged batch, across the budget's edge at 32 tokens."""
    prompts = [random_ids(n, n) for n in (5, 31, 60)]
    results = []
    for graphed in (False, True):
        model = tiny_model().cuda()
        engine = make_engine(model, method, 3, 400, graphed=graphed, **options)
        engine.prefill(prompts)
        tokens = decode_rows(engine, 300, lambda ids: False)
        results.append((tokens, engine.logits.tolist()))
    eager, replayed = results
    assert replayed == eager


NANO_CASES = [  # method, and settings
    ("sals", {}),
    ("sals", {"score": "sum"}),
    ("sals", {"variant": "paper"}),
    ("dense", {}),
    ("fdc", {}),
    ("loki", {}),
    ("topk", {"keep": 256}),
    ("lrqk", {"k": 256}),
    ("lrqk", {"variant": "paper"}),
]


@contextlib.contextmanager
def no_wait_for_the_device_and_no_compile():
    """Around steps of a captured graph: a wait of the host is an error, and so is a compilation."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    torch.compiler.set_stance("fail_on_recompile")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.compiler.set_stance("default")


@needs_cuda
@over("method, options", lambda tests: tests.NANO_CASES)
def test_nanos_greedy_tokens_with_and_without_kernels_and_graph(method, options):
    """The compiled graph neither compiles again nor waits for the host once it is captured."""
    prompts = [nano_question(2000, "silent harbor"), nano_question(4000, "amber lantern")]
    tokens = []
    for kernel in (False, True):
        for graphed in (False, True):
            engine = fitted_engine(
                NANO,
                method,
                2,
                1600,
                "cuda",
                kernel=kernel,
                compiled=graphed,
                graphed=graphed,
                **options,
            )
            engine.prefill(prompts)
            engine.draw()
            made = []
            if graphed:
                around_steps = no_wait_for_the_device_and_no_compile()
            else:
                around_steps = contextlib.nullcontext()
            with around_steps:
                for _ in range(24):
                    made.append(engine.tokens.clone())
                    engine.step()
            tokens.append(torch.stack(made).tolist())
    for others in tokens[1:]:
        assert others == tokens[0]


CHUNKED = [  # whose attribute says how long a chunk is: of the MLP, and of attention over a past
    (Llama, "MLP_CHUNK"),
    (model_file, "QUERY_CHUNK"),
]


@pytest.mark.parametrize("owner, chunk", CHUNKED)
def test_long_prompts_are_read_in_chunks(owner, chunk, monkeypatch):
    """Up to the capacity's end."""
    ids = random_ids(30)
    whole = make_engine(tiny_model(), "dense", 1, 30)
    whole.prefill([ids])
    monkeypatch.setattr(owner, chunk, 7)
    in_chunks = make_engine(tiny_model(), "dense", 1, 30)
    in_chunks.prefill([ids[:5]])
    in_chunks.append([ids[5:]])
    assert error(in_chunks.logits, whole.logits) < 1e-5
    assert torch.equal(in_chunks.pos, whole.pos)


def test_a_follow_up_of_one_row_changes_nothing_of_the_others():
    engine = make_engine(tiny_model(), "dense", 9, 40)
    engine.prefill([random_ids(9)] * 9)
    before = engine.logits.clone()
    others_read_nothing = [[] for _ in range(8)]
    engine.append([random_ids(11), *others_read_nothing])
    assert engine.logits[1:].equal(before[1:])
    assert not engine.logits[0].equal(before[0])


def test_reading_draws_no_token():
    """That is for decoding: so a row that was read once can be drawn from often."""
    engine = make_engine(tiny_model(), "dense", 9, 40)
    engine.sampling = Sampling(50.0)
    numbers = engine.generator.get_state()
    engine.prefill([random_ids(9)] * 9)
    engine.append([random_ids(11)] * 9)
    assert engine.generator.get_state().equal(numbers)
    assert not engine.tokens.any()


@pytest.mark.parametrize("past", [0, 1, 77])
@pytest.mark.parametrize("n", [1, 32, 70])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("group, dim", [(1, 16), (4, 96), (2, 128)])
def test_causal_attention_over_a_past(group, dim, dtype, bound, n, past, monkeypatch):
    """By masks, and in half precision on CUDA by flash attention."""
    monkeypatch.setattr(model_file, "QUERY_CHUNK", 32)
    q = randn(n, 8, dim, dtype=dtype)
    k = randn(past + n, 8 // group, dim, dtype=dtype)
    v = randn(past + n, 8 // group, dim, seed=1, dtype=dtype)
    live = torch.ones(n, past + n, dtype=torch.bool, device=DEVICE).tril(past)
    expected = F.scaled_dot_product_attention(
        q.float().transpose(0, 1),
        k.float().repeat_interleave(group, 1).transpose(0, 1),
        v.float().repeat_interleave(group, 1).transpose(0, 1),
        attn_mask=live,
    )
    output = model_file.causal_attention(q, k, v)
    assert error(output, expected.transpose(0, 1)) < bound


# ------------------------------------------------------------------------------------------ kernels
# In triton's interpreter on the CPU (fp32 and fp16: tl.dot on bf16 is wrong there), in fp16 and
# bf16 on CUDA.


TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]
NAN = float("nan")


def close(out, truth, dtype):
    """As close as sums in this dtype are."""
    assert error(out, truth) < TOLERANCE[dtype]


def randn(*shape, seed=0, dtype=torch.float32):
    """Normal numbers on the device, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def positions(*pos):
    """Positions of rows, as kernels take them: [B] int32."""
    return torch.tensor(pos, dtype=torch.int32, device=DEVICE)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """What wrappers allocate is NaN (or -7), to show a forgotten element; a strip behind stays as
    it was."""
    strips = []
    empty = torch.empty

    def poisoned(*sizes, dtype, device):
        poison = NAN if dtype.is_floating_point else -7
        count = torch.Size(sizes).numel()
        memory = empty(count + 4096, dtype=dtype, device=device).fill_(poison)
        strips.append(memory[count:])
        return memory[:count].view(sizes)

    def poisoned_like(x):
        return poisoned(*x.shape, dtype=x.dtype, device=x.device)

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", poisoned_like)
    yield
    for strip in strips:
        is_poison = strip.isnan() if strip.dtype.is_floating_point else strip == -7
        assert is_poison.all(), "written past the end"


poisoned = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def without_hopper(monkeypatch):
    """On such a GPU, too, the tests of this file are of kernels.py; extras/hopper.py has its
    own."""
    monkeypatch.setattr(generate, "import_hopper", lambda device: None)
    monkeypatch.setattr(kernels, "faster_attend_latents", None)


# ---- codes of a token, queries of blocks, scores

APPENDED = [  # B, Hkv, D, int8 dims and bytes of 4-bit dims of a latent, S, bits of values
    (2, 2, 64, 20, 10, 50, 2),
    (3, 1, 32, 16, 8, 40, 4),
    (2, 3, 96, 33, 7, 9, 4),
]


def appended(B, Hkv, D, n_int8, n_bytes, S, bits, dtype):
    """Arguments of append: latents and values side by side, as wqkv gives them, and stores full of
    77."""
    r = n_int8 + 2 * n_bytes
    latent, v = randn(B, r + Hkv * D, dtype=dtype).split((r, Hkv * D), 1)
    pos = positions(*[S - 1, 0, S // 2][:B])

    def store(*shape, dtype):
        return torch.full((B, *shape), 77, dtype=dtype, device=DEVICE)

    return (
        latent,
        v.unflatten(1, (Hkv, D)),
        pos,
        store(1, S, n_int8, dtype=torch.int8),
        store(1, S, dtype=torch.float32),
        store(1, S, n_bytes, dtype=torch.uint8),
        store(S, Hkv, D * bits // 8, dtype=torch.uint8),
        store(S, Hkv, dtype=torch.float16),
    )


def check_append(dtype, sizes):
    """Codes and scales of the token at pos; all others stay as they are."""
    given = appended(*sizes, dtype)
    latent, v, pos, *stores = given
    expected = [store.clone() for store in stores]
    of_latent = kernels.quantize_mixed(latent, sizes[3])
    of_values = kernels.quantize_spread(v, sizes[-1])
    row = torch.arange(len(v), device=DEVICE)
    for store, codes in zip(expected[:3], of_latent, strict=True):
        store[row, 0, pos.long()] = codes
    for store, codes in zip(expected[3:], of_values, strict=True):
        store[row, pos.long()] = codes
    kernels.launch_append(*given)
    for got, want in zip(stores, expected, strict=True):  # GPUs may round a half otherwise
        same = torch.isclose(got.float(), want.float(), rtol=1e-3).float().mean()
        assert same >= (1 if DEVICE == "cpu" else 0.995)


@pytest.mark.parametrize("dtype, sizes", pairwise(DTYPES, APPENDED))
@poisoned
def test_kernel_append(dtype, sizes):
    check_append(dtype, sizes)


# B, n, Hkv, G, D, r*
PLACED = [(2, 5, 2, 3, 64, 20), (3, 1, 4, 1, 24, 33), (1, 70, 2, 4, 128, 128)]


def placed_queries(B, n, Hkv, G, D, r, dtype):
    """Arguments of block_queries: q, cos and sin of each block, the basis, the mean key."""
    q = randn(B, Hkv * G, D, dtype=dtype)
    angle = 6 * randn(n, D // 2, seed=1)
    basis = randn(Hkv * D, r, seed=2, dtype=dtype)
    mean = randn(Hkv * D, seed=3)
    return q, angle.cos(), angle.sin(), basis, mean


def check_block_queries(dtype, sizes):
    """In 16 bits, and in codes."""
    given = placed_queries(*sizes, dtype)
    queries, _, offset = kernels.block_queries_reference(*given)
    for coded in (False, True):
        got, scale, got_offset = kernels.launch_block_queries(*given, coded)
        assert got_offset.dtype == torch.float32
        if coded:
            assert got.dtype == torch.int8 and scale.numel() == offset.numel()
            decoded = (got[0] * 254.0 + got[1]) * scale[..., None]
            assert error(decoded, queries) < max(TOLERANCE[dtype], 1e-4)
        else:
            assert got.dtype == dtype and scale.numel() == 0
            close(got, queries, dtype)
        close(got_offset, offset, torch.float32)


@pytest.mark.parametrize("dtype, sizes", pairwise(DTYPES, PLACED))
@poisoned
def test_kernel_block_queries(dtype, sizes):
    check_block_queries(dtype, sizes)


def poison(x, dead):
    """x in its own strides, NaN where dead, a mask of its leading dims."""
    x = x.clone()
    x[dead] = NAN
    return x


def split_queries(x):
    """x [B, n, H, N, r] as launch_scores takes int8 codes, and their scales [B, n, H N]."""
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    high = (x / scale).round()
    codes = torch.stack((high, ((x / scale - high) * 254).round())).to(torch.int8)
    return codes, (scale[..., 0] / 254).flatten(2)


def live_tokens(B, S):
    """pos [B] of rows of unlike length, and which tokens are live [B, S]."""
    pos = positions(*[S - 1, S // 2, 0][:B])
    return pos, torch.arange(S, device=DEVICE) <= pos[:, None]


def scored_vectors(B, S, H, r, int8, live, dtype):
    """Vectors [B, H, S, r] as they are stored, their scale or None, NaN where dead; and what they
    stand for, in fp32."""
    x = randn(B, S, H, r, dtype=dtype)
    if not int8:
        return poison(x, ~live).transpose(1, 2), None, x.float().transpose(1, 2)
    codes, scale = kernels.quantize_int8(x)
    stored_scale = poison(scale[..., 0], ~live).transpose(1, 2)
    return codes.transpose(1, 2), stored_scale, (codes * scale).float().transpose(1, 2)


def check_scores(dtype, rule, int8, B, S, H, N, r, r_score):
    pos, live = live_tokens(B, S)
    vectors, vector_scale, decoded = scored_vectors(B, S, H, r, int8, live, dtype)
    queries = 2 * randn(B, H, N, r_score, seed=1, dtype=dtype)
    queries[..., 0, :] *= N == 1  # a query without a largest number
    logits = queries.float() @ decoded[..., :r_score].mT * 0.3  # [B, H, N, S]
    if rule == "each":
        truth = logits.masked_fill(~live[:, None, None], -torch.inf)
    elif N == 1:  # a single query's logits rank tokens as its weights do
        truth = logits[:, :, 0].masked_fill(~live[:, None], -torch.inf)
    else:
        truth = kernels.group_scores(logits, live)
    out = kernels.launch_scores(queries, vectors, vector_scale, pos, 0.3, rule)
    assert torch.equal(out > -torch.inf, truth > -torch.inf) and not out.isnan().any()
    close(out[out > -torch.inf], truth[truth > -torch.inf], dtype)


def check_block_scores(dtype, int8, B, S, H, N, r, r_score, block, run):
    """run: tokens that share an offset; 0: none is added."""
    pos, live = live_tokens(B, S)
    vectors, vector_scale, decoded = scored_vectors(B, S, H, r, int8, live, dtype)
    n = -(-S // block)
    queries = 2 * randn(B, n, H, N, r_score, seed=1, dtype=dtype)
    queries[..., 0, :] *= N == 1  # a query without a largest number
    of_token = queries[:, torch.arange(S, device=DEVICE) // block].float()  # [B, S, H, N, r*]
    logits = torch.einsum("bshnr,bhsr->bhns", of_token, decoded[..., :r_score])
    offset = None
    if run:
        offset = randn(B, -(-S // run), H * N, seed=2)
        # logits that rise and rise
        offset += torch.linspace(0, 100, offset.shape[1], device=DEVICE)[:, None]
        of_token = offset[:, torch.arange(S, device=DEVICE) // run]  # [B, S, H N]
        logits = logits + of_token.unflatten(2, (H, N)).permute(0, 2, 3, 1)
    weights = (logits * 0.3).masked_fill(~live[:, None, None], -torch.inf).softmax(-1)
    truth = weights.sum(2).masked_fill(~live[:, None], -torch.inf)
    if dtype == torch.float32:
        reference = kernels.block_scores_reference(
            queries, vectors, vector_scale, pos, 0.3, block, offset, run or 1
        )
        close(reference[truth > -torch.inf], truth[truth > -torch.inf], dtype)
    given = [(queries, None)]
    if int8 and kernels.takes_codes(queries, r_score):
        given.append(split_queries(queries))
    for queries, query_scale in given:
        out = kernels.launch_block_scores(
            queries, vectors, vector_scale, pos, 0.3, block, offset, run or 1, query_scale
        )
        assert torch.equal(out > -torch.inf, truth > -torch.inf) and not out.isnan().any()
        if DEVICE == "cuda":  # weights are kept in e5m2: two bits of fraction
            torch.testing.assert_close(out, truth, rtol=1 / 8 + TOLERANCE[dtype], atol=1e-6)
        else:
            close(out[out > -torch.inf], truth[truth > -torch.inf], dtype)


RULES = ["each", "largest"]
SCORES_SIZES = [  # B, S, H, N, r, r_score, tiles: so many programs, 0: as it is
    (1, 70, 1, 4, 32, 16, 0),
    (3, 130, 2, 1, 48, 20, 0),
    (2, 90, 3, 6, 64, 64, 0),
    (2, 200, 1, 3, 40, 33, 0),
    (3, 97, 1, 32, 530, 520, 0),
    (1, 129, 1, 8, 9, 5, 0),
    (2, 220, 1, 4, 40, 32, 6),
]
BLOCK_SCORES_SIZES = [  # B, S, H, N, r, r_score, block, run, tiles
    (3, 130, 2, 1, 48, 20, 48, 0, 0),
    (2, 200, 1, 3, 40, 33, 48, 0, 0),
    (3, 97, 1, 32, 530, 520, 512, 0, 0),
    (1, 129, 1, 8, 9, 5, 48, 0, 0),
    (2, 130, 2, 3, 40, 32, 48, 1, 0),
    (2, 130, 2, 3, 40, 32, 48, 16, 0),
    (2, 220, 1, 4, 40, 32, 48, 0, 6),
    (2, 220, 1, 4, 40, 32, 48, 0, 24),  # a block for each
]


def use_small_tiles(monkeypatch, programs):
    """Makes kernels that score take tiles of 16 tokens, and so many programs."""
    config = kernels.ScoresConfig(tokens=16, ranks=32, warps=4, stages=2, programs=programs)
    monkeypatch.setattr(kernels, "scores_config", lambda *_: config)


@pytest.mark.parametrize(
    "dtype, rule, int8, sizes", pairwise(DTYPES, RULES, [False, True], SCORES_SIZES)
)
@poisoned
def test_kernel_scores(dtype, rule, int8, sizes, monkeypatch):
    """Both rules, over vectors of 16 bits, fp32 and int8, of one tile a program and of several."""
    *sizes, programs = sizes
    if programs:
        use_small_tiles(monkeypatch, programs)
    check_scores(dtype, rule, int8, *sizes)


@pytest.mark.parametrize("dtype, int8, sizes", pairwise(DTYPES, [False, True], BLOCK_SCORES_SIZES))
@poisoned
def test_kernel_block_scores(dtype, int8, sizes, monkeypatch):
    """A query for each block, over vectors of 16 bits, fp32 and int8, with an offset for runs of
    tokens and without, of one tile a program and of several."""
    *sizes, programs = sizes
    if programs:
        use_small_tiles(monkeypatch, programs)
    check_block_scores(dtype, int8, *sizes)


@pytest.mark.skipif(DEVICE == "cpu", reason="4 GB of rows")
def test_kernel_scores_beyond_two_to_the_31_numbers():
    B, S, r = 2, 1 << 20, 2048
    rows = torch.zeros(B, 1, S, r, dtype=torch.int8, device=DEVICE)
    rows[1, :, -4096:] = 1
    scale, queries = torch.ones(B, 1, S, device=DEVICE), torch.ones(B, 1, 1, 64, device=DEVICE)
    out = kernels.launch_scores(queries, rows, scale, positions(S - 1, S - 1), 1.0, "each")
    assert out.sum((1, 2, 3)).tolist() == [0, 4096 * 64]


# ---- select


MOST = torch.finfo(torch.float32).max
LEVELS = torch.tensor([torch.inf, MOST, 1e-45, 0.0, -0.0, -1e-45, -MOST, -torch.inf], device=DEVICE)


def in_chunk(x):
    """The places of a chunk, or two, of the first kernel."""
    return torch.arange(x.shape[1], device=DEVICE) // 4 % 8 == 0


SCORES = {  # of normal numbers [B, S]
    "normal": lambda x: x,
    "ties": lambda x: (x * 2).round(),
    "equal": torch.ones_like,
    "heavy": lambda x: (x * 8).exp(),
    "offset": lambda x: x + 500,
    # more than can be spared
    "masked": lambda x: x.masked_fill(randn(*x.shape, seed=1) < 0.5, -torch.inf),
    "NaN": lambda x: x.masked_fill(x > 2, torch.nan).masked_fill(x < -2, torch.nan).copysign(x),
    "extremes": lambda x: LEVELS[(x.abs() * 2.5).long().clamp(max=7)],
    "one chunk": lambda x: x + 50 * in_chunk(x),  # has all winners: the slow path must save it
    # The same, and what that chunk drops is next above the threshold.
    "near ties": lambda x: 1 + torch.where(in_chunk(x), 3 + (x > 2), 1 + (x > 1.3)) * 2.0**-23,
    "huge": lambda x: torch.where(x > 0, 3e38, -3e38),
}
SHORT_ROWS = [  # S, x, y, z, pos: in one program
    (257, 4, 33, 8, (256, 100, 17)),
    (300, 0, 1, 1, (299, 1, 0)),
    (4096, 16, 432, 64, (4095, 300)),
    (40, 3, 64, 5, (39, 20, 6)),
]
CHUNKED = (5000, 4, 600, 16, (4999, 700))  # in several
SELECTED = [
    *((kind, *row) for kind in SCORES for row in (*SHORT_ROWS, CHUNKED)),
    *((kind, 5000, 4, 4000, 16, (4999,)) for kind in ("normal", "extremes", "near ties")),
    *((kind, 8193, 4, 256, 16, (8192, 7)) for kind in ("ties", "one chunk", "near ties")),
    *((kind, 10000, 4, 2000, 8, (9999,)) for kind in ("equal", "masked", "offset")),
    ("normal", 65536, 4, 16384, 64, (65535,)),  # the widest tile of survivors that a program takes
]
WANTED = [(257, 4, 33, 8, (256, 128, 51)), (5000, 4, 600, 16, (4999, 2500, 1000))]  # not all of y
WANTED += [(10000, 4, 2000, 8, (9999, 5000, 2000))]
# shares of y
SELECTED += [(kind, *row, (0.3, 0.0, 1.5)) for kind in ("ties", "masked") for row in WANTED]


@pytest.mark.parametrize("case", SELECTED)
@poisoned
def test_kernel_select(case):
    check_select(*case)


def test_kernel_select_chunks_keep_enough_of_every_row():
    lengths = (4096, 4097, 8192, 8193, 30000, 131072, 1 << 20)
    for S, y in itertools.product(lengths, (1, 16, 432, 1968, 4096, 16384, 32768)):
        plan = kernels.select_chunks(S, min(y, S))
        if plan is None:
            assert S <= 4096 or y > min(S // 16, 16384)
            continue
        chunks, tokens, least, most = plan
        assert chunks * tokens >= S
        assert chunks * least >= min(y, S)
        assert least <= most < tokens
        assert max(tokens, chunks * most) <= 32768
        for n in (chunks, tokens, most):
            assert n & (n - 1) == 0, "no power of two"


def test_tiles_a_program_fill_its_last_wave():
    """Of (tiles, rows, programs at a time): one each where all run at once, else the shortest
    waves."""
    known = {(10, 1, 100): 1, (64, 4, 16): 16, (65, 4, 16): 17, (39, 8, 264): 2, (9, 3, 2): 5}
    assert {sizes: kernels.tiles_a_program(*sizes) for sizes in known} == known


@pytest.mark.parametrize(
    "S, y, to_topk", [(8193, 4, False), (8193, 8000, True), (8192, 8000, False)]
)
@pytest.mark.parametrize("wanted", [None, 3])
def test_kernel_select_leaves_long_rows_to_topk(S, y, to_topk, wanted, monkeypatch):
    """In several passes over the row the kernel would take longer."""
    calls = []
    launch = kernels.launch_select

    def counted(*given):
        calls.append(given)
        return launch(*given)

    monkeypatch.setattr(kernels, "launch_select", counted)
    scores = randn(1, S)
    pos = positions(S - 1)
    if wanted is not None:
        wanted = positions(wanted)
    index = kernels.select(scores, pos, (4, y, 16), wanted, kernel=True)
    assert bool(calls) == (not to_topk)
    truth = kernels.select_reference(scores, pos, 4, y, 16, wanted)
    assert set(index[0].tolist()) == set(truth[0].tolist())


@pytest.mark.skipif(DEVICE != "cpu", reason="the interpreter counts the steps")
@pytest.mark.parametrize("kind, most", [("normal", 24), ("offset", 16), ("ties", 32), ("huge", 32)])
@pytest.mark.parametrize("sign", [1, -1])
def test_kernel_select_guesses_inside_its_bracket_and_soon_ends(kind, most, sign, monkeypatch):
    """The search narrows a bracket lo, hi: guesses lie inside it, and are soon enough."""
    S = 1000
    steps = []
    guesses = kernels._guesses

    def counted(lo, hi, *counts):
        left, right = guesses(lo, hi, *counts)
        assert (lo < left) & (left <= right) & (right < hi)
        steps.append(None)
        return left, right

    monkeypatch.setattr(kernels, "_guesses", counted)
    scores = SCORES[kind](randn(1, S)) * sign
    for y in (1, 100, 499, 501, 999, S):  # the last takes all
        steps.clear()
        kernels.launch_select(scores, positions(S - 1), 0, y, 0)
        assert len(steps) <= most * (y < S)


def check_select(kind, S, x, y, z, pos, shares=None):
    pos = positions(*pos)
    scores = SCORES[kind](randn(len(pos), S))
    scores[torch.arange(S, device=DEVICE) > pos[:, None]] = NAN
    wanted = None
    if shares is not None:
        wanted = positions(*[int(share * y) for share in shares])
    out = kernels.launch_select(scores, pos, x, y, z, wanted)
    truth = kernels.select_reference(scores, pos, x, y, z, wanted)
    for b in range(len(pos)):
        got = out[b][out[b] >= 0].long()
        want = truth[b][truth[b] >= 0].long()
        assert (out[b] >= -1).all()
        assert len(got) == len(got.unique()) == len(want)
        assert (got <= pos[b] - z).all()
        assert torch.equal(out[b, :x], truth[b, :x])  # the sinks
        # Of equal scores any may be chosen, so the scores are compared. A sink's may be NaN.
        got_scores = scores[b, got].sort().values
        want_scores = scores[b, want].sort().values
        assert torch.allclose(got_scores, want_scores, rtol=0, atol=0, equal_nan=True)
    if DEVICE == "cuda":  # the interpreter has no order of programs
        assert torch.equal(out, kernels.launch_select(scores, pos, x, y, z, wanted))


# ---- attend

JOINT_LATENTS = ["joint latents", "joint mixed latents"]
LATENT_FORMS = ["latents", *JOINT_LATENTS]
FORMATS = ["plain", *LATENT_FORMS, "channels"]


def stored_keys(form, dtype, read, D, r=24, bits=4):
    """Random stores of a format of keys, NaN where a KV head does not read a token (read
    [B, Hkv, S]); and the keys [B, Hkv, S, D] that they hold, in fp32.

    plain     k
    latents   latent, its scale, its 4-bit dims, basis, its scale, bias, rope;
              "joint": of all heads; "mixed": in codes, else in 16 bits
    channels  codes, (minimum, scale)"""
    B, Hkv, S = read.shape
    k = randn(B, S, Hkv, D, seed=1, dtype=dtype).transpose(1, 2)
    if form == "plain":
        return [poison(k, ~read)], k.float()

    if form == "channels":
        padding = -S % 32
        codes, pairs = quantize(F.pad(k.contiguous(), (0, 0, 0, padding)), bits, 32, -2)
        truth = compress.dequantize(codes, pairs, bits, 32, dtype, -2)[:, :, :S].float()
        is_read = F.pad(read, (0, padding)).unflatten(2, (-1, 32)).any(3)
        return [codes, poison(pairs, ~is_read)], truth

    is_joint = "joint" in form
    cos, sin = rope_tables(tiny_config(head_dim=D), S, torch.device(DEVICE))
    latent = randn(B, 1 if is_joint else Hkv, S, r, dtype=dtype)
    basis = r**-0.5 * randn(Hkv * D, r, seed=2, dtype=dtype)
    bias = randn(Hkv * D, 1, seed=3)
    dead = ~read.any(1, keepdim=True) if is_joint else ~read  # those of all heads, as SALS has them
    if "mixed" in form:
        codes, scale, int4_dims = kernels.quantize_mixed(latent, n_int8_of(r))
        decoded = kernels.dequantize_mixed(codes, scale, int4_dims)
        basis_codes, basis_scale = compress.quantize_basis(basis.unflatten(0, (Hkv, -1)))
        decoded_basis = basis_codes * basis_scale
        flat_scale = basis_scale.flatten(0, 1)
        stores = [codes, poison(scale, dead), int4_dims]
        for_heads = [basis_codes.flatten(0, 1), flat_scale, bias / flat_scale]
    else:
        decoded = latent
        decoded_basis = basis.unflatten(0, (Hkv, D))
        stores = [poison(latent, dead), None, None]
        for_heads = [basis, None, bias]
    stores = [x if x is None else x.expand(B, Hkv, *x.shape[2:]) for x in stores]
    for_heads = [x if x is None else kernels.interleave_rope(x, Hkv) for x in for_heads]
    k = (decoded.float() @ decoded_basis.float().mT) + bias.view(Hkv, 1, D)
    truth = apply_rope(k.transpose(1, 2), cos, sin).transpose(1, 2)
    return [*stores, *for_heads, kernels.rope_pairs(cos, sin, dtype)], truth


def n_int8_of(r):
    """How many dims of a mixed latent are in int8; of large r parts that extras/hopper.py takes."""
    if r % 512 == 0:
        return r // 4
    pairs_of_chunks = (r // 128 - 1) // 2  # of two times 128 dims in 4 bits
    if pairs_of_chunks > 0:
        return r - 256 * pairs_of_chunks
    return r // 3 + (r - r // 3) % 2


def stored_values(form, dtype, read, DV, bits):
    """The same of values: plain ones, codes in groups, or with one scale a vector beside latents in
    codes. They lie by token, beside channels by head."""
    B, Hkv, S = read.shape
    v = randn(B, S, Hkv, DV, seed=6, dtype=dtype)
    if form == "channels":
        v = v.transpose(1, 2).contiguous()
    if bits == 16:
        parts, truth = [v], v.float()
    elif "mixed" in form:
        codes, scale, truth = spread(v, bits)
        parts = [codes, scale]
    else:
        group = min(32, DV)
        parts = [*quantize(v, bits, group)]
        truth = compress.dequantize(*parts, bits, group, dtype).float()
    if form != "channels":
        parts = [x.transpose(1, 2) for x in parts]
        truth = truth.transpose(1, 2)
    return [*parts[:-1], poison(parts[-1], ~read)], truth


def chosen_tokens(sets, n, B, S, pos):
    """For each set n places, some of none (-1), of distinct tokens up to pos; which tokens
    [B, sets, S]."""
    later = torch.arange(S, device=DEVICE) > pos.view(-1, *[1] * len(sets), 1)
    best, index = randn(B, *sets, S, seed=5).masked_fill(later, -torch.inf).topk(min(n, S))
    index = index.where(best > -torch.inf, -1).int()
    index[..., 2::7] = -1
    if not sets:
        index = F.pad(index, (3, 0))[:, 3:]  # rows that lie apart
    member = torch.zeros(B, *sets, S + 1, dtype=torch.bool, device=DEVICE)
    return index, member.scatter(-1, index.long().where(index >= 0, S), True)[..., :S]


def attend_case(
    dtype, form, tokens, B, S, Hkv, G, D, DV, bits, z, pos, n=40, r=24, rise=None, written=False
):
    """Arguments of `launch_attend`, with NaN in every slot that it must not read, or if `written`
    only where there is no token; and what it gives, in fp32.

    tokens: "all", or who has a set of its own in the index: "row", "KV head" or "query head". z:
    exact slots. rise: from the first to the last of them keys are their query times factors from
    rise[0] to rise[1]."""
    pos = positions(*pos)
    Hq = Hkv * G
    places = torch.arange(S, device=DEVICE)
    # 1. Which tokens are attended, live [B, Hq, S], and so read by a KV head.
    index = None
    if tokens == "all":
        live = (places <= pos[:, None] - z)[:, None].expand(-1, Hq, -1)
    else:
        sets = {"row": (), "KV head": (Hkv,), "query head": (Hq,)}[tokens]
        index, member = chosen_tokens(sets, n, B, S, pos)
        queries_of_set = Hq // max(1, *sets, 1)
        live = member.reshape(B, -1, S).repeat_interleave(queries_of_set, 1)
    read = live.unflatten(1, (Hkv, G)).any(2)
    if written:
        read = (places <= pos[:, None])[:, None].expand(-1, Hkv, -1)
    # 2. What is stored.
    q = randn(B, Hq, D, dtype=dtype)
    keys, k = stored_keys(form, dtype, read, D, r, 2 if bits == 2 else 4)
    values, v = stored_values(form, dtype, read, DV, bits)
    exact = []
    if z:
        exact_k = randn(B, z, Hkv, D, seed=7, dtype=dtype)
        exact_v = randn(B, z, Hkv, DV, seed=7, dtype=dtype)
        if rise:
            factors = torch.linspace(*rise, z, device=DEVICE)[:, None, None]
            exact_k = (q[:, None, ::G].float() * factors).to(dtype)
        is_filled = torch.arange(z, device=DEVICE) <= pos[:, None]
        k = torch.cat((k, exact_k.transpose(1, 2).float()), 2)
        v = torch.cat((v, exact_v.transpose(1, 2).float()), 2)
        live = torch.cat((live, is_filled[:, None].expand(-1, Hq, -1)), 2)
        exact = [poison(exact_k, ~is_filled), poison(exact_v, ~is_filled)]
    # 3. What attention gives.
    k = k.repeat_interleave(G, 1)
    v = v.repeat_interleave(G, 1)
    logits = torch.einsum("bhd,bhnd->bhn", q.float(), k) * D**-0.5
    weights = logits.masked_fill(~live, -torch.inf).softmax(-1)
    truth = torch.einsum("bhn,bhnd->bhd", weights, v)
    kind = form.split()[-1]
    return (q, kind, keys, values, bits, pos, index, exact, D**-0.5), truth


def launch_attend(q, kind, keys, values, bits, pos, index, exact, scale):
    """The operation for a kind of keys, on what attend_case makes."""
    v, v_scale = [*values, None][:2]
    if kind == "plain":
        return kernels.launch_attend_plain(q, keys[0], v, pos, index, exact, scale)
    if kind == "channels":
        assert index is None
        return kernels.launch_attend_channels(q, *keys, v, v_scale, bits, pos, exact, scale)
    return kernels.launch_attend_latents(q, *keys, v, v_scale, bits, pos, index, exact, scale)


def check_attend(dtype, *case, **options):
    given, truth = attend_case(dtype, *case, **options)
    close(launch_attend(*given), truth, dtype)


ATTEND_SIZES = [  # B, S, Hkv, G, D, DV, bits, z, pos
    (1, 70, 2, 1, 64, 40, 16, 0, (69,)),
    (3, 130, 2, 4, 128, 128, 4, 24, (129, 64, 3)),
    (2, 300, 1, 3, 96, 96, 2, 0, (299, 32)),
    (1, 90, 1, 8, 256, 64, 4, 7, (80,)),
    (3, 150, 2, 1, 128, 128, 2, 70, (149, 60, 0)),
    (2, 90, 1, 20, 16, 16, 4, 0, (89, 31)),
    (2, 90, 3, 2, 96, 96, 2, 5, (89, 0)),
    (2, 90, 2, 2, 64, 64, 16, 24, (80, 40)),
]
PLAIN_SIZES = [(*sizes[:6], 16, *sizes[7:]) for sizes in ATTEND_SIZES]
CODED_SIZES = [sizes for sizes in ATTEND_SIZES if sizes[6] < 16]
INDEXES = ["all", "row", "KV head", "query head"]


@pytest.mark.parametrize("dtype, tokens, sizes", pairwise(DTYPES, INDEXES, PLAIN_SIZES))
@poisoned
def test_kernel_attend_plain(dtype, tokens, sizes):
    """Every kind of index, with exact tokens and without."""
    check_attend(dtype, "plain", tokens, *sizes)


@pytest.mark.parametrize(
    "dtype, form, tokens, sizes", pairwise(DTYPES, LATENT_FORMS, INDEXES, ATTEND_SIZES)
)
@poisoned
def test_kernel_attend_latents(dtype, form, tokens, sizes):
    """Latents in codes and in 16 bits, of all heads and of each, values of every form, every kind
    of index, with exact tokens and without."""
    check_attend(dtype, form, tokens, *sizes)


@pytest.mark.parametrize("dtype, sizes", pairwise(DTYPES, CODED_SIZES))
@poisoned
def test_kernel_attend_channels(dtype, sizes):
    """Keys and values of 2 and of 4 bits, with exact tokens and without."""
    check_attend(dtype, "channels", "all", *sizes)


def test_kernel_attend_latents_does_as_its_reference():
    """Latents of all heads, a basis and a bias, without codes."""
    B, S, Hkv, G, D, r = 2, 70, 2, 3, 32, 24
    dtype = DTYPES[0]
    q = randn(B, Hkv * G, D, dtype=dtype)
    latent = randn(B, 1, S, r, seed=1, dtype=dtype)
    basis = r**-0.5 * randn(Hkv, D, r, seed=2, dtype=dtype)
    bias = randn(Hkv, D, seed=3)
    v = randn(B, Hkv, S, D, seed=4, dtype=dtype)
    cos, sin = rope_tables(tiny_config(head_dim=D), S, torch.device(DEVICE))
    pos = positions(69, 20)
    live = torch.arange(S, device=DEVICE) <= pos[:, None]
    truth = kernels.attend_latents_reference(
        q.float(), latent.float(), basis.float(), bias, v.float(), cos, sin, live, D**-0.5
    )
    out = kernels.launch_attend_latents(
        q,
        latent.expand(B, Hkv, S, r),
        None,
        None,
        kernels.interleave_rope(basis.flatten(0, 1), Hkv),
        None,
        kernels.interleave_rope(bias.flatten()[:, None], Hkv),
        kernels.rope_pairs(cos, sin, dtype),
        v,
        None,
        16,
        pos,
        None,
        [],
        D**-0.5,
    )
    close(out, truth, dtype)


@pytest.mark.parametrize("bits", [2, 4])
def test_kernel_attend_channels_does_as_its_reference(bits):
    """Whole groups of 32 tokens, and no exact ones."""
    B, S, Hkv, G, D = 2, 96, 2, 3, 32
    dtype = DTYPES[0]
    q = randn(B, Hkv * G, D, dtype=dtype)
    k_codes, k_scale = quantize(randn(B, Hkv, S, D, seed=1, dtype=dtype), bits, 32, -2)
    v_codes, v_scale = quantize(randn(B, Hkv, S, D, seed=2, dtype=dtype), bits, 32)
    v = compress.dequantize(v_codes, v_scale, bits, 32, torch.float32)
    pos = positions(95, 40)
    live = torch.arange(S, device=DEVICE) <= pos[:, None]
    truth = kernels.attend_channels_reference(q.float(), k_codes, k_scale, v, live, D**-0.5)
    out = kernels.launch_attend_channels(
        q, k_codes, k_scale, v_codes, v_scale, bits, pos, [], D**-0.5
    )
    close(out, truth, dtype)


PAIRED_SIZES = [  # B, S, Hkv, G, z, pos: rows without a coded token, and that end in and at a tile
    (3, 130, 2, 4, 24, (129, 64, 3)),
    (3, 96, 1, 8, 0, (95, 32, 0)),
    (2, 200, 2, 1, 40, (199, 39)),
    (2, 70, 1, 12, 6, (69, 37)),
]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("sizes", PAIRED_SIZES)
@poisoned
def test_kernel_attend_channels_decodes_pairs_of_codes(monkeypatch, sizes, splits, bits):
    """Codes of 128 channels as halves, of which the interpreter has those of fp16 only."""
    monkeypatch.setattr(kernels, "decodes_pairs", lambda *_: True)
    monkeypatch.setattr(kernels, "_attend_channels_kernel", None)
    monkeypatch.setattr(kernels, "attend_splits", lambda *_: splits)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    B, S, Hkv, G, z, pos = sizes
    given, truth = attend_case(dtype, "channels", "all", B, S, Hkv, G, 128, 128, bits, z, pos)
    close(launch_attend(*given), truth, torch.bfloat16)


@pytest.mark.parametrize(
    "dtype, D, DV, bits, expected",
    [
        (torch.bfloat16, 128, 128, 4, True),
        (torch.float16, 128, 128, 4, False),
        (torch.bfloat16, 64, 64, 4, False),
        (torch.bfloat16, 128, 64, 4, False),
        (torch.bfloat16, 128, 128, 2, True),
    ],
)
def test_kernel_attend_channels_decodes_pairs_where_it_can(dtype, D, DV, bits, expected):
    q = torch.zeros(1, 2, D, dtype=dtype)
    v_scale = torch.zeros(1, 1, 32, DV // 32, 2)
    assert kernels.decodes_pairs(q, bits, DV, bits, v_scale) == expected
    assert not kernels.decodes_pairs(q, bits, DV, bits, v_scale[..., 0, 0])  # a scale a vector


# KV heads, D, tokens a tile, ranks a product, splits.
TILES = [(2, 96, 16, 64, 1), (2, 128, 64, 32, 3), (1, 64, 32, 16, 5), (1, 160, 16, 64, 20)]
TILED = [*pairwise(FORMATS, ["all", "query head"], TILES), ("plain", "all", (1, 64, 32, 16, 70))]


@pytest.mark.parametrize("form, tokens, sizes", TILED)
@poisoned
def test_kernel_attend_tiles(monkeypatch, form, tokens, sizes):
    """The basis at once and in steps; empty splits, and more than a merge takes at once."""
    Hkv, D, tile, ranks, splits = sizes
    if form == "channels":
        tile = max(32, tile)  # whole groups of 32 tokens
        tokens = "all"
    if "mixed" in form:
        ranks = max(64, ranks)
    latents_config = kernels.latents_config

    def small_config(dtype, R8, N4, *more):
        config = latents_config(dtype, R8, N4, *more)
        is_held = ranks >= R8 + 2 * N4
        RB = kernels.power2(R8, 32) if is_held else ranks
        return config._replace(RB=RB, HELD=is_held, T=tile, STAGES=2)

    monkeypatch.setattr(kernels, "latents_config", small_config)
    tiles = kernels.TileConfig(tile, warps=4, stages=2, programs_a_sm=1)
    monkeypatch.setattr(kernels, "plain_config", lambda *_: tiles)
    monkeypatch.setattr(kernels, "channels_config", lambda *_: tiles)
    monkeypatch.setattr(kernels, "attend_splits", lambda *_: splits)
    bits = 16 if form == "plain" else 4
    sizes = (2, 310, Hkv, 2, D, D, bits, 100, (309, 120))
    check_attend(torch.float16, form, tokens, *sizes, n=130, r=57)


@pytest.mark.parametrize("r", [228, 300])
@poisoned
def test_kernel_attend_latents_of_many_4_bit_dims(r):
    """In two products with a basis that stays, and step by step with one that does not fit."""
    sizes = 2, 70, 2, 1, 32, 32, 2, 5, (69, 40)
    check_attend(torch.float16, "joint mixed latents", "row", *sizes, r=r)


KB = 1024
BASES = [  # of 128 dims: r, dtype, KB of shared memory; is it held, by how many programs?
    (256, torch.bfloat16, 99, True, 2),
    (512, torch.bfloat16, 99, False, 2),
    (512, torch.bfloat16, 163, True, 2),
    (1024, torch.bfloat16, 163, False, 2),
    (1024, torch.bfloat16, 227, True, 1),
    (128, torch.float32, 227, False, 4),  # fp32 models multiply codes as fp32
]


@pytest.mark.parametrize("r, dtype, shared, is_held, programs", BASES)
def test_kernel_attend_latents_holds_a_basis_where_it_fits(r, dtype, shared, is_held, programs):
    R8 = r // 4
    N4 = (r - R8) // 2
    config = kernels.latents_config(dtype, R8, N4, True, 128, 128, False, shared * KB)
    assert config.HELD == is_held
    assert config.programs_a_sm == programs


RISES = [(-3, 3), (3, -3), (-40, -40)]


@pytest.mark.parametrize("G, rise", [(1, RISES[0]), (4, RISES[1]), (4, RISES[2])])
@poisoned
def test_kernel_attend_latents_beside_several_tiles_of_exact_tokens(G, rise):
    """Logits that rise from slot to slot, that fall, and all far below those of slots still
    empty."""
    case = ("joint latents", "row", 3, 200, 2, G, 64, 64, 4, 100, (199, 120, 30))
    check_attend(torch.float16, *case, rise=rise)


LATENT_ROWS = [  # tokens, B, S, Hkv, G, bits, z, n, r
    ("row", 16, 1000, 32, 1, 2, 64, 448, 512),
    ("row", 4, 5000, 32, 1, 4, 64, 4032, 512),
    ("row", 8, 3000, 8, 4, 4, 80, 1984, 256),
    ("all", 1, 3000, 8, 4, 4, 64, 0, 256),
]
REAL_SIZES = [(form, *row) for form in JOINT_LATENTS for row in LATENT_ROWS]
REAL_SIZES += [("channels", "all", 4, 3000, 8, G, 4, 128, 0, 0) for G in (1, 4)]
REAL_SIZES += [("plain", tokens, 4, 3000, 8, 4, 16, 0, 448, 0) for tokens in ("all", "KV head")]


@pytest.mark.skipif(DEVICE == "cpu", reason="the sizes of real models")
@pytest.mark.parametrize("form, tokens, B, S, Hkv, G, bits, z, n, r", REAL_SIZES)
@poisoned
def test_kernel_attend_real_sizes(form, tokens, B, S, Hkv, G, bits, z, n, r):
    pos = [S - 1 - 7 * b for b in range(B)]
    check_attend(torch.bfloat16, form, tokens, B, S, Hkv, G, 128, 128, bits, z, pos, n=n, r=r)


LOGITS_SIZES = [  # B, S, Hkv, G, DV, pos
    (1, 70, 2, 1, 37, (69,)),
    (3, 300, 1, 8, 64, (299, 5, 0)),
    (2, 130, 2, 5, 200, (400, 64)),
    (2, 90, 3, 3, 20, (88, 31)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B, S, Hkv, G, DV, pos", LOGITS_SIZES)
@poisoned
def test_kernel_attend_logits(dtype, B, S, Hkv, G, DV, pos):
    """Logits whose rows lie apart. A row whose pos lies beyond S attends all S."""
    pos = positions(*pos)
    later = torch.arange(S, device=DEVICE) > pos[:, None]
    logits = 3 * randn(B, Hkv, G, S)
    v = randn(B, S, Hkv, DV, dtype=dtype).transpose(1, 2)
    weights = logits.masked_fill(later[:, None, None], -torch.inf).softmax(-1)
    truth = (weights @ v.float()).flatten(1, 2)
    apart = torch.full((B, G, Hkv, S + 5), NAN, device=DEVICE).transpose(1, 2)[..., :S]
    logits = apart.copy_(logits.masked_fill(later[:, None, None], NAN))
    v = poison(v, later[:, None].expand(-1, Hkv, -1))
    close(kernels.attend_logits(logits, v, pos, kernel=True), truth, dtype)


@pytest.mark.parametrize("dtype, G, sizes", pairwise(DTYPES, [1, 3], CODED_SIZES[:5]))
@poisoned
def test_kernel_attend_logits_of_an_index_beside_exact_tokens(dtype, G, sizes):
    """Values in codes, as extras/hopper.py has it for SALS: its logits are given here, in the order
    of the index."""
    B, S, Hkv, _, D, _, bits, z, pos = sizes
    form = "joint mixed latents"
    case = (dtype, form, "row", B, S, Hkv, G, D, D, bits, z, pos)
    (q, _, _, values, _, pos, index, exact, scale), truth = attend_case(*case)
    every = torch.ones(B, Hkv, S, dtype=torch.bool, device=DEVICE)
    _, k = stored_keys(form, dtype, every, D)
    logits = torch.einsum("bhgd,bhsd->bhgs", q.unflatten(1, (Hkv, G)).float(), k)
    at = index.clamp(min=0).long()[:, None, None].expand(-1, Hkv, G, -1)
    logits = logits.gather(3, at).masked_fill(index[:, None, None] < 0, NAN)
    out = kernels.launch_attend_logits(q, logits, *values, bits, pos, index, exact, scale)
    close(out, truth, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, S, Hq, W, DV, pos, wide",
    [
        (1, 70, 4, 48, 32, (69,), False),
        (3, 130, 20, 100, 60, (129, 64, 0), False),
        (2, 300, 8, 36, 36, (299, 31), False),
        (1, 40, 3, 600, 520, (31,), True),
        (3, 40, 8, 1024, 768, (39, 15, 0), True),
        (1, 500, 8, 256, 192, (497,), False),
        (1, 500, 4, 24, 16, (497,), False),
        (2, 40, 4, 24, 16, (70, 31), False),
    ],
)
@poisoned
def test_kernel_attend_shared_latent(monkeypatch, dtype, B, S, Hq, W, DV, pos, wide):
    """In one kernel, whose programs have several tiles, where a row whose pos lies beyond S attends
    all S; and latents too wide for it, by their logits."""
    monkeypatch.setattr(kernels, "attend_splits", lambda *_, **__: 1 if S == 500 else 3)
    calls = []
    launch_scores = kernels.launch_scores

    def counted_scores(*given):
        calls.append(given)
        return launch_scores(*given)

    monkeypatch.setattr(kernels, "launch_scores", counted_scores)
    pos = positions(*pos)
    q = randn(B, Hq, W, dtype=dtype)
    latents = randn(B, S, W, seed=1, dtype=dtype)
    later = torch.arange(S, device=DEVICE) > pos[:, None]
    logits = (q.float() @ latents.float().mT * W**-0.5).masked_fill(later[:, None], -torch.inf)
    truth = logits.softmax(-1) @ latents[..., :DV].float()
    latents = poison(latents, later)
    out = kernels.attend_shared_latent(q, latents, pos, DV, scale=W**-0.5, kernel=True)
    close(out, truth, dtype)
    assert bool(calls) == wide


RAGGED_SIZES = [  # d_qk of each head, then d_v; B, S, G, pos
    ([32, 32, 32, 32], 1, 70, 1, (69,)),
    ([16, 96, 48, 64, 80, 16], 3, 300, 2, (299, 0, 64)),
    ([16, 96, 48, 64, 80, 16], 5, 90, 1, (1, 89, 63, 3, 0)),
    ([40, 24, 8, 96], 2, 130, 8, (127, 128)),
    ([16 * (1 + h % 6) for h in range(20)], 2, 150, 1, (149, 40)),
    ([256, 16, 16, 200], 3, 75, 4, (3, 74, 40)),
    ([88, 112, 24, 72], 1, 33, 3, (31,)),
    ([16, 24], 1, 8400, 1, (8399,)),  # more parts than a merge takes at once
    ([8, 8], 1, 33, 1, (0,)),  # more programs than blocks
    ([8, 256, 256, 8], 3, 40, 2, (39, -1, 17)),  # a row of no tokens
]


@pytest.mark.parametrize(
    "dtype, balanced, sms, sizes", pairwise(DTYPES, [True, False], [1, 3, 40], RAGGED_SIZES)
)
@poisoned
def test_kernel_attend_ragged(monkeypatch, dtype, balanced, sms, sizes):
    """Against each head on its own, in the packed buffer and of the queries at its own rank, cut
    for few programs and for many."""
    ranks, B, S, G, pos = sizes
    monkeypatch.setattr(kernels, "SMS", sms)
    Hkv = len(ranks) // 2
    pos = positions(*pos)
    later = torch.arange(S, device=DEVICE) > pos[:, None]
    parts = [randn(B, S, rank, seed=i, dtype=dtype) for i, rank in enumerate(ranks)]
    q = randn(B, Hkv, G, max(ranks[:Hkv]), dtype=dtype)
    truth = []
    for h, rank in enumerate(ranks[:Hkv]):
        logits = q[:, h, :, :rank].float() @ parts[h].float().mT * 0.2
        weights = logits.masked_fill(later[:, None], -torch.inf).softmax(-1)
        truth.append((weights @ parts[Hkv + h].float()).flatten(1))
        q[:, h, :, rank:] = NAN
    packed = torch.cat([poison(part, later).flatten() for part in parts])
    table = kernels.ragged_table(ranks, DEVICE, balanced)
    out = kernels.launch_attend_ragged(q.flatten(1, 2), packed, table, ranks, pos, 0.2, balanced)
    has_tokens = pos >= 0
    close(out[has_tokens], torch.cat(truth, 1)[has_tokens], dtype)


def test_kernel_attend_ragged_gives_programs_equal_bytes():
    """The line of work: the widest head first, and a block's work is what it reads. Without the
    balance a block of each head is the same work."""
    ranks = [16, 96, 48, 64, 80, 16]
    heads = kernels.ragged_heads(ranks, balanced=True)
    assert [head.head for head in heads] == [1, 0, 2]  # of 176, 80 and 64 numbers a token
    assert [head.work for head in heads] == [22, 10, 8]
    assert [head.work_before for head in heads] == [0, 22, 32]
    assert [head.k_before for head in heads] == [16, 0, 112]
    assert [head.v_before for head in heads] == [224, 160, 304]
    assert [head.work for head in kernels.ragged_heads(ranks, balanced=False)] == [1, 1, 1]


def test_kernel_attend_ragged_pads_ranks_by_less_than_half():
    """product_widths: two parts where these are less than one."""
    widths = {rank: kernels.product_widths(rank) for rank in range(8, 257, 8)}
    for rank, (first, second) in widths.items():
        assert rank <= first + second < max(17, 1.5 * rank)
    assert widths[72] == (64, 16) and widths[64] == (64, 0) and widths[112] == (128, 0)


# ---- copied into another project


COPIED_FILES = ["kernels.py", "model.py", "compress.py"]


class Definition(NamedTuple):
    """A function, class or constant of one of COPIED_FILES."""

    file: str
    node: ast.stmt


@functools.cache
def statements(file: str) -> list[ast.stmt]:
    """The statements of a file at its top level."""
    return ast.parse((ROOT / file).read_text()).body


@functools.cache
def definitions() -> dict[str, Definition]:
    """What COPIED_FILES define, by name, in their order."""
    found = {}
    for file in COPIED_FILES:
        for node in statements(file):
            if hasattr(node, "name"):
                names = [node.name]
            else:
                names = [ast.unparse(target) for target in getattr(node, "targets", [])]
            for name in names:
                found[name] = Definition(file, node)
    return found


def names_used(node: ast.stmt) -> list[str]:
    """The names that a definition uses and does not make itself; kernels.x counts as x."""
    own = set()
    used = []
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            own.add(part.arg)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            own.add(part.id)
        elif isinstance(part, ast.Name):
            used.append(part.id)
        elif isinstance(part, ast.Attribute):
            if ast.unparse(part.value) in ("kernels", "model_file"):
                used.append(part.attr)
    return [name for name in used if name not in own]


def to_copy(name: str) -> list[str]:
    """The names of what a function needs of these files, and itself, in an order that Python can
    run."""
    known = definitions()
    needed = {name}
    unread = [name]
    while unread:
        for used in names_used(known[unread.pop()].node):
            if used in known and used not in needed:
                needed.add(used)
                unread.append(used)
    return [each for each in known if each in needed]


def listed(name: str) -> str:
    """What README shows of to_copy: a paragraph a file."""
    names_of_file = {}
    for each in to_copy(name):
        names_of_file.setdefault(definitions()[each].file, []).append(each)
    paragraphs = []
    for file, names in names_of_file.items():
        paragraphs.append(textwrap.fill(f"{file}: {', '.join(names)}", 110))
    return "\n".join(paragraphs)


def copied(name: str, folder: Path):
    """A module in a folder of its own, with nothing else of this project: that, and the files'
    imports."""
    lines = []
    for file in COPIED_FILES:
        for node in statements(file):
            is_import = isinstance(node, ast.Import | ast.ImportFrom | ast.Try)
            line = ast.unparse(node)
            is_ours = re.match(r"(from|import) (kernels|model)\b", line)
            if is_import and not is_ours and line not in lines:
                lines.append(line)
    for each in to_copy(name):
        line = ast.unparse(definitions()[each].node)
        if line not in lines:  # a statement may define several names
            lines.append(line)
    text = "\n".join(lines).replace("kv_kernels", f"kv_copied_{name}")
    (folder / "copied.py").write_text(text)
    spec = importlib.util.spec_from_file_location("copied", folder / "copied.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outputs_of_sals_step(source, n: int) -> torch.Tensor:
    """What sals_step_ours of a module gives for n tokens of one row, from none on."""
    q, k, v = stream(n)
    cos, sin = rope_tables(tiny_config(), n, CPU)
    each_token = source.Rotations(1, cos, sin)
    basis = orthonormal(64)[:, :40]
    int8_dims, scale, int4_dims = kernels.quantize_mixed(torch.zeros(0, 40), 16)
    v_codes, v_scale = kernels.quantize_spread(v[:0], 4)
    stored = source.SalsStoredOurs(int8_dims, scale, int4_dims, v_codes, v_scale, k[:0], v[:0])
    outputs = []
    for i in range(n):
        out, _, stored = source.sals_step_ours(
            q[i],
            k[i],
            v[i],
            stored,
            maps=source.SalsMaps(basis, basis, torch.zeros(64)),
            r_score=16,
            bits=4,
            budget=source.Budget(n_sinks=2, n_selected=10, n_recent=4),
            rope=lambda x, at: source.apply_rope(x, cos[at], sin[at]),
            blocks=each_token,
            mean_blocks=each_token,
        )
        outputs.append(out)
    return torch.stack(outputs)


def test_the_step_of_sals_runs_where_nothing_else_of_this_project_is(tmp_path):
    """From no tokens on, on plain tensors. README lists what is copied."""
    assert listed("sals_step_ours") in (ROOT / "README.md").read_text()
    expected = outputs_of_sals_step(compress, 40)
    outputs = outputs_of_sals_step(copied("sals_step_ours", tmp_path), 40)
    assert torch.equal(outputs, expected) and outputs.isfinite().all()
    _, _, v = stream(40)
    assert error(outputs[0], v[0].repeat_interleave(2, 0)) < 0.2  # one token: its own value


def check_operation(name, launch):
    """Runs `launch`, a copy of kernels.launch_NAME, against the truth of its own test."""
    pos = positions(80, 3)
    if name == "attend_plain":
        check_attend(torch.float16, "plain", "row", 2, 90, 2, 2, 64, 64, 16, 8, (80, 3))
    elif name == "attend_latents":
        form = "joint mixed latents"
        check_attend(torch.float16, form, "row", 2, 90, 2, 2, 64, 64, 4, 8, (80, 3))
    elif name == "attend_channels":
        check_attend(torch.float16, "channels", "all", 2, 90, 2, 2, 64, 64, 4, 8, (80, 3))
    elif name == "attend_shared_latent":
        q = randn(2, 4, 48)
        latent = randn(2, 90, 48, seed=1)
        truth = kernels.attend_shared_latent(q, latent, pos, 32, scale=0.2, kernel=False)
        close(launch(q, latent, pos, 32, 0.2), truth, torch.float32)
    elif name == "attend_logits":
        logits = randn(2, 2, 3, 90)
        v = randn(2, 2, 90, 32, seed=1)
        truth = kernels.attend_logits(logits, v, pos, kernel=False)
        q = randn(2, 6, 16)
        close(launch(q, logits, v, None, 16, pos, None, [], 1.0), truth, torch.float32)
    elif name == "attend_ragged":
        ranks = [16, 40, 24, 8]
        q = randn(2, 4, 40)
        packed = randn(2 * 90 * sum(ranks), seed=1)
        truth = kernels.attend_ragged(q, packed, ranks, None, pos, scale=0.2)
        table = kernels.ragged_table(ranks, DEVICE)
        close(launch(q, packed, table, ranks, pos, 0.2), truth, torch.float32)
    elif name == "append":
        check_append(torch.float32, APPENDED[0])
    elif name == "block_queries":
        check_block_queries(torch.float32, PLACED[0])
    elif name == "fetch_rows":
        check_fetch_rows(torch.float32, 2, 3, 70, 24, 37, 50)
    elif name == "scores":
        check_scores(torch.float16, "largest", True, 2, 90, 1, 4, 40, 32)
    elif name == "block_scores":
        check_block_scores(torch.float16, True, 2, 90, 1, 4, 40, 32, 48, 0)
    else:
        check_select("ties", 257, 4, 33, 8, (256, 17))


class CopiedOperation(NamedTuple):
    """What README says of copying an operation of kernels.py."""

    name: str
    blocks: list[str]  # titles of blocks, beside the header
    lines: int


def operations_to_copy() -> list[CopiedOperation]:
    """The rows of README's table."""
    operations = []
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (\d+) \|$", (ROOT / "README.md").read_text(), re.M)
    for name, blocks, lines in rows:
        if hasattr(kernels, f"launch_{name}"):
            operations.append(CopiedOperation(name, blocks.split("; "), int(lines)))
    return operations


def blocks_of_kernels() -> dict[str, str]:
    """The source of each block of kernels.py, by its title; "header" is what comes before."""
    source = (ROOT / "kernels.py").read_text()
    header, *parts = re.split(r"^# -{5,} (.+)$", source, flags=re.M)
    blocks = {"header": header}
    blocks.update(zip(parts[::2], parts[1::2], strict=True))
    return blocks


def module_of_blocks(operation: CopiedOperation, folder: Path):
    """A module of the header and of an operation's blocks, in the order of kernels.py."""
    blocks = blocks_of_kernels()
    text = ""
    for title, source in blocks.items():
        if title in ["header", *operation.blocks]:
            text += source
    # Operators of one name cannot be registered twice.
    text = text.replace('"kv_kernels"', f'"kv_copied_{operation.name}"')
    (folder / "copied.py").write_text(text)
    spec = importlib.util.spec_from_file_location("copied", folder / "copied.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, text.count("\n")


def names_that_are_missing(module) -> set[str]:
    """Global names that the functions of a module use, and that it lacks."""
    tree = ast.parse(Path(module.__file__).read_text())
    local_names = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    local_names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local_names.add(node.id)
        elif isinstance(node, ast.Name):
            used.add(node.id)
    return used - local_names - set(vars(module)) - set(dir(builtins))


@pytest.mark.parametrize("operation", operations_to_copy(), ids=lambda operation: operation.name)
def test_an_operation_of_kernels_runs_in_a_file_of_its_own(operation, tmp_path, monkeypatch):
    """Of the blocks that README names; and README's lines are about as many."""
    module, lines = module_of_blocks(operation, tmp_path)
    assert names_that_are_missing(module) == set()
    assert abs(operation.lines - lines) < 0.05 * lines
    launch = getattr(module, f"launch_{operation.name}")
    monkeypatch.setattr(kernels, f"launch_{operation.name}", launch)
    check_operation(operation.name, launch)


def test_every_operation_of_kernels_is_in_the_readmes_list():
    launchers = {name.removeprefix("launch_") for name in vars(kernels) if "launch_" in name[:7]}
    assert {operation.name for operation in operations_to_copy()} == launchers


# ---- compiled for GPUs that are not there


def run_for_hopper(*programs, capability=90):
    """Runs them with a driver that can only compile: Compile stands for a kernel of a module, and
    puts what a launch of it compiles into `compiled`, with its name."""
    before = f"""
        import re, torch, types, kernels
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver
        class Hopper:  # enough of a driver to compile
            get_current_target = staticmethod(lambda: GPUTarget("cuda", {capability}, 32))
            get_current_device = staticmethod(lambda: 0)
            get_current_stream = staticmethod(lambda device: 0)
        driver.set_active(Hopper())
        kernels.nvidia_generation = lambda device: {capability} // 10
        compiled = []
        class Compile:
            def __init__(self, name, module=kernels):
                self.kernel, self.name = getattr(module, name), name
            def __getitem__(self, grid):
                def launch(*args, **options):
                    compiled.append((self.name, self.kernel.warmup(*args, grid=grid, **options)))
                return launch
        def zeros(*shape, dtype=torch.bfloat16):
            return torch.zeros(*shape, dtype=dtype)
        i8, i32, half, fp32 = torch.int8, torch.int32, torch.half, torch.float32
        how = {{"scale": 1.0, "kernel": True}}
    """
    program = "".join(map(textwrap.dedent, (before, *programs)))
    done = python("-c", program, TRITON_INTERPRET="0", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_operations_compile_for_every_gpu_within_99_kb_of_shared_memory(capability):
    """Of every format and rule at the sizes of an 8B and a 7B model, for the triton that is
    installed. Where launches overlap, kernels wait for the one before they touch memory."""
    program = """
        import test_all
        names = {name for name in vars(kernels) if name.endswith("_kernel")}
        names -= {"_fetch_kernel"}  # which overlaps with none
        for name in names:
            setattr(kernels, name, Compile(name))
        B, S, D, bf16 = 2, 512, 128, torch.bfloat16
        pos = zeros(B, dtype=i32)
        kernels.launch_select(zeros(B, 4992, dtype=fp32), pos, 4, 200, 16)

        def attend(form, H, G, bits, z, tokens="all", r=256, dtype=bf16):
            sizes = B, S, H, G, D, D, bits, z, (S - 1, 9)
            given = test_all.attend_case(dtype, form, tokens, *sizes, n=448, r=r)[0]
            test_all.launch_attend(*given)

        for H, G in ((8, 4), (32, 1)):
            for tokens in ("all", "query head"):
                attend("plain", H, G, 16, 0, tokens)
                attend("plain", H, G, 16, 80, tokens)
                attend("joint latents", H, G, 4, 80, tokens)
                attend("joint mixed latents", H, G, 4, 80, tokens, 512)
                attend("latents", H, G, 16, 0, tokens)
            attend("joint mixed latents", H, G, 4, 80, r=512, dtype=fp32)
            attend("channels", H, G, 4, 80)
            attend("channels", H, G, 4, 80, dtype=half)
            k = zeros(B, H, S, D)
            for rule in test_all.RULES:
                kernels.launch_scores(zeros(B, H, G, 64), k, None, pos, 1.0, rule)
            logits = zeros(B, H, G, S, dtype=fp32)
            kernels.attend_logits(logits, k, pos, kernel=True)
            mixed = test_all.attend_case(
                bf16, "joint mixed latents", "row", B, S, H, G, D, D, 4, 80, (S - 1, 9), n=448
            )[0]
            q, _, _, values, bits, _, index, exact, _ = mixed
            kernels.launch_attend_logits(q, logits, *values, bits, pos, index, exact, 1.0)
            for W, DV in ((576, 512), (512, 448), (100, 60), (2048, 1536)):
                kernels.attend_shared_latent(zeros(B, H * G, W), zeros(B, 4992, W), pos, DV, **how)
        kernels.launch_append(*test_all.appended(B, 32, D, 128, 192, S, 2, bf16))
        for coded in (False, True):
            kernels.launch_block_queries(*test_all.placed_queries(B, 4, 8, 4, D, 200, bf16), coded)
        latents = zeros(B, 1, S, 128, dtype=i8), zeros(B, 1, S, dtype=fp32)
        latents += (pos, 1.0, 128, zeros(B, 32, 32, dtype=fp32), 16)
        kernels.launch_block_scores(zeros(B, 4, 1, 32, 128), *latents)
        codes = zeros(2, B, 4, 1, 32, 128, dtype=i8)
        kernels.launch_block_scores(codes, *latents, query_scale=zeros(B, 4, 32, dtype=fp32))
        ranks = [96, 48, 24, 80, 16, 72]
        table, packed = kernels.ragged_table(ranks, torch.device("cpu")), zeros(B * S * sum(ranks))
        kernels.launch_attend_ragged(zeros(B, 12, 96), packed, table, ranks, pos, 1.0)
        assert {name for name, _ in compiled} == names, names - {name for name, _ in compiled}
        small = len(compiled)
        large = 227 if overlaps else 163  # KB of shared memory of an H100 and of an A100
        kernels.shared_memory = lambda device: large * 1024
        attend("joint mixed latents", 8, 4, 2, 68, "row", 512)
        attend("joint mixed latents", 32, 1, 2, 68, "row", 1024)
        attend("joint latents", 8, 4, 16, 80)  # a basis that is held, wide plain values
        if overlaps:
            for W, DV in ((32, 32), (40, 24), (64, 40), (104, 60), (256, 256), (512, 448)):
                kernels.attend_shared_latent(zeros(B, 32, W), zeros(B, 4992, W), pos, DV, **how)
                name = "_attend_shared_latent_kernel"
                kernel = [kernel for each, kernel in compiled if each == name][-1]
                code = kernel.asm["ttgir"]
                # A tile is read in a branch after the loads of the next one have begun.
                has_branch = "scf.if" in code
                has_two_tiles = f"memdesc<2x64x{kernels.power2(W, 16)}x" in code
                assert has_branch == has_two_tiles == (W > 32)
        for i, (name, kernel) in enumerate(compiled):
            most = 99 if i < small else large
            assert kernel.metadata.shared <= most * 1024, (name, kernel.metadata.shared)
            if overlaps:
                before, after = kernel.asm["ptx"].split("griddepcontrol.wait")  # one
                assert kernel.metadata.launch_pdl, name
                touches = "ld.global st.global cp.async atom red.g launch_dependents"
                for touch in touches.split():
                    weights = name == "_block_queries_kernel" and touch == "ld.global"
                    assert weights or touch not in before, (name, touch)
    """
    run_for_hopper(f"overlaps = {capability >= 90}\n", program, capability=capability)


# ---- rows of host memory


def check_fetch_rows(dtype, B, Hkv, S, W, n, slots):
    """Only missing rows move; the others' rows may hold anything, and their places stay as they
    are."""
    rows, hot = randn(B, Hkv, S, W, dtype=dtype), randn(B, Hkv, slots, W, seed=2, dtype=dtype)
    index = torch.stack([torch.randperm(S)[:n] for _ in range(B * Hkv)]).view(B, Hkv, n).to(DEVICE)
    place = (
        torch.stack([torch.randperm(slots)[:n] for _ in range(B * Hkv)]).view(B, Hkv, n).to(DEVICE)
    )
    for share in (0.0, 0.4, 1.0):
        miss = (torch.rand(B, Hkv, n) < share).to(DEVICE)
        truth = hot.clone()
        kernels.fetch_rows_reference(rows, index, place, miss, truth)
        codes = hot.clone().view(torch.uint8)
        kernels.launch_fetch_rows(rows.view(torch.uint8), index, place, miss, codes)
        kernels.launch_fetch_rows(rows, index, place, miss, hot)
        assert torch.equal(hot, truth) and torch.equal(codes, truth.view(torch.uint8))
        assert share < 1 or torch.equal(hot[0, 0, place[0, 0]], rows[0, 0, index[0, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "B, Hkv, S, W, n, slots", [(1, 1, 9, 16, 1, 3), (2, 3, 70, 24, 37, 50), (3, 2, 40, 256, 32, 32)]
)
def test_kernel_fetch_rows(dtype, B, Hkv, S, W, n, slots):
    check_fetch_rows(dtype, B, Hkv, S, W, n, slots)


@needs_cuda
def test_kernels_reach_host_memory_through_its_address():
    context = CacheContext(tiny_model().cuda(), 2, 50)
    shape = 3, 50, 16
    rows = compress.host_memory(context, *shape, dtype=torch.float32)
    assert rows.is_cuda and not rows.any()
    index = torch.arange(50, device="cuda")
    rows[1, :, index] = torch.ones(shape, device="cuda")
    before = torch.cuda.memory_allocated()
    codes = compress.host_memory(context, *shape, dtype=torch.uint8)
    assert codes.dtype == torch.uint8 and codes.sum() == 0 and rows.sum() == 3 * 50 * 16
    assert torch.cuda.memory_allocated() - before < rows.nbytes


# ---- operators: torch.compile, CUDA graphs, refusals


SALS_0 = SPARSE | {"skip": "0"}
OPERATIONS = ["append", "block_queries", "block_scores", "scores", "select", "attend_ragged"]
OPERATIONS += ["attend_plain", "attend_latents", "attend_channels", "attend_shared_latent"]
OPERATIONS += ["attend_logits"]
OURS = "block_queries attend_latents block_scores select"  # of our SALS
WIDE_BIAS = {"skip": "", "bits": 2, "rank": 0.8, "qkv_bias": True}
PAPER_LRQK = {"rank": 8, "k": 24, "recent": 8, "variant": "paper", "slots": 1.5}
# method, options (and head_dim), group, operations
SAME_WITH_KERNELS = [
    ("dense", {}, 4, "attend_plain"),
    ("sals", SALS_0, 2, "attend_latents scores select"),
    ("sals", SALS_0 | {"bits": 2, "rank": 0.3}, 1, "attend_latents scores select"),
    ("sals", CODES | {"skip": ""}, 8, f"append {OURS}"),
    ("sals", CODES | {"skip": "0", "head_dim": 128}, 2, f"append attend_channels {OURS}"),
    ("sals", CODES | WIDE_BIAS, 1, f"append {OURS}"),
    ("sals", CODES | {"skip": "", "bits": 2, "head_dim": 80}, 1, f"append {OURS}"),
    ("sals", CODES | {"skip": "", "score": "sum"}, 4, "append attend_latents scores select"),
    # values of 24 channels in codes: no kernel attends these
    (
        "sals",
        CODES | {"skip": "", "head_dim": 24, "rank": 0.8},
        2,
        "append block_queries block_scores select",
    ),
    ("fdc", {"rate": 0.2}, 2, "attend_ragged"),
    ("fdc", {"adaptive": False}, 8, "attend_ragged"),
    ("fdc", {"rate": 0.2, "balanced": False}, 1, "attend_ragged"),
    ("kivi", {"residual": 32}, 4, "attend_channels"),
    ("kivi", {"residual": 32, "bits": 2}, 1, "attend_channels"),
    ("elitekv", {}, 2, "attend_shared_latent"),
    ("loki", {"reduced": True, "d": 0.5}, 2, "attend_plain"),
    ("loki", {"k": 0.5, "d": 0.25}, 2, "attend_plain scores select"),
    ("lrqk", {"rank": 8, "k": 24, "recent": 8}, 2, "attend_plain scores select"),
    ("lrqk", PAPER_LRQK, 2, "attend_plain scores select"),
    ("topk", {"keep": 32}, 2, "attend_plain scores select"),
]


@over("method, options, group, operations", lambda tests: tests.SAME_WITH_KERNELS)
def test_decode_with_kernels_equals_decode_without(method, options, group, operations, monkeypatch):
    """The same logits, ragged rows, on both sides of the budget's edge at 32 tokens."""
    logits, calls, options = [], set(), dict(options)
    shape = {
        "n_layers": 2,
        "n_heads": 2 * group,
        "n_kv_heads": 2,
        "head_dim": options.pop("head_dim", 16),
    }
    shape["qkv_bias"] = options.pop("qkv_bias", False)
    for name in OPERATIONS:
        operation = getattr(kernels, f"launch_{name}")

        def spy(*given, name=name, operation=operation):
            calls.add(name)
            return operation(*given)

        monkeypatch.setattr(kernels, f"launch_{name}", spy)
    for kernel in (False, True):
        engine = make_engine(
            tiny_model(**shape).to(DEVICE), method, 3, 64, kernel=kernel, **options
        )
        logits.append(
            logits_through(engine, [random_ids(n, n) for n in (5, 31, 58)], [random_ids(2)] * 3)
        )
        assert calls == (set(operations.split()) if kernel else set())
    assert error(logits[1], logits[0]) < 1e-5


def good_attend_arguments(form: str) -> dict:
    """Arguments by name of the operation for a form of keys, at which nothing is wrong."""
    tokens, G = ("row", 1) if "latents" in form else ("all", 2)
    bits = 16 if form == "plain" else 4
    sizes = 1, 40, 2, G, 32, 32, bits, 4, (39,)
    given, _ = attend_case(torch.float32, form, tokens, *sizes, written=True)
    q, _, keys, values, _, pos, index, exact, scale = given
    always = {"q": q, "pos": pos, "exact": exact, "scale": scale}
    if form == "plain":
        return always | {"k": keys[0], "v": values[0], "index": index}
    always |= {"v": values[0], "v_scale": values[1], "bits": bits}
    if form == "channels":
        return always | {"k": keys[0], "k_scale": keys[1]}
    names = "latent latent_scale int4_dims basis basis_scale bias rope".split()
    return always | dict(zip(names, keys, strict=True)) | {"index": index}


def good_arguments(name: str) -> dict:
    """Arguments of an operation, or of attend over a form of keys, by name, at which nothing is
    wrong."""
    if name in FORMATS:
        return good_attend_arguments(name)
    pos, q = positions(9), randn(1, 2, 16)
    rows, hot, index = (
        randn(1, 2, 9, 16),
        randn(1, 2, 3, 16),
        torch.zeros(1, 2, 1).long().to(DEVICE),
    )
    table = kernels.ragged_table([16, 16], DEVICE)
    fdc = {"q": q, "packed": randn(640), "table": table, "ranks": [16, 16]}
    fetch = {"rows": rows, "index": index, "place": index, "miss": index == 0, "hot": hot}
    scores = {"queries": randn(1, 1, 4, 8), "vectors": randn(1, 1, 10, 8), "vector_scale": None}
    placed = dict(
        zip("q cos sin basis mean".split(), placed_queries(*PLACED[0], torch.float32), strict=True)
    )
    placed["coded"] = True
    names = "latent v pos int8_dims latent_scale int4_dims codes scale".split()
    return {
        "append": dict(zip(names, appended(*APPENDED[0], torch.float32), strict=True)),
        "block_queries": placed,
        "select": {"scores": randn(1, 10), "pos": pos, "x": 1, "y": 2, "z": 3},
        "scores": scores | {"pos": pos, "scale": 1.0, "rule": "each"},
        "attend_logits": {
            "logits": randn(1, 2, 2, 9),
            "v": randn(1, 2, 9, 8),
            "pos": pos,
            "kernel": True,
        },
        "attend_shared_latent": {
            "q": q,
            "latent": randn(1, 10, 16),
            "pos": pos,
            "DV": 8,
            "scale": 1.0,
        },
        "block_scores": {
            "queries": randn(1, 2, 1, 4, 8),
            "vectors": randn(1, 1, 20, 8),
            "vector_scale": None,
            "pos": pos,
            "scale": 1.0,
            "block": 16,
        },
        "attend_ragged": fdc | {"pos": pos, "scale": 1.0},
        "fetch_rows": fetch,
        "value_packing": {"D": 32, "bits": 4},
    }[name]


def other(place, change):
    """A change of one of a list's tensors."""
    return lambda tensors: [change(x) if i == place else x for i, x in enumerate(tensors)]


def instead(value):
    return lambda _: value


def turned(x):
    """x, not contiguous."""
    return x.mT.contiguous().mT


MIXED = "joint mixed latents"
REFUSED = [  # operation or form of keys, arguments and their changes, the message
    ("plain", {"q": lambda q: q[:, :3]}, "3 query heads do not divide over 2"),
    ("plain", {"q": turned}, "q .* must be contiguous"),
    ("plain", {"q": lambda q: q.half()}, "keys must be torch.float16"),
    ("plain", {"pos": lambda pos: pos.long()}, "pos must be torch.int32"),
    ("plain", {"k": turned}, "keys must be whole vectors"),
    ("plain", {"v": lambda v: v.half()}, "values must be torch.float32"),
    ("plain", {"exact": other(0, lambda x: x.half())}, "exact keys must be torch.float32"),
    ("plain", {"exact": other(1, lambda x: x[:, 1:])}, "exact values must be"),
    (
        "plain",
        {"index": lambda _: torch.zeros(1, 2, 9, device=DEVICE)},
        "index must be torch.int32",
    ),
    ("plain", {"index": lambda _: positions(1, 2, 3)}, r"index must be \[1, .., n\]"),
    ("plain", {"index": lambda _: positions(1, 2, 3).view(1, 3, 1)}, "a query head, not 3"),
    ("joint latents", {"latent_scale": lambda _: randn(1, 2, 40)}, "codes of latents have"),
    ("joint latents", {"basis_scale": lambda _: randn(2, 32, 1)}, "codes of latents have"),
    ("joint latents", {"int4_dims": lambda _: randn(1, 2, 40, 4)}, "codes of latents have"),
    ("joint latents", {"v_scale": instead(None)}, "values of 4 bits need a scale"),
    ("joint latents", {"basis": lambda x: x[:, :16]}, "basis .* must be"),
    ("joint latents", {"bias": lambda _: randn(2, 16, 1)}, "bias .* must be"),
    ("joint latents", {"rope": lambda x: x[:39]}, "rope has 39 positions, the cache 40"),
    ("joint latents", {"bits": instead(3)}, "codes have 2 or 4 bits, not 3"),
    (MIXED, {"v_scale": lambda x: x.float()}, "scale of values must be torch.float16"),
    (MIXED, {"v_scale": lambda x: x.contiguous()}, "scale of values must lie as"),
    ("channels", {"k": lambda x: x[..., :4]}, "2 or 4 bits, not"),
    ("channels", {"k_scale": lambda x: x[:, :, :1]}, "scale of keys must be"),
    ("channels", {"k": lambda x: x[:, :, :32]}, "keys of 32 tokens do not fit values of 40"),
    ("attend_shared_latent", {"latent": lambda x: x.half()}, "latent must be torch.float32"),
    ("attend_shared_latent", {"DV": instead(17)}, "no value of 17"),
    ("append", {"latent": turned}, "row of latent must be contiguous"),
    ("append", {"codes": lambda x: x[..., :15]}, "15 bytes are no codes of 64 values"),
    ("append", {"scale": lambda x: x.float()}, "scale must be torch.float16"),
    ("block_queries", {"basis": lambda x: x[:17]}, "q, rotations and basis do not fit"),
    ("block_queries", {"mean": lambda x: x.half()}, "mean must be torch.float32"),
    ("select", {"scores": lambda x: x.double()}, "scores must be torch.float32"),
    ("select", {"y": instead(0)}, "at least 1"),
    ("select", {"wanted": lambda _: positions(1, 1)}, r"wanted must be \[1\]"),
    (
        "select",
        {"scores": lambda _: randn(2, 10), "pos": lambda p: p.repeat(4)[::2]},
        "pos .* must be c",
    ),
    ("scores", {"queries": lambda _: randn(1, 1, 4, 9)}, "do not fit vectors"),
    ("block_scores", {"offset": lambda _: randn(1, 9, 4), "run": instead(1)}, "offset must be"),
    ("scores", {"rule": instead("sum")}, "no rule sum"),
    ("scores", {"vector_scale": lambda _: randn(1, 1, 10)}, "vectors must be torch.int8"),
    (
        "scores",
        {"queries": lambda _: randn(1, 1, 4, 3), "vectors": lambda x: x[..., :3]},
        "must be whole vectors",
    ),
    ("block_scores", {"queries": lambda _: randn(1, 3, 1, 4, 8)}, "no queries for blocks"),
    ("block_scores", {"block": instead(8)}, "not a multiple of 16"),
    ("attend_logits", {"logits": lambda x: x.half()}, "must be torch.float32"),
    ("attend_logits", {"v": lambda v: v[:, :1]}, "do not divide|logits must be"),
    ("attend_ragged", {"ranks": instead([16])}, "ranks must be d_qk and d_v"),
    ("fetch_rows", {"index": lambda index: index.int()}, "index must be torch.int64"),
    ("fetch_rows", {"rows": turned}, "rows .* must be contiguous"),
    ("value_packing", {"D": instead(48)}, "multiple of 32"),
    ("append", {"int4_dims": lambda x: x[..., :0]}, "needs trailing dims"),
    ("plain", {"v": lambda v: torch.cat((v, v))}, r"values must be \[1, 2, 40, 32\]"),
    ("attend_logits", {"v": lambda v: torch.cat((v, v))}, r"values must be \[1, 2, 9, 8\]"),
    (
        "latents",
        {
            "v": lambda v: v[:, :, 1:].contiguous(),
            "v_scale": lambda scale: scale[:, :, 1:].contiguous(),
        },
        r"values must be \[1, 2, 40, 16\]",
    ),
    ("channels", {"k": lambda x: x[:, :, :48].contiguous()}, "48 tokens are not whole groups"),
    ("joint latents", {"bits": instead(16)}, "values of 16 bits have no scale"),
    ("block_scores", {"run": instead(0)}, "a run has one token at least"),
    (
        "block_scores",
        {
            "queries": lambda _: torch.zeros(2, 4, 2, 1, 4, 8, dtype=torch.int8)[:, ::2],
            "query_scale": lambda _: randn(2, 2, 4),
            "vectors": lambda _: torch.zeros(2, 1, 20, 8, dtype=torch.int8),
        },
        "queries in codes must be contiguous",
    ),
]
if DEVICE == "cpu":  # what a launch would have to read from a GPU
    REFUSED += [
        ("append", {"pos": lambda pos: pos + 50}, "do not fit into 0 to 49"),
        ("scores", {"pos": lambda pos: pos + 10}, "do not fit in 10 tokens"),
        ("block_scores", {"pos": lambda pos: pos + 20}, "do not fit in 20 tokens"),
        ("attend_ragged", {"pos": lambda pos: pos + 20}, "do not fit in 20 tokens"),
        ("attend_ragged", {"balanced": instead(False)}, "the table is not that of ranks"),
        (
            "attend_ragged",
            {"table": lambda _: kernels.ragged_table([16, 24], DEVICE)},
            "the table is not that of ranks",
        ),
    ]


def operation_of(name: str) -> Callable:
    if name in FORMATS:
        name = f"attend_{name.split()[-1]}"
    if name == "attend_logits":
        return kernels.attend_logits
    return getattr(kernels, f"launch_{name}", None) or getattr(kernels, name)


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_operations_refuse_what_they_would_get_wrong(name, changes, message):
    given, operation = good_arguments(name), operation_of(name)
    operation(**given)
    with pytest.raises(ValueError, match=message):
        operation(**given | {key: change(given.get(key)) for key, change in changes.items()})


@pytest.mark.skipif(DEVICE == "cuda", reason="to read a GPU's scales would mean to wait")
def test_attend_latents_refuses_a_basis_whose_pairs_have_two_scales():
    given = good_arguments(MIXED)
    scale = given["basis_scale"].clone()
    scale[:, 1::2] *= 2
    with pytest.raises(ValueError, match="both dims of a RoPE pair"):
        kernels.launch_attend_latents(**given | {"basis_scale": scale})


def test_kernel_operators_do_what_torch_compile_is_told():
    for name in dict.fromkeys(name for name, *_ in REFUSED):
        if isinstance(operation := operation_of(name), torch.library.CustomOpDef):
            torch.library.opcheck(operation, (), good_arguments(name))


# ------------------------------------------------------------------------------------- golden texts


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("method, options", [("dense", {}), ("sals", FULL)])
def test_stories260k_gives_its_golden_text(method, options, device):
    folder = folder_of(STORIES)
    golden = json.loads((folder / "golden.json").read_text())
    prompt = golden["prompt_ids"]
    expected = golden["greedy_ids"]  # with the prompt
    model = load_model(folder, torch.device(device), torch.float32)
    engine = make_engine(model, method, 1, 256, **options)
    engine.prefill([prompt])
    written = decode_rows(engine, len(expected) - len(prompt), lambda token_ids: False)[0]
    assert prompt + written == expected


# Facts in the words that nano was trained on. Keys share words.
NANO_FACTS = {
    "silent harbor": 52871,
    "golden harbor": 30964,
    "silent bridge": 77402,
    "amber lantern": 18635,
}


def nano_question(characters: int, key: str) -> list[int]:
    """Token ids of a source text of the standard library with NANO_FACTS spread over it, and a
    question."""
    tokenizer = load_tokenizer(NANO)
    lines = Path(textwrap.__file__).read_text()[:characters].splitlines()
    for i, (name, number) in enumerate(NANO_FACTS.items()):
        place = (2 * i + 1) * len(lines) // 8
        lines.insert(place, f"\nThe magic number for {name} is {number}.\n")
    question = (
        f"\nQuestion: What is the magic number for {key}?\nAnswer: The magic number for {key} is"
    )
    return tokenizer.encode("\n".join(lines)) + tokenizer.encode_continuation(question)


@pytest.mark.parametrize(
    "method, options",
    [
        ("dense", {}),
        ("sals", {}),
        ("sals", {"rank": 0.125, "bits": 2}),
    ],
)
def test_nano_retrieves_through_the_cache(method, options):
    """About 1500 tokens, of which SALS attends a third. Each row is asked for a fact of its own."""
    keys = ["silent harbor", "silent bridge"]
    prompts = [nano_question(4000, key) for key in keys]
    engine = fitted_engine(NANO, method, len(prompts), 1600, **options)
    engine.prefill(prompts)
    answers = decode_rows(engine, 8, lambda token_ids: False)
    tokenizer = load_tokenizer(NANO)
    for key, answer in zip(keys, answers, strict=True):
        assert tokenizer.decode(answer).startswith(f"{NANO_FACTS[key]}.")


# ----------------------------------------------------------------------------------- texts and fits


def test_explained_is_the_mean_of_the_heads_ranks():
    """Sec. 3.1: Rank@v of a layer averages its heads; here 1, 1, 1 and 8 of 16, mean 2.75."""
    model = tiny_model()
    values = torch.full((4, 4, 16), 1e-6)  # of each layer and head
    values[:, :, 0] = 1.0
    values[:, 3, :8] = 1.0
    artifact = artifact_of("loki", model)
    artifact["post.eigenvalues"] = values
    engine = make_engine(model, "loki", 1, 20, artifact, explained=0.9)
    assert [cache.d for cache in engine.caches] == [3, 3, 3, 3]


RANKS = [  # the fraction of 2 + 1 + 1, the leading eigenvalues that hold it
    (0.5, 1),
    (0.51, 2),
    (0.75, 2),
]


@pytest.mark.parametrize("fraction, rank", RANKS)
def test_rank_at_a_fraction_is_the_least_that_holds_it(fraction, rank):
    assert compress.rank_at(torch.tensor([2.0, 1.0, 1.0]), fraction) == rank


def test_texts_come_once_and_begin_with_bos(tmp_path):
    tokenizer = load_tokenizer(NANO)
    code = "x = 1\n" * 99
    prose = "some words and more " * 100
    texts = {
        "a.py": code,
        "b.py": code,  # a copy
        "c.py": "short",
        "d.py": "y" * 3000,  # a table
        "e.py": "\ufeff" + code.replace("\n", "\r\n"),  # a copy, as Windows writes it
        "f.py": prose,
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    files = calibrate.text_files(tmp_path)
    assert sorted(calibrate.read_texts(files)) == [prose, code]

    windows = calibrate.windows(tokenizer, files, 32, 3)
    assert windows[:, 0].tolist() == [tokenizer.bos_id] * 3
    ids = np.concatenate([tokenizer.encode(text) for text in calibrate.read_texts(files)])
    assert (calibrate.text_ids(tokenizer, files, len(ids) - 9, bos=True) == ids[:-9]).all()
    assert (calibrate.text_ids(tokenizer, files, 9) == ids[1:10]).all()  # without BOS


class SplitLibrary(NamedTuple):
    """The standard library of a test."""

    not_held_out: set[str]  # names of files
    held_out: set[str]
    text_ids: mock.Mock  # in the place of calibrate's: it keeps what it is given, and refuses

    def names_read(self) -> list[set[str]]:
        """The names of the files of each call of text_ids."""
        calls = []
        for call in self.text_ids.call_args_list:
            files = call.args[1]
            calls.append({file.name for file in files})
        return calls


@pytest.fixture
def split_library(cli, tmp_path, monkeypatch) -> SplitLibrary:
    """40 files in tmp_path, of which evaluation reads few, and fits and training the others. What
    is installed in the library's folder is not of it."""
    names = {f"{i}.py" for i in range(40)}
    for name in names:
        (tmp_path / name).write_text(name * 100)
    for folder in ("site-packages", "dist-packages"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text(folder * 100)
    held_out = {name for name in names if zlib.crc32(name.encode()) % 16 == 0}
    assert 0 < len(held_out) < 10
    text_ids = mock.Mock(side_effect=UserError("read"))
    monkeypatch.setattr(calibrate, "STDLIB", tmp_path)
    monkeypatch.setattr(calibrate, "text_ids", text_ids)
    return SplitLibrary(names - held_out, held_out, text_ids)


def test_what_evaluation_reads_is_never_calibrated_on(cli, split_library):
    assert "read" in cli.refusal("fit --method sals")
    assert split_library.names_read() == [split_library.not_held_out]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_is_one_rewritten_line_and_in_a_log_a_line_each_ten_seconds(
    is_terminal, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with generate.ProgressLine("windows", total=8) as progress:
        progress.started -= 12
        progress.tick(3)  # at once: not shown
        for _ in range(2):
            progress.last_shown -= 11
            progress.tick()
    lines = ["windows: 4 of 8, 12 s left", "windows: 5 of 8, 7 s left"]
    if is_terminal:
        lines = [*(line.ljust(79) for line in lines), " " * 79]
        expected = "".join(f"\r{line}" for line in lines) + "\r"
    else:
        expected = "".join(f"{line}\n" for line in lines)
    assert capsys.readouterr() == ("", expected)


def test_a_fit_of_fdc_says_when_the_dense_model_predicts_nothing():
    facts = {
        "rate": 0.0,
        "mean rank of q and k": 16.0,
        "mean rank of v": 16.0,
        "floor": 0.99,
        "perplexity of dense's": 1.0,
        "accuracy of dense's": math.nan,
    }
    report = calibrate.report_fit("fdc", facts)
    assert report.endswith("no token of this text right: try another text.")
    facts["accuracy of dense's"] = 0.995
    report = calibrate.report_fit("fdc", facts)
    assert "It predicts 99.5% as many tokens right" in report


def test_fit_is_of_one_process(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", "fit", "--method", "sals"])
    monkeypatch.setattr(generate, "is_one_of_several_processes", lambda: True)
    with pytest.raises(UserError, match="start it with python, not with torchrun"):
        calibrate.run()


# ------------------------------------------------- a tiny checkpoint, command lines in this process


class CommandLine:
    """Runs command lines in this process, on the CPU unless they name CUDA. A line begins with
    generate, with a command of calibrate, or with a name of `programs`."""

    programs = {}  # others, by the word that a line begins with

    def __init__(self, monkeypatch, capsys):
        self.monkeypatch = monkeypatch
        self.capsys = capsys
        self.out = ""
        self.err = ""

    def __call__(self, line: str, stdin: str | None = None) -> tuple[int, str, str]:
        """Exit code, stdout and stderr; the last two are kept as `out` and `err`."""
        if stdin is not None:
            data = io.BytesIO(stdin.encode())
            # The locale's encoding is another: a command reads UTF-8 all the same.
            self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, "ascii", newline=""))
        program, *argv = shlex.split(line)
        if "cuda" not in argv:
            self.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        code = 0
        try:
            self.run(program, argv)
        except SystemExit as stop:
            code = stop.code or 0
        self.out, self.err = self.capsys.readouterr()
        return code, self.out, self.err

    def run(self, program: str, argv: list[str]) -> None:
        """Runs a program with these arguments; it may raise SystemExit."""
        if program == "generate":
            self.monkeypatch.setattr(sys, "argv", ["command", *argv])
            generate.main()
        elif program in self.programs:
            self.monkeypatch.setattr(sys, "argv", ["command", *argv])
            generate.run_command(self.programs[program])
        else:
            self.monkeypatch.setattr(sys, "argv", ["command", program, *argv])
            generate.run_command(calibrate.run)

    def json(self, line: str, stdin: str | None = None) -> dict:
        """What a command prints as the last line of stdout."""
        code, out, err = self(f"{line} --json", stdin)
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    def refusal(self, line: str) -> str:
        """The one line in which a command ends that cannot run."""
        # a slow machine would show it
        self.monkeypatch.setattr(generate.ProgressLine, "tick", lambda *_: None)
        code, out, err = self(line)
        assert code == 2, err
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        return err


WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
NORM = "model.norm.weight"
UP = "model.layers.1.mlp.up_proj.weight"


def fitted(tests) -> list[str]:
    """The artifacts of the methods of `tests`; each has the name of a method."""
    return sorted({row.artifact for row in tests.METHODS.values() if row.fit})


def put_artifact(folder: Path, method: str, tensors: dict, model: Llama | None = None) -> None:
    """As fitted to this folder's model by default; None: without this tensor."""
    model = model or load_model(folder, CPU, torch.float32)
    # A file wants tensors that share no memory.
    copies = {name: t.contiguous().clone() for name, t in tensors.items() if t is not None}
    path = compress.artifact_path(folder, method)
    save_artifact(copies, path, compress.model_identity(model))


def tiny_checkpoint(folder: Path, tests=sys.modules[__name__], **changes) -> Path:
    """A folder with a random model that nano's tokenizer fits, calibrated for every method of
    `tests`."""
    model = tiny_model(vocab_size=4096, tied=True, **changes)
    save_checkpoint(model, folder)
    shutil.copy(NANO / "tokenizer.model", folder)
    model = load_model(folder, CPU, torch.float32)
    for method in fitted(tests):
        put_artifact(folder, method, artifact_of(method, model), model)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, request):
    """A tiny checkpoint with bases of five eighths of the rank for SALS."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", request.module)
    put_artifact(folder, "sals", compress.random_artifact("sals", tiny_config()))
    return folder


def is_held_out(name: str) -> bool:
    """Whether evaluation reads a file of the standard library, and so calibration does not."""
    return zlib.crc32(name.encode()) % 16 == 0


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The largest files of the standard library: two that evaluation reads, six others."""
    folder = tmp_path_factory.mktemp("library")
    room = {True: 2, False: 6}  # by is_held_out
    for file in sorted(calibrate.STDLIB.glob("*.py"), key=lambda file: -file.stat().st_size):
        held = is_held_out(file.name)
        if room[held] > 0:
            room[held] -= 1
            (folder / file.name).write_bytes(file.read_bytes()[:40000])
    return folder


@pytest.fixture
def cli(checkpoint, library, monkeypatch, capsys):
    """A CommandLine whose --checkpoint is the tiny one by default, and whose text a small one."""
    monkeypatch.setattr(generate, "NANO", checkpoint)
    monkeypatch.setattr(calibrate, "STDLIB", library)
    return CommandLine(monkeypatch, capsys)


@pytest.fixture
def folder(cli, checkpoint, tmp_path, monkeypatch):
    """A copy of the checkpoint, for tests that change it; cli takes it by default."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint, path)
    monkeypatch.setattr(generate, "NANO", path)
    return path


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_key(path: Path, name: str) -> None:
    data = json.loads(path.read_text())
    del data[name]
    path.write_text(json.dumps(data))


def put_weight(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replaces a tensor of the checkpoint, or with None drops it."""
    tensors = load_file(folder / WEIGHTS)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, folder / WEIGHTS)


def move_weights(folder: Path, **shards: str) -> None:
    """They go out of the folder; its index names shards."""
    shutil.move(folder / WEIGHTS, folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))


def truncate(path: Path, share: float = 0.5) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def contents(folder: Path) -> dict[Path, bytes]:
    """The files of a folder."""
    return {path: path.read_bytes() for path in folder.iterdir()}


# --------------------------------------------------------------- files: damaged, read, and replaced

BAD_CONFIGS = [  # changes to config.json, and what the error says
    ({"head_dim": 1 << 31}, "head_dim is"),
    ({"head_dim": 15}, "RoPE rotates pairs of dims"),
    ({"num_hidden_layers": 500_000}, "38 tensors cannot be 500000 layers"),
    ({"num_hidden_layers": 2}, "asks for none; the two do not belong together"),
    ({"intermediate_size": 63}, "do not belong together"),
    ({"num_key_value_heads": 3}, "cannot share"),
    ({"max_position_embeddings": None}, "max_positions"),
    ({"hidden_size": None}, "dim"),
    ({"rope_theta": math.inf}, "rope_theta is inf"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": [2]}}, "not a usable config"),
    ({"rope_scaling": {"rope_type": "linear"}}, "not a usable config"),
    ({"rope_scaling": {"rope_type": "linear", "factor": math.inf}}, "not a usable config"),
    ({"num_attention_heads": 0, "head_dim": None}, "not a usable config"),
    ({"quantization_config": "x"}, "not a usable config"),
    ({"hidden_size": True}, "dim is True"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"model_type": "gpt2"}, "'gpt2' is not supported"),
    ({"model_type": "mistral", "sliding_window": 8}, "sliding window"),
    ({"hidden_act": "gelu"}, "'gelu' is not supported; supported: silu"),
    ({"quantization_config": {"quant_method": "fp8"}}, "'fp8' is not supported"),
]


def assert_refused_and_nothing_written(message: str, cli, folder: Path) -> None:
    before = sorted(folder.iterdir())
    line = "generate --method sals --prompt 'hello there' --max_new_tokens 20"
    assert message in cli.refusal(line)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("changes, message", BAD_CONFIGS)
def test_a_config_that_cannot_be_used_ends_in_one_line(changes, message, cli, folder):
    edit_json(folder / "config.json", **changes)
    assert_refused_and_nothing_written(message, cli, folder)


def write_a_list_as_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def write_an_index_of_nothing(folder: Path) -> None:
    move_weights(folder)
    edit_json(folder / INDEX, weight_map=None)


def put_nan_into_a_norm(folder: Path) -> None:
    put_weight(folder, NORM, torch.full((48,), torch.nan))


def put_a_smaller_vocabulary(folder: Path) -> None:
    save_checkpoint(tiny_model(vocab_size=100), folder)


def put_the_artifact_of_another_model(folder: Path) -> None:
    put_artifact(folder, "sals", {"0.basis": torch.eye(64)}, tiny_model())


DAMAGE = [  # what is done to the folder, and what the error says
    (lambda f: (f / "config.json").unlink(), "no config.json"),
    (lambda f: truncate(f / "config.json"), "config.json: not valid JSON"),
    (write_a_list_as_config, "config.json: not a JSON object"),
    (
        lambda f: drop_key(f / "config.json", "rms_norm_eps"),
        "not a usable config; it lacks 'rms_norm_eps'",
    ),
    (write_an_index_of_nothing, "index.json: no weight_map in it"),
    (lambda f: move_weights(f), "saved as safetensors"),
    (
        lambda f: move_weights(f, norm="../outside.safetensors"),
        "outside.safetensors is missing",
    ),
    (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), "saved as safetensors"),
    (lambda f: truncate(f / WEIGHTS), "download it again"),
    (put_nan_into_a_norm, "not finite in torch.float32; download it"),
    (lambda f: put_weight(f, UP, None), f"tensor {UP} is missing, config.json asks for [64, 48]"),
    (put_a_smaller_vocabulary, "outside the model's vocabulary of 100"),
    (lambda f: compress.artifact_path(f, "sals").unlink(), "calibrate.py fit"),
    (lambda f: truncate(compress.artifact_path(f, "sals")), "make it again"),
    (put_the_artifact_of_another_model, "was made for fingerprint "),
]


@pytest.mark.parametrize("damage, message", DAMAGE)
def test_damaged_folders_end_in_one_line(damage, message, cli, folder):
    damage(folder)
    assert_refused_and_nothing_written(message, cli, folder)


def test_logits_beyond_fp16_end_in_one_line(cli, folder):
    """The weights are within fp16's range. In bf16, as the error says, the same model runs."""
    norm = load_file(folder / WEIGHTS)[NORM]
    put_weight(folder, NORM, torch.full_like(norm, 6e4))
    line = "generate --prompt hello --max_new_tokens 3 --dtype"
    told = cli.refusal(f"{line} fp16")
    assert "not finite in torch.float16; use --dtype bf16 or fp32" in told
    assert cli(f"{line} bf16")[0] == 0


def test_weights_beyond_fp16_end_in_one_line(cli, folder):
    norm = load_file(folder / WEIGHTS)[NORM]
    put_weight(folder, NORM, torch.full_like(norm, 1e5))
    told = cli.refusal("generate --prompt hello --max_new_tokens 3 --dtype fp16")
    assert "model.norm.weight is not finite in torch.float16; use --dtype bf16" in told


def test_logits_that_become_nan_while_decoding_are_refused():
    engine = make_engine(tiny_model(), "dense", 1, 9)
    engine.prefill([[5]])
    nan_logits = torch.full((1, 96), torch.nan)
    with mock.patch.object(engine, "decode", lambda *_: nan_logits):
        with pytest.raises(UserError, match="not finite in torch.float32; use"):
            decode_rows(engine, 3, lambda ids: False)


def test_the_index_names_the_files(folder):
    """A tensor is read from the file that the index has for it, whatever other files hold."""
    before = load_model(folder, CPU, torch.float32).state_dict()
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {"a": {"old": torch.ones(2)}, "b": {"old": torch.ones(2)}}
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        own, other = ("a", "b") if i % 2 == 0 else ("b", "a")
        weight_map[name] = own
        files[own][name] = tensor
        files[other][name] = tensor + 1  # left from an older version, say
    for file, held in files.items():
        save_file(held, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    after = load_model(folder, CPU, torch.float32).state_dict()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def test_a_tied_matrix_may_have_the_name_of_the_output(folder):
    expected = load_model(folder, CPU, torch.float32).output.weight.clone()
    put_weight(folder, "model.embed_tokens.weight", None)
    put_weight(folder, "lm_head.weight", expected)
    model = load_model(folder, CPU, torch.float32)
    assert model.output.weight is model.tok_embeddings.weight
    assert torch.equal(model.output.weight, expected)


def test_a_tied_matrix_that_the_files_hold_twice_is_two(folder):
    """The config says tied, but the files count."""
    output = load_model(folder, CPU, torch.float32).output.weight.clone()
    put_weight(folder, "lm_head.weight", output)
    put_weight(folder, "model.embed_tokens.weight", output + 1)
    model = load_model(folder, CPU, torch.float32)
    assert not model.config.tied
    assert torch.equal(model.output.weight, output)
    assert torch.equal(model.tok_embeddings.weight, output + 1)


def wrong_tensors(tensor: torch.Tensor, kind: type, n_dims: int) -> list:
    """Tensors in the place of an artifact's, and what their errors say."""
    wrong = [
        (None, "is missing"),
        (torch.stack((tensor, tensor)), r"is \["),
        (tensor.to(torch.complex64), "numbers"),
        (tensor.to(torch.int8), "numbers"),
    ]
    if n_dims > 0:
        wrong.append((torch.cat((tensor, tensor)), r"is \["))
        wrong.append((tensor[:-1], r"is \["))
    if kind is float:
        wrong.append((tensor.to(torch.int32), "numbers"))
        wrong.append((tensor * torch.nan, "not finite"))
    else:
        wrong.append((tensor.to(torch.float32), "numbers"))
        if n_dims > 0:
            wrong.append((tensor + 1, f"is not a permutation of 0 .. {tensor.shape[-1] - 1}"))
    return wrong


@over("method", fitted)
def test_an_artifact_is_held_to_the_tensors_of_its_method(method, checkpoint, tmp_path):
    model = load_model(checkpoint, CPU, torch.float32)
    good = artifact_of(method, model)
    for name, (kind, *shape) in method_named(method).shapes(model.config).items():
        for tensor, message in wrong_tensors(good[name], kind, len(shape)):
            put_artifact(tmp_path, method, good | {name: tensor}, model)
            with pytest.raises(UserError, match=f"{re.escape(name)} .*{message}"):
                load_artifact(tmp_path, method, model)


@over("method", fitted)
def test_an_artifact_that_has_all_tensors_of_its_method_is_loaded(method, checkpoint, tmp_path):
    model = load_model(checkpoint, CPU, torch.float32)
    for tensors in (artifact_of(method, model), compress.random_artifact(method, model.config)):
        put_artifact(tmp_path, method, tensors, model)
        assert load_artifact(tmp_path, method, model).keys() == tensors.keys()


def test_a_model_that_elitekv_cannot_take_is_not_told_to_be_fitted(tmp_path):
    model = tiny_model(qk_norm=True)
    with pytest.raises(UserError, match="q/k norms"):
        load_artifact(tmp_path, "elitekv", model)


def test_an_uptrained_checkpoint_without_its_artifact_says_to_train_again(checkpoint, tmp_path):
    """`calibrate.py fit` would refuse it. One elite key for all heads is what older training
    wrote."""
    model = load_model(checkpoint, CPU, torch.float32)
    good = artifact_of("elitekv", model)
    model.config = dataclasses.replace(model.config, elitekv=True)
    put_artifact(tmp_path, "elitekv", good | {"elite": good["elite"][:, :1]}, model)
    with pytest.raises(UserError, match=r"elite is .*python -m extras.train --from FOLDER --out"):
        load_artifact(tmp_path, "elitekv", model)
    (tmp_path / "elitekv.safetensors").unlink()
    with pytest.raises(UserError, match=r"calibrated first: python -m extras.train"):
        load_artifact(tmp_path, "elitekv", model)


def replace_two_files(folder: Path) -> None:
    """A config.json and weights that are no model's."""
    with compress.replacing(folder, "two") as partial:
        (partial / "config.json").write_text("{}")
        save_artifact({"a": torch.zeros(2)}, partial / WEIGHTS, {})


MISTAKES = [  # while a file is written
    OSError("No space left on device"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_while_files_are_written_leaves_the_old_ones(mistake, folder, tmp_path):
    before = contents(folder)

    def write_half(path, data):
        path.write_text("half")
        raise mistake

    with mock.patch.object(Path, "write_bytes", write_half):
        for target in (folder, tmp_path / "new"):
            with pytest.raises(type(mistake), match=f"^{mistake}$"):
                replace_two_files(target)
        with pytest.raises(type(mistake), match=f"^{mistake}$"):
            save_artifact({"a": torch.zeros(2)}, folder / "b.safetensors", {})
    assert contents(folder) == before
    assert not (tmp_path / "new").exists()


def test_files_are_replaced_together(folder, tmp_path):
    before = contents(folder)
    replace_two_files(folder)
    after = contents(folder)
    assert after.keys() == before.keys()
    assert after[folder / "config.json"] == b"{}"
    assert after[folder / WEIGHTS] != before[folder / WEIGHTS]
    # Whoever can read other files can read these.
    (tmp_path / "plain").write_text("")
    assert (folder / WEIGHTS).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_config_json_is_replaced_last(folder, monkeypatch):
    """Whoever finds the new config finds the new weights, too."""
    replaced = []
    replace = Path.replace

    def watched_replace(path, target):
        replaced.append(path.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched_replace)
    replace_two_files(folder)
    assert replaced[-2:] == [WEIGHTS, "config.json"]


def test_two_that_write_one_file_do_not_meet(tmp_path):
    """Each writes into a folder of its own. One that a killed process has left long ago goes."""
    killed = tmp_path / "a.killed.partial"
    killed.mkdir()
    os.utime(killed, (0, 0))
    with compress.replacing(tmp_path, "a") as first:
        (first / "a").write_text("first")
        with compress.replacing(tmp_path, "a") as second:
            (second / "a").write_text("second")
        assert (tmp_path / "a").read_text() == "second"
    assert (tmp_path / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_files_are_utf_8_in_every_locale(tmp_path):
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        calibrate.save_csv(tmp_path / "t.csv", ["caf\u00e9"], [{"caf\u00e9": "\udce9"}])
        # What UTF-8 cannot hold, half of a surrogate pair, becomes a question mark.
        assert generate.read_text(tmp_path / "t.csv") == "caf\u00e9\n?\n"
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


# ----------------------------------------------------------------------------- the Python API (LLM)

PROMPT = "the magic number for silent lantern"


def small_llm(checkpoint: Path, **options) -> generate.LLM:
    return generate.LLM(checkpoint, **{"device": "cpu", "max_seq_length": 64, **options})


# ---- generate


def test_a_prompt_is_a_text_ids_or_messages(folder):
    """Ids in a list, a tuple, an array or a tensor, alone or as the one prompt of a list."""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    llm = small_llm(folder)
    messages = [{"role": "user", "content": PROMPT}]
    for prompt in (PROMPT, messages):
        ids = llm.encode(prompt)
        expected = small_llm(folder).generate(ids, 3, ignore_eos=True).token_ids
        forms = [
            prompt,
            ids,
            tuple(ids),
            np.array(ids),
            torch.tensor(ids),
            list(np.array(ids)),
            list(torch.tensor(ids, dtype=torch.int32)),
        ]
        for form in forms:
            output = llm.generate(form, 3, ignore_eos=True)
            assert output.token_ids == expected
            outputs = llm.generate([form], 3, ignore_eos=True)
            assert [each.token_ids for each in outputs] == [expected]
            streamed = "".join(llm.stream(form, 3, ignore_eos=True))
            assert streamed == output.text
        llm.prefill(prompt)
        assert llm.token_ids == [ids]
    assert llm.chat(messages, 3, ignore_eos=True).token_ids == expected


def test_an_array_of_two_dims_is_a_list_of_prompts(checkpoint):
    prompts = np.array([[5, 6, 7], [8, 9, 10]])
    outputs = small_llm(checkpoint).generate(prompts, 2, ignore_eos=True)
    assert [output.prompt_tokens for output in outputs] == [3, 3]


NO_PROMPTS = [  # and what the error says
    ([5, -6, 7], "token id -6 is outside the model's vocabulary of 4096"),
    (torch.tensor([5, 4096]), "token id 4096 is outside"),
    ([5.5], "token ids are whole numbers, not 5.5"),
    ([True], "token ids are whole numbers, not True"),
    (7, "a prompt is a text, token ids or a chat's messages, not int"),
    ([None], "a prompt is a text, token ids or a chat's messages, not None"),
    ([{"role": "user"}], "a chat is a list of messages"),
    ([{"content": "who"}], "a chat is a list of messages"),
    ([], "there is no prompt"),
    ([[]], "no tokens"),
]


@pytest.mark.parametrize("wrong, message", NO_PROMPTS)
def test_what_is_no_prompt_is_refused(wrong, message, checkpoint):
    with pytest.raises(UserError, match=re.escape(message)):
        small_llm(checkpoint).generate(wrong, 2)


@pytest.mark.parametrize("wrong", ["hi", [], ["hi"], {"role": "user", "content": "hi"}])
def test_what_is_no_chat_is_refused(wrong, checkpoint):
    with pytest.raises(UserError, match="a chat is a list of messages"):
        small_llm(checkpoint).chat(wrong)


def test_a_stream_is_of_one_prompt(checkpoint):
    with pytest.raises(UserError, match="stream takes one prompt"):
        small_llm(checkpoint).stream(["a", "b"])


def test_random_weights_take_ids_and_no_text():
    llm = generate.LLM(tiny_config(), device="cpu", max_seq_length=64)
    output = llm.generate([5, 6, 7], 3)
    assert output.text == ""
    assert len(output.token_ids) == 3
    with pytest.raises(UserError, match="no tokenizer; give token ids"):
        llm.generate("text", 3)


def test_no_new_tokens_read_alone(checkpoint):
    llm = small_llm(checkpoint)
    output = llm.generate(PROMPT, 0)
    assert output.token_ids == []
    assert output.finish_reason == "length"
    assert int(llm.engine.pos[0]) == output.prompt_tokens
    report = llm.report()
    assert report["decode_tokens_per_s"] is None
    assert report["first_token_s"] is None
    never_paused = small_llm(checkpoint).generate(PROMPT, 5)
    assert llm.generate([[]], 5, follow=True)[0].token_ids == never_paused.token_ids


def test_an_output_outlives_its_llm(checkpoint):
    """It can be stored, and holds no model. Nor does a stream that was dropped."""
    models = []

    def answer() -> generate.Output:
        llm = small_llm(checkpoint)
        models.append(weakref.ref(llm.model))
        output = llm.generate(PROMPT, 3, ignore_eos=True)
        next(llm.stream(PROMPT, 3, ignore_eos=True))
        return output

    gc.disable()  # memory is free at once, without a collection of cycles
    output = answer()
    gc.enable()
    assert models[0]() is None

    stored = pickle.dumps(output)
    assert pickle.loads(stored) == output
    assert len(stored) < 1000
    names = {"text", "token_ids", "prompt_tokens", "finish_reason"}
    assert set(dataclasses.asdict(output)) == names
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 3


TEXTS_OF_GROUPS = ["who", "hello there", "the magic number", "and so on", "where is it"]


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_prompts_are_served_in_groups_and_rows_without_one_are_idle(method, checkpoint, tmp_path):
    """Each prompt has the output that it has alone, whatever its row, and the rows before it."""
    texts = TEXTS_OF_GROUPS
    alone = {}
    for text in texts:
        alone[text] = small_llm(checkpoint, method=method).generate(text, 5, ignore_eos=True)
    llm = small_llm(checkpoint, method=method)
    for prompts in (texts[:3], texts, texts[3:], texts[1:2]):
        outputs = llm.generate(prompts, 5, ignore_eos=True)
        assert len(llm.token_ids) == 3  # rows, by the first call
        assert outputs == [alone[text] for text in prompts]
        assert llm.report()["token_ids"] == [output.token_ids for output in outputs]

    # The last call had one prompt: the other rows hold nothing, and nothing of them is saved.
    assert llm.engine.pos[1:].tolist() == [0, 0]
    assert llm.token_ids[1:] == [[], []]
    n_written = len(llm.token_ids[0]) - 1  # a step is still to write the last token
    assert llm.held_memory().tokens == n_written
    llm.save(tmp_path / "cache")
    assert generate.saved_facts(tmp_path / "cache").lengths == [n_written]


@over("method, options", lambda tests: tests.CASES)
def test_a_row_decodes_alike_beside_an_idle_one(method, options):
    """The other row had a prompt before, which was longer than what a method keeps of it."""
    prompts = [random_ids(60), random_ids(60, 1)]
    logits = []
    for second in ([], prompts[1]):
        engine = make_engine(tiny_model(), method, 2, 80, **options)
        engine.prefill(prompts)
        engine.prefill([prompts[0], second])
        for token in random_ids(5, 2):
            engine.tokens.fill_(token)
            engine.step()
            logits.append(engine.logits[0].clone())
        engine.append([random_ids(3, 3), random_ids(3, 4)])  # the idle one goes on, too
    for beside_idle, beside_prompt in zip(logits[:5], logits[5:], strict=True):
        assert error(beside_idle, beside_prompt) < 1e-4


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_an_idle_row_is_read_again_when_it_is_followed(method, checkpoint):
    """Beside a row that goes on, it loses its place in the cache, but keeps its ids."""
    llm = small_llm(checkpoint, method=method)
    llm.generate(TEXTS_OF_GROUPS[:3], 5, ignore_eos=True)
    llm.generate(" then", 50, ignore_eos=True, follow=True)
    expected = small_llm(checkpoint, method=method)
    expected.prefill([list(ids) for ids in llm.token_ids])
    outputs = []
    for each in (llm, expected):
        outputs.append(each.generate([" so"] * 3, 4, follow=True, ignore_eos=True))
    assert outputs[0] == outputs[1]


def test_a_file_of_more_or_longer_rows_is_refused_before_anything_is_built(checkpoint, tmp_path):
    saved = small_llm(checkpoint, batch_size=2, max_seq_length=40)
    saved.prefill([random_ids(10), random_ids(3)])
    saved.save(tmp_path / "two")
    llm = generate.LLM(checkpoint, device="cpu", batch_size=1)
    with pytest.raises(UserError, match="needs a batch_size of 2, not 1"):
        llm.load(tmp_path / "two")
    assert llm.engine is None and llm.max_seq_length is None
    llm.generate([random_ids(100)], 2)  # which 40 tokens would not hold
    short = small_llm(checkpoint, batch_size=2, max_seq_length=5)
    with pytest.raises(UserError, match="needs a max_seq_length of 10, not 5"):
        short.load(tmp_path / "two")
    assert short.engine is None


def test_a_row_of_one_token_is_saved_after_others_took_its_place(folder, tmp_path):
    """A row that idles loses its place in the cache; its one token is read again to be saved."""
    llm = generate.LLM(folder, device="cpu", batch_size=2, max_seq_length=64)
    llm.prefill([[5, 6], [7]])
    llm.generate([[9]], 2, follow=True, ignore_eos=True)
    llm.save(tmp_path / "cache")
    assert generate.saved_facts(tmp_path / "cache").lengths[1] == 1


def test_a_follow_up_goes_on_after_a_stop_token_without_reading_again(folder, monkeypatch):
    """The stop token is in the row, and no part of the answer."""
    free = small_llm(folder).generate("hello", 20, ignore_eos=True)
    stop = free.token_ids[5]
    edit_json(folder / "config.json", eos_token_id=stop)
    llm = generate.LLM(folder, device="cpu", max_seq_length=80)
    answer = llm.generate("hello", 20)
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop)]
    assert llm.token_ids[0][-1] == stop
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("read again"))
    llm.generate(" how are you", 4, follow=True)


def test_a_reading_that_fails_leaves_no_rows_of_another_prompt(checkpoint):
    """Ctrl-C, say, while another prompt is read: the row is still the document's, and is read again
    when it is followed."""
    llm = small_llm(checkpoint)
    document = llm.encode("once upon a time there was a green river")
    llm.prefill(document)
    with mock.patch.object(generate.Engine, "check_logits", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            llm.generate([7] * (len(document) - 2), 3)
    assert llm.token_ids == [document]
    fresh = small_llm(checkpoint)
    fresh.prefill(document)
    outputs = []
    for each in (llm, fresh):
        outputs.append(each.generate(" who", 6, ignore_eos=True, follow=True))
    assert outputs[0] == outputs[1]


def test_weights_are_folded_once_where_an_engine_could_not_be_built(folder, monkeypatch):
    """A second try, say with another max_seq_length, runs over the weights that the first one has
    folded."""
    ids = random_ids(20)
    expected = generate.LLM(folder, "fdc", device="cpu").generate(ids, 4, ignore_eos=True)
    llm = generate.LLM(folder, "fdc", device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(generate, "Engine", mock.Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(torch.OutOfMemoryError):
            llm.generate(ids, 4)
    assert llm.generate(ids, 4, ignore_eos=True).token_ids == expected.token_ids


def test_a_compiler_without_memory_says_so(checkpoint, monkeypatch):
    """And not that the step cannot be compiled: with fewer rows it can."""
    compiler_error = torch._dynamo.exc.TorchDynamoException("backend='inductor' raised:")
    cause = torch.OutOfMemoryError("8 GB")
    with monkeypatch.context() as patch:
        patch.setattr(generate, "Engine", mock.Mock(side_effect=compiler_error))
        with pytest.raises(UserError, match="cannot be compiled"):
            small_llm(checkpoint).generate(PROMPT, 1)
        compiler_error.inner_exception = RuntimeError("another wrapping")
        compiler_error.inner_exception.__cause__ = cause
        with pytest.raises(torch.OutOfMemoryError, match="8 GB"):
            small_llm(checkpoint).generate(PROMPT, 1)


# ---- random numbers


def test_each_call_draws_anew(checkpoint):
    llm = small_llm(checkpoint)
    drawn = [llm.generate(PROMPT, 1, temperature=2.0).token_ids[0] for _ in range(8)]
    assert len(set(drawn)) > 4


def test_forked_rows_draw_for_themselves(checkpoint):
    """The token after a prompt is drawn when decoding starts, not when the prompt is read."""
    llm = small_llm(checkpoint, batch_size=8)
    llm.prefill(PROMPT)
    llm.fork(0, 8)
    outputs = llm.generate([[]] * 8, 1, temperature=2.0, follow=True)
    drawn = [output.token_ids[0] for output in outputs]
    assert len(set(drawn)) > 4


def test_a_saved_row_draws_each_time_that_it_is_loaded(checkpoint, tmp_path):
    """By the sampling and the seed of that time."""
    llm = small_llm(checkpoint)
    llm.prefill(PROMPT)
    llm.save(tmp_path / "read")
    greedy = small_llm(checkpoint).generate(PROMPT, 4)
    llm.generate([[]], 4, temperature=2.0, follow=True)
    llm.load(tmp_path / "read")
    assert llm.generate([[]], 4, follow=True)[0].token_ids == greedy.token_ids

    drawn = []
    for seed in range(6):
        llm = small_llm(checkpoint, seed=seed)
        llm.load(tmp_path / "read")
        drawn.append(llm.generate([[]], 1, temperature=2.0, follow=True)[0].token_ids[0])
    assert len(set(drawn)) > 3


def draws(llm: generate.LLM) -> list[int]:
    return llm.generate(PROMPT, 8, temperature=2.0, ignore_eos=True).token_ids


def test_an_llm_leaves_the_processs_random_numbers_alone(checkpoint):
    """And does not depend on them."""
    of_each_seed = []
    for seed in (123, 999):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        llm = small_llm(checkpoint)
        first = draws(llm)
        second = draws(llm)
        assert first != second
        assert torch.get_rng_state().equal(state)
        of_each_seed.append((first, second))
    assert of_each_seed[0] == of_each_seed[1]


def test_random_numbers_are_the_llms_own(checkpoint):
    llm = small_llm(checkpoint)
    expected = [draws(llm), draws(llm)]
    again = small_llm(checkpoint)
    assert draws(again) == expected[0]
    draws(small_llm(checkpoint))  # another one resets nothing
    assert draws(again) == expected[1]
    assert draws(small_llm(checkpoint, seed=1)) != expected[0]


# ---- stream


def test_a_stream_that_is_left_early_is_followed_without_reading_again(checkpoint, monkeypatch):
    """The row holds what was shown, at each token, and the report counts that."""
    llm = small_llm(checkpoint)
    pieces = llm.stream("hello there", 8, ignore_eos=True)
    shown = next(pieces) + next(pieces)
    assert llm.tokenizer.decode(llm.token_ids[0]) == "hello there" + shown
    pieces.close()
    assert llm.tokenizer.decode(llm.token_ids[0]) == "hello there" + shown
    assert len(llm.token_ids[0]) == int(llm.engine.pos[0])
    assert llm.report()["text"] == [shown]
    assert llm.report()["new_tokens"] == [2]

    with monkeypatch.context() as patch:
        patch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("read again"))
        more = llm.generate([[]], 6, ignore_eos=True, follow=True)[0]
    never_left = small_llm(checkpoint).generate("hello there", 8, ignore_eos=True)
    assert more.token_ids == never_left.token_ids[2:]
    assert shown + more.text == never_left.text


USES_OF_THE_CACHE = {
    "stream": lambda llm, path: "".join(llm.stream("who", 4)),
    "generate": lambda llm, path: llm.generate("who", 4),
    "prefill": lambda llm, path: llm.prefill("who"),
    "ask": lambda llm, path: llm.ask("who", 4),
    "fork": lambda llm, path: llm.fork(0, 1),
    "crop": lambda llm, path: llm.crop(2),
    "save": lambda llm, path: llm.save(path),
    "load": lambda llm, path: llm.load(path),
}


@pytest.mark.parametrize("name", USES_OF_THE_CACHE)
def test_a_stream_ends_when_something_else_uses_the_cache(name, checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill("who")
    llm.save(tmp_path / "cache")
    pieces = llm.stream(PROMPT, 12, ignore_eos=True)
    assert next(pieces) + next(pieces)
    USES_OF_THE_CACHE[name](llm, tmp_path / "cache")
    held = [list(ids) for ids in llm.token_ids]
    assert list(pieces) == []
    assert llm.token_ids == held
    expected = small_llm(checkpoint).generate(PROMPT, 6)
    assert llm.generate(PROMPT, 6).token_ids == expected.token_ids


# ---- ask


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("method", ["dense", "sals"])
def test_each_question_is_answered_from_the_document(method, rows, checkpoint):
    """Whatever the number of rows, without reading the document again, and it is there afterwards.
    An answer is what `generate` would make of the question, up to the end of its line."""
    document = "once upon a time there was a green river"
    questions = ["who is it", "where is it", "what is the magic number for green river"]
    size = {"method": method, "max_seq_length": 128}
    expected = []
    for question in questions:
        llm = small_llm(checkpoint, **size)
        llm.prefill(document)
        expected.append(llm.generate(f"\n{question}", 8, follow=True))

    llm = small_llm(checkpoint, batch_size=rows, **size)
    llm.prefill(document)
    held = [list(ids) for ids in llm.token_ids]
    positions = llm.engine.pos.tolist()
    for _ in range(2):
        with mock.patch.object(generate.Engine, "prefill", side_effect=AssertionError):
            answers = llm.ask(questions, 8)
        report = llm.report()
        assert report["prompt_tokens"] == [answer.prompt_tokens for answer in answers]
        for answer, text, whole in zip(answers, report["text"], expected, strict=True):
            n = len(answer.token_ids)
            assert answer.token_ids == whole.token_ids[:n]
            assert answer.prompt_tokens == whole.prompt_tokens
            assert answer.text == text.strip()
            is_whole = n == len(whole.token_ids)
            assert answer.finish_reason == (whole.finish_reason if is_whole else "stop")
        assert llm.token_ids == held
        assert llm.engine.pos.tolist() == positions
    assert llm.ask(questions[1], 8) == answers[1]  # one question, one answer
    assert llm.generate(f"\n{questions[2]}", 8, follow=True) == expected[2]


def test_an_answer_of_one_line_may_begin_with_a_new_one():
    llm = generate.LLM(max_seq_length=256, device="cpu")
    llm.prefill(
        "The magic number for green river is 48213. The magic number for red hill is 90417."
    )
    answer = llm.ask("Question: What is the magic number for green river?")
    assert answer.text == "Answer: The magic number for green river is 48213."


def test_to_ask_needs_a_question(checkpoint):
    llm = small_llm(checkpoint)
    llm.prefill("once upon a time")
    with pytest.raises(UserError, match="there is no question"):
        llm.ask([])


# ---- the report


def test_a_report_counts_prompts_and_what_they_follow(checkpoint):
    llm = small_llm(checkpoint, batch_size=3)
    texts = ["", "", ""]  # of each row, all that it was given and has made
    calls = [  # follow, and the prompts
        (False, ["hello", "hello there", "who"]),
        (True, [" world", " world", " world"]),
    ]
    for follow, prompts in calls:
        outputs = llm.generate(prompts, 4, ignore_eos=True, follow=follow)
        for row in range(3):
            texts[row] += prompts[row] + outputs[row].text
        # The texts of outputs have the space before a first word.
        assert [llm.tokenizer.decode(ids) for ids in llm.token_ids] == texts
        lengths = [len(ids) for ids in llm.token_ids]
        assert llm.engine.pos.tolist() == [n - 1 for n in lengths]

        report = llm.report()
        assert report["prompt_tokens"] == [n - 4 for n in lengths]
        assert [output.prompt_tokens for output in outputs] == [n - 4 for n in lengths]
        assert report["new_tokens"] == [4, 4, 4]
        assert report["text"] == [output.text for output in outputs]
        bytes_of_a_token = 4 * 2 * 64 * 4  # layers, K and V, Hkv * D, fp32
        assert report["bytes_read_per_step"] == sum(lengths) * bytes_of_a_token
        llm.last_run.decode_s = 0.75  # four tokens take three steps, of three rows
        assert llm.report()["decode_tokens_per_s"] == 3 * 3 / 0.75


NEED_A_READING = [  # calls of an LLM that has read nothing, and what the error says
    (lambda llm: llm.report(), "nothing to report yet"),
    (lambda llm: llm.ask(["who?"]), "prefill or load what the questions"),
    (lambda llm: llm.fork(0, 2), "holds nothing yet"),
    (lambda llm: llm.save("nowhere"), "holds nothing yet"),
]


@pytest.mark.parametrize("call, message", NEED_A_READING)
def test_what_needs_a_reading_says_so(call, message, checkpoint):
    with pytest.raises(UserError, match=message):
        call(small_llm(checkpoint))


def test_more_prompts_than_rows_are_neither_followed_nor_read(checkpoint):
    llm = small_llm(checkpoint, batch_size=3)
    llm.generate(["hello", "hello there", "who"], 4)
    with pytest.raises(UserError, match="4 prompts cannot follow the 3 rows"):
        llm.generate(["a"] * 4, follow=True)
    with pytest.raises(UserError, match="4 prompts are more than 3 rows; set a larger batch_size"):
        llm.prefill(["a"] * 4)


# ---- crop, save and load


@pytest.mark.parametrize("method", ["dense", "sals", "kivi"])
def test_crop_takes_rows_back(method, checkpoint):
    """The row is as if its first n tokens had been read alone."""
    llm = small_llm(checkpoint, method=method)
    ids = llm.encode("once upon a time there was a green river")
    llm.generate(ids, 6, ignore_eos=True)
    for n in (len(ids) + 4, len(ids), 5, 1):
        llm.crop(n)
        held = list(llm.token_ids[0])
        assert len(held) == n
        assert int(llm.engine.pos[0]) == n
        fresh = small_llm(checkpoint, method=method)
        fresh.prefill(held)
        assert error(llm.engine.logits, fresh.engine.logits) < 1e-5
        outputs = []
        for each in (llm, fresh):
            outputs.append(each.generate([[]], 6, ignore_eos=True, follow=True)[0])
        assert outputs[0] == outputs[1]
        llm.crop(n)
    with pytest.raises(UserError, match="n 2: give a whole number in"):
        llm.crop(2)  # the row holds one token


def test_a_dense_cache_goes_back_without_reading(checkpoint, monkeypatch):
    llm = small_llm(checkpoint)
    llm.generate(PROMPT, 6, ignore_eos=True)
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("all is read again"))
    llm.crop(4)
    assert int(llm.engine.pos[0]) == 4


def test_rows_that_stopped_are_saved_as_their_ids_say(folder, tmp_path):
    """A row that stops runs on while others are made."""
    texts = ["hello", "and so on", "who"]
    free = small_llm(folder).generate(texts, 20, ignore_eos=True)
    edit_json(folder / "config.json", eos_token_id=free[0].token_ids[5])
    llm = small_llm(folder)
    outputs = llm.generate(texts, 20)
    assert outputs[0].finish_reason == "stop"
    assert "length" in [output.finish_reason for output in outputs]
    llm.save(tmp_path / "cache")
    again = small_llm(folder)
    again.load(tmp_path / "cache")
    assert again.token_ids == llm.token_ids
    lengths = generate.saved_facts(tmp_path / "cache").lengths
    assert lengths == [len(ids) for ids in llm.token_ids]


def test_saved_rows_fill_more_rows_in_turn(checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill(["who is it", "hello there"])
    llm.save(tmp_path / "cache")
    more = small_llm(checkpoint, batch_size=4)
    more.load(tmp_path / "cache")
    assert more.token_ids == llm.token_ids * 2
    assert more.token_ids[0] != more.token_ids[1]
    assert error(more.engine.logits, llm.engine.logits.repeat(2, 1)) < 1e-6
    assert more.report()["prompt_tokens"] == [len(ids) for ids in llm.token_ids] * 2


def test_saved_rows_need_as_many_rows(checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill(["who is it", "hello there"])
    llm.save(tmp_path / "cache")
    fewer = small_llm(checkpoint, batch_size=1)
    with pytest.raises(UserError, match="needs a batch_size of 2, not 1; raise batch_size"):
        fewer.load(tmp_path / "cache")


# ---- what an LLM refuses, and its help


BAD_ARGUMENTS = [  # of LLM, and what the error says
    ({"dtype": "float16"}, "dtype float16: choose from auto, bf16, fp16, fp32"),
    ({"weights": "int4"}, "weights int4: choose from None, int8"),
    ({"device": "mps"}, "device mps: choose from cpu, cuda"),
    ({"seed": None}, "seed None: give a whole number"),
    ({"seed": -1}, "seed -1: give a whole number in"),
    ({"batch_size": -1}, "batch_size -1: give a whole number in"),
    ({"batch_size": 2.5}, "batch_size 2.5: give a whole number in"),
    ({"max_seq_length": 0}, "max_seq_length 0: give a whole number in"),
    ({"max_seq_length": 600}, "more than the model's 512; shorten max_seq_length"),
    ({"model": "x"}, "model is not a setting of dense; its settings are: none"),
    ({"method": "sals", "rank": 2}, "rank 2: give a number in"),
    ({"method": "sals", "skip": 0}, "skip 0: give a text"),
    ({"method": "topk", "keep": "12"}, "keep 12: give a number in"),
    ({"method": "topk", "keep": None}, "keep None: give a number in"),
    ({"method": "loki", "reduced": "no"}, "reduced no: give True or False"),
    ({"method": "sals", "sinks": 2.5}, "sinks 2.5: give a whole number in"),
    ({"method": "magic"}, "unknown method 'magic'"),
    ({"use_kernels": True}, "use use_kernels=False"),
]


@pytest.mark.parametrize("options, message", BAD_ARGUMENTS)
def test_an_llm_refuses_what_the_command_line_refuses_in_words_of_python(
    options, message, checkpoint, monkeypatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # with which kernels run on the CPU
    with pytest.raises(UserError, match=re.escape(message)) as refusal:
        small_llm(checkpoint, **options).generate(PROMPT, 1)
    assert "--" not in str(refusal.value)


BAD_CALLS = [  # arguments of its methods, and what the error says
    ({"top_p": 0.0}, "top_p 0.0: give a number in (0, 1]"),
    ({"top_k": -1}, "top_k -1: give a whole number in"),
    ({"temperature": -1.0}, "temperature -1.0: give a number in [0, inf)"),
    ({"temperature": math.nan}, "temperature nan: give a number in"),
    ({"temperature": "hot"}, "temperature hot: give a number in"),
    ({"max_new_tokens": -3}, "max_new_tokens -3: give a whole number in"),
    ({"max_new_tokens": 100}, "raise max_seq_length"),
]


@pytest.mark.parametrize("options, message", BAD_CALLS)
def test_a_call_refuses_what_the_command_line_refuses(options, message, checkpoint):
    llm = small_llm(checkpoint)
    llm.prefill(PROMPT)

    def stream(text, **options):
        return list(llm.stream(text, **options))

    for call in (llm.generate, llm.ask, stream):
        with pytest.raises(UserError, match=re.escape(message)) as refusal:
            call("who is it", **options)
        assert "--" not in str(refusal.value)


def test_a_command_in_an_error_of_python_can_be_run(checkpoint, tmp_path):
    """Dashes are left in it, in its options and in the folder's name."""
    folder = tmp_path / "a--b"
    shutil.copytree(checkpoint, folder)
    compress.artifact_path(folder, "sals").unlink()
    with pytest.raises(UserError) as refusal:
        small_llm(folder, method="sals").generate(PROMPT, 1)
    said = str(refusal.value)
    assert said.startswith(f"{folder}/")
    assert said.endswith(f"python calibrate.py fit --checkpoint {folder} --method sals")


def test_help_describes_every_argument_of_an_llm():
    for call in (generate.LLM, generate.LLM.generate, generate.LLM.ask, generate.LLM.stream):
        for name, parameter in inspect.signature(call).parameters.items():
            if name not in ("self", "settings"):
                assert parameter.annotation is not inspect.Parameter.empty, (call, name)
    described = inspect.getdoc(generate.LLM)
    for name in inspect.signature(generate.LLM).parameters:
        assert re.search(rf"^ *{name} ", described, flags=re.M), name
    for name in ("temperature", "top_k", "top_p", "ignore_eos", "follow"):
        assert f"{name}:" in inspect.getdoc(generate.LLM.generate)


# --------------------------------------------------------------------------------- the command line

# ---- what it refuses

BAD_COMMANDS = {  # and what the error says. few.txt is a text, again a folder with a tokenizer.
    # the method and its settings
    "generate --method magic": "unknown method 'magic'; the methods are: "
    "dense, sals, elitekv, loki, lrqk, fdc, topk, kivi",
    "generate --rank 0.5": "unrecognized arguments: --rank 0.5",
    f"generate --method kivi --residual {10**20}": f"{10**20}: give a whole number in [0, 1e9]",
    "generate --method sals --rank x": "--rank: invalid float value: 'x'",
    "generate --method sals --rank 0.9 --prompt 5": "fit --method sals --max_rank",
    "generate --method sals --skip 9 --prompt 5": "the layers are -4 to 3",
    "generate --method sals --skip first --prompt 5": "layer numbers",
    "generate --method elitekv --r 9 --prompt 5": "--r 9: a head has 1 to 8 pairs",
    "generate --method elitekv --d_ckv 49 --prompt 5": "the latent can have 1 to 48 dims",
    "generate --method lrqk --rank 8 --slots 0.5 --prompt 5": "give 0 (no hit/miss) or a mult",
    # before the dense run of the demo
    "generate --checkpoint nano --method sals --rank 2": "in [0, 1]",
    "generate --checkpoint nano-elitekv --method sals --prompt hi": "run it with --method eli",
    "generate --checkpoint nano-elitekv --method elitekv --r 4 --prompt hi": "are fixed; leave",
    # the prompt
    "generate": "no demo.txt",
    "generate --prompt ''": "empty",
    "generate --prompt 0": "no tokens",
    f"generate --prompt {'1' * 5000}": "more than the model's 512",
    "generate --prompt @nowhere.txt": "No such file",
    "generate --prompt @/dev/zero": "no regular file",
    "generate --prompt @latin.txt": "latin.txt: not UTF-8",
    "generate --prompt hi --system x": "no chat template",
    "generate --chat --prompt hello": "no chat template; put a chat_template.jinja into its folder",
    "generate --chat": "--chat needs a --prompt",
    "generate --chat --prompt hi --ask who?": "takes no --ask",
    "generate --prompt a --prompt b --ask who?": "--ask takes one --prompt",
    # rows and lengths
    "generate --prompt 5 --batch_size 0": "--batch_size: 0: give a number in [1, 4294967296]",
    "generate --prompt 5 --batch_size 2147483647": "not enough memory (",
    "generate --prompt 5 --prompt 6 --batch_size 1": "at least the number of prompts",
    "generate --prompt hello --max_seq_length 600": "the model's 512; shorten --max_seq_length",
    "generate --prompt 60 --max_seq_length 40": "raise --max_seq_length",
    # the model and the device
    "generate --device meta --prompt 5": "--device: invalid choice: 'meta'",
    "generate --device cuda": "--device cpu",
    "generate --checkpoint nowhere": "no such folder",
    "generate --checkpoint few.txt --random_weights llama-2-7b --prompt 5": "not both",
    "generate --random_weights llama-2-7b --prompt hi": "give --prompt N",
    "generate --random_weights llama-2-7b --prompt 5 --ask x": "tokenizer",
    # calibrate
    "fly": "invalid choice",
    "fit --checkpoint small --method loki": "has 4096 ids, the model's vocabulary 300",
    "fit --checkpoint nano-elitekv --method sals --windows 2 --window 64": "calibrated already",
    "fit --method sals --text none": "No such file",
    "fit --method sals --text nano/model.safetensors": "not UTF-8 text",
    "fit --out few.txt/x": "--out: no file can be written",
}


@pytest.fixture(scope="module")
def desk(checkpoint, tmp_path_factory):
    """The folder in which bad commands run."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "few.txt").write_text("too short")
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    save_checkpoint(tiny_model(vocab_size=300), folder / "small")
    (folder / "again").mkdir()
    for name in ("small", "again"):
        shutil.copy(NANO / "tokenizer.model", folder / name)
    added = {"added_tokens_decoder": {4096: {"content": "magic number"}}}
    (folder / "again" / "tokenizer_config.json").write_text(json.dumps(added))
    for path in (checkpoint, NANO, NANO.parent / "nano-elitekv"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def little_memory():
    """A GB more than this process has, where the system tells that."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    import resource

    pages = int(statm.read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    a_gigabyte_more = pages * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (a_gigabyte_more, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@over("line, message", lambda tests: tests.BAD_COMMANDS.items())
def test_bad_commands_end_in_one_line_before_anything_runs(
    line, message, desk, cli, monkeypatch, little_memory
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # --device cuda, too
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("ran"))
    monkeypatch.chdir(desk)
    before = sorted(desk.rglob("*"))
    assert message in cli.refusal(line)
    assert sorted(desk.rglob("*")) == before


@pytest.mark.parametrize("name, module", [("eval", "extras.evaluate"), ("train", "extras.train")])
def test_a_command_that_has_moved_says_where(name, module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calibrate.py", name, "--method", "sals"])
    with pytest.raises(SystemExit) as stop:
        generate.run_command(calibrate.run)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said == f"error: calibrate.py {name} has moved; run python -m {module}\n"


def test_a_failed_compile_ends_in_one_line(cli):
    no_compiler = {"cpp.cxx": (None, "/no/compiler"), "force_disable_caches": True}
    with torch._inductor.config.patch(no_compiler):
        told = cli.refusal("generate --prompt hello --compile")
    assert "/no/compiler" in told
    assert told.endswith("; use --no-compile\n")


ROOMS = [  # free memory in rows of 60 tokens, rows that are asked for, and what would fit
    (1.0, 2, "1 rows or 30 tokens a row"),
    (2.5, 4, "2 rows or 37 tokens a row"),
]


def bytes_of_a_row(method: str, options: dict) -> int:
    """Of 60 tokens, in all memory."""
    caches = make_engine(tiny_model(), method, 1, 60, **options).caches
    return sum(cache.bytes_formula() + cache.bytes_host() for cache in caches)


@pytest.mark.parametrize("method, options", [("dense", {}), ("lrqk", LRQK)])
@pytest.mark.parametrize("room, rows, what_fits", ROOMS)
def test_too_little_memory_says_what_would_fit(method, options, room, rows, what_fits, monkeypatch):
    """Where the model runs on the CPU, host memory counts, too."""
    model = tiny_model()
    settings = compress.settings_from(method, options)
    free = int(room * bytes_of_a_row(method, options))
    monkeypatch.setattr(generate, "free_memory", lambda device: free)
    with pytest.raises(UserError, match=f"memory.* {what_fits} would fit"):
        generate.check_memory(model, method, settings, {}, rows, 60)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("method, options", [("dense", {}), ("lrqk", LRQK)])
def test_memory_that_is_just_enough_is_enough_and_a_byte_less_is_not(
    method, options, rows, monkeypatch
):
    model = tiny_model()
    settings = compress.settings_from(method, options)
    enough = rows * bytes_of_a_row(method, options)
    monkeypatch.setattr(generate, "free_memory", lambda device: enough)
    generate.check_memory(model, method, settings, {}, rows, 60)
    monkeypatch.setattr(generate, "free_memory", lambda device: enough - 1)
    with pytest.raises(UserError, match=f"memory.* {rows - 1} rows or 59 tokens a row would fit"):
        generate.check_memory(model, method, settings, {}, rows, 60)


def test_weights_that_do_not_fit_are_refused_before_they_are_allocated(cli, monkeypatch):
    monkeypatch.setattr(model_file, "free_memory", lambda device: 10**5)
    for line in ("generate --random_weights llama-2-7b --prompt 5", "generate"):
        assert "the weights need" in cli.refusal(line)


def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated(cli, monkeypatch):
    monkeypatch.setattr(generate, "free_memory", lambda device: 10**9)
    line = "generate --prompt 5 --batch_size 2147483647"
    assert "the dense cache of 2147483647 rows" in cli.refusal(line)


ENDS_OF_A_COMMAND = [  # what ends it, the exit code, and the line on stderr
    (KeyboardInterrupt(), 130, "interrupted\n"),
    # Escapes, line breaks and a change of direction would move a terminal.
    (UserError("first\x1b[31m\n\u202ex\rlast"), 2, "error: first?[31m??x?last\n"),
]


@pytest.mark.parametrize("end, code, line", ENDS_OF_A_COMMAND)
def test_a_command_ends_with_130_or_one_line_that_moves_no_terminal(end, code, line, capsys):
    with pytest.raises(SystemExit) as stop:
        generate.run_command(mock.Mock(side_effect=end))
    assert stop.value.code == code
    assert capsys.readouterr().err == line


# ---- how it starts, and its streams


GIVEN_SPINS = [  # what a user has set, and how often a waiting thread looks again
    ({}, "1000"),
    ({"OMP_WAIT_POLICY": "passive"}, "0"),
]


@pytest.mark.parametrize("own, spins", GIVEN_SPINS)
def test_a_start_imports_no_transformers_and_lets_waiting_threads_spin_little(
    own, spins, monkeypatch
):
    """Unless a user says how."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)  # which this process has set
    code = "import generate, calibrate, sys; assert 'transformers' not in sys.modules"
    run = python("-c", code, OMP_DISPLAY_ENV="VERBOSE", **own)
    assert run.returncode == 0, run.stderr
    # OpenMP tells its settings; nothing like it where torch has another OpenMP.
    told = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", run.stderr)
    assert set(told) <= {spins}


def test_a_script_called_by_a_symbolic_link_finds_nano(tmp_path):
    (tmp_path / "link.py").symlink_to(ROOT / "generate.py")
    assert runpy.run_path(str(tmp_path / "link.py"))["NANO"] == NANO


@over("method", lambda tests: tests.METHODS)
def test_help_names_every_method_and_setting(method, cli):
    code, out, _ = cli(f"generate --method {method} --help")
    assert code == 0
    assert f"\n  {method} " in out
    for field in dataclasses.fields(method_named(method).settings):
        assert f"--{field.name}" in out
        assert field.metadata["help"].split()[-1] in out


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # as the locale has it
def test_a_stdin_that_is_not_utf_8_is_refused(errors, cli, monkeypatch):
    data = io.BytesIO(b"caf\xe9")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(data, "utf-8", errors))
    assert "not UTF-8" in cli.refusal("generate --prompt -")


def test_a_terminal_that_lacks_a_character_gets_a_question_mark(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    generate.run_command(lambda: print("snow \u2603", flush=True))
    assert stdout.buffer.getvalue() == b"snow ?\n"


def test_progress_is_on_stderr(capsys):
    progress = generate.ProgressLine("slow", 4)
    progress.tick()
    progress.last_shown = progress.started = progress.started - 30
    progress.tick()
    assert capsys.readouterr() == ("", "slow: 2 of 4, 30 s left\n")


@pytest.mark.parametrize("is_within_another", [False, True])
def test_reading_says_what_is_left_and_nothing_within_another_job(
    is_within_another, capsys, monkeypatch
):
    engine = make_engine(tiny_model(), "dense", 1, 40)
    clock = itertools.count(0, 20)  # a layer takes 20 s
    with contextlib.ExitStack() as stack:
        if is_within_another:
            stack.enter_context(generate.ProgressLine("evaluate", 9))
        monkeypatch.setattr(time, "time", lambda: next(clock))
        engine.prefill([random_ids(9)])
    lines = [f"reading: {i} of 4, {20 * (4 - i)} s left\n" for i in (1, 2, 3)]  # never 0 s
    assert capsys.readouterr() == ("", "" if is_within_another else "".join(lines))


# ---- generate


@pytest.mark.parametrize("chat", ["", "--chat"])
def test_prompts_from_text_file_and_stdin_agree(chat, cli, folder, tmp_path):
    """A file and stdin have a byte-order mark and line ends of Windows here, which do not count."""
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    text = "some words\nand caf\u00e9"
    raw = "\ufeff" + text.replace("\n", "\r\n")
    file = tmp_path / "prompt.txt"
    file.write_bytes(raw.encode())
    line = f"generate {chat} --max_new_tokens 12 --prompt"
    first = cli.json(f"{line} '{text}'")
    # A chat has no BOS, and "?" at its end.
    assert first["prompt_tokens"] == [len(load_tokenizer(NANO).encode(text))]
    for prompt in (f"@{file}", "-"):
        other = cli.json(f"{line} '{prompt}'", stdin=raw)
        for name in ("prompt_tokens", "token_ids", "text"):
            assert other[name] == first[name]


def test_a_chat_of_the_command_line_is_that_of_an_llm(cli, folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    report = cli.json("generate --chat --max_new_tokens 12 --prompt 'some words'")
    messages = [{"role": "user", "content": "some words"}]
    output = generate.LLM(folder, device="cpu").chat(messages, 12)
    assert report["token_ids"] == [output.token_ids]
    assert report["text"] == [output.text]


FIGURES = """method settings model device dtype prompt_tokens new_tokens token_ids text prefill_s
    first_token_s decode_tokens_per_s cache_bytes_measured cache_bytes_formula cache_bytes_dense
    cache_bytes_host miss_rate bytes_read_per_step peak_memory_bytes capture_s seed versions"""


def test_json_is_the_last_line_and_complete(cli):
    """Of three rows with two prompts of 30 random tokens; the first one is repeated."""
    line = "generate --prompt 30 --prompt 30 --batch_size 3 --max_new_tokens 9 --ignore_eos"
    report = cli.json(line)
    assert set(FIGURES.split()) <= set(report)
    assert report["prompt_tokens"] == [30, 30, 30]
    assert report["new_tokens"] == [9, 9, 9]
    ids = report["token_ids"]
    assert [len(row) for row in ids] == [9, 9, 9]
    assert ids[0] == ids[2] != ids[1]
    assert report["seed"] == 0
    assert 50e6 < report["peak_memory_bytes"] < 1e12


def test_a_report_has_the_bytes_and_misses_of_a_cache_in_two_memories(cli):
    line = "generate --prompt 30 --max_new_tokens 9 --ignore_eos --method lrqk"
    report = cli.json(f"{line} --rank 8 --k 10 --recent 4")
    assert report["settings"]["rank"] == 8
    assert report["cache_bytes_host"] == report["cache_bytes_dense"]  # K and V of all tokens
    assert report["cache_bytes_measured"] < report["cache_bytes_host"]
    assert 0 < report["miss_rate"] < 1
    assert f"miss_rate             {report['miss_rate']}\n" in cli.err


def test_a_report_does_not_speak_of_another_memory_where_there_is_none(cli):
    report = cli.json("generate --prompt 30 --max_new_tokens 9 --ignore_eos")
    assert report["cache_bytes_host"] == 0
    assert report["miss_rate"] is None
    assert "cache_bytes_host" not in cli.err
    assert "every token is attended" not in cli.err  # as of a budget that covers all


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_random_weights_take_prompts_beyond_the_trained_length(method, cli, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config(max_positions=64))
    line = f"generate --random_weights tiny --method {method} --prompt 100"
    report = cli.json(f"{line} --batch_size 2 --max_new_tokens 4")
    assert report["prompt_tokens"] == [100, 100]
    assert report["new_tokens"] == [4, 4]
    assert [len(ids) for ids in report["token_ids"]] == [4, 4]


def test_sampling_options_and_the_seed_reach_the_draw(cli):
    def ids(options: str) -> list[list[int]]:
        line = "generate --prompt hello --max_new_tokens 12 --ignore_eos"
        return cli.json(f"{line} {options}")["token_ids"]

    hot = "--temperature 50"
    greedy = ids("")
    assert ids(hot) != greedy
    assert ids(f"{hot} --top_k 1") == greedy
    assert ids(f"{hot} --top_p 1e-6") == greedy
    assert ids(f"{hot} --seed 1") == ids(f"{hot} --seed 1")
    assert ids(f"{hot} --seed 1") != ids(f"{hot} --seed 2")


def test_rows_stop_one_by_one_at_the_models_stop_token(cli, folder):
    batch = "generate --max_new_tokens 20 --prompt hello --prompt 'and so on' --prompt who"
    free = cli.json(f"{batch} --ignore_eos")["token_ids"]
    stop = free[0][5]
    edit_json(folder / "config.json", eos_token_id=stop)
    expected = []
    for ids in free:
        expected.append(ids[: ids.index(stop)] if stop in ids else ids)
    assert 20 in map(len, expected)  # a row that does not stop
    assert cli.json(batch)["token_ids"] == expected
    assert cli.json(f"{batch} --ignore_eos")["token_ids"] == free


@needs_cuda
@pytest.mark.parametrize("method", ["dense", "sals"])
def test_commands_run_on_cuda(method, cli):
    line = f"generate --device cuda --method {method} --prompt 60 --ignore_eos --max_new_tokens 8"
    report = cli.json(line)
    assert report["device"] == torch.cuda.get_device_name()
    assert report["dtype"] == "bfloat16"
    assert report["capture_s"] > 0
    assert report["new_tokens"] == [8]
    assert report["cache_bytes_measured"] == report["cache_bytes_formula"]


# ---- generate --ask, --save_cache and --load_cache


ONCE = "generate --prompt 'once upon a time'"
ASKED = ("prompt_tokens", "new_tokens", "token_ids", "text")  # what a report has of each question


@pytest.mark.parametrize("method", ["dense", "sals"])
def test_the_command_line_answers_each_question_alone(method, cli):
    """As if each were the only one after the prompt; in turn, where there are more rows."""
    line = f"{ONCE} --method {method} --max_new_tokens 6"
    who = cli.json(f"{line} --ask 'who is it'")
    where = cli.json(f"{line} --ask 'where is it'")
    both = cli.json(f"{line} --ask 'who is it' --ask 'where is it'")
    three = cli.json(f"{line} --ask 'who is it' --ask 'where is it' --batch_size 3")
    for name in ASKED:
        assert both[name] == [*who[name], *where[name]]
        assert three[name] == [*who[name], *where[name], *who[name]]


def test_the_first_token_waits_for_prompt_and_questions(cli, monkeypatch):
    append = generate.Engine.append
    slow = 0.25

    def slow_append(*args):
        time.sleep(slow)
        return append(*args)

    monkeypatch.setattr(generate.Engine, "append", slow_append)
    line = f"{ONCE} --max_new_tokens 2 --ignore_eos"
    plain = cli.json(line)
    assert plain["first_token_s"] >= plain["prefill_s"] >= slow
    asked = cli.json(f"{line} --ask 'who is it' --ask where?")
    assert asked["first_token_s"] >= asked["prefill_s"] > 2 * slow  # the prompt and a question


def test_a_report_counts_each_question_and_reads_what_the_row_holds(cli):
    line = f"{ONCE} --max_new_tokens 2 --ignore_eos"
    plain = cli.json(line)
    asked = cli.json(f"{line} --ask 'who is it' --ask where?")
    for name in ASKED:
        assert len(asked[name]) == 2
    assert min(asked["prompt_tokens"]) > plain["prompt_tokens"][0]  # with the question

    # A step reads of a dense cache what the row holds: the prompt, the last question, its answer.
    of_a_token = []
    for report in (plain, asked):
        length = report["prompt_tokens"][-1] + report["new_tokens"][-1]
        of_a_token.append(report["bytes_read_per_step"] / length)
    assert of_a_token[0] == of_a_token[1]


def test_a_saved_cache_is_asked_as_the_prompt_is(cli, tmp_path):
    """Also where it was saved before several questions were asked, in more rows."""
    line = f"{ONCE} --method sals --max_new_tokens 6"
    who = cli.json(f"{line} --ask 'who is it'")
    where = cli.json(f"{line} --ask 'where is it'")
    cli.json(
        f"{line} --ask 'who is it' --ask 'where is it' --batch_size 3 --save_cache {tmp_path}/c"
    )
    load = f"generate --method sals --load_cache {tmp_path}/c --max_new_tokens 6"
    asked = cli.json(f"{load} --ask 'where is it'")
    twice = cli.json(f"{load} --ask 'who is it' --batch_size 2")
    for name in ASKED:
        assert asked[name] == where[name]
        assert twice[name] == who[name] * 2


def assert_same_tensors(path: Path, other: Path) -> None:
    tensors = load_file(path)
    others = load_file(other)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert tensor.equal(others[name]), name


def test_a_saved_cache_goes_on_as_the_prompt_does_and_is_saved_again(cli, tmp_path):
    line = f"{ONCE} --method sals --max_new_tokens 6"
    never_left = cli.json(line)
    cli.json(f"{line} --save_cache {tmp_path}/c")
    load = f"generate --method sals --load_cache {tmp_path}/c --max_new_tokens 6"
    went_on = cli.json(f"{load} --save_cache {tmp_path}/d")
    for name in ("token_ids", "text", "prompt_tokens"):
        assert went_on[name] == never_left[name]
    assert_same_tensors(tmp_path / "c", tmp_path / "d")


def test_a_loaded_cache_is_saved_again_though_questions_are_asked(cli, tmp_path):
    assert cli(f"generate --prompt hello --max_new_tokens 1 --save_cache {tmp_path}/a")[0] == 0
    load = f"generate --load_cache {tmp_path}/a --max_new_tokens 3"
    assert cli(f"{load} --ask 'who is it' --save_cache {tmp_path}/b")[0] == 0
    assert_same_tensors(tmp_path / "a", tmp_path / "b")


def test_answers_stand_above_the_dense_ones_unless_the_cache_was_loaded(cli, tmp_path):
    """No dense cache has what was saved. The one that is saved is not the dense one."""
    line = f"{ONCE} --method sals --max_new_tokens 6 --ask 'who is it' --save_cache {tmp_path}/c"
    code, out, _ = cli(line)
    assert code == 0
    assert out.count("sals:") == 1
    assert out.count("dense:") == 1
    load = f"generate --method sals --load_cache {tmp_path}/c --max_new_tokens 6 --ask 'who is it'"
    code, out, _ = cli(load)
    assert code == 0
    assert out.count("sals:") == 1
    assert out.count("dense:") == 0


LOADED_OTHERWISE = [  # options of load_cache beside those that saved, and what the error says
    ("--k 9", "was made for settings LrqkSettings("),
    (
        "--dtype bf16",
        "was made for dtype torch.float32, not torch.bfloat16; load it with the options that",
    ),
    ("--batch_size 1", "needs a --batch_size of 2, not 1; raise --batch_size"),
    ("--max_seq_length 40", "needs a --max_seq_length of 60, not 40; raise --max_seq_length"),
    ("--max_seq_length 62", "need 64 positions, not 62; raise --max_seq_length"),
    ("--prompt 5", "has the prompt; give --ask"),
    ("--system brief", "--chat needs a --prompt"),
]
SAVED = "generate --max_new_tokens 4 --method lrqk --recent 8 --k 20"


def test_a_cache_is_loaded_by_the_options_that_saved_it_alone(cli, tmp_path):
    """A longer cache takes it, too."""
    file = tmp_path / "c"
    assert cli(f"{SAVED} --prompt 60 --prompt 9 --save_cache {file}")[0] == 0
    assert cli(f"{SAVED} --load_cache {file} --max_seq_length 99")[0] == 0
    for options, message in LOADED_OTHERWISE:
        assert message in cli.refusal(f"{SAVED} --load_cache {file} {options}"), options
    assert "was made for method lrqk, not dense;" in cli.refusal(f"generate --load_cache {file}")
    assert list(tmp_path.iterdir()) == [file]


def test_a_cache_of_another_model_or_a_damaged_one_is_refused(cli, folder, tmp_path):
    file = tmp_path / "c"
    assert cli(f"{SAVED} --prompt 60 --save_cache {file}")[0] == 0
    put_weight(folder, NORM, load_file(folder / WEIGHTS)[NORM] + 1)
    assert "was made for fingerprint " in cli.refusal(f"{SAVED} --load_cache {file}")
    truncate(file)
    assert "truncated or damaged" in cli.refusal(f"{SAVED} --load_cache {file}")
    assert "No such file" in cli.refusal(f"generate --load_cache {file}.d")
    assert f"{file}: " in cli.refusal(f"generate --prompt 5 --save_cache {file}/c")
    assert sorted(tmp_path.iterdir()) == [file, folder]


def test_a_cache_whose_budget_was_cut_is_refused_by_a_larger_one(cli, tmp_path):
    """There the same settings give a larger budget, and so other buffers."""
    file = tmp_path / "c"
    line = "generate --max_new_tokens 4 --method lrqk --recent 8 --k 99"
    assert cli(f"{line} --prompt 60 --save_cache {file}")[0] == 0
    assert "every token is attended" in cli.err
    told = cli.refusal(f"{line} --load_cache {file} --max_seq_length 150")
    assert "saved with --max_seq_length 64, for which" in told


# ---- what the docs show


def code_block(document: str, number: int) -> str:
    """A Python block of a document."""
    text = (ROOT / document).read_text()
    return text.split("```python\n")[number + 1].split("```")[0]


def test_the_readmes_first_command_prints_what_the_readme_shows():
    readme = (ROOT / "README.md").read_text()
    assert "python generate.py --method sals" in readme
    # The README shows a CPU's answer.
    run = python("generate.py", "--method", "sals", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    shown = readme.split("```\nQuestion:")[1].split("```")[0]
    assert "Question:" + shown in run.stdout
    took, would_take = re.search(r"took ([\d.]+) MB .*dense would take ([\d.]+)", readme).groups()
    figures = rf"measured +{took} MB\n.*\n.*dense +{would_take} MB"
    assert re.search(figures, run.stderr), run.stderr


def test_the_readmes_python_prints_what_the_readme_shows(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # as the README's output is
    after = (ROOT / "README.md").read_text().split("```python\n")[1]
    code, shown = after.split("```\n")[0], after.split("```\n")[2]
    exec(code, {})
    assert capsys.readouterr().out == shown
    assert "silent lantern is 73308.\n" in shown and "golden bridge is 48213.\n" in shown


@pytest.fixture
def sparq():
    """The README's own method, in METHODS while a test runs."""
    with mock.patch.dict(METHODS):
        exec(code_block("README.md", 2), {"__name__": "sparq"})
        yield
    assert "sparq" not in METHODS


def ragged_logits(method: str, **options) -> torch.Tensor:
    """Of three ragged rows, and 20 tokens after them: [21, 3, V]."""
    prompts = []
    more = []
    for n in (5, 60, 33):
        prompts.append(random_ids(n, n))
        more.append(random_ids(20, 100 + n))
    return logits_through(make_engine(tiny_model(), method, 3, 80, **options), prompts, more)


def test_the_readmes_own_method_is_dense_where_it_keeps_all(sparq):
    assert error(ragged_logits("sparq", keep=80), ragged_logits("dense")) < 1e-5


def test_the_readmes_own_method_attends_few_tokens(sparq):
    dense = ragged_logits("dense")
    few = ragged_logits("sparq", keep=24, r=4)
    assert error(few[:20, 0], dense[:20, 0]) < 1e-5  # 5 + 19 tokens are all attended
    assert error(few[1:, 1], dense[1:, 1]) > 1e-2  # 60 are not
    all_dims = ragged_logits("sparq", keep=24)
    assert error(all_dims[1:, 1], dense[1:, 1]) < error(few[1:, 1], dense[1:, 1])


def test_the_readmes_own_method_counts_its_bytes(sparq):
    for cache in make_engine(tiny_model(), "sparq", 3, 80, keep=24, r=4).caches:
        assert cache.bytes_stored() == cache.bytes_formula() == compress.dense_bytes(cache.context)
        token = cache.keys.token_bytes
        assert cache.bytes_read(60) == 60 * token // 4 + 2 * 24 * token


def test_the_readmes_own_method_runs(sparq, cli):
    run = "generate --method sparq --keep 24 --ignore_eos --prompt hello --max_new_tokens 4"
    report = cli.json(run)
    assert report["settings"]["keep"] == 24
    assert len(report["token_ids"][0]) == 4


@pytest.fixture
def top_alone(tmp_path):
    """A copy of the tree without extras."""
    for file in [*ROOT.glob("*.py"), ROOT / "README.md"]:
        shutil.copy(file, tmp_path)
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    return tmp_path


def test_the_top_works_without_extras(top_alone):
    tests = "run_from_the_command_line and dense or help_names or refuse_what or bytes_read"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "test_all.py", "-k", tests]
    run = python(*command, cwd=top_alone)
    assert run.returncode == 0, run.stdout
    names = "import compress; assert compress.method_names() == [*compress.METHODS]"
    assert python("-c", names, cwd=top_alone).returncode == 0


def test_extras_that_are_there_and_broken_say_so_where_they_are_needed(top_alone):
    (top_alone / "extras").mkdir()
    (top_alone / "extras" / "baselines.py").write_text("import nowhere")
    look_up = "import compress; [compress.method_named(name) for name in ('sals', 'h2o')]"
    told = python("-c", look_up, cwd=top_alone).stderr
    assert "'h2o'" not in told  # no unknown method
    assert told.endswith("No module named 'nowhere'\n")


def without_section(text: str, start: str, end: str) -> str:
    """The text without what begins with a line `start` and goes up to a line `end`."""
    return re.sub(rf"{start}.*?\n(?={end})", "", text, flags=re.S)


def test_the_names_in_the_docs_are_in_the_code():
    """Each name in backquotes that has an underscore or is a class, with what stands after a
    dot."""
    methods = (ROOT / "docs" / "methods.md").read_text()
    readme = (ROOT / "README.md").read_text()
    page = (ROOT / "docs" / "code.md").read_text()
    code = ""
    for path in (*ROOT.glob("*.py"), *ROOT.glob("extras/*.py")):
        code += path.read_text()
    if not (ROOT / "extras").is_dir():
        methods = without_section(methods, "## Comparison rows", "## ")
        readme = without_section(readme, "Everything else is in `extras/`", "Delete `extras/`")
    names = re.findall(r"`(_?[a-z]+_\w+|[A-Z][a-z]\w+)(?:\.(\w+))?`", methods + readme + page)
    assert len(names) > 50
    for name, attribute in names:
        assert re.search(rf"\b{name}\b", code), name
        if attribute:
            assert re.search(rf"\b{attribute}\b", code), f"{name}.{attribute}"


def test_the_page_about_the_code_has_the_whole_step_of_sals():
    """Its pieces of code in docs/code.md, one behind the other, are the function, except for the
    docstring. And what each visit of a request is called there is a function or a method."""
    text = (ROOT / "docs" / "code.md").read_text()
    pieces = "".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
    said = [line.strip() for line in pieces.splitlines() if line.strip()]
    source = inspect.getsource(compress.sals_step_ours)
    docstring = ast.parse(source).body[0].body[0].value
    lines = source.splitlines()
    del lines[docstring.lineno - 1 : docstring.end_lineno]
    assert said == [line.strip() for line in lines if line.strip()]

    life = text.split("## The life of a request")[1].split("## In which order")[0]
    modules = (compress, generate, kernels, model_file)
    methods = re.findall(r"`(LLM|[A-Z][a-z]\w+)\.(\w+)`", life)
    functions = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", life)
    assert len(methods) > 15 and len(functions) > 10
    known = {}
    for module in modules:
        known |= vars(module)
    for name, method in methods:
        assert hasattr(known[name], method), f"{name}.{method}"
    for name in functions:
        of_a_class = any(hasattr(x, name) for x in known.values() if isinstance(x, type))
        assert callable(known.get(name)) or of_a_class or name == "chained_decode", name


def test_the_exercises_name_functions_and_selections_that_there_are():
    """Those of docs/methods.md: delete a body, and the tests that `-k` selects say when it is
    back."""
    row = r"^\| (\d+) \| `(\w+)`.* \| `-k (\w+)` \|"
    text = (ROOT / "docs" / "methods.md").read_text()
    exercises = re.findall(row, text, flags=re.M)
    assert [int(number) for number, _, _ in exercises] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    names = list(STEPS)  # of which pytest makes names of tests
    for name in globals():
        if name.startswith("test_"):
            names.append(name)
    for _, function, selection in exercises:
        defined = [vars(module).get(function) for module in (compress, kernels, calibrate)]
        assert any(map(callable, defined)), function
        assert any(selection in name for name in names), selection


def test_the_docs_kernel_passes_its_own_test(tmp_path):
    path = tmp_path / "int8_keys.py"
    path.write_text(code_block("docs/kernel.md", 0))  # Triton reads a kernel from its file
    spec = importlib.util.spec_from_file_location("int8_keys", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_int8_keys_are_attended_as_in_pytorch()


# ---- calibrate: fit and ranks


FIT = "--windows 4 --window 64"


def test_fit_writes_artifacts_and_goes_on_where_a_method_cannot_take_the_model(
    cli, folder, monkeypatch
):
    methods = set(calibrate.fits_of("all"))
    for method in fitted(sys.modules[__name__]):
        compress.artifact_path(folder, method).unlink()
    refusal = mock.Mock(side_effect=UserError("not this model"))
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "fit_elitekv", refusal)
        code, out, err = cli(f"fit --method all {FIT} --dtype bf16")
        assert code == 0
        assert "elitekv: not fitted" in err
        for sentence in (
            r"sals.safetensors: A latent of a quarter of the key dims keeps \d\d\.\d% of",
            r"loki.safetensors: A quarter of a head's components hold \d\d\.\d% of the variance",
            r"fdc.safetensors: At a rate of [\d.]+ a head keeps [\d.]+ dims of its queries",
        ):
            assert re.search(sentence, out)
        assert cli(f"fit --method elitekv {FIT}")[0] == 2  # asked for alone it ends the command
    files = {path.stem for path in folder.glob("*.safetensors")}
    assert files == {"model", *methods} - {"elitekv"}

    code, out, _ = cli(f"fit --method elitekv {FIT}")
    assert code == 0
    assert re.search(r"rotates \d+ pairs of dims, beside a latent of \d+ numbers", out)
    model = load_model(folder, CPU, torch.float32)
    for method in methods:
        assert load_artifact(folder, method, model)


def test_fit_of_sals_has_the_ranks_that_were_asked_for(cli, folder):
    """Five eighths of 64 dims, as the widest default needs, or --max_rank of them."""
    model = load_model(folder, CPU, torch.float32)
    assert cli(f"fit --method sals {FIT}")[0] == 0
    tensors = load_artifact(folder, "sals", model)
    assert tensors["0.query_basis"].shape == tensors["0.key_basis"].shape == (64, 40)
    assert cli("generate --method sals --prompt hello --max_new_tokens 3")[0] == 0
    assert cli(f"fit --method sals {FIT} --max_rank 0.25")[0] == 0
    assert load_artifact(folder, "sals", model)["0.query_basis"].shape == (64, 16)


def test_fit_out_makes_a_folder_of_links(cli, folder, tmp_path):
    before = contents(folder)
    out = tmp_path / "cache" / "fits"
    for method in ("loki", "sals"):
        assert cli(f"fit --method {method} --out {out} --windows 2 --window 4")[0] == 0
    assert contents(folder) == before
    assert (out / WEIGHTS).is_symlink()
    assert not (out / "loki.safetensors").is_symlink()
    line = f"generate --checkpoint {out} --method loki --prompt hello --max_new_tokens 3"
    assert cli(line)[0] == 0


def test_fit_says_what_to_do_where_the_folder_cannot_be_written(cli, folder):
    with mock.patch.object(os, "access", lambda *_: False):
        assert f"written into {folder}; give --out FOLDER" in cli.refusal("fit --method loki")


def test_ranks_prints_what_its_json_and_its_table_have(cli, tmp_path):
    figures = cli.json(f"ranks --windows 2 --window 64 --csv {tmp_path}/ranks.csv")
    assert figures["pre"] != figures["post"]
    for name in ("pre", "post"):
        ranks = figures[name]
        by_layer = " ".join(map(str, ranks))
        line = f"{name}-RoPE, mean {sum(ranks) / 4:.1f}, by layer: {by_layer}\n"
        assert line in cli.out
    names = ["pre", "post", "cv_qk", "cv_v"]
    table = [",".join(["layer", *names])]
    for layer in range(4):
        numbers = [layer]
        for name in names:
            numbers.append(figures[name][layer])
        table.append(",".join(map(str, numbers)))
    assert (tmp_path / "ranks.csv").read_text().splitlines() == table


def test_ranks_says_how_the_heads_values_vary(cli):
    """cv_v is of the weights alone: of the largest singular value of each head's W_V."""
    figures = cli.json("ranks --windows 2 --window 64")
    model = load_model(generate.NANO, CPU, torch.float32)
    for layer, cv in zip(model.layers, figures["cv_v"], strict=True):
        attention = layer.attention
        _, _, w_v = attention.wqkv.weight.split(attention.widths)
        of_heads = w_v.unflatten(0, (4, -1))
        largest = torch.linalg.matrix_norm(of_heads, 2).numpy()
        assert cv == pytest.approx(largest.std() / largest.mean(), rel=1e-4)
        assert cv > 0.01


def test_heads_that_compute_the_same_do_not_vary(checkpoint):
    """Then the singular values of queries and keys, of which cv_qk is, are alike."""
    model = load_model(checkpoint, CPU, torch.float32)
    for layer in model.layers:
        q, k, _ = layer.attention.wqkv.weight.split(layer.attention.widths)
        q.copy_(q[:16].repeat(8, 1))
        k.copy_(k[:16].repeat(4, 1))
    values = calibrate.fdc_bases(model, tiny_tokens(1, 32), 512)["qk.values"]
    assert error(values, values[:, :1].expand_as(values)) < 1e-5


# ---- what users met


WRITERS = {
    "generate --prompt hello --max_new_tokens 1 --save_cache {}": "0.ids",
    "ranks --windows 1 --window 16 --csv {}": "layer,pre",
}


@pytest.mark.parametrize("line", WRITERS)
def test_links_are_written_through_and_what_is_no_regular_file_stays_as_it_is(line, cli, tmp_path):
    """A pipe, a folder, a link to either, or to itself. A device is one more, but not for tests:
    who has the right to replace it loses /dev/null."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "file").write_text("old")
    links = {"link": "large/file", "hanging": "large/new", "second": "link"}
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
        assert cli(line.format(tmp_path / name))[0] == 0
        assert (tmp_path / name).is_symlink()
        assert WRITERS[line].encode() in (tmp_path / name).read_bytes()[:2000]
    assert {file.name for file in (tmp_path / "large").iterdir()} == {"file", "new"}

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "to_pipe", "loop", "large"):
        mode = (tmp_path / name).lstat().st_mode
        with mock.patch.object(
            generate, "load_checkpoint", side_effect=AssertionError("it is refused late")
        ):
            assert f"{tmp_path / name}" in cli.refusal(line.format(tmp_path / name))
        assert (tmp_path / name).lstat().st_mode == mode
    assert len(list(tmp_path.iterdir())) == 7


def test_a_pipe_is_refused_by_whatever_writes(tmp_path, checkpoint):
    os.mkfifo(tmp_path / "pipe")
    llm = small_llm(checkpoint)
    llm.prefill("hello")
    writers = [
        lambda: llm.save(tmp_path / "pipe"),
        lambda: save_artifact({"a": torch.zeros(1)}, tmp_path / "pipe", {}),
        lambda: calibrate.save_csv(tmp_path / "pipe", ["a"], [{"a": 1}]),
    ]
    for write in writers:
        with pytest.raises(UserError, match="pipe: no regular file, so nothing is written there"):
            write()
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1
    reader, writer = os.pipe()
    without_a_name = Path(f"/proc/self/fd/{writer}")  # as /dev/stdout is before a `|`
    if without_a_name.exists():  # on Linux
        with pytest.raises(UserError, match="no regular file"):
            compress.written_file(without_a_name)
    os.close(reader), os.close(writer)


def test_a_fit_takes_the_place_of_a_link_to_the_checkpoints_own(cli, folder, tmp_path):
    """Of those links that --out makes: the checkpoint's files stay as they are."""
    line = "fit --method loki --windows 1 --window 8"
    assert cli(line)[0] == 0
    before = (folder / "loki.safetensors").read_bytes()
    assert cli(f"{line} --windows 2 --out {tmp_path / 'out'}")[0] == 0
    made = tmp_path / "out" / "loki.safetensors"
    assert not made.is_symlink() and made.read_bytes() != before
    assert (folder / "loki.safetensors").read_bytes() == before


def logits_in(capacity: int, method: str, options: dict) -> torch.Tensor:
    """Logits of two rows, of which one fills a cache of 101 tokens, in fp64. SALS's blocks are of
    64 tokens: this one ends within its last block."""
    model = tiny_model(head_dim=width_for(method)).double()
    prompts = [random_ids(n, n) for n in (70, 33)]
    more = [random_ids(31, seed) for seed in (5, 6)]
    engine = make_engine(model, method, 2, capacity, block=64, **options_for(model.config, options))
    return logits_through(engine, prompts, more)


@over("method, options", lambda tests: tests.CASES)
def test_the_capacity_changes_no_logits(method, options):
    """Where budgets are given in tokens, or as a fraction of a row's own length. Not to the bit:
    sums over more zeros are rounded in another order, those over codes in fp32."""
    few = logits_in(101, method, options)
    for capacity in (128, 160):
        assert error(logits_in(capacity, method, options), few) < 1e-5


def test_a_fraction_is_of_enough_tokens_in_short_rows():
    """At least 64, or all that there are; a count is taken as it is given."""
    assert [compress.kept_tokens(0.25, n) for n in (5, 64, 100, 256, 260, 4096)] == [
        *(5, 64, 64, 64, 65, 1024)
    ]
    assert [compress.kept_tokens(10, n) for n in (5, 64, 4096)] == [5, 10, 10]
    cache, qkv = scene("loki", 5, 300, d=0.5, least_tokens=compress.LEAST_TOKENS)
    for n in range(5, 300):
        _, chosen = watched_step(cache, n, *qkv)
        assert (chosen.sum(-1) == compress.kept_tokens(0.25, n + 1)).all(), n
    for method in ("loki", "topk"):
        name = {"loki": "k", "topk": "keep"}[method]
        fields = compress.method_named(method).settings.__dataclass_fields__
        assert "at least 64 tokens (ours)" in fields[name].metadata["help"]


@pytest.mark.parametrize("method, options", [("loki", {}), ("topk", {"keep": 0.1})])
def test_a_short_prompt_is_answered_as_dense_answers_it(method, options):
    """The issue's prompt: five tokens, of which a quarter is one."""
    prompt = "The capital of France is"
    dense, short = (
        generate.LLM(method=name, device="cpu", max_seq_length=100, **settings)
        for name, settings in (("dense", {}), (method, options))
    )
    made = [llm.generate(prompt, 40, ignore_eos=True) for llm in (dense, short)]
    assert made[0] == made[1] and made[0].prompt_tokens < 10


def test_what_an_idle_row_has_left_stops_nothing(checkpoint):
    llm = small_llm(checkpoint, batch_size=2)
    expected = llm.generate("who is it", 5, ignore_eos=True)
    llm.engine.logits[1] = math.nan
    assert llm.generate("who is it", 5, ignore_eos=True) == expected
    llm.engine.logits[1] = math.nan
    llm.prefill("hello there")
    assert llm.generate(" who", 5, ignore_eos=True, follow=True).token_ids
    extend = Llama.extend
    for bad in range(2):  # of a row that is read
        with mock.patch.object(
            Llama,
            "extend",
            lambda self, tokens, row, *rest, bad=bad: (
                extend(self, tokens, row, *rest) * (math.nan if row == bad else 1)
            ),
        ):
            with pytest.raises(UserError, match="the logits are not finite"):
                llm.generate(["who", "hello"], 3)


def test_a_loaded_row_has_room_behind_its_ids(checkpoint, tmp_path):
    """The last of them is yet to be written by a step."""
    llm = small_llm(checkpoint, max_seq_length=20)
    made = llm.generate([5, 6, 7], 9, ignore_eos=True)
    llm.save(tmp_path / "cache")
    again = small_llm(checkpoint)
    again.max_seq_length = None
    again.load(tmp_path / "cache", room=15)
    assert again.token_ids[0] == [5, 6, 7, *made.token_ids] and again.max_seq_length == 12 + 15
    eight, fifteen = (
        each.generate([[]], n, ignore_eos=True, follow=True)[0].token_ids
        for each, n in ((llm, 8), (again, 15))
    )
    assert fifteen[:8] == eight and len(fifteen) == 15


def test_a_saved_cache_without_rows_or_ids_is_refused(checkpoint, tmp_path):
    llm = small_llm(checkpoint)
    llm.prefill("hello there")
    llm.save(tmp_path / "cache")
    with compress.safe_open(tmp_path / "cache", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "cache")
    none = metadata | {"rows": json.dumps([[], 60, None])}
    without_ids = {name: x for name, x in tensors.items() if name != "0.ids"}
    damaged = [(tensors, none, "there is no row in it"), (without_ids, metadata, "ids of row 0")]
    for tensors, metadata, message in damaged:
        save_artifact(tensors, tmp_path / "bad", metadata)
        with pytest.raises(UserError, match=message):
            llm.load(tmp_path / "bad")
    assert llm.token_ids == [llm.encode("hello there")]  # as it was


@pytest.mark.parametrize("goes_on", [False, True])
def test_rows_without_a_prompt_hold_nothing(goes_on, checkpoint):
    """Whether or not the other rows go on from what they hold; and with follow they keep it."""
    llm = small_llm(checkpoint)
    llm.prefill(["who is it", "hello there"])
    more = [*llm.token_ids[0], 7] if goes_on else [7, 8, 9]
    first, other = (list(ids) for ids in llm.token_ids)
    for call in (llm.prefill, lambda prompt: llm.generate(prompt, 2)):
        llm.prefill([first, other])
        call(more)
        assert llm.token_ids[0][: len(more)] == more and llm.token_ids[1] == []
        assert llm.engine.pos[1] == 0
    llm.prefill([first, other])
    llm.generate([7], 2, follow=True, ignore_eos=True)
    assert llm.token_ids[1] == other
    fresh = small_llm(checkpoint)
    fresh.prefill([llm.token_ids[0], other])
    after = [each.generate([[5], [5]], 4, ignore_eos=True, follow=True) for each in (llm, fresh)]
    assert after[0] == after[1]


def test_lrqks_refusal_of_a_saved_cache_says_what_works(cli, tmp_path):
    """Its slots depend on the capacity: where what follows does not fit that of the file, the file
    has to be made again."""
    save = f"generate --method lrqk --k 30 --recent 4 --prompt 20 --save_cache {tmp_path}/cache"
    load = f"generate --method lrqk --k 30 --recent 4 --load_cache {tmp_path}/cache"
    assert cli(f"{save} --max_new_tokens 1")[0] == 0
    advice = cli.refusal(f"{load} --max_new_tokens 25").rpartition("; ")[2]
    assert advice.strip() == "save it again with --max_seq_length 45"
    assert cli(f"{save} --max_new_tokens 1 --max_seq_length 45")[0] == 0
    assert cli(f"{load} --max_new_tokens 25")[0] == 0
    code, _, message = cli(f"{load} --max_new_tokens 2 --max_seq_length 30")
    assert code == 2 and message.strip().endswith("; give --max_seq_length 45")
    assert cli(f"{load} --max_new_tokens 2 --max_seq_length 45")[0] == 0


def test_misses_are_those_of_the_rows_in_use(checkpoint):
    options = {"k": 4, "recent": 2, "rank": 2, "max_seq_length": 80}
    prompt = random_ids(40, vocab=300)
    rates = []
    for rows in (1, 3):
        llm = small_llm(checkpoint, method="lrqk", batch_size=rows, **options)
        if rows > 1:
            llm.generate([prompt, prompt[:20], prompt[5:]], 4, ignore_eos=True)
        llm.generate(prompt, 12, ignore_eos=True)
        rates.append(llm.report()["miss_rate"])
    assert rates[0] == rates[1] > 0


def test_crop_takes_each_row_to_its_own_place(folder, monkeypatch):
    """Dense rows of which one has stopped, is short, or is empty: none of them is read again."""
    texts = ["hello", "and so on", "who is it that comes there"]
    llm = small_llm(folder)
    made = llm.generate(texts, 20, ignore_eos=True)
    edit_json(folder / "config.json", eos_token_id=made[0].token_ids[2])
    for n in (12, 6, 3, 1):
        llm = small_llm(folder, batch_size=4)
        outputs = llm.generate(texts, 20)
        assert outputs[0].finish_reason == "stop" and len(llm.token_ids[0]) < llm.engine.pos[0]
        cropped = [ids[:n] for ids in llm.token_ids]
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "prefill", lambda *_: pytest.fail("all is read again"))
            llm.crop(n)
        assert llm.token_ids == cropped and llm.engine.pos.tolist() == [len(ids) for ids in cropped]
        fresh = small_llm(folder, batch_size=4)
        fresh.prefill(cropped[:3])
        assert error(llm.engine.logits[:3], fresh.engine.logits[:3]) < 1e-5
        goes_on = [
            each.generate([[]] * 3, 6, ignore_eos=True, follow=True) for each in (llm, fresh)
        ]
        assert goes_on[0] == goes_on[1]


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("bits", [2, 4])
def test_codes_are_the_nearest_to_the_stored_minimum_and_scale(bits, dim):
    """In fp64, for groups of all sizes down to those whose scale is one of fp16's smallest."""
    torch.manual_seed(bits)
    sizes = torch.logspace(-6.5, 3, 96)
    x = (torch.randn(96, 64, 64) + torch.randn(96, 1, 1)) * sizes[:, None, None]
    codes, low_scale = quantize(x, bits, 32, dim)
    numbers = x.double().unflatten(dim, (-1, 32))
    codes = kernels.unpack(codes, bits).double().unflatten(dim, (-1, 32))
    low, scale = (part.unsqueeze(dim) for part in low_scale.double().unbind(-1))
    errors = [(low + scale * code - numbers).abs() for code in range(2**bits)]
    lost = (low + scale * codes - numbers).abs() - torch.stack(errors).amin(0)
    assert (scale > 0).all() and (lost <= 1e-3 * scale).all()


def test_yarns_last_slowed_pair_may_lie_beyond_the_last_one():
    """Of 64 pairs: at a base of 1e4 it takes pair 64.3 to turn once in 65536 positions, so that
    pairs 40 to 65 are blended, and the last one is not slowed in full."""
    rope = {"factor": 4.0, "original_max_position_embeddings": 65536}
    config = tiny_config(head_dim=128, rope_theta=1e4)
    inv_freq = 1e4 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    slowed = ((torch.arange(64).double() - 40) / (65 - 40)).clamp(0, 1)
    expected = inv_freq * (1 - slowed) + inv_freq / 4 * slowed
    assert error(model_file.scale_yarn(inv_freq, rope, config).inv_freq, expected) < 1e-12
    assert 0 < slowed[-1] < 1


# Of methods that give a decode step other numbers than a prompt, however short: of this file none.
LOSSY_AT_ONCE = set()


@over("method, options", lambda tests: tests.CASES)
def test_short_first_prompts_in_fp16_go_on_as_if_decoded_token_by_token(method, options):
    """Prompts of 1 to 5 tokens: finite logits, and those that follow if the first token is read and
    the others are decoded."""
    model = tiny_model(head_dim=width_for(method))
    more = options_for(model.config, options) | {"least_tokens": compress.LEAST_TOKENS}
    prompts = [random_ids(n, n) for n in (1, 2, 3, 4, 5)]
    together, alone = (
        make_engine(tiny_model(head_dim=width_for(method)).half(), method, rows, 24, **more)
        for rows in (5, 1)
    )
    together.prefill(prompts)
    logits = [together.logits.clone()]
    made = []
    for _ in range(8):
        made.append(logits[-1].argmax(-1))
        together.tokens.copy_(made[-1])
        together.step()
        logits.append(together.logits.clone())
    assert torch.stack(logits).isfinite().all()
    for row, ids in enumerate(prompts):
        for name, x in together.row_state(row, int(together.pos[row])).items():
            # an infinite proxy would only change a selection
            assert x.float().isfinite().all(), name
        if method in LOSSY_AT_ONCE or options.get("reduced"):
            continue
        alone.prefill([ids[:1]])
        for token in ids[1:]:
            alone.tokens.fill_(token)
            alone.step()
        for tokens, expected in zip(made, logits[:-1], strict=True):
            # The same token, or one that is as likely but for rounding. Logits have a deviation of
            # 2; codes and selections make them differ by up to .35.
            likeliest = int(alone.logits[0].argmax())
            assert expected[row].max() - expected[row, likeliest] < 0.03, len(ids)
            assert (alone.logits[0] - expected[row]).abs().max() < 0.5, len(ids)
            alone.tokens.fill_(int(tokens[row]))
            alone.step()


def test_fdc_without_balance_pads_a_prompts_heads_to_the_widest(monkeypatch):
    """In one launch, and with the same logits."""
    model = tiny_model(head_dim=96)
    widths = []

    def attention(q, *more):
        widths.append(q.shape[-1])
        return causal_attention(q, *more)

    causal_attention = compress.causal_attention
    monkeypatch.setattr(compress, "causal_attention", attention)
    logits = []
    launched = []
    for balanced in (True, False):
        widths.clear()
        engine = make_engine(model, "fdc", 1, 24, rate=0.2, balanced=balanced)
        engine.prefill([random_ids(9)])
        logits.append(engine.logits.clone())
        launched.append(set(widths))
    assert len(launched[0]) > 1 and launched[1] == {max(launched[0])}
    assert torch.allclose(*logits, atol=1e-4)


def test_a_fit_of_fdc_on_a_random_model_says_so():
    """Whose accuracy is 0, that of dense and maybe that of the fit: no figure over it is one."""
    facts = {"rate": 0.0, "mean rank of q and k": 16.0, "mean rank of v": 16.0, "floor": 0.99}
    facts["perplexity of dense's"] = 1.0
    for figure in (math.nan, math.inf):
        facts["accuracy of dense's"] = figure
        said = calibrate.report_fit("fdc", facts)
        assert said.endswith("no token of this text right: try another text.")
        assert "nan" not in said and "inf" not in said


def test_progress_ends_without_a_line(capsys):
    """What is done needs no "0 s left"."""
    with generate.ProgressLine("reading", 4) as progress:
        progress.last_shown -= 60
        progress.tick(4)
    assert capsys.readouterr() == ("", "")


# ---- what one copies


class GptFastKVCache(torch.nn.Module):
    """A module, so what replaces it must be one, too."""

    stored = None

    def update(self, k, v):
        past_k, past_v = self.stored or (k[:, :0], v[:, :0])
        self.stored = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
        return self.stored


class GptFastAttention(torch.nn.Module):
    """Of gpt-fast's structure: wqkv in one, RoPE on pairs (2c, 2c + 1), and the two new lines."""

    def __init__(self, c: model_file.ModelConfig):
        super().__init__()
        self.n_head, self.n_local_heads, self.head_dim = c.n_heads, c.n_kv_heads, c.head_dim
        self.kv_size = c.kv_dim
        self.wqkv = torch.nn.Linear(c.dim, c.dim + 2 * c.kv_dim, bias=False)
        self.wo = torch.nn.Linear(c.dim, c.dim, bias=False)
        self.kv_cache = GptFastKVCache()

    def forward(self, x, freqs_cis, input_pos):
        bsz, seqlen, dim = x.shape
        q, k, v = self.wqkv(x).split([dim, self.kv_size, self.kv_size], dim=-1)
        q = q.view(bsz, seqlen, self.n_head, self.head_dim)
        k = k.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        v = v.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        if hasattr(self.kv_cache, "attend"):
            return self.wo(self.kv_cache.attend(q, k, v, input_pos))
        q, k = rotate_pairs(q, freqs_cis), rotate_pairs(k, freqs_cis)
        k, v = self.kv_cache.update(k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=seqlen > 1, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))


def rotate_pairs(x: torch.Tensor, freqs_cis: torch.Tensor) -> torch.Tensor:
    """x [1, n, H, D], two neighbours a complex number, times freqs_cis [n, D/2, 2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.view_as_complex(freqs_cis)[:, None]).flatten(-2)


class GptFastLlama(torch.nn.Module):
    """The weights of a Llama of ours, those of q and k in the order of interleaved pairs."""

    def __init__(self, model: Llama, length: int):
        super().__init__()
        c = model.config
        self.layers = torch.nn.ModuleList(model.layers)
        self.embed, self.norm, self.output = model.embed, model.norm, model.output
        freqs = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.outer(torch.arange(length), freqs)
        self.freqs_cis = torch.stack((angles.cos(), angles.sin()), -1)  # [length, D/2, 2]
        for layer in self.layers:
            q, k, v = layer.attention.wqkv.weight.split(layer.attention.widths)
            interleaved = [  # c and c + D/2 side by side, as gpt-fast's conversion puts them
                rows.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2)
                for rows in (q, k)
            ]
            wo, layer.attention = layer.attention.wo, GptFastAttention(c).requires_grad_(False)
            layer.attention.wqkv.weight.copy_(torch.cat((*interleaved, v)))
            layer.attention.wo.weight.copy_(wo.weight)

    def forward(self, idx, input_pos):
        x = self.embed(idx)
        for layer in self.layers:
            h = layer.attention(layer.attention_norm(x), self.freqs_cis[input_pos], input_pos)
            x = x + h
            x = x + layer.feed_forward(layer.ffn_norm(x))
        return self.output(self.norm(x))

    def greedy(self, prompt: list[int], n: int) -> list[int]:
        """n tokens after a prompt, as gpt-fast's generate asks for them."""
        logits = self(torch.tensor([prompt]), torch.arange(len(prompt)))
        ids = [logits[0, -1].argmax().item()]
        for pos in range(len(prompt), len(prompt) + n - 1):
            logits = self(torch.tensor([[ids[-1]]]), torch.tensor([pos]))
            ids.append(logits[0, -1].argmax().item())
        return ids


def test_the_demos_document_has_the_answers_that_the_readme_shows():
    document, *questions = (NANO / "demo.txt").read_text().split("\nQuestion:")
    facts = dict(re.findall(r"The magic number for (\w+ \w+) is (\d+)", document))
    assert facts["silent lantern"] == "73308" and facts["golden bridge"] == "48213"
    for question in questions:
        names = re.findall(r"(?:silent|golden) \w+", question)
        assert set(names) <= set(facts)  # "golden lantern", which dense does not find, is not asked
        assert "golden lantern" not in names


# of docs/copy.md: each list's functions that are asked for by name, and the call that follows
COPIES = {
    "dense": ([], ""),
    "loki": (["loki_step", "apply_rope"], "use_loki(model, fitted, 16, 256)"),
    "sals:paper": (["sals_step", "apply_rope"], "use_paper_sals(model, fitted)"),
    "sals": (
        ["sals_step_ours", "kivi_step", "random_rotation", "int4_gain", "quantize_basis"],
        "use_sals(model, fitted)",
    ),
}


def test_the_copy_pages_two_new_lines_are_those_of_the_model_here():
    text = (ROOT / "docs" / "copy.md").read_text()
    new = re.findall(r"^ +(.*?) +# new$", text, flags=re.M)
    source = inspect.getsource(GptFastAttention)
    assert len(new) == 2 and re.search(r"\n +".join(map(re.escape, new)), source)


def test_a_link_of_the_readme_and_the_docs_leads_somewhere():
    """To a file, or to a heading, by the name that GitHub gives it."""

    def headings(path: Path) -> set[str]:
        lines = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
        return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}

    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\(([^)\s]*)\)", path.read_text())
        assert links or path.name == "renamed.md", path
        for link in links:
            name, _, heading = link.partition("#")
            if name.startswith("http"):
                continue
            target = path.parent / name if name else path
            assert target.exists(), (path.name, link)
            assert not heading or heading in headings(target), (path.name, link)


def test_the_names_in_the_copy_page_are_in_the_code():
    text = (ROOT / "docs" / "copy.md").read_text()
    files = [path.read_text() for path in ROOT.glob("*.py") if path.name != "test_all.py"]
    code = "".join((*files, *copy_page()[0]))
    gpt_fast = {"KVCache", "apply_rotary_emb", "precompute_freqs_cis"}
    for name in set(re.findall(r"`([A-Za-z]\w+)`", text)) - gpt_fast:
        assert re.search(rf"\b{name}\b", code), name


def copy_page() -> tuple[list[str], list[str]]:
    """Of docs/copy.md the Python, a block each, and the lists of names."""
    text = (ROOT / "docs" / "copy.md").read_text()
    blocks = re.findall(r"```(python)?\n(.*?)```", text, flags=re.S)
    lists = [block for _, block in blocks if re.match(r"\w+\.py: ", block)]
    return [block for kind, block in blocks if kind], lists


def copied_by_the_page(method: str) -> dict:
    """The module that a reader makes by the page: its imports, a list's names, and its code."""
    blocks, lists = copy_page()
    parts = [blocks[0]]
    if method != "dense":
        names = re.findall(r"\w+", re.sub(r"\w+\.py:", "", lists[[*COPIES].index(method) - 1]))
        sources = {file: (ROOT / file).read_text() for file, _ in definitions().values()}
        for file, node in dict.fromkeys(definitions()[name] for name in names):
            parts.append(ast.get_source_segment(sources[file], node))
            if getattr(node, "decorator_list", None):
                parts[-1] = f"@{ast.unparse(node.decorator_list[0])}\n{parts[-1]}"
    copied = "\n\n".join(parts).replace("kernels.quantize_int8", "quantize_int8")
    page = {"__name__": "caches"}
    exec("\n\n".join((copied, *blocks[1:])), page)
    return page


@pytest.mark.parametrize("method", [method for method in COPIES if method != "dense"])
def test_a_list_of_the_copy_page_is_complete(method):
    """It has all that the functions need which the page calls, and nothing else, in an order that
    Python can run. Its table says how long that is."""
    text = copy_page()[1][[*COPIES].index(method) - 1]
    needed = [name for root in (*COPIES[method][0], "apply_rope") for name in to_copy(root)]
    names = [name for name in definitions() if name in needed]
    files = itertools.groupby(names, lambda name: definitions()[name][0])
    assert " ".join(text.split()) == " ".join(f"{file}: {', '.join(of)}" for file, of in files)
    lines = sum(code_lines(node) for node in dict.fromkeys(definitions()[n][1] for n in names))
    said = re.findall(r"\| about (\d+)", (ROOT / "docs" / "copy.md").read_text())
    assert abs(int(said[[*COPIES].index(method) - 1]) - lines) < 10


def code_lines(node: ast.stmt) -> int:
    """Lines of a definition without its docstring, as ast.unparse breaks them."""
    docstring = getattr(node, "body", None) and ast.get_docstring(node)
    return len(ast.unparse(node).splitlines()) - len((docstring or "").splitlines())


def test_the_copy_page_knows_ranks_maps_and_the_order_of_pairs():
    page = copied_by_the_page("sals")
    for head_dim in (32, 40, 64, 128):
        for n_kv_heads in (2, 3, 8, 32):
            c = tiny_config(1, head_dim, n_heads=n_kv_heads, n_kv_heads=n_kv_heads)
            assert page["sals_ranks"](c.kv_dim) == compress.SalsSettings().ranks(c)
            assert page["has_few_key_dims"](c.kv_dim) == compress.has_few_key_dims(c)
    fitted = load_file(NANO / "sals.safetensors")
    c, settings = load_config(NANO), compress.SalsSettings()
    expected = compress.sals_layer_maps(c, settings, fitted, 3, CPU)
    assert all(map(torch.equal, page["sals_maps"](fitted, 3, 4, *settings.ranks(c)), expected))
    weight, x = torch.randn(3 * 16, 24), torch.randn(5, 24)
    by_rows = (x @ page["half_split_rows"](weight, 3).T).unflatten(-1, (3, -1))
    by_vectors = page["half_split"]((x @ weight.T).unflatten(-1, (3, -1)))
    assert error(by_rows, by_vectors) < 1e-6
    assert page["half_split"](torch.arange(6)).tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(
    "method, latents", [*((method, False) for method in COPIES), ("sals", True)]
)
def test_the_copy_page_gives_the_tokens_of_generate(method, latents, monkeypatch):
    """Beside a Llama of gpt-fast's structure, on a text longer than the budgets. latents: also in
    the layers that attend all, as where keys have few dims."""
    if latents:
        monkeypatch.setattr(compress, "kivi_layers", lambda c, settings: set())
    name, _, variant = method.partition(":")
    settings = {"variant": "paper"} if variant else {"k": 256} if name == "loki" else {}
    llm = generate.LLM(method=name, max_seq_length=1024, device="cpu", **settings)
    prompt = llm.encode((NANO / "demo.txt").read_text())[:900]
    expected = llm.generate(prompt, 40, ignore_eos=True).token_ids
    page = copied_by_the_page(method)
    if latents:
        page["has_few_key_dims"] = lambda kv_dim: True
        page["sals_ranks"] = lambda kv_dim: (128, 32)  # nano's fit has no more
    model = GptFastLlama(load_model(NANO, CPU, torch.float32), 1024)
    fitted = load_file(NANO / f"{name}.safetensors") if name != "dense" else {}
    eval(COPIES[method][1] or "None", page | {"model": model, "fitted": fitted})
    assert model.greedy(prompt, 40) == expected
