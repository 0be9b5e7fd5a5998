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
from math import isfinite, pi, sqrt
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Num

from dsflash_jax.config import check_literals, need
from dsflash_jax.ops import HIGHEST
from dsflash_jax.params import Weight, Weights, leaves
from train import freeze

# X <- a X + b (X X^T) X + c (X X^T)^2 X: a first kind of step that lifts small singular values fast, and a second
# that pulls all of them to 1 (training 2.2, stated in V4 section 2.4).
LIFT = (3.4445, -4.7750, 2.0315)
SETTLE = (2.0, -1.5, 0.5)


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


def build(declared: Weights, optim: Optim, steps: int) -> optax.GradientTransformation:
    """The optimiser of a run of `steps` updates, for parameters in the tree of `declared`.

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
            _muon(optim, _only(declared, names, "muon")),
            decay,
        ),
        "sinkhorn": optax.chain(
            optax.scale(1 - optim.sinkhorn_momentum),  # turns the sum below into beta M + (1 - beta) G
            optax.trace(optim.sinkhorn_momentum, nesterov=True),
            _sinkhorn(optim, _only(declared, names, "sinkhorn")),
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


def sinkhorn_update(
    momentum: Float[Array, "*B R O"], *, iterations: int = 11, tau: float = 1e-3, eps: float = 1e-20
) -> Float[Array, "*B R O"]:
    """Momentum balanced over rows and columns, sqrt(O) * U: a row that moves has root mean square 1. float32.

    U starts as the momentum, rows with norm <= tau * (mean row norm) set to zero. Odd passes divide rows, even passes
    columns, by (their norm + eps). Only the scales of U = diag(r) G diag(c) are kept: a row pass is
    r <- r / (r a + eps) with a = ||G_i * c||, a column pass the same for c. A zero row or column stays zero. Leading
    axes are separate matrices. A row that was never read has no momentum, so it is below the threshold and does not
    move; a row read once moves on by its decaying momentum until that falls below the threshold.
    Source: training 2.3. Cost: `iterations` + 2 reads of the matrix.
    """
    g = momentum.astype(jnp.float32)
    norms = _norm(g, -1)  # [*B, R]
    r = (norms > tau * jnp.mean(norms, axis=-1, keepdims=True)).astype(jnp.float32)
    c = jnp.ones(g.shape[:-2] + g.shape[-1:], jnp.float32)  # [*B, O]

    def rescale(scale: Array, norm: Array) -> Array:
        # Scale 1/eps for a zero column would overflow on the second pass and give 0 * inf.
        return jnp.where(norm > 0, scale / (scale * norm + eps), scale)

    def pair(_: Any, scales: tuple[Array, Array]) -> tuple[Array, Array]:
        r, c = scales
        c = rescale(c, _norm(r[..., None] * g, -2))
        return rescale(r, _norm(g * c[..., None, :], -1)), c

    r, c = jax.lax.fori_loop(0, iterations // 2, pair, (rescale(r, norms), c))
    return r[..., None] * g * c[..., None, :] * sqrt(g.shape[-1])


def _norm(x: Array, axis: int) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=axis))


def _muon(optim: Optim, declared: Any) -> optax.GradientTransformation:
    """`muon_update` of every unit matrix of every weight, without state; equal shapes share one loop."""
    weights = jax.tree.leaves(declared)
    splits = [() if optim.mhc_fused and _out_axis(weight) == "mix" else weight.split for weight in weights]
    update = partial(muon_update, steps=optim.muon_steps, rms=optim.muon_rms)

    def directions(momenta: Any, params: Any) -> Any:
        arrays, tree = jax.tree.flatten(momenta)
        cut = [_cut(x, weight, split, axis=-1) for x, weight, split in zip(arrays, weights, splits, strict=True)]
        updated = iter(_by_shape(update, [part for parts in cut for part in parts]))
        joined = [_join([next(updated) for _ in parts], w, axis=-1) for parts, w in zip(cut, weights, strict=True)]
        return jax.tree.unflatten(tree, joined)

    return optax.stateless(directions)


def _by_shape(update: Callable[[Array], Array], matrices: list[Array]) -> list[Array]:
    """Apply `update`, which must commute with transposing, to arrays of matrices [*B, I, O]: once for each shape.

    All matrices of a shape, tall ones transposed, form one stack [N, rows, cols], rows <= cols. The program so holds
    one loop for each distinct shape, not for each weight. A stack of several arrays is one copy of them, and its
    temporaries live for all of them at once; a stack of one array is that array.
    """
    shapes = [tuple(sorted(x.shape[-2:])) for x in matrices]
    results = list(matrices)
    for shape in dict.fromkeys(shapes):
        places = [i for i, other in enumerate(shapes) if other == shape]
        wide = [_transpose_tall(matrices[i], matrices[i]) for i in places]
        stacks = [x.reshape(-1, *shape) for x in wide]
        ends = np.cumsum([len(stack) for stack in stacks])
        # The one place where a whole stack is at hand, before and after: a sharding along N belongs here.
        stack = update(jnp.concatenate(stacks))
        for i, x, part in zip(places, wide, jnp.split(stack, ends[:-1]), strict=True):
            results[i] = _transpose_tall(part.reshape(x.shape), matrices[i])
    return results


def _transpose_tall(x: Array, like: Array) -> Array:
    """x with its last two axes swapped if the matrices of `like` have more rows than columns."""
    return jnp.swapaxes(x, -2, -1) if like.shape[-2] > like.shape[-1] else x


def _sinkhorn(optim: Optim, declared: Any) -> optax.GradientTransformation:
    """Scaled `sinkhorn_update` of every table, without state."""
    update = partial(
        sinkhorn_update, iterations=optim.sinkhorn_iterations, tau=optim.sinkhorn_tau, eps=optim.sinkhorn_eps
    )

    def direction(momentum: Array, weight: Weight) -> Array:
        scale = optim.sinkhorn_gamma * (optim.table_multiplier if weight.axes[0] == "ngram_rows" else 1)
        parts = [update(part) for part in _cut(momentum, weight, weight.split, axis=-2)]
        return scale * _join(parts, weight, axis=-2)

    return optax.stateless(lambda momenta, params: jax.tree.map(direction, momenta, declared))


def _cut(x: Array, weight: Weight, split: tuple[int, ...], axis: int) -> list[Array]:
    """The unit matrices of a stored weight, their axes moved last: one array for each part along `axis`."""
    x = jnp.moveaxis(x, _matrix_places(weight), (-2, -1))
    return jnp.split(x, np.cumsum(split)[:-1], axis=axis) if split else [x]


def _join(parts: list[Array], weight: Weight, axis: int) -> Array:
    """The stored weight of the parts that `_cut` made."""
    return jnp.moveaxis(jnp.concatenate(parts, axis=axis), (-2, -1), _matrix_places(weight))


def _matrix_places(weight: Weight) -> tuple[int, ...]:
    return tuple(len(weight.stack) + i for i in weight.matrix)


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
