"""When a job hangs, and how it is explained: with real files of notes, and work of processes that a table gives."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tfdistkit import env
from tfdistkit.errors import OptionError
from tfdistkit.launcher.hosts import HostsSpec, parse_hosts
from tfdistkit.launcher.local.activity import Activity
from tfdistkit.launcher.spec import JobSpec
from tfdistkit.report.hangs.layout import FILE_NAME, SIZE_BYTES, Phase, parse_notes
from tfdistkit.report.hangs.notes import ProgressNotes
from tfdistkit.report.hangs.stacks import Frame, Thread, parse_stacks
from tfdistkit.report.names import ProcessName
from tfdistkit.supervise.hangs import watch
from tfdistkit.supervise.hangs.diagnosis import describe_places
from tfdistkit.supervise.hangs.missing_calls import missing_calls
from tfdistkit.supervise.hangs.requests import Answer, ask_for_stacks
from tfdistkit.supervise.hangs.watch import HangWatch

TIMEOUT_S = 100.0


class Ranks:
    """Two ranks in `fit`, a watch, and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.busy, self.now = False, 1000.0
        self.watch = HangWatch(TIMEOUT_S)
        self.folders = [folder / "rank.0", folder / "rank.1"]
        self.memories = [bytearray(SIZE_BYTES) for _ in self.folders]
        self.notes = [ProgressNotes(memory) for memory in self.memories]
        for one in self.folders:
            one.mkdir()
        monkeypatch.setattr(Activity, "is_busy", lambda *_: self.busy)
        monkeypatch.setattr(watch, "Activity", Activity)

    def passes(self, seconds: float) -> bool:
        """Lets time pass, and returns whether the job hangs."""
        for folder, memory in zip(self.folders, self.memories, strict=True):
            (folder / FILE_NAME).write_bytes(bytes(memory))
        for _ in range(int(seconds)):
            self.now += 1.0
            self.watch.look(self.folders, self.now)
        return self.watch.is_hung


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(tmp_path, monkeypatch)


def test_ranks_that_do_not_move_hang(ranks: Ranks) -> None:
    for one in ranks.notes:
        one.enter(Phase.STEP)
    assert not ranks.passes(TIMEOUT_S - 5)
    assert ranks.passes(10)


@pytest.mark.parametrize(
    "move",
    [
        lambda notes: notes.count_steps(1),
        lambda notes: notes.enter(Phase.SAVE),
        lambda notes: notes.count_evaluation(),
        lambda notes: notes.begin_operation(b"sum"),
        lambda notes: notes.note_ring(notes.phase + 1, 0),
        lambda notes: notes.begin_epoch(1),
    ],
)
def test_a_note_of_one_rank_is_progress(ranks: Ranks, move: Any) -> None:
    for one in ranks.notes:
        one.enter(Phase.STEP)
    assert not ranks.passes(TIMEOUT_S - 5)
    move(ranks.notes[1])
    assert not ranks.passes(TIMEOUT_S - 5)
    assert ranks.passes(10)


def test_the_end_of_a_rank_is_progress(ranks: Ranks) -> None:
    for one in ranks.notes:
        one.enter(Phase.STEP)
    assert not ranks.passes(TIMEOUT_S - 5)
    ranks.folders, ranks.memories = ranks.folders[:1], ranks.memories[:1]
    assert not ranks.passes(TIMEOUT_S - 5)
    assert ranks.passes(10)


def test_work_without_notes_is_progress_for_ten_timeouts(ranks: Ranks) -> None:
    for one in ranks.notes:
        one.enter(Phase.BETWEEN)
    ranks.busy = True
    assert not ranks.passes(10 * TIMEOUT_S - 5)
    assert ranks.passes(10)


def test_workers_of_a_coordinator_are_in_fit_with_it(ranks: Ranks) -> None:
    ranks.notes[0].enter(Phase.STEP)
    ranks.notes[1].enter(Phase.SERVING)
    ranks.busy = True
    assert not ranks.passes(10 * TIMEOUT_S - 5)
    assert ranks.passes(10)


def test_work_outside_of_fit_has_no_limit(ranks: Ranks) -> None:
    for one in ranks.notes:
        one.enter(Phase.SETUP)
    ranks.busy = True
    assert not ranks.passes(30 * TIMEOUT_S)


def test_a_job_without_a_strategy_is_not_watched(ranks: Ranks) -> None:
    assert not ranks.passes(3 * TIMEOUT_S)
    ranks.notes[0].enter(Phase.SETUP)
    assert not ranks.passes(TIMEOUT_S - 5)


def test_a_launcher_that_was_suspended_begins_anew(ranks: Ranks) -> None:
    for one in ranks.notes:
        one.enter(Phase.STEP)
    assert not ranks.passes(TIMEOUT_S / 2)
    ranks.now += 10 * TIMEOUT_S
    assert not ranks.passes(TIMEOUT_S - 5)
    assert ranks.passes(10)


def test_without_a_timeout_nothing_hangs(ranks: Ranks) -> None:
    ranks.watch = HangWatch(None)
    ranks.notes[0].enter(Phase.STEP)
    assert not ranks.passes(20 * TIMEOUT_S)


def test_activity_tells_work_from_waiting() -> None:
    words = "import sys, time\nfor line in sys.stdin:\n    end = time.process_time() + float(line)\n"
    words += "    while time.process_time() < end: pass\n    print('done', flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdin is not None and one.stdout is not None
        activity = Activity(one.pid)

        def work(seconds: float) -> bool:
            print(seconds, file=one.stdin, flush=True)
            assert one.stdout.readline() == "done\n"  # type: ignore[union-attr]
            return activity.is_busy(1.0)

        work(0)
        assert work(0.2)
        assert not work(0)
        one.stdin.close()


def test_threads_that_poll_do_not_work() -> None:
    words = "import os, threading, time\n"
    words += "def poll():\n    print(threading.get_native_id(), flush=True)\n    while True: os.stat('/')\n"
    words += "threading.Thread(target=poll, daemon=True).start()\ntime.sleep(1000)"
    with subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        activity = Activity(one.pid)
        thread = int(one.stdout.readline())
        for polling, works in (((), True), ((thread,), False)):
            activity.polling = polling
            activity.is_busy(0.0)
            time.sleep(0.5)
            assert activity.is_busy(0.5) == works
        one.kill()


MAIN, LOADER = 16, 32


def answer(phase: Phase, *frames: Frame, call: bytes = b"", state: str = "S", loader: Frame | None = None) -> Answer:
    memory = bytearray(SIZE_BYTES)
    notes = ProgressNotes(memory)
    notes._numbers[2] = MAIN
    for _ in range(40):
        notes.count_steps(1)
    notes.enter(phase)
    if call:
        notes.begin_operation(call)
    threads = (*([Thread(LOADER, (loader,))] if loader else []), Thread(MAIN, frames))
    return Answer(parse_notes(bytes(memory)), state, threads)


def horovod(one: Answer) -> Answer:
    """The same in a job of Horovod, whose threads poll."""
    assert one.notes is not None
    return replace(one, notes=replace(one.notes, polling=(7,)))


SCRIPT = Frame("/x/train.py", 30, "<module>")
KERAS = Frame("/venv/lib/python3/site-packages/keras/src/callbacks/callback_list.py", 12, "on_epoch_end")
CALLBACK = Frame("/x/callbacks.py", 88, "on_epoch_end")
SLEEP = Frame(time.__spec__.origin or "", 1, "sleep")

SCREENS = [
    (
        "a callback",
        [answer(Phase.STEP, SCRIPT, call=b"sum of float32 [3]"), answer(Phase.BETWEEN, CALLBACK, KERAS, SCRIPT)],
        """\
rank 1 is in callbacks.py:88 on_epoch_end: callbacks after training step 40 (epoch 1)
rank 0 waits in the collective `sum of float32 [3]`, in train.py:30 <module>: training step 41 (epoch 1)
So rank 0 waits for rank 1.""",
    ),
    (
        "data",
        [answer(Phase.STEP, SCRIPT, loader=Frame("/x/load.py", 7, "rows"))] * 2,
        "ranks 0, 1 wait for data from load.py:7 rows in train.py:30 <module>: training step 41 (epoch 1)",
    ),
    (
        "a suspended rank",
        [answer(Phase.STEP, SCRIPT, call=b"sum"), answer(Phase.STEP, state="T")],
        """\
rank 1 is suspended (SIGSTOP): training step 41 (epoch 1)
rank 0 waits in the collective `sum`, in train.py:30 <module>: training step 41 (epoch 1)
So rank 0 waits for rank 1.""",
    ),
    (
        "other collectives",
        [
            answer(Phase.STEP, SCRIPT, call=b"sum of float32 [3]"),
            answer(Phase.OUTSIDE, SCRIPT, call=b"max of int64"),
        ],
        """\
rank 0 waits in the collective `sum of float32 [3]`, in train.py:30 <module>: training step 41 (epoch 1)
rank 1 waits in the collective `max of int64`, in train.py:30 <module>: outside of `fit`, after training step 40
They wait in different collectives: one rank left out a call of the others, or made another one.""",
    ),
    (
        "a disk behind an input pipeline",
        [replace(answer(Phase.STEP, SCRIPT), text="Blocked in the kernel: reading /nfs/a.csv\n")] * 2,
        "ranks 0, 1 wait for data in train.py:30 <module>: training step 41 (epoch 1), blocked in the kernel reading "
        "/nfs/a.csv",
    ),
    (
        "stacks of py-spy, and none",
        [
            replace(answer(Phase.BETWEEN, CALLBACK, state="T"), text="Read by py-spy:\n"),
            replace(answer(Phase.SETUP), threads=(), text="No stack: it did not answer, and py-spy is not installed\n"),
        ],
        """\
rank 0 is suspended (SIGSTOP) in callbacks.py:88 on_epoch_end: between steps, after training step 40 (epoch 1) (stack \
read by py-spy)
rank 1 is in its script: before `fit` (no stack: it did not answer, and py-spy is not installed)""",
    ),
    (
        "Horovod, in a step",
        [horovod(answer(Phase.STEP, SCRIPT)), horovod(answer(Phase.BETWEEN, CALLBACK, KERAS, SCRIPT))],
        """\
rank 1 is in callbacks.py:88 on_epoch_end: callbacks after training step 40 (epoch 1)
rank 0 waits, probably for the other ranks, in train.py:30 <module>: training step 41 (epoch 1)
So rank 0 waits for rank 1.""",
    ),
    (
        "Horovod, unclear",
        [horovod(answer(Phase.STEP, SCRIPT))] * 2,
        "ranks 0, 1 wait, for data or the other ranks, in train.py:30 <module>: training step 41 (epoch 1)",
    ),
    (
        "a function that TensorFlow converted",
        [answer(Phase.STEP, SCRIPT, loader=Frame("/tmp/__autograph_generated_filex.py", 9, "tf__parse"))],
        "rank 0 waits for data from the function `parse` in train.py:30 <module>: training step 41 (epoch 1)",
    ),
    (
        "a function inside of one that TensorFlow converted",
        [answer(Phase.STEP, SCRIPT, loader=Frame("/tmp/__autograph_generated_filex.py", 9, "read"))],
        "rank 0 waits for data from the function `read` in train.py:30 <module>: training step 41 (epoch 1)",
    ),
    (
        "a disk",
        [Answer(None, ""), answer(Phase.SAVE, SCRIPT, state="D")],
        """\
rank 0 has not begun its script
rank 1 is in train.py:30 <module>: saving a checkpoint or backup after training step 40 (epoch 1), blocked in the \
kernel by a disk or a network""",
    ),
]


@pytest.mark.parametrize(("answers", "screen"), [one[1:] for one in SCREENS], ids=[one[0] for one in SCREENS])
def test_screens(answers: list[Answer], screen: str) -> None:
    assert describe_places([ProcessName(index) for index in range(len(answers))], answers, {}) == screen


STALLED = """\
Epoch 1/3
[2026-01-01 10:00:00.000000: W /horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be \
reduced, gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 1 seconds.
Missing ranks:
{}
[2026-01-01 10:00:01.000000: W /horovod/common/stall_inspector.cc:107] One or more tensors were submitted
Missing ranks:
{}
"""
IN_STEP = "wait, probably for the other ranks, in train.py:30 <module>: training step 41 (epoch 1)"
CALLS = [
    (
        "one left out",
        "0: [HorovodGroupedAllreduce_1of1, HorovodAllreduce_mul_0]\n1: [tfdistkit_all_reduce_2_1of1, tfdistkit_b_1of1]",
        f"ranks 0, 1 {IN_STEP}\nHorovod waits for rank 0 to call a collective without a name, `mul_0` and rank 1 to "
        "call a collective of the strategy: one rank left out a collective of the others, or made another one.",
    ),
    (
        "a rank that left all out, and one in the same place",
        "1: [a, b, c, d, e, f ...]\n2: [a, b, c, d, e, f ...]",
        "ranks 1, 2 wait, for data or the other ranks, in train.py:30 <module>: training step 41 (epoch 1)\n"
        "rank 0 waits, probably for the other ranks, in train.py:30 <module>: training step 41 (epoch 1)\n"
        "So rank 0 waits for ranks 1, 2.",
    ),
]


@pytest.mark.parametrize(("last", "screen"), [one[1:] for one in CALLS], ids=[one[0] for one in CALLS])
def test_what_horovod_waits_for(last: str, screen: str, tmp_path: Path) -> None:
    answers = [horovod(answer(Phase.STEP, SCRIPT))] * (3 if "2:" in last else 2)
    folders = [tmp_path / str(index) for index in range(len(answers))]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "stderr").write_text(STALLED.format("1: [before]", last))
    missing = missing_calls(folders, answers)
    assert describe_places([ProcessName(index) for index in range(len(answers))], answers, missing) == screen
    os.utime(folders[0] / "stderr", (1.0, 1.0))
    assert missing_calls(folders, answers) == {}, "older than the last progress"


def test_many_ranks_fit_on_a_screen() -> None:
    answers = [answer(Phase.BETWEEN, Frame("/x/t.py", line, "f")) for line in range(40)]
    text = describe_places([ProcessName(index) for index in range(40)], answers, {})
    assert len(text.splitlines()) == 11 and text.endswith("... and 30 more places")


def test_stacks_as_faulthandler_writes_them() -> None:
    text = """\
Thread 0x00007f0000000020 (most recent call first):
  File "/a b/loader.py", line 7 in rows
  File "/lib/python3.11/threading.py", line ??? in run

Current thread 0x00007f0000000010 [python] (most recent call first):
  File "train.py", line 12 in <module>
"""
    loader, main = parse_stacks(text)
    assert loader.frames == (Frame("/a b/loader.py", 7, "rows"), Frame("/lib/python3.11/threading.py", 0, "run"))
    assert main == Thread(0x7F0000000010, (Frame("train.py", 12, "<module>"),))


WAITING = """
from tfdistkit.report.hangs import notes, stacks
import sys
notes.begin()
if sys.argv[1] == "answers":
    stacks.answer_requests()
print("begun", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["answers", "has no handler", "is of another folder"])
def test_only_processes_that_answer_are_asked(tmp_path: Path, kind: str) -> None:
    environment = {**os.environ, env.TASK_DIR: str(tmp_path)}
    words = [sys.executable, "-c", WAITING, kind]
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "begun\n"
        folder = tmp_path
        if kind == "is of another folder":
            folder = tmp_path / "another"
            folder.mkdir()
            (folder / FILE_NAME).write_bytes((tmp_path / FILE_NAME).read_bytes())
        for _ in range(2):
            (found,) = ask_for_stacks([folder])
            assert process.poll() is None  # the signal would end a process without a handler
            functions = [thread.frames[-1].function for thread in found.threads]
            assert functions == ["<module>"] * (kind != "is of another folder")
            assert found.is_spied == (kind == "has no handler")
        process.stdin.close()
        assert process.wait(timeout=60) == 0


HOSTS = HostsSpec(parse_hosts("node1:2"), "/python", "/")


@pytest.mark.parametrize("options", [{"backend": "slurm"}, {"hosts": HOSTS, "backend": "mpi"}])
def test_ranks_that_are_not_seen_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="where the launcher sees the progress of the ranks"):
        JobSpec(2, ("train.py",), Path("/logs"), hang_timeout_s=60, **options)


def test_ranks_on_other_hosts_are_seen_once_a_second() -> None:
    assert JobSpec(2, ("train.py",), Path("/logs"), hang_timeout_s=60, hosts=HOSTS).hang_timeout_s == 60
    with pytest.raises(OptionError, match="must be at least 5 seconds for ranks on other hosts"):
        JobSpec(2, ("train.py",), Path("/logs"), hang_timeout_s=2, hosts=HOSTS)
