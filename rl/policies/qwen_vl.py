"""The Qwen-VL policies, 2.5 and 3: hidden states that condition a renderer, or text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from cachetools import LRUCache

from rl.api.data import RowCheck
from rl.api.plugin import ModelFiles
from rl.api.policy import PolicySetup
from rl.api.types import (
    Action,
    Completion,
    HiddenStates,
    Prompt,
    PromptTemplate,
    Row,
    Sample,
    TokenBatch,
    TokenOutputs,
)
from rl.model_files import Base, evaluating
from rl.policies import prompting, qwen_vl_prompts
from rl.policies.packing import completion_spans
from rl.policies.policy_base import TEXT_FILES, TrainedPolicy, link_files, local_folder
from rl.policies.qwen_vl_prompts import (
    FILES,
    MAX_KEPT_PICTURES,
    TEXT_ENCODER,
    Config,
    QwenPrompts,
    QwenRowCheck,
    Thinking,
    Tower,
    load_image_processor,
    load_model,
    load_prompts,
)
from rl.ranks.dist import is_sharded

if TYPE_CHECKING:
    import torch

    from rl.policies.qwen_vl_module import QwenModule

# ---- qwen vl policy ------------------------------------------------------------------------------
# The Qwen-VL policies: read pictures and an instruction, write words or states for a renderer.
#
# Axes: `_B` rows of a micro-batch, `_S` tokens of its packed row, `_T` tokens of a completion.

EMPTY_COMPLETION = Completion((), (), "stop")
"""The completion of a stock variant, which reads only the prompt."""
TEXT_POSITIONS = "text_positions"
"""Key of a prompt's `model_inputs`: the prompt is fed without token types, as in diffusers'
pipelines, and transformers then gives a picture's tokens the positions of text tokens."""


class QwenVL(TrainedPolicy[Config]):
    """Writes words; the renderer gets the words or their hidden states. A subclass names its model,
    and how its vision tower and hidden states differ from other families'."""

    tower: ClassVar[Tower] = Tower()
    slot_px: ClassVar[int]
    """Side of the square of pixels that becomes one image token."""

    emits = frozenset({"hidden_states", "text"})
    refused_with_template = frozenset({"system_prompt"})
    max_sources = prompting.MAX_PICTURES
    thinks = True
    loading = qwen_vl_prompts
    embedding = "model.language_model.embed_tokens.weight"

    prompts: QwenPrompts
    module: QwenModule

    def __init__(self, config: Config, setup: PolicySetup) -> None:
        from rl.policies.qwen_vl_module import QwenModule

        super().__init__(config, setup)
        template = setup.template or prompting.chat_template(config.system_prompt)
        self.prompts = load_prompts(config, template)
        self.stop_token_ids = self.prompts.stop_ids
        self.thinking = Thinking(self.prompts, config.thought)
        self.image_pixel_bounds = self.prompts.picture_bounds
        self.max_pictures = template.max_pictures
        self.adapts_vision_tower = config.lora is not None and not config.freeze_vision_tower
        self.reads_states = setup.kind == "hidden_states" and config.conditioning == "policy"
        model = load_model(config)
        text_config = model.config.text_config
        self.state_dim = text_config.hidden_size
        self.banned_token_ids = prompting.banned_ids(
            self.prompts.tokenizer, text_config.vocab_size, self.stop_token_ids
        )
        # Excludes a frozen tower: some of its layers have the same names as the language model's.
        within = r".*language_model\..*" if config.freeze_vision_tower else ""
        model = self._prepared(model, within)
        if config.lora is None:
            model.model.visual.requires_grad_(not config.freeze_vision_tower)
        self.module = QwenModule(model, self)
        self._negatives: LRUCache[tuple[tuple[bytes, ...], bool], torch.Tensor]
        self._negatives = LRUCache(MAX_KEPT_PICTURES)

    @classmethod
    def row_check(
        cls, config: Config, template: PromptTemplate | None, max_completion_tokens: int
    ) -> RowCheck:
        return QwenRowCheck(config, template, cls.slot_px)

    @classmethod
    def prompt_template(cls, config: Config, renderers: PromptTemplate | None) -> PromptTemplate:
        return prompting.spelled_out(renderers or prompting.chat_template(config.system_prompt))

    @classmethod
    def base(cls, config: Config) -> Base:
        editor = config.init_text_encoder_from
        if not editor:
            return super().base(config)
        if Path(editor).is_dir():
            return Base(f"{editor.rstrip('/')}/{TEXT_ENCODER}", words=config.model_path)
        return Base(editor, subfolder=TEXT_ENCODER, words=config.model_path)

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        editor, kinds = config.init_text_encoder_from, (cls.model_types, cls.model_classes)
        model = replace(super().models(config)[0], files=FILES)
        if not editor:
            return [model]
        return [
            replace(model, config_required=False, weights=()),
            ModelFiles("init_text_encoder_from", editor, *kinds, subfolder=TEXT_ENCODER),
        ]

    @classmethod
    def save_prompt_files(cls, config: Config, folder: Path) -> None:
        super().save_prompt_files(config, folder)
        load_image_processor(config).save_pretrained(folder)

    @classmethod
    def adaptable(cls, config: Config) -> Set[str]:
        tower = frozenset() if config.freeze_vision_tower else cls.tower.linear_layers
        return super().adaptable(config) | tower

    @classmethod
    def has_frozen_tower(cls, config: Config) -> bool:
        return config.freeze_vision_tower

    def picture_features(self, prompts_P: Sequence[Prompt]) -> list[torch.Tensor | None]:
        import torch

        features = iter(self.module.picture_features(self.prompts.pictures(prompts_P)))
        features_P = [[next(features) for _ in prompt.images] for prompt in prompts_P]
        return [torch.cat(parts) if parts else None for parts in features_P]

    def engine_folder(self) -> str:
        """The model path or, when the weights come from an editor, a folder of links to its weights
        and to the policy's tokenizer and processor files."""
        path, revision = self.config.model_path, self.config.revision
        editor = self.config.init_text_encoder_from
        if not editor:
            return super().engine_folder()
        overlay = Path(self._overlay.name)
        link_files(local_folder(editor, None, [f"{TEXT_ENCODER}/*"]) / TEXT_ENCODER, overlay)
        link_files(local_folder(path, revision, TEXT_FILES), overlay, ("safetensors", ".bin"))
        return str(overlay)

    def _positions(self, prompt: Prompt) -> torch.Tensor:
        if TEXT_POSITIONS in prompt.model_inputs:
            return super()._positions(prompt).expand(3, -1)
        return self.module.prompt_positions(prompt)

    def _model_inputs(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> Mapping[str, Any]:
        return {"pictures": tuple(self.prompts.pictures(prompts))}

    def collate_states(self, rows: Sequence[Row]) -> TokenBatch | None:
        """A batch of the distinct rows without their thoughts, as the renderer's own encoder reads
        them. None unless the policy encodes the words again."""
        if not self.thinking.reads_again:
            return None
        return self.collate(self.thinking.words_alone(rows)[0])

    def build_prompt(self, sample: Sample) -> Prompt:
        return self.thinking.prompt_to_sample(self.prompts.prompt(sample, sample.instruction))

    def pass_through_completion(self, sample: Sample) -> Completion:
        return self.encode_completion(sample.instruction)

    def cut_thought(self, prompt: Prompt) -> Prompt | None:
        return self.thinking.cut_short(prompt)

    def words_of_cut(self, completion: Completion) -> Completion:
        return self.thinking.words_of_cut(completion)

    def stock_arms(self, prompt: Prompt) -> Mapping[str, tuple[Prompt, Completion]]:
        """The renderer gets the prompt's states without a completion, or the instruction."""
        prompt = prompt.plain
        if self.setup.kind == "text":
            return {"stock": (prompt, self.pass_through_completion(prompt.sample))}
        return {"stock": (prompt, EMPTY_COMPLETION)}

    def decode_actions(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[Action]:
        """Parse the rows and, for hidden states, slice each row's states out of the packed row.

        The states include the stop token's, and are those that the renderer's own encoder computes
        for prompt and completion as one text. States under the base weights (negative prompts, and
        all rows with `conditioning: base`) need further forwards, equally many on every rank.
        """
        actions_B = [self.thinking.read(prompt, ids) for prompt, ids in rows]
        payloads_B: Sequence[str | HiddenStates]
        if self.setup.kind == "text":
            payloads_B = [action.words for action in actions_B]
        else:
            payloads_B = self._conditioning(rows, batch, outputs)
        return [
            replace(
                action,
                payload=None if action.failure else payload,
                drawn_from=action.drawn_from if prompt.without_thought else None,
            )
            for (prompt, _), action, payload in zip(rows, actions_B, payloads_B, strict=True)
        ]

    def _conditioning(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[HiddenStates]:
        encoded_rows, index_B = list(rows), list(range(len(rows)))
        if self.thinking.reads_again:
            encoded_rows, index_B = self.thinking.words_alone(rows)
        if self.config.conditioning == "base":
            batch, outputs = self._base_forward(encoded_rows)
        assert batch is not None and outputs is not None, "hidden states need a forward"
        states = self._states(encoded_rows, batch, outputs.hidden)
        embeds_B = [states[index] for index in index_B]
        negatives_B = self._negatives_of([prompt for prompt, _ in rows])
        pictures_B = [self.prompts.picture_places(prompt.plain) for prompt, _ in rows]
        return list(map(HiddenStates, embeds_B, negatives_B, pictures_B))

    def _states(
        self, rows: Sequence[Row], batch: TokenBatch, hidden_SD: torch.Tensor
    ) -> list[torch.Tensor]:
        """[L, D] per row: states of its prompt (after the dropped prefix) and its completion.
        Detached copies: a view would keep the whole packed row alive."""
        import torch

        groups_B = [group for group in batch.groups for _ in group.completion_lens]
        spans_B = completion_spans(batch.groups)
        hidden_SD = hidden_SD.detach()
        states_B = []
        for (prompt, _), group, (start, end) in zip(rows, groups_B, spans_B, strict=True):
            first, last = group.start + prompt.num_dropped_tokens, group.start + group.prompt_len
            states_B.append(torch.cat([hidden_SD[first:last], hidden_SD[start:end]]))
        return states_B

    def _base_forward(self, rows: Sequence[Row]) -> tuple[TokenBatch, TokenOutputs]:
        """The batch and its outputs under the base model's weights, without an autograd graph."""
        import torch

        batch = self.collate(rows)
        with evaluating(self.module), torch.no_grad(), self.base_model():
            return batch, self.module(batch)

    def _negatives_of(self, prompts_B: Sequence[Prompt]) -> list[torch.Tensor | None]:
        """[L', D] states of the negative prompt with each prompt's pictures, under the base weights
        (cached, as these never change). Each new one gets a separate forward, so that its bits do
        not depend on the others. Under ZeRO-3, where every rank must make the same number of
        forwards, exactly one forward is made for all new ones, even if there are none."""
        instruction = self.setup.negative_prompt
        if instruction is None:
            return [None] * len(prompts_B)
        keys_B = [
            (self.prompts.picture_keys(prompt), TEXT_POSITIONS in prompt.model_inputs)
            for prompt in prompts_B
        ]
        prompt_of = dict(zip(keys_B, prompts_B, strict=True))
        states_of = {key: self._negatives[key] for key in prompt_of if key in self._negatives}
        missing = [key for key in prompt_of if key not in states_of]
        batches = [[key] for key in missing]
        if is_sharded(self.module):
            batches = [missing or list(prompt_of)[:1]]
        for keys in batches:
            rows = [(self.prompts.with_instruction(prompt_of[k], instruction), ()) for k in keys]
            batch, outputs = self._base_forward(rows)
            states_of |= zip(keys, self._states(rows, batch, outputs.hidden), strict=True)
        self._negatives.update(states_of)
        return [states_of[key] for key in keys_B]


# ---- qwen2 5 vl ----------------------------------------------------------------------------------
# Policy plugin: Qwen2.5-VL, whose last hidden states Qwen-Image-Edit reads.


class Qwen25VL(QwenVL):
    """Qwen2.5-VL: reads pictures and text, and writes words. The renderer gets the words, or their
    hidden states after the final norm."""

    model_types = frozenset({"qwen2_5_vl"})
    model_classes = frozenset({"Qwen2_5_VLForConditionalGeneration"})
    slot_px = 28

    def stock_arms(self, prompt: Prompt) -> Mapping[str, tuple[Prompt, Completion]]:
        """For edits, one has M-RoPE positions, as in training, one text positions, as upstream."""
        arms = dict(super().stock_arms(prompt))
        if self.setup.kind != "text" and prompt.images:  # for text alone both are the same
            plain = prompt.plain
            inputs = {**plain.model_inputs, TEXT_POSITIONS: True}
            upstream = replace(plain, model_inputs=inputs)
            arms["stock_upstream"] = (upstream, EMPTY_COMPLETION)
        return arms


# ---- qwen3 vl ------------------------------------------------------------------------------------
# Policy plugin: Qwen3-VL (dense), whose pre-norm hidden states Qwen-Image-2.1 reads.


class DeepstackTower(Tower):
    """The language model's first layers also receive features of some tower layers, each through
    its own merger. A picture's features are [N_img, D (1 + levels)], the last layer's first."""

    linear_layers = frozenset({"qkv", "proj", "linear_fc1", "linear_fc2"})

    def geometry(self, grid: torch.Tensor, visual: Any) -> Mapping[str, torch.Tensor]:
        from transformers import vision_utils

        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=visual.config.spatial_merge_size,
        )
        positions = vision_utils.get_vision_position_ids(grid, visual.spatial_merge_size)
        return {"position_ids": positions, "interp_indices": indices, "interp_weights": weights}

    def features(self, encoded: Any) -> Sequence[torch.Tensor]:
        import torch

        levels = (encoded.pooler_output, *encoded.deepstack_features)
        return [torch.cat(picture_levels, dim=1) for picture_levels in zip(*levels, strict=True)]

    def encoded(self, features: Sequence[torch.Tensor], config: Any) -> Any:
        from transformers.models.qwen3_vl.modeling_qwen3_vl import (
            BaseModelOutputWithDeepstackFeatures,
        )

        num_levels = 1 + len(config.deepstack_visual_indexes)
        last, *others = zip(
            *(picture.chunk(num_levels, dim=1) for picture in features), strict=True
        )
        return BaseModelOutputWithDeepstackFeatures(pooler_output=last, deepstack_features=others)


class Qwen3VL(QwenVL):
    """Qwen3-VL: reads pictures and text, and writes words. The renderer gets the words, or their
    hidden states, after the final norm or (Qwen-Image-2.1) before it."""

    model_types = frozenset({"qwen3_vl"})
    model_classes = frozenset({"Qwen3VLForConditionalGeneration"})
    state_kinds = frozenset({"post_norm", "pre_norm"})
    tower = DeepstackTower()
    slot_px = 32
