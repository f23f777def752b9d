"""MoTTrainer: trains a translator between two frozen models. `compute_loss` is the page to read."""

import itertools
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_utils import unwrap_peft_model

from hf_mot.contract_mot import check_model, check_tokenizer
from hf_mot.data.states import StatesDataset
from hf_mot.modeling_mot import MoTModel
from hf_mot.replay_auto_mot import is_auto

from .arguments import MoTTrainingArguments
from .checkpoints import check_checkpoint, check_progress, last_checkpoint, missing_folders, remove_empty, save_base
from .collator import PairCollator
from .comparison import Comparison, token_counts
from .datasets import TextDataset, check_contexts
from .evaluation import ContextEvaluation, check_evaluation
from .losses import ON_PROMPT, native_variances, pairs_of_weights, weighted_sum
from .meter import Meter
from .optimizer import set_linear_learning_rate, train_only
from .report import last_logged, training_report
from .routing import RouterUsage
from .vocabulary import VOCABULARY_EXAMPLES, frequent_tokens, scored_ids

TOKENS = ("context", "prompt", "all")
# What variances are taken from, whatever the run's own batches: resumed and split runs see the same.
VARIANCE_EXAMPLES, VARIANCE_BATCH = 32, 4


class MoTTrainer(Trainer):
    """
    A `transformers.Trainer` for a translator. The language models are frozen and no part of what is trained or saved:
    a checkpoint holds the translator alone, and is one.

    Args:
        model ([`MoTModel`] or a `PeftModel` of one): The translator.
        args ([`MoTTrainingArguments`], *optional*): The recipe.
        data_collator (`Callable`, *optional*): Makes batches; [`PairCollator`] by default.
        target (`PreTrainedModel`, *optional*): The target. Only captured states
            ([`hf_mot.data.states.StatesDataset`]) can be trained on without it, by losses on states.
        source (`PreTrainedModel`, *optional*): The source; not needed where the translator reads none, or its states
            were captured.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Their fast tokenizers.
        eval_documents (`Iterable[str]`, *optional*): Held-out documents: `evaluate` then also reports `eval_recovery`.
        no_source ([`MoTModel`], *optional*): The translator's twin without source: and `eval_source_value`.
        layer_weights (`Sequence`, *optional*): A weight for each target layer in the losses on states, or a pair of
            them for its keys and its values, as [`hf_mot.fit.loss_weights`] makes them of a measured sensitivity.
        target_embeddings (`nn.Module`, *optional*): The target's token embeddings, in place of a target.
        allow_variant (`bool`, *optional*, defaults to `False`): Accepts a source or target that is the translator's
            with another PEFT adapter or quantization.
        kwargs: Of `transformers.Trainer`.

    Raises:
        `ValueError`: models or tokenizers that are not the translator's pair, layer weights that no loss reads; in
            training, a loss or gradient that is not finite.
    """

    def __init__(
        self,
        model: PreTrainedModel | nn.Module,
        args: MoTTrainingArguments | None = None,
        data_collator: Any = None,
        *,
        target: PreTrainedModel | None = None,
        source: PreTrainedModel | None = None,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        eval_documents: Iterable[str] | None = None,
        no_source: MoTModel | None = None,
        layer_weights: Sequence[float | tuple[float, float]] | None = None,
        target_embeddings: nn.Module | None = None,
        allow_variant: bool = False,
        **kwargs: Any,
    ):
        args = MoTTrainingArguments("tmp_trainer") if args is None else args
        data = [kwargs.get("train_dataset"), kwargs.get("eval_dataset")]
        captured = next((part for part in data if isinstance(part, StatesDataset)), None)
        self._new_folders = missing_folders(args.output_dir) if args.should_save else []
        super().__init__(model, args, data_collator, **kwargs)
        remove_empty(self._new_folders)  # what is refused below leaves none behind
        self.loss_is_scaled_for_ga = True
        mot = self.translator
        if args.train_only is not None:
            train_only(self.model, args.train_only)
        if data_collator is None:
            self.data_collator = PairCollator(mot.config, source_tokenizer, target_tokenizer)
        mot.config.__dict__.pop("use_cache", None)  # set on every model; a translator has no such field
        for side, language_model, tokenizer in (
            ("source", source, source_tokenizer),
            ("target", target, target_tokenizer),
        ):
            if language_model is not None:
                check_model(getattr(mot.config, side), language_model, side, allow_variant)
                check_tokenizer(getattr(mot.config, side), tokenizer, f"{side}_tokenizer")
        for frozen in (source, target, no_source, target_embeddings):
            if frozen is not None:
                _freeze(frozen, args.device)
        if layer_weights is not None:
            layer_weights = pairs_of_weights(layer_weights, len(mot.target_geometry.layers))
        self.target_embeddings = target_embeddings
        plan = mot.plan(args.replay)
        if not mot.injected_layers(plan):
            raise ValueError(f"`replay` {plan} runs every layer natively: nothing is left to train. Run fewer layers.")
        self.native_tokens = len(mot.config.target["prefix_ids"]) + plan.tokens
        for part in data:
            for dataset in part.values() if isinstance(part, dict) else [part]:
                check_contexts(dataset, plan, len(mot.config.target["prefix_ids"]))
        check_evaluation(mot, plan, eval_documents, no_source, source, target, args.eval_context_length, allow_variant)
        # What it is trained for is what it takes where none is given.
        if args.replay is not None or is_auto(mot.config.replay):
            mot.config.replay = str(plan)
        mot.config.replay_curve = None  # of the weights as they were
        self.comparison = Comparison(
            source,
            target,
            plan=plan,
            losses=[name for name, weight in args.losses.items() if weight],
            captured_layers=None if captured is None else captured.target_layers,
            cc_start=0 if args.correct_window_start else 1,
            layer_weights=layer_weights,
            restores=bool(mot.config.restored_layers),
        )
        self.context_evaluation = None
        if eval_documents is not None:
            self.context_evaluation = ContextEvaluation(
                eval_documents,
                source=source,
                target=target,
                source_tokenizer=source_tokenizer,
                target_tokenizer=target_tokenizer,
                no_source=no_source,
                context_length=args.eval_context_length,
                limit=args.eval_limit,
                replay=str(self.comparison.plan),
                batch_size=args.per_device_eval_batch_size,
                seed=args.seed,
            )
        self.facts: dict[str, Any] = {}  # what else the report says, e.g. the name of the text
        self._variances: dict[str, list[float]] | None = None
        self._frequent: torch.Tensor | None = None
        self._best_step: int | None = None  # whose weights are loaded, once a run has ended
        self._meters = {True: Meter(), False: Meter()}  # in training, in evaluation
        self._usage = RouterUsage(self.model)
        self.documents: list[str] = []  # of the step that runs
        self.add_callback(_LogLastStep())
        self.add_callback(_CheckGradients(self))
        self._clock = time.perf_counter()
        if args.should_save:
            os.makedirs(args.output_dir, exist_ok=True)

    @property
    def translator(self) -> MoTModel:
        """The translator without what DDP or PEFT wrap around it."""
        return unwrap_peft_model(self.accelerator.unwrap_model(self.model))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """
        The weighted sum of the losses. Each is a mean over tokens; `num_items_in_batch` holds how many of them the
        whole accumulated batch has, so that the sum over its parts is that of one large batch.
        """
        read = self.comparison.inputs(self.translator, inputs, self.target_embeddings)
        output = model(**self.translator.forward_arguments(read, self.comparison.plan))
        compared = self.comparison.loss_inputs(self.translator, output, read, inputs)
        compared = replace(compared, variances=self._native_variances())
        counts = token_counts(inputs, self.native_tokens)
        totals = counts if num_items_in_batch is None else num_items_in_batch
        shares = {name: counts[kind(name)] / totals[kind(name)] for name in self.args.losses}
        loss, parts = weighted_sum(compared, {name: w * shares[name] for name, w in self.args.losses.items()})
        self._check_finite(loss, parts, inputs)
        figures = {f"{name}_loss": part for name, part in parts.items()}
        weights = {f"{name}_loss": float(counts[kind(name)]) for name in parts}
        self._meters[model.training].add(figures, weights)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # whose gradients are averaged
        return (loss, output) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        """The loss of a batch of the evaluation; there are no predictions."""
        with torch.no_grad():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of an optimizer step, and how many tokens they have in all processes. What their losses on
        prompts are narrowed to is one vocabulary for all of them, however they are split."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.documents = [document for batch in batches for document in batch["documents"]]
        counts = [token_counts(batch, self.native_tokens) for batch in batches]
        totals = torch.tensor([sum(count[name] for count in counts) for name in TOKENS], device=device)
        totals = dict(zip(TOKENS, self.accelerator.reduce(totals, "sum").tolist(), strict=True))
        self.state.num_input_tokens_seen += totals["all"]
        if self.args.vocabulary_size is not None:
            vocabulary = self._vocabulary(batches, device)
            batches = [{**batch, "vocabulary": vocabulary} for batch in batches]
        return batches, totals

    def create_optimizer(self, model=None):
        """As in the Trainer; the linear path gets its own learning rate."""
        made_here = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if made_here and self.args.linear_learning_rate is not None:
            set_linear_learning_rate(optimizer, self.model if model is None else model, self.args.linear_learning_rate)
        return optimizer

    def get_decay_parameter_names(self, model) -> list[str]:
        """As in the Trainer; a gain does not decay towards 0."""
        return [name for name in super().get_decay_parameter_names(model) if not name.endswith("gain")]

    def evaluation_loop(self, dataloader, description, *args, metric_key_prefix="eval", **kwargs):
        """As in the Trainer, with each loss and, where there are `eval_documents`, recovery and source value."""
        output = super().evaluation_loop(dataloader, description, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        figures = self._meters[False].drain(self.accelerator)
        if self.context_evaluation is not None:
            # One process measures: what all of them decide by must be the same.
            measured = [self.context_evaluation(self.translator) if self.is_world_process_zero() else None]
            figures |= broadcast_object_list(measured)[0]
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in figures.items()})
        best = self.args.metric_for_best_model
        if best in ("recovery", "source_value") and f"{metric_key_prefix}_{best}" not in output.metrics:
            raise ValueError(
                f"`metric_for_best_model` is {best}, which these documents do not define: the target predicts them no "
                "better than its control does. Evaluate on others, or take loss."
            )
        return output

    def log(self, logs, start_time=None):
        """Adds each loss, and the seconds that the run has taken so far, killed ones included."""
        if "loss" in logs:
            logs |= self._meters[True].drain(self.accelerator) | self._usage.drain(self.accelerator)
            now = time.perf_counter()
            logs["seconds"] = last_logged(self.state.log_history, "seconds", 0.0) + now - self._clock
            self._clock = now
        super().log(logs, start_time)

    def train(self, resume_from_checkpoint=None, **kwargs):
        """As in the Trainer; `resume_from_checkpoint=True` takes the last checkpoint that is whole."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"`resume_from_checkpoint`: {self.args.output_dir} holds no whole checkpoint.")
        self._clock, self._best_step = time.perf_counter(), None
        try:
            return super().train(resume_from_checkpoint, **kwargs)
        except BaseException:
            remove_empty(self._new_folders)
            raise

    def save_model(self, output_dir=None, _internal_call=False):
        """Saves the translator, with how it was trained in its fit report."""
        self.translator.fit_report = self.report()
        super().save_model(output_dir, _internal_call)
        if self.args.should_save and self.translator is not self.accelerator.unwrap_model(self.model):
            save_base(self.args.output_dir if output_dir is None else output_dir, self.translator)

    def report(self) -> dict[str, Any]:
        """The translator's fit report, with how it was trained: settings, steps, tokens, losses, seconds, versions."""
        report = dict(self.translator.fit_report or {})
        report.pop("evaluation", None)  # of the translator that the training started from
        captured = isinstance(self.train_dataset, StatesDataset)
        training = training_report(self.args, self.state, str(self.comparison.plan), captured, self._best_step)
        if self.comparison.layer_weights is not None:
            training["settings"]["layer_weights"] = list(self.comparison.layer_weights)
        return {**report, "training": {**training, **self.facts}}

    def _load_best_model(self):
        """As in the Trainer; the report is on these weights then."""
        super()._load_best_model()
        self._best_step = self.state.best_global_step

    def _run_epoch(self, *args, **kwargs):
        """As in the Trainer, which makes one step more when a run is resumed that has made all of its own."""
        if self.state.global_step < self.state.max_steps:
            return super()._run_epoch(*args, **kwargs)
        self.control.should_training_stop = True

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        check_checkpoint(resume_from_checkpoint, self.translator)
        check_progress(resume_from_checkpoint, self.args.max_steps, self.args.world_size)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _native_variances(self) -> dict[str, list[float]]:
        """How much the native states of each layer vary, on the first examples of the data: a scale that is the same
        for all batches, so that parts of a batch add up to it, and after a resume."""
        if self._variances is None:
            dataset = self.eval_dataset if self.train_dataset is None else self.train_dataset
            dataset = next(iter(dataset.values())) if isinstance(dataset, dict) else dataset
            examples, found = _first(dataset, VARIANCE_EXAMPLES), []
            for start in range(0, len(examples), VARIANCE_BATCH):
                batch = self._prepare_inputs(self.data_collator(examples[start : start + VARIANCE_BATCH]))
                read = self.comparison.inputs(self.translator, batch, self.target_embeddings)
                found.append(native_variances(self.comparison.native_inputs(self.translator, read, batch)))
            self._variances = {
                name: [sum(layer) / len(found) for layer in zip(*(each[name] for each in found), strict=True)]
                for name in found[0]
            }
        return self._variances

    def _vocabulary(self, batches: list[dict[str, Any]], device: torch.device) -> torch.Tensor:
        """Ids, ascending: the frequent ones of the training data, and those of the prompts in all processes."""
        if self._frequent is None:
            size = len(self.comparison.target.get_output_embeddings().weight)
            data = self.train_dataset
            data = data if isinstance(data, StatesDataset) else _first(data, VOCABULARY_EXAMPLES)
            self._frequent = frequent_tokens(data, self.args.vocabulary_size, size)
        wanted = self._frequent.to(device, copy=True)
        for ids in itertools.chain.from_iterable(map(scored_ids, batches)):
            wanted[ids.to(device)] = 1
        return self.accelerator.reduce(wanted, "sum").nonzero().flatten()

    def _check_finite(self, loss: torch.Tensor, parts: dict[str, torch.Tensor], batch: dict[str, Any]) -> None:
        if not bool(torch.isfinite(loss)):
            figures = ", ".join(f"{name} {part.item():.4g}" for name, part in parts.items())
            raise ValueError(
                f"The loss is {loss.item()} at step {self.state.global_step + 1} ({figures}), in the documents "
                f"{', '.join(batch['documents'])}. Check the dtypes of both models and the translator's weights, or "
                "lower `learning_rate`."
            )


class _CheckGradients(TrainerCallback):
    """A loss can be finite and its gradient not, of which the loss of the next documents would tell, too late."""

    def __init__(self, trainer: MoTTrainer):
        self.trainer = trainer

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.trainer.accelerator.scaler is not None:  # of fp16, which leaves such steps out
            return
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        if not bool(nn.utils.get_total_norm(gradients).isfinite()):
            raise ValueError(
                f"The gradient is not finite at step {state.global_step + 1}, in the documents "
                f"{', '.join(self.trainer.documents)}. Check the dtypes of both models and the translator's weights, "
                "or leave these documents out."
            )


class _LogLastStep(TrainerCallback):
    """The report says how a run ended, whenever its last log was due."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_log |= state.global_step >= state.max_steps


def kind(loss: str) -> str:
    """Which tokens a loss is a mean over."""
    return "prompt" if loss in ON_PROMPT else "context"


def _first(dataset: Any, count: int) -> list[Any]:
    """The first examples of a dataset, at most `count`."""
    if isinstance(dataset, TextDataset):
        return dataset.head(count)
    return list(itertools.islice(iter(dataset), count))


def _freeze(model: nn.Module, device: torch.device) -> None:
    model.eval().requires_grad_(False)
    if getattr(model, "hf_device_map", None) is None:  # else it was placed by its owner
        model.to(device)
