"""Every weight of a model by part: how many parameters, how a checkpoint stores it, what its optimiser keeps.

Reads declarations only, so nothing is allocated. Source: architecture sections 3, 15 and 16, training section 2.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from dsflash_jax.checkpoint import SCALE_GROUP, Entry, declare
from dsflash_jax.config import Config, need
from dsflash_jax.params import Weight, leaves

Format = Literal["F32", "BF16", "FP8", "FP8 rows", "FP4"]

# The first pattern that a path contains decides; the order matters where one place lies inside another.
GROUPS: tuple[tuple[str, str], ...] = (
    (r"^(embed|head|norm)$|^layers/(?!.*/engram/)", "backbone"),
    (r"/engram/embed$", "engram tables"),
    (r"/engram/", "engram projections"),
    (r"^mtp/", "dspark"),
    (r"^(vision/|image_)", "vision"),
    (r"^aligner/", "aligner"),
)
PARTS: tuple[tuple[str, str], ...] = (
    (r"^embed$", "embedding"),
    (r"^head$", "head"),
    (r"/engram/embed$", "engram tables"),
    (r"/engram/", "engram projections"),
    (r"^vision/", "image tower"),
    (r"^image_", "span marks"),
    (r"^aligner/", "aligner"),
    (r"/attn/compressor/", "compressors"),
    (r"/attn/indexer/", "indexers"),
    (r"/attn/", "attention projections"),  # with the sinks and the norms between them
    (r"/ffn/experts/", "routed experts"),
    (r"/ffn/shared_experts/", "shared experts"),
    (r"/ffn/gate/", "routers"),
    (r"/hc_(attn|ffn)_", "hyper-connections"),
    (r"/main_proj$", "tap projection"),
    (r"/markov_head/", "markov head"),
    (r"/confidence_head/", "confidence head"),
    (r"norm$", "norms"),
)
# Storage in a quantised checkpoint; what no pattern matches is plain.
FORMATS: tuple[tuple[str, Format], ...] = (
    (r"/hc_(attn|ffn)_|/attn_sink$|/gate/bias", "F32"),
    (r"/engram/embed$", "FP8 rows"),
    (r"/ffn/experts/", "FP4"),
    (r"/attn/(wq_a|wq_b|wkv|wo_a|wo_b|indexer/wq_b)$|/shared_experts/|/engram/wkv$|/main_proj$", "FP8"),
)
PLAIN: dict[str, Format] = {"bfloat16": "BF16", "float32": "F32"}  # by Config.dtype
WIDTH = {"F32": 4, "BF16": 2, "FP8": 1, "FP8 rows": 1}  # bytes of a value
FP4_PER_BYTE = 2
MASTER_BYTES = 4  # the float32 weight that is updated
STATE_BYTES = {"muon": 4, "sinkhorn": 4, "norm": 8, "scalar": 8, "rule": 0}  # float32 moments: one, two or none


@dataclass(frozen=True)
class Item:
    """One declared weight and its place in the inventory."""

    path: str  # joined with slashes
    weight: Weight
    group: str  # backbone, Engram, draft head, ...
    part: str  # attention projections, routed experts, ...
    format: Format  # in a checkpoint
    shape: tuple[int, ...]  # published shape of one tensor's values
    copies: int  # tensors of that shape: one a layer and expert
    scales: int  # scale bytes of one tensor, 0 without

    @property
    def tensors(self) -> int:
        """Published tensors, scales counted."""
        return self.copies * (2 if self.scales else 1)

    @property
    def bytes(self) -> int:
        """Payload of all copies in a checkpoint."""
        if self.format == "FP4":
            stored = self.shape[0] * -(-self.shape[1] // FP4_PER_BYTE)
        else:
            stored = prod(self.shape) * WIDTH[self.format]
        return self.copies * (stored + self.scales)


def part_order() -> list[str]:
    """Names of the parts in the order of a sheet."""
    return [part for _, part in PARTS]


def first(table: Iterable[tuple[str, Any]], path: str) -> Any:
    """What the first pattern found in `path` stands for; None when none is."""
    return next((value for pattern, value in table if re.search(pattern, path)), None)


def items(c: Config) -> tuple[Item, ...]:
    """The inventory of the whole model."""
    return tuple(item(c, path, weight) for path, weight in leaves(declare(c)).items())


def item(c: Config, path: str, weight: Weight) -> Item:
    """Place one weight. Raises ValueError when no part knows its path."""
    part, group = first(PARTS, path), first(GROUPS, path)
    need(part is not None and group is not None,
         f"weight {path} has part {part} and group {group}: add its pattern to inventory.PARTS or GROUPS")  # fmt: skip
    experts = "/experts/" in path
    entry = Entry("", path, (0,) * (len(weight.stack) + experts), weight)
    stored = format_of(c, path)
    return Item(
        path=path,
        weight=weight,
        group=group,
        part=part,
        format=stored,
        shape=entry.shape,
        copies=prod(weight.stack) * (weight.shape[0] if experts else 1),
        scales=_scales(c, stored, entry.shape),
    )


def format_of(c: Config, path: str) -> Format:
    """How a checkpoint of this configuration stores the weight at `path`.

    Without `quantization` the tables keep their rows in 8 bits and float32 weights theirs; the rest is `c.dtype`.
    """
    found: Format | None = first(FORMATS, path)
    quantised = found in ("FP8", "FP4")
    if found is None or (quantised and c.quantization is None):
        return PLAIN[c.dtype]
    if found == "FP4" and c.quantization is not None and c.quantization.expert_dtype != "fp4":
        return "FP8"
    return found


def _scales(c: Config, stored: Format, shape: tuple[int, ...]) -> int:
    """E8M0 bytes of one tensor: one a tile of an FP8 weight, one a group of columns of an FP4 weight or a table row."""
    if stored == "FP8" and c.quantization is not None:
        rows, columns = c.quantization.weight_block_size
        return -(-shape[0] // rows) * -(-shape[1] // columns)
    return shape[0] * -(-shape[1] // SCALE_GROUP) if stored in ("FP4", "FP8 rows") else 0


def parameters(listed: Iterable[Item]) -> dict[str, dict[str, int]]:
    """Parameters by group and part, scales not counted; the backbone first."""
    out: dict[str, dict[str, int]] = {}
    groups, parts = [group for _, group in GROUPS], part_order()
    for i in sorted(listed, key=lambda i: (groups.index(i.group), parts.index(i.part))):
        group = out.setdefault(i.group, {})
        group[i.part] = group.get(i.part, 0) + i.weight.size
    return out


def checkpoint(listed: Iterable[Item]) -> dict[str, dict[str, int]]:
    """Published tensors, values and payload bytes by storage format; scales are counted with their values' format."""
    out: dict[str, Counter[str]] = {}
    for i in listed:
        out.setdefault(i.format, Counter()).update(tensors=i.tensors, values=i.weight.size, bytes=i.bytes)
    return {stored: dict(counts) for stored, counts in sorted(out.items())}


def optimiser(listed: Iterable[Item]) -> dict[str, dict[str, int]]:
    """Parameters, bytes of float32 master weights and bytes of float32 moments by optimiser family.

    Gradients and the optimiser's few counters are not included.
    """
    out: dict[str, Counter[str]] = {}
    for i in listed:
        family, size = i.weight.family, i.weight.size
        bytes_of = {"master": size * MASTER_BYTES, "state": size * STATE_BYTES[family]}
        out.setdefault(family, Counter()).update(parameters=size, **bytes_of)
    return {family: dict(out[family]) for family in STATE_BYTES if family in out}
