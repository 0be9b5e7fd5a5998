"""sampling.py: accepted drafts follow the target's law, greedy ones its largest token, and rows draw apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from test_sampling import CERTAIN, INF, SIZE, distribution, p_value, strict

from dsflash_jax import checkpoint, draft, sampling
from dsflash_jax.config import Compute, Config
from dsflash_jax.flow import Setup
from dsflash_jax.sampling import DRAFT, PLAIN, RESIDUAL, Settings

accept = strict(sampling.accept)


def take(s: Settings, rows: Any) -> Settings:
    """The settings of some rows."""
    return jax.tree.map(lambda a: a[jnp.asarray(rows)], s)


# A target and a draft model in which a token depends on the one before; the last line is the start.

TOKENS, BLOCK = 6, 2


def chain(seed: int) -> np.ndarray:
    table = np.random.default_rng(seed).random((TOKENS + 1, TOKENS)) ** 2 + 0.25
    return table / table.sum(axis=1, keepdims=True)


TARGET, DRAFTER = chain(1), chain(2)
LAW = TARGET[-1][:, None, None] * TARGET[:-1, :, None] * TARGET[None, :-1]  # of the first three tokens


def right(accepted: Array, token: Array, *_: Array) -> tuple[Array, Array]:
    return accepted, token


def replace_from_the_target(
    accepted: Array, token: Array, drafted: Array, target: Array, key: Array
) -> tuple[Array, Array]:
    p = jnp.take_along_axis(target, accepted[:, None, None], axis=1)[:, 0]
    return accepted, jnp.where(accepted < drafted, sampling.draw(p, key), token)


def accept_everything(accepted: Array, token: Array, drafted: Array, target: Array, key: Array) -> tuple[Array, Array]:
    p = jnp.take_along_axis(target, drafted[:, None, None], axis=1)[:, 0]
    return drafted, jnp.where(accepted < drafted, sampling.draw(p, key), token)


def rounds_of(rule: Any) -> Any:
    """A round of drafting and acceptance behind the token `last`: the drafts, how many are kept, the token behind."""

    @strict
    def one(s: Settings, last: Array, position: Array) -> tuple[Array, Array, Array]:
        q, p = (jnp.log(jnp.asarray(t, jnp.float32)) for t in (DRAFTER, TARGET))
        first = sampling.draw(q[last], sampling.at(s, position, DRAFT))
        second = sampling.draw(q[first], sampling.at(s, position + 1, DRAFT))
        drafts = jnp.stack([first, second], axis=1)
        # A third of the rows drafts nothing; behind an odd draft no other one counts.
        row = jnp.arange(last.shape[0], dtype=jnp.int32)
        drafted = jnp.where(row % 3 == 0, 0, jnp.where(first % 2 == 1, 1, BLOCK))
        target = jnp.stack([p[last], p[first], p[second]], axis=1)
        kept, token = sampling.accept(drafts, drafted, jnp.stack([q[last], q[first]], axis=1), target, s, position)
        key = sampling.at(s, position + kept, RESIDUAL)
        return drafts, *rule(kept, token, drafted, target, key)

    return one


def emitted(rule: Any, rows: int = 60_000) -> tuple[np.ndarray, np.ndarray]:
    """The first three tokens of each row [rows, 3] after three rounds, and how many drafts the first round kept."""
    one, s = rounds_of(rule), sampling.settings(rows, seed=11)
    out = np.full((rows, 3 * (BLOCK + 1) + 1), -1)
    said, last, row = np.zeros(rows, np.int32), np.full(rows, TOKENS, np.int32), np.arange(rows)
    first: Any = None
    for _ in range(3):
        drafts, kept, last = (np.asarray(a) for a in one(s, jnp.asarray(last), jnp.asarray(7 + said)))
        first = kept if first is None else first
        for j in range(BLOCK + 1):
            out[row, said] = np.where(j < kept, drafts[:, min(j, BLOCK - 1)], last)
            said = said + (j <= kept)  # what was written behind it is written over
    return out[:, :3], first


def law_of(tokens: np.ndarray) -> float:
    """p-value of the joint law of three tokens."""
    return p_value(np.bincount(tokens @ [36, 6, 1], minlength=216), LAW.reshape(-1))


def test_accepted_and_replaced_drafts_together_follow_the_target() -> None:
    tokens, kept = emitted(right)
    assert {0, 1, 2} == set(kept.tolist())
    assert law_of(tokens) > CERTAIN


@pytest.mark.parametrize("rule", [replace_from_the_target, accept_everything])
def test_a_wrong_rule_does_not_follow_the_target(rule: Any) -> None:
    tokens, _ = emitted(rule)
    assert law_of(tokens) < CERTAIN**2


B, J = 64, 3


@pytest.fixture(scope="module")
def random_logits() -> tuple[Array, Array]:
    """Of the drafts [B, J, SIZE] and of the target [B, J + 1, SIZE], often with the same largest one."""
    one, two = (jax.random.normal(jax.random.key(i), (B, J + 1, SIZE), jnp.float32) for i in range(2))
    return one[:, :J], one + 0.5 * two


COUNTS = jnp.arange(B, dtype=jnp.int32) % (J + 1)
START = jnp.full(B, 5, jnp.int32)


def test_greedy_rows_take_the_targets_largest_whatever_the_numbers(random_logits: tuple[Array, Array]) -> None:
    proposed, target = random_logits
    drafts, best = (np.asarray(a).argmax(axis=-1) for a in (proposed, target))
    agree = drafts == best[:, :J]
    want = [next((i for i in range(n) if not agree[b, i]), n) for b, n in enumerate(np.asarray(COUNTS))]
    assert len(set(want)) == J + 1
    for seed in (0, 1000):
        s = sampling.settings(B, temperature=0, seed=seed)
        p = distribution(target, s)
        # Also drafts that were drawn from a distribution of their own.
        for q in (distribution(proposed, s), distribution(proposed, sampling.settings(B))):
            kept, token = accept(jnp.asarray(drafts, jnp.int32), COUNTS, q, p, s, START)
            np.testing.assert_array_equal(kept, want)
            np.testing.assert_array_equal(token, best[np.arange(B), want])


def test_drafts_of_the_same_law_are_all_accepted_up_to_their_number(random_logits: tuple[Array, Array]) -> None:
    s = sampling.settings(B, top_k=4)
    p = distribution(random_logits[1], s)
    drafts = jnp.argsort(p, axis=-1)[:, :J, -3].astype(jnp.int32)
    kept, token = accept(drafts, COUNTS, p[:, :J], p, s, START)
    np.testing.assert_array_equal(kept, COUNTS)
    # The token behind is the one that comes without drafts there.
    behind = jnp.take_along_axis(p, COUNTS[:, None, None], axis=1)[:, 0]
    np.testing.assert_array_equal(token, sampling.draw(behind, sampling.at(s, START + COUNTS, PLAIN)))


def test_drafts_that_the_target_excludes_are_all_rejected(random_logits: tuple[Array, Array]) -> None:
    s, ids = sampling.settings(B), jnp.arange(SIZE)
    q = distribution(jnp.where(ids[None, None] < 4, random_logits[0], -INF), s)
    p = distribution(jnp.where(ids[None, None] < 4, -INF, random_logits[1]), s)
    kept, token = accept(jnp.argmax(q, axis=-1).astype(jnp.int32), COUNTS, q, p, s, START)
    np.testing.assert_array_equal(kept, 0)
    assert set(np.asarray(token).tolist()) == {4, 5, 6, 7, 8}


def test_without_a_remainder_a_replacement_follows_the_target(random_logits: tuple[Array, Array]) -> None:
    s = sampling.settings(B, top_k=3)
    q = distribution(random_logits[1], s)
    p = q - 20.0  # far below q everywhere, as rounding alone may leave it a little below
    kept, token = accept(jnp.argmax(q[:, :J], axis=-1).astype(jnp.int32), jnp.full(B, J), q[:, :J], p, s, START)
    np.testing.assert_array_equal(kept, 0)
    want = sampling.draw(q[:, 0], sampling.at(s, START, RESIDUAL))
    np.testing.assert_array_equal(token, want)


def test_what_stands_behind_the_drafted_ones_has_no_say(random_logits: tuple[Array, Array]) -> None:
    s = sampling.settings(B)
    q, p = (distribution(a, s) for a in random_logits)
    drafts = jnp.argmax(q, axis=-1).astype(jnp.int32)
    unused = jnp.arange(J)[None] >= COUNTS[:, None]
    other = jnp.where(unused[..., None], jnp.roll(q, 1, axis=-1), q)
    got = accept(drafts, COUNTS, q, p, s, START)
    same = accept(jnp.where(unused, 0, drafts), COUNTS, other, p, s, START)
    np.testing.assert_array_equal(got, same)
    assert len(set(np.asarray(got[0]).tolist())) == J + 1


# Rows


@strict
def step(s: Settings, proposed: Array, target: Array, position: Array) -> tuple[Array, ...]:
    """Filter, draw drafts, accept."""
    q, p = sampling.distribution(proposed, s), sampling.distribution(target, s)
    keys = [sampling.at(s, position + i, DRAFT) for i in range(J)]
    drafts = jnp.stack([sampling.draw(q[:, i], key) for i, key in enumerate(keys)], axis=1)
    return p, drafts, *sampling.accept(drafts, jnp.full(position.shape, J, jnp.int32), q, p, s, position)


MIXED = {"temperature": [0.0, 0.7, 1.0, 1.5], "top_k": [0, 0, 5, 0], "top_p": [1.0, 1, 1, 0.8], "min_p": [0, 0, 0, 0.1]}


def test_a_row_alone_says_what_it_says_in_a_batch(random_logits: tuple[Array, Array]) -> None:
    s = sampling.settings(B, seed=3, **{name: values * (B // 4) for name, values in MIXED.items()})
    proposed, target = random_logits
    position = 5 + jnp.arange(B, dtype=jnp.int32)
    p, *batch = step(s, proposed, target, position)
    turn = np.roll(np.arange(B), 9)
    for got, want in zip(step(take(s, turn), proposed[turn], target[turn], position[turn]), (p, *batch), strict=True):
        np.testing.assert_array_equal(got, want[turn])
    for row in range(8):
        alone, *one = step(take(s, [row]), proposed[row][None], target[row][None], position[row][None])
        np.testing.assert_allclose(alone[0], p[row], rtol=1e-6)  # another shape may add in another order
        for got, want in zip(one, batch, strict=True):
            np.testing.assert_array_equal(got[0], want[row])


# The draft head


def test_the_draft_head_takes_drawn_tokens_and_goes_on_from_them(golden: Path) -> None:
    c = Config.from_json(golden / "tiny_full" / "config.json")
    w = jax.tree.map(jnp.asarray, checkpoint.adopt(c, dict(np.load(golden / "tiny_full" / "weights.npz"))))
    setup = Setup(c, Compute(dtype="float32", remat="none", attention="dense", experts="dense", query_chunk=16))
    shape = (c.num_nextn_predict_layers, 3, c.sliding_window, c.head_dim)
    memory = draft.Rings(
        keys=jax.random.normal(jax.random.key(0), shape, jnp.float32),
        filled=jnp.ones((3, c.sliding_window), bool),
        position=jnp.asarray([20, 30, 40], jnp.int32),
    )
    token = jnp.asarray([5, 6, 7], jnp.int32)

    @strict
    def proposed(s: Settings) -> draft.Draft:
        def choose(logits: Array, i: Array) -> Array:
            return sampling.draw(sampling.distribution(logits, s), sampling.at(s, memory.position + 2 + i, DRAFT))

        return draft.draft(setup, w, token, memory, choose=choose)

    likeliest, hot = (
        proposed(sampling.settings(3, temperature=0)),
        proposed(sampling.settings(3, temperature=[0, 9, 9])),
    )
    np.testing.assert_array_equal(likeliest.tokens[:, 1:], np.argmax(likeliest.logits, axis=-1))
    # Each draft is the draw from the logits that are returned, and the bigram bias is that of the token drawn before.
    s = sampling.settings(3, temperature=[0, 9, 9])
    for i in range(c.dspark_block_size):
        logp = distribution(hot.logits[:, i], s)
        drawn = sampling.draw(logp, sampling.at(s, memory.position + 2 + i, DRAFT))
        np.testing.assert_array_equal(hot.tokens[:, 1 + i], drawn)
    assert (np.asarray(hot.tokens != likeliest.tokens).sum(axis=1) > 0).tolist() == [False, True, True]
    bigram = w["mtp"][str(c.num_nextn_predict_layers - 1)]["markov_head"]
    biases = [(bigram["embed"][d.tokens[:, :-1]] @ bigram["head"].T) for d in (hot, likeliest)]
    np.testing.assert_allclose(hot.logits - likeliest.logits, biases[0] - biases[1], rtol=0, atol=1e-4)
