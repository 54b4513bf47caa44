"""How much of a prompt runs again, and through which layers: arithmetic on positions, no tensors.

Entries of a known prefix can be kept for long, window rings cannot: they are large, and belong to one position. Two savings follow.

* Recovery: a prefix whose entries are stored is entered at its end with a copy of the rings as they stood there, or some way before
  its end, so that replayed rows fill the rings again. Replayed rows read stored entries and never write them.
* Truncation: behind the last KV source (the decoder half) a prompt needs only its last rows.

A ring that starts cold at position s is right, in layer l, from s + l (W - 1) on: each layer reads W - 1 rows back.

| mode | a stored prefix | the decoder half |
|---|---|---|
| `full` | is computed again | runs on every row |
| `exact` | ring snapshot, or a replay of L (W - 1) rows: as `full`, to the bit | runs on the last d (W - 1) + 1 rows |
| `bounded` | a replay of W rows: an approximation | runs on the last W + 12 rows |

Source: specification section 17.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from deepinfer.outputs import ReplayMode
from deepinfer.runtime.plan import ReplaySpan

# The deployment keeps 140 rows for a window of 128.
BOUNDED_TAIL_EXTRA = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Where a prompt is entered.

    Attributes:
        start: first row to run.
        end: tokens whose entries are taken from the cache; what lies between `start` and `end` is replayed.
        from_snapshot: rings, pending groups and history come from a snapshot at `start`, which is `end`.
    """

    start: int = 0
    end: int = 0
    from_snapshot: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPolicy:
    """The rules of one mode for one model.

    Attributes:
        num_layers: backbone layers.
        num_decoder_layers: those behind the last KV source.
        has_drafts: draft rings hang on the last layers' outputs and are one layer more.
    """

    mode: ReplayMode = "full"
    window: int = 1
    num_layers: int = 0
    num_decoder_layers: int = 0
    has_drafts: bool = False

    @property
    def depth(self) -> int:
        """Rows to replay until every ring is right, L (W - 1)."""
        return (self.num_layers + self.has_drafts) * (self.window - 1)

    @property
    def decoder_depth(self) -> int:
        """The same for the decoder half alone, d (W - 1)."""
        return (self.num_decoder_layers + self.has_drafts) * (self.window - 1)

    def enter(self, matched: int, snapshot: int) -> Entry:
        """The cheapest way into a prompt of which entries are stored for the first `matched` tokens.

        `snapshot`: the longest stored prefix at whose end there is a snapshot; 0 if there is none.
        """
        if self.mode == "exact":
            if matched - self.depth > snapshot:
                return Entry(start=matched - self.depth, end=matched)
            return Entry(start=snapshot, end=snapshot, from_snapshot=snapshot > 0)
        # With no more than a window nothing would be saved.
        if self.mode == "bounded" and matched > self.window:
            return Entry(start=matched - self.window, end=matched)
        return Entry()

    def span(self, entry: Entry, known: int, save_points: Iterable[int] = ()) -> ReplaySpan | None:
        """How the rows of a prompt of `known` tokens differ from plain ones; None if they do not.

        `save_points`: positions at which all rings have to be right because a snapshot is taken.
        """
        if self.mode == "full":
            return None
        is_warm = entry.start == entry.end
        right_from = min((*save_points, known - 1)) if self.mode == "exact" else known
        tail_start = right_from - self.decoder_depth if self.mode == "exact" else known - self.window - BOUNDED_TAIL_EXTRA
        if self.num_decoder_layers == 0 or tail_start <= entry.start:
            tail_start, right_from = entry.start, entry.end
        if is_warm and tail_start == entry.start:
            return None
        window_start = 0 if is_warm else entry.start
        return ReplaySpan(
            end=known,
            window_start=window_start,
            write_floor=entry.end,
            tail_start=tail_start,
            tail_window_start=window_start if tail_start == entry.start else tail_start,
            right_from=right_from if self.mode == "exact" else known,
        )
