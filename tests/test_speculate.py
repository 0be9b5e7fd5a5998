"""speculate.py: speculative decoding says what plain decoding says, and leaves the same cache."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy import stats

from dsflash_jax import cache, checkpoint, decode, model, sampling, speculate
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Setup

STAGES = {
    "num_nextn_predict_layers": 2, "dspark_block_size": 5, "dspark_noise_token_id": 3, "dspark_markov_rank": 4,
    "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
C = dataclasses.replace(tiny.T, **tiny.ENGRAM).with_modes(
    "Se F2 U F1p Xt Ut", engram_num_embeddings=tiny.TABLES[1], **STAGES
)
ROWS, NEW = 6, 64  # prompts of 1 to 6 tokens, with a window of 4


pytestmark = pytest.mark.usefixtures("quick")


def with_drafts(c):
    return tiny.weights(c, declare=checkpoint.declare)


@pytest.fixture(scope="module")
def decoder():
    return Decoder(Setup(C, tiny.STRICT), with_drafts(C), chunk=8)


@pytest.fixture(scope="module")
def prompts():
    return [row[: n + 1] for n, row in enumerate(tiny.tokens(C, ROWS, ROWS, seed=5))]


def greedy(rows):
    return sampling.settings(rows, temperature=0.0)


def start(decoder, prompts):
    """A cache with the prompts, and the likeliest token behind each."""
    held, y = decoder.prefill(decoder.begin(len(prompts), 80), prompts)
    return held, np.asarray(decoder.logits(y)).argmax(axis=-1).astype(np.int32)


@pytest.fixture(scope="module")
def plain(decoder, prompts):
    """Ids of each row by plain greedy decoding, prompt included."""
    held, token = start(decoder, prompts)
    ids = [[*prompt, int(t)] for prompt, t in zip(prompts, token, strict=True)]
    for _ in range(NEW + 6):
        held, logits = decoder.step(held, token, np.ones(ROWS, np.int32))
        token = np.asarray(logits).argmax(axis=-1).astype(np.int32)
        for row, t in zip(ids, token, strict=True):
            row.append(int(t))
    assert len({tuple(row[-20:]) for row in ids}) > 1
    return ids


def known(ids):
    """Ids by row and position, as `oracle` takes them."""
    return np.array([[*row, *[0] * (max(map(len, ids)) - len(row))] for row in ids], np.int32)


def valid(held):
    """What a cache says, without what nobody reads: zeros at places that hold nothing."""
    ring, slots = np.asarray(held.filled()), {r: np.asarray(n) for r, n in held.stored.items()}
    length = np.asarray(held.length)

    def of_slots(r, a):
        there = np.arange(a.shape[2])[None] < slots[r][:, None]
        return np.where(there[:, None, :, None], a, 0)

    def of_tail(r, a):
        place = np.arange(r - 1)[None] >= (r - 1 - length % r)[:, None]
        return np.where(place[:, None, :, None, None], a, 0)

    return {
        "length": length, "stored": slots, "history": held.history,
        "window": np.where(ring[:, None, :, None], held.window, 0),
        "draft": np.where(ring[:, None, :, None], held.draft, 0),
        "kv": {r: of_slots(r, a) for r, a in held.kv.items()},
        "index": {r: of_slots(r, a) for r, a in held.index.items()},
        "tails": {r: of_tail(r, a) for r, a in held.tails.items()},
    }  # fmt: skip


def cut(most, proposer):
    """A proposer whose confidence ends a block after `most` drafts."""

    def propose(*args):
        made = proposer(*args)
        sure = jnp.arange(made.confidence.shape[1])[None] < most
        return dataclasses.replace(made, confidence=jnp.where(sure, jnp.inf, -jnp.inf) * jnp.ones_like(made.confidence))

    return propose


SLOW = [pytest.param(block, marks=pytest.mark.slow) for block in (1, 2, 3, 4)]


@pytest.mark.parametrize("block", [*SLOW, 5])
@pytest.mark.parametrize("draft", ["random", "perfect"])
def test_greedy_text_and_cache_are_those_of_plain_decoding(decoder, prompts, plain, block, draft):
    proposer = speculate.propose if draft == "random" else speculate.oracle(known(plain), C.vocab_size, 5)
    # The head's own cut and the confidence's are two ways to draft less: half of the cases take each.
    most, proposer, threshold = (block, proposer, 0.0) if block % 2 else (5, cut(block, proposer), 0.5)
    fast = speculate.Speculator(decoder, most, threshold, proposer)
    held, token = start(decoder, prompts)
    steady, _ = start(decoder, prompts)
    text = [[*prompt, int(t)] for prompt, t in zip(prompts, token, strict=True)]
    for turn in itertools.count():
        active = np.array([len(t) - len(p) <= NEW for t, p in zip(text, prompts, strict=True)])
        if not active.any():
            break
        held, made = fast.round(held, token, active, greedy(ROWS))
        for row in range(ROWS):
            new = made.tokens[row, : made.count[row]].tolist()
            text[row] += new
            token[row] = new[-1] if new else token[row]
        if turn % 8 < 2:  # the caches at the same lengths; each comparison catches up row by row
            while (behind := np.asarray(steady.length) < np.asarray(held.length)).any():
                now = np.array([plain[row][int(n)] for row, n in enumerate(steady.length)], np.int32)
                steady, _ = decoder.step(steady, now, behind.astype(np.int32))
            for a, b in zip(*(jax.tree.leaves(valid(x)) for x in (held, steady)), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4)
    for got, want, prompt in zip(text, plain, prompts, strict=True):
        assert got[: len(prompt) + NEW] == want[: len(prompt) + NEW]
    share = fast.statistics.accepted.sum() / fast.statistics.drafted.sum()
    assert share == 1 if draft == "perfect" else share < 0.3
    assert (fast.statistics.drafted[:block] > 0).all() and not fast.statistics.drafted[block:].any()


def test_drafting_goes_on_behind_a_replayed_prompt_and_changes_no_greedy_token(decoder, prompts):
    """Prompts of up to a window leave the full prefill's cache; behind longer ones the draft head has their last W."""
    (whole, _), (plainly, y) = (
        decoder.prefill(decoder.begin(ROWS, 80), prompts, how=how) for how in ("full", "replay")
    )
    for a, b in zip(*(jax.tree.leaves(valid(x)) for x in (plainly, whole)), strict=True):
        for row in range(C.sliding_window):
            np.testing.assert_allclose(a[row], b[row], atol=1e-4)
    assert (np.abs(np.asarray(plainly.draft)[C.sliding_window :]).max(axis=-1) > 0).all()  # no place is empty
    token = np.asarray(decoder.logits(y)).argmax(axis=-1).astype(np.int32)
    text, fast = [[int(t)] for t in token], speculate.Speculator(decoder)
    held, _ = decoder.prefill(decoder.begin(ROWS, 80), prompts, how="replay")
    now, want = token, [token]
    for _ in range(6):
        plainly, logits = decoder.step(plainly, now, np.ones(ROWS, np.int32))
        now = np.asarray(logits).argmax(axis=-1).astype(np.int32)
        want.append(now)
    while min(map(len, text)) < 7:
        held, made = fast.round(held, np.array([t[-1] for t in text], np.int32), np.ones(ROWS, bool), greedy(ROWS))
        for row, t in enumerate(text):
            t += made.tokens[row, : made.count[row]].tolist()
    np.testing.assert_array_equal([t[:7] for t in text], np.stack(want, axis=1))


def test_rows_that_wait_keep_their_cache_and_get_no_token(decoder, prompts):
    fast = speculate.Speculator(decoder)
    held, token = start(decoder, prompts)
    before = jax.device_get(held)
    held, made = fast.round(held, token, np.array([True, False] * 3), greedy(ROWS))
    np.testing.assert_array_equal(made.count > 0, [True, False] * 3)
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(held), strict=True):
        np.testing.assert_array_equal(a[1::2], np.asarray(b)[1::2])


def test_drafts_without_room_are_not_made(decoder, prompts, plain):
    full = decode.LEAST - 2
    at = lambda n: jnp.full((ROWS,), n, jnp.int32)  # noqa: E731
    held, token = start(decoder, prompts)
    held = dataclasses.replace(held, length=at(full), origin=at(full))
    fast = speculate.Speculator(decoder, proposer=speculate.oracle(known(plain), C.vocab_size, 5))
    held, made = fast.round(held, token, np.ones(ROWS, bool), greedy(ROWS))
    assert (made.drafted == 1).all() and (np.asarray(held.length) <= held.capacity).all()


SMALL = dataclasses.replace(tiny.T, vocab_size=6).with_modes("S F2t U", **(STAGES | {"dspark_block_size": 3}))


@pytest.mark.slow
def test_sampled_tokens_follow_the_models_distribution():
    setup = Setup(SMALL, tiny.STRICT)
    w = with_drafts(SMALL)
    w["head"], w["mtp"]["1"]["markov_head"]["head"] = 0.2 * w["head"], 0.2 * w["mtp"]["1"]["markov_head"]["head"]
    decoder, prompt, rows = Decoder(setup, w, chunk=4), [1, 4, 2], 6000
    settings = sampling.settings(rows, temperature=0.8, top_k=5, seed=11)
    held, y = decoder.prefill(decoder.begin(rows, 16), [np.array(prompt)] * rows)
    first = sampling.distribution(decoder.logits(y), settings)
    token = np.array(sampling.draw(first, sampling.at(settings, held.length, sampling.PLAIN)))
    fast = speculate.Speculator(decoder)
    text = [[int(t)] for t in token]
    while any(len(t) < 3 for t in text):
        held, made = fast.round(held, token, np.array([len(t) < 3 for t in text]), settings)
        for row, t in enumerate(text):
            t += made.tokens[row, : made.count[row]].tolist()
            token[row] = t[-1]
    share = fast.statistics.accepted / fast.statistics.drafted
    assert 0.2 < share[0] < 0.9  # both cases are in the sample

    v = SMALL.vocab_size
    every = np.array([prompt + list(rest) for rest in itertools.product(range(v), repeat=2)], np.int32)
    logits = model.logits(w["head"], model.forward(setup, w, tiny.batch(SMALL, every))[0])
    one = sampling.settings(len(every), temperature=0.8, top_k=5)
    p = np.exp(np.asarray(sampling.distribution(logits, one)), dtype=float)
    p = p.reshape(v, v, 5, v)
    joint = p[0, 0, 2][:, None, None] * p[:, 0, 3][:, :, None] * p[:, :, 4]
    want = joint.reshape(-1) * rows
    count = np.bincount([a * v * v + b * v + c for a, b, c in (t[:3] for t in text)], minlength=v**3)
    assert count[want == 0].sum() == 0
    often = want > 5
    groups = [np.append(x[often], x[~often].sum()) for x in (count, want)]
    statistic = ((groups[0] - groups[1]) ** 2 / groups[1]).sum()
    assert stats.chi2.sf(statistic, len(groups[0]) - 1) > 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"most": 6}, "a round drafts 1 to dspark_block_size=5 tokens, or 0 for all, got 6"),
        ({"threshold": 1.5}, "the confidence threshold is a probability, got 1.5"),
    ],
)
def test_a_speculator_that_cannot_be_is_refused(decoder, arguments, message):
    with pytest.raises(ValueError, match=message):
        speculate.Speculator(decoder, **arguments)


def test_a_model_without_a_draft_head_is_refused():
    plain = Decoder(Setup(tiny.T, tiny.STRICT), tiny.weights(tiny.T))
    with pytest.raises(ValueError, match="speculative decoding needs a draft head"):
        speculate.Speculator(plain)


def test_no_draft_leaves_a_trace_in_what_is_committed(decoder, prompts):
    """A commit of none of a piece's tokens is the cache itself."""
    held, _ = start(decoder, prompts)
    tokens, none = jnp.asarray(tiny.tokens(C, ROWS, 6, seed=9)), jnp.zeros((ROWS,), jnp.int32)

    @tiny.jit
    def commit_none(w, held):
        _, made = decode.extend(decoder.setup, w, held, tokens, none + 6)
        return cache.advance(cache.commit(held, made, none), none)

    same = commit_none(decoder.w, held)
    for a, b in zip(jax.tree.leaves(held), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(a, b)
