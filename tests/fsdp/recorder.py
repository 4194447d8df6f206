"""An observer that notes every call."""

from functools import partial

from shardrt.fsdp.observers import ScheduleObserver


class Recorder(ScheduleObserver):
    """Appends (name of the call, label of the unit or None) to `events`."""

    def __init__(self, events):
        for name in vars(ScheduleObserver):
            if not name.startswith("_"):
                setattr(self, name, partial(self._note, events, name))

    @staticmethod
    def _note(events, name, unit=None):
        events.append((name, unit and unit.label))
