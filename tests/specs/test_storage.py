"""The tiers that the drainer fills: which keys and addresses they take, and that no report shows a credential."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.specs.build import BASE, Desk, changed

from dtrain.specs.load import spec_from_json, spec_to_json
from dtrain.specs.places import DiskTier, ObjectTier
from dtrain.specs.schema import json_schema
from dtrain.specs.secrets import is_secret, masked

TIERS = "  - {type: memory, every: 1}\n  - {type: disk, every: 5, keep: 3}\n"


def with_tiers(*tiers: str) -> str:
    return changed((TIERS, "".join(f"  - {tier}\n" for tier in tiers)))


def bucket(rest: str = "", url: str = "s3://b/r") -> str:
    return with_tiers("{type: memory}", "{type: disk, every: 5}", f'{{type: object, url: "{url}"{rest}}}')


def test_every_key_of_a_slow_tier_is_read_and_stored(desk: Desk) -> None:
    spec = desk.load(
        with_tiers(
            "{type: disk, every: 5, keep: 2, keep_every: 20, when_slow: skip, on_failure: stop, commit: manifest}",
            "{type: object, url: 's3://b/r', every: 10, keep_every: 20, when_slow: wait, region: eu-west-1,"
            " endpoint: 'http://minio:9000'}",
        )
    )
    assert spec.slow_tiers == [
        DiskTier(type="disk", every=5, keep=2, keep_every=20, when_slow="skip", on_failure="stop", commit="manifest"),
        ObjectTier(
            type="object", url="s3://b/r", every=10, keep_every=20, when_slow="wait", region="eu-west-1",
            endpoint="http://minio:9000",
        ),
    ]  # fmt: skip
    assert spec_from_json(spec_to_json(spec)) == spec


def test_what_is_left_out_has_a_default(desk: Desk) -> None:
    tier = desk.load(with_tiers("{type: object, url: 's3://b'}")).object_tier
    assert tier == ObjectTier(
        type="object", url="s3://b", every="auto", keep=3, keep_every=None, when_slow="auto", on_failure="continue"
    )


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket",
        "s3://bucket/",
        "s3://bucket/a/b",
        "gs://b/run-1",
        "az://container/x",
        "file:///mnt/b",
        "file:///a",
    ],
)
def test_an_address_of_a_store_is_taken(desk: Desk, url: str) -> None:
    tier = desk.load(bucket(url=url)).object_tier
    assert tier is not None
    assert tier.url == url


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s3:///folder", "name the bucket behind `s3://`"),
        ("s3://", "name the bucket"),
        ("file:///", "name the folder"),
        ("file://data/x", "three slashes and an absolute path: `file:///data/x`"),
        ("file://./x", "three slashes"),
        ("file:/data/x", "for a folder write `file:///data/x`"),
        ("/data/x", "for a folder write `file:///data/x`, or use a tier of `type: disk`"),
        ("./x", "a tier of `type: disk`"),
        ("bucket/run", "with the kind of store: `s3://bucket/run`"),
        ("gs:/bucket/run", "with the kind of store: `gs://bucket/run`"),
        ("s3a://bucket/run", "dtrain calls it `s3://`"),
        ("gcs://bucket/run", "dtrain calls it `gs://`"),
        ("abfss://container/run", "dtrain calls it `az://`"),
        ("S3://bucket/run", "dtrain calls it `s3://`"),
        ("hdfs://host/run", "mounting them: `file:///folder`"),
        ("https://b.s3.amazonaws.com/run", "write it as `s3://bucket/folder`"),
        ("https://storage.googleapis.com/b", "write it as `gs://bucket/folder`"),
        ("http://minio:9000/b", "the address of a store of your own is the key `endpoint`"),
        ("s3://b/a b", "a space"),
        ("s3://b/a#1", "`#`"),
        ("", "s3://bucket/folder"),
    ],
)
def test_another_address_is_refused_with_the_one_that_is_meant(desk: Desk, url: str, hint: str) -> None:
    problem = desk.problem(bucket(url=url))
    assert problem.key == "tiers[2].url"
    assert "must be `s3://bucket/folder`, `gs://bucket/folder`" in problem.message
    assert hint in (problem.hint or "")


@pytest.mark.parametrize(
    ("rest", "url", "key"),
    [
        ("", "s3://AKIAX:hunter22@bucket/r", "tiers[2].url"),
        ("", "s3://hunter22@bucket/r", "tiers[2].url"),
        ("", "az://c/r?sv=1&sig=hunter22", "tiers[2].url"),
        ("", "https://u:hunter22@minio:9000/b", "tiers[2].url"),
        (', endpoint: "https://u:hunter22@minio:9000"', "s3://b/r", "tiers[2].endpoint"),
        (', endpoint: "https://minio:9000/?key=hunter22"', "s3://b/r", "tiers[2].endpoint"),
        (", secret_key: hunter22", "s3://b/r", "tiers[2].secret_key"),
        (", aws_secret_access_key: 'hunter22'", "s3://b/r", "tiers[2].aws_secret_access_key"),
        (", token: {value: hunter22}", "s3://b/r", "tiers[2].token"),
    ],
)
def test_credentials_are_refused_told_where_they_belong_and_shown_nowhere(
    desk: Desk, rest: str, url: str, key: str
) -> None:
    problem = desk.problem(bucket(rest, url))
    assert problem.key == key
    assert "credentials" in (problem.hint or "")
    assert "the environment (AWS_ACCESS_KEY_ID" in (problem.hint or "")
    assert "hunter22" not in f"{problem} {problem.value}"


@pytest.mark.parametrize(
    "override",
    [
        'tiers=[{type: object, url: "s3://k:hunter22@b"}]',
        "tiers[1].secret_key=hunter22",
        'tiers=[{type: object, url: "s3://b", secret_access_key: hunter22}]',
        "tiers=[{type: object, url: s3://b, password: hunter22}, 3]",
        "tiers={type: object, token: hunter22}",
    ],
)
def test_credentials_on_the_command_line_are_shown_nowhere(desk: Desk, override: str) -> None:
    problems = desk.problems(BASE, override)
    assert "hunter22" not in "\n".join(f"{problem} {problem.value} {problem.file}" for problem in problems)


def test_keys_that_only_sound_secret_are_shown() -> None:
    assert not any(map(is_secret, ("tokenizer", "keep_every", "max_tokens", "n_kv_heads", "key", "tokens")))
    for text in ("tokenizer: bytes", "path: a@b", "s3://bucket/run", "https://host:9000/x", "kwargs: {monkey: 1}"):
        assert masked(text) == text


@pytest.mark.parametrize(
    ("tiers", "key", "message", "hint"),
    [
        (["{type: disk, every: 5}", "{type: object, url: 's3://b', every: 12}"], "tiers[1].every",
         "the object store is filled from checkpoints on disk, every 5 steps; 12 is no multiple of 5", "use 10 or 15"),
        (["{type: disk, every: 5}", "{type: object, url: 's3://b', every: 3}"], "tiers[1].every", "no multiple",
         "use 5"),
        (["{type: memory, every: 4}", "{type: object, url: 's3://b', every: 6}"], "tiers[1].every",
         "the object store is filled from snapshots in memory, every 4 steps", "use 4 or 8"),
        (["{type: memory, every: 4}", "{type: disk}", "{type: object, url: 's3://b', every: 6}"], "tiers[2].every",
         "every 4 steps; 6 is no multiple of 4", "use 4 or 8"),
        (["{type: disk, every: 5, keep_every: 12}"], "tiers[0].keep_every",
         "checkpoints are made here every 5 steps, so 12 would keep other steps than it says", "use 10 or 15"),
        (["{type: disk, every: 50, keep_every: 20}"], "tiers[0].keep_every", "every 50 steps", "use 50"),
        (["{type: memory, every: 4}", "{type: disk, keep_every: 10}"], "tiers[1].keep_every",
         "there are snapshots in memory every 4 steps, so 10", "use 8 or 12"),
        (["{type: disk, every: 5}", "{type: object, url: 's3://b', every: 10, keep_every: 15}"], "tiers[1].keep_every",
         "checkpoints are made here every 10 steps", "use 10 or 20"),
        (["{type: object, url: 's3://b'}", "{type: disk}"], "tiers[1].type",
         "the `disk` tier stands behind a slower one (`object`)", "memory, peer, disk, object"),
        (["{type: object, url: 's3://b'}", "{type: object, url: 's3://c'}"], "tiers[1].type",
         "a second `object` tier", "at most once"),
        (["{type: object}"], "tiers[0].url", "missing: this key is required", 'url: "s3://bucket/my-run"'),
        (["{type: object, path: x, url: 's3://b'}"], "tiers[0].path", "unknown key", "belongs to type `disk`"),
        (["{type: disk, url: 's3://b'}"], "tiers[0].url", "unknown key", "belongs to type `object`, not `disk`"),
        (["{type: object, url: 'gs://b', region: eu}"], "tiers[0].region", "only stores of s3:// take this",
         "remove"),
        (["{type: object, url: 'gs://b', endpoint: 'http://x'}"], "tiers[0].endpoint",
         "only stores of s3:// and az:// take this key, and the url is gs://", "remove"),
        (["{type: object, url: 'file:///b', region: eu}"], "tiers[0].region", "the url is file://", "remove"),
        (["{type: object, url: 's3://b', endpoint: 'minio:9000'}"], "tiers[0].endpoint",
         "must be an address like `http://minio:9000` or null", "begins with `http://` or `https://`"),
        (["{type: object, url: 's3://b', region: ''}"], "tiers[0].region", "must be text that is not empty",
         ""),
        (["{type: disk, when_slow: block}"], "tiers[0].when_slow", "must be one of `auto`, `skip`, `wait`", "`wait`"),
        (["{type: disk, on_failure: raise}"], "tiers[0].on_failure", "must be one of `continue`, `stop`", "`stop`"),
        (["{type: disk, commit: atomic}"], "tiers[0].commit", "one of `auto`, `rename`, `manifest`",
         "`rename`"),
        (["{type: s3}"], "tiers[0].type", "must be one of `memory`, `peer`, `disk`, `object`", "`object`"),
        (["{type: objct}"], "tiers[0].type", "must be one of", "did you mean `object`"),
        (["{type: disk, keep_evry: 5}"], "tiers[0].keep_evry", "unknown key", "did you mean `keep_every`"),
        (["{type: disk, on_fail: stop}"], "tiers[0].on_fail", "unknown key", "did you mean `on_failure`"),
    ],
)  # fmt: skip
def test_what_does_not_fit_a_tier_is_refused_with_what_does(
    desk: Desk, tiers: list[str], key: str, message: str, hint: str
) -> None:
    problem = desk.problem(with_tiers(*tiers))
    assert problem.key == key
    assert message in problem.message
    assert hint in (problem.hint or "")


@pytest.mark.parametrize(
    "tiers",
    [
        ["{type: object, url: 's3://b'}"],
        ["{type: memory}", "{type: object, url: 's3://b', every: 7, keep_every: 14}"],
        ["{type: memory, every: 2}", "{type: disk}", "{type: object, url: 's3://b', every: 6}"],
        ["{type: disk, every: 5, keep_every: 5}"],
        ["{type: disk, every: 5, keep_every: 1000}"],
        ["{type: disk, keep_every: 7}"],
        ["{type: memory, every: auto}", "{type: disk, keep_every: 7}"],
    ],
)
def test_intervals_that_fit_and_intervals_to_be_planned_are_taken(desk: Desk, tiers: list[str]) -> None:
    assert len(desk.load(with_tiers(*tiers)).tiers) == len(tiers)


def test_two_tiers_never_share_a_folder(desk: Desk, tmp_path: Path) -> None:
    def tiers(path: str, url: str) -> str:
        return with_tiers(f"{{type: disk, path: {path}}}", f"{{type: object, url: 'file://{url}'}}")

    output = f"output_dir={tmp_path}/run"
    problem = desk.problem(tiers("checkpoints", f"{tmp_path}/run/./checkpoints/"), output)
    assert (problem.key, problem.message) == ("tiers[1].url", "this is the folder of the disk tier")
    assert desk.problem(tiers(f"{tmp_path}/x", f"{tmp_path}/x"), output).key == "tiers[1].url"
    desk.load(tiers("checkpoints", f"{tmp_path}/run/checkpoints-2"), output)


def test_variables_expand_in_addresses_and_never_show_what_they_hold(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BUCKET", "team")
    monkeypatch.setenv("SECRET", "hunter22")
    monkeypatch.setenv("MINIO", "http://minio:9000")
    tier = desk.load(bucket(', endpoint: "${MINIO}"', "s3://${BUCKET}/${RUN:-one}")).object_tier
    assert tier is not None
    assert (tier.url, tier.endpoint) == ("s3://team/one", "http://minio:9000")
    assert "hunter22" not in str(desk.problem(bucket(url="s3://me:${SECRET}@b/r")))
    assert "UNSET is not set" in desk.problem(bucket(url="s3://${UNSET}/r")).message


def test_editors_know_the_addresses() -> None:
    properties = json_schema()["$defs"]["ObjectTier"]["properties"]
    pattern = properties["url"]["pattern"]
    assert re.search(pattern, "s3://bucket/run")
    assert not re.search(pattern, "s3://k:v@bucket/run")
    assert set(properties) == {
        "type", "every", "keep", "keep_every", "when_slow", "on_failure", "url", "endpoint", "region",
    }  # fmt: skip
