"""Optimiser: Muon for matrices, Sinkhorn-balanced momentum for tables, AdamW for the rest.

Every weight's route is read from its declaration: `labels` names it, `build` composes one optax transformation

    zero what is frozen -> clip by global norm -> direction of each family (+ decay * weight) -> times -learning rate

so one learning rate drives all families and decay is decoupled. Source: training sections 2, 3.2 and 10.

State is float32 and shaped like the parameters, so it is sharded like them: one momentum for a `muon` or `sinkhorn`
weight (4 bytes an entry), two moments for an AdamW weight (8 bytes), nothing for a `rule` weight; and three int32
counters, with an image tower five, all equal to the number of updates done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isfinite, pi
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Num

from dsflash_jax import sharding
from dsflash_jax.config import check_literals, need
from dsflash_jax.params import Weight, Weights, leaves
from dsflash_jax.sharding import ONE, Layout
from train import freeze, newton_schulz, sinkhorn


@dataclass(frozen=True)
class Optim:
    """Optimiser settings. "stated" is printed in the report, "our choice" is what the report leaves open."""

    peak: float = 2.6e-4  # learning rate after warm-up (stated)
    final: float = 2.6e-5  # learning rate from `decay_end` on (stated)
    warmup_steps: int = 2000  # updates of the linear warm-up (stated)
    decay_start: float = 28 / 45  # fraction of all steps where the cosine starts (stated: 28T of 45T tokens)
    decay_end: float = 40 / 45  # fraction of all steps where the cosine ends (stated: 40T of 45T tokens)
    clip: float = 1.0  # largest global gradient norm, 0 = no clipping (our choice; stated for V3 only)
    weight_decay: float = 0.1  # of matrices and norms, times the learning rate (stated)
    muon_momentum: float = 0.95  # Nesterov momentum of Muon (stated)
    muon_steps: tuple[int, int] = (8, 2)  # Newton-Schulz steps of either kind (stated for V4, carried over)
    muon_rms: float = 0.18  # root mean square of a Muon update before the learning rate (stated)
    sinkhorn_momentum: float = 0.95  # Nesterov momentum of tables (stated)
    sinkhorn_iterations: int = 11  # normalisations, odd: rows first and last (stated)
    sinkhorn_tau: float = 1e-3  # rows of at most this times the mean row norm do not move (stated)
    sinkhorn_eps: float = 1e-20  # added to every norm divided by (stated)
    sinkhorn_gamma: float = 0.18  # root mean square of a moved row before the learning rate (stated)
    table_multiplier: float = 5.0  # times the learning rate of n-gram tables (stated; tables only is our choice)
    adam_betas: tuple[float, float] = (0.9, 0.95)  # decay of the two AdamW moments (stated)
    adam_eps: float = 1e-20  # added to the root of the second moment (stated)
    bias_rate: float = 0.001  # step of the router bias rule (stated)
    router_family: Literal["muon", "adamw"] = "muon"  # of router gates; adamw decays them too (our choice)
    vision_start: float = 28 / 45  # fraction of all steps before which the image tower is frozen (stated: 28T of 45T)
    vision_rate: float = 0.1  # times the learning rate of the tower once it is not (our choice; stated: "smaller")
    mhc_fused: bool = False  # treat the hyper-connection projections as one matrix, not three (our choice)

    def __post_init__(self) -> None:
        check_literals(self)
        for key, value in vars(self).items():
            need(not isinstance(value, float) or isfinite(value), f"optim.{key} must be finite, got {value}")
        need(0 <= self.final <= self.peak, f"optim needs 0 <= final <= peak, got final={self.final}, peak={self.peak}")
        need(self.warmup_steps >= 0, f"optim.warmup_steps must not be negative, got {self.warmup_steps}")
        need(0 <= self.decay_start < self.decay_end <= 1,
             "optim.decay_start and decay_end are fractions of the run with 0 <= start < end <= 1, got "
             f"{self.decay_start} and {self.decay_end}; for no decay set final to peak")  # fmt: skip
        need(0 <= self.vision_start <= 1,
             f"optim.vision_start is a fraction of the run, 0 trains the image tower at once and 1 never, got "
             f"{self.vision_start}")  # fmt: skip
        betas = {"muon_momentum": self.muon_momentum, "sinkhorn_momentum": self.sinkhorn_momentum}
        betas |= {f"adam_betas[{i}]": beta for i, beta in enumerate(self.adam_betas)}
        for key, value in betas.items():
            need(0 <= value < 1, f"optim.{key} must be in [0, 1), got {value}")
        for key in ("muon_rms", "sinkhorn_eps", "sinkhorn_gamma", "adam_eps"):
            need(getattr(self, key) > 0, f"optim.{key} must be positive, got {getattr(self, key)}")
        for key in ("clip", "weight_decay", "sinkhorn_tau", "table_multiplier", "bias_rate", "vision_rate"):
            need(getattr(self, key) >= 0, f"optim.{key} must not be negative, got {getattr(self, key)}")
        need(min(self.muon_steps) >= 0, f"optim.muon_steps must not be negative, got {self.muon_steps}")
        need(self.sinkhorn_iterations % 2 == 1,
             f"optim.sinkhorn_iterations must be odd: rows come last, got {self.sinkhorn_iterations}")  # fmt: skip


def schedule(optim: Optim, steps: int) -> optax.Schedule:
    """Learning rate of update t = 0 .. steps - 1: linear warm-up, constant, cosine, constant.

    Update t of the warm-up uses peak * (t + 1) / warmup_steps: the first update moves already, update
    warmup_steps - 1 is the first at peak. From s = decay_start * steps to e = decay_end * steps it is
    final + (peak - final) / 2 * (1 + cos(pi (t - s) / (e - s))), before that peak, after it final. float32; update
    numbers are exact below 2^24. Raises ValueError when the warm-up does not end before the decay starts.
    Source: training 2.4.
    """
    need(steps >= 1, f"schedule: the run needs at least 1 step, got {steps}")
    start, end = optim.decay_start * steps, optim.decay_end * steps
    need(optim.warmup_steps <= start,
         f"schedule: warmup_steps={optim.warmup_steps} does not end before the decay starts at step {start:g} of "
         f"{steps}: shorten the warm-up or raise decay_start={optim.decay_start:g}")  # fmt: skip

    def rate(count: Any) -> Float[Array, ""]:
        t = jnp.asarray(count, jnp.float32)
        warm = optim.peak * (t + 1) / max(optim.warmup_steps, 1)
        progress = jnp.clip((t - start) / (end - start), 0, 1)
        decayed = optim.final + (optim.peak - optim.final) / 2 * (1 + jnp.cos(pi * progress))
        return jnp.where(t < optim.warmup_steps, warm, decayed)

    return rate


def labels(declared: Weights, optim: Optim = Optim()) -> Any:
    """The transformation of every weight: "muon", "sinkhorn", "adamw_decay", "adamw" or "rule", as a tree.

    A router gate is a "muon" weight whose out axis is `experts`. Raises ValueError naming the weight when its family
    is unknown or its declaration does not describe matrices.
    """
    families = {"muon": "muon", "sinkhorn": "sinkhorn", "norm": "adamw_decay", "scalar": "adamw", "rule": "rule"}

    def label(path: Any, weight: Weight) -> str:
        name = _name(path)
        need(weight.family in families,
             f"weight {name}: unknown optimiser family {weight.family!r}, expected {list(families)}")  # fmt: skip
        if weight.family in ("muon", "sinkhorn"):
            _check_matrix(name, weight)
        if weight.family == "muon" and optim.router_family == "adamw" and _out_axis(weight) == "experts":
            return "adamw_decay"
        return families[weight.family]

    return jax.tree_util.tree_map_with_path(label, declared)


def build(
    declared: Weights, optim: Optim, steps: int, layout: Layout = ONE, mesh: Mesh | None = None
) -> optax.GradientTransformation:
    """The optimiser of a run of `steps` updates, for parameters in the tree of `declared`.

    On several devices parameters and gradients lie on `mesh` as `sharding.specs` says, and so does what comes out.
    `update` needs the parameters. Parameters are the float32 master weights; `init` raises ValueError naming the
    first whose shape or dtype differs from its declaration. `rule` weights get a zero update.
    """
    names = labels(declared, optim)
    by_path = leaves(declared)
    decay = optax.add_decayed_weights(optim.weight_decay)
    adam = optax.scale_by_adam(*optim.adam_betas, eps=optim.adam_eps)
    families = {
        "muon": optax.chain(
            optax.trace(optim.muon_momentum, nesterov=True),  # M <- mu M + G, out mu M + G
            _muon(optim, _only(declared, names, "muon"), layout, mesh),
            decay,
        ),
        "sinkhorn": optax.chain(
            optax.scale(1 - optim.sinkhorn_momentum),  # turns the sum below into beta M + (1 - beta) G
            optax.trace(optim.sinkhorn_momentum, nesterov=True),
            _sinkhorn(optim, _only(declared, names, "sinkhorn"), layout, mesh),
        ),
        "adamw_decay": optax.chain(adam, decay),
        "adamw": adam,
        "rule": optax.set_to_zero(),
    }
    stages = [
        _clip(declared, optim.clip),
        optax.partition(families, names),
        optax.scale_by_learning_rate(schedule(optim, steps)),
    ]
    if any(jax.tree.leaves(freeze.tower(declared))):
        trained = partial(freeze.trained, declared, optim.vision_start * steps)
        stages = [freeze.by_step(trained), *stages, freeze.by_step(partial(trained, rate=optim.vision_rate))]
    chain = optax.chain(*stages)

    def init(params: Any) -> optax.OptState:
        for path, array in jax.tree_util.tree_leaves_with_path(params):
            name, shape = _name(path), by_path[_name(path)].full_shape
            need(array.shape == shape, f"weight {name}: declared with shape {shape}, got an array of {array.shape}")
            need(array.dtype == jnp.float32,
                 f"weight {name}: updates go to float32 master weights, got {array.dtype}: cast it")  # fmt: skip
        return chain.init(params)

    return optax.GradientTransformation(init, chain.update)


def grad_norm(declared: Weights, grads: Any) -> Float[Array, ""]:
    """Global L2 norm of the gradients of all weights but the `rule` ones, summed in float32. Source: training 2.4."""
    squares = jax.tree.map(
        lambda g, w: jnp.zeros((), jnp.float32) if w.family == "rule" else jnp.sum(jnp.square(g.astype(jnp.float32))),
        grads,
        declared,
    )
    return jnp.sqrt(sum(jax.tree.leaves(squares), jnp.zeros((), jnp.float32)))


def router_bias_update(bias: Float[Array, "*B E"], counts: Num[Array, "*B E"], rate: float) -> Float[Array, "*B E"]:
    """bias + rate * sign(mean(counts) - counts): experts with less than the mean load become more likely.

    `counts` are tokens an expert got in the global batch, each leading index (layer, modality) a set of its own. Equal
    counts, and no tokens at all, leave the bias as it is. Source: training 3.2.
    """
    # Differences to the fullest expert are exact, so equal counts give exactly 0 however large they are.
    excess = (counts - jnp.max(counts, axis=-1, keepdims=True)).astype(jnp.float32)
    return bias + rate * jnp.sign(jnp.mean(excess, axis=-1, keepdims=True) - excess).astype(bias.dtype)


def _muon(optim: Optim, declared: Any, at: Layout, mesh: Mesh | None) -> optax.GradientTransformation:
    """`newton_schulz.muon_update` of every unit matrix of every weight, without state."""
    weights = jax.tree.leaves(declared)
    splits = [() if optim.mhc_fused and _out_axis(weight) == "mix" else weight.split for weight in weights]
    update = partial(newton_schulz.muon_update, steps=optim.muon_steps, rms=optim.muon_rms)

    def directions(momenta: Any) -> Any:
        arrays, tree = jax.tree.flatten(momenta)
        return jax.tree.unflatten(tree, newton_schulz.directions(update, arrays, weights, splits, at))

    return optax.stateless(_on_shards(directions, declared, at, mesh))


def _sinkhorn(optim: Optim, declared: Any, at: Layout, mesh: Mesh | None) -> optax.GradientTransformation:
    """Scaled `sinkhorn.sinkhorn_update` of every table, without state."""
    how = {"iterations": optim.sinkhorn_iterations, "tau": optim.sinkhorn_tau, "eps": optim.sinkhorn_eps}

    def direction(momentum: Array, weight: Weight) -> Array:
        scale = optim.sinkhorn_gamma * (optim.table_multiplier if weight.axes[0] == "ngram_rows" else 1)
        return scale * sinkhorn.direction(momentum, weight, at, **how)

    return optax.stateless(_on_shards(lambda momenta: jax.tree.map(direction, momenta, declared), declared, at, mesh))


def _on_shards(function: Callable[[Any], Any], declared: Any, at: Layout, mesh: Mesh | None) -> Callable[..., Any]:
    """`function` of the momenta of `declared`, on several devices of what each of them stores."""
    if at.devices == 1:
        return lambda momenta, params: function(momenta)
    specs = sharding.specs(declared, at)
    return lambda momenta, params: jax.shard_map(
        function, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False
    )(momenta)


def _only(declared: Weights, names: Any, keep: str) -> Any:
    """The declarations of one label, in the masked tree that `optax.partition` hands to its transformation."""
    return jax.tree.map(lambda weight, name: weight if name == keep else optax.MaskedNode(), declared, names)


def _clip(declared: Weights, limit: float) -> optax.GradientTransformation:
    """Scale all gradients by limit / max(norm, limit); a norm within the limit changes no bit."""
    if limit == 0:
        return optax.identity()

    def clip(grads: Any, params: Any) -> Any:
        scale = limit / jnp.maximum(grad_norm(declared, grads), limit)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)

    return optax.stateless(clip)


def _check_matrix(name: str, weight: Weight) -> None:
    rank = len(weight.shape)
    need(len(set(weight.matrix)) == 2 and all(0 <= i < rank for i in weight.matrix),
         f"weight {name}: matrix={weight.matrix} must name two different axes of its shape {weight.shape}; a vector "
         "belongs to family 'norm' or 'scalar'")  # fmt: skip
    axis = weight.matrix[1] if weight.family == "muon" else weight.matrix[0]
    need(not weight.split or sum(weight.split) == weight.shape[axis],
         f"weight {name}: split={weight.split} adds up to {sum(weight.split)}, but axis {axis} of its shape "
         f"{weight.shape} has {weight.shape[axis]} entries")  # fmt: skip


def _out_axis(weight: Weight) -> str:
    return weight.axes[weight.matrix[1]]


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
