"""Serves an engine over gRPC (Open Inference Protocol) and HTTP (health, metrics, status page)."""

import os

# gRPC's core writes a line to stderr for each header that it cannot parse, and bypasses logging. It
# reads this variable once, at import.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
