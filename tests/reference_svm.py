"""The SVM by trying every active set: no cleverness, no code shared with the package, n up to 8 or so."""

import itertools

import numpy as np


def svm_by_enumeration(K: np.ndarray, y: np.ndarray, C: float) -> tuple[np.ndarray, float]:
    """alpha and the bias (midpoint where it is not unique) of the least violation of optimality."""
    if len(set(y)) == 1:
        return np.zeros(len(y)), float(y[0])
    scale = np.mean(np.diag(K)) or 1.0  # decision values do not change, and tolerances mean something
    K, C = K / scale, C * scale
    best = (np.inf, None, None)
    for status in itertools.product((0, 1, 2), repeat=len(y)):  # at 0, at C, free
        alpha = _solution(K, y, C, np.array(status))
        if alpha is not None:
            best = min(best, _violation(K, y, C, alpha), key=lambda outcome: outcome[0])
    return best[1] / scale, best[2]


def _solution(K: np.ndarray, y: np.ndarray, C: float, status: np.ndarray) -> np.ndarray | None:
    """alpha with these variables at their bounds, None if the free ones leave theirs."""
    free, alpha = status == 2, np.where(status == 1, C, 0.0)
    m = free.sum()
    if m:
        A = np.zeros((m + 1, m + 1))
        A[:m, :m] = K[np.ix_(free, free)]
        A[:m, m] = A[m, :m] = 1
        rhs = np.append(y[free] - K[free] @ (alpha * y), -(alpha @ y))
        a = np.linalg.lstsq(A, rhs, rcond=1e-11)[0][:m]
        alpha[free] = a * y[free]
    slack = 1e-9 * C
    if (alpha < -slack).any() or (alpha > C + slack).any() or abs(alpha @ y) > slack * len(y):
        return None
    return np.clip(alpha, 0, C)


def _violation(K: np.ndarray, y: np.ndarray, C: float, alpha: np.ndarray) -> tuple[float, np.ndarray, float]:
    F = K @ (alpha * y) - y
    grows, shrinks = alpha < C * (1 - 1e-8), alpha > C * 1e-8
    up, low = np.where(y > 0, grows, shrinks), np.where(y > 0, shrinks, grows)
    b_up, b_low = F[up].min(initial=np.inf), F[low].max(initial=-np.inf)
    return max(b_low - b_up, 0.0), alpha, -(b_up + b_low) / 2


def loo_by_enumeration(K: np.ndarray, y: np.ndarray, C: float) -> np.ndarray:
    """Delete each row, refit, predict."""
    outputs = []
    for r in range(len(y)):
        keep = np.arange(len(y)) != r
        alpha, bias = svm_by_enumeration(K[np.ix_(keep, keep)], y[keep], C)
        outputs.append(K[r, keep] @ (alpha * y[keep]) + bias)
    return np.array(outputs)
