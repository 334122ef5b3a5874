"""A real server under load while everything around it goes wrong: ``python -m tests.chaos``."""
