"""Benchmarks, one function a kind. `layouts`: one run on one device and on several, loss by loss and step by step."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import jax
import numpy as np
from rich.console import Console

from dsflash_jax.config import need
from dsflash_jax.flow import Batch
from dsflash_jax.overrides import override
from dsflash_jax.sharding import AXES, Layout
from train import data, main
from train.config import Run
from train.placement import Placement, place
from train.step import TrainState

WARM = 2  # first steps whose time does not count: buffers, autotuning and channels between devices are made in them
# Largest relative difference of a loss. Sums in another order differ in the last bits, float32 has 24 and bfloat16 8.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}
ALONE = "one device"
LINE = "{:<{width}} {:>10} {:>10} {:>9} {:>8} {:>9} {:>9}"


@dataclass(frozen=True)
class Measured:
    """Some steps of a run on one layout."""

    layout: str  # as it was asked for, or ALONE
    devices: int
    losses: tuple[float, ...]  # of each step
    refused: tuple[int, ...]  # steps, from 1, that changed nothing: a number not finite, or a row without a place
    milliseconds: float  # median of a step
    compile_seconds: float
    program: int  # bytes on a device that the compiled step takes: arguments, temporaries, and results of their own
    peaks: tuple[int | None, ...]  # most bytes in use on each device; None if unknown, see `_peaks`

    def difference(self, alone: Measured) -> float:
        """The largest difference of a step's loss to one device, relative to that."""
        got, want = np.array(self.losses), np.array(alone.losses)
        return float(np.max(np.abs(got - want) / np.abs(want)))


def layouts(
    run: Run, words: Sequence[str], steps: int = 10, tolerance: float | None = None, console: Console | None = None
) -> dict[str, Any]:
    """Train a run on one device and on each layout, from the same weights on the same batches; what came of it.

    A layout is `axis=N,...`: axes of `run.layout` that it does not name are 1, its other fields stay. It takes the
    first devices there are. `passed` is true if no loss differs from one device by more than `tolerance` (by default
    TOLERANCE of the run's dtype), relative to it, and every step was kept. Nothing is written. Raises ValueError,
    before anything is trained, for a layout that is none, that takes more devices than there are, or that cannot split
    the run.
    """
    need(bool(words), "--layouts names nothing to compare with one device: give some, for example fsdp=2 expert=2")
    need(steps > WARM, f"--steps must be more than the {WARM} whose time does not count, got {steps}")
    tolerance = TOLERANCE[run.compute.dtype] if tolerance is None else tolerance
    main.check_devices()
    runs = {ALONE: replace(run, layout=_alone(run.layout))}
    runs |= {word: replace(run, layout=read_layout(word, run.layout)) for word in words}
    some = lambda n: jax.devices()[:n] if n > 1 else None  # noqa: E731
    places = {word: place(laid, some(laid.layout.devices)) for word, laid in runs.items()}
    console = console or Console()
    batches = _read(run, steps)
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    width = max(map(len, runs))
    d = run.data
    say(f"jax {jax.__version__} on {jax.devices()[0].device_kind}: {steps} steps of {d.batch_size} rows of {d.seq_len} "
        f"tokens in {run.compute.dtype}; no loss may differ by more than {tolerance:g} of itself")  # fmt: skip
    say(LINE.format("", "difference", "last loss", "ms a step", "of one", "program", "peak", width=width))
    # Copies, for a step that is given the memory of an array may write where a view of it looks.
    whole = jax.tree.map(np.array, jax.device_get(main.start(runs[ALONE])))
    rows: list[dict[str, Any]] = []
    alone = None
    for word, laid in runs.items():
        got = measure(word, laid, places[word], whole, batches)
        alone = alone or got
        made = compare(got, alone, tolerance)
        rows.append(made)
        say(show(made, width))
    facts = {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "dtype": run.compute.dtype, "steps": steps}
    return {**facts, "tolerance": tolerance, "layouts": rows, "passed": all(made["passed"] for made in rows)}


def read_layout(word: str, of: Layout) -> Layout:
    """The layout that a word such as `expert=2,capacity=4` stands for; what it does not name is as in `_alone(of)`.

    Raises ValueError that names the nearest field, or says how many devices are missing.
    """
    try:
        at = override(_alone(of), word.split(","))
    except ValueError as error:
        raise ValueError(f"--layouts {word}: {error}") from error
    there = len(jax.devices())
    need(at.devices <= there,
         f"--layouts {word} takes {at.devices} devices, but there are {there} ({jax.default_backend()}): give a "
         f"smaller one; on CPUs XLA_FLAGS=--xla_force_host_platform_device_count={at.devices}")  # fmt: skip
    return at


def _alone(at: Layout) -> Layout:
    one: dict[str, Any] = dict.fromkeys(AXES, 1)
    return replace(at, **one)


def _read(run: Run, steps: int) -> list[Batch]:
    """The first batches of a run, on the host."""
    rows_of = main.row_reader(run.model)
    batches = data.batches(run.data, model=run.model)
    try:
        read = list(islice(batches, steps))
    finally:
        batches.close()
    if rows_of is not None:
        read = [b | {"engram_rows": rows_of(b["tokens"], b["positions"])} for b in read]
    return [Batch(**b) for b in read]


def spread(whole: TrainState, like: TrainState) -> TrainState:
    """A state of host arrays, as one device has it, where and as a layout stores it.

    Not `main.start`: what is drawn for stacked n-gram tables depends on the rows that fill them up (zero here), and the
    last bits on the program that draws.
    """

    def one(array: np.ndarray, at: Any) -> jax.Array:
        filled = np.zeros(at.shape, array.dtype)
        filled[tuple(map(slice, array.shape))] = array
        return jax.device_put(filled, at.sharding)

    return jax.tree.map(one, whole, like)


def measure(word: str, run: Run, at: Placement, whole: TrainState, batches: Iterable[Batch]) -> Measured:
    """Train a step on each batch, from the state `whole`; the host waits for each step, and its batch is there before.

    The step is the one that `dsflash train` runs, its state donated.
    """
    devices = jax.devices()[: run.layout.devices]
    before = _peaks(devices)
    state = spread(whole, at.like(run))
    batches = list(batches)
    jitted = main.jit(at.step(run), main.BRISK, donate_argnums=0, **at.out_shardings)
    begin = time.perf_counter()
    train = jitted.lower(state, at.put(batches[0])).compile()
    compile_seconds = time.perf_counter() - begin
    memory = train.memory_analysis()
    losses, kept, seconds = [], [], []
    for host in batches:
        batch = jax.block_until_ready(at.put(host))
        begin = time.perf_counter()
        state, made = jax.block_until_ready(train(state, batch))
        seconds.append(time.perf_counter() - begin)
        losses.append(float(made.report.loss))
        kept.append(bool(made.finite.everything))
    peaks = (now if now > old else None for now, old in zip(_peaks(devices), before, strict=True))
    return Measured(
        layout=word, devices=len(devices), losses=tuple(losses),
        refused=tuple(i for i, ok in enumerate(kept, 1) if not ok),
        milliseconds=float(np.median(seconds[WARM:])) * 1e3, compile_seconds=round(compile_seconds, 1),
        program=memory.argument_size_in_bytes + memory.temp_size_in_bytes + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        peaks=tuple(peaks),
    )  # fmt: skip


def _peaks(devices: Sequence[Any]) -> list[int]:
    """The most bytes in use on each device since the process began, 0 where unknown (CPUs).

    It never falls, so what a layout took is known where it took more than all before it.
    """
    return [(d.memory_stats() or {}).get("peak_bytes_in_use", 0) for d in devices]


def compare(got: Measured, alone: Measured, tolerance: float) -> dict[str, Any]:
    """What was measured and how it compares with one device, as plain values."""
    difference = got.difference(alone)
    return asdict(got) | {
        "difference": difference,
        "ratio": got.milliseconds / alone.milliseconds,
        "passed": difference <= tolerance and not got.refused,  # false for what is no number, too
    }


def show(made: dict[str, Any], width: int) -> str:
    """One line of the table, and why it did not pass."""
    peak = max((p for p in made["peaks"] if p is not None), default=None)
    line = LINE.format(
        made["layout"], f"{made['difference']:.1e}", f"{made['losses'][-1]:.5f}", f"{made['milliseconds']:.2f}",
        f"{made['ratio']:.3f}", _size(made["program"]), "unknown" if peak is None else _size(peak), width=width,
    )  # fmt: skip
    if made["refused"]:
        steps = ", ".join(map(str, made["refused"]))
        return f"{line}  MISSED: steps {steps} changed nothing; raise capacity, or look for a loss that is not finite"
    return line if made["passed"] else f"{line}  MISSED"


def _size(n: int) -> str:
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.2f} MiB"
