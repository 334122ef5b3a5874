"""Graphs of stages, exits and propagation, made from an export with past keys and values."""
