"""A small convolutional network on handwritten digits: a leave-one-out head against a linear layer.

    python scripts/train_features.py [--device cpu] [--seed 0] [--quick] [--out scripts/train_features.png]

The same network, from the same weights, for the same 300 steps of Adam, with the same minibatches of 250
labelled rows (of all, where there are fewer), trained by

cross-entropy  of a linear layer on the features;
early stopping the same on four fifths of the labelled rows: the log loss of the last fifth chooses among the
               weights after every 20 steps;
leave-one-out  cross-entropy of the leave-one-out outputs of an LS-SVM on the features, along with its
               regularisation and the scale of the softmax; it is then fitted once to all labelled rows.

Data: the 1797 digits of scikit-learn (8 x 8 pixels). Each seed draws 797 of them for the test and takes 50,
200 or 1000 of the others as labelled rows. Nothing is tuned on the test rows: rates and steps were set with
other seeds. The table has the mean over the seeds and its standard error of accuracy, log loss and expected
calibration error (ECE, 15 bins) on the test rows, and seconds of training. The picture shows the same.

Needs scikit-learn and matplotlib (extras sklearn and cli).
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

import torchloo as tl

CLASSES, TEST, BATCH, STEPS, BINS = 10, 797, 250, 300, 15
EVERY = 20  # steps between the weights that a validation set chooses among
RATE, LOG_RATE = 2e-3, 5e-2  # of weights, and of logarithms of positive numbers
METRICS = ("accuracy", "log loss", "ECE")
COLOURS = {"cross-entropy": "#d1495b", "early stopping": "#edae49", "leave-one-out": "#00798c"}


def network() -> nn.Module:
    """Images (n, 1, 8, 8) -> features (n, 64)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(),
    )  # fmt: skip


class Rows(NamedTuple):
    """Images (n, 1, 8, 8) and their digits (n,)."""

    X: Tensor
    digits: Tensor


Logits = Callable[[Tensor], Tensor]
"""Images (n, 1, 8, 8) -> logits (n, 10) of the probabilities of the digits."""


def split(labels: int, seed: int, device: str) -> tuple[Rows, Rows]:
    """Labelled rows and test rows of one seed."""
    data = load_digits()
    X = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    digits = torch.tensor(data.target, device=device)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed)).to(device)
    train, test = order[TEST:][:labels], order[:TEST]
    return Rows(X[train], digits[train]), Rows(X[test], digits[test])


def minibatches(rows: Rows, steps: int, seed: int) -> Iterator[Rows]:
    """All rows where they are few, else some, drawn anew for every step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        some = torch.randperm(len(rows.X), generator=generator)[:BATCH].to(rows.X.device)
        yield Rows(rows.X[some], rows.digits[some])


def descend(
    loss: Callable[[Rows], Tensor],
    weights: Iterable[Tensor],
    rows: Rows,
    steps: int,
    seed: int,
    logs: Iterable[Tensor] = (),
    look: Callable[[int], None] = lambda step: None,
) -> None:
    """Adam on the loss of the minibatches, for weights and for logarithms of positive numbers.

    `look` is called with the number of every step, after it.
    """
    optimiser = torch.optim.Adam(
        [{"params": list(weights), "lr": RATE}, {"params": list(logs), "lr": LOG_RATE}]
    )
    for step, batch in enumerate(minibatches(rows, steps, seed), 1):
        optimiser.zero_grad()
        loss(batch).backward()
        optimiser.step()
        look(step)


def linear_model(device: torch.device) -> tuple[nn.Module, Callable[[Rows], Tensor]]:
    """The network with a linear layer, and its cross-entropy."""
    model = nn.Sequential(network(), nn.Linear(64, CLASSES)).to(device)
    return model, lambda rows: nn.functional.cross_entropy(model(rows.X), rows.digits)


def cross_entropy(rows: Rows, steps: int, seed: int) -> Logits:
    """A linear layer, trained on all labelled rows."""
    model, loss = linear_model(rows.X.device)
    descend(loss, model.parameters(), rows, steps, seed)
    return model


def early_stopping(rows: Rows, steps: int, seed: int) -> Logits:
    """A linear layer, trained on four fifths of the rows; the others choose among its weights on the way."""
    count = len(rows.X) // 5
    others, own = (Rows(*(t[part] for t in rows)) for part in (slice(count), slice(count, None)))
    model, loss = linear_model(rows.X.device)
    best, state = torch.inf, model.state_dict()

    @torch.no_grad()
    def look(step: int) -> None:
        nonlocal best, state
        if step % EVERY == 0 and (now := loss(others).item()) < best:
            best, state = now, copy.deepcopy(model.state_dict())

    descend(loss, model.parameters(), own, steps, seed, look=look)
    model.load_state_dict(state)
    return model


def leave_one_out(rows: Rows, steps: int, seed: int) -> Logits:
    """The network as features of an LS-SVM."""
    features = network()
    kernel = tl.kernels.Linear(features=features, event_dim=3)
    machine = tl.LSSVM(kernel, reg=1.0, classes=range(CLASSES)).to(rows.X.device)
    log_scale = nn.Parameter(torch.zeros((), device=rows.X.device))

    def loss(batch: Rows) -> Tensor:
        held_out = machine.loo(batch.X, batch.digits)
        return tl.criteria.cross_entropy(held_out, scale=log_scale.exp())

    descend(loss, features.parameters(), rows, steps, seed, logs=[machine.log_reg, log_scale])
    machine.fit(rows.X, rows.digits)
    return lambda X: log_scale.exp() * machine(X)


METHODS: dict[str, Callable[[Rows, int, int], Logits]] = {
    "cross-entropy": cross_entropy,
    "early stopping": early_stopping,
    "leave-one-out": leave_one_out,
}


@torch.no_grad()
def scores(trained: Logits, test: Rows) -> list[float]:
    """Accuracy, log loss and expected calibration error."""
    logits = trained(test.X)
    log_loss = nn.functional.cross_entropy(logits, test.digits)
    confidence, predicted = logits.softmax(-1).max(-1)
    right = (predicted == test.digits).float()
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gap = torch.zeros(BINS, device=right.device).index_add(0, bins, confidence - right)
    return [right.mean().item(), log_loss.item(), (gap.abs().sum() / len(right)).item()]


def measure(sizes: list[int], seeds: list[int], steps: int, device: str) -> dict[tuple[int, str], Tensor]:
    """Metrics and seconds (seeds, 4) by number of labels and method."""
    results = {}
    with tqdm(total=len(sizes) * len(seeds) * len(METHODS), unit="training") as bar:
        for labels in sizes:
            found: dict[str, list[list[float]]] = {name: [] for name in METHODS}
            for seed in seeds:
                train, test = split(labels, seed, device)
                for name, method in METHODS.items():
                    torch.manual_seed(seed)  # the same weights to begin with
                    start = time.perf_counter()
                    trained = method(train, steps, seed)
                    seconds = time.perf_counter() - start
                    found[name].append([*scores(trained, test), seconds])
                    bar.set_postfix_str(f"{labels} labels, seed {seed}, {name}")
                    bar.update()
            results |= {(labels, name): torch.tensor(rows) for name, rows in found.items()}
    return results


def with_error(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the seeds and its standard error."""
    return values.mean(0), values.std(0) / len(values) ** 0.5


def table(results: dict[tuple[int, str], Tensor]) -> str:
    """The results in Markdown."""
    lines = ["| labels | trained by | accuracy | log loss | ECE | seconds |", "|---|---|---|---|---|---|"]
    for (labels, name), values in results.items():
        mean, error = with_error(values)
        cells = [f"{m:.3f} ± {e:.3f}" for m, e in zip(mean[:3], error[:3], strict=True)]
        lines.append(f"| {labels} | {name} | {' | '.join(cells)} | {mean[3]:.1f} |")
    return "\n".join(lines)


def draw(results: dict[tuple[int, str], Tensor], path: Path) -> None:
    """One panel for each metric."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogLocator

    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    sizes = sorted({labels for labels, _ in results})
    for k, (axis, metric) in enumerate(zip(axes, METRICS, strict=True)):
        for shift, name in zip((0.94, 1.0, 1.06), METHODS, strict=True):
            mean, error = (
                torch.stack(t) for t in zip(*(with_error(results[s, name]) for s in sizes), strict=True)
            )
            places = [size * shift for size in sizes]
            style = {"color": COLOURS[name], "marker": "o", "markersize": 4, "capsize": 3}
            axis.errorbar(places, mean[:, k], error[:, k], label=name, **style)
        axis.set(xscale="log", xlabel="labelled rows", title=metric, xticks=sizes, xticklabels=sizes)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
        if metric != "accuracy":
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--quick", action="store_true", help="one size, two seeds, few steps")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"), help="the picture")
    arguments = parser.parse_args()
    sizes, count, steps = ([50], 2, EVERY) if arguments.quick else ([50, 200, 1000], 10, STEPS)
    seeds = list(range(arguments.seed, arguments.seed + count))
    results = measure(sizes, seeds, steps, arguments.device)
    print(table(results))
    draw(results, arguments.out)
    print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
