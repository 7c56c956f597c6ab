"""Two checkpoints have one vocabulary where every token has the same id, however their files are written."""

import json

from tests.rollout.tiny import save_tokenizer

from miles.models.tokenizer import fingerprint_vocabulary


def test_the_same_tokens_written_otherwise_are_the_same_vocabulary(tmp_path):
    folder = save_tokenizer(tmp_path / "one")
    known = fingerprint_vocabulary(folder)
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["model"]["vocab"] = dict(reversed(whole["model"]["vocab"].items()))
    (folder / "tokenizer.json").write_text(json.dumps(whole, indent=7))
    assert known and fingerprint_vocabulary(folder) == known


def test_a_token_with_another_id_makes_another_vocabulary(tmp_path):
    folder = save_tokenizer(tmp_path / "one")
    known = fingerprint_vocabulary(folder)
    whole = json.loads((folder / "tokenizer.json").read_text())
    whole["added_tokens"][0]["content"] = "<|other|>"
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    assert fingerprint_vocabulary(folder) != known


def test_lists_of_scored_pieces_and_other_files_are_known_too(tmp_path):
    pieces = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0]]}, "added_tokens": None}
    (tmp_path / "tokenizer.json").write_text(json.dumps(pieces))
    as_list = fingerprint_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    assert fingerprint_vocabulary(tmp_path) == as_list
    (tmp_path / "tokenizer.json").unlink()
    assert fingerprint_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.model").write_bytes(b"pieces")
    assert fingerprint_vocabulary(tmp_path) is not None
