"""How many (token, expert) pairs each expert got in the last steps of a period: counted on the device, read by the host once."""

import torch

from deepinfer.dims import Int, Tensor


class LoadCounter:
    """Counts of one rank's own tokens. Every step advances it, also one without rows, so all ranks' windows are of the same steps.

    Only the last `window` steps before the end of a period matter: counts begin anew with the first of them. They stand at one
    place, which a captured step goes on adding to.
    """

    def __init__(self, n_layers: int, n_experts: int, window: int, period: int, device: torch.device | str = "cpu") -> None:
        self.window, self.period = window, period
        # One column more than there are experts: pairs of nobody.
        self._counts = torch.zeros(n_layers, n_experts + 1, dtype=torch.int64, device=device)
        self.num_steps = 0

    def record(self, layer: int, ids: Int[Tensor, "T K"]) -> None:
        """Add the choices of one layer in the present step. Mutates the counts; no wait for the device."""
        pairs = ids.flatten()
        self._counts[layer].index_add_(0, pairs, torch.ones_like(pairs, dtype=torch.int64))

    def end_step(self) -> bool:
        """Go on to the next step; True if a period has ended, when `take` is due and a placement to be made."""
        self.num_steps += 1
        if not self.period:
            return False
        place = self.num_steps % self.period
        if place and place == self.period - self.window:
            self._counts.zero_()
        return place == 0

    def take(self) -> Int[Tensor, "L E"]:
        """Counts of the window, int64 on the host, of experts that exist. What follows counts from zero."""
        counts = self._counts[:, :-1].to("cpu", copy=True)
        self._counts.zero_()
        return counts
