"""Which configurations are refused: all that no model can be built from, or whose fields contradict each other.

Every message names the field, its value and what to do. `modes.check` has the rules of the layer table. Source:
architecture section 1.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from dsflash_jax import modes, primes

if TYPE_CHECKING:
    from dsflash_jax.config import Config, QuantizationConfig, RopeScaling, VisionConfig

INT32 = 2**31 - 1  # token ids and rows of a table fit it
SMALLEST_SPAN = 4  # tokens of the smallest image: START, one IMAGE, its NEWLINE, END
EXPERT_STORAGE = ("fp4", "fp8")  # known values of quantization.expert_dtype
LARGEST = 2**40  # of any size: above all that exists, and products of a few stay exact in counts


def need(ok: bool, message: str) -> None:
    """Raise ValueError(message) unless `ok`."""
    if not ok:
        raise ValueError(message)


def hint(word: str, known: Iterable[str]) -> str:
    """The end of an error message that names the known word nearest to `word`; empty when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """The types of a record's fields; resolving them anew for each record would take milliseconds."""
    return get_type_hints(cls)


def check_types(record: Any, prefix: str = "") -> None:
    """Refuse a value of another type than its field's: a file written in Python checks none."""
    cls: Any = type(record)
    for field in dataclasses.fields(record):
        value, kind = getattr(record, field.name), type_hints(cls)[field.name]
        need(is_a(value, kind), f"{prefix}{field.name} must be {field.type}, got {value!r}")


def is_a(value: Any, kind: Any) -> bool:
    """Whether `value` is of a field's type; an int counts as a float, true and false as no number."""
    args = get_args(kind)
    if kind is float:
        return type(value) in (int, float)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(is_a(v, args[0]) for v in value)
    if get_origin(kind) is Literal:
        return isinstance(value, str)  # which of the choices it is, `check_literals` says
    if args:  # a union
        return any(is_a(value, a) for a in args)
    return type(value) is kind


def check_literals(record: Any) -> None:
    """Refuse a value outside a field's `Literal` choices."""
    cls: Any = type(record)
    for name, kind in type_hints(cls).items():
        choices, value = get_args(kind), getattr(record, name)
        if choices and all(isinstance(c, str) for c in choices) and value not in choices:
            raise ValueError(f"{name}={value!r} is not one of {list(choices)}{hint(str(value), choices)}")


def validate(c: Config) -> None:
    """Refuse a configuration that no model can be built from."""
    check_types(c)
    for key in ("rope_scaling", "vision", "quantization"):
        if getattr(c, key) is not None:
            check_types(getattr(c, key), f"{key}.")
    check_literals(c)
    _at_least(1, c, "vocab_size hidden_size moe_intermediate_size num_hidden_layers num_attention_heads head_dim "
              "q_lora_rank o_lora_rank o_groups n_routed_experts num_experts_per_tok sliding_window index_n_heads "
              "index_head_dim index_topk hc_mult hc_sinkhorn_iters max_position_embeddings")  # fmt: skip
    _at_least(0, c, "num_nextn_predict_layers")
    _positive(c, "gate_temp rms_norm_eps rope_theta hc_eps")
    need(1 < c.compress_rope_theta < math.inf,
         f"compress_rope_theta must be above 1 and finite, got {c.compress_rope_theta}: YaRN divides by its "
         "logarithm")  # fmt: skip
    for key in ("initializer_range", "swiglu_limit", "routed_scaling_factor"):
        need(0 <= getattr(c, key) < math.inf, f"{key} must be finite and not negative, got {getattr(c, key)}")
    _check_attention(c)
    need(c.num_experts_per_tok <= c.n_routed_experts,
         f"num_experts_per_tok={c.num_experts_per_tok} exceeds n_routed_experts={c.n_routed_experts}: lower it or "
         "add experts")  # fmt: skip
    need(c.n_shared_experts in (0, 1), f"n_shared_experts must be 0 or 1, got {c.n_shared_experts}")
    _check_rope_scaling(c.rope_scaling)
    modes.check(c)
    _check_tokens(c)
    _check_engram(c)
    _check_draft(c)
    if c.vision is not None:
        _check_vision(c.vision)
    if c.quantization is not None:
        _check_quantization(c.quantization)


def _at_least(least: int, record: Any, keys: str, prefix: str = "", why: str = "") -> None:
    """Refuse smaller values of the fields that `keys` lists."""
    for key in keys.split():
        value = getattr(record, key)
        need(value >= least, f"{prefix}{key} must be at least {least}, got {value}{why}")
        need(value <= LARGEST, f"{prefix}{key} must be at most {LARGEST}, got {value:.3g}" if value < 10**300 else
             f"{prefix}{key} must be at most {LARGEST}, got a number of {len(str(value))} digits")  # fmt: skip


def _positive(record: Any, keys: str, prefix: str = "") -> None:
    """Refuse zero, negative and infinite values and NaN; a norm would turn an all-zero row into NaN, for example."""
    for key in keys.split():
        value = getattr(record, key)
        need(0 < value < math.inf, f"{prefix}{key} must be positive and finite, got {value}")


def _check_attention(c: Config) -> None:
    heads, width = c.num_attention_heads, c.qk_rope_head_dim
    need(heads % c.o_groups == 0, f"o_groups={c.o_groups} does not divide num_attention_heads={heads}: give each group "
         "as many heads")  # fmt: skip
    need(width >= 2 and width % 2 == 0, f"qk_rope_head_dim must be even and positive (pairs are rotated), got {width}")
    for key in ("head_dim", "index_head_dim"):
        have = getattr(c, key)
        need(width <= have, f"qk_rope_head_dim={width} exceeds {key}={have}: rotate no more channels than a head has")


def _check_rope_scaling(r: RopeScaling) -> None:
    where = "rope_scaling."
    need(r.rope_type == "yarn", f"{where}rope_type must be 'yarn', got {r.rope_type!r}")
    need(1 <= r.factor < math.inf, f"{where}factor must be at least 1 and finite, got {r.factor}; 1 is plain rope")
    _positive(r, "beta_slow beta_fast", where)
    need(r.beta_fast > r.beta_slow, f"{where}beta_fast={r.beta_fast} must exceed {where}beta_slow={r.beta_slow}: "
         "faster channels are kept, slower ones divided by the factor")  # fmt: skip
    _at_least(1, r, "original_max_position_embeddings", where)


def _check_tokens(c: Config) -> None:
    """Ids that a model reads must be rows of the embedding."""
    read = ["bos_token_id", "eos_token_id", "pad_token_id"]
    read += ["image_token_id"] * (c.vision is not None)
    read += ["dspark_noise_token_id"] * (c.num_nextn_predict_layers > 0)
    read += ["engram_pad_token_id"] * bool(c.engram_layer_ids)
    for key in read:
        value = getattr(c, key)
        need(0 <= value < c.vocab_size,
             f"{key}={value} is no token: vocab_size={c.vocab_size} has ids 0..{c.vocab_size - 1}")  # fmt: skip


def _check_engram(c: Config) -> None:
    """The tables of the n-gram memory must have as many rows as their hash functions give."""
    ids, listed = c.engram_layer_ids, c.engram_num_embeddings
    need(len(ids) == len(listed), f"engram_num_embeddings lists {len(listed)} tables for {len(ids)} engram_layer_ids="
         f"{list(ids)}: give one number of rows a layer")  # fmt: skip
    if not ids:
        return
    _at_least(2, c, "engram_max_ngram_size")
    _at_least(1, c, "engram_n_heads engram_head_dim engram_compressed_vocab_size engram_vocab_size")
    need(c.engram_pad_token_id < c.engram_compressed_vocab_size,
         f"engram_pad_token_id={c.engram_pad_token_id} has no class: engram_compressed_vocab_size="
         f"{c.engram_compressed_vocab_size} is too small")  # fmt: skip
    sizes = f"engram_vocab_size={c.engram_vocab_size} with engram_n_heads={c.engram_n_heads} and n-grams up to " \
            f"engram_max_ngram_size={c.engram_max_ngram_size}"  # fmt: skip
    parts = (c.engram_max_ngram_size - 1) * c.engram_n_heads  # different primes from engram_vocab_size on
    too_large = f"row numbers are int32, but {sizes} make tables of more than {INT32} rows: lower one of them"
    need(parts * c.engram_vocab_size + parts * (parts - 1) // 2 <= INT32, too_large)  # else the search takes too long
    made = primes.tables(len(ids), c.engram_max_ngram_size, c.engram_n_heads, c.engram_vocab_size)
    rows = tuple(primes.rows(table) for table in made)
    need(max(rows) <= INT32, too_large)
    need(rows == listed, f"engram_num_embeddings={list(listed)}, but the primes from {sizes} sum to {list(rows)}: set "
         f"engram_num_embeddings={list(rows)}")  # fmt: skip


def _check_draft(c: Config) -> None:
    stages = c.num_nextn_predict_layers
    if not stages:
        return
    why = f", which {stages} draft stages need; num_nextn_predict_layers=0 leaves them out"
    keys = "dspark_block_size dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok"
    _at_least(1, c, keys, why=why)
    need(c.dspark_num_experts_per_tok <= c.dspark_n_routed_experts,
         f"dspark_num_experts_per_tok={c.dspark_num_experts_per_tok} exceeds dspark_n_routed_experts="
         f"{c.dspark_n_routed_experts}: lower it or add experts")  # fmt: skip
    need(len(c.dspark_target_layer_ids) > 0,
         f"dspark_target_layer_ids=[] gives {stages} draft stages nothing to read: name layers (flag t of a mode "
         "string), or set num_nextn_predict_layers=0")  # fmt: skip


def _check_vision(v: VisionConfig) -> None:
    where, tower = "vision.", "deepseek_v41_vision"
    need(v.model_type == tower, f"{where}model_type must be {tower!r}, got {v.model_type!r}; there is no other tower")
    _at_least(1, v, "num_hidden_layers hidden_size num_attention_heads intermediate_size patch_size downsample_ratio "
              "min_pixels", where)  # fmt: skip
    heads, width = v.num_attention_heads, v.hidden_size
    need(
        width % heads == 0,
        f"{where}num_attention_heads={heads} does not divide {where}hidden_size={width}: make all heads as wide",
    )
    need(width // heads % 4 == 0,
         f"{where}num_attention_heads={heads} gives heads of {width // heads} channels: rows and columns turn pairs of "
         "them, so choose a multiple of 4")  # fmt: skip
    _positive(v, "rope_theta", where)
    need(v.max_image_tokens >= SMALLEST_SPAN,
         f"{where}max_image_tokens={v.max_image_tokens} holds no image: the smallest span has {SMALLEST_SPAN} "
         "tokens")  # fmt: skip
    need(v.max_wh_ratio is None or 1 <= v.max_wh_ratio < math.inf,
         f"{where}max_wh_ratio must be at least 1 and finite, got {v.max_wh_ratio}; None is no limit")  # fmt: skip


def _check_quantization(q: QuantizationConfig) -> None:
    where = "quantization."
    for key, only in (("quant_method", "fp8"), ("activation_scheme", "dynamic"), ("scale_fmt", "ue8m0")):
        value = getattr(q, key)
        need(value == only, f"{where}{key} must be {only!r}, got {value!r}: no other storage is known")
    need(q.expert_dtype in EXPERT_STORAGE,
         f"{where}expert_dtype={q.expert_dtype!r} is not one of {list(EXPERT_STORAGE)}"
         f"{hint(q.expert_dtype, EXPERT_STORAGE)}")  # fmt: skip
    need(len(q.weight_block_size) == 2 and min(q.weight_block_size) >= 1,
         f"{where}weight_block_size must be two positive numbers, rows and columns of a tile, got "
         f"{list(q.weight_block_size)}")  # fmt: skip
