"""scripts/setup_datasets.sh without a network: a hub of small archives, a tree that loads."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tiny_messages import names
from tiny_tokens import save_published, write_list

from rl.api.data import RowRules
from rl.data.emu3_tokens import emu3_tokens

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIST = "list/tokenized_datalist.json"
SETS = {
    "omniedit": "mair-lab/omniedit-got-tokenized-256",
    "rl_100k": "rabiulawal/emu3_tokenized_rl_100k",
    "earl": "mair-lab/earl-datasets",
}

HF = """#!/bin/bash
# download REPOSITORY [FILES] --repo-type dataset --local-dir FOLDER, from $HUB
echo "hf $*" >>"$HUB/calls"
[[ -n ${HUB_DOWN:-} ]] && exit 1
[[ $1 == download ]] || exit 9
repository=$2; shift 2; files=()
while [[ $1 != --repo-type ]]; do files+=("$1"); shift; done
[[ $2 == dataset && $3 == --local-dir ]] || exit 9
mkdir -p "$4" && folder=$(realpath "$4") && cd "$HUB/$repository" || exit 1
if ((${#files[@]})); then cp "${files[@]}" "$folder"; else cp -r . "$folder"; fi
"""


def make_set(folder: Path) -> Path:
    """Three edits as they were published."""
    entries = save_published(folder / "feature", range(3))
    write_list(folder / LIST, entries, prefix="/their/disk/feature")
    return folder


def pack(archive: Path, **members: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:gz") as file:
        for name, source in members.items():
            file.add(source, arcname=name)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """The published repositories, three edits a set; archives with and without a top folder."""
    hub, raw = tmp_path / "hub", tmp_path / "raw"
    for split in ("validation", "train"):
        name = f"{split}_22march_256"
        archive = hub / SETS["omniedit"] / f"{name}.tar.gz"
        pack(archive, **{name: make_set(raw / name)})
    make_set(raw / "rl" / "aurora_ag" / "train_20250208_256")
    pack(hub / SETS["rl_100k"] / "emu3_tokenized_rl_100k.tar.gz", emu3_tokenized_rl_100k=raw / "rl")
    pack(hub / SETS["earl"] / "magicbrush.tar.gz", train=make_set(raw / "magic"))
    make_set(hub / SETS["earl"] / "vismin" / "train")
    return hub


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The scripts in a folder of their own, with an installed .venv that runs this Python."""
    place = tmp_path / "copy"
    shutil.copytree(ROOT / "scripts", place / "scripts")
    (place / "rl").symlink_to(ROOT / "rl")
    stamp = subprocess.run(
        "cat requirements-cpu.lock pyproject.toml | cksum",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in ("requirements-cpu.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, place / name)
    bin_folder = place / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (place / ".venv" / "installed").write_text(f"requirements-cpu.lock {stamp.stdout}")
    (bin_folder / "activate").write_text(f'export PATH="{bin_folder}:$PATH"\n')
    for name, text in (("python", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n'), ("hf", HF)):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    return place


def run(copy: Path, hub: Path, *sets: str, **more: str) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if key != "APP__DATA_DIR"}
    environment = {**plain, "HUB": str(hub), "REQUIREMENTS": "requirements-cpu.lock", **more}
    return subprocess.run(
        [copy / "scripts" / "setup_datasets.sh", *sets],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def rows_of(file: Path) -> int:
    config = emu3_tokens.Config(type="emu3_tokens", path=str(file))
    assert emu3_tokens.TokenisedEdits.problems(config, RowRules("error", 0)) == []
    return len(emu3_tokens.TokenisedEdits(config, RowRules("error", 0)))


def test_everything_is_fetched_and_loads(copy: Path, hub: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    done = run(copy, hub, APP__DATA_DIR=str(data))
    assert done.returncode == 0, done.stderr + done.stdout
    for place in (
        "validation_22march_256/feature",  # as EARL's base config says
        "train_22march_256",
        "emu3_tokenized_rl_100k/aurora_ag/train_20250208_256",
        "earl-datasets/magicbrush/train",
        "earl-datasets/vismin/train",
    ):
        assert rows_of(data / place / LIST) == 3
    assert len([line for line in done.stdout.splitlines() if line.endswith(LIST)]) == 5
    moved = data.rename(tmp_path / "moved")
    assert rows_of(moved / "validation_22march_256/feature" / LIST) == 3
    again = run(copy, hub, APP__DATA_DIR=str(moved))
    assert again.returncode == 0 and "unpacking" not in again.stdout


def test_single_sets_and_the_default_folder(copy: Path, hub: Path) -> None:
    done = run(copy, hub, "validation")
    assert done.returncode == 0, done.stderr + done.stdout
    (call,) = (hub / "calls").read_text().splitlines()
    assert call == (
        f"hf download {SETS['omniedit']} validation_22march_256.tar.gz --repo-type dataset "
        f"--local-dir RL_DATASETS/data"
    )
    assert rows_of(copy / "RL_DATASETS/data/validation_22march_256" / LIST) == 3
    unknown = run(copy, hub, "validaton")
    assert unknown.returncode == 2 and names(unknown.stderr, "validaton ... validation")
    down = run(copy, hub, "earl", HUB_DOWN="1")
    assert down.returncode == 1 and names(down.stderr, "mair-lab/earl-datasets ... start it again")


def test_nothing_is_unpacked_outside(copy: Path, hub: Path, tmp_path: Path) -> None:
    archive = hub / SETS["rl_100k"] / "emu3_tokenized_rl_100k.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        member = tarfile.TarInfo("set/../../escaped")
        file.addfile(member, io.BytesIO(b""))
    done = run(copy, hub, "rl_100k", APP__DATA_DIR=str(tmp_path / "data"))
    assert done.returncode == 1
    assert names(done.stderr, "emu3_tokenized_rl_100k.tar.gz cannot be unpacked")
    assert not list(tmp_path.rglob("escaped"))
