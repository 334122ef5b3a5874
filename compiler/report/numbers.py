"""Numbers as text; rounding never turns a share into a bound that it did not reach."""

from __future__ import annotations

import math

_SPACE = "\u202f"
_MINUS = "−"


def percent(share: float, decimals: int = 1) -> str:
    """Return a share as text such as ``73.6 %``; only 1 is shown as 100 %, and only 0 as 0 %."""
    step = 10.0**-decimals
    value = 100 * share
    if 0 < value < step / 2:
        return f"<{_SPACE}{step:.{decimals}f}{_SPACE}%"
    if 100 - step / 2 <= value < 100:
        value = 100 - step
    return f"{signed(value, decimals)}{_SPACE}%"


def plain_percent(share: float) -> str:
    """Return text such as ``1 %``, with the digits of a number that the user chose."""
    return f"{100 * share:.6g}{_SPACE}%"


def signed(value: float, decimals: int) -> str:
    """Return a number rounded to some decimals, with a true minus sign and no negative zero."""
    text = f"{value:.{decimals}f}"
    if float(text) == 0:
        text = text.removeprefix("-")
    return text.replace("-", _MINUS)


def milliseconds(value_ms: float) -> str:
    """Return text such as ``1.70`` or ``0.0233``: three significant digits, without a unit."""
    if value_ms == 0 or not math.isfinite(value_ms):
        return f"{value_ms:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value_ms))))
    return signed(value_ms, min(decimals, 6))


def threshold(value: float) -> str:
    """Return text such as ``0.911``, with as many digits as needed to stay below 1."""
    if not 0 < 1 - value < 0.01:
        return f"{value:.3f}"
    return f"{value:.{min(9, 1 - math.floor(math.log10(1 - value)))}f}"


def count(value: int) -> str:
    """Return text such as ``5,000``."""
    return f"{value:,}"


def plural(value: int, noun: str, many: str | None = None) -> str:
    """Return text such as ``1 exit`` or ``2 exits``; ``many`` is an irregular plural."""
    return f"{count(value)} {noun if value == 1 else many or f'{noun}s'}"


def mebibytes(size_bytes: int) -> str:
    """Return text such as ``12.3 MiB``."""
    return f"{size_bytes / 2**20:,.1f}{_SPACE}MiB"
