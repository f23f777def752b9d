"""`hf-mot train`: a translator for two models, trained on text."""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hf_mot.cli import PLANS, check_choice, check_output_file, command_line, given_options, read_json
from hf_mot.cli.fit import describe_file

HELP = "train a translator for two models on text files, or on captured states"
CHECKPOINTS = "checkpoints"
TWIN = "no_source"
# Options that choose a field of the config.
_CHOSEN_BY = {
    **{"method": "method", "replay": "replay", "layers": "source_layers"},
    **{"start": "target_layers", "channel_ratio": "target_layers"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", required=True, help="the model that reads: Hub id, folder, GGUF file or demo name")
    parser.add_argument("--target", required=True, help="the model that answers, likewise")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--text", nargs="+", metavar="FILE", help="text to train on, gzipped or not")
    data.add_argument("--states", metavar="DIR", help="states to train on instead, as hf-mot capture keeps them")
    parser.add_argument("--lines", action="store_true", help="one document a line")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the translator and its checkpoints")
    parser.add_argument("--overwrite", action="store_true", help="start anew instead of from DIR's last checkpoint")
    parser.add_argument("--init", metavar="DIR", help="start from this translator, e.g. of hf-mot fit")
    add_translator_arguments(parser)
    add_training_arguments(parser)


def add_translator_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained."""
    parser.add_argument("--method", metavar="M", help="mot, mlp or reduced_rank [as --init, or mot]")
    parser.add_argument("--preset", metavar="NAME", help="paper: the literal Mixture-of-Translators, ratio 0.3")
    parser.add_argument(
        "--channel-ratio", type=float, metavar="X", help="share of the layers translated [1, searched 0.3]"
    )
    parser.add_argument("--start", type=int, metavar="L", help="lowest target layer that is translated [0]")
    parser.add_argument("--mapping", metavar="M", help="layers are paired by depth_ratio or terminal [depth_ratio]")
    parser.add_argument("--layers", type=int, metavar="N", help="read N source layers, evenly spaced [one a channel]")
    parser.add_argument(
        "--config", nargs="+", default=[], metavar="NAME=VALUE", help="fields of the config, e.g. num_translators=2"
    )


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """How it is trained."""
    parser.add_argument(
        "--replay", metavar="PLAN", help=f"what the target computes itself: {PLANS} [what the layers allow: none]"
    )
    parser.add_argument("--losses", metavar="A=W,…", help="losses and their weights [cc=1,pl=1]")
    parser.add_argument("--length", type=int, metavar="N", help="target tokens of an example [128]")
    parser.add_argument("--context", metavar="C", help="of these, context; a range 64-256 mixes lengths [64]")
    parser.add_argument("--copy-share", type=float, metavar="X", help="share of prompts to copy from the context [0]")
    parser.add_argument("--vocabulary-size", type=int, metavar="N", help="tokens that pl and distill compare [all]")
    parser.add_argument("--max-steps", type=int, metavar="N", help="optimizer steps [500]")
    parser.add_argument("--batch-size", type=int, metavar="B", help="sequences a forward pass [4]")
    parser.add_argument("--accumulation", type=int, metavar="N", help="forward passes a step [4]")
    parser.add_argument("--learning-rate", type=float, metavar="X", help="learning rate of AdamW [1e-4]")
    parser.add_argument(
        "--linear-learning-rate", type=float, metavar="X", help="of the linear path [the same; with --init 1/100]"
    )
    parser.add_argument(
        "--train-only", metavar="REGEX", help="train parameters with such names alone, e.g. key_norms [all]"
    )
    parser.add_argument(
        "--sensitivity",
        metavar="FILE",
        help="let losses on states weigh what costs, by hf-mot analyze --sensitivity --json FILE",
    )
    parser.add_argument(
        "--sensitivity-power", type=float, metavar="P", help="exponent of the weights that this gives, 0 for none [1]"
    )
    parser.add_argument("--eval-text", nargs="+", metavar="FILE", help="held-out text to measure on in between")
    parser.add_argument("--eval-steps", type=int, metavar="N", help="steps between two measurements [100]")
    parser.add_argument("--eval-context", type=int, metavar="C", help="tokens of context where recovery is [256]")
    parser.add_argument("--eval-limit", type=int, metavar="N", help="held-out documents, at most [32]")
    parser.add_argument("--no-source", metavar="DIR", help="twin without source, for the source value")
    parser.add_argument(
        "--twin", action="store_true", help=f"first train the twin without source, alike, in DIR/{TWIN}: takes as long"
    )
    parser.add_argument("--best", metavar="METRIC", help="keep the best checkpoint by loss, recovery or source_value")
    parser.add_argument("--save-steps", type=int, metavar="N", help="steps between checkpoints [50]")
    parser.add_argument("--report-to", default="none", metavar="NAME", help="also log to tensorboard, … [none]")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of weights and order [0]")
    parser.add_argument("--dtype", default="float32", help="dtype of both models, e.g. bfloat16 [float32]")
    parser.add_argument("--bf16", action="store_true", help="let the translator compute in bf16")
    parser.add_argument("--json", metavar="PATH", help="also write the report to this file")


def run(args: argparse.Namespace) -> int:
    # Cheap checks come first: a typo must not cost a download or an hour.
    check_output_file(args.json, "--json")
    _check_out(args)
    sensitivity = None if args.sensitivity is None else read_json(args.sensitivity, "--sensitivity")
    _check_options(args)
    if args.twin:
        twin = twin_arguments(args)
        run(twin)
        args.no_source = twin.out

    from hf_mot.data.states import StatesDataset
    from hf_mot.evaluation import save_report
    from hf_mot.fit import loss_weights
    from hf_mot.hub.resolve import load_model, load_tokenizer, load_translator
    from hf_mot.training import MoTTrainer, TextDataset, TextFiles
    from hf_mot.training.checkpoints import check_run, last_checkpoint
    from hf_mot.training.optimizer import linear_path, train_only
    from hf_mot.training.trainer import VARIANCE_EXAMPLES
    from hf_mot.training.vocabulary import VOCABULARY_EXAMPLES

    settings = translator_settings(args)
    training = training_arguments(args)
    text = None if args.text is None else TextFiles(args.text, args.lines)
    held_out = None if args.eval_text is None else TextFiles(args.eval_text, args.lines)
    states = None if args.states is None else StatesDataset(args.states)
    if states is not None and held_out is None:
        _check_source(args, states)
    # Small steps are lost in the bf16 that a translator may be published in.
    init = None if args.init is None else load_translator(args.init).float()
    # A twin that was trained alike is not measured without text.
    no_source = None if held_out is None or args.no_source is None else load_translator(args.no_source)
    pair = {"target": load_model(args.target, dtype=args.dtype), "target_tokenizer": load_tokenizer(args.target)}
    if states is None or held_out is not None:  # captured states stand for the source
        pair |= {"source": load_model(args.source, dtype=args.dtype), "source_tokenizer": load_tokenizer(args.source)}
    model = _translator(args, pair, states, init, settings)
    layer_weights = None
    if sensitivity is not None:
        power = 1.0 if args.sensitivity_power is None else args.sensitivity_power
        layer_weights = loss_weights(sensitivity, model.config.target, power)
    if training.train_only is not None:  # the trainer's; a name that is not there is an error now
        train_only(model, training.train_only)
    fitted = init is not None and any(weight.requires_grad for weight in linear_path(model))
    if fitted and training.linear_learning_rate is None:
        # Its inputs have scales of their own: at the full rate, Adam's first steps undo what was fitted.
        # (model_cards/results/linear_learning_rate.json)
        training.linear_learning_rate = training.learning_rate / 100
    if states is None:
        examples = TextDataset.from_args(text, pair["target_tokenizer"], training)
        # The trainer's; text without any is an error now, not after the first steps.
        examples.head(VARIANCE_EXAMPLES if training.vocabulary_size is None else VOCABULARY_EXAMPLES)
        corpus = [describe_file(path) for path in args.text]
    else:
        examples = StatesDataset(args.states, model.config)
        tokens = {
            f"{part}_tokens": sum(shard[f"{part}_tokens"] for shard in states.index["shards"])
            for part in ("context", "prompt")
        }
        corpus = [{"name": f"{len(examples)} captured examples", "digest": states.index["digest"], **tokens}]
    eval_examples = None
    if held_out is not None:
        limits = {"passes": 1, "limit": training.eval_limit}
        eval_examples = TextDataset.from_args(held_out, pair["target_tokenizer"], training, **limits)
    trainer = MoTTrainer(
        model,
        training,
        train_dataset=examples,
        eval_dataset=eval_examples,
        eval_documents=held_out,
        no_source=no_source,
        layer_weights=layer_weights,
        **pair,
    )
    dtype = str(pair["target"].dtype).removeprefix("torch.")
    trainer.facts = {"corpus": corpus, "lines": args.lines, "dtype": dtype, "command": command_line(args.argv)}
    if args.overwrite:  # what the trainer refuses must not cost the checkpoints
        shutil.rmtree(training.output_dir, ignore_errors=True)
    checkpoint = last_checkpoint(training.output_dir)
    if checkpoint is not None:
        check_run(checkpoint, trainer.report()["training"])
    trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_world_process_zero():
        report = _save(trainer, args.out)
        if args.json is not None:
            save_report(report, args.json)
        print(format_training(report["training"], args.out))
    trainer.accelerator.wait_for_everyone()  # all of them read a twin that one has written
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuses options that have no effect beside the others, or without them."""
    if args.sensitivity is None and args.sensitivity_power is not None:
        raise ValueError("`--sensitivity-power` has no effect without `--sensitivity`. Give both, or neither.")
    if args.twin and args.no_source is not None:
        raise ValueError("`--twin` trains the twin that `--no-source` names. Leave one of them out.")
    if args.eval_text is None:
        given = given_options(args, "eval_steps", "eval_context", "eval_limit", "no_source")
        if given:
            raise ValueError(f"`{given[0]}` has no effect without `--eval-text`. Give both, or neither.")
        given = given_options(args, "length", "context", "copy_share", "lines")
        if args.states is not None and given:
            raise ValueError(
                f"`{given[0]}` has no effect with `--states`: captured examples have lengths and prompts of their "
                "own. Leave it out, or give it to hf-mot capture."
            )
    if args.best is not None and args.save_steps is not None:
        raise ValueError(
            "`--save-steps` has no effect with `--best`: a checkpoint is kept whenever it is measured. Give "
            "`--eval-steps` alone."
        )
    given = given_options(args, "preset", "channel_ratio", "start", "mapping", "layers")
    if args.init is not None and given:
        raise ValueError(f"`{given[0]}` is for a new translator, but `--init` has its layers. Leave one of them out.")


def _check_source(args: argparse.Namespace, states: Any) -> None:
    """Refuses another source than that of captured states, which stand for it, so that it is not loaded."""
    from hf_mot.contract_mot import check_tokenizer
    from hf_mot.hub.resolve import load_tokenizer

    contract = states.index["source"]
    if args.source == contract["id"]:
        return
    named = f"`--source` {args.source} is not the model whose states {args.states} holds"
    named_alike = contract["adapter"] is None  # else the id is that of the model below it
    if contract["id"] is not None and named_alike and not os.path.exists(args.source):
        raise ValueError(f"{named}, {contract['id']}. Name that one, or capture the states of yours.")
    try:
        check_tokenizer(contract, load_tokenizer(args.source), "source_tokenizer")
    except ValueError as error:
        raise ValueError(f"{named}: {error}") from error


def twin_arguments(args: argparse.Namespace) -> argparse.Namespace:
    """The same training of a translator without source. Raises `ValueError` if `--init` has none to start from."""
    twin = argparse.Namespace(**vars(args))
    twin.out, twin.twin, twin.json, twin.layers = os.path.join(args.out, TWIN), False, None, None
    if args.init is None:
        twin.config = [*args.config, "source_layers=[]"]
    else:
        twin.init = os.path.join(args.init, TWIN)
        if not os.path.isdir(twin.init):
            raise ValueError(
                f"`--twin` needs a twin to start from, but there is none in {twin.init}. Fit it (hf-mot fit does), "
                "or leave --twin out."
            )
    if args.best == "source_value":
        twin.best = "recovery"
    return twin


def translator_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The channel window and the config's fields that the command line gives."""
    from hf_mot.channels_mot import MAPPINGS
    from hf_mot.configuration_mot import METHODS, PAPER

    settings: dict[str, Any] = {}
    if args.mapping is not None:
        check_choice(args.mapping, list(MAPPINGS), "--mapping")
    if args.preset is not None:
        check_choice(args.preset, ["paper"], "--preset")
        settings |= {**PAPER, "channel_ratio": 0.3}
    if args.method is not None:
        check_choice(args.method, [method for method in METHODS if method != "identity"], "--method")
        settings["method"] = args.method
    given = {"channel_ratio": args.channel_ratio, "start": args.start, "mapping": args.mapping}
    given |= {"replay": args.replay}
    fields = _fields(args.config)
    for option, field in _CHOSEN_BY.items():
        if field in fields and getattr(args, option) is not None:
            raise ValueError(
                f"`--config` gives `{field}` again, after `{given_options(args, option)[0]}`. Leave one of them out."
            )
    return settings | {key: value for key, value in given.items() if value is not None} | fields


def _translator(args: argparse.Namespace, pair: dict[str, Any], states: Any, init: Any, settings: dict[str, Any]):
    """The translator that is trained."""
    from hf_mot.training.start import continue_from, new_translator, pair_contracts

    if init is not None:
        return continue_from(init, seed=args.seed, **settings)
    layers = {} if args.layers is None else {"num_source_layers": args.layers}
    if states is None:
        return new_translator(pair_contracts(**pair), seed=args.seed, **layers, **settings)
    if args.layers is None and "source_layers" not in settings:
        settings["source_layers"] = states.source_layers
    return new_translator(states.index, seed=args.seed, **layers, **settings)


def training_arguments(args: argparse.Namespace) -> Any:
    """The recipe that the command line gives."""
    import torch

    from hf_mot.training import MoTTrainingArguments

    options = {
        "losses": args.losses,
        "replay": args.replay,
        "length": args.length,
        "context_length": args.context,
        "copy_share": args.copy_share,
        "vocabulary_size": args.vocabulary_size,
        "max_steps": args.max_steps,
        "per_device_train_batch_size": args.batch_size,
        "per_device_eval_batch_size": args.batch_size,
        "gradient_accumulation_steps": args.accumulation,
        "learning_rate": args.learning_rate,
        "linear_learning_rate": args.linear_learning_rate,
        "train_only": args.train_only,
        "eval_context_length": args.eval_context,
        "eval_limit": args.eval_limit,
    }
    options = {name: value for name, value in options.items() if value is not None}
    save_steps = 50 if args.save_steps is None else args.save_steps
    eval_steps = 100 if args.eval_steps is None else args.eval_steps
    steps = {"--max-steps": args.max_steps, "--save-steps": save_steps, "--eval-steps": eval_steps}
    for name, value in steps.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be 1 step or more, got {value}.")
    if args.best is not None:
        check_choice(args.best, ("loss", "recovery", "source_value"), "--best")
        if args.eval_text is None or (args.best == "source_value" and args.no_source is None and not args.twin):
            needed = "--eval-text" if args.eval_text is None else "--no-source"
            raise ValueError(f"`--best` {args.best} needs `{needed}`, to be measured. Give it, or leave --best out.")
        # A checkpoint can be kept as the best one only if it was measured.
        options |= {"metric_for_best_model": args.best, "load_best_model_at_end": True}
        save_steps = eval_steps
    return MoTTrainingArguments(
        os.path.join(args.out, CHECKPOINTS),
        save_steps=save_steps,
        save_total_limit=2,
        eval_strategy="no" if args.eval_text is None else "steps",
        eval_steps=eval_steps,
        report_to=args.report_to,
        seed=args.seed,
        bf16=args.bf16,
        use_cpu=not torch.accelerator.is_available(),  # where transformers takes bf16 too, if told so
        dataloader_pin_memory=torch.cuda.is_available(),
        **options,
    )


def _save(trainer: Any, out: str) -> dict[str, Any]:
    """Writes the translator and its card beside the checkpoints; its config, by which a folder is known for one, comes
    last."""
    from hf_mot.hub.card import render_card

    translator, report = trainer.translator, trainer.report()
    translator.fit_report = report
    with tempfile.TemporaryDirectory(prefix=".", dir=out) as folder:
        translator.save_pretrained(folder)
        (Path(folder) / "README.md").write_text(render_card(translator.config, report), encoding="utf-8")
        for path in sorted(Path(folder).iterdir(), key=lambda path: path.name == "config.json"):
            shutil.rmtree(Path(out) / path.name, ignore_errors=True)
            os.replace(path, Path(out) / path.name)
    return report


def format_training(training: dict[str, Any], out: str) -> str:
    """A few lines on what was trained, and what to do with it."""
    losses = ", ".join(f"{name} {value:.4g}" for name, value in training["losses"].items())
    kept = f"after step {training['best_step']:,}, the best" if "best_step" in training else "at the end"
    held_out = ", ".join(f"{name} {value:.3g}" for name, value in training.get("held_out", {}).items())
    return "\n".join(
        [
            f"trained {training['steps']:,} steps on {training['tokens']:,} tokens in {training['seconds']:.0f} s, "
            f"plan {training['replay']}",
            f"losses {kept}: {losses}" + (f"; on held-out text: {held_out}" if held_out else ""),
            f"written to {out}: the translator and its model card, and in {CHECKPOINTS} where to go on from",
            f"measure it on other text: hf-mot evaluate {out} --text FILE…",
        ]
    )


def _fields(given: list[str]) -> dict[str, Any]:
    """Fields of the config, each JSON, else text."""
    fields: dict[str, Any] = {}
    for part in given:
        name, equals, value = part.partition("=")
        if not (name and equals):
            raise ValueError(f"`--config` must be NAME=VALUE, got {part!r}.")
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value
    return fields


def _check_out(args: argparse.Namespace) -> None:
    """Refuses a folder that holds something else than a training, which goes on there, or is overwritten."""
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"`--out` must be a folder, but {args.out} is a file. Give another name.")
    held = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if held - ({TWIN} if args.twin else set()) and CHECKPOINTS not in held:
        raise ValueError(
            f"`--out` {args.out} is not empty, and holds no checkpoints of a training. Give another folder."
        )
