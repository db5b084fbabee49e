"""One denoising step: our forward over the weights of a QwenImageTransformer2DModel.

Legend: R rows of a forward (one per picture, two with guidance); N tokens of the picture, M of its
sources, S = N + M; L text tokens of all rows together; H heads of E values; D = H E the
transformer's width; P parts of the image tokens with separate modulation, 1 or 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rl.renderers.qwen_image.modulation import StepModulation

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values [..., H, E] of one stream."""

EPSILON = 1e-6
"""Epsilon of every norm in the transformer."""


def attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Unmasked attention of queries [B, S, H, E] to keys and values [B, S', H, E]. PyTorch chooses
    the kernel: cuDNN's on Hopper, else flash attention."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Inputs that are the same in all steps of a batch."""

    text: torch.Tensor
    """[L, D], projected."""
    text_lens: tuple[int, ...]
    """Text tokens of each row; they add up to L."""
    sources: torch.Tensor
    """[R, M, D], projected."""
    text_rotary: torch.Tensor
    """[L, 1, E / 2, 2] float32, cosine and sine; the text of every row has the same positions."""
    image_rotary: torch.Tensor
    """[S, 1, E / 2, 2] float32."""


class Stream(NamedTuple):
    """The layers of one block that process one kind of token: image or text."""

    projections: tuple[Any, Any, Any]
    """Linear layers to queries, keys and values."""
    norms: tuple[Any, Any]
    """RMS norms of queries and keys."""
    out: Any
    mlp: Any


def streams_of(block: Any) -> tuple[Stream, Stream]:
    """The block's stream for image tokens, and its stream for text tokens."""
    attn = block.attn
    image_layers = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k), attn.to_out[0]
    text_layers = (
        (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj),
        (attn.norm_added_q, attn.norm_added_k),
        attn.to_add_out,
    )
    return Stream(*image_layers, block.img_mlp), Stream(*text_layers, block.txt_mlp)


class Denoiser:
    """Computes the stock forward, but skips results that are never used.

    The text tokens of all rows are concatenated without padding, so attention needs no mask. Text
    and source projections and rotary tables are computed once per batch, not in each step. The
    modulation's scale and shift are passed as weight and bias of the layer norms. In the last block
    only the tokens of the drawn picture have queries.
    """

    def __init__(self, transformer: Any) -> None:
        self._model = transformer
        self._streams = [streams_of(block) for block in transformer.transformer_blocks]

    def prepare(
        self,
        states_R: Sequence[torch.Tensor],
        sources: torch.Tensor,
        shapes: Sequence[tuple[int, int, int]],
    ) -> Conditioning:
        """Compute the inputs that are the same in all steps of a batch.

        Args:
            states_R: [text tokens, joint_attention_dim] of each row.
            sources: [R, M, in_channels] packed latents of the sources, concatenated.
            shapes: (1, height, width) of the picture and of each source, in 16 px patches.
        """
        model = self._model
        lengths = tuple(len(states) for states in states_R)
        device, dtype = model.device, model.dtype  # diffusers walks all parameters at each access
        states = torch.cat([states.to(device, dtype) for states in states_R])
        image_rotary, text_rotary = (
            torch.view_as_real(positions).unsqueeze(1)
            for positions in model.pos_embed(
                [list(shapes)], max_txt_seq_len=max(lengths), device=device
            )
        )
        return Conditioning(
            text=model.txt_in(model.txt_norm(states)),
            text_lens=lengths,
            sources=model.img_in(sources),
            text_rotary=torch.cat([text_rotary[:length] for length in lengths]),
            image_rotary=image_rotary,
        )

    def velocity(
        self, latents: torch.Tensor, cond: Conditioning, modulation: StepModulation
    ) -> torch.Tensor:
        """[R, N, in_channels] noisy latents -> [R, N, in_channels]."""
        num_targets = latents.shape[1]
        image = torch.cat([self._model.img_in(latents), cond.sources], dim=1)
        text = cond.text
        last = len(self._streams) - 1
        for index, (image_stream, text_stream) in enumerate(self._streams):
            image_mod, text_mod = modulation.image[index], modulation.text[index]
            num_queries = (num_targets, 0) if index == last else (image.shape[1], len(text))
            image_heads = before_attention(
                image_stream, image, image_mod, cond.image_rotary, num_targets, num_queries[0]
            )
            text_heads = before_attention(
                text_stream, text, text_mod, cond.text_rotary, len(text), num_queries[1]
            )
            text_out, image_out = self._attend(text_heads, image_heads, cond.text_lens)
            if index == last:
                image, image_mod = image[:, :num_targets], image_mod[:1]
            else:
                text = after_attention(text_stream, text, text_mod, text_out, len(text))
            image = after_attention(image_stream, image, image_mod, image_out, num_targets)
        shift, scale = modulation.out.unsqueeze(1)
        velocity: torch.Tensor = self._model.proj_out(_norm(image, shift, scale, num_targets))
        return velocity

    def _attend(
        self, text: Heads, image: Heads, text_lens: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention within each row over its text and image tokens, in this order.

        Returns the outputs for text [.., D] and image [R, .., D], only of tokens with queries.
        """
        # Neighbouring rows with equally many text tokens share one attention call.
        runs = [(len(list(run)), length) for length, run in itertools.groupby(text_lens)]
        joint = (_by_run(*streams, runs) for streams in zip(text, image, strict=True))
        num_image_queries = image[0].shape[1]
        text_out, image_out = [], []
        for queries, keys, values in zip(*joint, strict=True):
            out = attention(queries, keys, values).flatten(2)
            text_out.append(out[:, :-num_image_queries].flatten(0, 1))
            image_out.append(out[:, -num_image_queries:])
        return torch.cat(text_out), torch.cat(image_out)


def _by_run(
    text: torch.Tensor, image: torch.Tensor, runs: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Joins `text` [L or 0, H, E] and `image` [R, .., H, E] to [rows, text tokens + .., H, E] for
    each of `runs`, which are (rows, text tokens per row)."""
    sizes = [rows * length if len(text) else 0 for rows, length in runs]
    pairs = zip(text.split(sizes), image.split([rows for rows, _ in runs]), strict=True)
    return [torch.cat([w.unflatten(0, (len(i), -1)), i], dim=1) for w, i in pairs]


def before_attention(
    stream: Stream,
    tokens: torch.Tensor,
    modulation: torch.Tensor,
    rotary: torch.Tensor,
    num_first: int,
    num_queries: int,
) -> Heads:
    """Queries, keys and values of tokens [.., tokens, D] that are modulated first.

    `modulation`: [P, 6, D] as in `StepModulation`; P = 2: `num_first` tokens have the first part.
    """
    normed = _norm(tokens, modulation[:, 0], modulation[:, 1], num_first)
    return heads_of(normed, num_queries, stream.projections, stream.norms, rotary)


def heads_of(
    normed: torch.Tensor,
    num_queries: int,
    projections: tuple[Any, Any, Any],
    norms: tuple[Any, Any],
    rotary: torch.Tensor,
) -> Heads:
    """Queries of the first `num_queries` tokens [.., tokens, D], keys and values of all.

    Args:
        projections: Linear layers to queries, keys and values.
        norms: RMS norms of queries and keys.
        rotary: [tokens, 1, E / 2, 2] float32.
    """
    (query, key, value), (query_norm, key_norm) = projections, norms
    size = query_norm.weight.shape
    queries, keys, values = (
        heads.unflatten(-1, (-1, *size))
        for heads in (query(normed.narrow(-2, 0, num_queries)), key(normed), value(normed))
    )
    queries = F.rms_norm(queries, size, query_norm.weight, query_norm.eps)
    keys = F.rms_norm(keys, size, key_norm.weight, key_norm.eps)
    return rotate(queries, rotary[:num_queries]), rotate(keys, rotary), values


def after_attention(
    stream: Stream,
    tokens: torch.Tensor,
    modulation: torch.Tensor,
    attention_out: torch.Tensor,
    num_first: int,
) -> torch.Tensor:
    """[.., tokens, D] plus the projected `attention_out`, then plus the MLP's output."""
    tokens = _add(tokens, stream.out(attention_out), modulation[:, 2], num_first)
    normed = _norm(tokens, modulation[:, 3], modulation[:, 4], num_first)
    tokens = _add(tokens, stream.mlp(normed), modulation[:, 5], num_first)
    # As stock: a float16 overflow would spread as infinity.
    return tokens.clip(-65504, 65504) if tokens.dtype == torch.float16 else tokens


def _norm(
    tokens: torch.Tensor, shift_PD: torch.Tensor, scale_PD: torch.Tensor, num_first: int
) -> torch.Tensor:
    parts = zip(_parts(tokens, shift_PD, num_first), scale_PD, shift_PD, strict=True)
    return _join([F.layer_norm(part, w.shape, w, b, EPSILON) for part, w, b in parts])


def _add(
    tokens: torch.Tensor, branch: torch.Tensor, gate_PD: torch.Tensor, num_first: int
) -> torch.Tensor:
    tokens_P, branches_P = (_parts(side, gate_PD, num_first) for side in (tokens, branch))
    return _join([torch.addcmul(*part) for part in zip(tokens_P, gate_PD, branches_P, strict=True)])


def _parts(tokens: torch.Tensor, like_PD: torch.Tensor, num_first: int) -> Sequence[torch.Tensor]:
    return [tokens] if len(like_PD) == 1 else tokens.tensor_split([num_first], dim=-2)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=-2)


def rotate(heads: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (Su et al. 2021): neighbouring values of a head form one complex number."""
    pairs = heads.float().unflatten(-1, (-1, 2))
    product = torch.view_as_complex(pairs) * torch.view_as_complex(rotary)
    return torch.view_as_real(product).flatten(-2).type_as(heads)
