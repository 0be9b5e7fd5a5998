"""Metrics on disk and on the screen: lines of JSON, a plot, a progress bar."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dsflash_jax.config import Config
from train.step import Metrics


def record(c: Config, m: Metrics) -> dict[str, Any]:
    """A step's metrics as JSON data. Losses are in nats a token; lists run over layer ids."""
    r = m.report
    tokens = max(float(r.ce.tokens), 1.0)
    counts = np.asarray(r.counts)
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


class Log:
    """metrics.jsonl of a run; opening it at a step drops the lines of later steps, which will be written again."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in self._lines() if line["step"] <= step] if path.exists() else []
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def _lines(self) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a killed process may leave half a line

    def write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Append a line of `kind` ("train" or "heldout") for the state after `step` updates."""
        with self.path.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """All lines of a kind, in order."""
        return [line for line in self._lines() if line["kind"] == kind]


def plot(log: Log, path: Path, title: str) -> None:
    """Training and held-out loss against the step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    train, heldout = log.lines("train"), log.lines("heldout")
    axes.plot([x["step"] for x in train], [x["nll"] for x in train], label="train, nats a token", lw=1)
    axes.plot([x["step"] for x in heldout], [x["nats_per_byte"] for x in heldout], "o-", label="held out, nats a byte")
    axes.set(xlabel="step", ylabel="cross-entropy", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


class Screen:
    """Progress of a run: a bar on a terminal, a line each report elsewhere."""

    def __init__(self, console: Console, start: int, steps: int) -> None:
        self.console, self.start, self.steps = console, start, steps
        self.began: float | None = None  # set after the first step, which compiles
        self.tokens = 0
        columns = (
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(),
        )  # fmt: skip
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600)
        self.task = self.bar.add_task("train", total=steps, completed=start, text="compiling")

    @property
    def tokens_per_second(self) -> float:
        """Counted tokens a second since the first step ended; 0 before that."""
        return self.tokens / (time.monotonic() - self.began) if self.began and self.tokens else 0.0

    def step(self, step: int, values: dict[str, Any], report: bool) -> None:
        """Show the state after `step` updates."""
        if self.began is None:
            self.began = time.monotonic()
        else:
            self.tokens += values["tokens"]
        text = f"loss {values['loss']:.3f}  {self.tokens_per_second:,.0f} tokens/s"
        self.bar.update(self.task, completed=step, text=text)
        if report and self.bar.disable:
            left = self._left(step)
            self.console.print(f"step {step}/{self.steps}  {text}  grad {values['grad_norm']:.2f}  ETA {left}")

    def _left(self, step: int) -> str:
        done = step - self.start - 1
        if self.began is None or done < 1:
            return "-"
        return time.strftime("%H:%M:%S", time.gmtime((time.monotonic() - self.began) / done * (self.steps - step)))


@contextmanager
def screen(console: Console, start: int, steps: int) -> Iterator[Screen]:
    """A `Screen` that cleans up after itself."""
    made = Screen(console, start, steps)
    with made.bar:
        yield made
