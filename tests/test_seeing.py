"""A multimodal run from its command to its end: it reads numbers off pictures it was never trained on, and resumes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_digits import arguments, tiny

from dsflash_jax import cli, loss, model
from dsflash_jax.flow import Batch
from dsflash_jax.params import leaves, map_weights
from dsflash_jax.pixels import Images
from train import data, digits, main, metrics, step
from train.saver import Saver

STEPS, EVERY = 160, 40  # the tower is frozen up to the first checkpoint
OPTIONS = (
    f"steps={STEPS}", f"save_every={EVERY}", f"eval_every={2 * EVERY}", "log_every=20", "keep=4", "eval_batches=4",
    "data.batch_size=8", "model.modes=F1", "model.hidden_size=32", "model.vision.hidden_size=32",
    "model.index_topk=16", "model.sliding_window=16", "optim.peak=2e-2", "optim.final=2e-3", "optim.warmup_steps=5",
    "optim.muon_steps=4,1", "optim.sinkhorn_iterations=3", "optim.decay_start=0.4", "optim.decay_end=1",
    f"optim.vision_start={EVERY / STEPS}", "optim.vision_rate=1", "sample_tokens=3",
)  # fmt: skip
CHANGES = {"DOCUMENTS": 4000, "DIGITS": 1, "HEIGHT": 16, "WIDTH": 12, "PIXELS": (2.0, 2.5)}  # pictures of one digit


@pytest.fixture(scope="module", autouse=True)
def _small_pictures_and_one_trace() -> Iterator[None]:
    """Pictures of one digit; and runs that differ in their folder alone share one step function."""
    make = cache(main.step.make_step)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CHANGES.items():
            patch.setattr(digits, name, value)
        patch.setattr(main.step, "make_step", lambda run, mesh: make(replace(run, out="any"), mesh))
        patch.setattr(main, "BRISK", main.QUICK)
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run that nothing cut, started as a user does."""
    out = tmp_path_factory.mktemp("seeing") / "straight"
    assert cli.main(["train", *arguments(out, *OPTIONS), "--json", str(out / "result.json")]) == 0
    return out


def weights_at(out: Path, at: int, scratch: Path) -> Any:
    """The weights that a run saved after some updates."""
    cut = kept_until(out, at, scratch / f"{out.name}-{at}")
    saver = Saver(tiny(cut, *OPTIONS))
    state, _ = saver.restore(jax.eval_shape(partial(step.initial, tiny(cut, *OPTIONS))))
    saver.close()
    assert int(state.step) == at
    return jax.device_get(state.params)


def kept_until(out: Path, at: int, copy: Path) -> Path:
    """A copy of a run's folder as it was when step `at` had been saved."""
    shutil.copytree(out, copy)
    for folder in (copy / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > at:
            shutil.rmtree(folder)
    return copy


def flat(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in jax.tree.leaves_with_path(tree)}


@pytest.mark.slow
def test_a_run_of_pictures_leaves_what_it_read(straight: Path) -> None:
    result = json.loads((straight / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", STEPS)
    lines = result["sample"].splitlines()
    assert len(lines) == main.READ and all(re.match(r"\d read as '", line) for line in lines)
    assert result["sample"] == (straight / "sample.txt").read_text()


@pytest.mark.slow
def test_captions_are_read_off_the_pictures(straight: Path, tmp_path: Path) -> None:
    run = tiny(straight, *OPTIONS)
    params = weights_at(straight, STEPS, tmp_path)
    heldout = data.batches(run.data, "heldout", n_batches=run.eval_batches, model=run.model)
    batches = [Batch(**jax.tree.map(jnp.asarray, batch)) for batch in heldout]
    score = jax.jit(partial(step.evaluate, run.inference))

    def nats(change: Callable[[Images], Images]) -> float:
        """Held-out loss a byte of the captions, the pictures changed."""
        sums = [score(params, b.replace(images=change(b.images)))[0] for b in batches]
        text = sum(float(jnp.sum(b.loss_mask * (b.targets > main.tokenizer.EOS))) for b in batches)
        return sum(float(s.nll) for s in sums) / text

    def exchanged(images: Images) -> Images:
        """Each document's picture goes to the next one."""
        shape = images.patches.shape
        return images.replace(patches=jnp.roll(images.patches.reshape(-1, *shape[2:]), 1, axis=0).reshape(shape))

    own = nats(lambda images: images)
    assert own == pytest.approx(metrics.read(straight / "metrics.jsonl", "heldout")[-1]["nats_per_byte"], rel=1e-5)
    assert own < 0.75 * digits.GUESS
    assert nats(exchanged) > digits.GUESS
    assert nats(lambda images: images.replace(patches=jnp.zeros_like(images.patches))) > digits.GUESS
    assert nats(lambda images: images.replace(grid=jnp.zeros_like(images.grid))) > digits.GUESS


@pytest.mark.slow
def test_a_cut_run_goes_on_to_the_same_end(straight: Path, tmp_path: Path) -> None:
    cut = kept_until(straight, 3 * EVERY, tmp_path / "cut")
    assert main.run(tiny(cut, *OPTIONS)) == 0
    ends = (weights_at(out, STEPS, tmp_path) for out in (cut, straight))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    read = lambda out: [x | {"tokens_per_second": 0} for x in metrics.read(out / "metrics.jsonl")]  # noqa: E731
    assert read(cut) == read(straight)


@pytest.mark.slow
def test_the_tower_alone_is_frozen_at_first(straight: Path, tmp_path: Path) -> None:
    start = flat(jax.device_get(main.start(tiny(straight, *OPTIONS)).params))
    first, second = (flat(weights_at(straight, at, tmp_path)) for at in (EVERY, 2 * EVERY))
    tower = {n for n in start if n.startswith("vision/") and n != "vision/norm"}
    assert {n for n in start if np.array_equal(start[n], first[n])} == tower
    assert not any(np.array_equal(first[n], second[n]) for n in start)


def test_each_modality_moves_its_own_router_bias(tmp_path: Path) -> None:
    run = tiny(tmp_path)
    c = run.model
    rng = np.random.default_rng(0)
    counts, counts_vl = (rng.integers(0, 99, (c.num_hidden_layers, c.n_routed_experts)) for _ in range(2))
    params = map_weights(lambda w: jnp.zeros(w.full_shape), model.declare(c))
    layers, nothing = step.bias_layers(c), loss.CrossEntropy(0, 0, 0, 0)

    def moved(counts: np.ndarray, counts_vl: np.ndarray) -> dict[str, Any]:
        report = loss.Report(0, nothing, 0, 0, jnp.asarray(counts), jnp.asarray(counts_vl), 0)
        return flat(step.balance(params, report, layers, 0.5))

    rule = lambda n: 0.5 * np.sign(n.mean(axis=-1, keepdims=True) - n)  # noqa: E731
    new = moved(counts, counts_vl)
    biases = {name for name in new if leaves(model.declare(c))[name].family == "rule"}
    assert biases == layers.keys() and len(biases) == 2 * c.num_hidden_layers
    for name, ids in layers.items():
        np.testing.assert_array_equal(new[name], rule((counts_vl if name.endswith("bias_vl") else counts)[ids]))
    assert all((new[name] == 0).all() for name in new.keys() - biases)
    absent = moved(counts, np.zeros_like(counts))
    assert all((absent[name] == 0).all() for name in biases if name.endswith("bias_vl"))
    assert all((absent[name] != 0).any() for name in biases if not name.endswith("bias_vl"))
