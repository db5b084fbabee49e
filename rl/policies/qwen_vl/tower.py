"""What a family's vision tower gives, and what it costs: a family derives its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar

from rl.meter import flop_meter
from rl.meter.flop_meter import Work

if TYPE_CHECKING:
    import torch


class Tower(ABC):
    """Patches through layers of attention and an MLP, then merged by squares to image tokens.

    `config`: transformers' own of the tower.
    """

    linear_layers: ClassVar[Set[str]]
    """Names that its linear layers have, which an adapter may name where the tower is trained."""
    mlp_matrices: ClassVar[int]
    """Of a layer's MLP: 3 of a gated one, 2 of a plain one."""

    def features(self, encoded: Any) -> Sequence[torch.Tensor]:
        """[N_img, W] of each picture, out of what transformers' tower gives for all of them; W as
        an inference engine's tower gives it."""
        pictures: Sequence[torch.Tensor] = encoded.pooler_output
        return pictures

    def encoded(self, features: Sequence[torch.Tensor], config: Any) -> Any:
        """The other way round: what transformers' model takes in place of the tower."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tuple(features))

    def num_mergers(self, config: Any) -> int:
        """Each merges the patches of every picture once."""
        return 1

    @abstractmethod
    def num_pairs(self, config: Any, rows: int, columns: int) -> int:
        """Pairs of patches that attend to each other, all layers, in a picture of so many rows and
        columns of patches."""

    def count(self, config: Any, grids: Iterable[tuple[int, int]], bytes_per_value: int) -> None:
        """A forward over pictures of (rows, columns) patches, to the meter."""
        width, merge = config.hidden_size, config.spatial_merge_size
        per_layer = 4 * width**2 + self.mlp_matrices * width * config.intermediate_size
        embedding = config.in_channels * config.temporal_patch_size * config.patch_size**2 * width
        merged = width * merge**2
        merger = self.num_mergers(config) * merged * (merged + config.out_hidden_size)
        products = 0
        for rows, columns in grids:
            num_patches = rows * columns
            products += num_patches * (embedding + config.depth * per_layer + merger // merge**2)
            products += 2 * width * self.num_pairs(config, rows, columns)
        num_weights = embedding + config.depth * per_layer + merger
        flop_meter.add(Work(2.0 * products, num_weights * bytes_per_value))
