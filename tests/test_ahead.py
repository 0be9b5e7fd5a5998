"""ahead.py: programs compiled for TPUs that are not here. What needs libtpu runs with `make slow`."""

from __future__ import annotations

import dataclasses
from math import prod

import jax
import pytest
import tiny_run

from dsflash_jax import cli, layer_sheet, modes
from dsflash_jax.flow import Batch
from dsflash_jax.overrides import find, override
from train import ahead, compiler, main, placement
from train.config import Run

GIB = ahead.GIB
REPORT = ahead.Report(
    topology="v5p:2x2x1", devices=4, cores=1, layout={"whole": 9}, decodes=False, parts=2,
    held={}, rows=8, seq_len=64, hbm=10 * GIB, arguments=8 * GIB,
    temporaries=4 * GIB, output=0, program=0, total=12 * GIB, flops=1, tokens=512, stablehlo_lines=1, code=True,
    lower_seconds=1.0, compile_seconds=1.0, collectives=(), largest={}, crossed=(), versions="",
)  # fmt: skip


def laid(run: Run, *changes: str) -> Run:
    return override(run, ["layout.whole=0", *changes])


@pytest.mark.parametrize(
    ("name", "devices", "rows", "context", "tokens"),
    [
        ("pretrain_64k", 256, 8, 1, 2048),
        ("pretrain_64k", 128, 4, 1, 2048),
        ("pretrain_64k", 1024, 32, 1, 2048),
        ("extend_1m", 256, 1, 8, 4096),
        ("extend_1m", 1024, 2, 16, 2048),
    ],
)
def test_a_run_spreads_so_that_a_part_gives_a_device_about_2048_tokens(name, devices, rows, context, tokens):
    run = ahead.spread(find(name), devices)
    at, batch = run.layout, run.data.batch_size
    assert (at.fsdp, at.context, at.devices) == (rows, context, devices)
    assert batch // run.accumulate * run.data.seq_len // devices == tokens


def test_devices_that_do_not_divide_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match="48 devices do not divide by expert x tensor = 32"):
        ahead.spread(find("pretrain_64k"), 48)


def test_an_unknown_topology_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="topology 'v9:2x2' is not one of v5e:16x16, v5p:8x16x16"):
        compiler.parse("v9:2x2")
    with pytest.raises(ValueError, match="topology 'v5p' is not one of"):
        compiler.parse("v5p")


def test_without_libtpu_the_message_names_the_extra(monkeypatch):
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "dsflash_jax\[aot\]"'):
        ahead.compile_step(find("pretrain_64k"), "v5p:4x8x8")


def test_advice_names_what_takes_the_room():
    assert "2.0 GiB too much, most of it state: take more devices" in REPORT.advice()
    other = dataclasses.replace(REPORT, arguments=2 * GIB, temporaries=10 * GIB)
    assert "most of it temporaries: raise accumulate=2" in other.advice()
    assert "fewer --rows, a shorter --seq-len, or split smaller" in dataclasses.replace(REPORT, decodes=True).advice()
    assert dataclasses.replace(REPORT, total=10 * GIB).advice() == ""


def test_a_search_skips_what_the_state_alone_fills_and_ends_with_what_fits(monkeypatch):
    """The released state is 5,575 GiB; of the rest every size is too small but the last."""
    tried = []

    def compile_step(run: Run, name: str, code: bool) -> ahead.Report:
        tried.append(name)
        return dataclasses.replace(REPORT, topology=name, total=(12 if name != "v5p:4x8x8" else 9) * GIB)

    monkeypatch.setattr(ahead, "compile_step", compile_step)
    found = list(ahead.search(find("pretrain_64k"), "v5p"))
    assert tried == ["v5p:4x4x8", "v5p:4x8x8"]
    names = [name for _, name, _ in found]
    assert names == [f"v5p:{size}" for size in compiler.SIZES["v5p"][: len(names)]]
    assert found[4][2] == "the state alone takes 87.1 GiB of 95.74 a device"
    assert found[-1][2].fits


def test_a_search_among_unknown_kinds_is_refused():
    with pytest.raises(ValueError, match="--search takes a kind of TPU, one of v5e, v5p, v6e, tpu7x, got 'v5p:4x4x4'"):
        list(ahead.search(find("pretrain_64k"), "v5p:4x4x4"))


def test_a_search_goes_on_behind_a_size_that_does_not_suit_the_run(monkeypatch):
    def compile_step(run: Run, name: str, code: bool) -> ahead.Report:
        if name == "v5e:2x2":
            raise ValueError("no axis divides")
        return dataclasses.replace(REPORT, topology=name, total=GIB)

    monkeypatch.setattr(ahead, "compile_step", compile_step)
    (_, first, why), (_, second, report) = ahead.search(find("demo"), "v5e")
    assert (first, why, second) == ("v5e:2x2", "no axis divides", "v5e:2x4")
    assert report.fits


def test_options_stand_in_place_of_the_fields_that_they_name(monkeypatch):
    got = []
    monkeypatch.setattr(ahead, "main", lambda run, *_: got.append(run) or {"fits": True})
    words = ["compile", "demo", "--topology", "v5p:2x2x1", "--seq-len", "64", "--mesh", "fsdp=4"]
    assert cli.main([*words, "data.seq_len=128", "layout.fsdp=2", "layout.data=2", "layout.whole=0"]) == 0
    (run,) = got
    assert (run.data.seq_len, run.layout.fsdp, run.layout.data, run.layout.whole) == (64, 4, 1, 0)


@pytest.mark.parametrize("layout", [(), ("layout.fsdp=2",)])
@pytest.mark.parametrize("name", [pytest.param("demo", marks=pytest.mark.slow), "digits"])
def test_the_abstract_batch_is_the_one_that_training_takes_on_one_device_and_more(name, layout):
    """With n-gram rows, and with images."""
    run = override(find(name), ["accumulate=2", "data.prefetch=0", "data.holdout=0", *layout])
    place = placement.place(run, jax.devices()[: run.layout.devices])
    batches, _ = main._read(run, place)
    made = place.put(Batch(**next(batches)))
    batches.close()
    same = jax.tree.map(
        lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding),
        compiler.abstract_batch(run, place), made,
    )  # fmt: skip
    assert all(jax.tree.leaves(same))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("ahead")
    corpus = tiny_run.write_corpus(folder / "corpus")
    return tiny_run.tiny(corpus, folder / "run", "compute.dtype=bfloat16", "data.batch_size=8", "accumulate=2")


@pytest.mark.slow
@pytest.mark.tpu
def test_a_tiny_step_compiles_for_a_tpu_and_its_arguments_are_the_shards(run):
    pytest.importorskip("libtpu")
    run = laid(run, "layout.expert=2", "layout.context=2", "layout.capacity=4.0")
    report = ahead.compile_step(run, "v5p:2x2x1")
    place = placement.place(run, compiler.topology("v5p:2x2x1")[1])
    arrays = jax.tree.leaves((place.like(run), compiler.abstract_batch(run, place)))
    shards = sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
    # A TPU stores rows of 128 lanes, so that small arrays take more than their entries.
    assert report.fits and shards <= report.arguments < 500 * shards
    kinds = {c.kind for c in report.collectives}
    assert {"all-gather", "all-to-all"} <= kinds
    assert report.flops > 0 and report.stablehlo_lines > 1000


WIDE = ("model.modes=S Se 2(F2 U) F2e U F1 U 2(X U)", "layout.fsdp=2", "accumulate=768")


@pytest.mark.slow
@pytest.mark.tpu
def test_the_released_width_with_fewer_repeats_fits_64_chips_and_crosses_nothing():
    """All layer bodies of the released plan, each once or twice."""
    pytest.importorskip("libtpu")
    run = override(find("pretrain_64k"), WIDE)
    assert layer_sheet.bodies(modes.plan(run.model.table)) == layer_sheet.bodies(
        modes.plan(find("pretrain_64k").model.table)
    )
    report = ahead.compile_step(run, "v5p:4x4x4", code=False)
    assert report.fits and not report.crossed
    # Of the whole step, products are at least the 6 FLOPs a token of each active weight.
    assert report.flops > 6 * 2e9 * report.tokens


@pytest.mark.slow
@pytest.mark.tpu
def test_a_step_that_does_not_fit_is_reported_with_what_it_would_take(run):
    pytest.importorskip("libtpu")
    huge = laid(
        run, "layout.expert=4", "data.seq_len=4096", "data.batch_size=65536", "accumulate=1", "compute.remat=none"
    )
    report = ahead.compile_step(huge, "v5e:2x2")
    assert not report.fits and report.total > report.hbm
    assert "too much, most of it temporaries: raise accumulate=1" in report.advice()
