"""Tests of extras/. Run with: pytest -q extras/test_extras.py

What all methods share is tested by test_all.py's own tests: those imported here run over the methods of
extras/baselines.py.
"""

import itertools
import math
import sys

import pytest
import torch

import model as model_file
import test_all
from calibrate import key_moments
from compress import Context, attend
from extras import baselines
from model import apply_rope, rope_tables
from test_all import (
    CPU,
    assert_best_basis,
    by_head,
    error,
    logits_through,
    make_engine,
    observed,
    random_ids,
    reads,
    row_cache,
    scene,
    spread,
    step,
    stream,
    tiny_model,
    tiny_tokens,
    watched_step,
)

checkpoint, cli, folder, one_rank = test_all.checkpoint, test_all.cli, test_all.folder, test_all.one_rank
nano_haystack = test_all.nano_haystack

# -------------------------------------------------------------------------------------------- comparison rows
# The tests of all methods, over the lists of this file.

globals().update({name: test for name, test in vars(test_all).items() if hasattr(test, "over")})
pytest_generate_tests = test_all.pytest_generate_tests
METHODS = baselines.METHODS
SHADOW = {"keep": 60, "chunk": 4, "outliers": 3, "recent": 6, "rank": 0.5}
SHADOW_1 = SHADOW | {"rank": 1.0}
SHADOW_ALL = {"rank": 1.0, "chunk": 1, "outliers": 5, "recent": 3}
DOUBLE = {"keep": 32, "channels": 0.25, "skip": ""}
CASES = [
    ("palu", {"keep": 0.5}),
    ("streaming", {"sinks": 2, "recent": 20}),
    ("h2o", {"keep": 24}),
    ("keyformer", {"keep": 24, "window": 8}),
    ("quest", {"keep": 24, "page": 4, "skip": "1"}),
    ("doublesparse", {"keep": 24, "sinks": 2, "recent": 4, "channels": 0.25, "skip": "1"}),
    ("hshare", {"keep": 24, "every": 3, "share_heads": 2, "channels": 0.25, "skip": ""}),
    ("shadowkv", SHADOW),
    *(("turboquant", {"bits": bits}) for bits in (2, 3, 4)),
    ("sals_cann", {"keep": 24, "page": 4, "tail": 2}),
]
GRAPHED, STORES = CASES, []
EVERYTHING = [
    ("palu", {"keep": 1.0}),
    ("streaming", {"recent": 80}),
    *((method, {}) for method in ("h2o", "quest")),
    ("hshare", {"every": 3, "share_heads": 1}),
    ("shadowkv", SHADOW_ALL),
    ("shadowkv", {"rank": 1.0, "outliers": 2, "recent": 5}),
]
# A prompt alone decides which tokens H2O and Keyformer still hold: here it decides none.
SPLITS = [case for case in CASES if case[0] not in ("h2o", "keyformer")] + [
    ("h2o", {"keep": 64, "window": 64})
]
SELECTORS = [
    ("streaming", {"sinks": 0, "recent": 6}, 6, 0, 6, 0, ""),
    ("streaming", {"sinks": 3, "recent": 6}, 9, 3, 6, 0, ""),
    ("h2o", {"keep": 24}, 24, 0, 12, 0, ""),
    ("h2o", {"keep": 12, "heavy": 0.0}, 12, 0, 12, 0, ""),  # without heavy hitters: streaming without sinks
    ("keyformer", {"keep": 24, "window": 8}, 24, 0, 12, 0, ""),
    ("quest", {"keep": 24, "page": 4}, 24, 0, 1, 3, ""),
    ("quest", {"keep": 24, "page": 1}, 24, 0, 1, 0, "largest"),
    ("doublesparse", {"keep": 24, "channels": 0.25, "sinks": 2, "recent": 4}, 24, 2, 4, 0, ""),
    ("doublesparse", {"keep": 24, "channels": 1.0, "recent": 3}, 24, 0, 3, 0, "largest"),
    ("hshare", {"keep": 24, "every": 8, "share_heads": 2}, 24, 0, 1, 7, ""),
    ("hshare", {"keep": 24, "every": 5, "sinks": 2, "recent": 4}, 24, 2, 4, 4, ""),
    ("sals_cann", {"keep": 24, "page": 4, "tail": 2}, 24, 0, 5, 3, ""),
    ("shadowkv", SHADOW_1 | {"outliers": 0}, 57, 0, 6, 4, ""),
    ("shadowkv", SHADOW_1, 57, 0, 6, 16, ""),  # a short prompt has no outliers
]
BYTES_READ = [
    ("streaming", {"sinks": 4, "recent": 20}, 80, 24 * 512),
    ("streaming", {"sinks": 4, "recent": 20}, 10, 10 * 512),
    ("h2o", {"keep": 24}, 80, 24 * (512 + 4 * 8)),
    ("quest", {"keep": 24, "page": 4, "skip": ""}, 80, (24 + 20) * 512),
    ("quest", {"keep": 20, "skip": ""}, 80, (48 + 5) * 512),  # at least 3 pages of 16
    ("hshare", {"keep": 24, "channels": 0.25, "every": 3, "skip": ""}, 80, 24 * 512 + 80 * 64 // 3),
    ("turboquant", {"bits": 3}, 80, 80 * 2 * 4 * (6 + 2)),
    ("sals_cann", {"keep": 24, "page": 4, "tail": 2}, 80, 24 * 2 * 4 * 20 + 80 * 4 * (4 + 2)),
    ("shadowkv", SHADOW, 80, ((20 + 2 * (12 + 9) + 36) * 64 + (80 + 64) * 32) * 4),
]
REFUSED_SETTINGS = [
    ("h2o", {"heavy": 1.5}, r"--heavy 1.5: give a number in \[0, 1\]"),
    ("doublesparse", {"channels": 2.0}, r"--channels 2.0: give a number in \(0, 1\]"),
    ("hshare", {"share_heads": 4}, "of 4 KV heads, 0 to 3"),
    ("hshare", {"keep": 24, "sinks": 2, "recent": 4, "every": 20}, "at most 19"),  # 18 are selected
    ("shadowkv", {"keep": 60}, "lower --outliers"),
    ("turboquant", {"bits": 3}, "fills whole bytes, not 12", {"head_dim": 12}),
]
NANO_CASES = [("turboquant", {}), ("sals_cann", {})]
SAME_WITH_KERNELS = [
    ("palu", {}, 2, "latents"),
    ("h2o", {"keep": 24}, 2, "attend_logits logits scores"),
    ("streaming", {"sinks": 4, "recent": 12}, 4, "plain"),
    ("quest", {"keep": 32, "page": 4, "skip": ""}, 2, "plain scores select"),
    ("doublesparse", DOUBLE | {"sinks": 2, "recent": 4}, 2, "plain scores select"),
    ("hshare", DOUBLE | {"every": 3, "share_heads": 1}, 2, "plain scores select"),
    ("shadowkv", {"keep": 32, "chunk": 4, "outliers": 2, "recent": 4, "rank": 0.5}, 2, "plain scores select"),
]
WATCHED = [
    ("streaming", {"sinks": 3, "recent": 9}),
    ("quest", {"keep": 32, "skip": ""}),  # the last page reaches beyond the capacity
]
PROCESSES, JOINT = [2], [("shadowkv", SHADOW_ALL)]
# But where a process draws noise or merges heads of its own.
RANKED = [case for case in CASES if case[0] not in ("shadowkv", "keyformer", "hshare")]


def test_equal_cost_of_a_knob_with_two_aims():
    model = tiny_model(head_dim=32)
    both = test_all.equalised(model, "streaming", {"bytes": 0.5, "tokens": 0.25}, 200)
    assert both == {"recent": 46}  # one knob, both limits: with 4 sinks a quarter of 200 tokens
    assert test_all.equalised(model, "streaming", {"bytes": 0.125, "tokens": 0.25}, 200) == {"recent": 21}


def test_head_dims_that_codes_cannot_take_may_do_without():
    for method, options in (("turboquant", {"bits": 3}), ("sals_cann", {})):
        engine = make_engine(tiny_model(head_dim=80), method, 1, 64, **options)
        assert logits_through(engine, [random_ids(9)], [[7]]).isfinite().all()


def test_help_and_errors_name_these_methods(cli):
    told, (_, out, _) = cli.refusal("generate --method magic"), cli("generate --help")
    assert all(f", {name}" in told and f"\n  {name} " in out for name in METHODS)


def test_palu_is_fitted_by_the_command(checkpoint, tmp_path):
    """In a process in which calibrate, which fit_palu imports, is __main__."""
    size = f"--out {tmp_path} --windows 2 --window 64".split()
    run = test_all.python("calibrate.py", "fit", "--method", "palu", "--checkpoint", checkpoint, *size)
    assert run.returncode == 0 and "energy of 50% 0." in run.stdout, run.stderr


def test_report_of_a_cache_with_values_in_host_memory(cli):
    report = cli.json("generate --prompt 60 --ignore_eos --max_new_tokens 20 --method shadowkv")
    assert "every token is attended" in cli.err
    assert report["cache_bytes_host"] == report["cache_bytes_dense"] // 2 and "host memory" in cli.err


# ---- the papers' algorithms


def pure_quest(cache, entry, n, q, k, v):
    q, k = (cache.rope(x, slice(0, len(x))) for x in (q, k))

    def step(i, q, k, v, stored):
        return baselines.quest_step(q, k, v, stored, cache.page, cache.count // cache.page)

    return by_head(cache, q, k, v, n, lambda h: (k[:n, h], v[:n, h]), step)


def pure_turboquant(cache, entry, n, q, k, v):
    q, k = (cache.rope(x, slice(0, len(x))) for x in (q, k))
    Pi, levels = cache.keys.rotation.mT, cache.keys.levels
    k, v = (baselines.turboquant(x, Pi, levels).transpose(0, 1) for x in (k, v))
    for i in range(n, len(q)):
        live = torch.ones(1, i + 1, dtype=torch.bool)
        yield attend(q[i][None], k[None, :, : i + 1], v[None, :, : i + 1], live).flatten(), None


def pure_sals_cann(cache, entry, n, q, k, v):
    """As CANN's operators have it: pages by the log-sum-exp of their logits, of a group's mean query."""
    q, k = (cache.rope(x, slice(0, len(x))) for x in (q, k))
    low = spread(torch.einsum("shd,hdr->shr", k, cache.basis), 4)[-1]
    k, v = (codes * scale for codes, scale in map(model_file.quantize_int8, (k, v)))
    pages = torch.arange(len(k)) // cache.page

    def step(i, q, k, v, h):
        logits, last = low[: i + 1, h] @ (q.mean(0) @ cache.basis[h]) / 4, i // cache.page  # D is 16
        scores = torch.stack([part.logsumexp(0) for part in logits.split(cache.page)])
        old = max(0, last + 1 - cache.tail)
        best = scores[:old].topk(min(old, cache.count // cache.page - cache.tail)).indices
        chosen = (torch.isin(pages, best) | (pages >= old))[: i + 1].nonzero()[:, 0]
        return (q @ keys[chosen, h].mT / 4).softmax(-1) @ values[chosen, h], chosen, h

    keys, values = k, v
    return by_head(cache, q, k, v, n, lambda h: h, step)


def pure_h2o(cache, entry, n, q, k, v):
    q, k = (cache.rope(x, slice(0, len(x))) for x in (q, k))

    grouped, places = q.unflatten(1, (k.shape[1], -1)), torch.arange(n)

    def start(h):  # of a prompt the recent tokens are kept, and what the last queries attend most
        last = places[-cache.settings.window :]
        logits = torch.einsum("igd,sd->gis", grouped[last, h], k[:n, h]) / 4  # D is 16
        attention = logits.masked_fill(places > last[:, None], -torch.inf).softmax(-1).sum((0, 1))
        ranked = attention.masked_fill(places >= n - cache.recent, torch.inf)
        kept = ranked.topk(min(n, cache.count)).indices.sort().values
        return k[kept, h], v[kept, h], kept, attention[kept]

    def step(i, q, k, v, stored):
        return baselines.h2o_step(q, k, v, stored, cache.count, cache.recent)

    return by_head(cache, q, k, v, n, start, step)


def pure_shadowkv(cache, entry, n, q, k, v):
    rotated, settings = cache.rope(k, slice(0, len(k))), cache.settings
    stored = tuple(x[:n] for x in (k.flatten(1) @ cache.basis[entry], rotated, v))
    whole = max(0, n - settings.recent) // cache.chunk
    chunks = rotated[: whole * cache.chunk].unflatten(0, (whole, cache.chunk))
    likeness = torch.cosine_similarity(chunks, chunks.mean(1, keepdim=True), dim=-1).amin(1)  # [whole, Hkv]
    outliers = likeness.topk(min(settings.outliers, whole), 0, largest=False).indices.T
    budget = cache.selected // cache.chunk, cache.chunk, settings.recent
    for i in range(n, len(q)):
        given = q[i], k[i], v[i], stored, cache.basis[entry], outliers
        out, chosen, stored = baselines.shadowkv_step(*given, budget, cache.rope)
        yield out.flatten(), chosen


def pure_palu(cache, entry, n, q, k, v, latent):
    """The keys' bias is not in their latent (ours)."""
    q, k, basis = cache.rope(q, slice(0, len(q))), k - cache.keys.bias, cache.keys.basis
    values = latent.unflatten(1, (cache.config.n_kv_heads, -1))
    each, rope = itertools.cycle(zip(basis, cache.keys.bias, strict=True)), cache.rope

    def step(i, q, k, v, stored):
        R, bias = next(each)
        out, stored = baselines.palu_step(q, k, v, stored, R, lambda x, t: rope((x + bias)[:, None], t)[:, 0])
        return out, None, stored

    return by_head(cache, q, k, values, n, lambda h: (k[:n, h] @ basis[h], values[:n, h]), step)


PURE = {  # as in test_all.py
    "quest": ({"keep": 20, "page": 4}, pure_quest, None),
    "h2o": ({"keep": 20, "heavy": 0.7, "window": 12}, pure_h2o, None),
    "turboquant": ({"bits": 3}, pure_turboquant, None),
    "sals_cann": ({"keep": 20, "page": 4, "tail": 2}, pure_sals_cann, None),
    "shadowkv": ({"keep": 40, "chunk": 4, "outliers": 2, "recent": 5, "rank": 0.5}, pure_shadowkv, None),
    "palu": ({"keep": 0.5}, pure_palu, lambda c, G: [(8 // G, 48), (0, 48), (192 // G,)]),
}


# ---- Keyformer


def test_keyformers_weights_have_gumbel_noise_and_a_temperature_of_1_to_2_since_the_prompt():
    qkv, cache = stream(20), row_cache("keyformer", tiny_model(), 1, 60, keep=60, window=12)
    parts, weights = [], cache.weights
    cache.weights = lambda logits, part=0, first=0: parts.append(float(part)) or weights(logits, part, first)
    reads(cache, 16, *qkv)
    for n in range(16, 20):
        step(cache, n, *qkv)
    assert error(parts, [0, 0, 1 / 44, 2 / 44, 3 / 44]) < 1e-6  # of what the 16 tokens leave of 60
    got = cache.attention.sum(-1)  # one of each query: 12 of the prompt, 4 later ones; 2 heads a group
    assert torch.allclose(got, torch.tensor(2.0 * (12 + 4)))
    logits, noise = torch.randn(1, 4, 2, 60), cache.gumbel[: 4 * 2 * 60].view(4, 2, 60)
    assert torch.equal(cache.gumbel, baselines.KeyformerCache(cache.context, cache.settings).gumbel)
    assert abs(cache.gumbel.mean() - 0.5772) < 0.03 and abs(cache.gumbel.var() - math.pi**2 / 6) < 0.06
    truth = ((logits + noise) / 1.5).softmax(-1)
    assert torch.allclose(weights(logits, torch.tensor(0.5), torch.tensor(0)), truth)


# ---- Double Sparse, HShare


def test_double_sparse_scores_on_its_channels_alone():
    """Whatever the keys hold in the others."""
    cache, (q, _, _) = scene("doublesparse", 59, 60, keep=12, channels=0.25)
    channels = cache.basis.argmax(1)[:, None].expand(-1, 59, -1)
    expected = cache.keys.rows[0, :, :59].gather(2, channels)
    assert torch.equal(cache.proxies.rows[0, :, :59], expected)
    pos = torch.tensor([58])
    asked = pos, cache.rope(q[58:59], pos)
    index = cache.select(*asked)
    cache.keys.rows.normal_()
    assert torch.equal(cache.select(*asked), index)


def test_double_sparse_importance_is_a_mean_over_all_the_text():
    """All windows count, not the last; q and k of the same token, after RoPE, summed over a group."""
    model, tokens = tiny_model(), tiny_tokens(3, 40)
    tensors, facts = baselines.fit_doublesparse(model, tokens, lambda: key_moments(model, tokens, "test"))
    cos, sin = rope_tables(model.config, 40, CPU)
    q, k = (apply_rope(x, cos, sin) for x in observed(model, tokens)[2][:2])  # of layer 2
    products = (q.unflatten(2, (4, 2)) * k[:, :, :, None]).abs().sum(3)
    assert error(tensors["importance"][2], products.mean((0, 1))) < 1e-5
    assert tensors["importance"].shape == (4, 4, 16) and 0.125 < facts["importance of 12.5%"] < 1


@pytest.mark.parametrize("n,merged", [(2, 1), (8, 0), (8, 3), (8, 7), (32, 16)])
def test_hshare_map_is_idempotent_and_points_down(n, merged):
    torch.manual_seed(n + merged)
    member = (torch.rand(n, 100) < 0.3).float()
    overlap = member @ member.T
    f = baselines.share_map(overlap, merged)
    assert torch.equal(f[f], f) and (f <= torch.arange(n)).all()
    assert int((f < torch.arange(n)).sum()) == merged
    if merged:  # the most similar pair comes first
        i, j = divmod(int(overlap.tril(-1).argmax()), n)
        assert f[i] == f[j]


def test_hshare_holds_a_selection_and_lets_new_tokens_join():
    options = {"keep": 20, "every": 5, "sinks": 2, "recent": 4, "channels": 0.5}
    cache, (q, k, v) = scene("hshare", 30, 60, **options)
    for n in range(30, 60):
        _, chosen = watched_step(cache, n, q, k, v)
        held = cache.held[0].clone()
        if n % 5 == 0:
            pos = torch.tensor([n])
            fresh = cache.best(pos, cache.rope(q[n : n + 1], pos), cache.proxies.rows, 16)[0]
        assert torch.equal(held, fresh.int()) and int(cache.since) == n // 5 * 5
        mask = torch.zeros(4, 60, dtype=torch.bool).scatter_(1, held.long(), True)
        mask[:, int(cache.since) + 1 : n + 1] = True
        assert torch.equal(mask.repeat_interleave(2, 0), chosen)
    step(reads(cache, 20, q, k, v), 20, q, k, v)  # a new prompt does not get the old selection
    assert int(cache.since) == 20


@pytest.mark.parametrize("twin, of", [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_hshare_merged_heads_attend_what_their_twin_does(twin, of):
    """A head whose keys and last query are all but those of another one; found in a prompt within the budget,
    too. Its later queries are not asked."""
    q, k, v = stream(60)
    q[:50, 2 * twin : 2 * twin + 2] = q[:50, 2 * of : 2 * of + 2]
    k[:, twin] = k[:, of] + 0.01 * torch.randn(60, 16)
    for keep, n in ((24, 12), (16, 50)):
        options = {"keep": keep, "channels": 1.0}
        cache = row_cache("hshare", tiny_model(), 1, 100, share_heads=1, every=1, **options)
        cache.basis = torch.eye(16).expand(4, -1, -1)
        heads = reads(cache, n, q, k, v).head[0].tolist()
        assert heads == [of if head == twin else head for head in range(4)]
    for n in range(50, 60):
        chosen = watched_step(cache, n, q, k, v)[1][::2]
        assert torch.equal(chosen[twin], chosen[of]) and len(chosen.unique(dim=0)) == 3
    read = row_cache("doublesparse", tiny_model(), 1, 100, **options).score_bytes(60)
    assert cache.score_bytes(60) == read * 3 // 4


# ---- ShadowKV


def test_shadowkv_basis_is_the_best_of_the_prompt():
    """Of the joint pre-RoPE keys, through the D x D Gram."""
    cache, (_, k, _) = scene("shadowkv", 100, 120, 140, **SHADOW)
    assert_best_basis(k[:100].flatten(1), cache.basis[0], (32,))


# ---- TurboQuant


@pytest.mark.parametrize("bits, lost", [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_turboquants_levels_lose_as_little_as_any_could(bits, lost):
    """lost: of normal numbers (Max's table), as which a unit vector's nearly are. Theorem 1 allows more."""
    torch.manual_seed(0)
    x = torch.randn(4000, 128) * torch.logspace(-3, 3, 4000)[:, None]
    x[3] = 0
    store = baselines.LevelStore(Context(tiny_model(group=8, head_dim=128), 1, 4000), bits)
    store.write((0, slice(0, 4000)), x[:, None])
    back, energy = store.past(0, 4000)[:, 0], x.square().sum(-1)
    assert store.rows.nbytes == 4000 * 16 * bits and not back[3].any()
    far = ((back - x).square().sum(-1) / energy)[energy > 0].mean()
    assert abs(far / lost - 1) < 0.03 and far < math.sqrt(3) * math.pi / 2 / 4**bits


# ---- Palu


def test_palu_is_the_whitened_svd_of_the_weights():
    """The Gram of the keys gives Palu's directions. Nothing of their rank loses less on the text."""
    model, tokens, inputs = tiny_model(head_dim=48, qkv_bias=True), tiny_tokens(6, 64), []
    tensors, _ = baselines.fit_palu(model, tokens, None)
    attention = model.layers[1].attention
    with attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, -2).double())):
        observed(model, tokens)
    x = torch.cat(inputs)
    for kind, part in (("k", 1), ("v", 2)):
        weight = attention.wqkv.weight.split(attention.widths)[part][48:96].T.double()  # [dim, D]
        basis = tensors[f"{kind}.basis"][1, 1].double()
        assert_best_basis(x @ weight, basis, (8, 24))


# ------------------------------------------------------------------------------------------------- GGUF files

# ------------------------------------------------------------------------------------- lm-evaluation-harness

# ------------------------------------------------------------------------------- speed, pictures (bench.py)

# -------------------------------------------------------------------------------------------------- hopper.py


if __name__ == "__main__":  # a process of test_several_ranks
    test_all.generate.run_command(lambda: test_all.ranked_main(sys.modules[__name__]))
