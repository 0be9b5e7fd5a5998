"""The smallest run that has every part of a multimodal one: `configs/digits.py` with these overrides."""

from __future__ import annotations

from pathlib import Path

from tiny_run import MODEL, RUN

from dsflash_jax.overrides import find, override
from train.config import Run

TOWER = (
    "model.vision.num_hidden_layers=1", "model.vision.hidden_size=16", "model.vision.num_attention_heads=2",
    "model.vision.intermediate_size=16",
)  # fmt: skip
DATA = ("data.source=digits", "data.seq_len=64", "data.holdout=20")


def arguments(out: Path, *more: str) -> list[str]:
    """What `dsflash train` takes for such a run; later overrides win."""
    return ["digits", *MODEL, *RUN, *TOWER, *DATA, f"out={out}", *more]


def tiny(out: Path, *more: str) -> Run:
    """Such a run as a record."""
    source, *overrides = arguments(out, *more)
    return override(find(source), overrides)
