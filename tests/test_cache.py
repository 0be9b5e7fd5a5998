"""cache.py: bytes, views, growth, and what a commit keeps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import cache, costs
from dsflash_jax.config import Compute, Config, Quantize
from dsflash_jax.flow import Setup

ON = Quantize(kv_fp4=True, index_fp4=True, window_fp8=True, linear_fp8=True)
BOOKKEEPING = ("length", "origin", "stored")


def size(tree: object) -> int:
    """Bytes of all arrays."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("tokens", [4096, 65536, 1048576, 4097])
def test_released_bytes_are_890_a_token_and_the_constants(golden: Path, tokens):
    c = Config.from_json(golden / "config.released.json")
    setup = Setup(c, Compute(), quantize=ON, taps=True)
    made = jax.eval_shape(lambda: cache.empty(setup, 1, tokens))
    kinds = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.metadata.get("pytree_node", True)}
    bookkeeping = {name: kinds.pop(name) for name in BOOKKEEPING}
    slots = 3 * (tokens // 2) + tokens
    assert size(kinds["kv"]) == slots * 288 and size(kinds["index"]) == slots * 68
    assert size(kinds["window"]) == 40 * 128 * 528 and size(kinds["draft"]) == 3 * 128 * 528
    assert size(kinds["tails"]) == 3 * 4096 and size(kinds["history"]) == 3 * 4
    constants = 43 * 128 * 528 + 3 * 4096 + 12
    assert size(kinds) == costs.sequence_bytes(c, tokens) == slots * 356 + constants
    if tokens % 2 == 0:
        assert size(kinds) == 890 * tokens + constants
    assert size(bookkeeping) == 4 * 4  # length, origin, and the stored slots of two ratios


def test_numbers_are_kept_where_nothing_is_rounded_or_packing_is_off(golden: Path):
    c = Config.from_json(golden / "config.released.json")
    plain = jax.eval_shape(lambda: cache.empty(Setup(c, Compute()), 2, 64))
    assert plain.kv[2].shape == (2, 3, 32, 512) and plain.kv[2].dtype == jnp.bfloat16 and plain.draft is None
    loose = jax.eval_shape(lambda: cache.empty(Setup(c, Compute(), quantize=ON), 2, 64, packed=False))
    assert loose.index[1].shape == (2, 1, 64, 128) and loose.window.shape == (2, 40, 128, 512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, "at least one row and one token, got rows=0"),
        ({"capacity": 0}, "got rows=1 and capacity=0"),
        ({"setup": Setup(tiny.with_modes("F8 U"), tiny.STRICT)}, "sliding_window=4 must reach the pending tokens"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        cache.empty(**({"setup": Setup(tiny.T, tiny.STRICT), "rows": 1, "capacity": 8} | change))


def test_a_cache_does_not_shrink():
    with pytest.raises(ValueError, match="a cache for 8 tokens a row cannot shrink to 4"):
        cache.grow(cache.empty(Setup(tiny.T, tiny.STRICT), 1, 8), 4)


def test_layers_read_the_source_of_their_ratio_and_unit():
    assert cache.numbers(tiny.with_modes("S F2 U F1 X F2 U S F1 U").table) == (0, 0, 0, 0, 0, 1, 1, 0, 1, 1)
    assert cache.sources(tiny.with_modes("F2 F1 F2 U F4")) == {1: 1, 2: 2, 4: 1}


def test_a_ring_gives_its_positions_in_order_from_the_origin_on():
    setup = Setup(tiny.with_modes("S"), tiny.STRICT)  # window 4
    made = cache.empty(setup, 3, 8)
    ring = jnp.broadcast_to(jnp.asarray([[8, 9, 6, 7]], jnp.float32)[:, None, :, None], made.window.shape)  # at 10
    at = lambda *n: jnp.asarray(n, jnp.int32)  # noqa: E731
    made = dataclasses.replace(made, window=ring, length=at(10, 10, 0), origin=at(0, 8, 0))
    past, there = made.past(0)
    np.testing.assert_array_equal(past[:2, :, 0], [[7, 8, 9]] * 2)
    np.testing.assert_array_equal(there, [[1, 1, 1], [0, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(made.filled(), [[True] * 4, [True, True, False, False], [False] * 4])
