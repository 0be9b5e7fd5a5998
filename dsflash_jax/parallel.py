"""Where a device stands in a mesh, and the collectives that the model uses: every one that exists is called from here.

The model runs inside one `jax.shard_map` over all axes, so its functions see the local part of every array, and what
crosses devices is written out. On one device each function below is the identity. A function's gradient is that of the
sum over devices of what they compute, so a device returns its own share of the loss, and nothing is divided twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from dsflash_jax.ops import ranks

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Parallel:
    """Which mesh axes split what; an axis of size 1 is left out of every field."""

    rows: Axes = ()  # split the rows of a batch
    tokens: Axes = ()  # split the tokens of a row, the first axis coarsest
    experts: Axes = ()  # split the experts; tokens are split over it, too
    tables: Axes = ()  # split the rows of the n-gram tables
    heads: Axes = ()  # split attention heads and expert width; these devices hold the same tokens
    sizes: tuple[tuple[str, int], ...] = ()  # devices along each axis
    capacity: float = 0.0  # room for rows sent to one device, times their mean; 0: gather everything instead
    ragged: bool = False  # whether rows travel without gaps, where the platform can

    def size(self, axes: Axes) -> int:
        """Devices along the product of `axes`."""
        sizes = dict(self.sizes)
        return prod(sizes[a] for a in axes)

    @property
    def everything(self) -> Axes:
        """All axes of more than one device."""
        return tuple(name for name, _ in self.sizes)


ONE = Parallel()


def total(p: Parallel, x: Any, axes: Axes | None = None) -> Any:
    """Sum of a constant over the devices of `axes`, by default those that hold different tokens."""
    axes = (*p.rows, *p.tokens) if axes is None else axes
    return jax.lax.psum(jax.lax.stop_gradient(x), axes) if axes else x


def combine(p: Parallel, x: Array) -> Array:
    """Sum of partial results over the devices that split heads or expert width."""
    return jax.lax.psum(x, p.heads) if p.heads else x


def add(x: Array, axes: Axes) -> Array:
    """Sum over the devices along `axes`."""
    return jax.lax.psum(x, axes) if axes else x


def mean(x: Array, axes: Axes) -> Array:
    """Mean over the devices along `axes`."""
    return jax.lax.pmean(x, axes) if axes else x


def count(axes: Axes) -> int:
    """How many devices there are along `axes`; inside the map only."""
    return int(jax.lax.axis_size(axes)) if axes else 1


def gather(x: Array, axes: Axes, axis: int = 0) -> Array:
    """The parts of all devices along `axes`, after each other."""
    return jax.lax.all_gather(x, axes, axis=axis, tiled=True) if axes else x


def scatter(x: Array, axes: Axes, axis: int = 0) -> Array:
    """The sum over the devices along `axes`, of which each keeps its part: the reverse of `gather`."""
    return jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True) if axes else x


def buckets(owner: Int[Array, " R"], count: int, room: int) -> tuple[Int[Array, " R"], Array]:
    """A place for each row in `count` buckets of `room` places, by owner and in order; and how many found none.

    A row without a place gets a number behind the last one, each its own. Owners outside 0 .. count - 1 get none, and
    are not counted.
    """
    real = (owner >= 0) & (owner < count)
    rank, _ = ranks(owner, count)
    fits = real & (rank < room)
    behind = count * room + jnp.arange(len(owner), dtype=owner.dtype)
    return jnp.where(fits, owner * room + rank, behind), jnp.sum(real & ~fits).astype(jnp.float32)


def exchange(x: Array, axes: Axes) -> Array:
    """Bucket i of [n * room, ...] goes to device i along `axes`; applied to the answers, it brings them back."""
    return jax.lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True) if axes else x


class Dispatch(NamedTuple):
    """A way of R rows to their owners and back."""

    place: Array  # int [R]: where each row goes in what is sent, behind its end if it goes nowhere; none twice
    length: int  # of what is sent
    send: Callable[[Array], Array]  # [length, ...] to places [P, ...] of the owners, 0 where no row comes
    back: Callable[[Array], Array]  # [P, ...] to [length, ...], 0 for rows that found no place
    dropped: Array  # float []: how many rows of this device did not

    def lay(self, x: Array) -> Array:
        """x [R] in the order in which it is sent, 0 where there is no row."""
        return jnp.zeros(self.length, x.dtype).at[self.place].set(x, mode="drop", unique_indices=True)


def dispatch(p: Parallel, owner: Int[Array, " R"], axes: Axes, most: int) -> Dispatch:
    """The way of each row to the device along `axes` that `owner` numbers; owners that do not exist get none.

    A device has places for capacity * R rows, where R is the mean: in a bucket for each sender, or for all of them in
    the order of senders (`Parallel.ragged`). `most` bounds the rows that one device sends another.
    """
    rows, devices = len(owner), p.size(axes)
    if p.ragged:
        room = min(ceil(p.capacity * rows), devices * min(rows, most))
        return _dispatch_ragged(owner, axes, devices, room)
    room = min(ceil(p.capacity * rows / devices), rows, most)
    place, dropped = buckets(owner, devices, room)
    both = partial(exchange, axes=axes)
    return Dispatch(place, devices * room, both, both, dropped)


@struct.dataclass
class Traffic:
    """Runs of rows between this device and each of n others; every field is int [n]."""

    starts: Any  # where the rows for each begin among this device's
    sizes: Any  # how many of them travel
    theirs: Any  # where they begin among the places of the other
    places: Any  # where the rows of each begin among this device's places
    arrivals: Any  # how many rows of each come
    homes: Any  # where they began among the rows of the other

    @property
    def reverse(self) -> Traffic:
        """The way back of answers."""
        return Traffic(self.places, self.arrivals, self.homes, self.starts, self.sizes, self.theirs)


def traffic(counts: Int[Array, " n"], room: int, axes: Axes) -> tuple[Traffic, Array]:
    """Runs of rows for each device along `axes`, of which this one has `counts`, and how many find no place.

    Each device has `room` places and fills them in the order of senders.
    """
    every = gather(counts[None], axes)  # [senders, owners]
    ends, outs = jnp.cumsum(every, axis=0), jnp.cumsum(every, axis=1)
    begin = jnp.minimum(ends - every, room)
    kept, homes, me = jnp.minimum(ends, room) - begin, outs - every, index(axes)
    made = Traffic(homes[me], kept[me], begin[me], begin[:, me], kept[:, me], homes[:, me])
    return made, (counts - kept[me]).sum().astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def travel(x: Array, rows: int, axes: Axes, t: Traffic) -> Array:
    """Rows of x to `rows` places, 0 where none comes; the gradient takes the way back."""
    return jax.lax.platform_dependent(x, t, tpu=partial(_ragged, rows, axes), default=partial(_picked, rows, axes))


def _travel_fwd(x: Array, rows: int, axes: Axes, t: Traffic) -> tuple[Array, Any]:
    return travel(x, rows, axes, t), (jnp.zeros((len(x), 0)), t)


def _travel_bwd(rows: int, axes: Axes, saved: Any, y: Array) -> tuple[Any, None]:
    like, t = saved
    whole_numbers = y.dtype == jax.dtypes.float0
    return None if whole_numbers else travel(y, len(like), axes, t.reverse), None


travel.defvjp(_travel_fwd, _travel_bwd)


def _ragged(rows: int, axes: Axes, x: Array, t: Traffic) -> Array:
    """`travel` by one collective."""
    out = jnp.zeros((rows, *x.shape[1:]), x.dtype)
    return jax.lax.ragged_all_to_all(x, out, t.starts, t.sizes, t.theirs, t.arrivals, axis_name=axes)


def _picked(rows: int, axes: Axes, x: Array, t: Traffic) -> Array:
    """The plain twin, for platforms without that collective: all rows of all devices, of which each picks its own."""
    place = jnp.arange(rows)[:, None]
    mine = (place >= t.places[None]) & (place < (t.places + t.arrivals)[None])  # [rows, senders]
    source = jnp.arange(len(t.homes)) * len(x) + t.homes - t.places
    taken = jnp.where(mine.any(axis=1), jnp.sum(jnp.where(mine, source[None] + place, 0), axis=1), -1)
    return gather(x, axes).at[jnp.where(taken < 0, len(x) * len(t.homes), taken)].get(mode="fill", fill_value=0)


def _dispatch_ragged(owner: Int[Array, " R"], axes: Axes, devices: int, room: int) -> Dispatch:
    """`dispatch` in runs of one owner's rows, which arrive next to each other."""
    rows, real = len(owner), (owner >= 0) & (owner < devices)
    rank, counts = ranks(owner, devices)
    t, dropped = traffic(counts, room, axes)
    place = jnp.where(real, t.starts[jnp.where(real, owner, 0)] + rank, rows + jnp.arange(rows, dtype=owner.dtype))
    send, back = partial(_travel_by, t, room, axes), partial(_travel_by, t.reverse, rows, axes)
    return Dispatch(place, rows, send, back, dropped)


def _travel_by(t: Traffic, rows: int, axes: Axes, x: Array) -> Array:
    return travel(x, rows, axes, t)


def index(axes: Axes) -> Any:
    """Number of this device along `axes`, the first axis coarsest; 0 on one device."""
    return jax.lax.axis_index(axes) if axes else 0


def over_heads(p: Parallel, x: Array) -> Array:
    """log sum exp over the devices that split heads, of a constant."""
    if not p.heads:
        return x
    top = jax.lax.pmax(x, p.heads)
    return top + jnp.log(jax.lax.psum(jnp.exp(x - top), p.heads))


def look_up(p: Parallel, table: Array, rows: Array, dtype: Any) -> tuple[Array, Array]:
    """table[rows] as `dtype`, [..., width], and how many rows found no room; every device holds some consecutive rows
    and asks for rows of its own.

    Without a capacity the row numbers of all devices go to all owners; the answers come back summed, for one owner
    knows each. With one, each row travels once, see `_ask_owners`. The table stays where it is, and a row's gradient
    reaches its owner.
    """
    none = jnp.float32(0)
    if not p.tables:
        return table[rows].astype(dtype), none
    if p.capacity:
        read, dropped = _ask_owners(p, table, rows.reshape(-1), dtype)
        return read.reshape(*rows.shape, -1), dropped
    asked = gather(rows.reshape(-1), p.tables)
    local = asked - index(p.tables) * table.shape[0]
    known = (local >= 0) & (local < table.shape[0])
    read = jnp.where(known[:, None], table.at[jnp.where(known, local, 0)].get(mode="clip").astype(dtype), 0)
    return scatter(read, p.tables).reshape(*rows.shape, table.shape[1]), none


def _ask_owners(p: Parallel, table: Array, rows: Int[Array, " R"], dtype: Any) -> tuple[Array, Array]:
    """The rows [R, width], and how many of them, each counted once, found no room and are zero.

    A device asks for each of its row numbers once: the numbers go to their owners, the answers come back, and are
    handed to all who asked. Backward adds up their gradients in float32 before they travel. Devices that hold the same
    tokens ask alike, and each sends its share of the gradient.
    """
    held = table.shape[0]
    numbers, which = distinct(rows, filler=held * p.size(p.tables))  # of an owner behind the last
    way = dispatch(p, numbers // held, p.tables, most=held)
    asked = way.send(way.lay(numbers % held + 1)) - 1
    read = table.at[jnp.where(asked < 0, held, asked)].get(mode="fill", fill_value=0).astype(dtype)
    answers = way.back(read).astype(jnp.float32)
    return answers.at[way.place[which]].get(mode="fill", fill_value=0).astype(dtype), way.dropped


def distinct(x: Int[Array, " R"], filler: int) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """The distinct numbers of x in rising order, then `filler`; and the place of each of x among them."""
    order = jnp.argsort(x)
    rising = x[order]
    new = jnp.concatenate([jnp.zeros(1, bool), rising[1:] != rising[:-1]])
    place = jnp.cumsum(new, dtype=x.dtype)
    return jnp.full_like(x, filler).at[place].set(rising), jnp.zeros_like(x).at[order].set(place)


def whole(p: Parallel, x: Array, axis: int = 1) -> Array:
    """The tokens (or slots) of a row from all devices that share it; the gradient goes back to their owners."""
    return gather(x, p.tokens, axis)


def own(p: Parallel, x: Array, axis: int = 1) -> Array:
    """This device's part of an array that `whole` made, or that all devices computed alike."""
    if not p.tokens:
        return x
    width = x.shape[axis] // p.size(p.tokens)
    return jax.lax.dynamic_slice_in_dim(x, index(p.tokens) * width, width, axis)


def before(p: Parallel, x: Array, count: int) -> Array:
    """The `count` tokens of [B, T, ...] in front of this device's, zeros in front of the row: [B, count, ...]."""
    return _reach(p, x, count, 1)


def after(p: Parallel, x: Array, count: int) -> Array:
    """The `count` tokens of [B, T, ...] behind this device's, zeros behind the row: [B, count, ...]."""
    return _reach(p, x, count, -1)


def past(p: Parallel, kv: Array, segments: Array, count: int) -> tuple[Array, Array] | None:
    """Window KV and segments of the `count` tokens before this device's; None where rows are whole."""
    return (before(p, kv, count), before(p, segments, count)) if p.tokens else None


def _reach(p: Parallel, x: Array, count: int, step: int) -> Array:
    """Tokens from the neighbours, one hop for each whole shard that `count` spans."""
    ends = lambda a, n: a[:, a.shape[1] - n :] if step > 0 else a[:, :n]  # noqa: E731
    if not p.tokens or not count:
        return jnp.zeros((x.shape[0], count, *x.shape[2:]), x.dtype)
    n, local, parts = p.size(p.tokens), x.shape[1], []
    for hop in range(-(-count // local)):
        moved = ends(x, min(local, count - hop * local))
        pairs = [(i, i + step * (hop + 1)) for i in range(n) if 0 <= i + step * (hop + 1) < n]
        moved = jax.lax.ppermute(moved, p.tokens, pairs)  # zeros where nobody sends
        parts.append(moved)
    return jnp.concatenate(parts[::-1] if step > 0 else parts, axis=1)


def own_key(p: Parallel, key: Array) -> Array:
    """A random key of this device's tokens, the same on devices that hold the same ones."""
    axes = (*p.rows, *p.tokens)
    return jax.random.fold_in(key, index(axes)) if axes else key
