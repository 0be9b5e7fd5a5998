"""Rotary positions: two regimes of frequencies, adjacent-pair rotation of a vector's last channels.

Source: architecture section 5. Window-only layers turn with theta 10000; compressed layers with theta 160000 and YaRN.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dsflash_jax.config import Config


@struct.dataclass
class Angles:
    """cos and sin of position times frequency, float32 whatever the compute dtype."""

    cos: Any  # float [..., Dr2]
    sin: Any  # float [..., Dr2]


def frequencies(c: Config, compressed: bool) -> np.ndarray:
    """Radians a token of each rotated pair, [Dr/2] float32, computed in float64 on the host."""
    width = c.qk_rope_head_dim
    theta = c.compress_rope_theta if compressed else c.rope_theta
    freq = float(theta) ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    scaling = c.rope_scaling
    if not compressed or scaling.factor == 1:
        return freq.astype(np.float32)

    def turns(rotations: float) -> float:  # channel that makes this many turns over the original length
        return (
            width
            * math.log(scaling.original_max_position_embeddings / (2 * math.pi * rotations))
            / (2 * math.log(theta))
        )

    low, high = max(math.floor(turns(scaling.beta_fast)), 0), min(math.ceil(turns(scaling.beta_slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (freq / scaling.factor * ramp + freq * (1 - ramp)).astype(np.float32)


def angles(freq: np.ndarray, positions: Int[Array, "*B"]) -> Angles:
    """Angles at absolute positions (tokens)."""
    turn = positions.astype(jnp.float32)[..., None] * jnp.asarray(freq).reshape((1,) * positions.ndim + (-1,))
    return Angles(jnp.cos(turn), jnp.sin(turn))


def rotate(x: Float[Array, "*B H Dh"], at: Angles, inverse: bool = False) -> Float[Array, "*B H Dh"]:
    """Turn the adjacent pairs of the last Dr channels of every head by the angles of its position, in float32.

    `inverse` turns back. Other channels pass unchanged. x has one axis more than the angles: the heads.
    """
    width = 2 * at.cos.shape[-1]
    cos, sin = at.cos[..., None, :], at.sin[..., None, :]
    if inverse:
        sin = -sin
    pairs = x[..., -width:].astype(jnp.float32).reshape(*x.shape[:-1], width // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return jnp.concatenate([x[..., :-width], turned.reshape(*x.shape[:-1], width).astype(x.dtype)], axis=-1)


def rotate_single(x: Float[Array, "*B Dh"], at: Angles) -> Float[Array, "*B Dh"]:
    """`rotate` for one vector a position."""
    return rotate(x[..., None, :], at)[..., 0, :]
