"""What compiled programs of eight devices hold, and what they must not: collectives in loops, gathered tables."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsflash_jax import model, sharding
from dsflash_jax.config import Objective
from dsflash_jax.flow import Setup
from dsflash_jax.params import Weight, normal
from dsflash_jax.sharding import Layout
from train import newton_schulz, optim, sinkhorn, step
from train.optim import Optim

INIT = normal(0.02)
PLAIN = Optim(peak=1.0, final=1.0, warmup_steps=0, clip=0.0, weight_decay=0.0)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
MIXED = Layout(fsdp=2, expert=2, tensor=2, whole=0)

MATRICES = {  # a kind each: split over both axes, over one, as heads, side by side, and whole
    "w1": Weight((4, 24, 16), ("expert_stack", "embed", "expert_width"), INIT, matrix=(1, 2), stack=(3,)),
    "w2": Weight((4, 16, 24), ("expert_stack", "expert_width", "embed"), INIT, matrix=(1, 2), stack=(3,)),
    "wq_a": Weight((24, 16), ("embed", "q_latent"), INIT),
    "wq_b": Weight((16, 4, 8), ("q_latent", "heads", "head_dim"), INIT, matrix=(0, 2), stack=(5,)),
    "hc_fn": Weight((32, 24), ("embed", "mix"), INIT, split=(4, 4, 16)),
}
ROWS = 1000  # of the table: 125 a device
TABLE = Weight((ROWS, 8), ("ngram_rows", "ngram_dim"), INIT, "sinkhorn", split=(331, 300, 369))


class Update:
    """One update of declared weights, compiled for a layout."""

    def __init__(self, declared, layout, settings=PLAIN, aware=True):
        mesh = layout.mesh(jax.devices()[: layout.devices])
        self.where = jax.tree.map(partial(NamedSharding, mesh), sharding.specs(declared, layout))
        self.tx = optim.build(declared, settings, 10, *((layout, mesh) if aware else ()))
        like = {k: jax.ShapeDtypeStruct(w.full_shape, jnp.float32, sharding=self.where[k]) for k, w in declared.items()}
        state = jax.eval_shape(self.tx.init, like)
        placed = lambda path, x: getattr(like.get(getattr(path[-1], "key", None)), "sharding", NamedSharding(mesh, P()))  # noqa: E731
        self.state = jax.tree_util.tree_map_with_path(placed, state)
        state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, self.state)
        self.compiled = (
            tiny.jit(self.tx.update, out_shardings=(self.where, self.state)).lower(like, state, like).compile()
        )

    def __call__(self, *grads):
        """Directions of the last of some updates, and the state."""
        state = jax.device_put(self.tx.init(jax.tree.map(jnp.asarray, grads[0])), self.state)
        for grad in grads:
            grad = jax.device_put(grad, self.where)
            updates, state = self.compiled(grad, state, grad)  # with no decay, the weights do not matter
        return jax.device_get(updates), state


def gradients(declared, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(w.full_shape).astype(np.float32) for name, w in declared.items()}


def collectives(text):
    """How often each collective is called in some lines of a compiled program."""
    return Counter(re.findall(rf"\b({'|'.join(COLLECTIVES)})(?:-start)?\(", text))


def in_loops(text):
    """The computations of a compiled program that some loop runs."""
    blocks = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S))
    reached, new = set(), set(re.findall(r"body=%?([\w.-]+)", text))
    assert new <= set(blocks), "the program is printed in a way that this test does not read"
    while new:
        reached |= new
        called = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
        new = {name for block in new for name in called.findall(blocks[block])} - reached
    return "\n".join(blocks[name] for name in reached)


def test_newton_schulz_runs_without_collectives_between_one_exchange_in_and_one_out(monkeypatch):
    monkeypatch.setattr(newton_schulz, "CHUNK", 2 * 24 * 16)  # experts take several turns
    text = Update(MATRICES, MIXED).compiled.as_text()
    assert " while(" in text and not collectives(in_loops(text))
    kinds = 5  # w1 and w2 are of one, parts of 4 and of 16 columns of hc_fn are two
    assert set(collectives(text)) == {"all-to-all"} and collectives(text)["all-to-all"] == 2 * kinds
    left_alone = Update(MATRICES, MIXED, aware=False).compiled.as_text()
    assert collectives(in_loops(left_alone))  # the partitioner's program, and proof that this test can see


@pytest.mark.parametrize("chunk", [1, 2 * 24 * 16, 2**24])
def test_whole_matrices_are_updated_as_on_one_device_however_many_at_a_time(chunk, monkeypatch):
    monkeypatch.setattr(newton_schulz, "CHUNK", chunk)
    grads = gradients(MATRICES)
    got, want = Update(MATRICES, MIXED)(grads)[0], Update(MATRICES, Layout())(grads)[0]
    assert max(tiny.worst(got, want).values()) < 1e-5


@pytest.mark.parametrize(
    ("count", "devices", "entries", "share", "chunk"),
    [
        (40 * 384 * 3, 256, 5120 * 2304, 180, 1),  # the released experts: no padding
        (40 * 64, 256, 1280 * 512, 10, 10),  # its query heads
        (40, 256, 5120 * 1280, 1, 1),  # fewer matrices than devices: one each, the others' are zero
        (17, 4, 2**22, 6, 3),  # 5 a device in 2 turns of at most 4
        (1, 1, 2**30, 1, 1),
    ],
)
def test_padding_is_less_than_a_matrix_a_device_and_less_than_one_a_turn(count, devices, entries, share, chunk):
    assert newton_schulz.shares(count, devices, entries) == (share, chunk)
    assert 0 <= share * devices - count < devices * (1 + share // chunk)


@pytest.mark.parametrize(("chunk", "eps"), [(48, 1e-20), (48, 0.1), (8192, 1e-20)])
def test_a_split_table_is_balanced_where_it_lies(chunk, eps, monkeypatch):
    # A device has 125 rows: chunks that overlap, and one. A large eps shows a row that is balanced twice.
    monkeypatch.setattr(sinkhorn, "CHUNK_ROWS", chunk)
    settings = dataclasses.replace(PLAIN, sinkhorn_eps=eps)
    update = Update({"table": TABLE}, Layout(fsdp=4, expert=2), settings)
    assert set(collectives(update.compiled.as_text())) == {"all-reduce"}
    assert f"[{ROWS}," not in update.compiled.as_text()  # no device ever holds all rows
    grads = gradients({"table": TABLE})
    grads["table"][:400] *= 1e-6  # heads of their own scale: together, the first would not move
    grads["table"][::7] = 0
    got, want = update(grads)[0], Update({"table": TABLE}, Layout(), settings)(grads)[0]
    assert np.abs(want["table"][1:300]).max() > 0.5
    assert max(tiny.worst(got, want).values()) < 1e-5


def test_rows_of_a_split_table_move_as_on_one_device_and_unread_ones_keep_their_bits():
    rng = np.random.default_rng(0)
    ids = [rng.choice(500, 20, replace=False) for _ in range(3)]
    ids[0][1] = ids[0][0]  # one row read twice: its gradient is the sum
    grads = []
    for i in ids:
        dense = np.zeros(TABLE.shape, np.float32)
        np.add.at(dense, i, rng.standard_normal((20, 8)).astype(np.float32))
        grads.append({"table": dense})
    updates, state = Update({"table": TABLE}, Layout(fsdp=8))(*grads)
    want, _ = Update({"table": TABLE}, Layout())(*grads)
    np.testing.assert_allclose(updates["table"], want["table"], atol=1e-5)
    unread = np.setdiff1d(np.arange(ROWS), np.concatenate(ids))
    np.testing.assert_array_equal(updates["table"][unread], 0)
    (momentum,) = (x for x in jax.tree.leaves(state) if x.ndim == 2)
    assert {s.data.nbytes for s in momentum.addressable_shards} == {4 * ROWS * 8 // 8}  # 4 bytes an entry, an eighth


@pytest.mark.parametrize("shape", [(64, 12), (30, 16)])  # rows divide over eight devices; only columns do
def test_a_vocabulary_may_be_split_along_either_axis(shape):
    declared = {"embed": Weight(shape, ("vocab", "embed"), INIT, "sinkhorn")}
    at = Layout(fsdp=2, context=4, whole=0)
    assert (sharding.weight_spec("embed", declared["embed"], at)[0] is None) == (shape == (30, 16))
    update, grads = Update(declared, at), gradients(declared)
    assert set(collectives(update.compiled.as_text())) == {"all-reduce"}
    grads["embed"][:8] *= 1e-4  # too quiet to move, though not for a device that knows these alone
    want, _ = Update(declared, Layout())(grads)
    assert not want["embed"][:8].any()
    assert max(tiny.worst(update(grads)[0], want).values()) < 1e-5


def equations(jaxpr, times=1):
    """All equations of a traced program with how often each runs."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * (eqn.params["length"] if eqn.primitive.name == "scan" else 1)
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                yield from equations(getattr(value, "jaxpr", value), inner)


def test_forward_gathers_once_for_each_source_of_keys_and_values():
    c = tiny.with_modes("S F2 U F2 U F1p U X U", n_routed_experts=8)
    setup = Setup(c, tiny.STRICT, Objective(), layout=Layout(context=4, expert=2, whole=0))
    mesh = setup.layout.mesh()
    like = lambda tree: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)  # noqa: E731
    weights = jax.eval_shape(partial(model.init, step.declare(setup)), jax.random.key(0))
    batch = like(tiny.batch(c, tiny.tokens(c, 6, 32)))
    traced = jax.make_jaxpr(step.total_loss(setup, mesh))(weights, batch, jax.random.key(0))
    sizes = Counter()
    for eqn, times in equations(traced.jaxpr):
        of_rows = eqn.primitive.name == "all_gather" and eqn.params["all_gather_dimension"] == 1
        if of_rows and eqn.outvars[0].aval.ndim == 3 and eqn.outvars[0].aval.shape[0] == 3:  # rows
            sizes[eqn.outvars[0].aval.shape] += times
    width = c.head_dim + c.index_head_dim
    assert sizes == {(3, 16, width): 2, (3, 32, width): 1}  # two Full layers of ratio 2 in one scan, one of ratio 1
