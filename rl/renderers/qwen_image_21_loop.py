"""The render loop of Qwen-Image-2.1, and its transformer's forward over diffusers' weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from PIL.Image import Image

from rl.algorithm.attention_kernels import Kernel, Runs, choose_kernel, join
from rl.api.types import HiddenStates, RenderJob
from rl.config.loading import is_folder
from rl.files import digest
from rl.renderers.diffusion_loop import in_slices, seeded_noise
from rl.renderers.diffusion_renderer import INDEX, denoise, file_of
from rl.renderers.qwen_image_21_config import (
    NUM_POSITIONS,
    TOKENS_PER_SLOT,
    Config,
    sigmas_of_index,
    wrong_steps,
)
from rl.renderers.qwen_image_config import PATCH_PX, Size, condition_sizes, output_size
from rl.renderers.qwen_image_denoiser import Heads, heads_of
from rl.renderers.qwen_image_loop import (
    EditorParts,
    PictureVae,
    QwenImageBaseLoop,
    load_modules,
    origin_of,
)

# ---- qwen image 21 denoiser ----------------------------------------------------------------------
# Our forward over QwenImage21Transformer2DModel's weights.
#
# Legend: R rows; N tokens of a picture that is drawn; T tokens of the rows in a tensor,
# concatenated row by row; H heads of E values; D = H E the transformer's width; C the states'
# width.

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
    before it. All tokens of a picture have one position on axis 0; axes 1 and 2 are row and column
    minus half the side, rounded up (-2, -1, 0 for 3).
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

    @cached_property
    def pieces(self) -> list[Piece]:
        """The start in order: per picture, the text before it (may be empty) and the picture."""
        pieces: list[Piece] = []
        end = 0
        for picture in self.sources:
            pieces += [picture.indices.start - end, picture.shape]
            end = picture.indices.stop
        return pieces

    def starts_like(self, other: Row) -> bool:
        """Whether both starts have equal pictures at equal indices and bitwise equal states."""
        pictures, others = ([(p.indices, p.digest) for p in row.sources] for row in (self, other))
        return pictures == others and torch.equal(
            self.states[: self.start_len], other.states[: other.start_len]
        )


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Inputs that are the same in all steps, of rows with equal starts."""

    shared: list[KeysValues]
    """Per layer, keys and values of the start, which all rows share; [] without pictures."""
    rest: list[KeysValues]
    """Per layer, keys and values of the tokens after the start, row by row."""
    text_lens: tuple[int, ...]
    """Number of these tokens of each row; they add up to T."""
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
    """Computes keys and values of text and sources once per group, and velocities from latents.

    Text and sources are modulated as at timestep 0 and attend to no later token, so their keys and
    values are the same in all steps. The start, equal in all rows of a forward, is computed once.
    Attention to the start and attention to the row's other tokens are computed separately and
    joined by their log-sum-exps, so that keys are not copied for each row. All tokens are
    concatenated without padding, each row with its own positions.
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

    def prepare(self, rows: Sequence[Row], shape: tuple[int, int]) -> Conditioning:
        """Compute the inputs that are the same in all steps, of rows with equal starts whose drawn
        pictures have `shape` (rows, columns) in latents."""
        pieces, start_len = rows[0].pieces, rows[0].start_len
        rest_R = [row.states[start_len:] for row in rows]
        text_lens = tuple(map(len, rest_R))
        shared: list[KeysValues] = []
        if start_len:
            shared = self._keys_and_values(
                self._embed(rows[0]),
                self._rotary(positions(pieces)),
                lambda _, heads: _attend_in_order(pieces, *heads),
            )
        first = end_of(pieces)
        runs = Runs(text_lens, text_lens, causal=True)
        rest = self._keys_and_values(
            self._model.txt_in(torch.cat(rest_R)),
            self._rotary(torch.cat([positions([length], first) for length in text_lens])),
            lambda layer, heads: self._attend(
                heads[0], heads[1:], runs, shared[layer] if shared else None
            ),
        )
        drawn_R = [positions([shape], first + length) for length in text_lens]
        return Conditioning(shared, rest, text_lens, self._rotary(torch.cat(drawn_R)))

    def velocity(
        self, latents: torch.Tensor, cond: Conditioning, timestep: torch.Tensor
    ) -> torch.Tensor:
        """[R, N, channels] noisy latents -> [R, N, channels]; `timestep` [] float: the
        scheduler's, 1000 down to 0."""
        num_rows, num_each = latents.shape[:2]
        # Stock rounds the timestep to the latents' dtype before dividing.
        modulation = self._modulation(timestep.to(latents.dtype) / 1000)
        runs = Runs(
            (num_each,) * num_rows, tuple(n + num_each for n in cond.text_lens), causal=False
        )
        tokens = self._model.img_in(latents).flatten(0, 1)
        for layer, block in enumerate(self._model.transformer_blocks):
            queries, own_keys, own_values = before_attention(
                block, tokens, modulation, cond.rotary, num_queries=len(tokens)
            )
            keys = _row_by_row(cond.rest[layer][0], own_keys, cond.text_lens)
            values = _row_by_row(cond.rest[layer][1], own_values, cond.text_lens)
            shared = cond.shared[layer] if cond.shared else None
            attention_out = self._attend(queries, (keys, values), runs, shared)
            tokens = after_attention(block, tokens, modulation, attention_out)
        normed = _norm(tokens, modulation.out_scale, self._model.config.eps)
        velocity: torch.Tensor = self._model.proj_out(normed)
        return velocity.unflatten(0, (num_rows, num_each))

    def _rotary(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Positions [T, 3] -> [T, 1, E / 2, 2] float32, cosine and sine."""
        # Negative positions index from the table's end, where stock keeps them.
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
        self, queries: torch.Tensor, own: KeysValues, runs: Runs, shared: KeysValues | None
    ) -> torch.Tensor:
        """[T, D]: attention of each row's queries to its own keys and to the start."""
        out, lse = self._kernel.forward(queries, *own, runs)
        if shared is not None:
            across = Runs((len(queries),), (len(shared[0]),), causal=False)
            out, _ = join(out, lse, *self._kernel.forward(queries, *shared, across))
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


# ---- qwen image 21 loop --------------------------------------------------------------------------
# The Qwen-Image-2.1 render loop: hidden states and source pictures in, pictures out.


def load_parts(config: Config, device: str) -> EditorParts:
    """Load from a hub id or folder. Raises ValueError if the checkpoint's number of sigmas differs
    from the config's number of steps."""
    from diffusers import AutoencoderKLQwenImage21, DiffusionPipeline, QwenImage21Transformer2DModel

    is_here = is_folder(config.model_path)
    index = (
        file_of(config, INDEX) if is_here else DiffusionPipeline.load_config(**origin_of(config))
    )
    sigmas = sigmas_of_index(index)
    if problem := wrong_steps(config, sigmas):
        raise ValueError(f"renderer.{problem}")
    classes = QwenImage21Transformer2DModel, AutoencoderKLQwenImage21, PictureVae
    return load_modules(config, device, *classes, sigmas)


class QwenImage21Loop(QwenImageBaseLoop[Config, Size]):
    """Equals `QwenImage21Pipeline`, called with one prompt at a time, up to float rounding.

    The other jobs of a batch change a picture (range 0..1), in float32, by about 5e-6, at most 8e-5
    (4e-4 with guidance 3). In half precision only the same batch reproduces a picture exactly.
    """

    bucket_of = staticmethod(output_size)

    def __init__(self, config: Config, parts: EditorParts) -> None:
        super().__init__(config, parts)
        transformer = parts.transformer
        self.state_dim = transformer.config.context_in_dim
        kernel = choose_kernel("auto", str(transformer.device), transformer.dtype)
        self._denoiser = Denoiser(transformer, kernel)

    def _positions(self, job: RenderJob, bucket: Size) -> tuple[int, int]:
        """As in the base class. Raises ValueError if policy and VAE see a source at other sizes."""
        payload: HiddenStates = job.payload
        sizes = condition_sizes(self.config, job)
        _check_picture_lengths(payload, sizes)
        negative_len = 0 if payload.negative_embeds is None else len(payload.negative_embeds)
        num_text = max(len(payload.embeds), negative_len) - sum(map(len, payload.pictures))
        pictures = [*map(latent_shape, sizes), latent_shape(bucket)]
        return end_of([num_text, *pictures]), NUM_POSITIONS

    @torch.no_grad()
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: Size) -> torch.Tensor:
        """Render jobs of one bucket: [B, 4, H, W], the renderer's dtype, -1..1. Adjacent jobs with
        equal starts (see `Row`), such as those of a group, are drawn together."""
        rows_B = [self._rows(job) for job in jobs]
        drawn = [self._draw(part, rows, bucket) for part, rows in in_groups(jobs, rows_B)]
        width, height = bucket
        return in_slices(torch.cat(drawn), self.parts.vae.decode, width * height)

    def _draw(
        self, jobs: Sequence[RenderJob], rows_B: Sequence[Sequence[Row]], size: Size
    ) -> torch.Tensor:
        """Denoised latents [B, channels, h, w] of the jobs' pictures; `rows_B`: of each job, as
        `_rows` gives them."""
        transformer, shape = self.parts.transformer, latent_shape(size)
        channels, scale = transformer.config.in_channels, self.config.true_cfg_scale
        noise = seeded_noise((job.noise_seed for job in jobs), (channels, *shape))
        latents = noise.flatten(2).transpose(1, 2).to(transformer.device, transformer.dtype)
        # One Conditioning for the prompts and, with guidance, one for the negative prompts.
        given = [self._denoiser.prepare(rows, shape) for rows in zip(*rows_B, strict=True)]
        scheduler = self._prepared_scheduler(latents.shape[1])

        def velocity(step: int, x: torch.Tensor) -> torch.Tensor:
            """Guided as in Ho & Salimans 2022, eq. 6, with scale = 1 + w."""
            timestep = scheduler.timesteps[step]
            positive, *negatives = (self._denoiser.velocity(x, part, timestep) for part in given)
            if not negatives:
                return positive
            return negatives[0] + scale * (positive - negatives[0])

        return denoise(latents, scheduler, velocity).transpose(1, 2).unflatten(2, shape)

    def _rows(self, job: RenderJob) -> list[Row]:
        """The job's row and, with guidance, that of its negative prompt."""
        device, dtype = self.parts.transformer.device, self.parts.transformer.dtype
        sources, sizes = job.sample.sources, condition_sizes(self.config, job)
        pictures = tuple(
            PromptImage(indices, self._latents_of(p, size)[0], latent_shape(size), digest(p))
            for indices, p, size in zip(job.payload.pictures, sources, sizes, strict=True)
        )
        states = [job.payload.embeds]
        if self.config.true_cfg_scale > 1:
            states.append(job.payload.negative_embeds)
        return [Row(each.to(device, dtype), pictures) for each in states]

    def _encode(self, picture: Image, size: Size) -> torch.Tensor:
        """VAE latents [1, tokens, channels], alpha channel included."""
        width, height = size
        pixels = self._pixels.preprocess(picture.convert("RGBA"), height, width)
        latents: torch.Tensor = self.parts.vae.encode(pixels)
        return latents.flatten(2).transpose(1, 2)


def _check_picture_lengths(payload: HiddenStates, sizes: Sequence[Size]) -> None:
    slots = [width * height // PATCH_PX**2 // TOKENS_PER_SLOT for width, height in sizes]
    if list(map(len, payload.pictures)) == slots:
        return
    lengths = ", ".join(str(len(indices)) for indices in payload.pictures) or "no"
    needed = ", ".join(map(str, slots)) or "no"
    raise ValueError(
        f"the policy has {lengths} tokens for the pictures, the renderer needs {needed} (32x32 px "
        "each): set renderer.policy_image_area_px to renderer.condition_area_px, and "
        "policy.image_min_pixels and image_max_pixels so that the policy resizes no picture"
    )


def in_groups(
    jobs: Sequence[RenderJob], rows_B: Sequence[Sequence[Row]]
) -> list[tuple[list[RenderJob], list[Sequence[Row]]]]:
    """The jobs and their rows, in groups of adjacent jobs whose rows have equal starts; all rows
    without pictures have equal starts."""
    groups: list[tuple[list[RenderJob], list[Sequence[Row]]]] = []
    first_rows: Sequence[Row] = ()
    for job, rows in zip(jobs, rows_B, strict=True):
        if not groups or not all(map(Row.starts_like, first_rows, rows)):
            groups.append(([], []))
            first_rows = rows
        groups[-1][0].append(job)
        groups[-1][1].append(rows)
    return groups


def latent_shape(size: Size) -> tuple[int, int]:
    """(width, height) in px -> (rows, columns) of latents."""
    width, height = size
    return height // PATCH_PX, width // PATCH_PX
