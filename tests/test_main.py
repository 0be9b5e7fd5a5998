"""main.py: the order of events; a run that is cut anywhere ends as one that was not."""

from __future__ import annotations

import errno
import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import cos, pi
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_digits
from rich.console import Console
from tiny import QUICK
from tiny_run import ENGRAM, FINAL, PEAK, STEPS, WARMUP, arguments, child, tiny, write_corpus

from dsflash_jax import cli
from dsflash_jax.loss import CrossEntropy
from train import data, evaluation, main, metrics, placement
from train.config import Run
from train.saver import Saver

HALF = 5
MOVING = {"tokens_per_second"}  # the only figure of a metrics line that two equal runs do not share


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("main") / "corpus")


@pytest.fixture(scope="module", autouse=True)
def _equal_steps_are_traced_once() -> Iterator[None]:
    """Runs that differ in folder and rhythm share one step function, so JAX traces it once in this process."""
    make = cache(main.step.make_step)
    with pytest.MonkeyPatch.context() as patch:
        same = partial(replace, out="any", save_every=1, eval_every=1, until=0)
        patch.setattr(main.step, "make_step", lambda run, mesh: make(same(run), mesh))
        yield


@pytest.fixture(scope="module")
def straight(corpus: Path) -> Path:
    """Folder of a run that nothing cut, started as a user does."""
    out = corpus.parent / "straight"
    assert (
        cli.main(["train", *arguments(corpus, out, "sample_tokens=3"), "--json", str(out / "new" / "result.json")]) == 0
    )
    return out


@pytest.fixture(scope="module")
def half(corpus: Path) -> Path:
    """Folder of the same run stopped after half of its steps."""
    out = corpus.parent / "half"
    assert main.run(tiny(corpus, out), out / "result.json", until=HALF) == 0
    return out


def checkpoint(config: Run) -> tuple[Any, dict[str, Any]]:
    """The newest state of a run's folder, as NumPy arrays, and its data position."""
    saver = Saver(config)
    state, position = saver.restore(jax.eval_shape(lambda: main.step.initial(config)))
    saver.close()
    return jax.device_get(state), position


def lines(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in x.items() if k not in MOVING} for x in metrics.read(out / "metrics.jsonl")]


def steps_kept(out: Path) -> list[str]:
    return sorted(p.name for p in (out / "checkpoints").iterdir())


def assert_same_run(corpus: Path, one: Path, two: Path) -> None:
    """Bit for bit: weights, router biases, optimiser, counters, key, data position, and every line of metrics."""
    (a, at_a), (b, at_b) = checkpoint(tiny(corpus, one)), checkpoint(tiny(corpus, two))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert at_a == at_b
    assert lines(one) == lines(two)


def test_a_run_leaves_everything_it_promises(straight: Path, corpus: Path) -> None:
    assert {p.name for p in straight.iterdir()} >= {
        "checkpoints", "metrics.jsonl", "loss.png", "config.json", "sample.txt",
    }  # fmt: skip
    result = json.loads((straight / "new" / "result.json").read_text())
    assert (result["status"], result["step"], result["out"]) == ("finished", STEPS, str(straight))
    assert result["heldout"]["step"] == STEPS
    assert result["sample"] == (straight / "sample.txt").read_text()
    assert result["sample"].startswith("def ")
    assert steps_kept(straight) == ["10", "5"]


def test_the_loss_falls(straight: Path) -> None:
    first, last = metrics.read(straight / "metrics.jsonl", "heldout")
    assert (first["step"], last["step"]) == (HALF, STEPS)
    assert last["nats_per_byte"] < first["nats_per_byte"] < np.log(264)


def test_ten_straight_steps_equal_five_resume_and_five(straight: Path, half: Path, corpus: Path) -> None:
    assert json.loads((half / "result.json").read_text())["status"] == "as asked"
    assert (steps_kept(half), len(metrics.read(half / "metrics.jsonl", "train"))) == (["5"], HALF)
    for name in ("once", "twice"):
        out = half.parent / name
        shutil.copytree(half, out)
        assert main.run(tiny(corpus, out)) == 0
        assert_same_run(corpus, straight, out)


def test_every_counter_is_the_number_of_updates(straight: Path, corpus: Path) -> None:
    state, position = checkpoint(tiny(corpus, straight))
    counters = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == np.int32 and x.shape == ()]
    assert counters and all(int(x) == STEPS for x in [*counters, state.step])
    assert position["step"] == STEPS


def test_the_learning_rate_of_step_n_is_the_schedules_at_n_minus_one(straight: Path) -> None:
    cosine = [FINAL + (PEAK - FINAL) / 2 * (1 + cos(pi * (t - 5) / 4)) for t in (6, 7, 8)]
    expected = [PEAK * n / WARMUP for n in range(1, WARMUP)] + [PEAK] * 4 + cosine + [FINAL]
    shown = [x["learning_rate"] for x in metrics.read(straight / "metrics.jsonl", "train")]
    np.testing.assert_allclose(shown, expected, rtol=1e-6)  # float32


def test_nats_a_byte_are_all_predicted_tokens_over_the_bytes_of_text(straight: Path, corpus: Path) -> None:
    config = tiny(corpus, straight)
    (batch,) = data.batches(config.data, "heldout", n_batches=1)
    counted = batch["targets"][batch["loss_mask"] > 0]
    ends = int((counted == config.model.eos_token_id).sum())
    last = metrics.read(straight / "metrics.jsonl", "heldout")[-1]
    assert ends and last["bytes"] == counted.size - ends
    assert last["nats_per_byte"] * last["bytes"] == pytest.approx(last["nll"] * counted.size)


def test_the_result_of_a_run_on_a_full_disk_is_refused_in_one_line(
    straight: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def full(path: Path, *text: Any) -> int:
        if path.suffix == ".json" and path.stem == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *text)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *arguments(corpus, straight), "--json", str(straight / "full.json")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    assert "full.json cannot be written: No space left on device" in error


def test_a_finished_run_says_so_and_trains_no_more(
    straight: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, text = lines(straight), (straight / "sample.txt").read_text()
    monkeypatch.setattr(main, "_loop", None)  # calling it would raise
    assert main.run(tiny(corpus, straight, "sample_tokens=3")) == 0
    assert "has reached its last step 10 already: nothing to train" in capsys.readouterr().out
    assert lines(straight) == before
    assert (straight / "sample.txt").read_text() == text


def during_step(monkeypatch: pytest.MonkeyPatch, step: int, *signals: signal.Signals) -> None:
    """Send signals to this process while `step` runs."""
    write = metrics.Log.write

    def write_and_send(log: metrics.Log, kind: str, at: int, values: dict[str, Any]) -> None:
        write(log, kind, at, values)
        if (kind, at) == ("train", step - 1):
            for number in signals:
                signal.raise_signal(number)

    monkeypatch.setattr(metrics.Log, "write", write_and_send)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_saves_and_leaves_and_the_same_command_goes_on(
    number: signal.Signals, straight: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *arguments(corpus, tmp_path / "run")]
    handler = signal.getsignal(number)
    with pytest.MonkeyPatch.context() as patch:
        during_step(patch, 4, number)
        assert cli.main(command) == 0
    assert f"{number.name}: saved step 4 in {tmp_path}/run; the same command goes on" in capsys.readouterr().out
    assert steps_kept(tmp_path / "run") == ["4"]
    assert signal.getsignal(number) is handler
    assert cli.main(command) == 0
    assert "going on from step 4" in capsys.readouterr().out
    assert_same_run(corpus, straight, tmp_path / "run")


def test_a_second_ctrl_c_interrupts_at_once(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    during_step(monkeypatch, 4, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        main.run(tiny(corpus, tmp_path / "run"))
    assert steps_kept(tmp_path / "run") == []


KILLED_WHILE_SAVING = """
import os, signal, sys
def kill(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("checkpoints/6"):
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
from dsflash_jax.cli import main
main(sys.argv[1:])
"""


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(
    straight: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", *arguments(corpus, tmp_path / "run", "save_every=3")]
    killed = child(["-c", KILLED_WHILE_SAVING], *command)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = steps_kept(tmp_path / "run")
    assert left[0] == "3" and len(left) == 2 and left[1].startswith("6.")  # whole, and written but not renamed
    assert len(metrics.read(tmp_path / "run" / "metrics.jsonl", "train")) >= 6  # it went on while the sixth was written
    assert cli.main(command) == 0
    assert "going on from step 3" in capsys.readouterr().out
    assert steps_kept(tmp_path / "run") == ["10", "9"]
    assert_same_run(corpus, straight, tmp_path / "run")


def test_a_weight_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    half: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, position = checkpoint(tiny(corpus, half))
    attn = state.params["layers"]["layer0"]["attn"]
    attn["wq_a"] = np.full_like(attn["wq_a"], np.nan)
    saver = Saver(tiny(corpus, tmp_path))
    saver.save(state, position)
    saver.close()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")}
    # Every later step would save; none may, and the held-out loss is not taken either.
    assert main.run(tiny(corpus, tmp_path, "save_every=1", "eval_every=1"), tmp_path / "result.json") == 1
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "checkpoints").rglob("*")} == before
    assert lines(tmp_path) == []
    shown = capsys.readouterr().out
    assert "stopped: step 6: not finite: the loss (nan); the gradients of embed, head, " in shown
    assert "the checkpoint of step 5 is untouched" in shown
    assert "lower optim.peak" in shown and ".txt@" in shown
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"]) == ("not finite", HALF)
    assert result["error"] in shown


def test_another_configuration_is_refused_by_the_names_of_its_changes(
    half: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (half / "config.json").read_text()
    with pytest.raises(SystemExit) as leaving:
        cli.main(["train", *arguments(corpus, half, "optim.peak=0.5", "model.index_topk=3", "save_every=1")])
    assert leaving.value.code == 2
    message = capsys.readouterr().err
    assert "model.index_topk was 2, is 3; optim.peak was 0.01, is 0.5." in message
    assert "save_every was" not in message and "Free to change are out, keep, log_every, save_every" in message
    assert (half / "config.json").read_text() == before


def test_other_documents_are_refused(half: Path, corpus: Path, tmp_path: Path) -> None:
    other = shutil.copytree(corpus, tmp_path / "corpus")
    (other / "0.txt").write_text("something else")
    with pytest.raises(ValueError, match="documents .* changed"):
        main.run(tiny(other, half))


def test_a_run_leaves_after_the_update_it_is_told(corpus: Path, tmp_path: Path) -> None:
    config = tiny(corpus, tmp_path / "run", "until=2")
    assert main.run(config, tmp_path / "result.json") == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["step"]) == (main.AS_ASKED, 2)


@pytest.mark.parametrize("vision", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_several_devices_sample_what_one_does(
    vision: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From fresh weights: a prompt, or some pictures."""
    monkeypatch.setattr(jax, "jit", partial(jax.jit, compiler_options=QUICK))

    def sample(*layout: str) -> str | None:
        changes = ("data.batch_size=8", "sample_tokens=3", *layout)
        config = tiny_digits.tiny(tmp_path, *changes) if vision else tiny(corpus, tmp_path, *changes)
        at = placement.place(config)
        return main._sample(config, at, main.start(config, at), tmp_path, Console(quiet=True))

    alone = sample()
    assert alone and sample("layout.fsdp=2", "layout.expert=4", "layout.whole=0") == alone
    assert vision or sample("layout.fsdp=4", "layout.context=2") is None


@pytest.mark.slow
def test_a_model_with_ngram_memory_trains_and_samples(corpus: Path, tmp_path: Path) -> None:
    config = tiny(corpus, tmp_path, *ENGRAM, "sample_tokens=3")
    assert main.run(config) == 0
    state, _ = checkpoint(config)
    fresh = jax.device_get(main.start(config)).params["layers"]
    moved = np.any(state.params["layers"]["layer0"]["engram"]["embed"] != fresh["layer0"]["engram"]["embed"], axis=1)
    batches = data.batches(config.data)
    rows_of = main.row_reader(config.model)
    assert rows_of is not None
    read = np.unique([rows_of(b["tokens"], b["positions"]) for b, _ in zip(batches, range(3), strict=False)])
    batches.close()
    assert 0 < moved.sum() and set(np.flatnonzero(moved)) <= set(read)
    assert (tmp_path / "sample.txt").read_text().startswith("def ")


def test_a_run_may_hold_nothing_out(corpus: Path, tmp_path: Path) -> None:
    assert main.run(tiny(corpus, tmp_path, "data.holdout=0"), until=1) == 0
    assert metrics.read(tmp_path / "metrics.jsonl", "heldout") == []


@pytest.mark.slow
def test_an_evaluation_goes_over_a_batch_in_the_parts_of_a_step(corpus: Path, tmp_path: Path) -> None:
    whole = tiny(corpus, tmp_path, "data.batch_size=4")
    parts = replace(whole, accumulate=2)
    params = main.start(whole).params
    shapes, sums = [], []
    for run in (whole, parts):
        batches, (heldout,) = main._read(run, placement.place(run))
        batches.close()
        shapes.append(heldout.tokens.shape)
        sums.append(jax.jit(partial(evaluation.score, run, None))(params, heldout))
    assert shapes == [(4, 32), (2, 2, 32)]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), *sums)


def test_a_held_out_loss_tells_of_rows_that_found_no_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = CrossEntropy(nll=8.0, tokens=4.0, hits=1.0, z=0.0)
    log, state = metrics.Log(tmp_path / "metrics.jsonl", 0), main.TrainState(0, {}, None, None)
    evaluation.evaluate(lambda params, batch: (sums, batch, 4.0), state, 3, [0.0, 2.0], log, main.Console())
    assert log.last("heldout")["dropped"] == 2
    assert "without 2 rows that found no room: raise layout.capacity" in capsys.readouterr().out


def test_a_start_may_be_named_from_the_folder_that_one_is_in(
    half: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(half.parent)
    run = tiny(corpus, half.parent / "other", f"start_from={half.name}")
    assert int(main.start_from(run, placement.place(run).like(run)).step) == HALF


OTHER = ("data.seq_len=64", "model.max_position_embeddings=8192", "layout.context=2", "layout.whole=0")


def test_a_run_starts_from_another_with_other_rows_and_layout_and_goes_on_from_its_own(
    half: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second call finds a checkpoint of its own, of a later step."""
    begun = []

    def loop(config: Run, placement: Any, state: Any, batches: Any, heldout: Any, saver: Saver, *_: Any) -> Any:
        begun.append((jax.device_get(state), batches.get_state()["step"], state.params["embed"].sharding.num_devices))
        next(batches)
        saver.save(state.replace(step=state.step + 1), batches.get_state())
        return state, "as asked"

    monkeypatch.setattr(main, "_loop", loop)
    monkeypatch.setattr(main, "place", lambda run: placement.place(run, jax.devices()[:2]))
    before = sorted((half / "checkpoints").rglob("*"))
    want, _ = checkpoint(tiny(corpus, half))
    run = tiny(corpus, tmp_path, *OTHER, f"start_from={half}")
    assert main.run(run) == main.run(run) == 0
    (state, position, devices), (later, own, _) = begun
    jax.tree.map(np.testing.assert_array_equal, state, want)
    assert (int(state.step), position, devices) == (HALF, 0, 2)
    assert (int(later.step), own) == (HALF + 1, 1)
    assert f"starting from step {HALF} of {half}" in capsys.readouterr().out
    assert sorted((half / "checkpoints").rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("start_from=no/such",), "start_from='no/such' is not the folder of a run"),
        (
            (f"steps={HALF}", "optim.warmup_steps=1"),
            f"is at step {HALF}, but this run ends at steps={HALF}: raise steps",
        ),
        (("model.moe_intermediate_size=8",), "the arrays of step 5 do not fit this run: .*w1 was .*, is "),
    ],
)
def test_a_start_that_cannot_be_is_refused_before_training(
    changes: tuple[str, ...], message: str, half: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_loop", None)  # calling it would raise
    with pytest.raises(ValueError, match=message):
        main.run(tiny(corpus, tmp_path / "run", f"start_from={half}", *changes))


def test_a_step_that_is_not_finite_names_the_text_of_its_batch_wherever_the_run_started(
    half: Path, corpus: Path, tmp_path: Path
) -> None:
    state, _ = checkpoint(tiny(corpus, half))
    attn = state.params["layers"]["layer0"]["attn"]
    attn["wq_a"] = np.full_like(attn["wq_a"], np.nan)
    spoilt = Saver(tiny(corpus, tmp_path / "spoilt"))
    spoilt.save(state, {"step": HALF})
    spoilt.close()
    config = tiny(corpus, tmp_path / "run", f"start_from={tmp_path / 'spoilt'}")
    assert main.run(config, tmp_path / "result.json") == 1
    batches = data.batches(config.data)
    first = batches.contents(0)[0][0]
    batches.close()
    assert f"look at the text of this step: {first}" in json.loads((tmp_path / "result.json").read_text())["error"]
