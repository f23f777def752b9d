"""`replay="auto"`: the plan that the translator's own measured curve says to take."""

import re

from .configuration_mot import MoTConfig
from .replay_mot import ReplayPlan

DEFAULT_BUDGET = 0.5
_FORM = re.compile(r"auto(:(?P<floor>recovery=)?(?P<number>\d+(\.\d+)?|\.\d+))?")


def is_auto(replay: str | ReplayPlan) -> bool:
    """Whether a plan is to be chosen, and not one itself."""
    return isinstance(replay, str) and replay.startswith("auto")


def choose_plan(replay: str, config: MoTConfig, context_length: int | None = None, guided: bool = True) -> ReplayPlan:
    """
    Chooses one of the plans that `hf-mot evaluate … --curve --card` has measured, `config.replay_curve`.

    - `"auto:0.25"`: of those that cost at most 0.25 of the target's own prefill FLOPs, the translator included, the
      one with the highest recovery. `"auto"` is `"auto:0.5"`.
    - `"auto:recovery=0.9"`: the cheapest one whose recovery is 0.9 or more with the whole of its 95 % interval.

    The cost is that of the context at hand, by the cost model; the recovery is as it was measured, on contexts of
    `config.replay_curve["context_length"]` tokens.

    Args:
        replay (`str`): One of the forms above.
        config ([`MoTConfig`]): The translator's.
        context_length (`int`, *optional*): Target tokens of the (shortest) context, its prefix included: the share of
            each plan is highest there. By default those that the curve was measured on. Plans that run more
            tokens than that are left out.
        guided (`bool`, *optional*, defaults to `True`): Whether it is known where the source has looked. Else plans
            that need to know are left out.

    Raises:
        `ValueError`: another form, no curve, a budget below every plan or a recovery above all.
    """
    form = _FORM.fullmatch(replay)
    if form is None:
        raise ValueError(
            "`replay` auto takes the highest share of native FLOPs, auto:0.25, or the lowest recovery, "
            f"auto:recovery=0.9, got {replay!r}. Correct it, or pass auto alone for auto:{DEFAULT_BUDGET:g}."
        )
    if config.replay_curve is None:
        raise ValueError(
            f"`replay` is {replay!r}, but this translator has no measured curve to choose by. Measure it with hf-mot "
            "evaluate TRANSLATOR --text FILE… --curve --card, or pass a plan."
        )
    length = config.replay_curve["context_length"] if context_length is None else context_length
    own = length - len(config.target["prefix_ids"])
    measured = [(ReplayPlan.parse(point["replay"]), point["recovery"]) for point in config.replay_curve["points"]]
    possible = [point for point in measured if point[0].run_tokens <= own and (guided or not point[0].sparse)]
    costs = [(plan.flops_share(config, length), plan, found) for plan, found in possible]
    if not costs:
        raise ValueError(
            f"`replay` is {replay!r}, but all plans of the measured curve run more tokens than the {own} of this "
            f"context{'' if guided else ' or need guidance, which a ready cache does not have'}. Pass a plan."
        )
    number = DEFAULT_BUDGET if form["number"] is None else float(form["number"])
    if form["floor"] is None:
        within = [point for point in costs if point[0] <= number]
        if not within:
            share, plan, _ = min(costs, key=lambda point: point[0])
            raise ValueError(
                f"`replay` is {replay!r}, but the cheapest measured plan, {plan}, costs {share:.3f} of the target's "
                f"own prefill FLOPs at {length} tokens. Allow that much, or measure cheaper plans (--curve)."
            )
        return max(within, key=lambda point: (point[2]["value"], -point[0]))[1]
    enough = [point for point in costs if point[2]["low"] >= number]
    if not enough:
        _, plan, best = max(costs, key=lambda point: point[2]["low"])
        raise ValueError(
            f"`replay` is {replay!r}, but no measured plan surely reaches that: the best, {plan}, has a recovery of "
            f"{best['value']:.3f} [{best['low']:.3f}, {best['high']:.3f}], whose low end counts. Ask for less, or "
            "measure more plans (--curve)."
        )
    return min(enough, key=lambda point: point[0])[1]
