"""`dsflash generate`: text from the newest checkpoint of a run, or ids from a checkpoint's own files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dsflash_jax import checkpoint, decode, parity, prefix, sample, verdict
from dsflash_jax.config import Compute, Config, Quantize, need
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Setup
from dsflash_jax.output import writing
from dsflash_jax.overrides import override
from dsflash_jax.sample import Event, NotFinite, Request, TextOf
from dsflash_jax.speculate import Speculator
from train import prompts, saver, tokenizer
from train.main import check_devices
from train.metrics import say
from train.prompts import Line, Lines, Prompt, Terminal, show_drafts
from train.saver import Inference

ALL = Quantize(kv_fp4=True, index_fp4=True, window_fp8=True, linear_fp8=True)  # as the released model is run


@dataclass(frozen=True)
class Asked:
    """What the command line asks for."""

    source: str  # folder of a run, or one with config.json and weights.npz
    overrides: Sequence[str] = ()  # of `saver.Inference`
    prompts: Path | None = None  # lines of JSON
    prompt: Line = Line()  # if there is no such file
    out: Path | None = None  # lines of JSON; else the terminal
    common: dict[str, Any] = field(default_factory=dict)  # fields of `Request`, where a line of its own says nothing
    logprobs: bool = False
    batch: int = 8  # prompts that run together
    prefill: str = "full"
    compare: bool = False  # the replay with the full prefill
    drafts: int | None = None  # of a round, 0 for all that the head makes; None to draft nothing
    threshold: float = 0.0  # confidence below which a round's drafts are cut off
    chunk: int = 512  # tokens of a prompt that run at once
    save_prefix: Path | None = None  # where the first prompt's slots are stored
    prefix: Path | None = None  # stored slots that all prompts begin with


@dataclass(frozen=True)
class Source:
    """A model to decode with."""

    name: str  # for people
    decoder: Decoder
    text_of: TextOf | None  # None if only ids are known


def main(asked: Asked) -> dict[str, Any]:
    """Generate what is asked for and return the result for programs.

    "finished" in it is false after Ctrl-C, and where what the model says is not a number. Text, or lines of JSON, go to
    stdout or a file, all else to stderr. Raises ValueError, before anything runs, for a source or a prompt that is
    wrong. On any error what is complete is written.
    """
    check_devices()
    console = Console(stderr=True)
    need(asked.batch >= 1, f"--batch is how many prompts run together, at least 1, got {asked.batch}")
    need(asked.drafts is not None or asked.threshold == 0, "--threshold ends drafts early: give --draft N, too")
    need(asked.prefix is None or asked.prefix.is_file(),
         f"--prefix {asked.prefix} is no file: give one that --save-prefix wrote")  # fmt: skip
    listed = [Prompt(asked.prompt)] if asked.prompts is None else prompts.read(asked.prompts)
    source = load(asked, console)
    requests = list(checked(asked, source, listed))
    speculator = None if asked.drafts is None else Speculator(source.decoder, asked.drafts, asked.threshold)
    used = source.decoder.devices.layout.devices
    where = f"{used} x {jax.devices()[0].device_kind}" if used > 1 else jax.devices()[0].device_kind
    say(console, f"{source.name}, on {where}; the first tokens wait for compiling")
    result: dict[str, Any] = {"source": source.name, "prompts": len(listed), "prefill": asked.prefill}
    if asked.prefill == "replay":
        result["approximate"] = mark_replay(source, requests, console)
    if asked.save_prefix is not None:
        result["prefix_bytes"] = keep_prefix(asked, source, requests[0], console)
    if asked.compare:
        result["compared"] = compare(source, requests, asked.batch, console)
    finishes: dict[str, int] = {}
    began, tokens, finished = time.monotonic(), 0, True
    steady, behind = began, 0  # from the second token on, when programs are compiled
    with closing(output(asked, source, listed)) as shown:
        try:
            for number, event in events(asked, source, requests, speculator):
                shown.add(number, event)
                tokens += len(event.ids)
                if event.finish is None and not behind and tokens > len(event.ids):
                    steady, behind = time.monotonic(), tokens
                if event.finish is not None:
                    finishes[event.finish] = finishes.get(event.finish, 0) + 1
        except KeyboardInterrupt:
            finished = False
        except NotFinite as error:
            finished = False
            say(console, f"{listed[error.row].where or 'the prompt'}: {error.reason}")
    seconds = time.monotonic() - began
    ended = ", ".join(f"{count} by {finish}" for finish, count in sorted(finishes.items()))
    rate = (tokens - behind) / max(time.monotonic() - steady, 1e-9) if behind and tokens > behind else None
    speed = "" if rate is None else f", {rate:.1f} a second from the second one on"
    say(console, f"{tokens:,} tokens in {seconds:.1f} s with compiling{speed}; ended: {ended or 'none'}")
    if asked.out is not None:
        say(console, f"{sum(finishes.values())} completions in {asked.out}")
    if not finished:
        say(console, f"stopped: {sum(finishes.values())} of {len(listed)} prompts are complete")
    if speculator is not None:
        show_drafts(speculator.statistics, console)
        result["drafts"] = speculator.statistics.as_json()
    return result | {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_a_second": rate,
        "finishes": finishes,
        "finished": finished,
    }


def load(asked: Asked, console: Console) -> Source:
    """The model of a folder: the newest checkpoint of a run, whose ids are bytes, or config.json and weights.npz."""
    at = saver.folder(asked.source)
    need(at.is_dir(),
         f"{asked.source!r} is no folder: give that of a run of dsflash train, for example runs/demo, or one with the "
         "config.json and weights.npz of a checkpoint")  # fmt: skip
    change = partial(override, assignments=list(asked.overrides))
    if (at / "weights.npz").is_file():
        use = change(_released(named(at / "config.json")))
        adopt = partial(checkpoint.adopt, use.model)
        put = jnp.asarray if use.layout.devices == 1 else np.asarray  # not through one device to several
        w = parity.named(at / "weights.npz", lambda path: jax.tree.map(put, adopt(verdict.read(path))))
        name, text_of, classes = f"{asked.source}: weights.npz", None, _classes(at, use.model)
    else:
        step, use, w = saver.read_weights(asked.source, change, partial(say, console))
        name, text_of, classes = f"{asked.source}: step {step}", tokenizer.bytes_of, None
    setup = Setup(use.model, use.compute, quantize=use.quantize, layout=use.layout)
    return Source(f"{name}, {use.compute.dtype}", Decoder(setup, w, classes, chunk=asked.chunk), text_of)


def named(path: Path) -> Config:
    """A config.json; errors get its name."""
    need(path.is_file(), f"{path} is missing: a checkpoint has config.json beside weights.npz")
    made: Config = parity.named(path, Config.from_json)
    return made


def _released(c: Config) -> Inference:
    """How a checkpoint is run: rounded as the released model if its weights were stored so."""
    return Inference(c, Compute(dtype=c.dtype), Quantize() if c.quantization is None else ALL)


def _classes(at: Path, c: Config) -> np.ndarray | None:
    """The classes of ids that n-grams are hashed over."""
    if not c.engram_layer_ids:
        return None
    path = at / "inputs.npz"
    arrays = verdict.read(path) if path.is_file() else {}
    need("engram_token_map" in arrays,
         f"{at}: layers {list(c.engram_layer_ids)} have n-gram memory, so classes of ids are needed: an array "
         "engram_token_map in inputs.npz")  # fmt: skip
    return arrays["engram_token_map"]


def checked(asked: Asked, source: Source, listed: Sequence[Prompt]) -> Iterator[Request]:
    """The requests, all of which this model can meet."""
    seed, bos = asked.common.get("seed", 0), source.decoder.setup.config.bos_token_id
    common = {key: value for key, value in asked.common.items() if key != "seed"}
    for i, prompt in enumerate(listed):
        with prompt.named():
            request = prompt.request(common, seed + i, bos, source.text_of is not None)
            sample.check(source.decoder, request, source.text_of)
            yield request
    if asked.prefill == "replay" or asked.compare:
        decode.boundary(source.decoder.setup.config)


def output(asked: Asked, source: Source, listed: list[Prompt]) -> Terminal | Lines:
    """Where completions go."""
    text = source.text_of is not None
    if asked.out is None and asked.prompts is None:
        return Terminal(listed[0], text, asked.logprobs)
    return Lines(asked.out, listed, text, asked.logprobs)


def events(
    asked: Asked, source: Source, requests: list[Request], speculator: Speculator | None
) -> Iterator[tuple[int, Event]]:
    """The events of all requests, each with the request's number, one batch after the other.

    All batches have one shape and room for the longest request, so that a step is compiled once.
    """
    most, limit = (
        max(len(r.prompt) + r.max_tokens for r in requests),
        source.decoder.setup.config.max_position_embeddings,
    )
    room = min(most + (speculator.most if speculator is not None else 0), limit)
    generate = partial(
        sample.generate, source.decoder, text_of=source.text_of, prefill=asked.prefill, speculator=speculator,
        room=room, prefix=asked.prefix,
    )  # fmt: skip
    for start, group in groups(requests, asked.batch):
        filled = group + [replace(group[-1], max_tokens=1)] * (asked.batch - len(group) if start else 0)
        try:
            for event in generate(filled):
                if event.row < len(group):
                    yield start + event.row, event
        except NotFinite as error:
            raise NotFinite(start + error.row) from error


def keep_prefix(asked: Asked, source: Source, request: Request, console: Console) -> int:
    """Store the slots of a prompt, and return the file's bytes."""
    assert asked.save_prefix is not None
    ids = np.asarray(request.prompt, np.int32)
    rows = source.decoder.devices.filled(1)
    held, _ = source.decoder.prefill(source.decoder.begin(rows, len(ids)), [ids] * rows, how=asked.prefill)
    with writing(f"--save-prefix {asked.save_prefix}"):
        size = prefix.save(asked.save_prefix, source.decoder, held, 0, ids)
    say(console, f"{asked.save_prefix}: {len(ids):,} tokens in {size:,} bytes")
    return size


def groups(requests: list[Request], size: int) -> Iterator[tuple[int, list[Request]]]:
    """`size` requests at a time, with the number of the first."""
    for start in range(0, len(requests), size):
        yield start, requests[start : start + size]


def mark_replay(source: Source, requests: list[Request], console: Console) -> int:
    """Say for how many prompts the replay is not exact."""
    window = source.decoder.setup.config.sliding_window
    beyond = sum(len(r.prompt) > window for r in requests)
    which = f"approximate for {beyond} of {len(requests)} prompts, those of more than" if beyond else "exact up to"
    say(console, f"prefill by replay: {which} the window of {window} tokens")
    return beyond


def compare(source: Source, requests: list[Request], batch: int, console: Console) -> dict[str, Any]:
    """Both prefills of the prompts beyond a window, which differ: the largest difference of the logits behind each,
    and whether the likeliest id agrees."""
    window = source.decoder.setup.config.sliding_window
    requests = [r for r in requests if len(r.prompt) > window]
    if not requests:
        say(console, f"no prompt is longer than the window of {window} tokens: replay is exact, nothing to compare")
        return {"differences": [], "agrees": []}
    differences: list[float] = []
    agrees: list[bool] = []
    for _, group in groups(requests, batch):
        given = [np.asarray(r.prompt, np.int32) for r in group]
        full, replayed = (_behind(source.decoder, given, how) for how in ("full", "replay"))
        apart = np.abs(full - replayed).max(axis=1)
        differences += apart.tolist()
        agrees += ((full.argmax(axis=1) == replayed.argmax(axis=1)) & np.isfinite(apart)).tolist()
    say(console,
        f"replay and full prefill: logits of the next token differ by up to {np.max(differences):.3g}; the greedy "
        f"token is the same behind {sum(agrees)} of {len(agrees)} prompts")  # fmt: skip
    return {"differences": differences, "agrees": agrees}


def _behind(decoder: Decoder, given: list[np.ndarray], how: Any) -> np.ndarray:
    """The logits behind each prompt, [B, V]."""
    rows = decoder.devices.filled(len(given))
    filled = given + given[-1:] * (rows - len(given))
    _, y = decoder.prefill(decoder.begin(rows, max(map(len, given))), filled, how=how)
    return np.asarray(decoder.logits(y))[: len(given)]
