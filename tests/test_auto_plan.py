"""`replay="auto"`: a plan is chosen by a translator's curve, here a planted one."""

import pytest
import torch
from conftest import changed, make_documents, make_pair, make_translator
from huggingface_hub.errors import StrictDataclassError
from training_pair import make_args, make_trainer

from hf_mot import MoTConfig, MoTModel, ReplayPlan
from hf_mot.evaluation.describe import fingerprint
from hf_mot.replay_auto_mot import choose_plan

LENGTH = 24
# By cost: none < bottom:1 < tokens:6 < bottom:2 < tokens:12 < full, at 24 tokens.
VALUES = {"none": 0.6, "bottom:1": 0.5, "tokens:6": 0.8, "bottom:2": 0.7, "tokens:12": 0.93, "full": 0.93}


def make_curve(values=VALUES, spread=0.04):
    points = [
        {"replay": plan, "flops_share": 0.1, "recovery": {"value": v, "low": v - spread, "high": v + spread}}
        for plan, v in values.items()
    ]
    return {"context_length": LENGTH, "n": 128, "points": points}


def with_curve(mot, curve, **fields):
    """The same translator with a measured curve."""
    other = MoTModel(MoTConfig(**mot.config.to_dict() | {"replay_curve": curve} | fields))
    other.load_state_dict(mot.state_dict())
    return other.eval()


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@pytest.fixture(scope="module")
def bare(pair):
    return make_translator(pair)


@pytest.fixture(scope="module")
def mot(bare):
    return with_curve(bare, make_curve())


def share(mot, plan, length=LENGTH):
    return ReplayPlan.parse(plan).flops_share(mot.config, length)


def test_planted_plans_have_the_order_of_cost_that_the_tests_rely_on(mot):
    shares = [share(mot, plan) for plan in VALUES]
    assert shares == sorted(shares) and len(set(shares)) == len(shares)


@pytest.mark.parametrize(
    ("within", "chosen"),
    [
        ("none", "none"),
        ("bottom:1", "none"),  # dearer and worse
        ("tokens:6", "tokens:6"),
        ("bottom:2", "tokens:6"),
        ("tokens:12", "tokens:12"),
        ("full", "tokens:12"),  # as good as full, and cheaper
    ],
)
def test_budget_buys_the_best_plan_within_it(mot, within, chosen):
    assert str(mot.plan(f"auto:{share(mot, within) + 1e-6:.7f}")) == chosen


def test_auto_alone_is_half_of_native(mot):
    half = {plan: value for plan, value in VALUES.items() if share(mot, plan) <= 0.5}
    assert 0 < len(half) < len(VALUES)
    assert mot.plan("auto") == mot.plan("auto:0.5") == ReplayPlan.parse(max(half, key=half.get))


@pytest.mark.parametrize(
    ("floor", "chosen"),
    [("0.5", "none"), ("0.57", "tokens:6"), ("0.76", "tokens:6"), ("0.77", "tokens:12"), (".88", "tokens:12")],
)
def test_floor_takes_the_cheapest_plan_whose_whole_interval_reaches_it(mot, floor, chosen):
    assert str(mot.plan(f"auto:recovery={floor}")) == chosen


def test_cost_is_that_of_the_context_at_hand(mot):
    budget = f"auto:{(share(mot, 'tokens:12') + share(mot, 'tokens:12', 100)) / 2:.6f}"
    assert str(mot.plan(budget)) != "tokens:12"
    assert str(mot.plan(budget, 100)) == "tokens:12"


def test_plan_of_more_tokens_than_there_are_is_left_out(mot):
    prefix = len(mot.config.target["prefix_ids"])
    assert str(mot.plan("auto:9", 12 + prefix)) == "tokens:12"
    assert str(mot.plan("auto:9", 11 + prefix)) == "full"


@pytest.mark.parametrize("words", [3, 60])
def test_handoff_and_translate_choose_for_the_length_of_the_context(pair, mot, words):
    text = make_documents(1, words)[0]
    budget, length = "auto:0.45", mot.handoff(text, **pair).get_seq_length()
    plan = mot.plan(budget, length)
    assert str(plan) == {3: "none", 60: "tokens:12"}[words]
    expected, other = mot.handoff(text, replay=plan, **pair), mot.handoff(text, replay="bottom:2", **pair)
    cache, ids, mask = mot.read_source([text], pair["source"], pair["source_tokenizer"])
    models = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    for chosen in (
        mot.handoff(text, replay=budget, **pair),
        mot.translate(cache, ids, source_attention_mask=mask, text=text, replay=budget, **models),
    ):
        for ours, theirs in zip(chosen.layers, expected.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        assert not torch.equal(chosen.layers[0].keys, other.layers[0].keys)


def test_plan_that_asks_where_the_source_looks_is_chosen_where_that_is_known(pair, bare):
    text, sparse = make_documents(1, 20)[0], "full:0-0+sparse:3/0"
    mot = with_curve(bare, make_curve({"none": 0.5, "tokens:6": 0.8, sparse: 0.9}))
    models = {name: pair[name] for name in ("target", "source_tokenizer", "target_tokenizer")}
    cache, ids, mask = mot.read_source([text], pair["source"], pair["source_tokenizer"])
    guidance = mot.guide(pair["source"], ids, mask, replay=sparse)

    def translate(replay, **kwargs):
        return mot.translate(cache, ids, source_attention_mask=mask, text=text, replay=replay, **models, **kwargs)

    for chosen, plan in (
        (mot.handoff(text, replay="auto:9", **pair), sparse),
        (translate("auto:9", guidance=guidance), sparse),
        (translate("auto:9"), "tokens:6"),
    ):
        for ours, theirs in zip(chosen.layers, mot.handoff(text, replay=plan, **pair).layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys)
    assert mot.plan("auto:9", guided=False) == ReplayPlan.parse("tokens:6")
    only = with_curve(bare, make_curve({sparse: 0.9}))
    with pytest.raises(ValueError, match="all plans of the measured curve .* or need guidance, which a ready cache"):
        only.translate(cache, ids, source_attention_mask=mask, text=text, replay="auto:9", **models)
    with pytest.raises(ValueError, match="looks where the source has looked, but this translator reads no source"):
        with_curve(make_translator(pair, source_layers=()), make_curve({sparse: 0.9}))


def test_shortest_context_of_a_batch_decides(pair, mot):
    texts = [make_documents(1, 60)[0], make_documents(1, 3, seed=4)[0]]
    short = mot.handoff(texts[1], **pair).get_seq_length()
    expected = mot.handoff(texts, replay=mot.plan("auto:0.45", short), **pair)
    assert mot.plan("auto:0.45", short) != mot.plan("auto:0.45", 60)
    for ours, theirs in zip(mot.handoff(texts, replay="auto:0.45", **pair).layers, expected.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys)


def test_plan_by_name_needs_no_curve(bare, mot):
    for plan in VALUES:
        assert bare.plan(plan) == mot.plan(plan) == ReplayPlan.parse(plan)


def test_auto_as_default_plan(bare):
    mot = with_curve(bare, make_curve(), replay="auto:recovery=0.7")
    assert mot.plan() == ReplayPlan.parse("tokens:6")
    with pytest.raises(ValueError, match="`replay` is 'auto', but this translator has no measured curve"):
        with_curve(bare, None, replay="auto")


# What is refused


@pytest.mark.parametrize(
    "replay",
    ["auto:", "auto:none", "auto:-0.5", "auto:nan", "auto:recovery", "auto:recovery>=0.9", "auto+tokens:3"],
)
def test_other_forms_are_refused_with_those_that_there_are(mot, replay):
    with pytest.raises(ValueError, match=r"auto:0\.25, or the lowest recovery, auto:recovery=0\.9, got 'auto"):
        mot.plan(replay)


def test_without_a_curve_the_way_to_one_is_named(pair, bare):
    message = r"`replay` is 'auto:0\.3', but this translator has no measured curve .* hf-mot evaluate .*--curve --card"
    with pytest.raises(ValueError, match=message):
        bare.plan("auto:0.3")
    with pytest.raises(ValueError, match=message):  # before the source reads
        bare.handoff("river", replay="auto:0.3", **{**pair, "source": None})


def test_budget_below_every_plan_names_the_cheapest(mot):
    message = rf"cheapest measured plan, none, costs {share(mot, 'none'):.3f} .* 24 tokens"
    with pytest.raises(ValueError, match=message):
        mot.plan("auto:0.01")


def test_recovery_above_every_plan_names_the_best(bare):
    mot = with_curve(bare, make_curve({"none": 0.6, "tokens:6": 0.8}))
    with pytest.raises(ValueError, match=r"the best, tokens:6, has a recovery of 0\.800 \[0\.760, 0\.840\]"):
        mot.plan("auto:recovery=0.8")


def test_context_that_is_too_short_for_all_plans(bare):
    mot = with_curve(bare, make_curve({"tokens:12": 0.9}))
    with pytest.raises(ValueError, match="run more tokens than the 5 of this context"):
        mot.plan("auto", 5 + len(mot.config.target["prefix_ids"]))


DAMAGE = {
    "no object": [],
    "empty": {},
    "no points": changed(make_curve(), ("points",), []),
    "points of no list": changed(make_curve(), ("points",), {"none": 1}),
    "point of no object": changed(make_curve(), ("points", 0), "none"),
    "unknown field": {**make_curve(), "seed": 0},
    "lacks n": changed(make_curve(), ("n",), ...),
    "no context": changed(make_curve(), ("context_length",), 0),
    "point lacks a field": changed(make_curve(), ("points", 1, "flops_share"), ...),
    "share is no number": changed(make_curve(), ("points", 1, "flops_share"), "0.5"),
    "not a number": changed(make_curve(), ("points", 1, "recovery", "value"), float("nan")),
    "endless": changed(make_curve(), ("points", 1, "recovery", "high"), float("inf")),
    "no interval": changed(make_curve(), ("points", 1, "recovery"), 0.5),
    "interval upside down": changed(make_curve(), ("points", 1, "recovery", "low"), 2.0),
    "plan is no name": changed(make_curve(), ("points", 1, "replay"), 3),
}


@pytest.mark.parametrize("curve", DAMAGE.values(), ids=DAMAGE)
def test_damaged_curve_is_refused(bare, curve):
    with pytest.raises((ValueError, StrictDataclassError), match="`?replay_curve"):
        MoTConfig(**bare.config.to_dict() | {"replay_curve": curve})


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("most", "`replay` must be one of none"),
        ("auto", "`replay` must be one of none"),
        ("bottom:9", "takes the first 9 layers from the target itself, but it has 3"),
    ],
)
def test_curve_of_plans_that_it_cannot_do_is_refused(bare, plan, message):
    with pytest.raises(ValueError, match=message):
        with_curve(bare, make_curve({"none": 0.5, plan: 0.9}))


# What becomes of the curve


def test_curve_is_saved_and_loaded(mot, bare, tmp_path):
    mot.save_pretrained(tmp_path)
    loaded = MoTModel.from_pretrained(tmp_path)
    assert loaded.config.replay_curve == make_curve() and loaded.plan("auto:0.45") == mot.plan("auto:0.45")
    assert bare.config.replay_curve is None and MoTConfig().replay_curve is None


def test_results_are_those_of_the_translator_with_or_without_a_curve(mot, bare):
    assert fingerprint(mot) == fingerprint(bare)


def test_training_drops_the_curve_of_the_weights_as_they_were(pair, mot, tmp_path):
    trained = with_curve(mot, make_curve(), replay="auto:recovery=0.5")
    make_trainer(pair, make_args(tmp_path), trained)
    assert trained.config.replay_curve is None and trained.config.replay == "none"


def test_choice_needs_no_model(mot):
    assert choose_plan("auto:recovery=0.8", mot.config) == ReplayPlan.parse("tokens:12")
