"""parity_decode.py: decode and replay give what the reference recorded, and a cache that is off by one does not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import cache as caches
from dsflash_jax import checkpoint, compressor, parity, parity_decode
from dsflash_jax.cache import Cache
from dsflash_jax.config import Config, Quantize
from dsflash_jax.flow import Setup
from dsflash_jax.parity_decode import Road
from dsflash_jax.verdict import Arrays

AFTER, STEPS = 20, 7  # of tiny_text's trace with buffers
BEHIND_CACHE = ("decode", "replay")
NAMES = {
    "tiny_text": {f"decode_f32_{v}_after{n}" for v in ("noquant", "quant") for n in (11, 20)}
    | {f"replay_{how}" for v in ("noquant", "quant") for how in (f"decoder_f32_{v}", f"encoder_f32_{v}_hit15")}
    | {f"replay_encoder_f32_{v}_hit16" for v in ("noquant", "quant")},
    "tiny_engram": {f"decode_f32_{v}_after17" for v in ("noquant", "quant")},
    "tiny_full": {f"decode_f32_{v}_after18" for v in ("noquant", "quant")},
}
SHIPPED = ["decode_shipped_slot_after20: the reference's literal behaviour, for information"]


pytestmark = pytest.mark.usefixtures("quick")


def arrays(golden: Path, trace: str, name: str = "tiny_text") -> Arrays:
    return dict(np.load(golden / name / f"{trace}.npz"))


def copy(golden: Path, name: str, folder: Path) -> Path:
    """A set with its decode and replay traces alone."""
    for path in (golden / name).glob("*"):
        if path.stem.startswith(BEHIND_CACHE) or path.name in ("config.json", "inputs.npz", "weights.npz"):
            shutil.copy(path, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_array_of_decode_and_replay_agrees(name: str, golden: Path, tmp_path: Path) -> None:
    lines, uncovered = parity.check(copy(golden, name, tmp_path))
    assert [line for line in lines if not line.passed] == []
    assert uncovered == (SHIPPED if name == "tiny_text" else [])
    assert {line.trace for line in lines} == NAMES[name]
    for trace in NAMES[name]:
        recorded = arrays(golden, trace, name).keys() - set(parity_decode.GIVEN)
        assert sorted(line.array for line in lines if line.trace == trace) == sorted(recorded)
    strict = [line for line in lines if "noquant" in line.trace or line.kind == "selection"]
    assert strict and all(line.share == 1 for line in strict)


def road_of(golden: Path, packed: bool = True) -> Road:
    """tiny_text's f32_quant, whose decode trace has buffers."""
    folder = golden / "tiny_text"
    c, tensors = Config.from_json(folder / "config.json"), dict(np.load(folder / "weights.npz"))
    variant = parity.variant_of("decode_f32_quant_after20", tensors)
    assert variant is not None
    w = jax.tree.map(jnp.asarray, checkpoint.adopt(c, tensors))
    return Road(variant.setup(c), w, parity.batch_of(c, dict(np.load(folder / "inputs.npz"))), packed=packed)


@pytest.fixture(scope="module")
def road(golden: Path) -> Road:
    return road_of(golden)


def missed(road: Road, got: Arrays, want: Arrays, total: int) -> set[str]:
    """Names of the arrays that miss with the variant's share."""
    want = parity_decode.meant(road.setup.config, want, total)
    return {
        line.array.split(",")[0] for line in parity.forward_lines("t", got, want, parity.QUANT_SHARE) if not line.passed
    }


def stepped(road: Road, cache: Cache, start: int, steps: int) -> Arrays:
    """Steps behind a prefill of `start` tokens that left this cache."""
    cache, made = road.stepped(cache, start, steps)
    return made | parity_decode.held(road.setup.config, cache)


@pytest.mark.slow
def test_a_cache_of_numbers_gives_the_same_verdict_as_a_packed_one(road: Road, golden: Path) -> None:
    plain, want = road_of(golden, packed=False), arrays(golden, f"decode_f32_quant_after{AFTER}")
    assert isinstance(plain.begin().window, jax.Array) and not isinstance(road.begin().window, jax.Array)
    both = [one.decoded(AFTER, STEPS) for one in (road, plain)]
    assert [missed(road, got, want, AFTER + STEPS) for got in both] == [set(), set()]
    for name in want:
        if name.startswith("cache"):
            np.testing.assert_allclose(*(got[name] for got in both), rtol=0, atol=1e-5)


def turned(cache: Cache) -> Cache:
    return replace(cache, window=jax.tree.map(partial(jnp.roll, shift=1, axis=2), cache.window))


DAMAGES = {
    "a ring turned by one place": (turned, {"L0.h_out", "logits", "cache.L0.window_kv_cache"}),
    "a window shorter by one": (lambda c: replace(c, origin=c.length - 6), {"L0.h_out", "L7.h_out", "logits"}),
    "a slot too many": (
        lambda c: replace(c, stored={r: n + 1 for r, n in c.stored.items()}),
        {"cache.L2.compress_kv_cache", "cache.L5.index_k_cache", "logits"},
    ),
    "a slot too few": (
        lambda c: replace(c, stored={r: n - 1 for r, n in c.stored.items()}),
        {"L6.h_out", "logits"},
    ),
    "a position too late": (lambda c: replace(c, length=c.length + 1), {"L0.h_out", "cache.L0.window_kv_cache"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_cache_that_is_off_by_one_misses(damage: str, road: Road, golden: Path) -> None:
    want = arrays(golden, f"decode_f32_quant_after{AFTER}")
    cache, _ = road.extended(road.begin(), 0, AFTER)
    assert missed(road, stepped(road, cache, AFTER, STEPS), want, AFTER + STEPS) == set()
    change, least = DAMAGES[damage]
    assert least <= missed(road, stepped(road, change(cache), AFTER, STEPS), want, AFTER + STEPS)


@pytest.mark.slow
def test_slots_that_are_seen_one_token_late_miss(road: Road, golden: Path, monkeypatch: Any) -> None:
    right, want = compressor.following, arrays(golden, f"decode_f32_quant_after{AFTER}")

    def late(start: Any, count: Any, length: int, ratio: int) -> compressor.Slots:
        seen = right(start - 1, count, length, ratio).visible
        return replace(right(start, count, length, ratio), visible=seen)

    cache, _ = road.extended(road.begin(), 0, AFTER)
    monkeypatch.setattr(compressor, "following", late)
    names = missed(road, stepped(road_of(golden), cache, AFTER, STEPS), want, AFTER + STEPS)
    assert {"L2.compress_topk_idxs", "L5.compress_topk_idxs", "L6.compress_topk_idxs", "logits"} <= names
    assert not {"L0.h_out", "L1.h_out", "cache.L1.window_kv_cache"} & names


@pytest.mark.slow
def test_a_lost_tail_misses_where_a_group_is_pending(road: Road, golden: Path) -> None:
    want = arrays(golden, "decode_f32_quant_after11")
    cache, _ = road.extended(road.begin(), 0, 11)
    lost = replace(cache, tails={r: 0 * tail for r, tail in cache.tails.items()})
    assert missed(road, stepped(road, cache, 11, 16), want, 27) == set()
    assert missed(road, stepped(road, lost, 11, 16), want, 27) == {"logits"}


@pytest.mark.slow
def test_a_replay_differs_from_a_full_prefill_and_from_one_of_another_hit(road: Road, golden: Path) -> None:
    decoder, encoder = (arrays(golden, f"replay_{n}") for n in ("decoder_f32_quant", "encoder_f32_quant_hit16"))
    whole = road.extended(road.begin(), 0, 22)[1]
    segment = {"segment_logits": decoder["segment_logits"]}
    assert missed(road, {"segment_logits": whole[:, 14:]}, segment, 22) == {"segment_logits"}
    other = road.encoder_replay(15, 22)["suffix_logits"][:, 1:]
    suffix = {"suffix_logits": encoder["suffix_logits"]}
    assert missed(road, {"suffix_logits": other}, suffix, 22) == {"suffix_logits"}


@pytest.fixture(scope="module")
def filled() -> Cache:
    """A cache of two rows, each behind 21 tokens, with random numbers everywhere."""
    cache = caches.empty(Setup(tiny.T, tiny.STRICT, quantize=Quantize()), 2, 24)
    rng = np.random.default_rng(0)
    fill = lambda a: jnp.asarray(rng.standard_normal(a.shape), jnp.float32)  # noqa: E731
    window, kv, index, tails = jax.tree.map(fill, (cache.window, cache.kv, cache.index, cache.tails))
    return caches.advance(replace(cache, window=window, kv=kv, index=index, tails=tails), jnp.full(2, 21, jnp.int32))


def buffers(cache: Cache) -> Arrays:
    """The buffers of the reference at that point: all places, room for more slots, two tokens of a compressor."""
    pending = np.stack([np.asarray(cache.tails[2][:, 0, 0]), np.full((2, 2, 8), 9.0)], axis=1)  # position 20 in place 0
    return {
        "cache.L3.window_kv_cache": np.asarray(cache.window[:, 3]),
        "cache.L2.compress_kv_cache": np.asarray(cache.kv[2][:, 0]),
        "cache.L4.compress_kv_cache": np.asarray(cache.kv[1][:, 0]),
        "cache.L4.index_k_cache": np.asarray(cache.index[1][:, 0]),
        "cache.L2.compressor_kv_state": pending[:, :, 0],
        "cache.L2.compressor_score_state": pending[:, :, 1],
    }


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda c: c, set()),
        (turned, {"cache.L3.window_kv_cache"}),
        (lambda c: replace(c, origin=c.origin + 18), {"cache.L3.window_kv_cache"}),
        (lambda c: replace(c, stored=c.stored | {1: c.stored[1] - 1}),
         {"cache.L4.compress_kv_cache", "cache.L4.index_k_cache"}),
        (lambda c: replace(c, stored=c.stored | {2: c.stored[2] + 1}), {"cache.L2.compress_kv_cache"}),
        (lambda c: replace(c, tails={2: c.tails[2] + 1}),
         {"cache.L2.compressor_kv_state", "cache.L2.compressor_score_state"}),
        (lambda c: replace(c, tails={2: c.tails[2][..., ::-1, :]}),
         {"cache.L2.compressor_kv_state", "cache.L2.compressor_score_state"}),
    ],
    ids=["none", "turned ring", "shorter window", "slot too few", "slot too many", "other tail", "exchanged tail"],
)  # fmt: skip
def test_a_damaged_buffer_is_a_miss(change: Any, names: set[str], filled: Cache) -> None:
    want = parity_decode.meant(tiny.T, buffers(filled), 21)
    lines = parity.forward_lines("t", parity_decode.held(tiny.T, change(filled)), want)
    assert {line.array.split(",")[0] for line in lines if not line.passed} == names


def test_a_ring_that_is_not_full_is_compared_where_there_are_tokens(filled: Cache) -> None:
    short = replace(filled, length=jnp.full(2, 3, jnp.int32))
    recorded = {"cache.L3.window_kv_cache": np.asarray(filled.window[:, 3])}
    want = parity_decode.meant(tiny.T, recorded, 3)
    assert want["cache.L3.window_kv_cache"].shape == (2, 3, 8)
    assert all(line.passed for line in parity.forward_lines("t", parity_decode.held(tiny.T, short), want))


@pytest.mark.parametrize("array", [np.float32(1), np.zeros(2), np.zeros((2, 1, 8)), np.zeros((2, 0, 8))])
def test_recorded_buffers_of_another_form_are_misses(array: Any, filled: Cache) -> None:
    for name in buffers(filled):
        want = parity_decode.meant(tiny.T, {name: np.asarray(array)}, 21)
        (line,) = parity.forward_lines("t", parity_decode.held(tiny.T, filled), want)
        assert not line.passed
