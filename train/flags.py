"""The flags of `dsflash generate`. Imports nothing that a command line's help would wait for."""

from __future__ import annotations

import argparse
from pathlib import Path

# What flags set for all prompts, and a line of a file for its own; the fields of `sample.Request` of these names.
DRAWING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "stop_ids")
GENERATE = """Go on from prompts with the newest checkpoint of a run, or with a folder of config.json and weights.npz.

One prompt is streamed to the terminal. A file has a JSON object a line, {"prompt": "..."} or {"ids": [...]}, with
max_tokens, temperature, top_k, top_p, min_p, seed, stop and stop_ids where they differ from the flags; prompt i has
the seed --seed + i. Each becomes a line {"line", "text", "ids", "finish"}, in order. A folder of weights.npz takes ids,
for it has no tokenizer, and is rounded as its config.json says. key=value changes model.*, compute.*, quantize.*."""


def add(generate: argparse.ArgumentParser) -> None:
    """Add them to a parser."""
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


def read_ids(text: str) -> tuple[int, ...]:
    """Ids between commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected ids as 1,2,3, got {text!r}") from error
