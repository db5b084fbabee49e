"""Policy plugin: Emu3, which reads a picture as tokens and writes words and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.api.data import RowCheck
from rl.api.plugin import ModelFiles, unread
from rl.api.policy import PolicySetup
from rl.api.types import (
    Action,
    Completion,
    Prompt,
    PromptTemplate,
    Row,
    Sample,
    TokenBatch,
    TokenOutputs,
)
from rl.config.schema import RunConfig
from rl.policies.emu3 import emu3_loading
from rl.policies.emu3.emu3_loading import Config
from rl.policies.emu3.emu3_prompts import Emu3Prompts
from rl.policies.shared.model_loading import folder_here, link_files
from rl.policies.shared.policy_base import TrainedPolicy

if TYPE_CHECKING:
    import numpy as np


class Emu3(TrainedPolicy[Config]):
    """Writes pictures as [h, w] int32 codebook indices."""

    model_types = frozenset({emu3_loading.TEXT_MODEL, emu3_loading.PUBLISHED_MODEL})
    model_classes = frozenset({"Emu3ForCausalLM"})
    emits = frozenset({"image_tokens"})
    needs = frozenset({"source_codes"})
    starts_as_stock = True
    loading = emu3_loading
    embedding = "model.embed_tokens.weight"

    prompts: Emu3Prompts

    def __init__(self, config: Config, setup: PolicySetup) -> None:
        from rl.policies.shared.logprobs import SlicedHead
        from rl.policies.shared.trained_module import TrainedModule

        super().__init__(config, setup)
        self.prompts = self._prompts_of(config)
        picture = self.prompts.vocabulary.picture
        self.image_vocabulary = picture if config.constrained else None
        self.stop_token_ids = (picture.end_of_sequence,)
        model = emu3_loading.load_model(config)
        self.state_dim = model.config.hidden_size
        vocab_size, num_tokens = model.config.vocab_size, picture.visual_end
        if vocab_size < num_tokens:
            raise ValueError(
                f"policy.tokenizer_path: the tokenizer has {num_tokens} tokens, the model "
                f"{vocab_size}: they do not belong together"
            )
        model.lm_head = SlicedHead(model.lm_head.weight)
        if config.constrained:
            self.vocabulary_slices = (0, picture.visual_start, num_tokens)
        else:
            self.banned_token_ids = tuple(range(num_tokens, vocab_size))  # ids without a token
        # Adapts layers only: an adapted head could not be projected slice by slice.
        self.module = TrainedModule(self._prepared(model, within=r".*\.layers\..*"), self)

    @staticmethod
    def _prompts_of(config: Config) -> Emu3Prompts:
        return Emu3Prompts(
            emu3_loading.load_tokenizer(config),
            config.assistant_prefill,
            config.constrained,
            config.max_prompt_tokens,
        )

    @classmethod
    def row_check(
        cls, config: Config, template: PromptTemplate | None, max_completion_tokens: int
    ) -> RowCheck:
        """Builds each prompt, if the tokenizer's files are here."""

        @cache
        def prompts() -> Emu3Prompts | None:
            path = config.tokenizer_path or config.model_path
            revision = None if config.tokenizer_path else config.revision
            folder = folder_here(path, revision, emu3_loading.TOKENIZER_FILES)
            here = config.model_copy(update={"tokenizer_path": str(folder)})
            return None if folder is None else cls._prompts_of(here)

        def check(identity: str, instruction: str, sizes: object, codes: np.ndarray | None) -> bool:
            if (builder := prompts()) is None:
                return False
            sample = Sample(identity, instruction, source_codes=codes)
            builder.prompt(sample, max_completion_tokens)
            return True

        return check

    @classmethod
    def models(cls, config: Config) -> Sequence[ModelFiles]:
        weights = ModelFiles(
            "model_path", config.model_path, cls.model_types, revision=config.revision
        )
        tokenizer_files = emu3_loading.TOKENIZER_FILES
        if not config.tokenizer_path:
            return [replace(weights, files=tokenizer_files)]
        tokenizer = ModelFiles(
            "tokenizer_path",
            config.tokenizer_path,
            config_required=False,
            weights=(),
            files=tokenizer_files,
        )
        return [weights, tokenizer]

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> list[str]:
        errors = super().problems(config, run)
        errors += [
            f"{kind}_only_steps: {steps} iterations do not fit in a cycle of {cycle} "
            f"({kind}_only_cycle_steps); for always, make them equal"
            for kind, steps, cycle in (
                ("text", config.text_only_steps, config.text_only_cycle_steps),
                ("vision", config.vision_only_steps, config.vision_only_cycle_steps),
            )
            if steps > cycle
        ]
        # Both cycles begin in iteration 0, so if they ever collide, they collide there.
        if not any(config.trained(0)):
            errors.append(
                "train_text_tokens_only, train_vision_tokens_only: together they train nothing in "
                "iteration 0; keep one"
            )
        if "<|image token|>" in config.assistant_prefill:
            errors.append(
                "assistant_prefill: contains '<|image token|>', which starts the picture's rows "
                "before sampling is constrained; end the prefill before it"
            )
        return errors

    @classmethod
    def no_effect(cls, config: Config) -> Iterable[str]:
        yield from super().no_effect(config)
        for kind, is_on in (
            ("text", config.train_text_tokens_only),
            ("vision", config.train_vision_tokens_only),
        ):
            if not is_on:
                keys = f"{kind}_only_cycle_steps {kind}_only_steps"
                yield from unread(config, keys, f"train_{kind}_tokens_only is false")

    def engine_folder(self) -> str:
        """A folder of links to the weights, with config and tokenizer files in transformers'
        format: an engine loads it without remote code."""
        overlay = Path(self._overlay.name)
        if not (overlay / "config.json").exists():
            folder = emu3_loading.model_folder(self.config)
            emu3_loading.read_model_config(folder).to_json_file(overlay / "config.json")
            self.prompts.tokenizer.save_pretrained(overlay)
            link_files(folder, overlay, skip=(".py", ".bin", "token"))
        return str(overlay)

    def build_prompt(self, sample: Sample) -> Prompt:
        return self.prompts.prompt(sample, self.setup.max_completion_tokens)

    def _model_inputs(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> Mapping[str, Any]:
        """If constrained: `forced` [B, C] bool on the CPU, True for tokens without a choice."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from rl.algorithm.image_grammar import forced_tokens

        if not self.config.constrained:
            return {}
        picture = self.prompts.vocabulary.picture
        forced_B = [
            torch.tensor(forced_tokens(ids, prompt.grid, picture), dtype=torch.bool)
            for prompt, ids in rows
            if prompt.grid is not None
        ]
        return {"forced": pad_sequence(forced_B, batch_first=True)}

    def loss_mask(self, completion: Completion, iteration: int) -> Sequence[bool]:
        """[T] True for the tokens (visual codes, or text: all others) that the schedule trains."""
        text, visual = self.config.trained(iteration)
        picture = self.prompts.vocabulary.picture
        start, end = picture.visual_start, picture.visual_end
        return [visual if start <= token_id < end else text for token_id in completion.token_ids]

    def decode_actions(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[Action]:
        return [self.prompts.action(prompt, token_ids) for prompt, token_ids in rows]
