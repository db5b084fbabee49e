"""Code that a stranger's run folder names runs only if the user names it on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_checkpoints import checkpoints_in, save
from tiny_config import REPO
from tiny_messages import holds, refusal
from tiny_run import run_config

from rl import build
from rl.api.types import Sample
from rl.config.schema import load_config
from rl.model_files import read_config
from rl.tools.commands import edit, score
from rl.tools.commands import eval as evaluation
from rl.tools.trained import Trained, config_for_use, load_trained

CONFIGS = REPO / "configs"


def strangers_run(folder: Path, **sections: Any) -> Path:
    """The model folder of the run's only checkpoint."""
    save(checkpoints_in(folder), 1)
    model = folder / "checkpoints/step_000001/model"
    (model / "adapter_config.json").write_text('{"r": 1, "lora_alpha": 1}')
    write_sections(folder, **sections)
    return model


def write_sections(folder: Path, **sections: Any) -> None:
    values = run_config().model_dump(mode="json") | sections
    (folder / "config.json").write_text(json.dumps(values))


def test_a_plugin_of_its_own_is_not_imported_unasked(tmp_path: Path) -> None:
    (tmp_path / "evilplugin.py").write_text("open('ran', 'w')\n")
    model = strangers_run(tmp_path)
    evil = {"type": "evilplugin.Draws"}
    sections = {
        "policy": evil,
        "engine": evil,
        "rewards": {"a": evil},
        "algorithm": {"loss": "evilplugin.loss"},
        "renderer": evil,
    }
    options = {"policy": "--policy evilplugin.Draws", "renderer": "--set renderer.type"}
    for key, value in sections.items():
        write_sections(tmp_path, **{key: value})
        for run in (tmp_path, model):
            refusal = _refusal(run)
            if key in options:
                assert holds(refusal, f"{key}.type ... evilplugin.Draws ... {options[key]}")
        assert not (tmp_path / "ran").exists(), key
    # Named by the user, the file is imported from the working folder, as in training.
    assert "evilplugin" in _refusal(tmp_path, ["renderer.type=evilplugin.Draws"])
    assert (tmp_path / "ran").exists()


def _refusal(run: Path, settings: Sequence[str] = ()) -> str:
    try:
        config_for_use(load_trained(run), settings)
    except ValueError as error:
        return str(error)
    return ""


STRANGE: list[tuple[dict[str, Any], str]] = [
    ({"rewards": {"a": {"type": "evilplugin.a"}}}, "evilplugin.a, whose code would run here"),
    ({"data": {"train": [], "validation": [{"type": "evilplugin.b"}]}}, "evilplugin.b, whose code"),
    ({"judge": {"api_base": "http://evil"}}, "http://evil ... --set judge.api_base=URL"),
    ({"judge": {"start_command": ["evil"]}}, "evil ... --set judge.start_command=[]"),
    (
        {"renderer": {"type": "images_api", "api_base": "http://evil", "model": "m"}},
        "http://evil ... --set renderer.api_base=URL",
    ),
]


@pytest.mark.parametrize(("sections", "what"), STRANGE, ids=[what for _, what in STRANGE])
def test_an_evaluation_gives_a_strangers_judge_and_code_no_data(
    tmp_path: Path, sections: dict[str, Any], what: str
) -> None:
    strangers_run(tmp_path, **sections)
    assert holds(refusal(evaluation.main, [str(tmp_path)]), f"{what} ... --trust")


@pytest.mark.parametrize(
    ("sections", "what"),
    [
        ({"rewards": []}, "rewards: [] given"),
        ({"renderer": {}}, "renderer.type: missing"),
        ({"algorithm": 3}, "algorithm.truncated_completions: null given"),
    ],
)
def test_an_evaluation_of_a_damaged_config_names_the_key(
    tmp_path: Path, sections: dict[str, Any], what: str
) -> None:
    strangers_run(tmp_path, **sections)
    assert what in refusal(evaluation.main, [str(tmp_path)])


def test_only_its_address_makes_a_judge_the_users_own(tmp_path: Path) -> None:
    strangers_run(tmp_path, judge={"api_base": "http://evil", "api_key_env": "SECRET"})
    for stated, missing in (
        ("judge.timeout_s=60", "judge.api_base=URL ... judge.api_key_env"),
        ("judge.api_base=http://mine", "api_key_env SECRET"),  # it would get the run's secret
    ):
        assert holds(refusal(evaluation.main, [str(tmp_path), "--set", stated]), missing)


def test_an_evaluation_of_other_rows_pictures_or_weights_is_another(tmp_path: Path) -> None:
    resolved = build.resolve(load_config(CONFIGS / "quickstart.jsonnet"))
    red, blue = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    sample = Sample("a", "dusk", (red,))
    others = [{"instruction": "dawn"}, {"sources": (blue,)}, {"target": blue}, {"hidden": {"x": 1}}]
    samples = [sample, *(replace(sample, **other) for other in others)]
    trained = Trained(tmp_path, True, {})
    digests = [evaluation._digest(trained, resolved, [each]) for each in samples]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other weights under the same path")
    digests.append(evaluation._digest(trained, resolved, [sample]))
    assert len(set(digests)) == 6


def test_what_a_score_or_an_edit_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "a_sheet", "c"):
        Image.new("RGB", (64, 64)).save(f"{name}.png")
    files = {"picture": "a.png", "sheet": "a_sheet.png"}
    Path("a.json").write_text(json.dumps({"files": files, "instruction": "", "image": "gone.png"}))
    Path("b.json").write_text('{"files": ["b.png"], "instruction": 5}')  # not of rl edit
    quickstart = str(CONFIGS / "quickstart.jsonnet")
    real = str(CONFIGS / "qwen_image_edit.jsonnet")
    asked = ["--instruction", "dusk", "--source", "a.png"]
    for arguments, message in (
        ([quickstart, "a.png"], "a.png: say what was asked for: --instruction"),
        ([quickstart, "a_sheet.png", *asked], "a_sheet.png shows several"),
        ([quickstart, "b.png", *asked], "b.png does not exist"),
        ([quickstart, "judge.model=x", *asked], "nothing to grade: give a picture"),
        ([real, "a.png", *asked], "judge.api_base is empty"),
        ([quickstart, "c.png", *asked[:2]], "rewards.viescore is left out ... 'source': --source"),
        ([quickstart, "a.png", *asked[:2]], "its source gone.png is not here: give --source"),
        ([quickstart, "a.png", *asked, "--out", "."], ".: "),
    ):
        assert holds(refusal(score.main, arguments), message), arguments
    earl = ["--config", str(CONFIGS / "tiny_earl.jsonnet"), "a.png", "dusk"]
    assert holds(refusal(edit.main, earl), "picture size is unknown: give --size")
    reasoning = str(CONFIGS / "tiny_reasoning.jsonnet")
    assert (
        score.main([reasoning, "a.png", *asked, "--words", "<think>a</think><answer>2</answer>"])
        == 1
    )
    shown = capsys.readouterr()
    assert holds(shown.err, "rewards.accuracy is left out ... 'answer', which a picture lacks")
    assert holds(shown.out, "a.png: dusk ... format: 1.000 ... reward: none")


def test_an_adapter_that_names_a_module_is_refused(tmp_path: Path) -> None:
    """PEFT imports `megatron_core` where `megatron_config` is set."""
    config = {"r": 1, "megatron_config": {"a": 1}, "megatron_core": "evilplugin"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"adapter_config\.json names megatron_config"):
        read_config(tmp_path)
