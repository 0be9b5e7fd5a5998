"""Byte tokenizer: byte b is id b + 3, after the model's special ids. Every text has exactly one token sequence."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int, Int32

BOS, EOS, PAD = 0, 1, 2  # the configuration's bos_token_id, eos_token_id and pad_token_id
SPECIALS = 3  # ids below this stand for no text
BYTES = 256
vocab_size = SPECIALS + BYTES
_INVALID = 0xFF  # a byte that no UTF-8 text contains, so it decodes to the replacement character


def padded_vocab_size(multiple: int) -> int:
    """The smallest multiple of `multiple` with room for all ids: 264 for 8. The rows above 258 stay unused."""
    if multiple < 1:
        raise ValueError(f"padded_vocab_size needs a positive multiple, got {multiple}")
    return -(-vocab_size // multiple) * multiple


def encode(text: str | bytes) -> Int32[np.ndarray, " T"]:
    """The ids of a text, one a byte of its UTF-8 form, without bos or eos.

    Raises UnicodeEncodeError for a string with lone surrogates, which has no UTF-8 form.
    """
    data = text.encode("utf-8") if isinstance(text, str) else text
    return np.frombuffer(data, np.uint8).astype(np.int32) + np.int32(SPECIALS)


def decode(ids: Int[np.ndarray, " T"] | list[int]) -> str:
    """The text of ids; special ids are dropped, and what is no UTF-8 becomes the replacement character.

    So do ids from 259 on, which a model with a padded vocabulary can draw. Raises ValueError for negative ids.
    """
    ids = np.asarray(ids, np.int64).reshape(-1)
    if ids.size and ids.min() < 0:
        raise ValueError(f"decode expects ids from 0 to {vocab_size - 1}, got {ids.min()} at index {ids.argmin()}")
    ids = ids[ids >= SPECIALS]
    data = np.where(ids < vocab_size, ids - SPECIALS, _INVALID).astype(np.uint8)
    return data.tobytes().decode("utf-8", errors="replace")


def bytes_of(token: int) -> bytes:
    """What one id adds to a text: a byte; nothing for a special id, and for one from 259 on a byte that is no UTF-8.

    So `decode` of some ids is their bytes together, decoded with replacement. A negative id raises ValueError.
    """
    if token < 0:
        raise ValueError(f"ids are from 0 to {vocab_size - 1}, got {token}")
    if token < SPECIALS:
        return b""
    return bytes([token - SPECIALS if token < vocab_size else _INVALID])
