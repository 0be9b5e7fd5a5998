"""The primes that size the hash tables of the n-gram memory. Source: architecture section 10. No arrays here."""

from __future__ import annotations

import functools
from itertools import count, islice

Table = tuple[tuple[int, ...], ...]  # of one layer: rows of every hash head, n-gram sizes 2, 3, ... outside


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))


@functools.lru_cache(maxsize=64)
def tables(layers: int, longest: int, heads: int, start: int) -> tuple[Table, ...]:
    """Rows of every hash head of every layer; `longest` is the size of the longest n-gram.

    The published search starts again at `start` for every n-gram size and passes over what anyone has taken. What it
    finds are the next primes in order.
    """
    found = filter(_is_prime, count(start))
    return tuple(tuple(tuple(islice(found, heads)) for _ in range(longest - 1)) for _ in range(layers))


def rows(table: Table) -> int:
    """Rows of one layer's table: of all its hash heads together."""
    return sum(map(sum, table))
