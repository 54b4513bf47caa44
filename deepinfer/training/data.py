"""Training windows from the token ids of the corpus, and the held-out modules.

Batches depend on the seed and the step alone, so a run that was interrupted goes on exactly where it was.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from deepinfer.dims import Int, Tensor
from deepinfer.errors import ConfigError


def load_ids(folder: Path, part: str) -> Int[Tensor, " n"]:
    """All ids of a part, documents one after the other, each from BOS to EOS. Dtype: int32 on the CPU."""
    path = folder / f"{part}.npy"
    try:
        return torch.from_numpy(np.load(path).astype(np.int32))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no token ids ({error}). Run `python -m deepinfer.training.tokenizer`.") from error


@dataclass(frozen=True, slots=True)
class HeldOutDocument:
    """One module that nothing was trained on."""

    package: str
    path: str
    ids: Int[Tensor, " n"]  # BOS, text, EOS
    num_bytes: int


def held_out_documents(folder: Path) -> list[HeldOutDocument]:
    ids = load_ids(folder, "held_out").long()
    path = folder / "ids.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["held_out"]["documents"]
        return [HeldOutDocument(e["package"], e["path"], ids[e["start"] : e["end"]], e["bytes"]) for e in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no index of the held-out ids ({error!r})") from error


class Windows:
    """Windows of `length + 1` ids: every epoch cuts the whole stream at another offset and shuffles the pieces."""

    def __init__(self, ids: Int[Tensor, " n"], batch: int, length: int, seed: int) -> None:
        self.ids, self.batch, self.length, self.seed = ids, batch, length, seed
        self.per_epoch = (ids.shape[0] - 1 - length) // length
        if self.per_epoch < batch:
            raise ConfigError(f"{ids.shape[0]} training ids give {self.per_epoch} windows of {length}; a batch takes {batch}")
        self._epoch, self._starts = -1, torch.zeros(0, dtype=torch.int64)

    def at(self, step: int) -> Int[Tensor, "B T1"]:
        """The batch of a step, on the device of the ids."""
        steps_per_epoch = self.per_epoch // self.batch
        epoch, index = divmod(step, steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = int(torch.randint(self.length, (1,), generator=generator))
            order = torch.randperm(self.per_epoch, generator=generator)
            self._starts, self._epoch = (order * self.length + offset).to(self.ids.device), epoch
        starts = self._starts[index * self.batch : (index + 1) * self.batch]
        return self.ids[starts[:, None] + torch.arange(self.length + 1, device=self.ids.device)].long()


def step_generator(seed: int, step: int) -> torch.Generator:
    """Randomness of one step (on the CPU)."""
    return torch.Generator().manual_seed(seed * 1_000_003 + 7919 * step + 1)
