"""ops.py: norm, linear maps and the clamped SwiGLU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax.ops import HIGHEST, linear, linear32, ranks, rms_norm, swiglu


def test_clamp_is_two_sided_on_up_and_one_sided_on_gate():
    gate, up = jnp.asarray([20.0, -20.0, 20.0]), jnp.asarray([-20.0, 20.0, 3.0])
    got = swiglu(gate, up, 10.0)
    # silu(10) * -10; silu(-20) * 10, for gate has no lower clamp; silu(10) * 3
    np.testing.assert_allclose(got, [-99.99546, -4.1223e-7, 29.99864], rtol=2e-5)


def test_no_limit_clips_nothing():
    got = swiglu(jnp.asarray([20.0]), jnp.asarray([-20.0]), 0.0)
    np.testing.assert_allclose(got, [-400.0], rtol=1e-6)  # silu(20) = 20 (1 - 2e-9)


def test_rms_norm_divides_by_the_root_mean_square():
    x = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    got = rms_norm(x, jnp.asarray([1.0, 2.0]), 1e-20)
    rms = np.sqrt(12.5)
    np.testing.assert_allclose(got, [[3 / rms, 8 / rms], [0, 0]], rtol=1e-6)  # an all-zero row stays zero


def test_rms_norm_of_tiny_values_does_not_underflow():
    x = jnp.full((1, 4), 1e-8, jnp.float32)  # mean square 1e-16, far above eps 1e-20
    np.testing.assert_allclose(rms_norm(x, jnp.ones((4,)), 1e-20), np.ones((1, 4)), rtol=1e-4)  # eps is 1e-4 of it


def test_rms_norm_of_a_zero_row_has_a_finite_gradient():
    with jax.debug_nans(True):
        grad = jax.grad(lambda x: rms_norm(x, jnp.ones((4,)), 1e-20).sum())(jnp.zeros((1, 4)))
    assert np.isfinite(grad).all()


def test_linear_keeps_several_output_axes_apart():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((2, 3, 4)), rng.standard_normal((4, 5, 6))
    got = linear(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
    np.testing.assert_allclose(got, np.tensordot(x, w, 1), atol=1e-5)  # float32 sums of 4 terms


def test_linear_accumulates_bfloat16_in_float32_and_returns_bfloat16():
    x = jnp.ones((1, 512), jnp.bfloat16)
    w = jnp.ones((512, 1), jnp.bfloat16).at[0, 0].set(3.0)  # sum 514 needs more than bfloat16's 8 bits on the way
    got = linear(x, w)
    assert got.dtype == jnp.bfloat16
    assert float(got[0, 0]) == float(jnp.asarray(514.0, jnp.bfloat16))


def test_linear32_asks_for_float32_operands_at_highest_precision():
    text = str(jax.make_jaxpr(linear32)(jnp.ones((2, 4), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)))
    (dot,) = [line for line in text.splitlines() if "dot_general" in line] or [text]
    assert str(HIGHEST.name) in text and "f32[2,3]" in dot


def test_ranks_count_the_earlier_rows_of_the_same_id():
    ids = np.random.default_rng(0).integers(-1, 5, 2500)  # more rows than one tile; -1 and 4 have no group
    rank, counts = ranks(jnp.asarray(ids, jnp.int32), 4)
    want = [np.sum(ids[:i] == n) if 0 <= n < 4 else 0 for i, n in enumerate(ids)]
    np.testing.assert_array_equal(rank, want)
    np.testing.assert_array_equal(counts, np.bincount(ids[ids >= 0], minlength=5)[:4])


def test_ranks_of_no_rows_are_empty():
    rank, counts = ranks(jnp.zeros((0,), jnp.int32), 3)
    assert rank.shape == (0,) and counts.tolist() == [0, 0, 0]
