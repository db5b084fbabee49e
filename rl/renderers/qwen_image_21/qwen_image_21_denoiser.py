"""Our forward over QwenImage21Transformer2DModel's weights.

Legend: R rows; N tokens of a picture that is drawn; T tokens, of all rows that they belong to, one
row behind the other; H heads of E values; D = H E the transformer's width; C the states' width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from rl.algorithm.attention_kernels import Kernel, Runs, join
from rl.renderers.qwen_image.qwen_image_denoiser import Heads, rotate
from rl.renderers.qwen_image_21.layout import Piece, Rotary, end_of, num_tokens, positions

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""[T, H, E] each."""


@dataclass(frozen=True, eq=False)
class Shown:
    """A source picture in a prompt."""

    place: range
    """The states that its latents replace."""
    latents: torch.Tensor
    """[rows * columns, channels]."""
    shape: tuple[int, int]
    """(rows, columns) of latents."""


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that begin alike: with pictures, and what stands before and between them."""

    states: torch.Tensor
    """[places, C] of that beginning, up to the end of its last picture; none without pictures."""
    shown: tuple[Shown, ...]
    words: tuple[torch.Tensor, ...]
    """[L, C] of each row: the states behind it."""

    @cached_property
    def pieces(self) -> list[Piece]:
        """The beginning in order: texts, which may be empty, each followed by a picture."""
        pieces: list[Piece] = []
        at = 0
        for picture in self.shown:
            pieces += [picture.place.start - at, picture.shape]
            at = picture.place.stop
        return pieces

    @property
    def num_tokens(self) -> int:
        """Tokens of the beginning, pictures counted in latents."""
        return sum(map(num_tokens, self.pieces))


@dataclass(frozen=True, eq=False)
class Conditioning:
    """What the steps of a batch share."""

    starts: list[KeysValues]
    """Per layer, keys and values of the groups' beginnings."""
    start_lens: tuple[int, ...]
    """Tokens of each group's beginning; they add up to T."""
    rows_of: tuple[int, ...]
    """Rows of each group; they add up to R."""
    words: list[KeysValues]
    """Per layer, keys and values of what follows, row by row."""
    num_words: tuple[int, ...]
    """Tokens of each row; they add up to T."""
    rotary: torch.Tensor
    """[R * N, 1, E / 2, 2] float32, of the pictures that are drawn."""


@dataclass(frozen=True, eq=False)
class Modulation:
    """What a timestep applies, the same in every block; scales with their 1 added, which makes them
    the weights of the layer norms."""

    attention_scale: torch.Tensor
    """[D], and so are the others."""
    attention_gate: torch.Tensor
    mlp_scale: torch.Tensor
    mlp_gate: torch.Tensor
    out_scale: torch.Tensor
    """Before the last projection."""


class Denoiser:
    """Computes keys and values of text and sources once a batch, and velocities from latents.

    Text and sources are modulated as at timestep 0 and see nothing that comes later, so no step
    changes them. Rows that begin with the same pictures are a `Group`: that beginning goes through
    the transformer once, and the rows' queries meet its keys apart from their own and are joined by
    their log-sum-exps, so that no key is copied per row. All tokens lie behind each other without
    padding, each row with its own positions. Reads the transformer's modules, changes none.
    """

    def __init__(self, transformer: Any, kernel: Kernel, *, compiled: bool = False) -> None:
        if not transformer.config.causal_condition:
            raise ValueError(
                "transformer/config.json: causal_condition is false: such a Qwen-Image-2.1 reads "
                "text and sources anew at every step, which is not implemented"
            )
        self._model = transformer
        self._kernel = kernel
        self._rotary = Rotary(transformer)
        self._before, self._after = before_attention, after_attention
        if compiled:
            # Attention stays outside: it is a kernel, and rows' lengths would enter the graph.
            self._before = torch.compile(before_attention, dynamic=True, fullgraph=True)
            self._after = torch.compile(after_attention, dynamic=True, fullgraph=True)

    def prepare(self, groups: Sequence[Group], shape: tuple[int, int]) -> Conditioning:
        """What stays the same over the steps of a batch, whose pictures have `shape` (rows,
        columns) in latents. Either all groups show pictures or none does."""
        start_lens = tuple(group.num_tokens for group in groups)
        assert all(start_lens) or not any(start_lens)
        rows_of = tuple(len(group.words) for group in groups)
        num_words = tuple(len(words) for group in groups for words in group.words)
        ends_G = [end_of(group.pieces) for group in groups]
        starts_R = [e for e, rows in zip(ends_G, rows_of, strict=True) for _ in range(rows)]
        starts = self._read_starts(groups, start_lens) if any(start_lens) else []
        own = Runs(num_words, num_words, causal=True)
        words_R = [words for group in groups for words in group.words]
        words = self._keys_and_values(
            self._model.txt_in(torch.cat(words_R)),
            self._rotary.of(
                torch.cat([positions([n], p) for n, p in zip(num_words, starts_R, strict=True)])
            ),
            lambda layer, heads: self._attend(
                heads[0], heads[1:], own, starts[layer] if starts else None, start_lens, rows_of
            ),
        )
        placed = [positions([shape], p + n) for n, p in zip(num_words, starts_R, strict=True)]
        rotary = self._rotary.of(torch.cat(placed))
        return Conditioning(starts, start_lens, rows_of, words, num_words, rotary)

    def velocity(
        self, latents: torch.Tensor, given: Conditioning, timestep: torch.Tensor
    ) -> torch.Tensor:
        """[R, N, channels] noisy latents -> [R, N, channels]; `timestep`: the scheduler's, 1000
        down to 0."""
        num_rows, num_each = latents.shape[:2]
        # Stock rounds the timestep to the latents' dtype before dividing.
        modulation = self._modulation(timestep.to(latents.dtype) / 1000)
        own = Runs(
            (num_each,) * num_rows, tuple(n + num_each for n in given.num_words), causal=False
        )
        tokens = self._model.img_in(latents).flatten(0, 1)
        for layer, block in enumerate(self._model.transformer_blocks):
            queries, *own_keys = self._before(
                block, tokens, modulation, given.rotary, asking=len(tokens)
            )
            keys, values = (
                _row_by_row(before, mine, given.num_words)
                for before, mine in zip(given.words[layer], own_keys, strict=True)
            )
            start = given.starts[layer] if given.starts else None
            reads = self._attend(
                queries, (keys, values), own, start, given.start_lens, given.rows_of
            )
            tokens = self._after(block, tokens, modulation, reads)
        model = self._model
        normed = _norm(tokens, modulation.out_scale, model.config.eps)
        velocity: torch.Tensor = model.proj_out(normed)
        return velocity.unflatten(0, (num_rows, num_each))

    def _modulation(self, fraction: torch.Tensor) -> Modulation:
        """At a timestep in 0..1."""
        model = self._model
        embedding = model.time_text_embed(fraction[None], model.img_in.weight)
        scale, gate, mlp_scale, mlp_gate = model.modulation(embedding)[0].chunk(4)
        out_scale = model.norm_out.linear(model.norm_out.silu(embedding))[0]
        return Modulation(1 + scale, gate.tanh(), 1 + mlp_scale, mlp_gate.tanh(), 1 + out_scale)

    def _read_starts(self, groups: Sequence[Group], lens: Sequence[int]) -> list[KeysValues]:
        """Keys and values of the groups' beginnings, one behind the other, for every layer."""
        tokens = torch.cat([self._embed(group) for group in groups])
        placed = torch.cat([positions(group.pieces) for group in groups])

        def attend(layer: int, heads: Heads) -> torch.Tensor:
            groups_of = zip(groups, *(part.split(list(lens)) for part in heads), strict=True)
            return torch.cat([_attend_in_order(group.pieces, *own) for group, *own in groups_of])

        return self._keys_and_values(tokens, self._rotary.of(placed), attend)

    def _embed(self, group: Group) -> torch.Tensor:
        """[T, D] of a group's beginning, latents in the pictures' places."""
        model, at = self._model, 0
        parts = []
        for picture in group.shown:
            parts += [
                model.txt_in(group.states[at : picture.place.start]),
                model.img_in(picture.latents),
            ]
            at = picture.place.stop
        return torch.cat(parts)

    def _keys_and_values(
        self,
        tokens: torch.Tensor,
        rotary: torch.Tensor,
        attend: Callable[[int, Heads], torch.Tensor],
    ) -> list[KeysValues]:
        """For tokens [T, D] in every layer, modulated as at timestep 0; `attend`: (layer, heads) ->
        what they read [T, D]."""
        modulation = self._modulation(tokens.new_zeros(()))
        last = len(self._model.transformer_blocks) - 1
        kept: list[KeysValues] = []
        for layer, block in enumerate(self._model.transformer_blocks):
            # Nobody reads what comes out of the last layer but its keys and values.
            asking = 0 if layer == last else len(tokens)
            heads = self._before(block, tokens, modulation, rotary, asking=asking)
            kept.append((heads[1], heads[2]))
            if layer < last:
                tokens = self._after(block, tokens, modulation, attend(layer, heads))
        return kept

    def _attend(
        self,
        queries: torch.Tensor,
        own_heads: KeysValues,
        own: Runs,
        start: KeysValues | None,
        start_lens: tuple[int, ...],
        rows_of: Sequence[int],
    ) -> torch.Tensor:
        """[T, D]: each row's queries over its own keys, and over its group's beginning."""
        out, lse = self._kernel.forward(queries, *own_heads, own)
        if start is not None:
            lens = iter(own.query_lens)
            of_groups = tuple(sum(next(lens) for _ in range(rows)) for rows in rows_of)
            across = Runs(of_groups, start_lens, causal=False)
            out, _ = join(out, lse, *self._kernel.forward(queries, *start, across))
        return out.flatten(1)


def _row_by_row(
    before: torch.Tensor, mine: torch.Tensor, num_before: Sequence[int]
) -> torch.Tensor:
    """Each row's part of `before` [T, H, E], then its equal part of `mine` [R * N, H, E]."""
    rows = zip(before.split(list(num_before)), mine.chunk(len(num_before)), strict=True)
    return torch.cat([part for row in rows for part in row])


def _attend_in_order(
    pieces: Sequence[Piece], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """[T, D] of one beginning: text sees what is before it and itself, a picture also its own."""
    reads, at = [], 0
    for piece in pieces:
        end = at + num_tokens(piece)
        mask = None
        if isinstance(piece, int):
            mask = torch.ones(piece, end, dtype=torch.bool, device=keys.device).tril(at)
        if end > at:
            asking, seen, read_from = (
                part.transpose(0, 1)[None] for part in (queries[at:end], keys[:end], values[:end])
            )
            read = F.scaled_dot_product_attention(asking, seen, read_from, attn_mask=mask)
            reads.append(read[0].transpose(0, 1).flatten(1))
        at = end
    return torch.cat(reads)


def before_attention(
    block: Any, tokens: torch.Tensor, modulation: Modulation, rotary: torch.Tensor, asking: int
) -> Heads:
    """Queries of the first `asking` tokens, keys and values of all [T, D]; `rotary`: of all."""
    attention = block.attn
    normed = _norm(tokens, modulation.attention_scale, block.img_norm1.eps)
    size = attention.norm_q.weight.shape
    queries, keys, values = (
        layer(given).unflatten(-1, (-1, *size))
        for layer, given in (
            (attention.to_q, normed[:asking]),
            (attention.to_k, normed),
            (attention.to_v, normed),
        )
    )
    queries = F.rms_norm(queries, size, attention.norm_q.weight, attention.norm_q.eps)
    keys = F.rms_norm(keys, size, attention.norm_k.weight, attention.norm_k.eps)
    return rotate(queries, rotary[:asking]), rotate(keys, rotary), values


def after_attention(
    block: Any, tokens: torch.Tensor, modulation: Modulation, reads: torch.Tensor
) -> torch.Tensor:
    """[T, D] with what they read added, then what the MLP makes of that."""
    tokens = torch.addcmul(tokens, modulation.attention_gate, block.attn.to_out[0](reads))
    normed = _norm(tokens, modulation.mlp_scale, block.img_norm2.eps)
    tokens = torch.addcmul(tokens, modulation.mlp_gate, block.img_mlp(normed))
    # As stock: a float16 overflow would spread as infinity.
    return tokens.clip(-65504, 65504) if tokens.dtype == torch.float16 else tokens


def _norm(tokens: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(tokens, scale.shape, scale, None, eps)
