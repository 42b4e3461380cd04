"""The cache of built wheels: one folder per build, made whole or not at all, by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tfdistkit import env
from tfdistkit.errors import BuildFailedError, explain
from tfdistkit.horovod_build.commands import Say

_POLL_S = 0.2


class WheelCache:
    """A folder of wheels.

    Args:
        folder: The folder; None takes the user's, see `env.cache_dir`.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = (env.cache_dir() if folder is None else folder) / "horovod"

    def find(self, name: str) -> Path | None:
        """Returns the wheel of a build, or None."""
        return next(iter(sorted((self.folder / name).glob("*.whl"))), None)

    def keep(self, name: str, wheel: Path, told: Mapping[str, object]) -> Path:
        """Moves a wheel into the cache.

        Args:
            name: The name of the build.
            wheel: The wheel, on the file system of the cache.
            told: What it was made from, for people who look.

        Returns:
            Where it is now.
        """
        unfinished = wheel.parent / "kept"
        unfinished.mkdir()
        (unfinished / "recipe.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
        os.replace(wheel, unfinished / wheel.name)
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)  # without a wheel in it: somebody removed that
        os.replace(unfinished, folder)
        return folder / wheel.name

    def log(self, name: str) -> Path:
        """Returns where the log of a build is kept."""
        return self.folder / f"{name}.log"

    @contextlib.contextmanager
    def alone(self, name: str, say: Say, timeout_s: float) -> Iterator[Path]:
        """Waits until no other process makes the same wheel, and keeps others out.

        Args:
            name: The name of the build.
            say: Takes a line when there is something to wait for.
            timeout_s: How long to wait.

        Yields:
            An empty folder to work in; it is removed afterwards, with what is left in it.

        Raises:
            BuildFailedError: if the cache cannot be written, or the other process takes too long.
        """
        work = self.folder / f"{name}.building"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise BuildFailedError(
                explain(
                    "The folder for built wheels cannot be written.",
                    received=str(error),
                    do=f"Name another one in {env.CACHE_DIR}.",
                )
            ) from error
        try:
            _lock(lock, work, say, timeout_s)
            # Left by one that was killed: we have its lock.
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
        finally:
            os.close(lock)  # and with it the lock, which the kernel keeps for nobody who is gone


def _lock(descriptor: int, work: Path, say: Say, timeout_s: float) -> None:
    deadline, has_said = time.monotonic() + timeout_s, False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > deadline:
            raise BuildFailedError(
                explain(
                    f"Another process has been building the same wheel for more than {timeout_s:g} s.",
                    received=f"its folder {work}",
                    do="Wait for it, or end it, and try again.",
                )
            )
        if not has_said:
            say("Another process builds the same wheel: waiting for it.")
            has_said = True
        time.sleep(_POLL_S)
