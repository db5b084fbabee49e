"""Computes cosines between prompts and pictures with transformers' CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from PIL import Image
from torch.nn.functional import normalize
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

from rl.api.plugin import FrozenModelConfig
from rl.files import over_white
from rl.model_files import align_weights
from rl.progress import weights_counted

REMEMBERED_PROMPTS = 4096

Pair = tuple[str, Image.Image]


class ClipModel:
    """A frozen CLIP on one device, for calls from one thread.

    A cosine depends only on its pair, so that a resumed run gets the same bits, although timing
    decides which pictures share a batch. Kernels of different batch sizes differ in the last bits,
    so every batch is padded to the same number of rows by repeating a picture. On a CPU also the
    index of a row matters (MKL sums the last rows of a product in another order than the first), so
    there each picture is forwarded alone.
    """

    def __init__(self, config: FrozenModelConfig, device: str) -> None:
        """Raises OSError when the files cannot be read."""
        path, revision = config.model_path, config.revision
        dtype = getattr(torch, config.dtype)
        with weights_counted():
            model = CLIPModel.from_pretrained(path, revision=revision, dtype=dtype)
        self._model = model.to(device).eval().requires_grad_(False)
        align_weights(self._model, device)
        self._tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        self._processor = CLIPImageProcessorPil.from_pretrained(path, revision=revision)
        self._num_rows = config.batch_size
        self._one_by_one = device == "cpu"
        self._max_tokens = model.config.text_config.max_position_embeddings
        self._embed_prompt = lru_cache(REMEMBERED_PROMPTS)(self._embed_new_prompt)
        self._on_device: AbstractContextManager[object] = nullcontext()
        self._on_stream: AbstractContextManager[object] = nullcontext()
        if device.startswith("cuda"):
            # A thread starts on cuda:0, and leaving the stream would create a context (0.5 GB) on
            # the thread's device: every rank's on the first GPU.
            self._on_device = torch.cuda.device(device)
            # On its own stream, CLIP runs concurrently with the renderer's kernels.
            torch.cuda.synchronize(device)
            self._on_stream = torch.cuda.stream(torch.cuda.Stream(device))

    def compare(self, pairs: Sequence[Pair]) -> list[tuple[float, bool] | None]:
        """(cosine in -1..1, whether the prompt was cut) of each (prompt, picture).

        If a batch does not fit in memory, this and all later batches are halved. None: not even one
        picture fits.
        """
        try:
            cosines: list[tuple[float, bool] | None] = []
            with torch.inference_mode(), self._on_device, self._on_stream:
                for start in range(0, len(pairs), self._num_rows):
                    cosines += self._compare(pairs[start : start + self._num_rows])
            return cosines
        except torch.OutOfMemoryError:
            if self._num_rows == 1:
                return [None] * len(pairs)
        self._num_rows //= 2
        return self.compare(pairs)

    def _compare(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        prompts = [self._embed_prompt(prompt) for prompt, _ in pairs]
        text_BD = torch.stack([embedding for embedding, _ in prompts])
        image_BD = self._embed_pictures([image for _, image in pairs])
        cosines = (text_BD * image_BD).sum(-1).clamp(-1, 1).tolist()
        cuts = [was_cut for _, was_cut in prompts]
        return list(zip(cosines, cuts, strict=True))

    def _embed_pictures(self, images: Sequence[Image.Image]) -> torch.Tensor:
        """[B, D] float32 unit vectors."""
        rgb = [over_white(image) for image in images]
        pixels = self._processor(images=rgb, return_tensors="pt")["pixel_values"]
        if self._one_by_one:
            batches = torch.arange(len(images)).split(1)
        else:
            batches = (torch.arange(self._num_rows).clamp(max=len(images) - 1),)
        model = self._model
        features = [
            model.get_image_features(pixels[rows].to(model.device, model.dtype)).pooler_output
            for rows in batches
        ]
        return normalize(torch.cat(features)[: len(images)].float(), dim=-1)

    def _embed_new_prompt(self, prompt: str) -> tuple[torch.Tensor, bool]:
        """([D] float32 unit vector, whether the prompt was cut). Encoded alone, so that the vector
        does not depend on other prompts."""
        num_tokens = len(self._tokenizer(prompt, verbose=False)["input_ids"])
        tokens = self._tokenizer(
            prompt, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._model.device)
        features = self._model.get_text_features(**tokens).pooler_output
        return normalize(features.float(), dim=-1)[0], num_tokens > self._max_tokens
