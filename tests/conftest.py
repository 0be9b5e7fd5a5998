"""Eight CPU devices, strict rank promotion, a compilation cache, and the folder of reference arrays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# Read when the first backend starts, so before anything imports jax; flags that the caller set stay.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every run and machine, and no verdict that depends on the clock.
hypothesis.settings.register_profile(
    "suite", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled programs between runs. XLA's key covers program, flags, versions and the CPU's features."""
    folder = config.rootpath / ".pytest_cache" / f"jax-{jax.__version__}"
    jax.config.update("jax_compilation_cache_dir", str(folder))


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """`jax.jit` spends little time on optimising in a module that uses this: its programs run for milliseconds."""
    from tiny import QUICK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", partial(jax.jit, compiler_options=QUICK))
        yield


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the arrays made by the published reference, one set a sub-folder."""
    return Path(__file__).parent / "golden"
