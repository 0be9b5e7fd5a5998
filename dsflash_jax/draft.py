"""The draft head (DSpark): a few blocks that propose the next `dspark_block_size` tokens at once.

It reads the mean copies of the input streams of some backbone layers ("taps"), keeps a window of keys made of them for
every stage, and shares the backbone's embedding and head. Drafting from position p, behind which token x is known:
inputs x, noise, noise, ... stand at positions p + 1, p + 2, ...; each attends the window that ends at p and the whole
block. The tokens are then chosen one after the other, each with a bigram bias of the one before.

Source: architecture section 11. B is any number of rows, J the positions of a block, W the window, Z the stages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from dsflash_jax import attention, hyper, layers, model, quant, rope, sharding
from dsflash_jax.config import Config
from dsflash_jax.flow import Setup, Stream
from dsflash_jax.modes import LayerSpec, Mode
from dsflash_jax.ops import Rounding, exact, linear, linear32, rms_norm
from dsflash_jax.params import Weight, Weights, norm, normal
from dsflash_jax.rope import Angles

Choose = Callable[[Array, Array], Array]  # logits [B, V] of draft i of a block and i, a traced int32, to tokens [B]


@struct.dataclass
class Rings:
    """What the stages keep of the main positions: the last W of each row."""

    keys: Any  # float [Z, B, W, Dh]: rotated window keys of each stage
    filled: Any  # bool [B, W]: places that hold a position
    position: Any  # int [B]: the newest one


@struct.dataclass
class Draft:
    """A block of drafted tokens and what chose them."""

    tokens: Any  # int [B, J + 1]: the known token, then the drafts
    logits: Any  # float32 [B, J, V]: with the bigram bias
    confidence: Any  # float32 [B, J]: logit of the draft being accepted


def declare(c: Config) -> dict[str, Any]:
    """Every weight of the draft head as {"mtp": `weights`}, empty without draft stages.

    Declared apart from `model.declare`, because it is trained after the backbone and with that frozen.
    """
    return {"mtp": weights(c)} if c.num_nextn_predict_layers else {}


def weights(c: Config) -> dict[str, Any]:
    """Stages "0", "1", ... under the checkpoint's names: window-only layers with experts of their own number.

    The first one also projects the taps, the last one has the norm before the head, the bigram head and the confidence
    head.
    """
    stages, taps = c.num_nextn_predict_layers, len(c.dspark_target_layer_ids)
    init, d = normal(c.initializer_range), c.hidden_size
    of_stage, spec = stage_config(c), LayerSpec(Mode.WINDOW, ratio=0)
    out: dict[str, Any] = {str(i): layers.declare(of_stage, spec) for i in range(stages)}
    out["0"] |= {"main_proj": Weight((taps * d, d), ("taps", "embed"), init), "main_norm": norm(d, "embed")}
    table = Weight((c.vocab_size, c.dspark_markov_rank), ("vocab", "rank"), init, "sinkhorn")
    features = Weight((d + c.dspark_markov_rank, 1), ("features", "confidence"), init)
    out[str(stages - 1)] |= {
        "norm": norm(d, "embed"),
        "markov_head": {"embed": table, "head": table},
        "confidence_head": {"proj": features},
    }
    return out


def stage_config(c: Config) -> Config:
    """The configuration of a stage's block: the backbone's with the draft head's experts."""
    return replace(c, n_routed_experts=c.dspark_n_routed_experts, num_experts_per_tok=c.dspark_num_experts_per_tok)


def main_keys(
    setup: Setup, w: Weights, taps: Float[Array, "N B T D"], positions: Int[Array, "B T"]
) -> Float[Array, "Z B T Dh"]:
    """Every stage's window keys of main positions before they are rounded, for a cache; w is the whole tree."""
    c, stages = setup.config, _stages(setup, w)
    m = main_states(stages["0"], taps, c, setup.inputs)
    angles = rope.angles(rope.frequencies(c, compressed=False), positions)
    return jnp.stack(
        [
            rope.rotate_single(attention.window_kv(stages[str(i)]["attn"], m, c, setup.inputs), angles)
            for i in range(len(stages))
        ]
    )


def main_states(
    w: Weights, taps: Float[Array, "N B T D"], c: Config, rounding: Rounding = exact
) -> Float[Array, "B T D"]:
    """What every stage's main keys are made of: norm(concat(taps) main_proj); w is the first stage's."""
    joined = jnp.moveaxis(taps, 0, 2).reshape(*taps.shape[1:3], -1)  # [B, T, N * D]
    return rms_norm(linear(rounding(joined), w["main_proj"]), w["main_norm"], c.rms_norm_eps)


def _keys(setup: Setup, w: Weights, u: Array, at: Angles) -> Array:
    """Window keys of a main or block position, which are also its values."""
    kv = attention.window_kv(w, u, setup.config, setup.inputs)
    return setup.rounding("window_fp8", quant.Q8)(rope.rotate_single(kv, at))


def draft(
    setup: Setup,
    w: Weights,
    token: Int[Array, " B"],
    memory: Rings,
    traces: list[dict[str, Array]] | None = None,
    choose: Choose | None = None,
) -> Draft:
    """Draft the tokens behind `token`, which stands one position behind the rings' newest.

    w is the whole tree, embedding, head and "mtp". `traces` takes one dictionary of intermediate arrays a stage.
    `choose` takes each token from its logits, and those of the next one follow from it; without, it is the likeliest.
    """
    c, size = setup.config, setup.config.dspark_block_size
    stages, dtype = _stages(setup, w), jnp.dtype(setup.compute.dtype)
    inputs = jnp.full((token.shape[0], size), c.dspark_noise_token_id, token.dtype).at[:, 0].set(token)
    positions = memory.position[:, None] + 1 + jnp.arange(size)[None]
    angles = rope.angles(rope.frequencies(c, compressed=False), positions)
    stream = Stream(*hyper.start(model.whole(setup, w, "embed")[inputs].astype(dtype), c.hc_mult))
    of_stage = replace(setup, config=stage_config(c))
    for i in range(len(stages)):
        below = stages[str(i)]
        trace: dict[str, Array] | None = None if traces is None else {}
        attend = partial(_attend, of_stage, below["attn"], memory.keys[i], memory.filled, angles)
        stream, _, _ = layers.block(of_stage, below, stream, attend, None, trace)
        if traces is not None and trace is not None:
            traces.append(trace)
    y = hyper.collapse(stream.x, stream.pre)
    last = stages[str(len(stages) - 1)]
    base = model.logits(model.whole(setup, w, "head"), rms_norm(y, last["norm"], c.rms_norm_eps))
    return _chain(last, token, y, base, choose)


def _attend(
    setup: Setup, w: Weights, main: Array, filled: Array, at: Angles, u: Float[Array, "B J D"]
) -> tuple[Float[Array, "B J D"], None]:
    """Attention of one stage: every position of the block sees the whole ring and the whole block."""
    c, inputs = setup.config, setup.inputs
    q = rope.rotate(attention.queries(w, attention.query_latent(w, u, c, inputs), inputs), at)
    keys = jnp.concatenate([main, _keys(setup, w, u, at)], axis=1)  # [B, W + J, Dh]
    seen = jnp.concatenate([filled, jnp.ones(u.shape[:2], bool)], axis=1)
    mask = jnp.broadcast_to(seen[:, None], (*u.shape[:2], keys.shape[1]))
    o, _ = attention.attend_masked(q, keys, mask, w["attn_sink"])
    return attention.output(w, rope.rotate(o, at, inverse=True), inputs, setup.parallel), None


def _chain(
    w: Weights, token: Int[Array, " B"], y: Float[Array, "B J D"], base: Float[Array, "B J V"], choose: Choose | None
) -> Draft:
    """Choose the drafts in order: logits_i = base_i + E[t_i] H^T, t_{i+1} from these; confidence from y_i, E[t_i].

    E and H are the bigram head. y is the folded stream before the norm; both heads compute in float32.
    """

    def step(token: Array, at: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array, Array]]:
        y, base, i = at
        read = w["markov_head"]["embed"][token].astype(y.dtype)
        logits = base + model.logits(w["markov_head"]["head"], read)
        confidence = linear32(jnp.concatenate([y, read], axis=-1), w["confidence_head"]["proj"])[:, 0]
        chosen = (jnp.argmax(logits, axis=-1) if choose is None else choose(logits, i)).astype(token.dtype)
        return chosen, (chosen, logits, confidence)

    steps = jnp.arange(y.shape[1], dtype=jnp.int32)
    _, made = jax.lax.scan(step, token, (jnp.moveaxis(y, 1, 0), jnp.moveaxis(base, 1, 0), steps))
    chosen, logits, confidence = (jnp.moveaxis(a, 0, 1) for a in made)
    return Draft(jnp.concatenate([token[:, None], chosen], axis=1), logits, confidence)


def _stages(setup: Setup, w: Weights) -> dict[str, Any]:
    """The stages for use: matrices in the compute dtype, and whole where a layout only stores them split."""
    declared = declare(setup.config)
    own = model.cast(declared, w, jnp.dtype(setup.compute.dtype))
    return sharding.fetch(setup.layout, declared["mtp"], own["mtp"])
