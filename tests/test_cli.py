"""cli.py: the frame that every subcommand stands in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsflash_jax.cli import build_parser, main


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
        (["modes", "S F1", "index_topk=3"], "a mode string takes no overrides"),
    ],
)
def test_wrong_use_is_status_2_with_the_reason(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(arguments) == 2
    assert message in capsys.readouterr().err


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


def test_modes_applies_overrides(tmp_path: Path) -> None:
    path = tmp_path / "sheet.json"
    tables = "engram_num_embeddings=[]"
    assert status(["modes", "released", "modes=S F4 2U", tables, "--json", str(path)]) == 0
    assert json.loads(path.read_text())["modes"] == "S F4 U U"


def test_help_does_not_import_jax() -> None:
    code = "import sys, dsflash_jax.cli as c; c.build_parser(); print('jax' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"
