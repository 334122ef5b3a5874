"""ONNX files that are served unchanged, each wrapped into a bundle without exits.

::

    wrapping    one file: the process that wraps it, and its errors
    folder      the temporary folder of the bundles that one engine serves

The compiler is run as a program: nothing here imports onnx.
"""

from offramp.engine.onnx_files.wrapped_folder import WrappedFiles
from offramp.engine.onnx_files.wrapping import OnnxFileError, is_onnx_file, wrap

__all__ = ["OnnxFileError", "WrappedFiles", "is_onnx_file", "wrap"]
