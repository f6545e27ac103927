# SPDX-License-Identifier: Apache-2.0
"""From pieces to prompts: token ids, or words."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final, cast

from moonpool.bench.serve.workload import ANSWER, Piece, Seed, Turn

__all__ = ["TOKENS_FIRST", "WORDS", "Script", "Spelling", "TokenSpelling", "WordSpelling"]

#: Token ids below are left out: special tokens of many models are there, and those at the other end of a vocabulary
#: are left out by a smaller one.
TOKENS_FIRST: Final = 100

_SYLLABLES: Final = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
#: Words of prompts that are text. Each is a token or a few, which depends on the server's tokenizer.
WORDS: Final = [first + second for first, second in itertools.product(_SYLLABLES, _SYLLABLES)]


class Spelling:
    """Spells pieces of one round.

    Args:
        seed: of the round.
    """

    def __init__(self, seed: Seed) -> None:
        self._seed = seed

    def prompt(self, said: Iterable[list[int] | str]) -> list[int] | str:
        """Return all that was said, as a server takes it."""
        raise NotImplementedError

    def spell(self, piece: Piece) -> list[int] | str:
        """Return a piece."""
        raise NotImplementedError

    def _numbers(self, piece: Piece, least: int, beyond: int) -> list[int]:
        numbers: list[int] = self._seed.generator(*piece.name).integers(least, beyond, piece.tokens).tolist()
        return numbers


class TokenSpelling(Spelling):
    """Prompts are token ids from `TOKENS_FIRST` up to `vocabulary`, which all servers have to know."""

    def __init__(self, seed: Seed, vocabulary: int) -> None:
        super().__init__(seed)
        self._vocabulary = vocabulary

    def prompt(self, said: Iterable[list[int] | str]) -> list[int] | str:
        """Return the ids, one after the other."""
        return list(itertools.chain.from_iterable(cast("Iterable[list[int]]", said)))

    def spell(self, piece: Piece) -> list[int] | str:
        """Return its ids."""
        return self._numbers(piece, TOKENS_FIRST, self._vocabulary)


class WordSpelling(Spelling):
    """Prompts are text: a word for each token."""

    def prompt(self, said: Iterable[list[int] | str]) -> list[int] | str:
        """Return the texts, one after the other."""
        return "".join(cast("Iterable[str]", said))

    def spell(self, piece: Piece) -> list[int] | str:
        """Return its words, each behind a space."""
        return "".join(f" {WORDS[number]}" for number in self._numbers(piece, 0, len(WORDS)))


class Script:
    """One conversation, as far as it has come.

    Args:
        spelling: of the round.
        number: which conversation of the round it is.
    """

    def __init__(self, spelling: Spelling, number: int) -> None:
        self._spelling = spelling
        self._number = number
        self._said: list[list[int] | str] = []
        self._answers = 0

    def say(self, turn: Turn) -> list[int] | str:
        """Go on with what the user says. Returns the prompt: everything that was said."""
        self._said.extend(self._spelling.spell(piece) for piece in turn.adds)
        return self._spelling.prompt(self._said)

    def answered(self, token_ids: list[int], text: str, tokens: int) -> bool:
        """Go on with what the server answered.

        Returns:
            False where the server has not told its answer in the form of the prompts: then tokens of the same number
            stand in for it, which the server has not computed.
        """
        self._answers += 1
        told: list[int] | str = token_ids if isinstance(self._spelling, TokenSpelling) else text
        self._said.append(told or self._spelling.spell(Piece((ANSWER, self._number, self._answers), tokens)))
        return bool(told)
