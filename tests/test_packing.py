"""Documents packed into one row compute what each computes alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import loss, model
from dsflash_jax.config import Objective
from dsflash_jax.model import Setup

ROUNDING = 1e-5  # experts sum their rows in another order when other documents are routed with them
KINDS = {
    "window": "S",
    "full, ratio 1": "F1",
    "full, ratio 2": "F2",
    "reindex": "F2 X",
    "reuse": "F2 U",
    "candidates": "F1p X",
    "n-grams": "Se",
    "all": "Se F2 U F1pe X U",
}


def rows(tokens_a, tokens_b, other_a):
    """Row 0: A then B; 1: A alone; 2: B alone; 3: another A then B. The rest of each row is padding."""
    a, b = len(tokens_a), len(tokens_b)
    table = np.full((4, a + b + 1), 2)
    table[0, : a + b] = [*tokens_a, *tokens_b]
    table[1, :a], table[2, :b] = tokens_a, tokens_b
    table[3, : a + b] = [*other_a, *tokens_b]
    return table, [[a, b], [a], [b], [a, b]]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_alone(kind):
    c = tiny.with_modes(KINDS[kind])
    w = tiny.weights(c)
    forward = jax.jit(lambda w, batch: model.forward(Setup(c, tiny.STRICT), w, batch)[0])
    draw = np.random.default_rng(1).integers
    for a, b in ((5, 6), (6, 5)):  # a ratio-2 group must not straddle, whether A is odd or even
        first, second, other = (draw(3, c.vocab_size, n) for n in (a, b, a))
        table, lengths = rows(first, second, other)
        got = np.asarray(forward(w, tiny.batch(c, table, lengths)))
        np.testing.assert_allclose(got[0, :a], got[1, :a], atol=ROUNDING)
        np.testing.assert_allclose(got[0, a : a + b], got[2, :b], atol=ROUNDING)
        np.testing.assert_allclose(got[0, a : a + b], got[3, a : a + b], atol=1e-6)
        assert np.abs(got[0, :a] - got[3, :a]).max() > 1e-2


def test_one_documents_loss_gives_the_other_exactly_no_gradient():
    c = tiny.with_modes(KINDS["all"])
    w = tiny.weights(c)
    aim = Objective(index_weight=0.0, balance_weight=0.0)
    batch = tiny.batch(c, [np.arange(3, 14)], [[5, 6]])  # every token stands once, n-gram rows may collide
    batch = batch.replace(loss_mask=batch.loss_mask * (batch.segments == 2))

    def of_b(embed):
        return loss.total(c, tiny.STRICT, aim, w | {"embed": embed}, batch)[0]

    reached = np.abs(np.asarray(jax.jit(jax.grad(of_b))(w["embed"]))).sum(axis=-1)
    assert (reached[3:8] == 0).all()
    assert (reached[8:13] > 0).all()


def test_segment_numbers_are_names_only():
    c = tiny.with_modes("F2 U")
    w = tiny.weights(c)
    total = jax.jit(lambda w, batch: loss.total(c, tiny.STRICT, Objective(), w, batch)[0])
    batch = tiny.batch(c, [np.arange(3, 14)], [[5, 6]])
    renamed = batch.replace(segments=jnp.where(batch.segments == 1, 7, jnp.where(batch.segments == 2, 3, 0)))
    assert float(total(w, batch)) == float(total(w, renamed))


def test_packed_loss_is_the_token_weighted_mean_of_each_alone():
    c = tiny.with_modes("F2 U")
    w = tiny.weights(c)
    table, lengths = rows(np.arange(3, 8), np.arange(8, 14), np.arange(3, 8))
    aim = Objective(index_weight=0.0, balance_weight=0.0)

    @jax.jit
    def report(w, batch):
        return loss.total(c, tiny.STRICT, aim, w, batch)[1].ce

    def of(row):
        batch = tiny.batch(c, table, lengths)
        keep = (np.arange(4) == row)[:, None]
        return report(w, batch.replace(loss_mask=batch.loss_mask * keep))

    both, a, b = of(0), of(1), of(2)
    assert [float(x.tokens) for x in (both, a, b)] == [9, 4, 5]
    np.testing.assert_allclose(both.nll, a.nll + b.nll, rtol=1e-6)
