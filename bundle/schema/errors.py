"""Errors of reading and writing bundles."""


class BundleError(Exception):
    """Base of all errors of :mod:`offramp.bundle`; the message names file and remedy."""


class BundleNotFoundError(BundleError):
    """No bundle exists at the given path."""


class BundleIntegrityError(BundleError):
    """A file of the bundle is missing, altered, not listed, or outside the bundle."""


class BundleSchemaError(BundleError):
    """A file of the bundle is intact, but not of a form that this version reads."""


class BundleExistsError(BundleError):
    """Writing would replace a file or folder, and the caller did not ask for that."""


class BundleWriteError(BundleError):
    """The file system refused to write; a previous bundle is still there."""


class BundleBusyError(BundleError):
    """Another process is writing there; try again later."""
