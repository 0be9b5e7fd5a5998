"""freeze.py: the image tower keeps its bits at first and learns more slowly later; all else trains throughout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_digits import tiny

from dsflash_jax import model
from dsflash_jax.params import Weight, Weights, leaves, norm, normal
from train import freeze, newton_schulz, optim
from train.optim import Optim

STEPS, START = 10, 4
INIT = normal(1.0)
DECLARED: Weights = {
    "embed": Weight((6, 4), ("vocab", "embed"), INIT, "sinkhorn"),
    "vision": {
        "w": Weight((4, 4), ("vision", "vision"), INIT),
        "b": Weight((4,), ("vision",), INIT, "scalar"),
        "inner": norm(4, "vision"),
        "norm": norm(4, "vision"),
    },
    "aligner": {"w": Weight((4, 4), ("cell", "embed"), INIT)},
}
FROZEN = {"vision/w", "vision/b", "vision/inner"}
FLAT = Optim(peak=0.1, final=0.1, warmup_steps=0, clip=0.0, vision_start=START / STEPS)


def arrays(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: jnp.asarray(rng.standard_normal(w.full_shape), jnp.float32), DECLARED)


def flat(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree.leaves_with_path(tree)}


def advance(settings: Optim, updates: int) -> list[dict[str, Any]]:
    """Every weight at the start and after each update."""
    tx, params = optim.build(DECLARED, settings, STEPS), arrays(0)
    state, step = tx.init(params), jax.jit(tx.update)
    out = [flat(params)]
    for t in range(updates):
        change, state = step(arrays(t + 1), state, params)
        params = optax.apply_updates(params, change)
        out.append(flat(params))
    return out


@pytest.fixture(scope="module")
def run() -> list[dict[str, Any]]:
    return advance(FLAT, START + 1)


def test_the_tower_keeps_its_bits_until_its_start_and_then_moves(run: list[dict[str, Any]]) -> None:
    for name in FROZEN:
        assert all(np.array_equal(run[0][name], weights[name]) for weights in run[: START + 1]), name
        assert not np.array_equal(run[START][name], run[START + 1][name]), name


def test_all_but_the_tower_moves_at_every_update(run: list[dict[str, Any]]) -> None:
    for name in set(run[0]) - FROZEN:
        assert all(not np.array_equal(run[t][name], run[t + 1][name]) for t in range(START + 1)), name


def test_the_tower_learns_at_its_own_rate() -> None:
    full, tenth = (advance(replace(FLAT, vision_start=0.0, vision_rate=rate), 1) for rate in (1.0, 0.1))
    for name in full[0]:
        whole, part = (weights[1][name] - weights[0][name] for weights in (full, tenth))
        # Differences of weights near 1 in float32.
        np.testing.assert_allclose(part, whole * (0.1 if name in FROZEN else 1.0), atol=1e-6, err_msg=name)


def test_a_frozen_tower_gathers_no_momentum(run: list[dict[str, Any]]) -> None:
    moved = flat(run[START + 1])["vision/w"] - flat(run[START])["vision/w"]
    rate = FLAT.peak * FLAT.vision_rate
    gradient = arrays(START + 1)["vision"]["w"]  # the first that counts: momentum would add those before
    want = -rate * (newton_schulz.muon_update(gradient) + FLAT.weight_decay * run[START]["vision/w"])
    np.testing.assert_allclose(moved, want, atol=1e-6)  # differences of weights near 1 in float32


def test_a_frozen_tower_counts_in_no_norm() -> None:
    huge = arrays(1)
    huge["vision"]["w"] *= 1e6
    tx, params = optim.build(DECLARED, replace(FLAT, clip=1.0), STEPS), arrays(0)
    changes = [flat(tx.update(grads, tx.init(params), params)[0]) for grads in (arrays(1), huge)]
    for name in set(changes[0]) - FROZEN:
        np.testing.assert_array_equal(changes[0][name], changes[1][name], err_msg=name)


def test_a_model_without_a_tower_has_no_schedule_of_it() -> None:
    text = {"embed": DECLARED["embed"]}
    programs = []
    for start in (0.0, 1.0):
        tx, params = optim.build(text, replace(FLAT, vision_start=start), STEPS), {"embed": arrays(0)["embed"]}
        programs.append(str(jax.make_jaxpr(tx.update)(params, tx.init(params), params)))
    assert programs[0] == programs[1]


def test_every_weight_of_a_multimodal_model_has_one_route(tmp_path: Path) -> None:
    declared = model.declare(tiny(tmp_path).model)
    labels, frozen = flat(optim.labels(declared)), flat(freeze.tower(declared))
    assert labels.keys() == frozen.keys() == leaves(declared).keys()
    linear = {n for n in labels if n.startswith(("vision/", "aligner/")) and n.endswith(("weight", "w1", "w2"))}
    assert {"aligner/w1/weight", "aligner/w2/weight", "vision/patch_embed/proj/weight"} <= linear
    assert {labels[n] for n in linear} == {"muon"}
    assert {n for n in labels if n.startswith("vision/") and not frozen[n]} == {"vision/norm"}
    assert not any(frozen[n] for n in labels if not n.startswith("vision/"))


@pytest.mark.parametrize(("key", "value"), [("vision_start", 1.5), ("vision_start", -0.1), ("vision_rate", -1.0)])
def test_a_bad_setting_is_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"optim.{key}"):
        Optim(**{key: value})
