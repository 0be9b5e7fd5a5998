"""Hidden states to compressed KV and index keys, and where the slots of a packed row lie.

A slot of ratio r pools the r tokens of one document that start at a document position divisible by r. The group that
starts at row index t lives in row slot t // r: no two groups share one, and a document's slots are consecutive.
Source: architecture sections 6 and 7, training section 1.2.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dsflash_jax.config import Config
from dsflash_jax.modes import LayerSpec, Mode
from dsflash_jax.ops import linear, linear32, rms_norm
from dsflash_jax.parallel import ONE, Parallel, after
from dsflash_jax.params import Weight, Weights, norm, normal


@struct.dataclass
class Slots:
    """Layout of one ratio's slots in packed rows."""

    segments: Any  # int [B, S]: document of a slot, 0 where no group starts
    positions: Any  # int [B, S]: index of the slot inside its document
    shift: Any  # int [B, S]: row index of the group's first token minus slot * ratio
    base: Any  # int [B, T]: row slot of the query's document's slot 0
    visible: Any  # int [B, T]: slots of its document that a query sees: (position + 1) // ratio, 0 for padding


def slots(segments: Int[Array, "B T"], positions: Int[Array, "B T"], ratio: int) -> Slots:
    """Lay out the slots of packed rows; `positions` restart at 0 with each document, segment 0 is padding."""
    b, t = segments.shape
    s = t // ratio
    last = jnp.pad(segments, ((0, 0), (0, ratio - 1)))[:, ratio - 1 :]  # segment of the group's last token
    starts = (segments > 0) & (positions % ratio == 0) & (last == segments)
    starts = starts[:, : s * ratio].reshape(b, s, ratio)
    shift = jnp.argmax(starts, axis=-1).astype(jnp.int32)
    first = jnp.arange(s, dtype=jnp.int32)[None] * ratio + shift
    at = lambda a: jnp.take_along_axis(a, first, axis=1)  # noqa: E731
    exists = starts.any(axis=-1)
    return Slots(
        segments=jnp.where(exists, at(segments), 0),
        positions=jnp.where(exists, at(positions) // ratio, 0),
        shift=shift,
        base=(jnp.arange(t, dtype=jnp.int32)[None] - positions) // ratio,
        visible=jnp.where(segments > 0, (positions + 1) // ratio, 0),
    )


def weights(c: Config, spec: LayerSpec) -> dict[str, Weight]:
    """Compressor weights; only Full layers own them, and only ratios above 1 have a gate."""
    if spec.mode is not Mode.FULL:
        return {}
    kv = Weight((c.hidden_size, c.head_dim), ("embed", "kv_latent"), normal(c.initializer_range))
    gate = {"wgate": kv} if spec.ratio > 1 else {}
    return {"wkv": kv, **gate, "norm": norm(c.head_dim, "kv_latent")}


def compress(
    w: Weights, x: Float[Array, "B T D"], at: Slots, ratio: int, eps: float, p: Parallel = ONE
) -> Float[Array, "B S Dh"]:
    """Pool each slot's tokens into one latent, before rotation: norm(sum_j softmax_j(g_j) * kv_j).

    The softmax is per channel over the tokens of a slot and runs, like both projections, in float32; ratio 1 has no
    gate. S = T // ratio. Tokens of an unfinished group are dropped, never padded into one. Slots of segment 0 hold
    finite values that nobody may read. Cost: 4 B T D Dh FLOPs forward.
    """
    with jax.named_scope("compressor"):
        if ratio == 1:
            return rms_norm(linear(x, w["wkv"]), w["norm"], eps)
        both = _project(w, x)
        both = jnp.concatenate([both, after(p, both, ratio - 1)], axis=1)
        return _pool(w, both, at.shift, ratio, eps, x.dtype)


def go_on(
    w: Weights, x: Float[Array, "B T D"], tail: Float[Array, "B R Dkg"], at: Slots, ratio: int, eps: float
) -> tuple[Float[Array, "B S Dh"], Float[Array, "B T2 Dkg"]]:
    """`compress` for tokens behind others, with slots as `following` lays them out; ratio above 1.

    `tail` holds KV and gate of the ratio - 1 tokens before. The second result is the tail with those of x behind it:
    behind `count` of these tokens the ratio - 1 entries from `count` on are the next tail.
    """
    with jax.named_scope("compressor"):
        both = jnp.concatenate([tail, _project(w, x)], axis=1)
        return _pool(w, both, at.shift, ratio, eps, x.dtype), both


def following(start: Int[Array, " B"], count: Int[Array, " B"], length: int, ratio: int) -> Slots:
    """The slots that `count` of `length` tokens from position `start` on may complete, and what each of them sees.

    Slot numbers are those of the whole sequence: `positions` from start // ratio on, and `base` 0. `shift` counts from
    the first token of a tail of ratio - 1 tokens.
    """
    s = -(-length // ratio)
    number = (start // ratio)[:, None] + jnp.arange(s, dtype=jnp.int32)[None]
    at = jnp.arange(length, dtype=jnp.int32)[None]
    return Slots(
        segments=((number + 1) * ratio <= (start + count)[:, None]).astype(jnp.int32),
        positions=number,
        shift=jnp.broadcast_to((ratio - 1 - start % ratio)[:, None], number.shape),
        base=jnp.zeros((start.shape[0], length), jnp.int32),
        visible=jnp.where(at < count[:, None], (start[:, None] + at + 1) // ratio, 0),
    )


def _project(w: Weights, x: Float[Array, "B T D"]) -> Float[Array, "B T Dkg"]:
    """KV and gate of each token, float32."""
    return jnp.concatenate([linear32(x, w[name]) for name in ("wkv", "wgate")], axis=-1)


def _pool(
    w: Weights, both: Float[Array, "B T2 Dkg"], shift: Int[Array, "B S"], ratio: int, eps: float, dtype: Any
) -> Float[Array, "B S Dh"]:
    """The latent of each slot from KV and gate of its tokens."""
    kv, gate = jnp.split(_groups(both, shift, ratio), 2, axis=-1)  # [B, S, r, Dh]
    return rms_norm(jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2).astype(dtype), w["norm"], eps)


def _groups(x: Float[Array, "B T Dh"], shift: Int[Array, "B S"], ratio: int) -> Float[Array, "B S r Dh"]:
    """The tokens of each slot. A group may start at any token of a slot's place; what is missing behind x is 0."""
    b, t, width = x.shape
    s = shift.shape[1]
    x = jnp.pad(x, ((0, 0), (0, max(s * ratio + ratio - 1 - t, 0)), (0, 0)))
    out = x[:, : s * ratio].reshape(b, s, ratio, width)
    for k in range(1, ratio):
        moved = x[:, k : k + s * ratio].reshape(b, s, ratio, width)
        out = jnp.where((shift == k)[:, :, None, None], moved, out)
    return out
