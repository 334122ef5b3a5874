"""Engines that are loaded, each once, however many stages and slots have it."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from offramp.engine.cuda.driver import Driver
from offramp.engine.errors import BackendError
from offramp.engine.tensorrt import compat
from offramp.engine.tensorrt.loading import LoadedEngine
from offramp.engine.tensorrt.lookup import Found


class Library:
    """The engines of one device; thread-safe."""

    def __init__(self, driver: Driver) -> None:
        """Begin with none."""
        self._driver = driver
        self._lock = Lock()
        self._loans: dict[str, Loan] = {}
        """By hash of the plan."""

    def take(self, found: Found) -> Loan:
        """Load an engine, unless it is there already; to be given back.

        Raises:
            BackendError: Its file is missing or altered, or TensorRT does not load it.
        """
        digest = found.entry.sha256
        with self._lock:
            loan = self._loans.get(digest)
            if loan is None:
                loan = Loan(found, self._driver, lambda: self._give_back(digest))
                self._loans[digest] = loan
            loan.users += 1
            return loan

    def close(self) -> None:
        """Check that all engines were given back."""
        if self._loans:
            raise BackendError(f"{len(self._loans)} engines are still in use")

    def _give_back(self, digest: str) -> None:
        with self._lock:
            loan = self._loans[digest]
            loan.users -= 1
            if loan.users:
                return
            del self._loans[digest]
        loan.unload()


class Loan:
    """An engine that stages share, or that slots take by turns.

    From TensorRT 10 on all slots' contexts are of one engine. In 8.6 only one context at a time
    may have a profile, so there every slot needs an engine of its own, with its weights.
    """

    def __init__(self, found: Found, driver: Driver, give_back: Callable[[], None]) -> None:
        """Load the engine.

        Raises:
            BackendError: Its file is missing or altered, or TensorRT does not load it.
        """
        self._found = found
        self._driver = driver
        self.give_back = give_back
        """The stage does not need it any more."""
        self.users = 0
        """Stages that have it."""
        self.engine = self._load()
        """What it takes and gives."""
        self._shared = compat.major() >= 10
        self._lock = Lock()
        self._idle = [self.engine]
        self._lent: list[LoadedEngine] = []

    def borrow(self) -> LoadedEngine:
        """Get the engine for a slot's contexts."""
        if self._shared:
            return self.engine
        with self._lock:
            engine = self._idle.pop() if self._idle else self._load()
            self._lent.append(engine)
            return engine

    def return_(self, engine: LoadedEngine) -> None:
        """The slot's contexts are gone; may be called again."""
        with self._lock:
            if any(lent is engine for lent in self._lent):
                self._lent.remove(engine)
                self._idle.append(engine)

    def unload(self) -> None:
        """Release what is loaded."""
        for engine in self._idle:
            engine.close()
        self._idle.clear()

    def _load(self) -> LoadedEngine:
        return LoadedEngine(self._found.read(), self._found.entry, self._driver)
