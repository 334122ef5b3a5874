"""The campaign against a worker's port: before the token is shown, and what a router says after."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Final

import numpy as np

import offramp
from offramp.bundle import Bundle
from offramp.cluster.remote.handshake import GREETING_BYTES, greet, reach_worker
from offramp.cluster.remote.listening import Admission, Listener
from offramp.cluster.remote.stage_orders import BundlesByHash, describe_stage
from offramp.cluster.remote.transport import Connection, ConnectionLostError, TransportTimeoutError
from offramp.cluster.remote.worker import Worker
from offramp.cluster.remote.worker_messages import (
    INLINE,
    Hello,
    JoinSlot,
    Ping,
    PlacedArray,
    Prepare,
    Release,
    RunStage,
    Shutdown,
    TensorForm,
    encode,
    pack_head,
)
from offramp.engine.common.errors import EngineError
from offramp.engine.stages.plan import make_plan
from offramp.testing.backend import SCRIPT
from offramp.testing.scripted_worker import ScriptedBackend
from tests.fakes import fake_plan
from tests.fuzz.campaign import WrongError
from tests.fuzz.files import one_line
from tests.fuzz.mutators import havoc

GOLDEN: Final = Path(__file__).parents[1] / "golden" / "bundle"
_TOKEN: Final = b"the-token-of-a-campaign"
_SESSION: Final = "5e55"
_LIMIT_S: Final = 10.0
_BEFORE, _ROUTER, _SLOT = b"\0", b"\1", b"\2"
"""First byte of a case: a connection's first bytes, a router's frames, or a slot's."""


class Greetings:
    """Connections to a worker that listens; one that shows no token is never served."""

    def __init__(self) -> None:
        self._answered = 0
        """Bytes that came back."""
        self._listening = socket.create_server(("127.0.0.1", 0))
        bundle = Bundle.open(GOLDEN)
        self._document, _ = describe_stage(make_plan(bundle).stages[0])
        self._admission = Admission(
            token=_TOKEN,
            context=None,
            make=lambda _hello: ScriptedBackend(),
            find=BundlesByHash([bundle]),
            admit_s=_LIMIT_S,
            silence_s=_LIMIT_S,
        )

    def seeds(self) -> Sequence[bytes]:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        hello = Hello(version=offramp.__version__, backend="scripted", threads=1)
        prepare = Prepare(stage=1, document=self._document)
        form = TensorForm(SCRIPT, np.dtype(np.float32), (2, 3))
        run = RunStage(1, 2, None, (0, 0), (PlacedArray(form, INLINE),))
        shared = run._replace(arrays=(PlacedArray(form, 64),), region=(0, 4096))
        orders = [hello, prepare, Ping(), Release(stage=1), hello, Shutdown()]
        joined = _frame(encode(JoinSlot(session=_SESSION, slot=7)))
        runs = _frame(encode(run), bytes(form.size_bytes)) + _frame(encode(shared))
        return [
            _BEFORE + greet(bytes(32)) + bytes(32),
            _BEFORE + b"GET / HTTP/1.1\r\n\r\n",
            _BEFORE + bytes.fromhex("16030100c8010000c40303") + bytes(32),
            _ROUTER + b"".join(_frame(encode(message)) for message in orders),
            _ROUTER + joined,
            _SLOT + joined + runs + runs,
        ]

    def mutate(self, case: bytes, random: Random) -> bytes:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        return case[:1] + havoc(case[1:], random)[:50_000]

    def check(self, case: bytes) -> str:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        kind, content = case[:1], case[1:]
        listener = Listener(self._listening, self._admission)
        if kind == _SLOT:
            listener._worker, listener._session = self._worker(), _SESSION
        self._answered = 0
        told = threading.Thread(target=self._tell, args=(kind, content), daemon=True)
        told.start()
        connected, _ = self._listening.accept()
        try:
            listener.attend(connected, "a peer")
        except (OSError, ConnectionLostError, TransportTimeoutError, EngineError) as error:
            return f"refused: {one_line(error)[:20]}"
        finally:
            told.join(_LIMIT_S)
            if kind not in (_ROUTER, _SLOT):
                self._check_nothing_was_served(listener)
        return f"served: {kind[0] if kind else -1}"

    def _check_nothing_was_served(self, listener: Listener) -> None:
        if listener._served or listener._worker:
            raise WrongError("a connection that showed no token was served")
        if self._answered > 2 * GREETING_BYTES:
            raise WrongError(f"{self._answered} bytes came back without a token")

    def _worker(self) -> Worker:
        """A worker with a stage, as it is when a slot joins."""
        connection, other = Connection.pair()
        connection.close()
        other.close()
        worker = Worker(connection, self._admission.make)
        worker.begin(Hello(version=offramp.__version__, backend="scripted", threads=1))
        worker._stages[1] = ScriptedBackend().prepare(fake_plan([0.9]).stages[0])
        return worker

    def _tell(self, kind: bytes, content: bytes) -> None:
        with (
            contextlib.suppress(OSError, EngineError),
            socket.create_connection(self._listening.getsockname()) as connected,
        ):
            connected.settimeout(_LIMIT_S)
            if kind in (_ROUTER, _SLOT):
                reach_worker(connected, _TOKEN, "the worker", _LIMIT_S)
            connected.sendall(content)
            connected.shutdown(socket.SHUT_WR)
            found = b""
            while some := connected.recv(1 << 16):
                found += some
            self._answered = len(found)

    def close(self) -> None:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        self._listening.close()


def _frame(header: bytes, body: bytes = b"") -> bytes:
    return pack_head(header, len(body)) + header + body
