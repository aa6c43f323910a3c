"""Features for regression from few points, learned from many tasks: leave-one-out against support and query.

    python scripts/train_episodes.py [--device cpu] [--seed 0] [--quick] [--out scripts/train_episodes.png]

A task is a sinusoid a sin(x + phase) with a in [0.1, 5], phase in [0, pi] and x in [-5, 5], seen at some
points with noise of standard deviation 0.1. A network of two hidden layers makes 40 features of x; a ridge
regression on them, solved for every task, is the head. The network and the head's regularisation are
trained by Adam on batches of tasks with 1000 points in all, from the same weights, by

R2D2           the squared error at 10 query points of a ridge regression of 10 support points, written in
               plain torch by the Woodbury identity, with a learned scale and shift of its outputs, after
               Bertinetto and others (2019), "Meta-learning with differentiable closed-form solvers";
query          the same loss, with tl.LSSVM(...).solve(support)(query) for a head;
leave-one-out  the squared leave-one-out error of tl.LSSVM at all 20 points of the task;
LOO of 11      the same with 11 points a task: each is predicted from 10 others, and there are 1.8 times as
               many tasks in a batch.

The table has the mean squared error at noiseless query points of 1000 new tasks, given 5 or 10 points of
each, as a mean over the seeds with its standard error, and how many tasks and points are trained on per
second. The picture shows how the error with 10 points falls with the steps and with the seconds of training:
the median of the seeds, and their range.

Needs matplotlib (extra cli).
"""

import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm
from training import adam, cells, options, panels

import torchloo as tl

SHOTS = 10  # points of a new task
POINTS = 1000  # of all tasks of a batch
NOISE = 0.1
WIDTH = 40
STEPS = 2000
EVERY = 100  # steps between two points of the curve
LOG_RATE = 2e-2  # of logarithms of positive numbers
COLOURS = {"R2D2": "#edae49", "query": "#d1495b", "leave-one-out": "#00798c", "LOO of 11": "#5b2a86"}


def network() -> nn.Module:
    """x (..., 1) -> features (..., 40)."""
    return nn.Sequential(nn.Linear(1, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


class Tasks(NamedTuple):
    """Points of B tasks."""

    x: Tensor
    """(B, n, 1)."""
    y: Tensor
    """Values with noise, (B, n)."""
    clean: Tensor
    """Values without, (B, n)."""


def draw_tasks(count: int, points: int, generator: torch.Generator, device: str) -> Tasks:
    """`count` tasks with `points` points each."""
    amplitude, phase = torch.rand(2, count, 1, generator=generator)
    x = 10 * torch.rand(count, points, generator=generator) - 5
    clean = (0.1 + 4.9 * amplitude) * (x + torch.pi * phase).sin()
    y = clean + NOISE * torch.randn(count, points, generator=generator)
    return Tasks(x.unsqueeze(-1).to(device), y.to(device), clean.to(device))


class Head(nn.Module):
    """Outputs at new points of tasks from some points of each, trained by their squared error there."""

    points = 2 * SHOTS  # of a task in training

    def forward(self, x: Tensor, y: Tensor, x_new: Tensor) -> Tensor:
        """x (B, n, 1), y (B, n) and x_new (B, q, 1) -> (B, q)."""
        raise NotImplementedError

    def loss(self, tasks: Tasks) -> Tensor:
        """Squared error at the points of each task but the first 10, from those."""
        outputs = self(tasks.x[:, :SHOTS], tasks.y[:, :SHOTS], tasks.x[:, SHOTS:])
        return (outputs - tasks.y[:, SHOTS:]).square().mean()


class R2D2(Head):
    """Ridge regression on features, f = scale Z_new Z^T (Z Z^T + reg I)^{-1} y + shift."""

    def __init__(self) -> None:
        super().__init__()
        self.features = network()
        self.log_reg = nn.Parameter(torch.zeros(()))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor, x_new: Tensor) -> Tensor:
        Z = self.features(x)
        Z_new = self.features(x_new)
        ridge = self.log_reg.exp() * torch.eye(x.shape[-2], device=x.device)
        a = torch.linalg.solve(Z @ Z.mT + ridge, y.unsqueeze(-1))
        return self.log_scale.exp() * (Z_new @ (Z.mT @ a))[..., 0] + self.shift


class Query(Head):
    """An LS-SVM on features."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = tl.LSSVM(tl.kernels.Linear(features=network()), reg=1.0)

    def forward(self, x: Tensor, y: Tensor, x_new: Tensor) -> Tensor:
        return self.machine.solve(x, y)(x_new)


class LeaveOneOut(Query):
    """The same, trained by its leave-one-out error."""

    def loss(self, tasks: Tasks) -> Tensor:
        return tl.criteria.mse(self.machine.loo(tasks.x, tasks.y)).mean()


class LeaveOneOutOfFew(LeaveOneOut):
    """Each point from as many others as there will be."""

    points = SHOTS + 1


HEADS: dict[str, type[Head]] = {
    "R2D2": R2D2,
    "query": Query,
    "leave-one-out": LeaveOneOut,
    "LOO of 11": LeaveOneOutOfFew,
}


@torch.no_grad()
def error(head: Head, tasks: Tasks, shots: int) -> float:
    """Mean squared error at noiseless points, from the first ones of each task."""
    outputs = head(tasks.x[:, :shots], tasks.y[:, :shots], tasks.x[:, SHOTS:])
    return (outputs - tasks.clean[:, SHOTS:]).square().mean().item()


class Training(NamedTuple):
    """The result of one training."""

    curve: Tensor
    """Steps, seconds and error with 10 points, (looks, 3)."""
    errors: Tensor
    """With 5 and with 10 points."""
    tasks: float
    """Trained on per second."""


def train(name: str, seed: int, steps: int, test: Tasks, bar: "tqdm[None]") -> Training:
    """One head, from the weights of a seed."""
    torch.manual_seed(seed)
    head = HEADS[name]().to(test.x.device)
    logs = [p for path, p in head.named_parameters() if path.rpartition(".")[2].startswith("log_")]
    weights = [p for p in head.parameters() if all(p is not log for log in logs)]
    optimiser = adam(weights, logs, LOG_RATE)
    generator = torch.Generator().manual_seed(seed)
    count = POINTS // head.points
    seconds = 0.0
    curve = [[0, 0.0, error(head, test, SHOTS)]]
    for step in range(1, steps + 1):
        tasks = draw_tasks(count, head.points, generator, str(test.x.device))
        start = time.perf_counter()
        optimiser.zero_grad()
        head.loss(tasks).backward()
        optimiser.step()
        seconds += time.perf_counter() - start
        if step % EVERY == 0:
            curve.append([step, seconds, error(head, test, SHOTS)])
        bar.set_postfix_str(f"seed {seed}, {name}")
        bar.update()
    errors = torch.tensor([error(head, test, shots) for shots in (SHOTS // 2, SHOTS)])
    return Training(torch.tensor(curve), errors, steps * count / seconds)


def table(results: dict[str, list[Training]]) -> str:
    """The results in Markdown."""
    lines = [
        "| trained by | points a task | error, 5 points | error, 10 points | tasks / s | points / s |",
        "|---|---|---|---|---|---|",
    ]
    for name, trainings in results.items():
        errors = torch.stack([training.errors for training in trainings])
        rate = sum(training.tasks for training in trainings) / len(trainings)
        points = HEADS[name].points
        lines.append(f"| {name} | {points} | {cells(errors)} | {rate:.0f} | {rate * points:.0f} |")
    return "\n".join(lines)


def draw(results: dict[str, list[Training]], path: Path) -> None:
    """The error over steps and over seconds: the median of the seeds, and from the least to the largest."""
    figure, axes = panels(2, (9, 3.4), sharey=True)
    for column, (axis, label) in enumerate(zip(axes, ("steps", "seconds of training"), strict=True)):
        for name, trainings in results.items():
            curves = torch.stack([training.curve for training in trainings])  # (seeds, looks, 3)
            place = curves[..., column].mean(0)
            errors = curves[..., 2]
            colour = COLOURS[name]
            axis.plot(place, errors.median(0).values, color=colour, linewidth=1.8, label=name)
            axis.fill_between(place, *errors.aminmax(dim=0), color=colour, alpha=0.12, linewidth=0)
        axis.set(xlabel=label, yscale="log", xlim=(0, None))
    axes[0].set_ylabel("error from 10 points of new tasks")
    axes[1].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = options(
        __doc__.partition("\n")[0], "two seeds, few steps", Path(__file__).with_suffix(".png")
    )
    count, steps = (2, EVERY) if arguments.quick else (5, STEPS)
    seeds = range(arguments.seed, arguments.seed + count)
    test = draw_tasks(1000, 5 * SHOTS, torch.Generator().manual_seed(1 << 20), arguments.device)
    results = {}
    with tqdm(total=len(HEADS) * count * steps, unit="step") as bar:
        for name in HEADS:
            results[name] = [train(name, seed, steps, test, bar) for seed in seeds]
    print(table(results))
    draw(results, arguments.out)
    print(f"picture: {arguments.out}")


if __name__ == "__main__":
    main()
