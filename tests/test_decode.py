"""decode.py: pieces behind a cache equal the full forward pass, whatever their sizes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import jit  # as users compile

from dsflash_jax import cache, decode, model, modes
from dsflash_jax.config import Quantize
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Setup

C = tiny.T_ENGRAM  # window, Full, Reindex, Reuse, ratios 2 and 1, n-gram memory, window 4, 2 slots selected
SETUP = Setup(C, tiny.STRICT)
ROWS, LENGTH = 8, 28
TOLERANCE = 1e-4  # float32 sums in another order; measured 1e-5


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def w():
    return tiny.weights(C)


@pytest.fixture(scope="module")
def tokens():
    return tiny.tokens(C, ROWS, LENGTH)


def forward(setup, w, tokens):
    """Logits of the full forward pass, one document a row."""
    c = setup.config
    run = tiny.jit(lambda w, b: model.logits(w["head"], model.forward(setup, w, b)[0]))
    return np.asarray(run(w, tiny.batch(c, tokens)))


@pytest.fixture(scope="module")
def full(w, tokens):
    return forward(SETUP, w, tokens)


def runner(setup):
    """One jitted piece: (weights, cache, tokens, count) to the cache behind it and its logits."""

    @tiny.jit
    def one(w, held, tokens, count):
        held, y = decode.proceed(setup, w, held, tokens, count)
        return held, model.logits(w["head"], y)

    return one


EXTEND = runner(SETUP)


def in_pieces(extend, w, held, tokens, sizes):
    """Logits of all tokens, run in pieces of these sizes, every piece padded to the largest."""
    out, at, width = [], 0, max(sizes)
    for size in sizes:
        now = np.zeros((len(tokens), width), np.int32)
        now[:, :size] = tokens[:, at : at + size]
        held, logits = extend(w, held, now, jnp.full((len(tokens),), size, jnp.int32))
        out.append(np.asarray(logits)[:, :size])
        at += size
    return held, np.concatenate(out, axis=1)


@pytest.mark.parametrize("sizes", [[1] * 28, [3] * 8 + [1] * 4, [5] * 4 + [4] + [1] * 4, [8] * 3 + [1] * 4, [24, 4]])
def test_a_prompt_in_chunks_and_then_steps_equals_the_full_forward(w, tokens, full, sizes):
    _, logits = in_pieces(EXTEND, w, cache.empty(SETUP, 2, 32), tokens[:2], sizes)
    np.testing.assert_allclose(logits, full[:2], atol=TOLERANCE)


@pytest.mark.slow
def test_the_first_slot_is_selected_behind_chunks_of_any_size(w, tokens):
    """Keys of the first chunk are as near to the last query as all others: every selection is that of the forward."""
    length = 24

    @tiny.jit
    def selections(w, batch):
        model.forward(SETUP, w, batch, traces=(traces := []))
        return [t["topk"][:, -1] for t in traces if "topk" in t]

    @tiny.jit
    def last(w, held, tokens):
        decode.extend(SETUP, w, held, tokens, jnp.ones(ROWS, jnp.int32), traces=(traces := []))
        return [t["topk"][:, 0] for t in traces if "topk" in t]

    want = [np.sort(a) for a in selections(w, tiny.batch(C, tokens[:, : length + 1]))]
    assert any((a == 0).any() for a in want)
    for sizes in ([1] * 24, [3] * 8, [5] * 4 + [4], [8] * 3, [24]):
        held, _ = in_pieces(EXTEND, w, cache.empty(SETUP, ROWS, 32), tokens, sizes)
        for got, same in zip(last(w, held, tokens[:, length : length + 1]), want, strict=True):
            np.testing.assert_array_equal(np.sort(got), same)


def test_rows_of_every_length_and_parity_go_on_as_if_alone(w, tokens, full):
    lengths = np.arange(1, ROWS + 1, dtype=np.int32)  # 1, 2, 3, window - 1, window, window + 1, ...
    held, _ = EXTEND(w, cache.empty(SETUP, ROWS, 32), tokens[:, :8], lengths)
    np.testing.assert_array_equal(held.length, lengths)
    for step in range(10):
        now = np.take_along_axis(tokens, (lengths + step)[:, None], axis=1)
        held, logits = EXTEND(w, held, now, np.ones(ROWS, np.int32))
        want = full[np.arange(ROWS), lengths + step]
        np.testing.assert_allclose(np.asarray(logits)[:, 0], want, atol=TOLERANCE, err_msg=f"step {step}")


def test_padding_and_rows_that_wait_change_nothing(w, tokens):
    lengths = np.array([3, 5], np.int32)
    held, logits = EXTEND(w, cache.empty(SETUP, 2, 32), tokens[:2, :8], lengths)
    other = tokens[:2, :8].copy()
    other[0, 3:], other[1, 5:] = 7, 9
    again, same = EXTEND(w, cache.empty(SETUP, 2, 32), other, lengths)
    for row, n in enumerate(lengths):
        np.testing.assert_array_equal(logits[row, :n], same[row, :n])
    waited, _ = EXTEND(w, held, tokens[:2, 8:16], np.array([0, 4], np.int32))
    for a, b, c in zip(*map(jax.tree.leaves, (held, again, waited)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a[0], c[0])


def test_room_and_growth_change_no_result(w, tokens):
    small, logits = in_pieces(EXTEND, w, cache.empty(SETUP, 2, 32), tokens[:2], [8, 8, 8])
    large, same = in_pieces(EXTEND, w, cache.empty(SETUP, 2, 4096), tokens[:2], [8, 8, 8])
    np.testing.assert_array_equal(logits, same)
    grown = cache.grow(small, 4096)
    for a, b in zip(jax.tree.leaves(grown), jax.tree.leaves(large), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("how", decode.PREFILLS)
def test_a_cache_that_grows_between_chunks_says_the_same(how):
    c = tiny.with_modes("Se F2")
    setup, w, tokens = Setup(c, tiny.STRICT), tiny.weights(c, 4), tiny.tokens(c, 2, 16, seed=4)
    counts = np.array([[8, 8], [7, 0]], np.int32)
    extend = tiny.jit(lambda held, *chunk: decode.proceed(setup, w, held, *chunk))
    encode = tiny.jit(lambda held, *chunk: decode.encode(setup, w, held, *chunk))
    replay = tiny.jit(lambda held, end: decode.replay(setup, w, held, end))

    def run(capacities):
        held, end, out = cache.empty(setup, 2, capacities[0]), decode.no_end(setup, 2), []
        for i, (capacity, count) in enumerate(zip(capacities, counts, strict=True)):
            held, chunk = cache.grow(held, capacity), (tokens[:, 8 * i : 8 * i + 8], count)
            if how == "full":
                held, y = extend(held, *chunk)
                out.append(y)
            else:
                held, end = encode(held, *chunk, end)
        return replay(held, end) if how == "replay" else (held, out)

    for a, b in zip(*(jax.tree.leaves(run(capacities)) for capacities in ([8, 16], [16, 16])), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("text", ["F3 U", "S F4 X", "F1 X F2 U F1"])
def test_other_ratios_and_tables_decode_like_their_forward(text):
    c = tiny.with_modes(text)
    setup, w, tokens = Setup(c, tiny.STRICT), tiny.weights(c, 1), tiny.tokens(c, 2, 13, seed=1)
    want = forward(setup, w, tokens)
    _, logits = in_pieces(runner(setup), w, cache.empty(setup, 2, 16), tokens, [5, 5, 1, 1, 1])
    np.testing.assert_allclose(logits, want, atol=TOLERANCE)


@pytest.mark.parametrize("text", ["F2", "S S F2 U F1p U X U"])
def test_a_step_writes_in_place_whatever_the_room(text):
    """No copy of the cache: what a step needs besides does not grow with the cache."""
    c = dataclasses.replace(tiny.T, max_position_embeddings=2**20).with_modes(text)
    setup, w, one = Setup(c, tiny.STRICT), tiny.weights(c), jax.ShapeDtypeStruct((1,), jnp.int32)

    def temporary(capacity):
        held = jax.eval_shape(lambda: cache.empty(setup, 1, capacity))
        step = jit(lambda w, held, t, n: decode.proceed(setup, w, held, t[:, None], n), donate_argnames="held")
        return step.lower(w, held, one, one).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(2**14), temporary(2**18)
    assert large < 1.1 * small < 2**18  # the cache itself has 0.4 to 1.2 MB and sixteen times that


# Widths that the packed formats take.
WIDE = dataclasses.replace(
    tiny.T, hidden_size=32, head_dim=32, qk_rope_head_dim=8, index_head_dim=32, num_attention_heads=2, q_lora_rank=32
).with_modes("S F2 U F1p X")
ON = Quantize(kv_fp4=True, index_fp4=True, window_fp8=True)


def test_packed_and_rounded_numbers_are_the_same_cache():
    setup, tokens = Setup(WIDE, tiny.STRICT, quantize=ON), tiny.tokens(WIDE, 2, 14, seed=2)
    w, extend = tiny.weights(WIDE, 2), runner(setup)
    packed, got = in_pieces(extend, w, cache.empty(setup, 2, 16), tokens, [5, 5, 1, 1, 1, 1])
    loose, want = in_pieces(extend, w, cache.empty(setup, 2, 16, packed=False), tokens, [5, 5, 1, 1, 1, 1])
    np.testing.assert_allclose(got, want, atol=TOLERANCE)  # two programs, whose sums may be in another order
    for kind in ("window", "kv", "index"):
        form, held, numbers = getattr(packed.forms, kind), getattr(packed, kind), getattr(loose, kind)
        assert form.packed and all(a.dtype == jnp.uint8 for a in jax.tree.leaves(held))
        for ratio in (1, 2) if kind != "window" else ("",):
            a, b = (held[ratio], numbers[ratio]) if ratio else (held, numbers)
            assert (form.unpack(a) == b).mean() > 0.999  # what lies on a rounding boundary may fall either way


def test_prefill_in_chunks_of_rows_with_other_lengths_gives_the_last_logits(w, tokens, full):
    decoder = Decoder(SETUP, w, chunk=8)
    lengths = [1, 20, 8]
    held, y = decoder.prefill(decoder.begin(3, 24), [tokens[i, :n] for i, n in enumerate(lengths)])
    want = full[np.arange(3), np.array(lengths) - 1]
    np.testing.assert_allclose(decoder.logits(y), want, atol=TOLERANCE)
    held, logits = decoder.step(held, tokens[np.arange(3), lengths], np.ones(3, np.int32))
    np.testing.assert_allclose(logits, full[np.arange(3), lengths], atol=TOLERANCE)


def test_rows_need_room_for_their_own_tokens_alone(w, tokens):
    """A long prompt beside a row that holds much: no row goes beyond the longest sequence."""
    c = dataclasses.replace(C, max_position_embeddings=LENGTH)
    decoder = Decoder(Setup(c, tiny.STRICT), w, chunk=8)
    held, _ = decoder.prefill(decoder.begin(2, LENGTH), [tokens[0, :20], tokens[1, :8]])
    held, _ = decoder.prefill(held, [tokens[0, 20:], tokens[1, 8:LENGTH]])
    assert held.length.tolist() == [LENGTH, LENGTH]


def test_a_token_without_room_is_not_a_number(w, tokens):
    """And no token of another row, or of padding, is."""
    full, count = cache.empty(SETUP, 2, 16), np.array([7, 8], np.int32)
    full = dataclasses.replace(full, length=jnp.full((2,), 9, jnp.int32))
    _, logits = EXTEND(w, full, tokens[:2, :8], count)
    got = np.isnan(logits).all(axis=-1)
    np.testing.assert_array_equal(got, [[False] * 8, [False] * 7 + [True]])
    assert np.isnan(logits).sum() == C.vocab_size


def test_a_model_that_trains_with_dense_attention_decodes(w, tokens, full):
    setup = Setup(C, dataclasses.replace(tiny.STRICT, attention="dense"))
    _, logits = in_pieces(runner(setup), w, cache.empty(setup, 2, 32), tokens[:2], [8])
    np.testing.assert_allclose(logits, full[:2, :8], atol=TOLERANCE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.prefill(d.begin(1, 8), [np.array([], np.int32)]), "the prompt is empty"),
        (lambda d: d.prefill(d.begin(1, 8), [np.array([40])]), r"must lie in 0\.\.39, got 40\.\.40"),
        (lambda d: d.prefill(d.begin(1, 8), [np.array([-1, 3])]), r"must lie in 0\.\.39, got -1\.\.3"),
        (lambda d: d.prefill(d.begin(1, 8), [np.array([0.5])]), "a prompt is a list of ids, got float64"),
        (lambda d: d.prefill(d.begin(2, 8), [np.array([1])]), "1 prompts for a cache of 2 rows"),
        (lambda d: d.prefill(d.begin(1, 8), [np.array([1])], how="half"), "prefill is 'full' or 'replay', got 'half'"),
        (lambda d: d.begin(1, 5000), "5000 tokens, prompt and continuation, exceed max_position_embeddings=4096"),
        (lambda d: d.prefill(d.begin(1, 8), [np.zeros(5000, np.int32)]), "exceed max_position_embeddings=4096"),
        (lambda d: Decoder(SETUP, d.w, chunk=0), "a chunk of a prompt has at least 1 token, got 0"),
        (lambda d: Decoder(SETUP, d.w, np.zeros(3)), "classes has 3 entries for a vocabulary of 40"),
    ],
)
def test_what_cannot_be_decoded_is_refused(w, call, message):
    with pytest.raises(ValueError, match=message):
        call(Decoder(SETUP, w))


# Replay: the boundary is layer 4, so the n-gram memory at layers 1 and 3 lies below it.
def replayed(w, tokens, lengths, size=8):
    decoder = Decoder(SETUP, w, chunk=size)
    prompts = [row[:n] for row, n in zip(tokens, lengths, strict=True)]
    return decoder, *decoder.prefill(decoder.begin(len(prompts), LENGTH), prompts, how="replay")


def test_replay_of_prompts_up_to_the_window_is_exact(w, tokens, full):
    lengths = np.array([1, 2, 3, 4])
    decoder, held, y = replayed(w, tokens[:4], lengths)
    np.testing.assert_allclose(decoder.logits(y), full[np.arange(4), lengths - 1], atol=1e-5)
    for step in range(6):
        held, logits = decoder.step(held, tokens[np.arange(4), lengths + step], np.ones(4, np.int32))
        np.testing.assert_allclose(logits, full[np.arange(4), lengths + step], atol=TOLERANCE)


def test_replay_of_longer_prompts_is_approximate_but_for_what_the_encoder_made(w, tokens, full):
    lengths = np.array([20, 9, 3])
    decoder, held, y = replayed(w, tokens[:3], lengths)
    exact, _ = decoder.prefill(decoder.begin(3, LENGTH), [r[:n] for r, n in zip(tokens, lengths, strict=False)])
    differ = np.abs(decoder.logits(y) - full[np.arange(3), lengths - 1]).max(axis=-1)
    assert (differ[:2] > 1e-2).all() and differ[2] < 1e-5
    for kind in ("kv", "index"):
        for ratio, a in getattr(held, kind).items():
            for row, n in enumerate(lengths):
                got, want = (x[row, :, : n // ratio] for x in (a, getattr(exact, kind)[ratio]))
                np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(held.window[:2, :4], exact.window[:2, :4], atol=1e-5)
    for name in ("length", "origin", "stored", "history"):
        for a, b in zip(*(jax.tree.leaves(getattr(x, name)) for x in (held, exact)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_replay_in_small_chunks_equals_replay_in_one(w, tokens):
    one, two = (replayed(w, tokens[:2], [21, 10], size)[1:] for size in (2, 32))
    np.testing.assert_allclose(one[1], two[1], atol=TOLERANCE)
    for a, b in zip(jax.tree.leaves(one[0].kv), jax.tree.leaves(two[0].kv), strict=True):
        np.testing.assert_allclose(a, b, atol=TOLERANCE)


def test_replay_is_refused_where_the_decoder_cannot_be_left_out(w):
    c = tiny.with_modes("S F2 Ue")
    decoder = Decoder(Setup(c, tiny.STRICT), tiny.weights(c))
    with pytest.raises(ValueError, match="replay needs a KV source with no n-gram memory at or above the last one"):
        decoder.prefill(decoder.begin(1, 8), [np.array([1])], how="replay")


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_plan_in_two_parts_is_the_plan(cut):
    c = tiny.with_modes("S 2(F2 2U) F2 U")
    plan, w = modes.plan(c.table), tiny.weights(c)["layers"]
    low, below = model.between(plan, w, 0, cut)
    high, above = model.between(plan, w, cut, 9)
    assert modes.flatten(low) + modes.flatten(high) == c.table
    got = [leaf for part in ((low, below), (high, above)) for leaf in of_layers(*part)]
    for a, b in zip(got, of_layers(plan, w), strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)


def of_layers(plan, w):
    """The weights of each layer of a plan, in order."""
    out = []
    for place in modes.places(plan):
        own = w
        for name in place.path:
            own = own[name]
        out.append(jax.tree.map(lambda a, at=place.index: a[at], own))
    return out
