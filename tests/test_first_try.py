"""What a user of PyTorch writes first, as they would write it: short, and right at the first try."""

import io

import pytest
import torch
from torch import nn

import torchloo as tl
from torchloo import cli


def images(n: int = 60, classes: int = 3):
    """Noisy images (n, 1, 8, 8), a bright band where their class says, and class indices."""
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(classes, (n,), generator=generator)
    X = 0.2 * torch.randn(n, 1, 8, 8, generator=generator)
    for k in range(classes):
        X[label == k, :, 2 * k : 2 * k + 2] += 1.0
    return X, label


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))


def test_images_with_class_indices():
    X, label = images()
    machine = tl.LSSVM(tl.kernels.RBF(features=network(), event_dim=3), reg=0.1)
    held_out = machine.loo(X, label)
    assert held_out.outputs.shape == (60, 3)
    assert tl.criteria.multiclass_error(held_out) < 0.1
    assert (machine.fit(X, label).predict_class(X) == label).float().mean() > 0.9


def test_minibatch_training_and_checkpoint():
    X, label = images(120)
    machine = tl.LSSVM(tl.kernels.RBF(features=network(), event_dim=3), classes=[0, 1, 2])
    optimiser = torch.optim.Adam(machine.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(X, label)
    losses = []
    for _ in range(3):
        for batch in torch.utils.data.DataLoader(data, batch_size=30):
            optimiser.zero_grad()
            loss = tl.criteria.cross_entropy(machine.loo(*batch), scale=3.0)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    expected = machine.fit(X, label).predict_class(X)
    file = io.BytesIO()
    torch.save(machine.state_dict(), file)
    file.seek(0)
    restored = tl.LSSVM(tl.kernels.RBF(features=network(), event_dim=3))
    restored.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(restored.predict_class(X), expected)


def test_probe_on_embeddings(tmp_path):
    X, label = images(200)
    embeddings = network()(X)  # (200, 8), with its graph
    found = tl.probe(embeddings, label, progress=False)
    assert found.accuracy > 0.9
    assert 0 < found.standard_error < 0.03
    assert f"{found.accuracy:.4f}" in str(found)
    assert torch.equal(found.head.predict_class(embeddings), found.head(embeddings).argmax(-1))
    found.plot(tmp_path / "probe.png")
    assert (tmp_path / "probe.png").is_file()


@pytest.mark.parametrize("make", [tl.LSSVM, tl.SVC])
def test_class_weights(make):
    X, label = images()
    keep = (label > 0) | (torch.arange(60) % 4 == 0)  # class 0 is rare
    X = X[keep].flatten(1)
    label = label[keep]
    weight = tl.balanced_weight(label)
    totals = torch.stack([weight[label == k].sum() for k in range(3)])
    expected = torch.full((3,), len(label) / 3)
    torch.testing.assert_close(totals, expected)
    held_out = make(tl.kernels.RBF(5.0)).loo(X, label, weight)
    assert tl.criteria.class_accuracy(held_out).min() > 0.9


def test_counts_are_refused_as_classes():
    X = torch.rand(200, 2, generator=torch.Generator().manual_seed(0))
    counts = (100 * X[:, 0]).long()  # 0 to 99
    machine = tl.LSSVM(tl.kernels.RBF())
    with pytest.raises(
        ValueError, match=r"class labels, at most 20 .* got \d+; for regression .*\.double\(\)"
    ):
        machine.fit(X, counts)
    assert machine.fit(X, counts.float())(X).shape == (200,)
    held_out = machine.loo(X, tl.one_vs_rest(counts))  # if it is meant
    assert held_out.outputs.shape == (200, len(counts.unique()))


def test_one_regularisation_for_each_output():
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(80, 4, generator=generator)
    noise = torch.tensor([0.05, 2.0])
    Y = X[:, :2] + noise * torch.randn(80, 2, generator=generator)
    machine = tl.LSSVM(tl.kernels.RBF(3.0), reg=torch.tensor([1.0, 1.0]), reg_per_output=True)
    found = tl.select(machine, X, Y, progress=False).machine
    assert found.reg[1] > 10 * found.reg[0]
    assert found(X).shape == found.loo(X, Y).outputs.shape == (80, 2)
    press = tl.criteria.press(found.loo(X, Y), per_output=True)
    assert (torch.autograd.grad(press.sum(), found.log_reg)[0].abs() < 0.1 * press).all()


def test_h_block_of_a_time_series():
    generator = torch.Generator().manual_seed(0)
    t = torch.arange(150.0)
    walk = torch.randn(150, generator=generator).cumsum(0)
    machine = tl.LSSVM(tl.kernels.RBF(4.0), reg=0.1)
    loo = tl.criteria.mse(machine.loo(t[:, None], walk))
    held_out = machine.lso(t[:, None], walk, tl.splits.h_block(t, buffer=5))
    assert held_out.outputs.shape == (150,)
    assert tl.criteria.mse(held_out) > 2 * loo


def test_autocast():
    X, label = images()
    machine = tl.LSSVM(tl.kernels.RBF(features=network(), event_dim=3), reg=0.1)
    expected = machine.loo(X, label).outputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        held_out = machine.loo(X, label)
        tl.criteria.press(held_out).backward()
    assert held_out.outputs.dtype == torch.float32
    torch.testing.assert_close(held_out.outputs, expected, rtol=0.1, atol=0.1)  # features have 8 bits
    assert all(p.grad.isfinite().all() for p in machine.parameters())


def test_episodes_with_a_query_loss_and_its_gradient():
    torch.manual_seed(0)
    support = torch.randn(8, 10, 3)
    query = torch.randn(8, 5, 3)
    features = nn.Sequential(nn.Linear(3, 16), nn.Tanh())
    head = tl.RLS(tl.kernels.Linear(features=features), reg=0.1)

    def loss():
        solved = head.solve(support, support[..., 0].sin())
        return (solved(query) - query[..., 0].sin()).square().mean()

    optimiser = torch.optim.Adam(head.parameters(), lr=0.01)
    before = loss()
    for _ in range(20):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()
    assert loss() < 0.8 * before

    value = loss()  # the same by hand, for every episode
    by_hand = 0.0
    for S, Q in zip(support, query, strict=True):
        Z, Z_new = features(S), features(Q)
        system = Z @ Z.T + head.reg.float() * torch.eye(10)
        a = torch.linalg.solve(system, S[:, 0].sin())
        error = Z_new @ (Z.T @ a) - Q[:, 0].sin()
        by_hand = by_hand + error.square().mean() / 8
    torch.testing.assert_close(value, by_hand, rtol=1e-4, atol=1e-6)
    parameters = list(head.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(value, parameters), torch.autograd.grad(by_hand, parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_prediction_intervals_of_a_chosen_machine():
    X, y = tl.datasets.motorcycle()
    kept = torch.arange(len(y)) % 4 != 0
    machine = tl.select(tl.LSSVM(tl.kernels.RBF()), X[kept], y[kept], progress=False).machine
    lower, upper = tl.intervals.jackknife_plus(machine, X[kept], y[kept], X[~kept])
    assert lower.shape == y[~kept].shape
    covered = (lower <= y[~kept]) & (y[~kept] <= upper)
    assert covered.double().mean() > 0.75


def test_calibrated_probabilities_of_three_classes():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(90) % 3
    X = torch.eye(3)[labels] + 0.5 * torch.randn(90, 3, generator=generator)
    machine = tl.LSSVM(tl.kernels.RBF(2.0)).fit(X, labels)
    probability = tl.calibrate(machine.loo(X, labels))(machine(X))
    assert torch.allclose(probability.sum(1), torch.ones(90))
    assert (probability.argmax(1) == machine.predict_class(X)).all()


def test_wrong_labels_are_found():
    X, y = tl.datasets.twonorm(150, generator=torch.Generator().manual_seed(0))
    wrong = torch.arange(0, 150, 15)
    y[wrong] *= -1
    diagnosis = tl.diagnose(tl.LSSVM(tl.kernels.RBF(5.0)), X, y)
    assert torch.isin(wrong, diagnosis.suspects(0.5)).sum() >= 8
    assert (diagnosis.change("press")[diagnosis.suspects()] < 0).all()


def test_a_pipeline_of_scikit_learn_on_a_data_frame_with_string_classes():
    pd = pytest.importorskip("pandas")
    iris = pytest.importorskip("sklearn.datasets").load_iris(as_frame=True)
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from torchloo.sklearn import LOOClassifier

    names = pd.Series(iris.target_names[iris.target])
    pipeline = make_pipeline(StandardScaler(), LOOClassifier(max_evaluations=10))
    search = GridSearchCV(pipeline, {"looclassifier__kernel": ["linear", "rbf"]}, cv=3).fit(iris.data, names)
    assert search.best_score_ > 0.9
    assert set(search.predict(iris.data)) <= set(iris.target_names)


def test_a_messy_table_with_missing_values(tmp_path, monkeypatch, capsys):
    pd = pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    generator = torch.Generator().manual_seed(0)
    size, age = (torch.rand(2, 60, generator=generator) * 100).round(decimals=1).tolist()
    towns = ["Ulm", "Bonn", "Köln"]
    lines = ["size;age;town;sold on;price"]
    for i in range(60):
        cells = [str(size[i]).replace(".", ","), str(age[i]), towns[i % 3], f"2024-03-{i % 28 + 1:02}"]
        if i % 8 == 0:
            cells[i % 3] = ""
        lines.append(";".join([*cells, f"{3 * size[i] - age[i] + 40 * (i % 3):.1f}"]))
    (tmp_path / "houses.csv").write_text("\n".join(lines), encoding="cp1252")
    command = ["select", "houses.csv", "--target", "price", "--outer", "5", "--no-report", "--no-progress"]
    assert cli.main(command) == 2
    assert "missing values: 3 in column 'size', the first in row 1" in capsys.readouterr().err
    assert cli.main([*command, "--missing", "mean", "--time-budget", "60"]) == 0
    said = capsys.readouterr().out
    assert "read as Windows-1252" in said
    assert "dates, converted to days since 1970: 'sold on'" in said
    assert cli.main(["predict", "houses-torchloo/model.pt", "houses.csv"]) == 0
    predicted = pd.read_csv("predictions.csv")
    assert predicted.columns.tolist() == ["row", "prediction", "lower", "upper"]
    inside = (predicted["lower"] <= predicted["prediction"]) & (predicted["prediction"] <= predicted["upper"])
    assert inside.all()


def test_several_machines_under_a_time_budget():
    X, y = tl.datasets.motorcycle()
    X = (X - X.mean(0)) / X.std(0)
    machines = [tl.LSSVM(tl.kernels.Polynomial()), tl.LSSVM(tl.kernels.RBF()), tl.LSSVM(tl.kernels.Matern())]
    seen = []
    found = tl.select(
        machines, X, y, grid={"degree": [1, 3]}, time_budget=60, callback=seen.append, progress=False
    )
    (winner,) = [row["machine"] for row in found.table if row["chosen"]]
    assert winner in ("LSSVM(RBF)", "LSSVM(Matern)")
    assert len(found.table) == 4
    assert len(seen) == found.evaluations
    with pytest.warns(RuntimeWarning, match="time budget of 0.001 s is used up; this is the best so far"):
        hasty = tl.select(machines, X, y, time_budget=1e-3, progress=False)
    assert hasty.machine(X).shape == y.shape
    assert hasty.value >= found.value


def test_a_frozen_machine_is_exported_for_another_number_of_rows():
    X, y = tl.datasets.motorcycle()
    frozen = tl.LSSVM(tl.kernels.RBF(7.0)).fit(X, y).frozen()
    program = torch.export.export(frozen, (X[:5],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    torch.testing.assert_close(program.module()(X), frozen(X))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_training_loss_compiles_as_one_graph():
    X, y = tl.datasets.motorcycle()
    X = X.clone().requires_grad_()
    machine = tl.LSSVM(tl.kernels.RBF(7.0))

    def loss(X):
        return tl.criteria.mse(machine.loo(X, y))

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    (expected,), (received,) = (torch.autograd.grad(f(X), X) for f in (loss, compiled))
    torch.testing.assert_close(received, expected)
