"""bench.py: layouts are compared with one device on equal terms, and what cannot be compared is refused at once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_run import ENGRAM, tiny, write_corpus

from dsflash_jax import cli
from train import bench, main, placement
from train.bench import Measured
from train.config import Run

STEPS = 4
ALONE = Measured("one device", 1, (4.0, 2.0), (), 10.0, 1.0, 2**20, (None,))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """With a table of 59 rows, which two devices fill up to 60."""
    folder = tmp_path_factory.mktemp("bench")
    return tiny(write_corpus(folder / "corpus"), folder / "run", *ENGRAM, "layout.whole=0")


@pytest.mark.slow
def test_two_devices_train_as_one_and_every_figure_is_there(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    made = bench.layouts(run, ["fsdp=2"], STEPS)
    alone, both = made["layouts"]
    assert made["passed"] and both["difference"] <= made["tolerance"] == 1e-4
    assert (alone["layout"], alone["devices"], both["layout"], both["devices"]) == ("one device", 1, "fsdp=2", 2)
    assert len(set(alone["losses"])) == len(both["losses"]) == STEPS  # the weights moved
    assert alone["ratio"] == 1 and both["ratio"] == both["milliseconds"] / alone["milliseconds"] > 0
    assert 0 < both["program"] < alone["program"]  # its state is split
    assert alone["peaks"] == (None,)  # a CPU does not know
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["one", "fsdp=2"]
    assert not Path(run.out).exists()


def test_a_layout_starts_from_the_weights_of_one_device_with_zeros_behind_a_table(run: Run) -> None:
    whole = jax.tree.map(np.array, jax.device_get(main.start(run)))
    both = replace(run, layout=bench.read_layout("context=2", run.layout))
    like = placement.place(both, jax.devices()[:2]).like(both)
    laid = bench.spread(whole, like)
    table = laid.params["layers"]["layer0"]["engram"]["embed"]
    assert table.shape[0] == 60 and not np.any(table[59:])
    assert {shard.data.shape[0] for shard in table.addressable_shards} == {30}
    cut = jax.tree.map(lambda a, w: np.asarray(a)[tuple(map(slice, w.shape))], laid, whole)
    jax.tree.map(np.testing.assert_array_equal, cut, whole)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("fsdp=16", "--layouts fsdp=16 takes 16 devices, but there are 8 (cpu): give a smaller one"),
        ("fspd=2", "--layouts fspd=2: override 'fspd': unknown key 'fspd'; did you mean 'fsdp'?"),
        ("context", "--layouts context: override 'context' is not of the form key=value"),
        ("expert=two", "--layouts expert=two: override 'expert': expected int, got 'two'"),
        ("fsdp=4", "2 rows do not divide over fsdp = 4 devices"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_is_trained(
    word: str, message: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "measure", None)  # calling it would raise
    with pytest.raises(ValueError) as refused:
        bench.layouts(run, ["fsdp=2", word])
    assert message in str(refused.value)


def test_too_few_steps_to_time_are_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="--steps must be more than the 2 whose time does not count, got 2"):
        bench.layouts(run, ["fsdp=2"], 2)


def test_a_word_names_axes_and_other_fields_and_leaves_the_runs_own(run: Run) -> None:
    own = replace(run.layout, fsdp=4, exchange="ragged", capacity=2.0)
    at = bench.read_layout("context=2,expert=2,expert_splits=tokens,capacity=4", own)
    assert (at.fsdp, at.context, at.expert, at.expert_splits) == (1, 2, 2, "tokens")
    assert (at.capacity, at.exchange, at.whole) == (4.0, "ragged", 0)


@pytest.mark.parametrize(
    ("change", "passed"),
    [
        ({"losses": (4.0, 2.0002)}, True),
        ({"losses": (4.0, 2.0004)}, False),
        ({"losses": (4.01, 2.0)}, False),  # not the last step's alone
        ({"losses": (4.0, math.nan)}, False),
        ({"refused": (2,)}, False),
    ],
)
def test_a_layout_passes_if_every_loss_is_near_and_every_step_was_kept(change: Any, passed: bool) -> None:
    made = bench.compare(replace(ALONE, layout="fsdp=2", milliseconds=25.0, **change), ALONE, 1.5e-4)
    assert made["passed"] is passed and made["ratio"] == 2.5
    assert bench.show(made, 10).count("MISSED") == (not passed)


def test_a_missed_tolerance_is_status_1(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(word: str, laid: Run, *_: Any) -> Measured:
        return replace(ALONE, layout=word, losses=(4.0, 1 + 1 / laid.layout.devices))

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(main, "start", lambda run: ())
    monkeypatch.setattr("dsflash_jax.overrides.find", lambda source: run)
    command = ["bench", "layouts", "tiny", "--layouts", "fsdp=2", "--json", str(tmp_path / "made.json"), "--tolerance"]
    assert cli.main([*command, "0.1"]) == 1
    assert '"passed": false' in (tmp_path / "made.json").read_text()
    assert cli.main([*command, "0.3"]) == 0


def test_a_peak_is_known_where_it_rose(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def memory_stats(self) -> dict[str, int] | None:
            return {"peak_bytes_in_use": 7}

    assert bench._peaks([Device(), jax.devices()[0]]) == [7, 0]
    made = bench.compare(replace(ALONE, peaks=(None, 3 * 2**30)), ALONE, 0.1)
    assert bench.show(made, 10).endswith("3.00 GiB")
