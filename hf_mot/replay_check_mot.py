"""Whether a translator gives what a replay plan takes, and whether a target can run it."""

from dataclasses import replace

from transformers import PreTrainedModel

from .configuration_mot import MoTConfig
from .geometry_mot import ModelGeometry
from .replay_mot import ReplayPlan
from .resume_mot import check_resumable
from .sparse_mot import sparse_way
from .uncertain_mot import check_runs_slots


def check_target(plan: ReplayPlan, target: PreTrainedModel, geometry: ModelGeometry) -> None:
    """Raises `ValueError` for a target that cannot run a plan, which the model itself shows."""
    if plan.sparse:
        sparse_way(target)
    if plan.uncertain:
        check_runs_slots(target)
    if plan.resume is not None:
        check_resumable(target, geometry)


def check_translator(plan: ReplayPlan, config: MoTConfig) -> None:
    """Raises `ValueError` for a plan that takes what a translator with this configuration does not give, or does not
    compute what it reads. Which layers it takes is checked by [`ReplayPlan.layers`], and by [`check_prediction`] which
    tokens."""
    _check_hidden_states(plan, config)
    if plan.sparse and not config.source_layers:
        raise ValueError(
            f"`replay` {plan} looks where the source has looked, but this translator reads no source. Pass "
            f"replay='{plan.unguided}'."
        )


def check_prediction(plan: ReplayPlan, config: MoTConfig) -> None:
    """Raises `ValueError` for a plan that runs the tokens that are likeliest wrong, if nobody tells which. Comes last:
    the plan that it names in place of this one takes the same of the translator otherwise."""
    if not plan.uncertain or config.predicts_error or config.method == "identity":
        return
    instead, meaning = plan.unpredicted, "so many last tokens"
    if _reads_last_tokens(instead, config):
        instead, meaning = replace(plan, tokens=0, uncertain=0), "no tokens"
    raise ValueError(
        f"`replay` {plan} runs the tokens that are likeliest translated wrong, but this translator does not tell "
        f"which (`predicts_error`). Fit it again with hf-mot fit and a rank, or pass replay='{instead}', {meaning}."
    )


def _check_hidden_states(plan: ReplayPlan, config: MoTConfig) -> None:
    """Refuses a plan in which the target does not compute the hidden state that is read, or not of all tokens."""
    layer_idx, resumed = config.target_hidden_layer, config.resume_layer
    if plan.resume is not None and resumed != plan.resume + 1 and config.method != "identity":
        given = "no input of a layer" if resumed is None else f"that of layer {resumed}"
        way_out = "Fit one with" if resumed is None else f"Pass replay='resume:{resumed - 1}', or fit one with"
        raise ValueError(
            f"`replay` is {plan}, by which the target runs from the input of its layer {plan.resume + 1}, but "
            f"this translator gives {given}. {way_out} `resume_layer` {plan.resume + 1}."
        )
    if resumed is not None and plan.kind == "none" and plan.resume is None:
        raise ValueError(
            f"`replay` is {plan}, but this translator gives the input of layer {resumed} of the target "
            f"(`resume_layer`), which then has to run from there. Pass replay='resume:{resumed - 1}' or "
            f"'resume:{resumed - 1}+tokens:32'."
        )
    if layer_idx is None:
        return
    if plan.bottom <= layer_idx:
        lowest = ReplayPlan(bottom=layer_idx + 1, tokens=32)
        also = "" if _reads_last_tokens(lowest, config) else f" or '{lowest}'"
        raise ValueError(
            f"`replay` is {plan}, but this translator reads what goes into layer {layer_idx} of the target "
            f"(`target_hidden_layer`), which the target then has to compute. Pass replay='bottom:{layer_idx + 1}'"
            f"{also}, or a higher bottom."
        )
    if _reads_last_tokens(plan, config):
        raise ValueError(
            f"`replay` is {plan}, but this translator is not `causal`: it reads the target's hidden states of the "
            f"last tokens too, which are run later. Pass replay='bottom:{plan.bottom}'."
        )


def _reads_last_tokens(plan: ReplayPlan, config: MoTConfig) -> bool:
    """Whether the translator reads the target's hidden states of the plan's last tokens too, which are run later."""
    if config.target_hidden_layer is None or plan.tokens == 0:
        return False
    return plan.tokens_read(config, plan.tokens + 1) > 1
