"""Uploads a checkpoint's model folder to the hub during training; a failure never stops the run."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from rl.console import duration, warn
from rl.printing import scrub

CLOSE_TIMEOUT_S = 600.0
"""Longest wait for uploads at the end of a run."""
_STAGING_PREFIX = ".push-ckpt_"
_STAGING_NAME = re.compile(r"\.push-ckpt_\d{6,}")


class Pusher:
    """Uploads model folders from rank 0, one at a time, in a thread.

    `main` gets the newest model; the branch `ckpt_000020` keeps the model after 20 iterations. Any
    failure is logged as one warning. Pruning may delete the checkpoint during the upload, so its
    files are first linked (or copied) into a staging folder. At most one folder is queued: a newer
    one replaces it, with a warning.
    """

    def __init__(self, repo_id: str, outbox: Path) -> None:
        """`outbox`: parent of the staging folders, on the checkpoints' file system."""
        self._repo_id = repo_id
        self._outbox = outbox
        self._lock = threading.Lock()
        self._queued: int | None = None
        """Iteration of the model that is uploaded next."""
        self._thread: threading.Thread | None = None

    def push(self, folder: Path, iteration: int) -> None:
        """Queue `folder` for upload. Returns at once."""
        staging = self._staging_folder(iteration)
        try:
            with self._lock:
                if self._thread is None:
                    for stale in self._outbox.glob(f"{_STAGING_PREFIX}*"):  # left by a killed run
                        if _STAGING_NAME.fullmatch(stale.name):
                            shutil.rmtree(stale)
            if staging.is_dir():
                return  # already queued or uploading: a failing run may save this iteration again
            shutil.copytree(folder, staging, copy_function=_link_or_copy)
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)  # a part would count as queued
            self._warn(iteration, f"failed, the run goes on: {error!r}")
            return
        with self._lock:
            replaced, self._queued = self._queued, iteration
            if self._thread is None:
                # A daemon, unlike an executor's thread: a stuck network keeps no process alive.
                self._thread = threading.Thread(target=self._run, name="hub-push", daemon=True)
                self._thread.start()
        if replaced is not None:
            self._warn(replaced, f"not uploaded: iteration {iteration} replaced it in the queue")
            shutil.rmtree(self._staging_folder(replaced), ignore_errors=True)

    def close(self, say: Callable[[str], None], timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait at most `timeout_s` for the running and the queued upload; `say` prints a line."""
        thread = self._thread
        if thread is None:
            return
        say(f"uploading to {self._repo_id} (waiting {duration(timeout_s)} at most)")
        thread.join(timeout_s)
        if thread.is_alive():
            warn(
                f"push_to_hub to {self._repo_id!r} is not done after {duration(timeout_s)}; the "
                "run ends. Upload the newest checkpoint's model folder by hand (hf upload)"
            )

    def _staging_folder(self, iteration: int) -> Path:
        return self._outbox / f"{_STAGING_PREFIX}{iteration:06d}"

    def _run(self) -> None:
        while True:
            with self._lock:
                iteration, self._queued = self._queued, None
                if iteration is None:
                    self._thread = None
                    return
            try:
                message, branch = f"iteration {iteration}", f"ckpt_{iteration:06d}"
                upload(self._staging_folder(iteration), self._repo_id, message, branch)
            # huggingface_hub and the network may raise anything.
            except Exception as error:
                self._warn(iteration, f"failed, the run goes on: {error!r}")
            shutil.rmtree(self._staging_folder(iteration), ignore_errors=True)

    def _warn(self, iteration: int, reason: str) -> None:
        warn(scrub(f"push_to_hub to {self._repo_id!r}, iteration {iteration}: {reason}"))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def upload(folder: Path, repo_id: str, message: str, branch: str = "") -> None:
    """Make one commit on `main` of the repository (created as private if missing), and point
    `branch` to it. Raises whatever the network or huggingface_hub raises."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would garble the console
    api = HfApi()
    api.create_repo(repo_id, private=True, exist_ok=True)
    commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message).oid
    if not branch:
        return
    if any(ref.name == branch for ref in api.list_repo_refs(repo_id).branches):
        api.delete_branch(repo_id, branch=branch)  # a resumed run repeats this iteration
    api.create_branch(repo_id, branch=branch, revision=commit)
