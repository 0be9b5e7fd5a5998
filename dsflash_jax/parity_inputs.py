"""Checks of the recorded inputs of a set, before any of them is cast or indexes a table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from dsflash_jax.config import Config
from dsflash_jax.verdict import NUMBERS, Arrays

IMAGE = re.compile(r"image_(\d+)_(\d+)_patches")  # row, index of START
WHOLE = "iu"  # kinds of dtypes that hold whole numbers


def check(path: Path, c: Config, inputs: Arrays) -> None:
    """Raise ValueError, with file and array, for an input that is missing, misshapen, of another dtype or range."""

    def array(
        name: str, shape: tuple[int | None, ...], low: int | None = None, high: int | None = None, kinds: str = WHOLE
    ) -> np.ndarray:
        """The input of this name; None in `shape` is any size but 0, bounds are inclusive."""
        where = f"{path}: {name}"
        if name not in inputs:
            raise ValueError(f"{path}: no {name} among {sorted(inputs)[:5]}; the inputs are of another model")
        a = inputs[name]
        if a.dtype.kind not in kinds:
            sort = "whole numbers" if kinds == WHOLE else "real numbers"
            raise ValueError(f"{where}: expected {sort}, got {a.dtype}; record them uncast")
        if a.ndim != len(shape) or a.size == 0 or any(n not in (None, m) for n, m in zip(shape, a.shape, strict=True)):
            wanted = ", ".join("any" if n is None else str(n) for n in shape)
            raise ValueError(f"{where}: expected shape [{wanted}], none empty, got {list(a.shape)}")
        if not np.isfinite(a).all():
            raise ValueError(f"{where}: not all entries are finite")
        if (low is not None and a.min() < low) or (high is not None and a.max() > high):
            bounds = f"{'any' if low is None else low} to {'any' if high is None else high}"
            raise ValueError(
                f"{where}: from {a.min()} to {a.max()}, expected {bounds}; the inputs are of another model"
            )
        return a

    b, t = array("input_ids", (None, None), 0, c.vocab_size - 1).shape
    if c.vision:
        array("token_types", (b, t), -1, 3)
    if c.engram_layer_ids:
        tables, sizes = len(c.engram_layer_ids), c.engram_max_ngram_size - 1
        array("engram_primes", (tables, sizes, c.engram_n_heads), 1)
        array("engram_offsets", (tables, sizes * c.engram_n_heads), 0)
        array("engram_multipliers", (tables, sizes + 1))
        array("engram_pad_compressed", (), 0)
        if len(array("engram_token_map", (None,), 0)) < c.vocab_size:
            raise ValueError(f"{path}: engram_token_map: {len(inputs['engram_token_map'])} entries, not {c.vocab_size}")
    for at in filter(None, map(IMAGE.fullmatch, inputs)):
        if not c.vision or int(at[1]) >= b or int(at[2]) >= t:
            raise ValueError(f"{path}: {at[0]}: the model takes no image there; the inputs are of another model")
        grid = array(at[0].replace("patches", "grid"), (2,), 1)
        side = c.vision.patch_size
        array(at[0], (int(grid[0]) * int(grid[1]), 3, side, side), kinds=NUMBERS)
