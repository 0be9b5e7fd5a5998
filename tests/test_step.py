"""step.py: one update, and what it refuses."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import tiny, write_corpus

from dsflash_jax import model
from dsflash_jax.flow import Batch
from dsflash_jax.params import leaves
from train import data, step
from train.config import Run

Train = Any


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("step")
    return tiny(write_corpus(folder / "corpus"), folder / "run")


@pytest.fixture(scope="module")
def batch(run: Run) -> Batch:
    batches = data.batches(run.data)
    arrays = next(batches)
    batches.close()
    return Batch(**{name: jnp.asarray(a) for name, a in arrays.items()})


@pytest.fixture(scope="module")
def start(run: Run) -> Any:
    """The first state, as NumPy arrays, which a test may change in its copy."""
    return jax.device_get(jax.jit(partial(step.initial, run))())


@pytest.fixture(scope="module")
def train(run: Run) -> Train:
    """The compiled step; gives NumPy arrays."""
    compiled = jax.jit(step.make_step(run), donate_argnums=0)
    return lambda state, batch: jax.device_get(compiled(jax.tree.map(jnp.array, state), batch))


def edited(state: Any, path: str, value: float) -> Any:
    """A copy of a state with the first entry of one leaf replaced."""

    def edit(at: Any, leaf: np.ndarray) -> np.ndarray:
        if jax.tree_util.keystr(at, simple=True, separator="/") != path:
            return leaf
        found.append(at)
        leaf = leaf.copy()
        leaf[(0,) * leaf.ndim] = value
        return leaf

    found: list[Any] = []
    made = jax.tree_util.tree_map_with_path(edit, state)
    assert len(found) == 1, path
    return made


def moment(state: Any, end: str) -> str:
    """Path of the one AdamW moment whose path ends like this."""
    paths = [jax.tree_util.keystr(at, simple=True, separator="/") for at, _ in jax.tree.leaves_with_path(state)]
    (path,) = (p for p in paths if p.startswith("opt_state/") and p.endswith(end))
    return path


def assert_unchanged(state: Any, new: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, new, state)


def bad(run: Run, flags: np.ndarray) -> set[str]:
    names = list(leaves(model.declare(run.model)))
    return {name for name, ok in zip(names, flags, strict=True) if not ok}


def test_a_step_counts_itself_and_moves_every_weight(train: Train, start: Any, batch: Batch) -> None:
    new, made = train(start, batch)
    assert made.finite.everything
    assert (int(start.step), int(new.step)) == (0, 1)
    np.testing.assert_array_equal(new.key, start.key)
    still = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, same in jax.tree_util.tree_leaves_with_path(
            jax.tree.map(lambda a, b: bool((a == b).all()), new.params, start.params)
        )
        if same
    ]
    assert still == []


def test_the_first_update_uses_the_first_rate_and_the_second_the_second(
    train: Train, start: Any, batch: Batch, run: Run
) -> None:
    one, first = train(start, batch)
    _, second = train(one, batch)
    peak, warmup = run.optim.peak, run.optim.warmup_steps
    np.testing.assert_allclose(
        [first.learning_rate, second.learning_rate], [peak / warmup, 2 * peak / warmup], rtol=1e-6
    )


def test_equal_states_and_batches_give_equal_steps(train: Train, start: Any, batch: Batch) -> None:
    jax.tree.map(np.testing.assert_array_equal, train(start, batch), train(start, batch))


def test_router_biases_move_by_the_rate_against_their_load(train: Train, start: Any, batch: Batch, run: Run) -> None:
    new, made = train(start, batch)
    for path, ids in step.bias_layers(run.model).items():
        names = path.split("/")[1:]
        old_bias, new_bias = start.params["layers"], new.params["layers"]
        for name in names:
            old_bias, new_bias = old_bias[name], new_bias[name]
        counts = made.report.counts[ids]
        moved = np.sign(counts.mean(axis=-1, keepdims=True) - counts) * run.optim.bias_rate
        np.testing.assert_allclose(new_bias - old_bias, moved, atol=1e-9)


def test_every_layer_has_its_own_router_bias(run: Run) -> None:
    ids = np.concatenate([np.ravel(i) for i in step.bias_layers(run.model).values()])
    assert sorted(ids) == list(range(run.model.num_hidden_layers))


def test_a_weight_that_is_no_number_changes_nothing_and_is_reported(
    train: Train, start: Any, batch: Batch, run: Run
) -> None:
    broken = edited(start, "params/layers/layer0/attn/wq_a", np.nan)
    new, made = train(broken, batch)
    assert_unchanged(broken, new)
    assert not made.finite.everything and not made.finite.loss
    assert "layers/layer0/attn/wq_a" in bad(run, made.finite.gradients)


def test_an_update_that_overflows_changes_nothing_though_loss_and_gradients_are_fine(
    train: Train, start: Any, batch: Batch, run: Run
) -> None:
    path = moment(start, "mu/norm")
    overflowing = edited(start, path, np.finfo(np.float32).max)
    new, made = train(overflowing, batch)
    assert_unchanged(overflowing, new)
    assert made.finite.loss and made.finite.gradients.all()
    assert bad(run, made.finite.weights) == {"norm"}


def test_an_optimiser_state_that_is_no_number_is_reported_though_no_weight_shows_it(
    train: Train, start: Any, batch: Batch
) -> None:
    path = moment(start, "nu/norm")
    broken = edited(start, path, np.inf)  # this moment would hold its weight still for ever
    new, made = train(broken, batch)
    assert_unchanged(broken, new)
    assert made.finite.weights.all() and not made.finite.optimiser and not made.finite.everything


def test_evaluation_counts_the_targets_of_the_mask_only(run: Run, start: Any, batch: Batch) -> None:
    score = jax.jit(partial(step.evaluate, run.inference))
    whole, _ = score(start.params, batch)
    assert float(whole.tokens) == float(batch.loss_mask.sum())
    # At the start every id is about as likely as any other; 10 % covers what random weights of 0.02 do to logits.
    np.testing.assert_allclose(whole.nll / whole.tokens, np.log(run.model.vocab_size), rtol=0.1)
    none, _ = score(start.params, batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask)))
    assert (float(none.nll), float(none.tokens)) == (0.0, 0.0)
