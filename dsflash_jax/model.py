"""The model: the plan of scans over its layers, embedding, head, and the Linen shell.

Source: architecture section 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from dsflash_jax import (
    cache,
    hyper,
    layers,
    modes,
    parallel,
    sharding,
    vision,
)
from dsflash_jax.config import Compute, Config, Objective
from dsflash_jax.flow import Batch, Ctx, LayerOut, Setup, Shared, Stream, context
from dsflash_jax.modes import LayerSpec, Node, Repeat
from dsflash_jax.ops import HIGHEST, rms_norm
from dsflash_jax.params import Weight, Weights, leaves, map_weights, norm, normal

SAVED = {
    "full": ("topk", "candidates"),
    "selective": ("topk", "candidates", "attn_o", "attn_lse", "attn_out", "ffn_out"),
}


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
            out[modes.name(node)] = layers.declare(c, node)
    return out


def init(declared: Weights, key: Array, dtype: Any = jnp.float32) -> dict[str, Any]:
    """Fresh weights of a tree of declarations; each leaf draws from its own key, so a layout never changes them."""
    paths = leaves(declared)
    keys = dict(zip(paths, jax.random.split(key, len(paths)), strict=True))
    made = {path: w.init(keys[path], w.full_shape, dtype) for path, w in paths.items()}
    structure = jax.tree.structure(declared, is_leaf=lambda w: isinstance(w, Weight))
    return jax.tree.unflatten(structure, [made[p] for p in paths])


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
            body = _remat(setup.compute, partial(layers.layer, setup, node, trace=trace))
            stream, shared, one = body(below, stream, shared, ctx)
            out = replace(jax.tree.map(lambda a: a[None], one), taps=one.taps, made=one.made)
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
    held: cache.Cache | None = None,
) -> tuple[Float[Array, "B T D"], LayerOut]:
    """Token ids and images to the normalised hidden state that the head reads, and per-layer sums. See `logits`.

    `traces` takes one dictionary of intermediate arrays a layer, named as the reference's; it unrolls the layers.
    With `held` the rows go on from a cache, right-padded, at its positions; what is to be kept is in the layers' sums.
    """
    if traces is not None:  # an array traced inside a recomputed body could not leave it
        setup = replace(setup, compute=replace(setup.compute, remat="none"))
    w, ctx, stream = enter(setup, w, batch, key, held)
    if traces is not None:
        embedded = stream.x[:, :, 0]
    stream, out = run(setup, modes.plan(setup.config.table), w["layers"], stream, Shared(), ctx, traces)
    if traces is not None:
        traces.append({"embed": embedded, "final_fold": hyper.collapse(stream.x, stream.pre)})
    return leave(setup, w, stream), out


def enter(
    setup: Setup, w: Weights, batch: Batch, key: Array | None = None, held: cache.Cache | None = None
) -> tuple[Weights, Ctx, Stream]:
    """What the layers run on: weights in the compute dtype, what is derived of the batch, and the first stream."""
    c, dtype, p = setup.config, jnp.dtype(setup.compute.dtype), setup.parallel
    w = cast(declare(c), w, dtype)
    w |= sharding.fetch(setup.layout, {name: d for name, d in declare(c).items() if name not in ("layers", "head")}, w)
    key = None if key is None else parallel.own_key(p, key)
    ctx, x = context(c, batch, key, p, held), w["embed"][batch.tokens].astype(dtype)
    if batch.images is not None:
        with jax.named_scope("images"):
            x, image = vision.merge(w, x, batch.images, c, setup.compute, p)
        ctx = replace(ctx, image=image)
    return w, ctx, Stream(*hyper.start(x, c.hc_mult))


def leave(setup: Setup, w: Weights, stream: Stream) -> Float[Array, "B T D"]:
    """The normalised hidden state that the head reads, from the stream behind the last layer."""
    return rms_norm(hyper.collapse(stream.x, stream.pre), w["norm"], setup.config.rms_norm_eps)


def between(nodes: Sequence[Node], w: Weights, start: int, stop: int) -> tuple[tuple[Node, ...], dict[str, Any]]:
    """Layers start .. stop - 1 of a plan, counted from its own first layer, with their weights.

    A repeat keeps its whole copies as one; of a copy that is cut, the layers stand alone.
    """
    parts: list[tuple[Node, Any]] = []
    at = 0
    for node in nodes:
        depth = len(modes.flatten((node,)))
        low, high = max(start - at, 0), min(stop - at, depth)
        if low < high:
            below = w[modes.name(node)]
            parts += [(node, below)] if isinstance(node, LayerSpec) else _copies(node, below, low, high)
        at += depth
    return tuple(node for node, _ in parts), {modes.name(node): below for node, below in parts}


def _copies(node: Repeat, w: Weights, low: int, high: int) -> list[tuple[Node, Any]]:
    """`between` inside a repeat."""
    depth = len(modes.flatten(node.body))
    first, last = -(-low // depth), high // depth  # whole copies
    parts: list[tuple[Node, Any]] = []

    def cut(copy: int) -> None:
        """Add what lies in the range of one copy."""
        own = jax.tree.map(lambda a: a[copy], w)
        inner, below = between(node.body, own, max(low - copy * depth, 0), min(high - copy * depth, depth))
        parts.extend(_moved(one, below[modes.name(one)], copy * depth) for one in inner)

    if low < first * depth:
        cut(first - 1)
    if first < last:
        whole = jax.tree.map(lambda a: a[first:last], w)
        parts.append(_moved(Repeat(last - first, node.body), whole, first * depth))
    if last >= first and high > last * depth:
        cut(last)
    return parts


def _moved(node: Node, w: Weights, by: int) -> tuple[Node, Weights]:
    """A node and its weights under higher layer ids."""
    new = modes.moved(node, by)
    if isinstance(node, Repeat) and isinstance(new, Repeat):
        pairs = zip(node.body, new.body, strict=True)
        w = {modes.name(to): _moved(one, w[modes.name(one)], by)[1] for one, to in pairs}
    return new, w


def whole(setup: Setup, w: Weights, name: str) -> Float[Array, "V D"]:
    """The embedding or the head, "embed" or "head", with all its rows."""
    return sharding.fetch(setup.layout, {name: declare(setup.config)[name]}, w)[name]


def logits(head: Float[Array, "V D"], y: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
    """y head^T with float32 operands and result."""
    dims = (((y.ndim - 1,), (1,)), ((), ()))
    with jax.named_scope("head"):
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
