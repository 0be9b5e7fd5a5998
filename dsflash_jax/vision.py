"""Images on the device: tower, aligner, and the merge of image spans into the embedded tokens.

The tower lets the patches of an image attend each other; the aligner turns each cell into one token's input.
`pixels.py` makes the patches. Source: architecture section 12. I is any number of images, P patches, Q values of a
patch, Dv the tower width, S cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dsflash_jax import parallel
from dsflash_jax.attention import chunks, unchunk
from dsflash_jax.config import Compute, Config
from dsflash_jax.ops import contract, linear, rms_norm, swiglu
from dsflash_jax.parallel import ONE, Parallel
from dsflash_jax.params import Weight, Weights, constant, map_weights, norm, normal
from dsflash_jax.pixels import CHANNELS, END, IMAGE, NEWLINE, START, TEXT, Images
from dsflash_jax.rope import Angles
from dsflash_jax.validation import SMALLEST_SPAN

EPS = 1e-6  # of the tower's norms; the language model has its own


def weights(c: Config) -> dict[str, Any]:
    """Tower, aligner and delimiter embeddings, under the checkpoint's names; the blocks are stacked for one scan."""
    v, init = c.tower, normal(c.initializer_range)
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
        ratio = c.tower.downsample_ratio
        x = unfold(x, grid, ratio, _most_cells(patches.shape[1], c))
        hidden = jax.nn.gelu(_affine(w["aligner"]["w1"], x).astype(jnp.float32), approximate=False)
        y = _affine(w["aligner"]["w2"], hidden.astype(x.dtype))
    count = jnp.prod(-(-grid // ratio), axis=1)
    return jnp.where((jnp.arange(y.shape[1])[None] < count[:, None])[..., None], y, 0)


def _most_cells(patches: int, c: Config) -> int:
    """A single row or column has the most cells; one row of cells is the longest that the token budget allows."""
    v = c.tower
    return min(-(-patches // v.downsample_ratio), v.max_image_tokens - SMALLEST_SPAN + 1)


def tower(
    w: Weights, patches: Float[Array, "I P Q"], grid: Int[Array, "I 2"], c: Config, how: Compute
) -> Float[Array, "I P Dv"]:
    """Patch embedding, blocks and final norm; rows behind an image's grid mean nothing.

    The blocks are one scan. Unless `how.remat` is "none", backward recomputes each from its input.
    """
    v = c.tower
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
    w: Weights, x: Float[Array, "B T D"], images: Images, c: Config, how: Compute, p: Parallel = ONE
) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"]]:
    """The embedded tokens with every image span written over, and which tokens belong to a span.

    Runs in x's dtype; the whole span counts as image, its delimiters included. Of a row whose tokens lie on several
    devices each has all images, and writes what is of its own tokens.
    """
    b, n = images.grid.shape[:2]
    if n == 0:
        return x, jnp.zeros(x.shape[:2], bool)
    grid, features = jnp.asarray(images.grid), _features(w, images, c, how, p, x.dtype)
    s, own = features.shape[1], parallel.index(p.tokens) * x.shape[1]  # the first token of this device
    kind, slot, cell = locate(grid, jnp.asarray(images.start) - own, x.shape[1], c.tower.downsample_ratio)
    read = jnp.take_along_axis(features.reshape(b, n * s, -1), (slot * s + cell)[..., None], axis=1)
    delimiters = jnp.stack([w[name].astype(x.dtype) for name in ("image_start", "image_newline", "image_end")])
    delimiter = delimiters[jnp.select([kind == START, kind == NEWLINE], [0, 1], 2)]
    image = kind != TEXT
    span = jnp.where((kind == IMAGE)[..., None], read, delimiter)
    return jnp.where(image[..., None], span, x), image


def _features(w: Weights, images: Images, c: Config, how: Compute, p: Parallel, dtype: Any) -> Float[Array, "I S D"]:
    """`encode` of all images; devices that share rows take as many each, and gather what they made."""
    patches, grid = (jnp.asarray(a).reshape(-1, *a.shape[2:]) for a in (images.patches, images.grid))
    count, share = len(grid), p.size(p.tokens)
    fill = lambda a: jnp.pad(a, [(0, -count % share)] + [(0, 0)] * (a.ndim - 1))  # noqa: E731  empty slots
    patches, grid = (parallel.own(p, fill(a), axis=0) for a in (patches, grid))
    return parallel.whole(p, encode(w, patches.astype(dtype), grid, c, how), axis=0)[:count]
