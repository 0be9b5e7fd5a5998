"""Nothing reads what comes later: by gradient, by prefixes, and by changing tokens."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import model
from dsflash_jax.model import Setup

ROUNDING = 1e-5  # float32 rows whose experts' rows were summed in another order


@pytest.fixture(scope="module")
def weights():
    return tiny.weights(tiny.T)


@pytest.fixture(scope="module")
def forward():
    return jax.jit(lambda w, batch: model.logits(w["head"], model.forward(Setup(tiny.T, tiny.STRICT), w, batch)[0]))


def test_later_embeddings_get_exactly_no_gradient(weights):
    length = 12
    batch = tiny.batch(tiny.T, [np.arange(length)])  # token u stands at row u alone

    def rows(embed):
        return model.forward(Setup(tiny.T, tiny.STRICT), weights | {"embed": embed}, batch)[0][0]

    @jax.jit
    def reach(embed):
        _, pull = jax.vjp(rows, embed)
        cotangents = jnp.eye(length)[:, :, None] * jnp.ones((1, 1, tiny.T.hidden_size))
        return jnp.abs(jax.lax.map(lambda ct: pull(ct)[0], cotangents)).sum(axis=-1)[:, :length]  # [output, input]

    reached = np.asarray(reach(weights["embed"]))
    assert (np.triu(reached, 1) == 0).all()
    assert (np.diag(reached) > 0).all()
    assert (reached[-1] > 0).sum() > tiny.T.sliding_window  # the compressed entries reach beyond the window


def test_each_row_equals_the_last_row_of_its_prefix(weights, forward):
    """A query that attended to another query's selection would differ: rows are longer than index_topk slots."""
    length = 24
    tokens = np.random.default_rng(0).integers(3, tiny.T.vocab_size, (1, length))
    prefixes = tiny.batch(tiny.T, np.repeat(tokens, length, axis=0), [[n] for n in range(1, length + 1)])
    got = np.asarray(forward(weights, prefixes))
    np.testing.assert_allclose(got[np.arange(length), np.arange(length)], got[-1], atol=ROUNDING)


def test_a_slot_is_seen_from_the_query_that_completes_it(weights, forward):
    """Rows before a changed token are bit-identical; at ratio 2 row 4 would move first if it saw its own group."""
    tokens = np.array([[3, 4, 5, 6, 7, 8, 9, 10]] * 3)
    tokens[1, 5], tokens[2, 6] = 20, 20
    plain, fifth, sixth = np.asarray(forward(weights, tiny.batch(tiny.T, tokens)))
    assert (plain[:5] == fifth[:5]).all() and (plain[5:] != fifth[5:]).any(axis=-1).all()
    assert (plain[:6] == sixth[:6]).all() and (plain[6:] != sixth[6:]).any(axis=-1).all()


@pytest.mark.parametrize(
    "ratio, expected", [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [0, 1, 1, 2, 2, 3, 3]), (4, [0, 0, 0, 1, 1, 1, 1])]
)
def test_visible_slots_are_the_complete_groups(ratio, expected):
    from dsflash_jax.compressor import slots

    batch = tiny.batch(tiny.T, np.zeros((1, 7)))
    np.testing.assert_array_equal(slots(batch.segments, batch.positions, ratio).visible[0], expected)


def test_a_window_layer_reads_its_window_and_nothing_else():
    c = tiny.with_modes("S")
    w = tiny.weights(c)
    batch = tiny.batch(c, [np.arange(12)])

    @jax.jit
    def reach(embed):
        row = partial(lambda e: model.forward(Setup(c, tiny.STRICT), w | {"embed": e}, batch)[0][0, 10].sum())
        return jnp.abs(jax.grad(row)(embed)).sum(axis=-1)

    reached = np.asarray(reach(w["embed"]))[:12]
    np.testing.assert_array_equal(np.flatnonzero(reached), [7, 8, 9, 10])
