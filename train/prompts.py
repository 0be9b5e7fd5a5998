"""What `dsflash generate` reads and writes: prompts as lines of JSON, and completions as text or as lines of JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dsflash_jax.config import build, need
from dsflash_jax.output import writing
from dsflash_jax.sample import Event, Request, join
from dsflash_jax.speculate import Statistics
from train import tokenizer
from train.metrics import say


@dataclass(frozen=True)
class Line:
    """A line of a file of prompts: a text or ids, and what it sets for itself (see `sample.Request`)."""

    prompt: str | None = None
    ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt and where it was given: "prompts.jsonl line 3", or nothing for the command line."""

    given: Line
    number: int = 0  # of its line, from 1
    where: str = ""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the place in front of what is wrong with this prompt."""
        try:
            yield
        except ValueError as error:
            said = str(error).replace(" of row 0", "")
            raise ValueError(f"{self.where}: {said}" if self.where else said) from error

    def request(self, common: dict[str, Any], seed: int, bos: int, text: bool) -> Request:
        """As a request: `common` fields hold where the line says nothing, a text follows the id `bos`."""
        own = {"seed": seed} | common | {key: value for key, value in asdict(self.given).items() if value is not None}
        words, ids = own.pop("prompt", None), own.pop("ids", None)
        if words is not None:
            need(text, "this checkpoint comes without a tokenizer: give ids in place of a prompt")
            ids = [bos, *tokenizer.encode(words).tolist()]
        stop = own.pop("stop", ())
        return Request(np.asarray(ids), stop=(stop,) if isinstance(stop, str) else tuple(stop), **own)


def read(path: Path) -> list[Prompt]:
    """The prompts of a file, one a line; empty lines are skipped. A bad line raises ValueError with its number."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # a text may hold other ends of lines
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be read: {reason}; give a file with one JSON object a line") from error
    prompts = [parse(line, i, f"{path} line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    need(len(prompts) > 0, f"{path} has no prompts: give one JSON object a line")
    return prompts


def parse(line: str, number: int, where: str) -> Prompt:
    """One line of a file of prompts."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected a JSON object, got what cannot be read: {error}") from error
    given = build(Line, data, where)
    need((given.prompt is None) != (given.ids is None), f'{where}: give either "prompt", a text, or "ids"')
    return Prompt(given, number, where)


class Terminal:
    """One completion, shown while it comes."""

    def __init__(self, prompt: Prompt, text: bool, logprobs: bool) -> None:
        self._console, self._text, self._logprobs = Console(highlight=False), text, logprobs
        self._events: list[Event] = []
        if self._console.is_terminal and prompt.given.prompt:
            self._show(prompt.given.prompt, "bold")

    def add(self, number: int, event: Event) -> None:
        """Show what came."""
        self._events.append(event)
        self._show(event.text if self._text else "".join(f"{i} " for i in event.ids))

    def close(self) -> None:
        """End the line, and list the log-probabilities if they are asked for."""
        self._console.print()
        if self._logprobs:
            table = Table("id", *["bytes"] * self._text, "log-probability")
            for event in self._events:
                for i, logp in zip(event.ids, event.log_probabilities, strict=True):
                    table.add_row(str(i), *[repr(tokenizer.bytes_of(i))[1:]] * self._text, f"{logp:.4f}")
            self._console.print(table)

    def _show(self, text: str, style: str | None = None) -> None:
        if self._console.is_terminal:  # what a model says must not steer it
            text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        self._console.print(text, end="", style=style, markup=False, soft_wrap=True)


class Lines:
    """Completions as lines of JSON in the order of the prompts, written as soon as those before them are.

    When it is closed early, those that are complete are written, whatever is missing before them. A file that cannot be
    written raises ValueError; it ends with the last line that is whole.
    """

    def __init__(self, path: Path | None, prompts: list[Prompt], text: bool, logprobs: bool) -> None:
        self._path, self._prompts, self._text, self._logprobs = path, prompts, text, logprobs
        self._file: io.FileIO | None = None
        if path is not None:
            with writing(f"--out {path}"):
                self._file = path.open("wb", buffering=0)
        self._events: dict[int, list[Event]] = {}
        self._ready: dict[int, dict[str, Any]] = {}
        self.written = 0

    def add(self, number: int, event: Event) -> None:
        """Take what came of a prompt."""
        self._events.setdefault(number, []).append(event)
        if event.finish is None:
            return
        done = join(self._events.pop(number))
        record: dict[str, Any] = {"line": self._prompts[number].number}
        record |= {"text": done.text if self._text else None, "ids": list(done.ids)}
        record |= {"logprobs": [round(p, 6) for p in done.log_probabilities]} if self._logprobs else {}
        self._ready[number] = record | {"finish": done.finish}
        while self.written in self._ready:
            self._write(self._ready.pop(self.written))

    def close(self) -> None:
        """Write what waits."""
        try:
            for number in sorted(self._ready):
                self._write(self._ready.pop(number))
        finally:
            if self._file is not None:
                self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False)
        if self._file is None:
            print(line, flush=True)
        else:
            with writing(f"--out {self._path}"):
                append(self._file, f"{line}\n".encode())
        self.written += 1


def append(file: io.FileIO, data: bytes) -> None:
    """Write all of the data to the end of a file, or raise OSError and leave none of it there."""
    whole = file.tell() if file.seekable() else 0
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        with suppress(OSError):  # a device cannot be cut
            file.seek(whole)
            file.truncate()
        raise


def show_drafts(counted: Statistics, console: Console) -> None:
    """How many drafts there were at each place of a round, and how many of them were accepted."""
    made = counted.as_json()
    table = Table("draft", "verified", "accepted", "share")
    for place, row in enumerate(zip(made["drafted"], made["accepted"], made["acceptance"], strict=True), 1):
        share = "-" if row[2] is None else f"{row[2]:.1%}"
        table.add_row(str(place), f"{row[0]:,}", f"{row[1]:,}", share)
    console.print(table)
    if counted.rounds:
        say(console, f"{made['tokens_a_round']:.2f} tokens a round over {counted.rounds:,} rounds")
