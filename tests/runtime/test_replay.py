"""Where a prompt is entered and which of its rows run where: the rules as numbers."""

from dataclasses import replace

from deepinfer.runtime.replay import Entry, ReplayPolicy

FLASH = ReplayPolicy(mode="exact", window=128, num_layers=40, num_decoder_layers=19)


def test_the_depths_of_the_release() -> None:
    assert FLASH.depth == 5080
    assert FLASH.decoder_depth == 2413
    assert replace(FLASH, has_drafts=True).depth == 41 * 127


def test_exact_takes_the_cheaper_way() -> None:
    assert FLASH.enter(matched=10_000, snapshot=0) == Entry(start=4920, end=10_000)
    assert FLASH.enter(matched=10_000, snapshot=4_900) == Entry(start=4920, end=10_000)
    assert FLASH.enter(matched=10_000, snapshot=4_928) == Entry(start=4928, end=4928, from_snapshot=True)
    assert FLASH.enter(matched=5_080, snapshot=0) == Entry()


def test_bounded_replays_a_window_and_needs_more_than_one() -> None:
    bounded = replace(FLASH, mode="bounded")
    assert bounded.enter(matched=128, snapshot=0) == Entry()
    assert bounded.enter(matched=192, snapshot=0) == Entry(start=64, end=192)
    span = bounded.span(Entry(start=64, end=192), known=1000)
    assert span is not None
    assert (span.window_start, span.write_floor, span.tail_start, span.tail_window_start) == (64, 192, 860, 860)


def test_full_changes_nothing() -> None:
    full = replace(FLASH, mode="full")
    assert full.enter(matched=10_000, snapshot=10_000) == Entry()
    assert full.span(Entry(), known=10_000) is None


def test_the_tail_reaches_back_from_the_first_place_that_has_to_be_right() -> None:
    span = FLASH.span(Entry(), known=10_000)
    assert span is not None
    assert (span.tail_start, span.right_from) == (9_999 - 2413, 9_999)
    span = FLASH.span(Entry(), known=10_000, save_points=(6_400, 9_984))
    assert span is not None
    assert (span.tail_start, span.right_from) == (6_400 - 2413, 6_400)


def test_what_is_shorter_than_the_tail_is_plain() -> None:
    assert FLASH.span(Entry(), known=2414) is None
    assert FLASH.span(Entry(), known=2415) is not None
    assert FLASH.span(Entry(start=9_000, end=9_000, from_snapshot=True), known=9_500) is None


def test_a_warm_start_has_warm_windows_unless_rows_are_left_out() -> None:
    span = FLASH.span(Entry(start=1_000, end=1_000, from_snapshot=True), known=10_000)
    assert span is not None
    assert (span.window_start, span.tail_window_start, span.tail_start) == (0, 7586, 7586)
