"""parallel.py: rows that travel in buckets are those that a plain gather brings, in values and gradients."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dsflash_jax import model, parallel, primes
from dsflash_jax.config import Objective
from dsflash_jax.flow import Setup
from dsflash_jax.sharding import Layout
from train import step

ROWS, WIDTH, ASKED = 64, 4, (2, 6)  # rows of the table, its width, and what each device asks for


def program(layout, dtype=jnp.float32):
    """Of table, row numbers and weights: what each device reads, the rows that it lost, and the table's gradient of
    sum(weights * read ** 2); and where the three lie."""
    p, mesh = layout.parallel, layout.mesh(jax.devices()[: layout.devices])

    def one(table, ids, weights):
        def share(table):
            read, dropped = parallel.look_up(p, table, ids[0], dtype)
            return jnp.sum(weights[0] * jnp.square(read.astype(jnp.float32))) / p.size(p.heads), (read, dropped)

        grad, (read, dropped) = jax.grad(share, has_aux=True)(table)
        return read[None], dropped[None], parallel.add(grad, layout.used("data"))

    split, tokens = P(p.tables or None), P((*p.rows, *p.tokens) or None)
    inside, outside = (split, tokens, tokens), (tokens, tokens, split)
    run = jax.shard_map(one, mesh=mesh, in_specs=inside, out_specs=outside, check_vma=False)
    return run, [NamedSharding(mesh, spec) for spec in inside]


def looked_up(layout, table, ids, weights, dtype=jnp.float32):
    return jax.device_get(tiny.jit(program(layout, dtype)[0])(table, ids, weights))


def asked(kind, devices):
    rng = np.random.default_rng(0)
    ids = {
        "any": rng.integers(0, ROWS, (devices, *ASKED)),
        "one row": np.full((devices, *ASKED), 37),
        "few": rng.choice([0, 1, ROWS - 1], (devices, *ASKED)),
        "all of one owner": rng.permuted(np.tile(np.arange(12), (devices, 1)), axis=1).reshape(devices, *ASKED) % 8,
    }[kind]
    return jnp.asarray(ids, jnp.int32)


TABLE = jnp.asarray(np.random.default_rng(1).standard_normal((ROWS, WIDTH)), jnp.float32)


@pytest.mark.parametrize("exchange", ["buckets", "ragged"])
@pytest.mark.parametrize("kind", ["any", "one row", "few", "all of one owner"])
@pytest.mark.parametrize("axes", [{"fsdp": 8}, {"data": 2, "expert": 2, "context": 2}, {"fsdp": 2, "tensor": 4}])
def test_asking_owners_reads_and_teaches_what_a_gather_does(axes, kind, exchange):
    plain, bucketed = Layout(**axes), Layout(**axes, capacity=8.0, exchange=exchange)
    devices = 8 // plain.tensor
    ids = asked(kind, devices)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal((*ids.shape, WIDTH)), jnp.float32)
    read, dropped, grad = looked_up(bucketed, TABLE, ids, weights)
    np.testing.assert_array_equal(read, np.asarray(TABLE)[ids])
    assert not dropped.any()
    want = jax.grad(lambda t: jnp.sum(weights * jnp.square(t[ids])))(TABLE)
    np.testing.assert_allclose(grad, want, atol=1e-5)  # float32 sums of up to 96 terms
    np.testing.assert_allclose(grad, looked_up(plain, TABLE, ids, weights)[2], atol=1e-5)


def test_rows_without_room_are_counted_once_and_zero_and_the_others_right():
    layout = Layout(fsdp=8, capacity=2.0)  # room for 3 of 12: each owner has 8 rows
    ids = jnp.asarray(np.tile([[0, 1, 2, 3, 4, 4], [0, 9, 63, 4, 17, 3]], (8, 1, 1)), jnp.int32)
    weights = jnp.ones((*ids.shape, WIDTH), jnp.float32)
    read, dropped, grad = looked_up(layout, TABLE, ids, weights)
    np.testing.assert_array_equal(dropped, 2)  # 3 and 4, though they are asked for five times
    kept = (np.asarray(ids) != 3) & (np.asarray(ids) != 4)
    np.testing.assert_array_equal(read, np.where(kept[..., None], np.asarray(TABLE)[ids], 0))
    want = jax.grad(lambda t: jnp.sum(jnp.square(t[ids]) * kept[..., None]))(TABLE)
    np.testing.assert_allclose(grad, want, atol=1e-5)


def test_gradients_of_one_row_add_up_in_float32():
    ids = jnp.full((8, *ASKED), 5, jnp.int32)
    one = jnp.ones_like(TABLE)
    weights = jnp.full((*ids.shape, WIDTH), 2.0**-9).at[:, 0, 0].set(1.0)  # in bfloat16 1 + 2^-9 is 1
    _, _, grad = looked_up(Layout(fsdp=8, capacity=8.0), one, ids, weights, jnp.bfloat16)
    np.testing.assert_allclose(grad[5], 16 * (1 + 11 * 2.0**-9), rtol=2**-8)  # rounded once, on its way


def test_distinct_numbers_come_once_in_order_and_each_finds_its_own():
    x = jnp.asarray([7, 3, 7, 7, 0, 3], jnp.int32)
    numbers, which = parallel.distinct(x, filler=99)
    np.testing.assert_array_equal(numbers, [0, 3, 7, 99, 99, 99])
    np.testing.assert_array_equal(numbers[which], x)


@pytest.mark.parametrize("capacity", [0.0, 4.0])
def test_no_look_up_holds_all_rows_of_a_table_and_with_a_capacity_not_all_numbers_either(capacity):
    layout = Layout(fsdp=8, capacity=capacity)
    ids, weights = jnp.zeros((8, *ASKED), jnp.int32), jnp.ones((8, *ASKED, WIDTH))
    run, where = program(layout)
    text = tiny.jit(run, in_shardings=where).lower(TABLE, ids, weights).compile().as_text()
    assert f"[{ROWS}," not in text
    assert ("all-gather" in text) == (capacity == 0)


def test_ngram_rows_without_room_reach_the_report_of_their_layer():
    sizes = primes.tables(1, 3, 2, 101)
    c = dataclasses.replace(tiny.T, **tiny.ENGRAM | {"engram_vocab_size": 101})
    c = c.with_modes("S Se", engram_num_embeddings=(int(np.sum(sizes)),))
    setup = Setup(c, tiny.STRICT, Objective(), layout=Layout(fsdp=8, capacity=1.0))  # its experts are not split
    mesh, batch = setup.layout.mesh(), tiny.batch(c, tiny.tokens(c, 8, 32))
    weights = model.init(step.declare(setup), jax.random.key(0))
    _, report = tiny.jit(step.total_loss(setup, mesh))(weights, batch, jax.random.key(0))
    held, room = -(-int(np.sum(sizes)) // 8), 32 * 4 // 8
    owners = [np.unique(row) // held for row in np.asarray(batch.engram_rows)]
    missing = sum(np.maximum(np.bincount(o, minlength=8) - room, 0).sum() for o in owners)
    np.testing.assert_array_equal(report.dropped, [0, missing])
    assert missing > 0
