"""notebooks/: every one runs from top to bottom at small settings, as committed, and defines nothing reusable."""

from __future__ import annotations

import ast
import os
import shlex
from pathlib import Path

import jax
import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from tiny_run import STEPS, arguments, write_corpus

from train import metrics

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT = 600  # seconds for one cell: catches a kernel that hangs, far above what a slow machine takes


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def output(notebook: nbformat.NotebookNode) -> str:
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") + "\n" for o in outputs)


# The client's own libraries leave sockets and loops to the garbage collector.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_quick_start_trains_resumes_plots_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, *overrides = arguments(write_corpus(tmp_path / "corpus"), tmp_path / "run", "sample_tokens=3")
    monkeypatch.setenv("DSFLASH_OVERRIDES", shlex.join(overrides))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook = read(ROOT / "notebooks" / "01_quickstart.ipynb")
    NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = output(notebook)
    assert f"as asked: saved step {STEPS // 2}" in shown
    assert f"going on from step {STEPS // 2}" in shown
    assert f"nats a byte after {STEPS} steps" in shown
    assert "import " in (tmp_path / "run" / "sample.txt").read_text()
    pictures = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 1
    assert [x["step"] for x in metrics.read(tmp_path / "run" / "metrics.jsonl", "train")] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_without_output_and_defines_nothing_reusable(path: Path) -> None:
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    trees = [ast.parse(TransformerManager().transform_cell(cell.source)) for cell in cells]  # magics become calls
    assert not [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
