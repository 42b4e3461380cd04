"""The files of `ChiefCheckpoint`: verifies them, finds the files of a template, and loads one on every rank."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
import string
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfdistkit.callbacks.process_group import Ranks, ranks_of_strategy
from tfdistkit.cluster.detection import detect_cluster
from tfdistkit.collectives import registry
from tfdistkit.errors import CheckpointError, OptionError, explain

# Marks the writer and the name of a file: as the comment of a `.keras` file, a zip archive with checksums; and after
# the end of an HDF5 file, which HDF5 ignores, followed by a checksum.
_MARK = b"\ntfdistkit ChiefCheckpoint "
_LONGEST_NAME = 255
_SEAL = b"\ntfdistkit sha256 "
_SEAL_BYTES = len(_SEAL) + 64 + 1
_HDF5, _HDF5_HEAD_BYTES = b"\x89HDF\r\n\x1a\n", 48
# Matches the formatted values of fields such as `{epoch:02d}` and `{val_loss:.2f}`.
_NUMBER = r"(?:[-+]?[0-9][-+0-9.eE]*|[-+]?inf|nan)"
_WHOLE = ("epoch", "batch")
_READ_BYTES = 2**20


def seal(path: str) -> None:
    """Marks a file as written by `ChiefCheckpoint` under its name; adds a checksum to an HDF5 file."""
    mark = _MARK + os.fsencode(os.path.basename(path))
    if not path.endswith(".h5"):
        with zipfile.ZipFile(path, "a") as archive:
            archive.comment = mark
    else:
        with open(path, "ab") as file:
            file.write(mark)
        digest = _sha256(path, os.path.getsize(path))
        with open(path, "ab") as file:
            file.write(_SEAL + digest.encode() + b"\n")


def is_own(path: str) -> bool:
    """Returns whether `ChiefCheckpoint` wrote a file under its present name: False for copies and other writers."""
    mark = _MARK + os.fsencode(os.path.basename(path))
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _SEAL_BYTES - len(_MARK) - _LONGEST_NAME))
        end = file.read()
        if path.endswith(".h5"):
            return end[-_SEAL_BYTES:].startswith(_SEAL) and end[:-_SEAL_BYTES].endswith(mark)
        return end.endswith(mark)
    return False


def check_file(path: str) -> None:
    """Raises an error if a checkpoint is damaged.

    Args:
        path: A `.keras` or `.weights.h5` file. A `.weights.h5` file of Keras has no checksum; only its size is
            checked.

    Raises:
        CheckpointError: if it is damaged.
    """
    damage = _find_damage(path)
    if damage is None:
        return
    raise CheckpointError(
        explain(
            "The checkpoint is damaged.",
            received=f"{os.path.abspath(path)!r}, {os.path.getsize(path)} bytes: {damage}",
            expected="the bytes that were written",
            do="Load the previous one (ChiefCheckpoint(..., keep=2) keeps two), or copy the file again.",
        )
    )


def _find_damage(path: str) -> str | None:
    if not path.endswith(".h5"):
        try:
            with zipfile.ZipFile(path) as file:
                bad = file.testzip()
        except (zipfile.BadZipFile, EOFError) as error:
            return str(error)
        return None if bad is None else f"the checksum of {bad!r} in it does not match"
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        begin = file.read(_HDF5_HEAD_BYTES)
        file.seek(max(0, size - _SEAL_BYTES))
        end = file.read()
    if not begin.startswith(_HDF5):
        return "it is not an HDF5 file"
    if len(begin) < _HDF5_HEAD_BYTES:
        return "it is truncated"
    # The end-of-file address in the superblock: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
    at = 28 if begin[len(_HDF5)] >= 2 else 40
    if int.from_bytes(begin[at : at + 8], "little") > size:
        return "it is truncated"
    if end.startswith(_SEAL) and end[len(_SEAL) : -1].decode() != _sha256(path, size - _SEAL_BYTES):
        return "its checksum does not match"
    return None


def _sha256(path: str, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while size > 0 and (data := file.read(min(size, _READ_BYTES))):
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()


def files_of(template: str) -> list[str]:
    """Returns the files that match a template such as `"{epoch:02d}.keras"`, the oldest first."""
    parts = list(string.Formatter().parse(template))
    pattern = "".join(re.escape(literal) + ("" if field is None else f"({_NUMBER})") for literal, field, *_ in parts)
    anything = "".join(glob.escape(literal) + ("" if field is None else "*") for literal, field, *_ in parts)
    fields = [(field, spec or "") for _, field, spec, _ in parts if field is not None]
    matches = ((path, re.fullmatch(pattern, path)) for path in glob.glob(anything))
    found = [path for path, match in matches if match and all(map(_makes, fields, match.groups()))]
    return sorted(found, key=lambda path: (os.stat(path).st_mtime_ns, path))


def _makes(field: tuple[str, str], text: str) -> bool:
    """Returns whether a field such as `{epoch:02d}` formats some number as `text` (`{epoch}`: not `2024-01-01`)."""
    name, spec = field
    for kind in (int,) if name in _WHOLE else (int, float):
        with contextlib.suppress(ValueError):
            if format(kind(text), spec) == text:
                return True
    return False


def names_each_file(template: str) -> bool:
    """Returns whether a template has fields, so that it names several files."""
    return any(field is not None for _, field, _, _ in string.Formatter().parse(template))


def load_checkpoint(filepath: str | os.PathLike[str], model: Any = None, **options: Any) -> Any:
    """Verifies a checkpoint of `ChiefCheckpoint`, and loads it on every rank.

    Each rank searches for the file. A rank without the chief's file - its host does not share the chief's
    disk - gets a copy over the network. All ranks call this, after the strategy is created.

    Args:
        filepath: The file; or the `filepath` of the callback, to load the newest of its files.
        model: The model that loads a `.weights.h5` file.
        **options: For `keras.models.load_model` or `model.load_weights`.

    Returns:
        The model.

    Raises:
        OptionError: (a ValueError) if `filepath` holds only weights and `model` is missing.
        CheckpointError: (an OSError) on every rank, if no rank has the file, or it is damaged.
    """
    template = os.fspath(filepath)
    if model is None and template.endswith(".h5"):
        raise OptionError(
            explain(
                "`model` must be given for a `.weights.h5` file, which holds only weights.",
                received=f"filepath={template!r}, model=None",
                do="Build the model, then call load_checkpoint(filepath, model).",
            )
        )
    ranks = _ranks(model)
    paths = files_of(template)
    path = paths[-1] if paths else template
    with _on_this_rank(path, ranks) as own:
        if model is None:
            return keras.models.load_model(own, **options)
        model.load_weights(own, **options)
    return model


def _ranks(model: Any) -> Ranks | None:
    """Returns the process group of the model, else of the newest strategy; None without a strategy."""
    strategy = None if model is None else model.distribute_strategy
    if strategy is None or strategy.num_replicas_in_sync == 1:
        last = registry.last_made()
        strategy = None if last is None else last.strategy
    return None if strategy is None else ranks_of_strategy(strategy)


@contextlib.contextmanager
def _on_this_rank(path: str, ranks: Ranks | None) -> Iterator[str]:
    """Yields a path on this rank to the chief's file, or to a copy of it."""
    digest = _sha256(path, os.path.getsize(path)) if os.path.isfile(path) else None
    if ranks is None or ranks.is_single:
        _require_found(path, [digest is not None])
        check_file(path)
        yield path
        return
    row = np.array([digest is not None, int(digest[:15], 16) if digest else 0], np.int64)
    of_ranks = ranks.gather(row)
    _require_found(path, [bool(has) for has in of_ranks[:, 0]])
    # The chief, if it has the file; else the first rank that has it: the chief's host may have changed.
    root = int(np.argmax(of_ranks[:, 0]))
    with tempfile.TemporaryDirectory(prefix="tfdistkit-") as scratch:
        if (of_ranks == of_ranks[root]).all():
            own = path
        else:
            own = _copy_of(root, path, scratch, ranks)
        check_file(own)
        yield own


def _copy_of(root: int, path: str, scratch: str, ranks: Ranks) -> str:
    data = b""
    if ranks.rank == root:
        with open(path, "rb") as file:
            data = file.read()
    data = ranks.broadcast(data, root)
    if ranks.rank == root:
        return path
    own = os.path.join(scratch, os.path.basename(path))
    with open(own, "wb") as file:
        file.write(data)
    return own


def _require_found(path: str, has: list[bool]) -> None:
    if any(has):
        return
    cluster = detect_cluster()
    where = f"rank {cluster.rank} on {os.uname().nodename}" if len(has) > 1 else os.uname().nodename
    raise CheckpointError(
        explain(
            "The checkpoint must exist" + (" on at least one rank." if len(has) > 1 else "."),
            received=f"{os.path.abspath(path)!r}, missing on {where}",
            expected="a file that ChiefCheckpoint wrote, or its `filepath` with fields such as {epoch}",
            do="Copy it from the host of rank 0 of the run that wrote it.",
        )
    )
