"""program.py: FLOPs of traced programs, collectives and arrays of compiled ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dsflash_jax import moe
from train import program

ROWS, IN, OUT, TURNS = 8, 16, 24, 5


def flops_of(function, *shapes):
    return program.flops(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)))


def test_a_product_counts_two_operations_an_entry_and_depth():
    assert flops_of(lambda x, w: x @ w, (ROWS, IN), (IN, OUT)) == 2 * ROWS * IN * OUT
    assert flops_of(lambda x, w: jnp.einsum("bti,bio->bto", x, w), (3, ROWS, IN), (3, IN, OUT)) == 6 * ROWS * IN * OUT


def test_a_loop_counts_all_its_turns_and_a_condition_its_costlier_side():
    loop = lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=TURNS)[0]  # noqa: E731
    assert flops_of(loop, (ROWS, IN), (IN, IN)) == 2 * TURNS * ROWS * IN * IN
    choose = lambda x, w: jax.lax.cond(x.sum() > 0, lambda: (x @ w) @ w, lambda: x @ w)  # noqa: E731
    assert flops_of(choose, (ROWS, IN), (IN, IN)) == 4 * ROWS * IN * IN


def test_a_recomputed_gradient_counts_four_products():
    loss = jax.checkpoint(lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2))
    # Once forward, once again, and two for the gradients.
    assert flops_of(jax.grad(loss, argnums=(0, 1)), (ROWS, IN), (IN, OUT)) == 4 * 2 * ROWS * IN * OUT


def test_a_grouped_product_counts_each_row_once_forward_and_twice_backward():
    sizes = jnp.asarray([3, 5], jnp.int32)
    product = lambda x, w: moe.ragged_dot(x, w, sizes)  # noqa: E731
    assert flops_of(product, (ROWS, IN), (2, IN, OUT)) == 2 * ROWS * IN * OUT
    both = jax.grad(lambda x, w: product(x, w).sum(), argnums=(0, 1))
    assert flops_of(both, (ROWS, IN), (2, IN, OUT)) == 3 * 2 * ROWS * IN * OUT


def test_a_program_of_each_device_counts_for_all_of_them():
    mesh = Mesh(jax.devices()[:4], ("data",))
    split = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert flops_of(split, (ROWS, IN), (IN, OUT)) == 2 * ROWS * IN * OUT


HLO = """HloModule step, is_scheduled=true

%turn (at: (s32[], f32[8])) -> (s32[], f32[8]) {
  %at = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %gathered = f32[32]{0:T(256)} all-gather(%part), channel_id=1, dimensions={0}
}

%more (at.1: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%aside (x: bf16[4]) -> bf16[2] {
  ROOT %sum = bf16[2]{0} reduce-scatter(%x), dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %loop = (s32[]{:T(128)}, f32[8]{0}) while(%tuple), condition=%more, body=%turn
  %begun = ((bf16[4]), bf16[2], u32[]) async-start(%x), calls=%aside
  %moved = (f32[8]{0}, f32[16]{0}) all-to-all-start(%p), dimensions={0}
  %sums = (f32[3]{0}, f32[5]{0}) all-reduce(%a, %b), to_apply=%add
  ROOT %end = f32[16]{0} all-to-all-done(%moved)
}
"""


def test_collectives_count_the_turns_of_the_loops_around_them():
    found = {(c.kind, c.shape): (c.times, c.bytes) for c in program.collectives(HLO)}
    assert found == {
        ("all-gather", "f32[32]"): (7, 128),
        ("reduce-scatter", "bf16[2]"): (1, 4),
        ("all-to-all", "f32[16]"): (1, 64),
        ("all-reduce", "f32[3]"): (1, 12),
        ("all-reduce", "f32[5]"): (1, 20),
    }


def test_collectives_of_a_compiled_program_are_found():
    mesh = Mesh(jax.devices()[:4], ("data",))
    loop = lambda x: jax.lax.scan(lambda c, _: (jax.lax.psum(c, "data") / 4, None), x, None, length=TURNS)[0]  # noqa: E731
    run = jax.shard_map(loop, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    text = jax.jit(run).lower(jnp.ones((ROWS, IN))).compile().as_text()
    (only,) = program.collectives(text)
    assert (only.kind, only.times, only.bytes) == ("all-reduce", TURNS, ROWS * IN * 4)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("bf16", "2,3", 12), ("pred", "5", 5), ("s4", "8", 4), ("f32", "", 4)]
)
def test_bytes_of_an_array(dtype, shape, size):
    assert program.array_bytes(dtype, shape) == size


def test_arrays_of_tokens_by_slots_are_named_and_weights_are_not():
    text = "a = pred[64,1,64,65536] f(), b = f32[65536,512] g(), c = f32[1000,5120] h(), d = f32[4096,1000] i()"
    assert program.crossed(text, 4096, (65536, 1000), [(1000, 5120)]) == ["pred[64,1,64,65536]", "f32[4096,1000]"]
