"""How a translator was trained, for its fit report."""

from typing import Any

from transformers import TrainerState

from hf_mot.versions import versions

from .arguments import MoTTrainingArguments

_OF_TEXT = ("length", "context_length", "copy_share", "shuffle_buffer")  # captured states have their own
SETTINGS = (
    *("losses", *_OF_TEXT, "correct_window_start"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "learning_rate", "linear_learning_rate"),
    *("weight_decay", "warmup_steps", "max_grad_norm", "bf16", "seed", "vocabulary_size", "train_only"),
)


def training_report(
    args: MoTTrainingArguments, state: TrainerState, replay: str, captured: bool, best_step: int | None = None
) -> dict[str, Any]:
    """Settings, steps, tokens, losses, seconds and versions of a run, resumed parts included. `captured`: on states
    that were captured before, not on text. `best_step`: the step whose weights were kept, where the best ones were:
    losses and held-out figures are of these."""
    history = [logs for logs in state.log_history if best_step is None or logs.get("step", 0) <= best_step]
    names = [name for name in SETTINGS if not (captured and name in _OF_TEXT)]
    settings = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    losses = {
        name.removesuffix("_loss"): value
        for name, value in next((logs for logs in reversed(history) if "loss" in logs), {}).items()
        if name.endswith("_loss")
    }
    report = {
        "steps": state.global_step,
        "tokens": state.num_input_tokens_seen,
        "replay": replay,
        "processes": args.world_size,
        "schedule": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        "settings": settings,
        "losses": losses,
        "seconds": round(last_logged(state.log_history, "seconds", 0.0), 2),
        "versions": versions(),
    }
    evaluated = {
        name.removeprefix("eval_"): value
        for name, value in next((logs for logs in reversed(history) if "eval_loss" in logs), {}).items()
        if name in ("eval_loss", "eval_recovery", "eval_source_value")
    }
    report |= {"best_step": best_step} if best_step is not None else {}
    return report | ({"held_out": evaluated} if evaluated else {})


def last_logged(history: list[dict[str, Any]], name: str, default: Any) -> Any:
    """The value that was logged last under a name."""
    return next((logs[name] for logs in reversed(history) if name in logs), default)
