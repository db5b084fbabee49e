"""Grades the untrained system on the held-out samples, once per run, and stores the result on disk.

Axes: `_P` prompts on this rank, `_T` tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.api.types import Completion, Episode, HiddenStates, Prompt, Sample
from rl.check.resume import lasting
from rl.console import warn
from rl.files import json_line, png_bytes, private, read_rows, write_atomically
from rl.learner.train_step import Inference
from rl.record.checkpoint import retry_until_space
from rl.rollout.stream import RolloutContext
from rl.run.checks import require_grades
from rl.run.held_out import score

if TYPE_CHECKING:
    import torch

    from rl.ranks.dist import Dist

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
