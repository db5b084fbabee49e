"""The base class of policies: trainable models that write completions.

Axes in names: `_P` prompts, `_B` rows of a micro-batch, `_T` tokens of a completion.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field
from typing_extensions import TypeVar

from rl.api.data import RowCheck
from rl.api.plugin import PlacedConfig, RunPlugin
from rl.api.types import (
    Action,
    ActionKind,
    Completion,
    ImageVocabulary,
    PolicyWeights,
    Prompt,
    PromptTemplate,
    Row,
    Sample,
    StateKind,
    TokenBatch,
    TokenOutputs,
)
from rl.config.schema import MAX_TOKENS, Section, Unread

if TYPE_CHECKING:
    import torch


NO_STATES = Unread("renderer.accepts", "text", "image_tokens")
"""Beside a key of a policy's section that matters only where the renderer takes hidden states."""


class LoraSection(Section):
    """The adapter that is trained; the base stays frozen."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Rank of the adapter."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 64
    """The adapter's output is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout on the adapter's input while training; above 0, trainer and engine differ."""
    target_modules: Annotated[tuple[str, ...], Unread("adapter_path")] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    )
    """Names of linear layers, in the language model only while the vision tower is frozen."""
    init_seed: Annotated[Annotated[int, Field(ge=0, lt=2**53)] | None, Unread("adapter_path")] = (
        None
    )
    """Seed of the adapter's initial A matrices (B starts at zero); null: from the run's `seed`."""


class ThoughtSection(Section):
    """A thought before the words: the renderer gets only the text after the marker, or its hidden
    states where it follows the renderer's own prompt (equal words give one picture)."""

    instruction: str = (
        "First think: what is asked for, and what does it take? Then write {marker} and, after it, "
        "nothing but the final words."
    )
    """Appended to the user's words for sampling; `{marker}` becomes the marker. '' = nothing, for
    a policy that thinks without being asked."""
    marker: Annotated[str, Field(pattern=r"\S", max_length=200)] = "</think>"
    """The text that ends a thought; its last occurrence in what the policy wrote counts."""
    without_marker: Literal["fail", "words"] = "fail"
    """fail: a completion without the marker fails; words: all of it counts as words."""


class PolicyConfig(PlacedConfig):
    """Base class of a policy's section: the keys that other parts of a run read."""

    lora: LoraSection | None = LoraSection()
    """The LoRA adapter that is trained; null = full fine-tuning."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 2048
    """Longest prompt, image tokens included; a longer one is a bad row (`data.on_bad_row`)."""
    thought: ThoughtSection | None = None
    """The thought that the policy writes before its words; null = no thought."""


PolicyConfigT = TypeVar("PolicyConfigT", bound=PolicyConfig, default=PolicyConfig)


@dataclass(frozen=True)
class PolicySetup:
    """What a run passes to the constructor of its policy."""

    kind: ActionKind
    """What the renderer takes, one of the policy's `emits`."""
    state_kind: StateKind = "post_norm"
    """Which hidden states the renderer takes; one of the policy's `state_kinds`."""
    template: PromptTemplate | None = None
    """The renderer's prompt template; None: the policy uses its own prompt."""
    negative_prompt: str | None = None
    """Prompt of the renderer's unconditional branch; None: it has none."""
    temperature: float = 1.0
    """Sampling temperature of completions, > 0; the trainer divides its logits by it."""
    max_completion_tokens: int = 256
    gradient_checkpointing: bool | Literal["mlp"] = False
    """Recompute activations in the backward, 'mlp': only the MLPs'."""
    device: str = "cpu"
    """The rank's device, 'cpu' or 'cuda:<index>'."""
    seed: int = 0
    """Seed of initial weights that no file holds (an adapter's); the same on every rank."""
    keeps_start: bool = False
    """Keep a copy of the adapter that the run starts from, for `reference()`."""


class Decoder(Protocol):
    """Token-by-token decoding by the trainer's own module."""

    def step(self, tokens_B: Sequence[int] | None) -> torch.Tensor:
        """[B, V] logits of the next token. `tokens_B`: each row's last; None: only its prompt."""
        ...


class Policy(RunPlugin[PolicyConfigT]):
    """A plugin of `rl/policies`: reads prompts, writes completions, is trained."""

    Config: ClassVar[type[Section]] = PolicyConfig

    emits: ClassVar[Set[ActionKind]]
    """Kinds of actions that it can pass to a renderer."""
    state_kinds: ClassVar[Set[StateKind]] = frozenset({"post_norm"})
    """Kinds of hidden states that it can pass to a renderer."""
    needs: ClassVar[Set[str]] = frozenset()
    """What each sample must have, in the names of `DataSource.provides`; a picture is needed only
    if the renderer's template shows one."""
    refused_with_template: ClassVar[Set[str]] = frozenset()
    """Keys of its section that are refused if the renderer has a prompt template."""
    thinks: ClassVar[bool] = False
    """Whether it reads its section's `thought`."""

    module: torch.nn.Module
    """`module(batch: TokenBatch) -> TokenOutputs`; what the learner trains. Everything a forward
    needs happens inside this one call, so that sharded training (ZeRO-3) can wrap it."""
    stop_token_ids: tuple[int, ...]
    banned_token_ids: tuple[int, ...] = ()
    """Never sampled, and left out of the softmax in engine and trainer alike."""
    state_dim: int
    """Width of its hidden states."""
    image_vocabulary: ImageVocabulary | None = None
    """Token ids by which an engine constrains completions to `Prompt.grid`; None: no constraint."""
    image_pixel_bounds: tuple[int, int] | None = None
    """(smallest, largest) area of a prompt's picture, px; None: engines get no pictures."""
    max_pictures: int = 1
    """Limit of pictures in one prompt, if prompts have any."""
    adapts_vision_tower: bool = False
    """Whether its adapter also adapts layers outside the language model."""
    reads_states: bool = False
    """Whether `decode_actions` needs the outputs of the module's forward."""
    max_sources: ClassVar[int] = 1
    """Limit of source pictures of a sample if the renderer has no prompt template."""
    starts_as_stock: ClassVar[bool] = False
    """Whether its completions before training are the stock variant of held-out samples, as for
    policies that write pictures and have no stock pipeline."""

    def __init__(self, config: PolicyConfigT, setup: PolicySetup) -> None:
        """Once per rank: load the weights. Raises ValueError for what the user can fix."""
        if setup.kind not in self.emits:
            name = type(self).__name__
            raise ValueError(f"policy {name} emits {sorted(self.emits)}, not {setup.kind!r}")
        self.config = config
        self.setup = setup
        self.device = setup.device if config.device == "auto" else config.device

    # --- before anything is loaded ------------------------------------------------------------

    @classmethod
    def has_frozen_tower(cls, config: PolicyConfigT) -> bool:
        """Whether a picture's features never change during a run, so that an engine may take them
        from `picture_features` and needs no vision tower."""
        return False

    @classmethod
    def row_check(
        cls, config: PolicyConfigT, template: PromptTemplate | None, max_completion_tokens: int
    ) -> RowCheck | None:
        """Tells without weights, and asking no other machine, for which rows `build_prompt` would
        raise UnusableSampleError, as for too long a prompt; None: this is not known before the
        policy is loaded."""
        return None

    @classmethod
    def tiny(cls, folder: str) -> Mapping[str, Any]:
        """Write a model of random weights, a few MB, into `folder`; return the keys of the section
        that load it. For `rl check --conformance` without a config. {}: it cannot."""
        return {}

    # --- prompts and completions --------------------------------------------------------------

    @abstractmethod
    def build_prompt(self, sample: Sample) -> Prompt:
        """The sample's prompt. Raises ValueError naming the sample if it can have none."""

    @classmethod
    def prompt_template(
        cls, config: PolicyConfigT, renderers: PromptTemplate | None
    ) -> PromptTemplate | None:
        """How its prompts look, with all special tokens written out, for a model card; None: a
        template does not say it. `renderers`: the renderer's own template."""
        return None

    @classmethod
    def start_adapter(cls, config: PolicyConfigT) -> str:
        """Folder of the adapter that a run with this section starts from; '': a new one or none."""
        return ""

    @abstractmethod
    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped; its log-probs are zeros."""

    def pass_through_completion(self, sample: Sample) -> Completion | None:
        """The bare variant's completion: the user's own words with nothing added; None: there is
        none."""
        return None

    def cut_thought(self, prompt: Prompt) -> Prompt | None:
        """`prompt` with the thought left out, so that the policy writes only words; these then
        belong to `prompt.plain`. None if `prompt` asks for no thought."""
        return None

    def words_of_cut(self, completion: Completion) -> Completion:
        """The words in a completion of `cut_thought`'s prompt; their log-probs are meaningless."""
        return completion

    def stock_arms(self, prompt: Prompt) -> Mapping[str, tuple[Prompt, Completion]]:
        """Name ('stock' and variants) -> what the renderer's own pipeline would read for the
        user's words. Drawn once a run on held-out samples, inside `base_model()`. {}: none."""
        return {}

    def loss_mask(self, completion: Completion, iteration: int) -> Sequence[bool]:
        """[T] which tokens are trained in this iteration; forced tokens are never trained."""
        return (True,) * len(completion.token_ids)

    @abstractmethod
    def decode_actions(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[Action]:
        """The actions of one micro-batch's rows. If the policy `reads_states`, `batch` is
        `collate_states(rows)`, or if None `collate(rows)`, and `outputs` is `module(batch)`;
        keep nothing of its graph. A row without tokens is one of its `stock_arms`."""

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        """Neighbouring rows that share a `Prompt` object are a group; its prompt is packed once."""

    def collate_states(self, rows: Sequence[Row]) -> TokenBatch | None:
        """The batch whose forward, without a graph, computes the renderer's states; None: it is
        `collate(rows)`."""
        return None

    def train_flops(self, prompt_len: int, completion_lens: Sequence[int]) -> float:
        """FLOPs of a forward and a backward over one group, with the prompt once and without
        recomputation; 0: unknown. For the metric `work/mfu`."""
        return 0.0

    # --- for inference engines ----------------------------------------------------------------

    @abstractmethod
    def engine_folder(self) -> str:
        """Folder or hub id of the policy's base weights, tokenizer and image processor, for an
        external engine; it exists as long as the policy does."""

    @abstractmethod
    def decoder(self, prompts_P: Sequence[Prompt], num_rows: int) -> Decoder:
        """A decoder that runs the trainer's own module, `num_rows` rows per prompt."""

    def picture_features(self, prompts_P: Sequence[Prompt]) -> list[torch.Tensor | None]:
        """Per prompt: the features [N_img, W] of its pictures, concatenated, as the policy's
        forward reads them; None: it has none. Called only if the policy `has_frozen_tower`."""
        return [None] * len(prompts_P)

    # --- weights ------------------------------------------------------------------------------

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """Inside this context, the module is the policy as it was before training."""

    def base_model(self) -> AbstractContextManager[None]:
        """Inside this context, the module has the base model's weights, without an adapter that the
        run starts from."""
        return self.reference()

    @abstractmethod
    def export_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> PolicyWeights:
        """`tensors`: the trainable parameters, unsharded, keyed as in `named_parameters()`."""

    @abstractmethod
    def save_pretrained(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a PEFT adapter (LoRA) or transformers folder (full) from the same tensors."""
