"""Checkpoints of a run by Orbax: weights, optimiser, router biases, counters and data position in one atomic step."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.config import Run
from train.step import TrainState

IDENTITY = ("model", "objective", "optim", "data", "steps", "seed")  # what a continued run must not change


class Saver:
    """The checkpoints under a run's folder. A checkpoint appears whole, by a rename, or not at all."""

    def __init__(self, run: Run) -> None:
        self.folder = Path(run.out).resolve() / "checkpoints"
        self._identity = json.loads(json.dumps({key: _plain(getattr(run, key)) for key in IDENTITY}))
        # Synchronous: on a CPU the arrays of the next, donated step would be the ones being written.
        options = ocp.CheckpointManagerOptions(max_to_keep=run.keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

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
        self._manager.save(step, args=args)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, with the shapes and dtypes of `like`, and its data position.

        Raises ValueError if the run that wrote it had another model, data or optimiser; the message names each key.
        """
        step = self.latest()
        saved = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        changed = sorted(_differences("", saved, self._identity))
        if changed:
            raise ValueError(
                f"{self.folder} was written by another run: {'; '.join(changed)}. "
                "Give these their old values, choose another folder with out=..., or remove the old one"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=args)
        return restored["state"], restored["data"]

    def close(self) -> None:
        """Finish writing and release the folder."""
        self._manager.close()


def _plain(value: Any) -> Any:
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


def _differences(path: str, old: Any, new: Any) -> list[str]:
    """Every dotted key whose value differs, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = old.keys() | new.keys()
        return [d for k in keys for d in _differences(f"{path}.{k}".lstrip("."), old.get(k), new.get(k))]
    return [] if old == new else [f"{path} was {old!r}, is {new!r}"]
