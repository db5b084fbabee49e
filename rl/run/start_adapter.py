"""A run's own copy of the adapter that it starts from, the reference of its KL penalty: the folder
of the adapter may have changed, or be gone, when the run resumes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from rl.build import Resolved
from rl.model_files import ADAPTER_CONFIG
from rl.ranks.dist import Dist
from rl.record.checkpoint import read_state

FOLDER = "start"
FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin")


def with_start(resolved: Resolved, newest: Path | None, dist: Dist) -> tuple[Resolved, bool]:
    """(the config whose policy starts from the run's own copy of the adapter, whether it does).

    A run without checkpoint (`newest`) copies the adapter first. A run that was begun before runs
    kept their start goes on with the base model as reference. Raises ValueError if the copy is
    gone. Collective.
    """
    policy, folder = resolved.policy, resolved.config.run_dir / FOLDER
    source = policy.cls.start_adapter(policy.config)
    if newest is None:
        if dist.is_main:
            shutil.rmtree(folder, ignore_errors=True)  # of a run that saved nothing
            _copy(source, folder)
        dist.gather(None)  # the other ranks read it
    elif "kl_reference" not in read_state(newest)["meta"]["config"]["algorithm"]:
        return resolved, False
    if not (source or folder.is_dir()):
        return resolved, False
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{folder} is gone, the adapter that this run started from and the reference of its KL "
            "penalty: put it back, or choose another run_name"
        )
    own = policy.config.model_copy(update={"adapter_path": str(folder), "from_run": ""})
    return replace(resolved, policy=replace(policy, config=own)), True


def _copy(source: str, folder: Path) -> None:
    """Copy the adapter's files; nothing if `source` is ''."""
    for file in (Path(source, name) for name in FILES if source):
        if file.is_file():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copy(file, folder / file.name)
