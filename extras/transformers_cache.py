"""generate() of transformers, over the compressed caches of this project.

    model = AutoModelForCausalLM.from_pretrained(FOLDER).to("cuda")
    cache = compress(model, "sals", batch_size=4, max_seq_length=4096)
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to("cuda")
    tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=100)
    print(cache.report())  # its bytes

Only its attention becomes ours, with what the method folds into weights. A forward of several
tokens reads a prompt, or more of it, row by row, by `Cache.prefill`. One of a token each is a step,
by `Cache.decode`. Left padding enters no cache; its attention is zero.
"""

import functools
import inspect
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from compress import (
    Artifact,
    Cache,
    CacheContext,
    cache_bytes,
    load_artifact,
    method_named,
    settings_from,
)
from generate import check_capacity, check_memory, import_hopper
from model import (
    Llama,
    UserError,
    config_from_hf,
    find_weights,
    fingerprint,
    weight_files,
    weight_slots,
)


class CompressedCache(transformers.Cache):
    """What generate() takes as past_key_values: our caches, one a layer, and how many tokens rows
    have."""

    is_compileable = is_croppable = False

    def __init__(self, context: CacheContext, caches: list[Cache]):
        super().__init__(layers=caches)
        self.context = context
        self.reset()

    def reset(self) -> None:
        """Forgets all tokens. generate() does it first."""
        self.lengths: list[int] = []  # tokens of each row in use
        self.seen = 0  # columns of the batch so far: a row's tokens with its padding

    def begin(self, rows: int, n: int, mask: Tensor | None) -> None:
        """Before a forward of n columns: which of them are tokens, by mask [rows, seen + n], 0 for
        padding (None: all are). Raises UserError for what the caches cannot take in."""
        c, old = self.context, self.lengths or [0] * rows
        if rows > (most := len(self.lengths) or c.batch_size) or rows < len(old):
            raise UserError(
                f"{rows} rows for a cache of {most}; give compress() this batch_size (no beams)"
            )
        if mask is not None and tuple(mask.shape) != (rows, self.seen + n):
            raise UserError(
                f"the mask is not [{rows}, {self.seen + n}]; cache.reset() before a new prompt"
            )
        real = torch.ones(rows, n).int() if mask is None else mask[:, self.seen :].ne(0).int().cpu()
        self.new = real.sum(1).tolist()
        pairs = [*zip(old, self.new, strict=True)]
        if (real.diff(dim=1) < 0).any() or any(length and count < n for length, count in pairs):
            raise UserError(
                "a row has padding after tokens; give the tokenizer padding_side='left'"
            )
        self.lengths, self.ends, self.columns = old, [*map(sum, pairs)], n
        if (longest := max(self.ends)) > c.max_seq_length:
            raise UserError(
                f"{longest} tokens for a cache of {c.max_seq_length}; "
                "give it a larger max_seq_length"
            )
        self.is_step = n == 1 and all(old)
        self.pos = torch.tensor(
            old + [0] * (c.batch_size - rows), dtype=torch.int32, device=c.device
        )

    def finish(self, *_) -> None:
        """After that forward."""
        self.lengths, self.seen = self.ends, self.seen + self.columns

    def report(self) -> dict[str, int]:
        """Bytes of all layers and rows, by the names of generate.py's report."""
        return cache_bytes(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def refuse(self, *_, **__):
        raise UserError(
            "this cache's rows cannot be copied, reordered or cut: no beams, no assistant model"
        )

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = refuse
    activate_past_recording = update = refuse


class CompressedAttention(nn.Module):
    """A layer's attention as transformers calls it: hidden states [rows, n, dim] -> the same, and
    None."""

    def __init__(self, attention: nn.Module, cache: Cache, shared: CompressedCache):
        super().__init__()
        self.attention, self.shared = attention, shared
        # a module in it would be the model's
        self.prefill, self.decode = cache.prefill, cache.decode

    def forward(self, hidden_states: Tensor, *_, **__) -> tuple[Tensor, None]:
        state, out = self.shared, torch.zeros_like(hidden_states)
        if state.is_step:  # of all rows of the caches
            x = F.pad(hidden_states[:, 0], (0, 0, 0, len(state.pos) - len(out)))
            return self.attention(x, partial(self.decode, state.pos))[: len(out), None], None
        for row, (start, n) in enumerate(zip(state.lengths, state.new, strict=True)):
            if n:
                prefill = partial(self.prefill, row, start)
                out[row, -n:] = self.attention(hidden_states[row, -n:], prefill)
        return out, None


def checked_artifact(
    folder: Path, method: str, model: Llama, weights: dict[str, Tensor]
) -> Artifact:
    """The method's artifact in a folder; UserError if it or transformers' `weights` are another
    model's."""
    if method_named(method).fit:
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: no checkpoint; give compress() the folder that calibrate.py fit read"
            )
        files = weight_files(folder)
        found, model.fingerprint = find_weights(files, model.config), fingerprint(files)
        for name, slot in weight_slots(model, "layers.0.attention"):
            with safe_open(found[name], "pt") as file:
                if not torch.equal(file.get_tensor(name).to(slot.dtype), weights[name].cpu()):
                    raise UserError(
                        f"{folder}: {name} is not the model's; give the folder that it came from"
                    )
    return load_artifact(folder, method, model)


def compress(
    hf_model: transformers.PreTrainedModel,
    method: str = "sals",
    *,
    batch_size: int,
    max_seq_length: int,
    folder: str | Path | None = None,
    **settings,
) -> CompressedCache:
    """Makes a Llama, Mistral, Qwen2, Qwen3 or Phi-3 run over a method's caches, of batch_size rows
    of at most max_seq_length tokens -> what generate() takes as past_key_values, and takes by
    itself where it is given none.

    The model lies on its device, in its dtype, and stays changed. Each generate() starts anew; it
    may have fewer rows. folder: of the checkpoint and the artifact (None: where the model came
    from). settings: as on the command line. Raises UserError, before the model is changed, where
    these do not fit one another."""
    chosen, config = settings_from(method, settings), config_from_hf(hf_model.config.to_dict())
    inner, generate = hf_model.base_model, hf_model.generate
    weights = {f"model.{name}": parameter for name, parameter in inner.named_parameters()}
    with torch.device("meta"):
        model = Llama(config).to(hf_model.dtype).requires_grad_(False)
    if (
        lacking := {name for name, _ in weight_slots(model) if ".self_attn." in name}
        - weights.keys()
    ):
        raise UserError(f"the model has no {min(lacking)}; load it anew, without adapters")
    if len({parameter.device for parameter in weights.values()}) > 1:
        raise UserError("the model lies on several devices; load it on one")
    model.norm.to_empty(device=hf_model.device)
    artifact = checked_artifact(Path(folder or hf_model.name_or_path), method, model, weights)
    check_capacity(max_seq_length, config, "max_seq_length")
    check_memory(model, method, chosen, artifact, batch_size, max_seq_length)

    hf_model.eval().requires_grad_(False)
    for i, layer in enumerate(inner.layers):
        model.layers[i].attention.to_empty(device=hf_model.device)
        for name, slot in weight_slots(model, f"layers.{i}.attention"):
            slot.copy_(weights.pop(name))
        layer.self_attn = None  # its memory becomes free
    context = CacheContext(model, batch_size, max_seq_length)
    if context.kernel:
        import_hopper(context.device)
    cache = CompressedCache(context, method_named(method).build(model, chosen, context, artifact))
    for layer, ours, own in zip(inner.layers, model.layers, cache.layers, strict=True):
        layer.self_attn = CompressedAttention(ours.attention, own, cache)
    name = "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"

    def begin(_, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if kwargs.get("use_cache") is False or kwargs.get(name) is not cache:
            raise UserError(
                "the model runs over its compressed cache alone: give it past_key_values=cache"
            )
        inputs = *args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        tokens = next(x for x in inputs if x is not None)
        cache.begin(*tokens.shape[:2], kwargs.get("attention_mask"))
        # Of a mask of two dims transformers makes one of all pairs of tokens. One of four it takes
        # as it is.
        return args, kwargs | {"attention_mask": tokens.new_zeros(1, 1, 1, 1)}

    inner.register_forward_pre_hook(begin, with_kwargs=True)
    inner.register_forward_hook(cache.finish)

    @functools.wraps(generate)
    def generate_anew(*args, **kwargs):
        cache.reset()
        given = {"cache", "past_key_values"} & kwargs.keys()
        return generate(*args, **kwargs if given else kwargs | {name: cache})

    hf_model.generate = generate_anew
    return cache
