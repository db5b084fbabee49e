"""Emu3 as a policy: reads a picture as tokens and an instruction, writes words and a picture.

What: prompts out of codes, log-probs over the vocabulary's language and visual slices, what a
completion means, and what leaves for the sampler and for disk. What not: sampling (engines), the
update (learner), pictures out of codes (renderer). Built by `build.py`.

transformers' `Emu3ForCausalLM` holds the weights of BAAI/Emu3-Gen, BAAI/Emu3-Stage1 and models
tuned from them; the code in those repositories is never run.

Axes: `_G` completions in a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl.api.types import (
    Action,
    ActionKind,
    Completion,
    ImageVocabulary,
    Prompt,
    PromptTemplate,
    Row,
    Sample,
    TokenBatch,
    TokenOutputs,
    UnusableSampleError,
)
from rl.meter.flops import LanguageModel
from rl.policies.emu3.config import Config as Config
from rl.policies.emu3.loading import validate as validate
from rl.policies.emu3.prompts import Emu3Prompts
from rl.policies.shared.policy import TrainedPolicy

if TYPE_CHECKING:
    import torch

    from rl.policies.emu3.module import Emu3Module

EMITS: frozenset[ActionKind] = frozenset({"image_tokens"})
"""[h, w] int32 codebook indices."""
NEEDS: frozenset[str] = frozenset({"source_codes"})
"""Of a sample."""


def build(
    config: Config,
    template: PromptTemplate | None,
    kind: ActionKind,
    negative_prompt: str | None,
    temperature: float,
    max_completion_tokens: int,
    gradient_checkpointing: bool | Literal["mlp"],
    device: str,
) -> Emu3Policy:
    """Load the policy.

    Args:
        config: the policy section.
        template, negative_prompt: of renderers with a text encoder; Emu3 has one form of prompt.
        kind: what the renderer takes, one of `EMITS`.
        temperature: of the sampler, > 0; the trainer divides its logits by it.
        max_completion_tokens: longest completion, tokens.
        gradient_checkpointing: recompute activations in the backward, 'mlp': only the MLPs'.
        device: this rank's device.
    """
    if kind not in EMITS:
        raise ValueError(f"policy emu3 emits {sorted(EMITS)}, not {kind!r}")
    return Emu3Policy(
        config,
        temperature=temperature,
        max_completion_tokens=max_completion_tokens,
        gradient_checkpointing=gradient_checkpointing,
        device=device if config.device == "auto" else config.device,
    )


class Emu3Policy(TrainedPolicy):
    """See `rl.api.contracts.Policy`."""

    config: Config
    prompts: Emu3Prompts
    module: Emu3Module

    def __init__(
        self,
        config: Config,
        *,
        temperature: float,
        max_completion_tokens: int,
        gradient_checkpointing: bool | Literal["mlp"],
        device: str,
    ) -> None:
        from rl.policies.emu3 import loading as loading
        from rl.policies.emu3.module import Emu3Module, SlicedHead
        from rl.policies.shared.trained_weights import TrainedWeights

        prompts = Emu3Prompts(
            loading.load_tokenizer(config),
            config.assistant_prefill,
            config.constrained,
            config.max_prompt_tokens,
        )
        super().__init__(config, prompts, max_completion_tokens, device)
        picture = self.prompts.vocabulary.picture
        model = loading.load_model(config)
        self.state_dim = model.config.hidden_size
        self.stop_token_ids = (picture.end_of_sequence,)
        self.banned_token_ids = self._unused_ids(model.config.vocab_size, picture)
        model.lm_head = SlicedHead(model.lm_head.weight)
        tied = model.config.tie_word_embeddings
        model = self._on_device(loading.adapt(model, config), gradient_checkpointing)
        bounds = (0, picture.visual_start, picture.visual_end) if config.constrained else None
        adapted = config.lora is not None
        self.module = Emu3Module(
            model,
            adapted,
            temperature,
            self.banned_token_ids,
            bounds,
            self._kernel(),
            LanguageModel.of(model.config, config.lora, gradient_checkpointing),
        )
        self._weights = TrainedWeights(
            self.module,
            adapted,
            config.dtype,
            loading.base(config),
            load_base=lambda: loading.load_model(config),
            tied_embedding="model.embed_tokens.weight" if tied else None,
        )

    def _unused_ids(self, vocab_size: int, picture: ImageVocabulary) -> tuple[int, ...]:
        """Ids that no token has; none where a constraint never offers them.

        Raises ValueError when the model has fewer ids than the tokenizer.
        """
        if vocab_size < picture.visual_end:
            raise ValueError(
                f"policy.tokenizer_path: the tokenizer has {picture.visual_end} tokens, the model "
                f"{vocab_size}: they do not belong together"
            )
        return () if self.config.constrained else tuple(range(picture.visual_end, vocab_size))

    # What the sampler needs to know

    @property
    def image_vocabulary(self) -> ImageVocabulary | None:
        """None: sampling is free."""
        return self.prompts.vocabulary.picture if self.config.constrained else None

    adapts_vision_tower = False
    """There is none."""
    image_pixel_bounds = None
    """The sampler is never given a picture: to Emu3 pictures are tokens."""

    def sampler_folder(self) -> str:
        """Folder from which an outside sampler loads these base weights and this tokenizer; lives
        as long as the policy."""
        from rl.policies.emu3.loading import sampler_folder

        return sampler_folder(self.config, self.prompts.tokenizer, self._overlay_folder())

    def decoder(self, prompts_P: Sequence[Prompt], num_rows: int) -> Any:
        """Token-by-token decoding by the trainer's own module, `num_rows` of each prompt; see
        `Decoder`."""
        from rl.policies.shared.decoder import Decoder

        batch = self.collate([(prompt, ()) for prompt in prompts_P])
        return Decoder(self.module, self.module.causal_lm, batch, num_rows)

    # Prompts and completions

    def build_prompt(self, sample: Sample) -> Prompt:
        """See `Emu3Prompts.prompt`. Raises UnusableSampleError, too, when no completion could hold
        a picture of the source's grid: every one would be cut off, and nothing learnt."""
        prompt = self.prompts.prompt(sample)
        assert sample.source_codes is not None, "the prompt was built from them"
        shortest = len(self.prompts.picture_completion(sample.source_codes))
        if shortest > self.max_completion_tokens:
            height, width = sample.source_codes.shape
            raise UnusableSampleError(
                f"a picture of {height} x {width} codes, as sample {sample.id!r} asks for, takes "
                f"{shortest} tokens, more than sampling.max_completion_tokens = "
                f"{self.max_completion_tokens}: raise it, or drop the sample"
            )
        return prompt

    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped; its sampler log-probs are zeros."""
        ids = self.prompts.text_completion(text)
        return Completion(ids, (0.0,) * len(ids), "stop")

    def pass_through_completion(self, sample: Sample) -> None:
        """The user's words are no picture."""

    def loss_mask(self, completion: Completion, iteration: int) -> Sequence[bool]:
        """[T] text (whatever is not a code) or visual tokens, as the schedule has it."""
        text, visual = self.config.trained(iteration)
        picture = self.prompts.vocabulary.picture
        start, end = picture.visual_start, picture.visual_end
        return [visual if start <= token_id < end else text for token_id in completion.token_ids]

    reads_states = False
    """A picture is read from its tokens."""

    def decode_actions(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[Action]:
        """Read each completion's picture; no forward is needed."""
        return [self.prompts.action(prompt, token_ids) for prompt, token_ids in rows]

    # Weights

    def save_pretrained(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """LoRA: a PEFT adapter. Full: a transformers folder with tokenizer."""

        def save_rest(path: Path) -> None:
            self.module.causal_lm.config.to_json_file(path / "config.json")
            self.prompts.tokenizer.save_pretrained(path)

        self._weights.save(folder, tensors, save_rest)
