"""Layer modes as data: the table of layers, its plan of scans, and mode strings.

A layer with compressed KV is Full (makes KV, index keys and a selection), Reindex (a new selection over existing KV)
or Reuse (neither). `plan` folds a table into nested repeats so that the program size follows the number of distinct
bodies, not the depth. Source: architecture section 7. No arrays here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from dsflash_jax.config import Config


class Mode(Enum):
    """What a layer attends to and what it makes; the value is its letter in a mode string."""

    WINDOW = "S"
    FULL = "F"
    REINDEX = "X"
    REUSE = "U"


@dataclass(frozen=True)
class LayerSpec:
    """Every static fact that changes a layer's program; layers with equal specs share one traced body."""

    mode: Mode
    ratio: int  # tokens per compressed slot; 0 for window-only
    engram: int | None = None  # index of its n-gram table, None without one
    publishes: bool = False  # picks the candidate blocks of later selections
    restricted: bool = False  # selects inside published candidate blocks only
    tap: bool = False  # its input feeds the draft head
    first: int = field(default=-1, compare=False)  # layer id: for names and messages only

    @property
    def selects(self) -> bool:
        """Whether the layer runs an indexer."""
        return self.mode in (Mode.FULL, Mode.REINDEX)


@dataclass(frozen=True)
class Repeat:
    """`times` copies of `body` after each other, run as one scan."""

    times: int
    body: tuple[Node, ...]

    @property
    def first(self) -> int:
        """Layer id of the first layer of the first copy."""
        return self.body[0].first


Node = LayerSpec | Repeat


class Place(NamedTuple):
    """Where a layer's weights are: names of the nested nodes, and the index into each stacked leading axis."""

    path: tuple[str, ...]
    index: tuple[int, ...]  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


def table(c: Config) -> tuple[LayerSpec, ...]:
    """The backbone's layers in order, from the configuration's id lists."""
    specs = []
    for i in range(c.num_hidden_layers):
        ratio = c.compress_ratios[i]
        if ratio == 0:
            mode = Mode.WINDOW
        elif i in c.kv_source_layer_ids:
            mode = Mode.FULL
        else:
            mode = Mode.REINDEX if i in c.index_source_layer_ids else Mode.REUSE
        specs.append(
            LayerSpec(
                mode,
                ratio,
                engram=c.engram_layer_ids.index(i) if i in c.engram_layer_ids else None,
                publishes=i == c.candidate_source_layer_id,
                restricted=0 <= c.candidate_source_layer_id < i and i in c.index_source_layer_ids,
                tap=i in c.dspark_target_layer_ids,
                first=i,
            )
        )
    return tuple(specs)


def check(c: Config) -> None:
    """Refuse an illegal layer table; each message names the layer and the fix."""
    layers, ratios = c.num_hidden_layers, c.compress_ratios
    if len(ratios) != layers + c.num_nextn_predict_layers:
        raise ValueError(
            f"compress_ratios has {len(ratios)} entries for num_hidden_layers={layers} plus "
            f"num_nextn_predict_layers={c.num_nextn_predict_layers}; give one a layer and one a draft stage"
        )
    for i, ratio in enumerate(ratios):
        if ratio < 0:
            raise ValueError(
                f"layer {i}: compress_ratios[{i}]={ratio} is negative; 0 is window-only, 1 and up compress"
            )
        if i >= layers and ratio != 0:
            raise ValueError(f"draft stage {i - layers} is window-only: set compress_ratios[{i}]=0, not {ratio}")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(c, key)
        if list(ids) != sorted(set(ids)):
            raise ValueError(f"{key}={list(ids)} must be ascending without repeats")
        for i in ids:
            if not 0 <= i < layers:
                raise ValueError(f"{key} names layer {i}, but the layers are 0..{layers - 1}")
    for i in c.kv_source_layer_ids:
        if ratios[i] == 0:
            raise ValueError(f"layer {i} is in kv_source_layer_ids but window-only: set compress_ratios[{i}] above 0")
        if i not in c.index_source_layer_ids:
            raise ValueError(f"layer {i} makes KV but selects nothing: add {i} to index_source_layer_ids")
    for i in c.index_source_layer_ids:
        if ratios[i] == 0:
            raise ValueError(
                f"layer {i} is in index_source_layer_ids but window-only: set compress_ratios[{i}] above 0"
            )
    source = -1
    for i in range(layers):
        source = i if i in c.kv_source_layer_ids else source
        if ratios[i] and source < 0:
            raise ValueError(
                f"layer {i} reads ratio-{ratios[i]} KV but no earlier layer makes one: kv_source_layer_ids="
                f"{list(c.kv_source_layer_ids)}. Add a source at or before {i}, or set compress_ratios[{i}]=0."
            )
        if ratios[i] and ratios[i] != ratios[source]:
            raise ValueError(
                f"layer {i} has ratio {ratios[i]} but reads the KV of layer {source}, ratio {ratios[source]}: "
                f"set compress_ratios[{i}]={ratios[source]}, or add {i} to kv_source_layer_ids"
            )
    _check_candidates(c)


def _check_candidates(c: Config) -> None:
    i = c.candidate_source_layer_id
    if i == -1:
        return
    if i not in c.index_source_layer_ids:
        raise ValueError(f"candidate_source_layer_id={i} selects nothing: add {i} to index_source_layer_ids, or set -1")
    if c.candidate_topk_blocks < 1 or c.candidate_block_size < 1:
        raise ValueError("candidate_topk_blocks and candidate_block_size must be at least 1 when candidates are on")
    for j in c.kv_source_layer_ids:
        if j > i and c.compress_ratios[j] != c.compress_ratios[i]:
            raise ValueError(
                f"layer {j} makes ratio-{c.compress_ratios[j]} KV above the candidate source {i}, whose blocks count "
                f"ratio-{c.compress_ratios[i]} slots: give both one ratio, or set candidate_source_layer_id=-1"
            )


def plan(layers: Sequence[LayerSpec]) -> tuple[Node, ...]:
    """Fold a table into repeats, so that a shared value never crosses the border of the body that made it.

    Cut where a compressed KV is born, inside that where a selection is born, and fold equal neighbours at each of the
    three levels. Window layers stay in the unit they sit in. `flatten(plan(t)) == t` for every table.
    """
    units = _split(layers, lambda s: s.mode is Mode.FULL)
    return _join(_fold([_unit(u) for u in units]))


def _unit(layers: Sequence[LayerSpec]) -> tuple[Node, ...]:
    groups = _split(layers, lambda s: s.selects)
    return _join(_fold([_join(_fold([(s,) for s in g])) for g in groups]))


def _split(layers: Sequence[LayerSpec], starts: Callable[[LayerSpec], bool]) -> list[tuple[LayerSpec, ...]]:
    """Cut before every layer that `starts` a part."""
    parts: list[list[LayerSpec]] = []
    for spec in layers:
        if not parts or starts(spec):
            parts.append([])
        parts[-1].append(spec)
    return [tuple(p) for p in parts]


def _join(parts: Sequence[tuple[Node, ...]]) -> tuple[Node, ...]:
    return tuple(node for part in parts for node in part)


def _fold(parts: Sequence[tuple[Node, ...]]) -> list[tuple[Node, ...]]:
    """Replace runs of equal parts, of any period, by a `Repeat`; at each place the period that saves most wins."""
    out, i = [], 0
    while i < len(parts):
        best, period, times = 0, 1, 1
        for p in range(1, (len(parts) - i) // 2 + 1):
            n = 1
            while parts[i + n * p : i + (n + 1) * p] == parts[i : i + p]:
                n += 1
            if p * (n - 1) > best:
                best, period, times = p * (n - 1), p, n
        body = parts[i : i + period]
        out.append(body[0] if times == 1 else (Repeat(times, _join(_fold(body))),))
        i += period * times
    return out


def flatten(nodes: Sequence[Node]) -> tuple[LayerSpec, ...]:
    """The table a plan stands for, with layer ids counted from the first node's."""
    layers = [spec for node in nodes for spec in _expand(node)]
    return tuple(replace(s, first=layers[0].first + i) for i, s in enumerate(layers))


def _expand(node: Node) -> Iterator[LayerSpec]:
    if isinstance(node, LayerSpec):
        yield node
    else:
        for _ in range(node.times):
            for child in node.body:
                yield from _expand(child)


def name(node: Node) -> str:
    """The node's name in the weight tree."""
    return f"layer{node.first}"


def moved(node: Node, by: int) -> Node:
    """The same layers under higher layer ids, and so other names."""
    if isinstance(node, LayerSpec):
        return replace(node, first=node.first + by)
    return replace(node, body=tuple(moved(one, by) for one in node.body))


def places(nodes: Sequence[Node]) -> tuple[Place, ...]:
    """For each layer in order, where its weights are in the tree of the plan."""
    out: list[Place] = []
    for node in nodes:
        if isinstance(node, LayerSpec):
            out.append(Place((name(node),), ()))
            continue
        inner = places(node.body)
        for copy in range(node.times):
            out += [Place((name(node), *p.path), (copy, *p.index)) for p in inner]
    return tuple(out)


# Mode strings. An item is [count]LETTER[ratio][flags] or [count](items); F needs a ratio, X and U take their source's.
# Flags: e = n-gram memory, p = publishes candidate blocks, t = feeds the draft head.
MOST_LAYERS = 10000  # far beyond any model, and still read at once
_ITEM = re.compile(r"\s*(?:(\d*)\s*([SFXU])(\d*)([ept]*)(?![A-Za-z0-9])|(\d*)\s*(\()|(\)))")


def parse(string: str) -> tuple[LayerSpec, ...]:
    """The table of a mode string: `S S F2 U U F1 U X U`, or with counts and groups `2S 3(F2 5U) F1p 3U 4(X 3U)`.

    Raises ValueError that points at the item which cannot be read or is illegal.
    """
    stack: list[tuple[int, list[LayerSpec]]] = [(1, [])]
    at = 0
    while string[at:].strip():
        m = _ITEM.match(string, at)
        if not m:
            raise ValueError(
                f"mode string: cannot read {string[at:].strip().split()[0]!r} in {string!r}; an item is S, F<ratio>, X "
                "or U with flags e, p, t, a count before it, or a group like 3(F2 5U)"
            )
        count, letter, ratio, flags, times, opens, closes = m.groups()
        if int(count or 1) == 0 or int(times or 1) == 0:
            raise ValueError(f"mode string: {m.group().strip()!r} in {string!r} has count 0; leave the item out")
        if opens:
            stack.append((int(times or 1), []))
        elif closes:
            if len(stack) == 1:
                raise ValueError(f"mode string: ) without ( in {string!r}")
            n, items = stack.pop()
            if not items:
                raise ValueError(f"mode string: empty group in {string!r}")
            _room(len(stack[-1][1]) + len(items) * n, string)
            stack[-1][1].extend(items * n)
        else:
            spec = _item(letter, ratio, flags, m.group().strip())
            _room(len(stack[-1][1]) + int(count or 1), string)
            stack[-1][1].extend([spec] * int(count or 1))
        at = m.end()
    if len(stack) > 1:
        raise ValueError(f"mode string: ( without ) in {string!r}")
    return _complete(stack[0][1], string)


def _room(layers: int, string: str) -> None:
    """Refuse a mistyped count before it fills the memory."""
    if layers > MOST_LAYERS:
        raise ValueError(f"mode string {string!r}: {layers} layers, more than {MOST_LAYERS}; correct the counts")


def _item(letter: str, ratio: str, flags: str, item: str) -> LayerSpec:
    mode = Mode(letter)
    if (mode is Mode.FULL) != bool(ratio):
        raise ValueError(f"mode string: {item!r}: F needs a ratio (F1, F2), the other letters take none")
    if mode is Mode.FULL and int(ratio) == 0:
        raise ValueError(f"mode string: {item!r}: a Full layer compresses at least 1 token a slot")
    if len(set(flags)) != len(flags):
        raise ValueError(f"mode string: {item!r} repeats a flag")
    if "p" in flags and mode not in (Mode.FULL, Mode.REINDEX):
        raise ValueError(f"mode string: {item!r}: only F and X select, so only they publish candidates")
    return LayerSpec(
        mode, int(ratio or 0), engram=0 if "e" in flags else None, publishes="p" in flags, tap="t" in flags
    )


def _complete(items: Sequence[LayerSpec], string: str) -> tuple[LayerSpec, ...]:
    """Give each item what depends on its place: layer id, ratio, table index, restriction."""
    if not items:
        raise ValueError("mode string is empty: give at least one layer")
    out: list[LayerSpec] = []
    ratio, tables, published = 0, 0, False
    for i, spec in enumerate(items):
        if spec.mode is Mode.FULL:
            ratio = spec.ratio
        elif spec.mode in (Mode.REINDEX, Mode.REUSE) and ratio == 0:
            raise ValueError(
                f"mode string {string!r}: layer {i} ({spec.mode.value}) has no F before it; put F1 or F2 first"
            )
        if spec.publishes and published:
            raise ValueError(
                f"mode string {string!r}: layer {i} publishes candidates, but an earlier layer does already"
            )
        out.append(
            replace(
                spec,
                ratio=0 if spec.mode is Mode.WINDOW else ratio,
                engram=None if spec.engram is None else tables,
                restricted=published and spec.selects,
                first=i,
            )
        )
        tables += spec.engram is not None
        published |= spec.publishes
    return tuple(out)


def text(layers: Sequence[LayerSpec]) -> str:
    """The mode string of a table, one item a layer; `parse` gives the table back."""
    items = []
    for s in layers:
        flags = "e" * (s.engram is not None) + "p" * s.publishes + "t" * s.tap
        items.append(s.mode.value + (str(s.ratio) if s.mode is Mode.FULL else "") + flags)
    return " ".join(items)


def fields(layers: Sequence[LayerSpec], tables: tuple[int, ...], drafts: int) -> dict[str, Any]:
    """The configuration fields that make `table` return these layers, given the rows of the n-gram tables and the
    number of draft stages. Without layers that use them there are neither tables nor stages.
    """
    ids = lambda keep: tuple(i for i, s in enumerate(layers) if keep(s))  # noqa: E731
    engram = ids(lambda s: s.engram is not None)
    if engram and len(engram) != len(tables):
        raise ValueError(
            f"the mode string puts n-gram memory at layers {list(engram)}, but engram_num_embeddings lists "
            f"{len(tables)} tables: set it, or change the e flags"
        )
    taps = ids(lambda s: s.tap)
    drafts = drafts if taps else 0
    return {
        "num_hidden_layers": len(layers),
        "compress_ratios": tuple(s.ratio for s in layers) + (0,) * drafts,
        "kv_source_layer_ids": ids(lambda s: s.mode is Mode.FULL),
        "index_source_layer_ids": ids(lambda s: s.selects),
        "candidate_source_layer_id": next((i for i, s in enumerate(layers) if s.publishes), -1),
        "engram_layer_ids": engram,
        "engram_num_embeddings": tables if engram else (),
        "num_nextn_predict_layers": drafts,
        "dspark_target_layer_ids": taps,
    }
