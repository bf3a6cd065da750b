"""`generate()` of transformers, over the compressed caches of this project.

    model = AutoModelForCausalLM.from_pretrained(FOLDER).to("cuda")
    cache = compress(model, "sals", batch_size=4, max_seq_length=4096)
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt").to("cuda")
    tokens = model.generate(**inputs, max_new_tokens=100)
    print(cache.report())  # its bytes

`compress` replaces the model's attention by ours, and leaves the rest of the model to transformers.
A forward of several tokens reads a prompt, or more of it, row by row, by `Cache.prefill`. A forward
of one token for each row is a step, by `Cache.decode`. Padding on the left enters no cache; what
attention gives there is zero.

If you call the model yourself, give it the cache: model(ids, cache=cache), or past_key_values=cache
in versions of transformers where it has this name. `crop` takes the cache back, for example to the
end of a context about which there are several questions:

    model(context_ids, cache=cache)
    n = cache.get_seq_length()
    for question_ids in questions:
        logits = model(question_ids, cache=cache).logits
        ...  # and a forward for each token of the answer
        cache.crop(n)

The pipeline of kvpress works in this way, too. It runs over this cache if you replace its method
`_remove_answer_from_cache(cache, cache_seq_lengths)` by `cache.crop(cache_seq_lengths[0])`.
"""

import functools
import inspect
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from torch import Tensor, nn

from compress import (
    Artifact,
    Cache,
    CacheContext,
    ChannelKeys,
    RaggedStore,
    RingStore,
    Store,
    TokenStore,
    cache_bytes,
    copy_by_kernel,
    load_artifact,
    method_named,
    settings_from,
)
from generate import check_capacity, check_memory, copy_to_cpu, import_hopper
from model import (
    Llama,
    ModelConfig,
    UserError,
    config_from_hf,
    find_weights,
    fingerprint,
    weight_files,
    weight_slots,
)

# ------------------------------------------------------------------------------- going back in time


def parts_by_position(store: Store, max_seq_length: int) -> list[str]:
    """The names of a store's parts that keep each token at a place of its own, by its position.

    Later tokens do not overwrite earlier ones there, and what lies beyond a row's length is never
    read. So a row can go back in these parts by its length alone."""
    if isinstance(store, RaggedStore):
        return list(store.row_state(0, 1))
    if isinstance(store, ChannelKeys):
        return ["codes", "min_and_scale"]  # the keys of an unfinished block lie in a ring
    is_ring = isinstance(store, RingStore)
    if isinstance(store, TokenStore) and not is_ring and store.n_tokens >= max_seq_length:
        return list(store.layout())
    return []


def overwritten_state(cache: Cache, row: int, length: int) -> dict[str, Tensor]:
    """Views of whatever later tokens would overwrite in a row of `length` tokens, by name.

    There is none in a cache that can go back to any length, such as the dense one."""
    state = cache.row_state(row, length)
    for name, store in cache.named_modules():
        if isinstance(store, Store):
            for part in parts_by_position(store, cache.context.max_seq_length):
                state.pop(f"{name}.{part}", None)
    return state


class Forward(NamedTuple):
    """What a forward of the model, from CompressedCache.begin to finish, does to the rows."""

    columns: int  # of the batch, that it adds
    new: list[int]  # how many of these are tokens, in each row
    ends: list[int]  # the rows' lengths after it
    pos: Tensor  # [B]: those before it, with 0 for idle rows
    is_step: bool  # one token for each row; else prompts are read


class Reading(NamedTuple):
    """The state after a forward that read several tokens, to which a cache can go back."""

    seen: int  # columns of the batch at that time
    overwritten: list[list[dict[str, Tensor]]]  # [layer][row]: copies of its overwritten_state


# ---------------------------------------------------------------------------------------- the cache


class CompressedCache(transformers.Cache):
    """What transformers takes for its cache: one of ours for each layer, and the rows' lengths.

    transformers sees a batch as a matrix of columns, where a short row has padding before its
    tokens. `seen` counts columns; `lengths` counts the tokens of each row, without padding."""

    is_compileable = False
    is_croppable = False  # which transformers asks for an assistant model
    MOST_READINGS = 2  # those of a context, and of a question about it

    def __init__(self, context: CacheContext, caches: list[Cache]):
        super().__init__(layers=caches)
        self.context = context
        self.is_generating = False
        self.checks_positions = True
        self.reset()

    def reset(self) -> None:
        """Forgets all tokens. generate() does it first."""
        self.seen = 0  # columns of the batch so far
        self.lengths: list[int] = []  # tokens of each row in use
        self.readings: list[Reading] = []  # the newest last
        self.current: Forward | None = None  # the one that runs, or ran last

    def begin(
        self, rows: int, n: int, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> None:
        """Prepares a forward of n more columns, which `finish` ends.

        mask [rows, seen + n]: 0 for padding; None if all columns are tokens. position_ids
        [rows or 1, n]: the positions of the tokens, if the caller gives them. Raises UserError for
        what the caches cannot take in."""
        lengths = self.lengths or [0] * rows
        most_rows = len(self.lengths) or self.context.batch_size
        if rows > most_rows or rows < len(lengths):
            raise UserError(
                f"{rows} rows for a cache of {most_rows}; give compress() this batch_size "
                "(no beams)"
            )
        new = self.new_tokens(lengths, n, mask)
        ends = [length + count for length, count in zip(lengths, new, strict=True)]
        if max(ends) > self.context.max_seq_length:
            raise UserError(
                f"{max(ends)} tokens for a cache of {self.context.max_seq_length}; "
                "give it a larger max_seq_length"
            )
        if position_ids is not None and self.checks_positions:
            check_positions(position_ids, lengths, new, n)

        self.lengths = lengths
        idle = [0] * (self.context.batch_size - rows)
        self.current = Forward(
            columns=n,
            new=new,
            ends=ends,
            pos=torch.tensor(lengths + idle, dtype=torch.int32, device=self.context.device),
            is_step=n == 1 and all(lengths),  # an empty row has to be prefilled first
        )

    def new_tokens(self, lengths: list[int], n: int, mask: Tensor | None) -> list[int]:
        """How many of n new columns are tokens, in each row. Raises UserError if padding comes
        after a token."""
        rows = len(lengths)
        if mask is None:
            return [n] * rows
        if tuple(mask.shape) != (rows, self.seen + n):
            raise UserError(
                f"the mask is not [{rows}, {self.seen + n}]; cache.reset() before a new prompt"
            )
        is_token = mask[:, self.seen :].ne(0).int().cpu()
        new = is_token.sum(1).tolist()
        has_late_padding = bool((is_token.diff(dim=1) < 0).any())  # a 0 right after a 1
        for length, count in zip(lengths, new, strict=True):
            if length > 0 and count < n:  # the row has tokens already
                has_late_padding = True
        if has_late_padding:
            raise UserError(
                "a row has padding after tokens; give the tokenizer padding_side='left'"
            )
        return new

    def finish(self, *_) -> None:
        """Counts what a forward has read. If it was no step, it also copies what later tokens will
        overwrite, so that `crop` can come back to here."""
        self.seen += self.current.columns
        self.lengths = self.current.ends
        if self.current.is_step:
            return
        overwritten = []
        for cache in self.layers:
            rows = []
            for row, length in enumerate(self.lengths):
                state = overwritten_state(cache, row, length)
                rows.append({name: copy_to_cpu(x) for name, x in state.items()})
            overwritten.append(rows)
        self.readings.append(Reading(self.seen, overwritten))
        del self.readings[: -self.MOST_READINGS]

    def crop(self, n: int) -> None:
        """Keeps the first n columns of the batch, if there are more; -n takes the last n off.

        Methods that keep each token at a place of its own, such as dense, Loki and FDC, can go back
        to any column. The others overwrite some of what they hold. They can go back to the ends of
        the last two forwards that read several tokens: say, a context's and a question's. Raises
        UserError, and changes nothing, if a cache cannot go there."""
        if self.is_generating:
            self.refuse()
        if n > self.seen:
            return
        kept = n if n > 0 else self.seen + n
        if n == 0 or kept < 1:
            fault = f"crop({n}) of {self.seen} columns leaves none"
            raise UserError(f"{fault}; keep 1 of them at least, or forget all by reset()")
        removed = self.seen - kept
        lengths = [max(0, length - removed) for length in self.lengths]
        if removed > 0 and not self.goes_back_anywhere():
            self.restore(kept, lengths)
        self.seen = kept
        self.lengths = lengths
        self.readings = [reading for reading in self.readings if reading.seen <= kept]

    def goes_back_anywhere(self) -> bool:
        """Does no cache overwrite what it holds?"""
        return not any(overwritten_state(cache, row=0, length=1) for cache in self.layers)

    def restore(self, kept: int, lengths: list[int]) -> None:
        """Writes back what was overwritten since the batch had `kept` columns."""
        found = [reading for reading in self.readings if reading.seen == kept]
        if not found:
            ends = " or ".join(str(reading.seen) for reading in self.readings)
            raise UserError(
                f"this method's cache cannot go back to {kept} columns, since it has overwritten "
                f"what they held; it can go back to {ends}, the ends of what was read last"
            )
        for cache, rows in zip(self.layers, found[0].overwritten, strict=True):
            for row, state in enumerate(rows):
                cache.reset(row)  # what a table says of later tokens goes, too
                for name, view in overwritten_state(cache, row, lengths[row]).items():
                    copy_by_kernel(state[name], view)

    def report(self) -> dict[str, int]:
        """Bytes of all layers and rows, by the names of generate.py's report."""
        return cache_bytes(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def refuse(self, *_, **__) -> NoReturn:
        raise UserError(
            "this cache's rows cannot be copied, reordered or cut: no beams, no assistant model"
        )

    reorder_cache = refuse
    batch_repeat_interleave = refuse
    batch_select_indices = refuse
    activate_past_recording = refuse
    update = refuse


def check_positions(position_ids: Tensor, lengths: list[int], new: list[int], n: int) -> None:
    """Raises UserError unless position_ids [rows or 1, n] are those at which the cache puts the
    tokens: of a row of `lengths[row]` tokens those that follow, for its last `new[row]` columns."""
    rows = len(lengths)
    advice = "leave position_ids out"
    if position_ids.shape not in ((rows, n), (1, n)):
        found = list(position_ids.shape)
        raise UserError(f"position_ids are {found}, not [{rows}, {n}]; {advice}")
    given = position_ids.expand(rows, n).tolist()
    for row in range(rows):
        start = lengths[row]
        expected = list(range(start, start + new[row]))
        if given[row][n - new[row] :] != expected:
            raise UserError(
                f"the cache puts row {row}'s tokens at positions from {start} on, and cannot put "
                f"them at other position_ids; {advice}"
            )


class CompressedAttention(nn.Module):
    """The attention of one layer, as transformers calls it: hidden states [rows, n, dim] -> the
    same shape, and None."""

    def __init__(self, attention: nn.Module, cache: Cache, shared: CompressedCache):
        super().__init__()
        self.attention = attention
        self.shared = shared
        # Its methods alone: a cache that is a module in here would become a part of the model.
        self.prefill = cache.prefill
        self.decode = cache.decode

    def forward(self, hidden_states: Tensor, *_, **__) -> tuple[Tensor, None]:
        if self.shared.current.is_step:
            return self.step(hidden_states), None
        return self.read(hidden_states), None

    def step(self, hidden_states: Tensor) -> Tensor:
        """One token of each row, [rows, 1, dim].

        The batch may have fewer rows than the caches, which always decode all of theirs. Zeros
        stand in for the others."""
        rows = len(hidden_states)
        pos = self.shared.current.pos  # [B]
        x = F.pad(hidden_states[:, 0], (0, 0, 0, len(pos) - rows))  # [B, dim]
        out = self.attention(x, partial(self.decode, pos))
        return out[:rows, None]

    def read(self, hidden_states: Tensor) -> Tensor:
        """Several tokens, the last `current.new[row]` columns of each row."""
        out = torch.zeros_like(hidden_states)
        for row, start in enumerate(self.shared.lengths):
            n = self.shared.current.new[row]
            if n > 0:
                prefill = partial(self.prefill, row, start)
                out[row, -n:] = self.attention(hidden_states[row, -n:], prefill)
        return out


# --------------------------------------------------------------------------- what compress() checks


def empty_model_like(hf_model: transformers.PreTrainedModel, config: ModelConfig) -> Llama:
    """Our model of the same shape and dtype, without memory but for its last norm, which says the
    device."""
    with torch.device("meta"):
        model = Llama(config)
    model = model.to(hf_model.dtype).requires_grad_(False)
    model.norm.to_empty(device=hf_model.device)
    return model


def check_weights(model: Llama, weights: dict[str, Tensor]) -> None:
    """Raises UserError unless transformers' `weights` have all of the attention, on one device."""
    for name, _ in sorted(weight_slots(model), key=lambda slot: slot[0]):
        if ".self_attn." in name and name not in weights:
            raise UserError(f"the model has no {name}; load it anew, without adapters")
    devices = {parameter.device for parameter in weights.values()}
    if len(devices) > 1:
        raise UserError("the model lies on several devices; load it on one")


def checked_artifact(
    folder: Path, method: str, model: Llama, weights: dict[str, Tensor]
) -> Artifact:
    """The method's artifact in a folder. Raises UserError where the artifact, or the folder, is of
    another model than transformers' `weights`."""
    if method_named(method).fit:
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{folder}: no checkpoint; give compress() the folder that calibrate.py fit read"
            )
        files = weight_files(folder)
        found = find_weights(files, model.config)
        model.fingerprint = fingerprint(files)
        for name, slot in weight_slots(model, "layers.0.attention"):
            with safe_open(found[name], "pt") as file:
                stored = file.get_tensor(name).to(slot.dtype)
            if not torch.equal(stored, weights[name].cpu()):
                raise UserError(
                    f"{folder}: {name} is not the model's; give the folder that it came from"
                )
    return load_artifact(folder, method, model)


# ------------------------------------------------------------------------------ what it does to one


def move_attention(
    hf_model: transformers.PreTrainedModel, model: Llama, weights: dict[str, Tensor]
) -> None:
    """Copies the weights of each layer's attention to our model, and takes it out of transformers'.
    A layer's memory becomes free before the next layer is copied."""
    for i, layer in enumerate(hf_model.base_model.layers):
        model.layers[i].attention.to_empty(device=hf_model.device)
        for name, slot in weight_slots(model, f"layers.{i}.attention"):
            slot.copy_(weights.pop(name))
        layer.self_attn = None


def put_attention(
    hf_model: transformers.PreTrainedModel, model: Llama, cache: CompressedCache
) -> None:
    """Makes our attention, over its cache, that of each layer of transformers' model."""
    for i, layer in enumerate(hf_model.base_model.layers):
        attention = model.layers[i].attention
        layer.self_attn = CompressedAttention(attention, cache.layers[i], cache)


def watch_forwards(inner: nn.Module, cache: CompressedCache) -> str:
    """Puts `cache.begin` before each forward of the model (without its head), and `cache.finish`
    after it. Returns the argument's name that this version of transformers has for the cache."""
    names = list(inspect.signature(inner.forward).parameters)
    cache_name = "cache" if "cache" in names else "past_key_values"

    def begin(_, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = dict(zip(names, args, strict=False))  # arguments by position get their names
        given.update(kwargs)
        if cache_name not in given and "past_key_values" in given:
            given[cache_name] = given.pop("past_key_values")  # its older name
        if given.get("use_cache") is False or given.get(cache_name) is not cache:
            raise UserError(
                f"the model runs over its compressed cache alone: give it {cache_name}=cache"
            )
        tokens = given.get("input_ids")
        if tokens is None:
            tokens = given["inputs_embeds"]
        rows, n = tokens.shape[:2]
        cache.begin(rows, n, given.get("attention_mask"), given.get("position_ids"))
        # Our attention needs no mask. From one of two dims transformers would make one of all pairs
        # of tokens; one of four dims it takes as it is.
        given["attention_mask"] = tokens.new_zeros(1, 1, 1, 1)
        return (), given

    inner.register_forward_pre_hook(begin, with_kwargs=True)
    inner.register_forward_hook(cache.finish)
    return cache_name


def refuse_to_save(*_, **__) -> NoReturn:
    raise UserError(
        "a compressed model cannot be saved: a method may have changed its weights; save it before "
        "compress()"
    )


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
    of at most max_seq_length tokens. Returns the cache, which generate() takes by itself.

    The model stays changed, on its device and in its dtype, and can no longer be saved. Each
    generate() starts anew; it may have fewer rows. folder: of the checkpoint and the artifact
    (None: where the model came from). settings: as on the command line. Raises UserError, before
    the model is changed, where these do not fit one another."""
    chosen = settings_from(method, settings)
    config = config_from_hf(hf_model.config.to_dict())
    inner = hf_model.base_model
    weights = {f"model.{name}": parameter for name, parameter in inner.named_parameters()}

    # 1. What cannot work is refused.
    model = empty_model_like(hf_model, config)
    check_weights(model, weights)
    artifact = checked_artifact(Path(folder or hf_model.name_or_path), method, model, weights)
    check_capacity(max_seq_length, config, "max_seq_length")
    check_memory(model, method, chosen, artifact, batch_size, max_seq_length)

    # 2. The attention becomes ours. Caches are built once it has weights, which they may fold.
    hf_model.eval().requires_grad_(False)
    move_attention(hf_model, model, weights)
    context = CacheContext(model, batch_size, max_seq_length)
    if context.kernel:
        import_hopper(context.device)
    caches = method_named(method).build(model, chosen, context, artifact)
    cache = CompressedCache(context, caches)
    put_attention(hf_model, model, cache)

    # 3. What one calls.
    cache_name = watch_forwards(inner, cache)
    for part in (hf_model, inner):
        part.save_pretrained = refuse_to_save
    generate = getattr(hf_model, "generate", None)
    if generate is None:  # a model that only reads, as AutoModel's
        return cache

    @functools.wraps(generate)
    def generate_anew(*args, **kwargs):
        cache.reset()
        if "cache" not in kwargs and "past_key_values" not in kwargs:
            kwargs[cache_name] = cache
        cache.is_generating = True
        # generate() makes position_ids of its own, which count the padding when it reads a prompt
        # in chunks. They are not checked then, since the caches know the positions themselves.
        cache.checks_positions = "position_ids" in kwargs
        try:
            return generate(*args, **kwargs)
        finally:
            cache.is_generating = False
            cache.checks_positions = True

    hf_model.generate = generate_anew
    return cache
