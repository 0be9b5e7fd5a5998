"""pixels.py: preprocessing against Pillow and published sizes, spans, and batches of images."""

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL import ImageOps

from dsflash_jax import pixels
from dsflash_jax.config import Config

GOLDEN = Path(__file__).parent / "golden"
RELEASED = Config.from_json(GOLDEN / "config.released.json")
TINY = Config.from_json(GOLDEN / "tiny_full" / "config.json")


def with_vision(c, **changes):
    return replace(c, vision=replace(c.vision, **changes))


# (width, height): cells as (rows, columns). Made by the published preprocessing with the released settings.
PUBLISHED_CELLS = {
    (1, 1): (13, 13), (2, 3): (16, 11), (13, 14): (14, 13), (28, 14): (10, 19), (543, 544): (13, 13),
    (240, 180): (12, 15), (640, 480): (12, 16), (768, 1024): (25, 19), (1600, 1200): (27, 36), (4096, 4096): (31, 31),
    (1414, 1414): (31, 31), (4, 400): (130, 2), (400, 4): (2, 130), (4200, 100): (3, 100), (100, 4200): (100, 3),
    (10000, 10): (1, 410), (10, 10000): (410, 1), (2653, 1236): (21, 45), (594, 4390): (81, 11), (1444, 1240): (29, 34),
    (839, 2): (1, 266), (34, 1194): (77, 3), (3433, 4380): (35, 27), (4922, 431): (9, 103), (533, 498): (13, 14),
}  # fmt: skip


@pytest.mark.parametrize("size", PUBLISHED_CELLS)
def test_an_image_is_fitted_into_the_cells_that_the_published_preprocessing_gives_it(size):
    tall, wide = pixels.target_size(size[1], size[0], RELEASED)
    assert tall % 14 == wide % 14 == 0
    assert pixels.cells((tall // 14, wide // 14), RELEASED) == PUBLISHED_CELLS[size]


def test_the_most_extreme_shapes_become_one_column_or_one_row():
    assert pixels.target_size(2000, 1, RELEASED) == (511 * 42, 42)
    assert pixels.target_size(1, 20000, RELEASED) == (42, 1021 * 42)


@settings(max_examples=300)
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(4, 40), st.sampled_from([1, 3]), st.booleans())
def test_every_shape_and_budget_gives_at_least_one_cell_within_the_budget(height, width, budget, ratio, small):
    c = with_vision(
        RELEASED, max_image_tokens=budget, downsample_ratio=ratio, min_pixels=1 if small else RELEASED.vision.min_pixels
    )
    tall, wide = pixels.target_size(height, width, c)
    assert tall % 14 == wide % 14 == 0 and min(tall, wide) >= 14
    assert pixels.span_length((tall // 14, wide // 14), c) <= budget


@pytest.mark.parametrize(("width", "height"), [(1, 2000), (2000, 1), (1, 1), (100000, 1)])
def test_an_extreme_image_with_the_smallest_budget_is_one_cell(width, height):
    c = with_vision(RELEASED, max_image_tokens=4)
    patches, grid = pixels.preprocess(np.zeros((height, width, 3), np.uint8), c)
    assert pixels.cells(grid, c) == (1, 1) and patches.shape == (grid[0] * grid[1], 588)


def test_an_image_that_is_none_is_refused():
    image = np.zeros((4, 4, 3), np.uint8)
    with pytest.raises(ValueError, match=r"uint8 \[height, width, 3\], got uint8 \[4, 4, 1\]"):
        pixels.preprocess(image[..., :1], RELEASED)
    with pytest.raises(ValueError, match="got float32"):
        pixels.preprocess(image.astype(np.float32), RELEASED)
    with pytest.raises(ValueError, match="at least 1 x 1 pixels, got 0 x 4"):
        pixels.preprocess(image[:0], RELEASED)


# Matplotlib, which the package needs, brings Pillow.
@pytest.mark.parametrize("target", [(31, 17), (64, 200), (5, 9), (48, 90), (1, 1), (47, 90)])
def test_resizing_is_pillows_to_the_bit(target):
    image = np.random.default_rng(0).integers(0, 256, (48, 90, 3), np.uint8)
    image[:, :40] = np.where(image[:, :40] > 127, 255, 0)  # overshoots of the kernel are clipped
    expected = np.asarray(Pillow.fromarray(image).resize((target[1], target[0]), Pillow.Resampling.BICUBIC))
    np.testing.assert_array_equal(pixels.resize(image, *target), expected)


@pytest.mark.parametrize("shape", [(40, 61), (61, 40), (33, 200), (90, 3), (1, 70), (56, 56)])
def test_patches_are_those_of_pillows_padding(shape):
    c = with_vision(TINY, max_image_tokens=32, min_pixels=900)
    image = np.random.default_rng(1).integers(0, 256, (*shape, 3), np.uint8)
    tall, wide = pixels.target_size(*shape, c)
    padded = np.asarray(ImageOps.pad(Pillow.fromarray(image), (wide, tall), color=(127, 127, 127)), np.float32)
    patches, grid = pixels.preprocess(image, c)
    assert grid == (tall // 4, wide // 4) and patches.dtype == ml_dtypes.bfloat16
    for r in range(grid[0]):
        for s in range(grid[1]):
            block = padded[r * 4 : r * 4 + 4, s * 4 : s * 4 + 4]
            expected = np.moveaxis((block / np.float32(255) - np.float32(0.5)) / np.float32(0.5), 2, 0)
            np.testing.assert_array_equal(patches[r * grid[1] + s], expected.reshape(-1).astype(ml_dtypes.bfloat16))


def test_the_aspect_clamp_bounds_wide_images_only_and_stretches_them():
    c = with_vision(TINY, min_pixels=1, max_image_tokens=1000, max_wh_ratio=2.0)
    assert pixels.target_size(16, 64, c) == (16, 32)
    assert pixels.target_size(64, 16, c) == (64, 16)
    image = np.random.default_rng(2).integers(0, 256, (16, 64, 3), np.uint8)
    patches, _ = pixels.preprocess(image, c)
    stretched = np.asarray(Pillow.fromarray(image).resize((32, 16)), np.float32)
    np.testing.assert_allclose(  # bfloat16 keeps eight bits
        patches[0].reshape(3, 4, 4).astype(np.float32), np.moveaxis(stretched[:4, :4] / 127.5 - 1, 2, 0), atol=2**-8
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([(0, (5, 4)), (7, (1, 1))], r"row 0, image 1: span 7\.\.11 must lie in 8\.\.27"),
        ([(20, (5, 4))], r"span 20\.\.28 must lie in 0\.\.27"),
        ([(0, (1, 1))] * 3, "has 3 images, room is for 2"),
        ([(0, (5, 5))], "has 25 patches, room is for 24"),
        ([(0, (0, 4))], r"grid \(0, 4\) needs patches"),
    ],
)
def test_images_that_do_not_fit_are_refused(row, message):
    images = [(start, np.zeros((grid[0] * grid[1], 48), np.float32), grid) for start, grid in row]
    with pytest.raises(ValueError, match=message):
        pixels.collate([images], TINY, length=27, slots=2, patches=24)
