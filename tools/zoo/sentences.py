"""Sentences of a small grammar, drawn in code, with words to classify.

A sentence is a sequence of clauses; a clause is an opening word, four to twenty-one words, and a
closing word; opening and closing come in two kinds. The lexicon determines the class of most words.
The class of other words depends on the previous word; or on the kind of the clause's opening word
or closing word, several words away; or on both of these. So sentences differ in difficulty, as in
natural language.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LONGEST, SHORTEST = 48, 8
"""Largest and smallest number of words in a sentence."""
CLASSES = 7
PADDING = 0
NO_CLASS = -100
"""Label of padding, which torch's cross entropy ignores."""

OPENING, CLOSING, NAME, VERB, QUALITY, PAST, PRESENT = range(CLASSES)
OPENINGS = range(1, 9)
"""Ids of opening words; the first half are of the first kind. Closing words likewise."""
CLOSINGS = range(9, 17)
BY_LEXICON = range(17, 417)
"""Words whose class is in the lexicon; names, verbs, qualities, past and present are a fifth
each."""
BY_WORD_BEFORE = range(417, 457)
"""Words that are names after a quality, else verbs."""
BY_OPENING = range(457, 497)
"""Words that are past if the clause's opening word is of the first kind, else present."""
BY_CLOSING = range(497, 537)
"""Words that are past if the clause's closing word is of the first kind, else present."""
BY_BOTH = range(537, 557)
"""Words that are verbs if opening and closing word are of the same kind, else qualities."""
WORDS = 557
_RANGES = (BY_LEXICON, BY_WORD_BEFORE, BY_OPENING, BY_CLOSING, BY_BOTH)
_CHANCES = (0.83, 0.08, 0.05, 0.03, 0.01)
_SHORTEST_CLAUSE, _LONGEST_CLAUSE = 6, 18


def draw_sentences(count: int, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw sentences of 8 to 48 words, no two equal.

    Return ids int64 [count, 48], padded at the end with :data:`PADDING`, and the classes int64
    [count, 48], :data:`NO_CLASS` in the padding.
    """
    random = np.random.default_rng(seed)
    ids = np.full((count, LONGEST), PADDING, np.int64)
    classes = np.full((count, LONGEST), NO_CLASS, np.int64)
    drawn: set[bytes] = set()
    for words, labels in zip(ids, classes, strict=True):
        while True:
            sentence = draw_sentence(int(random.integers(SHORTEST, LONGEST + 1)), random)
            if sentence.tobytes() not in drawn:
                break
        drawn.add(sentence.tobytes())
        words[: len(sentence)] = sentence
        labels[: len(sentence)] = classify(sentence)
    return ids, classes


def draw_sentence(length: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Draw the ids of a sentence of ``length`` words, at least :data:`SHORTEST`."""
    clauses = []
    left = length
    while left:
        most = min(left, _LONGEST_CLAUSE)
        size = int(random.integers(_SHORTEST_CLAUSE, most + 1))
        if left - size < _SHORTEST_CLAUSE:
            size = left  # the rest is too short for another clause
        clauses.append(_draw_clause(size, random))
        left -= size
    return np.concatenate(clauses)


def _draw_clause(size: int, random: np.random.Generator) -> NDArray[np.int64]:
    groups = [_RANGES[group] for group in random.choice(len(_RANGES), size - 2, p=_CHANCES)]
    groups = [OPENINGS, *groups, CLOSINGS]
    found: NDArray[np.int64] = random.integers(
        [group.start for group in groups], [group.stop for group in groups]
    )
    return found


def classify(sentence: NDArray[np.int64]) -> list[int]:
    """Return the class of each word of a sentence without padding."""
    found: list[int] = []
    opening = 0
    for place, word in enumerate(sentence.tolist()):
        if word in OPENINGS:
            opening = _kind(word, OPENINGS)
            found.append(OPENING)
        elif word in CLOSINGS:
            found.append(CLOSING)
        elif word in BY_LEXICON:
            found.append(NAME + (word - BY_LEXICON.start) % (CLASSES - NAME))
        elif word in BY_WORD_BEFORE:
            found.append(NAME if found[-1] == QUALITY else VERB)
        elif word in BY_OPENING:
            found.append(PRESENT if opening else PAST)
        else:
            closing = next(_kind(w, CLOSINGS) for w in sentence[place:].tolist() if w in CLOSINGS)
            if word in BY_CLOSING:
                found.append(PRESENT if closing else PAST)
            else:
                found.append(VERB if opening == closing else QUALITY)
    return found


def _kind(word: int, words: range) -> int:
    return int(word - words.start >= len(words) // 2)
