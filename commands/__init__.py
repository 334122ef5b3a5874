"""Shared parts of all commands: help in two layers, shell completion, HTML pages, inline SVG."""
