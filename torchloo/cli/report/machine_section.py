"""The sections on the data and on the selected machine."""

import numpy as np

from torchloo.cli.findings import Findings
from torchloo.cli.report import pictures
from torchloo.cli.report.markup import figure, items, number, paragraph, section, table, text
from torchloo.kernels.kernel import KERNELS
from torchloo.machine.kernel_machine import MACHINES

__all__ = ["data", "machine"]

_MAX_BARS = 20
_MAX_CLASSES = 6


def data(findings: Findings) -> str:
    """The table that was read."""
    prepared = findings.prepared
    schema = prepared.schema
    n, d = prepared.X.shape
    text_columns = sum(column.levels is not None for column in schema.columns)
    rows = [["rows", f"{n}"], ["columns", f"{len(schema.columns)}"]]
    if text_columns:
        rows[-1][1] += f", {text_columns} of them text"
        rows.append(["inputs after encoding", f"{d}"])
    if prepared.clusters is not None:
        rows.append(["clusters", _sizes(prepared.clusters)])
    if prepared.weight is not None:
        rows.append(["weights", f"{number(prepared.weight.min())} to {number(prepared.weight.max())}"])
    if findings.classes > _MAX_CLASSES:
        rows.append(["classes", _sizes(prepared.target)])
    elif findings.classes:
        sizes = [(label, int((prepared.target == label).sum())) for label in schema.labels]
        rows += [[f"class {label}", f"{size} rows ({size / n:.0%})"] for label, size in sizes]
    else:
        y = prepared.y
        extent = f"{number(y.min())} to {number(y.max())}"
        moments = f"mean {number(y.mean())}, standard deviation {number(y.std())}"
        rows.append([schema.target, f"{extent}, {moments}"])
    notes = [note[0].upper() + note[1:] + "." for note in prepared.notes]
    overview = table(["", ""], rows, words=True)
    return section("The data", overview, paragraph(_encoding(findings)), items(notes))


def _sizes(labels: np.ndarray) -> str:
    """Number of distinct labels, and their numbers of rows."""
    counts = np.unique(labels, return_counts=True)[1]
    fewest, most = counts.min(), counts.max()
    if fewest == most:
        return f"{len(counts)}, of {fewest} rows each"
    return f"{len(counts)}, of {fewest} to {most} rows"


def _encoding(findings: Findings) -> str:
    scaled = "All inputs were standardised." if findings.request.standardise else "Inputs are 0 and 1."
    if not any(column.levels is not None for column in findings.prepared.schema.columns):
        return scaled
    return f"Text columns were one-hot encoded, with a single 0/1 input for two values. {scaled}"


def machine(findings: Findings) -> str:
    """The selected hyper-parameters, and the course of the search."""
    request, choice = findings.request, findings.choice
    name = request.criterion_function.label
    meaning = request.criterion_function.meaning
    if request.averaged:
        meaning += ", each class against the others, on average over the classes"
    several = f", one for each of {findings.classes} classes" if findings.classes > 2 else ""
    together = ", its cluster left out with it" if findings.lco is not None else ""
    until = f", until the {choice.stopped} was used up" if choice.stopped else ""
    words = (
        f"A {MACHINES[request.spec.machine].label} with {KERNELS[request.spec.kernel].label}{several}. Its "
        f"hyper-parameters were selected by {name}: {meaning}, each row held out in turn{together}. "
        f"{choice.evaluations} settings were tried{until}."
    )
    rows = []
    for parameter in findings.parameters:
        if not parameter.value.ndim:
            rows.append([parameter.name, number(float(parameter.value)), parameter.meaning])
    if request.spec.machine == "sparse":
        rows.append(["basis", f"{request.spec.basis}", "number of basis vectors, rows drawn at random"])
    rows.append([name, number(choice.value), f"{meaning}, at these settings"])
    chosen = table(["setting", "value", "meaning"], rows, words=True)
    curves = [_relevance(findings), _search(findings), _path(findings)]
    return section("The machine", paragraph(text(words)), chosen, *curves)


def _relevance(findings: Findings) -> str:
    """Relevance of the inputs, for a kernel with one parameter per input."""
    relevance = findings.relevance
    if relevance is None:
        return ""
    order = np.argsort(-relevance)[:_MAX_BARS]
    names = findings.prepared.schema.inputs
    svg = pictures.bars([names[j] for j in order], relevance[order], "relevance")
    which = f"The {len(order)} most relevant of {len(names)}" if len(order) < len(names) else "The"
    caption = (
        f"{which} inputs by relevance: the relative decrease of the kernel between two rows that differ in "
        "this input by one standard deviation, from 0 (the input is ignored) to 1 (the rows are unrelated). "
        "Inputs that carry the same information share their relevance."
    )
    return figure(svg, caption)


def _search(findings: Findings) -> str:
    choice = findings.choice
    criterion = findings.request.criterion_function
    if len(choice.history) < 2:
        return ""
    name = criterion.label
    better = "Lower" if criterion.lower_is_better else "Higher"
    caption = (
        f"The search: each dot is a setting that was tried, the line is the best {name} so far. {better} is "
        "better. Where the line is flat, further search would have gained little."
    )
    return figure(pictures.criterion_curve(choice.history, name, criterion.lower_is_better), caption)


def _path(findings: Findings) -> str:
    if findings.path is None:
        return ""
    name = findings.request.criterion_function.label
    chosen = next(each.value for each in findings.parameters if each.name == "reg")
    caption = (
        f"{name} for other values of reg, all else as selected; the dashed line is the selected value. Far "
        "to the left the machine overfits, far to the right it underfits."
    )
    return figure(pictures.reg_curve(*findings.path, float(chosen), name), caption)
