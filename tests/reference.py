"""Delete and refit, by plain loops. Shares no code with the package and knows no closed form.

Every solver takes one problem without batch dimensions: a kernel matrix (or features), targets
(n, c), weights (n,), and returns a function of kernel rows (or features) -> outputs (m, c).
"""

import torch


def solve_rls(K, Y, reg, weight):
    """sum_i weight_i |y_i - f(x_i)|^2 + reg a^T K a."""
    a = torch.linalg.solve(K + torch.diag(reg / weight), Y)
    return lambda K_new: K_new @ a


def solve_lssvm(K, Y, reg, weight):
    """The bordered system of Suykens."""
    n = K.shape[0]
    system = torch.zeros(n + 1, n + 1, dtype=K.dtype)
    system[:n, :n] = K + torch.diag(reg / weight)
    system[:n, n] = 1
    system[n, :n] = 1
    right = torch.cat([Y, torch.zeros(1, Y.shape[1], dtype=K.dtype)])
    solution = torch.linalg.solve(system, right)
    return lambda K_new: K_new @ solution[:n] + solution[n]


def solve_ridge(Z, Y, R, weight):
    """Normal equations of the weighted, penalised squares."""
    C = R + Z.T @ torch.diag(weight) @ Z
    p = torch.linalg.solve(C, Z.T @ torch.diag(weight) @ Y)
    return lambda Z_new: Z_new @ p


def solve_sparse(Kzz, Kxz, Y, reg, weight):
    """Ridge regression on [Kxz 1] with the penalty reg beta^T Kzz beta."""
    m = Kzz.shape[0]
    R = torch.zeros(m + 1, m + 1, dtype=Kzz.dtype)
    R[:m, :m] = reg * Kzz
    predict = solve_ridge(with_ones(Kxz), Y, R, weight)
    return lambda K_new: predict(with_ones(K_new))


def solve_kfd(K, T, reg, weight):
    """Ridge regression of the coded targets on [K 1], free bias; K (rows, basis)."""
    m = K.shape[1]
    R = reg * torch.eye(m + 1, dtype=K.dtype)
    R[m, m] = 0
    predict = solve_ridge(with_ones(K), T, R, weight)
    return lambda K_new: predict(with_ones(K_new))


def variance_of_kernel(K, k_new, own, reg, weight, bias):
    """k(x,x) - k^T M^{-1} k, and what an unpenalised bias adds to it, at one point after the other."""
    M = K + torch.diag(reg / weight)
    one = torch.ones(len(K), dtype=K.dtype)
    found = []
    for k, k_xx in zip(k_new, own, strict=True):
        v = k_xx - k @ torch.linalg.solve(M, k)
        if bias:
            v = v + (1 - one @ torch.linalg.solve(M, k)) ** 2 / (one @ torch.linalg.solve(M, one))
        found.append(v)
    return torch.stack(found)


def variance_of_features(Z, R, Z_new, reg, weight):
    """reg z^T C^{-1} z, C = R + Z^T Omega Z, at one point after the other."""
    C = R + Z.T @ torch.diag(weight) @ Z
    return torch.stack([reg * z @ torch.linalg.solve(C, z) for z in Z_new])


def with_ones(Z):
    return torch.cat([Z, torch.ones(Z.shape[0], 1, dtype=Z.dtype)], dim=1)


def code(y, weight):
    """KFD's targets, column by column."""
    T = torch.empty_like(y)
    for j in range(y.shape[1]):
        positive = sum(weight[i] for i in range(len(y)) if y[i, j] > 0)
        total = sum(weight[i] for i in range(len(y)))
        for i in range(len(y)):
            T[i, j] = total / positive if y[i, j] > 0 else -total / (total - positive)
    return T


def held_out(n, clusters, refit):
    """Outputs (n, c) of machines that never saw the row's cluster; refit(kept, left) -> (s, c).

    Clusters that are pairs (rows to predict, rows to leave out) give (m, c), one after another.
    """
    if clusters is not None and isinstance(clusters[0], tuple):
        said = []
        for predicted, left in clusters:
            kept = [i for i in range(n) if i not in [int(j) for j in left]]
            for i in predicted:
                said.append(refit(kept, [int(i)])[0])
        return torch.stack(said)
    labels = list(range(n)) if clusters is None else [int(label) for label in clusters]
    outputs = [None] * n
    for label in dict.fromkeys(labels):
        left = [i for i in range(n) if labels[i] == label]
        kept = [i for i in range(n) if labels[i] != label]
        said = refit(kept, left)
        for position, i in enumerate(left):
            outputs[i] = said[position]
    return torch.stack(outputs)


def rls(K, Y, reg, weight, clusters=None):
    def refit(kept, left):
        predict = solve_rls(K[kept][:, kept], Y[kept], reg, weight[kept])
        return predict(K[left][:, kept])

    return held_out(len(K), clusters, refit)


def lssvm(K, Y, reg, weight, clusters=None):
    def refit(kept, left):
        predict = solve_lssvm(K[kept][:, kept], Y[kept], reg, weight[kept])
        return predict(K[left][:, kept])

    return held_out(len(K), clusters, refit)


def sparse_lssvm(Kzz, Kxz, Y, reg, weight, clusters=None):
    def refit(kept, left):
        return solve_sparse(Kzz, Kxz[kept], Y[kept], reg, weight[kept])(Kxz[left])

    return held_out(len(Kxz), clusters, refit)


def kfd(K, y, reg, weight, clusters=None):
    T = code(y, weight)

    def refit(kept, left):
        return solve_kfd(K[kept], T[kept], reg, weight[kept])(K[left])

    return held_out(len(K), clusters, refit)


def ridge(Z, Y, R, weight, clusters=None):
    def refit(kept, left):
        return solve_ridge(Z[kept], Y[kept], R, weight[kept])(Z[left])

    return held_out(len(Z), clusters, refit)
