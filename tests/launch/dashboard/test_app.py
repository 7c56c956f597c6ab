"""The dashboard's HTTP server: pages, queries, headers, tokens, other sites, paths, images."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import ClientSession, CookieJar
from aiohttp.test_utils import TestClient, TestServer
from tests.models.small_vision import draw_png
from tests.observe.dashboard.example_runs import HOSTILE, build_example_api, text_group, write_rollouts, write_run

from miles.core.errors import DataError, UsageError
from miles.launch.commands.view import choose_token, format_address
from miles.launch.config import ViewOptions
from miles.launch.dashboard.app import build_app
from miles.launch.dashboard.build import build_api, choose_tolerance
from miles.launch.main import main
from miles.observe.dashboard.web_files import FOLDER, WEB_FILES, join_modules

OWN_MODULES = sorted(name for name in WEB_FILES if name.endswith(".js") and not name.startswith("uplot"))


def serve(
    root: Path, work: Callable[[TestClient], Awaitable[None]], token: str | None = None, host: str = "127.0.0.1"
) -> None:
    """Run ``work`` with a client of a server of the runs below ``root``."""

    async def run() -> None:
        server = TestServer(build_app(build_example_api(root), token=token), host=host)
        async with TestClient(server, cookie_jar=CookieJar(unsafe=True)) as client:
            await work(client)

    asyncio.run(run())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "one", steps=2)
    write_rollouts(tmp_path / "one", 3, [text_group("say", [(HOSTILE, 1.0)])])
    return tmp_path


def test_every_page_and_module_is_served_and_may_run_nothing_else(runs: Path):
    async def work(client: TestClient) -> None:
        for path, kind in (("/", "text/html"), *((f"/web/{name}", kind) for name, kind in WEB_FILES.items())):
            response = await client.get(path)
            assert response.status == 200, path
            assert response.content_type == kind
            policy = response.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
            assert "require-trusted-types-for 'script'" in policy and "frame-ancestors 'none'" in policy
            assert response.headers["X-Content-Type-Options"] == "nosniff"

    serve(runs, work)


def test_a_query_is_answered_as_json_with_text_of_a_model_unchanged(runs: Path):
    async def work(client: TestClient) -> None:
        response = await client.get("/api/trajectory", params={"run": "one", "step": 3, "index": 0})
        assert response.content_type == "application/json"
        assert (await response.json())["branches"][0]["spans"][1]["text"] == HOSTILE

    serve(runs, work)


@pytest.mark.parametrize(
    "path",
    [
        "/web/../api.py",
        "/web/%2e%2e%2fapi.py",
        "/web/..%2f..%2fapi.py",
        "/../../../etc/passwd",
        "/api/log?run=one&name=../config.toml",
        "/api/overview?run=../../etc",
        "/media?run=one&source=../config.toml",
        "/web/",
        "/config.toml",
    ],
)
def test_no_path_leads_out(runs: Path, path: str):
    async def work(client: TestClient) -> None:
        from yarl import URL

        response = await client.get(URL(path, encoded=True))
        assert response.status in (400, 404), path
        assert "error" in await response.json()
        assert "Content-Security-Policy" in response.headers

    serve(runs, work)


@pytest.mark.parametrize("method", ["post", "put", "delete", "patch"])
def test_the_server_only_reads(runs: Path, method: str):
    async def work(client: TestClient) -> None:
        assert (await getattr(client, method)("/api/runs")).status == 405

    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    serve(runs, work)
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://example.org"},
        {"Host": "rebound.example.org"},
    ],
)
def test_pages_of_other_sites_get_nothing(runs: Path, headers: dict[str, str]):
    async def work(client: TestClient) -> None:
        assert (await client.get("/api/runs", headers=headers)).status == 403

    serve(runs, work)


def test_with_a_token_the_printed_address_opens_the_page_and_nothing_else_does(runs: Path):
    async def work(client: TestClient) -> None:
        for path in ("/", "/api/runs", "/web/main.js", "/?token=wrong", "/api/runs?token=secret"):
            assert (await client.get(path)).status == 401, path
        opened = await client.get("/?token=secret", allow_redirects=False)
        assert (opened.status, opened.headers["Location"]) == (303, "/")
        cookie = opened.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert (await client.get("/api/runs")).status == 200
        async with ClientSession() as other:
            url = client.make_url("/api/runs")
            assert (await other.get(url)).status == 401
            assert (await other.get(url, headers={"Authorization": "Bearer secret"})).status == 200

    serve(runs, work, token="secret")


def test_images_of_a_run_are_sent_and_scripts_in_disguise_are_not(runs: Path):
    media = runs / "one" / "media"
    media.mkdir()
    (media / f"{'a' * 64}.png").write_bytes(draw_png(0))
    (media / f"{'b' * 64}.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")

    async def work(client: TestClient) -> None:
        response = await client.get("/media", params={"run": "one", "source": "a" * 64})
        assert (response.status, response.content_type) == (200, "image/png")
        assert await response.read() == draw_png(0)
        assert (await client.get("/media", params={"run": "one", "source": "b" * 64})).status == 404

    serve(runs, work)


# -- the pages ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OWN_MODULES)
def test_no_module_can_turn_text_into_html_or_code(name: str):
    text = (FOLDER / name).read_text(encoding="utf-8")
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|javascript:"
    assert not re.findall(forbidden, text)
    assert "http://" not in text and "https://" not in text


def test_modules_are_short_and_import_what_exists():
    for name in OWN_MODULES:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 700, name
        assert text.startswith("// "), f"{name} opens with a sentence"
        for names, module in re.findall(r'^import \{([^}]*)\} from "\./([a-z_]+\.js)";$', text, re.MULTILINE):
            exported = (FOLDER / module).read_text(encoding="utf-8")
            for each in names.split(","):
                pattern = rf"^export (async function|function|const|class) {each.strip()}\b"
                assert re.search(pattern, exported, re.MULTILINE), f"{name}: {each} of {module}"


def test_the_folder_has_the_files_that_are_served_and_no_others():
    assert {file.name for file in FOLDER.iterdir()} == set(WEB_FILES)


def test_joined_modules_define_every_name_once():
    text = join_modules()
    assert not re.findall(r"^(import|export) ", text, re.MULTILINE)
    names = re.findall(r"^(?:async function|function|const|let|class) (\w+)", text, re.MULTILINE)
    assert len(names) > 60 and len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


# -- the command ----------------------------------------------------------------------------


def test_a_token_is_made_where_other_machines_can_connect():
    assert choose_token(ViewOptions(), {}) is None
    assert choose_token(ViewOptions(host="localhost"), {}) is None
    made = choose_token(ViewOptions(host="0.0.0.0"), {})
    assert made is not None and len(made) >= 32 and made != choose_token(ViewOptions(host="0.0.0.0"), {})
    assert choose_token(ViewOptions(), {"MILES_API_KEY": "given"}) == "given"


def test_the_address_that_is_printed_can_be_opened():
    assert format_address("127.0.0.1", 8050, None) == "http://127.0.0.1:8050/"
    assert "0.0.0.0" not in format_address("0.0.0.0", 8050, "abc")
    assert format_address("0.0.0.0", 8050, "abc").endswith(":8050/?token=abc")


def test_a_folder_without_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(DataError, match="There is no run at or below"):
        build_api([tmp_path])
    assert main(["view", str(tmp_path / "nothing")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["view"]) == 2
    with pytest.raises(UsageError):
        build_api([tmp_path / "nothing"])


def test_the_parity_tolerance_is_that_of_the_config(tmp_path: Path):
    (tmp_path / "config.toml").write_text("[schedule]\nparity_tolerance = 0.25\n")
    assert choose_tolerance(tmp_path) == 0.25
    (tmp_path / "config.toml").write_text("[schedule]\nno_such_option = 1\n")
    assert choose_tolerance(tmp_path) == 0.01


# -- reports --------------------------------------------------------------------------------


def read_embedded(path: Path) -> dict:
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="embedded">(.*?)</script>', text, re.DOTALL)[1])


def test_a_report_is_one_file_that_asks_nobody(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "report.html"
    assert main(["report", str(runs / "one"), "-o", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img)[^>]* (?:src|href)=", text)
    assert "default-src 'none'" in text and "unsafe" not in text.split("<style>")[0]
    values = read_embedded(output)
    assert values["runs?"]["runs"][0]["name"] == "one"
    assert values["series?name=reward&run=one"]["series"][0]["y"] == [0.1, 0.2]
    assert values["trajectory?index=0&run=one&step=3"]["branches"][0]["spans"][1]["tokens"] == len(HOSTILE)
    assert str(output) in capsys.readouterr().out


def test_text_of_a_model_cannot_end_the_script_it_is_in(runs: Path, tmp_path: Path):
    output = tmp_path / "report.html"
    main(["report", str(runs / "one"), "-o", str(output)])
    text = output.read_text(encoding="utf-8")
    assert "window.hacked" in text and "<script>window.hacked" not in text and "<img src=x" not in text
    assert text.count("<script") == text.count("</script>") == 3


def test_a_report_of_two_runs_compares_their_configs(tmp_path: Path):
    write_run(tmp_path / "one", options="lr = 0.001")
    write_run(tmp_path / "two", options="lr = 0.01")
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two"), "-o", str(output)]) == 0
    assert read_embedded(output)["config?run=one&run=two"]["difference"] == [["lr", 0.001, 0.01]]


def test_a_report_without_trajectories_has_no_text_of_a_model(runs: Path, tmp_path: Path):
    output = tmp_path / "report.html"
    main(["report", str(runs / "one"), "-o", str(output), "--max-trajectories", "0"])
    assert "window.hacked" not in output.read_text(encoding="utf-8")
    assert read_embedded(output)["steps?run=one"] == {"steps": [], "rewards": []}
