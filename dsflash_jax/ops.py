"""Small shared maths."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

HIGHEST = jax.lax.Precision.HIGHEST
RANKED = 1024  # ids whose one-hot rows exist at once in `ranks`
Rounding = Callable[[Array], Array]  # what happens to a value before it is stored or enters a product


def exact(x: Array) -> Array:
    """The rounding that changes nothing."""
    return x


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """x * rsqrt(mean(x^2) + eps) * weight in float32, cast back. An all-zero row stays zero: rsqrt(1e-20) is 1e10."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight = weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return (x32 * scale * weight).astype(x.dtype)


def linear(x: Float[Array, "*B I"], w: Float[Array, "I *O"]) -> Float[Array, "..."]:
    """x w over one axis, accumulated in float32 and cast to x's dtype. Several output axes stay apart."""
    return contract(x, w).astype(x.dtype)


def linear32(x: Float[Array, "*B I"], w: Float[Array, "I *O"]) -> Float[Array, "..."]:
    """x w with float32 operands at the highest precision: a TPU or GPU would otherwise round them (float32 result)."""
    return contract(x.astype(jnp.float32), w.astype(jnp.float32), HIGHEST)


def contract(x: Array, w: Array, precision: jax.lax.Precision | None = None) -> Array:
    """Contract the last axis of x with the first of w; float32 result."""
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, w, dims, precision=precision, preferred_element_type=jnp.float32)


def swiglu(gate: Float[Array, "*B F"], up: Float[Array, "*B F"], limit: float) -> Float[Array, "*B F"]:
    """silu(gate) * up in float32, gate clipped above and up on both sides at `limit`; 0 or less clips nothing."""
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up


def ranks(ids: Int[Array, " R"], groups: int) -> tuple[Int[Array, " R"], Int[Array, " groups"]]:
    """How many earlier rows have the id of each row, and how many rows each of the ids 0 .. groups - 1 has.

    Counting, where few ids meet many rows: a TPU's compiler takes five seconds for every sort. An id outside the range
    has rank 0.
    """
    size = min(RANKED, max(len(ids), 1))
    tiles = jnp.pad(ids, (0, -len(ids) % size), constant_values=groups).reshape(-1, size)

    def tile(before: Array, ids: Array) -> tuple[Array, Array]:
        own = (ids[:, None] == jnp.arange(groups, dtype=ids.dtype)[None]).astype(jnp.int32)
        upto = jnp.cumsum(own, axis=0) + before[None]
        return upto[-1], jnp.sum((upto - own) * own, axis=1)

    counts, rank = jax.lax.scan(tile, jnp.zeros((groups,), jnp.int32), tiles)
    return rank.reshape(-1)[: len(ids)], counts
