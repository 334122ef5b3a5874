"""The artifact that ``eecompile`` writes and ``eeserve`` loads; imports only numpy.

May import: certify.
"""

from offramp.bundle.bundle import Bundle
from offramp.bundle.cpu import CpuFeatures
from offramp.bundle.errors import (
    BundleBusyError,
    BundleError,
    BundleExistsError,
    BundleIntegrityError,
    BundleNotFoundError,
    BundleSchemaError,
    BundleWriteError,
)
from offramp.bundle.input_ranges import InputRange, InputRanges, LengthRange
from offramp.bundle.manifest import Answer, AnswerForm, Manifest, TensorSpec, UnreadInput
from offramp.bundle.measured import Measured, MeasuredSize, Ratio
from offramp.bundle.padding import Padding
from offramp.bundle.parts import Exit, Head, Segment, Variant
from offramp.bundle.policy import NEVER, ActiveExit, ExitPolicy, Promise
from offramp.bundle.profile import Profile, Spread
from offramp.bundle.tasks import CLASSIFICATION, AnswerTask, TaskKind
from offramp.bundle.value_bounds import ValueBound
from offramp.bundle.weight_sharing import SharingCost
from offramp.bundle.writing import write_bundle

__all__ = [
    "CLASSIFICATION",
    "NEVER",
    "ActiveExit",
    "Answer",
    "AnswerForm",
    "AnswerTask",
    "Bundle",
    "BundleBusyError",
    "BundleError",
    "BundleExistsError",
    "BundleIntegrityError",
    "BundleNotFoundError",
    "BundleSchemaError",
    "BundleWriteError",
    "CpuFeatures",
    "Exit",
    "ExitPolicy",
    "Head",
    "InputRange",
    "InputRanges",
    "LengthRange",
    "Manifest",
    "Measured",
    "MeasuredSize",
    "Padding",
    "Profile",
    "Promise",
    "Ratio",
    "Segment",
    "SharingCost",
    "Spread",
    "TaskKind",
    "TensorSpec",
    "UnreadInput",
    "ValueBound",
    "Variant",
    "write_bundle",
]
