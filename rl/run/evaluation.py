"""Evaluates the policy on the held-out samples, beside the user's, reference and stock arms.

Axes: `_P` held-out samples of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.algorithm.metrics import Metrics
from rl.api.engine import Engine
from rl.api.types import Completion, Episode, Prompt, Sample, SamplingParams, Status
from rl.files import json_line, png_bytes, private, write_atomically
from rl.printing import scrubbed
from rl.record.run_record import named_sources, provenance, source_files
from rl.rollout.stream import RolloutContext
from rl.run.chain import BARE, POLICY, check_equal_words
from rl.run.checks import require_grades
from rl.run.contents import contents_of
from rl.run.drift import (
    add_falls,
    add_gain_of_thought,
    add_state_drift,
    add_stock_arm,
    check_references,
)
from rl.run.episode_metrics import add_bare_arm, add_thought, add_unreadable
from rl.run.held_out import score
from rl.run.reward_gap import add_gaps
from rl.run.stock import NUM_FIXED_SAMPLES, FixedArm, Rewards, Stock
from rl.seeds import derive_seed

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl.console import PhaseTimer
    from rl.learner.learner import Learner
    from rl.ranks.dist import Dist
    from rl.record.run_record import BackgroundWriter


_ARMS = (POLICY, BARE, "reference descriptions", "the thought cut", "stock")
NUM_AGAIN = 8
"""Number of held-out samples, over all ranks, whose words the first evaluation draws again. Later
ones draw one sample of each rank again."""


@dataclass(frozen=True, eq=False)
class Arms:
    """One evaluation's episodes, _P per arm; None where a sample does not have the arm."""

    policy: Sequence[Episode]
    bare: Sequence[Episode | None]
    """Episodes of the user's own words."""
    reference: Sequence[Episode | None]
    """Episodes of the reference descriptions, if the data has any."""
    unthought: Sequence[Episode | None]
    """Episodes of the words that the policy writes without thinking."""
    fixed: Mapping[str, FixedArm]
    """Arms whose words training does not change."""


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
    with timer.phase("evaluate"):
        prompts_P = [context.policy.build_prompt(sample) for sample in rank_samples]
        completions_P1, cut_P = _write(context, engine, prompts_P)
        engine.sleep()
        arms = _draw(context, prompts_P, completions_P1, cut_P, dist)
        again_P: Sequence[Mapping[str, Episode | None]] = [{} for _ in rank_samples]
        if learner is not None and not context.compares_pictures:
            num = max(2, NUM_AGAIN // dist.world_size) if iteration == 0 else 1
            again_P = _draw_again(context, learner, prompts_P, arms, num, dist)
        _measure_arms(metrics, arms, dist)
        if iteration == 0:
            untrained = {POLICY: arms.policy, BARE: arms.bare}
            check_references(arms.reference, untrained, hashes_P, dist)
        if config.evaluation.thought_gain:
            add_gain_of_thought(metrics, arms.policy, arms.unthought, hashes_P, dist)
        if config.evaluation.stock_arm and context.makes_images and not context.compares_pictures:
            stock = Stock(context, run_dir, iteration, dist)
            untrained_P = stock.rewards(prompts_P, arms.fixed, arms.policy)
            add_stock_arm(metrics, untrained_P, arms.policy, hashes_P, dist)
            if context.policy.reads_states:
                add_falls(metrics, iteration, untrained_P, arms.fixed, hashes_P, dist)
                num = len(range(dist.rank, NUM_FIXED_SAMPLES, dist.world_size))
                bare_P, _ = arms.fixed["bare"]
                add_state_drift(metrics, context, stock, prompts_P[:num], bare_P[:num], dist)
        engine.wake()
    folder = run_dir / "evaluation" / f"it_{iteration:06d}"
    writer.drain()  # the first evaluation's records are read below
    records_S = _write_records(folder, arms, untrained_P, dist, writer)
    if dist.is_main:
        add_gaps(metrics, context.held_out_only, folder, records_S)
    if not context.compares_pictures:
        stock_P = map(partial(_as_stock, context), arms.bare, untrained_P)
        rows = zip(arms.policy, arms.bare, arms.reference, arms.unthought, stock_P, strict=True)
        arms_P = [
            {**dict(zip(_ARMS, row, strict=True)), **again}
            for row, again in zip(rows, again_P, strict=True)
        ]
        check_equal_words(metrics, arms_P, config.images_per_completion, iteration == 0, dist)
    return metrics


def _as_stock(context: RolloutContext, bare: Episode | None, untrained: Rewards) -> Episode | None:
    """The bare episode with the stock arm's reward, if both arms give the renderer equal words and
    the renderer reads no states; without the picture, which is on disk. Else None."""
    if bare is None or context.policy.reads_states:
        return None
    stock = context.policy.stock_arms(bare.prompt).get("stock")
    if stock is None or stock[1].token_ids != bare.completion.token_ids:
        return None
    return replace(bare, reward=untrained.get("stock"), image=None)


def _write(
    context: RolloutContext, engine: Engine, prompts_P: Sequence[Prompt]
) -> tuple[list[list[Completion]], list[Completion | None]]:
    """(the policy's completions, _P1; its words without thinking, _P). The latter are None for
    prompts that ask for no thought, or without `evaluation.thought_gain`."""
    config, policy = context.config, context.policy
    params = SamplingParams(
        temperature=config.evaluation.temperature,
        top_p=1.0,
        top_k=config.evaluation.top_k,
        max_tokens=config.sampling.max_completion_tokens,
        num_completions=1,
    )
    seeds_P = [derive_seed("evaluation", config.seed, "sampling", p.sample.id) for p in prompts_P]
    completions_P1 = engine.generate(prompts_P, params, seeds_P) if prompts_P else []
    cut_P: list[Completion | None] = [None] * len(prompts_P)
    if config.evaluation.thought_gain:
        cut_prompts_P = map(policy.cut_thought, prompts_P)
        prompts = {p: prompt for p, prompt in enumerate(cut_prompts_P) if prompt is not None}
        seeds = [seeds_P[p] for p in prompts]
        completions_G = engine.generate(list(prompts.values()), params, seeds) if prompts else []
        for p, (completion,) in zip(prompts, completions_G, strict=True):
            cut_P[p] = policy.words_of_cut(completion)
    return completions_P1, cut_P


def _draw(
    context: RolloutContext,
    prompts_P: Sequence[Prompt],
    completions_P1: Sequence[Sequence[Completion]],
    cut_P: Sequence[Completion | None],
    dist: Dist,
) -> Arms:
    """Draw and judge every arm under the current weights. Collective."""
    config, policy = context.config, context.policy
    bare_P: list[Completion | None] = [None] * len(prompts_P)
    if config.bare_arm != "never" and context.makes_images:
        bare_P = [policy.pass_through_completion(prompt.sample) for prompt in prompts_P]
    rollout = score(context, prompts_P, completions_P1, bare_P, dist)
    policy_P = [episode for (episode,) in rollout.episodes]
    require_grades(context, policy_P, dist)
    require_grades(context, rollout.bare_episodes, dist)
    right_P: list[Episode | None] = [None] * len(prompts_P)
    unthought_P = right_P
    if config.evaluation.thought_gain:
        unthought_P = _score_known(context, prompts_P, cut_P, dist)
    fixed: dict[str, FixedArm] = {"bare": (bare_P, rollout.bare_episodes)}
    if config.evaluation.reference_drift:
        texts_P = [prompt.sample.reference for prompt in prompts_P]
        references_P = [None if t is None else policy.encode_completion(t) for t in texts_P]
        right_P = _score_known(context, prompts_P, references_P, dist)
        fixed["reference"] = (references_P, right_P)
    return Arms(policy_P, rollout.bare_episodes, right_P, unthought_P, fixed)


def _score_known(
    context: RolloutContext,
    prompts_P: Sequence[Prompt],
    words_P: Sequence[Completion | None],
    dist: Dist,
) -> list[Episode | None]:
    """Draw and judge `words_P`: episodes, _P; None where there are no words. Collective."""
    pairs = [(p, words) for p, words in enumerate(words_P) if words is not None]
    prompts = [prompts_P[p].plain for p, _ in pairs]
    rollout = score(context, prompts, [[words] for _, words in pairs], [None] * len(pairs), dist)
    episodes: list[Episode | None] = [None] * len(prompts_P)
    for (p, _), (episode,) in zip(pairs, rollout.episodes, strict=True):
        episodes[p] = episode
    require_grades(context, episodes, dist)
    return episodes


def _draw_again(
    context: RolloutContext,
    learner: Learner,
    prompts_P: Sequence[Prompt],
    arms: Arms,
    num: int,
    dist: Dist,
) -> list[dict[str, Episode | None]]:
    """_P, the episodes of the first `num` samples' words by path: the policy's words with nothing
    else beside them, and policy and bare arm through the forward of training. Collective."""
    again_P: list[dict[str, Episode | None]] = [{} for _ in prompts_P]
    prompts, words = prompts_P[:num], [[episode.completion] for episode in arms.policy[:num]]
    bare = [None if episode is None else episode.completion for episode in arms.bare[:num]]
    rollout = score(context, prompts, words, bare, dist, learner=learner)
    for again, (episode,), bare_episode in zip(
        again_P, rollout.episodes, rollout.bare_episodes, strict=False
    ):
        again |= {f"{POLICY}, as in training": episode, f"{BARE}, as in training": bare_episode}
    for p in range(dist.max_int(len(prompts))):
        one = slice(p, p + 1)
        alone = score(context, prompts[one], words[one], [None] * len(words[one]), dist)
        for again, (episode,) in zip(again_P[one], alone.episodes, strict=True):
            again[f"{POLICY}, alone"] = episode
    return again_P


def _measure_arms(metrics: Metrics, arms: Arms, dist: Dist) -> None:
    _measure(metrics, "eval", arms.policy, dist)
    for episode, bare in zip(arms.policy, arms.bare, strict=True):
        add_bare_arm(metrics, "eval/", [episode], bare)
        add_thought(metrics, "eval/", episode)
        reference = episode.prompt.sample.reference
        if reference is not None:
            is_right = reference in (episode.action.text, episode.action.words)
            metrics.add("eval/reference_match", float(is_right))
    _measure(metrics, "eval_reference", [e for e in arms.reference if e is not None], dist)


def _measure(metrics: Metrics, prefix: str, episodes: Sequence[Episode], dist: Dist) -> None:
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
    folder: Path, arms: Arms, untrained_P: Sequence[Rewards], dist: Dist, writer: BackgroundWriter
) -> list[Mapping[str, Any]]:
    """Write a line per held-out sample of all ranks to one file, and the pictures beside it.
    Returns the lines."""
    pictures: dict[Path, Image] = {}
    rows = zip(arms.policy, arms.bare, untrained_P, arms.unthought, strict=True)
    records = [_record(folder, pictures, *row) for row in rows]
    gathered = [record for rank in dist.gather(records) for record in rank]

    def write() -> None:
        for path, picture in pictures.items():
            write_atomically(path, png_bytes(picture))
        if dist.is_main:
            lines = "".join(map(json_line, scrubbed(gathered)))
            write_atomically(folder / "records.jsonl", lines, private)

    writer.put("the evaluation's record", write)
    return gathered


def _record(
    folder: Path,
    pictures: dict[Path, Image],
    episode: Episode,
    bare: Episode | None,
    untrained: Rewards,
    unthought: Episode | None,
) -> Mapping[str, Any]:
    """A sample's record; adds path -> picture to `pictures` for its pictures."""
    sample = episode.prompt.sample
    name = f"{derive_seed('file', sample.id):010d}"

    def add(label: str, picture: Image | None) -> str | None:
        if picture is None:
            return None
        pictures[folder / f"{name}_{label}.png"] = picture
        return f"{name}_{label}.png"

    files = source_files([add(label, picture) for label, picture in named_sources(sample)]) | {
        "image_file": add("image", episode.image),
        "bare_file": add("bare", None if bare is None else bare.image),
    }
    record = provenance(episode, None)
    without_thought = (
        {}
        if unthought is None
        else {"cut_thought_words": unthought.action.words, "cut_thought_reward": unthought.reward}
    )
    # `judge_s` too, so that identical runs have identical records.
    for key in ("sample_id", "group_id", "advantage", "judge_s"):
        del record[key]
    return {
        "id": sample.id,
        **record,
        "reference": sample.reference,
        "shown": contents_of(sample),
        "bare_reward": None if bare is None else bare.reward,
        "stock_reward": untrained.get("stock"),
        **without_thought,
        **files,
    }
