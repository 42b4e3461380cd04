"""`tfdistkit env`: the detected descriptions, the selected one, and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_steps import BATCH, put, step

from tfdistkit import env
from tfdistkit.cli.main import main
from tfdistkit.cluster.environments.slurm_ports import first_port

PORT = first_port(4711, 2, 1)
ROLES = step(["n1", "n1", "n2"], "n[1-2]", "2,1", TFDISTKIT_PS="1")
TF_CONFIG = json.dumps({"cluster": {"worker": ["h1:1", "h2:1"]}, "task": {"type": "worker", "index": 1}})


def shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[list[str], str]:
    assert main(["env", *words]) == code
    out, err = capsys.readouterr()
    return out.splitlines(), err


def test_a_single_process(capsys: pytest.CaptureFixture[str]) -> None:
    rows, error = shown(capsys)
    assert rows[:5] == [
        "found, in order of priority:",
        "  tf_config   -",
        "  horovod     -",
        "  mpi         -",
        "  slurm       -",
    ]
    assert "cluster from  single process" in rows and "chief         yes" in rows
    assert error == ""


def test_a_task_of_a_step(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, ROLES[1])
    rows, error = shown(capsys)
    assert "  slurm       worker 0, world size 1" in rows and "    SLURM_STEP_NODELIST=n[1-2]" in rows
    assert rows[rows.index("cluster from  SLURM's variables"):] == [
        "cluster from  SLURM's variables",
        "task          worker 0",
        "rank          0",
        "world size    1",
        "local rank    0 of 1 on this host",
        "chief         no",
        "addresses",
        f"  chief 0     n1:{PORT}",
        f"  worker 0    n1:{PORT + 1}   this process",
        f"  ps 0        n2:{PORT}",
    ]  # fmt: skip
    assert error == ""


def test_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, ROLES[2])
    rows, _ = shown(capsys, "--json")
    told = json.loads("\n".join(rows))
    assert told["cluster"] == {
        "source": "SLURM's variables",
        "task": {"type": "ps", "index": 0},
        "rank": None,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "is_chief": False,
        "addresses": {"chief": [f"n1:{PORT}"], "worker": [f"n1:{PORT + 1}"], "ps": [f"n2:{PORT}"]},
    }
    assert [reader["name"] for reader in told["readers"]] == ["tf_config", "horovod", "mpi", "slurm"]
    assert [reader["cluster"] for reader in told["readers"]] == [None, None, None, told["cluster"]]
    assert told["readers"][3]["variables"]["SLURM_PROCID"] == "2"
    assert (told["error"], told["choice"], told["notes"]) == (None, None, {})


def test_a_server_has_no_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, ROLES[2])
    assert "rank          none, as a ps does not train" in shown(capsys)[0]


def test_a_conflict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, step(["n1", "n2"], "n[1-2]", "1(x2)")[0], {env.TF_CONFIG: TF_CONFIG})
    rows, error = shown(capsys, code=2)
    assert "  tf_config   rank 1 of 2" in rows and "  slurm       rank 0 of 2" in rows
    assert not any(row.startswith("rank ") for row in rows), "nothing was chosen"
    assert error.startswith("tfdistkit env: TF_CONFIG and SLURM's variables must describe the same job.")
    told = json.loads("\n".join(shown(capsys, "--json", code=2)[0]))
    assert told["cluster"] is None and "must describe the same job" in told["error"]


def test_the_selected_source_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, step(["n1", "n2"], "n[1-2]", "1(x2)")[0], {env.TF_CONFIG: TF_CONFIG, env.CLUSTER: "slurm"})
    rows, _ = shown(capsys)
    assert "  TFDISTKIT_CLUSTER=slurm: all other sources are ignored" in rows
    assert "cluster from  SLURM's variables" in rows and "rank          0" in rows


def test_an_error_of_one_reader(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, {env.TF_CONFIG: "{" + "x" * 1000})
    rows, error = shown(capsys, code=2)
    assert rows[1].startswith("  tf_config   invalid: TF_CONFIG must be JSON")
    assert rows[2] == "    TF_CONFIG={" + "x" * 99 + "..."
    assert "TF_CONFIG must be JSON" in error


def test_jobs_without_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("a 4 all.q@a UNDEFINED\nb 2 all.q@b UNDEFINED\n")
    put(monkeypatch, BATCH, {"PE_HOSTFILE": str(tmp_path / "hosts")})
    rows, _ = shown(capsys)
    assert "  SLURM job   4711, outside of its steps: a single process. Start several with `srun`." in rows
    assert "  SGE job     a:4, b:2: a single process. Start several with `tfdistkit run`." in rows
    assert "cluster from  single process" in rows
    put(monkeypatch, {"PE_HOSTFILE": str(tmp_path / "none")})
    assert any(row.startswith("  SGE job     invalid: `PE_HOSTFILE`") for row in shown(capsys)[0])


def test_ranks_without_addresses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"})
    rows, _ = shown(capsys)
    assert "  horovod     rank 1 of 2" in rows
    assert rows[-1] == "addresses     unknown: the strategy 'horovod' works, 'multiworker' does not"
    assert json.loads("\n".join(shown(capsys, "--json")[0]))["cluster"]["addresses"] is None


def test_many_addresses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    put(monkeypatch, step([f"n{i}" for i in range(100)], "n[0-99]", "1(x100)")[0])
    assert shown(capsys)[0][-1] == "  and 68 more: see --json"
    assert len(json.loads("\n".join(shown(capsys, "--json")[0]))["cluster"]["addresses"]["worker"]) == 100


def test_an_unknown_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        main(["env", "--jason"])
    assert leave.value.code == 2
    assert "See `tfdistkit env --help`." in capsys.readouterr().err


def test_as_a_command() -> None:
    """Exit code, both streams, and no TensorFlow, in a separate process."""
    code = "import sys, tfdistkit.cli.main as m; c = m.main(['env']); print(sorted({'tensorflow', 'keras', 'numpy'} & "
    code += "set(sys.modules))); sys.exit(c)"
    variables = env.child_env({**step(["n1", "n2"], "n[1-2]", "1(x2)")[0], env.TF_CONFIG: TF_CONFIG})
    result = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stdout.endswith("[]\n")
    assert "TFDISTKIT_CLUSTER=tf_config or TFDISTKIT_CLUSTER=slurm" in result.stderr
