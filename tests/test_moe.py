"""moe.py: router, grouped products, clamp, and the balance statistics."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import flow, moe
from dsflash_jax.flow import MIN_BALANCE_TOKENS

C = tiny.T
PRODUCTS = {"ragged": moe.ragged_dot, "blocked": moe.blocked_dot, "dense": moe.dense_dot}


def routed_by(logits, bias, **changes):
    """Routing of one token whose router logits are given."""
    c = dataclasses.replace(C, n_routed_experts=len(logits), **changes)
    w = {"weight": jnp.asarray([logits], jnp.float32), "bias": jnp.asarray(bias, jnp.float32)}
    return moe.route(w, jnp.ones((1, 1)), None, c)


def test_the_bias_chooses_but_does_not_weigh():
    got = routed_by([0, 1, 2, 3], [10, 10, 0, 0])
    order = np.argsort(got.experts[0])
    np.testing.assert_array_equal(np.asarray(got.experts[0])[order], [0, 1])
    # With the bias in the weights: 0.739305, 0.760695.
    np.testing.assert_allclose(np.asarray(got.weights[0])[order], [0.631192, 0.868808], atol=1e-6)


def test_tiny_affinities_survive_a_large_bias():
    got = routed_by([-30, -31, -40], [12, 12, 0])
    order = np.argsort(got.experts[0])
    np.testing.assert_array_equal(np.asarray(got.experts[0])[order], [0, 1])
    np.testing.assert_allclose(np.asarray(got.weights[0])[order], [0.933689, 0.566311], atol=1e-6)


def test_the_bias_gets_exactly_zero_gradient():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, C.hidden_size)), jnp.float32)
    w = tiny.weights(C.with_modes("S"))["layers"]["layer0"]["ffn"]
    grads = jax.jit(jax.grad(lambda w: jnp.sum(jnp.square(moe.apply(w, x, None, C, "blocked")[0]))))(w)
    np.testing.assert_array_equal(grads["gate"]["bias"], np.zeros(C.n_routed_experts))
    assert float(jnp.abs(grads["gate"]["weight"]).max()) > 0


def test_an_underflowing_affinity_has_gradient_0_not_nan():
    with jax.debug_nans(True):
        value, grad = jax.value_and_grad(lambda x: moe.sqrt_softplus(x).sum())(jnp.asarray([-120.0, 0.0]))
    np.testing.assert_allclose(value, np.sqrt(np.log(2)), rtol=1e-6)
    # d sqrt(log(1 + e^x)) at 0 = 0.5 / (2 sqrt(log 2))
    np.testing.assert_allclose(grad, [0, 0.25 / np.sqrt(np.log(2))], rtol=1e-6)


@pytest.mark.parametrize(
    ("scoring", "want"), [("sigmoid", 1 / (1 + np.exp(-0.5))), ("softmax", np.exp(0.5) / (1 + np.exp(0.5)))]
)
def test_other_affinities_divide_logits_by_the_temperature(scoring, want):
    c = dataclasses.replace(C, scoring_func=scoring, gate_temp=2.0)
    got = moe.affinity(jnp.asarray([[1.0, 0.0]]), c)
    np.testing.assert_allclose(got[0, 0], want, rtol=1e-6)


def test_one_expert_a_token_is_not_normalised():
    got = routed_by([0, 1], [0, 0], num_experts_per_tok=1)
    np.testing.assert_allclose(got.weights, [[1.5 * np.sqrt(np.log1p(np.e))]], rtol=1e-6)
    raw = routed_by([0, 1], [0, 0], norm_topk_prob=False)
    np.testing.assert_allclose(np.sort(raw.weights[0]), 1.5 * np.sqrt(np.log1p(np.exp([0, 1]))), rtol=1e-6)


@pytest.mark.parametrize("how", list(PRODUCTS))
@pytest.mark.parametrize(
    "sizes", [[3, 0, 5, 4], [12, 0, 0, 0], [0, 0, 0, 12], [0, 1, 0, 0], [2, 0, 1, 4], [7, 0, 0, 0]]
)
def test_grouped_products_equal_a_loop_over_experts(how, sizes):
    rng = np.random.default_rng(0)
    rows = sum(sizes)
    x, w = rng.standard_normal((rows, 3)), rng.standard_normal((4, 3, 2))
    ct = rng.standard_normal((rows, 2))
    expert = np.repeat(np.arange(4), sizes)
    want = np.einsum("ri,rio->ro", x, w[expert])
    want_w = np.zeros_like(w)
    np.add.at(want_w, expert, np.einsum("ri,ro->rio", x, ct))
    x, w, ct = (jnp.asarray(a, jnp.float32) for a in (x, w, ct))
    sizes = jnp.asarray(sizes, jnp.int32)
    got, pull = jax.vjp(lambda x, w: PRODUCTS[how](x, w, sizes), x, w)
    d_x, d_w = pull(ct)
    np.testing.assert_allclose(got, want, atol=1e-5)  # float32 sums of 3 terms
    np.testing.assert_allclose(d_x, np.einsum("ro,rio->ri", ct, np.asarray(w)[expert]), atol=1e-5)
    np.testing.assert_allclose(d_w, want_w, atol=1e-5)  # sums of up to 12 terms; experts without rows get 0


@pytest.mark.parametrize("rows", [7, 12])  # a block is one row, or three
@pytest.mark.parametrize("sizes", [[2, 0, 1, 1], [0, 0, 0, 3], [5, 0, 0, 0], [0, 0, 0, 0]])
def test_a_blocked_product_equals_the_dense_one_when_rows_belong_to_no_expert(rows, sizes):
    """What is said of those rows is not defined, so their cotangent is 0; it must leave no trace."""
    rng = np.random.default_rng(3)
    x, w, ct = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((rows, 3), (4, 3, 2), (sum(sizes), 2))
    )
    results = []
    for product in (moe.blocked_dot, moe.dense_dot):
        own = lambda x, w: product(x, w, jnp.asarray(sizes, jnp.int32))[: sum(sizes)]  # noqa: B023, E731
        out, pull = jax.vjp(own, x, w)
        results.append((out, *pull(ct)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *results)  # float32 sums of up to 5 terms


@pytest.mark.parametrize("rows", [1, 6, 767])
def test_few_rows_copy_one_matrix_each(rows):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    traced = jax.make_jaxpr(moe.blocked_dot)(of(rows, 2), of(384, 2, 3), jax.ShapeDtypeStruct((384,), jnp.int32))
    outs = [(e.primitive.name, e.outvars[0].aval.shape) for e in traced.eqns]
    copied = [shape for name, shape in outs if len(shape) == 3 and shape[1:] == (2, 3)]
    assert copied == [(rows, 2, 3)]
    assert [shape for name, shape in outs if name == "dot_general"] == [(rows, 1, 3)]


@pytest.mark.parametrize("how", ["auto", *PRODUCTS])
def test_experts_equal_a_loop_over_tokens(how):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, C.hidden_size))
    w = tiny.weights(dataclasses.replace(C, swiglu_limit=1.0).with_modes("S"))["layers"]["layer0"]["ffn"]
    c = dataclasses.replace(C, swiglu_limit=1.0)
    got, routing = jax.jit(lambda w, x: moe.apply(w, x, None, c, how))(w, jnp.asarray(x, jnp.float32))
    w = jax.tree.map(np.asarray, w)

    def expert(w1, w2, w3, x):
        gate, up = np.minimum(x @ w1, 1), np.clip(x @ w3, -1, 1)
        return (gate / (1 + np.exp(-gate)) * up) @ w2

    for t in range(7):
        want = expert(*(w["shared_experts"][n] for n in ("w1", "w2", "w3")), x[t])
        for e, weight in zip(routing.experts[t], routing.weights[t], strict=True):
            want = want + weight * expert(*(w["experts"][n][e] for n in ("w1", "w2", "w3")), x[t])
        np.testing.assert_allclose(got[t], want, atol=1e-5)  # float32 sums of 16 terms


def test_the_shared_expert_can_be_left_out():
    c = dataclasses.replace(C, n_shared_experts=0)
    w = tiny.weights(c.with_modes("S"))["layers"]["layer0"]["ffn"]
    assert "shared_experts" not in w
    out, routing = moe.apply(w, jnp.ones((2, C.hidden_size)), None, c, "dense")
    np.testing.assert_allclose(out, moe.routed(w["experts"], jnp.ones((2, C.hidden_size)), routing, c, "dense")[0])


def by_hand(scores, experts, group, c):
    """Balance terms of the sequences of `group`, and how many."""
    terms = []
    for g in sorted(set(group) - {-1}):
        mine = [t for t, x in enumerate(group) if x == g]
        f = np.bincount(np.concatenate([experts[t] for t in mine]), minlength=c.n_routed_experts)
        f = f * c.n_routed_experts / (c.num_experts_per_tok * len(mine))
        terms.append(float(f @ np.mean([scores[t] / scores[t].sum() for t in mine], axis=0)))
    return sum(terms), len(terms)


def test_balance_loss_and_counts_match_a_sum_by_hand():
    rng = np.random.default_rng(2)
    group = [0, 0, 0, 1, 1, -1, 3, -1]
    scores = rng.uniform(0.1, 1, (8, 4)).astype(np.float32)
    experts = np.stack([rng.permutation(4)[:2] for _ in range(8)])
    routing = moe.Routing(jnp.asarray(scores), jnp.asarray(experts, jnp.int32), jnp.ones((8, 2)))
    got = moe.loads(routing, jnp.asarray(group, jnp.int32), 5, C)
    want, sequences = by_hand(scores, experts, group, C)
    np.testing.assert_allclose(got.balance, want, rtol=1e-5)  # float32 sums
    assert float(got.sequences) == sequences == 3
    real = experts[[i for i, g in enumerate(group) if g >= 0]]  # padding is counted nowhere
    np.testing.assert_array_equal(got.counts, np.bincount(real.reshape(-1), minlength=4))


def test_text_and_image_tokens_are_counted_apart_and_padding_for_neither():
    experts = jnp.asarray([[0, 1], [0, 2], [3, 1], [0, 3], [2, 1]], jnp.int32)
    routing = moe.Routing(jnp.ones((5, 4)), experts, jnp.ones((5, 2)))
    groups, image = jnp.asarray([0, 0, 1, -1, -1], jnp.int32), jnp.asarray([False, True, True, True, False])
    got = moe.loads(routing, groups, 2, C, image)
    np.testing.assert_array_equal(got.counts, [1, 1, 0, 0])
    np.testing.assert_array_equal(got.counts_vl, [1, 1, 1, 1])
    whole = moe.loads(routing, groups, 2, C)
    np.testing.assert_array_equal(whole.counts, got.counts + got.counts_vl)
    np.testing.assert_array_equal(whole.counts_vl, 0)
    assert (float(got.balance), float(got.sequences)) == (float(whole.balance), float(whole.sequences))


def test_perfect_balance_has_loss_1():
    experts = jnp.asarray([[0, 1], [2, 3]], jnp.int32)
    got = moe.loads(moe.Routing(jnp.ones((2, 4)), experts, jnp.ones((2, 2))), jnp.zeros(2, jnp.int32), 1, C)
    np.testing.assert_allclose(got.balance, 1, rtol=1e-6)


def test_long_documents_balance_alone_and_short_ones_of_a_row_together():
    long, short = MIN_BALANCE_TOKENS, 40
    batch = tiny.batch(C, np.zeros((2, 2 * long + 100), np.int32), [[short, long, long - 1, 7], [short, 3]])
    groups = np.asarray(flow.context(C, batch).groups)
    first = groups[0]
    parts = np.split(first, np.cumsum([short, long, long - 1, 7]))
    assert all(len(set(p)) == 1 for p in parts)
    small, alone, nearly, last, padding = (p[0] for p in parts)
    assert small == nearly == last != alone and padding == -1
    assert set(groups[1]) == {groups[1, 0], -1} and groups[1, 0] not in set(first)
