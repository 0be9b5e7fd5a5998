"""Compare the model with recorded arrays of the published reference: `dsflash parity DIR`.

DIR holds config.json, weights.npz, inputs.npz and traces (prefill_*, grads_* with selections_*, decode_*, replay_*).
Every array of a trace becomes one line: the largest difference, the share of entries within tolerance, or whether a
selection is equal. What decode and replay traces are compared with comes from `parity_decode`. A folder of op vectors,
which has no model, is `op_parity`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from dsflash_jax import (
    checkpoint,
    engram,
    indexer,
    loss,
    model,
    op_parity,
    parity_decode,
    parity_inputs,
    pixels,
    vision,
)
from dsflash_jax.config import Compute, Config, Quantize
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.output import write_json
from dsflash_jax.params import Weights
from dsflash_jax.verdict import NUMBERS, Arrays, Line, block_mask, miss, read, selection_line, unlike, value_line

VALUE_TOLERANCE = 2e-4  # absolute, on logits and streams; the sets' own
GRADIENT_TOLERANCE = 1e-3  # relative to a tensor's largest entry; the set's own
SELECTIONS = ("compress_topk_idxs", "router_indices")  # compared as sets of a row
FORWARD = ("prefill", "grads", "selections")  # kinds of traces that one forward pass is compared with
BEHIND_CACHE = (parity_decode.DECODE, parity_decode.DECODER, parity_decode.ENCODER)  # names of the others
SHIPPED = "decode_shipped_slot"  # steps of the reference with one slot of index keys for all layers
DESCRIPTIVE = ("router_margin", "index_margin")  # facts about the recorded run, not arrays of the model
FOR_INFORMATION, NO_CODE = "the reference's literal behaviour, for information", "no code runs it"
UNKNOWN = "an array that the model does not make"
QUANT_SHARE = 0.99  # of the entries of a quantised variant; the rest sits on rounding boundaries
COARSE_FACTOR = 1.5  # bfloat16 logits: mean distance, as a multiple of what the reference's own float32 run shows
WIDE = 160  # columns of what is printed, where no terminal says how many it has
STRICT = Compute(dtype="float32", remat="none", scan=False, query_chunk=16, loss_chunk=16)


@dataclass(frozen=True)
class Variant:
    """How a recorded run rounded."""

    name: str  # last part of the trace's name
    quantize: Quantize
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def share(self) -> float:
        """Part of the entries that must lie within tolerance."""
        return QUANT_SHARE if self.quantize.kv_fp4 else 1.0

    def setup(self, c: Config) -> Setup:
        """The model as this variant ran it."""
        taps = c.num_nextn_predict_layers > 0
        return Setup(c, replace(STRICT, dtype=self.dtype), quantize=self.quantize, taps=taps)


def variant_of(trace: str, tensors: Arrays) -> Variant | None:
    """The variant of a covered trace, None for one that no code here runs.

    Inputs of linear maps are rounded where the checkpoint stores their weights in 8 bits.
    """
    stored = any(a.dtype == np.uint8 and ".attn.wq_a." in name for name, a in tensors.items())
    on = Quantize(kv_fp4=True, index_fp4=True, window_fp8=True, linear_fp8=stored)
    known = (
        Variant("f32_noquant", Quantize()),
        Variant("f32_quant", on),
        Variant("f32_quant_ste", on),
        Variant("bf16_quant", on, "bfloat16"),
    )
    for form in BEHIND_CACHE:
        if at := form.fullmatch(trace):  # in float32 alone: scores in bfloat16 tie
            return next((v for v in known if v.name == at[1] and v.dtype == "float32"), None)
    return next((v for v in known if trace in (f"{kind}_{v.name}" for kind in FORWARD)), None)


def batch_of(c: Config, inputs: Arrays) -> Batch:
    """The recorded ids as rows of one document each; targets are the next ids."""
    ids = inputs["input_ids"].astype(np.int32)
    b, t = ids.shape
    positions = np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))
    mask = np.ones((b, t), np.float32)
    mask[:, -1] = 0
    rows = None
    image = inputs["token_types"] != pixels.TEXT if c.vision else None
    if c.engram_layer_ids:
        at = engram.Layout(*(inputs[f"engram_{n}"] for n in ("primes", "offsets", "multipliers")))
        compressed = inputs["engram_token_map"][inputs["input_ids"]]
        rows = jnp.asarray(engram.rows(compressed, positions, at, int(inputs["engram_pad_compressed"]), image))
    return Batch(
        jnp.asarray(ids), jnp.ones((b, t), jnp.int32), jnp.asarray(positions),
        jnp.asarray(np.roll(ids, -1, axis=1)), jnp.asarray(mask), rows, images_of(c, inputs),
    )  # fmt: skip


def images_of(c: Config, inputs: Arrays) -> pixels.Images | None:
    """The recorded images, `image_<row>_<index of START>_patches` and `_grid`; None without."""
    found = [at for at in map(parity_inputs.IMAGE.fullmatch, inputs) if at]
    if not found:
        return None
    b, t = inputs["input_ids"].shape
    rows: list[list[tuple[int, np.ndarray, tuple[int, int]]]] = [[] for _ in range(b)]
    for at in found:
        patches, grid = inputs[at[0]], inputs[at[0].replace("patches", "grid")]
        rows[int(at[1])].append((int(at[2]), patches.reshape(len(patches), -1), (int(grid[0]), int(grid[1]))))
    slots, most = max(map(len, rows)), max(len(inputs[at[0]]) for at in found)
    return jax.tree.map(jnp.asarray, pixels.collate(rows, c, t, slots, most))


def traced(setup: Setup, w: Weights, batch: Batch) -> Arrays:
    """Every intermediate array of a full forward under the reference's names, and the logits."""

    def run(w: Weights, batch: Batch) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        traces: list[dict[str, Any]] = []
        y, out = model.forward(setup, w, batch, traces=traces)
        made = traces.pop() | {"logits": model.logits(w["head"], y)}
        if out.taps is not None:
            made["main_hidden"] = jnp.concatenate(list(out.taps), axis=-1)
        return traces, made

    c = setup.config
    traces, out = jax.device_get(jax.jit(run)(w, batch))
    out |= {f"L{i}.{name}": array for i, trace in enumerate(traces) for name, array in trace.items()}
    for i in c.index_source_layer_ids:
        out[f"L{i}.index_score"] = index_scores(c, i, out)
    for name in [n for n in out if n.endswith(".candidates")]:
        out[name] = block_mask(
            out[name], c.candidate_block_size, out[name.replace("candidates", "index_k_new")].shape[1]
        )
    if batch.images is not None:
        out |= image_embeds(setup, w, batch.images)
    if batch.engram_rows is not None:
        out["engram_hash_ids"] = np.asarray(batch.engram_rows)
    return out


def image_embeds(setup: Setup, w: Weights, images: pixels.Images) -> Arrays:
    """What the aligner makes of each image, `image_embeds_<row>_<index of START>`."""
    c, (b, n) = setup.config, images.grid.shape[:2]
    own = model.cast(vision.weights(c), w, jnp.dtype(setup.compute.dtype))
    patches, grid = images.patches.astype(setup.compute.dtype), np.asarray(images.grid).reshape(b * n, 2)
    encode = jax.jit(vision.encode, static_argnums=(3, 4))
    made = np.asarray(encode(own, patches.reshape(b * n, *patches.shape[2:]), jnp.asarray(grid), c, setup.compute))
    out = {}
    for i, start in enumerate(np.asarray(images.start).reshape(-1)):
        rows, columns = pixels.cells((int(grid[i, 0]), int(grid[i, 1])), c)
        out[f"image_embeds_{i // n}_{start}"] = made[i, : rows * columns]
    return out


def index_scores(c: Config, i: int, got: Arrays) -> np.ndarray:
    """All index scores of layer i from its traced queries and its source's keys, -inf where not visible."""
    source = max(s for s in c.kv_source_layer_ids if s <= i)
    arrays = (got[f"L{i}.index_q"], got[f"L{i}.index_weights"], got[f"L{source}.index_k_new"])
    score = np.asarray(indexer.scores(*(jnp.asarray(a) for a in arrays)))
    visible = (np.arange(score.shape[1]) + 1) // c.compress_ratios[i]
    return np.where(np.arange(score.shape[2])[None, :] < visible[:, None], score, -np.inf)


def coarse_lines(trace: str, got: Arrays, recorded: Arrays, exact: Arrays) -> Iterator[Line]:
    """A bfloat16 run: logits must be about as near as the reference's own float32 run `exact`; the rest is reported.

    Scores in bfloat16 tie exactly, so selections, and rows after them, differ legitimately; their shapes do not.
    """
    for line in forward_lines(trace, got, {name: a for name, a in recorded.items() if name != "logits"}):
        yield replace(line, kind="reported", passed=math.isfinite(line.max_diff))
    if "logits" not in recorded:
        yield miss(trace, "logits", "values", "nothing to compare")
        return
    made, want, bound_by = (a["logits"] for a in (got, recorded, exact))
    if why := unlike(made, want, NUMBERS) or unlike(bound_by, want, NUMBERS):
        yield miss(trace, "logits", "values", why)
        return
    distance, bound = (float(np.abs(a.astype(np.float64) - want).mean()) for a in (made, bound_by))
    passed = math.isfinite(bound) and distance <= COARSE_FACTOR * bound  # a NaN is not
    worst = float(np.abs(made.astype(np.float64) - want).max())
    yield Line(trace, f"logits, mean distance {distance:.3f} against {bound:.3f}", "values", worst, 1.0, passed)


def forward_lines(trace: str, got: Arrays, recorded: Arrays, share: float = 1.0) -> Iterator[Line]:
    """One line for each recorded forward array that belongs to the model; `share` as in `value_line`."""
    for name, want in recorded.items():
        short = name.rsplit(".", 1)[-1]
        if short in DESCRIPTIVE:
            continue
        if name not in got:
            yield miss(trace, name, "values", UNKNOWN)
        elif short in SELECTIONS:
            yield selection_line(trace, name, got[name], want)
        elif want.dtype.kind in "biu":
            yield value_line(trace, name, got[name], want, 0)
        elif short == "router_weights" and want.ndim:  # in order of choice, which ties and rounding may exchange
            yield value_line(trace, name, np.sort(got[name]), np.sort(want), VALUE_TOLERANCE, share=share)
        else:
            yield value_line(trace, name, got[name], want, VALUE_TOLERANCE, share=share)


def gradient_lines(setup: Setup, w: Weights, batch: Batch, trace: str, recorded: Arrays) -> Iterator[Line]:
    """Loss, logits and every parameter gradient; a parameter without a recorded gradient must get exactly zero."""

    def mean_nll(w: Weights) -> Any:
        y, _ = model.forward(setup, w, batch)
        ce = loss.cross_entropy(w["head"], y, batch.targets, batch.loss_mask, STRICT.loss_chunk)
        return ce.nll / ce.tokens, model.logits(w["head"], y)

    (value, logits), grads = jax.device_get(jax.jit(jax.value_and_grad(mean_nll, has_aux=True))(w))
    yield value_line(trace, "loss", value, recorded["loss"], VALUE_TOLERANCE)
    yield value_line(trace, "logits", logits, recorded["logits"], VALUE_TOLERANCE)
    made = checkpoint.publish(setup.config, grads)
    for name, got in made.items():
        want = recorded.get(f"grad.{name}", np.zeros_like(got))
        largest = 0.0 if unlike(got, want, NUMBERS) else float(np.abs(want).max())
        yield value_line(trace, f"grad.{name}", got, want, GRADIENT_TOLERANCE * largest, "gradient")
    for name in recorded.keys() - {"loss", "logits", *DESCRIPTIVE} - {f"grad.{name}" for name in made}:
        yield miss(trace, name, "gradient", UNKNOWN)


def trace_lines(path: Path, variant: Variant, run: Run) -> Iterator[Line]:
    """The lines of one covered trace. Raises ValueError, with the file, when what it is compared with is missing."""
    trace, recorded, exact = path.stem, read(path), {}
    if trace.startswith("grads"):
        if lost := [name for name in ("loss", "logits") if name not in recorded]:
            raise ValueError(f"{path}: no {' and no '.join(lost)} among {sorted(recorded)[:5]}; record the trace whole")
        yield from gradient_lines(run.setup(variant), run.w, run.batch, trace, recorded)
        return
    if not recorded:
        return
    if any(form.fullmatch(trace) for form in BEHIND_CACHE):
        got, recorded = named(path, lambda _: parity_decode.compared(run.road(variant), trace, recorded))
        yield from forward_lines(trace, got, recorded, variant.share)
    elif variant.dtype == "bfloat16":
        if "logits" in recorded:
            twin = path.with_name(f"{trace.replace('bf16', 'f32')}.npz")
            if not twin.is_file():
                raise ValueError(f"{twin}: missing; {path.name} is judged by its distance to that float32 run")
            exact = read(twin)
            if "logits" not in exact:
                raise ValueError(f"{twin}: no logits among {sorted(exact)[:5]}; {path.name} is judged by them")
        yield from coarse_lines(trace, run.forward(variant), recorded, exact)
    else:
        yield from forward_lines(trace, run.forward(variant), recorded, variant.share)


@dataclass(frozen=True)
class Run:
    """The model of a set with its inputs, and what each variant's forward made so far."""

    config: Config
    w: Weights
    batch: Batch
    classes: np.ndarray | None = None  # [V]: token ids to those that n-grams are hashed over
    made: dict[str, Arrays] = field(default_factory=dict)  # by name of the variant
    roads: dict[str, parity_decode.Road] = field(default_factory=dict)  # by name of the variant

    def setup(self, variant: Variant) -> Setup:
        """How a variant runs the model."""
        return variant.setup(self.config)

    def forward(self, variant: Variant) -> Arrays:
        """Every array of a variant's forward; run once."""
        if variant.name not in self.made:
            self.made[variant.name] = traced(self.setup(variant), self.w, self.batch)
        return self.made[variant.name]

    def road(self, variant: Variant) -> parity_decode.Road:
        """A variant's decode; compiled once."""
        if variant.name not in self.roads:
            self.roads[variant.name] = parity_decode.Road(self.setup(variant), self.w, self.batch, self.classes)
        return self.roads[variant.name]


def check(folder: Path) -> tuple[list[Line], list[str]]:
    """Run every covered trace of a folder; also returns, with the reason, the traces that are not covered."""
    if op_parity.holds_ops(folder):
        return op_parity.check(folder)
    for name in ("config.json", "weights.npz", "inputs.npz"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder}: no {name}; expected config.json, weights.npz, inputs.npz and traces, or the files of op "
                "vectors"
            )
    c = named(folder / "config.json", lambda path: Config.from_json(path))
    tensors, inputs = read(folder / "weights.npz"), read(folder / "inputs.npz")
    w = named(folder / "weights.npz", lambda _: jax.tree.map(jnp.asarray, checkpoint.adopt(c, tensors)))
    parity_inputs.check(folder / "inputs.npz", c, inputs)
    batch = named(folder / "inputs.npz", lambda _: batch_of(c, inputs))
    run = Run(c, w, batch, inputs["engram_token_map"] if c.engram_layer_ids else None)
    lines: list[Line] = []
    uncovered: list[str] = []
    for path in sorted(p for p in folder.glob("*.npz") if p.stem not in ("weights", "inputs")):
        variant = variant_of(path.stem, tensors)
        if variant is None:
            why = FOR_INFORMATION if path.stem.startswith(SHIPPED) else NO_CODE
        else:
            why = named(path, lambda path: parity_decode.uncovered(path.stem, read(path), batch))
        if why or variant is None:
            uncovered.append(f"{path.stem}: {why}")
            continue
        own = list(trace_lines(path, variant, run))
        lines += own or [miss(path.stem, "all arrays", "values", "nothing to compare")]
    return lines, uncovered


def named(path: Path, make: Callable[[Path], Any]) -> Any:
    """What `make` makes of a file; its errors get the file's name."""
    try:
        return make(path)
    except (ValueError, TypeError, LookupError) as error:
        said = str(error)
        raise ValueError(said if str(path) in said else f"{path}: {said}") from error


def main(folder: Path, json_path: Path | None = None) -> int:
    """Print the table, write JSON if asked, and return the exit code: 1 on any miss or if nothing was compared."""
    lines, uncovered = check(folder)
    console = Console()
    if not console.is_terminal:
        console.width = WIDE  # names are what a file of verdicts is searched for
    table = Table("trace", "array", "kind", "max diff / count", "within", "")
    for line in lines:
        verdict = "[red]MISS" if not line.passed else "shown" if line.kind == "reported" else "[green]ok"
        table.add_row(line.trace, line.array, line.kind, f"{line.max_diff:.3g}", f"{line.share:.4%}", verdict)
    console.print(table)
    missed = sum(not line.passed for line in lines)
    shown = sum(line.kind == "reported" for line in lines)
    judged = len(lines) - shown
    more = f"; {shown} more are shown, not judged" if shown else ""
    console.print(f"{folder.name}: {judged - missed} of {judged} arrays agree{more}")
    if uncovered:
        console.print("not covered: " + "; ".join(uncovered))
    if json_path:  # JSON has no infinity
        listed = [asdict(line) | ({} if math.isfinite(line.max_diff) else {"max_diff": None}) for line in lines]
        write_json(json_path, {"folder": folder.name, "lines": listed, "uncovered": uncovered})
    return 1 if missed or not lines else 0
