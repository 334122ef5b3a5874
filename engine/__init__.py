"""The runtime, without a network: requests in, answers out; it executes the stages of bundles.

May import: certify, bundle, engine.serving, engine.learning, engine.scheduling, engine.control,
engine.planning, engine.backends, engine.ray, engine.remote, engine.tensorrt.
"""
