"""Configuration: frozen records, from and to the checkpoint's config.json, and their checks.

`Config` says what the model is and uses the released key names. `Compute` says how to run it and never changes the
function computed in exact arithmetic. `Objective` says which losses train it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from dsflash_jax import modes
from dsflash_jax.validation import check_literals as check_literals  # these three are for the files above, too
from dsflash_jax.validation import hint as hint
from dsflash_jax.validation import is_a, validate
from dsflash_jax.validation import need as need


@dataclass(frozen=True)
class RopeScaling:
    """YaRN, used by every rotation of a compressed layer (architecture section 5)."""

    rope_type: str = "yarn"  # the only supported kind
    factor: float = 16  # context extension; 1 is plain rope
    beta_fast: float = 32  # rotations above which a frequency is kept
    beta_slow: float = 1  # rotations below which a frequency is divided by `factor`
    original_max_position_embeddings: int = 65536  # length that the unscaled frequencies were trained for


@dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint stores its weights; says nothing about the computation."""

    quant_method: str = "fp8"  # dense linears: E4M3
    activation_scheme: str = "dynamic"  # input scales are computed from the input
    weight_block_size: tuple[int, ...] = (32, 32)  # tile that shares one scale
    scale_fmt: str = "ue8m0"  # power-of-two scales
    expert_dtype: str = "fp4"  # routed experts: packed E2M1


@dataclass(frozen=True)
class VisionConfig:
    """Image tower and aligner (architecture section 12)."""

    model_type: str = "deepseek_v41_vision"  # fixed
    num_hidden_layers: int = 32  # tower blocks
    hidden_size: int = 1024  # tower width
    num_attention_heads: int = 16  # tower heads
    intermediate_size: int = 2816  # tower MLP width
    patch_size: int = 14  # pixels a side
    rope_theta: float = 10000  # base of the 2-D rotation
    downsample_ratio: int = 3  # patches a side that become one image token
    max_image_tokens: int = 1024  # limit after down-sampling
    min_pixels: int = 295936  # smaller images are scaled up (544 squared)
    max_wh_ratio: float | None = None  # largest aspect ratio, None for any


FIXED_TOP = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", "tie_word_embeddings": False}
FIXED_TEXT = {
    "model_type": "deepseek_v41_text",
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_cache": True,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}
TOP_FIELDS = ("dtype", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id")


@dataclass(frozen=True)
class Config:
    """The architecture, under the released key names; defaults are the released values of what an ablation keeps."""

    vocab_size: int  # rows of embedding and head
    hidden_size: int  # width of one residual copy
    moe_intermediate_size: int  # inner width of one expert
    num_hidden_layers: int  # backbone layers
    num_attention_heads: int  # query heads; keys and values have one
    head_dim: int  # width of a query head and of the shared key/value latent
    qk_rope_head_dim: int  # last channels of a head that are rotated
    q_lora_rank: int  # query latent
    o_lora_rank: int  # output latent of one group
    o_groups: int  # groups of consecutive heads in the output projection
    n_routed_experts: int  # experts that compete
    num_experts_per_tok: int  # routed experts a token uses
    sliding_window: int  # tokens a query sees uncompressed, itself included
    compress_ratios: tuple[int, ...]  # tokens per compressed slot, a layer then a draft stage; 0 = window only
    kv_source_layer_ids: tuple[int, ...]  # layers that make compressed KV (Full)
    index_source_layer_ids: tuple[int, ...]  # layers that select slots (Full and Reindex)
    index_n_heads: int  # indexer heads
    index_head_dim: int  # indexer head width
    index_topk: int  # slots a query selects
    candidate_source_layer_id: int = -1  # layer that picks candidate blocks for later selections; -1 = off
    candidate_topk_blocks: int = 2048  # candidate blocks kept a query
    candidate_block_size: int = 8  # slots in a block
    n_shared_experts: int = 1  # experts every token uses
    swiglu_limit: float = 10.0  # clamp before the activation; 0 = none
    scoring_func: Literal["sqrtsoftplus", "softmax", "sigmoid"] = "sqrtsoftplus"  # router affinity
    norm_topk_prob: bool = True  # chosen affinities are normalised to sum 1
    routed_scaling_factor: float = 1.5  # times the routing weights
    gate_temp: float = 1.0  # divides router logits (absent in the released file)
    rms_norm_eps: float = 1e-20  # all norms of the language model
    initializer_range: float = 0.02  # standard deviation of new matrices
    max_position_embeddings: int = 1048576  # longest sequence
    rope_theta: float = 10000  # base in window-only layers
    compress_rope_theta: float = 160000  # base in compressed layers
    rope_scaling: RopeScaling = RopeScaling()  # YaRN of compressed layers
    hc_mult: int = 4  # residual copies
    hc_sinkhorn_iters: int = 20  # normalisations of the mixing matrix
    hc_eps: float = 1e-6  # inside the normalisations and added to the pre weights
    engram_layer_ids: tuple[int, ...] = ()  # layers with n-gram memory
    engram_num_embeddings: tuple[int, ...] = ()  # table rows of each of them
    engram_max_ngram_size: int = 4  # longest n-gram
    engram_vocab_size: int = 16000000  # primes are searched from here
    engram_n_heads: int = 8  # hash heads per n-gram size
    engram_head_dim: int = 256  # width of one row
    engram_pad_token_id: int = 2  # stands before a sequence start
    engram_compressed_vocab_size: int = 99092  # classes of the normalised vocabulary
    num_nextn_predict_layers: int = 0  # draft stages (DSpark)
    dspark_block_size: int = 0  # tokens drafted at once
    dspark_noise_token_id: int = 0  # input of the positions to draft
    dspark_target_layer_ids: tuple[int, ...] = ()  # layers whose inputs feed the draft head
    dspark_markov_rank: int = 256  # rank of the bigram head
    dspark_n_routed_experts: int = 0  # experts of a draft stage
    dspark_num_experts_per_tok: int = 0  # experts a draft token uses
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # checkpoint dtype of unquantised weights
    bos_token_id: int = 0  # starts a document
    eos_token_id: int = 1  # ends a document
    pad_token_id: int = 2  # fills a row
    image_token_id: int = 129264  # every position of an image span
    vision: VisionConfig | None = None  # image tower, None for text only
    quantization: QuantizationConfig | None = None  # storage of a checkpoint, None for plain

    def __post_init__(self) -> None:
        validate(self)

    @property
    def table(self) -> tuple[modes.LayerSpec, ...]:
        """One `LayerSpec` a backbone layer."""
        return modes.table(self)

    @property
    def modes(self) -> str:
        """The layer table as a mode string, see `modes.parse`."""
        return modes.text(self.table)

    @property
    def tower(self) -> VisionConfig:
        """The image tower. Raises ValueError for a model of text."""
        need(self.vision is not None, "images need an image tower, but the configuration has vision=None: set vision")
        assert self.vision is not None
        return self.vision

    def with_modes(self, text: str, **changes: Any) -> Config:
        """This configuration with the layers of a mode string, for example `S S F2 U U F1 U X U`, and other `changes`.

        Engram, candidate and draft flags of the string replace the present ones; when the number of Engram layers
        changes, `changes` must give `engram_num_embeddings`. The draft stages stay if a layer feeds them, else they go.
        """
        tables = changes.get("engram_num_embeddings", self.engram_num_embeddings)
        drafts = changes.get("num_nextn_predict_layers", self.num_nextn_predict_layers)
        layout = modes.fields(modes.parse(text), tables, drafts)
        for key, value in changes.items():
            need(layout.get(key, value) == value, f"{key}={value!r} contradicts modes={text!r}: give one of them")
        return dataclasses.replace(self, **(changes | layout))

    @classmethod
    def from_json(cls, source: str | Path | dict[str, Any]) -> Config:
        """Read the checkpoint's nested config.json (a path or its parsed content); unknown keys raise."""
        data = source if isinstance(source, dict) else _read_json(Path(source))
        if not isinstance(data, dict) or not isinstance(data.get("text_config"), dict):
            found = f"keys {sorted(data)[:8]}" if isinstance(data, dict) else f"a {type(data).__name__}"
            raise ValueError(
                "config.json has no text_config: expected the checkpoint's nested form "
                f"(architectures, text_config, vision_config), found {found}"
            )
        top, text = dict(data), dict(data["text_config"])
        top.pop("text_config")
        vision, quantization = top.pop("vision_config", None), top.pop("quantization_config", None)
        for name, given, fixed in (("config.json", top, FIXED_TOP), ("text_config", text, FIXED_TEXT)):
            for key, value in fixed.items():
                if given.pop(key, value) != value:
                    raise ValueError(f"{name}: {key} must be {value!r}; this architecture has no other form")
        kwargs = {key: top.pop(key) for key in TOP_FIELDS if key in top}
        if top:
            raise unknown_key(next(iter(top)), [*FIXED_TOP, *TOP_FIELDS, "text_config", "vision_config"], "config.json")
        if "rope_scaling" in text:
            text["rope_scaling"] = build(RopeScaling, text["rope_scaling"], "rope_scaling")
        if vision is not None:
            kwargs["vision"] = build(VisionConfig, vision, "vision_config")
        if quantization is not None:
            kwargs["quantization"] = build(QuantizationConfig, quantization, "quantization_config")
        text_fields = {f.name for f in dataclasses.fields(cls)} - {*TOP_FIELDS, "vision", "quantization"}
        for key in text:
            if key not in text_fields:
                raise unknown_key(key, [*text_fields, *FIXED_TEXT], "text_config")
        return build(cls, kwargs | text, "text_config")

    def to_json(self) -> dict[str, Any]:
        """The checkpoint's nested form as plain JSON data, in the released key order."""
        flat = plain(self)
        text = {key: FIXED_TEXT.get(key, flat.get(key)) for key in TEXT_ORDER}
        if self.gate_temp != 1.0:
            text["gate_temp"] = self.gate_temp
        out = {key: FIXED_TOP.get(key, flat.get(key)) for key in TOP_ORDER}
        if self.quantization is not None:
            out["quantization_config"] = flat["quantization"]
        out["text_config"] = text
        if self.vision is not None:
            out["vision_config"] = flat["vision"]
        return out


TOP_ORDER = (
    "architectures", "model_type", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "image_token_id",
    "tie_word_embeddings",
)  # fmt: skip
TEXT_ORDER = (
    "model_type", "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_lora_rank", "o_groups", "hidden_act",
    "swiglu_limit", "rms_norm_eps", "attention_bias", "attention_dropout", "initializer_range", "use_cache",
    "tie_word_embeddings", "max_position_embeddings", "rope_theta", "rope_scaling", "n_routed_experts",
    "n_shared_experts", "num_experts_per_tok", "scoring_func", "topk_method", "norm_topk_prob",
    "routed_scaling_factor", "sliding_window", "compress_ratios", "compress_rope_theta", "kv_source_layer_ids",
    "index_source_layer_ids", "index_n_heads", "index_head_dim", "index_topk", "candidate_source_layer_id",
    "candidate_topk_blocks", "candidate_block_size", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "engram_layer_ids",
    "engram_num_embeddings", "engram_max_ngram_size", "engram_vocab_size", "engram_n_heads", "engram_head_dim",
    "engram_pad_token_id", "engram_compressed_vocab_size", "num_nextn_predict_layers", "dspark_block_size",
    "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank", "dspark_n_routed_experts",
    "dspark_num_experts_per_tok",
)  # fmt: skip


@dataclass(frozen=True)
class Compute:
    """How the model is run. No field changes the function in exact arithmetic; each has a test that says so."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # activations and matrix operands; statistics stay float32
    remat: Literal["none", "selective", "full"] = "selective"  # what backward recomputes; selections are always saved
    scan: bool = True  # repeated layers as one scanned body; False unrolls them
    attention: Literal["sparse", "dense"] = "sparse"  # query-chunked gather, or the T x (T + S) oracle (no cache)
    experts: Literal["auto", "ragged", "blocked", "dense"] = "auto"  # grouped matrix product, see `moe.grouped_dot`
    query_chunk: int = 128  # queries handled at once by attention, index scores and their loss
    loss_chunk: int = 512  # tokens of a row whose logits exist at once

    def __post_init__(self) -> None:
        check_literals(self)
        for key in ("query_chunk", "loss_chunk"):
            if getattr(self, key) < 1:
                raise ValueError(f"compute.{key} must be at least 1, got {getattr(self, key)}")


@dataclass(frozen=True)
class Objective:
    """Weights and choices of the auxiliary losses (training section 4.2 and 3.2); inference passes None instead."""

    index_weight: float = 1.0  # times the indexer KL summed over producing layers; 0 leaves it out of the program
    index_keys: Literal["topk", "topk+random", "dense"] = "topk"  # supervised slots of a query
    index_random: int = 64  # extra visible slots drawn a query by `topk+random`
    index_teacher: Literal["own", "group_mean"] = "own"  # attention that teaches: the producer's, or its group's mean
    balance_weight: float = 1e-4  # times the sequence balance loss summed over layers
    z_weight: float = 0.0  # times the mean squared log-partition of the head

    def __post_init__(self) -> None:
        check_literals(self)
        for key in ("index_weight", "index_random", "balance_weight", "z_weight"):
            value = getattr(self, key)
            need(0 <= value < math.inf, f"objective.{key} must not be negative, and finite, got {value}")


@dataclass(frozen=True)
class Quantize:
    """Which values are rounded as the released model rounds them; the gradient passes straight through.

    All off is plain floating point, for pretraining; all on is the released model, for quantisation-aware training and
    inference (architecture section 3, training section 5).
    """

    kv_fp4: bool = False  # compressed KV after rotation: E2M1, one E4M3 scale a group of 16
    index_fp4: bool = False  # index queries and keys after rotation: E2M1, one power of two a group of 32
    window_fp8: bool = False  # window KV after rotation: E4M3, one power of two a group of 32
    linear_fp8: bool = False  # the input of every linear map that a checkpoint stores in FP8 or FP4, like window KV


def unknown_key(key: str, known: Iterable[str], where: str) -> ValueError:
    """An error that names the nearest known key."""
    return ValueError(f"{where}: unknown key {key!r}{hint(key, known)}")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
        raise ValueError(f"{path}: expected JSON, got what cannot be read: {error}") from error


def build(cls: type, data: Any, where: str) -> Any:
    """Make a record from plain data: unknown and missing keys and values of another type raise, lists become tuples."""
    need(isinstance(data, dict), f"{where}: expected an object with keys, got {data!r}")
    known = {f.name: f for f in dataclasses.fields(cls)}
    kinds = get_type_hints(cls)
    for key in data:
        if key not in known:
            raise unknown_key(key, list(known), where)
    missing = [n for n, f in known.items() if n not in data and f.default is dataclasses.MISSING]
    if missing:
        raise ValueError(f"{where}: missing {', '.join(missing)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
    for key, value in values.items():
        need(is_a(value, kinds[key]), f"{where}: {key} must be {known[key].type}, got {value!r}")
    return cls(**values)


def plain(record: Any) -> dict[str, Any]:
    """A record as JSON data (tuples as lists)."""
    return json.loads(json.dumps(dataclasses.asdict(record)))
