"""Closed-form fits of translators."""

from .closed_form import FitResult, fit
from .save import save_fit
from .weights import loss_weights, piece_weights

__all__ = ["FitResult", "fit", "loss_weights", "piece_weights", "save_fit"]
