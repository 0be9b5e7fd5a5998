"""What stays float32 in a bfloat16 model, read off its traced program: a CPU would not show the difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import compressor, hyper, model, moe
from dsflash_jax.flow import Setup
from dsflash_jax.ops import HIGHEST

C = replace(tiny.T, head_dim=12).with_modes("F2")
D = C.hidden_size
LOW = jnp.bfloat16


def equations(program: Any) -> Iterator[Any]:
    """Every equation of a traced program, those of its inner programs included."""
    for equation in getattr(program, "jaxpr", program).eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)


def products(program: Any) -> list[Any]:
    return [e for e in equations(program) if e.primitive.name == "dot_general"]


def is_exact(product: Any) -> bool:
    """Whether a product is of float32 operands at the highest precision."""
    types = {v.aval.dtype for v in product.invars}
    return types == {jnp.dtype("float32")} and product.params["precision"] == (HIGHEST, HIGHEST)


def route(w: Any, x: jax.Array) -> Any:
    return moe.route(w["ffn"]["gate"], x.reshape(-1, D), None, C).weights


def mix(w: Any, x: jax.Array) -> Any:
    return jax.tree.leaves(hyper.mix(w, "attn", jnp.repeat(x[:, :, None], C.hc_mult, axis=2), C))


def pool(w: Any, x: jax.Array) -> Any:
    places = jnp.ones(x.shape[:2], jnp.int32), jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return compressor.compress(w["attn"]["compressor"], x, compressor.slots(*places, 2), 2, C.rms_norm_eps)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("function", "count"), [(route, 1), (mix, 1), (pool, 2)])
def test_sensitive_projections_and_their_gradients_are_exact_products(function: Any, count: int, low: bool) -> None:
    dtype = LOW if low else jnp.float32
    w = jax.tree.map(lambda a: a.astype(dtype), tiny.weights(C)["layers"]["layer0"])
    x = jnp.ones((1, 6, D), dtype)
    forward = products(jax.make_jaxpr(function)(w, x))
    assert len(forward) == count and all(map(is_exact, forward))
    total = lambda w, x: sum(jnp.sum(a.astype(jnp.float32)) for a in jax.tree.leaves(function(w, x)))  # noqa: E731
    both = products(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(w, x))
    assert len(both) == 3 * count and all(map(is_exact, both))  # forward, and the gradients of both operands


@pytest.fixture(scope="module")
def low_model() -> list[Any]:
    """The equations of a bfloat16 model whose weights are bfloat16 already, so that no cast to it hides one."""
    w = jax.tree.map(lambda a: a.astype(LOW), tiny.weights(C))
    setup = Setup(C, replace(tiny.STRICT, dtype="bfloat16"))
    return list(
        equations(jax.make_jaxpr(lambda w, b: model.forward(setup, w, b)[0])(w, tiny.batch(C, np.zeros((1, 6)))))
    )


def test_a_bfloat16_model_keeps_router_hyper_connections_and_pooling_exact(low_model: list[Any]) -> None:
    found = [e for e in low_model if e.primitive.name == "dot_general"]
    exact = Counter(e.invars[1].aval.shape for e in found if is_exact(e))
    mixing = (C.hc_mult * D, 2 * C.hc_mult + C.hc_mult**2)
    assert exact == {(D, C.n_routed_experts): 1, mixing: 2, (D, C.head_dim): 2}  # compressor: keys and gate
    rest = [e for e in found if not is_exact(e)]
    assert any(e.invars[1].aval.shape == (D, C.head_dim) for e in rest)  # the layer's own keys
    assert all(v.aval.dtype == LOW for e in rest for v in e.invars)


def test_rotation_tables_of_a_bfloat16_model_are_float32(low_model: list[Any]) -> None:
    tables = [e.outvars[0].aval.dtype for e in low_model if e.primitive.name in ("cos", "sin")]
    assert len(tables) >= 6 and set(tables) == {jnp.dtype("float32")}  # window, compressed, slots
