"""libtpu's compiler in a process of its own, for a topology by name, on a machine without a TPU.

A process of its own can be stopped when it has laid out the memory, keeps its messages to itself, and leaves this one
without libtpu. What it found lies in files of a temporary folder.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from dsflash_jax import pixels
from dsflash_jax.config import need
from dsflash_jax.flow import Batch
from train import data, decode_ahead, placement, program
from train.config import Run

UNITS = {"M": 2**20, "G": 2**30, "T": 2**40}  # of the compiler's messages
# Topologies of each kind, by chips; those with a third axis of 1 or with two axes are one board or one layer.
SIZES = {
    "v5e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "v5p": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
    "v6e": ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
    "tpu7x": ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
}
OPTIONS: dict[str, Any] = {
    "xla_dump_hlo_as_text": True,
    # Reads at computed places stay on the tensor cores: programs for the sparse cores compile slowly, and take no less
    # memory.
    "xla_tpu_offload_gather_to_sparsecore": False,
}
EXCESS = re.compile(
    r"\(?([\d.]+)([MGT])\)? (?:exceeds available HBM|of [\d.]+[MGT] hbm)"
)  # of a program that is too large
LAID_OUT = "*after_optimizations-memory-usage-report.txt"  # the compiler writes it when every array has its place
OPTIMISED = "*after_optimizations.txt"


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a step."""

    flops: int
    stablehlo_lines: int
    lower_seconds: float
    compile_seconds: float
    memory: dict[str, int]  # bytes of a device by kind
    text: str  # HLO
    held: dict[str, int]  # bytes of a device's part of each argument, without the lanes that a TPU fills up
    shapes: list[tuple[int, ...]]  # of a device's parts


def parse(name: str) -> tuple[str, tuple[int, ...]]:
    """The kind and the chips along each axis of "v5p:4x8x8". Raises ValueError for any other form."""
    kind, _, size = name.partition(":")
    need(kind in SIZES and re.fullmatch(r"\d+(x\d+){1,2}", size) is not None,
         f"topology {name!r} is not one of {', '.join(f'{k}:{s[-1]}' for k, s in SIZES.items())} or smaller: write the "
         "kind, a colon and the chips along each axis")  # fmt: skip
    return kind, tuple(map(int, size.split("x")))


def compile_step(run: Run, name: str, code: bool, rows: int | None = None) -> Compiled:
    """Compile the training step of a run, or the decode step of `rows` rows; see `ahead.compile_step`."""
    parse(name)
    run = for_tpu(run)
    if find_spec("libtpu") is None:
        raise ImportError(
            'compiling for a TPU needs libtpu, which the extra [aot] installs: pip install "dsflash_jax[aot]"'
        )
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "task").write_bytes(pickle.dumps((run, name, rows)))
        with (folder / "messages").open("w") as messages:
            child = subprocess.Popen(
                [sys.executable, "-m", "train.compiler", temporary], stdout=messages, stderr=messages
            )
            try:
                while child.poll() is None and (code or not _laid_out(folder)):
                    time.sleep(0.5)
            finally:
                child.kill()
                child.wait()
        return _result(folder)


def for_tpu(run: Run) -> Run:
    """The run with what "auto" is on a TPU, so that no product of another platform's branch is counted."""
    return run if run.compute.experts != "auto" else replace(run, compute=replace(run.compute, experts="ragged"))


def _laid_out(folder: Path) -> bool:
    """Whether the compiler has written its layout of the memory, some seconds ago."""
    return any(time.time() - report.stat().st_mtime > 3 for report in folder.glob(LAID_OUT))


def _result(folder: Path) -> Compiled:
    """What the child left. Raises the error that it ended with."""
    if (folder / "refused").exists():
        raise ValueError((folder / "refused").read_text())
    if not (folder / "facts").exists():
        tail = (folder / "messages").read_text().strip()[-500:]
        raise ValueError(f"the compiler's process ended without a result: {tail}")
    facts = json.loads((folder / "facts").read_text())
    # The text comes from a file: the compiler is newer than the parser of the installed jaxlib.
    text = max((p.read_text() for p in folder.glob(OPTIMISED)), key=len, default="")
    begun = (folder / "facts").stat().st_mtime
    if (folder / "memory").exists():
        memory, ended = json.loads((folder / "memory").read_text()), (folder / "memory").stat().st_mtime
    else:
        (report,) = folder.glob(LAID_OUT)
        total = int(re.findall(r"Total bytes: (\d+)", report.read_text())[0])
        memory, ended = _around(total, sum(facts["held"].values())), report.stat().st_mtime
    seconds = round(ended - begun, 1)
    shapes = [tuple(shape) for shape in facts.pop("shapes")]
    return Compiled(**facts, compile_seconds=seconds, memory=memory, text=text, shapes=shapes)


def _child(folder: Path) -> None:
    """What the other process does."""
    run, name, rows = pickle.loads((folder / "task").read_bytes())
    jax.config.update("jax_platforms", "cpu")
    try:
        _, here = topology(name)
        step, given = training(run, here) if rows is None else decode_ahead.step(run, rows, here)
    except ValueError as error:
        (folder / "refused").write_text(str(error))
        return
    begin = time.perf_counter()
    traced = step.trace(*given.values())
    lowered = traced.lower()
    facts = {
        "flops": program.flops(traced.jaxpr) if rows is None else decode_ahead.flops(traced.jaxpr, run),
        "stablehlo_lines": lowered.as_text().count("\n"), "lower_seconds": round(time.perf_counter() - begin, 1),
        "held": {name: sum(map(_bytes, jax.tree.leaves(each))) for name, each in given.items()},
        "shapes": [a.sharding.shard_shape(a.shape) for a in jax.tree.leaves(given)],
    }  # fmt: skip
    (folder / "facts").write_text(json.dumps(facts))
    try:
        compiled = lowered.compile(compiler_options=OPTIONS | {"xla_dump_to": str(folder)})
        memory = _memory(compiled.memory_analysis())
    except jax.errors.JaxRuntimeError as error:
        used = EXCESS.search(str(error))
        if used is None:
            (folder / "refused").write_text(f"the compiler refused the program: {str(error).strip()[:500]}")
            return
        memory = _around(int(float(used[1]) * UNITS[used[2]]), sum(facts["held"].values()))
    (folder / "memory").write_text(json.dumps(memory))


def training(run: Run, here: list[Any]) -> tuple[Any, dict[str, Any]]:
    """The training step on the devices `here`, jitted, and shapes and places of what it takes, by name."""
    place = placement.place(run, here)
    step = jax.jit(place.step(run), donate_argnums=0, **place.out_shardings)
    return step, {"state": place.like(run), "batch": abstract_batch(run, place)}


def topology(name: str) -> tuple[str, list[Any]]:
    """The kind and the devices of "v5p:4x8x8".

    Raises ImportError without libtpu, ValueError for a name that it does not know.
    """
    kind, _ = parse(name)
    # Ask no service what machine this is, and let several processes compile.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if find_spec("libtpu") is None:
        raise ImportError(
            'compiling for a TPU needs libtpu, which the extra [aot] installs: pip install "dsflash_jax[aot]"'
        )
    try:
        return kind, list(topologies.get_topology_desc(topology_name=name, platform="tpu").devices)
    except Exception as error:
        raise ValueError(f"libtpu has no topology {name!r} ({str(error).splitlines()[0][:120]})") from error


def abstract_batch(run: Run, place: placement.Placement) -> Batch:
    """Shapes and places of a batch, in parts if the run has them; for those of images the corpus is read."""
    c, rows = run.model, run.data.batch_size // run.accumulate
    whole = lambda dtype, *more: jax.ShapeDtypeStruct((rows, run.data.seq_len, *more), dtype)  # noqa: E731
    tokens, segments, positions, targets = (whole(jnp.int32) for _ in range(4))
    heads = (c.engram_max_ngram_size - 1) * c.engram_n_heads
    table = whole(jnp.int32, len(c.engram_layer_ids), heads) if c.engram_layer_ids else None
    images = None
    if c.vision is not None:
        empty = pixels.collate([[]], c, run.data.seq_len, *data.load(run.data, model=c).room)
        images = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), empty)
    return place.abstract(Batch(tokens, segments, positions, targets, whole(jnp.float32), table, images))


def _memory(m: Any) -> dict[str, int]:
    output = m.output_size_in_bytes - m.alias_size_in_bytes
    made = {"arguments": m.argument_size_in_bytes, "temporaries": m.temp_size_in_bytes, "output": output,
            "program": m.generated_code_size_in_bytes}  # fmt: skip
    return made | {"total": sum(made.values())}


def _around(total: int, arguments: int) -> dict[str, int]:
    """Memory of which only the sum is known, and what the arguments take without the lanes that a TPU fills up."""
    return {"arguments": arguments, "temporaries": total - arguments, "output": 0, "program": 0, "total": total}


def _bytes(a: Any) -> int:
    """Bytes of a device's part of an array that is described."""
    return prod(a.sharding.shard_shape(a.shape)) * int(a.dtype.itemsize)


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
