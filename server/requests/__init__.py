"""Requests: their admission, their bytes as calls of the engine, and results as responses."""
