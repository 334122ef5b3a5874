"""Certificates and tokens: who may connect, and who may call what."""
