"""overrides.py: where a configuration is found, and how key=value changes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from dsflash_jax.config import Compute, Config, VisionConfig
from dsflash_jax.overrides import find, names, override, parse_value


@dataclass(frozen=True)
class Run:
    """A run as configs/ files define one: records inside a record."""

    model: Config
    compute: Compute = Compute()
    steps: int = 100
    peak_rate: float = 1e-3
    resume: bool = True
    text: str | None = None
    betas: tuple[float, float] = (0.9, 0.95)


@pytest.fixture
def run(golden: Path) -> Run:
    return Run(Config.from_json(golden / "tiny_text" / "config.json"))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("12", int, 12),
        ("-3", int, -3),
        ("1e-3", float, 1e-3),
        ("2", float, 2.0),
        ("true", bool, True),
        ("False", bool, False),
        ("plain text", str, "plain text"),
        ("'quoted'", str, "quoted"),
        ("None", float | None, None),
        ("null", str | None, None),
        ("0.5", float | None, 0.5),
        ("7", int | str, 7),
        ("seven", int | str, "seven"),
        ("0,0,2,2", tuple[int, ...], (0, 0, 2, 2)),
        ("[0, 0, 2]", tuple[int, ...], (0, 0, 2)),
        ("(1,)", tuple[int, ...], (1,)),
        ("5", tuple[int, ...], (5,)),
        ("[]", tuple[int, ...], ()),
        ("0.9,0.99", tuple[float, float], (0.9, 0.99)),
        ("full", Literal["none", "full"], "full"),
        ("2", Literal[1, 2], 2),
        ("runs/a", Path, Path("runs/a")),
    ],
)
def test_text_is_read_by_type(text: str, kind: Any, value: Any) -> None:
    read = parse_value(text, kind, "key")
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("1.5", int, "'key': expected int, got '1.5'"),
        ("1e6", int, "expected int, got '1e6'"),
        ("fast", float, "expected float, got 'fast'"),
        ("1", bool, "expected bool, got '1'"),
        ("None", int, "expected int, got 'None'"),
        ("x", float | None, r"expected float \| None, got 'x'"),
        ("0,a", tuple[int, ...], r"expected tuple\[int, ...\], got '0,a'"),
        ("1,2,3", tuple[int, int], r"expected tuple\[int, int\], got '1,2,3'"),
        ("ful", Literal["none", "full"], r"expected one of \['none', 'full'\], got 'ful'; did you mean 'full'"),
    ],
)
def test_wrong_type_names_key_type_and_value(text: str, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_value(text, kind, "key")


def test_dotted_keys_reach_every_level(run: Run) -> None:
    changed = override(
        run, ["steps=7", "compute.remat=full", "model.rope_scaling.factor=4", "model.index_topk=3", "betas=0.8,0.9"]
    )
    assert (changed.steps, changed.compute.remat, changed.betas) == (7, "full", (0.8, 0.9))
    assert (changed.model.rope_scaling.factor, changed.model.index_topk) == (4, 3)
    assert override(run, []) == run


def test_a_later_value_wins(run: Run) -> None:
    assert override(run, ["steps=7", "steps=9"]).steps == 9


@pytest.mark.parametrize("order", [1, -1])
def test_keys_that_belong_together_are_checked_once(run: Run, order: int) -> None:
    keys = ["model.num_hidden_layers=3", "model.compress_ratios=0,0,2", "model.kv_source_layer_ids=2",
            "model.index_source_layer_ids=2", "model.candidate_source_layer_id=-1"]  # fmt: skip
    assert override(run, keys[::order]).model.modes == "S S F2"


def test_modes_are_an_override_of_a_config(run: Run) -> None:
    assert override(run, ["model.modes=S F2 2U F1 X U"]).model.modes == "S F2 U U F1 X U"
    assert override(run.model, ["modes='S F1'", "index_topk=2"]).index_topk == 2
    tables = ["model.modes=Se F1", "model.engram_num_embeddings=11", "model.engram_max_ngram_size=2",
              "model.engram_n_heads=1", "model.engram_head_dim=8", "model.engram_vocab_size=9",
              "model.engram_compressed_vocab_size=96"]  # fmt: skip
    assert override(run, tables).model.engram_layer_ids == (0,)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("step=1", "override 'step': unknown key 'step'; did you mean 'steps'"),
        ("compute.remt=full", "'compute.remt': unknown key 'remt'; did you mean 'remat'"),
        ("model.index_topkk=1", "unknown key 'index_topkk'; did you mean 'index_topk'"),
        ("model.mode=S", "unknown key 'mode'; did you mean 'modes'"),
        ("model.rope_scaling.fctor=2", "unknown key 'fctor'; did you mean 'factor'"),
        ("modes=S", "'modes': unknown key 'modes'; did you mean 'model'"),
        ("steps.more=1", "override steps.more: steps is 100 and has no keys of its own"),
        ("model.vision.patch_size=1", "model.vision is None and has no keys"),
        ("compute=full", "'compute': expected Compute, got 'full'"),
        ("steps", "'steps' is not of the form key=value"),
        ("model.modes=F1 Q", "cannot read 'Q'"),
        ("compute.query_chunk=0", "query_chunk must be at least 1"),
    ],
)
def test_wrong_overrides_are_refused(run: Run, assignment: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        override(run, [assignment])


@pytest.mark.parametrize("order", [1, -1])
def test_a_record_and_a_key_inside_it_are_refused(golden: Path, order: int) -> None:
    config = Config.from_json(golden / "config.released.json")
    assert config.vision == VisionConfig()
    with pytest.raises(ValueError, match="give one of the two"):
        override(config, ["vision=None", "vision.patch_size=16"][::order])
    assert override(config, ["vision=None"]).vision is None


def test_names_are_the_files_of_configs() -> None:
    folder = Path(__file__).parent.parent / "configs"
    assert names() == sorted(path.stem for path in folder.glob("*.py"))
    for name in names():
        assert find(name) == find(str(folder / f"{name}.py"))


def test_a_checkpoint_file_is_a_configuration(golden: Path) -> None:
    assert find(str(golden / "config.released.json")) == find("released")


def test_unknown_configuration_names_the_nearest() -> None:
    with pytest.raises(FileNotFoundError, match="no configuration 'relesed'.*did you mean 'released'"):
        find("relesed")


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("steps: 1\n")
    with pytest.raises(ValueError, match="a configuration is a .py file"):
        find(str(tmp_path / "run.yaml"))
    (tmp_path / "empty.py").write_text("steps = 1\n")
    with pytest.raises(ValueError, match="expected a module-level `config` .*got None"):
        find(str(tmp_path / "empty.py"))
