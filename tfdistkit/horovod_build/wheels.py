"""The cache of built wheels: one folder per build, created atomically, by one process at a time."""

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
    """The cache of built wheels.

    Args:
        folder: Its parent folder; None for the user's, see `env.cache_dir`.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = (env.cache_dir() if folder is None else folder) / "horovod"

    def find(self, name: str) -> Path | None:
        """Returns the wheel of a build, or None."""
        return next(iter(sorted((self.folder / name).glob("*.whl"))), None)

    def keep(self, name: str, wheel: Path, ingredients: Mapping[str, object]) -> Path:
        """Moves a wheel into the cache.

        Args:
            name: The name of the build.
            wheel: The wheel, on the file system of the cache.
            ingredients: The inputs of the build, written to `recipe.json` for human readers.

        Returns:
            The wheel's path in the cache.
        """
        unfinished = wheel.parent / "kept"
        unfinished.mkdir()
        (unfinished / "recipe.json").write_text(json.dumps(ingredients, indent=1), encoding="utf-8")
        os.replace(wheel, unfinished / wheel.name)
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)  # a folder whose wheel was deleted
        os.replace(unfinished, folder)
        return folder / wheel.name

    def log(self, name: str) -> Path:
        """Returns the path of the log of a build."""
        return self.folder / f"{name}.log"

    @contextlib.contextmanager
    def alone(self, name: str, say: Say, timeout_s: float) -> Iterator[Path]:
        """Holds the lock of a build, so that only one process builds the same wheel.

        Args:
            name: The name of the build.
            say: Called with a message if it has to wait for the lock.
            timeout_s: The timeout of the lock, in seconds.

        Yields:
            An empty working folder, which is removed afterwards.

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
                    "The folder for built wheels must be writable.",
                    received=str(error),
                    do=f"Name another folder in {env.CACHE_DIR}.",
                )
            ) from error
        try:
            _lock(lock, work, say, timeout_s)
            # Left by a process that was killed: this process holds its lock now.
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                yield work
            finally:
                shutil.rmtree(work, ignore_errors=True)
        finally:
            os.close(lock)  # releases the lock; the kernel also does so when the process dies


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
            say("Another process is building the same wheel: waiting for it.")
            has_said = True
        time.sleep(_POLL_S)
