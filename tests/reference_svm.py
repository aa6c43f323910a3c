"""The SVM by plain loops: no cleverness, no code shared with the package.

Every active set is tried, for n up to 8 or so; or pairs move one after another until none gains.
"""

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


def _solution(K: np.ndarray, y: np.ndarray, C: float | np.ndarray, status: np.ndarray) -> np.ndarray | None:
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
    if (alpha < -slack).any() or (alpha > C + slack).any() or abs(alpha @ y) > np.max(slack) * len(y):
        return None
    return np.clip(alpha, 0, C)


def _violation(
    K: np.ndarray, y: np.ndarray, C: float | np.ndarray, alpha: np.ndarray
) -> tuple[float, np.ndarray, float]:
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


def svm_by_pairs(K: np.ndarray, y: np.ndarray, box: np.ndarray) -> tuple[np.ndarray, float]:
    """alpha and the bias: the most violating pair, again and again, then the equations of what is free."""
    if len(set(y)) == 1:
        return np.zeros(len(y)), float(y[0])
    alpha = np.zeros(len(y))
    F = -y.copy()
    for _ in range(100_000):
        grows, shrinks = alpha < box, alpha > 0
        i = np.where(np.where(y > 0, grows, shrinks), F, np.inf).argmin()
        j = np.where(np.where(y > 0, shrinks, grows), F, -np.inf).argmax()
        if F[j] - F[i] <= 1e-9:
            break
        room_i, room_j = (box[i] - alpha[i], alpha[i]), (alpha[j], box[j] - alpha[j])
        room = min(room_i[int(y[i] < 0)], room_j[int(y[j] < 0)])
        step = min((F[j] - F[i]) / max(K[i, i] + K[j, j] - 2 * K[i, j], 1e-12), room)
        for k, sense in ((i, 1), (j, -1)):
            alpha[k] += sense * y[k] * step
            alpha[k] = 0 if alpha[k] < 1e-12 * box[k] else min(alpha[k], box[k])
            alpha[k] = box[k] if alpha[k] > (1 - 1e-12) * box[k] else alpha[k]
        F = F + step * (K[i] - K[j])
    status = np.where(alpha >= box, 1, np.where(alpha > 0, 2, 0))
    exact = _solution(K, y, box, status)
    found = [_violation(K, y, box, a) for a in (alpha, exact) if a is not None]
    _, alpha, bias = min(found, key=lambda outcome: outcome[0])
    return alpha, bias


def held_out(K: np.ndarray, Y: np.ndarray, box: np.ndarray, clusters: list[int] | None) -> np.ndarray:
    """Delete each row (or cluster), refit for each column of Y (n, c), predict."""
    labels = np.arange(len(Y)) if clusters is None else np.asarray(clusters)
    outputs = np.empty_like(Y)
    for label in np.unique(labels):
        left, keep = labels == label, labels != label
        for k, y in enumerate(Y.T):
            alpha, bias = svm_by_pairs(K[np.ix_(keep, keep)], y[keep], box[keep])
            outputs[left, k] = K[np.ix_(left, keep)] @ (alpha * y[keep]) + bias
    return outputs
