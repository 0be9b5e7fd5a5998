"""The released model's pretraining from scratch at 65,536 tokens a row: 552B parameters and 196B of n-gram tables.

Command:  dsflash train pretrain_64k data.source=FOLDER on every host of the slice, see docs/pods.md;
          dsflash compile pretrain_64k --topology v5p:4x8x8 on any machine
Hardware: 256 TPU v5p chips (v5p:4x8x8)
Memory:   56.2 GiB of 95.7 a chip; 95.5 on 128 chips with layout.fsdp=4 accumulate=384 (compiled, not run)
Recipe:   training specification sections 1.1, 2 and 4: sparse attention from the first step, Reindex layers score all
          they see, no draft head, no YaRN; 447,035 steps of 100,663,296 tokens. At step 337,760 the run moves to
          configs/extend_1m.py. Text only, byte by byte: no source of pictures at this scale exists yet.
"""

from dataclasses import replace

from dsflash_jax.config import Compute, RopeScaling
from dsflash_jax.overrides import find
from dsflash_jax.sharding import Layout
from train.config import Run
from train.data import Data
from train.optim import Optim

released = find("released")

model = replace(
    released,
    vision=None,
    num_nextn_predict_layers=0,  # the draft head is trained afterwards, against the frozen rest
    dspark_target_layer_ids=(),
    compress_ratios=released.compress_ratios[: released.num_hidden_layers],
    candidate_source_layer_id=-1,  # candidate blocks come in post-training
    initializer_range=0.006,
    max_position_embeddings=65536,
    rope_scaling=RopeScaling(factor=1, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
)

config = Run(
    model=model,
    out="runs/pretrain_64k",
    steps=447_035,
    until=337_760,  # the rest is configs/extend_1m.py
    compute=Compute(dtype="bfloat16", remat="full", experts="ragged", query_chunk=128, loss_chunk=128),
    layout=Layout(fsdp=8, expert=32, expert_splits="tokens", capacity=2.0),
    accumulate=192,  # parts of 8 rows: 2,048 tokens a chip
    optim=Optim(),
    data=Data(seq_len=65536, batch_size=1536),
    eval_every=1000,
    eval_batches=1,
    save_every=500,
    sample_tokens=0,
)
