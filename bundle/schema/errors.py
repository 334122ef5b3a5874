"""Errors of reading and writing bundles."""


class BundleError(Exception):
    """Base of all errors of :mod:`offramp.bundle`; the message names file and remedy."""


class BundleNotFoundError(BundleError):
    """There is no bundle at the path given."""


class BundleIntegrityError(BundleError):
    """A file of the bundle is missing, altered, foreign, or outside it."""


class BundleSchemaError(BundleError):
    """A file of the bundle is whole, but not what this version understands."""


class BundleExistsError(BundleError):
    """Writing would replace something, and that was not asked for."""


class BundleWriteError(BundleError):
    """The file system refused the bundle; what was there before is still there."""


class BundleBusyError(BundleError):
    """Someone else is writing there; try again later."""
