"""Every family of causal LMs against the oracle: its own cache through our path gives what plain transformers gives.

A family and a cell of its row make a test. A run of all of them in which nothing fails writes support_matrix.md.
"""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import make_documents, make_tokenizer
from families import FAMILIES
from support_matrix import render
from transformers import DynamicCache

import hf_mot
from hf_mot import MoTModel, attach, detach
from hf_mot.capture_mot import prefill, source_states
from hf_mot.compat_mot import cache_argument, output_cache

MATRIX = Path(__file__).parent / "support_matrix.md"
TOKENIZER = make_tokenizer(merges=40)
NEW = 4
TOLERANCE = 1e-4  # of the largest value
SHORT, TEXT, LONG = (make_documents(1, words, seed)[0] for words, seed in ((4, 1), (9, 2), (40, 3)))
PROMPT, LONGER, SECOND = " the captain wrote", " the captain wrote a letter to", " and the bridge said"
GREEDY = {"do_sample": False}

# Families that cannot be translated, and what the refusal must say besides the class.
REFUSED = {
    "OpenAI GPT": "cache",
    "HunYuan": "position",
    "Llama (dynamic rope)": "dynamic rope",
    "Phi-3 (longrope)": "longrope",
    "Mamba": "recurrent state",
    "Mamba-2": "recurrent state",
    "Falcon-Mamba": "recurrent state",
    "Jamba": "recurrent state",
    "Bamba": "recurrent state",
    "Falcon-H1": "recurrent state",
    "Granite-MoE-Hybrid": "recurrent state",
    "Qwen3-Next": "recurrent state",
    "LFM2": "LinearAttentionLayer",
    "MiniMax (lightning attention)": "LinearAttentionLayer",
    "RecurrentGemma": "recurrent state",
    "RWKV": "recurrent state",
    "xLSTM": "recurrent state",
}
WORKING = [family for family in FAMILIES if family not in REFUSED]


@cache
def build(family):
    torch.manual_seed(0)
    return FAMILIES[family](len(TOKENIZER))


@cache
def identity(family):
    return MoTModel.identity(build(family), TOKENIZER)


def handoff(family, texts, mot=None, **options):
    model = build(family)
    pair = dict(source=model, target=model, source_tokenizer=TOKENIZER, target_tokenizer=TOKENIZER)
    return (mot or identity(family)).handoff(texts, **pair, **options)


@cache
def translated(family, text):
    """One cache for all cells: generation works on forks."""
    return handoff(family, text)


def ids_of(text, bos=False):
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return torch.tensor([[TOKENIZER.bos_token_id] * bos + ids])


def history(*parts):
    """Ids of texts and of ids, in a row, after one BOS."""
    ids = [part if isinstance(part, torch.Tensor) else ids_of(part) for part in parts]
    return torch.cat([torch.tensor([[TOKENIZER.bos_token_id]]), *ids], 1)


def logits(family, ids, cache=None):
    model = build(family)
    with torch.no_grad():
        return model(ids, **({} if cache is None else {cache_argument(model): cache})).logits


def generate(model, inputs, **options):
    """(new ids, logits `[steps, rows, vocab]` or None, returned cache) of a generate call."""
    options = {**GREEDY, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True, **options}
    torch.manual_seed(7)
    output = model.generate(**inputs, **options)
    steps = None if output.logits is None else torch.stack(output.logits)
    return output.sequences[:, inputs["input_ids"].shape[1] :], steps, output_cache(output)


def continued(family, cache, prompts=PROMPT, **options):
    """What the target says to prompts after a translated cache, by the line that users write."""
    prompt = TOKENIZER(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    model = attach(build(family))
    return generate(model, prompt, **{cache_argument(model): cache}, **options)


def native(family, *parts, **options):
    """What plain transformers says to the whole text."""
    ids = history(*parts)
    return generate(detach(build(family)), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, **options)


@cache
def native_greedy(family, context=TEXT, prompt=PROMPT):
    return native(family, context, prompt)


def assert_close(ours, theirs):
    """Equal but for rounding, as a share of the largest value."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max().clamp(min=1e-6)


def assert_clearly_different(ours, theirs):
    assert (ours - theirs).abs().max() > 100 * TOLERANCE * theirs.abs().max()


def assert_same(ours, theirs):
    assert torch.equal(ours[0], theirs[0]) and torch.isfinite(theirs[1]).all()
    assert_close(ours[1], theirs[1])


def assert_same_states(ours, theirs):
    for our_layer, their_layer in zip(ours.layers, theirs.layers, strict=True):
        assert_close(our_layer.keys, their_layer.keys)
        assert_close(our_layer.values, their_layer.values)


def check_positions(family):
    """Every copy of one token sees only its like: without their positions, all have the same states."""
    geometry = identity(family).source_geometry
    kinds = [layer.position for layer in geometry.layers]
    ids = torch.full((1, 24), 77)
    cache, positions = prefill(build(family), ids), torch.arange(24)[None]
    # An attention sink takes less where more tokens stand beside it: only what no attention has touched is equal.
    has_sinks = any(name.endswith("sinks") for name, _ in build(family).named_parameters())
    for layer_idx in [0] if has_sinks else range(len(kinds)):
        first, *others = source_states(cache, geometry, [layer_idx], positions)[0, [0, 7, 23]]
        layer = cache.layers[layer_idx]
        raw = layer.values if geometry.layers[layer_idx].rotated == "values" else layer.keys
        for state in others:
            if kinds[layer_idx] == "absolute":
                assert_clearly_different(state, first)
            else:
                assert_close(state, first)
        if kinds[layer_idx] == "rope":
            assert_clearly_different(raw[:, :, 7], raw[:, :, 0])
    return ", ".join(dict.fromkeys(kinds))


def check_capture(family):
    ids, cache = history(TEXT), DynamicCache()
    logits(family, ids, cache)
    pair = dict(target=build(family), source_tokenizer=TOKENIZER, target_tokenizer=TOKENIZER)
    assert_same_states(identity(family).translate(cache, ids, **pair), translated(family, TEXT))


def check_identity(family):
    length = history(TEXT).shape[1]
    whole = logits(family, history(TEXT, PROMPT))[:, length:]
    assert_close(logits(family, ids_of(PROMPT), translated(family, TEXT).fork()), whole)
    assert_clearly_different(logits(family, history(PROMPT))[:, 1:], whole)


def check_greedy(family):
    assert_same(continued(family, translated(family, TEXT)), native_greedy(family))


def check_mode(**options):
    """A check that a generate mode gives what it gives natively."""
    return lambda family: assert_same(
        continued(family, translated(family, TEXT), **options), native(family, TEXT, PROMPT, **options)
    )


def check_greedy_by(**options):
    """A check that another road to the greedy answer leads there."""
    return lambda family: assert_same(continued(family, translated(family, TEXT), **options), native_greedy(family))


def check_assisted(family):
    ours = continued(family, translated(family, TEXT), assistant_model=build(family))
    assert_same(ours, native_greedy(family))


def check_callable(family):
    cache, model = translated(family, TEXT), detach(build(family))
    prompt = TOKENIZER(PROMPT, return_tensors="pt", return_token_type_ids=False)
    options = {cache_argument(model): cache, "custom_generate": hf_mot.custom_generate}
    assert_same(generate(model, prompt, **options), native_greedy(family))


def check_rows(ours, natives):
    """A batch against each of its rows alone."""
    ids, steps, _ = ours
    for row, expected in enumerate(natives):
        assert torch.equal(ids[row : row + 1], expected[0])
        if steps is not None:
            assert_close(steps[:, row : row + 1], expected[1])


def check_padding(family):
    contexts = [TEXT, SHORT]
    ours = continued(family, handoff(family, contexts), [PROMPT, PROMPT])
    check_rows(ours, [native_greedy(family, context) for context in contexts])


def check_unequal_prompts(family):
    contexts, prompts = [TEXT, SHORT], [PROMPT, LONGER]
    in_groups = identity(family).target_geometry.sliding
    ours = continued(family, handoff(family, contexts), prompts, output_logits=not in_groups)
    check_rows(ours, [native_greedy(family, *pair) for pair in zip(contexts, prompts, strict=True)])
    if not in_groups:
        return None
    # Groups have no logits in common, but a mistake in what they leave in the cache moves those of the next turn.
    parts = zip(contexts, prompts, ours[0].split(1), strict=True)
    check_rows(continued(family, ours[2], [SECOND, SECOND]), [native(family, *row, SECOND) for row in parts])
    return "in groups"


def check_beyond_the_window(family):
    assert_same(continued(family, handoff(family, LONG)), native_greedy(family, LONG))
    return None if identity(family).target_geometry.sliding else "no window"


def check_second_turn(family):
    said, _, cache = continued(family, translated(family, TEXT))
    assert_same(continued(family, cache, SECOND), native(family, TEXT, PROMPT, said, SECOND))


class Zeros(torch.nn.Module):
    def forward(self, source_states, embeddings, attention_mask=None, start=0, target_hidden_states=None):
        return torch.zeros_like(source_states[..., start:])


def check_full_replay(family):
    expected = logits(family, history(TEXT, PROMPT))[:, history(TEXT).shape[1] :]
    for plan in ("full", "full:1-1"):
        assert_close(logits(family, ids_of(PROMPT), handoff(family, TEXT, replay=plan).fork()), expected)
    empty = MoTModel.identity(build(family), TOKENIZER)
    empty.translator = Zeros()
    injected = handoff(family, TEXT, empty, replay="full:1-1")
    assert_clearly_different(logits(family, ids_of(PROMPT), injected.fork()), expected)
    assert not injected.layers[1].values[:, :, 1:].any()  # all but BOS, which the target runs
    assert_close(injected.layers[0].keys, translated(family, TEXT).layers[0].keys)


def check_native_parts(family):
    expected = logits(family, history(LONG, PROMPT))[:, history(LONG).shape[1] :]
    empty = MoTModel.identity(build(family), TOKENIZER)
    empty.translator = Zeros()
    for plan in ("bottom:1", "tokens:3", "bottom:1+tokens:3"):
        assert_close(logits(family, ids_of(PROMPT), handoff(family, LONG, replay=plan).fork()), expected)
        wrong = handoff(family, LONG, empty, replay=plan)
        assert_clearly_different(logits(family, ids_of(PROMPT), wrong.fork()), expected)


CELLS = {
    "positions": check_positions,
    "capture": check_capture,
    "identity": check_identity,
    "greedy": check_greedy,
    "sampling": check_mode(do_sample=True, top_k=5),
    "beams": check_mode(num_beams=3),
    "sequences": check_mode(do_sample=True, num_return_sequences=3),
    "beams with sequences": check_mode(num_beams=3, num_return_sequences=2),
    "assisted": check_assisted,
    "prompt lookup": check_greedy_by(prompt_lookup_num_tokens=2),
    "chunked": check_greedy_by(prefill_chunk_size=2),
    "callable": check_callable,
    "padding": check_padding,
    "unequal prompts": check_unequal_prompts,
    "beyond the window": check_beyond_the_window,
    "second turn": check_second_turn,
    "full replay": check_full_replay,
    "native parts": check_native_parts,
}

REMOTE = """
import sys
sys.modules["hf_mot"] = None  # the package cannot be imported
import torch
from transformers import AutoModel, AutoTokenizer

folder, text, prompt, new = sys.argv[1:]
remote = type(AutoModel.from_pretrained(f"{folder}/mot", trust_remote_code=True))
assert remote.__module__.startswith("transformers_modules.")
tokenizer = AutoTokenizer.from_pretrained(f"{folder}/mot")
tokenizers = {"source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
said = {}
for family, model in torch.load(f"{folder}/models.pt", weights_only=False).items():
    try:
        translated = remote.identity(model, tokenizer).handoff(text, source=model, target=model, **tokenizers)
    except ValueError as error:
        said[family] = str(error)
        continue
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(
        **inputs, past_key_values=translated, max_new_tokens=int(new), do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )
    said[family] = output.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(output.logits)
torch.save(said, f"{folder}/said.pt")
"""


@pytest.fixture(scope="session")
def said_by_remote_code(request, tmp_path_factory):
    """What every family of this run says in one process that has the code of a saved translator alone."""
    own = [item for item in request.session.items if item.path == Path(__file__) and "test_remote" in item.name]
    wanted = [item.callspec.params["family"] for item in own]
    folder = tmp_path_factory.mktemp("remote")
    config = identity("Llama").config
    config = hf_mot.MoTConfig(source=config.source, target=config.target, source_layers=[0], rank=2)
    MoTModel(config).save_pretrained(folder / "mot")
    TOKENIZER.save_pretrained(folder / "mot")
    torch.save({family: detach(build(family)) for family in wanted}, folder / "models.pt")
    environment = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", REMOTE, str(folder), TEXT, PROMPT, str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "said.pt", weights_only=False)


@pytest.fixture(scope="session")
def matrix(request):
    """Rows of the support matrix, and the reasons of refused families."""
    results = {family: {} for family in WORKING}
    reasons = {}
    yield results, reasons
    cells = [*CELLS, "remote code"]
    complete = all(row.keys() == set(cells) for row in results.values()) and reasons.keys() == REFUSED.keys()
    if complete and not request.session.testsfailed:
        MATRIX.write_text(render(cells, results, {family: reasons[family] for family in REFUSED}), encoding="utf-8")


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("family", WORKING)
def test_family_equals_native(family, cell, matrix):
    note = CELLS[cell](family)
    matrix[0][family][cell] = f"works ({note})" if note else "works"


@pytest.mark.parametrize("family", WORKING)
def test_remote_code_equals_native(family, matrix, said_by_remote_code):
    assert_same(said_by_remote_code[family], native_greedy(family))
    matrix[0][family]["remote code"] = "works"


@pytest.mark.parametrize("family", REFUSED)
def test_remote_code_refuses_by_name(family, said_by_remote_code):
    assert re.match(f"(?s).*{type(build(family)).__name__}.*{REFUSED[family]}", said_by_remote_code[family])


@pytest.mark.parametrize("family", REFUSED)
def test_refused_by_name_with_the_reason(family, matrix):
    model = build(family)
    with pytest.raises(ValueError, match=f"{type(model).__name__}.*{REFUSED[family]}") as refusal:
        MoTModel.identity(model, TOKENIZER)
    matrix[1][family] = str(refusal.value)
