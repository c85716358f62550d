from __future__ import annotations

from dtrain.planners.memory import DeviceParts, memory_need, memory_warnings

GIB = 2**30
PARTS = DeviceParts(
    weights_bytes=GIB,
    gradients_bytes=GIB,
    optimizer_bytes=2 * GIB,
    casts_bytes=0,
    gathered_bytes=0,
    activations_bytes=GIB,
)


def test_on_a_cpu_the_model_is_in_host_memory() -> None:
    need = memory_need(
        parts=PARTS,
        shard_bytes=GIB,
        workers_per_node=2,
        device_limit_bytes=None,
        host_limit_bytes=16 * GIB,
        shm_free_bytes=6 * GIB,
    )
    assert need.device_bytes_per_rank == 5 * GIB
    assert need.slot_bytes_per_node == 6 * GIB
    assert need.host_bytes_per_node == 16 * GIB
    assert (need.device_fits, need.host_fits, need.slots_fit) == (None, True, True)
    assert memory_warnings(need) == []


def test_what_does_not_fit_is_said_with_figures_and_a_remedy() -> None:
    need = memory_need(
        parts=PARTS,
        shard_bytes=4 * GIB,
        workers_per_node=8,
        device_limit_bytes=5 * GIB,
        host_limit_bytes=64 * GIB,
        shm_free_bytes=32 * GIB,
    )
    assert (need.device_fits, need.host_fits, need.slots_fit) == (False, False, False)
    device, host, slots = memory_warnings(need)
    assert "5 GiB" in device
    assert "dp_shard, tp or pp" in device
    assert "96 GiB" in host
    assert "32 GiB" in slots
    assert "--shm-size" in slots


def test_unknown_sizes_and_limits_are_not_judged() -> None:
    need = memory_need(
        parts=None,
        shard_bytes=None,
        workers_per_node=8,
        device_limit_bytes=None,
        host_limit_bytes=None,
        shm_free_bytes=None,
    )
    assert (need.device_bytes_per_rank, need.host_bytes_per_node) == (None, None)
    assert (need.device_fits, need.host_fits, need.slots_fit) == (None, None, None)
    assert memory_warnings(need) == []


def test_a_limit_of_nothing_is_a_limit() -> None:
    need = memory_need(
        parts=PARTS,
        shard_bytes=GIB,
        workers_per_node=1,
        device_limit_bytes=0,
        host_limit_bytes=0,
        shm_free_bytes=0,
    )
    assert len(memory_warnings(need)) == 3
