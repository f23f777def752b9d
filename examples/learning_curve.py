"""What more training would bring: translators of one run, judged on captured states of documents that were held out.

    hf-mot capture … --text held_out.txt --top-logits hidden --copy-share 0.4 --out HELD_OUT
    python examples/learning_curve.py HELD_OUT FIT OUT/checkpoints/checkpoint-* OUT --json curve.json --plot curve.png

For each translator: KL(native ‖ translated) of the next token, and the recovery of what the context is worth; apart
for prompts that go on with the text and prompts that copy from it, and for contexts up to `--short` tokens and
longer ones. Beside it the loss on the training examples themselves, as the run logged it.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from tqdm.auto import tqdm
from transformers import AutoModel, PreTrainedModel

from hf_mot.cache_mot import TranslatedCache
from hf_mot.capture_mot import prefill
from hf_mot.cli import command_line
from hf_mot.data.states import StatesDataset, collate, translation_inputs
from hf_mot.evaluation.answers import wrap
from hf_mot.hub.resolve import load_model
from hf_mot.training.forward import Prompt
from hf_mot.versions import versions

COPIED_RUN = 6  # tokens: most runs of so many tokens of a copied prompt stand in its context, of others hardly any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", metavar="HELD_OUT", help="states of hf-mot capture --top-logits hidden")
    parser.add_argument("translators", nargs="+", metavar="DIR", help="fits, checkpoints and translators, in order")
    parser.add_argument("--target", default="demo/gemma-3-270m", help="the target model")
    parser.add_argument(
        "--short", type=int, default=512, metavar="C", help="longest context that counts as short [512]"
    )
    parser.add_argument("--json", required=True, metavar="PATH", help="write the curve to this file")
    parser.add_argument("--plot", metavar="PNG", help="and draw it")
    args = parser.parse_args()

    target = load_model(args.target).eval()
    examples = StatesDataset(args.states)
    if "native_hidden" not in examples[0]:
        raise ValueError(f"{args.states} was captured without `--top-logits hidden`. Capture it so.")
    prefix_length = len(examples.index["target"]["prefix_ids"])
    kinds = [_kind(example, args.short) for example in examples]
    native = [_native(target, example, prefix_length) for example in tqdm(examples, desc="native")]
    points = []
    for folder in args.translators:
        rows = _translated(target, folder, args.states, native)
        points.append({"translator": Path(folder).name, "steps": _steps(folder), **_figures(rows, kinds, native)})
        print(json.dumps(points[-1]), flush=True)
    report = {
        "examples": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "points": points,
        "training": _logged(args.translators),
        "command": command_line(sys.argv[1:], ["python", "examples/learning_curve.py"]),
        "versions": versions(),
    }
    Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        _plot(report, args.plot)


def _kind(example: dict[str, Any], short: int) -> str:
    context, prompt = example["context_ids"].tolist(), example["prompt_ids"].tolist()
    runs = {tuple(context[start : start + COPIED_RUN]) for start in range(len(context))}
    found = [tuple(prompt[start : start + COPIED_RUN]) in runs for start in range(len(prompt) - COPIED_RUN + 1)]
    kind = "copy" if sum(found) > 0.4 * len(found) else "continuation"
    return f"{kind}, {'short' if len(context) <= short else 'long'} context"


@torch.no_grad()
def _native(target: PreTrainedModel, example: dict[str, Any], prefix_length: int) -> dict[str, Any]:
    """Of the prompt: the native target's log-probabilities, and the NLL with the context and with its prefix alone."""
    batch = collate([example])
    prompt = Prompt(batch["prompt_ids"], batch["prompt_mask"])
    head = target.get_output_embeddings()
    prefix = batch["target_ids"][:, :prefix_length]
    cache = TranslatedCache([], [], torch.ones_like(prefix))
    if prefix_length:
        cache = wrap(prefill(target, prefix), torch.ones_like(prefix), True)
    hidden = prompt.scored(batch["native_hidden"]).to(head.weight)
    nll = F.cross_entropy(head(hidden).float(), prompt.labels).item()
    return {
        "hidden": hidden,
        "nll": nll,
        "no_context": F.cross_entropy(prompt.logits(target, cache), prompt.labels).item(),
    }


@torch.no_grad()
def _translated(
    target: PreTrainedModel, folder: str, states: str, native: list[dict[str, Any]]
) -> list[dict[str, float]]:
    mot = AutoModel.from_pretrained(os.path.abspath(folder)).eval()
    examples, plan, head, rows = StatesDataset(states, mot.config), mot.plan(None), target.get_output_embeddings(), []
    for example, own in zip(tqdm(examples, desc=Path(folder).name), native, strict=True):
        batch = collate([example])
        prompt = Prompt(batch["prompt_ids"], batch["prompt_mask"])
        inputs = translation_inputs(batch, mot.config, target.get_input_embeddings())
        if mot.config.target_hidden_layer is not None:
            inputs = mot.read_target(inputs, target, plan)
        cache = mot.assemble(mot(**mot.forward_arguments(inputs, plan)), inputs, target, plan)
        log_probs = prompt.logits(target, cache).float().log_softmax(-1)
        wanted = head(own["hidden"]).float().log_softmax(-1)
        rows.append(
            {
                "nll": F.nll_loss(log_probs, prompt.labels).item(),
                "kl": F.kl_div(log_probs, wanted, reduction="batchmean", log_target=True).item(),
            }
        )
    return rows


def _figures(rows: list[dict[str, float]], kinds: list[str], native: list[dict[str, Any]]) -> dict[str, Any]:
    found = {"kl": sum(row["kl"] for row in rows) / len(rows), "by_kind": {}}
    for kind in sorted(set(kinds)):
        own = [index for index, each in enumerate(kinds) if each == kind]
        gained = sum(native[index]["no_context"] - rows[index]["nll"] for index in own)
        worth = sum(native[index]["no_context"] - native[index]["nll"] for index in own)
        kl = sum(rows[index]["kl"] for index in own) / len(own)
        found["by_kind"][kind] = {"recovery": gained / worth, "kl": kl}
    return found


def _steps(folder: str) -> int:
    """Steps of a translator's training so far; 0 for a fit."""
    state = Path(folder) / "trainer_state.json"
    if state.exists():
        return json.loads(state.read_text())["global_step"]
    report = Path(folder) / "fit_report.json"
    return json.loads(report.read_text()).get("training", {}).get("steps", 0) if report.exists() else 0


def _logged(folders: list[str]) -> list[dict[str, float]]:
    """Step and loss of what the last checkpoint has logged."""
    states = [path for folder in folders if (path := Path(folder) / "trainer_state.json").exists()]
    logs = json.loads(states[-1].read_text())["log_history"] if states else []
    return [{"step": entry["step"], "kl": entry["distill_loss"]} for entry in logs if "distill_loss" in entry]


def _plot(report: dict[str, Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = report["points"]
    steps = [point["steps"] for point in points]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for kind, count in report["examples"].items():
        axes[0].plot(
            steps, [point["by_kind"][kind]["recovery"] for point in points], "o-", label=f"{kind}, n = {count}"
        )
    axes[0].set(xlabel="steps of training", ylabel="recovery on held-out documents")
    axes[1].plot(steps, [point["kl"] for point in points], "o-", label="held-out documents")
    logged = report["training"]
    axes[1].plot(
        [entry["step"] for entry in logged], [entry["kl"] for entry in logged], ".-", label="training examples"
    )
    axes[1].set(xlabel="steps of training", ylabel="KL(native ‖ translated), nats a token", ylim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
