"""Held-out evaluation: with the current weights, with the untrained ones, and the drift between."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.algorithm.metrics import Metrics
from rl.api.engine import Engine
from rl.api.types import Completion, Episode, HiddenStates, Prompt, Sample, SamplingParams, Status
from rl.check.compatibility import lasting
from rl.console import warn
from rl.files import json_line, png_bytes, private, read_rows, write_atomically
from rl.learner.train_step import Forwards, Inference
from rl.printing import scrubbed
from rl.progress import PhaseTimer
from rl.ranks import signals
from rl.record.checkpoint import retry_until_space
from rl.record.run_record import named_sources, provenance, source_files
from rl.rollout.episodes import Interrupted, raise_if_interrupted
from rl.rollout.stream import Rollout, RolloutContext, Sampled, begin
from rl.run.alarms import add_gaps
from rl.run.checks import BARE, POLICY, check_equal_words, contents_of, require_grades
from rl.run.episode_metrics import add_bare_arm, add_thought, add_unreadable
from rl.run.paired import LEAST_FALL, Paired, paired
from rl.seeds import derive_seed

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from rl.learner.learner import Learner
    from rl.progress import PhaseTimer
    from rl.ranks.dist import Dist
    from rl.record.run_record import BackgroundWriter

# ---- held out ------------------------------------------------------------------------------------
# Renders and judges completions of held-out samples as in training, with separate noise.


def score(
    context: RolloutContext,
    prompts_P: Sequence[Prompt],
    completions_PG: Sequence[Sequence[Completion]],
    bare_P: Sequence[Completion | None],
    dist: Dist,
    weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    learner: Learner | None = None,
) -> Rollout:
    """Render and grade completions of this rank's prompts. `weights`: opens a context in which the
    policy has the weights for its states. `learner`: its forward is used, with today's weights.
    Raises `Interrupted` on every rank once any was asked to stop. Collective."""
    context = replace(context, rewards={**context.rewards, **context.held_out_only})
    # The noise depends only on the sample, so that pictures differ only by words and weights.
    noise_P = [derive_seed("evaluation", context.config.seed, p.sample.id) for p in prompts_P]
    ids = [f"evaluation/{prompt.sample.id}" for prompt in prompts_P]
    sampled = Sampled(prompts_P, completions_PG, noise_P, ids, bare_P)
    budget = context.config.optimizer.max_tokens_per_micro_batch
    nums_P = [len(completions_G) for completions_G in completions_PG]
    forwards: Forwards
    if learner is not None:
        forwards = learner.begin(0, prompts_P, sampled.token_ids, nums_P, False)
    else:
        forwards = Inference(
            context.policy, prompts_P, sampled.token_ids, budget, dist, weights, nums_P
        )
    timer = PhaseTimer()  # discarded: the caller's phase includes all of this
    with suppress(Interrupted):
        pending = begin(context, sampled, forwards, timer, signals.stop_received)
        for _ in pending.groups(timer, signals.stop_received):
            pass
    raise_if_interrupted(dist)
    return pending.finished()


# ---- stock ---------------------------------------------------------------------------------------
# Grades the untrained system on the held-out samples, once per run, and stores the result on disk.
#
# Axes: `_P` prompts on this rank, `_T` tokens.

Rewards = Mapping[str, float | None]
"""Arm ('stock', its variants, and arms of fixed words) -> reward; None if it is not graded yet."""
FixedArm = tuple[Sequence[Completion | None], Sequence[Episode | None]]
"""(words that training does not change, their episodes under the current weights), _P each."""
SetWeights = Callable[[], AbstractContextManager[None]]

NUM_FIXED_SAMPLES = 8
"""Number of held-out samples, over all ranks, whose words' states are compared. Each takes two
forwards and a file of [T, D] (1 MB for 150 tokens of Qwen2.5-VL-7B)."""


class Stock:
    """The untrained system's rewards and states for this rank's held-out samples: rewards of the
    stock arm (the renderer's own pipeline with the user's words) and of fixed words under the
    untrained weights, and a few samples' word states under these weights.

        <run>/stock/rewards.jsonl       a line per sample: key, id, reward by arm, picture by arm
        <run>/stock/<key>_stock.png     these pictures
        <run>/stock/<key>.safetensors   states of the user's words, for the first samples

    The key is a hash of the sample and of all settings that a resume may not change, so a run with
    another held-out set, renderer or judge finds no entry and draws again.
    """

    def __init__(self, context: RolloutContext, run_dir: Path, iteration: int, dist: Dist) -> None:
        """`iteration`: number of iterations done, 0 before training."""
        self._context = context
        self._folder = run_dir / "stock"
        self._dist = dist
        self._at_start = iteration == 0
        config = context.config
        self._settings = json.dumps(lasting(config.model_dump(mode="json")), sort_keys=True)
        if context.policy.starts_as_stock:
            sampling = config.evaluation.temperature, config.evaluation.top_k
            self._settings += f" {sampling}"

    def _untrained(self, without_adapter: bool = False) -> SetWeights | None:
        """The weights before training, or those of the base model where the run starts from an
        adapter; None if they are gone. Full fine-tuning has them only before its first step: later
        they need a second model in memory, which ZeRO-3 has no space for."""
        policy = self._context.policy
        if policy.config.lora is not None:
            return policy.base_model if without_adapter else policy.reference
        return nullcontext if self._at_start or not policy.reads_states else None

    def rewards(
        self,
        prompts_P: Sequence[Prompt],
        fixed: Mapping[str, FixedArm],
        episodes_P: Sequence[Episode],
    ) -> list[Rewards]:
        """_P, rewards by arm; {} if a sample has no arms, or if they can no longer be drawn. Before
        training, the current episodes of fixed words are the untrained system's. `episodes_P`: the
        policy's, which are the stock arm if the policy `starts_as_stock`. Collective."""
        path = self._folder / "rewards.jsonl"
        rows = read_rows(path)[0] if self._dist.is_main else []
        row_of_key = {row["key"]: row for row in self._dist.broadcast(rows)}
        keys_P = [self._key(prompt.sample) for prompt in prompts_P]
        missing = [
            p
            for p, key in enumerate(keys_P)
            if key not in row_of_key or None in row_of_key[key]["rewards"].values()
        ]
        if self._dist.any(bool(missing)):
            drawn = self._draw(prompts_P, fixed, episodes_P, missing)
            local_rows = [
                self._row(keys_P[p], prompts_P[p].sample, arms) for p, arms in drawn.items() if arms
            ]
            new_rows = [row for rank in self._dist.gather(local_rows) for row in rank]
            row_of_key |= {row["key"]: row for row in new_rows}
            if new_rows and self._dist.is_main:
                self._write(path, "".join(map(json_line, row_of_key.values())))
        return [row_of_key[key]["rewards"] if key in row_of_key else {} for key in keys_P]

    def _draw(
        self,
        prompts_P: Sequence[Prompt],
        fixed: Mapping[str, FixedArm],
        episodes_P: Sequence[Episode],
        missing: Sequence[int],
    ) -> dict[int, dict[str, Episode]]:
        """p -> its episodes by arm, for every prompt index p in `missing`. Collective."""
        policy = self._context.policy
        if policy.starts_as_stock:
            if not self._at_start:
                self._warn_not_drawable(len(missing))
            return {p: {"stock": episodes_P[p]} for p in missing if self._at_start}
        drawn: dict[int, dict[str, Episode]] = {p: {} for p in missing}
        to_score: list[tuple[bool, Prompt, int, dict[str, Completion]]] = []
        for p in missing:
            prompts_of_arms = dict(policy.stock_arms(prompts_P[p]))
            for arm, (words_P, current_P) in fixed.items() if policy.reads_states else ():
                words, current = words_P[p], current_P[p]
                if self._at_start and current is not None:
                    drawn[p][arm] = current
                elif words is not None:
                    prompts_of_arms[arm] = (prompts_P[p].plain, words)
            groups: dict[tuple[bool, Prompt], dict[str, Completion]] = {}
            for name, (prompt, completion) in prompts_of_arms.items():
                groups.setdefault((name not in fixed, prompt), {})[name] = completion
            to_score += [(*group, p, completions) for group, completions in groups.items()]
        scored: list[Episode] = []
        for is_stock in (True, False):
            rows = [row for row in to_score if row[0] == is_stock]
            if not self._dist.any(bool(rows)):
                continue
            weights = self._untrained(without_adapter=is_stock)
            if weights is None:
                self._warn_not_drawable(len(missing))
                return drawn
            rollout = score(
                self._context,
                [prompt for _, prompt, _, _ in rows],
                [list(completions.values()) for *_, completions in rows],
                [None] * len(rows),
                self._dist,
                weights,
            )
            for (_, _, p, completions), episodes in zip(rows, rollout.episodes, strict=True):
                drawn[p].update(zip(completions, episodes, strict=True))
                scored += episodes
        if self._dist.any(bool(to_score)):
            require_grades(self._context, scored, self._dist, len(prompts_P))
        return drawn

    def _warn_not_drawable(self, num: int) -> None:
        warn(
            f"rank {self._dist.rank}: {num} held-out samples have no stock arm: it is only drawn "
            "before the first iteration, when they were not held out or were not graded"
        )

    def _row(self, key: str, sample: Sample, arms: Mapping[str, Episode]) -> dict[str, Any]:
        """A sample's line of rewards.jsonl; writes the sample's pictures into the same folder."""
        files = {}
        for name, episode in arms.items():
            if episode.image is not None:
                files[name] = f"{key}_{name}.png"
                self._write(self._folder / files[name], png_bytes(episode.image))
        rewards = {name: episode.reward for name, episode in arms.items()}
        return {"key": key, "id": sample.id, "rewards": rewards, "files": files}

    def _write(self, path: Path, content: str | bytes) -> None:
        """Write now, not in the background, because the next evaluation reads the file."""
        write = partial(write_atomically, path, content, private)
        retry_until_space(write, self._folder, path.name)

    def states(
        self, prompts_P: Sequence[Prompt], words_P: Sequence[Completion]
    ) -> list[torch.Tensor | None]:
        """_P of [T, D]: `word_states` under the untrained weights. Collective."""
        from safetensors.torch import load_file, save

        paths_P = [self._folder / f"{self._key(p.sample)}.safetensors" for p in prompts_P]
        missing = [p for p, path in enumerate(paths_P) if not path.is_file()]
        weights = self._untrained()
        if weights is not None and self._dist.any(bool(missing)):
            states_of_missing = word_states(
                self._context,
                [prompts_P[p] for p in missing],
                [words_P[p] for p in missing],
                self._dist,
                weights,
            )
            for p, states in zip(missing, states_of_missing, strict=True):
                if states is not None:
                    self._write(paths_P[p], save({"states": states}))
        return [load_file(path)["states"] if path.is_file() else None for path in paths_P]

    def _key(self, sample: Sample) -> str:
        """A hash of the sample's content, because another data set may reuse its id."""
        digest = hashlib.blake2b(self._settings.encode(), digest_size=12)
        fields = [sample.id, sample.instruction, sample.category, dict(sample.hidden)]
        # Values that JSON cannot encode are hashed by type: their `repr` may hold a memory address.
        text = json.dumps(fields, sort_keys=True, default=lambda value: type(value).__name__)
        digest.update(text.encode())
        for picture in (*sample.sources, sample.target):
            if picture is not None:
                digest.update(f"{picture.mode}{picture.size}".encode() + picture.tobytes())
        for codes in (sample.source_codes, sample.target_codes):
            if codes is not None:
                digest.update(f"{codes.shape}".encode() + codes.tobytes())
        return digest.hexdigest()


def word_states(
    context: RolloutContext,
    prompts_P: Sequence[Prompt],
    words_P: Sequence[Completion],
    dist: Dist,
    weights: SetWeights = nullcontext,
) -> list[torch.Tensor | None]:
    """_P of [T, D] on the CPU, in the policy's dtype: the states that the renderer would read at
    the tokens of `words_P`; None if it reads no states. Collective."""
    policy = context.policy
    prompts_P = [prompt.plain for prompt in prompts_P]
    ids_PG = [[words.token_ids] for words in words_P]
    budget = context.config.optimizer.max_tokens_per_micro_batch
    forwards = Inference(policy, prompts_P, ids_PG, budget, dist, weights)
    states_P: list[torch.Tensor | None] = [None] * len(prompts_P)
    for micro_batch in forwards.micro_batches:
        actions = policy.decode_actions(micro_batch.rows, *forwards.states(micro_batch))
        rows = zip(micro_batch.members, micro_batch.rows, actions, strict=True)
        for (p, _), (_, ids), action in rows:
            if p >= 0 and isinstance(action.payload, HiddenStates):
                states_P[p] = action.payload.embeds[-len(ids) :].cpu().contiguous()
    return states_P


# ---- drift ---------------------------------------------------------------------------------------
# Compares an evaluation with the untrained system: gains, losses and hidden-state drift.
#
# Axes: `_P` held-out samples of this rank, `_T` tokens.

LEAST_OF_REFERENCES = 0.2
"""In a chain that works the reference descriptions earn more; the small configs: 0.89 to 1."""
Hashes = Sequence[str]
"""Hashes of one sample's contents (`contents_of`)."""


def state_distance(states_TD: torch.Tensor, base_TD: torch.Tensor) -> tuple[float, float]:
    """(relative L2 distance |h - h0| / |h0|, cosine): means over the tokens of states [T, D] of any
    dtype and device, computed in float32."""
    import torch

    base = base_TD.float()
    states = states_TD.to(base.device).float()
    moved_T = (states - base).norm(dim=-1) / base.norm(dim=-1)
    cosine_T = torch.cosine_similarity(states, base, dim=-1)
    return float(moved_T.mean()), float(cosine_T.mean())


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


def _add_paired(metrics: Metrics, name: str, difference: Paired | None) -> None:
    """Add mean and error as maxima over ranks, because every rank has the same values."""
    if difference is not None:
        metrics.maximum(name, difference.mean)
        if difference.error is not None:
            metrics.maximum(f"{name}_error", difference.error)


def add_stock_arm(
    metrics: Metrics,
    untrained_P: Sequence[Rewards],
    episodes: Sequence[Episode],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Add the untrained system's rewards, and the trained system's gain over it. Collective."""
    for rewards in untrained_P:
        if "stock" in rewards:
            metrics.add("eval/stock_ungraded", float(rewards["stock"] is None))
        for arm, reward in rewards.items():
            if arm.startswith("stock") and reward is not None:
                metrics.add(f"eval/{arm}_reward", reward)
    stock_P = [rewards.get("stock") for rewards in untrained_P]
    gain = _compare([episode.reward for episode in episodes], stock_P, hashes_P, dist)
    _add_paired(metrics, "eval/gain_over_stock", gain)


def check_references(
    references_P: Sequence[Episode | None],
    untrained: Mapping[str, Sequence[Episode | None]],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Warn, before training, if the reference descriptions earn next to nothing, or less than words
    that nobody trained: then no words can earn more. `untrained`: episodes _P of such words, by
    arm. Collective."""

    def rewards(episodes_P: Sequence[Episode | None]) -> list[float | None]:
        return [None if episode is None else episode.reward for episode in episodes_P]

    right_P = rewards(references_P)
    right = _compare(right_P, [0.0] * len(right_P), hashes_P, dist)
    if right is None or right.error is None:
        return
    ahead = {
        arm: _compare(rewards(episodes_P), right_P, hashes_P, dist)
        for arm, episodes_P in untrained.items()
    }
    better = [arm for arm, each in ahead.items() if each is not None and each.is_alarming]
    if dist.is_main and (better or right.mean < LEAST_OF_REFERENCES):
        beside = [f", {arm} {right.mean + each.mean:.3f}" for arm, each in ahead.items() if each]
        warn(
            f"before training the reference descriptions earn {right.mean:.3f}"
            f"{''.join(beside)}: training can hardly earn more. If a "
            "person finds these words right, a link between words and score is broken: the "
            "policy's states, the renderer's source pictures, or the instruction and picture that "
            "the judge reads belong to another sample. Look at evaluation/it_000000 and at what "
            "`rl judge audit` says of the judge by itself"
        )


def add_gain_of_thought(
    metrics: Metrics,
    episodes: Sequence[Episode],
    cut_P: Sequence[Episode | None],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Add the gain from thinking; `cut_P`: the samples' episodes without thinking. Collective."""
    rewards_P = [None if episode is None else episode.reward for episode in cut_P]
    for reward in rewards_P:
        if reward is not None:
            metrics.add("eval/cut_thought_reward", reward)
    gain = _compare([episode.reward for episode in episodes], rewards_P, hashes_P, dist)
    _add_paired(metrics, "eval/gain_of_thought", gain)


def add_falls(
    metrics: Metrics,
    iteration: int,
    untrained_P: Sequence[Rewards],
    fixed: Mapping[str, FixedArm],
    hashes_P: Sequence[Hashes],
    dist: Dist,
) -> None:
    """Add how far the rewards of fixed words have fallen since training began. Collective."""
    untrained_means = []
    for arm, (_, episodes_P) in fixed.items():
        before_P = [rewards.get(arm) for rewards in untrained_P]
        after_P = [None if episode is None else episode.reward for episode in episodes_P]
        fall = _compare(before_P, after_P, hashes_P, dist)
        untrained = _compare(before_P, [0.0] * len(before_P), hashes_P, dist)
        _add_paired(metrics, f"drift/{arm}_fall", fall)
        if fall is not None and untrained is not None:
            untrained_means.append(untrained.mean)
            metrics.maximum("drift/alarm", float(fall.is_alarming))
    if untrained_means and max(untrained_means) < LEAST_FALL and iteration == 0 and dist.is_main:
        warn(
            "the user's own words earn no reward under the untrained weights: drift/alarm cannot "
            "see a fall; drift/state_l2 says how far the states have moved, not whether that hurts"
        )


def add_state_drift(
    metrics: Metrics,
    context: RolloutContext,
    stock: Stock,
    prompts_P: Sequence[Prompt],
    words_P: Sequence[Completion | None],
    dist: Dist,
) -> None:
    """Add the distance of the words' states from those under untrained weights. Collective."""
    pairs = [(p, words) for p, words in zip(prompts_P, words_P, strict=True) if words is not None]
    prompts, words = [prompt for prompt, _ in pairs], [words for _, words in pairs]
    base_P = stock.states(prompts, words)
    for states, base in zip(word_states(context, prompts, words, dist), base_P, strict=True):
        if states is not None and base is not None:
            moved, cosine = state_distance(states, base)
            metrics.add("drift/state_l2", moved, weight=len(base))
            metrics.add("drift/state_cosine", cosine, weight=len(base))


# ---- evaluation ----------------------------------------------------------------------------------
# Evaluates the policy on the held-out samples, beside the user's, reference and stock arms.
#
# Axes: `_P` held-out samples of this rank.

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
