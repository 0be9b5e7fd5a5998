"""modes.py: legal tables, their plan of scans, and mode strings."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.released import config as released
from dsflash_jax import modes, primes
from dsflash_jax.config import Config
from dsflash_jax.layer_sheet import bodies, plan_text
from dsflash_jax.modes import LayerSpec, Mode, Node, flatten, parse, places, plan, text

TINY = Config.from_json(Path(__file__).parent / "golden" / "tiny_text" / "config.json")
PRIMES = tuple(primes.rows(table) for table in primes.tables(80, 2, 1, 2))  # a table of one hash head each
Read = tuple[int | None, int | None, int | None]  # layer whose KV, selection and candidates a layer uses


@st.composite
def tables(draw: st.DrawFn) -> tuple[LayerSpec, ...]:
    """A legal table with repeated motifs: all modes, ratios 1, 2 and 4, windows anywhere, every flag."""
    motif = st.lists(st.sampled_from("SFXUUU"), min_size=1, max_size=4)
    letters = [x for letters, times in draw(st.lists(st.tuples(motif, st.integers(1, 4)), min_size=1, max_size=5))
               for x in letters * times]  # fmt: skip
    rare = st.sampled_from([False] * 9 + [True])
    publisher = draw(st.none() | st.integers(0, len(letters) - 1))
    out: list[LayerSpec] = []
    ratio, tables, published = 0, 0, False
    for i, letter in enumerate(letters):
        mode = Mode(letter)
        if ratio == 0 and mode in (Mode.REINDEX, Mode.REUSE):
            mode = draw(st.sampled_from([Mode.FULL, Mode.WINDOW]))
        if mode is Mode.FULL and not published:  # candidate blocks count slots of one ratio
            ratio = draw(st.sampled_from([1, 2, 2, 2, 4]))
        selects = mode in (Mode.FULL, Mode.REINDEX)
        engram, publishes = draw(rare), selects and i == publisher
        out.append(
            LayerSpec(mode, 0 if mode is Mode.WINDOW else ratio, tables if engram else None, publishes,
                      published and selects, draw(rare), first=i)
        )  # fmt: skip
        tables += engram
        published |= publishes
    return tuple(out)


def ids(table: Sequence[LayerSpec]) -> list[int]:
    return [spec.first for spec in table]


def run(layers: Sequence[LayerSpec]) -> list[Read]:
    """What each layer of a plain loop reads."""
    return run_plan(layers, {}, Counter())


def run_plan(nodes: Sequence[Node], seen: dict[str, int], count: Counter[str]) -> list[Read]:
    """What each layer reads when every copy of a repeat starts from the values around it and none of its own leave."""
    seen, out = dict(seen), []
    for node in nodes:
        if not isinstance(node, LayerSpec):
            for _ in range(node.times):
                out += run_plan(node.body, seen, count)
            continue
        i = count["layer"]
        count["layer"] += 1
        candidates = seen["candidates"] if node.restricted else None
        if node.mode is Mode.FULL:
            seen["kv"] = i
        if node.selects:
            seen["selection"] = i
        if node.publishes:
            seen["candidates"] = i
        window = node.mode is Mode.WINDOW
        out.append((None if window else seen["kv"], None if window else seen["selection"], candidates))
    return out


@given(tables())
def test_flatten_undoes_plan(table: tuple[LayerSpec, ...]) -> None:
    flat = flatten(plan(table))
    assert flat == table
    assert ids(flat) == ids(table)


@given(tables())
def test_no_shared_value_crosses_the_border_of_a_repeat(table: tuple[LayerSpec, ...]) -> None:
    assert run_plan(plan(table), {}, Counter()) == run(table)


@given(tables())
def test_a_plan_never_writes_a_layer_out_twice_in_a_row(table: tuple[LayerSpec, ...]) -> None:
    def check(nodes: Sequence[Node]) -> None:
        for node, following in zip(nodes, [*nodes[1:], None], strict=True):
            if isinstance(node, LayerSpec):
                assert node != following or node.selects  # equal selecting layers stand in bodies of their own
            else:
                assert node.times >= 2
                check(node.body)

    check(plan(table))


@given(tables())
def test_mode_string_and_config_fields_give_the_table_back(table: tuple[LayerSpec, ...]) -> None:
    assert parse(text(table)) == table
    rows = PRIMES[: sum(s.engram is not None for s in table)]
    config = TINY.with_modes(text(table), engram_num_embeddings=rows, engram_max_ngram_size=2, engram_n_heads=1,
                             engram_head_dim=8, engram_vocab_size=2, engram_compressed_vocab_size=96)  # fmt: skip
    assert config.table == table
    assert ids(config.table) == ids(table)
    assert config.modes == text(table)


@given(tables())
def test_places_name_the_weights_of_every_layer_once(table: tuple[LayerSpec, ...]) -> None:
    nodes = plan(table)
    found = places(nodes)
    assert len(set(found)) == len(found) == len(table)
    for i, place in enumerate(found):
        level, copies = nodes, list(place.index)
        for part in place.path:
            node = {modes.name(n): n for n in level}[part]
            if not isinstance(node, LayerSpec):
                assert 0 <= copies.pop(0) < node.times
                level = node.body
        assert node == table[i]
        assert not copies
        if not any(place.index):
            assert node.first == i


@settings(max_examples=30)
@given(tables())
def test_names_of_siblings_differ(table: tuple[LayerSpec, ...]) -> None:
    def check(nodes: Sequence[Node]) -> None:
        names = [modes.name(n) for n in nodes]
        assert len(set(names)) == len(names)
        for node in nodes:
            if not isinstance(node, LayerSpec):
                check(node.body)

    check(plan(table))


def test_released_table_has_the_stated_plan() -> None:
    assert plan_text(plan(released.table)) == (
        "window, window+engram, 2×[full, 5×reuse], full+engram, 5×reuse, full+publish, 3×reuse, "
        "3×[reindex, 3×reuse], reindex, 3×reuse+tap"
    )
    assert [s.ratio for s in released.table] == [0] * 2 + [2] * 18 + [1] * 20
    assert [i for i, s in enumerate(released.table) if s.restricted] == [24, 28, 32, 36]


def test_traced_bodies_do_not_grow_with_depth() -> None:
    pattern = "S Se {}(F2 5U) F2e 5U F1p 3U {}(X 3U) X 3Ut"
    deep, shallow = parse(pattern.format(4, 9)), parse(pattern.format(2, 3))
    assert shallow == released.table
    assert len(deep) == 76
    assert bodies(plan(deep)) == bodies(plan(shallow)) == 12


def test_a_period_longer_than_one_group_folds() -> None:
    assert plan_text(plan(parse("3(F2 2U F1 U)"))) == "3×[full, 2×reuse, full, reuse]"
    assert plan_text(plan(parse("F1 U 4(X U S X S)"))) == "full, reuse, 4×[reindex, reuse, window, reindex, window]"


def test_counts_and_groups_expand() -> None:
    assert text(parse("2S 2(F2 3U) F1p 2(X 2(U S))")) == "S S F2 U U U F2 U U U F1p X U S U S X U S U S"
    assert parse(" F2  U\nU ") == parse("F2 2U")


@pytest.mark.parametrize(
    ("string", "message"),
    [
        ("", "empty"),
        ("S Q2", "cannot read 'Q2'"),
        ("S,S", "cannot read ',S'"),
        ("SS", "cannot read 'SS'"),
        ("F2q", "cannot read 'F2q'"),
        ("F U", "'F': F needs a ratio"),
        ("F2 U2", "'U2': F needs a ratio .*the other letters take none"),
        ("F0 U", "'F0': a Full layer compresses at least 1"),
        ("Fe2", "cannot read 'Fe2'"),
        ("F1 Uee", "'Uee' repeats a flag"),
        ("F1 Up", "'Up': only F and X select"),
        ("F1p Xp", "layer 1 publishes candidates, but an earlier layer does already"),
        ("S U", r"layer 1 \(U\) has no F before it"),
        ("X", r"layer 0 \(X\) has no F before it"),
        ("2(F1 U", r"\( without \)"),
        ("F1 U)", r"\) without \("),
        ("F1 2()", "empty group"),
        ("S 0F1", "'0F1' .*count 0"),
        ("S 0(F1 U)", r"'0\(' .*count 0"),
    ],
)
def test_bad_strings_are_refused_with_the_item(string: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(string)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": (0, 0, 2, 2, 2, 1, 1)}, "7 entries for num_hidden_layers=8"),
        ({"compress_ratios": (0, -1, 2, 2, 2, 1, 1, 1)}, r"layer 1: compress_ratios\[1\]=-1 is negative"),
        (
            {"num_nextn_predict_layers": 1, "compress_ratios": (0, 0, 2, 2, 2, 1, 1, 1, 1)},
            r"draft stage 0 is window-only: set compress_ratios\[8\]=0",
        ),
        ({"kv_source_layer_ids": (5, 2)}, r"kv_source_layer_ids=\[5, 2\] must be ascending"),
        ({"index_source_layer_ids": (2, 5, 5, 6)}, "index_source_layer_ids=.* without repeats"),
        ({"kv_source_layer_ids": (2, 8)}, "kv_source_layer_ids names layer 8, but the layers are 0..7"),
        ({"index_source_layer_ids": (-1, 2, 5)}, "index_source_layer_ids names layer -1"),
        ({"engram_layer_ids": (9,)}, "engram_layer_ids names layer 9"),
        ({"dspark_target_layer_ids": (8,)}, "dspark_target_layer_ids names layer 8"),
        ({"kv_source_layer_ids": (1, 2, 5)}, "layer 1 is in kv_source_layer_ids but window-only"),
        ({"index_source_layer_ids": (5, 6)}, "layer 2 makes KV but selects nothing: add 2 to index_source_layer_ids"),
        ({"index_source_layer_ids": (1, 2, 5)}, "layer 1 is in index_source_layer_ids but window-only"),
        ({"compress_ratios": (0, 2, 2, 2, 2, 1, 1, 1)}, r"layer 1 reads ratio-2 KV but no earlier layer makes one.*"
         r"set compress_ratios\[1\]=0"),
        ({"compress_ratios": (0, 0, 2, 2, 1, 1, 1, 1)}, r"layer 4 has ratio 1 but reads the KV of layer 2, ratio 2"),
        ({"candidate_source_layer_id": 7}, "candidate_source_layer_id=7 selects nothing: add 7"),
        ({"candidate_source_layer_id": -2}, "candidate_source_layer_id=-2 selects nothing"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks and candidate_block_size must be at least 1"),
        ({"candidate_block_size": 0}, "candidate_topk_blocks and candidate_block_size must be at least 1"),
        ({"candidate_source_layer_id": 2}, "layer 5 makes ratio-1 KV above the candidate source 2"),
    ],
)  # fmt: skip
def test_an_illegal_table_is_refused_with_its_layer(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)
