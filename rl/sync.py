"""Hand the learner's weights to the sampler, and prove that they arrived.

What: `sync` loads, then checks two things. (1) The fingerprint of what the engine holds is the
trainer's. (2) On a fixed probe prompt the engine's log-probs agree with the trainer's. A sync that
silently delivers nothing looks like staleness for weeks; here it stops the run. Called by `run.py`
after every update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl.contracts import Engine
from rl.types import PolicyWeights, Prompt, SamplingParams

if TYPE_CHECKING:
    from rl.learner import Learner

PROBE_TOKENS = 32
MAX_MEAN_DLOGP_NATS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Mean |log-prob difference| allowed on the probe, by the engine's dtype. Float32 engines agree to
3e-5; two bfloat16 forwards of one model differ by about 0.025 on average."""


@dataclass(frozen=True)
class SyncReport:
    """What one sync showed."""

    mean_dlogp_nats: float
    """Mean |engine - trainer| over the probe's tokens."""
    fingerprint: str
    """Of the weights now held by trainer and engine alike."""


class SyncError(RuntimeError):
    """The sampler does not hold the trainer's weights."""


def sync(
    engine: Engine,
    learner: Learner,
    probe: Prompt,
    dtype: str,
    previous: str | None,
    temperature: float,
) -> SyncReport:
    """Load the learner's weights into the engine and verify.

    `previous` is the fingerprint of the last sync, None at the first. Raises `SyncError`.
    """
    weights = learner.export_weights()
    engine.load_weights(weights)
    _check_held(engine, weights, previous)
    params = SamplingParams(
        temperature=temperature, top_p=1.0, top_k=-1, max_tokens=PROBE_TOKENS, num_completions=1
    )
    completion = engine.generate([probe], params, [0])[0][0]
    trainer_T = learner.logprobs([(probe, completion.token_ids)])[0]
    mean = sum(abs(a - b) for a, b in zip(completion.logprobs, trainer_T, strict=True)) / len(
        trainer_T
    )
    if not mean <= MAX_MEAN_DLOGP_NATS[dtype]:
        raise SyncError(
            f"after the weight sync the sampler's log-probs differ from the trainer's by "
            f"{mean:.3g} nats on average over {len(trainer_T)} probe tokens (allowed for {dtype}: "
            f"{MAX_MEAN_DLOGP_NATS[dtype]}). The sampler does not hold the policy: check that both "
            "sides load the same base model and adapter shape."
        )
    return SyncReport(mean, weights.fingerprint)


def _check_held(engine: Engine, weights: PolicyWeights, previous: str | None) -> None:
    held = engine.held_fingerprint()
    if held is not None and held != weights.fingerprint:
        moved = "" if previous is None or held != previous else " (the sync changed nothing)"
        raise SyncError(
            f"the sampler holds weights {held[:12]}, the trainer {weights.fingerprint[:12]}{moved}"
        )
