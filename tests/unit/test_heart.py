"""The thread that tells the coordinator that an actor lives."""

import os
import threading

from tiered_kv.actors import heart
from tiered_kv.actors.heart import Heart


class Process:
    """Counts beats; `says` is what the next ones answer."""

    def __init__(self, says=False):
        self.says = says
        self.beats = 0
        self.three = threading.Event()
        self.orphaned = []
        self.ended = threading.Event()

    def beat(self):
        self.beats += 1
        if self.beats >= 3:
            self.three.set()
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    def end(self, why, flush):
        self.orphaned.append((why, flush))
        self.ended.set()


def test_a_heart_beats_until_it_is_stopped(monkeypatch):
    monkeypatch.setattr(heart, "BEAT_S", 0.01)
    process = Process()
    one = Heart(process.beat, process.end)
    assert process.three.wait(20)
    one.stop()
    one.stop()
    beats = process.beats
    assert not threading.Event().wait(0.1)
    assert (process.beats, process.orphaned) == (beats, [])


def test_a_beat_with_a_defect_is_counted_and_the_heart_goes_on(monkeypatch):
    monkeypatch.setattr(heart, "BEAT_S", 0.01)
    process = Process(says=ZeroDivisionError("x"))
    one = Heart(process.beat, process.end)
    assert process.three.wait(20)
    one.stop()
    assert one.failed >= 3
    assert process.orphaned == []


def test_a_process_whose_later_life_is_known_ends_without_writing():
    process = Process(says=True)
    one = Heart(process.beat, process.end)
    assert process.ended.wait(20)
    one.stop()
    assert process.orphaned == [("a later life of this node has announced itself", False)]


def test_a_process_whose_raylet_is_gone_writes_what_it_holds_and_ends(monkeypatch):
    monkeypatch.setattr(heart, "BEAT_S", 0.01)
    process = Process()
    one = Heart(process.beat, process.end)
    assert process.three.wait(20)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert process.ended.wait(20)
    one.stop()
    assert process.orphaned == [("the raylet that started this process is gone", True)]
