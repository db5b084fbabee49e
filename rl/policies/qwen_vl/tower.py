"""The features that a family's vision tower gives; a family derives its own."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch


class Tower:
    """Patches through layers of attention and an MLP, then merged by squares to image tokens.

    `config`: transformers' own of the tower.
    """

    linear_layers: ClassVar[Set[str]]
    """Names that its linear layers have, which an adapter may name where the tower is trained."""

    def features(self, encoded: Any) -> Sequence[torch.Tensor]:
        """[N_img, W] of each picture, out of what transformers' tower gives for all of them; W as
        an inference engine's tower gives it."""
        pictures: Sequence[torch.Tensor] = encoded.pooler_output
        return pictures

    def encoded(self, features: Sequence[torch.Tensor], config: Any) -> Any:
        """The other way round: what transformers' model takes in place of the tower."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tuple(features))
