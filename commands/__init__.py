"""Shared parts of all commands: help in two layers, shell completion, pages and SVG."""
