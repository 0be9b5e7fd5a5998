"""What the model makes behind a cache, under the names of the reference's decode and replay traces.

A trace of single tokens is `Road.decoded`; a prompt whose end alone goes through the decoder `Road.decoder_replay`, and
one whose first tokens left only their slots `Road.encoder_replay`. `meant` cuts recorded buffers to what their run had
filled. `parity` compares. `pooled` and `ring_slots` are the same for op vectors. Source: architecture sections 6, 13
and 14.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dsflash_jax import cache as caches
from dsflash_jax import compressor, decode, draft, model, speculate
from dsflash_jax.cache import Cache, Form, Forms, Made
from dsflash_jax.config import Config
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.modes import Mode
from dsflash_jax.params import Weights
from dsflash_jax.verdict import Arrays

DECODE = re.compile(r"decode_(\w+)_after(\d+)")  # one-token steps, the first one at this position
DECODER = re.compile(r"replay_decoder_(\w+)")
ENCODER = re.compile(r"replay_encoder_(\w+)_hit(\d+)")
GIVEN = ("prompt_length", "hit_length")  # tokens of a replay's prompt, or of the part of it whose slots were kept
HELD = re.compile(r"cache\.L(\d+)\.(\w+)")  # buffers after the last token
OTHER = "recorded on other inputs"  # more tokens than input_ids has
NO_IMAGES = "a replay of images has no code"


class Road:
    """The decode of a set's rows by one variant. Its programs are compiled once and shared by all traces."""

    def __init__(
        self, setup: Setup, w: Weights, batch: Batch, classes: np.ndarray | None = None, *, packed: bool = True
    ) -> None:
        """`batch` has the rows and their images; `classes` as in `decode.piece`, `packed` as in `cache.forms`."""
        self.setup, self.w, self.images, self.classes, self.packed = setup, w, batch.images, classes, packed
        self.tokens = np.asarray(batch.tokens)
        self._piece, self._step = jax.jit(self._run_piece), jax.jit(self._run_step)
        self._encode, self._replay = jax.jit(self._run_encode), jax.jit(self._run_replay)

    def decoded(self, start: int, steps: int) -> Arrays:
        """`steps` known tokens one by one behind a prefill of `start`: every array of each, and the caches after."""
        cache, _ = self.extended(self.begin(), 0, start)
        cache, made = self.stepped(cache, start, steps)
        return made | held(self.setup.config, cache)

    def decoder_replay(self, length: int, steps: int) -> Arrays:
        """A prompt of `length` tokens in chunks below the boundary, its end above; the caches then; and known tokens.

        Chunks are odd for windows of a power of two, so that groups of tokens straddle them.
        """
        c, cache = self.setup.config, self.begin()
        size, end = max(c.sliding_window - 1, 1), decode.no_end(self.setup, len(self.tokens))
        for at in range(0, length, size):
            cache, end = self._encode(self.w, cache, *self.cut(at, min(at + size, length), size), end)
        cache, logits = self._replay(self.w, cache, end)
        last = min(length, c.sliding_window)
        made = {"segment_start": np.asarray(length - last), "segment_logits": np.asarray(logits[:, :last])}
        made |= held(c, cache)
        if steps:
            made["decode_logits"] = np.concatenate(list(self.stepped(cache, length, steps)[1]["logits"]), axis=1)
        return made

    def encoder_replay(self, hit: int, end: int) -> Arrays:
        """Tokens up to `end` behind a cold prefill of `hit` tokens that left its slots alone.

        The last W tokens of the hit are run again, with windows that begin there.
        """
        c = self.setup.config
        start = max(hit - c.sliding_window, 0)
        cold, _ = self.extended(self.begin(), 0, hit)
        before, _ = self.extended(self.begin(), 0, start)
        at = jnp.full((len(self.tokens),), start, jnp.int32)
        stored = {r: jnp.full_like(at, hit // r) for r in cold.stored}
        lost = replace(
            self.begin(), length=at, origin=at, stored=stored, kv=cold.kv, index=cold.index, history=before.history
        )
        cache, logits = self.extended(lost, start, end)
        return {"replay_start": np.asarray(start), "suffix_logits": logits[:, hit - start :]} | held(c, cache)

    def begin(self) -> Cache:
        """A cache without tokens."""
        rows, length = self.tokens.shape
        return caches.empty(self.setup, rows, length, self.packed)

    def cut(self, start: int, stop: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens start .. stop - 1 of each row as a piece of `size`, and their number."""
        part = self.tokens[:, start:stop]
        return np.pad(part, ((0, 0), (0, size - part.shape[1]))), np.full(len(part), part.shape[1], np.int32)

    def extended(self, cache: Cache, start: int, stop: int) -> tuple[Cache, np.ndarray]:
        """The cache behind tokens start .. stop - 1 in one piece, padded until it is a long one; their logits."""
        size = max(self.tokens.shape[1], caches.SHORT + 1)
        cache, logits = self._piece(self.w, cache, *self.cut(start, stop, size))
        return cache, np.asarray(logits[:, : stop - start])

    def stepped(self, cache: Cache, start: int, steps: int) -> tuple[Cache, Arrays]:
        """The cache behind tokens start .. start + steps - 1, one by one; every array with the steps in front."""
        made = []
        for at in range(start, start + steps):
            cache, one = self._step(self.w, cache, self.tokens[:, at])
            made.append(jax.device_get(one))
        return cache, {name: np.stack([one[name] for one in made]) for name in made[0]}

    def _run_piece(self, w: Weights, cache: Cache, tokens: Array, count: Array) -> tuple[Cache, Array]:
        y, made = decode.extend(self.setup, w, cache, tokens, count, classes=self.classes, images=self.images)
        return decode.append(cache, made, count), model.logits(w["head"], y)

    def _run_step(self, w: Weights, cache: Cache, token: Array) -> tuple[Cache, dict[str, Any]]:
        setup, one, traces = self.setup, jnp.ones_like(token), list[dict[str, Array]]()
        y, made = decode.extend(setup, w, cache, token[:, None], one, classes=self.classes, traces=traces)
        out: dict[str, Any] = traces.pop() | {"logits": model.logits(w["head"], y)}
        out |= {f"L{i}.{name}": array for i, trace in enumerate(traces) for name, array in trace.items()}
        if setup.config.engram_layer_ids:
            out["engram_hash_ids"] = decode.piece(setup.config, cache, token[:, None], one, self.classes).engram_rows
        cache = decode.append(cache, made, one)
        return cache, out | (self._drafted(w, cache, out) if setup.taps else {})

    def _drafted(self, w: Weights, cache: Cache, step: dict[str, Array]) -> dict[str, Array]:
        """The drafts behind a step from the cache's rings; the known token is the likeliest behind the step."""
        setup, c, traces = self.setup, self.setup.config, list[dict[str, Array]]()
        taps = jnp.stack([step[f"L{i}.tap"] for i in c.dspark_target_layer_ids])
        token = jnp.argmax(step["logits"][:, 0], axis=-1).astype(jnp.int32)
        made = draft.draft(setup, w, token, speculate.memory(cache), traces)
        out = {f"Lmtp{i}.{name}": array for i, trace in enumerate(traces) for name, array in trace.items()}
        out |= {"mtp_output_ids": made.tokens, "mtp_logits": made.logits, "mtp_confidence": made.confidence}
        out["main_hidden"] = jnp.concatenate(list(taps), axis=-1)
        return out | {"mtp_main_x": draft.main_states(w["mtp"]["0"], taps, c, setup.inputs)}

    def _run_encode(
        self, w: Weights, cache: Cache, tokens: Array, count: Array, end: decode.End
    ) -> tuple[Cache, decode.End]:
        return decode.encode(self.setup, w, cache, tokens, count, end, classes=self.classes)

    def _run_replay(self, w: Weights, cache: Cache, end: decode.End) -> tuple[Cache, Array]:
        cache, y = decode.replay(self.setup, w, cache, end)
        return cache, model.logits(w["head"], y)


def held(c: Config, cache: Cache) -> Arrays:
    """What a cache says it holds, as the reference's buffers: filled places of rings, stored slots, pending tokens."""
    out: Arrays = {}
    window = np.asarray(cache.forms.window.unpack(cache.window))
    filled = np.asarray(cache.filled()).any(axis=0)
    for i, (spec, number) in enumerate(zip(c.table, caches.numbers(c.table), strict=True)):
        out[f"cache.L{i}.window_kv_cache"] = window[:, i, filled]
        if spec.mode is not Mode.FULL:
            continue
        stored = int(cache.stored[spec.ratio].max())
        for kind, name in (("kv", "compress_kv_cache"), ("index", "index_k_cache")):
            entry = jax.tree.map(lambda a: a[:, number], getattr(cache, kind)[spec.ratio])  # noqa: B023
            out[f"cache.L{i}.{name}"] = np.asarray(getattr(cache.forms, kind).unpack(entry))[:, :stored]
        if spec.ratio > 1:
            tail = np.asarray(cache.tails[spec.ratio][:, number])  # [B, r - 1, 2, Dh]
            out[f"cache.L{i}.compressor_kv_state"] = tail[:, :, 0]
            out[f"cache.L{i}.compressor_score_state"] = tail[:, :, 1]
    return out


def meant(c: Config, recorded: Arrays, total: int, origin: int = 0) -> Arrays:
    """Recorded arrays with buffers cut to what `total` tokens filled, in the order of `held`.

    Rings have the last W tokens from `origin` on, slots are complete groups, and of a compressor's state the newest
    ratio - 1 tokens are compared, each at its position mod ratio: it holds what is pending, and is not cleared.
    """
    out: Arrays = {}
    for name, array in recorded.items():
        at = HELD.fullmatch(name)
        if at and int(at[1]) < len(c.table):
            ratio = c.table[int(at[1])].ratio
            tokens = np.arange(max(total - c.sliding_window, origin), total)
            if at[2] == "window_kv_cache":
                places = np.sort(tokens % c.sliding_window)
            elif at[2].endswith("_cache"):
                places = np.arange(total // max(ratio, 1))
            else:
                places = tokens[len(tokens) - max(ratio - 1, 0) :] % max(ratio, 1)
            if array.ndim > 1 and array.shape[1] > places.max(initial=-1):
                array = array[:, places]
        out[name] = array
    return out


def compared(road: Road, trace: str, recorded: Arrays) -> tuple[Arrays, Arrays]:
    """What a road makes of a trace, and the recorded arrays that it is compared with.

    Raises ValueError where a replay does not say how long its prompt is.
    """
    c, total, origin = road.setup.config, reach(trace, recorded), 0
    if at := DECODE.fullmatch(trace):
        steps = steps_of(recorded)
        got = road.decoded(int(at[2]), steps) if steps else {}
    elif DECODER.fullmatch(trace):
        length = given(recorded, "prompt_length")
        got, total = road.decoder_replay(length, total - length), length  # its buffers are those behind the prompt
    else:
        got = road.encoder_replay(given(recorded, "hit_length"), total)
        origin = int(got["replay_start"])
    return got, meant(c, {name: a for name, a in recorded.items() if name not in GIVEN}, total, origin)


def uncovered(trace: str, recorded: Arrays, batch: Batch) -> str:
    """Why a decode or replay trace cannot be run on a set's rows, "" if it can, and for other traces."""
    if not recorded or not any(name.fullmatch(trace) for name in (DECODE, DECODER, ENCODER)):
        return ""
    if reach(trace, recorded) > batch.tokens.shape[1]:
        return OTHER
    return NO_IMAGES if batch.images is not None and not DECODE.fullmatch(trace) else ""


def reach(trace: str, recorded: Arrays) -> int:
    """How many tokens of each row a decode or replay trace read. Raises ValueError as `given`."""
    if at := DECODE.fullmatch(trace):
        return int(at[2]) + steps_of(recorded)
    length, last = ("prompt_length", "decode_logits") if DECODER.fullmatch(trace) else ("hit_length", "suffix_logits")
    behind = recorded.get(last, np.zeros(0))
    return given(recorded, length) + (behind.shape[1] if behind.ndim > 1 else 0)


def steps_of(recorded: Arrays) -> int:
    """Steps of a decode trace: the longest leading axis."""
    return max((len(a) for name, a in recorded.items() if a.ndim and not HELD.fullmatch(name)), default=0)


def given(recorded: Arrays, name: str) -> int:
    """A number of tokens that a replay was recorded with. Raises ValueError if it is none."""
    number = recorded.get(name, np.zeros(0))
    if number.ndim or number.dtype.kind not in "iu" or number < 1:
        raise ValueError(f"{name}: expected a number of tokens, got {number.dtype} of shape {list(number.shape)}")
    return int(number)


def pooled(w: Weights, x: Array, start: int, ratio: int, eps: float) -> Arrays:
    """A compressor behind a prefill of `start` tokens of x [B, T, D], the others one by one.

    `prefill` and `decode` are latents, `emitted` says which of the single tokens complete a group; of ratios above 1
    `kv_state` and `score_state` hold the last `ratio` tokens, each at its position mod ratio.
    """
    rows, length, _ = x.shape
    go_on = jax.jit(partial(compressor.go_on, ratio=ratio, eps=eps))
    one = jax.jit(lambda w, x, at: compressor.compress(w, x, at, ratio, eps))
    tail = jnp.zeros((rows, ratio - 1, 2 * w["wkv"].shape[1]), jnp.float32)
    number = lambda n: jnp.full((rows,), n, jnp.int32)  # noqa: E731
    prefill, decoded, emitted, both = np.zeros(0), [], [], tail
    # The prefill is the first tokens of a longer, padded piece.
    for at, count in [(0, start), *((i, 1) for i in range(start, length))]:
        piece = x if at == 0 else x[:, at : at + 1]
        slots = compressor.following(number(at), number(count), piece.shape[1], ratio)
        latents, both = (one(w, piece, slots), tail) if ratio == 1 else go_on(w, piece, tail, slots)
        tail = both[:, count : count + ratio - 1]
        exists = np.asarray(slots.segments[0] > 0)
        if at == 0:
            prefill = np.asarray(latents)[:, exists]
        else:
            emitted.append(exists.any())
            decoded.append(np.asarray(latents)[:, exists])
    out = {"prefill": prefill, "decode": np.concatenate(decoded, axis=1), "emitted": np.asarray(emitted)}
    if ratio > 1:
        order = np.argsort(np.arange(length - ratio, length) % ratio)  # the last step's tail and its token
        out["kv_state"], out["score_state"] = np.split(np.asarray(both)[:, order], 2, axis=-1)
    return out


def ring_slots(window: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """The ring places [W] that the token at position `start` attends, -1 without a token: the window's oldest first as
    a layer reads them, and those that count as filled behind the token.
    """
    form, one, nothing = Form(1, None, False, "float32"), jnp.ones((1,), jnp.int32), dict[int, Any]()
    places = jnp.arange(window, dtype=jnp.int32)
    held = places.astype(jnp.float32)[None, None, :, None]  # each place holds its number
    forms, slots = Forms(form, form, form), (nothing, nothing, nothing)
    cache = Cache(start * one, 0 * one, nothing, held, *slots, None, None, forms, start + 1)
    past, exists = cache.past(0)
    cache = decode.append(cache, Made(jnp.full((1, 1, 1, 1), -1.0), *slots), one)
    own = jnp.argmin(cache.window[0, 0, :, 0]).astype(jnp.int32)
    before = jnp.where(exists[0] > 0, past[0, :, 0].astype(jnp.int32), -1)
    return np.asarray(jnp.append(before, own)), np.asarray(jnp.where(cache.filled()[0], places, -1))
