"""model.py and loss.py: the indexer learns from its own loss alone, and nothing else learns from it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import loss, model
from dsflash_jax.config import Objective
from dsflash_jax.flow import Setup
from dsflash_jax.params import leaves

C = dataclasses.replace(tiny.T, hc_mult=2).with_modes("F2 F1p X U")  # more visible slots than index_topk = 2
KL = Objective(index_weight=1.0, index_keys="topk+random", index_random=3, balance_weight=0)
OFF = dataclasses.replace(KL, index_weight=0.0)


def flat(tree):
    return {"/".join(k.key for k in path): np.asarray(a) for path, a in jax.tree_util.tree_flatten_with_path(tree)[0]}


def gradients(c, aim):
    batch = tiny.batch(c, tiny.tokens(c, 2, 12), [[5, 6], [12]])
    value = lambda w: loss.total(Setup(c, tiny.STRICT, aim), w, batch, jax.random.key(1))[0]  # noqa: E731
    return flat(tiny.jit(jax.grad(value))(tiny.weights(c)))


@pytest.fixture(scope="module")
def off():
    return gradients(C, OFF)


def test_cross_entropy_alone_gives_the_indexer_exactly_zero(off):
    indexer = {path: g for path, g in off.items() if "/indexer/" in path}
    assert len(indexer) == 4 + 4 + 2  # F2 and F1 own four weights, X two
    assert all((g == 0).all() for g in indexer.values())
    assert all(np.abs(g).max() > 0 for path, g in off.items() if "/compressor/" in path)


def test_the_kl_reaches_every_producer_and_nothing_else(off):
    on = gradients(C, KL)
    for path, g in on.items():
        if "/indexer/" in path:
            assert np.isfinite(g).all() and np.abs(g).max() > 0, path
        else:
            # Detached inputs: the only difference is how the compiler groups the same sums.
            assert np.abs(g - off[path]).max() <= 1e-7 * max(1.0, np.abs(g).max()), path


@pytest.mark.slow
def test_weight_0_is_the_program_without_a_kl(off):
    batch = tiny.batch(C, tiny.tokens(C, 2, 12), [[5, 6], [12]])

    def plain(w):
        y, _ = model.forward(Setup(C, tiny.STRICT, None), w, batch)
        ce = loss.cross_entropy(w["head"], y, batch.targets, batch.loss_mask, tiny.STRICT.loss_chunk)
        return ce.nll / ce.tokens

    want = flat(tiny.jit(jax.grad(plain))(tiny.weights(C)))
    assert off.keys() == want.keys() == leaves(model.declare(C)).keys()
    for path, g in want.items():
        np.testing.assert_allclose(off[path], g, atol=1e-7 * max(1.0, np.abs(g).max()), err_msg=path)


@pytest.mark.parametrize("keys", ["topk", "topk+random", "dense"])
def test_every_key_set_gives_a_positive_finite_divergence(keys):
    c = dataclasses.replace(tiny.T, hc_mult=2).with_modes("F1")
    aim = dataclasses.replace(KL, index_keys=keys)
    batch = tiny.batch(c, tiny.tokens(c, 2, 12))
    run = tiny.jit(lambda w: loss.total(Setup(c, tiny.STRICT, aim), w, batch, jax.random.key(1)))
    total, report = run(tiny.weights(c))
    assert np.isfinite(report.index).all() and float(report.index[0]) > 0
    ce = report.ce.nll / report.ce.tokens
    np.testing.assert_allclose(total, ce + report.index[0], rtol=1e-6)  # one addition


@pytest.mark.slow
def test_a_groups_mean_teacher_averages_the_divergences_of_its_layers():
    c = dataclasses.replace(tiny.T, hc_mult=2).with_modes("S F1 2U")
    aim = Objective(index_keys="topk", index_teacher="group_mean", balance_weight=0)
    np.testing.assert_allclose(loss.index_shares(c, aim), [0, 1 / 3, 1 / 3, 1 / 3])
    batch, w = tiny.batch(c, tiny.tokens(c, 2, 12)), tiny.weights(c)

    def pulled(w):
        def value(w):
            total, report = loss.total(Setup(c, tiny.STRICT, aim), w, batch)
            return total, report.index

        (total, index), pull = jax.vjp(value, w)
        of_loss = pull((jnp.ones_like(total), jnp.zeros_like(index)))
        each = jax.lax.map(lambda e: pull((jnp.zeros_like(total), e)), jnp.eye(len(index)))
        return index, of_loss[0], each[0]

    index, of_loss, each = tiny.jit(pulled)(w)
    assert float(index[0]) == 0 and (index[1:] > 0).all()
    assert len(np.unique(np.asarray(index[1:]))) == 3  # three teachers
    for path, g in flat(of_loss).items():
        if "/indexer/" in path:
            mean = flat(each)[path][1:].mean(axis=0)
            np.testing.assert_allclose(g, mean, atol=1e-6 * np.abs(mean).max(), err_msg=path)


def test_shares_follow_the_selection_not_the_kv():
    own = loss.index_shares(tiny.T, Objective())
    np.testing.assert_array_equal(own, [0, 0, 1, 0, 1, 0, 1, 0])
    mean = loss.index_shares(tiny.T, Objective(index_teacher="group_mean"))
    np.testing.assert_array_equal(mean, [0, 0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])


def test_a_producer_that_teaches_itself_gets_what_its_group_of_one_would():
    c = tiny.T.with_modes("F2 F1p X")
    np.testing.assert_array_equal(
        loss.index_shares(c, Objective()), loss.index_shares(c, Objective(index_teacher="group_mean"))
    )
