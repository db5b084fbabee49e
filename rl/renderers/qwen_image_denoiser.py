"""The forward of the Qwen-Image editors' transformer, over diffusers' weights."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cachetools import LRUCache, cachedmethod
from torch import nn

from rl.renderers.qwen_image_config import MODULATIONS

# ---- modulation ----------------------------------------------------------------------------------
# Computes the transformer's modulation once per schedule; its weights stay in host memory.
#
# Legend: T steps of a schedule; P parts of the image tokens with their own modulation: 1, or 2
# with `zero_cond_t` (Edit-2511), where the source's tokens are modulated as at timestep 0; D the
# transformer's width.

NUM_KEPT_SCHEDULES = 32
"""Tables cached in host memory, one per picture size: 4.4 MB per step in bfloat16."""


@dataclass(frozen=True, eq=False)
class StepModulation:
    """The modulation of one step: shift, scale and gate of attention, then those of the MLP. Scales
    include the added 1, so that scales and shifts are the weights and biases of a layer norm."""

    image: torch.Tensor
    """[blocks, P, 6, D], for image tokens."""
    text: torch.Tensor
    """[blocks, 1, 6, D], for text tokens."""
    out: torch.Tensor
    """[2, D]: shift and scale before the last projection."""

    def to(self, device: Any) -> StepModulation:
        """Without a wait for the GPU's earlier work."""
        parts = (self.image, self.text, self.out)
        return StepModulation(*(part.to(device, non_blocking=True) for part in parts))


class ModulationTables:
    """The tables of one transformer, each computed when its schedule is first used.

    A third of the parameters (6.8 of 20.4 B, `img_mod` and `txt_mod` of every block) depend only
    on the timestep: they run once per schedule, which saves 13.6 GB on the device in bfloat16.
    """

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._tables: LRUCache[Hashable, list[StepModulation]] = LRUCache(NUM_KEPT_SCHEDULES)

    @cachedmethod(lambda self: self._tables, lambda self, timesteps_T: tuple(timesteps_T.tolist()))
    def of_schedule(self, timesteps_T: torch.Tensor) -> list[StepModulation]:
        return build_table(self._transformer, timesteps_T)


@torch.no_grad()
def build_table(transformer: Any, timesteps_T: torch.Tensor) -> list[StepModulation]:
    """The modulation of all blocks at every step of a schedule, in host memory; `timesteps_T`:
    the scheduler's, 1000 down to 0.

    Computes on the device, as the stock forward does, so that the results are equal. The weights,
    13.6 GB, go there one after the other.
    """
    device, dtype, num_steps = transformer.device, transformer.dtype, len(timesteps_T)
    # The stock pipeline rounds the timestep to the latents' dtype before dividing.
    fractions = timesteps_T.to(device, dtype) / 1000
    if transformer.config.zero_cond_t:
        fractions = torch.cat([fractions, fractions.new_zeros(1)])
    embedding = transformer.time_text_embed(fractions, torch.empty(0, dtype=dtype, device=device))
    activated = F.silu(embedding)

    def run(layer: nn.Linear) -> torch.Tensor:
        """Apply a block's linear layer: [T, 6, D], with `zero_cond_t` one row more; scales + 1."""
        weight, bias = (x.to(device, non_blocking=True) for x in (layer.weight, layer.bias))
        rows = F.linear(activated, weight, bias).unflatten(-1, (6, -1))
        rows[:, 1] += 1  # the scales; indexing by a list would make the host wait
        rows[:, 4] += 1
        return rows

    def by_part(rows: torch.Tensor) -> torch.Tensor:
        """[T, P, 6, D]"""
        parts = [rows[:num_steps]]
        if transformer.config.zero_cond_t:
            parts.append(rows[num_steps:].expand_as(parts[0]))
        return torch.stack(parts, dim=1)

    blocks = transformer.transformer_blocks
    image = torch.stack([by_part(run(block.img_mod[1])) for block in blocks], dim=1)
    text = torch.stack([run(block.txt_mod[1])[:num_steps, None] for block in blocks], dim=1)
    scale, shift = transformer.norm_out.linear(activated[:num_steps]).chunk(2, dim=-1)
    out = torch.stack([shift, 1 + scale], dim=1)
    return [StepModulation(*step) for step in zip(image.cpu(), text.cpu(), out.cpu(), strict=True)]


# ---- qwen image denoiser -------------------------------------------------------------------------
# One denoising step: our forward over the weights of a QwenImageTransformer2DModel.
#
# Legend: R rows of a forward (one per picture, two with guidance); N tokens of the picture, M of
# its sources, S = N + M; L text tokens of all rows together; H heads of E values; D = H E the
# transformer's width; P parts of the image tokens with separate modulation, 1 or 2.

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
        num_image_queries = image[0].shape[1]
        lens = [text_lens if len(part) else (0,) * len(text_lens) for part in text]
        words = [part.split(list(each)) for part, each in zip(text, lens, strict=True)]
        text_out, image_out = [], []
        for row in range(len(text_lens)):
            pairs = zip(words, image, strict=True)
            joint = (torch.cat([of_text[row], of_image[row]])[None] for of_text, of_image in pairs)
            out = attention(*joint)[0].flatten(1)
            text_out.append(out[:-num_image_queries])
            image_out.append(out[-num_image_queries:])
        return torch.cat(text_out), torch.stack(image_out)


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


# ---- fp8 -----------------------------------------------------------------------------------------
# Moves the transformer; stores the linear layers of its blocks in 8 bits, to save memory.

EIGHT_BITS = torch.float8_e4m3fn


class Fp8Linear(nn.Module):
    """A linear layer with float8_e4m3 weights and one scale per output channel, so that each row's
    largest weight becomes 448, the format's maximum. It multiplies in the activations' dtype."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        largest = linear.weight.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12)
        scale = largest / torch.finfo(EIGHT_BITS).max
        self.register_buffer("weight", (linear.weight / scale).to(EIGHT_BITS))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[.., in] -> [.., out], in the dtype of `tokens`."""
        weight = self.weight.to(tokens.dtype) * self.scale.to(tokens.dtype)
        return F.linear(tokens, weight, self.bias)


def move(transformer: Any, device: str, rounded: bool = False) -> None:
    """Move everything but the modulation, which stays in host memory. Where it is unchanged from
    the checkpoint, it stays memory-mapped from the file, shared by all ranks of a machine.

    `rounded`: replace the blocks' linear layers by `Fp8Linear`, part by part: the device holds the
    original weights of one part at a time.
    """
    for name, child in transformer.named_children():
        if name != "transformer_blocks":
            child.to(device)
    for block in transformer.transformer_blocks:
        for name, part in block.named_children():
            if name in MODULATIONS:
                continue
            for path, layer in list(part.to(device).named_modules()):
                if rounded and isinstance(layer, nn.Linear):
                    part.set_submodule(path, Fp8Linear(layer))
