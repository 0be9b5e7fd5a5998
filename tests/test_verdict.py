"""verdict.py: what cannot be compared is a miss, and a file that cannot be read is refused in one line."""

from __future__ import annotations

import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dsflash_jax.verdict import bits_line, numbers, read, selection_line, value_line

OTHER_KINDS = ["U1", "S1", "complex64", "datetime64[s]", "timedelta64[s]", "V2"]


@pytest.mark.parametrize("dtype", OTHER_KINDS)
@pytest.mark.parametrize("compare", [partial(value_line, tolerance=1.0), bits_line, selection_line])
def test_a_recorded_dtype_that_is_not_of_real_numbers_is_a_miss(compare, dtype):
    line = compare("t", "n", np.zeros((1, 2), np.int32), want=np.zeros((1, 2), dtype))
    assert not line.passed and "recorded as" in line.array


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_recorded_array_is_a_miss(shape):
    nothing = np.zeros(shape, np.int32)
    lines = [value_line("t", "n", nothing, nothing, 1.0), bits_line("t", "n", nothing, nothing)]
    for line in [*lines, selection_line("t", "n", nothing, nothing)]:
        assert not line.passed and line.array == "n, nothing to compare"


@pytest.mark.parametrize(
    "want", [np.asarray(3), np.zeros((2, 1), np.int32), np.zeros((1, 2)), np.zeros((0, 2), np.int32)]
)
def test_a_selection_of_another_form_is_a_miss(want):
    assert not selection_line("t", "n", np.zeros((1, 2), np.int32), want).passed


def test_a_computed_bfloat16_is_compared_with_recorded_float32():
    import ml_dtypes

    assert value_line("t", "n", np.ones(2, ml_dtypes.bfloat16), np.ones(2, np.float32), 0).passed


def test_texts_compare_to_the_bit():
    want = np.asarray(["a", "b"], object)
    assert bits_line("t", "n", want.copy(), want).passed
    assert not bits_line("t", "n", np.asarray(["a", "c"], object), want).passed


def folder(path: Path) -> None:
    path.mkdir()


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


def central(at: int, byte: int):
    """Set one byte of every entry of the zip file's directory."""

    def write(path: Path) -> None:
        np.savez(path, x=np.ones(3))
        data = bytearray(path.read_bytes())
        data[data.find(b"PK\x01\x02") + at] = byte
        path.write_bytes(data)

    return write


def huge(path: Path) -> None:
    """A header that asks for more memory than there is."""
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (1152921504606846976,), }".ljust(117) + "\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())


def foreign_member(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "text")


def lzma_garbage(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        file.writestr("x.npy", b"\x93NUMPY\x01\x00" + b"0" * 400)
    data = bytearray(path.read_bytes())
    data[60:90] = bytes(30)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "make",
    [folder, dangling, central(8, 1), central(10, 99), huge, foreign_member, lzma_garbage, lambda p: None,
     lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"PK\x03\x04")],
    ids=["folder", "dangling", "encrypted", "method", "huge", "member", "lzma", "missing", "empty", "cut"],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_refused_in_one_line_with_its_path(make, tmp_path):
    path = tmp_path / "x.npz"
    make(path)
    with pytest.raises(ValueError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", OTHER_KINDS)
def test_arrays_without_numbers_are_refused_by_name(dtype):
    with pytest.raises(ValueError, match="odd: expected real numbers"):
        numbers({"even": np.ones(1), "odd": np.zeros(1, dtype)})
