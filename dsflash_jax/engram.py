"""N-gram memory: hashed rows of large tables, gated into the residual copies before a layer.

Hashing needs 64-bit products (up to 8.2e18), which JAX narrows to 32 bits without a word unless x64 is on. `rows` runs
on the host in NumPy int64, for the data pipeline; `rows_device` gives the same numbers inside a compiled program from
32-bit words. The model sees row numbers, which fit int32. Source: architecture section 10.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

from dsflash_jax import primes
from dsflash_jax.config import Config
from dsflash_jax.ops import Rounding, exact, linear
from dsflash_jax.parallel import ONE, Parallel, look_up
from dsflash_jax.params import Init, Weight, Weights, norm, normal

SEED_STRIDE = 10007  # multipliers of layer l come from generator seed 10007 * l
MIN_DOT = 1e-6  # floor under the square root of the gate
DEAD = -1  # in a history: an image token, or nothing because the sequence starts later
WORD = 32  # bits of a device integer; hashes are two of them, high and low
HALF, HALF_MASK = 16, 0xFFFF  # the product of two half words fits a word


@dataclass(frozen=True, eq=False)
class Layout:
    """Hash functions of all tables; every array int64."""

    primes: np.ndarray  # [tables, n-gram sizes, heads] rows of each hash head's table
    offsets: np.ndarray  # [tables, N] first row of each head inside the layer's table
    multipliers: np.ndarray  # [tables, longest n-gram] odd factors of the tokens, newest first


@functools.lru_cache(maxsize=8)
def layout(c: Config) -> Layout:
    """Primes, offsets and multipliers of a configuration with n-gram memory."""
    found = primes.tables(len(c.engram_layer_ids), c.engram_max_ngram_size, c.engram_n_heads, c.engram_vocab_size)
    sizes = np.asarray(found, np.int64)
    flat = sizes.reshape(len(sizes), -1)
    bound = max(1, (2**63 - 1) // c.engram_compressed_vocab_size // 2)
    draw = lambda layer: np.random.default_rng(SEED_STRIDE * layer).integers(0, bound, c.engram_max_ngram_size)  # noqa: E731
    multipliers = np.stack([2 * draw(i).astype(np.int64) + 1 for i in c.engram_layer_ids])
    return Layout(sizes, np.cumsum(flat, axis=1) - flat, multipliers)


def rows(
    compressed: np.ndarray, positions: np.ndarray, at: Layout, pad: int, image: np.ndarray | None = None
) -> np.ndarray:
    """Table rows that each token reads, int32 [B,T,tables,N] with columns ordered 2-gram heads, 3-gram heads, ...

    compressed: int64 [B,T] compressed ids; positions: [B,T], restarting at 0 where a document starts; pad: compressed
    id of the pad token; image: bool [B,T], True inside image spans. The look-back of a token ends at its document's
    start, at the row's start and at the first image token, its own included: everything from there on is pad.
    """
    b, t = compressed.shape
    tables, sizes, heads = at.primes.shape
    image = np.zeros((b, t), bool) if image is None else image
    out = np.empty((b, t, tables, sizes, heads), np.int64)
    alive = np.ones((b, t), bool)
    mixed = np.zeros((b, t, tables), np.int64)
    for back in range(sizes + 1):
        shifted = lambda a, before=0: np.pad(a, ((0, 0), (back, 0)), constant_values=before)[:, :t]  # noqa: B023, E731
        alive &= (positions >= back) & ~shifted(image, True)
        slot = np.where(alive, shifted(compressed), pad).astype(np.int64)
        mixed ^= slot[:, :, None] * at.multipliers[:, back]
        if back:
            out[:, :, :, back - 1] = mixed[..., None] % at.primes[:, back - 1]
    return (out.reshape(b, t, tables, -1) + at.offsets).astype(np.int32)


def rows_device(
    compressed: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    at: Layout,
    pad: int,
    image: Bool[Array, "B T"] | None = None,
    history: Int32[Array, "B back"] | None = None,
) -> Int32[Array, "B T tables N"]:
    """What `rows` returns, bit for bit, in 32-bit operations: for decoding and chunked prefill.

    `at` and `pad` are static; compressed ids lie in [0, 2^31). history: what `remember` gave for the tokens before
    these, None where the rows start here; positions then go on counting. Only elementwise work: about 20 integer
    operations a row number on the released layout.
    """
    tables, sizes, _ = at.primes.shape
    b, t = compressed.shape
    row = line(compressed, at, image, history)
    hi = lo = jnp.zeros((b, t, tables), jnp.uint32)
    alive = jnp.ones((b, t), bool)
    out = []
    for back in range(sizes + 1):
        token = row[:, sizes - back : sizes - back + t]
        alive &= (positions >= back) & (token != DEAD)
        slot = jnp.where(alive, token, jnp.int32(pad)).astype(jnp.uint32)
        high, low = _multiply(slot[:, :, None], at.multipliers[:, back].reshape(1, 1, -1))
        hi, lo = hi ^ high, lo ^ low
        if back:
            out.append(_remainder(hi[..., None], lo[..., None], at.primes[:, back - 1][None, None]))
    hashed = jnp.stack(out, axis=3).reshape(b, t, tables, -1).astype(jnp.int32)
    return hashed + at.offsets.astype(np.int32)[None, None]


def remember(
    compressed: Int[Array, "B T"],
    at: Layout,
    image: Bool[Array, "B T"] | None = None,
    history: Int32[Array, "B back"] | None = None,
) -> Int32[Array, "B back"]:
    """The last n - 1 compressed ids of each row, oldest first, for the `history` of the tokens that follow; n is the
    longest n-gram. Image tokens and places before the sequence are DEAD, so ids and liveness travel as one array.
    """
    return line(compressed, at, image, history)[:, compressed.shape[1] :]


def line(
    compressed: Int[Array, "B T"],
    at: Layout,
    image: Bool[Array, "B T"] | None,
    history: Int32[Array, "B back"] | None,
) -> Int32[Array, "B line"]:
    """History and present tokens of each row side by side, DEAD where a look-back ends."""
    b, sizes = compressed.shape[0], at.primes.shape[1]
    before = jnp.full((b, sizes), DEAD, jnp.int32) if history is None else history
    if before.shape[1] != sizes:
        raise ValueError(
            f"history holds {before.shape[1]} tokens, but n-grams up to {sizes + 1} look back {sizes}: make it with "
            "`remember` on the same layout"
        )
    present = compressed.astype(jnp.int32)
    return jnp.concatenate([before, present if image is None else jnp.where(image, jnp.int32(DEAD), present)], axis=1)


def _words(factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """High and low word of non-negative int64 constants."""
    return (factor >> WORD).astype(np.uint32), (factor & np.iinfo(np.uint32).max).astype(np.uint32)


def _multiply(a: UInt32[Array, "*A"], factor: np.ndarray) -> tuple[UInt32[Array, "*O"], UInt32[Array, "*O"]]:
    """High and low word of a * factor mod 2^64, factor a constant int64; shapes broadcast.

    a * low is taken by half words, whose products with their carries stay below 2^32; a * high only reaches the high
    word, where what overflows is a multiple of 2^64.
    """
    high, low = _words(factor)
    a0, a1, b0, b1 = a & HALF_MASK, a >> HALF, low & HALF_MASK, low >> HALF
    inner = a1 * b0 + ((a0 * b0) >> HALF)
    outer = a0 * b1 + (inner & HALF_MASK)
    return a1 * b1 + (inner >> HALF) + (outer >> HALF) + a * high, a * low


def _remainder(hi: UInt32[Array, "*A"], lo: UInt32[Array, "*A"], primes: np.ndarray) -> UInt32[Array, "*O"]:
    """(hi 2^32 + lo) mod constant primes below 2^31, by long division; shapes broadcast.

    Takes as many bits of the low word at a time as the free bits above a remainder hold: 8 for the released primes.
    """
    width = WORD - int(primes.max()).bit_length()
    p = primes.astype(np.uint32)
    rest, left = hi % p, WORD
    while left:
        step = min(width, left)
        left -= step
        rest = ((rest << step) | ((lo >> left) & (2**step - 1))) % p
    return rest


def _value_last(std: float) -> Init:
    """Key branches normal, value branch zero: the module starts as identity and still receives gradient."""

    def init(key: Array, shape: tuple[int, ...], dtype: object) -> Array:
        return normal(std)(key, shape, dtype).at[..., -1, :].set(0.0)

    return init


def weights(c: Config, table: int) -> dict[str, Weight]:
    """Table, projection to one key a copy and one value, and the two weights of the gate's normalisation."""
    d, m = c.hidden_size, c.hc_mult
    width = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
    split = tuple(int(p) for p in layout(c).primes[table].reshape(-1))
    scale = Weight((m, d), ("copies", "embed"), norm(1, "embed").init, "norm", float32=True, bare=True)
    return {
        "embed": Weight(
            (c.engram_num_embeddings[table], c.engram_head_dim), ("ngram_rows", "ngram_dim"),
            normal(c.initializer_range), "sinkhorn", split=split,
        ),
        "wkv": Weight(
            (width, m + 1, d), ("ngram_in", "branch", "embed"), _value_last(c.initializer_range), matrix=(0, 2)
        ),
        "q_weight": scale,
        "k_weight": scale,
    }  # fmt: skip


def apply(
    w: Weights,
    x: Float[Array, "B T M D"],
    rows: Int[Array, "B T N"],
    image: Bool[Array, "B T"] | None,
    c: Config,
    rounding: Rounding = exact,
    p: Parallel = ONE,
) -> tuple[Float[Array, "B T M D"], Float[Array, "B T M"], Float[Array, ""]]:
    """x + gate * value, the gate, and the rows that found no room: one value a token, one gate a copy from the copy's
    match with its key (float32).

    gate = sigmoid(sign(dot) sqrt(max(|dot|, 1e-6))), dot = the weighted product of copy and key, each normalised by
    its own mean square, over sqrt(D). Image tokens keep their stream.
    """
    m, d = x.shape[2:]
    read, dropped = look_up(p, w["embed"], rows, x.dtype)  # [B, T, N, width]
    kv = linear(rounding(read.reshape(*read.shape[:2], -1)), w["wkv"]).astype(jnp.float32)  # [B, T, M + 1, D]
    key, value, x32 = kv[:, :, :m], kv[:, :, m:], x.astype(jnp.float32)
    scale = lambda a: jax.lax.rsqrt(jnp.mean(jnp.square(a), axis=-1) + c.rms_norm_eps)  # noqa: E731
    weight = (w["q_weight"] * w["k_weight"])[None, None]
    dot = jnp.sum(x32 * weight * key, axis=-1) * scale(x32) * scale(key) * d**-0.5  # [B, T, M]
    gate = jax.nn.sigmoid(jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), MIN_DOT)))
    if image is not None:
        gate = jnp.where(image[..., None], 0.0, gate)
    return (x32 + gate[..., None] * value).astype(x.dtype), gate, dropped
