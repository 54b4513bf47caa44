"""How many (token, expert) pairs each expert got: a ring of the last steps, on the device, read by the host once a period."""

import torch

from deepinfer.dims import Int, Tensor


class LoadCounter:
    """Counts of one rank's own tokens. Every step advances it, also one without rows, so all ranks' windows are of the same steps.

    A step whose counts no window will hold is not recorded: only the last `window` steps before the end of a period matter.
    """

    def __init__(self, n_layers: int, n_experts: int, window: int, period: int, device: torch.device | str = "cpu") -> None:
        self.window, self.period = window, period
        self._ring = torch.zeros(window, n_layers, n_experts, dtype=torch.int32, device=device)
        self.num_steps = 0
        self._emptied_for = -1

    @property
    def is_recording(self) -> bool:
        """Whether the present step's counts will be read."""
        return self.period > 0 and self.num_steps % self.period >= self.period - self.window

    def record(self, layer: int, ids: Int[Tensor, "T K"]) -> None:
        """Add the choices of one layer in the present step. Mutates the ring; no wait for the device."""
        if self.is_recording:
            row = self._row()[layer]
            row.index_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32))

    def end_step(self) -> bool:
        """Go on to the next step; True if a period has ended, when `total` is to be read and a placement to be made."""
        if self.is_recording:
            self._row()
        self.num_steps += 1
        return self.period > 0 and self.num_steps % self.period == 0

    def _row(self) -> Int[Tensor, "L E"]:
        """The present step's place in the ring, emptied when the step first asks for it."""
        row = self._ring[self.num_steps % self.window]
        if self._emptied_for != self.num_steps:
            row.zero_()
            self._emptied_for = self.num_steps
        return row

    def total(self) -> Int[Tensor, "L E"]:
        """Counts of the window, int64 on the host."""
        return self._ring.sum(dim=0, dtype=torch.int64).cpu()
