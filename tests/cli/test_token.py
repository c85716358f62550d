"""Where the run's token comes from, and who never sees it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dtrain.cli.terminal.refusal import Refused
from dtrain.cli.token import TOKEN_VARIABLE, given_seal, own_seal, shared_seal
from dtrain.tiers.format.layout import RunDir
from dtrain.tiers.peers.seal import Seal

TOKEN = "a token of one's own"


def same(one: Seal | None, other: Seal | None) -> bool:
    return one is not None and other is not None and other.opened("x", one.sealed("x", "text").encode()) == "text"


def test_node_0_makes_a_token_that_only_its_user_can_read_and_the_others_find_it(tmp_path: Path) -> None:
    mine = own_seal(RunDir(tmp_path))
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert same(mine, shared_seal(RunDir(tmp_path, 1), time.monotonic()))
    assert same(mine, own_seal(RunDir(tmp_path))), "it stays the same over all starts of the run"
    (tmp_path / "other").mkdir()
    assert not same(mine, own_seal(RunDir(tmp_path / "other")))


@pytest.mark.parametrize("written", [None, "", "abc"], ids=["none", "empty", "half"])
def test_a_folder_that_is_not_shared_is_told(tmp_path: Path, written: str | None) -> None:
    if written is not None:
        (tmp_path / "token").write_text(written)
    with pytest.raises(Refused, match=r"not the one of node 0.*--token-file FILE or DTRAIN_TOKEN"):
        shared_seal(RunDir(tmp_path, 1), time.monotonic())


def test_a_given_token_comes_first_and_the_workers_never_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert given_seal(None) is None
    monkeypatch.setenv(TOKEN_VARIABLE, f" {TOKEN}\n")
    assert same(given_seal(None), Seal(TOKEN))
    assert TOKEN_VARIABLE not in os.environ
    monkeypatch.setenv(TOKEN_VARIABLE, "another token, by the variable")
    (tmp_path / "t").write_text(TOKEN)
    assert same(given_seal(str(tmp_path / "t")), Seal(TOKEN))
    assert TOKEN_VARIABLE not in os.environ


def test_a_token_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with pytest.raises(Refused, match="DTRAIN_TOKEN: a token has at least 16 characters, this one has 6"):
        given_seal(None)
