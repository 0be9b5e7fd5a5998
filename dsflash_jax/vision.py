"""Images: preprocessing on the host, tower, aligner, and the merge of image spans into the embedded tokens.

An image is cut into patches; the tower lets them attend each other; the aligner turns each square of patches (a cell)
into one token's input. In the sequence an image is a span: START, then per row of cells its IMAGE tokens and a
NEWLINE, then END. Source: architecture section 12. I is any number of images, P patches, Q values of a patch,
Dv the tower width, S cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dsflash_jax.attention import chunks, unchunk
from dsflash_jax.config import Compute, Config, VisionConfig
from dsflash_jax.ops import contract, linear, rms_norm, swiglu
from dsflash_jax.params import Weight, Weights, constant, map_weights, norm, normal
from dsflash_jax.rope import Angles
from dsflash_jax.validation import SMALLEST_SPAN

CHANNELS = 3  # red, green, blue
EPS = 1e-6  # of the tower's norms; the language model has its own
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


def weights(c: Config) -> dict[str, Any]:
    """Tower, aligner and delimiter embeddings, under the checkpoint's names; the blocks are stacked for one scan."""
    v, init = _vision(c), normal(c.initializer_range)
    d, f = v.hidden_size, v.intermediate_size
    unit = partial(Weight, init=init, matrix=(0, 2))  # q, k, v and gate, up: separate matrices behind one product

    def affine(weight: Weight, bias_axis: str) -> dict[str, Weight]:
        width = math.prod(weight.shape[1:])
        return {"weight": weight, "bias": Weight((width,), (bias_axis,), constant(0.0), "scalar", bare=True)}

    wqkv = unit((d, 3, d), ("vision", "qkv", "vision_heads"), bare=True)
    block = {
        "norm1": norm(d, "vision"),
        "attn": {
            "wqkv": affine(wqkv, "qkv"),
            "wo": affine(Weight((d, d), ("vision_heads", "vision"), init, bare=True), "vision"),
        },
        "norm2": norm(d, "vision"),
        "mlp": {
            "w1": unit((d, 2, f), ("vision", "gate_up", "vision_width")),
            "w2": Weight((f, d), ("vision_width", "vision"), init),
        },
    }
    cell, width = d * v.downsample_ratio**2, c.hidden_size
    patch = CHANNELS * v.patch_size**2
    delimiter = Weight((width,), ("embed",), init, "scalar", bare=True)
    return {
        "vision": {
            "patch_embed": {"proj": affine(Weight((patch, d), ("patch", "vision"), init, bare=True), "vision")},
            "blocks": map_weights(lambda w: w.stacked(v.num_hidden_layers), block),
            "norm": norm(d, "vision"),
        },
        "aligner": {
            "w1": affine(Weight((cell, width), ("cell", "aligner_width"), init, bare=True), "aligner_width"),
            "w2": affine(Weight((width, width), ("aligner_width", "embed"), init, bare=True), "embed"),
        },
        "image_start": delimiter,
        "image_newline": delimiter,
        "image_end": delimiter,
    }


def _vision(c: Config) -> VisionConfig:
    if c.vision is None:
        raise ValueError("images need an image tower, but the configuration has vision=None: set vision")
    return c.vision


# Host: an image to patches.


def target_size(height: int, width: int, c: Config) -> tuple[int, int]:
    """Height and width in pixels, multiples of the patch size, that an image is fitted into.

    Small images grow to `min_pixels`, sides are rounded up, and what would cost more than `max_image_tokens` shrinks
    to the largest size of its shape that fits: one column or one row of cells for the most extreme shapes.
    """
    v, budget = _vision(c), _vision(c).max_image_tokens
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
    v = _vision(c)
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


# Host: spans and batches.


def cells(grid: tuple[int, int], c: Config) -> tuple[int, int]:
    """Rows and columns of cells of a patch grid; the last ones may be partly empty."""
    ratio = _vision(c).downsample_ratio
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
    width = CHANNELS * _vision(c).patch_size ** 2
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


# Device: tower, aligner, merge.


def encode(
    w: Weights, patches: Float[Array, "I P Q"], grid: Int[Array, "I 2"], c: Config, how: Compute
) -> Float[Array, "I S D"]:
    """Tower and aligner: the input of each IMAGE token in the row-major order of its image's cells, zeros behind.

    Patches behind an image's grid have no influence whatever they hold; images do not see each other. S is the most
    cells that P patches can fill.
    """
    with jax.named_scope("tower"):
        x = tower(w["vision"], patches, grid, c, how)
    with jax.named_scope("aligner"):
        ratio = _vision(c).downsample_ratio
        x = unfold(x, grid, ratio, _most_cells(patches.shape[1], c))
        hidden = jax.nn.gelu(_affine(w["aligner"]["w1"], x).astype(jnp.float32), approximate=False)
        y = _affine(w["aligner"]["w2"], hidden.astype(x.dtype))
    count = jnp.prod(-(-grid // ratio), axis=1)
    return jnp.where((jnp.arange(y.shape[1])[None] < count[:, None])[..., None], y, 0)


def _most_cells(patches: int, c: Config) -> int:
    """A single row or column has the most cells; one row of cells is the longest that the token budget allows."""
    v = _vision(c)
    return min(-(-patches // v.downsample_ratio), v.max_image_tokens - SMALLEST_SPAN + 1)


def tower(
    w: Weights, patches: Float[Array, "I P Q"], grid: Int[Array, "I 2"], c: Config, how: Compute
) -> Float[Array, "I P Dv"]:
    """Patch embedding, blocks and final norm; rows behind an image's grid mean nothing.

    The blocks are one scan. Unless `how.remat` is "none", backward recomputes each from its input.
    """
    v = _vision(c)
    index, columns = jnp.arange(patches.shape[1])[None], jnp.maximum(grid[:, 1:], 1)
    real = index < jnp.prod(grid, axis=1, keepdims=True)  # [I, P]
    at = angles(index // columns, index % columns, v.hidden_size // v.num_attention_heads, v.rope_theta)
    x = _affine(w["patch_embed"]["proj"], jnp.where(real[..., None], patches, 0))
    block: Callable[..., Array] = partial(_block, at=at, real=real, heads=v.num_attention_heads, chunk=how.query_chunk)
    if how.remat != "none":
        block = jax.checkpoint(block)
    x, _ = jax.lax.scan(lambda x, below: (block(below, x), None), x, w["blocks"], unroll=1 if how.scan else True)
    return rms_norm(x, w["norm"], EPS)


def _affine(w: Weights, x: Array) -> Array:
    """x w + bias, accumulated in float32 and cast to x's dtype."""
    y = contract(x, w["weight"])
    shape = (1,) * (x.ndim - 1) + w["weight"].shape[1:]
    return (y + w["bias"].astype(jnp.float32).reshape(shape)).astype(x.dtype)


def _block(w: Weights, x: Array, at: Angles, real: Array, heads: int, chunk: int) -> Array:
    qkv = _affine(w["attn"]["wqkv"], rms_norm(x, w["norm1"], EPS))  # [I, P, 3, Dv]
    q, k, v = jnp.moveaxis(qkv.reshape(*qkv.shape[:3], heads, -1), 2, 0)  # each [I, P, H, Dh]
    o = jax.vmap(partial(_attend, chunk=chunk))(rotate_halves(q, at), rotate_halves(k, at), v, real)
    x = x + _affine(w["attn"]["wo"], o.reshape(x.shape))
    gate, up = jnp.moveaxis(linear(rms_norm(x, w["norm2"], EPS), w["mlp"]["w1"]), 2, 0)
    return x + linear(swiglu(gate, up, 0.0).astype(x.dtype), w["mlp"]["w2"])


def _attend(q: Array, k: Array, v: Array, real: Array, chunk: int) -> Array:
    """Attention among the real patches of one image, [P, H, Dh]; float32 softmax over `chunk` queries at a time."""

    @jax.checkpoint  # else the backward pass of a scan keeps the P x P probabilities
    def step(q: Array) -> Array:
        logits = jnp.einsum("thd,khd->htk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        # Finite, so that an empty slot has a softmax; beside a real key it still gives exactly 0.
        p = jax.nn.softmax(jnp.where(real[None, None], logits, jnp.finfo(jnp.float32).min), axis=-1)
        return jnp.einsum("htk,khd->thd", p.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(v.dtype)

    return unchunk(jax.lax.map(step, chunks(q, min(chunk, q.shape[0]))), q.shape[0])


def angles(rows: Int[Array, "*B"], columns: Int[Array, "*B"], width: int, theta: float) -> Angles:
    """Angles of a head of `width` channels: the first half of the pairs turns with the row, the second with the column.

    Pair i of a half turns by theta^(-4 i / width) radians a patch.
    """
    freq = (float(theta) ** (-np.arange(0, width, 4, dtype=np.float64) / width)).astype(np.float32)
    by = jnp.asarray(freq).reshape((1,) * rows.ndim + (-1,))
    turn = jnp.concatenate([axis.astype(jnp.float32)[..., None] * by for axis in (rows, columns)], axis=-1)
    return Angles(jnp.cos(turn), jnp.sin(turn))


def rotate_halves(x: Float[Array, "*B H Dh"], at: Angles) -> Float[Array, "*B H Dh"]:
    """Turn channel i with channel i + Dh/2, in float32; the language model turns adjacent channels instead."""
    cos, sin = at.cos[..., None, :], at.sin[..., None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def unfold(x: Float[Array, "I P Dv"], grid: Int[Array, "I 2"], ratio: int, count: int) -> Float[Array, "I {count} U"]:
    """The patches of each cell side by side, channel by channel: U index = channel * ratio^2 + row * ratio + column.

    What a cell has outside its image's grid is zero.
    """
    columns = jnp.maximum(-(-grid[:, 1] // ratio), 1)[:, None, None]
    cell, inner = jnp.arange(count)[None, :, None], jnp.arange(ratio**2)[None, None]
    row = cell // columns * ratio + inner // ratio  # [I, count, ratio^2]
    column = cell % columns * ratio + inner % ratio
    tall, wide = grid[:, 0, None, None], grid[:, 1, None, None]
    inside = (row < tall) & (column < wide)
    index = jnp.where(inside, row * wide + column, 0).reshape(x.shape[0], -1)
    read = jnp.take_along_axis(x, index[..., None], axis=1).reshape(*inside.shape, x.shape[2])
    read = jnp.where(inside[..., None], read, 0)
    return read.swapaxes(2, 3).reshape(x.shape[0], count, -1)  # [I, count, Dv * ratio^2]


def locate(
    grid: Int[Array, "B N 2"], start: Int[Array, "B N"], length: int, ratio: int
) -> tuple[Int[Array, "B {length}"], Int[Array, "B {length}"], Int[Array, "B {length}"]]:
    """What each token of a row is (TEXT or as in `span_types`), its image's slot, and its cell if it is an IMAGE."""
    size = -(-grid // ratio)
    rows, columns = size[..., 0, None], size[..., 1, None]
    offset = jnp.arange(length)[None, None] - start[..., None]  # [B, N, T]
    tokens = jnp.where(rows > 0, rows * (columns + 1) + 2, 0)
    inside = (offset >= 0) & (offset < tokens)
    row, column = (offset - 1) // (columns + 1), (offset - 1) % (columns + 1)
    kind = jnp.where(column == columns, NEWLINE, IMAGE)
    kind = jnp.where(offset == 0, START, jnp.where(offset == tokens - 1, END, kind))
    pick = lambda a: jnp.sum(jnp.where(inside, a, 0), axis=1)  # noqa: E731  spans do not overlap
    slot = jnp.arange(grid.shape[1])[None, :, None]
    return pick(kind - TEXT) + TEXT, pick(slot), pick(jnp.where(kind == IMAGE, row * columns + column, 0))


def merge(
    w: Weights, x: Float[Array, "B T D"], images: Images, c: Config, how: Compute
) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"]]:
    """The embedded tokens with every image span written over, and which tokens belong to a span.

    Runs in x's dtype; the whole span counts as image, its delimiters included.
    """
    b, n, p, q = images.patches.shape
    if n == 0:
        return x, jnp.zeros(x.shape[:2], bool)
    patches, grid = jnp.asarray(images.patches), jnp.asarray(images.grid)
    features = encode(w, patches.reshape(b * n, p, q).astype(x.dtype), grid.reshape(b * n, 2), c, how)
    s = features.shape[1]
    kind, slot, cell = locate(grid, jnp.asarray(images.start), x.shape[1], _vision(c).downsample_ratio)
    read = jnp.take_along_axis(features.reshape(b, n * s, -1), (slot * s + cell)[..., None], axis=1)
    delimiters = jnp.stack([w[name].astype(x.dtype) for name in ("image_start", "image_newline", "image_end")])
    delimiter = delimiters[jnp.select([kind == START, kind == NEWLINE], [0, 1], 2)]
    image = kind != TEXT
    span = jnp.where((kind == IMAGE)[..., None], read, delimiter)
    return jnp.where(image[..., None], span, x), image
