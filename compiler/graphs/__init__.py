"""Views of ONNX graphs: dataflow, shapes, rows, weights, and operators after the scores."""
