"""A tiny run of training, for the tests of training: in this process, or as a script in others."""

import argparse
import os
import random
import signal
import traceback
from pathlib import Path
from typing import Any

import torch
from conftest import make_documents, make_pair, make_translator
from transformers import TrainerCallback

from hf_mot import MoTModel
from hf_mot.training import MoTTrainer, MoTTrainingArguments, TextDataset
from hf_mot.training.checkpoints import last_checkpoint

SHORT = {"length": 40, "context_length": "12-20", "learning_rate": 3e-3, "logging_steps": 1}
QUIET = {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}


def make_args(folder: Path, **changes: Any) -> MoTTrainingArguments:
    size = {"max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return MoTTrainingArguments(str(folder), **{**SHORT, **QUIET, **size, "save_strategy": "no", **changes})


def make_trainer(pair: dict, args: MoTTrainingArguments, model=None, **changes: Any) -> MoTTrainer:
    arguments = {
        "model": make_translator(pair) if model is None else model,
        "train_dataset": TextDataset.from_args(make_documents(30), pair["target_tokenizer"], args),
        **pair,
        **changes,
    }
    return MoTTrainer(args=args, **arguments)


class Killer(TrainerCallback):
    """Kills this process at one of the trainer's events, or in the middle of a checkpoint."""

    def __init__(self, trainer: MoTTrainer, countdown: int):
        self.countdown = countdown
        save = trainer._save_rng_state
        trainer._save_rng_state = lambda folder: (self.tick(), save(folder))

    def tick(self, *args: Any, **kwargs: Any) -> None:
        self.countdown -= 1
        if self.countdown < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    on_substep_end = on_step_end = on_save = tick


def run(pair: dict, folder: Path, countdown: int | None = None) -> None:
    """Trains to the end, from the last checkpoint if there is one, and saves the weights to `folder/weights.pt`."""
    args = make_args(folder, max_steps=8, save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer = make_trainer(pair, args)
    if countdown is not None:
        trainer.add_callback(Killer(trainer, countdown))
    trainer.train(resume_from_checkpoint=last_checkpoint(folder))
    kept = [{**logs, "seconds": 0} for logs in trainer.state.log_history if "loss" in logs]
    torch.save((trainer.translator.state_dict(), kept), folder / "weights.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = make_pair()
    if options.kills is None:  # one run of two sequences a step, split over the processes there are
        processes = int(os.environ.get("WORLD_SIZE", 1))
        args = make_args(options.folder, per_device_train_batch_size=2 // processes)
        size = {"num_translators": 2, "hidden_size": 8, "num_attention_heads": 2, "embedding_window": 1}
        torch.manual_seed(0)
        trainer = make_trainer(pair, args, MoTModel.from_pair(**pair, **size))
        trainer.train()
        if trainer.is_world_process_zero():
            found = (trainer.translator.state_dict(), trainer.state.log_history)
            torch.save((*found, trainer.report()["training"]["processes"]), options.folder / "run.pt")
        return
    whole, killed = options.folder / "whole", options.folder / "killed"
    in_child(lambda: run(pair, whole))
    draw = random.Random(options.kills)
    for _ in range(options.kills):
        # Few events ahead: the run makes some progress between two kills, and not too much.
        countdown = draw.randint(0, 5)
        assert in_child(lambda countdown=countdown: run(pair, killed, countdown)) == -signal.SIGKILL
    in_child(lambda: run(pair, killed))


def in_child(work) -> int:
    """Runs `work` in a process that starts as this one is now; returns how it ended."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status


if __name__ == "__main__":
    main()
