"""model.py: declarations, the Linen shell, parameter counts, gradients of shared values, and numerical edges."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import flow, loss, model
from dsflash_jax.config import Config, Objective
from dsflash_jax.flow import Setup
from dsflash_jax.params import leaves

SMALL = dataclasses.replace(tiny.T, hc_mult=2).with_modes("S F1")


@pytest.fixture(scope="module")
def released(golden) -> Config:
    return Config.from_json(golden / "config.released.json")


def test_linen_initialises_the_same_tree_and_values():
    key = jax.random.key(4)
    shell = model.Model(SMALL, tiny.STRICT)
    got = tiny.jit(shell.init)(key, tiny.batch(SMALL, tiny.tokens(SMALL, 1, 6)))["params"]
    want = tiny.jit(lambda key: model.init(model.declare(SMALL), key))(key)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_linen_applies_forward_and_head():
    w, batch = tiny.weights(SMALL), tiny.batch(SMALL, tiny.tokens(SMALL, 2, 6))
    shell = model.Model(SMALL, tiny.STRICT)
    got, out = tiny.jit(lambda w, batch: shell.apply({"params": w}, batch))(w, batch)
    y, want = tiny.jit(lambda w, batch: model.forward(Setup(SMALL, tiny.STRICT), w, batch))(w, batch)
    head = np.asarray(w["head"], np.float64)
    np.testing.assert_allclose(got, np.asarray(y) @ head.T, atol=1e-5)  # float32 sums of 16 terms
    jax.tree.map(np.testing.assert_array_equal, out, want)


def test_fresh_leaves_have_their_declared_spread():
    c = dataclasses.replace(SMALL, initializer_range=0.1)
    w = tiny.jit(lambda key: model.init(model.declare(c), key))(jax.random.key(0))
    for path, declared in leaves(model.declare(c)).items():
        leaf = w
        for name in path.split("/"):
            leaf = leaf[name]
        assert leaf.shape == declared.full_shape and leaf.dtype == jnp.float32
        if leaf.size >= 512:
            np.testing.assert_allclose(np.std(leaf), 0.1, rtol=0.15)  # 4.7 standard errors of 512 draws
    experts = w["layers"]["layer1"]["ffn"]["experts"]
    assert float(jnp.abs(experts["w1"] - experts["w3"]).max()) > 0  # leaves of one shape draw from different keys


def test_released_parameter_counts(released):
    own = ("embed", "layers", "norm", "head")  # the image tower is counted apart
    sizes = {path: w.size for path, w in leaves(model.declare(released)).items() if path.split("/")[0] in own}
    memory = {path: n for path, n in sizes.items() if "/engram/" in path}
    backbone = sum(sizes.values()) - sum(memory.values())
    tables = sum(n for path, n in memory.items() if path.endswith("embed"))
    assert round(backbone / 1e9, 3) == 551.566
    assert round(tables / 1e9, 3) == 196.614
    assert round(sum(memory.values()) / 1e9, 3) == 196.929


def test_released_model_has_shapes_without_allocation(released):
    w = jax.eval_shape(lambda: model.init(model.declare(released), jax.random.key(0), jnp.bfloat16))
    assert sum(a.size for a in jax.tree.leaves(w)) == sum(d.size for d in leaves(model.declare(released)).values())
    ids = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    rows = jax.ShapeDtypeStruct((1, 4096, 2, 24), jnp.int32)
    batch = flow.Batch(ids, ids, ids, engram_rows=rows)
    run = lambda w, batch: model.forward(Setup(released, tiny.Compute()), w, batch)  # noqa: E731
    y, out = jax.eval_shape(run, w, batch)
    assert y.shape == (1, 4096, 5120) and y.dtype == jnp.bfloat16
    assert out.loads.counts.shape == (40, 384) and out.loads.counts.dtype == jnp.float32


def test_a_batch_without_table_rows_is_refused_when_a_layer_needs_them():
    c = tiny.with_modes("Se")
    batch = dataclasses.replace(tiny.batch(c, tiny.tokens(c, 1, 6)), engram_rows=None)
    with pytest.raises(AssertionError, match="engram_rows"):
        jax.eval_shape(lambda w: model.forward(Setup(c, tiny.STRICT), w, batch), tiny.weights(c))


@pytest.fixture(scope="module")
def shared_kv():
    """A Full layer and two that reuse its KV; its own attention output can be switched off."""
    c = dataclasses.replace(tiny.T, hc_mult=2).with_modes("F2 2U")
    batch = tiny.batch(c, tiny.tokens(c, 1, 10))
    w = tiny.weights(c)

    def value(compressor, own):
        full = w["layers"]["layer0"]
        attn = full["attn"] | {"compressor": compressor, "wo_b": full["attn"]["wo_b"] * own}
        tree = w | {"layers": w["layers"] | {"layer0": full | {"attn": attn}}}
        return loss.total(Setup(c, tiny.STRICT, Objective(index_weight=0, balance_weight=0)), tree, batch)[0]

    return w["layers"]["layer0"]["attn"]["compressor"], tiny.jit(value), tiny.jit(jax.grad(value))


@pytest.mark.parametrize("own", [1.0, 0.0])
@pytest.mark.parametrize("name", ["wkv", "wgate", "norm"])
def test_gradient_of_shared_kv_equals_a_finite_difference(shared_kv, own, name):
    compressor, value, grad = shared_kv
    own = jnp.float32(own)
    got = np.asarray(grad(compressor, own)[name], np.float64)
    assert np.abs(got).max() > 1e-4  # with own = 0 it arrives through the Reuse layers alone
    # Along the gradient the difference is largest, so the loss's float32 rounding weighs least.
    direction = got / np.linalg.norm(got)
    step = 4e-3
    at = [
        float(value(compressor | {name: compressor[name] + jnp.asarray(s * step * direction, jnp.float32)}, own))
        for s in (-2, -1, 1, 2)
    ]
    slope = (8 * (at[2] - at[1]) - (at[3] - at[0])) / (12 * step)  # error of fourth order in the step
    assert abs(slope - np.linalg.norm(got)) <= 1e-3 * np.linalg.norm(got) + 5e-5  # rounding 1e-7 * 4 / step


EDGE = dataclasses.replace(tiny.T, hc_mult=2).with_modes("F2 X")


@pytest.fixture(scope="module")
def edge():
    """Loss and gradients of a one-token document, a fully padded row and two packed documents."""
    aim = Objective(index_keys="topk+random", index_random=2)
    lengths = [[1], [], [4, 5], [9]]
    run = tiny.jit(
        jax.value_and_grad(
            lambda w, b: loss.total(Setup(EDGE, tiny.STRICT, aim), w, b, jax.random.key(0)), has_aux=True
        )
    )
    return run, tiny.batch(EDGE, tiny.tokens(EDGE, 4, 9), lengths)


def damaged(w, change):
    """The tree with `change(name, leaf)` applied to every leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, a: change("/".join(k.key for k in path), a), w)


@pytest.mark.parametrize(
    "change",
    [
        lambda path, a: a,
        lambda path, a: jnp.zeros_like(a) if path.endswith("weights_proj") else a,  # all index scores equal
        lambda path, a: a * 200 if path.endswith("gate/weight") else a,  # router logits to -120 and below
        lambda path, a: a * 1e4 if path.endswith("wq_b") else a,  # logits of size 1e4, masked ones among them
    ],
    ids=["short and padded rows", "equal scores", "underflowing affinities", "large logits"],
)
def test_edges_give_finite_loss_and_gradients(edge, change):
    run, batch = edge
    with jax.debug_nans(True):
        (value, _), grads = run(damaged(tiny.weights(EDGE), change), batch)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_a_row_of_one_token_gives_finite_loss_and_gradients():
    """No slot exists at ratio 2, and the only target is given from outside."""
    ids = tiny.tokens(EDGE, 1, 1)
    batch = tiny.batch(EDGE, ids).replace(targets=jnp.asarray(ids), loss_mask=jnp.ones((1, 1), jnp.float32))
    setup = Setup(EDGE, tiny.STRICT, Objective(index_keys="topk+random", index_random=2))
    run = tiny.jit(jax.value_and_grad(lambda w, b: loss.total(setup, w, b, jax.random.key(0))[0]))
    with jax.debug_nans(True):
        value, grads = run(tiny.weights(EDGE), batch)
    assert value > 0
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads)) and grads["head"].any()


def test_a_nan_in_one_row_leaves_the_other_rows_alone():
    w = tiny.weights(EDGE)
    ids = np.random.default_rng(0).integers(1, EDGE.vocab_size, (2, 9))
    poisoned = ids.copy()
    poisoned[0, 3] = 0
    bad = w | {"embed": w["embed"].at[0].set(jnp.nan)}
    run = tiny.jit(lambda w, batch: model.forward(Setup(EDGE, tiny.STRICT), w, batch)[0])
    got, want = run(bad, tiny.batch(EDGE, poisoned)), run(w, tiny.batch(EDGE, ids))
    np.testing.assert_allclose(got[1], want[1], atol=1e-6)  # another order of expert rows
    assert np.isnan(got[0, 3]).all()


def test_visible_groups_reach_the_last_whole_one():
    """Seven tokens at ratio 2: a query may select (t + 1) // 2 groups, and a token of an unfinished one moves none."""
    c = dataclasses.replace(tiny.T, index_topk=8).with_modes("F2")

    def traced(w, batch):
        traces = []
        y, _ = model.forward(Setup(c, tiny.STRICT), w, batch, traces=traces)
        return y, traces[0]["topk"]

    run, w, ids = tiny.jit(traced), tiny.weights(c), tiny.tokens(c, 1, 7)
    y, topk = run(w, tiny.batch(c, ids))
    np.testing.assert_array_equal((topk[0] >= 0).sum(axis=-1), [0, 1, 1, 2, 2, 3, 3])
    for changed, untouched in ((5, 5), (6, 6)):
        other = ids.copy()
        other[0, changed] = (other[0, changed] + 1) % c.vocab_size
        np.testing.assert_allclose(run(w, tiny.batch(c, other))[0][0, :untouched], y[0, :untouched], atol=1e-6)
