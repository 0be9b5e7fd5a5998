"""Images in the backbone: routing, n-gram memory, visibility, isolation, and equality with a text model without any."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from dsflash_jax import engram, model, pixels
from dsflash_jax.config import Compute, Config
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.params import map_weights

F32 = Compute(dtype="float32", remat="none", query_chunk=16)
T, SPAN, GRID = 14, 3, (3, 6)  # tokens of a row, index of START, patches: one row of two cells
IMAGE = slice(SPAN, SPAN + 5)  # START IMAGE IMAGE NEWLINE END
NEWLINE, END = SPAN + 3, SPAN + 4


@pytest.fixture(scope="module")
def c(golden: Path) -> Config:
    """Two layers, the first with n-gram memory; experts 0..2 and 3..5 can be told apart."""
    full = Config.from_json(golden / "tiny_full" / "config.json")
    assert full.vision is not None
    tower = replace(full.vision, num_hidden_layers=1)
    small = replace(full, vision=tower, num_nextn_predict_layers=0, compress_ratios=full.compress_ratios[:-2])
    return small.with_modes("Se F2")


def fill(c: Config) -> dict[str, Any]:
    """Normal weights, but router biases of zero."""
    rng = np.random.default_rng(0)
    draw = lambda d: 0.2 * rng.standard_normal(d.full_shape) * (d.family != "rule")  # noqa: E731
    return map_weights(lambda d: jnp.asarray(draw(d), jnp.float32), model.declare(c))


def batch_of(c: Config, images: pixels.Images | None, spans: bool = True, second: int = T) -> Batch:
    """Two rows of text, row 0 with the span; `images` None or of empty slots leave it text to the model.

    A second document starts in each row at index `second`.
    """
    tokens = np.random.default_rng(1).integers(3, c.vocab_size - 3, (2, T)).astype(np.int32)
    tokens[0, IMAGE] = c.image_token_id
    at = np.arange(T, dtype=np.int32)
    segments, positions = (np.stack([a, a]) for a in (1 + (at >= second), np.where(at < second, at, at - second)))
    image = np.zeros((2, T), bool)
    image[0, IMAGE] = spans
    rows = engram.rows(tokens % c.engram_compressed_vocab_size, positions, engram.layout(c), 2, image)
    arrays = (jnp.asarray(a, jnp.int32) for a in (tokens, segments, positions))
    return Batch(*arrays, engram_rows=jnp.asarray(rows), images=jax.tree.map(jnp.asarray, images))


def pictures(c: Config, seed: int, row: int | None = 0) -> pixels.Images:
    """One image of noise at SPAN of a row, or only an empty slot."""
    assert c.vision is not None
    width = pixels.CHANNELS * c.vision.patch_size**2
    patches = np.random.default_rng(seed).standard_normal((GRID[0] * GRID[1], width)).astype(np.float32)
    listed = [[(SPAN, patches, GRID)] if b == row else [] for b in range(2)]
    return pixels.collate(listed, c, T, slots=1, patches=len(patches))


@partial(jax.jit, static_argnames="c")
def run(c: Config, w: Any, batch: Batch) -> tuple[Array, list[dict[str, Array]]]:
    """Hidden states and the layers' traces, under strict types."""
    traces: list[dict[str, Array]] = []
    with jax.numpy_dtype_promotion("strict"):
        y, _ = model.forward(Setup(c, F32), w, batch, traces=traces)
    return y, traces


@pytest.fixture(scope="module")
def w(c: Config) -> dict[str, Any]:
    return fill(c)


@pytest.fixture(scope="module")
def seen(c: Config, w: dict[str, Any]) -> tuple[np.ndarray, list[dict[str, np.ndarray]]]:
    """The run that the tests change something of."""
    return jax.device_get(run(c, w, batch_of(c, pictures(c, 0))))


def rows_moved(before: np.ndarray, after: Array) -> tuple[set[int], set[int]]:
    """Tokens of each row whose state is not the same bit for bit."""
    moved = (before != np.asarray(after)).any(axis=-1)
    return set(np.flatnonzero(moved[0]).tolist()), set(np.flatnonzero(moved[1]).tolist())


def test_image_tokens_and_delimiters_route_by_their_own_bias(c: Config, w: dict[str, Any]) -> None:
    bias = jnp.asarray([100.0, 100, 100, 0, 0, 0])
    biased = jax.tree_util.tree_map_with_path(
        lambda path, a: {"bias": bias, "bias_vl": bias[::-1]}.get(path[-1].key, a), {"layers": w["layers"]}
    )
    _, traces = run(c, w | biased, batch_of(c, pictures(c, 0)))
    for trace in traces[:-1]:
        chosen = np.asarray(trace["router_indices"]).reshape(2, T, -1)
        image = np.zeros((2, T), bool)
        image[0, IMAGE] = True
        assert set(np.unique(chosen[image])) <= {3, 4, 5}
        assert set(np.unique(chosen[~image])) <= {0, 1, 2}


def test_n_gram_memory_passes_image_tokens_by(seen: Any) -> None:
    gate = seen[1][0]["engram_gate"]
    assert (gate[0, IMAGE] == 0).all()
    assert (np.delete(gate[0], np.r_[IMAGE], axis=0) > 0).all() and (gate[1] > 0).all()


def test_no_token_reads_an_n_gram_across_an_image(c: Config) -> None:
    inside, without = (np.asarray(batch_of(c, None, spans).engram_rows) for spans in (True, False))
    behind = IMAGE.stop  # its 2-gram and 3-gram would reach into the image; one token later only the 3-gram does
    heads = c.engram_n_heads
    differ = inside[0, :, 0] != without[0, :, 0]
    assert differ[behind].all()
    assert differ[behind + 1, heads:].all() and not differ[behind + 1, :heads].any()
    assert not differ[behind + 2 :].any() and not differ[:SPAN].any()


def test_pixels_reach_the_span_and_what_follows_in_their_row(c: Config, w: dict[str, Any], seen: Any) -> None:
    y, _ = run(c, w, batch_of(c, pictures(c, 5)))
    first, second = rows_moved(seen[0], y)
    assert first == set(range(SPAN + 1, T))  # START holds no pixels and sees none: attention is causal in a span
    assert second == set()


def test_groups_are_counted_from_the_document_not_from_the_image(c: Config) -> None:
    """A group of two tokens starts at an even position, whatever the length of the prompt before the image."""
    layer = c.with_modes("F2")
    prompts = range(4)

    def latents(seed: int) -> np.ndarray:
        (patches,) = pictures(c, seed).patches[0]
        images = pixels.collate([[(p, patches, GRID)] for p in prompts], c, T, slots=1, patches=len(patches))
        tokens = jnp.full((len(prompts), T), 3, jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
        batch = Batch(tokens, jnp.ones_like(tokens), positions, images=jax.tree.map(jnp.asarray, images))
        return np.asarray(run(layer, fill(layer), batch)[1][0]["latent"])  # [prompts, slots, Dh]

    moved = (latents(0) != latents(1)).any(axis=-1)
    cells = [(p + 1, p + 2) for p in prompts]  # START comes before the two cells, NEWLINE and END behind
    assert [set(np.flatnonzero(row)) for row in moved] == [{at // 2 for at in both} for both in cells]


def test_pixels_do_not_reach_the_next_document_of_their_row(c: Config, w: dict[str, Any]) -> None:
    second = IMAGE.stop + 2
    before, after = (run(c, w, batch_of(c, pictures(c, seed), second=second))[0] for seed in (0, 5))
    assert rows_moved(np.asarray(before), after) == (set(range(SPAN + 1, second)), set())


@pytest.mark.parametrize(("name", "at"), [("image_newline", NEWLINE), ("image_end", END)])
def test_attention_inside_a_span_is_causal(c: Config, w: dict[str, Any], seen: Any, name: str, at: int) -> None:
    y, _ = run(c, w | {name: w[name] + 1}, batch_of(c, pictures(c, 0)))
    assert rows_moved(seen[0], y)[0] == set(range(at, T))


def test_what_the_image_token_embeds_is_overwritten(c: Config, w: dict[str, Any], seen: Any) -> None:
    table = w["embed"].at[c.image_token_id].add(1.0)
    y, _ = run(c, w | {"embed": table}, batch_of(c, pictures(c, 0)))
    assert rows_moved(seen[0], y) == (set(), set())


def test_without_an_image_the_model_is_bit_identical_to_a_text_model(c: Config, w: dict[str, Any]) -> None:
    text = replace(c, vision=None)
    declared = model.declare(text)

    def keep(declared: Any, w: Any) -> Any:
        return {name: keep(declared[name], w[name]) for name in declared} if isinstance(declared, dict) else w

    shifted = jax.tree_util.tree_map_with_path(lambda path, a: a + 9 if path[-1].key == "bias_vl" else a, w)
    want = np.asarray(run(text, keep(declared, w), batch_of(c, None, spans=False))[0])
    none, empty = (run(c, shifted, batch_of(c, images, False))[0] for images in (None, pictures(c, 0, row=None)))
    np.testing.assert_array_equal(none, want)
    np.testing.assert_array_equal(empty, want)


def test_text_behind_an_image_gives_every_image_weight_a_gradient(c: Config, w: dict[str, Any]) -> None:
    how = replace(F32, remat="selective")
    batch = batch_of(c, pictures(c, 0))
    names = ("vision", "aligner", "image_start", "image_newline", "image_end")

    @jax.jit
    def gradient(own: dict[str, Any]) -> dict[str, Any]:
        def behind(own: dict[str, Any]) -> Array:
            y, _ = model.forward(Setup(c, how), w | own, batch)
            return y[0, IMAGE.stop :].sum()

        return jax.grad(behind)(own)

    got = gradient({name: w[name] for name in names})
    for path, leaf in jax.tree_util.tree_leaves_with_path(got):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path
