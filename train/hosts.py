"""The processes of a run: how they find each other, agree, and stop together. One process alone does none of it.

A host is one process with its own devices; a pod slice has one for each machine. Host 0 prints and writes the small
files. What hosts tell each other outside a step goes through the coordinator that `jax.distributed` starts on host 0,
never through a device, so that a host that fails before training still gets its message to all others.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import distributed  # the coordinator's client has no public name; Orbax takes it from here, too

VARIABLES = ("DSFLASH_COORDINATOR", "DSFLASH_HOSTS", "DSFLASH_HOST")  # address:port of host 0, number of hosts, own one
FIND = 300  # seconds to wait for all hosts to come up
MEET = 3600  # ... to prepare: they may read a corpus at different speeds; a dead one is noticed long before
SILENT = 100  # ... until a host that says nothing counts as dead, and the job ends
LEAVE = 30  # ... from the first host that leaves without the others to the end of the job
_topics = itertools.count()  # every host meets at the same places in the same order


def start() -> None:
    """Find the other hosts, if there are any; must run before anything touches a device.

    By hand the three VARIABLES say where they are; Slurm, Open MPI and TPU slices say it themselves. Without any of
    these the process is alone, and nothing is started. Raises ValueError if the variables are incomplete or wrong, or
    the other hosts cannot be found.
    """
    if jax.distributed.is_initialized():
        return
    given = by_hand(os.environ)
    if given is None and not launched(os.environ) and not in_slice(os.environ, jax.config.values["jax_platforms"]):
        return
    if given and given[1] == 1:
        return
    jax.config.update("jax_enable_preemption_service", False)  # the run handles SIGTERM itself
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # gloo hung where programs of two steps overlapped
    limits: dict[str, Any] = {
        "initialization_timeout": FIND, "heartbeat_timeout_seconds": SILENT, "shutdown_timeout_seconds": LEAVE,
    }  # fmt: skip
    who = f"host {given[2]} of {given[1]}, host 0 at {given[0]}" if given else "the hosts of this job"
    print(f"{who}: waiting at most {FIND} s for all", file=sys.stderr)  # JAX aborts when the time is over
    try:
        if given:
            jax.distributed.initialize(*given, cluster_detection_method="deactivate", **limits)
            _check_number(*given[1:])
        else:
            jax.distributed.initialize(**limits)
    except (ValueError, RuntimeError, OSError) as error:
        if given is None and not launched(os.environ):
            return  # a TPU machine that knows no slice; `check` refuses what turns out to be one
        raise ValueError(f"the hosts of this run did not find each other: {_first_line(error)}. {HELP}") from error


def _check_number(count: int, host: int) -> None:
    """Refuse a number of hosts that host 0 was not told, before devices are looked for on hosts that do not exist."""
    client: Any = distributed.global_state.client
    if host == 0:
        client.key_value_set("dsflash/hosts", str(count))
    elif (told := client.blocking_key_value_get("dsflash/hosts", FIND * 1000)) != str(count):
        raise ValueError(f"{VARIABLES[1]} is {count} on host {host}, but {told} on host 0")


HELP = (
    "Every host must be started within "
    f"{FIND} s, reach host 0 at its address and port, and be told the same number of hosts and its own, from 0"
)


def by_hand(variables: Any) -> tuple[str, int, int] | None:
    """Address of host 0, number of hosts and number of this one; None if none of VARIABLES is set.

    Raises ValueError that names what is missing or wrong.
    """
    given = {name: variables[name] for name in VARIABLES if variables.get(name)}
    if not given:
        return None
    missing = [name for name in VARIABLES if name not in given]
    if missing:
        raise ValueError(f"{' and '.join(given)} set, but not {' and '.join(missing)}: set all three or none of them")
    address, *numbers = given.values()
    port = address.rpartition(":")[2]
    if not (":" in address and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{VARIABLES[0]}={address!r}: expected address:port of host 0, for example 10.0.0.2:8476")
    if not all(text.isdecimal() for text in numbers) or not 0 <= int(numbers[1]) < int(numbers[0]):
        text = " ".join(f"{name}={value}" for name, value in list(given.items())[1:])
        raise ValueError(f"{text}: expected a number of hosts from 1, and a host from 0 to one less")
    return address, int(numbers[0]), int(numbers[1])


def launched(variables: Any) -> bool:
    """Whether Slurm (srun) or Open MPI started more than one process; JAX reads the rest of their variables."""
    count = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("OMPI_COMM_WORLD_SIZE") or "1"
    return int(count) > 1


def in_slice(variables: Any, platforms: str | None) -> bool:
    """Whether this machine has TPU chips that may be part of a slice of several hosts.

    `platforms` are those that JAX may use. Where the machine does not name its hosts JAX asks its metadata server.
    """
    names = variables.get("TPU_PROCESS_ADDRESSES") or variables.get("TPU_WORKER_HOSTNAMES")
    on_tpu = "TPU_ML_PLATFORM" in variables and "tpu" in (
        platforms or ""
    )  # JAX sets both at import where it sees chips
    if not on_tpu or (names is None and variables.get("TPU_SKIP_MDS_QUERY")):
        return False
    return names is None or "," in names or int(variables.get("MEGASCALE_NUM_SLICES") or 1) > 1


def check() -> None:
    """Refuse hosts that did not find each other, or that have different numbers of devices."""
    if jax.process_count() == 1:
        return
    if not jax.distributed.is_initialized():
        raise ValueError(
            f"this slice has {jax.process_count()} hosts, but they found no coordinator: set "
            f"{', '.join(VARIABLES)}. {HELP}"
        )
    devices = Counter(d.process_index for d in jax.devices())
    if len(set(devices.values())) > 1:
        text = ", ".join(f"host {i} has {n}" for i, n in sorted(devices.items()))
        raise ValueError(f"all hosts must have equally many devices, but {text}: start them alike")


def first() -> bool:
    """Whether this is host 0, which prints and writes for all."""
    return jax.process_index() == 0


def exchange(text: str = "") -> list[str]:
    """The texts of all hosts in their order; every host must call it. Returns when all have."""
    if jax.process_count() == 1:
        return [text]
    client: Any = distributed.global_state.client
    topic = f"dsflash/{next(_topics)}"
    client.key_value_set(f"{topic}/{jax.process_index()}", f"={text}")  # a value must not be empty
    client.wait_at_barrier(topic, MEET * 1000)
    told = {int(key.rpartition("/")[2]): value[1:] for key, value in client.key_value_dir_get(topic)}
    return [told[i] for i in range(jax.process_count())]


@contextmanager
def together() -> Iterator[None]:
    """Make an error of one host one of all: raises ValueError with its message where there was none.

    The body must not wait for other hosts.
    """
    try:
        yield
    except Exception as error:
        exchange(_first_line(error))
        raise
    for host, fault in enumerate(exchange()):
        if fault:
            raise ValueError(f"host {host} cannot go on: {fault}")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def ready(function: Any, *arguments: Any) -> Any:
    """A jitted function, compiled on all hosts before any of them calls it.

    Compiling may take one of them minutes longer, and CPUs (gloo) wait only 30 s for each other's first message.
    """
    if jax.process_count() == 1:
        return function
    compiled = function.lower(*arguments).compile()
    exchange()
    return compiled


def stop_step() -> Callable[[int, str | None], str | None]:
    """A function of the step that was just started and the signal this host got, if any; called once a step by all.

    It returns the name of the signal at the step at which all hosts stop: its own at once when alone, and among many
    two steps after the first that got one. It must be called when the step before is known to be over: that needs every
    host to have started that one, after it had told its signal. No device takes part: on CPUs (gloo) a program with a
    collective must not overlap another one.
    """
    if jax.process_count() == 1:
        return lambda at, asked: asked
    client: Any = distributed.global_state.client
    topic = f"dsflash/{next(_topics)}"
    told: list[str] = []

    def agreed(at: int, asked: str | None) -> str | None:
        if asked and not told:
            told.append(f"{at + 2} {asked}")
            client.key_value_set(f"{topic}/{jax.process_index()}", told[0])
        stops = [(int(step), name) for step, name in (v.split() for _, v in client.key_value_dir_get(topic))]
        step, name = min(stops, default=(at + 1, ""))
        return name if at >= step else None

    return agreed
