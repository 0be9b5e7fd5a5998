"""What one token costs: the weights it meets, the bytes it leaves in caches, the products of decode and prefill.

Everything is arithmetic on the configuration. A product is one multiply-add, two FLOPs. Counted are matrix products
and the mixing of residual copies; element-wise work (norms, rotations, softmax, top-k, activations, gates) is not.
Source: architecture sections 4 to 10, 13, 14 and 16.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal, TypeVar

from dsflash_jax import inventory, layers, quant
from dsflash_jax.config import Config, need
from dsflash_jax.inventory import Item
from dsflash_jax.modes import LayerSpec, Mode
from dsflash_jax.params import leaves

Operands = Literal["fp4", "fp8", "bf16"]  # the wider operand of a product; bf16 stands for float32, too
Products = dict[tuple[str, Operands], Fraction]  # multiply-adds a token by part and precision
Counting = Literal["alike", "fp8"]
Number = TypeVar("Number", int, float)
# "alike" counts every product as two FLOPs; "fp8" in units of an FP8 product, the report's way: FP4 by FP4 half, bf16
# double. A product of an FP4 weight and an FP8 input counts as FP8, the precision it runs in.
COST: dict[Counting, dict[Operands, Fraction]] = {
    "alike": {"fp4": Fraction(2), "fp8": Fraction(2), "bf16": Fraction(2)},
    "fp8": {"fp4": Fraction(1), "fp8": Fraction(2), "bf16": Fraction(4)},
}
# What the last KV source computes for every token of a prompt when the decoder only replays its end.
KV_ONLY = re.compile(r"/attn_norm$|/attn/(wkv|kv_norm)$|/attn/compressor/|/attn/indexer/(wk|k_norm)$")
FLOAT32_BYTES = INT32_BYTES = 4


@dataclass(frozen=True)
class Span:
    """Queries whose context, itself included, is `first` + 1 .. `last` tokens; their windows start at `origin`."""

    first: int
    last: int
    origin: int = 0

    def mean(self, cap: int, ratio: int = 1) -> Fraction:
        """Mean over the queries of min(cap, context // ratio): entries reached among those of a ratio."""
        return Fraction(_reached(cap, ratio, self.last) - _reached(cap, ratio, self.first), self.last - self.first)

    @property
    def windows(self) -> Span:
        """The same queries with contexts counted from `origin`."""
        return Span(self.first - self.origin, self.last - self.origin)


def _reached(cap: int, ratio: int, n: int) -> int:
    """sum of min(cap, m // ratio) for m = 1 .. n."""
    capped = max(0, n - cap * ratio + 1)
    n -= capped
    whole = n // ratio
    return ratio * whole * (whole - 1) // 2 + whole * (n - whole * ratio + 1) + cap * capped


@lru_cache(maxsize=64)
def layer_items(c: Config, spec: LayerSpec) -> tuple[Item, ...]:
    """Inventory of one layer of this kind."""
    declared = leaves({"layers": {"layer": layers.declare(c, spec)}})
    return tuple(inventory.item(c, path, weight) for path, weight in declared.items())


def met(c: Config, item: Item) -> int:
    """Entries of a layer's weight that multiply one token: of experts the active share, of tables and biases none."""
    if item.weight.family == "rule" or item.part == "engram tables":
        return 0
    if item.part == "routed experts":
        return item.weight.size // c.n_routed_experts * c.num_experts_per_tok
    return item.weight.size


def boundary(c: Config) -> int | None:
    """The layer whose KV ends the encoder-only prefill, None where the decoder cannot be left out.

    It is the last KV source. No n-gram memory may sit at or above it, and no layer before it may choose the candidates
    of those above (architecture section 14).
    """
    if not c.kv_source_layer_ids:
        return None
    last = max(c.kv_source_layer_ids)
    late_memory = any(i >= last for i in c.engram_layer_ids)
    return None if late_memory or 0 <= c.candidate_source_layer_id < last else last


def active(c: Config) -> dict[str, dict[str, int]]:
    """Parameters that multiply one token, by part: for "decode" and "training" all layers and the head.

    For "prefill" the layers below `boundary` and its KV projections: replaying the decoder on the last window and the
    head are costs of a prompt, not of a token. Embedding and table look-ups are not counted.
    """
    last = boundary(c)
    whole, prefill = Counter[str](), Counter[str]()
    for i, spec in enumerate(c.table):
        for item in layer_items(c, spec):
            whole[item.part] += met(c, item)
            if last is None or i < last or (i == last and KV_ONLY.search(item.path)):
                prefill[item.part] += met(c, item)
    whole.update({"norms": c.hidden_size, "head": c.vocab_size * c.hidden_size})
    whole, prefill = +whole, +prefill  # without parts that only look up
    return {"decode": _ordered(whole), "prefill": _ordered(prefill), "training": _ordered(whole)}


def cache(c: Config) -> dict[str, dict[str, Fraction | int]]:
    """Packed cache bytes by kind: "token" grows with every token of a sequence, "sequence" is constant.

    A compressed entry is FP4 with an E4M3 scale, an index key FP4 with an E8M0 scale, a window entry FP8 with an E8M0
    scale; a ratio-r source keeps up to r - 1 pending tokens as float32 KV and gate. Draft stages keep window rings of
    their own. The n-gram history is int32.
    """
    full = [spec for spec in c.table if spec.mode is Mode.FULL]
    slots = sum((Fraction(1, spec.ratio) for spec in full), Fraction(0))
    ring = c.sliding_window * packed(c.head_dim, quant.Q8)
    return {
        "token": {
            "compressed KV": slots * packed(c.head_dim, quant.Q4X16),
            "index keys": slots * packed(c.index_head_dim, quant.Q4X32),
        },
        "sequence": {
            "window rings": c.num_hidden_layers * ring,
            "draft rings": c.num_nextn_predict_layers * ring,
            "compressor tails": sum(spec.ratio - 1 for spec in full) * 2 * c.head_dim * FLOAT32_BYTES,
            "n-gram history": (c.engram_max_ngram_size - 1) * INT32_BYTES if c.engram_layer_ids else 0,
        },
    }


def packed(width: int, fmt: quant.Format) -> int:
    """Bytes of one vector: codes, and a scale a group; a partial group has its scale, too."""
    return -(-width // fmt.per_byte) + -(-width // fmt.group)


def sequence_bytes(c: Config, tokens: int) -> int:
    """All cache bytes of one sequence: only complete slots are stored."""
    entry = packed(c.head_dim, quant.Q4X16) + packed(c.index_head_dim, quant.Q4X32)
    slots = sum(tokens // spec.ratio for spec in c.table if spec.mode is Mode.FULL)
    return slots * entry + sum(int(n) for n in cache(c)["sequence"].values())


def decode(c: Config, context: int) -> Products:
    """Products of one decoded token that sees `context` tokens, itself included.

    The work of a slot (its index key) is spread over its tokens: the mean of a step that completes one and of one that
    does not.
    """
    need(context >= 1, f"decode: the context counts the token itself, so it is at least 1, got {context}")
    total = _end(c)
    for spec in c.table:
        _add(total, layer(c, spec, Span(context - 1, context)))
    return total


def prefill(c: Config, prompt: int, replay: bool) -> Products:
    """Mean products a token of a prompt: every layer on every token, or the encoder and a replay of the last window.

    With `replay`, layers from `boundary` on run on the last `sliding_window` tokens only, whose windows start there;
    the boundary layer makes its KV for every token. The head reads the last token. Raises ValueError when the
    configuration has no boundary.
    """
    need(prompt >= 1, f"prefill: a prompt has at least 1 token, got {prompt}")
    last = boundary(c)
    need(not replay or last is not None,
         "prefill: this configuration cannot leave the decoder out: it needs a KV source, with no n-gram memory at or "
         "above the last one and no candidate source below it")  # fmt: skip
    segment = min(prompt, c.sliding_window)
    everything, end = Span(0, prompt), Span(prompt - segment, prompt, prompt - segment)
    share = Fraction(segment, prompt)
    total: Products = {}
    _add(total, _end(c), Fraction(1, prompt))
    for i, spec in enumerate(c.table):
        if not replay or last is None or i < last:
            _add(total, layer(c, spec, everything))
            continue
        _add(total, layer(c, spec, end), share)
        if i == last:
            _add(total, linear(c, spec, kv_only=True), 1 - share)  # of the tokens that are not replayed
    return total


def layer(c: Config, spec: LayerSpec, span: Span) -> Products:
    """Mean products of one layer over the queries of a span."""
    total = linear(c, spec)
    streams = c.hc_mult * c.hidden_size
    # Each of the two sublayers collapses the copies, spreads its output over them and mixes them.
    _add(total, {("hyper-connections", "bf16"): Fraction(2 * streams * (2 + c.hc_mult))})
    pair = 2 * c.num_attention_heads * c.head_dim  # query by key, probability by value
    _add(total, {("window attention", "bf16"): pair * span.windows.mean(c.sliding_window)})
    if spec.ratio:
        _add(total, {("selected attention", "bf16"): pair * span.mean(c.index_topk, spec.ratio)})
    if spec.selects:
        limit = c.candidate_topk_blocks * c.candidate_block_size if spec.restricted else span.last
        scored = c.index_n_heads * span.mean(limit, spec.ratio)
        part = score_part(spec)
        _add(total, {(part, "fp4"): c.index_head_dim * scored, (part, "bf16"): scored})  # and the sum over heads
    return total


def score_part(spec: LayerSpec) -> str:
    """Name of a selecting layer's index scores: by mode, ratio, and whether candidates limit them."""
    return f"index scores, {spec.mode.name.lower()} ratio {spec.ratio}" + (" in candidates" if spec.restricted else "")


def linear(c: Config, spec: LayerSpec, kv_only: bool = False) -> Products:
    """Products with the weights of one layer a token; with `kv_only` those that make its KV and index keys."""
    total: Products = {}
    for item in layer_items(c, spec):
        if item.weight.family == "muon" and (not kv_only or KV_ONLY.search(item.path)):
            tokens = spec.ratio if item.path.endswith("indexer/wk") else 1  # index keys are made once a slot
            _add(total, {(item.part, operands(item)): Fraction(met(c, item), tokens)})
    return total


def operands(item: Item) -> Operands:
    """Precision of the product with a stored weight: FP8 and FP4 weights meet FP8 inputs, but `wo_a` bf16 ones."""
    low = item.format in ("FP8", "FP4") and not item.path.endswith("/wo_a")
    return "fp8" if low else "bf16"


def flops(products: Products, counting: Counting) -> dict[str, float]:
    """FLOPs a token by part under one way of counting; products with weights first, in the inventory's order."""
    out: dict[str, Fraction] = {}
    for (part, precision), count in products.items():
        out[part] = out.get(part, Fraction(0)) + count * COST[counting][precision]
    return _ordered({part: float(count) for part, count in out.items()})


def _ordered(parts: Mapping[str, Number]) -> dict[str, Number]:
    """Parts with weights in the inventory's order, then the others as they come."""
    order = {part: i for i, part in enumerate(inventory.part_order())}
    return {part: parts[part] for part in sorted(parts, key=lambda part: order.get(part, len(order)))}


def _end(c: Config) -> Products:
    """The last fold of the copies and the head."""
    return {
        ("hyper-connections", "bf16"): Fraction(c.hc_mult * c.hidden_size),
        ("head", "bf16"): Fraction(c.vocab_size * c.hidden_size),
    }


def _add(total: Products, more: Products, factor: Fraction | int = 1) -> None:
    for key, count in more.items():
        total[key] = total.get(key, Fraction(0)) + count * factor
