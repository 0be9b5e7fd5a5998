"""Window and selected-slot attention with one key/value head and a sink (architecture section 5).

`attend` is query-chunked and writes its own backward pass; `attend_dense` is the plain oracle with the same signature.
Private functions work on one row of the batch, letters t h d for queries, heads and head width, and take keys either
common to the queries of a chunk, [k, d], or gathered for each query, [t, k, d].
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dsflash_jax.config import Config
from dsflash_jax.ops import Rounding, exact, linear, rms_norm
from dsflash_jax.parallel import ONE, Parallel, combine
from dsflash_jax.params import Weight, Weights, constant, norm, normal

Sizes = tuple[int, int]  # window, chunk
Keys = list[tuple[Array, Array]]  # (keys, bool [t, k]: which of them each query attends); window, then selected
SCOPES = (jax.named_scope("window"), jax.named_scope("selected"))
Past = tuple[Array, Array] | None  # window KV [B, window - 1, Dh] and segments of the tokens before row 0


@runtime_checkable
class Rows(Protocol):
    """Selected KV that is not one array: slots of a cache. Batch axes come first, as of an array."""

    def rows(self, ids: Int[Array, "T K"]) -> Float[Array, "T K D"]:
        """The slots of one row by number; an absent one (-1) gives some slot."""


def weights(c: Config) -> dict[str, Weight]:
    """Query, window KV and grouped output projections and the sinks; every layer has its own."""
    init = normal(c.initializer_range)
    width = c.num_attention_heads // c.o_groups * c.head_dim
    return {
        "wq_a": Weight((c.hidden_size, c.q_lora_rank), ("embed", "q_latent"), init),
        "q_norm": norm(c.q_lora_rank, "q_latent"),
        "wq_b": Weight(
            (c.q_lora_rank, c.num_attention_heads, c.head_dim), ("q_latent", "heads", "head_dim"), init, matrix=(0, 2)
        ),
        "wkv": Weight((c.hidden_size, c.head_dim), ("embed", "kv_latent"), init),
        "kv_norm": norm(c.head_dim, "kv_latent"),
        "attn_sink": Weight((c.num_attention_heads,), ("heads",), constant(0.0), "scalar", float32=True, bare=True),
        "wo_a": Weight((c.o_groups, width, c.o_lora_rank), ("groups", "group_in", "o_latent"), init, matrix=(1, 2)),
        "wo_b": Weight((c.o_groups * c.o_lora_rank, c.hidden_size), ("group_latent", "embed"), init),
    }


def query_latent(w: Weights, u: Float[Array, "B T D"], c: Config, rounding: Rounding = exact) -> Float[Array, "B T Dq"]:
    """The normalised low-rank query, read by the main queries and by the indexer's."""
    with jax.named_scope("projections"):
        return rms_norm(linear(rounding(u), w["wq_a"]), w["q_norm"], c.rms_norm_eps)


def queries(w: Weights, latent: Float[Array, "B T Dq"], rounding: Rounding = exact) -> Float[Array, "B T H Dh"]:
    """Queries before rotation; there is no norm per head."""
    with jax.named_scope("projections"):
        return linear(rounding(latent), w["wq_b"])


def window_kv(w: Weights, u: Float[Array, "B T D"], c: Config, rounding: Rounding = exact) -> Float[Array, "B T Dh"]:
    """The layer's own key, which is also its value, before rotation."""
    with jax.named_scope("projections"):
        return rms_norm(linear(rounding(u), w["wkv"]), w["kv_norm"], c.rms_norm_eps)


def output(
    w: Weights, o: Float[Array, "B T H Dh"], rounding: Rounding = exact, p: Parallel = ONE
) -> Float[Array, "B T D"]:
    """Groups of consecutive heads, each through its own low-rank map, then one map to the model width.

    The input of `wo_a` is never rounded, although a checkpoint stores that weight in FP8 (architecture section 3).
    """
    b, t = o.shape[:2]
    with jax.named_scope("projections"):
        # The batch axis leads both operands: XLA's CPU back end has no bfloat16 product for it in the middle.
        grouped = jnp.moveaxis(o.reshape(b, t, w["wo_a"].shape[0], -1), 2, 0)  # [G, B, T, in]
        low = jnp.einsum("gbti,gio->gbto", grouped, w["wo_a"], preferred_element_type=jnp.float32).astype(o.dtype)
        low = jnp.moveaxis(low, 0, 2).reshape(b, t, -1)  # [B, T, G * Do]
        return combine(p, linear(rounding(low), w["wo_b"]))


def attend(
    q: Float[Array, "B T H Dh"],
    window_kv: Float[Array, "B T Dh"],
    kv: Float[Array, "B S Dh"] | Rows | None,
    topk: Int[Array, "B T K"] | None,
    sink: Float[Array, " H"],
    segments: Int[Array, "B T"],
    *,
    window: int,
    chunk: int,
    past: Past = None,
) -> tuple[Float[Array, "B T H Dh"], Float[Array, "B T H"]]:
    """One softmax over a sliding window and the selected slots: o = sum_k p_k v_k, v = k.

    p_k = exp(q . k Dh^-0.5) / (exp(sink) + sum_j exp(q . j Dh^-0.5)). The query at row i attends window keys j with
    i - window < j <= i in its own segment (0 is padding and attends none), and the row slots in `topk` (-1 = absent,
    no slot twice). A query with nothing to attend gives 0. `kv` and `topk` are None in window-only layers. `past` is
    given where the row goes on from tokens that lie elsewhere; without it nothing stands before row 0. `kv` may be
    slots of a cache; those have no gradient.

    Returns o in q's dtype and lse = log of the whole denominator, sink included, float32. lse is a constant to
    differentiation: its cotangent is ignored. q and both kv share one dtype; logits, softmax and sums are float32,
    probabilities meet the values in the values' dtype.

    Cost a chunk: window logits against chunk + window - 1 keys and `topk` rows gathered for `chunk` queries. The
    backward pass keeps only inputs, o and lse, and adds into one float32 gradient of each kv. Any T, chunk and window
    of at least 1 work. Source: architecture section 5; training section 4.3.
    """
    if topk is not None and topk.shape[-1] == 0:  # a row shorter than one slot
        kv = topk = None
    window = window if past else min(window, q.shape[1])
    near, near_segments = _behind(past, window_kv, segments, window)
    row = partial(_attend, (window, min(chunk, q.shape[1])))
    return jax.vmap(row, in_axes=(0, 0, 0, 0, None, 0))(q, near, kv, topk, sink, near_segments)


def attend_dense(
    q: Float[Array, "B T H Dh"],
    window_kv: Float[Array, "B T Dh"],
    kv: Float[Array, "B S Dh"] | None,
    topk: Int[Array, "B T K"] | None,
    sink: Float[Array, " H"],
    segments: Int[Array, "B T"],
    *,
    window: int,
    chunk: int,
    past: Past = None,
) -> tuple[Float[Array, "B T H Dh"], Float[Array, "B T H"]]:
    """The oracle of `attend`: T x (T + S) logits and masks, plain differentiation; `chunk` changes nothing."""
    del chunk
    keys, key_segments = _behind(past, window_kv, segments, window)
    i, j = jnp.arange(q.shape[1])[None, :, None], jnp.arange(keys.shape[1])[None, None, :]
    near = (i <= j) & (j < i + window)  # key j is token j - (window - 1)
    near &= (segments[:, :, None] == key_segments[:, None, :]) & (segments > 0)[:, :, None]
    mask = near
    if kv is not None and topk is not None:
        keys = jnp.concatenate([keys, kv], axis=1)
        mask = jnp.concatenate([near, jax.vmap(partial(mark, length=kv.shape[1]))(topk)], axis=-1)
    return attend_masked(q, keys, mask, sink)


def _behind(past: Past, kv: Array, segments: Array, window: int) -> tuple[Array, Array]:
    """Window KV and segments with the window - 1 tokens before row 0 in front; without a past, nothing (segment 0)."""
    pad = lambda x: jnp.pad(x, [(0, 0), (window - 1, 0)] + [(0, 0)] * (x.ndim - 2))  # noqa: E731
    join = lambda a, b: jnp.concatenate([a, b], axis=1)  # noqa: E731
    return (pad(kv), pad(segments)) if past is None else (join(past[0], kv), join(past[1], segments))


def attend_masked(
    q: Float[Array, "B T H Dh"], keys: Float[Array, "B K Dh"], mask: Bool[Array, "B T K"], sink: Float[Array, " H"]
) -> tuple[Float[Array, "B T H Dh"], Float[Array, "B T H"]]:
    """The softmax of `attend` over the keys that the mask names, by B x T x H x K logits; o and lse as there."""
    logits = jax.vmap(dot)(q, keys) * q.shape[-1] ** -0.5
    logits = jnp.where(mask[:, :, None, :], logits, -jnp.inf)  # [B, T, H, K]
    sinks = jnp.broadcast_to(sink.astype(jnp.float32)[:, None], (*logits.shape[:-1], 1))
    logits = jnp.concatenate([sinks, logits], axis=-1)
    p = jax.nn.softmax(logits, axis=-1)[..., 1:]
    o = jax.vmap(_mix)(p, keys).astype(q.dtype)
    return o, jax.lax.stop_gradient(jax.nn.logsumexp(logits, axis=-1))


def chunks(x: Array, size: int) -> Array:
    """[T, ...] cut into [n, size, ...]; zeros fill up the last chunk."""
    count = -(-x.shape[0] // size)
    x = jnp.pad(x, [(0, count * size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(count, size, *x.shape[1:])


def unchunk(x: Array, length: int) -> Array:
    """The first `length` entries of what `chunks` cut."""
    return x.reshape(-1, *x.shape[2:])[:length]


def dot(q: Float[Array, "T H Dh"], keys: Float[Array, "*T K Dh"]) -> Float[Array, "T H K"]:
    """q . k for keys common to the queries, or gathered for each; float32."""
    return jnp.einsum("thd,kd->thk" if keys.ndim == 2 else "thd,tkd->thk", q, keys, preferred_element_type=jnp.float32)


def gather(x: Float[Array, "S D"] | Rows, ids: Int[Array, "T K"]) -> Float[Array, "T K D"]:
    """Rows of x; an absent id (-1) gives some row, which the caller masks."""
    if isinstance(x, Rows):
        return x.rows(ids)
    return x.at[jnp.maximum(ids, 0)].get(mode="clip")


def scatter_add(x: Float[Array, "S D"], ids: Int[Array, "T K"], rows: Float[Array, "T K D"]) -> Float[Array, "S D"]:
    """x plus each row at its id, in x's dtype; absent ids (-1) add nothing."""
    return x.at[jnp.where(ids < 0, x.shape[0], ids)].add(rows.astype(x.dtype), mode="drop")


def mark(ids: Int[Array, "T K"], length: int) -> Bool[Array, "T {length}"]:
    """Which of 0 .. length - 1 each query lists; -1 lists none."""
    queries = jnp.arange(ids.shape[0])[:, None]
    ids = jnp.where(ids < 0, length, ids)
    return jnp.zeros((ids.shape[0], length), bool).at[queries, ids].set(True, mode="drop")


def _mix(p: Array, keys: Array) -> Array:
    """sum_k p_k keys_k, [t, h, d] float32."""
    spec = "thk,kd->thd" if keys.ndim == 2 else "thk,tkd->thd"
    return jnp.einsum(spec, p.astype(keys.dtype), keys, preferred_element_type=jnp.float32)


def _spread(p: Array, x: Array, keys: Array) -> Array:
    """The transpose of `_mix`: sum over heads (and over queries for common keys) of p x, keys' shape, float32."""
    spec = "thk,thd->kd" if keys.ndim == 2 else "thk,thd->tkd"
    return jnp.einsum(spec, p.astype(x.dtype), x, preferred_element_type=jnp.float32)


def _filled(x: Array, window: int, chunk: int) -> Array:
    """Keys [window - 1 + T, ...] with zero rows (segment 0) for the queries that the last chunk lacks."""
    return jnp.pad(x, [(0, -(x.shape[0] - window + 1) % chunk)] + [(0, 0)] * (x.ndim - 1))


def _keys(near: Array, near_segments: Array, kv: Any, start: Array, topk: Any, sizes: Sizes) -> Keys:
    """What the chunk of queries at row `start` attends: a slice of the window keys, and its selected rows."""
    window, chunk = sizes
    with jax.named_scope("window"):
        reach = chunk + window - 1  # query i of the chunk is entry i + window - 1, its oldest key entry i
        segments = jax.lax.dynamic_slice_in_dim(near_segments, start, reach)
        own = segments[window - 1 :, None]
        i, j = jnp.arange(chunk)[:, None], jnp.arange(reach)[None, :]
        mask = (i <= j) & (j < i + window) & (segments[None, :] == own) & (own > 0)
        keys = [(jax.lax.dynamic_slice_in_dim(near, start, reach), mask)]
    if kv is not None:
        with jax.named_scope("selected"):
            keys.append((gather(kv, topk), topk >= 0))
    return keys


def _logits(q: Array, keys: Array, mask: Array) -> Array:
    """Scaled logits [t, h, k], -inf where the mask says no."""
    return jnp.where(mask[:, None, :], dot(q, keys) * q.shape[-1] ** -0.5, -jnp.inf)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    sizes: Sizes, q: Array, near: Array, kv: Array | Rows | None, topk: Array | None, sink: Array, near_segments: Array
) -> tuple[Array, Array]:
    """`attend` of one row; `near` and its segments start window - 1 tokens before the first query."""
    near, near_segments = _filled(near, *sizes), _filled(near_segments, *sizes)
    sink = sink.astype(jnp.float32)[None, :]

    def step(x: tuple[Array, Array, Array | None]) -> tuple[Array, Array]:
        start, q, topk = x
        keys = _keys(near, near_segments, kv, start, topk, sizes)
        logits = [scope(_logits)(q, k, mask) for scope, (k, mask) in zip(SCOPES, keys, strict=False)]
        top = reduce(jnp.maximum, [x.max(axis=-1) for x in logits], sink)  # finite, for the sink is
        weights = [jnp.exp(x - top[..., None]) for x in logits]
        total = sum((p.sum(axis=-1) for p in weights), jnp.exp(sink - top))
        o = sum(scope(_mix)(p, k) for scope, p, (k, _) in zip(SCOPES, weights, keys, strict=False)) / total[..., None]
        return o.astype(q.dtype), top + jnp.log(total)

    with jax.named_scope("attend"):
        o, lse = jax.lax.map(step, _per_chunk(sizes[1], q, topk))
    return unchunk(o, len(q)), unchunk(lse, len(q))


def _per_chunk(chunk: int, *arrays: Array | None) -> tuple[Any, ...]:
    """Chunks of the arrays behind the row at which each chunk starts. Rows that fill up the last one select slot 0;
    their output is cut off and their cotangent is 0."""
    cut = jax.tree.map(lambda x: chunks(x, chunk), arrays)
    return (jnp.arange(len(cut[0]), dtype=jnp.int32) * chunk, *cut)


def _attend_forward(sizes: Sizes, *inputs: Any) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    o, lse = _attend(sizes, *inputs)
    return (o, lse), (*inputs, o, lse)


def _attend_backward(sizes: Sizes, saved: tuple[Any, ...], cotangents: tuple[Array, Array]) -> tuple[Array | None, ...]:
    """dz = p (do . v - do . o), dq = sum dz k, dk = sum dz q + p do, dsink = -p_sink do . o; p again from lse."""
    q, window_kv, kv, topk, sink, segments, o, lse = saved
    chunk = sizes[1]
    d_o = cotangents[0]  # that of lse is dropped: lse is a constant
    near, near_segments = _filled(window_kv, *sizes), _filled(segments, *sizes)
    delta = jnp.sum(o.astype(jnp.float32) * d_o.astype(jnp.float32), axis=-1)  # [T, H]
    d_sink = -jnp.sum(jnp.exp(sink.astype(jnp.float32)[None, :] - lse) * delta, axis=0)

    def step(d_kv: tuple[Array, Any], x: tuple[Any, ...]) -> tuple[tuple[Array, Any], Array]:
        start, q, topk, d_o, delta, lse = x
        d_q, d_keys = jnp.zeros_like(q, dtype=jnp.float32), []
        for keys, mask in _keys(near, near_segments, kv, start, topk, sizes):
            p = jnp.exp(_logits(q, keys, mask) - lse[..., None])
            d_logits = p * (dot(d_o, keys) - delta[..., None]) * q.shape[-1] ** -0.5
            d_q += _mix(d_logits, keys)
            d_keys.append(_spread(d_logits, q, keys) + _spread(p, d_o, keys))
        d_near, d_slots = d_kv
        reached = jax.lax.dynamic_slice_in_dim(d_near, start, len(d_keys[0]))
        d_near = jax.lax.dynamic_update_slice_in_dim(d_near, reached + d_keys[0], start, axis=0)
        if d_slots is not None:
            d_slots = scatter_add(d_slots, topk, d_keys[1])
        return (d_near, d_slots), d_q.astype(q.dtype)

    with jax.named_scope("attend_backward"):
        zeros = jax.tree.map(partial(jnp.zeros_like, dtype=jnp.float32), (near, kv))
        (d_near, d_slots), d_q = jax.lax.scan(step, zeros, _per_chunk(chunk, q, topk, d_o, delta, lse))
    d_window_kv = d_near[: len(window_kv)].astype(window_kv.dtype)
    d_slots = None if kv is None else d_slots.astype(kv.dtype)
    return unchunk(d_q, len(q)), d_window_kv, d_slots, None, d_sink.astype(sink.dtype), None


_attend.defvjp(_attend_forward, _attend_backward)
