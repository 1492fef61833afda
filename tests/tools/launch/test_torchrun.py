"""How the processes of one benchmark agree, played by threads."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from fxshard.errors import ConfigError
from fxshard.options import LauncherEnvironment, gloo_interfaces, launched
from fxshard.tools import cli, cli_bench
from fxshard.tools.launch.ranks import RankError
from fxshard.tools.launch.torchrun import TICK_S, Peers


def launch(rank: int = 0, world_size: int = 3, **kwargs: Any) -> LauncherEnvironment:
    facts: dict[str, Any] = {"local_rank": rank, "is_one_machine": True, "host": "there", "port": 29500} | kwargs
    return LauncherEnvironment(rank=rank, world_size=world_size, **facts)


def together(*bodies: Callable[[Peers], Any]) -> list[Any]:
    """Run each body as one process; what it returned or raised."""
    given: list[Any] = [None] * len(bodies)
    barrier = threading.Barrier(len(bodies), timeout=20)

    def process(rank: int) -> Any:
        def exchange(own: Any) -> list[Any]:
            given[rank] = own
            barrier.wait()
            everything = list(given)
            barrier.wait()
            return everything

        try:
            return bodies[rank](Peers(launch(rank, len(bodies)), exchange))
        except (RankError, ConfigError) as error:
            return error

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(process, range(len(bodies))))


def hears(*ticks: list[Any] | RankError) -> Callable[[Peers], list[Any]]:
    """A process whose rank tells this, tick by tick."""

    def body(peers: Peers) -> list[Any]:
        told = iter(ticks)

        def listen(timeout_s: float) -> list[Any]:
            assert timeout_s == TICK_S, "else a failure elsewhere is not heard of"
            tick = next(told)
            if isinstance(tick, RankError):
                raise tick
            return tick

        return peers.collect(listen, 1)

    return body


def test_all_have_the_events_of_all_in_order_of_ranks_when_the_last_has_heard() -> None:
    assert together(hears(["a"]), hears([], [], ["b"]), hears([], ["c"])) == [["a", "b", "c"]] * 3


def test_a_failure_is_one_for_all_at_once_whether_they_have_heard_or_not() -> None:
    found = together(hears([], [], [], ["a"]), hears([], RankError("rank 1 failed: boom\nlog")), hears(["c"]))
    assert [str(error) for error in found] == ["rank 1 failed: boom\nlog"] * 3
    assert all(isinstance(error, RankError) for error in found)


def test_a_rank_that_was_killed_is_to_blame_before_those_that_miss_it() -> None:
    misses, killed = RankError("rank 0 failed: connection closed"), RankError("rank 1 was ended", was_killed=True)
    assert {str(error) for error in together(hears(misses), hears(killed))} == {"rank 1 was ended"}


def test_the_first_failure_is_to_blame_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: dict[str, float] = {}
    now = SimpleNamespace(time=lambda: clock[threading.current_thread().name])
    monkeypatch.setattr("fxshard.tools.launch.torchrun.time", now)

    def at(seconds: float, body: Callable[[Peers], Any]) -> Callable[[Peers], Any]:
        def timed(peers: Peers) -> Any:
            clock[threading.current_thread().name] = seconds
            return body(peers)

        return timed

    found = together(at(2.0, hears(RankError("follows"))), at(1.0, hears(RankError("leads"))))
    assert {str(error) for error in found} == {"leads"}


def test_what_one_process_cannot_do_none_does() -> None:
    def refuse() -> None:
        raise ConfigError("there is no module 'm'.")

    def works(peers: Peers) -> int:
        return peers.require(lambda: peers.rank)

    assert together(works, works) == [0, 1]
    here, there = together(works, lambda peers: peers.require(refuse))
    assert str(there) == "there is no module 'm'."
    assert str(here) == "rank 1: there is no module 'm'."
    assert isinstance(here, ConfigError)


def test_a_process_that_is_alone_listens_as_long_as_it_takes() -> None:
    told: Iterator[list[str]] = iter([["a"], ["b", "c"]])
    timeouts = []

    def listen(timeout_s: float) -> list[str]:
        timeouts.append(timeout_s)
        return next(told)

    peers = Peers()
    assert peers.collect(listen, 3) == ["a", "b", "c"]
    assert timeouts == [float("inf")] * 2
    assert peers.next_place() is None


def test_every_system_meets_under_a_prefix_of_its_own_in_the_launchers_store() -> None:
    first, second = Peers(launch(5, 8, local_rank=1)), Peers(launch(6, 8, local_rank=2, attempt=1))
    places = [first.next_place(), first.next_place(), second.next_place()]
    assert [place and (place.host, place.port) for place in places] == [("there", 29500)] * 3
    assert [place and (place.rank, place.local_rank) for place in places] == [(5, 1), (5, 1), (6, 2)]
    assert len({place and place.prefix for place in places}) == 3, "a launcher that starts anew keeps its store"


# ---- what the launcher tells

TOLD = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "1234"}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*TOLD, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_the_launcher_is_read_from_the_environment(told: pytest.MonkeyPatch) -> None:
    expected = launch(1, 4, host="here", port=1234, is_one_machine=False)
    assert launched() == expected, "it does not say how many are on this machine"
    told.setenv("LOCAL_WORLD_SIZE", "4")
    assert launched() == launch(1, 4, host="here", port=1234)
    told.delenv("RANK")
    assert launched() is None


def test_half_a_launcher_is_an_error(told: pytest.MonkeyPatch) -> None:
    told.delenv("LOCAL_RANK")
    with pytest.raises(ConfigError, match=r"but not LOCAL_RANK\. Start it with torchrun, or unset RANK"):
        launched()
    told.setenv("LOCAL_RANK", "first")
    with pytest.raises(ConfigError, match="LOCAL_RANK must be a whole number, got 'first'"):
        launched()


def test_gloo_uses_the_interfaces_that_it_is_told(told: pytest.MonkeyPatch) -> None:
    assert gloo_interfaces() == []
    told.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert gloo_interfaces() == ["lo", "eth0"]


def test_the_demo_is_not_for_a_launcher(told: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == 2
    assert "fxshard demo starts its ranks itself; run it without torchrun" in capsys.readouterr().err


# ---- flags that do not fit


def flags(**given: Any) -> Namespace:
    between = ("between_gigabytes_per_s", "between_latency_us")
    none = ("ranks", "world_size", "tensor_parallel", "gigabytes_per_s", "latency_us", *between, "device", "ctas")
    return Namespace(**(dict.fromkeys(none) | given))


@pytest.mark.parametrize(
    ("given", "group", "message"),
    [
        ({"ranks": 2}, "gloo", "--ranks is the number of processes that fxshard bench starts, and the launcher has "),
        ({}, "emulated", "--group emulated is one process; run it without torchrun"),
        ({}, "nccl", r"LOCAL_RANK is 2, and there are 2 GPUs on .*: NCCL needs one per process. Start no more"),
        ({"device": "cuda"}, "gloo", "--device needs --group emulated"),
    ],
)
def test_flags_that_do_not_fit_a_launcher_are_errors(
    given: dict[str, Any], group: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=message):
        cli_bench._num_ranks(flags(**given), group, launch(2, 3))


def test_as_many_processes_as_gpus_are_one_rank_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert cli_bench._num_ranks(flags(), "nccl", launch(2, 3)) == 3
    assert cli_bench._num_ranks(flags(), "gloo", launch(7, 8)) == 8
    assert cli_bench._num_ranks(flags(), "nccl", None) == 3
    assert cli_bench._num_ranks(flags(device="cuda", ctas=8), "emulated", None) == 1
