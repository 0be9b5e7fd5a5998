"""The decode step of a configuration, compiled without weights, beside the arithmetic of `dsflash describe`.

Only matrix products are counted in a program. What `costs` counts besides is element-wise there: the mixing of residual
copies (a fifth of the hyper-connections) and the sum over index heads (1 of 129 parts of the index scores).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from dsflash_jax import cache, costs, decode, describe, layers, model
from dsflash_jax.config import Compute, Config, Quantize
from dsflash_jax.flow import Setup
from dsflash_jax.params import map_weights
from train import program

CAPTION = (
    "describe: the arithmetic. step: matrix products of the program, where the mixing of residual copies and the sum "
    "over index heads are none, and index keys are made every step. compiled: all that XLA made of it for a CPU"
)
PROMPT = 65536  # tokens that prefill is counted for, as far as the model reads
# Scopes in a program, and the part of `costs` that each belongs to; the first one found in a path counts.
SCOPES = {
    "head": "head", "engram": "engram projections", "compressor": "compressors", "indexer": "indexers",
    "projections": "attention projections", "routed": "routed experts", "shared": "shared experts",
    "router": "routers", "hyper": "hyper-connections", "window": "window attention", "selected": "selected attention",
}  # fmt: skip


def setup_of(c: Config) -> Setup:
    """The model as it is released: every rounding if its weights are stored so, bfloat16."""
    on = c.quantization is not None  # widths of other models need not fit the formats
    how = Quantize(kv_fp4=on, index_fp4=on, window_fp8=on, linear_fp8=on)
    return Setup(c, Compute(dtype="bfloat16", remat="none"), quantize=how)


def parts(c: Config) -> dict[str, str]:
    """Pattern of the scopes of each part."""
    scores = {costs.score_part(spec): layers.scope_of(spec) for spec in c.table if spec.selects}
    return {part: rf"\b{scope}\b" for part, scope in (scores | {p: s for s, p in SCOPES.items()}).items()}


def lower(c: Config, context: int) -> jax.stages.Lowered:
    """One token of one row in a cache with room for `context` tokens; nothing is allocated."""
    setup = setup_of(c)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    return jax.jit(partial(decode.step, setup), donate_argnums=1).lower(*_shapes(setup, context), one, one)


def lower_prefill(c: Config, prompt: int, how: str) -> jax.stages.Lowered:
    """A prompt of one row in one piece, "full" or "replay", and the logits behind it."""
    setup = setup_of(c)
    tokens, one = jax.ShapeDtypeStruct((1, prompt), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def run(w: Any, held: cache.Cache, tokens: Any, count: Any) -> Any:
        if how == "full":
            held, y = decode.proceed(setup, w, held, tokens, count)
        else:
            held, end = decode.encode(setup, w, held, tokens, count, decode.no_end(setup, 1))
            held, y = decode.replay(setup, w, held, end)
        return held, model.logits(w["head"], decode.newest(y, jnp.minimum(count, y.shape[1])))

    return jax.jit(run, donate_argnums=1).lower(*_shapes(setup, prompt), tokens, one)


def _shapes(setup: Setup, tokens: int) -> tuple[Any, Any]:
    """Weights and an empty cache of one row."""
    dtype = lambda d: jnp.float32 if d.float32 else jnp.bfloat16  # noqa: E731
    w = map_weights(lambda d: jax.ShapeDtypeStruct(d.full_shape, dtype(d)), model.declare(setup.config))
    return w, jax.eval_shape(lambda: cache.empty(setup, 1, tokens))


def products(lowered: jax.stages.Lowered, c: Config) -> dict[str, int]:
    """FLOPs of a program by part."""
    return program.by_part(program.products(lowered.as_text("hlo", debug_info=True)), parts(c))


def measure(c: Config, context: int) -> dict[str, Any]:
    """FLOPs of one decoded token by part, as `costs` has them and in the program; what the report's way of counting
    makes of each; and in all what XLA's CPU compiler made of the program."""
    lowered = lower(c, context)
    # The least effort of the compiler: no product depends on it.
    text = lowered.compile({"xla_backend_optimization_level": "0", **program.KEPT}).as_text()
    assert text is not None, "XLA's CPU compiler hands out what it made"
    alike, report = (costs.flops(costs.decode(c, context), way) for way in ("alike", "fp8"))
    return {
        "context": context,
        "describe": alike,
        "weight": {part: report[part] / alike[part] for part in alike},
        "program": products(lowered, c),
        "compiled": sum(program.products(text).values()),
    }


def main(c: Config) -> dict[str, Any]:
    """Print and return the decode step at the shortest and the longest context, and what replay saves of a prompt."""
    contexts, log = describe.contexts(c), Console(stderr=True)
    log.print("compiling the decode step at its shortest and its longest context: one to five minutes")
    steps = [measure(c, n) for n in sorted({contexts[0], contexts[-1]})]
    made: dict[str, Any] = {"steps": steps, "ratio": _ratio(steps)}
    console = Console()
    console.print(_table(steps))
    for name, share in made["ratio"].items():
        console.print(f"longest over shortest context, {name}: {share:.3f}", highlight=False)
    if costs.boundary(c) is not None:
        prompt = min(PROMPT, c.max_position_embeddings)
        full, replay = (sum(products(lower_prefill(c, prompt, how), c).values()) for how in ("full", "replay"))
        made["prefill"] = {"prompt": prompt, "full": full, "replay": replay, "ratio": replay / full}
        console.print(f"prefill of {prompt:,} tokens, replay over full: {replay / full:.3f}", highlight=False)
    return made


def _ratio(steps: list[dict[str, Any]]) -> dict[str, float]:
    """The last step over the first one, by each way of counting."""
    first, last = steps[0], steps[-1]
    out = {key: sum(last[key].values()) / sum(first[key].values()) for key in ("describe", "program")}
    out["compiled"] = last["compiled"] / first["compiled"]
    for key in ("describe", "program"):
        ways = [sum(n * at["weight"].get(part, 1) for part, n in at[key].items()) for at in (first, last)]
        out[f"{key}, FP8 units"] = ways[1] / ways[0]
    return out


def _table(steps: list[dict[str, Any]]) -> Table:
    """Parts in rows; for each context what `describe` says and what the program has."""
    table = Table(title="One decoded token, FLOPs by part", caption=CAPTION)
    table.add_column("part")
    for at in steps:
        table.add_column(f"{at['context']:,}: describe", justify="right")
        table.add_column("step", justify="right")
    names = dict.fromkeys(part for at in steps for part in (*at["describe"], *at["program"]))
    for part in names:
        cells = [describe.amount(at[key].get(part, 0)) for at in steps for key in ("describe", "program")]
        table.add_row(part, *cells)
    table.add_row("total", *[describe.amount(sum(at[key].values())) for at in steps for key in ("describe", "program")])
    cells = [cell for at in steps for cell in ("", describe.amount(at["compiled"]))]
    table.add_row("compiled for a CPU", *cells)
    return table
