"""decode_ahead.py: the decode step for devices that are not here. What needs libtpu runs with `make tpu`."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from test_cli import status

from dsflash_jax.overrides import find, override
from train import ahead, decode_ahead
from train.config import Run

PACKED = ("quantize.kv_fp4=true", "quantize.index_fp4=true", "quantize.window_fp8=true", "compute.dtype=bfloat16")


def run(*changes: str) -> Run:
    small = ("model.modes=Se F2 X", "model.index_head_dim=32", "compute.experts=ragged", "data.seq_len=512", *PACKED)
    return override(find("demo"), [*small, *changes])


def traced(run: Run, rows: int) -> tuple[Any, dict[str, Any]]:
    step, given = decode_ahead.step(run, rows, jax.devices()[: run.layout.devices])
    return step.trace(*given.values()).jaxpr, given


def test_each_row_counts_the_products_of_one_on_one_device():
    """Though all rows are gathered at all experts."""
    one, split = run(), run("layout.data=2", "layout.expert=4")
    alone, spread = (decode_ahead.flops(traced(r, n)[0], r) for r, n in ((one, 1), (split, 16)))
    assert spread == 16 * alone > 0


def test_weights_lie_in_the_compute_dtype_where_the_layout_stores_them_and_the_cache_is_packed():
    _, given = traced(run("layout.expert=4", f"layout.whole={10**10}"), 4)
    layer = given["weights"]["layers"]["layer0"]
    assert (given["weights"]["head"].dtype, layer["attn_norm"].dtype) == (jnp.bfloat16, jnp.float32)
    split = lambda a: prod(a.shape) // prod(a.sharding.shard_shape(a.shape))  # noqa: E731
    parts = [split(a) for a in (layer["ffn"]["experts"]["w1"], layer["engram"]["embed"], layer["attn"]["wq_b"])]
    assert parts == [4, 4, 1]
    assert all(a.dtype == jnp.uint8 and split(a) == 4 for a in jax.tree.leaves(given["cache"].kv))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--decode", "--rows", "6", "--mesh", "expert=4"), "--rows 6 do not divide over expert = 4 devices"),
        (("--decode", "--search"), "--search lays out training steps: with --decode give a topology and a layout"),
        (("--rows", "4"), "--rows are those of a decode step: add --decode"),
    ],
)
def test_wrong_use_is_status_2_with_the_reason(words, message, capsys):
    assert status(["compile", "demo", "--topology", "v5p:2x2x1", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.tpu
def test_a_tiny_decode_step_compiles_for_a_tpu_and_a_layout_that_splits_tokens_is_refused():
    pytest.importorskip("libtpu")
    split = run("layout.expert=4", "layout.whole=0", "data.seq_len=8192", "model.max_position_embeddings=8192")
    report = ahead.compile_step(split, "v5p:2x2x1", code=False, rows=0)
    assert report.fits and not report.crossed and (report.rows, report.tokens) == (4, 4)
    assert {"all-gather", "all-reduce"} <= {c.kind for c in report.collectives}
    _, given = traced(split, 4)
    shards = {k: sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(v))
              for k, v in given.items()}  # fmt: skip
    assert report.held == shards
    with pytest.raises(ValueError, match="decoding keeps a row on one device, but context splits its tokens"):
        ahead.compile_step(run("layout.context=4"), "v5p:2x2x1", code=False, rows=0)
