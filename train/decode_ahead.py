"""The decode step of a run as it is compiled ahead of time: its devices, what it is given, and what it counts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dsflash_jax import cache, decode, devices
from dsflash_jax.config import need
from train import program
from train.config import Run


def rows_of(run: Run, rows: int) -> int:
    """The rows of a step: as many as asked for, or with 0 one for each part of the rows. Raises ValueError."""
    unit = run.layout.size(run.layout.rows)
    need(rows >= 0 and rows % unit == 0,
         f"--rows {rows} do not divide over {'x'.join(run.layout.rows) or 'one'} = {unit} devices")  # fmt: skip
    return rows or unit


def step(run: Run, rows: int, here: list[Any]) -> tuple[Any, dict[str, Any]]:
    """One token of each row on the devices `here`, jitted, and shapes and places of what it takes, by name.

    Weights lie in the compute dtype. The cache has room for `data.seq_len` tokens a row, is packed and is given away.
    Raises as `devices.place`.
    """
    at = devices.place(run.inference, run.model.num_nextn_predict_layers > 0, run.layout.mesh(here))
    dtype = jnp.dtype(run.compute.dtype)
    held = jax.eval_shape(lambda: cache.empty(at.setup, rows, run.data.seq_len))
    put = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at.rows)  # noqa: E731
    one = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=at.rows)
    given = {
        "weights": at.like(lambda w: jnp.dtype(jnp.float32) if w.float32 else dtype),
        "cache": jax.tree.map(put, held), "tokens": one, "counts": one,
    }  # fmt: skip
    return jax.jit(at.over(partial(decode.step, at.setup)), donate_argnums=1), given


def flops(jaxpr: Any, run: Run) -> int:
    """FLOPs of a step's matrix products over all devices.

    All rows are gathered at all experts, and a grouped product multiplies those of its own alone: each counts once.
    Where `compute.experts` is not "ragged" a device multiplies what it is given, and all of that counts.
    """
    counted = program.flops_by_scope(jaxpr)
    if run.compute.experts != "ragged":
        return counted.total()
    routed = sum(n for scope, n in counted.items() if re.search(r"\brouted\b", scope))
    return counted.total() - routed + routed // run.layout.expert


def crossed(run: Run, rows: int, shapes: Iterable[tuple[int, ...]], text: str) -> list[str]:
    """Arrays of a compiled step with an entry for each row of a device and slot, without the `shapes` it was given."""
    slots = {run.data.seq_len // spec.ratio for spec in run.model.table if spec.ratio}
    known = (tuple(n for n in shape if n != 1) for shape in shapes)
    return program.crossed(text, rows // run.layout.size(run.layout.rows), slots, known)
