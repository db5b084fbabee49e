"""Computes cosines between prompts and pictures with transformers' CLIP."""

from __future__ import annotations

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


class ClipModel:
    """A frozen CLIP on one device, for calls from one thread.

    A cosine depends only on its pair, so that a resumed run gets the same bits: each picture is
    forwarded alone, because kernels of different batch sizes differ in the last bits, and on a CPU
    the rows of one batch, too. A ViT-B takes milliseconds, while the renderer draws.
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

    def compare(self, prompt: str, picture: Image.Image) -> tuple[float, bool]:
        """(cosine in -1..1, whether the prompt was cut)."""
        model = self._model
        with torch.inference_mode(), self._on_device, self._on_stream:
            text_D, was_cut = self._embed_prompt(prompt)
            inputs = self._processor(images=over_white(picture), return_tensors="pt")
            pixels = inputs["pixel_values"].to(model.device, model.dtype)
            features = model.get_image_features(pixels).pooler_output
            image_D = normalize(features.float(), dim=-1)[0]
            return (text_D * image_D).sum().clamp(-1, 1).item(), was_cut

    def _embed_new_prompt(self, prompt: str) -> tuple[torch.Tensor, bool]:
        """([D] float32 unit vector, whether the prompt was cut). Encoded alone, so that the vector
        does not depend on other prompts."""
        num_tokens = len(self._tokenizer(prompt, verbose=False)["input_ids"])
        tokens = self._tokenizer(
            prompt, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._model.device)
        features = self._model.get_text_features(**tokens).pooler_output
        return normalize(features.float(), dim=-1)[0], num_tokens > self._max_tokens
