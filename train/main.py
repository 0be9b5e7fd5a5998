"""The order of events of a training run: `dsflash train CONFIG` or `python -m train.main CONFIG`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from errno import EISDIR, ENOTDIR
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import flax
import jax
import numpy as np
from rich.console import Console

from dsflash_jax import engram, layout_sheet, model, sample
from dsflash_jax.config import Config
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Batch
from dsflash_jax.output import write_json
from dsflash_jax.params import leaves
from train import data, evaluation, hosts, metrics, nonfinite, step, tokenizer
from train.config import Run
from train.data import Batches
from train.nonfinite import NonFinite
from train.placement import Placement, place
from train.saver import NotSaved, Saver, differences, folder, start_from
from train.step import Metrics, TrainState

QUICK, BRISK = 0, 1  # how hard XLA optimises for a CPU: little for what runs once, a bit more for the steps
FILES = ("config.json", "metrics.jsonl", "loss.png", "sample.txt")  # what a run leaves beside its checkpoints
AS_ASKED = "as asked"  # why a run stopped at the step `until`
READ = 8  # held-out pictures that the sample at the end reads
RowsOf = Callable[[np.ndarray, np.ndarray], np.ndarray]  # ids [B,T], positions [B,T] to rows [B,T,tables,N]


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


def run(config: Run, json_path: Path | None = None, until: int | None = None) -> int:
    """Train to the end, or from the newest checkpoint to the end; returns the exit status.

    0: the last step was reached, now or before; or a signal, or the step `until`, made it save and leave.
    1: a number was not finite, and nothing of that step was kept; or a checkpoint could not be written.
    Leaves checkpoints, metrics.jsonl, loss.png, config.json and sample.txt in `config.out`, and the result in
    `json_path`. Raises ValueError or FileNotFoundError, before anything is trained, for a run that cannot be: no
    device, no text, or a folder that holds the checkpoints of another run. Of many hosts each calls it; all return the
    same, and host 0 alone prints and writes all but the checkpoints.
    """
    out = folder(config.out)
    hosts.start()
    check_devices()
    hosts.check()
    first, console = hosts.first(), Console(quiet=not hosts.first())
    with hosts.together():
        placement = place(config)
        batches, heldout = _read(config, placement)
        if first:
            _make_folder(out)
    _agree(config, batches, out)
    saver = Saver(config)
    try:
        state = _start(config, placement, saver, batches, console)
        if first:
            (out / "config.json").write_text(json.dumps(config.model.to_json(), indent=2) + "\n")
        log = metrics.Log(out / "metrics.jsonl" if first else None, int(state.step))
        if int(state.step) == config.steps:
            metrics.say(console, f"{out} has reached its last step {config.steps} already: nothing to train")
            stopped = None
        else:
            state, stopped = _loop(config, placement, state, batches, heldout, saver, log, console, until)
        hosts.exchange()  # nobody leaves while another writes
    except (NonFinite, NotSaved) as error:
        unheard = not first and isinstance(error, NotSaved)  # host 0 may not know
        metrics.say(Console(stderr=True) if unheard else console, f"stopped: {error}")
        status = "not finite" if isinstance(error, NonFinite) else "not saved"
        _write(json_path, {"status": status, "out": str(out), "step": saver.latest() or 0, "error": str(error)})
        return 1
    finally:
        saver.close()
        batches.close()
    if log.path is None:
        return 0
    metrics.plot(log.path, out / "loss.png", out.name)
    result = {"status": stopped or "finished", "out": str(out), "step": int(state.step), "heldout": log.last("heldout")}
    if stopped:
        text = f"{stopped}: saved step {int(state.step)} in {out}; the same command goes on from there"
        metrics.say(console, text)
    else:
        result["sample"] = _sample(config, placement, state, out, console)
        sampled = " and sample.txt" if result["sample"] is not None else ""
        metrics.say(console, f"checkpoints, metrics.jsonl, loss.png{sampled} are in {out}")
    _write(json_path, result)
    return 0


def _agree(config: Run, batches: Batches, out: Path) -> None:
    """Refuse hosts that were started differently, read other documents, or do not share the folder of the run."""
    if jax.process_count() == 1:
        return
    facts = asdict(config) | {"jax": jax.__version__, "documents": batches.get_state()["corpus"]}
    facts["data"].pop("source")  # each may have its own copy
    alike, *others = map(json.loads, hosts.exchange(json.dumps(facts)))
    for host, other in enumerate(others, 1):
        if changed := sorted(differences("", alike, other)):
            raise ValueError(f"host {host} was not started as host 0, whose values come first: {'; '.join(changed)}")
    (name, *_) = hosts.exchange(f".shared-{uuid4().hex}")
    if hosts.first():
        (out / name).write_text("every host must see this\n")
    hosts.exchange()
    with hosts.together():
        if not (out / name).exists():
            raise ValueError(
                f"out={str(out)!r} must be one folder for all hosts, but what host 0 wrote there is not here"
            )
    if hosts.first():
        (out / name).unlink()


def _make_folder(out: Path) -> None:
    """Make the folder of a run and try whether its files can be written, before anything is trained."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            if (out / name).is_dir():
                raise IsADirectoryError(EISDIR, f"its {name} is a folder")
        if (out / "checkpoints").is_file():
            raise NotADirectoryError(ENOTDIR, "its checkpoints is a file")
        probe = out / ".writable"
        probe.write_text("a run must be able to write here\n")
        probe.unlink()
    except (OSError, ValueError, ImportError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"out={str(out)!r} cannot be the folder of a run: {reason}; give another one") from error


def jit(function: Any, effort: int, **options: Any) -> Any:
    """`jax.jit`; a CPU's compiler, whose time a small run mostly consists of, is told how hard to optimise."""
    if jax.default_backend() == "cpu":
        options["compiler_options"] = {"xla_backend_optimization_level": effort}
    return jax.jit(function, **options)


def check_devices() -> None:
    """Raise ValueError, with the way out, where JAX finds no device."""
    try:
        jax.devices()
    except RuntimeError as error:
        raise ValueError(
            f"JAX found no device with JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')!r}: {error}. Unset it to run "
            "on what there is, or install the extra for the accelerator (tpu or cuda)"
        ) from error


def _read(config: Run, placement: Placement) -> tuple[Batches, list[Batch]]:
    """Training batches and held-out ones, if anything is held out; with n-gram rows where the model reads them."""
    rows_of = row_reader(config.model)

    def add_rows(batch: data.Arrays) -> data.Arrays:
        return batch if rows_of is None else batch | {"engram_rows": rows_of(batch["tokens"], batch["positions"])}

    batches = partial(data.batches, config.data, model=config.model, transform=add_rows)
    own = placement.rows
    heldout = batches("heldout", own=own, n_batches=config.eval_batches) if config.data.holdout else ()
    return batches("train", own=own), [placement.put(Batch(**b)) for b in heldout]


def row_reader(c: Config) -> RowsOf | None:
    """What gives the n-gram table rows of byte ids at positions; None for a model without n-gram memory.

    A byte has no other spellings to merge, so the compressed vocabulary is the identity over the model's ids. What has
    the id of an image token is in an image span, and n-grams end there.
    """
    if not c.engram_layer_ids:
        return None
    layout, image_id = engram.layout(c), None if c.vision is None else c.image_token_id

    def rows_of(ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        image = None if image_id is None else ids == image_id
        return engram.rows(ids.astype(np.int64), positions, layout, c.engram_pad_token_id, image)

    return rows_of


def start(config: Run, placement: Placement | None = None) -> TrainState:
    """The state that a run starts from; to the bit, for how a program was compiled shows in its last bits.

    Every device makes its own part of it.
    """
    where = {} if placement is None or placement.mesh is None else {"out_shardings": placement.state}
    return hosts.ready(jit(partial(step.initial, config), QUICK, **where))()


def _start(config: Run, placement: Placement, saver: Saver, batches: Batches, console: Console) -> TrainState:
    """The newest checkpoint, that of the run to start from, or a fresh state; also says what is to be trained."""
    size = sum(w.size for w in leaves(model.declare(config.model)).values())
    versions = f"jax {jax.__version__}, flax {flax.__version__} on {jax.devices()[0].device_kind}"
    metrics.say(console, f"{versions}; {size:,} parameters, layers {config.model.modes}")
    packed = batches.packed
    text = f"{config.data.source}: {len(packed.documents):,} documents to train on, {len(packed.tokens):,} tokens"
    metrics.say(console, text)
    if config.layout.devices > 1:
        layout_sheet.show(model.declare(config.model), config.layout, console)
    if packed.skipped:
        metrics.say(console, f"skipped {metrics.few(packed.skipped)}")
    restored = saver.restore(placement.like(config), partial(metrics.say, console))
    if restored is None and config.start_from:
        state = start_from(config, placement.like(config))
        metrics.say(console, f"starting from step {int(state.step)} of {config.start_from}")
        return state
    if restored is None:
        return start(config, placement)
    state, position = restored
    batches.set_state(position)
    metrics.say(console, f"going on from step {int(state.step)}")
    return state


def _loop(
    config: Run,
    placement: Placement,
    state: TrainState,
    batches: Batches,
    heldout: list[Batch],
    saver: Saver,
    log: metrics.Log,
    console: Console,
    until: int | None,
) -> tuple[TrainState, str | None]:
    """Steps to the end, or to a signal or `until`; returns why it stopped early.

    A step's metrics are read after the next step was started, so that the device never waits for the host; before an
    evaluation or a checkpoint they are read first, so that neither follows a step that was not finite.
    """
    train = jit(placement.step(config), BRISK, donate_argnums=0, **placement.out_shardings)
    score = jit(partial(evaluation.score, config, placement.mesh), BRISK, **placement.results)
    reached = hosts.stop_step()
    first, end = int(state.step), min(config.steps, until or config.until or config.steps)
    pending: tuple[int, int, Metrics] | None = None
    stopped = None if end == config.steps else AS_ASKED
    metrics.say(console, "compiling the step, which on a CPU takes a minute or more")
    with stop_signals() as stop, metrics.screen(console, first, config.steps) as screen:
        for at in range(first + 1, end + 1):
            number, batch = batches.get_state()["step"], placement.put(Batch(**next(batches)))
            if at == first + 1:
                train = hosts.ready(train, state, batch)
                score = hosts.ready(score, state.params, *heldout[:1]) if heldout else score
            state, made = train(state, batch)
            if pending:
                _report(config, *pending, batches, saver, log, screen)
            pending = (at, number, made)
            asked = reached(at, stop.asked) or (AS_ASKED if at == end else None)
            last = at == config.steps
            evaluates = bool(heldout) and (last or at % config.eval_every == 0)
            saves = last or asked is not None or at % config.save_every == 0
            if not evaluates and not saves:
                continue
            _report(config, *pending, batches, saver, log, screen)
            pending = None
            with screen.pause():
                if evaluates:
                    evaluation.evaluate(score, state, at, heldout, log, console)
                if saves:
                    saver.save(state, batches.get_state())
            if asked and not last:
                stopped = asked
                break
        saver.finish()
    return state, stopped


def _report(
    config: Run, at: int, number: int, made: Metrics, batches: Batches, saver: Saver, log: metrics.Log,
    screen: metrics.Screen,
) -> None:  # fmt: skip
    """Check and write the metrics of one step, made of the batch `number`."""
    made = jax.device_get(made)
    nonfinite.check(config, at, number, made, batches, saver)
    values = metrics.record(config.model, made)
    report = at % config.log_every == 0 or at == config.steps
    screen.step(at, values, report)
    if report:
        log.write("train", at, values | {"tokens_per_second": round(screen.tokens_per_second, 1)})


def _sample(config: Run, placement: Placement, state: TrainState, out: Path, console: Console) -> str | None:
    """Sample, show and keep a text; None if the run wants none.

    It goes on from the prompt; a model that sees reads some held-out pictures instead.
    """
    if not config.sample_tokens:
        return None
    if config.layout.tokens or jax.process_count() > 1:
        metrics.say(console, "no sample: decoding runs in one process, and with no row's tokens split")
        return None
    c = config.model
    pictures = [] if c.vision is None else list(data.shown(config.data, c, READ))
    asked = partial(
        sample.Request, max_tokens=config.sample_tokens, temperature=config.sample_temperature, seed=config.seed
    )
    requests = [asked(prompt, images=images) for _, prompt, images in pictures]
    if c.vision is None:
        requests = [asked(np.concatenate([[c.bos_token_id], tokenizer.encode(config.sample_prompt)]))]
    # Bytes have no other spellings, so n-grams are of the ids.
    decoder = Decoder(config.inference, state.params, mesh=placement.mesh)
    try:
        made = sample.collect(sample.generate(decoder, requests, text_of=tokenizer.bytes_of)) if requests else []
    except sample.NotFinite as error:
        metrics.say(console, f"no sample: {error}")
        return None
    if c.vision is None:
        text = config.sample_prompt + made[0].text
    else:
        said = zip(pictures, made, strict=True)
        text = "".join(f"{document.text.decode()} read as {one.text!r}\n" for (document, *_), one in said)
    (out / "sample.txt").write_text(text)
    console.rule("sample")
    metrics.say(console, text)
    console.rule()
    return text


def _write(path: Path | None, result: dict[str, Any]) -> None:
    """Write the machine-readable result where it is asked for."""
    if hosts.first():
        write_json(path, result)


if __name__ == "__main__":
    from dsflash_jax.cli import main

    sys.exit(main(["train", *sys.argv[1:]]))
