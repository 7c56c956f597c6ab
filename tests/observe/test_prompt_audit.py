"""The audit of an event log finds prompts that are repeated or skipped, and passes what a sound run writes."""

import json

import pytest

from miles.observe.prompt_audit import PromptAuditError, audit_prompts


def write(path, events):
    path.write_text("".join(json.dumps({"event": name, **values}) + "\n" for name, values in events))
    return path


def admit(ticket, prompt, epoch=0):
    return "PromptAdmitted", {"ticket": ticket, "prompt_id": prompt, "epoch": epoch}


def drop(ticket):
    return "GroupFinished", {"ticket": ticket, "kept": False, "reason": "zero_std_0"}


def take(*tickets):
    return "BatchTaken", {"step": 1, "tickets": list(tickets)}


SOUND = [admit(0, 5), admit(1, 6), admit(2, 7), drop(1), take(0, 2), admit(3, 6, 1), admit(4, 5, 1), take(3, 4)]


def test_a_sound_log_is_counted(tmp_path):
    counts = audit_prompts(write(tmp_path / "events.jsonl", SOUND), whole_epochs=True)
    assert (counts.admitted, counts.trained, counts.dropped, counts.epochs) == (5, 4, 1, 2)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([*SOUND, admit(5, 5, 1)], "prompt 5 was admitted twice in epoch 1"),
        ([*SOUND, take(4)], "prompt 5 of epoch 1 was trained twice"),
        ([*SOUND, admit(5, 5, 2)], r"epoch 1 skipped 1 prompts \(7; "),
    ],
)
def test_a_planted_fault_is_named(tmp_path, events, message):
    with pytest.raises(PromptAuditError, match=message):
        audit_prompts(write(tmp_path / "events.jsonl", events), whole_epochs=True)


def test_sources_that_choose_prompts_may_skip_some(tmp_path):
    audit_prompts(write(tmp_path / "events.jsonl", [*SOUND, admit(5, 5, 2)]), whole_epochs=False)
