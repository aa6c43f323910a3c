"""Frozen machines: the same outputs, nothing to train, exported for any number of rows."""

import io
import pickle

import numpy as np
import pytest
import torch
from torch.export import Dim, export
from torch.utils._python_dispatch import TorchDispatchMode

import torchloo as tl
from torchloo import kernels

NETWORK = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).double()
KERNELS = {
    "rbf": lambda: kernels.RBF(1.3),
    "ard": lambda: kernels.RBF(torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "matern 1/2": lambda: kernels.Matern(0.5, 2.0),
    "matern 5/2": lambda: kernels.Matern(2.5, 2.0),
    "linear": kernels.Linear,
    "polynomial": lambda: kernels.Polynomial(2),
    "fixed offset": lambda: kernels.Polynomial(3, 0.0),
    "boolean": lambda: kernels.Boolean(0.1),
    "sum": lambda: kernels.RBF(1.0) + 2.0 * kernels.Linear(),
    "product": lambda: kernels.RBF(1.0) * kernels.Polynomial(2),
    "features": lambda: kernels.RBF(1.0, features=NETWORK),
    "features inside": lambda: kernels.RBF(1.0, features=NETWORK) + kernels.Linear(),
    "many coordinates": lambda: kernels.RBF(3.0, features=torch.nn.Linear(4, 20).double()),
}
MACHINES = {
    "lssvm": tl.LSSVM,
    "rls": tl.RLS,
    "kfd": tl.KFD,
    "svc": tl.SVC,
    "sparse": lambda kernel: tl.SparseLSSVM(kernel, basis=8),
}


def rows(n, d=4, seed=0, dtype=torch.float64):
    return torch.randn(n, d, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def fitted(kernel, machine="lssvm", dtype=torch.float64):
    X = rows(30, dtype=dtype)
    y = (X[:, 0] > 0).long() if machine in ("kfd", "svc") else X[:, 0].sin()
    return MACHINES[machine](KERNELS[kernel]()).fit(X, y)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_number_of_columns_is_told_as_the_machine_tells_it(kernel):
    machine = fitted(kernel)
    if machine._linear or machine.kernel.features is None:
        for predict in (machine, machine.frozen()):
            with pytest.raises(
                ValueError, match=r"lssvm: X must have 4 columns, as in fit, got shape \(5, 3\)"
            ):
                predict(rows(5, 3))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_are_those_of_the_machine(kernel, machine):
    fit = fitted(kernel, machine)
    frozen = fit.frozen()
    received = frozen(rows(17))
    expected = fit(rows(17)).detach()
    torch.testing.assert_close(received, expected)
    assert not any("log_" in name for name in frozen.state_dict())
    assert not any(p.requires_grad for p in frozen.parameters())
    assert not frozen(rows(3)).requires_grad


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("machine", ["lssvm", "sparse"])
def test_an_export_serves_another_number_of_rows(kernel, machine):
    fit = fitted(kernel, machine)
    program = export(fit.frozen(), (rows(5),), dynamic_shapes=({0: Dim("rows")},))
    for n in (2, 41):
        received = program.module()(rows(n, seed=n))
        expected = fit(rows(n, seed=n)).detach()
        torch.testing.assert_close(received, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("kernel", ["rbf", "linear", "features inside"])
def test_compiled_outputs_are_the_same(kernel):
    frozen = fitted(kernel).frozen()
    compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(rows(9)), frozen(rows(9)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's exporter uses what torch has deprecated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", KERNELS)
def test_onnx_gives_the_same_for_another_number_of_rows(kernel, dtype, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    if dtype == torch.float32 and ("features" in kernel or "coordinates" in kernel):
        pytest.skip("the network is float64")
    fit = fitted(kernel, dtype=dtype)
    shapes = ({0: Dim("rows")},)
    program = torch.onnx.export(fit.frozen(), (rows(5, dtype=dtype),), dynamo=True, dynamic_shapes=shapes)
    program.save(tmp_path / "machine.onnx")
    session = runtime.InferenceSession(tmp_path / "machine.onnx")
    new = rows(13, seed=1, dtype=dtype)
    (outputs,) = session.run(None, {session.get_inputs()[0].name: new.numpy()})
    tolerance = 1e-4 if dtype == torch.float32 else 1e-7  # its exporter rounds some constants to float32
    np.testing.assert_allclose(outputs, fit(new).detach().numpy(), rtol=tolerance, atol=tolerance)


class _Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that an operation has made."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.entries = max(self.entries, result.numel())
        return result


@pytest.mark.parametrize("columns", [1, 3])
def test_blocks_change_nothing_and_bound_the_memory(columns):
    X = rows(2000, 3)
    new = rows(20_000, 3, seed=1)
    fit = tl.LSSVM(kernels.RBF(2.0)).fit(X, X[:, :columns] if columns > 1 else X[:, 0])
    with _Largest() as whole, torch.no_grad():
        expected = fit(new)
    with _Largest() as blocked:
        received = fit.frozen(block=8192)(new)
    torch.testing.assert_close(received, expected)
    assert whole.entries == 2000 * 20_000
    assert blocked.entries <= 1 << 21  # 16 MB


def test_a_state_dict_fills_a_machine_of_another_size():
    first = fitted("rbf")
    second = tl.LSSVM(kernels.RBF(7.0)).fit(rows(12), rows(12)[:, 0])
    buffer = io.BytesIO()
    torch.save(first.frozen().state_dict(), buffer)
    buffer.seek(0)
    frozen = second.frozen()
    frozen.load_state_dict(torch.load(buffer, weights_only=True))
    received = frozen(rows(5))
    expected = first(rows(5)).detach()
    torch.testing.assert_close(received, expected)
    again = pickle.loads(pickle.dumps(frozen))
    torch.testing.assert_close(again(rows(5)), frozen(rows(5)))


def test_classes_are_predicted_as_by_the_machine():
    label = torch.arange(30) % 3
    fit = tl.LSSVM(kernels.RBF(2.0)).fit(rows(30) + label[:, None], label + 5)
    assert fit.frozen().predict_class(rows(9)).tolist() == fit.predict_class(rows(9)).tolist()
    with pytest.raises(RuntimeError, match="fitted to numbers"):
        fitted("rbf").frozen().predict_class(rows(9))


def test_images_are_frozen_with_their_features():
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten()).double()
    X = torch.randn(20, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    fit = tl.LSSVM(kernels.RBF(3.0, features=network, event_dim=3)).fit(X, X[:, 0, 0, 0])
    frozen = fit.frozen(block=7)
    torch.testing.assert_close(frozen(X), fit(X).detach())
    assert frozen.support0.shape == (20, 32)  # what the network makes of the support


def test_an_unfitted_machine_and_a_bad_block_are_refused():
    with pytest.raises(RuntimeError, match="LSSVM: not fitted; call fit"):
        tl.LSSVM(kernels.RBF()).frozen()
    with pytest.raises(ValueError, match="frozen: block must be a positive whole number, got 0"):
        fitted("rbf").frozen(block=0)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_checkpoint_of_an_unfitted_machine_leaves_one_that_is_not_fitted(machine):
    fresh = MACHINES[machine](kernels.RBF(3.0))
    fit = fitted("rbf", machine)
    fit.load_state_dict(fresh.state_dict())
    assert fit.kernel.lengthscale.item() == pytest.approx(3.0)
    with pytest.raises(RuntimeError, match="not fitted"):
        fit(rows(3))
