"""From logits to tokens: filtered distributions, draws, and the acceptance of drafts.

Every row has its own settings and its own key, and one program serves any mixture of them. A random number belongs to
a row's key, a position and a use, never to a call: what a row says depends neither on the rows beside it nor on how
its tokens were cut into pieces.

B rows, J drafts of a row, V tokens; log-probabilities are float32 and -inf where a token cannot be drawn. Drafts are
accepted by speculative sampling (Leviathan et al. 2023, Chen et al. 2023), which keeps the target's distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int32, Key

# What a random number is for: the one that draws a token without drafts or behind the last accepted one, the one that
# draws a draft, the one that accepts it, and the one that draws what replaces a rejected one.
PLAIN, DRAFT, ACCEPT, RESIDUAL = range(4)


@struct.dataclass
class Settings:
    """How the tokens of each row are drawn."""

    temperature: Any  # float32 [B]: 0 takes the likeliest token
    top_k: Any  # int32 [B]: tokens that stay, 0 for all
    top_p: Any  # float32 [B]: probability that stays, 1 for all
    min_p: Any  # float32 [B]: least probability as a share of the largest, 0 for all
    key: Any  # key [B]


Values = float | Sequence[float]  # one number for all rows, or one a row


def settings(
    rows: int,
    temperature: Values = 1.0,
    top_k: Values = 0,
    top_p: Values = 1.0,
    min_p: Values = 0.0,
    seed: Values = 0,
) -> Settings:
    """Settings of `rows` rows, made on the host; of a single seed, row i takes seed + i.

    So rows with the same prompt differ, and any row can be repeated alone. Keys are Threefry keys whatever the default
    of the process is, for others may draw other numbers in a larger batch; all 64 bits of a seed count.
    Raises ValueError for a value out of range, or another number of values than rows.
    """
    whole, most = (lambda v: isinstance(v, Integral)), float(np.finfo(np.float32).max)
    heat = _column("temperature", rows, temperature, lambda v: 0 <= v <= most, "0 for the likeliest token, or above")
    k = _column("top_k", rows, top_k, lambda v: whole(v) and 0 <= v < 2**31, "a whole number of tokens, 0 for all")
    p = _column("top_p", rows, top_p, lambda v: 0 < v <= 1, "a probability above 0 and up to 1, 1 for all tokens")
    share = _column("min_p", rows, min_p, lambda v: 0 <= v <= 1, "a share from 0 to 1, 0 for all tokens")
    each = [int(seed) + i for i in range(rows)] if isinstance(seed, Integral) else seed
    seeds = _column("seed", rows, each, lambda v: whole(v) and 0 <= v < 2**63, "a whole number from 0 to 2**63 - 1")
    words = [[int(s) >> 32, int(s) & 0xFFFFFFFF] for s in seeds]  # `jax.random.key` would drop the upper one
    return Settings(
        temperature=jnp.asarray(heat, jnp.float32),
        top_k=jnp.asarray(k, jnp.int32),
        top_p=jnp.asarray(p, jnp.float32),
        min_p=jnp.asarray(share, jnp.float32),
        key=jax.random.wrap_key_data(jnp.asarray(np.array(words, np.uint32).reshape(rows, 2)), impl="threefry2x32"),
    )


def _column(name: str, rows: int, given: Values, legal: Callable[[Any], bool], wanted: str) -> list[Any]:
    """One legal value a row."""
    values = [given] * rows if isinstance(given, Real) else list(given)  # type: ignore[arg-type]
    if len(values) != rows:
        raise ValueError(f"{len(values)} values of {name} for {rows} rows: give one number, or one for each row")
    for i, value in enumerate(values):
        if not (isinstance(value, Real) and legal(value)):
            raise ValueError(f"{name} of row {i} is {value!r}: give {wanted}")
    return values


def distribution(logits: Float[Array, "B *J V"], settings: Settings) -> Float[Array, "B *J V"]:
    """Log-probabilities that tokens are drawn with: log softmax(logits / temperature) of the tokens that stay.

    In this order: temperature; the `top_k` most likely tokens; of these, renormalised, the fewest most likely ones
    whose probability reaches `top_p`, at least one; of these the ones with at least `min_p` times the largest
    probability; renormalise. Of equal tokens the lower id is the likelier one. With temperature 0 all probability is
    on the likeliest token. Logits may hold -inf. The vocabulary is sorted only if a row of the batch has a `top_k` or
    `top_p`.
    """
    of_row = lambda a: a.reshape(-1, *[1] * (logits.ndim - 1))  # noqa: E731
    logits = logits.astype(jnp.float32)
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    greedy = of_row(settings.temperature) <= 0
    # The largest becomes 0 before the division: nothing overflows at a low temperature.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(greedy, 1.0, of_row(settings.temperature))
    kept = jax.lax.cond(
        jnp.any(settings.top_k > 0) | jnp.any(settings.top_p < 1),
        lambda: _likely(scaled, ids, of_row(settings.top_k), of_row(settings.top_p)),
        lambda: jnp.ones(scaled.shape, bool),
    )
    kept &= scaled >= jnp.log(of_row(settings.min_p))
    drawn = jax.nn.log_softmax(jnp.where(kept, scaled, -jnp.inf), axis=-1)
    best = ids == jnp.argmax(logits, axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.where(greedy, jnp.where(best, 0.0, -jnp.inf), drawn)


def _likely(
    scaled: Float[Array, "B *J V"], ids: Int[Array, "B *J V"], top_k: Int[Array, "B *I"], top_p: Float[Array, "B *I"]
) -> Bool[Array, "B *J V"]:
    """Which tokens stay by rank: the count of them, then all that do not sort behind the last one."""
    size = scaled.shape[-1]
    falling, order = jax.lax.sort((-scaled, ids), dimension=-1, num_keys=2)
    within = jnp.where(top_k > 0, jnp.minimum(top_k, size), size)
    mass = jnp.cumsum(jnp.exp(-falling), axis=-1)
    last = jnp.broadcast_to(within - 1, (*mass.shape[:-1], 1))
    # Ids count the ranks here; sums added in parallel need not rise, so the rank is compared, too.
    short = (mass < top_p * jnp.take_along_axis(mass, last, axis=-1)) & (ids < last)
    count = jnp.where(top_p < 1, 1 + short.sum(axis=-1, keepdims=True, dtype=jnp.int32), within)
    least, final = (jnp.take_along_axis(a, count - 1, axis=-1) for a in (-falling, order))
    return (scaled > least) | ((scaled == least) & (ids <= final))


def at(settings: Settings, position: Int[Array, " B"], use: int | Int[Array, " B"]) -> Key[Array, " B"]:
    """Each row's key for the token at its position and one use: PLAIN, DRAFT, ACCEPT or RESIDUAL."""
    fold = jax.vmap(jax.random.fold_in)
    return fold(fold(settings.key, position), jnp.broadcast_to(jnp.asarray(use, jnp.int32), position.shape))


def draw(logp: Float[Array, "B V"], key: Key[Array, " B"]) -> Int32[Array, " B"]:
    """A token of each row by its own key; logp need not be normalised, and one with a single token yields that token.

    The Gumbel noise has its full range: from the usual 23 random bits, a token of probability 1e-6 would come 6 % too
    seldom and one of 1e-8 hardly ever.
    """
    one = lambda key, row: jax.random.categorical(key, row, mode="high")  # noqa: E731
    return jax.vmap(one)(key, logp).astype(jnp.int32)


def log_probability(logits: Float[Array, "*B V"], ids: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Log-probability of `ids` under the model itself: float32, at temperature 1, nothing filtered out."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(logp, ids[..., None], axis=-1)[..., 0]


def accept(
    drafts: Int[Array, "B J"],
    drafted: Int[Array, " B"],
    draft_logp: Float[Array, "B J V"],
    target_logp: Float[Array, "B J+1 V"],
    settings: Settings,
    position: Int[Array, " B"],
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """How many drafts of each row to keep, and the token behind them, so that both together follow the target.

    Draft i, for position + i, is accepted with probability min(1, p_i(draft) / q_i(draft)), q its distribution and p
    the target's. At the first rejected one the token follows max(p_i - q_i, 0), normalised; if all `drafted` ones are
    accepted, p_drafted, by the same random number as without drafts. Where p is greedy this is: accept while the draft
    is the target's token, then take the target's; no random number changes it.

    Drafts must have been drawn from q, with keys for DRAFT or with none if greedy; J >= 1. `drafted` of 0..J may depend
    on a row's drafts before the cut and on nothing behind it: then no draft that was thrown away has had a say, and
    its position may use the same keys again. If p - q vanishes by rounding, the token follows p. The random number
    that accepts has 23 bits: probabilities are exact to 1.2e-7.
    """
    size = drafts.shape[1]
    steps = jnp.arange(size, dtype=jnp.int32)
    of_draft = lambda logp: jnp.take_along_axis(logp, drafts[..., None], axis=-1)[..., 0]  # noqa: E731
    keys = jax.vmap(lambda i: at(settings, position + i, ACCEPT), out_axes=1)(steps)  # [B, J]
    uniform = jax.vmap(jax.vmap(jax.random.uniform))(keys)
    passes = jnp.log(uniform) < of_draft(target_logp[:, :size]) - of_draft(draft_logp)
    passes &= steps[None] < drafted[:, None]
    accepted = jnp.cumprod(passes.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
    there = accepted[:, None, None]
    p = jnp.take_along_axis(target_logp, there, axis=1)[:, 0]
    q = jnp.take_along_axis(draft_logp, jnp.minimum(there, size - 1), axis=1)[:, 0]
    rest = jnp.maximum(jnp.exp(p) - jnp.exp(q), 0.0)
    rejected = accepted < drafted
    replaced = rejected[:, None] & (rest.sum(axis=-1, keepdims=True) > 0)
    key = at(settings, position + accepted, jnp.where(rejected, RESIDUAL, PLAIN))
    return accepted, draw(jnp.where(replaced, jnp.log(rest), p), key)
