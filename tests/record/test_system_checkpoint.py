"""Checkpoints after kill -9 and damage: the newest whole one loads; pruning spares users' files."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import checkpoints_in, names_in, save
from tiny_messages import holds, raising
from tiny_ranks import spawn

from rl.files import write_atomically
from rl.record import checkpoint
from rl.record.checkpoint import ResumePoint, SaveError, model_folder, problem_of
from rl.seeds import rng_state, set_rng_state


def test_a_loaded_checkpoint_equals_the_saved_one(checkpoints, tmp_path):
    assert checkpoints.latest() is None
    torch.manual_seed(5)
    path = save(checkpoints, 10)
    expected = torch.rand(3)
    loaded = checkpoints.load(checkpoints.latest())
    assert path == tmp_path / "checkpoints" / "step_000010"
    assert loaded.iteration == 10
    assert loaded.meta == {"learner": {"version": 10}, "config": {"format": 3, "seed": 1}}
    assert set(loaded.tensors) == {"master/w", "exp_avg/w"}
    assert torch.equal(loaded.tensors["master/w"], torch.full((12,), 10.0))
    torch.set_rng_state(loaded.rng["torch"])
    assert torch.equal(torch.rand(3), expected)
    assert (path / "model" / "README.md").read_text() == "# card 10\n"
    assert set(json.loads((path / "manifest.json").read_text())) == {
        "state.safetensors",
        "state.json",
        "rng_rank0000.pt",
        "model/adapter_model.bin",
    }


Change = Callable[[bytes], bytes]


def change(file: Path, how: Change | None) -> None:
    """Changes the bytes of a file, or deletes it."""
    data = file.read_bytes()
    file.unlink()
    if how:
        file.write_bytes(how(data))


LONG_NAME = b'{"%s": {"size": 1, "sha256": ""}, ' % (b"x" * 5000)


@pytest.mark.parametrize(
    ("name", "how", "parts"),
    [
        ("state.safetensors", lambda data: data[:-1], "state.safetensors"),
        (
            "state.safetensors",
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            "state.safetensors ... sha256",
        ),
        ("model/adapter_model.bin", None, "model/adapter_model.bin ... missing"),
        ("manifest.json", lambda _: b'{"state.json": {"size"', "manifest.json"),
        ("manifest.json", lambda _: b"{}", "manifest.json ... no file"),
        ("manifest.json", lambda _: b"[" * 100_000, "manifest.json"),
        ("manifest.json", lambda data: data.replace(b"{", LONG_NAME, 1), "too long"),
        ("manifest.json", None, "manifest.json"),
    ],
)
def test_a_damaged_newest_checkpoint_is_named_and_skipped(checkpoints, capfd, name, how, parts):
    first, newest = save(checkpoints, 10), save(checkpoints, 20)
    change(newest / name, how)
    assert checkpoints.latest() == first
    assert holds(capfd.readouterr().err, f"WARNING ... step_000020 ... {parts}")
    # The iteration is repeated and its checkpoint replaces the damaged one.
    assert save(checkpoints, 20) == newest
    assert problem_of(newest) is None and checkpoints.latest() == newest
    aside, *others = names_in(checkpoints.folder.parent)
    assert aside.startswith(f"damaged-{newest.name}") and others == ["step_000010", "step_000020"]
    newest.rename(newest.with_name("moved"))
    assert checkpoints.latest() == first
    assert holds(capfd.readouterr().err, "WARNING ... step_000020 is gone ... older")


def states(**values: Any) -> Change:
    return lambda data: json.dumps(json.loads(data) | values).encode()


@pytest.mark.parametrize(
    ("name", "how", "part"),
    [
        ("state.json", states(iteration=-1), "state.json is damaged (iteration -1"),
        ("state.json", states(iteration=11), "state.json is damaged (iteration 11"),
        ("state.json", states(iteration="10"), "state.json is damaged (iteration '10'"),
        ("state.json", states(meta=None), "state.json is damaged (iteration"),
        ("state.json", lambda _: b"[]", "state.json is damaged (iteration"),
        ("rng_rank0000.pt", lambda _: pickle.dumps(Path()), "is damaged"),
        ("rng_rank0000.pt", lambda _: b"", "is damaged"),
        ("state.safetensors", lambda _: b"\xff" * 99, "is damaged"),
    ],
)
def test_a_checkpoint_with_values_that_no_run_writes_is_refused_by_name(
    checkpoints, name, how, part
):
    """The manifest matches, as somebody else may have written it."""
    path = save(checkpoints, 10)
    change(path / name, how)
    (path / "manifest.json").unlink()
    checkpoint._write_manifest(path)
    with raising(ValueError, f"step_000010 ... {part} ... move this checkpoint away"):
        checkpoints.load(checkpoints.latest())


def test_random_states_of_another_kind_are_refused():
    for value in ({}, [], {**rng_state(), "torch": torch.zeros(3)}, {**rng_state(), "numpy": [1]}):
        with pytest.raises(ValueError, match="step is damaged"), checkpoint.sound(Path("step")):
            set_rng_state(value)


def test_the_model_is_found_in_a_run_in_a_checkpoint_and_in_its_own_folder(tmp_path, capsys):
    checkpoints = checkpoints_in(tmp_path, keep_every_n_iterations=1)
    first, second, _ = (save(checkpoints, iteration) for iteration in (10, 999_999, 1_000_000))
    damaged = tmp_path / "checkpoints" / "step_1000000"
    assert model_folder(tmp_path) == damaged / "model"  # the newest by number, not by name
    (damaged / "model/adapter_model.bin").unlink()
    assert model_folder(tmp_path) == second / "model"
    assert holds(capsys.readouterr().err, "WARNING ... step_1000000 ... older")
    with raising(ValueError, "step_1000000 ... damaged ... missing"):
        model_folder(damaged)
    (first / "state.safetensors").unlink()  # not needed for use
    assert model_folder(first) == model_folder(first / "model") == first / "model"
    for path in (first, second):
        (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match="none of the 3 checkpoints"):
        model_folder(tmp_path)


def test_a_run_without_a_complete_checkpoint_does_not_restart_silently(checkpoints, tmp_path):
    for path in [save(checkpoints, 10), save(checkpoints, 20)]:
        (path / "manifest.json").unlink()
    folder, remedy = checkpoints.folder, f"restore ... another run_name ... move {tmp_path} away"
    with raising(ValueError, f"none of the 2 checkpoints in {folder} ... {remedy}"):
        checkpoints.latest()
    for empty in (
        lambda: [path.rename(tmp_path / path.name) for path in folder.glob("step_*")],
        lambda: (folder / ".tmp-step_000030").mkdir(),  # a save that was killed
        lambda: (folder / "step_000030").write_text("not a checkpoint"),
        lambda: shutil.rmtree(folder),
    ):
        empty()
        with raising(ValueError, f"{folder} ... step_000020 ... {remedy}"):
            checkpoints.latest()
    assert checkpoints_in(tmp_path / "moved").latest() is None


def test_without_the_newest_checkpoint_the_one_before_it_is_found(checkpoints, tmp_path):
    first, second = save(checkpoints, 10), save(checkpoints, 20)
    shutil.rmtree(second)
    for content in ("step_000020", "", "no name", "step_000010"):
        (tmp_path / "last_checkpoint.txt").write_text(content)
        assert checkpoints.latest() == first


def test_other_files_in_the_checkpoint_folder_are_never_deleted(tmp_path):
    checkpoints = checkpoints_in(tmp_path, push_to_hub_every_n_iterations=1)
    others = ("step_000001.bak/a", "step_1/a", ".tmp-mine/a", ".tmp-step_000001-mine/a", ".tmp-x")
    for name in others:
        write_atomically(tmp_path / "checkpoints" / name, name)
    for iteration in range(1, 6):
        assert save(checkpoints, iteration)
    assert all((tmp_path / "checkpoints" / name).read_text() == name for name in others)
    assert names_in(tmp_path)[-2:] == ["step_000005", "step_1"]


def test_pruning_keeps_the_newest_two_complete_checkpoints_and_every_nth(tmp_path):
    checkpoints = checkpoints_in(tmp_path, keep_every_n_iterations=20)
    for iteration in range(10, 80, 10):
        save(checkpoints, iteration)
    assert names_in(tmp_path) == [f"step_0000{n}" for n in (20, 40, 60, 70)]
    # A damaged checkpoint cannot be resumed and is not one of the newest two.
    change(tmp_path / "checkpoints/step_000070/state.safetensors", lambda data: data[:-1])
    save(checkpoints, 90)
    assert names_in(tmp_path) == [f"step_0000{n}" for n in (20, 40, 60, 70, 90)]


def test_files_that_a_user_put_into_a_checkpoint_are_never_deleted(checkpoints, tmp_path):
    """Users merge an adapter in its folder, and keep notes there."""
    write_atomically(tmp_path / "weights/w", "mine")
    names = ("notes.txt", "merged/mine.safetensors", ".hidden", "adapter_model.bin")
    for iteration, name in enumerate(names, start=1):
        write_atomically(save(checkpoints, iteration) / "model" / name, "mine")
    (save(checkpoints, 5) / "model/linked").symlink_to(tmp_path / "weights")
    write_atomically(save(checkpoints, 6) / "model/notes.txt", "mine")
    (checkpoints.folder / "step_000006/manifest.json").unlink()
    for iteration in (8, 9, 10, 11):
        save(checkpoints, iteration)
    assert names_in(tmp_path) == [f"step_{n:06d}" for n in (*range(1, 7), 10, 11)]
    # The user's file also survives a repeated iteration.
    (checkpoints.folder / "step_000001/manifest.json").unlink()
    save(checkpoints, 1)
    [damaged] = checkpoints.folder.glob("damaged-step_000001-*")
    assert (damaged / "model/notes.txt").read_text() == "mine"
    assert (tmp_path / "weights/w").read_text() == "mine"


def test_a_failed_deletion_of_an_old_checkpoint_keeps_the_new_one(checkpoints, monkeypatch, capfd):
    for iteration in (10, 20):
        save(checkpoints, iteration)

    def refuse(path: Path) -> None:
        raise PermissionError(f"may not delete {path.name}")

    monkeypatch.setattr(checkpoint.shutil, "rmtree", refuse)
    assert save(checkpoints, 30, final=True) == checkpoints.latest()
    assert "may not delete .tmp-pruned-step_000010" in capfd.readouterr().err


def test_a_checkpoint_is_due_for_saving_or_for_pushing(tmp_path):
    checkpoints = checkpoints_in(
        tmp_path, save_every_n_iterations=4, push_to_hub_every_n_iterations=6
    )
    assert [n for n in range(1, 13) if checkpoints.due(n)] == [4, 6, 8, 12]


def test_a_failed_save_leaves_the_older_checkpoints(checkpoints, tmp_path, capfd):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(5, "Input/output error")

    save(checkpoints, 10)
    assert save(checkpoints, 20, fail) is None
    assert "Input/output error" in capfd.readouterr().err
    assert names_in(tmp_path) == ["step_000010"]
    assert checkpoints.load(checkpoints.latest()).iteration == 10
    with pytest.raises(SaveError, match="Input/output error"):
        save(checkpoints, 20, fail, final=True)
    assert save(checkpoints, 20, final=True) is not None


def die_in_a_save(folder: Path, stage: str) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = checkpoints_in(folder)
    save(checkpoints, 1)
    if stage != "model":
        setattr(Path if stage == "rename" else checkpoint, stage, die)
    save(checkpoints, 2, write_model=die if stage == "model" else None)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["model", "_write_manifest", "rename", "held_out_rewards"])
def test_kill_9_during_a_save_leaves_a_loadable_checkpoint(checkpoints, stage):
    """Killed with half of the files written, before the manifest, before the rename, and after it,
    when old checkpoints are deleted."""
    process = spawn(die_in_a_save, checkpoints.folder.parent, stage)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    last = 2 if stage == "held_out_rewards" else 1
    loaded = checkpoints.load(checkpoints.latest())
    assert (loaded.iteration, loaded.meta["learner"]) == (last, {"version": last})
    assert torch.equal(loaded.tensors["master/w"], torch.full((12,), float(last)))
    assert (".tmp-step_000002" in names_in(checkpoints.folder.parent)) == (last == 1)
    save(checkpoints, 2)
    assert names_in(checkpoints.folder.parent) == ["step_000001", "step_000002"]


def test_pickles_in_a_checkpoint_are_not_executed(checkpoints, tmp_path):
    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    path = save(checkpoints, 1)
    torch.save({"python": Payload()}, path / "rng_rank0000.pt")
    with pytest.raises(ValueError, match=r"step_000001 is damaged \(UnpicklingError\)"):
        checkpoints.load(path)
    assert not (tmp_path / "executed").exists()


def test_keys_in_the_environment_do_not_reach_a_checkpoint(checkpoints, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789abcdef")
    point = ResumePoint(
        1,
        {"w": torch.ones(1)},
        {"config": {"format": 3, "note": "uses sk-0123456789abcdef"}},
        [rng_state()],
        lambda folder: None,
        "trained with sk-0123456789abcdef",
    )
    path = checkpoints.save(point)
    checkpoints.publish(1, lambda: "scored with sk-0123456789abcdef")
    assert checkpoints.load(path).meta == {"config": {"format": 3, "note": "uses <SOME_API_KEY>"}}
    assert all(b"sk-0123" not in file.read_bytes() for file in path.rglob("*") if file.is_file())
