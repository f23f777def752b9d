"""What a handoff costs beside the target's own prefill: interleaved repeats in one run, medians and spread."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from transformers import Cache

from hf_mot.alignment_mot import tokenize_with_spans
from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import cache_argument
from hf_mot.evaluation.batch import Batch, Models
from hf_mot.evaluation.memory import peak_growth
from hf_mot.evaluation.windows import Window
from hf_mot.guidance_mot import Guidance
from hf_mot.replay_mot import ReplayPlan

PROMPT_TOKENS = 32


@torch.no_grad()
def measure_cost(models: Models, window: Window, *, repeats: int = 5, plans: Sequence[str] = ()) -> dict[str, Any]:
    """
    Times one context on the machine at hand. Absolute times are its own; the ratios are what counts.

    Args:
        models (`Models`): The pair and its translator.
        window (`Window`): The context; the first 32 tokens of its continuation are the prompt.
        repeats (`int`, *optional*, defaults to 5): Rounds that count; one more round before them warms up.
        plans (`Sequence[str]`, *optional*): Replay plans whose handoffs are measured too, in the same rounds, beside
            that of `models.replay`.

    Returns:
        `dict`: Seconds are medians over the rounds.

        - `prefill_s`: the target's base model reads the context, without LM head, into a fresh cache;
        - `handoff_s`: from the source's ordinary cache and both id lists to a ready `TranslatedCache`;
        - `time_ratio`: `handoff_s / prefill_s`, with `time_ratio_low` and `time_ratio_high`, the smallest and the
          largest ratio within one round;
        - `capture_overhead_s`: what keeping the translator's layers alone, and plan sparse's guidance, adds to the
          source's plain prefill; may be below 0, as less is kept and no layer above them runs;
        - `ttft_native_s`, `ttft_translated_s`: either of the two, and then the prompt up to its last logits;
        - `flops_ratio`: translator and replay as a share of the native prefill's FLOPs;
        - `kv_bytes`, `translator_bytes`: the translated cache's and the translator's live bytes;
        - `peak_bytes`: growth of memory during a handoff, above the models and the source's cache, the translated
          cache included; on the target's device, if that is CUDA or the CPU (see [`peak_growth`]);
        - `prefill_peak_bytes`: the same during the target's own prefill, its cache included;
        - `context_length`, `prompt_tokens`, `repeats`: what it was measured with;
        - `by_plan`: for each of `plans` a dict of its `handoff_s`, `time_ratio` (and its ends), `flops_ratio` and
          `peak_bytes`.
    """
    target, translator = models.target, models.translator
    layers = translator.config.source_layers
    target_ids, _ = Batch(models, [window]).padded
    prompt_ids = torch.tensor([window.continuation_ids[:PROMPT_TOKENS]], device=target.device)
    source_ids = source_cache = guide = None
    guidance: dict[str, Guidance] = {}  # of plans that need to know where the source has looked
    if layers:
        text_ids, _ = tokenize_with_spans(models.source_tokenizer, window.text)
        source_ids = torch.tensor([[*translator.config.source["prefix_ids"], *text_ids]])
        source_cache = prefill(models.source, source_ids)
        guide = translator.source_guide(ReplayPlan.parse(models.replay))
        guided = [plan for plan in (models.replay, *plans) if ReplayPlan.parse(plan).sparse]
        guidance = {plan: translator.guide(models.source, source_ids, replay=plan) for plan in guided}

    def handoff(plan: str = models.replay) -> Cache:
        return translator.translate(
            source_cache,
            source_ids,
            target=target,
            source_tokenizer=models.source_tokenizer,
            target_tokenizer=models.target_tokenizer,
            target_input_ids=target_ids,
            text=window.text,
            replay=plan,
            guidance=guidance.get(plan),
        )

    def read_prompt(cache: Cache) -> None:
        target(input_ids=prompt_ids, logits_to_keep=1, **{cache_argument(target): cache})

    rounds: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        seconds = {}
        seconds["prefill"], native = _timed(models, prefill, target, target_ids)
        seconds["handoff"], translated = _timed(models, handoff)
        seconds["native_prompt"], _ = _timed(models, read_prompt, native)
        seconds["translated_prompt"], _ = _timed(models, read_prompt, translated.fork())
        for plan in plans:
            seconds[plan], _ = _timed(models, handoff, plan)
        if layers:
            # In turns, since the second of two equal runs finds its weights at hand.
            for name, kept in (("source", None), ("capture", layers))[:: (-1) ** len(rounds)]:
                own = {} if kept is None else {"layers": kept, "guide": guide}
                seconds[name], _ = _timed(models, prefill, models.source, source_ids, **own)
        rounds.append(seconds)
    del rounds[0]

    def of_handoff(name: str, plan: str) -> dict[str, float]:
        handoff_s = median(seconds[name] for seconds in rounds)
        ratios = [seconds[name] / seconds["prefill"] for seconds in rounds]
        peak = peak_growth(lambda: handoff(plan), target.device)
        return {
            "handoff_s": handoff_s,
            "time_ratio": handoff_s / median(seconds["prefill"] for seconds in rounds),
            "time_ratio_low": min(ratios),
            "time_ratio_high": max(ratios),
            "flops_ratio": ReplayPlan.parse(plan).flops_share(translator.config, len(window.context_ids)),
            **({} if peak is None else {"peak_bytes": peak}),
        }

    cost = {
        "prefill_s": median(seconds["prefill"] for seconds in rounds),
        **of_handoff("handoff", models.replay),
        "ttft_native_s": median(seconds["prefill"] + seconds["native_prompt"] for seconds in rounds),
        "ttft_translated_s": median(seconds["handoff"] + seconds["translated_prompt"] for seconds in rounds),
        "kv_bytes": translated.kv_bytes,
        "translator_bytes": translator_bytes(translator),
        "context_length": len(window.context_ids),
        "prompt_tokens": prompt_ids.shape[1],
        "repeats": repeats,
    }
    if layers:
        cost["capture_overhead_s"] = median(seconds["capture"] - seconds["source"] for seconds in rounds)
    prefill_peak = peak_growth(lambda: prefill(target, target_ids), target.device)
    cost |= {} if prefill_peak is None else {"prefill_peak_bytes": prefill_peak}
    return cost | ({"by_plan": {plan: of_handoff(plan, plan) for plan in plans}} if plans else {})


def translator_bytes(translator: torch.nn.Module) -> int:
    """Bytes of a translator's weights, as they are loaded."""
    return sum(tensor.nbytes for tensor in (*translator.parameters(), *translator.buffers()))


def _timed(models: Models, work: Callable[..., Cache | None], *args: Any, **kwargs: Any):
    """Seconds that `work` took, and what it returned."""
    _synchronize(models)
    start = time.perf_counter()
    result = work(*args, **kwargs)
    _synchronize(models)
    return time.perf_counter() - start, result


def _synchronize(models: Models) -> None:
    for model in (models.source, models.target):
        if model is not None and model.device.type != "cpu":
            torch.accelerator.synchronize(model.device)
