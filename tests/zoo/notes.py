"""Text of ``docs/models.md`` around its table."""

HEAD = """\
# Models that were tried

Written by `python -m tests.zoo`; do not edit. Small models of each topology with random weights,
exported by both of torch's exporters (`dynamo` is the default of `torch.onnx.export`), with a batch
fixed at 1 or 2, and a dynamic one, texts and signals of a dynamic length too; some were then
quantised, rounded to half precision, or brought to other opsets; others came as files. Each was

* read, which compares rows alone and together, and with the original where the batch was fixed,
* cut at up to 12 places, and run in pieces at batches of 1, 7 and 64,
* given exits of random weights at all of these cuts, assembled into stages, and served batches of
  64, 7 and 1 by the engine's pipeline, with two policies of random thresholds: samples that leave
  have to be answered as the exit's own graph does, at the exit that their confidence says, and all
  others as the file does in plain ONNX Runtime.

*Work* is the share of FLOPs before the first and the last cut point; *error* the largest difference
in all of that, relative to the largest value; *heads* are the kinds that the exits had.
{verified} of {tried} variants pass.
"""
TAIL = """\
Known reasons, in a few words: QOperator files carry 8-bit integers between their operators, which
heads do not read; ONNX Runtime has no bfloat16 convolution on CPUs; a model of more than 2 GiB is
refused by name, and none was run.
Not tried in this run: ResNet-50, ShuffleNet, SqueezeNet, VGG-19 and
ZFNet-512 of the onnx package. Of its DenseNet-121 and Inception v2 no sample left at an exit: their
confidences were too much alike, so only their pieces and ends were compared. Rows were collected
over some hours while the trial itself was mended, not in one run."""
