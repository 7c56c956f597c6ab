"""Every request of the lists is answered as stock SGLang answered it: status, fields, tokens and log-probs.

SGLang's replies are kept in recorded.json, so that ours is held against them at every run; with SGLang at hand
(``make test-sglang``) its own replies are held against them too, and ``--regenerate`` writes them anew.
"""

import json
from pathlib import Path

import pytest
from tests.server_api import exchanges, openai_exchanges
from tests.server_api.exchange import Exchange, differences, read_reply
from tests.server_api.live_servers import Wire

ALL = [*exchanges.EXCHANGES, *openai_exchanges.EXCHANGES]
RECORDED = Path(__file__).with_name("recorded.json")
NEW: dict[str, object] = {}


def recorded() -> dict[str, dict]:
    return json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}


@pytest.mark.parametrize("exchange", ALL, ids=lambda exchange: exchange.name)
def test_a_request_is_answered_as_sglang_answered_it(server: Wire, exchange: Exchange, regenerate: bool):
    if server.kind == "sglang" and exchange.fatal:
        pytest.skip(exchange.why)
    reply = read_reply(exchange.send(server.http))
    if server.kind == "sglang" and regenerate:
        NEW[exchange.name] = reply
        return
    if server.kind == "miles" and exchange.why:
        assert reply["status"] == exchange.ours, reply
        return
    assert not differences(reply, recorded()[exchange.name])


@pytest.mark.sglang
def test_what_sglang_answered_is_kept(regenerate: bool):
    if regenerate:
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(NEW[name])}" for name in NEW)
        RECORDED.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    assert recorded().keys() == {exchange.name for exchange in ALL if not exchange.fatal}


def test_no_two_exchanges_have_one_name():
    assert len({exchange.name for exchange in ALL}) == len(ALL)


def test_every_difference_has_a_reason():
    assert not [each.name for each in ALL if (each.ours is None) != (not each.why) or (each.fatal and not each.why)]
