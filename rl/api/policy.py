"""The base class of policies: trainable models that write completions.

Axes in names: `_P` prompts, `_B` rows of a micro-batch, `_T` tokens of a completion.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

from pydantic import Field
from typing_extensions import TypeVar

from rl.api.plug import PlacedConfig, RunPlug
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
from rl.config.schema import MAX_TOKENS, Section

if TYPE_CHECKING:
    import torch


class LoraSection(Section):
    """The adapter that is trained; the base stays frozen."""

    r: Annotated[int, Field(ge=1, le=65_536)] = 32
    """Rank."""
    alpha: Annotated[float, Field(gt=0, le=1e6)] = 64
    """The adapter's output is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """On the adapter's input while training; above 0 the trainer is not the policy that sampled."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of linear layers, in the language model only while the vision tower is frozen."""
    init_seed: Annotated[int, Field(ge=0, lt=2**53)] | None = None
    """Seed of the adapter's initial A matrices (B starts at zero); null: from the run's `seed`."""


class ThoughtSection(Section):
    """A thought before the words: the renderer is given what stands behind the marker alone."""

    instruction: str = (
        "First think: what is asked for, and what does it take? Then write {marker} and, after it, "
        "nothing but the final words."
    )
    """Appended to the user's words for sampling; `{marker}` stands for the marker. '' = nothing,
    for a policy that thinks unasked."""
    marker: Annotated[str, Field(min_length=1, max_length=200)] = "</think>"
    """The text that ends a thought; its last occurrence in what the policy wrote counts."""
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Longest thought, marker included; a longer one fails. null = no limit of its own."""
    states: Literal["words", "attended"] = "words"
    """words: hidden states of the words behind the renderer's own prompt, without the thought
    (equal words are one picture); attended: those that attended to the thought."""
    loss: Literal["all", "words", "thought"] = "all"
    """Which tokens are trained; the marker belongs to the thought. Under 'words' a completion
    without the marker carries no loss."""
    without_marker: Literal["fail", "words"] = "fail"
    """A completion without the marker: a failure, or all of it words."""


class PolicyConfig(PlacedConfig):
    """Base of a policy's keys: those that others read."""

    lora: LoraSection | None = LoraSection()
    """null = full fine-tuning."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 2048
    """Longest prompt, image tokens included; a longer one stops the run, naming its sample."""
    thought: ThoughtSection | None = None
    """What it thinks before it writes; null = it writes at once."""


PolicyConfigT = TypeVar("PolicyConfigT", bound=PolicyConfig, default=PolicyConfig)


@dataclass(frozen=True)
class PolicySetup:
    """What a run tells its policy when it is made."""

    kind: ActionKind
    """What the renderer takes, one of the policy's `emits`."""
    state_kind: StateKind = "post_norm"
    """Of the hidden states that the renderer takes, one of the policy's `state_kinds`."""
    template: PromptTemplate | None = None
    """How the renderer asks its text encoder; None: the policy's own words."""
    negative_prompt: str | None = None
    """Words of the renderer's unconditional branch; None: it uses none."""
    temperature: float = 1.0
    """At which completions are sampled, > 0; the trainer divides its logits by it."""
    max_completion_tokens: int = 256
    gradient_checkpointing: bool | Literal["mlp"] = False
    """Recompute activations in the backward, 'mlp': only the MLPs'."""
    device: str = "cpu"
    """The rank's own, 'cpu' or 'cuda:<index>'."""
    seed: int = 0
    """Of what the policy starts with that no file holds (an adapter), alike on every rank."""


class Decoder(Protocol):
    """Token-by-token decoding by the trainer's own module."""

    def step(self, tokens_B: Sequence[int] | None) -> torch.Tensor:
        """[B, V] logits of the next token, after each row's last (None: after its prompt)."""
        ...


class Policy(RunPlug[PolicyConfigT]):
    """A plugin of `rl/policies`: reads prompts, writes completions, is trained."""

    Config: ClassVar[type[Section]] = PolicyConfig

    emits: ClassVar[Set[ActionKind]]
    """What it can hand to a renderer."""
    state_kinds: ClassVar[Set[StateKind]] = frozenset({"post_norm"})
    """Where it can take hidden states from."""
    needs: ClassVar[Set[str]] = frozenset()
    """What each sample must bring, as `DataSource.provides` names it; a picture only where the
    renderer's template shows one."""
    own_words: ClassVar[Set[str]] = frozenset()
    """Keys of its section that are refused beside a renderer that brings a prompt template."""
    own_states: ClassVar[Set[str]] = frozenset()
    """Keys that are read only where the renderer takes hidden states."""
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
    """With which an engine holds completions to `Prompt.grid`; None: it is never constrained."""
    image_pixel_bounds: tuple[int, int] | None = None
    """(smallest, largest) area of a prompt's picture, px; None: an engine is given no pictures."""
    max_pictures: int = 1
    """Most pictures of a prompt, where there are any."""
    adapts_vision_tower: bool = False
    """Whether its adapter reaches beyond the language model."""
    reads_states: bool = False
    """Whether `decode_actions` needs what the module's forward gives."""
    own_max_pictures: ClassVar[int] = 1
    """Source pictures that a sample may have where the renderer brings no template."""
    starts_as_stock: ClassVar[bool] = False
    """Whether its completions before training are the stock arm of held-out samples, as for
    policies that write pictures and have no stock pipeline."""

    def __init__(self, config: PolicyConfigT, setup: PolicySetup) -> None:
        """Once per rank: load the weights. ValueError says what the user can mend."""
        if setup.kind not in self.emits:
            name = type(self).__name__
            raise ValueError(f"policy {name} emits {sorted(self.emits)}, not {setup.kind!r}")
        self.config = config
        self.setup = setup
        self.device = setup.device if config.device == "auto" else config.device

    # --- before anything is loaded ------------------------------------------------------------

    @classmethod
    def has_frozen_tower(cls, config: PolicyConfigT) -> bool:
        """Whether pictures have the same features all run long, so that an engine may read them
        (`picture_features`) and needs no vision tower."""
        return False

    @classmethod
    def picture_tokens(cls, config: PolicyConfigT, area_px: int) -> int:
        """Of a square picture of this area in a prompt; 0: it takes none, or that is not known."""
        return 0

    # --- prompts and completions --------------------------------------------------------------

    @abstractmethod
    def build_prompt(self, sample: Sample) -> Prompt:
        """Raises ValueError naming a sample that cannot be one."""

    @abstractmethod
    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped; its sampler log-probs are zeros."""

    def pass_through_completion(self, sample: Sample) -> Completion | None:
        """The bare arm: the user's own words, as if the policy added nothing; None: none."""
        return None

    def cut_thought(self, prompt: Prompt) -> Prompt | None:
        """The prompt for words without a thought, which then belong to `prompt.plain`; None where
        `prompt` asks for no thought."""
        return None

    def words_of_cut(self, completion: Completion) -> Completion:
        """The words of a completion of `cut_thought`'s prompt; their log-probs mean nothing."""
        return completion

    def stock_arms(self, prompt: Prompt) -> Mapping[str, tuple[Prompt, Completion]]:
        """What the renderer's own pipeline would read of the user's words: 'stock', and variants by
        name. Drawn once a run on held-out samples, inside `reference()`. {}: there is none."""
        return {}

    def loss_mask(self, completion: Completion, iteration: int) -> Sequence[bool]:
        """[T] which tokens are trained in this iteration; forced ones are left out besides."""
        return (True,) * len(completion.token_ids)

    @abstractmethod
    def decode_actions(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[Action]:
        """The actions of one micro-batch's rows. `outputs`: of `module(batch)`, if it
        `reads_states`, with `batch` `collate_states(rows)` or else `collate(rows)`; keep nothing of
        its graph. A row without tokens is one of its `stock_arms`."""

    @abstractmethod
    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        """Neighbouring rows that share their `Prompt` object are a group, its prompt there once."""

    def collate_states(self, rows: Sequence[Row]) -> TokenBatch | None:
        """The batch whose forward, without a graph, gives the renderer its states, where that is
        not `collate(rows)`."""
        return None

    def train_flops(self, prompt_len: int, completion_lens: Sequence[int]) -> float:
        """FLOPs of a forward and a backward over one group, the prompt once, nothing recomputed;
        0: not known. For the metric `work/mfu`."""
        return 0.0

    # --- what an inference engine asks --------------------------------------------------------

    @abstractmethod
    def engine_folder(self) -> str:
        """Folder or hub id of these base weights, this tokenizer and this image processor, for an
        outside engine; lives as long as the policy."""

    @abstractmethod
    def decoder(self, prompts_P: Sequence[Prompt], num_rows: int) -> Decoder:
        """Decoding by the trainer's own module, `num_rows` of each prompt."""

    def picture_features(self, prompts_P: Sequence[Prompt]) -> list[torch.Tensor | None]:
        """[N_img, W] of each prompt's pictures, one after the other, None where it shows none: what
        the forwards of these prompts read. Called only where it `has_frozen_tower`."""
        return [None] * len(prompts_P)

    # --- weights ------------------------------------------------------------------------------

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """Inside, the module is the policy as it was before training."""

    @abstractmethod
    def export_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> PolicyWeights:
        """`tensors`: the trainable parameters, whole, keyed as in `module.named_parameters()`."""

    @abstractmethod
    def save_pretrained(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """PEFT adapter (LoRA) or transformers folder (full) from the same tensors."""
