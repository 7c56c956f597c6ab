"""The site's hooks: navigation and llms.txt from the index, links out of docs/, lists, drawings."""

from pathlib import Path

from scripts.docs_site import hooks

INDEX = """# Miles

It trains
models.

## Start

- [Install](install.md): how.
- [On a CPU](quick_start/cpu.md)

## Guides

### Training

- [Data](data.md): rows.

## Empty

text
"""


def test_the_navigation_is_the_index():
    assert hooks.build_nav(INDEX) == [
        {"Home": "index.md"},
        {"Start": [{"Install": "install.md"}, {"On a CPU": "quick_start/cpu.md"}]},
        {"Guides": [{"Training": [{"Data": "data.md"}]}]},
    ]


def test_llms_txt_has_every_page_with_its_line():
    start = "## Start\n\n- [Install](install.md): how.\n- [On a CPU](quick_start/cpu.md)\n"
    expected = f"# Miles\n\n> It trains models.\n\n{start}\n## Guides\n\n- [Data](data.md): rows.\n"
    assert hooks.build_llms_txt(INDEX) == expected


def test_every_page_of_the_project_is_in_llms_txt():
    docs = hooks.ROOT / "docs"
    text = hooks.build_llms_txt((docs / "index.md").read_text(encoding="utf-8"))
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*.md") if page.name != "index.md"]
    assert len(pages) > 80 and not [page for page in pages if f"]({page})" not in text]


def test_a_link_out_of_docs_leads_to_a_page_of_the_site():
    text = "[code](../examples/library/grpo.py) [page](train.md#sft)\n```text\n[code](../examples/x)\n```\n"
    rewritten = hooks.rewrite_links(text, "docs/library.md")
    assert rewritten == text.replace("../examples/library/grpo.py", "repository/examples/library/grpo.py.md", 1)
    folder = hooks.rewrite_links("[a](../../examples/custom_reward)", "docs/tutorials/custom.md")
    assert folder == "[a](../repository/examples/custom_reward/README.md)"


def test_a_link_with_the_name_of_its_file_gets_the_title():
    assert hooks.rewrite_links("[data.md](data.md#rows)", "docs/train.md") == "[Data](data.md#rows)"
    assert hooks.rewrite_links("[reward.py](reward.py)", "examples/custom_reward/README.md").startswith("[reward.py](")


def test_a_page_outside_links_back_into_docs():
    back = hooks.rewrite_links(
        "[rewards](../../docs/rewards.md) [web](https://example.org)", "examples/custom_reward/README.md"
    )
    assert back == "[rewards](../../../rewards.md) [web](https://example.org)"


def test_linked_files_are_collected_with_those_they_link_to():
    found = hooks.collect_outside(["docs/index.md", "docs/rewards.md", "docs/first_run.md"])
    assert "CONTRIBUTING.md" in found and "examples/custom_reward" in found
    assert "examples/custom_reward/reward.py" in found  # linked by the README of its folder
    assert "```python" in hooks.render_outside("examples/custom_reward/reward.py")
    assert not [path for path in found if path.startswith("docs/")]


def test_lists_are_indented_by_four_spaces():
    text = "Text:\n- one\n  more\n\n1. first\n   ```bash\n   ls\n   ```\nend"
    assert hooks.indent_lists(text) == "Text:\n\n- one\n    more\n\n1. first\n    ```bash\n    ls\n    ```\nend"


def test_code_blocks_are_not_taken_for_lists():
    text = "text\n```text\n- not a list\n  as it is\n```"
    assert hooks.indent_lists(text) == text


def test_a_drawing_is_put_into_its_page(tmp_path: Path):
    (tmp_path / "drawings").mkdir()
    (tmp_path / "drawings" / "a.svg").write_text("<svg/>\n")
    page = hooks.put_drawings_in("![A box](drawings/a.svg)\n", tmp_path)
    assert page == '<div class="drawing" role="img" aria-label="A box"><svg/></div>\n'


def test_the_script_of_the_search_is_the_sites_own():
    html = f'<script src="{hooks.SHIM}"></script>'
    assert hooks.take_shim_from_here(html, "tutorials/math.html") == '<script src="../site/iframe-worker.js"></script>'
    assert (hooks.ROOT / "docs" / "site" / "iframe-worker.js").is_file()
