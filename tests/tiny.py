"""Small models that the tests share: configuration T (all layer kinds in eight layers), its weights and its rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import draft, engram, model, quant
from dsflash_jax.config import Compute, Config, RopeScaling
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.params import Weight, map_weights

# Window, ratio-2 Full and Reuse, ratio-1 Full (publishing), Reuse, Reindex, Reuse.
MODES = "S S F2 U F1p U X U"
T = Config(
    vocab_size=40, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=8, num_attention_heads=2, head_dim=8,
    qk_rope_head_dim=4, q_lora_rank=8, o_lora_rank=4, o_groups=2, n_routed_experts=4, num_experts_per_tok=2,
    sliding_window=4, compress_ratios=(0, 0, 2, 2, 1, 1, 1, 1), kv_source_layer_ids=(2, 4),
    index_source_layer_ids=(2, 4, 6), index_n_heads=2, index_head_dim=4, index_topk=2, candidate_source_layer_id=4,
    candidate_topk_blocks=2, candidate_block_size=2, max_position_embeddings=4096,
    rope_scaling=RopeScaling(original_max_position_embeddings=64), dtype="float32",
)  # fmt: skip
# Two heads for 2- and 3-grams; primes 11 13 17 19 in the first table and 23 29 31 37 in the second.
ENGRAM = {
    "engram_max_ngram_size": 3, "engram_vocab_size": 11, "engram_n_heads": 2, "engram_head_dim": 4,
    "engram_compressed_vocab_size": 40, "engram_pad_token_id": 2,
}  # fmt: skip
T_ENGRAM = dataclasses.replace(T, engram_layer_ids=(1, 3), engram_num_embeddings=(60, 120), **ENGRAM)
# Rows of the tables that ENGRAM gives one layer and two.
TABLES = {0: (), 1: (60,), 2: (60, 120)}
STRICT = Compute(dtype="float32", remat="none", query_chunk=8, loss_chunk=8)


def with_modes(text: str, **changes: Any) -> Config:
    """T with other layers, and as many n-gram tables as they have e flags."""
    return dataclasses.replace(T, **ENGRAM).with_modes(text, engram_num_embeddings=TABLES[text.count("e")], **changes)


def weights(c: Config, seed: int = 0, declare: Any = model.declare) -> dict[str, Any]:
    """Random weights that keep activations near size 1 and leave no part inert: no zero bias, unit norm or gate.

    `declare` lists them; `checkpoint.declare` has the draft stages, too.
    """
    rng = np.random.default_rng(seed)

    def draw(w: Weight) -> jax.Array:
        normal = rng.standard_normal(w.full_shape)
        if w.family == "muon":
            normal *= w.shape[w.matrix[0]] ** -0.5
        elif w.family in ("scalar", "norm", "rule"):
            normal = 0.2 * normal + (w.family == "norm")
        return jnp.asarray(normal, jnp.float32)

    return map_weights(draw, declare(c))


def batch(c: Config, tokens: Any, lengths: list[list[int]] | None = None) -> Batch:
    """Rows of `tokens` [B,T] cut into documents of `lengths`, a list a row; what is left of a row is padding.

    Without `lengths` a row is one document. Targets are the next token of the same document.
    """
    tokens = np.asarray(tokens, np.int32)
    rows, width = tokens.shape
    segments, positions = np.zeros((2, rows, width), np.int32)
    for row, documents in enumerate([[width]] * rows if lengths is None else lengths):
        start = 0
        for number, length in enumerate(documents, start=1):
            segments[row, start : start + length] = number
            positions[row, start : start + length] = np.arange(length)
            start += length
    follows = np.zeros((rows, width), bool)
    follows[:, :-1] = (segments[:, 1:] == segments[:, :-1]) & (segments[:, :-1] > 0)
    targets = np.where(follows, np.roll(tokens, -1, axis=1), 0)
    table = None
    if c.engram_layer_ids:
        compressed = tokens.astype(np.int64)
        table = jnp.asarray(engram.rows(compressed, positions, engram.layout(c), c.engram_pad_token_id))
    as_jax = [jnp.asarray(a) for a in (tokens, segments, positions, targets, follows.astype(np.float32))]
    return Batch(*as_jax, engram_rows=table)


def tokens(c: Config, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random ids [rows, width]."""
    return np.random.default_rng(seed).integers(0, c.vocab_size, (rows, width), dtype=np.int32)


def rings(setup: Setup, w: Any, taps: jax.Array, at: jax.Array) -> draft.Rings:
    """The draft stages' windows that end at position `at` [B], from the taps [N, B, T, D] of whole rows, unordered."""
    size, (_, rows, width, _) = setup.config.sliding_window, taps.shape
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32)[None], (rows, width))
    keys = setup.rounding("window_fp8", quant.Q8)(draft.main_keys(setup, w, taps, positions))  # [Z, B, T, Dh]
    index = at[:, None] - jnp.arange(size, dtype=jnp.int32)[None]
    held = jax.vmap(lambda row, i: row[:, i], in_axes=(1, 0), out_axes=1)(keys, jnp.maximum(index, 0))
    return draft.Rings(held, index >= 0, at)


def worst(got: Any, want: Any) -> dict[str, float]:
    """Largest absolute difference of each leaf over the largest entry of that leaf in `want` (or 1 if that is less)."""
    flat, _ = jax.tree_util.tree_flatten_with_path(got)
    out = {}
    for (path, a), b in zip(flat, jax.tree.leaves(want), strict=True):
        scale = max(1.0, float(np.abs(b).max(initial=0.0)))
        out[jax.tree_util.keystr(path)] = float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0.0)) / scale
    return out


# XLA's plain code path: a whole model's gradient compiles four times faster; these programs run for milliseconds.
# From jaxlib 0.11 on there is only the other code path for fusions.
OLD_PATH = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
QUICK = {"xla_backend_optimization_level": 0, **OLD_PATH}


def jit(function: Any, **options: Any) -> Any:
    """`jax.jit` with little time spent on optimising."""
    return jax.jit(function, compiler_options=QUICK, **options)
