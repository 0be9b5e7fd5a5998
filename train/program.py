"""Reads programs: the FLOPs of a traced one, the collectives and the largest arrays of a compiled one.

Compilers count a loop's body once; here it counts as often as it runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
BITS = re.compile(r"\d+")
ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d+[a-z0-9]*)\[([\d,]*)\]")
HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\((.*)$")
CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=\{?%?([\w.\-, %]+)\}?"
)


def flops(jaxpr: Any, times: int = 1) -> int:
    """Multiplications and additions of all matrix products of a traced program, over all devices.

    `jaxpr` is that of `jax.make_jaxpr` or of `jax.jit(f).trace(...)`. Of a conditional the costliest branch counts, of
    a loop without a fixed number of turns one turn.
    """
    total = 0
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            ((contracted, _), _) = params["dimension_numbers"]
            depth = prod(equation.invars[0].aval.shape[i] for i in contracted)
            total += 2 * times * depth * prod(equation.outvars[0].aval.shape)
        elif name.startswith("ragged_dot"):
            total += 2 * times * _ragged(*(v.aval.shape for v in (*equation.invars[:2], equation.outvars[0])))
        inner = [flops(sub, times) for sub in _inside(params)]
        if name == "scan":
            inner = [n * params["length"] for n in inner]
        elif name == "shard_map":
            inner = [n * params["mesh"].size for n in inner]
        elif name == "cond":
            inner = [max(inner, default=0)]
        total += sum(inner)
    return total


def _ragged(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> int:
    """Products of a grouped product, every row in one group: [R, I] x [E, I, O] or [R, I] x [R, O] -> [E, I, O]."""
    return prod(left) * (right[-1] if len(out) == 3 else out[-1])


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """The programs inside an operation."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                yield one


@dataclass(frozen=True)
class Collective:
    """One kind of collective of one array shape in a compiled program."""

    kind: str  # one of COLLECTIVES
    shape: str  # of the result on a device, as dtype[shape]
    times: int  # a run of the program
    bytes: int  # of the result on a device, one time


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, from its HLO text, the largest traffic first."""
    found: Counter[tuple[str, str]] = Counter()
    for times, shape, operation in _operations(text):
        kind = operation.removesuffix("-start")
        if kind in COLLECTIVES:
            results = ARRAY.findall(shape)
            if kind != operation and kind != "all-reduce":  # a start carries operands and results, and may count
                results = [a for a in results if a[1] or a[0] not in ("u32", "s32")]
                results = results[len(results) // 2 :]
            for dtype, size in results:
                found[kind, f"{dtype}[{size}]"] += times
    made = [Collective(kind, s, n, array_bytes(*ARRAY.findall(s)[0])) for (kind, s), n in found.items()]
    return sorted(made, key=lambda c: -c.times * c.bytes)


def array_bytes(dtype: str, shape: str) -> int:
    """Bytes of an array as HLO writes it: ("bf16", "2,3") has 12."""
    bits = 8 if dtype == "pred" else int(BITS.findall(dtype)[0])
    return prod(int(n) for n in shape.split(",") if n) * bits // 8


def arrays(text: str) -> dict[str, int]:
    """Every array of a compiled program as dtype[shape] with its bytes, the largest first."""
    named = {f"{dtype}[{shape}]": array_bytes(dtype, shape) for dtype, shape in set(ARRAY.findall(text))}
    return dict(sorted(named.items(), key=lambda item: -item[1]))


def crossed(text: str, tokens: int, others: Iterable[int], weights: Iterable[tuple[int, ...]] = ()) -> list[str]:
    """Arrays of a compiled program that hold `tokens` or more entries for each of some number in `others`.

    Those are what a program must not make: tokens by slots, or tokens by vocabulary. Shapes of `weights` are left out,
    and axes of 1 do not count.
    """
    known, found = set(weights), []
    for name in arrays(text):
        shape = tuple(int(n) for n in ARRAY.findall(name)[0][1].split(",") if n not in ("", "1"))
        if shape not in known and any(n in shape and prod(shape) >= n * tokens for n in others):
            found.append(name)
    return found


def _operations(text: str) -> Iterator[tuple[int, str, str]]:
    """(times it runs, result, operation) of everything that runs."""
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            name = head[1]
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name and (operation := OPERATION.match(line)):
            bodies[name].append((operation[1], operation[2], operation[3]))
    times: Counter[str] = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for _, operation, rest in bodies.get(name, ()):
            turns = _turns(bodies, rest) if operation == "while" else 1
            for called in CALLED.findall(rest):
                for one in called.replace("%", "").split(", "):
                    if one in bodies:
                        visit(one, count * turns)

    visit(entry, 1)
    for name, operations in bodies.items():
        if times[name]:
            yield from ((times[name], result, kind) for result, kind, _ in operations)


def _turns(bodies: dict[str, list[tuple[str, str, str]]], rest: str) -> int:
    """How often a while loop runs: what the compiler noted, or the constant its counter is compared with; else 1."""
    if noted := re.search(r"known_trip_count[^\d]*(\d+)", rest):
        return int(noted[1])
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    constants = [
        int(value[1])
        for result, operation, inside in (bodies.get(condition[1], ()) if condition else ())
        if operation == "constant" and result.startswith("s32[]") and (value := re.match(r"(\d+)\)", inside))
    ]
    return max(constants, default=1)
