"""rope.py: the two frequency regimes of the released model, pairing, and the inverse rotation."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax.config import Config, RopeScaling
from dsflash_jax.rope import angles, frequencies, rotate, rotate_single


@pytest.fixture(scope="module")
def released(golden) -> Config:
    return Config.from_json(golden / "config.released.json")


def test_the_inverse_rotation_gives_a_vector_back(released):
    at = angles(frequencies(released, True), jnp.arange(16, dtype=jnp.int32)[None])
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 3, 64)), jnp.float32)
    np.testing.assert_allclose(rotate(rotate(x, at), at, inverse=True), x, atol=2e-6)  # cos^2 + sin^2 = 1 to rounding


def test_neighbouring_channels_form_a_pair():
    at = angles(np.asarray([1.0, 0.01], np.float32), jnp.asarray([1], jnp.int32))
    got = rotate_single(jnp.asarray([[1.0, 0.0, 0.0, 0.0]]), at)
    np.testing.assert_allclose(got, [[np.cos(1), np.sin(1), 0, 0]], atol=1e-6)  # half-split: [cos 1, 0, sin 1, 0]


def test_only_the_last_channels_turn():
    at = angles(np.asarray([1.0], np.float32), jnp.asarray([2], jnp.int32))
    got = rotate_single(jnp.asarray([[5.0, 7.0, 1.0, 0.0]]), at)
    np.testing.assert_allclose(got, [[5, 7, np.cos(2), np.sin(2)]], atol=1e-6)


def test_yarn_keeps_fast_channels_and_divides_slow_ones(released):
    plain = 160000.0 ** (-np.arange(0, 64, 2) / 64)
    ratio = frequencies(released, True) / plain
    np.testing.assert_allclose(ratio[:16], 1, rtol=2e-7)  # one float32 rounding
    np.testing.assert_allclose(ratio[25:], 1 / 16, rtol=2e-7)
    np.testing.assert_allclose(ratio[20], 0.53125, rtol=2e-7)
    np.testing.assert_allclose(frequencies(released, True)[20], 2.969778e-4, rtol=5e-7)


def test_window_layers_turn_without_yarn(released):
    freq = frequencies(released, False)
    np.testing.assert_allclose(freq[20], 3.162278e-3, rtol=5e-7)
    moved = dataclasses.replace(released, compress_rope_theta=5e4, rope_scaling=RopeScaling(factor=4))
    np.testing.assert_array_equal(frequencies(moved, False), freq)
    assert (frequencies(moved, True) != frequencies(released, True)).any()


def test_factor_1_is_plain_rotation(released):
    plain = dataclasses.replace(released, rope_scaling=RopeScaling(factor=1))
    want = 160000.0 ** (-np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(frequencies(plain, True), want, rtol=1.2e-7)  # 1 ulp


def test_tables_are_float32_and_tell_the_last_positions_apart(released):
    at = angles(frequencies(released, False), jnp.asarray([1048574, 1048575], jnp.int32))
    assert at.cos.dtype == at.sin.dtype == jnp.float32
    assert (at.cos[0] != at.cos[1]).any() and (at.sin[0] != at.sin[1]).any()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("position", "allowed"), [(4096, 1e-3), (1048575, 0.25)])  # what float32 frequencies allow
def test_tables_stay_near_those_of_float64(released, compressed, position, allowed):
    plain = (160000.0 if compressed else 10000.0) ** (-np.arange(0, 64, 2) / 64)
    # YaRN's ramp between the channels of 32 turns and of one turn over 65536 tokens, 15 and 25.
    ramp = np.clip((np.arange(32) - 15) / 10, 0, 1) if compressed else np.zeros(32)
    turn = position * (plain / 16 * ramp + plain * (1 - ramp))
    at = angles(frequencies(released, compressed), jnp.asarray([position], jnp.int32))
    assert np.abs(at.cos[0] - np.cos(turn)).max() <= allowed
    assert np.abs(at.sin[0] - np.sin(turn)).max() <= allowed


def test_bfloat16_vectors_turn_in_float32(released):
    at = angles(frequencies(released, False), jnp.asarray([3], jnp.int32))
    x = jnp.ones((1, 64), jnp.bfloat16)
    got = rotate_single(x, at)
    assert got.dtype == jnp.bfloat16
    want = rotate_single(x.astype(jnp.float32), at).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
