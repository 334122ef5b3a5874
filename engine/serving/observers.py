"""Observers of requests: one for each served name, for all versions of its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from numpy.typing import NDArray

_log = logging.getLogger(__name__)

InputObserver: TypeAlias = Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], None]
"""Function that is called with the input arrays of an answered request, by name, and with its first
answers, [n, …], in the form of the model graph's output. The function must not change the arrays.
"""


class InputObservers:
    """Observers of inputs, by the model's name; used on the event loop's thread."""

    def __init__(self) -> None:
        self._observers: dict[str, InputObserver] = {}

    def set(self, name: str, observer: InputObserver | None) -> None:
        """Set the observer of a model's inputs, replacing the previous one; or remove it."""
        self._observers.pop(name, None)
        if observer is not None:
            self._observers[name] = observer

    def show(self, name: str, inputs: Mapping[str, NDArray[Any]], answers: NDArray[Any]) -> None:
        """Pass an answered request's inputs to its observer; remove the observer if it raises."""
        if (observer := self._observers.get(name)) is None:
            return
        try:
            observer(inputs, answers)
        except Exception:  # the request must not fail
            _log.exception("%s: the observer of its inputs failed and was removed", name)
            self._observers.pop(name, None)
