"""Systems that are measured together: all loaded, or one at a time."""

from __future__ import annotations

import weakref

import pytest

from offramp.engine.stages.loaded import Loaded


class System:
    """Something that takes much memory."""


def make_some(*, together: bool) -> tuple[Loaded[System], list[weakref.ref[System]]]:
    made: list[weakref.ref[System]] = []

    def make() -> System:
        assert together or all(system() is None for system in made), "another one is loaded"
        system = System()
        made.append(weakref.ref(system))
        return system

    return Loaded([make, make, make], together=together), made


def test_all_are_loaded_once_where_they_may_be_there_together() -> None:
    loaded, made = make_some(together=True)
    assert [loaded[place] for place in (0, 1, 2, 0)] == [made[p]() for p in (0, 1, 2, 0)]
    assert len(made) == len(loaded) == 3


def test_one_at_a_time_is_loaded_and_stays_while_it_is_asked_for() -> None:
    loaded, made = make_some(together=False)
    for place in (0, 0, 2, 2, 0, 1):
        assert isinstance(loaded[place], System)
    assert len(made) == 4
    assert [system() is None for system in made] == [True, True, True, False]


@pytest.mark.parametrize("together", [False, True])
def test_there_is_none_beyond_the_last(together: bool) -> None:
    loaded, _ = make_some(together=together)
    with pytest.raises(IndexError):
        loaded[3]
