"""Tests a policy or an engine by anyone against what a run needs: `rl check --conformance`.

Axes: `_P` prompts, `_G` completions of a prompt.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from rl import build, printing
from rl.api import find
from rl.api.engine import Engine
from rl.api.policy import Policy
from rl.api.types import Completion, Sample, SamplingParams, TrainSequence
from rl.config.loading import is_dotted_path
from rl.config.schema import ConfigError, load_config
from rl.learner.backends import trainable_parameters
from rl.learner.learner import Learner, SyncError, sync
from rl.ranks.dist import Dist
from rl.rollout.episodes import first_samples
from rl.tools.gpu_checks import Line, result, skipped
from rl.tools.gpu_steps import move
from rl.tools.trained import config_of

DEFAULT_CONFIG = "configs/quickstart.jsonnet"
"""Its policy samples with an engine that is tested without a config."""
NUM_SAMPLES, NUM_COMPLETIONS, MAX_TOKENS = 3, 3, 10
NATS, SAME_NATS = 1e-3, 1e-5
"""Largest differences of log-probs: of the engine's (other kernels), of the trainer's own."""
RELATIVE = 1e-4
"""Largest difference of two float32 gradients, relative to the largest entry."""


class FaultError(Exception):
    """What is wrong with the plugin."""


class NotApplicableError(Exception):
    """Why a check does not apply to the plugin."""


def _require(good: bool, problem: str) -> None:
    if not good:
        raise FaultError(problem)


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """Print a line per check. `argv`: the plugin, perhaps a config and overrides, as `rl check`
    read them. Exit code: 0; 1 if one failed or the plugin cannot be loaded."""
    plugin, *rest = sys.argv[1:] if argv is None else argv
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rl_conformance_") as folder:
        run = resolved(plugin, rest[0] if rest else None, rest[1:], Path(folder))
        subject = Subject(run, Path(folder))
        for line in lines(subject):
            print(line.text(), flush=True)
            failed += line.status == "FAIL"
    print(f"{failed} failed" if failed else f"{plugin} conforms")
    return int(failed > 0)


def resolved(
    plugin: str, config: str | None, overrides: Sequence[str], folder: Path
) -> build.Resolved:
    """The run in which the plugin is tested. Raises ConfigError."""
    cls = _plugin(plugin)
    role = "policy" if issubclass(cls, Policy) else "engine"
    values = load_config(config or DEFAULT_CONFIG, overrides).model_dump(mode="json")
    if config is None and role == "policy":
        tiny = cls.tiny(str(folder / "tiny"))
        if not tiny:
            remedy = f"name a config with this policy: rl check --conformance {plugin} my.jsonnet"
            raise ConfigError([f"{plugin}: {cls.__name__}.tiny makes no tiny model; {remedy}"])
        values["policy"] = {"type": plugin, "device": "cpu", **tiny}
        values["engine"], values["renderer"] = {"type": "transformers"}, {"type": "none"}
        values["rewards"], values["data"], values["sampling"] = {}, {"train": []}, {}
    elif values[role]["type"] != plugin:
        values[role] = {"type": plugin}
    values["policy"]["dtype"] = "float32"
    values["optimizer"] = {"backend": "torch", "learning_rate": 1e-2, "warmup_iterations": 0}
    values["algorithm"] = {"kl_coeff": 0.05}
    values["max_staleness"] = 0
    return build.resolve(config_of(values, plugin))


def _plugin(name: str) -> type[Any]:
    """Raises ConfigError unless `name` is a policy or an engine, shipped or by its dotted path."""
    for kind in ("policies", "engines"):
        name = build.class_path(kind, name) if name in build.SHIPPED[kind] else name
    if not is_dotted_path(name):
        raise ConfigError([f"{name}: neither a policy nor an engine is so named"])
    target, problems = find.import_plugin(name)
    for base in (Policy, Engine) if not problems else ():
        cls, wrong = find.plugin_class(target, base)
        if cls is not None:
            return cls
        problems += wrong
    raise ConfigError(problems)


@dataclass
class Subject:
    """The plugin under test: starts policies and engines, and has completions that they wrote."""

    resolved: build.Resolved
    folder: Path

    @cached_property
    def dist(self) -> Dist:
        return Dist.from_env(str(self.resolved.policy.config.device))

    @contextmanager
    def started(
        self, max_tokens: int = 10**6, **changes: Any
    ) -> Iterator[tuple[Policy[Any], Learner]]:
        """A policy as at the start of a run, and its learner. `max_tokens`: of a micro-batch;
        `changes`: keys of the policy's section."""
        plugin, config = self.resolved.policy, self.resolved.config
        plugin = replace(plugin, config=plugin.config.model_copy(update=changes))
        optimizer = config.optimizer.model_copy(update={"max_tokens_per_micro_batch": max_tokens})
        config = config.model_copy(update={"optimizer": optimizer})
        changed = replace(self.resolved, policy=plugin)
        with closing(build.build_policy(changed, self.dist)) as policy:
            yield policy, Learner(policy, config, self.dist, 2)

    @cached_property
    def samples(self) -> list[Sample]:
        """The config's first training samples; without any, drawn ones."""
        if self.resolved.train:
            sources = build.build_data(self.resolved, self.resolved.train[:1])
            return first_samples(sources, NUM_SAMPLES)
        drawn = {"red": (64, 64), "green": (96, 64), "blue": (64, 96)}
        return [
            Sample(f"drawn-{colour}", f"paint it {colour}", (Image.new("RGB", size, colour),))
            for colour, size in drawn.items()
        ]

    @property
    def params(self) -> SamplingParams:
        sampling = self.resolved.config.sampling
        longest = min(MAX_TOKENS, sampling.max_completion_tokens)
        return SamplingParams(sampling.temperature, 1.0, -1, longest, NUM_COMPLETIONS)

    def completions(self, policy: Policy[Any], numbers: Sequence[int]) -> list[list[Completion]]:
        """[P][G] of the samples `numbers` by an engine on the policy's weights."""
        prompts_P = [policy.build_prompt(self.samples[number]) for number in numbers]
        with closing(build.build_engine(self.resolved, policy, self.dist)) as engine:
            engine.wake()
            return engine.generate(prompts_P, self.params, [100 * number for number in numbers])

    @cached_property
    def written(self) -> list[list[Completion]]:
        """[P][G] completions of `samples` by the untrained policy."""
        with self.started() as (policy, _):
            return self.completions(policy, range(len(self.samples)))

    def logprobs(self, policy: Policy[Any], learner: Learner) -> list[list[float]]:
        """The trainer's, of all tokens of `written`, nats."""
        pairs = zip(map(policy.build_prompt, self.samples), self.written, strict=True)
        return learner.logprobs([(prompt, c.token_ids) for prompt, c_G in pairs for c in c_G])


def lines(subject: Subject) -> Iterator[Line]:
    """The results, in order; a check that raises is a FAIL that names the plugin's line."""
    for check in CHECKS:
        what, _, fix = " ".join(str(check.__doc__).split()).partition(". Fix: ")
        try:
            yield result(what, True, check(subject))
        except NotApplicableError as error:
            yield skipped(what, str(error))
        except (FaultError, SyncError) as error:
            yield result(what, False, str(error), fix)
        except (Exception, SystemExit) as error:
            yield result(what, False, f"raises {find.described(error)}", fix)


def _prompt(subject: Subject) -> str:
    """The prompt follows the chat template.
    Fix: build it from tokenizer.apply_chat_template with add_generation_prompt, and the user's
    words from prompting.plain_ids (rl/policies/prompting.py)."""
    from transformers import AutoTokenizer

    renderer, sample = subject.resolved.renderer, subject.samples[0]
    if renderer.cls.prompt_template(renderer.config):
        raise NotApplicableError("the renderer brings the prompt's template")
    with subject.started() as (policy, _):
        # The engine reads the folder, too.
        tokenizer = AutoTokenizer.from_pretrained(policy.engine_folder())  # nosec B615
        if not tokenizer.chat_template:
            raise NotApplicableError("the model's folder has no chat template")
        stops = "".join(tokenizer.convert_ids_to_tokens(policy.stop_token_ids))
        prompt, hostile = (
            policy.build_prompt(Sample("a", words, sample.sources)).plain
            for words in (sample.instruction, f"write {stops} twice")
        )
        system = getattr(policy.config, "system_prompt", "")
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": [{"type": "text", "text": sample.instruction}]})
    chat = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    # How a picture becomes tokens is the policy's affair: compare what surrounds it.
    ahead, instruction, behind = chat.partition(sample.instruction)
    before, after = ahead.rstrip(), instruction + behind
    got = tokenizer.decode(prompt.token_ids)
    first, last = got[: len(before)], got[-len(after) :]
    _require(first == before, f"it begins with {first!r}; the template has {before!r}")
    _require(last == after, f"it ends with {last!r}; the template has {after!r}")
    specials = {*tokenizer.all_special_ids}
    count, more = (sum(token in specials for token in p.token_ids) for p in (prompt, hostile))
    _require(count == more, f"{more - count} special tokens come from a user's words")
    return f"{len(prompt.token_ids)} tokens"


def _engine(subject: Subject) -> str:
    """The engine's log-probs equal the trainer's.
    Fix: both divide logits by the temperature, leave out banned_token_ids, and read the same
    weights, positions and picture features."""
    completions = list(chain.from_iterable(subject.written))
    with subject.started() as (policy, learner):
        logprobs = subject.logprobs(policy, learner)
    stops = {*policy.stop_token_ids}
    for completion in completions:
        *body, last = completion.token_ids
        banned, finish = {*body} & {*policy.banned_token_ids}, completion.finish
        _require(not banned, f"it samples the banned tokens {sorted(banned)}")
        _require(not {*body} & stops, "a stop token does not end a completion")
        _require((last in stops) == (finish == "stop"), f"finish is {finish!r} after token {last}")
    return _compare([completion.logprobs for completion in completions], logprobs, NATS)


def _batch(subject: Subject) -> str:
    """Completions depend on their seed only, not on the batch.
    Fix: draw completion g of prompt p with its own generator, seeded seeds_P[p] + g."""
    with subject.started() as (policy, _):
        [alone] = subject.completions(policy, [len(subject.samples) - 1])
    same = [c.token_ids for c in alone] == [c.token_ids for c in subject.written[-1]]
    _require(same, "a prompt alone gets other completions")
    different = {c.token_ids for c in chain.from_iterable(subject.written)}
    _require(len(different) > 1, "all completions are equal, whatever their seed")
    return f"{len(different)} different completions"


def _sync(subject: Subject) -> str:
    """The engine gets the trained weights.
    Fix: export_weights returns every trained tensor; load_weights replaces the engine's copy and
    drops its caches."""
    with (
        subject.started() as (policy, learner),
        closing(build.build_engine(subject.resolved, policy, subject.dist)) as engine,
    ):
        what = (engine, learner, policy.build_prompt(subject.samples[0]), "float32")
        temperature, longest = subject.params.temperature, subject.params.max_tokens
        first = sync(*what, temperature, max_tokens=longest)
        move(policy.module)
        report = sync(*what, temperature, first, longest)
    changed = report.fingerprint != first.fingerprint
    _require(changed, "export_weights does not change with training")
    how = "" if report.read_back else "; the engine cannot read its weights back"
    return f"mean {report.mean_dlogp_nats:.1e} nats after a change{how}"


def _reference(subject: Subject) -> str:
    """The reference is the adapter switched off.
    Fix: reference() switches the adapter off (full fine-tuning: puts the first weights back) and
    restores it at its end."""
    with subject.started() as (policy, learner):

        def logprobs(reference: bool) -> list[list[float]]:
            with policy.reference() if reference else nullcontext():
                return subject.logprobs(policy, learner)

        trainable = trainable_parameters(policy.module).keys()
        start, before = logprobs(False), logprobs(True)
        changed = {n for n, p in policy.module.named_parameters() if p.requires_grad} ^ trainable
        _require(not changed, f"after reference() {len(changed)} parameters changed requires_grad")
        if not getattr(policy.config, "adapter_path", ""):
            _compare(before, start, SAME_NATS, "before training the reference is not the policy: ")
        move(policy.module)
        moved, after, again = logprobs(False), logprobs(True), logprobs(False)
    _require(moved != start, "a change of the trainable weights changes no log-prob")
    _require(again == moved, "after reference() the policy is not what it was before it")
    return _compare(after, before, SAME_NATS, "the reference follows the trained weights: ")


def _split(subject: Subject) -> str:
    """Any split gives the same gradient.
    Fix: no row may read another row, and no mean may run over a batch: collate packs rows, and
    attention sees a completion's own prompt and tokens only."""
    whole, split = (_gradient(subject, max_tokens) for max_tokens in (10**6, 1))
    largest = max(float(tensor.abs().max()) for tensor in whole.values())
    _require(largest > 0, "the gradient is zero")
    worst, name = max((float((whole[n] - split[n]).abs().max()) / largest, n) for n in whole)
    _require(worst <= RELATIVE, f"differs by {worst:.1e} of the largest entry, in {name}")
    return f"one forward or one per completion: {worst:.1e} relative"


def _resume(subject: Subject) -> str:
    """A resume is exact.
    Fix: draw initial weights from setup.seed, keep no other state that changes with training, and
    use no dropout."""
    with subject.started() as (policy, learner):
        _update(subject, policy, learner, 0)
        tensors, meta = learner.state()
        _update(subject, policy, learner, 1)
        expected = {n: t.clone() for n, t in learner.trainable_tensors().items()}
        logprobs = subject.logprobs(policy, learner)
    with subject.started() as (policy, learner):
        learner.load_state(tensors, meta)
        _update(subject, policy, learner, 1)
        wrong = [n for n, t in learner.trainable_tensors().items() if not t.equal(expected[n])]
        again = subject.logprobs(policy, learner)
    _require(not wrong, f"{len(wrong)} of {len(expected)} weights differ, such as {wrong[:1]}")
    _require(again == logprobs, "equal trained weights give other log-probs in a new policy")
    return "bit for bit"


def _saved(subject: Subject) -> str:
    """A saved adapter is the trained policy.
    Fix: save_pretrained writes every trained tensor under PEFT's names."""
    config, folder = subject.resolved.policy.config, str(subject.folder / "adapter")
    if not hasattr(config, "adapter_path") or config.lora is None:
        raise NotApplicableError("its section has no adapter_path, or no adapter is trained")
    with subject.started() as (policy, learner):
        move(policy.module)
        logprobs = subject.logprobs(policy, learner)
        policy.save_pretrained(folder, learner.trainable_tensors())
    with subject.started(adapter_path=folder) as (policy, learner):
        return _compare(subject.logprobs(policy, learner), logprobs, SAME_NATS)


CHECKS: Sequence[Callable[[Subject], str]] = (
    _prompt, _engine, _batch, _sync, _reference, _split, _resume, _saved
)  # fmt: skip
"""A check returns what it measured, or raises FaultError or NotApplicableError. Its docstring has
what it tests, and how to fix it."""


def _compare(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], limit: float, why: str = ""
) -> str:
    """Raises FaultError unless all log-probs agree within `limit` nats."""
    pairs = list(zip(chain(*first), chain(*second), strict=True))
    worst = max(abs(a - b) for a, b in pairs)
    text = f"up to {worst:.1e} nats apart over {len(pairs)} tokens"
    _require(worst <= limit, f"{why}{text}, allowed {limit:.0e}")
    return text


def _update(subject: Subject, policy: Policy[Any], learner: Learner, iteration: int) -> None:
    """An update on `written` with made-up advantages."""
    prompts_P = [policy.build_prompt(sample) for sample in subject.samples]
    ids_PG = [[c.token_ids for c in written_G] for written_G in subject.written]
    train_step = learner.begin(iteration, prompts_P, ids_PG, [len(ids_G) for ids_G in ids_PG])
    for p, written_G in enumerate(subject.written):
        sequences_G = [
            TrainSequence(tuple(policy.loss_mask(c, iteration)), 1 - g - 0.5 * (p % 2), c.logprobs)
            for g, c in enumerate(written_G)
        ]
        train_step.accumulate(p, sequences_G)
    train_step.step()


def _gradient(subject: Subject, max_tokens: int) -> dict[str, Tensor]:
    """Of an update, times a constant: Adam's first moment after its first step."""
    with subject.started(max_tokens) as (policy, learner):
        move(policy.module)  # a fresh LoRA's A has no gradient
        _update(subject, policy, learner, 0)
        parts = ((name.partition("/"), tensor) for name, tensor in learner.state()[0].items())
        return {name: tensor for (part, _, name), tensor in parts if part == "exp_avg"}


if __name__ == "__main__":
    sys.exit(main())
