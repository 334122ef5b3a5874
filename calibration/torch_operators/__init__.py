"""ONNX operators as functions on torch tensors, which keep gradients; each file has a table.

To find an operator, search for its name, in quotes, in the tables at the end of these files.
"""
