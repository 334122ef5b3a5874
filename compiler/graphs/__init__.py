"""Views of ONNX graphs: dataflow, shapes, rows, weights, and the operators after the scores."""
