"""Download Horovod's source distribution, verify its checksum, unpack it, and make the edits of the recipe."""

from __future__ import annotations

import hashlib
import os
import sys
import tarfile
from pathlib import Path

from tfdistkit.errors import BuildFailedError, explain
from tfdistkit.horovod_build import recipe
from tfdistkit.horovod_build.commands import Say, run_logged

_DEADLINE_S = 600.0


def fetch_source(python: str, cache: Path, work: Path, log: Path, say: Say) -> Path:
    """Returns Horovod's source distribution from the cache, or downloads it with pip.

    Args:
        python: The Python whose pip downloads it, from the user's package index.
        cache: The folder of the cache.
        work: An empty folder for temporary files, on the same file system.
        log: The log for pip's output.
        say: Called with each progress message.

    Returns:
        The archive, with a verified checksum.

    Raises:
        BuildFailedError: if the download fails, or the checksum differs.
    """
    archive = cache / recipe.ARCHIVE
    if not archive.exists():
        say(f"Downloading {recipe.ARCHIVE}.")
        requirements = work / "requirements.txt"
        requirements.write_text(recipe.requirement(), encoding="utf-8")
        run_logged(
            f"The download of {recipe.ARCHIVE}",
            recipe.download_command(python, str(requirements), str(work)),
            log,
            say=say,
            timeout_s=_DEADLINE_S,
            do=f"Without a network, copy {recipe.ARCHIVE} from PyPI to {cache}.",
        )
        check_source(work / recipe.ARCHIVE)
        os.replace(work / recipe.ARCHIVE, archive)
    check_source(archive)
    return archive


def check_source(archive: Path) -> None:
    """Verifies the checksum of an archive.

    Args:
        archive: The path of the archive.

    Raises:
        BuildFailedError: if the checksum differs, or the file cannot be read.
    """
    try:
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
    except OSError as error:
        raise BuildFailedError(explain("The source of Horovod cannot be read.", received=str(error))) from error
    if found != recipe.ARCHIVE_SHA256:
        raise BuildFailedError(
            explain(
                f"{archive} must be the published file; it was not run.",
                received=f"sha256 {found}",
                expected=f"sha256 {recipe.ARCHIVE_SHA256}",
                do="Remove it and try again. If the error returns, ask the operator of your package index.",
            )
        )


def unpack_source(archive: Path, folder: Path) -> Path:
    """Unpacks the source, and edits it as the recipe says.

    Args:
        archive: The archive, with a verified checksum.
        folder: The destination.

    Returns:
        The folder with Horovod's `setup.py`.
    """
    with tarfile.open(archive) as packed:
        # Python 3.12 and the later patch releases of 3.10 and 3.11 have the filter.
        if sys.version_info >= (3, 12) or hasattr(tarfile, "data_filter"):
            packed.extractall(folder, filter="data")
        else:
            packed.extractall(folder)  # noqa: S202 - its checksum is pinned
    source = folder / f"horovod-{recipe.VERSION}"
    for name, before, after in recipe.EDITS:
        text = (source / name).read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name} is not what it was"
        (source / name).write_text(text.replace(before, after), encoding="utf-8")
    return source
