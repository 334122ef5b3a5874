"""The wire protocol: the Open Inference Protocol (KServe v2), as Triton's clients speak it.

The schema is ``inference.proto``; ``python -m offramp.proto.generate`` compiles it.
:mod:`offramp.proto.messages` holds the message classes, :mod:`offramp.proto.tensors` converts
tensors from and to numpy.
"""
