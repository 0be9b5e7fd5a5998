"""Images on the host: preprocessing into patches, the spans that images are in a sequence, and batches of them.

An image is cut into patches, and a square of patches is a cell. In the sequence an image is a span: START, then per row
of cells its IMAGE tokens and a NEWLINE, then END. Source: architecture section 12. P patches, Q values of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from flax import struct

from dsflash_jax.config import Config

CHANNELS = 3  # red, green, blue
GREY = 127  # border of an image whose shape is not its patch grid's
TEXT, START, IMAGE, NEWLINE, END = -1, 0, 1, 2, 3  # what a token is
CUBIC = -0.5  # slope of the cubic kernel at distance 1
CUBIC_REACH = 2.0  # its half width in pixels
FIXED_POINT = 22  # fraction bits of a resampling coefficient


@struct.dataclass
class Images:
    """The images of a batch, `collate` makes it. A slot whose grid is (0, 0) is empty.

    Each row has its own slots, so the batch can be cut or sharded along B like every other field of it.
    """

    patches: Any  # float [B, N, P, Q]: row-major in the image's own grid, zeros behind; Q = channel, row, column
    grid: Any  # int [B, N, 2]: rows and columns of patches
    start: Any  # int [B, N]: index in the row of the span's START


# An image to patches.


def target_size(height: int, width: int, c: Config) -> tuple[int, int]:
    """Height and width in pixels, multiples of the patch size, that an image is fitted into.

    Small images grow to `min_pixels`, sides are rounded up, and what would cost more than `max_image_tokens` shrinks
    to the largest size of its shape that fits: one column or one row of cells for the most extreme shapes.
    """
    v, budget = c.tower, c.tower.max_image_tokens
    p, cell = v.patch_size, v.patch_size * v.downsample_ratio
    if min(height, width) < 1:
        raise ValueError(f"an image has at least 1 x 1 pixels, got {height} x {width}")
    h, w = float(height), float(width)
    if v.max_wh_ratio is not None:
        w = min(w, h * v.max_wh_ratio)
    if h * w < v.min_pixels:
        scale = (v.min_pixels / (h * w)) ** 0.5
        h, w = (float(max(int(side * scale), 1)) for side in (h, w))
    fitted = math.ceil(h / p) * p, math.ceil(w / p) * p
    if span_length((fitted[0] // p, fitted[1] // p), c) <= budget:
        return fitted
    shape = h / w
    columns = math.sqrt((budget - 2) / shape + 0.25) - 0.5  # solves columns * shape * (columns + 1) = budget - 2
    rows = columns * shape
    if columns < 1:
        return (budget - 2) // 2 * cell, cell
    if rows < 1:
        return cell, (budget - 3) * cell
    scale = min(math.floor(columns) * cell / w, math.floor(rows) * cell / h)
    # With downsample_ratio 1 the published rule can leave a side without a patch; one patch fits the budget then.
    return max(math.floor(h * scale / p), 1) * p, max(math.floor(w * scale / p), 1) * p


def preprocess(image: np.ndarray, c: Config) -> tuple[np.ndarray, tuple[int, int]]:
    """uint8 RGB [height, width, 3] to bfloat16 patches [P, Q] in -1 .. 1 and their grid (rows, columns).

    The image keeps its shape and is centred on grey; only where `max_wh_ratio` clamps is it stretched.
    """
    if image.ndim != 3 or image.shape[2] != CHANNELS or image.dtype != np.uint8:
        raise ValueError(f"an image is uint8 [height, width, {CHANNELS}], got {image.dtype} {list(image.shape)}")
    v = c.tower
    height, width = image.shape[:2]
    tall, wide = target_size(height, width, c)
    stretched = v.max_wh_ratio is not None and width >= v.max_wh_ratio * height
    pixels = resize(image, tall, wide) if stretched else _fit(image, tall, wide)
    x = (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)
    p = v.patch_size
    grid = tall // p, wide // p
    cut = x.reshape(grid[0], p, grid[1], p, CHANNELS).transpose(0, 2, 4, 1, 3)
    return cut.reshape(grid[0] * grid[1], -1).astype(ml_dtypes.bfloat16), grid


def _fit(image: np.ndarray, tall: int, wide: int) -> np.ndarray:
    """The image as large as it fits into the target without changing its shape, centred on grey."""
    height, width = image.shape[:2]
    new = tall, wide
    if width / height > wide / tall:
        new = max(round(height / width * wide), 1), wide
    elif width / height < wide / tall:
        new = tall, max(round(width / height * tall), 1)
    out = np.full((tall, wide, CHANNELS), GREY, np.uint8)
    top, left = round((tall - new[0]) * 0.5), round((wide - new[1]) * 0.5)
    out[top : top + new[0], left : left + new[1]] = resize(image, *new)
    return out


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Antialiased bicubic resampling of uint8 [h, w, channels], widths first, each pass rounded to uint8.

    Bit for bit what Pillow's `Image.resize` gives, which the published preprocessing calls.
    """
    for axis, size in ((1, width), (0, height)):
        if image.shape[axis] != size:
            image = _resample(image, axis, size)
    return image


def _resample(image: np.ndarray, axis: int, size: int) -> np.ndarray:
    length = image.shape[axis]
    scale = length / size
    stretch = max(scale, 1.0)  # shrinking widens the kernel, so that every pixel counts
    centre = (np.arange(size) + 0.5) * scale
    low = np.maximum((centre - CUBIC_REACH * stretch + 0.5).astype(np.int64), 0)
    high = np.minimum((centre + CUBIC_REACH * stretch + 0.5).astype(np.int64), length)
    taps = low[:, None] + np.arange((high - low).max())
    x = np.abs((taps - centre[:, None] + 0.5) * (1.0 / stretch))
    near = ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * CUBIC
    kernel = np.where(x < 1.0, near, np.where(x < CUBIC_REACH, far, 0.0)) * (taps < high[:, None])
    kernel /= np.cumsum(kernel, axis=1)[:, -1:]  # a running sum: pairwise addition would round otherwise
    fixed = np.trunc(kernel * 2**FIXED_POINT + np.copysign(0.5, kernel)).astype(np.int32)
    taps = np.minimum(taps, length - 1)
    shape = (size, 1, 1) if axis == 0 else (1, size, 1)
    source = image.astype(np.int32)
    total = np.full(1, 1 << (FIXED_POINT - 1), np.int32)  # a half: the shift below rounds to nearest
    for k in range(taps.shape[1]):
        total = total + source.take(taps[:, k], axis) * fixed[:, k].reshape(shape)
    return np.clip(total >> FIXED_POINT, 0, 255).astype(np.uint8)


# Spans and batches.


def cells(grid: tuple[int, int], c: Config) -> tuple[int, int]:
    """Rows and columns of cells of a patch grid; the last ones may be partly empty."""
    ratio = c.tower.downsample_ratio
    return -(-grid[0] // ratio), -(-grid[1] // ratio)


def span_length(grid: tuple[int, int], c: Config) -> int:
    """Tokens of the span of an image with this patch grid."""
    rows, columns = cells(grid, c)
    return rows * (columns + 1) + 2


def span_types(grid: tuple[int, int], c: Config) -> np.ndarray:
    """What each token of a span is, int8; every one of them has the id `image_token_id`."""
    rows, columns = cells(grid, c)
    return np.asarray([START, *([IMAGE] * columns + [NEWLINE]) * rows, END], np.int8)


def collate(
    rows: Sequence[Sequence[tuple[int, np.ndarray, tuple[int, int]]]], c: Config, length: int, slots: int, patches: int
) -> Images:
    """Arrays of fixed size from each row's images, given as (index of START, patches [P, Q], patch grid).

    length: tokens of a row; slots: images a row has room for; patches: patches an image has room for. Raises
    ValueError when something does not fit, or when spans leave the row or overlap.
    """
    width = CHANNELS * c.tower.patch_size**2
    out = np.zeros((len(rows), slots, patches, width), ml_dtypes.bfloat16)
    grids, starts = np.zeros((len(rows), slots, 2), np.int32), np.zeros((len(rows), slots), np.int32)
    for b, row in enumerate(rows):
        if len(row) > slots:
            raise ValueError(f"row {b} has {len(row)} images, room is for {slots}: raise slots or pack fewer")
        free = 0
        for n, (start, cut, grid) in enumerate(sorted(row, key=lambda image: image[0])):
            where, count, end = f"row {b}, image {n}", grid[0] * grid[1], start + span_length(grid, c)
            if cut.shape != (count, width) or count < 1:
                raise ValueError(f"{where}: grid {grid} needs patches [{count}, {width}], got {list(cut.shape)}")
            if count > patches:
                raise ValueError(f"{where} has {count} patches, room is for {patches}: raise patches or shrink it")
            if start < free or end > length:
                raise ValueError(f"{where}: span {start}..{end} must lie in {free}..{length}, behind the one before")
            out[b, n, :count], grids[b, n], starts[b, n], free = cut, grid, start, end
    return Images(out, grids, starts)


def check_spans(rows: Sequence[np.ndarray], images: Images | None, c: Config) -> None:
    """Raise ValueError unless the image ids in rows of ids are those of the images' spans, each of them whole."""
    if images is None and c.vision is None:
        return
    _ = c.tower  # raises without one
    if images is not None and len(images.grid) != len(rows):
        raise ValueError(f"images of {len(images.grid)} rows for {len(rows)} rows of ids: give those of every row")
    for b, row in enumerate(rows):
        span = np.zeros(len(row), bool)
        own = [] if images is None else np.concatenate([images.grid[b], images.start[b][:, None]], axis=1).tolist()
        for *grid, start in own:
            if not any(grid):
                continue
            end = start + span_length((grid[0], grid[1]), c)
            if not 0 <= start <= end <= len(row):
                raise ValueError(
                    f"the span {start}..{end} of an image of row {b} must lie in its {len(row)} ids, whole"
                )
            span[start:end] = True
        wrong = np.flatnonzero(span != (np.asarray(row) == c.image_token_id))
        if len(wrong):
            held = "in" if span[wrong[0]] else "outside"
            raise ValueError(
                f"id {row[wrong[0]]} of row {b} at index {wrong[0]} is {held} the span of an image: image_token_id="
                f"{c.image_token_id} stands in spans and nowhere else, so give the prompt with its images"
            )
