"""Pictures of numbers with their digits as captions, made as they are read: the source `digits` of a multimodal run.

The digits of a caption are independent and each as likely as any other, so no model does better than ln 10 = 2.303
nats a byte on captions unless it reads the pictures. Size, place, colours and noise of a picture are drawn from its
number, so every machine reads the same corpus, and nothing is stored or downloaded.
"""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
from jaxtyping import UInt8

from dsflash_jax import pixels

GUESS = log(10)  # nats a caption byte without looking
DOCUMENTS = 32768
TEXT_EVERY = 8  # one document of so many is text alone: numbers that count up
COUNTED = 4  # numbers of such a document
DIGITS = 2  # of a number, leading zeros kept
HEIGHT, WIDTH = 24, 32  # pixels of a picture
PIXELS = (2.0, 3.0)  # side of a glyph's cell, the smallest and the largest
LIGHTER = 96  # of 255, how much lighter than the ground each channel of a glyph is at least
NOISE = 16  # standard deviation added to every pixel and channel
SEGMENTS: dict[str, tuple[Any, ...]] = {  # a seven-segment display on 5 x 3 cells: what each segment lights
    "a": np.s_[0, :], "b": np.s_[:3, 2], "c": np.s_[2:, 2], "d": np.s_[4, :], "e": np.s_[2:, 0], "f": np.s_[:3, 0],
    "g": np.s_[2, :],
}  # fmt: skip
LIT = ("abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg")  # by digit


def captions() -> list[tuple[str, bool]]:
    """The text of every document in order, and whether a picture goes with it."""
    numbers = np.random.default_rng(0).integers(0, 10**DIGITS, DOCUMENTS)
    out = []
    for i, number in enumerate(numbers.tolist()):
        pictured = i % TEXT_EVERY != 0
        shown = (number + k for k in range(1 if pictured else COUNTED))
        out.append((" ".join(f"{n % 10**DIGITS:0{DIGITS}}" for n in shown), pictured))
    return out


def draw(text: str, seed: int) -> UInt8[np.ndarray, "height width 3"]:
    """The picture of some digits; what else there is to choose follows from the seed."""
    rng = np.random.default_rng(seed)
    line = np.concatenate([np.pad(glyph(int(digit)), ((0, 0), (0, 1))) for digit in text], axis=1)[:, :-1]  # 1 between
    scale = rng.uniform(*PIXELS)
    tall, wide = (round(n * scale) for n in line.shape)
    cover = pixels.resize(line[..., None], tall, wide) / 255.0  # [tall, wide, 1], how much is glyph
    ground = rng.uniform(0, 255 - LIGHTER, 3)
    ink = rng.uniform(ground + LIGHTER, 255)
    out = np.broadcast_to(ground, (HEIGHT, WIDTH, 3)).copy()
    top, left = rng.integers(0, HEIGHT - tall + 1), rng.integers(0, WIDTH - wide + 1)
    out[top : top + tall, left : left + wide] += cover * (ink - ground)
    return np.clip(np.rint(out + rng.normal(0, NOISE, out.shape)), 0, 255).astype(np.uint8)


def glyph(digit: int) -> UInt8[np.ndarray, "5 3"]:
    """255 in the cells that a digit lights, 0 elsewhere."""
    cells = np.zeros((5, 3), np.uint8)
    for segment in LIT[digit]:
        cells[SEGMENTS[segment]] = 255
    return cells
