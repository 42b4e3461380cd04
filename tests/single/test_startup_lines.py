"""TensorFlow's start-up lines are hidden by exact form; similar lines are shown."""

from __future__ import annotations

import pytest

from tfdistkit.report.startup_lines import StartupLines, are_wanted

HEADER = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
NEW = b"I0000 00:00:1795392860.823883    6299 "
OLD = b"2025-01-31 12:00:00.123456: "
REBUILD = b"in other operations, rebuild TensorFlow with the appropriate compiler flags."
FACTORY = b"factory: Attempting to register factory for plugin"

STARTUP = [
    HEADER,
    NEW + b"cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available CPU instructions in "
    b"performance-critical operations.",
    b"To enable the following instructions: AVX2 AVX512F FMA, " + REBUILD,
    OLD + b"I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may see slightly different "
    b"numerical results due to floating-point round-off errors.",
    OLD + b"I external/local_xla/xla/tsl/cuda/cudart_stub.cc:32] Could not find cuda drivers on your machine, GPU will "
    b"not be used.",
    OLD + b"E external/local_xla/xla/stream_executor/cuda/cuda_fft.cc:477] Unable to register cuFFT " + FACTORY
    + b" cuFFT when one has already been registered",
    b"E0000 00:00:1729866532.719841    2417 cuda_dnn.cc:8310] Unable to register cuDNN " + FACTORY
    + b" cuDNN when one has already been registered",
    b"W0000 00:00:1742557456.512130    1211 computation_placer.cc:177] computation placer already registered. Please "
    b"check linkage and avoid linking the same target more than once.",
    OLD + b"W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT",
    OLD + b"E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed call to cuInit: INTERNAL: CUDA "
    b"error: Failed call to cuInit: UNKNOWN ERROR (303)",
    b"E0000 00:00:1729866532.752234    2417 cuda_platform.cc:51] failed call to cuInit: INTERNAL: CUDA error: Failed "
    b"call to cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected",
    OLD + b"I external/local_xla/xla/stream_executor/cuda/cuda_executor.cc:901] successful NUMA node read from SysFS "
    b"had negative value (-1), but there must be at least one NUMA node, so returning NUMA node zero.",
    OLD + b"I tensorflow/core/common_runtime/gpu/gpu_device.cc:1886] Created device /job:localhost/replica:0/task:0/"
    b"device:GPU:0 with 14785 MB memory:  -> device: 0, name: Tesla V100-SXM2-16GB",
    NEW + b"grpc_server_lib.cc:467] Started server with target: grpc://127.0.0.1:20114",
    NEW + b"coordination_service.cc:221] Initializing CoordinationService",
    NEW + b"coordination_service.cc:505] Example stragglers:",
    b"/job:worker/replica:0/task:1",
    NEW + b"coordination_service_agent.cc:245] Coordination agent has successfully connected.",
]  # fmt: skip

OPTIONS = (
    NEW
    + b"""eager_service_impl.cc:355] SessionOptions: goo.gle/debugproto
device_count {
  key: "CPU"
  value: 1
}
gpu_options {
  experimental {
  }
}
allow_soft_placement: true
experimental {
  collective_group_leader: "/job:ps/replica:0/task:0"
}

"""
)

SHOWN = [
    b"",
    b"loss: 0.5",
    b"cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available CPU instructions",
    b"see: " + HEADER,
    HEADER + b" (or so they say)",
    b"  " + STARTUP[1],
    # Lines of the user's own, by absl.logging and by Python's logging.
    b"I1123 00:12:23.123456 140479154906944 train.py:12] Started server with target: grpc://me",
    OLD + b"I started",
    # Continuation lines without the line before.
    b"/job:worker/replica:0/task:1",
    b"device_count {",
    # Other severities or texts: they report an error.
    STARTUP[1].replace(b"I0000", b"E0000"),
    NEW + b"coordination_service.cc:1472] Barrier(WaitForAllTasks::1::0) has passed with status: CANCELLED",
    b"E0000 00:00:1795392860.823883    6299 coordination_service_agent.cc:330] Polled an error from coordination "
    b"service (this can be an error from this or another task).",
    OLD + b"E external/local_xla/xla/stream_executor/cuda/cuda_driver.cc:152] failed call to cuInit: "
    b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: system has unsupported display driver / cuda driver combination",
    OLD + b"W tensorflow/core/common_runtime/gpu/gpu_device.cc:2344] Cannot dlopen some GPU libraries.",
    OLD + b"F tensorflow/core/platform/cpu_feature_guard.cc:45] The TensorFlow library was compiled to use AVX512F "
    b"instructions, but these aren't available on your machine.",
    b"W0000 00:00:1795392861.1 9866 preemption_notifier.cc:90] SIGTERM caught at 2026-11-23T00:18:21",
    b"x" * 100_000,
]


@pytest.mark.parametrize("labels", [False, True])
def test_startup_lines_are_hidden(labels: bool) -> None:
    lines = StartupLines(labels)
    for line in [*STARTUP, *OPTIONS.split(b"\n")]:
        assert lines.hides(b"12: " + line if labels else line) or not line, line


@pytest.mark.parametrize("line", SHOWN)
def test_all_else_is_shown(line: bytes) -> None:
    assert not StartupLines().hides(line)


def test_lines_after_a_startup_line_are_shown() -> None:
    lines = StartupLines()
    assert lines.hides(NEW + b"coordination_service.cc:505] Example stragglers:")
    assert not lines.hides(b"my own line")
    assert not lines.hides(b"/job:worker/replica:0/task:1")
    told = [b"loss: 0.5", b"value: 1", b"Traceback (most recent call last):", b'  File "x.py", line 1, in <module>']
    for line in told:
        for begun in OPTIONS.split(b"\n")[:3]:
            lines.hides(begun)
        assert not lines.hides(line), line


def test_labels_keep_tasks_apart() -> None:
    lines = StartupLines(has_labels=True)
    assert lines.hides(b"0: " + OPTIONS.split(b"\n")[0])
    assert not lines.hides(b"1: device_count {")
    assert lines.hides(b"0: device_count {")


@pytest.mark.parametrize("size", [1, 7, 64, 100_000])
def test_bytes_that_pass_stay_as_they_are(size: int) -> None:
    shown = b"begin\n1/2\r\b\b2/2\n\xff\xfe\nI am here\n2025-02-30 is no day\nend: WARNING: All log"
    data = b"\n".join([shown, *STARTUP, OPTIONS + shown, HEADER, b"last"])
    lines = StartupLines()
    passed = b"".join(lines.pass_on(data[begin : begin + size]) for begin in range(0, len(data), size))
    assert passed + lines.let_go() == b"\n".join([shown, shown, b"last"])


def test_a_line_without_a_newline_is_shown_soon() -> None:
    lines = StartupLines()
    assert lines.pass_on(b"Go on? ") == b"Go on? "
    assert lines.pass_on(b"\nI0000 or not? ") == b"\n"
    assert lines.let_go() == b"I0000 or not? "
    assert lines.pass_on(HEADER + b"\n") == HEADER + b"\n", "it goes on with a line that was shown in part"
    assert lines.pass_on(HEADER + b"\n") == b""


def test_tensorflows_variables_show_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_CPP_MAX_VLOG_LEVEL", "TF_CPP_VMODULE"):
        monkeypatch.delenv(name, raising=False)
    assert not are_wanted({}) and not are_wanted({"TF_CPP_MIN_LOG_LEVEL": "1"})
    assert are_wanted({"TF_CPP_MIN_LOG_LEVEL": "0"}) and are_wanted({"TF_CPP_VMODULE": "grpc_server_lib=2"})
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    assert are_wanted({}) and not are_wanted({"TF_CPP_MIN_LOG_LEVEL": "2"})
