"""The fixed shapes that steps are padded to, so that few of them are compiled and captured.

True lengths are values inside: padding costs rows of trash and changes nothing else.
"""

import bisect

from deepinfer.config import ModelConfig
from deepinfer.model.compiled import LEAST_ROWS
from deepinfer.runtime.draft_budget import draft_counts
from deepinfer.runtime.plan import SchedulerOutputs, StepKind
from deepinfer.runtime.replay_state import num_skipped
from deepinfer.runtime.step_state import PaddedShape, table_width

SHORT_PREFILLS = (64, 256)  # rows; beyond, the device has more to do than the host
LEAST_TABLE_WIDTH = 8  # blocks; short sequences share a shape


def decode_shape(groups: int, drafts_each: int, table_width: int) -> PaddedShape:
    """The shape of a decode step: table widths grow in powers of four, so that long sequences need few shapes."""
    width = LEAST_TABLE_WIDTH
    while width < table_width:
        width *= 4
    return PaddedShape(groups, max(groups * (1 + drafts_each), LEAST_ROWS), width)


class StepShapes:
    """Chooses shapes. `buckets` are row group counts of steps with a fixed shape, ascending; none: no step has one.

    Args:
        chooses_drafts: whether a `DraftBudget` decides how many drafts a step verifies. If not, each sequence has `num_drafts`, or
            none, and fewer only in its last steps.
        fixes_prefills: whether short prefills have fixed shapes as well as decode steps.
        pads_every_step: whether other steps, too, keep away from sizes of 1, which compilers take for a special case.
    """

    def __init__(
        self,
        buckets: tuple[int, ...],
        num_drafts: int,
        block_size: int,
        *,
        chooses_drafts: bool,
        fixes_prefills: bool,
        pads_every_step: bool,
    ) -> None:
        self.buckets, self.num_drafts, self.block_size = buckets, num_drafts, block_size
        self.chooses_drafts, self.fixes_prefills, self.pads_every_step = chooses_drafts, fixes_prefills, pads_every_step
        # Drafts for each sequence that decode steps are padded to, ascending.
        self.draft_counts = draft_counts(num_drafts) if chooses_drafts else tuple(sorted({0, num_drafts}))

    def bucket(self, count: int) -> int | None:
        """The smallest bucket for a number of groups."""
        place = bisect.bisect_left(self.buckets, count)
        return self.buckets[place] if place < len(self.buckets) else None

    def fixed(self, groups: int, drafts_each: int, table_width: int, *, is_even: bool = False) -> PaddedShape:
        """A shape that is captured. Where drafts are chosen, every step's are, so that no shape comes in two forms."""
        # What one rank chooses is not its own matter where all replay the same graph.
        return decode_shape(groups, drafts_each, table_width)._replace(
            is_even=is_even, splits_drafts=is_even or self.chooses_drafts
        )

    def of_prefill(self, plan: SchedulerOutputs) -> PaddedShape | None:
        """The fixed shape of a short prefill of plain rows; None for any other step."""
        if not self.fixes_prefills or plan.kind is not StepKind.PREFILL or any(seq.replay is not None for seq in plan.sequences):
            return None
        groups, rows = self.bucket(len(plan.sequences)), next((rows for rows in SHORT_PREFILLS if rows >= plan.num_rows), None)
        if groups is None or rows is None:
            return None
        return self.fixed(groups, 0, table_width(plan, self.block_size))._replace(rows=rows)

    def of(self, plan: SchedulerOutputs) -> PaddedShape | None:
        """The shape that any other step is padded to: its bucket's, if there is one, or away from sizes of 1; None: its own."""
        count, width = len(plan.sequences), table_width(plan, self.block_size)
        agreed = plan.group_shape
        groups = self.bucket(count if agreed is None else agreed.num_groups)
        if groups is not None and agreed is not None:
            return self.fixed(groups, self.num_drafts, agreed.num_blocks, is_even=True)
        if groups is not None and plan.kind is StepKind.DECODE:
            # A request's last steps have fewer drafts than others.
            each = next(each for each in self.draft_counts if each * count >= plan.draft_rows)
            return self.fixed(groups, each, width)
        if not self.pads_every_step or not count:
            return None
        # Behind the last KV source as well.
        skipped = sum(num_skipped(seq) for seq in plan.sequences)
        return decode_shape(count, 0, width)._replace(rows=max(plan.num_rows, skipped + LEAST_ROWS))

    def table_widths(self, config: ModelConfig, num_blocks: int) -> list[int]:
        """Widths of block tables that have code of their own: the index chooses among more entries, or blocks, than it keeps."""
        ix = config.indexer
        kept = [ix.topk] + [ix.candidate_topk_blocks * ix.candidate_block_size] * (ix.candidate_source_layer >= 0)
        tokens = [0, *(config.compress_ratios[layer] * count for layer in config.kv_source_layers for count in kept)]
        longest = decode_shape(1, 0, num_blocks - 1).table_width
        widths = {decode_shape(1, 0, count // self.block_size + 1).table_width for count in tokens}
        return sorted(width for width in widths if width <= longest)
