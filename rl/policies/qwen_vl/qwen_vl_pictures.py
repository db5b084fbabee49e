"""The vision tower's features of pictures; a frozen tower encodes each picture only once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cachetools import LRUCache

from rl.ranks.dist import calls_in_step

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture of a prompt, on the CPU."""

    key: bytes
    """A content hash: equal exactly for equal pictures."""
    pixel_values: torch.Tensor
    """[patches, C] float32, as transformers' image processor gives them."""
    grid: torch.Tensor
    """[1, 3] int64: frames, rows and columns of patches."""


class Tower:
    """Converts between the output of transformers' vision tower and features per picture, for
    Qwen2.5-VL; other families override it."""

    linear_layers: ClassVar[Set[str]] = frozenset({"qkv", "proj"})
    """Names of the tower's linear layers; `lora` may name them if the tower is trained."""

    def geometry(self, grid: torch.Tensor, visual: Any) -> Mapping[str, torch.Tensor]:
        """What transformers' `visual` derives from `grid` [n, 3], under its names, on the CPU: from
        a grid on the GPU each of its layers would make the host wait."""
        from transformers import vision_utils

        window_index, cu_window_seqlens = vision_utils.get_vision_window_index(
            grid,
            spatial_merge_size=visual.spatial_merge_size,
            window_size=visual.window_size,
            patch_size=visual.patch_size,
        )
        positions = vision_utils.get_vision_position_ids(grid, visual.spatial_merge_size)
        return {
            "position_ids": positions,
            "window_index": window_index,
            "cu_window_seqlens": cu_window_seqlens,
        }

    def features(self, encoded: Any) -> Sequence[torch.Tensor]:
        """[N_img, W] of each picture, from the tower's output for all pictures; W as in an
        inference engine's tower."""
        pictures: Sequence[torch.Tensor] = encoded.pooler_output
        return pictures

    def encoded(self, features: Sequence[torch.Tensor], config: Any) -> Any:
        """The inverse of `features`: the tower output that transformers' model accepts instead of
        pictures. `config`: the tower's."""
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        return BaseModelOutputWithPooling(pooler_output=tuple(features))


class PictureFeatures:
    """The features of one vision tower; while it is frozen, the last `max_kept` are cached."""

    def __init__(self, tower: Tower, trained: bool, max_kept: int) -> None:
        """`trained`: whether any weight of the tower is trained, as of now: inside
        `Policy.reference`, an adapter's parameters would look frozen."""
        self._tower = tower
        self._trained = trained
        self._kept: LRUCache[bytes, torch.Tensor] = LRUCache(max_kept)

    def of(self, pictures: Sequence[Picture], vl_model: Any) -> list[torch.Tensor] | None:
        """Each picture's [N_img, W] features; None if there are no features.

        A frozen tower encodes each missing picture alone: in a batch its last bits could differ,
        and a resumed run, which has other pictures cached, would not be exact. Under ZeRO-3 each
        call gathers weights from all ranks, so a rank that misses fewer pictures encodes blanks. A
        trained tower encodes all of them together and always runs: in ZeRO-2 the backward has to
        reach the same parameters on all ranks.
        """
        visual = vl_model.model.visual
        picture_of = {picture.key: picture for picture in pictures}
        missing = [picture for key, picture in picture_of.items() if key not in self._kept]
        features_of = {key: self._kept[key] for key in picture_of if key in self._kept}
        blank: list[torch.Tensor] = []
        if self._trained:
            encoded = self._encode(missing or [_blank(visual)], vl_model)
            if missing:
                features_of |= {p.key: part for p, part in zip(missing, encoded, strict=True)}
            else:
                # No feature of the blank is used, but the backward reaches the tower.
                blank = [encoded[0][:0]]
        else:
            for number in range(calls_in_step(len(missing), visual)):
                if number < len(missing):
                    picture = missing[number]
                    [features_of[picture.key]] = self._encode([picture], vl_model)
                else:
                    self._encode([_blank(visual)], vl_model)
            self._kept.update(features_of)
        features = [features_of[picture.key] for picture in pictures] + blank
        return features or None

    def _encode(self, pictures: Sequence[Picture], vl_model: Any) -> list[torch.Tensor]:
        import torch

        device = vl_model.device
        pixel_values = torch.cat([picture.pixel_values for picture in pictures])
        pixel_values = pixel_values.to(device, non_blocking=True)
        grid = torch.cat([picture.grid for picture in pictures])
        geometry = {
            # Lengths of attention's runs are read on the host.
            f"image_{name}": value if "seqlens" in name else value.to(device, non_blocking=True)
            for name, value in self._tower.geometry(grid, vl_model.model.visual).items()
        }
        with torch.set_grad_enabled(self._trained and torch.is_grad_enabled()):
            encode = vl_model.model.get_image_features
            encoded = encode(pixel_values, grid, return_dict=True, **geometry)
            return list(self._tower.features(encoded))


def _blank(visual: Any) -> Picture:
    """The smallest possible picture, all zeros."""
    import torch

    side, embed = visual.spatial_merge_size, visual.patch_embed
    num_values = embed.in_channels * embed.temporal_patch_size * embed.patch_size**2
    grid = torch.tensor([[1, side, side]])
    return Picture(b"", torch.zeros(side * side, num_values), grid)
