"""Held-out evaluation: with the current weights, with the untrained ones, and the drift between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.algorithm.metrics import Metrics
from rl.api.engine import Engine
from rl.api.policy import Policy
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
Variants = dict[str, tuple[Prompt, Completion]]
"""Of one sample: variant -> (what the policy reads, words)."""
Drawn = dict[str, Episode]
"""Of one sample: variant -> episode."""
SetWeights = Callable[[], AbstractContextManager[None]]
"""Makes a context in which a policy computes its hidden states with certain weights."""


def write(
    context: RolloutContext, engine: Engine, prompts_P: Sequence[Prompt]
) -> list[tuple[Prompt, Completion]]:
    """_P, each prompt with the words that the engine writes for it, as in every evaluation."""
    config = context.config
    params = SamplingParams(
        temperature=config.evaluation.temperature,
        top_p=1.0,
        top_k=config.evaluation.top_k,
        max_tokens=config.sampling.max_completion_tokens,
        num_completions=1,
    )
    if not prompts_P:
        return []
    ids_P = [prompt.sample.id for prompt in prompts_P]
    seeds_P = [derive_seed("evaluation", config.seed, "sampling", each) for each in ids_P]
    groups_P = engine.generate(list(prompts_P), params, seeds_P)
    return [(prompt, words) for prompt, (words,) in zip(prompts_P, groups_P, strict=True)]


def own_words(policy: Policy, prompt: Prompt) -> Variants:
    """The variant `BARE`: the user's words, unchanged; {} if the sample has none."""
    words = policy.pass_through_completion(prompt.sample)
    return {} if words is None else {BARE: (prompt.plain, words)}


def score(
    context: RolloutContext,
    variants_P: Sequence[Variants],
    dist: Dist,
    weights: SetWeights = nullcontext,
    learner: Learner | None = None,
) -> list[Drawn]:
    """_P, render and grade variants. Those of a sample whose prompts are equal but for the thought
    are a group; the first of them decides what the policy reads, and the others have no thought.

    `weights`: for the policy's states. `learner`: its forward is used, with today's weights. Raises
    `Interrupted` on every rank once any was asked to stop. Collective.
    """
    context = replace(context, rewards={**context.rewards, **context.held_out_only})
    groups: dict[tuple[int, Prompt], Variants] = {}
    for p, variants in enumerate(variants_P):
        for name, row in variants.items():
            groups.setdefault((p, row[0].plain), {})[name] = row
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
    drawn_P: list[Drawn] = [{} for _ in variants_P]
    for ((p, _), group), episodes in zip(groups.items(), pending.finished().episodes, strict=True):
        drawn_P[p].update(zip(group, episodes, strict=True))
    return drawn_P


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
    context: RolloutContext, prompts_P: Sequence[Prompt], drawn_P: Sequence[Drawn], dist: Dist
) -> list[Drawn]:
    """_P, the untrained system's episodes, before training: of the stock variants (the renderer's
    own pipeline with the user's words) under the base model's weights, and of fixed words. The
    latter, and the pictures of a policy that `starts_as_stock`, are among those `drawn_P`.
    Collective."""
    policy = context.policy
    stock_P: list[Drawn] = [{STOCK: drawn[POLICY]} for drawn in drawn_P]
    if not policy.starts_as_stock:
        weights = nullcontext if policy.config.lora is None else policy.base_model
        arms_P = [dict(policy.stock_arms(prompt)) for prompt in prompts_P]
        stock_P = score(context, arms_P, dist, weights)
        require_grades(context, chain.from_iterable(stock.values() for stock in stock_P), dist)
    names = FIXED if policy.reads_states else ()
    pairs = zip(stock_P, drawn_P, strict=True)
    return [
        stock | {name: drawn[name] for name in names if name in drawn} for stock, drawn in pairs
    ]


def untrained_rewards(
    run_dir: Path, samples_P: Sequence[Sample], dist: Dist, may_be_missing: bool = False
) -> list[Rewards]:
    """_P, what the untrained system earned; {} for a sample that was not held out then, or whose
    line is lost. All ranks read the file of rank 0, which warns of lost lines. Collective."""
    file, rewards_of = run_dir / FOLDER / "rewards.jsonl", {}
    if dist.is_main:
        rows, damaged = read_rows(file)
        for row in rows:
            if isinstance(row.get("id"), str) and isinstance(row.get("rewards"), Mapping):
                rewards_of[row["id"]] = row["rewards"]
        is_missing = not (may_be_missing or file.is_file())
        if damaged or is_missing or len(rewards_of) < len(rows):
            warn(
                f"{file} is missing or damaged: gains over the untrained system and drift leave "
                "out the samples that it does not have; put it back from a copy"
            )
    rewards_of = dist.broadcast(rewards_of)
    return [rewards_of.get(sample.id, {}) for sample in samples_P]


def write_untrained(
    run_dir: Path,
    samples_P: Sequence[Sample],
    episodes_P: Sequence[Drawn],
    dist: Dist,
    writer: BackgroundWriter,
) -> None:
    """Write what `draw_untrained` gave. Collective."""
    pictures: dict[Path, Image] = {}
    rows = [
        {
            "id": sample.id,
            "rewards": {name: episode.reward for name, episode in episodes.items()},
            "files": {
                name: _picture_file(pictures, run_dir / FOLDER, sample.id, name, episode.image)
                for name, episode in episodes.items()
            },
        }
        for sample, episodes in zip(samples_P, episodes_P, strict=True)
    ]
    _write_rows(run_dir / FOLDER / "rewards.jsonl", rows, pictures, dist, writer)


def add_state_drift(
    metrics: Metrics,
    context: RolloutContext,
    folder: Path,
    variants_P: Sequence[Variants],
    iteration: int,
    dist: Dist,
) -> None:
    """Add the distance of the states of the user's own words, which the renderer reads at their
    tokens, from those before training, which are kept in `folder`. Collective."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save

    policy = context.policy
    num = len(range(dist.rank, NUM_FIXED_SAMPLES, dist.world_size))
    rows = [variants[BARE] for variants in variants_P[:num] if BARE in variants]
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
            if not path.is_file():
                continue
            try:
                moved = state_distance(states, load_file(path)["states"])
                metrics.add("drift/state_l2", moved, weight=len(ids))
            except SafetensorError as error:
                warn(f"{path} is damaged ({error}): drift/state_l2 leaves its sample out")


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
    pairs_P: Sequence[tuple[float | None, float | None]], hashes_P: Sequence[Hashes], dist: Dist
) -> Paired | None:
    """Differences over all ranks' samples that have both rewards; None if none has. Collective."""
    local = [
        (reward - other, hashes)
        for (reward, other), hashes in zip(pairs_P, hashes_P, strict=True)
        if reward is not None and other is not None
    ]
    known = list(chain.from_iterable(dist.gather(local)))
    return paired([difference for difference, _ in known], [hashes for _, hashes in known])


def add_differences(
    metrics: Metrics, rewards_P: Sequence[Rewards], hashes_P: Sequence[Hashes], dist: Dist
) -> None:
    """Add the `DIFFERENCES` with their errors. Collective."""
    for metric, one, other in DIFFERENCES:
        pairs_P = [(rewards.get(one), rewards.get(other)) for rewards in rewards_P]
        difference = _compare(pairs_P, hashes_P, dist)
        if difference is not None:
            metrics.maximum(metric, difference.mean)
            metrics.maximum(f"{metric}_error", difference.error)
            if metric.startswith("drift/"):
                metrics.maximum("drift/alarm", difference.is_alarming)


def check_start(rewards_P: Sequence[Rewards], hashes_P: Sequence[Hashes], dist: Dist) -> None:
    """Warn, before training, if the reference descriptions earn next to nothing, or less than words
    that nobody trained: then no words can earn more."""
    right_P = [rewards.get(REFERENCE) for rewards in rewards_P]
    right = _compare([(reward, 0.0) for reward in right_P], hashes_P, dist)
    if right is None or right.error is None:
        return
    ahead = {}
    for name in (POLICY, BARE):
        others_P = [rewards.get(name) for rewards in rewards_P]
        ahead[name] = _compare(list(zip(others_P, right_P, strict=True)), hashes_P, dist)
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
    again_P: Sequence[Drawn] = [{} for _ in rank_samples]
    drawn_P: list[Drawn] = [{} for _ in rank_samples]
    writer.drain()  # what the first evaluation wrote is read below
    with timer.phase("evaluate"):
        prompts_P = [context.policy.build_prompt(sample) for sample in rank_samples]
        variants_P = _variants(context, engine, prompts_P)
        engine.sleep()
        is_asked = (True, config.evaluation.thought_gain, config.evaluation.reference_drift)
        for names in compress(((POLICY, BARE), (CUT,), (REFERENCE,)), is_asked):
            part_P = [{n: row for n, row in each.items() if n in names} for each in variants_P]
            for drawn, part in zip(drawn_P, score(context, part_P, dist), strict=True):
                drawn |= part
            for name in names:
                require_grades(context, _episodes(drawn_P, name), dist)
        if learner is not None and not context.compares_pictures:
            num = max(2, NUM_AGAIN // dist.world_size) if iteration == 0 else 1
            again_P = _draw_again(context, learner, variants_P, num, dist)
        if config.evaluation.stock_arm and context.makes_images and not context.compares_pictures:
            if iteration == 0:
                episodes_P = draw_untrained(context, prompts_P, drawn_P, dist)
                write_untrained(run_dir, rank_samples, episodes_P, dist, writer)
                writer.drain()
            untrained_P = untrained_rewards(run_dir, rank_samples, dist, learner is None)
            if context.policy.reads_states:
                folder = run_dir / FOLDER
                add_state_drift(metrics, context, folder, variants_P, iteration, dist)
        engine.wake()
    _measure_variants(metrics, drawn_P, untrained_P, dist)
    rewards_P = [
        {name: episode.reward for name, episode in drawn.items()}
        | {f"untrained {name}": reward for name, reward in untrained.items()}
        for drawn, untrained in zip(drawn_P, untrained_P, strict=True)
    ]
    if iteration == 0:
        check_start(rewards_P, hashes_P, dist)
    add_differences(metrics, rewards_P, hashes_P, dist)
    folder = run_dir / "evaluation" / f"it_{iteration:06d}"
    records_S = _write_records(folder, drawn_P, untrained_P, dist, writer)
    if dist.is_main:
        add_gaps(metrics, context.held_out_only, folder, records_S)
    if not context.compares_pictures:
        all_P = [drawn | again for drawn, again in zip(drawn_P, again_P, strict=True)]
        check_equal_words(metrics, all_P, config.images_per_completion, iteration == 0, dist)
    return metrics


def _episodes(drawn_P: Iterable[Drawn], name: str) -> list[Episode]:
    return [drawn[name] for drawn in drawn_P if name in drawn]


def _variants(
    context: RolloutContext, engine: Engine, prompts_P: Sequence[Prompt]
) -> list[Variants]:
    """_P, what an evaluation draws under the current weights, as far as the config asks for it."""
    config, policy = context.config, context.policy
    variants_P: list[Variants] = [{POLICY: row} for row in write(context, engine, prompts_P)]
    has_bare = config.bare_arm != "never" and context.makes_images
    for prompt, variants in zip(prompts_P, variants_P, strict=True):
        variants |= own_words(policy, prompt) if has_bare else {}
        if config.evaluation.reference_drift and prompt.sample.reference is not None:
            reference = policy.encode_completion(prompt.sample.reference)
            variants[REFERENCE] = prompt.plain, reference
    if config.evaluation.thought_gain:
        cut_of = {p: policy.cut_thought(prompt) for p, prompt in enumerate(prompts_P)}
        asked = {p: prompt for p, prompt in cut_of.items() if prompt is not None}
        rows = write(context, engine, list(asked.values()))
        for p, (_, completion) in zip(asked, rows, strict=True):
            variants_P[p][CUT] = prompts_P[p].plain, policy.words_of_cut(completion)
    return variants_P


def _draw_again(
    context: RolloutContext, learner: Learner, variants_P: Sequence[Variants], num: int, dist: Dist
) -> list[Drawn]:
    """_P, the words of the first `num` samples along other paths: the policy's and the user's
    through the forward of training, and the policy's with nothing else beside them. Collective."""
    in_training_P: list[Variants] = [{} for _ in variants_P]
    for again, variants in zip(in_training_P[:num], variants_P, strict=False):
        for name, row in variants.items():
            if name in (POLICY, BARE):
                again[f"{name}, as in training"] = row
    drawn_P = score(context, in_training_P, dist, learner=learner)
    for p in range(dist.max_int(min(num, len(variants_P)))):
        alone = [{f"{POLICY}, alone": variants[POLICY]} for variants in variants_P[p : p + 1]]
        for drawn, episodes in zip(drawn_P[p : p + 1], score(context, alone, dist), strict=True):
            drawn |= episodes
    return drawn_P


def _measure_variants(
    metrics: Metrics, drawn_P: Sequence[Drawn], untrained_P: Sequence[Rewards], dist: Dist
) -> None:
    _measure(metrics, "eval", _episodes(drawn_P, POLICY), dist)
    _measure(metrics, "eval_reference", _episodes(drawn_P, REFERENCE), dist)
    for drawn, untrained in zip(drawn_P, untrained_P, strict=True):
        episode = drawn[POLICY]
        add_bare_arm(metrics, "eval/", [episode], drawn.get(BARE))
        add_thought(metrics, "eval/", episode)
        reference = episode.prompt.sample.reference
        if reference is not None:
            is_right = reference in (episode.action.text, episode.action.words)
            metrics.add("eval/reference_match", is_right)
        if STOCK in untrained:
            metrics.add("eval/stock_ungraded", untrained[STOCK] is None)
        for name, reward in untrained.items():
            if name not in FIXED:
                metrics.add(f"eval/{name}_reward", reward)
    for episode in _episodes(drawn_P, CUT):
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
        metrics.add(f"{prefix}/reward", episode.reward)
        if category := episode.prompt.sample.category:
            metrics.add(f"{prefix}/reward/{category}", episode.reward)
        for part, value in episode.parts.items() if episode.reward is not None else ():
            metrics.add(f"{prefix}/part/{part}", value)


def _write_records(
    folder: Path,
    drawn_P: Sequence[Drawn],
    untrained_P: Sequence[Rewards],
    dist: Dist,
    writer: BackgroundWriter,
) -> list[Mapping[str, Any]]:
    """Write a line per held-out sample of all ranks to one file, and the pictures beside it.
    Returns the lines."""
    pictures: dict[Path, Image] = {}
    rows = []
    for drawn, untrained in zip(drawn_P, untrained_P, strict=True):
        episode, bare, cut = drawn[POLICY], drawn.get(BARE), drawn.get(CUT)
        sample = episode.prompt.sample
        add = partial(_picture_file, pictures, folder, sample.id)
        row = provenance(episode, None)
        # `judge_s` too, so that identical runs have identical records.
        for key in ("sample_id", "group_id", "advantage", "judge_s"):
            del row[key]
        row |= {
            "id": sample.id,
            "reference": sample.reference,
            "shown": contents_of(sample),
            "bare_reward": None if bare is None else bare.reward,
            "stock_reward": untrained.get(STOCK),
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
    gathered = list(chain.from_iterable(dist.gather(rows)))

    def write() -> None:
        for file, picture in pictures.items():
            write_atomically(file, png_bytes(picture))
        if dist.is_main:
            write_atomically(path, "".join(map(json_line, scrubbed(gathered))), private)

    writer.put(f"{path.parent.name}/{path.name}", write)
    return gathered
