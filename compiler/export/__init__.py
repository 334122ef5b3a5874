"""A bundle as one ONNX file that needs nothing of Offramp where it runs."""
