"""Training losses from the model's outputs: chunked cross-entropy and the auxiliary terms.

Everything is a sum with its denominator until the last line, so that devices and microbatches add up exactly.
Source: training sections 3.2 and 4.2.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dsflash_jax import compressor, flow, model, parallel
from dsflash_jax.config import Config, Objective
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.modes import Mode
from dsflash_jax.params import Weights


@struct.dataclass
class CrossEntropy:
    """Sums over the positions that count."""

    nll: Any  # float []: negative log-likelihood, nats
    tokens: Any  # float []: positions counted
    hits: Any  # float []: positions whose largest logit is the target
    z: Any  # float []: squared log-partition


@struct.dataclass
class Report:
    """What a step says beside its loss; arrays with a leading L are by layer id."""

    loss: Any  # float []: the sum that is differentiated
    ce: CrossEntropy
    index: Any  # float [L]: mean indexer KL a query, 0 where a layer has none
    balance: Any  # float [L]: sequence balance loss
    counts: Any  # float [L, E]: tokens of text each expert was chosen for
    counts_vl: Any  # float [L, E]: tokens of image spans each expert was chosen for
    dropped: Any  # float [L]: rows that found no room on the way to an expert or a table; a step with one is refused


def cross_entropy(
    head: Float[Array, "V D"],
    y: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    mask: Float[Array, "B T"],
    chunk: int,
) -> CrossEntropy:
    """Cross-entropy of head(y) against targets; logits exist for `chunk` tokens of each row at a time.

    Backward computes a chunk's logits again instead of keeping them. Cost: 2 B T D V FLOPs forward.
    """
    b, t, _ = y.shape
    chunk = min(chunk, t)
    n = -(-t // chunk)
    pad = n * chunk - t

    def tiles(a: Array) -> Array:  # [n, B, chunk, ...]
        a = jnp.pad(a, ((0, 0), (0, pad)) + ((0, 0),) * (a.ndim - 2))
        return jnp.moveaxis(a.reshape(b, n, chunk, *a.shape[2:]), 1, 0)

    @jax.checkpoint
    def one(total: CrossEntropy, tile: tuple[Array, Array, Array]) -> tuple[CrossEntropy, None]:
        y, target, mask = tile
        logits = model.logits(head, y)  # [B, chunk, V]
        log_z = jax.nn.logsumexp(logits, axis=-1)
        picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        hit = (jnp.argmax(logits, axis=-1) == target).astype(jnp.float32)
        sums = CrossEntropy(*(jnp.sum(a * mask) for a in (log_z - picked, jnp.ones_like(mask), hit, jnp.square(log_z))))
        return jax.tree.map(jnp.add, total, sums), None

    start = CrossEntropy(*(jnp.zeros((), jnp.float32),) * 4)
    total, _ = jax.lax.scan(one, start, (tiles(y), tiles(targets), tiles(mask.astype(jnp.float32))))
    return total


def index_shares(c: Config, aim: Objective) -> np.ndarray:
    """Weight of each layer's indexer KL, [L] float32: 1 for a producer, 1 / group for each layer of a group's mean."""
    shares = np.zeros(c.num_hidden_layers, np.float32)
    group: list[int] = []
    for i, spec in enumerate(c.table):
        if spec.selects:
            group = [i]
        elif spec.mode is Mode.REUSE and aim.index_teacher == "group_mean":
            group.append(i)
        else:
            continue
        shares[group] = 1.0 / len(group)
    return shares


@struct.dataclass
class Counts:
    """What the sums of a batch are divided by."""

    tokens: Any  # float []: targets that count
    queries: Any  # float [L]: queries of each layer's indexer KL, those that see at least two slots
    sequences: Any  # float []: sequences of the balance loss


def counts(setup: Setup, batch: Batch) -> Counts:
    """The denominators of a batch, from its documents alone; `total` takes those of a batch with each part of it.

    On several devices they are of all of them.
    """
    c, p = setup.config, setup.parallel
    segments, positions = parallel.whole(p, batch.segments), parallel.whole(p, batch.positions)
    groups, n = flow.balance_groups(segments)
    sequences = jnp.sum(jnp.zeros((n,), jnp.float32).at[groups].max(1.0, mode="drop", wrap_negative_indices=False))
    seen = {0: jnp.float32(0)}
    for ratio in {spec.ratio for spec in c.table} - {0}:
        seen[ratio] = jnp.sum(compressor.slots(segments, positions, ratio).visible > 1, dtype=jnp.float32)
    queries = jnp.stack([seen[spec.ratio] for spec in c.table])
    once = jax.tree.map(lambda a: a / p.size(p.tokens), (queries, sequences))
    return jax.tree.map(partial(parallel.total, p), Counts(jnp.sum(batch.loss_mask, dtype=jnp.float32), *once))


def total(
    setup: Setup, w: Weights, batch: Batch, key: Any = None, whole: Counts | None = None
) -> tuple[Float[Array, ""], Report]:
    """Mean cross-entropy a counted token + weighted indexer KL, balance and z terms, and the step's report.

    Each layer's KL is a mean over its queries with at least two visible slots; its balance loss a mean over sequences.
    `setup` must have an objective. On several devices this is a device's share of the loss, to be added up by the
    caller, and the report is of all of them. Of a part of a batch, with the counts of the `whole`, it is the part's
    share: shares and reports of the parts add up to those of the batch.
    """
    c, aim = setup.config, setup.objective
    assert aim is not None, "the loss needs an objective: without one `forward` computes no auxiliary sums"
    p = setup.parallel
    y, out = model.forward(setup, w, batch, key)
    with jax.named_scope("cross_entropy"):
        ce = cross_entropy(model.whole(setup, w, "head"), y, batch.targets, batch.loss_mask, setup.compute.loss_chunk)
    every = partial(parallel.total, p)
    if whole is None:
        whole = jax.tree.map(every, Counts(ce.tokens, out.index_count, out.loads.sequences[0]))
    index = out.index / jnp.maximum(whole.queries, 1.0)
    balance = out.loads.balance / jnp.maximum(whole.sequences, 1.0)
    tokens = jnp.maximum(whole.tokens, 1.0)
    loss = ce.nll / tokens
    if aim.z_weight > 0:
        loss += aim.z_weight * ce.z / tokens
    if aim.index_weight > 0:
        loss += aim.index_weight * jnp.sum(index * jnp.asarray(index_shares(c, aim)))
    if aim.balance_weight > 0:
        loss += aim.balance_weight * jnp.sum(balance)
    report = Report(loss, ce, index, balance, out.loads.counts, out.loads.counts_vl, out.loads.dropped)
    return loss / p.size(p.heads), jax.tree.map(every, report)
