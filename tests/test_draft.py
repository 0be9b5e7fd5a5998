"""draft.py: the draft head against the reference, its window, and the taps that feed it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import Array

from dsflash_jax import checkpoint, draft, engram, hyper, model
from dsflash_jax.config import Compute, Config, Quantize
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.modes import LayerSpec, Repeat, plan
from dsflash_jax.params import map_weights

F32 = Compute(dtype="float32", remat="none", attention="dense", experts="dense", query_chunk=16)
START = 18  # position of the first decode step of the reference
WINDOW = 8
EXACT, ROUNDED = Quantize(), Quantize(True, True, True, True)
# float32 sums in another order through two blocks; the set's own figure is 2e-4. A rounded value may besides fall on
# the other side of a step: none does here.
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def full(golden: Path) -> tuple[Config, Any]:
    """Configuration of two stages that draft four tokens, and its weights."""
    c = Config.from_json(golden / "tiny_full" / "config.json")
    assert (c.sliding_window, c.dspark_block_size, c.num_nextn_predict_layers) == (WINDOW, 4, 2)
    return c, jax.tree.map(jnp.asarray, checkpoint.adopt(c, dict(np.load(golden / "tiny_full" / "weights.npz"))))


@partial(jax.jit, static_argnames="setup")
def propose(setup: Setup, w: Any, taps: Array, at: Array, token: Array) -> tuple[draft.Draft, list[dict[str, Array]]]:
    """Rings up to `at`, then a block of drafts, under strict types; also the stages' traces."""
    traces: list[dict[str, Array]] = []
    with jax.numpy_dtype_promotion("strict"):
        return draft.draft(setup, w, token, tiny.rings(setup, w, taps, at), traces), traces


def row(taps: np.ndarray) -> Array:
    """Taps [B, T, N * D] as the model returns them."""
    b, t, width = taps.shape
    return jnp.moveaxis(jnp.asarray(taps.reshape(b, t, 2, width // 2)), 2, 0)


@pytest.mark.parametrize(("name", "quantize"), [("noquant", EXACT), ("quant", ROUNDED)])
def test_drafts_equal_the_reference(golden: Path, full: tuple[Config, Any], name: str, quantize: Quantize) -> None:
    c, w = full
    want = np.load(golden / "tiny_full" / f"decode_f32_{name}_after{START}.npz")
    main = np.moveaxis(want["main_hidden"][:, :, 0], 0, 1)  # [B, steps, N * D]
    # Prefill records the positions before the first step with rounding only; without them only later rings are known.
    before = np.load(golden / "tiny_full" / "prefill_f32_quant.npz")["main_hidden"][:, :START]
    arrays = row(np.concatenate([before, main], axis=1))
    setup = Setup(c, F32, quantize=quantize)
    for step in range(0 if quantize is ROUNDED else WINDOW - 1, main.shape[1]):
        token = jnp.asarray(want["mtp_output_ids"][step, :, 0], jnp.int32)
        got, traces = propose(setup, w, arrays, jnp.full(2, START + step, jnp.int32), token)
        np.testing.assert_array_equal(got.tokens, want["mtp_output_ids"][step])
        np.testing.assert_allclose(got.logits, want["mtp_logits"][step], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(got.confidence, want["mtp_confidence"][step], rtol=0, atol=TOLERANCE)
        for i, trace in enumerate(traces):
            np.testing.assert_allclose(trace["h_out"], want[f"Lmtp{i}.h_out"][step], rtol=0, atol=TOLERANCE)
            chosen = want[f"Lmtp{i}.router_indices"][step]
            np.testing.assert_array_equal(np.sort(trace["router_indices"]), np.sort(chosen))


@pytest.fixture(scope="module")
def rows(golden: Path) -> np.ndarray:
    """Recorded taps, [2, 27, N * D]."""
    return np.load(golden / "tiny_full" / "prefill_f32_quant.npz")["main_hidden"]


def same(a: Any, b: Any) -> bool:
    """Equal bit by bit."""
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize(("position", "seen"), [(20 - WINDOW, False), (21 - WINDOW, True), (20, True), (21, False)])
def test_a_draft_reads_the_window_that_ends_at_its_position(
    full: tuple[Config, Any], rows: np.ndarray, position: int, seen: bool
) -> None:
    c, w = full
    setup, at, token = Setup(c, F32), jnp.full(2, 20, jnp.int32), jnp.asarray([5, 6], jnp.int32)
    changed = rows.copy()
    changed[:, position] += 1
    base, _ = propose(setup, w, row(rows), at, token)
    moved, _ = propose(setup, w, row(changed), at, token)
    assert same(base, moved) == (not seen)


def test_rows_draft_apart(full: tuple[Config, Any], rows: np.ndarray) -> None:
    c, w = full
    setup, at = Setup(c, F32), jnp.full(2, 20, jnp.int32)
    base, _ = propose(setup, w, row(rows), at, jnp.asarray([5, 6], jnp.int32))
    other, _ = propose(setup, w, row(rows), at, jnp.asarray([5, 7], jnp.int32))
    np.testing.assert_allclose(base.logits[0], other.logits[0], rtol=0, atol=1e-6)  # expert rows add in another order
    assert not np.allclose(base.logits[1], other.logits[1], rtol=0, atol=1e-3)


def test_bfloat16_holds_under_strict_types(full: tuple[Config, Any], rows: np.ndarray) -> None:
    c, w = full
    setup = Setup(c, replace(F32, dtype="bfloat16"), quantize=ROUNDED)
    args = (w, row(rows.astype(jnp.bfloat16)), jnp.full(2, 20, jnp.int32), jnp.zeros(2, jnp.int32))
    got, traces = jax.eval_shape(partial(propose, setup), *args)
    assert (got.logits.shape, got.logits.dtype) == ((2, 4, c.vocab_size), jnp.float32)
    assert traces[0]["h_out"].dtype == jnp.bfloat16


def test_the_trained_tree_has_no_draft_weights_and_ignores_them(full: tuple[Config, Any]) -> None:
    c, w = full
    plain = replace(c, num_nextn_predict_layers=0, compress_ratios=c.compress_ratios[:-2])
    assert model.declare(c).keys() == model.declare(plain).keys()
    assert draft.declare(plain) == {}
    kept = model.cast(model.declare(c), w, jnp.bfloat16)
    assert "mtp" in w and "mtp" not in kept


@pytest.fixture(scope="module")
def tapped(full: tuple[Config, Any]) -> tuple[Config, Any, Batch]:
    """A model that is tapped behind n-gram memory and inside a repeat, and a batch."""
    c = replace(full[0], vision=None, n_routed_experts=2, num_experts_per_tok=1).with_modes("Set 2(S St)")
    rng = np.random.default_rng(0)
    fill = lambda d: jnp.asarray(0.1 * rng.standard_normal(d.full_shape), jnp.float32)  # noqa: E731
    tokens, table = rng.integers(0, c.vocab_size, (1, 12)), rng.integers(0, c.engram_num_embeddings[0], (1, 12, 1, 4))
    arrays = (jnp.asarray(a, jnp.int32) for a in (tokens, np.ones((1, 12)), np.arange(12)[None]))
    batch = Batch(*arrays, engram_rows=jnp.asarray(table, jnp.int32))
    return c, map_weights(fill, model.declare(c)), batch


@pytest.mark.slow
def test_taps_are_the_mean_copies_of_the_tapped_layers_inputs_in_order(tapped: tuple[Config, Any, Batch]) -> None:
    c, w, batch = tapped
    assert c.dspark_target_layer_ids == (0, 2, 4)
    assert [type(node) for node in plan(c.table)] == [LayerSpec, Repeat]
    _, out = jax.jit(partial(model.forward, Setup(c, F32, taps=True)))(w, batch)

    def traced(w: Any, batch: Batch) -> list[dict[str, Array]]:
        traces: list[dict[str, Array]] = []
        model.forward(Setup(c, replace(F32, scan=False)), w, batch, traces=traces)
        return traces

    traces = jax.jit(traced)(w, batch)
    x, _ = hyper.start(w["embed"][batch.tokens], c.hc_mult)
    written, _, _ = engram.apply(w["layers"]["layer0"]["engram"], x, batch.engram_rows[:, :, 0], None, c)
    inputs = (written, traces[1]["h_out"], traces[3]["h_out"])
    np.testing.assert_allclose(out.taps, jnp.stack([jnp.mean(x, axis=2) for x in inputs]), rtol=0, atol=1e-6)
    assert float(jnp.abs(written - x).mean()) > 1e-3


def test_taps_are_made_only_when_asked_for(tapped: tuple[Config, Any, Batch]) -> None:
    c, w, batch = tapped
    _, out = jax.eval_shape(partial(model.forward, Setup(c, F32)), w, batch)
    assert out.taps is None
