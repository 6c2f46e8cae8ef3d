"""Trackers: what tells other programs (TensorBoard, MLflow, Weights & Biases, your own) of a run while it goes on."""

from fedloom.experiment.trackers.tracker import TrackedRun, Tracker, build_tracker, trackers
from fedloom.experiment.trackers.tracking import Tracking

__all__ = ["TrackedRun", "Tracker", "Tracking", "build_tracker", "trackers"]
