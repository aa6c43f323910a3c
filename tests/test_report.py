"""The report: whole, escaped, self-contained, and true to held_out.csv."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from torchloo import cli
from torchloo.cli.findings import MeasureRow
from torchloo.cli.measures import Measure, OuterEstimate
from torchloo.cli.report import performance
from torchloo.cli.report.pictures import roc_points

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

VOID = {"meta", "link", "img"}
N = 60


class Page(HTMLParser):
    """Text, pictures, addresses and cells of a page; fails where tags do not match."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.captions: list[str] = []
        self.pictures: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.feed(content)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "href") and value:
                self.addresses.append(value)
        if tag == "img":
            given = dict(attributes)
            assert len(given["alt"]) > 40
            self.pictures.append(base64.b64decode(given["src"].split(",", 1)[1]).decode())
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "figcaption":
            self.captions.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if "figcaption" in self.open:
            self.captions[-1] += data

    def row(self, name: str) -> list[str]:
        return next(row for row in self.rows if row and row[0] == name)


def table() -> "pd.DataFrame":
    draw = np.random.default_rng(0)
    x, z = draw.normal(size=(2, N))
    level = draw.normal(size=6)[np.arange(N) // 10]
    signal = x + 0.5 * z + level + 0.3 * draw.normal(size=N)
    return pd.DataFrame(
        {
            "x": x,
            "<i>z</i>": z,
            "always": 0,
            "number": 100 * signal,
            "answer": np.where(signal > 0, "<b>yes</b>", "no"),
            "class": np.digitize(signal, [-0.5, 0.5]),
            "site": np.arange(N) // 10,
            "w": draw.uniform(0.5, 2.0, N),
        }
    )


def about_three_centres() -> "pd.DataFrame":
    draw = np.random.default_rng(1)
    kind = np.arange(N) % 3
    x, z = draw.normal(size=(2, N)) + 2.2 * np.array([[0, 1, 0], [0, 0, 1]])[:, kind]
    return pd.DataFrame({"x": x, "z": z, "class": kind})


def written(
    folder: Path, target: str, *options: str, data: "pd.DataFrame | None" = None
) -> tuple[Page, "pd.DataFrame"]:
    data = table() if data is None else data
    data.to_csv(folder / "a & b.csv", index=False)
    used = {target, *options}
    others = [name for name in ("number", "answer", "class", "site", "w") if name in data.columns]
    drop = [f"--drop={name}" for name in others if name not in used]
    words = ["select", str(folder / "a & b.csv"), "--target", target, *drop, "--no-progress", *options]
    assert cli.main([*words, "--out", str(folder / "out")]) == 0
    content = (folder / "out" / "report.html").read_text(encoding="utf-8")
    return Page(content), pd.read_csv(folder / "out" / "held_out.csv")


def check_self_contained(page: Page) -> None:
    assert "script" not in page.tags
    assert all(address.startswith("data:") for address in page.addresses)
    assert len(page.captions) == len(page.pictures)
    assert all(len(caption) > 40 for caption in page.captions)
    for picture in page.pictures:
        svg = ElementTree.fromstring(picture)
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
        links = re.findall(r'(?:href|src)="([^"]*)"|url\(([^)]*)\)', picture)
        assert all((a or b).startswith(("#", "data:")) for a, b in links)


def test_a_regression_tells_its_errors_and_its_relevances(tmp_path):
    page, held_out = written(tmp_path, "number", "--kernel", "ard", "--outer", "5")
    check_self_contained(page)
    assert len(page.pictures) == 7
    assert "Predicting number" in page.text
    assert "a & b.csv" in page.text
    assert "Ignored as constant: 'always'" in page.text
    rmse = np.sqrt(np.mean(held_out["loo_residual"] ** 2))
    _, baseline, inner, outer = page.row("RMSE")
    assert inner == f"{rmse:.4g}"
    assert float(baseline) == pytest.approx(held_out["target"].std(ddof=0), rel=1e-3)
    assert "±" in outer
    assert "5 times, a tenth of the rows was set aside" in page.text
    assert any("<i>z</i>" in "".join(ElementTree.fromstring(svg).itertext()) for svg in page.pictures)
    worst = held_out["loo_residual"].abs().idxmax()
    assert page.rows[
        page.rows.index(["row", "true", "held-out prediction", "size of residual", "leverage"]) + 1
    ][0] == str(worst + 1)


def test_two_classes_tell_their_answers_and_no_leverage_where_there_is_none(tmp_path):
    page, held_out = written(tmp_path, "answer", "--machine", "svc", "--outer", "0")
    check_self_contained(page)
    assert page.tags.count("b") == 4  # one for each number that stands out, none from the labels
    assert "No outer estimate" in page.text
    wrong = (held_out["loo_class"] != held_out["target"]).mean()
    assert page.row("error rate") == ["error rate", page.row("error rate")[1], f"{100 * wrong:.1f} %"]
    yes, no = (page.row(label) for label in ("<b>yes</b>", "no"))
    right = ((held_out["loo_class"] == "no") & (held_out["target"] == "no")).sum()
    assert int(no[2]) == right
    assert "everage" not in page.text
    assert held_out["leverage"].isna().all()
    assert len(yes) == 4


@pytest.mark.parametrize("machine", ["kfd", "svc"])
def test_several_classes_of_every_machine_have_a_whole_report(tmp_path, machine):
    options = ("--machine", machine, "--outer", "0", "--search", "nelder-mead")
    page, held_out = written(tmp_path, "class", *options, data=about_three_centres())
    check_self_contained(page)
    wrong = (held_out["loo_class"] != held_out["target"]).mean()
    assert page.row("misclassification rate (largest output)")[2] == f"{100 * wrong:.1f} %"
    for label in range(3):
        own = held_out[held_out["target"] == label]
        counts = [int((own["loo_class"] == said).sum()) for said in range(3)]
        assert page.row(str(label))[1:4] == [str(k or "·") for k in counts]
    assert "one for each of 3 classes" in page.text
    assert any("minus the largest other output" in caption for caption in page.captions)
    assert any("against leverage" in caption for caption in page.captions) == (machine == "kfd")
    assert ("everage" in page.text) == (machine == "kfd")
    assert "each class against the others, on average over the classes" in page.text
    outputs = held_out[[f"loo_output {label}" for label in range(3)]].to_numpy()
    own = outputs[np.arange(N), held_out["target"]]
    outputs[np.arange(N), held_out["target"]] = -np.inf
    lead = own - outputs.max(1)
    top = next(k for k, row in enumerate(page.rows) if "margin of the true class" in row) + 1
    assert [int(row[0]) - 1 for row in page.rows[top : top + 8]] == np.argsort(lead)[:8].tolist()
    assert [float(row[3]) for row in page.rows[top : top + 8]] == pytest.approx(np.sort(lead)[:8], rel=1e-3)


def test_several_classes_selected_by_their_error_have_one_number_for_it(tmp_path):
    options = ("--criterion", "multiclass_error", "--search", "grid", "--outer", "0")
    page, held_out = written(tmp_path, "class", *options, data=about_three_centres())
    wrong = (held_out["loo_class"] != held_out["target"]).mean()
    name = "misclassification rate (largest output)"
    rows = [row for row in page.rows if row[0] == name]
    assert [rows[0][2], float(rows[1][1])] == [f"{100 * wrong:.1f} %", pytest.approx(wrong, rel=1e-3)]
    assert len(rows) == 2  # the estimate, and the criterion at the chosen settings
    assert "error rate" not in page.text
    assert "each class against the others" not in page.text


def test_many_classes_tell_what_they_are_mistaken_for(tmp_path):
    draw = np.random.default_rng(2)
    kind = np.arange(90) % 9
    x, z = draw.normal(size=(2, 90)) + 2.0 * np.stack([kind % 3, kind // 3])
    data = pd.DataFrame({"x": x, "z": z, "class": [f"k{k}" for k in kind]})
    page, held_out = written(tmp_path, "class", "--machine", "kfd", "--outer", "3", data=data)
    check_self_contained(page)
    assert ["true class", "rows", "wrong", "mistaken for"] in page.rows
    for label in (f"k{k}" for k in range(9)):
        own = held_out[held_out["target"] == label]["loo_class"]
        _, rows, wrong, mistaken = page.row(label)
        assert (rows, wrong) == ("10", f"{(own != label).mean():.0%}")
        most = own[own != label].value_counts()
        assert mistaken == "·" if most.empty else f"({most.iloc[0]})" in mistaken
    assert any("splits" in caption and "overfit" in caption for caption in page.captions)


def test_several_classes_with_clusters_compare_both_ways_of_leaving_out(tmp_path):
    page, held_out = written(tmp_path, "class", "--clusters", "site", "--outer", "100")
    check_self_contained(page)
    loo, lco = ((held_out[f"{way}_class"] != held_out["target"]).mean() for way in ("loo", "lco"))
    shown = page.row("misclassification rate (largest output)")[2:4]
    assert shown == [f"{100 * loo:.1f} %", f"{100 * lco:.1f} %"]
    assert lco > loo
    assert "Each of the 6 clusters was set aside in turn" in page.text
    assert "one for each of 3 classes" in page.text
    assert any("trained without the cluster" in caption for caption in page.captions)


def test_a_sparse_weighted_machine_is_described(tmp_path):
    page, _ = written(
        tmp_path, "number", "--machine", "sparse", "--basis", "12", "--weights", "w", "--outer", "0"
    )
    check_self_contained(page)
    assert page.row("basis")[1] == "12"
    assert page.row("weights")[1].startswith("0.5")


def test_points_of_a_roc_curve_move_ties_together():
    positive = np.array([True, False, True, False])
    false_rate, true_rate = roc_points(positive, np.array([2.0, 1.0, 1.0, 0.0]))
    assert false_rate.tolist() == [0, 0, 0.5, 1]
    assert true_rate.tolist() == [0, 0.5, 1, 1]
    assert np.trapezoid(true_rate, false_rate) == 0.875  # the pair that ties counts half


@pytest.mark.parametrize(
    ("mean", "stderr", "told"), [(0.30, 0.01, True), (0.21, 0.01, False), (0.30, 0.05, False)]
)
def test_a_flattering_choice_is_told_where_it_is_neither_small_nor_chance(mean, stderr, told):
    measure = Measure("error rate", lambda held_out: held_out.outputs)
    row = MeasureRow(
        measure, baseline=0.5, loo=0.2, lco=None, outer=OuterEstimate(np.array([mean]), mean, stderr)
    )
    assert performance._overfits(row, row.outer) is told
