"""What must be kept fails loudly; what is only shown does not."""

import pytest
from tests.observe.example_events import story

from miles.core.errors import ResumeError, StorageError
from miles.observe.event_bus import EventBus
from miles.observe.factory import build_view
from miles.observe.log import RunLogs
from miles.observe.rollouts import RolloutDump


class Recorder:
    def __init__(self, fail_at=None, name="sink", journal=None):
        self.seen, self.fail_at, self.closed, self.commits = [], fail_at, False, 0

    def __call__(self, event):
        self.seen.append(event)
        if len(self.seen) == self.fail_at:
            raise OSError("no room")

    def commit(self):
        self.commits += 1

    def offsets(self):
        return {"events": len(self.seen)}

    def close(self):
        self.closed = True


def test_everyone_is_told_everything_in_order():
    journal, keeper, view = Recorder(), Recorder(), Recorder()
    fanout = EventBus(journal, sinks=[keeper], views=[view])
    events = list(story(2))
    for event in events:
        fanout(event)
    fanout.commit()
    assert journal.seen == keeper.seen == view.seen == events
    assert fanout.offsets() == {"events": len(events)} and (journal.commits, keeper.commits) == (1, 1)
    fanout.close()
    assert journal.closed and keeper.closed


def test_a_view_that_fails_is_dropped_and_reported_once():
    journal, broken, other, said = Recorder(), Recorder(fail_at=2), Recorder(), []
    fanout = EventBus(journal, views=[broken, other], report=said.append)
    events = list(story(2))
    for event in events:
        fanout(event)
    assert len(broken.seen) == 2 and other.seen == journal.seen == events
    assert said == ["Recorder failed and was removed (OSError('no room')); the run continues."]


def test_a_report_that_fails_too_goes_to_standard_error(capsys):
    def report(text):
        raise BrokenPipeError

    fanout = EventBus(Recorder(), views=[Recorder(fail_at=1)], report=report)
    fanout(story(1)[0])
    assert "was removed" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["journal", "keeper"])
def test_what_must_be_kept_ends_the_run_when_it_cannot_be(place):
    failing, fine = Recorder(fail_at=3), Recorder()
    fanout = EventBus(failing) if place == "journal" else EventBus(fine, sinks=[failing])
    with pytest.raises(StorageError, match="no room"):
        for event in story(2):
            fanout(event)


def test_all_are_closed_even_if_one_cannot_be():
    class Stuck(Recorder):
        def close(self):
            raise OSError("stuck")

    journal = Recorder()
    fanout = EventBus(journal, sinks=[Stuck(), keeper := Recorder()])
    with pytest.raises(StorageError, match="stuck"):
        fanout.close()
    assert keeper.closed and journal.closed


def test_the_real_parts_together_continue_a_killed_run(tmp_path):
    def assemble(resume_at):
        logs = RunLogs(tmp_path, resume_at=resume_at, strict=True, clock=float)
        return EventBus(logs, sinks=[RolloutDump(tmp_path / "rollouts")], views=[build_view("none")])

    run = assemble(None)
    for event in story(4)[:-3]:
        run(event)
    marks = run.offsets()
    run.commit()
    for event in story(6, first=5)[1:]:
        run(event)
    run.close()
    before = (tmp_path / "events.jsonl").read_bytes()
    again = assemble(marks)
    for event in story(6, first=5):
        again(event)
    again.close()
    assert (tmp_path / "events.jsonl").read_bytes() == before
    assert len(list((tmp_path / "rollouts").iterdir())) == 6
    changed = assemble(marks)
    with pytest.raises(ResumeError):
        for event in story(6, first=5, salt=0.5):
            changed(event)
    changed.close()
