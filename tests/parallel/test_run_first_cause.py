"""The report names the first cause of a failure, not its consequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_process import run_job, write_script

# Without TensorFlow: an exception of the type that TensorFlow raises when a peer is gone.
PEER_IS_GONE = """
import sys, types
module = sys.modules["tensorflow.python.framework.errors_impl"] = types.ModuleType("errors_impl")
exec("class OpError(Exception): pass", {"__name__": "tensorflow.python.framework.errors_impl"}, vars(module))
"""


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_a_rank_that_exits_early_is_named(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import sys
        import keras, numpy as np
        import tfdistkit

        with tfdistkit.strategy("multiworker", timeout_s=60).scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")


        class Leave(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if batch == 5 and tfdistkit.rank() == 1:
                    sys.exit(0)


        model.fit(np.ones((640, 4)), np.ones((640, 1)), batch_size=32, verbose=0, callbacks=[Leave()])
        """,
    )
    with_tensorflow = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = run_job("-np", "2", "--log-dir", "logs", script, cwd=tmp_path, **with_tensorflow)
    assert ended.code == 1
    reported = ended.stderr.partition("the first failure was\n")[2]
    assert reported.startswith("rank 1 ended with exit code 0 after 6 steps, while rank 0 was at step 7: its data was")
    # The user's frames, and not the forty of the libraries, which the crash record has.
    assert "model.fit(np.ones((640, 4))" in reported and "frames of tensorflow, tfdistkit; --full-traceback" in reported
    assert "autograph" not in ended.stderr
    record = json.loads((tmp_path / "logs/rank.0/error.json").read_text())
    assert "autograph" in record["full_traceback"] and record["steps"] == 7


def test_a_connection_error_of_the_script_is_a_cause(tmp_path: Path) -> None:
    """It reads like TensorFlow's error about a lost peer, and is raised later."""
    script = write_script(
        tmp_path,
        PEER_IS_GONE
        + """
import os, pathlib, socket, time
if os.environ["TFDISTKIT_RANK"] == "1":
    while not pathlib.Path("gone").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    socket.create_connection(("127.0.0.1", 1))
pathlib.Path("gone").touch()
raise module.OpError("Collective ops is aborted by: Socket closed")
""",
    )
    ended = run_job("-np", "2", script, cwd=tmp_path)
    reported = ended.stderr.partition("the first failure was\n")[2]
    assert reported.startswith("rank 1 raised ConnectionRefusedError")
    assert "rank 0 raised OpError too" in reported


def test_a_failure_of_all_ranks_is_reported_once(tmp_path: Path) -> None:
    text = "import atexit, time; atexit.register(time.sleep, 2); raise ValueError('units ' + 'must be positive')"
    script = write_script(tmp_path, text)
    ended = run_job("-np", "3", script, cwd=tmp_path)
    reported = ended.stderr.partition("the first failure was\n")[2]
    assert reported.count("units must be positive") == 1
    assert "raised ValueError with the same message." in reported


def test_the_full_traceback(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "keras"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def fit(f):\n    return _inner(f)\ndef _inner(f):\n    return f()\n")
    script = write_script(
        tmp_path,
        """
        import sys; sys.path.insert(0, "site-packages")
        import keras
        def step():
            raise ValueError("of the user")
        keras.fit(step)
        """,
    )
    shown = run_job("-np", "2", script, cwd=tmp_path).stderr
    assert "... 2 frames of keras; --full-traceback shows them" in shown and "_inner" not in shown
    assert "keras.fit(step)" in shown and 'raise ValueError("of the user")' in shown
    shown = run_job("-np", "2", "--full-traceback", script, cwd=tmp_path).stderr
    assert "frames of" not in shown and "return _inner(f)" in shown


WHO = """
import json, os
from tfdistkit.cluster.detection import detect_cluster
cluster = detect_cluster()
print(json.dumps([cluster.rank, cluster.world_size]), flush=True)
"""

SHELLS = {
    "single": {"TFDISTKIT_CLUSTER": "single"},
    "a step of SLURM": {
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2"},
        **{"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"},
        **{"SLURM_STEP_NUM_TASKS": "4"},
    },
    "mpirun": {
        **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
        **{"OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    },
    "horovodrun": {
        **{"HOROVOD_RANK": "1", "HOROVOD_SIZE": "3", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "3"},
        **{"HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1"},
    },
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("backend", ["local", "horovod"])
def test_variables_of_other_jobs_do_not_reach_the_workers(tmp_path: Path, shell: str, backend: str) -> None:
    """As in a sweep: `srun -n4 tfdistkit run -np 2 train.py`."""
    script = write_script(tmp_path, WHO)
    ended = run_job("-np", "2", "--backend", backend, script, cwd=tmp_path, **SHELLS[shell])
    assert ended.code == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[0] [0, 2]", "[1] [1, 2]"]


@pytest.mark.parametrize("words", [["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--num-proc", "2"], ["-n", "2"]])
def test_flags_of_horovodrun_and_torchrun(tmp_path: Path, words: list[str]) -> None:
    script = write_script(tmp_path, WHO)
    assert run_job(*words, script, cwd=tmp_path).stdout.count(", 2]") == 2
