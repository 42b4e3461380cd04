"""Folders that `tfdistkit data write` did not finish: marked for readers, and removed by the next run."""

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

from tfdistkit.errors import OptionError, explain

# Not a dotfile: `mv folder/* elsewhere` has to take it along.
MARKER = "tfdistkit-data-write.incomplete"


@contextlib.contextmanager
def unfinished_folder(out: Path) -> Iterator[Path]:
    """Makes a marked folder beside `out`, and removes it if the body fails.

    Args:
        out: The folder to be.
    """
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    try:
        with open(folder / MARKER, "w") as marker:
            # Some file systems have no locks; then the next run leaves the folder alone.
            with contextlib.suppress(OSError):
                _lock(marker)  # the kernel releases it when the process ends, SIGKILL included
            yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def finish(folder: Path, out: Path) -> None:
    """Gives a folder its name, in one step.

    Args:
        folder: From `unfinished_folder`.
        out: Its name.
    """
    for path in [*sorted(folder.iterdir()), folder]:
        _sync(path)
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)  # mkdtemp's are for their owner alone
    (folder / MARKER).unlink()
    _sync(folder)
    folder.rename(out)
    _sync(out.parent)


def remove_leftovers(out: Path, report: Callable[[str], None]) -> None:
    """Removes what killed runs left beside `out`.

    Args:
        out: The folder to be.
        report: Gets a line for each.

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
                    "OUT is being written by another process.",
                    received=str(out),
                    do=f"Wait for it, or end it: it writes into {folder}.",
                )
            ) from None
        except OSError as error:
            report(f"cannot remove {folder}, which an earlier run left: {error.strerror}")
        else:
            report(f"removed {folder}, which an earlier run left when it was killed")


def leftovers(out: Path) -> list[Path]:
    """Returns the unfinished folders beside `out`, whether a process still writes them or not.

    Args:
        out: The folder to be.
    """
    # mkdtemp's eight characters hold no dot, so `.a.b.abcdefgh.partial` is not taken for one of `a`.
    name = re.compile(rf"\.{re.escape(out.name)}\.[a-z0-9_]{{8}}\.partial")
    try:
        return sorted(path for path in out.parent.iterdir() if name.fullmatch(path.name))
    except OSError:
        return []


def require_finished(folders: Iterable[str]) -> None:
    """Refuses folders that were not written to their end.

    Args:
        folders: Any file system that TensorFlow knows.

    Raises:
        OptionError: if one is marked.
    """
    for folder in sorted(set(folders)):
        if tf.io.gfile.exists(os.path.join(folder, MARKER)):
            raise OptionError(
                explain(
                    "`tfdistkit data write` has not finished this folder: it is still running, or it was killed.",
                    received=folder,
                    expected="a folder without the file " + MARKER,
                    do="Write the data set again; the next run to the same OUT removes this folder.",
                )
            )


def _lock(file: IO[str]) -> None:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
