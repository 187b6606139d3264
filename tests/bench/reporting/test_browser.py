"""The page in a real browser: light and dark, by the system's choice and by the reader's. Nothing is loaded or run.

NORIA_REQUIRE_TOOLS=1 makes a missing browser a failure.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import numpy as np
import pytest

from noria_bench.reporting import palette
from noria_bench.reporting.loaded import load_sources
from noria_bench.reporting.stylesheet import STYLESHEET
from support.bench_results import write_bench_result

pytestmark = pytest.mark.slow
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PAGES = {"light": "#f5f6f8", "dark": "#0f1217"}
TITLE = "Synthetic runs"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    if BROWSER is None:
        if os.environ.get("NORIA_REQUIRE_TOOLS") == "1":
            pytest.fail("chromium must be installed: NORIA_REQUIRE_TOOLS is 1")
        pytest.skip("needs chromium")
    pytest.importorskip("matplotlib")
    from noria_bench.reporting.page import html_report

    folder = tmp_path_factory.mktemp("results") / "mixed"
    write_bench_result(folder, num_repeats=2, has_failures=True, has_capacities=True)
    path = folder / "report.html"
    path.write_text(html_report(load_sources([folder]), TITLE))
    return path


def run_browser(tmp_path, page, *arguments):
    command = [
        *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--no-first-run"),
        *(f"--user-data-dir={tmp_path / 'profile'}", *arguments, page.as_uri()),
    ]
    return subprocess.run(command, check=True, timeout=120, capture_output=True, text=True, cwd=tmp_path)


def screenshot(tmp_path, page, scheme, width=1280):
    """[height, width, 3], 0 to 255."""
    from matplotlib.image import imread

    preferred = 0 if scheme == "dark" else 1
    size, image = f"--window-size={width},5200", f"--screenshot={tmp_path / 'page.png'}"
    run_browser(tmp_path, page, f"--blink-settings=preferredColorScheme={preferred}", size, image)
    return (imread(tmp_path / "page.png")[:, :, :3] * 255).round().astype(int)


def share_of(pixels, colour):
    """Of pixels that have just this colour."""
    wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    return float((np.abs(pixels - wanted).max(axis=2) <= 1).mean())


def check_scheme(pixels, scheme):
    other = "light" if scheme == "dark" else "dark"
    assert share_of(pixels, PAGES[scheme]) > 0.05
    assert share_of(pixels, PAGES[other]) < 0.001
    assert share_of(pixels, getattr(palette.SURFACE, scheme)) > 0.4
    for label in ("static", "dynamic", "inflight"):
        colour = palette.Palette([]).colour(label)
        assert share_of(pixels, getattr(colour, scheme)) > 0.0005, label
        assert share_of(pixels, getattr(colour, other)) < 0.0001, label


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400], ids=["laptop", "phone"])
def test_charts_are_drawn_in_the_systems_colours(report, tmp_path, scheme, width):
    assert all(page in STYLESHEET for page in PAGES.values())
    pixels = screenshot(tmp_path, report, scheme, width)
    check_scheme(pixels, scheme)
    # the page's own margin to the right: tables and charts scroll in boxes of their own
    assert np.ptp(pixels[:, -4:].reshape(-1, 3), axis=0).max() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_reader_may_choose_otherwise(report, tmp_path, scheme):
    other = "dark" if scheme == "light" else "light"
    text = report.read_text()
    chosen = text.replace(' id="theme-auto" checked', ' id="theme-auto"').replace(
        f' id="theme-{scheme}"', f' id="theme-{scheme}" checked'
    )
    assert chosen != text
    (tmp_path / "chosen.html").write_text(chosen)
    check_scheme(screenshot(tmp_path, tmp_path / "chosen.html", other), scheme)


def test_the_browser_takes_the_page_for_what_it_is(report, tmp_path):
    document = run_browser(tmp_path, report, "--dump-dom").stdout
    assert f"<title>{TITLE}</title>" in document
    assert "<script" not in document
    assert "onload=&quot;alert" in document or 'onload="alert(2)" ' in document
    # nothing was moved out of a table or closed by force
    assert document.count("<svg") == report.read_text().count("<svg")
    assert document.count("<tr") == report.read_text().count("<tr")
