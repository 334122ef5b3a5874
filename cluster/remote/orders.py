"""Orders to one worker: one at a time, each answered before the next."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from offramp.cluster.remote.transport import Connection, ConnectionLostError, TransportTimeoutError
from offramp.cluster.remote.worker_messages import (
    Failed,
    FrameError,
    Message,
    Ready,
    Refused,
    decode,
    encode,
)
from offramp.engine.common.errors import BackendError, WorkerLostError


class Orders:
    """The connection for a worker's orders; any thread may use it.

    ``lose`` gives up a worker that does not answer correctly; its argument is the reason, empty for
    a connection that ended.
    """

    def __init__(self, connection: Connection, lose: Callable[[str], WorkerLostError]) -> None:
        self.connection = connection
        self.lock = threading.Lock()
        """Lock that is held from the start of an order until its answer."""
        self._lose = lose

    def ask(
        self, message: Message, limit_s: float, body: bytes = b"", fds: Sequence[int] = ()
    ) -> Ready | Refused:
        """Send an order and return its answer.

        BackendError if the order fails; WorkerLostError if the answer is missing or wrong.
        """
        header = encode(message)
        with self.lock:
            try:
                if fds:
                    self.connection.send_fds(header, fds)
                else:
                    self.connection.send(header, (body,) if body else (), limit_s)
                # An answer to an order never has a body.
                answer = decode(self.connection.receive(limit_s, most_body=0).header)
            except (ConnectionLostError, FrameError, TransportTimeoutError) as error:
                gone = isinstance(error, ConnectionLostError)
                raise self._lose("" if gone else str(error)) from error
        if isinstance(answer, Failed):
            raise BackendError(answer.message)
        if not isinstance(answer, Ready | Refused):
            raise self._lose(f"it answered an order with {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """Close the connection; threads that wait for an answer see its end first."""
        with self.lock:
            self.connection.close()
