"""The campaign against what a worker reads: frames, and the messages in them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from random import Random
from typing import Final

import numpy as np

from offramp.cluster.remote.served_slot import ServedSlot
from offramp.cluster.remote.stage_orders import describe_stage
from offramp.cluster.remote.transport import Connection, ConnectionLostError, Frame, SharedMemory
from offramp.cluster.remote.worker import Worker
from offramp.cluster.remote.worker_messages import (
    INLINE,
    Failed,
    FrameError,
    Hello,
    OpenSlot,
    PlacedArray,
    Prepare,
    Ready,
    Refused,
    Release,
    RunStage,
    Shutdown,
    StageDone,
    TensorForm,
    decode,
    encode,
    pack_head,
)
from offramp.testing.backend import SCRIPT
from offramp.testing.scripted_worker import ScriptedBackend
from tests.fakes import fake_plan
from tests.fuzz.campaign import WrongError
from tests.fuzz.files import one_line
from tests.fuzz.mutators import havoc

_MEMORY: Final = 4096
_FLOATS: Final = np.dtype(np.float32)
_FORM: Final = TensorForm(SCRIPT, _FLOATS, (2, 2, 2))
_SPEC: Final = fake_plan([0.9]).stages[0]


class WorkerFrames:
    """Frames as they come over a socket; orders are carried out, and stages are run."""

    def __init__(self) -> None:
        self._connection, self._other = Connection.pair()
        backend = ScriptedBackend()
        self._memory = SharedMemory.create(_MEMORY)
        stages = {1: backend.prepare(_SPEC)}
        self._slot = ServedSlot(
            self._connection,
            backend.open_slot(),
            self._memory,
            stages,
            lambda _point: None,
            device=nullcontext(),
        )

    def seeds(self) -> Sequence[bytes]:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        document, graph = describe_stage(_SPEC)
        run = RunStage(1, 2, None, (1024, 2048), (PlacedArray(_FORM, 0),))
        inline = run._replace(arrays=(PlacedArray(_FORM, INLINE),))
        answer = PlacedArray(TensorForm("", _FLOATS, (2, 2)), INLINE)
        confidence = PlacedArray(TensorForm("", _FLOATS, (2,)), INLINE)
        messages = [
            *(Hello(version="0", backend="scripted", threads=1), Shutdown(), Ready(pid=1)),
            *(Release(stage=1), OpenSlot(slot=1, size_bytes=64), Refused(reason="no")),
            *(Failed(message="no"), StageDone(answer, confidence, (PlacedArray(_FORM, 0),))),
        ]
        return [
            _frame(encode(run), b""),
            _frame(encode(inline), bytes(_FORM.size_bytes)),
            _frame(encode(Prepare(stage=2, document=document)), graph),
            *(_frame(encode(message), b"") for message in messages),
        ]

    def mutate(self, case: bytes, random: Random) -> bytes:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        if random.random() < 0.3 or len(case) < 17:
            return havoc(case, random)[:50_000]
        header_bytes = int.from_bytes(case[4:8], "little")
        header, body = case[16 : 16 + header_bytes], case[16 + header_bytes :]
        changed = havoc(header, random)[:20_000]
        if random.random() < 0.2:
            body = havoc(body, random)[:20_000]
        return _frame(changed or b"\0", body)

    def check(self, case: bytes) -> str:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        connection, other = Connection.pair()
        try:
            with other:
                other.sendall(case)
            frame = connection.receive(10.0)
        except ConnectionLostError as error:
            return f"no frame: {one_line(error)[:20]}"
        finally:
            connection.close()
        return self._feed(frame)

    def _feed(self, frame: Frame) -> str:
        try:
            message = decode(frame.header)
        except FrameError as error:
            one_line(error)
            return "no message"
        if not isinstance(message, RunStage | StageDone) and decode(encode(message)) != message:
            raise WrongError(f"{message} is read as another message")
        if isinstance(message, RunStage):
            return self._run(frame)
        if isinstance(message, OpenSlot | Shutdown):  # their descriptors would be others'
            return type(message).__name__
        worker = Worker(self._connection, lambda _hello: ScriptedBackend())
        worker._backend = ScriptedBackend()
        answer = worker._execute(message, frame)
        if not isinstance(answer, Ready | Refused | Failed):
            raise WrongError(f"{message} is answered by {answer}")
        return f"{type(message).__name__}: {type(answer).__name__}"

    def _run(self, frame: Frame) -> str:
        before = bytes(self._memory.array(TensorForm("", np.dtype(np.uint8), (_MEMORY,)), 0))
        message = decode(frame.header)
        assert isinstance(message, RunStage)
        answer = decode(self._slot._answer(frame)[0])
        after = bytes(self._memory.array(TensorForm("", np.dtype(np.uint8), (_MEMORY,)), 0))
        start, size = message.region
        if (before[:start], before[start + size :]) != (after[:start], after[start + size :]):
            raise WrongError(f"a worker wrote outside of {message.region}")
        if not isinstance(answer, StageDone | Failed):
            raise WrongError(f"a run is answered by {answer}")
        return f"run: {type(answer).__name__}"

    def close(self) -> None:
        """See :class:`tests.fuzz.campaign.Campaign`."""
        self._connection.close()
        self._other.close()
        os.close(self._memory.fd)


def _frame(header: bytes, body: bytes) -> bytes:
    return pack_head(header, len(body)) + header + body
