"""What flows through the model: the setup, a batch, what is derived from it once, and what layers hand on.

Array fields are typed `Any` with their shape beside them: JAX rebuilds records around placeholders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from dsflash_jax import compressor, moe, parallel, quant, rope
from dsflash_jax.compressor import Slots
from dsflash_jax.config import Compute, Config, Objective, Quantize
from dsflash_jax.ops import Rounding, exact
from dsflash_jax.parallel import ONE, Parallel
from dsflash_jax.rope import Angles
from dsflash_jax.sharding import Layout

MIN_BALANCE_TOKENS = 512  # shorter documents of a row form one sequence of the balance loss (training section 3.2)


@dataclass(frozen=True)
class Setup:
    """What is fixed while a model runs."""

    config: Config
    compute: Compute
    objective: Objective | None = None  # None computes no auxiliary loss
    quantize: Quantize = Quantize()
    layout: Layout = Layout()  # devices that it runs on, one by default; see `sharding`
    taps: bool = False  # whether `forward` returns what the draft head reads

    def rounding(self, name: str, form: quant.Format) -> Rounding:
        """What the policy field `name` does to a value: the format's straight-through rounding, or nothing."""
        return partial(quant.fake, fmt=form) if getattr(self.quantize, name) else exact

    @property
    def parallel(self) -> Parallel:
        """What crosses devices."""
        return self.layout.parallel

    @property
    def inputs(self) -> Rounding:
        """Rounding of the input of FP8 and FP4 linear maps."""
        return self.rounding("linear_fp8", quant.Q8)


@struct.dataclass
class Batch:
    """Packed rows. `segments` numbers the documents of a row from 1, 0 is padding; `positions` restart with each."""

    tokens: Any  # int [B, T]
    segments: Any  # int [B, T]
    positions: Any  # int [B, T]
    targets: Any = None  # int [B, T]: next token of the same document; None to infer
    loss_mask: Any = None  # float [B, T]: 1 where a target counts; None to infer
    engram_rows: Any = None  # int [B, T, tables, N]: n-gram table rows, see `engram.rows`
    images: Any = None  # pixels.Images; None without images


@struct.dataclass
class Ctx:
    """What layers read off positions and segments, derived once a batch."""

    segments: Any  # int [B, T]
    angles: dict[str, Angles]  # "window" and "compressed", at every token
    slots: dict[int, Slots]  # layout of each ratio in use
    slot_angles: dict[int, Angles]  # at the first token of every slot
    groups: Any  # int [B, T]: sequence of the balance loss, -1 for padding
    n_groups: int = struct.field(pytree_node=False)  # bound of them
    engram_rows: Any = None  # int [B, T, tables, N]
    image: Any = None  # bool [B, T]: tokens of image spans; None without images
    key: Any = None  # draws extra slots for the indexer loss
    cache: Any = None  # cache.Cache that the rows go on from; None where they start
    count: Any = None  # int [B]: tokens of each row that are not padding, of rows that go on
    layer: Any = 0  # int []: depth so far, so that layers of one scan draw differently


@struct.dataclass
class Stream:
    """What a layer hands to the next."""

    x: Any  # float [B, T, M, D]
    pre: Any  # float [B, T, M]: collapses the copies for the next sublayer


@struct.dataclass
class Shared:
    """What a Full or Reindex layer makes for the layers after it; None until somebody has."""

    kv: Any = None  # float [B, S, Dh]
    index_keys: Any = None  # float [B, S, Di]
    topk: Any = None  # int [B, T, K]
    candidates: Any = None  # int [B, T, C]
    index_query: Any = None  # float [B, T, Hi, Di]: kept only when Reuse layers teach, too
    index_weight: Any = None  # float [B, T, Hi]


@struct.dataclass
class LayerOut:
    """Sums of one layer with their counts, a leading layer axis is added by `run`; and what the draft head reads."""

    index: Any  # float []: indexer KL summed over queries
    index_count: Any  # float []
    loads: moe.Loads
    taps: Any = None  # float [N, B, T, D]: mean copy of the input stream of each tapped layer, None if not asked for
    made: Any = None  # cache.Made, where rows go on from a cache


def context(c: Config, batch: Batch, key: Array | None = None, p: Parallel = ONE, cache: Any = None) -> Ctx:
    """Derive `Ctx` from the batch.

    Where rows lie on several devices, each sees all their segments and positions, and keeps its part of what follows.
    Behind a cache a row is one document, which begins there.
    """
    count = None if cache is None else jnp.sum(batch.segments > 0, axis=1, dtype=jnp.int32)
    if count is None:
        segments, positions = parallel.whole(p, batch.segments), parallel.whole(p, batch.positions)
        slots = {r: compressor.slots(segments, positions, r) for r in sorted({s.ratio for s in c.table} - {0})}
        slots = jax.tree.map(partial(parallel.own, p), slots)
        groups, n_groups = balance_groups(segments)
        groups = parallel.own(p, groups)
    else:
        t = batch.tokens.shape[1]
        slots = {r: compressor.following(cache.length, count, t, r) for r in cache.kv}
        groups, n_groups = jnp.where(batch.segments > 0, 0, -1), 1
    compressed = rope.frequencies(c, compressed=True)
    return Ctx(
        segments=batch.segments,
        angles={
            "window": rope.angles(rope.frequencies(c, compressed=False), batch.positions),
            "compressed": rope.angles(compressed, batch.positions),
        },
        slots=slots,
        slot_angles={r: rope.angles(compressed, at.positions * r) for r, at in slots.items()},
        groups=groups,
        n_groups=n_groups,
        engram_rows=batch.engram_rows,
        key=key,
        cache=cache,
        count=count,
    )


def balance_groups(segments: Int[Array, "B T"]) -> tuple[Int[Array, "B T"], int]:
    """Sequence of each token over the rows: long documents each their own, the short ones of a row together.

    Padding has -1. Also returns how many numbers there may be.
    """
    b, t = segments.shape
    per_row = t // MIN_BALANCE_TOKENS + 1
    starts = jnp.concatenate([jnp.ones((b, 1), bool), segments[:, 1:] != segments[:, :-1]], axis=1)
    run = jnp.cumsum(starts, axis=1) - 1
    length = jax.vmap(lambda r: jnp.bincount(r, length=t))(run)  # tokens of each run, [B, T]
    long = jnp.take_along_axis(length >= MIN_BALANCE_TOKENS, run, axis=1) & (segments > 0)
    number = jnp.cumsum(starts & long, axis=1)  # 0 is the row's rest
    group = jnp.where(long, number, 0) + jnp.arange(b)[:, None] * per_row
    return jnp.where(segments > 0, group, -1), b * per_row
