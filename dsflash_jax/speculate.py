"""Speculative decoding: draft a block, verify it as one piece, keep what rejection sampling accepts.

The tokens follow the model's distribution exactly, and greedy ones are those of plain decoding. A rejected draft leaves
nothing to undo: `cache.commit` appends what the accepted tokens made, and only that. Source: architecture section 11.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from dsflash_jax import decode, draft, model, parallel, sampling
from dsflash_jax.cache import SHORT, Cache
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Setup
from dsflash_jax.params import Weights
from dsflash_jax.sampling import Settings


@struct.dataclass
class Proposal:
    """Drafted tokens and what they were drawn from."""

    tokens: Any  # int [B, J]
    logp: Any  # float32 [B, J, V]: log-probabilities that they were drawn with
    confidence: Any  # float32 [B, J]: logit of the draft being accepted, known before it is drawn


@struct.dataclass
class Round:
    """What one round gave each row."""

    tokens: Any  # int [B, J + 1]: the new tokens, `count` of them; the last one is not in the cache yet
    count: Any  # int [B]: accepted drafts and one more, 0 for inactive rows
    log_probability: Any  # float32 [B, J + 1]: of the tokens, under the unfiltered model
    drafted: Any  # int [B]: drafts that were verified
    accepted: Any  # int [B]


Propose = Callable[[Setup, Weights, Cache, Array, Settings], Proposal]


def propose(setup: Setup, w: Weights, cache: Cache, token: Int[Array, " B"], settings: Settings) -> Proposal:
    """What the draft head proposes behind `token`, which stands behind the cache."""
    position = cache.length + 1
    chosen = lambda logits, i: sampling.draw(  # noqa: E731
        sampling.distribution(logits, settings), sampling.at(settings, position + i, sampling.DRAFT)
    )
    made = draft.draft(setup, w, token, memory(cache), choose=chosen)
    return Proposal(made.tokens[:, 1:], sampling.distribution(made.logits, settings), made.confidence)


def memory(cache: Cache) -> draft.Rings:
    """The draft stages' rings, in the order of their places."""
    keys = jnp.moveaxis(cache.forms.window.unpack(cache.draft), 1, 0)
    return draft.Rings(keys, cache.filled(), cache.length - 1)


@dataclass
class Statistics:
    """Drafts by their place in a block, over all rows and rounds."""

    drafted: np.ndarray  # int64 [J]: rounds of a row that verified this draft
    accepted: np.ndarray  # int64 [J]: ... and accepted it
    rounds: int = 0  # of a row
    tokens: int = 0  # new ones

    def add(self, made: Round) -> None:
        """Count one round."""
        place, live = np.arange(len(self.drafted))[None], np.asarray(made.count) > 0
        self.drafted += (place < np.asarray(made.drafted)[live, None]).sum(axis=0)
        self.accepted += (place < np.asarray(made.accepted)[live, None]).sum(axis=0)
        self.rounds += int(live.sum())
        self.tokens += int(np.asarray(made.count).sum())

    def clear(self) -> None:
        """Begin to count anew."""
        self.drafted[:], self.accepted[:], self.rounds, self.tokens = 0, 0, 0, 0

    def as_json(self) -> dict[str, Any]:
        """Counts, the share accepted of those verified by place, and new tokens a round."""
        share = [None if d == 0 else int(a) / int(d) for a, d in zip(self.accepted, self.drafted, strict=True)]
        counts = {"drafted": self.drafted.tolist(), "accepted": self.accepted.tolist(), "acceptance": share}
        rate = {"tokens_a_round": self.tokens / self.rounds if self.rounds else None}
        return {"rounds": self.rounds, "tokens": self.tokens} | counts | rate


@dataclass
class Speculator:
    """Rounds of drafting and verification with a decoder whose weights have a draft head, or another `proposer`."""

    decoder: Decoder
    most: int = 0  # drafts a round; 0 for all that the head makes
    threshold: float = 0.0  # drafts end before the first whose confidence, a probability, is below
    proposer: Propose = propose
    statistics: Statistics = field(init=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a model without a draft head, and for numbers out of range."""
        size = self.decoder.setup.config.dspark_block_size
        if self.proposer is propose and not self.decoder.drafts:
            raise ValueError(
                "speculative decoding needs a draft head: this model has none, or its weights have no 'mtp'. Released "
                "checkpoints have one; `dsflash train` trains none yet. Decode plainly"
            )
        if not 0 <= self.most <= size:
            raise ValueError(f"a round drafts 1 to dspark_block_size={size} tokens, or 0 for all, got {self.most}")
        if size + 1 > max(self.decoder.setup.config.sliding_window, SHORT):
            raise ValueError(f"a block of {size} drafts is longer than the window and than {SHORT - 1} tokens")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"the confidence threshold is a probability, got {self.threshold}")
        self.most = self.most or size
        self.statistics = Statistics(np.zeros(self.most, np.int64), np.zeros(self.most, np.int64))
        self._round = self.decoder.devices.jit(self._run, donate_argnums=1)

    def round(self, cache: Cache, token: Any, active: Any, settings: Settings) -> tuple[Cache, Round]:
        """Draft behind `token` int [B], the newest known one, which stands behind the cache; verify and keep.

        At least one new token for each row that is `active`, bool [B]. Drafts that the cache has no room for do not
        count: `decoder.room` for `most` + 1 tokens more has it for all. Counts are added to `statistics`.
        """
        cache, made = self._round(self.decoder.w, cache, token, active, settings)
        made = jax.device_get(made)
        self.statistics.add(made)
        return cache, made

    def _run(self, w: Weights, cache: Cache, token: Array, active: Array, settings: Settings) -> tuple[Cache, Round]:
        setup, size = self.decoder.setup, self.most
        with jax.named_scope("draft"):
            made = jax.tree.map(lambda a: a[:, :size], self.proposer(setup, w, cache, token, settings))
        sure = jax.nn.sigmoid(made.confidence) >= self.threshold
        drafted = jnp.cumprod(sure.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
        drafted = jnp.where(active, jnp.clip(cache.capacity - 1 - cache.length, 0, drafted), 0)
        tokens = jnp.concatenate([token[:, None], made.tokens], axis=1).astype(jnp.int32)
        count = jnp.where(active, drafted + 1, 0)
        with jax.named_scope("verify"):
            y, kept = decode.extend(setup, w, cache, tokens, count, classes=self.decoder.classes)
            logits = model.logits(model.whole(setup, w, "head"), y)  # [B, J + 1, V]
        accepted, behind = sampling.accept(
            made.tokens, drafted, made.logp, sampling.distribution(logits, settings), settings, cache.length + 1
        )
        count = jnp.where(active, accepted + 1, 0)
        place = jnp.arange(size + 1, dtype=jnp.int32)[None]
        drafts = jnp.concatenate([made.tokens, behind[:, None]], axis=1)
        new = jnp.where(place == accepted[:, None], behind[:, None], drafts)
        told = sampling.log_probability(logits, new)
        return decode.append(cache, kept, count), Round(new, count, told, drafted, accepted)


def oracle(known: Int[np.ndarray, "B N"], vocabulary: int, size: int) -> Propose:
    """A proposer that knows what comes: `known` [row, position], to measure the most that drafting can give."""
    table = jnp.asarray(known, jnp.int32)

    def look(setup: Setup, w: Weights, cache: Cache, token: Array, settings: Settings) -> Proposal:
        at = cache.length[:, None] + 1 + jnp.arange(size, dtype=jnp.int32)[None]
        own = jax.lax.dynamic_slice_in_dim(table, parallel.index(setup.parallel.rows) * len(token), len(token))
        tokens: Array = jnp.take_along_axis(own, jnp.minimum(at, own.shape[1] - 1), axis=1)
        logp: Float[Array, "B J V"] = jnp.where(jax.nn.one_hot(tokens, vocabulary, dtype=bool), 0.0, -jnp.inf)
        return Proposal(tokens, logp, jnp.full(tokens.shape, jnp.inf, jnp.float32))

    return look
