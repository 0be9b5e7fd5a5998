"""Selection over the slots of a cache: exact top-k and candidate blocks by one pass over blocks of slots.

The same picks as `indexer.select` makes over whole rows of keys, which is its plain twin. Slots of a block are scored
together and a running top-k is kept; blocks that no row sees are skipped. Source: architecture sections 7, 8 and 13.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsflash_jax.attention import mark
from dsflash_jax.cache import Source
from dsflash_jax.indexer import scores_of

BLOCK = 2048  # slots that are scored together
FEW = 8  # queries of a piece up to which a restricted layer gathers its candidates


def select(
    q: Float[Array, "B T Hi Di"],
    w: Float[Array, "B T Hi"],
    keys: Source,
    visible: Int[Array, "B T"],
    *,
    k: int,
    chunk: int,
    candidates: Int[Array, "B T C"] | None = None,
    block: int = 1,
    publish: int = 0,
    gathered: bool | None = None,
) -> tuple[Int[Array, "B T {k}"], Int[Array, "B T P"] | None]:
    """The k visible slots with the highest scores, and the candidate blocks of a publishing layer.

    As `indexer.select` for rows of one document, with `keys` of a cache and always k columns. A restricted layer
    scores its candidates alone if `gathered`, by default for up to 8 queries, else all slots under a mask.
    Cost: 2 B T S Hi Di FLOPs, with gathered candidates 2 B T C block Hi Di.
    """
    t, publishes, publish = q.shape[1], publish > 0, min(publish, -(-keys.slots // block))
    gathered = t <= FEW if gathered is None else gathered
    if candidates is not None and gathered and not publishes:
        return _among(q, w, keys, visible, k, candidates, block), None
    size = min(chunk, t)
    cut = lambda a: jnp.moveaxis(_pad(a, -t % size).reshape(a.shape[0], -1, size, *a.shape[2:]), 1, 0)  # noqa: E731
    join = lambda a: jnp.concatenate(list(a), axis=1)[:, :t]  # noqa: E731
    queries = Queries(q, w, visible, candidates)
    one = partial(_sweep, keys, k, block, publish)
    if size == t:
        topk, blocks = one(queries)
    else:
        topk, blocks = jax.tree.map(join, jax.lax.map(one, jax.tree.map(cut, queries)))
    return topk, blocks if publishes else None


class Queries(NamedTuple):
    """What a chunk of queries asks with."""

    q: Array  # [B, t, Hi, Di]
    w: Array  # [B, t, Hi]
    visible: Array  # [B, t]
    candidates: Array | None  # [B, t, C]


class Best(NamedTuple):
    """The best columns so far, highest first, and their numbers; -inf where there is none."""

    score: Array  # [B, t, k]
    ids: Array  # [B, t, k]


def block_size(slots: int, block: int) -> int:
    """Slots scored together: a power of two that divides them, or all of them where that is too small."""
    size = math.gcd(slots, BLOCK)
    return slots if size < min(slots, BLOCK // 8) or size % block else size


def _sweep(keys: Source, k: int, block: int, publish: int, at: Queries) -> tuple[Array, Array]:
    """`select` for one chunk of queries by all blocks of slots."""
    b, t = at.visible.shape
    slots = keys.slots
    size = block_size(slots, block)
    blocks = -(-size // block)  # candidate blocks in one; a partial one is the last of all
    total = blocks * (slots // size) if slots else 0
    members = None if at.candidates is None else jax.vmap(partial(mark, length=max(total, 1)))(at.candidates)
    start = Best(jnp.full((b, t, k), -jnp.inf, jnp.float32), jnp.full((b, t, k), -1, jnp.int32))
    none = Best(jnp.full((b, t, publish), -jnp.inf, jnp.float32), jnp.full((b, t, publish), -1, jnp.int32))
    if slots == 0:
        return start.ids, none.ids
    furthest = jnp.max(at.visible)

    def look(j: Array, best: tuple[Best, Best]) -> tuple[Best, Best]:
        top, top_blocks = best
        with jax.named_scope("index_scores"):
            score = jax.vmap(scores_of)(at.q, at.w, jax.vmap(lambda s: s.block(j * size, size))(keys))
        ids = j * size + jnp.arange(size, dtype=jnp.int32)
        score = jnp.where(ids[None, None] < at.visible[..., None], score, -jnp.inf)
        if publish:
            with jax.named_scope("candidate_blocks"):
                top_blocks = _merge(top_blocks, *_block_scores(score, at.visible, j * blocks, block))
        if members is not None:
            own = jax.lax.dynamic_slice_in_dim(members, j * blocks, blocks, axis=2)
            score = jnp.where(jnp.repeat(own, block, axis=-1)[..., :size], score, -jnp.inf)
        with jax.named_scope("topk"):
            return _merge(top, score, ids), top_blocks

    def step(best: tuple[Best, Best], j: Array) -> tuple[tuple[Best, Best], None]:
        return jax.lax.cond(j * size < furthest, look, lambda j, best: best, j, best), None

    count = slots // size
    (top, top_blocks), _ = jax.lax.scan(step, (start, none), jnp.arange(count, dtype=jnp.int32))
    return _listed(top), _listed(top_blocks)


def _among(
    q: Array, w: Array, keys: Source, visible: Array, k: int, candidates: Array, block: int
) -> Int[Array, "B T {k}"]:
    """`select` of a restricted layer by gathering its candidates' keys."""
    inside = jnp.arange(block, dtype=jnp.int32)[None, None, None]
    ids = jnp.where((candidates >= 0)[..., None], candidates[..., None] * block + inside, -1)
    ids = ids.reshape(*candidates.shape[:2], -1)  # [B, T, C * block], ascending
    with jax.named_scope("index_scores"):
        score = jax.vmap(scores_of)(q, w, jax.vmap(Source.rows)(keys, ids))
    score = jnp.where((ids >= 0) & (ids < visible[..., None]), score, -jnp.inf)
    with jax.named_scope("topk"):
        empty = Best(jnp.full((*ids.shape[:2], k), -jnp.inf, jnp.float32), jnp.full((*ids.shape[:2], k), -1, jnp.int32))
        return _listed(_merge(empty, score, ids))


def _block_scores(score: Array, visible: Array, first: Array, block: int) -> tuple[Array, Array]:
    """The highest score of each candidate block, infinite for the one with the newest visible slot; their numbers."""
    score = _pad(score, -score.shape[-1] % block, -jnp.inf, axis=2)
    best = score.reshape(*score.shape[:2], -1, block).max(axis=-1)
    ids = first + jnp.arange(best.shape[-1], dtype=jnp.int32)
    newest = (visible - 1) // block  # -1 when nothing is visible
    return jnp.where(ids[None, None] == newest[..., None], jnp.inf, best), ids


def _merge(best: Best, score: Array, ids: Array) -> Best:
    """The best of what was and of more columns with higher numbers; of equal scores the lower number stays."""
    k = best.ids.shape[-1]
    score = jnp.where(score == 0, 0.0, score)  # top_k puts 0.0 before -0.0, so they would not tie
    ids = ids if ids.ndim == 3 else jnp.broadcast_to(ids[None, None], score.shape)
    score, ids = (jnp.concatenate(pair, axis=-1) for pair in ((best.score, score), (best.ids, ids)))
    score, order = jax.lax.top_k(score, k)
    return Best(score, jnp.take_along_axis(ids, order, axis=-1))


def _listed(best: Best) -> Array:
    """The numbers ascending, then -1 for every pick of score -inf."""
    last = jnp.iinfo(jnp.int32).max
    ids = jnp.sort(jnp.where(best.score == -jnp.inf, last, best.ids), axis=-1)
    return jnp.where(ids == last, -1, ids)


def _pad(x: Array, count: int, value: Any = 0, axis: int = 1) -> Array:
    return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)], constant_values=value)
