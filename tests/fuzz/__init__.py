"""Campaigns that feed everything that reads bytes with broken ones: ``python -m tests.fuzz``."""
