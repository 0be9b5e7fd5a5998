"""The order of events of a training run: `dsflash train CONFIG` or `python -m train.main CONFIG`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dsflash_jax import model, sample
from dsflash_jax.model import Batch
from dsflash_jax.params import leaves
from train import data, metrics, step, tokenizer
from train.config import Run
from train.data import Batches
from train.saver import Saver
from train.step import Metrics, TrainState


class NonFinite(RuntimeError):
    """A loss or gradient was not finite; the message says where and what to do."""


class Stop:
    """Whether somebody asked the run to end; the first signal asks, a second one interrupts."""

    def __init__(self) -> None:
        self.asked: str | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = signal.Signals(number).name


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Turn Ctrl-C and SIGTERM into a request to save and leave after the current step."""
    stop = Stop()
    old = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def run(config: Run, json_path: Path | None = None) -> int:
    """Train to the end, or from the newest checkpoint to the end; returns the exit code.

    Leaves checkpoints, metrics.jsonl, loss.png, config.json and sample.txt in `config.out`.
    """
    console = Console()
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config.model.to_json(), indent=2) + "\n")
    batches = data.batches(config.data)
    heldout = [_batch(b) for b in data.batches(config.data, "heldout", n_batches=config.eval_batches)]
    saver = Saver(config)
    state = _start(config, saver, batches, console)
    log = metrics.Log(out / "metrics.jsonl", int(state.step))
    try:
        state, stopped = _loop(config, state, batches, heldout, saver, log, console)
    except NonFinite as error:
        console.print(f"[red]stopped:[/] {error}")
        return 1
    finally:
        saver.close()
        batches.close()
    metrics.plot(log, out / "loss.png", out.name)
    if stopped:
        console.print(f"{stopped}: saved step {int(state.step)} in {out}; the same command goes on from there")
        return 0
    return _finish(config, state, log, out, console, json_path)


def _start(config: Run, saver: Saver, batches: Batches, console: Console) -> TrainState:
    """The newest checkpoint, or a fresh state; also says what is about to be trained."""
    declared = leaves(model.declare(config.model)).values()
    size = sum(w.size for w in declared)
    console.print(
        f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {size:,} parameters, layers {config.model.modes}"
    )
    packed = batches.packed
    console.print(f"{config.data.source}: {len(packed.documents):,} documents, {len(packed.tokens):,} tokens")
    if saver.latest() is None:
        return jax.jit(partial(step.initial, config))()
    like = jax.eval_shape(partial(step.initial, config))
    state, position = saver.restore(like)
    batches.set_state(position)
    console.print(f"going on from step {int(state.step)}")
    return state


def _loop(
    config: Run,
    state: TrainState,
    batches: Batches,
    heldout: list[Batch],
    saver: Saver,
    log: metrics.Log,
    console: Console,
) -> tuple[TrainState, str | None]:
    """Steps to the end or to a signal, whose name is returned.

    A step's metrics are read after the next step was started, so that the device never waits for the host.
    """
    train = jax.jit(step.make_step(config), donate_argnums=0)
    score = jax.jit(partial(step.evaluate, config.model, config.compute))
    first, pending = int(state.step), None
    with stop_signals() as stop, metrics.screen(console, first, config.steps) as screen:

        def settle() -> None:
            if pending is not None:
                _report(config, pending, log, screen)

        for at in range(first + 1, config.steps + 1):
            state, made = train(state, _batch(next(batches)))
            settle()
            pending = (at, made)
            asked = stop.asked
            last = at == config.steps or asked is not None
            if last or at % config.eval_every == 0 or at % config.save_every == 0:
                settle()
                pending = None
            if at % config.eval_every == 0 or at == config.steps:
                _evaluate(score, state, at, heldout, log, screen)
            if last or at % config.save_every == 0:
                saver.save(state, batches.get_state())
            if asked:
                return state, asked
    return state, None


def _report(config: Run, pending: tuple[int, Metrics], log: metrics.Log, screen: metrics.Screen) -> None:
    """Check and write one step's metrics."""
    at, made = pending[0], jax.device_get(pending[1])
    if not made.finite:
        raise NonFinite(_blame(config, at, made))
    values = metrics.record(config.model, made)
    report = at % config.log_every == 0 or at == config.steps
    screen.step(at, values, report)
    if report:
        log.write("train", at, values | {"tokens_per_second": round(screen.tokens_per_second, 1)})


def _blame(config: Run, at: int, made: Metrics) -> str:
    """What was not finite, where, and what to do."""
    names = [n for n, ok in zip(leaves(model.declare(config.model)), made.finite_leaves, strict=True) if not ok]
    what = f"loss {float(made.report.loss)}" if not np.isfinite(made.report.loss) else "loss finite"
    where = f"gradients of {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return (
        f"step {at}: {what}, not finite: {where if names else 'no gradient'}. The weights are those of step {at - 1}, "
        f"the last checkpoint in {config.out} is untouched. Lower optim.peak or optim.clip, lengthen "
        "optim.warmup_steps, or look at the batch of this step; the same command goes on from the checkpoint"
    )


def _evaluate(
    score: Any, state: TrainState, at: int, heldout: list[Batch], log: metrics.Log, screen: metrics.Screen
) -> None:
    """Held-out loss in nats a byte of text: all predicted tokens count, document ends included, over the bytes."""
    sums = [jax.device_get(score(state.params, batch)) for batch in heldout]
    nll, tokens = sum(float(s.nll) for s in sums), sum(float(s.tokens) for s in sums)
    text = sum(float(jnp.sum(b.loss_mask * (b.targets >= tokenizer.SPECIALS))) for b in heldout)
    values = {"nats_per_byte": nll / text, "nll": nll / tokens, "accuracy": sum(float(s.hits) for s in sums) / tokens}
    log.write("heldout", at, values | {"bytes": int(text)})
    screen.console.print(f"step {at}: held out {values['nats_per_byte']:.4f} nats a byte over {int(text):,} bytes")


def _finish(
    config: Run, state: TrainState, log: metrics.Log, out: Path, console: Console, json_path: Path | None
) -> int:
    """Sample, and say what was made."""
    result: dict[str, Any] = {"steps": int(state.step), "out": str(out), **log.lines("heldout")[-1]}
    if config.sample_tokens:
        prompt = np.concatenate([[config.model.bos_token_id], tokenizer.encode(config.sample_prompt)])
        ids = sample.continue_ids(
            config.model, config.compute, state.params, prompt, config.sample_tokens, config.sample_temperature,
            jax.random.key(config.seed),
        )  # fmt: skip
        text = config.sample_prompt + tokenizer.decode(ids)
        (out / "sample.txt").write_text(text)
        console.rule("sample")
        console.print(text, markup=False, highlight=False)
        console.rule()
        result["sample"] = text
    console.print(f"checkpoints, metrics.jsonl, loss.png and sample.txt are in {out}")
    if json_path:
        json_path.write_text(json.dumps(result, indent=2))
    return 0


def _batch(arrays: dict[str, np.ndarray]) -> Batch:
    return Batch(**{name: jnp.asarray(a) for name, a in arrays.items()})


if __name__ == "__main__":
    from dsflash_jax.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
