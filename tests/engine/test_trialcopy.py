"""The copy that a profile times is the one that a run makes: the same pieces, in the same number of turns."""

from __future__ import annotations

import ctypes

import pytest
from tests.engine.build import content, gpt, job_spec, state_of, update

from dtrain.engine.models.gpt import Gpt
from dtrain.engine.profile import measure, profile
from dtrain.engine.snapshot.state import infos
from dtrain.engine.snapshot.trialcopy import trial
from dtrain.planners.sharding.layout import largest_shard, layout_of
from dtrain.planners.sizes import count_sizes


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_shard_of_a_rank_is_copied_in_as_many_turns_as_the_plan_counts(world: int) -> None:
    batch = {"global_batch_size": 24, "micro_batch_size": 4}
    spec = job_spec(model=gpt(d_model=128, n_heads=4), training=batch, cluster={"workers_per_node": world})
    state = state_of(Gpt(gpt(d_model=128, n_heads=4)))
    update(state, 1)
    parameters = infos({name: parameter.detach() for name, parameter in state.model.named_parameters()})
    pieces, sizes = largest_shard(layout_of(spec, parameters)), count_sizes(spec, parameters)
    assert sizes is not None
    with trial(state.model, state.optimizer, pieces, spec.micro_batches, 0.1, 0.2) as copy:
        assert copy is not None
        copy.begin()
        assert len(copy.live.items) == sizes.shard_items > 5
        copy.copier.grant(copy.pace.forward_bytes)
        assert copy.finish() > 0
        stored = content(state)
        begin = 0
        for piece in pieces:
            copied = ctypes.string_at(copy.base + begin, piece.nbytes)
            assert copied == stored[piece.tensor.name][piece.offset_bytes :][: piece.nbytes], piece.tensor.name
            begin += piece.nbytes


def test_a_profile_times_the_channel_with_all_that_the_copier_does() -> None:
    parameters, cuts, seen = measure(job_spec(), (), "")
    assert cuts is None
    assert len(parameters) == 6
    assert seen.channel_bytes_per_s is not None
    assert min(seen.forward_s, seen.backward_s, seen.optimizer_s, seen.channel_bytes_per_s) > 0
    assert measure(job_spec(tiers=[]), (), "")[2].channel_bytes_per_s is None, "nothing is stored"


@pytest.mark.parametrize(
    ("strategy", "spread"),
    [({}, False), ({"dp_shard": 2}, True), ({"tp": 2}, True), ({"pp": 2}, False)],
    ids=["replicas", "dp_shard", "tp", "pp"],
)
def test_the_workers_of_a_node_are_profiled_together_as_the_strategy_spreads_them(
    strategy: dict[str, int], spread: bool
) -> None:
    """Two processes: a rank that made another pass than the other would wait for it for ever."""
    spec = job_spec(
        model=gpt(d_model=32, n_heads=4, vocab_size=256),
        dataset={"type": "text", "path": __file__, "tokenizer": "bytes", "seq_len": 16},
        training={"global_batch_size": 32, "micro_batch_size": 2},
        strategy=strategy,
        cluster={"device": "cpu", "workers_per_node": 2},
    )
    parameters, _, seen = profile(spec, ())
    assert sum(len(info.shape) for info in parameters) > len(parameters) > 5
    assert seen.spread is spread
    assert (seen.exchange_s is None) is ("pp" in strategy)
    assert min(seen.forward_s, seen.backward_s, seen.optimizer_s) > 0
    assert seen.channel_bytes_per_s
