"""What a recipe of examples/recipes trains, and what that takes: models without weights, on the meta device."""

import copy
import functools
import subprocess
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_mot import MoTModel
from hf_mot.cli.main import parse
from hf_mot.cli.train import translator_settings
from hf_mot.compat_mot import cache_argument, layer_windows
from hf_mot.geometry_mot import ModelGeometry, decoder_parameters, probe
from hf_mot.modeling_mot import MoTOutput
from hf_mot.translators_widths_mot import Widths

FOLDER = Path(__file__).parent.parent / "examples" / "recipes"
BATCH, LENGTH, CONTEXT = 4, 128, 64  # E.1: a forward pass
TRAINED_BYTES = 16  # a trained parameter in fp32: weight, gradient and AdamW's two moments
GPUS = (8, 16, 24, 40, 80)  # GB; a recipe takes the smallest of which it fills 80 % or less


@dataclass(frozen=True)
class Published:
    """A model as its repository on the Hub describes it: sizes from its config.json, and its number of parameters."""

    model_type: str
    parameters: int
    sizes: dict
    prefix_ids: tuple[int, ...] = ()


def _qwen(parameters: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **sizes) -> Published:
    sizes = {"vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 131072} | sizes
    sizes |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    return Published("qwen2", parameters, sizes)


def _gpt2(parameters: int, width: int, layers: int, heads: int) -> Published:
    return Published("gpt2", parameters, {"n_embd": width, "n_layer": layers, "n_head": heads}, (50256,))


_LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, "low_freq_factor": 1.0}
_LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MODELS = {
    "Qwen/Qwen2.5-0.5B": _qwen(494_032_768, 896, 4864, 24, 14, 2, max_position_embeddings=32768),
    "Qwen/Qwen2.5-1.5B": _qwen(1_543_714_304, 1536, 8960, 28, 12, 2),
    "Qwen/Qwen2.5-7B": _qwen(7_615_616_512, 3584, 18944, 28, 28, 4, vocab_size=152064, tie_word_embeddings=False),
    "openai-community/gpt2": _gpt2(124_439_808, 768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(354_823_168, 1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(774_030_080, 1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1_557_611_200, 1600, 48, 25),
    "facebook/opt-125m": Published("opt", 125_239_296, {}, (2,)),
    "facebook/opt-350m": Published(
        "opt",
        331_196_416,
        {
            **{"hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
            **{"word_embed_proj_dim": 512, "do_layer_norm_before": False},
        },
        (2,),
    ),
    "meta-llama/Llama-3.2-1B": Published(
        "llama",
        1_235_814_400,
        {
            **{"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True},
            **{"max_position_embeddings": 131072, "rope_parameters": _LLAMA3_ROPE},
        },
        (128000,),
    ),
    "google/gemma-2-2b": Published("gemma2", 2_614_341_888, {}, (2,)),
}


@dataclass(frozen=True)
class Model:
    """A model on the meta device: its contract, its parameters, and what a training step keeps of it as the target."""

    contract: dict
    parameters: int
    activation_bytes: int


@functools.cache
def build(name: str) -> Model:
    """A model of the Hub, without its weights. The shapes of its cache are what its own forward pass gives."""
    published = MODELS[name]
    config = config_of(published)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    (one, cache), (two, _) = (training_pass(config, layers) for layers in (1, 2))
    contract = _contract(name, geometry(model, cache, probe(shrunk(published))))
    parameters = sum(weight.numel() for weight in model.parameters())
    return Model(contract, parameters, one + (config.num_hidden_layers - 1) * (two - one))


def training_pass(config: PreTrainedConfig, layers: int) -> tuple[int, DynamicCache]:
    """Runs the lowest layers alone, in bf16, over a batch whose embeddings stand for the translation: the bytes that
    are kept for the backward pass, and the cache. Every further layer keeps as much as the second one."""
    config, cache = copy.deepcopy(config), DynamicCache()
    config.num_hidden_layers = layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)

        def run() -> None:
            ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
            embeddings = model.get_input_embeddings()(ids).requires_grad_()
            logits = model(inputs_embeds=embeddings, **{cache_argument(model): cache}).logits
            F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())

        return saved_bytes(run, model), cache


def config_of(published: Published, **changes) -> PreTrainedConfig:
    return AutoConfig.for_model(published.model_type, **{**published.sizes, **changes})


@torch.no_grad()
def shrunk(published: Published) -> PreTrainedModel:
    """A tiny random model of the same kind, heads of the same width: its probe shows how positions are carried."""
    config = config_of(published)
    width = 2 * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    changes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    changes |= {"intermediate_size": 32}
    if published.model_type == "gpt2":
        changes = {"n_embd": width, "n_layer": 2, "n_head": 2}
    if published.model_type == "opt":
        changes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 2}
        changes |= {"ffn_dim": 32, "word_embed_proj_dim": width}
    changes |= {"vocab_size": 64}
    config = config_of(published, **changes, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def geometry(model: PreTrainedModel, cache: DynamicCache, kind: ModelGeometry) -> ModelGeometry:
    """Geometry of a model on the meta device: every layer's cache as the first of `cache`, positions as those of
    `kind`, the probe of a small one."""
    keys, values = cache.layers[0].keys, cache.layers[0].values
    layer = replace(kind.layers[0], kv_heads=keys.shape[1], key_dim=keys.shape[-1], value_dim=values.shape[-1])
    return replace(
        kind,
        layers=(layer,) * model.config.num_hidden_layers,
        windows=tuple(layer_windows(model.config)),
        embedding_dim=model.get_input_embeddings().weight.shape[-1],
        attention_dim=model.config.num_attention_heads * layer.key_dim,
        decoder_parameters=decoder_parameters(model),
        max_positions=model.config.max_position_embeddings,
    )


def _contract(name: str, geometry: ModelGeometry) -> dict:
    published = MODELS[name]
    return {
        **{"id": name, "revision": None, "adapter": None, "quantization": None, "dtype": "bfloat16"},
        **{"model_type": published.model_type, "fingerprint": {}, "tokenizer_fingerprint": published.model_type},
        **{"prefix_ids": [*published.prefix_ids], "adds_prefix": False, "geometry": geometry.to_dict()},
    }


def saved_bytes(work: Callable[[], object], module: torch.nn.Module) -> int:
    """Bytes that autograd keeps for the backward pass of `work`, each storage once, beside `module`'s own."""
    own = {id(tensor.untyped_storage()) for tensor in (*module.parameters(), *module.buffers())}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in own:
            kept[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return sum(storage.nbytes() for storage in kept.values())


class Recipe:
    """
    A script of examples/recipes: its command line as the shell makes it, and the translator that it trains, on the
    meta device.

    Args:
        path (`Path`): The script.
        folder (`Path`): Where a stand-in for `hf-mot` is put.
    """

    def __init__(self, path: Path, folder: Path):
        self.path, self.folder, self.name = path, folder, path.stem
        self.text = path.read_text(encoding="utf-8")
        command = folder / "hf-mot"
        command.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n", encoding="utf-8")
        command.chmod(0o755)
        self.args = self.arguments()
        self.source, self.target = build(self.args.source), build(self.args.target)
        with torch.device("meta"):
            contracts = (self.source.contract, self.target.contract)
            self.translator = MoTModel.from_contracts(*contracts, **translator_settings(self.args))

    def arguments(self, *more: str, **environment: str) -> Namespace:
        """What the real parser of `hf-mot` makes of the script's command."""
        environment = {"PATH": f"{self.folder}:/usr/bin:/bin", **environment}
        done = subprocess.run(
            ["sh", str(self.path), *more], env=environment, capture_output=True, text=True, check=True
        )
        return parse(done.stdout.splitlines())

    @property
    def parameters(self) -> int:
        return self.translator.num_parameters()

    @functools.cached_property
    def translation(self) -> tuple[MoTOutput, int]:
        """What a forward pass over a batch of contexts gives, and the bytes that are kept for its backward pass."""
        outputs = []
        states = torch.empty(BATCH, CONTEXT, Widths.of(self.translator.config).source_dim, device="meta")
        kept = saved_bytes(lambda: outputs.append(self.translator(states)), self.translator)
        return outputs[0], kept

    @functools.cached_property
    def training_bytes(self) -> int:
        """An estimate: both models in bf16, trained weights with gradients and AdamW, what a backward pass keeps."""
        models = sum(2 * model.parameters for model in (self.source, self.target))
        translator = TRAINED_BYTES * self.parameters + self.translation[1]
        return models + translator + self.target.activation_bytes

    @property
    def gpu(self) -> int:
        return next(size for size in GPUS if self.training_bytes <= 0.8 * size * 10**9)

    @property
    def sizes(self) -> str:
        """The lines of the script's head that say what it takes."""
        layers, config = self.translator.target_layers, self.translator.config
        depth = len(self.translator.target_geometry.layers)
        return (
            f"# Translates layers {layers[0]}-{layers[-1]} of the target's {depth}. Translator: {self.parameters:,} "
            f"parameters\n# (hidden_size {config.hidden_size}, {config.num_attention_heads} heads). Training takes "
            f"about {self.training_bytes / 2**30:.1f} GiB: a GPU of {self.gpu} GB.\n"
        )


def render(recipes: list[Recipe]) -> str:
    """The table of the recipes' README."""
    lines = ["| recipe | layers translated | width | translator parameters | training memory | GPU |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for recipe in recipes:
        layers, config = recipe.translator.target_layers, recipe.translator.config
        lines.append(
            f"| [{recipe.args.source} → {recipe.args.target}]({recipe.path.name}) "
            f"| {layers[0]}-{layers[-1]} of {len(recipe.translator.target_geometry.layers)} | {config.hidden_size} "
            f"| {recipe.parameters:,} | {recipe.training_bytes / 2**30:.1f} GiB | {recipe.gpu} GB |"
        )
    return "\n".join(lines) + "\n"
