"""
Rivals of a translator that are none themselves: from contexts to a cache, and what that costs.

One class a file, and one line in `BASELINES`, by which it is an arm of that name. Beside what the protocol
[`evaluation.batch.Baseline`] asks for, a class has `about`, what the target reads in its arm, and `is_fitted`: whether
it is made by `fit(documents, **pair, seed=…)`, and kept by `save(path)` and `load(path, translator)`; else it is made
of a translator of the pair.
"""

from hf_mot.baselines.raw_copy import RawCopy
from hf_mot.baselines.ridge import Ridge, fit_ridge

BASELINES = {"raw_copy": RawCopy, "ridge": Ridge}

__all__ = ["BASELINES", "RawCopy", "Ridge", "fit_ridge"]
