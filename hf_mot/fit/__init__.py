"""Closed-form fits of translators."""

from .closed_form import FitResult, fit
from .save import save_fit
from .weights import piece_weights

__all__ = ["FitResult", "fit", "piece_weights", "save_fit"]
