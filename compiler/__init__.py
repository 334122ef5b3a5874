"""The compiler: an ONNX model in, a verified multi-exit bundle out; the command ``eecompile``."""

from offramp.compiler.cuts.exit_placement import ExitRule

__all__ = ["ExitRule"]
