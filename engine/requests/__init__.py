"""Requests and what is counted of them: input checks, answers, audits, statistics."""
