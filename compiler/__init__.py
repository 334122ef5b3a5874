"""ONNX in, bundle out."""
