"""bench_decode.py: every way decodes the same text, and the two ends of drafting are what they say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_run import tiny, write_corpus

from dsflash_jax import cli
from train import bench_decode


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return tiny(write_corpus(folder / "corpus"), folder / "run")


@pytest.mark.slow
def test_both_ends_of_drafting_are_measured(run, capsys):
    made = bench_decode.decode(run, tokens=12, rows=2, context=40)
    plain, wrong, right = made["lines"]
    assert plain["of_plain"] == 1 and all(line["tokens_a_second"] > 0 for line in made["lines"])
    assert right["tokens_a_round"] == 6 and set(right["acceptance"]) == {1.0}
    assert 1 <= wrong["tokens_a_round"] < 3
    printed = capsys.readouterr().out
    assert "drafts, all of them right" in printed and "2 rows, 12 tokens each behind 40" in printed


def test_a_model_keeps_its_own_draft_head_and_gets_one_otherwise(run):
    given = bench_decode.with_head(run.model)
    assert given.num_nextn_predict_layers == 1 and len(given.dspark_target_layer_ids) == 2
    assert bench_decode.with_head(given) is given
    assert [replace(s, tap=False) for s in given.table] == list(run.model.table)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokens", "0"], "--tokens and --rows must be at least 1, got 0 and 1"),
        (["--tokens", "5"], "--tokens 5 may be one round of 5 drafts, too short to time: ask for more"),
        (["--context", "4090"], "the drafts exceed max_position_embeddings=4096"),
    ],
)
def test_what_cannot_be_measured_is_refused(more, message, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["bench", "decode", "demo", *more])
    assert left.value.code == 2 and message in capsys.readouterr().err
