"""decode_step.py: what the released decode step is made of, against the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from dsflash_jax.config import Config
from train import decode_step

EXACT = ("head", "engram projections", "compressors", "attention projections", "routed experts", "shared experts",
         "routers", "window attention", "selected attention")  # fmt: skip


@pytest.fixture(scope="module")
def released(golden: Path) -> Config:
    return Config.from_json(golden / "config.released.json")


@pytest.mark.parametrize("context", [4096, 1048576])
def test_each_part_of_the_released_step_is_what_the_arithmetic_says(released, context):
    got = decode_step.products(decode_step.lower(released, context), released)
    want = decode_step.costs.flops(decode_step.costs.decode(released, context), "alike")
    assert got.pop("other") == 0
    assert got.keys() == want.keys()
    for part in EXACT:
        assert got[part] == want[part]
    mixing = 2 * 4 * 5120 * (40 * 2 * (2 + 4) + 1)  # element-wise in the program: two sublayers a layer, and the fold
    assert got["hyper-connections"] == want["hyper-connections"] - mixing
    for part in (part for part in got if part.startswith("index")):
        assert got[part] == pytest.approx(want[part], rel=0.01)
    assert sum(got.values()) == pytest.approx(sum(want.values()), rel=0.01)


@pytest.mark.parametrize("modes", ["2S", "S F2 U"])
def test_a_model_that_is_not_quantised_has_any_widths_and_sources(modes):
    c = tiny.with_modes(modes)
    got, want = decode_step.products(decode_step.lower(c, 256), c), decode_step.costs.decode(c, 256)
    want = decode_step.costs.flops(want, "alike")
    assert got["other"] == 0 and want.keys() <= got.keys()
    assert {part: got[part] for part in want if part in EXACT} == {p: n for p, n in want.items() if p in EXACT}


@pytest.mark.slow
def test_a_million_tokens_cost_at_most_1_65_times_4096_also_compiled(released, capsys):
    made = decode_step.main(released)
    printed = capsys.readouterr().out
    assert "routed experts" in printed and "prefill of 65,536 tokens, replay over full" in printed
    for step in made["steps"]:
        assert step["compiled"] == sum(step["program"].values())
        assert step["compiled"] == pytest.approx(sum(step["describe"].values()), rel=0.05)
    alike = {key: share for key, share in made["ratio"].items() if "FP8" not in key}
    assert len(alike) == 3 and all(1.6 < share <= 1.65 for share in alike.values())
    report = [share for key, share in made["ratio"].items() if key not in alike]
    assert len(report) == 2 and all(1.2 < share < 1.3 for share in report)  # "about a quarter more"
    assert made["prefill"]["ratio"] <= 0.55
