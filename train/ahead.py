"""Compiles a run's training or decode step for TPUs that are not here, and says what it takes and whether it fits.

libtpu compiles for a topology by name, on a machine without a TPU; nothing is allocated and nothing runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from math import prod
from typing import Any

import jax
from rich.console import Console

from dsflash_jax import checkpoint, layout_sheet
from dsflash_jax.config import need
from dsflash_jax.layout_sheet import GIB
from dsflash_jax.sharding import AXES
from train import compiler, decode_ahead, program, step
from train.config import Run
from train.program import Collective

# What the compiler lets a program use of one device's memory, by its own message for a program that is too large.
HBM = {"v5e": 15.75, "v5p": 95.74, "v6e": 31.25, "tpu7x": 94.75}
CORES = {"tpu7x": 2}  # devices of a chip, where not one
TOKENS = 2048  # of a part on a device: `spread` gives each about so many
SHOWN = 8  # collectives and arrays that a report prints
BREATH = 0.6  # share of a device that the state may take for `search` to try a topology


@dataclass(frozen=True)
class Report:
    """What a compiled step takes; bytes are of one device, and there are `cores` devices on a chip."""

    topology: str
    devices: int
    cores: int
    layout: dict[str, Any]
    decodes: bool  # a token of each row; else it trains
    parts: int
    rows: int  # of the batch
    seq_len: int  # tokens of a row, or those that its cache has room for
    hbm: int  # bytes that a program may use
    held: dict[str, int]  # what it is given, without the lanes that a TPU fills up
    arguments: int  # the same with them; the new state, or the new cache, takes their place
    temporaries: int
    output: int  # beyond what takes the arguments' place
    program: int  # the code itself
    total: int
    flops: int  # of matrix products, all devices, a step
    tokens: int  # a step
    stablehlo_lines: int
    code: bool  # whether machine code was made, too
    lower_seconds: float
    compile_seconds: float
    collectives: tuple[Collective, ...]  # a step, on each device
    largest: dict[str, int]  # arrays of the program with their bytes; the eight largest
    crossed: tuple[str, ...]  # arrays of all tokens of a device by all slots of a row, or by the vocabulary
    versions: str

    @property
    def fits(self) -> bool:
        """Whether a device's memory holds it."""
        return self.total <= self.hbm

    @property
    def moved(self) -> int:
        """Bytes that collectives bring to a device in a step."""
        return sum(c.times * c.bytes for c in self.collectives)

    def advice(self) -> str:
        """What to change if it does not fit, else nothing."""
        if self.fits:
            return ""
        over = (self.total - self.hbm) / GIB
        if self.decodes:
            return (f"{over:.1f} GiB too much: take more devices along expert, fsdp or tensor, fewer --rows, a shorter "
                    f"--seq-len, or split smaller matrices, too, than layout.whole={self.layout['whole']}")  # fmt: skip
        if self.arguments > self.hbm * BREATH:
            return f"{over:.1f} GiB too much, most of it state: take more devices along fsdp, expert or context"
        return (f"{over:.1f} GiB too much, most of it temporaries: raise accumulate={self.parts}, or split tokens over "
                "more devices with layout.context or layout.expert_splits=tokens")  # fmt: skip


def compile_step(run: Run, name: str, code: bool = True, rows: int | None = None) -> Report:
    """Compile the training step of a run for a topology and report on it; or, of `rows` rows, the decode step.

    With 0 rows these are as many as the layout has parts of rows; each has a cache with room for `data.seq_len` tokens.

    Without `code` the compiler is stopped when it has laid out the memory, before it makes machine code of it, which
    takes most of the time and changes nothing of the rest. A program that does not fit is reported on, too, as far as
    the compiler's message goes. Raises ImportError without libtpu, ValueError if the layout does not suit the topology.
    """
    kind, size = compiler.parse(name)
    rows = None if rows is None else decode_ahead.rows_of(run, rows)
    made = compiler.compile_step(run, name, code, rows)
    batch, length = run.data.batch_size, run.data.seq_len
    crossed = _crossed(run, made.text) if rows is None else decode_ahead.crossed(run, rows, made.shapes, made.text)
    return Report(
        topology=name, devices=prod(size) * CORES.get(kind, 1), cores=CORES.get(kind, 1),
        layout={a: getattr(run.layout, a) for a in (*AXES, "expert_splits", "capacity", "whole")},
        decodes=rows is not None, parts=run.accumulate if rows is None else 1, rows=rows or batch, seq_len=length,
        hbm=int(HBM[kind] * GIB), held=made.held, **made.memory, flops=made.flops, tokens=rows or batch * length,
        stablehlo_lines=made.stablehlo_lines, code=code,
        lower_seconds=made.lower_seconds, compile_seconds=made.compile_seconds,
        collectives=tuple(program.collectives(made.text)),
        largest=dict(list(program.arrays(made.text).items())[:SHOWN]), crossed=tuple(crossed),
        versions=f"jax {jax.__version__}, libtpu {version('libtpu')}",
    )  # fmt: skip


def _crossed(run: Run, text: str) -> list[str]:
    """What `program.crossed` says of the tokens that a device has of a part."""
    c, at, length = run.model, run.layout, run.data.seq_len
    tokens = run.data.batch_size // run.accumulate * length // at.size((*at.rows, *at.tokens))
    slots = [length // spec.ratio for spec in c.table if spec.ratio]
    tables = [(c.vocab_size, c.hidden_size), (c.hidden_size, c.vocab_size)]
    return program.crossed(text, tokens, {*slots, c.vocab_size}, tables)


def spread(run: Run, devices: int) -> Run:
    """The run over so many devices: as many rows in a part as give a device about TOKENS of them.

    The axes expert and tensor stay; rows go over fsdp, and the tokens of a row over context. Raises ValueError if the
    number does not divide.
    """
    at = run.layout
    kept = at.expert * at.tensor
    need(devices % kept == 0, f"{devices} devices do not divide by expert x tensor = {kept}")
    rest, batch = devices // kept, run.data.batch_size
    over = at.expert if at.expert_splits == "tokens" else 1  # devices that share a row besides those of context
    rows = max(1, TOKENS * devices // at.tensor // run.data.seq_len)
    fsdp = max(n for n in range(1, rest + 1) if rest % n == 0 and batch % n == 0 and n <= rows)
    need(run.data.seq_len % (over * rest // fsdp) == 0, f"rows of {run.data.seq_len} tokens do not divide over them")
    layout = replace(at, data=1, fsdp=fsdp, context=rest // fsdp)
    return replace(run, layout=layout, accumulate=batch // layout.size(layout.rows))


def search(run: Run, kind: str) -> Iterator[tuple[Run, str, Report | str]]:
    """Try the topologies of a kind from the smallest, until one fits.

    Yields (run as laid out there, topology, its report, or the reason why it was not compiled).
    """
    need(kind in compiler.SIZES, f"--search takes a kind of TPU, one of {', '.join(compiler.SIZES)}, got {kind!r}")
    state = sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(lambda: step.initial(run))))
    for size in compiler.SIZES[kind]:
        name, devices = f"{kind}:{size}", prod(map(int, size.split("x"))) * CORES.get(kind, 1)
        share = state / devices / GIB
        if share > HBM[kind] * BREATH:
            yield run, name, f"the state alone takes {share:.1f} GiB of {HBM[kind]:g} a device"
            continue
        try:
            laid = spread(run, devices)
            report = compile_step(laid, name, code=False)
        except ValueError as error:
            yield run, name, str(error)
            continue
        yield laid, name, report
        if report.fits:
            return


def main(
    run: Run,
    name: str,
    searching: bool = False,
    code: bool = True,
    rows: int | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """What `dsflash compile` does; returns the last report as plain values. `rows` as in `compile_step`.

    Raises ValueError or ImportError for what cannot be compiled, and if a search ends without a topology that fits.
    """
    console = console or Console()
    need(rows is None or not searching, "--search lays out training steps: with --decode give a topology and a layout")
    if not searching:
        compiler.parse(name)
        if rows is None:
            layout_sheet.show(step.declare(run.setup), run.layout, console)
        else:
            rows = decode_ahead.rows_of(run, rows)
            layout_sheet.show(checkpoint.declare(run.model), run.layout, console, run.compute.dtype)
        report = compile_step(run, name, code, rows)
        show(report, console)
        return as_json(report)
    tried = None
    for laid, size, found in search(run, name):
        if isinstance(found, str):
            console.print(f"{size}: {found}", highlight=False)
            continue
        layout_sheet.show(step.declare(laid.setup), laid.layout, console)
        show(found, console)
        tried = found
    if tried is None or not tried.fits:
        raise ValueError(f"no listed topology of {name} holds this run: {', '.join(compiler.SIZES[name])}")
    return as_json(tried)


def as_json(report: Report) -> dict[str, Any]:
    """A report as plain values."""
    return asdict(report) | {"fits": report.fits, "moved": report.moved, "advice": report.advice()}


def show(report: Report, console: Console) -> None:
    """Print a report."""
    gib = lambda n: f"{n / GIB:,.2f} GiB"  # noqa: E731
    axes = ", ".join(f"{axis} {n}" for axis, n in report.layout.items() if axis in AXES and n > 1)
    per = report.rows // report.parts
    held = [f"{name} {gib(n)}" for name, n in report.held.items() if n > report.arguments / 1000]
    training = f"{report.rows:,} rows of {report.seq_len:,} tokens in {report.parts} parts of {per}"
    decoding = f"a token each of {report.rows:,} rows, in caches with room for {report.seq_len:,}"
    lines = [
        ("devices", f"{report.devices:,}, {report.cores} a chip: {axes}"),
        ("batch", decoding if report.decodes else training),
        ("arguments", f"{gib(report.arguments)}: {', '.join(held)}"),
        *((kind, gib(getattr(report, kind))) for kind in ("temporaries", "output", "program")),
        ("in all", f"{gib(report.total)} of {gib(report.hbm)} a device"),
        ("FLOPs", f"{report.flops:.4g} a step, {report.flops / report.tokens:.4g} a token"),
        ("collectives", f"{gib(report.moved)} to a device a step"),
        ("StableHLO", f"{report.stablehlo_lines:,} lines"),
        (
            "time",
            f"traced and lowered in {report.lower_seconds:g} s, compiled in {report.compile_seconds:g} s"
            + ("" if report.code else " without machine code"),
        ),
    ]
    layout_sheet.print_lines(console, f"One step on {report.topology}", lines)
    traffic = [
        (c.kind, c.shape, f"{c.times:,} times a step", gib(c.times * c.bytes)) for c in report.collectives[:SHOWN]
    ]
    if traffic:
        layout_sheet.print_lines(console, "The largest traffic", traffic)
    console.print(f"the largest arrays: {', '.join(report.largest)}", highlight=False, markup=False, soft_wrap=True)
    crossed = ", ".join(report.crossed) or "none"
    others = "by slots" if report.decodes else "by slots, or by vocabulary"
    console.print(f"arrays of tokens {others}: {crossed}", highlight=False, markup=False)
    console.print("fits" if report.fits else f"does not fit: {report.advice()}", highlight=False)
