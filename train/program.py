"""Reads programs: the FLOPs of a traced or compiled one, the collectives and the largest arrays of a compiled one.

Compilers count a loop's body once; here it counts as often as it runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "ragged-all-to-all", "reduce-scatter")
BITS = re.compile(r"\d+")
ARRAY = re.compile(r"\b(pred|bf16|[a-z]\d+[a-z0-9]*)\[([\d,]*)\]")
HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=\{?%?([\w.\-, %]+)\}?"
)
NAME = re.compile(r'op_name="([^"]*)"')
# What a loop and a conditional are called by JAX and by HLO. XLA (jaxlib 0.12) names what it makes inside them by them.
LOOPS = {"while": "while", "cond": "conditional"}
REST = "other"  # the part of what no pattern finds
# Compiler options under which a CPU's program keeps every product; the pass that is left out rewrites some.
KEPT = {"xla_disable_hlo_passes": "algsimp"}


def flops(jaxpr: Any, times: int = 1) -> int:
    """Multiplications and additions of all matrix products of a traced program, over all devices.

    `jaxpr` is that of `jax.make_jaxpr` or of `jax.jit(f).trace(...)`. Of a conditional the costliest branch counts, of
    a loop without a fixed number of turns one turn.
    """
    return sum(flops_by_scope(jaxpr, times).values())


def flops_by_scope(jaxpr: Any, times: int = 1) -> Counter[str]:
    """`flops` by the path of named scopes around each product, "attn/window"; "" outside all of them."""
    total: Counter[str] = Counter()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name, params, scope = equation.primitive.name, equation.params, str(equation.source_info.name_stack)
        if name == "dot_general":
            ((contracted, _), _) = params["dimension_numbers"]
            depth = prod(equation.invars[0].aval.shape[i] for i in contracted)
            total[scope] += 2 * times * depth * prod(equation.outvars[0].aval.shape)
        elif name.startswith("ragged_dot"):
            shapes = (v.aval.shape for v in (*equation.invars[:2], equation.outvars[0]))
            total[scope] += 2 * times * _ragged(*shapes)
        turns = params["length"] if name == "scan" else params["mesh"].size if name == "shard_map" else 1
        inner = [flops_by_scope(sub, times * turns) for sub in _inside(params)]
        for one in _costliest(inner) if name == "cond" else inner:
            for below, count in one.items():
                total[_join(scope, below)] += count
    return total


def _costliest(branches: list[Counter[str]]) -> list[Counter[str]]:
    return [max(branches, key=Counter.total)] if branches else []


def _join(scope: str, below: str) -> str:
    return f"{scope}/{below}" if scope and below else scope or below


def _ragged(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...]) -> int:
    """Products of a grouped product, every row in one group: [R, I] x [E, I, O] or [R, I] x [R, O] -> [E, I, O]."""
    return prod(left) * (right[-1] if len(out) == 3 else out[-1])


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """The programs inside an operation."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns") or hasattr(one, "jaxpr"):
                yield one


def products(text: str, turns: int = 1) -> Counter[str]:
    """FLOPs of the matrix products of a program in HLO by the path of scopes around each.

    `text` is what a compiler is given, `lowered.as_text("hlo", debug_info=True)`, or what it made,
    `compiled.as_text()`. Paths are alike in both, "jit(f)/attn/while/body/closed_call/window": named scopes, and the
    functions and loops between them. Of a conditional the costliest branch counts; a loop whose number of turns the
    program does not say has `turns`. A compiled program is that of one device.

    For parts, take the first text: it has every product with its name. XLA's CPU compiler (jaxlib 0.10.2)
    - makes a product of two vectors a multiplication and a sum, and one over an axis of 1 a multiplication, so these
      are missing in the second text, unless it was compiled with the options `KEPT`;
    - makes products of one row, such as all those of one token, and of more than two axes anew, without a name of
      their own. They count under the scope of what reads their result first, if that has one, which may be the next;
    - moves products that no turn changes out of their loop, and drops a branch that is never taken.
    So the second text tells what the first cannot: that in sum nothing was added or lost.

    A grouped product counts each row once where the program has one (TPU); elsewhere it is lowered to a product with
    all groups, and counts as that. A convolution counts its whole kernel at every place, padding included. Calls of
    libraries, which compilers for GPUs make of products, are not counted: there, too, take the first text.
    """
    bodies, entry = _bodies(text)
    relative = "is_scheduled=true" not in text.partition("\n")[0]  # functions not yet inlined name from their caller on

    @cache
    def count(name: str) -> Counter[str]:
        body, total = bodies[name], Counter[str]()
        for operation in body.values():
            if flops := _product(body, operation):
                total[_scope(bodies, body, operation)] += flops
            called = [count(one) for one in _called(operation) if one in bodies]
            times = _turns(bodies, operation.rest, turns) if operation.kind == "while" else 1
            for one in _costliest(called) if operation.kind == "conditional" else called:
                found = NAME.search(operation.rest)
                prefix = found[1] if relative and operation.kind == "call" and found else ""
                for below, flops in one.items():
                    nameless = operation.kind == "fusion" and not below
                    total[_scope(bodies, body, operation) if nameless else _join(prefix, below)] += times * flops
        return total

    return +count(entry)


def by_part(counted: Mapping[str, int], parts: Mapping[str, str]) -> dict[str, int]:
    """Sums over scopes: a scope belongs to the first part whose pattern is found in it, to "other" if none is."""
    out = dict.fromkeys((*parts, REST), 0)
    for scope, count in counted.items():
        out[next((part for part, pattern in parts.items() if re.search(pattern, scope)), REST)] += count
    return out


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


class Operation(NamedTuple):
    """One line of a program in HLO."""

    name: str
    result: str  # its type
    kind: str
    rest: str  # operands, attributes, metadata


Body = dict[str, Operation]  # by name


def _bodies(text: str) -> tuple[dict[str, Body], str]:
    """The computations of a program by name, and the name of the first to run."""
    bodies: dict[str, Body] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            name = head[1]
            bodies[name] = {}
            entry = name if line.startswith("ENTRY") else entry
        elif name and (operation := OPERATION.match(line)):
            bodies[name][operation[1]] = Operation(*operation.groups())
    return bodies, entry


def _called(operation: Operation) -> list[str]:
    return [one for called in CALLED.findall(operation.rest) for one in called.replace("%", "").split(", ")]


def _operations(text: str) -> Iterator[tuple[int, str, str]]:
    """(times it runs, result, operation) of everything that runs; every branch of a conditional runs once."""
    bodies, entry = _bodies(text)
    times: Counter[str] = Counter()

    def visit(name: str, count: int) -> None:
        times[name] += count
        for operation in bodies.get(name, {}).values():
            turns = _turns(bodies, operation.rest) if operation.kind == "while" else 1
            for one in _called(operation):
                if one in bodies:
                    visit(one, count * turns)

    visit(entry, 1)
    for name, body in bodies.items():
        if times[name]:
            yield from ((times[name], o.result, o.kind) for o in body.values())


def _turns(bodies: dict[str, Body], rest: str, unknown: int = 1) -> int:
    """How often a while loop runs: what the compiler noted, or the constant its counter is compared with."""
    if noted := re.search(r"known_trip_count[^\d]*(\d+)", rest):
        return int(noted[1])
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    constants = [
        int(value[1])
        for o in (bodies.get(condition[1], {}) if condition else {}).values()
        if o.kind == "constant" and o.result.startswith("s32[]") and (value := re.match(r"(\d+)\)", o.rest))
    ]
    return max(constants, default=unknown)


def _operands(operation: Operation) -> list[str]:
    return operation.rest.partition(")")[0].replace("%", "").split(", ")


def _product(body: Body, operation: Operation) -> int:
    """FLOPs of an operation that is a matrix product, else 0."""
    if operation.kind not in ("dot", "ragged-dot", "convolution"):
        return 0
    left, right = (_shape(body[name]) for name in _operands(operation)[:2])
    out = _shape(operation)
    if operation.kind == "ragged-dot":
        return 2 * _ragged(left, right, out)
    if operation.kind == "convolution":  # a kernel has one output axis; its other axes are summed over
        labels = re.search(r"dim_labels=\w+_(\w+)->", operation.rest)
        assert labels is not None, operation
        return 2 * prod(out) * prod(right) // right[labels[1].index("o")]
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", operation.rest)
    return 2 * prod(out) * prod(left[int(i)] for i in (axes[1] if axes else "").split(",") if i)


def _shape(operation: Operation) -> tuple[int, ...]:
    return tuple(int(n) for n in ARRAY.findall(operation.result)[0][1].split(",") if n)


def _scope(bodies: dict[str, Body], body: Body, operation: Operation) -> str:
    """Path of the scopes around an operation; of one without a name, of the first named one that reads its result."""
    found = NAME.search(operation.rest)
    around, _, own = found[1].rpartition("/") if found else ("", "", "")
    borrowed = own in LOOPS and operation.kind not in LOOPS.values()
    if found and not borrowed:
        return around
    for user in body.values():
        operands = _operands(user)
        if operation.name not in operands:
            continue
        reads = user, body
        if user.kind == "fusion":
            inside, place = bodies[_called(user)[0]], operands.index(operation.name)
            reads = next(o for o in inside.values() if o.kind == "parameter" and o.rest.startswith(f"{place})")), inside
        if scope := _scope(bodies, reads[1], reads[0]):
            return scope
    return around
