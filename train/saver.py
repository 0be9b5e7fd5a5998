"""Checkpoints of a run by Orbax: weights, optimiser, router biases, counters and data position in one atomic step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from train.config import Run
from train.step import TrainState

IDENTITY = ("model", "objective", "quantize", "optim", "data", "steps", "seed")  # what a continued run must not change
FREE = ("source", "prefetch")  # of data: the documents are compared by their content when the position is restored


class NotSaved(RuntimeError):
    """A checkpoint could not be written; the message says why and what is left."""


class Saver:
    """The checkpoints under a run's folder. A checkpoint appears whole, by a rename, or not at all."""

    def __init__(self, run: Run) -> None:
        self.folder = Path(run.out).resolve() / "checkpoints"
        identity = {key: _plain(getattr(run, key)) for key in IDENTITY}
        identity["data"] = {key: value for key, value in identity["data"].items() if key not in FREE}
        self._identity = json.loads(json.dumps(identity))
        # Synchronous: on a CPU the arrays of the next, donated step would be the ones being written.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=run.keep,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,  # what a killed process left half-written
        )
        json_item = ocp.JsonCheckpointHandler
        handlers = {"state": ocp.StandardCheckpointHandler(), "data": json_item(), "run": json_item()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def latest(self) -> int | None:
        """Step of the newest checkpoint, None without one."""
        return self._manager.latest_step()

    def save(self, state: TrainState, data: dict[str, Any]) -> None:
        """Write the state and the data position; does nothing if this step is there already."""
        step = int(state.step)
        if step == self.latest():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data), run=ocp.args.JsonSave(self._identity)
        )
        try:
            saved = self._manager.save(step, args=args)
        except Exception as error:  # a full disk, mostly; what the layers below raise has no common type
            kept = self.latest()
            raise NotSaved(
                f"step {step} could not be saved in {self.folder} ({_reason(error)}); "
                + ("there is no older checkpoint" if kept is None else f"the checkpoint of step {kept} is kept")
            ) from error
        if not saved:
            raise RuntimeError(
                f"{self.folder}: step {step} was not saved, the newest one there is of step {self.latest()}. "
                "Two runs that write into one folder do this: give each its own out=..."
            )

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, with the shapes and dtypes of `like`, and its data position.

        Raises ValueError if the run that wrote it had another model, data or optimiser, or its arrays have other names,
        shapes or dtypes than `like`; the message names each.
        """
        step = self.latest()
        with self._damage(step):
            saved = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        changed = sorted(_differences("", saved, self._identity))
        if changed:
            raise ValueError(
                f"{self.folder} was written by another run: {'; '.join(changed)}. Give these their old values, choose "
                "another folder with out=..., or remove the old one. Free to change are out, keep, log_every, "
                f"save_every, eval_*, sample_*, compute.* and {', '.join(f'data.{key}' for key in FREE)}"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        # Before anything is read: Orbax converts dtypes without a word, and a read that fails leaves others running.
        with self._damage(step):
            stored = _arrays(self._manager.item_metadata(step)["state"].tree)
        wrong = sorted(_differences("", stored, _arrays(like)))
        if wrong:
            raise ValueError(f"{self.folder}: the arrays of step {step} do not fit this run: {'; '.join(wrong)}")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
        with self._damage(step):
            restored = self._manager.restore(step, args=args)
        return restored["state"], restored["data"]

    @contextmanager
    def _damage(self, step: int | None) -> Iterator[None]:
        """Turn what Orbax raises while it reads a checkpoint, of whatever type, into one line with a way out."""
        try:
            yield
        except Exception as error:
            older = [s for s in self._manager.all_steps() if s != step]
            way = f"go on from step {max(older)}" if older else "start anew"
            where = self.folder / str(step)
            raise ValueError(f"{where} is damaged ({_reason(error)}); remove that folder to {way}") from error

    def close(self) -> None:
        """Finish writing and release the folder."""
        self._manager.close()


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


def _differences(path: str, old: Any, new: Any) -> list[str]:
    """Every dotted key whose value differs, with both values; a key that one side lacks is `absent` there."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = old.keys() | new.keys()
        return [d for k in keys for d in _differences(f"{path}.{k}".lstrip("."), old.get(k, ...), new.get(k, ...))]
    show = lambda value: "absent" if value is ... else repr(value)  # noqa: E731
    return [] if old == new else [f"{path} was {show(old)}, is {show(new)}"]
