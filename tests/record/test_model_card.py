"""Model cards: their metadata for the hub, their content, and that foreign text is escaped."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, metadata_load
from markdown_it import MarkdownIt
from markdown_it.token import Token
from tiny_messages import holds
from tiny_run import run_config

from rl import build
from rl.model_files import licence_of
from rl.record.publish import model_card

HOSTILE = (
    "</td><script>alert(1)</script> | `code` ```\n---\nlicense: mit\n---\n# head ![p](http://evil) "
    "[l](javascript:x) http://evil.example www.evil.example @everyone $x$ \\(y\\) **b** _i_ ~~s~~ "
    "&lt;b&gt; \u2028\u202e '\"{{ x }} <!-- {% raw %}"
)


METRICS = {"eval/reward": 0.81234, "time/learn_s": 3.0, "status/ungraded": 0.015}


def card(form: Any = None, metrics: Any = METRICS, **changes: Any) -> str:
    config = run_config(**changes).model_dump(mode="json")
    return model_card(config, 50, metrics, form, {0: 0.3, 25: None, 50: 0.9})


def test_the_card_of_a_checkpoint_has_its_base_model_and_scores():
    text = card()
    assert ModelCard(text).data.to_dict() == {
        "base_model": "some/base",
        "base_model_relation": "adapter",
        "library_name": "peft",
        "license": "other",
        "license_name": "unknown",
        "pipeline_tag": "image-text-to-text",
        "tags": ["grpo", "reinforcement-learning"],
    }
    assert holds(text, "50 iterations ... GRPO ... judge (viescore)")
    assert "| eval/reward | 0.8123 |" in text and "time/learn_s" not in text


@pytest.mark.parametrize("path", ["/models/qwen", "./here/qwen", "assets/tiny/policy"])
def test_a_local_folder_is_no_base_model_and_its_path_is_not_published(path):
    text = card(policy={"type": "qwen2_5_vl", "model_path": path})
    assert "base_model:" not in text and path not in text
    assert f'"model_path": "(a path)/{Path(path).name}"' in text


def test_the_card_of_a_run_has_held_out_scores_and_limits():
    text = card(
        "text-encoder",
        METRICS | {"drift/alarm": 1.0, "eval/gain_over_stock": 0.25},
        renderer={"type": "qwen_image_edit_plus", "model_path": "Qwen/Qwen-Image-Edit-2509"},
        judge={"api_base": "http://judge.intern.example:8000", "model": "some-judge"},
        data={"train": [{"type": "hf_dataset", "path": "me/edits"}]},
    )
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag) == ("diffusers", "image-to-image")
    assert (data.datasets, data["base_model_relation"]) == (["me/edits"], "finetune")
    for parts in (
        "| eval/gain_over_stock | 0.25 |\n| eval/reward | 0.8123 |",
        "| 0 | 0.3000 |\n| 50 | 0.9000 |",
        "- 1.5% of the last",
        "- DRIFT: fixed prompts",
        "judge some-judge",
        'QwenImageEditPlusPipeline.from_pretrained("Qwen/Qwen-Image-Edit-2509", text_encoder',
        "stock pipeline",
        "| me/edits | other unknown |",
    ):
        assert holds(text, parts), parts
    assert "intern.example" not in text


def test_a_card_names_what_was_trained_and_its_classes():
    editor = {"init_text_encoder_from": "Qwen/Qwen-Image-Edit", "model_path": "some/words"}
    text = card(policy={"type": "qwen2_5_vl", "lora": {"r": 8}} | editor)
    assert holds(text, "\nbase_model: Qwen/Qwen-Image-Edit\n ... (of some/words)")
    assert 'from_pretrained("Qwen/Qwen-Image-Edit", subfolder="text_encoder")' in text
    newer = {"type": "qwen3_vl", "model_path": "one-word"}
    renderer = {"type": "qwen_image_21", "model_path": "owner/newer"}
    text = card("text-encoder", policy=newer, renderer=renderer)
    encoder = 'encoder = Qwen3VLForConditionalGeneration.from_pretrained("<this folder>"'
    pipeline = 'pipeline = QwenImage21Pipeline.from_pretrained("owner/newer"'
    assert holds(text, f"\nbase_model: one-word\n ... {encoder} ... {pipeline}")


def test_the_licence_is_read_from_the_readme_or_unknown(tmp_path: Path) -> None:
    unknown = ("other", "unknown")
    assert licence_of(str(tmp_path)) == unknown
    for front, licence in (
        (b"license: apache-2.0", ("apache-2.0", None)),
        (b"license: other", unknown),
        (b"license: [a, b]", unknown),
        (b"license: {", unknown),
        (b"license: \xff", unknown),
        (b"- a list", unknown),
        (b"tags: [a]", unknown),
        (b"license: other\nlicense_name: qwen-research", ("other", "qwen-research")),
    ):
        (tmp_path / "README.md").write_bytes(b"---\n" + front + b"\n---\n# a model\n")
        assert licence_of(str(tmp_path)) == licence, front
    text = card(policy={"type": "qwen2_5_vl", "model_path": str(tmp_path)})
    assert ModelCard(text).data.license_name == "qwen-research"
    assert "| local files | other qwen-research |" in text


def walk(tokens: list[Token]) -> list[Token]:
    return [inner for token in tokens for inner in (token, *walk(token.children or []))]


def test_foreign_text_on_a_card_is_escaped(tmp_path: Path) -> None:
    """On the cards of an export and of a checkpoint with hostile text everywhere."""
    config = json.loads(json.dumps(run_config().model_dump(mode="json")))
    config |= {"run_name": HOSTILE, "seed": HOSTILE, HOSTILE: HOSTILE}
    config["rewards"] = {HOSTILE: {"type": HOSTILE}}
    config["policy"] |= {"type": HOSTILE, "model_path": HOSTILE, "init_text_encoder_from": HOSTILE}
    config["judge"] |= {"model": HOSTILE, "api_base": "http://127.0.0.1:1"}
    config["algorithm"]["loss"] = HOSTILE
    config["data"]["train"] = [{"type": HOSTILE, "path": HOSTILE}]
    config["renderer"] = {"type": "qwen_image_edit", "model_path": HOSTILE}
    metrics = {f"eval/reward/{HOSTILE}": 0.5}
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for arguments in (("text-encoder", {50: 0.5}), ()):
        text = model_card(config, 50, metrics, *arguments)
        assert all(char.isprintable() or char == "\n" for char in text)
        (tmp_path / "card.md").write_text(text)
        front = metadata_load(tmp_path / "card.md")
        assert front is not None
        assert set(front) == {"library_name", "license", "license_name", "pipeline_tag", "tags"}
        assert (front["license"], front["license_name"]) == ("other", "unknown")
        tokens = walk(parser.parse(ModelCard(text).text))
        kinds = {token.type for token in tokens}
        assert not kinds & {"image", "link_open", "em_open", "strong_open", "s_open"}, kinds
        assert not [kind for kind in kinds if kind.startswith("html")], kinds
        code = {token.content for token in tokens if token.type == "code_inline"}
        assert code <= {"policy.adapter_path: '<this folder>'", "rl edit"}
        titles = [tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"]
        assert titles[0].startswith("&#60;/td&#62;&#60;script") and len(titles) < 9
        assert [t.info for t in tokens if t.type == "fence"] in (["python", "json"], ["json"])
        visible = "".join(token.content for token in tokens if token.type == "text")
        assert "</td><script>alert(1)</script> | `code` ``` --- license: mit --- # head" in visible
        rows = {line.count("|") for line in text.split("\n") if line.startswith("| ")}
        assert rows == {3}, rows
        for autolink in ("http://", "https://", "www.", "@"):
            assert autolink not in "".join(text.split("```")[0::2]).partition("\n---\n")[2]


def test_the_prompt_on_a_card_is_the_runs_and_closes_no_block() -> None:
    policy = {
        "type": "qwen2_5_vl",
        "model_path": "some/base",
        "system_prompt": f"{HOSTILE}```\n\U0001f600",
    }
    config = run_config(policy=policy, renderer={"type": "none"}).model_dump(mode="json")
    text = model_card(config, 50, {}, "adapter", template=build.prompt_template(config))
    fences = [token for token in MarkdownIt().parse(ModelCard(text).text) if token.type == "fence"]
    assert [fence.info for fence in fences] == ["python", "json"]
    constants = {
        line.targets[0].id: line.value
        for line in ast.parse(fences[0].content).body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
    }
    system, user = ast.literal_eval(constants["PROMPT"]).split("<|im_end|>", 1)
    assert system == f"<|im_start|>system\n{policy['system_prompt']}"
    assert user == "\n<|im_start|>user\n{image}{instruction}<|im_end|>\n<|im_start|>assistant\n"
    assert ast.literal_eval(constants["PICTURE"]) == "<|vision_start|><|image_pad|><|vision_end|>"


def test_no_card_contains_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "hunter2-hunter2")
    rewards = {"judge": {"type": "viescore", "header": "hunter2-hunter2"}}
    text = card("model", {"eval/reward/hunter2-hunter2": 0.5}, rewards=rewards)
    assert "hunter2" not in text and "&#60;JUDGE_TOKEN&#62;" in text


def test_an_incomplete_config_has_a_card() -> None:
    for config in ({}, {"policy": 3, "rewards": [1], "data": {"train": "x"}, "renderer": None}):
        assert "## Config" in model_card(config, 0, {}, "adapter")
