"""model.py and loss.py: what a compiled training step holds and how large its program is. Nothing here is run."""

from __future__ import annotations

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import pytest
import tiny

from dsflash_jax import loss, model
from dsflash_jax.config import Compute, Config, Objective
from dsflash_jax.flow import Batch, Setup

AIM = Objective(index_keys="topk+random", index_random=8)
# 40 layers of the release, and 76 of the same distinct bodies.
DEEPER = "S Se 4(F2 5U) F2e 5U F1p 3U 9(X 3U) X 3Ut"


def step(c: Config, how: Compute, length: int) -> jax.stages.Lowered:
    """One value_and_grad of the loss over a row of `length` tokens, lowered from shapes alone."""
    w = jax.eval_shape(lambda: model.init(model.declare(c), jax.random.key(0)))
    ids, mask = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((1, length), jnp.float32)
    width = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    rows = jax.ShapeDtypeStruct((1, length, len(c.engram_layer_ids), width), jnp.int32)
    batch = Batch(ids, ids, ids, ids, mask, rows if c.engram_layer_ids else None)
    key = jax.eval_shape(lambda: jax.random.key(0))
    value = lambda w, batch, key: loss.total(Setup(c, how, AIM), w, batch, key)[0]  # noqa: E731
    return jax.jit(jax.value_and_grad(value)).lower(w, batch, key)


def temporary(lowered: jax.stages.Lowered) -> int:
    """Bytes of a program's temporary buffers."""
    memory = lowered.compile(compiler_options=tiny.QUICK).memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


@pytest.mark.slow
def test_memory_grows_with_length_and_holds_no_square():
    c = dataclasses.replace(tiny.T, hc_mult=2, vocab_size=1024, index_topk=64, sliding_window=16, n_routed_experts=2)
    c = c.with_modes("S F1p X")
    how = Compute(dtype="float32", remat="selective", experts="ragged")
    programs = {length: step(c, how, length) for length in (2048, 4096, 8192)}
    compiled = {length: lowered.compile(compiler_options=tiny.QUICK) for length, lowered in programs.items()}
    used = {length: p.memory_analysis().temp_size_in_bytes for length, p in compiled.items()}
    assert used[4096] <= 2.3 * used[2048] and used[8192] <= 2.3 * used[4096]
    # Neither T x T (2^24 entries), T x V (2^22) nor the whole row's T x K x head_dim (2^21): only chunks of them.
    shapes = re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", compiled[4096].as_text())
    largest = max(math.prod(int(n) for n in shape.split(",")) for shape in set(shapes))
    assert 4096 * 2 * 16 <= largest < 2**21


@pytest.mark.slow
def test_full_remat_keeps_the_stream_of_a_layer_and_little_else():
    length, times = 512, (4, 8, 16)
    used = {}
    for remat in ("none", "full"):
        how = Compute(dtype="float32", remat=remat, query_chunk=64, loss_chunk=64)
        configs = [dataclasses.replace(tiny.T, hc_mult=2).with_modes(f"{n}S") for n in times]
        used[remat] = [temporary(step(c, how, length)) for c in configs]
    growth = {remat: (b[2] - b[0]) / (times[2] - times[0]) for remat, b in used.items()}
    # Growth is even: each further layer costs the same (buffer alignment aside).
    for b in used.values():
        assert (b[2] - b[1]) / 8 == pytest.approx((b[1] - b[0]) / 4, rel=0.1)
    assert growth["full"] < 0.5 * growth["none"]
    carry = 4 * length * 2 * (tiny.T.hidden_size + 1)  # float32 stream and pre
    assert growth["full"] < 1.5 * carry


def narrow(modes: str) -> Config:
    """The widths of T under another table."""
    return tiny.with_modes(modes)


@pytest.mark.slow
def test_program_size_follows_distinct_bodies_not_depth(golden):
    released = Config.from_json(golden / "config.released.json")
    lines = []
    for modes, layers in ((released.modes, 40), (DEEPER, 76)):
        c = narrow(modes)
        assert c.num_hidden_layers == layers
        lines.append(step(c, Compute(), 64).as_text().count("\n"))
    assert lines[1] == pytest.approx(lines[0], rel=0.02)


@pytest.mark.slow
def test_released_configuration_lowers_a_training_step(golden):
    released = Config.from_json(golden / "config.released.json")
    text = step(released, Compute(), 4096).as_text()
    assert "tensor<384006168x256xf32>" in text  # tables enter whole, as arguments
    assert "tensor<4096x4096x" not in text and "x4096x129280x" not in text
