"""The package's own documentation: its example runs, and says what it says."""

from __future__ import annotations

import doctest

import offramp.certify


def test_the_example_of_the_docstring_runs() -> None:
    found = doctest.testmod(offramp.certify)
    assert (found.failed, found.attempted) == (0, 10)
