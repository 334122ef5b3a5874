"""The artifact that ``eecompile`` writes and ``eeserve`` loads; imports only numpy."""

from offramp.bundle.bundle import Bundle
from offramp.bundle.schema.answers import CLASSIFICATION, Answer, AnswerForm, AnswerTask, TaskKind
from offramp.bundle.schema.compilation import CpuFeatures, SharingCost
from offramp.bundle.schema.errors import (
    BundleBusyError,
    BundleError,
    BundleExistsError,
    BundleIntegrityError,
    BundleNotFoundError,
    BundleSchemaError,
    BundleWriteError,
)
from offramp.bundle.schema.inputs import (
    InputRange,
    InputRanges,
    LengthRange,
    Padding,
    TensorSpec,
    UnreadInput,
    ValueBound,
)
from offramp.bundle.schema.manifest import Manifest
from offramp.bundle.schema.measured import Measured, MeasuredSize, Profile, Ratio, Spread
from offramp.bundle.schema.parts import Exit, Head, Segment, Variant
from offramp.bundle.schema.policy import NEVER, ActiveExit, ExitPolicy, Promise
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
