"""Newton-Schulz and Muon (training 2.2) against singular value decompositions in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_optim import FLAT, INIT, POLAR, ROUNDING, arrays, directions, gauss, orthogonal, singular_values

from dsflash_jax.params import Weight, map_weights
from train import newton_schulz
from train import optim as o


@pytest.mark.parametrize("shape", [(128, 128), (128, 512), (512, 128)])
def test_muon_singular_values_and_rms_are_the_published_ones(shape):
    update = np.asarray(newton_schulz.muon_update(jnp.asarray(gauss(0, shape))))
    sigma = singular_values(update) / (0.18 * np.sqrt(max(shape)))
    assert 1 - 2e-5 < sigma.min() and sigma.max() < 1.0006 + 2e-5  # 2e-5: float32 rounding of ten steps
    np.testing.assert_allclose(np.sqrt(np.mean(update**2)), 0.18, atol=5e-5)  # printed to four digits


def test_newton_schulz_survives_condition_number_1e4_where_five_plain_steps_do_not():
    u, v = (np.linalg.qr(gauss(seed, (256, 256)).astype(np.float64))[0] for seed in (1, 2))
    x = jnp.asarray((u * np.geomspace(1, 1e-4, 256)) @ v, jnp.float32)
    np.testing.assert_allclose(
        singular_values(newton_schulz.newton_schulz(x)).min(), 0.9996, atol=1e-4
    )  # printed to four digits
    np.testing.assert_allclose(
        singular_values(newton_schulz.newton_schulz(x, (5, 0))).min(), 0.013, atol=5e-4
    )  # to two


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])
def test_newton_schulz_is_the_polar_factor_at_any_scale(shape, scale):
    x = gauss(3, shape)
    np.testing.assert_allclose(
        newton_schulz.newton_schulz(jnp.asarray(x * np.float32(scale))), orthogonal(x), atol=POLAR
    )


def test_muon_momentum_adds_whole_gradients_and_looks_ahead():
    g1, g2 = gauss(1, (8, 12)), gauss(2, (8, 12))
    want = orthogonal(0.95 * (0.95 * g1 + g2) + g2) * 0.18 * np.sqrt(12)
    got = directions(Weight((8, 12), ("embed", "mix"), INIT), g1, g2)
    np.testing.assert_allclose(got, want, atol=POLAR * 0.18 * np.sqrt(12))


def test_matrix_decay_is_decoupled_and_times_the_rate():
    weight, grad, params = Weight((8, 12), ("embed", "mix"), INIT), gauss(1, (8, 12)), gauss(2, (8, 12))
    decayed = directions(weight, grad, optim=dataclasses.replace(FLAT, weight_decay=0.1), params=params)
    np.testing.assert_allclose(decayed - directions(weight, grad), 0.1 * params, atol=1e-6)  # float32 spacing below 4


# Which entries form one matrix (case 43)

EXPERTS = Weight((4, 8, 12), ("experts", "embed", "expert_width"), INIT, matrix=(1, 2), stack=(3,))
HEADS = Weight((8, 4, 12), ("q_latent", "heads", "head_dim"), INIT, matrix=(0, 2), stack=(3,))
GROUPS = Weight((2, 8, 12), ("groups", "group_in", "o_latent"), INIT, matrix=(1, 2))
MIXES = Weight((8, 24), ("embed", "mix"), INIT, split=(4, 4, 16), stack=(3,))
LAYOUTS = {
    "scan": (Weight((8, 12), ("embed", "mix"), INIT, stack=(3,)), [np.s_[i] for i in range(3)]),
    "scans": (Weight((8, 12), ("embed", "mix"), INIT, stack=(2, 3)), [np.s_[1, i] for i in range(3)]),
    "experts": (EXPERTS, [np.s_[i, j] for i in (0, 2) for j in range(4)]),
    "heads": (HEADS, [np.s_[i, :, j] for i in (0, 2) for j in range(4)]),
    "groups": (GROUPS, [np.s_[0], np.s_[1]]),
    "split": (MIXES, [np.s_[1, :, :4], np.s_[1, :, 4:8], np.s_[1, :, 8:]]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_unit_matrix_is_updated_as_if_alone(layout):
    weight, units = LAYOUTS[layout]
    grad = gauss(5, weight.full_shape)
    update = directions(weight, grad)
    for unit in units:
        alone = directions(Weight(grad[unit].shape, ("embed", "mix"), INIT), grad[unit])
        np.testing.assert_allclose(update[unit], alone, atol=ROUNDING)
        sigma = singular_values(update[unit]) / (0.18 * np.sqrt(max(grad[unit].shape)))
        assert 0.65 < sigma.min() and sigma.max() < 1.25


SHARED = {  # 8 x 12 three times over, once tall, once as the first part of a split, and 8 x 8 three times
    "experts": EXPERTS,
    "tall": Weight((2, 12, 8), ("groups", "group_in", "o_latent"), INIT, matrix=(1, 2)),
    "split": Weight((8, 28), ("embed", "mix"), INIT, split=(12, 8, 8), stack=(3,)),
    "square": Weight((8, 8), ("embed", "mix"), INIT),
}


def test_weights_of_one_shape_are_updated_as_if_alone():
    grads = arrays(SHARED)
    tx = o.build(SHARED, FLAT, 10)
    together, _ = jax.jit(tx.update)(grads, tx.init(grads), grads)
    for name, weight in SHARED.items():
        alone = directions(weight, grads[name])
        np.testing.assert_allclose(np.asarray(together[name]) / -FLAT.peak, alone, atol=ROUNDING, err_msg=name)


def lowered(declared) -> str:
    tx = o.build(declared, FLAT, 10)
    params = map_weights(lambda w: jax.ShapeDtypeStruct(w.full_shape, jnp.float32), declared)
    return jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).as_text()


@pytest.mark.parametrize(
    ("names", "shapes"), [(("square",), 1), (("experts", "tall"), 1), (("split",), 2), (tuple(SHARED), 2)]
)
def test_an_update_holds_one_loop_for_each_distinct_shape_of_matrices(names, shapes):
    assert lowered({name: SHARED[name] for name in names}).count("stablehlo.while") == shapes


def test_a_shape_that_one_weight_has_is_not_copied():
    assert "concatenate" not in lowered({"experts": EXPERTS, "square": SHARED["square"]})
    assert lowered({"experts": EXPERTS, "tall": SHARED["tall"]}).count("stablehlo.concatenate") == 1


def test_fused_hyper_connections_are_one_matrix():
    grad = gauss(5, (3, 8, 24))
    fused = directions(MIXES, grad, optim=dataclasses.replace(FLAT, mhc_fused=True))
    want = np.stack([orthogonal(g) for g in grad]) * 0.18 * np.sqrt(24)
    np.testing.assert_allclose(fused, want, atol=POLAR * 0.18 * np.sqrt(24))
    assert np.abs(directions(MIXES, grad) - want).max() > 0.05
