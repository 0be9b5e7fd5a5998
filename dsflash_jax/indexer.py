"""The indexer: scores of compressed slots, candidate blocks, top-k and its own loss (architecture 7, 8; training 4).

A row may hold several packed documents. `base` [B, T] is the row slot index of slot 0 of the query's document and
`visible` [B, T] the number of that document's slots the query sees: row slots base .. base + visible - 1. In a row of
one document base is 0 and visible (t + 1) // ratio. Private functions work on one row of the batch, letters t h d for
queries, index heads and index width.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dsflash_jax.attention import chunks, dot, gather, mark, scatter_add, unchunk
from dsflash_jax.config import Config
from dsflash_jax.modes import LayerSpec, Mode
from dsflash_jax.ops import Rounding, contract, exact, linear, rms_norm
from dsflash_jax.parallel import ONE, Parallel, over_heads
from dsflash_jax.params import Weight, Weights, norm, normal
from dsflash_jax.rope import Angles, rotate, rotate_single

KEYS_SETS = ("topk", "topk+random", "dense")
LOWEST = float(jnp.finfo(jnp.float32).min)  # a masked logit whose softmax stays finite when all are masked


def weights(c: Config, spec: LayerSpec) -> dict[str, Weight]:
    """Index queries and head weights of every selecting layer; only Full layers make keys."""
    init = normal(c.initializer_range)
    out = {
        "wq_b": Weight(
            (c.q_lora_rank, c.index_n_heads, c.index_head_dim),
            ("q_latent", "index_heads", "index_dim"),
            init,
            matrix=(0, 2),
        ),
        "weights_proj": Weight((c.hidden_size, c.index_n_heads), ("embed", "index_heads"), init),
    }
    if spec.mode is Mode.FULL:
        out["wk"] = Weight((c.head_dim, c.index_head_dim), ("kv_latent", "index_dim"), init)
        out["k_norm"] = norm(c.index_head_dim, "index_dim")
    return out


def keys(w: Weights, latent: Float[Array, "B S Dh"], at: Angles, c: Config) -> Float[Array, "B S Di"]:
    """Index keys from the un-rotated latent, which takes no gradient from them; rotated at the slot's first token."""
    with jax.named_scope("indexer"):
        k = rms_norm(linear(jax.lax.stop_gradient(latent), w["wk"]), w["k_norm"], c.rms_norm_eps)
        return rotate_single(k, at)


def queries(
    w: Weights,
    latent: Float[Array, "B T Dq"],
    u: Float[Array, "B T D"],
    at: Angles,
    c: Config,
    rounding: Rounding = exact,
) -> tuple[Float[Array, "B T Hi Di"], Float[Array, "B T Hi"]]:
    """Rotated index queries and signed head weights (scale Di^-0.5 Hi^-0.5 included); the inputs take no gradient."""
    latent, u = jax.lax.stop_gradient((latent, u))
    scale = c.index_head_dim**-0.5 * c.index_n_heads**-0.5
    with jax.named_scope("indexer"):
        return rotate(linear(rounding(latent), w["wq_b"]), at), contract(u, w["weights_proj"]) * scale


def scores(
    q: Float[Array, "B T Hi Di"], w: Float[Array, "B T Hi"], keys: Float[Array, "B S Di"]
) -> Float[Array, "B T S"]:
    """I_ts = sum_h w_th relu(q_th . k_s), float32, of every pair. `w` holds its factor Di^-0.5 Hi^-0.5 already."""
    return jax.vmap(scores_of)(q, w, keys)


def select(
    q: Float[Array, "B T Hi Di"],
    w: Float[Array, "B T Hi"],
    keys: Float[Array, "B S Di"],
    base: Int[Array, "B T"],
    visible: Int[Array, "B T"],
    *,
    k: int,
    chunk: int,
    key_chunk: int = 2048,
    candidates: Int[Array, "B T C"] | None = None,
    block: int = 0,
    publish: int = 0,
) -> tuple[Int[Array, "B T K"], Int[Array, "B T P"] | None]:
    """The K = min(k, S) visible slots with the highest scores, and the candidate blocks of a publishing layer.

    Picks are exact, equal scores go to the lower index. They are row slot indices, ascending, absent ones (fewer
    visible slots than K) -1 at the end. `candidates` restricts the scores to these blocks of `block` slots, counted
    from slot 0 of the document, -1 absent. With `publish` > 0 the second result is the `publish` blocks (or as many as
    S slots have) with the highest score in them, the one with the newest visible slot always among them, ascending,
    -1 at the end; it comes from the scores before any restriction. It is None otherwise.

    Both results are constants to differentiation. Scores are made for `chunk` queries and `key_chunk` keys at a time,
    only [chunk, S] sums are whole. Raises ValueError when candidates or publish come without a block size.
    Cost: 2 B T S Hi Di FLOPs. Source: architecture sections 7 and 8.
    """
    if block < 1 and (publish or candidates is not None):
        raise ValueError(f"candidate blocks need a size of at least 1 slot: got block={block}, publish={publish}")
    if keys.shape[1] == 0:  # a row shorter than one slot
        none = jnp.zeros((*base.shape, 0), jnp.int32)
        return none, none if publish else None
    q, w, keys = jax.lax.stop_gradient((q, w, keys))
    row = partial(_select, k, chunk, key_chunk, block, publish)
    return jax.vmap(row)(q, w, keys, base, visible, candidates)


def loss(
    q: Float[Array, "B T Hi Di"],
    w: Float[Array, "B T Hi"],
    keys: Float[Array, "B S Di"],
    query: Float[Array, "B T H Dh"],
    kv: Float[Array, "B S Dh"],
    lse: Float[Array, "B T H"],
    topk: Int[Array, "B T K"],
    base: Int[Array, "B T"],
    visible: Int[Array, "B T"],
    *,
    keys_set: str,
    extra: int,
    rng: Array | None,
    chunk: int,
    p: Parallel = ONE,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum over queries of KL(p || softmax(I)) on the supervised slots, and the number of queries in it, float32.

    Teacher: p_s ~ sum_h exp(z_hs - lse_h), z = query . kv Dh^-0.5, with attention's whole denominator (window,
    selected slots, sink), so a head that looks elsewhere counts less here. Gradients reach q, w and keys alone.
    Supervised are the selected slots ("topk"), these and `extra` uniform draws with replacement from the visible ones,
    each slot counted once ("topk+random", needs `rng`), or all visible ones ("dense"). The latter two add the slots
    that attention did not select to the denominator. Queries that see fewer than 2 slots are left out.

    Cost a chunk: K + extra gathered rows a query; "dense" holds [chunk, H, S] logits and is meant for short rows.
    The backward pass scores again. Raises ValueError for an unknown set and for random draws without a key.
    Source: training sections 4.2 and 4.3.
    """
    if keys_set not in KEYS_SETS:
        raise ValueError(f"keys_set must be one of {KEYS_SETS}, got {keys_set!r}")
    draws = None
    if keys_set == "topk+random":
        if rng is None:
            raise ValueError("keys_set='topk+random' draws slots and needs a random key: pass rng, or use 'topk'")
        draws = jax.random.randint(rng, (*base.shape, extra), 0, jnp.maximum(visible, 1)[..., None], jnp.int32)
        draws += base[..., None]
    if keys.shape[1] == 0:
        return jnp.float32(0), jnp.float32(0)
    kv, attention = jax.lax.stop_gradient((kv, Attention(query, lse, topk, draws, base, visible)))
    row = partial(_divergence, (keys_set == "dense", min(chunk, q.shape[1]), p))
    return jnp.sum(jax.vmap(row)(q, w, keys, kv, attention)), jnp.sum(visible > 1, dtype=jnp.float32)


def scores_of(q: Array, w: Array, keys: Array) -> Array:
    """I [t, s] of one row, for keys common to the queries, [s, d], or gathered for each, [t, s, d].

    The weighted sum over heads is not a matrix product: a TPU or GPU would round its float32 operands.
    """
    return jnp.sum(w.astype(jnp.float32)[:, :, None] * jax.nn.relu(dot(q, keys)), axis=1)


def _seen(base: Array, visible: Array, slots: int) -> Array:
    """Which row slots each query sees, [t, s]."""
    slot = jnp.arange(slots, dtype=jnp.int32)[None, :]
    return (slot >= base[:, None]) & (slot < (base + visible)[:, None])


def _select(
    k: int,
    chunk: int,
    key_chunk: int,
    block: int,
    publish: int,
    q: Array,
    w: Array,
    keys: Array,
    base: Array,
    visible: Array,
    candidates: Array | None,
) -> tuple[Array, Array | None]:
    """`select` of one row."""
    slots, size = len(keys), min(chunk, len(q))
    tiles = chunks(keys, min(key_chunk, slots))

    def step(x: tuple[Any, ...]) -> tuple[Array, Array | None]:
        q, w, base, visible, candidates = x
        with jax.named_scope("index_scores"):
            score = jnp.moveaxis(jax.lax.map(lambda tile: scores_of(q, w, tile), tiles), 0, 1)  # [t, tiles, key_chunk]
            # Masks need no score, so XLA would make those of all chunks before the loop: T x S of them.
            score, base, visible = jax.lax.optimization_barrier((score, base, visible))
            score = jnp.where(_seen(base, visible, slots), score.reshape(size, -1)[:, :slots], -jnp.inf)
        with jax.named_scope("candidate_blocks"):
            blocks = _best_blocks(score, base, visible, block, publish) if publish else None
            if candidates is not None:
                score = jnp.where(_inside(candidates, base, block, slots), score, -jnp.inf)
        with jax.named_scope("topk"):
            return _top(score, k), blocks

    # Queries that fill up the last chunk see 0 slots.
    topk, blocks = jax.lax.map(step, jax.tree.map(partial(chunks, size=size), (q, w, base, visible, candidates)))
    return unchunk(topk, len(q)), unchunk(blocks, len(q)) if publish else None


def _top(score: Array, k: int) -> Array:
    """The k best columns of each query, ascending, then -1 for every pick of score -inf."""
    width = score.shape[-1]
    score = jnp.where(score == 0, 0.0, score)  # top_k puts 0.0 before -0.0, so they would not tie
    best, ids = jax.lax.top_k(score, min(k, width))
    ids = jnp.sort(jnp.where(best == -jnp.inf, width, ids), axis=-1)
    return jnp.where(ids == width, -1, ids)


def _best_blocks(score: Array, base: Array, visible: Array, block: int, count: int) -> Array:
    """Ids of the `count` best blocks of each query's document, the newest visible one forced in."""
    total = -(-score.shape[-1] // block)
    score = jnp.pad(score, ((0, 0), (0, total * block)), constant_values=-jnp.inf)
    best = _slices(score, base, total * block).reshape(len(score), total, block).max(axis=-1)
    newest = (visible - 1) // block  # -1 when nothing is visible
    best = jnp.where(jnp.arange(total, dtype=jnp.int32)[None, :] == newest[:, None], jnp.inf, best)
    return _top(best, count)


def _inside(candidates: Array, base: Array, block: int, slots: int) -> Array:
    """Which row slots lie in a candidate block of each query's document, [t, s]."""
    member = jnp.repeat(mark(candidates, -(-slots // block)), block, axis=-1)  # by slot of the document
    return _slices(jnp.pad(member, ((0, 0), (slots, 0))), slots - base, slots)


def _slices(x: Array, start: Array, length: int) -> Array:
    """x[t, start_t : start_t + length] of each query."""
    return jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=length))(x, start)


class Attention(NamedTuple):
    """What attention did with one row or chunk, constants of the loss."""

    query: Array  # [T, H, Dh]
    lse: Array  # [T, H]
    topk: Array  # [T, K]
    draws: Array | None  # [T, extra] row slots
    base: Array  # [T]
    visible: Array  # [T]


class Target(NamedTuple):
    """What the student of one chunk should say."""

    log_p: Array  # [t, k] float32, on the supervised slots
    mask: Array  # [t, k] bool: which slots are supervised; none for queries that are left out
    ids: Any  # [t, k] row slots, None when they are all slots of the row


def _target(a: Attention, kv: Array, dense: bool, p: Parallel) -> Target:
    """The teacher on the supervised slots of one chunk."""
    if dense:
        ids, rows, mask, selected = None, kv, _seen(a.base, a.visible, len(kv)), mark(a.topk, len(kv))
    else:
        ids, mask = a.topk, a.topk >= 0
        if a.draws is not None:
            ids = jnp.concatenate([a.topk, a.draws], axis=-1)
            mask = jnp.concatenate([mask, _new(a.topk, a.draws)], axis=-1)
        rows = gather(kv, ids)
        selected = jnp.broadcast_to(jnp.arange(ids.shape[-1])[None, :] < a.topk.shape[-1], ids.shape)
    z = dot(a.query, rows) * a.query.shape[-1] ** -0.5  # [t, h, k]
    lse = a.lse
    if dense or a.draws is not None:
        unselected = jnp.where((mask & ~selected)[:, None, :], z, -jnp.inf)
        lse = jnp.logaddexp(lse, jax.nn.logsumexp(unselected, axis=-1))
    log_p = over_heads(p, jax.nn.logsumexp(z - lse[..., None], axis=1))
    mask &= (a.visible > 1)[:, None]
    return Target(jax.nn.log_softmax(jnp.where(mask, log_p, LOWEST), axis=-1), mask, ids)


def _new(topk: Array, draws: Array) -> Array:
    """Which draws name a slot that neither `topk` nor an earlier draw names, [t, extra]."""
    listed = jnp.concatenate([topk, draws], axis=-1)
    place = jnp.arange(listed.shape[-1])
    earlier = place[None, None, :] < place[topk.shape[-1] :][None, :, None]
    return ~jnp.any((listed[:, None, :] == draws[:, :, None]) & earlier, axis=-1)


def _student(q: Array, w: Array, keys: Array, target: Target) -> Array:
    """Sum of KL(p || softmax(I)) over the queries of one chunk."""
    log_q = jax.nn.log_softmax(jnp.where(target.mask, scores_of(q, w, keys), LOWEST), axis=-1)
    difference = jnp.where(target.mask, target.log_p - log_q, 0.0)
    return jnp.sum(jnp.exp(target.log_p) * difference)


Static = tuple[bool, int, Parallel]  # whether all visible slots are supervised, queries a chunk, devices


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _divergence(static: Static, q: Array, w: Array, keys: Array, kv: Array, attention: Attention) -> Array:
    """Sum of `_student` over the chunks of one row."""
    dense, chunk, p = static

    def step(x: tuple[Array, Array, Attention]) -> Array:
        q, w, a = x
        target = _target(a, kv, dense, p)
        return _student(q, w, keys if dense else gather(keys, target.ids), target)

    with jax.named_scope("indexer_loss"):
        return jnp.sum(jax.lax.map(step, jax.tree.map(partial(chunks, size=chunk), (q, w, attention))))


def _divergence_forward(static: Static, *inputs: Array | Attention) -> tuple[Array, tuple]:
    return _divergence(static, *inputs), inputs


def _divergence_backward(static: Static, saved: tuple, cotangent: Array) -> tuple[Array | None, ...]:
    """Chunk by chunk, so that the key gradient is added into one array: autodiff would make a zero one a chunk."""
    q, w, keys, kv, attention = saved
    dense, chunk, p = static

    def step(d_keys: Array, x: tuple[Array, Array, Attention]) -> tuple[Array, tuple[Array, Array]]:
        q, w, a = x
        target = _target(a, kv, dense, p)
        own = keys if dense else gather(keys, target.ids)
        _, pull = jax.vjp(partial(_student, target=target), q, w, own)
        d_q, d_w, d_own = pull(cotangent)
        d_keys = d_keys + d_own.astype(jnp.float32) if dense else scatter_add(d_keys, target.ids, d_own)
        return d_keys, (d_q, d_w)

    with jax.named_scope("indexer_loss_backward"):
        zeros = jnp.zeros_like(keys, dtype=jnp.float32)
        per_chunk = jax.tree.map(partial(chunks, size=chunk), (q, w, attention))
        d_keys, (d_q, d_w) = jax.lax.scan(step, zeros, per_chunk)
    return unchunk(d_q, len(q)), unchunk(d_w, len(w)), d_keys.astype(keys.dtype), None, None


_divergence.defvjp(_divergence_forward, _divergence_backward)
