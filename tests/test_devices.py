"""devices.py: decoding over several devices says and keeps what one device does."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from test_decode import WIDE
from test_speculate import STAGES, valid, with_drafts

from dsflash_jax import prefix, sample, sampling, speculate
from dsflash_jax.config import Config, Quantize
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Setup
from dsflash_jax.sample import Request
from dsflash_jax.sharding import Layout
from dsflash_jax.speculate import Speculator

# N-gram memory, windows, Full of both ratios, Reuse, Reindex and a draft head, all of whose experts divide.
C = dataclasses.replace(tiny.T, **tiny.ENGRAM).with_modes(
    "Se F2 U F1p Xt Ut", engram_num_embeddings=tiny.TABLES[1], **STAGES | {"dspark_n_routed_experts": 4}
)
FEW = tiny.with_modes("Se F2")
LAYOUTS = {
    "fsdp x tensor": Layout(fsdp=2, tensor=2, whole=0),
    "fsdp x expert": Layout(fsdp=2, expert=2, whole=0),
    "data x expert with a capacity, matrices whole": Layout(data=2, expert=4, capacity=1.0, whole=10**9),
}
LENGTHS = (1, 13, 6, 9, 8, 2, 7, 12)
GREEDY = sampling.settings(len(LENGTHS), temperature=0.0)
PROMPTS = [row[:n] for row, n in zip(tiny.tokens(C, len(LENGTHS), max(LENGTHS), seed=5), LENGTHS, strict=True)]


pytestmark = pytest.mark.usefixtures("quick")


def placed(c: Config, layout: Layout, w: Any = None, **how: Any) -> Decoder:
    """A decoder on as many of the eight devices as the layout takes."""
    mesh = None if layout.devices == 1 else layout.mesh(jax.devices()[: layout.devices])
    setup = Setup(c, tiny.STRICT, layout=layout, **how)
    return Decoder(setup, tiny.weights(c) if w is None else w, chunk=8, mesh=mesh)


@cache
def drafting(layout: Layout) -> Speculator:
    return Speculator(placed(C, layout, with_drafts(C)))


@cache
def said(layout: Layout, how: str) -> dict[str, Any]:
    """What a prefill in chunks, a step that one row waits for, more room, and a round of drafts give."""
    fast = drafting(layout)
    decoder, goes_on = fast.decoder, np.array([True, True, False, True] * 2)
    held, y = decoder.prefill(decoder.begin(len(PROMPTS), 16), PROMPTS, how=how)
    made = jax.device_get({"hidden": y, "behind the prompt": valid(held)})
    token, made["log-probability"] = jax.device_get(decoder.first(held, y, GREEDY))
    held, made["logits"] = decoder.step(held, token, goes_on.astype(np.int32))
    likeliest = np.asarray(made["logits"]).argmax(axis=-1).astype(np.int32)
    held, made["round"] = fast.round(decoder.room(held, 300), np.where(goes_on, likeliest, token), token >= 0, GREEDY)
    return jax.device_get(made | {"in the end": valid(held)})


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("how", ["full", "replay"])
def test_prefill_steps_and_drafts_are_those_of_one_device(name, how):
    """Whole numbers are equal, float32 ones up to the order of sums; a selection of other slots would be far off."""
    got, want = said(LAYOUTS[name], how), said(Layout(), how)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        scale = 0.0 if np.issubdtype(b.dtype, np.integer) else 1e-5 * max(1.0, float(np.abs(b).max(initial=0.0)))
        np.testing.assert_allclose(a, b, rtol=0, atol=scale, err_msg=jax.tree_util.keystr(path))


@pytest.mark.slow
def test_any_number_of_prompts_is_completed_as_on_one_device():
    """Three over four devices."""
    requests = [Request(prompt, 6, temperature=0.0) for prompt in PROMPTS[:3]]
    made = []
    for layout in (LAYOUTS["fsdp x expert"], Layout()):
        made.append(sample.collect(sample.generate(placed(FEW, layout), requests)))
    for got, want in zip(*made, strict=True):
        assert (got.ids, got.finish) == (want.ids, want.finish)
        np.testing.assert_allclose(got.log_probabilities, want.log_probabilities, atol=1e-5)


def test_an_oracle_tells_each_device_what_its_own_rows_say():
    spread, known = placed(FEW, Layout(data=2, expert=4)), np.arange(8 * 4).reshape(8, 4)
    look = speculate.oracle(known, FEW.vocab_size, 2)
    tell = spread.devices.jit(lambda w, held, token: look(spread.setup, w, held, token, GREEDY).tokens)
    np.testing.assert_array_equal(tell(spread.w, spread.begin(8, 4), np.zeros(8, np.int32)), known[:, 1:3])


@pytest.mark.slow
def test_a_prefix_that_several_devices_store_goes_on_on_one(tmp_path):
    """From the table that both layouts fill up differently, in whatever rows."""
    spread, alone = placed(C, Layout(expert=4)), placed(C, Layout())
    ids, at = PROMPTS[1], tmp_path / "prefix.npz"
    held, _ = spread.prefill(spread.begin(4, 16), [ids[:3], ids[:9], ids, ids[:1]])
    prefix.save(at, spread, held, 1, ids[:9])
    logits = []
    for decoder in (spread, alone):
        held, start = prefix.load(at, decoder, [ids] * 4)
        logits.append(np.asarray(decoder.logits(decoder.prefill(held, [ids[start:]] * 4)[1])))
    np.testing.assert_allclose(*logits, atol=1e-5)


@pytest.mark.slow
def test_packed_values_of_rows_on_other_devices_have_the_same_bytes():
    on = Quantize(kv_fp4=True, index_fp4=True, window_fp8=True)
    alone, spread = (placed(WIDE, Layout(expert=n, whole=0), quantize=on) for n in (1, 2))
    held = [d.prefill(d.begin(2, 8), list(tiny.tokens(WIDE, 2, 7)))[0] for d in (alone, spread)]
    for a, b in zip(*map(jax.tree.leaves, held), strict=True):
        if a.dtype == np.uint8:
            assert (np.asarray(a) == np.asarray(b)).mean() > 0.999  # what lies on a boundary may fall either way
        else:
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: placed(FEW, Layout(context=8)),
            "keeps a row on one device, but context splits its tokens: set layout.con",
        ),
        (
            lambda: placed(FEW, Layout(expert=2, context=4, expert_splits="tokens")),
            "but expertxcontext splits its tokens",
        ),
        (
            lambda: Decoder(Setup(FEW, tiny.STRICT, layout=Layout(fsdp=4)), {}),
            "takes 4 devices, but there are 8: change",
        ),
        (
            lambda: placed(FEW, Layout(data=2), tiny.weights(dataclasses.replace(FEW, vocab_size=32))),
            r"a weight has shape \[32, 16\], but this model's is \[40, 16\]: give the weights of this model",
        ),
        (lambda: placed(FEW, Layout(expert=8)), "its axis expert_stack of 4 does not divide over expert=8"),
        (lambda: placed(FEW, Layout(fsdp=2, data=2)).begin(6, 8), "6 rows .* dataxfsdp = 4 devices: fill them up to 8"),
        (
            lambda: placed(FEW, Layout(data=2)).logits(jax.numpy.zeros((3, 16))),
            "3 rows do not divide over data = 2 devices: fill them up to 4",
        ),
    ],
)
def test_what_cannot_be_spread_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_several_devices_of_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="decoding on 8 devices runs in one process, but there are 2"):
        placed(FEW, Layout(data=8))
