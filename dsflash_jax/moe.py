"""Mixture of experts: router, sorted dropless dispatch, grouped products, shared expert, balance statistics.

Source: architecture section 9, training section 3. No token is dropped and no capacity exists, unless a
layout sets one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dsflash_jax import parallel
from dsflash_jax.config import Config
from dsflash_jax.ops import Rounding, contract, exact, linear32, ranks, swiglu
from dsflash_jax.parallel import ONE, Parallel
from dsflash_jax.params import Weight, Weights, constant, normal

BLOCK_ROWS = 128  # rows of one block of the blocked product; on 2 CPU cores 64..256 were equal within 10 %


@struct.dataclass
class Routing:
    """Choice of experts for N tokens."""

    scores: Any  # float [N, E]: unbiased affinities, float32
    experts: Any  # int [N, A]: chosen ids, descending biased affinity
    weights: Any  # float [N, A]: what each chosen expert's output counts, float32
    dropped: Any = None  # float []: rows that found no room on their way to an expert of another device


@struct.dataclass
class Loads:
    """Routing statistics as sums over tokens that are not padding."""

    counts: Any  # float [E]: choices of each expert by tokens of text
    counts_vl: Any  # float [E]: the same by tokens of image spans
    balance: Any  # float []: sum over sequences of the balance term
    sequences: Any  # float []: how many sequences that sum has
    dropped: Any = None  # float []: rows that no expert saw, see `routed`, and n-gram rows that nobody read


def weights(c: Config) -> dict[str, object]:
    """Router, routed experts (stacked on an expert axis) and shared expert."""
    d, f, e = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
    init = normal(c.initializer_range)
    bias = Weight((e,), ("experts",), constant(0.0), "rule", float32=True, bare=True)
    gate: dict[str, Weight] = {
        "weight": Weight((d, e), ("embed", "experts"), init, float32=True, bare=True),
        "bias": bias,
    }
    if c.vision is not None:
        gate["bias_vl"] = bias
    inward = Weight((e, d, f), ("expert_stack", "embed", "expert_width"), init, matrix=(1, 2))
    outward = Weight((e, f, d), ("expert_stack", "expert_width", "embed"), init, matrix=(1, 2))
    out: dict[str, object] = {"gate": gate, "experts": {"w1": inward, "w2": outward, "w3": inward}}
    if c.n_shared_experts:
        inward = Weight((d, f), ("embed", "expert_width"), init)
        out["shared_experts"] = {"w1": inward, "w2": Weight((f, d), ("expert_width", "embed"), init), "w3": inward}
    return out


@jax.custom_jvp
def sqrt_softplus(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """sqrt(log(1 + exp(x))); the derivative stays finite where the softplus underflows to 0."""
    return jnp.sqrt(jax.nn.softplus(x))


@sqrt_softplus.defjvp
def _sqrt_softplus_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (dx,) = primals, tangents
    y = sqrt_softplus(x)
    tiny = y == 0
    return y, dx * jnp.where(tiny, 0.0, jax.nn.sigmoid(x) / (2 * jnp.where(tiny, 1.0, y)))


def affinity(logits: Float[Array, "N E"], c: Config) -> Float[Array, "N E"]:
    """Router affinity of float32 logits under the configured scoring function."""
    logits = logits / c.gate_temp
    if c.scoring_func == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits) if c.scoring_func == "sigmoid" else sqrt_softplus(logits)


def route(w: Weights, x: Float[Array, "N D"], image: Bool[Array, " N"] | None, c: Config) -> Routing:
    """Choose experts: top-A of affinity + bias; weights are the unbiased affinities of the chosen, normalised.

    The bias (`bias_vl` for tokens of image spans) takes part in the choice only, so no gradient reaches it.
    """
    scores = affinity(linear32(x, w["weight"]), c)
    bias = w["bias"][None]
    if image is not None and "bias_vl" in w:
        bias = jnp.where(image[:, None], w["bias_vl"][None], bias)
    _, experts = jax.lax.top_k(jax.lax.stop_gradient(scores + bias), c.num_experts_per_tok)
    chosen = jnp.take_along_axis(scores, experts, axis=-1)
    if c.norm_topk_prob and c.num_experts_per_tok > 1:
        chosen = chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-20)
    return Routing(scores, experts, chosen * c.routed_scaling_factor)


def loads(
    r: Routing,
    groups: Int[Array, " N"],
    n_groups: int,
    c: Config,
    image: Bool[Array, " N"] | None = None,
    p: Parallel = ONE,
) -> Loads:
    """Expert counts and the sequence balance loss; `groups` numbers the sequences, -1 is padding.

    Text and `image` tokens are counted apart, for each has its own router bias; in a sequence they balance together.

    Per sequence of n tokens: sum_e f_e P_e with f_e = E / (A n) * choices of e (no gradient) and P_e the mean of the
    affinities normalised to sum 1 (training section 3.2). Where rows lie on several devices, each returns its tokens'
    share of these sums.
    """
    real = groups >= 0
    ids = jnp.where(real, groups, n_groups)  # padding goes to a bin that is cut off
    sums = lambda a: jax.ops.segment_sum(a, ids, n_groups + 1)[:-1]  # noqa: E731
    chosen = jax.nn.one_hot(r.experts, c.n_routed_experts, dtype=jnp.float32).sum(axis=1)
    counts = parallel.total(p, sums(chosen), p.tokens)  # [groups, E]
    share = sums(r.scores / (r.scores.sum(axis=-1, keepdims=True) + 1e-20))
    tokens = jnp.maximum(parallel.total(p, sums(jnp.ones_like(ids, jnp.float32)), p.tokens), 1.0)
    term = jnp.sum(counts * share, axis=-1) * c.n_routed_experts / (c.num_experts_per_tok * jnp.square(tokens))
    number = jnp.sum(counts.sum(axis=-1) > 0).astype(jnp.float32) / p.size(p.tokens)
    of = lambda keep: jnp.sum(chosen, axis=0, where=(real & keep)[:, None])  # noqa: E731
    if image is None:
        return Loads(of(real), jnp.zeros((c.n_routed_experts,), jnp.float32), term.sum(), number, r.dropped)
    return Loads(of(~image), of(image), term.sum(), number, r.dropped)


def ragged_dot(x: Float[Array, "R I"], w: Float[Array, "E I O"], sizes: Int[Array, " E"]) -> Float[Array, "R O"]:
    """Rows in runs of `sizes`, each run times its expert's matrix, by `jax.lax.ragged_dot`; float32 result."""
    return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32)


def blocked_dot(x: Float[Array, "R I"], w: Float[Array, "E I O"], sizes: Int[Array, " E"]) -> Float[Array, "R O"]:
    """`ragged_dot` as one batched product over blocks of rows, each run padded to whole blocks.

    Platforms without a ragged kernel multiply every row by every expert; this costs at most E extra blocks, and the
    copies of the experts' matrices, one a block. Rows so few that a block is one of them need no padding: every row is
    a block, and only the matrices that rows name are copied.
    """
    rows, experts = x.shape[0], sizes.shape[0]
    block = min(BLOCK_ROWS, max(rows // experts, 1))
    expert = jnp.repeat(jnp.arange(experts), sizes, total_repeat_length=rows)
    if block == 1:
        return _batched(x[:, None], w[expert])[:, 0]
    blocks = rows // block + experts
    ends = jnp.cumsum(-(-sizes // block))  # in blocks
    owner = jnp.searchsorted(ends, jnp.arange(blocks), side="right")
    owner = jnp.minimum(owner, experts - 1)
    starts = jnp.concatenate([jnp.zeros((1,), ends.dtype), ends[:-1]]) * block - (jnp.cumsum(sizes) - sizes)
    place = jnp.arange(rows) + starts[expert]
    padded = jnp.zeros((blocks * block, x.shape[1]), x.dtype).at[place].set(x, unique_indices=True)
    out = _batched(padded.reshape(blocks, block, -1), w[owner])
    return out.reshape(blocks * block, -1).at[place].get(unique_indices=True)


def _batched(x: Float[Array, "N R I"], w: Float[Array, "N I O"]) -> Float[Array, "N R O"]:
    """Blocks of rows, each times its own matrix; float32 result."""
    return jnp.einsum("nri,nio->nro", x, w, preferred_element_type=jnp.float32)


def dense_dot(x: Float[Array, "R I"], w: Float[Array, "E I O"], sizes: Int[Array, " E"]) -> Float[Array, "R O"]:
    """The plain twin of both: every row times every expert, then the right one."""
    expert = jnp.repeat(jnp.arange(w.shape[0]), sizes, total_repeat_length=x.shape[0])
    every = jnp.einsum("ri,eio->reo", x, w, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(every, expert[:, None, None], axis=1)[:, 0]


def grouped_dot(x: Array, w: Array, sizes: Array, how: str) -> Array:
    """The grouped product `how` names; "auto" is ragged on TPU, where it is one kernel, and blocked elsewhere."""
    if how == "auto":
        return jax.lax.platform_dependent(x, w, sizes, tpu=ragged_dot, default=blocked_dot)
    return {"ragged": ragged_dot, "blocked": blocked_dot, "dense": dense_dot}[how](x, w, sizes)


def routed(
    w: Weights,
    x: Float[Array, "N D"],
    r: Routing,
    c: Config,
    how: str,
    rounding: Rounding = exact,
    p: Parallel = ONE,
    real: Bool[Array, " N"] | None = None,
) -> tuple[Float[Array, "N D"], Float[Array, ""]]:
    """Sum over a token's experts of weight * expert(x), float32; and the rows that found no room, see below.

    Where experts are split, `w` holds this device's. Without a capacity, the tokens of all devices that split them are
    gathered, each device adds up what its experts give, and the sums are scattered back: no token is dropped however
    they choose. With one, every row travels to its expert and back (`parallel.dispatch`), the way back in x's dtype; a
    row that finds no place there adds nothing and is counted, for the caller to refuse the step. Tokens that are not
    `real` (padding, which is all alike and would crowd at a few experts) stay at home then and get 0.
    """
    n, a = r.experts.shape
    mine, x = w["w1"].shape[0], rounding(x)
    if not p.experts or not p.capacity:
        x, ids, weights = (parallel.gather(v, p.experts) for v in (x, r.experts, r.weights))
        out = own_experts(w, x, ids - parallel.index(p.experts) * mine, weights, c, how, rounding)
        return parallel.scatter(out, p.experts), jnp.float32(0)
    flat = r.experts.reshape(-1)
    owner = flat // mine if real is None else jnp.where(jnp.repeat(real, a), flat // mine, -1)
    way = parallel.dispatch(p, owner, p.experts, most=n * a)
    ids = way.send(way.lay(flat % mine + 1)) - 1  # -1, nobody's, where no row comes
    rows, weights = way.send(spread(x, way.place.reshape(n, a), way.length)), way.send(way.lay(r.weights.reshape(-1)))
    out = own_experts(w, rows, ids[:, None], weights[:, None], c, how, rounding).astype(x.dtype)
    return collect(way.back(out), way.place.reshape(n, a)), way.dropped


def own_experts(
    w: Weights,
    x: Float[Array, "N D"],
    ids: Int[Array, "N A"],
    weights: Float[Array, "N A"],
    c: Config,
    how: str,
    rounding: Rounding,
) -> Float[Array, "N D"]:
    """Sum over a token's expert ids that are in w of weight * expert(x), float32; ids outside w's add nothing."""
    mine = w["w1"].shape[0]
    flat = jnp.where((ids >= 0) & (ids < mine), ids, mine).reshape(-1)
    rank, counts = ranks(flat, mine + 1)
    place = (jnp.cumsum(counts) - counts)[flat] + rank  # rows of one expert become neighbours, those of none come last
    rows, sizes = spread(x, place.reshape(ids.shape), len(flat)), counts[:mine]
    gate, up = (grouped_dot(rows, w[name], sizes, how) for name in ("w1", "w3"))
    each = jnp.zeros((len(flat),), weights.dtype).at[place].set(weights.reshape(-1), unique_indices=True)
    hidden = swiglu(gate, up, c.swiglu_limit) * each[:, None]
    out = grouped_dot(rounding(hidden.astype(x.dtype)), w["w2"], sizes, how)
    if mine < c.n_routed_experts:  # what a grouped product says of rows behind its last group is not defined
        out = jnp.where((jnp.arange(len(flat)) < sizes.sum())[:, None], out, 0.0)
    return collect(out, place.reshape(ids.shape))


# Two moves of rows, each the other's transpose. Both only read: what differentiation makes of a read is an addition at
# computed places, which a TPU compiles and runs slowly, though no place here is named twice.


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def spread(x: Float[Array, "N D"], place: Int[Array, "N A"], count: int) -> Float[Array, "R D"]:
    """Copies of token n at the rows place[n] of `count`, rows that nobody names 0; places behind the last are left out.

    No place is named twice.
    """
    n, a = place.shape
    source = jnp.full((count,), n * a, jnp.int32)
    source = source.at[place.reshape(-1)].set(jnp.arange(n * a, dtype=jnp.int32), mode="drop", unique_indices=True)
    return x.at[source // a].get(mode="fill", fill_value=0)


def _spread_forward(x: Array, place: Array, count: int) -> tuple[Array, Array]:
    return spread(x, place, count), place


def _spread_backward(count: int, place: Array, d: Array) -> tuple[Array, None]:
    return collect(d, place).astype(d.dtype), None


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(rows: Float[Array, "R D"], place: Int[Array, "N A"]) -> Float[Array, "N D"]:
    """Sum of the rows that each token has at place[n], float32; places behind the last row add nothing."""

    def add(total: Array, place: Array) -> tuple[Array, None]:
        return total + rows.at[place].get(mode="fill", fill_value=0).astype(jnp.float32), None

    return jax.lax.scan(add, jnp.zeros((len(place), rows.shape[1]), jnp.float32), place.T)[0]


def _collect_forward(rows: Array, place: Array) -> tuple[Array, tuple[Array, Any]]:
    return collect(rows, place), (place, jnp.zeros((len(rows), 0), rows.dtype))


def _collect_backward(saved: tuple[Array, Array], d: Array) -> tuple[Array, None]:
    place, like = saved
    return spread(d.astype(like.dtype), place, len(like)), None


collect.defvjp(_collect_forward, _collect_backward)


def shared(w: Weights, x: Float[Array, "N D"], c: Config, rounding: Rounding = exact) -> Float[Array, "N D"]:
    """The expert that every token uses, float32 result."""
    x = rounding(x)
    hidden = swiglu(contract(x, w["w1"]), contract(x, w["w3"]), c.swiglu_limit)
    return contract(rounding(hidden.astype(x.dtype)), w["w2"])


def apply(
    w: Weights,
    x: Float[Array, "N D"],
    image: Bool[Array, " N"] | None,
    c: Config,
    how: str,
    rounding: Rounding = exact,
    p: Parallel = ONE,
    real: Bool[Array, " N"] | None = None,
) -> tuple[Float[Array, "N D"], Routing]:
    """Routed plus shared experts, summed in float32 and cast to x's dtype; `real` as `routed` takes it."""
    with jax.named_scope("router"):
        r = route(w["gate"], x, image, c)
    with jax.named_scope("routed"):
        out, dropped = routed(w["experts"], x, r, c, how, rounding, p, real)
    if c.n_shared_experts:
        with jax.named_scope("shared"):
            out = out + shared(w["shared_experts"], x, c, rounding)
    return parallel.combine(p, out).astype(x.dtype), replace(r, dropped=dropped)
