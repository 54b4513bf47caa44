"""Places in host memory: the block that was used longest ago goes first."""

from deepinfer.runtime.host_tier import HostTier


def test_the_least_recently_used_goes_first() -> None:
    tier = HostTier(2)
    first, second = tier.store(b"a"), tier.store(b"b")
    assert {first, second} == {0, 1}
    assert tier.use(b"a") == first
    assert tier.store(b"c") == second
    assert (tier.find(b"a"), tier.find(b"b"), tier.find(b"c")) == (first, None, second)


def test_a_block_is_stored_once() -> None:
    tier = HostTier(2)
    assert tier.store(b"a") is not None
    assert tier.store(b"a") is None
    assert tier.offloads == 1


def test_without_places_nothing_is_stored() -> None:
    tier = HostTier(0)
    assert tier.store(b"a") is None
    assert tier.find(b"a") is None


def test_forgotten_places_are_free() -> None:
    tier = HostTier(1)
    place = tier.store(b"a")
    assert place is not None
    tier.forget({place})
    assert tier.find(b"a") is None
    assert tier.store(b"b") == place
