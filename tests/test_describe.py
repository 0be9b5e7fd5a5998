"""describe.py: the sheet is complete, adds up, prints, and needs no device."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dsflash_jax import describe
from dsflash_jax.cli import main
from dsflash_jax.config import Config
from dsflash_jax.overrides import find

RELEASED: Config = find("released")


def sums_agree(facts: Any) -> int:
    """Check every {"total", "parts"} below `facts`; returns how many there were."""
    if not isinstance(facts, dict):
        return sum(map(sums_agree, facts)) if isinstance(facts, list) else 0
    if "parts" in facts:
        assert facts["total"] == pytest.approx(sum(facts["parts"].values()), rel=1e-12)
        return 1
    return sum(map(sums_agree, facts.values()))


def test_the_released_sheet_needs_no_device_and_holds_the_published_figures(tmp_path: Path) -> None:
    path = tmp_path / "sheet.json"
    code = "import sys; from dsflash_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    # Any array would have to start a backend, and there is none of this name.
    where = os.environ | {"JAX_PLATFORMS": "absent", "COLUMNS": "120"}
    command = [sys.executable, "-c", code, "describe", "released", "--json", str(path)]
    shown = subprocess.run(command, env=where, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for figure in (
        "551.566B", "196.614B", "14.225B", "411.858M", "73.411M", "763.205B", "16.131B", "7.898B", "15.816B", "7.584B",
        "890", "2,703,360", "510,286,023,000", "96,085", "1.615", "1.260",
    ):  # fmt: skip
        assert figure in shown.stdout, figure
    facts = json.loads(path.read_text())
    assert sums_agree(facts) == 6 + 3 + 1 + 1 + 3 * 2 * 5  # groups, phases, cache, FLOPs by phase, counting, context
    groups = facts["parameters"]["groups"].values()
    assert facts["parameters"]["total"] == sum(group["total"] for group in groups) == 763_205_315_794
    assert facts["checkpoint"]["total"] == {"tensors": 96_085, "values": 763_205_315_794, "bytes": 510_286_023_000}
    trained = [facts["optimiser"][group]["total"]["parameters"] for group in ("backbone", "dspark")]
    assert sum(trained) == facts["parameters"]["total"]
    assert facts["cache"]["bytes_a_token"] == {"total": 890, "parts": {"compressed KV": 720, "index keys": 170}}
    assert len(facts["layers"]) == 40


@pytest.mark.parametrize("name", ["tiny_text", "tiny_engram", "tiny_full", "tiny_grads"])
def test_the_sheet_of_any_configuration_adds_up(golden: Path, name: str, tmp_path: Path) -> None:
    path = tmp_path / "sheet.json"
    assert main(["describe", str(golden / name / "config.json"), "--json", str(path)]) == 0
    facts = json.loads(path.read_text())
    assert sums_agree(facts) >= 10
    assert facts["checkpoint"]["total"]["values"] == facts["parameters"]["total"]
    assert ("dspark" in facts["parameters"]["groups"]) == bool(facts["optimiser"]["dspark"]["families"])


def test_a_run_and_overrides_are_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "sheet.json"
    assert main(["describe", "demo", "model.modes=S S", "model.sliding_window=8", "--json", str(path)]) == 0
    facts = json.loads(path.read_text())
    assert facts["cache"]["bytes_a_token"]["total"] == 0
    assert facts["cache"]["bytes_a_sequence"]["total"] == 2 * 8 * (32 + 1)
    assert (facts["prefill_boundary"], "prefill_replay" in facts["flops"]) == (None, False)
    decode, prefill = (facts["active"][phase]["parts"] for phase in ("decode", "prefill"))
    assert decode["head"] and "head" not in prefill  # only a prompt's last token meets it
    assert prefill["attention projections"] == decode["attention projections"]
    assert "prefill: all layers" in " ".join(capsys.readouterr().out.split())  # wherever the line breaks


def test_contexts_stop_where_the_model_does() -> None:
    assert [describe.tokens(n) for n in describe.contexts(RELEASED)] == ["4K", "16K", "64K", "256K", "1M"]
    assert describe.contexts(replace(RELEASED, max_position_embeddings=70000)) == (4096, 16384, 65536)
    assert describe.contexts(replace(RELEASED, max_position_embeddings=300)) == (300,)


def test_layers_of_a_kind_are_listed_together() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    describe.show(RELEASED, describe.sheet(RELEASED), console)
    shown = console.export_text()
    assert "3-7, 9-13, 15-19" in shown and "24, 28, 32, 36" in shown


def test_what_cannot_be_described_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["describe", "released", "dspark_n_routed_experts=0"])
    assert leaving.value.code == 2
    assert "dspark_n_routed_experts must be at least 1, got 0" in capsys.readouterr().err
