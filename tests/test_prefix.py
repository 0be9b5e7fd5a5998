"""prefix.py: a stored prefix goes on in another process as it does in this one, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dsflash_jax import cache, params, prefix
from dsflash_jax.config import Compute, Config, Quantize
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Setup

C = dataclasses.replace(
    tiny.T, **tiny.ENGRAM, hidden_size=32, head_dim=32, index_head_dim=32, qk_rope_head_dim=8
).with_modes("Se F2 U F1p X", engram_num_embeddings=(60,))  # window 4
ON = Quantize(kv_fp4=True, index_fp4=True, window_fp8=True)
SETUP = Setup(C, tiny.STRICT, quantize=ON)
LENGTH, HIT = 14, 9  # the group of tokens 8 and 9 straddles the prefix's end


def make_decoder(seed=0):
    return Decoder(SETUP, tiny.weights(C, seed), chunk=8)


@pytest.fixture(scope="module")
def decoder():
    return make_decoder()


@pytest.fixture(scope="module")
def ids():
    return tiny.tokens(C, 1, LENGTH, seed=3)[0]


@pytest.fixture(scope="module")
def stored(decoder, ids, tmp_path_factory):
    path = tmp_path_factory.mktemp("prefix") / "hit.npz"
    held, _ = decoder.prefill(decoder.begin(2, LENGTH), [ids[:3], ids[:HIT]])
    prefix.save(path, decoder, held, 1, ids[:HIT])
    return path


class Shapes(Decoder):
    """A decoder of which no weight exists."""

    def __init__(self, setup):
        self.setup, self.classes, self.digest = setup, None, "none"


def go_on(decoder, path, ids, rows=1):
    held, start = prefix.load(path, decoder, [ids] * rows)
    assert start == HIT - C.sliding_window
    held, y = decoder.prefill(held, [ids[start:]] * rows)
    _, logits = decoder.step(held, np.full(rows, 7, np.int32), np.ones(rows, np.int32))
    return np.asarray(decoder.logits(y)), np.asarray(logits)


@pytest.mark.slow
def test_another_process_goes_on_as_this_one(decoder, ids, stored, tmp_path):
    code = (
        "import numpy as np, sys; sys.path.insert(0, sys.argv[3]); import test_prefix as t\n"
        "from pathlib import Path\n"
        "ids = t.tiny.tokens(t.C, 1, t.LENGTH, seed=3)[0]\n"
        "np.savez(sys.argv[2], *t.go_on(t.make_decoder(), Path(sys.argv[1]), ids))"
    )
    made = tmp_path / "made.npz"
    arguments = [sys.executable, "-c", code, str(stored), str(made), str(Path(__file__).parent)]
    subprocess.run(arguments, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    theirs = np.load(made)
    for got, want in zip(go_on(decoder, stored, ids), (theirs["arr_0"], theirs["arr_1"]), strict=True):
        np.testing.assert_array_equal(got, want)


def test_slots_are_kept_and_windows_begin_at_the_replay(decoder, ids, stored):
    held, start = prefix.load(stored, decoder, [ids])
    cold, _ = decoder.prefill(decoder.begin(1, LENGTH), [ids])
    assert (int(held.length[0]), int(held.origin[0])) == (start, start)
    held, _ = decoder.prefill(held, [ids[start:]])
    for kind in ("kv", "index"):
        for r, entry in getattr(held, kind).items():
            for a, b in zip(jax.tree.leaves(entry), jax.tree.leaves(getattr(cold, kind)[r]), strict=True):
                np.testing.assert_array_equal(a[:, :, : HIT // r], b[:, :, : HIT // r])
    assert held.stored[2].tolist() == [LENGTH // 2] and held.length.tolist() == [LENGTH]
    np.testing.assert_array_equal(held.history, cold.history)


def test_a_prefix_of_up_to_the_window_is_exact_and_serves_many_rows(decoder, ids, tmp_path):
    short, path = C.sliding_window, tmp_path / "short.npz"
    held, _ = decoder.prefill(decoder.begin(1, LENGTH), [ids[:short]])
    prefix.save(path, decoder, held, 0, ids[:short])
    held, start = prefix.load(path, decoder, [ids, ids])
    assert start == 0
    _, y = decoder.prefill(held, [ids, ids])
    _, want = decoder.prefill(decoder.begin(1, LENGTH), [ids])
    np.testing.assert_allclose(y, jnp.concatenate([want, want]), atol=1e-4)


@pytest.mark.parametrize("ratio", [*(pytest.param(r, marks=pytest.mark.slow) for r in (1, 2, 4)), 3])
def test_a_prefix_that_ends_inside_a_slot_goes_on_as_without_it(ratio, tmp_path):
    """Of one layer, which reads no further back than its window, a prefix of any length is exact."""
    c = tiny.with_modes(f"F{ratio}")
    decoder = Decoder(Setup(c, tiny.STRICT), tiny.weights(c, ratio), chunk=4)
    ids, path = tiny.tokens(c, 1, 17, seed=ratio)[0], tmp_path / "begin.npz"

    def behind(held, start):
        held, y = decoder.prefill(held, [ids[start:-3]])
        out = [np.asarray(decoder.logits(y))]
        for token in ids[-3:]:
            held, logits = decoder.step(held, token[None], np.ones(1, np.int32))
            out.append(np.asarray(logits))
        return held, np.concatenate(out)

    cold, want = behind(decoder.begin(1, 17), 0)
    for length in (3, 5, 7, 9, 10):
        held, _ = decoder.prefill(decoder.begin(1, 17), [ids[:length]])
        prefix.save(path, decoder, held, 0, ids[:length])
        held, start = prefix.load(path, decoder, [ids])
        assert start == max(length - c.sliding_window, 0)
        held, got = behind(held, start)
        np.testing.assert_allclose(got, want, atol=1e-5)  # pieces are cut elsewhere: float32 sums in another order
        for kind in ("kv", "index"):
            a, b = (getattr(x, kind)[ratio][:, :, : 17 // ratio] for x in (held, cold))
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_the_file_is_890_bytes_a_token_and_a_small_header(golden: Path, tmp_path):
    c = Config.from_json(golden / "config.released.json")
    rounding = Quantize(kv_fp4=True, index_fp4=True, window_fp8=True, linear_fp8=True)
    setup = Setup(c, Compute(), quantize=rounding)
    made, sizes = Shapes(setup), []
    for tokens in (1024, 4096):
        held = cache.empty(setup, 1, tokens)
        held = dataclasses.replace(held, length=jnp.asarray([tokens], jnp.int32))
        sizes.append(prefix.save(tmp_path / f"{tokens}.npz", made, held, 0, np.arange(tokens)))
        assert 0 < sizes[-1] - 890 * tokens < 8192
    assert sizes[1] - sizes[0] == 890 * 3072


def test_every_damaged_byte_range_and_foreign_file_is_refused(decoder, ids, stored, tmp_path):
    whole = stored.read_bytes()
    path = tmp_path / "bad.npz"
    for at in range(0, len(whole), max(len(whole) // 40, 1)):
        path.write_bytes(whole[:at])
        with pytest.raises(ValueError, match=r"bad\.npz"):
            prefix.load(path, decoder, [ids])
    held = dict(np.load(stored))
    name = next(n for n in held if n.startswith("kv.1"))
    inside = whole.index(held[name].tobytes()) + 5
    path.write_bytes(whole[:inside] + bytes([whole[inside] ^ 1]) + whole[inside + 1 :])
    with pytest.raises(ValueError, match="expected arrays as numpy.savez writes them, got a damaged file"):
        prefix.load(path, decoder, [ids])
    np.savez(path, **(held | {name: held[name][:, :-1]}))
    with pytest.raises(ValueError, match=rf"{name}: expected uint8"):
        prefix.load(path, decoder, [ids])
    np.savez(path, weights=np.zeros(3))
    with pytest.raises(ValueError, match="not a stored prefix"):
        prefix.load(path, decoder, [ids])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": tiny.weights(C, 1)}, "made with another weights"),
        ({"setup": Setup(dataclasses.replace(C, index_topk=3), tiny.STRICT, quantize=ON)}, "another configuration"),
        ({"setup": Setup(C, tiny.STRICT)}, "made with another rounding"),
        ({"packed": False}, "made with another storage"),
        ({"classes": np.arange(40)[::-1]}, "made with another classes"),
    ],
)
def test_a_prefix_of_another_model_is_refused(decoder, ids, stored, change, message):
    other = Decoder(**({"setup": SETUP, "w": decoder.w} | change))
    with pytest.raises(ValueError, match=message):
        prefix.load(stored, other, [ids])


def test_other_tokens_and_rows_are_refused(decoder, ids, stored, tmp_path):
    with pytest.raises(ValueError, match="does not begin with the 9 tokens of this prefix"):
        prefix.load(stored, decoder, [ids, np.roll(ids, 1)])
    with pytest.raises(ValueError, match="does not begin with the 9 tokens of this prefix"):
        prefix.load(stored, decoder, [ids[: HIT - 1]])
    held = decoder.begin(1, 8)
    with pytest.raises(ValueError, match="row 0 holds 0 tokens"):
        prefix.save(tmp_path / "none.npz", decoder, held, 0, ids)
    with pytest.raises(ValueError, match=r"prompt ids must lie in 0\.\.39"):  # and do not wrap around at 2^32
        one = dataclasses.replace(held, length=held.length + 1)
        prefix.save(tmp_path / "none.npz", decoder, one, 0, ids[:1].astype(np.int64) + 2**32)
    with pytest.raises(ValueError, match=r"the cache has rows 0\.\.0, not 1"):
        prefix.save(tmp_path / "none.npz", decoder, held, 1, ids)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_is_not_replaced_and_a_link_stays(decoder, ids, tmp_path):
    pipe, link, file = (tmp_path / name for name in ("pipe", "link", "file"))
    held, _ = decoder.prefill(decoder.begin(1, 8), [ids[:1]])
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="pipe is no file and cannot be replaced"):
        prefix.save(pipe, decoder, held, 0, ids[:1])
    assert pipe.is_fifo()
    link.symlink_to(file)
    assert prefix.save(link, decoder, held, 0, ids[:1]) == file.stat().st_size
    assert link.is_symlink()


def test_a_hash_of_weights_sees_every_bit_and_place():
    w = {"a": jnp.asarray([[1.0, 2.0], [3.0, 4.0]]), "b": jnp.zeros((3,), jnp.bfloat16)}
    known = {params.digest(w)}
    for other in (w["a"].T, w["a"].at[1, 1].set(np.nextafter(np.float32(4), np.float32(5))), w["a"].reshape(4)):
        known.add(params.digest(w | {"a": other}))
    known.add(params.digest(w | {"b": w["b"].at[2].set(-0.0)}))
    assert len(known) == 5
