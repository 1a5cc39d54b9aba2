import math

import numpy as np
import pytest

from prfaas.model.capacity.queueing import QueueModel, SharedLink, erlang_c


def test_wait_of_one_server_follows_pollaczek_khinchine() -> None:
    station = QueueModel(1, arrivals_per_second=0.5, mean_seconds=1.0, squared_cv=0.25)
    assert station.mean_wait_seconds == pytest.approx(0.5 * 1.0 * (1 + 0.25) / (2 * (1 - 0.5)))


def test_erlang_c_of_the_textbook() -> None:
    assert erlang_c(2, 0.75) == pytest.approx(0.6428571)
    assert erlang_c(1, 0.3) == pytest.approx(0.3)
    assert 0 < erlang_c(10_000, 0.99) < 1


@pytest.mark.parametrize("arrivals", [4.0, 9.0])
def test_wait_at_full_load_is_infinite(arrivals: float) -> None:
    assert QueueModel(4, arrivals, 1.0, 0.0).mean_wait_seconds == math.inf


def test_a_shared_link_delays_transfers_in_proportion_to_their_size() -> None:
    link = SharedLink(arrivals_per_second=0.8, mean_seconds=1.0, squared_cv=0.5)
    seconds = np.array([0.2, 1.0, 4.0])
    assert link.mean_delay_seconds(seconds) == pytest.approx(4.0 * seconds)
    assert link.delays(seconds).mean(axis=0) == pytest.approx(4.0 * seconds)


def test_a_full_link_delays_without_bound_and_an_idle_one_not_at_all() -> None:
    seconds = np.array([1.0, 2.0])
    assert np.isinf(SharedLink(1.0, 1.0, 0.0).delays(seconds)).all()
    assert not SharedLink(0.0, 1.0, 0.0).delays(seconds).any()


def test_departures_are_smoother_than_poisson_if_service_is() -> None:
    busy = QueueModel(1, 0.9, 1.0, 0.0)
    assert busy.departures_squared_cv == pytest.approx(1 - 0.9**2)
    assert QueueModel(4, 0.4, 1.0, 1.0).departures_squared_cv == 1
