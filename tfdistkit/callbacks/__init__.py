"""Keras callbacks for jobs of several ranks. Give the same list of callbacks to `fit` on every rank."""

from tfdistkit.callbacks.backup.callback import BackupAndResume
from tfdistkit.callbacks.broadcast_variables import BroadcastVariables
from tfdistkit.callbacks.checkpoints.checkpoint import ChiefCheckpoint
from tfdistkit.callbacks.checkpoints.checkpoint_files import load_checkpoint
from tfdistkit.callbacks.chief_only import ChiefOnly
from tfdistkit.callbacks.consistency import ConsistencyCheck
from tfdistkit.callbacks.learning_rate import LearningRateScale, LearningRateWarmup
from tfdistkit.callbacks.metric_average import MetricAverage
from tfdistkit.callbacks.step_timer import StepTimer
from tfdistkit.callbacks.stop_together import StopTogether

__all__ = [
    "BackupAndResume",
    "BroadcastVariables",
    "ChiefCheckpoint",
    "ChiefOnly",
    "ConsistencyCheck",
    "LearningRateScale",
    "LearningRateWarmup",
    "MetricAverage",
    "StepTimer",
    "StopTogether",
    "load_checkpoint",
]


def __dir__() -> list[str]:
    return sorted(__all__)
