"""config.py and model.py: every architecture field changes the output, the shapes or is refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import model
from dsflash_jax.config import Config, QuantizationConfig, RopeScaling, VisionConfig
from dsflash_jax.flow import Setup
from dsflash_jax.params import leaves

BASE = dataclasses.replace(
    tiny.with_modes("Se F1p X", hc_mult=2), rms_norm_eps=1e-3
)  # an eps that a small change shows
WIDTH = 14
# Fields that change which weights exist, their shapes, or how they start.
SHAPES = {
    "vocab_size": 41, "hidden_size": 24, "moe_intermediate_size": 12, "num_attention_heads": 4, "head_dim": 12,
    "q_lora_rank": 12, "o_lora_rank": 6, "o_groups": 1, "n_routed_experts": 5, "index_n_heads": 4,
    "index_head_dim": 8, "n_shared_experts": 0, "hc_mult": 3, "engram_head_dim": 8, "vision": VisionConfig(),
    "initializer_range": 0.05,
}  # fmt: skip
# Fields that change the numbers of the same weights.
VALUES = {
    "qk_rope_head_dim": 2, "num_experts_per_tok": 1, "sliding_window": 3, "index_topk": 1, "candidate_topk_blocks": 1,
    "candidate_source_layer_id": -1, "candidate_block_size": 1, "swiglu_limit": 0.1, "scoring_func": "softmax",
    "norm_topk_prob": False, "routed_scaling_factor": 2.0, "gate_temp": 2.0, "rms_norm_eps": 1e-2, "rope_theta": 100.0,
    "compress_rope_theta": 100.0, "rope_scaling": RopeScaling(factor=2, original_max_position_embeddings=64),
    "hc_sinkhorn_iters": 1, "hc_eps": 1e-2, "engram_pad_token_id": 3, "engram_compressed_vocab_size": 41,
}  # fmt: skip
# Fields that contradict another one when changed alone: the message says which and how to mend it.
REFUSED = {
    "num_hidden_layers": (5, "compress_ratios has 3 entries"),
    "compress_ratios": ((0, 2, 1), "but reads the KV of layer 1"),
    "kv_source_layer_ids": ((2,), "no earlier layer makes one"),
    "index_source_layer_ids": ((2,), "add 1 to index_source_layer_ids"),
    "engram_layer_ids": ((), "engram_num_embeddings lists 1 tables"),
    "engram_num_embeddings": ((61,), r"sum to \[60\]"),
    "engram_max_ngram_size": (4, r"engram_num_embeddings=\[60\]"),
    "engram_vocab_size": (13, r"engram_num_embeddings=\[60\]"),
    "engram_n_heads": (3, r"engram_num_embeddings=\[60\]"),
    "num_nextn_predict_layers": (1, "compress_ratios has 3 entries"),
    "max_position_embeddings": (0, "max_position_embeddings must be at least 1"),
}
# Read elsewhere: by data, sampling or storage, or by parts that do not exist yet (draft head, image tower).
NOT_READ_BY_THE_BACKBONE = {
    "dspark_block_size": 5, "dspark_noise_token_id": 4, "dspark_target_layer_ids": (2,), "dspark_markov_rank": 8,
    "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2, "dtype": "bfloat16", "bos_token_id": 3,
    "eos_token_id": 3, "pad_token_id": 3, "image_token_id": 3, "quantization": QuantizationConfig(),
}  # fmt: skip


def shapes(c: Config) -> dict[str, tuple]:
    return {path: w.full_shape for path, w in leaves(model.declare(c)).items()}


def output(c: Config) -> np.ndarray:
    batch = tiny.batch(c, tiny.tokens(BASE, 1, WIDTH))
    run = tiny.jit(lambda w, batch: model.forward(Setup(c, tiny.STRICT), w, batch)[0])
    return np.asarray(run(tiny.weights(c), batch))


@pytest.fixture(scope="module")
def unchanged():
    return output(BASE)


def test_every_field_is_in_one_list():
    lists = [*SHAPES, *VALUES, *REFUSED, *NOT_READ_BY_THE_BACKBONE]
    assert len(lists) == len(set(lists))
    assert set(lists) == {f.name for f in dataclasses.fields(Config)}


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_field_changes_what_weights_there_are(name):
    changed = dataclasses.replace(BASE, **{name: SHAPES[name]})
    if name == "initializer_range":
        spread = [float(jnp.std(leaves(model.declare(c))["head"].init(jax.random.key(0), (9, 9), jnp.float32)))
                  for c in (BASE, changed)]  # fmt: skip
        np.testing.assert_allclose(spread[1] / spread[0], 0.05 / 0.02, rtol=1e-5)
    else:
        assert shapes(changed) != shapes(BASE)


@pytest.mark.parametrize("name", list(VALUES))
def test_a_field_changes_the_output(name, unchanged):
    changed = dataclasses.replace(BASE, **{name: VALUES[name]})
    assert shapes(changed) == shapes(BASE)
    assert np.abs(output(changed) - unchanged).max() > 1e-5


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_field_that_contradicts_another_is_refused(name):
    value, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        model.declare(dataclasses.replace(BASE, **{name: value}))


def test_fields_that_the_backbone_does_not_read_change_nothing(unchanged):
    changed = dataclasses.replace(BASE, **NOT_READ_BY_THE_BACKBONE)
    np.testing.assert_array_equal(output(changed), unchanged)  # a field that gains an effect leaves the list
