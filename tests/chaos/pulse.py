"""Asks ``ServerLive`` again and again, from a process that does nothing else.

``python -m tests.chaos.pulse ADDRESS`` writes a line a call: when it was sent (monotonic seconds),
how long it took (seconds), and its status; it ends with its standard input.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

import grpc

from offramp.proto import messages
from offramp.proto.descriptors import method_path

PERIOD_S: Final = 0.05
_LIMIT_S: Final = 5.0
"""A call that hangs ends in the run, and before the next trouble may be its excuse."""
_QUICK: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
)


def main(address: str) -> None:
    """Ask until standard input ends."""
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with grpc.insecure_channel(address, _QUICK) as channel:
        live = channel.unary_unary(
            method_path("ServerLive"),
            request_serializer=messages.ServerLiveRequest.SerializeToString,
            response_deserializer=messages.ServerLiveResponse.FromString,
        )
        while not ended.is_set():
            sent_s = time.monotonic()
            try:
                live(messages.ServerLiveRequest(), timeout=_LIMIT_S)
                status = "OK"
            except grpc.RpcError as error:
                status = error.code().name
            took_s = time.monotonic() - sent_s
            print(f"{sent_s:.6f} {took_s:.6f} {status}", flush=True)
            ended.wait(max(0.0, PERIOD_S - took_s))


if __name__ == "__main__":
    main(sys.argv[1])
