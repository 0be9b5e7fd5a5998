"""Selection and candidate blocks against plain sorting; the indexer's loss against full logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import indexer
from dsflash_jax.attention import attend

compiled_attend = jax.jit(attend, static_argnames=("window", "chunk"))
select = jax.jit(indexer.select, static_argnames=("k", "chunk", "key_chunk", "block", "publish"))


def given(scores):
    """q, w, keys whose index scores are exactly `scores` [B, T, S]: s = relu(s) - relu(-s)."""
    batch, length, _ = scores.shape
    eye = jnp.broadcast_to(jnp.eye(length, dtype=jnp.float32), (batch, length, length))
    w = jnp.broadcast_to(jnp.array([1.0, -1.0], jnp.float32), (batch, length, 2))
    return jnp.stack([eye, -eye], axis=2), w, jnp.asarray(scores, jnp.float32).swapaxes(1, 2)


def layout(lengths, total, ratio):
    """Slot base and visible slot count of documents packed from the left of one row, [1, total]."""
    base, visible = np.zeros((2, 1, total), np.int32)
    start = 0
    for length in lengths:
        for position in range(length):
            base[0, start + position] = start // ratio
            visible[0, start + position] = (position + 1) // ratio
        start += length
    return jnp.asarray(base), jnp.asarray(visible)


def random_index(seed, batch, length, slots, heads=3, width=8):
    """Random q, w, keys."""
    normal = np.random.default_rng(seed).standard_normal
    shapes = (batch, length, heads, width), (batch, length, heads), (batch, slots, width)
    return tuple(jnp.asarray(normal(shape), jnp.float32) for shape in shapes)


def ids(row):
    """The entries that are not absent."""
    return [i for i in np.asarray(row).tolist() if i >= 0]


def test_newest_block_is_kept_and_later_slots_are_not():
    scores = np.zeros((1, 1, 40), np.float32)
    scores[0, 0, [3, 9, 17, 26, 35]] = [1, 9, 5, -4, 100]
    base = jnp.zeros((1, 1), jnp.int32)
    topk, blocks = select(*given(scores), base, base + 29, k=2, chunk=1, block=8, publish=2)
    assert ids(blocks[0, 0]) == [1, 3]
    assert ids(topk[0, 0]) == [9, 17]  # the publishing layer chooses outside its blocks
    _, early = select(*given(scores), base, base + 5, k=2, chunk=1, block=8, publish=3)
    assert ids(early[0, 0]) == [0]
    later = np.zeros((1, 1, 40), np.float32)
    later[0, 0, [17, 10, 27]] = [50, 3, 2]
    topk, none = select(*given(later), base, base + 29, k=2, chunk=1, candidates=blocks, block=8)
    assert ids(topk[0, 0]) == [10, 27] and none is None
    topk, _ = select(*given(later), base, base + 29, k=40, chunk=1, candidates=blocks, block=8)
    assert ids(topk[0, 0]) == [*range(8, 16), *range(24, 29)]


def test_planted_key_among_a_million_is_found():
    slots, best = 1 << 20, 1_000_003
    keys = jnp.zeros((1, slots, 2), jnp.float32).at[0, best].set(1.0)
    one = jnp.ones((1, 1), jnp.int32)
    topk, _ = select(jnp.ones((1, 1, 1, 2)), jnp.ones((1, 1, 1)), keys, 0 * one, slots * one, k=1, chunk=1)
    assert topk.tolist() == [[[best]]]


def test_queries_see_complete_groups_only():
    base, visible = layout([7], 7, 2)
    assert visible.tolist() == [[0, 1, 1, 2, 2, 3, 3]]
    topk, _ = select(*random_index(0, 1, 7, 3), base, visible, k=9, chunk=4)
    assert [ids(row) for row in topk[0]] == [list(range(n)) for n in (0, 1, 1, 2, 2, 3, 3)]
    assert topk.shape == (1, 7, 3)  # never more picks than slots


@pytest.mark.parametrize("chunk, key_chunk", [(1, 1), (4, 3), (64, 64)])
def test_tiles_do_not_change_the_selection(chunk, key_chunk):
    base, visible = layout([6, 9, 4], 21, 1)
    q, w, keys = random_index(1, 1, 21, 21)
    topk, _ = select(q, w, keys, base, visible, k=3, chunk=chunk, key_chunk=key_chunk)
    scores = np.asarray(indexer.scores(q, w, keys))[0]
    for t in range(21):
        b, v = int(base[0, t]), int(visible[0, t])
        best = b + np.argsort(-scores[t, b : b + v], kind="stable")[:3]
        assert topk[0, t].tolist() == sorted(best.tolist()) + [-1] * (3 - len(best))  # ascending, absent ones last


def test_packed_documents_select_as_they_do_alone():
    lengths, total, ratio = [7, 12, 1, 7], 29, 2
    base, visible = layout(lengths, total, ratio)
    q, w, keys = random_index(2, 1, total, total // ratio)

    @jax.jit
    def run(*arrays):
        settings = dict(k=3, chunk=5, key_chunk=4, block=2)
        topk, blocks = indexer.select(*arrays, **settings, publish=2)
        return topk, blocks, indexer.select(*arrays, **settings, candidates=blocks)[0]

    topk, blocks, narrow = run(q, w, keys, base, visible)
    start = 0
    for length in lengths:
        rows, slots = slice(start, start + length), length // ratio
        own = q[:, rows], w[:, rows], keys[:, start // ratio :][:, :slots]
        alone, alone_blocks, alone_narrow = run(*own, *layout([length], length, ratio))
        for t in range(length):
            assert ids(topk[0, start + t]) == [i + start // ratio for i in ids(alone[0, t])]
            assert ids(blocks[0, start + t]) == ids(alone_blocks[0, t])
            assert ids(narrow[0, start + t]) == [i + start // ratio for i in ids(alone_narrow[0, t])]
        start += length
    assert all(ids(row) == [] for row in (*topk[0, start:], *blocks[0, start:], *narrow[0, start:]))  # padding


def test_equal_scores_go_to_the_lower_slot_also_when_zeros_differ_in_sign():
    base = jnp.zeros((1, 1), jnp.int32)
    w, keys = jnp.full((1, 1, 1), -1.0), jnp.array([[[-1.0], [0.0], [-2.0], [0.0], [-3.0]]])
    topk, _ = select(jnp.ones((1, 1, 1, 1)), w, keys, base, base + 5, k=3, chunk=1)
    assert ids(topk[0, 0]) == [0, 1, 2]
    topk, _ = select(*given(np.array([[[-0.0, 0.0, -0.0, 0.0]]])), base, base + 4, k=2, chunk=1)
    assert ids(topk[0, 0]) == [0, 1]
    assert indexer._top(jnp.array([[-0.0, 0.0, -0.0, 0.0]], jnp.float32), 2).tolist() == [[0, 1]]


def test_weights_are_signed_and_relu_stands_before_the_head_sum():
    q = jnp.array([[[[1.0], [-1.0]]]])
    scores = indexer.scores(q, jnp.array([[[2.0, -3.0]]]), jnp.array([[[5.0], [-7.0]]]))
    assert scores.tolist() == [[[10.0, -21.0]]]


def test_rows_shorter_than_a_slot_select_nothing():
    q, w, keys = random_index(0, 2, 1, 0)
    base = jnp.zeros((2, 1), jnp.int32)
    topk, blocks = select(q, w, keys, base, base, k=4, chunk=8, block=2, publish=3)
    assert topk.shape == blocks.shape == (2, 1, 0)
    narrow, _ = select(q, w, keys, base, base, k=4, chunk=8, block=2, candidates=blocks)
    assert narrow.shape == (2, 1, 0)


def test_selection_passes_no_gradient():
    base, visible = layout([9], 9, 1)
    q, w, keys = random_index(0, 1, 9, 9)

    def picked(q, w, keys):
        topk, _ = indexer.select(q, w, keys, base, visible, k=3, chunk=4)
        return jnp.sum(topk.astype(jnp.float32))

    assert not any(g.any() for g in jax.jit(jax.grad(picked, argnums=(0, 1, 2)))(q, w, keys))


def test_blocks_without_a_size_are_refused():
    base, visible = layout([4], 4, 1)
    with pytest.raises(ValueError, match="block=0"):
        indexer.select(*random_index(0, 1, 4, 4), base, visible, k=2, chunk=4, publish=2)


def shaped(length, slots, heads, width):
    """Shapes of q, w, keys."""
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    return shape(1, length, heads, width), shape(1, length, heads), shape(1, slots, width)


def temp_bytes(function, *arrays):
    """Temporary bytes of the compiled function."""
    return jax.jit(function).lower(*arrays).compile().memory_analysis().temp_size_in_bytes


def test_memory_of_selection_grows_with_length_not_its_square():
    def size(length):
        places = jax.ShapeDtypeStruct((1, length), jnp.int32)
        function = partial(indexer.select, k=8, chunk=32, key_chunk=256, block=4, publish=8)
        return temp_bytes(function, *shaped(length, length, 2, 8), places, places)

    sizes = [size(length) for length in (1024, 2048, 4096)]
    assert sizes[1] <= 2.3 * sizes[0] and sizes[2] <= 2.3 * sizes[1], sizes
    assert sizes[2] < 4096 * 4096 * 4, "scores of all pairs are kept"


class Case:
    """A batch of two packed rows after attention has run, with selections of 3 slots."""

    def __init__(self, k=3, dtype=jnp.float32):
        rng = np.random.default_rng(4)
        length, slots, heads, width = 13, 6, 2, 8
        places = [layout([6, 7], length, 2), layout([11], length, 2)]
        self.base, self.visible = (jnp.concatenate(x) for x in zip(*places, strict=True))
        self.index = tuple(x.astype(dtype) for x in random_index(3, 2, length, slots))
        draw = lambda *s: jnp.asarray(rng.standard_normal(s), dtype)  # noqa: E731
        self.query, self.kv = 2 * draw(2, length, heads, width), draw(2, slots, width)
        self.window_kv, self.sink = draw(2, length, width), jnp.asarray(rng.standard_normal(heads), jnp.float32)
        self.topk, _ = select(*self.index, self.base, self.visible, k=k, chunk=4)
        segments = jnp.asarray([[1] * 6 + [2] * 7, [1] * 11 + [0] * 2], jnp.int32)
        _, self.lse = compiled_attend(
            self.query, self.window_kv, self.kv, self.topk, self.sink, segments, window=4, chunk=4
        )

    def loss(self, *index, keys_set="topk", extra=0, seed=0, chunk=4):
        teacher = self.query, self.kv, self.lse, self.topk, self.base, self.visible
        rng = jax.random.key(seed)
        return indexer.loss(*index, *teacher, keys_set=keys_set, extra=extra, rng=rng, chunk=chunk)

    def oracle(self, *index, dense):
        """The loss from full logits, each head's probabilities spelled out."""
        slot = np.arange(self.kv.shape[1])[None, None]
        base, visible = np.asarray(self.base)[..., None], np.asarray(self.visible)[..., None]
        seen = (slot >= base) & (slot < base + visible)
        chosen = np.any(np.asarray(self.topk)[..., None] == slot[:, :, None], axis=2)
        rest, members = seen & ~chosen, (seen if dense else chosen)
        z = jnp.einsum("bthd,bsd->bths", self.query, self.kv) * self.query.shape[-1] ** -0.5
        denominator = jnp.exp(self.lse)
        if dense:
            denominator += jnp.sum(jnp.where(rest[:, :, None], jnp.exp(z), 0), axis=-1)
        several = visible[..., 0] > 1
        members = members[several]
        p = jnp.sum(jnp.exp(z) / denominator[..., None], axis=2)[several]
        student = jnp.exp(indexer.scores(*index))[several]
        p, student = (x / jnp.sum(jnp.where(members, x, 0), axis=-1, keepdims=True) for x in (p, student))
        return jnp.sum(jnp.where(members, p * jnp.log(p / student), 0))


@pytest.fixture(scope="module")
def case():
    return Case()


@pytest.mark.parametrize("keys_set", ["topk", "dense"])
@pytest.mark.parametrize("chunk", [4, 64])
def test_loss_equals_full_logits_in_value_and_gradient(case, keys_set, chunk):
    oracle = partial(case.oracle, dense=keys_set == "dense")
    expected, gradients = jax.jit(jax.value_and_grad(oracle, (0, 1, 2)))(*case.index)
    function = jax.jit(jax.value_and_grad(partial(case.loss, keys_set=keys_set, chunk=chunk), (0, 1, 2), has_aux=True))
    (total, count), found = function(*case.index)
    assert count == int((case.visible > 1).sum()) > 0
    np.testing.assert_allclose(total, expected, rtol=1e-5)  # float32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, gradients)
    assert all(g.any() for g in found)


def test_random_slots_that_cover_everything_equal_dense(case):
    function = jax.jit(case.loss, static_argnames=("keys_set", "extra"))
    # A query sees at most 5 slots here: 200 draws miss one of them with probability 5 * 0.8^200 < 1e-18.
    drawn, _ = function(*case.index, keys_set="topk+random", extra=200)
    dense, _ = function(*case.index, keys_set="dense")
    sparse, _ = function(*case.index, keys_set="topk")
    np.testing.assert_allclose(drawn, dense, rtol=1e-5)
    assert abs(drawn - sparse) > 1e-3 * sparse


def test_random_slots_add_gradient_to_keys_outside_the_selection(case):
    gradient = jax.jit(jax.grad(lambda *x, **s: case.loss(*x, **s)[0], 2), static_argnames=("keys_set", "extra"))
    plain = gradient(*case.index, keys_set="topk")
    drawn = gradient(*case.index, keys_set="topk+random", extra=2)
    assert jnp.isfinite(drawn).all() and not jnp.allclose(plain, drawn)
    other = gradient(*case.index, keys_set="topk+random", extra=2, seed=1)
    assert not jnp.allclose(other, drawn)


def test_random_slots_change_nothing_when_all_are_selected():
    everything = Case(k=6)
    function = jax.jit(everything.loss, static_argnames=("keys_set", "extra"))
    drawn, _ = function(*everything.index, keys_set="topk+random", extra=5)
    sparse, _ = function(*everything.index, keys_set="topk")
    np.testing.assert_allclose(drawn, sparse, rtol=1e-6)


@pytest.mark.parametrize("keys_set", ["topk", "topk+random", "dense"])
def test_loss_reaches_the_indexer_and_nothing_else(case, keys_set):
    def total(index, query, kv, lse):
        places = case.topk, case.base, case.visible
        settings = dict(keys_set=keys_set, extra=2, rng=jax.random.key(0), chunk=4)
        return indexer.loss(*index, query, kv, lse, *places, **settings)[0]

    index, *attention = jax.jit(jax.grad(total, (0, 1, 2, 3)))(case.index, case.query, case.kv, case.lse)
    assert all(jnp.isfinite(g).all() and g.any() for g in index)
    assert not any(g.any() for g in attention)


def share(window_key):
    """The teacher's share of slot 0, which head 0 wants, when the query's window holds `window_key`.

    With all index scores 0 the student is uniform over the 2 slots and d loss / d w_h = 1/2 - p_h for a key h that
    only index head h sees.
    """
    two = jnp.eye(2, dtype=jnp.float32)
    query, kv = (4 * two)[None, None], two[None]
    topk, ones = jnp.array([[[0, 1]]], jnp.int32), jnp.ones((1, 1), jnp.int32)
    window_kv = jnp.asarray(window_key, jnp.float32)[None, None]
    _, lse = compiled_attend(query, window_kv, kv, topk, jnp.zeros(2), ones, window=1, chunk=1)

    def total(w):
        settings = dict(keys_set="topk", extra=0, rng=None, chunk=1)
        return indexer.loss(two[None, None], w, two[None], query, kv, lse, topk, 0 * ones, 2 * ones, **settings)[0]

    return 0.5 - jax.jit(jax.grad(total))(jnp.zeros((1, 1, 2)))[0, 0, 0]


def test_head_that_looks_at_its_window_counts_less_in_the_teacher():
    np.testing.assert_allclose(share([0.0, 0.0]), 0.5, atol=1e-6)
    assert share([2.0, 0.0]) < 0.25  # head 0 has exp(4 * 2 / sqrt(2)) in its window, head 1 has 1
    assert share([0.0, 2.0]) > 0.75


def test_queries_with_one_slot_or_none_cost_nothing():
    index = random_index(0, 1, 4, 4)
    base = jnp.zeros((1, 4), jnp.int32)
    visible = jnp.array([[0, 1, 1, 0]], jnp.int32)
    topk, _ = select(*index, base, visible, k=2, chunk=4)
    query, kv, lse = jnp.ones((1, 4, 2, 8)), jnp.full((1, 4, 8), 1e4), jnp.zeros((1, 4, 2))
    settings = dict(extra=2, rng=jax.random.key(0), chunk=3)
    with jax.debug_nans(True):
        for keys_set in ("topk", "topk+random", "dense"):
            function = partial(indexer.loss, keys_set=keys_set, **settings)
            run = jax.jit(
                jax.value_and_grad(lambda i, f=function: f(*i, query, kv, lse, topk, base, visible), has_aux=True)
            )
            (total, count), gradients = run(index)
            assert total == 0 and count == 0 and not any(g.any() for g in gradients)


def test_equal_scores_and_far_heads_stay_finite(case):
    zero = jax.tree.map(jnp.zeros_like, case.index)
    far = Case()
    far.lse = far.lse + 1e4  # every head looks elsewhere: each probability underflows, their ratios do not
    with jax.debug_nans(True):
        run = jax.jit(jax.value_and_grad(far.loss, (0, 1, 2), has_aux=True))
        (total, _), gradients = run(*zero)
    assert jnp.isfinite(total) and all(jnp.isfinite(g).all() for g in gradients)
    np.testing.assert_allclose(far.loss(*far.index)[0], case.loss(*case.index)[0], rtol=2e-3)  # 1e4 leaves 1e-3 of lse


def test_loss_without_slots_is_zero():
    index = random_index(0, 1, 1, 0)
    none, zero = jnp.zeros((1, 1, 0), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    attention = jnp.ones((1, 1, 2, 8)), jnp.ones((1, 0, 8)), jnp.zeros((1, 1, 2)), none, zero, zero
    total, count = indexer.loss(*index, *attention, keys_set="topk", extra=0, rng=None, chunk=4)
    assert total == 0 and count == 0


def test_bfloat16_loss_follows_float32():
    low = Case(dtype=jnp.bfloat16)
    run = jax.jit(jax.value_and_grad(low.loss, (0, 1, 2), has_aux=True))
    (total, _), gradients = run(*low.index)
    assert total.dtype == jnp.float32 and [g.dtype for g in gradients] == [jnp.bfloat16] * 3
    low.query, low.kv = low.query.astype(jnp.float32), low.kv.astype(jnp.float32)
    run = jax.jit(jax.value_and_grad(low.loss, (0, 1, 2), has_aux=True))
    (exact, _), expected = run(*jax.tree.map(lambda x: x.astype(jnp.float32), low.index))
    np.testing.assert_allclose(total, exact, rtol=1e-5)  # products of bfloat16 are exact in float32
    for a, b in zip(gradients, expected, strict=True):
        # each of a few terms and the sum are rounded to 8 bits
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=2**-6 * float(jnp.abs(b).max()))


def test_unusable_key_sets_are_refused(case):
    with pytest.raises(ValueError, match="'sparse'"):
        case.loss(*case.index, keys_set="sparse")
    teacher = case.query, case.kv, case.lse, case.topk, case.base, case.visible
    with pytest.raises(ValueError, match="pass rng"):
        indexer.loss(*case.index, *teacher, keys_set="topk+random", extra=2, rng=None, chunk=4)


def test_memory_of_the_loss_grows_with_length_not_its_square():
    def size(length):
        shape = lambda *s, dtype=jnp.float32: jax.ShapeDtypeStruct(s, dtype)  # noqa: E731
        places = shape(1, length, dtype=jnp.int32)
        teacher = (
            shape(1, length, 2, 16),
            shape(1, length, 16),
            shape(1, length, 2),
            shape(1, length, 8, dtype=jnp.int32),
        )
        function = partial(indexer.loss, keys_set="topk", extra=0, rng=None, chunk=64)
        step = jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True)
        return temp_bytes(step, *shaped(length, length, 2, 8), *teacher, places, places)

    sizes = [size(length) for length in (1024, 2048, 4096)]
    assert sizes[1] <= 2.3 * sizes[0] and sizes[2] <= 2.3 * sizes[1], sizes
