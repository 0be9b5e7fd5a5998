"""Corpora are read in one order, split in one way, and refused in plain words."""

import json
import os
import sysconfig

import pytest

from train import corpus


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def names(documents):
    return [d.name for d in documents]


def test_standard_library_is_split_by_file_the_same_everywhere():
    read = corpus.load("stdlib")
    train, heldout = (corpus.part(read, split, 20) for split in ("train", "heldout"))
    assert {"argparse.py", "codecs.py"} <= set(names(heldout))  # fixed by the hash, on any machine and version
    assert {"ast.py", "json/decoder.py"} <= set(names(train))
    assert sorted(names(train) + names(heldout)) == names(read.documents)


def test_library_without_tests_packages_tables_and_local_files(tmp_path, monkeypatch):
    kept = ["ast.py", "json/decoder.py", "test.py", "contest/a.py"]
    left_out = [
        *("site-packages/x.py", "dist-packages/x.py", "test/x.py", "ctypes/test/x.py", "unittest/tests/x.py"),
        *("__pycache__/x.py", "encodings/cp037.py", "_sysconfigdata__linux_.py", "sitecustomize.py"),
        *("config-3.11-x86_64-linux-gnu/python-config.py", "LICENSE.txt", "idlelib/idle_test/x.py"),
    ]
    folder = write(tmp_path, dict.fromkeys(kept + left_out, "x = 1\n"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": folder})
    assert names(corpus.load("stdlib").documents) == sorted(kept)


def test_python_without_library_sources_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(
        ValueError, match=r"'stdlib': no text in .*python311.zip \(unreadable: No such file.*give a folder instead"
    ):
        corpus.load("stdlib")


def test_folder_is_read_recursively_in_path_order_and_bad_files_are_listed(tmp_path):
    folder = write(
        tmp_path,
        {"b.md": "two", "a/z.txt": "one", "c.py": "three", "d.csv": "no", ".git/e.py": "no", "__pycache__/f.py": "no"}
        | {"bad.txt": b"ab\xff", "empty.py": ""},
    )
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    read = corpus.load(folder)
    assert [(d.name, d.text) for d in read.documents] == [("a/z.txt", b"one"), ("b.md", b"two"), ("c.py", b"three")]
    assert read.skipped == (
        "bad.txt (not UTF-8 at byte 2)",
        "empty.py (empty)",
        "gone.txt (no regular file)",
    )


def test_jsonl_gives_a_document_a_line(tmp_path):
    folder = write(tmp_path, {"x.jsonl": '{"text": "on\\u00e9", "id": 7}\n\n{"text": ""}\r\n{"text": "two\\nlines"}'})
    read = corpus.load(f"{folder}/x.jsonl")
    assert [(d.name, d.text) for d in read.documents] == [("line 1", "on\u00e9".encode()), ("line 4", b"two\nlines")]


@pytest.mark.parametrize(
    ("line", "got"),
    [
        (b"{not json", "cannot be read"),
        (b'{"text": "\xff"}', "cannot be read"),
        (b'["text"]', "got a list"),
        (b'{"txt": "a"}', r"got a dict with fields \['txt'\]"),
        (b'{"text": 3}', r"got a dict with fields \['text'\]"),
        (b'{"text": "\\ud800"}', "UTF-8 form"),
    ],
)
def test_bad_line_raises_with_file_and_line_number(tmp_path, line, got):
    folder = write(tmp_path, {"x.jsonl": b'{"text": "fine"}\n' + line + b"\n"})
    with pytest.raises(ValueError, match=r"x\.jsonl:2: expected a JSON object with a string field 'text'.*" + got):
        corpus.load(f"{folder}/x.jsonl")


def test_missing_empty_and_other_sources_are_refused(tmp_path):
    folder = write(tmp_path, {"a.csv": "x", "none/empty.txt": "", "b.jsonl": "\n"})
    with pytest.raises(FileNotFoundError, match=r"'nowhere'.*'stdlib', 'digits', a folder or a \.jsonl file"):
        corpus.load("nowhere")
    with pytest.raises(ValueError, match=r"must be \.jsonl .* got '\.csv'"):
        corpus.load(f"{folder}/a.csv")
    with pytest.raises(ValueError, match=r"no text in .*none \(1 files skipped: empty.txt \(empty\)\); expected \.txt"):
        corpus.load(f"{folder}/none")
    with pytest.raises(ValueError, match="expected lines with a non-empty 'text'"):
        corpus.load(f"{folder}/b.jsonl")


def test_empty_split_names_a_setting_that_works(tmp_path):
    read = corpus.load(write(tmp_path, {f"{i}.txt": "x" for i in range(4)}))
    with pytest.raises(
        ValueError, match=r"holdout=0 leaves none of 4 documents for heldout; set data.holdout="
    ) as error:
        corpus.part(read, "heldout", 0)
    holdout = int(str(error.value).split("set data.holdout=")[1].split(",")[0])
    assert corpus.part(read, "heldout", holdout) and corpus.part(read, "train", holdout)
    assert corpus.part(read, "train", 0) == read.documents
    with pytest.raises(ValueError, match="split must be 'train' or 'heldout', got 'test'"):
        corpus.part(read, "test", 2)


def test_split_of_a_document_does_not_depend_on_the_others(tmp_path):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(60)]
    heldout = []
    for order in (lines, lines[::-1], [*lines[:30], "", *lines[30:]]):
        path = tmp_path / "x.jsonl"
        path.write_text("\n".join(order))
        heldout.append({d.text for d in corpus.part(corpus.load(str(path)), "heldout", 4)})
    assert heldout[0] == heldout[1] == heldout[2]
    assert 5 <= len(heldout[0]) <= 25  # 15 expected of 60; the bounds are 3 standard deviations


def test_digest_tells_names_texts_and_order_apart():
    a, b = corpus.Document("a", b"bc", 0), corpus.Document("ab", b"c", 0)
    digests = {corpus.digest(d) for d in ((a,), (b,), (a, b), (b, a))}
    assert len(digests) == 4


def test_a_pipe_is_skipped_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "text.txt").write_text("text")
    assert corpus.load(str(tmp_path)).skipped == ("pipe.txt (no regular file)",)


@pytest.mark.parametrize("source", ["~nobody-of-this-name/x", "x" * 5000])
def test_what_cannot_be_a_path_is_refused_in_one_line(source):
    with pytest.raises(ValueError, match="this cannot be a path"):
        corpus.load(source)
