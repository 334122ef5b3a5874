"""Front ends: processes that hold the connections of the gRPC port, before the one that answers.

A front end speaks HTTP/2 and TLS, and passes messages on as they are. What may come in, what is
counted and what is answered is decided in the engine's process, by the very handlers that answer
without front ends.
"""
