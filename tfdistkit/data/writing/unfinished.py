"""Unfinished folders of `tfdistkit data write`: marked for readers, and removed by the next run."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import tensorflow as tf

from tfdistkit.atomic_files import sync
from tfdistkit.errors import OptionError, explain

# Not a dotfile, so that `mv folder/* elsewhere` moves it too.
MARKER = "tfdistkit-data-write.incomplete"


@contextlib.contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """Creates a marked folder beside `out`, and removes it if the body fails.

    Args:
        out: The final folder.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        with open(folder / MARKER, "w") as marker:
            # Some file systems have no locks; there the next run does not remove the folder.
            with contextlib.suppress(OSError):
                _lock(marker)  # the kernel releases it when the process ends, also by SIGKILL
            yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def finish(folder: Path, out: Path) -> None:
    """Syncs a folder to disk and renames it atomically.

    Args:
        folder: From `unfinished_folder`.
        out: Its final name.
    """
    for path in [*sorted(folder.iterdir()), folder]:
        sync(path)
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)  # mkdtemp creates folders with mode 0700
    (folder / MARKER).unlink()
    sync(folder)
    folder.rename(out)
    sync(out.parent)


def remove_leftovers(out: Path, report: Callable[[str], None]) -> None:
    """Removes the folders that killed runs left beside `out`.

    Args:
        out: The final folder.
        report: Gets one line per folder.

    Raises:
        OptionError: if another process is writing `out` now.
    """
    for folder in leftovers(out):
        try:
            with open(folder / MARKER, "r+") as marker:
                _lock(marker)
                shutil.rmtree(folder)
        except BlockingIOError:
            raise OptionError(
                explain(
                    "OUT must not be in use by another process.",
                    received=str(out),
                    do=f"Wait for that process, or end it: it writes into {folder}.",
                )
            ) from None
        except OSError as error:
            report(f"cannot remove {folder}, left by an earlier run: {error.strerror}")
        else:
            report(f"removed {folder}, left by an earlier run that was killed")


def leftovers(out: Path) -> list[Path]:
    """Returns the unfinished folders beside `out`, including those that a process still writes.

    Args:
        out: The final folder.
    """
    # mkdtemp's eight characters have no dot, so `.a.b.abcdefgh.partial` does not match `a`.
    name = re.compile(rf"\.{re.escape(out.name)}\.[a-z0-9_]{{8}}\.partial")
    try:
        return sorted(path for path in out.parent.iterdir() if name.fullmatch(path.name))
    except OSError:
        return []


def require_finished(folders: Iterable[str]) -> None:
    """Raises an error if a folder is unfinished.

    Args:
        folders: The folders; any file system that TensorFlow knows.

    Raises:
        OptionError: if one has the mark of an unfinished folder.
    """
    for folder in sorted(set(folders)):
        if tf.io.gfile.exists(os.path.join(folder, MARKER)):
            raise OptionError(
                explain(
                    "`tfdistkit data write` must have finished the folder: it is still running, or was killed.",
                    received=f"{folder} with the file {MARKER}",
                    do="Write the data set again; the next run to the same OUT removes this folder.",
                )
            )


def _lock(file: IO[str]) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
