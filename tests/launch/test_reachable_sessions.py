"""Agents that reach the session server of a run from outside: other addresses, a key of the run, TLS."""

import datetime
import json
import ssl
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.launch.small_run import flags, write_inputs

from miles.launch.main import main

SEEN: list[tuple[str, str, int]] = []
CERTIFICATE: list[Path] = []


async def outside(base_url: str, prompt: list[Any], request_kwargs: dict[str, Any], metadata: Any, api_key: str = ""):
    """Ask with a wrong key, then with the run's; remember both."""
    tls = ssl.create_default_context(cafile=str(CERTIFICATE[0])) if base_url.startswith("https") else None
    body = {"model": "policy", "messages": prompt, **request_kwargs}
    async with aiohttp.ClientSession() as http:
        for key in ("wrong", api_key):
            url, headers = f"{base_url}/v1/chat/completions", {"Authorization": f"Bearer {key}"}
            async with http.post(url, json=body, headers=headers, ssl=tls or True) as response:
                await response.read()
                SEEN.append((base_url, key, response.status))


async def keyless(base_url: str, prompt: list[Any], request_kwargs: dict[str, Any], metadata: Any) -> None:
    """An agent that takes no key."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("agents") / "world")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.2 that no authority signed, and its key, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sessions")])
    start = datetime.datetime(2020, 1, 1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(7).not_valid_before(start).not_valid_after(start + datetime.timedelta(days=36500))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.2"))]), critical=False)
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file.write_bytes(private + made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return file


def train(world: Path, run: Path, *more: str, agent: str = "outside") -> int:
    SEEN.clear()
    return main(["train", *flags(world, run, "--custom-agent-function-path", f"{__name__}:{agent}", *more, steps=2)])


def test_a_server_on_every_address_makes_a_key_and_gives_an_address_that_is_reached(
    world: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    more = ("--session-server-ip", "0.0.0.0", "--session-server-advertise-host", "127.0.0.2")
    assert train(world, run, *more) == 0
    assert all(url.startswith("http://127.0.0.2:") for url, _, _ in SEEN)
    assert {(key == "wrong", status) for _, key, status in SEEN} == {(True, 401), (False, 200)}
    keys = {key for _, key, _ in SEEN} - {"wrong"}
    assert len(keys) == 1
    assert all(
        next(iter(keys)) not in file.read_text() for file in run.rglob("*.*") if file.suffix in (".toml", ".jsonl")
    )
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["parity_max_abs"] for row in steps if row["kind"] == "train") < 1e-4


def test_a_certificate_makes_it_https(world: Path, certificate: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    CERTIFICATE[:] = [certificate]
    more = ("--session-server-ip", "127.0.0.2", "--session-server-ssl-certfile", str(certificate))
    assert train(world, tmp_path / "run", *more, "--session-server-api-key-file", str(key)) == 0
    assert all(url.startswith("https://127.0.0.2:") for url, _, _ in SEEN)
    assert {(key, status) for _, key, status in SEEN} == {("wrong", 401), ("secret", 200)}


def test_an_agent_that_could_not_know_the_key_is_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(world, tmp_path / "run", "--session-server-ip", "0.0.0.0", agent="keyless") == 2
    assert "give it a parameter api_key, or give --session-server-api-key-file." in capsys.readouterr().err


def test_a_certificate_that_is_none_is_one_sentence(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cert.pem"
    file.write_text("not a certificate")
    assert train(world, tmp_path / "run", "--session-server-ssl-certfile", str(file)) == 2
    assert "cannot be used" in capsys.readouterr().err
