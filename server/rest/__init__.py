"""The Open Inference Protocol over HTTP, implemented by the same code as over gRPC."""
