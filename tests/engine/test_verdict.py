"""Who failed first: a table of how workers can end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import DistBackendError, DistNetworkError

from dtrain.engine.attempt.agent import Ended
from dtrain.engine.attempt.supervise import Hang
from dtrain.engine.attempt.verdict import CRASHES, SAME_FAULTS, Fault, RestartBudget, find_fault
from dtrain.engine.job import write_error
from dtrain.engine.snapshot.state import StateError
from dtrain.specs.codes import Code
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.memory.heartbeat import Phase

RESET = RuntimeError("[pair.cc:538] Read error [127.0.0.1]:39153: Connection reset by peer")
CLOSED = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:40123")
TIMED_OUT = RuntimeError("gloo: timed out waiting 1800000ms for recv operation to complete")
NETWORK = DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed")
BACKEND = DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited")
CONSEQUENCES = [RESET, CLOSED, TIMED_OUT, NETWORK, BACKEND]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    made.next_attempt()
    return made


def judge(
    run: RunDir, exit_codes: dict[int, int], errors: dict[int, BaseException], *, world: int = 3, final: bool = False
) -> Fault:
    """The verdict when the workers left these codes and, in this order, these notes."""
    for rank, error in errors.items():
        write_error(run, 1, rank, error, Code.BAD_SPEC if final else Code.FAILED, final=final)
    return find_fault(run, 1, Ended(exit_codes), (), world)


@pytest.mark.parametrize("consequence", CONSEQUENCES, ids=lambda e: type(e).__name__)
def test_row_100_a_killed_rank_is_named_and_not_those_that_lost_it(run: RunDir, consequence: Exception) -> None:
    fault = judge(run, {0: 70, 1: -9, 2: 70}, {0: consequence, 2: consequence})
    assert fault == Fault(1, "killed", "rank 1 was killed by SIGKILL", final=False, code=Code.FAILED, signal="SIGKILL")


def test_a_killed_rank_goes_before_what_another_raised_for_want_of_it(run: RunDir) -> None:
    fault = judge(run, {0: 70, 1: -9}, {0: TimeoutError("no answer from the data server of rank 1")})
    assert (fault.rank, fault.kind) == (1, "killed")


@pytest.mark.parametrize(("code", "name"), [(-11, "SIGSEGV"), (-6, "SIGABRT"), (-7, "SIGBUS"), (-62, "signal 62")])
def test_the_signal_is_named(run: RunDir, code: int, name: str) -> None:
    assert judge(run, {2: code}, {}).detail == f"rank 2 was killed by {name}"


def test_of_several_killed_ranks_one_is_named(run: RunDir) -> None:
    assert judge(run, {2: -9, 1: -9}, {}).rank == 1


@pytest.mark.parametrize("consequence", CONSEQUENCES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("first", [True, False])
def test_an_exception_is_named_before_its_consequences(run: RunDir, consequence: Exception, first: bool) -> None:
    """Row 99: whichever note was written first."""
    cause = MemoryError("no room")
    errors = {1: cause, 0: consequence, 2: consequence} if first else {0: consequence, 2: consequence, 1: cause}
    fault = judge(run, {0: 70, 1: 70, 2: 70}, errors)
    assert fault == Fault(1, "exception", "rank 1: MemoryError: no room", final=False, code=Code.FAILED)


def test_of_two_exceptions_the_first_is_named(run: RunDir) -> None:
    assert judge(run, {1: 70, 2: 70}, {2: ValueError("first"), 1: ValueError("second")}).rank == 2


def test_a_final_exception_goes_before_everything(run: RunDir) -> None:
    write_error(run, 1, 0, ValueError("earlier"), Code.FAILED, final=False)
    write_error(run, 1, 2, StateError("other model"), Code.BAD_SPEC, final=True)
    fault = find_fault(run, 1, Ended({0: 70, 1: -9, 2: 78}), (), 3)
    assert fault == Fault(2, "exception", "rank 2: StateError: other model", final=True, code=Code.BAD_SPEC)


def test_an_exception_is_the_cause_when_the_others_were_told_to_end(run: RunDir) -> None:
    """Row 91: once one worker has failed the agent ends those that still run; their SIGTERM is not what began it."""
    fault = judge(run, {0: 70, 1: -15, 2: -15}, {0: ValueError("cannot start")})
    assert (fault.rank, fault.kind, fault.detail) == (0, "exception", "rank 0: ValueError: cannot start")


@pytest.mark.parametrize(
    "message", ["cannot reset the optimizer", "peer review needed", "bad connection matrix", "no socket in this model"]
)
def test_a_persons_own_runtime_error_is_no_consequence(run: RunDir, message: str) -> None:
    fault = judge(run, {0: 70, 1: 70, 2: 70}, {1: CLOSED, 2: RESET, 0: RuntimeError(message)})
    assert (fault.rank, fault.kind, fault.detail) == (0, "exception", f"rank 0: RuntimeError: {message}")


def test_a_runtime_error_of_another_kind_is_a_cause(run: RunDir) -> None:
    errors = {0: RESET, 1: RuntimeError("mat1 and mat2 shapes cannot be multiplied")}
    assert judge(run, {0: 70, 1: 70, 2: 70}, errors).rank == 1


def test_words_of_a_lost_connection_in_another_exception_are_a_cause(run: RunDir) -> None:
    errors = {0: RESET, 1: ConnectionResetError("the data server reset the connection")}
    fault = judge(run, {0: 70, 1: 70}, errors, world=2)
    assert (fault.rank, fault.kind) == (1, "exception")


def test_when_there_are_only_consequences_the_first_is_told(run: RunDir) -> None:
    fault = judge(run, {0: 70, 1: 70, 2: 70}, {1: CLOSED, 0: RESET, 2: CLOSED})
    assert (fault.rank, fault.kind) == (1, "exception")
    assert "Connection closed by peer" in fault.detail


def test_row_106_a_rank_that_left_too_early_without_a_word(run: RunDir) -> None:
    """Exit code 0 is no success before the last step."""
    fault = judge(run, {0: 70, 2: 70}, {0: CLOSED, 2: RESET})
    detail = "rank 1 left with exit code 0 before the last step"
    assert fault == Fault(1, "exited", detail, final=False, code=Code.FAILED)


def test_all_ranks_left_with_0_and_no_result(run: RunDir) -> None:
    assert judge(run, {}, {}, world=2) == Fault(
        0, "exited", "rank 0 left with exit code 0 before the last step", final=False, code=Code.FAILED
    )


def test_a_rank_that_left_with_a_code_and_no_note(run: RunDir) -> None:
    fault = judge(run, {1: 3}, {})
    assert fault == Fault(1, "exited", "rank 1 left with exit code 3", final=False, code=Code.FAILED)


def test_a_hang_is_the_cause_of_the_kill_that_ended_it(run: RunDir) -> None:
    write_error(run, 1, 0, CLOSED, Code.FAILED, final=False)
    hangs = [Hang(2, 7, 2.345), Hang(0, 7, 9.0)]
    fault = find_fault(run, 1, Ended({0: 70, 2: -9}), hangs, 3)
    assert (fault.rank, fault.kind, fault.final) == (2, "hang", False)
    assert fault.detail == "rank 2 stood still for 2.3 s in step 7; its stack is in its log"
    spinning = [Hang(1, 0, 60.0, Phase.MODEL, spins=True)]
    detail = "rank 1 took processor time and came no further for 60.0 s before its first step, building the model"
    assert find_fault(run, 1, Ended({1: -9}), spinning, 3).detail == f"{detail}; its stack is in its log"


def test_notes_of_an_earlier_attempt_do_not_count(run: RunDir) -> None:
    write_error(run, 1, 0, ValueError("old"), Code.FAILED, final=True)
    run.next_attempt()
    assert find_fault(run, 2, Ended({1: -9}), (), 2).rank == 1


KILLED = Fault(1, "killed", "rank 1 was killed by SIGKILL", final=False, code=Code.FAILED, signal="SIGKILL")
RAISED = [
    Fault(rank, "exception", f"rank {rank}: ValueError: it is {{}}", final=False, code=Code.FAILED) for rank in (0, 1)
]


@pytest.mark.parametrize(
    "fault",
    [
        RAISED[0],
        Fault(0, "exited", "rank 0 left with exit code 3", final=False, code=Code.FAILED),
        *(replace(KILLED, signal=name) for name in CRASHES),
    ],
    ids=lambda fault: fault.signal or fault.kind,
)
def test_row_91_a_program_that_fails_by_itself_before_any_step_is_not_started_again(fault: Fault) -> None:
    budget = RestartBudget(3)
    budget.count(fault, 1, progress=False)
    assert "no step was finished" in (budget.why_no_restart(fault) or "")
    budget.count(fault, 2, progress=True)
    budget.count(fault, 3, progress=False)
    assert budget.why_no_restart(fault) is None, "it has shown that it can make steps"


def test_what_comes_from_outside_before_any_step_is_answered_by_a_restart() -> None:
    budget = RestartBudget(3)
    for fault in (KILLED, Fault(None, "node", "node 1 has been silent", final=False, code=Code.FAILED, node=1)):
        budget.count(fault, 1, progress=False)
        assert budget.why_no_restart(fault) is None


@pytest.mark.parametrize(
    "faults", [[KILLED] * 3, [RAISED[0], RAISED[1], RAISED[0]]], ids=["killed", "now one, now another"]
)
def test_the_same_fault_again_and_again_without_a_step_ends_the_job_as_it_was_first(faults: list[Fault]) -> None:
    budget = RestartBudget(10)
    budget.count(replace(KILLED, signal="SIGSEGV"), 1, progress=True)
    for attempt, fault in enumerate(faults, 2):
        assert budget.why_no_restart(fault) is None
        budget.count(fault, attempt, progress=False)
    assert f"the same {SAME_FAULTS} times" in (budget.why_no_restart(faults[-1]) or "")
    assert budget.first == (faults[0], 2)


def test_a_step_between_two_equal_faults_begins_both_counts_anew() -> None:
    budget = RestartBudget(1)
    for attempt in range(1, 20):
        budget.count(KILLED, attempt, progress=True)
        assert budget.why_no_restart(KILLED) is None
    assert budget.first == (KILLED, 19)


def test_different_faults_are_bounded_by_the_budget_alone() -> None:
    budget = RestartBudget(3)
    for attempt in range(1, 5):
        fault = replace(KILLED, rank=attempt % 2)
        assert budget.why_no_restart(fault) is None
        budget.count(fault, attempt, progress=False)
    assert "4 failures in a row" in (budget.why_no_restart(fault) or "")
