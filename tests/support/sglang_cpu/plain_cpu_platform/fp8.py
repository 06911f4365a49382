"""fp8 linear layers on a CPU: give the weight its scale back, then multiply in float32.

Both functions stand in for SGLang's and take their arguments; what they do not need is swallowed by `**_`.
"""

import torch


def block_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """`weight` is (N, K) with one scale for each (block_size[0], block_size[1]) of it; the last ones may be cut."""
    rows, columns = weight.shape
    scale = weight_scale.float().repeat_interleave(block_size[0], 0)[:rows]
    scale = scale.repeat_interleave(block_size[1], 1)[:, :columns]
    return _linear(input, (weight.float() * scale).t(), bias)


def channel_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """`weight` is (K, N), as online quantisation leaves it, with one scale, or one for each of its N columns."""
    return _linear(input, weight.float() * weight_scale.float().reshape(1, -1), bias)


def _linear(activations: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = activations.float() @ weight
    if bias is not None:
        result = result + bias.float()
    return result.to(activations.dtype)
