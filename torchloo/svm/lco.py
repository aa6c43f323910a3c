"""svm_lco: leave-cluster-out of the SVM."""

import torch
from torch import Tensor

from torchloo.guards import host_labels
from torchloo.svm import held_out as code
from torchloo.svm.fit import SVMFit, checked, svm
from torchloo.svm.held_out import SVMHeldOut
from torchloo.svm.loo_path import RowOutcome
from torchloo.svm.loo_smo import leave_clusters_out_by_smo

__all__ = ["svm_lco"]


def svm_lco(
    K: Tensor,
    y: Tensor,
    C: float | Tensor,
    clusters: object,
    weight: Tensor | None = None,
    method: str = "auto",
    epsilon: float = 1e-3,
) -> SVMHeldOut:
    """Decision values at each cluster of the SVM that never saw it.

    method "auto" solves the SVM without each cluster exactly (`svm`); "smo" starts from the full
    machine, boxes all rows of a cluster to zero, seeds, and solves all clusters as one batch to
    `epsilon`. If one class only is left, outputs are its label.

    Args:
        K, y, C, weight: as in `svm_loo`.
        clusters: integer labels of what is left out together, (n,), on the host.
        method: "auto" or "smo".
        epsilon: violation of optimality at which method "smo" stops.

    Returns:
        SVMHeldOut; outputs are not differentiable, and certified where the gap of the refit proves
        the sign. Cost: one training for each cluster. Memory about 4 n^2.
    """
    if method not in ("auto", "smo"):
        raise ValueError(f'svm_lco: method must be "auto" or "smo", got {method!r}')
    K, y, C, weight = checked("svm_lco", K, y, C, weight)
    batch, n = y.shape[:-1], y.shape[-1]
    labels = torch.from_numpy(host_labels("svm_lco", clusters, n))
    if len(labels.unique()) < 2:
        raise ValueError("svm_lco: clusters must leave some rows in, got one cluster that holds every row")
    box = C[..., None] * weight
    with torch.no_grad():
        parts = []
        problems = zip(
            K.reshape(-1, n, n).double(), y.reshape(-1, n).double(), box.reshape(-1, n).double(), strict=True
        )
        for K_one, y_one, box_one in problems:
            if method == "smo":
                fit = svm(K_one, y_one, 1.0, box_one)
                outcome = leave_clusters_out_by_smo(K_one, y_one, box_one, fit, labels, epsilon)
            else:
                outcome = _refits(K_one, y_one, box_one, labels)
            parts.append(outcome[:5])
    outputs, certified, by, iterations, columns = (
        torch.stack(field).reshape(*batch, n) for field in zip(*parts, strict=True)
    )
    return SVMHeldOut.build(y, weight, outputs.to(K.dtype), certified, by, iterations, columns, labels)


def _refits(K: Tensor, y: Tensor, box: Tensor, clusters: Tensor) -> RowOutcome:
    """The SVM without each cluster, solved exactly."""
    outputs, certified = torch.zeros_like(y), torch.ones_like(y, dtype=torch.bool)
    by = torch.full(y.shape, code.REFIT, device=y.device)
    for label in clusters.unique():
        out = (clusters == label).to(y.device)
        rest = y[~out]
        if bool((rest == rest[0]).all()):
            outputs[out], by[out] = rest[0], code.ONE_CLASS
            continue
        fit: SVMFit = svm(K[~out][:, ~out], rest, 1.0, box[~out])
        outputs[out] = fit.predict(K[out][:, ~out])
        # Twice the norm of any point bounds what the gap leaves open (Note [gap ball]).
        spread = K.diagonal().amax().sqrt() + K.diagonal()[out].sqrt()
        certified[out] = outputs[out].abs() > fit.gap.clamp_min(0).sqrt() * spread + 1e-9
    nothing = torch.zeros_like(by)
    return RowOutcome(outputs, certified, by, nothing, nothing, None)
