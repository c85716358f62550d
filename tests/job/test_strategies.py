"""Every way to spread a model over four workers: killed and resumed bit for bit, and resumed as any other."""

import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job.dtrain import Job, assert_same, cleaned

from dtrain.specs.errors import SpecError
from dtrain.specs.load import load_spec
from dtrain.tiers.faults import fail_at
from dtrain.tiers.format.jsonfile import read

SPEC = """
name: spread
output_dir: {output_dir}
seed: 7
max_steps: {steps}
model: {{type: gpt, n_layers: 4, d_model: 32, n_heads: 4, n_kv_heads: 4}}
dataset: {{type: text, path: {text}, seq_len: 32}}
training:
  global_batch_size: 8
  micro_batch_size: 2
  max_grad_norm: 1.0
  optimizer: {{name: adamw, lr: 3e-3}}
cluster: {{workers_per_node: 4, device: cpu}}
tiers:
  - {{type: memory, every: 1}}
  - {{type: disk, every: 2}}
"""
STEPS = 5
STRATEGIES = {
    "ddp": [],
    "fsdp": ["strategy.dp_shard=4"],
    "hybrid": ["strategy.dp_shard=2"],
    "tensor": ["strategy.tp=4"],
    "tensor and fsdp": ["strategy.tp=2", "strategy.dp_shard=2"],
    "tensor and replicas, tied": ["strategy.tp=2", "model.tie_embeddings=true"],
    "pipeline": ["strategy.pp=4", "strategy.pp_schedule=gpipe"],
    "pipeline and fsdp, recomputed": ["strategy.pp=2", "strategy.dp_shard=2", "strategy.activation_checkpointing=full"],
    "pipeline and replicas, interleaved": ["strategy.pp=2", "strategy.pp_schedule=interleaved-1f1b"],
    "pipeline and fsdp, tied": ["strategy.pp=2", "strategy.dp_shard=2", "model.tie_embeddings=true"],
    "pipeline and tensor, tied": ["strategy.pp=2", "strategy.tp=2", "model.tie_embeddings=true"],
    "pipeline of four, tied": ["strategy.pp=4", "model.tie_embeddings=true"],
    "pipeline and tensor": ["strategy.pp=2", "strategy.tp=2"],
}
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp")
MOST_WORKERS = 4
Product = tuple[int, ...]


def products() -> Iterator[Product]:
    """Every product of degrees that so many workers can make."""
    for product in itertools.product(range(1, MOST_WORKERS + 1), repeat=len(DEGREES)):
        if math.prod(product) <= MOST_WORKERS:
            yield product


def degrees_of(words: list[str]) -> Product:
    """What a way to spread the model comes to; replicas are all workers that the other degrees leave."""
    given = dict(word.split("=", 1) for word in words)
    workers = int(given.get("cluster.workers_per_node", MOST_WORKERS))
    cuts = [int(given.get(f"strategy.{degree}", 1)) for degree in DEGREES[1:]]
    return workers // math.prod(cuts), *cuts


def words_of(product: Product) -> list[str]:
    """Three workers with samples of their own need a batch that they can divide."""
    batch = ["training.global_batch_size=12"] * (product[0] * product[1] == 3)
    cuts = [f"strategy.{degree}={size}" for degree, size in zip(DEGREES, product, strict=True)]
    return [f"cluster.workers_per_node={math.prod(product)}", *cuts, *batch]


def is_accepted(product: Product) -> bool:
    """Tell whether the spec takes a product: three workers cannot divide four heads."""
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder) / "spec.yaml"
        spec.write_text(SPEC.format(output_dir="runs/spread", steps=STEPS, text="python:stdlib"))
        try:
            load_spec(str(spec), words_of(product))
        except SpecError:
            return False
    return True


STRATEGIES |= {
    " ".join(f"{degree} {size}" for degree, size in zip(DEGREES, product, strict=True)): words_of(product)
    for product in products()
    if product not in set(map(degrees_of, STRATEGIES.values())) and is_accepted(product)
}
USUAL = {"pipeline and replicas, interleaved"}
"""All others run with `make campaigns`, and are in the chain."""
CHAIN = ["fsdp", "tensor", "pipeline", "tensor and fsdp", "ddp", "pipeline and tensor", "hybrid"]
TIED = ["pipeline and fsdp, tied", "tensor and replicas, tied", "pipeline of four, tied", "tensor and fsdp", "ddp"]
BACK = [
    f"strategy.{key}" for key in ("dp_shard=1", "tp=1", "pp=1", "pp_schedule=1f1b", "activation_checkpointing=none")
]
TOLERANCE = 1e-5
"""Relative, of a loss against that of one worker: float32 sums in another order, a handful of steps."""


def made(folder: Path) -> Job:
    job = Job(folder)
    job.extra["OMP_NUM_THREADS"] = "1"
    job.write_spec(SPEC, STEPS)
    return job


@pytest.fixture
def spread(tmp_path: Path) -> Iterator[tuple[Job, Job]]:
    """The same job twice."""
    first, second = made(tmp_path / "unbroken"), made(tmp_path / "job")
    with cleaned(first), cleaned(second):
        yield first, second


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[bool, dict[int, float]]]:
    """The losses of one worker, with a head of its own and with a tied one."""
    losses = {}
    for tied in (False, True):
        job = made(tmp_path_factory.mktemp("alone") / "job")
        with cleaned(job):
            words = ["cluster.workers_per_node=1", "tiers=[]", f"model.tie_embeddings={str(tied).lower()}"]
            ended = job.do("run", "spec.yaml", "max_steps=10", *words)
            assert ended.code == 0, ended.said
            losses[tied] = job.losses()
    yield losses


def assert_close(job: Job, losses: dict[int, float]) -> None:
    for step, loss in job.losses().items():
        assert math.isclose(loss, losses[step], rel_tol=TOLERANCE), (step, loss, losses[step])


def shards_of(job: Job) -> int:
    """Bytes of the largest shard of the last checkpoint, without random states: what the plan says of it."""
    manifest = read(sorted((job.run.root / "checkpoints").iterdir())[-1] / "manifest.json")
    stored: dict[str, int] = {}
    for info in manifest["tensors"].values():
        for piece in info["pieces"]:
            stored[piece["file"]] = stored.get(piece["file"], 0) + 4 * math.prod(piece["shape"])
    return max(stored.values())


def test_no_product_that_four_workers_can_make_is_left_out() -> None:
    refused = [product for product in products() if not is_accepted(product)]
    assert refused == [(1, 1, 3, 1)]
    assert set(map(degrees_of, STRATEGIES.values())) == set(products()) - set(refused)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.campaign] * (n not in USUAL)) for n in STRATEGIES])
def test_killed_and_resumed_it_is_the_unbroken_run_and_agrees_with_one_worker(
    name: str, spread: tuple[Job, Job], alone: dict[bool, dict[int, float]]
) -> None:
    unbroken, job = spread
    words = STRATEGIES[name]
    ended = unbroken.do("run", "spec.yaml", *words)
    assert ended.code == 0, ended.said
    if not any(word.startswith("training.global_batch_size=") for word in words):
        assert_close(unbroken, alone["model.tie_embeddings=true" in words])
    assert shards_of(unbroken) == read(unbroken.run.plan)["model"]["state_bytes_per_rank"]
    last = math.prod(degrees_of(words)) - 1
    ended = job.do("run", "spec.yaml", *words, fault=fail_at(min(1, last), 4, "window.backward"))
    assert ended.code == 0, ended.said
    assert_same(job, unbroken)
    (restored,) = job.events("restored")
    assert restored["step"] in (2, 3), "at most two steps are repeated"
    verified = job.do("verify", str(job.run.root))
    assert verified.code == 0, verified.said
    job.assert_nothing_left()


@pytest.mark.campaign
def test_saved_by_any_it_is_resumed_by_any_other(tmp_path: Path, alone: dict[bool, dict[int, float]]) -> None:
    job = made(tmp_path / "job")
    with cleaned(job):
        ended = job.do("run", "spec.yaml", "max_steps=2")
        assert ended.code == 0, ended.said
        for steps, name in enumerate(CHAIN, 3):
            ended = job.do("resume", "--from", "latest", "run", f"max_steps={steps}", *BACK, *STRATEGIES[name])
            assert ended.code == 0, (name, ended.said)
        assert_close(job, alone[False])
        stored = [event["state_digest"] for event in job.events("finished")]
        loaded = [event["state_digest"] for event in job.events("restored")]
        assert loaded == stored[:-1]
        assert len(set(stored)) == len(CHAIN) + 1
        job.assert_nothing_left()


def test_row_64_row_71_row_73_saved_by_any_with_a_tied_embedding_it_is_resumed_by_any_other(
    tmp_path: Path, alone: dict[bool, dict[int, float]]
) -> None:
    """With two copies in a pipeline, cut by FSDP2 or by tp or not, or one matrix, it is the same state, stored once."""
    job = made(tmp_path / "job")
    with cleaned(job):
        ended = job.do("run", "spec.yaml", "max_steps=2", "model.tie_embeddings=true")
        assert ended.code == 0, ended.said
        for steps, name in enumerate(TIED, 3):
            ended = job.do("resume", "--from", "latest", "run", f"max_steps={steps}", *BACK, *STRATEGIES[name])
            assert ended.code == 0, (name, ended.said)
        assert_close(job, alone[True])
        stored = [event["state_digest"] for event in job.events("finished")]
        assert [event["state_digest"] for event in job.events("restored")] == stored[:-1]
        assert len(set(stored)) == len(TIED) + 1
        for checkpoint in (job.run.root / "checkpoints").glob("step-*"):
            manifest = read(checkpoint / "manifest.json")
            assert manifest["ties"] == {"model.head.weight": "model.embedding.weight"}
            assert "model.head.weight" not in manifest["tensors"]
        job.assert_nothing_left()


@pytest.mark.campaign
@pytest.mark.parametrize(
    "words",
    [
        ["training.precision=fp16-mixed", "strategy.dp_shard=4"],
        ["training.precision=fp16-mixed", *STRATEGIES["pipeline and fsdp, tied"]],
        ["training.precision=bf16", *STRATEGIES["pipeline and tensor, tied"]],
        ["strategy.compile=true", "strategy.dp_shard=2"],
        ["strategy.activation_checkpointing=full", *STRATEGIES["pipeline and replicas, interleaved"]],
    ],
)
def test_row_57_row_70_in_other_precisions_compiled_or_recomputed_it_is_the_unbroken_run(
    words: list[str], spread: tuple[Job, Job]
) -> None:
    unbroken, job = spread
    for ours, fault in ((unbroken, ""), (job, fail_at(1, 4, "window.backward"))):
        ended = ours.do("run", "spec.yaml", *words, fault=fault)
        assert ended.code == 0, ended.said
    assert_same(job, unbroken)
    manifests = [read(sorted((it.run.root / "checkpoints").iterdir())[-1] / "manifest.json") for it in spread]
    assert manifests[0].get("loss_scale") == manifests[1].get("loss_scale")
    assert not [name for name in manifests[0]["tensors"] if "_orig_mod" in name or "module." in name]
    job.assert_nothing_left()


@pytest.mark.campaign
def test_bf16_weights_and_their_copies_are_cut_killed_and_resumed_alike(
    spread: tuple[Job, Job], alone: dict[bool, dict[int, float]]
) -> None:
    """Weights, fp32 copies, moments and averages, by tensor parallel with FSDP2, then in a pipeline, then by DDP."""
    unbroken, job = spread
    for ours, fault in ((unbroken, ""), (job, fail_at(1, 4, "window.backward"))):
        words = ["training.precision=bf16", "training.ema_decay=0.9", *STRATEGIES["tensor and fsdp"]]
        ended = ours.do("run", "spec.yaml", *words, fault=fault)
        assert ended.code == 0, ended.said
    assert_same(job, unbroken)
    for steps, name in enumerate(("pipeline and replicas, interleaved", "pipeline and tensor", "ddp"), STEPS + 1):
        ended = job.do("resume", "run", f"max_steps={steps}", *BACK, *STRATEGIES[name])
        assert ended.code == 0, (name, ended.said)
    for step, loss in job.losses().items():
        assert math.isclose(loss, alone[False][step], rel_tol=1e-2), (step, loss, alone[False][step])
    stored = [event["state_digest"] for event in job.events("finished")]
    loaded = [event["state_digest"] for event in job.events("restored")]
    assert loaded[1:] == stored[:-1]
    job.assert_nothing_left()


@pytest.mark.parametrize(
    "words",
    [
        ["strategy.pp=2", "strategy.dp_shard=2"],
        pytest.param(["strategy.pp=2", "strategy.pp_schedule=interleaved-1f1b"], marks=pytest.mark.campaign),
        pytest.param(["strategy.pp=2", "strategy.tp=2"], marks=pytest.mark.campaign),
    ],
)
def test_an_evaluation_goes_through_a_pipeline_and_training_does_not_notice(
    words: list[str], spread: tuple[Job, Job]
) -> None:
    """Five batches for the groups of ranks: one of them goes through for nothing."""
    one, job = spread
    evaluation = "evaluation={every: 2, batches: 5, fraction: 0.1}"
    ended = one.do("run", "spec.yaml", evaluation, "cluster.workers_per_node=1", "tiers=[]")
    assert ended.code == 0, ended.said
    ended = job.do("run", "spec.yaml", evaluation, *words, fault=fail_at(1, 4, "window.backward"))
    assert ended.code == 0, ended.said
    assert_close(job, one.losses())
    judged = [{line["step"]: line["loss"] for line in it.events("evaluated")} for it in (one, job)]
    assert sorted(judged[0]) == [2, 4, 5]
    for step, loss in judged[0].items():
        assert math.isclose(judged[1][step], loss, rel_tol=TOLERANCE)
    job.assert_nothing_left()
