"""Other published methods, as rows to compare with: each is one block, as in compress.py.

    python generate.py --method h2o                  a name that compress.METHODS lacks is looked up here
    python calibrate.py fit --method palu            and so is how its artifact is fitted
Methods: StreamingLLM, H2O, SnapKV, Quest, SALS as deployed, Double Sparsity, FP8, TurboQuant, ShadowKV and
Palu. METHODS, at the end, is the table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from compress import (
    Artifact,
    Cache,
    Context,
    DenseCache,
    KeepSettings,
    Method,
    RebuiltKeys,
    ScaledStore,
    TokenStore,
    Window,
    appended,
    each_layer,
    fit_budget,
    fold_values,
    in_basis,
    keep_setting,
    kept_tokens,
    kv_bias,
    left_to_select,
    loki_tensors,
    of_heads,
    random_rotation,
    rank_of,
    ring_positions,
    setting,
)
from kernels import as_fp16, gather_rows, matmul_codes, pack, quantize_int8, unpack
from model import Llama, UserError, apply_rope, causal_attention

# ----------------------------------------------------------------------------------------------- StreamingLLM


@dataclass
class StreamingSettings:
    """StreamingLLM (arXiv 2309.17453): the first and the last tokens, all others forgotten."""

    sinks: int = setting(4, "x: first tokens that are kept")
    recent: int = setting(508, "w: last tokens that are kept", within="[1, 1e9]")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        return fit_budget(capacity, self.sinks, 0, self.recent)


class StreamingCache(DenseCache):
    """x sinks and a ring of the w last tokens, at their own positions (paper: at places in the cache)."""

    def __init__(self, context: Context, settings: StreamingSettings):
        x, _, z = settings.budget(context.capacity)
        shape = context.config.n_kv_heads, context.config.head_dim, x, z
        super().__init__(context, *(Window(context, *shape) for _ in range(2)))

    def select(self, pos: Tensor, q: Tensor) -> None:
        """All slots: they fill from the left, so that those up to pos hold a token."""
        sinks = self.context.positions[: self.keys.x].expand(len(pos), -1)
        self.report_selected(pos, sinks, sinks <= pos[:, None], recent=self.keys.z)


# ------------------------------------------------------------------ what the rows that select have in common


def page_tokens(pages: Tensor, page: int) -> Tensor:
    """The positions [..., n * page] of the tokens of pages [..., n]; of negative pages they are negative."""
    return (pages[..., None] * page + torch.arange(page, device=pages.device)).flatten(-2)


class ProxyCache(DenseCache):
    """K and V in full, and `proxies`, a store of what scoring reads instead of K: keys in a `basis` [Hkv, D,
    r], or [B, Hkv, D, r], one of each row."""

    def write(self, where: tuple, k: Tensor, v: Tensor) -> None:
        super().write(where, k, v)
        self.write_proxies(where, k)

    def write_proxies(self, where: tuple, k: Tensor) -> None:
        basis = self.basis if self.basis.ndim == 3 else self.basis[where[0]]
        self.proxies.write(where, in_basis(k, basis))

    def select_pages(self, scores: Tensor, pos: Tensor, tail: int) -> Tensor:
        """Tokens [B, Hkv, n], negative for none, of the last pages and the best by scores [B, Hkv, pages]."""
        budget = 0, self.count // self.page - tail, tail
        index = page_tokens(
            kernels.select(scores, pos // self.page, budget, recent=True, kernel=self.kernel), self.page
        )
        return index.where(index <= pos[:, None, None], -1)

    def score_bytes(self, length: int) -> int:
        return length * self.proxies.token_bytes

    def bytes_read(self, length: int) -> int:
        return super().bytes_read(length) + (self.score_bytes(length) if length > self.count else 0)


# ------------------------------------------------------------------------------------------------ H2O, SnapKV


class SlotCache(DenseCache):
    """C slots a KV head, with K, V and the position of a token, -1 for none; they fill from the left.

    choose(row, span, logits, position) -> which of a row's N tokens are kept [Hkv, n], in order; they are
    those in the slots and those at positions `span`. logits [Hkv, G, W, N] are of the last W queries of a
    prompt, `settings.window`, and position is [Hkv, N]."""

    def __init__(self, context: Context, settings: object):
        heads, (_, x, z) = context.config.n_kv_heads, settings.budget(context.capacity)
        shape = heads, context.config.head_dim, x, z
        super().__init__(context, *(Window(context, *shape) for _ in range(2)))
        self.settings = settings
        self.table("position", heads, x + z, fill=-1)

    def past(self, row: int, n: int) -> tuple[Tensor, Tensor]:
        filled = int((self.position[row, 0] >= 0).sum()) if n else 0
        return super().past(row, filled)

    def write_chunk(self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> None:
        heads, positions = self.config.n_kv_heads, self.context.positions[span]
        past = self.past(row, span.start)
        k, v = (torch.cat(pair).transpose(0, 1) for pair in zip(past, (k, v), strict=True))  # [Hkv, N, D]
        held = k.shape[1] - len(positions)
        position = torch.cat((self.position[row, :, :held], positions.expand(heads, -1)), 1)  # [Hkv, N]
        last = q[-self.settings.window :].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        logits = (last @ k[:, None].mT).float() * self.scale
        later = position[:, None, None] > positions[-last.shape[2] :, None]
        kept = self.choose(row, span, logits.masked_fill(later, -torch.inf), position)
        slots = self.keys.vectors, self.values.vectors, self.position
        for slot, x in zip(slots, (k, v, position), strict=True):
            slot[row, :, : kept.shape[1]] = gather_rows(x[None], kept[None])[0]
        self.position[row, :, kept.shape[1] :] = -1


@dataclass
class H2oSettings:
    """H2O, the heavy-hitter oracle (arXiv 2306.14048): what got little attention so far is evicted."""

    keep: float = keep_setting(512)
    window: int = setting(64, "W: last queries of a prompt that attention is summed of", within="[1, 1e9]")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        """Half of the tokens are heavy hitters, half are recent."""
        total = kept_tokens(self.keep, capacity)
        recent = max(1, total - round(total / 2))
        return 0, total - recent, recent


def h2o_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, slots: int, recent: int) -> tuple:
    """One decode step of H2O as published (Algorithm 1), for one KV head: q [G, D], k, v [D] after RoPE ->
    [G, D]. stored, of n <= slots tokens: K and V [n, D], positions in order and attention so far [n]."""
    keys, values, positions, attention = stored
    # 1. Where all slots are taken, forget the token with the least attention that is not recent.
    now = int(positions[-1]) + 1
    kept = torch.ones(len(keys), dtype=torch.bool)
    if len(keys) == slots:
        kept[attention.masked_fill(positions > now - recent, torch.inf).argmin()] = False
    new = k, v, torch.tensor(now), attention.new_tensor(0)
    keys, values, positions, attention = appended((x[kept] for x in stored), *new)
    # 2. Attend what is left, and add what each token gets.
    weights = (q @ keys.mT * len(k) ** -0.5).softmax(-1)
    return weights @ values, positions, (keys, values, positions, attention + weights.sum(0))


class H2oCache(SlotCache):
    """C = heavy + recent slots a KV head, each with the attention that its token has got so far."""

    def __init__(self, context: Context, settings: H2oSettings):
        super().__init__(context, settings)
        self.recent = settings.budget(context.capacity)[2]
        self.table("attention", *self.position.shape[1:], dtype=torch.float32)

    def choose(self, row: int, span: slice, logits: Tensor, position: Tensor) -> Tensor:
        attention = logits.softmax(-1).sum((1, 2))  # [Hkv, N]
        held = min(span.start, self.count)
        attention[:, :held] += self.attention[row, :, :held]
        ranked = attention.masked_fill(position >= span.stop - self.recent, torch.inf)
        kept = ranked.topk(min(self.count, span.stop)).indices.sort(-1).values
        self.attention[row, :, : kept.shape[1]] = attention.gather(1, kept)
        return kept

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        q, now = self.rope(q, pos), pos[:, None, None]
        # 1. The new token takes an empty slot, or that of the least attention that is not recent.
        cost = self.attention.masked_fill(self.position > now - self.recent, torch.inf)
        victim = cost.masked_fill(self.position < 0, -torch.inf).argmin(-1)  # [B, Hkv]
        where = self.context.rows[:, None], torch.arange(victim.shape[1], device=pos.device), victim
        self.keys.vectors[where], self.values.vectors[where] = self.rope(k, pos), v
        self.position[where] = pos[:, None]
        self.attention.scatter_(2, victim[..., None], 0.0)
        # 2. Attend all slots, and add what each has got.
        live = self.position >= 0
        self.report_selected(pos, self.position, live)
        every = torch.full_like(pos, self.count - 1)
        logits = kernels.scores(
            q, self.keys.vectors, None, every, self.scale, "each", kernel=self.kernel
        )  # [B, Hkv, G, C]
        logits = logits.masked_fill(~live[:, :, None], -torch.inf)
        self.attention += logits.softmax(-1).sum(2)
        return kernels.attend_logits(logits, self.values.vectors, every, kernel=self.kernel)

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        slots = {name: getattr(self, name)[row, :, :n] for name in ("position", "attention")}
        return super().used(row, n) | slots

    def bytes_read(self, length: int) -> int:
        return super().bytes_read(length) + min(length, self.count) * self.config.n_kv_heads * 8


@dataclass
class SnapKvSettings:
    """SnapKV (arXiv 2404.14469): of a prompt what its last queries attend is kept, and later tokens."""

    keep: float = keep_setting(512)
    room: int = setting(128, "of these for tokens after a prompt, the last of them", within="[1, 1e9]")
    window: int = setting(32, "W: last tokens of a prompt, which are kept, and choose", within="[1, 1e9]")
    pool: int = setting(5, "neighbours that a prompt's attention is averaged over", within="[1, 99]")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        total = kept_tokens(self.keep, capacity)
        if total < capacity:
            left_to_select(self.keep, total, capacity, 0, self.window + self.room)
        return fit_budget(total, 0, total, self.room)


def snapkv_prompt(q: Tensor, k: Tensor, n: int, window: int, pool: int) -> Tensor:
    """The n tokens of a prompt that SnapKV keeps as published (Listing 1), for one KV head: q [G, S, D],
    k [S, D] after RoPE. A decode step then appends K and V, and attends all that is there."""
    positions, S = torch.arange(len(k)), len(k)
    if S <= n:
        return positions
    # 1. What the last queries attend.
    logits = q[:, -window:] @ k.mT * k.shape[1] ** -0.5
    weights = logits.masked_fill(positions > positions[-window:, None], -torch.inf).softmax(-1)
    # 2. Their votes for the tokens before them; neighbours of a token with many votes get some, too.
    votes = weights[..., :-window].sum((0, 1))
    votes = F.avg_pool1d(votes[None], pool, 1, pool // 2)[0, : S - window]
    # 3. The best, and the last ones.
    return torch.cat((votes.topk(n - window).indices, positions[-window:]))


class SnapKvCache(SlotCache):
    """The tokens that are kept of a prompt, then those after it; the last `room` slots are a ring."""

    def __init__(self, context: Context, settings: SnapKvSettings):
        super().__init__(context, settings)
        self.table("dropped")  # tokens of the prompt that are not kept

    def choose(self, row: int, span: slice, logits: Tensor, position: Tensor) -> Tensor:
        last, pool = position >= span.stop - self.settings.window, self.settings.pool
        votes = logits.softmax(-1).sum((1, 2)).masked_fill(last, 0)
        votes = F.avg_pool1d(votes, pool, 1, pool // 2)[:, : votes.shape[1]].masked_fill(last, torch.inf)
        room = self.keys.z if self.count < self.context.capacity else 0
        kept = votes.topk(min(votes.shape[1], self.count - room)).indices
        self.dropped[row] = span.stop - kept.shape[1]
        return kept.sort(-1).values

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        q, place = self.rope(q, pos), pos - self.dropped
        self.write((self.context.rows, place), self.rope(k, pos), v)
        self.position[self.context.rows, :, self.keys.slot(place)] = pos[:, None]
        self.report_selected(pos, self.position, self.position >= 0)
        return kernels.attend(q, self.keys, self.values, place, scale=self.scale, kernel=self.kernel)


# ------------------------------------------------------------------------------------------------------ Quest


@dataclass
class QuestSettings:
    """Quest (arXiv 2406.10774): pages of tokens, ranked by an upper bound of their logits."""

    keep: float = keep_setting(512)
    page: int = setting(16, "tokens of a page", within="[1, 1e9]")
    skip: str = setting("0,1", "layers that attend every token")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        """The selected tokens are those of as many whole pages as fit, the released code's 3 at least."""
        count, page = kept_tokens(self.keep, capacity), min(self.page, capacity)
        return 0, count if count == capacity else min(max(3, count // page) * page, capacity), 0


def quest_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, page: int, n: int) -> tuple:
    """One decode step of Quest as published (sec. 3.3), for one KV head, whose queries choose n pages:
    q [G, D], k, v [D] after RoPE -> [G, D]. stored: K and V [S - 1, D]."""
    keys, values = stored = appended(stored, k, v)
    # 1. The least and the largest key of each page bound a query's logits there.
    bounds = (page_keys.aminmax(dim=0) for page_keys in keys.split(page))
    low, high = map(torch.stack, zip(*bounds, strict=True))  # [pages, D]
    bound = torch.maximum(q[:, None] * low, q[:, None] * high).sum(-1) * len(k) ** -0.5  # [G, pages]
    # 2. The best pages, and the last.
    last = len(low) - 1
    best = bound.log_softmax(-1).amax(0)[:last].topk(min(n - 1, last)).indices
    tokens = (torch.cat((best, torch.tensor([last])))[:, None] * page + torch.arange(page)).flatten()
    tokens = tokens[tokens < len(keys)]
    # 3. Attend their tokens.
    return (q @ keys[tokens].mT * len(k) ** -0.5).softmax(-1) @ values[tokens], tokens, stored


class QuestCache(ProxyCache):
    """The proxy of a page is the largest and the least key of every channel, after RoPE."""

    def __init__(self, context: Context, settings: QuestSettings):
        super().__init__(context, budget=settings.budget(context.capacity))
        c, self.page = context.config, min(settings.page, context.capacity)
        self.proxies = TokenStore(context, c.n_kv_heads, -(-context.capacity // self.page), 2 * c.head_dim)

    def write_proxies(self, where: tuple, k: Tensor) -> None:
        row, pos = where
        if isinstance(row, int):  # whole pages, the first from its beginning; the last token fills up
            page = slice(pos.start // self.page, -(-pos.stop // self.page))
            tokens = torch.arange(page.start * self.page, page.stop * self.page, device=k.device)
            k = self.keys.vectors[row, :, tokens.clamp(max=pos.stop - 1)].transpose(0, 1)
            low, high = k.unflatten(0, (-1, self.page)).aminmax(dim=1)  # [n, Hkv, D]
        else:
            page, first = pos // self.page, (pos % self.page == 0)[:, None, None]
            high, low = self.proxies.vectors[row, :, page].chunk(2, -1)  # [B, Hkv, D]
            high, low = torch.where(first, k, high.maximum(k)), torch.where(first, k, low.minimum(k))
        self.proxies.write((row, page), torch.cat((high, low), -1))

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """[max(q, 0), min(q, 0)] . [largest, least] key is the largest logit in a page (sec. 3.3)."""
        last, bounds = pos // self.page, torch.cat((q.clamp(min=0), q.clamp(max=0)), -1)
        scores = kernels.scores(
            bounds, *self.proxies.scored(last), last, self.scale, "largest", kernel=self.kernel
        )
        return self.select_pages(scores, pos, 1)

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        return super().used(row, n) | {"proxies.vectors": self.proxies.vectors[row, :, : -(-n // self.page)]}

    def score_bytes(self, length: int) -> int:
        return super().score_bytes(-(-length // self.page))


# ------------------------------------------------------------------------------------------- SALS as deployed


class Int8Store(TokenStore):
    """Int8 codes with one scale a vector (`quantize_int8`)."""

    kind, bits = "int8", 8

    def layout(self) -> dict[str, tuple]:
        return {"vectors": ((self.width,), torch.int8), "scale": ((), torch.float32)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = quantize_int8(x)
        return codes, scale[..., 0]

    def decode(self, vectors: Tensor, scale: Tensor) -> Tensor:
        return (vectors.to(self.context.dtype) * scale[..., None]).to(self.context.dtype)

    def scored(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        return self.vectors, self.scale

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return matmul_codes(weights * self.scale[:, :, None], self.vectors)


@dataclass
class SalsCannSettings(QuestSettings):
    """SALS as in CANN's quant_sals_indexer: int8 K and V, in pages that low-rank keys in 4 bits choose."""

    keep: float = keep_setting(0.25)
    skip: str = setting("", "layers that attend every token")


CANN_TAIL = 8  # last pages, which are always attended


class SalsCannCache(ProxyCache):
    """K and V in int8; the proxy of a key is its D/2 leading components in 4 bits. Nothing is rebuilt."""

    def __init__(self, context: Context, settings: SalsCannSettings, _, artifact: Artifact, i: int):
        shape, D = (context, context.config.n_kv_heads, context.capacity), context.config.head_dim
        stores = (Int8Store(*shape, D) for _ in range(2))
        super().__init__(context, *stores, budget=settings.budget(context.capacity))
        self.page = min(settings.page, context.capacity)
        self.tail = min(CANN_TAIL, self.count // self.page - 1)
        r = rank_of(0.5, D)
        r = max(2, r - r % (32 if r > 32 else 2))  # as codes come
        self.basis = artifact["post.basis"][i, ..., :r].to(context.device, context.dtype)  # [Hkv, D, r]
        self.proxies = ScaledStore(*shape, r, 4)

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """A page's score is the log-sum-exp of its logits, of the mean of a group's queries."""
        query = in_basis(q.unflatten(1, (self.config.n_kv_heads, -1)).mean(2), self.basis)
        logits = kernels.scores(
            query, self.proxies.read(pos), None, pos, self.scale, "each", kernel=self.kernel
        ).flatten(2)  # [B, Hkv, S]
        logits = F.pad(logits, (0, -logits.shape[2] % self.page), value=-torch.inf)
        scores = logits.unflatten(2, (-1, self.page)).logsumexp(-1)
        return self.select_pages(scores, pos, self.tail)


# -------------------------------------------------------------------------------------------- Double Sparsity


@dataclass
class DoubleSparseSettings(KeepSettings):
    """Double Sparsity (arXiv 2408.07092): top-k tokens, scored on the channels that matter most."""

    channels: float = setting(0.125, "r_c: channels that are scored, as a fraction of D", within="(0, 1]")
    skip: str = setting("0,1", "layers that attend every token")


class DoubleSparseCache(ProxyCache):
    """The proxy of a key is its label: its r_c most important channels, after RoPE."""

    def __init__(self, context: Context, settings: DoubleSparseSettings, _, artifact: Artifact, i: int):
        super().__init__(context, budget=settings.budget(context.capacity))
        c = context.config
        r = rank_of(settings.channels, c.head_dim)
        channels = F.one_hot(artifact["importance"][i].topk(r).indices, c.head_dim).mT  # [Hkv, D, r_c]
        self.basis = channels.to(context.device, context.dtype)
        self.proxies = TokenStore(context, c.n_kv_heads, context.capacity, r)

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """The best by their labels: tokens [B, Hkv, n], negative where none."""
        labels = self.proxies.vectors  # [B, Hkv, S, r_c]
        scores = kernels.scores(
            in_basis(q, self.basis), labels, None, pos, self.scale, "largest", kernel=self.kernel
        )
        return kernels.select(scores, pos, self.budget, recent=True, kernel=self.kernel)


def fit_doublesparse(model: Llama, tokens: Tensor) -> tuple:
    """How much each channel of a KV head adds to the logits, after RoPE (Double Sparsity sec. 3): the mean of
    |q_c k_c|, q and k of the same token, summed over the group."""
    from calibrate import observe, tracked  # only now: it imports generate

    c, sums = model.config, [0.0] * model.config.n_layers

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        q, k = (apply_rope(x, cos, sin).double().abs() for x in (q, k))
        sums[i] = sums[i] + (q.unflatten(-2, (c.n_kv_heads, -1)).sum(-2) * k).sum((0, 1))  # [Hkv, D]

    with torch.inference_mode():
        observe(model, tracked("fit", tokens[:, None]), see)
    importance = torch.stack(sums).cpu() / tokens.numel()
    eighth = importance.topk(max(1, model.config.head_dim // 8)).values.sum(-1) / importance.sum(-1)
    return {"importance": importance.float()}, {"importance of 12.5%": eighth.mean().item()}


# -------------------------------------------------------------------------------- keys less their mean, FP8


class CentredCache(DenseCache):
    """Stores hold keys after RoPE less the mean key of their row's prompt, which is rotated as they are."""

    def __init__(self, context: Context, keys: TokenStore, values: TokenStore):
        super().__init__(context, keys, values)
        self.table("mean", keys.heads, keys.width, dtype=torch.float32)

    def write(self, where: tuple, k: Tensor, v: Tensor) -> None:
        row, tokens = where
        super().write(where, k - self.rope(self.mean[row], tokens), v)

    def past(self, row: int, n: int) -> tuple[Tensor, Tensor]:
        k, v = super().past(row, n)
        return (k + self.rope(self.mean[row], slice(0, n))).to(k.dtype), v

    def write_chunk(self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, before: Tensor) -> None:
        if not span.start:
            self.mean[row] = before.float().mean(0)
        self.write((row, span), k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        self.write((self.context.rows, pos), self.rope(k, pos), v)
        q = self.rope(q, pos).unflatten(1, (k.shape[1], -1))
        mean = self.rope(self.mean[:, None], self.context.positions).transpose(1, 2)  # [B, Hkv, S, D]
        keys = self.keys.read(pos) + mean  # in fp32: the mean key may be a hundred times what is left
        logits = (q.to(keys) @ keys.mT).float() * self.scale
        return kernels.attend_logits(logits, self.values.read(pos), pos, kernel=self.kernel)


@dataclass
class CentreSettings:
    """The setting of codes that fail where keys have biases."""

    centre: bool = setting(False, "take the mean key of a prompt off its keys first")


@dataclass
class Fp8Settings(CentreSettings):
    """FP8 as serving engines have it: K and V in e4m3, a byte a number, with one scale a head."""


E4M3 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa
FP8_RANGE = torch.finfo(E4M3).max, 16  # the largest number, 448, and how many times a prompt's may grow to it


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x in e4m3, in units of the scale. Beyond 448 it saturates."""
    return (x / scale).clamp(-FP8_RANGE[0], FP8_RANGE[0]).to(E4M3)


def fp8_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, scales: tuple, mean: Tensor, rope) -> tuple:
    """One decode step over an FP8 cache, for one KV head: q [G, D] after RoPE, k [D] before it, v [D] -> [G,
    D]. stored: codes of K after RoPE and of V [S - 1, D]; scales: of both. mean [D]: the prompt's mean key
    before RoPE (ours), or 0; rope(x, positions) rotates x [n, D]."""
    positions = torch.arange(len(stored[0]) + 1)
    # 1. Codes of the new key, less the mean key at its position, and of the new value.
    new = rope((k - mean)[None], positions[-1:])[0], v
    stored = appended(stored, *map(fp8, new, scales))
    # 2. Attend every token; the mean key comes back, exactly.
    keys, values = (codes.to(q.dtype) * scale for codes, scale in zip(stored, scales, strict=True))
    keys = keys + rope(mean.expand(len(positions), -1), positions)
    return (q @ keys.mT * len(k) ** -0.5).softmax(-1) @ values, stored


class Fp8Store(Int8Store):
    """Numbers in e4m3, with one scale [B, Hkv, 1] a head that the first write to a row decides: there the
    largest number becomes 28, so that later ones saturate from 16 times of it on."""

    kind = "fp8"  # which no kernel knows

    def __init__(self, context: Context):
        c = context.config
        super().__init__(context, c.n_kv_heads, context.capacity, c.head_dim)
        self.register_buffer("scale", context.zeros(c.n_kv_heads, 1, dtype=torch.float32).fill_(1))

    def layout(self) -> dict[str, tuple]:
        return {"vectors": ((self.width,), E4M3)}

    def parts(self) -> list[Tensor]:
        return [self.vectors, self.scale]

    def write(self, where: tuple, x: Tensor) -> None:
        row, tokens = where
        if isinstance(row, int) and not tokens.start:
            most, (end, growth) = x.abs().amax((0, 2))[:, None].float(), FP8_RANGE
            self.scale[row] = torch.where(most > 0, most * growth / end, 1)
        codes, held = (t.view(torch.uint8) for t in (fp8(x, self.scale[row]), self.vectors))
        held[row, :, tokens] = codes.transpose(0, 1) if isinstance(row, int) else codes

    def scored(self, pos: Tensor) -> tuple[Tensor, None]:
        return self.read(pos), None

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return weights @ self.read(pos).to(weights.dtype)

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        return super().used(row, n) | {"scale": self.scale[row]}

    def formula(self) -> int:
        return super().formula() + self.scale.nbytes


def coded_cache(context: Context, settings: CentreSettings, store: Callable) -> Cache:
    """K and V in two stores of store()."""
    return (CentredCache if settings.centre else DenseCache)(context, store(), store())


def fp8_cache(context: Context, settings: Fp8Settings) -> Cache:
    return coded_cache(context, settings, lambda: Fp8Store(context))


# ------------------------------------------------------------------------------------------------- TurboQuant


@dataclass
class TurboQuantSettings(CentreSettings):
    """TurboQuant (arXiv 2504.19874): rotated keys and values, each number at the nearest of fixed levels."""

    bits: int = setting(4, "bits of a code", (2, 4))


# The levels above 0 at which normal numbers have the least mean square error, in standard deviations (Max,
# as above). A coordinate of a random unit vector in D dims is nearly normal (Lemma 1), of deviation D^-1/2.
LEVELS = {
    2: (0.4528, 1.51),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


def turboquant(x: Tensor, Pi: Tensor, levels: Tensor) -> Tensor:
    """x [..., D] as its codes decode (Algorithm 1, with its line numbers); Pi [D, D]: a random rotation."""
    norm = x.norm(dim=-1, keepdim=True)
    y = x / norm @ Pi.mT  # 5. Rotate the unit vector.
    codes = (y[..., None] - levels).abs().argmin(-1)  # 6. The nearest level of each number.
    return as_fp16(norm) * (levels[codes] @ Pi)  # 9, 10. Decode, and rotate back.


class LevelStore(ScaledStore):
    """Codes of a rotated row's numbers, each of the nearest level of a unit vector's, and the row's norm."""

    kind = "levels"  # which no kernel knows

    def __init__(self, context: Context, bits: int):
        width = context.config.head_dim
        super().__init__(context, context.config.n_kv_heads, context.capacity, width, bits)
        levels = torch.tensor(LEVELS[bits], device=context.device) * width**-0.5
        self.levels = torch.cat((-levels.flip(0), levels))
        self.rotation = random_rotation(width).to(context.device)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        norm, middles = x.float().norm(dim=-1), (self.levels[1:] + self.levels[:-1]) / 2
        rotated = x.float() / norm.clamp(min=1e-20)[..., None] @ self.rotation
        return pack(torch.bucketize(rotated, middles), self.bits), as_fp16(norm)

    def rotated(self, rows: Tensor, scale: Tensor) -> Tensor:
        return self.levels[unpack(rows, self.bits).int()] * scale[..., None].float()

    def decode(self, rows: Tensor, scale: Tensor) -> Tensor:
        return (self.rotated(rows, scale) @ self.rotation.mT).to(self.context.dtype)

    def logits(self, q: Tensor, pos: Tensor) -> Tensor:
        return q.float() @ self.rotation @ self.rotated(self.vectors, self.scale).mT

    def mix(self, weights: Tensor, pos: Tensor) -> Tensor:
        return weights @ self.rotated(self.vectors, self.scale) @ self.rotation.mT


def turboquant_cache(context: Context, settings: TurboQuantSettings) -> Cache:
    return coded_cache(context, settings, lambda: LevelStore(context, settings.bits))


# --------------------------------------------------------------------------------------------------- ShadowKV


@dataclass
class ShadowKvSettings:
    """ShadowKV (arXiv 2410.21465): low-rank pre-RoPE keys, values in host memory, chunks with landmarks."""

    keep: float = keep_setting(1024)
    rank: float = setting(0.15625, "rank of the keys / (Hkv*D), as 160 / 1024", within="(0, 1]")
    chunk: int = setting(8, "tokens of a chunk", within="[1, 1e9]")
    outliers: int = setting(48, "chunks least like their mean, kept exactly")
    recent: int = setting(32, "last tokens, kept exactly, with up to a chunk more", within="[1, 1e9]")

    def budget(self, capacity: int) -> tuple[int, int, int]:
        """Outliers stand in the place of sinks."""
        selected, outliers, recent = fit_budget(capacity, *self.layout(capacity))
        return outliers, selected, recent

    def layout(self, capacity: int) -> tuple[int, int, int]:
        """What is stored and selected for it, whole chunks; room for all in each where all are attended."""
        chunk = min(self.chunk, capacity)
        outliers, recent = self.outliers * chunk, self.recent + chunk - 1
        total, chunks = kept_tokens(self.keep, capacity), -(-capacity // chunk)
        if total >= capacity:
            return chunks * chunk, min(self.outliers, chunks) * chunk, min(recent, capacity)
        selected = (total - outliers - recent) // chunk
        if selected < 1:
            exact = f"{self.outliers} outlier chunks and {recent} recent tokens; lower --outliers or --recent"
            raise UserError(f"--keep {self.keep:g} of {capacity} leaves no chunk of {chunk} beside {exact}")
        return selected * chunk, outliers, recent


def shadowkv_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, U: Tensor, outliers: Tensor, budget: tuple, rope
) -> tuple:
    """One decode step of ShadowKV as published (Algorithm 2), for one sequence.

    q [Hq, D], k, v [Hkv, D]: before RoPE -> [Hq, D], and each KV head's tokens. stored: latents [S - 1, r], K
    after RoPE (for landmarks, outliers, recent tokens) and V [S - 1, Hkv, D]. U [Hkv*D, r]: of the prompt's
    SVD. outliers [Hkv, .]: exact chunks. budget: chunks to select, tokens of a chunk, recent tokens."""
    (n, chunk, recent), S, (heads, D), outputs, chosen = budget, len(stored[0]) + 1, k.shape, [], []
    q, rotated = (rope(x[None], torch.tensor([S - 1]))[0] for x in (q, k))
    latents, keys, values = stored = appended(stored, k.flatten() @ U, rotated, v)
    q, near = q.unflatten(0, (heads, -1)), max(0, S - recent) // chunk
    for h in range(heads):
        # 1. The n best of the older chunks, by the largest weight that a query gives their mean key.
        landmarks = keys[: S // chunk * chunk, h].unflatten(0, (-1, chunk)).mean(1)
        scores = (q[h] @ landmarks.mT * D**-0.5).log_softmax(-1).amax(0)[:near]
        scores[outliers[h][outliers[h] < near]] = -torch.inf
        best = scores.topk(min(n, int(scores.isfinite().sum()))).indices
        # 2. Rebuild their keys; outliers and recent tokens are exact.
        rebuilt, far = ((c[:, None] * chunk + torch.arange(chunk)).flatten() for c in (best, outliers[h]))
        exact = torch.cat((far, torch.arange(near * chunk, S)))
        k_best = rope((latents[rebuilt] @ U.unflatten(0, (heads, D))[h].mT)[:, None], rebuilt)[:, 0]
        # 3. Attend. The values of what is rebuilt come from host memory.
        tokens = torch.cat((rebuilt, exact))
        weights = (q[h] @ torch.cat((k_best, keys[exact, h])).mT * D**-0.5).softmax(-1)
        outputs.append(weights @ values[tokens, h])
        chosen.append(tokens)
    return torch.cat(outputs), chosen, stored


class ShadowKvCache(Cache):
    """Latents of pre-RoPE keys on the basis of the prompt's own SVD, joint over heads; landmarks of chunks;
    outlier chunks and a ring of recent tokens, K beside V; V of every token in host memory."""

    def __init__(self, context: Context, settings: ShadowKvSettings):
        super().__init__(context)
        c, self.settings, self.chunk = context.config, settings, min(settings.chunk, context.capacity)
        self.selected, self.outlier_tokens, self.z = settings.layout(context.capacity)
        self.r = rank_of(settings.rank, c.kv_dim)
        heads, d = c.n_kv_heads, c.head_dim
        self.table("basis", c.kv_dim, self.r, dtype=context.dtype)
        self.table("latent", context.capacity, self.r, dtype=context.dtype)
        self.table("landmark", heads, -(-context.capacity // self.chunk), d, dtype=context.dtype)
        self.table("outlier", heads, self.outlier_tokens // self.chunk, fill=-1)
        self.outliers = TokenStore(context, heads, self.outlier_tokens, 2 * d)
        self.ring = Window(context, heads, 2 * d, 0, self.z)
        self.values = TokenStore(context, heads, context.capacity, d, host=True)

    def past(self, row: int, n: int) -> tuple[Tensor, Tensor]:
        """Rebuilt keys, but for those of outliers and recent tokens."""
        keys = (self.latent[row, :n] @ self.basis[row].T).unflatten(1, (self.config.n_kv_heads, -1))
        kv = torch.cat((self.rope(keys, slice(0, n)), self.values.past(row, n)), -1)
        index = page_tokens(self.outlier[row], self.chunk)  # [Hkv, m], negative for none
        head, place = (index >= 0).nonzero(as_tuple=True)
        kv[index[head, place], head] = self.outliers.vectors[row, head, place]
        return self.ring.overlay(row, kv).chunk(2, -1)

    def write_chunk(self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, before: Tensor) -> None:
        flat, first = before.flatten(1), span.start // self.chunk  # the chunk that goes on, or begins
        if not span.start:
            gram = flat.double().T @ flat.double()  # its eigenvectors are the right singular vectors of K
            self.basis[row] = torch.linalg.eigh(gram).eigenvectors.flip(-1)[:, : self.r].to(flat.dtype)
        self.latent[row, span] = flat @ self.basis[row]
        begun = self.context.positions[first * self.chunk : span.start] % self.z  # its tokens in the ring
        keys = torch.cat((self.ring.vectors[row, :, begun].chunk(2, -1)[0].transpose(0, 1), k))
        chunks = keys[: len(keys) // self.chunk * self.chunk].unflatten(0, (-1, self.chunk)).float()
        landmark = chunks.mean(1)  # [n, Hkv, D]
        self.landmark[row, :, first : first + len(chunks)] = landmark.transpose(0, 1).to(k.dtype)
        kv = torch.cat((k, v), -1)
        if not span.start:  # the outliers: old chunks that are least like their mean
            old = max(0, len(k) - self.settings.recent) // self.chunk
            likeness = F.cosine_similarity(chunks[:old], landmark[:old, None], dim=-1).amin(1)  # [old, Hkv]
            ids = likeness.T.topk(min(self.outlier.shape[-1], old), largest=False).indices  # [Hkv, n]
            self.outlier[row], self.outlier[row, :, : ids.shape[1]] = -1, ids.int()
            tokens, heads = page_tokens(ids, self.chunk), torch.arange(len(ids), device=k.device)[:, None]
            self.outliers.vectors[row, :, : tokens.shape[1]] = kv[tokens, heads]
        self.values.write((row, span), v)
        self.ring.write((row, span), kv)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, *projected: Tensor) -> Tensor:
        row = self.context.rows
        self.latent[row, pos] = (k.flatten(1)[:, None] @ self.basis)[:, 0]
        q, k = self.rope(q, pos), self.rope(k, pos)
        self.ring.write((row, pos), torch.cat((k, v), -1))
        self.values.write((row, pos), v)
        # The mean of the last chunk is written at every step and read when the chunk is whole.
        newest = page_tokens((pos // self.chunk)[:, None], self.chunk) % self.z
        mean = self.ring.vectors[row[:, None], :, newest].float().mean(1).chunk(2, -1)[0]  # [B, Hkv, D]
        self.landmark[row, :, pos // self.chunk] = mean.to(k.dtype)
        first = (pos + 1 - self.settings.recent).clamp(min=0) // self.chunk  # chunk of the recent tokens
        near = ring_positions(pos, self.z)[:, None].expand(-1, k.shape[1], -1)  # [B, Hkv, z]
        near = near.where(near >= (first * self.chunk)[:, None, None], -1)
        index = self.select(pos, q, first - 1)
        tokens = torch.cat((page_tokens(self.outlier, self.chunk), index, near), 2)  # negative for none
        self.report_selected(pos, tokens, tokens >= 0)
        # K = RoPE(A U^T) and V of the selected tokens.
        index = index.clamp(min=0)
        latent = self.latent[row[:, None, None], index]  # [B, Hkv, n, r]
        rebuilt = latent @ self.basis.unflatten(1, (k.shape[1], -1)).transpose(-1, -2)
        chosen = self.rope(rebuilt[..., None, :], index)[..., 0, :], self.values.read(None, index)
        parts = zip(self.outliers.vectors.chunk(2, -1), chosen, self.ring.vectors.chunk(2, -1), strict=True)
        k_all, v_all = (torch.cat(part, 2) for part in parts)
        return kernels.attend_rows(q, k_all, v_all, tokens >= 0, pos, scale=self.scale, kernel=self.kernel)

    def select(self, pos: Tensor, q: Tensor, last: Tensor) -> Tensor:
        """Tokens of the chunks up to `last` with the best landmarks [B, Hkv, n], negative for none."""
        whole = (pos + 1) // self.chunk - 1  # the newest chunk that is whole
        outlier = (self.outlier[..., None] == torch.arange(self.landmark.shape[2], device=pos.device)).any(2)
        scores = kernels.scores(
            q, self.landmark, None, whole, self.scale, "largest", kernel=self.kernel
        ).masked_fill(outlier, -torch.inf)
        best = kernels.select(scores, last, (0, self.selected // self.chunk, 0), kernel=self.kernel)
        return page_tokens(best, self.chunk)

    def used(self, row: int, n: int) -> dict[str, Tensor]:
        begun = self.landmark[row, :, : -(-n // self.chunk)]
        return super().used(row, n) | {"latent": self.latent[row, :n], "landmark": begun}

    def bytes_read(self, length: int) -> int:
        """Landmarks, outliers, ring, each head's chosen latents, the basis, and V of the chosen (host)."""
        c, recent = self.config, min(self.z, length)
        outliers = min(self.outlier_tokens, max(0, length - recent))
        chosen = min(self.selected, max(0, length - recent - outliers))
        elements = (length // self.chunk + 2 * (outliers + recent)) * c.kv_dim
        elements += (min(length, c.n_kv_heads * chosen) + c.kv_dim) * self.r
        elements += chosen * c.kv_dim
        return elements * self.context.dtype.itemsize


# ------------------------------------------------------------------------------------------------------- Palu


@dataclass
class PaluSettings:
    """Palu (arXiv 2407.21118), one head a group: low-rank K and V, keys rebuilt before RoPE at each step."""

    keep: float = setting(0.5, "rank of each head's K and V, a fraction of D", within="(0, 1]")

    def bases(self, artifact: Artifact, i: int, kind: str) -> Tensor:
        """Layer i's bases R [Hkv, D, r] of the keys ("k") or the values ("v")."""
        basis = artifact[f"{kind}.basis"][i]
        return basis[..., : rank_of(self.keep, basis.shape[-1])]


def palu_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, R: Tensor, rope) -> tuple[Tensor, tuple]:
    """One decode step of Palu as published (sec. 3.1), for one KV head of its own group: q [G, D] after RoPE,
    k [D] before it, v [d_v] -> [G, d_v]. stored: latents of the keys [S - 1, r] and of the values [S - 1,
    d_v], whose basis W_V and W_O have. R [D, r] is orthonormal; rope(x, positions) rotates x [n, D]."""
    latents, values = stored = appended(stored, k @ R, v)
    keys = rope(latents @ R.mT, torch.arange(len(latents)))  # every step rebuilds and rotates all keys
    return (q @ keys.mT * len(R) ** -0.5).softmax(-1) @ values, stored


class PaluKeys(RebuiltKeys):
    """Keys rebuilt of latents [B, Hkv, S, r] in 16 bits, each head's own."""

    def for_kernel(self, basis: Tensor) -> list[Tensor | None]:
        bias = self.bias.float()[..., None]
        paired = [kernels.interleave_rope(x.flatten(0, 1), len(basis)) for x in (self.basis, bias)]
        return [None, None, paired[0], None, paired[1]]


class PaluCache(Cache):
    """Folded values, and latents of the keys before RoPE and bias: FDC's /PRC, no post-RoPE compression."""

    def __init__(self, context: Context, settings: PaluSettings, attention, artifact: Artifact, i: int):
        super().__init__(context)
        basis, bias = settings.bases(artifact, i, "k"), kv_bias(attention, context.config)[0]
        shape = len(basis), context.capacity, basis.shape[2]
        latents, basis = TokenStore(context, *shape), basis.to(context.device)
        self.keys = PaluKeys(latents, basis, bias.to(context.dtype))
        self.values = TokenStore(context, *shape)

    def write(self, where: tuple, k: Tensor, latent: Tensor) -> None:
        """Stores tokens, of k [n, Hkv, D] before RoPE and folded values [n, Hkv r]."""
        self.keys.latents.write(where, in_basis(k - self.keys.bias, self.keys.basis))
        self.values.write(where, latent.unflatten(-1, (self.config.n_kv_heads, -1)))

    def extend(self, row: int, span: slice, q: Tensor, k: Tensor, v: Tensor, latent: Tensor) -> Tensor:
        self.write((row, span), k, latent)
        k, v = (store.past(row, span.stop) for store in (self.keys, self.values))
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # flash attention wants one width
        return causal_attention(self.rope(q, span), k, padded)[..., : v.shape[-1]]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, latent: Tensor) -> Tensor:
        self.write((self.context.rows, pos), k, latent)
        return kernels.attend(
            self.rope(q, pos), self.keys, self.values, pos, scale=self.scale, kernel=self.kernel
        )


def fit_palu(model: Llama, tokens: Tensor) -> tuple:
    """Whitened SVD of W_K and W_V, one head a group (Palu sec. 3): the best A B for X W is W R R^T, where
    R has the eigenvectors of W^T X^T X W: of the head's keys (or values) on the text, less the bias."""
    from calibrate import head_bases  # only now: it imports generate

    biases = [kv_bias(layer.attention, model.config) for layer in model.layers]

    def keys_and_values(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat((k - biases[i][0], v - biases[i][1]), 1)  # [S, 2 Hkv, D]

    values, basis = head_bases(model, tokens, "palu", keys_and_values)
    kept = values[..., : model.config.head_dim // 2].norm() / values.norm()
    k_basis, v_basis = (t.float() for t in basis.chunk(2, 1))
    return {"k.basis": k_basis, "v.basis": v_basis}, {"energy of 50%": kept.item() ** 2}


# -------------------------------------------------------------------------------------------------- the table

IMPORTANCE = "extras.baselines:fit_doublesparse", of_heads("importance")
PALU = "extras.baselines:fit_palu", of_heads("k.basis", "v.basis")
METHODS = {
    "streaming": Method(StreamingSettings, each_layer(StreamingCache)),
    "h2o": Method(H2oSettings, each_layer(H2oCache)),
    "snapkv": Method(SnapKvSettings, each_layer(SnapKvCache)),
    "quest": Method(QuestSettings, each_layer(QuestCache)),
    "sals_cann": Method(SalsCannSettings, each_layer(SalsCannCache), "calibrate:fit_loki", loki_tensors),
    "doublesparse": Method(DoubleSparseSettings, each_layer(DoubleSparseCache), *IMPORTANCE),
    "fp8": Method(Fp8Settings, each_layer(fp8_cache)),
    "turboquant": Method(TurboQuantSettings, each_layer(turboquant_cache)),
    "shadowkv": Method(ShadowKvSettings, each_layer(ShadowKvCache)),
    "palu": Method(PaluSettings, each_layer(PaluCache), *PALU, fold=fold_values),
}
