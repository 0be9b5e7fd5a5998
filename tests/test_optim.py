"""The optimiser against its defining equations, computed in float64 numpy by another route where there is one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dsflash_jax.params import Weight, constant, leaves, map_weights, norm, normal
from train import optim as o
from train.optim import Optim

INIT = normal(0.02)
FLAT = Optim(peak=1e-2, final=1e-2, warmup_steps=0, clip=0.0, weight_decay=0.0)  # constant rate, nothing on top
ROUNDING = 1e-5  # float32 sums of some hundred terms, ten multiplications deep, relative to the largest entry
POLAR = 2e-3  # the published schedule leaves singular values up to 2e-3 from 1


def gauss(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arrays(declared, seed: int = 0):
    weights, tree = jax.tree.flatten(declared)
    return jax.tree.unflatten(tree, [jnp.asarray(gauss(seed + i, w.full_shape)) for i, w in enumerate(weights)])


def flat(tree) -> dict:
    """Leaves by path."""
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def directions(weight: Weight, *grads: np.ndarray, optim: Optim = FLAT, params: np.ndarray | None = None):
    """Last of the updates that `grads` cause, divided by -learning rate; the parameters stay as they are."""
    tx = o.build({"w": weight}, optim, 10)
    params = {"w": jnp.zeros(weight.full_shape) if params is None else jnp.asarray(params)}
    state, step = tx.init(params), jax.jit(tx.update)
    for grad in grads:
        update, state = step({"w": jnp.asarray(grad)}, state, params)
    return np.asarray(update["w"]) / -optim.peak


def orthogonal(x: np.ndarray) -> np.ndarray:
    u, _, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return u @ v


def singular_values(x) -> np.ndarray:
    return np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)


def model() -> dict:
    """One weight of every kind a model declares."""
    return {
        "embed": Weight((24, 6), ("vocab", "embed"), INIT, "sinkhorn"),
        "layers": {
            "layer0": {
                "norm": norm(6, "embed").stacked(3),
                "sink": Weight((4,), ("heads",), constant(0.0), "scalar", stack=(3,)),
                "wq_b": Weight((5, 4, 3), ("q_latent", "heads", "head_dim"), INIT, matrix=(0, 2), stack=(3,)),
                "w1": Weight((8, 6, 4), ("experts", "embed", "expert_width"), INIT, matrix=(1, 2), stack=(3,)),
                "gate": Weight((6, 8), ("embed", "experts"), INIT, stack=(3,)),
                "bias": Weight((8,), ("experts",), constant(0.0), "rule", stack=(3,)),
                "hc_fn": Weight((12, 8), ("embed", "mix"), INIT, split=(2, 2, 4), stack=(3,)),
                "hc_scale": Weight((3,), ("mix",), constant(0.01), "scalar", stack=(3,)),
            },
            "layer3": {"table": Weight((40, 4), ("ngram_rows", "ngram_dim"), INIT, "sinkhorn", split=(17, 23))},
        },
        "head": Weight((6, 24), ("embed", "vocab"), INIT, "sinkhorn", matrix=(1, 0)),
    }


# Newton-Schulz and Muon (training 2.2)


@pytest.mark.parametrize("shape", [(128, 128), (128, 512), (512, 128)])
def test_muon_singular_values_and_rms_are_the_published_ones(shape):
    update = np.asarray(o.muon_update(jnp.asarray(gauss(0, shape))))
    sigma = singular_values(update) / (0.18 * np.sqrt(max(shape)))
    assert 1 - 2e-5 < sigma.min() and sigma.max() < 1.0006 + 2e-5  # 2e-5: float32 rounding of ten steps
    np.testing.assert_allclose(np.sqrt(np.mean(update**2)), 0.18, atol=5e-5)  # printed to four digits


def test_newton_schulz_survives_condition_number_1e4_where_five_plain_steps_do_not():
    u, v = (np.linalg.qr(gauss(seed, (256, 256)).astype(np.float64))[0] for seed in (1, 2))
    x = jnp.asarray((u * np.geomspace(1, 1e-4, 256)) @ v, jnp.float32)
    np.testing.assert_allclose(singular_values(o.newton_schulz(x)).min(), 0.9996, atol=1e-4)  # printed to four digits
    np.testing.assert_allclose(singular_values(o.newton_schulz(x, (5, 0))).min(), 0.013, atol=5e-4)  # to two


@pytest.mark.parametrize("shape", [(16, 48), (48, 16)])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e25])
def test_newton_schulz_is_the_polar_factor_at_any_scale(shape, scale):
    x = gauss(3, shape)
    np.testing.assert_allclose(o.newton_schulz(jnp.asarray(x * np.float32(scale))), orthogonal(x), atol=POLAR)


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


# Sinkhorn (training 2.3)


def balance(g: np.ndarray) -> np.ndarray:
    """The published algorithm as printed: float64, the whole matrix rewritten on every pass."""
    u = g.astype(np.float64)
    rho = np.sqrt((u**2).sum(1))
    u[rho <= 1e-3 * rho.mean()] = 0
    for k in range(1, 12):
        u = u / (np.sqrt((u**2).sum(k % 2, keepdims=True)) + 1e-20)
    return np.sqrt(g.shape[1]) * u


def test_sinkhorn_row_and_column_rms_are_the_published_ones():
    rng = np.random.default_rng(0)
    g = rng.standard_normal((4096, 256)) * np.exp(rng.standard_normal((4096, 1)))
    quiet = rng.choice(4096, 100, replace=False)
    g[quiet] *= 1e-9
    got = np.asarray(o.sinkhorn_update(jnp.asarray(g, jnp.float32)))
    moved = np.setdiff1d(np.arange(4096), quiet)
    assert not got[quiet].any()
    np.testing.assert_allclose(np.sqrt((got[moved] ** 2).mean(1)), 1, atol=2e-6)  # float32; 1e-12 in float64
    np.testing.assert_allclose(np.sqrt((got**2).mean(0)), np.sqrt(3996 / 4096), atol=2e-6)
    np.testing.assert_allclose(got, balance(g), atol=ROUNDING * np.abs(got).max())


def test_sinkhorn_keeps_zero_columns_zero_and_the_rest_finite():
    g = gauss(1, (30, 8))
    g[:, 3] = 0
    got = np.asarray(o.sinkhorn_update(jnp.asarray(g)))
    assert not got[:, 3].any()
    np.testing.assert_allclose(got, balance(g), atol=ROUNDING * np.abs(got).max())


def test_sinkhorn_momentum_is_an_average_that_looks_ahead():
    g1, g2 = gauss(1, (30, 8)), gauss(2, (30, 8))
    loud = dataclasses.replace(FLAT, sinkhorn_eps=1.0)  # so large an eps makes the momentum's scale visible
    mixed = 0.95 * (0.95 * 0.05 * g1 + 0.05 * g2) + 0.05 * g2
    want = 0.18 * np.asarray(o.sinkhorn_update(jnp.asarray(mixed), eps=1.0))
    got = directions(Weight((30, 8), ("vocab", "embed"), INIT, "sinkhorn"), g1, g2, optim=loud)
    np.testing.assert_allclose(got, want, atol=ROUNDING * np.abs(want).max())


def test_rows_are_the_vocabulary_whatever_the_storage_order_and_do_not_decay():
    grad, params = gauss(1, (40, 8)), gauss(2, (8, 40))
    head = Weight((8, 40), ("embed", "vocab"), INIT, "sinkhorn", matrix=(1, 0))
    got = directions(head, grad.T, optim=dataclasses.replace(FLAT, weight_decay=0.1), params=params)
    np.testing.assert_allclose(got.T, 0.18 * balance(grad), atol=ROUNDING)


def test_each_hash_head_is_balanced_alone_at_five_times_the_rate():
    weight = Weight((40, 4), ("ngram_rows", "ngram_dim"), INIT, "sinkhorn", split=(17, 23))
    grad = gauss(1, (40, 4)) * np.repeat([1e-6, 1], [17, 23])[:, None].astype(
        np.float32
    )  # together, 17 would be masked
    want = 5 * 0.18 * np.concatenate([balance(grad[:17]), balance(grad[17:])])
    np.testing.assert_allclose(directions(weight, grad), want, atol=5 * ROUNDING)


def test_rows_never_read_stay_and_rows_read_earlier_follow_their_momentum():
    rows, width, rate = 1000, 8, FLAT.peak * 5 * 0.18
    rng = np.random.default_rng(0)
    ids = [rng.choice(500, 20, replace=False) for _ in range(3)]
    ids[0][1] = ids[0][0]  # one row read twice
    targets = [gauss(10 + i, (20, width)) for i in range(3)]
    weight = Weight((rows, width), ("ngram_rows", "ngram_dim"), INIT, "sinkhorn")
    tx = o.build({"w": weight}, dataclasses.replace(FLAT, weight_decay=0.1), 10)
    first = gauss(1, (rows, width))
    params, want, momentum = {"w": jnp.asarray(first)}, first.astype(np.float64), np.zeros((rows, width))
    state = tx.init(params)

    @jax.jit
    def step(params, state, i, y):
        grads = jax.grad(lambda p: jnp.sum(p["w"][i] * y))(params)
        update, state = tx.update(grads, state, params)
        return optax.apply_updates(params, update), state

    for i, y in zip(ids, targets, strict=True):
        params, state = step(params, state, i, y)
        grad = np.zeros((rows, width))
        np.add.at(grad, i, y)  # a row read twice gets the sum
        momentum = 0.95 * momentum + 0.05 * grad
        want -= rate * balance(0.95 * momentum + 0.05 * grad)
    got, unread = np.asarray(params["w"]), np.setdiff1d(np.arange(rows), np.concatenate(ids))
    np.testing.assert_array_equal(got[unread], first[unread])
    np.testing.assert_allclose(got, want, atol=2e-6)  # float32 spacing of entries up to 4, three steps
    once = np.setdiff1d(ids[0], np.concatenate(ids[1:]))
    moved = np.sqrt(np.mean((got - first)[once] ** 2, axis=1))
    assert moved.min() > 2 * rate  # the row moved in all three updates, each time by the full rate


# AdamW, routing, clipping


@pytest.mark.parametrize(("family", "decay"), [("norm", 0.1), ("scalar", 0.0)])
def test_adamw_matches_a_hand_computation(family, decay):
    first = gauss(0, (6,))
    optim = dataclasses.replace(FLAT, weight_decay=0.1)
    tx = o.build({"w": Weight((6,), ("embed",), INIT, family)}, optim, 10)
    params, want = {"w": jnp.asarray(first)}, first.astype(np.float64)
    state, m, v = tx.init(params), np.zeros(6), np.zeros(6)
    for t in range(1, 4):
        g = gauss(t, (6,)).astype(np.float64)
        update, state = tx.update({"w": jnp.asarray(g, jnp.float32)}, state, params)
        params = optax.apply_updates(params, update)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        want = want - 1e-2 * ((m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-20) + decay * want)
    np.testing.assert_allclose(params["w"], want, atol=1e-6)  # float32 spacing of entries near 1, three steps


def test_every_weight_has_the_label_of_its_family():
    names = o.labels(model())
    assert jax.tree.structure(names) == jax.tree.structure(model())
    assert names["embed"] == names["head"] == names["layers"]["layer3"]["table"] == "sinkhorn"
    assert names["layers"]["layer0"] == {
        "norm": "adamw_decay", "sink": "adamw", "wq_b": "muon", "w1": "muon", "gate": "muon", "bias": "rule",
        "hc_fn": "muon", "hc_scale": "adamw",
    }  # fmt: skip


def test_router_gates_alone_move_to_adamw_on_request():
    before, after = (flat(o.labels(model(), Optim(router_family=f))) for f in ("muon", "adamw"))
    assert {k: v for k, v in after.items() if before[k] != v} == {"layers/layer0/gate": "adamw_decay"}


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (Weight((4,), ("embed",), INIT), "layer/w: matrix=.* two different axes"),
        (Weight((4, 4), ("embed", "mix"), INIT, matrix=(0, 2)), "layer/w: matrix=.* two different axes"),
        (Weight((4, 6), ("embed", "mix"), INIT, split=(2, 3)), "layer/w: split=.* adds up to 5, but axis 1 .* 6"),
        (Weight((4, 6), ("vocab", "embed"), INIT, "sinkhorn", split=(6,)), "layer/w: split=.* axis 0 .* 4 entries"),
    ],
)
def test_a_declaration_without_a_route_is_refused_by_name(weight, message):
    with pytest.raises(ValueError, match=message):
        o.build({"layer": {"w": weight}}, FLAT, 10)


def test_an_unknown_family_is_refused_by_name():
    weight = Weight((4, 4), ("embed", "mix"), INIT)
    object.__setattr__(weight, "family", "adam")  # past the type check that tests run under
    with pytest.raises(ValueError, match="layer/w: unknown optimiser family 'adam', expected"):
        o.labels({"layer": {"w": weight}})


@pytest.mark.parametrize(
    ("array", "message"), [(jnp.zeros((2, 6), jnp.bfloat16), "w: .*float32 master"), (jnp.zeros((6, 2)), "w: declared")]
)
def test_parameters_unlike_their_declaration_are_refused(array, message):
    with pytest.raises(ValueError, match=message):
        o.build({"w": Weight((2, 6), ("embed", "mix"), INIT)}, FLAT, 10).init({"w": array})


@pytest.mark.parametrize(("limit", "scale"), [(2.5, 0.25), (11.0, 1.0), (0.0, 1.0)])
def test_the_clip_norm_counts_every_family_but_rule(limit, scale):
    kinds = {"m": "muon", "s": "sinkhorn", "n": "norm", "c": "scalar", "r": "rule"}
    declared = {k: Weight((5, 5), ("embed", "mix"), INIT, family) for k, family in kinds.items()}
    grads = jax.tree.map(lambda w: jnp.ones(w.shape), declared)  # each of norm 5, the four that count of norm 10
    grads["r"] *= 7
    np.testing.assert_allclose(o.grad_norm(declared, grads), 10, rtol=1e-6)  # float32 sum
    tx = o.build(declared, dataclasses.replace(FLAT, clip=limit), 10)
    _, state = jax.jit(tx.update)(grads, tx.init(grads), grads)
    momentum = state[1].inner_states["muon"].inner_state[0].trace["m"]  # the clipped gradient itself
    np.testing.assert_allclose(momentum, scale, rtol=1e-6)  # float32 product


def test_state_bytes_are_the_documented_ones():
    declared = model()
    abstract = map_weights(lambda w: jax.ShapeDtypeStruct(w.full_shape, jnp.float32), declared)
    state = jax.eval_shape(o.build(declared, FLAT, 10).init, abstract)
    per_entry = {"muon": 4, "sinkhorn": 4, "adamw_decay": 8, "adamw": 8, "rule": 0}
    names = flat(o.labels(declared))
    want = 3 * 4 + sum(per_entry[names[k]] * w.size for k, w in leaves(declared).items())
    assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) == want
    assert [(x.shape, x.dtype) for k, x in flat(state).items() if "table" in k] == [((40, 4), jnp.float32)]


# Learning rate (training 2.4)

UPDATE_TOKENS = 100_663_296
RELEASED_STEPS = round(45e12 / UPDATE_TOKENS)


@pytest.mark.parametrize(
    ("tokens", "want", "digit"),
    [(28, 2.6e-4, 1e-5), (31, 2.257e-4, 1e-7), (34, 1.430e-4, 1e-7), (37, 6.03e-5, 1e-7), (40, 2.6e-5, 1e-6)],
)
def test_the_rate_passes_the_published_points(tokens, want, digit):
    rate = o.schedule(Optim(), RELEASED_STEPS)(round(tokens * 1e12 / UPDATE_TOKENS))
    np.testing.assert_allclose(rate, want, atol=digit / 2)  # half of the last printed digit


def test_the_rate_warms_up_from_the_first_update_and_is_flat_where_stated():
    rate = o.schedule(Optim(), RELEASED_STEPS)
    got = [float(rate(t)) for t in (0, 999, 1999, 2000, 200_000, 400_000, RELEASED_STEPS - 1)]
    np.testing.assert_allclose(got, [1.3e-7, 1.3e-4, 2.6e-4, 2.6e-4, 2.6e-4, 2.6e-5, 2.6e-5], rtol=1e-6)  # float32


def test_updates_use_the_rate_of_their_own_number_from_0():
    optim = Optim(peak=1e-2, warmup_steps=4, final=0.0)
    tx = o.build({"w": Weight((6,), ("embed",), INIT, "scalar")}, optim, 10)
    params, grads = {"w": jnp.zeros(6)}, {"w": jnp.ones(6)}
    state = tx.init(params)
    for t in range(3):
        update, state = tx.update(grads, state, params)  # Adam's direction is 1 for a constant gradient
        np.testing.assert_allclose(update["w"], -0.0025 * (t + 1), rtol=1e-5)  # float32 bias correction
        np.testing.assert_allclose(o.schedule(optim, 10)(t), 0.0025 * (t + 1), rtol=1e-6)  # float32


def test_a_warmup_longer_than_the_constant_phase_is_refused():
    with pytest.raises(ValueError, match="warmup_steps=2000 does not end before the decay starts at step"):
        o.schedule(Optim(), 1000)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final": 1.0}, "final <= peak"),
        ({"decay_start": 0.9}, "set final to peak"),
        ({"sinkhorn_iterations": 10}, "must be odd"),
        ({"muon_momentum": 1.0}, "optim.muon_momentum must be in"),
        ({"adam_betas": (0.9, 1.0)}, r"optim.adam_betas\[1\] must be in"),
        ({"clip": -1.0}, "optim.clip must not be negative"),
        ({"adam_eps": 0.0}, "optim.adam_eps must be positive"),
        ({"router_family": "adam"}, "did you mean 'adamw'"),
    ],
)
def test_a_bad_setting_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        Optim(**change)


# Whole runs (cases 36, 42, 43)

RUN = Optim(peak=1e-2, final=1e-3, warmup_steps=3)


@pytest.fixture(scope="module")
def step():
    """One jitted update that owns its parameters and state: (params, state, grads) to the next two."""
    tx = o.build(model(), RUN, 10)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update, donate_argnums=(0, 1))


def start() -> tuple:
    params = arrays(model())
    return params, o.build(model(), RUN, 10).init(params)


def advance(step, params, state, updates):
    for i in updates:
        params, state = step(params, state, arrays(model(), 100 * i))
    return params, state


def test_five_updates_saved_and_resumed_equal_ten(step):
    straight = advance(step, *start(), range(10))
    saved = jax.tree.map(np.array, advance(step, *start(), range(5)))  # copies in host memory, as a checkpoint has
    resumed = advance(step, *jax.tree.map(jnp.array, saved), range(5, 10))
    jax.tree.map(np.testing.assert_array_equal, resumed, straight)
    assert [int(x) for x in jax.tree.leaves(straight[1]) if x.dtype == jnp.int32] == [10, 10, 10]


def test_an_update_reuses_the_memory_of_donated_parameters_and_state(step):
    params, state = start()
    step(params, state, arrays(model(), 1))
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))


def test_every_weight_moves_but_rule_weights_keep_their_bits_and_have_no_state(step):
    before = flat(arrays(model()))
    params, state = advance(step, *start(), range(2))
    for name, after in flat(params).items():
        assert np.array_equal(before[name], after) == (name == "layers/layer0/bias"), name
    assert not any("bias" in name for name in flat(state))


def test_zero_gradients_move_nothing_but_the_decayed_weights(step):
    before, names = flat(arrays(model())), flat(o.labels(model()))
    params, _ = step(*start(), jax.tree.map(jnp.zeros_like, arrays(model())))
    kept = 1 - RUN.peak / 3 * 0.1  # first of three warm-up updates
    for name, after in flat(params).items():
        want = before[name] * (kept if names[name] in ("muon", "adamw_decay") else 1)
        np.testing.assert_allclose(after, want, rtol=2e-7, err_msg=name)  # float32 rounding


CHANGES = [
    {"peak": 2e-2}, {"final": 2e-3}, {"warmup_steps": 1}, {"decay_start": 0.5}, {"decay_end": 0.7}, {"clip": 0.5},
    {"weight_decay": 0.2}, {"muon_momentum": 0.5}, {"muon_steps": (5, 0)}, {"muon_rms": 0.2},
    {"sinkhorn_momentum": 0.5}, {"sinkhorn_iterations": 1}, {"sinkhorn_tau": 0.9}, {"sinkhorn_eps": 0.1},
    {"sinkhorn_gamma": 0.06}, {"table_multiplier": 1.0}, {"adam_betas": (0.9, 0.99)}, {"adam_eps": 0.1},
    {"router_family": "adamw"}, {"mhc_fused": True},
]  # fmt: skip


def program(optim: Optim) -> str:
    tx, params = o.build(model(), optim, 10), arrays(model())
    return str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_setting_changes_the_program(change):
    assert program(dataclasses.replace(RUN, **change)) != program(RUN)


def test_the_list_of_changes_covers_every_setting():
    changed = {key for change in CHANGES for key in change}
    assert {f.name for f in dataclasses.fields(Optim)} - changed == {
        "bias_rate",  # read by the training step
        *("vision_start", "vision_rate"),  # of image towers, see test_freeze.py
    }


def test_updates_and_state_are_the_same_on_eight_devices(step):
    declared = model()
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    axes = {"experts": "model", "vocab": "model", "heads": "model", "ngram_rows": "model", "embed": "data"}
    place = lambda w: NamedSharding(mesh, P(*[None] * len(w.stack), *map(axes.get, w.axes)))  # noqa: E731
    shardings = map_weights(place, declared)
    tx, (params, state) = o.build(declared, RUN, 10), start()
    state_shardings = optax.tree.map_params(
        tx,
        lambda _, s: s,
        state,
        shardings,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
        is_leaf=lambda x: isinstance(x, optax.MaskedNode),
    )
    copies = jax.tree.map(np.array, (params, state))  # device_put alone may share memory that `step` then gives away
    sharded = jax.device_put(copies, (shardings, state_shardings))
    for seed in (1, 2):
        sharded = step(*sharded, jax.device_put(arrays(declared, seed), shardings))
        params, state = step(params, state, arrays(declared, seed))
    w1 = sharded[1][1].inner_states["muon"].inner_state[0].trace["layers"]["layer0"]["w1"]
    assert w1.sharding.spec == P(None, "model", "data")
    for name, want in flat((params, state)).items():  # sums run in another order
        np.testing.assert_allclose(flat(sharded)[name], want, atol=ROUNDING, err_msg=name)


# Router bias (training 3.2)


def test_router_bias_moves_by_the_sign_of_the_load_error_in_each_set():
    bias = jnp.asarray([[0.5, 0.0, -0.5], [0.0, 0.0, 0.0]], jnp.float32)
    counts = jnp.asarray([[9, 0, 3], [2, 4, 3]], jnp.int32)
    want = [[0.499, 0.001, -0.499], [0.001, -0.001, 0.0]]
    np.testing.assert_allclose(o.router_bias_update(bias, counts, 0.001), want, atol=1e-7)  # float32 spacing near 0.5


@pytest.mark.parametrize("count", [0, 3, 16_777_217, 100_000_007])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32])
def test_router_bias_keeps_its_bits_under_equal_loads(count, dtype):
    bias = jnp.asarray(gauss(0, (2, 384)))
    np.testing.assert_array_equal(o.router_bias_update(bias, jnp.full((2, 384), count, dtype), 0.001), bias)


def test_the_maths_holds_under_strict_promotion():
    x = jnp.asarray(gauss(0, (8, 12)))
    with jax.numpy_dtype_promotion("strict"):
        results = (
            o.muon_update(x),
            o.sinkhorn_update(x),
            o.router_bias_update(x, jnp.ones((8, 12), jnp.int32), 0.001),
            o.grad_norm({"w": norm(12, "embed")}, {"w": x}),
            o.schedule(Optim(), 10_000)(jnp.int32(3)),
        )
    assert all(r.dtype == jnp.float32 for r in results)
