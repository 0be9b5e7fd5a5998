"""The byte tokenizer is exact on every text and never invents one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsflash_jax.config import Config
from train import tokenizer


@given(st.text())
def test_every_text_comes_back_exactly(text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.shape == (len(text.encode()),)
    assert tokenizer.decode(ids) == text
    np.testing.assert_array_equal(tokenizer.encode(text.encode()), ids)


def test_ids_are_byte_values_behind_the_models_special_ids():
    assert tokenizer.encode("a\u00e9").tolist() == [97 + 3, 0xC3 + 3, 0xA9 + 3]
    assert tokenizer.encode(bytes(range(256))).tolist() == list(range(3, 259))
    assert tokenizer.encode("").size == 0
    defaults = Config.__dataclass_fields__
    assert [tokenizer.BOS, tokenizer.EOS, tokenizer.PAD] == [
        defaults[f"{name}_token_id"].default for name in ("bos", "eos", "pad")
    ]


def test_specials_are_dropped_and_what_is_no_text_is_replaced():
    assert tokenizer.decode([0, 100, 101, 1, 2, 2]) == "ab"
    assert tokenizer.decode([0xC3 + 3]) == "\ufffd"  # half a character
    assert tokenizer.decode([100, 259, 263, 101]) == "a\ufffd\ufffdb"  # unused rows of a padded vocabulary
    assert tokenizer.decode([]) == ""


def test_negative_ids_are_refused():
    with pytest.raises(ValueError, match=r"got -1 at index 1"):
        tokenizer.decode([5, -1])


def test_lone_surrogates_are_refused():
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("\ud800")


def test_vocabulary_is_259_and_rounds_up_to_a_multiple():
    assert tokenizer.vocab_size == 259
    assert [tokenizer.padded_vocab_size(m) for m in (1, 7, 8, 128)] == [259, 259, 264, 384]
    with pytest.raises(ValueError, match="positive multiple, got 0"):
        tokenizer.padded_vocab_size(0)


@given(st.lists(st.integers(0, 300)))
def test_the_bytes_of_ids_one_by_one_are_the_text_of_all(ids):
    assert b"".join(map(tokenizer.bytes_of, ids)).decode("utf-8", errors="replace") == tokenizer.decode(ids)
    with pytest.raises(ValueError, match="got -1"):
        tokenizer.bytes_of(-1)
