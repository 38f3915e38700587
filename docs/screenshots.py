"""Takes the pictures of the documentation: the report of a run in headless Chromium.

    offbeat run recipes/arithmetic_tiny.yaml
    python docs/screenshots.py                    # the newest run -> docs/images/report.png
    python docs/screenshots.py RUN --out DIR --all   # also dark, whole page, and as wide as a phone

Needs the package playwright (requirements/dev.txt) and a Chromium on PATH (Debian: chromium).
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from offbeat.local.folder import find_run
from offbeat.report.page import write_report

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
DESKTOP, PHONE = (1320, 1180), (390, 844)
DRAWN = """() => [...document.querySelectorAll("[data-chart]")]
    .filter((place) => place.getBoundingClientRect().top < innerHeight)
    .every((place) => place.firstElementChild)"""
"""Whether every chart in view is there: they are drawn when they come into view."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", help="id or folder of the run; default: the newest")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    parser.add_argument("--all", action="store_true", help="also dark, whole and narrow pages")
    arguments = parser.parse_args()
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if chromium is None:
        sys.exit(f"no Chromium found on PATH; looked for {', '.join(CHROMIUM)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        page = Path(scratch) / "report.html"
        write_report(find_run(arguments.run, arguments.runs), page)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        take(browser, page, arguments.out / "report.png", size=DESKTOP, theme="light")
        if arguments.all:
            for theme in ("light", "dark"):
                for name, size in (("desktop", DESKTOP), ("phone", PHONE)):
                    out = arguments.out / f"report-{name}-{theme}.png"
                    take(browser, page, out, size=size, theme=theme, whole=True)
        browser.close()


def take(
    browser: Browser,
    page: Path,
    out: Path,
    *,
    size: tuple[int, int],
    theme: str,
    whole: bool = False,
) -> None:
    """One picture; `whole`: of the page from top to bottom."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=theme, device_scale_factor=1
    )
    tab = context.new_page()
    tab.goto(page.as_uri())
    if whole:
        height = tab.evaluate("document.documentElement.scrollHeight")
        tab.set_viewport_size({"width": size[0], "height": min(height, 16_000)})
    while not tab.evaluate(DRAWN):
        tab.wait_for_timeout(200)
    tab.wait_for_timeout(1000)
    tab.screenshot(path=out)
    context.close()


if __name__ == "__main__":
    main()
