"""sampling.py: filters against a plain oracle, draws against the law they must follow, settings that are refused."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from jax import Array
from scipy import stats

from dsflash_jax import sampling
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


def at_zero(s: Settings) -> Array:
    """Every row's plain key at position 0."""
    return sampling.at(s, jnp.zeros(s.key.shape, jnp.int32), PLAIN)


draw = strict(lambda logp, s: sampling.draw(logp, at_zero(s)))


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


# Rows


def test_the_filters_of_other_rows_change_nothing() -> None:
    # Alone, these rows need no sorting; with a neighbour of top-k they take part in it.
    logits = jax.random.normal(jax.random.key(1), (8, 3, SIZE), jnp.float32)
    off = sampling.settings(8, temperature=[0.0, 0.8] * 4, min_p=[0.0, 0.001] * 4)
    on = off.replace(top_k=off.top_k.at[7].set(2))
    got, want = (np.asarray(distribution(logits, s)) for s in (on, off))
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
