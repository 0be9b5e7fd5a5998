"""sample.py: rows that go on from their prompts, against full forward passes; the text that they say."""

from __future__ import annotations

import copy
import dataclasses

import jax
import numpy as np
import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st

from dsflash_jax import decode, engram, model, pixels, prefix
from dsflash_jax.config import VisionConfig
from dsflash_jax.decode import Decoder
from dsflash_jax.flow import Batch, Setup
from dsflash_jax.sample import NotFinite, Request, Text, collect, generate
from dsflash_jax.speculate import Speculator, oracle

EOS, IMAGE = 39, 38
TOWER = VisionConfig(
    num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16, patch_size=2, downsample_ratio=1,
    max_image_tokens=16, min_pixels=4,
)  # fmt: skip
C = dataclasses.replace(
    tiny.with_modes("Se F2"), hc_mult=2, eos_token_id=EOS, image_token_id=IMAGE, vision=TOWER,
    max_position_embeddings=64, dspark_block_size=3,
)  # fmt: skip
SETUP = Setup(C, tiny.STRICT)
GRID, START = (1, 2), 1  # an image of two patches behind the first token: START IMAGE IMAGE NEWLINE END
pytestmark = pytest.mark.usefixtures("quick")
WIDTH = 32  # tokens of a row of the full forward pass
PROMPTS = ([5, 9, 3, 7], [6], [8, *[IMAGE] * 5, 4], [2, 30, 4, 4, 1, 12, 25, 3, 3])
LENGTHS = (6, 14, 8, 10)  # new tokens: rows end one after the other, and two caches of 8 and 16 tokens become full
ONE, TWO, SEES, LONG = range(4)


def picture():
    """The image of a row, with room for one patch more than it has."""
    width = pixels.CHANNELS * TOWER.patch_size**2
    drawn = np.random.default_rng(3).standard_normal((2, width)).astype(np.float32)
    return pixels.collate([[(START, drawn, GRID)]], C, 7, slots=1, patches=3)


def request(row, **changes):
    images = picture() if row == SEES else None
    return Request(
        **{"prompt": PROMPTS[row], "max_tokens": LENGTHS[row], "temperature": 0.0, "images": images} | changes
    )


MIXED = (
    request(ONE, temperature=1.0, seed=3),
    request(TWO, temperature=0.7, top_k=5, seed=4),
    request(SEES, temperature=2.0, min_p=0.1, seed=5),
    request(LONG, temperature=1.3, top_p=0.8, seed=6),
)


@pytest.fixture(scope="module")
def w():
    return tiny.weights(C)


@pytest.fixture(scope="module")
def decoder(w):
    """With caches so small that they grow."""
    made = Decoder(SETUP, w)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "LEAST", 8)
        with jax.numpy_dtype_promotion("strict"):
            yield made


@pytest.fixture(scope="module")
def greedy(decoder):
    return collect(generate(decoder, [request(row) for row in range(4)]))


@pytest.fixture(scope="module")
def full(w):
    """The plain way: a full forward pass for every token, over a row of fixed width."""

    @tiny.jit
    def logits(w, batch):
        return model.logits(w["head"], model.forward(SETUP, w, batch)[0])

    at = np.arange(WIDTH, dtype=np.int32)[None]

    def behind(ids, images):
        row = np.zeros((1, WIDTH), np.int32)
        row[0, : len(ids)] = ids
        table = engram.rows(row.astype(np.int64), at, engram.layout(C), C.engram_pad_token_id, row == IMAGE)
        images = pixels.collate([[]], C, WIDTH, 1, 3) if images is None else images
        batch = Batch(row, (at < len(ids)).astype(np.int32), at, engram_rows=table, images=images)
        return np.asarray(logits(w, batch))[0, len(ids) - 1]

    return behind


def test_greedy_rows_take_the_likeliest_token_of_each_full_forward(greedy, full):
    for row, made in enumerate(greedy):
        ids, logp = list(PROMPTS[row]), []
        for _ in range(LENGTHS[row]):
            row_logits = full(ids, request(row).images)
            ids.append(int(row_logits.argmax()))
            logp.append(float(jax.nn.log_softmax(row_logits)[ids[-1]]))
            if ids[-1] == EOS:
                break
        assert list(made.ids) == ids[len(PROMPTS[row]) :]
        np.testing.assert_allclose(made.log_probabilities, logp, atol=1e-4)  # float32 sums in another order
    assert len({made.ids for made in greedy}) == 4 and len(set(greedy[ONE].ids)) > 1


def test_a_row_says_the_same_alone_and_in_any_batch(decoder):
    together = collect(generate(decoder, MIXED))
    assert [len(made.ids) for made in together] == list(LENGTHS)
    turned = collect(generate(decoder, MIXED[::-1]))[::-1]
    for row, (made, other) in enumerate(zip(together, turned, strict=True)):
        assert made.ids == other.ids
        if row in (ONE, TWO):  # the others would be more programs to compile
            assert collect(generate(decoder, [MIXED[row]]))[0].ids == made.ids


def test_another_seed_says_something_else_and_the_same_one_the_same(decoder):
    draw = lambda seed: collect(generate(decoder, [request(TWO, temperature=5.0, seed=seed)]))[0].ids  # noqa: E731
    assert draw(1) == draw(1) != draw(2)


def test_a_row_ends_with_end_of_sequence_or_a_stop_id_which_are_its_last_id(decoder, greedy):
    last = greedy[TWO].ids[3]
    upto = greedy[TWO].ids[: greedy[TWO].ids.index(last) + 1]
    (made,) = collect(generate(decoder, [request(TWO, stop_ids=(last,))], text_of=lambda i: b"%d " % i))
    assert (made.ids, made.finish) == (upto, "stop")
    assert made.text == "".join(f"{i} " for i in upto[:-1])
    ends = copy.copy(decoder)  # its programs do not know which id ends a sequence
    ends.setup = dataclasses.replace(SETUP, config=dataclasses.replace(C, eos_token_id=last))
    (made,) = collect(generate(ends, [request(TWO)]))
    assert (made.ids, made.finish) == (upto, "eos")


def test_a_stop_string_across_tokens_ends_a_row_and_is_no_part_of_its_text(decoder, greedy):
    ids = greedy[TWO].ids
    text = "".join(f"<{i}é>" for i in ids)
    half = lambda i: f"<{i}é>".encode()  # noqa: E731
    end = len("".join(f"<{i}é>" for i in ids[:5])) + 1
    stop = text[end - 4 : end]  # the end of one token and the beginning of the next
    first = text.index(stop)
    assert ">" in stop and stop.endswith("<")
    events = list(generate(decoder, [request(TWO, stop=("never", stop))], text_of=half))
    (made,) = collect(events)
    assert (made.text, made.finish) == (text[:first], "stop")
    assert all(text[:first].startswith("".join(e.text for e in events[: n + 1])) for n in range(len(events)))
    assert made.ids == ids[: len(made.ids)] and len(made.ids) <= 6


def test_rounds_of_drafts_say_the_same_and_are_cut_where_a_row_ends(decoder, greedy):
    known = np.zeros((4, 64), np.int32)  # what follows each prompt; two of row ONE's drafts are wrong
    for row, made in enumerate(greedy):
        known[row, len(PROMPTS[row]) :][: len(made.ids)] = made.ids
    known[ONE, 6:8] += 1
    speculator = Speculator(decoder, most=3, proposer=oracle(known, C.vocab_size, 3))
    events = list(generate(decoder, [request(row) for row in range(4)], speculator=speculator))
    for made, want in zip(collect(events), greedy, strict=True):
        assert (made.ids, made.finish) == (want.ids, want.finish)
        np.testing.assert_allclose(made.log_probabilities, want.log_probabilities, atol=1e-4)
    news = [[len(e.ids) for e in events if e.row == row] for row in range(4)]
    assert news == [[1, 2, 1, 2], [1, 4, 4, 4, 1], [1, 4, 3], [1, 4, 4, 1]]


def test_with_room_from_the_start_the_cache_does_not_grow(decoder, greedy, monkeypatch):
    monkeypatch.setattr(decoder, "grow", None)
    assert collect(generate(decoder, [request(row) for row in range(4)], room=32)) == greedy
    with pytest.raises(TypeError):
        collect(generate(decoder, [request(row) for row in range(4)]))


@pytest.mark.parametrize("limit", [16, pytest.param(14, marks=pytest.mark.slow)])
def test_a_row_may_end_at_the_models_limit_with_and_without_drafts(decoder, w, limit):
    """A limit that is all of a cache's room, and one that is less."""
    asked = [request(row, max_tokens=limit - len(PROMPTS[row])) for row in (TWO, LONG)]
    want = collect(generate(decoder, asked))
    assert [len(made.ids) for made in want] == [limit - 1, limit - len(PROMPTS[LONG])]
    small = Decoder(dataclasses.replace(SETUP, config=dataclasses.replace(C, max_position_embeddings=limit)), w)
    known = np.zeros((2, 64), np.int32)
    for row, (one, made) in enumerate(zip(asked, want, strict=True)):
        known[row, :limit] = [*one.prompt, *made.ids]
    for speculator in (None, Speculator(small, most=3, proposer=oracle(known, C.vocab_size, 3))):
        for made, one in zip(collect(generate(small, asked, speculator=speculator)), want, strict=True):
            assert (made.ids, made.finish) == (one.ids, "length")


def naive(data: bytes, stops: list[str]) -> tuple[str, bool]:
    """The text up to the first character that completes a stop string, without the longest that it completes."""
    text = data.decode("utf-8", errors="replace")
    for end in range(1, len(text) + 1):
        if complete := [s for s in stops if text[:end].endswith(s)]:
            return text[: end - max(map(len, complete))], True
    return text, False


LETTERS = st.sampled_from(["a", "b", "é", "€", "😀", "\N{REPLACEMENT CHARACTER}"])
PIECES = st.lists(st.one_of(LETTERS.map(str.encode), st.binary(max_size=2)), max_size=8)


@given(PIECES, st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=3), st.integers(1, 8))
@example([b"baab"], ["baab", "aa"], 8)  # the one that begins later is complete first
@example([b"baab"], ["aa", "baa"], 8)  # both complete at once
def test_text_does_not_depend_on_where_its_bytes_are_cut(pieces, stops, size):
    data = b"".join(pieces)
    reader, text, ended = Text(tuple(stops)), "", False
    for start in range(0, max(len(data), 1), size):
        more, ended = reader.read(data[start : start + size], last=start + size >= len(data))
        text += more
        if ended:
            break
    assert (text, ended) == naive(data, stops)


def test_only_what_may_be_a_stop_string_or_a_character_is_held_back():
    reader = Text(("abc", "cd"))
    said = [reader.read(piece)[0] for piece in (b"xa", b"b", b"a", b"z\xc3", b"\xa9c", b"e")]
    assert said == ["x", "", "ab", "az", "é", "ce"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [40]}, r"must lie in 0\.\.39, got 40\.\.40"),
        ({"prompt": [-1, 3]}, r"must lie in 0\.\.39, got -1\.\.3"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        (
            {"max_tokens": 61},
            "4 prompt ids and max_tokens=61 .* exceed max_position_embeddings=64: ask for 60 or fewer",
        ),
        ({"prompt": [1] * 64, "max_tokens": 1}, "exceed max_position_embeddings=64: shorten the prompt"),
        ({"temperature": -1.0}, "temperature of row 0 is -1"),
        ({"stop_ids": (40,)}, r"stop ids must lie in 0\.\.39"),
        ({"stop": ("a",)}, "stop strings need the text of ids"),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"prompt": PROMPTS[SEES]}, "id 38 of row 0 at index 1 is outside the span of an image: image_token_id=38"),
        ({"images": picture()}, r"the span 1\.\.6 of an image of row 0 must lie in its 4 ids, whole"),
        ({"prompt": range(7), "images": picture()}, "id 1 of row 0 at index 1 is in the span of an image"),
        ({"images": pixels.Images(*(np.zeros((2, *[0] * n)) for n in (3, 2, 1)))}, "its own row, got those of 2 rows"),
    ],
)
def test_what_cannot_be_met_is_refused_before_anything_runs(decoder, changes, message):
    with pytest.raises(ValueError, match=message):
        generate(decoder, [request(ONE, **changes)])


def test_what_is_no_number_stays_in_its_row_and_ends_it_with_an_error(decoder, greedy):
    bad = picture()
    bad.patches[:] = np.nan
    given = [request(row, images=bad) if row == SEES else request(row) for row in range(4)]
    good = np.arange(4) != SEES
    runs = []
    for images in (bad, picture()):
        beside = jax.tree.map(lambda a: np.concatenate([np.zeros_like(a)] * SEES + [a, np.zeros_like(a)]), images)
        held, y = decoder.prefill(decoder.begin(4, 16), list(map(np.array, PROMPTS)), images=beside)
        held, logits = decoder.step(held, np.full(4, 7, np.int32), np.ones(4, np.int32))
        runs.append([np.asarray(y), np.asarray(logits)])
    for got, want in zip(*runs, strict=True):
        assert np.isnan(got[SEES]).all()
        np.testing.assert_array_equal(got[good], want[good])
    drafting = Speculator(decoder, most=3, proposer=oracle(np.zeros((4, 64), np.int32), C.vocab_size, 3))
    for speculator in (None, drafting):
        events = generate(decoder, given, speculator=speculator)
        assert [next(events).ids for _ in range(SEES)] == [greedy[row].ids[:1] for row in range(SEES)]
        with pytest.raises(NotFinite, match="row 2: the logits are not numbers"):
            next(events)


def test_an_image_is_read_whole_or_refused(decoder):
    prompt, images = np.array(PROMPTS[SEES]), picture()
    for ids, shown, message in (
        (prompt, None, "at index 1 is outside the span"),
        (prompt[:4], images, r"span 1\.\.6 of an image of row 0 must lie in its 4 ids, whole"),
        (prompt[4:], None, "at index 0 is outside the span"),
        (prompt, pixels.collate([[], []], C, 7, 1, 3), "images of 2 rows for 1 rows of ids"),
    ):
        for how in decode.PREFILLS:
            with pytest.raises(ValueError, match=message):
                decoder.prefill(decoder.begin(1, 8), [ids], how=how, images=shown)
    blind = copy.copy(decoder)
    blind.setup = dataclasses.replace(SETUP, config=dataclasses.replace(C, vision=None))
    with pytest.raises(ValueError, match="images need an image tower"):
        blind.prefill(blind.begin(1, 8), [prompt], images=images)


def test_images_stand_behind_a_stored_prefix_and_not_in_it(decoder, tmp_path):
    """An image's start counts from the prompt's first id, wherever the prefix lets the prompt begin."""
    begin, sees = [*PROMPTS[ONE], 1, 2], PROMPTS[SEES]
    ids, path = np.array([*begin, *sees]), tmp_path / "begin.npz"
    held, _ = decoder.prefill(decoder.begin(1, 8), [np.array(begin)])
    prefix.save(path, decoder, held, 0, np.array(begin))
    moved = picture().replace(start=picture().start + len(begin))
    (made,) = collect(generate(decoder, [request(SEES, prompt=ids, images=moved, max_tokens=1)], prefix=path))
    held, known = prefix.load(path, decoder, [ids])
    images = moved.replace(start=moved.start - known)
    assert known == len(begin) - C.sliding_window
    _, y = decoder.prefill(held, [ids[known:]], images=images)
    assert made.ids == (int(decoder.logits(y).argmax()),)
    held = dataclasses.replace(decoder.begin(1, 8), length=np.array([len(sees)], np.int32))
    with pytest.raises(ValueError, match="end a stored prefix before its first image"):
        prefix.save(path, decoder, held, 0, np.array(sees))


def test_a_batch_without_rows_and_an_unknown_prefill_are_refused(decoder):
    with pytest.raises(ValueError, match="at least one request"):
        generate(decoder, [])
    with pytest.raises(ValueError, match="got 'half'"):
        generate(decoder, [request(ONE)], prefill="half")
