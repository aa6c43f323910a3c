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

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm
from training import adam, cells, mean_and_error, options, panels

import torchloo as tl

CLASSES = 10
TEST = 797  # rows to test on
BATCH = 250  # rows of a minibatch
STEPS = 300
BINS = 15  # of the expected calibration error
EVERY = 20  # steps between the weights that a validation set chooses among
LOG_RATE = 5e-2  # of logarithms of positive numbers
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

    def some(self, which: Tensor | slice) -> "Rows":
        """Those that an index selects."""
        return Rows(self.X[which], self.digits[which])


Logits = Callable[[Tensor], Tensor]
"""Images (n, 1, 8, 8) -> logits (n, 10) of the probabilities of the digits."""


def split(labels: int, seed: int, device: str) -> tuple[Rows, Rows]:
    """Labelled rows and test rows of one seed."""
    data = load_digits()
    X = torch.tensor(data.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
    digits = torch.tensor(data.target, device=device)
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed)).to(device)
    rows = Rows(X, digits)
    return rows.some(order[TEST:][:labels]), rows.some(order[:TEST])


def minibatches(rows: Rows, steps: int, seed: int) -> Iterator[Rows]:
    """All rows where they are few, else some, drawn again for every step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        order = torch.randperm(len(rows.X), generator=generator)
        yield rows.some(order[:BATCH].to(rows.X.device))


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
    optimiser = adam(weights, logs, LOG_RATE)
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
    validation = rows.some(slice(count))
    training = rows.some(slice(count, None))
    model, loss = linear_model(rows.X.device)
    best = torch.inf
    state = model.state_dict()

    @torch.no_grad()
    def look(step: int) -> None:
        nonlocal best, state
        if step % EVERY == 0 and (now := loss(validation).item()) < best:
            best = now
            state = copy.deepcopy(model.state_dict())

    descend(loss, model.parameters(), training, steps, seed, look=look)
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
    calibration_error = gap.abs().sum() / len(right)
    return [right.mean().item(), log_loss.item(), calibration_error.item()]


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


def table(results: dict[tuple[int, str], Tensor]) -> str:
    """The results in Markdown."""
    lines = ["| labels | trained by | accuracy | log loss | ECE | seconds |", "|---|---|---|---|---|---|"]
    for (labels, name), values in results.items():
        seconds = values[:, 3].mean()
        lines.append(f"| {labels} | {name} | {cells(values[:, :3])} | {seconds:.1f} |")
    return "\n".join(lines)


def draw(results: dict[tuple[int, str], Tensor], path: Path) -> None:
    """One panel for each metric."""
    from matplotlib.ticker import LogLocator

    figure, axes = panels(3, (10, 3.2))
    sizes = sorted({labels for labels, _ in results})
    for k, (axis, metric) in enumerate(zip(axes, METRICS, strict=True)):
        for shift, name in zip((0.94, 1.0, 1.06), METHODS, strict=True):
            by_size = torch.stack([results[size, name][:, k] for size in sizes], 1)
            mean, error = mean_and_error(by_size)
            places = [size * shift for size in sizes]
            style = {"color": COLOURS[name], "marker": "o", "markersize": 4, "capsize": 3}
            axis.errorbar(places, mean, error, label=name, **style)
        axis.set(xscale="log", xlabel="labelled rows", title=metric, xticks=sizes, xticklabels=sizes)
        if metric != "accuracy":
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    quick = "one size, two seeds, few steps"
    arguments = options(__doc__.partition("\n")[0], quick, Path(__file__).with_suffix(".png"))
    sizes, count, steps = ([50], 2, EVERY) if arguments.quick else ([50, 200, 1000], 10, STEPS)
    seeds = list(range(arguments.seed, arguments.seed + count))
    results = measure(sizes, seeds, steps, arguments.device)
    print(table(results))
    draw(results, arguments.out)
    print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
