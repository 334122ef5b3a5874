"""Criteria that are computed from an exit's answers on the host: patience, and users' own.

A criterion whose decision depends on earlier exits has a state for each sample, arrays [b, …] by
name. The state is stored with the tensors of the batch, so that all code that selects, buffers or
merges rows does the same with the state (E3 3.4 wraps exits of both styles). Users register their
own criteria, also with ``--criterion-module FILE.py:NAME`` of ``eecompile`` and ``eeserve``::

    @register("two-sure")
    def two_sure(answers):
        ...  # float32 [b, classes], in the form of the model's answers → float32 [b] in [0, 1]
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from offramp.bundle.schema.answers import BUILT_IN, IN_GRAPH, PATIENCE, Criterion
from offramp.engine.common.errors import EngineError

_log = logging.getLogger(__name__)

State: TypeAlias = dict[str, NDArray[Any]]
"""State of each sample between exits: arrays [b, …] by name; empty at the first exit."""
STATE: Final = "offramp/state/"
"""Prefix of the names of state arrays among a batch's tensors."""
_LOG_EVERY_S = 10.0


class CriterionError(EngineError):
    """A criterion is unknown, or its function returned invalid confidences."""


class HostCriterion(NamedTuple):
    """A function that computes the confidence of exits."""

    name: str
    function: Callable[..., Any]
    """Maps answers [b, classes] to float32 [b] from 0 to 1. If it depends on earlier exits, it maps
    answers and state to confidence and the state for the next exit."""
    depends_on_earlier: bool

    def apply(self, answer: NDArray[Any], state: State) -> tuple[NDArray[np.float32], State]:
        """Return the confidence of answers [b, classes] and the state after them.

        The function receives a read-only float32 copy of the answers. CriterionError if it fails.
        """
        given = answer.astype(np.float32)
        given.setflags(write=False)
        try:
            if self.depends_on_earlier:
                confidence, state = self.function(given, state)
                state = {str(name): np.asarray(value) for name, value in state.items()}
            else:
                confidence = self.function(given)
            confidence = np.asarray(confidence, np.float32)
        except Exception as error:  # users' code
            raise CriterionError(f"criterion {self.name}: its function raised {error!r}") from error
        rows = len(answer)
        if confidence.shape != (rows,) or not ((confidence >= 0) & (confidence <= 1)).all():
            found = f"of shape {list(confidence.shape)}"
            if confidence.size:
                found += f" from {confidence.min():g} to {confidence.max():g}"
            raise CriterionError(
                f"criterion {self.name}: confidences are {found}, expected [{rows}] from 0 to 1 "
                "without NaN"
            )
        wrong = [name for name, value in state.items() if value.shape[:1] != (rows,)]
        if wrong:
            raise CriterionError(
                f"criterion {self.name}: state {wrong[0]!r} has the shape "
                f"{list(state[wrong[0]].shape)}, expected [{rows}, …]"
            )
        return confidence, state

    def serve(self, answer: NDArray[Any], state: State) -> tuple[NDArray[np.float32], State]:
        """Call :meth:`apply`; if it fails, no sample exits, and a log line may say so.

        The confidences are then 0, and the state is empty. The number of log lines is limited.
        """
        if self.function is patience:  # needs no checks, which cost more than the function
            return patience(answer, state)
        try:
            return self.apply(answer, state)
        except CriterionError as error:
            if _due(self.name):
                _log.warning("%s; none of %d samples leaves there", error, len(answer))
            return np.zeros(len(answer), np.float32), {}


def patience(answers: NDArray[np.float32], state: State) -> tuple[NDArray[np.float32], State]:
    """Return the number of exits in a row with the same class, as n / (n + 1) (PABEE 3.3).

    n is PABEE's counter: 0 at the first exit, plus 1 if the class equals that of the exit before,
    else 0 again. So patience k is the threshold k / (k + 1), and the log-odds of the confidence are
    log n. An answer with NaN agrees with no other answer.
    """
    classes = answers.argmax(axis=1)
    # The first NaN counts as the largest.
    classes[np.isnan(answers[np.arange(len(classes)), classes])] = -1
    return patience_of_classes(classes, state)


def patience_of_classes(
    classes: NDArray[np.integer[Any]], state: State
) -> tuple[NDArray[np.float32], State]:
    """Compute :func:`patience` from classes [b]; −1 stands for an answer without a class."""
    counter = np.zeros(len(classes), np.int64)
    if state:
        same = (classes == state["class"]) & (classes >= 0)
        counter = np.where(same, state["counter"] + 1, 0)
    count = counter.astype(np.float32)
    return count / (count + np.float32(1)), {"class": classes, "counter": counter}


_REGISTERED: dict[str, HostCriterion] = {
    PATIENCE: HostCriterion(PATIENCE, patience, depends_on_earlier=True)
}
_modules: list[str] = []
"""Arguments of :func:`load_criterion`, for other processes that need the same criteria."""
_last_logged: dict[str, float] = {}
_lock = threading.Lock()


def register(
    name: str, function: Callable[..., Any] | None = None, *, depends_on_earlier: bool = False
) -> Any:
    """Register a function as a criterion, or decorate one; ValueError if the name is taken.

    A function that ``depends_on_earlier`` exits takes answers and state, and returns confidence and
    state (:data:`State`).
    """
    if function is None:
        return lambda given: register(name, given, depends_on_earlier=depends_on_earlier)
    if name in BUILT_IN:
        raise ValueError(f"criterion {name!r} is built in; take another name")
    Criterion(name=name, depends_on_earlier=depends_on_earlier)  # checks the name
    _REGISTERED[name] = HostCriterion(name, function, depends_on_earlier)
    return function


def known_criterion(name: str) -> Criterion:
    """Return a criterion by its name; CriterionError if there is none."""
    if name in IN_GRAPH:
        return Criterion(name=name)
    if name not in _REGISTERED:
        names = ", ".join([*IN_GRAPH, *_REGISTERED])
        raise CriterionError(
            f"no criterion is called {name!r}; there are {names}; add your own with "
            "--criterion-module FILE.py:NAME"
        )
    return Criterion(name=name, depends_on_earlier=_REGISTERED[name].depends_on_earlier)


def host_criterion(criterion: Criterion) -> HostCriterion | None:
    """Return a criterion's function (``None``: graphs compute it); CriterionError if unknown."""
    if not criterion.on_host:
        return None
    found = _REGISTERED.get(criterion.name)
    if found is None:
        raise CriterionError(
            f"the bundle's exits use the criterion {criterion.name!r}, which is not "
            "registered; pass its file: --criterion-module FILE.py:NAME"
        )
    if found.depends_on_earlier != criterion.depends_on_earlier:
        raise CriterionError(
            f"criterion {criterion.name!r} is registered with depends_on_earlier="
            f"{found.depends_on_earlier}, and the bundle was compiled with "
            f"{criterion.depends_on_earlier}; register it as it was, or compile again"
        )
    return found


def load_criterion(text: str) -> str:
    """Run ``FILE.py:NAME``, and register its function of this name if the file did not.

    Returns the criterion's name; CriterionError if file or function cannot be loaded.
    """
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not name or not path.is_file():
        raise CriterionError(
            f"--criterion-module {text}: expected FILE.py:NAME, with an existing file"
        )
    spec = importlib.util.spec_from_file_location(f"offramp_criterion_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CriterionError(f"--criterion-module {text}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # users' code
        raise CriterionError(f"--criterion-module {text}: {error!r}") from error
    function = getattr(module, name, None)
    if name not in _REGISTERED and not callable(function):
        raise CriterionError(
            f"--criterion-module {text}: the file registers no criterion {name!r}, and has no "
            "function of that name"
        )
    try:
        if name not in _REGISTERED:
            register(name, function)
    except ValueError as error:
        raise CriterionError(f"--criterion-module {text}: {error}") from error
    _modules.append(text)
    return name


def criterion_modules() -> tuple[str, ...]:
    """Return the arguments of :func:`load_criterion` so far, in order."""
    return tuple(_modules)


def state_in(tensors: Mapping[str, NDArray[Any]]) -> State:
    """Return the criterion's state from a batch's tensors."""
    return {n.removeprefix(STATE): array for n, array in tensors.items() if n.startswith(STATE)}


def _due(name: str) -> bool:
    """Return whether a failure may be logged again."""
    with _lock:
        now_s = time.monotonic()
        if now_s - _last_logged.get(name, -_LOG_EVERY_S) < _LOG_EVERY_S:
            return False
        _last_logged[name] = now_s
        return True
