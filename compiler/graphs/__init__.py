"""Views of ONNX graphs: dataflow, shapes, rows, weights, and what follows the scores."""
