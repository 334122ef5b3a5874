"""Errors of reading and writing bundles.

::

    BundleError
    ├── BundleNotFoundError     no bundle at that path
    ├── BundleIntegrityError    a file is missing, altered, foreign, or outside the bundle
    ├── BundleSchemaError       a file is whole, but not what this version understands
    ├── BundleExistsError       the place to write to is taken
    ├── BundleWriteError        the bundle could not be written there
    └── BundleBusyError         someone else is writing there
"""


class BundleError(Exception):
    """Base of all errors of :mod:`offramp.bundle`; the message names file and remedy."""


class BundleNotFoundError(BundleError):
    """There is no bundle at the path given."""


class BundleIntegrityError(BundleError):
    """The bundle on disk is not the one that was written."""


class BundleSchemaError(BundleError):
    """A file of the bundle does not have the schema that this version reads."""


class BundleExistsError(BundleError):
    """Writing would replace something, and that was not asked for."""


class BundleWriteError(BundleError):
    """The file system refused the bundle; what was there before is still there."""


class BundleBusyError(BundleError):
    """Someone else is writing there; try again later."""
