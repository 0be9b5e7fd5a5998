"""engram.py: row counts and the gated write into the stream; `test_engram_hash.py` has the hash."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import engram


@pytest.fixture(scope="module")
def module():
    c = tiny.T_ENGRAM
    w = tiny.weights(c)["layers"]["layer1"]["engram"]
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((1, 5, c.hc_mult, c.hidden_size)), jnp.float32)
    return c, w, x, jnp.asarray(rng.integers(0, 60, (1, 5, 4)), jnp.int32)


def test_each_copy_has_its_own_gate_and_all_share_one_value(module):
    c, w, x, ids = module
    got, gate, _ = engram.apply(w, x, ids, None, c)
    read = np.asarray(w["embed"])[np.asarray(ids)].reshape(1, 5, -1)
    kv = np.tensordot(read, np.asarray(w["wkv"]), 1)  # [1, 5, copies + 1, D]
    for t, copy in np.ndindex(5, c.hc_mult):
        stream, key = np.asarray(x)[0, t, copy], kv[0, t, copy]
        scale = np.asarray(w["q_weight"])[copy] * np.asarray(w["k_weight"])[copy]
        unit = lambda a: a / np.sqrt((a**2).mean())  # noqa: E731
        dot = (unit(stream) * scale * unit(key)).sum() / np.sqrt(c.hidden_size)
        want = 1 / (1 + np.exp(-np.sign(dot) * np.sqrt(max(abs(dot), 1e-6))))
        np.testing.assert_allclose(gate[0, t, copy], want, rtol=1e-5)  # float32 sums of 16 terms
        np.testing.assert_allclose(got[0, t, copy], stream + want * kv[0, t, -1], atol=1e-5)


def test_image_tokens_keep_their_stream_bit_for_bit(module):
    c, w, x, ids = module
    image = jnp.asarray([[False, True, False, False, False]])
    got, gate, _ = engram.apply(w, x, ids, image, c)
    np.testing.assert_array_equal(got[:, 1], x[:, 1])
    np.testing.assert_array_equal(gate[:, 1], np.zeros((1, c.hc_mult)))
    assert (gate[:, 2:] > 0).all()


@pytest.mark.parametrize("name", ["q_weight", "embed", "x"])  # a weight, a key and a copy of zeros
def test_a_gate_at_dot_0_has_finite_gradients(module, name):
    c, w, x, ids = module
    still = {key: jnp.zeros_like(a) if key == name else a for key, a in (w | {"x": x}).items()}
    x = still.pop("x")
    np.testing.assert_allclose(engram.apply(still, x, ids, None, c)[1], 0.5, atol=1e-6)
    with jax.debug_nans(True):
        grads = jax.grad(lambda w, x: engram.apply(w, x, ids, None, c)[0].sum(), argnums=(0, 1))(still, x)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_a_fresh_module_is_the_identity_and_still_learns(module):
    c, _, x, ids = module
    w = {name: d.init(jax.random.key(0), d.shape, jnp.float32) for name, d in engram.weights(c, 0).items()}
    np.testing.assert_array_equal(engram.apply(w, x, ids, None, c)[0], x)
    grads = jax.grad(lambda w: jnp.sum(jnp.square(engram.apply(w, x, ids, None, c)[0])))(w)
    assert float(jnp.abs(grads["wkv"][:, -1]).max()) > 0
