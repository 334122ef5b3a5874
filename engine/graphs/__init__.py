"""Graphs of stages, assembled from a bundle's segments and exits."""
