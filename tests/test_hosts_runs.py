"""What a run of several processes shares: rows, checkpoints, signals and errors.

Hosts are processes of this machine that talk over gloo. Only the slow tests train; all of these compile one program.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_run import arguments, tiny, write_corpus

from dsflash_jax.flow import Batch
from dsflash_jax.sharding import Layout
from train import data, main, metrics, placement, step
from train.config import Run
from train.saver import Saver

SECONDS = 600  # a bound for hanging only
# What the library of CPU collectives prints of each rank; threads that print at once mix the pieces of their lines.
GLOO = re.compile(r"\[Gloo\] Rank |\bis connected to | peer ranks\.|Expected number of connected peer ranks is : |\d+")

# Two layers with an n-gram table of 59 rows, which eight devices fill up to 64 and two to 60.
OPTIONS = (
    "model.modes=Se S", "model.engram_num_embeddings=[59]", "model.engram_vocab_size=17", "model.engram_n_heads=1",
    "model.engram_max_ngram_size=4", "model.engram_head_dim=8", "model.engram_compressed_vocab_size=264",
    "model.n_routed_experts=8", "optim.warmup_steps=1", "data.batch_size=8", "steps=6", "eval_every=3", "save_every=2",
    "layout.whole=1",
)  # fmt: skip
EIGHT = ("layout.expert=4", "layout.fsdp=2")
PLACES = {
    "one": Layout(whole=1), "two": Layout(fsdp=2, whole=1), "eight": Layout(expert=4, fsdp=2, whole=1),
    "expert": Layout(expert=8, whole=1), "context": Layout(context=4, data=2, whole=1),
}  # fmt: skip

# Writes down what each host read, and sends host 1 a signal while step 2 runs, if it is asked to.
PROGRAM = """
import json, os, signal, sys
from pathlib import Path
import jax, numpy as np
from dsflash_jax import cli
from train import metrics, placement
out = Path(next(x[4:] for x in sys.argv if x.startswith("out=")))
put, write = placement.Placement.put, metrics.Log.write

def put_and_tell(self, batch):
    with (out.parent / f"read-{jax.process_index()}").open("a") as file:
        file.write(json.dumps([self.rows, np.asarray(batch.tokens).tolist()]) + "\\n")
    return put(self, batch)

def write_and_send(self, kind, at, values):
    write(self, kind, at, values)
    if (kind, at, jax.process_index()) == ("train", 1, 1) and os.environ.get("SEND"):
        signal.raise_signal(signal.SIGTERM)

placement.Placement.put, metrics.Log.write = put_and_tell, write_and_send
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("hosts") / "corpus")


def by_hand(host: int, port: int) -> dict[str, str]:
    return {"DSFLASH_COORDINATOR": f"127.0.0.1:{port}", "DSFLASH_HOSTS": "2", "DSFLASH_HOST": str(host)}


def by_slurm(host: int, port: int) -> dict[str, str]:
    alike = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "JAX_COORDINATOR_PORT": str(port)}
    counts = {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
    return alike | counts | {"SLURM_PROCID": str(host), "SLURM_LOCALID": str(host)}


def by_open_mpi(host: int, port: int) -> dict[str, str]:
    alike = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1:34911", "JAX_COORDINATOR_PORT": str(port)}
    return alike | {f"OMPI_COMM_WORLD_{k}": str(v) for k, v in (("SIZE", 2), ("RANK", host), ("LOCAL_RANK", host))}


def launch(
    corpus: Path,
    out: Path,
    *overrides: str,
    devices: tuple[int, int],
    different: tuple[str, ...] = (),
    start: Callable[[int, int], dict[str, str]] = by_hand,
    **variables: str,
) -> list[subprocess.CompletedProcess[str]]:
    """Two hosts of one run, with so many devices; host 1 gets more overrides and variables than host 0."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    out.parent.mkdir(exist_ok=True)
    started = []
    for host, count in enumerate(devices):
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}"}
        more = different if host else ()
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, "train", *arguments(corpus, out, *OPTIONS, *overrides, *more)],
                env=common | start(host, port) | flags | (variables if host else {}),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        told = [process.communicate(timeout=SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
    return [subprocess.CompletedProcess(p.args, p.returncode, *t) for p, t in zip(started, told, strict=True)]


def succeed(done: list[subprocess.CompletedProcess[str]]) -> str:
    """What host 0 printed, when both left with status 0 and host 1 printed nothing."""
    zero, one = done
    assert [zero.returncode, one.returncode] == [0, 0], zero.stderr + one.stderr
    assert GLOO.sub("", one.stdout).split() == []
    return zero.stdout


def refused(done: list[subprocess.CompletedProcess[str]]) -> list[str]:
    """The one line of each host about why it refused the run."""
    assert [d.returncode for d in done] == [2, 2], [d.stderr for d in done]
    return [next(x for x in d.stderr.splitlines() if x.startswith("dsflash: ")) for d in done]


@pytest.fixture(scope="module")
def pair(corpus: Path) -> Path:
    """The folder of a run on two hosts with four devices each; what they printed is beside it."""
    out = corpus.parent / "pair" / "run"
    out.parent.mkdir()
    printed = succeed(launch(corpus, out, *EIGHT, devices=(4, 4)))
    (out.parent / "printed").write_text(printed)
    return out


@pytest.fixture(scope="module")
def alone(corpus: Path) -> Path:
    """The same run in one process with eight devices."""
    out = corpus.parent / "alone"
    assert main.run(tiny(corpus, out, *OPTIONS, *EIGHT)) == 0
    return out


def losses(out: Path) -> dict[tuple[str, int], float]:
    """Training and held-out loss of every line, by kind and step."""
    return {(x["kind"], x["step"]): x["nll"] for x in metrics.read(out / "metrics.jsonl")}


@pytest.mark.slow
def test_two_hosts_have_the_losses_of_one(pair: Path, alone: Path) -> None:
    two, one = losses(pair), losses(alone)
    assert two.keys() == one.keys() and len(one) == 6 + 2
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-6)
    assert (pair.parent / "printed").read_text().count("step 6/6") == 1
    assert sorted(p.name for p in pair.iterdir()) == ["checkpoints", "config.json", "loss.png", "metrics.jsonl"]


@pytest.mark.slow
def test_hosts_read_disjoint_rows_whose_union_in_order_is_the_global_batch(pair: Path, corpus: Path) -> None:
    run = tiny(corpus, pair, *OPTIONS)
    told = [[json.loads(x) for x in (pair.parent / f"read-{i}").read_text().splitlines()] for i in range(2)]
    whole = [b["tokens"] for b in data.batches(run.data, "heldout", n_batches=1)]
    batches = data.batches(run.data)
    whole += [next(batches)["tokens"] for _ in range(run.steps)]
    batches.close()
    assert len(told[0]) == len(told[1]) == len(whole)
    for (rows_0, tokens_0), (rows_1, tokens_1), batch in zip(*told, whole, strict=True):
        assert rows_0 + rows_1 == list(range(8))
        np.testing.assert_array_equal(np.array(tokens_0 + tokens_1), batch)


def restored(run: Run, layout: Layout) -> step.TrainState:
    """The newest checkpoint of a run, read on a layout."""
    devices = jax.devices()[: layout.devices]
    there = replace(run, layout=layout)
    saver = Saver(there)
    found = saver.restore(placement.place(there, devices).like(there))
    saver.close()
    assert found is not None
    return found[0]


def assert_same_values(one: step.TrainState, two: step.TrainState) -> None:
    """Bit for bit, except for the rows with which a layout fills n-gram tables up."""
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        x, y = np.asarray(a), np.asarray(b)
        if x.shape != y.shape:
            x, y = x[:59], y[:59]
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


@pytest.mark.slow
def test_what_two_hosts_wrote_one_device_reads_and_goes_on_with_the_same_loss(
    pair: Path, alone: Path, corpus: Path
) -> None:
    out = pair.parent / "on_one"
    shutil.copytree(pair, out, ignore=shutil.ignore_patterns("6"))
    run = tiny(corpus, out, *OPTIONS)
    assert_same_values(restored(run, PLACES["one"]), restored(run, PLACES["eight"]))
    assert main.run(run, until=5) == 0
    assert losses(out)["train", 5] == pytest.approx(losses(alone)["train", 5], rel=1e-6)


@pytest.mark.slow
def test_two_hosts_go_on_from_the_checkpoint_before_a_torn_one(pair: Path, corpus: Path) -> None:
    out = pair.parent / "torn" / "run"
    shutil.copytree(pair, out)
    victim = max((out / "checkpoints" / "6" / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    victim.unlink()
    printed = succeed(launch(corpus, out, *EIGHT, devices=(4, 4)))
    assert "skipped the checkpoint of step 6: " in printed and "going on from step 4" in printed
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["4", "6", "damaged-6"]
    assert losses(out) == pytest.approx(losses(pair), rel=1e-6)


@pytest.mark.slow
def test_a_signal_to_one_host_makes_both_save_one_step_and_leave(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    printed = succeed(launch(corpus, out, *EIGHT, "save_every=100", devices=(4, 4), SEND="1"))
    assert "SIGTERM: saved step 4 in" in printed
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["4"]
    assert int(restored(tiny(corpus, out, *OPTIONS), PLACES["one"]).step) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "rows"), [("context", (range(8), range(8))), ("data", ((0, 1, 4, 5), (2, 3, 6, 7)))]
)
def test_hosts_read_what_their_devices_need_of_each_part(
    layout: str, rows: tuple[Any, Any], corpus: Path, tmp_path: Path
) -> None:
    plain = (
        "model.modes=S S",
        "model.engram_num_embeddings=[]",
        "model.engram_vocab_size=0",
        "steps=2",
        "accumulate=2",
    )
    succeed(launch(corpus, tmp_path / "run", *plain, f"layout.{layout}=2", devices=(1, 1)))
    batches = data.batches(tiny(corpus, tmp_path, *OPTIONS).data)
    first = next(batches)["tokens"]
    batches.close()
    for host, own in enumerate(rows):
        _, told, _ = map(json.loads, (tmp_path / f"read-{host}").read_text().splitlines())  # the first was held out
        assert told == [list(own), first[list(own)].tolist()]
    one = main.run(tiny(corpus, tmp_path / "one", *OPTIONS, *plain))
    assert one == 0 and losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


# Errors: one clear line on every host, and the job ends


@pytest.mark.parametrize("start", [by_hand, by_slurm, by_open_mpi])
def test_a_layout_that_does_not_fit_is_refused_on_all_hosts(start: Any, corpus: Path, tmp_path: Path) -> None:
    for line in refused(launch(corpus, tmp_path / "run", "layout.fsdp=4", devices=(1, 1), start=start)):
        assert "takes 4 devices, but there are 2: change an axis" in line
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_hosts_with_different_numbers_of_devices_are_refused(corpus: Path, tmp_path: Path) -> None:
    for line in refused(launch(corpus, tmp_path / "run", "layout.fsdp=3", devices=(1, 2))):
        assert "all hosts must have equally many devices, but host 0 has 1, host 1 has 2: start them alike" in line


def test_what_one_host_cannot_read_ends_all(corpus: Path, tmp_path: Path) -> None:
    missing = ("data.source=no/such/folder",)
    zero, one = refused(launch(corpus, tmp_path / "run", "layout.fsdp=2", devices=(1, 1), different=missing))
    assert one.startswith("dsflash: data.source='no/such/folder': expected")
    assert zero.startswith("dsflash: host 1 cannot go on: data.source='no/such/folder': expected")


def test_hosts_that_were_started_differently_are_refused(corpus: Path, tmp_path: Path) -> None:
    other = ("optim.peak=0.5",)
    for line in refused(launch(corpus, tmp_path / "run", "layout.fsdp=2", devices=(1, 1), different=other)):
        assert "host 1 was not started as host 0" in line and "optim.peak was 0.01, is 0.5" in line


@pytest.mark.slow  # host 0 is ended half a minute after host 1 has left
def test_another_number_of_hosts_is_refused_and_ends_the_job(corpus: Path, tmp_path: Path) -> None:
    zero, one = launch(corpus, tmp_path / "run", "layout.fsdp=2", devices=(1, 1), DSFLASH_HOSTS="3")
    assert "DSFLASH_HOSTS is 3 on host 1, but 2 on host 0" in one.stderr
    assert zero.returncode != 0 and one.returncode != 0


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_in_parts_lies_on_eight_devices_as_it_was_read(parts: int, corpus: Path) -> None:
    run = tiny(corpus, corpus.parent, *OPTIONS, *EIGHT, "data.batch_size=16", f"accumulate={parts}")
    at = placement.place(run)
    read = next(data.batches(run.data, "heldout", own=at.rows))
    put = at.put(Batch(**read))
    want = read["tokens"] if parts == 1 else read["tokens"].reshape(2, 8, -1)
    np.testing.assert_array_equal(put.tokens, want)
    assert put.tokens.addressable_shards[7].data.shape == (*want.shape[:-2], 2 // parts, 32)


# Checkpoints on other meshes, in one process


@pytest.fixture(scope="module")
def saved(corpus: Path) -> tuple[Run, step.TrainState]:
    """A state on eight devices, and the run that saved it."""
    run = tiny(corpus, corpus.parent / "saved", *OPTIONS, *EIGHT)
    at = placement.place(run)
    state = main.start(run, at)
    values = np.random.default_rng(0)

    def other(leaf: Any, where: Any) -> Any:  # not only zeros
        bits = values.integers(0, 2**31 - 1, leaf.shape, np.int32)
        return jax.device_put(bits.view(leaf.dtype) if leaf.dtype.itemsize == 4 else leaf, where)

    state = jax.tree.map(other, state, at.state).replace(step=state.step + 3)
    saver = Saver(run)
    saver.save(state, {"step": 3})
    saver.close()
    return run, state


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_of_eight_devices_is_the_same_on_any(place: str, saved: tuple[Run, step.TrainState]) -> None:
    run, state = saved
    got = restored(run, PLACES[place])
    assert_same_values(got, state)
    rows = {x.shape[0] for x in jax.tree.leaves(got) if x.shape and 59 <= x.shape[0] <= 64}
    assert rows == {{"one": 59, "two": 60, "context": 60}.get(place, 64)}


def test_a_wrong_shape_is_refused_on_another_layout_too(saved: tuple[Run, step.TrainState]) -> None:
    run, _ = saved
    there = replace(run, layout=PLACES["two"])
    saver = Saver(run)
    saver.save(jax.tree.map(lambda x: x, saved[1].replace(step=saved[1].step + 1, key=np.zeros(3, np.uint32))), {})
    saver.close()
    saver = Saver(there)
    with pytest.raises(ValueError, match=r"do not fit this run: key was 'uint32\[3\]', is 'uint32\[2\]'$"):
        saver.restore(placement.place(there, jax.devices()[:2]).like(there))
    saver._manager.delete(4)
    saver.close()
