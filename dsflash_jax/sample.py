"""Sampling from a model by full forward passes over a fixed-length buffer.

The plain way, without a cache: every token costs a whole forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsflash_jax import model
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.params import Weights
from dsflash_jax.vision import Images

RowsOf = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ids [1,T], positions [1,T] to rows [1,T,tables,N]


def continue_ids(
    setup: Setup,
    w: Weights,
    prompt: Int[np.ndarray, " P"],
    count: int,
    temperature: float,
    key: Array,
    rows_of: RowsOf | None = None,
    images: Images | None = None,
) -> Int[np.ndarray, " count"]:
    """Up to `count` ids after a prompt, ending before end-of-sequence; temperature 0 is greedy.

    A model with n-gram memory needs `rows_of`, which gives the table rows of ids at positions; it runs on the host.
    `images` are those of one row, the prompt, whose spans hold the image id. Prompts of one length with equal `count`
    share a compiled program.
    Raises ValueError for an empty prompt, an id outside the vocabulary, a result longer than the model's limit, or
    n-gram memory without `rows_of`.
    """
    c = setup.config
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one id, for example the beginning-of-sequence id")
    if prompt.min() < 0 or prompt.max() >= c.vocab_size:
        raise ValueError(f"prompt ids must lie in 0..{c.vocab_size - 1}, got {prompt.min()}..{prompt.max()}")
    total = len(prompt) + count
    if total > c.max_position_embeddings:
        raise ValueError(
            f"{len(prompt)} prompt ids and {count} new ones exceed max_position_embeddings={c.max_position_embeddings}"
        )
    if c.engram_layer_ids and rows_of is None:
        raise ValueError(f"layers {list(c.engram_layer_ids)} have n-gram memory: give rows_of, see `engram.rows`")
    ids = np.zeros((1, total), np.int32)
    ids[0, : len(prompt)] = prompt
    positions = np.arange(total, dtype=np.int32)[None]
    for at in range(len(prompt), total):
        rows = None if rows_of is None else rows_of(ids, positions)
        batch = Batch(ids, np.ones_like(ids), positions, engram_rows=rows, images=images)
        ids[0, at] = _next(setup, temperature, w, batch, at, key)
        if ids[0, at] == c.eos_token_id:
            return ids[0, len(prompt) : at]
    return ids[0, len(prompt) :]


@partial(jax.jit, static_argnums=(0, 1))
def _next(setup: Setup, temperature: float, w: Weights, batch: Batch, at: Array, key: Array) -> Int[Array, ""]:
    """The id at index `at` of the one row, drawn; what stands there or behind it is not seen: the model is causal."""
    y, _ = model.forward(setup, w, batch)
    row: Float[Array, " V"] = model.logits(w["head"], jax.lax.dynamic_index_in_dim(y[0], at - 1, keepdims=False))
    if temperature == 0:
        return jnp.argmax(row)
    return jax.random.categorical(jax.random.fold_in(key, at), row / temperature)
