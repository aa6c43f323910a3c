"""Tables: what is read from files, how columns are told apart and coded, and what is refused."""

import json

import numpy as np
import pytest

pd = pytest.importorskip("pandas")

from torchloo.cli.prepare import Roles, prepare  # noqa: E402
from torchloo.cli.reading import TableError, read_table  # noqa: E402
from torchloo.cli.schema import Schema  # noqa: E402

N = 12


def frame(**columns: object) -> "pd.DataFrame":
    base = {
        "x": np.arange(N, dtype=float) ** 2,
        "colour": ["red", "green", "blue", "red"] * 3,
        "y": np.arange(N) * 1.5,
    }
    return pd.DataFrame({**base, **columns})


def inputs_of(table: "pd.DataFrame", **roles: object) -> list[str]:
    return prepare(table, Roles("y", **roles)).schema.inputs


def test_numbers_are_standardised_and_text_has_an_input_for_each_level():
    prepared = prepare(frame(), Roles("y"))
    assert prepared.schema.inputs == ["x", "colour=blue", "colour=green", "colour=red"]
    np.testing.assert_allclose(prepared.X.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(prepared.X.std(0, ddof=1), 1)
    np.testing.assert_allclose(prepared.y, np.arange(N) * 1.5)
    red = np.array([colour == "red" for colour in frame()["colour"]])
    assert len(set(prepared.X[red, 3])) == len(set(prepared.X[~red, 3])) == 1


def test_text_with_two_levels_is_one_input_and_booleans_are_numbers():
    table = frame(colour=["a", "b"] * 6, flag=[True, False, True] * 4)
    assert inputs_of(table) == ["x", "colour=b", "flag"]


def test_constant_columns_and_names_are_left_out_and_reported():
    table = frame(one=1.0, same="z", name=[f"row {i}" for i in range(N)])
    prepared = prepare(table, Roles("y"))
    assert "one" not in "".join(prepared.schema.inputs)
    assert prepared.notes == (
        "ignored as constant: 'one', 'same'",
        "column 'name' is text with 12 distinct values in 12 rows: ignored",
    )


def test_copies_of_rows_are_reported_where_they_are_no_chance():
    draw = np.random.default_rng(0)
    table = pd.DataFrame({"x": draw.normal(size=40), "y": draw.normal(size=40), "g": np.arange(40) // 2})
    assert prepare(table, Roles("y")).notes == ()
    table.loc[7, ["x", "y"]] = table.loc[6, ["x", "y"]]
    (note,) = prepare(table, Roles("y", drop=("g",))).notes
    assert note.startswith("1 row is a duplicate of another")
    assert prepare(table, Roles("y", clusters="g")).notes == ()
    coarse = pd.DataFrame({"x": [1.5, 2.5] * 20, "y": [3.5, 4.5, 5.5, 6.5] * 10})
    assert prepare(coarse, Roles("y")).notes == ()


def test_dropped_cluster_and_weight_columns_are_no_inputs():
    table = frame(group=["a", "b"] * 6, w=np.arange(1.0, N + 1))
    prepared = prepare(table, Roles("y", clusters="group", weights="w", drop=("colour",)))
    assert prepared.schema.inputs == ["x"]
    assert prepared.clusters.tolist() == ["a", "b"] * 6
    np.testing.assert_allclose(prepared.weight, table["w"])


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (np.arange(N) * 0.5, ()),
        (np.arange(N), ()),  # whole numbers, but too many of them for classes
        ([0, 1] * 6, ("0", "1")),
        ([0.0, 1.0] * 6, ("0", "1")),
        ([-1, 1] * 6, ("-1", "1")),
        ([0.25, 0.5] * 6, ("0.25", "0.5")),
        ([True, False] * 6, ("False", "True")),
        (["no", "yes"] * 6, ("no", "yes")),
        (["c", "a", "b"] * 4, ("a", "b", "c")),
    ],
)
def test_the_task_is_told_from_the_target(values, labels):
    assert prepare(frame(y=values), Roles("y")).schema.labels == labels


def test_few_whole_numbers_are_classes_in_their_order_unless_told_otherwise():
    table = pd.DataFrame({"x": np.arange(20.0), "y": [2, 10] * 9 + [9, 9]})
    prepared = prepare(table, Roles("y"))
    assert prepared.schema.labels == ("2", "9", "10")
    assert "--task regression" in prepared.notes[0]
    assert prepare(table, Roles("y", task="regression")).schema.labels == ()


def test_codes_of_two_and_of_several_classes():
    two = prepare(frame(y=["no", "yes"] * 6), Roles("y"))
    assert two.y.tolist() == [-1.0, 1.0] * 6
    three = prepare(frame(y=["c", "a", "b"] * 4), Roles("y"))
    assert three.y[:3].tolist() == [[-1, -1, 1], [1, -1, -1], [-1, 1, -1]]


def test_a_schema_survives_plain_data_and_codes_a_new_table_alike():
    prepared = prepare(frame(one=1.0), Roles("y"))
    schema = Schema.from_dict(json.loads(json.dumps(prepared.schema.as_dict())))
    assert schema == prepared.schema
    again = schema.design(frame()[["colour", "x"]])  # another order, no constant column, no target
    np.testing.assert_array_equal(again, prepared.X)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop(columns=["x", "colour"]), "missing 'x', 'colour'"),
        (lambda t: t.assign(size=1), r"unexpected 'size' \(or --ignore-extra\)"),
        (lambda t: t.rename(columns={"x": "X"}), "missing 'x'; unexpected 'X'"),
        (lambda t: t.assign(x=["a"] * N), "column 'x' must hold numbers, got 'a' in row 1"),
        (lambda t: t.assign(colour=["red"] * 11 + ["pink"]), "'colour' has the value 'pink' in row 12"),
        (lambda t: t.assign(x=[np.nan] * N), "missing values: 12 in column 'x'"),
    ],
)
def test_a_table_that_does_not_match_is_refused_by_name(change, message):
    schema = prepare(frame(), Roles("y")).schema
    with pytest.raises(TableError, match=message):
        schema.design(change(frame()))


@pytest.mark.parametrize(
    ("table", "roles", "message"),
    [
        (frame(), Roles("z"), "--target: no column 'z'; the table has 'x', 'colour', 'y'"),
        (frame(), Roles("y", clusters="z"), "--clusters: no column 'z'"),
        (frame(), Roles("y", weights="z"), "--weights: no column 'z'"),
        (frame(), Roles("y", drop=("z",)), "--drop z: no column 'z'"),
        (frame(), Roles("y", clusters="y"), "'y' cannot be both --target and --clusters"),
        (frame(), Roles("y", drop=("y",)), "'y' cannot be both --target and --drop"),
        (frame()[:2], Roles("y"), "the table has 2 rows; at least 10 are needed"),
        (
            frame(x=[np.nan] * 3 + [1.0] * 9),
            Roles("y"),
            "missing values: 3 in column 'x', the first in row 1",
        ),
        (frame(colour=["a"] * 11 + [None]), Roles("y"), "1 in column 'colour', the first in row 12"),
        (frame(y=[np.nan] + [1.0] * 11), Roles("y"), "missing values: 1 in column 'y'"),
        (frame(x=[np.inf] + [1.0] * 11), Roles("y"), "column 'x' is infinite in row 1"),
        (frame(x=[1e200, -1e200] * 6), Roles("y"), "overflows or underflows"),
        (frame(x=["1", "2", "?", "4"] * 3), Roles("y"), "'x' mixes numbers with text, '\\?' in row 3"),
        (frame(y=1.0), Roles("y"), "'y' has the same value in every row"),
        (frame(y=["a"] * 11 + ["b"]), Roles("y"), "class 'b' of 'y' has one row"),
        (frame(y=["a", "b"] * 6), Roles("y", task="regression"), "is text, which --task regression"),
        (frame(g=["a"] * N), Roles("y", clusters="g"), "'g' has one value only"),
        (frame(w=["a"] * N), Roles("y", weights="w"), "'w' must hold numbers, got 'a' in row 1"),
        (frame(w=[0.0] * N), Roles("y", weights="w"), "'w' must be positive, got 0 in row 1"),
        (pd.DataFrame({"y": np.arange(12.5), "one": 1}), Roles("y"), "no input column is left"),
        (frame(span=pd.to_timedelta([1, 2] * 6, unit="D")), Roles("y"), "'span' holds timedelta"),
    ],
)
def test_a_table_that_cannot_be_learnt_from_is_refused(table, roles, message):
    with pytest.raises(TableError, match=message):
        prepare(table, roles)


def test_five_hundred_labels_are_no_classes():
    table = pd.DataFrame({"x": np.arange(1000.0), "y": [f"name {i}" for i in range(500)] * 2})
    with pytest.raises(TableError, match="'y' is text with 500 distinct values, more than 50 classes"):
        prepare(table, Roles("y"))
    numbers = pd.DataFrame({"x": np.arange(1000.0), "y": list(range(500)) * 2})
    with pytest.raises(TableError, match="use --task regression"):
        prepare(numbers, Roles("y", task="classification"))


def test_boolean_inputs_stay_as_they_are_and_others_are_refused():
    table = frame(x=[0, 1] * 6)
    prepared = prepare(table, Roles("y"), standardise=False)
    assert set(prepared.X.flatten()) == {0.0, 1.0}
    with pytest.raises(TableError, match="needs inputs 0 and 1 only; other values in 'x'"):
        prepare(frame(), Roles("y"), standardise=False)


COMMA = "read with a decimal comma: "
THOUSANDS = "read with thousands separators: "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1.5,x\n2.5,y\n", []),
        ("a;b\n1,5;x\n2,5;y\n", [COMMA + "'a'"]),
        ("a;b\n1.5;x\n2.5;y\n", []),
        ("a\tb\n1.5\tx\n2.5\ty\n", []),
        ("a\tb\n1,5\tx\n2,5\ty\n", [COMMA + "'a'"]),
        ("\ufeffa, b\n1.5, x\n2.5, y\n", []),
    ],
)
def test_separators_and_decimal_commas(tmp_path, text, expected):
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    table, notes = read_table(path)
    assert table.columns.tolist() == ["a", "b"]
    assert table["a"].tolist() == [1.5, 2.5]
    assert table["b"].tolist() == ["x", "y"]
    assert notes == expected


def test_a_table_of_an_old_windows_program_is_read_with_a_note(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("grün;preis\n1,5;2\n2,5;3\n".encode("cp1252"))
    table, notes = read_table(path)
    assert table.columns.tolist() == ["grün", "preis"]
    assert table["grün"].tolist() == [1.5, 2.5]
    assert notes == ["the file is not UTF-8: read as Windows-1252", COMMA + "'grün'"]


def test_a_column_that_counts_the_rows_is_kept_with_a_word():
    prepared = prepare(frame(id=np.arange(1, N + 1)), Roles("y"))
    assert "id" in prepared.schema.inputs
    assert prepared.notes == (
        "column 'id' counts the rows; if it is not a measurement, ignore it with --drop",
    )


def test_a_nameless_column_of_row_numbers_is_left_out(tmp_path):
    path = tmp_path / "t.csv"
    pd.DataFrame({"a": [5, 6]}).to_csv(path)
    table, notes = read_table(path)
    assert table.columns.tolist() == ["a"]
    assert "counts the rows" in notes[0]


def test_an_archive_of_arrays_is_a_table(tmp_path):
    path = tmp_path / "t.npz"
    X = np.arange(6.0).reshape(3, 2)
    np.savez(path, X=X, y=np.array([1, 2, 3]), names=np.array(["a", "b", "c"]), split=np.zeros((2, 2)))
    table, notes = read_table(path)
    assert table.columns.tolist() == ["X0", "X1", "y", "names"]
    np.testing.assert_array_equal(table[["X0", "X1"]], X)
    assert notes == ["arrays without 3 rows are ignored: 'split'"]
    np.savez(path, X=X, feature_names=np.array(["u", "v"]))
    assert read_table(path)[0].columns.tolist() == ["u", "v"]


def test_parquet_is_read_where_pyarrow_is(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    table = frame()
    table.attrs["decimals"] = "of another program"
    table.to_parquet(path)
    assert read_table(path)[0].equals(frame())
    assert read_table(path)[0].attrs == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", b"", "is empty"),
        ("t.csv", b"\n\n", "is empty"),
        ("t.csv", b"a,b\n", "has column names but no rows"),
        ("t.csv", b"a,b\n1,2\n1,2,3\n", "is not a table: Expected 2 fields in line 3, saw 3"),
        ("t.csv", b"a,b\n1,2,3\n4,5,6\n", "more fields than the header has names"),
        ("t.csv", b"a,a\n1,2\n", "several columns named 'a'"),
        ("t.csv", b"a,b\n\xff\x81,2\n", "is not UTF-8 text"),
        ("t.csv", "a,b\n1,2\n".encode("utf-16"), "is not a text file, or not in UTF-8"),
        ("t.csv", b"a\0b\n1\n", "is not a text file"),
        ("t.npz", b"not an archive", "is not an .npz archive"),
        ("t.xlsx", b"", "must be a .csv, .parquet or .npz file"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TableError, match=message) as caught:
        read_table(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("row", "line"),
    [("5,6", "line 13 has 2 of 3 fields; "), ('"5, 6"', "line 13 has 1 of 3 fields; "), ("5,6,", "")],
)
def test_a_line_with_too_few_fields_is_named_where_values_are_missing(tmp_path, row, line):
    rows = [f"{i},{i % 3},{i * i % 7}" for i in range(11)]
    path = tmp_path / "t.csv"
    path.write_text("\n".join(["a,b,y", *rows, row]) + "\n")
    table = read_table(path)[0]
    with pytest.raises(
        TableError, match=f"1 in column 'y', the first in row 12(| .and in 1 more columns.); {line}fill"
    ):
        prepare(table, Roles("y"))
    assert len(prepare(table, Roles("y"), missing="drop").y) == 11


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(TableError, match="does not exist"):
        read_table(tmp_path / "none.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(TableError, match="is a folder"):
        read_table(tmp_path / "folder.csv")


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [("pandas", "t.csv", r"torchloo\[cli\]"), ("pyarrow", "t.parquet", "pip install pyarrow")],
)
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, module, name, remedy):
    (tmp_path / name).write_bytes(b"a\n1\n")
    monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(TableError, match=remedy):
        read_table(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('"len, mm, x";"b";"y"\n1,5;2;3\n2,5;1;4\n', {"len, mm, x": [1.5, 2.5], "b": [2, 1], "y": [3, 4]}),
        ("\na;y\n1;3\n2;4\n", {"a": [1, 2], "y": [3, 4]}),
        (
            "day;y\n01.02.2024;-0,077\n02.02.2024;1,5\n",
            {"day": ["01.02.2024", "02.02.2024"], "y": [-0.077, 1.5]},
        ),
    ],
)
def test_separators_and_decimal_commas_are_told_apart(tmp_path, content, expected):
    path = tmp_path / "data.csv"
    path.write_text(content)
    frame, _ = read_table(path)
    assert {name: frame[name].tolist() for name in frame} == expected


NAN = float("nan")


@pytest.mark.parametrize(
    ("content", "expected", "notes"),
    [
        # each column has its own mark
        ("a;b\n1,5;2.5\n2,5;3.25\n", {"a": [1.5, 2.5], "b": [2.5, 3.25]}, [COMMA + "'a'"]),
        # missing values, signs, exponents, blanks; words and whole numbers stay what they are
        (
            "a;b;c;d\n-1,5; 2,5e3;x;1\n;+,5 ;;2\nNA;3;y;3\n",
            {"a": [-1.5, NAN, NAN], "b": [2500, 0.5, 3], "c": ["x", NAN, "y"], "d": [1, 2, 3]},
            [COMMA + "'a', 'b'"],
        ),
        # thousands: a second mark tells which is which
        ("a;b\n1.234,5;1\n12;2\n", {"a": [1234.5, 12]}, [COMMA + "'a'", THOUSANDS + "'a'"]),
        ("a;b\n1,234.5;1\n12;2\n", {"a": [1234.5, 12]}, [THOUSANDS + "'a'"]),
        ("a;b\n1,234,567;1\n12;2\n", {"a": [1234567, 12]}, [THOUSANDS + "'a'"]),
        ("a;b\n1 234,5;1\n1\u00a0234;2\n", {"a": [1234.5, 1234]}, [COMMA + "'a'", THOUSANDS + "'a'"]),
        ("a;b\n1'234.5;1\n12;2\n", {"a": [1234.5, 12]}, [THOUSANDS + "'a'"]),
        # 1,234 and 1.234 are settled by other columns of the file
        ("a;b\n1,234;1.5\n12;2\n", {"a": [1234, 12], "b": [1.5, 2]}, [THOUSANDS + "'a'"]),
        ('a,b\n"1,234","0,5"\n12,2\n', {"a": [1.234, 12], "b": [0.5, 2]}, [COMMA + "'a', 'b'"]),
        (
            "a;b\n1.234;1,5\n12;2\n",
            {"a": [1234, 12], "b": [1.5, 2]},
            [COMMA + "'b'", THOUSANDS + "'a'"],
        ),
        # and else by the separator
        ("a;b\n1,234;1\n12;2\n", {"a": [1.234, 12]}, [COMMA + "'a'"]),
        ("a\tb\n1,234\t1\n12\t2\n", {"a": [1.234, 12]}, [COMMA + "'a'"]),
        ('a,b\n"1,234",1\n12,2\n', {"a": [1234, 12]}, [THOUSANDS + "'a'"]),
        ("a;b\n1.234;1\n12;2\n", {"a": [1.234, 12]}, []),
        # quoted numbers beside separating commas: a decimal comma unless three digits follow
        ('a,b\n"1,5",1\n"2,25",2\n', {"a": [1.5, 2.25]}, [COMMA + "'a'"]),
        ('a,b\n"0,125",1\n"2,250",2\n', {"a": [0.125, 2.25]}, [COMMA + "'a'"]),
        # no numbers
        ("a;b\n1,5 mm;1\n2,5 mm;2\n", {"a": ["1,5 mm", "2,5 mm"]}, []),
        ("a;b\n1,5;1\n2.5;2\n", {"a": ["1,5", "2.5"]}, []),
        ("a;b\n1,234;1\n1.234;2\n", {"a": ["1,234", "1.234"]}, []),
        ("a;b\n1.2.3;1\n1.2.4;2\n", {"a": ["1.2.3", "1.2.4"]}, []),
    ],
)
def test_every_column_is_read_with_the_decimal_mark_that_fits(tmp_path, content, expected, notes):
    path = tmp_path / "data.csv"
    path.write_text(content, encoding="utf-8")
    frame, said = read_table(path)
    pd.testing.assert_frame_equal(
        frame[list(expected)], pd.DataFrame(expected), check_dtype=False, check_exact=True
    )
    assert said == notes


def test_decimal_commas_are_seen_however_late_they_come(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a;b\n" + "1;1\n" * 500 + "1,5;2\n")
    frame, notes = read_table(path)
    assert frame["a"].tolist() == [1.0] * 500 + [1.5]
    assert notes == [COMMA + "'a'"]


@pytest.mark.parametrize(
    ("model", "content", "expected"),
    [
        ({"a": ","}, 'a,b\n"1,234",2.5\n', 1.234),  # the file says nothing against it
        ({"a": ",", "b": "."}, 'a,b\n"1,234",2.5\n', 1.234),
        ({"a": ",", "b": ","}, 'a,b\n"1,234",2.5\n', 1234),  # another program has written this file
        ({"a": "."}, "a;b\n1,234;2\n", 1234),
        ({"a": ","}, "a;b\n1.234;2\n", 1234),
        ({"a": ","}, "a;b\n1.5;2\n", 1.5),
        ({"a": ","}, "a;b\n1,5;2\n", 1.5),
        ({"a": "."}, "a;b\n1,5;2\n", 1.5),
        ({}, "a;b\n1,234;2\n", 1.234),
    ],
)
def test_the_model_settles_what_is_ambiguous_in_a_new_file(tmp_path, model, content, expected):
    path = tmp_path / "new.csv"
    path.write_text(content)
    frame, _ = read_table(path, decimals=model)
    assert frame["a"].tolist() == [expected]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            ["1,5", "2.5", "3,5"],
            "mixes decimal commas with decimal points, '1,5' in row 1 and '2.5' in row 2",
        ),
        (["1,5", "2,5", "?"], r"mixes numbers with text, '\?' in row 3"),
        (["1,234", "2.345", "3,456"], "mixes decimal commas with decimal points, '1,234' in row 1"),
    ],
)
def test_numbers_written_in_several_ways_are_refused(values, message):
    with pytest.raises(TableError, match=message):
        prepare(frame(x=values * 4), Roles("y"))


def test_columns_of_an_archive_have_names_of_their_own(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, y=np.zeros(3), X=np.ones((3, 2)), feature_names=np.array(["a", "y"]))
    with pytest.raises(TableError, match="several columns named 'y'"):
        read_table(path)


@pytest.mark.parametrize(
    "when",
    [
        ["2020-01-01", "2020-03-01"] * 6,
        ["2020-01-01T00:00:00Z", "2020-03-01T02:00+02:00"] * 6,
        pd.to_datetime(["2020-01-01", "2020-03-01"] * 6),
        pd.to_datetime(["2020-01-01", "2020-03-01"] * 6).tz_localize("UTC"),
    ],
    ids=["text", "moments", "dates", "dates of a zone"],
)
def test_dates_are_days(when):
    prepared = prepare(frame(when=when), Roles("y"))
    assert prepared.schema.columns[-1].dates
    assert "dates, converted to days since 1970: 'when'" in prepared.notes
    raw = prepared.X[:, -1] * prepared.schema.scale[-1] + prepared.schema.centre[-1]
    np.testing.assert_allclose(raw[:2], [18262, 18322])
    schema = Schema.from_dict(json.loads(json.dumps(prepared.schema.as_dict())))
    np.testing.assert_allclose(schema.design(frame(when=when)), prepared.X)


@pytest.mark.parametrize("when", [["2020-13-01"] * 6 + ["2020-01-01"] * 6, ["1.2.2020", "2.2.2020"] * 6])
def test_what_is_no_date_of_that_form_stays_text(when):
    assert prepare(frame(when=when), Roles("y")).schema.columns[-1].levels is not None


def test_a_new_table_must_have_dates_where_the_model_had():
    schema = prepare(frame(when=["2020-01-01", "2020-03-01"] * 6), Roles("y")).schema
    with pytest.raises(TableError, match="'when' must hold dates such as 2020-01-31, got 'soon' in row 2"):
        schema.design(frame(when=["2020-01-01", "soon"] * 6))


def with_holes() -> "pd.DataFrame":
    long = pd.concat([frame()] * 2, ignore_index=True)
    long.loc[[3, 5], "x"] = np.nan
    long.loc[[5, 6], "colour"] = None
    long.loc[20, "y"] = np.nan
    return long


def test_rows_with_missing_values_are_dropped_where_that_is_asked_for():
    prepared = prepare(with_holes(), Roles("y"), missing="drop")
    assert prepared.rows.tolist() == [row for row in range(1, 25) if row not in (4, 6, 7, 21)]
    assert len(prepared.X) == len(prepared.y) == 20
    assert "4 of 24 rows are dropped because of missing values" in prepared.notes
    expected = prepare(with_holes().drop(index=[3, 5, 6, 20]).reset_index(drop=True), Roles("y"))
    np.testing.assert_array_equal(prepared.X, expected.X)
    with pytest.raises(TableError, match="missing values"):  # what was dropped has taught nothing
        prepared.schema.design(with_holes())


def test_missing_inputs_are_means_in_the_model_too():
    holes = with_holes()
    prepared = prepare(holes, Roles("y"), missing="mean")
    assert prepared.rows.tolist() == [row for row in range(1, 25) if row != 21]  # which has no target
    kept = holes.drop(index=20)
    expected = kept.assign(x=kept["x"].fillna(kept["x"].mean()), colour=kept["colour"].fillna("red"))
    np.testing.assert_allclose(prepared.X, prepare(expected.reset_index(drop=True), Roles("y")).X)
    schema = Schema.from_dict(json.loads(json.dumps(prepared.schema.as_dict())))
    np.testing.assert_allclose(schema.design(kept), prepared.X)


def test_too_few_complete_rows_are_refused():
    holes = frame(x=[1.0, 2.0, 3.0] + [np.nan] * 9)
    with pytest.raises(TableError, match="3 rows have no missing values; at least 10 are needed"):
        prepare(holes, Roles("y"), missing="drop")


def test_unexpected_columns_may_be_ignored():
    prepared = prepare(frame(), Roles("y"))
    wider = frame(size=1, note=["?"] * N)
    np.testing.assert_array_equal(prepared.schema.design(wider, ignore_extra=True), prepared.X)
