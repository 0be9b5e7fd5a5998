"""Compare the model with recorded arrays of the published reference: `dsflash parity DIR`.

DIR holds config.json, weights.npz, inputs.npz and traces (prefill_*, grads_* with selections_*). Every array of a
trace becomes one line: the largest difference, the share of entries within tolerance, or whether a selection is equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dsflash_jax import checkpoint, engram, loss, model
from dsflash_jax.config import Compute, Config
from dsflash_jax.model import Batch, Setup
from dsflash_jax.params import Weights

Arrays = dict[str, np.ndarray]
VALUE_TOLERANCE = 2e-4  # absolute, on logits and streams; the sets' own
GRADIENT_TOLERANCE = 1e-3  # relative to a tensor's largest entry; the set's own
SELECTIONS = ("compress_topk_idxs", "router_indices")  # compared as sets of a row
COVERED = ("prefill_f32_noquant", "grads_f32_noquant", "selections_f32_noquant")
STRICT = Compute(dtype="float32", remat="none", scan=False, query_chunk=16, loss_chunk=16)


@dataclass(frozen=True)
class Line:
    """The verdict on one recorded array."""

    trace: str  # file it comes from
    array: str  # its name there
    kind: str  # "values", "gradient" or "selection"
    max_diff: float  # largest absolute difference; of a selection, rows that differ
    share: float  # part of the entries within tolerance, of a selection rows that are equal
    passed: bool


def selection_line(trace: str, name: str, got: np.ndarray, want: np.ndarray) -> Line:
    """Compare index lists row by row as sets; -1 is absent."""
    got, want = (np.sort(np.asarray(a).reshape(-1, a.shape[-1]), axis=-1) for a in (got, want))
    if got.shape != want.shape:
        return Line(trace, name, "selection", float(len(want)), 0.0, False)
    differ = int((got != want).any(axis=-1).sum())
    return Line(trace, name, "selection", float(differ), 1 - differ / max(len(want), 1), differ == 0)


def value_line(
    trace: str, name: str, got: np.ndarray, want: np.ndarray, tolerance: float, kind: str = "values"
) -> Line:
    """Compare values; a shape mismatch or a value that is not finite fails."""
    got = np.asarray(got)
    if got.shape != want.shape:
        return Line(trace, name, kind, float("inf"), 0.0, False)
    diff = np.abs(got.astype(np.float64) - want)
    within = diff <= tolerance  # a NaN is not
    worst = float(diff.max(initial=0.0)) if np.isfinite(diff).all() else float("inf")
    return Line(trace, name, kind, worst, float(within.mean()) if within.size else 1.0, bool(within.all()))


def batch_of(c: Config, inputs: Arrays) -> Batch:
    """The recorded ids as rows of one document each; targets are the next ids."""
    ids = inputs["input_ids"].astype(np.int32)
    b, t = ids.shape
    positions = np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))
    mask = np.ones((b, t), np.float32)
    mask[:, -1] = 0
    rows = None
    if c.engram_layer_ids:
        at = engram.Layout(*(inputs[f"engram_{n}"] for n in ("primes", "offsets", "multipliers")))
        compressed = inputs["engram_token_map"][inputs["input_ids"]]
        rows = jnp.asarray(engram.rows(compressed, positions, at, int(inputs["engram_pad_compressed"])))
    return Batch(
        jnp.asarray(ids), jnp.ones((b, t), jnp.int32), jnp.asarray(positions),
        jnp.asarray(np.roll(ids, -1, axis=1)), jnp.asarray(mask), rows,
    )  # fmt: skip


def traced(c: Config, w: Weights, batch: Batch) -> Arrays:
    """Every intermediate array of a full forward under the reference's names, and the logits."""

    def run(w: Weights, batch: Batch) -> tuple[list[dict[str, Any]], Any]:
        traces: list[dict[str, Any]] = []
        y, _ = model.forward(Setup(c, STRICT), w, batch, traces=traces)
        return traces, model.logits(w["head"], y)

    traces, logits = jax.device_get(jax.jit(run)(w, batch))
    out = {f"L{i}.{name}": array for i, trace in enumerate(traces[:-1]) for name, array in trace.items()}
    for name in [n for n in out if n.endswith(".candidates")]:
        out[name] = block_mask(
            out[name], c.candidate_block_size, out[name.replace("candidates", "index_k_new")].shape[1]
        )
    out |= traces[-1] | {"logits": logits, "embed": np.asarray(w["embed"])[np.asarray(batch.tokens)]}
    if batch.engram_rows is not None:
        out["engram_hash_ids"] = np.asarray(batch.engram_rows)
    return out


def block_mask(blocks: np.ndarray, size: int, slots: int) -> np.ndarray:
    """Block ids [B,T,C] (-1 absent) as the reference's mask of slots, bool [B,T,slots]."""
    members = np.zeros((*blocks.shape[:2], -(-slots // size) + 1), bool)  # the last one takes the absent ids
    np.put_along_axis(members, blocks, True, axis=-1)
    return np.repeat(members[..., :-1], size, axis=-1)[..., :slots]


def forward_lines(trace: str, got: Arrays, recorded: Arrays) -> Iterator[Line]:
    """One line for each recorded forward array."""
    for name, want in recorded.items():
        short = name.rsplit(".", 1)[-1]
        if name not in got:
            yield Line(trace, name, "values", float("inf"), 0.0, False)
        elif short in SELECTIONS:
            yield selection_line(trace, name, got[name], want)
        elif want.dtype.kind in "bi":
            yield value_line(trace, name, got[name], want.astype(np.int64), 0)
        elif short == "router_weights":  # listed in order of choice, which ties and rounding may exchange
            yield value_line(trace, name, np.sort(got[name]), np.sort(want), VALUE_TOLERANCE)
        else:
            yield value_line(trace, name, got[name], want, VALUE_TOLERANCE)


def gradient_lines(c: Config, w: Weights, batch: Batch, trace: str, recorded: Arrays) -> Iterator[Line]:
    """Loss, logits and every parameter gradient; a parameter without a recorded gradient must get exactly zero."""

    def mean_nll(w: Weights) -> Any:
        y, _ = model.forward(Setup(c, STRICT), w, batch)
        ce = loss.cross_entropy(w["head"], y, batch.targets, batch.loss_mask, STRICT.loss_chunk)
        return ce.nll / ce.tokens, model.logits(w["head"], y)

    (value, logits), grads = jax.device_get(jax.jit(jax.value_and_grad(mean_nll, has_aux=True))(w))
    yield value_line(trace, "loss", value, recorded["loss"], VALUE_TOLERANCE)
    yield value_line(trace, "logits", logits, recorded["logits"], VALUE_TOLERANCE)
    for name, got in checkpoint.publish(c, grads).items():
        want = recorded.get(f"grad.{name}", np.zeros_like(got))
        tolerance = GRADIENT_TOLERANCE * float(np.abs(want).max())
        yield value_line(trace, f"grad.{name}", got, want, tolerance, "gradient")


def check(folder: Path) -> tuple[list[Line], list[str]]:
    """Run every covered trace of a folder; also returns the names of traces that are not covered."""
    for name in ("config.json", "weights.npz", "inputs.npz"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder}: no {name}; expected config.json, weights.npz, inputs.npz and traces")
    c = Config.from_json(folder / "config.json")
    w = jax.tree.map(jnp.asarray, checkpoint.adopt(c, dict(np.load(folder / "weights.npz"))))
    batch = batch_of(c, dict(np.load(folder / "inputs.npz")))
    traces = sorted(p.stem for p in folder.glob("*.npz") if p.stem not in ("weights", "inputs"))
    lines: list[Line] = []
    got = None
    for trace in traces:
        if trace not in COVERED:
            continue
        recorded = dict(np.load(folder / f"{trace}.npz"))
        if trace.startswith("grads"):
            lines += gradient_lines(c, w, batch, trace, recorded)
            continue
        got = traced(c, w, batch) if got is None else got
        lines += forward_lines(trace, got, recorded)
    return lines, [t for t in traces if t not in COVERED]


def main(folder: Path, json_path: Path | None = None) -> int:
    """Print the table, write JSON if asked, and return the exit code: 1 on any miss or if nothing was compared."""
    lines, uncovered = check(folder)
    console = Console()
    table = Table("trace", "array", "kind", "max diff / rows", "within", "")
    for line in lines:
        verdict = "[green]ok" if line.passed else "[red]MISS"
        table.add_row(line.trace, line.array, line.kind, f"{line.max_diff:.3g}", f"{line.share:.4%}", verdict)
    console.print(table)
    missed = sum(not line.passed for line in lines)
    console.print(f"{folder.name}: {len(lines) - missed} of {len(lines)} arrays agree")
    if uncovered:
        console.print("not compared, no code for these traces yet: " + ", ".join(uncovered))
    if json_path:
        content = {"folder": folder.name, "lines": [asdict(line) for line in lines], "uncovered": uncovered}
        json_path.write_text(json.dumps(content, indent=2))
    return 1 if missed or not lines else 0
