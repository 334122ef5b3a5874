"""Exit thresholds: tuned on a window, or certified for unseen data. Sans I/O, numpy only.

Confidence is in [0, 1], higher is surer; a sample exits at the first exit whose confidence
reaches its threshold.
"""

from offramp.engine.control.agreement import (
    AgreementCurve,
    common_path,
    fit_agreement,
    path_levels,
)
from offramp.engine.control.binomial import (
    allowed_errors,
    binomial_cdf,
    samples_needed,
    upper_bound,
)
from offramp.engine.control.certify import Certificate, certify
from offramp.engine.control.path import Walk, walk
from offramp.engine.control.records import Outcome, Records, evaluate
from offramp.engine.control.thresholds import METHODS, Tuning, tune

__all__ = [
    "METHODS",
    "AgreementCurve",
    "Certificate",
    "Outcome",
    "Records",
    "Tuning",
    "Walk",
    "allowed_errors",
    "binomial_cdf",
    "certify",
    "common_path",
    "evaluate",
    "fit_agreement",
    "path_levels",
    "samples_needed",
    "tune",
    "upper_bound",
    "walk",
]
