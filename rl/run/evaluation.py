"""The held-out run: one completion of each sample, fixed noise, the run's own judge.

Rewards of the policy, of the bare arm (the user's own words) and of the right words where the data
has them, beside what the untrained weights made of the last two. Equal words must earn equal
rewards. Records and pictures go to `<run>/evaluation/it_000000/`.

Axes: `_P` held-out samples of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.algorithm.metrics import Metrics
from rl.api.engine import Engine
from rl.api.types import Completion, Episode, Prompt, Sample, SamplingParams, Status
from rl.files.atomic import json_line, write_atomically
from rl.files.images import png_bytes
from rl.files.private import private
from rl.ranks.seeding import derive_seed
from rl.record.run_record import named_sources, provenance, source_files
from rl.rollout.stream import RolloutContext
from rl.run.contents import shown
from rl.run.drift import add_falls, add_gain_of_thought, add_state_drift, add_stock_arm
from rl.run.episode_metrics import add_bare_arm, add_thought
from rl.run.equal_words import check_equal_words
from rl.run.held_out import score
from rl.run.stock import NUM_FIXED_SAMPLES, FixedArm, Rewards, Stock
from rl.text.scrub import scrubbed

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl.console.console import PhaseTimer
    from rl.ranks.dist import Dist
    from rl.record.writer import BackgroundWriter


_ARMS = ("the policy", "the user's own words", "the right words", "the thought cut", "stock")


def evaluate(
    context: RolloutContext,
    engine: Engine,
    samples: Sequence[Sample],
    iteration: int,
    run_dir: Path,
    dist: Dist,
    timer: PhaseTimer,
    writer: BackgroundWriter,
) -> Metrics:
    """Metrics of `eval/*` over all ranks' samples; every rank passes the same list. Records and
    pictures are handed to `writer`."""
    config = context.config
    mine = list(samples)[dist.rank :: dist.world_size]
    shown_P = [shown(sample) for sample in mine]
    with_bare = config.bare_arm != "never" and context.makes_images
    params = SamplingParams(
        temperature=config.evaluation.temperature,
        top_p=1.0,
        top_k=config.evaluation.top_k,
        max_tokens=config.sampling.max_completion_tokens,
        num_completions=1,
    )
    metrics = Metrics()
    with timer.phase("evaluate"):
        prompts_P = [context.policy.build_prompt(sample) for sample in mine]
        seeds_P = [derive_seed("evaluation", config.seed, "sampling", s.id) for s in mine]
        completions_P1 = engine.generate(prompts_P, params, seeds_P) if mine else []
        cut_P = _with_thoughts_cut(context, engine, prompts_P, params, seeds_P)
        engine.sleep()
        bare_P = [context.policy.pass_through_completion(s) if with_bare else None for s in mine]
        unthought_P: list[Episode | None] = [None] * len(mine)
        rollout = score(context, prompts_P, completions_P1, bare_P, dist)
        episodes = [episode for (episode,) in rollout.episodes]
        bare_episodes = rollout.bare_episodes
        _measure(metrics, "eval", episodes)
        for episode, bare in zip(episodes, bare_episodes, strict=True):
            add_bare_arm(metrics, "eval/", [episode], bare)
            add_thought(metrics, "eval/", episode)
        for episode in episodes:
            reference = episode.prompt.sample.reference
            if reference is not None:
                is_right = reference in (episode.action.text, episode.action.words)
                metrics.add("eval/reference_match", float(is_right))
        if config.evaluation.thought_gain:
            unthought_P = _score_known(context, prompts_P, cut_P, dist)
            add_gain_of_thought(metrics, episodes, unthought_P, shown_P, dist)
        fixed: dict[str, FixedArm] = {"bare": (bare_P, bare_episodes)}
        right_P: list[Episode | None] = [None] * len(mine)
        if config.evaluation.reference_drift:
            encode = context.policy.encode_completion
            references_P = [None if s.reference is None else encode(s.reference) for s in mine]
            right_P = _score_known(context, prompts_P, references_P, dist)
            _measure(metrics, "eval_reference", [e for e in right_P if e is not None])
            fixed["reference"] = (references_P, right_P)
        untrained_P: list[Rewards] = [{} for _ in mine]
        # What compares the pictures of a group has no marks for one that is drawn apart.
        compares = any(reward.scores_groups() for reward in context.rewards.values())
        if config.evaluation.stock_arm and context.makes_images and not compares:
            stock = Stock(context, run_dir, iteration, dist)
            untrained_P = stock.rewards(prompts_P, fixed, episodes)
            add_stock_arm(metrics, untrained_P, episodes, shown_P, dist)
            if context.policy.reads_states:
                add_falls(metrics, iteration, untrained_P, fixed, shown_P, dist)
                num = len(range(dist.rank, NUM_FIXED_SAMPLES, dist.world_size))
                add_state_drift(metrics, context, stock, prompts_P[:num], bare_P[:num], dist)
        engine.wake()
    folder = run_dir / "evaluation" / f"it_{iteration:06d}"
    arms_P = (bare_episodes, untrained_P, unthought_P)
    _write_records(folder, episodes, *arms_P, dist, writer)
    if not compares:
        stock_P = map(partial(_as_stock, context), bare_episodes, untrained_P)
        arms = zip(episodes, bare_episodes, right_P, unthought_P, stock_P, strict=True)
        named_P = [dict(zip(_ARMS, of_sample, strict=True)) for of_sample in arms]
        check_equal_words(named_P, config.images_per_completion, iteration == 0, dist)
    return metrics


def _with_thoughts_cut(
    context: RolloutContext,
    engine: Engine,
    prompts_P: Sequence[Prompt],
    params: SamplingParams,
    seeds_P: Sequence[int],
) -> list[Completion | None]:
    """_P, the words that the policy writes without thinking; None where nobody asked for a thought,
    or what it is worth."""
    found: list[Completion | None] = [None] * len(prompts_P)
    if context.config.evaluation.thought_gain:
        cut_P = [context.policy.cut_thought(prompt) for prompt in prompts_P]
        asked = {p: prompt for p, prompt in enumerate(cut_P) if prompt is not None}
        seeds = [seeds_P[p] for p in asked]
        written = engine.generate(list(asked.values()), params, seeds) if asked else []
        for p, (completion,) in zip(asked, written, strict=True):
            found[p] = context.policy.words_of_cut(completion)
    return found


def _score_known(
    context: RolloutContext,
    prompts_P: Sequence[Prompt],
    words_P: Sequence[Completion | None],
    dist: Dist,
) -> list[Episode | None]:
    """_P, None where there are no words. Collective."""
    known = [(p, words) for p, words in enumerate(words_P) if words is not None]
    asked = [prompts_P[p].plain for p, _ in known]
    rollout = score(context, asked, [[words] for _, words in known], [None] * len(known), dist)
    episodes: list[Episode | None] = [None] * len(prompts_P)
    for (p, _), (episode,) in zip(known, rollout.episodes, strict=True):
        episodes[p] = episode
    return episodes


def _as_stock(context: RolloutContext, bare: Episode | None, untrained: Rewards) -> Episode | None:
    """The bare arm with the stock arm's reward, where both hand the renderer the same words, which
    no weights change; its picture is on the disk."""
    if bare is None or context.policy.reads_states:
        return None
    stock = context.policy.stock_arms(bare.prompt).get("stock")
    if stock is None or stock[1].token_ids != bare.completion.token_ids:
        return None
    return replace(bare, reward=untrained.get("stock"), image=None)


def _measure(metrics: Metrics, prefix: str, episodes: Sequence[Episode]) -> None:
    for episode in episodes:
        metrics.add(f"{prefix}/ungraded", float(episode.status is Status.UNGRADED))
        if episode.reward is None:
            continue
        metrics.add(f"{prefix}/reward", episode.reward)
        if episode.prompt.sample.category:
            metrics.add(f"{prefix}/reward/{episode.prompt.sample.category}", episode.reward)
        for part, value in episode.parts.items():
            metrics.add(f"{prefix}/part/{part}", value)


def _write_records(
    folder: Path,
    episodes: Sequence[Episode],
    bare_episodes: Sequence[Episode | None],
    untrained_P: Sequence[Rewards],
    unthought_P: Sequence[Episode | None],
    dist: Dist,
    writer: BackgroundWriter,
) -> None:
    """One line per held-out sample (all ranks' in rank 0's file), pictures beside it."""
    pictures: dict[Path, Image] = {}
    arms = zip(episodes, bare_episodes, untrained_P, unthought_P, strict=True)
    records = [_record(folder, pictures, *of_sample) for of_sample in arms]
    gathered = [record for rank in dist.gather(records) for record in rank]

    def write() -> None:
        for path, picture in pictures.items():
            write_atomically(path, png_bytes(picture))
        if dist.is_main:
            lines = "".join(map(json_line, scrubbed(gathered)))
            write_atomically(folder / "records.jsonl", lines, private)

    writer.put("the held-out run's record", write)


def _record(
    folder: Path,
    pictures: dict[Path, Image],
    episode: Episode,
    bare: Episode | None,
    untrained: Rewards,
    unthought: Episode | None,
) -> Mapping[str, Any]:
    """A sample's line; adds its pictures to `pictures`, by where they are to be."""
    sample = episode.prompt.sample
    name = f"{derive_seed('file', sample.id):010d}"

    def kept(what: str, picture: Image | None) -> str | None:
        if picture is None:
            return None
        pictures[folder / f"{name}_{what}.png"] = picture
        return f"{name}_{what}.png"

    files = source_files([kept(what, picture) for what, picture in named_sources(sample)]) | {
        "image_file": kept("image", episode.image),
        "bare_file": kept("bare", None if bare is None else bare.image),
    }
    told = provenance(episode, None)
    without_thought = (
        {}
        if unthought is None
        else {"cut_thought_words": unthought.action.words, "cut_thought_reward": unthought.reward}
    )
    # Seconds, too: the records of two runs that are one and the same are the same.
    for key in ("sample_id", "group_id", "advantage", "judge_s"):
        del told[key]
    return {
        "id": sample.id,
        **told,
        "reference": sample.reference,
        "shown": shown(sample),
        "bare_reward": None if bare is None else bare.reward,
        "stock_reward": untrained.get("stock"),
        **without_thought,
        **files,
    }
