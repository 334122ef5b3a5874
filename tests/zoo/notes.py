"""Text of ``docs/models.md`` around its table."""

HEAD = """\
# Models that were tried

Written by `python -m tests.zoo`; do not edit. Small models of each topology with random weights are
exported by both of torch's exporters (`dynamo` is the default of `torch.onnx.export`): with a batch
size fixed at 1 or 2, and with a dynamic one; texts and signals also with a dynamic length. Some are
then quantised, rounded to half precision, or converted to other opsets; others are given as files.
Each model is

* read: rows alone are compared with rows together, and with the original if its batch was fixed,
* cut at up to 12 places, and run in pieces at batches of 1, 7 and 64,
* given exits of random weights at all of these cuts, assembled into stages, and served batches of
  64, 7 and 1 by the engine's pipeline, with two policies of random thresholds: a sample must leave
  at the exit that its confidences determine, with the answer that the exit's own graph computes;
  all others must get the file's answer in plain ONNX Runtime.

*Work* is the share of FLOPs before the first and the last cut point. *Error* is the largest
difference in all of these comparisons, relative to the largest value. *Heads* are the kinds of the
exits' heads.
{verified} of {tried} variants pass.
"""
TAIL = """\
Reasons, in short: QOperator files carry 8-bit integers between their operators, which heads do not
read; ONNX Runtime has no bfloat16 convolution on CPUs; no model of more than 2 GiB was among these
([how they are compiled](compiling.md#models-beyond-2-gib)).
Not tried in this run: ResNet-50, ShuffleNet, SqueezeNet, VGG-19 and ZFNet-512 of the onnx package.
No sample of its DenseNet-121 and Inception v2 left at an exit, because their confidences were too
similar, so only their pieces and ends were compared. The rows were collected over some hours in
which the test itself was corrected, not in one run."""
