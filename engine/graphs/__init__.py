"""Graphs of stages, put together from a bundle's segments and exits."""
