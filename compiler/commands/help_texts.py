"""Descriptions and examples that ``eecompile --help`` and its commands show."""

from __future__ import annotations

from typing import Final

COMPILE: Final = """\
Add exits to an ONNX model, train them on samples, and certify how often answers
may differ from the model's. Writes a bundle, which eeserve serves."""
COMPILE_EXAMPLES: Final = {
    "eecompile model.onnx": "what it is, what compiling takes",
    "eecompile model.onnx --data samples.npz": "writes model.ee",
    "eecompile model.onnx --data random": "a dry run that certifies nothing",
}
COMMANDS: Final = {
    "inspect": "list the cut points of a model, or the content of a bundle",
    "verify": "compare a bundle with its model on any data",
    "rehearse": "adapt a bundle to a load that has changed",
    "profile": "measure a bundle again, on this machine",
    "build": "build a bundle's TensorRT engines, on the machine with the GPU",
    "export": "write a bundle as one ONNX file, for any ONNX Runtime",
    "wrap": "make a bundle of a model as it is, without exits and data",
}
"""The other commands, a line each."""
INSPECT: Final = """\
List where a model can be cut, and why it cannot be cut elsewhere; of a bundle,
its content."""
VERIFY: Final = """\
Compare a bundle with its unmodified model: its files, the answers of its stages
in batches of many sizes, and its promise, on data of your choice. Exit status 1
if the model's end answers differently, or if more samples disagree than the
promise makes likely."""
REHEARSE: Final = """\
Adapt a bundle to a load that has changed: exits that would make batches late
move towards the model's end, thresholds are raised as far as the promise needs
on the new data, and certified on a part of it. Graphs and profile stay."""
PROFILE: Final = """\
Measure a bundle's profile again on this machine, print what its policy is
predicted to save here, and write it. Graphs, policy and promise stay."""
BUILD: Final = """\
Build the TensorRT engines of a bundle, on the machine that will serve it: of
the unmodified model, of the stages of its policy, and of every segment. They
are kept in BUNDLE/engines, by GPU, version of TensorRT and precision; engines
that still fit are not built again. Each is compared with ONNX Runtime before it
is kept."""
BUILD_EXAMPLES: Final = {
    "eecompile build model.ee": "fp32, on the first GPU",
    "eecompile build model.ee --precision fp16 --device cuda:1": "",
    "eecompile build model.ee --batch-profiles 1,2-8,9-64 --buckets sequence=32,64": "",
}
EXPORT: Final = """\
Write a bundle as one ONNX file, which runs wherever ONNX Runtime does, without
Offramp: inputs and output are the source model's, and easy samples leave early
inside the file. It is compared with the bundle on every sample of --data, and
written only if it gives the same answers at the same exits. Other servers take
it from a model repository; they do not audit answers, watch for drift or renew
certificates, as eeserve does."""
EXPORT_EXAMPLES: Final = {
    "eecompile export model.ee --data samples.npz --output fast.onnx": "",
    "eecompile export model.ee --data samples.npz --triton models --with-exits": "",
}
