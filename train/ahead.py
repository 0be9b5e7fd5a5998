"""Compiles a run's training step for TPUs that are not here, and says what it takes of each and whether it fits.

libtpu compiles for a topology by name, on a machine without a TPU; nothing is allocated and nothing runs.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from rich.console import Console

from dsflash_jax import layout_sheet, vision
from dsflash_jax.config import need
from dsflash_jax.flow import Batch
from dsflash_jax.sharding import AXES
from train import data, placement, program, step
from train.config import Run
from train.program import Collective

GIB = 2**30
# Topologies of each kind, by chips; those with a third axis of 1 or with two axes are one board or one layer.
SIZES = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "tpu7x": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}
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
    parts: int
    rows: int  # of the batch
    seq_len: int
    hbm: int  # bytes that a program may use
    arguments: int  # state and batch; the new state takes their place
    temporaries: int
    output: int  # beyond what takes the arguments' place
    program: int  # the code itself
    total: int
    flops: int  # of matrix products, all devices, a step
    tokens: int  # a step
    stablehlo_lines: int
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
        if self.arguments > self.hbm * BREATH:
            return f"{over:.1f} GiB too much, most of it state: take more devices along fsdp, expert or context"
        return (f"{over:.1f} GiB too much, most of it temporaries: raise accumulate={self.parts}, or split tokens over "
                "more devices with layout.context or layout.expert_splits=tokens")  # fmt: skip


def topology(name: str) -> tuple[str, list[Any]]:
    """The kind and the devices of "v5p:4x8x8".

    Raises ImportError without libtpu, ValueError for a name that it does not know.
    """
    kind, _, size = name.partition(":")
    need(kind in SIZES and re.fullmatch(r"\d+(x\d+){1,2}", size) is not None,
         f"topology {name!r} is not one of {', '.join(f'{k}:{s[-1]}' for k, s in SIZES.items())} or smaller: write the "
         "kind, a colon and the chips along each axis")  # fmt: skip
    # Ask no service what machine this is, and let several processes compile.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if find_spec("libtpu") is None:
        raise ImportError(
            'compiling for a TPU needs libtpu, which the extra [aot] installs: pip install "dsflash_jax[aot]"'
        )
    try:
        return kind, list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except Exception as error:
        raise ValueError(f"libtpu has no topology {name!r} ({str(error).splitlines()[0][:120]})") from error


def compile_step(run: Run, name: str, quick: bool = True) -> Report:
    """Compile the training step of a run for a topology and report on it.

    A program that does not fit is reported on, too, as far as the compiler's message goes. `quick` keeps reads at
    computed places on the tensor cores, which compiles faster than a program for the sparse cores and takes as much
    memory. Raises ValueError if the layout does not suit the topology.
    """
    kind, devices = topology(name)
    place = placement.place(run, devices)
    state, batch = place.like(run), abstract_batch(run, place)
    begin = time.perf_counter()
    traced = jax.jit(place.step(run), donate_argnums=0, **place.out_shardings).trace(state, batch)
    lowered = traced.lower()
    lowered_at = time.perf_counter()
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if quick:
            options["xla_tpu_offload_gather_to_sparsecore"] = False
        try:
            compiled = lowered.compile(compiler_options=options)
            memory = _memory(compiled.memory_analysis())
        except jax.errors.JaxRuntimeError as error:
            memory = _excess(str(error), state, batch)
        # The text comes from a file: this compiler is newer than the parser of the installed jaxlib.
        texts = [p.read_text() for p in Path(folder).glob("*after_optimizations.txt")]
    text = max(texts, key=len, default="")
    return Report(
        topology=name, devices=len(devices), cores=CORES.get(kind, 1),
        layout={a: getattr(run.layout, a) for a in (*AXES, "expert_splits", "capacity")}, parts=run.accumulate,
        rows=run.data.batch_size, seq_len=run.data.seq_len, hbm=int(HBM[kind] * GIB), **memory,
        flops=program.flops(traced.jaxpr), tokens=run.data.batch_size * run.data.seq_len,
        stablehlo_lines=lowered.as_text().count("\n"), lower_seconds=round(lowered_at - begin, 1),
        compile_seconds=round(time.perf_counter() - lowered_at, 1), collectives=tuple(program.collectives(text)),
        largest=dict(list(program.arrays(text).items())[:SHOWN]), crossed=tuple(_crossed(run, text)),
        versions=f"jax {jax.__version__}, libtpu {version('libtpu')}",
    )  # fmt: skip


def _crossed(run: Run, text: str) -> list[str]:
    """What `program.crossed` says of the tokens that a device has of a part."""
    c, at, length = run.model, run.layout, run.data.seq_len
    tokens = run.data.batch_size // run.accumulate * length // at.size((*at.rows, *at.tokens))
    slots = [length // spec.ratio for spec in c.table if spec.ratio]
    tables = [(c.vocab_size, c.hidden_size), (c.hidden_size, c.vocab_size)]
    return program.crossed(text, tokens, {*slots, c.vocab_size}, tables)


def abstract_batch(run: Run, place: placement.Placement) -> Batch:
    """Shapes and places of a batch, in parts if the run has them; for those of images the corpus is read."""
    c, rows = run.model, run.data.batch_size // run.accumulate
    whole = lambda dtype, *more: jax.ShapeDtypeStruct((rows, run.data.seq_len, *more), dtype)  # noqa: E731
    tokens, segments, positions, targets = (whole(jnp.int32) for _ in range(4))
    heads = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    table = whole(jnp.int32, len(c.engram_layer_ids), heads) if c.engram_layer_ids else None
    images = None
    if c.vision is not None:
        empty = vision.collate([[]], c, run.data.seq_len, *data.load(run.data, model=c).room)
        images = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), empty)
    return place.abstract(Batch(tokens, segments, positions, targets, whole(jnp.float32), table, images))


def _memory(m: Any) -> dict[str, int]:
    output = m.output_size_in_bytes - m.alias_size_in_bytes
    made = {"arguments": m.argument_size_in_bytes, "temporaries": m.temp_size_in_bytes, "output": output,
            "program": m.generated_code_size_in_bytes}  # fmt: skip
    return made | {"total": sum(made.values())}


def _excess(message: str, state: Any, batch: Any) -> dict[str, int]:
    """Memory of a program that is too large, from the compiler's message. Raises ValueError for any other message."""
    used = re.search(r"Used ([\d.]+)([GM]) of ([\d.]+)([GM]) hbm", message)
    if used is None:
        raise ValueError(f"the compiler refused the program: {message.strip()[:500]}")
    total = int(float(used[1]) * (GIB if used[2] == "G" else 2**20))
    of = lambda a: prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize  # noqa: E731
    arguments = sum(of(a) for a in jax.tree.leaves((state, batch)))
    return {"arguments": arguments, "temporaries": total - arguments, "output": 0, "program": 0, "total": total}


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
    need(kind in SIZES, f"--search takes a kind of TPU, one of {', '.join(SIZES)}, got {kind!r}")
    state = sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(lambda: step.initial(run))))
    for size in SIZES[kind]:
        name, devices = f"{kind}:{size}", prod(map(int, size.split("x"))) * CORES.get(kind, 1)
        share = state / devices / GIB
        if share > HBM[kind] * BREATH:
            yield run, name, f"the state alone takes {share:.1f} GiB of {HBM[kind]:g} a device"
            continue
        try:
            laid = spread(run, devices)
            report = compile_step(laid, name)
        except ValueError as error:
            yield run, name, str(error)
            continue
        yield laid, name, report
        if report.fits:
            return


def main(run: Run, name: str, searching: bool = False, console: Console | None = None) -> dict[str, Any]:
    """What `dsflash compile` does; returns the last report as plain values.

    Raises ValueError or ImportError for what cannot be compiled, and if a search ends without a topology that fits.
    """
    console = console or Console()
    if not searching:
        layout_sheet.show(step.declare(run.setup), run.layout, console)
        report = compile_step(run, name)
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
        raise ValueError(f"no listed topology of {name} holds this run: {', '.join(SIZES[name])}")
    return as_json(tried)


def as_json(report: Report) -> dict[str, Any]:
    """A report as plain values."""
    return asdict(report) | {"fits": report.fits, "moved": report.moved, "advice": report.advice()}


def show(report: Report, console: Console) -> None:
    """Print a report."""
    gib = lambda n: f"{n / GIB:,.2f} GiB"  # noqa: E731
    axes = ", ".join(f"{axis} {n}" for axis, n in report.layout.items() if axis in AXES and n > 1)
    per = report.rows // report.parts
    lines = [
        ("devices", f"{report.devices:,}, {report.cores} a chip: {axes}"),
        ("batch", f"{report.rows:,} rows of {report.seq_len:,} tokens in {report.parts} parts of {per}"),
        ("arguments", f"{gib(report.arguments)}: state and batch"),
        *((kind, gib(getattr(report, kind))) for kind in ("temporaries", "output", "program")),
        ("in all", f"{gib(report.total)} of {gib(report.hbm)} a device"),
        ("FLOPs", f"{report.flops:.4g} a step, {report.flops / report.tokens:.4g} a token"),
        ("collectives", f"{gib(report.moved)} to a device a step"),
        ("StableHLO", f"{report.stablehlo_lines:,} lines"),
        ("time", f"traced and lowered in {report.lower_seconds:g} s, compiled in {report.compile_seconds:g} s"),
    ]
    layout_sheet.print_lines(console, f"One step on {report.topology}", lines)
    traffic = [
        (c.kind, c.shape, f"{c.times:,} times a step", gib(c.times * c.bytes)) for c in report.collectives[:SHOWN]
    ]
    if traffic:
        layout_sheet.print_lines(console, "The largest traffic", traffic)
    console.print(f"the largest arrays: {', '.join(report.largest)}", highlight=False, markup=False, soft_wrap=True)
    crossed = ", ".join(report.crossed) or "none"
    console.print(f"arrays of tokens by slots, or by vocabulary: {crossed}", highlight=False, markup=False)
    console.print("fits" if report.fits else f"does not fit: {report.advice()}", highlight=False)
