"""Qwen2.5-VL as a policy: reads a picture and an instruction, writes words.

What: prompts under the renderer's own template, log-probs and conditioning states from one forward,
what a completion means, and what leaves for the sampler and for disk. What not: sampling (engines),
the update (learner), rendering. Built by `build.py`.

Axes: `_B` rows of a micro-batch, `_S` tokens of its packed row, `_T` tokens of a completion.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl.api.types import (
    Action,
    ActionKind,
    Completion,
    HiddenStates,
    Prompt,
    PromptTemplate,
    Row,
    Sample,
    TokenBatch,
    TokenOutputs,
)
from rl.meter.flops import LanguageModel
from rl.policies.qwen2_5_vl.config import Config as Config
from rl.policies.qwen2_5_vl.loading import validate as validate
from rl.policies.qwen2_5_vl.prompts import QwenPrompts
from rl.policies.shared import prompting
from rl.policies.shared.packing import completion_spans
from rl.policies.shared.policy import TrainedPolicy

if TYPE_CHECKING:
    import torch

    from rl.policies.qwen2_5_vl.module import QwenModule

EMITS: frozenset[ActionKind] = frozenset({"hidden_states", "text"})
"""Description states for a diffusion transformer, or the words themselves."""
NEEDS: frozenset[str] = frozenset()
"""Of a sample; a picture only where the renderer's template shows one."""


def build(
    config: Config,
    template: PromptTemplate | None,
    kind: ActionKind,
    negative_prompt: str | None,
    temperature: float,
    max_completion_tokens: int,
    gradient_checkpointing: bool | Literal["mlp"],
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
        gradient_checkpointing: recompute activations in the backward, 'mlp': only the MLPs'.
        device: this rank's device.
    """
    if kind not in EMITS:
        raise ValueError(f"policy qwen2_5_vl emits {sorted(EMITS)}, not {kind!r}")
    return Qwen25VLPolicy(
        config,
        template or prompting.chat_template(config.system_prompt),
        needs_picture=template is not None and "{image}" in template.text,
        kind=kind,
        negative_prompt=negative_prompt,
        temperature=temperature,
        max_completion_tokens=max_completion_tokens,
        gradient_checkpointing=gradient_checkpointing,
        device=device if config.device == "auto" else config.device,
    )


class Qwen25VLPolicy(TrainedPolicy):
    """See `rl.api.contracts.Policy`."""

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
        gradient_checkpointing: bool | Literal["mlp"],
        device: str,
    ) -> None:
        from rl.policies.qwen2_5_vl import loading as loading
        from rl.policies.qwen2_5_vl.module import QwenModule
        from rl.policies.shared.trained_weights import TrainedWeights

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
        self.module = QwenModule(
            model,
            adapted,
            temperature,
            self.banned_token_ids,
            self._kernel(),
            config.max_kept_pictures,
            LanguageModel.of(text_config, config.lora, gradient_checkpointing),
        )
        self._negatives: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        tied = model_config.tie_word_embeddings
        self._weights = TrainedWeights(
            self.module,
            adapted,
            config.dtype,
            loading.base(config),
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

    @property
    def freezes_vision_tower(self) -> bool:
        """Whether pictures mean the same throughout the run: a sampler may read their features."""
        return self.config.freeze_vision_tower

    def picture_features(self, prompts_P: Sequence[Prompt]) -> list[torch.Tensor | None]:
        """[N_img, D] of each prompt's picture, None where it shows none: the very ones that the
        forwards of these prompts read, so that a sampler needs no vision tower of its own."""
        features = iter(self.module.picture_features(self.prompts.pictures(prompts_P)))
        return [next(features) if prompt.images else None for prompt in prompts_P]

    def sampler_folder(self) -> str:
        """Folder or hub id from which an outside sampler loads these base weights, this tokenizer
        and this image processor; lives as long as the policy."""
        from rl.policies.qwen2_5_vl.loading import sampler_folder

        return sampler_folder(self.config, self._overlay_folder())

    def decoder(self, prompts_P: Sequence[Prompt], num_rows: int) -> Any:
        """Token-by-token decoding by the trainer's own module, `num_rows` of each prompt; see
        `Decoder`."""
        from rl.policies.shared.decoder import Decoder

        batch = self.collate([(prompt, ()) for prompt in prompts_P])
        return Decoder(self.module, self.module.vl_model, batch, num_rows)

    # Prompts and completions

    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        """See `QwenPrompts.collate`; on the policy's device."""
        return self.prompts.collate(rows, self.device, self.module.prompt_positions)

    def build_prompt(self, sample: Sample) -> Prompt:
        """`sample` under the renderer's template. Raises ValueError naming the sample when it lacks
        a picture the template shows, or is longer than `max_prompt_tokens`."""
        return self.prompts.prompt(sample, sample.instruction)

    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped; its sampler log-probs are zeros."""
        ids = self.prompts.completion_ids(text)
        return Completion(ids, (0.0,) * len(ids), "stop")

    def pass_through_completion(self, sample: Sample) -> Completion:
        """The instruction itself."""
        return self.encode_completion(sample.instruction)

    def loss_mask(self, completion: Completion, iteration: int) -> Sequence[bool]:
        """[T] every token, always."""
        return (True,) * len(completion.token_ids)

    # From completions to actions

    @property
    def reads_states(self) -> bool:
        """Whether the renderer is conditioned on the trained weights' own states."""
        return self._kind == "hidden_states" and self.config.conditioning == "policy"

    def decode_actions(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[Action]:
        """Parse the rows and, for hidden states, cut theirs out of the packed row.

        Embeddings keep the stop token and are what the renderer's own encoder would give for
        prompt and completion as one text. What the base has to say (negative prompts, and all of it
        with `conditioning: base`) comes of forwards made here, as many on every rank.
        """
        texts = [self.prompts.text(ids) for _, ids in rows]
        failures = [None if text else "empty: the completion holds no words" for text in texts]
        if self._kind == "text":
            return [
                Action(text, None if failure else text, failure)
                for text, failure in zip(texts, failures, strict=True)
            ]
        if self.config.conditioning == "base":
            batch, outputs = self._base_forward(rows)
        assert batch is not None and outputs is not None, "it reads states"
        embeds_B = _states(rows, batch, outputs.hidden)
        negatives_B = self._negatives_of([prompt for prompt, _ in rows])
        return [
            Action(text, None if failure else HiddenStates(embeds, negative), failure)
            for text, failure, embeds, negative in zip(
                texts, failures, embeds_B, negatives_B, strict=True
            )
        ]

    def _base_forward(self, rows: Sequence[Row]) -> tuple[TokenBatch, TokenOutputs]:
        """The untrained weights', without a graph."""
        import torch

        batch = self.collate(rows)
        with torch.no_grad(), self._evaluating(), self.reference():
            return batch, self.module(batch)

    def _negatives_of(self, prompts_B: Sequence[Prompt]) -> list[torch.Tensor | None]:
        """[L', D] of the negative prompt beside each picture, under the base, which training never
        moves; each that is not known yet in a forward of its own, so that its bits do not depend on
        which others are. Under ZeRO-3, where no rank may skip a forward that another makes, there
        is always exactly one, of all."""
        words = self._negative_prompt
        if words is None:
            return [None] * len(prompts_B)
        shown = {self.prompts.picture_key(prompt): prompt for prompt in prompts_B}
        found = {key: self._negatives[key] for key in shown if key in self._negatives}
        missing = [key for key in shown if key not in found]
        if self._weights.sharded:
            missing = missing or list(shown)[:1]
        for keys in [missing] if self._weights.sharded else [[key] for key in missing]:
            rows = [(self.prompts.other_words(shown[key], words), ()) for key in keys]
            batch, outputs = self._base_forward(rows)
            found |= zip(keys, _states(rows, batch, outputs.hidden), strict=True)
        for key, states in found.items():
            self._negatives[key] = states
            self._negatives.move_to_end(key)
        while len(self._negatives) > self.config.max_kept_pictures:
            self._negatives.popitem(last=False)
        return [found[self.prompts.picture_key(prompt)] for prompt in prompts_B]

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


def _states(rows: Sequence[Row], batch: TokenBatch, hidden_SD: torch.Tensor) -> list[torch.Tensor]:
    """[L, D] of each row: what is left of its prompt after the dropped prefix, and its completion.
    Copies, since a view would keep the whole row alive, and nothing of a graph."""
    import torch

    spans_B = list(completion_spans(batch.groups))
    prompts_B = [group for group in batch.groups for _ in group.completion_lens]
    hidden_SD = hidden_SD.detach()
    states_B = []
    for (prompt, _), group, (start, end) in zip(rows, prompts_B, spans_B, strict=True):
        tail = hidden_SD[group.start + prompt.num_dropped_tokens : group.start + group.prompt_len]
        states_B.append(torch.cat([tail, hidden_SD[start:end]]))
    return states_B
