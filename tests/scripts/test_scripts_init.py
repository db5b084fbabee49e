"""`rl init` writes configs without mistakes, from options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from PIL import Image
from tiny_messages import holds, refusal

from rl import simple_launch
from rl.check import check_report
from rl.config.schema import load_config
from rl.tools.commands import init


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> str:
    """A JSONL file in the working folder, which is the test's own."""
    monkeypatch.setattr(init, "gpus", lambda: ([], "none"))
    Image.new("RGB", (64, 64)).save("a.png")
    row = {"image": "a.png", "question": "what?", "solution": "it's"}
    Path("q.jsonl").write_text("".join(json.dumps(row | {"n": n}) + "\n" for n in range(10)))
    return "q.jsonl"


SLOW = pytest.mark.slow
ODD, IN_SHELL = "an\nodd folder/x.jsonnet", r"'an'$'\n''odd folder/x.jsonnet'"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"num_iterations": 40, "run_name": "x"}),
        (["--system", "edit", "--judge", "http://j:1"], {"world_size": 8, "gpu_gb": 141}),
        (["--system", "edit", "--gpus", "1", "--gpu-gb", "80"], {"world_size": 1}),
        (["--system", "prompts", "--gpus", "2", "--name", "p"], {"run_name": "p"}),
        (["--system", "reasoning"], {"world_size": 2, "gpu_gb": 80}),
        (["--system", "reasoning", "--gpu-gb", "24", "--gpus", "1", "--data", "q.jsonl"], {}),
        pytest.param(["--system", "prompts", "--gpu-gb", "48"], {"gpu_gb": 48}, marks=SLOW),
        pytest.param(["--system", "edit", "--data", "me/edits", "--gpus", "4"], {}, marks=SLOW),
    ],
)
def test_every_system_gets_a_config_without_mistakes(
    data: str, capsys: Any, arguments: list[str], expected: dict[str, Any]
) -> None:
    assert init.main([ODD, *arguments]) == 0, capsys.readouterr().err
    assert holds(capsys.readouterr().out, rf"wrote ... nothing is wrong ... rl train {IN_SHELL}")
    config = load_config(ODD, env={})
    assert {key: getattr(config, key) for key in expected} == expected
    if "http://j:1" in arguments:
        assert config.judge.api_base == "http://j:1"
    if data in arguments:
        [train], [held_out] = config.data.train, config.data.validation
        assert (train["split"], held_out["split"]) == ("train[:-2]", "train[-2:]")
        columns = {"instruction": "question", "source": "image", "hidden": {"answer": "solution"}}
        assert train["columns"] == held_out["columns"] == columns
    assert f"//   rl train {IN_SHELL} " in Path(ODD).read_text()


def test_what_cannot_be_written_is_refused(data: str) -> None:
    Path("there.jsonnet").touch()
    for arguments, code, message in (
        (["--system", "edit", "--data", "no.jsonl"], 2, "no.jsonl does not exist"),
        (["--system", "edit", "--data", data, "--gpus", "x"], 2, "--gpus: invalid int value: 'x'"),
        (["--system", "earl"], 1, "--data is missing"),
        (["--data", data], 1, "--data has no effect"),
        (["--system", "prompts", "--judge", "http://j:1"], 1, "--judge has no effect"),
        (["--system", "edit", "--held-out", data], 1, "--data is missing"),
        (["--system", "prompts", "--data", data], 1, "--held-out is missing"),
        (["there.jsonnet"], 1, "there.jsonnet exists"),
    ):
        assert message in refusal(init.main, arguments, code)


def test_what_is_written_with_a_mistake_is_reported_with_its_key(data: str) -> None:
    edit = ["--system", "edit"]
    for number, (arguments, message) in enumerate(
        (
            (["--system", "reasoning", "--gpu-gb", "8", "--gpus", "1"], "DOES NOT FIT"),
            ([*edit, "--judge", "localhost"], "judge.api_base='localhost' is neither a URL"),
            ([*edit, "--gpus", "0"], "world_size: 0 given"),
            (["--name", "a 'b'"], "run_name: \"a 'b'\" given"),
        )
    ):
        file = f"{number}.jsonnet"
        assert holds(refusal(init.main, [file, *arguments]), f"{file} ... {message}")


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_config.DISTINCT)
def test_a_smoke_run_of_any_config_has_no_problem(name: str) -> None:
    """Its overrides also replace the length in epochs, and a warm-up longer than the run."""
    path, env = f"configs/{name}.jsonnet", tiny_config.ENVIRONMENT
    overrides = simple_launch._smoke_overrides(tiny_config.shipped(name), 1)
    config = load_config(path, ["optimizer.warmup_iterations=4", *overrides], env)
    assert config.run_name.startswith(f"{tiny_config.shipped(name).run_name}_smoke_")
    assert (config.num_iterations, config.num_epochs) == (2, None)
    assert not [p for p in check_report.problems(config) if "nowhere" not in p]


def test_each_smoke_run_has_a_name_of_its_own(tmp_path: Path) -> None:
    config = tiny_config.shipped("quickstart", f"base_exp_dir={tmp_path}")
    assert simple_launch._smoke_overrides(config, 1)[0].startswith("run_name='quickstart_smoke_")
    assert "run_name='quickstart_smoke'" in simple_launch._smoke_overrides(config, 2)
