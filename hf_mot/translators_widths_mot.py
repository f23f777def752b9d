"""What a translator reads and writes of a token, in channels."""

from dataclasses import dataclass

from .configuration_mot import MoTConfig
from .geometry_mot import ModelGeometry


@dataclass(frozen=True)
class Widths:
    """
    Channels a token that a translator reads and writes.

    Args:
        source (`tuple[tuple[int, int], ...]`): Per source layer read, of its keys and of its values.
        embeddings (`int`): Of the window of target token embeddings; 0 for none.
        target (`tuple[tuple[int, ...], ...]`): Per target layer translated, of its keys and of its values, or of the
            one state that they are restored from; at the end of that which a target resumes from, if any.
        hidden (`int`, *optional*, defaults to 0): Of the target's hidden state that is read; 0 for none.
    """

    source: tuple[tuple[int, int], ...]
    embeddings: int
    target: tuple[tuple[int, ...], ...]
    hidden: int = 0

    @classmethod
    def of(cls, config: MoTConfig) -> "Widths":
        """Those of a translator with this configuration."""
        source, target = (ModelGeometry.from_dict(contract["geometry"]) for contract in (config.source, config.target))
        translated = range(len(target.layers)) if config.target_layers is None else config.target_layers

        def dims(geometry: ModelGeometry, layer_idx: int) -> tuple[int, int]:
            layer = geometry.layers[layer_idx]
            return layer.kv_heads * layer.key_dim, layer.kv_heads * layer.value_dim

        embeddings = config.embedding_window * target.embedding_dim
        hidden = 0 if config.target_hidden_layer is None else target.hidden_dim
        written = [(target.hidden_dim,) if idx in config.restored_layers else dims(target, idx) for idx in translated]
        written += [] if config.resume_layer is None else [(target.hidden_dim,)]
        return cls(tuple(dims(source, idx) for idx in config.source_layers), embeddings, tuple(written), hidden)

    @property
    def source_dim(self) -> int:
        return sum(map(sum, self.source))

    @property
    def read_dim(self) -> int:
        """Of all that is read."""
        return self.source_dim + self.embeddings + self.hidden

    @property
    def output_dim(self) -> int:
        return sum(map(sum, self.target))
