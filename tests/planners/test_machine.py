from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.planners.build import MakeSpec

from dtrain.cli import machine as module
from dtrain.cli.core import Core, look_at_core, rounded
from dtrain.cli.machine import choose_accelerator, nvidia_gpus, omp_threads, shm_free_bytes, table_name, this_machine
from dtrain.engine.attempt.forks import worker_environment


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """GPUs that the machine pretends to have; empty at first."""
    found: list[str] = []
    monkeypatch.setattr(module, "nvidia_gpus", lambda: found)
    return found


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L4", None),
    ],
)
def test_names_in_the_table(gpu: str, name: str | None) -> None:
    assert table_name(gpu) == name


def test_a_gpu_that_is_here_is_planned_for(make_spec: MakeSpec, gpus: list[str]) -> None:
    gpus += ["NVIDIA H200"] * 8
    choice = choose_accelerator(make_spec(cluster={}))
    assert (choice.accelerator, choice.count, choice.assumed) == ("h200", 8, ())


def test_a_gpu_outside_the_table_is_said(make_spec: MakeSpec, gpus: list[str]) -> None:
    gpus.append("NVIDIA L4")
    choice = choose_accelerator(make_spec(cluster={}))
    assert choice.accelerator == "a100"
    assert "NVIDIA L4" in choice.assumed[0]


@pytest.mark.usefixtures("gpus")
def test_the_spec_wins(make_spec: MakeSpec) -> None:
    assert choose_accelerator(make_spec(cluster={})).accelerator == "cpu"
    assert choose_accelerator(make_spec(cluster={"accelerator": "b200"})).accelerator == "b200"
    assumed = choose_accelerator(make_spec(cluster={"device": "cuda"}))
    assert assumed.accelerator == "h100"
    assert "no GPU here" in assumed.assumed[0]


def test_cpu_in_the_spec_ignores_the_gpus(make_spec: MakeSpec, gpus: list[str]) -> None:
    gpus.append("NVIDIA H100 80GB HBM3")
    assert choose_accelerator(make_spec(cluster={"device": "cpu"})).accelerator == "cpu"
    assert choose_accelerator(make_spec(cluster={"accelerator": "h100"})).count == 1


def test_this_machine(make_spec: MakeSpec, tmp_path: Path) -> None:
    here = this_machine(make_spec())
    assert here.cpu_cores == len(os.sched_getaffinity(0))
    assert (here.host_memory_bytes or 0) > 2**28
    assert shm_free_bytes(tmp_path / "missing") is None


def test_a_core_is_looked_at_where_the_plan_needs_it(make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_machine(make_spec())
    assert 1e8 < (here.core_flop_per_s or 0) < 1e13
    assert 1e7 < (here.core_traffic_bytes_per_s or 0) < 1e13
    monkeypatch.setattr(module, "look_at_core", lambda: pytest.fail("looked at although nobody needs it"))
    assert this_machine(make_spec(), look=False).core_flop_per_s is None
    given = {"device": "cpu", "hardware": {"flops": "50GFLOP/s", "memory_bandwidth": "20GB/s"}}
    assert this_machine(make_spec(cluster=given)).core_flop_per_s is None
    assert this_machine(make_spec(cluster={"accelerator": "h100"})).core_flop_per_s is None


def test_a_machine_that_is_a_little_faster_today_gives_the_same_plan() -> None:
    assert len({rounded(200e9 * change) for change in (0.95, 1.0, 1.05)}) == 1
    assert all(1 / 1.13 < rounded(value) / value < 1.13 for value in (1e9, 1.3e9, 2e9, 3e9, 5e9, 8e9))


def test_a_look_that_fails_leaves_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert look_at_core() == Core()


@pytest.mark.usefixtures("gpus")
def test_memory_of_another_machine_is_not_known(make_spec: MakeSpec) -> None:
    elsewhere = this_machine(make_spec(cluster={"accelerator": "mi300x"}))
    assert (elsewhere.host_memory_bytes, elsewhere.shm_free_bytes) == (None, None)


def test_gpus_from_the_driver_s_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index in range(2):
        folder = tmp_path / f"0000:0{index}:00.0"
        folder.mkdir()
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n")
    monkeypatch.setattr(module, "NVIDIA_PROC", tmp_path)
    assert nvidia_gpus() == ["NVIDIA H100 80GB HBM3"] * 2


def test_gpus_from_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)'\n")
    command.chmod(0o755)
    monkeypatch.setattr(module, "NVIDIA_PROC", tmp_path / "none")
    monkeypatch.setattr(module, "NVIDIA_DEVICE", command)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nvidia_gpus() == ["NVIDIA A100-SXM4-80GB"]


def test_a_listing_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nexec sleep 20\n")
    command.chmod(0o755)
    monkeypatch.setattr(module, "NVIDIA_PROC", tmp_path / "none")
    monkeypatch.setattr(module, "NVIDIA_DEVICE", command)
    monkeypatch.setattr(module, "NVIDIA_SMI_TIMEOUT_S", 0.1)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nvidia_gpus() == []


@pytest.mark.parametrize(("given", "threads"), [("", None), ("1", 1), ("4,2", 4), ("0", None), ("all", None)])
def test_threads_that_the_environment_asks_for(given: str, threads: int | None) -> None:
    assert omp_threads(given) == threads


def test_a_plan_counts_with_the_threads_that_the_workers_will_have(
    make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert this_machine(make_spec(), look=False).omp_threads == 1
    assert worker_environment(make_spec())["OMP_NUM_THREADS"] == "1"
    monkeypatch.delenv("OMP_NUM_THREADS")
    here = this_machine(make_spec(), look=False)
    assert worker_environment(make_spec())["OMP_NUM_THREADS"] == str(here.threads(2))
