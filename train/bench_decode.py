"""`dsflash bench decode`: tokens a second of plain and of speculative decoding, at a context that is filled with zeros.

No speed depends on what the weights are, but for how many drafts are accepted. So three figures bound it: plain
decoding; a draft head that never learnt, whose drafts are refused nearly all; and the same head where every draft is
what the run before said, the most that drafting can give. All run greedily, each with its own compiled programs. In
bfloat16 two programs may say two things, so a few of the right drafts may be refused, too: the share is printed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dsflash_jax import cache, draft, model, modes, sampling, speculate
from dsflash_jax.config import Config, need
from dsflash_jax.decode import Decoder
from dsflash_jax.sharding import Layout
from train import main
from train.config import Run

# The draft head that a model without one is given for this: the released block size, and as few experts as it has.
STAGES, BLOCK, RANK, TAPS = 1, 5, 16, 2
LINE = "{:<26} {:>12} {:>10} {:>14} {:>11}"


def decode(
    run: Run, tokens: int = 64, rows: int = 1, context: int = 0, console: Console | None = None
) -> dict[str, Any]:
    """Decode `tokens` of each of `rows` rows behind `context` others in each way, and print how fast.

    By default the context is half of what the model reads. A model without a draft head is given one of a stage.
    Raises ValueError for numbers out of range.
    """
    c = with_head(run.model)
    context = context or c.max_position_embeddings // 2
    block = c.dspark_block_size
    need(tokens >= 1 and rows >= 1, f"--tokens and --rows must be at least 1, got {tokens} and {rows}")
    need(tokens > block, f"--tokens {tokens} may be one round of {block} drafts, too short to time: ask for more")
    room = context + 2 * tokens + 2 * (block + 1)  # the first half is not timed
    need(room <= c.max_position_embeddings,
         f"--context {context}, twice {tokens} tokens and the drafts exceed max_position_embeddings="
         f"{c.max_position_embeddings}: ask for less")  # fmt: skip
    main.check_devices()
    setup = replace(run.inference, config=c, layout=Layout())
    key = jax.random.key(run.seed)
    w = main.jit(partial(model.init, model.declare(c) | draft.declare(c)), main.QUICK)(key)
    console = console or Console()
    say = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)  # noqa: E731
    say(f"jax {jax.__version__} on {jax.devices()[0].device_kind}: {rows} rows, {tokens} tokens each behind {context}, "
        f"{setup.compute.dtype}, blocks of {block}")  # fmt: skip
    say(LINE.format("", "tokens/s", "of plain", "tokens a round", "accepted"))
    decoder = Decoder(setup, w)
    begin = lambda: filled(decoder, rows, room, context)  # noqa: E731
    seconds = plainly(decoder, begin(), rows, tokens)
    lines = [line("plain", rows * tokens, seconds, None, rows * tokens / seconds)]
    say(show(lines[0]))
    known = np.zeros((rows, room), np.int32)
    for name, proposer in (("drafts, head not trained", speculate.propose), ("drafts, all of them right", None)):
        fast = speculate.Speculator(decoder, proposer=proposer or knowing(known))
        texts, count, seconds = drafting(fast, begin(), rows, tokens)
        for row, text in zip(known, texts, strict=True):
            row[context : context + len(text)] = text
        lines.append(line(name, count, seconds, fast.statistics, lines[0]["tokens_a_second"]))
        say(show(lines[-1]))
    return {
        "device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows, "tokens": tokens,
        "context": context, "block": block, "lines": lines,
    }  # fmt: skip


def with_head(c: Config) -> Config:
    """The model itself, or with a draft head that reads its last layers."""
    if c.num_nextn_predict_layers:
        return c
    table = [replace(spec, tap=i >= c.num_hidden_layers - TAPS) for i, spec in enumerate(c.table)]
    return c.with_modes(
        modes.text(table), num_nextn_predict_layers=STAGES, dspark_block_size=BLOCK, dspark_markov_rank=RANK,
        dspark_n_routed_experts=c.n_routed_experts, dspark_num_experts_per_tok=c.num_experts_per_tok,
    )  # fmt: skip


def filled(decoder: Decoder, rows: int, room: int, context: int) -> cache.Cache:
    """A cache that says it holds `context` tokens of each row; all of it is zero."""
    held = decoder.begin(rows, room)
    at = lambda n: jnp.full((rows,), n, jnp.int32)  # noqa: E731
    return replace(held, length=at(context), stored={r: at(context // r) for r in held.stored})


def plainly(decoder: Decoder, held: cache.Cache, rows: int, tokens: int) -> float:
    """Twice `tokens` tokens of each row by plain decoding, and the seconds of the second half."""
    settings, count = sampling.settings(rows, temperature=0.0), jnp.ones((rows,), jnp.int32)
    token = jnp.zeros((rows,), jnp.int32)
    for _ in range(2):
        begin = time.perf_counter()
        for _ in range(tokens):
            held, (token, _) = decoder.draw(held, token, count, settings)
        token.block_until_ready()
    return time.perf_counter() - begin


def drafting(
    fast: speculate.Speculator, held: cache.Cache, rows: int, tokens: int
) -> tuple[list[list[int]], int, float]:
    """Each row's text of twice `tokens` tokens or a few more in rounds of drafts; new ones of the second half, and its
    seconds."""
    settings, texts = sampling.settings(rows, temperature=0.0), [[0] for _ in range(rows)]
    shortest = lambda: min(map(len, texts)) - 1  # noqa: E731
    total = lambda: sum(map(len, texts))  # noqa: E731
    half, begin = None, 0.0
    while shortest() < 2 * tokens:
        if half is None and shortest() >= tokens:
            half, begin = total(), time.perf_counter()
            fast.statistics.clear()
        active = np.array([len(text) <= 2 * tokens for text in texts])
        held, made = fast.round(held, np.array([text[-1] for text in texts], np.int32), active, settings)
        for row, text in enumerate(texts):
            text += made.tokens[row, : made.count[row]].tolist()
    assert half is not None, "a round gives a row a token at least, and there are as many behind the half"
    return texts, total() - half, time.perf_counter() - begin


def knowing(known: np.ndarray) -> speculate.Propose:
    """A proposer that runs the draft head and then says what is `known` to come, so that its work is timed, too."""

    def propose(setup: Any, w: Any, held: cache.Cache, token: Any, settings: Any) -> speculate.Proposal:
        made = speculate.propose(setup, w, held, token, settings)
        size = made.tokens.shape[1]
        right = speculate.oracle(known, setup.config.vocab_size, size)(setup, w, held, token, settings)
        broken = jnp.isnan(made.logp).any(axis=-1) | jnp.isnan(made.confidence)  # never; the head must be there to know
        return replace(right, tokens=jnp.where(broken, made.tokens, right.tokens))

    return propose


def line(name: str, count: int, seconds: float, seen: speculate.Statistics | None, plain: float) -> dict[str, Any]:
    """One way's figures."""
    speed = count / seconds
    drafted = {} if seen is None else seen.as_json()
    return {"way": name, "tokens_a_second": speed, "of_plain": speed / plain} | drafted


def show(made: dict[str, Any]) -> str:
    """One line of the table."""
    a_round = made.get("tokens_a_round")
    accepted = None if a_round is None else sum(made["accepted"]) / max(sum(made["drafted"]), 1)
    return LINE.format(
        made["way"], f"{made['tokens_a_second']:.1f}", f"{made['of_plain']:.2f}",
        "" if a_round is None else f"{a_round:.2f}", "" if accepted is None else f"{accepted:.0%}",
    )  # fmt: skip
