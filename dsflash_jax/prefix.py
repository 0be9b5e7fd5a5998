"""Prefix store: the compressed KV and index keys of a prompt's beginning on disk, for any process to go on from.

Only what grows with the prompt is kept, 890 bytes a token of the released model. Windows are not: the prefix's last W
tokens run again when it is loaded, with windows that begin at the first of them, and what they make of slots that are
there is dropped. So what follows depends slightly on where the prefix ends; a prefix of up to W tokens is exact.
Source: architecture section 14, "encoder side".
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dsflash_jax import cache as caches
from dsflash_jax import engram
from dsflash_jax.cache import Cache
from dsflash_jax.decode import Decoder
from dsflash_jax.verdict import read

VERSION = 1
KINDS = ("kv", "index")


def save(path: Path, decoder: Decoder, cache: Cache, row: int, ids: np.ndarray) -> int:
    """Write one row's prefix, all tokens it holds, and return the file's size in bytes; `ids` are those tokens.

    The file appears whole or not at all. Raises ValueError for a path of something else than a file, for a row that
    does not exist or holds other than these, and for images among them, which ids do not tell apart.
    """
    path = path.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file and cannot be replaced by a stored prefix: give the path of a file")
    ids = np.asarray(ids)
    if not 0 <= row < cache.length.shape[0]:
        raise ValueError(f"the cache has rows 0..{cache.length.shape[0] - 1}, not {row}")
    if ids.ndim != 1 or len(ids) != int(cache.length[row]) or len(ids) == 0:
        raise ValueError(f"row {row} holds {int(cache.length[row])} tokens, at least 1 is needed, got ids {ids.shape}")
    decoder.check(ids)
    if decoder.setup.config.vision is not None and (ids == decoder.setup.config.image_token_id).any():
        raise ValueError("ids do not say which image stands there, so end a stored prefix before its first image")
    head = _head(decoder, cache) | {"tokens": len(ids), "ids": _hash(ids)}
    arrays: dict[str, Any] = {"head": np.frombuffer(json.dumps(head).encode(), np.uint8)}
    for kind in KINDS:
        for ratio, entry in getattr(cache, kind).items():
            for i, leaf in enumerate(jax.tree.leaves(entry)):
                arrays[f"{kind}.{ratio}.{i}"] = _storable(np.asarray(leaf[row, :, : len(ids) // ratio]))
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path.stat().st_size


def load(path: Path, decoder: Decoder, prompts: Sequence[np.ndarray], tokens: int = 0) -> tuple[Cache, int]:
    """A cache of a row for each prompt behind a stored prefix, and the index from which on prompts are to be run.

    Every prompt begins with the prefix's tokens; prefill prompt[index:] of each with the same decoder: the last W
    tokens of the prefix, and what stands behind it. The cache has room for `tokens`, at least for the prompts. Raises
    ValueError for a damaged file, one of another model, other weights or another storage, or of other tokens.
    """
    held = read(path)
    head = _read_head(path, held)
    for prompt in prompts:
        decoder.check(prompt)
    prompts, rows = [np.asarray(prompt, np.int32) for prompt in prompts], len(prompts)
    cache = decoder.begin(rows, max(tokens, *map(len, prompts)))
    for key, value in _head(decoder, cache).items():
        if head.get(key) != value:
            raise ValueError(f"{path}: made with another {key}; run the prompt again, without the stored prefix")
    length = head["tokens"]
    if any(len(prompt) < length or _hash(prompt[:length]) != head["ids"] for prompt in prompts):
        raise ValueError(f"{path}: the prompt does not begin with the {length} tokens of this prefix")
    fill = lambda kind: {r: _fill(path, held, kind, r, e, length) for r, e in getattr(cache, kind).items()}  # noqa: E731
    c = decoder.setup.config
    start = max(length - c.sliding_window, 0)
    at = lambda n: jnp.full((rows,), n, jnp.int32)  # noqa: E731  # an array each: a cache is donated, all of it
    places: dict[str, Any] = {
        "length": at(start), "origin": at(start), "stored": {r: at(length // r) for r in cache.stored}
    }  # fmt: skip
    history = cache.history
    if history is not None:
        look = history.shape[1]
        line = np.full(look, engram.DEAD, np.int32)
        before = prompts[0][max(start - look, 0) : start]
        classes = before if decoder.classes is None else np.asarray(decoder.classes)[before]
        line[look - len(before) :] = classes
        history = jnp.broadcast_to(jnp.asarray(line)[None], history.shape)
    return replace(cache, history=history, kv=fill("kv"), index=fill("index"), **places), start


def _head(decoder: Decoder, cache: Cache) -> dict[str, Any]:
    """What a file and a decoder must agree on."""
    setup = decoder.setup
    return {
        "version": VERSION,
        "configuration": _plain(setup.config.to_json()),
        "rounding": asdict(setup.quantize),
        "storage": _plain({kind: _form(getattr(cache.forms, kind)) for kind in KINDS}),
        "weights": decoder.digest,
        "classes": None if decoder.classes is None else _hash(np.asarray(decoder.classes, np.int32)),
    }


def _form(form: caches.Form) -> list[Any]:
    return [form.width, None if form.fmt is None else form.fmt.name, form.packed, form.dtype]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _hash(ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(ids, "<i4").tobytes()).hexdigest()


def _read_head(path: Path, held: Mapping[str, np.ndarray]) -> dict[str, Any]:
    try:
        head = json.loads(bytes(held["head"].astype(np.uint8)).decode())
        if isinstance(head, dict) and isinstance(head.get("tokens"), int) and head["tokens"] > 0:
            return head
    except (KeyError, ValueError):
        pass
    raise ValueError(f"{path}: not a stored prefix; give a file that was saved as one")


def _fill(path: Path, held: Mapping[str, np.ndarray], kind: str, ratio: int, entry: Any, length: int) -> Any:
    """The stored slots of one ratio in each row of an empty cache."""
    leaves, tree = jax.tree.flatten(entry)
    out = []
    for i, leaf in enumerate(leaves):
        name, wanted = f"{kind}.{ratio}.{i}", (leaf.shape[1], length // ratio, leaf.shape[3])
        kept = held.get(name)
        if kept is None or kept.shape != wanted or kept.dtype != _storable(np.zeros(0, leaf.dtype)).dtype:
            found = "none" if kept is None else f"{kept.dtype} {list(kept.shape)}"
            raise ValueError(f"{path}: {name}: expected {leaf.dtype} {list(wanted)}, found {found}")
        out.append(leaf.at[:, :, : length // ratio].set(kept.view(leaf.dtype)[None]))
    return jax.tree.unflatten(tree, out)


def _storable(a: np.ndarray) -> np.ndarray:
    """An array of a dtype that files of arrays have: bfloat16 as its bits."""
    return a.view(np.uint16) if a.dtype == jnp.bfloat16 else a
