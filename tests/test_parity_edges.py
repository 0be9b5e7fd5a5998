"""parity.py at its edges: damaged inputs and traces are refused or missed, without a forward of the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dsflash_jax import parity, parity_decode
from dsflash_jax.cli import main
from dsflash_jax.config import Config

EXACT, COARSE = "prefill_f32_quant.npz", "prefill_bf16_quant.npz"


def arrays(path: Path) -> dict[str, np.ndarray]:
    return dict(np.load(path))


@pytest.fixture
def bare(golden, tmp_path, monkeypatch) -> Path:
    """tiny_text without traces, and a forward that makes what the reference recorded."""
    made = arrays(golden / "tiny_text" / EXACT)
    monkeypatch.setattr(parity, "traced", lambda setup, w, batch: dict(made))
    monkeypatch.setattr(parity_decode.Road, "decoded", lambda self, start, steps: {})
    for name in ("config.json", "inputs.npz", "weights.npz"):
        shutil.copy(golden / "tiny_text" / name, tmp_path)
    return tmp_path


@pytest.fixture
def coarse(bare, golden) -> Path:
    """... with a bfloat16 trace and its float32 twin."""
    for name in (EXACT, COARSE):
        shutil.copy(golden / "tiny_text" / name, bare)
    return bare


def change(path: Path, **changed: np.ndarray) -> None:
    np.savez(path, **arrays(path) | changed)


def missed(folder: Path) -> list[str]:
    return [line.array for line in parity.check(folder)[0] if not line.passed]


def test_the_stand_in_agrees(coarse):
    assert missed(coarse) == []


@pytest.mark.parametrize(
    "damage",
    [lambda a: a[:1, :1], lambda a: a[0], lambda a: a[:, :5], lambda a: a[:0], lambda a: a.astype(str),
     lambda a: a + 1j, lambda a: a * np.nan, lambda a: a * np.inf],
    ids=["broadcasts", "row", "short", "empty", "texts", "complex", "nan", "inf"],
)  # fmt: skip
@pytest.mark.parametrize("name", [EXACT, COARSE])
def test_damaged_logits_are_a_miss(name, damage, coarse):
    change(coarse / name, logits=damage(arrays(coarse / name)["logits"]))
    assert any(array.startswith("logits") for array in missed(coarse))


@pytest.mark.parametrize("name", [EXACT, COARSE])
@pytest.mark.parametrize("array", ["zzz", "zz.router_indices", "L99.h_out"])
def test_an_array_of_no_model_is_a_miss(array, name, coarse):
    change(coarse / name, **{array: np.ones((1, 2), int)})
    assert missed(coarse) == [f"{array}, {parity.UNKNOWN}"]


@pytest.mark.parametrize("name", [EXACT, COARSE])
@pytest.mark.parametrize("ids", [np.int32(3), np.full((54, 2), "a"), np.zeros((0, 2), int), np.zeros((54, 1), int)])
def test_selections_of_another_form_are_misses(ids, name, coarse):
    change(coarse / name, **{"L0.router_indices": ids})
    assert [array.split(",")[0] for array in missed(coarse)] == ["L0.router_indices"]


def test_values_of_a_bfloat16_run_are_reported(coarse):
    values = arrays(coarse / EXACT)["L0.h_out"]
    change(coarse / COARSE, **{"L0.h_out": values + 1})
    assert missed(coarse) == []
    change(coarse / COARSE, **{"L0.h_out": values[:, :1]})
    assert [array.split(",")[0] for array in missed(coarse)] == ["L0.h_out"]


@pytest.mark.parametrize(
    "name",
    ["prefill_f32_noquant", "prefill_bf16_quant", "selections_f32_noquant", "selections_bf16_quant",
     "decode_f32_noquant_after3"],
)  # fmt: skip
def test_an_empty_trace_is_a_miss(name, bare):
    np.savez(bare / f"{name}.npz")
    (line,) = parity.check(bare)[0]
    assert not line.passed and "nothing to compare" in line.array


def test_a_trace_of_descriptions_alone_is_a_miss(bare):
    np.savez(bare / "prefill_f32_noquant.npz", router_margin=np.ones(2))
    assert len(missed(bare)) == 1


def test_drafts_of_a_model_without_a_draft_head_are_misses(bare):
    np.savez(bare / "decode_f32_noquant_after3.npz", mtp_logits=np.ones(3))
    assert missed(bare) == [f"mtp_logits, {parity.UNKNOWN}"]


def test_buffers_without_steps_are_misses(bare):
    np.savez(bare / "decode_f32_noquant_after3.npz", **{"cache.L0.window_kv_cache": np.ones((2, 8, 32))})
    assert missed(bare) == [f"cache.L0.window_kv_cache, {parity.UNKNOWN}"]


@pytest.mark.parametrize(
    ("name", "held"),
    [("decode_f32_quant_after21", {"logits": np.ones((7, 2, 1, 96))}),
     ("decode_f32_quant_after999", {"logits": np.ones((1, 2, 1, 96))}),
     ("replay_decoder_f32_quant", {"prompt_length": np.int64(22), "decode_logits": np.ones((2, 6, 96))}),
     ("replay_encoder_f32_quant_hit16", {"hit_length": np.int64(16), "suffix_logits": np.ones((2, 12, 96))})],
)  # fmt: skip
def test_a_trace_of_more_tokens_than_there_are_ids_is_named_and_does_not_pass(name, held, bare):
    np.savez(bare / f"{name}.npz", **held)
    assert parity.check(bare) == ([], [f"{name}: recorded on other inputs"])
    assert parity.main(bare) == 1


@pytest.mark.parametrize("number", [None, np.float32(3), np.ones(2, int), np.int64(0)])
@pytest.mark.parametrize(
    ("name", "length"),
    [("replay_decoder_f32_quant", "prompt_length"), ("replay_encoder_f32_quant_hit16", "hit_length")],
)
def test_a_replay_of_no_known_length_is_refused_by_file_and_array(name, length, number, bare):
    np.savez(bare / f"{name}.npz", x=np.ones(2), **({} if number is None else {length: number}))
    with pytest.raises(ValueError, match=rf"{name}\.npz: {length}: expected a number of tokens"):
        parity.check(bare)


@pytest.mark.parametrize(
    ("name", "why"),
    [("decode_shipped_slot_after20", parity.FOR_INFORMATION), ("decode_bf16_quant_after20", parity.NO_CODE),
     ("replay_decoder_f16", parity.NO_CODE), ("decode_f32_quant", parity.NO_CODE)],
)  # fmt: skip
def test_traces_that_nothing_is_compared_with_are_named_with_the_reason(name, why, bare):
    np.savez(bare / f"{name}.npz", logits=np.ones((7, 2, 1, 96)))
    assert parity.check(bare) == ([], [f"{name}: {why}"])


def test_a_replay_of_images_is_named_as_not_covered(golden, tmp_path):
    for name in ("config.json", "inputs.npz", "weights.npz"):
        shutil.copy(golden / "tiny_full" / name, tmp_path)
    shutil.copy(golden / "tiny_text" / "replay_decoder_f32_quant.npz", tmp_path)
    assert parity.check(tmp_path) == ([], [f"replay_decoder_f32_quant: {parity_decode.NO_IMAGES}"])


def test_a_bfloat16_trace_names_its_missing_float32_twin(coarse):
    (coarse / EXACT).unlink()
    with pytest.raises(ValueError, match=r"prefill_f32_quant\.npz: missing"):
        parity.check(coarse)


def test_a_bfloat16_trace_names_its_twin_without_logits(coarse):
    np.savez(coarse / EXACT, x=np.ones(2))
    with pytest.raises(ValueError, match=r"prefill_f32_quant\.npz: no logits"):
        list(parity.trace_lines(coarse / COARSE, parity.variant_of(COARSE[:-4], {}), None))


@pytest.mark.parametrize("held", [{}, {"loss": np.ones(())}, {"a": np.ones(3)}])
def test_gradients_without_loss_or_logits_are_refused(held, bare):
    np.savez(bare / "grads_f32_noquant.npz", **held)
    with pytest.raises(ValueError, match=r"grads_f32_noquant\.npz: no .*logits"):
        parity.check(bare)


@pytest.mark.parametrize(
    "damage",
    [lambda a: a + 0.5, lambda a: a * np.nan, lambda a: a.astype(str), lambda a: a > 0, lambda a: a[0],
     lambda a: a[0, 0], lambda a: a[None], lambda a: a[:0], lambda a: a[:, :0], lambda a: a - 1000,
     lambda a: a + 1000],
)  # fmt: skip
def test_ids_that_are_no_tokens_are_refused_by_file_and_array(damage, bare):
    change(bare / "inputs.npz", input_ids=damage(arrays(bare / "inputs.npz")["input_ids"]))
    with pytest.raises(ValueError, match=r"inputs\.npz: input_ids: "):
        parity.check(bare)


@pytest.mark.parametrize(
    "name", [n for n in np.load(Path(__file__).parent / "golden/tiny_full/inputs.npz").files
             if n not in ("prefill_lengths", "image_0_3_types")],
)  # fmt: skip
@pytest.mark.parametrize(
    "damage", [lambda a: a.astype(str), lambda a: a * np.nan, lambda a: a[None], lambda a: a - 10**6]
)
def test_every_damaged_input_is_refused_by_file_and_array(damage, name, golden):
    folder = golden / "tiny_full"
    c, inputs = Config.from_json(folder / "config.json"), arrays(folder / "inputs.npz")
    parity.parity_inputs.check(Path("inputs.npz"), c, inputs)
    damaged = damage(inputs[name])
    if (
        name in ("image_0_3_patches", "engram_multipliers")
        and damaged.dtype.kind in "if"
        and damaged.ndim == inputs[name].ndim
    ):
        damaged = damaged[:0]  # any finite number is good there
    with pytest.raises(ValueError, match=rf"inputs\.npz: {name}: "):
        parity.parity_inputs.check(Path("inputs.npz"), c, inputs | {name: damaged})


@pytest.mark.parametrize(
    ("name", "write"),
    [("weights.npz", lambda p: np.savez(p)), ("weights.npz", lambda p: np.savez(p, x=np.full(2, "a"))),
     ("config.json", lambda p: p.write_text("[" * 100_000)), ("config.json", lambda p: p.write_text("{}")),
     ("inputs.npz", lambda p: np.savez(p)), ("prefill_f32_noquant.npz", lambda p: p.mkdir())],
)  # fmt: skip
def test_the_command_names_the_file_it_refuses(name, write, bare, capsys):
    write(bare / name)
    with pytest.raises(SystemExit) as stopped:
        main(["parity", str(bare)])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and str(bare / name) in error and error.count("\n") == 1


def test_the_json_of_a_miss_is_strict(coarse, tmp_path):
    change(coarse / EXACT, logits=arrays(coarse / EXACT)["logits"] * np.nan)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    report = tmp_path / "report.json"
    assert main(["parity", str(coarse), "--json", str(report)]) == 1
    lines = json.loads(report.read_text(), parse_constant=refuse)["lines"]
    assert None in [line["max_diff"] for line in lines if not line["passed"]]


def test_json_on_a_full_disk_is_refused_in_one_line(coarse, tmp_path, monkeypatch, capsys):
    def full(path, *args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit) as stopped:
        main(["parity", str(coarse), "--json", str(tmp_path / "report.json")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and "report.json cannot be written: No space left" in error
    assert error.count("\n") == 1
