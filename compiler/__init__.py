"""The compiler: an ONNX model in, a verified multi-exit bundle out; the command ``eecompile``.

May import: certify, bundle, commands, engine, engine.backends, engine.control, engine.kernels,
engine.planning, engine.tensorrt, calibration, calibration.rehearsal, compiler.data, proto.
"""

from offramp.compiler.placement import ExitRule

__all__ = ["ExitRule"]
