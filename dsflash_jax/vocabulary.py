"""Compressed vocabulary of the n-gram memory: tokens that differ in case, accents or spacing share one class.

Host-side and done once a tokenizer. Every hash multiplier depends on the number of classes, so a tokenizer whose
number differs from the configuration's is refused. Source: architecture section 10.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64

from dsflash_jax.config import Config

COMBINING = frozenset({"Mn", "Mc", "Me"})  # categories of the marks that are removed; Mn alone leaves 418 more classes
REPLACEMENT = "\ufffd"  # what partial UTF-8 decodes to
_BLANKS = re.compile("[ \t\r\n]+")
# Unicode's White_Space, without the separators U+001C to U+001F that `str.strip()` would also take away.
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"


@runtime_checkable
class Tokenizer(Protocol):
    """What is asked of a tokenizer: the part of `tokenizers.Tokenizer` that lists its tokens."""

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Number of ids."""

    def id_to_token(self, id: int) -> str | None:
        """Raw vocabulary string of an id."""

    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        """Text of each sequence of ids."""


def normalise(text: str) -> str:
    """Canonical form of a token's text: no compatibility forms, accents, capitals or repeated or outer blanks.

    A text that comes down to one blank keeps it; one that has nothing but marks becomes empty.
    """
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    # A character at a time: on whole words `lower` also picks the form that a final sigma has.
    text = "".join(c.lower() for c in text if unicodedata.category(c) not in COMBINING)
    text = _BLANKS.sub(" ", text)
    return text if text == " " else text.strip(_WHITE_SPACE)


def compress(texts: Sequence[str], raw: Sequence[str]) -> tuple[Int64[np.ndarray, " V"], int]:
    """Class of every token id, and the number of classes; classes count up in order of first appearance.

    texts: each token decoded alone, special tokens kept; raw: its vocabulary string, which is the key of a token that
    is no whole UTF-8 text. Otherwise the key is the normalised text, or the text where that is empty. Tokens with
    equal keys share a class. Raises ValueError when the two lists differ in length.
    """
    if len(texts) != len(raw):
        raise ValueError(
            f"compress expects one text and one vocabulary string a token, got {len(texts)} and {len(raw)}"
        )
    classes: dict[str, int] = {}
    out = np.empty(len(texts), np.int64)
    for i, (text, name) in enumerate(zip(texts, raw, strict=True)):
        key = name if REPLACEMENT in text else normalise(text) or text
        out[i] = classes.setdefault(key, len(classes))
    return out, len(classes)


def identity(size: int) -> tuple[Int64[np.ndarray, " V"], int]:
    """Every id a class of its own, for byte tokenizers, whose ids mean nothing alike."""
    if size < 1:
        raise ValueError(f"identity needs a positive number of ids, got {size}")
    return np.arange(size, dtype=np.int64), size


def from_tokenizer(source: str | Path | Tokenizer, c: Config) -> tuple[Int64[np.ndarray, " V"], int]:
    """`compress` over all ids of a tokenizer, added tokens included: a tokenizer.json or a loaded `Tokenizer`.

    The map covers the tokenizer's ids, not the rows that pad the embedding. Raises ImportError without the extra [hf]
    where a file is to be read, FileNotFoundError for a missing one, ValueError for an id without a token and for a
    number of classes that is not the configuration's. Takes about two seconds for 129280 ids.
    """
    tokenizer = _load(Path(source)) if isinstance(source, str | Path) else source
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    raw: list[str] = []
    for i in range(size):
        name = tokenizer.id_to_token(i)
        if name is None:
            raise ValueError(
                f"the tokenizer counts {size} ids but has no token for id {i}; the compressed vocabulary needs ids "
                "without gaps: renumber the added tokens"
            )
        raw.append(name)
    found, classes = compress(tokenizer.decode_batch([[i] for i in range(size)], skip_special_tokens=False), raw)
    check(classes, c)
    return found, classes


def check(classes: int, c: Config) -> None:
    """Raise ValueError unless a vocabulary has the number of classes that the hash multipliers are drawn for."""
    if classes != c.engram_compressed_vocab_size:
        raise ValueError(
            f"engram_compressed_vocab_size: expected {c.engram_compressed_vocab_size} classes, got {classes} from the "
            "tokenizer. Every n-gram hash depends on this number: use the tokenizer that the tables were trained with, "
            f"or, for new tables, set engram_compressed_vocab_size={classes}"
        )


def _load(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer as Loaded
    except ImportError as error:
        raise ImportError(
            f'reading {path} needs the package tokenizers, which the extra [hf] installs: pip install "dsflash_jax[hf]"'
        ) from error
    if not path.is_file():
        raise FileNotFoundError(f"expected a tokenizer.json at {path}: give the path of the file itself")
    loaded: Tokenizer = Loaded.from_file(str(path))
    return loaded
