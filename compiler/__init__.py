"""The compiler turns an ONNX model into a verified bundle with several exits: ``eecompile``."""

from offramp.compiler.cuts.exit_placement import ExitRule

__all__ = ["ExitRule"]
