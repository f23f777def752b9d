"""Fits that take seconds, and how far the fit of a model to itself is from native."""

from typing import Any

import torch
from conftest import make_documents, make_own

from hf_mot.capture_mot import prefill
from hf_mot.compat_mot import cache_argument
from hf_mot.fit import fit

DOCUMENTS, TEXT = make_documents(24, 60), make_documents(1, 30, seed=8)[0]
OPTIONS = {
    **{"rank": 24, "source_layers": [0, 2], "source_window": 1, "embedding_window": 2, "held_out_documents": 3},
    **{"max_tokens": 2500, "progress": False},
}
# Other ways to choose layers, to weigh pieces and to measure errors of keys.
OTHERS = {
    **OPTIONS,
    **{"source_layers": None, "num_source_layers": 2, "max_tokens": 1500, "source_window": 2},
    **{"key_metric": "query", "piece_weights": [[1.0, 1.0], [1.0, 2.0], [4.0, 1.0]]},
}


def error_to_itself(family: str, **options: Any) -> float:
    """Of the logits after a full-rank fit of a model to itself, as a share of what the context changes in them."""
    pair = make_own(family)
    full = {**OPTIONS, "rank": None, "source_layers": [0, 1, 2], "key_norms": False, "max_tokens": 4000}
    mot = fit(make_documents(60, 60), **pair, **full, **options).translator
    tokenizer, target = pair["target_tokenizer"], pair["target"]
    prompt = tokenizer(" the captain wrote", add_special_tokens=False, return_tensors="pt")["input_ids"]
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]

    def logits(cache):
        with torch.no_grad():
            return target(prompt, **{cache_argument(target): cache}).logits

    native, nothing = logits(prefill(target, ids)), logits(prefill(target, ids[:, :1]))
    translated = logits(mot.handoff(TEXT, **pair).fork())
    return ((translated - native).norm() / (nothing - native).norm()).item()
