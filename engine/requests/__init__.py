"""Requests: checks of their inputs, their answers, audits, and statistics."""
