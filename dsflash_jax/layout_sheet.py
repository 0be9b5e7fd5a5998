"""How a layout stores every parameter: shape, split, and bytes on a device; what `dsflash train` and `compile` show."""

from __future__ import annotations

from math import prod
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from dsflash_jax import sharding
from dsflash_jax.parallel import Axes
from dsflash_jax.params import Weight, Weights, leaves
from dsflash_jax.sharding import AXES, Layout

BYTES = 4  # of a float32 entry
GIB = 2**30


def rows(declared: Weights, at: Layout) -> list[dict[str, Any]]:
    """One row for the copies of a parameter that all layers have alike: its name without the layer, and their number.

    `bytes` is what a device holds of all copies, in float32.
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
        row["bytes"] += BYTES * copies * _share(w, split, at)
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


def show(declared: Weights, at: Layout, console: Console) -> None:
    """Print the table, and what a device holds in all."""
    sizes = ", ".join(f"{axis} {getattr(at, axis)}" for axis in AXES if getattr(at, axis) > 1)
    grid = Table(
        *(Column(name, overflow="fold") for name in ("parameter", "copies", "shape", "split over", "MiB a device")),
        title=f"{at.devices} devices: {sizes or 'one'}", title_justify="left",
    )  # fmt: skip
    made = rows(declared, at)
    for row in made:
        shape = " x ".join(map(str, row["shape"]))
        grid.add_row(row["parameter"], str(row["copies"]), shape, row["split"], f"{row['bytes'] / 2**20:,.1f}")
    console.print(grid)
    total = sum(row["bytes"] for row in made)
    console.print(f"{total / GIB:,.2f} GiB of float32 weights a device", highlight=False)
