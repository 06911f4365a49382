"""Models and bytes for tests, and an oracle that does not use the code under test."""

import torch
from torch import nn


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order; torch.equal refuses small floats and calls NaNs different."""
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def snapshot(module: nn.Module) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: (each.dtype, tuple(each.shape), bytes_of(each)) for name, each in named}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(2 * width, width, dtype=torch.float32)
        self.register_buffer("scale", torch.zeros(3, dtype=torch.float16))
        self.register_buffer("positions", torch.arange(5), persistent=False)


class TinyModel(nn.Module):
    """Two blocks, an embedding and a tied head."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embedding.weight


def randomize(module: nn.Module, seed: int) -> nn.Module:
    """Give every parameter and buffer new bytes, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.copy_(torch.randn(each.shape, generator=generator).to(each.dtype))
    return module
