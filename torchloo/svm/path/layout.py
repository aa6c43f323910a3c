"""The variables that the paths of a machine have moved, and how the others stand.

Note [standing variables]
Nearly all variables keep their bound on every path of a machine: they stand. With u = K (alpha * y) and
d_i = u_i - y_i, one that pushes the bias up (a positive at 0 or a negative at its box) is on its proper
side if b + d_i >= 0, one that pushes it down (the others) if b + d_i <= 0. In the count of Note [gap ball]
it has s_i = f(x_r) - (b + d_i): if all are on their proper sides, s_i <= f(x_r) for those that push up,
and s_i >= f(x_r) for those that push down. Let the first count as below and the others as above. If
f(x_r) > rho the second is so, and the first only makes a proof of f* > 0 harder; if f(x_r) < -rho the
first is so, and the second only makes a proof of f* < 0 harder. So what standing variables add to the
count is one number for the machine, and a proof has to look at the moved variables only.

The variable r itself may stand: it is at its box, and the smaller it becomes the farther it is on its
proper side.
"""

import torch
from torch import Tensor

from torchloo.svm.solve.exact import Exact
from torchloo.svm.solve.merge import Problem

__all__ = ["Layout"]


class Layout:
    """The a moved variables of a machine, in this order, and a dummy; and all others, in their own."""

    def __init__(self, problem: Problem, full: Exact, moved: Tensor) -> None:
        """`moved` (a,) are the variables that some path has moved, or that were free."""
        K, y, a = problem.K, problem.y, len(moved)
        self.problem, self.full, self.moved, self.count = problem, full, moved, a
        self.place = torch.full_like(y, a, dtype=torch.long)  # of all variables among the moved, (m,)
        self.place[moved] = torch.arange(a, device=y.device)
        self.y, self.box, self.alpha = (self.of_moved(x) for x in (y, problem.box, full.alpha))
        # The dummy, whose alpha is 0, has the largest one of all variables.
        self.rounding = torch.cat([problem.rounding[moved], problem.rounding.amax()[None]])
        self.K = torch.cat([K.index_select(0, moved).T, torch.zeros_like(y)[:, None]], 1)  # (m, a + 1)
        self.start = K @ (full.alpha * y)  # u of the full solution, (m,)
        down = (full.upper ^ (y < 0)).to(y)
        self.push = (2 * down - 1).index_fill(0, moved, 0.0)  # -1 pushes up, +1 down, 0 has moved
        # Of the variables that stand: boxes, rounding * alpha, alpha * y, and W+ less what counts as below.
        stands = self.push != 0
        self.no_side = torch.where(stands, 0.0, -torch.inf)  # what has moved is never past its side
        self.rest_doubt = (full.alpha * problem.rounding) @ stands.to(y)
        self.rest_box, self.rest_pull = problem.box @ stands.to(y), (full.alpha * y) @ stands.to(y)
        self.rest_count = problem.box @ ((y > 0).to(y) - (1 - down)).masked_fill_(~stands, 0)

    def of_moved(self, x: Tensor) -> Tensor:
        """Values of all variables (m,) as those of the moved ones and the dummy, (a + 1,)."""
        return torch.cat([x[self.moved], x.new_zeros(1)])

    def change(self, alpha: Tensor, target: Tensor) -> Tensor:
        """What the moved variables other than r add to alpha * y, (B, a)."""
        change = (alpha - self.alpha).mul_(self.y)
        return change.scatter_(1, self.place[target][:, None], 0.0)[:, : self.count]

    def pull(self, alpha: Tensor, target: Tensor, gone: Tensor) -> Tensor:
        """u of the moved variables, (B, a + 1).

        From their coefficients (B, a + 1), whatever they say of r, and how far that of r went down (B,).
        """
        u = torch.addmm(self.of_moved(self.start), self.change(alpha, target), self.K[self.moved])
        return u.addcmul_(self.K[target], (self.problem.y[target] * gone)[:, None], value=-1)

    def standing_pull(self, target: Tensor, gone: Tensor) -> Tensor:
        """The sum of alpha * y of the variables that stand, r among them if it does, (B,)."""
        return self.rest_pull - (self.place[target] == self.count) * self.problem.y[target] * gone

    def whole(self, alpha: Tensor, target: Tensor, gone: Tensor) -> Tensor:
        """Coefficients of all variables, (B, m)."""
        full = self.full.alpha
        alpha = full.repeat(len(target), 1).index_copy_(1, self.moved, alpha[:, : self.count])
        return alpha.scatter_(1, target[:, None], (full[target] - gone)[:, None])
