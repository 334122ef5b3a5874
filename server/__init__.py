"""Serves an engine over gRPC (Open Inference Protocol) and HTTP (health, metrics, status page).

May import: bundle, engine, engine.backends, engine.control, engine.scheduling, proto.
"""
