"""The paper's pairs as recipes: each command is real, fits its pair and the GPU that it names, as the README says."""

import re
import shlex

import pytest
import torch
from recipes import (
    BATCH,
    CONTEXT,
    FOLDER,
    MODELS,
    Recipe,
    build,
    config_of,
    geometry,
    render,
    shrunk,
    training_pass,
)
from transformers import AutoModelForCausalLM, DynamicCache

from hf_mot.cli.main import parse
from hf_mot.cli.train import training_arguments, translator_settings
from hf_mot.compat_mot import run_decoder
from hf_mot.configuration_mot import PAPER
from hf_mot.geometry_mot import probe

README = (FOLDER / "README.md").read_text(encoding="utf-8")
NAMES = sorted(path.stem for path in FOLDER.glob("*.sh"))
QWEN, GPT2, OPT = "Qwen/Qwen2.5-{}", "openai-community/gpt2{}", "facebook/opt-{}"
LLAMA, GEMMA = "meta-llama/Llama-3.2-1B", "google/gemma-2-2b"
PAIRS = [
    *((QWEN.format(source), QWEN.format(target)) for source, target in (("7B", "0.5B"), ("0.5B", "0.5B"))),
    *((QWEN.format(source), QWEN.format(target)) for source, target in (("0.5B", "1.5B"), ("1.5B", "0.5B"))),
    *((GPT2.format(source), GPT2.format(target)) for source, target in (("-xl", "-large"), ("", "-medium"))),
    (GPT2.format("-medium"), GPT2.format("")),
    *((OPT.format(source), OPT.format(target)) for source, target in (("125m", "350m"), ("350m", "125m"))),
    *((LLAMA, QWEN.format("0.5B")), (GEMMA, LLAMA), (QWEN.format("1.5B"), GEMMA)),
]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bin")
    return {name: Recipe(FOLDER / f"{name}.sh", folder) for name in NAMES}


@pytest.fixture
def recipe(request, recipes):
    return recipes[request.param]


each_recipe = pytest.mark.parametrize("recipe", NAMES, indirect=True)


def test_every_pair_has_a_recipe(recipes):
    assert sorted((recipe.args.source, recipe.args.target) for recipe in recipes.values()) == sorted(PAIRS)


@each_recipe
def test_recipe_is_the_papers(recipe, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    config, training = recipe.translator.config, training_arguments(recipe.args)
    assert {name: getattr(config, name) for name in PAPER} == PAPER
    assert (training.max_steps, training.per_device_train_batch_size) == (500, BATCH)
    assert (training.gradient_accumulation_steps, training.learning_rate) == (4, 1e-4)
    assert (training.length, training.context_range) == (128, (CONTEXT, CONTEXT))
    assert training.losses == {"cc": 1, "pl": 1}
    assert recipe.args.dtype == "bfloat16"


@each_recipe
def test_text_out_and_start_can_be_set(recipe):
    args = recipe.arguments("--max-steps", "7", TEXT="one.txt two.txt", OUT="a folder", START="1")
    assert (args.text, args.out, args.start, args.max_steps) == (["one.txt", "two.txt"], "a folder", 1, 7)
    assert recipe.args.out == f"mot-{recipe.name}"


@each_recipe
def test_window_is_three_tenths_of_the_layers_in_the_middle(recipe):
    depths = [len(model.contract["geometry"]["layers"]) for model in (recipe.source, recipe.target)]
    layers = recipe.translator.target_layers
    assert len(layers) == round(0.3 * min(depths)) == len(recipe.translator.config.source_layers)
    assert layers[0] == (depths[1] - len(layers)) // 2


@each_recipe
def test_translation_has_the_shapes_of_the_targets_cache(recipe):
    output, _ = recipe.translation
    layers = [recipe.target.contract["geometry"]["layers"][layer_idx] for layer_idx in recipe.translator.target_layers]
    for states, dim in ((output.key_states, "key_dim"), (output.value_states, "value_dim")):
        shapes = [(BATCH, layer["kv_heads"], CONTEXT, layer[dim]) for layer in layers]
        assert [tuple(part.shape) for part in states] == shapes


@each_recipe
def test_head_says_what_it_takes(recipe):
    assert recipe.sizes in recipe.text
    (gpu,) = re.findall(r"a GPU of (\d+) GB", recipe.text)
    assert recipe.training_bytes < 0.8 * int(gpu) * 10**9


@each_recipe
def test_search_in_the_head_is_of_the_same_translator(recipe):
    lines = [line.removeprefix("#") for line in recipe.text.splitlines() if line.startswith("#     ")]
    words = shlex.split("\n".join(lines).replace("\\\n", " "))
    assert words[0] == "hf-mot"
    search = parse(words[1:])
    assert search.command == "search-channels" and search.eval_text
    given = translator_settings(recipe.args)
    assert translator_settings(search) == {name: value for name, value in given.items() if name != "start"}
    for name in ("source", "target", "dtype", "text"):
        assert getattr(search, name) == getattr(recipe.args, name)


def test_readme_has_the_table(recipes):
    assert render([recipes[name] for name in NAMES]) in README


def test_commands_of_the_readme_are_real():
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", README, flags=re.S)).replace("\\\n", " ")
    commands = [shlex.split(line)[1:] for line in blocks.splitlines() if line.startswith("hf-mot ")]
    assert [parse(words).command for words in commands] == ["evaluate", "push"]


@pytest.mark.parametrize("name", MODELS)
def test_model_has_the_published_number_of_parameters(name):
    assert build(name).parameters == MODELS[name].parameters


ONE_OF_EACH_KIND = {published.model_type: name for name, published in MODELS.items()}.values()


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_geometry_without_weights_is_what_the_probe_finds(name):
    model = shrunk(MODELS[name])
    with torch.device("meta"):
        bare, cache = AutoModelForCausalLM.from_config(model.config), DynamicCache()
        run_decoder(bare, torch.zeros(1, 4, dtype=torch.long), cache)
    assert geometry(bare, cache, probe(model)) == probe(model)


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_every_layer_keeps_as_much_as_the_second(name):
    (one, _), (two, _), (four, _) = (training_pass(config_of(MODELS[name]), layers) for layers in (1, 2, 4))
    assert four == one + 3 * (two - one)
    assert two > one


@pytest.mark.parametrize(
    ("name", "above_native"), [("qwen2.5-7b-to-0.5b", 16.62 - 15.25), ("gpt2-xl-to-large", 16.66 - 10.18)]
)
def test_width_is_what_the_papers_peak_memory_allows(recipes, name, above_native):
    """Tables 1 and 6: the two translators, if they are in fp32 and all that MoT adds to native."""
    assert 4 * recipes[name].parameters / 2**30 == pytest.approx(above_native, rel=0.05)
