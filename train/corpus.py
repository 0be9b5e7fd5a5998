"""Corpora and their held-out split: the standard library's sources, a folder, a .jsonl file, or made pictures.

A document is held out by a fixed hash of its name (of its line in a .jsonl), so the split is the same on every machine
and does not move when other documents come or go.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import numpy as np

from train import digits

Split = Literal["train", "heldout"]

STDLIB = "stdlib"  # as a source: the standard library of the running Python
DIGITS = "digits"  # as a source: pictures of numbers, see `digits`
SUFFIXES = (".txt", ".py", ".md")  # what is read of a folder
# Not the library itself (installed packages, its tests), tables in place of text (codecs, the help topics), or what
# distributions package apart or versions dropped, so that as many machines as possible have the same documents.
STDLIB_LEFT_OUT = (
    *("site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"),
    *("distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
)
# Written when Python is built or installed: they differ between machines of one version.
STDLIB_LOCAL = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")
HASH_BYTES = 8
HOLDOUT = 20  # one document of so many is held out unless the configuration says otherwise
NEVER = 1  # as a document's hash: never held out


@dataclass(frozen=True)
class Picture:
    """An image that is made when it is read."""

    height: int  # pixels
    width: int
    draw: Callable[[], np.ndarray]  # uint8 RGB [height, width, 3], the same at every call


@dataclass(frozen=True)
class Document:
    """One text with its place in the corpus."""

    name: str  # POSIX path relative to the source, `line N` of a .jsonl, or `picture N`
    text: bytes  # valid UTF-8, never empty
    hash: int  # decides whether the document is held out
    picture: Picture | None = None  # stands before the text


@dataclass(frozen=True)
class Corpus:
    """All documents of a source in a fixed order (by path, or by line)."""

    source: str  # what was read, for messages
    documents: tuple[Document, ...]
    skipped: tuple[str, ...]  # files and folders left out, each with the reason


def load(source: str) -> Corpus:
    """Read `stdlib`, a folder (recursively its .txt, .py and .md files, hidden ones apart) or a .jsonl; or `digits`.

    Files that are unreadable, empty or not UTF-8 are skipped and listed. Raises FileNotFoundError for a missing path,
    ValueError for another kind of file, a bad .jsonl line (file and line named) or a source without any text.
    """
    if not source:  # an empty path would be the working folder
        raise ValueError(f"data.source is empty: expected {STDLIB!r}, {DIGITS!r}, a folder or a .jsonl file")
    if source == DIGITS:
        return Corpus(source, tuple(_pictures()), ())
    try:
        path = Path(sysconfig.get_paths()["stdlib"] if source == STDLIB else source).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, no such user, a NUL
        raise ValueError(f"data.source={source[:80]!r}: this cannot be a path: {error}") from error
    if source != STDLIB and not path.exists():
        raise FileNotFoundError(
            f"data.source={source!r}: expected {STDLIB!r}, {DIGITS!r}, a folder or a .jsonl file, "
            f"but nothing is at {path.absolute()}"
        )
    if path.is_file():
        if path.suffix != ".jsonl":
            raise ValueError(
                f"data.source={source!r}: a file must be .jsonl with a 'text' field a line, got {path.suffix!r}; "
                f"for {', '.join(SUFFIXES)} files give their folder"
            )
        corpus = Corpus(source, tuple(_lines(path)), ())
    else:
        corpus = _files(source, path)
    if not corpus.documents:
        raise ValueError(
            f"data.source={source!r}: no text in {path.absolute()} ({len(corpus.skipped)} files skipped: "
            f"{', '.join(corpus.skipped[:3]) or 'none'}); expected "
            + ("lines with a non-empty 'text'" if path.is_file() else f"{', '.join(SUFFIXES)} files")
            + (". This Python has no library sources: give a folder instead" if source == STDLIB else "")
        )
    return corpus


def part(corpus: Corpus, split: Split, holdout: int) -> tuple[Document, ...]:
    """The documents of one split: held out are those whose hash is divisible by `holdout`, none if it is 0.

    Raises ValueError if the split is empty, and says which setting changes that.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split must be 'train' or 'heldout', got {split!r}")
    chosen = tuple(d for d in corpus.documents if _held_out(d, holdout) == (split == "heldout"))
    if not chosen:
        raise ValueError(
            f"data.source={corpus.source!r}: data.holdout={holdout} leaves none of {len(corpus.documents)} documents "
            f"for {split}; {_fix(corpus, split)}"
        )
    return chosen


def digest(documents: tuple[Document, ...]) -> str:
    """A hash of names and texts in order, which tells whether two runs read the same documents."""
    state = blake2b(digest_size=HASH_BYTES)
    for d in documents:
        for data in (_bytes(d.name), d.text):
            state.update(len(data).to_bytes(HASH_BYTES, "big") + data)
    return state.hexdigest()


def _held_out(document: Document, holdout: int) -> bool:
    return holdout > 0 and document.hash % holdout == 0


def _fix(corpus: Corpus, split: Split) -> str:
    """What to do about an empty split: the largest usual `holdout` that gives both splits something, or more text."""
    total = len(corpus.documents)
    for h in range(HOLDOUT, 1, -1):
        if 0 < sum(_held_out(d, h) for d in corpus.documents) < total:
            return f"set data.holdout={h}, or give more documents"
    return "give more documents" + (", or set data.holdout=0 to train on all" if split == "train" else "")


def _pictures() -> Iterator[Document]:
    """Numbers with their pictures, and numbers without, which only train: a held-out loss is of captions alone."""
    for i, (text, pictured) in enumerate(digits.captions()):
        name = f"{'picture' if pictured else 'text'} {i}"
        picture = Picture(digits.HEIGHT, digits.WIDTH, partial(digits.draw, text, i)) if pictured else None
        yield Document(name, text.encode(), _hash(name.encode()) if pictured else NEVER, picture)


def _files(source: str, root: Path) -> Corpus:
    documents: list[Document] = []
    skipped: list[str] = []
    unlisted = lambda error: skipped.append(f"{error.filename} (unreadable: {error.strerror})")  # noqa: E731
    suffixes = (".py",) if source == STDLIB else SUFFIXES
    found = [p.relative_to(root).as_posix() for p in _walk(root, source == STDLIB, unlisted) if p.suffix in suffixes]
    for name in sorted(found):
        text, fault = _read(root / name)
        if fault:
            skipped.append(f"{name} ({fault})")
        else:
            documents.append(Document(name, text, _hash(_bytes(name))))
    return Corpus(source, tuple(documents), tuple(skipped))


def _walk(root: Path, library: bool, unlisted: Callable[[OSError], None]) -> Iterator[Path]:
    """All files below `root`, without hidden ones and caches; links to folders are not followed.

    Calls `unlisted` for a folder that cannot be read.
    """
    for folder, folders, files in os.walk(root, onerror=unlisted):
        folders[:] = [name for name in folders if _wanted(name, library)]
        yield from (Path(folder, name) for name in files if _wanted(name, library))


def _wanted(name: str, library: bool) -> bool:
    if name.startswith(".") or name == "__pycache__":
        return False
    return not (library and (name in STDLIB_LEFT_OUT or name.startswith(STDLIB_LOCAL)))


def _read(path: Path) -> tuple[bytes, str | None]:
    """The bytes of a file, or why it cannot be a document."""
    try:
        if not path.is_file():  # a pipe would never end
            return b"", "no regular file"
        text = path.read_bytes()
        text.decode("utf-8")
    except OSError as error:
        return b"", f"unreadable: {error.strerror}"
    except UnicodeDecodeError as error:
        return b"", f"not UTF-8 at byte {error.start}"
    return text, None if text else "empty"


def _lines(path: Path) -> Iterator[Document]:
    """One document a line; blank lines and empty texts carry nothing and are passed over."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.strip()
            text = _text(line, f"{path}:{number}") if line else b""
            if text:
                yield Document(f"line {number}", text, _hash(line))


def _text(line: bytes, where: str) -> bytes:
    expected = f"{where}: expected a JSON object with a string field 'text'"
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested without end
        raise ValueError(f"{expected}, got what cannot be read: {error}; correct or remove the line") from error
    fields = record if isinstance(record, dict) else {}
    text = fields.get("text")
    if type(text) is not str:
        raise ValueError(
            f"{expected}, got a {type(record).__name__} with fields {sorted(fields)}; correct or remove the line"
        )
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{expected} that has a UTF-8 form: {error}; correct or remove the line") from error


def _hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=HASH_BYTES).digest(), "big")


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", errors="surrogateescape")  # a file name need not be UTF-8
