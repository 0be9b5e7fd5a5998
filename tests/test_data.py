"""Batches: every token once, no target across documents, and the same next batch after any restart."""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data import Data, batches, cut, load, pack

KEYS = ["loss_mask", "positions", "segments", "targets", "tokens"]


@pytest.fixture
def folder(tmp_path):
    """Forty documents of 1 to 40 bytes, so that at seq_len 16 some are cut and most share a row."""
    rng = np.random.default_rng(0)
    for i in range(40):
        text = "".join(rng.choice(list("abcdefgh"), size=rng.integers(1, 41)))
        (tmp_path / f"{i:02d}.txt").write_text(text)
    return tmp_path


def jsonl(tmp_path, *texts):
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts))
    return str(path)


def digest(batch):
    state = hashlib.blake2b(digest_size=8)
    for key in sorted(batch):
        state.update(key.encode() + batch[key].tobytes())
    return state.hexdigest()


def pieces(batch):
    """The token sequences of a batch, one a segment."""
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        for s in range(1, segments.max() + 1):
            yield tuple(tokens[segments == s].tolist())


def epoch(data):
    """All batches of one round; needs batch_size 1."""
    made = batches(data)
    return list(islice(made, len(made.packed.rows)))


# Packing


def test_documents_of_5_and_6_tokens_have_nine_targets(tmp_path):
    source = jsonl(tmp_path, "abc", "defg")
    batch = next(batches(Data(source, seq_len=12, batch_size=1, holdout=0, shuffle=False)))
    expected = {
        "tokens": [0, 100, 101, 102, 1, 0, 103, 104, 105, 106, 1, 2],
        "targets": [100, 101, 102, 1, 2, 103, 104, 105, 106, 1, 2, 2],
        "loss_mask": [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 0],
        "segments": [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 0],
        "positions": [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0],
    }
    assert {key: value[0].tolist() for key, value in batch.items()} == expected
    assert batch["loss_mask"].sum() == 4 + 5
    assert (batch["loss_mask"] * (batch["targets"] >= 3)).sum() == len("abcdefg")  # text bytes, for a loss per byte


def test_only_a_teacher_of_the_next_token_has_no_loss(folder):
    batch = next(batches(Data(str(folder), seq_len=16, batch_size=8)))

    def loss(shift):
        known = np.roll(batch["tokens"], -shift, axis=1)
        wrong = known != batch["targets"]  # a sure one-hot teacher pays for each wrong token alone
        return (batch["loss_mask"] * wrong).sum() / batch["loss_mask"].sum()

    assert loss(1) == 0
    assert loss(0) > 0.5 and loss(2) > 0.5  # 8 letters: chance agreement is near 1/8


def test_packed_documents_carry_the_targets_they_have_alone(tmp_path):
    texts = ("abc", "defg")
    packed = next(batches(Data(jsonl(tmp_path, *texts), seq_len=12, batch_size=1, holdout=0, shuffle=False)))
    for segment, text in enumerate(texts, 1):
        alone = next(batches(Data(jsonl(tmp_path, text), seq_len=12, batch_size=1, holdout=0)))
        for key in ("tokens", "targets", "loss_mask", "positions"):
            np.testing.assert_array_equal(
                packed[key][packed["segments"] == segment], alone[key][alone["segments"] == 1]
            )


@given(st.integers(2, 200), st.integers(2, 40))
def test_cut_makes_every_token_but_the_first_a_target_once(length, seq_len):
    parts = cut(length, seq_len)
    targets = [t for start, n in parts for t in range(start + 1, start + n)]
    assert targets == list(range(1, length))
    assert all(2 <= n <= seq_len for _, n in parts)
    assert len(parts) == 1 or length > seq_len


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_pack_places_every_item_once_within_the_capacity(sizes):
    rows = pack(sizes, 20)
    assert sorted(i for row in rows for i in row) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in row) for row in rows]
    assert max(loads) <= 20
    assert sum(load <= 10 for load in loads) <= 1  # two half-empty rows would have been one


def test_pack_leaves_the_least_room():
    assert pack([3, 5, 2, 6, 4], 10) == [[3, 4], [1, 0, 2]]  # 6 + 4, then 5 + 3 + 2


@pytest.mark.parametrize("align", [1, 4])
def test_no_token_is_lost_or_doubled_in_an_epoch(folder, align):
    data = Data(str(folder), seq_len=16, batch_size=1, holdout=0, align=align)
    made = batches(data)
    got = {}
    for step in range(len(made.packed.rows)):
        for name, piece in zip(made.contents(step)[0], pieces(next(made)), strict=True):
            assert name not in got
            got[name] = piece
    total = 0
    for path in folder.iterdir():
        text = [0, *(b + 3 for b in path.read_bytes()), 1]
        parts = {int(name.split("@")[1]): piece for name, piece in got.items() if name.startswith(path.name)}
        joined = [parts[0][0]] + [t for start in sorted(parts) for t in parts[start][1:]]
        assert joined == text
        total += len(text) - 1
    assert sum(b["loss_mask"].sum() for b in epoch(data)) == total


def test_aligned_documents_start_at_multiples_and_pads_between_them_are_inert(folder):
    align = 4
    for batch in epoch(Data(str(folder), seq_len=16, batch_size=1, align=align)):
        segments, positions = batch["segments"][0], batch["positions"][0]
        starts = [int(np.argmax(segments == s)) for s in range(1, segments.max() + 1)]
        assert all(start % align == 0 for start in starts)
        assert all(b - a - (segments == s).sum() < align for s, (a, b) in enumerate(pairwise(starts), 1))
        pad = segments == 0
        assert (batch["tokens"][0][pad] == 2).all() and (batch["targets"][0][pad] == 2).all()
        assert not batch["loss_mask"][0][pad].any() and not positions[pad].any()


def test_standard_library_batches_have_the_declared_form_and_little_padding():
    data = Data(seq_len=1024, batch_size=2)
    made = batches(data)
    batch = next(made)
    assert sorted(batch) == KEYS
    assert {key: (value.dtype, value.shape) for key, value in batch.items()} == {
        key: (np.dtype(np.float32 if key == "loss_mask" else np.int32), (2, 1024)) for key in KEYS
    }
    padding = made.packed.padding(data.seq_len)
    print(f"stdlib: {len(made.packed.documents)} documents, {len(made.packed.rows)} rows, padding {padding:.2e}")
    # A row is 1.4e-4 of 7,300: the best packing itself leaves up to one row, best fit a few.
    assert padding < 1e-3


# Order


def test_order_follows_the_seed_and_each_epoch_has_its_own(folder):
    data = Data(str(folder), seq_len=16, batch_size=1, seed=3)
    made = batches(data)
    n = len(made.packed.rows)
    log = [digest(b) for b in islice(made, 2 * n)]
    assert log == [digest(b) for b in islice(batches(data), 2 * n)]
    assert log[:n] != log[n:] and Counter(log[:n]) == Counter(log[n:])
    other = [digest(b) for b in epoch(replace(data, seed=4, prefetch=0))]
    assert other != log[:n] and Counter(other) == Counter(log[:n])


def test_without_shuffle_rows_keep_the_order_of_the_corpus(folder):
    made = batches(Data(str(folder), seq_len=16, batch_size=1, shuffle=False))
    n = len(made.packed.rows)
    firsts = [made.contents(step)[0][0] for step in range(n)]
    assert firsts == sorted(firsts, key=lambda s: (s.split("@")[0], int(s.split("@")[1])))
    log = [digest(b) for b in islice(made, 2 * n)]
    assert log[:n] == log[n:]


def test_held_out_batches_end_cover_their_text_once_and_ignore_the_seed(folder):
    data = Data(str(folder), seq_len=16, batch_size=5, holdout=3)
    made = batches(data, "heldout")
    log = list(made)
    heldout = {d.name for d in made.packed.documents}
    assert heldout and heldout.isdisjoint(d.name for d in load(data).documents)
    assert len(log) == len(made) == -(-len(made.packed.rows) // 5)
    text_bytes = sum((b["loss_mask"] * (b["targets"] >= 3)).sum() for b in log)
    assert text_bytes == sum((folder / name).stat().st_size for name in heldout)
    assert all(b["tokens"].shape == (5, 16) for b in log)
    empty = len(log) * 5 - len(made.packed.rows)
    assert empty > 0 and not log[-1]["segments"][5 - empty :].any()
    again = batches(replace(data, seed=9), "heldout", n_batches=1)
    assert [digest(b) for b in again] == [digest(b) for b in log[:1]]


def test_transform_adds_keys_to_each_batch(folder):
    made = batches(
        Data(str(folder), seq_len=16, batch_size=2), transform=lambda b: b | {"next": b["tokens"] + np.int32(1)}
    )
    batch = next(made)
    np.testing.assert_array_equal(batch["next"], batch["tokens"] + 1)


# Resume

RESUME = """
import json, sys
sys.path.insert(0, sys.argv[1])
from test_data import resumed
print(json.dumps(resumed(json.load(sys.stdin))))
"""


def resumed(job):
    """For each state, the log of the rest of the run, from an iterator made anew."""
    logs = []
    for state in job["states"]:
        made = batches(Data(**job["data"]))
        made.set_state(state)
        logs.append([[made.contents(step), digest(next(made))] for step in range(state["step"], job["steps"])])
    return logs


def test_new_process_goes_on_with_the_exact_next_batch(folder):
    data = Data(str(folder), seq_len=16, batch_size=10, align=2, seed=5)
    made = batches(data)
    steps = 12
    assert 50 < len(made.packed.rows) < 60  # batch 5 lies across the border of the epochs, 7 in the second
    states, log = {}, []
    for step in range(steps):
        states[step] = json.loads(json.dumps(made.get_state()))
        log.append([made.contents(step), digest(next(made))])
    assert len({entry[1] for entry in log}) == steps
    job = {"data": asdict(data), "states": [states[s] for s in (1, 3, 7)], "steps": steps}
    done = subprocess.run(
        [sys.executable, "-c", RESUME, str(Path(__file__).parent)],
        cwd=Path(__file__).parents[1],
        input=json.dumps(job),
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [log[1:], log[3:], log[7:]]


def test_state_is_small_and_counts_used_not_prefetched_batches(folder):
    made = batches(Data(str(folder), seq_len=16, batch_size=2, prefetch=4))
    for step in range(3):
        assert made.get_state()["step"] == step
        next(made)
    assert len(json.dumps(made.get_state())) < 300
    state, after = made.get_state(), digest(next(made))
    made.set_state(state)
    assert digest(next(made)) == after


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, r"data\.seed changed: the state has seed=0, this run 1"),
        ({"seq_len": 32}, r"data\.seq_len changed"),
        ({"batch_size": 4}, r"data\.batch_size changed"),
        ({"align": 2}, r"data\.align changed"),
        ({"holdout": 3}, r"data\.holdout changed"),
        ({"shuffle": False}, r"data\.shuffle changed"),
    ],
)
def test_state_of_other_settings_is_refused(folder, change, named):
    data = Data(str(folder), seq_len=16, batch_size=2)
    state = batches(data).get_state()
    with pytest.raises(ValueError, match=named):
        batches(replace(data, **change)).set_state(state)


def test_state_of_other_documents_or_another_form_is_refused(folder):
    data = Data(str(folder), seq_len=16, batch_size=2)
    state = batches(data).get_state()
    with pytest.raises(ValueError, match=r"data\.split changed"):
        batches(data, "heldout").set_state(state)
    with pytest.raises(ValueError, match=r"step -1 is outside"):
        batches(data).set_state(state | {"step": -1})
    with pytest.raises(ValueError, match=r"expected the fields \['align'.*got \['step'\]"):
        batches(data).set_state({"step": 3})
    for path in folder.iterdir():
        path.write_text("changed")
    with pytest.raises(ValueError, match=r"the documents \(or the Python version, for stdlib\) changed"):
        batches(data).set_state(state)


# Hosts


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_rows_of_all_hosts_in_order_are_the_global_batch(folder, hosts, split):
    data = Data(str(folder), seq_len=16, batch_size=4, holdout=3)
    whole = list(batches(data, split, n_batches=12))
    own = [range(4)[h * 4 // hosts : (h + 1) * 4 // hosts] for h in range(hosts)]
    parts = [list(batches(data, split, own=rows, n_batches=12)) for rows in own]
    assert {len(part) for part in parts} == {len(whole)}  # all stop at one step
    for batch, *own in zip(whole, *parts, strict=True):
        for key in KEYS:
            np.testing.assert_array_equal(np.concatenate([b[key] for b in own]), batch[key])


def test_state_moves_to_another_number_of_hosts(folder):
    data = Data(str(folder), seq_len=16, batch_size=4)
    one = batches(data)
    next(one)
    two = batches(data, own=(1, 3))
    two.set_state(one.get_state())
    np.testing.assert_array_equal(next(two)["tokens"], next(one)["tokens"][1::2])


def test_corpus_of_fewer_files_than_hosts_still_feeds_them(tmp_path):
    data = Data(jsonl(tmp_path, "abc"), seq_len=8, batch_size=4, holdout=0)
    for host in range(4):
        assert next(batches(data, own=[host]))["tokens"].tolist() == [[0, 100, 101, 102, 1, 2, 2, 2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"own": [3, 4]}, r"rows from 0 to data.batch_size - 1 = 3, got \[3, 4\]"),
        ({"own": []}, r"got \[\]"),
        ({"n_batches": 0}, "n_batches must be at least 1"),
    ],
)
def test_wrong_rows_and_limits_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(Data(batch_size=4), **arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_len": 1}, "data.seq_len must be at least 2, got 1"),
        ({"batch_size": 0}, "data.batch_size must be at least 1"),
        ({"align": 0}, "data.align must be at least 1"),
        ({"holdout": -1}, "data.holdout must be at least 0"),
        ({"holdout": 1}, "holds out every document"),
        ({"prefetch": -1}, "data.prefetch must be at least 0"),
        ({"seed": 2**32}, "data.seed must be from 0"),
        ({"seq_len": 10, "align": 4}, "data.align=4 does not divide data.seq_len=10"),
    ],
)
def test_impossible_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Data(**fields)
