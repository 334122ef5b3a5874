"""Topologies of the models that people have, exported, read, cut and verified.

``python -m tests.zoo > docs/models.md`` runs all of it and writes the page.
"""
