"""inventory.py: parameters, checkpoint bytes and optimiser bytes by part."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsflash_jax import inventory, model
from dsflash_jax.config import Config
from dsflash_jax.overrides import find
from dsflash_jax.params import map_weights, norm
from train.optim import Optim, build

RELEASED: Config = find("released")
SETS = ("tiny_text", "tiny_engram", "tiny_full", "tiny_grads")


def group_of(name: str) -> str:
    """Group of a published name."""
    if ".engram." in name:
        return "engram tables" if ".embed." in name else "engram projections"
    prefixes = {"mtp.": "dspark", "vision.": "vision", "image_": "vision", "aligner.": "aligner"}
    return next((group for prefix, group in prefixes.items() if name.startswith(prefix)), "backbone")


def test_released_parameters_are_the_published_counts() -> None:
    counts = {group: sum(parts.values()) for group, parts in inventory.parameters(inventory.items(RELEASED)).items()}
    assert counts == {
        "backbone": 551_566_180_464,
        "engram tables": 768_022_850 * 256,
        "engram projections": 2 * (25_600 * 6_144 + 2 * 4 * 5_120),
        "dspark": 14_225_362_530,
        "vision": 411_842_560 + 3 * 5_120,
        "aligner": (9_216 + 1) * 5_120 + (5_120 + 1) * 5_120,
    }
    assert round(sum(counts.values()) / 1e9, 3) == 763.205


def test_released_backbone_divides_as_published() -> None:
    parts = inventory.parameters(inventory.items(RELEASED))["backbone"]
    attention = sum(parts[part] for part in ("attention projections", "compressors", "indexers"))
    rounded = {part: round(n / 1e9, 3) for part, n in (parts | {"attention": attention}).items()}
    assert (rounded["attention"], rounded["routed experts"], rounded["shared experts"]) == (5.127, 543.582, 1.416)
    assert (rounded["routers"], rounded["hyper-connections"]) == (0.079, 0.039)
    assert round((parts["embedding"] + parts["head"]) / 1e9, 3) == 1.324


def test_released_checkpoint_has_the_published_tensors_and_bytes() -> None:
    stored = inventory.checkpoint(inventory.items(RELEASED)).values()
    assert sum(row["tensors"] for row in stored) == 96_085
    # The total_size of the published index. It pins every shape and format, scales included.
    assert sum(row["bytes"] for row in stored) == 510_286_023_000


def test_experts_in_fp8_have_the_bytes_of_the_published_encoding() -> None:
    assert RELEASED.quantization is not None
    c = replace(RELEASED, quantization=replace(RELEASED.quantization, expert_dtype="fp8"))
    assert sum(row["bytes"] for row in inventory.checkpoint(inventory.items(c)).values()) == 772_004_202_840


@pytest.mark.parametrize("name", SETS)
def test_counts_equal_the_arrays_of_the_reference(golden: Path, name: str) -> None:
    counts: dict[str, int] = {}
    experts_packed = 0
    with np.load(golden / name / "weights.npz") as arrays:
        for key in arrays.files:
            if not key.endswith(".scale"):
                packed = ".experts." in key and arrays[key].dtype == np.uint8
                experts_packed += packed
                counts[group_of(key)] = counts.get(group_of(key), 0) + arrays[key].size * (2 if packed else 1)
    listed = inventory.items(Config.from_json(golden / name / "config.json"))
    assert {group: sum(parts.values()) for group, parts in inventory.parameters(listed).items()} == counts
    assert (experts_packed > 0) == (name == "tiny_full")


@pytest.mark.parametrize("name", SETS)
def test_tensors_and_their_bytes_equal_the_arrays_of_the_reference(golden: Path, name: str) -> None:
    listed = inventory.items(Config.from_json(golden / name / "config.json"))
    # The reference keeps wo_a decoded, a checkpoint does not: one scale more a layer.
    decoded = [i for i in listed if i.path.endswith("/wo_a") and i.format == "FP8"]
    with np.load(golden / name / "weights.npz") as arrays:
        assert sum(i.tensors for i in listed) == len(arrays.files) + sum(i.copies for i in decoded)
        low_bytes = sum(arrays[key].nbytes for key in arrays.files if arrays[key].dtype == np.uint8)
    low = [i for i in listed if i.format in ("FP8", "FP4", "FP8 rows") and i not in decoded]
    assert sum(i.bytes for i in low) == low_bytes


def test_partial_tiles_and_groups_have_a_scale(golden: Path) -> None:
    c = replace(Config.from_json(golden / "tiny_full" / "config.json"), q_lora_rank=33, moe_intermediate_size=34)
    by_path = {i.path: i for i in inventory.items(c)}
    assert by_path["layers/layer0/attn/wq_a"].scales == 2 * 2  # [33, 64] in tiles of 32
    assert by_path["layers/layer0/ffn/experts/w2"].scales == 64 * 2  # [64, 34] in groups of 32 columns


def test_plain_weights_take_their_dtype(golden: Path) -> None:
    c = Config.from_json(golden / "tiny_engram" / "config.json")
    halves, wholes = (inventory.checkpoint(inventory.items(replace(c, dtype=d))) for d in ("bfloat16", "float32"))
    assert set(halves) == {"BF16", "F32", "FP8 rows"} and set(wholes) == {"F32", "FP8 rows"}
    assert wholes["F32"]["bytes"] == 2 * halves["BF16"]["bytes"] + halves["F32"]["bytes"]


def test_optimiser_bytes_equal_its_state(golden: Path) -> None:
    c = Config.from_json(golden / "tiny_engram" / "config.json")
    declared = model.declare(c)
    arrays = map_weights(lambda w: jax.ShapeDtypeStruct(w.full_shape, jnp.float32), declared)
    state = jax.tree.leaves(jax.eval_shape(build(declared, Optim(warmup_steps=1), steps=10).init, arrays))
    rows = inventory.optimiser(inventory.items(c)).values()
    assert sum(row["state"] for row in rows) == sum(a.size * 4 for a in state if a.dtype == jnp.float32)
    assert sum(row["master"] for row in rows) == sum(a.size * 4 for a in jax.tree.leaves(arrays))


def test_a_weight_of_no_known_part_is_refused() -> None:
    with pytest.raises(ValueError, match="weight layers/layer0/extra has part None"):
        inventory.item(RELEASED, "layers/layer0/extra", norm(4, "embed"))
