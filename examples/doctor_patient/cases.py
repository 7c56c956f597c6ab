"""Cases for a doctor and a patient: two symptoms, four illnesses, demonstrations of both roles, and one small model.

The patient has a card with its symptoms, which the doctor does not see. Demonstrations are poor: the doctor often names
any illness, and the patient often says any word.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import small_model
from small_model import ask, say
from training_runs import write_rows

SYMPTOMS = ("fever", "cough")
ILLNESSES = {(True, True): "flu", (True, False): "infection", (False, True): "cold", (False, False): "fatigue"}
COMPLAINT = "I feel ill."
ANSWERS = ("no", "yes")
CASES = [dict(zip(SYMPTOMS, signs, strict=True)) for signs in product((False, True), repeat=len(SYMPTOMS))]


def show_card(case: Mapping[str, bool]) -> str:
    """What the patient knows of itself."""
    return " ".join(f"{symptom} {ANSWERS[has]}" for symptom, has in case.items())


def question(symptom: str) -> str:
    return f"{symptom}?"


def diagnosis(case: Mapping[str, bool]) -> str:
    return ILLNESSES[tuple(case[symptom] for symptom in SYMPTOMS)]


def demonstrate_doctor(case: Mapping[str, bool], chance: random.Random) -> list[dict[str, object]]:
    """None, one or both of the symptoms are asked for; after both the diagnosis is right half of the time."""
    asked = chance.sample(SYMPTOMS, chance.choice((0, 1, 2, 2)))
    messages = [ask(COMPLAINT)]
    for symptom in asked:
        messages += [say(question(symptom)), ask(ANSWERS[case[symptom]])]
    knows = len(asked) == len(SYMPTOMS) and chance.random() < 0.5
    return [*messages, say(diagnosis(case) if knows else chance.choice([*ILLNESSES.values()]))]


def demonstrate_patient(case: Mapping[str, bool], chance: random.Random) -> list[dict[str, object]]:
    """A first or second question; an answer is right half of the time, and otherwise any."""
    messages: list[dict[str, object]] = [{"role": "system", "content": show_card(case)}]
    for symptom in chance.sample(SYMPTOMS, chance.choice((1, 2))):
        true = ANSWERS[case[symptom]]
        messages += [ask(question(symptom)), say(true if chance.random() < 0.5 else chance.choice(ANSWERS))]
    return messages


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 2048) -> None:
    """``warmup.jsonl`` with both roles, ``train.jsonl``, ``heldout.jsonl``, a random model and its tokenizer."""
    chance = random.Random(f"cases {seed}")
    words = [*SYMPTOMS, *map(question, SYMPTOMS), *ILLNESSES.values(), COMPLAINT, *ANSWERS]
    small_model.write_small_model(folder, words, seed=seed, max_positions=64)
    shown = [
        (demonstrate_doctor, demonstrate_patient)[number % 2](chance.choice(CASES), chance)
        for number in range(demonstrations)
    ]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    for name, copies in (("train", 16), ("heldout", 8)):
        rows = [{"input": COMPLAINT, "label": diagnosis(case), "metadata": {"case": case}} for case in CASES * copies]
        write_rows(folder / f"{name}.jsonl", rows)
