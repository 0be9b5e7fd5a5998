"""costs.py: what a token costs in weights, cache bytes and products."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsflash_jax import costs, quant
from dsflash_jax.config import Config
from dsflash_jax.costs import Span
from dsflash_jax.overrides import find

RELEASED: Config = find("released")


def total(products: costs.Products, counting: costs.Counting = "alike") -> float:
    return sum(costs.flops(products, counting).values())


def tiny(golden: Path, name: str = "tiny_full") -> Config:
    return Config.from_json(golden / name / "config.json")


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 50), st.integers(1, 5))
def test_mean_reach_is_the_mean_over_queries(first: int, count: int, cap: int, ratio: int) -> None:
    reached = [min(cap, m // ratio) for m in range(first + 1, first + count + 1)]
    assert Span(first, first + count).mean(cap, ratio) == Fraction(sum(reached), count)


def test_released_active_parameters_are_the_published_ones() -> None:
    active = costs.active(RELEASED)
    assert sum(active["decode"].values()) == 16_130_558_064
    assert sum(active["prefill"].values()) == 7_898_174_776
    assert active["training"] == active["decode"]
    without = {phase: sum(parts.values()) - parts["engram projections"] for phase, parts in active.items()}
    assert [round(without[phase] / 1e9, 3) for phase in ("decode", "prefill")] == [15.816, 7.584]
    # Layer 20 gives the prefill its input norm, both KV projections with their norms, and its index keys.
    assert active["prefill"]["attention projections"] - 20 * 126_617_408 == 5120 * 512 + 512
    assert active["prefill"]["compressors"] == active["decode"]["compressors"]


def test_released_cache_is_890_bytes_a_token() -> None:
    kinds = costs.cache(RELEASED)
    assert kinds["token"] == {"compressed KV": 720, "index keys": 170}
    assert kinds["sequence"] == {
        "window rings": 40 * 128 * 528,
        "draft rings": 3 * 128 * 528,
        "compressor tails": 3 * 4096,
        "n-gram history": 12,
    }
    constant = sum(kinds["sequence"].values())
    assert costs.sequence_bytes(RELEASED, 1 << 20) == 890 * (1 << 20) + constant
    # An odd token leaves three half slots open: only the ratio-1 source stores something for it.
    assert costs.sequence_bytes(RELEASED, 4097) - costs.sequence_bytes(RELEASED, 4096) == 356


@pytest.mark.parametrize(("width", "fmt"), [(512, quant.Q4X16), (128, quant.Q4X32), (512, quant.Q8)])
def test_cache_bytes_are_those_of_the_codec(width: int, fmt: quant.Format) -> None:
    stored = jax.eval_shape(lambda x: quant.encode(x, fmt), jax.ShapeDtypeStruct((width,), jnp.float32))
    assert costs.packed(width, fmt) == stored.codes.size + stored.scales.size


def test_slots_of_three_tokens_cost_a_third_each_token() -> None:
    c = RELEASED.with_modes("S F3 U", engram_num_embeddings=(), num_nextn_predict_layers=0)
    assert costs.cache(c)["token"] == {"compressed KV": 96, "index keys": Fraction(68, 3)}
    assert costs.cache(c)["sequence"]["compressor tails"] == 2 * 2 * 512 * 4  # two pending tokens
    assert costs.cache(c)["sequence"]["draft rings"] == costs.cache(c)["sequence"]["n-gram history"] == 0


def test_decode_grows_with_context_as_published() -> None:
    at = {n: costs.decode(RELEASED, n) for n in (4096, 1 << 20)}
    ratio = {counting: total(at[1 << 20], counting) / total(at[4096], counting) for counting in costs.COST}
    assert 1.61 <= ratio["alike"] < 1.62
    assert 1.24 < ratio["fp8"] < 1.27  # about a quarter more


def test_only_index_scores_grow_beyond_the_selection() -> None:
    near, far = (costs.flops(costs.decode(RELEASED, n), "alike") for n in (1 << 15, 1 << 20))
    grown = {part for part in far if far[part] != near[part]}
    assert grown == {"index scores, full ratio 2", "index scores, full ratio 1"}
    pair = 2 * 32 * (128 + 1)  # FLOPs of a query and an entry: heads, their width, the sum over heads
    assert far["index scores, full ratio 2"] == 3 * 2**19 * pair
    assert far["index scores, reindex ratio 1 in candidates"] == 4 * 2048 * 8 * pair


def test_products_with_weights_are_the_active_matrices() -> None:
    made = costs.flops(costs.decode(RELEASED, 4096), "alike")
    active = costs.active(RELEASED)["decode"]
    for part in ("routed experts", "shared experts", "routers", "head"):
        assert made[part] == 2 * active[part]
    vectors = 40 * (1280 + 512 + 64)  # norms inside the projections, sinks
    assert made["attention projections"] == 2 * (active["attention projections"] - vectors)
    # Key norms are no products, and the three ratio-2 layers make a key every other token.
    assert made["indexers"] == 2 * (active["indexers"] - 4 * 128 - 3 * 128 * 512 // 2)


def test_a_precision_changes_the_count_only_where_it_is_used() -> None:
    alike, fp8 = (costs.flops(costs.decode(RELEASED, 4096), counting) for counting in ("alike", "fp8"))
    assert fp8["routed experts"] == alike["routed experts"]
    assert fp8["selected attention"] == 2 * alike["selected attention"]
    assert fp8["index scores, full ratio 1"] == alike["index scores, full ratio 1"] * (128 / 2 + 2) / 129
    wo_a = 40 * 8192 * 4096  # stored in FP8, multiplied in bf16
    assert fp8["attention projections"] - alike["attention projections"] == 2 * wo_a
    plain = replace(RELEASED, quantization=None)
    assert costs.flops(costs.decode(plain, 4096), "fp8")["routed experts"] == 2 * alike["routed experts"]


@pytest.mark.parametrize("name", ["tiny_text", "tiny_engram", "tiny_full"])
def test_prefill_is_the_mean_of_decode_but_for_the_head(golden: Path, name: str) -> None:
    c, prompt = tiny(golden, name), 37
    head = c.vocab_size * c.hidden_size + c.hc_mult * c.hidden_size  # with the last fold
    steps = sum(total(costs.decode(c, n)) - 2 * head for n in range(1, prompt + 1))
    assert total(costs.prefill(c, prompt, replay=False)) * prompt == pytest.approx(steps + 2 * head, rel=1e-12)


def test_replay_of_a_prompt_within_the_window_is_the_full_prefill(golden: Path) -> None:
    c = tiny(golden)
    for prompt in (1, 7, c.sliding_window):
        assert costs.prefill(c, prompt, replay=True) == costs.prefill(c, prompt, replay=False)
    assert total(costs.prefill(c, c.sliding_window + 1, replay=True)) < total(
        costs.prefill(c, c.sliding_window + 1, replay=False)
    )


def test_replay_sees_only_the_window_keys_of_its_segment(golden: Path) -> None:
    c = tiny(golden)  # window 8; layers 0-2 see every token, 3-5 the last 8
    prompt = 30
    everywhere = sum(min(8, m) for m in range(1, prompt + 1))
    segment = sum(range(1, 9))
    made = costs.flops(costs.prefill(c, prompt, replay=True), "alike")["window attention"]
    pair = 2 * 2 * c.num_attention_heads * c.head_dim
    assert made * prompt == pytest.approx(pair * (3 * everywhere + 3 * segment), rel=1e-12)


def test_released_replay_prefill_halves_the_work() -> None:
    replay, full = (total(costs.prefill(RELEASED, 1 << 16, replay=replay)) for replay in (True, False))
    assert 0.5 < replay / full < 0.55
    # Per token it is the active parameters, the encoder's attention and scores, and the decoder on 128 tokens.
    assert replay > 2 * 0.99 * sum(costs.active(RELEASED)["prefill"].values())


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ("S F2 U F1p X U", 3),
        ("S F2 U F1 X U", 3),
        ("S F1p U F1 U", None),  # candidates of the first source would be needed beside the KV of the second
        ("S S", None),
        ("F1 U", 0),
    ],
)
def test_the_decoder_starts_at_the_last_kv_source_if_nothing_forbids_it(modes: str, expected: int | None) -> None:
    c = RELEASED.with_modes(modes, engram_num_embeddings=(), num_nextn_predict_layers=0)
    assert costs.boundary(c) == expected
    if expected is None:
        with pytest.raises(ValueError, match="cannot leave the decoder out"):
            costs.prefill(c, 10, replay=True)


def test_memory_in_the_decoder_forbids_leaving_it_out() -> None:
    tables = RELEASED.engram_num_embeddings[:1]
    early = RELEASED.with_modes("Se F2 F1 U", engram_num_embeddings=tables, num_nextn_predict_layers=0)
    assert (costs.boundary(early), costs.boundary(replace(early, engram_layer_ids=(2,)))) == (2, None)


@pytest.mark.parametrize("call", [lambda c: costs.decode(c, 0), lambda c: costs.prefill(c, 0, replay=False)])
def test_nothing_costs_nothing_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="at least 1"):
        call(RELEASED)
