"""A key 200,000 tokens back, found by selection in decode; memory follows the length, and nothing else does."""

from __future__ import annotations

import dataclasses
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import cache, decode, model
from dsflash_jax.config import Compute, Quantize
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Setup
from dsflash_jax.params import map_weights

VALUES, QUESTION, FILLER = 10, 10, range(11, 40)  # ids: needles of ten values, the question, everything else
LENGTH, CHUNK = 200_000, 4096
C = dataclasses.replace(
    tiny.T, hidden_size=32, head_dim=32, index_head_dim=32, qk_rope_head_dim=8, q_lora_rank=8, o_lora_rank=32,
    o_groups=1, num_attention_heads=1, index_n_heads=1, index_topk=4, hc_mult=1, max_position_embeddings=2**20,
    candidate_topk_blocks=4, candidate_block_size=8,
).with_modes("S F1p X U")  # fmt: skip
SETUP = Setup(
    C, Compute(dtype="float32", remat="none"), quantize=Quantize(kv_fp4=True, index_fp4=True, window_fp8=True)
)


def hand_set():
    """Weights under which the question's answer is the needle's value, and nothing else says anything.

    Channel 0 of the embedding marks a needle, channel 1 the question, 2 + v the value v; fillers have others. The
    Full layer makes KV and index keys of the first two kinds; the Reindex layer asks, inside the Full layer's
    candidates, and writes what it finds.
    """
    w = map_weights(lambda d: np.zeros(d.full_shape, np.float32), model.declare(C))
    for name in ("layer0", "layer1", "layer2", "layer3"):
        layer = w["layers"][name]
        for sub in ("attn", "ffn"):
            layer[f"hc_{sub}_base"][:] = [20, 0, 0]  # passes the one copy on, and adds a sublayer's output once
            layer[f"{sub}_norm"][:] = 1
        layer["attn"]["q_norm"][:] = layer["attn"]["kv_norm"][:] = 1
    full, asks = w["layers"]["layer1"]["attn"], w["layers"]["layer2"]["attn"]
    full["compressor"]["wkv"][[0, *range(2, 12)], [0, *range(2, 12)]] = 1
    full["compressor"]["norm"][:] = full["indexer"]["k_norm"][:] = 1
    full["indexer"]["wk"][0, 0] = 1
    for layer in (full, asks):
        layer["wq_a"][1, 0] = 1
        layer["indexer"]["wq_b"][0, 0, 0] = layer["indexer"]["weights_proj"][1, 0] = 1
    asks["wq_b"][0, 0, 0] = 10
    asks["wo_a"][0] = np.eye(32)
    asks["wo_b"][:] = np.eye(32)
    w["norm"][:] = 1
    for v in range(VALUES):
        w["embed"][v, [0, 2 + v]] = 1
        w["head"][v, 2 + v] = 1
    w["embed"][QUESTION, 1] = 1
    w["embed"][list(FILLER), 12 + np.arange(len(FILLER)) % 20] = 1
    return jax.tree.map(jnp.asarray, w)


@pytest.mark.parametrize("value", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_a_key_200_000_tokens_back_is_found_in_decode(value):
    decoder = Decoder(SETUP, hand_set(), chunk=CHUNK)
    text = np.random.default_rng(value).choice(list(FILLER), LENGTH).astype(np.int32)
    text[100 + value] = value  # not among the first slots, which queries without an answer select
    held, _ = decoder.prefill(decoder.begin(1, LENGTH + 2), [text], how="replay")
    held, before = decoder.step(held, text[:1], np.ones(1, np.int32))  # a filler asks nothing
    held, logits = decoder.step(held, np.array([QUESTION], np.int32), np.ones(1, np.int32))
    assert int(held.length[0]) == LENGTH + 2
    best, second = np.sort(np.asarray(logits[0]))[::-1][:2]
    assert int(np.argmax(logits[0])) == value and best - second > 1
    assert np.ptp(np.asarray(before)[0, :VALUES]) < 1e-3
    print(f"peak of this process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


@pytest.mark.slow
def test_the_memory_of_prefill_and_step_is_the_cache_and_a_constant(capsys):
    w, one = model.declare(C), jax.ShapeDtypeStruct((1,), jnp.int32)
    w = map_weights(lambda d: jax.ShapeDtypeStruct(d.full_shape, jnp.float32), w)
    chunk = jax.ShapeDtypeStruct((1, CHUNK), jnp.int32)

    def encode(w, held, tokens, count):
        return decode.encode(SETUP, w, held, tokens, count, decode.no_end(SETUP, 1))

    def step(w, held, tokens, count):
        return decode.proceed(SETUP, w, held, tokens[:, None], count)

    for name, run, tokens in (("prefill", encode, chunk), ("step", step, one)):
        peak = {}
        for capacity in (2**16, 2**17, 2**18):
            held = jax.eval_shape(lambda: cache.empty(SETUP, 1, capacity))  # noqa: B023
            size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(held))
            memory = jax.jit(run, donate_argnums=1).lower(w, held, tokens, one).compile().memory_analysis()
            peak[capacity] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
            with capsys.disabled():
                print(f"{name} at {capacity}: cache {size:,} bytes, in all {peak[capacity]:,}")
        first, second, third = peak.values()
        assert third - second == pytest.approx(2 * (second - first), rel=0.02)
        assert second - first < 1.05 * 2**16 * (16 + 2 + 16 + 1)  # a slot's codes and scales: no second copy
