"""Find wrong labels: flip some labels of IDA image at random, and see which ones tl.diagnose suspects.

    python scripts/suspect_labels.py [--data DIR] [--share 0.05] [--rows 1300] [--seed 0] [--out FILE.png]

The machine, an LS-SVM with an RBF kernel, is chosen by leave-one-out with the wrong labels among the others,
as a user would have them. Prints precision (how many of the suspects had been flipped) and recall (how many
of the flipped are suspects) for several probabilities, and among as many of the worst rows as were flipped.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

import torchloo as tl

sys.path.append(str(Path(__file__).resolve().parent / "bench"))
from measure import add_data


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_data(parser)
    parser.add_argument("--share", type=float, default=0.05, help="of the labels to flip")
    parser.add_argument("--rows", type=int, default=1300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a picture")
    options = parser.parse_args()
    data = np.load(options.data / "ida" / "image.npz")
    rows = (data["train"] if len(data["train"]) else data["train_own"])[0][: options.rows]
    X = torch.tensor(data["X"][rows], dtype=torch.float64)
    X = (X - X.mean(0)) / X.std(0)
    y = torch.tensor(data["y"][rows].astype(float))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(options.seed))
    flipped = order[: round(options.share * len(y))]
    y[flipped] = -y[flipped]

    chosen = tl.select(tl.LSSVM(tl.kernels.RBF()), X, y, "smooth_error", progress=False)
    machine = chosen.machine
    found = tl.diagnose(machine, X, y)
    print(f"{len(y)} rows, {len(flipped)} labels flipped; {machine}")
    print(f"{'suspects':<34}{'rows':>6}{'precision':>11}{'recall':>9}")
    sets = {f"probability of another class > {p}": found.suspects(p) for p in (0.5, 0.8, 0.9, 0.95)}
    sets["as many as were flipped"] = found.suspects(0.0)[: len(flipped)]
    for name, suspects in sets.items():
        hits = torch.isin(suspects, flipped).sum().item()
        print(f"{name:<34}{len(suspects):>6}{hits / max(1, len(suspects)):>11.1%}{hits / len(flipped):>9.1%}")
    print()
    print(found)
    if options.out is not None:
        found.plot(options.out)


if __name__ == "__main__":
    main()
