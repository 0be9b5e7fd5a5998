"""The released names and layouts, and our tree: one map, read both ways.

Only this file transposes for storage. A published matrix is `[out, in]`; ours is `[*batch, in, *out]` with batch and
out folded into the published rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np

from dsflash_jax import model, modes
from dsflash_jax.config import Config
from dsflash_jax.params import Weight, Weights, leaves

E8M0_BIAS = 127
E8M0_NAN = 255
SCALE_GROUP = 32  # columns that share one scale of an n-gram row


@dataclass(frozen=True)
class Entry:
    """One published tensor and where it lies in our tree."""

    name: str  # published name
    path: str  # of the leaf, joined with slashes
    index: tuple[int, ...]  # into the stacked axes, then the expert axis for one expert's matrix
    weight: Weight

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


def entries(c: Config) -> list[Entry]:
    """Every published tensor of the backbone, in layer order."""
    declared = leaves(model.declare(c))
    out = [Entry(f"{top}.weight", top, (), declared[top]) for top in ("embed", "norm", "head")]
    for i, place in enumerate(modes.places(modes.plan(c.table))):
        prefix = "/".join(("layers", *place.path)) + "/"
        for path, weight in declared.items():
            rest = path.removeprefix(prefix)
            if rest == path or rest.startswith("layer"):  # another layer's, or one nested deeper
                continue
            name = f"layers.{i}." + rest.replace("/", ".") + ("" if weight.bare else ".weight")
            if "/experts/" in path:
                before, leaf = name.rsplit(".experts.", 1)
                each = range(weight.shape[0])
                out += [Entry(f"{before}.experts.{e}.{leaf}", path, (*place.index, e), weight) for e in each]
            else:
                out.append(Entry(name, path, place.index, weight))
    return out


def adopt(c: Config, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Our tree, float32, from published tensors. A missing, superfluous or misshapen tensor raises and is named."""
    declared = model.declare(c)
    made = {path: np.empty(w.full_shape, np.float32) for path, w in leaves(declared).items()}
    table = entries(c)
    unread = set(tensors)
    for entry in table:
        if entry.name not in tensors:
            raise ValueError(f"checkpoint lacks {entry.name}, shape {entry.shape}")
        array, scale = np.asarray(tensors[entry.name]), entry.name.removesuffix(".weight") + ".scale"
        if array.dtype == np.uint8:
            if scale not in tensors:
                raise ValueError(f"{entry.name} is stored in 8 bits, but its scale {scale} is missing")
            array = decode_rows(array, np.asarray(tensors[scale]), entry.name)
            unread.discard(scale)
        made[entry.path][entry.index] = entry.adopt(array)
        unread.discard(entry.name)
    if unread:
        raise ValueError(
            f"checkpoint holds {len(unread)} tensors this configuration does not have: {sorted(unread)[:5]}"
        )
    structure = jax.tree.structure(declared, is_leaf=lambda w: isinstance(w, Weight))
    return jax.tree.unflatten(structure, [made[path] for path in leaves(declared)])


def publish(c: Config, tree: Weights) -> dict[str, np.ndarray]:
    """Published names and layouts of our tree (of weights or of their gradients), float32."""
    flat = {"/".join(k.key for k in path): np.asarray(a) for path, a in jax.tree_util.tree_flatten_with_path(tree)[0]}
    return {e.name: e.publish(flat[e.path][e.index]) for e in entries(c)}


def decode_rows(bits: np.ndarray, scale: np.ndarray, name: str) -> np.ndarray:
    """E4M3 rows with one E8M0 scale a group of 32 columns, to float32 (the n-gram tables' storage)."""
    if scale.shape != (bits.shape[0], -(-bits.shape[1] // SCALE_GROUP)):
        raise ValueError(
            f"{name}: one scale per {SCALE_GROUP} columns needs {bits.shape[1] // SCALE_GROUP}, got {scale.shape}"
        )
    if (scale == E8M0_NAN).any():
        raise ValueError(f"{name}: scale byte {E8M0_NAN} is not a number")
    factor = np.ldexp(np.float32(1), scale.astype(np.int32) - E8M0_BIAS)
    return (
        bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        * np.repeat(factor, SCALE_GROUP, axis=1)[:, : bits.shape[1]]
    )
