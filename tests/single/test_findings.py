"""The findings of the doctor as text and JSON, and its exit codes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tfdistkit import supported
from tfdistkit.cli import doctor
from tfdistkit.doctor import Finding, Level, machine
from tfdistkit.doctor.findings import as_json, as_text

FINDINGS = [
    Finding("versions", "Python", Level.GOOD, "3.12.1"),
    Finding("versions", "Horovod", Level.NOTE, "not installed", "tfdistkit horovod install"),
    Finding("hosts", "all", Level.PROBLEM, "host  answers\nh1    no"),
    Finding("hosts", "h1", Level.PROBLEM, "It did not answer.", "Look whether it is on."),
]


def test_text() -> None:
    assert as_text(FINDINGS).splitlines() == [
        "versions",
        "  ok       Python   3.12.1",
        "  note     Horovod  not installed (tfdistkit horovod install)",
        "",
        "hosts",
        "  problem  all      host  answers",
        "                    h1    no",
        "  problem  h1       It did not answer.",
        "",
        "what to do",
        "  h1: Look whether it is on.",
    ]


def test_json() -> None:
    first, *_, last = json.loads(json.dumps(as_json(FINDINGS)))
    assert first == {"topic": "versions", "name": "Python", "level": "ok", "text": "3.12.1", "do": ""}
    assert (last["level"], last["do"]) == ("problem", "Look whether it is on.")


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.17.0", Level.PROBLEM), ("2.18.0", Level.GOOD), ("2.21.1-rc0", Level.GOOD), ("2.22.0", Level.WARNING)],
)
def test_versions(version: str, level: Level) -> None:
    found = machine._version("TensorFlow", version, supported.TENSORFLOW, "pip install it")
    assert found.level is level and (found.do == "") == (level is Level.GOOD)


@pytest.mark.parametrize(
    ("cuda", "gpus", "has_gpu", "level", "text"),
    [
        (None, [], False, Level.NOTE, "none"),
        (None, [], True, Level.WARNING, "built without CUDA"),
        ("12.5", ["A100", "A100"], True, Level.GOOD, "A100, A100"),
        ("12.5", [], True, Level.WARNING, "not visible to TensorFlow"),
        ("12.5", [], False, Level.NOTE, "none"),
    ],
)
def test_gpus(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, gpus: list[str], has_gpu: bool, level: Level, text: str
) -> None:
    monkeypatch.setattr(machine.os.path, "exists", lambda path: has_gpu and path == "/dev/nvidia0")
    facts: dict[str, Any] = {"cuda": cuda, "cudnn": "9", "nccl": "2.25", "gpus": gpus}
    found = {finding.name: finding for finding in machine._gpu_findings(facts)}
    assert found["GPU"].level is level and text in found["GPU"].text
    assert (found["GPU"].do != "") == (level is Level.WARNING)


def test_a_tensorflow_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_ASK_TENSORFLOW", "import sys; sys.exit('no such library: libfoo')")
    findings, facts = machine.check_versions()
    (found,) = (finding for finding in findings if finding.name == "TensorFlow")
    assert found.level is Level.PROBLEM and "libfoo" in found.text and "pip install" in found.do
    assert "problem" in facts


@pytest.mark.parametrize(
    "facts, text, do",
    [
        ({"backend": "jax", "keras_problem": "no module 'jax'"}, "its backend is 'jax': no module", "KERAS_BACKEND="),
        ({"backend": "torch", "keras": "3.15.1"}, "its backend is 'torch'", "KERAS_BACKEND=tensorflow"),
        ({"keras_problem": "ImportError: namex"}, "cannot be loaded: ImportError: namex", "pip install"),
    ],
)
def test_a_keras_that_does_not_run_on_tensorflow(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], text: str, do: str
) -> None:
    told = {"tensorflow": "2.21.0", "cuda": None, "cudnn": None, "nccl": None, "horovod": None, "gpus": [], **facts}
    monkeypatch.setattr(machine, "_ASK_TENSORFLOW", f"import json; print(json.dumps({told!r}))")
    found = {finding.name: finding for finding in machine.check_versions()[0]}
    assert found["TensorFlow"].level is not Level.PROBLEM
    assert found["Keras"].level is Level.PROBLEM and text in found["Keras"].text and do in found["Keras"].do


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise OSError("unknown")

    monkeypatch.setattr(machine.socket, "gethostbyname", fail)
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "box")
    found = machine._own_name({"lo": "127.0.0.1", "eth0": "10.0.0.7"})
    assert found.level is Level.WARNING and found.do == "echo '10.0.0.7 box' >> /etc/hosts"


def test_a_proxy_between_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert "http_proxy set" in next(one.text for one in machine.check_network() if one.name == "proxy")
    monkeypatch.setenv("no_proxy", "localhost")
    assert "proxy" not in [one.name for one in machine.check_network()]


def test_the_exit_code_and_the_tried_strategies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(doctor, "check_versions", lambda: ([FINDINGS[0]], {"horovod": None}))
    monkeypatch.setattr(doctor, "try_strategies", lambda names, hosts, env: tried.append(list(names)) or [])
    assert doctor.main(["--json"]) == 0
    assert tried == [["mirrored", "central_storage", "multiworker", "parameter_server"]]
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert doctor.main(["--strategy", "horovod", "--strategy", "mirrored"]) == 1
    assert tried[1:] == [["mirrored"]], "only installed strategies are tried"
    assert "Horovod is not installed" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "check_versions", lambda: ([FINDINGS[0]], {"horovod": "0.28.1"}))
    assert doctor.main(["--strategy", "horovod", "--strategy", "mirrored"]) == 0
    assert tried[2:] == [["horovod", "mirrored"]]
    bad = Finding("strategies", "horovod", Level.PROBLEM, "no", "build it")
    monkeypatch.setattr(doctor, "try_strategies", lambda names, hosts, env: [bad])
    assert doctor.main(["--strategy", "horovod"]) == 1
    assert "  horovod: build it" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "check_versions", lambda: ([], {"horovod": None, "problem": "broken"}))
    assert doctor.main([]) == 0, "without TensorFlow nothing is tried; its finding is the problem"


@pytest.mark.parametrize("words", [["--strategy", "none"], ["--ssh-port", "22"], ["-H", "a;b"], ["extra"]])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        doctor.main(words)
    assert leave.value.code == 2 and "tfdistkit doctor" in capsys.readouterr().err
