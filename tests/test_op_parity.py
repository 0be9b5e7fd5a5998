"""op_parity.py: our operations give what the reference recorded for each, and a wrong number is reported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsflash_jax import compressor, op_parity, parity
from dsflash_jax.cache import Cache
from dsflash_jax.verdict import Line, bits_line


@pytest.fixture(scope="module")
def checked(golden: Path) -> tuple[list[Line], list[str]]:
    return parity.check(golden / "ops")


def stems(golden: Path) -> list[str]:
    return [path.stem for path in op_parity.files(golden / "ops")]


@pytest.mark.slow
def test_every_recorded_op_agrees(checked: Any, golden: Path) -> None:
    lines, _ = checked
    assert [line for line in lines if not line.passed] == []
    assert sorted({line.trace for line in lines}) == stems(golden)


@pytest.mark.slow
def test_every_recorded_array_is_an_input_or_compared_or_named_as_uncovered(checked: Any, golden: Path) -> None:
    lines, uncovered = checked
    for path in op_parity.files(golden / "ops"):
        arrays, inputs = op_parity.load(path).keys(), op_parity.OPS[path.stem].inputs
        assert inputs <= arrays, path.stem
        named = {
            n for entry in uncovered if entry.startswith(f"{path.stem}: ") for n in entry.split(": ")[1].split(", ")
        }
        assert arrays == inputs | (named & arrays) | {x.array.split(",")[0] for x in lines if x.trace == path.stem}


@pytest.mark.slow
def test_every_recorded_array_is_covered(checked: Any) -> None:
    assert checked[1] == []


@pytest.mark.slow
def test_a_compressor_and_a_ring_are_compared_token_by_token(checked: Any) -> None:
    made = {(x.trace, x.array) for x in checked[0]}
    for start in (6, 7):
        steps = {f"{name}_after{start}, one by one" for name in ("decode", "emitted")}
        states = {f"{kind}_state_after{start}, one by one" for kind in ("kv", "score")}
        assert {("compressor_ratio1", name) for name in steps} <= made
        assert {("compressor_ratio2", name) for name in steps | states} <= made
    for how in ("in the ring", "filled places", "as tokens"):
        assert {("window_indices", f"case{case}_idx, {how}") for case in (2, 3, 4, 5)} <= made


@pytest.mark.parametrize(
    ("owner", "name", "change", "missed"),
    [
        (compressor, "following", lambda at: replace(at, shift=1 - at.shift), {"decode", "prefill"}),
        (compressor, "following", lambda at: replace(at, segments=1 - at.segments), {"decode", "prefill", "emitted"}),
        (compressor, "go_on", lambda made: (made[0], made[1][:, ::-1]), {"decode", "kv_state", "score_state"}),
    ],
    ids=["other tokens", "other completions", "stale tail"],
)
def test_steps_behind_a_wrong_tail_are_misses(owner, name, change, missed, golden, tmp_path, monkeypatch) -> None:
    shutil.copy(golden / "ops" / "compressor_ratio2.npz", tmp_path)
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: change(right(*a, **k)))
    lines, _ = parity.check(tmp_path)
    assert {x.array.split(",")[0].rstrip("67").removesuffix("_after") for x in lines if not x.passed} == missed


def test_a_ring_with_wrong_places_is_a_miss(golden: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copy(golden / "ops" / "window_indices.npz", tmp_path)
    past, filled = Cache.past, Cache.filled
    monkeypatch.setattr(Cache, "past", lambda self, layer: past(replace(self, length=self.length + 1), layer))
    assert missed(tmp_path) == {"in the ring"}
    monkeypatch.setattr(Cache, "past", past)
    monkeypatch.setattr(Cache, "filled", lambda self: filled(replace(self, length=self.length - 1)))
    assert missed(tmp_path) == {"filled places"}  # of rows that are not full


def missed(folder: Path) -> set[str]:
    return {x.array.split(", ")[1] for x in parity.check(folder)[0] if not x.passed}


@pytest.mark.slow
def test_quantisers_are_compared_in_both_types_eager_and_jitted(checked: Any) -> None:
    for name in op_parity.FORMATS:
        lines = [x for x in checked[0] if x.trace == f"{name}_bf16in"]
        assert all(x.kind == "bits" for x in lines)
        made = {tuple(x.array.split(", ")[-2:]) for x in lines}
        assert made == {(how, dtype) for how in ("eager", "jit") for dtype in ("float32", "bfloat16")}


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("byte_tables", "e4m3"),
        ("engram_hash_released", "ids_masked"),
        ("fp4_group16_e4m3_f32in", "packed"),
        ("router", "indices_vl"),
        ("rope", "y"),
        ("swiglu_limit", "out"),
    ],
)
def test_one_changed_number_gives_status_1(name: str, array: str, golden: Path, tmp_path: Path) -> None:
    arrays = op_parity.load(golden / "ops" / f"{name}.npz")
    changed = arrays[array].reshape(-1)
    changed[3] += 1
    np.savez(tmp_path / f"{name}.npz", **arrays)
    report = tmp_path / "out" / "report.json"
    report.parent.mkdir()
    assert parity.main(tmp_path, report) == 1
    missed = {x["array"].split(",")[0] for x in json.loads(report.read_text())["lines"] if not x["passed"]}
    assert missed == {array}


def test_a_changed_normal_form_gives_status_1(golden: Path, tmp_path: Path) -> None:
    records = json.loads((golden / "ops" / "engram_token_normalization.json").read_text())
    records[0]["normalized"] += "x"
    (tmp_path / "engram_token_normalization.json").write_text(json.dumps(records))
    assert parity.main(tmp_path) == 1


def test_files_and_arrays_that_no_code_knows_are_named(golden: Path, tmp_path: Path) -> None:
    arrays = op_parity.load(golden / "ops" / "swiglu_limit.npz")
    np.savez(tmp_path / "swiglu_limit.npz", **arrays, new=np.zeros(2))
    np.savez(tmp_path / "later.npz", x=np.zeros(2))
    lines, uncovered = parity.check(tmp_path)
    assert [line.array for line in lines] == ["out"]
    assert uncovered == ["later: all of it", "swiglu_limit: new"]


@pytest.mark.parametrize("change", [{"gate": None}, {"gate": np.zeros((3, 5))}], ids=["missing", "misshapen"])
def test_files_of_other_arrays_are_refused_by_name(change: dict[str, Any], golden: Path, tmp_path: Path) -> None:
    arrays = op_parity.load(golden / "ops" / "swiglu_limit.npz") | change
    np.savez(tmp_path / "swiglu_limit.npz", **{k: a for k, a in arrays.items() if a is not None})
    with pytest.raises(ValueError, match=r"swiglu_limit\.npz: expected the arrays that the folder's README lists"):
        parity.check(tmp_path)


def test_a_damaged_list_of_texts_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "engram_token_normalization.json").write_text("[{")
    with pytest.raises(ValueError, match=r"engram_token_normalization\.json"):
        parity.check(tmp_path)


def test_a_folder_with_a_model_is_compared_as_a_model(golden: Path, tmp_path: Path) -> None:
    shutil.copy(golden / "ops" / "swiglu_limit.npz", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no weights\.npz"):
        parity.check(tmp_path)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (np.float32([-0.0]), np.float32([0.0])),
        (np.float32([1 + 2**-23]), np.float32([1.0])),
        (np.float32([np.nan]), np.float32([1.0])),
        (np.float64([1.0]), np.float32([1.0])),
        (np.float32([1.0]), np.int64([1])),
        (np.int32([[1]]), np.int64([1])),
    ],
)
def test_bits_that_differ_are_a_miss(got: np.ndarray, want: np.ndarray) -> None:
    assert not bits_line("t", "n", got, want).passed


def test_equal_numbers_of_another_integer_type_and_any_nan_are_equal_bits() -> None:
    assert bits_line("t", "n", np.int32([7]), np.int64([7])).passed
    assert bits_line("t", "n", np.float32([-np.nan]), np.float32([np.nan])).passed


def test_json_nested_too_deep_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "engram_token_normalization.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"engram_token_normalization\.json"):
        parity.check(tmp_path)


@pytest.mark.parametrize("dtype", [str, np.complex64])
@pytest.mark.parametrize("names", [("out",), ("gate", "up", "out")])
def test_vectors_that_are_no_real_numbers_are_refused_by_array(dtype, names, golden: Path, tmp_path: Path) -> None:
    arrays = op_parity.load(golden / "ops" / "swiglu_limit.npz")
    np.savez(tmp_path / "swiglu_limit.npz", **arrays | {name: arrays[name].astype(dtype) for name in names})
    with pytest.raises(ValueError, match=rf"swiglu_limit\.npz: .*{names[-1] if len(names) == 1 else ''}.*real numbers"):
        parity.check(tmp_path)


def test_vectors_without_entries_or_without_a_compared_array_are_a_miss(golden: Path, tmp_path: Path) -> None:
    arrays = op_parity.load(golden / "ops" / "swiglu_limit.npz")
    np.savez(tmp_path / "swiglu_limit.npz", **{name: a[:0] for name, a in arrays.items()})
    arrays = op_parity.load(golden / "ops" / "candidates_topk.npz")
    np.savez(tmp_path / "candidates_topk.npz", **{n: a for n, a in arrays.items() if not n.endswith("params")})
    lines, _ = parity.check(tmp_path)
    assert [(line.trace, line.passed) for line in lines] == [("candidates_topk", False), ("swiglu_limit", False)]


def test_a_link_to_nothing_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "rope.npz").symlink_to(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"rope\.npz"):
        parity.check(tmp_path)
