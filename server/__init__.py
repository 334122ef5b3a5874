"""Serves an engine over gRPC (Open Inference Protocol) and HTTP (health, metrics, status page)."""
