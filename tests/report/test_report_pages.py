"""The data pages of a report: their content, their size, and incremental updates."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_config
from tiny_report import EVIL, NUM_GROUPS, episode, write_episodes, write_run

from rl.files import json_line
from rl.tools.report import page as pages
from rl.tools.report import reading
from rl.tools.report.page import MAX_PAGE_BYTES, literal, refresh, value_of
from rl.tools.report.reading import picture, picture_of


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def data(run_dir: Path, name: str) -> Any:
    return value_of((run_dir / "report/data" / f"{name}.js").read_text("utf-8"))


def refresh_pages(run_dir: Path) -> int:
    """Returns the number of pages that were written."""
    return refresh(run_dir, run_dir / "report/data").num_written


def test_the_page_of_a_group_has_all_data_of_its_episodes(run_dir: Path) -> None:
    refresh_pages(run_dir)
    page = data(run_dir, "it_000002")
    assert (page["it"], page["starts"], page["cut"]) == (2, [0], None)
    assert page["parts"] == ["viescore", EVIL]
    group = page["rows"][2]
    assert (group["id"], group["cat"]) == ("train-2", "erase")
    assert group["say"] == f"instruction 2 {EVIL}"
    assert group["src"] == "images/it_000002/rank0_g02_source.png" and group["goal"] is None
    scored, lost = group["of"]
    assert (scored["r"], scored["adv"], scored["seed"], scored["s"]) == (0.5, 0.5, 77, 0.25)
    assert scored["parts"] == [0.5, 1.0] and scored["text"] == f"completion {EVIL}"
    assert json.loads(scored["said"]["viescore"][1])["score"] == [4, 8]
    assert scored["lp"] == [-25, -600, 0] and scored["forced"] == [0, 0, 1]
    assert (lost["r"], lost["st"], lost["why"]) == (None, "ungraded", f"no_reply: {EVIL}")
    assert page["rows"][1]["of"][0]["regions"] == [[f"hat {EVIL}", 0.25, 0.5, 0.75, 1.0]]
    assert "regions" not in scored
    bare = group["bare"]
    assert (bare["text"], bare["r"]) == (f"own words {EVIL}", 0.125)
    assert bare["img"] == "images/it_000002/rank0_g02_bare.png"


def test_the_page_of_a_held_out_sample_has_all_data_of_its_record(run_dir: Path) -> None:
    refresh_pages(run_dir)
    row = data(run_dir, "eval_000000")["rows"][0]
    assert row["said"] == {"viescore": [f"it is {EVIL}"]}
    assert (row["lp"], row["seed"], row["s"]) == ([-25, -600], 78, 0.5)
    assert (row["bare"], row["stock"], row["bimg"]) == (0.1, 0.2, "0_bare.png")


def test_only_existing_pictures_of_several_sources_are_shown(run_dir: Path) -> None:
    valid = "images/it_000001/rank0_g01_source.png"
    files = [valid, "../../etc/passwd", "images/it_000001/gone.png", None, *[valid] * 100]
    row = episode(1, 0, 0) | {"other_source_files": files}
    group = reading.group_row([row], [], run_dir, reading.Pieces({}), reading.WHOLE)
    assert group["others"][:5] == [valid, None, None, None, valid] and len(group["others"]) == 32


def test_tokens_are_decoded_if_the_tokenizer_is_available(run_dir: Path) -> None:
    refresh_pages(run_dir)
    from tokenizers import Tokenizer

    file = str(tiny_config.WEIGHTS / "policy/tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    token_texts = data(run_dir, "it_000001")["rows"][0]["of"][0]["tok"]
    assert "".join(token_texts) == tokenizer.decode([302, 258, 312], skip_special_tokens=False)
    snowman = tokenizer.encode("☃", add_special_tokens=False).ids
    assert len(snowman) > 1, "it has several tokens"
    pieces = reading.Pieces({"policy": {"model_path": str(tiny_config.WEIGHTS / "policy")}})
    assert pieces.of([*snowman, *snowman[:1]])[: len(snowman)] == ["☃", *[""] * (len(snowman) - 1)]
    assert len(pieces.of([*snowman, *snowman[:1]])) == len(snowman) + 1
    assert reading.Pieces({"policy": {"model_path": "no/such"}}).of([1]) is None
    assert pieces.of([-1]) is None


def test_the_index_page_has_the_data_to_find_groups(run_dir: Path) -> None:
    refresh_pages(run_dir)
    index = data(run_dir, "find_000000")
    assert list(index) == ["1", "2", "3", "4"]
    g, category, say, mean, low, high, spread, status, parts, pictures = index["3"]["rows"][1]
    assert (g, category, say.startswith("instruction 1")) == (1, EVIL[:60] + " [...]", True)
    assert (mean, low, high, spread) == (0.375, 0.25, 0.5, 0.125)
    assert status == {"scored": 2} and parts == [0.375, 1.0]
    stem = "images/it_000003/rank0_g01"
    assert pictures == [f"{stem}_source.png", f"{stem}_m1.png", f"{stem}_m0.png"]
    assert index["3"]["rows"][2][7] == {"scored": 1, "ungraded": 1}


def test_histograms_count_outer_values_in_the_last_bins(run_dir: Path) -> None:
    values = [-9.0, -3.0, 0.0, 0.1, 0.2, None, 99.0]
    counts = reading.histogram(values, 0.25, -3, 25)
    assert {i: count for i, count in enumerate(counts) if count} == {0: 2, 12: 2, 13: 1, 24: 1}
    index = refresh(run_dir, run_dir / "report/data")
    assert index.histograms == refresh(run_dir, run_dir / "report/data").histograms
    iteration, rewards, advantages = index.histograms[2]
    # The rewards of its five graded completions: 0, 0.25, 0.25, 0.5, 0.5.
    assert (iteration, rewards[0], rewards[5], rewards[10]) == (3, 1, 2, 2)
    assert sum(rewards) == sum(advantages) == 5


def test_a_part_of_a_picture_is_named_by_a_media_fragment(run_dir: Path) -> None:
    file = "images/it_000003/rank0_g01_source.png"
    assert picture_of(run_dir, f"{file}#xywh=0,0,96,64") == f"{file}#xywh=0,0,96,64"
    for bad in ("#", "#xywh=0,0,0,64", "#xywh=0,0,9", "#xywh=-1,0,9,9", "#x' onload='1", "?"):
        assert picture_of(run_dir, file + bad) is None


def test_only_changed_pages_are_written_again(run_dir: Path) -> None:
    assert refresh_pages(run_dir) == 4 + 1 + 2
    assert refresh_pages(run_dir) == 0
    write_episodes(run_dir, 5)
    assert refresh_pages(run_dir) == 5 + 1, "all iterations of one index page, and the index page"
    assert list(data(run_dir, "find_000000")) == ["1", "2", "3", "4", "5"]
    for name in ("it_000003", "find_000000"):
        (run_dir / f"report/data/{name}.js").unlink()
        assert refresh_pages(run_dir) == 5 + 1
    note = run_dir / "report/data/made_of.json"
    for damaged in ("{", note.read_text().replace('"stamp"', '"other"')):
        note.write_text(damaged)
        assert refresh_pages(run_dir) == 5 + 1 + 2


def test_pages_of_a_copied_run_are_written_again(run_dir: Path, tmp_path: Path) -> None:
    """Someone else may have changed the pages of a copied run."""
    refresh_pages(run_dir)
    folder = run_dir / "report/data"
    original = {path.name: path.read_text() for path in folder.glob("*.js")}
    for name in ("find_000000.js", "it_000002.js", "it_000002_2.js", "eval_000004.js"):
        (folder / name).write_text("alert(1);" + original.get(name, ""))
        with pytest.raises(ValueError, match="no data page"):
            value_of((folder / name).read_text())
    run_dir.rename(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "elsewhere", run_dir)
    assert refresh_pages(run_dir) == 4 + 1 + 2
    assert {path.name: path.read_text() for path in folder.glob("*.js")} == original


def test_records_removed_by_a_rewind_are_removed_from_the_report(run_dir: Path) -> None:
    refresh_pages(run_dir)
    (run_dir / "episodes/it_000004.rank0.jsonl").unlink()
    for path in (run_dir / "images/it_000001").iterdir():
        path.unlink()
    mine = run_dir / "report/data/mine.js"
    mine.touch()
    refresh_pages(run_dir)
    assert not (run_dir / "report/data/it_000004.js").exists() and mine.exists()
    assert list(data(run_dir, "find_000000")) == ["1", "2", "3"]
    assert data(run_dir, "it_000001")["rows"][0]["src"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "num_groups"), [(700, 8), (3000, 8), (40, 200)])
def test_no_page_is_too_large_and_no_group_is_lost(
    tmp_path: Path, num_tokens: int, num_groups: int
) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=0)
    draw = random.Random(0)
    lines = []
    for g in range(num_groups):
        for member in range(8):
            row = episode(1, g % NUM_GROUPS, member % 2)
            row |= {"group_id": f"1/{g}", "sample_id": str(g), "member": member}
            row["completion"] = "word " * num_tokens
            row["token_ids"] = [draw.randrange(500) for _ in range(num_tokens)]
            row["sampler_logprobs"] = [-draw.random() for _ in range(num_tokens)]
            lines.append(json_line(row))
    (run_dir / "episodes").mkdir()
    (run_dir / "episodes/it_000001.rank0.jsonl").write_text("".join(lines))
    refresh_pages(run_dir)
    files = [*(run_dir / "report/data").glob("it_*.js")]
    assert all(path.stat().st_size <= MAX_PAGE_BYTES for path in files)
    starts = data(run_dir, "it_000001")["starts"]
    assert len(starts) == len(files)
    names = ["it_000001", *(f"it_000001_{n}" for n in range(2, len(starts) + 1))]
    groups = [group for name in names for group in data(run_dir, name)["rows"]]
    assert [group["id"] for group in groups] == [str(g) for g in range(num_groups)]
    assert [groups[start]["id"] for start in starts] == [str(start) for start in starts]
    cut = data(run_dir, "it_000001")["cut"]
    one = groups[0]["of"][0]
    assert cut, "the page says that texts are cut"
    assert len(one["tok"]) + one.get("cut", 0) == num_tokens
    assert len(one["text"]) <= cut[0] + len(" [...]")


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
    (run_dir / "images").symlink_to(disk)
    assert picture_of(run_dir, "images/it_000001/x.png") == "images/it_000001/x.png"
    (disk / "it_000002").symlink_to(disk / "it_000001")
    (disk / "it_000001/y.png").symlink_to(disk / "it_000001/x.png")
    assert picture_of(run_dir, "images/it_000002/x.png") is None
    assert picture_of(run_dir, "images/it_000001/y.png") is None
    (run_dir / "evaluation/it_000001").symlink_to(disk / "it_000001")
    assert picture(run_dir / "evaluation/it_000001", "x.png") is None


def test_rows_of_any_type_make_a_page(tmp_path: Path) -> None:
    """Rows may come from any writer."""
    run_dir = write_run(tmp_path / "run", num_iterations=1)
    wrong: list[Any] = [None, 7, "text", [1], {"a": 1}, True, 1e400]
    lines = []
    for value in wrong:
        lines += [json.dumps(dict.fromkeys(episode(1, 0, 0), value))]
        lines += [json.dumps({**episode(1, 0, 0), name: value}) for name in episode(1, 0, 0)]
    broken = ['{"half', "[]", "\x00"]
    path = run_dir / "episodes/it_000001.rank0.jsonl"
    path.write_text("\n".join([*lines, *broken]))
    records = run_dir / "evaluation/it_000000/records.jsonl"
    record = json.loads(records.read_text().split("\n")[0])
    records.write_text(
        "\n".join(json.dumps({**record, name: value}) for value in wrong for name in record)
    )
    result = refresh(run_dir, run_dir / "report/data")
    assert result.damaged == {"episodes/it_000001": 3}
    num_members = sum(len(group["of"]) for group in data(run_dir, "it_000001")["rows"])
    assert num_members == len(lines)
    assert len(data(run_dir, "eval_000000")["rows"]) == len(wrong) * len(record)


def test_the_manifest_is_not_rewritten_for_each_part(tmp_path, monkeypatch) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=9)
    monkeypatch.setattr(pages, "CHUNK", 1)
    writes, write = [], pages.write_atomically
    monkeypatch.setattr(
        pages, "write_atomically", lambda path, text: (writes.append(path.name), write(path, text))
    )
    refresh_pages(run_dir)
    assert sum(name.startswith(("find_", "eval_")) for name in writes) == 11, "parts"
    assert writes.count("made_of.json") == 4 + 1, "after 1, 2, 4 and 8 parts, and at the end"


def test_an_interrupted_refresh_continues_where_it_stopped(tmp_path, monkeypatch) -> None:
    run_dir = write_run(tmp_path / "run", num_iterations=4)
    monkeypatch.setattr(pages, "CHUNK", 2)
    group_row = pages.group_row

    def until_the_fourth(group: Any, *args: Any) -> dict[str, Any]:
        if group[0]["group_id"].startswith("4/"):
            raise KeyboardInterrupt
        return group_row(group, *args)

    monkeypatch.setattr(pages, "group_row", until_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        refresh_pages(run_dir)
    monkeypatch.setattr(pages, "group_row", group_row)
    # Iteration 4, its index page and two evaluations, but not iterations 1, 2 and 3 again.
    assert refresh_pages(run_dir) == 1 + 1 + 2
    indexed = [list(data(run_dir, f"find_{chunk:06d}")) for chunk in range(3)]
    assert indexed == [["1"], ["2", "3"], ["4"]]
