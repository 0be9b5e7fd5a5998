"""sample.py: greedy and random continuation by full forward passes."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from dsflash_jax import model
from dsflash_jax.flow import Setup
from dsflash_jax.sample import continue_ids

C = dataclasses.replace(tiny.T, hc_mult=2, eos_token_id=39).with_modes("S F2")
PROMPT = np.array([5, 9, 3, 7], np.int32)
COUNT = 6
KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def w():
    return tiny.weights(C)


def greedy(c, w):
    return continue_ids(Setup(c, tiny.STRICT), w, PROMPT, COUNT, 0.0, KEY)


@pytest.fixture(scope="module")
def continued(w):
    return greedy(C, w)


def test_greedy_takes_the_argmax_of_each_full_forward(w, continued):
    @tiny.jit
    def best(w, batch):
        y, _ = model.forward(Setup(C, tiny.STRICT), w, batch)
        return model.logits(w["head"], y).argmax(axis=-1)

    ids = list(PROMPT)
    width = len(PROMPT) + COUNT
    for _ in range(COUNT):
        row = np.zeros((1, width), np.int32)
        row[0, : len(ids)] = ids
        ids.append(int(best(w, tiny.batch(C, row, [[len(ids)]]))[0, len(ids) - 1]))
    assert len(set(ids[len(PROMPT) :])) > 1
    np.testing.assert_array_equal(continued, ids[len(PROMPT) :])


def test_a_continuation_ends_before_end_of_sequence(w, continued):
    last = int(continued[3])
    first = list(continued).index(last)
    np.testing.assert_array_equal(greedy(dataclasses.replace(C, eos_token_id=last), w), continued[:first])


def test_low_temperature_is_greedy_and_high_temperature_follows_the_key(w, continued):
    draw = lambda temperature, seed: continue_ids(  # noqa: E731
        Setup(C, tiny.STRICT), w, PROMPT, COUNT, temperature, jax.random.key(seed)
    )
    np.testing.assert_array_equal(draw(1e-4, 1), continued)
    first, again, other = draw(5.0, 1), draw(5.0, 1), draw(5.0, 2)
    np.testing.assert_array_equal(first, again)
    assert list(first) != list(other)


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        ([], 1, "the prompt is empty"),
        ([40], 1, r"must lie in 0\.\.39, got 40\.\.40"),
        ([-1, 3], 1, r"must lie in 0\.\.39, got -1\.\.3"),
        ([1, 2], 4095, "exceed max_position_embeddings=4096"),
    ],
)
def test_what_cannot_be_continued_is_refused(w, prompt, count, message):
    with pytest.raises(ValueError, match=message):
        continue_ids(Setup(C, tiny.STRICT), w, np.array(prompt, np.int32), count, 0.0, KEY)
