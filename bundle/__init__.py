"""The artifact that ``eecompile`` writes and ``eeserve`` loads; imports only numpy."""

from offramp.bundle.bundle import Bundle
from offramp.bundle.schema.cpu import CpuFeatures
from offramp.bundle.schema.errors import (
    BundleBusyError,
    BundleError,
    BundleExistsError,
    BundleIntegrityError,
    BundleNotFoundError,
    BundleSchemaError,
    BundleWriteError,
)
from offramp.bundle.schema.input_ranges import InputRange, InputRanges, LengthRange
from offramp.bundle.schema.manifest import Answer, AnswerForm, Manifest, TensorSpec, UnreadInput
from offramp.bundle.schema.measured import Measured, MeasuredSize, Ratio
from offramp.bundle.schema.padding import Padding
from offramp.bundle.schema.parts import Exit, Head, Segment, Variant
from offramp.bundle.schema.policy import NEVER, ActiveExit, ExitPolicy, Promise
from offramp.bundle.schema.profile import Profile, Spread
from offramp.bundle.schema.tasks import CLASSIFICATION, AnswerTask, TaskKind
from offramp.bundle.schema.value_bounds import ValueBound
from offramp.bundle.schema.weight_sharing import SharingCost
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
