"""What a translator is measured against, kept in its folder: the twin without source, and fitted baselines."""

import argparse
import os
from typing import Any


def check_corpus(translator: Any, files: list[str]) -> None:
    """`--fit-text` must be the text that the fit report names, that of a training included: else overlap and rivals
    would be of another."""
    from hf_mot.cli.fit import describe_file

    report = translator.fit_report or {}
    read = [*report.get("corpus", []), *report.get("training", {}).get("corpus", [])]
    expected = {entry["sha256"]: entry["name"] for entry in read if "sha256" in entry}
    given = {describe_file(path)["sha256"]: path for path in files}
    if expected and expected.keys() != given.keys():
        missing = [name for digest, name in expected.items() if digest not in given]
        other = [os.path.basename(path) for digest, path in given.items() if digest not in expected]
        raise ValueError(
            "`--fit-text` must be what the translator was fitted on"
            + (f"; missing: {', '.join(missing)}" if missing else "")
            + (f"; not of it: {', '.join(other)}" if other else "")
            + "."
        )


def has_twin(name: str) -> bool:
    return not os.path.isdir(name) or os.path.isdir(os.path.join(name, "no_source"))


def must_refit(args: argparse.Namespace, translator: Any) -> bool:
    """Whether the twin is to be made of `--fit-text`. Raises `ValueError` for one that no fit makes."""
    if not args.fit_text or has_twin(args.translator):
        return False
    if not can_refit(translator):
        raise ValueError(
            f"`--arms` holds no_source, but there is no twin in {args.translator}/no_source, and a twin of a trained "
            "translator is trained, not fitted. Train both with hf-mot train … --twin; or choose --arms "
            "without no_source."
        )
    return True


def load_twin(name: str):
    """The translator's twin without source, which a fit saves beside it."""
    from hf_mot.hub.resolve import load_translator

    way_out = (
        "Fit again (hf-mot fit writes it), give --fit-text, or choose --arms without no_source. The twin of a trained "
        "translator is trained with it, by hf-mot train … --twin."
    )
    missing = f"`--arms` holds no_source, but there is no twin in {name}/no_source. {way_out}"
    if not has_twin(name):
        raise ValueError(missing)
    if os.path.isdir(name):
        return load_translator(os.path.join(name, "no_source"))
    try:
        return load_translator(name, subfolder="no_source")
    except OSError as error:
        raise ValueError(missing) from error


def can_refit(translator: Any) -> bool:
    """Whether it is what a closed-form fit makes, and so its twin too."""
    config, report = translator.config, translator.fit_report or {}
    # A fit translates all layers, or all above the one that it reads, or below the one that the target resumes from.
    window = config.target_layers is not None and config.target_hidden_layer is None and config.resume_layer is None
    return config.method == "reduced_rank" and not window and "training" not in report


def refit_twin(name: str, translator: Any, corpus: Any, pair: dict[str, Any]):
    """The same method at the same budget without source features, kept beside the translator."""
    from hf_mot.fit import fit

    report, config = translator.fit_report or {}, translator.config
    as_named = ("seed", "piece_weights", "key_metric", "max_parameters", "flops_share", "held_out_documents")
    recorded = {"max_tokens": "tokens", **{name: name for name in as_named}}
    options = {name: report[key] for name, key in recorded.items() if key in report}
    twin = fit(
        corpus,
        **pair,
        method=config.method,
        rank=report.get("max_rank", config.rank),
        source_layers=[],
        embedding_window=config.embedding_window,
        target_hidden_layer=config.target_hidden_layer,
        restored_layers=config.restored_layers,
        resume_layer=config.resume_layer,
        key_norms="key_norms" in report,  # an empty list where the target's keys share no length
        **options,
    ).translator
    twin.save_pretrained(os.path.join(name, "no_source"))
    return twin


def load_baselines(args: argparse.Namespace, arms: list[str], translator: Any) -> dict[str, Any]:
    """The baselines among `arms` that need no fit any more. Raises `ValueError` where one cannot be fitted either."""
    from hf_mot.baselines import BASELINES

    baselines: dict[str, Any] = {}
    for name, baseline in BASELINES.items():
        kept = _baseline_file(args.translator, name)
        if name not in arms:
            continue
        if not baseline.is_fitted:
            baselines[name] = baseline(translator)
        elif os.path.isfile(kept):
            baselines[name] = baseline.load(kept, translator)
            fitted_on, corpora = baselines[name].report.get("corpus"), _corpora(args)
            if corpora and fitted_on not in (None, corpora):
                raise ValueError(
                    f"{kept} was fitted on {', '.join(entry['name'] for entry in fitted_on)}, and `--fit-text` is not "
                    "that. Remove it, and it is fitted anew."
                )
        elif not args.fit_text:
            raise ValueError(f"`--arms` holds {name}, which is fitted first. Give --fit-text, or leave the arm out.")
    return baselines


def fit_baseline(args: argparse.Namespace, name: str, corpus: Any, pair: dict[str, Any]):
    """One on the text of `--fit-text`, kept beside the translator where that is a folder."""
    from hf_mot.baselines import BASELINES

    baseline = BASELINES[name].fit(corpus, **pair, seed=args.seed)
    baseline.report["corpus"] = _corpora(args)
    if os.path.isdir(args.translator):
        baseline.save(_baseline_file(args.translator, name))
    return baseline


def all_arms(args: argparse.Namespace, translator: Any) -> list[str]:
    """Every arm that this translator can have: rivals that were never fitted need the text to fit on."""
    from hf_mot.baselines import BASELINES
    from hf_mot.evaluation.arms import ARMS

    absent = {"native_wrong_document"}
    if not translator.config.source_layers:
        absent |= {arm for arm in ARMS if ARMS[arm].needs in ("source", *BASELINES)}
    if not args.fit_text:
        fitted = {name for name, baseline in BASELINES.items() if baseline.is_fitted}
        absent |= {name for name in fitted if not os.path.isfile(_baseline_file(args.translator, name))}
    if not has_twin(args.translator) and not (args.fit_text and can_refit(translator)):
        absent |= {"no_source", "target_layers_only"}
    if translator.config.target_hidden_layer is None:
        absent.add("target_layers_only")
    if translator.config.resume_layer is not None:
        absent |= {arm for arm in ARMS if ARMS[arm].states_only}  # from which the target cannot resume
    return [arm for arm in ARMS if arm not in absent]


def _baseline_file(folder: str, name: str) -> str:
    return os.path.join(folder, "baselines", f"{name}.safetensors")


def _corpora(args: argparse.Namespace) -> list[dict[str, str]]:
    from hf_mot.cli.fit import describe_file

    return [describe_file(path) for path in args.fit_text or ()]
