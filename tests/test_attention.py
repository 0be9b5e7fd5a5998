"""Window and selected-slot attention against the reference, the dense oracle and finite differences."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from dsflash_jax.attention import attend, attend_dense

GOLDEN = Path(__file__).parent / "golden" / "ops"
compiled = jax.jit(attend, static_argnames=("window", "chunk"))
NO_SINK = -1e9  # exp(sink) vanishes beside any logit of these tests


def packed(lengths, total, ratio):
    """segments, slot base and visible slot count of documents packed from the left of a row of `total` tokens."""
    segments, base, visible = np.zeros((3, total), np.int32)
    start = 0
    for number, length in enumerate(lengths, start=1):
        for position in range(length):
            segments[start + position] = number
            base[start + position] = start // ratio
            visible[start + position] = (position + 1) // ratio
        start += length
    return segments, base, visible


def picks(rng, base, visible, k):
    """k random visible slots a query, ascending, -1 behind them."""
    topk = np.full((len(base), k), -1, np.int32)
    for t, (b, v) in enumerate(zip(base, visible, strict=True)):
        chosen = np.sort(rng.permutation(v)[:k]) + b
        topk[t, : len(chosen)] = chosen
    return topk


def inputs(rows, ratio, k, *, heads=3, width=8, seed=0):
    """q, window_kv, kv, topk, sink, segments of a batch of packed rows, each (document lengths, row length)."""
    rng = np.random.default_rng(seed)
    layouts = [packed(lengths, total, ratio) for lengths, total in rows]
    batch, length = len(rows), rows[0][1]
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    topk = np.stack([picks(rng, base, visible, k) for _, base, visible in layouts])
    segments = jnp.asarray(np.stack([s for s, _, _ in layouts]))
    q, window_kv = 2 * normal(batch, length, heads, width), normal(batch, length, width)
    return q, window_kv, normal(batch, length // ratio, width), jnp.asarray(topk), normal(heads), segments


def attended(rows, topk, window, chunk, slots):
    """Which of [window keys, slots] each query attends, read off one-hot values under equal logits."""
    batch, length = rows.shape
    values = jnp.eye(length + slots, dtype=jnp.float32)
    window_kv = jnp.broadcast_to(values[:length], (batch, length, length + slots))
    kv = jnp.broadcast_to(values[length:], (batch, slots, length + slots))
    q = jnp.zeros((batch, length, 1, length + slots), jnp.float32)
    sink = jnp.full((1,), NO_SINK, jnp.float32)
    o, _ = compiled(q, window_kv, kv if slots else None, topk, sink, rows, window=window, chunk=chunk)
    return np.asarray(o[:, :, 0] > 0)


def test_bfloat16_matches_the_reference_with_rounded_probabilities():
    g = np.load(GOLDEN / "sparse_attention.npz")
    q, kv = (jnp.asarray(g[name], jnp.bfloat16) for name in ("q", "kv"))
    nothing = jnp.zeros(q.shape[:2], jnp.int32)
    window_kv = jnp.zeros((*q.shape[:2], q.shape[-1]), jnp.bfloat16)
    o, lse = compiled(q, window_kv, kv, jnp.asarray(g["idx"]), jnp.asarray(g["sink"]), nothing, window=1, chunk=2)
    assert o.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    # Inputs rounded to 8 bits move logits of size about 4 by 4 * 2^-9 each, and o, of size about 1, by as much.
    np.testing.assert_allclose(o.astype(jnp.float32), g["out_bf16p"], atol=3e-2)


@pytest.mark.parametrize("case", ["case0", "case1"])
@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_window_matches_the_reference(case, chunk):
    g = np.load(GOLDEN / "window_indices.npz")
    window, length, _ = g[f"{case}_params"]
    expected = [{j for j in row if j >= 0} for row in g[f"{case}_idx"].tolist()]
    seen = attended(jnp.ones((1, length), jnp.int32), None, int(window), chunk, 0)[0]
    assert [set(np.flatnonzero(row).tolist()) for row in seen] == expected


def test_window_counts_the_query_itself():
    seen = attended(jnp.ones((1, 160), jnp.int32), None, 4, 64, 0)[0]
    assert np.flatnonzero(seen[10]).tolist() == [7, 8, 9, 10]
    seen = attended(jnp.ones((1, 160), jnp.int32), None, 128, 64, 0)[0]
    assert all(np.flatnonzero(seen[p]).tolist() == list(range(max(0, p - 127), p + 1)) for p in range(160))


@pytest.mark.parametrize("ratio", [1, 2])
def test_queries_attend_their_own_picks_and_document_only(ratio):
    lengths, total, window = [5, 6, 1, 3], 17, 4  # two rows of padding behind
    segments, base, visible = packed(lengths, total, ratio)
    topk = picks(np.random.default_rng(1), base, visible, 2)
    slots = total // ratio
    seen = attended(jnp.asarray(segments)[None], jnp.asarray(topk)[None], window, 4, slots)[0]
    for t in range(total):
        near = [j for j in range(total) if t - window < j <= t and segments[j] == segments[t] != 0]
        assert np.flatnonzero(seen[t]).tolist() == near + [total + s for s in topk[t] if s >= 0]


SHAPES = {
    "one document": dict(rows=[([16], 16)] * 2, ratio=2, k=3, window=4, chunk=4),
    "packed odd lengths, padding": dict(rows=[([5, 6, 2], 14), ([1, 13], 14)], ratio=2, k=3, window=4, chunk=4),
    "ratio 1, chunk does not divide": dict(rows=[([7, 6], 13)], ratio=1, k=4, window=3, chunk=5),
    "window beyond the row": dict(rows=[([9], 9)], ratio=2, k=2, window=50, chunk=4),
    "chunk beyond the row": dict(rows=[([4, 5], 9)], ratio=2, k=2, window=3, chunk=64),
    "more picks than slots": dict(rows=[([4, 6], 11)], ratio=2, k=9, window=1, chunk=3),
    "row shorter than a slot": dict(rows=[([1], 1)], ratio=2, k=0, window=4, chunk=4),
    "window only": dict(rows=[([5, 6, 2], 14)], ratio=2, k=None, window=4, chunk=4),
    "padded row in the batch": dict(rows=[([8], 8), ([], 8)], ratio=2, k=2, window=3, chunk=3),
}


def value_and_gradients(function, arrays, constants, weights, **static):
    """o, lse and the gradients of sum(o * weights) to every floating input."""

    def total(arrays, topk, segments, weights):
        q, window_kv, kv, sink = arrays
        o, lse = function(q, window_kv, kv, topk, sink, segments, **static)
        return jnp.sum(o * weights), (o, lse)

    (_, out), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(arrays, *constants, weights)
    return *out, gradients


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_chunked_equals_dense_in_value_and_gradient(shape):
    q, window_kv, kv, topk, sink, segments = inputs(shape["rows"], shape["ratio"], shape["k"] or 0)
    if shape["k"] is None:
        kv = topk = None
    weights = jnp.asarray(np.random.default_rng(2).standard_normal(q.shape), jnp.float32)
    args = (q, window_kv, kv, sink), (topk, segments), weights
    static = dict(window=shape["window"], chunk=shape["chunk"])
    dense, sparse = (value_and_gradients(f, *args, **static) for f in (attend_dense, attend))
    # Both are float32; they differ in the order of at most 30 terms.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), sparse, dense)


def test_gradients_are_the_same_jitted_or_not():
    *arrays, topk, sink, segments = inputs([([5, 6], 11)], 2, 2)
    value = lambda *a: jnp.sum(jnp.sin(attend(*a, topk, sink, segments, window=3, chunk=4)[0]))  # noqa: E731
    gradient = jax.grad(value, argnums=(0, 1, 2))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient(*arrays), jax.jit(gradient)(*arrays)
    )


@pytest.mark.parametrize("function", [attend, attend_dense])
def test_a_row_goes_on_from_tokens_that_lie_elsewhere(function):
    q, window_kv, kv, topk, sink, segments = inputs([([5, 6], 11), ([11], 11)], 2, 2)
    cut, window = 4, 4

    def whole(q, window_kv, kv):
        return function(q, window_kv, kv, topk, sink, segments, window=window, chunk=3)[0][:, cut:]

    def rest(q, window_kv, kv):
        past = window_kv[:, cut - window + 1 : cut], segments[:, cut - window + 1 : cut]
        later = (a[:, cut:] for a in (q, window_kv))
        return function(
            *later, kv, topk[:, cut:], sink, segments[:, cut:], window=window, chunk=3, past=past
        )[0]  # fmt: skip

    grads = (jax.grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), argnums=(0, 1, 2)) for f in (whole, rest))
    np.testing.assert_allclose(rest(q, window_kv, kv), whole(q, window_kv, kv), atol=1e-6)
    of_whole, of_rest = (g(q, window_kv, kv) for g in grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), of_rest, of_whole)


@pytest.mark.parametrize("function", [attend, attend_dense])
def test_lse_is_a_constant_to_differentiation(function):
    q, window_kv, kv, topk, sink, segments = inputs([([5, 6], 11)], 2, 2)

    def total(q, window_kv, kv, sink):
        return jnp.sum(function(q, window_kv, kv, topk, sink, segments, window=3, chunk=4)[1])

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1, 2, 3)))(q, window_kv, kv, sink):
        assert not gradient.any()


def test_backward_pass_agrees_with_finite_differences():
    q, window_kv, kv, topk, sink, segments = inputs([([4, 3], 8)], 2, 2, heads=2, width=4)

    def o(q, window_kv, kv, sink):
        return compiled(q, window_kv, kv, topk, sink, segments, window=3, chunk=3)[0]

    # A central difference of step 1e-2 in float32 is right to about 1e-3 here.
    check_grads(o, (q, window_kv, kv, sink), order=1, modes=["rev"], atol=5e-3, rtol=5e-3, eps=1e-2)


def test_bfloat16_gradients_follow_float32():
    q, window_kv, kv, topk, sink, segments = inputs([([9, 12], 21)], 2, 4)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (q, window_kv, kv))
    weights = jnp.asarray(np.random.default_rng(2).standard_normal(q.shape), jnp.bfloat16)
    static = dict(window=4, chunk=8)
    o, _, low = value_and_gradients(attend, (*half, sink), (topk, segments), weights, **static)
    back = jax.tree.map(lambda x: x.astype(jnp.float32), (*half, sink))
    exact, _, high = value_and_gradients(attend, back, (topk, segments), weights.astype(jnp.float32), **static)
    assert [g.dtype for g in low] == [jnp.bfloat16] * 3 + [jnp.float32]
    for a, b in zip((o, *low), (exact, *high), strict=True):
        # p, dz and the results are rounded to 8 bits: a few times 2^-9 of the largest entry.
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2**-6 * float(jnp.abs(b).max()))


def test_nothing_to_attend_gives_zero_and_finite_gradients():
    q, window_kv, kv, topk, sink, segments = inputs([([6], 9), ([], 9)], 2, 2)
    kv = kv.at[:, -1].set(1e4)  # a slot nobody sees, with logits of size 1e4
    weights = jnp.ones_like(q)
    with jax.debug_nans(True):
        o, lse, gradients = value_and_gradients(
            attend, (q, window_kv, kv, sink), (topk, segments), weights, window=3, chunk=4
        )
    assert not o[segments == 0].any()
    np.testing.assert_allclose(lse[segments == 0], jnp.broadcast_to(sink, (12, 3)), rtol=1e-6)
    assert all(jnp.isfinite(g).all() for g in gradients)
    assert not gradients[0][segments == 0].any() and not gradients[1][segments == 0].any()


def test_large_visible_logits_stay_finite():
    q, window_kv, kv, topk, sink, segments = inputs([([6], 6)], 2, 2)
    o, lse, gradients = value_and_gradients(
        attend, (1e4 * q, window_kv, kv, sink), (topk, segments), jnp.ones_like(q), window=3, chunk=4
    )
    assert all(jnp.isfinite(x).all() for x in (o, lse, *gradients))


def test_nan_in_one_row_of_the_batch_stays_there():
    q, window_kv, kv, topk, sink, segments = inputs([([9], 9), ([4, 5], 9)], 2, 2)
    clean, _ = compiled(q, window_kv, kv, topk, sink, segments, window=3, chunk=4)
    broken, _ = compiled(
        q, window_kv.at[0].set(jnp.nan), kv.at[0].set(jnp.nan), topk, sink, segments, window=3, chunk=4
    )
    assert jnp.isnan(broken[0]).any()
    np.testing.assert_array_equal(broken[1], clean[1])


def test_other_document_does_not_change_a_bit():
    rows = [([5, 6], 11)]
    q, window_kv, kv, topk, sink, segments = inputs(rows, 2, 2)
    other_q, other_window, other_kv, _, _, _ = inputs(rows, 2, 2, seed=5)
    first, _ = compiled(q, window_kv, kv, topk, sink, segments, window=4, chunk=4)
    mine = segments == 2
    q = jnp.where(mine[..., None, None], q, other_q)
    window_kv = jnp.where(mine[..., None], window_kv, other_window)
    kv = kv.at[:, :2].set(other_kv[:, :2])  # the slots of the first document
    second, _ = compiled(q, window_kv, kv, topk, sink, segments, window=4, chunk=4)
    np.testing.assert_array_equal(first[mine], second[mine])


def test_window_of_one_repeats_a_repeated_token():
    q, window_kv, _, _, sink, segments = inputs([([64], 64)], 2, 1)
    q, window_kv = (jnp.broadcast_to(x[:, :1], x.shape) for x in (q, window_kv))
    o, _ = compiled(q, window_kv, None, None, sink, segments, window=1, chunk=7)
    np.testing.assert_allclose(o, jnp.broadcast_to(o[:, :1], o.shape), atol=1e-6)


def train_bytes(length, k=8, heads=2, width=16):
    """Temporary bytes of the compiled gradient of `attend`."""
    floats = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731

    def total(q, window_kv, kv, sink, topk, segments):
        return jnp.sum(attend(q, window_kv, kv, topk, sink, segments, window=16, chunk=64)[0])

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2, 3)))
    arrays = floats(1, length, heads, width), floats(1, length, width), floats(1, length // 2, width), floats(heads)
    return step.lower(*arrays, ints(1, length, k), ints(1, length)).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_with_length_not_its_square():
    sizes = [train_bytes(length) for length in (1024, 2048, 4096)]
    assert sizes[1] <= 2.3 * sizes[0] and sizes[2] <= 2.3 * sizes[1], sizes  # linear plus what is fixed
    gathered = 4096 * 64 * 16 * 4  # 64 rows of 16 float32 for every query of the sequence
    assert train_bytes(4096, k=64) < gathered / 2


def test_a_million_tokens_have_a_shape():
    length = 1 << 20
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
    o, lse = jax.eval_shape(
        lambda *a: attend(*a, window=128, chunk=128),
        shape(1, length, 64, 512), shape(1, length, 512), shape(1, length, 512), shape(1, length, 512, dtype=jnp.int32),
        shape(64, dtype=jnp.float32), shape(1, length, dtype=jnp.int32),
    )  # fmt: skip
    assert o.shape == (1, length, 64, 512) and lse.shape == (1, length, 64)
