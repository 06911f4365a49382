"""The platform class.

SGLang asks for it in the middle of its own first imports, so only its platforms package may be imported up here;
the rest waits until a model is loaded.
"""

import torch
from plain_cpu_platform import fp8, unpinned
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

_ATTENTION = "torch_native"


class PlainCpuPlatform(CpuSRTPlatform):
    """SGLang's own CPU platform with everything that needs a kernel replaced by plain torch."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return _ATTENTION

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Replace computation once the weights are there; no tensor of the model is touched."""
        super().post_load_model(model)
        _attend_absorbed()
        _multiply_fp8_in_torch(model)
        _load_adapters_unpinned()


def _attend_absorbed() -> None:
    """Multi-head latent attention by w_kc and w_vc for prefill and decode.

    Unregistered back ends take the handler for Triton, whose prefill expands the cache into full heads, which
    torch_native cannot do.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as mla

    mla.AttentionBackendRegistry.register(_ATTENTION, lambda attention, batch: mla.AttnForwardMethod.MLA)


def _multiply_fp8_in_torch(model: torch.nn.Module) -> None:
    from sglang.srt.layers.quantization import fp8 as sglang_fp8

    sglang_fp8.apply_fp8_linear = fp8.channel_linear
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "w8a8_block_fp8_linear"):
            method.w8a8_block_fp8_linear = fp8.block_linear


def _load_adapters_unpinned() -> None:
    from sglang.srt.lora import layers, lora
    from sglang.srt.lora.backend import torch_backend

    unpinned.replace_torch(layers, lora, torch_backend)
