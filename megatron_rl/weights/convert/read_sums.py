"""The CRC-32 of numbers that are read piece by piece, in whatever order; where they lie is not known here.

A record's sum can be compared once every byte of it was read, each once: pieces that touch are joined by arithmetic on
their sums alone. A CRC is the remainder of a polynomial, and what stands `n` bytes further left counts x^(8 n) times.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
"""Of CRC-32, the highest bit standing for x^0."""
_ONE = 1 << 31


class ReadSums:
    """What was read of one record."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, int]] = []
        """Begin, end and sum, ascending; none touches the next."""

    def add(self, size: int, begin: int, data: memoryview) -> int | None:
        """Of the record's `size` bytes those from `begin` on were read: its sum if no other was missing, else None.

        Bytes of which some were read before count for nothing.
        """
        end, at = begin + len(data), bisect_left(self._pieces, (begin,))
        before, after = self._pieces[:at][-1:], self._pieces[at : at + 1]
        if any(piece[1] > begin for piece in before) or any(piece[0] < end for piece in after):
            return None
        first, last, total = at, at, zlib.crc32(data)
        if before and before[0][1] == begin:
            total, begin, first = joined(before[0][2], total, len(data)), before[0][0], at - 1
        if after and after[0][0] == end:
            total, end, last = joined(total, after[0][2], after[0][1] - end), after[0][1], at + 1
        self._pieces[first:last] = [(begin, end, total)]
        return total if end - begin == size else None


def joined(left: int, right: int, length: int) -> int:
    """CRC-32 of two pieces, one behind the other, from theirs; `length`: bytes of the right one.

    >>> joined(zlib.crc32(b"abc"), zlib.crc32(b"de"), 2) == zlib.crc32(b"abcde")
    True
    """
    return _times(_shift(length), left) ^ right


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x^(8 length), modulo the polynomial."""
    found, power = _ONE, _ONE >> 8
    while length:
        if length & 1:
            found = _times(power, found)
        power, length = _times(power, power), length >> 1
    return found


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
