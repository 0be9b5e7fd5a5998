"""The image tower's own schedule: frozen at first but for its final norm, later trained at a smaller rate.

A frozen weight has neither gradient, momentum nor decay, counts in no norm and keeps its bits. The aligner and the
delimiter embeddings train throughout. Source: training section 2.4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from dsflash_jax.params import Weights


def tower(declared: Weights) -> Any:
    """Which weights are frozen at first, as a tree of bools: all under `vision` but its final norm."""

    def frozen(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return name.startswith("vision/") and name != "vision/norm"

    return jax.tree_util.tree_map_with_path(frozen, declared)


def trained(declared: Weights, start: float, tree: Any, count: Any, rate: float = 1.0) -> Any:
    """Gradients or updates of the weights, the tower's times 0 before update number `start` and then times `rate`.

    Updates are numbered from 0.
    """
    factor = jnp.where(jnp.asarray(count, jnp.float32) >= start, rate, 0.0)
    return jax.tree.map(lambda x, frozen: x * factor.astype(x.dtype) if frozen else x, tree, tower(declared))


def by_step(function: Callable[[Any, Array], Any]) -> optax.GradientTransformation:
    """A transformation that is `function` of the updates and their number, counted from 0."""

    def update(updates: Any, count: Array, params: Any = None) -> tuple[Any, Array]:
        return function(updates, count), count + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
