"""Rivals of a translator that are none themselves: from contexts to a cache, and what that costs. One file each."""

from hf_mot.baselines.raw_copy import RawCopy
from hf_mot.baselines.ridge import Ridge, fit_ridge

__all__ = ["RawCopy", "Ridge", "fit_ridge"]
