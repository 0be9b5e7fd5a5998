"""Muon's direction: momenta with all singular values made equal, on one device or with whole matrices on each of many.

On many devices a stored matrix is split, and Newton-Schulz needs it whole. So the matrices of a shape travel: one
all-to-all gives each device whole ones, the iterations run where they lie, and one all-to-all brings the results back
to the shards. Rejected: to leave it to the partitioner, which gathers or sums inside every iteration.

Copies along `data`, and weights that are whole everywhere, are computed by every copy: the work is about 1 % of a step
of 100M tokens, results need not cross the slowest links, and copies stay equal bit for bit.
Source: training sections 2.2 and 2.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dsflash_jax import parallel
from dsflash_jax.ops import HIGHEST
from dsflash_jax.parallel import Axes
from dsflash_jax.params import Weight
from dsflash_jax.sharding import Layout, split_axes
from train import matrices

# X <- a X + b (X X^T) X + c (X X^T)^2 X: a first kind of step that lifts small singular values fast, and a second
# that pulls all of them to 1 (training 2.2, stated in V4 section 2.4).
LIFT = (3.4445, -4.7750, 2.0315)
SETTLE = (2.0, -1.5, 0.5)
# Entries of the matrices that a device iterates at once: 64 MB a temporary. One released expert has 12M, which fills
# a chip; the bound is for small matrices.
CHUNK = 2**24
STACK = 2**28  # entries of the shards that a device exchanges at once: 1 GiB, and two copies of them exist


def newton_schulz(x: Float[Array, "*B I O"], steps: tuple[int, int] = (8, 2)) -> Float[Array, "*B I O"]:
    """The matrix with x's singular vectors and singular values 1: U V^T of x = U S V^T, by ten steps.

    X <- X / ||X||_F, then steps[0] times X <- a X + b (X X^T) X + c (X X^T)^2 X with `LIFT`, and steps[1] times with
    `SETTLE`. Singular values end within 0.06 % of 1 for Gaussian matrices and within 0.2 % at condition 1e4 and 256
    rows. Works on the wide side, in float32 at the highest precision. A zero matrix stays zero, and the scale of x
    does not matter. Source: training 2.2. Cost: 4 m^2 n + 2 m^3 FLOPs a step, m = min(I, O), n = max(I, O).
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.astype(jnp.float32)
    x = jnp.swapaxes(x, -2, -1) if tall else x
    # Squares of entries below 1e-19 vanish in float32, so the largest entry becomes 1 first.
    x = _divide(x, jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True))
    x = _divide(x, jnp.sqrt(jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)))

    def step(x: Array, coefficients: Array) -> tuple[Array, None]:
        a, b, c = coefficients
        gram = jnp.matmul(x, jnp.swapaxes(x, -2, -1), precision=HIGHEST)
        inner = b * gram + c * jnp.matmul(gram, gram, precision=HIGHEST)
        return a * x + jnp.matmul(inner, x, precision=HIGHEST), None

    # Coefficients are data of the one loop: a loop for each kind of step would compile the body twice.
    table = np.array([LIFT] * steps[0] + [SETTLE] * steps[1], np.float32).reshape(-1, len(LIFT))
    x, _ = jax.lax.scan(step, x, jnp.asarray(table))
    return jnp.swapaxes(x, -2, -1) if tall else x


def _divide(x: Array, by: Array) -> Array:
    return x / jnp.where(by > 0, by, 1)


def muon_update(
    momentum: Float[Array, "*B I O"], *, steps: tuple[int, int] = (8, 2), rms: float = 0.18
) -> Float[Array, "*B I O"]:
    """Orthogonalised momentum with root mean square `rms`: newton_schulz(N) * sqrt(max(I, O)) * rms, float32.

    Leading axes are separate matrices. Source: training 2.2.
    """
    return newton_schulz(momentum, steps) * (sqrt(max(momentum.shape[-2:])) * rms)


def directions(
    update: Callable[[Array], Array], momenta: list[Array], weights: list[Weight], splits: list[Any], at: Layout
) -> list[Array]:
    """`update`, which must commute with transposing, of every unit matrix of every weight.

    `splits` are the widths of matrices side by side along out. On several devices it runs inside a `shard_map` on
    what this device stores.
    """
    cuts = [matrices.cut(x, w, split, axis=-1) for x, w, split in zip(momenta, weights, splits, strict=True)]
    parts = [part for parts in cuts for part in parts]
    if at.devices == 1:
        updated = iter(by_shape(update, parts))
    else:
        axes = [_matrix_axes(w, at) for w, parts in zip(weights, cuts, strict=True) for _ in parts]
        updated = iter(by_shard(update, parts, axes, at))
    return [matrices.join([next(updated) for _ in parts], w, axis=-1) for parts, w in zip(cuts, weights, strict=True)]


def by_shape(update: Callable[[Array], Array], parts: list[Array]) -> list[Array]:
    """Apply `update` to arrays of whole matrices [*B, I, O]: once for each shape.

    All matrices of a shape, tall ones transposed, form one stack [N, rows, cols], rows <= cols. The program so holds
    one loop for each distinct shape, not for each weight. A stack of several arrays is one copy of them, and its
    temporaries live for all of them at once; a stack of one array is that array.
    """
    shapes = [tuple(sorted(x.shape[-2:])) for x in parts]
    results = list(parts)
    for shape in dict.fromkeys(shapes):
        places = [i for i, other in enumerate(shapes) if other == shape]
        wide = [_transpose(parts[i], tall(parts[i])) for i in places]
        stacks = [x.reshape(-1, *shape) for x in wide]
        ends = np.cumsum([len(stack) for stack in stacks])
        stack = update(jnp.concatenate(stacks))
        for i, x, part in zip(places, wide, jnp.split(stack, ends[:-1]), strict=True):
            results[i] = _transpose(part.reshape(x.shape), tall(parts[i]))
    return results


def tall(x: Array) -> bool:
    """Whether matrices have more rows than columns."""
    return x.shape[-2] > x.shape[-1]


def _transpose(x: Array, turn: bool) -> Array:
    return jnp.swapaxes(x, -2, -1) if turn else x


@dataclass(frozen=True)
class Shards:
    """How the matrices of one kind lie: what is equal for all that share a stack."""

    rows: int  # of this device
    columns: int
    row_axes: Axes  # mesh axes that split the rows
    column_axes: Axes


def by_shard(
    update: Callable[[Array], Array], parts: list[Array], axes: list[tuple[Axes, Axes]], at: Layout
) -> list[Array]:
    """Apply `update` to the whole matrices of shards [*B, I, O], once for each kind of shards.

    The more finely split axis goes first, so that shards stay wide along the last axis, where a device pads. The
    matrices of a kind, of as many layers as STACK allows, form one stack: their number is padded once, to less than one
    matrix more a device (and less than one more a chunk where a device has several chunks).
    """
    turned = [(at.size(b), x.shape[-1] * at.size(b)) > (at.size(a), x.shape[-2] * at.size(a))
              for x, (a, b) in zip(parts, axes, strict=True)]  # fmt: skip
    straight = [_transpose(x, turn) for x, turn in zip(parts, turned, strict=True)]
    pairs = [pair[::-1] if turn else pair for pair, turn in zip(axes, turned, strict=True)]
    kinds = [Shards(x.shape[-2], x.shape[-1], *pair) for x, pair in zip(straight, pairs, strict=True)]
    results = list(parts)
    done: Array | None = None
    for kind in dict.fromkeys(kinds):
        for places in _groups([i for i, other in enumerate(kinds) if other == kind], [x.size for x in straight]):
            stacks = [straight[i].reshape(-1, kind.rows, kind.columns) for i in places]
            ends = np.cumsum([len(stack) for stack in stacks])
            stack = jnp.concatenate(stacks)
            if done is not None:  # one after the other, or the temporaries of all would exist at once
                stack, _ = jax.lax.optimization_barrier((stack, done))
            done = _exchanged(update, stack, kind, at)
            for i, part in zip(places, jnp.split(done, ends[:-1]), strict=True):
                results[i] = _transpose(part.reshape(straight[i].shape), turned[i])
    return results


def _groups(places: list[int], sizes: list[int]) -> list[list[int]]:
    """Consecutive places whose sizes add up to at most STACK, or one that is larger alone."""
    groups: list[list[int]] = []
    for i in places:
        if not groups or sum(sizes[j] for j in groups[-1]) + sizes[i] > STACK:
            groups.append([])
        groups[-1].append(i)
    return groups


def _exchanged(update: Callable[[Array], Array], stack: Array, kind: Shards, at: Layout) -> Array:
    """`update` of the whole matrices behind shards [N, rows, columns]: out and back, and no collective in between.

    Temporaries are two copies of the stack: what is sent and what comes. The loop over chunks works in place.
    """
    across, along = at.size(kind.row_axes), at.size(kind.column_axes)
    share, chunk = shares(len(stack), across * along, prod(stack.shape[1:]) * across * along)
    padded = jnp.pad(stack, ((0, share * across * along - len(stack)), (0, 0), (0, 0)))
    # The barrier: XLA's CPU compiler looks through to parts of different layouts, and then refuses to exchange them.
    held = parallel.exchange(jax.lax.optimization_barrier(padded), (*kind.row_axes, *kind.column_axes))
    held = held.reshape(across, along, share, kind.rows, kind.columns)  # whole matrices, one a place of axis 2

    def turn(i: Any, held: Array) -> Array:
        taken = jax.lax.dynamic_slice_in_dim(held, i * chunk, chunk, axis=2)
        whole = taken.transpose(2, 0, 3, 1, 4).reshape(chunk, across * kind.rows, along * kind.columns)
        made = update(whole).reshape(chunk, across, kind.rows, along, kind.columns).transpose(1, 3, 0, 2, 4)
        return jax.lax.dynamic_update_slice_in_dim(held, made, i * chunk, axis=2)

    held = turn(0, held) if chunk == share else jax.lax.fori_loop(0, share // chunk, turn, held)
    held = jax.lax.optimization_barrier(held.reshape(padded.shape))
    back = parallel.exchange(held, (*kind.row_axes, *kind.column_axes))
    return back[: len(stack)]


def shares(count: int, devices: int, entries: int) -> tuple[int, int]:
    """How many of `count` matrices of `entries` entries a device gets, padding included, and how many at a time."""
    share = -(-count // devices)
    chunks = -(-share // max(CHUNK // entries, 1))
    chunk = -(-share // chunks)
    return chunks * chunk, chunk


def _matrix_axes(weight: Weight, at: Layout) -> tuple[Axes, Axes]:
    """Mesh axes that split the in and the out axis of a weight's matrices."""
    split = split_axes("", weight, at)
    return split[weight.matrix[0]], split[weight.matrix[1]]
