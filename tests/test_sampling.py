"""sampling.py: filters against a plain oracle, draws and accepted drafts against the law they must follow."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from jax import Array
from scipy import stats

from dsflash_jax import checkpoint, draft, sampling
from dsflash_jax.config import Compute, Config
from dsflash_jax.flow import Setup
from dsflash_jax.sampling import DRAFT, PLAIN, RESIDUAL, Settings

ROWS, SIZE = 4, 9
INF = float("inf")


def strict(function: Any) -> Any:
    """Jitted, under strict types."""

    def checked(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("strict"):
            return function(*args)

    return jax.jit(checked)


distribution = strict(sampling.distribution)
accept = strict(sampling.accept)


def at_zero(s: Settings) -> Array:
    """Every row's plain key at position 0."""
    return sampling.at(s, jnp.zeros(s.key.shape, jnp.int32), PLAIN)


draw = strict(lambda logp, s: sampling.draw(logp, at_zero(s)))


def take(s: Settings, rows: Any) -> Settings:
    """The settings of some rows."""
    return jax.tree.map(lambda a: a[jnp.asarray(rows)], s)


# Filters


def kept_by_oracle(logits: np.ndarray, temperature: float, k: int, p: float, m: float) -> list[int]:
    """Ids that stay, by sorting one row in float64; skips examples at the very edge of a filter."""
    if temperature == 0:
        return [int(np.flatnonzero(logits == logits.max())[0])]
    scaled = logits / temperature
    order = sorted((i for i in range(len(scaled)) if scaled[i] > -INF), key=lambda i: (-scaled[i], i))
    order = order[: k or None]
    mass = np.exp(scaled[order] - scaled.max())
    if p < 1:
        reached = np.cumsum(mass) / mass.sum()
        assume(np.abs(reached - p).min() > 1e-5)
        order = order[: 1 + int((reached < p).sum())]
    share = np.exp(scaled[order] - scaled.max())
    assume(m == 0 or np.abs(share[1:] - m).min(initial=1) > 1e-5)
    return [i for i, s in zip(order, share, strict=True) if s >= m]


def logp_by_oracle(logits: np.ndarray, *filters: Any) -> np.ndarray:
    kept = kept_by_oracle(logits, *filters)
    out = np.full(len(logits), -INF)
    scaled = logits[kept] / (filters[0] or 1.0)
    out[kept] = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    return out


HALVES = st.one_of(st.integers(-6, 6).map(lambda n: n / 2), st.just(-INF))  # few values: most rows have ties
FILTERS = st.tuples(
    st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.5]),
    st.sampled_from([0, 0, 1, 2, 5, SIZE, 50]),
    st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    st.one_of(st.just(0.0), st.floats(0.01, 0.99), st.just(1.0)),
)


@given(
    st.lists(st.lists(HALVES, min_size=SIZE, max_size=SIZE), min_size=ROWS, max_size=ROWS),
    st.lists(FILTERS, min_size=ROWS, max_size=ROWS),
)
def test_filters_of_mixed_rows_equal_a_plain_oracle(rows: list[list[float]], filters: list[tuple]) -> None:
    logits = np.array(rows)
    assume((logits.max(axis=1) > -INF).all())
    want = np.stack([logp_by_oracle(row, *f) for row, f in zip(logits, filters, strict=True)])
    heat, k, p, m = map(list, zip(*filters, strict=True))
    got = distribution(jnp.asarray(logits, jnp.float32), sampling.settings(ROWS, heat, k, p, m))
    np.testing.assert_array_equal(got == -INF, want == -INF)
    np.testing.assert_allclose(got, want, rtol=0, atol=4e-6)  # float32 logs of up to -42, summed in another order


def test_filters_follow_in_their_order_and_renormalise() -> None:
    logits = jnp.log(jnp.asarray([[0.4, 0.3, 0.2, 0.1]], jnp.float32))
    # Of 4 : 3 : 2 the first is 0.44; after top-k 2 it would be 0.57 and reach 0.5 alone, without top-k two are needed.
    chosen = lambda **f: np.exp(distribution(logits, sampling.settings(1, **f)))[0]  # noqa: E731
    np.testing.assert_allclose(chosen(top_p=0.5), [4 / 7, 3 / 7, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(chosen(top_p=0.5, top_k=2), [1, 0, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(chosen(min_p=0.6), [4 / 7, 3 / 7, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(chosen(min_p=0.6, temperature=2.0), np.sqrt([4, 3, 2, 0]) / 5.14626, rtol=1e-5)


def test_equal_tokens_go_to_the_lower_id_and_top_p_stops_when_reached() -> None:
    level = jnp.zeros((5, 4), jnp.float32)
    s = sampling.settings(5, temperature=[1, 1, 1, 0, 1], top_k=[3, 0, 2, 0, 0], top_p=[1.0, 0.5, 0.5, 1.0, 1e-9])
    got = np.asarray(distribution(level, s)) > -INF
    np.testing.assert_array_equal(got.sum(axis=1), [3, 2, 1, 1, 1])
    assert all((row == np.sort(row)[::-1]).all() for row in got)


def test_a_distribution_with_drafts_is_that_of_each_position() -> None:
    logits = jax.random.normal(jax.random.key(0), (3, 2, SIZE), jnp.float32)
    s = sampling.settings(3, temperature=[0.0, 0.5, 2.0], top_k=[0, 4, 0], top_p=[1.0, 1.0, 0.6], min_p=[0, 0, 0.1])
    got = distribution(logits, s)
    for j in range(2):
        np.testing.assert_allclose(got[:, j], distribution(logits[:, j], s), rtol=1e-6)


def test_low_temperatures_end_in_the_largest_logit() -> None:
    logits = jnp.tile(jnp.asarray([[-300.0, 100.0, 99.0, -INF]], jnp.float32), (4, 1))
    got = distribution(logits, sampling.settings(4, temperature=[0.0, 1e-50, 1e-40, 1e-30]))
    np.testing.assert_array_equal(np.exp(got), np.tile([0, 1, 0, 0], (4, 1)))


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    rng = np.random.default_rng(0)
    logits, ids = rng.standard_normal((3, 2, SIZE)) * 4 + 1000, rng.integers(0, SIZE, (3, 2))
    logits = logits.astype(np.float32).astype(np.float64)
    want = np.take_along_axis(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True), ids[..., None], axis=-1)
    got = strict(sampling.log_probability)(jnp.asarray(logits, jnp.float32), jnp.asarray(ids))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want[..., 0], rtol=1e-5)


# Draws


def p_value(count: np.ndarray, law: np.ndarray) -> float:
    """Of Pearson's test that `count` was drawn from `law`; 0 if something impossible was drawn."""
    possible = law > 0
    if count[~possible].any():
        return 0.0
    want = count.sum() * law[possible]
    assert want.min() > 5, "too few draws for this test"
    return float(stats.chi2.sf(((count[possible] - want) ** 2 / want).sum(), possible.sum() - 1))


CERTAIN = 1e-4  # a true law fails one in ten thousand such tests; seeds are fixed


def test_draws_follow_the_law_and_other_positions_and_uses_draw_apart() -> None:
    rows, law = 20_000, np.array([0.4, 0.3, 0.0, 0.2, 0.06, 0.04])
    logp = jnp.tile(jnp.log(jnp.asarray(law, jnp.float32))[None], (rows, 1))

    places = [(3, PLAIN), (3, DRAFT), (3, RESIDUAL), (4, PLAIN)]

    @strict
    def drawn(s: Settings) -> Array:
        keys = [sampling.at(s, jnp.full(rows, at, jnp.int32), use) for at, use in places]
        return jnp.stack([sampling.draw(logp, key) for key in keys])

    got = np.asarray(drawn(sampling.settings(rows)))
    assert got.dtype == np.int32
    for a, b in combinations(range(len(places)), 2):
        count = np.bincount(got[a] * 6 + got[b], minlength=36)
        assert p_value(count, np.outer(law, law).reshape(-1)) > CERTAIN


def test_the_rarest_tokens_can_be_drawn() -> None:
    # All but one have probability 1.5e-8, which noise from 23 random bits cannot lift. Of 400 seeds six draw one of
    # them; 13 is the first, and where it is not, a search decides.
    logp = jnp.full((1, 2**20), -18.0, jnp.float32).at[0, 0].set(0.0)
    assert any(int(draw(logp, sampling.settings(1, seed=seed))[0]) > 0 for seed in range(13, 413))


def test_the_same_seed_draws_the_same_and_every_bit_of_it_counts() -> None:
    logp = jnp.zeros((6, 1000), jnp.float32)
    seeds = [5, 5, 6, 5 + 2**32, 5 + 2**62, 2**63 - 1]
    got = np.asarray(draw(logp, sampling.settings(6, seed=seeds))).tolist()
    assert got[0] == got[1] and len(set(got)) == 5
    assert bool((sampling.settings(1, seed=5).key == jax.random.key(5, impl="threefry2x32")[None]).all())
    counted = sampling.settings(3, seed=5).key == sampling.settings(3, seed=[5, 6, 7]).key
    assert bool(counted.all())


# Accepted drafts: a target and a draft model in which a token depends on the one before; the last line is the start.

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


def test_the_filters_of_other_rows_change_nothing(random_logits: tuple[Array, Array]) -> None:
    # Alone, these rows need no sorting; with a neighbour of top-k they take part in it.
    off = sampling.settings(B, temperature=[0.0, 0.8] * (B // 2), min_p=[0.0, 0.001] * (B // 2))
    on = off.replace(top_k=off.top_k.at[7].set(2))
    got, want = (np.asarray(distribution(random_logits[1], s)) for s in (on, off))
    np.testing.assert_array_equal(np.delete(got, 7, axis=0), np.delete(want, 7, axis=0))
    assert (got[7] > -INF).sum(axis=-1).max() == 2 < (want[7] > -INF).sum(axis=-1).min()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": [1.0, -0.5]}, "temperature of row 1 is -0.5: give 0 for the likeliest token, or above"),
        ({"temperature": INF}, "temperature of row 0 is inf: give"),
        ({"temperature": [math.nan, 1.0]}, "temperature of row 0 is nan: give"),
        ({"top_k": [5, -1]}, "top_k of row 1 is -1: give a whole number of tokens, 0 for all"),
        ({"top_k": 2.5}, "top_k of row 0 is 2.5: give a whole number"),
        ({"top_k": 2**31}, "top_k of row 0 is 2147483648: give"),
        ({"top_p": [0.0, 1.0]}, "top_p of row 0 is 0.0: give a probability above 0 and up to 1, 1 for all tokens"),
        ({"top_p": 1.01}, "top_p of row 0 is 1.01: give"),
        ({"min_p": [0.0, -0.1]}, "min_p of row 1 is -0.1: give a share from 0 to 1, 0 for all tokens"),
        ({"min_p": 1.5}, "min_p of row 0 is 1.5: give"),
        ({"seed": -1}, "seed of row 0 is -1: give a whole number from 0 to 2**63 - 1"),
        ({"seed": 2**63 - 1}, "seed of row 1 is 9223372036854775808: give"),
        ({"seed": 0.5}, "seed of row 0 is 0.5: give"),
        ({"top_p": [0.5]}, "1 values of top_p for 2 rows: give one number, or one for each row"),
        ({"seed": [1, 2, 3]}, "3 values of seed for 2 rows: give"),
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        sampling.settings(2, **given)
    assert message in str(raised.value)


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
