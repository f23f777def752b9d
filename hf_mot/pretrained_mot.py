"""How a translator comes to be: made for a pair of models, or loaded as it was saved."""

import json
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from .channels_mot import channels
from .configuration_mot import MoTConfig
from .contract_mot import check_contract, describe_model
from .generation_custom_mot import RECIPE
from .geometry_mot import ModelGeometry

FIT_REPORT = "fit_report.json"


class MoTPreTrainedModel(PreTrainedModel):
    """
    Base of [`MoTModel`]: a pair of models and the layers of theirs that are read and translated.

    Attributes:
        source_geometry, target_geometry ([`ModelGeometry`]): Of the caches of both models.
        fit_report (`dict` or `None`): How it was fitted or trained; saved beside the weights.

    Raises:
        `ValueError`: a config without both contracts, a damaged one, or layers that these models do not have.
    """

    config_class = MoTConfig
    base_model_prefix = "mot"
    main_input_name = "source_states"

    def __init__(self, config: MoTConfig):
        super().__init__(config)
        if config.source is None or config.target is None:
            raise ValueError(
                "`config` must hold the contracts of the source and the target model (`source`, `target`), as "
                "`hf-mot fit` or MoTModel.identity write them."
            )
        for side, contract in (("source", config.source), ("target", config.target)):
            check_contract(contract, side)
        self.source_geometry = ModelGeometry.from_dict(config.source["geometry"])
        self.target_geometry = ModelGeometry.from_dict(config.target["geometry"])
        self._check_target_hidden_layer()
        self._check_resume_layer()
        for name, layers, geometry in (
            ("source_layers", config.source_layers, self.source_geometry),
            ("target_layers", config.target_layers or [], self.target_geometry),
            ("key_norms", config.key_norms, self.target_geometry),
            ("restored_layers", config.restored_layers, self.target_geometry),
        ):
            depth = len(geometry.layers)
            if not set(layers) <= set(range(depth)):
                raise ValueError(f"`{name}` must lie in 0..{depth - 1}, got {layers}.")
        if config.restored_layers and self.target_geometry.hidden_dim is None:
            raise ValueError(f"`restored_layers` is {config.restored_layers}, but {self._no_hidden_dim}")
        resumed = config.resume_layer is not None
        if config.piece_ranks is not None and len(config.piece_ranks) != len(self.target_layers) + resumed:
            raise ValueError(
                f"`piece_ranks` must be [keys, values] for each of the {len(self.target_layers)} target layers that "
                f"are translated{', and [state] for a `resume_layer`' * resumed}, got {len(config.piece_ranks)}."
            )
        if config.method == "identity" and config.source_layers != self.target_layers:
            raise ValueError(
                f"`source_layers` of an identity translator must be the layers that it hands through, "
                f"{self.target_layers}, got {config.source_layers}."
            )
        if not config.source_layers and not config.embedding_window and config.target_hidden_layer is None:
            raise ValueError("`source_layers` and `embedding_window` are both empty: there is nothing to read.")
        self.fit_report: dict[str, Any] | None = None
        self.add_model_tags(["hf_mot", "kv-cache"])  # by which a pushed translator is found

    def _check_target_hidden_layer(self) -> None:
        layer_idx, depth = self.config.target_hidden_layer, len(self.target_geometry.layers)
        if layer_idx is None:
            return
        if layer_idx > depth - 2:
            raise ValueError(
                f"`target_hidden_layer` must lie in 0..{depth - 2}, so that one of the target's {depth} layers is "
                f"left to translate, got {layer_idx}."
            )
        if self.target_layers[-1] != depth - 1:
            raise ValueError(
                f"`target_layers` must go up to the target's last layer, {depth - 1}, where `target_hidden_layer` is "
                f"read: nothing would compute those above, got {self.target_layers}."
            )
        if self.target_geometry.hidden_dim is None:
            raise ValueError(f"`target_hidden_layer` is {layer_idx}, but {self._no_hidden_dim}")

    def _check_resume_layer(self) -> None:
        layer_idx, depth = self.config.resume_layer, len(self.target_geometry.layers)
        if layer_idx is None:
            return
        if layer_idx >= depth:
            raise ValueError(
                f"`resume_layer` must lie in 1..{depth - 1}, so that one of the target's {depth} layers is left to "
                f"run, got {layer_idx}."
            )
        if self.target_geometry.hidden_dim is None:
            raise ValueError(f"`resume_layer` is {layer_idx}, but {self._no_hidden_dim}")

    @property
    def _no_hidden_dim(self) -> str:
        return (
            f"the layers of this target ({self.config.target['model_type']}) do not each get one hidden state a "
            "token, or its contract is of an earlier release and does not tell. Make the contract anew, or leave the "
            "field out."
        )

    @property
    def target_layers(self) -> list[int]:
        """The target layers that are translated, the channel window."""
        depth = len(self.target_geometry.layers)
        return list(range(depth)) if self.config.target_layers is None else self.config.target_layers

    def _init_weights(self, module: nn.Module) -> None:
        """The modules initialise themselves: what is added to a linear path starts at zero."""

    @classmethod
    def from_pair(
        cls,
        source: PreTrainedModel,
        target: PreTrainedModel,
        source_tokenizer: PreTrainedTokenizerBase,
        target_tokenizer: PreTrainedTokenizerBase,
        **kwargs: Any,
    ) -> Self:
        """A translator for a pair of models and their fast tokenizers, to be trained. Arguments as in
        [`from_contracts`]."""
        contracts = (describe_model(source, source_tokenizer), describe_model(target, target_tokenizer))
        return cls.from_contracts(*contracts, **kwargs)

    @classmethod
    def from_contracts(
        cls,
        source: dict[str, Any],
        target: dict[str, Any],
        *,
        channel_ratio: float = 1.0,
        start: int = 0,
        mapping: str = "depth_ratio",
        **fields: Any,
    ) -> Self:
        """
        A translator with random weights.

        Args:
            source, target (`dict`): The contracts of both models, as `contract_mot.describe_model` writes them.
            channel_ratio, start, mapping (*optional*): The channel window, as in [`channels_mot.channels`]; by default
                all target layers (above a `target_hidden_layer`, below a `resume_layer`), each with the source layer
                of its relative depth.
            **fields: Fields of [`MoTConfig`], such as those of `configuration_mot.PAPER`; `source_layers` and
                `target_layers` take the place of the window's.

        Raises:
            `ValueError`: a window out of range, or fields that [`MoTConfig`] refuses.
        """
        depths = (len(contract["geometry"]["layers"]) for contract in (source, target))
        window = channels(*depths, channel_ratio=channel_ratio, start=start, mapping=mapping)
        default = {"method": "mot", "replay": "none" if channel_ratio == 1 else "full"}
        hidden_layer = fields.get("target_hidden_layer")
        if hidden_layer is not None:  # the target's own are all layers below the window
            above = sum(layer_idx > hidden_layer for layer_idx in window["target_layers"])
            window = {name: layers[len(layers) - above :] for name, layers in window.items()}
            window["target_layers"] = window["target_layers"] or [hidden_layer + 1]  # which is refused
            default["replay"] = f"bottom:{window['target_layers'][0]}"
        elif fields.get("resume_layer") is not None:
            layer_idx = fields["resume_layer"]
            if channel_ratio != 1 or start:
                raise ValueError(
                    f"`channel_ratio` {channel_ratio} and `start` {start} choose a window, but below a `resume_layer`"
                    f", here {layer_idx}, all layers are translated. Leave them out."
                )
            window = {
                **{name: own[:layer_idx] for name, own in window.items()},
                "target_layers": list(range(layer_idx)),
            }
            default["replay"] = f"resume:{layer_idx - 1}"
        elif channel_ratio == 1:
            window["target_layers"] = None
        return cls(MoTConfig(source=source, target=target, **{**default, **window, **fields}))

    @classmethod
    def identity(cls, target: PreTrainedModel, target_tokenizer: PreTrainedTokenizerBase) -> Self:
        """The oracle: a translator from `target` to itself that passes the states through the whole path."""
        contract = describe_model(target, target_tokenizer)
        layers = list(range(len(contract["geometry"]["layers"])))
        config = MoTConfig(
            method="identity", source=contract, target=contract, source_layers=layers, embedding_window=0
        )
        return cls(config)

    def load_linear_path(self, closed_form: Self) -> None:
        """
        Copies the weights of a closed-form translator into this one's linear path, and its key norms, so that training
        starts there.

        Raises:
            `ValueError`: this translator has no linear path, or one of other sizes; `closed_form` is none.
        """
        if closed_form.config.method != "reduced_rank":
            raise ValueError(f"`closed_form` must be a closed form (reduced_rank), got {closed_form.config.method}.")
        path = self.translator if self.config.trunk else getattr(self.translator, "linear", None)
        if self.config.method == "reduced_rank":
            path = self.translator
        if path is None:
            raise ValueError("This translator has no linear path to load. Set `linear_path` or `trunk` in its config.")
        for field in (
            *("source_layers", "target_layers", "resume_layer", "restored_layers", "rank", "piece_ranks"),
            *("source_window", "embedding_window", "target_hidden_layer", "position_free", "key_norms"),
            "predicts_error",
        ):
            came, own = getattr(closed_form.config, field), getattr(self.config, field)
            if came != own:
                raise ValueError(
                    f"`closed_form` was fitted with `{field}` {came}, but this translator has {own}. Make them equal."
                )
        with torch.no_grad():
            own = path.state_dict()
            for name, tensor in closed_form.translator.state_dict().items():
                own[name].copy_(tensor)
        self.key_norms.load_state_dict(closed_form.key_norms.state_dict())

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Writes weights (safetensors), config, the code that remote loading needs, and `fit_report.json`."""
        if self.config.method == "identity":
            raise ValueError("An identity translator holds nothing to save. Make it anew with MoTModel.identity.")
        recipe = Path(save_directory) / "custom_generate" / "generate.py"
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(RECIPE, encoding="utf-8")
        super().save_pretrained(save_directory, **kwargs)
        if self.fit_report is not None:
            text = json.dumps(self.fit_report, indent=2, ensure_ascii=False)
            (Path(save_directory) / FIT_REPORT).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, **kwargs: Any) -> Self:
        """As in transformers, but a weight that is missing, surplus or of another shape is an error."""
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs["ignore_mismatched_sizes"] = True  # so that they are reported, and refused below
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(
                f"The weights of {pretrained_model_name_or_path!r} cannot be read ({error}): the safetensors file is "
                "truncated or damaged. Download or save it again."
            ) from error
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(problem):
                raise ValueError(
                    f"The weights of {pretrained_model_name_or_path!r} do not fit its config: "
                    f"{problem.replace('_', ' ')} {sorted(map(str, info[problem]))}. Save or download it again."
                )
        hub_arguments = ("cache_dir", "revision", "token", "local_files_only", "subfolder")
        report = cached_file(
            pretrained_model_name_or_path,
            FIT_REPORT,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            **{name: kwargs[name] for name in hub_arguments if name in kwargs},
        )
        if report is not None:
            try:
                model.fit_report = json.loads(Path(report).read_text(encoding="utf-8"))
            except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
                raise ValueError(f"{FIT_REPORT} of {pretrained_model_name_or_path!r} is damaged: {error}.") from error
            if not isinstance(model.fit_report, dict):
                raise ValueError(f"{FIT_REPORT} of {pretrained_model_name_or_path!r} is damaged: it is no object.")
        return (model, info) if wants_info else model
