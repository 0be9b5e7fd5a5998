"""main.py: what is refused before training, and needs no run to be refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from tiny_run import ENGRAM, arguments, child, tiny, write_corpus

from dsflash_jax import cli
from train import main


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("refusals") / "corpus")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.vocab_size=258", "has no room for the 259 ids of the byte tokenizer: raise it, for example to 264"),
        ("model.eos_token_id=2", "model.eos_token_id=2, but the byte tokenizer writes 1"),
        ("data.source=no/such/folder", "nothing is at"),
        ("data.seq_len=5000", "exceeds model.max_position_embeddings"),
    ],
)
def test_a_run_that_cannot_be_is_refused_before_training(
    change: str, message: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["train", *arguments(corpus, tmp_path / "run", change)])
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "released"],
        ["train", "released", "steps=2"],
        ["compile", "released", "--topology", "v5p:4x8x8", "--seq-len", "65536"],
        ["bench", "layouts", "released", "--layouts", "fsdp=2", "--steps", "3", "data.seq_len=8"],
    ],
)
def test_a_model_alone_is_no_run_whatever_is_changed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(words)
    assert leaving.value.code == 2
    assert "released describes a model only" in capsys.readouterr().err


def test_a_missing_accelerator_is_one_plain_line(corpus: Path, tmp_path: Path) -> None:
    shown = child(["-m", "train.main"], *arguments(corpus, tmp_path / "run"), JAX_PLATFORMS="tpu")
    assert shown.returncode == 2
    *noise, line = shown.stderr.splitlines()
    assert not noise or find_spec("libtpu")  # which says more before it gives up
    assert line.startswith("dsflash: JAX found no device with JAX_PLATFORMS='tpu': ")
    assert "Unset it" in line


def test_ngram_memory_without_room_for_all_bytes_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="engram_compressed_vocab_size=258: .* of which there are 259"):
        tiny(corpus, tmp_path, *ENGRAM, "model.engram_compressed_vocab_size=258")


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "loss.png", "sample.txt"])
def test_a_folder_where_a_file_will_be_is_refused_before_training(name: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"cannot be the folder of a run: its {name} is a folder"):
        main.run(tiny(corpus, tmp_path / "run"))


def test_a_file_where_checkpoints_will_be_is_refused_before_training(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ValueError, match="cannot be the folder of a run: its checkpoints is a file"):
        main.run(tiny(corpus, tmp_path))


def test_a_start_from_a_run_without_a_checkpoint_is_refused(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="other' has no checkpoint yet: train that run first"):
        main.run(tiny(corpus, tmp_path / "run", f"start_from={tmp_path / 'other'}"))
