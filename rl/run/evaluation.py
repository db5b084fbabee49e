"""The held-out run of the same rollout: one completion each, fixed noise, the run's own judge.

What: rewards on the first `evaluation.num_samples` validation samples, on the bare arm (the user's
own words), and on their reference completions where the data has them (a renderer that reads
drifted states falls there, a policy that writes worse words does not). What not: training. Records
and pictures land in `<run>/evaluation/it_000000/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.algorithm.metrics import Metrics
from rl.api.engine import Engine
from rl.api.types import Completion, Episode, Prompt, Sample, SamplingParams, Status
from rl.files.atomic import json_line, write_atomically
from rl.judge.client import JudgeError
from rl.learner.micro_batches import Inference
from rl.ranks.seeding import derive_seed
from rl.rollout.consensus import refuse_together
from rl.rollout.stream import RolloutContext, Sampled, begin
from rl.run.episode_metrics import add_bare_arm

if TYPE_CHECKING:
    from rl.ranks.dist import Dist
    from rl.record.console import PhaseTimer


def evaluate(
    context: RolloutContext,
    engine: Engine,
    samples: Sequence[Sample],
    iteration: int,
    run_dir: Path,
    dist: Dist,
    timer: PhaseTimer,
) -> Metrics:
    """Metrics of `eval/*` over all ranks' samples; every rank passes the same list."""
    config = context.config
    mine = list(samples)[dist.rank :: dist.world_size]
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
        engine.sleep()
        bare_P = [context.policy.pass_through_completion(s) if with_bare else None for s in mine]
        episodes, bare_episodes = _score(context, prompts_P, completions_P1, bare_P, timer, dist)
        _measure(metrics, "eval", episodes)
        for episode, bare in zip(episodes, bare_episodes, strict=True):
            add_bare_arm(metrics, "eval/", [episode], bare)
        for episode in episodes:
            reference = episode.prompt.sample.reference
            if reference is not None:
                metrics.add("eval/reference_match", float(episode.action.text == reference))
        if config.evaluation.reference_drift:
            known = [prompt for prompt in prompts_P if prompt.sample.reference is not None]
            references = [
                [context.policy.encode_completion(str(prompt.sample.reference))] for prompt in known
            ]
            nothing = [None] * len(known)
            scored, _ = _score(context, known, references, nothing, timer, dist)
            _measure(metrics, "eval_reference", scored)
        engine.wake()
    _write_records(run_dir / "evaluation" / f"it_{iteration:06d}", episodes, bare_episodes, dist)
    return metrics


def _score(
    context: RolloutContext,
    prompts_P: Sequence[Prompt],
    completions_P1: Sequence[Sequence[Completion]],
    bare_P: Sequence[Completion | None],
    timer: PhaseTimer,
    dist: Dist,
) -> tuple[list[Episode], list[Episode | None]]:
    # The noise depends on the sample alone: before and after training differ by the words only.
    noise_seeds = [derive_seed("evaluation", context.config.seed, p.sample.id) for p in prompts_P]
    ids = [f"evaluation/{prompt.sample.id}" for prompt in prompts_P]
    sampled = Sampled(prompts_P, completions_P1, noise_seeds, ids, bare_P)
    budget = context.config.optimizer.max_tokens_per_micro_batch
    forwards = Inference(context.policy, prompts_P, sampled.token_ids, budget, dist)
    silent = timer.silent()
    pending = begin(context, sampled, forwards, silent)
    refusal, episodes = None, []
    try:
        episodes = [episodes_1[0] for _, episodes_1 in pending.groups(silent)]
    except JudgeError as error:
        refusal = error
    refuse_together(refusal, dist)
    return episodes, pending.finished().bare_episodes


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
    folder: Path, episodes: Sequence[Episode], bare_episodes: Sequence[Episode | None], dist: Dist
) -> None:
    """One line per held-out sample (all ranks' in rank 0's file), pictures beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [_record(folder, *pair) for pair in zip(episodes, bare_episodes, strict=True)]
    gathered = [record for rank in dist.gather(records) for record in rank]
    if dist.is_main:
        write_atomically(folder / "records.jsonl", "".join(map(json_line, gathered)))


def _record(folder: Path, episode: Episode, bare: Episode | None) -> Mapping[str, Any]:
    sample = episode.prompt.sample
    name = f"{derive_seed('file', sample.id):010d}"
    pictures = {
        "source_file": sample.source,
        "image_file": episode.image,
        "bare_file": None if bare is None else bare.image,
    }
    files: dict[str, str | None] = dict.fromkeys(pictures)
    for key, picture in pictures.items():
        if picture is not None:
            files[key] = f"{name}_{key.removesuffix('_file')}.png"
            picture.save(folder / str(files[key]))
    return {
        "id": sample.id,
        "category": sample.category,
        "instruction": sample.instruction,
        "completion": episode.action.text,
        "reference": sample.reference,
        "status": episode.status.value,
        "failure": episode.failure,
        "reward": episode.reward,
        "parts": dict(episode.parts),
        "bare_reward": None if bare is None else bare.reward,
        **files,
    }
