"""The devices that a decoder runs on: where its weights and rows lie, and functions of rows as one program over them.

All values of decoding (prompts, caches, settings, results) have the batch in front, so one rule places them: rows over
`Layout.rows`. On one device nothing is placed, and a program is the function itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsflash_jax import cache, draft, model, sharding
from dsflash_jax.cache import Cache
from dsflash_jax.config import need
from dsflash_jax.flow import Setup
from dsflash_jax.params import Weight, Weights
from dsflash_jax.sharding import Layout


@dataclass(frozen=True)
class Devices:
    """One device, without a mesh; or all of a layout's."""

    setup: Setup  # of pieces: forward only, with this layout; `taps` if there is a draft head
    mesh: Mesh | None

    @property
    def layout(self) -> Layout:
        """What each axis splits."""
        return self.setup.layout

    @property
    def declared(self) -> dict[str, Any]:
        """The weights as a checkpoint has them."""
        c = self.setup.config
        return model.declare(c) | (draft.declare(c) if self.setup.taps else {})

    @property
    def unit(self) -> int:
        """A batch has a multiple of so many rows."""
        return self.layout.size(self.layout.rows)

    def filled(self, rows: int) -> int:
        """The rows of a batch that holds at least so many."""
        return -(-rows // self.unit) * self.unit

    def check(self, rows: int) -> None:
        """Raise ValueError for rows that the layout cannot split."""
        need(rows % self.unit == 0,
             f"{rows} rows do not divide over {'x'.join(self.layout.rows)} = {self.unit} devices: fill them up to "
             f"{self.filled(rows)}")  # fmt: skip

    @property
    def rows(self) -> NamedSharding:
        """Where everything but the weights lies; there must be a mesh."""
        assert self.mesh is not None, "one device has no sharding"
        return NamedSharding(self.mesh, P(self.layout.rows or None))

    def like(self, dtype: Callable[[Weight], Any]) -> dict[str, Any]:
        """Shapes, dtypes and places of the weights as the layout stores them, n-gram tables filled up."""
        stored = sharding.stored(self.declared, self.layout)
        where = lambda spec: None if self.mesh is None else NamedSharding(self.mesh, spec)  # noqa: E731
        one = lambda w, spec: jax.ShapeDtypeStruct(w.full_shape, dtype(w), sharding=where(spec))  # noqa: E731
        made: dict[str, Any] = sharding.map_pairs(one, stored, sharding.specs(stored, self.layout))
        return made

    def put(self, w: Weights) -> dict[str, Any]:
        """The declared weights of a tree at their places, from wherever they lie; on one device they stay there.

        Raises ValueError for shapes of another model; n-gram tables may be filled up for this layout already.
        """
        named = {name: w[name] for name in self.declared}
        if self.mesh is None:
            return named

        def one(w: Weight, like: jax.ShapeDtypeStruct, array: Any) -> jax.Array:
            need(array.shape in (w.full_shape, like.shape),
                 f"a weight has shape {list(array.shape)}, but this model's is {list(w.full_shape)}: give the weights "
                 "of this model")  # fmt: skip
            fill = [(0, n - m) for n, m in zip(like.shape, array.shape, strict=True)]
            if any(more for _, more in fill):
                array = (jnp if isinstance(array, jax.Array) else np).pad(array, fill)
            return jax.device_put(array, like.sharding)

        placed: dict[str, Any] = sharding.map_pairs(one, self.declared, self.like(lambda w: jnp.float32), named)
        return placed

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(w, *values)` of whole arrays, each device with its part of the weights and its rows."""
        if self.mesh is None:
            return function
        mesh, rows = self.mesh, P(self.layout.rows or None)
        weights = sharding.specs(sharding.stored(self.declared, self.layout), self.layout)

        def run(w: Weights, *values: Any) -> Any:
            inside = (weights, *[rows] * len(values))
            mapped = jax.shard_map(function, mesh=mesh, in_specs=inside, out_specs=rows, check_vma=False)
            return mapped(w, *values)

        return run

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """`over` as a compiled program, which takes values from wherever they lie; raises as `check`."""
        program = jax.jit(self.over(function), **options)
        if self.mesh is None:
            return program
        rows = self.rows

        def run(w: Weights, *values: Any) -> Any:
            self.check(len(jax.tree.leaves(values)[0]))
            return program(w, *jax.device_put(values, rows))

        return run

    def caches(self, packed: bool) -> tuple[Callable[[int, int], Cache], Callable[..., Cache]]:
        """What makes an empty cache of so many rows and tokens, and what makes one longer: `cache.empty` and `grow`."""
        where: dict[str, Any] = {} if self.mesh is None else {"out_shardings": self.rows}
        grow = jax.jit(cache.grow, static_argnames="capacity", **where)  # no array that grows could be reused

        def empty(rows: int, capacity: int) -> Cache:
            self.check(rows)
            return cache.empty(self.setup, rows, capacity, packed)

        return (jax.jit(empty, static_argnums=(0, 1), **where) if where else empty), grow


def place(setup: Setup, drafts: bool, mesh: Mesh | None = None) -> Devices:
    """The devices of a setup's layout, by default all there are, for weights with a draft head or without.

    No row loses a token on its way to an expert: tokens are few, and all are gathered, whatever `Layout.capacity` is.
    Raises ValueError for a layout that splits the tokens of a row, and for several devices of several processes.
    """
    at, count = setup.layout, jax.process_count()
    need(not at.tokens,
         f"decoding keeps a row on one device, but {'x'.join(at.tokens)} splits its tokens: set layout.context=1 and "
         "layout.expert_splits=rows")  # fmt: skip
    need(at.devices == 1 or count == 1,
         f"decoding on {at.devices} devices runs in one process, but there are {count}")  # fmt: skip
    mesh = at.mesh() if mesh is None and at.devices > 1 else mesh
    need(mesh is None or mesh.size == at.devices,
         f"the layout takes {at.devices} devices, but the mesh has {0 if mesh is None else mesh.size}")  # fmt: skip
    layout = replace(at, capacity=0.0, exchange="buckets", offload=False)
    compute = replace(setup.compute, remat="none")
    return Devices(replace(setup, compute=compute, objective=None, layout=layout, taps=drafts), mesh)
