"""An out-of-tree SGLang platform: the real server on a plain CPU build of torch.

No sgl-kernel, no AMX, no Triton kernel is called. SGLang finds it by the entry point `plain_cpu` and is told to use
it by SGLANG_PLATFORM=plain_cpu. It replaces computation only; loading is SGLang's own, untouched.
"""

from plain_cpu_platform.torchvision_names import declare_missing_operators


def activate() -> str:
    """The dotted path of the platform class, as SGLang asks for it.

    Runs before SGLang imports torchvision, so this is where the operators are declared.
    """
    declare_missing_operators()
    return "plain_cpu_platform.platform.PlainCpuPlatform"
