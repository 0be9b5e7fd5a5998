"""saver.py: checkpoints appear whole or not at all, and only go on with the run that wrote them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import tiny, write_corpus

from dsflash_jax import model, sharding
from dsflash_jax.config import Config, Quantize
from dsflash_jax.overrides import find, override
from dsflash_jax.params import leaves
from dsflash_jax.sharding import Layout
from train.config import Run
from train.saver import NotSaved, Saver, read_weights
from train.step import TrainState

NGRAMS = find("demo").model.with_modes(
    "Se", hidden_size=16, moe_intermediate_size=8, engram_vocab_size=17, engram_n_heads=1, engram_num_embeddings=(59,)
)
POSITION = {"step": 3, "split": "train"}
# Values that a detour over another dtype would change.
STATE = TrainState(
    step=jnp.int32(3),
    params={"a": {"w": jnp.asarray([1 + 2**-20, -0.0, 1e-40], jnp.float32)}, "b": jnp.asarray([1.5], jnp.bfloat16)},
    opt_state=(jnp.int32(16777217), [jnp.asarray(-jnp.inf, jnp.float32)]),
    key=jnp.asarray([7, 2**32 - 1], jnp.uint32),
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny(write_corpus(tmp_path / "corpus"), tmp_path / "run")


@contextmanager
def opened(run: Run) -> Iterator[Saver]:
    saver = Saver(run)
    yield saver
    saver.close()


def at(step: int) -> TrainState:
    return STATE.replace(step=jnp.int32(step))


def test_a_state_comes_back_bit_for_bit_with_its_types_and_its_position(run: Run) -> None:
    with opened(run) as saver:
        assert saver.latest() is None
        saver.save(STATE, POSITION)
    with opened(run) as saver:
        assert saver.latest() == 3
        state, position = saver.restore(jax.eval_shape(lambda: STATE))
    assert position == POSITION
    assert jax.tree.structure(state) == jax.tree.structure(STATE)
    for one, two in zip(jax.tree.leaves(state), jax.tree.leaves(STATE), strict=True):
        assert one.dtype == two.dtype and np.asarray(one).tobytes() == np.asarray(two).tobytes()


def test_both_router_biases_come_back(run: Run, golden: Path) -> None:
    c = Config.from_json(golden / "tiny_full" / "config.json")
    declared = {path: w for path, w in leaves(model.declare(c)).items() if "/gate/bias" in path}
    assert {path.rsplit("/", 1)[1] for path in declared} == {"bias", "bias_vl"}
    rng = np.random.default_rng(0)
    biases = {path: jnp.asarray(rng.standard_normal(w.full_shape), jnp.float32) for path, w in declared.items()}
    with opened(run) as saver:
        saver.save(STATE.replace(params=biases), POSITION)
    with opened(run) as saver:
        state, _ = saver.restore(jax.eval_shape(lambda: STATE.replace(params=biases)))
    for path, want in biases.items():
        np.testing.assert_array_equal(state.params[path], want)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"a": STATE.params["a"]}, r"params.b was 'bfloat16\[1\]', is absent"),
        (STATE.params | {"c": jnp.zeros(2)}, r"params.c was absent, is 'float32\[2\]'"),
        (STATE.params | {"b": jnp.zeros(2, jnp.bfloat16)}, r"params.b was 'bfloat16\[1\]', is 'bfloat16\[2\]'"),
        (STATE.params | {"b": jnp.zeros(1)}, r"params.b was 'bfloat16\[1\]', is 'float32\[1\]'"),
    ],
)
def test_a_template_of_another_tree_shape_or_type_is_refused_and_named(params: Any, named: str, run: Run) -> None:
    with opened(run) as saver:
        saver.save(STATE, POSITION)
        with pytest.raises(ValueError, match=f"the arrays of step 3 do not fit this run: {named}$"):
            saver.restore(jax.eval_shape(lambda: STATE.replace(params=params)))


def test_the_newest_checkpoints_are_kept_and_one_step_is_written_once(run: Run) -> None:
    with opened(run) as saver:
        for step in (1, 2, 3):
            saver.save(at(step), POSITION)
        saver.save(at(3), {"step": 99})
        assert saver.restore(jax.eval_shape(lambda: STATE))[1] == POSITION
    assert sorted(p.name for p in saver.folder.iterdir()) == ["2", "3"]


def test_a_half_written_checkpoint_is_never_used_and_is_removed(run: Run) -> None:
    with opened(run) as saver:
        saver.save(at(1), POSITION)
    half = saver.folder / "7.orbax-checkpoint-tmp"  # of a step that this run does not write again
    (half / "state").mkdir(parents=True)
    (half / "state" / "d").write_text("half of the weights")
    with opened(run) as saver:
        assert saver.latest() == 1
        assert int(saver.restore(jax.eval_shape(lambda: STATE))[0].step) == 1
        saver.save(at(2), POSITION)
    assert sorted(p.name for p in saver.folder.iterdir()) == ["1", "2"]


def test_an_older_state_never_hides_a_newer_checkpoint(run: Run) -> None:
    with opened(run) as saver:
        saver.save(at(5), POSITION)
        with pytest.raises(RuntimeError, match="step 4 was not saved, the newest one there is of step 5"):
            saver.save(at(4), POSITION)
        assert saver.latest() == 5


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.index_topk=3", "model.index_topk was 2, is 3"),
        ("objective.index_weight=0.5", "objective.index_weight was 1.0, is 0.5"),
        ("optim.adam_betas=0.8,0.9", r"optim.adam_betas was \[0.9, 0.95\], is \[0.8, 0.9\]"),
        ("data.seq_len=64", "data.seq_len was 32, is 64"),
        ("steps=20", "steps was 10, is 20"),
        ("seed=1", "seed was 0, is 1"),
    ],
)
def test_what_a_continued_run_must_not_change_is_refused_and_named(change: str, named: str, run: Run) -> None:
    with opened(run) as saver:
        saver.save(STATE, POSITION)
    with (
        opened(tiny(Path(run.data.source), Path(run.out), change)) as saver,
        pytest.raises(ValueError, match=f"written by another run: {named}. Give these their old values"),
    ):
        saver.restore(jax.eval_shape(lambda: STATE))


def test_what_may_change_freely_does(run: Run, tmp_path: Path) -> None:
    with opened(run) as saver:
        saver.save(STATE, POSITION)
    free = (
        "log_every=7", "eval_every=7", "eval_batches=2", "save_every=7", "keep=1", "sample_tokens=0", "data.prefetch=0",
        "compute.remat=full",
    )  # fmt: skip
    with opened(tiny(tmp_path / "moved", Path(run.out), *free)) as saver:
        assert saver.restore(jax.eval_shape(lambda: STATE))[1] == POSITION


def damage(checkpoint: Path, part: str) -> None:
    """Cut off a file of a checkpoint ("values": of its arrays), or empty a folder of it."""
    victim = checkpoint / part
    if part == "values":
        victim = max((checkpoint / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    if victim.is_file():
        victim.write_bytes(victim.read_bytes()[:20])
    else:
        shutil.rmtree(victim)
        victim.mkdir()


# A read that fails leaves tasks of Orbax behind, which complain when they are collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", ["values", "data/metadata", "run/metadata", "state/_METADATA", "state", "run", ""])
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_it_is_used(part: str, run: Run) -> None:
    with opened(run) as saver:
        for step in (1, 2):
            saver.save(at(step), POSITION)
    damage(saver.folder / "2", part)
    said: list[str] = []
    with opened(run) as saver:
        restored = saver.restore(jax.eval_shape(lambda: STATE), said.append)
        assert restored is not None and int(restored[0].step) == saver.latest() == 1
        saver.save(at(2), POSITION)  # its place is free again
    assert sorted(p.name for p in saver.folder.iterdir()) == ["1", "2", "damaged-2"]
    (line,) = said
    assert re.fullmatch(rf"skipped the checkpoint of step 2: .+\. It is now in {saver.folder}/damaged-2", line)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damage_of_every_checkpoint_is_an_error_and_touches_none(run: Run) -> None:
    with opened(run) as saver:
        for step in (1, 2):
            saver.save(at(step), POSITION)
    damage(saver.folder / "1", "state")
    damage(saver.folder / "2", "data/metadata")
    with (
        opened(run) as saver,
        pytest.raises(ValueError, match=r"every .* is damaged \(step 2: .+; step 1: .+\); remove"),
    ):
        saver.restore(jax.eval_shape(lambda: STATE))
    assert sorted(p.name for p in saver.folder.iterdir()) == ["1", "2"]


def test_another_run_is_no_damage(run: Run) -> None:
    with opened(run) as saver:
        saver.save(at(1), POSITION)
    with opened(tiny(Path(run.data.source), Path(run.out), "seed=1")) as saver:
        saver._manager.delete(1)
        saver.save(at(2), POSITION)
    with opened(run) as saver, pytest.raises(ValueError, match="written by another run: seed was 1, is 0"):
        saver.restore(jax.eval_shape(lambda: STATE))
    assert sorted(p.name for p in saver.folder.iterdir()) == ["2"]


def test_a_saved_state_may_be_given_away_at_once(run: Run) -> None:
    state = STATE.replace(params={"w": jnp.arange(2.0**22)})  # takes longer to write than a step to overwrite
    spoil = jax.jit(lambda s: jax.tree.map(jnp.zeros_like, s), donate_argnums=0)
    with opened(run) as saver:
        saver.save(state, POSITION)
        jax.block_until_ready(spoil(state))
        restored = saver.restore(jax.eval_shape(lambda: STATE.replace(params={"w": jnp.zeros(2**22)})))
    assert restored is not None
    np.testing.assert_array_equal(restored[0].params["w"], np.arange(2.0**22, dtype=np.float32))


def test_a_checkpoint_that_cannot_be_written_says_what_is_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(run) as saver:
        saver.save(at(1), POSITION)

        def full(*args: Any, **options: Any) -> bool:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(saver._manager, "save", full)
        with pytest.raises(NotSaved, match=r"step 2 could not .*No space left.*; the checkpoint of step 1 is kept"):
            saver.save(at(2), POSITION)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_weights_alone_come_from_the_newest_checkpoint_that_can_be_read(run: Run) -> None:
    wide = replace(run, compute=replace(run.compute, dtype="bfloat16"), layout=Layout(fsdp=4), model=NGRAMS)
    states = {}
    with opened(wide) as saver:  # on four devices the n-gram table is filled up
        for step in (1, 2, 3):
            params = model.init(sharding.stored(model.declare(NGRAMS), wide.layout), jax.random.key(step))
            states[step] = at(step).replace(params=params)
            saver.save(states[step], POSITION)
    (Path(run.out) / "config.json").write_text(json.dumps(NGRAMS.to_json()))
    assert sorted(p.name for p in saver.folder.iterdir()) == ["2", "3"]
    damage(saver.folder / "3", "values")
    said: list[str] = []
    change = lambda use: override(use, ["quantize.kv_fp4=true"])  # noqa: E731
    step, use, w = read_weights(run.out, change, said.append)
    assert (step, use.model, use.compute) == (2, NGRAMS, wide.compute)
    assert use.quantize == Quantize(kv_fp4=True)
    assert len(said) == 1 and said[0].startswith("skipped the checkpoint of step 3: ")
    assert sorted(p.name for p in saver.folder.iterdir()) == ["2", "3"]  # only read
    table = lambda w: w["layers"]["layer0"]["engram"]["embed"]  # noqa: E731
    want = jax.device_get(states[2].params)
    assert (len(table(want)), len(table(w))) == (60, 59)
    want["layers"]["layer0"]["engram"]["embed"] = table(want)[:59]
    jax.tree.map(np.testing.assert_array_equal, want, dict(w))
    shutil.rmtree(saver.folder / "3")
    _, _, split = read_weights(run.out, lambda use: override(use, ["layout.fsdp=8"]), print)
    assert {part.data.shape for part in table(split).addressable_shards} == {(8, NGRAMS.engram_head_dim)}
    np.testing.assert_array_equal(table(split)[:59], table(w))
    split["layers"]["layer0"]["engram"]["embed"] = table(w)
    jax.tree.map(np.testing.assert_array_equal, dict(split), dict(w))


def test_weights_are_not_read_where_no_run_is_or_another_models_are(run: Run, tmp_path: Path) -> None:
    keep = lambda use: use  # noqa: E731
    with pytest.raises(ValueError, match="is not the folder of a run, as it lacks config.json or checkpoints"):
        read_weights(str(tmp_path / "nowhere"), keep, print)
    (Path(run.out) / "checkpoints").mkdir(parents=True)
    (Path(run.out) / "config.json").write_text(json.dumps(run.model.to_json()))
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        read_weights(run.out, keep, print)
    with opened(run) as saver:
        saver.save(STATE, POSITION)
    with pytest.raises(
        ValueError, match=r"the arrays of step 3 do not fit this model: a\.w was 'float32\[3\]', is absent"
    ):
        read_weights(run.out, keep, print)
