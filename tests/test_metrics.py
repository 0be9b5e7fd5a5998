"""metrics.py: what is written, plotted and shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tiny_run import tiny, write_corpus

from dsflash_jax.loss import CrossEntropy, Report
from train import metrics
from train.step import Finite, Metrics

WIDTH = 100  # columns of the terminal
VALUES = {"loss": 2.5, "tokens": 100, "grad_norm": 0.5}


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def screen_at(start: int, steps: int, terminal: bool = False) -> tuple[metrics.Screen, Clock, io.StringIO]:
    clock, shown = Clock(), io.StringIO()
    return metrics.Screen(Console(file=shown, force_terminal=terminal, width=WIDTH), start, steps, clock), clock, shown


def test_a_record_is_per_token_by_layer_and_plain_json(tmp_path: Path) -> None:
    config = tiny(write_corpus(tmp_path / "corpus"), tmp_path).model
    f, none = np.float32, np.zeros(2, np.float32)
    report = Report(
        f(3.0), CrossEntropy(f(80), f(40), f(10), f(0)), np.array([0, 0.25], f), np.array([1.0, 2.0], f),
        np.array([[4, 6, 10, 0], [30, 0, 0, 0]], f), np.array([[6, 4, 0, 10], [10, 0, 0, 0]], f), none,
    )  # fmt: skip
    fine = Finite(np.bool_(True), np.ones(3, bool), np.ones(3, bool), np.bool_(True), np.bool_(True))
    made = metrics.record(config, Metrics(report, f(0.5), f(0.125), fine))
    assert json.loads(json.dumps(made)) == {
        "loss": 3.0, "nll": 2.0, "accuracy": 0.25, "tokens": 40, "learning_rate": 0.125, "grad_norm": 0.5,
        "index_kl": {"1": 0.25}, "balance": 3.0, "load_max_over_mean": [1.0, 4.0],
    }  # fmt: skip


def test_a_batch_without_targets_divides_by_nothing(tmp_path: Path) -> None:
    config = tiny(write_corpus(tmp_path / "corpus"), tmp_path).model
    zero, none = np.float32(0), np.zeros(2, np.float32)
    counts = np.zeros((2, 4), np.float32)
    report = Report(zero, CrossEntropy(zero, zero, zero, zero), none, none, counts, counts, none)
    fine = Finite(np.bool_(True), np.ones(3, bool), np.ones(3, bool), np.bool_(True), np.bool_(True))
    made = metrics.record(config, Metrics(report, zero, zero, fine))
    assert (made["nll"], made["accuracy"], made["load_max_over_mean"]) == (0.0, 0.0, [0.0, 0.0])


def test_opening_a_log_at_a_step_drops_later_lines_and_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = metrics.Log(path, 0)
    for step in (1, 2, 3):
        log.write("train", step, {"loss": float(step)})
    log.write("heldout", 2, {"nll": 1.0})
    with path.open("a") as file:
        file.write('{"kind": "train", "st')  # killed here
    again = metrics.Log(path, 2)
    assert [x["step"] for x in metrics.read(path, "train")] == [1, 2]
    again.write("train", 3, {"loss": 4.0})
    assert [x["loss"] for x in metrics.read(path, "train")] == [1.0, 2.0, 4.0]
    assert again.last("heldout") == {"kind": "heldout", "step": 2, "nll": 1.0}
    assert again.last("other") is None
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_without_a_file_has_no_lines(tmp_path: Path) -> None:
    assert metrics.read(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("steps", [0, 3])
def test_the_plot_is_a_png_and_leaves_the_backend_alone(steps: int, tmp_path: Path) -> None:
    import matplotlib

    backend = matplotlib.rcParams._get("backend")  # reading it the usual way would choose one
    log = metrics.Log(tmp_path / "metrics.jsonl", 0)
    for step in range(1, steps + 1):
        log.write("train", step, {"nll": 3.0 / step})
        log.write("heldout", step, {"nats_per_byte": 3.1 / step})
    metrics.plot(log.path, tmp_path / "loss.png", "[demo]")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert matplotlib.rcParams._get("backend") is backend


def test_speed_and_eta_leave_out_the_first_step_and_every_pause() -> None:
    screen, clock, _ = screen_at(start=10, steps=20)
    clock.now = 60.0  # compiling
    screen.step(11, VALUES, report=True)
    assert screen.tokens_per_second == 0
    for step in (12, 13):
        clock.now += 2.0
        screen.step(step, VALUES, report=True)
    with screen.pause():
        clock.now += 100.0  # an evaluation
    assert screen.tokens_per_second == 200 / 4.0
    clock.now += 2.0
    screen.step(14, VALUES, report=True)
    assert screen.tokens_per_second == 300 / 6.0
    assert screen.bar.tasks[0].fields["left"] == "0:00:12"  # 6 steps of 2 seconds


def test_an_eta_of_more_than_a_day_says_so() -> None:
    screen, clock, _ = screen_at(start=0, steps=100_002)
    screen.step(1, VALUES, report=False)
    clock.now = 1.0
    screen.step(2, VALUES, report=False)
    assert screen.bar.tasks[0].fields["left"] == "1 day, 3:46:40"


def test_elsewhere_than_on_a_terminal_each_report_is_one_plain_line() -> None:
    screen, _, shown = screen_at(start=0, steps=20)
    screen.step(1, VALUES, report=True)
    screen.step(2, VALUES, report=False)
    assert shown.getvalue() == "step 1/20  loss 2.500  0 tokens/s  grad 0.50  ETA -\n"


def test_on_a_terminal_there_is_a_bar_and_no_line() -> None:
    screen, _, shown = screen_at(start=5, steps=20, terminal=True)
    with screen.bar:
        screen.step(6, VALUES, report=True)
    assert "6/20" in shown.getvalue()
    assert "grad" not in shown.getvalue()


def test_text_with_brackets_and_long_text_is_shown_as_it_is() -> None:
    shown = io.StringIO()
    text = "a list[int] of [red] things: " + "x" * 200
    metrics.say(Console(file=shown, width=40), text)
    assert shown.getvalue() == text + "\n"


@pytest.mark.parametrize("line", ["", "no JSON", "[1]", "3", '{"kind": "train"}', '{"step": 1}', "[" * 100000])
def test_a_damaged_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:2: expected a JSON object with kind and step, .* remove this"):
        metrics.Log(path, 5)
