"""engram.py: the released hash in exact numbers, and the device path against the host path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import engram
from dsflash_jax.config import Config

IDS = np.asarray([[99091, 5, 70000, 1, 12345]], np.int64)
PAD = 2
HEADS = 8
LAYER_1, LAYER_14 = 0, 1  # indices of the tables
TINY = ("tiny_engram", "tiny_full", "tiny_grads")

Hash = Callable[..., np.ndarray]


@pytest.fixture(scope="module")
def released() -> engram.Layout:
    return engram.layout(Config.from_json(Path(__file__).parent / "golden" / "config.released.json"))


def device(
    compressed: np.ndarray,
    positions: np.ndarray,
    at: engram.Layout,
    pad: int,
    image: np.ndarray | None = None,
    history: np.ndarray | None = None,
) -> np.ndarray:
    """`rows_device` in one compiled program, from and to NumPy, under strict promotion."""
    run = jax.jit(lambda c, p, i, h: engram.rows_device(c, p, at, pad, i, h))
    with jax.numpy_dtype_promotion("strict"):
        out = run(
            jnp.asarray(compressed, jnp.int32),
            jnp.asarray(positions, jnp.int32),
            None if image is None else jnp.asarray(image),
            None if history is None else jnp.asarray(history),
        )
    assert out.dtype == jnp.int32
    return np.asarray(out)


both = pytest.mark.parametrize("hash_rows", [engram.rows, device], ids=["host", "device"])


def count(compressed: np.ndarray) -> np.ndarray:
    """Positions of rows that hold one document each."""
    return np.broadcast_to(np.arange(compressed.shape[1]), compressed.shape)


@dataclass(frozen=True)
class Packed:
    """Rows of several documents with image spans."""

    compressed: np.ndarray
    positions: np.ndarray
    image: np.ndarray


def packed(seed: int, classes: int, shape: tuple[int, int] = (3, 40)) -> Packed:
    """Documents of one to nine tokens, so that look-backs end everywhere, and a quarter of image tokens."""
    rng = np.random.default_rng(seed)
    starts = rng.random(shape) < 0.2
    starts[:, 0] = True
    places = np.broadcast_to(np.arange(shape[1]), shape)
    positions = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return Packed(rng.integers(0, classes, shape), positions, rng.random(shape) < 0.25)


def test_the_test_runs_without_64_bit_integers() -> None:
    assert not jax.config.jax_enable_x64
    assert jnp.arange(3).dtype == jnp.int32


def test_released_primes_rows_and_multipliers(released: engram.Layout) -> None:
    assert released.primes.sum(axis=(1, 2)).tolist() == [384006168, 384016682]
    assert released.primes[:, 0, 0].tolist() == [16000057, 16000477]
    assert released.multipliers[LAYER_1].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]


def test_layout_is_the_references(golden: Path, released: engram.Layout) -> None:
    layouts = [(released, np.load(golden / "ops" / "engram_hash_released.npz"), "")]
    for name in TINY:
        at = engram.layout(Config.from_json(golden / name / "config.json"))
        layouts.append((at, np.load(golden / name / "inputs.npz"), "engram_"))
    for at, want, prefix in layouts:
        for field in ("primes", "offsets", "multipliers"):
            np.testing.assert_array_equal(getattr(at, field), want[prefix + field])


@both
def test_released_rows_of_five_tokens(hash_rows: Hash, released: engram.Layout) -> None:
    rows = hash_rows(IDS, count(IDS), released, PAD)[0]
    assert rows[0, LAYER_1, ::HEADS].tolist() == [2008568, 134138602, 264495124]
    assert rows[4, LAYER_1, ::HEADS].tolist() == [6677170, 139694517, 258766920]
    assert rows[0, LAYER_14, [0, -1]].tolist() == [10569928, 372021888]
    assert rows[3, LAYER_1, 0] == 13714826


@both
def test_an_image_ends_the_look_back_for_good(hash_rows: Hash, released: engram.Layout) -> None:
    image = np.asarray([[False, False, True, False, False]])
    rows = hash_rows(IDS, count(IDS), released, PAD, image)[0]
    assert (rows[3, LAYER_1, 0], rows[3, LAYER_1, 2 * HEADS]) == (12185977, 263874986)
    all_pad = hash_rows(np.full((1, 1), PAD), np.zeros((1, 1), int), released, PAD)[0]
    np.testing.assert_array_equal(rows[2], all_pad[0])


@both
def test_a_packed_document_hashes_as_alone(hash_rows: Hash, released: engram.Layout) -> None:
    alone = hash_rows(np.asarray([[5, 7]]), np.asarray([[0, 1]]), released, PAD)
    assert alone[0, :, LAYER_1, 0].tolist() == [5412672, 1465117]
    after = hash_rows(np.asarray([[99091, 12, 3, 5, 7]]), np.asarray([[0, 1, 2, 0, 1]]), released, PAD)
    np.testing.assert_array_equal(after[:, 3:], alone)


@both
def test_a_row_that_starts_inside_a_document_sees_pad_before_it(hash_rows: Hash, released: engram.Layout) -> None:
    late = hash_rows(IDS, count(IDS) + 7, released, PAD)
    np.testing.assert_array_equal(late, hash_rows(IDS, count(IDS), released, PAD))


def test_a_product_narrowed_to_32_bits_gives_another_row(released: engram.Layout) -> None:
    with np.errstate(over="ignore"):
        factors = released.multipliers[LAYER_1, :2].astype(np.int32)
        mixed = (np.int32(IDS[0, 0]) * factors[0]) ^ (np.int32(PAD) * factors[1])
    narrowed = int(mixed % np.int32(released.primes[LAYER_1, 0, 0]))
    assert narrowed == 3870767
    assert device(IDS, count(IDS), released, PAD)[0, 0, LAYER_1, 0] == 2008568


@pytest.mark.parametrize("name", TINY)
def test_device_rows_of_packed_documents_and_images_are_the_hosts(name: str, golden: Path) -> None:
    c = Config.from_json(golden / name / "config.json")
    at, pad = engram.layout(c), int(np.load(golden / name / "inputs.npz")["engram_pad_compressed"])
    x = packed(len(name), c.engram_compressed_vocab_size)
    want = engram.rows(x.compressed, x.positions, at, pad, x.image)
    np.testing.assert_array_equal(device(x.compressed, x.positions, at, pad, x.image), want)


def test_device_rows_of_the_released_layout_are_the_hosts(released: engram.Layout) -> None:
    x = packed(7, 99092, (4, 400))
    want = engram.rows(x.compressed, x.positions, released, PAD, x.image)
    np.testing.assert_array_equal(device(x.compressed, x.positions, released, PAD, x.image), want)
    want = engram.rows(x.compressed, x.positions, released, PAD)
    np.testing.assert_array_equal(device(x.compressed, x.positions, released, PAD), want)


@pytest.mark.parametrize("prime", [2, 3, 65537, 16777213, 16777259, 1073741827, 2147483647])
def test_device_hash_is_exact_for_every_width_of_prime(prime: int) -> None:
    rng = np.random.default_rng(prime)
    longest = 2**31 - 1  # the largest compressed id; with multipliers below 2^32 a product stays below 2^63
    multipliers = np.asarray([[2**32 - 1, int(rng.integers(2**31, 2**32)) | 1]], np.int64)
    at = engram.Layout(np.asarray([[[prime]]], np.int64), np.zeros((1, 1), np.int64), multipliers)
    ids = rng.integers(0, longest, (2, 200))
    ids[0, :4] = [longest, 0, 1, longest]
    np.testing.assert_array_equal(device(ids, count(ids), at, PAD), engram.rows(ids, count(ids), at, PAD))


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (17, 18, 30), tuple(range(1, 40))], ids=str)
def test_chunks_with_a_history_hash_as_the_whole_row(cuts: tuple[int, ...], golden: Path) -> None:
    c = Config.from_json(golden / "tiny_engram" / "config.json")
    at = engram.layout(c)
    x = packed(11, c.engram_compressed_vocab_size)
    step = jax.jit(
        lambda ids, places, image, history: (
            engram.rows_device(ids, places, at, PAD, image, history),
            engram.remember(ids, at, image, history),
        )
    )
    history, got = None, []
    for part in np.split(np.arange(x.compressed.shape[1]), cuts):
        chunk = [jnp.asarray(a[:, part]) for a in (x.compressed.astype(np.int32), x.positions, x.image)]
        rows, history = step(*chunk, history)
        got.append(np.asarray(rows))
    want = engram.rows(x.compressed, x.positions, at, PAD, x.image)
    np.testing.assert_array_equal(np.concatenate(got, axis=1), want)


def test_history_holds_the_newest_ids_and_marks_what_ends_a_look_back(released: engram.Layout) -> None:
    ids = jnp.asarray([[4, 0]], jnp.int32)
    first = engram.remember(ids, released)
    assert first.tolist() == [[engram.DEAD, 4, 0]] and first.dtype == jnp.int32
    second = engram.remember(ids + 5, released, jnp.asarray([[False, True]]), first)
    assert second.tolist() == [[0, 9, engram.DEAD]]


def test_a_history_of_another_length_is_refused(released: engram.Layout) -> None:
    ids = jnp.asarray(IDS, jnp.int32)
    with pytest.raises(ValueError, match="history holds 2 tokens, but n-grams up to 4 look back 3"):
        engram.remember(ids, released, None, jnp.zeros((1, 2), jnp.int32))


def test_device_rows_vmap(released: engram.Layout) -> None:
    x = packed(3, 99092, (4, 12))
    run = jax.jit(jax.vmap(lambda c, p, i: engram.rows_device(c, p, released, PAD, i)))
    parts = [jnp.asarray(a.reshape(2, 2, 12)) for a in (x.compressed.astype(np.int32), x.positions, x.image)]
    want = engram.rows(x.compressed, x.positions, released, PAD, x.image)
    np.testing.assert_array_equal(np.asarray(run(*parts)).reshape(want.shape), want)
