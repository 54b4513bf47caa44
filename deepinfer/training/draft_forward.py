"""The draft blocks of `deepinfer.model.draft` at many positions of whole sequences at once, with gradients.

At an anchor position p the blocks read the token at p + 1 and noise, and draft the tokens at p + 2 .. p + Q + 1. Anchors of
one sequence share the features that `DSpark.observe` would have put into the rings.

A anchors for each sequence, Q drafted tokens, W window rows. Rows are packed `[B * A * Q, ...]`.
"""

from typing import NamedTuple

import torch

from deepinfer.dims import Float, Int, Tensor
from deepinfer.model.draft import DraftAttention
from deepinfer.model.hyper_connection import collapse, first_stream
from deepinfer.model.rope import Rope
from deepinfer.training.dense_attention import gather_entries, joint_softmax
from deepinfer.training.whole_sequence import Ablation, Record, SharedEntries, WholeSequence


class DraftOutput(NamedTuple):
    hidden: Float[Tensor, "BA Q D"]  # collapsed streams before the norm
    plain_logits: Float[Tensor, "BA Q V"]  # without the Markov bias
    loads: dict[int, Float[Tensor, " E"]]


def attend_draft(
    q: Float[Tensor, "BA Q H Dh"],
    features: Float[Tensor, "BA W Dh"],
    own: Float[Tensor, "BA Q Dh"],
    positions: Int[Tensor, "BA W"],
    sink: Float[Tensor, " H"],
    scale: float,
) -> Float[Tensor, "BA Q H Dh"]:
    """Every draft query sees the features at `positions` that exist (not below 0), and all draft rows of its anchor."""
    keys = torch.cat((features, own), dim=1)
    seen = torch.cat((positions >= 0, torch.ones_like(own[..., 0], dtype=torch.bool)), dim=1)
    n, length, heads, dim = q.shape
    scores = torch.bmm(q.reshape(n, length * heads, dim), keys.transpose(1, 2)).view(n, length, heads, -1) * scale
    probabilities = joint_softmax(scores, seen[:, None].expand(-1, length, -1), sink).to(q.dtype)
    return torch.bmm(probabilities.view(n, length * heads, -1), keys).view(q.shape)


class DraftReading:
    """The forward of all draft blocks on top of a `WholeSequence` reading of the backbone."""

    def __init__(self, backbone: WholeSequence) -> None:
        self.backbone, self.model = backbone, backbone.model
        self.attend = torch.compile(attend_draft, dynamic=False) if backbone.fast else attend_draft

    def __call__(
        self, token_ids: Int[Tensor, "B T"], main_hidden: Float[Tensor, "BT nD"], anchors: Int[Tensor, " A"]
    ) -> DraftOutput:
        """`DSpark.observe` of all positions and `DSpark.propose` at the anchors, which all sequences share."""
        model, blocks = self.model, self.model.mtp.blocks
        config, run = model.config, self.backbone.run
        b, t = token_ids.shape
        size, window = config.draft.block_size, config.attention.window_size
        features = blocks[0].main_norm(blocks[0].main_proj(main_hidden))
        feature_rope = model.rope(torch.arange(t, device=token_ids.device).repeat(b)).table(0)
        steps = torch.arange(1, size + 1, device=token_ids.device)
        rope = model.rope((anchors[:, None] + steps).flatten().repeat(b)).table(0)
        ring = anchors[:, None] - torch.arange(window, device=token_ids.device)

        inputs = model.mtp.draft_inputs(token_ids[:, anchors + 1].flatten())
        streams = self.backbone.first_streams(inputs)
        pre, record = first_stream(streams), Record()
        for index, block in enumerate(blocks):

            def attention(x: Tensor, attn: DraftAttention = block.attn) -> tuple[Tensor, SharedEntries]:
                observed = run["window_rows"](attn, features, feature_rope.query).unflatten(0, (b, t))
                near = gather_entries(observed, ring.expand(b, -1, -1)).flatten(0, 1)
                return self._attention(attn, x, rope, near, ring.repeat(b, 1)), SharedEntries()

            streams, pre, _ = self.backbone.block(block, streams, pre, attention, index, Ablation(), record)
        x = collapse(streams, pre)
        logits = model.head(blocks[-1].norm(x))
        return DraftOutput(x.unflatten(0, (-1, size)), logits.unflatten(0, (-1, size)), record.loads)

    def _attention(
        self, attn: DraftAttention, x: Tensor, rope: Rope, features: Float[Tensor, "BA W Dh"], positions: Int[Tensor, "BA W"]
    ) -> Float[Tensor, "BAQ D"]:
        size, run = self.model.config.draft.block_size, self.backbone.run
        _, q = run["queries"](attn, x, rope.query)
        own = run["window_rows"](attn, x, rope.query).unflatten(0, (-1, size))
        out = self.attend(q.unflatten(0, (-1, size)), features, own, positions, attn.attn_sink, attn.config.scale)
        return run["project_output"](attn, out.flatten(0, 1), rope.query)
