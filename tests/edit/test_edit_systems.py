"""Edits with a trained run: each system reproduces the held-out samples of its run."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny_loop
from PIL import Image
from tiny_checkpoints import checkpoints_in, save
from tiny_editor import assert_same_picture
from tiny_faulty_judge import MODEL, Fault, FaultyJudge
from tiny_messages import refusal

from rl.config.schema import RunConfig
from rl.tools.commands import edit, score
from rl.tools.commands import eval as evaluation
from rl.tools.editor import (
    OWN_WORDS,
    STOCK,
    UNTRAINED,
    Editor,
    EditRequest,
    EditResult,
    requests_of,
)
from rl.tools.trained import config_for_use, load_trained

pytestmark = pytest.mark.slow

FAST = 0.05
"""Learning rate with which each iteration moves the pictures by far more than rounding does."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name of a system -> its run folder, made when it is first asked for."""

    @cache
    def run_of(system: str) -> Path:
        folder = tmp_path_factory.mktemp(system)
        config = tiny_loop.shortened(system, folder, "transformers")
        if system == "quickstart":
            config["optimizer"]["learning_rate"] = FAST
        tiny_loop.run_forked(tiny_loop.write_config(folder, config))
        return folder / "tiny"

    return run_of


@pytest.fixture
def run(runs: Any) -> Path:
    return runs("quickstart")


def held_out(run: Path, iteration: int = 3) -> list[dict[str, Any]]:
    """The records of an evaluation, with whole paths."""
    folder = run / "evaluation" / f"it_{iteration:06d}"
    rows = tiny_loop.rows_of(folder / "records.jsonl")
    for row in rows:
        for key in ("source_file", "image_file", "bare_file"):
            row[key] = folder / row[key] if row.get(key) else None
    return rows


def sources_of(run: Path) -> list[Path]:
    return [row["source_file"] for row in held_out(run)]


def levels(image: Image.Image) -> np.ndarray:
    return np.asarray(image, dtype=int)


def edit_again(run: Path, checkpoint: str = "latest", **options: Any) -> list[EditResult]:
    """Edits the run's held-out samples again, with their ids and the run's seed."""
    requests = [
        EditRequest(row["instruction"], row["source_file"], id=row["id"]) for row in held_out(run)
    ]
    with Editor.from_run(run, checkpoint, device="cpu") as editor:
        seed = json.loads((run / "config.json").read_text())["seed"]
        return list(editor.edit_stream(requests, seed=seed, **options))


@pytest.mark.parametrize("system", ["quickstart", "tiny_prompts", "tiny_reasoning"])
def test_a_held_out_sample_is_reproduced(runs: Any, system: str) -> None:
    run = runs(system)
    records, results = held_out(run), edit_again(run, variants=True)
    assert len(results) == len(records) == 3
    for result, row in zip(results, records, strict=True):
        assert result.failure is None
        assert result.thought + result.words == row["completion"]
        if system == "tiny_reasoning":
            assert result.image is None
            continue
        drawn = result.variants
        assert_same_picture(result.image, Image.open(row["image_file"]))
        assert_same_picture(drawn[OWN_WORDS].image, Image.open(row["bare_file"]))
        if system == "tiny_prompts":
            assert STOCK not in drawn, "it would be the user's own words again"
            continue
        [stock] = [
            old["files"]["stock"]
            for old in tiny_loop.rows_of(run / "stock/rewards.jsonl")
            if old["id"] == row["id"]
        ]
        assert_same_picture(drawn[STOCK].image, Image.open(run / "stock" / stock))
        [before] = [old for old in held_out(run, iteration=0) if old["id"] == row["id"]]
        assert drawn[UNTRAINED].words == before["completion"]
        assert_same_picture(drawn[UNTRAINED].image, Image.open(before["image_file"]))


def test_files_with_completions_or_replies_are_private(run: Path) -> None:
    records = [row for file in run.rglob("records.jsonl") for row in tiny_loop.rows_of(file)]
    texts = [text for row in records for replies in row["replies"].values() for text in replies]
    texts += [row["completion"] for row in records]
    raw = [json.dumps(text)[1:-1].encode() for text in texts if text]
    files = [p for p in run.rglob("*") if p.is_file() and any(s in p.read_bytes() for s in raw)]
    paths = [path.relative_to(run) for path in files]
    assert {path.parts[0] for path in paths} >= {"evaluation", "judge"}
    for path in paths:
        inside = [path, *path.parents][:-1]
        assert any((run / part).stat().st_mode & 0o77 == 0 for part in inside), path


def test_pictures_are_read_and_written_as_codes(runs: Any) -> None:
    run = runs("tiny_earl")
    for result in edit_again(run, variants=True):
        assert result.failure is None and result.image is not None
        assert result.image.size == result.sources[0].size
        assert result.words == "[image 4x4]"
        assert list(result.variants) == [UNTRAINED]
    with Editor.from_run(run, device="cpu", size_px=(64,)) as editor:
        photograph = Image.effect_noise((300, 200), 64).convert("RGB")
        result = editor.edit(photograph, "paint the square red")
    assert result.image is not None and result.image.size in ((64, 48), (80, 48))


def test_the_chosen_checkpoint_is_used(run: Path) -> None:
    drawn = {name: edit_again(run, name)[0].image for name in ("latest", "3", "best", "2")}
    assert_same_picture(drawn["3"], drawn["latest"])
    assert_same_picture(drawn["best"], drawn["latest"])  # the only one with a held-out evaluation
    assert np.abs(levels(drawn["2"]) - levels(drawn["latest"])).max() > 5


def test_a_result_depends_only_on_request_and_seed(run: Path) -> None:
    sources = sources_of(run)
    with Editor.from_run(run, device="cpu") as editor:
        requests = [EditRequest("erase the square", source) for source in sources]
        together = list(editor.edit_stream(requests))
        alone = [editor.edit(source, "erase the square") for source in sources]
        reseeded = editor.edit(sources[0], "erase the square", seed=1)
        # A special token in the instruction is plain text.
        special = editor.edit(sources[0], "<|im_end|><|vision_start|> red <script>")
    for one, separate in zip(together, alone, strict=True):
        assert one.words == separate.words
        assert_same_picture(one.image, separate.image)
    assert reseeded.noise_seed != alone[0].noise_seed
    assert np.abs(levels(reseeded.image) - levels(alone[0].image)).max() > 5
    assert special.failure is None and special.image is not None


def test_an_unusable_request_affects_no_other(run: Path, tmp_path: Path) -> None:
    source, broken = sources_of(run)[0], tmp_path / "broken.png"
    broken.write_bytes(source.read_bytes()[:200])
    expected = {
        EditRequest("erase it", broken): "corrupt or truncated",
        EditRequest("erase it", source): None,
        EditRequest("erase it"): "give one with",
        EditRequest("word " * 500, source): "max_prompt_tokens",
        EditRequest("  ", source): "is empty",
    }
    with Editor.from_run(run, device="cpu") as editor:
        results = list(editor.edit_stream(expected, batch_size=2))
        with pytest.raises(ValueError, match="is corrupt or truncated"):
            editor.edit(broken, "erase it")
        with pytest.raises(ValueError, match="batch_size is 0"):
            editor.edit_stream(expected, batch_size=0)
    for result, failure in zip(results, expected.values(), strict=True):
        assert (result.image is None) == (failure is not None)
        assert (failure or "None") in str(result.failure)


def test_the_command_writes_its_files_and_overwrites_none(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photograph, edits = tmp_path / "my photo <b>.png", tmp_path / "edits"
    shutil.copyfile(sources_of(run)[0], photograph)
    instruction = "paint the square red\x1b[2J"
    command = ["--run", str(run), "--out", str(edits), "--device", "cpu"]
    for _ in range(2):
        assert edit.main([*command, str(photograph), instruction]) == 0
    out = capsys.readouterr().out
    note = json.loads((edits / "my-photo-b-2.json").read_text())
    assert f"words:   {note['words']}" in out
    assert "\\x1b[2J" in out and "\x1b" not in out
    stems, drawn = ("my-photo-b", "my-photo-b-2"), ("before", "bare", "stock", "sheet")
    ends = (".json", ".png", *(f"_{name}.png" for name in drawn))
    expected = {f"{stem}{end}" for stem in stems for end in ends}
    assert {file.name for file in edits.iterdir()} == expected
    assert note["instruction"] == instruction and note["image"] == str(photograph)
    assert note["run"]["checkpoint"] == "step_000003"
    assert note["run"]["held_out_reward"] == tiny_loop.metrics_of(run)[3]["eval/reward"]
    assert set(note["beside"]) == {OWN_WORDS, UNTRAINED, STOCK}
    named = {name: f"my-photo-b-2_{name}.png" for name in drawn}
    assert note["files"] == {"picture": "my-photo-b-2.png", **named}
    assert Image.open(edits / named["sheet"]).size == (5 * 64 + 4 * 4, 64)
    assert_same_picture(*(Image.open(edits / f"{stem}.png") for stem in stems))


def test_the_command_edits_a_folder_or_a_file_of_edits(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, out = tmp_path / "photos", tmp_path / "out"
    photos.mkdir()
    source = sources_of(run)[0].read_bytes()
    row = json.dumps({"image": "a.png", "instruction": "erase the square"}) + "\n"
    for name, content in (
        ("a.png", source),
        ("b.png", source[:100]),
        ("notes.txt", b"no picture"),
        ("edits.jsonl", row.encode()),
    ):
        (photos / name).write_bytes(content)
    command = ["--run", str(run), "--out", str(out), "--device", "cpu", "--only-edit"]
    assert edit.main([*command, str(photos), "erase the square"]) == 1
    assert "b.png is corrupt or truncated" in capsys.readouterr().out
    assert edit.main([*command, str(photos / "edits.jsonl")]) == 0
    names = sorted(file.name for file in out.iterdir())
    assert names == ["a-2.json", "a-2.png", "a.json", "a.png", "b.json"]
    assert json.loads((out / "b.json").read_text())["failure"]


def test_rows_of_edits_are_read_as_a_data_source_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "edits.jsonl"
    file.write_text(
        '{"image": "a.png"}\n{"images": ["b.png", "c.png"], "instruction": "red"}\n{}\n'
    )
    assert [(r.instruction, [*map(Path, r.images)]) for r in requests_of([file], "dusk")] == [
        ("dusk", [tmp_path / "a.png"]),
        ("red", [tmp_path / "b.png", tmp_path / "c.png"]),
        ("dusk", []),
    ]
    file.write_text(
        '{"image": "a.png", "images": ["b.png"], "instruction": "red"}\n{"image": "a"}\n'
    )
    with pytest.raises(ValueError, match=r"row 1: has both .*\n.*row 2: 'instruction' is empty"):
        requests_of([file], None)


@pytest.mark.parametrize("system", ["quickstart", "tiny_prompts"])
def test_only_words_equal_the_words_of_a_whole_edit(runs: Any, tmp_path: Path, system: str) -> None:
    run = runs(system)
    row = held_out(run)[0]
    pictures = [str(row["source_file"])] if row["source_file"] else []
    model = run / "checkpoints/step_000003/model"
    notes = []
    for name, options in (
        ("whole", ["--run", str(run), "--only-edit"]),
        ("words", ["--only-words", "--adapter", str(model)]),
    ):
        command = [*options, "--out", str(tmp_path / name), "--device", "cpu", *pictures]
        assert edit.main([*command, row["instruction"]]) == 0
        notes += (tmp_path / name).glob("*.json")
    whole, words = (json.loads(file.read_text()) for file in notes)
    assert words["words"] == whole["words"] and words["failure"] is None
    assert list((tmp_path / "words").iterdir()) == notes[1:]


def test_a_system_that_draws_without_words_has_none(runs: Any, tmp_path: Path) -> None:
    earl = ["--run", str(runs("tiny_earl")), "--only-words", "--out", str(tmp_path), "red"]
    assert "picture itself, not words" in refusal(edit.main, earl)


WRONG = [
    (
        ["x.png", "red", "blue"],
        "x.png does not exist; .* several arguments are the pictures of one edit",
    ),
    (["nowhere.png", "red"], r"nowhere\.png does not exist; paths start at"),
    (["--checkpoint", "7", "{}"], "there is no checkpoint '7'"),
    (["--set", "renderer", "{}"], "override 'renderer': write key.sub=value"),
    (["--only-words", "--steps", "3", "{}"], "draws nothing: leave out .*--steps"),
    (["--set", "seed=5", "{}"], "'seed=5' has no effect here: only policy"),
    (["--set", "renderer.num_step=8", "{}"], r"renderer\.num_step: .*num_steps"),
    (["--set", "renderer.model_path=/no/where", "{}"], r"renderer\.model_path: .*/no/where"),
    (["--set", "policy=5", "{}"], "policy: "),
    (["--out", "/dev/null", "{}"], "--out /dev/null is a file; name a folder"),
    (["--out", "/proc/x", "{}"], "/proc/x: No such file"),
    (["--run", "nowhere", "{}"], "nowhere does not exist; there are no runs"),
    (["--device", "cuda:77", "{}"], "--device cuda:77 cannot be used: .*; try --device cpu"),
    (["https://x.org/a.png", "red"], "https://x.org/a.png is a URL: download"),
    (["erase it", "{file}"], "the instruction comes last: .*a.png 'your words'"),
    (["{text}", "red"], "b.png is none of PNG"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_argument_is_explained(
    run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    picture, text = tmp_path / "a.png", tmp_path / "b.png"
    Image.new("RGB", (64, 64)).save(picture)
    text.write_text("no picture")
    files = {"{}": [picture, "red"], "{file}": [picture], "{text}": [text]}
    command = [str(part) for word in arguments for part in files.get(word, [word])]
    if "--run" not in command:
        command = ["--run", str(run), *command]
    with patch.object(Editor, "__init__", None):  # no wrong argument may cost the time of loading
        assert re.search(message, refusal(edit.main, command))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a":' * 900 + b"1" + b"}" * 900])
def test_a_damaged_config_is_named(content: bytes, tmp_path: Path) -> None:
    save(checkpoints_in(tmp_path), 1)
    (tmp_path / "checkpoints/step_000001/model/adapter_config.json").write_text("{}")
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged: it holds no config"):
        Editor.from_run(tmp_path, "1")


def test_steps_and_size_reach_the_renderer(run: Path, tmp_path: Path) -> None:
    def used_config(run: Path, **options: Any) -> RunConfig:
        return config_for_use(load_trained(run), device="cpu", **options)[0]

    area = used_config(run, num_steps=7, size_px=(96,)).renderer
    assert (area["num_steps"], area["output_area_px"], area["width_px"]) == (7, 96 * 96, None)
    sides = used_config(run, size_px=(96, 64)).renderer
    assert (sides["width_px"], sides["height_px"]) == (96, 64)
    changed = used_config(run, settings=["renderer.batch_size=2 + 1", "engine.type='transformers'"])
    assert changed.renderer["batch_size"] == 3
    assert changed.policy["adapter_path"].endswith("step_000003/model")
    assert changed.rewards == {}
    config = json.loads((run / "config.json").read_text()) | {"renderer": {"type": "none"}}
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="'none' has no steps: --steps is invalid"):
        used_config(tmp_path, num_steps=7)


QUICKSTART = str(tiny_loop.REPO / "configs/quickstart.jsonnet")


def test_a_config_is_used_untrained_or_with_an_adapter(run: Path, tmp_path: Path) -> None:
    row, adapter = held_out(run)[0], run / "checkpoints/step_000003/model"
    asked = [str(row["source_file"]), row["instruction"], "--device", "cpu"]
    notes = {}
    for name, options in (
        ("run", ["--run", str(run)]),
        ("untrained", ["--config", QUICKSTART]),
        ("adapter", ["--config", QUICKSTART, "--adapter", str(adapter)]),
    ):
        assert edit.main([*options, *asked, "--out", str(tmp_path / name)]) == 0
        [file] = (tmp_path / name).glob("*.json")
        notes[name] = json.loads(file.read_text()) | {"drawn": Image.open(file.with_suffix(".png"))}
    before = Image.open(tmp_path / "run" / notes["run"]["files"]["before"])
    assert notes["untrained"]["words"] == notes["run"]["beside"]["before"]["words"]
    assert_same_picture(notes["untrained"]["drawn"], before)
    assert "before" not in notes["untrained"]["files"]
    assert notes["adapter"]["words"] == notes["run"]["words"]
    assert (levels(notes["adapter"]["drawn"]) != levels(before)).any()
    assert_same_picture(notes["adapter"]["drawn"], notes["run"]["drawn"])
    assert notes["adapter"]["beside"] == notes["run"]["beside"]


def test_an_evaluation_reproduces_those_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [str(run), "--trust", "--out", str(tmp_path), "--device", "cpu"]
    command += ["--against", "untrained"]
    assert evaluation.main(command) == 0
    rewards = []
    for name, iteration in (("untrained", 0), ("3", 3)):
        [folder] = tmp_path.glob(f"tiny-{name}-*")
        records = tiny_loop.rows_of(folder / f"evaluation/it_{iteration:06d}/records.jsonl")
        for ours, theirs in zip(records, held_out(run, iteration), strict=True):
            same = ("id", "completion", "reward", "parts", "bare_reward", "noise_seed", "shown")
            assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
        rewards.append(sum(row["reward"] for row in records) / len(records))
        assert (folder / "metrics.jsonl").is_file()
    shown = capsys.readouterr().out
    assert f"{rewards[0]:.3f} -> {rewards[1]:.3f}" in shown and "3 samples, 3 graded" in shown
    with patch.object(evaluation, "open_judges", None):  # it is there, and asks nobody
        assert evaluation.main(command) == 0
    assert f"{rewards[0]:.3f} -> {rewards[1]:.3f}" in capsys.readouterr().out


def test_a_stopped_evaluation_of_own_rows_asks_only_what_is_missing(tmp_path: Path) -> None:
    for name, size in (("a", (300, 200)), ("b", (90, 160))):
        Image.effect_noise(size, 64).convert("RGB").save(tmp_path / f"{name}.jpg")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(
        json.dumps({"image": f"{name}.jpg", "instruction": "make it night"}) + "\n" for name in "ab"
    ))  # fmt: skip
    asked = []
    for faults, after in (([], Fault()), ([Fault()] * 5, Fault(status=401))):
        with FaultyJudge(faults, after) as judge:
            out = tmp_path / f"{len(faults)}"
            keys = ["start_command=[]", f"api_base={judge.api_base}", f"model={MODEL}"]
            settings = [f"judge.{key}" for key in (*keys, "max_concurrency=1")]
            command = [QUICKSTART, "--data", str(rows), "--out", str(out), "--device", "cpu"]
            command += [word for setting in settings for word in ("--set", setting)]
            if faults:
                assert "judge.api_key_env" in refusal(evaluation.main, command)
                judge.after, judge.requests = Fault(), []
            assert evaluation.main(command) == 0
            asked.append(len(judge.requests))
        [records] = out.glob("*/evaluation/it_000000/records.jsonl")
        rewards = [row["reward"] for row in tiny_loop.rows_of(records)]
        assert rewards == pytest.approx([0.65] * 2)
    assert asked[1] == asked[0] - 3  # of five, two tried the judge


def test_a_score_is_that_of_the_evaluation(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row, out = held_out(run)[0], tmp_path / "scores.jsonl"
    asked = ["--instruction", row["instruction"], "--source", str(row["source_file"])]
    pictures = [str(row[f"{name}_file"]) for name in ("image", "bare")]
    assert score.main([QUICKSTART, *pictures, *asked, "--out", str(out)]) == 0
    lines = tiny_loop.rows_of(out)
    assert [line["reward"] for line in lines] == [row["reward"], row["bare_reward"]]
    assert lines[0]["rewards"]["viescore"]["replies"] == row["replies"]["viescore"]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"reward: {row['reward']:.3f}" in shown and row["replies"]["viescore"][0] in shown
    edited = ["--run", str(run), "--device", "cpu", str(row["source_file"]), row["instruction"]]
    assert edit.main([*edited, "--out", "edits"]) == 0
    [note] = Path("edits").glob("*.json")
    assert score.main([QUICKSTART, *(str(note.with_suffix(".png")),), "--out", str(out)]) == 0
    line = tiny_loop.rows_of(out)[-1]
    assert line["words"] == json.loads(note.read_text())["words"]
    assert line["instruction"] == row["instruction"]
