"""Trackers of a run: Trackio, Weights & Biases, MLflow, TensorBoard, and a user's own class.

protocol.py has what a tracker is, delivery.py the run's side, process.py the process of one tracker.
"""

from shardrt.train.trackers.delivery import Tracking
from shardrt.train.trackers.protocol import TrackedRun, Tracker, check

__all__ = ["TrackedRun", "Tracker", "Tracking", "check"]
