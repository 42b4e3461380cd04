"""Records what happened in a run: events, crash records, the first failure. Files stay readable after a crash."""

from tfdistkit.report.crashes import CrashRecord, read_crash, write_crash
from tfdistkit.report.events import EventLog, read_events
from tfdistkit.report.failures import Failure, first_cause_first
from tfdistkit.report.names import ProcessName
from tfdistkit.report.summary import describe_failure, describe_run

__all__ = [
    "CrashRecord",
    "EventLog",
    "Failure",
    "ProcessName",
    "describe_failure",
    "describe_run",
    "first_cause_first",
    "read_crash",
    "read_events",
    "write_crash",
]
