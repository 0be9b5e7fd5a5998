"""What `dsflash modes` shows: the layer table, the plan of scans and the mode string, for people and for programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.tree import Tree

from dsflash_jax import modes, overrides, primes
from dsflash_jax.config import Config
from dsflash_jax.modes import LayerSpec, Mode, Node, Repeat

ITEM_STARTS = "SFXU0123456789("


def is_mode_string(source: str) -> bool:
    """Whether `source` is meant as a mode string: no file or known configuration, and it begins like one."""
    return source not in overrides.names() and not os.path.exists(source) and source.strip()[:1] in ITEM_STARTS


def config_of(string: str) -> Config:
    """The released configuration with these layers, so that every check of a real table applies to the string."""
    released: Config = overrides.find("released")
    tables = sum(spec.engram is not None for spec in modes.parse(string))
    small = {"engram_max_ngram_size": 2, "engram_n_heads": 1, "engram_vocab_size": 2}  # only the number matters here
    rows = tuple(primes.rows(table) for table in primes.tables(tables, longest=2, heads=1, start=2))
    return released.with_modes(string, engram_num_embeddings=rows, **small)


def label(spec: LayerSpec) -> str:
    """A layer's mode and marks in words: `full+engram`, `reuse+tap`."""
    marks = {"engram": spec.engram is not None, "publish": spec.publishes, "tap": spec.tap}
    return "+".join([spec.mode.name.lower(), *[mark for mark, present in marks.items() if present]])


def plan_text(nodes: Sequence[Node]) -> str:
    """A plan on one line: `window, 2×[full, 5×reuse]`."""
    return ", ".join(label(n) if isinstance(n, LayerSpec) else f"{n.times}×{_body_text(n)}" for n in nodes)


def _body_text(node: Repeat) -> str:
    text = plan_text(node.body)
    return text if len(node.body) == 1 else f"[{text}]"


def bodies(nodes: Sequence[Node]) -> int:
    """Layers that are traced: those the plan writes out, each repeat counted once."""
    return sum(1 if isinstance(n, LayerSpec) else bodies(n.body) for n in nodes)


def sources(table: Sequence[LayerSpec]) -> list[tuple[int | None, int | None]]:
    """For each layer, the layers whose compressed KV and whose selection it reads; None for a window layer."""
    out: list[tuple[int | None, int | None]] = []
    kv = selection = None
    for i, spec in enumerate(table):
        kv = i if spec.mode is Mode.FULL else kv
        selection = i if spec.selects else selection
        out.append((None, None) if spec.mode is Mode.WINDOW else (kv, selection))
    return out


def as_json(table: Sequence[LayerSpec]) -> dict[str, Any]:
    """The sheet as plain data."""
    plan = modes.plan(table)
    layers = [
        {
            "layer": i,
            "item": modes.text([spec]),
            "mode": spec.mode.name.lower(),
            "ratio": spec.ratio,
            "kv_source": kv,
            "index_source": selection,
            "engram_table": spec.engram,
            "publishes": spec.publishes,
            "restricted": spec.restricted,
            "tap": spec.tap,
        }
        for i, (spec, (kv, selection)) in enumerate(zip(table, sources(table), strict=True))
    ]
    return {"modes": modes.text(table), "plan": plan_text(plan), "bodies": bodies(plan), "layers": layers}


def show(table: Sequence[LayerSpec], console: Console | None = None) -> None:
    """Print the sheet."""
    console = console or Console()
    sheet = as_json(table)
    grid = Table("layer", "item", "mode", "ratio", "KV from", "selection from", "marks", title="Layers")
    for row in sheet["layers"]:
        marks = [key for key in ("publishes", "restricted", "tap") if row[key]]
        if row["engram_table"] is not None:
            marks.insert(0, f"engram table {row['engram_table']}")
        cells = [row[key] for key in ("layer", "item", "mode", "ratio", "kv_source", "index_source")]
        grid.add_row(*["-" if cell is None else str(cell) for cell in cells], ", ".join(marks))
    console.print(grid)
    tree = Tree(f"Plan: {len(table)} layers from {sheet['bodies']} traced bodies")
    _grow(tree, modes.plan(table))
    console.print(tree)
    console.print(f"In one line: {sheet['plan']}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"Mode string: {sheet['modes']}", highlight=False, markup=False, soft_wrap=True)


def _grow(tree: Tree, nodes: Sequence[Node]) -> None:
    for node in nodes:
        if isinstance(node, LayerSpec):
            tree.add(f"{node.first}: {label(node)}" + (f", ratio {node.ratio}" if node.ratio else ""))
        else:
            _grow(tree.add(f"{node.times}× from layer {node.first}"), node.body)
