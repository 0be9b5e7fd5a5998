"""Text from a model: rows that go on from their prompts until each has ended, as events while they come.

A prompt runs through `Decoder.prefill`; then every round gives each row that goes on one token, or with a speculator
several. A row has its own length, settings and end, and does not change the others.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from dsflash_jax import decode, pixels, sampling
from dsflash_jax import prefix as prefixes
from dsflash_jax.cache import Cache
from dsflash_jax.decode import Decoder
from dsflash_jax.pixels import Images
from dsflash_jax.sampling import Settings
from dsflash_jax.speculate import Round, Speculator

TextOf = Callable[[int], bytes]  # the bytes that an id stands for, none for a special one
Finish = Literal["length", "stop", "eos"]  # as many tokens as were asked for; a stop string or id; end of sequence


@dataclass(frozen=True, eq=False)
class Request:
    """What a row goes on from, how its tokens are drawn (see `sampling.distribution`), and where it ends."""

    prompt: Sequence[int] | np.ndarray  # ids, at least one
    max_tokens: int = 128  # tokens that are drawn at most
    temperature: float = 1.0  # 0 takes the likeliest token
    top_k: int = 0  # tokens that stay, 0 for all
    top_p: float = 1.0  # probability that stays, 1 for all
    min_p: float = 0.0  # least probability as a share of the largest
    seed: int = 0  # of the row's random numbers; the same seed gives the same tokens again
    stop: tuple[str, ...] = ()  # texts that end the row; they are no part of its text
    stop_ids: tuple[int, ...] = ()  # ids that do, as end-of-sequence always does
    images: Images | None = None  # of this one row, whose prompt holds their spans


@dataclass(frozen=True)
class Event:
    """What a round added to a row."""

    row: int
    ids: tuple[int, ...]  # the new ones; the one that ended the row is the last
    log_probabilities: tuple[float, ...]  # of each under the model: temperature 1, nothing filtered out
    text: str  # that is final now: what may be the beginning of a stop string or of a character waits
    finish: Finish | None = None  # why the row ended here, None if it goes on


class NotFinite(ArithmeticError):
    """The model says of a row what is not a number."""

    def __init__(self, row: int) -> None:
        self.row = row
        self.reason = "the logits are not numbers; its image or the weights are not, or compute.dtype is too narrow"
        super().__init__(f"row {row}: {self.reason}")


@dataclass(frozen=True)
class Completion:
    """All that a row said. `text` lacks the stop string, and what special ids stand for; `ids` are all that came."""

    ids: tuple[int, ...]
    log_probabilities: tuple[float, ...]
    text: str
    finish: Finish


def generate(
    decoder: Decoder,
    requests: Sequence[Request],
    *,
    text_of: TextOf | None = None,
    prefill: str = "full",
    speculator: Speculator | None = None,
    room: int = 0,
    prefix: Path | None = None,
) -> Iterator[Event]:
    """Events of all rows as they come; the last one of each says why it ended.

    With the same seed a row says the same alone and in any batch, but for what the last bits of float32 decide.
    `prefill` as in `Decoder.prefill`; `room` tokens a row has room for from the start, else the cache doubles, and the
    step is compiled anew, when it is full. Without `text_of` events have ids and no text. `prefix` is a stored one, see
    `dsflash_jax.prefix`, which all prompts begin with. On several devices rows that end at once fill up the batch.
    Raises ValueError, before anything runs, for a request that cannot be met: see `check`. The events raise NotFinite
    when they come to a row of which nothing can be drawn; no other row is touched by that one.
    """
    if not requests:
        raise ValueError("there is nothing to generate: give at least one request")
    for request in requests:
        check(decoder, request, text_of)
    if prefill not in decode.PREFILLS:
        raise ValueError(f"prefill is one of {list(decode.PREFILLS)}, got {prefill!r}")
    if prefill == "replay":
        decode.boundary(decoder.setup.config)  # raises where the model has none
    asked = len(requests)
    requests = [*requests, *[replace(requests[-1], max_tokens=1)] * (decoder.devices.filled(asked) - asked)]
    settings = sampling.settings(
        len(requests),
        [r.temperature for r in requests],
        [r.top_k for r in requests],
        [r.top_p for r in requests],
        [r.min_p for r in requests],
        [r.seed for r in requests],
    )
    rows = [Row(request, decoder.setup.config.eos_token_id, text_of) for request in requests]
    prompts = [np.asarray(request.prompt, np.int32) for request in requests]
    room = max(room, *map(len, prompts))
    behind = (decoder.begin(len(rows), room), 0) if prefix is None else prefixes.load(prefix, decoder, prompts, room)
    return (e for e in _events(decoder, rows, settings, prefill, speculator, behind) if e.row < asked)


def collect(events: Iterable[Event]) -> list[Completion]:
    """The completion of each row, from all its events."""
    rows: dict[int, list[Event]] = {}
    for event in events:
        rows.setdefault(event.row, []).append(event)
    return [join(rows[row]) for row in sorted(rows)]


def join(events: Sequence[Event]) -> Completion:
    """The completion of one row that has ended."""
    finish = events[-1].finish
    assert finish is not None, "the last event of a row says why it ended"
    return Completion(
        tuple(i for event in events for i in event.ids),
        tuple(p for event in events for p in event.log_probabilities),
        "".join(event.text for event in events),
        finish,
    )


def check(decoder: Decoder, request: Request, text_of: TextOf | None) -> None:
    """Raise ValueError, with what to change, for a request that this model cannot meet."""
    c = decoder.setup.config
    prompt, limit = np.asarray(request.prompt), c.max_position_embeddings
    decoder.check(prompt.astype(np.int32) if prompt.size == 0 else prompt)
    if request.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {request.max_tokens}")
    if len(prompt) + request.max_tokens > limit:
        raise ValueError(
            f"{len(prompt)} prompt ids and max_tokens={request.max_tokens} new ones exceed "
            f"max_position_embeddings={limit}: "
            + (f"ask for {limit - len(prompt)} or fewer" if len(prompt) < limit else "shorten the prompt")
        )
    if any(not 0 <= i < c.vocab_size for i in request.stop_ids):
        raise ValueError(f"stop ids must lie in 0..{c.vocab_size - 1}, got {list(request.stop_ids)}")
    if "" in request.stop:
        raise ValueError("a stop string is empty, and every text holds that: leave it out")
    if request.stop and text_of is None:
        raise ValueError("stop strings need the text of ids: give text_of, or use stop_ids")
    if request.images is not None and len(request.images.grid) != 1:
        raise ValueError(f"a request has the images of its own row, got those of {len(request.images.grid)} rows")
    pixels.check_spans([prompt], request.images, c)
    sampling.settings(1, request.temperature, request.top_k, request.top_p, request.min_p, request.seed)


class Text:
    """The text of a row, from bytes that come piece by piece, up to the first stop string that is complete.

    Of stop strings that end at the same character the longest counts. So the result does not depend on where the
    pieces begin. What is no UTF-8 becomes the replacement character, as in a text that is decoded as a whole.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop, self._held = stop, ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, data: bytes, last: bool = False) -> tuple[str, bool]:
        """Text that is final with these bytes, and whether a stop string ended it; the `last` hold nothing back."""
        text = self._held + self._utf8.decode(data, last)
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            return text[: min(found)[1]], True
        begun = (n for s in self._stop for n in range(1, min(len(s) - 1, len(text)) + 1) if text.endswith(s[:n]))
        end = len(text) - (0 if last else max(begun, default=0))
        self._held = text[end:]
        return text[:end], False


class Row:
    """A row on the host: what was asked of it, how far it is, and whether it has ended."""

    def __init__(self, request: Request, eos: int, text_of: TextOf | None) -> None:
        self.request, self.drawn = request, 0
        self.finish: Finish | None = None
        self._eos, self._text_of, self._text = eos, text_of, Text(request.stop)

    @property
    def known(self) -> int:
        """Tokens of prompt and continuation."""
        return len(self.request.prompt) + self.drawn

    def take(self, ids: Sequence[int]) -> tuple[int, str]:
        """How many of the new ids are the row's, which may end among them, and the text that is final now."""
        text = ""
        for count, token in enumerate(ids, 1):
            self.drawn += 1
            ends: Finish | None = "eos" if token == self._eos else "stop" if token in self.request.stop_ids else None
            full = self.drawn == self.request.max_tokens
            data = b"" if ends or self._text_of is None else self._text_of(token)
            more, stopped = self._text.read(data, last=full or ends is not None)
            text += more
            self.finish = ends or ("stop" if stopped else "length" if full else None)
            if self.finish:
                return count, text
        return len(ids), text


def _events(
    decoder: Decoder,
    rows: list[Row],
    settings: Settings,
    prefill: str,
    speculator: Speculator | None,
    behind: tuple[Cache, int],
) -> Iterator[Event]:
    """`generate` behind its checks; `behind` is a cache, and how far into the prompts it is."""
    cache, known = behind
    prompts = [np.asarray(row.request.prompt, np.int32)[known:] for row in rows]
    images = _side_by_side([row.request.images for row in rows], known)
    cache, y = decoder.prefill(cache, prompts, how=prefill, images=images)
    first = decoder.first(cache, y, settings)
    rounds = (
        _singly(decoder, rows, settings, cache, first)
        if speculator is None
        else _drafting(decoder, speculator, rows, settings, cache, first)
    )
    for made in rounds:
        for i, row in enumerate(rows):
            if row.finish is not None or not made.count[i]:
                continue
            if not np.isfinite(made.log_probability[i, : made.count[i]]).all():
                raise NotFinite(i)
            new = made.tokens[i, : made.count[i]].tolist()
            kept, text = row.take(new)
            logp = tuple(made.log_probability[i, :kept].tolist())
            yield Event(i, tuple(new[:kept]), logp, text, row.finish)


def _one_each(drawn: decode.Drawn, count: np.ndarray) -> Round:
    """At most one token a row as a round."""
    none = np.zeros_like(count)
    return Round(np.asarray(drawn[0])[:, None], count, np.asarray(drawn[1])[:, None], none, none)


def _singly(
    decoder: Decoder, rows: list[Row], settings: Settings, cache: Cache, drawn: decode.Drawn
) -> Iterator[Round]:
    """Rounds of one token a row. The next one is under way while one is read and shown.

    So a row that ends by what it said is in one more round, whose token nobody takes.
    """
    count = np.ones(len(rows), np.int32)
    for number in range(1, max(row.request.max_tokens for row in rows) + 1):
        goes_on = [row.finish is None and row.request.max_tokens > number for row in rows]
        following = None
        if any(goes_on):
            known = max(len(row.request.prompt) for row, on in zip(rows, goes_on, strict=True) if on) + number
            cache = decoder.room(cache, known)
            cache, following = decoder.draw(cache, drawn[0], np.array(goes_on, np.int32), settings)
        yield _one_each(drawn, count)
        if following is None or all(row.finish for row in rows):
            return
        drawn, count = following, np.array(goes_on, np.int32)


def _drafting(
    decoder: Decoder,
    speculator: Speculator,
    rows: list[Row],
    settings: Settings,
    cache: Cache,
    drawn: decode.Drawn,
) -> Iterator[Round]:
    """Rounds of drafts that are verified; each begins when the one before was read."""
    yield _one_each(drawn, np.ones(len(rows), np.int32))
    token = np.asarray(drawn[0])
    limit = decoder.setup.config.max_position_embeddings
    while not all(row.finish for row in rows):
        active = np.array([row.finish is None for row in rows])
        known = max(row.known for row in rows if row.finish is None)
        cache = decoder.room(cache, min(known + speculator.most, limit))  # what is behind the limit no row takes
        cache, made = speculator.round(cache, token, active, settings)
        yield made
        newest = made.tokens[np.arange(len(rows)), np.maximum(made.count - 1, 0)]
        token = np.where(made.count > 0, newest, token)


def _side_by_side(images: Sequence[Images | None], known: int) -> Images | None:
    """The images of rows, each given by itself, side by side, counted from `known`; None if no row has any."""
    given = [each for each in images if each is not None]
    if not given:
        return None
    b, slots, patches, width = len(images), *(max(each.patches.shape[axis] for each in given) for axis in (1, 2, 3))
    shapes = ((b, slots, patches, width), (b, slots, 2), (b, slots))
    out = Images(*map(np.zeros, shapes, (given[0].patches.dtype, np.int32, np.int32)))
    for row, own in enumerate(images):
        if own is not None:  # else its slots stay empty
            n, p = own.patches.shape[1:3]
            out.patches[row, :n, :p], out.grid[row, :n] = own.patches[0], own.grid[0]
            out.start[row, :n] = own.start[0] - known
    return out
