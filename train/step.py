"""One jitted training step: loss, gradients, update, router bias rule; and one evaluation step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool

from dsflash_jax import loss, model, modes, parallel, sharding
from dsflash_jax.config import Config
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.params import Weights, leaves
from train import freeze, optim
from train.config import Run

Step = Callable[["TrainState", Batch], tuple["TrainState", "Metrics"]]


@struct.dataclass
class TrainState:
    """All that a run carries from step to step, and all that a checkpoint holds beside the data position."""

    step: Any  # int []: updates done
    params: Weights
    opt_state: Any
    key: Any  # raw key data; each step folds its number in


@struct.dataclass
class Finite:
    """Which numbers of a step are finite; leaves in the order of `params.leaves`."""

    loss: Any  # bool []
    gradients: Any  # bool [leaves]
    weights: Any  # bool [leaves]: after the update
    optimiser: Any  # bool []: its state after the update
    routed: Any  # bool []: every row reached its expert

    @property
    def everything(self) -> Any:
        """Bool []: no number overflowed or is undefined."""
        return self.loss & self.gradients.all() & self.weights.all() & self.optimiser & self.routed


@struct.dataclass
class Metrics:
    """What a step reports."""

    report: loss.Report
    grad_norm: Any  # float []: of what is trained at this step, before clipping
    learning_rate: Any  # float []: of this update, `schedule(updates done before it)`
    finite: Finite  # unless everything is, the step changed nothing


def initial(run: Run) -> TrainState:
    """The state before the first step."""
    weights_key, loss_key = jax.random.split(jax.random.key(run.seed))
    declared = declare(run.setup)
    params = model.init(declared, weights_key)
    tx = optim.build(declared, run.optim, run.steps)
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), jax.random.key_data(loss_key))


def make_step(run: Run, mesh: Mesh | None = None) -> Step:
    """The training step of a run, a pure function; jit it with the state donated.

    A step whose loss, gradient, new weight or new optimiser state is not finite returns the old state.
    """
    declared = declare(run.setup)
    tx = optim.build(declared, run.optim, run.steps, run.layout, mesh)
    rates = optim.schedule(run.optim, run.steps)
    trained = partial(freeze.trained, declared, run.optim.vision_start * run.steps)
    layers = bias_layers(run.model)
    differentiate = gradients(run.setup, run.accumulate, mesh)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        (total, report), grads = differentiate(state.params, batch, key)
        with jax.named_scope("optimiser"):
            updates, opt_state = tx.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            params = balance(params, report, layers, run.optim.bias_rate)
        fine = _finite(opt_state).all(), report.dropped.sum() == 0
        finite = Finite(jnp.isfinite(total), _finite(grads), _finite(params), *fine)
        grad_norm = optim.grad_norm(declared, trained(grads, state.step))
        made = Metrics(report, grad_norm, jnp.float32(rates(state.step)), finite)
        new = TrainState(state.step + 1, params, opt_state, state.key)
        return jax.tree.map(partial(jnp.where, finite.everything), new, state), made

    return step


def declare(setup: Setup) -> dict[str, Any]:
    """The weights of a run as its layout stores them."""
    return sharding.stored(model.declare(setup.config), setup.layout)


def gradients(setup: Setup, parts: int = 1, mesh: Mesh | None = None) -> Callable[..., Any]:
    """((loss, report), gradients) of (weights, batch, key).

    With more than one part the leaves of a batch are [parts, rows, ...]; parts are differentiated one after the other,
    each with the counts of the whole batch, and their gradients added up in float32.
    """
    one = jax.value_and_grad(total_loss(setup, mesh), has_aux=True)
    if parts == 1:
        return one

    def every(w: Weights, batch: Batch, key: Array) -> Any:
        of_part = jax.lax.map(partial(counts, setup, mesh=mesh), batch)
        whole = jax.tree.map(partial(jnp.sum, axis=0), of_part)

        def add(sums: Any, turn: tuple[Array, Batch]) -> tuple[Any, None]:
            i, part = turn
            made = one(w, part, jax.random.fold_in(key, i), whole)
            # XLA would move a sum over devices behind the loop, and fails where it finds a way only half.
            return jax.tree.map(lambda a, b: a + jax.lax.optimization_barrier(b), sums, made), None

        first = jax.tree.map(lambda a: a[0], batch)
        shapes = jax.eval_shape(one, w, first, key, whole)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
        if mesh is not None:  # gradients lie like the weights
            where = jax.tree.map(partial(NamedSharding, mesh), sharding.specs(declare(setup), setup.layout))
            zeros = (zeros[0], jax.lax.with_sharding_constraint(zeros[1], where))
        return jax.lax.scan(add, zeros, (jnp.arange(parts), batch))[0]

    return every


def total_loss(setup: Setup, mesh: Mesh | None = None) -> Callable[..., tuple[Array, loss.Report]]:
    """`loss.total` of whole arrays (weights, batch, key, counts or None); on several devices each adds its share."""
    at = setup.layout
    if mesh is None:
        return partial(loss.total, setup)
    stored = sharding.specs(declare(setup), at)

    def value(w: Weights, batch: Batch, key: Array, whole: loss.Counts | None = None) -> tuple[Array, loss.Report]:
        def one(w: Weights, batch: Batch, key: Array, whole: loss.Counts | None) -> tuple[Array, loss.Report]:
            share, report = loss.total(setup, w, batch, key, whole)
            return share[None], report

        inside, outside = (stored, sharding.batch_specs(batch, at), P(), P()), (P(at.parallel.everything), P())
        run = jax.shard_map(one, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=False)
        shares, report = run(w, batch, key, whole)
        return shares.sum(), report

    return value


def counts(setup: Setup, batch: Batch, mesh: Mesh | None = None) -> loss.Counts:
    """`loss.counts` of a whole batch."""
    if mesh is None:
        return loss.counts(setup, batch)
    inside = (sharding.batch_specs(batch, setup.layout),)
    one = partial(loss.counts, setup)
    return jax.shard_map(one, mesh=mesh, in_specs=inside, out_specs=P(), check_vma=False)(batch)


def _finite(tree: Any) -> Bool[Array, " leaves"]:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)])


def bias_layers(c: Config) -> dict[str, np.ndarray]:
    """For each router bias leaf, of text and of images, the layer ids of its stacked copies."""
    out: dict[str, np.ndarray] = {}
    declared = leaves(model.declare(c))
    for i, place in enumerate(modes.places(modes.plan(c.table))):
        for name in ("bias", "bias_vl"):
            path = "/".join(("layers", *place.path, "ffn/gate", name))
            if path in declared:
                out.setdefault(path, np.zeros(declared[path].stack, np.int32))[place.index] = i
    return out


def balance(params: Weights, report: loss.Report, layers: dict[str, np.ndarray], rate: float) -> Any:
    """Apply the router bias rule to every layer, from the expert counts of the whole batch.

    Tokens of text move `bias` and those of image spans `bias_vl`; a batch without either leaves its bias alone.
    """

    def update(path: Any, leaf: Array) -> Array:
        ids = layers.get("/".join(k.key for k in path))
        if ids is None:
            return leaf
        counts = report.counts_vl if path[-1].key == "bias_vl" else report.counts
        return optim.router_bias_update(leaf, counts[ids], rate)

    return jax.tree_util.tree_map_with_path(update, params)


def evaluate(setup: Setup, params: Weights, batch: Batch, mesh: Mesh | None = None) -> tuple[loss.CrossEntropy, Array]:
    """Cross-entropy sums of a held-out batch, and how many rows found no room on the way to an expert or a table.

    Pass a setup without an objective to leave out the auxiliary losses.
    """

    def one(params: Weights, batch: Batch) -> tuple[loss.CrossEntropy, Array]:
        y, out = model.forward(setup, params, batch)
        head = model.whole(setup, params, "head")
        ce = loss.cross_entropy(head, y, batch.targets, batch.loss_mask, setup.compute.loss_chunk)
        return jax.tree.map(partial(parallel.total, setup.parallel), (ce, out.loads.dropped.sum()))

    if mesh is None:
        return one(params, batch)
    inside = (sharding.specs(declare(setup), setup.layout), sharding.batch_specs(batch, setup.layout))
    return jax.shard_map(one, mesh=mesh, in_specs=inside, out_specs=P(), check_vma=False)(params, batch)
