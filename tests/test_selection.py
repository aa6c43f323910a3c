"""select: what it finds, what it leaves alone, and what it refuses."""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from tqdm import tqdm

import torchloo as tl

DOUBLE = torch.float64
K = tl.kernels
SEARCHES = ["gradient", "nelder-mead", "grid"]


def sine(n=40, d=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, dtype=DOUBLE, generator=generator)
    return X, torch.sin(2 * X[:, 0]) + 0.2 * torch.randn(n, dtype=DOUBLE, generator=generator)


def labelled(n=40, d=2, seed=0):
    X, y = sine(n, d, seed)
    return X, torch.where(y > 0, 1.0, -1.0).double()


def select(machine, X, y, *args, **options):
    return tl.select(machine, X, y, *args, progress=False, **options)


def brute_force(X, y, regs, scales):
    """The least PRESS over a fine grid, by refitting without each row."""
    least = math.inf
    for scale in scales:
        gram = torch.exp(-torch.cdist(X, X).square() / (2 * scale**2))
        for reg in regs:
            press = 0.0
            for i in range(len(y)):
                kept = [j for j in range(len(y)) if j != i]
                n = len(kept)
                system = torch.ones(n + 1, n + 1, dtype=DOUBLE)
                system[:n, :n] = gram[kept][:, kept] + reg * torch.eye(n, dtype=DOUBLE)
                system[n, n] = 0
                solution = torch.linalg.solve(system, torch.cat([y[kept], torch.zeros(1, dtype=DOUBLE)]))
                press += (y[i] - gram[i, kept] @ solution[:n] - solution[n]).item() ** 2
            least = min(least, press)
    return least


@pytest.mark.parametrize("search", ["gradient", "nelder-mead"])
def test_search_is_no_worse_than_a_fine_grid_by_refits(search):
    X, y = sine(16)
    least = brute_force(X, y, torch.logspace(-4, 1, 8), torch.logspace(-0.7, 1, 8))
    assert select(tl.LSSVM(K.RBF()), X, y, search=search, starts=3).value <= least


def test_grid_is_the_best_of_plain_loops():
    X, y = sine()
    regs = [1e-3, 1e-2, 0.1, 1.0, 3.0, 10.0]
    scales = [0.5, 1.0, 2.0]
    chosen = select(tl.LSSVM(K.RBF()), X, y, search="grid", grid={"reg": regs, "lengthscale": scales})
    values = {
        (reg, scale): tl.criteria.press(tl.LSSVM(K.RBF(scale), reg).loo(X, y)).item()
        for reg in regs
        for scale in scales
    }
    best = min(values, key=values.get)
    assert chosen.value == pytest.approx(values[best], rel=1e-9)
    assert chosen.machine.reg.item() == pytest.approx(best[0])
    assert chosen.machine.kernel.lengthscale.item() == pytest.approx(best[1])
    assert chosen.evaluations == len(chosen.history) == 18
    seen = {tuple(e.parameters.values()): e.value for e in chosen.history}
    for (reg, scale), value in values.items():
        match = [v for (r, s), v in seen.items() if math.isclose(r, reg) and math.isclose(s, scale)]
        assert match == [pytest.approx(value, rel=1e-7)]


def test_grid_takes_vectors_for_ard_and_one_number_for_all_entries():
    X, y = sine()
    grid = {"kernel.lengthscale": [1.0, [0.5, 50.0]]}
    chosen = select(tl.LSSVM(K.RBF(torch.ones(2))), X, y, search="grid", grid=grid)
    received = chosen.machine.kernel.lengthscale
    expected = torch.tensor([0.5, 50.0], dtype=DOUBLE)
    torch.testing.assert_close(received, expected)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("criterion", ["press", "log_density"])
def test_value_is_the_criterion_of_the_machine_and_the_best_of_the_history(search, criterion):
    X, y = sine()
    chosen = select(tl.LSSVM(K.RBF()), X, y, criterion, search)
    measure = getattr(tl.criteria, criterion)
    assert chosen.value == pytest.approx(measure(chosen.machine.loo(X, y)).item(), rel=1e-9)
    best = min if measure.lower_is_better else max
    assert chosen.value == best(e.value for e in chosen.history)
    assert [e.number for e in chosen.history] == list(range(1, chosen.evaluations + 1))
    assert set(chosen.history[0].parameters) == {"reg", "kernel.lengthscale"}
    assert chosen.machine(X).shape == y.shape
    assert str(chosen.evaluations) in str(chosen)


@pytest.mark.parametrize("search", SEARCHES)
def test_the_given_machine_stays_as_it_is(search):
    X, y = sine()
    machine = tl.LSSVM(K.RBF(0.3), reg=0.7).fit(X[:10], y[:10])
    before = copy.deepcopy(machine.state_dict())
    chosen = select(machine, X, y, search=search)
    assert chosen.machine is not machine
    for name, value in machine.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, before[name])
    with pytest.raises(ValueError, match="no candidate could be evaluated: kfd: y must hold labels"):
        select(tl.KFD(K.RBF()), X, y)
    assert machine.coef is not None


def test_starts_are_reproducible_and_never_hurt():
    X, y = sine(30, 3)
    machine = tl.LSSVM(K.RBF(torch.ones(3)))

    def run(seed, starts):
        generator = torch.Generator().manual_seed(seed)
        return select(machine, X, y, starts=starts, generator=generator, max_evaluations=25)

    first = run(0, 4)
    again = run(0, 4)
    other = run(1, 4)
    assert first.history == again.history
    assert first.history != other.history
    assert first.value <= run(0, 1).value
    assert first.history[0] == other.history[0]  # the first start is not drawn


def test_starting_values_come_from_the_data_or_from_the_machine():
    X, y = sine(50)
    machine = tl.LSSVM(K.RBF(7.0), reg=5.0)
    own = select(machine, X, y, start="machine", max_evaluations=1).history[0].parameters
    assert own == {"reg": pytest.approx(5.0), "kernel.lengthscale": pytest.approx(7.0)}
    auto = select(machine, X, y, max_evaluations=1).history[0].parameters
    assert auto["kernel.lengthscale"] == pytest.approx(torch.pdist(X).median().item())
    wide = select(machine, 100 * X, y, max_evaluations=1).history[0].parameters
    assert wide["kernel.lengthscale"] == pytest.approx(100 * auto["kernel.lengthscale"])
    assert wide["reg"] == pytest.approx(auto["reg"])
    loud = select(machine, X, 1000 * y, max_evaluations=1).history[0].parameters
    assert loud["reg"] == pytest.approx(auto["reg"])  # linear in the targets


def test_noise_raises_the_first_regularisation():
    X, _ = sine(200, 1)
    smooth = torch.sin(X[:, 0])
    noise = torch.randn(200, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    first = [
        select(tl.LSSVM(K.RBF()), X, y, max_evaluations=1).history[0].parameters["reg"]
        for y in (smooth, smooth + noise)
    ]
    assert first[1] > 10 * first[0]


def test_ard_finds_the_input_that_matters():
    X, y = sine(60, 4)
    scales = select(tl.LSSVM(K.RBF(torch.ones(4))), X, y).machine.kernel.lengthscale
    assert scales[1:].min() > 3 * scales[0]


def test_network_weights_are_searched_too():
    X, y = sine(30)
    torch.manual_seed(0)
    features = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    before = copy.deepcopy(features.state_dict())
    chosen = select(tl.LSSVM(K.RBF(features=features)), X, y, max_evaluations=30, starts=2)
    assert chosen.value < 0.8 * chosen.history[0].value
    assert all(torch.equal(features.state_dict()[name], value) for name, value in before.items())
    assert not torch.equal(chosen.machine.kernel.features[0].weight, features[0].weight)
    assert set(chosen.history[0].parameters) == {"reg", "kernel.lengthscale"}


def test_fixed_parameters_stay_fixed():
    X, y = sine()
    machine = tl.LSSVM(K.RBF(0.8))
    machine.kernel.log_lengthscale.requires_grad_(False)
    chosen = select(machine, X, y)
    assert chosen.machine.kernel.lengthscale.item() == pytest.approx(0.8)
    for parameter in machine.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="select: machine must have a parameter that requires grad"):
        select(machine, X, y)


@pytest.mark.parametrize("search", SEARCHES)
def test_clusters_and_weights_reach_the_criterion(search):
    X, y = sine()
    clusters = torch.arange(len(y)) // 4
    weight = 0.5 + torch.rand(len(y), dtype=DOUBLE)
    chosen = select(
        tl.LSSVM(K.RBF()), X, y, "mse", search, clusters=clusters, weight=weight, criterion_weight=None
    )
    held_out = chosen.machine.lco(X, y, clusters, weight)
    assert chosen.value == pytest.approx(tl.criteria.mse(held_out, weight=None).item(), rel=1e-8)
    refitted = copy.deepcopy(chosen.machine).fit(X, y, weight)
    torch.testing.assert_close(chosen.machine(X), refitted(X))


def test_weights_may_be_a_function_of_the_targets():
    X, y = labelled()
    given = tl.balanced_weight(y)
    by_name = select(tl.LSSVM(K.RBF()), X, y, weight=tl.balanced_weight, criterion_weight=tl.balanced_weight)
    by_tensor = select(tl.LSSVM(K.RBF()), X, y, weight=given, criterion_weight=given)
    assert by_name.history == by_tensor.history


@pytest.mark.parametrize("search", ["nelder-mead", "grid"])
@pytest.mark.parametrize("criterion", ["auc", "leave_pair_out_auc", "kendall_tau"])
def test_what_is_better_higher_is_maximised(search, criterion):
    X, y = labelled(30)
    chosen = select(tl.LSSVM(K.RBF()), X, y, criterion, search)
    values = [e.value for e in chosen.history]
    assert chosen.value == max(values) > min(values)
    assert chosen.history[0].objective == -chosen.history[0].value


def test_criterion_may_be_any_callable_of_one_held_out():
    X, y = sine()

    def absolute(held_out):
        assert held_out.outputs.shape == (40,)
        return held_out.residuals.abs().mean()

    for search in SEARCHES:
        chosen = select(tl.LSSVM(K.RBF()), X, y, absolute, search, max_evaluations=20)
        assert chosen.value == pytest.approx(absolute(chosen.machine.loo(X, y)).item(), rel=1e-8)
    steep = functools.partial(tl.criteria.smooth_error, gamma=3.0)
    X, y = labelled()
    chosen = select(tl.LSSVM(K.RBF()), X, y, steep)
    assert chosen.value == pytest.approx(steep(chosen.machine.loo(X, y)).item(), rel=1e-8)


@pytest.mark.parametrize("search", SEARCHES)
def test_svc_is_selected_by_every_search(search):
    X, y = labelled(30)
    grid = {"C": [0.1, 1.0, 10.0], "lengthscale": [0.5, 2.0]} if search == "grid" else None
    chosen = select(tl.SVC(K.RBF()), X, y, "smooth_error", search, grid=grid, max_evaluations=12)
    assert chosen.value == pytest.approx(tl.criteria.smooth_error(chosen.machine.loo(X, y)).item(), rel=1e-6)
    assert chosen.value <= chosen.history[0].value
    if search == "grid":
        errors = select(tl.SVC(K.RBF()), X, y, "error_rate", search, grid=grid)
        assert errors.value == min(e.value for e in errors.history)


def test_several_outputs_are_averaged():
    X, y = sine()
    Y = torch.stack([y, y.square()], -1)
    chosen = select(tl.RLS(K.RBF()), X, Y)
    assert chosen.value == pytest.approx(tl.criteria.press(chosen.machine.loo(X, Y)).item())
    assert chosen.machine(X).shape == (40, 2)


def test_single_precision_survives():
    X, y = sine()
    chosen = select(tl.LSSVM(K.RBF()), X.float(), y.float())
    assert chosen.machine(X.float()).dtype == torch.float32
    exact = select(tl.LSSVM(K.RBF()), X, y)
    assert chosen.value == pytest.approx(exact.value, rel=1e-2)


def test_bounds_hold():
    X, y = sine()
    for search in ("gradient", "nelder-mead"):
        chosen = select(tl.LSSVM(K.RBF()), X, y, search=search, bounds={"lengthscale": (3.0, 4.0)}, starts=3)
        scales = [e.parameters["kernel.lengthscale"] for e in chosen.history]
        assert 3 * (1 - 1e-9) <= min(scales) <= max(scales) <= 4 * (1 + 1e-9)
        assert chosen.machine.kernel.lengthscale.item() == pytest.approx(3.0, rel=1e-2)


def test_prior_keeps_parameters_near_the_first_start():
    X, y = sine(30, 5)
    spread = []
    for prior in (None, 1.0, 100.0):
        chosen = select(tl.LSSVM(K.RBF(torch.ones(5))), X, y, prior=prior)
        first = torch.tensor(chosen.history[0].parameters["kernel.lengthscale"], dtype=DOUBLE)
        spread.append((chosen.machine.kernel.lengthscale / first).log().square().sum().item())
        assert chosen.value == pytest.approx(tl.criteria.press(chosen.machine.loo(X, y)).item())
    assert spread[0] > 2 * spread[1] > 4 * spread[2]


def test_prior_may_be_a_callable():
    X, y = sine()

    def near_two(logs):
        return 1e3 * (logs["kernel.lengthscale"] - math.log(2.0)).square()

    chosen = select(tl.LSSVM(K.RBF()), X, y, prior=near_two)
    assert chosen.machine.kernel.lengthscale.item() == pytest.approx(2.0, rel=0.02)
    with pytest.raises(TypeError, match="select: prior must return one penalty for each of 1 candidates"):
        select(tl.LSSVM(K.RBF()), X, y, prior=lambda logs: torch.zeros(()))


def interrupting(after):
    """A criterion during which Ctrl-C is pressed."""
    calls = []

    def criterion(held_out):
        calls.append(None)
        if len(calls) > after:
            raise KeyboardInterrupt
        return held_out.residuals.square().sum()

    return criterion


@pytest.mark.parametrize(
    ("search", "after", "counted"), [("gradient", 7, 7), ("nelder-mead", 7, 7), ("grid", 30, 25)]
)
def test_an_interrupt_gives_the_best_so_far(search, after, counted):
    X, y = sine()
    with pytest.warns(RuntimeWarning, match="select: interrupted; this is the best so far"):
        chosen = select(tl.RLS(Scaled()), X, y, interrupting(after), search)
    assert chosen.evaluations == counted  # of a path all or none
    assert chosen.value == min(e.value for e in chosen.history)
    assert chosen.machine(X).shape == y.shape
    with pytest.raises(KeyboardInterrupt):
        select(tl.LSSVM(K.RBF()), X, y, interrupting(0), search)


class Scaled(tl.kernels.Kernel):
    """A kernel without batches, so that candidates come one by one."""

    def __init__(self):
        super().__init__(rate=1.0)

    def _evaluate(self, X, Z):
        return torch.exp(-self.log_rate.exp() * torch.cdist(X, X if Z is None else Z).square())


def test_wild_scales_are_warned_of_unless_the_kernel_does_not_mind():
    X, y = sine()
    wild = X * torch.tensor([1.0, 1e4], dtype=DOUBLE)
    with pytest.warns(UserWarning, match=r"from 1.* to 1.*e\+04.*standardise them"):
        select(tl.LSSVM(K.RBF()), wild, y, max_evaluations=1)
    select(tl.LSSVM(K.RBF(torch.ones(2))), wild, y, max_evaluations=1)
    select(tl.LSSVM(K.RBF()), torch.cat([X, torch.ones_like(X)], 1), y, max_evaluations=1)


def test_ard_starts_alike_whatever_the_units():
    X, y = sine()
    wild = X * torch.tensor([1.0, 1e4], dtype=DOUBLE)
    first = [select(tl.LSSVM(K.RBF(torch.ones(2))), Z, y, max_evaluations=1).value for Z in (X, wild)]
    assert first[0] == pytest.approx(first[1], rel=1e-9)


def test_no_solution_anywhere_names_the_remedy():
    X = torch.ones(8, 2, dtype=torch.float32)
    y = torch.arange(8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"select: no candidate could be evaluated: .*use a larger reg"):
        select(tl.RLS(K.RBF()), X, y, bounds={"reg": (1e-30, 1e-29)})


@pytest.mark.parametrize(
    ("criterion", "alternative"),
    [
        ("error_rate", "tl.criteria.smooth_error"),
        ("balanced_error_rate", "criterion_weight=tl.balanced_weight"),
        ("balanced_multiclass_error", "tl.criteria.cross_entropy with criterion_weight"),
        ("auc", "tl.criteria.smooth_wmw"),
        ("leave_pair_out_auc", "tl.criteria.smooth_wmw"),
        ("multiclass_error", "tl.criteria.press"),
    ],
)
def test_a_criterion_without_gradient_is_refused_with_one_that_has(criterion, alternative):
    X, y = labelled()
    y = torch.stack([y, -y], -1) if "multiclass_error" in criterion else y
    with pytest.raises(ValueError, match=f"select: criterion must be differentiable.*{alternative}"):
        select(tl.LSSVM(K.RBF()), X, y, criterion)


def test_a_callable_without_gradient_is_refused():
    X, y = sine()
    with pytest.raises(TypeError, match=r"select: criterion .* has no gradient with this machine"):
        select(tl.LSSVM(K.RBF()), X, y, lambda held_out: held_out.residuals.detach().square().sum())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"search": "random"}, ValueError, "search must be one of gradient, nelder-mead, grid, got 'random'"),
        ({"criterion": "best"}, ValueError, "criterion must be one of press, .* got 'best'|must be one of"),
        ({"criterion": 3}, TypeError, "criterion must be a name or a callable of a HeldOut, got int"),
        ({"starts": 0}, ValueError, "starts must be a positive integer, got 0"),
        ({"max_evaluations": 2.5}, ValueError, "max_evaluations must be a positive integer"),
        ({"tolerance": 0.0}, ValueError, "tolerance must be between 0 and 1"),
        ({"start": "zero"}, ValueError, "start must be 'auto' or 'machine'"),
        ({"prior": -1.0}, ValueError, "prior must be a non-negative number or a callable"),
        ({"bounds": {"width": (1, 2)}}, ValueError, "bounds must name parameters .reg, kernel.lengthscale."),
        ({"bounds": {"reg": (2, 1)}}, ValueError, r"bounds of reg must be \(low, high\)"),
        ({"bounds": {"reg": 2}}, ValueError, r"bounds of reg must be \(low, high\)"),
        ({"grid": {"reg": [1.0]}}, ValueError, "grid must be None unless search='grid'"),
        ({"search": "grid", "grid": {}}, ValueError, "grid must be a dict of name -> values"),
        ({"search": "grid", "grid": {"reg": [0.0]}}, ValueError, "grid of reg must be positive"),
        ({"search": "grid", "grid": {"reg": 1.0}}, ValueError, "grid of reg must be a list"),
        ({"search": "grid", "grid": {"rate": [1.0]}}, ValueError, "grid must name parameters"),
        ({"weight": [1.0]}, TypeError, "weight must be a tensor or a callable of y, got list"),
        ({"weight": torch.ones(3, dtype=DOUBLE)}, ValueError, r"weight must have shape \(40,\), got \(3,\)"),
        ({"weight": "own"}, TypeError, "weight must be a tensor or a callable of y, got str"),
        ({"clusters": [0, 1]}, ValueError, "clusters must hold one label for each of the 40 rows"),
    ],
)
def test_bad_options_are_named(options, error, message):
    X, y = sine()
    with pytest.raises(error, match=f"select: .*({message})"):
        select(tl.LSSVM(K.RBF()), X, y, **options)


@pytest.mark.parametrize(
    ("X", "y", "error", "message"),
    [
        (torch.ones(4), torch.ones(4), ValueError, r"X must be \(n, d\) with at least 3 rows"),
        (torch.ones(2, 1), torch.ones(2), ValueError, r"X must be \(n, d\) with at least 3 rows"),
        (torch.ones(4, 1), torch.ones(3), ValueError, r"y must be \(n,\) or \(n, c\) with the 4 rows of X"),
        (torch.ones(4, 1), torch.tensor([1.0, 2.0, torch.nan, 0.0]), ValueError, "y must be finite"),
        (torch.ones(4, 1), torch.ones(4, dtype=torch.complex64), TypeError, "y must be float32 or float64"),
        (torch.ones(4, 1), torch.ones(4, dtype=torch.int64), ValueError, "y must hold at least two classes"),
    ],
)
def test_bad_rows_are_named(X, y, error, message):
    with pytest.raises(error, match=f"select: {message}"):
        select(tl.LSSVM(K.RBF()), X, y)


def test_bad_machines_are_named():
    X, y = sine()
    with pytest.raises(TypeError, match="select: machine must be a torchloo machine, got Linear"):
        select(nn.Linear(2, 1), X, y)
    with pytest.raises(
        ValueError, match=r"select: reg must belong to one machine, got the batch shape \(3,\)"
    ):
        select(tl.LSSVM(K.RBF(), reg=torch.ones(3)), X, y)
    scaled = K.Scaled(K.RBF(), torch.ones(3))
    with pytest.raises(ValueError, match=r"select: kernel.scale must belong to one machine, got the batch"):
        select(tl.LSSVM(scaled), X, y)
    with pytest.raises(ValueError, match="grid of 6 parameters would have"):
        select(tl.LSSVM(2.0 * K.RBF() + K.RBF() * K.RBF() + 3.0 * K.Linear()), X, y, search="grid")
    with pytest.raises(
        ValueError, match=r"select: bounds must name parameters .* 'lengthscale' is ambiguous"
    ):
        select(tl.LSSVM(K.RBF() + K.Matern()), X, y, bounds={"lengthscale": (1, 2)})


def test_gradients_are_taken_under_no_grad_too():
    X, y = sine()
    expected = select(tl.LSSVM(K.RBF()), X, y, max_evaluations=5)
    with torch.no_grad():
        assert select(tl.LSSVM(K.RBF()), X, y, max_evaluations=5).history == expected.history


def test_a_lengthscale_of_one_entry_is_shared():
    X, y = sine()
    first = [select(tl.LSSVM(K.RBF(scale)), X, y, max_evaluations=1).value for scale in (1.0, torch.ones(1))]
    assert first[0] == first[1]


def test_progress_tells_the_best_so_far(capsys, monkeypatch):
    monkeypatch.setattr("torchloo.search.run.tqdm", functools.partial(tqdm, mininterval=0))  # however fast
    X, y = sine()
    tl.select(tl.LSSVM(K.RBF()), X, y)
    assert "best" in capsys.readouterr().err
    select(tl.LSSVM(K.RBF()), X, y)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e6])
def test_the_size_of_the_weights_changes_nothing(scale):
    X, y = sine()
    plain = select(tl.LSSVM(K.RBF()), X, y)
    scaled = select(tl.LSSVM(K.RBF()), X, y, weight=torch.full_like(y, scale))
    assert scaled.value / scale == pytest.approx(plain.value, rel=1e-4)


def test_a_simplex_at_the_edge_of_a_narrow_box_still_moves():
    X, y = sine()
    options = {"start": "machine", "bounds": {"lengthscale": (3.0, 8.0)}}
    narrow = select(tl.LSSVM(K.RBF(3.0)), X, y, search="nelder-mead", **options)
    descended = select(tl.LSSVM(K.RBF(3.0)), X, y, **options)
    assert narrow.value == pytest.approx(descended.value, rel=1e-3)


def test_a_partial_may_say_that_higher_is_better():
    def score(held_out, sign, **options):
        return sign * tl.criteria.press(held_out, **options)

    best = functools.partial(score, sign=-1.0)
    best.lower_is_better = False
    X, y = sine()
    chosen = select(tl.LSSVM(K.RBF()), X, y, best, "grid", grid={"reg": [0.02, 1e6]})
    assert float(chosen.machine.reg.detach()) == pytest.approx(0.02)


def test_bounds_that_are_no_dict_are_refused():
    X, y = sine()
    with pytest.raises(TypeError, match="bounds must be a dict"):
        select(tl.LSSVM(K.RBF()), X, y, bounds=3)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_rows_are_refused_with_a_remedy():
    X, y = sine()
    with pytest.raises(TypeError, match="dense"):
        select(tl.LSSVM(K.Linear()), X.to_sparse_csr(), y)


def fixed_scale(kernel):
    """A kernel whose parameters are not searched."""
    return kernel.requires_grad_(False)


# Machines in which only reg is to be chosen: explicit features, a kernel matrix, and more columns than rows.
ALONE = {
    "linear": lambda: tl.LSSVM(K.Linear()),
    "rls": lambda: tl.RLS(K.Linear()),
    "rbf": lambda: tl.LSSVM(fixed_scale(K.RBF(1.0))),
    "sparse": lambda: tl.SparseLSSVM(fixed_scale(K.RBF(1.0)), basis=8),
    "kfd": lambda: tl.KFD(fixed_scale(K.RBF(1.0))),
}
SMOOTH = {
    "press": tl.criteria.press,
    "log_density": tl.criteria.log_density,
    "smooth_error": functools.partial(tl.criteria.smooth_error, gamma=3.0),
    "own": lambda held_out: held_out.residuals.cosh().log().mean(),
}


@pytest.mark.parametrize("criterion", SMOOTH)
@pytest.mark.parametrize("name", ALONE)
def test_reg_alone_is_found_along_three_paths(name, criterion, monkeypatch):
    X, y = labelled(60, 4)
    machine = ALONE[name]()
    measure = SMOOTH[criterion]
    lower = criterion != "log_density"
    fine = torch.logspace(-5, 4, 901, dtype=DOUBLE)
    if criterion == "own":
        best = min(measure(machine.loo(X, y)) for machine.log_reg.data in fine.log()).item()
    else:
        best = measure(machine.path(X, y, fine)).aminmax()[0 if lower else 1].item()
    calls, path = [], type(machine).path
    monkeypatch.setattr(tl.machine.LeastSquares, "path", lambda *args: calls.append(None) or path(*args))
    monkeypatch.setattr(tl.machine.LeastSquares, "loo", lambda *args: pytest.fail("a reg by itself"))
    chosen = select(machine, X, y, measure)
    most = 5 if criterion == "own" else 3  # which has poles closer by
    assert len(calls) <= most
    assert chosen.evaluations == len(chosen.history) <= 25 + 9 * (most - 1) // 2
    slack = 1e-9 * abs(best)  # rounding
    assert chosen.value <= best + slack if lower else chosen.value >= best - slack
    monkeypatch.undo()
    assert chosen.value == pytest.approx(measure(chosen.machine.loo(X, y)).item(), rel=1e-9)


@pytest.mark.parametrize("criterion", ["error_rate", "balanced_error_rate", "auc", "absolute"])
def test_reg_alone_is_found_by_criteria_that_are_not_smooth(criterion):
    def absolute(held_out):
        return held_out.residuals.abs().mean()

    X, y = labelled(60, 4)
    machine = ALONE["rbf"]()
    measure = absolute if criterion == "absolute" else getattr(tl.criteria, criterion)
    chosen = select(machine, X, y, measure)
    coarse = select(machine, X, y, measure, "grid")
    sign = 1 if getattr(measure, "lower_is_better", True) else -1
    assert sign * chosen.value <= sign * coarse.value
    assert chosen.evaluations <= 100
    if criterion == "absolute":  # which has a gradient almost everywhere
        best = min(absolute(machine.loo(X, y)) for machine.log_reg.data in torch.linspace(-7, 5, 1201)).item()
        assert chosen.value <= best * (1 + 1e-9)


@pytest.mark.parametrize("kind", [torch.float64, torch.float32])
def test_reg_alone_agrees_with_descent_on_its_gradient(kind):
    X, y = (t.to(kind) for t in sine(100, 30))
    for name in ("linear", "rls"):
        chosen = select(ALONE[name](), X, y)
        machine = ALONE[name]()
        optimiser = torch.optim.LBFGS(machine.parameters(), max_iter=100, line_search_fn="strong_wolfe")

        def closure(machine=machine, optimiser=optimiser):
            optimiser.zero_grad()
            loss = tl.criteria.press(machine.loo(X, y))
            loss.backward()
            return loss

        optimiser.step(closure)
        assert chosen.value == pytest.approx(tl.criteria.press(machine.loo(X, y)).item(), rel=1e-6)
        close = 1e-3 if kind == torch.float64 else 1e-1  # a value known to eps has a flat end of sqrt(eps)
        assert chosen.machine.reg.item() == pytest.approx(machine.reg.item(), rel=close)


def test_reg_alone_takes_no_more_evaluations_in_single_precision():
    X, y = sine(300, 5)
    machine = tl.LSSVM(fixed_scale(K.RBF(2.0)))
    single = select(machine, X.float(), y.float())
    double = select(machine, X, y)
    assert single.evaluations == double.evaluations == 34
    assert single.value == pytest.approx(double.value, rel=1e-3)


def test_reg_alone_of_a_stream_is_that_of_its_rows():
    X, y = sine(300, 5)
    clusters = torch.arange(300) // 3
    weight = 0.5 + torch.rand(300, dtype=DOUBLE)
    for name in ("linear", "sparse"):
        machine = ALONE[name]()
        whole = select(machine, X, y, "mse", weight=weight, clusters=clusters)
        streamed = tl.select(
            machine, tl.Stream(X, y, weight, progress=False), None, "mse", clusters=clusters, progress=False
        )
        assert streamed.value == pytest.approx(whole.value, rel=1e-7)
        assert streamed.machine.reg.item() == pytest.approx(whole.machine.reg.item(), rel=1e-2)


def test_reg_alone_keeps_to_its_bounds_and_its_number_of_evaluations():
    X, y = sine(80, 3)
    free = select(ALONE["rbf"](), X, y)
    low = 3 * free.machine.reg.item()
    bounded = select(ALONE["rbf"](), X, y, bounds={"reg": (low, 1e3 * low)})
    regs = [e.parameters["reg"] for e in bounded.history]
    assert low * (1 - 1e-9) <= min(regs) <= max(regs) <= 1e3 * low * (1 + 1e-9)
    assert bounded.machine.reg.item() == pytest.approx(low)
    for limit in (1, 7, 25, 30, 33):
        some = select(ALONE["rbf"](), X, y, max_evaluations=limit)
        assert some.evaluations <= limit
        assert [e.parameters for e in some.history] == [
            e.parameters for e in free.history[: some.evaluations]
        ]
    own = select(tl.LSSVM(fixed_scale(K.RBF()), reg=5.0), X, y, start="machine", max_evaluations=1)
    assert own.machine.reg.item() == pytest.approx(5.0)


def test_a_long_path_is_cut_and_found_alike(monkeypatch):
    X, y = sine(80, 3)
    whole = select(ALONE["rbf"](), X, y)
    monkeypatch.setattr("torchloo.search.objective._PATH", 6 * 80)
    cut = select(ALONE["rbf"](), X, y)
    assert cut.value == pytest.approx(whole.value, rel=1e-9)
    assert cut.evaluations == whole.evaluations


@pytest.mark.parametrize(("search", "most"), [("gradient", 25), ("nelder-mead", 250)])
def test_a_search_ends_where_rounding_begins(search, most):
    """A tolerance below the rounding error of float32 takes no more evaluations than one about it.

    A simplex takes 50 to 220 of them, whichever way the last digits round: 12 data sets were tried.
    """
    X, y = (t.float() for t in sine(200, 6))
    about, below = (
        select(tl.LSSVM(K.RBF()), X, y, search=search, tolerance=tolerance).evaluations
        for tolerance in (1e-6, 1e-12)
    )
    assert about < most
    assert below <= 1.1 * about + 5


@pytest.mark.parametrize("method", SEARCHES)
def test_a_search_as_one_object_is_that_of_its_options(method):
    X, y = sine()
    options = {"starts": 2, "prior": 0.5, "max_evaluations": 20, "bounds": {"reg": (1e-3, 1e3)}}

    def drawn():
        return {**options, "generator": torch.Generator().manual_seed(3), "progress": False}

    arguments = tl.LSSVM(K.RBF()), X, y
    together = tl.select(*arguments, "mse", tl.Search(method, **drawn()))
    assert together.history == tl.select(*arguments, "mse", method, **drawn()).history
    for k, by_name in enumerate(({}, drawn())):  # what is given by name goes first
        found = tl.validate(
            *arguments, 3, "mse", search=tl.Search(method, **drawn() | {"starts": 2 + k}), **by_name
        )
        assert found.table == tl.validate(*arguments, 3, "mse", search=method, **drawn()).table


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tl.Search("bfgs"), ValueError, "Search: search must be one of gradient"),
        (lambda: tl.Search(starts=0), ValueError, "Search: starts must be a positive integer, got 0"),
        (
            lambda: {"method": "grid"},
            TypeError,
            "select: unknown argument 'method'; the options of a search are",
        ),
        (
            lambda: {"function": "x"},
            TypeError,
            "select: unknown argument 'function'; the options of a search are",
        ),
        (lambda: {"tolerance": 2}, ValueError, "select: tolerance must be between 0 and 1"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_their_names(make, error, message):
    X, y = sine()
    with pytest.raises(error, match=message):
        tl.select(tl.RLS(K.RBF()), X, y, **make())
