"""Diagnostics: where a translation loses what it loses."""

from .sensitivity import measure_sensitivity

__all__ = ["measure_sensitivity"]
