"""What ``eecompile --help`` and its subcommands say they are for."""

from __future__ import annotations

from typing import Final

COMPILE: Final = """\
Make a multi-exit bundle of an ONNX model: slice it at its cut points, train exits on
calibration data, and certify a policy under which disagreement with the unmodified model stays
within --max-disagreement.

  eecompile model.onnx --data calibration.npz     writes model.ee
  eecompile supernet model.onnx --elastic spec.toml --data calibration.npz
                                                  takes subnets of a supernet along
  eecompile inspect model.onnx                    lists the cut points; of a bundle what is in it
  eecompile verify model.ee --data test.npz       holds a bundle against its model on any data
  eecompile rehearse model.ee --data new.npz      adapts a bundle to a load that has changed
  eecompile profile model.ee                      measures its profile anew on this machine
  eecompile build model.ee --device cuda:0        builds its TensorRT engines, where the GPU is
  eecompile export model.ee --data calibration.npz --output fast.onnx
                                                  makes one ONNX file of it, for any ONNX Runtime
  eecompile plan model.ee --cluster cluster.toml  predicts which devices should run which segments
"""
SUPERNET: Final = """\
Make a bundle of a supernet: a model that holds smaller ones in the same weights (SuperServe).
Blocks are skipped, weights are sliced to their first channels, and statistics are collected anew
for each subnet. The best trade-offs of time and agreement become variants of the bundle, each with
exits of its own; policies that choose what there is time for (--policy slackfit) serve them.

  eecompile supernet model.onnx --elastic spec.toml --data calibration.npz
"""
INSPECT: Final = (
    "List where a model can be cut, and why it cannot be cut elsewhere; of a bundle, what is in it."
)
VERIFY: Final = (
    "Hold a bundle against its unmodified model: its files, what its stages answer in batches of "
    "many sizes, and its promise, on data of your choice. Exit status 1 if the model's end answers "
    "otherwise, or if so many samples disagree as the promise makes unlikely."
)
REHEARSE: Final = (
    "Adapt a bundle to a load that has changed: exits that would make batches late move towards "
    "the model's end, thresholds are raised as far as the promise asks for on the new data, and "
    "certified on a part of it. Graphs and profile stay. What is not given is as the bundle was "
    "made."
)
PROFILE: Final = (
    "Measure a bundle's profile anew on this machine, say what its policy is predicted to save "
    "here, and write it. Graphs, policy and promise stay."
)
BUILD: Final = """\
Build the TensorRT engines of a bundle, on the machine that will serve it: of the unmodified
model, of the stages of its policy, and of every segment. They are kept in BUNDLE/engines, by
GPU, version of TensorRT and precision; what is there and still fits is not built again. Each
engine is run beside ONNX Runtime before it is kept.

  eecompile build model.ee                                     fp32, on the first GPU
  eecompile build model.ee --precision fp16 --device cuda:1
  eecompile build model.ee --batch-profiles 1,2-8,9-64 --buckets sequence=32,64,128
"""
EXPORT: Final = """\
Write a bundle as one ONNX file, which runs wherever ONNX Runtime does, without Offramp: inputs
and output are the source model's, and easy samples leave early inside the file. It is compared
with the bundle on every sample of --data, and written only if it answers the same at the same
exits.

  eecompile export model.ee --data calibration.npz --output fast.onnx
"""
PLAN: Final = """\
Plan a bundle on a cluster (E3): how many splits, which segments and exits in each, on which and
how many devices, at which batch size. Prints the plan beside the model as it is on the same
devices, and what binds. Everything is predicted, from profiles and from how many rows leave at
each exit; nothing is run. eeserve --cluster makes such plans while it serves, and serves by them.

  eecompile plan model.ee --cluster cluster.toml --slo-ms 100
  eecompile plan model.ee --cluster cluster.toml --slo-ms 100 --rate 6000 --json plan.json
"""
