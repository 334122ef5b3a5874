"""Graphs of stages, exits and propagation, from an export with past keys and values."""
