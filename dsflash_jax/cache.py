"""The decode cache as a value: what later tokens of a sequence need of earlier ones, and nothing else.

Every array has the batch in front, so a row of it is a sequence. B rows, L layers, N sources of a ratio, S slots, W the
window, Z draft stages. Layers read a cache through `Source` and `Cache.past` and hand on what they make as `Made`;
`commit` appends of that what a piece's first tokens made. Source: architecture section 13.

A vector is stored packed, as codes and scales, where the model rounds its kind; else as a number of the compute dtype.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dsflash_jax import engram, quant
from dsflash_jax.config import Config
from dsflash_jax.flow import Setup
from dsflash_jax.modes import LayerSpec, Mode

SHORT = 32  # tokens of a piece up to which any number of them may be committed, however short the window is

Entry = Any  # stored vectors: quant.Packed, or numbers [..., width]


@dataclass(frozen=True)
class Form:
    """How vectors of one kind are stored."""

    width: int
    fmt: quant.Format | None  # what they are rounded to, None if they are not
    packed: bool  # as codes and scales, in place of rounded numbers
    dtype: str  # of a vector when it is read

    def pack(self, x: Float[Array, "*B D"]) -> Entry:
        """Round vectors and store them."""
        if self.fmt is None:
            return x
        return quant.encode(x, self.fmt) if self.packed else quant.fake(x, self.fmt)

    def unpack(self, entry: Entry) -> Float[Array, "*B D"]:
        """The vectors of an entry."""
        return entry if self.fmt is None or not self.packed else quant.decode(entry, self.fmt, jnp.dtype(self.dtype))

    def zeros(self, *shape: int) -> Entry:
        """Room for vectors."""
        if self.fmt is None or not self.packed:
            return jnp.zeros((*shape, self.width), jnp.dtype(self.dtype))
        return jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype),
            jax.eval_shape(self.pack, jax.ShapeDtypeStruct((*shape, self.width), jnp.dtype(self.dtype))),
        )


@dataclass(frozen=True)
class Forms:
    """The form of each kind."""

    window: Form
    kv: Form
    index: Form


def forms(setup: Setup, packed: bool = True) -> Forms:
    """How a setup stores what it caches; `packed=False` keeps rounded values as numbers, to look at."""
    c, q = setup.config, setup.quantize
    form = lambda width, on, fmt: Form(width, fmt if on else None, packed and on, setup.compute.dtype)  # noqa: E731
    return Forms(
        form(c.head_dim, q.window_fp8, quant.Q8),
        form(c.head_dim, q.kv_fp4, quant.Q4X16),
        form(c.index_head_dim, q.index_fp4, quant.Q4X32),
    )


@struct.dataclass
class Source:
    """The slots of one source as a piece sees them: the stored ones, and those that the piece itself makes.

    `rows` and `block` read one row of the batch: use them under `jax.vmap`.
    """

    held: Entry  # [B, N, S, ...] stored slots of all sources of a ratio
    number: Any  # int [B]: which of them
    stored: Any  # int [B]: slots that are stored; what the piece makes of these is not read
    first: Any  # int [B]: slot of new[0]
    new: Any  # float [B, S', D]
    form: Form = struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """Slots that there is room for."""
        return jax.tree.leaves(self.held)[0].shape[-2]

    def rows(self, ids: Int[Array, "T K"]) -> Float[Array, "T K D"]:
        """Slots of one row by number; an absent one (-1) gives some slot, which the caller masks."""
        held = jax.tree.map(lambda a: a.at[self.number, jnp.maximum(ids, 0)].get(mode="clip"), self.held)
        new = self.new.at[jnp.maximum(ids - self.first, 0)].get(mode="clip")
        return jnp.where((ids < self.stored)[..., None], self.form.unpack(held), new)

    def block(self, start: Int[Array, ""], size: int) -> Float[Array, "{size} D"]:
        """Slots start .. start + size - 1 of one row; those that do not exist hold anything finite."""
        take = lambda a: jax.lax.dynamic_slice(a, (self.number, start, 0), (1, size, a.shape[-1]))[0]  # noqa: E731
        held = self.form.unpack(jax.tree.map(take, self.held))
        ids = self.first + jnp.arange(self.new.shape[0], dtype=jnp.int32)
        place = jnp.where((ids >= self.stored) & (ids >= start), ids - start, size)
        return held.at[place].set(self.new, mode="drop")


@struct.dataclass
class Made:
    """What a piece of T tokens made in n layers, among them m sources of a ratio.

    Of a long piece (`Cache.short`) rings get the last W tokens, and a tail has what is pending at the piece's end.
    """

    window: Entry  # [n, B, T or W, ...]
    kv: dict[int, Entry]  # by ratio [m, B, S', ...]
    index: dict[int, Entry]  # by ratio [m, B, S', ...]
    tails: dict[int, Any]  # by ratio above 1, float32 [m, B, T + ratio - 1, 2 Dh], or ratio - 1 of them
    line: Any = None  # int32 [B, n - 1 + T]: class ids before the piece and in it; None without n-gram memory
    draft: Entry = None  # [Z, B, T or W, ...]: what the draft stages keep; None without a draft head


class Slots(NamedTuple):
    """What a piece made of one source."""

    ratio: int
    kv: Entry  # [B, S', ...]
    index: Entry  # [B, S', ...]
    tail: Any  # float32 [B, T + ratio - 1, 2 Dh], None at ratio 1


@struct.dataclass
class Cache:
    """What decoding keeps of every row. See the table in docs/design/part4.md."""

    length: Any  # int32 [B]: tokens so far, the position of the next
    origin: Any  # int32 [B]: no window reaches tokens before this position
    stored: dict[int, Any]  # by ratio int32 [B]: complete slots; more than length // ratio behind a loaded prefix
    window: Entry  # [B, L, W, ...]: position p at place p mod W
    kv: dict[int, Entry]  # by ratio [B, N, S, ...]
    index: dict[int, Entry]  # by ratio [B, N, S, ...]
    tails: dict[int, Any]  # by ratio above 1, float32 [B, N, ratio - 1, 2, Dh]: KV and gate, the newest last
    history: Any  # int32 [B, n - 1] class ids, see engram.remember; None without n-gram memory
    draft: Entry  # [B, Z, W, ...]: the draft stages' rings; None without a draft head
    forms: Forms = struct.field(pytree_node=False)
    capacity: int = struct.field(pytree_node=False)  # tokens a row has room for

    @property
    def ring(self) -> int:
        """Places of a ring, W."""
        return jax.tree.leaves(self.window)[0].shape[2]

    def short(self, tokens: int) -> bool:
        """Whether a piece of so many tokens is kept whole until it is known how many are committed."""
        return tokens <= max(self.ring, SHORT)

    def past(self, layer: Any) -> tuple[Float[Array, "B W1 Dh"], Int[Array, "B W1"]]:
        """A layer's window KV of the W - 1 tokens before the next, oldest first, and 1 where there is such a token."""
        positions = self.length[:, None] + jnp.arange(1 - self.ring, 0, dtype=jnp.int32)[None]
        take = jax.vmap(lambda a, at: a[layer, at])
        held = jax.tree.map(lambda a: take(a, positions % self.ring), self.window)
        return self.forms.window.unpack(held), (positions >= self.origin[:, None]).astype(jnp.int32)

    def filled(self) -> Bool[Array, "B W"]:
        """Which places of a ring hold a token that a window may reach."""
        place = jnp.arange(self.ring, dtype=jnp.int32)[None]
        newest = (self.length - 1)[:, None]
        return newest - (newest - place) % self.ring >= self.origin[:, None]

    def source(self, kind: str, ratio: int, number: Any, first: Array, new: Array) -> Source:
        """One source's slots, "kv" or "index", with those that the piece makes."""
        b = self.length.shape[0]
        form = getattr(self.forms, kind)
        held = getattr(self, kind)[ratio]
        return Source(held, jnp.broadcast_to(number, (b,)), self.stored[ratio], first, new, form)

    def made(self, window: Entry, slots: Slots | None, new: dict[int, int], count: Int[Array, " B"]) -> Made:
        """What one layer made: its window entries [B, T, ...] and, of a source, its slots. `new` counts a piece's slots
        of each ratio; `count` its tokens."""
        b, t = jax.tree.leaves(window)[0].shape[:2]
        short, one = self.short(t), lambda a: a[None]
        if not short:
            window = jax.tree.map(lambda a: recent(a, count, self.ring), window)
        none = lambda form: {r: form.zeros(0, b, n) for r, n in new.items()}  # noqa: E731
        wide = 2 * self.forms.kv.width
        kv, index = none(self.forms.kv), none(self.forms.index)
        tails = {r: jnp.zeros((0, b, (t if short else 0) + r - 1, wide), jnp.float32) for r in self.tails}
        if slots is not None:
            kv[slots.ratio], index[slots.ratio] = jax.tree.map(one, (slots.kv, slots.index))
            if slots.ratio > 1:
                tail = slots.tail if short else recent(slots.tail, count + slots.ratio - 1, slots.ratio - 1)
                tails[slots.ratio] = tail[None]
        return Made(jax.tree.map(one, window), kv, index, tails)

    def tail(self, ratio: int, number: Any) -> Float[Array, "B R1 Dkg"]:
        """KV and gate of the ratio - 1 tokens before the next; those of complete groups are not read."""
        tail = self.tails[ratio][:, number]
        return tail.reshape(*tail.shape[:2], -1)


def numbers(table: tuple[LayerSpec, ...]) -> tuple[int, ...]:
    """For each layer, which of the sources of its ratio it reads; 0 for a window layer."""
    count: Counter[int] = Counter()
    out = []
    for spec in table:
        count[spec.ratio] += spec.mode is Mode.FULL
        out.append(max(count[spec.ratio] - 1, 0))
    return tuple(out)


def sources(c: Config) -> dict[int, int]:
    """Number of sources of each ratio."""
    return dict(sorted(Counter(spec.ratio for spec in c.table if spec.mode is Mode.FULL).items()))


def empty(setup: Setup, rows: int, capacity: int, packed: bool = True) -> Cache:
    """A cache without tokens. Raises ValueError for no rows or no room."""
    c, how = setup.config, forms(setup, packed)
    if rows < 1 or capacity < 1:
        raise ValueError(f"a cache holds at least one row and one token, got rows={rows} and capacity={capacity}")
    count, w = sources(c), c.sliding_window
    if any(r > w for r in count):
        raise ValueError(f"sliding_window={w} must reach the pending tokens of a slot, ratios are {list(count)}")
    none = lambda: jnp.zeros((rows,), jnp.int32)  # noqa: E731
    slots = lambda form: {r: form.zeros(rows, n, capacity // r) for r, n in count.items()}  # noqa: E731
    memory = jnp.full((rows, c.engram_max_ngram_size - 1), engram.DEAD, jnp.int32) if c.engram_layer_ids else None
    stages = c.num_nextn_predict_layers if setup.taps else 0
    return Cache(
        length=none(), origin=none(), stored={r: none() for r in count},
        window=how.window.zeros(rows, c.num_hidden_layers, w),
        kv=slots(how.kv), index=slots(how.index),
        tails={r: jnp.zeros((rows, n, r - 1, 2, c.head_dim), jnp.float32) for r, n in count.items() if r > 1},
        history=memory, draft=how.window.zeros(rows, stages, w) if stages else None,
        forms=how, capacity=capacity,
    )  # fmt: skip


def grow(cache: Cache, capacity: int) -> Cache:
    """The same cache with room for more tokens; a smaller capacity raises ValueError."""
    if capacity < cache.capacity:
        raise ValueError(f"a cache for {cache.capacity} tokens a row cannot shrink to {capacity}")

    def longer(ratio: int, entry: Entry) -> Entry:
        pad = lambda a: jnp.pad(a, [(0, 0), (0, 0), (0, capacity // ratio - a.shape[2]), (0, 0)])  # noqa: E731
        return jax.tree.map(pad, entry)

    return replace(
        cache,
        kv={r: longer(r, e) for r, e in cache.kv.items()},
        index={r: longer(r, e) for r, e in cache.index.items()},
        capacity=capacity,
    )


def commit(
    cache: Cache, made: Made, count: Int[Array, " B"], layers: range | None = None, table: tuple[LayerSpec, ...] = ()
) -> Cache:
    """Append what the first `count` tokens of a piece made in all layers, or in `layers` of a table.

    Rings get them at their places, slots that are complete and not yet stored theirs, tails the pending tokens. The
    position stays: `advance` moves it, when all layers have run. Of a long piece, of which `Made` has only the end,
    all real tokens count or none.
    """
    start, end = cache.length, cache.length + count
    kept = jax.tree.leaves(made.window)[0].shape[2]
    first = jnp.maximum(end - kept, start) if kept == cache.ring else start
    positions = first[:, None] + jnp.arange(kept, dtype=jnp.int32)[None]
    last = (positions < end[:, None]) & (positions >= end[:, None] - cache.ring)
    place = jnp.where(last, positions % cache.ring, cache.ring)
    low = 0 if layers is None else layers.start
    window = _put(cache.window, made.window, place, low)
    kv, index, tails = dict(cache.kv), dict(cache.index), dict(cache.tails)
    for r in made.kv:
        number = sum(1 for spec in table[:low] if spec.mode is Mode.FULL and spec.ratio == r)
        count_new = jax.tree.leaves(made.kv[r])[0].shape[2]
        ids = (start // r)[:, None] + jnp.arange(count_new, dtype=jnp.int32)[None]
        new = (ids >= cache.stored[r][:, None]) & ((ids + 1) * r <= end[:, None])
        ids = jnp.where(new, ids, cache.capacity // r)
        kv[r], index[r] = _put(kv[r], made.kv[r], ids, number), _put(index[r], made.index[r], ids, number)
        if r > 1:
            pending = jnp.moveaxis(made.tails[r], 0, 1)  # [B, m, tokens, 2 Dh]
            if pending.shape[2] > r - 1:
                take = jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=r - 1, axis=1))
                pending = take(pending, count)
            pending = pending.reshape(*pending.shape[:3], 2, -1)
            old = jax.lax.dynamic_slice_in_dim(tails[r], number, pending.shape[1], axis=1)
            pending = jnp.where((count > 0)[:, None, None, None, None], pending, old)
            tails[r] = jax.lax.dynamic_update_slice_in_dim(tails[r], pending, number, axis=1)
    draft = cache.draft if made.draft is None else _put(cache.draft, made.draft, place, 0)
    history = cache.history
    if made.line is not None:
        history = jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=history.shape[1]))(made.line, count)
    return replace(cache, window=window, kv=kv, index=index, tails=tails, draft=draft, history=history)


def advance(cache: Cache, count: Int[Array, " B"]) -> Cache:
    """Move the position of the next token past `count` committed ones."""
    length = cache.length + count
    return replace(cache, length=length, stored={r: jnp.maximum(n, length // r) for r, n in cache.stored.items()})


def recent(x: Array, end: Int[Array, " B"], size: int) -> Array:
    """The `size` entries of each row of x [B, T, ...] that end before `end`; rows with fewer begin at their first."""
    return jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=size))(x, jnp.maximum(end - size, 0))


def _put(held: Entry, made: Entry, place: Int[Array, "B T"], low: int) -> Entry:
    """Entries [m, B, T, ...] at their places of members low .. low + m - 1; a place behind the end drops one."""

    def put(a: Array, b: Array) -> Array:
        members = low + np.arange(b.shape[0])[:, None]
        row = lambda a, b, at: a.at[members, at[None]].set(b, mode="drop")  # noqa: E731
        return jax.vmap(row)(a, jnp.moveaxis(b, 0, 1), place)

    return jax.tree.map(put, held, made)
