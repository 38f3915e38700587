"""The report in a real Chromium: it asks for nothing, runs no script but its own, and its table can be searched."""

import json
import shutil
from pathlib import Path

import pytest

from offbeat.report.page import write_report

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
RESUMED = Path(__file__).parents[2] / "data" / "resumed_run"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (Debian: chromium)"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The report of a run one of whose completions tries to run a script."""
    folder = shutil.copytree(RESUMED, tmp_path_factory.mktemp("run") / "resumed_run")
    samples = folder / "samples.jsonl"
    last = json.loads(samples.read_text().split("\n")[-2])
    evil = "needle </script><script>document.title='broken'</script><img src=x onerror=alert(1)>"
    with samples.open("a") as file:
        file.write(json.dumps(last | {"completion": evil, "reward": 7.5, "step": 14}) + "\n")
    out = folder / "report.html"
    write_report(folder, out)
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(color_scheme="light", viewport={"width": 1200, "height": 900})
        tab.requests, tab.messages = [], []
        tab.on("request", lambda request: tab.requests.append(request.url))
        tab.on("console", lambda message: note(tab, message))
        tab.on("pageerror", lambda error: tab.messages.append(str(error)))
        tab.goto(out.as_uri())
        yield tab
        browser.close()


def note(tab, message):
    """Bokeh tells of its progress; that is no complaint."""
    if message.type in {"error", "warning"}:
        tab.messages.append(f"{message.type}: {message.text}")


def rows(tab):
    return tab.locator("#rows tbody tr")


def test_the_page_is_quiet_and_asks_for_nothing(page):
    playwright.expect(page.locator("#chart-reward > *")).to_have_count(1)
    for chart in page.locator("[data-chart]").all():
        chart.scroll_into_view_if_needed()
        playwright.expect(chart.locator("> *")).to_have_count(1)
    assert [url for url in page.requests if not url.startswith(("file:", "data:"))] == []
    assert page.messages == []
    assert "broken" not in page.title()


def test_the_table_can_be_searched_filtered_and_sorted(page):
    page.fill("#search", "NEEDLE")
    playwright.expect(rows(page)).to_have_count(1)
    assert "<img src=x" in rows(page).first.inner_text()
    assert page.locator("#rows img").count() == 0
    page.click("#clear")
    playwright.expect(page.locator("#count")).to_contain_text("1 to 25 of")
    page.select_option("#kind", "greedy")
    playwright.expect(page.locator("#rows .kind").first).to_have_text("greedy")
    assert set(page.locator("#rows .kind").all_inner_texts()) == {"greedy"}
    page.click("#clear")
    page.locator("#rows th button", has_text="reward").click()
    page.locator("#rows th button", has_text="reward").click()
    playwright.expect(page.locator("#rows .reward").first).to_have_text("7.5")


def test_the_theme_can_be_switched(page):
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    page.click("#theme")
    assert page.evaluate(back) != light
    playwright.expect(page.locator("#chart-reward > *")).to_have_count(1)
    assert page.messages == []
