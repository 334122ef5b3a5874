"""Observers of what models are asked: one for each served name, whichever version answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from numpy.typing import NDArray

_log = logging.getLogger(__name__)

InputObserver: TypeAlias = Callable[[Mapping[str, NDArray[Any]], NDArray[Any]], None]
"""Called with the arrays of a request that was answered, by input, and with its first answers,
[n, …] as the model's graph has them; neither may be changed."""


class InputObservers:
    """Observers of inputs, by the model's name; used on the event loop's thread."""

    def __init__(self) -> None:
        self._observers: dict[str, InputObserver] = {}

    def set(self, name: str, observer: InputObserver | None) -> None:
        """Show a model's inputs to an observer in place of the one before, or to none."""
        self._observers.pop(name, None)
        if observer is not None:
            self._observers[name] = observer

    def show(self, name: str, inputs: Mapping[str, NDArray[Any]], answers: NDArray[Any]) -> None:
        """Show the inputs of an answered request; an observer that raises is called no more."""
        if (observer := self._observers.get(name)) is None:
            return
        try:
            observer(inputs, answers)
        except Exception:  # the request is not to blame
            _log.exception("%s: its inputs are observed no more", name)
            self._observers.pop(name, None)
