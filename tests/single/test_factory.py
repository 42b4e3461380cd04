"""`tfdistkit.strategy`: names, aliases, options, devices. Each test in a fresh process: a strategy sets TF up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

DEADLINE_S = 120
# Distinct addresses of this machine without a listener.
TWO_WORKERS = '{"cluster": {"worker": ["127.0.0.1:9", "127.0.0.1:10"]}, "task": {"type": "worker", "index": 0}}'
EVALUATOR = json.dumps(
    {
        "cluster": {"chief": ["127.0.0.1:9"], "worker": ["127.0.0.1:10"], "ps": ["127.0.0.1:11"]},
        "task": {"type": "evaluator", "index": 0},
    }
)


def printed(code: str, **variables: str) -> str:
    """Runs code in a new process, where `error(call)` prints the exception of a call; returns the output."""
    prelude = """
    import tfdistkit
    def error(call):
        try:
            print("no error:", call())
        except Exception as error:
            print(f"{type(error).__name__}:", error)
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_names_and_aliases_make_strategies_of_tf_distribute() -> None:
    out = printed(
        f"""
        import tensorflow as tf
        for name in ("mirrored", "dp", "DP"):
            made = tfdistkit.strategy(name, devices=2)
            print(name, isinstance(made, tf.distribute.MirroredStrategy), made.num_replicas_in_sync)
        for name in ("central_storage", "central", "Central-Storage"):
            made = tfdistkit.strategy(name, devices=2)
            print(name, made.num_replicas_in_sync, made.extended.parameter_devices)
        for name in ("one_device", "off", "auto"):
            made = tfdistkit.strategy(name)
            print(name, isinstance(made, tf.distribute.OneDeviceStrategy), made.num_replicas_in_sync)
        for name in ("multiworker", "ddp", "multi_worker_mirrored", "multi-worker"):
            made = tfdistkit.strategy(name)
            print(name, isinstance(made, tf.distribute.MultiWorkerMirroredStrategy), made.num_replicas_in_sync)
        import os  # An evaluator beside workers and servers is a single process.
        os.environ["TF_CONFIG"] = {EVALUATOR!r}
        print("evaluator", isinstance(tfdistkit.strategy("auto"), tf.distribute.OneDeviceStrategy))
        """
    )
    assert out.split("\n")[:-1] == [
        "mirrored True 2", "dp True 2", "DP True 2",
        "central_storage 2 ('CPU:0',)", "central 2 ('CPU:0',)", "Central-Storage 2 ('CPU:0',)",
        "one_device True 1", "off True 1", "auto True 1",
        "multiworker True 1", "ddp True 1", "multi_worker_mirrored True 1", "multi-worker True 1",
        "evaluator True",
    ]  # fmt: skip


def test_unknown_names_and_options_name_the_nearest() -> None:
    out = printed(
        """
        error(lambda: tfdistkit.strategy("miror"))
        error(lambda: tfdistkit.strategy("mirrored", device=2))
        error(lambda: tfdistkit.strategy("multiworker", comunication="ring"))
        error(lambda: tfdistkit.strategy("multiworker", communication="rong"))
        error(lambda: tfdistkit.strategy("multiworker", communication="nccl"))
        error(lambda: tfdistkit.strategy("multiworker", timeout_s=0))
        error(lambda: tfdistkit.strategy("multiworker", fusion_bytes=0))
        error(lambda: tfdistkit.strategy(3))
        print(issubclass(tfdistkit.errors.OptionError, ValueError))
        """
    )
    lines = [line for line in out.splitlines() if line.startswith(("OptionError", "True", "no error"))]
    assert "Did you mean 'mirrored'?" in lines[0] and "name='miror'" in lines[0]
    assert "Did you mean 'devices'?" in lines[1]
    assert "Did you mean 'communication'?" in lines[2]
    assert "Did you mean 'ring'?" in lines[3]
    assert 'must be "auto", "shm", "hierarchical" or "ring"' in lines[4]
    assert "timeout_s=0" in lines[5]
    assert "fusion_bytes=0" in lines[6]
    assert "must be a string" in lines[7]
    assert lines[8] == "True"


def test_devices_by_name_and_by_number() -> None:
    out = printed(
        """
        error(lambda: tfdistkit.strategy("mirrored", devices=0))
        error(lambda: tfdistkit.strategy("mirrored", devices=True))
        error(lambda: tfdistkit.strategy("mirrored", devices=["CPU:0", "CPU:0"]))
        error(lambda: tfdistkit.strategy("mirrored", devices=["CPU:0", "GPU:0"]))
        error(lambda: tfdistkit.strategy("mirrored", devices=["nonsense"]))
        error(lambda: tfdistkit.strategy("mirrored", devices=2.5))
        error(lambda: tfdistkit.strategy("one_device", devices=2))
        error(lambda: tfdistkit.strategy("central_storage", parameter_device="GPU:7"))
        error(lambda: tfdistkit.strategy("central_storage", parameter_device=3))
        print(tfdistkit.strategy("one_device", devices="cpu:1").extended.worker_devices)
        print(tfdistkit.strategy("mirrored", devices=["cpu:0", "/device:CPU:1"]).num_replicas_in_sync)
        print(tfdistkit.strategy("central_storage", devices="CPU:1").extended.parameter_devices)
        stored = tfdistkit.strategy("central_storage", devices="CPU:1", parameter_device="cpu:0").extended
        print(stored.parameter_devices)
        """
    )
    lines = [line for line in out.splitlines() if not line.startswith(("For several", "names such"))]
    assert "`devices` must be an integer >= 1" in lines[0]
    assert "names of devices or a number" in lines[1]
    assert "must name each device once" in lines[2]
    assert "which has no GPU:0" in lines[3] and "CPU:0" in lines[3]
    assert "must hold device names only" in lines[4]
    assert "names of devices or a number" in lines[5]
    assert "must name one device" in lines[6]
    assert "`parameter_device` must name devices of this machine, which has no GPU:7" in lines[7]
    assert "`parameter_device` must be device names" in lines[8] and "parameter_device=3" in lines[8]
    assert "CPU:1" in lines[9]
    assert lines[10:] == ["2", "('CPU:1',)", "('CPU:0',)"]


def test_a_number_of_devices_without_gpus_warns_of_logical_cpus() -> None:
    out = printed(
        """
        import logging
        logging.basicConfig(level="WARNING", format="%(message)s", stream=__import__("sys").stdout)
        tfdistkit.strategy("mirrored", devices=3)
        """
    )
    assert "using 3 logical CPU devices" in out


@pytest.mark.parametrize("call", ['"mirrored", devices=2', '"multiworker"'])
def test_a_strategy_made_too_late_is_an_error_with_a_fix(call: str) -> None:
    out = printed(
        f"""
        import tensorflow as tf
        tf.constant(1) + 1
        error(lambda: tfdistkit.strategy({call}))
        """,
        TF_CONFIG=TWO_WORKERS if "multiworker" in call else "",
    )
    assert out.startswith("TooLateError: ")
    assert "Move the line `strategy = tfdistkit.strategy(...)` to the top of the script" in out


@pytest.mark.parametrize("name", ["mirrored", "one_device", "central_storage"])
def test_a_strategy_of_one_process_is_refused_in_a_job_of_several(name: str) -> None:
    out = printed(f'error(lambda: tfdistkit.strategy("{name}"))', TF_CONFIG=TWO_WORKERS)
    assert out.startswith("UnsupportedError: ")
    assert "worker 0 of 2 in TF_CONFIG" in out
    assert 'tfdistkit.strategy("multiworker")' in out


@pytest.mark.parametrize("role", ["chief", "worker", "ps"])
def test_a_strategy_without_servers_is_refused_in_a_cluster_with_servers(role: str) -> None:
    cluster = {"chief": ["127.0.0.1:9"], "worker": ["127.0.0.1:10"], "ps": ["127.0.0.1:11"]}
    out = printed(
        """
        import sys
        for name in ("multiworker", "mirrored", "one_device", "horovod"):
            error(lambda: tfdistkit.strategy(name))
        print("tensorflow" in sys.modules)
        """,
        TF_CONFIG=json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}}),
    )
    assert out.count("UnsupportedError: The strategy '") == 4
    assert out.count(f"Received: {role} 0 in TF_CONFIG with 1 chief, 1 worker, 1 ps. Expected: the strategy") == 4
    assert out.count('Use tfdistkit.strategy("parameter_server")') == 4 and out.endswith("\nFalse\n")


def test_a_wrong_tf_config_is_an_error_before_tensorflow_starts() -> None:
    out = printed('error(lambda: tfdistkit.strategy("auto"))', TF_CONFIG="{not json")
    assert out.startswith("ClusterConfigError: ")
    assert "JSON" in out


def test_registered_strategies_are_made_by_name() -> None:
    out = printed(
        """
        import tensorflow as tf
        def build(cluster, *, size=1):
            print("building", cluster.world_size, size)
            return tf.distribute.OneDeviceStrategy("CPU:0")
        assert tfdistkit.register_strategy("mine", build) == "mine"
        print(type(tfdistkit.strategy("mine", size=7)).__name__)
        error(lambda: tfdistkit.strategy("mine", sise=7))
        error(lambda: tfdistkit.register_strategy("mirrored", build))
        error(lambda: tfdistkit.register_strategy("other", 3))
        error(lambda: tfdistkit.register_strategy(5, build))
        tfdistkit.register_strategy("My-Own", build)
        print(type(tfdistkit.strategy("My-Own")).__name__)
        tfdistkit.register_strategy("nothing", lambda cluster: None)
        error(lambda: tfdistkit.strategy("nothing"))
        """
    )
    lines = out.splitlines()
    assert lines[:2] == ["building 1 7", "OneDeviceStrategy"]
    assert "Did you mean 'size'?" in lines[2]
    assert "must not be the name of a strategy of tfdistkit" in lines[3]
    assert "`build` must be callable" in lines[5]
    assert "`name` must be a string" in lines[6]
    assert lines[7:9] == ["building 1 1", "OneDeviceStrategy"]
    assert "must return a tf.distribute.Strategy. Received: a NoneType" in lines[9]


def test_an_installed_package_adds_a_strategy_by_an_entry_point(tmp_path) -> None:
    (tmp_path / "theirs.py").write_text(
        "import tensorflow as tf\ndef build(cluster):\n    return tf.distribute.OneDeviceStrategy('CPU:0')\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tfdistkit.strategies]\ntheirs = theirs:build\nbroken = nowhere:build\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    code = """
        error(lambda: tfdistkit.strategy("broken"))
        error(lambda: tfdistkit.strategy("their"))
        print(tfdistkit.strategy("theirs"))
    """
    broken, do, unknown, made = printed(code, PYTHONPATH=path).splitlines()[:4]
    assert broken.startswith("OptionError: The entry point 'broken' cannot be loaded: ModuleNotFoundError")
    assert do == "Fix or uninstall the package theirs (nowhere:build)."
    assert "Did you mean 'theirs'?" in unknown and "OneDeviceStrategy" in made


def test_another_keras_backend_is_an_error() -> None:
    out = printed(
        """
        import sys, types
        import keras
        keras.backend.backend = lambda: "jax"
        error(lambda: tfdistkit.strategy("mirrored"))
        """
    )
    assert out.startswith("OptionError: ")
    assert "KERAS_BACKEND=tensorflow" in out


def test_the_error_names_the_keras_backend_whose_package_is_missing(tmp_path: Path) -> None:
    # Simulates a machine without JAX.
    code = 'import sys; sys.modules["jax"] = None; error(lambda: tfdistkit.strategy("mirrored"))'
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    for variables, received in (
        ({"KERAS_BACKEND": "jax"}, "KERAS_BACKEND=jax"),
        ({"KERAS_HOME": str(tmp_path)}, "jax"),
    ):
        out = printed(code, **variables)
        assert out.startswith("OptionError: Keras must run on TensorFlow.") and received in out, out
        assert "KERAS_BACKEND=tensorflow" in out and "not installed" not in out


def test_auto_takes_the_options_of_every_strategy_it_may_choose() -> None:
    out = printed(
        """
        print(type(tfdistkit.strategy("auto", timeout_s=20, communication="ring", op="sum")).__name__)
        error(lambda: tfdistkit.strategy("auto", time_out=20))
        error(lambda: tfdistkit.strategy("auto", devices=["CPU:9"]))
        """
    ).splitlines()
    assert out[0] == "OneDeviceStrategy"
    assert "The strategy 'auto' has no option `time_out`. Did you mean 'timeout_s'?" in out[1]
    assert out[2].startswith("OptionError: ") and "devices" in out[2]


def test_a_missing_tensorflow_is_an_error_with_the_install_command() -> None:
    # Simulates a machine without TensorFlow: None in sys.modules makes the import fail.
    out = printed('import sys; sys.modules["tensorflow"] = None; error(lambda: tfdistkit.strategy("mirrored"))')
    assert out.startswith("MissingDependencyError: ")
    assert "Install it: pip install 'tensorflow-cpu>=2.18,<2.22' 'keras>=3.10,<3.16'" in out


def test_an_old_version_is_refused_and_a_new_one_warned_of() -> None:
    out = printed(
        """
        import sys, warnings
        import keras, tensorflow
        for module, version in ((tensorflow, "2.17.1"), (tensorflow, "2.17.0-rc1"), (keras, "3.9.2")):
            real, module.__version__ = module.__version__, version
            error(lambda: tfdistkit.strategy("one_device"))
            module.__version__ = real
        print("loaded:", "tfdistkit.strategies.one_device" in sys.modules)
        for module, version in ((tensorflow, "2.22.0.dev20260101"), (keras, "3.16.0")):
            real, module.__version__ = module.__version__, version
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                print(type(tfdistkit.strategy("one_device")).__name__)
            for one in caught:
                if "newer than any" in str(one.message):
                    print("WARNING", one.filename, one.message)
            module.__version__ = real
        """
    )
    before, after = out.split("loaded: False\n")
    old = before.split("MissingDependencyError: ")[1:]
    install = "'keras>=3.10,<3.16'"
    assert old[0].startswith("This TensorFlow is too old. Received: TensorFlow 2.17.1. Expected: TensorFlow 2.18 to")
    assert f"Install another: pip install 'tensorflow-cpu>=2.18,<2.22' {install}" in old[1] and "2.17.0-rc1" in old[1]
    assert old[2].startswith("This Keras is too old. Received: Keras 3.9.2. Expected: Keras 3.10 to 3.15")
    assert f"Install another: pip install {install}" in old[2]
    new = [line for line in after.splitlines() if line.startswith("WARNING")]
    assert after.count("OneDeviceStrategy") == 2 and len(new) == 2
    for line, version in zip(new, ("TensorFlow 2.22.0.dev20260101", "Keras 3.16.0"), strict=True):
        assert line.startswith("WARNING <string> ") and f"Received: {version}." in line


def test_a_worker_takes_the_gpu_of_its_local_rank() -> None:
    # A fake, because this machine has no GPUs. It records the calls of TensorFlow's public functions.
    out = printed(
        """
        import tensorflow as tf
        from tfdistkit.cluster.spec import ClusterSpec
        from tfdistkit.strategies.devices import take_gpu_of_local_rank
        gpus = ["gpu 0", "gpu 1"]
        tf.config.list_physical_devices = lambda kind=None: gpus
        tf.config.set_visible_devices = lambda devices, kind: print("visible:", devices, kind)
        take_gpu_of_local_rank(ClusterSpec(local_rank=1, local_world_size=2))
        take_gpu_of_local_rank(ClusterSpec(local_rank=0, local_world_size=1))
        error(lambda: take_gpu_of_local_rank(ClusterSpec(local_rank=2, local_world_size=3)))
        gpus.pop()
        take_gpu_of_local_rank(ClusterSpec(local_rank=1, local_world_size=2))
        """,
        CUDA_VISIBLE_DEVICES="5",
    )
    assert out.splitlines()[0] == "visible: gpu 1 GPU"
    assert "UnsupportedError: This host has fewer GPUs than workers." in out
    assert out.count("visible:") == 1
