"""Compare single operations with recorded vectors of the published reference: `dsflash parity DIR` on a folder of them.

One function a file runs our code on the recorded inputs. Quantisers, hashes, primes, byte tables and choices must be
equal, to the bit where they are numbers; the vectors state no tolerance for the rest, so each is given here with its
reason. An array that is neither an input nor compared is reported as not covered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsflash_jax import attention, compressor, engram, hyper, indexer, moe, overrides, quant, rope, vision, vocabulary
from dsflash_jax.config import Config, RopeScaling
from dsflash_jax.ops import swiglu
from dsflash_jax.parity_decode import pooled, ring_slots
from dsflash_jax.verdict import Arrays, Line, bits_line, block_mask, miss, numbers, read, selection_line, value_line

SHORT_SUM = 2e-6  # up to a hundred float32 terms of size 1 in another order
COEFFICIENT = 3e-6  # values of size 1 through 20 normalisations in float32
AFFINITY = 5e-6  # a root of 0.07 doubles the rounding of the logit under it
ROUNDED = 3e-2  # inputs in 8 bits move logits of size 4 by 2^-9 of each term, and an output of size 1 by as much
ULP = 1.2e-7  # relative, of float32
PICKS = 6  # selected slots of the recorded selections
GRID, CELL = (5, 4), 3  # patches of the recorded image, patches a side of a cell
NO_SINK = -1e9  # its exponential vanishes beside any logit
FORMATS = {"fp8_group32_e8m0": quant.Q8, "fp4_group32_e8m0": quant.Q4X32, "fp4_group16_e4m3": quant.Q4X16}


@dataclass(frozen=True)
class Vectors:
    """The arrays of one file, and the verdicts on them. In a name, what follows a comma says how the array was made."""

    trace: str
    arrays: Arrays

    def __getitem__(self, name: str) -> Array:
        """An input."""
        return jnp.asarray(self.arrays[name])

    def recorded(self, name: str) -> np.ndarray:
        """What `name` is compared with."""
        return self.arrays[name.split(",")[0]]

    def bits(self, name: str, got: Any) -> Line:
        """Equal to the bit."""
        return bits_line(self.trace, name, np.asarray(got), self.recorded(name))

    def near(self, name: str, got: Any, tolerance: float | np.ndarray) -> Line:
        """Within an absolute tolerance."""
        return value_line(self.trace, name, np.asarray(got), self.recorded(name), tolerance)


@cache
def released() -> Config:
    """The released model, whose tables some vectors are; others change its sizes."""
    c: Config = overrides.find("released")
    return c


def both_ways(function: Callable[..., Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The function run operation by operation, and compiled as one program."""

    def eager(*args: Any) -> Any:
        with jax.disable_jit():
            return function(*args)

    yield "eager", eager
    yield "jit", jax.jit(function)


def quantiser(v: Vectors) -> Iterator[Line]:
    """Codes, scale bytes and decoded values of one format, also from inputs that are bfloat16."""
    name, inputs = v.trace.rsplit("_", 1)
    fmt = FORMATS[name]
    scale = quant.value_e4m3 if fmt.scale == "e4m3" else quant.value_e8m0

    def run(x: Array) -> dict[str, Array]:
        packed = quant.encode(x, fmt)
        # A cast to bfloat16 and back loses nothing: a code times its scale has at most 6 significant bits.
        decoded = quant.decode(packed, fmt, x.dtype).astype(jnp.float32)
        made = {"scale_bits": packed.scales, "scale": scale(packed.scales), "dequant, decoded": decoded}
        codes = "packed" if fmt.per_byte > 1 else "q_bits"
        return made | {codes: packed.codes, "dequant, straight through": quant.fake(x, fmt).astype(jnp.float32)}

    for how, function in both_ways(run):
        for dtype in ("float32", "bfloat16") if inputs == "bf16in" else ("float32",):
            for array, got in function(v["x"].astype(dtype)).items():
                yield v.bits(f"{array}, {how}, {dtype}", got)


def byte_tables(v: Vectors) -> Iterator[Line]:
    """The value of every byte."""
    tables = {"e4m3": quant.value_e4m3, "e8m0": quant.value_e8m0, "e2m1_pair": quant.value_e2m1}
    for name, function in tables.items():
        for how, run in both_ways(function):
            yield v.bits(f"{name}, {how}", run(v["byte"]))


def quant_linear(v: Vectors) -> Iterator[Line]:
    """Checkpoint weights both ways, a linear's rounded input, and its output."""

    for codes, scales, packed in (
        ("w8_bits", "w8_scale_bits", quant.encode_fp8_weight(v["w"])),
        ("w4_packed", "w4_scale_bits", quant.encode_fp4_weight(v["w"])),
        ("x_q_bits", "x_scale_bits", quant.encode(v["x"], quant.Q8)),
    ):
        yield v.bits(codes, packed.codes)
        yield v.bits(scales, packed.scales)
    yield v.bits("w8_dequant", quant.decode_fp8_weight(v["w8_bits"], v["w8_scale_bits"], jnp.float32))
    yield v.bits("w4_dequant", quant.decode_fp4_weight(v["w4_packed"], v["w4_scale_bits"], jnp.float32))
    for bits in "84":
        yield v.near(f"y{bits}", quant.linear_q8(v["x"], v[f"w{bits}_dequant"].T), SHORT_SUM)


def sinkhorn(v: Vectors) -> Iterator[Line]:
    """Coefficients after 1, 2 and 20 normalisations of four copies, and of two copies."""
    cases = [("{}_" + str(n), "mixes", 4, n) for n in (1, 2, 20)] + [("hc2_{}", "hc2_mixes", 2, 20)]
    for names, mixes, copies, iters in cases:
        c, z = replace(released(), hc_mult=copies, hc_sinkhorn_iters=iters), v[mixes][None]
        got = hyper.coefficients(z, v["scale"], v["base"][: z.shape[-1]], c)
        for part in ("pre", "post", "comb"):
            yield v.near(names.format(part), getattr(got, part)[0], COEFFICIENT)


def mhc_boundary(v: Vectors) -> Iterator[Line]:
    """What surrounds a sublayer: coefficients, collapse, and the write back with the recorded coefficients."""
    w = {"hc_attn_fn": v["hc_fn"].T, "hc_attn_scale": v["scale"], "hc_attn_base": v["base"]}
    got = jax.jit(lambda w, x: hyper.mix(w, "attn", x, released()))(w, v["x"])
    for part in ("pre", "post", "comb"):
        yield v.near(part, getattr(got, part), COEFFICIENT)
    yield v.near("collapsed", hyper.collapse(v["x"], v["pre_mix"]), SHORT_SUM)
    at = hyper.Mix(v["pre"], v["post"], v["comb"])
    yield v.near("expanded", hyper.expand(v["sub"], v["x"], at), SHORT_SUM)


def compressed(v: Vectors) -> Iterator[Line]:
    """Latents and pending tokens of a prefill and of the single tokens behind it, also in one pass over the row."""
    ratio = int(v.trace.removeprefix("compressor_ratio"))
    w = {name: v[name].T for name in ("wkv", "wgate") if name in v.arrays} | {"norm": v["norm_weight"]}
    x = v["x"]

    def slots(length: int) -> compressor.Slots:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (len(x), length))
        return compressor.slots(jnp.ones_like(positions), positions, ratio)

    whole = x.shape[1] // ratio * ratio
    for array, length in (("full", whole), ("prefill6", 6), ("prefill7", 7)):
        yield v.near(array, compress(w, x[:, :length], slots(length), ratio), SHORT_SUM)
    all_latents = compress(w, x[:, :whole], slots(whole), ratio)
    visible = np.asarray(slots(x.shape[1]).visible[0])
    for start in (6, 7):
        yield v.near(f"decode_after{start}, in one pass", all_latents[:, start // ratio :], SHORT_SUM)
        yield v.bits(f"emitted_after{start}, in one pass", visible[start:] > visible[start - 1 : -1])
        made = pooled(w, x, start, ratio, released().rms_norm_eps)
        yield v.near(f"prefill{start}, of a padded piece", made.pop("prefill"), SHORT_SUM)
        yield v.bits(f"emitted_after{start}, one by one", made.pop("emitted"))
        for name, got in made.items():
            yield v.near(f"{name}_after{start}, one by one", got, SHORT_SUM)


@partial(jax.jit, static_argnames="ratio")
def compress(w: dict[str, Array], x: Array, at: compressor.Slots, ratio: int) -> Array:
    """`compressor.compress` with the epsilon of the vectors, which is the released one."""
    return compressor.compress(w, x, at, ratio, released().rms_norm_eps)


def candidates(v: Vectors) -> Iterator[Line]:
    """Candidate blocks as masks of slots and, for a prefill, the selection inside them."""
    for case in (name.removesuffix("_params") for name in v.arrays if name.endswith("_params")):
        first, block, count = (int(n) for n in v.arrays[f"{case}_params"])
        recorded = v.arrays[f"{case}_scores"]
        batch, length, slots = recorded.shape
        base = jnp.zeros((batch, length), jnp.int32)
        tokens = jnp.arange(1, length + 1, dtype=jnp.int32)[None]
        visible = base + (tokens // first if case.startswith("prefill") else first)
        scores = np.where(np.isneginf(recorded), 100.0, recorded)  # invisible ones would win
        # q . k is +-the score in two heads weighted 1 and -1: s = relu(s) - relu(-s).
        eye = jnp.broadcast_to(jnp.eye(length, dtype=jnp.float32), (batch, length, length))
        weights = jnp.broadcast_to(jnp.asarray([1.0, -1.0], jnp.float32), (batch, length, 2))
        arrays = (jnp.stack([eye, -eye], axis=2), weights, jnp.asarray(scores, jnp.float32).swapaxes(1, 2))
        blocks, topk = choose(*arrays, base, visible, block, count)
        yield v.bits(f"{case}_mask", block_mask(np.asarray(blocks), block, slots))
        if f"{case}_topk6" in v.arrays:
            want = np.where(v.arrays[f"{case}_topk6_kept_valid"], v.arrays[f"{case}_topk6"], -1)
            yield selection_line(v.trace, f"{case}_topk6", np.asarray(topk), want)


@partial(jax.jit, static_argnames=("block", "count"))
def choose(q: Array, w: Array, keys: Array, base: Array, visible: Array, block: int, count: int) -> tuple[Any, Array]:
    """The candidate blocks that a layer publishes, and the selection of a layer with the same scores inside them."""
    select = partial(indexer.select, q, w, keys, base, visible, k=PICKS, chunk=8, key_chunk=16, block=block)
    _, blocks = select(publish=count)
    return blocks, select(candidates=blocks)[0]


def rotary(v: Vectors) -> Iterator[Line]:
    """The released frequencies and angles of both regimes, and a rotation there and back."""
    for name, scaled in (("window_theta10000", False), ("compress_theta160000_yarn", True)):
        freq = rope.frequencies(released(), scaled)
        plain = rope.frequencies(replace(released(), rope_scaling=RopeScaling(factor=1)), scaled)
        for array, got in ((f"{name}_angles_pos1", freq), (f"{name}_plain_inv_freq", plain)):
            yield v.near(array, got, 2.5 * ULP * v.recorded(array))  # powers in float32 there, in float64 here
        at = rope.angles(freq, v["positions"])
        # The reference's float32 frequency may be 2 units off, so the angle is by as much times the position.
        allowed = np.maximum(2 * ULP * v.arrays["positions"], 1e-6)[:, None, None]
        yield v.near(name, np.stack([at.cos, at.sin], axis=-1), allowed)
    at = rope.angles(rope.frequencies(released(), True), jnp.arange(v["x"].shape[1], dtype=jnp.int32)[None])
    y = rope.rotate(v["x"], at)
    yield v.near("y", y, 3e-6)  # angles to 15 rad in float32 times entries of size 4
    yield v.near("z", rope.rotate(y, at, inverse=True), 5e-6)  # twice that


def hashes(v: Vectors) -> Iterator[Line]:
    """The released hash layout, and table rows on the host and on the device, text and across an image."""
    at = engram.layout(released())
    for name in ("primes", "offsets", "multipliers"):
        yield v.bits(name, getattr(at, name))
    ids, pad, image = v.arrays["compressed"], int(v.arrays["pad_compressed"]), ~v.arrays["text_mask"]
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    device = jax.jit(lambda ids, positions, image: engram.rows_device(ids, positions, at, pad, image))
    for name, mask in (("ids_text", None), ("ids_masked", image)):
        yield v.bits(f"{name}, host", engram.rows(ids, positions, at, pad, mask))
        on_device = None if mask is None else jnp.asarray(mask)
        yield v.bits(f"{name}, device", device(v["compressed"], jnp.asarray(positions), on_device))


def normalised(v: Vectors) -> Iterator[Line]:
    """Normal forms of token texts, and which tokens share a class."""
    texts, keys = v.arrays["text"].tolist(), v.arrays["key"].tolist()
    yield v.bits("normalized", np.asarray([vocabulary.normalise(text) for text in texts], object))
    classes, _ = vocabulary.compress(texts, texts)
    first = list(dict.fromkeys(keys))
    yield bits_line(v.trace, "key, as classes", classes, np.asarray([first.index(key) for key in keys]))


def router(v: Vectors) -> Iterator[Line]:
    """Affinities, choices in their order and weights, for text alone and with tokens of an image."""
    experts, chosen = v.arrays["bias"].shape[0], v.arrays["indices_text"].shape[1]
    c = replace(released(), n_routed_experts=experts, num_experts_per_tok=chosen)
    w = {"weight": v["weight"].T, "bias": v["bias"], "bias_vl": v["bias_vl"]}
    for name, image in (("text", None), ("vl", v["image_mask"])):
        got = moe.route(w, v["x"], image, c)
        yield v.bits(f"indices_{name}", got.experts)
        yield v.near(f"scores, {name}", got.scores, AFFINITY)
        yield v.near(f"weights_{name}", got.weights, AFFINITY)


def clamp(v: Vectors) -> Iterator[Line]:
    """The clamped SwiGLU."""
    tolerance = 2e-6 * np.abs(v.arrays["out"]) + 1e-6  # exp of another library: a few units in the last place
    yield v.near("out", swiglu(v["gate"], v["up"], released().swiglu_limit), tolerance)


def sparse_attention(v: Vectors) -> Iterator[Line]:
    """Selected slots alone; in bfloat16 against probabilities that the reference rounded."""
    nothing = jnp.zeros(v["q"].shape[:2], jnp.int32)  # rows of padding attend no window key

    def run(dtype: Any) -> Array:
        q, kv = (v[name].astype(dtype) for name in ("q", "kv"))
        none = jnp.zeros((*nothing.shape, q.shape[-1]), dtype)
        o, _ = attention.attend(q, none, kv, v["idx"], v["sink"], nothing, window=1, chunk=2)
        return o.astype(jnp.float32)

    yield v.near("out", run(jnp.float32), SHORT_SUM)
    yield v.near("out_bf16p", run(jnp.bfloat16), ROUNDED)


def window_indices(v: Vectors) -> Iterator[Line]:
    """Tokens that each query's window holds, and of a decode row the places of a ring where they are, in order."""
    cases = [(name.removesuffix("_params"), params) for name, params in v.arrays.items() if name.endswith("_params")]
    longest = max(int(params[1:].sum()) for _, params in cases)
    seen = {int(params[0]): windowed(int(params[0]), longest) for _, params in cases}
    for case, (window, length, start) in cases:
        want, name = v.arrays[f"{case}_idx"], f"{case}_idx"
        if start:
            ordered, filled = ring_slots(int(window), int(start))
            yield v.bits(f"{name}, in the ring", ordered[None])
            yield selection_line(v.trace, f"{name}, filled places", filled[None], want)
            want, name = np.where(want < 0, -1, start - (start - want) % window), f"{name}, as tokens"
        got = seen[window][start : start + length]
        yield selection_line(v.trace, name, ids_of(got, want.shape[-1]), want)


def windowed(window: int, length: int) -> np.ndarray:
    """Which tokens each query of a row attends, bool [T, T], read off one-hot values under equal logits."""
    values = jnp.eye(length, dtype=jnp.float32)[None]
    q, sink, segments = jnp.zeros((1, length, 1, length)), jnp.full((1,), NO_SINK), jnp.ones((1, length), jnp.int32)
    o, _ = attention.attend(q, values, None, None, sink, segments, window=window, chunk=2)
    return np.asarray(o[0, :, 0] > 0)


def ids_of(members: np.ndarray, least: int) -> np.ndarray:
    """Ids of each row's members, ascending behind -1; as wide as the longest row needs, and at least `least`."""
    width = max(least, int(members.sum(axis=-1).max()))
    ids = np.sort(np.where(members, np.arange(members.shape[-1]), -1), axis=-1)
    return np.pad(ids, ((0, 0), (width, 0)), constant_values=-1)[:, -width:]


def vision_bits(v: Vectors) -> Iterator[Line]:
    """The aligner's cells, and the tower's rotation."""
    index = jnp.arange(GRID[0] * GRID[1], dtype=jnp.int32)
    theta = 10000.0 if (tower := released().vision) is None else tower.rope_theta
    at = vision.angles(index // GRID[1], index % GRID[1], v["x"].shape[-1], theta)
    for array, got in (("cos", at.cos), ("sin", at.sin)):
        yield v.near(array, got[:, None], 1e-6)  # powers, cosine and sine of another library
    exact = rope.Angles(v["cos"][:, 0], v["sin"][:, 0])
    yield v.near("y", vision.rotate_halves(v["x"], exact), 5e-7)  # two products, fused or not
    cells = v.arrays["unfolded"].shape[0]
    yield v.bits("unfolded", vision.unfold(v["grid"][None], jnp.asarray([GRID], jnp.int32), CELL, cells)[0])


@dataclass(frozen=True)
class Op:
    """How the arrays of one file are compared."""

    lines: Callable[[Vectors], Iterator[Line]]
    inputs: frozenset[str]  # what the reference was given, or what qualifies another array; digits of cases left out


def op(lines: Callable[[Vectors], Iterator[Line]], inputs: str) -> Op:
    """An `Op` with its inputs in one string."""
    return Op(lines, frozenset(inputs.split()))


OPS = {f"{name}_{inputs}": op(quantiser, "x") for name in FORMATS for inputs in ("bf16in", "f32in")} | {
    "byte_tables": op(byte_tables, "byte"),
    "quant_linear": op(quant_linear, "w x"),
    "sinkhorn": op(sinkhorn, "mixes hc2_mixes scale base"),
    "mhc_boundary": op(mhc_boundary, "x hc_fn scale base pre_mix sub"),
    "compressor_ratio1": op(compressed, "x norm_weight wkv"),
    "compressor_ratio2": op(compressed, "x norm_weight wkv wgate"),
    "candidates_topk": op(
        candidates,
        " ".join(f"prefill{i}_{n}" for i in range(4) for n in ("scores", "params", "topk6_kept_valid"))
        + " "
        + " ".join(f"decode{i}_{n}" for i in range(4) for n in ("scores", "params")),
    ),
    "rope": op(rotary, "positions x"),
    "engram_hash_released": op(hashes, "compressed pad_compressed text_mask"),
    "engram_token_normalization": op(normalised, "text"),
    "router": op(router, "x weight bias bias_vl image_mask"),
    "swiglu_limit": op(clamp, "gate up"),
    "sparse_attention": op(sparse_attention, "q kv sink idx"),
    "window_indices": op(window_indices, " ".join(f"case{i}_params" for i in range(6))),
    "vision_bits": op(vision_bits, "grid x"),
}


def holds_ops(folder: Path) -> bool:
    """Whether a folder is one of op vectors: no model, and at least one file named in `OPS`."""
    return not (folder / "config.json").is_file() and any(path.stem in OPS for path in files(folder))


def files(folder: Path) -> list[Path]:
    """The files of arrays in a folder."""
    return sorted(path for path in folder.glob("*") if path.suffix in (".npz", ".json"))


def load(path: Path) -> Arrays:
    """The arrays of an .npz file, or one for each key of a .json list of records."""
    if path.suffix == ".npz":
        return numbers(read(path))
    records = json.loads(path.read_text(encoding="utf-8"))
    return {key: np.asarray([record[key] for record in records], object) for key in records[0]}


def check(folder: Path) -> tuple[list[Line], list[str]]:
    """Compare every file of a folder of op vectors; also returns, by file, what is not covered.

    Raises ValueError, with the file's name, when arrays are damaged, missing or of shapes that no operation takes.
    """
    lines: list[Line] = []
    uncovered: list[str] = []
    for path in files(folder):
        if path.stem not in OPS:
            uncovered.append(f"{path.stem}: all of it")
            continue
        known = OPS[path.stem]
        try:
            vectors = Vectors(path.stem, load(path))
            own = list(known.lines(vectors)) or [miss(path.stem, "all arrays", "values", "nothing to compare")]
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise ValueError(
                f"{path}: expected the arrays that the folder's README lists, got others or damaged ones ({error!r})"
            ) from error
        lines += own
        rest = sorted(vectors.arrays.keys() - known.inputs - {line.array.split(",")[0] for line in own})
        if rest:
            uncovered.append(f"{path.stem}: {', '.join(rest)}")
    return lines, uncovered
