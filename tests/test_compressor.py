"""compressor.py: pooled latents and the layout of slots in packed rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsflash_jax.compressor import compress, slots

EPS = 1e-20
WIDTH = 24  # of the packed rows below: one compiled layout a ratio
laid_out = jax.jit(slots, static_argnums=2)
pooled = jax.jit(compress, static_argnums=(3, 4))


def row(lengths, width):
    """segments and positions [1, width] of documents laid from the left."""
    segments, positions = np.zeros((2, 1, width), np.int32)
    start = 0
    for number, length in enumerate(lengths, start=1):
        segments[0, start : start + length] = number
        positions[0, start : start + length] = np.arange(length)
        start += length
    return jnp.asarray(segments), jnp.asarray(positions)


def reference_weights(g):
    """The recorded [out, in] matrices in our [in, out] layout."""
    return {"norm": jnp.asarray(g["norm_weight"])} | {
        name: jnp.asarray(g[name].T) for name in ("wkv", "wgate") if name in g.files
    }


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8).filter(lambda n: sum(n) <= WIDTH),
    ratio=st.sampled_from([1, 2, 3, 4]),
)
def test_layout_lists_every_whole_group_of_every_document(lengths, ratio):
    at = jax.tree.map(lambda a: np.asarray(a)[0], laid_out(*row(lengths, WIDTH), ratio))
    start, found = 0, set()
    for number, length in enumerate(lengths, start=1):
        for group in range(length // ratio):
            first = start + group * ratio
            slot = first // ratio
            found.add(slot)
            assert at.segments[slot] == number and at.positions[slot] == group
            assert slot * ratio + at.shift[slot] == first
        for position in range(length):
            visible = at.visible[start + position]
            assert visible == (position + 1) // ratio
            seen = range(at.base[start + position], at.base[start + position] + visible)
            assert [at.positions[s] for s in seen] == list(range(visible))
            assert all(at.segments[s] == number for s in seen)
        start += length
    assert all(at.segments[s] == 0 for s in set(range(WIDTH // ratio)) - found)
    assert (at.visible[start:] == 0).all()


@pytest.mark.parametrize("lengths", [[5, 6], [4, 7], [1, 1, 3, 6], [11]])
def test_packed_latents_equal_those_of_each_document_alone(golden, lengths):
    g = np.load(golden / "ops" / "compressor_ratio2.npz")
    w, x = reference_weights(g), jnp.asarray(g["x"][:1])
    at = laid_out(*row(lengths, 11), 2)
    got = pooled(w, x, at, 2, EPS)[0]
    start = 0
    for number, length in enumerate(lengths, start=1):
        if length >= 2:
            moved = jnp.roll(x, -start, axis=1)  # the document at the start of the row, padding behind it
            alone = pooled(w, moved, laid_out(*row([length], 11), 2), 2, EPS)[0, : length // 2]
            mine = got[np.asarray(at.segments[0]) == number]
            np.testing.assert_allclose(mine, alone, atol=1e-6)  # the same sums, perhaps in another order
        start += length


def test_visible_groups_are_whole_ones():
    at = slots(*row([7], 7), 2)
    np.testing.assert_array_equal(at.visible[0], [0, 1, 1, 2, 2, 3, 3])


def test_third_group_of_ratio_2_starts_at_token_6():
    at = slots(*row([8], 8), 2)
    assert int(at.positions[0, 3]) * 2 == 6  # rotated there: a group takes the position of its first token


@pytest.mark.parametrize(("width", "ratio"), [(1, 2), (2, 4)])
def test_a_row_shorter_than_a_group_has_no_slot(width, ratio):
    at = slots(*row([width], width), ratio)
    assert at.segments.shape == (1, 0)
    np.testing.assert_array_equal(at.visible, np.zeros((1, width)))
