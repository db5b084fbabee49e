"""Tests a policy or an engine by anyone against what a run needs: `rl check --conformance`.

Axes: `_P` prompts, `_G` completions of a prompt.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from rl import build
from rl.api import find
from rl.api.engine import Engine
from rl.api.policy import Policy
from rl.api.types import Completion, Prompt, Row, Sample, SamplingParams, TrainSequence
from rl.check_gpu.lines import Line, result, skipped
from rl.config.messages import validate
from rl.config.schema import ConfigError, RunConfig, load_config
from rl.learner import weight_sync
from rl.learner.backends import StepOutcome, trainable_parameters
from rl.learner.learner import Learner
from rl.memory import footprint
from rl.ranks.dist import Dist

ENGINE_CONFIG = "configs/quickstart.jsonnet"
"""The config whose policy samples with an engine that is tested without a config."""
NUM_SAMPLES, NUM_COMPLETIONS, MAX_TOKENS = 3, 3, 10
NATS, SAME_NATS = 1e-3, 1e-5
"""Largest differences of log-probs: of the engine's (other kernels), of the trainer's own."""
RELATIVE = 1e-4
"""Largest difference of two float32 gradients, relative to the largest entry."""
STARTS = ("adapter_path", "from_run")
"""Keys of an adapter to start from."""
WORDS = "turn the red square blue."
STEP = 0.05
"""Standard deviation of the noise that stands for training."""


class FaultError(Exception):
    """What is wrong with the plugin."""


class NotApplicableError(Exception):
    """Why a check does not apply to the plugin."""


def _require(good: bool, problem: str) -> None:
    if not good:
        raise FaultError(problem)


def run(plugin: str, config: str | None, overrides: Sequence[str]) -> int:
    """Print a line per check. Exit code: 0; 1 if one failed or the plugin cannot be loaded."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="rl_conformance_") as folder:
        try:
            subject = Subject(resolved(plugin, config, overrides, Path(folder)), Path(folder))
        except ConfigError as error:
            print("\n".join(error.problems))
            return 1
        print(f"conformance of {plugin}: policy {subject.name}, engine {subject.engine_name}")
        for line in lines(subject):
            print(line.text(), flush=True)
            failed += line.status == "FAIL"
    print(f"{failed} failed" if failed else f"{plugin} conforms")
    return int(failed > 0)


def resolved(
    plugin: str, config: str | None, overrides: Sequence[str], folder: Path
) -> build.Resolved:
    """The run in which the plugin is tested. Raises ConfigError."""
    cls, section = _plugin(plugin), {"type": plugin}
    values: dict[str, Any]
    role = "policy" if issubclass(cls, Policy) else "engine"
    if config is None and issubclass(cls, Policy):
        tiny = cls.tiny(str(folder / "tiny"))
        if not tiny:
            raise ConfigError(
                [
                    f"{plugin}: {cls.__name__}.tiny makes no tiny model; write it, or name a "
                    f"config with this policy: rl check --conformance {plugin} my.jsonnet"
                ]
            )
        section |= {"device": "cpu", **tiny}
        values = {
            "run_name": "conformance",
            "base_exp_dir": str(folder),
            "num_iterations": 2,
            "prompts_per_iteration": NUM_SAMPLES,
            "generations_per_prompt": NUM_COMPLETIONS,
            "policy": section,
            "engine": {"type": "transformers"},
            "renderer": {"type": "none"},
            "rewards": {},
            "data": {"train": []},
        }
        path = folder / "conformance.jsonnet"
        path.write_text(json.dumps(values), encoding="utf-8")
        config = str(path)
    loaded = load_config(config or ENGINE_CONFIG, overrides)
    values = loaded.model_dump(mode="json")
    if values[role]["type"] != plugin:
        values[role] = section
    values["policy"]["dtype"] = "float32"
    values["optimizer"] |= {"backend": "torch", "learning_rate": 1e-2, "warmup_iterations": 0}
    values["optimizer"]["updates_per_iteration"] = 1
    values["algorithm"]["kl_coeff"] = 0.05
    values["max_staleness"] = 0
    checked, problems = validate(RunConfig, values)
    if checked is None:
        raise ConfigError(problems)
    return build.resolve(checked)


def _plugin(name: str) -> type[Any]:
    """Raises ConfigError unless `name` is a policy or an engine, shipped or by its dotted path."""
    problems: list[str] = []
    for room, base in (("policies", Policy), ("engines", Engine)):
        is_shipped = name in build.plugins_of(room)
        if not is_shipped and not find.is_dotted_path(name):
            continue
        target, wrong = find.import_plugin(build.module_of(room, name) if is_shipped else name)
        if wrong:
            raise ConfigError(wrong)
        cls, wrong = find.plugin_class(target, base)
        if cls is not None and not wrong:
            return cls
        problems += wrong
    # What a class of one kind lacks matters, not that it is none of the other kind.
    lacking = [problem for problem in problems if "derive from" not in problem]
    raise ConfigError(
        lacking or problems or [f"{name}: neither a policy nor an engine is so named"]
    )


@dataclass
class Subject:
    """The plugin under test: makes policies and engines, and has completions that they wrote."""

    resolved: build.Resolved
    folder: Path

    def __post_init__(self) -> None:
        self.dist = Dist.from_env(str(self.resolved.policy.config.device))

    @property
    def name(self) -> str:
        return self.resolved.policy.name

    @property
    def engine_name(self) -> str:
        return self.resolved.engine.name

    def policy(self, **changes: Any) -> Policy[Any]:
        """A policy as at the start of a run; `changes`: keys of its section."""
        plugin = self.resolved.policy
        if changes:
            section = plugin.config.model_copy(update=changes)
            plugin = build.Plugin(plugin.key, section, plugin.cls)
        return build.build_policy(
            build.Resolved(**{**vars(self.resolved), "policy": plugin}), self.dist
        )

    def engine(self, policy: Policy[Any]) -> Engine[Any]:
        return build.build_engine(self.resolved, policy, self.dist)

    def learner(self, policy: Policy[Any], max_tokens: int = 10**6) -> Learner:
        config = self.resolved.config
        optimizer = config.optimizer.model_copy(update={"max_tokens_per_micro_batch": max_tokens})
        config = config.model_copy(update={"optimizer": optimizer})
        return Learner(policy, config, self.dist, 2)

    @cached_property
    def samples(self) -> list[Sample]:
        """The config's first training samples; without any, drawn ones."""
        if self.resolved.train:
            [source, *_] = build.build_data(self.resolved, self.resolved.train[:1])
            return [source[index] for index in range(min(NUM_SAMPLES, len(source)))]
        sizes = ((64, 64), (96, 64), (64, 96))
        colours = ("red", "green", "blue")
        return [
            Sample(f"drawn-{colour}", f"paint it {colour}", (Image.new("RGB", size, colour),))
            for colour, size in zip(colours, sizes, strict=True)
        ]

    @property
    def params(self) -> SamplingParams:
        sampling = self.resolved.config.sampling
        longest = min(MAX_TOKENS, sampling.max_completion_tokens)
        return SamplingParams(sampling.temperature, 1.0, -1, longest, NUM_COMPLETIONS)

    def generate(
        self, engine: Engine[Any], prompts_P: Sequence[Prompt], seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        engine.wake()
        return engine.generate(prompts_P, self.params, seeds_P)

    @cached_property
    def written(self) -> list[list[Completion]]:
        """[P][G] completions of `samples` by the untrained policy."""
        with closing(self.policy()) as policy, closing(self.engine(policy)) as engine:
            prompts_P = [policy.build_prompt(sample) for sample in self.samples]
            return self.generate(engine, prompts_P, range(0, 100 * len(prompts_P), 100))

    def rows(self, policy: Policy[Any]) -> list[Row]:
        prompts_P = [policy.build_prompt(sample) for sample in self.samples]
        pairs = zip(prompts_P, self.written, strict=True)
        return [(prompt, c.token_ids) for prompt, group in pairs for c in group]


def lines(subject: Subject) -> Iterator[Line]:
    """The results, in order; a check that raises is a FAIL that names the plugin's line."""
    for what, fix, check in CHECKS:
        try:
            note = check(subject)
        except NotApplicableError as error:
            yield skipped(what, str(error))
        except FaultError as error:
            yield result(what, False, str(error), fix)
        except find.PLUGIN_ERRORS as error:
            code = subject.resolved.policy.cls.__init__
            yield result(what, False, f"raises {find.described(error, code)}", fix)
        else:
            yield result(what, True, note)


def _prompt(subject: Subject) -> str:
    from transformers import AutoTokenizer

    if subject.resolved.renderer.cls.prompt_template(subject.resolved.renderer.config):
        raise NotApplicableError("the renderer brings the prompt's template")
    with closing(subject.policy()) as policy:
        tokenizer = AutoTokenizer.from_pretrained(policy.engine_folder())
        if not tokenizer.chat_template:
            raise NotApplicableError("the model's folder has no chat template")
        sample = subject.samples[0]
        hostile = f"write {''.join(tokenizer.all_special_tokens)} twice"
        prompts = [
            policy.build_prompt(Sample("a", instruction, sample.sources)).plain
            for instruction in (sample.instruction, hostile)
        ]
        system = getattr(policy.config, "system_prompt", "")
        words = {"type": "text", "text": sample.instruction}
        texts = [
            tokenizer.apply_chat_template(
                [
                    *([{"role": "system", "content": system}] if system else []),
                    {
                        "role": "user",
                        "content": [*pictures, words],
                    },
                ],
                tokenize=False,
                add_generation_prompt=True,
            )
            for pictures in ([{"type": "image"}] * len(prompts[0].images), [])
        ]
    # How a picture becomes tokens is the policy's affair: compare what surrounds it.
    before = texts[1].partition(sample.instruction)[0].rstrip()
    after = sample.instruction + texts[0].partition(sample.instruction)[2]
    got = tokenizer.decode(prompts[0].token_ids)
    _require(got.startswith(before), f"it begins {got[: len(before)]!r}, the template {before!r}")
    _require(got.endswith(after), f"it ends {got[-len(after) :]!r}, the template {after!r}")
    first, second = (sum(t in tokenizer.all_special_ids for t in p.token_ids) for p in prompts)
    _require(
        first == second, f"{second - first} special tokens come from special texts in user's words"
    )
    return f"{len(prompts[0].token_ids)} tokens"


def _words(subject: Subject) -> str:
    if subject.resolved.renderer.cls.accepts == "image_tokens":
        raise NotApplicableError("the policy writes pictures")
    with closing(subject.policy()) as policy:
        prompt = policy.build_prompt(subject.samples[0])
        completion = policy.encode_completion(WORDS)
        rows = [(prompt.plain, completion.token_ids)]
        batch = policy.collate_states(rows) or policy.collate(rows)
        with torch.no_grad():
            [action] = policy.decode_actions(rows, batch, policy.module(batch))
    _require(action.text == WORDS, f"{WORDS!r} comes back as {action.text!r}")
    last = completion.token_ids[-1]
    _require(last in policy.stop_token_ids, f"the last token {last} is none of stop_token_ids")
    clash = {*completion.token_ids} & {*policy.banned_token_ids}
    _require(not clash, f"it uses the banned tokens {sorted(clash)}")
    return ""


def _engine(subject: Subject) -> str:
    with closing(subject.policy()) as policy:
        logprobs = subject.learner(policy).logprobs(subject.rows(policy))
    completions = list(chain.from_iterable(subject.written))
    for completion in completions:
        body, last = completion.token_ids[:-1], completion.token_ids[-1]
        _require(
            not {*completion.token_ids} & {*policy.banned_token_ids}, "it samples a banned token"
        )
        _require(not {*body} & {*policy.stop_token_ids}, "a stop token does not end a completion")
        stopped = last in policy.stop_token_ids
        _require(stopped == (completion.finish == "stop"), f"finish {completion.finish!r} is wrong")
    return _compare([c.logprobs for c in completions], logprobs, NATS)


def _batch(subject: Subject) -> str:
    with closing(subject.policy()) as policy, closing(subject.engine(policy)) as engine:
        prompts_P = [policy.build_prompt(sample) for sample in subject.samples]
        last = len(prompts_P) - 1
        [alone] = subject.generate(engine, [prompts_P[last]], [100 * last])
    expected = [c.token_ids for c in subject.written[last]]
    _require([c.token_ids for c in alone] == expected, "a prompt alone gets other completions")
    different = {c.token_ids for group in subject.written for c in group}
    _require(len(different) > 1, "all completions are equal, whatever their seed")
    return f"{len(different)} different completions"


def _sync(subject: Subject) -> str:
    with closing(subject.policy()) as policy, closing(subject.engine(policy)) as engine:
        learner, probe = subject.learner(policy), policy.build_prompt(subject.samples[0])
        temperature, longest = subject.params.temperature, subject.params.max_tokens
        try:
            first = weight_sync.sync(
                engine, learner, probe, "float32", temperature, max_tokens=longest
            )
            _move(policy)
            report = weight_sync.sync(
                engine, learner, probe, "float32", temperature, first, longest
            )
        except weight_sync.SyncError as error:
            raise FaultError(str(error)) from None
    _require(
        report.fingerprint != first.fingerprint, "export_weights does not change with training"
    )
    how = "" if report.read_back else "; the engine cannot read its weights back"
    return f"mean {report.mean_dlogp_nats:.1e} nats after a change{how}"


def _reference(subject: Subject) -> str:
    with closing(subject.policy()) as policy:
        learner, rows = subject.learner(policy), subject.rows(policy)

        def logprobs(reference: bool) -> list[list[float]]:
            with policy.reference() if reference else nullcontext():
                return learner.logprobs(rows)

        trainable = trainable_parameters(policy.module).keys()
        start, before = logprobs(False), logprobs(True)
        changed = {n for n, p in policy.module.named_parameters() if p.requires_grad} ^ trainable
        _require(not changed, f"after reference() {len(changed)} parameters changed requires_grad")
        if not any(getattr(policy.config, key, "") for key in STARTS):
            _compare(before, start, SAME_NATS, "before training the reference is not the policy")
        _move(policy)
        moved, after, again = logprobs(False), logprobs(True), logprobs(False)
    _require(moved != start, "a change of the trainable weights changes no log-prob")
    _compare(after, before, SAME_NATS, "the reference follows the trained weights")
    _require(again == moved, "after reference() the policy is not what it was before it")
    return _compare(after, before, SAME_NATS)


def _split(subject: Subject) -> str:
    gradients = []
    for max_tokens in (10**6, 1):
        with closing(subject.policy()) as policy:
            _move(policy)  # a fresh LoRA's A has no gradient
            gradients.append(_gradient(subject, policy, max_tokens))
    whole, split = gradients
    largest = max(float(tensor.abs().max()) for tensor in whole.values())
    _require(largest > 0, "the gradient is zero")
    worst, name = max((float((whole[n] - split[n]).abs().max()) / largest, n) for n in whole)
    _require(worst <= RELATIVE, f"differs by {worst:.1e} of the largest entry, in {name}")
    return f"one forward or one per completion: {worst:.1e} relative"


def _resume(subject: Subject) -> str:
    with closing(subject.policy()) as policy:
        learner = subject.learner(policy)
        _update(subject, policy, learner, 0)
        tensors, meta = learner.state()
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        _update(subject, policy, learner, 1)
        expected = {n: t.clone() for n, t in learner.trainable_tensors().items()}
        logprobs = learner.logprobs(subject.rows(policy))
    with closing(subject.policy()) as policy:
        learner = subject.learner(policy)
        learner.load_state(tensors, meta)
        _update(subject, policy, learner, 1)
        wrong = [n for n, t in learner.trainable_tensors().items() if not t.equal(expected[n])]
        again = learner.logprobs(subject.rows(policy))
    _require(
        not wrong, f"{len(wrong)} of {len(expected)} weights differ, first {min(wrong, default='')}"
    )
    _require(again == logprobs, "equal trained weights give other log-probs in another process")
    return "bit for bit"


def _saved(subject: Subject) -> str:
    if "adapter_path" not in type(subject.resolved.policy.config).model_fields:
        raise NotApplicableError("its section has no adapter_path")
    if subject.resolved.policy.config.lora is None:
        raise NotApplicableError("no adapter is trained")
    folder = subject.folder / "adapter"
    with closing(subject.policy()) as policy:
        _move(policy)
        learner = subject.learner(policy)
        logprobs = learner.logprobs(subject.rows(policy))
        policy.save_pretrained(str(folder), learner.trainable_tensors())
    with closing(subject.policy(adapter_path=str(folder), from_run="")) as policy:
        loaded = subject.learner(policy).logprobs(subject.rows(policy))
    return _compare(loaded, logprobs, SAME_NATS)


def _memory(subject: Subject) -> str:
    sizes = footprint.sizes(subject.resolved)
    if sizes is None:
        raise FaultError(footprint.unknowns(subject.resolved)[0])
    params = sum(p.numel() for p in subject.policy().module.parameters())
    trained = sizes.trained_params
    return f"{sizes.model.params:.3g} weights planned, {params:.3g} loaded, {trained:.3g} trained"


CHECKS: Sequence[tuple[str, str, Callable[[Subject], str]]] = (
    (
        "the prompt follows the chat template",
        "build it from tokenizer.apply_chat_template with add_generation_prompt, and the user's "
        "words from prompting.plain_ids (rl/policies/shared/prompting.py)",
        _prompt,
    ),
    (
        "words survive encode_completion and decode_actions",
        "encode_completion is the words' plain ids and a stop token; decode_actions decodes "
        "without special tokens",
        _words,
    ),
    (
        "the engine's log-probs equal the trainer's",
        "both divide logits by the temperature, leave out banned_token_ids, and read the same "
        "weights, positions and picture features",
        _engine,
    ),
    (
        "completions depend on their seed only, not on the batch",
        "draw completion g of prompt p with its own generator, seeded seeds_P[p] + g",
        _batch,
    ),
    (
        "the engine gets the trained weights",
        "export_weights returns every trained tensor; load_weights replaces the engine's copy and "
        "drops its caches",
        _sync,
    ),
    (
        "the reference is the adapter switched off",
        "reference() switches the adapter off (full fine-tuning: puts the first weights back) and "
        "restores it at its end",
        _reference,
    ),
    (
        "any split gives the same gradient",
        "no row may read another row, and no mean may run over a batch: collate packs rows, and "
        "attention sees a completion's own prompt and tokens only",
        _split,
    ),
    (
        "a resume is exact",
        "draw initial weights from setup.seed, keep no other state that changes with training, "
        "and use no dropout",
        _resume,
    ),
    (
        "a saved adapter is the trained policy",
        "save_pretrained writes every trained tensor under PEFT's names",
        _saved,
    ),
    (
        "the memory plan knows its size",
        "reads_from names the folder; its config.json has num_hidden_layers, hidden_size, "
        "intermediate_size and num_attention_heads",
        _memory,
    ),
)
"""(what is tested, how to fix it, the test). A test returns what it measured, raises FaultError
with the cause, or NotApplicableError."""


def _compare(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], limit: float, why: str = ""
) -> str:
    """Raises FaultError unless all log-probs agree within `limit` nats."""
    pairs = [(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    text = f"up to {worst:.1e} nats apart over {len(pairs)} tokens"
    _require(worst <= limit, f"{why}{': ' * bool(why)}{text}, allowed {limit:.0e}")
    return text


def _move(policy: Policy[Any]) -> None:
    """Change the trainable weights as training does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainable_parameters(policy.module).values():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(STEP * noise.to(parameter))


def _update(
    subject: Subject,
    policy: Policy[Any],
    learner: Learner,
    iteration: int,
    step: Callable[[float, float], StepOutcome] | None = None,
) -> None:
    """An update on `written` with alternating advantages; `step` replaces the optimizer's."""
    prompts_P = [policy.build_prompt(sample) for sample in subject.samples]
    ids_PG = [[c.token_ids for c in group] for group in subject.written]
    train_step = learner.begin(iteration, prompts_P, ids_PG, [len(group) for group in ids_PG])
    if step is not None:
        train_step.optimizer_step = step
    for p, group in enumerate(subject.written):
        sequences = [
            TrainSequence(
                tuple(policy.loss_mask(c, iteration)), 1.0 - g - 0.5 * (p % 2), c.logprobs
            )
            for g, c in enumerate(group)
        ]
        train_step.accumulate(p, sequences)
    train_step.step()


def _gradient(subject: Subject, policy: Policy[Any], max_tokens: int) -> Mapping[str, Tensor]:
    gradient: dict[str, Tensor] = {}

    def catch(learning_rate: float, gradient_scale: float) -> StepOutcome:
        for name, parameter in trainable_parameters(policy.module).items():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient[name] = grad * gradient_scale
        return StepOutcome(0.0, applied=True)

    _update(subject, policy, subject.learner(policy, max_tokens), 0, catch)
    return gradient
