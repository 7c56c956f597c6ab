"""Behaviour of ``miles bundle``: a bug report's archive has what is needed and no secret."""

import json
import tarfile

import pytest

from miles.launch.commands.bundle import redact
from miles.launch.main import main

SECRETS = {
    "JUDGE_API_KEY": "judge-value-9431",
    "header": "Bearer abc.def-ghi_jkl",
    "url": "http://someone:hunter22@host:80/x",
    "service": "hf_abcdefghijklmnopqrst",
    "pair": '{"api_key": "qwertyuiop"}',
}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    (folder / "rollouts").mkdir()
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "checkpoints" / "step-000001" / "model.safetensors").write_bytes(b"weights")
    (folder / "config.toml").write_text('[rollout]\njudge_token_env = "JUDGE_API_KEY"\nmax_tokens_per_gpu = 4096\n')
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (folder / "logs" / "engine.log").write_text("\n".join(SECRETS.values()) + "\n" + "x" * 5000 + "\nlast line\n")
    (folder / "rollouts" / "step-000001.parquet").write_bytes(b"a prompt")
    return folder


def read_archive(path):
    with tarfile.open(path) as archive:
        return {
            member.name.partition("/")[2]: archive.extractfile(member).read()  # type: ignore[union-attr]
            for member in archive
        }


def test_an_archive_has_logs_and_versions_and_no_secret_weight_or_prompt(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUDGE_API_KEY", SECRETS["JUDGE_API_KEY"])
    target = tmp_path / "report.tar.gz"
    assert main(["bundle", str(run), "--output", str(target)]) == 0
    files = read_archive(target)
    assert {"config.toml", "metrics.jsonl", "logs/engine.log", "environment.json", "files.txt"} == set(files)
    everything = b"\n".join(files.values()).decode()
    for secret in ("judge-value-9431", "abc.def-ghi_jkl", "hunter22", "hf_abcdefghij", "qwertyuiop"):
        assert secret not in everything
    assert 'judge_token_env = "JUDGE_API_KEY"' in everything, "the name of a variable is no secret"
    assert "max_tokens_per_gpu = 4096" in everything
    assert "checkpoints/step-000001/model.safetensors" in files["files.txt"].decode(), "listed, not packed"
    assert json.loads(files["environment.json"])["packages"]["torch"]
    assert "Prompts and responses are left out" in capsys.readouterr().out


def test_rollouts_are_packed_when_asked_for_and_long_logs_keep_their_end(run, tmp_path):
    target = tmp_path / "report.tar.gz"
    assert main(["bundle", str(run), "--output", str(target), "--rollouts", "--max-file-bytes", "1024"]) == 0
    files = read_archive(target)
    assert files["rollouts/step-000001.parquet"] == b"a prompt"
    assert files["logs/engine.log"].startswith(b"[") and files["logs/engine.log"].endswith(b"last line\n")


def test_an_existing_file_is_not_overwritten(run, tmp_path, capsys):
    target = tmp_path / "report.tar.gz"
    target.write_text("mine")
    assert main(["bundle", str(run), "--output", str(target)]) == 2
    assert target.read_text() == "mine" and "exists already" in capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["bundle", str(tmp_path)]) == 2
    assert "is not a run" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["tokens: 123456789", "the password was wrong", "tokenizer=/models/qwen3-long-name"])
def test_ordinary_text_stays(text):
    assert redact(text) == text
