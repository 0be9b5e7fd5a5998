"""sharding.py and parallel.py: every layout on eight devices computes what one device computes."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsflash_jax import model, parallel, sharding
from dsflash_jax.config import Config, Objective
from dsflash_jax.flow import Setup
from dsflash_jax.overrides import find, override
from dsflash_jax.params import Weight, norm, normal
from dsflash_jax.sharding import Layout
from train import main, metrics, optim, placement, step
from train.optim import Optim

C = tiny.with_modes("Se F2 F1pe X U", sliding_window=6, n_routed_experts=8)
FEW = tiny.with_modes("Se F2", sliding_window=6, n_routed_experts=8)  # enough where only one axis splits
ROWS, WIDTH = 8, 32
DOCUMENTS = [[32], [5, 11, 13], [17, 15], [9, 2, 20], [], [1, 1, 30], [31], [8, 8, 8, 8]]
LAYOUTS = {
    "data": (FEW, Layout(data=8)),
    "expert": (FEW, Layout(expert=8)),
    "context": (FEW, Layout(context=8)),
    "data x expert, buckets": (FEW, Layout(data=2, expert=4, capacity=4.0)),
    "data x fsdp x tensor": (C, Layout(data=2, fsdp=2, tensor=2)),
    "fsdp x expert x context, buckets": (C, Layout(fsdp=2, expert=2, context=2, capacity=2.0)),
    "data x context x expert on tokens": (C, Layout(data=2, expert=2, context=2, expert_splits="tokens")),
}
NORMAL = normal(0.02)
NO_DRAW = jax.random.key(1)  # the losses compared draw nothing at random
AIM = Objective(balance_weight=0.01, index_teacher="group_mean")


def setup_of(c: Config, layout: Layout) -> Setup:
    return Setup(c, tiny.STRICT, AIM, layout=dataclasses.replace(layout, whole=0))


def padded(c: Config, weights, layout: Layout):
    """Weights with the n-gram rows that the layout adds."""
    stored = sharding.stored(model.declare(c), dataclasses.replace(layout, whole=0))
    fill = lambda w, a: jnp.pad(a, [(0, n - m) for n, m in zip(w.full_shape, a.shape, strict=True)])  # noqa: E731
    return sharding.map_pairs(fill, stored, weights)


def graded(c: Config, layout: Layout):
    setup = setup_of(c, layout)
    # Half as large as elsewhere: the layers then amplify a rounding error little, and 1e-5 is far above it.
    tame = sharding.map_pairs(lambda d, a: a / 2 if d.family == "muon" else a, model.declare(c), tiny.weights(c))
    weights, batch = padded(c, tame, layout), tiny.batch(c, tiny.tokens(c, ROWS, WIDTH), DOCUMENTS)
    devices = jax.devices()[: layout.devices]
    mesh = setup.layout.mesh(devices)
    place = lambda tree, specs: jax.device_put(tree, jax.tree.map(partial(NamedSharding, mesh), specs))  # noqa: E731
    weights = place(weights, sharding.specs(step.declare(setup), setup.layout))
    batch = place(batch, sharding.batch_specs(batch, setup.layout))
    value = jax.value_and_grad(step.total_loss(setup, mesh), has_aux=True)
    (loss, report), grads = tiny.jit(value)(weights, batch, jax.random.key(1))
    return jax.device_get((loss, report, grads))


@cache
def alone(c: Config):
    return graded(c, Layout())


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_report_and_gradients_are_those_of_one_device(name):
    c, layout = LAYOUTS[name]
    want_loss, want_report, want = alone(c)
    loss, report, grads = graded(c, layout)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert max(tiny.worst(report, want_report).values()) < 1e-5
    want = jax.device_get(padded(c, want, layout))
    bad = {k: v for k, v in tiny.worst(grads, want).items() if v > 1e-5}
    assert not bad


@pytest.mark.parametrize("name", [n if " x " in n else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_an_update_is_that_of_one_device(name):
    layout = dataclasses.replace(LAYOUTS[name][1], whole=0)

    def updated(layout: Layout):
        declared = sharding.stored(model.declare(C), layout)
        mesh = layout.mesh(jax.devices()[: layout.devices])
        tx = optim.build(declared, Optim(warmup_steps=1), 10, layout, mesh)
        place = partial(
            jax.device_put, device=jax.tree.map(partial(NamedSharding, mesh), sharding.specs(declared, layout))
        )
        params, grads = (place(padded(C, tiny.weights(C, seed), layout)) for seed in (0, 1))
        updates, _ = tiny.jit(lambda g, p: tx.update(g, tx.init(p), p))(grads, params)
        return jax.device_get(updates)

    want = padded(C, updated(Layout()), layout)
    assert max(tiny.worst(updated(layout), want).values()) < 1e-5


@pytest.mark.parametrize(
    ("owner", "room", "places", "dropped"),
    [
        ([1, 0, 1, 1], 3, [3, 0, 4, 5], 0),
        ([1, 1, 1, 1], 3, [3, 4, 5, 9], 1),  # from 6 on: behind the last of 2 buckets, a number for each row
        ([0, 2, -1, 0], 2, [0, 5, 6, 1], 0),  # owners that do not exist have no bucket and are not missed
        ([], 2, [], 0),
    ],
)
def test_rows_take_places_in_their_owners_bucket_in_order(owner, room, places, dropped):
    got, missed = parallel.buckets(jnp.asarray(owner, jnp.int32), 2, room)
    np.testing.assert_array_equal(got, places)
    assert missed == dropped


def test_a_weight_is_split_over_every_axis_but_data_and_small_ones_are_whole():
    at = Layout(data=2, fsdp=2, expert=2, tensor=2)
    w = Weight((4, 512, 384), ("expert_stack", "embed", "expert_width"), NORMAL, matrix=(1, 2), stack=(3,))
    assert sharding.weight_spec("w1", w, at) == P(None, "expert", "fsdp", "tensor")
    assert sharding.weight_spec("norm", norm(512, "embed"), at) == P(None)
    small = Weight((16, 8), ("embed", "mix"), NORMAL)
    assert sharding.weight_spec("small", small, at) == P(None, None)
    beside = Weight((512, 1024), ("embed", "mix"), NORMAL, split=(512, 512))  # two matrices, cut where they lie
    assert sharding.weight_spec("beside", beside, at) == P(("fsdp", "expert", "tensor"), None)


def test_a_stack_is_gathered_along_the_axes_of_its_weights():
    """The blocks of the image tower."""
    at, declared = Layout(fsdp=2, context=2, whole=0), {"w": Weight((8, 4), ("vision", "out"), NORMAL, stack=(3,))}
    whole = jnp.arange(96.0).reshape(3, 8, 4)
    one = partial(sharding.fetch, at, declared)
    mesh, specs = at.mesh(jax.devices()[:4]), sharding.specs(declared, at)
    fetched = jax.shard_map(one, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False)({"w": whole})
    np.testing.assert_array_equal(fetched["w"], whole)


def test_what_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match="w1: its axis expert_stack of 4 does not divide over expert=3 devices"):
        w = Weight((4, 512, 384), ("expert_stack", "embed", "expert_width"), NORMAL, matrix=(1, 2))
        sharding.weight_spec("w1", w, Layout(expert=3))
    with pytest.raises(ValueError, match=r"wkv of shape \(512, 384\): none of its axes divides over fsdp = 5 devices"):
        sharding.weight_spec("wkv", Weight((512, 384), ("embed", "kv_latent"), NORMAL), Layout(fsdp=5))
    with pytest.raises(ValueError, match="3 rows do not divide over fsdp = 2 devices"):
        sharding.check(C, 3, 32, Layout(fsdp=2))
    with pytest.raises(ValueError, match="rows of 36 tokens do not divide over context = 4 devices in whole .* 8"):
        sharding.check(C, 4, 36, Layout(context=4))
    with pytest.raises(ValueError, match=r"takes 16 devices, but there are 8: change an axis"):
        Layout(fsdp=16).mesh()
    with pytest.raises(ValueError, match="layout.capacity is 0 .* or a number from 1 on, times the mean, got 0.5"):
        Layout(capacity=0.5)
    with pytest.raises(ValueError, match="layout.capacity is 0 .* got inf"):
        Layout(capacity=float("inf"))
    with pytest.raises(ValueError, match="layout.exchange=ragged .* capacity=0 gathers .* set layout.capacity"):
        Layout(exchange="ragged")


def test_rows_that_stay_whole_may_have_any_length():
    sharding.check(C, 4, 33, Layout(fsdp=2))


def test_every_command_of_the_recipes_for_many_hosts_can_be_laid_out():
    text = (Path(__file__).parent.parent / "docs" / "pods.md").read_text()
    commands = re.findall(r"dsflash train (\S+) (.*)", text)
    assert len(commands) >= 5
    for name, rest in commands:
        run = override(find(name), [word for word in rest.split() if re.match(r"(layout|data)\.\w+=", word)])
        assert run.layout.devices > 1
        sharding.check(run.model, run.data.batch_size // run.accumulate, run.data.seq_len, run.layout)
        sharding.specs(step.declare(run.setup), run.layout)


def test_an_evaluation_counts_the_rows_without_room_and_padding_is_none_of_them():
    setup = setup_of(FEW, Layout(expert=4, capacity=1.0))
    mesh = setup.layout.mesh(jax.devices()[:4])
    batch = tiny.batch(FEW, tiny.tokens(FEW, ROWS, WIDTH), DOCUMENTS)
    score = tiny.jit(partial(step.evaluate, dataclasses.replace(setup, objective=None), mesh=mesh))
    weights = padded(FEW, tiny.weights(FEW), setup.layout)
    _, dropped = score(weights, batch)
    assert dropped > 0
    nothing = jax.tree.map(jnp.zeros_like, batch).replace(engram_rows=batch.engram_rows[:1, :1] + 0 * batch.engram_rows)
    sums, dropped = score(weights, nothing)
    assert (float(sums.tokens), float(dropped)) == (0, 0)


@pytest.mark.slow
def test_a_run_on_eight_devices_trains_as_on_one_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "BRISK", main.QUICK)
    corpus = tiny_run.write_corpus(tmp_path / "corpus")
    changes = ("steps=4", "optim.warmup_steps=1", "optim.decay_start=0.5", "eval_every=4", "data.batch_size=8")
    layout = ("layout.fsdp=2", "layout.expert=2", "layout.context=2", "layout.whole=0")
    alone = tiny_run.tiny(corpus, tmp_path / "alone", *changes)
    split = tiny_run.tiny(corpus, tmp_path / "split", *changes, *layout)
    assert main.run(alone) == 0
    assert main.run(split, until=2) == 0 and main.run(split) == 0
    one, other = (metrics.read(tmp_path / name / "metrics.jsonl", "heldout")[-1] for name in ("alone", "split"))
    assert other["nats_per_byte"] == pytest.approx(one["nats_per_byte"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(), Layout(fsdp=2, context=2)])
def test_a_batch_in_parts_has_the_loss_report_and_gradients_of_the_whole(layout):
    setup, parts = setup_of(FEW, layout), 4
    mesh = None if layout.devices == 1 else setup.layout.mesh(jax.devices()[: layout.devices])
    weights, batch = padded(FEW, tiny.weights(FEW), layout), tiny.batch(FEW, tiny.tokens(FEW, ROWS, WIDTH), DOCUMENTS)
    cut = jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), batch)
    (loss, report), grads = jax.device_get(tiny.jit(step.gradients(setup, parts, mesh))(weights, cut, NO_DRAW))
    (want_loss, want_report), want = jax.device_get(tiny.jit(step.gradients(setup, 1, mesh))(weights, batch, NO_DRAW))
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    assert max(tiny.worst(report, want_report).values()) < 1e-5
    assert not {k: v for k, v in tiny.worst(grads, want).items() if v > 1e-5}


@pytest.mark.slow
def test_table_state_that_waits_on_the_host_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(main, "BRISK", main.QUICK)
    corpus = tiny_run.write_corpus(tmp_path / "corpus")
    changes = ("steps=4", "model.modes=Se F2", "optim.warmup_steps=1", "optim.decay_start=0.5", "eval_every=4")
    split = ("layout.fsdp=2", "layout.context=2", "layout.whole=0", "data.batch_size=8")
    near, far = (
        tiny_run.tiny(corpus, tmp_path / name, *changes, *split, f"layout.offload={name == 'far'}")
        for name in ("near", "far")
    )
    devices = jax.devices()[:4]
    kinds = {at.memory_kind for at in jax.tree.leaves(placement.place(far, devices).state.opt_state)}
    assert kinds == {"device", placement.HOST}
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    assert main.run(near) == 0
    assert main.run(far, until=2) == 0 and main.run(far) == 0  # a checkpoint between, too
    one, other = (metrics.read(tmp_path / name / "metrics.jsonl", "heldout")[-1] for name in ("near", "far"))
    assert other["nats_per_byte"] == one["nats_per_byte"]
