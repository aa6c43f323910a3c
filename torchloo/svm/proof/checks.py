"""Leave-one-out errors that follow from the full machine alone: Table 1 of BOUND, and E2."""

import torch
from torch import Tensor

from torchloo.svm import result as code
from torchloo.svm.tolerances import NOTHING, at_bound, is_free

__all__ = [
    "check_correct_unused",
    "check_error",
    "check_joachims",
    "check_norm",
    "only_of_its_class",
    "sufficiency_checks",
]


def sufficiency_checks(
    K: Tensor, y: Tensor, alpha: Tensor, outputs: Tensor, box: Tensor, doubt: Tensor
) -> Tensor:
    """Which check settles each row, as a code of held_out.RESOLVED_BY; -1 if none does; (..., n).

    A check counts only if it holds whatever the outputs are, within the `doubt` (..., n) of them. All
    arguments are (..., n), K is (..., n, n): one machine, or a batch of them.

    Check 3 assumes that the machine without r has a free support vector too. Where it has none
    (small C, balanced classes) its bias is an interval and the check can be wrong about the
    midpoint; so it counts only together with E2, which bounds the whole interval.
    """
    free = is_free(alpha, box, at_bound(alpha, box))
    norm = check_norm(K, y, alpha, outputs, box, doubt)
    by = torch.full(y.shape, -1, device=y.device).masked_fill_(norm, code.NORM)
    by.masked_fill_(norm & check_joachims(K, y, alpha, outputs, free), code.JOACHIMS)
    by.masked_fill_(check_error(y, outputs, doubt), code.ERRS)
    return by.masked_fill_(check_correct_unused(alpha) & (y * outputs > doubt), code.UNUSED)


def only_of_its_class(y: Tensor) -> Tensor:
    """Rows without which one class is left, (..., n): what is left predicts the other label."""
    positive = y > 0
    count = positive.sum(-1, keepdim=True)
    return torch.where(positive, count == 1, count == y.shape[-1] - 1)


def check_correct_unused(alpha: Tensor) -> Tensor:
    """Check 1: a row with alpha = 0 is classified without it as with it, so correctly; (..., n)."""
    return alpha <= 0


def check_error(y: Tensor, outputs: Tensor, doubt: Tensor) -> Tensor:
    """Check 2: a row that the full machine gets wrong, beyond the doubt, stays so without it; (..., n)."""
    return y * outputs < -doubt


def check_joachims(K: Tensor, y: Tensor, alpha: Tensor, outputs: Tensor, free: Tensor) -> Tensor:
    """Check 3 (Joachims 2000): correct if 2 alpha_r R^2 + xi_r < 1, given a free support vector; (..., n).

    R^2 bounds k(x, x) - k(x, x') over the data.
    """
    k = K.diagonal(dim1=-2, dim2=-1)
    spread = (k - K.amin(-1)).amax(-1, keepdim=True)
    slack = (1 - y * outputs).clamp_min(0)
    return (2 * alpha * spread + slack < 1) & free.any(-1, keepdim=True)


def check_norm(K: Tensor, y: Tensor, alpha: Tensor, outputs: Tensor, box: Tensor, doubt: Tensor) -> Tensor:
    """E2: correct, because w cannot move far enough when alpha_r goes; (..., n).

    With e = y_r f_r > 0, c_i = y_r (y_i - f_i + f_r), A_i = sqrt(alpha_r k'_ii) and
    v_i = max(sqrt e, A_i / 2), r is correct without itself if the points i != r with
    c_i + v_i^2 - A_i v_i - e <= 0 weigh less than those of its class. A duality gap D adds sqrt(D k'_ii) to
    how far u_i - u_r can go, and rounding of K puts e and c in doubt: twice the `doubt` of a decision value
    covers both.
    """
    e, n, k = y * outputs, y.shape[-1], K.diagonal(dim1=-2, dim2=-1)
    row = ((e > 0) & (alpha > 0)).reshape(-1).nonzero()[:, 0]  # check 1 knows the others
    machine = row // n

    def of_row(x: Tensor) -> Tensor:
        """Entries (B, 1) of x (..., n)."""
        return x.reshape(-1).index_select(0, row)[:, None]

    def of_machine(x: Tensor) -> Tensor:
        """Rows (B, n) of x (..., n), of the machines that the rows are of."""
        return x.reshape(-1, n).index_select(0, machine)

    k_r = K.reshape(-1, n).index_select(0, row)
    between = k_r.mul_(-2).add_(of_machine(k)).add_(of_row(k)).clamp_min_(0)  # k', (B, n)
    A = between.mul_(of_row(alpha)).sqrt_()
    v = torch.maximum(of_row(e).sqrt(), A / 2)
    # c + v^2 - A v - e, where c - e = y_r (y - f)
    excess = v.mul_(v - A).addcmul_(of_row(y), of_machine(y - outputs))
    high = (excess > 2 * of_row(doubt)).scatter_(1, (row % n)[:, None], True)  # NaN is not, r does not count
    boxes = of_machine(box)
    low = (boxes * ~high).sum(1)
    positive, negative = ((box * side).sum(-1, keepdim=True) for side in (y > 0, y < 0))
    own_class = torch.where(y > 0, positive, negative) - box
    passed = low < of_row(own_class)[:, 0] - NOTHING * boxes.amin(1)
    found = y.new_zeros(y.numel(), dtype=torch.bool).index_copy_(0, row, passed)
    return found.view(y.shape)
