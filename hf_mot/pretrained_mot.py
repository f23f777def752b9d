"""How a translator is saved and loaded: as any model of transformers, but nothing may be missing or surplus."""

import json
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .configuration_mot import MoTConfig
from .generation_custom_mot import RECIPE

FIT_REPORT = "fit_report.json"


class MoTPreTrainedModel(PreTrainedModel):
    """
    Base of [`MoTModel`].

    Attributes:
        fit_report (`dict` or `None`): How it was fitted or trained; saved beside the weights.
    """

    config_class = MoTConfig
    base_model_prefix = "mot"
    main_input_name = "source_states"

    def __init__(self, config: MoTConfig):
        super().__init__(config)
        self.fit_report: dict[str, Any] | None = None
        self.add_model_tags(["hf_mot", "kv-cache"])  # by which a pushed translator is found

    def _init_weights(self, module: nn.Module) -> None:
        """The modules initialise themselves: what is added to a linear path starts at zero."""

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
