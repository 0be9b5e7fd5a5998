"""Where a run's arrays lie: the mesh, how the state is split over it, and batches on their way there."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dsflash_jax import sharding
from dsflash_jax.flow import Batch
from dsflash_jax.params import leaves
from dsflash_jax.sharding import Layout
from train import step
from train.config import Run
from train.step import TrainState

HOST = "pinned_host"  # memory of the machine that a device reaches


@dataclass(frozen=True)
class Placement:
    """One device, without a mesh; or all of a layout's."""

    layout: Layout
    batch_size: int  # rows of the global batch
    parts: int = 1  # of a batch: each array of it is [parts, rows, ...] if there is more than one
    mesh: Mesh | None = None
    state: Any = None  # sharding of every leaf of the state

    @property
    def out_shardings(self) -> dict[str, Any]:
        """Where a jitted step leaves the new state, as options of `jax.jit`."""
        return {} if self.mesh is None else {"out_shardings": (self.state, NamedSharding(self.mesh, P()))}

    @property
    def results(self) -> dict[str, Any]:
        """The same for a function whose results every host reads: whole on each device."""
        return {} if self.mesh is None else {"out_shardings": NamedSharding(self.mesh, P())}

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The rows of a part, ascending, of which a device of this process holds at least some tokens."""
        rows = range(self.batch_size // self.parts)
        if self.mesh is None:
            return tuple(rows)
        split = NamedSharding(self.mesh, P(self.layout.rows or None))
        indices = split.addressable_devices_indices_map((len(rows),)).values()
        return tuple(sorted({row for index in indices if index for row in rows[index[0]]}))

    @property
    def rows(self) -> tuple[int, ...]:
        """The same of all parts, as rows of the global batch."""
        return tuple(part * (self.batch_size // self.parts) + row for part in range(self.parts) for row in self.held)

    def step(self, run: Run) -> step.Step:
        """The training step; what waits in host memory is fetched first, and `out_shardings` brings it back."""
        inner = step.make_step(run, self.mesh)
        if not self.layout.offload:
            return inner
        near = lambda a, at: jax.device_put(a, at.with_memory_kind("device")) if at.memory_kind == HOST else a  # noqa: E731
        return lambda state, batch: inner(jax.tree.map(near, state, self.state), batch)

    def put(self, batch: Batch) -> Batch:
        """The global batch on all devices, in parts, of which this process was given its `rows`.

        A device takes its own of them: processes that share a row read all of it and hand in what is theirs.
        """
        if self.parts > 1:
            batch = jax.tree.map(lambda a: a.reshape(self.parts, -1, *a.shape[1:]), batch)
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, batch)
        axis = int(self.parts > 1)

        def spread(where: NamedSharding, own: Any) -> Any:
            def local(index: Any) -> Any:
                rows = range(self.batch_size // self.parts)[index[axis]]
                at = bisect_left(self.held, rows[0])
                return own[(*index[:axis], slice(at, at + len(rows)), *index[axis + 1 :])]

            shape = (*own.shape[:axis], self.batch_size // self.parts, *own.shape[axis + 1 :])
            return jax.make_array_from_callback(shape, where, local)

        return jax.tree.map(spread, self._where(batch), batch)

    def abstract(self, batch: Batch) -> Batch:
        """The shapes and places of a batch, of which the shapes of one part are given."""
        assert self.mesh is not None
        cut = lambda a: (self.parts, *a.shape) if self.parts > 1 else a.shape  # noqa: E731
        place = lambda a, at: jax.ShapeDtypeStruct(cut(a), a.dtype, sharding=at)  # noqa: E731
        return jax.tree.map(place, batch, self._where(batch))

    def _where(self, batch: Batch) -> Batch:
        """How each array of a batch is split; parts are not."""
        assert self.mesh is not None
        place = partial(NamedSharding, self.mesh)
        front = (None,) * (self.parts > 1)
        whole = lambda spec: place(P(*front, *spec))  # noqa: E731
        return jax.tree.map(whole, sharding.batch_specs(batch, self.layout), is_leaf=lambda s: isinstance(s, P))

    def like(self, run: Run) -> TrainState:
        """Shapes, dtypes and places of the state."""
        shapes = shapes_on(run, self.layout)
        if self.mesh is None:
            return shapes
        return jax.tree.map(lambda a, at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), shapes, self.state)


def place(run: Run, devices: Any = None) -> Placement:
    """The placement of a run on `devices`, by default all there are.

    Raises ValueError, with the numbers, if the layout takes another number of devices, or cannot split the batch. One
    process may leave devices idle with a layout of one; many, and who names the devices, have to use all.
    """
    at = run.layout
    if at.devices == 1 and jax.process_count() == 1 and devices is None:
        return Placement(at, run.data.batch_size, run.accumulate)
    sharding.check(run.model, run.data.batch_size // run.accumulate, run.data.seq_len, at)
    mesh = at.mesh(devices)
    return Placement(at, run.data.batch_size, run.accumulate, mesh, state_places(run, mesh))


def shapes_on(run: Run, layout: Layout) -> TrainState:
    """Shapes and dtypes of the state that a layout stores; n-gram tables are filled up to what it divides."""
    return jax.eval_shape(partial(step.initial, replace(run, layout=layout)))


def state_places(run: Run, mesh: Mesh) -> TrainState:
    """Where each array of the state lies: optimiser state like the weight that it belongs to, counters everywhere."""
    declared = step.declare(run.setup)
    tables = {name for name, w in leaves(declared).items() if sharding.ROWS in w.axes}
    specs = sharding.specs(declared, run.layout)
    by_name = dict(zip(leaves(declared), jax.tree.leaves(specs, is_leaf=lambda s: isinstance(s, P)), strict=True))

    def place(path: Any, leaf: Any) -> NamedSharding:
        keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]  # partition labels, then the weight's own
        names = ("/".join(keys[i:]) for i in range(len(keys)))
        name = next((name for name in names if name in by_name), "")
        waits = run.layout.offload and name in tables and path[0].name == "opt_state"
        return NamedSharding(mesh, by_name.get(name, P()), memory_kind=HOST if waits else None)

    return jax.tree_util.tree_map_with_path(place, jax.eval_shape(partial(step.initial, run)))
