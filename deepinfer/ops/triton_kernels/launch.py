"""How the kernels are launched one after the other.

Programmatic dependent launch (PDL, compute capability 9 and up) starts a kernel while the one before it drains. A kernel
launched so waits (`gdc_wait`) before it reads what others wrote; constants such as weights may be read earlier. Every program
waits, also one without work: only then does the end of a kernel mean the end of all before it. It lets the next one start
(`gdc_launch_dependents`) after its loop: earlier, the newcomers would crowd the processors that still work.
"""

from importlib.util import find_spec
from typing import Any

import torch

LEAST_CAPABILITY = (9, 0)  # wgmma, and conversions from FP8


def device_obstacle(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, or None."""
    if device.type != "cuda":
        return f"they are for CUDA devices, the device is {device}"
    if find_spec("triton") is None:
        return "the package triton is not installed; CUDA builds of torch bring it along"
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        least, has = (f"{major}.{minor}" for major, minor in (LEAST_CAPABILITY, found))
        return f"they need compute capability {least} or higher, {device} has {has}"
    return None


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch."""
    return {"launch_pdl": True} if pdl else {}
