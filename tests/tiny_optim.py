"""What the optimiser's tests share: random arrays, one weight's direction, and a plain rate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax.params import Weight, normal
from train import optim as o
from train.optim import Optim

INIT = normal(0.02)
FLAT = Optim(peak=1e-2, final=1e-2, warmup_steps=0, clip=0.0, weight_decay=0.0)  # constant rate, nothing on top
ROUNDING = 1e-5  # float32 sums of some hundred terms, ten multiplications deep, relative to the largest entry
POLAR = 2e-3  # the published schedule leaves singular values up to 2e-3 from 1


def gauss(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arrays(declared, seed: int = 0):
    weights, tree = jax.tree.flatten(declared)
    return jax.tree.unflatten(tree, [jnp.asarray(gauss(seed + i, w.full_shape)) for i, w in enumerate(weights)])


def flat(tree) -> dict:
    """Leaves by path."""
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def directions(weight: Weight, *grads: np.ndarray, optim: Optim = FLAT, params: np.ndarray | None = None):
    """Last of the updates that `grads` cause, divided by -learning rate; the parameters stay as they are."""
    tx = o.build({"w": weight}, optim, 10)
    params = {"w": jnp.zeros(weight.full_shape) if params is None else jnp.asarray(params)}
    state, step = tx.init(params), jax.jit(tx.update)
    for grad in grads:
        update, state = step({"w": jnp.asarray(grad)}, state, params)
    return np.asarray(update["w"]) / -optim.peak


def orthogonal(x: np.ndarray) -> np.ndarray:
    u, _, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return u @ v


def singular_values(x) -> np.ndarray:
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
