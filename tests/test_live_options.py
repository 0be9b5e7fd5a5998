"""config.py: every field of every record changes what a model computes, holds, reads or stores, or is refused.

Each field is changed alone. `Compute` is left out: it changes how and not what, as other tests say of each field.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from configs.demo import config as run
from dsflash_jax import checkpoint, draft, flow, hyper, inventory, loss, model, modes, pixels, vision
from dsflash_jax.config import Config, Objective, QuantizationConfig, Quantize, RopeScaling, VisionConfig
from dsflash_jax.flow import Setup
from dsflash_jax.params import leaves

# Everything is on. Widths are whole groups of the quantisers; eps and rotations are such that a small change shows.
WHOLE = dataclasses.replace(
    tiny.with_modes(
        "Se F1pt X", hc_mult=2, num_nextn_predict_layers=1, dspark_block_size=2, dspark_noise_token_id=38,
        dspark_markov_rank=4, dspark_n_routed_experts=3, dspark_num_experts_per_tok=2,
    ),
    hidden_size=32, moe_intermediate_size=32, head_dim=32, qk_rope_head_dim=8, q_lora_rank=32, o_lora_rank=16,
    index_head_dim=32, rms_norm_eps=1e-3, image_token_id=39, quantization=QuantizationConfig(),
    compress_rope_theta=100.0, rope_scaling=RopeScaling(beta_fast=4, original_max_position_embeddings=200),
    vision=VisionConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=8, patch_size=2,
        downsample_ratio=2, max_image_tokens=20, min_pixels=16,
    ),
)  # fmt: skip
WINDOW, COMPRESSED, GROUP = "S", "F1p X", "F1 U"  # the layers that show a field
WIDTH = 14
PLAIN = Quantize()
HOW = dataclasses.replace(tiny.STRICT, experts="dense")
AIM = Objective(index_keys="topk+random", index_random=1, balance_weight=0.1, z_weight=0.1)

# Fields that change which weights exist or their shapes.
SHAPES = {
    "vocab_size": 41, "hidden_size": 64, "moe_intermediate_size": 12, "num_attention_heads": 4, "head_dim": 12,
    "q_lora_rank": 12, "o_lora_rank": 6, "o_groups": 1, "n_routed_experts": 5, "index_n_heads": 4,
    "index_head_dim": 8, "n_shared_experts": 0, "hc_mult": 3, "engram_head_dim": 8, "dspark_target_layer_ids": (0, 1),
    "dspark_markov_rank": 8, "dspark_n_routed_experts": 4, "vision": None, "vision.num_hidden_layers": 2,
    "vision.hidden_size": 24, "vision.intermediate_size": 12, "vision.patch_size": 4, "vision.downsample_ratio": 3,
}  # fmt: skip
# Fields that change what the same weights compute: in a window layer, in compressed ones, through the rotations,
# through the rows of the n-gram tables, in the draft head, in the image tower.
OF_WINDOW = {
    "qk_rope_head_dim": 2, "num_experts_per_tok": 1, "sliding_window": 3, "swiglu_limit": 0.1,
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 2.0, "gate_temp": 2.0,
    "rms_norm_eps": 1e-2, "hc_sinkhorn_iters": 1, "hc_eps": 1e-2,
}  # fmt: skip
OF_COMPRESSED = {
    "index_topk": 1, "candidate_topk_blocks": 1, "candidate_source_layer_id": -1, "candidate_block_size": 1,
}  # fmt: skip
OF_ANGLES = {
    "rope_theta": 100.0, "compress_rope_theta": 160000.0, "rope_scaling.factor": 2.0, "rope_scaling.beta_fast": 2.0,
    "rope_scaling.beta_slow": 2.0, "rope_scaling.original_max_position_embeddings": 64,
}  # fmt: skip
OF_ROWS = {"engram_pad_token_id": 3, "engram_compressed_vocab_size": 41}
OF_DRAFT = {"dspark_noise_token_id": 4, "dspark_num_experts_per_tok": 1, "dspark_block_size": 3}
OF_TOWER = {"vision.rope_theta": 100.0, "vision.num_attention_heads": 1}
# Fields that change how large an image becomes.
OF_PICTURES = {"vision.max_image_tokens": 10, "vision.min_pixels": 200, "vision.max_wh_ratio": 1.5}
# Fields that change what a checkpoint weighs.
OF_STORAGE = {
    "dtype": "bfloat16", "quantization": None, "quantization.expert_dtype": "fp8",
    "quantization.weight_block_size": (16, 32),
}  # fmt: skip
# Fields of a model that a run on bytes refuses, because its data hold other ids or longer rows.
OF_RUNS = {"bos_token_id": 3, "eos_token_id": 3, "pad_token_id": 3, "max_position_embeddings": 100}
# Fields that contradict another one when changed alone, or have one legal value: the message says how to mend it. The
# id of image tokens is the data's choice (what it embeds is overwritten), as long as it is one.
REFUSED = {
    "num_hidden_layers": (5, "compress_ratios has 4 entries"),
    "compress_ratios": ((0, 2, 1, 0), "but reads the KV of layer 1"),
    "kv_source_layer_ids": ((2,), "no earlier layer makes one"),
    "index_source_layer_ids": ((2,), "add 1 to index_source_layer_ids"),
    "engram_layer_ids": ((), "engram_num_embeddings lists 1 tables"),
    "engram_num_embeddings": ((61,), r"sum to \[60\]"),
    "engram_max_ngram_size": (4, r"engram_num_embeddings=\[60\]"),
    "engram_vocab_size": (13, r"engram_num_embeddings=\[60\]"),
    "engram_n_heads": (3, r"engram_num_embeddings=\[60\]"),
    "num_nextn_predict_layers": (2, "compress_ratios has 4 entries"),
    "image_token_id": (40, "image_token_id=40 is no token"),
    "rope_scaling.rope_type": ("linear", "rope_type must be 'yarn'"),
    "vision.model_type": ("siglip", "model_type must be 'deepseek_v41_vision'"),
    "quantization.quant_method": ("int4", "quant_method must be 'fp8'"),
    "quantization.activation_scheme": ("static", "activation_scheme must be 'dynamic'"),
    "quantization.scale_fmt": ("float32", "scale_fmt must be 'ue8m0'"),
}
OF_LOSS = {
    "index_weight": 0.5, "index_keys": "topk", "index_random": 8, "index_teacher": "group_mean", "balance_weight": 0.2,
    "z_weight": 0.2,
}  # fmt: skip
OF_ROUNDING = ("kv_fp4", "index_fp4", "window_fp8", "linear_fp8")
LISTS = (
    SHAPES, OF_WINDOW, OF_COMPRESSED, OF_ANGLES, OF_ROWS, OF_DRAFT, OF_TOWER, OF_PICTURES, OF_STORAGE, OF_RUNS, REFUSED,
    ("initializer_range",),
)  # fmt: skip


def paths(kind: type, prefix: str = "") -> list[str]:
    """Every field of a record, those of records inside it dotted; one that may be None counts itself, too."""
    out = []
    for name, hint in get_type_hints(kind).items():
        inner = [k for k in (hint, *get_args(hint)) if dataclasses.is_dataclass(k)]
        optional = types.NoneType in get_args(hint)
        out += [prefix + name] * (not inner or optional)
        for record in inner:
            out += paths(record, f"{prefix}{name}.")
    return out


def changed(c: Config, path: str, value: Any) -> Config:
    outer, _, inner = path.partition(".")
    return dataclasses.replace(
        c, **{outer: dataclasses.replace(getattr(c, outer), **{inner: value}) if inner else value}
    )


def differ(a: Any, b: Any) -> bool:
    """Whether two trees of arrays differ in shape, or by more than sums in another order do."""
    pairs = list(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    return any(x.shape != y.shape for x, y in pairs) or any(np.abs(x - y).max() > 1e-5 for x, y in pairs)


def shapes(c: Config) -> dict[str, tuple]:
    return {path: w.full_shape for path, w in leaves(checkpoint.declare(c)).items()}


def test_every_field_is_in_one_list():
    assert sorted(path for fields in LISTS for path in fields) == sorted(paths(Config))
    assert list(OF_LOSS) == paths(Objective)
    assert list(OF_ROUNDING) == paths(Quantize)


def test_every_change_is_one():
    for fields in LISTS:
        for path in fields if isinstance(fields, dict) and fields is not REFUSED else ():
            at = functools.reduce(getattr, path.split("."), run.model if fields is OF_RUNS else WHOLE)
            assert at != fields[path], path


@pytest.mark.parametrize("path", SHAPES)
def test_a_field_changes_what_weights_there_are(path):
    assert shapes(changed(WHOLE, path, SHAPES[path])) != shapes(WHOLE)


def test_initializer_range_is_the_spread_of_new_matrices():
    def spread(c: Config) -> float:
        return float(jnp.std(leaves(model.declare(c))["head"].init(jax.random.key(0), (9, 9), jnp.float32)))

    wide = spread(dataclasses.replace(WHOLE, initializer_range=0.05))
    np.testing.assert_allclose(wide / spread(WHOLE), 0.05 / 0.02, rtol=1e-5)


@functools.cache
def output(c: Config, quantize: Quantize = PLAIN) -> np.ndarray:
    """Hidden states of one row."""
    batch = tiny.batch(c, tiny.tokens(WHOLE, 1, WIDTH))
    forward = tiny.jit(lambda w, batch: model.forward(Setup(c, HOW, quantize=quantize), w, batch)[0])
    return np.asarray(forward(tiny.weights(c), batch))


@pytest.mark.parametrize(
    ("layers", "path", "value"),
    [(WINDOW, *item) for item in OF_WINDOW.items()] + [(COMPRESSED, *item) for item in OF_COMPRESSED.items()],
)
def test_a_field_changes_the_output(layers, path, value):
    c = WHOLE.with_modes(layers)
    other = changed(c, path, value)
    assert shapes(other) == shapes(c)
    assert differ(output(other), output(c))


@pytest.mark.parametrize("name", OF_ROUNDING)
def test_a_rounding_switch_changes_the_output(name):
    c = WHOLE.with_modes(COMPRESSED)
    assert differ(output(c, Quantize(**{name: True})), output(c))


@functools.cache
def layers_of_whole() -> Any:
    """All layers, compiled once: the batch and what follows from it are arguments."""

    def layers(w, batch, ctx):
        stream = flow.Stream(*hyper.start(w["embed"][batch.tokens], WHOLE.hc_mult))
        return model.run(Setup(WHOLE, HOW), modes.plan(WHOLE.table), w["layers"], stream, flow.Shared(), ctx)[0].x

    return tiny.jit(layers)


def through_context(c: Config) -> np.ndarray:
    batch = tiny.batch(c, tiny.tokens(WHOLE, 1, WIDTH))
    return np.asarray(layers_of_whole()(tiny.weights(WHOLE), batch, flow.context(c, batch)))


@pytest.mark.parametrize(("path", "value"), (OF_ANGLES | OF_ROWS).items())
def test_a_field_changes_the_output_through_what_layers_read_off_the_batch(path, value):
    other = changed(WHOLE, path, value)
    assert shapes(other) == shapes(WHOLE)
    assert differ(through_context(other), through_context(WHOLE))


@functools.cache
def drafted(c: Config) -> Any:
    """Drafted ids, logits and confidence behind a row of made-up taps."""
    w = tiny.weights(c, declare=checkpoint.declare)
    taps = jax.random.normal(jax.random.key(0), (1, 1, WIDTH, c.hidden_size), jnp.float32)

    def propose(w, taps):
        setup, at = Setup(c, HOW), jnp.full(1, WIDTH - 1, jnp.int32)
        return draft.draft(setup, w, jnp.full(1, 5, jnp.int32), tiny.rings(setup, w, taps, at))

    return jax.device_get(tiny.jit(propose)(w, taps))


@pytest.mark.parametrize(("path", "value"), OF_DRAFT.items())
def test_a_field_changes_what_is_drafted(path, value):
    other = changed(WHOLE, path, value)
    assert shapes(other) == shapes(WHOLE)
    assert differ(drafted(other), drafted(WHOLE))


@functools.cache
def features(c: Config) -> np.ndarray:
    """What the tower makes of a picture of 4 x 4 patches."""
    patches = jax.random.normal(jax.random.key(0), (1, 16, 12), jnp.float32)
    encode = tiny.jit(lambda w, patches: vision.encode(w, patches, jnp.full((1, 2), 4, jnp.int32), c, HOW))
    return np.asarray(encode(tiny.weights(c, declare=vision.weights), patches))


@pytest.mark.parametrize(("path", "value"), OF_TOWER.items())
def test_a_field_changes_the_features_of_an_image(path, value):
    other = changed(WHOLE, path, value)
    assert shapes(other) == shapes(WHOLE)
    assert differ(features(other), features(WHOLE))


@pytest.mark.parametrize(("path", "value"), OF_PICTURES.items())
def test_a_field_changes_the_grid_of_an_image(path, value):
    image = np.zeros((8, 16, 3), np.uint8)
    assert pixels.preprocess(image, WHOLE)[1] == (4, 8)
    assert pixels.preprocess(image, changed(WHOLE, path, value))[1] != (4, 8)


@pytest.mark.parametrize(("path", "value"), OF_STORAGE.items())
def test_a_field_changes_the_bytes_of_a_checkpoint(path, value):
    other = changed(WHOLE, path, value)
    assert shapes(other) == shapes(WHOLE)
    stored = [inventory.checkpoint(inventory.items(c)) for c in (WHOLE, other)]
    assert stored[0] != stored[1]


@pytest.mark.parametrize(("path", "value"), OF_RUNS.items())
def test_a_field_must_agree_with_the_data_of_a_run(path, value):
    with pytest.raises(ValueError, match=f"model.{path}={value}"):
        dataclasses.replace(run, model=changed(run.model, path, value))


@pytest.mark.parametrize("path", REFUSED)
def test_a_field_that_contradicts_another_is_refused(path):
    value, message = REFUSED[path]
    with pytest.raises(ValueError, match=message):
        changed(WHOLE, path, value)


@functools.cache
def training_loss(aim: Objective) -> float:
    c = WHOLE.with_modes(GROUP)
    batch = tiny.batch(c, tiny.tokens(WHOLE, 1, WIDTH))
    total = tiny.jit(lambda w, batch, key: loss.total(Setup(c, HOW, aim), w, batch, key)[0])
    return float(total(tiny.weights(c), batch, jax.random.key(0)))


@pytest.mark.parametrize("name", OF_LOSS)
def test_a_field_of_the_objective_changes_the_loss(name):
    other = dataclasses.replace(AIM, **{name: OF_LOSS[name]})
    assert abs(training_loss(other) - training_loss(AIM)) > 1e-4
