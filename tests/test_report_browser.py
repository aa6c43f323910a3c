"""The report in a real browser: no error, no request, pictures that are there, on a phone and on paper."""

from collections.abc import Iterator
from pathlib import Path

import browser
import numpy as np
import pytest

from torchloo import cli

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

PROGRAM = browser.find()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")

PICTURES = """Promise.all(Array.from(document.images, image => image.decode().then(() => {
    const box = image.getBoundingClientRect();
    return [image.naturalWidth, image.naturalHeight, box.width, box.height];
})))"""


def written(folder: Path, kind: str) -> Path:
    """The report of a small problem of one kind; its names try to break out of the page."""
    draw = np.random.default_rng(0)
    n = 40
    x, z = draw.normal(size=(2, n))
    signal = x + 0.5 * z + 0.2 * draw.normal(size=n)
    evil = '<script>alert(1)</script> $x_1$ & "ü" 日本'
    targets = {
        "regression": signal,
        "two classes": np.where(signal > 0, "<b>yes", "no & no"),
        "several classes with clusters": draw.permutation(["a", "b", "c", "d"] * 10),
    }
    table = pd.DataFrame({evil: x, "z": z, "group": np.arange(n) // 5, "target": targets[kind]})
    table.to_csv(folder / "table.csv", index=False)
    words = ["select", str(folder / "table.csv"), "--target", "target", "--kernel", "ard", "--no-progress"]
    words += ["--clusters", "group"] if "clusters" in kind else ["--drop", "group"]
    assert cli.main([*words, "--outer", "4", "--out", str(folder / "out")]) == 0
    return folder / "out" / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    assert PROGRAM is not None
    with browser.Browser(PROGRAM, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.mark.parametrize("kind", ["regression", "two classes", "several classes with clusters"])
def test_the_report_loads_by_itself_and_shows_its_pictures(page, tmp_path, kind):
    report = written(tmp_path, kind)
    page.events.clear()
    page.open(report)
    sizes = page.evaluate(PICTURES)
    assert len(sizes) >= 6
    assert all(min(size) > 50 for size in sizes), sizes
    urls = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert report.as_uri() in urls
    assert [url for url in urls if url != report.as_uri() and not url.startswith("data:")] == []
    said = [
        event
        for event in page.events
        if event["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    ]
    assert said == []
    assert page.evaluate("document.scripts.length") == 0


def test_the_probe_sees_errors_requests_and_missing_pictures(page, tmp_path):
    """What the test above looks for would not escape it."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<script>console.error('no'); throw 1</script><img src='gone.png'><img src='http://127.0.0.1:9/x.png'>"
    )
    page.events.clear()
    page.open(bad)
    methods = {event["method"] for event in page.events}
    assert {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"} <= methods
    urls = [
        event["params"]["request"]["url"]
        for event in page.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert "http://127.0.0.1:9/x.png" in urls
    assert page.evaluate("Array.from(document.images, image => image.naturalWidth)") == [0, 0]


def test_the_report_fits_a_phone_and_prints(page, tmp_path):
    report = written(tmp_path, "several classes with clusters")
    page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=2, mobile=True)
    page.open(report)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    widest = max(width for _, _, width, _ in page.evaluate(PICTURES))
    assert 250 < widest <= 360
    page.call("Emulation.clearDeviceMetricsOverride")
    assert len(page.call("Page.printToPDF")["data"]) > 10_000
