"""Keeps an evaluation with a translator: in its fit report, and so in its card, and in what is published of it; a
curve in its config, for `replay="auto"` to choose by."""

import json
import os
from pathlib import Path
from typing import Any

from hf_mot.configuration_mot import MoTConfig
from hf_mot.evaluation.curve import replay_curve
from hf_mot.evaluation.files import save_report, write_whole
from hf_mot.evaluation.measure import has_crashed
from hf_mot.hub.card import render_card
from hf_mot.hub.handwriting import merge_card
from hf_mot.hub.parts import CARD, FIT_REPORT, read_report, read_text
from hf_mot.hub.resolve import load_translator_config

CONFIG = "config.json"


def record_evaluation(folder: str | os.PathLike, report: dict[str, Any]) -> bool:
    """
    Puts a report in the place of the one that the translator's fit report holds, and renders its card anew; what
    people have written in the card stays. A curve takes the place of the config's, of which nothing else is changed;
    a report without one, or with one of too few documents, leaves it as it is. Each file is written whole or not at
    all, the config first. A report of which an arm is missing never takes the place of a complete one.

    Args:
        folder (`str` or `os.PathLike`): The translator's.
        report (`dict`): What `evaluate` returned, its verdict included. The figures of each document are left out.

    Returns:
        `bool`: Whether it was recorded.

    Raises:
        ValueError: If the folder holds no translator, or a damaged fit report, or the report a damaged curve.
    """
    folder = Path(folder)
    config = load_translator_config(folder)
    fit_report, damage = read_report(folder)
    if damage:
        raise ValueError(f"{folder / FIT_REPORT} is {damage}. Fit again, or restore it.")
    known = fit_report.get("evaluation")
    if known and has_crashed(report) and not has_crashed(known):
        return False
    fit_report["evaluation"] = {key: value for key, value in report.items() if key != "documents"}
    curve, written = replay_curve(report), None
    if curve is not None:
        config = MoTConfig(**{**config.to_dict(), "replay_curve": curve})
        written = {**json.loads(read_text(folder / CONFIG)), "replay_curve": curve}
    card = folder / CARD
    text = merge_card(render_card(config, fit_report), read_text(card) if card.is_file() else None)
    if written is not None:
        save_report(dict(sorted(written.items())), folder / CONFIG)
    save_report(fit_report, folder / FIT_REPORT)
    write_whole(text, card)
    return True
