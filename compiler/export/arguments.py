"""The arguments of ``eecompile export``."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what an export takes, but the bundle."""
    # Not required=True: a repository may be all that is asked for.
    parser.add_argument("--output", type=Path, metavar="FILE.onnx", help="the file to write")
    # Not required=True: what is missing is told in one line that says why it is needed.
    parser.add_argument("--data", type=Path, metavar="NPZ",
                        help="the calibration data, to verify with: an array per input "
                        "(always needed: a bundle does not hold them)")  # fmt: skip
    parser.add_argument("--with-exits", action="store_true",
                        help="add the outputs exit (index of the exit that answered, -1 for the "
                        "model's end) and confidence")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true",
                        help="replace a file, or an exported model, that is there")  # fmt: skip
    servers = parser.add_argument_group("model repositories of other servers")
    servers.add_argument("--triton", type=Path, metavar="DIR",
                         help="write DIR/NAME for Triton's ONNX Runtime backend")  # fmt: skip
    servers.add_argument("--ovms", type=Path, metavar="DIR",
                         help="write DIR/NAME and DIR/config.json for OpenVINO Model Server; may "
                         "be the folder of --triton")  # fmt: skip
    servers.add_argument("--kserve", metavar="URI",
                         help="with --triton: write DIR/NAME.kserve.yaml too, by which KServe runs "
                         "Triton on a copy of DIR at URI")  # fmt: skip
    servers.add_argument("--name", metavar="NAME",
                         help="the model's name there (default: the bundle's)")  # fmt: skip
