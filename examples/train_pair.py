"""Trains a translator between two models, as any Trainer script does:

python examples/train_pair.py --source demo/smollm2-135m-instruct --target demo/gemma-3-270m --text corpus.txt \
    --eval_text held_out.txt --output_dir out --losses cc=1,distill=1 --eval_strategy steps --eval_steps 100
"""

from dataclasses import dataclass, field

from transformers import EarlyStoppingCallback, HfArgumentParser

import hf_mot  # noqa: F401  a translator is saved with its code once it is registered
from hf_mot import MoTModel
from hf_mot.hub.resolve import load_model, load_tokenizer
from hf_mot.training import MoTTrainer, MoTTrainingArguments, TextDataset, TextFiles
from hf_mot.training.checkpoints import last_checkpoint
from hf_mot.training.start import new_translator, pair_contracts


@dataclass
class PairArguments:
    source: str = field(metadata={"help": "The model that reads: Hub id, folder, GGUF file or demo name."})
    target: str = field(metadata={"help": "The model that answers, likewise."})
    text: list[str] = field(metadata={"help": "Text to train on, gzipped or not."})
    eval_text: list[str] | None = field(default=None, metadata={"help": "Other text, to measure on."})
    lines: bool = field(default=False, metadata={"help": "One document a line."})
    init: str | None = field(default=None, metadata={"help": "Start from this translator, e.g. of hf-mot fit."})
    rank: int = field(default=1024, metadata={"help": "Inner channels of a new translator."})
    patience: int | None = field(default=None, metadata={"help": "Stop after so many evaluations without progress."})


def main():
    pair_args, args = HfArgumentParser((PairArguments, MoTTrainingArguments)).parse_args_into_dataclasses()

    # The two language models stay frozen: only what lies between them is trained.
    pair = {
        "source": load_model(pair_args.source),
        "target": load_model(pair_args.target),
        "source_tokenizer": load_tokenizer(pair_args.source),
        "target_tokenizer": load_tokenizer(pair_args.target),
    }
    if pair_args.init is None:
        model = new_translator(pair_contracts(**pair), trunk=True, rank=pair_args.rank, seed=args.seed)
    else:
        model = MoTModel.from_pretrained(pair_args.init)

    # Text is cut into examples in the target's tokens: a context that the source reads, and a prompt that follows.
    train_text = TextFiles(pair_args.text, pair_args.lines)
    train_dataset = TextDataset.from_args(train_text, pair["target_tokenizer"], args)
    eval_text = eval_dataset = None
    if pair_args.eval_text is not None:
        eval_text = TextFiles(pair_args.eval_text, pair_args.lines)
        eval_dataset = TextDataset.from_args(
            eval_text, pair["target_tokenizer"], args, passes=1, limit=args.eval_limit
        )

    trainer = MoTTrainer(
        model,
        args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        eval_documents=eval_text,
        callbacks=[EarlyStoppingCallback(pair_args.patience)] if pair_args.patience else None,
        **pair,
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
    trainer.save_model()  # load it with AutoModel.from_pretrained(output_dir)

    report = trainer.report()["training"]
    print(f"{report['steps']} steps, {report['tokens']:,} tokens, losses {report['losses']}")


if __name__ == "__main__":
    main()
