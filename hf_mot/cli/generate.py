"""`hf-mot generate`: the target answers about a context that only the source has read."""

import argparse
import sys
from pathlib import Path
from typing import Any

from hf_mot.cli import AUTO, PLANS, check_output_file, load_pair, named_model

HELP = "answer a prompt about a context that only the source has read"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("translator", metavar="TRANSLATOR", help="folder or Hub id of a translator")
    parser.add_argument("--context", required=True, metavar="FILE", help="the text that the source reads; - for stdin")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what follows it, for the target alone")
    parser.add_argument("--source", help="source model: Hub id, folder, GGUF file or demo name [the translator's own]")
    parser.add_argument("--target", help="target model, likewise [the translator's own]")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="length of the answer [64]")
    parser.add_argument("--do-sample", action="store_true", help="sample instead of taking the likeliest token")
    parser.add_argument("--temperature", type=float, metavar="X", help="of sampling [the target's own]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of sampling [0]")
    parser.add_argument("--dtype", default="float32", help="dtype of both models, e.g. bfloat16 [float32]")
    parser.add_argument(
        "--replay",
        metavar="PLAN",
        help=f"what the target computes itself: {PLANS}, {AUTO} [what the translator was made for]",
    )
    parser.add_argument("--allow-variant", action="store_true", help="accept another adapter or quantization")
    parser.add_argument("--compare", action="store_true", help="also answer natively, and without the context")
    parser.add_argument("--json", metavar="PATH", help="also write the answers to this file")


def run(args: argparse.Namespace) -> int:
    if args.max_new_tokens < 1:
        raise ValueError(f"`--max-new-tokens` must be at least 1, got {args.max_new_tokens}.")
    if args.temperature is not None and not args.do_sample:
        raise ValueError("`--temperature` has no effect on the likeliest token. Add --do-sample, or leave it out.")
    if args.temperature is not None and args.temperature <= 0:
        raise ValueError(f"`--temperature` must be above 0, got {args.temperature}.")
    if not args.prompt:
        raise ValueError("`--prompt` is empty: the target needs at least one token to continue from.")
    check_output_file(args.json, "--json")
    context = _read_context(args.context)

    import torch

    from hf_mot.evaluation import save_report
    from hf_mot.hub.resolve import load_translator
    from hf_mot.replay_auto_mot import is_auto
    from hf_mot.versions import versions

    translator = load_translator(args.translator)
    automatic = is_auto(translator.config.replay if args.replay is None else args.replay)
    plan = translator.plan(args.replay, _context_length(args, translator, context) if automatic else None)
    if automatic:
        print(f"plan: {plan}", file=sys.stderr)
    pair = load_pair(args, translator)
    target, target_tokenizer = pair["target"], pair["target_tokenizer"]
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": args.do_sample}
    if args.temperature is not None:
        options["temperature"] = args.temperature

    def answer(input_ids: torch.Tensor, **inputs) -> str:
        torch.manual_seed(args.seed)
        output = target.generate(input_ids=input_ids.to(target.device), **inputs, **options)
        return target_tokenizer.decode(output[0, input_ids.shape[1] :], skip_special_tokens=True).strip()

    translated = translator.handoff(context, **pair, replay=plan, allow_variant=args.allow_variant)
    prompt_ids = target_tokenizer(args.prompt, return_tensors="pt")["input_ids"]
    answers = {"translated": answer(prompt_ids, past_key_values=translated)}
    if args.compare:
        prefix_ids = translator.config.target["prefix_ids"]
        context_ids, prompt_ids = target_tokenizer([context, args.prompt], add_special_tokens=False)["input_ids"]
        answers["native"] = answer(torch.tensor([[*prefix_ids, *context_ids, *prompt_ids]]))
        answers["no context"] = answer(torch.tensor([[*prefix_ids, *prompt_ids]]))
        print("\n\n".join(f"[{name}]\n{text}" for name, text in answers.items()))
    else:
        print(answers["translated"])
    if args.json is not None:
        save_report({"answers": answers, "replay": str(plan), "seed": args.seed, "versions": versions()}, args.json)
    return 0


def _context_length(args: argparse.Namespace, translator: Any, context: str) -> int:
    """Target tokens of the context, before the models are loaded."""
    from hf_mot.hub.resolve import load_tokenizer

    name, revision = named_model(args, translator, "target")
    context_ids = load_tokenizer(name, **revision)(context, add_special_tokens=False)["input_ids"]
    return len(translator.config.target["prefix_ids"]) + len(context_ids)


def _read_context(path: str) -> str:
    try:
        context = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"`--context` {path} cannot be read ({error.strerror}). Pass a text file, or - for standard input."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"`--context` {path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    if not context.strip():
        raise ValueError(f"`--context` {path} is empty: there is nothing for the source to read.")
    return context
