"""Single-pass manifold-constrained hyper-connections: M residual copies, mixed by a doubly stochastic matrix.

Each sublayer reads its write-back weights from its own input stream, but collapses the copies with the `pre` weights
that the sublayer before it computed. Source: architecture section 4.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from dsflash_jax.config import Config
from dsflash_jax.ops import HIGHEST, linear32
from dsflash_jax.params import Weight, Weights, constant, normal

GATE_INIT = 0.01  # initial scale of the dynamic part; 1.0 was seen to double block outputs (training section 9)


@struct.dataclass
class Mix:
    """Coefficients of one sublayer, float32."""

    pre: Any  # float [B, T, M]: collapses the copies for the NEXT sublayer
    post: Any  # float [B, T, M]: writes this sublayer's output to each copy
    comb: Any  # float [B, T, M, M]: moves copies, indexed [source, destination]


def weights(c: Config) -> dict[str, Weight]:
    """Coefficient weights of both sublayers of a layer; all float32."""
    m = c.hc_mult
    split = (m, m, m * m)
    out: dict[str, Weight] = {}
    for sub in ("attn", "ffn"):
        out[f"hc_{sub}_fn"] = Weight(
            (m * c.hidden_size, sum(split)), ("copies_embed", "mix"), normal(c.initializer_range),
            split=split, float32=True, bare=True,
        )  # fmt: skip
        out[f"hc_{sub}_base"] = Weight((sum(split),), ("mix",), constant(0.0), "scalar", float32=True, bare=True)
        out[f"hc_{sub}_scale"] = Weight((3,), ("mix_part",), constant(GATE_INIT), "scalar", float32=True, bare=True)
    return out


def mix(w: Weights, sub: str, x: Float[Array, "B T M D"], c: Config) -> Mix:
    """Coefficients of sublayer `sub` ("attn" or "ffn") from its input stream.

    z = (flat(x) fn) * rsqrt(mean(flat(x)^2) + eps), one statistic a token over all copies; then a sigmoid each for pre
    and post and a Sinkhorn normalisation for comb.
    """
    b, t, m, d = x.shape
    flat = x.reshape(b, t, m * d).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + c.rms_norm_eps)
    with jax.named_scope("hyper"):
        z = linear32(flat, w[f"hc_{sub}_fn"]) * scale
    return coefficients(z, w[f"hc_{sub}_scale"], w[f"hc_{sub}_base"], c)


def coefficients(z: Float[Array, "B T MIX"], scale: Float[Array, " 3"], base: Float[Array, " MIX"], c: Config) -> Mix:
    """pre = sigmoid(.) + eps, post = 2 sigmoid(.), comb = sinkhorn(.), each from its part of z * scale + base."""
    m = c.hc_mult
    # Tokens go last: arrays whose two minor axes are 4 x 4 would fill a 64th of a vector register.
    z = jnp.moveaxis(z, -1, 0)  # [MIX, B, T]
    base = base[:, None, None]
    pre = jax.nn.sigmoid(z[:m] * scale[0] + base[:m]) + c.hc_eps
    post = 2 * jax.nn.sigmoid(z[m : 2 * m] * scale[1] + base[m : 2 * m])
    comb = (z[2 * m :] * scale[2] + base[2 * m :]).reshape(m, m, *z.shape[1:])
    comb = sinkhorn(comb, c.hc_sinkhorn_iters, c.hc_eps)
    last = lambda a, n: jnp.moveaxis(a, tuple(range(n)), tuple(range(-n, 0)))  # noqa: E731
    return Mix(last(pre, 1), last(post, 1), last(comb, 2))


def sinkhorn(logits: Float[Array, "M M *B"], iters: int, eps: float) -> Float[Array, "M M *B"]:
    """Make the leading [source, destination] matrix doubly stochastic: row softmax + eps, columns, then rows, columns.

    `iters` counts the first half step as 1; the last step normalises columns, so column sums are 1.
    """
    comb = jax.nn.softmax(logits, axis=1) + eps
    return _alternate(comb / (comb.sum(axis=0, keepdims=True) + eps), iters - 1, eps)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _alternate(comb: Array, times: int, eps: float) -> Array:
    """Divide by row sums + eps, then by column sums + eps, `times` times in a loop: unrolled it compiles slowly."""
    return _divide(comb, times, eps)[0]


def _divide(comb: Array, times: int, eps: float) -> tuple[Array, tuple[Array, Array]]:
    def step(comb: Array, _: None) -> tuple[Array, tuple[Array, Array]]:
        rows = comb.sum(axis=1, keepdims=True) + eps
        comb = comb / rows
        columns = comb.sum(axis=0, keepdims=True) + eps
        return comb / columns, (rows, columns)

    return jax.lax.scan(step, comb, None, length=times)


def _alternate_forward(comb: Array, times: int, eps: float) -> tuple[Array, tuple[Array, tuple[Array, Array]]]:
    out, divisors = _divide(comb, times, eps)
    return out, (out, divisors)


def _alternate_backward(times: int, eps: float, saved: tuple[Array, tuple[Array, Array]], d: Array) -> tuple[Array]:
    """Walk back from the divisors: y = x / (sum(x) + eps) has dx = (dy - sum(dy y)) / divisor, and x = y divisor."""

    def step(at: tuple[Array, Array], divisors: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        comb, d = at
        for axis, divisor in ((0, divisors[1]), (1, divisors[0])):
            d = (d - jnp.sum(d * comb, axis=axis, keepdims=True)) / divisor
            comb = comb * divisor
        return (comb, d), None

    return (jax.lax.scan(step, (saved[0], d), saved[1], reverse=True)[0][1],)


_alternate.defvjp(_alternate_forward, _alternate_backward)


# The stream products below are written out over the few copies, with their own gradients: what differentiation makes
# of them pads and adds whole streams, four times slower on a CPU.


@jax.custom_vjp
def collapse(x: Float[Array, "B T M D"], pre: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
    """sum_c pre[c] x[c] in float32, cast back."""
    return reduce(jnp.add, [pre[:, :, c, None] * x[:, :, c].astype(jnp.float32) for c in range(x.shape[2])]).astype(
        x.dtype
    )


def _collapse_forward(x: Array, pre: Array) -> tuple[Array, tuple[Array, Array]]:
    return collapse(x, pre), (x, pre)


def _collapse_backward(saved: tuple[Array, Array], d: Array) -> tuple[Array, Array]:
    x, pre = saved
    d32 = d.astype(jnp.float32)
    d_x = (pre[..., None] * d32[:, :, None, :]).astype(x.dtype)
    return d_x, jnp.einsum("btcd,btd->btc", x.astype(jnp.float32), d32, precision=HIGHEST)


collapse.defvjp(_collapse_forward, _collapse_backward)


def expand(y: Float[Array, "B T D"], x: Float[Array, "B T M D"], at: Mix) -> Float[Array, "B T M D"]:
    """x'[j] = post[j] y + sum_i comb[i, j] x[i] in float32, cast back; the sum runs over the source index."""
    return _expand(y, x, at.post, at.comb)


@jax.custom_vjp
def _expand(y: Array, x: Array, post: Array, comb: Array) -> Array:
    return (post[..., None] * y.astype(jnp.float32)[:, :, None, :] + _move(x, comb)).astype(x.dtype)


def _move(x: Array, comb: Array) -> Array:
    """sum_i comb[i, j] x[i], float32."""
    copies = [comb[:, :, i, :, None] * x[:, :, i, None, :].astype(jnp.float32) for i in range(x.shape[2])]
    return reduce(jnp.add, copies)


def _expand_forward(y: Array, x: Array, post: Array, comb: Array) -> tuple[Array, tuple[Array, ...]]:
    return _expand(y, x, post, comb), (y, x, post, comb)


def _expand_backward(saved: tuple[Array, ...], d: Array) -> tuple[Array, ...]:
    y, x, post, comb = saved
    d32 = d.astype(jnp.float32)
    d_post = jnp.einsum("btd,btjd->btj", y.astype(jnp.float32), d32, precision=HIGHEST)
    d_comb = jnp.einsum("btid,btjd->btij", x.astype(jnp.float32), d32, precision=HIGHEST)
    return collapse(d32, post).astype(y.dtype), _move(d32, jnp.swapaxes(comb, 2, 3)).astype(x.dtype), d_post, d_comb


_expand.defvjp(_expand_forward, _expand_backward)


def start(x: Float[Array, "B T D"], copies: int) -> tuple[Float[Array, "B T M D"], Float[Array, "B T M"]]:
    """The first stream: equal copies, and a `pre` that reads copy 0."""
    pre = jnp.zeros((*x.shape[:2], copies), jnp.float32).at[..., 0].set(1.0)
    return jnp.repeat(x[:, :, None, :], copies, axis=2), pre
