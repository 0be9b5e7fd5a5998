"""model.py: documents packed into one row do not see each other, for every layer kind alone and for all together."""

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

WIDTH = 14
LENGTHS = [[5, 6], [6, 5], [4, 8], [1, 1, 9], [3, 11], [14]]  # odd and even, padding behind most
ROUNDING = 1e-5  # the same float32 sums in another order
KINDS = {
    "window": "S",
    "full": "F2",
    "reindex": "F2 X",
    "reuse": "F1 U",
    "candidates": "F1p X",
    "engram": "Se",
    "all": tiny.MODES.replace("S S", "S Se"),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request):
    """Configuration, weights and compiled hidden states of one kind of layer."""
    c = tiny.with_modes(KINDS[request.param], hc_mult=2)
    return c, tiny.weights(c), tiny.jit(lambda w, batch: model.forward(Setup(c, tiny.STRICT), w, batch)[0])


def test_packed_rows_equal_each_document_alone(kind):
    c, w, run = kind
    ids = tiny.tokens(c, len(LENGTHS), WIDTH)
    packed = np.asarray(run(w, tiny.batch(c, ids, LENGTHS)))
    for row, lengths in enumerate(LENGTHS):
        # Each document of the row alone at the start of its own row, padding behind it.
        starts = np.cumsum([0, *lengths[:-1]])
        alone = np.stack([np.roll(ids[row], -start) for start in starts] + [ids[row]] * (len(LENGTHS) - len(lengths)))
        parts = [[n] for n in lengths] + [[WIDTH]] * (len(LENGTHS) - len(lengths))
        got = np.asarray(run(w, tiny.batch(c, alone, parts)))
        for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            np.testing.assert_allclose(packed[row, start : start + length], got[i, :length], atol=ROUNDING)


def test_replacing_one_document_leaves_the_other_alone(kind):
    c, w, run = kind
    ids = tiny.tokens(c, len(LENGTHS), WIDTH)
    other = ids.copy()
    for row, lengths in enumerate(LENGTHS):
        other[row, : lengths[0]] = (other[row, : lengths[0]] + 3) % c.vocab_size
    before, after = (np.asarray(run(w, tiny.batch(c, a, LENGTHS))) for a in (ids, other))
    for row, lengths in enumerate(LENGTHS):
        end = sum(lengths)
        # Another order of expert rows may change the last bit of a sum; nothing else may.
        np.testing.assert_allclose(after[row, lengths[0] : end], before[row, lengths[0] : end], atol=1e-6)
        assert np.abs(after[row, : lengths[0]] - before[row, : lengths[0]]).max() > 1e-3


@pytest.mark.parametrize("name", ["window", "full", "candidates", pytest.param("all", marks=pytest.mark.slow)])
def test_gradient_of_one_documents_loss_to_another_is_exactly_zero(name):
    c = tiny.with_modes(KINDS[name], hc_mult=2)
    w = tiny.weights(c)
    ids = np.arange(WIDTH)[None]  # distinct: an embedding row is one token

    @tiny.jit
    def gradient(w, batch):
        # The balance loss joins short documents of a row on purpose, so cross-entropy alone is B's loss.
        setup = Setup(c, tiny.STRICT, Objective(index_weight=0, balance_weight=0))
        return jax.grad(lambda table: loss.total(setup, w | {"embed": table}, batch)[0])(w["embed"])

    for lengths in ([5, 6], [6, 5], [4, 8]):
        batch = tiny.batch(c, ids, [lengths])
        second = dataclasses.replace(batch, loss_mask=batch.loss_mask * (batch.segments == 2))
        got = np.abs(gradient(w, second)).max(axis=-1)[:WIDTH]
        assert (got[: lengths[0]] == 0).all()
        assert (got[lengths[0] : sum(lengths) - 1] > 0).all()
        assert (got[sum(lengths) :] == 0).all()  # padding


def test_the_loss_of_packed_documents_is_the_token_weighted_mean_of_each_alone():
    c = tiny.with_modes("S F2", hc_mult=2)
    w, aim = tiny.weights(c), Objective(index_weight=0, balance_weight=0)
    run = tiny.jit(lambda w, batch: loss.total(Setup(c, tiny.STRICT, aim), w, batch))
    ids = tiny.tokens(c, 1, 11)
    packed, report = run(w, tiny.batch(c, ids, [[5, 6]]))
    assert float(report.ce.tokens) == 4 + 5
    first, _ = run(w, tiny.batch(c, ids, [[5]]))
    second, _ = run(w, tiny.batch(c, np.roll(ids, -5, axis=1), [[6]]))
    np.testing.assert_allclose(packed, (4 * first + 5 * second) / 9, rtol=1e-6)


def test_renaming_documents_changes_nothing():
    c = tiny.with_modes("S F2", hc_mult=2)
    w, aim = tiny.weights(c), Objective(index_keys="topk")
    run = tiny.jit(jax.value_and_grad(lambda w, batch: loss.total(Setup(c, tiny.STRICT, aim), w, batch)[0]))
    batch = tiny.batch(c, tiny.tokens(c, 1, 11), [[5, 6]])
    names = jnp.asarray([0, 7, 3], jnp.int32)
    renamed = dataclasses.replace(batch, segments=names[batch.segments])
    jax.tree.map(np.testing.assert_array_equal, run(w, batch), run(w, renamed))
