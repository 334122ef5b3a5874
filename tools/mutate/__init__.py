"""Mutation testing: ``python -m offramp.tools.mutate``; see :mod:`.__main__`."""
