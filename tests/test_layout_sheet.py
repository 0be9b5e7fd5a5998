"""layout_sheet.py: the printed layout is that of the arrays."""

from __future__ import annotations

import io
from functools import partial
from math import prod

import jax
import pytest
import tiny
from jax.sharding import NamedSharding
from rich.console import Console

from dsflash_jax import layout_sheet, model, sharding
from dsflash_jax.overrides import find
from dsflash_jax.params import leaves
from dsflash_jax.sharding import Layout

LAYOUTS = [Layout(), Layout(fsdp=2, expert=2, whole=0), Layout(context=2, tensor=2, whole=0)]


@pytest.mark.parametrize("at", LAYOUTS)
def test_bytes_are_those_of_the_stored_shards(at):
    declared = model.declare(tiny.with_modes("Se 2(F2 U) X", n_routed_experts=8))
    place = partial(NamedSharding, at.mesh(jax.devices()[: at.devices]))
    specs, stored = sharding.specs(sharding.stored(declared, at), at), leaves(sharding.stored(declared, at))
    where = jax.tree.leaves(jax.tree.map(place, specs, is_leaf=lambda s: isinstance(s, jax.P)))
    want = sum(4 * prod(s.shard_shape(w.full_shape)) for s, w in zip(where, stored.values(), strict=True))
    rows = layout_sheet.rows(declared, at)
    assert sum(row["bytes"] for row in rows) == want
    assert sum(row["copies"] for row in rows) == sum(prod(w.stack) for w in stored.values())


def test_a_narrow_terminal_cuts_no_name():
    declared, out = model.declare(find("digits").model), io.StringIO()
    layout_sheet.show(declared, Layout(fsdp=2, expert=2, whole=0), Console(file=out, width=80))
    first = [line.split()[0] for line in out.getvalue().splitlines()]
    assert first[2:-1] == [row["parameter"] for row in layout_sheet.rows(declared, LAYOUTS[1])]
