"""Batches with pictures: layout of a document, what counts in the loss, the next batch after any restart, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_digits import tiny

from dsflash_jax import engram, pixels, vision
from train import corpus, data, digits, main, tokenizer
from train.config import Run
from train.data import Data

SPAN = 3 * (4 + 1) + 2  # 24 x 32 pixels, patches of 4, cells of 2 x 2 patches: three rows of four cells
PICTURED = 1 + SPAN + digits.DIGITS + 1  # tokens of a document


@pytest.fixture(scope="module", autouse=True)
def _few_documents() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "DOCUMENTS", 400)
        yield


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny(tmp_path)


def batches(run: Run, split: corpus.Split = "train", **how: Any) -> data.Batches:
    return data.batches(run.data, split, model=run.model, **how)


def pieces(batch: data.Arrays) -> list[tuple[int, slice]]:
    """Row and place of each document."""
    out = []
    for r, segments in enumerate(batch["segments"]):
        cuts = np.flatnonzero(np.diff(segments, prepend=0, append=0))
        out += [(r, slice(a, b)) for a, b in pairwise(cuts.tolist()) if segments[a]]
    return out


def located(batch: data.Arrays) -> np.ndarray:
    """Which tokens the model writes an image span over."""
    grid, start = (jnp.asarray(a) for a in (batch["images"].grid, batch["images"].start))
    kind, _, _ = vision.locate(grid, start, batch["tokens"].shape[1], 2)
    return np.asarray(kind) != pixels.TEXT


def assert_equal(a: data.Arrays, b: data.Arrays) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


# Pictures


def test_a_picture_follows_from_its_digits_and_seed() -> None:
    one, again, other, moved = (digits.draw(t, s) for t, s in (("40", 7), ("40", 7), ("41", 7), ("40", 8)))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any() and (one != moved).any()
    assert one.shape == (digits.HEIGHT, digits.WIDTH, 3) and one.dtype == np.uint8


def test_no_two_digits_look_alike() -> None:
    assert len({digits.glyph(d).tobytes() for d in range(10)}) == 10


def test_a_picture_is_lighter_where_its_digits_are_lit() -> None:
    ones, eights = (np.mean([digits.draw(text, seed).mean() for seed in range(50)]) for text in ("11", "88"))
    assert eights > ones + 5  # 13 lit cells of a glyph against 5, each 96 lighter on a few pixels of 768


def test_captions_without_pictures_count_up() -> None:
    texts = [text for text, pictured in digits.captions() if not pictured]
    assert len(texts) == digits.DOCUMENTS // digits.TEXT_EVERY
    for text in texts:
        numbers = [int(n) for n in text.split()]
        assert numbers == [(numbers[0] + k) % 100 for k in range(digits.COUNTED)]


# Documents


def test_a_document_is_bos_the_span_the_caption_and_eos(run: Run) -> None:
    batch = next(batches(run))
    image, start = batch["tokens"] == run.model.image_token_id, batch["images"].start
    seen = 0
    for r, at in pieces(batch):
        ids = batch["tokens"][r, at].tolist()
        assert (ids[0], ids[-1]) == (tokenizer.BOS, tokenizer.EOS)
        if image[r, at].any():
            seen += 1
            assert image[r, at].tolist() == [False] + [True] * SPAN + [False] * (digits.DIGITS + 1)
            assert at.start + 1 in start[r]
            assert tokenizer.decode(ids[1 + SPAN :]).isdigit()
    assert seen == (batch["images"].grid[..., 0] > 0).sum() > 0


def test_the_model_sees_spans_just_where_the_tokens_are_image_tokens(run: Run) -> None:
    batch = next(batches(run))
    np.testing.assert_array_equal(located(batch), batch["tokens"] == run.model.image_token_id)


def test_each_picture_shows_the_number_behind_it(run: Run) -> None:
    made = batches(run)
    batch = next(made)
    named = {d.name: d for d in made.packed.documents}
    for row, names in enumerate(made.contents(0)):
        shown = [named[name.split("@")[0]] for name in names]
        pictured = [d for d in shown if d.picture is not None]
        for slot, d in enumerate(pictured):
            assert d.picture is not None
            patches, grid = pixels.preprocess(d.picture.draw(), run.model)
            np.testing.assert_array_equal(batch["images"].patches[row, slot], patches)
            assert tuple(batch["images"].grid[row, slot]) == grid
            at = batch["images"].start[row, slot] + SPAN
            assert tokenizer.decode(batch["tokens"][row, at : at + digits.DIGITS]) == d.text.decode()


def test_only_caption_and_end_count_in_the_loss_of_a_picture(run: Run) -> None:
    batch = next(batches(run, "heldout"))
    documents = pieces(batch)
    assert documents
    for r, at in documents:  # the target of END is the first digit
        want = [0] * SPAN + [1] * (digits.DIGITS + 1) + [0]
        assert batch["loss_mask"][r, at].tolist() == want
    assert not (batch["targets"] == run.model.image_token_id).any()


def test_held_out_documents_all_have_pictures_and_are_never_trained_on(run: Run) -> None:
    held, trained = (batches(run, split).packed.documents for split in ("heldout", "train"))
    assert held and all(d.picture is not None for d in held)
    assert any(d.picture is None for d in trained)
    assert not {d.name for d in held} & {d.name for d in trained}
    assert len(held) + len(trained) == digits.DOCUMENTS


def test_a_position_in_the_data_gives_the_same_pictures_again(run: Run) -> None:
    straight, resumed = batches(run), batches(replace(run, data=replace(run.data, prefetch=0)))
    for _ in range(3):
        next(straight)
    resumed.set_state(straight.get_state())
    assert_equal(next(straight), next(resumed))


def test_the_image_id_of_a_large_vocabulary_keeps_its_value(run: Run) -> None:
    large = replace(run.model, vocab_size=129280, image_token_id=129264)
    small, wide = (next(data.batches(run.data, model=model)) for model in (run.model, large))
    np.testing.assert_array_equal(np.where(small["tokens"] == 259, 129264, small["tokens"]), wide["tokens"])
    np.testing.assert_array_equal(small["loss_mask"], wide["loss_mask"])


def test_hosts_share_the_rows_of_a_batch(run: Run) -> None:
    half = run.data.batch_size // 2
    parts = [next(batches(run, own=own)) for own in (range(half), range(half, 2 * half))]
    assert_equal(next(batches(run)), jax.tree.map(lambda *a: np.concatenate(a), *parts))


def test_n_grams_end_at_pictures(run: Run) -> None:
    rows = {"engram_layer_ids": (0,), "engram_max_ngram_size": 3, "engram_vocab_size": 11, "engram_n_heads": 2}
    c = replace(run.model, **rows, engram_num_embeddings=(60,), engram_head_dim=4, engram_compressed_vocab_size=264)
    batch, rows_of = next(batches(run)), main.row_reader(c)
    assert rows_of is not None
    tokens, positions = batch["tokens"], batch["positions"]
    want = engram.rows(tokens.astype(np.int64), positions, engram.layout(c), c.engram_pad_token_id, located(batch))
    np.testing.assert_array_equal(rows_of(tokens, positions), want)


# Refusals


def test_pictures_without_a_tower_and_a_tower_without_pictures_are_refused(run: Run, tmp_path: Path) -> None:
    blind = replace(run.model, vision=None)
    for model in (blind, None):
        with pytest.raises(ValueError, match="data.source='digits' has pictures, but the model has no image tower"):
            data.load(run.data, model=model)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="model.vision is set, but data.source=.* has no picture"):
        data.load(Data(str(tmp_path), holdout=0), model=run.model)


def test_a_picture_that_does_not_fit_a_row_is_refused(run: Run) -> None:
    fits = replace(run.data, seq_len=PICTURED)
    assert data.load(fits, model=run.model).room[0] == 1
    with pytest.raises(ValueError, match=f"data.seq_len={PICTURED - 1} is too short for 'picture .* take {PICTURED}"):
        data.load(replace(fits, seq_len=PICTURED - 1), model=run.model)


@pytest.mark.parametrize("image_id", [5, 258])
def test_an_image_id_that_is_a_byte_is_refused(tmp_path: Path, image_id: int) -> None:
    with pytest.raises(ValueError, match=f"model.image_token_id={image_id} must be .* set it to 259"):
        tiny(tmp_path, f"model.image_token_id={image_id}")
