"""The data pages of a report: their content, and what is written again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from tiny_report import EVIL, data_of, episode, write_episodes, write_lines, write_run

from rl.tools import reading
from rl.tools.page import Page, literal
from rl.tools.reading import picture, picture_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with a report."""
    run_dir = write_run(tmp_path / "run")
    Page(run_dir).write()
    return run_dir


@pytest.fixture
def data(run_dir: Path) -> Path:
    return run_dir / "report/data"


def test_the_page_of_a_group_has_all_data_of_its_episodes(run_dir: Path) -> None:
    page = data_of(run_dir, "it_000002")
    assert page["parts"] == ["viescore", EVIL]
    group = page["rows"][2]
    assert (group["id"], group["cat"]) == ("train-2", "erase")
    assert group["say"] == f"instruction 2 {EVIL}"
    assert group["src"] == "images/it_000002/rank0_g02_source.png" and group["goal"] is None
    scored, lost = group["of"]
    assert (scored["r"], scored["adv"], scored["seed"], scored["s"]) == (0.5, 0.5, 77, 0.25)
    assert scored["parts"] == [0.5, 1.0] and scored["text"] == f"completion {EVIL}"
    assert json.loads(scored["said"]["viescore"][1])["score"] == [4, 8]
    assert scored["lp"] == [-0.25, -6, 0] and scored["forced"] == [False, False, True]
    assert (lost["r"], lost["st"], lost["why"]) == (None, "ungraded", f"no_reply: {EVIL}")
    assert page["rows"][1]["of"][0]["regions"] == [[f"hat {EVIL}", 0.25, 0.5, 0.75, 1.0]]
    assert "regions" not in scored
    bare = group["bare"]
    assert (bare["text"], bare["r"]) == (f"own words {EVIL}", 0.125)
    assert bare["img"] == "images/it_000002/rank0_g02_bare.png"


def test_the_page_of_a_held_out_sample_has_all_data_of_its_record(run_dir: Path) -> None:
    row = data_of(run_dir, "eval_000000")["rows"][0]
    assert row["said"] == {"viescore": [f"it is {EVIL}"]}
    assert (row["lp"], row["seed"], row["s"]) == ([-0.25, -6], 78, 0.5)
    assert (row["bare"], row["stock"], row["bimg"]) == (0.1, 0.2, "0_bare.png")


def test_only_existing_pictures_of_several_sources_are_shown(run_dir: Path) -> None:
    valid = "images/it_000001/rank0_g01_source.png"
    files = [valid, "../../etc/passwd", "images/it_000001/gone.png", None, *[valid] * 100]
    row = episode(1, 0, 0) | {"other_source_files": files}
    group = reading.group_row([row], [], run_dir, reading.Pieces({}))
    assert group["others"] == [valid, None, None, None, *[valid] * 28]


def test_tokens_are_decoded_if_the_tokenizer_is_available(run_dir: Path) -> None:
    from tokenizers import Tokenizer

    folder = tiny_config.WEIGHTS / "policy"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = data_of(run_dir, "it_000001")["rows"][0]["of"][0]["tok"]
    assert "".join(texts) == tokenizer.decode([302, 258, 312], skip_special_tokens=False)
    pieces, unknown = (
        reading.Pieces({"policy": {"model_path": path}}) for path in (str(folder), "no/such")
    )
    assert pieces.are_known and pieces[302] == texts[0] and pieces[-1] == "-1 "
    assert not unknown.are_known and unknown[1] == "1 "


def test_a_long_completion_is_cut_and_says_so(run_dir: Path) -> None:
    num_tokens = reading.MAX_TOKENS + 9
    row = episode(1, 0, 0) | {"completion": "word " * 2000, "token_ids": [5] * num_tokens}
    row |= {"sampler_logprobs": [-0.5] * num_tokens, "forced": None}
    write_lines(run_dir / "episodes/it_000001.rank0.jsonl", [row])
    Page(run_dir).write()
    [one] = data_of(run_dir, "it_000001")["rows"][0]["of"]
    assert len(one["tok"]) == len(one["lp"]) == reading.MAX_TOKENS and one["cut"] == 9
    assert len(one["text"]) == reading.MAX_TEXT_CHARS + len(" [...]")


def test_the_index_page_has_the_data_to_find_groups(run_dir: Path) -> None:
    index = data_of(run_dir, "find_000000")
    assert list(index) == ["1", "2", "3", "4"]
    row = index["3"]["rows"][1]
    assert row["cat"] == EVIL[:60] + " [...]" and row["say"].startswith("instruction 1")
    assert row["rewards"] == [0.25, 0.5] and row["parts"] == [0.375, 1.0]
    assert row["st"] == ["scored"] * 2
    stem = "images/it_000003/rank0_g01"
    assert row["pictures"] == [f"{stem}_source.png", f"{stem}_m1.png", f"{stem}_m0.png"]
    assert index["3"]["rows"][2]["st"] == ["scored", "ungraded"]


def test_histograms_count_outer_values_in_the_last_bins(run_dir: Path) -> None:
    counts = reading.histogram([-9.0, -3.0, 0.0, 0.1, 0.2, None, 99.0], 0.25, -3, 25)
    assert {i: count for i, count in enumerate(counts) if count} == {0: 2, 12: 2, 13: 1, 24: 1}
    iteration, rewards, advantages = data_of(run_dir, "metrics")["histograms"][2]
    # The rewards of its five graded completions: 0, 0.25, 0.25, 0.5, 0.5.
    assert (iteration, rewards[0], rewards[5], rewards[10]) == (3, 1, 2, 2)
    assert sum(rewards) == sum(advantages) == 5


def test_a_part_of_a_picture_is_named_by_a_media_fragment(run_dir: Path) -> None:
    file = "images/it_000003/rank0_g01_source.png"
    assert picture_of(run_dir, f"{file}#xywh=0,0,96,64") == f"{file}#xywh=0,0,96,64"
    for bad in ("#", "#xywh=0,0,0,64", "#xywh=0,0,9", "#xywh=-1,0,9,9", "#x' onload='1", "?"):
        assert picture_of(run_dir, file + bad) is None


def test_a_page_writes_again_only_iterations_that_have_changed(run_dir: Path, data: Path) -> None:
    page = Page(run_dir)
    page.write()
    for path in data.iterdir():
        path.write_text("old")
    write_episodes(run_dir, 5)
    page.write()
    old = {path.stem for path in data.iterdir() if path.read_text() == "old"}
    assert old == {f"it_{iteration:06d}" for iteration in range(1, 5)}
    assert list(data_of(run_dir, "find_000000")) == ["1", "2", "3", "4", "5"]
    # Another process has written nothing yet: the pages may be someone else's.
    Page(run_dir).write()
    assert not [path for path in data.iterdir() if path.read_text() == "old"]


def test_records_removed_by_a_rewind_are_removed_from_the_report(run_dir: Path, data: Path) -> None:
    (run_dir / "episodes/it_000004.rank0.jsonl").unlink()
    shutil.rmtree(run_dir / "images/it_000001")
    (data / "mine.js").touch()
    Page(run_dir).write()
    assert not (data / "it_000004.js").exists() and (data / "mine.js").exists()
    assert list(data_of(run_dir, "find_000000")) == ["1", "2", "3"]
    assert data_of(run_dir, "it_000001")["rows"][0]["src"] is None


def test_any_text_can_be_written_into_a_script() -> None:
    for text in (EVIL, "</SCRIPT >", "\ud800", "\x00\x7f", "]]>"):
        script = literal({"t": text})
        assert not re.search("[<>&\u2028\u2029\ud800-\udfff]", script)
        assert json.loads(script) == {"t": text}


@pytest.mark.parametrize(
    "file",
    ["../x.png", "/x.png", "//host/x.png", "http://host/x.png", "a/../x.png", "a//x.png", "", ".",
     "data:image/png,", "x.png?y", "a\\x.png", 3, None, ["x.png"]],
)  # fmt: skip
def test_only_pictures_inside_the_folder_are_shown(tmp_path: Path, file: object) -> None:
    (tmp_path / "x.png").touch()
    (tmp_path / "below").mkdir()
    assert picture(tmp_path / "below", file) is None
    assert picture(tmp_path, "x.png") == "x.png"


def test_pictures_behind_links_are_not_shown(tmp_path: Path) -> None:
    disk, run_dir = tmp_path / "disk", tmp_path / "run"
    (disk / "it_000001").mkdir(parents=True)
    (disk / "it_000001/x.png").touch()
    (run_dir / "evaluation").mkdir(parents=True)
    for link, target in (
        (run_dir / "images", disk),
        (disk / "it_000002", disk / "it_000001"),
        (disk / "it_000001/y.png", disk / "it_000001/x.png"),
        (run_dir / "evaluation/it_000001", disk / "it_000001"),
    ):
        link.symlink_to(target)
    assert picture_of(run_dir, "images/it_000001/x.png") == "images/it_000001/x.png"
    assert picture_of(run_dir, "images/it_000002/x.png") is None
    assert picture_of(run_dir, "images/it_000001/y.png") is None
    assert picture(run_dir / "evaluation/it_000001", "x.png") is None
    run_dir.rename(tmp_path / "evaluation")  # a run may be called so
    assert picture_of(tmp_path / "evaluation", "images/it_000001/x.png") is not None


def test_rows_of_any_type_make_a_page(run_dir: Path) -> None:
    """Rows may come from any writer."""
    wrong: list[Any] = [None, 7, "text", [1], {"a": 1}, True, 1e400]
    row, records = episode(1, 0, 0), run_dir / "evaluation/it_000000/records.jsonl"
    rows = [row | {name: value} for value in wrong for name in row]
    rows += [dict.fromkeys(row, value) for value in wrong]
    lines = [*map(json.dumps, rows), '{"half', "[]", "\x00"]
    (run_dir / "episodes/it_000001.rank0.jsonl").write_text("\n".join(lines))
    record = json.loads(records.read_text().split("\n")[0])
    held_out = [record | {name: value} for value in wrong for name in record]
    records.write_text("\n".join(map(json.dumps, held_out)))
    assert "episodes/it_000001 (3)" in Page(run_dir).write().read_text("utf-8")
    groups = data_of(run_dir, "it_000001")["rows"]
    assert sum(len(group["of"]) for group in groups) == len(rows)
    assert len(data_of(run_dir, "eval_000000")["rows"]) == len(held_out)
