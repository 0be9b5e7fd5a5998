"""The released model's extension to 1,048,576 tokens a row: the last quarter of pretraining, from step 337,760 on.

Command:  dsflash train extend_1m data.source=FOLDER start_from=runs/pretrain_64k on every host of the slice;
          dsflash compile extend_1m --topology v5p:4x8x8 on any machine
Hardware: 256 TPU v5p chips (v5p:4x8x8)
Memory:   68.7 GiB of 95.7 a chip (compiled, not run)
Recipe:   training specification sections 1.1 and 6: YaRN by 16, 96 rows in place of 1,536, everything else and the
          schedule as before: the learning rate is 1.43e-4 here and falls.
"""

from dataclasses import replace

from dsflash_jax.overrides import find
from dsflash_jax.sharding import Layout

released, before = find("released"), find("pretrain_64k")

config = replace(
    before,
    model=replace(
        before.model,
        max_position_embeddings=released.max_position_embeddings,
        rope_scaling=released.rope_scaling,
    ),
    out="runs/extend_1m",
    until=0,
    compute=replace(before.compute, query_chunk=64),
    layout=Layout(expert=32, context=8, expert_splits="tokens", capacity=2.0),
    accumulate=96,  # a row at a time: 4,096 tokens a chip
    data=replace(before.data, seq_len=1048576, batch_size=96),
)
