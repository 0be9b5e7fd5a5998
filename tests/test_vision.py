"""Images against the published preprocessing and reference arrays; isolation, padding, spans, gradients."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsflash_jax import moe, pixels, vision
from dsflash_jax.checkpoint import Entry
from dsflash_jax.config import Compute, Config
from dsflash_jax.ops import rms_norm
from dsflash_jax.params import Weight, leaves, map_weights

GOLDEN = Path(__file__).parent / "golden"
RELEASED = Config.from_json(GOLDEN / "config.released.json")
TINY = Config.from_json(GOLDEN / "tiny_full" / "config.json")
F32 = Compute(dtype="float32", query_chunk=8)  # 20 patches are three chunks, the last one not full


@jax.jit
def merge(w, x, images):
    with jax.numpy_dtype_promotion("strict"):
        return vision.merge(w, x, images, TINY, F32)


@partial(jax.jit, static_argnames="how")
def encode(w, patches, grid, how=F32):
    with jax.numpy_dtype_promotion("strict"):
        return vision.encode(w, patches, grid, TINY, how)


locate = jax.jit(partial(vision.locate, length=40, ratio=3))


def entries(c):
    """Every published tensor of the images' weights and its place in the tree."""
    out = []
    for path, weight in leaves(vision.weights(c)).items():
        name = path.replace("/", ".") + ("" if weight.bare else ".weight")
        for j in range(c.vision.num_hidden_layers) if weight.stack else [None]:
            layer = name if j is None else name.replace("blocks.", f"blocks.{j}.")
            out.append(Entry(layer, path, () if j is None else (j,), weight))
    return out


@pytest.fixture(scope="module")
def reference():
    """Inputs and trace of the reference's prefill, and its weights as our tree."""
    folder = GOLDEN / "tiny_full"
    stored = np.load(folder / "weights.npz")
    declared = vision.weights(TINY)
    made = {path: np.full(w.full_shape, np.nan, np.float32) for path, w in leaves(declared).items()}
    for entry in entries(TINY):
        made[entry.path][entry.index] = entry.adopt(stored[entry.name])
    structure = jax.tree.structure(declared, is_leaf=lambda w: isinstance(w, Weight))
    tree = jax.tree.unflatten(structure, [jnp.asarray(a) for a in made.values()])
    return np.load(folder / "inputs.npz"), np.load(folder / "prefill_f32_quant.npz"), tree, stored


@pytest.fixture(scope="module")
def weights(reference):
    return reference[2]


def random_patches(seed, *shape):
    """Normals in the width of tiny_full's patches, and in bfloat16 as preprocessing gives them."""
    return np.random.default_rng(seed).standard_normal((*shape, 48)).astype(ml_dtypes.bfloat16)


def pair(seed=0):
    """Two images of 5 x 4 and 3 x 7 patches with room for 24, the room filled with normals, too."""
    return jnp.asarray(random_patches(seed, 2, 24), jnp.float32), jnp.asarray([[5, 4], [3, 7]], jnp.int32)


def test_the_tree_has_the_published_tensors_of_the_images_and_no_others(reference):
    stored = {n: a.shape for n, a in reference[3].items() if n.startswith(("vision.", "aligner.", "image_"))}
    assert {e.name: e.shape for e in entries(TINY)} == stored


def test_the_released_tower_has_0_412_billion_weights_and_the_aligner_0_073():
    count = {top: sum(w.size for w in leaves(vision.weights(RELEASED)[top]).values()) for top in ("vision", "aligner")}
    assert {top: round(n / 1e9, 3) for top, n in count.items()} == {"vision": 0.412, "aligner": 0.073}


def test_a_configuration_without_a_tower_is_refused():
    with pytest.raises(ValueError, match="vision=None: set vision"):
        vision.weights(replace(TINY, vision=None))


def test_features_and_merged_embeddings_match_the_reference(reference):
    inputs, trace, w, stored = reference
    patches, grid = inputs["image_0_3_patches"].reshape(20, 48), tuple(inputs["image_0_3_grid"].tolist())
    images = pixels.collate([[(3, patches, grid)], []], TINY, length=27, slots=2, patches=24)
    x, image = merge(w, jnp.asarray(stored["embed.weight"][inputs["input_ids"]]), images)
    # Float32 in another order of sums; the reference's stated tolerance.
    np.testing.assert_allclose(x, trace["embed"], atol=2e-4)
    np.testing.assert_allclose(x[0, [4, 5, 7, 8]], trace["image_embeds_0_3"], atol=2e-4)
    np.testing.assert_array_equal(image, inputs["token_types"] >= 0)
    np.testing.assert_array_equal(pixels.span_types(grid, TINY), inputs["image_0_3_types"])


def test_pixels_of_one_image_do_not_move_the_features_of_another(weights):
    patches, grid = pair()
    first = encode(weights, patches, grid)
    second = encode(weights, patches.at[1, 20].add(1.0), grid)
    np.testing.assert_array_equal(first[0], second[0])
    assert (np.abs(first[1] - second[1])[:3].max(axis=1) > 0).all()  # one patch moves every cell of its own image


def test_two_images_together_are_each_alone(weights):
    patches, grid = pair()
    both = encode(weights, patches, grid)
    for i in range(2):
        alone = encode(weights, patches, grid * (jnp.arange(2) == i).astype(jnp.int32)[:, None])
        np.testing.assert_array_equal(both[i], alone[i])
        np.testing.assert_array_equal(alone[1 - i], 0.0)  # an empty slot


def test_room_behind_an_image_has_no_influence_whatever_it_holds(weights):
    patches, grid = pair()
    clean = encode(weights, patches, grid)
    dirty = encode(weights, patches.at[0, 20:].set(jnp.nan).at[1, 21:].set(jnp.inf), grid)
    np.testing.assert_array_equal(clean, dirty)
    tight = encode(weights, patches[:1, :20], grid[:1])
    np.testing.assert_allclose(tight[0, :4], clean[0, :4], atol=1e-5)  # another program: sums in another order


def test_query_chunks_and_scan_do_not_change_features(weights):
    patches, grid = pair()
    made = encode(weights, patches, grid, Compute(dtype="float32", query_chunk=64, remat="none", scan=False))
    np.testing.assert_allclose(made, encode(weights, patches, grid), atol=1e-5)  # sums in another order


def plain_tower(w, patches):
    """The tower on 3 x 4 patches."""
    index = jnp.arange(12, dtype=jnp.int32)
    at = vision.angles(index // 4, index % 4, 16, 10000.0)
    affine = lambda m, a: jnp.matmul(a, m["weight"].reshape(a.shape[-1], -1)) + m["bias"][None]  # noqa: E731
    x = affine(w["patch_embed"]["proj"], patches)
    for j in range(2):
        b = jax.tree.map(lambda a: a[j], w["blocks"])  # noqa: B023
        qkv = affine(b["attn"]["wqkv"], rms_norm(x, b["norm1"], 1e-6))
        q, k, v = (a.reshape(12, 2, 16) for a in jnp.split(qkv, 3, 1))
        q, k = vision.rotate_halves(q, at), vision.rotate_halves(k, at)
        p = jax.nn.softmax(jnp.einsum("thd,khd->htk", q, k) / 4, axis=-1)
        x = x + affine(b["attn"]["wo"], jnp.einsum("htk,khd->thd", p, v).reshape(12, 32))
        u = rms_norm(x, b["norm2"], 1e-6)
        x = x + (jax.nn.silu(u @ b["mlp"]["w1"][:, 0]) * (u @ b["mlp"]["w1"][:, 1])) @ b["mlp"]["w2"]
    return rms_norm(x, w["norm"], 1e-6)


def test_the_tower_is_the_plain_loop_over_its_blocks(weights):
    """Blocks read one by one, patches of one image without padding, attention as one softmax over all of them."""
    patches, grid = jnp.asarray(random_patches(3, 1, 12), jnp.float32), jnp.asarray([[3, 4]], jnp.int32)
    expected = jax.jit(plain_tower)(weights["vision"], patches[0])
    made = jax.jit(lambda w: vision.tower(w, patches, grid, TINY, F32))(weights["vision"])
    np.testing.assert_allclose(made[0], expected, atol=2e-5)  # sums in another order, two blocks


def test_the_size_of_the_program_does_not_depend_on_the_depth():
    def lines(depth):
        c = replace(TINY, vision=replace(TINY.vision, num_hidden_layers=depth))
        w = map_weights(lambda d: jax.ShapeDtypeStruct(d.full_shape, jnp.float32), vision.weights(c))
        shapes = [jax.ShapeDtypeStruct((2, 24, 48), jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.int32)]
        return len(jax.jit(partial(vision.encode, c=c, how=F32)).lower(w, *shapes).as_text().splitlines())

    assert lines(3) == lines(6)


# Spans.


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_tokens_are_what_the_span_says_in_reading_order(rows, columns, start):
    grid = rows, columns
    kinds = pixels.span_types(grid, TINY)
    kind, slot, cell = locate(jnp.asarray([[(0, 0), grid]], jnp.int32), jnp.asarray([[0, start]], jnp.int32))
    expected = np.full(40, pixels.TEXT)
    expected[start : start + len(kinds)] = kinds
    np.testing.assert_array_equal(kind[0], expected)
    image = np.flatnonzero(expected == pixels.IMAGE)
    np.testing.assert_array_equal(cell[0, image], np.arange(len(image)))
    np.testing.assert_array_equal(slot[0, image], 1)


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_a_span_may_start_anywhere_and_reads_the_same(weights, start):
    image = random_patches(4, 20), (5, 4)
    x = jnp.zeros((2, 27, 64), jnp.float32)
    out, _ = merge(weights, x, pixels.collate([[(start, *image)], [(10, *image)]], TINY, 27, 2, 24))
    np.testing.assert_array_equal(out[0, start : start + 8], out[1, 10:18])
    np.testing.assert_array_equal(out[0, start + 8 :], 0.0)


def test_images_of_one_row_and_of_other_rows_fill_their_own_spans(weights):
    p = [random_patches(i, n) for i, n in enumerate((20, 6, 9))]
    x = jnp.full((2, 27, 64), 7.0, jnp.float32)
    layout = [[(12, p[0], (5, 4)), (2, p[1], (2, 3))], [(0, p[2], (9, 1))]]
    out, image = merge(weights, x, pixels.collate(layout, TINY, 27, 2, 24))
    expected = np.zeros((2, 27), bool)
    expected[0, 2:6] = expected[0, 12:20] = expected[1, :8] = True
    np.testing.assert_array_equal(image, expected)
    np.testing.assert_array_equal(np.asarray(out)[~expected], 7.0)
    for b, (start, patches, grid) in [(0, layout[0][0]), (0, layout[0][1]), (1, layout[1][0])]:
        kinds = pixels.span_types(grid, TINY)
        room = np.zeros((2, 24, 48), np.float32)
        room[0, : len(patches)] = patches
        features = encode(weights, room, jnp.asarray([grid, (0, 0)], jnp.int32))[0]
        span = np.asarray(out)[b, start : start + len(kinds)]
        cells = int((kinds == pixels.IMAGE).sum())
        np.testing.assert_allclose(span[kinds == pixels.IMAGE], features[:cells], atol=1e-5)  # another program
        for kind, name in ((0, "image_start"), (2, "image_newline"), (3, "image_end")):
            np.testing.assert_array_equal(span[kinds == kind], np.tile(weights[name], ((kinds == kind).sum(), 1)))


def test_a_batch_without_images_passes_unchanged(weights):
    x = jnp.ones((2, 27, 64), jnp.float32)
    for slots in (0, 2):
        out, image = merge(weights, x, pixels.collate([[], []], TINY, 27, slots, 24))
        np.testing.assert_array_equal(out, x)
        assert not image.any()


def test_bfloat16_features_stay_near_those_of_float32(weights):
    patches, grid = pair()
    low = jax.tree.map(lambda d, a: a if d.float32 else a.astype(jnp.bfloat16), vision.weights(TINY), weights)
    made = encode(low, patches.astype(jnp.bfloat16), grid, Compute(dtype="bfloat16", query_chunk=8))
    expected = encode(weights, patches, grid)
    assert made.dtype == jnp.bfloat16
    # Eight bits a product over four layers: a few percent of the features' size.
    assert np.abs(made.astype(jnp.float32) - expected).max() < 0.05 * np.abs(expected).max()


def test_gradients_reach_every_weight_and_the_text_and_are_finite(weights):
    patches = random_patches(0, 2, 21)
    layout = [[(0, patches[0, :20], (5, 4)), (9, patches[1, :21], (3, 7))], []]
    images = pixels.collate(layout, TINY, 27, 2, 24)  # the second row's slots stay empty
    target = jax.random.normal(jax.random.key(0), (2, 27, 64))
    loss = lambda w, x: jnp.sum(target * vision.merge(w, x, images, TINY, F32)[0])  # noqa: E731
    by_weight, by_x = jax.jit(jax.grad(loss, argnums=(0, 1)))(weights, jnp.zeros((2, 27, 64), jnp.float32))
    image = np.asarray(merge(weights, target, images)[1])
    np.testing.assert_array_equal(np.asarray(by_x)[image], 0.0)
    np.testing.assert_array_equal(np.asarray(by_x)[~image], np.asarray(target)[~image])
    for path, g in jax.tree_util.tree_flatten_with_path(by_weight)[0]:
        g = np.asarray(g)
        assert np.isfinite(g).all(), path
        assert (np.abs(g.reshape(g.shape[0], -1)).max(axis=1) > 0).all() if g.ndim > 1 else g.any(), path


def test_image_tokens_route_by_their_own_bias_and_text_as_if_there_were_none():
    c = replace(TINY, n_routed_experts=12, num_experts_per_tok=6)
    favour = jnp.repeat(jnp.asarray([10.0, 0.0], jnp.float32), 6)
    x = jax.random.normal(jax.random.key(1), (8, 64), jnp.float32)
    gate = {"weight": jax.random.normal(jax.random.key(2), (64, 12), jnp.float32), "bias": favour}
    both = gate | {"bias_vl": favour[::-1]}
    image = jnp.arange(8) % 2 == 1
    mixed = np.sort(moe.route(both, x, image, c).experts, axis=1)
    np.testing.assert_array_equal(mixed[::2], np.tile(np.arange(6), (4, 1)))
    np.testing.assert_array_equal(mixed[1::2], np.tile(np.arange(6, 12), (4, 1)))
    plain = moe.route(gate, x, None, c)
    for text in (moe.route(both, x, None, c), moe.route(both, x, jnp.zeros(8, bool), c)):
        np.testing.assert_array_equal(text.experts, plain.experts)
        np.testing.assert_array_equal(text.weights, plain.weights)
