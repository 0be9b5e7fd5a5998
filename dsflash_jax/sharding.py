"""Layouts: which mesh axis splits what, for weights, optimiser state and batches. Every strategy is in this file.

`data` copies the weights; `fsdp` splits what is stored and gathers a layer's weights when it runs; `expert` splits the
experts, and tokens travel to them; `context` splits the tokens of a row; `tensor` splits heads and expert width.
What a device stores of a weight is split over every axis but `data`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from dsflash_jax.config import Config, check_literals, need
from dsflash_jax.parallel import Axes, Parallel, gather
from dsflash_jax.params import Weight, leaves, map_weights

AXES = ("data", "fsdp", "expert", "context", "tensor")
STORED = ("fsdp", "expert", "context", "tensor")  # axes that a stored weight is split over, whatever it computes
COMPUTED = {  # logical axis of a weight -> mesh axis that also splits the computation with it
    "expert_stack": "expert",
    "heads": "tensor", "groups": "tensor", "group_latent": "tensor", "expert_width": "tensor",
}  # fmt: skip
ROWS = "ngram_rows"  # split over all of STORED, and looked up where they are
MATRICES = ("muon", "sinkhorn")  # families whose weights are split; norms, sinks and biases are whole everywhere


@dataclass(frozen=True)
class Layout:
    """Devices along each axis. The default is one device."""

    data: int = 1  # copies of the model, each with its own rows of the batch
    fsdp: int = 1  # rows of the batch; weights and optimiser state are split, and gathered layer by layer
    expert: int = 1  # experts
    context: int = 1  # tokens of a row
    tensor: int = 1  # heads and expert width; all of them work on the same tokens
    expert_splits: Literal["rows", "tokens"] = "rows"  # what the expert axis splits outside the experts
    capacity: float = 0.0  # room for rows sent to one device, times their mean; 0 gathers all at all experts and tables
    exchange: Literal["buckets", "ragged"] = "buckets"  # how they travel: a bucket a sender, or without gaps (on TPU)
    offload: bool = False  # the optimiser state of n-gram tables waits in host memory, and visits for its update
    whole: int = 2**16  # matrices of fewer entries are whole on every device, too; to decode, best more than any has

    def __post_init__(self) -> None:
        check_literals(self)
        for name in AXES:
            need(getattr(self, name) >= 1, f"layout.{name} must be at least 1, got {getattr(self, name)}")
        need(self.capacity == 0 or 1 <= self.capacity < inf,
             f"layout.capacity is 0 (gather) or a number from 1 on, times the mean, got {self.capacity}")  # fmt: skip
        need(not self.offload or self.devices > 1, "layout.offload needs a layout of more than one device")
        need(self.exchange == "buckets" or self.capacity > 0,
             "layout.exchange=ragged sends rows to their experts, but capacity=0 gathers all tokens there: set "
             "layout.capacity to at least 1")  # fmt: skip

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return prod(getattr(self, name) for name in AXES)

    def used(self, *names: str) -> Axes:
        """Those of the named axes that have more than one device, in the order of AXES."""
        return tuple(a for a in AXES if a in names and getattr(self, a) > 1)

    @property
    def rows(self) -> Axes:
        """Axes that split the rows of a batch."""
        return self.used("data", "fsdp", *(("expert",) if self.expert_splits == "rows" else ()))

    @property
    def tokens(self) -> Axes:
        """Axes that split the tokens of a row."""
        return self.used("context", *(("expert",) if self.expert_splits == "tokens" else ()))

    def size(self, axes: Axes) -> int:
        """Devices along the product of some axes."""
        return prod(getattr(self, a) for a in axes)

    @property
    def parallel(self) -> Parallel:
        """What the model must know of it."""
        sizes = tuple((a, getattr(self, a)) for a in self.used(*AXES))
        kept = (self.used("expert"), self.used(*STORED), self.used("tensor"))
        return Parallel(self.rows, self.tokens, *kept, sizes, self.capacity, self.exchange == "ragged")

    def mesh(self, devices: Any = None) -> Mesh:
        """The mesh over `devices`, by default all there are. Raises ValueError if their number is another."""
        shape = tuple(getattr(self, name) for name in AXES)
        devices = jax.devices() if devices is None else devices
        need(len(devices) == self.devices,
             f"the layout {dict(zip(AXES, shape, strict=True))} takes {self.devices} devices, but there are "
             f"{len(devices)}: change an axis")  # fmt: skip
        # An axis may take part of a physical one: 32 of 4 x 4 x 4 chips.
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


ONE = Layout()


def weight_spec(name: str, w: Weight, at: Layout) -> P:
    """How one weight is stored. Raises ValueError, with the numbers, where no axis of it divides."""
    return P(*([None] * len(w.stack)), *(axes or None for axes in split_axes(name, w, at)))


def split_axes(name: str, w: Weight, at: Layout) -> list[Axes]:
    """The mesh axes over which each axis of one unstacked weight is split."""
    split: list[list[str]] = [[] for _ in w.shape]
    for i, axis in enumerate(w.axes):
        mesh_axis = COMPUTED.get(axis)
        if mesh_axis and getattr(at, mesh_axis) > 1 and len(w.shape) > 1 - (axis == "heads"):
            need(w.shape[i] % getattr(at, mesh_axis) == 0,
                 f"weight {name}: its axis {axis} of {w.shape[i]} does not divide over {mesh_axis}="
                 f"{getattr(at, mesh_axis)} devices")  # fmt: skip
            split[i].append(mesh_axis)
    left = [a for a in at.used(*STORED) if not any(a in s for s in split)]
    if left and w.family in MATRICES and (ROWS in w.axes or prod(w.shape) >= at.whole):
        room = [n // at.size(tuple(s)) for n, s in zip(w.shape, split, strict=True)]
        fits = [i for i, n in enumerate(room) if n % at.size(tuple(left)) == 0]
        if w.split and w.family == "muon":  # matrices side by side stay whole along the axis that they share
            fits = [i for i in fits if i != w.matrix[1]]
        if ROWS in w.axes:  # `stored` makes them divide
            fits = [w.axes.index(ROWS)]
        need(bool(fits), f"weight {name} of shape {w.shape}: none of its axes divides over {'x'.join(left)} = "
             f"{at.size(tuple(left))} devices; change the layout")  # fmt: skip
        best = max(fits, key=lambda i: room[i])
        split[best] = [*split[best], *left]
    return [tuple(axes) for axes in split]


def stored(declared: Any, at: Layout) -> Any:
    """The declarations as a layout stores them: n-gram tables filled up to rows that divide over the devices.

    Nobody reads the rows behind the last one, so their gradient is zero and the optimiser leaves them alone.
    """
    shards = at.size(at.used(*STORED))

    def one(w: Weight) -> Weight:
        if ROWS not in w.axes or not (extra := -w.shape[0] % shards):
            return w
        return replace(w, shape=(w.shape[0] + extra, *w.shape[1:]), split=(*w.split, extra))

    return map_weights(one, declared)


def specs(declared: Any, at: Layout) -> Any:
    """How every weight of a tree of declarations is stored."""
    named = {id(w): name for name, w in leaves(declared).items()}
    return map_weights(lambda w: weight_spec(named[id(w)], w, at), declared)


def fetch(at: Layout, declared: Any, w: Any) -> dict[str, Any]:
    """The weights of one layer for use, or of stacked ones: gathered over every axis that only stores them.

    Experts, heads and n-gram rows stay split. Backward scatters the gradients the same way.
    """
    if at.devices == 1:
        return {name: w[name] for name in declared}

    def one(declaration: Weight, array: Any) -> Any:
        for i, axes in enumerate(split_axes("", declaration, at)):
            stored = tuple(a for a in axes if a != COMPUTED.get(declaration.axes[i]))
            if stored and declaration.axes[i] != ROWS:
                array = gather(array, stored, axis=len(declaration.stack) + i)
        return array

    return {name: map_pairs(one, declared[name], w[name]) for name in declared}


def map_pairs(function: Any, declared: Any, *w: Any) -> Any:
    """Apply `function` to every declaration and its array, or what else the trees `w` have in its place."""
    return jax.tree.map(function, declared, *w, is_leaf=lambda d: isinstance(d, Weight))


def batch_specs(batch: Any, at: Layout) -> Any:
    """How a batch is split: rows over `Layout.rows`, tokens over `Layout.tokens`; images go with their rows."""

    def one(path: Any, array: Any) -> P:
        tokens = () if path[0].name == "images" else (at.tokens or None,)
        return P(at.rows or None, *tokens)

    return jax.tree_util.tree_map_with_path(one, batch)


def check(c: Config, batch: int, length: int, at: Layout) -> None:
    """Refuse a batch of `batch` rows of `length` tokens that a layout cannot split; the message has the numbers."""
    rows, tokens = at.size(at.rows), at.size(at.tokens)
    need(batch % rows == 0, f"{batch} rows do not divide over {'x'.join(at.rows)} = {rows} devices: make "
         "data.batch_size / accumulate a multiple")  # fmt: skip
    unit = tokens * int(np.lcm.reduce([r for r in c.compress_ratios if r] or [1]))
    need(tokens == 1 or length % unit == 0,
         f"rows of {length} tokens do not divide over {'x'.join(at.tokens)} = {tokens} devices in whole slots: make "
         f"their length a multiple of {unit}")  # fmt: skip
