"""ONNX graphs trained in torch: bridges, and copies of a model with their exits."""
