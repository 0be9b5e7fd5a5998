"""Sinkhorn-balanced momentum of tables, on one device or where their rows and columns lie on many.

A table stays where it is: a pass over split rows or columns is a local sum and one sum over devices, of one number a
row or a column. Source: training section 2.3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from dsflash_jax import parallel
from dsflash_jax.ops import HIGHEST
from dsflash_jax.parallel import Axes
from dsflash_jax.params import Weight
from dsflash_jax.sharding import Layout, split_axes
from train import matrices

CHUNK_ROWS = 8192  # rows of a large table that are read at once: 8 MB of the released ones
UNSET = -1.0  # scale of a row before its first pass, which finds whether the row moves


def sinkhorn_update(
    momentum: Float[Array, "*B R O"],
    *,
    iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
    rows: Axes = (),
    columns: Axes = (),
) -> Float[Array, "*B R O"]:
    """Momentum balanced over rows and columns, sqrt(O) * U: a row that moves has root mean square 1. float32.

    U starts as the momentum, rows with norm <= tau * (mean row norm) set to zero. Odd passes divide rows, even passes
    columns, by (their norm + eps). Only the scales of U = diag(r) G diag(c) are kept: a row pass is
    r <- r / (r a + eps) with a = ||G_i * c||, a column pass the same for c. A zero row or column stays zero. Leading
    axes are separate matrices. A row that was never read has no momentum, so it is below the threshold and does not
    move; a row read once moves on by its decaying momentum until that falls below the threshold.
    Inside a `shard_map`, `rows` and `columns` are the mesh axes that split R and O.
    Source: training 2.3. Cost: `iterations` + 2 reads of the matrix.
    """
    g = momentum.astype(jnp.float32)
    norms = _norm(g, -1, columns)  # [*B, R]
    r = (norms > tau * parallel.mean(jnp.mean(norms, axis=-1, keepdims=True), rows)).astype(jnp.float32)
    c = jnp.ones(g.shape[:-2] + g.shape[-1:], jnp.float32)  # [*B, O]

    def pair(_: Any, scales: tuple[Array, Array]) -> tuple[Array, Array]:
        r, c = scales
        c = _rescale(c, _norm(r[..., None] * g, -2, rows), eps)
        return _rescale(r, _norm(g * c[..., None, :], -1, columns), eps), c

    r, c = jax.lax.fori_loop(0, iterations // 2, pair, (_rescale(r, norms, eps), c))
    width = g.shape[-1] * parallel.count(columns)
    return r[..., None] * g * c[..., None, :] * sqrt(width)


def _norm(x: Array, axis: int, axes: Axes = ()) -> Array:
    return jnp.sqrt(parallel.add(jnp.sum(jnp.square(x), axis=axis), axes))


def _rescale(scale: Array, norm: Array, eps: float) -> Array:
    # Scale 1/eps for a zero column would overflow on the second pass and give 0 * inf.
    return jnp.where(norm > 0, scale / (scale * norm + eps), scale)


def sinkhorn_shard(
    momentum: Float[Array, "R O"],
    split: tuple[int, ...],
    rows: Axes,
    *,
    iterations: int = 11,
    tau: float = 1e-3,
    eps: float = 1e-20,
) -> Float[Array, "R O"]:
    """`sinkhorn_update` of matrices of `split` rows above each other, of which this device has R rows. float32.

    Devices along `rows` hold consecutive rows; a matrix may start and end anywhere. The table is read in chunks, a row
    pass and the column pass behind it in one read, and column sums are [matrices, O]. Temporaries are one copy of the
    shard, which becomes the result. Cost: iterations / 2 + 2 reads, and as many sums of [matrices, O] over devices.
    """
    g = momentum.astype(jnp.float32)
    local, width = g.shape
    size = min(local, CHUNK_ROWS)
    sweep = partial(_sweep, local, size, parallel.index(rows) * local, jnp.asarray(np.cumsum(split), jnp.int32))
    take = partial(jax.lax.dynamic_slice_in_dim, slice_size=size)
    put = partial(jax.lax.dynamic_update_slice_in_dim, axis=0)
    sums = sweep(lambda at, sums: sums + at.add(_norm(take(g, at.start), -1)), jnp.zeros(len(split), jnp.float32))
    floor = tau * parallel.add(sums, rows) / np.asarray(split, np.float32)

    def row_pass(r: Array, c: Array, part: Array, at: Chunk) -> Array:
        scale, norm = take(r, at.start), _norm(part * c[at.matrix], -1)
        return _rescale(jnp.where(scale == UNSET, (norm > floor[at.matrix]).astype(jnp.float32), scale), norm, eps)

    def pair(_: Any, scales: tuple[Array, Array]) -> tuple[Array, Array]:
        def turn(at: Chunk, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            r, sums = carry
            part = take(g, at.start)
            new = jnp.where(at.fresh, row_pass(r, c, part, at), take(r, at.start))
            return put(r, new, at.start), sums + at.add(jnp.square(new[:, None] * part))

        r, c = scales
        r, sums = sweep(turn, (r, jnp.zeros_like(c)))
        return r, _rescale(c, jnp.sqrt(parallel.add(sums, rows)), eps)

    start = jnp.full(local, UNSET, jnp.float32), jnp.ones((len(split), width), jnp.float32)
    r, c = jax.lax.fori_loop(0, iterations // 2, pair, start)

    def result(at: Chunk, g: Array) -> Array:
        part = take(g, at.start)
        made = row_pass(r, c, part, at)[:, None] * part * c[at.matrix] * sqrt(width)
        return put(g, jnp.where(at.fresh[:, None], made, part), at.start)

    return sweep(result, g)


@struct.dataclass
class Chunk:
    """Some consecutive rows of a shard."""

    start: Any  # int []: first of them
    matrix: Any  # int [C]: number of the matrix that each belongs to
    fresh: Any  # bool [C]: rows that no chunk had before
    matrices: int = struct.field(pytree_node=False)

    def add(self, x: Array) -> Array:
        """Sum of the fresh rows of x [C, *O] for each matrix, [matrices, *O]."""
        mine = (self.matrix[None] == jnp.arange(self.matrices)[:, None]) & self.fresh[None]
        return jnp.matmul(mine.astype(jnp.float32), x, precision=HIGHEST)


def _sweep(local: int, size: int, first: Any, ends: Array, turn: Callable[[Chunk, Any], Any], carry: Any) -> Any:
    """turn(chunk, carry) for all `local` rows in chunks of `size`; `first` is the table's row that they start with.

    A last chunk that would be shorter begins inside the one before.
    """

    def one(i: Any, carry: Any) -> Any:
        start = jnp.minimum(i * size, local - size)
        row = start + jnp.arange(size)
        matrix = jnp.searchsorted(ends, first + row, side="right", method="compare_all")
        return turn(Chunk(start, matrix, row >= i * size, len(ends)), carry)

    return jax.lax.fori_loop(0, -(-local // size), one, carry)


def direction(momentum: Array, weight: Weight, at: Layout, **settings: Any) -> Array:
    """The balanced momentum of one table as this device stores it, each of its matrices alone."""
    split = split_axes("", weight, at)
    rows, columns = (split[i] for i in weight.matrix)
    if weight.split and rows:
        (table,) = matrices.cut(momentum, weight, (), axis=-2)
        made = [sinkhorn_shard(x, weight.split, rows, **settings) for x in table.reshape(-1, *table.shape[-2:])]
        return matrices.join([jnp.stack(made).reshape(table.shape)], weight, axis=-2)
    parts = matrices.cut(momentum, weight, weight.split, axis=-2)
    parts = [sinkhorn_update(part, rows=rows, columns=columns, **settings) for part in parts]
    return matrices.join(parts, weight, axis=-2)
