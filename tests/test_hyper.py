"""hyper.py: coefficients, collapse and expansion of the residual copies."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import hyper, model
from dsflash_jax.flow import Setup


def config(copies, iters):
    return dataclasses.replace(tiny.T, hc_mult=copies, hc_sinkhorn_iters=iters)


def comb_of(logits, iters=20):
    """The mixing matrix [source, destination] that the coefficients of these logits hold."""
    z = jnp.concatenate([jnp.zeros(8), jnp.asarray(logits, jnp.float32).reshape(-1)])[None, None]
    return hyper.coefficients(z, jnp.ones(3), jnp.zeros(24), config(4, iters))


@pytest.mark.parametrize(
    ("logits", "want", "tolerance"),
    [
        # Copy i goes to copy i + 1; the transposed matrix would give 20, 30, 40, 10.
        (40 * np.roll(np.eye(4), 1, axis=1) - 20, [40, 10, 20, 30], 1e-3),
        # The transposed matrix would give 22.7309, 29.4174, 18.7127, 29.1388.
        ([[0, 3, 0, 0], [0, 0, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0]], [29.4865, 15.6395, 26.0018, 28.8721], 1e-3),
    ],
)
def test_copies_move_from_source_to_destination(logits, want, tolerance):
    at = comb_of(logits)
    x = jnp.asarray([10.0, 20.0, 30.0, 40.0])[None, None, :, None]
    got = hyper.expand(jnp.zeros((1, 1, 1)), x, at)
    np.testing.assert_allclose(got[0, 0, :, 0], want, atol=tolerance)


def test_columns_sum_to_1_and_post_lies_between_0_and_2():
    for seed in range(5):
        logits = 2 * np.random.default_rng(seed).standard_normal((4, 4))
        at = comb_of(logits)
        np.testing.assert_allclose(at.comb[0, 0].sum(axis=0), 1, atol=2e-6)  # the last step, with its eps of 1e-6
        assert ((at.post > 0) & (at.post < 2)).all() and (at.pre > 0).all()


def test_the_first_stream_holds_equal_copies_and_reads_copy_0():
    x = jnp.arange(6.0).reshape(1, 2, 3)
    copies, pre = hyper.start(x, 4)
    for copy in range(4):
        np.testing.assert_array_equal(copies[:, :, copy], x)
    np.testing.assert_array_equal(hyper.collapse(copies.at[:, :, 1:].set(99.0), pre), x)


def test_statistics_run_over_all_copies_and_stay_float32():
    c = config(4, 20)
    w = {"hc_ffn_fn": jnp.ones((4 * 16, 24)), "hc_ffn_scale": jnp.ones(3), "hc_ffn_base": jnp.zeros(24)}
    x = jnp.zeros((1, 1, 4, 16)).at[0, 0, 2].set(5.0).astype(jnp.bfloat16)
    got = hyper.mix(w, "ffn", x, c)
    assert got.pre.dtype == got.post.dtype == got.comb.dtype == jnp.float32
    # sum / rms of 64 values of which 16 are 5: 80 / 2.5; one statistic a copy would give 80 / 5
    np.testing.assert_allclose(got.post, np.full((1, 1, 4), 2 / (1 + np.exp(-32.0))), rtol=1e-6)
    half = hyper.mix(w | {"hc_ffn_scale": jnp.full(3, 0.02)}, "ffn", x, c)
    np.testing.assert_allclose(half.post, np.full((1, 1, 4), 2 / (1 + np.exp(-0.64))), rtol=1e-6)


def test_coefficient_weights_stay_float32_under_a_bfloat16_cast():
    cast = model.cast(model.declare(tiny.T), tiny.weights(tiny.T), jnp.bfloat16)
    for path, leaf in jax.tree_util.tree_flatten_with_path(cast)[0]:
        name = path[-1].key
        if name.startswith("hc_"):
            assert leaf.dtype == jnp.float32, path
        if name == "wq_b":
            assert leaf.dtype == jnp.bfloat16, path


@pytest.fixture(scope="module")
def two_layers():
    c = tiny.T.with_modes("S F1")

    def traced(w, batch):
        traces = []
        y, _ = model.forward(Setup(c, tiny.STRICT), w, batch, traces=traces)
        return traces, y

    return c, tiny.weights(c), tiny.batch(c, tiny.tokens(c, 1, 6)), tiny.jit(traced)


def test_a_sublayer_reads_with_the_coefficients_of_the_one_before_it(two_layers):
    c, w, batch, run = two_layers
    base, _ = run(w, batch)
    layer = w["layers"]["layer1"]
    changed = layer["hc_attn_base"].at[: c.hc_mult].add(1.0)  # the pre part alone
    traces, _ = run(w | {"layers": w["layers"] | {"layer1": layer | {"hc_attn_base": changed}}}, batch)
    np.testing.assert_array_equal(traces[1]["attn_in"], base[1]["attn_in"])
    assert float(jnp.abs(traces[1]["ffn_in"] - base[1]["ffn_in"]).max()) > 1e-3


def test_the_last_experts_coefficients_collapse_the_output(two_layers):
    c, w, batch, run = two_layers
    base, y = run(w, batch)
    layer = w["layers"]["layer1"]
    changed = layer["hc_ffn_base"].at[: c.hc_mult].add(1.0)
    traces, moved = run(w | {"layers": w["layers"] | {"layer1": layer | {"hc_ffn_base": changed}}}, batch)
    np.testing.assert_array_equal(traces[1]["h_out"], base[1]["h_out"])  # the stream is written with post and comb
    assert float(jnp.abs(moved - y).max()) > 1e-3
    assert set(model.declare(c)) == {"embed", "layers", "norm", "head"}  # no collapse of its own at the top


@pytest.mark.parametrize(("i", "j"), list(itertools.product(range(2), range(2))))
def test_expansion_writes_each_destination_from_each_source(i, j):
    comb = jnp.zeros((1, 1, 2, 2)).at[0, 0, i, j].set(1.0)
    at = hyper.Mix(jnp.ones((1, 1, 2)), jnp.zeros((1, 1, 2)), comb)
    x = jnp.asarray([3.0, 5.0])[None, None, :, None]
    want = np.zeros(2)
    want[j] = [3, 5][i]
    np.testing.assert_array_equal(hyper.expand(jnp.zeros((1, 1, 1)), x, at)[0, 0, :, 0], want)
