"""Options that exclude or need each other: one table per command, checked in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


class IllegalCombinationError(ValueError):
    """Two given options exclude each other, or an option that a given one needs is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Illegal:
    """A combination of two options that a command refuses.

    An option is spelled as on the command line. A bare flag (``--units``) matches if the option is
    given. A flag with a value (``--train joint``, ``--mode off|leave``) matches if the option has
    that value, given or by default.
    """

    option: str
    other: str | None = None
    """Option that excludes ``option``."""
    without: str | None = None
    """Option that ``option`` needs."""
    why: str
    """Reason and remedy; in the message they follow the names of the options."""
    when: Callable[[Mapping[str, object]], bool] | None = None
    """A further condition that a spelling cannot express; it is a function of the values by
    flag."""

    def __post_init__(self) -> None:
        """Check that exactly one of ``other`` and ``without`` is given."""
        assert (self.other is None) != (self.without is None), self

    def matches(self, values: Mapping[str, object], given: Collection[str]) -> bool:
        """Return whether a command line has this combination."""
        if not _is_given(self.option, values, given):
            return False
        if self.other is not None:
            other = _is_given(self.other, values, given)
        else:
            other = not _is_given(str(self.without), values, given)
        return other and (self.when is None or self.when(values))

    def message(self, values: Mapping[str, object]) -> str:
        """Return the error message: the options with their values, the reason, the remedy."""
        if self.other is not None:
            other = f"with {_as_found(self.other, values)}"
        else:
            other = f"without {str(self.without).replace('|', ' or ')}"
        return f"{_as_found(self.option, values)} {other}: {self.why}"


def refuse_illegal(
    table: Sequence[Illegal], values: Mapping[str, object], given: Collection[str]
) -> None:
    """Raise an error for the first illegal combination that a command line contains.

    Args:
        table: Combinations that are illegal.
        values: Values by flag, with defaults; a flag that is absent matches no value.
        given: Flags of the options that were given.

    Raises:
        IllegalCombinationError: The command line has an illegal combination.
    """
    for row in table:
        if row.matches(values, given):
            raise IllegalCombinationError(row.message(values))


def _is_given(spelled: str, values: Mapping[str, object], given: Collection[str]) -> bool:
    flag, _, wanted = spelled.partition(" ")
    return _text_of(values.get(flag)) in wanted.split("|") if wanted else flag in given


def _as_found(spelled: str, values: Mapping[str, object]) -> str:
    """Return a spelling with the option's current value."""
    flag, _, wanted = spelled.partition(" ")
    return f"{flag} {_text_of(values[flag])}" if wanted else flag


def _text_of(value: object) -> str:
    return str(getattr(value, "value", value))  # the value of an enumeration
