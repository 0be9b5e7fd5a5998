"""FP4 and FP8 codecs and fake-quantisation, exact to the bit. Which tensor uses which format is the config's matter.

A group of values along the last axis shares one scale byte: x is close to value(code) * value(scale).

    format  group  codes                   scale                       used for
    Q8      32     E4M3, a byte each       2^ceil(log2(amax / 448))    window KV, inputs of FP8 and FP4 linears
    Q4X32   32     E2M1, two in a byte     2^ceil(log2(amax / 6))      index queries and keys, expert weights (MXFP4)
    Q4X16   16     E2M1, two in a byte     E4M3(amax / 6)              compressed KV

Rounding is to nearest, ties to the even code; what exceeds the largest code saturates. -0 keeps its sign.

Every result is the same under jit, eagerly and on every backend. Compilers may turn a division into a product with the
reciprocal and flush subnormal numbers to zero, so no result here depends on how a division rounds (`_nearest` decides
by exact products) and powers of two are read from and written to exponent bits. float8_e8m0fnu casts round to the
nearest power and would break the ceil rule. The public functions are jitted: some forty small operations are one
compilation when called outside a jitted step.

A NaN or an infinity in a group makes the scale NaN (byte 255 in E8M0, 127 in E4M3), so that the whole group decodes to
NaN: E2M1 has no code for it, and a finite value would hide the fault. Source: architecture section 3, training
section 5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8

from dsflash_jax import ops

BIAS = 127  # of a float32 exponent field, and of an E8M0 byte
FRACTION = 23  # fraction bits of a float32
E8M0_NAN = 255
Stored = Array | np.ndarray  # bytes as a file holds them, of any one-byte dtype


@dataclass(frozen=True)
class MiniFloat:
    """A float of sign, exponent and fraction without infinities; below 2^min_exponent it is evenly spaced."""

    fraction: int  # fraction bits
    min_exponent: int  # exponent of the smallest normal value
    largest: float  # largest finite magnitude
    sign: int  # position of the sign bit
    nan: int | None  # magnitude bits that mean NaN, None if no code does

    @property
    def offset(self) -> int:
        """float32 exponent field minus this format's, for a normal value."""
        return BIAS + self.min_exponent - 1


E2M1 = MiniFloat(fraction=1, min_exponent=0, largest=6.0, sign=3, nan=None)
E4M3 = MiniFloat(fraction=3, min_exponent=-6, largest=448.0, sign=7, nan=0x7F)


@dataclass(frozen=True)
class Format:
    """How a group of values along the last axis is stored."""

    name: str  # for messages
    group: int  # values that share a scale
    values: MiniFloat  # codes
    scale: Literal["e8m0", "e4m3"]  # scale byte: power of two, rounded up; or rounded to nearest
    floor: float  # smallest amax, so that an empty group has a scale

    @property
    def per_byte(self) -> int:
        """Codes stored in one byte."""
        return 8 // (self.values.sign + 1)


Q8 = Format("Q8", group=32, values=E4M3, scale="e8m0", floor=1e-4)
Q4X32 = Format("Q4x32", group=32, values=E2M1, scale="e8m0", floor=6 * 2.0**-126)
Q4X16 = Format("Q4x16", group=16, values=E2M1, scale="e4m3", floor=6 * 2.0**-9)

TILE = 32  # rows and columns of an FP8 weight that share one scale
# The floor of Q8 would cost a tile of tiny weights its low bits; this one is the least with a normal float32 scale, so
# that decode, encode, decode is lossless.
FP8_WEIGHT_FLOOR = 448 * 2.0**-126


@flax.struct.dataclass
class Packed:
    """Stored codes and scales: uint8, `[*B, N / codes a byte]` and `[*B, N / group]`.

    E2M1 has two codes a byte, the even element in the low nibble. The types stay open because JAX rebuilds a record
    around placeholders, axis numbers and shardings.
    """

    codes: Any
    scales: Any


@partial(jax.jit, static_argnames="fmt")
def encode(x: Float[Array, "*B N"], fmt: Format) -> Packed:
    """Quantise each group of the last axis and pack it. Raises ValueError when N is no multiple of the group."""
    groups = _split(x, fmt)
    scales = _scale_byte(_amax(groups, (-1,)), fmt)
    codes = _signed(_code(_quantise(groups, scales, fmt), fmt.values), groups, fmt.values)
    return Packed(_pack(codes.reshape(x.shape), fmt), scales.astype(jnp.uint8)[..., 0])


@partial(jax.jit, static_argnames=("fmt", "dtype"))
def decode(packed: Packed, fmt: Format, dtype: Any) -> Float[Array, "*B N"]:
    """The values value(code) * value(scale), exact in bfloat16 too. Raises ValueError when the shapes disagree."""
    codes, scales = _unpack(_bytes(packed.codes, "codes"), fmt), _bytes(packed.scales, "scales")
    expected = (*codes.shape[:-1], codes.shape[-1] // fmt.group)
    if codes.shape[-1] % fmt.group or scales.shape != expected:
        raise ValueError(
            f"{fmt.name} has one scale per {fmt.group} values: codes {packed.codes.shape} hold {codes.shape}, which "
            f"needs scales {expected}, got {scales.shape}; check the block size the scales were written with"
        )
    groups = codes.reshape(*scales.shape, fmt.group)
    magnitudes = _dequantise(_value(groups, fmt.values), scales.astype(jnp.int32)[..., None], fmt)
    return _negate(magnitudes, groups >> fmt.values.sign != 0).reshape(codes.shape).astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
@partial(jax.jit, static_argnames="fmt")
def fake(x: Float[Array, "*B N"], fmt: Format) -> Float[Array, "*B N"]:
    """decode(encode(x)) in x's dtype without the bytes between; the gradient is the identity everywhere.

    Straight through also where a value saturates, in an empty group and at a rounding step: no mask. The rule is a
    custom one because x + stop_gradient(y - x) is not y in floating point.
    """
    groups = _split(x, fmt)
    scales = _scale_byte(_amax(groups, (-1,)), fmt)
    magnitudes = _dequantise(_quantise(groups, scales, fmt), scales, fmt)
    return _negate(magnitudes, _bits(groups) < 0).reshape(x.shape).astype(x.dtype)


@fake.defjvp
def _straight_through(fmt: Format, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return fake(primals[0], fmt), tangents[0]


def linear_q8(x: Float[Array, "*B I"], w: Float[Array, "I *O"]) -> Float[Array, "*B O"]:
    """Q8(x) w as the reference's W8A8 and W4A8 linears: accumulated in float32, cast to x's dtype.

    `w` holds decoded values. Gradient: straight through to x; that of w sees the quantised x.
    """
    return ops.contract(fake(x, Q8), w, ops.HIGHEST).astype(x.dtype)


@partial(jax.jit, static_argnames="dtype")
def decode_fp8_weight(codes: Stored, scales: Stored, dtype: Any) -> Float[Array, "*B O I"]:
    """Checkpoint FP8 weight: E4M3 [*B, O, I] times an E8M0 grid [*B, ceil(O/32), ceil(I/32)].

    The last row and column of tiles may be partial. Arrays are uint8 or the float8 dtypes. Raises ValueError otherwise
    and when the grid does not fit.
    """
    bits, grid = _bytes(codes, "codes"), _bytes(scales, "scales")
    rows, columns = bits.shape[-2:]
    expected = (*bits.shape[:-2], -(-rows // TILE), -(-columns // TILE))
    if grid.shape != expected:
        raise ValueError(
            f"FP8 weight {bits.shape} has one scale per {TILE} x {TILE} tile: expected scales {expected}, got "
            f"{grid.shape}; check the tile size the scales were written with, and that neither array is transposed"
        )
    scale = _expand(grid)[..., :rows, :columns].astype(jnp.int32)
    return _negate(_times_power(_value(bits, E4M3), scale), bits >> E4M3.sign != 0).astype(dtype)


@jax.jit
def encode_fp8_weight(w: Float[Array, "*B O I"]) -> Packed:
    """Quantise a weight for the checkpoint: one scale 2^ceil(log2(amax / 448)) per 32 x 32 tile, partial ones too.

    `decode_fp8_weight` of the result is within rounding of w, and equal to it if w came from there.
    """
    rows, columns = w.shape[-2:]
    padding = [(0, 0)] * (w.ndim - 2) + [(0, -rows % TILE), (0, -columns % TILE)]
    padded = jnp.pad(w.astype(jnp.float32), padding)
    tiles = padded.reshape(*w.shape[:-2], padded.shape[-2] // TILE, TILE, padded.shape[-1] // TILE, TILE)
    amax = jnp.maximum(_amax(tiles, (-3, -1)), FP8_WEIGHT_FLOOR)
    scales = _power_byte(amax * np.float32(1 / E4M3.largest))
    values = _nearest(_over_power(jnp.abs(tiles), scales), jnp.float32(1), E4M3)
    codes = _signed(_code(values, E4M3), tiles, E4M3).reshape(padded.shape)[..., :rows, :columns]
    return Packed(codes, scales.astype(jnp.uint8)[..., :, 0, :, 0])


def decode_fp4_weight(packed: Stored, scales: Stored, dtype: Any) -> Float[Array, "*B O I"]:
    """Checkpoint FP4 weight (MXFP4): E2M1 pairs [*B, O, I/2] as int8 or uint8, E8M0 scales [*B, O, I/32].

    Raises ValueError when the scales are not one per 32 values: a width of I/16 is another format.
    """
    return decode(Packed(_bytes(packed, "packed"), _bytes(scales, "scales")), Q4X32, dtype)


def encode_fp4_weight(w: Float[Array, "*B O I"]) -> Packed:
    """Quantise a weight for the checkpoint: E2M1 with one scale 2^ceil(log2(amax / 6)) per 32 inputs."""
    return encode(w, Q4X32)


def check_e8m0(scales: np.ndarray, name: str) -> np.ndarray:
    """E8M0 scales read from a file, as uint8. Host side, for loading.

    Raises ValueError on another dtype (a byte b stands for 2^(b - 127): neither numbers cast to bytes nor bytes cast to
    numbers can be told apart later) and on byte 255, which is NaN; both name the tensor, the second the place.
    """
    if scales.dtype == ml_dtypes.float8_e8m0fnu:
        scales = scales.view(np.uint8)
    if scales.dtype != np.uint8:
        raise ValueError(
            f"{name}: expected E8M0 scale bytes as uint8 or float8_e8m0fnu, got {scales.dtype}; view the stored bytes"
        )
    bad = np.argwhere(scales == E8M0_NAN)
    if len(bad):
        place = tuple(int(i) for i in bad[0])
        raise ValueError(
            f"{name}{list(place)}: scale byte {E8M0_NAN} is NaN, expected 0..254 ({len(bad)} of {scales.size} are); "
            "the file is damaged or was written from a weight with NaN, export it again"
        )
    return scales


def value_e8m0(byte: UInt8[Array, "*B"]) -> Float32[Array, "*B"]:
    """2^(byte - 127) in float32, NaN for 255. Byte 0 is subnormal: arithmetic on it may see zero."""
    return _power(byte.astype(jnp.int32))


def value_e4m3(byte: UInt8[Array, "*B"]) -> Float32[Array, "*B"]:
    """The E4M3 (e4m3fn) value of a byte in float32."""
    return _negate(_value(byte, E4M3), byte >> E4M3.sign != 0)


def value_e2m1(byte: UInt8[Array, "*B"]) -> Float32[Array, "*B two"]:
    """The two E2M1 values of a byte in float32, low nibble first."""
    codes = _nibbles(byte)
    return _negate(_value(codes, E2M1), codes >> E2M1.sign != 0)


# Groups and bytes


def _split(x: Array, fmt: Format) -> Array:
    if x.shape[-1] % fmt.group:
        raise ValueError(
            f"{fmt.name} quantises groups of {fmt.group} along the last axis, got shape {x.shape}: "
            f"{x.shape[-1]} is no multiple of {fmt.group}; choose a width that is, or leave this tensor unquantised"
        )
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // fmt.group, fmt.group)


def _bytes(x: Stored, what: str) -> Array:
    """An array of any one-byte dtype as uint8; refuses numbers that stand for bytes."""
    if x.dtype.itemsize != 1:
        raise ValueError(
            f"{what}: expected one byte an entry (uint8, int8 or float8), got {x.dtype}; pass the stored bytes"
        )
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


def _pack(codes: Array, fmt: Format) -> Array:
    if fmt.per_byte == 1:
        return codes
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _unpack(codes: Array, fmt: Format) -> Array:
    if fmt.per_byte == 1:
        return codes
    return _nibbles(codes).reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def _nibbles(byte: Array) -> Array:
    return jnp.stack([byte & 0xF, byte >> 4], axis=-1)


def _expand(grid: Array) -> Array:
    """Repeat every entry of the last two axes over its tile."""
    *batch, rows, columns = grid.shape
    return jnp.broadcast_to(grid[..., :, None, :, None], (*batch, rows, TILE, columns, TILE)).reshape(
        *batch, rows * TILE, columns * TILE
    )


# Scales


def _amax(x: Array, axis: tuple[int, ...]) -> Array:
    return jnp.max(jnp.abs(x), axis=axis, keepdims=True)


def _scale_byte(amax: Float32[Array, "*B"], fmt: Format) -> Int32[Array, "*B"]:
    amax = jnp.maximum(amax, fmt.floor)
    largest = fmt.values.largest
    if fmt.scale == "e8m0":
        return _power_byte(amax * np.float32(1 / largest))
    scale = _nearest(amax, jnp.float32(largest), E4M3)
    return _code(jnp.where(jnp.isfinite(amax), scale, jnp.nan), E4M3).astype(jnp.int32)


def _quantise(x: Float32[Array, "*B n g"], scales: Int32[Array, "*B n 1"], fmt: Format) -> Float32[Array, "*B n g"]:
    """The magnitude of each value's code."""
    if fmt.scale == "e8m0":
        return _nearest(_over_power(jnp.abs(x), scales), jnp.float32(1), fmt.values)
    return _nearest(jnp.abs(x), _value(scales, E4M3), fmt.values)


def _dequantise(x: Float32[Array, "*B n g"], scales: Int32[Array, "*B n 1"], fmt: Format) -> Float32[Array, "*B n g"]:
    """Magnitudes of codes times their scale."""
    return _times_power(x, scales) if fmt.scale == "e8m0" else x * _value(scales, E4M3)


def _power_byte(x: Float32[Array, "*B"]) -> Int32[Array, "*B"]:
    """E8M0 byte of 2^ceil(log2 x) for a normal x > 0: the exponent field, plus 1 if there is a fraction."""
    bits = _bits(x)
    field, fraction = bits >> FRACTION, bits & ((1 << FRACTION) - 1)
    return jnp.where((fraction != 0) & (field < E8M0_NAN), field + 1, field)


def _power(byte: Int32[Array, "*B"]) -> Float32[Array, "*B"]:
    """2^(byte - 127); NaN for 255."""
    special = jnp.where(byte == 0, 1 << (FRACTION - 1), byte << FRACTION)
    return jnp.where(byte == E8M0_NAN, jnp.nan, _float(special))


def _over_power(x: Float32[Array, "*B"], byte: Int32[Array, "*C"]) -> Float32[Array, "*B"]:
    """x / 2^(byte - 127) for x >= 0 and byte >= 1, exact: a subnormal x is read as the integer its bits are."""
    bits = _bits(x)
    lifted = bits.astype(jnp.float32) * _power(jnp.maximum(BIAS + 1 - FRACTION - byte, 1))
    return jnp.where(bits < 1 << FRACTION, lifted, x * _power(jnp.maximum(2 * BIAS - byte, 1)))


def _times_power(x: Float32[Array, "*B"], byte: Int32[Array, "*C"]) -> Float32[Array, "*B"]:
    """x * 2^(byte - 127) for a MiniFloat x >= 0, exact: a subnormal result is written as the integer its bits are."""
    normal = x * jnp.where(byte == 0, jnp.float32(0.5), jnp.float32(1)) * _power(jnp.maximum(byte, 1))
    # In units of the smallest subnormal, 2^-149. Large bytes give normal results: the bound keeps the power finite.
    units = x * _power(jnp.minimum(byte + FRACTION + BIAS - 1, 2 * BIAS))
    subnormal = (units < 1 << FRACTION) & (byte != E8M0_NAN)
    return jnp.where(subnormal, _float(units.astype(jnp.int32)), normal)


# Codes


def _nearest(x: Float32[Array, "*B"], s: Float32[Array, "*C"], grid: MiniFloat) -> Float32[Array, "*B"]:
    """The value of `grid` nearest to x / s for x >= 0, ties to the even code, saturating; NaN stays NaN.

    The floating-point quotient only brackets the answer; x against the middle times s decides, and that product has few
    significant bits, so it is exact. A correctly rounded quotient decides equally: x and s as they occur here never
    have a quotient that only rounds to a middle.
    """
    y = jnp.minimum(x / s, grid.largest)
    step = jnp.maximum(_bits(y) >> FRACTION, BIAS + grid.min_exponent) - grid.fraction  # exponent field of the spacing
    below = jnp.floor(y * _power(2 * BIAS - step))
    middle = (below + 0.5) * _power(step) * s
    up = (x > middle) | ((x == middle) & (below.astype(jnp.int32) % 2 == 1))
    return jnp.minimum((below + up.astype(jnp.float32)) * _power(step), grid.largest)


def _code(value: Float32[Array, "*B"], grid: MiniFloat) -> UInt8[Array, "*B"]:
    """Magnitude bits of a value >= 0 that `grid` holds."""
    normal = (_bits(value) >> (FRACTION - grid.fraction)) - (grid.offset << grid.fraction)
    small = value * 2.0 ** (grid.fraction - grid.min_exponent)
    code = jnp.where(value < 2.0**grid.min_exponent, small.astype(jnp.int32), normal)
    top = (1 << grid.sign) - 1
    return jnp.where(jnp.isnan(value), top if grid.nan is None else grid.nan, code).astype(jnp.uint8)


def _value(code: Shaped[Array, "*B"], grid: MiniFloat) -> Float32[Array, "*B"]:
    """Magnitude of a code; its sign bit is ignored."""
    magnitude = code.astype(jnp.int32) & ((1 << grid.sign) - 1)
    normal = _float((magnitude << (FRACTION - grid.fraction)) + (grid.offset << FRACTION))
    small = magnitude.astype(jnp.float32) * 2.0 ** (grid.min_exponent - grid.fraction)
    value = jnp.where(magnitude < 1 << grid.fraction, small, normal)
    return value if grid.nan is None else jnp.where(magnitude == grid.nan, jnp.nan, value)


def _signed(code: UInt8[Array, "*B"], x: Float32[Array, "*B"], grid: MiniFloat) -> UInt8[Array, "*B"]:
    return jnp.where(_bits(x) < 0, code | (1 << grid.sign), code)


def _negate(magnitude: Float32[Array, "*B"], negative: Array) -> Float32[Array, "*B"]:
    return jnp.where(negative, -magnitude, magnitude)


def _bits(x: Float32[Array, "*B"]) -> Int32[Array, "*B"]:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: Int32[Array, "*B"]) -> Float32[Array, "*B"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
