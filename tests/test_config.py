"""config.py: the checkpoint's config.json and back, and refusals that name the key and the fix."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dsflash_jax.config import Compute, Config, Objective
from dsflash_jax.validation import validate

TINY = ("tiny_text", "tiny_engram", "tiny_full", "tiny_grads")


@pytest.fixture(scope="module")
def released(golden: Path) -> dict[str, Any]:
    return json.loads((golden / "config.released.json").read_text())


@pytest.fixture(scope="module")
def tiny(golden: Path) -> Config:
    return Config.from_json(golden / "tiny_text" / "config.json")


def test_released_file_round_trips_to_the_same_text(golden: Path) -> None:
    text = (golden / "config.released.json").read_text()
    assert json.dumps(Config.from_json(golden / "config.released.json").to_json(), indent=2) == text


def test_python_form_of_the_released_model_equals_the_file(released: dict[str, Any]) -> None:
    from configs.released import config

    assert config.to_json() == released


@pytest.mark.parametrize("name", TINY)
def test_tiny_files_round_trip(golden: Path, name: str) -> None:
    data = json.loads((golden / name / "config.json").read_text())
    config = Config.from_json(data)
    data["text_config"] |= {"use_cache": True, "initializer_range": 0.02}  # released values, absent in these files
    assert config.to_json() == data
    assert Config.from_json(config.to_json()) == config


def test_gate_temperature_survives_the_round_trip(tiny: Config) -> None:
    warm = dataclasses.replace(tiny, gate_temp=2.0)
    assert Config.from_json(warm.to_json()) == warm


def test_reading_leaves_the_given_data_alone(released: dict[str, Any]) -> None:
    before = copy.deepcopy(released)
    Config.from_json(released)
    assert released == before


@pytest.mark.parametrize(
    ("path", "wrong", "right"),
    [
        ((), "image_token", "image_token_id"),
        ((), "vision_conf", "vision_config"),
        (("text_config",), "index_topkk", "index_topk"),
        (("text_config",), "kv_sources_layer_ids", "kv_source_layer_ids"),
        (("text_config", "rope_scaling"), "beta_fst", "beta_fast"),
        (("vision_config",), "patchsize", "patch_size"),
        (("quantization_config",), "scale_format", "scale_fmt"),
    ],
)
def test_misspelt_key_raises_and_names_the_nearest(
    released: dict[str, Any], path: tuple[str, ...], wrong: str, right: str
) -> None:
    data = copy.deepcopy(released)
    level = data
    for key in path:
        level = level[key]
    level[wrong] = level.pop(right)
    with pytest.raises(ValueError, match=f"{path[-1] if path else 'config.json'}: unknown key '{wrong}'.*'{right}'"):
        Config.from_json(data)


def test_missing_key_is_named(released: dict[str, Any]) -> None:
    data = copy.deepcopy(released)
    del data["text_config"]["q_lora_rank"]
    with pytest.raises(ValueError, match="text_config: missing q_lora_rank"):
        Config.from_json(data)


def test_flat_form_is_refused_with_the_expected_form(golden: Path) -> None:
    with pytest.raises(ValueError, match="no text_config: expected the checkpoint's nested form"):
        Config.from_json(golden / "tiny_text" / "config.inference.json")


@pytest.mark.parametrize(
    ("level", "key", "value"), [(None, "model_type", "deepseek_v4"), ("text_config", "num_key_value_heads", 8)]
)
def test_another_architecture_is_refused(released: dict[str, Any], level: str | None, key: str, value: Any) -> None:
    data = copy.deepcopy(released)
    (data[level] if level else data)[key] = value
    with pytest.raises(ValueError, match=f"{key} must be"):
        Config.from_json(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be at least 1, got 0"),
        ({"index_topk": 0}, "index_topk must be at least 1"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive"),
        ({"gate_temp": 0.0}, "gate_temp must be positive"),
        ({"o_groups": 3}, "o_groups=3 does not divide num_attention_heads=4"),
        ({"qk_rope_head_dim": 34}, "qk_rope_head_dim=34 exceeds head_dim=32"),
        ({"qk_rope_head_dim": 15}, "even and positive .* got 15"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds n_routed_experts=6"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 0 or 1"),
        ({"engram_layer_ids": (1,)}, "engram_num_embeddings lists 0 tables for 1 engram_layer_ids"),
        ({"engram_layer_ids": (1,), "engram_num_embeddings": (8,)}, "engram_max_ngram_size must be at least 2, got 1"),
    ],
)
def test_impossible_values_are_refused(tiny: Config, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"factor": 0.5}, "factor must be at least 1"), ({"rope_type": "linear"}, "must be 'yarn'")],
)
def test_impossible_rope_scaling_is_refused(tiny: Config, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny, rope_scaling=dataclasses.replace(tiny.rope_scaling, **changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Compute(query_chunk=0), "compute.query_chunk must be at least 1, got 0"),
        (lambda: Compute(loss_chunk=-1), "compute.loss_chunk must be at least 1, got -1"),
        (lambda: Objective(balance_weight=-1.0), "objective.balance_weight must not be negative"),
    ],
)
def test_run_records_refuse_wrong_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        (Config, "scoring_func", "sigmod", "scoring_func='sigmod' is not one of .*did you mean 'sigmoid'"),
        (Compute, "remat", "ful", "remat='ful' is not one of .*did you mean 'full'"),
        (Objective, "index_keys", "top", "index_keys='top' is not one of .*did you mean 'topk'"),
    ],
)
def test_a_value_outside_the_choices_is_refused(tiny: Config, kind: type, key: str, value: str, message: str) -> None:
    record = dataclasses.replace(tiny) if kind is Config else kind()
    object.__setattr__(record, key, value)  # the type checker of the tests would stop it in __init__
    with pytest.raises(ValueError, match=message):
        record.__post_init__()


def test_with_modes_keeps_draft_stages_and_everything_else(golden: Path) -> None:
    config = Config.from_json(golden / "tiny_full" / "config.json")
    other = config.with_modes("Se F1 U Ut")
    assert other.compress_ratios == (0, 1, 1, 1, 0, 0)
    assert (other.num_hidden_layers, other.dspark_target_layer_ids, other.engram_layer_ids) == (4, (3,), (0,))
    assert dataclasses.replace(config.with_modes(config.modes)) == config


def test_with_modes_takes_tables_for_new_engram_layers(tiny: Config) -> None:
    with pytest.raises(ValueError, match=r"n-gram memory at layers \[0, 1\], but engram_num_embeddings lists 0 tables"):
        tiny.with_modes("Se F1e")
    both = tiny.with_modes("Se F1e", engram_num_embeddings=(11, 13), engram_max_ngram_size=2, engram_n_heads=1,
                           engram_head_dim=8, engram_vocab_size=10, engram_compressed_vocab_size=96)  # fmt: skip
    assert (both.engram_layer_ids, both.engram_num_embeddings) == ((0, 1), (11, 13))


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"engram_num_embeddings": (5,)}])
def test_with_modes_refuses_a_change_that_contradicts_the_string(tiny: Config, change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(change))}=.* contradicts modes='S F1'"):
        tiny.with_modes("S F1", **change)


def changed(c: Config, path: str, value: Any) -> Config:
    """`c` with one field replaced, dotted if it is inside another record."""
    outer, _, inner = path.partition(".")
    return dataclasses.replace(
        c, **{outer: dataclasses.replace(getattr(c, outer), **{inner: value}) if inner else value}
    )


@pytest.fixture(scope="module")
def full(golden: Path) -> Config:
    """Everything on: images, n-gram memory, two draft stages, quantised storage."""
    return Config.from_json(golden / "tiny_full" / "config.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rms_norm_eps", math.inf, "rms_norm_eps must be positive and finite, got inf"),
        ("routed_scaling_factor", math.nan, "routed_scaling_factor must be finite and not negative, got nan"),
        ("compress_rope_theta", 1.0, "compress_rope_theta must be above 1 and finite, got 1.0: YaRN divides"),
        ("rope_scaling.beta_fast", 1, "rope_scaling.beta_fast=1 must exceed rope_scaling.beta_slow=1: faster"),
        ("rope_scaling.beta_slow", 0, "rope_scaling.beta_slow must be positive and finite, got 0"),
        ("rope_scaling.original_max_position_embeddings", 0,
         "rope_scaling.original_max_position_embeddings must be at least 1, got 0"),
        ("bos_token_id", 96, r"bos_token_id=96 is no token: vocab_size=96 has ids 0\.\.95"),
        ("eos_token_id", -1, "eos_token_id=-1 is no token"),
        ("pad_token_id", 96, "pad_token_id=96 is no token"),
        ("image_token_id", 96, "image_token_id=96 is no token"),
        ("dspark_noise_token_id", 96, "dspark_noise_token_id=96 is no token"),
        ("engram_pad_token_id", 96, "engram_pad_token_id=96 is no token"),
        ("engram_pad_token_id", 48, "engram_pad_token_id=48 has no class: engram_compressed_vocab_size=48 is too"),
        ("engram_compressed_vocab_size", 0, "engram_compressed_vocab_size must be at least 1, got 0"),
        ("engram_n_heads", 0, "engram_n_heads must be at least 1, got 0"),
        ("engram_head_dim", 0, "engram_head_dim must be at least 1, got 0"),
        ("engram_num_embeddings", (185,), r"engram_num_embeddings=\[185\], but the primes .* set .*=\[184\]"),
        ("engram_num_embeddings", (), r"lists 0 tables for 1 engram_layer_ids=\[0\]: give one"),
        ("engram_vocab_size", 2**30, "row numbers are int32, but engram_vocab_size=1073741824 .* lower one of them"),
        ("engram_n_heads", 10**9, "row numbers are int32, but .*engram_n_heads=1000000000"),
        ("num_nextn_predict_layers", -1, "num_nextn_predict_layers must be at least 0, got -1"),
        ("dspark_block_size", 0, "dspark_block_size must be at least 1, got 0, which 2 draft stages need"),
        ("dspark_markov_rank", 0, "dspark_markov_rank must be at least 1, got 0"),
        ("dspark_n_routed_experts", 0, "dspark_n_routed_experts must be at least 1, got 0"),
        ("dspark_num_experts_per_tok", 0, "dspark_num_experts_per_tok must be at least 1, got 0"),
        ("dspark_num_experts_per_tok", 5, "dspark_num_experts_per_tok=5 exceeds dspark_n_routed_experts=4"),
        ("dspark_target_layer_ids", (), r"dspark_target_layer_ids=\[\] gives 2 draft stages nothing to read"),
        ("dspark_target_layer_ids", (5, 3), r"dspark_target_layer_ids=\[5, 3\] must be ascending without repeats"),
        ("dspark_target_layer_ids", (3, 6), "dspark_target_layer_ids names layer 6"),
        ("vision.model_type", "siglip", "vision.model_type must be 'deepseek_v41_vision', got 'siglip'"),
        ("vision.num_attention_heads", 3, "vision.num_attention_heads=3 does not divide vision.hidden_size=32"),
        ("vision.num_attention_heads", 16, "vision.num_attention_heads=16 gives heads of 2 channels: .*multiple of 4"),
        ("vision.num_attention_heads", 0, "vision.num_attention_heads must be at least 1, got 0"),
        ("vision.num_hidden_layers", 0, "vision.num_hidden_layers must be at least 1, got 0"),
        ("vision.hidden_size", 0, "vision.hidden_size must be at least 1, got 0"),
        ("vision.intermediate_size", 0, "vision.intermediate_size must be at least 1, got 0"),
        ("vision.patch_size", 0, "vision.patch_size must be at least 1, got 0"),
        ("vision.downsample_ratio", 0, "vision.downsample_ratio must be at least 1, got 0"),
        ("vision.min_pixels", 0, "vision.min_pixels must be at least 1, got 0"),
        ("vision.rope_theta", 0.0, "vision.rope_theta must be positive and finite, got 0.0"),
        ("vision.max_image_tokens", 3, "vision.max_image_tokens=3 holds no image: the smallest span has 4"),
        ("vision.max_wh_ratio", 0.5, "vision.max_wh_ratio must be at least 1 and finite, got 0.5; None is no limit"),
        ("quantization.quant_method", "awq", "quantization.quant_method must be 'fp8', got 'awq': no other storage"),
        ("quantization.activation_scheme", "static", "quantization.activation_scheme must be 'dynamic', got 'static'"),
        ("quantization.scale_fmt", "float32", "quantization.scale_fmt must be 'ue8m0', got 'float32'"),
        ("quantization.expert_dtype", "fp6", r"expert_dtype='fp6' is not one of \['fp4', 'fp8'\]"),
        ("quantization.weight_block_size", (32,), r"weight_block_size must be two positive numbers.* got \[32\]"),
        ("quantization.weight_block_size", (32, 0), r"weight_block_size must be two positive numbers.* got \[32, 0\]"),
    ],
)  # fmt: skip
def test_a_configuration_without_a_model_is_refused_by_field_and_value(
    full: Config, path: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        changed(full, path, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("rope_scaling.factor", 1),
        ("swiglu_limit", 0.0),
        ("vision.num_attention_heads", 8),
        ("vision.max_wh_ratio", 1.0),
        ("vision.max_image_tokens", 4),
        ("vision.min_pixels", 1),
        ("dspark_num_experts_per_tok", 4),
        ("quantization.expert_dtype", "fp8"),
        ("quantization.weight_block_size", (128, 128)),
        ("image_token_id", 95),
        ("vision", None),
        ("quantization", None),
    ],
)
def test_values_at_the_edge_of_what_is_legal_are_taken(full: Config, path: str, value: Any) -> None:
    changed(full, path, value)


def test_fields_of_parts_that_a_model_lacks_are_not_checked(tiny: Config) -> None:
    unused = {"image_token_id": 10**6, "engram_pad_token_id": 10**6, "dspark_noise_token_id": 10**6,
              "engram_compressed_vocab_size": 0, "dspark_block_size": 0}  # fmt: skip
    assert dataclasses.replace(tiny, **unused).vocab_size == 96


def test_with_modes_leaves_draft_stages_out_that_no_layer_feeds(full: Config) -> None:
    other = full.with_modes("Se F2")
    assert (other.num_nextn_predict_layers, other.compress_ratios) == (0, (0, 2))
    with pytest.raises(ValueError, match="num_nextn_predict_layers=1 contradicts modes='S F2'"):
        full.with_modes("S F2", num_nextn_predict_layers=1)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("hidden_size", 64.0, "hidden_size must be int, got 64.0"),
        ("compress_ratios", [0, 2], r"compress_ratios must be tuple\[int, ...\], got \[0, 2\]"),
        ("norm_topk_prob", 1, "norm_topk_prob must be bool, got 1"),
        ("vision.patch_size", "4", "vision.patch_size must be int, got '4'"),
        ("rope_scaling.factor", None, "rope_scaling.factor must be float, got None"),
        ("vision", {}, r"vision must be VisionConfig \| None, got \{\}"),
    ],
)
def test_a_value_of_another_type_is_refused(full: Config, path: str, value: Any, message: str) -> None:
    record, (*parents, leaf) = copy.deepcopy(full), path.split(".")
    inner = getattr(record, parents[0]) if parents else record
    object.__setattr__(inner, leaf, value)  # the type checker of the tests would stop it in __init__
    with pytest.raises(ValueError, match=message):
        validate(record)
