"""ONNX operators as functions on torch tensors, which keep gradients; a table a file.

An operator is found by its name, in quotes, in the table at the end of the file of its kind.
"""
