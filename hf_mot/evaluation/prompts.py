"""What a model is given of a question: the context goes into its cache, the question into its prompt."""

from dataclasses import dataclass
from typing import Literal

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from hf_mot.alignment_mot import tokenize_with_spans
from hf_mot.evaluation.tasks import Example, Task

STYLES = ("auto", "chat", "plain")


@dataclass(frozen=True)
class Question:
    """
    An example as one model's tokens.

    Args:
        example (`Example`): The example.
        text (`str`): The context, all that a source reads of it; shorter than the example's if it was truncated.
        context_ids (`list[int]`): The context, the model's prefix (BOS) included.
        prompt_ids (`list[int]`): What follows the context.
        answer_ids (`list[list[int]]`): What would follow the prompt: each choice, or the first accepted answer.
    """

    example: Example
    text: str
    context_ids: list[int]
    prompt_ids: list[int]
    answer_ids: list[list[int]]

    @property
    def id(self) -> str:
        return self.example.id

    @property
    def group(self) -> str:
        return self.text

    @property
    def gold(self) -> int:
        """Which of `answer_ids` is the right answer."""
        return 0 if self.example.choices is None else self.example.choices.index(self.example.answers[0])


@dataclass(frozen=True)
class Prompter:
    """
    Makes the prompts of one model.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        prefix_ids (`list[int]`): The special ids that its contexts start with.
        style (`str`): `"chat"`: the question as a user's turn in the tokenizer's chat template; `"plain"`: after
            demonstrations of the form, as text to continue.
    """

    tokenizer: PreTrainedTokenizerBase
    prefix_ids: list[int]
    style: Literal["chat", "plain"]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, prefix_ids: list[int], style: str = "auto") -> "Prompter":
        """With `style` `"auto"`, chat where the tokenizer has a chat template. Raises `ValueError`."""
        if style not in STYLES:
            raise ValueError(f"`prompt_style` must be one of {', '.join(STYLES)}, got {style!r}.")
        has_template = tokenizer.chat_template is not None
        if style == "chat" and not has_template:
            raise ValueError("`prompt_style` is chat, but the tokenizer has no chat template. Use plain, or auto.")
        return cls(tokenizer, list(prefix_ids), "chat" if has_template and style != "plain" else "plain")

    @classmethod
    def of_source(cls, tokenizer: PreTrainedTokenizerBase, prefix_ids: list[int], style: str = "auto") -> "Prompter":
        """As [`of`], but plain where there is no chat template: the style is one that is asked for of the target."""
        return cls.of(tokenizer, prefix_ids, "plain" if tokenizer.chat_template is None else style)

    def prompt(self, task: Task, example: Example) -> str:
        """The text that follows the context."""
        if self.style == "chat":
            return self._turn(f"{task.instruction}\n\n{example.question}")
        shown = "".join(f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in task.demonstrations)
        return f"\n\n{shown}Question: {example.question}\nAnswer:"

    def summary_prompt(self) -> str:
        """The text that asks for a summary of the context."""
        return self._turn("Summarise the text above in two sentences.") if self.style == "chat" else "\n\nSummary:"

    def _turn(self, content: str) -> str:
        turn = {"role": "user", "content": content}
        text = self._render([turn])
        # A system message that the template adds by itself would stand between the context and the question.
        try:
            with_system = self._render([{"role": "system", "content": "system"}, turn])
        except TemplateError:  # it has no such role
            with_system = ""
        before, found, _ = with_system.partition("system")
        start = text.find(f"{before}user")
        return f"\n\n{text[start:] if found and start > 0 else text}"

    def _render(self, turns: list[dict[str, str]]) -> str:
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        # A BOS that the tokenizer puts before every text stands before the context already.
        adds_prefix = self.tokenizer("a")["input_ids"][: len(self.prefix_ids)] == self.prefix_ids
        return text.removeprefix(self.tokenizer.decode(self.prefix_ids)) if adds_prefix else text

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt, without a prefix: its context has one."""
        # A special token that a plain question spells out stays text; a chat template is made of them.
        plain = {"split_special_tokens": True} if self.style == "plain" else {}
        return self.tokenizer(prompt, add_special_tokens=False, verbose=False, **plain)["input_ids"]

    def question(self, task: Task, example: Example, text: str | None = None) -> Question:
        """An example, in this model's tokens, about its context or another text in its place."""
        text = example.context if text is None else text
        prompt = self.prompt(task, example)
        prompt_ids = self.encode(prompt)
        answers = [
            f"{'' if self.style == 'chat' else ' '}{answer}" for answer in example.choices or example.answers[:1]
        ]
        return Question(
            example,
            text,
            self.context_ids(text),
            prompt_ids,
            [self._following(prompt, prompt_ids, answer) for answer in answers],
        )

    def context_ids(self, text: str) -> list[int]:
        return [*self.prefix_ids, *tokenize_with_spans(self.tokenizer, text)[0]]

    def _following(self, prompt: str, prompt_ids: list[int], answer: str) -> list[int]:
        """The ids of an answer as they follow the prompt; alone where the tokenizer merges across the two."""
        whole = self.encode(prompt + answer)
        if whole[: len(prompt_ids)] == prompt_ids and len(whole) > len(prompt_ids):
            return whole[len(prompt_ids) :]
        return self.tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"]


def cut_to_fit(text: str, rooms: list[tuple[PreTrainedTokenizerBase, int]], truncate: bool) -> str | None:
    """
    The text if each tokenizer has at most so many tokens for it; else its start that has, or `None` where nothing may
    be cut off.
    """
    while True:
        cut = text
        for tokenizer, room in rooms:
            ids, spans = tokenize_with_spans(tokenizer, cut)
            if len(ids) > room:
                if not truncate or room < 1:
                    return None
                cut = cut[: min(spans[room][0], len(cut) - 1)]  # whole characters that no further token is needed for
        if cut == text:  # shorter text may have other tokens at its end
            return text or None
        text = cut
