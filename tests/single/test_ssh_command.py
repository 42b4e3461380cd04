"""The ssh command of a host, and the agent that it starts."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tfdistkit.errors import MissingDependencyError
from tfdistkit.launcher.hosts import HostsSpec, parse_hosts
from tfdistkit.launcher.ssh import backend as ssh
from tfdistkit.launcher.ssh.agent.protocol import GREETING, Decoder, encode

ODD = "/odd path/it's $(here)/`python`"


@pytest.fixture(autouse=True)
def with_ssh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ssh").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_words_are_quoted_for_the_remote_shell(tmp_path: Path) -> None:
    spec = HostsSpec(parse_hosts("me@node1"), ODD, "/work", ssh_port=2222, ssh_identity_file=str(tmp_path / "ssh"))
    command = ssh.ssh_command(spec, "me@node1", [ODD, "-c", ssh._FIRST_STEP])
    assert command[0] == str(tmp_path / "ssh")
    assert command[-3:-1] == ["--", "me@node1"], "what follows -- is no option"
    assert {"-oBatchMode=yes", "-p2222", "-i", str(tmp_path / "ssh")} <= set(command)
    assert shlex.split(command[-1]) == ["exec", ODD, "-c", ssh._FIRST_STEP]
    assert not set("'!\\\n") & set(ssh._FIRST_STEP), "some shells read these between single quotes, too"


def test_without_options_the_ssh_configuration_applies() -> None:
    command = ssh.ssh_command(HostsSpec(parse_hosts("a"), "py", "/"), "a", ["py"])
    assert "-i" not in command and not [word for word in command if word.startswith("-p")]


def test_missing_ssh_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MissingDependencyError, match="`ssh` was not found.*\n.*apt-get install openssh-client"):
        ssh.ssh_command(HostsSpec(parse_hosts("a"), "py", "/"), "a", ["py"])


def test_a_python_becomes_an_agent(tmp_path: Path) -> None:
    """Without an installed tfdistkit: all modules are sent."""
    agent = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", ssh._FIRST_STEP],
        cwd=tmp_path,
        env={"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        asked = {"do": "ask", "number": 0, "what": "describe", "with": {"names": ["TMPDIR"]}}
        unknown = {"do": "ask", "number": 1, "what": "no such thing", "with": {}}
        words = encode(asked) + encode(unknown) + encode({"do": "ping"}) + encode({"do": "goodbye"})
        said, _ = agent.communicate(ssh.agent_line("TEST_AGENT=1") + words, timeout=60)
    finally:
        agent.kill()
        agent.wait()
    assert said.startswith(GREETING) and agent.returncode == 0
    described, refused, pong, goodbye = (message for message, _ in Decoder().push(said[len(GREETING) :]))
    assert described["answer"]["variables"] == {"TMPDIR": str(tmp_path)} and "lo" in described["answer"]["interfaces"]
    assert refused["type"] == "KeyError" and (pong["is"], goodbye["is"]) == ("pong", "goodbye")
    assert [path.name for path in tmp_path.iterdir()] == ["ssh"], "its folder is gone"


def test_an_old_python_is_rejected() -> None:
    older = f"import sys;sys.version_info=(2,7,18);exec({ssh._FIRST_STEP!r})"
    done = subprocess.run([sys.executable, "-c", older], input=b"", capture_output=True, timeout=60)
    assert done.stderr.strip() == b"tfdistkit needs Python 3.10 or newer, and this is 2.7" and done.returncode == 1
