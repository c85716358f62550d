"""Lines of JSON and files of token ids as samples; what is wrong in them is named by file and line."""

import json
from pathlib import Path

import numpy as np
import pytest

from dtrain.engine.data.build import build_data, build_samples
from dtrain.engine.data.text import DataError, TokenData
from dtrain.engine.data.tokens import BinaryData, JsonlData
from dtrain.specs.datasets import JsonlDataset, TokensDataset
from dtrain.specs.load import load_spec

SPEC = """\
output_dir: runs/t
max_steps: 4
model: {{type: gpt, n_layers: 1, d_model: 16, n_heads: 2, vocab_size: {vocabulary}}}
dataset: {dataset}
evaluation: {{every: 2, batches: 1, fraction: 20%}}
training: {{global_batch_size: 2, micro_batch_size: 2, optimizer: {{name: adamw, lr: 1e-3}}}}
"""


def lines(path: Path, *values: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def ids(path: Path, *numbers: int, dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(numbers, dtype).tofile(path)
    return path


def row(data: TokenData) -> list[int]:
    """All tokens as the samples of one token tell them."""
    return [int(data[0][0]), *(int(data[i][1]) for i in range(len(data)))]


def test_the_texts_of_all_lines_follow_each_other_with_a_newline_behind_each(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"id": 1, "text": "one"}, {"text": "zw\u00f6lf\nlines"}, {"text": ""})
    path.write_bytes(path.read_bytes() + b"\n  \n")  # empty lines are no documents
    assert bytes(row(JsonlData(str(path), 1, "text"))) == "one\nzw\u00f6lf\nlines\n\n".encode()


def test_of_a_folder_the_files_with_the_right_ending_are_taken_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.jsonl", "c.json", ".hidden/d.jsonl"):
        lines(tmp_path / name, {"body": name})
    assert bytes(row(JsonlData(str(tmp_path), 1, "body"))) == b"a/z.jsonl\nb.jsonl\n"
    for name, number in (("b.bin", 2), ("a.bin", 1), ("c.idx", 3)):
        ids(tmp_path / name, number, number)
    assert row(BinaryData(str(tmp_path), 1, "uint16", None)) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ("{broken", "not a line of JSON"),
        ("[1, 2]", "must be an object with the key 'text', this is a list"),
        ('{"content": "x", "id": 1}', r"no key 'text' \(keys: content, id\); dataset.field names"),
        ('{"text": null}', "'text' is null; dataset.field names"),
        ('{"text": [1]}', "'text' is a list"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, second: str, words: str) -> None:
    path = lines(tmp_path / "a.jsonl", {"text": "good"})
    path.write_text(path.read_text() + second + "\n")
    with pytest.raises(DataError, match=rf"^dataset.path: .*a\.jsonl:2: {words}"):
        JsonlData(str(path), 1, "text")


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 65_535), ("uint32", 4_000_000_000)])
def test_token_ids_are_read_as_they_were_written(tmp_path: Path, dtype: str, largest: int) -> None:
    path = ids(tmp_path / "a.bin", 1, 50_256, largest, 0, dtype="<u2" if dtype == "uint16" else "<u4")
    data = BinaryData(str(path), 3, dtype, None)
    assert data[0].tolist() == [1, 50_256, largest, 0]


def test_a_token_that_the_model_does_not_have_is_refused_with_the_size_that_is_needed(tmp_path: Path) -> None:
    path = ids(tmp_path / "a.bin", *range(8), 300, *range(8))
    data = BinaryData(str(path), 4, "uint16", 256)
    assert data[0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(
        DataError, match=r"token 300 .* model.vocab_size is 256; set it to 301 or more, .* dataset.dtype"
    ):
        data[2]


def test_a_file_that_holds_no_whole_number_of_ids_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"a\.bin: 5 bytes are no whole number of uint16 \(dataset.dtype\)"):
        BinaryData(str(tmp_path / "a.bin"), 1, "uint16", None)


@pytest.mark.parametrize("kind", ["jsonl", "tokens"])
def test_a_folder_without_such_files_and_an_empty_file_are_refused(tmp_path: Path, kind: str) -> None:
    empty = tmp_path / f"e{'.jsonl' if kind == 'jsonl' else '.bin'}"
    empty.touch()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.md").write_text("x")
    for path, words in ((tmp_path / "d", "no files in it that end in "), (empty, "0 tokens are fewer than one sample")):
        spec = JsonlDataset(type="jsonl", path=str(path), seq_len=4)
        with pytest.raises(DataError, match=words):
            build_samples(spec if kind == "jsonl" else TokensDataset(type="tokens", path=str(path), seq_len=4))


def test_a_part_of_either_is_held_out_as_of_text(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", {"text": "x" * 99})
    ids(tmp_path / "a.bin", *range(100))
    for dataset in ("{type: jsonl, path: a.jsonl, seq_len: 4}", "{type: tokens, path: a.bin, seq_len: 4}"):
        text = SPEC.format(vocabulary=256, dataset=dataset.replace("a.", f"{tmp_path}/a."))
        (tmp_path / "spec.yaml").write_text(text)
        trained, held_out = build_data(load_spec(str(tmp_path / "spec.yaml"), []))
        assert held_out is not None
        assert (len(trained), len(held_out)) == (19, 4)


def test_the_fingerprint_follows_the_tokens_and_the_texts(tmp_path: Path) -> None:
    before = BinaryData(str(ids(tmp_path / "a.bin", 1, 2, 3)), 1, "uint16", None).fingerprint()
    assert BinaryData(str(ids(tmp_path / "a.bin", 1, 2, 4)), 1, "uint16", None).fingerprint() != before
    before = JsonlData(str(lines(tmp_path / "a.jsonl", {"text": "ab"})), 1, "text").fingerprint()
    assert JsonlData(str(lines(tmp_path / "a.jsonl", {"text": "ac"})), 1, "text").fingerprint() != before
