"""How a layout stores every parameter: shape, split, and bytes on a device; what `dsflash train` and `compile` show."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from dsflash_jax import sharding
from dsflash_jax.parallel import Axes
from dsflash_jax.params import Weight, Weights, leaves
from dsflash_jax.sharding import AXES, Layout

GIB = 2**30


def rows(declared: Weights, at: Layout, dtype: str = "float32") -> list[dict[str, Any]]:
    """One row for the copies of a parameter that all layers have alike: its name without the layer, and their number.

    `bytes` is what a device holds of all copies, in this dtype or, where it is declared, in float32.
    """
    made: dict[tuple[Any, ...], dict[str, Any]] = {}
    for path, w in leaves(sharding.stored(declared, at)).items():
        split = tuple(sharding.split_axes(path, w, at))
        name = _without_layer(path)
        row = made.setdefault(
            (name, w.shape, split),
            {"parameter": name, "copies": 0, "shape": list(w.shape), "split": _text(split), "bytes": 0},
        )
        copies = prod(w.stack)
        row["copies"] += copies
        row["bytes"] += jnp.dtype(jnp.float32 if w.float32 else dtype).itemsize * copies * _share(w, split, at)
    return list(made.values())


def _without_layer(path: str) -> str:
    """The name of a parameter inside its layer; nodes of the plan may be nested."""
    parts = path.split("/")
    if parts[0] != "layers":
        return path
    last = max(i for i, part in enumerate(parts) if part.startswith("layer") and part != "layers")
    return "/".join(parts[last + 1 :])


def _share(w: Weight, split: tuple[Axes, ...], at: Layout) -> int:
    """Entries of one copy on a device."""
    return prod(n // at.size(axes) for n, axes in zip(w.shape, split, strict=True))


def _text(split: tuple[Axes, ...]) -> str:
    return ", ".join("x".join(axes) or "-" for axes in split)


def print_lines(console: Console, title: str, lines: Sequence[Sequence[str]]) -> None:
    """Print columns of text that no narrow terminal or pipe cuts."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in ([title], *lines):
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False))
        console.print(padded.rstrip() if len(line) > 1 else title, soft_wrap=True, markup=False, highlight=False)


def show(declared: Weights, at: Layout, console: Console, dtype: str = "float32") -> None:
    """Print the table, and what a device holds in all."""
    sizes = ", ".join(f"{axis} {getattr(at, axis)}" for axis in AXES if getattr(at, axis) > 1)
    made = rows(declared, at, dtype)
    head = ("parameter", "copies", "shape", "split over", "MiB a device")
    body = [
        (r["parameter"], str(r["copies"]), " x ".join(map(str, r["shape"])), r["split"], f"{r['bytes'] / 2**20:,.1f}")
        for r in made
    ]
    print_lines(console, f"{at.devices} devices: {sizes or 'one'}", [head, *body])
    total = sum(row["bytes"] for row in made)
    console.print(f"{total / GIB:,.2f} GiB of {dtype} weights a device", highlight=False)
