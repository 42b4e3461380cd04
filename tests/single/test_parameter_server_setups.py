"""Bad set-ups of `parameter_server`, most of which TensorFlow waits in without end: each is a clear error at once."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from patience import longer

from tfdistkit.cluster import free_ports

pytestmark = pytest.mark.tensorflow

SOON_S = 10.0
TIMEOUT_S = 2.0
DEADLINE_S = 200.0

# One process tries them one after the other.
TRY = """
import json, os, sys, time
import tensorflow
import tfdistkit
for name, (config, options) in json.loads(sys.argv[1]).items():
    os.environ.pop("TF_CONFIG", None)
    if config is not None:
        os.environ["TF_CONFIG"] = config
    if name == "TensorFlow was used before":
        tensorflow.zeros([])
    start = time.monotonic()
    try:
        tfdistkit.strategy("parameter_server", **options)
        found = ["nothing", ""]
    except BaseException as error:
        found = [type(error).__name__, str(error)]
    print(json.dumps([name, *found, time.monotonic() - start]), flush=True)
"""

PORTS = free_ports(6)
CLUSTER = {
    "chief": [f"127.0.0.1:{PORTS[0]}"],
    "worker": [f"127.0.0.1:{PORTS[1]}", f"127.0.0.1:{PORTS[2]}"],
    "ps": [f"127.0.0.1:{PORTS[3]}"],
}
CHIEF = {"type": "chief", "index": 0}


def config(task: dict[str, Any] | None = CHIEF, **changes: Any) -> str:
    """TF_CONFIG of a task, in the cluster with changes; None takes a role out."""
    cluster = {role: addresses for role, addresses in {**CLUSTER, **changes}.items() if addresses is not None}
    return json.dumps({"cluster": cluster, **({} if task is None else {"task": task})})


# TF_CONFIG, options, and the error with what it says.
CASES: dict[str, tuple[str | None, dict[str, Any], str, list[str]]] = {
    "no cluster": (None, {}, "ClusterConfigError", ["needs a chief, workers and parameter servers", "--ps 1"]),
    "no servers": (config(ps=None), {}, "ClusterConfigError", ["missing: ps"]),
    "no worker": (config(worker=None), {}, "ClusterConfigError", ["must have a worker"]),
    "no chief": (config({"type": "worker", "index": 0}, chief=None), {}, "ClusterConfigError", ["must have a chief"]),
    "no task": (config(None), {}, "ClusterConfigError", ["must have a `task`"]),
    "no index": (config({"type": "ps"}), {}, "ClusterConfigError", ["must have an `index`"]),
    "an unknown role": (
        config({"type": "trainer", "index": 0}),
        {},
        "ClusterConfigError",
        ["A role in `task` in TF_CONFIG must be known"],
    ),
    "an index out of range": (
        config({"type": "worker", "index": 5}),
        {},
        "ClusterConfigError",
        ["must be the index of a worker"],
    ),
    "a second chief": (config({"type": "chief", "index": 1}), {}, "ClusterConfigError", ["chief"]),
    "no JSON": ("{'cluster': }", {}, "ClusterConfigError", ["TF_CONFIG must be JSON"]),
    "a list": ("[]", {}, "ClusterConfigError", ["must be a JSON object"]),
    "one address twice": (config(ps=CLUSTER["chief"]), {}, "ClusterConfigError", ["The addresses of", "must differ"]),
    "no port": (config(ps=["127.0.0.1"]), {}, "ClusterConfigError", ["`cluster.ps[0]`"]),
    "an address elsewhere": (
        config(chief=["192.0.2.1:2222"]),
        {},
        "ClusterConfigError",
        ["not on this machine", "192.0.2.1:2222"],
    ),
    "an evaluator": (
        config({"type": "evaluator", "index": 0}, evaluator=["127.0.0.1:9"]),
        {},
        "UnsupportedError",
        ["An evaluator takes no part in training", "'chief', 'worker' or 'ps'"],
    ),
    "synchronous": (config(), {"synchronous": True}, "OptionError", ['tfdistkit.strategy("multiworker")']),
    "a partitioner": (
        config(),
        {"variable_partitioner": "by size"},
        "UnsupportedError",
        ["tfdistkit.layers.ShardedEmbedding"],
    ),
    "no steps in flight": (config(), {"max_inflight_per_worker": 0}, "OptionError", ["an integer >= 1"]),
    "half a step": (config(), {"max_inflight_per_worker": 1.5}, "OptionError", ["an integer >= 1"]),
    "a timeout of 0": (config(), {"timeout_s": 0}, "OptionError", ["`timeout_s` must be a positive number of seconds"]),
    "a timeout that is a string": (
        config(),
        {"heartbeat_timeout_s": "20"},
        "OptionError",
        ["`heartbeat_timeout_s` must be a positive number of seconds"],
    ),
    "an unknown option": (config(), {"heartbeat_s": 3}, "OptionError", ["heartbeat_s", "heartbeat_timeout_s"]),
    # The listener of the fixture has this port, and never answers.
    "the chief's port is taken": (
        config(chief=[f"127.0.0.1:{PORTS[4]}"]),
        {},
        "ClusterConfigError",
        [f"Port {PORTS[4]} of this task is taken"],
    ),
    "a worker's port is taken": (
        config({"type": "worker", "index": 0}, worker=[f"127.0.0.1:{PORTS[4]}"]),
        {},
        "ClusterConfigError",
        [f"Port {PORTS[4]} of this task is taken"],
    ),
    "a server's port is taken": (
        config({"type": "ps", "index": 0}, ps=[f"127.0.0.1:{PORTS[4]}"]),
        {},
        "ClusterConfigError",
        [f"Port {PORTS[4]} of this task is taken"],
    ),
    "no task is reachable": (
        config(),
        {"timeout_s": TIMEOUT_S},
        "RendezvousError",
        [
            "Not all tasks were reachable within 2 seconds",
            f"worker 1 at 127.0.0.1:{PORTS[2]}: nothing listens there",
            f"ps 0 at 127.0.0.1:{PORTS[3]}",
        ],
    ),
    "one is stopped": (
        config(ps=[f"127.0.0.1:{PORTS[4]}"]),
        {"timeout_s": TIMEOUT_S},
        "RendezvousError",
        [f"ps 0 at 127.0.0.1:{PORTS[4]}: accepts connections but does not answer"],
    ),
    "a host without a name": (
        config(ps=["no-such-host.invalid:2222"]),
        {"timeout_s": TIMEOUT_S},
        "RendezvousError",
        ["ps 0 at no-such-host.invalid:2222"],
    ),
    "the coordinator never comes": (
        config({"type": "worker", "index": 0}),
        {"timeout_s": TIMEOUT_S},
        "RendezvousError",
        ["The coordinator was not reachable within 2 seconds", f"the chief at 127.0.0.1:{PORTS[0]}", "worker 0 waited"],
    ),
    # The last: it starts TensorFlow.
    "TensorFlow was used before": (
        config(),
        {},
        "TooLateError",
        ["must be made before the first TensorFlow operation"],
    ),
}


@pytest.fixture(scope="module")
def tried() -> Iterator[dict[str, tuple[str, str, float]]]:
    """What each came to: the error, its message, and the seconds until then."""
    with socket.create_server(("127.0.0.1", PORTS[4])):
        cases = json.dumps({name: [text, options] for name, (text, options, *_) in CASES.items()})
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        ended = subprocess.run(
            [sys.executable, "-c", TRY, cases],
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            cwd=Path(__file__).parents[2],
        )
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    yield {name: (kind, message, seconds) for name, kind, message, seconds in lines}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_set_up_is_a_clear_error(tried: dict[str, tuple[str, str, float]], name: str) -> None:
    kind, message, seconds = tried[name]
    _, _, expected, words = CASES[name]
    assert kind == expected, message
    for word in words:
        assert word in message
    assert "Received:" in message
    assert seconds < longer(SOON_S)
