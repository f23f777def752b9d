"""The lm-evaluation-harness on a translated cache: importing this file registers the model `hf_mot`, and
`python -m hf_mot.evaluation.lm_eval_harness` is the harness's command line with it."""

import json
import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_mot.cache_mot import TranslatedCache
from hf_mot.contract_mot import check_model, check_tokenizer
from hf_mot.evaluation.answers import cross_entropy, prompt_logits
from hf_mot.evaluation.arms import ARMS, translated, wrong_source
from hf_mot.evaluation.batch import Models
from hf_mot.evaluation.requests import Request, chunks, compile_splits, read_requests, split_ids
from hf_mot.generation_mot import attach
from hf_mot.hub.resolve import load_model, load_tokenizer, load_translator
from hf_mot.layers_mot import input_device
from hf_mot.modeling_mot import MoTModel

# Among the harness's own loggers: its command line shows what these say, and nobody else's information.
logger = logging.getLogger("lm_eval.hf_mot")

# Those that need no more than the two models and the translator.
HARNESS_ARMS = [name for name, arm in ARMS.items() if arm.needs in (None, "source", "identity") and not arm.tasks_only]
# What has no effect on greedy decoding.
SAMPLING = {"do_sample", "temperature", "top_p", "top_k", "min_p"}


@register_model("hf_mot")
class TranslatedLM(TemplateLM):
    """
    A target that answers the requests of [lm-evaluation-harness](https://github.com/EleutherAI/lm-evaluation-harness)
    about contexts that only the source has read.

    - **Context and prompt.** The harness gives one text; the source reads its start, and the target the rest, from the
      last place on at which `split` matches. Each part has at least one token. Of a text without such a place the
      target reads all itself, in every arm; how many there were is said in a warning. The text is tokenised as a
      whole, as the harness does it, and a token across the place belongs to the prompt.
    - **`loglikelihood`.** The sum of the target's log-probabilities of the continuation's tokens after both parts, and
      whether each of them is the most probable one.
    - **`generate_until`.** Greedy, up to the first stop string. Sampling, beams and penalties are refused.
    - **`loglikelihood_rolling`.** Refused: a text that is all scored has no context that another model could read.
      `hf-mot evaluate --text` measures context-NLL instead.
    - **Arms.** `native` is the control in the same run of the harness; it equals the harness's own model `hf` with
      `add_bos_token=True`. The twin without a source is a translator of its own (`translator=DIR/no_source`).
    - **Length.** A text that is longer than a model's positions is an error; nothing is cut off.

    Requests that share a context share its translation.

    Args:
        translator (`str`, `os.PathLike` or `MoTModel`): A translator, or its folder or Hub id.
        source, target (`str`, `os.PathLike` or `PreTrainedModel`, *optional*): The models, loaded or by name as in
            [`load_model`]. By default those that the translator was made for. Arms without a source load none.
        source_tokenizer, target_tokenizer (`PreTrainedTokenizerBase`, *optional*): Required beside a loaded model.
        arm (`str`, *optional*, defaults to `"translated"`): How the target comes by a context, of `HARNESS_ARMS`.
        split (`str`, *optional*): A regular expression. By default the first of `SPLITS` that occurs: the last
            `Question:` or `Q:` at the start of a line, the last empty line, the last line break.
        replay (`str`, *optional*): What the target recomputes of the context; by default what the translator was made
            for.
        batch_size (`int`, *optional*, defaults to 1): Contexts, and after them prompts, a forward. Changes nothing but
            speed and memory.
        dtype (`str`, *optional*, defaults to `"float32"`): Of models that are loaded here.
        device (`str`, *optional*): Where all are put. By default they stay where they were loaded; so they do on a
            machine without CUDA with `"cuda:0"`, which the harness's command line says unless told otherwise.
        max_gen_toks (`int`, *optional*, defaults to 256): Tokens to generate, for tasks that do not say.

    Raises:
        ValueError: On an unknown arm or plan, a bad `split` or `batch_size`, a model that is neither named nor
            recorded, or a target that is not the translator's.
    """

    def __init__(
        self,
        translator: str | os.PathLike | MoTModel,
        source: str | os.PathLike | PreTrainedModel | None = None,
        target: str | os.PathLike | PreTrainedModel | None = None,
        *,
        source_tokenizer: PreTrainedTokenizerBase | None = None,
        target_tokenizer: PreTrainedTokenizerBase | None = None,
        arm: str = "translated",
        split: str | None = None,
        replay: str | None = None,
        batch_size: int | str = 1,
        dtype: str = "float32",
        device: str | None = None,
        max_gen_toks: int = 256,
    ):
        super().__init__()
        if arm not in HARNESS_ARMS:
            raise ValueError(f"`arm` must be one of {', '.join(HARNESS_ARMS)}, got {arm!r}.")
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(f"`batch_size` must be a number of contexts, at least 1, got {batch_size!r}.")
        self.splits = compile_splits(split)
        self.arm, self.batch_size, self.max_gen_toks = arm, int(batch_size), max_gen_toks
        if isinstance(translator, str | os.PathLike):
            translator = load_translator(translator)
        replay = str(translator.plan(replay))
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            device = None
        if device is not None:
            translator = translator.to(device)
        contracts = translator.config
        if arm == "wrong_source" and not contracts.source_layers:
            raise ValueError("`arm` is wrong_source, but this translator reads no source. Choose another arm.")
        if not contracts.source_layers or ARMS[arm].cache not in (translated, wrong_source):
            source = source_tokenizer = None
        else:
            source, source_tokenizer = _load("source", source, source_tokenizer, contracts.source, dtype, device)
        target, self.tokenizer = _load("target", target, target_tokenizer, contracts.target, dtype, device)
        check_model(contracts.target, target, "target")
        check_tokenizer(contracts.target, self.tokenizer, "target_tokenizer")
        self.models = Models(
            source=source,
            target=target,
            source_tokenizer=source_tokenizer,
            target_tokenizer=self.tokenizer,
            translator=translator,
            no_source=None,
            identity=MoTModel.identity(target, self.tokenizer).eval() if ARMS[arm].needs == "identity" else None,
            prefix_ids=list(contracts.target["prefix_ids"]),
            replay=replay,
        )

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a continuation without a context."""
        return self.eot_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The target's ids, behind its prefix (BOS) unless the text has that or `add_special_tokens` is `False`."""
        ids = self.tokenizer(string, add_special_tokens=False, verbose=False)["input_ids"]
        prefix = self.models.prefix_ids
        return ids if add_special_tokens is False or ids[: len(prefix)] == prefix else [*prefix, *ids]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """For each request, its texts and the ids of both: the continuation's log-likelihood, and whether greedy."""
        asked: dict[tuple[int, ...], list[int]] = {}
        for index, ((_, continuation), context_ids, continuation_ids) in enumerate(requests):
            if not continuation_ids:
                raise ValueError(f"`requests` holds the continuation {continuation!r}, which adds no token to score.")
            asked.setdefault(tuple(context_ids), []).append(index)
        room = max((len(ids) for _, _, ids in requests), default=0)
        split, members = self._split(asked, room), list(asked.values())
        answers: list[Any] = [None] * len(requests)
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm) as bar:
            for rows, cache in read_requests(self.models, self.arm, split, self.batch_size):
                pairs = [(place, index) for place, row in enumerate(rows) for index in members[row]]
                for part in chunks(pairs, self.batch_size):
                    chosen = cache.rows(torch.tensor([place for place, _ in part]))
                    continuations = [[split[rows[place]].prompt_ids[-1], *requests[index][2]] for place, index in part]
                    logits, ids = prompt_logits(self.models.target, chosen, continuations)
                    labels = ids[:, 1:]
                    losses, greedy = cross_entropy(logits, labels), logits.argmax(dim=-1) == labels
                    for row, (_, index) in enumerate(part):
                        length = len(requests[index][2])
                        answers[index] = (-losses[row, :length].sum().item(), bool(greedy[row, :length].all()))
                bar.update(len(pairs))
        return answers

    @torch.no_grad()
    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """For each request what the target writes, greedily, before the first stop string."""
        alike: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        answers: list[Any] = [None] * len(requests)
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for indices in alike.values():
                stops, max_new_tokens = self._generation(requests[indices[0]].args[1])
                encoded = [self.tok_encode(requests[index].args[0]) or [self.prefix_token_id] for index in indices]
                split = self._split(encoded, max_new_tokens)
                for rows, cache in read_requests(self.models, self.arm, split, self.batch_size):
                    last_ids = [split[row].prompt_ids[-1] for row in rows]
                    for row, text in zip(rows, self._generate(cache, last_ids, stops, max_new_tokens), strict=True):
                        answers[indices[row]] = text
                    bar.update(len(rows))
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        raise NotImplementedError(
            "Perplexity (loglikelihood_rolling) scores a whole text, which leaves no context for the source to read. "
            "Measure context-NLL with `hf-mot evaluate TRANSLATOR --text FILE`."
        )

    def _split(self, rows: Sequence[Sequence[int]], new_tokens: int) -> list[Request]:
        """Cuts the ids of requests in two, after a check that the target has positions for all of them."""
        longest = max(map(len, rows), default=0) + new_tokens
        limit = self.models.translator.target_geometry.max_positions
        if limit is not None and longest > limit:
            raise ValueError(
                f"`requests` holds a text of {longest} tokens, the answer's {new_tokens} included, but the target has "
                f"{limit} positions. Leave it out, use fewer few-shot examples, or generate less (`max_gen_toks`)."
            )
        requests = [split_ids(row, self.tokenizer, self.splits) for row in rows]
        # A place that is wrong for a task would make its figures worthless, so one is shown.
        for request in [request for request in requests if request.context_ids][:1]:
            prompt = self.tokenizer.decode(request.prompt_ids)
            logger.info(f"arm {self.arm}: the context ends with {request.text[-80:]!r}, the prompt is {prompt!r}")
        return requests

    def _generation(self, gen_kwargs: dict[str, Any]) -> tuple[list[str], int]:
        """Stop strings and length of what is to be generated."""
        options = normalize_gen_kwargs(gen_kwargs, self.max_gen_toks)
        stops, max_new_tokens = options.pop("until"), options.pop("max_gen_toks")
        refused = sorted(options.keys() - SAMPLING)
        if options["do_sample"] or refused:
            raise ValueError(
                f"`gen_kwargs` asks for {', '.join(refused) or 'sampling'}, but on a translated cache the harness "
                "decodes greedily. Override the task's generation_kwargs, e.g. by --gen_kwargs do_sample=False."
            )
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        return handle_stop_sequences(list(stops), eos=eos), max_new_tokens

    def _generate(
        self, cache: TranslatedCache, last_ids: list[int], stops: list[str], max_new_tokens: int
    ) -> list[str]:
        target, pad = self.models.target, self.tokenizer.pad_token_id
        ids = torch.tensor(last_ids, device=input_device(target))[:, None]
        output = attach(target).generate(
            input_ids=ids,
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stops, 1, len(ids)),
            pad_token_id=self.eot_token_id if pad is None else pad,
        )
        texts = self.tokenizer.batch_decode(output[:, 1:], skip_special_tokens=True)
        return [postprocess_generated_text(text, stops, None) for text in texts]


def _load(side: str, model: Any, tokenizer: Any, contract: dict[str, Any], dtype: str, device: str | None):
    """A model, by default the one that the translator was made for, and its tokenizer."""
    if model is None and contract["id"] is None:
        raise ValueError(
            f"`{side}` is needed: the translator was made with a local {side} model, whose path is not recorded. Give "
            "a folder, a GGUF file, a Hub id or a demo name."
        )
    revision = {"revision": contract["revision"]} if model is None and contract["revision"] else {}
    name = contract["id"] if model is None else model
    if isinstance(name, str | os.PathLike):
        tokenizer = load_tokenizer(name, **revision) if tokenizer is None else tokenizer
        model = load_model(name, dtype=dtype, **revision)
    elif tokenizer is None:
        raise ValueError(f"`{side}_tokenizer` is needed beside a loaded `{side}`. Pass the model's tokenizer.")
    return (model if device is None else model.to(device)), tokenizer


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
