"""A model driven layer by layer with the recorded inputs of a golden case, so that nothing that a layer below got wrong counts."""

from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer.model.hyper_connection import first_stream
from deepinfer.model.indexer import Shared
from deepinfer.model.transformer import Transformer
from tests.golden import Session, choosing_as_recorded, observing, recorded
from tests.tolerances import tolerance

MOST_TIPPED_ROWS = 0.02  # share of rows further away than most may be
PARTS = ("engram_out", "attn_out", "ffn_out", "out")


class Layered(NamedTuple):
    """One case driven layer by layer."""

    observed: dict[str, Tensor]  # "layers.L.name", rows first
    same_choices: dict[int, Tensor]  # layer -> rows whose experts and entries are the recorded ones
    tied_share: float


@torch.no_grad()
def drive_layers(case: str, model: Transformer) -> Layered:
    """Run the recorded prompt through `model`, of `native` precision and on any device; hooks it meanwhile."""
    recording = {name: value.to(model.device) for name, value in recorded(case, "native").items()}
    ids = recording["input_ids"]
    session = Session(model, *ids.shape)
    rows = session.rows([(sequence, 0) for sequence in ids])
    rope, observed, same = model.rope(rows.positions), {}, {}
    shared = model.placed(Shared(), rows, session.cache)
    window = model.token_window(rows, session.cache) if model.config.engram.layer_ids else None

    def flat(name: str) -> Tensor:
        return recording[f"prefill.{name}"].flatten(0, 1)

    streams = flat("embed")[:, None].expand(-1, model.config.hyper_connection.mult, -1)
    assert torch.equal(flat("layers.0.pre_mix_in"), first_stream(streams))
    with choosing_as_recorded(model, recording) as replaced, observing(model) as captured:
        for index, layer in enumerate(model.layers):
            if layer.engram is not None:
                layer.engram(streams, window, model.token_window.pad)
                streams = flat(f"layers.{index}.engram_out")
            _, _, shared = layer(streams, flat(f"layers.{index}.pre_mix_in"), rows, rope, shared, session.cache.layers[index])
            same[index] = (captured[f"layers.{index}.router_idx"] == flat(f"layers.{index}.router_idx")).all(dim=1)
            selected = f"layers.{index}.index_topk"
            if selected in captured:
                width = recording[f"prefill.{selected}"].shape[-1]
                same[index] &= (captured[selected][:, :width] == flat(selected)).all(dim=1)
            streams = flat(f"layers.{index}.out")
        observed = dict(captured)
    choices = sum(1 for name in recording if name.startswith("prefill.") and name.endswith(("index_topk", "candidates")))
    return Layered(observed, same, sum(replaced.values()) / max(1, choices * ids.numel()))


def far_layers(case: str, driven: Layered, part: str) -> list[str]:
    """Layers whose output is further from the recorded one than other sums explain, in rows with the recorded choices."""
    of_any, of_most = (tolerance(f"{rows} of a layer", "native, other sums").largest for rows in ("any row", "most rows"))
    assert of_any is not None
    recording, wrong, tipped = recorded(case, "native"), [], []
    for name in (name for name in driven.observed if name.endswith(f".{part}")):
        expected = recording[f"prefill.{name}"].flatten(0, 1).double()
        same = driven.same_choices[int(name.split(".")[1])].cpu()
        distance = (driven.observed[name].cpu().double() - expected).flatten(1).abs().amax(dim=1)
        relative = (distance / expected.flatten(1).abs().amax(dim=1))[same]
        tipped.append(~(relative <= of_most))
        if not float(relative.max()) <= of_any:
            wrong.append(f"{name}: off by {float(relative.max()):.4f} of the row's largest value")
    share = float(torch.cat(tipped).double().mean()) if tipped else 0.0
    return wrong if share <= MOST_TIPPED_ROWS else [*wrong, f"{part}: {share:.3f} of all rows are off by more than {of_most}"]
