"""Drawn sentences have the canonical form that another reading of them gives."""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Iterator

import pytest

from offramp.tools.zoo.messy_text import (
    Phrase,
    draw_amount,
    draw_date,
    draw_pairs,
    draw_sentence,
    draw_telephone,
    draw_time,
    ordinal,
    words,
)

UNITS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7,
    "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13,
    "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18,
    "nineteen": 19,
    "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70,
    "eighty": 80, "ninety": 90, "first": 1, "second": 2, "third": 3, "fifth": 5, "eighth": 8,
    "ninth": 9, "twelfth": 12, "twentieth": 20, "thirtieth": 30,
}  # fmt: skip
CANONICAL = re.compile(
    r"(\d{4}-\d\d-\d\d|(?<!\d)\d\d:\d\d|(?:USD|EUR|GBP) \d+\.\d\d|\+\d{10,13}(?!\d))"
)


def number(text: str) -> int:
    """The number that digits or words say."""
    if text.isdigit():
        return int(text)
    total = part = 0
    for word in re.split("[ -]", text):
        if word == "hundred":
            part *= 100
        elif word == "thousand":
            total, part = total + part * 1000, 0
        elif word != "and":
            part += UNITS[word] if word in UNITS else UNITS[word.removesuffix("th")]
    return total + part


def read_date(text: str) -> str | None:
    text = re.sub(r"(\d)(st|nd|rd|th)\b", r"\1", text.lower())
    if found := re.fullmatch(r"the ([a-z-]+) of (.*)", text):
        text = f"{number(found[1])} {found[2]}"
    text = re.sub(r"^([a-z]+)\.", r"\1", text.replace(" of ", " ").replace(",", ""))
    for way in ("%d/%m/%Y", "%d/%m/%y", "%d.%m.%Y", "%d.%m.%y", "%d-%b-%y", "%B %d %Y",
                "%d %B %Y", "%d %b %Y", "%d %b '%y", "%b %d '%y"):  # fmt: skip
        try:
            return datetime.datetime.strptime(text, way).date().isoformat()  # noqa: DTZ007 - a date has no zone
        except ValueError:
            continue
    return None


def read_time(text: str) -> str | None:
    if text in ("noon", "midnight"):
        return {"noon": "12:00", "midnight": "00:00"}[text]
    if found := re.fullmatch(r"(\d\d)(\d\d) hours|(\d+)[:.](\d\d) h|(\d+)h(\d\d)", text):
        hour, minute = (int(group) for group in found.groups() if group)
        return f"{hour:02}:{minute:02}"
    if found := re.fullmatch(r"(\d+)(?:[:.](\d\d))? ?([ap])\.?m\.?", text.lower()):
        hour = int(found[1]) % 12 + 12 * (found[3] == "p")
        return f"{hour:02}:{int(found[2] or 0):02}"
    found = re.fullmatch(
        r"(?:(.+?)(?: minutes?)? (to|past) )?([\w-]+)(?: o'clock)? in the (\w+)", text
    )
    if not found:
        return None
    minutes = {"quarter": 15, "half": 30, None: 0}.get(found[1])
    minutes = number(found[1]) if minutes is None else minutes
    hour = number(found[3]) % 12 + 12 * (found[4] != "morning")
    total = 60 * hour + (minutes if found[2] != "to" else -minutes)
    parts = {"morning": range(720), "afternoon": range(720, 1080), "evening": range(1080, 1440)}
    assert total in parts[found[4]]
    return f"{total // 60:02}:{total % 60:02}"


CURRENCIES = {
    "$": "USD", "dollars": "USD", "bucks": "USD", "US dollars": "USD", "USD": "USD",
    "€": "EUR", "euros": "EUR", "euro": "EUR", "EUR": "EUR",
    "£": "GBP", "pounds": "GBP", "quid": "GBP", "GBP": "GBP",
}  # fmt: skip


def read_amount(text: str) -> str | None:
    if found := re.fullmatch(r"(\d+) (dollars|euros) and (\d+) cents", text):
        return f"{CURRENCIES[found[2]]} {found[1]}.{int(found[3]):02}"
    name = next((n for n in sorted(CURRENCIES, key=len, reverse=True) if n in text), None)
    if name is None:
        return None
    value, times = text.replace(name, "").strip(), 1
    for word, size in ((" million", 10**6), ("m", 10**6), ("k", 1000)):
        if value.endswith(word) and value[0].isdigit():
            value, times = value.removesuffix(word), size
    if not value[:1].isdigit():
        return f"{CURRENCIES[name]} {number(value)}.00"
    if re.fullmatch(r"[\d.]+,\d\d", value):
        value = value.replace(".", "").replace(",", ".")
    cents = round(float(value.replace(",", "")) * times * 100)
    return f"{CURRENCIES[name]} {cents // 100}.{cents % 100:02}"


def read_telephone(text: str) -> str | None:
    digits = re.sub(r"[^\d+]", "", text.replace("(0)", ""))
    if not re.fullmatch(r"[\d+() ./-]+", text):
        return None
    if digits.startswith("00"):
        return "+" + digits[2:]
    return digits if digits.startswith("+") else "+44" + digits[1:]


READERS = {
    draw_date: read_date, draw_time: read_time, draw_amount: read_amount,
    draw_telephone: read_telephone,
}  # fmt: skip


@pytest.mark.parametrize("kind", READERS)
def test_phrases_parse_back_to_their_canonical_form(kind) -> None:
    draw = random.Random(3)
    phrases = [kind(draw) for _ in range(4000)]
    for phrase in phrases:
        assert CANONICAL.fullmatch(phrase.canonical), phrase
        assert READERS[kind](phrase.written) == phrase.canonical, phrase
    assert len({phrase.written for phrase in phrases}) > 2000
    assert sum(phrase.written != phrase.canonical for phrase in phrases) > 3500


def read_any(text: str, wanted: str) -> bool:
    """Return True if some reader of phrases returns the wanted text."""
    for read in READERS.values():
        try:
            if read(text) == wanted:
                return True
        except (KeyError, ValueError, AssertionError):
            continue  # not of its kind
    return False


def explains(written: str, pieces: list[str]) -> bool:
    """Return True if a text consists of the copied pieces, and paraphrases between them."""
    copied, *rest = pieces
    if not written.startswith(copied):
        return False
    written = written.removeprefix(copied)
    if not rest:
        return not written
    return any(
        read_any(written[:end], rest[0]) and explains(written[end:], rest[1:])
        for end in _ends(written, rest[1])
    )


def _ends(text: str, following: str) -> Iterator[int]:
    return (end for end in range(1, len(text) + 1) if text.startswith(following, end))


def test_whole_sentences_parse_back() -> None:
    draw = random.Random(5)
    changed = 0
    for _ in range(600):
        sentence = draw_sentence(draw)
        pieces = CANONICAL.split(sentence.canonical)
        assert explains(sentence.written, pieces), sentence
        changed += len(pieces) // 2
    assert changed > 600
    assert not explains("call me at 3 pm", ["call me at ", "15:01", ""])
    assert not explains("call us at 3 pm", ["call me at ", "15:00", ""])


def test_sentences_are_drawn_alike_for_a_seed_and_none_twice() -> None:
    pairs = draw_pairs(2000, seed=1)
    assert pairs == draw_pairs(2000, seed=1)
    assert all(isinstance(pair, Phrase) for pair in pairs)
    assert len({pair.written for pair in pairs}) == 2000
    assert (
        len({pair.written for pair in pairs} & {p.written for p in draw_pairs(2000, seed=2)}) < 60
    )


@pytest.mark.parametrize(("count", "cardinal", "nth"), [
    (1, "one", "first"), (12, "twelve", "twelfth"), (20, "twenty", "twentieth"),
    (31, "thirty-one", "thirty-first"), (8, "eight", "eighth"), (14, "fourteen", "fourteenth"),
])  # fmt: skip
def test_numbers_in_words(count: int, cardinal: str, nth: str) -> None:
    assert (words(count), ordinal(count)) == (cardinal, nth)


def test_large_numbers_in_words() -> None:
    assert words(305) == "three hundred and five"
    assert words(1200) == "one thousand two hundred"
    assert words(9016) == "nine thousand and sixteen"
    assert [number(words(n)) for n in range(10_000)] == list(range(10_000))
