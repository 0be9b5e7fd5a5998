"""model.py: how a model is run (scan, remat, attention path) changes neither its loss nor any gradient."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import flow, hyper, loss, model, modes
from dsflash_jax.config import Compute, Objective
from dsflash_jax.flow import Setup

AIM = Objective(index_keys="topk+random", index_random=3)  # every loss term, and slots drawn at random
WIDTH = 12


def graded(c, how):
    """Loss, report and gradients of every weight on two packed rows."""
    value = lambda w, batch: loss.total(Setup(c, how, AIM), w, batch, jax.random.key(3))  # noqa: E731
    batch = tiny.batch(c, tiny.tokens(c, 2, WIDTH), [[5, 6], [WIDTH]])
    return tiny.jit(jax.value_and_grad(value, has_aux=True))(tiny.weights(c), batch)


def close(got, want, tolerance):
    assert {name: d for name, d in tiny.worst(got, want).items() if not d <= tolerance} == {}


@pytest.fixture(scope="module")
def base():
    c = dataclasses.replace(tiny.T, hc_mult=2).with_modes("F2 U")
    return c, graded(c, tiny.STRICT)


def by_layer(c, layers):
    """The weights of a plan as one entry a layer."""
    out = {}
    for i, place in enumerate(modes.places(modes.plan(c.table))):
        one = layers
        for name in place.path:
            one = one[name]
        out[f"layer{i}"] = jax.tree.map(lambda a, at=place.index: a[at], one)
    return out


def test_nested_scans_equal_the_table_run_layer_by_layer():
    c = dataclasses.replace(tiny.T, hc_mult=2).with_modes("2(F1 2U)")  # one scan inside another
    assert len(modes.plan(c.table)) == 1
    w, batch = tiny.weights(c), tiny.batch(c, tiny.tokens(c, 2, WIDTH), [[5, 6], [WIDTH]])
    direction = jnp.asarray(np.random.default_rng(2).standard_normal((2, WIDTH, 2, c.hidden_size)), jnp.float32)

    def graded(nodes, layers):
        def value(layers):
            ctx = flow.context(c, batch, jax.random.key(3))
            stream = flow.Stream(*hyper.start(w["embed"][batch.tokens], c.hc_mult))
            stream, out = model.run(Setup(c, tiny.STRICT, AIM), nodes, layers, stream, flow.Shared(), ctx)
            return jnp.sum(stream.x * direction) + out.index.sum() + out.loads.balance.sum(), out

        return tiny.jit(jax.value_and_grad(value, has_aux=True))(layers)

    (value, out), grads = graded(modes.plan(c.table), w["layers"])
    # Also the slots drawn at random must be the layer's own: each divergence is equal.
    close(((value, out), by_layer(c, grads)), graded(c.table, by_layer(c, w["layers"])), 1e-5)  # other fusions


@pytest.mark.slow
def test_unrolling_scans_changes_nothing():
    c = dataclasses.replace(tiny.T, hc_mult=2).with_modes("S 2F1")
    close(graded(c, tiny.STRICT), graded(c, dataclasses.replace(tiny.STRICT, scan=False)), 1e-6)  # the same operations


@pytest.mark.parametrize("remat", [pytest.param("selective", marks=pytest.mark.slow), "full"])
def test_recomputing_equals_keeping(base, remat):
    c, kept = base
    close(graded(c, dataclasses.replace(tiny.STRICT, remat=remat)), kept, 1e-6)  # the same operations again


def test_dense_attention_equals_sparse(base):
    c, sparse = base
    close(graded(c, dataclasses.replace(tiny.STRICT, attention="dense")), sparse, 1e-5)  # sums in another order


@pytest.mark.parametrize("experts", ["ragged", "dense"])
def test_every_grouped_product_gives_the_same_model(base, experts):
    c, automatic = base
    close(graded(c, dataclasses.replace(tiny.STRICT, experts=experts)), automatic, 1e-5)  # sums in another order


def test_chunk_sizes_change_nothing(base):
    c, want = base
    close(graded(c, dataclasses.replace(tiny.STRICT, query_chunk=5, loss_chunk=7)), want, 1e-5)  # other orders


def test_rows_of_a_batch_may_be_permuted(base):
    c, _ = base
    run = tiny.jit(lambda w, batch: model.forward(Setup(c, tiny.STRICT), w, batch)[0])
    w, batch = tiny.weights(c), tiny.batch(c, tiny.tokens(c, 2, WIDTH), [[5, 6], [WIDTH]])
    turned = jax.tree.map(lambda a: a[::-1], batch)
    np.testing.assert_allclose(run(w, turned)[::-1], run(w, batch), atol=1e-6)  # another order of expert rows


def test_a_trace_of_every_layer_does_not_change_the_output(base):
    c, _ = base
    w, batch = tiny.weights(c), tiny.batch(c, tiny.tokens(c, 2, WIDTH))

    def traced(w, batch):
        traces = []
        y, _ = model.forward(Setup(c, Compute(dtype="float32")), w, batch, traces=traces)
        return y, traces

    y, traces = tiny.jit(traced)(w, batch)
    plain = tiny.jit(lambda w, batch: model.forward(Setup(c, tiny.STRICT), w, batch)[0])(w, batch)
    np.testing.assert_allclose(y, plain, atol=1e-5)  # larger chunks: sums in another order
    assert len(traces) == c.num_hidden_layers + 1 and "latent" in traces[0] and "latent" not in traces[1]


@pytest.mark.parametrize(
    ("how", "aim"),
    [
        (Compute(), AIM),
        (
            dataclasses.replace(tiny.STRICT, attention="dense", experts="dense", scan=False),
            Objective(index_keys="dense", index_teacher="group_mean", z_weight=0.1),
        ),
    ],
    ids=["released", "plain twins"],
)
def test_maths_holds_under_strict_promotion_of_types_and_ranks(how, aim):
    c = tiny.with_modes("Se F2 U F1p X")
    batch = tiny.batch(c, tiny.tokens(c, 2, WIDTH), [[5, 6], [WIDTH]])
    value = lambda w, batch: loss.total(Setup(c, how, aim), w, batch, jax.random.key(0))  # noqa: E731
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        (total, _), grads = jax.eval_shape(jax.value_and_grad(value, has_aux=True), tiny.weights(c), batch)
    assert {a.dtype for a in jax.tree.leaves((total, grads))} == {jnp.dtype("float32")}
