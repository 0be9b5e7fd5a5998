"""decode_ahead.py: the decode step for devices that are not here. What needs libtpu runs with `make tpu`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from test_cli import status
from test_speculate import STAGES

from dsflash_jax import layout_sheet
from dsflash_jax.overrides import find, override
from train import ahead, compiler, decode_ahead, program
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


@pytest.mark.parametrize("how", ["blocked", "dense"])
def test_products_that_a_device_makes_of_all_rows_it_is_given_count_as_they_are(how):
    """Sixteen rows of two experts each, at a quarter of the experts on each of four devices."""
    spread = run("layout.data=2", "layout.expert=4", f"compute.experts={how}")
    jaxpr, _ = traced(spread, 16)
    assert decode_ahead.flops(jaxpr, spread) == program.flops(jaxpr)


def test_auto_counts_as_the_grouped_product_that_a_tpu_has():
    spread = run("layout.data=2", "layout.expert=4")
    asked = replace(spread, compute=replace(spread.compute, experts="auto"))
    assert compiler.for_tpu(asked) == spread != asked


def test_the_sheet_of_a_decode_step_lists_all_weights_that_it_is_given(monkeypatch):
    """Those of the draft head, too."""
    c, sheets = find("demo").model, []
    drafts = c.with_modes(
        "Se F2 Xt Ut",
        engram_num_embeddings=c.engram_num_embeddings,
        index_head_dim=32,
        **STAGES | {"dspark_n_routed_experts": 4},
    )
    split = replace(run("layout.expert=4"), model=drafts)
    monkeypatch.setattr(
        ahead.layout_sheet, "show", lambda w, at, _, dtype: sheets.append(layout_sheet.rows(w, at, dtype))
    )
    monkeypatch.setattr(compiler, "compile_step", Mock(side_effect=ValueError("not compiled here")))
    with pytest.raises(ValueError, match="not compiled here"):
        ahead.main(split, "v5p:2x2x1", rows=0)
    _, given = traced(split, 4)
    size = lambda a: prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize  # noqa: E731
    assert sum(row["bytes"] for row in sheets[0]) == sum(map(size, jax.tree.leaves(given["weights"])))


@pytest.mark.parametrize(("name", "rows"), [("v5p", 0), ("v5p:2x2x1", 3)])
def test_what_cannot_be_compiled_is_refused_before_the_sheet_is_shown(name, rows, capsys):
    with pytest.raises(ValueError, match="topology 'v5p' is not|--rows 3 do not divide"):
        ahead.main(run("layout.expert=4"), name, rows=rows)
    assert not capsys.readouterr().out


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
