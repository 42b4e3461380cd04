"""`--host-discovery-script`: reads the current hosts from a script, which may fail, hang or print unstable lists."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import OptionError, explain
from tfdistkit.launcher.hosts import is_this_machine, parse_hosts
from tfdistkit.supervise.elastic.polled_command import Answer, PolledCommand

_EVERY_S = 2.0
_TIMEOUT_S = 30.0
# The number of successive answers that differ from the one before, after which the user is told.
_FLAPPING = 5

_EXPECTED = "one host on each line, such as node1:4, as for horovodrun"


def parse_printed(text: str) -> tuple[HostSlots, ...]:
    """Parses what a discovery script printed.

    Args:
        text: Lines of `host:slots`; a host alone has one slot; empty lines and comments (`#`) are skipped.

    Returns:
        The hosts in order.

    Raises:
        OptionError: if it names no host, a line is not a host, or one machine has two names.
    """
    what = "The host discovery script must print hosts."
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    hosts: list[HostSlots] = []
    for line in filter(None, lines):
        try:
            (host,) = parse_hosts(line)
        except (OptionError, ValueError):
            raise OptionError(explain(what, received=repr(line[:200]), expected=_EXPECTED)) from None
        hosts.append(host)
    if not hosts:
        raise OptionError(explain(what, received="no line", expected=_EXPECTED))
    seen: dict[str, str] = {}
    for one in hosts:
        name = one.host.rpartition("@")[2]
        machine = "" if is_this_machine(name) else name.lower()
        if machine in seen:
            what = "The host discovery script must print each host once."
            raise OptionError(explain(what, received=f"{seen[machine]} and {one.host}, which are one machine"))
        seen[machine] = one.host
    return tuple(hosts)


class Discovery:
    """Reads the hosts that a script prints; a new list counts when two runs in a row agree on it.

    Args:
        script: The path of the script.
        variables: Its environment.
        note: Shows a message to the user.
    """

    def __init__(self, script: str, variables: Mapping[str, str] | None, note: Callable[[str], None]):
        # A name without a folder would be searched on the PATH.
        self._command = PolledCommand([os.path.abspath(script)], _EVERY_S, _TIMEOUT_S, variables)
        self._script, self.note = script, note
        self._last: tuple[HostSlots, ...] | None = None
        self._changes = 0
        self.problem = ""
        # The script knows hosts, not what the workers of a lost attempt left: its last list counts.
        self.is_current = True

    def poll(self) -> Sequence[HostSlots] | None:
        """Returns the hosts if a run has just confirmed the list of the run before; never waits."""
        answer = self._command.poll()
        if answer is None or (answer.exit_code is not None and answer.exit_code < 0):
            return None  # it was killed together with an attempt
        try:
            hosts = parse_printed(_printed(answer))
        except OptionError as error:
            self._tell(str(error).replace("\n", " "))
            return None
        if self.problem:
            self.problem = ""
            self.note(f"tfdistkit: {self._script} prints hosts again.")
        return self._confirmed(hosts)

    def renew(self) -> None:
        """Does nothing: the last list still counts (see `launcher.ray.capacity.Capacity`)."""

    def close(self) -> None:
        """Ends a run of the script."""
        self._command.close()

    def _confirmed(self, hosts: tuple[HostSlots, ...]) -> Sequence[HostSlots] | None:
        is_first, is_same = self._last is None, sorted(hosts, key=str) == sorted(self._last or (), key=str)
        self._last = hosts
        if is_first or is_same:
            self._changes = 0
            return hosts
        self._changes += 1
        if self._changes == _FLAPPING:
            self.note(
                f"tfdistkit: the last {_FLAPPING} lists of {self._script} all differ from the one before. The hosts "
                "stay as they are until two lists in a row agree."
            )
        return None

    def _tell(self, problem: str) -> None:
        """Shows a problem of the script once, until it prints hosts again or has another problem."""
        if problem != self.problem and self._last is not None:
            self.note(f"tfdistkit: {self._script}: {problem} The hosts stay as they were.")
        self.problem = problem


def _printed(answer: Answer) -> str:
    """Returns what a run printed.

    Raises:
        OptionError: if it failed, or did not end in time.
    """
    if answer.exit_code == 0:
        return answer.text
    how = f"exit code {answer.exit_code}" if answer.exit_code is not None else f"no end within {_TIMEOUT_S:g} s"
    complaint = answer.complaint.replace("\n", " ")
    what = "The host discovery script must end with exit code 0."
    raise OptionError(explain(what, received=f"{how}{': ' * bool(complaint)}{complaint}"))
