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
from tiny_optim import FLAT, INIT, ROUNDING, arrays, flat, gauss

from dsflash_jax.params import Weight, constant, leaves, map_weights, norm
from train import newton_schulz, sinkhorn
from train import optim as o
from train.optim import Optim


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
            newton_schulz.muon_update(x),
            sinkhorn.sinkhorn_update(x),
            o.router_bias_update(x, jnp.ones((8, 12), jnp.int32), 0.001),
            o.grad_norm({"w": norm(12, "embed")}, {"w": x}),
            o.schedule(Optim(), 10_000)(jnp.int32(3)),
        )
    assert all(r.dtype == jnp.float32 for r in results)
