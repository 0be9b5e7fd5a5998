"""Metrics on disk and on the screen: lines of JSON, a plot, a progress bar."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dsflash_jax.config import Config
from train.step import Metrics

SHOWN = 3  # names that a message lists before it counts the rest


def record(c: Config, m: Metrics) -> dict[str, Any]:
    """A step's metrics as JSON data. Losses are in nats a token; lists run over layer ids."""
    r = m.report
    tokens = max(float(r.ce.tokens), 1.0)
    counts = np.asarray(r.counts) + np.asarray(r.counts_vl)
    load = counts.max(axis=1) / np.maximum(counts.mean(axis=1), 1e-9)
    return {
        "loss": float(r.loss),
        "nll": float(r.ce.nll) / tokens,
        "accuracy": float(r.ce.hits) / tokens,
        "tokens": int(r.ce.tokens),
        "learning_rate": float(m.learning_rate),
        "grad_norm": float(m.grad_norm),
        "index_kl": {str(i): float(r.index[i]) for i in c.index_source_layer_ids},
        "balance": float(np.sum(r.balance)),
        "load_max_over_mean": [round(float(x), 3) for x in load],
    }


def read(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, of one kind or all; none if there is no file.

    A last line that a killed process left unfinished does not count. Raises ValueError, with file and line, for any
    other that is not one of `Log.write`.
    """
    whole = [x for x in path.read_text().splitlines(keepends=True) if x.endswith("\n")] if path.exists() else []
    lines = [_line(text, f"{path}:{number}") for number, text in enumerate(whole, 1)]
    return [line for line in lines if kind in (None, line["kind"])]


def _line(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict) or "kind" not in line or type(line.get("step")) is not int:
        raise ValueError(f"{where}: expected a JSON object with kind and step, got {text[:40]!r}; remove this line")
    return line


class Log:
    """metrics.jsonl of a run; opening it at a step drops the lines of later steps, which will be written again.

    Without a path, on hosts that write nothing, nothing is kept.
    """

    def __init__(self, path: Path | None, step: int) -> None:
        self.path = path
        if path is None:
            return
        kept = [line for line in read(path) if line["step"] <= step]
        fresh = path.with_suffix(".tmp")  # a process killed here loses no line
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
        fresh.replace(path)

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append a line of `kind` ("train" or "heldout") for the state after `step` updates."""
        if self.path is None:
            return
        line = json.dumps({"kind": kind, "step": step, **values}) + "\n"
        if isinstance(self.path, Path):
            with self.path.open("a") as file:
                file.write(line)
        else:  # an object of a bucket cannot grow
            self.path.write_text(self.path.read_text() + line)

    def last(self, kind: str) -> dict[str, Any] | None:
        """The newest line of a kind, None without one."""
        lines = read(self.path, kind) if self.path else []
        return lines[-1] if lines else None


def plot(source: Path, target: Path, title: str) -> None:
    """Training and held-out loss of a metrics.jsonl against the step, as a PNG; leaves a notebook's backend alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    train, heldout = read(source, "train"), read(source, "heldout")
    axes.plot([x["step"] for x in train], [x["nll"] for x in train], label="train, nats a token", lw=1)
    axes.plot([x["step"] for x in heldout], [x["nats_per_byte"] for x in heldout], "o-", label="held out, nats a byte")
    axes.set(xlabel="step", ylabel="cross-entropy", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    with target.open("wb") as file:
        figure.savefig(file, dpi=120, format="png")


def few(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def say(console: Console, text: str) -> None:
    """Print plain text, on one line where it is one, whatever brackets it holds and however wide the terminal is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


class Screen:
    """Progress of a run: a bar on a terminal, a line each report elsewhere.

    Speed and ETA count steps only: not the first, which compiles, and not what runs inside `pause`.
    """

    def __init__(self, console: Console, start: int, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.start, self.steps, self._clock = console, start, steps, clock
        self._began: float | None = None  # when the first step ended, moved on by every pause
        self._tokens = 0  # of the steps since then
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(), TextColumn("ETA {task.fields[left]}"),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("train", total=steps, completed=start, text="compiling", left="-")

    @property
    def tokens_per_second(self) -> float:
        """Counted tokens a second since the first step ended; 0 before that."""
        return self._tokens / self._seconds if self._tokens and self._seconds > 0 else 0.0

    @property
    def _seconds(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began

    def step(self, step: int, values: dict[str, Any], report: bool) -> None:
        """Show the state after `step` updates."""
        if self._began is None:
            self._began = self._clock()
        else:
            self._tokens += values["tokens"]
        text = f"loss {values['loss']:.3f}  {self.tokens_per_second:,.0f} tokens/s"
        left = self._left(step)
        self.bar.update(self.task, completed=step, text=text, left=left)
        if report and self.bar.disable:
            line = f"step {step}/{self.steps}  {text}  grad {values['grad_norm']:.2f}  ETA {left}"
            say(self.console, line)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time inside counts neither for the speed nor for the ETA."""
        began = self._clock()
        try:
            yield
        finally:
            if self._began is not None:
                self._began += self._clock() - began

    def _left(self, step: int) -> str:
        timed = step - self.start - 1
        if timed < 1:
            return "-"
        return str(timedelta(seconds=round(self._seconds / timed * (self.steps - step))))


@contextmanager
def screen(console: Console, start: int, steps: int) -> Iterator[Screen]:
    """A `Screen` that cleans up after itself."""
    made = Screen(console, start, steps)
    with made.bar:
        yield made
