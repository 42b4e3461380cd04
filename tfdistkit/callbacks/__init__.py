"""Keras callbacks for a job of several ranks. Give the same list of callbacks to `fit` on every rank."""

from tfdistkit.callbacks.broadcast_variables import BroadcastVariables
from tfdistkit.callbacks.checkpoint import ChiefCheckpoint
from tfdistkit.callbacks.chief_only import ChiefOnly
from tfdistkit.callbacks.learning_rate import LearningRateScale, LearningRateWarmup
from tfdistkit.callbacks.metric_average import MetricAverage
from tfdistkit.callbacks.stop_together import StopTogether

__all__ = [
    "BroadcastVariables",
    "ChiefCheckpoint",
    "ChiefOnly",
    "LearningRateScale",
    "LearningRateWarmup",
    "MetricAverage",
    "StopTogether",
]
