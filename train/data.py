"""Batches of packed documents, the same on every machine and resumable to the exact batch.

corpus -> tokens (bos, bytes, eos) -> pieces of at most `seq_len` tokens -> rows -> grain: order of rows -> batches.
A document with a picture is bos, the picture's span, bytes, eos, and always one piece.

Rows are packed once for the whole corpus and grain shuffles their order anew each epoch. Documents of one row do not
see each other, so which of them share a row changes no gradient; in return every batch follows from (seed, step) alone
and a position in the data is one number: nothing is half filled, windowed or prefetched in it.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import grain
import numpy as np

from dsflash_jax import pixels
from dsflash_jax.config import Config
from train import corpus, tokenizer
from train.corpus import Split

Arrays = dict[str, Any]  # NumPy arrays, and `pixels.Images` of them under "images"

HELDOUT_SEED = 0  # held-out rows come in one mixed order, whatever the seed of a run, so that a few are a fair sample


@dataclass(frozen=True)
class Data:
    """What a run reads and how it is packed; equal records give equal batches."""

    source: str = corpus.STDLIB  # `stdlib`, a folder of .txt/.py/.md files, a .jsonl with "text" a line, or `digits`
    seq_len: int = 1024  # tokens of a row
    batch_size: int = 8  # rows of the global batch, over all hosts
    seed: int = 0  # order of training rows; another seed is another order of the same documents
    align: int = 1  # each document starts at a row index divisible by this; costs at most align - 1 pads a document
    holdout: int = corpus.HOLDOUT  # one document of so many, chosen by hash, is never trained on; 0 for none
    shuffle: bool = True  # False keeps the corpus order of training rows, the same in every epoch
    prefetch: int = 2  # batches that a thread makes ahead; 0 makes each when it is asked for

    def __post_init__(self) -> None:
        for key, least in (("seq_len", 2), ("batch_size", 1), ("align", 1), ("holdout", 0), ("prefetch", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"data.{key} must be at least {least}, got {getattr(self, key)}")
        if self.holdout == 1:
            raise ValueError("data.holdout=1 holds out every document: set 0 for none, or 2 or more")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"data.seed must be from 0 to 2**32 - 1 (grain shuffles with 32 bits), got {self.seed}")
        if self.seq_len % self.align:
            raise ValueError(f"data.align={self.align} does not divide data.seq_len={self.seq_len}: set one of the two")


@dataclass(frozen=True)
class Packed:
    """A corpus as rows of pieces; piece i is `tokens[starts[i] : starts[i] + lengths[i]]`."""

    documents: tuple[corpus.Document, ...]
    skipped: tuple[str, ...]  # files left out, each with the reason
    tokens: np.ndarray = field(repr=False)  # uint16 where it holds the ids: all documents after each other
    starts: np.ndarray = field(repr=False)  # int64 [pieces]
    lengths: np.ndarray = field(repr=False)  # int64 [pieces]
    owners: np.ndarray = field(repr=False)  # int64 [pieces]: the document of a piece
    rows: tuple[tuple[int, ...], ...] = field(repr=False)  # the pieces of each row; both in the order of the corpus
    model: Config | None = field(default=None, repr=False)  # lays the pictures out; None for text alone

    def padding(self, seq_len: int) -> float:
        """The share of row positions that hold no token."""
        return 1 - float(self.lengths.sum()) / (len(self.rows) * seq_len)

    def picture(self, piece: int) -> corpus.Picture | None:
        """The picture of a piece's document."""
        return self.documents[self.owners[piece]].picture

    @cached_property
    def room(self) -> tuple[int, int]:
        """The most pictures of a row and the most patches of a picture; the shapes of every batch."""
        slots = max(sum(self.picture(i) is not None for i in row) for row in self.rows)
        pictures = (d.picture for d in self.documents if d.picture is not None)
        return slots, max((math.prod(_grid(p, self.model)) for p in pictures), default=0)


def load(data: Data, split: Split = "train", model: Config | None = None) -> Packed:
    """Read, tokenise, cut and pack one split. The whole split stays in memory, three bytes a token.

    `model` lays pictures out. Raises ValueError for pictures without an image tower in it, for a tower without
    pictures, and for a picture and its text that exceed a row.
    """
    source = corpus.load(data.source)
    _match(source, model)
    documents = corpus.part(source, split, data.holdout)
    texts = [prompt_and_text(d, model) for d in documents]
    for d, text in zip(documents, texts, strict=True):
        if d.picture is not None and text.size > data.seq_len:
            raise ValueError(
                f"data.seq_len={data.seq_len} is too short for {d.name!r} of data.source={data.source!r}: its picture "
                f"and text take {text.size} tokens and are not cut. Raise data.seq_len, or model.vision.patch_size"
            )
    firsts = np.cumsum([0] + [t.size for t in texts])
    pieces = [
        (firsts[owner] + start, length, owner)
        for owner, text in enumerate(texts)
        for start, length in cut(text.size, data.seq_len)
    ]
    starts, lengths, owners = np.array(pieces, np.int64).T
    packed = pack([_aligned(int(n), data.align) for n in lengths], data.seq_len)
    rows = tuple(sorted(tuple(sorted(row)) for row in packed))
    return Packed(documents, source.skipped, np.concatenate(texts), starts, lengths, owners, rows, model)


def _match(source: corpus.Corpus, model: Config | None) -> None:
    """Refuse pictures that the model cannot see, and an image tower that would see none."""
    pictured, sees = any(d.picture for d in source.documents), model is not None and model.vision is not None
    if pictured and not sees:
        raise ValueError(
            f"data.source={source.source!r} has pictures, but the model has no image tower (model.vision=None): set "
            "model.vision as configs/digits.py does, or give a source of text"
        )
    if sees and not pictured:
        raise ValueError(
            f"model.vision is set, but data.source={source.source!r} has no picture to train it with: set "
            f"data.source={corpus.DIGITS!r}, or model.vision=None"
        )


def prompt(document: corpus.Document, model: Config | None) -> np.ndarray:
    """The ids before a document's text: bos and the span of its picture."""
    if document.picture is None:
        return np.array([tokenizer.BOS], np.int32)
    assert model is not None
    span = pixels.span_length(_grid(document.picture, model), model)
    return np.array([tokenizer.BOS] + [model.image_token_id] * span, np.int32)


def shown(data: Data, model: Config, count: int) -> Iterator[tuple[corpus.Document, np.ndarray, pixels.Images]]:
    """The first held-out documents with a picture, each with its prompt and the one image of a row of that prompt."""
    documents = corpus.part(corpus.load(data.source), "heldout", data.holdout)
    for d in islice((d for d in documents if d.picture is not None), count):
        assert d.picture is not None and model is not None
        ids, (patches, grid) = prompt(d, model), pixels.preprocess(d.picture.draw(), model)
        yield d, ids, pixels.collate([[(1, patches, grid)]], model, ids.size, 1, len(patches))


def prompt_and_text(document: corpus.Document, model: Config | None) -> np.ndarray:
    """All ids of a document, in the smallest type that holds every id."""
    ids = np.concatenate([prompt(document, model), tokenizer.encode(document.text), np.array([tokenizer.EOS])])
    largest = tokenizer.vocab_size if model is None or model.vision is None else model.image_token_id
    return ids.astype(np.min_scalar_type(largest))


def _grid(picture: corpus.Picture, model: Config | None) -> tuple[int, int]:
    assert model is not None and model.vision is not None
    tall, wide = pixels.target_size(picture.height, picture.width, model)
    return tall // model.vision.patch_size, wide // model.vision.patch_size


def cut(length: int, seq_len: int) -> list[tuple[int, int]]:
    """(start, length) of the pieces of a document of `length` tokens, each at most `seq_len` tokens.

    A piece after the first begins with the last token of the piece before it, as an input only. So every token but
    the document's first is a target exactly once, in the piece that holds its context, and no piece is without one.
    Positions restart with the piece; bos and eos stay at the ends of the document.
    """
    return [(start, min(seq_len, length - start)) for start in range(0, length - 1, seq_len - 1)]


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put items into rows of `capacity` by best fit, the largest first; returns the item numbers of each row.

    An item goes where it leaves the least room. Cost: O(items * log capacity), and for an item moving at most
    `capacity` entries of a list.
    """
    rows: list[list[int]] = []
    rooms: dict[int, list[int]] = {}  # free positions -> rows with just that many
    levels: list[int] = []  # the keys of rooms, ascending
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = bisect_left(levels, sizes[item])
        if at == len(levels):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free = levels[at]
            row = rooms[free].pop()
            if not rooms[free]:
                del rooms[free], levels[at]
        rows[row].append(item)
        left = free - sizes[item]
        if left:
            if left not in rooms:
                rooms[left] = []
                insort(levels, left)
            rooms[left].append(row)
    return rows


def collate(packed: Packed, rows: Sequence[Sequence[int]], seq_len: int, align: int) -> Arrays:
    """The arrays of some rows, each given by its pieces; a row without pieces is all padding.

    tokens, targets, segments, positions int32 [B,T], loss_mask float32 [B,T]; and images if the split has pictures.
    `targets[t]` is `tokens[t + 1]` where both are in one piece and loss_mask is 1 there, unless that is a token of an
    image span; elsewhere it is pad with loss_mask 0. Segments count the pieces of a row from 1, and 0 is padding. The
    text bytes among the targets, for a loss per byte, are `sum(loss_mask * (targets >= tokenizer.SPECIALS))`: all
    targets but eos.
    """
    images: list[list[tuple[int, np.ndarray, tuple[int, int]]]] = [[] for _ in rows]
    shape = (len(rows), seq_len)
    out: Arrays = {key: np.full(shape, tokenizer.PAD, np.int32) for key in ("tokens", "targets")}
    out |= {key: np.zeros(shape, np.int32) for key in ("segments", "positions")}
    out["loss_mask"] = np.zeros(shape, np.float32)
    for r, pieces in enumerate(rows):
        at = 0
        for segment, i in enumerate(pieces, 1):
            n = int(packed.lengths[i])
            piece = packed.tokens[packed.starts[i] : packed.starts[i] + n]
            out["tokens"][r, at : at + n] = piece
            out["targets"][r, at : at + n - 1] = piece[1:]
            out["loss_mask"][r, at : at + n - 1] = 1
            picture = packed.picture(i)
            if picture is not None:
                assert packed.model is not None
                images[r].append((at + 1, *pixels.preprocess(picture.draw(), packed.model)))
            out["segments"][r, at : at + n] = segment
            out["positions"][r, at : at + n] = np.arange(n, dtype=np.int32)
            at += _aligned(n, align)
    if packed.room[0]:
        assert packed.model is not None
        out["images"] = pixels.collate(images, packed.model, seq_len, *packed.room)
        spans = out["targets"] == packed.model.image_token_id
        out["loss_mask"][spans], out["targets"][spans] = 0, tokenizer.PAD
    return out


class Batches:
    """Iterator over batches whose whole state is the number of the next one; made by `batches`."""

    def __init__(
        self,
        data: Data,
        split: Split,
        packed: Packed,
        own: Sequence[int],
        steps: int,
        transform: Callable[[Arrays], Arrays] | None,
    ) -> None:
        self.packed = packed  # what is read: documents, skipped files, rows
        self._data, self._own, self._steps, self._transform = data, own, steps, transform
        rows = grain.MapDataset.range(len(packed.rows))
        if split == "heldout":
            self._rows = rows.shuffle(seed=HELDOUT_SEED)
        else:  # grain shuffles epoch e with seed + e
            self._rows = (rows.shuffle(seed=data.seed) if data.shuffle else rows).repeat()
        unread = {"source", "prefetch"}  # where the text lies and who makes a batch do not change it
        self._identity = {k: v for k, v in asdict(data).items() if k not in unread}
        self._identity |= {"split": split, "corpus": corpus.digest(packed.documents)}
        options = grain.ReadOptions(num_threads=min(1, data.prefetch), prefetch_buffer_size=data.prefetch)
        self._iterator = iter(grain.MapDataset.range(steps).map(self._make).to_iter_dataset(options))

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Arrays:
        return next(self._iterator)

    def __len__(self) -> int:
        """Batches from the first to the last; a training split goes on for longer than any run."""
        return self._steps

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs to go on with the next batch in order; JSON-able, the same on all hosts."""
        return {"step": self._iterator.get_state()["next_index"], **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, in this or another process, with this or another number of hosts.

        Raises ValueError if the state is of other documents or another `Data`, and names what differs.
        """
        if state.keys() != self.get_state().keys():
            raise ValueError(f"data state: expected the fields {sorted(self.get_state())}, got {sorted(state)}")
        for key, value in self._identity.items():
            if state[key] != value:
                what = "the documents (or the Python version, for stdlib)" if key == "corpus" else f"data.{key}"
                raise ValueError(
                    f"data state: {what} changed: the state has {key}={state[key]!r}, this run {value!r}, so the next "
                    "batch would be another one. Restore the old value, or start the data anew without the state"
                )
        if not 0 <= state["step"] <= self._steps:
            raise ValueError(f"data state: step {state['step']} is outside 0..{self._steps} of this split")
        self._iterator.set_state({"next_index": state["step"]})

    def contents(self, step: int) -> list[list[str]]:
        """Which text is in this process's rows of a batch: `document@first token`, in order."""
        return [[self._name(i) for i in row] for row in self._pieces(step)]

    def close(self) -> None:
        """Stop the thread that makes batches ahead."""
        self._iterator.close()

    def _name(self, piece: int) -> str:
        p = self.packed
        owner = p.owners[piece]
        first = np.searchsorted(p.owners, owner)  # the piece at which its document starts
        return f"{p.documents[owner].name}@{p.starts[piece] - p.starts[first]}"

    def _pieces(self, step: int) -> list[tuple[int, ...]]:
        numbers = (step * self._data.batch_size + row for row in self._own)
        # Only a finite split has an end: its last batch is filled with empty rows so that every batch has one shape.
        return [self.packed.rows[self._rows[n]] if n < len(self._rows) else () for n in numbers]

    def _make(self, step: int) -> Arrays:
        batch = collate(self.packed, self._pieces(step), self._data.seq_len, self._data.align)
        return self._transform(batch) if self._transform else batch


def batches(
    data: Data,
    split: Split = "train",
    *,
    own: Sequence[int] | None = None,
    n_batches: int | None = None,
    model: Config | None = None,
    transform: Callable[[Arrays], Arrays] | None = None,
) -> Batches:
    """Batches of a split as dictionaries of arrays, see `collate`.

    Training goes round the corpus without end, each row once an epoch; held-out batches end after one round in one
    fixed order, the last filled up with empty rows. `n_batches` ends either earlier. `own` are the rows of the global
    batch that this process needs, by default all of them; every process reads the whole corpus. `model` lays pictures
    out. `transform` gets and returns a batch, may add keys, and must depend on the batch alone; with prefetch it runs
    in the thread. Raises ValueError for a row that the batch does not have, and what `load` raises.
    """
    own = range(data.batch_size) if own is None else own
    if not own or min(own) < 0 or max(own) >= data.batch_size:
        raise ValueError(f"own must be rows from 0 to data.batch_size - 1 = {data.batch_size - 1}, got {list(own)}")
    if n_batches is not None and n_batches < 1:
        raise ValueError(f"n_batches must be at least 1, or None for all, got {n_batches}")
    packed = load(data, split, model)
    rows = len(packed.rows) if split == "heldout" else sys.maxsize
    steps = -(-rows // data.batch_size) if split == "heldout" else rows // data.batch_size
    steps = steps if n_batches is None else min(steps, n_batches)
    return Batches(data, split, packed, own, steps, transform)


def _aligned(length: int, align: int) -> int:
    return -(-length // align) * align
