"""Answers are scored as with all logits, without those of pads."""

import pytest
import torch
from test_families import WORKING, build

from hf_mot.cache_mot import TranslatedCache
from hf_mot.evaluation.answers import cross_entropy, prompt_logits, token_losses

ROWS = [[5, 6, 7], [8, 9, 10, 11, 12, 13]]


@pytest.mark.parametrize("family", WORKING)
@torch.no_grad()
def test_losses_are_those_of_all_logits_but_the_head_runs_at_tokens_alone(family):
    model, heard = build(family), []
    nothing = TranslatedCache([], [], torch.ones(2, 0, dtype=torch.long))
    logits, ids = prompt_logits(model, nothing, ROWS)
    expected = cross_entropy(logits, ids[:, 1:])
    hook = model.get_output_embeddings().register_forward_hook(lambda head, args, output: heard.append(output.shape))
    losses = token_losses(model, nothing, ROWS)
    hook.remove()
    assert heard == [(1, 2 + 5, logits.shape[-1])]
    for row, own in enumerate(losses):
        assert own.shape == (len(ROWS[row]) - 1,)
        torch.testing.assert_close(own, expected[row, : len(own)], rtol=1e-4, atol=1e-4)
    assert torch.equal(prompt_logits(model, nothing, ROWS)[0], logits)  # the head is as it was


@pytest.mark.parametrize("hidden_by", ["compile", "name"])
@torch.no_grad()
def test_losses_are_the_same_where_the_head_is_not_heard(hidden_by, monkeypatch):
    model = build("Llama")
    nothing = TranslatedCache([], [], torch.ones(2, 0, dtype=torch.long))
    expected = token_losses(model, nothing, ROWS)
    if hidden_by == "compile":
        model = torch.compile(model, backend="eager")
        prompt_logits(model, nothing, ROWS)  # what was compiled without the hook goes on without it
    else:
        monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    torch.testing.assert_close(token_losses(model, nothing, ROWS), expected, rtol=1e-4, atol=1e-4)
