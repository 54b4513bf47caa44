"""The test device itself: it must find what it is there to find."""

import pytest

from deepinfer.runtime.fuzz_device import FuzzDevice, RaceError


def test_launches_of_one_stream_run_in_order() -> None:
    device, ran = FuzzDevice(0), []
    for i in range(20):
        device.launch("a", lambda i=i: ran.append(i))
    device.synchronize(device.record("a"))
    assert ran == list(range(20))


def test_streams_without_an_edge_run_in_many_orders() -> None:
    orders = set()
    for seed in range(30):
        device, ran = FuzzDevice(seed), []
        device.launch("a", lambda ran=ran: ran.append("a"))
        device.launch("b", lambda ran=ran: ran.append("b"))
        device.synchronize(device.record("a"))
        device.synchronize(device.record("b"))
        orders.add(tuple(ran))
    assert orders == {("a", "b"), ("b", "a")}


def test_a_wait_orders_two_streams() -> None:
    for seed in range(30):
        device, ran = FuzzDevice(seed), []
        device.launch("a", lambda ran=ran: ran.append("a"))
        device.wait("b", device.record("a"))
        device.launch("b", lambda ran=ran: ran.append("b"))
        device.synchronize(device.record("b"))
        assert ran == ["a", "b"]


def test_an_unordered_write_is_a_race_even_if_it_happens_to_run_last() -> None:
    device, buffer = FuzzDevice(0, eagerness=0.99), object()
    device.launch("a", lambda: None, writes=[buffer])
    with pytest.raises(RaceError, match="not ordered"):
        device.launch("b", lambda: None, reads=[buffer])


def test_an_event_the_host_has_seen_orders_what_it_launches_next() -> None:
    device, buffer = FuzzDevice(0), object()
    device.launch("a", lambda: None, writes=[buffer])
    device.synchronize(device.record("a"))
    device.launch("b", lambda: None, reads=[buffer])


def test_the_host_may_not_touch_what_a_launch_in_flight_touches() -> None:
    device = FuzzDevice(0)
    device.launch("a", lambda: None, reads=[("block", 3)])
    event = device.record("a")
    with pytest.raises(RaceError, match="block"):
        device.host_write(("block", 3))
    device.synchronize(event)
    device.host_write(("block", 3))
