"""The statistics of early exits: a bound on how often answers differ from the unmodified model's.

A multi-exit model has exits 0, 1, … before its end. Each computes an answer with a confidence in
[0, 1]; a sample leaves at the first exit whose confidence reaches the exit's threshold. The *loss*
of a sample is 1 if its answer differs from the answer of the model's end, else 0. The mean loss
over the population is the *disagreement*, or risk, of the thresholds. This package finds thresholds
for which "the disagreement is at most ε" holds with confidence 1 − α. It needs numpy alone:

>>> import numpy as np
>>> from offramp.certify import certify, tuning_path
>>> rng = np.random.default_rng(0)
>>> ease = rng.normal(size=6_000)  # two exits; easier samples: more confidence and agreement
>>> confidence = 1 / (1 + np.exp(-(3 + 3 * ease + rng.normal(size=(2, 6_000)))))
>>> agrees = rng.random((2, 6_000)) < confidence
>>> tune, unseen = slice(3_000), slice(3_000, None)
>>> path = tuning_path(confidence[:, tune], agrees[:, tune])
>>> found = certify(path, confidence[:, unseen], agrees[:, unseen], max_disagreement=0.02)
>>> found.errors, found.samples, found.p_value <= 0.05
(46, 3000, True)

**Once, from recorded samples** (:mod:`.learn_then_test`; Learn then Test, Angelopoulos, Bates,
Candès, Jordan, Lei 2021). One split of the data fixes a path of thresholds, from conservative to
aggressive: a logistic curve per exit turns confidence into a probability of agreement
(:mod:`.agreement`), and one level u moves all thresholds. The disagreement of one level after
another is tested on a second split, each with an exact binomial test at α, until one fails.
*Theorem:* with probability at least 1 − α over the second split, the disagreement of the last level
that passed is at most ε. *Assumptions:* the samples of that split and those served later are
independent draws from one distribution, and no part of the path was fitted on that split.

**Always, while serving** (:mod:`.threshold_path`; anytime-valid testing by betting, Ville 1939,
Waudby-Smith and Ramdas 2024). A sample that was answered early runs on to the model's end with a
known probability q; this is decided before the sample is started. Its loss divided by q, or 0 if it
did not run on, has the same mean as the loss, whichever policy is active. These losses are the
outcomes of bets against every level of a path (:mod:`.betting`). A level passes once the wealth of
its bets, and of the bets against every level before it, has reached 1/α. *Theorem:* with
probability at least 1 − α, no level with a disagreement of ε or more ever passes. So results may be
examined after every sample, and thresholds may be changed any number of times. *Assumptions:*
samples are exchangeable while a path is in use, and audits depend on q alone. A change of the
inputs breaks the first assumption: a new path must then be started, with its own share of α.

The modules, lowest layer first: :mod:`.decision` (the exit decision), :mod:`.records` and
:mod:`.observations` (samples recorded at all exits, and samples as they were served), :mod:`.path`
(exits and errors at every level of a path), :mod:`.agreement` (fitting paths), :mod:`.binomial` and
:mod:`.betting` (tests), :mod:`.learn_then_test` and :mod:`.threshold_path` (tested paths). The
package imports nothing else of Offramp, so that the compiler, calibration, bundles and the engine
may all import it.
"""

from offramp.certify.agreement import (
    AgreementCurve,
    common_path,
    fit_agreement,
    fit_curves,
    tuning_path,
)
from offramp.certify.binomial import allowed_errors, binomial_cdf, samples_needed, upper_bound
from offramp.certify.decision import (
    MODEL_END,
    NEVER,
    BoolArray,
    ConfidenceArray,
    Float32Array,
    FloatArray,
    IntArray,
    count_answers,
    first_exit,
    leaves,
    reaches,
)
from offramp.certify.learn_then_test import Certificate, Stratum, certify
from offramp.certify.observations import UNKNOWN, Observations, Weighted, Window
from offramp.certify.path import Walk, walk
from offramp.certify.records import Evaluation, Records, evaluate, savings_of
from offramp.certify.threshold_path import ThresholdPath

__all__ = [
    "MODEL_END",
    "NEVER",
    "UNKNOWN",
    "AgreementCurve",
    "BoolArray",
    "Certificate",
    "ConfidenceArray",
    "Evaluation",
    "Float32Array",
    "FloatArray",
    "IntArray",
    "Observations",
    "Records",
    "Stratum",
    "ThresholdPath",
    "Walk",
    "Weighted",
    "Window",
    "allowed_errors",
    "binomial_cdf",
    "certify",
    "common_path",
    "count_answers",
    "evaluate",
    "first_exit",
    "fit_agreement",
    "fit_curves",
    "leaves",
    "reaches",
    "samples_needed",
    "savings_of",
    "tuning_path",
    "upper_bound",
    "walk",
]
