"""The promise: what exits decide on recorded samples, and what can be said of samples unseen.

Confidence is in [0, 1], higher is surer; a sample exits at the first exit whose confidence
reaches its threshold.
"""

from offramp.certify.agreement import (
    AgreementCurve,
    common_path,
    fit_agreement,
    path_levels,
)
from offramp.certify.binomial import (
    allowed_errors,
    binomial_cdf,
    samples_needed,
    upper_bound,
)
from offramp.certify.learn_then_test import Certificate, certify
from offramp.certify.path import Walk, walk
from offramp.certify.records import Outcome, Records, evaluate

__all__ = [
    "AgreementCurve",
    "Certificate",
    "Outcome",
    "Records",
    "Walk",
    "allowed_errors",
    "binomial_cdf",
    "certify",
    "common_path",
    "evaluate",
    "fit_agreement",
    "path_levels",
    "samples_needed",
    "upper_bound",
    "walk",
]
