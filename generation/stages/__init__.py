"""Execution of tokens: stages of decoder layers, their exits, and the caches of sequences."""
