"""Experts on many devices equal a dense loop over tokens, however unevenly tokens choose (case 33)."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import PartitionSpec as P

from dsflash_jax import moe
from dsflash_jax.ops import swiglu
from dsflash_jax.sharding import Layout

TOKENS, D, F = 32, 16, 8
SIZES = {12: (2, 4), 384: (6, 8)}  # experts: chosen by a token, devices
WAYS = {"gather": {"capacity": 0.0}, "buckets": {"capacity": 8.0}, "ragged": {"capacity": 8.0, "exchange": "ragged"}}


def config(experts):
    return dataclasses.replace(
        tiny.T, n_routed_experts=experts, num_experts_per_tok=SIZES[experts][0], hidden_size=D, moe_intermediate_size=F
    )


@cache
def parts(experts):
    """Weights, tokens and how much each choice counts; float32."""
    rng, active = np.random.default_rng(experts), SIZES[experts][0]
    shapes = {"w1": (experts, D, F), "w2": (experts, F, D), "w3": (experts, D, F)}
    w = {k: jnp.asarray(rng.standard_normal(s) * s[1] ** -0.5, jnp.float32) for k, s in shapes.items()}
    x, weights = rng.standard_normal((TOKENS, D)), rng.uniform(0.2, 1, (TOKENS, active))
    return w, jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32)


def choices(kind, experts):
    """Expert ids [tokens, active]; `experts` itself is nobody, as in a place without a token."""
    active, devices = SIZES[experts]
    rng, mine = np.random.default_rng(1), experts // devices
    pick = lambda low, high: np.stack([low + rng.permutation(high - low)[:active] for _ in range(TOKENS)])  # noqa: E731
    if kind == "all to one shard":
        ids = pick(mine, 2 * mine)
    elif kind == "one token":
        ids = np.where(np.arange(TOKENS)[:, None] == 13, pick(0, experts), experts)
    else:  # a shard without tokens
        ids = pick(mine, experts)
    return jnp.asarray(ids, jnp.int32)


@cache
def exchanged(experts, **changes):
    """A jitted function of (weights, tokens, ids, how much each counts): loss, (output, rows lost) and gradients."""
    c, layout = config(experts), Layout(expert=SIZES[experts][1], **changes)
    p, mesh, split = layout.parallel, layout.mesh(jax.devices()[: layout.devices]), P("expert")

    def one(w, x, ids, weights):
        def share(w, x, weights):
            out, dropped = moe.routed(w, x, moe.Routing(None, ids, weights), c, "blocked", p=p)
            first = jax.lax.axis_index("expert") * out.size
            factors = jnp.cos(jnp.arange(out.size, dtype=jnp.float32) + first).reshape(out.shape)
            return jnp.sum(out * factors), (out, dropped[None])

        return jax.grad(share, (0, 1, 2), has_aux=True)(w, x, weights)

    return tiny.jit(
        jax.shard_map(one, mesh=mesh, in_specs=(split,) * 4, out_specs=(split, (split, split)), check_vma=False)
    )


@jax.jit
def dense(w, x, ids, weights, kept):
    """The same of a loop over choices, of which those that are not kept count nothing."""

    def share(w, x, weights):
        of = {k: jnp.concatenate([a, jnp.zeros_like(a[:1])])[ids] for k, a in w.items()}  # nobody is an expert of zeros
        gate, up = (jnp.einsum("nd,nadf->naf", x, of[k], precision="highest") for k in ("w1", "w3"))
        hidden = swiglu(gate, up, tiny.T.swiglu_limit) * (weights * kept)[..., None]
        out = jnp.einsum("naf,nafd->nd", hidden, of["w2"], precision="highest")
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)), out

    return jax.grad(share, (0, 1, 2), has_aux=True)(w, x, weights)


def compare(got, out, want, want_out):
    """Output, and gradients of every expert, of tokens and of their weights."""
    np.testing.assert_allclose(out, want_out, atol=1e-5)  # float32 sums of at most 16 terms, 6 choices
    for name in want[0]:
        error = np.abs(np.asarray(got[0][name]) - np.asarray(want[0][name])).max(axis=(1, 2))
        assert error.max() < 1e-5, (name, int(error.argmax()))
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", ["all to one shard", "one token", "a shard without tokens"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("experts", SIZES)
def test_uneven_choices_are_a_dense_loop_and_lose_nothing(experts, way, kind):
    w, x, weights = parts(experts)
    ids = choices(kind, experts)
    got, (out, dropped) = exchanged(experts, **WAYS[way])(w, x, ids, weights)
    want, want_out = dense(w, x, ids, weights, jnp.ones_like(weights))
    compare(got, out, want, want_out)
    assert not np.asarray(dropped).any() and np.abs(want_out).max() > 0.1


@pytest.mark.parametrize("exchange", ["buckets", "ragged"])
def test_rows_behind_a_small_capacity_are_counted_and_the_others_right(exchange):
    experts, capacity = 12, 1.5
    active, devices = SIZES[experts]
    w, x, weights = parts(experts)
    ids = choices("all to one shard", experts)
    got, (out, dropped) = exchanged(experts, capacity=capacity, exchange=exchange)(w, x, ids, weights)
    each = TOKENS * active // devices  # rows of one device, all to device 1
    rank = np.arange(TOKENS * active)  # over all devices, or on each
    room = int(capacity * each) if exchange == "ragged" else int(capacity * each / devices)
    kept = (rank if exchange == "ragged" else rank % each) < room
    want, want_out = dense(w, x, ids, weights, jnp.asarray(kept.reshape(TOKENS, active), jnp.float32))
    compare(got, out, want, want_out)
    np.testing.assert_array_equal(dropped, (~kept).reshape(devices, each).sum(axis=1))
    assert 0 < kept.sum() < len(kept)


@pytest.mark.parametrize("exchange", ["buckets", "ragged"])
def test_padding_takes_no_room_and_gets_nothing(exchange):
    """All padding is alike and would crowd at one device, and there before the tokens of text behind it."""
    experts = 12
    w, x, weights = parts(experts)
    (active, devices), real = SIZES[experts], np.arange(TOKENS) % 4 > 1
    even = np.arange(TOKENS * active).reshape(TOKENS, active) * (experts // devices) % experts
    ids = jnp.asarray(np.where(real[:, None], even, 0), jnp.int32)
    c, layout = config(experts), Layout(expert=devices, capacity=1.0, exchange=exchange)

    def one(w, x, ids, weights, real):
        out, dropped = moe.routed(w, x, moe.Routing(None, ids, weights), c, "blocked", p=layout.parallel, real=real)
        return out, dropped[None]

    mesh, split = layout.mesh(jax.devices()[:devices]), P("expert")
    run = jax.shard_map(one, mesh=mesh, in_specs=(split,) * 5, out_specs=(split, split), check_vma=False)
    out, dropped = tiny.jit(run)(w, x, ids, weights, jnp.asarray(real))
    _, want = dense(w, x, ids, weights, jnp.broadcast_to(real[:, None], weights.shape).astype(jnp.float32))
    np.testing.assert_allclose(out, want, atol=1e-5)
    assert not np.asarray(dropped).any() and np.abs(want).max() > 0.1


def test_a_tpu_program_exchanges_without_gaps():
    experts = 384
    w, x, weights = jax.eval_shape(partial(parts, experts))
    ids = jax.ShapeDtypeStruct(weights.shape, jnp.int32)
    function = exchanged(experts, **WAYS["ragged"])
    text = function.trace(w, x, ids, weights).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("ragged_all_to_all") == 4 + 3  # rows, ids, weights and answers; all but ids have a gradient
    assert "all_gather" in text  # of how many rows each device sends each
