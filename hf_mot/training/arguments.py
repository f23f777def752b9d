"""What a training run is told. The defaults are the paper's recipe (E.1)."""

import math
from dataclasses import dataclass, field

from transformers import TrainingArguments

from hf_mot.replay_mot import ReplayPlan

from .losses import ON_PROMPT, check_losses


@dataclass
class MoTTrainingArguments(TrainingArguments):
    r"""
    `transformers.TrainingArguments` with the paper's recipe (E.1) as defaults: 500 steps of 4 × 4 sequences of 128
    tokens, of which 64 are context; AdamW at 1e-4, weight decay 0.01, warm-up over a tenth of the steps, cosine, clip
    at 1.0.

    With `bf16=True` the translator computes in bf16 and keeps its weights and their optimizer in fp32, as in any
    Trainer run. The language models are never cast: they compute in the dtype that they were loaded in
    (`from_pretrained(..., dtype=torch.bfloat16)`).

    Args:
        losses (`dict[str, float]` or `str`, *optional*, defaults to `{"cc": 1.0, "pl": 1.0}`):
            Weights of the losses of [`hf_mot.training.LOSSES`], or `"cc=1,pl=1"`.
        replay (`str`, *optional*):
            Replay plan that is trained for: `"none"`, `"full"`, `"full:6-11"`, `"bottom:6"`, `"tokens:32"` or
            `"bottom:6+tokens:32"`. The losses on states leave out what the target runs natively below the
            translated layers and of the last tokens. By default the translator's own.
        correct_window_start (`bool`, *optional*, defaults to `True`):
            Whether the losses on states count the first layer of the window too; the paper's Eq. 14 starts above it.
        length (`int`, *optional*, defaults to 128):
            Target tokens of an example with the longest context.
        context_length (`str` or `int`, *optional*, defaults to 64):
            Target tokens of context, or a range `"64-256"` that they are drawn from.
        copy_share (`float`, *optional*, defaults to 0.0):
            Share of the examples whose prompt must be copied from the context.
        shuffle_buffer (`int`, *optional*, defaults to 50,000):
            Examples held to be shuffled.
        vocabulary_size (`int`, *optional*):
            Narrows the losses on prompts to so many of the target's tokens, the most frequent ones of the training
            data, and those of the step's own prompts. The softmax of both models then runs over these alone: `"pl"`
            is a lower bound of the exact cross-entropy, and `"distill"` compares the two distributions given that
            one of these tokens comes next. An LM head over a large vocabulary costs more than a small model's layers;
            without it, nothing keeps tokens that do not occur from becoming likely. A loss in training alone:
            evaluation is always exact. By default all tokens are compared.
        linear_learning_rate (`float`, *optional*):
            Learning rate of the translator's linear path, which may come from a closed-form fit. By default
            `learning_rate`.
        train_only (`str`, *optional*):
            A regular expression; only parameters of the translator whose names it is found in are trained, e.g.
            `"key_norms"` or `"refine"`. By default all are.
        eval_context_length (`int`, *optional*, defaults to 256):
            Target tokens of context where recovery is measured.
        eval_limit (`int`, *optional*, defaults to 32):
            Documents it is measured on, at most.

    Raises:
        `ValueError`: losses, lengths or a plan that cannot be read, sizes below 1, learning rates below 0, a
            vocabulary that is empty or for no loss.
    """

    max_steps: int = field(default=500, metadata={"help": "Optimizer steps."})
    per_device_train_batch_size: int = field(default=4, metadata={"help": "Sequences a forward pass and device."})
    gradient_accumulation_steps: int = field(default=4, metadata={"help": "Forward passes an optimizer step."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Learning rate of AdamW."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay of AdamW."})
    warmup_steps: float = field(default=0.1, metadata={"help": "Steps of warm-up, or below 1 their share."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning-rate schedule."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Norm at which gradients are clipped."})
    logging_steps: float = field(default=10, metadata={"help": "Steps from log to log."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Must stay false: no column is unused."})
    losses: dict | str | None = field(default=None, metadata={"help": "Weights of the losses, e.g. cc=1,pl=1."})
    replay: str | None = field(default=None, metadata={"help": "Replay plan that is trained for."})
    correct_window_start: bool = field(default=True, metadata={"help": "Count the window's first layer in losses."})
    length: int = field(default=128, metadata={"help": "Target tokens of an example."})
    context_length: str = field(default="64", metadata={"help": "Target tokens of context, or a range 64-256."})
    copy_share: float = field(default=0.0, metadata={"help": "Share of examples that must be copied."})
    shuffle_buffer: int = field(default=50_000, metadata={"help": "Examples held to be shuffled."})
    vocabulary_size: int | None = field(default=None, metadata={"help": "Tokens that losses on prompts compare."})
    linear_learning_rate: float | None = field(default=None, metadata={"help": "Learning rate of the linear path."})
    train_only: str | None = field(default=None, metadata={"help": "Train parameters with such names alone."})
    eval_context_length: int = field(default=256, metadata={"help": "Tokens of context where recovery is measured."})
    eval_limit: int = field(default=32, metadata={"help": "Documents it is measured on, at most."})

    def __post_init__(self):
        self.losses = parse_losses({"cc": 1.0, "pl": 1.0} if self.losses is None else self.losses)
        if self.replay is not None:
            ReplayPlan.parse(self.replay)
        self._check_numbers()
        if self.vocabulary_size is not None:
            self._check_vocabulary_size()
        self.context_range  # noqa: B018  reads it, and refuses what it cannot
        if self.remove_unused_columns:
            raise ValueError("`remove_unused_columns` must be False: the trainer reads all columns of a batch.")
        super().__post_init__()
        # Batches hold names, which one process cannot send to the others: each reads its own share.
        if self.accelerator_config.dispatch_batches is None:
            self.accelerator_config.dispatch_batches = False

    def _check_numbers(self) -> None:
        counts = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        for name in (*counts, "eval_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be 1 or more, got {getattr(self, name)}.")
        for name in ("learning_rate", "linear_learning_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 <= rate < math.inf:
                raise ValueError(f"`{name}` must be a number of 0 or more, got {rate}.")

    def _check_vocabulary_size(self) -> None:
        if self.vocabulary_size < 1:
            raise ValueError(f"`vocabulary_size` must be 1 token or more, got {self.vocabulary_size}.")
        if not any(self.losses.get(name) for name in ON_PROMPT):
            raise ValueError(
                f"`vocabulary_size` is {self.vocabulary_size}, but `losses` {self.losses} has none on prompts "
                f"({', '.join(ON_PROMPT)}), which it would narrow. Leave it out."
            )

    @property
    def context_range(self) -> tuple[int, int]:
        """The least and the most tokens of context."""
        low, _, high = str(self.context_length).partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise ValueError(
                f"`context_length` must be a number of tokens, or a range like 64-256, got {self.context_length!r}."
            )
        return int(low), int(high or low)


def parse_losses(losses: dict[str, float] | str) -> dict[str, float]:
    """
    Reads the weights of losses.

    Args:
        losses (`dict[str, float]` or `str`): Weights by name, or `"cc=1,pl=0.5"`; a name alone weighs 1.

    Raises:
        `ValueError`: an unknown loss, weights that are negative or all 0, or none at all.
    """
    if isinstance(losses, str):
        pairs = (part.strip().partition("=") for part in losses.split(",") if part.strip())
        named = [(name, weight or "1") for name, _, weight in pairs]
        losses = dict(named)
        for name in losses:
            if [other for other, _ in named].count(name) > 1:
                raise ValueError(f"`losses` names {name!r} twice. Give each one weight.")
    weights = {}
    for name, weight in losses.items():
        try:
            weights[name] = float(weight)
        except (TypeError, ValueError) as error:
            raise ValueError(f"`losses` must give {name} a number as weight, got {weight!r}.") from error
    check_losses(weights)
    return weights
