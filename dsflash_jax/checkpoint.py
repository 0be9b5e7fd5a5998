"""The released names and layouts, and our tree: one map, read both ways.

Only this file transposes for storage. A published matrix is `[out, in]`; ours is `[*batch, in, *out]` with batch and
out folded into the published rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from dsflash_jax import draft, model, modes, quant
from dsflash_jax.config import Config
from dsflash_jax.params import Weight, Weights, leaves

SCALE_GROUP = quant.Q4X32.group  # columns that share one scale of an n-gram row or an FP4 weight
TILE = (quant.TILE, quant.TILE)  # rows and columns that share a scale of an FP8 weight, unless `quantization` says else
DRAFT = "mtp/"  # path of the draft stages
PLAIN = ("float32", "bfloat16", "float16")  # dtypes of tensors that are not stored in bytes; float32 holds them exactly
BYTES = ("uint8", "int8", "float8_e4m3fn")  # dtypes of those that are


@dataclass(frozen=True)
class Entry:
    """One published tensor and where it lies in our tree."""

    name: str  # published name
    path: str  # of the leaf, joined with slashes
    index: tuple[int, ...]  # into the stacked axes, then the expert axis for one expert's matrix
    weight: Weight

    @property
    def scale(self) -> str:
        """Published name of its scales, if it is stored in bytes."""
        return self.name.removesuffix(".weight") + ".scale"

    @property
    def shape(self) -> tuple[int, ...]:
        """Published shape (of the values, not of a packed storage)."""
        shape, i = self._own, self._matrix[0]
        if self.weight.family != "muon":
            return shape
        rows = int(np.prod(shape[:i], initial=1)) * int(np.prod(shape[i + 1 :], initial=1))
        return (rows, shape[i])

    @property
    def _dropped(self) -> int:
        return len(self.index) - len(self.weight.stack)  # leading axes of the declared shape that `index` takes

    @property
    def _own(self) -> tuple[int, ...]:
        return self.weight.shape[self._dropped :]

    @property
    def _matrix(self) -> tuple[int, ...]:
        return tuple(a - self._dropped for a in self.weight.matrix)

    def publish(self, array: np.ndarray) -> np.ndarray:
        """Our array of one layer (and expert) in the published layout."""
        if self.weight.family != "muon":
            return array
        return np.moveaxis(array, self._matrix[0], -1).reshape(self.shape)

    def adopt(self, array: np.ndarray) -> np.ndarray:
        """A published array in our layout. Raises ValueError on a wrong shape, naming the tensor."""
        if tuple(array.shape) != self.shape:
            raise ValueError(f"{self.name}: expected shape {self.shape}, got {tuple(array.shape)}")
        if self.weight.family != "muon":
            return array
        i, own = self._matrix[0], self._own
        return np.moveaxis(array.reshape(*own[:i], *own[i + 1 :], own[i]), -1, i)


def declare(c: Config) -> dict[str, Any]:
    """Every weight of a checkpoint: what `model.declare` lists, and under "mtp" the draft stages if there are any."""
    return model.declare(c) | draft.declare(c)


def entries(c: Config) -> list[Entry]:
    """Every published tensor: embedding, head and images, then layers, tower blocks and draft stages in order."""
    declared = leaves(declare(c))
    above = ("layers/", "vision/blocks/", DRAFT)
    out = [e for path, w in declared.items() if not path.startswith(above) for e in _entries(path, path, (), w)]
    places = modes.places(modes.plan(c.table))
    stacks = [(f"layers/{i}/", "/".join(("layers", *at.path)) + "/", at.index) for i, at in enumerate(places)]
    stacks += [
        (f"vision/blocks/{j}/", "vision/blocks/", (j,)) for j in range(c.vision.num_hidden_layers if c.vision else 0)
    ]
    stacks += [(f"{DRAFT}{s}/", f"{DRAFT}{s}/", ()) for s in range(c.num_nextn_predict_layers)]
    for published, prefix, index in stacks:
        for path, weight in declared.items():
            rest = path.removeprefix(prefix)
            if rest != path and not rest.startswith("layer"):  # else another layer's, or one nested deeper
                out += _entries(published + rest, path, index, weight)
    return out


def _entries(published: str, path: str, index: tuple[int, ...], weight: Weight) -> list[Entry]:
    """The tensor of one leaf, one for each expert; `published` is its name with slashes."""
    name = published.replace("/", ".") + ("" if weight.bare else ".weight")
    if "/experts/" not in path:
        return [Entry(name, path, index, weight)]
    before, leaf = name.rsplit(".experts.", 1)
    return [Entry(f"{before}.experts.{e}.{leaf}", path, (*index, e), weight) for e in range(weight.shape[0])]


def adopt(c: Config, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Our tree, float32, from published tensors, quantised storage decoded (see `decode`).

    The tree has the draft stages as "mtp" when the configuration has any; training takes that entry out. Plain tensors
    may be float32, bfloat16 or float16, whatever the published dtype. A missing, superfluous, misshapen or undecodable
    tensor and one of another dtype raise ValueError and are named.
    """
    declared = declare(c)
    made = {path: np.empty(w.full_shape, np.float32) for path, w in leaves(declared).items()}
    tile = TILE if c.quantization is None else c.quantization.weight_block_size
    unread = set(tensors)
    for entry in entries(c):
        if entry.name not in tensors:
            raise ValueError(f"checkpoint lacks {entry.name}, shape {entry.shape}")
        array = np.asarray(tensors[entry.name])
        unread.discard(entry.name)
        if array.dtype.name in BYTES:
            if entry.scale not in tensors:
                raise ValueError(
                    f"{entry.name} is stored in bytes, {array.dtype}, but its scale {entry.scale} is missing"
                )
            array = decode(entry, array, np.asarray(tensors[entry.scale]), tile)
            unread.discard(entry.scale)
        elif array.dtype.name not in PLAIN:
            raise ValueError(
                f"{entry.name}: expected a dtype of {list(PLAIN)}, or bytes with a scale, got {array.dtype}: convert it"
            )
        made[entry.path][entry.index] = entry.adopt(array)
    if unread:
        raise ValueError(
            f"checkpoint holds {len(unread)} tensors this configuration does not have: {sorted(unread)[:5]}"
        )
    structure = jax.tree.structure(declared, is_leaf=lambda w: isinstance(w, Weight))
    return jax.tree.unflatten(structure, [made[path] for path in leaves(declared)])


def publish(c: Config, tree: Weights) -> dict[str, np.ndarray]:
    """Published names and layouts of our tree (of weights or of their gradients), float32.

    A tree without draft stages, as training has it, publishes none.
    """
    flat = {"/".join(k.key for k in path): np.asarray(a) for path, a in jax.tree_util.tree_flatten_with_path(tree)[0]}
    listed = [e for e in entries(c) if "mtp" in tree or not e.path.startswith(DRAFT)]
    return {e.name: e.publish(flat[e.path][e.index]) for e in listed}


def decode(entry: Entry, codes: np.ndarray, scale: np.ndarray, tile: tuple[int, ...] = TILE) -> np.ndarray:
    """Float32 values of a tensor stored in bytes. Its shape and its scale's say how a value of [O, I] is stored:

        codes           scale                       format
        [O, I]          [ceil(O/32), ceil(I/32)]    E4M3, a scale for each `tile`, (32, 32) here, the last ones partial
        [O, I]          [O, ceil(I/32)]             E4M3, a scale for each 32 columns of a row: n-gram tables
        [O, ceil(I/2)]  [O, ceil(I/32)]             E2M1, two codes a byte, low half first; a scale as above

    Scales are E8M0 bytes: b stands for 2^(b - 127). Raises ValueError, with the tensor's name, on other shapes (a scale
    for each 16 columns is another format), another scale dtype and on byte 255. Source: architecture sections 3 and 15.
    """
    scale = quant.check_e8m0(scale, entry.scale)
    rows, columns = entry.shape if len(entry.shape) == 2 else (0, 0)
    groups, packed = -(-columns // SCALE_GROUP), -(-columns // quant.Q4X32.per_byte)
    tiles = (-(-rows // tile[0]), -(-columns // tile[1]))
    if codes.shape == (rows, columns) and scale.shape == tiles:
        return _decode_tiles(codes, scale, *tile)
    if codes.shape == (rows, columns) and scale.shape == (rows, groups):
        return _decode_tiles(codes, scale, 1, SCALE_GROUP)
    if codes.shape == (rows, packed) and scale.shape == (rows, groups):
        whole = np.pad(codes, ((0, 0), (0, groups * SCALE_GROUP // quant.Q4X32.per_byte - packed)))
        return np.asarray(quant.decode_fp4_weight(whole, scale, jnp.float32))[:, :columns]
    raise ValueError(
        f"{entry.name}: bytes {codes.shape} with scales {scale.shape} store no values {entry.shape}; expected bytes "
        f"{(rows, columns)} with scales {tiles} or {(rows, groups)} (FP8), or bytes {(rows, packed)} with scales "
        f"{(rows, groups)} (FP4): check the block size the scales were written with"
    )


def _decode_tiles(codes: np.ndarray, scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """E4M3 values with one E8M0 scale for each tile of `rows` x `columns`, to float32."""
    factor = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float32).repeat(rows, axis=0).repeat(columns, axis=1)
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor[: codes.shape[0], : codes.shape[1]]
