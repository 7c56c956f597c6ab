"""Signals of a run, each in a process of its own: the first stops, the second ends, whatever else is going on."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from miles.launch.runtime.signals import StopSignals

HEAD = """
import signal, sys, time, threading
# A shell's background processes ignore some signals.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from miles.launch.runtime.signals import StopSignals, StopSignal
from miles.observe.output import drop_output_errors
stopped = threading.Event()
signals = StopSignals(lambda text: print(text, flush=True))
"""


def start(code: str, **streams) -> subprocess.Popen:
    program = HEAD + textwrap.dedent(code)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, **streams)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


BUSY = """
    with signals.handling(), signals.stopping(stopped.set):
        print("ready", flush=True)
        {work}
        sys.exit(7)
"""
BLOCKED = BUSY.format(work="\n        ".join(["try: time.sleep(1e6)", "except BaseException: pass"]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_stops_and_the_second_ends_a_process_that_is_blocked(number):
    process = start(BLOCKED)
    assert process.stdout is not None
    process.send_signal(number)
    assert process.stdout.readline().startswith("Stopping: ")
    assert process.poll() is None
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert "Ended by a second signal" in process.stdout.read()


def test_one_signal_to_the_process_and_its_group_is_one_signal():
    # GNU timeout signals its child and then the process group that the child is in.
    process = start(BLOCKED, start_new_session=True)
    assert process.stdout is not None
    os.kill(process.pid, signal.SIGTERM)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.stdout.readline().startswith("Stopping: ")
    assert process.poll() is None
    process.kill()
    process.wait(60)


def test_the_first_signal_stops_the_loop():
    process = start(BUSY.format(work="stopped.wait(60); sys.exit(0 if stopped.is_set() else 3)"))
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 0


def test_a_signal_without_a_loop_is_raised_in_the_main_thread():
    process = start(
        """
        try:
            with signals.handling():
                print("ready", flush=True)
                time.sleep(1e6)
        except StopSignal as error:
            sys.exit(error.number)
        """
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == signal.SIGTERM


def test_a_signal_that_was_ignored_before_stays_ignored():
    process = start(
        """
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what nohup does
        with signals.handling(), signals.stopping(stopped.set):
            print("ready", flush=True)
            sys.stdin.readline()
            sys.exit(9 if stopped.is_set() else 0)
        """,
        stdin=subprocess.PIPE,
    )
    process.send_signal(signal.SIGHUP)
    process.communicate("go on\n", timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize("lost", ["/dev/full", "a pipe that nobody reads", "closed"])
def test_signals_are_obeyed_after_the_output_is_lost(lost):
    read, write = os.pipe()
    process = start(
        f"""
        import os
        print("ready", flush=True)
        sys.stdin.readline()
        if {lost!r} == "closed":
            sys.stdout.close()
        elif {lost!r} == "/dev/full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        else:
            os.dup2({write}, 1)
        with drop_output_errors(), signals.handling(), signals.stopping(stopped.set):
            os.kill(os.getpid(), signal.SIGTERM)
            stopped.wait(60)
            print("a line", flush=True)
        sys.exit(0 if stopped.is_set() else 3)
        """,
        stdin=subprocess.PIPE,
        pass_fds=(write,),
    )
    os.close(read)
    process.communicate("go on\n", timeout=60)
    os.close(write)
    assert process.returncode == 0


def test_a_run_in_another_thread_is_stopped_before_and_while_it_runs():
    stops: list[str] = []
    early = StopSignals(print)
    early.stop()  # while the model is loaded
    with early.stopping(lambda: stops.append("early")):
        pass
    late = StopSignals(print)
    with late.stopping(lambda: stops.append("late")):
        assert stops == ["early"]
        late.stop()
    assert stops == ["early", "late"] and late.received == signal.SIGINT
