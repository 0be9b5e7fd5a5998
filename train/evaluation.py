"""The loss on held-out text."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from dsflash_jax.flow import Batch
from dsflash_jax.loss import CrossEntropy
from train import metrics, step, tokenizer
from train.config import Run
from train.step import TrainState


def score(config: Run, mesh: Any, params: Any, batch: Batch) -> tuple[CrossEntropy, Any, Any]:
    """Sums over a held-out batch, its rows that found no room, and how many of its targets are bytes of text.

    In the parts of a step: a model that trains so may have no room for more at once.
    """

    def part(batch: Batch) -> tuple[CrossEntropy, Any, Any]:
        text = jnp.sum(batch.loss_mask * (batch.targets >= tokenizer.SPECIALS))
        return *step.evaluate(config.inference, params, batch, mesh), text

    if config.accumulate == 1:
        return part(batch)
    return jax.tree.map(partial(jnp.sum, axis=0), jax.lax.map(part, batch))


def evaluate(score: Any, state: TrainState, at: int, heldout: list[Batch], log: metrics.Log, console: Console) -> None:
    """Held-out loss in nats a byte of text: all predicted tokens count, document ends included, over the bytes.

    Rows that found no room are missing in it, so their number stands beside it.
    """
    sums, missing, texts = zip(*(jax.device_get(score(state.params, batch)) for batch in heldout), strict=True)
    nll, tokens, text = sum(float(s.nll) for s in sums), sum(float(s.tokens) for s in sums), sum(map(float, texts))
    values = {"nats_per_byte": nll / text, "nll": nll / tokens, "accuracy": sum(float(s.hits) for s in sums) / tokens}
    dropped = int(sum(missing))
    log.write("heldout", at, values | {"bytes": int(text)} | ({"dropped": dropped} if dropped else {}))
    short = f", without {dropped:,} rows that found no room: raise layout.capacity" if dropped else ""
    result = f"held out {values['nats_per_byte']:.4f} nats a byte over {int(text):,} bytes"
    metrics.say(console, f"step {at}: {result}{short}")
