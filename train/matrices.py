"""The unit matrices of a stored weight, as the optimiser sees them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dsflash_jax.params import Weight


def cut(x: Array, weight: Weight, split: tuple[int, ...], axis: int) -> list[Array]:
    """The unit matrices of a stored weight, their axes moved last: one array for each part along `axis`."""
    x = jnp.moveaxis(x, places(weight), (-2, -1))
    return jnp.split(x, np.cumsum(split)[:-1], axis=axis) if split else [x]


def join(parts: list[Array], weight: Weight, axis: int) -> Array:
    """The stored weight of the parts that `cut` made."""
    return jnp.moveaxis(jnp.concatenate(parts, axis=axis), (-2, -1), places(weight))


def places(weight: Weight) -> tuple[int, ...]:
    """Which axes of the stored array are a unit matrix's in and out axis."""
    return tuple(len(weight.stack) + i for i in weight.matrix)
