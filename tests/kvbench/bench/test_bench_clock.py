"""The clock of a device: what a kernel takes is never what launching it takes, and its inputs are not at hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvbench.tools.bench import clock
from kvbench.tools.bench.clock import Delayed, sets_of_inputs, time_calls

CUDA = torch.device("cuda")


class Device:
    """A device with one stream of work and a host that gives it some: milliseconds of both, one cycle a nanosecond."""

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def sleep(self, cycles: int) -> None:
        self.run(cycles / 1e6)

    def run(self, ms: float, launch: float = 0.0, waits: bool = False) -> None:
        """Work of `ms`, handed over after `launch`; waits: the host goes on only when it is done."""
        self.host += launch
        self.device = max(self.device, self.host) + ms
        self.host = max(self.host, self.device) if waits else self.host

    def event(self, enable_timing: bool) -> SimpleNamespace:
        mark = SimpleNamespace()

        def record() -> None:
            mark.at = max(self.device, self.host)

        def synchronize() -> None:
            self.host = max(self.host, self.device)

        return SimpleNamespace(
            record=record,
            query=lambda: self.host >= mark.at,
            synchronize=synchronize,
            elapsed_time=lambda other: other.mark.at - mark.at,
            mark=mark,
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=50_000_000))
    monkeypatch.setattr(clock, "_fill_cache", lambda device: None)
    return made


@pytest.mark.parametrize("launch", [0.01, 0.5, 30.0])
def test_the_time_of_a_kernel_is_the_devices_however_long_its_launch_takes(launch: float, device: Device) -> None:
    def call() -> None:
        device.run(0.25, launch=launch)
        device.run(0.5, launch=launch)  # a second kernel of the same call

    assert Delayed().ms(call) == pytest.approx(0.75)
    found = time_calls([call], CUDA)
    assert (found.p20, found.p50, found.p80) == pytest.approx((0.75, 0.75, 0.75))


@pytest.mark.usefixtures("device")
def test_inputs_that_take_turns_are_twice_the_devices_cache_or_one_for_every_call() -> None:
    assert [sets_of_inputs(size, CUDA) for size in (10_000, 1_000_000, 99_000_000, 500_000_000)] == [200, 101, 2, 1]
    assert sets_of_inputs(10_000, torch.device("cpu")) == 1


def test_sets_that_are_fewer_than_the_cache_holds_leave_it_before_they_are_timed(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(clock, "_fill_cache", lambda device: done.append("filled"))
    time_calls([lambda: done.append("call") or device.run(500.0)], CUDA)
    assert done == ["filled", "call"]
