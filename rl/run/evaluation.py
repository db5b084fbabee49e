"""Held-out evaluation: with the current weights, with the untrained ones, and the drift between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.algorithm.metrics import Metrics
from rl.api.engine import Engine
from rl.api.types import Completion, Episode, HiddenStates, Prompt, Sample, SamplingParams, Status
from rl.files import json_line, png_bytes, private, read_rows, write_atomically
from rl.learner.train_step import Forwards, NoGradForwards
from rl.printing import scrubbed
from rl.progress import PhaseTimer, warn
from rl.ranks import signals
from rl.record.checkpoint import retry_until_space
from rl.record.run_record import named_sources, provenance, source_files
from rl.rollout.episodes import Interrupted, raise_if_interrupted
from rl.rollout.stream import RolloutContext, Sampled, begin
from rl.run.alarms import add_gaps
from rl.run.checks import BARE, POLICY, check_equal_words, contents_of, require_grades
from rl.run.episode_metrics import add_bare_arm, add_thought, add_unreadable
from rl.run.paired import Paired, paired
from rl.seeds import derive_seed

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from rl.learner.learner import Learner
    from rl.progress import PhaseTimer
    from rl.ranks.dist import Dist
    from rl.record.run_record import BackgroundWriter

# ---- variants ------------------------------------------------------------------------------------
# A variant is what one writer says for the held-out samples: the policy, the user, the data's
# references, the renderer's own pipeline. All variants are drawn and graded as in training, with
# noise that depends only on the sample, so that pictures differ only by words and weights.
#
# Axes: `_P` held-out samples of this rank.

CUT, REFERENCE, STOCK = "cut_thought", "reference", "stock"
"""Variants beside `POLICY` and `BARE`: the policy's words without thinking, the data's reference
words, and the renderer's own pipeline with the user's words."""
Rows = dict[int, tuple[Prompt, Completion]]
"""Number of a sample on this rank -> (what the policy reads, words). Samples may be absent."""
Variants = Mapping[str, Rows]
Drawn = Mapping[str, Mapping[int, Episode]]
"""Variant -> number of the sample -> its episode."""
SetWeights = Callable[[], AbstractContextManager[None]]
"""Makes a context in which a policy computes its hidden states with certain weights."""


def write(context: RolloutContext, engine: Engine, prompts: Mapping[int, Prompt]) -> Rows:
    """The words that the engine writes for this rank's samples, as in every evaluation."""
    config = context.config
    params = SamplingParams(
        temperature=config.evaluation.temperature,
        top_p=1.0,
        top_k=config.evaluation.top_k,
        max_tokens=config.sampling.max_completion_tokens,
        num_completions=1,
    )
    if not prompts:
        return {}
    ids = [prompt.sample.id for prompt in prompts.values()]
    seeds = [derive_seed("evaluation", config.seed, "sampling", each) for each in ids]
    groups = engine.generate(list(prompts.values()), params, seeds)
    rows = zip(prompts.items(), groups, strict=True)
    return {p: (prompt, completion) for (p, prompt), (completion,) in rows}


def own_words(context: RolloutContext, prompts: Mapping[int, Prompt]) -> Rows:
    """The user's words, unchanged, for the samples that have them."""
    policy = context.policy
    words = {p: policy.pass_through_completion(prompt.sample) for p, prompt in prompts.items()}
    return {p: (prompts[p].plain, each) for p, each in words.items() if each is not None}


def score(
    context: RolloutContext,
    variants: Variants,
    dist: Dist,
    weights: SetWeights = nullcontext,
    learner: Learner | None = None,
) -> dict[str, dict[int, Episode]]:
    """Render and grade variants. Those of a sample whose prompts are equal but for the thought are
    a group; the first of them decides what the policy reads, and the others have no thought.

    `weights`: for the policy's states. `learner`: its forward is used, with today's weights. Raises
    `Interrupted` on every rank once any was asked to stop. Collective.
    """
    context = replace(context, rewards={**context.rewards, **context.held_out_only})
    groups: dict[tuple[int, Prompt], dict[str, tuple[Prompt, Completion]]] = {}
    for p in sorted({p for words in variants.values() for p in words}):
        for name, words in variants.items():
            if p in words:
                groups.setdefault((p, words[p][0].plain), {})[name] = words[p]
    rows_G = [list(group.values()) for group in groups.values()]
    prompts = [rows[0][0] for rows in rows_G]
    sampled = Sampled(
        prompts,
        [[completion for _, completion in rows] for rows in rows_G],
        [derive_seed("evaluation", context.config.seed, p.sample.id) for p in prompts],
        [f"evaluation/{prompt.sample.id}" for prompt in prompts],
        [None] * len(prompts),
    )
    nums = [sum(prompt is rows[0][0] for prompt, _ in rows) for rows in rows_G]
    forwards: Forwards
    if learner is not None:
        forwards = learner.begin(0, prompts, sampled.token_ids, nums, False)
    else:
        budget = context.config.optimizer.max_tokens_per_micro_batch
        forwards = NoGradForwards(
            context.policy, prompts, sampled.token_ids, budget, dist, weights, nums
        )
    timer = PhaseTimer()  # discarded: the caller's phase includes all of this
    with suppress(Interrupted):
        pending = begin(context, sampled, forwards, timer, signals.stop_received)
        for _ in pending.groups(timer, signals.stop_received):
            pass
    raise_if_interrupted(dist)
    drawn: dict[str, dict[int, Episode]] = {name: {} for name in variants}
    for ((p, _), group), episodes in zip(groups.items(), pending.finished().episodes, strict=True):
        for name, episode in zip(group, episodes, strict=True):
            drawn[name][p] = episode
    return drawn


# ---- stock ---------------------------------------------------------------------------------------
# Before the first iteration the untrained system is measured on the held-out samples. Later
# evaluations read from disk what it earned:
#
#     <run>/stock/rewards.jsonl          a line per sample: id, rewards and pictures by variant
#     <run>/stock/<name>_<variant>.png   these pictures
#     <run>/stock/<name>.safetensors     states of the user's words, for the first samples
#
# Axes: `_P` held-out samples of this rank, `_T` tokens.

FOLDER = "stock"
Rewards = Mapping[str, float | None]
"""Variant (of the stock pipeline, or of fixed words) -> reward; None if it is not graded."""
FIXED = (BARE, REFERENCE)
"""Variants whose words training does not change."""

NUM_FIXED_SAMPLES = 8
"""Number of held-out samples, over all ranks, whose words' states are compared. Each takes a
forward and a file of [T, D] (1 MB for 150 tokens of Qwen2.5-VL-7B)."""


def draw_untrained(
    context: RolloutContext, prompts_P: Sequence[Prompt], drawn: Drawn, dist: Dist
) -> Drawn:
    """The untrained system's episodes, before training: of the stock variants (the renderer's own
    pipeline with the user's words) under the base model's weights, and of fixed words. The latter,
    and the pictures of a policy that `starts_as_stock`, are among those `drawn`. Collective."""
    policy = context.policy
    fixed = {name: drawn[name] for name in FIXED if name in drawn and policy.reads_states}
    if policy.starts_as_stock:
        return {STOCK: drawn[POLICY], **fixed}
    variants: dict[str, Rows] = {}
    for p, prompt in enumerate(prompts_P):
        for name, row in policy.stock_arms(prompt).items():
            variants.setdefault(name, {})[p] = row
    weights = nullcontext if policy.config.lora is None else policy.base_model
    stock = score(context, variants, dist, weights)
    require_grades(context, chain.from_iterable(of_p.values() for of_p in stock.values()), dist)
    return {**stock, **fixed}


def untrained_rewards(run_dir: Path, samples_P: Sequence[Sample], dist: Dist) -> list[Rewards]:
    """_P, what the untrained system earned; {} for a sample that was not held out then. All ranks
    read the file of rank 0. Collective."""
    rows = read_rows(run_dir / FOLDER / "rewards.jsonl")[0] if dist.is_main else []
    rewards_of = {row["id"]: row["rewards"] for row in dist.broadcast(rows)}
    return [rewards_of.get(sample.id, {}) for sample in samples_P]


def write_untrained(run_dir: Path, episodes: Drawn, dist: Dist, writer: BackgroundWriter) -> None:
    """Write what `draw_untrained` gave. Collective."""
    of_sample: dict[str, dict[str, Episode]] = {}
    for name, of_p in episodes.items():
        for episode in of_p.values():
            of_sample.setdefault(episode.prompt.sample.id, {})[name] = episode
    pictures: dict[Path, Image] = {}
    rows = [
        {
            "id": sample_id,
            "rewards": {name: episode.reward for name, episode in variants.items()},
            "files": {
                name: _picture_file(pictures, run_dir / FOLDER, sample_id, name, episode.image)
                for name, episode in variants.items()
            },
        }
        for sample_id, variants in of_sample.items()
    ]
    _write_rows(run_dir / FOLDER / "rewards.jsonl", rows, pictures, dist, writer)


def add_state_drift(
    metrics: Metrics, context: RolloutContext, folder: Path, bare: Rows, iteration: int, dist: Dist
) -> None:
    """Add the distance of the words' states, which the renderer reads at their tokens, from those
    before training, which are kept in `folder`. Collective."""
    from safetensors.torch import load_file, save

    policy = context.policy
    num = len(range(dist.rank, NUM_FIXED_SAMPLES, dist.world_size))
    rows = [row for p, row in bare.items() if p < num]
    ids_P1 = [[words.token_ids] for _, words in rows]
    budget = context.config.optimizer.max_tokens_per_micro_batch
    forwards = NoGradForwards(policy, [prompt for prompt, _ in rows], ids_P1, budget, dist)
    for micro_batch in forwards.micro_batches:
        actions = policy.decode_actions(micro_batch.rows, *forwards.states(micro_batch))
        members = zip(micro_batch.members, micro_batch.rows, actions, strict=True)
        for (p, _), (prompt, ids), action in members:
            if p < 0 or not isinstance(action.payload, HiddenStates):
                continue  # a filler, or a renderer that reads no states
            states = action.payload.embeds[-len(ids) :].cpu().contiguous()
            path = folder / f"{_name_of(prompt.sample.id)}.safetensors"
            if iteration == 0:
                write = partial(write_atomically, path, save({"states": states}), private)
                retry_until_space(write, folder, path.name)
            if path.is_file():
                moved = state_distance(states, load_file(path)["states"])
                metrics.add("drift/state_l2", moved, weight=len(ids))


# ---- drift ---------------------------------------------------------------------------------------
# Compares an evaluation with the untrained system: gains, losses and hidden-state drift.
#
# Axes: `_P` held-out samples of this rank, `_T` tokens.

LEAST_OF_REFERENCES = 0.2
"""In a chain that works the reference descriptions earn more; the small configs: 0.89 to 1."""
DIFFERENCES = (
    ("eval/gain_of_thought", POLICY, CUT),
    ("eval/gain_over_stock", POLICY, f"untrained {STOCK}"),
    *((f"drift/{name}_fall", f"untrained {name}", name) for name in FIXED),
)
"""Metric, and the two variants of whose rewards it is the mean difference."""
Hashes = Sequence[str]
"""Hashes of one sample's contents (`contents_of`)."""


def state_distance(states_TD: torch.Tensor, base_TD: torch.Tensor) -> float:
    """Relative L2 distance |h - h0| / |h0|: mean over the tokens of states [T, D] of any dtype and
    device, computed in float32."""
    base = base_TD.float()
    moved_TD = states_TD.to(base.device).float() - base
    return float((moved_TD.norm(dim=-1) / base.norm(dim=-1)).mean())


def _compare(
    rewards_P: Sequence[float | None],
    others_P: Sequence[float | None],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> Paired | None:
    """Differences over all ranks' samples that have both rewards; None if none has. Collective."""
    local_pairs = [
        (reward - other, hashes)
        for reward, other, hashes in zip(rewards_P, others_P, hashes_P, strict=True)
        if reward is not None and other is not None
    ]
    pairs = [pair for rank_pairs in dist.gather(local_pairs) for pair in rank_pairs]
    return paired([difference for difference, _ in pairs], [hashes for _, hashes in pairs])


def add_differences(
    metrics: Metrics,
    rewards: Mapping[str, Sequence[float | None]],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Add the `DIFFERENCES` with their errors; `rewards`: _P by variant. Collective."""
    for metric, one, other in DIFFERENCES:
        if one not in rewards or other not in rewards:
            continue
        difference = _compare(rewards[one], rewards[other], hashes_P, dist)
        if difference is not None:
            metrics.maximum(metric, difference.mean)
            if difference.error is not None:
                metrics.maximum(f"{metric}_error", difference.error)
            if metric.startswith("drift/"):
                metrics.maximum("drift/alarm", float(difference.is_alarming))


def check_start(
    rewards: Mapping[str, Sequence[float | None]], hashes_P: Sequence[Hashes], dist: Dist
) -> None:
    """Warn, before training, if the reference descriptions earn next to nothing, or less than words
    that nobody trained: then no words can earn more. `rewards`: _P by variant. Collective."""
    right_P = rewards.get(REFERENCE, [None] * len(hashes_P))
    right = _compare(right_P, [0.0] * len(hashes_P), hashes_P, dist)
    if right is None or right.error is None:
        return
    ahead = {name: _compare(rewards[name], right_P, hashes_P, dist) for name in (POLICY, BARE)}
    is_behind = any(each is not None and each.is_alarming for each in ahead.values())
    if dist.is_main and (is_behind or right.mean < LEAST_OF_REFERENCES):
        beside = [f", {name} {right.mean + each.mean:.3f}" for name, each in ahead.items() if each]
        warn(
            f"before training the reference descriptions earn {right.mean:.3f}"
            f"{''.join(beside)}: training can hardly earn more. If a "
            "person finds these words right, a link between words and score is broken: the "
            "policy's states, the renderer's source pictures, or the instruction and picture that "
            "the judge reads belong to another sample. Look at evaluation/it_000000 and at what "
            "`rl judge audit` says of the judge by itself"
        )


# ---- evaluation ----------------------------------------------------------------------------------
# Evaluates all variants on the held-out samples.
#
# Axes: `_P` held-out samples of this rank.

NUM_AGAIN = 8
"""Number of held-out samples, over all ranks, whose words the first evaluation draws again. Later
ones draw one sample of each rank again."""


def evaluate(
    context: RolloutContext,
    engine: Engine,
    samples: Sequence[Sample],
    iteration: int,
    run_dir: Path,
    dist: Dist,
    timer: PhaseTimer,
    writer: BackgroundWriter,
    learner: Learner | None = None,
) -> Metrics:
    """Metrics `eval/*` of all ranks' samples; every rank passes the same list. `writer` writes
    records and pictures. With a `learner`, the words of a few samples are drawn again, alone and as
    training draws them, to prove that pictures and scores belong to their words."""
    config, metrics = context.config, Metrics()
    rank_samples = list(samples)[dist.rank :: dist.world_size]
    hashes_P = [contents_of(sample) for sample in rank_samples]
    untrained_P: Sequence[Rewards] = [{} for _ in rank_samples]
    again: Drawn = {}
    writer.drain()  # what the first evaluation wrote is read below
    with timer.phase("evaluate"):
        prompts_P = [context.policy.build_prompt(sample) for sample in rank_samples]
        variants = _variants(context, engine, prompts_P)
        engine.sleep()
        drawn: dict[str, dict[int, Episode]] = {}
        for names in ((POLICY, BARE), (CUT,), (REFERENCE,)):
            if part := {name: variants[name] for name in names if name in variants}:
                drawn |= score(context, part, dist)
            for name in part:
                require_grades(context, drawn[name].values(), dist)
        if learner is not None and not context.compares_pictures:
            num = max(2, NUM_AGAIN // dist.world_size) if iteration == 0 else 1
            again = _draw_again(context, learner, variants, num, dist)
        if config.evaluation.stock_arm and context.makes_images and not context.compares_pictures:
            if iteration == 0:
                untrained = draw_untrained(context, prompts_P, drawn, dist)
                write_untrained(run_dir, untrained, dist, writer)
                writer.drain()
            untrained_P = untrained_rewards(run_dir, rank_samples, dist)
            if context.policy.reads_states:
                folder = run_dir / FOLDER
                add_state_drift(metrics, context, folder, variants[BARE], iteration, dist)
        engine.wake()
    _measure_variants(metrics, drawn, untrained_P, dist)
    rewards = {
        name: [of_p[p].reward if p in of_p else None for p in range(len(prompts_P))]
        for name, of_p in drawn.items()
    }
    for name in (STOCK, *FIXED):
        rewards[f"untrained {name}"] = [untrained.get(name) for untrained in untrained_P]
    if iteration == 0:
        check_start(rewards, hashes_P, dist)
    add_differences(metrics, rewards, hashes_P, dist)
    folder = run_dir / "evaluation" / f"it_{iteration:06d}"
    records_S = _write_records(folder, drawn, untrained_P, dist, writer)
    if dist.is_main:
        add_gaps(metrics, context.held_out_only, folder, records_S)
    if not context.compares_pictures:
        by_sample_P = [
            {name: of_p[p] for name, of_p in {**drawn, **again}.items() if p in of_p}
            for p in range(len(prompts_P))
        ]
        check_equal_words(metrics, by_sample_P, config.images_per_completion, iteration == 0, dist)
    return metrics


def _variants(
    context: RolloutContext, engine: Engine, prompts_P: Sequence[Prompt]
) -> dict[str, Rows]:
    """What an evaluation draws under the current weights. The last two variants exist only if the
    config asks for them."""
    config, policy = context.config, context.policy
    prompts = dict(enumerate(prompts_P))
    variants = {POLICY: write(context, engine, prompts), BARE: Rows()}
    if config.bare_arm != "never" and context.makes_images:
        variants[BARE] = own_words(context, prompts)
    if config.evaluation.thought_gain:
        cut_prompts = {p: policy.cut_thought(prompt) for p, prompt in prompts.items()}
        asked = {p: prompt for p, prompt in cut_prompts.items() if prompt is not None}
        variants[CUT] = {
            p: (prompts[p].plain, policy.words_of_cut(completion))
            for p, (_, completion) in write(context, engine, asked).items()
        }
    if config.evaluation.reference_drift:
        variants[REFERENCE] = {
            p: (prompt.plain, policy.encode_completion(prompt.sample.reference))
            for p, prompt in prompts.items()
            if prompt.sample.reference is not None
        }
    return variants


def _draw_again(
    context: RolloutContext, learner: Learner, variants: Variants, num: int, dist: Dist
) -> Drawn:
    """The first `num` samples' words along other paths: the policy's and the user's through the
    forward of training, and the policy's with nothing else beside them. Collective."""
    first = {n: {p: r for p, r in variants[n].items() if p < num} for n in (POLICY, BARE)}
    in_training = {f"{name}, as in training": rows for name, rows in first.items()}
    again = score(context, in_training, dist, learner=learner)
    name = f"{POLICY}, alone"
    again[name] = {}
    for p in range(dist.max_int(len(first[POLICY]))):
        one = {p: first[POLICY][p]} if p in first[POLICY] else {}
        again[name] |= score(context, {name: one}, dist)[name]
    return again


def _measure_variants(
    metrics: Metrics, drawn: Drawn, untrained_P: Sequence[Rewards], dist: Dist
) -> None:
    _measure(metrics, "eval", drawn[POLICY].values(), dist)
    _measure(metrics, "eval_reference", drawn.get(REFERENCE, {}).values(), dist)
    for p, episode in drawn[POLICY].items():
        add_bare_arm(metrics, "eval/", [episode], drawn[BARE].get(p))
        add_thought(metrics, "eval/", episode)
        reference = episode.prompt.sample.reference
        if reference is not None:
            is_right = reference in (episode.action.text, episode.action.words)
            metrics.add("eval/reference_match", float(is_right))
        if STOCK in untrained_P[p]:
            metrics.add("eval/stock_ungraded", float(untrained_P[p][STOCK] is None))
        for name, reward in untrained_P[p].items():
            if name not in FIXED and reward is not None:
                metrics.add(f"eval/{name}_reward", reward)
    for episode in drawn.get(CUT, {}).values():
        if episode.reward is not None:
            metrics.add(f"eval/{CUT}_reward", episode.reward)


def _measure(metrics: Metrics, prefix: str, episodes: Collection[Episode], dist: Dist) -> None:
    """Means over the episodes, with bounds if replies about any were unreadable. Collective."""
    [num_unreadable] = dist.sum_floats([sum(episode.unreadable for episode in episodes)])
    for episode in episodes:
        metrics.add(f"{prefix}/ungraded", float(episode.status is Status.UNGRADED))
        add_unreadable(metrics, prefix, episode)
        if num_unreadable and (episode.unreadable or episode.reward is not None):
            metrics.add(f"{prefix}/reward_low", episode.reward or 0.0)
            metrics.add(f"{prefix}/reward_high", 1.0 if episode.unreadable else episode.reward or 0)
        if episode.reward is None:
            continue
        metrics.add(f"{prefix}/reward", episode.reward)
        if episode.prompt.sample.category:
            metrics.add(f"{prefix}/reward/{episode.prompt.sample.category}", episode.reward)
        for part, value in episode.parts.items():
            metrics.add(f"{prefix}/part/{part}", value)


def _write_records(
    folder: Path, drawn: Drawn, untrained_P: Sequence[Rewards], dist: Dist, writer: BackgroundWriter
) -> list[Mapping[str, Any]]:
    """Write a line per held-out sample of all ranks to one file, and the pictures beside it.
    Returns the lines."""
    pictures: dict[Path, Image] = {}
    rows = []
    for p, episode in drawn[POLICY].items():
        sample = episode.prompt.sample
        add = partial(_picture_file, pictures, folder, sample.id)
        bare, cut = drawn[BARE].get(p), drawn.get(CUT, {}).get(p)
        row = provenance(episode, None)
        # `judge_s` too, so that identical runs have identical records.
        for key in ("sample_id", "group_id", "advantage", "judge_s"):
            del row[key]
        row |= {
            "id": sample.id,
            "reference": sample.reference,
            "shown": contents_of(sample),
            "bare_reward": None if bare is None else bare.reward,
            "stock_reward": untrained_P[p].get(STOCK),
            "image_file": add("image", episode.image),
            "bare_file": add("bare", None if bare is None else bare.image),
            **source_files([add(label, picture) for label, picture in named_sources(sample)]),
        }
        if cut is not None:
            row |= {"cut_thought_words": cut.action.words, "cut_thought_reward": cut.reward}
        rows.append(row)
    return _write_rows(folder / "records.jsonl", rows, pictures, dist, writer)


def _name_of(sample_id: str) -> str:
    """A name for a sample's files."""
    return f"{derive_seed('file', sample_id):010d}"


def _picture_file(
    pictures: dict[Path, Image], folder: Path, sample_id: str, label: str, picture: Image | None
) -> str | None:
    """The name of a picture's file in `folder`, which is added to `pictures`."""
    if picture is None:
        return None
    name = f"{_name_of(sample_id)}_{label}.png"
    pictures[folder / name] = picture
    return name


def _write_rows(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    pictures: Mapping[Path, Image],
    dist: Dist,
    writer: BackgroundWriter,
) -> list[Mapping[str, Any]]:
    """Write this rank's pictures, and the rows of all ranks, which it returns, to one file. In the
    background. Collective."""
    gathered = [row for rank in dist.gather(rows) for row in rank]

    def write() -> None:
        for file, picture in pictures.items():
            write_atomically(file, png_bytes(picture))
        if dist.is_main:
            write_atomically(path, "".join(map(json_line, scrubbed(gathered))), private)

    writer.put(f"{path.parent.name}/{path.name}", write)
    return gathered
