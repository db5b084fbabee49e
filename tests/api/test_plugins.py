"""A user's plugin: `--check` reports each mistake in one line, and mypy checks a correct one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from PIL import Image
from tiny_messages import holds, raising
from tiny_typing import typing_errors

from rl.api.renderer import drawn_problem
from rl.check import check_report
from rl.config.schema import ConfigError

HEAD = """
from PIL import Image

from rl.api.data import DataSource, RowRules
from rl.api.engine import Engine, EngineMemory, EngineSetup
from rl.api.metric import Metric
from rl.api.plugin import PluginConfig, Resources
from rl.api.policy import Policy, PolicyConfig
from rl.api.renderer import Renderer
from rl.api.reward import Reward, reward
from rl.api.types import RewardInput, RewardOutput, Sample
"""

Mistakes = list[tuple[str, str]]
HALF = " | def grade(self, x): return 0.5"
REPORTS = " | def take_metrics(self): return {}"
REWARDS: list[tuple[str, str, str]] = [
    (".Old", "class Old: | async def grade(self, x): return 0.5", "Old ... rl.api.reward.Reward"),
    ("s.one", "NEEDS = 1", "no Reward ... rl.api.reward.Reward ... function"),
    ("s.one", "class A(Reward): pass\nclass B(Reward): pass", "holds A, B; name one"),
    (".gone", "x = 1", "No module named 'stranger.gone'"),
    (".R", "class R(Reward[dict]):" + HALF, "R.Config ... 'dict' ... PluginConfig"),
    (".R", "class R(Reward): | def __init__(self, config): pass" + HALF,
     "`def __init__(self, config)` ... (self, config: ConfigT, resources: Resources) -> None`"),
    (".R", "class R(Reward): pass", "R has grade and score_group, or neither"),
    (".R", "class R(Reward): | async def grade(self, x, y): return 0.5",
     "R.grade ... def grade(self, x, y)` ... `def grade(self, reward_input: Rew"),
    (".R", "class R(Reward): | async def score_group(self): return []",
     "R.score_group ... `async def score_group(self)` ... `def score_group(self, inputs_G: "),
    (".R", "class R(Reward): | needs = 'image'" + HALF, "R.needs ... 'image' (str) ... Set[str]"),
    (".R", "class R(Reward): | unit_parts = {'a/b'}" + HALF, "R.unit_parts ... 'a/b' ... letters"),
    (".R", "class R(Reward): | def num_questions(self, config): return 1" + HALF,
     "R.num_questions ... `@classmethod def num_questions(cls, config"),
    (".f", "def f(): return 0.5", "`def f()` ... `def f(x: RewardInput) -> float`"),
    (".f", "def f(x): yield 0.5", "f raised TypeError ... <generator object f at 0x"),
    (".f", "f = 3", "3 (int) ... rl.api.reward.Reward"),
    (".f", "import no_such_package_here", "No module ... 'no_such_package_here' ... line 12"),
    (".R", "class R(Reward): | metrics = {'a/b': Metric('1', 'hits')}" + REPORTS + HALF,
     "R.metrics ... 'a/b' ... letters"),
    (".R", "class R(Reward): | metrics = {'hits': 'share'}" + REPORTS + HALF,
     "R.metrics ... 'hits' ... Mapping[MetricName, Metric] ... 'share' (str)"),
    # Found by grading a synthetic picture:
    (".f", "def f(x): return float('nan')", "f raised TypeError ... nan (float) ... finite"),
    (".f", "def f(x): return RewardOutput(0.5, {'a b': 1})", "ValueError: 'a b' ... name"),
    (".f", "async def f(x): return 1 / 0", "f raised ZeroDivisionError: division by zero ("),
    (".R", "class R(Reward): | def score_group(self, xs): return {'a': 1}",
     "R raised TypeError ... score_group ... {'a': 1} (dict) ... list"),
    (".R", "class R(Reward): | def grade(self, x): return 1.0 | def close(self): 1 / 0",
     "closing ... stranger.R ... ZeroDivisionError: division by zero ("),
    (".R", "class R(Reward): | def grade(self, x): ... | def score_group(self, xs): ...",
     "grade and score_group ... keep"),
    ("s.one", "def f(x): return 0.5\ndef _g(x): ...", "no Reward ... or a function"),
    (".f", "@reward(unit_parts={'level'})\ndef f(x): return 0.5", "'level' ... unit_parts"),
    (".R", "class R(Reward): | def score_group(self, xs): return [0.5]",
     "R raised ValueError ... 1 scores ... 2 pictures"),
    # The message gives the line and the most likely fix:
    (".f", "def f(x): return 73.0", "outside [0, 1]"),
    (".f", "def f(x): | return [ | y for y in x.no_such_name]", "stranger.py, line 14)"),
    (".f", "def f(completions, **more): return len(completions) / 9", "line 12) ... RewardInput"),
    (".f", "def f(x): | import numpy | return numpy.full(1, 0.5)", "array([0.5]) (ndarray)"),
    (".f", "def f(x): return lambda: 0.5", "<lambda> at ... (function)"),
    (".f", "def f(x): return {1: 0.5}", "{1: 0.5} (dict)"),
    (".f", "def f(x): return RewardOutput(0.5, [1])", "'list' ... no attribute 'items'"),
    (".f", "@reward(needs={'img'})\ndef f(x): return 0.5", "'img' ... map a column to it"),
    (".py", "def f(x): return 0.5", "'stranger.py' ... drop '.py'"),
    (".f", "import json\nimport json.no_such_part", "'json.no_such_part' ... line 13"),
    (".f", "raise ModuleNotFoundError('Could not import CLIPModel')", "CLIPModel ... line 12"),
    (".R", "class R(Reward): | def __init__(self, config, resources): self.judge = resources.judge"
     " | async def grade(self, x): return await self.judge.ask(1, 2)", "line 14) ... needs_judge"),
    (".R", "class R(Reward): | def __init__(self, config, resources): ..."
     " | def grade(self, x): return self.config.no", "'config' ... line 14) ... super().__init__"),
    (".R", "class R(Reward): | def grade(self, x): return self.resources",
     "'resources' ... line 13) ... __init__"),
    (".R", "class R(Reward): | def grade(self, x): return self.ask().value"
     " | async def ask(self): ...", "'value' ... line 13) ... `async def`"),
]  # fmt: skip
"""(end of `type`, code with ' | ' for a new line of a class, parts of the message)."""


def problems_of(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, **changes: Any) -> list:
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.startswith("stranger")]:
        del sys.modules[name]
    (folder / "strangers" / "pkg").mkdir(parents=True)
    (folder / "strangers/pkg/__init__.py").write_text("from .inner import *\n")
    for file in ("stranger.py", "strangers/one.py", "strangers/pkg/inner.py"):
        (folder / file).write_text(HEAD + code.replace(" | ", "\n    ") + "\n")
    return check_report.problems(tiny_config.validated(tiny_config.real(folder, **changes)))


DATA_CLASS = "class D(DataSource): | def __len__(self): return 3 | def __getitem__(self, index): "
ROWS = DATA_CLASS.replace(
    " | ", " | @classmethod | def provides(cls, config): return {'source'} | ", 1
)
DATA: Mistakes = [
    (ROWS + "return {'id': 1}", "row 0 ... {'id': 1} (dict) ... rl.api.types.Sample"),
    (ROWS + "return Sample(7, 'a')", "row 0 ... id 7 (int)"),
    (ROWS.replace("return 3", "return 0") + "...", "stranger.D ... no row"),
    (ROWS + "... | def __init__(self, config, rules): open('/no/where')",
     "stranger.D ... FileNotFoundError: [Errno 2] No such file or directory: '/no/where'"),
    (ROWS + "... | metrics = {'n': Metric('1', 'rows')} | async def take_metrics(self): return {}",
     "D.take_metrics ... `async def take_metrics(self)` ... `def take_metrics(self) -> Map"),
    ("class D(DataSource): | def __getitem__(self, index): ...",
     "D has no __len__ ... `def __len__(self) -> int`"),
    (DATA_CLASS + "... | def __init__(self, config, on_bad_row, side): ...",
     "`def __init__(self, config, on_bad_row, side)` ... "
     "`def __init__(self, config: ConfigT, rules: RowRules) -> None`"),
    (ROWS + "return Sample('same', 'a')", "rows 0, 1, 2 ... 'same' ... own"),
    (ROWS + "return int('x')", "stranger.D ... invalid literal ... stranger.py, line "),
    (ROWS + "return Sample(str(index), 'a') if index < 2 else None", "row 2 is None ... Sample"),
    (ROWS + "... | @classmethod | def is_here(cls, config): return 1", "D.is_here ... 1 ... bool"),
]  # fmt: skip


DRAWS = "class R(Renderer): | accepts = 'text' | def render(self, jobs): "
RENDERERS: Mistakes = [
    ("class R(Renderer): | accepts = 'text'", "no render ... `def render(self, jobs: "),
    ("class R(Renderer): | def render(self, jobs): ...",
     "no accepts ... ActionKind"),
    ("class R(Renderer): | accepts = 'words' | def render(self, jobs): ...",
     "R.accepts ... 'words' (str) ... 'hidden_states' ... 'text' ... 'image_tokens'"),
    (DRAWS.replace("jobs", "job, seed") + "...",
     "`def render(self, job, seed)` ... `def render(self, jobs: Iterable[Rend"),
    (DRAWS.replace("def", "async def") + "yield 1",
     "R.render ... `async def render(self, jobs)` ... `def render(self, jobs: Iterable"),
    (DRAWS + "... | def __init__(self, config, device, dtype): ... | render = print",
     "`def __init__(self, config, device, dtype)` ... "
     "`def __init__(self, config: ConfigT, resources: Resources) -> None`"),
    (DRAWS + "... | @classmethod | def prompt_template(cls, config): return '{image}'",
     "R.prompt_template ... '{image}' (str) ... PromptTemplate | None"),
    (DRAWS + "... | @classmethod | def cost(cls, c): ...",
     "R.cost ... None (NoneType) ... ModelCost"),
    (DRAWS.replace("'text'", "'hidden_states' | state_kind = 'pre_norm'") + "...",
     "renderer.type: ... stranger.R ... pre_norm ... qwen2_5_vl ... post_norm"),
]  # fmt: skip
TERMS = (
    "from rl.api.loss import LossTerms\n\ndef f(x): | weights = {} | "
    "return LossTerms(-x.advantages * x.logprobs, weights, x.mask.float(), x.mask & False)"
)
LOSSES: Mistakes = [
    ("def f(x, y): ...", "`def f(x, y)` ... `def f(x: LossInputs) -> LossTerms`"),
    ("async def f(x): ...", "f is `async def f(x)` ... `def f(x: LossInputs) -> LossTerms`"),
    ("def f(x): return x.logprobs.sum()", "tensor(0., grad_fn=<SumBackward0>) (Tensor)"),
    ("def f(x): raise ValueError('no')", "ValueError: no ("),
    (TERMS.format("1 / x.denominators.num_tokens"), "weights is 0.125 (float) ... (2, 3)"),
    (TERMS.format("x.mask.sum(1) / 9"), "weights is of shape (2,) ... (2, 3)"),
    (TERMS.format("x.mask / x.mask.sum()"), "micro-batches ... x.denominators"),
    (TERMS.format("x.mask * (x.advantages - x.advantages.mean())"), "micro-batches ... x.denom"),
    (TERMS.format("x.masks"), "'masks' ... stranger.py, line 15)"),
]
NAMES: Mistakes = [
    *((name, "'my_package.my_plugin'") for name in ("stranger/one.py", "./stranger/one.py")),
    ("stranger/one", "'my_package.my_plugin'"),
    *(
        (name, "rl/rewards")
        for name in ("../../evil", "..", "a b", "a.b c", "shared", "os", "a..b")
    ),
    ("rl/rewards/viescore", "rl/rewards"),
    (".", "rl/rewards"),
]
"""(a `type` that is not imported, what the message names)."""
NO_REWARD = {"mine": {"type": "tiny_plugins.nothing"}}
MISTAKES: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        ("rewards.mine", {"rewards": {"mine": {"type": f"stranger{name}"}}}, *row)
        for name, *row in REWARDS
    ),
    *(("data.train.0", {"data": {"train": [{"type": "stranger.D"}]}}, *row) for row in DATA),
    *(
        ("renderer", {"renderer": {"type": "stranger.R"}, "rewards": NO_REWARD}, *row)
        for row in RENDERERS
    ),
    *(("algorithm.loss: ", {"algorithm": {"loss": "stranger.f"}}, *row) for row in LOSSES),
    *(
        ("rewards.mine.type: ", {"rewards": {"mine": {"type": name}}}, "", f"{name!r} ... {part}")
        for name, part in NAMES
    ),
]


@pytest.mark.parametrize(("key", "changes", "code", "parts"), MISTAKES)
def test_a_plugin_mistake_is_one_line_with_key_and_fix(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    changes: dict[str, Any],
    code: str,
    parts: str,
) -> None:
    [problem] = problems_of(tmp_path, monkeypatch, code, **changes)
    assert problem.startswith(key) and holds(problem, parts), problem
    assert "\n" not in problem and "Traceback" not in problem


ENGINE = "class P(Engine): | def generate(self, *x): ... | def load_weights(self"
OTHERS: list[tuple[str, str, str]] = [
    ("policy", "class P(Policy): pass", "P has no build_prompt ... `def build_prompt(self, "),
    ("policy", "class P(Policy): pass", "P has no emits ... Set[ActionKind]"),
    ("policy", "class P(Policy): | Config = PluginConfig", "Config ... from PolicyConfig"),
    ("engine", "class P(Engine): pass", "P has no generate ... `def generate(self, prompts_P"),
    ("engine", ENGINE + "): ...",
     "P.load_weights ... `def load_weights(self)` ... `def load_weights(self, weights: Pol"),
    ("engine", ENGINE + ", w): ... | @classmethod | def memory(cls, config): return 0.4",
     "P.memory ... 0.4 (float) ... EngineMemory | None"),
]  # fmt: skip


@pytest.mark.parametrize(("section", "code", "parts"), OTHERS)
def test_each_mistake_in_a_policy_or_engine_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, code: str, parts: str
) -> None:
    problems = problems_of(tmp_path, monkeypatch, code, **{section: {"type": "stranger.P"}})
    assert any(holds(problem, parts) for problem in problems), problems
    assert all(problem.startswith(section) and "\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    "drawn", [Image.new("RGB", (4, 4)), (0, "a picture"), (1, None), (7, None)]
)
def test_what_is_no_picture_of_a_waiting_job_is_named(drawn: object) -> None:
    assert holds(drawn_problem(drawn, {0, 1}, True), "yields ... (number of the job, RGB picture")
    assert drawn_problem((0, Image.new("RGB", (4, 4))), {0, 1}, True) == ""


def test_a_plugin_can_be_a_package(tmp_path, monkeypatch) -> None:
    code = "class R(Reward):" + HALF
    rewards = {"mine": {"type": "strangers.pkg"}, "other": {"type": "strangers.pkg.inner"}}
    assert problems_of(tmp_path, monkeypatch, code, rewards=rewards) == []


def test_a_rewards_name_must_be_valid_in_a_metric(tmp_path, monkeypatch) -> None:
    with raising(ConfigError, "rewards.a/b: ... letters, digits"):
        problems_of(tmp_path, monkeypatch, "", rewards={"a/b": {"type": "viescore"}})


RIGHT = """
from rl.api.types import Completion, PolicyWeights, Prompt, SamplingParams
from collections.abc import Sequence

def plain(x: RewardInput) -> float:
    return min(1.0, len(x.text) / 100)

async def later(x: RewardInput) -> RewardOutput:
    return RewardOutput(0.5, {"half": 0.5})

@reward(needs={"image"}, unit_parts={"level"})
def declared(x: RewardInput) -> RewardOutput:
    assert x.image is not None
    return RewardOutput(0.5, {"level": x.image.width / 1000})

class MyConfig(PluginConfig):
    scale: float = 0.5

class Scaled(Reward[MyConfig]):
    needs = {"image"}
    metrics = {"factor": Metric("1", "what a value is multiplied by")}

    def __init__(self, config: MyConfig, resources: Resources) -> None:
        super().__init__(config, resources)
        self.factor = config.scale

    def take_metrics(self) -> dict[str, float]:
        return {"factor": self.factor}

    async def grade(self, x: RewardInput) -> RewardOutput:
        return RewardOutput(self.config.scale * self.factor)

class Parrot(Engine[MyConfig]):
    def __init__(self, config: MyConfig, setup: EngineSetup) -> None:
        super().__init__(config, setup)
        self.policy = setup.policy

    @classmethod
    def memory(cls, config: MyConfig) -> EngineMemory:
        return EngineMemory(share=config.scale)

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        echoes = [self.policy.encode_completion(p.sample.instruction) for p in prompts_P]
        return [[completion] * params.num_completions for completion in echoes]

    def load_weights(self, weights: PolicyWeights) -> None:
        pass
"""
"""Correct plugins of forms that README's examples do not show."""


def test_correct_plugins_of_every_form_are_accepted(tmp_path, monkeypatch) -> None:
    kinds = ("plain", "later", "declared", "Scaled")
    rewards = {name: {"type": f"stranger.{name}"} for name in kinds}
    problems = problems_of(
        tmp_path,
        monkeypatch,
        RIGHT,
        rewards={**rewards, "Scaled": {"type": "stranger.Scaled", "scale": 1}},
        final_reward={"weights": {"declared/level": 1, "Scaled": 2}},
        engine={"type": "stranger.Parrot", "scale": 0.4},
    )
    assert problems == []


@pytest.mark.slow
def test_mypy_checks_a_users_plugin(tmp_path: Path) -> None:
    file = tmp_path / "stranger.py"
    wrong = (
        "class Wrong(Reward[MyConfig]):\n"
        "    async def grade(self, x: RewardInput) -> str:\n"
        "        return self.config.scal\n"
    )
    file.write_text(HEAD + RIGHT)
    assert typing_errors([file], tmp_path) == []
    file.write_text(HEAD + RIGHT + wrong)
    errors = typing_errors([file], tmp_path)
    assert holds(errors[0], '"Coroutine[Any, Any, str]" ... "grade"')
    assert holds(errors[-1], '"MyConfig" ... "scal" ... "scale"')
