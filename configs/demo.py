"""A small but complete model on the Python standard library's own source, byte by byte.

Command: `make demo`, or `dsflash train demo`; the same command goes on after an interruption.
Hardware: two CPU cores, 2 GB; for an accelerator raise data.batch_size and steps.
Result: held out 1.58 nats a byte after 80 steps with jax 0.10.2, in 2 min 44 s on two quiet cores; 1.67 with jax 0.11.2
on another machine. Compiling takes most of it. Without the n-gram memory 100 steps gave 1.98.
"""

from dsflash_jax.config import Compute, Config
from train.config import Run
from train.data import Data
from train.optim import Optim

# Every kind of layer: window only, Full and Reuse at two tokens a slot, Full, Reindex and Reuse at one token a slot.
model = Config(
    vocab_size=264,  # 256 bytes and 3 special ids, filled up to a multiple of 8
    hidden_size=96,
    moe_intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=48,
    o_lora_rank=48,
    o_groups=2,
    n_routed_experts=8,
    num_experts_per_tok=2,
    sliding_window=32,
    compress_ratios=(0,),
    kv_source_layer_ids=(),
    index_source_layer_ids=(),
    index_n_heads=4,
    index_head_dim=16,
    index_topk=16,  # of up to 256 visible slots
    engram_max_ngram_size=4,
    engram_vocab_size=2000,  # rows a hash head, two heads for each n-gram size
    engram_n_heads=2,
    engram_head_dim=16,
    engram_compressed_vocab_size=264,  # bytes have no spellings to merge
    max_position_embeddings=4096,
).with_modes("S Se F2 U F1 X U U", engram_num_embeddings=(12126,))

config = Run(
    model=model,
    out="runs/demo",
    steps=80,
    compute=Compute(dtype="float32", remat="none", query_chunk=32),
    optim=Optim(peak=1.5e-2, final=1e-3, warmup_steps=10, decay_start=0.4, decay_end=1.0),
    data=Data(seq_len=256, batch_size=8),
    eval_every=40,
    save_every=20,
    sample_tokens=120,
)
