"""model.py: nothing reads a later token, and a row is the last row of its own prefix (values and gradients)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import model
from dsflash_jax.flow import Setup

WIDTH = 14  # more ratio-2 groups and blocks than index_topk and candidate_topk_blocks keep
ROUNDING = 1e-5  # float32 sums in another order, through eight layers of activations near size 1


def outputs(c):
    """Compiled hidden states [B,T,D] of a batch."""
    return tiny.jit(lambda w, batch: model.forward(Setup(c, tiny.STRICT), w, batch)[0])


@pytest.fixture(scope="module")
def whole():
    return tiny.T_ENGRAM, tiny.weights(tiny.T_ENGRAM), outputs(tiny.T_ENGRAM)


def test_gradient_of_an_output_to_a_later_token_is_exactly_zero():
    c, w = tiny.T, tiny.weights(tiny.T)
    # Distinct ids: the gradient of an embedding row is that of one token. Four rows at once would add their gradients.
    batch = tiny.batch(c, np.arange(WIDTH)[None])
    direction = jnp.asarray(np.random.default_rng(1).standard_normal(c.hidden_size), jnp.float32)

    def pulled(w):
        run = lambda table: model.forward(Setup(c, tiny.STRICT), w | {"embed": table}, batch)[0][0]  # noqa: E731
        _, pull = jax.vjp(run, w["embed"])
        cotangents = jnp.eye(WIDTH)[:, :, None] * direction[None, None, :]
        return jax.lax.map(lambda cotangent: pull(cotangent)[0], cotangents)  # [T outputs, V, D]

    reach = np.abs(tiny.jit(pulled)(w))[:, :WIDTH].max(axis=-1)  # [output, token]
    assert (np.triu(reach, k=1) == 0).all()
    # Two windows of 4 reach six tokens back before any selection: up to there every entry must be seen.
    assert all(reach[t, u] > 0 for t in range(WIDTH) for u in range(max(0, t - 6), t + 1))


def test_every_row_is_the_last_row_of_its_prefix(whole):
    c, w, run = whole
    ids = tiny.tokens(c, 1, WIDTH)
    full = run(w, tiny.batch(c, np.repeat(ids, WIDTH, axis=0)))[0]
    # Row t of the batch holds the first t + 1 tokens and padding: one program for all prefixes.
    prefixes = tiny.batch(c, np.repeat(ids, WIDTH, axis=0), [[t + 1] for t in range(WIDTH)])
    cut = np.asarray(run(w, prefixes))[np.arange(WIDTH), np.arange(WIDTH)]
    np.testing.assert_allclose(cut, full, atol=ROUNDING)


def test_a_shorter_row_equals_the_start_of_a_longer_one(whole):
    c, w, run = whole
    length = 7  # the next token completes a ratio-2 group
    ids = tiny.tokens(c, WIDTH, WIDTH)
    short = outputs(c)(w, tiny.batch(c, ids[:1, :length]))[0]
    np.testing.assert_allclose(short, run(w, tiny.batch(c, ids))[0, :length], atol=ROUNDING)


@pytest.mark.parametrize("changed", range(1, WIDTH))
def test_a_changed_token_moves_itself_and_nothing_before_it(whole, changed):
    c, w, run = whole
    ids = tiny.tokens(c, WIDTH, WIDTH)
    other = ids.copy()
    other[:, changed] = (other[:, changed] + 1) % c.vocab_size
    before, after = run(w, tiny.batch(c, ids))[0], run(w, tiny.batch(c, other))[0]
    # The same program and shapes; expert rows may be summed in another order.
    np.testing.assert_allclose(after[:changed], before[:changed], atol=1e-6)
    assert float(jnp.abs(after[changed] - before[changed]).max()) > 1e-3


def test_a_window_holds_its_own_token_and_the_three_before_it():
    c = dataclasses.replace(tiny.T, hc_mult=1).with_modes("S")
    exact = dataclasses.replace(tiny.STRICT, experts="dense")  # no other token's experts in the order of a sum
    w, run = tiny.weights(c), tiny.jit(lambda w, batch: model.forward(Setup(c, exact), w, batch)[0])
    ids = tiny.tokens(c, 1, 12)
    base = run(w, tiny.batch(c, ids))[0, 10]
    for changed in range(12):
        other = ids.copy()
        other[0, changed] = (other[0, changed] + 1) % c.vocab_size
        moved = float(jnp.abs(run(w, tiny.batch(c, other))[0, 10] - base).max())
        if 7 <= changed <= 10:
            assert moved > 1e-3
        else:
            assert moved == 0


def test_a_repeated_token_under_window_1_gives_equal_rows():
    c = dataclasses.replace(tiny.T, sliding_window=1).with_modes("S")
    w = tiny.weights(c)
    rows = outputs(c)(w, tiny.batch(c, np.full((1, 64), 7)))[0]
    # A value that the output rotation does not turn back drifts with its position.
    np.testing.assert_allclose(rows, jnp.broadcast_to(rows[:1], rows.shape), atol=1e-5)


def test_only_compressed_layers_move_with_compress_rope_theta():
    w = tiny.weights(tiny.T.with_modes("S F2"))
    layers = []
    for theta in (160000.0, 5000.0):
        c = dataclasses.replace(tiny.T, compress_rope_theta=theta).with_modes("S F2")

        def traced(w, batch, c=c):
            traces = []
            model.forward(Setup(c, tiny.STRICT), w, batch, traces=traces)
            return [trace["h_out"] for trace in traces[:2]]

        layers.append(tiny.jit(traced)(w, tiny.batch(c, tiny.tokens(c, 1, 12))))
    np.testing.assert_array_equal(layers[0][0], layers[1][0])
    assert float(jnp.abs(layers[0][1] - layers[1][1]).max()) > 1e-3


def test_doubling_one_heads_queries_moves_the_output():
    c = tiny.T.with_modes("S")
    w, run = tiny.weights(c), outputs(c)
    batch = tiny.batch(c, tiny.tokens(c, 1, 12))
    before = run(w, batch)
    attn = w["layers"]["layer0"]["attn"]
    doubled = attn | {"wq_b": attn["wq_b"].at[:, 0].multiply(2.0)}
    after = run(w | {"layers": {"layer0": w["layers"]["layer0"] | {"attn": doubled}}}, batch)
    assert float(jnp.abs(after - before).max()) > 1e-3  # a norm over each head's query would hide it
