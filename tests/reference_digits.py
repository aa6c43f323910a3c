"""Delete and refit with 60 digits: kernel, system and solution in mpmath, one held-out set after another."""

import mpmath
from mpmath import mp

mp.dps = 60


def exact(values):
    """Nested lists of the very numbers that a float64 tensor holds."""
    return [exact(value) for value in values] if values.ndim else mp.mpf(values.item())


def dot(x, z):
    return mp.fsum(a * b for a, b in zip(x, z, strict=True))


def gram(X, Z, kernel, rounding=None):
    """The kernel matrix; rounding(k_ii, k_jj) is what is added to the entry k_ij."""
    functions = {
        "linear": dot,
        "polynomial": lambda x, z: (dot(x, z) + 1) ** 2,
        "rbf": lambda x, z: mp.exp(-mp.fsum((a - b) ** 2 for a, b in zip(x, z, strict=True)) / 2),
    }
    k = functions[kernel]
    return [[k(x, z) + (rounding(k(x, x), k(z, z)) if rounding else 0) for z in Z] for x in X]


def symmetric(K):
    """The lower triangle, mirrored."""
    return [[K[max(i, j)][min(i, j)] for j in range(len(K))] for i in range(len(K))]


def product(A, B):
    return [[dot(row, column) for column in zip(*B, strict=True)] for row in A]


def solve(system, right):
    return list(mpmath.lu_solve(mp.matrix(system), mp.matrix(right)))


def dual(K, y, reg, weight, kept, left, bias):
    """(K + reg / weight) a + b = y, sum a = 0 where there is a bias; outputs of the rows left out."""
    system = [[K[i][j] + (reg / weight[i] if i == j else 0) for j in kept] + [1] * bias for i in kept]
    if bias:
        system.append([1] * len(kept) + [0])
    solution = solve(system, [y[i] for i in kept] + [0] * bias)
    return [dot([K[i][j] for j in kept] + [1] * bias, solution) for i in left]


def primal(Z, R, y, weight, kept, left):
    """Normal equations of ridge regression; outputs of the rows left out."""
    columns = range(len(R))
    C = [[R[j][k] + mp.fsum(weight[i] * Z[i][j] * Z[i][k] for i in kept) for k in columns] for j in columns]
    coef = solve(C, [mp.fsum(weight[i] * Z[i][j] * y[i] for i in kept) for j in columns])
    return [dot(Z[i], coef) for i in left]


def code(y, weight):
    positive = mp.fsum(w for t, w in zip(y, weight, strict=True) if t > 0)
    total = mp.fsum(weight)
    return [total / positive if t > 0 else -total / (total - positive) for t in y]


def held_out(machine, kernel, X, y, reg, weight, clusters, basis=(), rounding=None):
    """Outputs of machines that never saw the row's cluster; `rounding` as in gram."""
    if machine == "kfd":
        y = code(y, weight)
    if machine == "sparse":
        centres = [X[j] for j in basis]
        Z = [[*row, mp.mpf(1)] for row in gram(X, centres, kernel, rounding)]
        Kzz = symmetric(gram(centres, centres, kernel, rounding))
        R = [[reg * value for value in row] + [0] for row in Kzz]
        R.append([0] * (len(centres) + 1))
    else:
        K = symmetric(gram(X, X, kernel, rounding))
        K = product(K, K) if machine == "kfd" else K
    outputs = [None] * len(X)
    for label in set(clusters):
        left = [i for i, other in enumerate(clusters) if other == label]
        kept = [i for i, other in enumerate(clusters) if other != label]
        if machine == "sparse":
            said = primal(Z, R, y, weight, kept, left)
        else:
            said = dual(K, y, reg, weight, kept, left, machine != "rls")
        for i, value in zip(left, said, strict=True):
            outputs[i] = value
    return outputs
