"""The smallest run that has every part: `configs/demo.py` with these overrides on a few short documents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax

from dsflash_jax.overrides import find, override
from train.config import Run

STEPS = 10
PEAK, WARMUP, FINAL = 1e-2, 3, 1e-3  # the decay runs from update 5 to update 9, of 0 to 9
WORDS = "the quick brown fox jumps over the lazy dog while seven wizards make toxic brew for an evil queen".split()

# One window layer and one Full layer whose selection is smaller than what it sees. The few Newton-Schulz steps and
# normalisations only keep the compiled program small.
MODEL = (
    "model.modes=S F2", "model.hidden_size=16", "model.moe_intermediate_size=16", "model.num_attention_heads=2",
    "model.head_dim=16", "model.qk_rope_head_dim=8", "model.q_lora_rank=8", "model.o_lora_rank=8", "model.o_groups=1",
    "model.n_routed_experts=4", "model.sliding_window=4", "model.index_n_heads=2", "model.index_head_dim=8",
    "model.index_topk=2", "model.hc_mult=2", "model.hc_sinkhorn_iters=2",
)  # fmt: skip
RUN = (
    f"steps={STEPS}", "optim.muon_steps=1,1", "optim.sinkhorn_iterations=1", f"optim.peak={PEAK}",
    f"optim.final={FINAL}", f"optim.warmup_steps={WARMUP}", "optim.decay_start=0.5", "optim.decay_end=0.9",
    "data.seq_len=32", "data.batch_size=2", "data.holdout=4", "log_every=1", "eval_every=5", "eval_batches=1",
    "save_every=5", "sample_tokens=0",
)  # fmt: skip
# Changes that give it an n-gram table of 59 rows, for three steps.
ENGRAM = (
    "model.modes=Se S", "model.engram_num_embeddings=[59]", "model.engram_vocab_size=17", "model.engram_n_heads=1",
    "model.engram_max_ngram_size=4", "model.engram_head_dim=8", "model.engram_compressed_vocab_size=264", "steps=3",
    "optim.warmup_steps=1", "eval_every=3",
)  # fmt: skip


def write_corpus(folder: Path) -> Path:
    """Twelve documents of 20 to 170 bytes: fewer rows than ten steps read, so that a run goes through epochs."""
    folder.mkdir()
    for i in range(12):
        text = " ".join(WORDS[(i + k * (i % 5 + 1)) % len(WORDS)] for k in range(4 + 2 * i))
        (folder / f"{i}.txt").write_text(f"{text}\n")
    return folder


def arguments(corpus: Path, out: Path, *more: str) -> list[str]:
    """What `dsflash train` takes for such a run; later overrides win."""
    return ["demo", *MODEL, *RUN, f"data.source={corpus}", f"out={out}", *more]


def tiny(corpus: Path, out: Path, *more: str) -> Run:
    """Such a run as a record."""
    source, *overrides = arguments(corpus, out, *more)
    return override(find(source), overrides)


def child(python: list[str], *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Another process that shares the compiled programs of this one."""
    programs = jax.config.jax_compilation_cache_dir
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": programs, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *python, *command], env=environment | variables, capture_output=True, text=True
    )
