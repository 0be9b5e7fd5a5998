"""pyproject.toml and constraints/: what an installation holds, and that it is reproducible."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PINNED_EXTRAS = ("dev", "hf", "data", "tb", "wandb", "notebooks")


def test_wheel_holds_both_packages_and_finds_its_configurations(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*build, "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    tops = {path.name for path in (tmp_path / "site").iterdir()}
    assert tops == {"dsflash_jax", "train", "dsflash_jax-0.1.0.dist-info"}
    code = (
        "import train, dsflash_jax.overrides as o; print(train.__file__, o.__file__); print(o.find('released').modes)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site")},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert shown.count(str(tmp_path / "site")) == 2
    assert "S Se F2 U" in shown


@pytest.mark.parametrize("name", ["py311.txt", "py313.txt"])
def test_every_direct_dependency_is_pinned_exactly(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [
        requirement for extra in PINNED_EXTRAS for requirement in project["optional-dependencies"][extra]
    ]
    lines = [line for line in (ROOT / "constraints" / name).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.+]+", line) for line in lines)
    pinned = {line.split("==")[0] for line in lines}
    names = {re.split(r"[\[<>=; ]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names - {"dsflash-jax"} <= pinned
