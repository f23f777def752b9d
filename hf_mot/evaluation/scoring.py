"""SQuAD v1.1 scoring: how well an answer matches the accepted ones (Rajpurkar et al., 2016)."""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, then without articles, words separated by one space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if the two are the same once normalised, else 0."""
    return float(normalize_answer(prediction) == normalize_answer(answer))


def token_f1(prediction: str, answer: str) -> float:
    """Harmonic mean of precision and recall over the words of the two, as bags; 0 if they share none."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(answer).split()
    shared = sum((Counter(predicted) & Counter(expected)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return (2 * precision * recall) / (precision + recall)


def best_of(metric: Callable[[str, str], float], prediction: str, answers: Iterable[str]) -> float:
    """The score against the accepted answer that fits best."""
    return max(metric(prediction, answer) for answer in answers)
