"""hosts.py: where the hosts of a run are found, one process alone, and addresses that are no folders."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest
from tiny_run import tiny, write_corpus

from train import hosts, main, saver
from train.saver import Saver


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("hosts") / "corpus")


def test_one_process_starts_nothing() -> None:
    hosts.start()
    hosts.check()
    assert not jax.distributed.is_initialized()
    assert hosts.first() and hosts.exchange("alone") == ["alone"]


GIVEN = {"DSFLASH_COORDINATOR": "10.0.0.2:8476", "DSFLASH_HOSTS": "2", "DSFLASH_HOST": "1"}


def test_the_three_variables_say_where_the_hosts_are() -> None:
    assert hosts.by_hand(GIVEN) == ("10.0.0.2:8476", 2, 1)
    assert hosts.by_hand({"HOME": "/"}) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DSFLASH_HOST": ""}, "DSFLASH_COORDINATOR and DSFLASH_HOSTS set, but not DSFLASH_HOST: set all three"),
        ({"DSFLASH_COORDINATOR": "", "DSFLASH_HOSTS": ""}, "not DSFLASH_COORDINATOR and DSFLASH_HOSTS: set"),
        ({"DSFLASH_COORDINATOR": "10.0.0.2"}, "'10.0.0.2': expected address:port of host 0"),
        ({"DSFLASH_COORDINATOR": "a:99999"}, "'a:99999': expected address:port"),
        ({"DSFLASH_HOST": "2"}, "DSFLASH_HOSTS=2 DSFLASH_HOST=2: expected a number of hosts from 1, and a host from 0"),
        ({"DSFLASH_HOSTS": "two"}, "DSFLASH_HOSTS=two DSFLASH_HOST=1: expected"),
        ({"DSFLASH_HOST": "-1"}, "DSFLASH_HOST=-1: expected"),
    ],
)
def test_wrong_variables_are_refused_and_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hosts.by_hand(GIVEN | change)


@pytest.mark.parametrize(
    ("variables", "many"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, False),  # inside sbatch, before srun
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
    ],
)
def test_a_launcher_of_several_processes_is_noticed(variables: dict[str, str], many: bool) -> None:
    assert hosts.launched(variables) is many


TPU = {"TPU_ML_PLATFORM": "JAX"}


@pytest.mark.parametrize(
    ("variables", "platforms", "many"),
    [
        ({}, None, False),
        (TPU, "tpu,cpu", True),  # a machine of Compute Engine
        (TPU, "cpu", False),
        (TPU | {"TPU_SKIP_MDS_QUERY": "1"}, "tpu,cpu", False),
        (TPU | {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "a,b"}, "tpu,cpu", True),  # Kubernetes Engine
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost"}, "tpu,cpu", False),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, "tpu,cpu", True),
    ],
)
def test_a_slice_of_several_machines_is_noticed(variables: dict[str, str], platforms: str | None, many: bool) -> None:
    assert hosts.in_slice(variables, platforms) is many


@pytest.mark.parametrize(
    ("out", "checkpoints"),
    [("gs://bucket/run", "gs://bucket/run/checkpoints"), ("runs/a", f"{Path.cwd()}/runs/a/checkpoints")],
)
def test_a_bucket_keeps_its_address(out: str, checkpoints: str, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver, "_open", lambda *_, **__: None)
    monkeypatch.setattr(hosts, "first", lambda: False)
    assert str(Saver(tiny(corpus, Path("any"), f"out={out}")).folder) == checkpoints


def test_an_address_that_is_no_folder_is_refused(corpus: Path) -> None:
    with pytest.raises(
        ValueError, match="out='s3://bucket/run' cannot be the folder of a run: give a folder, which may be a mounted"
    ):
        main.run(tiny(corpus, Path("any"), "out=s3://bucket/run"))
