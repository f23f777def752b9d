"""Diagnostics: where a translation loses what it loses."""

from .plots import plot_sensitivity, plot_windows
from .sensitivity import measure_sensitivity

__all__ = ["measure_sensitivity", "plot_sensitivity", "plot_windows"]
