"""Serves an engine over gRPC (Open Inference Protocol) and HTTP (health, metrics, status page)."""

import os

# gRPC's core writes a line to stderr for each header that it cannot parse, past all logging; it
# looks at this once, when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
