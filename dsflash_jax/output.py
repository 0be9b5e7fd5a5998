"""The files that a command is asked for: results for programs, and one line for what cannot be written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Turn an error of the system in the body, a full disk or a missing permission, into ValueError about `what`."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{what} cannot be written: {error.strerror or error}; give another path") from error


def write_json(path: Path | None, result: Any) -> None:
    """Write the machine-readable result where --json asks for one. Raises ValueError if that fails.

    JSON has no numbers that are not finite: null stands for them.
    """
    if path is not None:
        with writing(f"--json {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(_finite(result), indent=2, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
