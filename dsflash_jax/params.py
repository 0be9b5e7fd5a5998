"""Weight declarations: each mechanism declares its weights once, and everybody else reads the declaration.

Initialisation, sharding, optimiser routing, the checkpoint map and parameter counts all derive from `Weight`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Family = Literal["muon", "sinkhorn", "norm", "scalar", "rule"]
Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]
Weights = Mapping[str, Any]  # nested: names to arrays, or to `Weight` in a declaration


def normal(std: float) -> Init:
    """Initialise from N(0, std^2)."""
    return lambda key, shape, dtype: std * jax.random.normal(key, shape, dtype)


def constant(value: float) -> Init:
    """Initialise every entry to `value`."""
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


@dataclass(frozen=True)
class Weight:
    """One array of the model: its shape, what its axes mean, how it starts and how it is trained.

    A matrix is stored `[*batch, in, *out]`, the transpose of the checkpoint's `[out, in]` with every batch axis folded
    into `out`. `matrix` names the in and out axes of the unit that Muon orthogonalises; other axes are separate units.
    """

    shape: tuple[int, ...]  # without the axes that scans stack in front
    axes: tuple[str, ...]  # logical axis of each dimension, see `dsflash_jax.__doc__`
    init: Init  # (key, stacked shape, dtype) to array
    family: Family = "muon"  # optimiser family, training section 2.1
    matrix: tuple[int, int] = (0, 1)  # in and out axis of one unit; used by "muon" and "sinkhorn"
    split: tuple[int, ...] = ()  # widths of separate matrices stored side by side: along out, of a table along its rows
    float32: bool = False  # never cast to the compute dtype
    bare: bool = False  # the published name has no ".weight" behind it
    stack: tuple[int, ...] = ()  # lengths of the scans around it, outermost first

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"weight of shape {self.shape} names {len(self.axes)} axes: {self.axes}")

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the stored array, stacked axes in front."""
        return self.stack + self.shape

    @property
    def size(self) -> int:
        """Number of entries over all stacked copies."""
        return prod(self.full_shape)

    def stacked(self, times: int) -> Weight:
        """This weight inside one more scan of `times` steps, outside those it already has."""
        return replace(self, stack=(times, *self.stack))


def norm(width: int, axis: str) -> Weight:
    """Declaration of an RMSNorm weight."""
    return Weight((width,), (axis,), constant(1.0), family="norm", float32=True)


def map_weights(function: Callable[[Weight], Any], tree: Weights) -> Any:
    """Apply `function` to every declaration of a nested dictionary."""
    return jax.tree.map(function, tree, is_leaf=lambda w: isinstance(w, Weight))


def leaves(tree: Weights) -> dict[str, Weight]:
    """Every declaration by its path, joined with slashes."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda w: isinstance(w, Weight))
    return {"/".join(k.key for k in path): weight for path, weight in flat}


def digest(w: Weights, declared: Weights | None = None) -> str:
    """A hash of all weights: sums of their bits, each with its place, that no device adds in another way.

    With declarations of the same tree, of what these have of each array: a layout may have filled some up.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(dict(w))
    shapes = [a.shape for _, a in flat] if declared is None else [d.full_shape for d in leaves(declared).values()]
    sums = jax.device_get(_sums([leaf for _, leaf in flat], tuple(shapes)))
    named = [
        (jax.tree_util.keystr(p), str(a.dtype), shape, int(n))
        for (p, a), shape, n in zip(flat, shapes, sums, strict=True)
    ]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()


@partial(jax.jit, static_argnums=1)
def _sums(arrays: list[jax.Array], shapes: tuple[tuple[int, ...], ...]) -> list[jax.Array]:
    def one(a: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        words = jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * a.dtype.itemsize}")).astype(jnp.uint32)
        place = jnp.zeros(a.shape, jnp.uint32)
        for axis, size in enumerate(shape):  # row-major, wrapping round
            at = jax.lax.broadcasted_iota(jnp.uint32, a.shape, axis)
            place = place * np.uint32(size % 2**32) + at
            words = words if size == a.shape[axis] else jnp.where(at < size, words, 0)
        return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)

    return [one(a, shape) for a, shape in zip(arrays, shapes, strict=True)]
