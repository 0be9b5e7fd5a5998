"""The decode step of a configuration, compiled without weights, beside the arithmetic of `dsflash describe`.

Only matrix products are counted in a program. What `costs` counts besides is element-wise there: the mixing of residual
copies (a fifth of the hyper-connections) and the sum over index heads (1 of 129 parts of the index scores).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dsflash_jax import cache, costs, decode, layers, model
from dsflash_jax.config import Compute, Config, Quantize
from dsflash_jax.flow import Setup
from dsflash_jax.params import map_weights
from train import program

# Scopes in a program, and the part of `costs` that each belongs to; the first one found in a path counts.
SCOPES = {
    "head": "head", "engram": "engram projections", "compressor": "compressors", "indexer": "indexers",
    "projections": "attention projections", "routed": "routed experts", "shared": "shared experts",
    "router": "routers", "hyper": "hyper-connections", "window": "window attention", "selected": "selected attention",
}  # fmt: skip


def setup_of(c: Config) -> Setup:
    """The model as it is released: every rounding, bfloat16."""
    on = Quantize(kv_fp4=True, index_fp4=True, window_fp8=True, linear_fp8=True)
    return Setup(c, Compute(dtype="bfloat16", remat="none"), quantize=on)


def parts(c: Config) -> dict[str, str]:
    """Pattern of the scopes of each part."""
    scores = {costs.score_part(spec): layers.scope_of(spec) for spec in c.table if spec.selects}
    return {part: rf"\b{scope}\b" for part, scope in (scores | {p: s for s, p in SCOPES.items()}).items()}


def lower(c: Config, context: int) -> jax.stages.Lowered:
    """One token of one row in a cache with room for `context` tokens; nothing is allocated."""
    setup = setup_of(c)
    declared = model.declare(c)
    dtype = lambda d: jnp.float32 if d.float32 else jnp.bfloat16  # noqa: E731
    w = map_weights(lambda d: jax.ShapeDtypeStruct(d.full_shape, dtype(d)), declared)
    held = jax.eval_shape(lambda: cache.empty(setup, 1, context))
    one = jax.ShapeDtypeStruct((1,), jnp.int32)

    def step(w: Any, held: cache.Cache, token: Any, count: Any) -> Any:
        held, y = decode.proceed(setup, w, held, token[:, None], count)
        return held, model.logits(w["head"], y[:, 0])

    return jax.jit(step, donate_argnums=1).lower(w, held, one, one)


def measure(c: Config, context: int, compiled: bool) -> dict[str, Any]:
    """FLOPs of one decoded token by part: as `costs` has them, and in the program; with `compiled`, also in all what
    XLA's CPU compiler made of it."""
    lowered = lower(c, context)
    counted = program.by_part(program.products(lowered.as_text("hlo", debug_info=True)), parts(c))
    made: dict[str, Any] = {
        "context": context,
        "describe": costs.flops(costs.decode(c, context), "alike"),
        "program": counted,
    }
    if compiled:
        # The least effort of the compiler: no product depends on it.
        built = lowered.compile({"xla_backend_optimization_level": 0, **program.KEPT})
        text = built.as_text()
        assert text is not None, "XLA's CPU compiler hands out what it made"
        made["compiled"] = sum(program.products(text).values())
    return made
