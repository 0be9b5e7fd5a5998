"""Sampling from a model by full forward passes over a fixed-length buffer.

The plain way, without a cache: every token costs a whole forward pass.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dsflash_jax import model
from dsflash_jax.config import Compute, Config
from dsflash_jax.model import Batch, Setup
from dsflash_jax.params import Weights


def continue_ids(
    c: Config, how: Compute, w: Weights, prompt: Int[np.ndarray, " P"], count: int, temperature: float, key: Array
) -> Int[np.ndarray, " count"]:
    """Up to `count` ids after a prompt, ending before end-of-sequence; temperature 0 is greedy.

    Raises ValueError for an empty prompt, an id outside the vocabulary, or a result longer than the model's limit.
    """
    if len(prompt) == 0:
        raise ValueError("the prompt is empty: give at least one id, for example the beginning-of-sequence id")
    if prompt.min() < 0 or prompt.max() >= c.vocab_size:
        raise ValueError(f"prompt ids must lie in 0..{c.vocab_size - 1}, got {prompt.min()}..{prompt.max()}")
    total = len(prompt) + count
    if total > c.max_position_embeddings:
        raise ValueError(
            f"{len(prompt)} prompt ids and {count} new ones exceed max_position_embeddings={c.max_position_embeddings}"
        )
    buffer = jnp.zeros((1, total), jnp.int32).at[0, : len(prompt)].set(jnp.asarray(prompt, jnp.int32))
    step = jax.jit(partial(_next, c, how), static_argnames="greedy", donate_argnames="buffer")
    for at in range(len(prompt), total):
        buffer = step(w, buffer=buffer, at=at, key=key, temperature=temperature or 1.0, greedy=temperature == 0)
        if int(buffer[0, at]) == c.eos_token_id:
            return np.asarray(buffer)[0, len(prompt) : at]
    return np.asarray(buffer)[0, len(prompt) :]


def _next(
    c: Config,
    how: Compute,
    w: Weights,
    buffer: Int[Array, "1 T"],
    at: Array,
    key: Array,
    temperature: Array,
    greedy: bool,
) -> Int[Array, "1 T"]:
    """The buffer with the id at row `at` drawn; what lies behind it is not seen, for the model is causal."""
    positions = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None]
    y, _ = model.forward(Setup(c, how), w, Batch(buffer, jnp.ones_like(buffer), positions))
    row: Float[Array, " V"] = model.logits(w["head"], jax.lax.dynamic_index_in_dim(y[0], at - 1, keepdims=False))
    drawn = jnp.argmax(row) if greedy else jax.random.categorical(jax.random.fold_in(key, at), row / temperature)
    return buffer.at[0, at].set(drawn.astype(jnp.int32))
