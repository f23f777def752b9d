"""
Makes one page of the baseline's result files: every arm and task of both directions in a table, and in plain words.

    python examples/baseline_report.py [model_cards/results/baseline] [model_cards/baseline.md]
"""

import json
import sys
from pathlib import Path

from hf_mot.evaluation.report import plain_words, render_table, table

DIRECTIONS = ("smol-to-gemma", "gemma-to-smol")
CONTROLS = "SQuAD, n = 100"  # all arms, on fewer questions
HEAD = """# Baseline: closed-form translators, every arm, plan `none`

Both directions of the packaged pair within an eighth of the target's own prefill, fp32, seed 0. Every figure comes
from a file in [results/baseline](results/baseline), which holds its command, versions and intervals; the recipe is
[examples/baseline.sh](../examples/baseline.sh), and this page is rendered by
[examples/baseline_report.py](../examples/baseline_report.py).
"""


def merged(folder: Path, direction: str) -> dict:
    """The parts of a direction as one report."""
    whole = json.loads((folder / f"{direction}-none-text.json").read_text(encoding="utf-8"))
    whole["tasks"] = {}
    for path in sorted(folder.glob(f"{direction}-none-*.json")):
        part = json.loads(path.read_text(encoding="utf-8"))
        if (part["pair"], part["seed"], part["dtype"]) != (whole["pair"], whole["seed"], whole["dtype"]):
            raise SystemExit(f"{path} is of another pair, seed or dtype than the text part. Measure it alike.")
        controls = path.stem.endswith("-controls")
        tasks = part.get("tasks", {})
        whole["tasks"] |= {CONTROLS if controls else name: task for name, task in tasks.items()}
        whole["flops_ratios"] = part["flops_ratios"] | whole["flops_ratios"]
    return whole


def main(folder: str = "model_cards/results/baseline", page: str = "model_cards/baseline.md") -> None:
    lines = [HEAD]
    for direction in DIRECTIONS:
        report = merged(Path(folder), direction)
        lines += [f"## {report['pair']['source']} → {report['pair']['target']}", "", *render_table(*table(report)), ""]
        lines += [*(f"- {sentence}" for sentence in plain_words(report)), ""]
    Path(page).write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
