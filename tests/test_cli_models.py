"""The file model.pt: damaged in every field, it is refused in one line or still predicts the same."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command import require_one_line_error, run

import torchloo as tl
from torchloo.cli import report
from torchloo.cli.model_file import checksum

pd = pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

N = 40
KINDS = {
    "lssvm": ("good", ["--kernel", "ard"]),
    "rls": ("price", ["--kernel", "linear"]),
    "sparse": ("price", ["--basis", "7"]),
    "kfd": ("grade", ["--search", "nelder-mead"]),
    "svc": ("grade", ["--kernel", "poly2", "--search", "nelder-mead"]),
}
DELETE = object()
NOW = tl.__version__


def table() -> "pd.DataFrame":
    draw = np.random.default_rng(0)
    x, z = draw.normal(size=(2, N))
    shop = draw.choice(["north", "south", "west"], N)
    level = np.sin(x) + 0.5 * z + (shop == "west") + 0.1 * draw.normal(size=N)
    grade = np.array(["low", "middle", "high"])[np.digitize(level, [-0.3, 0.7])]
    good = np.where(level > 0.3, "yes", "no")
    comma = [f"{value:.2f}".replace(".", ",") for value in z]
    return pd.DataFrame(
        {"x": x, "z": comma, "shop": shop, "one": 1, "price": level, "good": good, "grade": grade}
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each machine, a new table, and what the models say of it."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(report, "page", lambda findings, source: "")
        table().to_csv("data.csv", index=False, sep=";")
        table()[["x", "z", "shop"]].head(3).to_csv("new.csv", index=False, sep=";")
        for kind, (target, options) in KINDS.items():
            drop = [
                word for name in ("price", "good", "grade") if name != target for word in ("--drop", name)
            ]
            words = ["data.csv", "--target", target, *drop, "--outer", "0", "--no-progress", "--out", kind]
            assert run("select", *words, "--machine", kind, *options) == 0
            assert run("predict", f"{kind}/model.pt", "new.csv", "--out", f"{kind}.csv") == 0
    return root


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every field, through dictionaries and sequences."""
    if path:
        yield path
    if isinstance(value, dict | list | tuple):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy with one field replaced, or deleted."""
    if not path:
        return new
    parts = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    if path[1:] or new is not DELETE:
        parts[path[0]] = replaced(parts[path[0]], path[1:], new)
    else:
        del parts[path[0]]
    return parts if isinstance(value, dict) else tuple(parts.values())


def spoilt(tensor: torch.Tensor, number: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.reshape(-1)[0] = number
    return tensor


def malformed(value: Any) -> list[Any]:
    """Values of another type, shape or dtype, and numbers that are none."""
    others = [None, "text", -1, 2.5, True, {}, torch.zeros(2), torch.zeros(2).to_sparse()]
    others += [] if isinstance(value, tuple) else [[]]
    wrong = [DELETE, *(other for other in others if type(other) is not type(value))]
    if isinstance(value, torch.Tensor):
        wrong += [value[None], value.reshape(-1).repeat(2), value.float(), value.to(torch.complex128)]
        wrong += [value.long(), value.to_sparse(), value.to("meta"), value.repeat(2, *[1] * value.ndim)]
        wrong += [value[..., :0], value[:-1], value.mT.contiguous()[:, :-1]] if value.ndim == 2 else []
        wrong += (
            [spoilt(value, number) for number in (np.nan, np.inf)] if value.dtype.is_floating_point else []
        )
    elif isinstance(value, list | tuple):
        wrong += [value[:-1], [*value, *value[-1:]], [*value, None], [*value, "more"], [*value, 1.0]]
    elif isinstance(value, dict):
        wrong += [{**value, "more": 1}, {**value, 1: 1}, dict.fromkeys(value)]
    elif isinstance(value, float):
        wrong += [np.nan, np.inf]
    return wrong


def changed(value: Any) -> list[Any]:
    """Values that could be right, and are not."""
    if isinstance(value, torch.Tensor):
        infinity = torch.tensor(torch.inf, dtype=torch.float64)
        return [~value] if value.dtype is torch.bool else [value.nextafter(infinity), -value - 1]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return [value + "x", "matern", "rls", ""]
    if isinstance(value, int | float):
        return [value + 1, value * 1.0000001]
    return []


def check(root: Path, kind: str, content: Any, capsys: Any, place: Any, refused: bool) -> None:
    """Exit code 2 and one line, or the predictions of the whole model."""
    torch.save(content, root / "damaged.pt")
    (root / "p.csv").unlink(missing_ok=True)
    capsys.readouterr()
    code = run("predict", root / "damaged.pt", root / "new.csv", "--out", root / "p.csv")
    out, err = capsys.readouterr()
    where = f"{place}: {err}"
    if code == 0 and not refused:
        assert (root / "p.csv").read_bytes() == (root / f"{kind}.csv").read_bytes(), where
        assert err == "", where
        return
    assert code == 2, where
    assert out == "", where
    assert len(err.splitlines()) == 1, where
    assert "damaged.pt" in err or "do not match those of the model" in err, where
    assert not (root / "p.csv").exists(), where


@pytest.mark.parametrize("kind", KINDS)
def test_every_malformed_field_is_refused_even_if_the_checksum_is_right(root, capsys, kind):
    """As in a file that was made by hand."""
    whole = torch.load(root / kind / "model.pt", weights_only=True)
    for place in places(whole):
        for wrong in malformed(at(whole, place)):
            content = replaced(whole, place, wrong)
            if place != ("sha256",) and isinstance(content, dict):
                try:
                    content["sha256"] = checksum(content)
                except (TypeError, RuntimeError):  # of what cannot be in a model
                    content["sha256"] = ""
            check(root, kind, content, capsys, (place, wrong), refused=False)


@pytest.mark.parametrize("kind", KINDS)
def test_every_changed_value_is_refused(root, capsys, kind):
    """Every digit of a number counts, by the checksum."""
    whole = torch.load(root / kind / "model.pt", weights_only=True)
    for place in places(whole):
        for wrong in changed(at(whole, place)):
            if isinstance(wrong, torch.Tensor) or wrong != at(whole, place):
                check(root, kind, replaced(whole, place, wrong), capsys, (place, wrong), refused=True)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (("machine", "basis"), 0, "basis must be positive for a sparse machine"),
        (("state", "support"), lambda value: value.float(), "support must be torch.float64 of shape (7, 5)"),
        (("state", "coef"), lambda value: value * np.nan, "coef must be finite"),
        (("state", "bias"), lambda value: value[:, None], "bias must be torch.float64 of shape (1,), got"),
        (
            ("state", "log_reg"),
            lambda value: value + 1e4,
            "log_reg must be the logarithm of a positive number",
        ),
        (("schema", "centre"), lambda value: value[:-1], "centre must be 5 finite numbers"),
        (("schema", "scale"), lambda value: (-1.0, *value[1:]), "scale must be positive"),
        (("schema", "columns"), DELETE, "schema must have the fields target, columns, centre"),
        (("sha256",), "0" * 64, "its checksum does not match"),
        (
            ("version",),
            1,
            f"by torchloo {NOW} and has format version 1; torchloo {NOW} reads version 3",
        ),
        (("version",), "new\nline", "has format version unknown"),
    ],
)
def test_what_is_wrong_is_said(root, capsys, place, wrong, message):
    whole = torch.load(root / "sparse" / "model.pt", weights_only=True)
    content = replaced(whole, place, wrong(at(whole, place)) if callable(wrong) else wrong)
    torch.save(content, root / "damaged.pt")
    assert run("predict", root / "damaged.pt", root / "new.csv", "--out", root / "p.csv") == 2
    require_one_line_error(capsys, message)


def test_a_file_with_a_wrong_byte_or_a_missing_end_is_refused(root, capsys):
    kind = "lssvm"
    whole = (root / kind / "model.pt").read_bytes()
    for k, place in enumerate(np.linspace(0, len(whole) - 1, 80).astype(int)):
        content = bytearray(whole)
        content[place] ^= 1 << k % 8
        for damaged in (bytes(content), whole[:place]):
            (root / "damaged.pt").write_bytes(damaged)
            code = run("predict", root / "damaged.pt", root / "new.csv", "--out", root / "p.csv")
            err = capsys.readouterr().err
            if code == 0:  # a byte that says nothing, such as one that fills up
                assert (root / "p.csv").read_bytes() == (root / f"{kind}.csv").read_bytes()
                continue
            assert code == 2
            assert len(err.splitlines()) == 1


def test_rows_too_far_away_to_be_predicted_are_refused(root, tmp_path, capsys):
    (root / "far.csv").write_text("x;z;shop\n1;1;west\n1e200;1;west\n")
    model = root / "svc" / "model.pt"
    assert run("predict", model, root / "far.csv", "--out", tmp_path / "p.csv") == 2
    assert "the prediction of row 2 is not finite" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_checksum_does_not_depend_on_order_nor_on_lists(root):
    whole = torch.load(root / "sparse" / "model.pt", weights_only=True)
    other = copy.deepcopy(dict(reversed(whole.items())))
    other["schema"]["centre"] = list(other["schema"]["centre"])
    assert checksum(other) == whole["sha256"]
