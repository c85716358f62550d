"""What single keys cannot show: arithmetic over several keys, with the numbers and the nearest that work."""

import pytest
from tests.specs.build import Desk, changed

GPT = "{type: gpt, n_layers: 2, d_model: 64, n_heads: 4}"


def gpt(rest: str) -> tuple[str, str]:
    return GPT, f"{{type: gpt, n_layers: 2, {rest}}}"


TIERS = "  - {type: memory, every: 1}\n  - {type: disk, every: 5, keep: 3}\n"

PEER = "  - {type: memory, every: 2}\n  - {type: peer, replicas: 1}\n  - {type: disk, every: 6}\n"

CONTRADICTIONS: dict[str, tuple[tuple[str, str], str, str, str]] = {
    # change, key, message, hint
    "as many replicas as nodes": (
        (TIERS, PEER.replace("replicas: 1", "replicas: 2")), "tiers[1].replicas",
        "2 other nodes are to get a copy, and the job has 2 nodes, so 1 other", "use 1 or less, or more nodes",
    ),
    "peers without snapshots": (
        (TIERS, "  - {type: peer}\n  - {type: disk}\n"), "tiers[0].type", "there is no `memory` tier",
        "put {type: memory} before it",
    ),
    "copies of steps without snapshots": (
        (TIERS, PEER.replace("replicas: 1", "every: 3")), "tiers[1].every",
        "filled from snapshots in memory, every 2 steps; 3 is no multiple of 2", "use 2 or 4",
    ),
    "batch": (
        ("global_batch_size: 32", "global_batch_size: 72"), "training.global_batch_size",
        "72 is not a multiple of micro_batch_size * nodes * workers_per_node = 4 * 2 * 2 = 16",
        "use 64 or 80, or micro_batch_size 3",
    ),
    "small batch": (
        ("global_batch_size: 32", "global_batch_size: 8"), "training.global_batch_size",
        "8 is not a multiple of", "use 16 or more, or micro_batch_size 2",
    ),
    "tiny batch": (
        ("global_batch_size: 32", "global_batch_size: 3"), "training.global_batch_size", "3 is not", "use 16 or more",
    ),
    "degrees": (
        ("name: t", "strategy: {dp_replicate: 3}"), "strategy.dp_replicate",
        "dp_replicate * dp_shard * tp * pp = 3 * 1 * 1 * 1 = 3, but nodes * workers_per_node = 2 * 2 = 4",
        "set it to 4, or leave it out",
    ),
    "degrees that leave none": (
        ("name: t", "strategy: {dp_replicate: 2, tp: 4}"), "strategy.dp_replicate",
        "2 * 1 * 4 * 1 = 8, but nodes * workers_per_node = 2 * 2 = 4", "set it to 1, or leave it out",
    ),
    "degrees that do not divide": (
        ("name: t", "strategy: {dp_shard: 3}"), "strategy.dp_shard",
        "dp_shard * tp * pp = 3 * 1 * 1 = 3 does not divide nodes * workers_per_node = 2 * 2 = 4", "one of 1, 2, 4",
    ),
    "heads over tp": (
        (GPT, "{type: gpt, n_layers: 2, d_model: 64, n_heads: 2}\nstrategy: {tp: 4}"), "model.n_heads",
        "model.n_heads = 2 is not divisible by strategy.tp = 4", "use n_heads 4, or a tp of 1 or 2",
    ),
    "groups over tp": (
        (GPT, "{type: gpt, n_layers: 2, d_model: 64, n_heads: 4, n_kv_heads: 2}\nstrategy: {tp: 4}"),
        "model.n_kv_heads", "model.n_kv_heads = 2 is not divisible by strategy.tp = 4", "a tp of 1 or 2",
    ),
    "vocabulary over tp": (
        (GPT, "{type: gpt, n_layers: 2, d_model: 64, n_heads: 4, vocab_size: 257}\nstrategy: {tp: 2}"),
        "model.vocab_size", "model.vocab_size = 257 is not divisible by strategy.tp = 2", "use vocab_size 258",
    ),
    "tp of one's own model": (
        (GPT, '{type: python, entry: "a:b"}\nstrategy: {tp: 2}'), "strategy.tp",
        "tensor parallel needs to be told how a model of type `python` is cut", "set model.plan: module:callable",
    ),
    "more stages than layers": (
        ("name: t", "strategy: {pp: 4}"), "strategy.pp", "4 stages need as many layers, and model.n_layers is 2",
        "fewer stages",
    ),
    "stages of one schedule": (
        ("name: t", "strategy: {pp: 2, pp_stages_per_rank: 2}"), "strategy.pp_stages_per_rank",
        "the schedule 1f1b has one stage on each worker", "interleaved-1f1b",
    ),
    "no pipeline": (
        ("name: t", "strategy: {pp_schedule: gpipe}"), "strategy.pp_schedule", "no pipeline with pp: 1", "remove it",
    ),
    "evaluation over stages": (
        ("name: t", "strategy: {pp: 2}\nevaluation: {every: 5, dataset: {type: text, path: x, seq_len: 16}}"),
        "evaluation.dataset.seq_len", "a pipeline is made for one length of samples, and dataset.seq_len is 32",
        "use 32",
    ),
    "data without a length": (
        ('dataset: {type: text, path: "python:stdlib", seq_len: 32}',
         'dataset: {type: python, entry: "a:b"}\nstrategy: {pp: 2}'),
        "strategy.pp", "must know the length of the samples", "type text",
    ),
    "heads": (gpt("d_model: 100, n_heads: 8"), "model.d_model", "100 is not divisible by n_heads = 8", "96 or 112"),
    "narrow": (gpt("d_model: 4, n_heads: 8"), "model.d_model", "4 is not divisible by n_heads = 8", "use d_model 16"),
    "odd head": (gpt("d_model: 60, n_heads: 4"), "model.d_model", "64"[:0] + "60 / 4 = 15 is odd", "56 or 64"),
    "groups": (
        gpt("d_model: 96, n_heads: 6, n_kv_heads: 4"), "model.n_kv_heads",
        "n_heads = 6 is not divisible by n_kv_heads = 4", "use one of 1, 2, 3, 6",
    ),
    "vocabulary": (
        gpt("d_model: 64, n_heads: 4, vocab_size: 255"), "model.vocab_size", "tokens 0 to 255", "use 256 or more",
    ),
    "warm-up": (
        ("warmup_steps: 5", "warmup_steps: 41"), "training.scheduler.warmup_steps",
        "the warm-up of 41 steps is longer than the run (max_steps = 40)", "use 40 or less",
    ),
    "two of a type": (
        (TIERS, TIERS + "  - {type: disk, path: b}\n"), "tiers[2].type",
        "a second `disk` tier (the first is tiers[1])", "at most once",
    ),
    "order": (
        (TIERS, "  - {type: disk, every: 5}\n  - {type: memory, every: 1}\n"), "tiers[1].type",
        "the `memory` tier stands behind a slower one (`disk`)", "memory, peer, disk",
    ),
    "intervals": (
        ("every: 1}", "every: 2}"), "tiers[1].every",
        "the disk is filled from snapshots in memory, every 2 steps; 5 is no multiple of 2", "use 4 or 6",
    ),
    "interval below": (
        ("every: 1}", "every: 10}"), "tiers[1].every", "every 10 steps; 5 is no multiple of 10", "use 10",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_shown_with_its_numbers(desk: Desk, name: str) -> None:
    change, key, message, hint = CONTRADICTIONS[name]
    problem = desk.problem(changed(change))
    assert problem.key == key
    assert message in problem.message
    assert hint in (problem.hint or "")
    assert problem.line is not None


@pytest.mark.parametrize(
    "change",
    [
        ("name: t", "strategy: {dp_replicate: 4}"),
        ("name: t", "strategy: {dp_replicate: ~}"),
        ("name: t", "strategy: {dp_shard: 2}"),
        ("name: t", "strategy: {dp_shard: 2, tp: 2}"),
        ("name: t", "strategy: {tp: 4}"),
        ("name: t", "strategy: {pp: 2, activation_checkpointing: full, compile: true}"),
        gpt("d_model: 64, n_heads: 4, n_kv_heads: 2"),
        gpt("d_model: 64, n_heads: 4, n_kv_heads: ~"),
        ("warmup_steps: 5", "warmup_steps: 40"),
        (TIERS, "  []\n"),
        (TIERS, "  - {type: memory}\n"),
        (TIERS, "  - {type: disk}\n"),
        ("every: 1}", "every: auto}"),
        ("every: 5", "every: auto"),
        ("every: 1}", "every: 5}"),
        ("seq_len: 32", "seq_len: 1"),
        ('{type: text, path: "python:stdlib", seq_len: 32}', '{type: python, entry: "a:b"}'),
        (GPT, '{type: python, entry: "a:b"}'),
    ],
)
def test_what_fits_together_is_accepted(desk: Desk, change: tuple[str, str]) -> None:
    desk.load(changed(change))


@pytest.mark.parametrize(
    ("strategy", "batch", "message"),
    [
        ("tp: 2", 30, "30 is not a multiple of micro_batch_size * dp_replicate * dp_shard = 4 * 2 = 8"),
        ("pp: 2", 8, "1 micro-batches, and the schedule 1f1b over pp = 2 stages needs 2 or more"),
        ("pp: 2, pp_schedule: interleaved-1f1b", 24, "needs a multiple of pp = 2"),
    ],
)
def test_the_batch_is_divided_over_the_ranks_that_see_different_samples(
    desk: Desk, strategy: str, batch: int, message: str
) -> None:
    text = changed(("name: t", f"strategy: {{{strategy}}}"), ("n_layers: 2", "n_layers: 4"))
    problem = desk.problem(text.replace("global_batch_size: 32", f"global_batch_size: {batch}"))
    assert problem.key == "training.global_batch_size"
    assert message in problem.message


def test_the_vocabulary_of_your_own_data_is_yours(desk: Desk) -> None:
    desk.load(
        changed(
            gpt("d_model: 64, n_heads: 4, vocab_size: 16"),
            ('{type: text, path: "python:stdlib", seq_len: 32}', '{type: python, entry: "a:b"}'),
        )
    )


def test_contradictions_show_beside_other_faults(desk: Desk) -> None:
    problems = desk.problems(
        changed(
            ("global_batch_size: 32", "global_batch_size: 33"),
            ("lr: 1e-3", "lr: fast"),
            ("device: cpu", "device: tpu"),
            ("keep: 3", "keep: 0"),
            ("every: 1}", "every: 2}"),
            ("warmup_steps: 5", "warmup_steps: 50, x: 1"),
        )
    )
    assert {problem.key for problem in problems} == {
        "training.global_batch_size", "training.optimizer.lr", "cluster.device", "tiers[1].keep", "tiers[1].every",
        "training.scheduler.warmup_steps", "training.scheduler.x",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        (("micro_batch_size: 4", "micro_batch_size: x"), {"training.micro_batch_size"}),
        (("nodes: 2", "nodes: '3'"), {"cluster.nodes"}),
        (("cluster: {nodes: 2, workers_per_node: 2, device: cpu}", "cluster: 3"), {"cluster"}),
        (("tiers:\n" + TIERS, "tiers: 3\n"), {"tiers"}),
        (("tiers:\n" + TIERS, "tiers: 3\ntiers: 4\n"), {"tiers"}),
        (("max_steps: 40\n", ""), {"max_steps"}),
    ],
)
def test_a_faulty_key_brings_no_second_fault(desk: Desk, change: tuple[str, str], keys: set[str]) -> None:
    assert {problem.key for problem in desk.problems(changed(change))} == keys
