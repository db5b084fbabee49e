"""The frozen records that pass through the loop: `Sample` -> `Prompt` -> `Completion` -> `Action`
-> `Episode` -> `TrainSequence`.

Axes in names: `_P` prompts on this rank, `_G` completions in a group, `_B` graded episodes,
`_T` tokens, `_V` vocabulary. `x_PG[p][g]` is one rollout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

ActionKind = Literal["hidden_states", "text", "image_tokens"]
"""What a policy can pass to a renderer, and what a renderer can take."""

StateKind = Literal["post_norm", "pre_norm"]
"""Last hidden states after the language model's final norm, or before it."""


class Status(StrEnum):
    """How an episode ended. A judge's failure is never the policy's score (ARCHITECTURE.md)."""

    SCORED = "scored"
    """Rendered and graded; `reward` is in [0, 1]."""
    POLICY_FAILED = "policy_failed"
    """The completion is unusable; `reward` is the configured floor and counts in the baseline."""
    UNGRADED = "ungraded"
    """Renderer or judge failed after bounded retries; no reward, not counted in the baseline."""


UNFINISHED_THOUGHT = "unfinished thought"
"""`Action.failure` starts with this if the thought did not end within its token limit."""
NO_MARKER = "no marker"
"""`Action.failure` starts with this if the completion stopped without an end-of-thought marker."""


def is_unreadable(failure: str | None) -> bool:
    """Whether a judge's failure is about this picture: no reply could be read (prose, a filter), or
    the judge refused the question. False for a failure of the transport."""
    return (failure or "").partition(":")[0] in ("unreadable", "refused")


class UnusableSampleError(ValueError):
    """A row or sample that cannot be trained on; the message names it and the remedy."""


@dataclass(frozen=True, eq=False)
class Sample:
    """One row of data, as the user wrote it."""

    id: str
    """Stable identity: survives shuffles, restarts and a different number of ranks."""
    instruction: str
    """The user's own words (edit instruction, question, or prompt)."""
    sources: tuple[Image, ...] = ()
    """RGB source pictures, in the order of their numbers; () for text-only tasks. A transparent
    one is RGBA if the renderer reads alpha; all other readers get it composited over white."""
    target: Image | None = None
    """RGB reference edit, for rewards only."""
    source_codes: np.ndarray | None = None
    """[h, w] int32 codebook indices (from 0) of the source, for policies that read codes."""
    target_codes: np.ndarray | None = None
    """[h, w] int32 codebook indices of the reference edit, for rewards only."""
    category: str = ""
    """Free label; metrics are also shown per category on held-out data."""
    reference: str | None = None
    """A correct completion, if known; it only measures renderer drift and is never trained on."""
    hidden: Mapping[str, Any] = field(default_factory=dict)
    """Values for rewards that the policy must not see (answers, labels)."""

    @property
    def source(self) -> Image | None:
        """The first source picture; None for text-only tasks."""
        return self.sources[0] if self.sources else None


@dataclass(frozen=True)
class ImageVocabulary:
    """The token ids with which a policy writes a picture of h x w codes.

    After `image`: h rows of w visual tokens, each row closed by `end_of_row`, then `end_of_frame`,
    `end_of_image`, `end_of_sequence` (a stop token of the policy). Ids below `visual_start`, which
    is code 0, are language; `visual_end` is one past the last code.
    """

    image: int
    end_of_row: int
    end_of_frame: int
    end_of_image: int
    end_of_sequence: int
    visual_start: int
    visual_end: int


@dataclass(frozen=True)
class PromptTemplate:
    """The prompt that a renderer's text encoder expects; the policy samples with the same prompt.

    `text` holds `{image}` where the pictures go and `{instruction}` where the user's words go.
    """

    text: str
    drop_prefix: str = ""
    """Leading part of `text` whose tokens are dropped from the conditioning ('' drops nothing)."""
    image_area_px: int | None = None
    """Area to which the source is resized, aspect kept, for the policy's processor; None: not."""
    image_multiple_px: int = 32
    """Width and height after that resize are multiples of this."""
    picture: str = "{image}"
    """What is written for each picture in place of `{image}`; `{number}` counts them from 1."""
    between_pictures: str = ""
    """Text between two pictures."""
    max_pictures: int = 1
    """Limit of pictures in a prompt; a sample with more is refused."""
    min_pictures: int = 1
    """Fewest pictures if `text` has `{image}`; 0: a sample without one gets a text-only prompt."""

    @property
    def needs_picture(self) -> bool:
        """Whether a sample without one is refused."""
        return "{image}" in self.text and self.min_pictures > 0


@dataclass(frozen=True, eq=False)
class Prompt:
    """A sample as the policy reads it. Only token ids are used; text is never re-tokenised."""

    sample: Sample
    """The row that it was made from."""
    token_ids: tuple[int, ...]
    """Every image expanded to its number of image tokens."""
    images: tuple[Image, ...] = ()
    """Resized pictures, as the processors of policy and renderer get them."""
    model_inputs: Mapping[str, Any] = field(default_factory=dict)
    """Per-prompt tensors for the policy's forward (`pixel_values`, `image_grid_thw`, ...)."""
    num_dropped_tokens: int = 0
    """Leading tokens left out of the conditioning (the renderer's system prompt)."""
    grid: tuple[int, int] | None = None
    """(h, w) that sampling enforces for a picture in the completion; None: no constraint."""
    without_thought: Prompt | None = None
    """The same prompt without the request to think first; None if it has no such request."""

    @property
    def plain(self) -> Prompt:
        """The prompt for words without a thought (bare variant, reference completions)."""
        return self.without_thought or self


@dataclass(frozen=True)
class Completion:
    """What the engine wrote for one prompt."""

    token_ids: tuple[int, ...]
    """Includes the stop token exactly when the engine stopped by itself."""
    logprobs: tuple[float, ...]
    """The engine's own log-probs of these tokens under the distribution it sampled from, nats."""
    finish: Literal["stop", "length"]
    """stop: the engine sampled a stop token; length: the completion was cut off."""
    forced: tuple[bool, ...] | None = None
    """True where a constraint left no choice: such tokens are attended to, never trained."""


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Conditioning for a diffusion transformer, detached."""

    embeds: torch.Tensor
    """[L, D] last hidden states of prompt tail + completion, unpadded, of `Renderer.state_kind`."""
    negative_embeds: torch.Tensor | None = None
    """[L', D] the same for the negative prompt under the BASE weights, for CFG."""
    pictures: tuple[range, ...] = ()
    """Positions of each picture's states, in order, in the negative prompt too. All
    completions of one prompt have bitwise equal states up to the end of the last picture."""


@dataclass(frozen=True, eq=False)
class Action:
    """A parsed completion."""

    text: str
    """The whole completion without special tokens."""
    payload: HiddenStates | str | Any | None
    """What the renderer takes (its `accepts` kind); None when `failure` is set, and in episodes."""
    failure: str | None = None
    """Why nothing can be rendered (-> POLICY_FAILED)."""
    thought: str = ""
    """The thought at the beginning of `text`, its marker included; the renderer never gets it."""
    num_thought_tokens: int = 0
    """How many of the completion's tokens are the thought; all of them if no marker ended it."""
    drawn_from: tuple[int, ...] | None = None
    """Token ids that determine the payload: completions of a group whose ids are equal share a
    picture. None: the completion's own token ids."""

    @property
    def words(self) -> str:
        """The text after the thought."""
        return self.text.removeprefix(self.thought)


@dataclass(frozen=True, eq=False)
class RenderJob:
    """One picture to make."""

    sample: Sample
    """The row of data: the user's words, source pictures, category."""
    payload: Any
    """What the policy passes on, of the renderer's `accepts` kind: text as str, `HiddenStates`, or
    [h, w] codes."""
    noise_seed: int
    """All completions of a group share it, so an advantage reflects the words, not the noise."""


@dataclass(frozen=True)
class RenderFailure:
    """The renderer could not make this picture; `blame` decides POLICY_FAILED or UNGRADED."""

    reason: str
    """Why, beginning with a short stable word: `out_of_memory: ...`."""
    blame: Literal["policy", "renderer"] = "renderer"
    """policy: nobody could draw its output, which counts as its failure; renderer: it is not."""


@dataclass(frozen=True, eq=False)
class RewardInput:
    """What a reward may look at."""

    sample: Sample
    """The row of data: the user's words, source pictures, hidden values."""
    text: str
    """The whole completion without special tokens."""
    image: Image | None
    """The rendered picture (None for the `none` renderer)."""
    thought: str = ""
    """The thought at the beginning of `text`, its marker included."""

    @property
    def words(self) -> str:
        """The text after the thought, which the renderer got."""
        return self.text.removeprefix(self.thought)


@dataclass(frozen=True)
class Region:
    """A part of the rendered picture that a reward names."""

    label: str
    """What is there, as text."""
    box: tuple[float, float, float, float]
    """Left, top, right, bottom as shares of the picture's width and height, 0..1."""


@dataclass(frozen=True)
class RewardOutput:
    """One reward's result for one episode."""

    value: float | None
    """In [0, 1]; None when it could not be graded (`failure` says why)."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Every number behind the value, under stable names (e.g. `edit_success` 0-10)."""
    replies: tuple[str, ...] = ()
    """The judge's replies, or what the reward read, kept verbatim with the episode."""
    failure: str | None = None
    """Why `value` is None, or 0 under judge.unreadable 'lowest'; starts with a short stable word
    (`timeout: ...`), for counting."""
    seconds: float = 0.0
    """Wall time from request to result, s."""
    traceback: str = ""
    """Traceback of the reward's exception; set by the rollout, never by a reward."""
    regions: tuple[Region, ...] = ()
    """Where judge or reward looked; recorded with the episode and drawn on the run's page."""


@dataclass(frozen=True, eq=False)
class Episode:
    """One completion, rendered and graded."""

    group_id: str
    """Identity of the group: never its prompt text."""
    prompt: Prompt
    """What the policy read."""
    completion: Completion
    """What it wrote, as tokens."""
    action: Action
    """The completion's text, without the payload."""
    noise_seed: int
    """The renderer's noise, shared by the group."""
    image: Image | None
    """The rendered picture; None if there is none."""
    status: Status
    """SCORED, POLICY_FAILED or UNGRADED."""
    reward: float | None
    """In [0, 1]; None exactly when status is UNGRADED."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """`<reward>/<part>` -> number, over all rewards."""
    replies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Reward -> its `RewardOutput.replies`."""
    regions: Mapping[str, tuple[Region, ...]] = field(default_factory=dict)
    """Reward -> the regions of `image` that it names; rewards without regions are left out."""
    failure: str | None = None
    """Why it is POLICY_FAILED or UNGRADED."""
    unreadable: bool = False
    """Whether it is UNGRADED, or has the lowest rating (judge.unreadable), only because the judge's
    replies about it could not be read."""
    judge_s: float = 0.0
    """Longest wall time of its rewards, s."""


@dataclass(frozen=True, eq=False)
class TrainSequence:
    """What the loss needs of a graded completion of T tokens."""

    loss_mask: tuple[bool, ...]
    """[T] which tokens carry loss; never used as an attention mask."""
    advantage: float
    sampler_logprobs: tuple[float, ...]
    """[T] nats, from the engine."""
    counted: bool = True
    """Whether the loss's denominators count this sequence; False: only its KL is in the loss."""
    excess: float = 0.0
    """Its reward minus the group's mean: the way in which its log-prob should move."""


Row = tuple[Prompt, Sequence[int]]
"""A prompt and a completion's token ids."""


@dataclass(frozen=True)
class PackedGroup:
    """Position of one group in a packed row: its prompt, directly followed by its completions."""

    start: int
    """Position of the prompt's first token."""
    prompt_len: int
    completion_lens: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Groups packed into ONE row without padding: each prompt once, followed by its completions,
    each of which attends to its prompt and itself."""

    input_ids: torch.Tensor
    """[S] int64, on the policy's device."""
    groups: tuple[PackedGroup, ...]
    """Together they cover the row; their completions, in order, are the B rows of the batch."""
    model_inputs: Mapping[str, Any]
    """Further inputs of the policy's module (`position_ids`, `pictures`, `forced`)."""


@dataclass(frozen=True, eq=False)
class TokenOutputs:
    """The outputs of one forward over a `TokenBatch`."""

    logprobs: torch.Tensor
    """[B, C] float32, nats, log pi(token | before) at the sampling temperature; 0 where padded."""
    entropy: torch.Tensor
    """[B, C] float32, nats, detached; 0 where padded."""
    hidden: torch.Tensor
    """[S, D] last hidden states of the renderer's `state_kind` (post-norm if it reads none)."""


@dataclass(frozen=True, eq=False)
class PolicyWeights:
    """What the engine must hold after a sync."""

    kind: Literal["lora", "full"]
    tensors: Mapping[str, torch.Tensor]
    """Detached. LoRA: copies, PEFT's names; full: transformers' names, may alias live weights."""
    lora_config: Mapping[str, Any] | None
    version: int
    """Optimizer steps taken so far."""
    fingerprint: str
    """Hash of the tensors: equal exactly when nothing changed."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn: top_k -1 = off, `num_completions` is G."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    num_completions: int
