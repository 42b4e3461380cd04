"""The folder of backups: a file for each `fit` of a script, and one training that writes it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from tfdistkit import env
from tfdistkit.atomic_files import whole_file
from tfdistkit.callbacks.backup.generations import remove_backups
from tfdistkit.callbacks.process_group import Ranks
from tfdistkit.errors import OptionError, UnsupportedError, explain
from tfdistkit.keras_adapter import private_api
from tfdistkit.report.names import ProcessName, listed

_LOG = logging.getLogger(__name__)

_FILE = "training.backup"
_OF_FIT = "fit-"
# A network file system shows a new file to other hosts within this time, in seconds.
_SEEN_WITHIN_S = 5.0
# How many `fit`s of this process have ended and removed their backups, by folder.
_ended: dict[str, int] = {}


@dataclass(frozen=True)
class _Owner:
    """Who writes a folder.

    Args:
        id: Of one `fit`.
        job: The job that it belongs to; None without a launcher.
        attempt: The number of earlier attempts of the job.
        training: A hash of the weights and of the setup when `fit` began; None where it is not known.
        seed: The global seed; None without one.
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    job: str | None = field(default_factory=env.job)
    attempt: int = field(default_factory=lambda: env.integer(env.ATTEMPT) or 0)
    training: str | None = None
    seed: int | None = None

    def follows(self, other: _Owner) -> bool:
        """Whether this is a later attempt of the same job.

        The earlier one may still run, and write: its host was lost, because the launcher cannot reach it.
        """
        return self.job is not None and self.job == other.job and self.attempt > other.attempt


class BackupFolder:
    """Where one `fit` has its backups.

    A script may call `fit` several times with one folder: for a part of the epochs, for each fold or member of an
    ensemble. Restarted, it calls them again in the same order, so each has a file of its own: the first takes
    `training.backup`, the second `fit-2/training.backup`. A script that skips what it has trained is recognised by the
    weights and the setup with which each `fit` began.

    Args:
        folder: The folder of the user.
        of_each_fit: Whether each `fit` has a file of its own; if not, a `fit` continues after the one before.
    """

    def __init__(self, folder: str, of_each_fit: bool):
        self._folder, self._of_each_fit = os.path.realpath(folder), of_each_fit
        self._own = _Owner()
        self._use(_ended.get(self._folder, 0) + 1 if of_each_fit else 1)

    def _use(self, number: int) -> None:
        """Uses the file of a `fit`, by its number."""
        self.number = number
        self.path = self._path_of(number)
        self._before = self._owner()

    def _path_of(self, number: int) -> str:
        return os.path.join(self._folder, "" if number == 1 else f"{_OF_FIT}{number}", _FILE)

    @property
    def _owner_path(self) -> str:
        return f"{self.path}.owner"

    def find(self, training: str | None, ranks: Ranks) -> None:
        """Finds the file of this `fit` where the script calls several with this folder; all ranks call it.

        Args:
            training: A hash of the weights and of the setup now; None where it is not known.
            ranks: The process group.
        """
        if not self._of_each_fit:
            return
        self._own = replace(self._own, training=training, seed=private_api.global_seed())
        number = self._number_now() if ranks.rank == 0 else 0
        self._use(number if ranks.is_single else int(ranks.gather(np.array([number], np.int64))[0, 0]))

    def _number_now(self) -> int:
        """Returns the number that this `fit` had in an earlier run of the script, which did not skip the same ones."""
        owners = {number: self._owner(number) for number in self._numbers()}
        mine, training = owners.get(self.number), self._own.training
        if training is None or (mine is not None and mine.training == training):
            return self.number
        same = [number for number, one in owners.items() if one is not None and one.training == training]
        if same:
            return same[0]
        seeds = None if mine is None else (mine.seed, self._own.seed)
        if self.number == 1 or seeds is None or None in seeds or seeds[0] == seeds[1]:
            return self.number
        _LOG.warning(
            "BackupAndResume: the backup in %s is of a training with another seed (%s; this one has %s): this `fit` "
            "starts from the beginning. Give each training a folder of its own.",
            os.path.dirname(self.path), *seeds,
        )  # fmt: skip
        return max(owners) + 1

    def _numbers(self) -> list[int]:
        """Returns the numbers of the `fit`s that have files here."""
        numbers = [1]
        with contextlib.suppress(OSError):
            names = [name.removeprefix(_OF_FIT) for name in os.listdir(self._folder) if name.startswith(_OF_FIT)]
            numbers += [int(name) for name in names if name.isdigit()]
        return sorted(numbers)

    def require_writable(self) -> None:
        """Checks before training that backups can be written; called by the chief.

        Raises:
            OptionError: if not.
        """
        place = os.path.dirname(self.path)
        while not os.path.lexists(place):
            place = os.path.dirname(place)
        is_file = not os.path.isdir(place)
        if not is_file and os.access(place, os.W_OK | os.X_OK):
            return
        what = f"a file, {place!r}" if is_file else f"{place!r}, which this process may not write to"
        raise OptionError(
            explain(
                "`backup_dir` must be a folder that the chief may write to, or may create.",
                received=what,
                do="Name another folder, or change its permissions.",
            )
        )

    def require_seen(self, ranks: Ranks) -> None:
        """Checks in a job whose number of workers may change that each rank sees the folder; all ranks call it.

        Only its first attempt fails: a job that has grown onto a host without the folder trains on, with a warning.

        Args:
            ranks: The process group.

        Raises:
            UnsupportedError: on all ranks, if one does not see it.
        """
        if env.text(env.ELASTIC) is None or ranks.is_single:
            return
        mark = f"{self.path}.{ranks.broadcast(uuid.uuid4().hex.encode(), 0).decode()}.seen"
        with _mark_for_others(mark if ranks.rank == 0 else None):
            ranks.any(False)  # It is there.
            rows = ranks.gather(np.array([_appears(mark)], np.int64))[:, 0]
            blind = [ProcessName(int(rank)) for rank in np.flatnonzero(rows == 0)]
        if not blind:
            return
        text = explain(
            "All ranks must see the folder of the backups in a job whose number of workers may change: when a host is "
            "lost, another one continues from them.",
            received=f"{os.path.dirname(self.path)!r}, which rank 0 has, but not {listed(blind)}",
            do="Put it on a disk of all hosts (NFS, Lustre). Or use a fixed number of workers (-np N --max-restarts "
            "M): then ranks that have no backup get that of another rank.",
        )
        if not env.integer(env.ATTEMPT):
            raise UnsupportedError(text)
        if ranks.rank == 0:
            _LOG.warning("BackupAndResume: %s", text)

    def tell_beginning(self) -> None:
        """Says why this `fit` has no backup, although a later one has, or although the job was started again."""
        if (last := max(self._numbers())) > self.number:
            _LOG.warning(
                "BackupAndResume: `fit` number %d of this script trains again, because its backup was removed when "
                "it ended. The backup in %s is of `fit` number %d, which will resume. To keep what each has "
                "trained, give each a folder of its own, and `delete_checkpoint=False`.",
                self.number, self._folder, last,
            )  # fmt: skip
        elif env.integer(env.ATTEMPT) and self.number == 1:
            _LOG.warning(
                "BackupAndResume: no rank of attempt %d finds a backup in %s: training starts from the beginning. The "
                "attempts before made none, or it is on a disk that these hosts do not see.",
                self._own.attempt, self._folder,
            )  # fmt: skip

    def own(self) -> None:
        """Claims the folder before a backup is written; called by the chief.

        Raises:
            UnsupportedError: if another training has claimed it meanwhile.
        """
        owner = self._owner()
        if self._is_of_another(owner):
            raise UnsupportedError(
                explain(
                    "One training must write backups into a folder.",
                    received=f"a backup that another process has written meanwhile, in {os.path.dirname(self.path)!r}",
                    do="Give each training a folder of its own, and end a job before it is started again.",
                )
            )
        if owner == self._own:
            return
        with contextlib.suppress(OSError):  # Writing the backup itself tells why.
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with whole_file(self._owner_path) as partial, open(partial, "w", encoding="utf-8") as file:
                json.dump(vars(self._own), file)

    def end(self, removes: bool, is_writer: bool) -> None:
        """Ends the `fit`.

        Args:
            removes: Whether to remove its backups.
            is_writer: Whether this rank writes them, and removes their folder too, if it is empty.
        """
        if not removes:
            return
        _ended[self._folder] = max(_ended.get(self._folder, 0) + 1, self.number)
        # On a disk of all hosts, the writer removes what it has written.
        if self._is_of_another(self._owner()):
            return
        if is_writer:
            with contextlib.suppress(OSError):
                os.remove(self._owner_path)
        remove_backups(self.path, with_folder=is_writer)
        if is_writer and self.number > 1:
            with contextlib.suppress(OSError):
                os.rmdir(self._folder)  # Removes only an empty folder.

    def _owner(self, number: int | None = None) -> _Owner | None:
        """Returns who has claimed the file of a `fit`, by default of this one; None if nobody has."""
        try:
            path = self.path if number is None else self._path_of(number)
            with open(f"{path}.owner", encoding="utf-8") as file:
                return _Owner(**json.load(file))
        except (OSError, ValueError, TypeError):
            return None

    def _is_of_another(self, owner: _Owner | None) -> bool:
        """Whether another training has claimed the folder since this one began."""
        return owner not in (self._before, self._own, None) and not (owner and self._own.follows(owner))


@contextlib.contextmanager
def _mark_for_others(path: str | None) -> Iterator[None]:
    """Makes an empty file for a while, and its folder; None for neither."""
    if path is None:
        yield
        return
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError):
        os.makedirs(folder, exist_ok=True)
        with open(path, "x", encoding="utf-8"):
            pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.remove(path)
            os.rmdir(folder)  # Removes only an empty folder.


def _appears(path: str) -> bool:
    """Whether a file of another host appears; a network file system may show it later."""
    deadline = time.monotonic() + _SEEN_WITHIN_S
    while not (is_there := os.path.exists(path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return is_there
