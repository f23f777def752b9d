"""
Gathers the results of paper_mode.sh into one file, and makes a page of that file.

    python examples/paper_mode_report.py [OUT] --json FILE --markdown FILE

Runs that FILE has and OUT has not, of another machine say, stay in it. Without OUT the page is made of FILE alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from hf_mot.analysis import plot_windows
from hf_mot.evaluation.describe import format_interval, format_number
from hf_mot.evaluation.metrics import ratio_of_means
from hf_mot.evaluation.report import render_table
from hf_mot.evaluation.report_plot import require_matplotlib
from hf_mot.training.report import last_logged

NAMES = {
    "mot": "MoT, the paper's form",
    "bf16": "MoT, trained between models in bf16",
    "single": "single backbone",
    "uniform": "MoT-Uni",
    "moe": "MoE",
    "mlp": "MLP on each token",
    "closed": "closed form",
    "routing": "MoT, straight-through router",
    "activation": "MoT, no GELU at the output",
    "position": "MoT, keys without positions",
    "embedding": "MoT, reads 5 target embeddings",
    "best": "MoT, all four and a linear path",
}
ROUTER = ("router_cv2", "router_entropy")
NOTHING: dict[str, Any] = {"search": None, "runs": []}
RUN = ("start", "name", "seed")  # what a run is known by
HEAD = """# The paper's mode

Mixture-of-Translators in the paper's literal form, by plan `full`: the target reads the context itself, and translated
keys and values take the place of its own in a window of its layers. No prefill is saved; the figures say what
translation of the window loses. One seed: its 95 % interval over documents; several: their mean and range. *Over MoT*
is what a form recovers beyond one seed of MoT, paired by document. *Models* is the dtype that both had in training;
all is measured in float32. *Source value* is against one control a window: MoT without source that reads the target's
token embeddings, trained alike; that of the closed form and of "all four and a linear path" is against their own.
Cosines are means over the layers of the window and those above it. The closed form is fitted for all layers, of which
the window's are used: its parameters are those of all. Router figures are of the last steps of training (ln 2 = 0.69:
both translators alike). Made by [examples/paper_mode.sh](../examples/paper_mode.sh).
"""


def gather(folder: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """What the search for a window found, if there was one, and the runs; what was gathered before and is not there
    stays."""
    search = folder / "search" / "report.json"
    found = json.loads(search.read_text(encoding="utf-8")) if search.exists() else earlier["search"]
    runs = {tuple(run[key] for key in RUN): run for run in [*earlier["runs"], *gather_runs(folder)]}
    return {"search": found, "runs": [runs[key] for key in sorted(runs)]}


def gather_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs: result without the figures of each document, steps and router of the training, gain over MoT."""
    runs = []
    for path in sorted(folder.glob("start-*/*-[0-9].json")):
        name, seed = path.stem.rsplit("-", 1)
        result = json.loads(path.read_text(encoding="utf-8"))
        run: dict[str, Any] = {"start": int(path.parent.name.removeprefix("start-")), "name": name, "seed": int(seed)}
        mot = min(path.parent.glob("mot-[0-9].json"), default=path)
        if mot != path and "recovery" in result:
            base = json.loads(mot.read_text(encoding="utf-8"))
            run["over_mot"] = {"seed": int(mot.stem[-1]), **gain(base["documents"], result["documents"])}
        made = path.with_suffix("")
        made = made if made.is_dir() else folder / name
        report = json.loads((made / "fit_report.json").read_text(encoding="utf-8"))
        run["made_by"] = report.get("training", report)
        if (made / "trainer_state.json").exists():
            history = json.loads((made / "trainer_state.json").read_text())["log_history"]
            run["router"] = {key: last_logged(history, key, None) for key in ROUTER}
        runs.append({**run, "result": {key: value for key, value in result.items() if key != "documents"}})
    return runs


def gain(base: list[dict[str, float]], own: list[dict[str, float]]) -> dict[str, float]:
    """The recovery beyond that of another run, with its paired interval."""
    nll = {arm: torch.tensor([row[arm] for row in own], dtype=torch.float64) for arm in own[0]}
    other = torch.tensor([row["translated"] for row in base], dtype=torch.float64)
    clusters = [row["document"] for row in own]
    return ratio_of_means(other - nll["translated"], nll["no_context"] - nll["native"], clusters=clusters)


def over_seeds(figures: list[dict[str, float] | None]) -> str:
    """Value and interval of one seed; mean and range of several, of those that it was measured for."""
    figures = [figure for figure in figures if figure is not None]
    if len(figures) < 2:
        return format_interval(figures[0] if figures else None)
    values = [figure["value"] for figure in figures]
    return f"{sum(values) / len(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def trained_in(run: dict[str, Any]) -> str:
    """The dtype of both models in the training."""
    return "bf16" if "--dtype bfloat16" in run["made_by"].get("command", "") else "fp32"


def row(name: str, runs: list[dict[str, Any]]) -> list[str]:
    first = runs[0]
    result, cosines = first["result"], first["result"]["similarity"]["translated"]
    router = first.get("router", {})
    return [
        NAMES[name],
        str(len(runs)),
        ", ".join(sorted({trained_in(run) for run in runs})),
        over_seeds([run["result"].get("recovery") for run in runs]),
        "" if name == "mot" else over_seeds([run.get("over_mot") for run in runs]),
        *(over_seeds([run["result"].get(metric) for run in runs]) for metric in ("source_value", "content_recovery")),
        *(format_number(cosines[key], 3) for key in ("keys", "values", "attention")),
        *(format_number(router.get(key), 2) for key in ROUTER),
        f"{result['translator']['bytes'] // 4:,}",
        format_number(result.get("cost", {}).get("time_ratio"), 2),
    ]


COLUMNS = ["translator", "seeds", "models", "recovery", "over MoT", "source value", "content recovery"]
COLUMNS += ["cos K", "cos V", "cos attention", "router CV²", "router entropy", "parameters", "handoff / prefill"]


def search_section(search: dict[str, Any], plot: str) -> list[str]:
    """What a search found of each window, beside its plot."""
    rows = [
        [
            f"{window['target_layers'][0]}-{window['target_layers'][-1]}",
            *(format_number(window.get(f"eval_{key}"), 3) for key in ("loss", "cc_loss", "pl_loss", "recovery")),
        ]
        for window in search["windows"]
    ]
    return [
        "## The window that a search chose",
        "",
        "One short training of a single backbone for each window, judged on training text that was left out. The",
        "search takes the least loss, the sum of CC (on keys and values) and PL. The recovery beside it has neither",
        "interval nor control: at the end of the target, where all layers below the window are its own, it need not",
        "come from the translation.",
        "",
        f"![validation loss and recovery by window]({plot})",
        "",
        *render_table(["target layers", "loss", "CC", "PL", "recovery"], rows),
        "",
        f"`{search['command']}`",
        "",
    ]


def page(gathered: dict[str, Any], plot: str) -> str:
    lines, runs = [HEAD], gathered["runs"]
    if gathered["search"] is not None:
        lines += search_section(gathered["search"], plot)
    for start in sorted({run["start"] for run in runs}):
        there = [run for run in runs if run["start"] == start]
        named = {name: [run for run in there if run["name"] == name] for name in NAMES}
        named = {name: sorted(own, key=lambda run: run["seed"]) for name, own in named.items() if own}
        result, made_by = there[0]["result"], there[0]["made_by"]
        trained = [run["made_by"] for run in there if "steps" in run["made_by"]]
        made_by = trained[0] if trained else made_by
        window = result["replay"].removeprefix("full:").partition("+")[0]
        lines += [f"## Window {window}", ""]
        text = f"{result['n']} windows of {result['context_length']} tokens of context, {result['dtype']}; "
        lines += [text + f"trained on {made_by['tokens']:,} tokens of text.", ""]
        lines += [*render_table(COLUMNS, [row(name, own) for name, own in named.items()]), ""]
        for key, title in (("keys", "Keys"), ("values", "Values"), ("attention", "Attention outputs")):
            cosines = {name: own[0]["result"]["similarity"]["translated"] for name, own in named.items()}
            first = next(iter(cosines.values()))["first_layer"]
            depth = len(next(iter(cosines.values()))["by_layer"][key])
            head = [f"{title}, cosine by layer", *(str(first + place) for place in range(depth))]
            rows = [
                [NAMES[name], *(format_number(v, 2) for v in own["by_layer"][key])] for name, own in cosines.items()
            ]
            lines += [*render_table(head, rows), ""]
    for run in runs:
        lines.append(
            f"- {run['name']}-{run['seed']}, window from {run['start']}: `{run['result'].get('command', '')}`"
        )
    versions = runs[0]["result"]["versions"]
    return "\n".join([*lines, "", ", ".join(f"{name} {version}" for name, version in versions.items()), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Gathers the results of paper_mode.sh, and makes a page of them.")
    parser.add_argument("out", nargs="?", type=Path, help="folder of paper_mode.sh")
    parser.add_argument("--json", required=True, type=Path, help="file that keeps all results")
    parser.add_argument("--markdown", required=True, type=Path, help="the page; its plot goes to a folder beside it")
    args = parser.parse_args()
    if args.out is not None:
        earlier = json.loads(args.json.read_text(encoding="utf-8")) if args.json.exists() else NOTHING
        args.json.write_text(json.dumps(gather(args.out, earlier), indent=1) + "\n", encoding="utf-8")
    gathered = json.loads(args.json.read_text(encoding="utf-8"))
    pictures = args.markdown.with_suffix("")
    if gathered["search"] is not None:
        require_matplotlib()
        pictures.mkdir(parents=True, exist_ok=True)
        plot_windows(gathered["search"], pictures / "windows.png")
    args.markdown.write_text(page(gathered, f"{pictures.name}/windows.png"), encoding="utf-8")


if __name__ == "__main__":
    main()
