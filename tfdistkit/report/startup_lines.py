"""Filters the lines that TensorFlow's C++ code logs at each start, and that carry no information.

They fill two screens for each process. The launcher hides them in the terminal and keeps them in the logs. A line is
hidden only if its form, severity, source file and text are all known here, so the user's own lines and errors of
TensorFlow are always shown.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

from tfdistkit import env

# `2025-01-31 12:00:00.123456: I tensorflow/core/util/port.cc:153] text`, and the form of Abseil's logging:
# `I0000 00:00:1738324800.123456    5476 port.cc:153] text`, with the date once it is initialised.
_LOGGED = re.compile(
    rb"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<old>[IWE]) +(?:\d+ +)?"
    rb"|(?P<new>[IWE])\d{4} \d\d:\d\d:[\d.]+ +(?:\d+ +)?)"
    rb"(?:[\w./-]*/)?(?P<file>[\w-]+\.(?:cc|h)):\d+\] ?(?P<text>.*)",
    re.DOTALL,
)

# Severity, source file, start of the text.
_KNOWN = (
    (b"I", b"cpu_feature_guard.cc", rb"This TensorFlow binary is optimized "),
    (b"I", b"port.cc", rb"oneDNN custom operations are on\."),
    (b"I", b"grpc_server_lib.cc", rb"Started server with target: "),
    (b"I", b"grpc_channel.cc", rb"Initialize GrpcChannelCache for job "),
    (b"I", b"coordination_service.cc", rb"Initializing CoordinationService$"),
    (b"I", b"coordination_service.cc", rb"Waiting for \d+/\d+ tasks to connect\.$"),
    (b"I", b"coordination_service.cc", rb"Example stragglers:"),
    (b"I", b"coordination_service.cc", rb"Barrier\(WaitForAllTasks::.* has passed with status: OK$"),
    (b"I", b"coordination_service.(?:cc|h)", rb"/job:\S+ has connected to coordination service\. Incarnation: "),
    (b"I", b"coordination_service_agent.cc", rb"Coordination agent has successfully connected\."),
    (b"I", b"eager_service_impl.cc", rb"Creating (?:a?sync )?eager service context with rendezvous_id on host "),
    (b"I", b"eager_service_impl.cc", rb"SessionOptions: "),
    (b"I", b"generator_dataset_op.cc", rb"Memory patch applied: "),
    (b"W", b"dataset.cc", rb"Input of GeneratorDatasetOp::Dataset will not be optimized because "),
    (b"I", b"mlir_graph_optimization_pass.cc", rb"MLIR V1 optimization pass is not enabled$"),
    (b"I", b"mlir_graph_optimization_pass.cc", rb"None of the MLIR Optimization Passes are enabled "),
    # XLA, and existing GPUs.
    (b"I", b"service.cc", rb"XLA service 0x[0-9a-f]+ initialized for platform "),
    (b"I", b"service.cc", rb"  StreamExecutor device \(\d+\): "),
    (b"I", b"device_compiler.h", rb"Compiled cluster using XLA!"),
    (b"I", b"dump_mlir_util.cc", rb"disabling MLIR crash reproducer"),
    (b"I", b"cuda_(?:gpu_)?executor.cc", rb"successful NUMA node read from SysFS had negative value \(-1\)"),
    (b"I", b"pluggable_device_factory.cc", rb"Could not identify NUMA node of platform "),
    (b"I", b"gpu_device.cc", rb"Created (?:TensorFlow )?device "),
    (b"I", b"cuda_dnn.cc", rb"Loaded cuDNN version \d+$"),
    # Plugins that TensorFlow registers twice at each start.
    (b"EW", b"cuda_(?:dnn|fft|blas).cc", rb"Unable to register cu\w+ factory: Attempting to register factory for "
     rb"plugin cu\w+ when one has already been registered$"),
    (b"W", b"computation_placer.cc", rb"computation placer already registered\."),
    (b"W", b"py_utils.cc", rb"TF-TRT Warning: Could not find TensorRT$"),
    # No GPU; a wrong driver has another text or severity, and is shown.
    (b"I", b"cuda_diagnostics.cc", rb""),
    (b"IW", b"cudart_stub.cc", rb"Could not find cuda drivers on your machine, GPU will not be used\.$"),
    (b"E", b"cuda_(?:driver|platform).cc", rb"failed call to cuInit: .*(?:CUDA_ERROR_NO_DEVICE|UNKNOWN ERROR \(303\))"),
)  # fmt: skip
_TABLE = tuple((severity, re.compile(file), re.compile(text)) for severity, file, text in _KNOWN)

# Continuation lines without that form.
_PLAIN = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR$"
    rb"|To enable the following instructions: [\w. ]+(?:, in other operations)?, "
    rb"rebuild TensorFlow with the appropriate compiler flags\.$"
)
_STRAGGLER = re.compile(rb"/job:\w+/replica:\d+/task:\d+$")
# The options of a session, as protobuf prints them: its own fields outermost, anything inside.
_OPTION = re.compile(
    rb"(?:device_count|gpu_options|pluggable_device_options|graph_options|rpc_options|cluster_def|experimental) \{$"
    rb"|(?:\w+_parallelism_threads|use_per_session_threads|placement_period|device_filters|allow_soft_placement"
    rb"|log_device_placement|operation_timeout_in_ms|isolate_session_state|share_cluster_devices_in_session): \S+$"
)
_INNER = re.compile(rb" +(?:[\w.\[\]/]+ \{|\}|[\w.\[\]/]+: .*)$|\}$")
_MOST_LINES = 200

# Starts of lines that may turn out to be hidden ones.
_BEGINS = re.compile(rb"\d{1,4}$|\d{4}-|[IWE]\d{0,4}$|[IWE]\d{4} ")
_PLAIN_BEGINS = (b"WARNING: All log messages", b"To enable the following instructions")
_LABEL = re.compile(rb"\d+: ")
# The longest known line has about 300 bytes.
_LONGEST_BYTES = 4096


class StartupLines:
    """Finds the start-up lines of one stream, with their continuation lines.

    Args:
        has_labels: Whether lines begin with the number of a task, as `srun --label` writes them (`3: text`).
    """

    def __init__(self, has_labels: bool = False) -> None:
        self._has_labels = has_labels
        # Label of a line -> the expected continuation.
        self._next: dict[bytes, tuple[str, int]] = {}
        self._held, self._held_at = b"", 0.0
        # Whether the start of the current line is shown already.
        self._is_inside = False

    def hides(self, line: bytes) -> bool:
        """Returns whether a line is a start-up line.

        Args:
            line: The line, without its newline.
        """
        found = _LABEL.match(line) if self._has_labels else None
        label = found[0] if found else b""
        text = line[len(label) :].rstrip(b"\r")
        follows, count = self._next.pop(label, ("", 0))
        if follows == "straggler" and _STRAGGLER.match(text):
            self._next[label] = (follows, count)
            return True
        if follows == "options" and count < _MOST_LINES and (_OPTION.match(text) or _INNER.match(text) or not text):
            if text:  # an empty line is the last
                self._next[label] = (follows, count + 1)
            return True
        if len(text) > _LONGEST_BYTES:
            return False
        return bool(_PLAIN.match(text)) or self._is_known(label, text)

    def pass_on(self, data: bytes) -> bytes:
        """Takes the next bytes of the stream, and returns the bytes to show.

        Args:
            data: The bytes. The start of a line that may be hidden is held back until more bytes arrive.
        """
        *lines, rest = (self._held + data).split(b"\n")
        self._held = b""
        shown = []
        for line in lines:
            if self._is_inside or not self.hides(line):
                shown.append(line + b"\n")
            self._is_inside = False
        if rest and not self._is_inside and len(rest) <= _LONGEST_BYTES and self.may_hide(rest):
            self._held, self._held_at = rest, time.monotonic()
        elif rest:
            shown.append(rest)
            self._is_inside = True
        return b"".join(shown)

    def let_go(self, after_s: float = 0.0) -> bytes:
        """Returns the bytes that `pass_on` holds back, once more bytes are not expected.

        Args:
            after_s: Returns them only if they are held for at least this many seconds.
        """
        if time.monotonic() - self._held_at < after_s:
            return b""
        held, self._held = self._held, b""
        self._is_inside = self._is_inside or bool(held)
        return held

    def may_hide(self, rest: bytes) -> bool:
        """Returns whether an unfinished line may be a start-up line.

        Args:
            rest: The start of the line.
        """
        found = _LABEL.match(rest) if self._has_labels else None
        label = found[0] if found else b""
        text = rest[len(label) :]
        if not text or label in self._next or _BEGINS.match(text):
            return bool(rest)
        return any(begin.startswith(text) or text.startswith(begin) for begin in _PLAIN_BEGINS)

    def _is_known(self, label: bytes, line: bytes) -> bool:
        logged = _LOGGED.fullmatch(line)
        if logged is None:
            return False
        severity, text = logged["old"] or logged["new"], logged["text"]
        for severities, file, begin in _TABLE:
            if severity in severities and file.fullmatch(logged["file"]) and begin.match(text):
                if text.startswith(b"Example stragglers:"):
                    self._next[label] = ("straggler", 0)
                elif text.startswith(b"SessionOptions:"):
                    self._next[label] = ("options", 0)
                return True
        return False


def are_wanted(variables: Mapping[str, str]) -> bool:
    """Returns whether TensorFlow's own variables request the log of its C++ code.

    Args:
        variables: The variables of a process besides those of this one.
    """
    values = [variables.get(name, env.text(name)) for name in (env.TF_LOG_LEVEL, env.TF_VLOG_LEVEL, env.TF_VMODULE)]
    return values[0] == "0" or any(values[1:])
