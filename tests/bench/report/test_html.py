"""The page in a real browser: sorting, filtering, the timeline; no request, no complaint, no markup from data."""

from __future__ import annotations

import html.parser
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

_spec = importlib.util.spec_from_file_location("browser", Path(__file__).with_name("browser.py"))
assert _spec is not None
assert _spec.loader is not None
browser_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(browser_module)

# Where CI is set these run and fail without it.
chromium = pytest.mark.skipif(
    browser_module.CHROMIUM is None and not os.environ.get("CI"),
    reason="no Chromium is installed (scripts/install_report_tools.sh)",
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    made = browser_module.Browser(tmp_path_factory.mktemp("browser"))
    yield made
    made.close()


def _page(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


COLUMN = """(() => { const t = document.querySelector('#table-%s table');
  const i = Array.from(t.tHead.rows[0].cells, c => c.textContent.trim()).indexOf('%s');
  return Array.from(t.tBodies[0].rows).filter(r => !r.hidden).map(r => r.cells[i].textContent.trim()); })()"""


def _column(browser: Any, table: str, column: str) -> list[str]:
    """The texts of a column, of the rows that are shown."""
    found: list[str] = browser.run(COLUMN % (table, column))
    return found


def _focus_head(browser: Any, table: str, column: str) -> None:
    heads = f"document.querySelectorAll('#table-{table} th button')"
    browser.run(f"Array.from({heads}).find(b => b.textContent === '{column}').focus()")


@chromium
def test_a_table_sorts_by_numbers_with_the_keyboard(browser: Any, made: Path) -> None:
    browser.open(made / "report.html")
    table = "2-throughput-s1-m4"
    _focus_head(browser, table, "samples/s")
    browser.key("Enter", "\r")
    up = _column(browser, table, "samples/s")
    numbers = [float(text.split()[0]) for text in up if text[0].isdigit()]
    assert numbers == sorted(numbers)
    assert len(numbers) > 8
    # What failed has no number and stands behind, either way.
    assert not any(text[0].isdigit() for text in up[len(numbers) :])
    browser.key("Enter", "\r")
    down = _column(browser, table, "samples/s")
    assert [float(text.split()[0]) for text in down[: len(numbers)]] == sorted(numbers, reverse=True)
    assert browser.run("document.activeElement.closest('th').getAttribute('aria-sort')") == "descending"
    assert browser.complaints() == []


@chromium
def test_a_table_filters(browser: Any, made: Path) -> None:
    browser.open(made / "report.html")
    table = "2-throughput-s1-m4"
    everything = _column(browser, table, "library")
    browser.run(f"document.querySelector('#table-{table} input.filter').focus()")
    browser.call("Input.insertText", text="DeepSpeed oom")
    assert _column(browser, table, "samples/s") == ["OOM"]
    said = f"document.querySelector('#table-{table} output').value"
    assert browser.run(said) == f"1 of {len(everything)} rows"
    browser.run(f"document.querySelector('#table-{table} input.filter').select()")
    browser.key("Backspace", code=8)
    assert _column(browser, table, "library") == everything


def _view(browser: Any) -> list[float]:
    """From, to and length of what the timeline shows, in ms."""
    text = browser.run("document.querySelector('#timeline output').value")
    return [float(x) for x in re.findall(r"[\d.]+", text)]


@chromium
def test_the_timeline_zooms_and_pans_by_keyboard_and_mouse(browser: Any, made: Path) -> None:
    browser.open(made / "report.html")
    whole = _view(browser)
    assert whole[0] == 0
    assert whole[1] == whole[2] > 100
    assert browser.run("document.querySelectorAll('#timeline rect').length") == 16
    browser.run("document.querySelector('#timeline svg').focus()")
    browser.key("+", "+")
    start, end, _ = _view(browser)
    assert end - start == pytest.approx(whole[2] / 2, abs=0.01)
    browser.key("ArrowRight")
    assert _view(browser)[0] == pytest.approx(start + 0.2 * (end - start), abs=0.01)
    browser.key("ArrowLeft")
    browser.key("ArrowLeft")
    assert _view(browser)[0] == pytest.approx(start - 0.2 * (end - start), abs=0.01)
    browser.key("0", "0")
    assert _view(browser) == whole
    box = browser.run(
        "(r => [r.left, r.top, r.width, r.height])(document.querySelector('#timeline svg').getBoundingClientRect())"
    )
    x, y = box[0] + box[2] / 2, box[1] + box[3] / 2
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100)
    zoomed = _view(browser)
    assert zoomed[1] - zoomed[0] == pytest.approx(0.8 * whole[2], abs=0.01)
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x + 60, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x + 60, y, button="left")
    moved = _view(browser)
    assert moved[0] < zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0], abs=0.01)
    assert browser.complaints() == []


@chromium
@pytest.mark.parametrize("name", ["made", "odd"])
def test_nothing_is_asked_for_and_nothing_complains(browser: Any, name: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(name) / "report.html"
    browser.open(path)
    browser.run("document.querySelectorAll('th button').forEach(b => b.click())")
    assert browser.complaints() == []
    assert [url for url in browser.requests() if not url.startswith("data:")] == [path.as_uri()]
    late = "new Promise(done => { window.dispatchEvent(new Event('beforeprint')); const all = [...document.images]; \
        Promise.all(all.map(i => i.decode())).then(() => done(all.filter(i => !i.naturalWidth).length)); })"
    answer = browser.call("Runtime.evaluate", expression=late, awaitPromise=True, returnByValue=True)
    assert answer["result"]["value"] == 0
    assert browser.run("document.scripts.length - document.querySelectorAll('script[type]').length") == 1


@chromium
def test_light_and_dark(browser: Any, made: Path) -> None:
    seen = []
    for dark in (False, True):
        browser.open(made / "report.html", dark=dark)
        seen.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]


class _Links(html.parser.HTMLParser):
    """Every attribute that could load something, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.json: dict[str, str] = {}
        self.within = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.links += [value or "" for key, value in attrs if key in ("href", "src", "data-src")]
        self.within = found.get("id") or "" if tag == "script" and found.get("type") == "application/json" else ""
        assert not any(key.startswith("on") for key in found)

    def handle_data(self, data: str) -> None:
        if self.within:
            self.json[self.within] = self.json.get(self.within, "") + data


def _parsed(folder: Path) -> _Links:
    parser = _Links()
    parser.feed(_page(folder))
    return parser


@pytest.mark.parametrize("name", ["made", "odd"])
def test_links_lead_to_records_alone(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    links = _parsed(folder).links
    records = [link for link in links if not link.startswith(("#", "data:"))]
    assert {link.partition("/")[0] for link in records} == {"records"}
    assert {unquote(link) for link in records} == {f"records/{p.name}" for p in (folder / "records").glob("*.json")}


def test_data_never_become_markup(odd: Path) -> None:
    page = _page(odd)
    assert '<script>alert("x")' not in page
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;" in page
    assert {"b", "i"}.isdisjoint(_parsed(odd).tags)


def test_the_timeline_is_the_step_of_the_account(made: Path) -> None:
    spans = {key: json.loads(text) for key, text in _parsed(made).json.items()}
    assert spans
    for rows in spans.values():
        assert len(rows) == 16
        assert {kind for _, kind, *_ in rows} == {"forward", "backward"}


def test_synthetic_stands_in_the_page(made: Path) -> None:
    page = _page(made)
    assert page.count("SYNTHETIC: made up, not measured") > 20
    assert page.count('<section class="table made-up"') == page.count('<section class="table')
