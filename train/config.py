"""A run: the model, how it is computed, its losses, optimiser and data, and the order of events."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dsflash_jax.config import Compute, Config, Objective, Quantize, need
from dsflash_jax.flow import Setup
from dsflash_jax.sharding import Layout
from train import tokenizer
from train.data import Data
from train.optim import Optim

ROOM = 8  # a vocabulary of a multiple of this is proposed; wider arrays of whole lanes cost nothing


@dataclass(frozen=True)
class Run:
    """Everything that `dsflash train` reads; a file in configs/ defines one as `config`."""

    model: Config  # the architecture
    out: str  # folder of checkpoints, metrics, plot and sample
    steps: int  # optimiser updates; schedules are fractions of them
    compute: Compute = field(default_factory=Compute)  # dtype, remat, kernels
    objective: Objective = field(default_factory=Objective)  # auxiliary losses
    layout: Layout = field(default_factory=Layout)  # devices it runs on
    until: int = 0  # update after which the run saves and leaves, for another run to start from; 0: the last
    accumulate: int = 1  # parts of a batch that are differentiated one after the other; more need less memory
    quantize: Quantize = field(default_factory=Quantize)  # values rounded as in the released model; default none
    optim: Optim = field(default_factory=Optim)  # families and schedule
    data: Data = field(default_factory=Data)  # corpus, rows, batch
    seed: int = 0  # initial weights and random draws of the loss
    log_every: int = 10  # steps between lines of metrics.jsonl
    eval_every: int = 100  # steps between held-out evaluations; the last step always evaluates
    eval_batches: int = 8  # held-out batches of one evaluation
    save_every: int = 100  # steps between checkpoints; the last step always saves
    keep: int = 2  # checkpoints kept, newest first
    start_from: str = ""  # folder of another run whose newest checkpoint a run without one starts from: weights,
    # optimiser state, step and key, not its place in the data; both must have the same names, shapes and dtypes
    sample_prompt: str = "def "  # text that the sample at the end goes on from; with vision it reads pictures instead
    sample_tokens: int = 160  # tokens of that sample; 0 for none
    sample_temperature: float = 0.7  # of that sample; 0 is greedy

    def __post_init__(self) -> None:
        for key in ("steps", "log_every", "eval_every", "eval_batches", "save_every", "keep", "accumulate"):
            need(getattr(self, key) >= 1, f"{key} must be at least 1, got {getattr(self, key)}")
        for key in ("seed", "until", "sample_tokens", "sample_temperature"):
            need(getattr(self, key) >= 0, f"{key} must not be negative, got {getattr(self, key)}")
        need(self.seed < 2**63, f"seed must be below 2**63, got {self.seed}")
        need(self.optim.peak < math.inf, f"optim.peak must be finite, got {self.optim.peak}")
        need(
            self.data.batch_size % self.accumulate == 0,
            f"data.batch_size={self.data.batch_size} rows do not divide into accumulate={self.accumulate} parts",
        )
        need(bool(self.out), "out names the folder of the run; give it a name, for example out=runs/demo")
        _match_tokenizer(self.model)
        limit = self.model.max_position_embeddings
        need(self.data.seq_len <= limit,
             f"data.seq_len={self.data.seq_len} exceeds model.max_position_embeddings={limit}")  # fmt: skip

    @property
    def setup(self) -> Setup:
        """What the training step runs."""
        return Setup(self.model, self.compute, self.objective, self.quantize, self.layout)

    @property
    def inference(self) -> Setup:
        """The same without auxiliary losses."""
        return replace(self.setup, objective=None)


def _match_tokenizer(c: Config) -> None:
    """Refuse a model that cannot read the ids of the byte tokenizer."""
    need(c.vocab_size >= tokenizer.vocab_size,
         f"model.vocab_size={c.vocab_size} has no room for the {tokenizer.vocab_size} ids of the byte tokenizer: raise "
         f"it, for example to {tokenizer.padded_vocab_size(ROOM)}")  # fmt: skip
    for key, value in (("bos", tokenizer.BOS), ("eos", tokenizer.EOS), ("pad", tokenizer.PAD)):
        given = getattr(c, f"{key}_token_id")
        need(given == value, f"model.{key}_token_id={given}, but the byte tokenizer writes {value}: set it to {value}")
    need(c.vision is None or tokenizer.vocab_size <= c.image_token_id < c.vocab_size,
         f"model.image_token_id={c.image_token_id} must be an id that no byte has and the vocabulary does: set it to "
         f"{tokenizer.vocab_size}, with model.vocab_size above it (now {c.vocab_size})")  # fmt: skip
    need(not c.engram_layer_ids or c.engram_compressed_vocab_size >= tokenizer.vocab_size,
         f"model.engram_compressed_vocab_size={c.engram_compressed_vocab_size}: n-grams of bytes are hashed from the "
         f"ids themselves, of which there are {tokenizer.vocab_size}: raise it to that or more")  # fmt: skip
