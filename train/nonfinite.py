"""Steps with a number that is not finite: which number, and which text."""

from __future__ import annotations

import numpy as np

from dsflash_jax import model
from dsflash_jax.params import leaves
from train.config import Run
from train.data import Batches
from train.metrics import few
from train.saver import Saver
from train.step import Metrics


class NonFinite(RuntimeError):
    """A loss or gradient was not finite; the message says where and what to do."""


def check(config: Run, at: int, number: int, made: Metrics, batches: Batches, saver: Saver) -> None:
    """Raise NonFinite if a number of step `at`, made of the batch `number`, is not finite."""
    if not made.finite.everything:
        saved = saver.latest()
        raise NonFinite(
            f"step {at}: {_blame(config, made)}. Nothing of it was kept, and in {config.out} "
            + ("there is no checkpoint yet. " if saved is None else f"the checkpoint of step {saved} is untouched. ")
            + "Start again with a lower optim.peak, a lower optim.clip (now "
            f"{config.optim.clip:g}, 0 clips nothing) or a longer optim.warmup_steps, in another folder with out=...; "
            f"or look at the text of this step: {few([piece for row in batches.contents(number) for piece in row])}"
        )


def _blame(config: Run, made: Metrics) -> str:
    """Which numbers of a step are not finite."""
    names = list(leaves(model.declare(config.model)))

    def some(what: str, finite: np.ndarray) -> list[str]:
        bad = [name for name, ok in zip(names, finite, strict=True) if not ok]
        return [f"the {what} of {few(bad)}"] if bad else []

    f = made.finite
    if not f.routed:
        return (f"{int(made.report.dropped.sum()):,} rows found no room on the way to their experts or owners: raise "
                f"layout.capacity={config.layout.capacity:g}, or set it to 0")  # fmt: skip
    parts = [] if f.loss else [f"the loss ({float(made.report.loss)})"]
    parts += some("gradients", f.gradients)
    if not parts:  # a fault of the update, then; otherwise these two only follow
        parts = some("new weights", f.weights) + ([] if f.optimiser else ["the optimiser state"])
    return f"not finite: {'; '.join(parts)}"
