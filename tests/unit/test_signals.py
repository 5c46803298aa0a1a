"""Signals stop the program at once where nothing is lost, and after the step while it trains."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest

from mtl.runs.signals import SIGNALS, Stopped, StopSignals


def send(number: int) -> None:
    os.kill(os.getpid(), number)


TRAINS, TESTS = ("training_starts", "RESUME"), ("training_ends", "a/best.ckpt", "EVALUATE")


@pytest.mark.parametrize(
    ("begun", "sent", "message"),
    [
        *(([], [number], f"by {number.name} with nothing to save") for number in SIGNALS),
        ([TRAINS], [signal.SIGTERM] * 2 + [signal.SIGINT], r"by SIGINT at once, .*; resume .* with: RESUME$"),
        ([TRAINS, TESTS], [signal.SIGHUP], "by SIGHUP during the test; the trained weights are in a/best.ckpt"),
    ],
)
def test_the_last_signal_stops_at_once(begun: list[tuple[str, ...]], sent: list[int], message: str) -> None:
    signals = StopSignals()
    with signals.listening():
        for name, *arguments in begun:
            getattr(signals, name)(*arguments)
        for number in sent[:-1]:
            send(number)
        with pytest.raises(Stopped, match=f"^stopped {message}") as stop:
            send(sent[-1])
    assert stop.value.number == sent[-1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_training_waits_for_the_step(number: int) -> None:
    signals = StopSignals()
    with signals.listening():
        signals.training_starts("RESUME")
        assert signals.number == 0
        send(number)
        assert signals.number == number
        with pytest.raises(Stopped, match=r"weights are in a/best.ckpt, test them with: EVALUATE$"):
            signals.training_ends("a/best.ckpt", "EVALUATE")


def test_broad_handlers_do_not_swallow_a_stop() -> None:
    with StopSignals().listening(), pytest.raises(Stopped), contextlib.suppress(Exception):
        send(signal.SIGTERM)


def test_handlers_are_restored_whatever_happens() -> None:
    signals, before = StopSignals(), [signal.getsignal(number) for number in SIGNALS]

    def run(error: type[BaseException]) -> None:
        with signals.listening():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Lightning replaces handlers before each loop
            with signals.listening():
                assert [signal.getsignal(number) for number in SIGNALS] == [signals._handle] * 3
            assert signals.is_listening
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            raise error

    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            run(error)
        assert [signal.getsignal(number) for number in SIGNALS] == before
    assert not signals.is_listening


def test_an_ignored_signal_stays_ignored() -> None:
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup python train.py
    try:
        with StopSignals().listening():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_other_threads_leave_the_handlers_alone() -> None:
    seen: list[object] = []

    def work() -> None:
        with StopSignals().listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_the_next_run_starts_without_a_request() -> None:
    signals = StopSignals()
    with signals.listening():
        signals.training_starts("last.ckpt")
        send(signal.SIGTERM)
    with signals.listening():
        assert signals.number == 0
        with pytest.raises(Stopped, match="with nothing to save"):
            send(signal.SIGTERM)
