"""What is handed to workers on hosts by name is on no command line, in no file, and not shown."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_hosts import LOGIN, NetHosts
from ssh_jobs import PATHS, command_line, run_on_hosts, ssh_job

VALUE = "s3cret-value-77"
# One of a name that says so, one that does not.
VARIABLES = {"WANDB_API_KEY": VALUE, "FROM_SHELL": VALUE}
WORDS = ["-H", "h1,h2", "-x", "WANDB_API_KEY", "-x", "FROM_SHELL", "-x", f"PYTHONPATH={PATHS}"]
SCRIPT = """
    import os, pathlib, time
    assert os.environ["WANDB_API_KEY"] == os.environ["FROM_SHELL"] == "s3cret-" + "value-77"
    print("has it", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def clean(hosts: NetHosts) -> Iterator[None]:
    hosts.clean()
    yield
    hosts.clean()


def files_with(value: str, *folders: Path) -> list[Path]:
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink() and value.encode() in path.read_bytes():
                found.append(path)
    return found


@pytest.mark.parametrize("backend", ["local", "mpi"])
def test_secrets_are_on_no_command_line_and_in_no_file(hosts: NetHosts, backend: str) -> None:
    if backend == "mpi" and shutil.which("mpirun") is None and os.environ.get("TFDISTKIT_REQUIRE_HOROVOD") != "1":
        pytest.skip("there is no mpirun")
    script = str(hosts.write("train.py", SCRIPT))
    words = [*WORDS, "--backend", backend, "-v", "--log-dir", "logs", script]
    with ssh_job(hosts, *words, **VARIABLES) as running:
        running.wait_for("[0] has it", "[1] has it")
        lines = [command_line(int(pid)) for pid in os.listdir("/proc") if pid.isdigit()]
        assert any("ssh" in line and "BatchMode" in line for line in lines)
        assert [line for line in lines if VALUE in line] == []
        folders = [folder(number) for folder in (hosts.disk, hosts.temporary) for number in (LOGIN, 1, 2)]
        assert files_with(VALUE, *folders) == []
        for number in hosts.numbers:
            hosts.write("go", "", number)
        ended = running.end()
    assert ended.code == 0, ended.stderr
    assert VALUE not in ended.stdout + ended.stderr
    assert "WANDB_API_KEY='(hidden)'" in ended.stderr and 'FROM_SHELL="$FROM_SHELL"' in ended.stderr
    assert files_with(VALUE, hosts.disk(LOGIN)) == []


def test_a_dry_run_shows_none(hosts: NetHosts) -> None:
    script = str(hosts.write("train.py", SCRIPT))
    ended = run_on_hosts(hosts, *WORDS, "--env", "OTHER_TOKEN=s3cret-value-77", "--dry-run", script, **VARIABLES)
    assert ended.code == 0, ended.stderr
    assert VALUE not in ended.stdout + ended.stderr
    assert ended.stdout.count("WANDB_API_KEY='(hidden)'") == ended.stdout.count("OTHER_TOKEN='(hidden)'") == 2
