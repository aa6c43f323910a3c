"""A fitted machine for inference only."""

from typing import Any

import torch
from torch import Tensor, nn

from torchloo import csr
from torchloo.classes import predicted_labels
from torchloo.guards import full_dtype, is_whole, require_inputs
from torchloo.machine.predictor import Predictor, features_or_inputs
from torchloo.precision import full_precision

__all__ = ["FrozenMachine"]

# Numbers of a kernel matrix that are evaluated at once, 16 MB in float64; a kernel uses a few such tiles.
_TILE = 1 << 21


class FrozenMachine(nn.Module):
    """f(x) of a fitted machine for inference, without trainable parameters.

    The features of the support are computed once; hyper-parameters are values, not logarithms; all tensors
    are buffers. Values of inputs are not checked, so NaN gives NaN. It may be exported (`torch.export`, with
    a dynamic number of rows), compiled, pickled, and its state_dict loaded with weights_only=True.

    Args:
        predictor: of the fitted machine.
        classes: labels of its classes, (c,), or None.
        block: evaluate at most this many rows at a time, and fewer if the support is large, so that memory
            does not grow with the rows. Not if the number of rows is symbolic, as in an export.
    """

    coef: Tensor
    bias: Tensor
    classes: Tensor | None

    def __init__(self, predictor: Predictor, classes: Tensor | None, block: int = 8192) -> None:
        super().__init__()
        if not is_whole(block) or block < 1:
            raise ValueError(f"frozen: block must be a positive whole number, got {block!r}")
        self.function = predictor.function
        self.flat = predictor.flat
        self.linear = predictor.linear
        self.kernel = predictor.kernel.frozen()
        self.block = int(block)
        with torch.no_grad():
            support = [predictor.support] if self.linear else self.kernel.embed_support(predictor.support)
        self._parts = len(support)
        self._inputs = predictor.support.shape[-self.kernel.event_dim :]
        named = {f"support{k}": rows for k, rows in enumerate(support)}
        for name, tensor in {**named, "coef": predictor.coef, "bias": predictor.bias}.items():
            self.register_buffer(name, tensor.detach().clone())
        self.register_buffer("classes", None if classes is None else classes.clone())
        self.eval()

    def forward(self, X: Tensor) -> Tensor:
        """Outputs (..., q) or (..., q, c) at inputs X (..., q, *event)."""
        is_batch = X.ndim != self.kernel.event_dim + 1
        if torch.compiler.is_compiling() or is_batch or csr.is_csr(X):
            return self._outputs(X)
        rows_in_tile = _TILE // max(1, self.coef.shape[-2])
        size = max(1, min(self.block, rows_in_tile))
        if len(X) <= size:
            return self._outputs(X)
        blocks = [self._outputs(rows) for rows in X.split(size)]
        return torch.cat(blocks, -1 if self.flat else -2)

    def predict_class(self, X: Tensor) -> Tensor:
        """Labels (..., q) of the predicted classes; see `KernelMachine.predict_class`."""
        return predicted_labels(type(self).__name__, self(X), self.classes, self.flat)

    def _outputs(self, X: Tensor) -> Tensor:
        require_inputs(self.function, X=X, bias=self.bias.to(X.dtype))
        with full_precision(X):
            outputs = self._design(X) @ self.coef + self.bias.unsqueeze(-2)
        return (outputs[..., 0] if self.flat else outputs).to(full_dtype(X.dtype))

    def _design(self, X: Tensor) -> Tensor:
        """Centred features or kernel rows, (..., q, m)."""
        support = (getattr(self, f"support{k}") for k in range(self._parts))
        received = features_or_inputs(self.function, self.kernel, X, self.coef, self.linear, self._inputs)
        if self.linear:
            return received - next(support)
        return self.kernel.against(X, support, self.coef.dtype)

    def extra_repr(self) -> str:
        """The number of coefficients, and the rows at a time."""
        return f"coefficients={tuple(self.coef.shape)}, block={self.block}"

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resize the buffers to the loaded number of support points."""
        for name in self._buffers:
            if prefix + name in state_dict:
                setattr(self, name, torch.empty_like(state_dict[prefix + name], device=self.bias.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
