"""The Open Inference Protocol over HTTP, by the same code that answers it over gRPC."""
