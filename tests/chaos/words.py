# SPDX-License-Identifier: Apache-2.0
"""Bytes that tell which write they are of, and where they belong: 8-byte words of a number and a hash."""

from __future__ import annotations

from typing import Any

import numpy as np

WORD_BYTES = 8
UNTOLD_BYTES = 32
_SEQUENCE_BITS = 24
_HASH_BITS = 64 - _SEQUENCE_BITS

Words = np.ndarray[Any, np.dtype[np.uint64]]
Octets = np.ndarray[Any, np.dtype[np.uint8]]


def _words(sequences: Words, places: Words) -> Words:
    mixed = (places * np.uint64(0x9E3779B97F4A7C15)) ^ ((sequences + np.uint64(1)) * np.uint64(0xC2B2AE3D27D4EB4F))
    hashes = (mixed * np.uint64(0xFF51AFD7ED558CCD)) >> np.uint64(_SEQUENCE_BITS)
    return (sequences << np.uint64(_HASH_BITS)) | hashes


def content(sequence: int, start: int, length: int) -> Octets:
    """Return what write number `sequence` puts at the bytes `start` to `start + length` of a region."""
    first, last = start // WORD_BYTES, -(-(start + length) // WORD_BYTES)
    places = np.arange(first, last, dtype=np.uint64)
    octets = _words(np.full(last - first, sequence, np.uint64), places).view(np.uint8)
    begin = start - first * WORD_BYTES
    return octets[begin : begin + length]


def older_than(sequence: int, start: int, found: Octets) -> int | None:
    """Look for bytes that neither write number `sequence` nor a later one has put there.

    A later write may be under way, and have ended in the middle of a word. One of a few bytes holds no word that tells
    its number, so up to `UNTOLD_BYTES` in a row are let pass.

    Returns:
        The position of the first such byte, or None.
    """
    wrong = np.flatnonzero(found != content(sequence, start, len(found)))
    if len(wrong) == 0:
        return None
    first, last = -(-start // WORD_BYTES), (start + len(found)) // WORD_BYTES
    inner = found[first * WORD_BYTES - start : last * WORD_BYTES - start].copy().view(np.uint64)
    sequences = inner >> np.uint64(_HASH_BITS)
    whole = _words(sequences, np.arange(first, last, dtype=np.uint64)) == inner
    later = {int(number) for number in np.unique(sequences[whole]) if number > sequence}
    for number in sorted(later):
        wrong = wrong[found[wrong] != content(number, start, len(found))[wrong]]
    runs = np.split(wrong, np.flatnonzero(np.diff(wrong) > WORD_BYTES) + 1)
    long = [run for run in runs if len(run) and run[-1] - run[0] >= UNTOLD_BYTES]
    return int(long[0][0]) if long else None
