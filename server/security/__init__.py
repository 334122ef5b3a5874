"""Certificates and tokens: who may connect, and which calls a client may make."""
