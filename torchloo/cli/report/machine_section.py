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
    prepared, schema = findings.prepared, findings.prepared.schema
    n, d = prepared.X.shape
    words = [column for column in schema.columns if column.levels is not None]
    used = f"{len(schema.columns)}" + (f", {len(words)} of them text" if words else "")
    rows = [["rows", f"{n}"], ["columns", used]] + ([["inputs after coding", f"{d}"]] if words else [])
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
        rows.append(
            [schema.target, f"{extent}, mean {number(y.mean())}, standard deviation {number(y.std())}"]
        )
    notes = [note[0].upper() + note[1:] + "." for note in prepared.notes]
    return section("The data", table(["", ""], rows, words=True), paragraph(_coding(findings)), items(notes))


def _sizes(labels: np.ndarray) -> str:
    """Number of distinct labels, and their numbers of rows."""
    counts = np.unique(labels, return_counts=True)[1]
    fewest, most = counts.min(), counts.max()
    return (
        f"{len(counts)}, of {fewest} rows each"
        if fewest == most
        else f"{len(counts)}, of {fewest} to {most} rows"
    )


def _coding(findings: Findings) -> str:
    text_columns = any(column.levels is not None for column in findings.prepared.schema.columns)
    scaled = "All inputs were standardised" if findings.request.standardise else "Inputs are 0 and 1"
    coded = (
        "Each text column became a 0/1 input for every value that it takes, or a single one for two values. "
        if text_columns
        else ""
    )
    return f"{coded}{scaled}."


def machine(findings: Findings) -> str:
    """The selected hyper-parameters, and the course of the search."""
    request, choice = findings.request, findings.choice
    name = request.criterion_function.label
    meaning = request.criterion_function.meaning
    meaning += ", each class against the others, on average over the classes" * request.averaged
    several = f", one for each of {findings.classes} classes" if findings.classes > 2 else ""
    together = ", its cluster left out with it" if findings.lco is not None else ""
    until = f", until the {choice.stopped} was used up" if choice.stopped else ""
    words = (
        f"A {MACHINES[request.spec.machine].label} with {KERNELS[request.spec.kernel].label}{several}. Its "
        f"settings were chosen by {name}: {meaning}, each row held out in turn{together}. "
        f"{choice.evaluations} settings were tried{until}."
    )
    scalars = [each for each in findings.parameters if not each.value.ndim]
    rows = [[name, number(float(value)), meaning] for name, value, meaning in scalars]
    if request.spec.machine == "sparse":
        rows.append(["basis", f"{request.spec.basis}", "rows, drawn at random, that the machine is built on"])
    rows.append([name, number(choice.value), f"{meaning}, at these settings"])
    chosen = table(["setting", "value", "what it is"], rows, words=True)
    curves = [_relevance(findings), _search(findings), _path(findings)]
    return section("The machine", paragraph(text(words)), chosen, *curves)


def _relevance(findings: Findings) -> str:
    """Relevance of the inputs, for a kernel with one parameter per input."""
    relevance = findings.relevance
    if relevance is None:
        return ""
    order, names = np.argsort(-relevance)[:_MAX_BARS], findings.prepared.schema.inputs
    svg = pictures.bars([names[j] for j in order], relevance[order], "relevance")
    which = f"The {len(order)} most relevant of {len(names)}" if len(order) < len(names) else "The"
    caption = (
        f"{which} inputs by relevance: how much the kernel between two rows falls when they differ in this "
        "input by one standard deviation, from 0 (the input is ignored) to 1 (the rows are unrelated). "
        "Inputs that carry the same information share their relevance."
    )
    return figure(svg, caption)


def _search(findings: Findings) -> str:
    choice, criterion = findings.choice, findings.request.criterion_function
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
        f"{name} for other values of reg, all else as chosen; the dashed line is the value chosen. Far "
        "to the left the machine overfits, far to the right it underfits."
    )
    return figure(pictures.reg_curve(*findings.path, float(chosen), name), caption)
