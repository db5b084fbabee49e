"""Qwen2.5-VL as a policy: reads a picture and an instruction, writes words.

What: prompts under the renderer's own template, log-probs and conditioning states from one forward,
what a completion means, and what leaves for the sampler and for disk. What not: sampling (engines),
the update (learner), rendering. Built by `build.py`.

Axes: `_G` completions in a group, `_B` rows of a micro-batch, `_T` tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rl.config import Section
from rl.policies import _prompting
from rl.policies._lora import LoraSection
from rl.policies._policy import TrainedPolicy
from rl.policies._qwen_loading import validate as validate
from rl.policies._qwen_prompts import QwenPrompts
from rl.types import (
    Action,
    ActionKind,
    Completion,
    HiddenStates,
    Prompt,
    PromptTemplate,
    Sample,
)

if TYPE_CHECKING:
    import torch

    from rl.policies._qwen_module import QwenModule

EMITS: frozenset[ActionKind] = frozenset({"hidden_states", "text"})
"""Description states for a diffusion transformer, or the words themselves."""
NEEDS: frozenset[str] = frozenset()
"""Of a sample; a picture only where the renderer's template shows one."""

NEGATIVES_KEPT = 64
"""Negative embeddings are cached for this many pictures (about 11 MB each at full size)."""


class Config(Section):
    """The policy section."""

    type: str
    """'qwen2_5_vl'."""
    model_path: str
    """Folder or hub id: tokenizer, image processor and (usually) weights."""
    revision: str | None = None
    """Hub revision of model_path; null = newest."""
    init_text_encoder_from: str = ""
    """Folder or hub id of an editor whose own text encoder gives the weights; '' = model_path's."""
    text_encoder_subfolder: str = "text_encoder"
    """Where in that editor the text encoder lies."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the weights in memory; log-probs are float32 always."""
    device: str = "auto"
    """'auto' = this rank's device; else 'cpu', 'cuda:1', ..."""
    max_memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Most GPU memory trainer and sampler may take together, GB (1e9 bytes); null = no limit."""
    lora: LoraSection | None = LoraSection()
    """null = full fine-tuning."""
    adapter_path: str = ""
    """PEFT adapter folder to start from ('' = a fresh one); must fit `lora`."""
    freeze_vision_tower: bool = True
    """False also trains the tower (full) or adapts its equally named layers (LoRA)."""
    system_prompt: str = "You are a helpful assistant."
    """For renderers that bring no template of their own; '' = no system turn."""
    conditioning: Literal["policy", "base"] = "policy"
    """Whose hidden states the renderer gets: the trained weights' (their forward also gives the old
    log-probs) or the untrained base's (the renderer never sees drifted states)."""
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of the trainer's forward."""
    image_min_pixels: Annotated[int, Field(ge=1)] | None = None
    """Smallest picture area the model sees, px; null = the processor's own."""
    image_max_pixels: Annotated[int, Field(ge=28 * 28)] | None = None
    """Largest picture area the model sees, px; null = the processor's own."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 2048
    """Longest prompt, image tokens included; a longer one stops the run, naming its sample."""
    act_batch_size: Annotated[int, Field(ge=1)] = 8
    """Completions per no-gradient conditioning forward."""


def build(
    config: Config,
    template: PromptTemplate | None,
    kind: ActionKind,
    negative_prompt: str | None,
    temperature: float,
    max_completion_tokens: int,
    gradient_checkpointing: bool,
    device: str,
) -> Qwen25VLPolicy:
    """Load the policy.

    Args:
        config: the policy section.
        template: how the renderer asks its text encoder; None = Qwen's chat format.
        kind: what the renderer takes, one of `EMITS`.
        negative_prompt: words of the renderer's unconditional branch; None = it uses none.
        temperature: of the sampler, > 0; the trainer divides its logits by it.
        max_completion_tokens: longest completion, tokens.
        gradient_checkpointing: recompute activations in the backward.
        device: this rank's device.
    """
    if kind not in EMITS:
        raise ValueError(f"policy qwen2_5_vl emits {sorted(EMITS)}, not {kind!r}")
    return Qwen25VLPolicy(
        config,
        template or _prompting.chat_template(config.system_prompt),
        needs_picture=template is not None and "{image}" in template.text,
        kind=kind,
        negative_prompt=negative_prompt,
        temperature=temperature,
        max_completion_tokens=max_completion_tokens,
        gradient_checkpointing=gradient_checkpointing,
        device=device if config.device == "auto" else config.device,
    )


class Qwen25VLPolicy(TrainedPolicy):
    """See `rl.contracts.Policy`."""

    config: Config
    prompts: QwenPrompts
    module: QwenModule

    def __init__(
        self,
        config: Config,
        template: PromptTemplate,
        *,
        needs_picture: bool,
        kind: ActionKind,
        negative_prompt: str | None,
        temperature: float,
        max_completion_tokens: int,
        gradient_checkpointing: bool,
        device: str,
    ) -> None:
        from rl.policies import _qwen_loading as loading
        from rl.policies._qwen_module import QwenModule
        from rl.policies._trained_weights import TrainedWeights

        prompts = QwenPrompts(
            loading.load_tokenizer(config),
            loading.load_image_processor(config),
            template,
            needs_picture,
            config.max_prompt_tokens,
        )
        super().__init__(config, prompts, max_completion_tokens, device)
        self._kind = kind
        self._negative_prompt = negative_prompt
        model = loading.adapt(loading.load_model(config), config)
        model = self._on_device(model, gradient_checkpointing)
        adapted = config.lora is not None
        model_config = (model.get_base_model() if adapted else model).config
        text_config = model_config.text_config
        self.state_dim = text_config.hidden_size
        roles = self.prompts.token_roles(text_config.vocab_size)
        self.stop_token_ids, self.banned_token_ids = roles
        self.module = QwenModule(model, adapted, temperature, self.banned_token_ids)
        self._negatives: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        tied = model_config.tie_word_embeddings
        self._weights = TrainedWeights(
            self.module,
            adapted,
            config.dtype,
            loading.base_path(config),
            load_base=lambda: loading.load_model(config),
            tied_embedding="model.language_model.embed_tokens.weight" if tied else None,
        )
        self.image_vocabulary = None

    # What the sampler needs to know

    @property
    def adapts_vision_tower(self) -> bool:
        """Whether the adapter reaches beyond the language model."""
        return self.config.lora is not None and not self.config.freeze_vision_tower

    @property
    def image_pixel_bounds(self) -> tuple[int, int]:
        """(smallest, largest) area of a prompt's picture, px; a sampler needs no room for more."""
        return self.prompts.picture_bounds

    def sampler_folder(self) -> str:
        """Folder or hub id from which an outside sampler loads these base weights, this tokenizer
        and this image processor; lives as long as the policy."""
        from rl.policies._qwen_loading import sampler_folder

        return sampler_folder(self.config, self._overlay_folder())

    def decoder(self, prompt: Prompt, num_rows: int) -> Any:
        """Token-by-token decoding of one group by the trainer's own module (`Decoder`)."""
        from rl.policies._qwen_module import Decoder

        return Decoder(self.module, self.collate([(prompt, ())]), num_rows)

    # Prompts and completions

    def build_prompt(self, sample: Sample) -> Prompt:
        """`sample` under the renderer's template. Raises ValueError naming the sample when it lacks
        a picture the template shows, or is longer than `max_prompt_tokens`."""
        return self.prompts.prompt(sample, sample.instruction)

    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped; its sampler log-probs are zeros."""
        ids = self.prompts.completion_ids(text)
        return Completion(ids, (0.0,) * len(ids), "stop")

    def bare_completion(self, sample: Sample) -> Completion:
        """The instruction itself."""
        return self.encode_completion(sample.instruction)

    def loss_mask(self, completion: Completion, iteration: int) -> Sequence[bool]:
        """[T] every token, always."""
        return (True,) * len(completion.token_ids)

    # From completions to actions

    def act(self, prompt: Prompt, completions_G: Sequence[Completion]) -> list[Action]:
        """Parse a group and, for hidden states, run its one no-gradient forward.

        Every completion is forwarded, failed or not, so that the ranks of a sharded run stay in
        step. Embeddings keep the stop token and are what the renderer's own encoder would give for
        prompt and completion as one text.
        """
        texts = [self.prompts.text(completion.token_ids) for completion in completions_G]
        failures = [None if text else "empty: the completion holds no words" for text in texts]
        if self._kind == "text":
            return [
                Action(text, None if failure else text, failure)
                for text, failure in zip(texts, failures, strict=True)
            ]
        rows = [(prompt, completion.token_ids) for completion in completions_G]
        outputs = self._condition(rows, base=self.config.conditioning == "base")
        negative = self._negative(prompt)
        return [
            Action(text, None if failure else HiddenStates(embeds, negative), failure, logprobs)
            for text, failure, (embeds, logprobs) in zip(texts, failures, outputs, strict=True)
        ]

    def _condition(
        self, rows: Sequence[tuple[Prompt, Sequence[int]]], base: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """([L, D] states after the dropped prefix, [T] log-probs; None from the base) per row."""
        import torch

        results: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        size = self.config.act_batch_size
        weights = self.reference() if base else nullcontext()
        with torch.no_grad(), self._evaluating(), weights:
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                outputs = self.module(self.collate(part))
                for b, (prompt, ids) in enumerate(part):
                    end = len(prompt.token_ids) + len(ids)
                    # Clones: a view would keep the whole padded batch alive.
                    embeds = outputs.hidden[b, prompt.num_dropped_tokens : end].clone()
                    logprobs = None if base else outputs.logprobs[b, : len(ids)].clone()
                    results.append((embeds, logprobs))
        return results

    def _negative(self, prompt: Prompt) -> torch.Tensor | None:
        """[L', D] of the negative prompt under the base, which training never moves."""
        if self._negative_prompt is None:
            return None
        key = _pictures_key(prompt)
        if key not in self._negatives or self._weights.sharded:
            negative = self.prompts.prompt(prompt.sample, self._negative_prompt)
            self._negatives[key] = self._condition([(negative, ())], base=True)[0][0]
        self._negatives.move_to_end(key)
        while len(self._negatives) > NEGATIVES_KEPT:
            self._negatives.popitem(last=False)
        return self._negatives[key]

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self.module.training
        self.module.eval()
        try:
            yield
        finally:
            self.module.train(was_training)

    # Weights

    def save_pretrained(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """LoRA: a PEFT adapter. Full: a transformers folder with tokenizer and image processor."""

        def save_rest(path: Path) -> None:
            self.module.vl_model.config.to_json_file(path / "config.json")
            self.prompts.tokenizer.save_pretrained(path)
            self.prompts.image_processor.save_pretrained(path)

        self._weights.save(folder, tensors, save_rest)


def _pictures_key(prompt: Prompt) -> bytes:
    """By content: two sets of data may call different pictures by one id."""
    digest = hashlib.blake2b(digest_size=16)
    for image in prompt.images:
        digest.update(f"{image.size}".encode() + image.tobytes())
    return digest.digest()
