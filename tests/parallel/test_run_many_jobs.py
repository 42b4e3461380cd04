"""Many jobs that start on one machine at the same time: each rank gets its own port and its peers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

from job_process import DEADLINE_S, wait_until, write_script

from tfdistkit.launcher.local.watchdog import marked_processes

JOBS, RANKS = 10, 4

# In a network namespace with 100 ports to choose from, where it can be had: a chance to choose the same is taken there.
STARTS = f"""
    import json, pathlib, subprocess, sys
    from tfdistkit.errors import UnsupportedError
    from tfdistkit.launcher.local.isolation import isolate
    try:
        isolate()
        pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("10100 65535")
    except (OSError, UnsupportedError) as error:
        print("all ports of this machine:", error, file=sys.stderr)
    words = [sys.executable, "-m", "tfdistkit", "run", "-q", "--timeout", "40", "-np", "{RANKS}", "serve.py"]
    pipe = {{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}}
    jobs = [subprocess.Popen([*words, str(number)], **pipe) for number in range({JOBS})]
    print(json.dumps([[*job.communicate(), job.returncode] for job in jobs]))
"""

# Each rank keeps its port until all ranks of all jobs have theirs; then rank 0 is asked which job it is of.
SERVES = f"""
    import json, os, pathlib, socket, sys, time
    config, job = json.loads(os.environ["TF_CONFIG"]), sys.argv[1]
    addresses = [address.split(":") for address in config["cluster"]["worker"]]
    rank = config["task"]["index"]
    listener = socket.create_server(("127.0.0.1", int(addresses[rank][1])))
    pathlib.Path(f"up.{{job}}.{{rank}}").touch()
    while len(list(pathlib.Path().glob("up.*"))) < {JOBS * RANKS}:
        time.sleep(0.05)
    if rank == 0:
        for _ in addresses[1:]:
            listener.accept()[0].sendall(job.encode())
        print("served", flush=True)
    else:
        with socket.create_connection((addresses[0][0], int(addresses[0][1]))) as peer:
            assert peer.recv(10).decode() == job
"""


def test_jobs_that_start_together_all_succeed(tmp_path: Path) -> None:
    write_script(tmp_path, SERVES, "serve.py")
    mark = f"TEST_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    ended = subprocess.run(
        [sys.executable, write_script(tmp_path, STARTS)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), name: value},
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert json.loads(ended.stdout) == [["[0] served\n", "", 0]] * JOBS, ended.stderr
    wait_until(lambda: marked_processes(mark) == [], "the end of all processes")
