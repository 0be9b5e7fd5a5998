"""What `dsflash describe` shows: a model's layers, parameters, caches, FLOPs and bytes from its configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Table

from dsflash_jax import costs, inventory, layer_sheet
from dsflash_jax.config import Config
from dsflash_jax.costs import COST
from dsflash_jax.modes import LayerSpec

CONTEXTS = tuple(4096 * 4**i for i in range(5))  # 4K to 1M tokens
SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def contexts(c: Config) -> tuple[int, ...]:
    """Contexts the FLOPs are given for: 4K to 1M as far as the model reaches, else its longest."""
    return tuple(n for n in CONTEXTS if n <= c.max_position_embeddings) or (c.max_position_embeddings,)


def sheet(c: Config) -> dict[str, Any]:
    """The whole sheet as plain data; bytes, parameters and FLOPs, each with its total. Allocates no array."""
    listed = inventory.items(c)
    return layer_sheet.as_json(c.table) | {
        "parameters": _parameters(listed),
        "active": {phase: _with_total(parts) for phase, parts in costs.active(c).items()},
        "prefill_boundary": costs.boundary(c),
        "cache": _cache(c),
        "flops": {"contexts": list(contexts(c)), **_flops(c)},
        "checkpoint": _summed("formats", inventory.checkpoint(listed)),
        "optimiser": {
            "backbone": _summed("families", inventory.optimiser(i for i in listed if i.group != "dspark")),
            "dspark": _summed("families", inventory.optimiser(i for i in listed if i.group == "dspark")),
        },
    }


def _with_total(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"total": sum(parts.values()), "parts": dict(parts)}


def _summed(name: str, rows: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Rows of counts under `name`, and the sum of each count."""
    keys = next(iter(rows.values()), {}).keys()
    return {"total": {key: sum(row[key] for row in rows.values()) for key in keys}, name: dict(rows)}


def _parameters(listed: Iterable[inventory.Item]) -> dict[str, Any]:
    groups = {group: _with_total(parts) for group, parts in inventory.parameters(listed).items()}
    return {"total": sum(group["total"] for group in groups.values()), "groups": groups}


def _cache(c: Config) -> dict[str, Any]:
    kinds = costs.cache(c)
    exact = {key: {kind: _number(n) for kind, n in kinds[key].items()} for key in kinds}
    return {
        "bytes_a_token": {"total": _number(sum(kinds["token"].values(), Fraction(0))), "parts": exact["token"]},
        "bytes_a_sequence": _with_total(exact["sequence"]),
        "sequence_at_context": {str(n): costs.sequence_bytes(c, n) for n in contexts(c)},
    }


def _number(n: Fraction | int) -> int | float:
    return int(n) if n == int(n) else float(n)


def _flops(c: Config) -> dict[str, Any]:
    """FLOPs a token of decode, of prefill, and of prefill with replay, for each counting and context."""
    work: dict[str, Callable[[int], costs.Products]] = {
        "decode": lambda n: costs.decode(c, n),
        "prefill": lambda n: costs.prefill(c, n, replay=False),
    }
    if costs.boundary(c) is not None:
        work["prefill_replay"] = lambda n: costs.prefill(c, n, replay=True)
    made = {phase: [of(n) for n in contexts(c)] for phase, of in work.items()}
    return {
        phase: {counting: [_with_total(costs.flops(one, counting)) for one in each] for counting in COST}
        for phase, each in made.items()
    }


def show(c: Config, facts: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the sheet `facts` of `c`."""
    console = console or Console()
    console.print(_layers(c.table))
    for line in (f"Plan, {facts['bodies']} traced bodies: {facts['plan']}", f"Mode string: {facts['modes']}\n"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_parameter_table(facts["parameters"]))
    console.print(_active_table(facts["active"], facts["prefill_boundary"]))
    console.print(_cache_table(facts["cache"]))
    for phase, title in (
        ("decode", "Decode FLOPs a token"),
        ("prefill", "Prefill FLOPs a token, every layer on every token (mean over a prompt)"),
        ("prefill_replay", "Prefill FLOPs a token, decoder on the last window only (mean over a prompt)"),
    ):
        if phase in facts["flops"]:
            console.print(_flops_table(title, facts["flops"]["contexts"], facts["flops"][phase]))
    console.print(_checkpoint_table(facts["checkpoint"]))
    for group, title in (("backbone", "backbone, Engram and vision"), ("dspark", "draft head")):
        if facts["optimiser"][group]["families"]:
            console.print(_optimiser_table(title, facts["optimiser"][group]))


def amount(n: float) -> str:
    """A number in thousands, millions, billions or trillions: 551.566B."""
    for scale, letter in SCALES:
        if abs(n) >= scale:
            return f"{n / scale:,.3f}{letter}"
    return f"{n:g}"


def exact(n: float) -> str:
    """A count in full; a fraction to two digits."""
    return f"{n:,}" if n == int(n) else f"{n:,.2f}"


def tokens(n: int) -> str:
    """A context length: 4K, 1M."""
    for scale, letter in ((1 << 20, "M"), (1 << 10, "K")):
        if n % scale == 0:
            return f"{n // scale}{letter}"
    return str(n)


def ranges(ids: Sequence[int]) -> str:
    """Ascending layer ids with runs joined: 3-7, 9-13, 15."""
    runs: list[list[int]] = []
    for i in ids:
        if runs and runs[-1][-1] == i - 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _layers(table: Sequence[LayerSpec]) -> Table:
    kinds: dict[tuple[str, int], list[int]] = {}
    for i, spec in enumerate(table):
        name = layer_sheet.label(spec) + (" in candidates" if spec.restricted else "")
        kinds.setdefault((name, spec.ratio), []).append(i)
    grid = Table("kind", "ratio", "count", "layers", title="Layers")
    for (name, ratio), ids in kinds.items():
        grid.add_row(name, str(ratio or "-"), str(len(ids)), ranges(ids))
    return grid


def _grid(title: str, first: Iterable[str], numbers: Iterable[str]) -> Table:
    grid = Table(*first, title=title)
    for heading in numbers:
        grid.add_column(heading, justify="right")
    return grid


def _parameter_table(facts: Mapping[str, Any]) -> Table:
    grid = _grid("Parameters", ("group", "part"), ("count", ""))
    for group, counts in facts["groups"].items():
        for part, n in counts["parts"].items():
            grid.add_row(group, part, f"{n:,}", amount(n))
        if len(counts["parts"]) > 1:
            grid.add_row(group, "all", f"{counts['total']:,}", amount(counts["total"]), style="bold")
        grid.add_section()
    grid.add_row("model", "all", f"{facts['total']:,}", amount(facts["total"]), style="bold")
    return grid


def _active_table(facts: Mapping[str, Any], boundary: int | None) -> Table:
    grid = _grid("Active parameters a token", ("part",), facts)
    for part in facts["decode"]["parts"]:
        grid.add_row(part, *[amount(phase["parts"].get(part, 0)) for phase in facts.values()])
    grid.add_section()
    grid.add_row("all", *[amount(phase["total"]) for phase in facts.values()], style="bold")
    without = [phase["total"] - phase["parts"].get("engram projections", 0) for phase in facts.values()]
    if "engram projections" in facts["decode"]["parts"]:
        grid.add_row("all without Engram", *map(amount, without))
    below = f"layers 0-{boundary - 1} and " if boundary else ""
    grid.caption = "prefill: " + ("all layers" if boundary is None else f"{below}the KV of layer {boundary}")
    return grid


def _cache_table(facts: Mapping[str, Any]) -> Table:
    grid = _grid("Cache bytes, packed", ("kind",), ("a token", "a sequence"))
    for kind, n in facts["bytes_a_token"]["parts"].items():
        grid.add_row(kind, exact(n), "")
    for kind, n in facts["bytes_a_sequence"]["parts"].items():
        grid.add_row(kind, "", exact(n))
    grid.add_section()
    grid.add_row("all", *[exact(facts[key]["total"]) for key in ("bytes_a_token", "bytes_a_sequence")], style="bold")
    at = [f"{tokens(int(n))}: {total:,}" for n, total in facts["sequence_at_context"].items()]
    grid.caption = "one sequence of " + ", ".join(at)
    return grid


def _flops_table(title: str, lengths: Sequence[int], facts: Mapping[str, Any]) -> Table:
    grid = _grid(title, ("part",), [tokens(n) for n in lengths])
    grid.caption = "FP8 units: an FP4 by FP4 product counts half, a bf16 or float32 one double"
    for part in facts["alike"][0]["parts"]:
        grid.add_row(part, *[amount(at["parts"][part]) for at in facts["alike"]])
    for counting, name in (("alike", "all, products alike"), ("fp8", "all, FP8 units")):
        totals = [at["total"] for at in facts[counting]]
        grid.add_section()
        grid.add_row(name, *map(amount, totals), style="bold")
        grid.add_row(f"times that of {tokens(lengths[0])}", *[f"{n / totals[0]:.3f}" for n in totals])
    return grid


def _checkpoint_table(facts: Mapping[str, Any]) -> Table:
    grid = _grid("Checkpoint", ("format",), ("tensors", "values", "bytes"))
    for name, row in (*facts["formats"].items(), ("all", facts["total"])):
        grid.add_row(name, *[f"{row[key]:,}" for key in ("tensors", "values", "bytes")])
    grid.caption = "tensors and bytes include scales"
    return grid


def _optimiser_table(title: str, facts: Mapping[str, Any]) -> Table:
    columns = ("parameters", "master", "state")
    grid = _grid(f"Optimiser bytes, {title}", ("family",), columns)
    for name, row in (*facts["families"].items(), ("all", facts["total"])):
        grid.add_row(name, *[f"{row[key]:,}" for key in columns])
    grid.caption = "float32 master weights; one momentum (muon, sinkhorn) or two moments; gradients not counted"
    return grid


def main(c: Config) -> dict[str, Any]:
    """Print the sheet of a configuration and return it. Raises ValueError where the configuration has none."""
    facts = sheet(c)
    show(c, facts)
    return facts
