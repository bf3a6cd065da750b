"""Other published methods, as rows to compare with: each is one block, as in compress.py.

    python generate.py --method h2o         a name that compress.METHODS lacks is looked up here
    python calibrate.py fit --method palu   and so is how its artifact is fitted
Methods: StreamingLLM, H2O, SnapKV, Quest, SALS as deployed, Double Sparsity, FP8, TurboQuant,
ShadowKV and Palu. METHODS, at the end, is the table.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from compress import (
    Artifact,
    Budget,
    Cache,
    CacheContext,
    DenseCache,
    FittedLayer,
    HostStore,
    KeepSettings,
    Method,
    RebuiltKeys,
    RingStore,
    ScaledStore,
    ScoringCache,
    TokenStore,
    appended,
    attend,
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
from kernels import (
    as_fp16,
    gather_rows,
    matmul_codes,
    pack,
    quantize_int8,
    token_logits,
    unpack,
)
from model import Llama, UserError, apply_rope, causal_attention

# ------------------------------------------------------------------------------------- StreamingLLM


@dataclass
class StreamingSettings:
    """StreamingLLM (arXiv 2309.17453): the first and the last tokens, all others forgotten."""

    sinks: int = setting(4, "x: first tokens that are kept")
    recent: int = setting(508, "w: last tokens that are kept", within="[1, 1e9]")

    def budget(self, max_seq_length: int) -> Budget:
        return fit_budget(max_seq_length, self.sinks, 0, self.recent)


class StreamingCache(DenseCache):
    """x sinks and a ring of the w last tokens, at their own positions (paper: at places in the
    cache)."""

    def __init__(self, context: CacheContext, settings: StreamingSettings):
        super().__init__(context, *slot_stores(context, settings.budget(context.max_seq_length)))

    def select(self, pos: Tensor, q: Tensor) -> Tensor | None:
        """The positions of the tokens in its slots, [B, 1, 1, slots]; None where there are slots
        for all."""
        if self.keys.n_tokens >= self.context.max_seq_length:
            return None
        return self.keys.positions(pos)[:, None, None]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write_token(pos, self.rope(k, pos), v)
        q = self.rope(q, pos)
        self.select(pos, q)  # for who watches: there is nothing to choose
        # All slots are attended: they fill from the left, so that those up to pos hold a token.
        return attend(q, self.keys, self.values, pos, scale=self.scale, kernel=self.kernel)


def slot_stores(context: CacheContext, budget: Budget) -> tuple[RingStore, RingStore]:
    """Slots of keys and of values for the sinks and the recent tokens of a budget."""
    c = context.config
    keys = RingStore(context, c.n_kv_heads, c.head_dim, budget.n_sinks, budget.n_recent)
    values = RingStore(context, c.n_kv_heads, c.head_dim, budget.n_sinks, budget.n_recent)
    return keys, values


# --------------------------------------------------------- what the rows that select have in common


def page_tokens(pages: Tensor, page: int) -> Tensor:
    """The positions [..., n * page] of the tokens of pages [..., n]; of negative pages they are
    negative."""
    return (pages[..., None] * page + torch.arange(page, device=pages.device)).flatten(-2)


class ProxyCache(ScoringCache):
    """K and V in full, and `proxies`, a store of what scores read instead of K: keys in a `basis`
    [Hkv, D, r]."""

    def write_prompt(self, row: int, start: int, k: Tensor, v: Tensor) -> None:
        super().write_prompt(row, start, k, v)
        self.proxies.write_prompt(row, start, in_basis(k, self.basis))

    def write_token(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        super().write_token(pos, k, v)
        self.proxies.write_token(pos, in_basis(k, self.basis))

    def score_bytes(self, length: int) -> int:
        """Bytes that scores read."""
        return length * self.proxies.token_bytes

    def bytes_read(self, length: int) -> int:
        if length <= sum(self.budget):
            return super().bytes_read(length)
        return super().bytes_read(length) + self.score_bytes(length)


class PageCache(ProxyCache):
    """A cache that selects pages of `page` tokens: a method's `score` is of pages,
    [B, Hkv, 1, pages]. The last n_last_pages are always attended."""

    n_last_pages = 1

    def select(self, pos: Tensor, q: Tensor) -> Tensor | None:
        if self.covers_all():
            return None
        n_pages = sum(self.budget) // self.page
        budget = Budget(
            n_sinks=0, n_selected=n_pages - self.n_last_pages, n_recent=self.n_last_pages
        )
        pages = kernels.select(
            self.score(pos, q), pos // self.page, budget, recent=True, kernel=self.kernel
        )
        index = page_tokens(pages, self.page)
        return index.where(index <= pos[:, None, None, None], -1)


# -------------------------------------------------------------------------------------- H2O, SnapKV


class SlotCache(DenseCache):
    """C slots a KV head, with K, V and the position of a token, -1 for none; they fill from the
    left.

    choose(row, start, stop, logits, position) -> which of a row's N tokens are kept [Hkv, n], in
    order; they are those in the slots and those at positions start to stop - 1. logits
    [Hkv, G, W, N] are of the last W queries of a prompt, `settings.window`, and position is
    [Hkv, N]."""

    def __init__(self, context: CacheContext, settings: object):
        budget = settings.budget(context.max_seq_length)
        n_selected = budget.n_selected
        # The selected tokens have the slots of sinks.
        super().__init__(context, *slot_stores(context, Budget(n_selected, 0, budget.n_recent)))
        self.settings = settings
        self.n_slots = self.keys.n_tokens
        self.add_table("position", context.config.n_kv_heads, self.n_slots, fill=-1)

    def past(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        n_filled = int((self.position[row, 0] >= 0).sum())
        return super().past(row, n_filled)

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stop = start + len(q)
        q = self.rope_from(q, start)
        k = self.rope_from(k, start)
        past_and_new_k, past_and_new_v = self.past_and_new(row, start, k, v)  # [N, Hkv, D] each
        self.keep_best(row, start, stop, q, past_and_new_k, past_and_new_v)
        return causal_attention(q, past_and_new_k, past_and_new_v)

    def keep_best(self, row: int, start: int, stop: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Fills a row's slots with the tokens that `choose` names, of q after RoPE and past and new
        k, v."""
        n_heads = self.config.n_kv_heads
        positions = self.context.positions[start:stop]
        n_held = len(k) - len(positions)
        held = self.position[row, :, :n_held]
        position = torch.cat((held, positions.expand(n_heads, -1)), 1)  # [Hkv, N]
        # [Hkv, G, W, D]
        last = q[-self.settings.window :].unflatten(1, (n_heads, -1)).permute(1, 2, 0, 3)
        k = k.transpose(0, 1)
        v = v.transpose(0, 1)
        logits = (last @ k[:, None].mT).float() * self.scale
        later = position[:, None, None] > positions[-last.shape[2] :, None]
        kept = self.choose(row, start, stop, logits.masked_fill(later, -torch.inf), position)
        slots = self.keys.vectors, self.values.vectors, self.position
        for slot, x in zip(slots, (k, v, position), strict=True):
            slot[row, :, : kept.shape[1]] = gather_rows(x[None], kept[None])[0]
        self.position[row, :, kept.shape[1] :] = -1

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """The positions of the tokens in the slots, which are all attended: [B, Hkv, 1, C]."""
        return self.position[:, :, None]


@dataclass
class H2oSettings:
    """H2O, the heavy-hitter oracle (arXiv 2306.14048): what got little attention so far is
    evicted."""

    keep: float = keep_setting(512)
    window: int = setting(
        64, "W: last queries of a prompt that attention is summed of", within="[1, 1e9]"
    )

    def budget(self, max_seq_length: int) -> Budget:
        """Half of the tokens are heavy hitters, half are recent."""
        total = kept_tokens(self.keep, max_seq_length)
        n_recent = max(1, total - round(total / 2))
        return Budget(n_sinks=0, n_selected=total - n_recent, n_recent=n_recent)


def h2o_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, slots: int, recent: int) -> tuple:
    """One decode step of H2O as published (Algorithm 1), for one KV head: q [G, D], k, v [D] after
    RoPE -> [G, D]. stored, of n <= slots tokens: K and V [n, D], positions in order and attention
    so far [n]."""
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

    def __init__(self, context: CacheContext, settings: H2oSettings):
        super().__init__(context, settings)
        self.recent = settings.budget(context.max_seq_length).n_recent
        self.add_table("attention", *self.position.shape[1:], dtype=torch.float32)

    def choose(self, row: int, start: int, stop: int, logits: Tensor, position: Tensor) -> Tensor:
        attention = logits.softmax(-1).sum((1, 2))  # [Hkv, N]
        n_held = min(start, self.n_slots)
        attention[:, :n_held] += self.attention[row, :, :n_held]
        ranked = attention.masked_fill(position >= stop - self.recent, torch.inf)
        kept = ranked.topk(min(self.n_slots, stop)).indices.sort(-1).values
        self.attention[row, :, : kept.shape[1]] = attention.gather(1, kept)
        return kept

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.rope(q, pos)
        # 1. The new token takes an empty slot, or that of the least attention that is not recent.
        is_recent = self.position > pos[:, None, None] - self.recent
        cost = self.attention.masked_fill(is_recent, torch.inf)
        victim = cost.masked_fill(self.position < 0, -torch.inf).argmin(-1)  # [B, Hkv]
        heads = torch.arange(victim.shape[1], device=pos.device)
        slot = self.context.rows[:, None], heads, victim
        self.keys.vectors[slot] = self.rope(k, pos)
        self.values.vectors[slot] = v
        self.position[slot] = pos[:, None]
        self.attention.scatter_(2, victim[..., None], 0.0)
        # 2. Attend all slots, and add what each has got.
        live = self.select(pos, q) >= 0
        every = torch.full_like(pos, self.n_slots - 1)
        logits = kernels.scores(
            q, self.keys.vectors, None, every, self.scale, "each", kernel=self.kernel
        )  # [B, Hkv, G, C]
        logits = logits.masked_fill(~live, -torch.inf)
        self.attention += logits.softmax(-1).sum(2)
        return kernels.attend_logits(logits, self.values.vectors, every, kernel=self.kernel)

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        state = super().row_state(row, length)
        state["position"] = self.position[row, :, :length]
        state["attention"] = self.attention[row, :, :length]
        return state

    def bytes_read(self, length: int) -> int:
        slots = min(length, self.n_slots)
        return super().bytes_read(length) + slots * self.config.n_kv_heads * 8


@dataclass
class SnapKvSettings:
    """SnapKV (arXiv 2404.14469): of a prompt what its last queries attend is kept, and later
    tokens."""

    keep: float = keep_setting(512)
    room: int = setting(
        128, "of these for tokens after a prompt, the last of them", within="[1, 1e9]"
    )
    window: int = setting(
        32, "W: last tokens of a prompt, which are kept, and choose", within="[1, 1e9]"
    )
    pool: int = setting(
        5, "neighbours that a prompt's attention is averaged over", within="[1, 99]"
    )

    def budget(self, max_seq_length: int) -> Budget:
        total = kept_tokens(self.keep, max_seq_length)
        if total < max_seq_length:
            left_to_select(self.keep, total, max_seq_length, 0, self.window + self.room)
        return fit_budget(total, 0, total, self.room)


def snapkv_prompt(q: Tensor, k: Tensor, n: int, window: int, pool: int) -> Tensor:
    """The n tokens of a prompt that SnapKV keeps as published (Listing 1), for one KV head: q
    [G, S, D], k [S, D] after RoPE. A decode step then appends K and V, and attends all that is
    there."""
    positions, S = torch.arange(len(k)), len(k)
    if S <= n:
        return positions
    # 1. What the last queries attend.
    logits = q[:, -window:] @ k.mT * k.shape[1] ** -0.5
    weights = logits.masked_fill(positions > positions[-window:, None], -torch.inf).softmax(-1)
    # 2. Their votes for the tokens before them; neighbours of a token with many votes get some,
    # too.
    votes = weights[..., :-window].sum((0, 1))
    votes = F.avg_pool1d(votes[None], pool, 1, pool // 2)[0, : S - window]
    # 3. The best, and the last ones.
    return torch.cat((votes.topk(n - window).indices, positions[-window:]))


class SnapKvCache(SlotCache):
    """The tokens that are kept of a prompt, then those after it; the last `room` slots are a
    ring."""

    def __init__(self, context: CacheContext, settings: SnapKvSettings):
        super().__init__(context, settings)
        self.add_table("dropped")  # tokens of the prompt that are not kept

    def choose(self, row: int, start: int, stop: int, logits: Tensor, position: Tensor) -> Tensor:
        is_last = position >= stop - self.settings.window
        pool = self.settings.pool
        votes = logits.softmax(-1).sum((1, 2)).masked_fill(is_last, 0)
        votes = F.avg_pool1d(votes, pool, 1, pool // 2)[:, : votes.shape[1]]
        votes = votes.masked_fill(is_last, torch.inf)
        room = self.keys.n_recent if self.n_slots < self.context.max_seq_length else 0
        kept = votes.topk(min(votes.shape[1], self.n_slots - room)).indices
        self.dropped[row] = stop - kept.shape[1]
        return kept.sort(-1).values

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.rope(q, pos)
        place = pos - self.dropped
        self.write_token(place, self.rope(k, pos), v)
        self.position[self.context.rows, :, self.keys.slot(place)] = pos[:, None]
        self.select(pos, q)  # for who watches: all slots are attended
        return attend(q, self.keys, self.values, place, scale=self.scale, kernel=self.kernel)


# -------------------------------------------------------------------------------------------- Quest


@dataclass
class QuestSettings:
    """Quest (arXiv 2406.10774): pages of tokens, ranked by an upper bound of their logits."""

    keep: float = keep_setting(512)
    page: int = setting(16, "tokens of a page", within="[1, 1e9]")
    skip: str = setting("0,1", "layers that attend every token")

    def budget(self, max_seq_length: int) -> Budget:
        """The selected tokens are those of as many whole pages as fit, the released code's 3 at
        least."""
        n_selected = kept_tokens(self.keep, max_seq_length)
        page = min(self.page, max_seq_length)
        if n_selected < max_seq_length:
            n_selected = min(max(3, n_selected // page) * page, max_seq_length)
        return Budget(n_sinks=0, n_selected=n_selected, n_recent=0)


def quest_step(q: Tensor, k: Tensor, v: Tensor, stored: tuple, page: int, n: int) -> tuple:
    """One decode step of Quest as published (sec. 3.3), for one KV head, whose queries choose n
    pages: q [G, D], k, v [D] after RoPE -> [G, D]. stored: K and V [S - 1, D]."""
    keys, values = stored = appended(stored, k, v)
    # 1. The least and the largest key of each page bound a query's logits there.
    bounds = (page_keys.aminmax(dim=0) for page_keys in keys.split(page))
    low, high = map(torch.stack, zip(*bounds, strict=True))  # [pages, D]
    # [G, pages]
    bound = torch.maximum(q[:, None] * low, q[:, None] * high).sum(-1) * len(k) ** -0.5
    # 2. The best pages, and the last.
    last = len(low) - 1
    best = bound.log_softmax(-1).amax(0)[:last].topk(min(n - 1, last)).indices
    tokens = (
        torch.cat((best, torch.tensor([last])))[:, None] * page + torch.arange(page)
    ).flatten()
    tokens = tokens[tokens < len(keys)]
    # 3. Attend their tokens.
    return (q @ keys[tokens].mT * len(k) ** -0.5).softmax(-1) @ values[tokens], tokens, stored


class QuestCache(PageCache):
    """The proxy of a page is the largest and the least key of every channel, after RoPE."""

    def __init__(self, context: CacheContext, settings: QuestSettings):
        S = context.max_seq_length
        super().__init__(context, settings.budget(S))
        c = context.config
        self.page = min(settings.page, S)
        self.proxies = TokenStore(context, c.n_kv_heads, -(-S // self.page), 2 * c.head_dim)

    def write_prompt(self, row: int, start: int, k: Tensor, v: Tensor) -> None:
        ScoringCache.write_prompt(self, row, start, k, v)
        # Whole pages, the first from its beginning; the last token fills up the last page.
        stop = start + len(k)
        first_page = start // self.page
        n_pages = -(-stop // self.page) - first_page
        tokens = torch.arange(
            first_page * self.page, (first_page + n_pages) * self.page, device=k.device
        )
        keys = self.keys.vectors[row, :, tokens.clamp(max=stop - 1)].transpose(0, 1)
        low, high = keys.unflatten(0, (-1, self.page)).aminmax(dim=1)  # [n, Hkv, D]
        self.proxies.write_prompt(row, first_page, torch.cat((high, low), -1))

    def write_token(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        ScoringCache.write_token(self, pos, k, v)
        page = pos // self.page
        is_first = (pos % self.page == 0)[:, None, None]
        high, low = self.proxies.vectors[self.context.rows, :, page].chunk(2, -1)  # [B, Hkv, D]
        high = torch.where(is_first, k, high.maximum(k))
        low = torch.where(is_first, k, low.minimum(k))
        self.proxies.write_token(page, torch.cat((high, low), -1))

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """[max(q, 0), min(q, 0)] . [largest, least] key is the largest logit in a page (sec.
        3.3)."""
        last_page = pos // self.page
        bounds = torch.cat((q.clamp(min=0), q.clamp(max=0)), -1)
        scores = kernels.scores(
            bounds, self.proxies.vectors, None, last_page, self.scale, "largest", kernel=self.kernel
        )
        return scores.unsqueeze(2)  # [B, Hkv, 1, pages]

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        state = super().row_state(row, length)
        state["proxies.vectors"] = self.proxies.vectors[row, :, : -(-length // self.page)]
        return state

    def score_bytes(self, length: int) -> int:
        return super().score_bytes(-(-length // self.page))


# --------------------------------------------------------------------------------- SALS as deployed


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

    def logits(self, q: Tensor) -> Tensor:
        return token_logits(q, self.vectors, self.scale)

    def mix(self, weights: Tensor) -> Tensor:
        return matmul_codes(weights * self.scale[:, :, None], self.vectors)


@dataclass
class SalsCannSettings(QuestSettings):
    """SALS as in CANN's quant_sals_indexer: int8 K and V, in pages that low-rank keys in 4 bits
    choose."""

    keep: float = keep_setting(0.25)
    skip: str = setting("", "layers that attend every token")


CANN_TAIL = 8  # last pages, which are always attended


class SalsCannCache(PageCache):
    """K and V in int8; the proxy of a key is its D/2 leading components in 4 bits. Nothing is
    rebuilt."""

    def __init__(self, context: CacheContext, settings: SalsCannSettings, fitted: FittedLayer):
        n_heads = context.config.n_kv_heads
        S = context.max_seq_length
        D = context.config.head_dim
        keys = Int8Store(context, n_heads, S, D)
        values = Int8Store(context, n_heads, S, D)
        super().__init__(context, settings.budget(S), keys, values)
        self.page = min(settings.page, S)
        self.n_last_pages = min(CANN_TAIL, sum(self.budget) // self.page - 1)
        r = rank_of(0.5, D)
        r = max(2, r - r % (32 if r > 32 else 2))  # as codes come
        basis = fitted.artifact["post.basis"][fitted.i, ..., :r]  # [Hkv, D, r]
        self.basis = basis.to(context.device, context.dtype)
        self.proxies = ScaledStore(context, n_heads, S, r, 4)

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """A page's score is the log-sum-exp of its logits, of the mean of a group's queries."""
        query = in_basis(q.unflatten(1, (self.config.n_kv_heads, -1)).mean(2), self.basis)
        logits = kernels.scores(
            query, self.proxies.read_all(), None, pos, self.scale, "each", kernel=self.kernel
        )  # [B, Hkv, 1, S]
        logits = F.pad(logits, (0, -logits.shape[-1] % self.page), value=-torch.inf)
        return logits.unflatten(-1, (-1, self.page)).logsumexp(-1)


# ---------------------------------------------------------------------------------- Double Sparsity


@dataclass
class DoubleSparseSettings(KeepSettings):
    """Double Sparsity (arXiv 2408.07092): top-k tokens, scored on the channels that matter most."""

    channels: float = setting(
        0.125, "r_c: channels that are scored, as a fraction of D", within="(0, 1]"
    )
    skip: str = setting("0,1", "layers that attend every token")


class DoubleSparseCache(ProxyCache):
    """The proxy of a key is its label: its r_c most important channels, after RoPE."""

    def __init__(self, context: CacheContext, settings: DoubleSparseSettings, fitted: FittedLayer):
        super().__init__(context, settings.budget(context.max_seq_length))
        c = context.config
        r = rank_of(settings.channels, c.head_dim)
        best = fitted.artifact["importance"][fitted.i].topk(r).indices  # [Hkv, r_c]
        channels = F.one_hot(best, c.head_dim).mT  # [Hkv, D, r_c]
        self.basis = channels.to(context.device, context.dtype)
        self.proxies = TokenStore(context, c.n_kv_heads, context.max_seq_length, r)

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """Of their labels, the largest weight that any query of a group gives: [B, Hkv, 1, S]."""
        labels = self.proxies.vectors  # [B, Hkv, S, r_c]
        scores = kernels.scores(
            in_basis(q, self.basis), labels, None, pos, self.scale, "largest", kernel=self.kernel
        )
        return scores.unsqueeze(2)


def fit_doublesparse(model: Llama, tokens: Tensor) -> tuple:
    """How much each channel of a KV head adds to the logits, after RoPE (Double Sparsity sec. 3):
    the mean of
    |q_c k_c|, q and k of the same token, summed over the group."""
    from calibrate import observe, tracked  # only now: it imports generate

    c, sums = model.config, [0.0] * model.config.n_layers

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        q, k = (apply_rope(x, cos, sin).double().abs() for x in (q, k))
        # [Hkv, D]
        sums[i] = sums[i] + (q.unflatten(-2, (c.n_kv_heads, -1)).sum(-2) * k).sum((0, 1))

    with torch.inference_mode():
        observe(model, tracked("fit", tokens[:, None]), see)
    importance = torch.stack(sums).cpu() / tokens.numel()
    eighth = importance.topk(max(1, model.config.head_dim // 8)).values.sum(-1) / importance.sum(-1)
    return {"importance": importance.float()}, {"importance of 12.5%": eighth.mean().item()}


# ------------------------------------------------------------------------ keys less their mean, FP8


class CentredCache(DenseCache):
    """Stores hold keys after RoPE less the mean key of their row's prompt, which is rotated as they
    are."""

    def __init__(self, context: CacheContext, keys: TokenStore, values: TokenStore):
        super().__init__(context, keys, values)
        self.add_table("mean", keys.n_heads, keys.width, dtype=torch.float32)

    def mean_keys(self, row: int, start: int, n: int) -> Tensor:
        """A row's mean key after RoPE at n positions from `start` on, [n, Hkv, D]."""
        return self.rope_from(self.mean[row].expand(n, -1, -1), start)

    def write_prompt(self, row: int, start: int, k: Tensor, v: Tensor) -> None:
        super().write_prompt(row, start, k - self.mean_keys(row, start, len(k)), v)

    def write_token(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        super().write_token(pos, k - self.rope(self.mean, pos), v)

    def past(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        k, v = super().past(row, length)
        return (k + self.mean_keys(row, 0, length)).to(k.dtype), v

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if start == 0:
            self.mean[row] = k.float().mean(0)
        return super().prefill(row, start, q, k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write_token(pos, self.rope(k, pos), v)
        q = self.rope(q, pos).unflatten(1, (k.shape[1], -1))
        # [B, Hkv, S, D]
        mean = self.rope(self.mean[:, None], self.context.positions).transpose(1, 2)
        # in fp32: the mean key may be a hundred times what is left
        keys = self.keys.read_all() + mean
        logits = (q.to(keys) @ keys.mT).float() * self.scale
        return kernels.attend_logits(logits, self.values.read_all(), pos, kernel=self.kernel)


@dataclass
class CentreSettings:
    """The setting of codes that fail where keys have biases."""

    centre: bool = setting(False, "take the mean key of a prompt off its keys first")


@dataclass
class Fp8Settings(CentreSettings):
    """FP8 as serving engines have it: K and V in e4m3, a byte a number, with one scale a head."""


E4M3 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa
# the largest number, 448, and how many times a prompt's may grow to it
FP8_RANGE = torch.finfo(E4M3).max, 16


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x in e4m3, in units of the scale. Beyond 448 it saturates."""
    return (x / scale).clamp(-FP8_RANGE[0], FP8_RANGE[0]).to(E4M3)


def fp8_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, scales: tuple, mean: Tensor, rope
) -> tuple:
    """One decode step over an FP8 cache, for one KV head: q [G, D] after RoPE, k [D] before it, v
    [D] -> [G, D]. stored: codes of K after RoPE and of V [S - 1, D]; scales: of both. mean [D]: the
    prompt's mean key before RoPE (ours), or 0; rope(x, positions) rotates x [n, D]."""
    positions = torch.arange(len(stored[0]) + 1)
    # 1. Codes of the new key, less the mean key at its position, and of the new value.
    new = rope((k - mean)[None], positions[-1:])[0], v
    stored = appended(stored, *map(fp8, new, scales))
    # 2. Attend every token; the mean key comes back, exactly.
    keys, values = (codes.to(q.dtype) * scale for codes, scale in zip(stored, scales, strict=True))
    keys = keys + rope(mean.expand(len(positions), -1), positions)
    return (q @ keys.mT * len(k) ** -0.5).softmax(-1) @ values, stored


class Fp8Store(Int8Store):
    """Numbers in e4m3, with one scale [B, Hkv, 1] a head that the first write to a row decides:
    there the largest number becomes 28, so that later ones saturate from 16 times of it on."""

    kind = "fp8"  # which no kernel knows

    def __init__(self, context: CacheContext):
        c = context.config
        super().__init__(context, c.n_kv_heads, context.max_seq_length, c.head_dim)
        self.register_buffer("scale", context.zeros(c.n_kv_heads, 1, dtype=torch.float32).fill_(1))

    def layout(self) -> dict[str, tuple]:
        return {"vectors": ((self.width,), E4M3)}

    def parts(self) -> list[Tensor]:
        return [self.vectors, self.scale]

    def write_prompt(self, row: int, start: int, x: Tensor) -> None:
        if start == 0:
            most = x.abs().amax((0, 2))[:, None].float()
            end, growth = FP8_RANGE
            self.scale[row] = torch.where(most > 0, most * growth / end, 1)
        stop = start + len(x)
        codes = fp8(x, self.scale[row]).view(torch.uint8)
        self.vectors.view(torch.uint8)[row, :, start:stop] = codes.transpose(0, 1)

    def write_token(self, pos: Tensor, x: Tensor) -> None:
        rows = self.context.rows
        codes = fp8(x, self.scale[rows]).view(torch.uint8)
        self.vectors.view(torch.uint8)[rows, :, pos] = codes

    def of_row(self, row: int, length: int) -> Tensor:
        return self.decode(self.vectors[row, :, :length], self.scale[row]).transpose(0, 1)

    def logits(self, q: Tensor) -> Tensor:
        return token_logits(q, self.read_all())

    def mix(self, weights: Tensor) -> Tensor:
        return weights @ self.read_all().to(weights.dtype)

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        return super().row_state(row, length) | {"scale": self.scale[row]}

    def bytes_formula(self) -> int:
        return super().bytes_formula() + self.scale.nbytes


def coded_cache(context: CacheContext, settings: CentreSettings, store: Callable) -> Cache:
    """K and V in two stores of store()."""
    return (CentredCache if settings.centre else DenseCache)(context, store(), store())


def fp8_cache(context: CacheContext, settings: Fp8Settings) -> Cache:
    return coded_cache(context, settings, lambda: Fp8Store(context))


# --------------------------------------------------------------------------------------- TurboQuant


@dataclass
class TurboQuantSettings(CentreSettings):
    """TurboQuant (arXiv 2504.19874): rotated keys and values, each number at the nearest of fixed
    levels."""

    bits: int = setting(4, "bits of a code", (2, 4))


# The levels above 0 at which normal numbers have the least mean square error, in standard
# deviations (Max, as above). A coordinate of a random unit vector in D dims is nearly normal (Lemma
# 1), of deviation D^-1/2.
LEVELS = {
    2: (0.4528, 1.51),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


def turboquant(x: Tensor, Pi: Tensor, levels: Tensor) -> Tensor:
    """x [..., D] as its codes decode (Algorithm 1, with its line numbers); Pi [D, D]: a random
    rotation."""
    norm = x.norm(dim=-1, keepdim=True)
    y = x / norm @ Pi.mT  # 5. Rotate the unit vector.
    codes = (y[..., None] - levels).abs().argmin(-1)  # 6. The nearest level of each number.
    return as_fp16(norm) * (levels[codes] @ Pi)  # 9, 10. Decode, and rotate back.


class LevelStore(ScaledStore):
    """Codes of a rotated row's numbers, each of the nearest level of a unit vector's, and the row's
    norm."""

    kind = "levels"  # which no kernel knows

    def __init__(self, context: CacheContext, bits: int):
        width = context.config.head_dim
        super().__init__(context, context.config.n_kv_heads, context.max_seq_length, width, bits)
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

    def logits(self, q: Tensor) -> Tensor:
        return q.float() @ self.rotation @ self.rotated(self.vectors, self.scale).mT

    def mix(self, weights: Tensor) -> Tensor:
        return weights @ self.rotated(self.vectors, self.scale) @ self.rotation.mT


def turboquant_cache(context: CacheContext, settings: TurboQuantSettings) -> Cache:
    return coded_cache(context, settings, lambda: LevelStore(context, settings.bits))


# ----------------------------------------------------------------------------------------- ShadowKV


@dataclass
class ShadowKvSettings:
    """ShadowKV (arXiv 2410.21465): low-rank pre-RoPE keys, values in host memory, chunks with
    landmarks."""

    keep: float = keep_setting(1024)
    rank: float = setting(0.15625, "rank of the keys / (Hkv*D), as 160 / 1024", within="(0, 1]")
    chunk: int = setting(8, "tokens of a chunk", within="[1, 1e9]")
    outliers: int = setting(48, "chunks least like their mean, kept exactly")
    recent: int = setting(
        32, "last tokens, kept exactly, with up to a chunk more", within="[1, 1e9]"
    )

    def budget(self, max_seq_length: int) -> Budget:
        """Outliers stand in the place of sinks."""
        selected, outliers, recent = self.layout(max_seq_length)
        selected, outliers, recent = fit_budget(max_seq_length, selected, outliers, recent)
        return Budget(n_sinks=outliers, n_selected=selected, n_recent=recent)

    def layout(self, max_seq_length: int) -> tuple[int, int, int]:
        """What is selected, and what is stored for it beside it: tokens of chunks, of outlier
        chunks, recent ones. Whole chunks; room for all in each where all are attended."""
        chunk = min(self.chunk, max_seq_length)
        outliers = self.outliers * chunk
        recent = self.recent + chunk - 1
        total = kept_tokens(self.keep, max_seq_length)
        n_chunks = -(-max_seq_length // chunk)
        if total >= max_seq_length:
            return (
                n_chunks * chunk,
                min(self.outliers, n_chunks) * chunk,
                min(recent, max_seq_length),
            )
        selected = (total - outliers - recent) // chunk
        if selected < 1:
            exact = f"{self.outliers} outlier chunks and {recent} recent tokens"
            raise UserError(
                f"--keep {self.keep:g} of {max_seq_length} leaves no chunk of {chunk} beside"
                f" {exact}; lower --outliers or --recent"
            )
        return selected * chunk, outliers, recent


def shadowkv_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, U: Tensor, outliers: Tensor, budget: tuple, rope
) -> tuple:
    """One decode step of ShadowKV as published (Algorithm 2), for one sequence.

    q [Hq, D], k, v [Hkv, D]: before RoPE -> [Hq, D], and each KV head's tokens. stored: latents
    [S - 1, r], K after RoPE (for landmarks, outliers, recent tokens) and V [S - 1, Hkv, D]. U
    [Hkv*D, r]: of the prompt's SVD. outliers [Hkv, .]: exact chunks. budget: chunks to select,
    tokens of a chunk, recent tokens."""
    (n, chunk, recent), S, (heads, D), outputs, chosen = budget, len(stored[0]) + 1, k.shape, [], []
    q, rotated = (rope(x[None], torch.tensor([S - 1]))[0] for x in (q, k))
    latents, keys, values = stored = appended(stored, k.flatten() @ U, rotated, v)
    q, near = q.unflatten(0, (heads, -1)), max(0, S - recent) // chunk
    for h in range(heads):
        # 1. The n best of the older chunks, by the largest weight that a query gives their mean
        # key.
        landmarks = keys[: S // chunk * chunk, h].unflatten(0, (-1, chunk)).mean(1)
        scores = (q[h] @ landmarks.mT * D**-0.5).log_softmax(-1).amax(0)[:near]
        scores[outliers[h][outliers[h] < near]] = -torch.inf
        best = scores.topk(min(n, int(scores.isfinite().sum()))).indices
        # 2. Rebuild their keys; outliers and recent tokens are exact.
        rebuilt, far = (
            (c[:, None] * chunk + torch.arange(chunk)).flatten() for c in (best, outliers[h])
        )
        exact = torch.cat((far, torch.arange(near * chunk, S)))
        k_best = rope((latents[rebuilt] @ U.unflatten(0, (heads, D))[h].mT)[:, None], rebuilt)[:, 0]
        # 3. Attend. The values of what is rebuilt come from host memory.
        tokens = torch.cat((rebuilt, exact))
        weights = (q[h] @ torch.cat((k_best, keys[exact, h])).mT * D**-0.5).softmax(-1)
        outputs.append(weights @ values[tokens, h])
        chosen.append(tokens)
    return torch.cat(outputs), chosen, stored


class ShadowKvCache(Cache):
    """Latents of pre-RoPE keys on the basis of the prompt's own SVD, joint over heads; landmarks of
    chunks; outlier chunks and a ring of recent tokens, K beside V; V of every token in host
    memory."""

    def __init__(self, context: CacheContext, settings: ShadowKvSettings):
        super().__init__(context)
        c = context.config
        n_heads = c.n_kv_heads
        D = c.head_dim
        S = context.max_seq_length
        self.settings = settings
        self.chunk = min(settings.chunk, S)
        self.selected, self.outlier_tokens, self.n_recent = settings.layout(S)
        self.r = rank_of(settings.rank, c.kv_dim)
        self.add_table("basis", c.kv_dim, self.r, dtype=context.dtype)
        self.add_table("latent", S, self.r, dtype=context.dtype)
        self.add_table("landmark", n_heads, -(-S // self.chunk), D, dtype=context.dtype)
        self.add_table("outlier", n_heads, self.outlier_tokens // self.chunk, fill=-1)
        self.outliers = TokenStore(context, n_heads, self.outlier_tokens, 2 * D)
        self.ring = RingStore(context, n_heads, 2 * D, 0, self.n_recent)
        self.values = HostStore(context, n_heads, S, D)

    def past(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Rebuilt keys, but for those of outliers and recent tokens."""
        latents = self.latent[row, :length]
        keys = (latents @ self.basis[row].T).unflatten(1, (self.config.n_kv_heads, -1))
        kv = torch.cat((self.rope_from(keys, 0), self.values.of_row(row, length)), -1)
        index = page_tokens(self.outlier[row], self.chunk)  # [Hkv, m], negative for none
        head, place = (index >= 0).nonzero(as_tuple=True)
        kv[index[head, place], head] = self.outliers.vectors[row, head, place]
        return self.ring.overlay(row, kv).chunk(2, -1)

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stop = start + len(q)
        flat = k.flatten(1)  # before RoPE
        q = self.rope_from(q, start)
        k = self.rope_from(k, start)
        past_and_new_k, past_and_new_v = self.past_and_new(row, start, k, v)
        # Latents, in the basis of the prompt.
        if start == 0:
            # its eigenvectors are the right singular vectors of K
            gram = flat.double().T @ flat.double()
            self.basis[row] = (
                torch.linalg.eigh(gram).eigenvectors.flip(-1)[:, : self.r].to(flat.dtype)
            )
        self.latent[row, start:stop] = flat @ self.basis[row]
        # Landmarks, of the chunk that goes on, or begins, and those after it.
        first = start // self.chunk
        # its tokens in the ring
        begun = self.context.positions[first * self.chunk : start] % self.n_recent
        begun_k, _ = self.ring.vectors[row, :, begun].chunk(2, -1)
        keys = torch.cat((begun_k.transpose(0, 1), k))
        chunks = keys[: len(keys) // self.chunk * self.chunk].unflatten(0, (-1, self.chunk)).float()
        landmark = chunks.mean(1)  # [n, Hkv, D]
        self.landmark[row, :, first : first + len(chunks)] = landmark.transpose(0, 1).to(k.dtype)
        kv = torch.cat((k, v), -1)
        if start == 0:
            self.keep_outliers(row, kv, chunks, landmark)
        self.values.write_prompt(row, start, v)
        self.ring.write_prompt(row, start, kv)
        return causal_attention(q, past_and_new_k, past_and_new_v)

    def keep_outliers(self, row: int, kv: Tensor, chunks: Tensor, landmark: Tensor) -> None:
        """Stores the old chunks of a prompt that are least like their mean: kv [S, Hkv, 2D], chunks
        of keys [n, chunk, Hkv, D] and their means [n, Hkv, D]."""
        n_old = max(0, len(kv) - self.settings.recent) // self.chunk
        # [old, Hkv]
        likeness = F.cosine_similarity(chunks[:n_old], landmark[:n_old, None], dim=-1).amin(1)
        n = min(self.outlier.shape[-1], n_old)
        ids = likeness.T.topk(n, largest=False).indices  # [Hkv, n]
        self.outlier[row] = -1
        self.outlier[row, :, : ids.shape[1]] = ids.int()
        tokens = page_tokens(ids, self.chunk)
        heads = torch.arange(len(ids), device=kv.device)[:, None]
        self.outliers.vectors[row, :, : tokens.shape[1]] = kv[tokens, heads]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n_heads = k.shape[1]
        rows = self.context.rows
        self.latent[rows, pos] = (k.flatten(1)[:, None] @ self.basis)[:, 0]
        q = self.rope(q, pos)
        k = self.rope(k, pos)
        self.ring.write_token(pos, torch.cat((k, v), -1))
        self.values.write_token(pos, v)
        # The mean of the last chunk is written at every step and read when the chunk is whole.
        newest = page_tokens((pos // self.chunk)[:, None], self.chunk) % self.n_recent
        # [B, Hkv, D]
        mean = self.ring.vectors[rows[:, None], :, newest].float().mean(1).chunk(2, -1)[0]
        self.landmark[rows, :, pos // self.chunk] = mean.to(k.dtype)
        tokens = self.select(pos, q)[:, :, 0]
        # K = RoPE(A U^T) and V of the selected tokens.
        index = tokens[..., self.outlier_tokens : tokens.shape[-1] - self.n_recent].clamp(min=0)
        latent = self.latent[rows[:, None, None], index]  # [B, Hkv, n, r]
        rebuilt = latent @ self.basis.unflatten(1, (n_heads, -1)).transpose(-1, -2)
        k_selected = self.rope(rebuilt[..., None, :], index)[..., 0, :]
        v_selected = self.values.read(index[:, :, None])[:, :, 0]
        k_outliers, v_outliers = self.outliers.vectors.chunk(2, -1)
        k_recent, v_recent = self.ring.vectors.chunk(2, -1)
        k_all = torch.cat((k_outliers, k_selected, k_recent), 2)
        v_all = torch.cat((v_outliers, v_selected, v_recent), 2)
        return kernels.attend_plain(
            q, k_all, v_all, tokens >= 0, pos, scale=self.scale, kernel=self.kernel
        )

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """Outliers, then the tokens of the best chunks, then the recent tokens: an index
        [B, Hkv, 1, n]."""
        # chunk of the recent tokens
        first = (pos + 1 - self.settings.recent).clamp(min=0) // self.chunk
        near = ring_positions(pos, self.n_recent)[:, None].expand(-1, self.config.n_kv_heads, -1)
        near = near.where(near >= (first * self.chunk)[:, None, None], -1)
        chosen = self.select_chunks(pos, q, first - 1)
        return torch.cat((page_tokens(self.outlier, self.chunk), chosen, near), 2)[:, :, None]

    def select_chunks(self, pos: Tensor, q: Tensor, last: Tensor) -> Tensor:
        """Tokens of the chunks up to `last` with the best landmarks [B, Hkv, n], negative for
        none."""
        whole = (pos + 1) // self.chunk - 1  # the newest chunk that is whole
        chunks = torch.arange(self.landmark.shape[2], device=pos.device)
        is_outlier = (self.outlier[..., None] == chunks).any(2)
        scores = kernels.scores(
            q, self.landmark, None, whole, self.scale, "largest", kernel=self.kernel
        ).masked_fill(is_outlier, -torch.inf)
        budget = Budget(n_sinks=0, n_selected=self.selected // self.chunk, n_recent=0)
        best = kernels.select(scores.unsqueeze(2), last, budget, kernel=self.kernel)
        return page_tokens(best[:, :, 0], self.chunk)

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        state = super().row_state(row, length)
        state["latent"] = self.latent[row, :length]
        state["landmark"] = self.landmark[row, :, : -(-length // self.chunk)]
        return state

    def bytes_host(self) -> int:
        return self.values.vectors.nbytes

    def bytes_read(self, length: int) -> int:
        """Landmarks, outliers, ring, each head's chosen latents, the basis, and V of the chosen
        (host)."""
        c = self.config
        recent = min(self.n_recent, length)
        outliers = min(self.outlier_tokens, max(0, length - recent))
        chosen = min(self.selected, max(0, length - recent - outliers))
        elements = (length // self.chunk + 2 * (outliers + recent)) * c.kv_dim
        elements += (min(length, c.n_kv_heads * chosen) + c.kv_dim) * self.r
        elements += chosen * c.kv_dim
        return elements * self.context.dtype.itemsize


# --------------------------------------------------------------------------------------------- Palu


@dataclass
class PaluSettings:
    """Palu (arXiv 2407.21118), one head a group: low-rank K and V, keys rebuilt before RoPE at each
    step."""

    keep: float = setting(0.5, "rank of each head's K and V, a fraction of D", within="(0, 1]")

    def bases(self, artifact: Artifact, i: int, kind: str) -> Tensor:
        """Layer i's bases R [Hkv, D, r] of the keys ("k") or the values ("v")."""
        basis = artifact[f"{kind}.basis"][i]
        return basis[..., : rank_of(self.keep, basis.shape[-1])]


def palu_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, R: Tensor, rope
) -> tuple[Tensor, tuple]:
    """One decode step of Palu as published (sec. 3.1), for one KV head of its own group: q [G, D]
    after RoPE, k [D] before it, v [d_v] -> [G, d_v]. stored: latents of the keys [S - 1, r] and of
    the values [S - 1, d_v], whose basis W_V and W_O have. R [D, r] is orthonormal; rope(x,
    positions) rotates x [n, D]."""
    latents, values = stored = appended(stored, k @ R, v)
    # every step rebuilds and rotates all keys
    keys = rope(latents @ R.mT, torch.arange(len(latents)))
    return (q @ keys.mT * len(R) ** -0.5).softmax(-1) @ values, stored


class PaluCache(Cache):
    """Folded values, and latents of the keys before RoPE and bias: FDC's /PRC, no post-RoPE
    compression."""

    def __init__(self, context: CacheContext, settings: PaluSettings, fitted: FittedLayer):
        super().__init__(context)
        basis = settings.bases(fitted.artifact, fitted.i, "k")
        bias, _ = kv_bias(fitted.attention, context.config)
        n_heads, _, r = basis.shape
        latents = TokenStore(context, n_heads, context.max_seq_length, r)
        self.keys = RebuiltKeys(latents, basis.to(context.device), bias.to(context.dtype))
        self.values = TokenStore(context, n_heads, context.max_seq_length, r)

    def latent(self, k: Tensor) -> Tensor:
        """k [n, Hkv, D] before RoPE -> [n, Hkv, r]."""
        return in_basis(k - self.keys.bias, self.keys.basis)

    def prefill(
        self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor, values: Tensor
    ) -> Tensor:
        """values [n, Hkv r]: all heads', folded; v is empty."""
        stop = start + len(q)
        self.keys.latents.write_prompt(row, start, self.latent(k))
        self.values.write_prompt(row, start, values.unflatten(-1, (self.config.n_kv_heads, -1)))
        k = self.keys.of_row(row, stop)
        v = self.values.of_row(row, stop)
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))  # flash attention wants one width
        return causal_attention(self.rope_from(q, start), k, padded)[..., : v.shape[-1]]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        """values [B, Hkv r]: all heads', folded; v is empty."""
        self.keys.latents.write_token(pos, self.latent(k))
        self.values.write_token(pos, values.unflatten(-1, (self.config.n_kv_heads, -1)))
        q = self.rope(q, pos)
        return attend(q, self.keys, self.values, pos, scale=self.scale, kernel=self.kernel)


def fit_palu(model: Llama, tokens: Tensor) -> tuple:
    """Whitened SVD of W_K and W_V, one head a group (Palu sec. 3): the best A B for X W is W R R^T,
    where R has the eigenvectors of W^T X^T X W: of the head's keys (or values) on the text, less
    the bias."""
    from calibrate import head_bases  # only now: it imports generate

    biases = [kv_bias(layer.attention, model.config) for layer in model.layers]

    def keys_and_values(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat((k - biases[i][0], v - biases[i][1]), 1)  # [S, 2 Hkv, D]

    values, basis = head_bases(model, tokens, "palu", keys_and_values)
    kept = values[..., : model.config.head_dim // 2].norm() / values.norm()
    k_basis, v_basis = (t.float() for t in basis.chunk(2, 1))
    return {"k.basis": k_basis, "v.basis": v_basis}, {"energy of 50%": kept.item() ** 2}


# ---------------------------------------------------------------------------------------- the table

METHODS = {
    "streaming": Method(StreamingSettings, each_layer(StreamingCache)),
    "h2o": Method(H2oSettings, each_layer(H2oCache)),
    "snapkv": Method(SnapKvSettings, each_layer(SnapKvCache)),
    "quest": Method(QuestSettings, each_layer(QuestCache)),
    "sals_cann": Method(
        SalsCannSettings, each_layer(SalsCannCache), fit="calibrate:fit_loki", tensors=loki_tensors
    ),
    "doublesparse": Method(
        DoubleSparseSettings,
        each_layer(DoubleSparseCache),
        fit="extras.baselines:fit_doublesparse",
        tensors=of_heads("importance"),
    ),
    "fp8": Method(Fp8Settings, each_layer(fp8_cache)),
    "turboquant": Method(TurboQuantSettings, each_layer(turboquant_cache)),
    "shadowkv": Method(ShadowKvSettings, each_layer(ShadowKvCache)),
    "palu": Method(
        PaluSettings,
        each_layer(PaluCache),
        fit="extras.baselines:fit_palu",
        tensors=of_heads("k.basis", "v.basis"),
        fold=fold_values,
    ),
}
