"""program.py: FLOPs of traced, lowered and compiled programs; collectives and arrays of compiled ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dsflash_jax import model, moe
from dsflash_jax.flow import Setup
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


# Products by scope


def counts(function, *shapes, dtype=jnp.float32, parts=None, **options):
    """FLOPs by part, counted in the traced, the lowered and the compiled program."""
    traced = jax.jit(function).trace(*(jax.ShapeDtypeStruct(s, dtype) for s in shapes))
    lowered = traced.lower()
    compiled = lowered.compile(compiler_options=options)
    found = (
        program.flops_by_scope(traced.jaxpr),
        program.products(lowered.as_text("hlo", debug_info=True)),
        program.products(compiled.as_text()),
    )
    return [program.by_part(f, parts or {}) for f in found]


def scoped(name, function):
    """The function inside a named scope."""

    def inside(*arguments):
        with jax.named_scope(name):
            return function(*arguments)

    return inside


def nested(x, w):
    """A product in a loop of 5 turns and a conditional, both in a loop of 3 turns, and a function called twice."""
    inner = lambda x, _: (scoped("inner", lambda x: jnp.tanh(x @ w))(x), None)  # noqa: E731
    longer, shorter = scoped("longer", lambda x: jnp.tanh(x @ w) @ w), scoped("shorter", lambda x: x @ w)

    def outer(x, _):
        x, _ = scoped("loop", lambda x: jax.lax.scan(inner, x, None, length=5))(x)
        return jax.lax.cond(x.sum() > 0, longer, shorter, x), None

    x, _ = jax.lax.scan(outer, x, None, length=3)
    again = jax.jit(scoped("again", lambda x: jnp.cos(x @ w)))
    return scoped("second", again)(scoped("first", again)(x)) @ w


NESTED = {
    "inner": "loop/(.*/)?inner", "shorter": "shorter", "longer": "longer", "first": "first/(.*/)?again",
    "second": "second/(.*/)?again",
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, ROWS])
def test_products_in_loops_branches_and_functions_count_alike_in_all_three_programs(rows):
    one = 2 * rows * IN * IN
    want = {"inner": 15 * one, "shorter": 0, "longer": 6 * one, "first": one, "second": one, "other": one}
    assert counts(nested, (rows, IN), (IN, IN), parts=NESTED) == [want] * 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("spec", "left", "right", "products"),
    [
        ("ti,io->to", (1, IN), (IN, OUT), IN * OUT),  # one token
        ("bti,iho->btho", (2, 3, IN), (IN, 4, OUT), 6 * IN * 4 * OUT),
        ("ei,eio->eo", (6, IN), (6, IN, OUT), 6 * IN * OUT),  # each row its own matrix
        ("bthi,bki->bthk", (2, 1, 4, IN), (2, 5, IN), 2 * 4 * IN * 5),
        ("tki,ti->tk", (3, 5, IN), (3, IN), 15 * IN),
        ("bthi,bki->bthk", (1, ROWS, 4, IN), (1, 12, IN), ROWS * 4 * IN * 12),  # compiled into a call of a library
    ],
)
def test_a_product_counts_alike_in_all_three_programs(spec, left, right, products, dtype):
    function = lambda x, w: jnp.einsum(spec, x, w, preferred_element_type=jnp.float32)  # noqa: E731
    parts = {"here": r"\bhere\b"}
    found = counts(scoped("here", function), left, right, dtype=dtype, parts=parts)
    assert found == [{"here": 2 * products, "other": 0}] * 3


@pytest.mark.parametrize(("spec", "left", "right"), [("ti,i->t", (1, IN), (IN,)), ("ti,io->to", (ROWS, 1), (1, OUT))])
def test_a_compiled_program_lacks_products_of_vectors_unless_it_was_told_to_keep_them(spec, left, right):
    function = lambda x, w: jnp.einsum(spec, x, w)  # noqa: E731
    want = {"other": 2 * max(IN, ROWS * OUT) if left[1] == 1 else 2 * IN}
    assert counts(function, left, right) == [want, want, {"other": 0}]
    assert counts(function, left, right, **program.KEPT) == [want] * 3


def test_a_grouped_product_counts_its_rows_once_where_the_platform_has_one_and_all_groups_elsewhere():
    sizes = jnp.asarray([3, 5, 0], jnp.int32)
    function = scoped("here", lambda x, w: moe.ragged_dot(x, w, sizes))
    parts, rows = {"here": "here"}, 2 * ROWS * IN * OUT
    once, *each = counts(function, (ROWS, IN), (3, IN, OUT), parts=parts)
    assert once == {"here": rows, "other": 0} and each == [{"here": 3 * rows, "other": 0}] * 2
    shapes = (jax.ShapeDtypeStruct((ROWS, IN), jnp.float32), jax.ShapeDtypeStruct((3, IN, OUT), jnp.float32))
    tpu = jax.jit(function).trace(*shapes).lower(lowering_platforms=("tpu",))
    assert program.by_part(program.products(tpu.as_text("hlo", debug_info=True)), parts) == once


def test_a_convolution_counts_its_kernel_at_every_place():
    function = lambda x, w: jax.lax.conv_general_dilated(x, w, (2,), [(0, 0)])  # noqa: E731
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((2, IN, 9), (OUT, IN, 3))]
    text = jax.jit(function).lower(*shapes).as_text("hlo", debug_info=True)
    assert program.products(text).total() == 2 * 2 * OUT * 4 * 3 * IN  # 4 places


def test_a_loop_of_unknown_length_has_as_many_turns_as_it_is_given():
    function = lambda x, w, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)  # noqa: E731
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((ROWS, IN), (IN, IN))]
    lowered = jax.jit(function).lower(*shapes, jax.ShapeDtypeStruct((), jnp.int32))
    one = 2 * ROWS * IN * IN
    for text in (lowered.as_text("hlo", debug_info=True), lowered.compile().as_text()):
        assert program.products(text).total() == one
        assert program.products(text, turns=7).total() == 7 * one


def test_the_first_pattern_found_takes_a_scope():
    counted = {"jit(f)/attn/window": 1, "jit(f)/attn": 2, "jit(f)/ffn/window": 4, "jit(f)/ffn": 8, "": 16}
    parts = {"window": r"attn/window", "attention": r"\battn\b", "nothing": "window attn"}
    assert program.by_part(counted, parts) == {"window": 1, "attention": 2, "nothing": 0, "other": 28}


def test_a_whole_model_counts_alike_traced_and_lowered():
    c, batch = tiny.T, tiny.batch(tiny.T, np.zeros((1, 8), np.int32))
    traced = jax.jit(lambda w, b: model.forward(Setup(c, tiny.STRICT, None), w, b)[0]).trace(tiny.weights(c), batch)
    lowered = program.products(traced.lower().as_text("hlo", debug_info=True))
    parts = {"attention": r"\battn\b", "experts": r"\bffn\b"}
    found = program.by_part(lowered, parts)
    assert found == program.by_part(program.flops_by_scope(traced.jaxpr), parts)
    assert found["attention"] and found["experts"] and not found["other"]
