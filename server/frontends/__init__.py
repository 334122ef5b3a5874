"""Front ends: processes that hold the gRPC port's connections for the engine's process.

A front end handles HTTP/2 and TLS, and forwards messages unchanged. Admission, counting and
answering happen in the engine's process, in the same handlers as without front ends.
"""
