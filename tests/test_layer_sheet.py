"""layer_sheet.py: what a layer reads, in words."""

from __future__ import annotations

import pytest

from dsflash_jax.layer_sheet import is_mode_string, plan_text, sources
from dsflash_jax.modes import parse, plan


def test_sources_follow_the_last_full_and_the_last_selection() -> None:
    assert sources(parse("S F2 U S X U F1 U")) == [
        (None, None), (1, 1), (1, 1), (None, None), (1, 4), (1, 4), (6, 6), (6, 6),
    ]  # fmt: skip


def test_marks_are_named() -> None:
    assert plan_text(plan(parse("Se F1ept Ut"))) == "window+engram, full+engram+publish+tap, reuse+tap"


@pytest.mark.parametrize(
    ("source", "expected"),
    [("S S F2", True), ("2(F1 U)", True), ("F1", True), ("released", False), ("relesed", False), ("tests", False)],
)
def test_mode_strings_are_told_from_configurations(source: str, expected: bool) -> None:
    assert is_mode_string(source) is expected
