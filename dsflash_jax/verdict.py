"""Verdicts on recorded arrays: reading them, and one line for each comparison."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Line:
    """The verdict on one recorded array."""

    trace: str  # file it comes from
    array: str  # its name there; what follows a comma says how it was made
    kind: str  # "values", "gradient", "selection", "bits", or "reported": shown, not judged
    max_diff: float  # largest absolute difference; of a selection the rows that differ, of bits the entries
    share: float  # part of the entries within tolerance, of a selection rows that are equal
    passed: bool


def selection_line(trace: str, name: str, got: np.ndarray, want: np.ndarray) -> Line:
    """Compare index lists row by row as sets; -1 is absent."""
    got, want = (np.sort(np.asarray(a).reshape(-1, a.shape[-1]), axis=-1) for a in (got, want))
    if got.shape != want.shape:
        return Line(trace, name, "selection", float(len(want)), 0.0, False)
    differ = int((got != want).any(axis=-1).sum())
    return Line(trace, name, "selection", float(differ), 1 - differ / max(len(want), 1), differ == 0)


def value_line(
    trace: str,
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    tolerance: float | np.ndarray,
    kind: str = "values",
    share: float = 1.0,
) -> Line:
    """Compare values: `share` of them must be within tolerance; another shape or a value that is not finite fails."""
    got = np.asarray(got)
    if got.shape != want.shape:
        return Line(trace, name, kind, float("inf"), 0.0, False)
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = np.isneginf(want) & np.isneginf(got)  # masked scores
    diff = np.where(same, 0.0, np.abs(np.where(same, 0.0, got) - np.where(same, 0.0, want)))
    within = diff <= tolerance  # a NaN is not
    finite = bool(np.isfinite(diff).all())
    worst = float(diff.max(initial=0.0)) if finite else float("inf")
    reached = float(within.mean()) if within.size else 1.0
    return Line(trace, name, kind, worst, reached, finite and reached >= share)


def bits_line(trace: str, name: str, got: np.ndarray, want: np.ndarray) -> Line:
    """Compare to the bit: -0 is not 0, all NaN are one. Floats must have the recorded dtype, integers the value."""
    floats = "f" in (got.dtype.kind, want.dtype.kind)
    if got.shape != want.shape or (floats and got.dtype != want.dtype):
        return Line(trace, name, "bits", float("inf"), 0.0, False)
    equal = got == want
    if floats:
        bits = f"u{want.itemsize}"
        equal = (got.view(bits) == want.view(bits)) | (np.isnan(got) & np.isnan(want))
    differ = int(equal.size - np.count_nonzero(equal))
    return Line(trace, name, "bits", float(differ), 1 - differ / max(equal.size, 1), differ == 0)


def block_mask(blocks: np.ndarray, size: int, slots: int) -> np.ndarray:
    """Block ids [B,T,C] (-1 absent) as the reference's mask of slots, bool [B,T,slots]."""
    members = np.zeros((*blocks.shape[:2], -(-slots // size) + 1), bool)  # the last one takes the absent ids
    np.put_along_axis(members, blocks, True, axis=-1)
    return np.repeat(members[..., :-1], size, axis=-1)[..., :slots]


def read(path: Path) -> Arrays:
    """All arrays of an .npz file. Raises ValueError for a damaged one."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return dict(arrays)
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected arrays as numpy.savez writes them, got a damaged file ({error})") from error
