"""State machine of role changes."""

from functools import partial

from hypothesis import find, given, settings
from hypothesis import strategies as st

from prfaas.manager.state.quiescence import TRANSITIONS, RoleChangeEvent, RoleChangeProgress, RoleChangeState

_Step = tuple[float, bool] | None
_Transition = tuple[RoleChangeState, RoleChangeEvent, RoleChangeState]

# A step has seconds that pass and whether an instance is busy. None withdraws the change.
_STEPS = st.lists(st.none() | st.tuples(st.sampled_from((0.0, 1.0, 4.0)), st.booleans()), max_size=12)
_TIMEOUTS = st.sampled_from((0.0, 2.0, 5.0, 20.0))
_ALLOWED = {(state, event, following) for (state, event), following in TRANSITIONS.transitions.items()}


class _RecordedChange(RoleChangeProgress):
    def __init__(self, *, timeout_seconds: float, now: float) -> None:
        super().__init__(timeout_seconds=timeout_seconds, now=now)
        self.transitions: list[_Transition] = []

    def _apply(self, event: RoleChangeEvent) -> None:
        before = self.state
        super()._apply(event)
        self.transitions.append((before, event, self.state))


def _observed(steps: list[_Step], timeout_seconds: float) -> list[_Transition]:
    now = 0.0
    change = _RecordedChange(timeout_seconds=timeout_seconds, now=now)
    for step in steps:
        if step is None:
            change.withdraw()
        else:
            now += step[0]
            change.step(is_busy=step[1], now=now)
    return change.transitions


def _reaches(transition: _Transition, case: tuple[list[_Step], float]) -> bool:
    return transition in _observed(*case)


@given(_STEPS, _TIMEOUTS)
def test_only_transitions_of_the_table_occur(steps: list[_Step], timeout_seconds: float) -> None:
    assert set(_observed(steps, timeout_seconds)) <= _ALLOWED


def test_every_transition_of_the_table_is_reached() -> None:
    cases = st.tuples(_STEPS, _TIMEOUTS)
    for transition in _ALLOWED:
        reaches = partial(_reaches, transition)
        find(cases, reaches, settings=settings(database=None, max_examples=2000))


@given(_TIMEOUTS)
def test_busy_instance_changes_its_role_at_the_timeout(timeout_seconds: float) -> None:
    change = RoleChangeProgress(timeout_seconds=timeout_seconds, now=0.0)
    assert change.step(is_busy=True, now=timeout_seconds) is RoleChangeState.APPLIED
    change.withdraw()
    assert change.state is RoleChangeState.APPLIED
