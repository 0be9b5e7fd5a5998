"""One layer of any mode: its weights, the block that every layer shares, and attention by mode.

`attention_sublayer` is the only place that tests a mode. Source: architecture sections 2, 4, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from dsflash_jax import (
    attention,
    cache,
    compressor,
    engram,
    hyper,
    indexer,
    moe,
    parallel,
    quant,
    rope,
    search,
    sharding,
)
from dsflash_jax.config import Config
from dsflash_jax.flow import Ctx, LayerOut, Setup, Shared, Stream
from dsflash_jax.modes import LayerSpec, Mode
from dsflash_jax.ops import rms_norm
from dsflash_jax.params import Weights, norm


def declare(c: Config, spec: LayerSpec) -> dict[str, Any]:
    """Weights of one layer under the checkpoint's names."""
    out: dict[str, Any] = {
        "attn_norm": norm(c.hidden_size, "embed"),
        "attn": attention.weights(c),
        **hyper.weights(c),
        "ffn_norm": norm(c.hidden_size, "embed"),
        "ffn": moe.weights(c),
    }
    if spec.mode is Mode.FULL:
        out["attn"]["compressor"] = compressor.weights(c, spec)
    if spec.selects:
        out["attn"]["indexer"] = indexer.weights(c, spec)
    if spec.engram is not None:
        out["engram"] = engram.weights(c, spec.engram)
    return out


def mark(trace: dict[str, Array] | None, name: str, x: Array) -> Array:
    """Name an array for the remat policy and, when a trace is asked for, keep it there."""
    if trace is not None:
        trace[name] = x
    return checkpoint_name(x, name)


def layer(
    setup: Setup,
    spec: LayerSpec,
    w: Weights,
    stream: Stream,
    shared: Shared,
    ctx: Ctx,
    trace: dict[str, Array] | None = None,
) -> tuple[Stream, Shared, LayerOut]:
    """One layer: n-gram memory if it has one, then the block; the draft head reads the block's input.

    Without an objective the auxiliary sums are zeros of the same structure.
    """
    c, x, p = setup.config, stream.x, setup.parallel
    w, unread = sharding.fetch(setup.layout, declare(c, spec), w), jnp.float32(0)
    if spec.engram is not None:
        with jax.named_scope("engram"):
            assert ctx.engram_rows is not None, "a layer has n-gram memory but the batch carries no engram_rows"
            ids = ctx.engram_rows[:, :, spec.engram]
            x, gate, unread = engram.apply(w["engram"], x, ids, ctx.image, c, setup.inputs, p)
            mark(trace, "engram_gate", gate)
    taps = mark(trace, "tap", _mean_copy(x))[None][: int(spec.tap)] if setup.taps else None

    def attend(u: Array) -> tuple[Array, tuple[Any, ...]]:
        y, *made = attention_sublayer(setup, spec, w["attn"], u, shared, ctx, trace)
        return y, tuple(made)

    real = ctx.segments > 0
    stream, (shared, index, made), routing = block(setup, w, Stream(x, stream.pre), attend, ctx.image, trace, real)
    routing = replace(routing, dropped=routing.dropped + unread)
    groups = ctx.groups.reshape(-1)
    kl, count = index
    image = None if ctx.image is None else ctx.image.reshape(-1)
    return stream, shared, LayerOut(kl, count, moe.loads(routing, groups, ctx.n_groups, c, image, p), taps, made)


def _mean_copy(x: Float[Array, "B T M D"]) -> Float[Array, "B T D"]:
    return jnp.mean(x.astype(jnp.float32), axis=2).astype(x.dtype)


def block(
    setup: Setup,
    w: Weights,
    stream: Stream,
    attend: Callable[[Array], tuple[Array, Any]],
    image: Bool[Array, "B T"] | None,
    trace: dict[str, Array] | None,
    real: Bool[Array, "B T"] | None = None,
) -> tuple[Stream, Any, moe.Routing]:
    """Attention and experts, each inside its hyper-connection; what a backbone layer and a draft stage share.

    A sublayer collapses the stream with the `pre` of the sublayer before it, and its own `pre` goes to the next.
    `attend` maps the normalised input [B, T, D] to the attention output and anything else, which is handed back.
    What is not `real` is padding.
    """
    c, x, note = setup.config, stream.x, partial(mark, trace)
    with jax.named_scope("attn"):
        a = hyper.mix(w, "attn", x, c)
        collapsed = note("attn_in", hyper.collapse(x, stream.pre))
        y, made = attend(rms_norm(collapsed, w["attn_norm"], c.rms_norm_eps))
        x = hyper.expand(note("attn_out", y), x, a)
    with jax.named_scope("ffn"):
        f = hyper.mix(w, "ffn", x, c)
        collapsed = note("ffn_in", hyper.collapse(x, a.pre))
        v = rms_norm(collapsed, w["ffn_norm"], c.rms_norm_eps).reshape(-1, c.hidden_size)
        flat = lambda a: None if a is None else a.reshape(-1)  # noqa: E731
        how, p = setup.compute.experts, setup.parallel
        y, routing = moe.apply(w["ffn"], v, flat(image), c, how, setup.inputs, p, flat(real))
        y = note("ffn_out", y.reshape(collapsed.shape))
        x = hyper.expand(y, x, f)
    if trace is not None:
        for sub, made_by in (("attn", a), ("ffn", f)):
            trace |= {f"hc_{sub}_pre": made_by.pre, f"hc_{sub}_post": made_by.post, f"hc_{sub}_comb": made_by.comb}
        trace |= {"router_scores": routing.scores, "router_indices": routing.experts, "router_weights": routing.weights}
        trace["h_out"] = x
    return Stream(x, f.pre), made, routing


def attention_sublayer(
    setup: Setup,
    spec: LayerSpec,
    w: Weights,
    u: Float[Array, "B T D"],
    shared: Shared,
    ctx: Ctx,
    trace: dict[str, Array] | None,
) -> tuple[Float[Array, "B T D"], Shared, tuple[Array, Array], cache.Made | None]:
    """Attention by mode: Full makes KV, keys and a selection; Reindex a selection; Reuse takes both; Window neither.

    Returns the output, what later layers share, the indexer loss as (sum, count), and what a cache is to keep.
    """
    c, how, aim, p, held = setup.config, setup.compute, setup.objective, setup.parallel, ctx.cache
    note = partial(mark, trace)
    at = ctx.angles["compressed" if spec.ratio else "window"]
    inputs = setup.inputs
    latent = attention.query_latent(w, u, c, inputs)
    q = note("q", rope.rotate(attention.queries(w, latent, inputs), at))
    own = rope.rotate_single(attention.window_kv(w, u, c, inputs), at)
    if held is None:
        window_kv = setup.rounding("window_fp8", quant.Q8)(own)
        past = parallel.past(p, window_kv, ctx.segments, c.sliding_window - 1)
    else:
        entry = held.forms.window.pack(own)
        window_kv, past = held.forms.window.unpack(entry), held.past(ctx.layer)
    window_kv = note("window_kv_new", window_kv)
    zero, slots_made = jnp.zeros((), jnp.float32), None
    index = (zero, zero)
    if spec.mode is Mode.FULL:
        shared, slots_made = _make_kv(setup, spec, w, u, shared, ctx, trace)
    if spec.selects:
        iq, iw = indexer.queries(w["indexer"], latent, u, at, c, inputs)
        iq, iw = note("index_q", setup.rounding("index_fp4", quant.Q4X32)(iq)), note("index_weights", iw)
        slots, keys = ctx.slots[spec.ratio], shared.index_keys
        over = partial(indexer.select, base=slots.base) if held is None else search.select
        with jax.named_scope(scope_of(spec)):
            topk, blocks = over(
                iq, iw, keys, visible=slots.visible, k=c.index_topk, chunk=how.query_chunk,
                block=c.candidate_block_size, candidates=shared.candidates if spec.restricted else None,
                publish=c.candidate_topk_blocks if spec.publishes else 0,
            )  # fmt: skip
        shared = replace(shared, topk=note("topk", topk))
        if blocks is not None:
            shared = replace(shared, candidates=note("candidates", blocks))
        if aim is not None and aim.index_teacher == "group_mean":
            shared = replace(shared, index_query=iq, index_weight=iw)
    kv = shared.kv if spec.ratio else None
    selected: Array | None = shared.topk if spec.ratio else None
    sparse = held is not None or how.attention == "sparse"  # the slots of a cache are no array for the oracle
    attend = attention.attend if sparse else attention.attend_dense
    o, lse = attend(
        q, window_kv, kv, selected, w["attn_sink"], ctx.segments, window=c.sliding_window, chunk=how.query_chunk,
        past=past,
    )  # fmt: skip
    if aim is not None and aim.index_weight > 0:
        if spec.selects:
            index = _index_loss(setup, spec, iq, iw, q, lse, shared, ctx)
        elif spec.mode is Mode.REUSE and aim.index_teacher == "group_mean":
            index = _index_loss(setup, spec, shared.index_query, shared.index_weight, q, lse, shared, ctx)
    y = attention.output(w, rope.rotate(o, at, inverse=True), inputs, p)
    made = None if held is None else held.made(entry, slots_made, new_slots(ctx), ctx.count)
    return y, shared, index, made


def scope_of(spec: LayerSpec) -> str:
    """Name of a selecting layer's scope in a program: its mode and ratio, and whether candidates limit it."""
    return f"select_{spec.mode.name.lower()}_{spec.ratio}" + ("_restricted" if spec.restricted else "")


def new_slots(ctx: Ctx) -> dict[int, int]:
    """How many slots of each ratio a piece has room for."""
    return {r: at.positions.shape[1] for r, at in ctx.slots.items()}


def _make_kv(
    setup: Setup, spec: LayerSpec, w: Weights, u: Array, shared: Shared, ctx: Ctx, trace: dict[str, Array] | None
) -> tuple[Shared, cache.Slots | None]:
    """What a Full layer makes of its input: rotated KV, and index keys from the latent before rotation.

    Both of a whole row, gathered at once; this is all that the layers of a unit need of other devices' slots. Behind a
    cache both are seen together with what it holds, and what is new is returned, too.
    """
    c, r, held, p = setup.config, spec.ratio, ctx.cache, setup.parallel
    at, slots, tail = ctx.slot_angles[r], ctx.slots[r], None
    number = None if held is None else jnp.asarray(cache.numbers(c.table), jnp.int32)[ctx.layer]
    if held is None or r == 1:
        latent = compressor.compress(w["compressor"], u, slots, r, c.rms_norm_eps, p)
    else:
        latent, tail = compressor.go_on(w["compressor"], u, held.tail(r, number), slots, r, c.rms_norm_eps)
    latent = mark(trace, "latent", latent)
    keys, kv = indexer.keys(w["indexer"], latent, at, c), rope.rotate_single(latent, at)
    if held is None:
        keys, kv = setup.rounding("index_fp4", quant.Q4X32)(keys), setup.rounding("kv_fp4", quant.Q4X16)(kv)
    else:
        made = cache.Slots(r, held.forms.kv.pack(kv), held.forms.index.pack(keys), tail)
        kv, keys = held.forms.kv.unpack(made.kv), held.forms.index.unpack(made.index)
    kv, keys = mark(trace, "compress_kv_new", kv), mark(trace, "index_k_new", keys)
    if held is not None:
        first = slots.positions[:, 0]
        view = lambda kind, new: held.source(kind, r, number, first, new)  # noqa: E731
        return replace(shared, kv=view("kv", kv), index_keys=view("index", keys)), made
    if p.tokens:
        kv, keys = jnp.split(parallel.whole(p, jnp.concatenate([kv, keys], axis=-1)), [c.head_dim], axis=-1)
    return replace(shared, kv=kv, index_keys=keys), None


def kv_only(setup: Setup, spec: LayerSpec, w: Weights, stream: Stream, ctx: Ctx) -> cache.Made:
    """What a Full layer makes for the cache, without running it: a prompt whose end alone goes through the decoder."""
    c, held, b = setup.config, ctx.cache, ctx.segments.shape[0]
    w = sharding.fetch(setup.layout, declare(c, spec), w)
    u = rms_norm(hyper.collapse(stream.x, stream.pre), w["attn_norm"], c.rms_norm_eps)
    _, slots = _make_kv(setup, spec, w["attn"], u, Shared(), ctx, None)
    nothing = held.forms.window.zeros(b, ctx.segments.shape[1])
    made = held.made(nothing, slots, new_slots(ctx), ctx.count)
    return replace(made, window=jax.tree.map(lambda a: a[:0], made.window))


def _index_loss(
    setup: Setup, spec: LayerSpec, iq: Array, iw: Array, q: Array, lse: Array, shared: Shared, ctx: Ctx
) -> tuple[Array, Array]:
    """Indexer KL against this layer's attention."""
    slots, aim = ctx.slots[spec.ratio], setup.objective
    assert aim is not None
    key = None if ctx.key is None else jax.random.fold_in(ctx.key, ctx.layer)
    return indexer.loss(
        iq, iw, shared.index_keys, q, shared.kv, lse, shared.topk, slots.base, slots.visible,
        keys_set=aim.index_keys, extra=aim.index_random, rng=key, chunk=setup.compute.query_chunk, p=setup.parallel,
    )  # fmt: skip
