"""checkpoint.py: tensors that a checkpoint stores in bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dsflash_jax import checkpoint
from dsflash_jax.checkpoint import Entry
from dsflash_jax.config import Config
from dsflash_jax.params import Weight, constant

E2M1 = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)  # by code
ONE = 0x38  # E4M3 code of 1.0


def entry(rows: int, columns: int, name: str = "layers.0.attn.wq_a.weight") -> Entry:
    """A published matrix [rows, columns]; ours is its transpose."""
    return Entry(name, "w", (), Weight((columns, rows), ("in", "out"), constant(0.0)))


def expected(codes: np.ndarray, scale: np.ndarray, packed: bool) -> np.ndarray:
    """Written from the definition: value(code) * 2^(byte - 127), in float64."""
    if packed:
        values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(len(codes), -1).astype(np.float64)
    else:
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    tall = 32 if len(scale) < len(codes) else 1
    factor = np.repeat(np.repeat(2.0 ** (scale.astype(np.float64) - 127), tall, axis=0), 32, axis=1)
    return values * factor[: len(values), : values.shape[1]]


@pytest.fixture(scope="module")
def full(golden: Path) -> tuple[Config, dict[str, np.ndarray], dict[str, Any]]:
    """Configuration and published tensors of the set that is in checkpoint storage, and our tree of them."""
    c = Config.from_json(golden / "tiny_full" / "config.json")
    tensors = dict(np.load(golden / "tiny_full" / "weights.npz"))
    return c, tensors, checkpoint.adopt(c, tensors)


def test_every_tensor_of_the_reference_decodes_to_its_definition(full: Any) -> None:
    c, tensors, tree = full
    got = checkpoint.publish(c, tree)
    assert set(got) == {name for name in tensors if not name.endswith(".scale")}
    kinds = set()
    for name, values in got.items():
        stored, want = tensors[name], tensors[name]
        if stored.dtype == np.uint8:
            packed = stored.shape != values.shape
            want = expected(stored, tensors[name.removesuffix(".weight") + ".scale"], packed)
            kinds.add("FP4" if packed else "rows" if "engram.embed" in name else "FP8")
        np.testing.assert_array_equal(values, want, err_msg=name)
    assert kinds == {"FP4", "rows", "FP8"}
    assert any(name.startswith("mtp.1.ffn.experts.3.") for name in got)
    assert any(name.startswith("vision.blocks.1.") for name in got)


def test_both_router_biases_survive_import_and_export(full: Any) -> None:
    c, tensors, tree = full
    names = [f"layers.{i}.ffn.gate.{bias}" for i in range(c.num_hidden_layers) for bias in ("bias", "bias_vl")]
    assert len({tensors[name].tobytes() for name in names}) == len(
        names
    )  # no two alike, so none can take another's place
    got = checkpoint.publish(c, tree)
    for name in names:
        np.testing.assert_array_equal(got[name], tensors[name], strict=True)


def test_a_tree_without_draft_stages_publishes_none(full: Any) -> None:
    c, _, tree = full
    names = set(checkpoint.publish(c, {name: below for name, below in tree.items() if name != "mtp"}))
    assert names == {e.name for e in checkpoint.entries(c) if not e.name.startswith("mtp.")}


@pytest.mark.parametrize(("byte", "value"), [(120, 0.0078125), (127, 1.0), (140, 8192.0), (0, 2.0**-127)])
def test_a_scale_byte_is_a_power_of_two(byte: int, value: float) -> None:
    codes = np.full((40, 32), ONE, np.uint8)
    for scale in (np.full((2, 1), byte, np.uint8), np.full((40, 1), byte, np.uint8)):  # tiles, rows
        np.testing.assert_array_equal(checkpoint.decode(entry(40, 32), codes, scale), np.full((40, 32), value))


@pytest.mark.parametrize("shape", [(2, 1), (40, 1)])
def test_scale_byte_255_is_refused_by_name(shape: tuple[int, int]) -> None:
    scale = np.full(shape, 127, np.uint8)
    scale[1, 0] = 255
    with pytest.raises(ValueError, match=r"wq_a\.scale\[1, 0\]: scale byte 255 is NaN"):
        checkpoint.decode(entry(40, 32), np.full((40, 32), ONE, np.uint8), scale)


def test_scales_stored_as_numbers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"wq_a\.scale: expected E8M0 scale bytes.*got float32"):
        checkpoint.decode(entry(40, 32), np.full((40, 32), ONE, np.uint8), np.ones((2, 1), np.float32))


def test_partial_tiles_use_their_own_scale() -> None:
    scale = np.asarray([[127, 128, 129], [130, 131, 132]], np.uint8)
    got = checkpoint.decode(entry(33, 70), np.full((33, 70), ONE, np.uint8), scale)
    assert got.shape == (33, 70)
    assert [got[i, j] for i in (31, 32) for j in (31, 32, 64)] == [1, 2, 4, 8, 16, 32]


def test_tiles_are_of_the_block_size_of_the_configuration(full: Any) -> None:
    c = full[0]
    name = "layers.0.attn.wq_a"  # [32, 64]
    codes = np.full((32, 64), ONE, np.uint8)
    wide = replace(c, quantization=replace(c.quantization, weight_block_size=(16, 48)))
    others = {key: np.ones(e.shape, np.float32) for e in checkpoint.entries(c) for key in [e.name]}
    scale = np.asarray([[127, 128], [129, 130]], np.uint8)
    got = checkpoint.adopt(wide, others | {name + ".weight": codes, name + ".scale": scale})
    values = got["layers"]["layer0"]["attn"]["wq_a"].T
    assert [values[i, j] for i in (15, 16) for j in (47, 48)] == [1, 2, 4, 8]
    with pytest.raises(ValueError, match=r"wq_a\.weight: bytes \(32, 64\) with scales \(2, 2\) store no values"):
        checkpoint.adopt(c, others | {name + ".weight": codes, name + ".scale": scale})


def test_codes_may_carry_the_float_dtypes_of_a_file() -> None:
    codes, scale = np.full((40, 32), ONE, np.uint8), np.full((2, 1), 128, np.uint8)
    got = checkpoint.decode(entry(40, 32), codes.view(ml_dtypes.float8_e4m3fn), scale.view(ml_dtypes.float8_e8m0fnu))
    np.testing.assert_array_equal(got, np.full((40, 32), 2.0))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_packed_experts_hold_two_codes_a_byte_low_half_first(dtype: type) -> None:
    codes = np.zeros((2, 16), np.uint8)
    codes[1, 3] = 0xA7
    got = checkpoint.decode(entry(2, 32), codes.view(dtype), np.full((2, 1), 126, np.uint8))
    assert got.shape == (2, 32)
    assert got[1, 6:8].tolist() == [3.0, -0.5]
    assert np.count_nonzero(got) == 2


def test_packed_columns_need_not_fill_a_group() -> None:
    codes = np.full((2, 17), 0x22, np.uint8)  # 34 ones
    got = checkpoint.decode(entry(2, 34), codes, np.asarray([[127, 128], [129, 130]], np.uint8))
    assert got[:, [0, 31, 32, 33]].tolist() == [[1, 1, 2, 2], [4, 4, 8, 8]]


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        ((2, 16), (2, 2)),  # a scale a 16 columns: another format
        ((2, 16), (1, 1)),  # packed values have no tiles
        ((2, 32), (2, 2)),
        ((2, 8), (2, 1)),
        ((16, 2), (2, 1)),
    ],
)
def test_shapes_of_no_format_are_refused_by_name(codes: tuple[int, int], scale: tuple[int, int]) -> None:
    expert = entry(2, 32, "layers.3.ffn.experts.5.w1.weight")
    with pytest.raises(ValueError, match=r"layers\.3\.ffn\.experts\.5\.w1\.weight: bytes .* check the block size"):
        checkpoint.decode(expert, np.zeros(codes, np.uint8), np.full(scale, 127, np.uint8))


@pytest.mark.parametrize("name", ["layers.0.attn.wq_a", "layers.0.ffn.experts.1.w2", "layers.0.engram.embed"])
def test_a_missing_scale_is_named(full: Any, name: str) -> None:
    c, tensors, _ = full
    lacking = {key: array for key, array in tensors.items() if key != name + ".scale"}
    message = rf"{name}\.weight is stored in bytes, uint8, but its scale {name}\.scale is missing"
    with pytest.raises(ValueError, match=message):
        checkpoint.adopt(c, lacking)


def test_a_scale_beside_a_plain_weight_is_refused(full: Any) -> None:
    c, tensors, _ = full
    extra = tensors | {"layers.0.attn.wo_a.scale": np.full((2, 2), 127, np.uint8)}
    with pytest.raises(ValueError, match=r"1 tensors this configuration does not have: \['layers\.0\.attn\.wo_a\.sc"):
        checkpoint.adopt(c, extra)
