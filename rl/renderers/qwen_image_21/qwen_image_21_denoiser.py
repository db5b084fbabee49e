"""Our forward over QwenImage21Transformer2DModel's weights.

Legend: R rows; N tokens of a picture that is drawn; T tokens of the rows in a tensor, concatenated
row by row; H heads of E values; D = H E the transformer's width; C the states' width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

from rl.algorithm.attention_kernels import Kernel, Runs, join
from rl.renderers.qwen_image.qwen_image_denoiser import Heads, heads_of

KeysValues = tuple[torch.Tensor, torch.Tensor]
"""[T, H, E] each."""

Piece = int | tuple[int, int]
"""A number of text tokens, or a picture's (rows, columns)."""


def num_tokens(piece: Piece) -> int:
    return piece if isinstance(piece, int) else piece[0] * piece[1]


def end_of(pieces: Sequence[Piece], start: int = 0) -> int:
    """The position after these pieces, if the first one begins at position `start`."""
    return start + sum(p if isinstance(p, int) else max(p) for p in pieces)


def positions(pieces: Sequence[Piece], start: int = 0) -> torch.Tensor:
    """[T, 3] int64: positions of the tokens of `pieces`, from `start` on.

    A text token's position is the same on all three axes, and 1 higher than that of the token
    before it. All tokens of a picture have one position on axis 0; axes 1 and 2 are row and column,
    counted from the picture's middle.
    """
    positions_of_pieces = [torch.empty(0, 3, dtype=torch.long)]
    for piece in pieces:
        if isinstance(piece, int):
            positions_of_pieces.append(torch.arange(start, start + piece)[:, None].expand(-1, 3))
        else:
            axes = (torch.arange(side) - (side - side // 2) for side in piece)
            positions_of_pieces.append(torch.cartesian_prod(torch.tensor([start]), *axes))
        start = end_of([piece], start)
    return torch.cat(positions_of_pieces)


@dataclass(frozen=True, eq=False)
class PromptImage:
    """A source picture in a prompt."""

    indices: range
    """Indices of the prompt's states that the picture's latents replace."""
    latents: torch.Tensor
    """[rows * columns, channels]."""
    shape: tuple[int, int]
    """(rows, columns) of latents."""
    digest: bytes
    """Digest of the picture."""


@dataclass(frozen=True, eq=False)
class Row:
    """What one row is conditioned on. Its start is the states up to the end of its last picture,
    and empty if it has no pictures."""

    states: torch.Tensor
    """[L, C]."""
    sources: tuple[PromptImage, ...]

    @property
    def start_len(self) -> int:
        """Number of states in the start, before latents replace the pictures' states."""
        return self.sources[-1].indices.stop if self.sources else 0

    @property
    def words(self) -> torch.Tensor:
        """[.., C]: the states after the start, which are those of the text."""
        return self.states[self.start_len :]

    @cached_property
    def pieces(self) -> list[Piece]:
        """The start in order: per picture, the text before it (may be empty) and the picture."""
        pieces: list[Piece] = []
        end = 0
        for picture in self.sources:
            pieces += [picture.indices.start - end, picture.shape]
            end = picture.indices.stop
        return pieces

    @property
    def num_start_tokens(self) -> int:
        """Tokens of the start, where a picture has one token per latent."""
        return sum(map(num_tokens, self.pieces))

    def starts_like(self, other: Row) -> bool:
        """Whether both starts have equal pictures at equal indices and bitwise equal states."""
        pictures, others = ([(p.indices, p.digest) for p in row.sources] for row in (self, other))
        return pictures == others and torch.equal(
            self.states[: self.start_len], other.states[: other.start_len]
        )


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Inputs that are the same in all steps of a batch."""

    starts: list[KeysValues]
    """Per layer, keys and values of the groups' starts."""
    start_lens: tuple[int, ...]
    """Tokens of each group's start; they add up to T."""
    rows_of: tuple[int, ...]
    """Rows of each group; they add up to R."""
    words: list[KeysValues]
    """Per layer, keys and values of the tokens after the start, row by row."""
    text_lens: tuple[int, ...]
    """Tokens of each row; they add up to T."""
    rotary: torch.Tensor
    """[R * N, 1, E / 2, 2] float32, of the pictures that are drawn."""


@dataclass(frozen=True, eq=False)
class Modulation:
    """The modulation at one timestep, the same in every block. Scales include the added 1, so that
    they are the weights of the layer norms."""

    attention_scale: torch.Tensor
    """[D], as all fields here."""
    attention_gate: torch.Tensor
    mlp_scale: torch.Tensor
    mlp_gate: torch.Tensor
    out_scale: torch.Tensor
    """Before the last projection."""


class Denoiser:
    """Computes keys and values of text and sources once per batch, and velocities from latents.

    Text and sources are modulated as at timestep 0 and attend to no later token, so their keys and
    values are the same in all steps. Rows with equal starts form a group; their start is computed
    once. Attention to the group's start and attention to the row's other tokens are computed
    separately and joined by their log-sum-exps, so that keys are not copied for each row. All
    tokens are concatenated without padding, each row with its own positions.
    """

    def __init__(self, transformer: Any, kernel: Kernel) -> None:
        if not transformer.config.causal_condition:
            raise ValueError(
                "transformer/config.json: causal_condition is false: such a Qwen-Image-2.1 reads "
                "text and sources again at every step, which is not implemented"
            )
        self._model = transformer
        self._kernel = kernel
        self._rotary_axes = [
            torch.view_as_real(axis).to(transformer.device) for axis in transformer.pos_embed.freqs
        ]

    def prepare(self, groups: Sequence[Sequence[Row]], shape: tuple[int, int]) -> Conditioning:
        """Compute the inputs that are the same in all steps of a batch, whose drawn pictures have
        `shape` (rows, columns) in latents. Either all groups have source pictures or none has."""
        firsts_G = [group[0] for group in groups]
        start_lens = tuple(first.num_start_tokens for first in firsts_G)
        assert all(start_lens) or not any(start_lens)
        rows_of = tuple(map(len, groups))
        words_R = [row.words for group in groups for row in group]
        text_lens = tuple(map(len, words_R))
        starts_R = [end_of(row.pieces) for group in groups for row in group]
        starts = self._read_starts(firsts_G, start_lens) if any(start_lens) else []
        runs = Runs(text_lens, text_lens, causal=True)
        words = self._keys_and_values(
            self._model.txt_in(torch.cat(words_R)),
            self._rotary(
                torch.cat([positions([n], p) for n, p in zip(text_lens, starts_R, strict=True)])
            ),
            lambda layer, heads: self._attend(
                heads[0], heads[1:], runs, starts[layer] if starts else None, start_lens, rows_of
            ),
        )
        drawn_R = [positions([shape], p + n) for n, p in zip(text_lens, starts_R, strict=True)]
        rotary = self._rotary(torch.cat(drawn_R))
        return Conditioning(starts, start_lens, rows_of, words, text_lens, rotary)

    def velocity(
        self, latents: torch.Tensor, cond: Conditioning, timestep: torch.Tensor
    ) -> torch.Tensor:
        """[R, N, channels] noisy latents -> [R, N, channels]; `timestep`: the scheduler's, 1000
        down to 0."""
        num_rows, num_each = latents.shape[:2]
        # Stock rounds the timestep to the latents' dtype before dividing.
        modulation = self._modulation(timestep.to(latents.dtype) / 1000)
        runs = Runs(
            (num_each,) * num_rows, tuple(n + num_each for n in cond.text_lens), causal=False
        )
        tokens = self._model.img_in(latents).flatten(0, 1)
        for layer, block in enumerate(self._model.transformer_blocks):
            queries, *own_keys = before_attention(
                block, tokens, modulation, cond.rotary, num_queries=len(tokens)
            )
            keys, values = (
                _row_by_row(text, drawn, cond.text_lens)
                for text, drawn in zip(cond.words[layer], own_keys, strict=True)
            )
            start = cond.starts[layer] if cond.starts else None
            attention_out = self._attend(
                queries, (keys, values), runs, start, cond.start_lens, cond.rows_of
            )
            tokens = after_attention(block, tokens, modulation, attention_out)
        model = self._model
        normed = _norm(tokens, modulation.out_scale, model.config.eps)
        velocity: torch.Tensor = model.proj_out(normed)
        return velocity.unflatten(0, (num_rows, num_each))

    def _rotary(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Positions [T, 3] -> [T, 1, E / 2, 2] float32, cosine and sine."""
        indices = positions_T.to(self._rotary_axes[0].device).unbind(-1)
        angles = [axis[index] for axis, index in zip(self._rotary_axes, indices, strict=True)]
        return torch.cat(angles, dim=-2).unsqueeze(1)

    def _modulation(self, fraction: torch.Tensor) -> Modulation:
        """The modulation at a timestep; `fraction`: timestep / 1000, 0..1."""
        model = self._model
        embedding = model.time_text_embed(fraction[None], model.img_in.weight)
        scale, gate, mlp_scale, mlp_gate = model.modulation(embedding)[0].chunk(4)
        out_scale = model.norm_out.linear(model.norm_out.silu(embedding))[0]
        return Modulation(1 + scale, gate.tanh(), 1 + mlp_scale, mlp_gate.tanh(), 1 + out_scale)

    def _read_starts(self, firsts_G: Sequence[Row], lens: Sequence[int]) -> list[KeysValues]:
        """Keys and values of the groups' starts, concatenated, for every layer."""
        tokens = torch.cat([self._embed(first) for first in firsts_G])
        positions_T = torch.cat([positions(first.pieces) for first in firsts_G])

        def attend(layer: int, heads: Heads) -> torch.Tensor:
            parts = zip(firsts_G, *(part.split(list(lens)) for part in heads), strict=True)
            return torch.cat([_attend_in_order(first.pieces, *qkv) for first, *qkv in parts])

        return self._keys_and_values(tokens, self._rotary(positions_T), attend)

    def _embed(self, row: Row) -> torch.Tensor:
        """[T, D]: embeddings of a row's start, with latents for the pictures' states."""
        model, end = self._model, 0
        parts = []
        for picture in row.sources:
            parts += [
                model.txt_in(row.states[end : picture.indices.start]),
                model.img_in(picture.latents),
            ]
            end = picture.indices.stop
        return torch.cat(parts)

    def _keys_and_values(
        self,
        tokens: torch.Tensor,
        rotary: torch.Tensor,
        attend: Callable[[int, Heads], torch.Tensor],
    ) -> list[KeysValues]:
        """Keys and values of tokens [T, D] in every layer, modulated as at timestep 0; `attend`:
        (layer, heads) -> attention output [T, D]."""
        modulation = self._modulation(tokens.new_zeros(()))
        last = len(self._model.transformer_blocks) - 1
        kept: list[KeysValues] = []
        for layer, block in enumerate(self._model.transformer_blocks):
            # The last layer needs no queries: only its keys and values are used.
            num_queries = 0 if layer == last else len(tokens)
            heads = before_attention(block, tokens, modulation, rotary, num_queries=num_queries)
            kept.append((heads[1], heads[2]))
            if layer < last:
                tokens = after_attention(block, tokens, modulation, attend(layer, heads))
        return kept

    def _attend(
        self,
        queries: torch.Tensor,
        own_heads: KeysValues,
        runs: Runs,
        start: KeysValues | None,
        start_lens: tuple[int, ...],
        rows_of: Sequence[int],
    ) -> torch.Tensor:
        """[T, D]: attention of each row's queries to its own keys and to its group's start."""
        out, lse = self._kernel.forward(queries, *own_heads, runs)
        if start is not None:
            row_lens = iter(runs.query_lens)
            queries_of_groups = tuple(sum(next(row_lens) for _ in range(rows)) for rows in rows_of)
            across = Runs(queries_of_groups, start_lens, causal=False)
            out, _ = join(out, lse, *self._kernel.forward(queries, *start, across))
        return out.flatten(1)


def _row_by_row(text: torch.Tensor, drawn: torch.Tensor, num_text: Sequence[int]) -> torch.Tensor:
    """Per row: its part of `text` [T, H, E], then its N tokens of `drawn` [R * N, H, E]."""
    rows = zip(text.split(list(num_text)), drawn.chunk(len(num_text)), strict=True)
    return torch.cat([part for row in rows for part in row])


def _attend_in_order(
    pieces: Sequence[Piece], queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """[T, D] of one start: text attends causally, a picture to all before it and all of itself."""
    outputs, start = [], 0
    for piece in pieces:
        end = start + num_tokens(piece)
        mask = None
        if isinstance(piece, int):
            mask = torch.ones(piece, end, dtype=torch.bool, device=keys.device).tril(start)
        if end > start:
            heads = (queries[start:end], keys[:end], values[:end])
            q, k, v = (part.transpose(0, 1)[None] for part in heads)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            outputs.append(out[0].transpose(0, 1).flatten(1))
        start = end
    return torch.cat(outputs)


def before_attention(
    block: Any, tokens: torch.Tensor, modulation: Modulation, rotary: torch.Tensor, num_queries: int
) -> Heads:
    """Queries of the first `num_queries` tokens [T, D], keys and values of all."""
    attn = block.attn
    normed = _norm(tokens, modulation.attention_scale, block.img_norm1.eps)
    layers = (attn.to_q, attn.to_k, attn.to_v)
    return heads_of(normed, num_queries, layers, (attn.norm_q, attn.norm_k), rotary)


def after_attention(
    block: Any, tokens: torch.Tensor, modulation: Modulation, attention_out: torch.Tensor
) -> torch.Tensor:
    """[T, D] plus the projected `attention_out`, then plus the MLP's output."""
    tokens = torch.addcmul(tokens, modulation.attention_gate, block.attn.to_out[0](attention_out))
    normed = _norm(tokens, modulation.mlp_scale, block.img_norm2.eps)
    tokens = torch.addcmul(tokens, modulation.mlp_gate, block.img_mlp(normed))
    # As stock: a float16 overflow would spread as infinity.
    return tokens.clip(-65504, 65504) if tokens.dtype == torch.float16 else tokens


def _norm(tokens: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return F.layer_norm(tokens, scale.shape, scale, None, eps)
