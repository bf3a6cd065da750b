"""Other published methods, as rows to compare with: each is one block, as in compress.py.

    python generate.py --method h2o         a name that compress.METHODS lacks is looked up here
    python calibrate.py fit --method palu   and so is how its artifact is fitted

To add one, write its settings, a Cache and a line of METHODS, as README's "Your own method" shows.
A method that only scores tokens is a ScoringCache, one that scores by a second, smaller store of
keys a ProxyCache, and one that evicts tokens a SlotCache. Then measure it:

    python -m extras.evaluate --method NAME
    python -m extras.bench step --row "NAME|llama-3.1-8b|8|32768|--method NAME"

Methods: StreamingLLM, H2O, SnapKV, a random row, Quest, SALS as deployed, Double Sparsity, FP8,
TurboQuant, ShadowKV and Palu. METHODS, at the end, is the table. Kernels are those of kernels.py;
FP8 alone has one of its own, attend_e4m3. Letters and shapes are those of compress.py: B rows, S
tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

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
    loki_shapes,
    random_rotation,
    rank_of,
    ring_positions,
    setting,
    shapes_of_heads,
)
from kernels import (
    LOG2E,
    TileConfig,
    _has_ptx,
    _load_queries,
    _store_split,
    _wait_for_previous,
    as_fp16,
    attend_splits,
    check,
    check_store,
    empty_splits,
    gather_rows,
    jit,
    matmul_codes,
    merge_splits,
    need,
    operator,
    overlapped,
    pack,
    power2,
    quantize_int8,
    rope_products,
    tl,
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
    """x sinks and a ring of the w last tokens.

    A token keeps its position in the text (ours); the paper counts places in the cache."""

    def __init__(self, context: CacheContext, settings: StreamingSettings):
        keys, values = slot_stores(context, settings.budget(context.max_seq_length))
        super().__init__(context, keys, values)

    def select(self, pos: Tensor, q: Tensor) -> Tensor | None:
        """The positions of the tokens in the slots, an index [B, 1, 1, slots]; None where there
        are slots for all tokens."""
        if self.keys.n_tokens >= self.context.max_seq_length:
            return None
        return self.keys.positions(pos)[:, None, None]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write_token(pos, self.rope(k, pos), v)
        q = self.rope(q, pos)
        # There is nothing to choose. But evaluation wraps `select`, to see what is attended.
        self.select(pos, q)
        # Attend all slots. They fill from the left, so those up to pos hold a token.
        return attend(q, self.keys, self.values, pos, scale=self.softmax_scale, kernel=self.kernel)


def slot_stores(context: CacheContext, budget: Budget) -> tuple[RingStore, RingStore]:
    """Slots of keys and of values for the sinks and the recent tokens of a budget."""
    c = context.config
    keys = RingStore(context, c.n_kv_heads, c.head_dim, budget.n_sinks, budget.n_recent)
    values = RingStore(context, c.n_kv_heads, c.head_dim, budget.n_sinks, budget.n_recent)
    return keys, values


# --------------------------------------------------------- what the rows that select have in common


def page_tokens(pages: Tensor, page_size: int) -> Tensor:
    """The tokens [..., n * page_size] of pages [..., n], of page_size tokens each. Those of a
    negative page are negative."""
    in_page = torch.arange(page_size, device=pages.device)
    tokens = pages[..., None] * page_size + in_page  # [..., n, page_size]
    return tokens.flatten(-2)


class ProxyCache(ScoringCache):
    """K and V in full, and a store of what scores read in the place of K: here keys in a basis."""

    proxies: TokenStore  # [B, Hkv, S, r]
    basis: Tensor  # [Hkv, D, r]

    def write_prompt(self, row: int, start: int, k: Tensor, v: Tensor) -> None:
        super().write_prompt(row, start, k, v)
        self.proxies.write_prompt(row, start, in_basis(k, self.basis))

    def write_token(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        super().write_token(pos, k, v)
        self.proxies.write_token(pos, in_basis(k, self.basis))

    def score_bytes(self, length: int) -> int:
        """Bytes that scores read for a row of `length` tokens."""
        return length * self.proxies.token_bytes

    def bytes_read(self, length: int) -> int:
        attended = super().bytes_read(length)
        if length <= sum(self.budget):  # all tokens are attended: a row needs no scores
            return attended
        return attended + self.score_bytes(length)


class PageCache(ProxyCache):
    """A cache that selects pages of tokens, whose `score` gives a score of every page,
    [B, Hkv, 1, pages]."""

    page: int  # tokens of a page
    n_last_pages = 1  # which are always attended

    def select(self, pos: Tensor, q: Tensor) -> Tensor | None:
        if self.covers_all():
            return None
        # The operation that selects tokens selects pages: the budget and pos count pages.
        n_pages = sum(self.budget) // self.page_size
        budget = Budget(
            n_sinks=0,
            n_selected=n_pages - self.n_last_pages,
            n_recent=self.n_last_pages,
        )
        scores = self.score(pos, q)
        last_page = pos // self.page_size
        pages = kernels.select(scores, last_page, budget, recent=True, kernel=self.kernel)
        index = page_tokens(pages, self.page_size)  # [B, Hkv, 1, n]
        # The last page ends beyond the newest token.
        is_written = index <= pos[:, None, None, None]
        return index.where(is_written, -1)


# ------------------------------------------------------------------------------ H2O, SnapKV, random


class SlotCache(DenseCache):
    """C slots for each KV head, with K, V and the position of a token, or -1 for none. They fill
    from the left.

    A method says by its `choose` which tokens of a prompt are kept, and by its `decode` in which
    slot a new token is written."""

    def __init__(self, context: CacheContext, settings: object):
        budget = settings.budget(context.max_seq_length)
        # The selected tokens have the slots of sinks; those of recent tokens are a ring.
        n_selected = budget.n_selected
        slots = Budget(n_sinks=n_selected, n_selected=0, n_recent=budget.n_recent)
        keys, values = slot_stores(context, slots)
        super().__init__(context, keys, values)
        self.settings = settings
        self.n_slots = self.keys.n_tokens
        self.add_table("position", context.config.n_kv_heads, self.n_slots, fill=-1)

    def past(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        n_filled = int((self.position[row, 0] >= 0).sum())
        return super().past(row, n_filled)

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.rope_from(q, start)
        k = self.rope_from(k, start)
        past_and_new_k, past_and_new_v = self.past_and_new(row, start, k, v)  # [N, Hkv, D] each
        self.keep_best(row, start, q, past_and_new_k, past_and_new_v)
        return causal_attention(q, past_and_new_k, past_and_new_v)

    def keep_best(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Fills a row's slots with the tokens that `choose` names.

        q [n, Hq, D]: after RoPE, of the new tokens, from position `start` on; k after RoPE and v
        [N, Hkv, D]: of the tokens in the slots, then of the new ones."""
        n_heads = self.config.n_kv_heads
        stop = start + len(q)
        n_held = len(k) - len(q)
        held = self.position[row, :, :n_held]
        new = self.context.positions[start:stop].expand(n_heads, -1)
        position = torch.cat((held, new), 1)  # [Hkv, N]
        k = k.transpose(0, 1)  # [Hkv, N, D]
        v = v.transpose(0, 1)
        kept = self.choose(row, stop, q, k, position)  # [Hkv, n]
        n_kept = kept.shape[1]
        self.keys.vectors[row, :, :n_kept] = gather_rows(k[None], kept[None])[0]
        self.values.vectors[row, :, :n_kept] = gather_rows(v[None], kept[None])[0]
        self.position[row, :, :n_kept] = gather_rows(position[None], kept[None])[0]
        self.position[row, :, n_kept:] = -1

    def choose(self, row: int, stop: int, q: Tensor, k: Tensor, position: Tensor) -> Tensor:
        """Which of a row's N tokens are kept: [Hkv, n], as numbers up to N - 1, in the order of
        their slots.

        The N tokens are those in the slots, then the new ones, up to position stop - 1. q
        [new, Hq, D]: of the new ones; k [Hkv, N, D]: of all, both after RoPE; position [Hkv, N]."""
        raise NotImplementedError

    def prompt_attention(self, q: Tensor, k: Tensor, position: Tensor) -> Tensor:
        """The attention that the N tokens of `choose` get from the last queries of a prompt, as
        many as --window says: [Hkv, N], summed over these and a group's query heads."""
        n_heads = self.config.n_kv_heads
        last = q[-self.settings.window :].unflatten(1, (n_heads, -1))  # [W, Hkv, G, D]
        last = last.permute(1, 2, 0, 3)  # [Hkv, G, W, D]
        W = last.shape[2]
        logits = (last @ k[:, None].mT).float() * self.softmax_scale  # [Hkv, G, W, N]
        now = position[:, None, -W:, None]  # the positions of these queries
        is_later = position[:, None, None] > now
        weights = logits.masked_fill(is_later, -torch.inf).softmax(-1)
        return weights.sum((1, 2))

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """The positions of the tokens in the slots, which are all attended: an index
        [B, Hkv, 1, C]."""
        return self.position[:, :, None]


def half_recent(keep: float, max_seq_length: int) -> Budget:
    """The budget of H2O, of --keep tokens: half of them are selected, half are recent."""
    total = kept_tokens(keep, max_seq_length)
    n_recent = max(1, total - round(total / 2))
    return Budget(n_sinks=0, n_selected=total - n_recent, n_recent=n_recent)


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
        return half_recent(self.keep, max_seq_length)


class H2oStored(NamedTuple):
    """What H2O has stored of one KV head's tokens, in the order of their positions."""

    keys: Tensor  # [n, D] after RoPE
    values: Tensor  # [n, D]
    positions: Tensor  # [n]
    attention: Tensor  # [n]: what each token has got so far


def h2o_step(
    q: Tensor, k: Tensor, v: Tensor, stored: H2oStored, n_slots: int, n_recent: int
) -> tuple[Tensor, Tensor, H2oStored]:
    """One decode step of H2O as published (Algorithm 1), for one KV head.

    q [G, D], k and v [D]: after RoPE -> output [G, D], the positions attended, and what is stored
    now. stored: of n <= n_slots tokens, of which the n_recent last ones are not evicted."""
    keys, values, positions, attention = stored
    now = int(positions[-1]) + 1

    # 1. Where all slots are taken, forget the token with the least attention that is not recent.
    is_kept = torch.ones(len(keys), dtype=torch.bool)
    if len(keys) == n_slots:
        is_recent = positions > now - n_recent
        victim = attention.masked_fill(is_recent, torch.inf).argmin()
        is_kept[victim] = False

    # 2. Append. The new token has got no attention yet.
    left = (keys[is_kept], values[is_kept], positions[is_kept], attention[is_kept])
    nothing = attention.new_tensor(0)
    keys, values, positions, attention = appended(left, k, v, torch.tensor(now), nothing)

    # 3. Attend what is left, and add what each token gets.
    logits = q @ keys.mT / len(k) ** 0.5  # [G, n]
    weights = logits.softmax(-1)
    output = weights @ values
    attention = attention + weights.sum(0)
    return output, positions, H2oStored(keys, values, positions, attention)


class H2oCache(SlotCache):
    """C slots for each KV head, heavy and recent ones, each with the attention that its token has
    got so far.

    Of a prompt only the last queries count (ours); the paper sums over all of them."""

    def __init__(self, context: CacheContext, settings: H2oSettings):
        super().__init__(context, settings)
        n_heads = context.config.n_kv_heads
        self.add_table("attention", n_heads, self.n_slots, dtype=torch.float32)

    def choose(self, row: int, stop: int, q: Tensor, k: Tensor, position: Tensor) -> Tensor:
        attention = self.prompt_attention(q, k, position)  # [Hkv, N]
        N = attention.shape[1]
        n_held = N - len(q)
        attention[:, :n_held] += self.attention[row, :, :n_held]
        is_recent = position >= stop - self.keys.n_recent
        ranked = attention.masked_fill(is_recent, torch.inf)
        best = ranked.topk(min(N, self.n_slots)).indices
        kept = best.sort(-1).values
        self.attention[row, :, : kept.shape[1]] = attention.gather(1, kept)
        return kept

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.rope(q, pos)

        # 1. The new token takes an empty slot, or that of the least attention that is not recent. A
        # token that is decoded once more takes the slot that it has. (Attention is at least 0.)
        now = pos[:, None, None]
        is_recent = self.position > now - self.keys.n_recent
        cost = self.attention.masked_fill(is_recent, torch.inf)  # [B, Hkv, C]
        cost = cost.masked_fill(self.position < 0, -1)
        cost = cost.masked_fill(self.position == now, -2)
        victim = cost.argmin(-1)  # [B, Hkv]

        # 2. Write it there.
        rows = self.context.rows[:, None]
        heads = torch.arange(victim.shape[1], device=pos.device)
        self.keys.vectors[rows, heads, victim] = self.rope(k, pos)
        self.values.vectors[rows, heads, victim] = v
        self.position[rows, heads, victim] = pos[:, None]
        self.attention.scatter_(2, victim[..., None], 0.0)

        # 3. Attend all slots, and add what each has got. Tokens lie in no order there, so that the
        # operations read every slot, up to the last one; logits say which of them are filled.
        is_filled = self.select(pos, q) >= 0
        last_slot = torch.full_like(pos, self.n_slots - 1)
        logits = kernels.scores(
            q, self.keys.vectors, None, last_slot, self.softmax_scale, "each", kernel=self.kernel
        )  # [B, Hkv, G, C]
        logits = logits.masked_fill(~is_filled, -torch.inf)
        self.attention += logits.softmax(-1).sum(2)
        return kernels.attend_logits(logits, self.values.vectors, last_slot, kernel=self.kernel)

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        state = super().row_state(row, length)
        state["position"] = self.position[row, :, :length]
        state["attention"] = self.attention[row, :, :length]
        return state

    def bytes_read(self, length: int) -> int:
        """K and V of the slots, and the position and attention of each, 4 bytes both."""
        n_filled = min(length, self.n_slots)
        tables = n_filled * self.config.n_kv_heads * (4 + 4)
        return super().bytes_read(length) + tables


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
        """The recent tokens are those after the prompt, --room of them (ours)."""
        total = kept_tokens(self.keep, max_seq_length)
        if total < max_seq_length:  # the window and the room must fit into it
            left_to_select(self.keep, total, max_seq_length, 0, self.window + self.room)
        return fit_budget(total, 0, total, self.room)


def pooled(votes: Tensor, pool: int) -> Tensor:
    """The mean of each `pool` neighbouring votes [H, n] -> [H, n], where zeros lie outside."""
    # An even pool gives one number too many.
    return F.avg_pool1d(votes, pool, stride=1, padding=pool // 2)[:, : votes.shape[1]]


def snapkv_prompt(q: Tensor, k: Tensor, n: int, window: int, pool: int) -> Tensor:
    """The n tokens of a prompt that SnapKV keeps as published (Listing 1), for one KV head.

    q [G, S, D] and k [S, D]: after RoPE -> positions [n], or all S if there are fewer. A decode
    step then appends K and V, and attends all that is there."""
    S, D = k.shape
    positions = torch.arange(S)
    if S <= n:
        return positions

    # 1. What the last queries attend.
    logits = q[:, -window:] @ k.mT / D**0.5  # [G, window, S]
    is_later = positions > positions[-window:, None]
    weights = logits.masked_fill(is_later, -torch.inf).softmax(-1)

    # 2. Their votes for the tokens before them. Neighbours of a token with many votes get some,
    # too.
    votes = weights[..., :-window].sum((0, 1))  # [S - window]
    votes = pooled(votes[None], pool)[0]

    # 3. The best, and the last ones.
    best = votes.topk(n - window).indices
    return torch.cat((best, positions[-window:]))


class PromptSlotCache(SlotCache):
    """Slots that only a prompt fills by `choose`: each token after it takes the next slot, and the
    last slots are a ring (ours). `choose` also writes `dropped`."""

    def __init__(self, context: CacheContext, settings: object):
        super().__init__(context, settings)
        self.add_table("dropped")  # tokens of the prompt that are not kept

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = self.rope(q, pos)
        place = pos - self.dropped  # its number among the tokens that the slots have been given
        self.write_token(place, self.rope(k, pos), v)
        self.position[self.context.rows, :, self.keys.slot(place)] = pos[:, None]
        # There is nothing to choose. But evaluation wraps `select`, to see what is attended.
        self.select(pos, q)
        return attend(
            q, self.keys, self.values, place, scale=self.softmax_scale, kernel=self.kernel
        )


class SnapKvCache(PromptSlotCache):
    """The tokens that are kept of a prompt, then those after it, for which the last `room` slots
    are a ring (ours): the paper keeps all of these."""

    def choose(self, row: int, stop: int, q: Tensor, k: Tensor, position: Tensor) -> Tensor:
        is_last = position >= stop - self.settings.window
        votes = self.prompt_attention(q, k, position).masked_fill(is_last, 0)  # [Hkv, N]
        votes = pooled(votes, self.settings.pool)
        votes = votes.masked_fill(is_last, torch.inf)
        n_kept = self.n_slots
        if self.n_slots < self.context.max_seq_length:
            n_kept = self.n_slots - self.keys.n_recent
        kept = votes.topk(min(votes.shape[1], n_kept)).indices
        self.dropped[row] = stop - kept.shape[1]
        return kept.sort(-1).values


@dataclass
class RandomSettings:
    """Random: as many tokens as H2O keeps, drawn by chance, which evictors should beat."""

    keep: float = keep_setting(512)
    draw: int = setting(0, "number of the draw; another number draws other tokens")

    def budget(self, max_seq_length: int) -> Budget:
        """Half of the tokens are drawn, half are recent, as H2O has them."""
        return half_recent(self.keep, max_seq_length)


def random_prompt(draws: Tensor, n_selected: int, n_recent: int) -> Tensor:
    """The tokens of a prompt that are kept by chance, for one KV head (ours; no paper's).

    draws [S]: a random number of each token -> positions [n_selected + n_recent], ascending, or all
    S if there are fewer. Of the tokens before the n_recent last ones, those with the largest
    numbers are kept, so that each has the same chance. A decode step then appends K and V, forgets
    the oldest of the recent tokens where there are too many, and attends all that is there."""
    S = len(draws)
    positions = torch.arange(S)
    n_old = max(0, S - n_recent)
    drawn = draws[:n_old].topk(min(n_selected, n_old)).indices
    return torch.cat((drawn.sort().values, positions[n_old:]))


class RandomCache(PromptSlotCache):
    """Slots of tokens that were drawn when the prompt was read, and a ring of the last ones (ours).

    It is here because an evictor should be measured against chance: a method that keeps tokens by
    their attention should find more than one that keeps as many blindly. Each KV head of each layer
    draws for itself, as H2O's heads choose for themselves. The numbers come from a generator of its
    own, so the same command keeps the same tokens; prompts of one length have the same draw, and
    --draw gives another. A follow-up draws again, from its own tokens and those in the slots."""

    def __init__(self, context: CacheContext, settings: RandomSettings, layer: int):
        super().__init__(context, settings)
        self.seed = settings.draw * context.config.n_layers + layer  # each layer's, in each draw

    def choose(self, row: int, stop: int, q: Tensor, k: Tensor, position: Tensor) -> Tensor:
        n_heads, N = position.shape
        # In several processes a head draws what it would draw in one: after the heads before it.
        n_heads_before = getattr(self.config, "first_kv_head", 0)  # of a share of the model
        generator = torch.Generator().manual_seed(self.seed)  # the CPU's, on every device
        draws = torch.rand(n_heads_before + n_heads, N, generator=generator)[n_heads_before:]
        draws = draws.to(position.device)

        is_recent = position >= stop - self.keys.n_recent
        ranked = draws.masked_fill(is_recent, torch.inf)  # [Hkv, N]
        kept = ranked.topk(min(N, self.n_slots)).indices  # [Hkv, n]
        self.dropped[row] = stop - kept.shape[1]
        # In the order of their positions, so that the last ones lie in the ring, the oldest first.
        order = position.gather(1, kept).argsort(-1)
        return kept.gather(1, order)


def random_caches(
    model: Llama, settings: RandomSettings, context: CacheContext, artifact: Artifact
) -> list[Cache]:
    """The caches of all layers, each of which draws other tokens."""
    return [RandomCache(context, settings, i) for i in range(len(model.layers))]


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
        if n_selected < max_seq_length:
            page = min(self.page, max_seq_length)
            n_pages = max(3, n_selected // page)
            n_selected = min(n_pages * page, max_seq_length)
        return Budget(n_sinks=0, n_selected=n_selected, n_recent=0)


def quest_step(
    q: Tensor, k: Tensor, v: Tensor, stored: tuple, page: int, n: int
) -> tuple[Tensor, Tensor, tuple]:
    """One decode step of Quest as published (sec. 3.3), for one KV head.

    q [G, D], k and v [D]: after RoPE -> output [G, D], and the tokens attended, which the queries
    choose together: those of n pages of `page` tokens. stored: K and V [S - 1, D]."""
    keys, values = appended(stored, k, v)

    # 1. The least and the largest key of each page bound a query's logits there.
    lowest = []
    highest = []
    for page_keys in keys.split(page):
        lowest.append(page_keys.amin(0))
        highest.append(page_keys.amax(0))
    low = torch.stack(lowest)  # [pages, D]
    high = torch.stack(highest)
    largest = torch.maximum(q[:, None] * low, q[:, None] * high)  # [G, pages, D]
    bound = largest.sum(-1) / len(k) ** 0.5  # [G, pages]

    # 2. The best pages, by the largest weight that a query gives, and the last one.
    last = len(low) - 1
    scores = bound.log_softmax(-1).amax(0)[:last]
    best = scores.topk(min(n - 1, last)).indices
    pages = torch.cat((best, torch.tensor([last])))
    tokens = page_tokens(pages, page)
    tokens = tokens[tokens < len(keys)]

    # 3. Attend their tokens.
    logits = q @ keys[tokens].mT / len(k) ** 0.5
    output = logits.softmax(-1) @ values[tokens]
    return output, tokens, (keys, values)


class QuestCache(PageCache):
    """The proxy of a page is the largest and the least key of every channel, after RoPE."""

    def __init__(self, context: CacheContext, settings: QuestSettings):
        S = context.max_seq_length
        super().__init__(context, settings.budget(S))
        c = context.config
        self.page_size = min(settings.page, S)
        n_pages = -(-S // self.page_size)
        self.proxies = TokenStore(context, c.n_kv_heads, n_pages, 2 * c.head_dim)

    def write_prompt(self, row: int, start: int, k: Tensor, v: Tensor) -> None:
        # K and V alone: proxies are of pages here, not of tokens.
        ScoringCache.write_prompt(self, row, start, k, v)
        # Whole pages, the first from its beginning. In the last page the last token stands for
        # those that are not there yet, which changes neither the least nor the largest.
        stop = start + len(k)
        first_page = start // self.page_size
        stop_page = -(-stop // self.page_size)
        tokens = torch.arange(
            first_page * self.page_size, stop_page * self.page_size, device=k.device
        )
        keys = self.keys.vectors[row, :, tokens.clamp(max=stop - 1)].transpose(0, 1)
        low, high = keys.unflatten(0, (-1, self.page_size)).aminmax(dim=1)  # [pages, Hkv, D]
        self.proxies.write_prompt(row, first_page, torch.cat((high, low), -1))

    def write_token(self, pos: Tensor, k: Tensor, v: Tensor) -> None:
        ScoringCache.write_token(self, pos, k, v)
        page = pos // self.page_size
        is_first = (pos % self.page_size == 0)[:, None, None]
        high, low = self.proxies.vectors[self.context.rows, :, page].chunk(2, -1)  # [B, Hkv, D]
        high = torch.where(is_first, k, high.maximum(k))
        low = torch.where(is_first, k, low.minimum(k))
        self.proxies.write_token(page, torch.cat((high, low), -1))

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """[max(q, 0), min(q, 0)] . [largest, least] key is the largest logit in a page (sec.
        3.3)."""
        last_page = pos // self.page_size
        bounds = torch.cat((q.clamp(min=0), q.clamp(max=0)), -1)  # [B, Hq, 2D]
        scores = kernels.scores(
            bounds,
            self.proxies.vectors,
            None,
            last_page,
            self.softmax_scale,
            "largest",
            kernel=self.kernel,
        )
        return scores.unsqueeze(2)  # [B, Hkv, 1, pages]

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        state = super().row_state(row, length)
        n_pages = -(-length // self.page_size)
        state["proxies.vectors"] = self.proxies.vectors[row, :, :n_pages]
        return state

    def score_bytes(self, length: int) -> int:
        n_pages = -(-length // self.page_size)
        return super().score_bytes(n_pages)


# --------------------------------------------------------------------------------- SALS as deployed


class Int8Store(TokenStore):
    """Int8 codes with one scale a vector (`quantize_int8`)."""

    kind = "int8"
    bits = 8

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"vectors": ((self.width,), torch.int8), "scale": ((), torch.float32)}

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codes, scale = quantize_int8(x)
        return codes, scale[..., 0]

    def decode(self, vectors: Tensor, scale: Tensor) -> Tensor:
        numbers = vectors.to(self.context.dtype) * scale[..., None]  # in fp32
        return numbers.to(self.context.dtype)

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
    rebuilt.

    The components are Loki's (ours), since only CANN's operators are public."""

    def __init__(self, context: CacheContext, settings: SalsCannSettings, fitted: FittedLayer):
        n_heads = context.config.n_kv_heads
        S = context.max_seq_length
        D = context.config.head_dim
        keys = Int8Store(context, n_heads, S, D)
        values = Int8Store(context, n_heads, S, D)
        super().__init__(context, settings.budget(S), keys, values)
        self.page_size = min(settings.page, S)
        n_pages = sum(self.budget) // self.page_size
        self.n_last_pages = min(CANN_TAIL, n_pages - 1)
        # 4-bit codes fill bytes in pairs; above 32 of them, r is a multiple of 32 here (ours).
        r = rank_of(0.5, D)
        multiple = 32 if r > 32 else 2
        r = max(2, r - r % multiple)
        basis = fitted.artifact["post.basis"][fitted.i, ..., :r]  # [Hkv, D, r]
        self.basis = basis.to(context.device, context.dtype)
        self.proxies = ScaledStore(context, n_heads, S, r, bits=4)

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """A page's score is the log-sum-exp of its logits, of the mean of a group's queries."""
        grouped = q.unflatten(1, (self.config.n_kv_heads, -1))  # [B, Hkv, G, D]
        query = in_basis(grouped.mean(2), self.basis)  # [B, Hkv, r]
        proxies = self.proxies.read_all()  # [B, Hkv, S, r]
        logits = kernels.scores(
            query, proxies, None, pos, self.softmax_scale, "each", kernel=self.kernel
        )  # [B, Hkv, 1, S]
        n_missing = -logits.shape[-1] % self.page_size  # tokens, of the last page
        logits = F.pad(logits, (0, n_missing), value=-torch.inf)
        return logits.unflatten(-1, (-1, self.page_size)).logsumexp(-1)  # [B, Hkv, 1, pages]


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
        channels = F.one_hot(best, c.head_dim).mT  # [Hkv, D, r_c]: a basis that takes channels out
        self.basis = channels.to(context.device, context.dtype)
        self.proxies = TokenStore(context, c.n_kv_heads, context.max_seq_length, r)

    def score(self, pos: Tensor, q: Tensor) -> Tensor:
        """Of their labels, the largest weight that any query of a group gives: [B, Hkv, 1, S]."""
        query = in_basis(q, self.basis)  # [B, Hq, r_c]
        labels = self.proxies.vectors  # [B, Hkv, S, r_c]
        scores = kernels.scores(
            query, labels, None, pos, self.softmax_scale, "largest", kernel=self.kernel
        )  # [B, Hkv, S]
        return scores.unsqueeze(2)


def fit_doublesparse(model: Llama, tokens: Tensor) -> tuple:
    """How much each channel of a KV head adds to the logits, after RoPE (Double Sparsity sec. 3).

    It is the mean over tokens [N, S] of |q_c k_c|, q and k of the same token, summed over the
    group: "importance" [L, Hkv, D] in calibrate.Fitted."""
    from calibrate import Fitted, observe, tracked  # only now: it imports generate

    c = model.config
    sums = [0.0] * c.n_layers  # [Hkv, D] each

    def see(i: int, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        q = apply_rope(q, cos, sin).double().abs()
        k = apply_rope(k, cos, sin).double().abs()
        of_group = q.unflatten(-2, (c.n_kv_heads, -1)).sum(-2)  # [B, S, Hkv, D]
        sums[i] = sums[i] + (of_group * k).sum((0, 1))

    with torch.inference_mode():
        observe(model, tracked("fit", tokens[:, None]), see)
    importance = torch.stack(sums).cpu() / tokens.numel()
    n_best = max(1, c.head_dim // 8)
    share = importance.topk(n_best).values.sum(-1) / importance.sum(-1)
    return Fitted({"importance": importance.float()}, {"importance of 12.5%": share.mean().item()})


# ----------------------------------------------------------------------------- keys less their mean


class CentredCache(DenseCache):
    """Stores hold keys after RoPE less the mean key of their row's prompt, which is rotated as they
    are (ours)."""

    def __init__(self, context: CacheContext, keys: TokenStore, values: TokenStore):
        super().__init__(context, keys, values)
        # of each row, before RoPE
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
        k = k + self.mean_keys(row, 0, length)
        return k.to(self.context.dtype), v

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if start == 0:
            self.mean[row] = k.float().mean(0)
        return super().prefill(row, start, q, k, v)

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.write_token(pos, self.rope(k, pos), v)
        q = self.rope(q, pos).unflatten(1, (k.shape[1], -1))  # [B, Hkv, G, D]
        mean = self.rope(self.mean[:, None], self.context.positions)  # [B, S, Hkv, D]
        # In fp32, since the mean key may be a hundred times what is left.
        keys = self.keys.read_all() + mean.transpose(1, 2)  # [B, Hkv, S, D]
        logits = (q.to(keys) @ keys.mT).float() * self.softmax_scale  # [B, Hkv, G, S]
        return kernels.attend_logits(logits, self.values.read_all(), pos, kernel=self.kernel)


@dataclass
class CentreSettings:
    """The setting of codes that fail where keys have biases."""

    centre: bool = setting(False, "take the mean key of a prompt off its keys first")


def coded_cache(
    context: CacheContext, settings: CentreSettings, keys: TokenStore, values: TokenStore
) -> Cache:
    """A cache over two stores of codes, with or without the mean key."""
    if settings.centre:
        return CentredCache(context, keys, values)
    return DenseCache(context, keys, values)


# ---------------------------------------------------------------------------------------------- FP8


@dataclass
class Fp8Settings(CentreSettings):
    """FP8 as serving engines have it: K and V in e4m3, a byte a number, with one scale a head."""


E4M3 = torch.float8_e4m3fn  # 4 bits of exponent, 3 of mantissa
E4M3_MAX = torch.finfo(E4M3).max  # the largest number, 448
FP8_GROWTH = 16  # how many times the largest number of a prompt later ones may be


def fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x in e4m3, in units of the scale. Beyond 448 it saturates."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def fp8_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: tuple,
    scales: tuple,
    mean: Tensor,
    rope: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, tuple]:
    """One decode step over an FP8 cache, for one KV head.

    q [G, D]: after RoPE; k [D]: before it; v [D] -> output [G, D]. stored: codes of K after RoPE
    and of V [S - 1, D]; scales: of both. mean [D]: the prompt's mean key before RoPE (ours), or 0;
    rope(x, positions) rotates x [n, D]."""
    k_scale, v_scale = scales
    positions = torch.arange(len(stored[0]) + 1)

    # 1. Codes of the new key, less the mean key at its position, and of the new value.
    k_rotated = rope((k - mean)[None], positions[-1:])[0]
    k_codes, v_codes = appended(stored, fp8(k_rotated, k_scale), fp8(v, v_scale))

    # 2. Attend every token; the mean key comes back, exactly.
    keys = k_codes.to(q.dtype) * k_scale
    keys = keys + rope(mean.expand(len(positions), -1), positions)
    values = v_codes.to(q.dtype) * v_scale
    logits = q @ keys.mT / len(k) ** 0.5
    output = logits.softmax(-1) @ values
    return output, (k_codes, v_codes)


class Fp8Store(TokenStore):
    """Numbers in e4m3, with one scale [B, Hkv, 1] for each head, which the first write to a row
    decides: there the largest number becomes 28, so that later ones saturate from 16 times of it
    on. They are stored as bytes: a compiled step would copy a buffer of another type that it writes
    to."""

    kind = "fp8"
    bits = 8

    def __init__(self, context: CacheContext):
        c = context.config
        super().__init__(context, c.n_kv_heads, context.max_seq_length, c.head_dim)
        scale = context.zeros(c.n_kv_heads, 1, dtype=torch.float32).fill_(1)
        self.register_buffer("scale", scale)

    def layout(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"vectors": ((self.width,), torch.uint8)}

    def parts(self) -> list[Tensor]:
        return [self.vectors, self.scale]

    def write_prompt(self, row: int, start: int, x: Tensor) -> None:
        if start == 0:
            largest = x.abs().amax((0, 2))[:, None].float()  # [Hkv, 1]
            scale = largest * FP8_GROWTH / E4M3_MAX
            self.scale[row] = torch.where(largest > 0, scale, 1)
        stop = start + len(x)
        codes = fp8(x, self.scale[row]).view(torch.uint8)
        self.vectors[row, :, start:stop] = codes.transpose(0, 1)

    def write_token(self, pos: Tensor, x: Tensor) -> None:
        rows = self.context.rows
        codes = fp8(x, self.scale[rows]).view(torch.uint8)
        self.vectors[rows, :, pos] = codes

    def decode(self, vectors: Tensor, scale: Tensor) -> Tensor:
        numbers = vectors.view(E4M3).to(self.context.dtype) * scale[..., None]  # in fp32
        return numbers.to(self.context.dtype)

    def of_row(self, row: int, length: int) -> Tensor:
        return self.decode(self.vectors[row, :, :length], self.scale[row]).transpose(0, 1)

    def logits(self, q: Tensor) -> Tensor:
        return token_logits(q, self.read_all())

    def mix(self, weights: Tensor) -> Tensor:
        return weights @ self.read_all().to(weights.dtype)

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        state = super().row_state(row, length)
        state["scale"] = self.scale[row]
        return state

    def bytes_formula(self) -> int:
        return super().bytes_formula() + self.scale.nbytes


def runs_e4m3(context: CacheContext) -> bool:
    """Whether attend_e4m3 runs: where kernels do, for heads of 128 dims in 16 bits, on a GPU that
    has e4m3 (from compute capability 8.9 on), or in the interpreter."""
    is_taken = context.config.head_dim == 128 and context.dtype != torch.float32
    if not (context.kernel and is_taken):
        return False
    device = context.device
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def attend_e4m3(
    q: Tensor, keys: Fp8Store, values: Fp8Store, pos: Tensor, bias: Tensor | None, scale: float
) -> Tensor:
    """Attention by the kernel below, over two stores: q [B, Hq, 128] after RoPE -> the same shape.
    bias [B, Hq, S] or None is added to q . k."""
    return launch_attend_e4m3(
        q=q.contiguous(),
        k=keys.vectors,
        v=values.vectors,
        k_scale=keys.scale[..., 0],
        v_scale=values.scale[..., 0],
        pos=pos.int(),
        bias=bias,
        scale=scale,
    )


class Fp8Cache(DenseCache):
    """K and V in e4m3."""

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not runs_e4m3(self.context):
            return super().decode(pos, q, k, v)
        self.write_token(pos, self.rope(k, pos), v)
        q = self.rope(q, pos)
        return attend_e4m3(q, self.keys, self.values, pos, None, self.softmax_scale)


class CentredFp8Cache(CentredCache):
    """K less the mean key, and V, in e4m3."""

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not runs_e4m3(self.context):
            return super().decode(pos, q, k, v)
        self.write_token(pos, self.rope(k, pos), v)
        q = self.rope(q, pos)
        bias = logits_of_mean(q, self.mean, self.context.cos, self.context.sin)
        return attend_e4m3(q, self.keys, self.values, pos, bias, self.softmax_scale)


def logits_of_mean(q: Tensor, mean: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """q . RoPE_j(mean) at every position j, which q . k lacks where the mean key is taken off.

    q [B, Hq, D] after RoPE; mean [B, Hkv, D] fp32 before it; cos, sin [S, D/2] -> [B, Hq, S]
    fp32."""
    times_cos, times_sin = rope_products(q, mean)
    return times_cos @ cos.mT + times_sin @ sin.mT


def fp8_cache(context: CacheContext, settings: Fp8Settings) -> Cache:
    keys = Fp8Store(context)
    values = Fp8Store(context)
    if settings.centre:
        return CentredFp8Cache(context, keys, values)
    return Fp8Cache(context, keys, values)


# --------------------------------------------------------------- attention: keys and values in e4m3
# A flash-decode over all tokens up to pos: out = softmax(scale (q K^T + bias)) V, where K and V are
# in e4m3 with one scale a head, and the bias is 0, or what a mean key adds that K lacks.
# attend_e4m3_reference is the truth. The kernel takes heads of 128 dims, 32 words of four numbers.


def attend_e4m3_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    pos: Tensor,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """What launch_attend_e4m3 gives, in fp32."""
    Hkv = k.shape[1]
    keys = k.view(E4M3).float() * k_scale[..., None, None]
    values = v.view(E4M3).float() * v_scale[..., None, None]
    logits = q.float().unflatten(1, (Hkv, -1)) @ keys.mT  # [B, Hkv, G, S]
    if bias is not None:
        logits = logits + bias.unflatten(1, (Hkv, -1))
    is_later = torch.arange(k.shape[2], device=pos.device) > pos[:, None, None, None]
    weights = (logits * scale).masked_fill(is_later, -torch.inf).softmax(-1)
    return (weights @ values).flatten(1, 2)


# ---- words of four numbers
# Halves (fp16) hold every number of e4m3 exactly, and one instruction makes two of them. What takes
# time is to move halves between threads. So words are loaded in an order in which each becomes
# halves in the very thread whose operands of the tensor cores they are. Channels of the products
# then have an order that follows from it: _key_channels, _value_channels. (triton 3.6 keeps it so.
# triton 3.9 moves the halves of keys through shared memory all the same.)


@jit
def _halves_at(words, shift):
    """The byte of words at a shift, in e4m3, as halves."""
    byte = words >> shift
    half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)  # sign; exponent and mantissa
    half = tl.where((byte & 0x7F) == 0x7F, 0x7E00, half)  # NaN
    return half.to(tl.int16).to(tl.float16, bitcast=True) * 256  # exponents of fp16 have 8 more


@jit
def _decode_words(words):
    """Words of four numbers in e4m3 as halves [.., 2, 2]: byte 2 j + i at (i, j)."""
    if _has_ptx():
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            """{ .reg .b16 front, back; .reg .b32 x; mov.b32 {front, back}, $4;
            cvt.rn.f16x2.e4m3x2 x, front; mov.b32 {$0, $1}, x;
            cvt.rn.f16x2.e4m3x2 x, back; mov.b32 {$2, $3}, x; }""",
            "=&h,=&h,=&h,=&h,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    else:
        x0 = _halves_at(words, 0)
        x1 = _halves_at(words, 8)
        x2 = _halves_at(words, 16)
        x3 = _halves_at(words, 24)
    return tl.join(tl.join(x0, x1), tl.join(x2, x3))


@jit
def _word_of_bytes(first, second, ORDER: tl.constexpr):
    """A word of four of two words' bytes: ORDER has a digit of each, the last one's first."""
    if _has_ptx():
        return tl.inline_asm_elementwise(
            f"prmt.b32 $0, $1, $2, {ORDER};",
            "=r,r,r",
            [first, second],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        word = tl.zeros_like(first)
        for i in tl.static_range(4):
            n = (ORDER >> (4 * i)) & 7
            byte = ((first if n < 4 else second) >> (8 * (n % 4))) & 255
            word = word | (byte << (8 * i))
        return word


@jit
def _load_keys(words_ptr, stride, last, T: tl.constexpr):
    """A tile's keys, in halves [T, 128]; their vectors lie `stride` words apart. Columns are
    (word // 16, word % 4, word // 4 % 4, byte). Tokens past the last one read that one."""
    # Places (x, y) lie in shared memory, a row x in all its banks. Eight lanes that read at once,
    # as the operand's layout has them, have the eight y // 4 of a row.
    x = tl.arange(0, T)[:, None]
    y = tl.arange(0, 32)[None, :]
    token = tl.minimum(x // 2 * 2 + y // 16, last)
    words = tl.load(words_ptr + token * stride + (x % 2 * 16 + y % 16))
    k = _decode_words(tl.reshape(words, [T // 2, 2, 2, 4, 4]))
    return tl.reshape(tl.permute(k, (0, 2, 1, 4, 3, 6, 5)), [T, 128])


@jit
def _key_channels():
    """The channel of each column of _load_keys."""
    column = tl.arange(0, 128)
    word = column // 64 * 16 + column // 4 % 4 * 4 + column // 16 % 4
    return word * 4 + column % 4


@jit
def _load_values(words_ptr, stride, last, T: tl.constexpr):
    """A tile's values, in halves, transposed, [128, T], where _load_keys has keys. Rows are
    (byte // 2, word % 4, byte % 2, word // 4)."""
    # A place (x, y) has the words of two neighbouring tokens.
    x = tl.arange(0, T // 2)[:, None]
    y = tl.arange(0, 32)[None, :]
    token = x // 8 * 16 + y // 4 % 4 * 4 + x // 4 % 2 * 2
    word = x % 4 * 8 + y // 16 * 4 + y % 4
    even = tl.load(words_ptr + tl.minimum(token, last) * stride + word)
    odd = tl.load(words_ptr + tl.minimum(token + 1, last) * stride + word)
    even = tl.reshape(even, [T // 16, 2, 4, 2, 4, 4])
    odd = tl.reshape(odd, [T // 16, 2, 4, 2, 4, 4])
    front = _decode_words(_word_of_bytes(even, odd, 0x5140))
    back = _decode_words(_word_of_bytes(even, odd, 0x7362))
    # [x // 8, x // 4 % 2, x % 4, y // 16, y // 4 % 4, y % 4, token % 2, byte % 2, byte // 2]
    v = tl.join(front, back)
    return tl.reshape(tl.permute(v, (8, 5, 7, 2, 3, 0, 4, 1, 6)), [128, T])


@jit
def _value_channels():
    """The channel of each row of _load_values."""
    row = tl.arange(0, 128)
    return row % 8 * 16 + row // 16 % 4 * 4 + row // 64 * 2 + row // 8 % 2


# ---- the kernel


@jit
def _attend_e4m3_kernel(
    q_ptr,  # [B, Hq, 128] of the model's dtype, bf16 or fp16
    k_ptr,  # [B, Hkv, S, 32] int32: words of four numbers in e4m3
    v_ptr,  # [B, Hkv, S, 32] int32
    k_scale_ptr,  # [B, Hkv] fp32
    v_scale_ptr,  # [B, Hkv] fp32
    pos_ptr,  # [B] int32
    bias_ptr,  # [B, Hq, S] fp32, added to q . k; None: nothing is
    m_ptr,  # [B, Hq, splits] fp32; None: there is one split
    l_ptr,  # [B, Hq, splits] fp32, or None
    out_ptr,  # [B, Hq, splits, 128] fp32; of one split the result [B, Hq, 128] of q's dtype
    k_strides,  # vectors between two rows of the batch, two KV heads and two tokens
    v_strides,  # and those of values
    S,
    scale,  # with log2(e)
    G: tl.constexpr,  # queries of a program
    GP: tl.constexpr,  # padded
    T: tl.constexpr,  # tokens of a tile
    STAGES: tl.constexpr,  # tiles in flight
):
    """out = softmax(scale (q K^T + bias)) V."""
    _wait_for_previous()
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    h = tl.program_id(1)
    Hkv = tl.num_programs(1)
    b = tl.program_id(2).to(tl.int64)
    first_head = (b * Hkv + h) * G
    g = tl.arange(0, GP)
    k_channel = _key_channels()
    v_channel = _value_channels()

    # 1. The tokens of this split.
    length = tl.minimum(tl.load(pos_ptr + b) + 1, S)
    tiles = tl.cdiv(length, T)
    share = tl.cdiv(tiles, splits)
    first = split * share
    stop = tl.minimum(first + share, tiles)

    # 2. The queries, and a softmax of nothing.
    query_at = q_ptr + first_head * 128
    query = _load_queries(query_at, k_channel, k_channel < 128, 128, G, GP).to(tl.float16)
    code_scale = scale * tl.load(k_scale_ptr + b * Hkv + h)
    m = tl.full([GP], -1e30, tl.float32)
    l = tl.zeros([T, GP], tl.float32)
    acc = tl.zeros([128, GP], tl.float32)

    # 3. Their keys and values.
    first_k = b * k_strides[0] + h * k_strides[1]
    first_v = b * v_strides[0] + h * v_strides[1]
    for tile in tl.range(first, stop, num_stages=STAGES):
        start = tile * tl.full([], T, tl.int64)
        last = length - 1 - tile * T  # the row's newest token, counted from the tile's first one
        token = tl.arange(0, T)
        live = token <= last

        k = _load_keys(k_ptr + (first_k + start * k_strides[2]) * 32, k_strides[2] * 32, last, T)
        logits = tl.dot(k, query) * code_scale  # [T, GP]
        if bias_ptr is not None:
            bias_at = bias_ptr + (first_head + g)[None, :] * S + (start + token)[:, None]
            bias = tl.load(bias_at, mask=live[:, None] & (g < G)[None, :], other=0.0)
            logits += bias * scale

        v = _load_values(v_ptr + (first_v + start * v_strides[2]) * 32, v_strides[2] * 32, last, T)
        logits = tl.where(live[:, None], logits, -1e30)
        m_new = tl.maximum(m, tl.max(logits, 0))
        weight = tl.where(live[:, None], tl.exp2(logits - m_new[None, :]), 0.0)
        shrink = tl.exp2(m - m_new)
        l = l * shrink[None, :] + weight
        acc = tl.dot(v, weight.to(tl.float16), acc * shrink[None, :])
        m = m_new

    # 4. The result, or this split's part of it.
    acc *= tl.load(v_scale_ptr + b * Hkv + h)
    _store_split(
        m_ptr,
        l_ptr,
        out_ptr,
        first_head,
        split,
        splits,
        m,
        tl.sum(l, 0),
        acc,
        v_channel,
        v_channel < 128,
        G,
        GP,
        128,
    )


# 64 tokens are 16 KB a tile. Measured on an H200: 2.86 TB/s of keys and values.
E4M3_CONFIG = TileConfig(64, warps=2, stages=3, programs_a_sm=6)


def empty_attend_e4m3(q: Tensor, *_: object, **more: object) -> Tensor:
    """An empty tensor of the shape that launch_attend_e4m3 gives."""
    return torch.empty_like(q)


@operator(empty_attend_e4m3, library="kv_baselines")
def launch_attend_e4m3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    pos: Tensor,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of one new token of each row, q [B, Hq, 128] after RoPE, over its tokens up to pos
    [B] int32 -> [B, Hq, 128].

    k, v [B, Hkv, S, 128]: views (check_store) of bytes, numbers in e4m3 in units of their scales
    [B, Hkv] fp32. bias [B, Hq, S] fp32: what is added to q . k, or None."""
    B, Hq, D = q.shape
    _, Hkv, S, _ = k.shape
    need(D == 128, f"heads have 128 dims here, not {D}")
    need(q.dtype in (torch.bfloat16, torch.float16), f"q must have 16 bits, not be {q.dtype}")
    need(Hq % Hkv == 0, f"{Hq} query heads do not divide over {Hkv} key/value heads")
    check(
        q=(q, q.dtype, B, Hq, 128),
        pos=(pos, torch.int32, B),
        k_scale=(k_scale, torch.float32, B, Hkv),
        v_scale=(v_scale, torch.float32, B, Hkv),
        bias=(bias, torch.float32, B, Hq, S),
    )
    k_strides = check_store(B, Hkv, S, keys=(k, torch.uint8, 128))
    v_strides = check_store(B, Hkv, S, values=(v, torch.uint8, 128))
    splits = attend_splits(S, B * Hkv, E4M3_CONFIG.programs_a_sm)
    parts = empty_splits(q, splits, 128)
    G = Hq // Hkv
    _attend_e4m3_kernel[splits, Hkv, B](
        q_ptr=q,
        k_ptr=k.view(torch.int32),
        v_ptr=v.view(torch.int32),
        k_scale_ptr=k_scale,
        v_scale_ptr=v_scale,
        pos_ptr=pos,
        bias_ptr=bias,
        m_ptr=parts.m,
        l_ptr=parts.l,
        out_ptr=parts.out,
        k_strides=k_strides,
        v_strides=v_strides,
        S=S,
        scale=scale * LOG2E,
        G=G,
        GP=power2(G, 8),
        T=E4M3_CONFIG.tokens,
        STAGES=E4M3_CONFIG.stages,
        num_warps=E4M3_CONFIG.warps,
        **overlapped(q.device),
    )
    return merge_splits(parts, q)


# --------------------------------------------------------------------------------------- TurboQuant


@dataclass
class TurboQuantSettings(CentreSettings):
    """TurboQuant (arXiv 2504.19874): rotated keys and values, each number at the nearest of fixed
    levels."""

    bits: int = setting(4, "bits of a code", (2, 4))


# The levels above 0 at which normal numbers have the least mean square error, in standard
# deviations (Max, "Quantizing for minimum distortion", 1960). A coordinate of a random unit vector
# in D dims is nearly normal (Lemma 1), of deviation D^-1/2.
LEVELS = {
    2: (0.4528, 1.51),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733),
}


def turboquant(x: Tensor, Pi: Tensor, levels: Tensor) -> Tensor:
    """Vectors as their codes decode (TurboQuant's Algorithm 1, whose lines number the steps).

    x [..., D] -> [..., D]. Pi [D, D]: a random rotation; levels [n]: those of a unit vector's
    numbers."""
    norm = x.norm(dim=-1, keepdim=True)

    # 5. Rotate the unit vector.
    y = x / norm @ Pi.mT

    # 6. The nearest level of each number.
    codes = (y[..., None] - levels).abs().argmin(-1)

    # 9, 10. Decode, and rotate back.
    return as_fp16(norm) * (levels[codes] @ Pi)


class LevelStore(ScaledStore):
    """Codes of a rotated vector's numbers, each of the nearest level of a unit vector's, and the
    vector's norm."""

    kind = "levels"  # which no kernel knows

    def __init__(self, context: CacheContext, bits: int):
        width = context.config.head_dim
        super().__init__(context, context.config.n_kv_heads, context.max_seq_length, width, bits)
        positive = torch.tensor(LEVELS[bits], device=context.device) * width**-0.5
        self.levels = torch.cat((-positive.flip(0), positive))  # ascending
        self.rotation = random_rotation(width).to(context.device)  # Pi^T

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        norm = x.norm(dim=-1)
        unit = x / norm.clamp(min=1e-20)[..., None]
        rotated = unit @ self.rotation
        # The nearest level is told by the middles between levels.
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        codes = torch.bucketize(rotated, middles)
        return pack(codes, self.bits), as_fp16(norm)

    def decode_rotated(self, vectors: Tensor, scale: Tensor) -> Tensor:
        """The numbers [..., D] before they are rotated back, of codes and of norms [...]; fp32."""
        codes = unpack(vectors, self.bits).int()
        return self.levels[codes] * scale[..., None].float()

    def decode(self, vectors: Tensor, scale: Tensor) -> Tensor:
        rotated = self.decode_rotated(vectors, scale)
        return (rotated @ self.rotation.mT).to(self.context.dtype)

    # Products with rotated numbers: it takes less to rotate queries and outputs than every token.

    def logits(self, q: Tensor) -> Tensor:
        q_rotated = q.float() @ self.rotation
        return q_rotated @ self.decode_rotated(self.vectors, self.scale).mT

    def mix(self, weights: Tensor) -> Tensor:
        mixed = weights @ self.decode_rotated(self.vectors, self.scale)
        return mixed @ self.rotation.mT


def turboquant_cache(context: CacheContext, settings: TurboQuantSettings) -> Cache:
    keys = LevelStore(context, settings.bits)
    values = LevelStore(context, settings.bits)
    return coded_cache(context, settings, keys, values)


# ----------------------------------------------------------------------------------------- ShadowKV


class ShadowKvLayout(NamedTuple):
    """How many tokens of each kind a cache has room for."""

    n_selected: int  # of chunks that a step selects
    n_outliers: int  # of outlier chunks
    n_recent: int


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
        """Outliers stand in the place of sinks. Where not all fit, recent tokens come first, then
        outliers, then what is selected."""
        layout = self.layout(max_seq_length)
        S = max_seq_length
        n_recent = min(layout.n_recent, S)
        n_outliers = min(layout.n_outliers, S - n_recent)
        n_selected = min(layout.n_selected, S - n_recent - n_outliers)
        return Budget(n_sinks=n_outliers, n_selected=n_selected, n_recent=n_recent)

    def layout(self, max_seq_length: int) -> ShadowKvLayout:
        """Whole chunks, whose tokens are --keep in all. Where all tokens are attended, there is
        room for all of them as each kind."""
        chunk = min(self.chunk, max_seq_length)
        n_recent = self.recent + chunk - 1  # recent tokens begin where a chunk does
        total = kept_tokens(self.keep, max_seq_length)
        if total >= max_seq_length:
            n_chunks = -(-max_seq_length // chunk)
            return ShadowKvLayout(
                n_selected=n_chunks * chunk,
                n_outliers=min(self.outliers, n_chunks) * chunk,
                n_recent=min(n_recent, max_seq_length),
            )
        n_outliers = self.outliers * chunk
        n_chunks = (total - n_outliers - n_recent) // chunk
        if n_chunks < 1:
            exact = f"{self.outliers} outlier chunks and {n_recent} recent tokens"
            raise UserError(
                f"--keep {self.keep:g} of {max_seq_length} leaves no chunk of {chunk} beside"
                f" {exact}; lower --outliers or --recent"
            )
        return ShadowKvLayout(n_chunks * chunk, n_outliers, n_recent)


class ShadowKvBudget(NamedTuple):
    """What the published step selects, and what is exact besides."""

    n_chunks: int  # to select
    chunk: int  # tokens of a chunk
    n_recent: int


def shadowkv_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: tuple,
    U: Tensor,
    outliers: Tensor,
    budget: ShadowKvBudget,
    rope: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, list[Tensor], tuple]:
    """One decode step of ShadowKV as published (Algorithm 2), for one sequence.

    q [Hq, D], k and v [Hkv, D]: before RoPE -> output [Hq, D], and each KV head's tokens. stored:
    latents [S - 1, r], K after RoPE (for landmarks, outliers, recent tokens) and V
    [S - 1, Hkv, D]. U [Hkv*D, r]: of the prompt's SVD. outliers [Hkv, n]: exact chunks.
    rope(x, positions) rotates x [n, H, D]."""
    n_chunks, chunk, n_recent = budget
    Hkv, D = k.shape
    S = len(stored[0]) + 1
    now = torch.tensor([S - 1])
    q = rope(q[None], now)[0].unflatten(0, (Hkv, -1))  # [Hkv, G, D]
    k_rotated = rope(k[None], now)[0]
    latents, keys, values = appended(stored, k.flatten() @ U, k_rotated, v)
    U = U.unflatten(0, (Hkv, D))

    n_old = max(0, S - n_recent) // chunk  # chunks before the recent tokens
    recent = torch.arange(n_old * chunk, S)
    outputs = []
    attended = []
    for h in range(Hkv):
        # 1. The best of the older chunks, by the largest weight that a query gives their mean key.
        chunks = keys[: S // chunk * chunk, h].unflatten(0, (-1, chunk))  # [chunks, chunk, D]
        landmarks = chunks.mean(1)
        logits = q[h] @ landmarks.mT / D**0.5  # [G, chunks]
        scores = logits.log_softmax(-1).amax(0)[:n_old]
        scores[outliers[h][outliers[h] < n_old]] = -torch.inf
        n_best = min(n_chunks, int(scores.isfinite().sum()))
        best = scores.topk(n_best).indices

        # 2. Rebuild their keys; outliers and recent tokens are exact.
        rebuilt = page_tokens(best, chunk)
        exact = torch.cat((page_tokens(outliers[h], chunk), recent))
        k_rebuilt = latents[rebuilt] @ U[h].mT  # [n, D]
        k_rebuilt = rope(k_rebuilt[:, None], rebuilt)[:, 0]
        k_attended = torch.cat((k_rebuilt, keys[exact, h]))

        # 3. Attend. The values of what is rebuilt come from host memory.
        tokens = torch.cat((rebuilt, exact))
        logits = q[h] @ k_attended.mT / D**0.5
        outputs.append(logits.softmax(-1) @ values[tokens, h])
        attended.append(tokens)
    return torch.cat(outputs), attended, (latents, keys, values)


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
        layout = settings.layout(S)
        self.settings = settings
        self.chunk = min(settings.chunk, S)
        self.n_selected = layout.n_selected
        self.n_outliers = layout.n_outliers
        self.n_recent = layout.n_recent
        self.r = rank_of(settings.rank, c.kv_dim)
        n_chunks = -(-S // self.chunk)
        n_outlier_chunks = layout.n_outliers // self.chunk
        self.add_table("basis", c.kv_dim, self.r, dtype=context.dtype)  # U
        self.add_table("latent", S, self.r, dtype=context.dtype)
        self.add_table("landmark", n_heads, n_chunks, D, dtype=context.dtype)
        self.add_table("outlier_chunk", n_heads, n_outlier_chunks, fill=-1)
        self.outliers = TokenStore(context, n_heads, self.n_outliers, 2 * D)
        self.ring = RingStore(context, n_heads, 2 * D, n_sinks=0, n_recent=self.n_recent)
        self.values = HostStore(context, n_heads, S, D)

    def past(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Rebuilt keys, but for those of outliers and recent tokens."""
        latents = self.latent[row, :length]
        keys = latents @ self.basis[row].T  # [length, Hkv*D]
        keys = self.rope_from(keys.unflatten(1, (self.config.n_kv_heads, -1)), 0)
        kv = torch.cat((keys, self.values.of_row(row, length)), -1)  # [length, Hkv, 2D]
        index = page_tokens(self.outlier_chunk[row], self.chunk)  # [Hkv, n], negative for none
        head, place = (index >= 0).nonzero(as_tuple=True)
        kv[index[head, place], head] = self.outliers.vectors[row, head, place]
        return self.ring.overlay(row, kv).chunk(2, -1)

    def prefill(self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_prompt = start == 0
        flat = k.flatten(1)  # [n, Hkv*D], before RoPE
        q = self.rope_from(q, start)
        k = self.rope_from(k, start)
        past_and_new_k, past_and_new_v = self.past_and_new(row, start, k, v)
        # A prompt decides the basis; what follows it is projected by that.
        if is_prompt:
            self.basis[row] = self.best_basis(flat)
        self.latent[row, start : start + len(k)] = flat @ self.basis[row]
        chunks, landmarks = self.write_landmarks(row, start, k)
        kv = torch.cat((k, v), -1)
        if is_prompt:
            self.keep_outliers(row, kv, chunks, landmarks)
        self.values.write_prompt(row, start, v)
        self.ring.write_prompt(row, start, kv)
        return causal_attention(q, past_and_new_k, past_and_new_v)

    def best_basis(self, keys: Tensor) -> Tensor:
        """U [Hkv*D, r] of a prompt's keys [S, Hkv*D] before RoPE: their leading right singular
        vectors, which are the eigenvectors of K^T K."""
        gram = keys.double().T @ keys.double()
        eigenvectors = torch.linalg.eigh(gram).eigenvectors.flip(-1)  # the largest first
        return eigenvectors[:, : self.r].to(keys.dtype)

    def write_landmarks(self, row: int, start: int, k: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the means of the chunks that new keys fill, k [n, Hkv, D] after RoPE.

        -> the chunks [chunks, chunk, Hkv, D], and their means [chunks, Hkv, D]; fp32."""
        # The chunk that goes on has its first tokens in the ring, whose slots go by position.
        first_chunk = start // self.chunk
        begun = self.context.positions[first_chunk * self.chunk : start]
        begun_k, _ = self.ring.vectors[row, :, begun % self.n_recent].chunk(2, -1)
        keys = torch.cat((begun_k.transpose(0, 1), k))
        n_chunks = len(keys) // self.chunk  # whole ones
        chunks = keys[: n_chunks * self.chunk].unflatten(0, (-1, self.chunk)).float()
        landmarks = chunks.mean(1)
        stop_chunk = first_chunk + n_chunks
        by_head = landmarks.transpose(0, 1).to(k.dtype)
        self.landmark[row, :, first_chunk:stop_chunk] = by_head
        return chunks, landmarks

    def keep_outliers(self, row: int, kv: Tensor, chunks: Tensor, landmarks: Tensor) -> None:
        """Stores the old chunks of a prompt that are least like their mean.

        kv [S, Hkv, 2D]; chunks of keys [chunks, chunk, Hkv, D] and their means [chunks, Hkv, D]."""
        n_old = max(0, len(kv) - self.settings.recent) // self.chunk
        means = landmarks[:n_old, None]
        # A chunk is as like its mean as its least like key is.
        likeness = F.cosine_similarity(chunks[:n_old], means, dim=-1).amin(1)  # [n_old, Hkv]
        n_kept = min(self.outlier_chunk.shape[-1], n_old)
        outlier_chunk = likeness.T.topk(n_kept, largest=False).indices  # [Hkv, n_kept]
        self.outlier_chunk[row] = -1
        self.outlier_chunk[row, :, :n_kept] = outlier_chunk.int()
        tokens = page_tokens(outlier_chunk, self.chunk)
        heads = torch.arange(len(outlier_chunk), device=kv.device)[:, None]
        self.outliers.vectors[row, :, : tokens.shape[1]] = kv[tokens, heads]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        Hkv = k.shape[1]
        rows = self.context.rows

        # 1. Write.
        latent = k.flatten(1)[:, None] @ self.basis  # [B, 1, r]
        self.latent[rows, pos] = latent[:, 0]
        q = self.rope(q, pos)
        k = self.rope(k, pos)
        self.ring.write_token(pos, torch.cat((k, v), -1))
        self.values.write_token(pos, v)
        # The mean of the last chunk is written at every step, and read when the chunk is whole: a
        # condition would have to ask the host.
        last_chunk = pos // self.chunk
        slots = page_tokens(last_chunk[:, None], self.chunk) % self.n_recent  # [B, chunk]
        mean_kv = self.ring.vectors[rows[:, None], :, slots].float().mean(1)  # [B, Hkv, 2D]
        mean_k, _ = mean_kv.chunk(2, -1)
        self.landmark[rows, :, last_chunk] = mean_k.to(k.dtype)

        # 2. Select, and rebuild K = RoPE(A U^T) of the selected tokens. Their V comes from host
        # memory.
        tokens = self.select(pos, q)[:, :, 0]  # [B, Hkv, n]
        stop = tokens.shape[-1] - self.n_recent
        selected = tokens[..., self.n_outliers : stop].clamp(min=0)
        latents = self.latent[rows[:, None, None], selected]  # [B, Hkv, n, r]
        U = self.basis.unflatten(1, (Hkv, -1))  # [B, Hkv, D, r]
        rebuilt = latents @ U.transpose(-1, -2)  # [B, Hkv, n, D]
        k_selected = self.rope(rebuilt[..., None, :], selected)[..., 0, :]
        v_selected = self.values.read(selected[:, :, None])[:, :, 0]

        # 3. Attend outliers, selected and recent tokens, in the order of `select`.
        k_outliers, v_outliers = self.outliers.vectors.chunk(2, -1)
        k_recent, v_recent = self.ring.vectors.chunk(2, -1)
        keys = torch.cat((k_outliers, k_selected, k_recent), 2)
        values = torch.cat((v_outliers, v_selected, v_recent), 2)
        return kernels.attend_plain(
            q, keys, values, tokens >= 0, pos, scale=self.softmax_scale, kernel=self.kernel
        )

    def select(self, pos: Tensor, q: Tensor) -> Tensor:
        """Outliers, then the tokens of the best chunks, then the recent tokens: an index
        [B, Hkv, 1, n]."""
        # Recent tokens begin with a chunk, so that each token is in a chunk or recent, never both.
        first_chunk = (pos + 1 - self.settings.recent).clamp(min=0) // self.chunk
        in_ring = ring_positions(pos, self.n_recent)[:, None]  # [B, 1, n_recent]
        in_ring = in_ring.expand(-1, self.config.n_kv_heads, -1)
        is_recent = in_ring >= (first_chunk * self.chunk)[:, None, None]
        recent = in_ring.where(is_recent, -1)
        outliers = page_tokens(self.outlier_chunk, self.chunk)
        selected = self.select_chunks(pos, q, first_chunk - 1)
        return torch.cat((outliers, selected, recent), 2)[:, :, None]

    def select_chunks(self, pos: Tensor, q: Tensor, last: Tensor) -> Tensor:
        """Tokens of the chunks up to `last` [B] with the best landmarks [B, Hkv, n], negative for
        none."""
        last_whole = (pos + 1) // self.chunk - 1
        scores = kernels.scores(
            q, self.landmark, None, last_whole, self.softmax_scale, "largest", kernel=self.kernel
        )  # [B, Hkv, chunks]
        chunks = torch.arange(self.landmark.shape[2], device=pos.device)
        is_outlier = (self.outlier_chunk[..., None] == chunks).any(2)
        scores = scores.masked_fill(is_outlier, -torch.inf)
        budget = Budget(n_sinks=0, n_selected=self.n_selected // self.chunk, n_recent=0)
        best = kernels.select(scores.unsqueeze(2), last, budget, kernel=self.kernel)
        return page_tokens(best[:, :, 0], self.chunk)

    def row_state(self, row: int, length: int) -> dict[str, Tensor]:
        state = super().row_state(row, length)
        n_chunks = -(-length // self.chunk)
        state["latent"] = self.latent[row, :length]
        state["landmark"] = self.landmark[row, :, :n_chunks]
        return state

    def bytes_host(self) -> int:
        return self.values.vectors.nbytes

    def bytes_read(self, length: int) -> int:
        """Landmarks, outliers, ring, each head's chosen latents, the basis, and V of the chosen
        (host)."""
        c = self.config
        n_recent = min(self.n_recent, length)
        n_outliers = min(self.n_outliers, max(0, length - n_recent))
        n_selected = min(self.n_selected, max(0, length - n_recent - n_outliers))
        landmarks = length // self.chunk * c.kv_dim
        exact = 2 * (n_outliers + n_recent) * c.kv_dim
        latents = min(length, c.n_kv_heads * n_selected) * self.r
        basis = c.kv_dim * self.r
        values = n_selected * c.kv_dim
        numbers = landmarks + exact + latents + basis + values
        return numbers * self.context.dtype.itemsize


# --------------------------------------------------------------------------------------------- Palu


@dataclass
class PaluSettings:
    """Palu (arXiv 2407.21118), one head a group: low-rank K and V, keys rebuilt before RoPE at each
    step."""

    keep: float = setting(0.5, "rank of each head's K and V, a fraction of D", within="(0, 1]")

    def bases(self, artifact: Artifact, i: int, kind: str) -> Tensor:
        """Layer i's bases R [Hkv, D, r] of the keys ("k") or the values ("v")."""
        basis = artifact[f"{kind}.basis"][i]  # [Hkv, D, D]
        r = rank_of(self.keep, basis.shape[-1])
        return basis[..., :r]


def palu_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stored: tuple,
    R: Tensor,
    rope: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, tuple]:
    """One decode step of Palu as published (sec. 3.1), for one KV head of its own group.

    q [G, D]: after RoPE; k [D]: before it; v [d_v]: x W_V R_V, whose basis is folded into W_V and
    W_O -> output [G, d_v]. stored: latents of the keys [S - 1, r] and of the values [S - 1, d_v].
    R [D, r] is orthonormal; rope(x, positions) rotates x [n, D]."""
    # 1. Compress the key before RoPE, and append.
    latents, values = appended(stored, k @ R, v)

    # 2. Rebuild and rotate all keys: every step does.
    positions = torch.arange(len(latents))
    keys = rope(latents @ R.mT, positions)

    # 3. Attend.
    logits = q @ keys.mT / len(R) ** 0.5
    output = logits.softmax(-1) @ values
    return output, (latents, values)


class PaluCache(Cache):
    """Folded values, and latents of the keys before RoPE: FDC's /PRC, no post-RoPE compression.

    Latents are of keys less their bias, which comes back when they are rebuilt (ours)."""

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

    def of_heads(self, values: Tensor) -> Tensor:
        """values [n, Hkv*r] of all heads -> [n, Hkv, r]."""
        return values.unflatten(-1, (self.config.n_kv_heads, -1))

    def prefill(
        self, row: int, start: int, q: Tensor, k: Tensor, v: Tensor, values: Tensor
    ) -> Tensor:
        """values [n, Hkv*r]: all heads', folded; v is empty -> [n, Hq, r]."""
        stop = start + len(q)
        self.keys.latents.write_prompt(row, start, self.latent(k))
        self.values.write_prompt(row, start, self.of_heads(values))
        k = self.keys.of_row(row, stop)
        v = self.values.of_row(row, stop)
        # Flash attention wants one width for q, k and v.
        D = q.shape[-1]
        r = v.shape[-1]
        padded = F.pad(v, (0, D - r))
        output = causal_attention(self.rope_from(q, start), k, padded)
        return output[..., :r]

    def decode(self, pos: Tensor, q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        """values [B, Hkv*r]: all heads', folded; v is empty -> [B, Hq, r]."""
        self.keys.latents.write_token(pos, self.latent(k))
        self.values.write_token(pos, self.of_heads(values))
        q = self.rope(q, pos)
        return attend(q, self.keys, self.values, pos, scale=self.softmax_scale, kernel=self.kernel)


def fit_palu(model: Llama, tokens: Tensor) -> tuple:
    """The whitened SVD of W_K and W_V, one head a group (Palu sec. 3).

    The best A B for X W is W R R^T, where R has the eigenvectors of W^T X^T X W: those of the
    head's keys (or values) on the text, less the bias. tokens [N, S] -> "k.basis" and "v.basis"
    [L, Hkv, D, D] in calibrate.Fitted, columns, the best first."""
    from calibrate import Fitted, head_bases  # only now: it imports generate

    biases = [kv_bias(layer.attention, model.config) for layer in model.layers]

    def keys_and_values(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k_bias, v_bias = biases[i]
        return torch.cat((k - k_bias, v - v_bias), 1)  # [S, 2 Hkv, D]

    singular, basis = head_bases(model, tokens, "palu", keys_and_values)
    k_basis, v_basis = basis.float().chunk(2, 1)
    half = model.config.head_dim // 2
    kept = singular[..., :half].norm() / singular.norm()
    return Fitted({"k.basis": k_basis, "v.basis": v_basis}, {"energy of 50%": kept.item() ** 2})


# ---------------------------------------------------------------------------------------- the table

METHODS = {
    "streaming": Method(StreamingSettings, each_layer(StreamingCache)),
    "h2o": Method(H2oSettings, each_layer(H2oCache)),
    "snapkv": Method(SnapKvSettings, each_layer(SnapKvCache)),
    "random": Method(RandomSettings, random_caches),
    "quest": Method(QuestSettings, each_layer(QuestCache)),
    "sals_cann": Method(
        SalsCannSettings, each_layer(SalsCannCache), fit="calibrate:fit_loki", shapes=loki_shapes
    ),
    "doublesparse": Method(
        DoubleSparseSettings,
        each_layer(DoubleSparseCache),
        fit="extras.baselines:fit_doublesparse",
        shapes=shapes_of_heads("importance"),
    ),
    "fp8": Method(Fp8Settings, each_layer(fp8_cache)),
    "turboquant": Method(TurboQuantSettings, each_layer(turboquant_cache)),
    "shadowkv": Method(ShadowKvSettings, each_layer(ShadowKvCache)),
    "palu": Method(
        PaluSettings,
        each_layer(PaluCache),
        fit="extras.baselines:fit_palu",
        shapes=shapes_of_heads("k.basis", "v.basis"),
        fold=fold_values,
    ),
}
