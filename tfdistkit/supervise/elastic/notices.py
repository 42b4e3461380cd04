"""Preemption notices: a file that appears, or a command that ends with 0, announces the end of hosts or of the job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from tfdistkit.launcher.elasticity import PreemptionSpec
from tfdistkit.supervise.elastic.polled_command import Answer, PolledCommand

_EVERY_S = 5.0
_TIMEOUT_S = 30.0
# Exit codes of a shell for a command that it cannot run.
_CANNOT_RUN = (126, 127)
_MOST_CHARACTERS = 65_536


@dataclass(frozen=True)
class Notice:
    """An announced preemption.

    Args:
        source: The file or the command, for messages.
        hosts: The hosts that are about to end; empty for the whole job.
    """

    source: str
    hosts: frozenset[str] = frozenset()


class Notices:
    """Polls for preemption notices.

    Args:
        spec: The file and the command.
        variables: The environment of the command.
        note: Shows a message to the user.
    """

    def __init__(self, spec: PreemptionSpec, variables: Mapping[str, str] | None, note: Callable[[str], None]):
        self._file, self._text, self.note = spec.file, spec.command, note
        words = ["/bin/sh", "-c", spec.command or ""]
        self._command = PolledCommand(words, _EVERY_S, _TIMEOUT_S, variables) if spec.command else None
        self._problem = ""
        # The result of the last run of the command.
        self._said: Notice | None = None

    def poll(self, hosts: Collection[str]) -> Notice | None:
        """Returns the current notice; never waits.

        Args:
            hosts: The hosts of the job: a notice that names some of them is about these.
        """
        return self._of_file(hosts) or self._of_command(hosts)

    def close(self) -> None:
        """Ends a run of the command."""
        if self._command is not None:
            self._command.close()

    def _of_file(self, hosts: Collection[str]) -> Notice | None:
        if self._file is None or not self._file.exists():
            return None
        try:
            with self._file.open(encoding="utf-8", errors="replace") as file:
                text = file.read(_MOST_CHARACTERS)
        except OSError:
            text = ""  # its existence alone announces the end of the job
        return Notice(str(self._file), _named(text, hosts))

    def _of_command(self, hosts: Collection[str]) -> Notice | None:
        answer = self._command.poll() if self._command is not None else None
        if answer is not None:
            self._said = Notice(f"`{self._text}`", _named(answer.text, hosts)) if answer.exit_code == 0 else None
            self._tell(answer)
        return self._said

    def _tell(self, answer: Answer) -> None:
        """Shows once that the command does not work."""
        problem = ""
        if answer.exit_code is None:
            problem = f"it did not end within {_TIMEOUT_S:g} s"
        elif answer.exit_code in _CANNOT_RUN:
            problem = answer.complaint or f"exit code {answer.exit_code}"
        if problem and problem != self._problem:
            self.note(f"tfdistkit: --preemption-command `{self._text}` says nothing of preemption: {problem}.")
        self._problem = problem


def _named(text: str, hosts: Collection[str]) -> frozenset[str]:
    """Returns the hosts of the job that a text names, with or without a user name, or the id of a Ray node."""
    words = set(text.replace(",", " ").split())
    return frozenset(host for host in hosts if {host, host.rpartition("@")[2], host.partition("/")[0]} & words)
