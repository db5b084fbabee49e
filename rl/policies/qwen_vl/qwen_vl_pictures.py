"""The vision tower's features of pictures, computed once a picture while the tower is frozen."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cachetools import LRUCache

from rl.ranks.dist import calls_in_step

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Picture:
    """One that a prompt shows; on the CPU."""

    key: bytes
    """Equal exactly for equal pictures."""
    pixel_values: torch.Tensor
    """[patches, C] float32, as transformers' image processor gives them."""
    grid: torch.Tensor
    """[1, 3] int64: frames, rows and columns of patches."""


class Tower:
    """How transformers' vision tower takes and gives features: Qwen2.5-VL's; other families derive
    their own."""

    linear_layers: ClassVar[Set[str]] = frozenset({"qkv", "proj"})
    """Names of its linear layers, which an adapter may name where the tower is trained."""

    def features(self, encoded: Any) -> Sequence[torch.Tensor]:
        """[N_img, W] of each picture from the tower's output for all of them; W as in an inference
        engine's tower."""
        pictures: Sequence[torch.Tensor] = encoded.pooler_output
        return pictures

    def encoded(self, features: Sequence[torch.Tensor], config: Any) -> Any:
        """The inverse: what transformers' model takes in place of running the tower; `config` is
        the tower's."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tuple(features))


class PictureFeatures:
    """The features of one vision tower; while it is frozen, the last `max_kept` are cached."""

    def __init__(self, tower: Tower, trained: bool, max_kept: int) -> None:
        """`trained`: whether any weight of the tower is. It is not asked later: under the reference
        an adapter's parameters look frozen."""
        self._tower = tower
        self._trained = trained
        self._kept: LRUCache[bytes, torch.Tensor] = LRUCache(max_kept)

    def of(self, pictures: Sequence[Picture], vl_model: Any) -> list[torch.Tensor] | None:
        """Each picture's [N_img, W] features; None where there are none.

        A frozen tower encodes each missing picture alone: in a batch its last bits could differ,
        and a resumed run, which has other pictures cached, would not be exact. Under ZeRO-3 each
        call gathers weights from all ranks, so a rank that misses fewer pictures encodes blanks. A
        trained tower encodes all of them together and always runs: in ZeRO-2 the backward has to
        reach the same parameters on all ranks.
        """
        visual = vl_model.model.visual
        wanted = {picture.key: picture for picture in pictures}
        missing = [picture for key, picture in wanted.items() if key not in self._kept]
        found = {key: self._kept[key] for key in wanted if key in self._kept}
        blank: list[torch.Tensor] = []
        if self._trained:
            encoded = self._encode(missing or [_blank(visual)], vl_model)
            if missing:
                found |= {p.key: part for p, part in zip(missing, encoded, strict=True)}
            else:
                # No feature of the blank is used, but the backward reaches the tower.
                blank = [encoded[0][:0]]
        else:
            for number in range(calls_in_step(len(missing), visual)):
                if number < len(missing):
                    picture = missing[number]
                    [found[picture.key]] = self._encode([picture], vl_model)
                else:
                    self._encode([_blank(visual)], vl_model)
            self._kept.update(found)
        features = [found[picture.key] for picture in pictures] + blank
        return features or None

    def _encode(self, pictures: Sequence[Picture], vl_model: Any) -> list[torch.Tensor]:
        import torch

        device = vl_model.device
        pixel_values = torch.cat([picture.pixel_values.to(device) for picture in pictures])
        grid = torch.cat([picture.grid for picture in pictures]).to(device)
        with torch.set_grad_enabled(self._trained and torch.is_grad_enabled()):
            encoded = vl_model.model.get_image_features(pixel_values, grid, return_dict=True)
            return list(self._tower.features(encoded))


def _blank(visual: Any) -> Picture:
    """The smallest picture there is, all zeros."""
    import torch

    side, embed = visual.spatial_merge_size, visual.patch_embed
    num_values = embed.in_channels * embed.temporal_patch_size * embed.patch_size**2
    grid = torch.tensor([[1, side, side]])
    return Picture(b"", torch.zeros(side * side, num_values), grid)
