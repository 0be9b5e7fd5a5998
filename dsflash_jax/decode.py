"""Prefill and decode: pieces of tokens behind a cache, whole prompts in chunks, and the decoder's bounded replay.

`extend` is the one road; a chunk of a prompt, a decoded token and a block of drafts are pieces of other sizes.
Source: architecture sections 13 and 14. B rows, T tokens of a piece, right-padded to one length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from dsflash_jax import cache as caches
from dsflash_jax import costs, devices, draft, engram, layers, model, modes, params, pixels, sampling
from dsflash_jax.cache import Cache, Made
from dsflash_jax.config import Config, need
from dsflash_jax.flow import Batch, Setup, Shared, Stream
from dsflash_jax.params import Weights
from dsflash_jax.pixels import Images
from dsflash_jax.sampling import Settings

PREFILLS = ("full", "replay")
Drawn = tuple[Int[Array, " B"], Float[Array, " B"]]  # a token of each row, and its log-probability under the model
LEAST = 256  # tokens that a cache has room for, at least: what is smaller is compiled as often and saves nothing


def piece(
    c: Config, cache: Cache, tokens: Int[Array, "B T"], count: Int[Array, " B"], classes: np.ndarray | None
) -> Batch:
    """The batch of a piece: `count` tokens of each row from the cache's position on, and the n-gram rows they read.

    `classes` [V] maps token ids to those that n-grams are hashed over; None where they are the same.
    """
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    positions = cache.length[:, None] + at
    rows = None
    if c.engram_layer_ids:
        line = (_classes(tokens, classes), positions, engram.layout(c), _pad_class(c, classes))
        rows = engram.rows_device(*line, _image(c, tokens), cache.history)
    return Batch(tokens, (at < count[:, None]).astype(jnp.int32), positions, engram_rows=rows)


def extend(
    setup: Setup,
    w: Weights,
    cache: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    classes: np.ndarray | None = None,
    images: Images | None = None,
    traces: list[dict[str, Array]] | None = None,
) -> tuple[Float[Array, "B T D"], Made]:
    """The hidden states that the head reads of a piece, and what it made. The cache itself stays as it is.

    The first `count` tokens of each row are real. Images have their whole span among them, as `pixels.check_spans` says
    of ids on the host: what is cut off here becomes text. To keep the first n tokens of each row:
    `append(cache, made, n)`. What the cache has no room for would be lost: hidden states of such tokens are NaN.
    """
    batch = replace(piece(setup.config, cache, tokens, count, classes), images=images)
    y, out = model.forward(setup, w, batch, traces=traces, held=cache)
    made = _with_history(setup.config, cache, out.made, tokens, classes)
    lost = (batch.segments > 0) & (batch.positions >= cache.capacity)
    y = jnp.where(lost[..., None], jnp.nan, y)
    return y, _with_draft(setup, w, cache, made, out.taps, batch.positions, count)


def append(cache: Cache, made: Made, count: Int[Array, " B"]) -> Cache:
    """Keep what the first `count` tokens of each row made, and move on behind them."""
    return caches.advance(caches.commit(cache, made, count), count)


def proceed(
    setup: Setup,
    w: Weights,
    cache: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    classes: np.ndarray | None = None,
    images: Images | None = None,
) -> tuple[Cache, Float[Array, "B T D"]]:
    """`extend`, and keep all of it: the cache behind the piece, and the hidden states that the head reads."""
    y, made = extend(setup, w, cache, tokens, count, classes=classes, images=images)
    return _behind(count, lambda cache: append(cache, made, count), cache, y)


def step(
    setup: Setup,
    w: Weights,
    cache: Cache,
    tokens: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    classes: np.ndarray | None = None,
) -> tuple[Cache, Float[Array, "B V"]]:
    """`proceed` by one token of each row whose `count` is 1, not 0, and the logits behind it."""
    cache, y = proceed(setup, w, cache, tokens[:, None], count, classes=classes)
    return cache, model.logits(model.whole(setup, w, "head"), y[:, 0])


@struct.dataclass
class End:
    """What `replay` needs of each row's last W tokens, the newest last."""

    stream: Stream  # before the boundary layer
    tokens: Any  # int [B, W]
    total: Any  # int [B]: tokens of the prompt that went by


def no_end(setup: Setup, rows: int) -> End:
    """`End` of a prompt that has not begun."""
    c, shape = setup.config, (rows, setup.config.sliding_window)
    x = jnp.zeros((*shape, c.hc_mult, c.hidden_size), jnp.dtype(setup.compute.dtype))
    stream = Stream(x, jnp.zeros((*shape, c.hc_mult), jnp.float32))
    return End(stream, jnp.zeros(shape, jnp.int32), jnp.zeros((rows,), jnp.int32))


def encode(
    setup: Setup,
    w: Weights,
    cache: Cache,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    end: End,
    *,
    classes: np.ndarray | None = None,
    images: Images | None = None,
) -> tuple[Cache, End]:
    """A chunk of a prompt through the layers below the boundary, which makes its KV of every token.

    All that is kept of the chunk is in the cache, but for the last tokens' stream, which `replay` goes on with.
    Images as in `extend`.
    """
    c, last, size = setup.config, boundary(setup.config), setup.config.sliding_window
    batch = replace(piece(c, cache, tokens, count, classes), images=images)
    w, ctx, stream = model.enter(setup, w, batch, held=cache)
    plan, lower = modes.plan(c.table), None
    if last:
        nodes, below = model.between(plan, w["layers"], 0, last)
        stream, out = model.run(setup, nodes, below, stream, Shared(), ctx)
        lower = out.made
    (node,), own = model.between(plan, w["layers"], last, last + 1)
    assert isinstance(node, modes.LayerSpec)
    source = layers.kv_only(setup, node, own[modes.name(node)], stream, replace(ctx, layer=last))
    made = source if lower is None else jax.tree.map(lambda a, b: jnp.concatenate([a, b]), lower, source)
    made = _with_history(c, cache, made, tokens, classes)
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), (end.stream, end.tokens), (stream, tokens))
    kept = jax.tree.map(lambda a: caches.recent(a, size + count, size), joined)
    cache, kept = _behind(count, lambda cache: append(cache, made, count), cache, kept)
    return cache, End(kept[0], kept[1], end.total + count)


def replay(setup: Setup, w: Weights, cache: Cache, end: End) -> tuple[Cache, Float[Array, "B T D"]]:
    """The boundary layer and those above it on the last W tokens of a prompt; their hidden states, the first one first.

    Of a prompt of more than W tokens windows begin at the first of these: approximate, and the report's definition.
    A prompt of up to W tokens is whole, and sees what the rings hold before it.
    """
    c, last, size = setup.config, boundary(setup.config), setup.config.sliding_window
    count = jnp.minimum(end.total, size)
    start = cache.length - count
    origin = jnp.where(end.total > size, jnp.maximum(start, cache.origin), cache.origin)
    view = replace(cache, length=start, origin=origin)
    first = lambda a: jax.vmap(partial(jnp.roll, axis=0))(a, count - size)  # noqa: E731
    stream, tokens = jax.tree.map(first, (end.stream, end.tokens))
    batch = piece(replace(c, engram_layer_ids=(), engram_num_embeddings=()), view, tokens, count, None)
    own, ctx, _ = model.enter(setup, w, batch, held=view)  # without the draft head
    nodes, below = model.between(modes.plan(c.table), own["layers"], last, c.num_hidden_layers)
    ctx = replace(ctx, layer=last, image=_image(c, tokens))
    stream, out = model.run(setup, nodes, below, stream, Shared(), ctx)
    made = replace(out.made, kv={}, index={}, tails={})  # `encode` made them of all tokens
    made = _with_draft(setup, w, view, made, out.taps, batch.positions, count)
    layers_run, y = range(last, c.num_hidden_layers), model.leave(setup, own, stream)
    view, y = _behind(count, lambda view: caches.commit(view, made, count, layers_run, c.table), view, y)
    return replace(view, length=cache.length, origin=cache.origin), y


def boundary(c: Config) -> int:
    """The layer from which on only a prompt's end runs. Raises ValueError where the decoder cannot be left out."""
    last = costs.boundary(c)
    if last is None or any(i < last for i in c.dspark_target_layer_ids):
        raise ValueError(
            "replay needs a KV source with no n-gram memory at or above the last one, no candidate source below it and "
            "no layer that feeds the draft head below it; use the full prefill"
        )
    return last


def newest(y: Float[Array, "B T D"], count: Int[Array, " B"]) -> Float[Array, "B D"]:
    """The hidden state of each row's last real token; of a row without any, some token's."""
    return jax.vmap(lambda row, n: row[jnp.maximum(n - 1, 0)])(y, count)


class Decoder:
    """A model that decodes: weights in the compute dtype, compiled pieces, caches with room for what comes.

    What it returns are values; it keeps none of the caches it makes. Each capacity and each size of a piece is compiled
    once. A cache that is handed in is used up. It runs on the devices of the setup's layout.
    """

    def __init__(
        self,
        setup: Setup,
        w: Weights,
        classes: np.ndarray | None = None,
        *,
        packed: bool = True,
        chunk: int = 512,
        mesh: Mesh | None = None,
    ) -> None:
        """`classes` as in `piece`; `chunk` tokens of a prompt run at once; `packed` as in `cache.forms`.

        On several devices a `mesh` names them, by default all there are; raises as `devices.place`.
        """
        c = setup.config
        need(chunk >= 1, f"a chunk of a prompt has at least 1 token, got {chunk}")
        known = c.vocab_size if classes is None else len(classes)
        need(known >= c.vocab_size, f"classes has {known} entries for a vocabulary of {c.vocab_size}")
        self.drafts = c.num_nextn_predict_layers > 0 and "mtp" in w
        self.devices = devices.place(setup, self.drafts, mesh)
        self.setup = self.devices.setup
        self.w = model.cast(self.devices.declared, self.devices.put(w), jnp.dtype(setup.compute.dtype))
        self.classes, self.chunk = classes, chunk
        jit = partial(self.devices.jit, donate_argnums=1)  # the cache
        self._extend, self._encode, self._replay = jit(self._run_extend), jit(self._run_encode), jit(self._run_replay)
        self._step, self._draw = jit(partial(step, self.setup, classes=classes)), jit(self._run_draw)
        self._first, self._logits = self.devices.jit(self._run_first), self.devices.jit(self._run_logits)
        self._empty, self.grow = self.devices.caches(packed)

    @cached_property
    def digest(self) -> str:
        """A hash of the weights, the same on every layout."""
        return params.digest(self.w, self.devices.declared)

    def begin(self, rows: int, tokens: int) -> Cache:
        """An empty cache with room for `tokens` a row. Raises ValueError for rows that the layout cannot split."""
        return self._empty(rows, self.capacity(tokens))

    def capacity(self, tokens: int) -> int:
        """Room that a cache for so many tokens has: a power of two. Raises ValueError for more than the model reads."""
        limit = self.setup.config.max_position_embeddings
        need(tokens <= limit, f"{tokens} tokens, prompt and continuation, exceed max_position_embeddings={limit}")
        return max(LEAST, 1 << (tokens - 1).bit_length())

    def room(self, cache: Cache, tokens: int) -> Cache:
        """The cache with room for `tokens` a row, itself if it has it."""
        capacity = self.capacity(tokens)
        return cache if capacity <= cache.capacity else self.grow(cache, capacity=capacity)

    def check(self, prompt: np.ndarray) -> None:
        """Raise ValueError for a prompt that the model cannot read."""
        size, given = self.setup.config.vocab_size, np.asarray(prompt)
        if given.ndim != 1 or given.dtype.kind not in "iu":
            raise ValueError(f"a prompt is a list of ids, got {given.dtype} of shape {list(given.shape)}")
        need(len(given) > 0, "the prompt is empty: give at least one id, for example the beginning-of-sequence id")
        if given.min() < 0 or given.max() >= size:
            raise ValueError(f"prompt ids must lie in 0..{size - 1}, got {given.min()}..{given.max()}")

    def prefill(
        self,
        cache: Cache,
        prompts: Sequence[np.ndarray],
        *,
        how: str = "full",
        images: Images | None = None,
    ) -> tuple[Cache, Float[Array, "B D"]]:
        """Append a prompt to each row, in chunks; the hidden state behind each prompt's last token, for `logits`.

        "full" runs every layer on every token. "replay" runs the upper half on the last W tokens alone, about half the
        work: exact for prompts of up to W tokens, approximate beyond. With images the prompts are one chunk, and an
        image starts at an index of its own row's prompt. Raises ValueError for bad ids, image ids that are not the
        spans of images, another number of prompts than rows, or a model without "replay".
        """
        rows = cache.length.shape[0]
        need(len(prompts) == rows, f"{len(prompts)} prompts for a cache of {rows} rows")
        for prompt in prompts:
            self.check(prompt)
        pixels.check_spans(prompts, images, self.setup.config)
        need(how in PREFILLS, f"prefill is 'full' or 'replay', got {how!r}")
        longest = max(map(len, prompts))
        size = 1 << (longest - 1).bit_length()
        size = size if images is not None else min(size, self.chunk)
        lengths = np.array([len(prompt) for prompt in prompts], np.int32)
        cache = self.room(cache, int(np.max(np.asarray(cache.length) + lengths)))
        tokens = np.zeros((rows, -(-longest // size) * size), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        end = no_end(self.setup, rows) if how == "replay" else None
        last = jnp.zeros((rows, self.setup.config.hidden_size), jnp.dtype(self.setup.compute.dtype))
        for start in range(0, longest, size):
            now, count = tokens[:, start : start + size], np.clip(lengths - start, 0, size).astype(np.int32)
            if end is None:
                cache, last = self._extend(self.w, cache, now, count, last, images)
            else:
                cache, end = self._encode(self.w, cache, now, count, end, images)
        return (cache, last) if end is None else self._replay(self.w, cache, end)

    def step(self, cache: Cache, tokens: Any, count: Any) -> tuple[Cache, Array]:
        """Append one of `tokens` [B] to each row whose `count` [B] is 1, not 0; float32 logits [B, V] behind it."""
        return self._step(self.w, cache, tokens, count)

    def first(self, cache: Cache, y: Float[Array, "B D"], settings: Settings) -> Drawn:
        """The token behind each row's prompt, drawn from what `prefill` returned."""
        return self._first(self.w, y, settings, cache.length)

    def draw(self, cache: Cache, tokens: Any, count: Any, settings: Settings) -> tuple[Cache, Drawn]:
        """`step`, and the token behind it drawn for each row: one program, nothing of which the host needs to see."""
        return self._draw(self.w, cache, tokens, count, settings)

    def logits(self, y: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """What the head makes of hidden states, float32."""
        return self._logits(self.w, y)

    def _run_logits(self, w: Weights, y: Array) -> Array:
        return model.logits(model.whole(self.setup, w, "head"), y)

    def _run_extend(
        self, w: Weights, cache: Cache, tokens: Array, count: Array, last: Array, images: Any
    ) -> tuple[Cache, Array]:
        cache, y = proceed(self.setup, w, cache, tokens, count, classes=self.classes, images=images)
        return cache, jnp.where((count > 0)[:, None], newest(y, count), last)

    def _run_first(self, w: Weights, y: Array, settings: Settings, position: Array) -> Drawn:
        return _drawn(self._run_logits(w, y), settings, position)

    def _run_draw(
        self, w: Weights, cache: Cache, tokens: Array, count: Array, settings: Settings
    ) -> tuple[Cache, Drawn]:
        cache, logits = step(self.setup, w, cache, tokens, count, classes=self.classes)
        return cache, _drawn(logits, settings, cache.length)

    def _run_encode(
        self, w: Weights, cache: Cache, tokens: Array, count: Array, end: End, images: Any
    ) -> tuple[Cache, End]:
        return encode(self.setup, w, cache, tokens, count, end, classes=self.classes, images=images)

    def _run_replay(self, w: Weights, cache: Cache, end: End) -> tuple[Cache, Array]:
        cache, y = replay(self.setup, w, cache, end)
        return cache, newest(y, jnp.minimum(end.total, self.setup.config.sliding_window))


def _drawn(logits: Float[Array, "B V"], settings: Settings, position: Int[Array, " B"]) -> Drawn:
    logp, key = sampling.distribution(logits, settings), sampling.at(settings, position, sampling.PLAIN)
    ids = sampling.draw(logp, key)
    return ids, sampling.log_probability(logits, ids)


def _behind(count: Array, write: Callable[[Cache], Cache], cache: Cache, made: Any) -> tuple[Cache, Any]:
    """Write to a cache when all that is made by reading it is there: then a compiler writes in place, not to a copy.

    A loop of one turn says so to all of them, if it seems to change `made`, too. XLA's CPU compiler moves writes over
    an optimization barrier.
    """
    turns = jnp.any(count > 0).astype(jnp.int32)

    def turn(i: Array, at: tuple[Cache, Any]) -> tuple[Cache, Any]:
        return write(at[0]), jax.tree.map(lambda a: jnp.where(i < turns, a, jnp.zeros_like(a)), at[1])

    written: tuple[Cache, Any] = jax.lax.fori_loop(0, turns, turn, (cache, made))
    return written


def _classes(tokens: Array, classes: np.ndarray | None) -> Array:
    return tokens if classes is None else jnp.asarray(classes, jnp.int32)[tokens]


def _pad_class(c: Config, classes: np.ndarray | None) -> int:
    return c.engram_pad_token_id if classes is None else int(classes[c.engram_pad_token_id])


def _image(c: Config, tokens: Array) -> Array | None:
    return None if c.vision is None else tokens == c.image_token_id


def _with_history(c: Config, cache: Cache, made: Made, tokens: Array, classes: np.ndarray | None) -> Made:
    if not c.engram_layer_ids:
        return made
    line = engram.line(_classes(tokens, classes), engram.layout(c), _image(c, tokens), cache.history)
    return replace(made, line=line)


def _with_draft(setup: Setup, w: Weights, cache: Cache, made: Made, taps: Any, positions: Array, count: Array) -> Made:
    """With the draft stages' ring entries of the piece's last W tokens."""
    if cache.draft is None:
        return made
    if not cache.short(positions.shape[1]):
        positions = caches.recent(positions, count, cache.ring)
        taps = jax.vmap(lambda a: caches.recent(a, count, cache.ring))(taps)
    return replace(made, draft=cache.forms.window.pack(draft.main_keys(setup, w, taps, positions)))
