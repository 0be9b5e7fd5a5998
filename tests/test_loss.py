"""loss.py: chunked cross-entropy, and the terms that `total` adds to it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import loss
from dsflash_jax.config import Objective
from dsflash_jax.flow import Setup
from dsflash_jax.loss import cross_entropy

B, T, D, V = 2, 13, 6, 17


@pytest.fixture(scope="module")
def case():
    """head, y, targets and a mask with holes."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    targets = jnp.asarray(rng.integers(0, V, (B, T)), jnp.int32)
    return normal(V, D), normal(B, T, D), targets, jnp.asarray(rng.integers(0, 2, (B, T)), jnp.float32)


def plain(head, y, targets, mask):
    """Mean cross-entropy with all logits at once."""
    log_p = jax.nn.log_softmax(y @ head.T, axis=-1)
    picked = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(picked * mask) / jnp.sum(mask)


@pytest.mark.parametrize("chunk", [1, 4, 13, 64])  # 4 does not divide 13; 64 exceeds it
def test_chunked_equals_plain_in_value_and_gradients(case, chunk):
    head, y, targets, mask = case

    def chunked(head, y):
        ce = cross_entropy(head, y, targets, mask, chunk)
        return ce.nll / ce.tokens

    got = jax.jit(jax.value_and_grad(chunked, argnums=(0, 1)))(head, y)
    want = jax.value_and_grad(lambda head, y: plain(head, y, targets, mask), argnums=(0, 1))(head, y)
    # float32 sums over chunks in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_masked_positions_count_nowhere(case):
    head, y, targets, mask = case
    run = jax.jit(lambda y, targets: cross_entropy(head, y, targets, mask, 4))
    other_y = jnp.where(mask[..., None] > 0, y, 1e3)
    other_targets = jnp.where(mask > 0, targets, 0)
    jax.tree.map(np.testing.assert_array_equal, run(y, targets), run(other_y, other_targets))
    assert float(run(y, targets).tokens) == float(mask.sum())


def test_hits_and_log_partition_are_those_of_the_logits(case):
    head, y, targets, mask = case
    logits = np.asarray(y, np.float64) @ np.asarray(head, np.float64).T
    ce = cross_entropy(head, y, targets, mask, 4)
    assert float(ce.hits) == ((logits.argmax(-1) == targets) * mask).sum()
    log_z = np.log(np.exp(logits).sum(-1))
    np.testing.assert_allclose(ce.z, (log_z**2 * mask).sum(), rtol=1e-5)  # float32 sums


def test_bfloat16_hidden_states_meet_float32_logits(case):
    head, y, targets, mask = case
    rough = y.astype(jnp.bfloat16)
    ce = cross_entropy(head, rough, targets, mask, 4)
    assert ce.nll.dtype == jnp.float32
    want = plain(head, rough.astype(jnp.float32), targets, mask)
    np.testing.assert_allclose(ce.nll / ce.tokens, want, rtol=1e-6)  # float32 from the cast on


def test_targets_are_the_next_token_and_neither_this_nor_the_one_after():
    c = dataclasses.replace(tiny.T, vocab_size=16, hidden_size=16)
    ids = np.random.default_rng(5).permutation(12)[None]
    batch = tiny.batch(c, ids, [[5, 6]])
    losses = []
    for shift in (0, 1, 2):
        teacher = jax.nn.one_hot(np.roll(ids, -shift, axis=1), 16, dtype=jnp.float32) * 50
        ce = cross_entropy(jnp.eye(16), teacher, batch.targets, batch.loss_mask, 4)
        losses.append(float(ce.nll / ce.tokens))
    assert losses[1] < 1e-6 and min(losses[0], losses[2]) > 10
    assert float(ce.tokens) == 4 + 5


def test_total_is_the_weighted_sum_of_its_terms():
    c = dataclasses.replace(tiny.T, hc_mult=2).with_modes("S F1")
    aim = Objective(index_weight=0.5, index_keys="topk", balance_weight=0.25, z_weight=0.125)
    batch = tiny.batch(c, tiny.tokens(c, 2, 11), [[5, 6], [4]])
    value, report = tiny.jit(lambda w: loss.total(Setup(c, tiny.STRICT, aim), w, batch))(tiny.weights(c))
    ce = report.ce
    want = ce.nll / ce.tokens + 0.5 * report.index.sum() + 0.25 * report.balance.sum() + 0.125 * ce.z / ce.tokens
    np.testing.assert_allclose(value, want, rtol=1e-6)  # four additions
    assert float(report.index[0]) == 0 and float(report.index[1]) > 0 and (report.balance > 0).all()
    # Router counts: every token that is not padding, once for each expert it uses, in every layer.
    np.testing.assert_array_equal(report.counts.sum(axis=1), [15 * 2] * 2)


def test_a_batch_without_any_target_has_loss_0():
    c = dataclasses.replace(tiny.T, hc_mult=2).with_modes("S F1")
    batch = tiny.batch(c, tiny.tokens(c, 1, 11), [[]])
    aim = Objective(index_keys="topk")
    value_of = lambda w: loss.total(Setup(c, tiny.STRICT, aim), w, batch)[0]  # noqa: E731
    value, grads = tiny.jit(jax.value_and_grad(value_of))(tiny.weights(c))
    assert float(value) == 0
    assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))
