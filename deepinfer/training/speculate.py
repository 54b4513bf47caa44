"""Greedy speculative decoding of held-out prompts, counted: how many drafts the backbone accepts.

All prompts go in lockstep, each at its own position, with the functions that serve: `forward_rows`, `observe_draft` and
`propose_draft`. Drafts are accepted while they equal the backbone's choice; its own next token comes for free.
"""

from dataclasses import dataclass, field

import torch
from tqdm import tqdm

from deepinfer.dims import Int, Tensor
from deepinfer.model.cache import CacheSizes
from deepinfer.model.rows import pack_rows
from deepinfer.model.transformer import Transformer

CACHE_BLOCK = 64
CALIBRATION_BINS = 10


@dataclass(slots=True)
class DraftCounts:
    """Sums over all steps."""

    steps: int = 0
    tokens: int = 0
    reached: list[int] = field(default_factory=list)  # steps in which all drafts before place i were accepted
    accepted: list[int] = field(default_factory=list)
    # For each bin of the predicted probability: reached drafts, accepted ones, sum of predictions.
    bins: list[list[float]] = field(default_factory=lambda: [[0, 0, 0.0] for _ in range(CALIBRATION_BINS)])

    def add(self, agrees: list[bool], confidence: list[float]) -> int:
        """Count one step of one prompt; returns the number of accepted drafts. Mutates the sums."""
        self.steps += 1
        kept = 0
        for i, (agree, probability) in enumerate(zip(agrees, confidence, strict=True)):
            self.reached[i] += 1
            self.accepted[i] += agree
            entry = self.bins[min(int(probability * CALIBRATION_BINS), CALIBRATION_BINS - 1)]
            entry[0] += 1
            entry[1] += agree
            entry[2] += probability
            if not agree:
                break
            kept += 1
        self.tokens += kept + 1
        return kept

    def summary(self) -> dict[str, object]:
        table = [{"drafts": int(n), "predicted": p / n, "observed": k / n} for n, k, p in self.bins if n]
        rates = [k / n if n else 0.0 for k, n in zip(self.accepted, self.reached, strict=True)]
        return {"tokens_per_step": self.tokens / self.steps, "steps": self.steps, "acceptance": rates, "calibration": table}


@torch.no_grad()
def count_drafts(model: Transformer, prompts: list[Int[Tensor, " n"]], new_tokens: int) -> DraftCounts:
    """Continue every prompt greedily by at least `new_tokens` tokens."""
    size, eos = model.config.draft.block_size, model.config.eos_token_id
    counts = DraftCounts(reached=[0] * size, accepted=[0] * size)
    longest = max(prompt.shape[0] for prompt in prompts) + new_tokens + 2 * size + 2
    per_prompt, b = -(-longest // CACHE_BLOCK), len(prompts)
    cache = model.new_cache(CacheSizes(num_slots=b + 1, num_blocks=b * per_prompt + 1, block_size=CACHE_BLOCK, max_backtrack=size))
    tables = [range(1 + i * per_prompt, 1 + (i + 1) * per_prompt) for i in range(b)]
    positions, made, tokens = [], [0] * b, []
    for i, prompt in enumerate(prompts):
        rows = pack_rows([(prompt.tolist(), 0)], [i + 1], [tables[i]], CACHE_BLOCK, model.device)
        hidden = model.forward_rows(rows, cache)
        assert hidden.main_hidden is not None
        model.observe_draft(hidden.main_hidden, rows, cache)
        tokens.append(int(model.logits(hidden.final[-1:]).argmax(dim=-1)))
        positions.append(prompt.shape[0] - 1)
    running = list(range(b))
    with tqdm(total=b * new_tokens, desc="speculative decoding", unit="token", disable=None) as progress:
        while running:
            slots = torch.tensor([i + 1 for i in running], device=model.device)
            at = torch.tensor([positions[i] for i in running], device=model.device)
            proposal = model.propose_draft(torch.tensor([tokens[i] for i in running], device=model.device), at, slots, cache)
            drafts, confidence = proposal.token_ids.tolist(), torch.sigmoid(proposal.confidence).tolist()
            chunks = [([tokens[i], *drafts[k]], positions[i] + 1) for k, i in enumerate(running)]
            used = [tables[i] for i in running]
            rows = pack_rows(chunks, slots.tolist(), used, CACHE_BLOCK, model.device)
            hidden = model.forward_rows(rows, cache)
            assert hidden.main_hidden is not None
            model.observe_draft(hidden.main_hidden, rows, cache)
            choices = model.logits(hidden.final).argmax(dim=-1).view(len(running), -1).tolist()
            still = []
            for k, i in enumerate(running):
                kept = counts.add([d == c for d, c in zip(drafts[k], choices[k], strict=False)], confidence[k])
                positions[i] += kept + 1
                tokens[i] = choices[k][kept]
                made[i] += kept + 1
                progress.update(kept + 1)
                if made[i] < new_tokens and eos not in (*drafts[k][:kept], tokens[i]):
                    still.append(i)
            running = still
    return counts
