"""What goes wrong on the way from the kernels' sources to a cubin.

::

    BackendError
    ├── KernelCompilerNotFoundError  neither nvcc nor NVRTC is here
    └── KernelCompileError           a compiler is here, but gave no cubin
"""

from offramp.engine.errors import BackendError


class KernelCompilerNotFoundError(BackendError):
    """No CUDA compiler can be found; the message says where was looked and what to install."""


class KernelCompileError(BackendError):
    """The compilers cannot make the kernels for a GPU; the message has what they said."""
