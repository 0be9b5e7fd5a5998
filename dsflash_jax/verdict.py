"""Verdicts on recorded arrays: reading them, and one line for each comparison."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
NUMBERS = "biuf"  # kinds of dtypes that hold real numbers


@dataclass(frozen=True)
class Line:
    """The verdict on one recorded array."""

    trace: str  # file it comes from
    array: str  # its name there; what follows a comma says how it was made, or why it cannot be compared
    kind: str  # "values", "gradient", "selection", "bits", or "reported": shown, not judged
    max_diff: float  # largest absolute difference; of a selection the rows that differ, of bits the entries; infinite
    # where nothing could be compared or a value is not finite
    share: float  # part of the entries within tolerance, of a selection rows that are equal
    passed: bool


def miss(trace: str, name: str, kind: str, why: str) -> Line:
    """The verdict on an array that cannot be compared."""
    return Line(trace, f"{name}, {why}", kind, float("inf"), 0.0, False)


def unlike(got: np.ndarray, want: np.ndarray, kinds: str) -> str:
    """Why two arrays cannot be compared, "" if they can: both need one shape, entries, and a dtype of these kinds."""
    if want.dtype.kind not in kinds or got.dtype.kind not in kinds + "V":  # a computed bfloat16 has kind V
        return f"recorded as {want.dtype}, made as {got.dtype}"
    if got.shape != want.shape:
        return f"recorded with shape {list(want.shape)}, made with {list(got.shape)}"
    return "" if want.size else "nothing to compare"


def selection_line(trace: str, name: str, got: np.ndarray, want: np.ndarray) -> Line:
    """Compare index lists row by row as sets; -1 is absent. Leading axes may be folded, the last one may not."""
    got, want = (a.reshape(-1, a.shape[-1]) if a.ndim and a.size else a for a in (np.asarray(got), np.asarray(want)))
    why = unlike(got, want, "iu") if want.ndim else "a number, not a list of ids"
    if why:
        return miss(trace, name, "selection", why)
    differ = int((np.sort(got, axis=-1) != np.sort(want, axis=-1)).any(axis=-1).sum())
    return Line(trace, name, "selection", float(differ), 1 - differ / len(want), differ == 0)


def value_line(
    trace: str,
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    tolerance: float | np.ndarray,
    kind: str = "values",
    share: float = 1.0,
) -> Line:
    """Compare values: `share` of them must be within tolerance.

    Another shape, no entries, a dtype that is not of real numbers, or a value that is not finite fails.
    """
    got = np.asarray(got)
    if why := unlike(got, want, NUMBERS):
        return miss(trace, name, kind, why)
    got, want = got.astype(np.float64), want.astype(np.float64)
    same = np.isneginf(want) & np.isneginf(got)  # masked scores
    diff = np.where(same, 0.0, np.abs(np.where(same, 0.0, got) - np.where(same, 0.0, want)))
    within = diff <= tolerance  # a NaN is not
    finite = bool(np.isfinite(diff).all())
    worst = float(diff.max()) if finite else float("inf")
    reached = float(within.mean())
    return Line(trace, name, kind, worst, reached, finite and reached >= share)


def bits_line(trace: str, name: str, got: np.ndarray, want: np.ndarray) -> Line:
    """Compare to the bit: -0 is not 0, all NaN are one. Floats must have the recorded dtype, integers the value."""
    floats, texts = "f" in (got.dtype.kind, want.dtype.kind), want.dtype.kind == "O"
    why = unlike(got, want, "O" if texts else NUMBERS)
    if not why and floats and got.dtype != want.dtype:
        why = f"recorded as {want.dtype}, made as {got.dtype}"
    if why:
        return miss(trace, name, "bits", why)
    equal = got == want
    if floats:
        bits = f"u{want.itemsize}"
        equal = (got.view(bits) == want.view(bits)) | (np.isnan(got) & np.isnan(want))
    differ = int(equal.size - np.count_nonzero(equal))
    return Line(trace, name, "bits", float(differ), 1 - differ / equal.size, differ == 0)


def block_mask(blocks: np.ndarray, size: int, slots: int) -> np.ndarray:
    """Block ids [B,T,C] (-1 absent) as the reference's mask of slots, bool [B,T,slots]."""
    members = np.zeros((*blocks.shape[:2], -(-slots // size) + 1), bool)  # the last one takes the absent ids
    np.put_along_axis(members, blocks, True, axis=-1)
    return np.repeat(members[..., :-1], size, axis=-1)[..., :slots]


def read(path: Path) -> Arrays:
    """All arrays of an .npz file. Raises ValueError, with the path, for one that is missing, damaged or no file."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            made = dict(arrays)
            for name, array in made.items():
                if not isinstance(array, np.ndarray):  # numpy hands out members that are not .npy as bytes
                    raise TypeError(f"{name} is no array")
            return made
    except Exception as error:  # what a file of any content makes numpy, zipfile and the decompressors raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path}: expected arrays as numpy.savez writes them, got a damaged file ({why})") from error


def numbers(arrays: Arrays) -> Arrays:
    """The same arrays. Raises ValueError, with the name, for one that does not hold real numbers."""
    for name, array in arrays.items():
        if array.dtype.kind not in NUMBERS:
            raise ValueError(f"{name}: expected real numbers, got {array.dtype}")
    return arrays
