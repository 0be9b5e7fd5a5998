"""The model: one layer function for every mode, the plan of scans over it, embedding, head, and the Linen shell.

`attention_sublayer` is the only place that tests a mode. Source: architecture sections 2, 4 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from dsflash_jax import (
    attention,
    compressor,
    engram,
    hyper,
    indexer,
    modes,
    moe,
    parallel,
    quant,
    rope,
    sharding,
    vision,
)
from dsflash_jax.config import Compute, Config, Objective
from dsflash_jax.flow import Batch, Ctx, LayerOut, Setup, Shared, Stream, context
from dsflash_jax.modes import LayerSpec, Mode, Node, Repeat
from dsflash_jax.ops import HIGHEST, rms_norm
from dsflash_jax.params import Weight, Weights, leaves, map_weights, norm, normal

SAVED = {
    "full": ("topk", "candidates"),
    "selective": ("topk", "candidates", "attn_o", "attn_lse", "attn_out", "ffn_out"),
}


def declare_layer(c: Config, spec: LayerSpec) -> dict[str, Any]:
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


def declare(c: Config) -> dict[str, Any]:
    """Every weight that is trained together: backbone, image tower and aligner if the configuration has them.

    A tree of declarations; weights inside repeats carry their lengths. The draft head is trained later, with all of
    this frozen, so it is declared apart (`draft.declare`): a training tree and its optimiser state have no part of it.
    `forward` takes a tree with draft weights and leaves them alone.
    """
    table = Weight((c.vocab_size, c.hidden_size), ("vocab", "embed"), normal(c.initializer_range), "sinkhorn")
    return {
        "embed": table,
        "layers": _declare_nodes(c, modes.plan(c.table)),
        "norm": norm(c.hidden_size, "embed"),
        "head": table,
    } | ({} if c.vision is None else vision.weights(c))


def _declare_nodes(c: Config, nodes: Sequence[Node]) -> dict[str, Any]:
    out = {}
    for node in nodes:
        if isinstance(node, Repeat):
            stack = partial(Weight.stacked, times=node.times)
            out[modes.name(node)] = map_weights(stack, _declare_nodes(c, node.body))
        else:
            out[modes.name(node)] = declare_layer(c, node)
    return out


def init(declared: Weights, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Fresh weights of a tree of declarations; each leaf draws from its own key, so a layout never changes them."""
    paths = leaves(declared)
    keys = dict(zip(paths, jax.random.split(key, len(paths)), strict=True))
    made = {path: w.init(keys[path], w.full_shape, dtype) for path, w in paths.items()}
    structure = jax.tree.structure(declared, is_leaf=lambda w: isinstance(w, Weight))
    return jax.tree.unflatten(structure, [made[p] for p in paths])


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
    w, unread = sharding.fetch(setup.layout, declare_layer(c, spec), w), jnp.float32(0)
    if spec.engram is not None:
        with jax.named_scope("engram"):
            assert ctx.engram_rows is not None, "a layer has n-gram memory but the batch carries no engram_rows"
            ids = ctx.engram_rows[:, :, spec.engram]
            x, gate, unread = engram.apply(w["engram"], x, ids, ctx.image, c, setup.inputs, p)
            mark(trace, "engram_gate", gate)
    taps = _mean_copy(x)[None][: int(spec.tap)] if setup.taps else None

    def attend(u: Array) -> tuple[Array, tuple[Shared, tuple[Array, Array]]]:
        y, made, index = attention_sublayer(setup, spec, w["attn"], u, shared, ctx, trace)
        return y, (made, index)

    real = ctx.segments > 0
    stream, (shared, index), routing = block(setup, w, Stream(x, stream.pre), attend, ctx.image, trace, real)
    routing = replace(routing, dropped=routing.dropped + unread)
    groups = ctx.groups.reshape(-1)
    kl, count = index
    image = None if ctx.image is None else ctx.image.reshape(-1)
    return stream, shared, LayerOut(kl, count, moe.loads(routing, groups, ctx.n_groups, c, image, p), taps)


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
) -> tuple[Float[Array, "B T D"], Shared, tuple[Array, Array]]:
    """Attention by mode: Full makes KV, keys and a selection; Reindex a selection; Reuse takes both; Window neither.

    Returns the output, what later layers share, and the indexer loss as (sum, count).
    """
    c, how, aim, p = setup.config, setup.compute, setup.objective, setup.parallel
    note = partial(mark, trace)
    at = ctx.angles["compressed" if spec.ratio else "window"]
    inputs, stored = setup.inputs, setup.rounding("window_fp8", quant.Q8)
    latent = attention.query_latent(w, u, c, inputs)
    q = note("q", rope.rotate(attention.queries(w, latent, inputs), at))
    window_kv = note("window_kv_new", stored(rope.rotate_single(attention.window_kv(w, u, c, inputs), at)))
    zero = jnp.zeros((), jnp.float32)
    index = (zero, zero)
    if spec.mode is Mode.FULL:
        shared = _make_kv(setup, spec, w, u, shared, ctx, trace)
    if spec.selects:
        iq, iw = indexer.queries(w["indexer"], latent, u, at, c, inputs)
        iq, iw = note("index_q", setup.rounding("index_fp4", quant.Q4X32)(iq)), note("index_weights", iw)
        slots = ctx.slots[spec.ratio]
        topk, blocks = indexer.select(
            iq, iw, shared.index_keys, slots.base, slots.visible,
            k=c.index_topk, chunk=how.query_chunk, block=c.candidate_block_size,
            candidates=shared.candidates if spec.restricted else None,
            publish=c.candidate_topk_blocks if spec.publishes else 0,
        )  # fmt: skip
        shared = replace(shared, topk=note("topk", topk))
        if blocks is not None:
            shared = replace(shared, candidates=note("candidates", blocks))
        if aim is not None and aim.index_teacher == "group_mean":
            shared = replace(shared, index_query=iq, index_weight=iw)
    kv: Array | None = shared.kv if spec.ratio else None
    selected: Array | None = shared.topk if spec.ratio else None
    attend = attention.attend if how.attention == "sparse" else attention.attend_dense
    o, lse = attend(
        q, window_kv, kv, selected, w["attn_sink"], ctx.segments, window=c.sliding_window, chunk=how.query_chunk,
        past=parallel.past(p, window_kv, ctx.segments, c.sliding_window - 1),
    )  # fmt: skip
    if aim is not None and aim.index_weight > 0:
        if spec.selects:
            index = _index_loss(setup, spec, iq, iw, q, lse, shared, ctx)
        elif spec.mode is Mode.REUSE and aim.index_teacher == "group_mean":
            index = _index_loss(setup, spec, shared.index_query, shared.index_weight, q, lse, shared, ctx)
    y = attention.output(w, rope.rotate(o, at, inverse=True), inputs, p)
    return y, shared, index


def _make_kv(
    setup: Setup, spec: LayerSpec, w: Weights, u: Array, shared: Shared, ctx: Ctx, trace: dict[str, Array] | None
) -> Shared:
    """What a Full layer makes of its input: rotated KV, and index keys from the latent before rotation.

    Both of a whole row, gathered at once; this is all that the layers of a unit need of other devices' slots.
    """
    c, at, p = setup.config, ctx.slot_angles[spec.ratio], setup.parallel
    latent = compressor.compress(w["compressor"], u, ctx.slots[spec.ratio], spec.ratio, c.rms_norm_eps, p)
    latent = mark(trace, "latent", latent)
    keys = setup.rounding("index_fp4", quant.Q4X32)(indexer.keys(w["indexer"], latent, at, c))
    kv = setup.rounding("kv_fp4", quant.Q4X16)(rope.rotate_single(latent, at))
    kv, keys = mark(trace, "compress_kv_new", kv), mark(trace, "index_k_new", keys)
    if p.tokens:
        kv, keys = jnp.split(parallel.whole(p, jnp.concatenate([kv, keys], axis=-1)), [c.head_dim], axis=-1)
    return replace(shared, kv=kv, index_keys=keys)


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


def run(
    setup: Setup,
    nodes: Sequence[Node],
    w: Weights,
    stream: Stream,
    shared: Shared,
    ctx: Ctx,
    traces: list[dict[str, Array]] | None = None,
) -> tuple[Stream, LayerOut]:
    """Run a plan. A repeat carries the stream; what its body shares stays in the body, what exists is closed over.

    Returns the stream and each layer's sums with the layers of the plan, in order, as leading axis; of taps, the
    tapped layers.
    """
    outs: list[LayerOut] = []
    for node in nodes:
        below = w[modes.name(node)]
        if isinstance(node, Repeat):
            stream, out = _repeat(setup, node, below, stream, shared, ctx, traces)
            ctx = replace(ctx, layer=ctx.layer + len(modes.flatten((node,))))
        else:
            trace: dict[str, Array] | None = None if traces is None else {}
            body = _remat(setup.compute, partial(layer, setup, node, trace=trace))
            stream, shared, one = body(below, stream, shared, ctx)
            out = replace(jax.tree.map(lambda a: a[None], one), taps=one.taps)
            ctx = replace(ctx, layer=ctx.layer + 1)
            if traces is not None and trace is not None:
                traces.append(trace | ({"compress_topk_idxs": shared.topk} if node.ratio else {}))
        outs.append(out)
    return stream, jax.tree.map(lambda *a: jnp.concatenate(a), *outs)


def _repeat(
    setup: Setup,
    node: Repeat,
    w: Weights,
    stream: Stream,
    shared: Shared,
    ctx: Ctx,
    traces: list[dict[str, Array]] | None,
) -> tuple[Stream, LayerOut]:
    """The copies of a repeat as one scan over their stacked weights, or one by one."""
    depth = len(modes.flatten(node.body))

    def copy(stream: Stream, turn: tuple[Array, Weights]) -> tuple[Stream, LayerOut]:
        at = replace(ctx, layer=ctx.layer + turn[0] * depth)
        return run(setup, node.body, turn[1], stream, shared, at, traces)

    turns = (jnp.arange(node.times, dtype=jnp.int32), w)
    if setup.compute.scan and traces is None:
        stream, out = jax.lax.scan(copy, stream, turns)
    else:
        made = []
        for i in range(node.times):
            stream, one = copy(stream, jax.tree.map(lambda a: a[i], turns))  # noqa: B023
            made.append(one)
        out = jax.tree.map(lambda *a: jnp.stack(a), *made)
    return stream, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)


def _remat(how: Compute, body: Callable[..., Any]) -> Callable[..., Any]:
    """The layer function as `how.remat` says; selections are saved by name in every mode, so none is made twice."""
    if how.remat == "none":
        return body
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*SAVED[how.remat]))


def cast(declared: Weights, w: Weights, dtype: Any) -> dict[str, Any]:
    """The declared weights, matrices in the compute dtype.

    Declared float32 ones and tables stay: what is read of a table is cast.
    """
    keep = map_weights(lambda d: d.float32 or d.family == "sinkhorn", declared)
    return jax.tree.map(lambda stays, a: a if stays else a.astype(dtype), keep, {name: w[name] for name in declared})


def forward(
    setup: Setup,
    w: Weights,
    batch: Batch,
    key: Array | None = None,
    traces: list[dict[str, Array]] | None = None,
) -> tuple[Float[Array, "B T D"], LayerOut]:
    """Token ids and images to the normalised hidden state that the head reads, and per-layer sums. See `logits`.

    `traces` takes one dictionary of intermediate arrays a layer, named as the reference's; it unrolls the layers.
    """
    if traces is not None:  # an array traced inside a recomputed body could not leave it
        setup = replace(setup, compute=replace(setup.compute, remat="none"))
    c, dtype, p = setup.config, jnp.dtype(setup.compute.dtype), setup.parallel
    w = cast(declare(c), w, dtype)
    w |= sharding.fetch(setup.layout, {name: d for name, d in declare(c).items() if name not in ("layers", "head")}, w)
    key = None if key is None else parallel.own_key(p, key)
    ctx, x = context(c, batch, key, p), w["embed"][batch.tokens].astype(dtype)
    if batch.images is not None:
        with jax.named_scope("images"):
            x, image = vision.merge(w, x, batch.images, c, setup.compute)
        ctx = replace(ctx, image=image)
    stream = Stream(*hyper.start(x, c.hc_mult))
    stream, out = run(setup, modes.plan(c.table), w["layers"], stream, Shared(), ctx, traces)
    folded = hyper.collapse(stream.x, stream.pre)
    if traces is not None:
        traces.append({"embed": x, "final_fold": folded})
    return rms_norm(folded, w["norm"], c.rms_norm_eps), out


def logits(head: Float[Array, "V D"], y: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """y head^T with float32 operands and result."""
    dims = (((y.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(y.astype(jnp.float32), head.astype(jnp.float32), dims, precision=HIGHEST)


class Model(nn.Module):
    """Linen shell: names and initialises the declared weights and calls the functions of this file."""

    config: Config
    compute: Compute = Compute()

    @nn.compact
    def __call__(self, batch: Batch, objective: Objective | None = None) -> tuple[Array, LayerOut]:
        """Float32 logits [B,T,V] and per-layer sums; training uses `forward` and the chunked loss instead."""
        c = self.config
        assert self.scope is not None, "Linen binds a scope before it calls"
        # Drawn at once from the key given to `Model.init`: Linen would fold another one for every name. In `apply` it
        # evaluates the function for shapes only.
        made = init(declare(c), self.scope.rngs["params"].as_jax_rng()) if self.is_initializing() else None
        tree = {
            name: self.param(name, lambda key, n=name: (init(declare(c), key) if made is None else made)[n])
            for name in declare(c)
        }
        y, out = forward(Setup(c, self.compute, objective), tree, batch)
        return logits(tree["head"], y), out
