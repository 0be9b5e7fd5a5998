"""Images of rows whose tokens lie on several devices: losses, loads and gradients of one device."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding

from dsflash_jax import engram, model, pixels, sharding
from dsflash_jax.config import Config, Objective, VisionConfig
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.sharding import Layout
from train import step

TOWER = VisionConfig(
    num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8, patch_size=2, downsample_ratio=2,
    max_image_tokens=16,
)  # fmt: skip
C = tiny.with_modes("Se F2", vocab_size=48, vision=TOWER, image_token_id=40)
ROWS, WIDTH, PATCHES = 2, 16, 12
# Of each row: START and patch grid. The first span of row 0 lies on three of four devices, row 1 has one image.
SPANS = (((2, (2, 5)), (11, (2, 2))), ((7, (4, 3)),))


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    tokens = tiny.tokens(tiny.T, ROWS, WIDTH)
    image, listed = np.zeros((ROWS, WIDTH), bool), []
    for row, spans in enumerate(SPANS):
        for start, grid in spans:
            image[row, start : start + pixels.span_length(grid, C)] = True
        draw = lambda grid: rng.standard_normal((grid[0] * grid[1], 12)).astype(np.float32)  # noqa: E731
        listed.append([(start, draw(grid), grid) for start, grid in spans])
    tokens[image] = C.image_token_id
    made = tiny.batch(tiny.T, tokens)
    rows = engram.rows(tokens.astype(np.int64), np.asarray(made.positions), engram.layout(C), 2, image)
    images = jax.tree.map(jnp.asarray, pixels.collate(listed, C, WIDTH, 2, PATCHES))
    mask = jnp.where(image, 0.0, made.loss_mask)
    return replace(made, loss_mask=mask, engram_rows=jnp.asarray(rows), images=images)


def graded(c: Config, batch: Batch, layout: Layout):
    setup = Setup(c, tiny.STRICT, Objective(balance_weight=0.01), layout=replace(layout, whole=0))
    mesh = setup.layout.mesh(jax.devices()[: layout.devices])
    declared = step.declare(setup)
    fill = lambda d, a: jnp.pad(a, [(0, n - m) for n, m in zip(d.full_shape, a.shape, strict=True)])  # noqa: E731
    weights = sharding.map_pairs(fill, declared, tiny.weights(c))
    place = lambda tree, specs: jax.device_put(tree, jax.tree.map(partial(NamedSharding, mesh), specs))  # noqa: E731
    weights = place(weights, sharding.specs(declared, setup.layout))
    batch = place(batch, sharding.batch_specs(batch, setup.layout))
    value = jax.value_and_grad(step.total_loss(setup, mesh), has_aux=True)
    made = tiny.jit(value)(weights, batch, jax.random.key(1))
    cut = lambda d, a: a[tuple(slice(n) for n in d.full_shape)]  # noqa: E731  without the rows that were filled up
    return jax.device_get((made[0], sharding.map_pairs(cut, model.declare(c), made[1])))


@pytest.fixture(scope="module")
def alone(batch: Batch):
    return graded(C, batch, Layout())


@pytest.mark.parametrize(
    "layout",
    [
        Layout(context=2, tensor=2),
        pytest.param(Layout(context=4), marks=pytest.mark.slow),
        pytest.param(Layout(expert=2, context=2, expert_splits="tokens"), marks=pytest.mark.slow),
    ],
)
def test_loss_loads_and_every_gradient_are_those_of_one_device(batch, alone, layout):
    sharding.check(C, ROWS, WIDTH, layout)
    ((want, want_report), want_grads), ((loss, report), grads) = alone, graded(C, batch, layout)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert max(tiny.worst(report, want_report).values()) < 1e-5
    assert np.asarray(report.counts_vl).sum() == 2 * 18 * C.num_experts_per_tok  # spans, in both layers
    assert not {k: v for k, v in tiny.worst(grads, want_grads).items() if v > 1e-5}
    assert all(np.abs(a).max() > 0 for a in jax.tree.leaves(grads["vision"]["patch_embed"]))


def test_devices_that_share_a_row_take_different_images(batch):
    """Of three images and an empty slot each of four devices runs one; the tower's arrays say so."""
    setup = Setup(C, tiny.STRICT, layout=Layout(context=4))
    mesh = setup.layout.mesh(jax.devices()[:4])
    score = jax.jit(partial(step.evaluate, setup, mesh=mesh))
    text = score.lower(tiny.weights(C), batch).as_text()
    assert f"tensor<1x{PATCHES}x{TOWER.hidden_size}xf32>" in text
    assert f"tensor<4x{PATCHES}x{TOWER.hidden_size}xf32>" not in text
    whole = jax.jit(partial(step.evaluate, replace(setup, layout=Layout())))
    assert f"tensor<4x{PATCHES}x{TOWER.hidden_size}xf32>" in whole.lower(tiny.weights(C), batch).as_text()
