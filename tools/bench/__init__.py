"""``eebench``: measures and simulates bundles and servers; every figure names its origin.

May import: commands, certify, bundle, client, engine, engine.backends, engine.control,
engine.planning, engine.scheduling, engine.tensorrt, calibration, compiler, compiler.data, proto.
"""
