"""Closed-form fits of translators."""

from .closed_form import FitResult, fit
from .save import save_fit

__all__ = ["FitResult", "fit", "save_fit"]
