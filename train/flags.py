"""The flags of `dsflash generate` and `dsflash compile`. Imports nothing that a command line's help would wait for."""

from __future__ import annotations

import argparse
from pathlib import Path

# What flags set for all prompts, and a line of a file for its own; the fields of `sample.Request` of these names.
DRAWING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_ids")
GENERATE = """Go on from prompts with the newest checkpoint of a run, or with a folder of config.json and weights.npz.

One prompt is streamed to the terminal. A file has a JSON object a line, {"prompt": "..."} or {"ids": [...]}, with
max_tokens, temperature, top_k, top_p, min_p, seed, stop and stop_ids where they differ from the flags; prompt i has
the seed --seed + i. Each becomes a line {"line", "text", "ids", "finish"}, in order. A folder of weights.npz takes ids,
for it has no tokenizer, and is rounded as its config.json says. key=value changes model.*, compute.*, quantize.*,
and layout.* spreads rows and weights over devices."""

COMPILE = """Compile the training step of a run by libtpu (extra [aot]), on a machine without a TPU, and print how every
parameter is split, the memory of a device by kind, FLOPs, collectives and compile time.

With --decode it is the decode step: one token of each row, weights in the compute dtype, and a cache with room for
--seq-len tokens a row, packed as far as quantize.* rounds.

Exit status 1 if it does not fit."""


def add(generate: argparse.ArgumentParser) -> None:
    """Add those of `dsflash generate` to a parser."""
    generate.add_argument("source", metavar="SOURCE", help="the folder of a run, or of config.json and weights.npz")
    given = generate.add_mutually_exclusive_group(required=True)
    given.add_argument("--prompt", metavar="TEXT", help="a text to go on from, behind the id that begins one")
    given.add_argument("--ids", metavar="1,2,3", type=read_ids, help="ids to go on from, with nothing before them")
    given.add_argument("--prompts", metavar="FILE.jsonl", type=Path, help="many prompts, one JSON object a line")
    generate.add_argument("--out", metavar="FILE.jsonl", type=Path, help="write completions there, not to the terminal")
    for flag, kind, what in (
        ("--max-tokens", int, "new tokens at most; default 128"),
        ("--temperature", float, "default 1; 0 takes the likeliest token"),
        ("--top-k", int, "draw among the K likeliest tokens; default 0, all"),
        ("--top-p", float, "draw among the likeliest tokens of this probability; default 1, all"),
        ("--min-p", float, "draw among tokens of this share of the largest probability; default 0, all"),
        ("--seed", int, "of the random numbers; default 0"),
    ):
        generate.add_argument(flag, metavar="N" if kind is int else "X", type=kind, help=what)
    generate.add_argument("--stop", metavar="TEXT", action="append", help="end before this text; may be given again")
    generate.add_argument("--stop-ids", metavar="1,2,3", type=read_ids, help="end with one of these ids")
    generate.add_argument(
        "--logprobs", action="store_true", help="also each token's log-probability: temperature 1, unfiltered"
    )
    generate.add_argument("--batch", metavar="N", type=int, default=8, help="prompts that run together; default 8")
    how = "full, or replay: the upper half on a prompt's last window alone, which is approximate beyond a window"
    generate.add_argument("--prefill", choices=["full", "replay"], default="full", help=how)
    generate.add_argument(
        "--compare-exact", action="store_true", help="run both prefills and say how far they are apart"
    )
    generate.add_argument(
        "--draft", metavar="N", type=int, help="draft N tokens a round and verify them; 0 for all that the head makes"
    )
    generate.add_argument(
        "--threshold", metavar="X", type=float, default=0.0, help="with --draft, least confidence of one; default 0"
    )
    generate.add_argument(
        "--save-prefix", metavar="FILE", type=Path, help="also store what the first prompt left in the cache there"
    )
    generate.add_argument(
        "--prefix", metavar="FILE", type=Path, help="go on from a stored prompt, with which all prompts begin"
    )
    generate.add_argument("--chunk", metavar="N", type=int, default=512, help="prompt tokens run at once; default 512")


def add_compile(compile_: argparse.ArgumentParser) -> None:
    """Add those of `dsflash compile`."""
    compile_.add_argument("config", metavar="CONFIG", help="a name in configs/, or a Python file that defines config")
    compile_.add_argument(
        "--topology", metavar="KIND:SIZE", required=True, help="v5p:4x8x8; with --search the kind alone"
    )
    compile_.add_argument("--seq-len", metavar="N", type=int, help="tokens of a row, in place of data.seq_len")
    compile_.add_argument("--decode", action="store_true", help="the decode step in place of the training step")
    compile_.add_argument(
        "--rows", metavar="B", type=int, help="with --decode, rows that decode together; default one a part of rows"
    )
    compile_.add_argument("--mesh", metavar="AXIS=N,...", help="axes of the layout, in place of its own; others are 1")
    compile_.add_argument("--no-code", action="store_true", help="stop when memory is laid out, after some minutes")
    compile_.add_argument("--search", action="store_true", help="find the smallest topology of the kind that it fits")


def read_ids(text: str) -> tuple[int, ...]:
    """Ids between commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected ids as 1,2,3, got {text!r}") from error
