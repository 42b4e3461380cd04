"""The hosts of elastic jobs: what a discovery script may print, and what losses and failures leave of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tfdistkit.cluster.environments.host_list import HostSlots
from tfdistkit.errors import OptionError
from tfdistkit.launcher.elasticity import PreemptionSpec
from tfdistkit.supervise.elastic import discovery
from tfdistkit.supervise.elastic.discovery import Discovery, parse_printed
from tfdistkit.supervise.elastic.membership import Membership
from tfdistkit.supervise.elastic.notices import Notices
from tfdistkit.supervise.elastic.polled_command import Answer, PolledCommand

A2, B2, C1 = HostSlots("a", 2), HostSlots("b", 2), HostSlots("c", 1)


def members(*hosts: HostSlots, least: int = 2, most: int = 4, is_fixed: bool = True) -> Membership:
    return Membership(hosts, least, most, is_fixed)


def test_spare_hosts_replace_lost_slots() -> None:
    job = members(A2, B2, C1, most=2)
    assert job.world_size(0.0) == 2 and job.available(0.0) == (A2, B2, C1)
    job.lose("a", 1, 10.0, is_unreachable=False)
    assert job.available(10.0) == (HostSlots("a", 1), B2, C1) and job.world_size(10.0) == 2
    job.lose("b", 2, 20.0, is_unreachable=True)
    assert job.available(20.0) == (HostSlots("a", 1), C1)
    assert job.available(9999.0) == (HostSlots("a", 1), C1), "a fixed list gets no host back"


def test_a_fixed_list_gets_its_slots_back_for_a_restart() -> None:
    job = members(HostSlots("localhost", 3), most=3)
    job.lose("localhost", 2, 1.0, is_unreachable=False)
    assert job.world_size(1.0) == 1
    job.forgive()
    assert job.world_size(1.0) == 3


def test_discovered_slots_replace_lost_ones_at_once() -> None:
    job = members(A2, B2, is_fixed=False)
    job.lose("a", 1, 1.0, is_unreachable=False)
    assert job.available(1.0) == (A2, B2)


def test_a_host_that_fails_twice_is_left_out_for_a_while() -> None:
    job = members(A2, B2, is_fixed=False)
    for now in (1.0, 2.0):
        job.lose("a", 1, now, is_unreachable=False)
    assert job.available(2.0) == (B2,) and job.left_out(2.0) == {"a": 60.0}
    assert job.available(63.0) == (A2, B2)
    job.lose("a", 1, 70.0, is_unreachable=False)
    assert job.left_out(70.0) == {"a": 120.0}, "each time for twice as long"
    job.lose("a", 1, 5000.0, is_unreachable=False)
    assert job.left_out(5000.0) == {}, "failures of long ago are forgotten"


def test_a_host_that_is_needed_is_not_left_out_unless_it_is_gone() -> None:
    job = members(A2, C1, is_fixed=False)
    for now in (1.0, 2.0):
        job.lose("a", 1, now, is_unreachable=False)
    assert job.available(2.0) == (A2, C1)
    job.lose("a", 2, 3.0, is_unreachable=True)
    assert job.available(3.0) == (C1,) and job.world_size(3.0) == 1


def test_hosts_with_a_notice_are_not_used_until_it_goes() -> None:
    job = members(A2, B2)
    job.leave({"b"})
    assert job.available(0.0) == (A2,)
    job.leave(())
    assert job.available(0.0) == (A2, B2)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2\nb:2\n", (A2, B2)),
        ("# now\n\n a:2 \nc\n", (A2, C1)),
        ("me@a:2\n", (HostSlots("me@a", 2),)),
        ("localhost:3", (HostSlots("localhost", 3),)),
    ],
)
def test_printed_hosts(text: str, hosts: tuple[HostSlots, ...]) -> None:
    assert parse_printed(text) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must print hosts. Received: no line"),
        ("a:0\n", "must print hosts. Received: 'a:0'"),
        ("<html>502</html>\n", "must print hosts. Received: '<html>502</html>'"),
        ("a:2,b:2\n", "must print hosts"),
        ("-oProxyCommand=x\n", "must print hosts"),
        ("a:1\na:2\n", "must print each host once. Received: a and a"),
        ("localhost:1\n127.0.0.1:2\n", "localhost and 127.0.0.1, which are one machine"),
        (f"localhost:1\n{os.uname().nodename}:2\n", "which are one machine"),
        ("a:1\nme@a:2\n", "a and me@a, which are one machine"),
    ],
)
def test_invalid_output_of_a_discovery_script(text: str, message: str) -> None:
    with pytest.raises(OptionError) as error:
        parse_printed(text)
    assert message in str(error.value)


def script(folder: Path, text: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_EVERY_S", 0.01)


def answers(one: Discovery, count: int) -> list[list[str]]:
    """Returns the next lists of hosts, a pause of one run between them."""
    found: list[list[str]] = []
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline
        if (hosts := one.poll()) is not None:
            found.append([host.host for host in hosts])
        time.sleep(0.005)
    one.close()
    return found


def test_a_list_counts_when_two_runs_agree(tmp_path: Path, fast: None) -> None:
    count = tmp_path / "count"
    # a, then one wrong answer, then b for good.
    text = f"echo x >> {count}; n=$(wc -l < {count}); case $n in 1|2) echo a;; 3) echo c;; 4) echo a;; *) echo b;; esac"
    notes: list[str] = []
    found = answers(Discovery(script(tmp_path, text), None, notes.append), 4)
    assert found == [["a"], ["a"], ["b"], ["b"]] and notes == []


def test_a_script_that_flaps_changes_nothing(tmp_path: Path, fast: None) -> None:
    count = tmp_path / "count"
    text = f"echo x >> {count}; n=$(wc -l < {count}); [ $n -gt 12 ] && echo z && exit; echo h$n"
    notes: list[str] = []
    found = answers(Discovery(script(tmp_path, text), None, notes.append), 2)
    assert found == [["h1"], ["z"]]
    assert len(notes) == 1 and "all differ from the one before" in notes[0]


@pytest.mark.parametrize(
    ("failure", "note"),
    [
        ("echo no credentials >&2; exit 3", "must end with exit code 0. Received: exit code 3: no credentials."),
        ("echo '<html>'", "must print hosts. Received: '<html>'"),
        ("sleep 600", "Received: no end within 0.5 s"),
        ("exit 0", "must print hosts. Received: no line."),
    ],
)
def test_a_script_that_fails_is_noted_once(
    tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch, failure: str, note: str
) -> None:
    monkeypatch.setattr(discovery, "_TIMEOUT_S", 0.5)
    count = tmp_path / "count"
    text = f"echo x >> {count}; case $(wc -l < {count}) in 1|4|5) echo a;; *) {failure};; esac"
    notes: list[str] = []
    found = answers(Discovery(script(tmp_path, text), None, notes.append), 3)
    assert found == [["a"], ["a"], ["a"]]
    assert len(notes) == 2, notes
    assert note in notes[0] and notes[0].endswith("The hosts stay as they were.") and "prints hosts again" in notes[1]


def test_a_first_run_that_fails_is_a_problem_not_a_note(tmp_path: Path, fast: None) -> None:
    notes: list[str] = []
    one = Discovery(script(tmp_path, "exit 3"), None, notes.append)
    deadline = time.monotonic() + 60
    while not one.problem and time.monotonic() < deadline:
        assert one.poll() is None
    assert "exit code 3" in one.problem and notes == []
    one.close()


def polled(command: PolledCommand) -> Answer:
    deadline = time.monotonic() + 60
    while (answer := command.poll()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return answer


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    words = ["/bin/sh", "-c", f"sleep 600 & echo $! $$ > {pids}; echo so far; wait"]
    command = PolledCommand(words, 60.0, 0.5, None)
    answer = polled(command)
    assert answer.exit_code is None and answer.text == "so far\n"
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert command.poll() is None, "the next run is not due"


def test_a_command_that_cannot_be_started() -> None:
    answer = polled(PolledCommand(["/no/such/command"], 60.0, 1.0, None))
    assert answer.exit_code == 126 and "No such file" in answer.complaint


def test_a_notice_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "notice"
    notices = Notices(PreemptionSpec(file=file), None, print)
    assert notices.poll(("a", "me@b")) is None
    file.touch()
    whole = notices.poll(("a", "me@b"))
    assert whole is not None and whole.hosts == frozenset() and whole.source == str(file)
    file.write_text("b, z\n")
    some = notices.poll(("a", "me@b"))
    assert some is not None and some.hosts == {"me@b"}


def test_a_notice_of_a_command(tmp_path: Path) -> None:
    notes: list[str] = []
    for text, said in (("exit 1", None), ("echo a", {"a"}), ("echo TRUE | grep -q TRUE", set())):
        notices = Notices(PreemptionSpec(command=text), None, notes.append)
        deadline, notice = time.monotonic() + 60, None
        while notice is None and notices._command is not None and time.monotonic() < deadline:
            notice = notices.poll(("a", "b"))
            if notices._command._child is None:
                break
            time.sleep(0.005)
        assert (notice and notice.hosts) == said
        notices.close()
    assert notes == []
    notices = Notices(PreemptionSpec(command="no_such_command_here"), None, notes.append)
    deadline = time.monotonic() + 60
    while not notes and time.monotonic() < deadline:
        assert notices.poll(()) is None
        time.sleep(0.005)
    assert len(notes) == 1 and "`no_such_command_here` says nothing of preemption" in notes[0]
