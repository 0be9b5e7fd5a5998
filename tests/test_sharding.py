"""sharding.py and parallel.py: every layout on eight devices computes what one device computes."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding

from dsflash_jax import model, sharding
from dsflash_jax.config import Objective
from dsflash_jax.flow import Setup
from dsflash_jax.sharding import Layout
from train import optim, step
from train.optim import Optim

C = tiny.with_modes("Se F2 F1pe X U", sliding_window=6)
ROWS, WIDTH = 4, 32
DOCUMENTS = [[32], [5, 11, 13], [17, 15], [9, 2, 20]]
LAYOUTS = {
    "expert, rows": Layout(expert=4),
    "expert, tokens": Layout(expert=4, expert_splits="tokens"),
    "expert, buckets": Layout(expert=4, capacity=4.0),
    "context": Layout(context=8),
    "data x fsdp x tensor": Layout(data=2, fsdp=2, tensor=2),
    "fsdp x expert x context, buckets": Layout(fsdp=2, expert=2, context=2, capacity=2.0),
    "data x context x expert on tokens": Layout(data=2, expert=2, context=2, expert_splits="tokens"),
    "context x tensor": Layout(context=4, tensor=2),
}
AIM = Objective(balance_weight=0.01, index_teacher="group_mean")


def setup_of(layout: Layout) -> Setup:
    return Setup(C, tiny.STRICT, AIM, layout=dataclasses.replace(layout, whole=0))


def padded(weights, layout):
    """Weights with the n-gram rows that the layout adds."""
    stored = sharding.stored(model.declare(C), dataclasses.replace(layout, whole=0))
    fill = lambda w, a: jnp.pad(a, [(0, n - m) for n, m in zip(w.full_shape, a.shape, strict=True)])  # noqa: E731
    return sharding.map_pairs(fill, stored, weights)


def graded(layout: Layout):
    setup = setup_of(layout)
    # Half as large as elsewhere: eight layers then amplify a rounding error little, and 1e-5 is far above it.
    tame = sharding.map_pairs(lambda d, a: a / 2 if d.family == "muon" else a, model.declare(C), tiny.weights(C))
    weights, batch = padded(tame, layout), tiny.batch(C, tiny.tokens(C, ROWS, WIDTH), DOCUMENTS)
    devices = jax.devices()[: layout.devices]
    mesh = setup.layout.mesh(devices)
    place = lambda tree, specs: jax.device_put(tree, jax.tree.map(partial(NamedSharding, mesh), specs))  # noqa: E731
    weights = place(weights, sharding.specs(step.declare(setup), setup.layout))
    batch = place(batch, sharding.batch_specs(batch, setup.layout))
    value = jax.value_and_grad(step.total_loss(setup, mesh), has_aux=True)
    (loss, report), grads = tiny.jit(value)(weights, batch, jax.random.key(1))
    return jax.device_get((loss, report, grads))


@pytest.fixture(scope="module")
def alone():
    return graded(Layout())


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_report_and_gradients_are_those_of_one_device(name, alone):
    layout = LAYOUTS[name]
    loss, report, grads = graded(layout)
    np.testing.assert_allclose(loss, alone[0], rtol=1e-5)
    assert max(tiny.worst(report, alone[1]).values()) < 1e-5
    want = jax.device_get(padded(alone[2], layout))
    bad = {k: v for k, v in tiny.worst(grads, want).items() if v > 1e-5}
    assert not bad


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_update_is_that_of_one_device(name):
    layout = dataclasses.replace(LAYOUTS[name], whole=0)

    def updated(layout: Layout):
        declared = sharding.stored(model.declare(C), layout)
        tx = optim.build(declared, Optim(warmup_steps=1), 10)
        mesh = layout.mesh(jax.devices()[: layout.devices])
        place = partial(
            jax.device_put, device=jax.tree.map(partial(NamedSharding, mesh), sharding.specs(declared, layout))
        )
        params, grads = (place(padded(tiny.weights(C, seed), layout)) for seed in (0, 1))
        updates, _ = tiny.jit(lambda g, p: tx.update(g, tx.init(p), p))(grads, params)
        return jax.device_get(updates)

    want = padded(updated(Layout()), layout)
    assert max(tiny.worst(updated(layout), want).values()) < 1e-5
