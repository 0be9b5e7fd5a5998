"""Checkpoints of a run by Orbax: weights, optimiser, router biases, counters and data position in one atomic step.

Every process writes its own part, in the background. What is written does not depend on where it is read: another
mesh, another number of processes, and n-gram tables that a layout fills up to another length.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath
from jax.sharding import SingleDeviceSharding

from dsflash_jax import devices, model, sharding
from dsflash_jax.config import Compute, Config, Quantize, build, need
from dsflash_jax.flow import Setup
from dsflash_jax.params import Weights, map_weights
from dsflash_jax.sharding import Layout
from train import hosts, placement
from train.config import Run
from train.step import TrainState

IDENTITY = ("model", "objective", "quantize", "optim", "data", "steps", "seed")  # what a continued run must not change
HOW = ("layout", "compute")  # how a checkpoint was made, which its numbers do not depend on
FREE = ("source", "prefetch")  # of data: the documents are compared by their content when the position is restored
WRITE = 600  # seconds that hosts wait for each other at the end of a checkpoint
BUCKET = "gs://"


class NotSaved(RuntimeError):
    """A checkpoint could not be written; the message says why and what is left."""


class Damaged(RuntimeError):
    """A checkpoint could not be read on some host; the message says why."""


def folder(out: str) -> Any:
    """The folder of a run: a `Path`, or the same for a bucket. Raises ValueError for any other address."""
    if out.startswith(BUCKET):
        return epath.Path(out)
    if "://" in out:
        raise ValueError(
            f"out={out!r} cannot be the folder of a run: give a folder, which may be a mounted bucket, or {BUCKET}"
        )
    return Path(out)


def checkpoints(out: str) -> Any:
    """Where a run's checkpoints are, as an absolute path: Orbax reads no other."""
    at = folder(out)
    return (at if out.startswith(BUCKET) else at.resolve()) / "checkpoints"


class Saver:
    """The checkpoints under a run's folder. A checkpoint appears whole, by a rename, or not at all."""

    def __init__(self, run: Run) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs hundreds of lines for what it also raises
        self.folder = checkpoints(run.out)
        self._run = run
        identity = {key: _plain(getattr(run, key)) for key in IDENTITY}
        identity["data"] = {key: value for key, value in identity["data"].items() if key not in FREE}
        self._identity = json.loads(json.dumps(identity))
        if hosts.first():
            self.folder.mkdir(parents=True, exist_ok=True)
        hosts.exchange()
        everyone = set(range(jax.process_count()))  # named, so that they wait for each other on hosts, not on devices
        self._manager = _open(
            self.folder,
            ocp.options.MultiprocessingOptions(active_processes=everyone),
            max_to_keep=run.keep,
            cleanup_tmp_directories=True,  # what a killed process left half-written
            # Orbax holds host copies before `save` returns. On a CPU these are views of the arrays, and JAX does not
            # reuse the memory of an array of which there is a view when a step is given it for that.
            enable_async_checkpointing=True,
            async_options=ocp.options.AsyncOptions(timeout_secs=WRITE),
        )

    def latest(self) -> int | None:
        """Step of the newest checkpoint, None without one."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data: dict[str, Any]) -> None:
        """Start to write the state and the data position, after the one before; not if this step is there already.

        The state may be given away as soon as this returns. Raises NotSaved if either cannot be written.
        """
        step = int(state.step)
        self.finish()
        if step == self.latest():
            return
        run = self._identity | {key: asdict(getattr(self._run, key)) for key in HOW}
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data), run=ocp.args.JsonSave(run)
        )
        with self._writing(step):
            saved = self._manager.save(step, args=args)
        if not saved:
            raise RuntimeError(
                f"{self.folder}: step {step} was not saved, the newest one there is of step {self.latest()}. "
                "Two runs that write into one folder do this: give each its own out=..."
            )

    def finish(self) -> None:
        """Wait until what `save` began is on disk. Raises NotSaved if it cannot be."""
        with self._writing(self.latest()):
            self._manager.wait_until_finished()

    @contextmanager
    def _writing(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk, mostly; what the layers below raise has no common type
            kept = self.latest()
            raise NotSaved(
                f"step {step} could not be saved in {self.folder} ({_reason(error)}); "
                + ("there is no older checkpoint" if kept is None else f"the checkpoint of step {kept} is kept")
            ) from error

    def restore(
        self, like: TrainState, say: Callable[[str], None] = lambda text: None
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """The newest checkpoint that can be read, with the shapes, dtypes and places of `like`, and its data position.

        None if there is no checkpoint. A damaged one is put aside, which `say` is told, when an older one can be read.
        Raises ValueError if all are damaged, if the run that wrote it had another model, data or optimiser, or if its
        arrays have other names, shapes or dtypes than `like`; the message names each.
        """
        self.finish()
        (told, *_) = hosts.exchange(json.dumps(sorted(self._manager.all_steps(), reverse=True)))
        damaged: dict[int, str] = {}
        for step in json.loads(told):
            try:
                found = _read(self.folder, step, self._run, like, self._identity)
            except Damaged as error:
                damaged[step] = str(error)
                continue
            for bad, reason in damaged.items():
                say(f"skipped the checkpoint of step {bad}: {reason}. It is now in {self._put_aside(bad)}")
            return found
        if damaged:
            text = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise ValueError(f"{self.folder}: every checkpoint is damaged ({text}); remove that folder to start anew")
        return None

    def _put_aside(self, step: int) -> Any:
        """Rename a checkpoint so that it is none any more."""
        names = (f"damaged-{step}" + (f"-{n}" if n else "") for n in itertools.count())
        (name, *_) = hosts.exchange(next(n for n in names if not (self.folder / n).exists()))
        if hosts.first():
            (self.folder / str(step)).rename(self.folder / name)
        hosts.exchange()
        self._manager.reload()
        return self.folder / name

    def close(self) -> None:
        """Finish writing and release the folder."""
        self._manager.close()


def start_from(run: Run, like: TrainState) -> TrainState:
    """Weights, optimiser state, step and key of the newest checkpoint of the run in the folder `run.start_from`.

    With the shapes, dtypes and places of `like`; the run that wrote it may differ from this one in all else. That
    folder is only read. Raises ValueError if there is no checkpoint or it is damaged, if its step is this run's last
    one or later, or its arrays have other names, shapes or dtypes.
    """
    at, named = checkpoints(run.start_from), f"start_from={run.start_from!r}"
    with hosts.together():
        need(at.is_dir(), f"{named} is not the folder of a run: it has no folder checkpoints; give the out= of a run")
        reader = _open(at, _alone())
        newest = reader.latest_step()
        reader.close()
        need(newest is not None, f"{named} has no checkpoint yet: train that run first, or give another one")
        need(newest < run.steps,
             f"{named} is at step {newest}, but this run ends at steps={run.steps}: raise steps")  # fmt: skip
    (told, *_) = hosts.exchange(str(newest))
    try:
        return _read(at, int(told), run, like)[0]
    except Damaged as error:
        raise ValueError(f"{named}: the checkpoint of step {told} is damaged ({error}); remove {at / told}") from error


@dataclass(frozen=True)
class Inference:
    """What the weights of a run are used with: `override` changes it as it changes a run."""

    model: Config
    compute: Compute = field(default_factory=Compute)
    quantize: Quantize = field(default_factory=Quantize)
    layout: Layout = field(default_factory=Layout)  # devices, one whatever the run had


def read_weights(
    out: str, change: Callable[[Inference], Inference], say: Callable[[str], None]
) -> tuple[int, Inference, Weights]:
    """Step, use and weights, and nothing else, of the newest checkpoint of a run's folder that can be read.

    `change` alters what the run stored of their use; each device of its layout reads its part. The folder is only read,
    and `say` is told of damaged checkpoints.
    Raises ValueError if it is no folder of a run, all checkpoints are damaged, or the arrays do not fit the model.
    """
    at, config = checkpoints(out), folder(out) / "config.json"
    need(at.is_dir() and config.is_file(),
         f"{out} is not the folder of a run, as it lacks config.json or checkpoints: give the out= of one")  # fmt: skip
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    architecture = Config.from_json(config)
    reader = _open(at, _alone(), ocp.PyTreeCheckpointHandler)
    try:
        steps = sorted(reader.all_steps(), reverse=True)
        for step in steps:
            try:
                return step, *_weights_of(reader, step, architecture, change)
            except Damaged as error:
                say(f"skipped the checkpoint of step {step}: {error}")
    finally:
        reader.close()
    need(len(steps) > 0, f"{out} has no checkpoint yet: train that run first, or give another one")
    raise ValueError(f"{at}: every checkpoint is damaged; train the run anew")


def _weights_of(
    reader: Any, step: int, architecture: Config, change: Callable[[Inference], Inference]
) -> tuple[Inference, Weights]:
    """One checkpoint of a run of this architecture. Raises Damaged."""
    with _reading():
        saved = reader.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        stored = _arrays(reader.item_metadata(step)["state"].tree["params"])
    compute, quantize = (build(cls, saved.get(cls.__name__.lower(), {}), "checkpoint") for cls in (Compute, Quantize))
    use = change(Inference(architecture, compute, quantize))
    shape = lambda w: jax.ShapeDtypeStruct(w.full_shape, jnp.float32)  # noqa: E731
    expected = map_weights(shape, sharding.stored(model.declare(use.model), Layout(**saved.get("layout", {}))))
    if wrong := sorted(differences("", stored, _arrays(expected))):
        raise ValueError(f"{reader.directory}: the arrays of step {step} do not fit this model: {'; '.join(wrong)}")
    where = devices.place(Setup(use.model, use.compute, layout=use.layout), drafts=False)
    like = {"params": jax.tree.map(_placed, where.like(lambda w: jnp.float32))}
    how = lambda a: ocp.ArrayRestoreArgs(sharding=a.sharding, global_shape=a.shape, dtype=a.dtype, strict=False)  # noqa: E731
    args = ocp.args.PyTreeRestore(like, restore_args=jax.tree.map(how, like), partial_restore=True)
    with _reading():
        params = reader.restore(step, args=ocp.args.Composite(state=args))["state"]["params"]
        return use, jax.block_until_ready(params)


def _open(at: Any, processes: Any, state: Any = ocp.StandardCheckpointHandler, **options: Any) -> Any:
    handlers = {
        "state": state(multiprocessing_options=processes),
        "data": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        "run": ocp.JsonCheckpointHandler(multiprocessing_options=processes),
    }
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=processes, **options)
    return ocp.CheckpointManager(at, options=options, item_handlers=handlers)


def _alone() -> Any:
    """For a reader: nobody waits for a host that cannot read."""
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})


def _read(
    at: Any, step: int, run: Run, like: TrainState, identity: dict[str, Any] | None = None
) -> tuple[TrainState, dict[str, Any]]:
    """One checkpoint, of a run with this `identity` if given.

    Raises what `Saver.restore` does, and Damaged on all hosts if one could not read its part.
    """
    reader = _open(at, _alone())
    try:
        with _reading():
            saved = reader.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        how = {key: saved.pop(key, asdict(getattr(run, key))) for key in HOW}
        wrote = Layout(**how["layout"])
        changed = [] if identity is None else sorted(differences("", saved, identity))
        if changed:
            raise ValueError(
                f"{at} was written by another run: {'; '.join(changed)}. Give these their old values, choose another "
                "folder with out=..., or remove the old one. Free to change are out, keep, log_every, save_every, "
                f"eval_*, sample_*, compute.*, layout.* and {', '.join(f'data.{key}' for key in FREE)}"
            )
        # Before any array is read: Orbax converts dtypes without a word, and a failed read leaves others running.
        with _reading():
            stored = _arrays(reader.item_metadata(step)["state"].tree)
        expected = like if wrote == run.layout else placement.shapes_on(run, wrote)
        wrong = sorted(differences("", stored, _arrays(expected)))
        if wrong:
            raise ValueError(f"{at}: the arrays of step {step} do not fit this run: {'; '.join(wrong)}")
        # Not strict: as they fit the layout that wrote them, only fill rows of n-gram tables are cut off or added.
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(jax.tree.map(_placed, like), strict=False), data=ocp.args.JsonRestore()
        )
        with _reading():
            restored = reader.restore(step, args=args)
            state = jax.block_until_ready(restored["state"])
        return state, restored["data"]
    finally:
        reader.close()


@contextmanager
def _reading() -> Iterator[None]:
    """Turn what Orbax raises on some host, of whatever type, into one Damaged on all."""
    fault = ""
    try:
        yield
    except Exception as error:
        fault = _reason(error)
    for reason in hosts.exchange(fault):
        if reason:
            raise Damaged(reason)


def _placed(leaf: Any) -> Any:
    """The leaf with its place: without one Orbax looks for the devices that wrote it."""
    where = getattr(leaf, "sharding", None) or SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _reason(error: Exception) -> str:
    """The start of a message that may run over hundreds of lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _arrays(tree: Any) -> dict[str, str]:
    """Shape and dtype of every leaf by its dotted name."""
    name = lambda key: str(next(getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a)))  # noqa: E731
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(map(name, path)): f"{jnp.dtype(leaf.dtype).name}{list(leaf.shape)}" for path, leaf in flat}


def differences(path: str, old: Any, new: Any) -> list[str]:
    """Every dotted key whose value differs, with both values; a key that one side lacks is `absent` there."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = old.keys() | new.keys()
        return [d for k in keys for d in differences(f"{path}.{k}".lstrip("."), old.get(k, ...), new.get(k, ...))]
    show = lambda value: "absent" if value is ... else repr(value)  # noqa: E731
    return [] if old == new else [f"{path} was {show(old)}, is {show(new)}"]
