"""Export of a bundle as one ONNX file that runs without Offramp."""
