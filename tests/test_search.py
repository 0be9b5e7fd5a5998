"""search.py: selection over a cache against selection over whole rows of keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import indexer, search
from dsflash_jax.cache import Form, Source

B, T, HEADS, WIDTH, SLOTS, ROOM = 3, 5, 2, 4, 40, 48
VISIBLE = np.array([[0, 1, 2, 2, 3], [17, 18, 18, 19, 20], [36, 37, 38, 39, 40]], np.int32)
STORED = np.array([0, 15, 36], np.int32)
FORM = Form(WIDTH, None, False, "float32")


def questions(seed: int, ties: bool = False) -> tuple[jax.Array, jax.Array, np.ndarray]:
    """Queries, weights, and the keys of every slot; with ties, scores are small whole numbers."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.integers(-1, 2, shape) if ties else rng.standard_normal(shape)  # noqa: E731
    made = draw(B, T, HEADS, WIDTH), draw(B, T, HEADS), draw(B, SLOTS, WIDTH)
    return jnp.asarray(made[0], jnp.float32), jnp.asarray(made[1], jnp.float32), made[2].astype(np.float32)


def view(keys: np.ndarray, first: int = 2) -> Source:
    """The keys as a cache and a piece hold them: source 1 of 2, slots from STORED on are in the piece alone.

    The piece begins `first` slots earlier, where it has other values that must not be read; nor must what the cache
    holds behind the stored slots.
    """
    held = np.full((B, 2, ROOM, WIDTH), 50.0, np.float32)
    new = np.full((B, SLOTS + first, WIDTH), -50.0, np.float32)
    for row, stored in enumerate(STORED):
        held[row, 1, :stored] = keys[row, :stored]
        new[row, first : first + SLOTS - stored] = keys[row, stored:]
    as_int = lambda a: jnp.asarray(a, jnp.int32)  # noqa: E731
    return Source(jnp.asarray(held), as_int([1] * B), as_int(STORED), as_int(STORED - first), jnp.asarray(new), FORM)


@pytest.mark.parametrize("block", [48, 16, 2048])
@pytest.mark.parametrize("ties", [False, True])
def test_a_sweep_over_blocks_picks_what_a_whole_row_picks(monkeypatch, block, ties):
    monkeypatch.setattr(search, "BLOCK", block)
    q, w, keys = questions(1, ties)
    args = {"visible": jnp.asarray(VISIBLE), "k": 4, "block": 4, "publish": 3}
    topk, blocks = tiny.jit(lambda *a: search.select(*a, chunk=2, **args))(q, w, view(keys))
    base = jnp.zeros((B, T), jnp.int32)
    want, want_blocks = indexer.select(q, w, jnp.asarray(keys), base, chunk=8, **args)
    np.testing.assert_array_equal(topk, want)
    np.testing.assert_array_equal(blocks, want_blocks)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_candidates_restrict_masked_and_gathered_alike(monkeypatch, gathered, ties):
    monkeypatch.setattr(search, "BLOCK", 16)
    q, w, keys = questions(2, ties)
    candidates = np.full((B, T, 4), -1, np.int32)
    candidates[:, :, :3] = [0, 4, 9]
    candidates[1, :, :2] = [3, -1]
    args = {"visible": jnp.asarray(VISIBLE), "k": 6, "block": 4, "candidates": jnp.asarray(candidates)}
    topk, none = tiny.jit(lambda *a: search.select(*a, chunk=3, gathered=gathered, **args))(q, w, view(keys))
    base = jnp.zeros((B, T), jnp.int32)
    want, _ = indexer.select(q, w, jnp.asarray(keys), base, chunk=8, **args)
    assert none is None
    np.testing.assert_array_equal(topk, want)


def test_more_picks_than_slots_leave_the_rest_absent():
    q, w, keys = questions(3)
    topk, _ = search.select(q, w, view(keys), jnp.asarray(VISIBLE), k=60, chunk=8)
    for row in range(B):
        for t in range(T):
            n = VISIBLE[row, t]
            np.testing.assert_array_equal(topk[row, t], [*range(n), *[-1] * (60 - n)])


def test_a_cache_without_room_for_a_slot_selects_nothing():
    q, w, keys = questions(4)
    source = view(keys)
    source = Source(source.held[:, :, :0], *(getattr(source, f) for f in ("number", "stored", "first", "new", "form")))
    topk, blocks = search.select(q, w, source, jnp.zeros((B, T), jnp.int32), k=2, chunk=8, block=4, publish=2)
    assert topk.shape == (B, T, 2) and blocks.shape == (B, T, 0) and (topk == -1).all()


def test_one_best_key_far_behind_is_found():
    slots, best = 2**20, 1_000_003
    form = Form(2, None, False, "float32")
    held = jnp.full((1, 1, slots, 2), 0.5, jnp.float32).at[0, 0, best].set(1.0)
    at = lambda n: jnp.asarray([n], jnp.int32)  # noqa: E731
    source = Source(held, at(0), at(slots), at(slots), jnp.zeros((1, 1, 2), jnp.float32), form)
    q, w = jnp.ones((1, 1, 1, 2), jnp.float32), jnp.ones((1, 1, 1), jnp.float32)
    topk, blocks = search.select(q, w, source, at(slots)[None], k=2, chunk=8, block=8, publish=2)
    assert topk.tolist() == [[[0, best]]] and blocks.tolist() == [[[best // 8, slots // 8 - 1]]]
