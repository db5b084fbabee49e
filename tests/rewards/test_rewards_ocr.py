"""The reward `ocr`: quotes and distances by hand; what the network reads on real photographs.

The tests of the network need two packages that no lock has, and -s shows their table:

    pip install -e '.[ocr]' scikit-image && pytest -s tests/rewards/test_rewards_ocr.py
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from PIL import Image, ImageDraw, ImageFont
from tiny_messages import holds
from tiny_pages import save_files
from tiny_rewards import make

from rl.api.types import Region, RewardInput, RewardOutput, Sample
from rl.build import resolve
from rl.check.check_report import check_data
from rl.check.compatibility import compatibility_problems
from rl.config.schema import load_config
from rl.rewards import ocr

SIGN = 'a shop with "Grand Opening" over its door'
COLUMN = {"text_column": "sign"}


@pytest.mark.parametrize(
    ("instruction", "parts"),
    [
        (SIGN, ["Grand Opening"]),
        ("write “SALE” above „50 %“ and «Café»", ["SALE", "50 %", "Café"]),
        ("写着“你好”的牌子, 「東京」", ["你好", "東京"]),
        ("write 'it's fine' on the dogs' bowl", ["it's fine"]),
        ("Tom\u2019s sign says \u2018Don\u2019t walk\u2019", ["Don't walk"]),
        ("don't change Tom's sky, nor the cats' bed, rock 'n' roll", []),
        ("the '90s sign of the dogs' \"DINER\"", ["DINER"]),
        ('a 12" pizza, "" on it, then "HOT"', ["", "HOT"]),
    ],
)
def test_quotes_are_no_apostrophes_and_no_inches(instruction: str, parts: list[str]) -> None:
    assert ocr.quoted(instruction) == parts


@pytest.mark.parametrize(
    ("asked", "seen", "config", "value"),
    [
        ("Grand Opening", ["GRAND", "OPENING"], {}, 1),
        ("Grand Opening", ["Grand Openlng"], {}, 11 / 12),  # one replaced
        ("Grand Opening", ["GRAND"], {"ignore_case": False}, 1 / 12),  # 7 missing, 4 replaced
        ("STOP", ["NO", "STOP", "HERE"], {}, 1),  # all of it is there
        ("STOP", ["SHOP"], {}, 3 / 4),
        ("STOP", ["NO", "SHOP", "HERE"], {}, 0),  # 1 replaced, 6 superfluous: at least 0
        ("STOP", ["NO", "SHOP", "HERE"], {"other_text": "ignored"}, 3 / 4),
        ("STOP", ["NO", "PARKING"], {"other_text": "ignored"}, 2 / 4),  # the OP
        ("STOP", [], {}, 0),
        ("STOP", [], {"other_text": "ignored"}, 0),
        ("Café Noël", ["Cafe Noel"], {}, 6 / 8),
        ("50 % \u2013 it\u2019s on\uff01", ["50% - it's on!"], {}, 1),
    ],
)
def test_the_value_by_hand(
    asked: str, seen: list[str], config: Any, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions = tuple(Region(text, (0, 0, 1, 1)) for text in seen)
    monkeypatch.setattr(ocr, "read", lambda picture: regions)
    grade = grade_of(Image.new("RGB", (8, 8)), asked, **config)
    assert grade.value == pytest.approx(value) and grade.parts == {"exact": float(value == 1)}
    assert grade.replies == (" ".join(seen),) and grade.regions == regions


def grade_of(picture: Image.Image, asked: Any, **config: Any) -> RewardOutput:
    reward = make(ocr.Ocr, ocr.Config(**COLUMN | config))
    sample = Sample("a", "a sign", hidden={"sign": asked})
    return asyncio.run(reward.grade(RewardInput(sample, "words", picture)))


def test_the_reading_order_is_lines_from_the_top_each_from_the_left() -> None:
    boxes = {"4": (0, 0.6, 1, 0.7), "2": (0.6, 0.08, 1, 0.3), "1": (0, 0.1, 0.5, 0.3),
             "3": (0.3, 0.25, 0.5, 0.5)}  # fmt: skip
    ordered = ocr.in_reading_order([Region(label, box) for label, box in boxes.items()])
    assert [region.label for region in ordered] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("asked", [None, 7, " "])
def test_a_sample_without_a_target_text_is_ungraded(asked: Any) -> None:
    grade = grade_of(Image.new("RGB", (8, 8)), asked)
    assert grade.value is None and holds(grade.failure, "no_text: ")


@pytest.mark.parametrize(
    ("row", "config", "weight", "parts"),
    [
        ({"instruction": SIGN}, {}, 1, ""),
        ({"instruction": "a shop"}, {}, 1, "row 2: has no target text ... quotes"),
        ({"instruction": "a shop"}, {}, 0, ""),  # logged only
        ({"instruction": "a shop", "sign": "STOP"}, COLUMN, 1, ""),
        ({"instruction": SIGN, "sign": 7}, COLUMN, 1, "row 2: has no target text ... text_column"),
    ],
)
def test_a_row_without_a_text_to_read_is_refused_before_a_model_is_loaded(
    row: Any, config: Any, weight: int, parts: str, tmp_path: Path
) -> None:
    rows = [{"instruction": SIGN, "sign": "OPEN"}, row]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    columns = {"source": "", "hidden": {"sign": "sign"} if config else {}}
    source = {"type": "edit_jsonl", "path": str(tmp_path / "rows.jsonl"), "columns": columns}
    rewards = {"text": {"type": "ocr"} | config, "format": {"type": "format"}}
    resolved = resolve(
        tiny_config.shipped(
            "tiny_prompts",
            f"rewards={json.dumps(rewards)}",
            f"data={json.dumps({'train': [source], 'validation': [source]})}",
            f"final_reward.weights={json.dumps({'text': weight, 'format': 1})}",
        )
    )
    problems = check_data(resolved, is_start=False).problems
    assert holds(problems, parts) and bool(problems) == bool(parts)


def test_the_printed_configs_lack_only_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_files("docs/prompts.md", tmp_path)
    monkeypatch.setattr(ocr, "find_spec", lambda name: None)
    for name in ("signs", "sign_edits"):
        config = load_config(tmp_path / f"{name}.jsonnet", [], tiny_config.ENVIRONMENT)
        [problem] = compatibility_problems(resolve(config))
        assert holds(problem, "rewards.ocr.type: needs rapidocr and onnxruntime ... [ocr]")


# ---- the network ---------------------------------------------------------------------------------


def drawn(photo: str, text: str, size: int = 48, degrees: float = 0, **look: Any) -> Image.Image:
    """A photograph of 600 x 400 px with white text, outlined in black, turned around the middle."""
    picture = Image.fromarray(getattr(pytest.importorskip("skimage.data"), photo)())
    layer = Image.new("RGBA", (600, 400))
    try:  # Pillow's own font has no accents
        font = ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        pytest.skip("apt install fonts-dejavu-core")
    look = {"fill": "white", "stroke_width": 2, "stroke_fill": "black", "anchor": "mm"} | look
    ImageDraw.Draw(layer).text((300, 200), text, font=font, **look)
    turned = layer.rotate(degrees, resample=Image.Resampling.BICUBIC)
    return Image.alpha_composite(picture.convert("RGBA").resize((600, 400)), turned).convert("RGB")


CASES: list[tuple[Any, ...]] = [
    (["coffee", "GRAND OPENING"], {}, "Grand Opening", {}, 1),
    (["astronaut", "GRAND OPENING"], {}, "Grand Opening", {"ignore_case": False}, 2 / 12),
    (["chelsea", "It's 5 o'clock, Mr. Smith!", 36], {}, "It's 5 o'clock, Mr. Smith!", {}, 1),
    (["rocket", "Café Crème Noël"], {}, "Café Crème Noël", {}, 1),
    (["rocket", "Café Crème Noël"], {}, "Cafe Creme Noel", {}, 10 / 13),
    (["chelsea", "Übergröße, señor", 44], {}, "Übergröße, señor", {}, 1),
    (["coffee", "GRAND OPENING", 48, 5], {}, "Grand Opening", {}, 1),
    (["coffee", "GRAND OPENING", 48, 15], {}, "Grand Opening", {}, 1),
    (["coffee", "OPENING", 48, 90], {}, "Opening", {}, 1),
    (["coffee", "GRAND OPENING", 48, 180], {}, "Grand Opening", {}, 1),
    (["coffee", "LEFT          RIGHT", 44, 5], {}, "left right", {}, 1),
    (["astronaut", "HAPPY\nBIRTHDAY\nto you"], {}, "Happy Birthday to you", {}, 1),
    (["coffee", "HAPPY\nBIRTHDAY\nto you", 48, 5], {}, "Happy Birthday to you", {}, 1),
    (["chelsea", "Mind the gap", 12], {"stroke_width": 0}, "Mind the gap", {}, 1),
    (["coffee", "GRAND"], {"fill": (130, 95, 75), "stroke_width": 0}, "Grand", {}, 1),
    *(([photo, " "], {}, "Stop", {}, 0) for photo in ("coffee", "astronaut", "chelsea", "rocket")),
    (["coffee", "CLOSED TODAY"], {}, "Grand Opening", {}, 0),
    (["coffee", "NO PARKING\nGRAND OPENING\nTODAY"], {}, "Grand Opening", {}, 1),
    (["coffee", "GRAND OPENNIG"], {}, "Grand Opening", {}, 10 / 12),
    (["coffee", "NO PARKING\nOPENNIG"], {}, "Opening", {}, 0),
    (["coffee", "NO PARKING\nOPENNIG"], {}, "Opening", {"other_text": "ignored"}, 5 / 7),
]


@pytest.mark.slow
@pytest.mark.parametrize(("drawing", "look", "asked", "config", "value"), CASES)
def test_drawn_text_is_read_on_photographs(
    drawing: list[Any], look: Any, asked: str, config: Any, value: float
) -> None:
    pytest.importorskip("rapidocr")
    grade = grade_of(drawn(*drawing, **look), asked, **config)
    print(f"\n{drawing} {look or ''}: asked {asked!r}, read {grade.replies[0]!r}: {grade.value}")
    assert grade.value == pytest.approx(value, abs=0.1)


@pytest.mark.slow
def test_text_is_found_where_it_is_and_read_alike_by_several_threads() -> None:
    pytest.importorskip("rapidocr")
    pictures = [drawn("coffee", "STOP", degrees=10 * number) for number in range(4)]
    alone = [ocr.read(picture) for picture in pictures]
    assert [*ThreadPoolExecutor(4).map(ocr.read, pictures)] == alone
    [[(left, top, right, bottom)], *_] = [[each.box for each in found] for found in alone]
    assert 0.3 < left < 0.5 < right < 0.7 and 0.4 < top < 0.5 < bottom < 0.6
