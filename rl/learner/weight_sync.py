"""Hand the learner's weights to the inference engine, and prove that they arrived.

What is trained is moved and nothing else, and not even that when no step was taken. Then (1) what
the engine reads back is what was sent, and (2) on a fixed probe prompt the engine's log-probs agree
with the trainer's. A sync that silently delivers nothing looks like staleness for weeks; here it
stops the run.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl.api.engine import Engine
from rl.api.types import PolicyWeights, Prompt, SamplingParams
from rl.learner.learner import Learner

PROBE_COMPLETIONS = 4
PROBE_TOKENS = 4
"""Several short completions: the engine writes them side by side, in as many steps as one has
tokens, and the trainer reads their prompt once."""
MAX_MEAN_DLOGP_NATS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Mean |log-prob difference| allowed on the probe, by the engine's dtype. Float32 engines agree to
3e-5; two bfloat16 forwards of one model differ by about 0.025 on average."""


@dataclass(frozen=True)
class SyncReport:
    """What one sync showed."""

    fingerprint: str
    """Of the weights now held by trainer and engine alike."""
    mean_dlogp_nats: float | None
    """Mean |engine - trainer| over the probe's tokens; None when nothing had changed."""


class SyncError(RuntimeError):
    """The inference engine does not hold the trainer's weights."""


def sync(
    engine: Engine,
    learner: Learner,
    probe: Prompt,
    dtype: str,
    previous: str | None,
    temperature: float,
) -> SyncReport:
    """Load the learner's weights into the engine and verify.

    `previous` is the fingerprint of the last sync, None at the first; weights that still have it
    are there already. Raises `SyncError`.
    """
    weights = learner.export_weights()
    if weights.fingerprint == previous:
        return SyncReport(weights.fingerprint, mean_dlogp_nats=None)
    engine.load_weights(weights)
    _check_held(engine, weights, previous)
    params = SamplingParams(
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        max_tokens=PROBE_TOKENS,
        num_completions=PROBE_COMPLETIONS,
    )
    [completions_G] = engine.generate([probe], params, [0])
    trainer_GT = learner.logprobs([(probe, c.token_ids) for c in completions_G])
    differences = [
        abs(sampled - trained)
        for completion, trainer_T in zip(completions_G, trainer_GT, strict=True)
        for sampled, trained in zip(completion.logprobs, trainer_T, strict=True)
    ]
    mean = sum(differences) / len(differences)
    if not mean <= MAX_MEAN_DLOGP_NATS[dtype]:
        raise SyncError(
            "after the weight sync the inference engine's log-probs differ from the trainer's by "
            f"{mean:.3g} nats on average over {len(differences)} probe tokens (allowed for "
            f"{dtype}: {MAX_MEAN_DLOGP_NATS[dtype]}). The engine does not hold the policy: check "
            "that both sides load the same base model and adapter shape."
        )
    return SyncReport(weights.fingerprint, mean)


def _check_held(engine: Engine, weights: PolicyWeights, previous: str | None) -> None:
    held = engine.held_fingerprint()
    if held is not None and held != weights.fingerprint:
        moved = "" if previous is None or held != previous else " (the sync changed nothing)"
        raise SyncError(f"the engine holds {held}, the trainer {weights.fingerprint}{moved}")
