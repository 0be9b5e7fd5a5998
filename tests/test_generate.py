"""generate.py and prompts.py: `dsflash generate` on a trained run and on a checkpoint's own files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from rich.console import Console
from test_cli import status
from tiny_run import tiny as tiny_run
from tiny_run import write_corpus

from dsflash_jax import checkpoint, sample
from dsflash_jax.config import Compute
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Setup
from dsflash_jax.sample import Event, Request
from train import generate, main, prompts, tokenizer
from train.prompts import Line, Lines, Prompt
from train.saver import Saver

TOLERANCE = 2e-4  # the set's own, on logits


# All programs but the training step's, which says for itself how hard it is optimised.
pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that left after some steps, with two checkpoints."""
    corpus = write_corpus(tmp_path_factory.mktemp("generate") / "corpus")
    out = corpus.parent / "run"
    assert main.run(tiny_run(corpus, out, "sample_tokens=0", "save_every=1"), until=2) == 0
    return out


@pytest.fixture(scope="module")
def decoder(run: Path) -> Decoder:
    """The run's last weights as its own saver reads them, for the run as it was configured."""
    config = tiny_run(run.parent / "corpus", run)
    saver = Saver(config)
    restored = saver.restore(jax.eval_shape(lambda: main.step.initial(config)))
    saver.close()
    assert restored is not None and int(restored[0].step) == 2
    return Decoder(config.inference, restored[0].params)


def said(decoder: Decoder, *requests: Request) -> list[sample.Completion]:
    return sample.collect(sample.generate(decoder, requests, text_of=tokenizer.bytes_of))


def ids_of(text: str) -> list[int]:
    return [tokenizer.BOS, *tokenizer.encode(text).tolist()]


def command(*arguments: Any) -> int:
    return status(["generate", *map(str, arguments)])


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def file_of(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_the_newest_weights_of_a_run_go_on_from_a_text(
    run: Path, decoder: Decoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-tokens", 6, "--temperature", 0, "--json", tmp_path / "made.json")
    assert command(run, "--prompt", "the ", *flags) == 0
    (want,) = said(decoder, Request(ids_of("the "), 6, temperature=0.0))
    shown = capsys.readouterr()
    assert shown.out == want.text + "\n"
    assert "step 2, float32" in shown.err
    made = json.loads((tmp_path / "made.json").read_text())
    assert (made["tokens"], made["finishes"], made["finished"]) == (6, {"length": 1}, True)


def test_a_layout_spreads_the_weights_and_says_the_same(
    run: Path, decoder: Decoder, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ("layout.fsdp=2", "layout.expert=4", "layout.whole=0")
    assert command(run, "--prompt", "the ", "--max-tokens", 6, "--temperature", 0, *layout) == 0
    (want,) = said(decoder, Request(ids_of("the "), 6, temperature=0.0))
    shown = capsys.readouterr()
    assert shown.out == want.text + "\n"
    assert "step 2, float32, on 8 x cpu" in shown.err


def test_lines_come_out_in_order_with_what_each_asks_for_whatever_the_batch(
    run: Path, decoder: Decoder, tmp_path: Path
) -> None:
    lines = file_of(
        tmp_path / "prompts.jsonl",
        {"prompt": "the "},
        "",
        {"ids": [0, 110, 120], "max_tokens": 2, "temperature": 0.5},
        {"prompt": "a", "seed": 7},
    )
    out = tmp_path / "new" / "out.jsonl"
    common = ("--prompts", lines, "--out", out, "--max-tokens", 5, "--seed", 3, "--logprobs")
    assert command(run, *common, "--batch", 2) == 0
    together = said(
        decoder,
        Request(ids_of("the "), 5, seed=3),
        Request([0, 110, 120], 2, temperature=0.5, seed=4),
        Request(ids_of("a"), 5, seed=7),
    )
    made = written(out)
    assert [record["line"] for record in made] == [1, 3, 4]
    for record, want in zip(made, together, strict=True):
        assert (record["text"], record["ids"], record["finish"]) == (want.text, list(want.ids), want.finish)
        np.testing.assert_allclose(record["logprobs"], want.log_probabilities, atol=2e-6)  # six digits


def test_a_stop_text_of_the_flags_holds_unless_a_line_has_its_own(run: Path, decoder: Decoder, tmp_path: Path) -> None:
    (whole,) = said(decoder, Request(ids_of("the "), 6, temperature=0.0))
    bytes_ = [tokenizer.bytes_of(i).decode("latin-1") for i in whole.ids]
    stop = next(c for c in bytes_ if c.isascii() and c.isprintable())  # fails if the run said nothing readable
    lines = file_of(tmp_path / "prompts.jsonl", {"prompt": "the "}, {"prompt": "the ", "stop": "never said"})
    out = tmp_path / "out.jsonl"
    assert command(
        run, "--prompts", lines, "--out", out, "--max-tokens", 6, "--temperature", 0, "--stop", stop, "--batch", 2
    ) == 0  # fmt: skip
    stopped, other = written(out)
    assert (stopped["finish"], stopped["text"]) == ("stop", whole.text[: whole.text.index(stop)])
    assert (other["finish"], other["text"]) == ("length", whole.text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected a JSON object, got what cannot be read"),
        ([1], "line 2: expected an object with keys"),
        ({"promt": "a"}, "line 2: unknown key 'promt'; did you mean 'prompt'?"),
        ({}, 'line 2: give either "prompt", a text, or "ids"'),
        ({"prompt": "a", "ids": [1]}, 'line 2: give either "prompt", a text, or "ids"'),
        ({"prompt": 3}, "line 2: prompt must be"),
        ({"ids": ["a"]}, "line 2: ids must be"),
        ({"prompt": "a", "top_k": 1.5}, "line 2: top_k must be"),
        ({"ids": []}, "line 2: the prompt is empty"),
        ({"ids": [264]}, "line 2: prompt ids must lie in 0..263"),
        ({"prompt": "a", "temperature": -1}, "line 2: temperature is -1: give 0"),
        ({"prompt": "a", "max_tokens": 5000}, "line 2: 2 prompt ids and max_tokens=5000 new ones exceed"),
        ({"prompt": "\ud800"}, "line 2: 'utf-8' codec can't encode"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(
    line: Any, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = file_of(tmp_path / "prompts.jsonl", {"prompt": "a"}, line)
    assert command(run, "--prompts", lines, "--out", tmp_path / "out.jsonl") == 2
    *_, shown = capsys.readouterr().err.splitlines()
    assert shown.startswith(f"dsflash: {lines} line 2") and message in shown
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "one of the arguments --prompt --ids --prompts is required"),
        (("--prompt", "a", "--ids", "1"), "not allowed with"),
        (("--ids", "1,x"), "expected ids as 1,2,3, got '1,x'"),
        (("--prompts", "absent.jsonl"), "absent.jsonl cannot be read: No such file"),
        (("--prompt", "a", "--batch", "0"), "--batch is how many prompts run together"),
        (("--prompt", "a", "--chunk", "0"), "a chunk of a prompt has at least 1 token"),
        (("--prompt", "a", "--threshold", "0.5"), "--threshold ends drafts early: give --draft"),
        (("--prompt", "a", "--out", "both", "--json", "both"), "write to one path: give each its own"),
        (("--prompt", "a", "--prefix", "absent"), "--prefix absent is no file: give one that --save-prefix wrote"),
        (("--prompt", "a", "--draft", "2"), "speculative decoding needs a draft head"),
        (("--prompt", "a", "layout.context=8"), "decoding keeps a row on one device, but context splits its tokens"),
        (("--prompt", "a", "layout.data=3"), "takes 3 devices, but there are 8"),
        (("--prompt", "a", "--stop", ""), "a stop string is empty"),
        (("--prompt", "a", "compute.dtyp=float32"), "did you mean 'dtype'?"),
        (("--prompt", "a", "model.head_dim=32"), "do not fit this model: "),
    ],
)
def test_wrong_use_is_status_2_with_the_reason(
    flags: tuple[str, ...], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(run, *flags) == 2
    *_, shown = capsys.readouterr().err.splitlines()
    assert shown.startswith("dsflash: ") and message in shown


def test_folders_that_hold_no_model_are_refused_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "weights.npz").write_bytes(b"")
    for source, message in (
        ("demo", "'demo' is no folder: give that of a run of dsflash train, for example runs/demo"),
        (tmp_path, "is not the folder of a run, as it lacks config.json or checkpoints"),
        (tmp_path / "half", "config.json is missing"),
    ):
        assert command(source, "--prompt", "a") == 2
        assert message in capsys.readouterr().err


def test_a_checkpoints_own_files_go_on_from_ids_and_take_no_text(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = golden / "tiny_text"
    assert command(source, "--prompt", "a") == 2
    assert "comes without a tokenizer: give ids" in capsys.readouterr().err
    with np.load(source / "inputs.npz") as inputs, np.load(source / "prefill_f32_noquant.npz") as recorded:
        ids, logits = inputs["input_ids"], recorded["logits"]
    long, short = 21, 7  # of 8 tokens of window
    lines = file_of(tmp_path / "p.jsonl", {"ids": ids[0, :long].tolist()}, {"ids": ids[1, :short].tolist()})
    flags = ("--prompts", lines, "--out", tmp_path / "o.jsonl", "--max-tokens", 1, "--temperature", 0, "--logprobs")
    replay = ("--prefill", "replay", "--compare-exact", "--json", tmp_path / "made.json", "compute.dtype=float32")
    assert command(source, *flags, *replay) == 0
    made, records = json.loads((tmp_path / "made.json").read_text()), written(tmp_path / "o.jsonl")
    behind = logits[1, short - 1]
    assert (records[1]["text"], records[1]["ids"]) == (None, [int(behind.argmax())])
    want = float(behind.max() - np.log(np.exp(behind - behind.max()).sum()) - behind.max())
    assert records[1]["logprobs"][0] == pytest.approx(want, abs=TOLERANCE)
    (apart,) = made["compared"]["differences"]  # a prompt of up to a window is replayed exactly, and not compared
    assert apart > 1e-5
    agrees = records[0]["ids"] == [int(logits[0, long - 1].argmax())]
    assert made["compared"]["agrees"] == [agrees]
    assert made["approximate"] == 1
    shown = capsys.readouterr().err
    assert "prefill by replay: approximate for 1 of 2 prompts, those of more than the window of 8 tokens" in shown
    assert "logits of the next token differ by up to" in shown and "is the same behind" in shown
    only = file_of(tmp_path / "short.jsonl", {"ids": ids[1, :short].tolist()})
    assert command(source, "--prompts", only, *flags[2:], *replay) == 0
    assert "no prompt is longer than the window of 8 tokens: replay is exact" in capsys.readouterr().err


def test_prefills_whose_logits_are_not_numbers_do_not_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = np.eye(2, dtype=np.float32)
    bad[1] = np.nan
    monkeypatch.setattr(generate, "_behind", lambda *_: bad)
    config = SimpleNamespace(sliding_window=1)
    source = SimpleNamespace(decoder=SimpleNamespace(setup=SimpleNamespace(config=config)))
    made = generate.compare(source, [Request([1, 2])] * 2, 2, Console(stderr=True))
    assert made["agrees"] == [True, False]
    assert "differ by up to nan; the greedy token is the same behind 1 of 2" in capsys.readouterr().err


STAGE = {
    "num_nextn_predict_layers": 1, "dspark_block_size": 3, "dspark_noise_token_id": 3, "dspark_markov_rank": 4,
    "dspark_n_routed_experts": 3, "dspark_num_experts_per_tok": 2,
}  # fmt: skip


def test_a_checkpoint_with_ngram_memory_and_a_draft_head_is_read_whole_and_drafts_change_no_greedy_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c = tiny.with_modes("Se F2t", hc_mult=2, eos_token_id=39, **STAGE)
    w, classes = tiny.weights(c, declare=checkpoint.declare), np.arange(40)[::-1]
    (tmp_path / "config.json").write_text(json.dumps(c.to_json()))
    np.savez(tmp_path / "weights.npz", **checkpoint.publish(c, w))
    flags = (tmp_path, "--ids", "5,9,3", "--max-tokens", 12, "--temperature", 0, "--draft", 2)
    assert command(*flags) == 2
    assert "an array engram_token_map in inputs.npz" in capsys.readouterr().err
    np.savez(tmp_path / "inputs.npz", engram_token_map=classes)
    assert command(*flags, "--json", tmp_path / "made.json") == 0
    shown = capsys.readouterr()
    plain = Decoder(Setup(c, Compute(dtype="float32")), w, classes)
    (want,) = sample.collect(sample.generate(plain, [Request([5, 9, 3], 12, temperature=0.0)]))
    assert shown.out.split() == [str(i) for i in want.ids] and len(set(want.ids)) > 3
    made = json.loads((tmp_path / "made.json").read_text())["drafts"]
    assert made["drafted"] == [made["rounds"]] * 2 and made["rounds"] > 0
    assert f"tokens a round over {made['rounds']} rounds" in shown.err


def ended(row: int) -> Event:
    return Event(row, (4, 5), (-1.0, -2.0), f"text {row}", "length")


def test_completions_wait_for_those_before_them_and_none_is_lost_on_an_error(tmp_path: Path) -> None:
    listed = [Prompt(Line("a"), number) for number in (1, 2, 3)]
    with pytest.raises(RuntimeError), closing(Lines(tmp_path / "out.jsonl", listed, True, False)) as lines:
        lines.add(1, ended(1))
        assert (tmp_path / "out.jsonl").read_text() == ""
        lines.add(0, Event(0, (3,), (-1.0,), "be"))
        lines.add(0, Event(0, (1,), (-1.0,), "gun", "eos"))
        assert [record["line"] for record in written(tmp_path / "out.jsonl")] == [1, 2]
        listed.append(Prompt(Line("a"), 4))
        lines.add(3, ended(3))
        raise RuntimeError
    made = written(tmp_path / "out.jsonl")
    assert [record["line"] for record in made] == [1, 2, 4]
    assert made[0] == {"line": 1, "text": "begun", "ids": [3, 1], "finish": "eos"}


def test_an_interruption_keeps_what_is_complete_and_is_status_1(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_):
        yield 1, ended(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "events", interrupted)
    lines = file_of(tmp_path / "prompts.jsonl", {"prompt": "a"}, {"prompt": "b"})
    assert command(run, "--prompts", lines, "--out", tmp_path / "out.jsonl") == 1
    assert [record["line"] for record in written(tmp_path / "out.jsonl")] == [2]
    assert "stopped: 1 of 2 prompts are complete" in capsys.readouterr().err


def test_weights_that_are_no_numbers_end_the_command_with_the_prompts_line(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(*_, **__):
        yield ended(1)
        raise sample.NotFinite(0)

    monkeypatch.setattr(sample, "generate", lost)
    lines, out = file_of(tmp_path / "prompts.jsonl", *[{"prompt": "a"}] * 2), tmp_path / "out.jsonl"
    assert command(run, "--prompts", lines, "--out", out) == 1
    shown = capsys.readouterr().err
    assert f"{lines} line 1: the logits are not numbers" in shown.replace("\n", " ")
    assert "stopped: 1 of 2 prompts are complete" in shown
    assert [record["line"] for record in written(out)] == [2]


def launched(*arguments: Any, stdout: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    command = [sys.executable, "-c", "import sys; from dsflash_jax.cli import main; sys.exit(main())", "generate"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*command, *map(str, arguments)], stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_a_reader_that_leaves_ends_the_command_without_a_traceback(run: Path, tmp_path: Path) -> None:
    lines = file_of(tmp_path / "prompts.jsonl", {"prompt": "a"})
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        done = launched(run, "--prompts", lines, "--max-tokens", "1", stdout=pipe)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "Broken" not in done.stderr


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes: what does not fit is refused, what does is written."""
    resource = pytest.importorskip("resource")
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_completions_on_a_full_disk_end_the_command_in_one_line_and_those_before_stay(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "events", lambda *_: ((row, ended(row)) for row in (0, 2, 1)))
    lines, out = file_of(tmp_path / "prompts.jsonl", *[{"prompt": "a"}] * 3), tmp_path / "out.jsonl"
    with full_disk(100):  # room for one line and a half
        assert command(run, "--prompts", lines, "--out", out) == 2
    *_, shown = capsys.readouterr().err.splitlines()
    assert shown == f"dsflash: --out {out} cannot be written: File too large; give another path"
    assert [record["line"] for record in written(out)] == [1]


@pytest.mark.parametrize("flag", ["--json", "--save-prefix"])
def test_other_files_on_a_full_disk_end_the_command_in_one_line(
    flag: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((Path, "write_text") if flag == "--json" else (np, "savez")), full)
    out, path = tmp_path / "out.jsonl", tmp_path / "file"
    assert command(run, "--prompt", "the ", "--max-tokens", 6, "--temperature", 0, "--out", out, flag, path) == 2
    *_, shown = capsys.readouterr().err.splitlines()
    assert shown == f"dsflash: {flag} {path} cannot be written: No space left on device; give another path"
    assert [p.name for p in tmp_path.iterdir()] == (["out.jsonl"] if flag == "--json" else [])


@pytest.mark.parametrize("flag", ["--out", "--json", "--save-prefix"])
def test_a_path_that_takes_no_file_is_refused_before_anything_runs(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below"):
        assert command("no run", "--prompt", "a", flag, path) == 2
        shown = capsys.readouterr().err
        assert shown.startswith(f"dsflash: {flag} {path} cannot be written: ") and shown.count("\n") == 1


def test_output_that_cannot_be_written_is_one_line(run: Path, tmp_path: Path) -> None:
    with (tmp_path / "stdout").open("w") as full, full_disk(0):
        done = launched(run, "--ids", "1", "--max-tokens", "1", stdout=full)
    *_, shown = done.stderr.splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert shown == "dsflash: the output cannot be written: File too large; give --out another path"


def test_only_ends_of_lines_end_a_prompt(tmp_path: Path) -> None:
    texts = ["a\u2028b\x85c", "d"]
    lines = "\r\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "prompts.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    read = prompts.read(tmp_path / "prompts.jsonl")
    assert [(one.given.prompt, one.number) for one in read] == [(texts[0], 1), (texts[1], 2)]


@pytest.mark.parametrize("written", ["--out", "--json", "--save-prefix"])
def test_what_is_read_is_not_overwritten(
    written: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = file_of(tmp_path / "prompts.jsonl", {"prompt": "a"})
    assert command(run, "--prompts", lines, written, lines) == 2
    assert f"--prompts {lines} would be overwritten" in capsys.readouterr().err
    assert command(run, "--prompt", "a", "--prefix", lines, written, lines) == 2
    assert f"--prefix {lines} would be overwritten" in capsys.readouterr().err
    assert prompts.read(lines)[0].given.prompt == "a"


def test_a_stored_prefix_goes_on_as_its_own_prompt_would(run: Path, tmp_path: Path) -> None:
    kept, out = tmp_path / "begin.npz", tmp_path / "out.jsonl"
    begin = "def f"  # within the window, so exact
    base = ["generate", str(run), "--temperature", "0", "--max-tokens", "6", "--out", str(out)]
    assert status([*base, "--prompt", begin, "--save-prefix", str(kept)]) == 0
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("\n".join(json.dumps({"prompt": begin + rest}) for rest in ("", "(x):", " g")))
    assert status([*base, "--prompts", str(lines)]) == 0
    plain = out.read_text()
    assert status([*base, "--prompts", str(lines), "--prefix", str(kept)]) == 0
    assert out.read_text() == plain


def test_a_prefix_of_other_tokens_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "begin.npz"
    base = ["generate", str(run), "--max-tokens", "2", "--out", str(tmp_path / "out.jsonl")]
    assert status([*base, "--prompt", "abc", "--save-prefix", str(kept)]) == 0
    assert status([*base, "--prompt", "xbcd", "--prefix", str(kept)]) == 2
    assert "does not begin with the 4 tokens of this prefix" in capsys.readouterr().err
