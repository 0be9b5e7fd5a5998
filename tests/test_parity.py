"""parity.py: the model equals the published reference on recorded sets, and a wrong weight is reported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dsflash_jax import parity, verdict

COPIED = ("config.json", "inputs.npz", "weights.npz", "prefill_f32_noquant.npz")

pytestmark = pytest.mark.usefixtures("quick")


def by_name(lines):
    return {(line.trace, line.array): line for line in lines}


@pytest.fixture(scope="module")
def short_text(golden, tmp_path_factory) -> Path:
    """tiny_text cut to what the forward comparison needs, in a folder that a test may damage."""
    folder = tmp_path_factory.mktemp("tiny_text")
    for name in COPIED:
        shutil.copy(golden / "tiny_text" / name, folder)
    return folder


def prefills(golden: Path, name: str, folder: Path) -> Path:
    """A set without its decode and replay traces, which `test_parity_decode.py` compares."""
    for path in (golden / name).glob("*"):
        if not path.stem.startswith(("decode", "replay")):
            shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize("name", ["tiny_text", "tiny_engram"])
def test_every_recorded_array_of_a_prefill_agrees(golden, name, tmp_path):
    lines, uncovered = parity.check(prefills(golden, name, tmp_path))
    assert [line for line in lines if not line.passed] == [] and uncovered == []
    recorded = np.load(golden / name / "prefill_f32_noquant.npz").files
    assert {line.array for line in lines if line.trace == "prefill_f32_noquant"} == set(recorded)
    selections = [line for line in lines if line.kind == "selection"]
    assert len(selections) > 8 and all(line.max_diff == 0 for line in selections)
    assert by_name(lines)["prefill_f32_noquant", "logits"].max_diff <= 2e-4  # the set's tolerance
    assert {line.trace for line in lines} >= {"prefill_f32_noquant", "prefill_f32_quant"}


@pytest.mark.slow
def test_stored_weights_and_an_image_agree(golden, tmp_path):
    lines, uncovered = parity.check(prefills(golden, "tiny_full", tmp_path))
    assert [line for line in lines if not line.passed] == [] and uncovered == []
    assert {x.trace for x in lines} == {f"prefill_{n}" for n in ("f32_noquant", "f32_quant", "bf16_quant")}
    exact = {line.array for line in lines if line.trace == "prefill_f32_quant"}
    assert {"image_embeds_0_3", "engram_hash_ids", "main_hidden", "logits"} <= exact


@pytest.mark.slow
def test_every_gradient_agrees(golden):
    lines, _ = parity.check(golden / "tiny_grads")
    assert [line for line in lines if not line.passed] == []
    recorded = [n for n in np.load(golden / "tiny_grads" / "grads_f32_noquant.npz").files if n.startswith("grad.")]
    compared = {line.array for line in lines if line.kind == "gradient"}
    assert set(recorded) <= compared
    # The indexer has no recorded gradient: its selection is discrete. It must then be exactly zero.
    unread = compared - set(recorded)
    assert unread and all("indexer" in n or "gate.bias" in n for n in unread)


def test_a_perturbed_weight_fails_with_status_1_and_is_written_to_json(short_text, tmp_path, capsys):
    tensors = dict(np.load(short_text / "weights.npz"))
    tensors["layers.3.attn.wo_b.weight"] = tensors["layers.3.attn.wo_b.weight"] * np.float32(1.01)
    folder = shutil.copytree(short_text, tmp_path / "damaged")
    np.savez(folder / "weights.npz", **tensors)
    report = tmp_path / "report.json"
    assert parity.main(folder, report) == 1
    assert "MISS" in capsys.readouterr().out
    verdicts = {line["array"]: line["passed"] for line in json.loads(report.read_text())["lines"]}
    assert verdicts["L2.h_out"] and not verdicts["L3.h_out"] and not verdicts["logits"]


def test_agreement_gives_status_0(short_text, capsys):
    assert parity.main(short_text) == 0
    assert "MISS" not in capsys.readouterr().out


def test_a_folder_without_traces_gives_status_1(short_text, tmp_path):
    folder = shutil.copytree(short_text, tmp_path / "bare")
    (folder / "prefill_f32_noquant.npz").unlink()
    assert parity.main(folder) == 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        parity.check(tmp_path)


def test_a_recorded_array_that_the_model_does_not_make_is_a_miss():
    (line,) = parity.forward_lines("t", {}, {"L0.unheard_of": np.zeros(2)})
    assert not line.passed


def test_selections_compare_as_sets():
    want = np.array([[[0, 3, -1], [1, 2, 4]]])
    assert verdict.selection_line("t", "n", want[..., ::-1], want).passed
    line = verdict.selection_line("t", "n", np.array([[[0, 3, -1], [1, 2, 5]]]), want)
    assert not line.passed and line.max_diff == 1 and line.share == 0.5


@pytest.mark.parametrize("got", [np.array([0.0, np.nan]), np.array([0.0, 1.1]), np.zeros(3), np.array([np.inf, 1.0])])
def test_values_off_not_finite_or_misshapen_are_misses(got):
    assert not verdict.value_line("t", "n", got, np.array([0.0, 1.0]), 1e-2).passed
    assert verdict.value_line("t", "n", np.array([0.0, 1.001]), np.array([0.0, 1.0]), 1e-2).passed
