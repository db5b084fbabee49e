"""A stranger's plug: every mistake is one sentence from `--check`, and a right one is typed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from tiny_typing import typing_errors

from rl.config.schema import load_config
from rl.preflight import report

HEAD = """
from PIL import Image

from rl.api.data import DataSource, RowRules
from rl.api.engine import Engine, EngineMemory, EngineSetup
from rl.api.metric import Metric
from rl.api.plug import PlugConfig, Resources
from rl.api.policy import Policy, PolicyConfig
from rl.api.renderer import Renderer
from rl.api.reward import Reward, reward
from rl.api.types import RewardInput, RewardOutput, Sample
"""

REWARDS: list[tuple[str, str, str]] = [
    (
        "Old",
        "class Old:\n    async def grade(self, x): return 0.5",
        "class Old is no Reward: derive from rl.api.reward.Reward",
    ),
    (
        "",
        "NEEDS = 1",
        "holds no Reward: derive from rl.api.reward.Reward, or name a function",
    ),
    ("", "class A(Reward): pass\nclass B(Reward): pass", "holds A, B; name one of them behind a d"),
    ("gone", "x = 1", "holds no 'gone' ("),
    (
        "R",
        "class R(Reward[dict]):\n    def grade(self, x): return 0.5",
        "R.Config is <class 'dict'> (type); derive it from PlugConfig",
    ),
    (
        "R",
        "class R(Reward):\n    def __init__(self, config): pass\n"
        "    def grade(self, x): return 0.5",
        "R.__init__ is `def __init__(self, config)`; expected `def __init__(self, config: Config, "
        "resources: Resources) -> None`",
    ),
    (
        "R",
        "class R(Reward): pass",
        "R has no grade; expected `async def grade(self, x: RewardInput) -> RewardOutput`",
    ),
    (
        "R",
        "class R(Reward):\n    async def grade(self, x, y): return 0.5",
        "R.grade is `def grade(self, x, y)`; expected `def grade(self, x: RewardInput) -> Rew",
    ),
    ("R", "class R(Reward):\n    grade = 3", "R.grade is 3 (int); expected `def grade(self, x"),
    (
        "R",
        "class R(Reward):\n    async def grade(self, x): yield 0.5",
        "R.grade yields; expected `def grade(self, x: RewardInput) -> RewardOutput`, which returns",
    ),
    (
        "R",
        "class R(Reward):\n    async def score_group(self): return []",
        "R.score_group is `def score_group(self)`; expected `def score_group(self, inputs_G: ",
    ),
    (
        "R",
        "class R(Reward):\n    needs_judge = True\n    async def grade(self, x): return 0.5",
        "R needs the judge and does not say how often it asks; expected `@classmethod def num_q",
    ),
    (
        "R",
        "class R(Reward):\n    needs = 'image'\n    def grade(self, x): return 0.5",
        "R.needs is 'image' (str); expected a set of names, {'image'}",
    ),
    (
        "R",
        "class R(Reward):\n    unit_parts = {'a/b'}\n    def grade(self, x): return 0.5",
        "R.unit_parts: 'a/b' is no usable name of a metric; use letters, digits",
    ),
    (
        "R",
        "class R(Reward):\n    def num_questions(self, config): return 1\n"
        "    def grade(self, x): return 0.5",
        "R.num_questions is no classmethod; expected `@classmethod def num_questions(cls, config",
    ),
    ("f", "def f(): return 0.5", "f is `def f()`; expected `def f(x: RewardInput) -> float`"),
    ("f", "def f(x):\n    yield 0.5", "f raised TypeError: value is <generator object f at 0x"),
    ("f", "f = 3", "3 (int) is no Reward: derive from rl.api.reward.Reward"),
    ("f", "raise ValueError('boom\\ntwice')", "raises ValueError: boom twice ("),
    ("f", "import no_such_package_here", "imports 'no_such_package_here', which is not installed"),
    ("f", "def f(:", "raises SyntaxError: invalid syntax ("),
    ("f", "import sys; sys.exit(3)", "raises SystemExit: 3 ("),
    (
        "R",
        "class R(Reward):\n    metrics = ['hits']\n    def grade(self, x): return 0.5",
        "R.metrics is ['hits'] (list); expected a mapping, {'name': Metric('0..1', 'what it is')}",
    ),
    (
        "R",
        "class R(Reward):\n    metrics = {'a/b': Metric('1', 'hits')}\n"
        "    def take_metrics(self): return {}\n    def grade(self, x): return 0.5",
        "R.metrics: 'a/b' is no usable name of a metric; use letters, digits",
    ),
    (
        "R",
        "class R(Reward):\n    metrics = {'hits': 'share'}\n"
        "    def take_metrics(self): return {}\n    def grade(self, x): return 0.5",
        "R.metrics: 'hits' is 'share' (str); expected {'name': Metric('0..1', 'what it is')}",
    ),
    (
        "R",
        "class R(Reward):\n    metrics = {'hits': Metric('', 'hits')}",
        "raises ValueError: a Metric's unit is ''; expected words (",
    ),
    (
        "R",
        "class R(Reward):\n    metrics = {'hits': Metric('1', 'hits')}\n"
        "    def grade(self, x): return 0.5",
        "R declares metrics and reports none; expected `def take_metrics(self) -> Mapping[str, fl",
    ),
    (
        "R",
        "class R(Reward):\n    def take_metrics(self): return {'hits': 1}\n"
        "    def grade(self, x): return 0.5",
        "R has take_metrics and declares none; expected metrics = {'name': Metric('0..1', 'what",
    ),
    (
        "R",
        "class R(Reward):\n    metrics = {'hits': Metric('1', 'hits')}\n"
        "    def take_metrics(self, done): return {}\n    def grade(self, x): return 0.5",
        "R.take_metrics is `def take_metrics(self, done)`; expected `def take_metrics(self) -> Map",
    ),
    # Tried on a made-up picture:
    (
        "f",
        "def f(x): return 7",
        "f raised ValueError: value 7.0 is outside [0, 1]; scale",
    ),
    ("f", "def f(x): return 'good'", "f raised TypeError: value is 'good' (str); expected a finit"),
    ("f", "def f(x): return float('nan')", "f raised TypeError: value is nan (float); expected a "),
    (
        "f",
        "def f(x): return RewardOutput(0.5, {'a b': 1})",
        "ValueError: part 'a b': no usable name",
    ),
    ("f", "async def f(x): return 1 / 0", "f raised ZeroDivisionError: division by zero (File "),
    ("f", "def f(x): raise SystemExit(0)", "f raised SystemExit: 0 (File "),
    (
        "R",
        "class R(Reward):\n    def score_group(self, xs): return {'a': 1}",
        "R raised TypeError: score_group gives {'a': 1} (dict); expected a list of scores",
    ),
    (
        "R",
        "class R(Reward):\n    def grade(self, x): return 1.0\n    def close(self): 1 / 0",
        "closing stranger.R raises ZeroDivisionError: division by zero (",
    ),
    (
        "R",
        "class R(Reward):\n    def grade(self, x): ...\n    def score_group(self, xs): ...",
        "R has grade and score_group; keep the one that is meant",
    ),
    ("", "def f(x): return 0.5\ndef _g(x): ...", "or name a function in it behind a dot (f)"),
    ("f", "def f(x): return x.sample.hidden['a']", "f raised KeyError: 'a' (File "),
    (
        "f",
        "@reward(unit_parts={'level'})\ndef f(x): return 0.5",
        "part 'level' is declared in unit_parts (0..1), found nothing",
    ),
    (
        "R",
        "class R(Reward):\n    def score_group(self, xs): return [0.5]",
        "R raised ValueError: 1 scores for 2 pictures",
    ),
]


def problems_of(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, **changes: Any) -> list:
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.startswith("stranger")]:
        del sys.modules[name]
    (folder / "stranger.py").write_text(HEAD + code + "\n")
    (folder / "strangers").mkdir()
    (folder / "strangers" / "one.py").write_text(HEAD + code + "\n")
    path = tiny_config.write(folder, tiny_config.real(folder, **changes))
    return report.problems(load_config(path))


@pytest.mark.parametrize(("name", "code", "message"), REWARDS, ids=[r[2][:40] for r in REWARDS])
def test_a_rewards_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: str, message: str
) -> None:
    section = {"type": f"stranger.{name}" if name else "strangers.one"}
    [found] = problems_of(tmp_path, monkeypatch, code, rewards={"mine": section})
    assert found.startswith("rewards.mine") and message in found, found
    assert "\n" not in found and "Traceback" not in found


ROWS = (
    "class D(DataSource):\n    @classmethod\n    def provides(cls, config): return {'source'}\n"
    "    def __len__(self): return 3\n    def __getitem__(self, index): "
)
DATA: list[tuple[str, str]] = [
    (ROWS + "return {'id': 1}", "row 0 is {'id': 1} (dict); expected rl.api.types.Sample"),
    (ROWS + "return Sample(7, 'a')", "row 0 has id 7 (int); expected words"),
    (ROWS + "return Sample('7', None)", "row 0 has instruction None (NoneType); expected words"),
    (ROWS + "return Sample('7', 'a', 3)", "row 0 has sources 3 (int); expected a tuple"),
    (ROWS + "raise KeyError('rows')", "stranger.D raises KeyError: 'rows' ("),
    (ROWS.replace("return 3", "return '6'") + "...", "stranger.D raises TypeError: 'str' object"),
    (ROWS.replace("return 3", "return 0") + "...", "stranger.D holds no row"),
    (
        ROWS + "...\n    def __init__(self, config, rules): open('/no/where')",
        "stranger.D raises FileNotFoundError: [Errno 2] No such file or directory: '/no/where'",
    ),
    (
        ROWS + "return Sample('a', 'b')\n    num_skipped = -2",
        "stranger.D: num_skipped is -2 (int); expected a whole number >= 0",
    ),
    (
        ROWS + "...\n    metrics = {'n': Metric('1', 'rows')}\n"
        "    async def take_metrics(self): return {}",
        "D.take_metrics is async; expected `def take_metrics(self) -> Mapping[str, float]`",
    ),
    (
        ROWS + "...\n    @classmethod\n    def provides(cls, config): return {'sauce'}",
        "D.provides returns {'sauce'} (set); expected a set of names, {'source'}, among source",
    ),
    ("class D: pass", "class D is no DataSource: derive from rl.api.data.DataSource"),
    (
        "class D(DataSource):\n    def __getitem__(self, index): ...",
        "D has no __len__; expected `def __len__(self) -> int`",
    ),
    (
        "class D(DataSource):\n    def __len__(self): return 3\n"
        "    def __getitem__(self, index): ...\n    num_skipped = None",
        "D.num_skipped is None (NoneType); expected an int, the rows left out",
    ),
    (
        "class D(DataSource):\n    def __init__(self, config, on_bad_row, side): ...\n"
        "    def __len__(self): return 3\n    def __getitem__(self, index): ...",
        "D.__init__ is `def __init__(self, config, on_bad_row, side)`; expected `def __init__("
        "self, config: Config, rules: RowRules) -> None`",
    ),
    (
        "class D(DataSource):\n    def __len__(self): return 3\n    def __getitem__(self, i): ...\n"
        "    @classmethod\n    def provides(cls, config): return 'source'",
        "D.provides returns 'source' (str); expected a set of names, {'source'}",
    ),
    (
        "class D(DataSource):\n    def __len__(self): return 3\n    def __getitem__(self, i): ...\n"
        "    @classmethod\n    def count(cls, config): return 1 / 0",
        "D.count raises ZeroDivisionError: division by zero (",
    ),
    (
        "class D(DataSource):\n    def __len__(self): return 3\n    def __getitem__(self, i): ...\n"
        "    metrics = {'': Metric('rows', 'read')}\n    def take_metrics(self): return {}",
        "D.metrics: '' is no usable name of a metric; use letters",
    ),
]


@pytest.mark.parametrize(("code", "message"), DATA, ids=[row[1][:40] for row in DATA])
def test_a_data_sources_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    data = {"train": [{"type": "stranger.D"}]}
    [found] = problems_of(tmp_path, monkeypatch, code, data=data)
    assert found.startswith("data.train.0") and message in found, found


DRAWS = "class R(Renderer):\n    accepts = 'text'\n    runs_model = False\n"
RENDERERS: list[tuple[str, str]] = [
    (
        "class R(Renderer):\n    accepts = 'text'",
        "R has no render; expected `def render(self, jobs: ",
    ),
    (
        "class R(Renderer):\n    def render(self, jobs): ...",
        "R has no accepts; expected one of 'hidden_states', 'text', 'image_tokens'",
    ),
    (
        "class R(Renderer):\n    accepts = 'words'\n    def render(self, jobs): ...",
        "R.accepts is 'words' (str); expected one of 'hidden_states', 'text', 'image_tokens'",
    ),
    (
        DRAWS + "    def render(self, job, seed): ...",
        "R.render is `def render(self, job, seed)`; expected `def render(self, jobs: Iterable[Rend",
    ),
    (
        DRAWS + "    async def render(self, jobs): yield 1",
        "R.render is async; expected `def render(self, jobs: Iterable[RenderJob]) -> Iterator[tupl",
    ),
    (
        DRAWS + "    def __init__(self, config, device, dtype): ...\n    render = print",
        "R.__init__ is `def __init__(self, config, device, dtype)`; expected `def __init__(self, "
        "config: Config, resources: Resources) -> None`",
    ),
    (
        DRAWS + "    @classmethod\n    def prompt_template(cls, config): return '{image}'\n"
        "    def render(self, jobs): ...",
        "R.prompt_template returns '{image}' (str); expected a PromptTemplate, or None",
    ),
    (DRAWS + "    def render(self, jobs): return 1 / 0", "raises ZeroDivisionError: division by z"),
    (
        DRAWS + "    def render(self, jobs): return [Image.new('RGB', (4, 4)) for _ in jobs]",
        "(Image); expected (number of the job, RGB picture) for each job, once",
    ),
    (
        DRAWS + "    def render(self, jobs): yield 0, 'a picture'",
        "draws 'a picture' (str); expected (number of the job, RGB picture)",
    ),
    (
        DRAWS
        + "    def render(self, jobs): yield from ((n, Image.new('L', (4, 4))) for n in (0, 1))",
        "(Image); expected (number of the job, RGB picture)",
    ),
    (
        DRAWS + "    def render(self, jobs): yield 1, Image.new('RGB', (4, 4))",
        "yields pictures for jobs [1] of 0, 1; expected (number",
    ),
    (
        DRAWS + "    def render(self, jobs):\n        import numpy\n"
        "        yield 0, numpy.zeros((4, 4, 3))",
        "(ndarray); expected (number of the job, RGB picture)",
    ),
    (
        DRAWS + "    def render(self, jobs): ...\n    @classmethod\n    def savings(cls, c): ...",
        "R.savings returns None (NoneType); expected a list of Saving",
    ),
    (
        DRAWS + "    def render(self, jobs): ...\n    @classmethod\n"
        "    def reads_from(cls, config): return 3",
        "R.reads_from returns 3 (int); expected a list of hub ids, folders or files",
    ),
    (
        DRAWS + "    def render(self, jobs): ...\n    @classmethod\n"
        "    def negative_prompt(cls, config): raise SystemExit(0)",
        "R.negative_prompt raises SystemExit: 0 (",
    ),
    (DRAWS + "    def render(self, jobs): raise SystemExit(3)", "raises SystemExit: 3 ("),
    (
        "import pydantic\nclass C(PlugConfig):\n    @pydantic.field_validator('type')\n"
        "    @classmethod\n    def ok(cls, v): raise KeyError('no')\n"
        "class R(Renderer[C]):\n    accepts = 'text'\n    def render(self, jobs): ...",
        "renderer: R.Config raises KeyError: 'no' (",
    ),
]


@pytest.mark.parametrize(("code", "message"), RENDERERS, ids=[row[1][:40] for row in RENDERERS])
def test_a_renderers_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    section = {"type": "stranger.R"}
    rewards = {"mine": {"type": "tiny_plugs.nothing"}}
    [found] = problems_of(tmp_path, monkeypatch, code, renderer=section, rewards=rewards)
    assert found.startswith("renderer") and message in found, found
    assert "\n" not in found


def test_a_renderer_that_edits_needs_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        DRAWS + "    needs_source = True\n"
        "    def render(self, jobs): yield from ((n, Image.new('RGB', (4, 4))) for n in (0, 1))"
    )
    bare = {"train": [{"type": "tiny_plugs.nothing"}], "validation": []}
    section = {"type": "stranger.R"}
    rewards = {"mine": {"type": "tiny_plugs.nothing"}}
    evaluation = {"every_n_iterations": 0}
    changes = {"data": bare, "rewards": rewards, "evaluation": evaluation}
    assert problems_of(tmp_path, monkeypatch, code, renderer=section, **changes) == [
        "data.train.0: renderer stranger.R edits a picture, and these samples have no source; map "
        "a column to it"
    ]


OTHERS: list[tuple[str, str, str]] = [
    ("policy", "class P(Policy): pass", "P has no build_prompt; expected `def build_prompt(self, "),
    ("policy", "class P(Policy): pass", "P has no emits; expected a set of 'hidden_states', "),
    (
        "policy",
        "class P(Policy):\n    Config = PlugConfig",
        "P.Config has no field 'device'; derive it from PolicyConfig",
    ),
    (
        "engine",
        "class P(Engine): pass",
        "P has no generate; expected `def generate(self, prompts_P",
    ),
    (
        "engine",
        "class P(Engine):\n    def generate(self, *x): ...\n    def load_weights(self): ...",
        "P.load_weights is `def load_weights(self)`; expected `def load_weights(self, weights: Pol",
    ),
    (
        "engine",
        "class P(Engine):\n    def generate(self, *x): ...\n    def load_weights(self, w): ...\n"
        "    @classmethod\n    def memory(cls, config): return 0.4",
        "P.memory returns 0.4 (float); expected EngineMemory, or None",
    ),
]


@pytest.mark.parametrize(("room", "code", "message"), OTHERS, ids=[row[2][:40] for row in OTHERS])
def test_a_policys_or_engines_mistakes_are_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str, code: str, message: str
) -> None:
    found = problems_of(tmp_path, monkeypatch, code, **{room: {"type": "stranger.P"}})
    assert any(message in problem for problem in found), found
    assert all(problem.startswith(room) and "\n" not in problem for problem in found)


def test_states_of_another_kind_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "class R(Renderer):\n    accepts = 'hidden_states'\n    state_kind = 'pre_norm'\n"
        "    def render(self, jobs): ..."
    )
    [found] = problems_of(tmp_path, monkeypatch, code, renderer={"type": "stranger.R"})
    assert found == (
        "renderer.type: stranger.R takes pre_norm hidden states, but policy qwen2_5_vl gives "
        "post_norm ones; choose another policy or renderer"
    )


LOSSES: list[tuple[str, str]] = [
    ("def f(x, y): ...", "f is `def f(x, y)`; expected `def f(x: LossInputs) -> LossTerms`"),
    ("async def f(x): ...", "f is async; expected `def f(x: LossInputs) -> LossTerms`"),
    ("def f(x): raise SystemExit(0)", "f raises SystemExit: 0 ("),
    ("f = 3", "it is 3 (int); expected `def it(x: LossInputs) -> LossTerms`"),
    ("def f(x): return x.logprobs.sum()", "f returns tensor(0., grad_fn=<SumBackward0>) (Tensor);"),
    ("def f(x): raise ValueError('no')", "f raises ValueError: no ("),
]


@pytest.mark.parametrize(("code", "message"), LOSSES, ids=[row[1][:40] for row in LOSSES])
def test_a_losss_mistake_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    algorithm = {"loss": "stranger.f"}
    [found] = problems_of(tmp_path, monkeypatch, code, algorithm=algorithm)
    assert found.startswith("algorithm.loss: ") and message in found, found


@pytest.mark.parametrize(
    "name", ["../../evil", "..", "a b", "a.b c", "rl/rewards/viescore", "shared", "os", "a..b", "."]
)
def test_a_name_that_is_none_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    [found] = problems_of(tmp_path, monkeypatch, "", rewards={"mine": {"type": name}})
    assert found.startswith(f"rewards.mine.type: no plug {name!r} in rl/rewards; ")


def test_a_rewards_own_name_is_a_metrics_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [found] = problems_of(tmp_path, monkeypatch, "", rewards={"a/b": {"type": "viescore"}})
    assert found.startswith("rewards.a/b: no usable name of a metric; use letters, digits")


def test_repeats_at_temperature_0_are_refused_before_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = {"api_base": "http://127.0.0.1:4877", "temperature": 0}
    section = {"type": "viescore", "n_evals": 3}
    [found] = problems_of(tmp_path, monkeypatch, "", rewards={"vie": section}, judge=judge)
    assert found == (
        "rewards.vie.n_evals: n_evals=3 at judge temperature 0 buys one answer 3 times: set the "
        "reward's temperature above 0, or its n_evals to 1"
    )


RIGHT = """
import torch
from rl.api.loss import LossInputs, LossTerms
from rl.api.types import Completion, PolicyWeights, Prompt, RenderJob, SamplingParams
from collections.abc import Iterable, Iterator, Sequence

def plain(x: RewardInput) -> float:
    return min(1.0, len(x.text) / 100)

async def later(x: RewardInput) -> RewardOutput:
    return RewardOutput(0.5, {"half": 0.5})

@reward(needs={"image"}, unit_parts={"level"})
def declared(x: RewardInput) -> RewardOutput:
    assert x.image is not None
    return RewardOutput(0.5, {"level": x.image.width / 1000})

class MyConfig(PlugConfig):
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

class Longest(Reward):
    async def score_group(self, inputs_G: Sequence[RewardInput]) -> list[RewardOutput]:
        longest = max(len(x.text) for x in inputs_G)
        return [RewardOutput(float(len(x.text) == longest)) for x in inputs_G]

class Words(DataSource[MyConfig]):
    def __init__(self, config: MyConfig, rules: RowRules) -> None:
        self.num_skipped = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Sample:
        return Sample(str(index), "paint it red")

    @classmethod
    def provides(cls, config: MyConfig) -> set[str]:
        return {"source"}

class Poster(Renderer[MyConfig]):
    accepts = "text"
    runs_model = False

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Image.Image]]:
        for number, job in enumerate(jobs):
            yield number, Image.new("RGB", (int(8 * self.config.scale), len(job.payload)))

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
        said = [self.policy.encode_completion(p.sample.instruction) for p in prompts_P]
        return [[completion] * params.num_completions for completion in said]

    def load_weights(self, weights: PolicyWeights) -> None:
        pass

def grpo_again(x: LossInputs) -> LossTerms:
    ratio = (x.logprobs - x.old_logprobs.detach()).masked_fill(~x.mask, 0.0).exp()
    bounded = ratio.clamp(1.0 - x.clip_low, 1.0 + x.clip_high)
    terms = -torch.minimum(ratio * x.advantages, bounded * x.advantages)
    clipped = (bounded * x.advantages < ratio * x.advantages) & x.mask
    weights = x.mask.float() / x.denominators.num_tokens
    return LossTerms(terms, weights, ratio.detach(), clipped)
"""


def test_right_plugs_of_every_form_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("plain", "later", "declared", "Scaled", "Longest")
    rewards = {name: {"type": f"stranger.{name}"} for name in names}
    found = problems_of(
        tmp_path,
        monkeypatch,
        RIGHT,
        rewards={**rewards, "Scaled": {"type": "stranger.Scaled", "scale": 1}},
        final_reward={"weights": {"declared/level": 1, "Scaled": 2}},
        algorithm={"loss": "stranger.grpo_again"},
        data={"train": [{"type": "stranger.Words", "scale": 2}]},
        renderer={"type": "stranger.Poster", "scale": 2},
        engine={"type": "stranger.Parrot", "scale": 0.4},
    )
    assert found == []


def test_mypy_checks_a_strangers_plug(tmp_path: Path) -> None:
    file = tmp_path / "stranger.py"
    wrong = (
        "class Wrong(Reward[MyConfig]):\n"
        "    async def grade(self, x: RewardInput) -> str:\n"
        "        return self.config.scal\n"
    )
    file.write_text(HEAD + RIGHT)
    assert typing_errors([file], tmp_path) == []
    file.write_text(HEAD + RIGHT + wrong)
    found = typing_errors([file], tmp_path)
    assert 'Return type "Coroutine[Any, Any, str]" of "grade" incompatible' in found[0]
    assert '"MyConfig" has no attribute "scal"; maybe "scale"?' in found[-1]
