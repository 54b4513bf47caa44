"""How the kernels are launched one after the other.

Programmatic dependent launch (PDL, compute capability 9 and up) starts a kernel while the one before it drains. A kernel
launched so waits (`gdc_wait`) before it reads what others wrote; constants such as weights may be read earlier. It lets the next
one start (`gdc_launch_dependents`) after its loop: earlier, the newcomers would crowd the processors that still work.
"""

from typing import Any


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a kernel launch."""
    return {"launch_pdl": True} if pdl else {}
