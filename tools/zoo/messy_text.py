"""Sentences with dates, times, amounts and telephone numbers as people write them, drawn in code.

Each sentence comes with its canonical form, in which these four kinds of phrases have one spelling
only, and everything else is copied::

    pls call Dorvan on (020) 7946-0018 by half past 3 in the afternoon
    pls call Dorvan on +442079460018 by 15:30

The grammar has no ambiguous phrase: dates are day first, years of two digits are 2000 to 2099, and
telephone numbers without a country are British. Codes, counts and names are copied.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable
from typing import NamedTuple


class Phrase(NamedTuple):
    """A piece of text and its canonical form."""

    written: str
    canonical: str


MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip
ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
    "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen",
    "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth",
    "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip
DOMESTIC = "44"
"""Country code of telephone numbers that do not have one."""


def draw_pairs(count: int, *, seed: int) -> list[Phrase]:
    """Return ``count`` sentences with their canonical forms; no two are equal."""
    draw = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        sentence = draw_sentence(draw)
        found.setdefault(sentence.written, sentence.canonical)
    return [Phrase(written, canonical) for written, canonical in found.items()]


def draw_sentence(draw: random.Random) -> Phrase:
    """Return one sentence: perhaps a greeting, one or two clauses, perhaps an ending."""
    clauses = draw.sample(_CLAUSES, 2 if draw.random() < 0.3 else 1)
    text = draw.choice((", ", " and ", "; ")).join(clauses)
    if draw.random() < 0.25:
        text = draw.choice(_GREETINGS) + text
    elif draw.random() < 0.5:
        text = text[0].upper() + text[1:]
    text += draw.choice(_ENDINGS)
    written, canonical = "", ""
    for number, part in enumerate(text.replace("}", "{").split("{")):
        phrase = _SLOTS[part](draw) if number % 2 else Phrase(part, part)
        written, canonical = written + phrase.written, canonical + phrase.canonical
    return Phrase(written, canonical)


# dates


def draw_date(draw: random.Random) -> Phrase:
    """Return a date of 2000 to 2039, canonically as 2021-03-09."""
    day = datetime.date(2000, 1, 1) + datetime.timedelta(days=draw.randrange(40 * 365))
    month = MONTHS[day.month - 1]
    short = month[:3]
    if draw.random() < 0.3:
        month, short = month.lower(), short.lower()
    d, year, yy = day.day, day.year, f"{day.year % 100:02}"
    short_year = draw.choice((str(year), f"'{yy}"))
    written = draw.choice((
        lambda: f"{d}/{day.month}/{draw.choice((year, yy))}",
        lambda: f"{d:02}.{day.month:02}.{draw.choice((year, yy))}",
        lambda: f"{d}-{short}-{yy}",
        lambda: f"{month} {d}{ordinal_ending(d)}, {year}",
        lambda: f"{month} {d}, {year}",
        lambda: f"{d}{ordinal_ending(d)} of {month} {year}",
        lambda: f"{d} {short} {short_year}",
        lambda: f"{short}. {d} '{yy}",
        lambda: f"the {ordinal(d)} of {month} {year}",
    ))()  # fmt: skip
    return Phrase(written, day.isoformat())


def ordinal_ending(number: int) -> str:
    """Return the ending of a number below 100: st, nd, rd or th."""
    return "th" if 10 < number < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def ordinal(number: int) -> str:
    """Return the ordinal of a number of 1 to 99 in words."""
    head, dash, last = words(number).rpartition("-")
    last = ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
    return head + dash + last


def words(number: int) -> str:
    """Return a number of 0 to 9999 in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10 - 2] + (f"-{ONES[number % 10]}" if number % 10 else "")
    if number < 1000:
        return f"{ONES[number // 100]} hundred" + (
            f" and {words(number % 100)}" if number % 100 else ""
        )
    rest = number % 1000
    joint = " and " if rest < 100 else " "
    return f"{words(number // 1000)} thousand" + (joint + words(rest) if rest else "")


# times


def draw_time(draw: random.Random) -> Phrase:
    """Return a time of day, canonically as 15:05."""
    hour, minute = draw.randrange(24), draw.choice((0, 15, 30, 45, *(draw.randrange(60),) * 5))
    written = draw.choice((_time_of_24_hours, _time_of_12_hours, _spoken_time))(hour, minute, draw)
    return Phrase(written, f"{hour:02}:{minute:02}")


def _time_of_24_hours(hour: int, minute: int, draw: random.Random) -> str:
    return draw.choice((
        f"{hour}:{minute:02} h", f"{hour}.{minute:02} h", f"{hour}h{minute:02}",
        f"{hour:02}{minute:02} hours",
    ))  # fmt: skip


def _time_of_12_hours(hour: int, minute: int, draw: random.Random) -> str:
    half = "pm" if hour >= 12 else "am"
    half = draw.choice((half, f" {half}", f" {half.upper()}", f" {half[0]}.m."))
    mark = draw.choice(":.")
    return f"{_clock(hour)}{half}" if minute == 0 else f"{_clock(hour)}{mark}{minute:02}{half}"


def _spoken_time(hour: int, minute: int, draw: random.Random) -> str:
    """Return a time such as ``twenty to four in the afternoon``."""
    if (hour, minute) in ((0, 0), (12, 0)) and draw.random() < 0.5:
        return "noon" if hour else "midnight"
    part = "morning" if hour < 12 else "afternoon" if hour < 18 else "evening"
    spoken = words if draw.random() < 0.5 else str
    if minute == 0:
        return f"{spoken(_clock(hour))} o'clock in the {part}"
    # "To" an hour in another part of the day would be ambiguous.
    to = minute > 30 and hour not in (11, 17, 23)
    count = 60 - minute if to else minute
    amount = {15: "quarter", 30: "half"}.get(count, f"{spoken(count)} minute" + "s" * (count > 1))
    return f"{amount} {'to' if to else 'past'} {spoken(_clock(hour + to))} in the {part}"


def _clock(hour: int) -> int:
    return (hour - 1) % 12 + 1


# amounts

_CURRENCIES = {
    "USD": ("$", ("dollars", "bucks", "US dollars")),
    "EUR": ("€", ("euros", "euro")),
    "GBP": ("£", ("pounds", "quid")),
}


def draw_amount(draw: random.Random) -> Phrase:
    """Return an amount of money, canonically as USD 1234.50."""
    currency = draw.choice(tuple(_CURRENCIES))
    sign, names = _CURRENCIES[currency]
    name = draw.choice(names)
    cents = draw.choice((_whole, _with_cents, _rounded))(draw)
    units, rest = divmod(cents, 100)
    ways = [
        f"{sign}{units:,}.{rest:02}",
        f"{units}.{rest:02} {name}",
        f"{currency} {units:,}.{rest:02}",
    ]
    if currency == "EUR":  # as in much of Europe, and only with cents
        ways.append(f"{units:,}".replace(",", ".") + f",{rest:02} €")
    if not rest:
        ways = [f"{sign}{units:,}", f"{units} {name}", f"{units:,} {currency}"]
        if units < 10_000:
            ways.append(f"{words(units)} {name}")
    elif currency != "GBP":
        ways.append(f"{units} {names[0]} and {rest} cents")
    if not cents % 10_000 and 1000 <= units < 1_000_000:
        ways += [f"{sign}{units / 1000:g}k", f"{units / 1000:g}k {name}"]
    if not cents % 10_000_000 and units >= 1_000_000:
        ways += [f"{units / 1_000_000:g} million {name}", f"{sign}{units / 1_000_000:g}m"] * 2
    return Phrase(draw.choice(ways), f"{currency} {units}.{rest:02}")


def _whole(draw: random.Random) -> int:
    return 100 * draw.randrange(2, 10 ** draw.randint(1, 4))


def _with_cents(draw: random.Random) -> int:
    return draw.randrange(200, 10 ** draw.randint(3, 6))


def _rounded(draw: random.Random) -> int:
    """Return a round amount, in thousands or millions."""
    return draw.randrange(10, 200) * draw.choice((10_000, 10_000_000))


# telephone

_COUNTRIES = {"44": (10,), "1": (10,), "49": (9, 10), "33": (9,), "31": (9,), "41": (9,)}
"""Numbers of digits after the country code."""


def draw_telephone(draw: random.Random) -> Phrase:
    """Return a telephone number, canonically as +442079460018."""
    country = DOMESTIC if draw.random() < 0.4 else draw.choice(tuple(_COUNTRIES))
    count = draw.choice(_COUNTRIES[country])
    national = str(draw.randrange(1, 10)) + "".join(draw.choices("0123456789", k=count - 1))
    cut = draw.randint(2, 4)
    area, line = national[:cut], national[cut:]
    mark = draw.choice((" ", "-", ".", "", " "))
    middle = len(line) // 2
    spaced = line[:middle] + mark + line[middle:]
    ways = [
        f"+{country} {area} {spaced}",
        f"00{country} {area}{mark}{spaced}",
        f"+{country}{mark}{area}{mark}{spaced}",
    ]
    if country != "1":
        ways.append(f"+{country} (0){area} {spaced}")
    if country == DOMESTIC:
        ways += [f"0{area} {spaced}", f"(0{area}) {spaced}", f"0{area}/{spaced}"] * 2
    return Phrase(draw.choice(ways), f"+{country}{national}")


# copied unchanged


def _copied(text: Callable[[random.Random], str]) -> Callable[[random.Random], Phrase]:
    def phrase(draw: random.Random) -> Phrase:
        found = text(draw)
        return Phrase(found, found)

    return phrase


def _name(draw: random.Random) -> str:
    """Return a name of two or three syllables; most names occur in only one sentence."""
    return "".join(
        draw.choice("bcdfghjklmnprstvwz") + draw.choice(("a", "e", "i", "o", "u", "ar", "en", "il"))
        for _ in range(draw.choice((2, 2, 3)))
    ).capitalize()


def _code(draw: random.Random) -> str:
    letters = "".join(draw.choices("ABCDEFGHKLMNPRSTUVWXYZ", k=draw.randint(1, 3)))
    return f"{letters}{draw.choice(('-', '', ' '))}{draw.randrange(10, 10_000)}"


_THINGS = (
    "invoice", "order", "contract", "ticket", "parcel", "report", "booking", "deposit", "rent",
    "laptop", "piano", "licence", "repair", "refund", "flight", "hotel", "bicycle", "sofa",
)  # fmt: skip
_PLACES = (
    "the main station", "our office", "the town hall", "the north gate", "the library",
    "the airport", "the old harbour", "the clinic", "the museum", "the ground floor",
)  # fmt: skip
_SLOTS: dict[str, Callable[[random.Random], Phrase]] = {
    "date": draw_date,
    "time": draw_time,
    "amount": draw_amount,
    "telephone": draw_telephone,
    "name": _copied(_name),
    "code": _copied(_code),
    "thing": _copied(lambda draw: draw.choice(_THINGS)),
    "place": _copied(lambda draw: draw.choice(_PLACES)),
    "count": _copied(lambda draw: str(draw.randrange(2, 400))),
}
_GREETINGS = (
    "hi {name}, ", "dear {name}, ", "hello, ", "{name}: ", "hey {name} - ", "good news: ",
    "reminder: ", "fyi, ", "ps: ",
)  # fmt: skip
_ENDINGS = (
    "", ".", ".", "!", " please.", ", thanks.", ", best {name}", " (ref {code})", ", ok?",
    ", says {name}.",
)  # fmt: skip
_CLAUSES = (
    "the {thing} is due on {date}",
    "the meeting moves to {date} at {time}",
    "please call {name} on {telephone} before {time}",
    "we paid {amount} for the {thing}",
    "{thing} {code} was sent on {date}",
    "my new number is {telephone}",
    "pick me up at {place} at {time}",
    "they still owe us {amount}",
    "can you transfer {amount} to {name} by {date}",
    "room {count} is free from {time} to {time}",
    "{name} was born on {date}",
    "the {thing} costs {amount} or {amount} with insurance",
    "ring {telephone} and ask for {name}",
    "doors open at {time} and close at {time}",
    "the {thing} of {date} came to {amount}",
    "{count} people signed up before {date}",
    "text me at {telephone}, not at {telephone}",
    "from {date} to {date} we are closed",
    "the train to {name} leaves {place} at {time}",
    "{name} sold the {thing} for {amount}",
    "your {thing} {code} arrives on {date} around {time}",
    "budget {amount}, {count} guests, {date}",
    "lunch with {name} at {time} near {place}",
    "I lost my {thing} at {place} on {date}",
    "contact {name} ({telephone}) about {thing} {code}",
    "the price went from {amount} to {amount} on {date}",
    "wake me at {time}",
    "nothing has changed at {place}",
    "see page {count} of the {thing} for details",
    "{name} and {name} will meet us at {place}",
)
