"""cli.py: the frame that every subcommand stands in."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from dsflash_jax import output
from dsflash_jax.cli import build_parser, main
from train import main as training


def status(arguments: list[str]) -> int:
    """Exit status of the command, whichever way it leaves."""
    try:
        return main(arguments)
    except SystemExit as leaving:
        assert isinstance(leaving.code, int)
        return leaving.code


def test_every_subcommand_explains_itself_with_an_example_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, names = build_parser()
    assert status(["--help"]) == 0
    overview = capsys.readouterr().out
    for name in names:
        assert name in overview
        assert status([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert f"example: dsflash {name} " in shown
        assert "--json PATH" in shown


def test_unknown_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["mods", "released"]) == 2
    assert "unknown subcommand 'mods'; did you mean 'modes'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: SUBCOMMAND"),
        (["modes"], "required: CONFIG_OR_STRING"),
        (["modes", "relesed"], "no configuration 'relesed': neither a file nor one of"),
        (["modes", "released", "index_topkk=3"], "did you mean 'index_topk'"),
        (["modes", "S U"], "layer 1 (U) has no F before it"),
        (["modes", "F1p U F2"], "layer 2 makes ratio-2 KV above the candidate source 0"),
        (["modes", "S 999999999(S)"], "more than 10000; correct the counts"),
        (["describe", "x" * 300], "no configuration"),
        (["parity", "a", "b"], "unexpected b"),
        (["modes", "S F1", "index_topk=3"], "a mode string takes no overrides"),
    ],
)
def test_wrong_use_is_status_2_with_the_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(arguments) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize("source", ["released", "S Se 2(F2 5U) F2e 5U F1p 3U 3(X 3U) X 3Ut"])
def test_modes_shows_plan_and_string(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["modes", source, "--json", str(tmp_path / "new" / "sheet.json")]) == 0
    shown = capsys.readouterr().out
    assert "3×[reindex, 3×reuse], reindex, 3×reuse+tap" in shown
    assert "Mode string: S Se F2 U U U U U F2" in shown
    sheet = json.loads((tmp_path / "new" / "sheet.json").read_text())
    assert (sheet["bodies"], len(sheet["layers"])) == (12, 40)
    assert sheet["modes"] in shown
    assert {k: sheet["layers"][27][k] for k in ("mode", "ratio", "kv_source", "index_source")} == {
        "mode": "reuse", "ratio": 1, "kv_source": 20, "index_source": 24,
    }  # fmt: skip


def test_modes_reads_a_string_longer_than_any_file_name(tmp_path: Path) -> None:
    path = tmp_path / "sheet.json"
    assert status(["modes", "S " * 200, "--json", str(path)]) == 0
    assert len(json.loads(path.read_text())["layers"]) == 200


def test_modes_applies_overrides(tmp_path: Path) -> None:
    path = tmp_path / "sheet.json"
    tables = "engram_num_embeddings=[]"
    assert status(["modes", "released", "modes=S F4 2U", tables, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["modes"] == "S F4 U U"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raises.py", "raise RuntimeError('boom')", "failed with RuntimeError: boom"),
        ("leaves.py", "raise SystemExit(0)", "failed with SystemExit"),
        ("syntax.py", "def (:", "failed with SyntaxError"),
        ("nothing.py", "x = 1", "expected a module-level `config`"),
        ("other.py", "from dsflash_jax.config import RopeScaling; config = RopeScaling()", "expected a module-level"),
        ("cut.json", '{"text_config": {', "expected JSON"),
        ("list.json", "[1, 2]", "no text_config"),
        ("number.json", '{"text_config": 3}', "no text_config"),
        ("vision.json", '{"text_config": {}, "vision_config": 3}', "vision_config: expected an object"),
        ("rope.json", '{"text_config": {"rope_scaling": null}}', "rope_scaling: expected an object"),
    ],
)
@pytest.mark.parametrize("command", ["train", "modes", "describe"])
def test_damaged_configuration_is_one_line_that_names_the_fault(
    command: str, name: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert status([command, str(tmp_path / name)]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_json_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["modes", "S F1", "--json", str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.count("\n")) == ("", 1)
    assert "cannot be written" in shown.err


def test_a_link_to_a_file_that_is_not_there_yet_stays_one(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    assert status(["modes", "S F1", "--json", str(link)]) == 0
    assert link.is_symlink() and json.loads(file.read_text())


def test_the_result_has_null_where_there_is_no_finite_number(tmp_path: Path) -> None:
    output.write_json(tmp_path / "made.json", {"losses": [math.nan, (1.5, -math.inf)], "passed": False, "steps": 3})
    text = (tmp_path / "made.json").read_text()
    assert json.loads(text) == {"losses": [None, [1.5, None]], "passed": False, "steps": 3}


def test_a_disk_that_fills_up_while_a_run_trains_ends_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "run", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert status(["train", "demo"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and "stopped: [Errno 28] No space left on device; the same command goes on" in shown


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sample_prompt='a'b'", "quotes that do not match"),
        ("data.source=", "data.source is empty"),
        ("model.initializer_range=-1", "initializer_range must be finite and not negative"),
        ("model.rope_theta=0", "rope_theta must be positive"),
        ("optim.peak=inf", "optim.peak must be finite"),
        ("objective.index_weight=nan", "objective.index_weight must not be negative"),
        ("objective.index_random=-1", "objective.index_random must not be negative"),
        ("seed=99999999999999999999", "seed must be below"),
    ],
)
def test_value_that_no_run_can_have_is_refused(
    override: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(["train", "demo", f"out={tmp_path}", override]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("damage", [b"", b"junk", b"PK\x03\x04 cut"])
@pytest.mark.parametrize("name", ["weights.npz", "inputs.npz"])
def test_damaged_arrays_are_named(name: str, damage: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (Path(__file__).parent / "golden" / "tiny_text").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(damage)
    assert status(["parity", str(tmp_path)]) == 2
    assert f"{name}: expected arrays" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros(3)}, "no input_ids"),
        ({"input_ids": np.full((1, 4), 10**6)}, "input_ids: from 1000000 to 1000000"),
    ],
)
def test_inputs_of_another_model_are_refused(
    arrays: dict[str, np.ndarray], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (Path(__file__).parent / "golden" / "tiny_text").iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "inputs.npz").unlink()
    np.savez(tmp_path / "inputs.npz", **arrays)  # type: ignore[arg-type]
    assert status(["parity", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


def test_run_folder_that_is_a_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    for i in range(40):  # enough for one to be held out
        (tmp_path / "text" / f"{i}.txt").write_text("some text " * 20)
    (tmp_path / "file").write_text("")
    assert status(["train", "demo", f"data.source={tmp_path / 'text'}", "data.holdout=2", f"out={tmp_path}/file"]) == 2
    assert "cannot be the folder of a run" in capsys.readouterr().err


def test_help_does_not_import_jax() -> None:
    code = "import sys, dsflash_jax.cli as c; c.build_parser(); print('jax' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def test_overrides_may_stand_behind_an_option(tmp_path):
    shown = tmp_path / "shown.json"
    assert main(["modes", "demo", "--json", str(shown), "model.modes=S F2 U", "model.index_topk=8"]) == 0
    assert json.loads(shown.read_text())["modes"] == "S F2 U"
