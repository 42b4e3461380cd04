"""The files of `ChiefCheckpoint`: are they what was written, which belong together, and how every rank gets them."""

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

# Who wrote a file, and under which name: in the comment of a `.keras` file, which is a zip archive with checksums, and
# behind the end of an HDF5 file, which HDF5 does not look at, with a checksum behind it.
_MARK = b"\ntfdistkit ChiefCheckpoint "
_LONGEST_NAME = 255
_SEAL = b"\ntfdistkit sha256 "
_SEAL_BYTES = len(_SEAL) + 64 + 1
_HDF5, _HDF5_HEAD_BYTES = b"\x89HDF\r\n\x1a\n", 48
# What `{epoch:02d}` and `{val_loss:.2f}` become.
_NUMBER = r"(?:[-+]?[0-9][-+0-9.eE]*|[-+]?inf|nan)"
_WHOLE = ("epoch", "batch")
_READ_BYTES = 2**20


def seal(path: str) -> None:
    """Marks a file as one that `ChiefCheckpoint` wrote under its name; an HDF5 file gets a checksum, too."""
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
    """Whether `ChiefCheckpoint` wrote a file under the name that it has: not a copy, and nobody else."""
    mark = _MARK + os.fsencode(os.path.basename(path))
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - _SEAL_BYTES - len(_MARK) - _LONGEST_NAME))
        end = file.read()
        if path.endswith(".h5"):
            return end[-_SEAL_BYTES:].startswith(_SEAL) and end[:-_SEAL_BYTES].endswith(mark)
        return end.endswith(mark)
    return False


def check_file(path: str) -> None:
    """Raises an error if a file is not what was written.

    Args:
        path: A `.keras` or `.weights.h5` file. One that Keras wrote itself is checked as far as it can be.

    Raises:
        CheckpointError: if it is damaged.
    """
    wrong = _what_is_wrong(path)
    if wrong is None:
        return
    raise CheckpointError(
        explain(
            "The checkpoint is damaged.",
            received=f"{os.path.abspath(path)!r}, {os.path.getsize(path)} bytes: {wrong}",
            expected="the bytes that were written",
            do="Load the one before (ChiefCheckpoint(..., keep=2) keeps two), or copy the file again.",
        )
    )


def _what_is_wrong(path: str) -> str | None:
    if not path.endswith(".h5"):
        try:
            with zipfile.ZipFile(path) as file:
                bad = file.testzip()
        except (zipfile.BadZipFile, EOFError) as error:
            return str(error)
        return None if bad is None else f"the checksum of {bad!r} in it is another"
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        begin = file.read(_HDF5_HEAD_BYTES)
        file.seek(max(0, size - _SEAL_BYTES))
        end = file.read()
    if not begin.startswith(_HDF5):
        return "it is no HDF5 file"
    if len(begin) < _HDF5_HEAD_BYTES:
        return "it is cut"
    # Where the file ends, by its superblock: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
    at = 28 if begin[len(_HDF5)] >= 2 else 40
    if int.from_bytes(begin[at : at + 8], "little") > size:
        return "it is cut"
    if end.startswith(_SEAL) and end[len(_SEAL) : -1].decode() != _sha256(path, size - _SEAL_BYTES):
        return "its checksum is another"
    return None


def _sha256(path: str, size: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while size > 0 and (data := file.read(min(size, _READ_BYTES))):
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()


def files_of(template: str) -> list[str]:
    """Returns the files whose names a template such as `"{epoch:02d}.keras"` can make, the oldest first."""
    parts = list(string.Formatter().parse(template))
    pattern = "".join(re.escape(literal) + ("" if field is None else f"({_NUMBER})") for literal, field, *_ in parts)
    anything = "".join(glob.escape(literal) + ("" if field is None else "*") for literal, field, *_ in parts)
    fields = [(field, spec or "") for _, field, spec, _ in parts if field is not None]
    matches = ((path, re.fullmatch(pattern, path)) for path in glob.glob(anything))
    found = [path for path, match in matches if match and all(map(_makes, fields, match.groups()))]
    return sorted(found, key=lambda path: (os.stat(path).st_mtime_ns, path))


def _makes(field: tuple[str, str], text: str) -> bool:
    """Whether a field such as `{epoch:02d}` becomes `text` for some number: `{epoch}` never becomes `2024-01-01`."""
    name, spec = field
    for kind in (int,) if name in _WHOLE else (int, float):
        with contextlib.suppress(ValueError):
            if format(kind(text), spec) == text:
                return True
    return False


def names_each_file(template: str) -> bool:
    """Whether the files that a template names differ."""
    return any(field is not None for _, field, _, _ in string.Formatter().parse(template))


def load_checkpoint(filepath: str | os.PathLike[str], model: Any = None, **options: Any) -> Any:
    """Loads what `ChiefCheckpoint` saved, when it has been found to be what was written; on every rank.

    The file is looked for on every rank. Where a rank does not have the chief's file - its host has no disk in
    common with the chief's - it gets a copy over the network. All ranks call this, after the strategy is made.

    Args:
        filepath: The file; or the `filepath` of the callback, and the newest of its files is loaded.
        model: Takes the weights of a `.weights.h5` file.
        **options: For `keras.models.load_model` or `model.load_weights`.

    Returns:
        The model.

    Raises:
        OptionError: (a ValueError) if weights are to be loaded without a model.
        CheckpointError: (an OSError) on every rank, if no rank has the file, or it is damaged.
    """
    template = os.fspath(filepath)
    if model is None and template.endswith(".h5"):
        raise OptionError(
            explain(
                "`model` is missing: a `.weights.h5` file holds the weights of one.",
                received=f"filepath={template!r}",
                expected="load_checkpoint(filepath, model)",
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
    """Those that train the model, or else those of the strategy that was made last; None if there is none."""
    strategy = None if model is None else model.distribute_strategy
    if strategy is None or strategy.num_replicas_in_sync == 1:
        last = registry.last_made()
        strategy = None if last is None else last.strategy
    return None if strategy is None else ranks_of_strategy(strategy)


@contextlib.contextmanager
def _on_this_rank(path: str, ranks: Ranks | None) -> Iterator[str]:
    """Within it, the file that the chief has is at the path that is yielded."""
    digest = _sha256(path, os.path.getsize(path)) if os.path.isfile(path) else None
    if ranks is None or ranks.alone:
        _require_found(path, [digest is not None])
        check_file(path)
        yield path
        return
    row = np.array([digest is not None, int(digest[:15], 16) if digest else 0], np.int64)
    everyone = ranks.gather(row)
    _require_found(path, [bool(has) for has in everyone[:, 0]])
    root = int(np.argmax(everyone[:, 0]))  # The chief, if it has the file; else it was another rank's host then.
    with tempfile.TemporaryDirectory(prefix="tfdistkit-") as scratch:
        if (everyone == everyone[root]).all():
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
    data = ranks.share(data, root)
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
    who = f"rank {cluster.rank} on {os.uname().nodename}" if len(has) > 1 else f"{os.uname().nodename}"
    raise CheckpointError(
        explain(
            "There is no such checkpoint" + (" on any rank." if len(has) > 1 else "."),
            received=f"{os.path.abspath(path)!r}, looked for by {who}",
            expected="a file that ChiefCheckpoint wrote on the chief's host, or a name with fields such as {epoch}",
            do="Look for it on the host that was the chief's (rank 0) when it was written, and copy it here.",
        )
    )
