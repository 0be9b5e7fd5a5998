"""Sinkhorn-balanced momentum (training 2.3) against the published algorithm in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny_optim import FLAT, INIT, ROUNDING, directions, gauss

from dsflash_jax.params import Weight
from train import optim as o
from train import sinkhorn


def balance(g: np.ndarray) -> np.ndarray:
    """The published algorithm as printed: float64, the whole matrix rewritten on every pass."""
    u = g.astype(np.float64)
    rho = np.sqrt((u**2).sum(1))
    u[rho <= 1e-3 * rho.mean()] = 0
    for k in range(1, 12):
        u = u / (np.sqrt((u**2).sum(k % 2, keepdims=True)) + 1e-20)
    return np.sqrt(g.shape[1]) * u


def test_sinkhorn_row_and_column_rms_are_the_published_ones():
    rng = np.random.default_rng(0)
    g = rng.standard_normal((4096, 256)) * np.exp(rng.standard_normal((4096, 1)))
    quiet = rng.choice(4096, 100, replace=False)
    g[quiet] *= 1e-9
    got = np.asarray(sinkhorn.sinkhorn_update(jnp.asarray(g, jnp.float32)))
    moved = np.setdiff1d(np.arange(4096), quiet)
    assert not got[quiet].any()
    np.testing.assert_allclose(np.sqrt((got[moved] ** 2).mean(1)), 1, atol=2e-6)  # float32; 1e-12 in float64
    np.testing.assert_allclose(np.sqrt((got**2).mean(0)), np.sqrt(3996 / 4096), atol=2e-6)
    np.testing.assert_allclose(got, balance(g), atol=ROUNDING * np.abs(got).max())


def test_sinkhorn_keeps_zero_columns_zero_and_the_rest_finite():
    g = gauss(1, (30, 8))
    g[:, 3] = 0
    got = np.asarray(sinkhorn.sinkhorn_update(jnp.asarray(g)))
    assert not got[:, 3].any()
    np.testing.assert_allclose(got, balance(g), atol=ROUNDING * np.abs(got).max())


def test_sinkhorn_momentum_is_an_average_that_looks_ahead():
    g1, g2 = gauss(1, (30, 8)), gauss(2, (30, 8))
    loud = dataclasses.replace(FLAT, sinkhorn_eps=1.0)  # so large an eps makes the momentum's scale visible
    mixed = 0.95 * (0.95 * 0.05 * g1 + 0.05 * g2) + 0.05 * g2
    want = 0.18 * np.asarray(sinkhorn.sinkhorn_update(jnp.asarray(mixed), eps=1.0))
    got = directions(Weight((30, 8), ("vocab", "embed"), INIT, "sinkhorn"), g1, g2, optim=loud)
    np.testing.assert_allclose(got, want, atol=ROUNDING * np.abs(want).max())


def test_rows_are_the_vocabulary_whatever_the_storage_order_and_do_not_decay():
    grad, params = gauss(1, (40, 8)), gauss(2, (8, 40))
    head = Weight((8, 40), ("embed", "vocab"), INIT, "sinkhorn", matrix=(1, 0))
    got = directions(head, grad.T, optim=dataclasses.replace(FLAT, weight_decay=0.1), params=params)
    np.testing.assert_allclose(got.T, 0.18 * balance(grad), atol=ROUNDING)


def test_each_hash_head_is_balanced_alone_at_five_times_the_rate():
    weight = Weight((40, 4), ("ngram_rows", "ngram_dim"), INIT, "sinkhorn", split=(17, 23))
    grad = gauss(1, (40, 4)) * np.repeat([1e-6, 1], [17, 23])[:, None].astype(
        np.float32
    )  # together, 17 would be masked
    want = 5 * 0.18 * np.concatenate([balance(grad[:17]), balance(grad[17:])])
    np.testing.assert_allclose(directions(weight, grad), want, atol=5 * ROUNDING)


def test_rows_never_read_stay_and_rows_read_earlier_follow_their_momentum():
    rows, width, rate = 1000, 8, FLAT.peak * 5 * 0.18
    rng = np.random.default_rng(0)
    ids = [rng.choice(500, 20, replace=False) for _ in range(3)]
    ids[0][1] = ids[0][0]  # one row read twice
    targets = [gauss(10 + i, (20, width)) for i in range(3)]
    weight = Weight((rows, width), ("ngram_rows", "ngram_dim"), INIT, "sinkhorn")
    tx = o.build({"w": weight}, dataclasses.replace(FLAT, weight_decay=0.1), 10)
    first = gauss(1, (rows, width))
    params, want, momentum = {"w": jnp.asarray(first)}, first.astype(np.float64), np.zeros((rows, width))
    state = tx.init(params)

    @jax.jit
    def step(params, state, i, y):
        grads = jax.grad(lambda p: jnp.sum(p["w"][i] * y))(params)
        update, state = tx.update(grads, state, params)
        return optax.apply_updates(params, update), state

    for i, y in zip(ids, targets, strict=True):
        params, state = step(params, state, i, y)
        grad = np.zeros((rows, width))
        np.add.at(grad, i, y)  # a row read twice gets the sum
        momentum = 0.95 * momentum + 0.05 * grad
        want -= rate * balance(0.95 * momentum + 0.05 * grad)
    got, unread = np.asarray(params["w"]), np.setdiff1d(np.arange(rows), np.concatenate(ids))
    np.testing.assert_array_equal(got[unread], first[unread])
    np.testing.assert_allclose(got, want, atol=2e-6)  # float32 spacing of entries up to 4, three steps
    once = np.setdiff1d(ids[0], np.concatenate(ids[1:]))
    moved = np.sqrt(np.mean((got - first)[once] ** 2, axis=1))
    assert moved.min() > 2 * rate  # the row moved in all three updates, each time by the full rate
