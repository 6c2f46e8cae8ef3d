"""Prediction of the next character or word.

Tests LEAF's files, plays, text lines of users and the recurrent model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import fedloom as fl
from fedloom.common.errors import DataError, FedloomError, InvalidValue
from fedloom.common.expression import Call
from fedloom.data.dataset import Dataset, datasets, make_dataset
from fedloom.data.preprocessing import TextInputs
from fedloom.data.sets.next_token import ALPHABET
from fedloom.models.build import build_model
from fedloom.models.structure import head_name
from fedloom.serving.prediction_files import predict_file


def make(name: str, folder: Path, **options: Any) -> Dataset:
    dataset: Dataset = datasets.build(Call(name, named={"folder": str(folder), **options}))
    return dataset


def letters(numbers: torch.Tensor) -> str:
    return "".join(
        ALPHABET[n - 2] if n > 1 else {0: "_", 1: "?", -100: "."}[n] for n in numbers.tolist()
    )


def leaf(path: Path, users: dict[str, tuple[list[str], list[str]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    sizes = [len(x) for x, _ in users.values()]
    path.write_text(json.dumps({"users": list(users), "num_samples": sizes, "user_data": data}))


def test_the_alphabet_has_leafs_80_characters() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80


def test_leafs_files_of_shakespeare_are_read(tmp_path: Path) -> None:
    leaf(
        tmp_path / "train" / "a.json",
        {"ROMEO": (["abc", "bcd"], ["d", "e"]), "JULIET": (["xy~"], ["z"])},
    )
    leaf(tmp_path / "test" / "a.json", {"JULIET": (["zzz"], ["!"])})
    dataset = make("shakespeare", tmp_path, length=3)
    assert (
        dataset.vocabulary,
        dataset.spec.shape,
        dataset.spec.outputs,
        dataset.objective.metric.name,
    ) == (
        82,
        (3,),
        82,
        "perplexity",
    )
    assert [letters(row) for row in dataset.train.inputs] == ["abc", "bcd", "xy?"]
    assert [letters(row) for row in dataset.train.labels] == ["bcd", "cde", "y?z"]
    assert dataset.train.groups is not None
    assert dataset.test.groups is not None
    assert (dataset.train.groups.tolist(), dataset.test.groups.tolist()) == ([0, 0, 1], [1])
    last_places = make("shakespeare", tmp_path, length=3, places="last")
    assert [letters(row) for row in last_places.train.labels] == ["..d", "..e", "..z"]
    assert [letters(row) for row in make("shakespeare", tmp_path, length=2).train.inputs] == [
        "bc",
        "cd",
        "y?",
    ]


PLAY = "ROMEO:\nabcdefgh\n\nJULIET:\nijklmnopq\nr\n\nExeunt\n\nROMEO:\nst\n"


def test_plays_are_cut_by_speaker_and_their_ends_test(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text(PLAY)
    dataset = make("shakespeare", tmp_path, length=4, test_fraction=0.33)
    assert [letters(row).replace("\n", "/") for row in dataset.train.inputs] == [
        "abcd",
        "efgh",
        "ijkl",
        "mnop",
    ]
    assert [letters(row).replace("\n", "/") for row in dataset.train.labels] == [
        "bcde",
        "fgh/",
        "jklm",
        "nopq",
    ]
    assert [letters(row).replace("\n", "/") for row in dataset.test.inputs] == ["/s__", "q/__"]
    assert [letters(row).replace("\n", "/") for row in dataset.test.labels] == ["st..", "/r.."]
    (tmp_path / "play.txt").write_text("no names here, just text\n\nand more")
    assert make("shakespeare", tmp_path, length=4).train.groups is not None


def lines(path: Path, *entries: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")


def test_each_user_of_a_file_of_lines_is_a_client(tmp_path: Path) -> None:
    users = [
        {"user": 7, "texts": ["How do I sort a list?", "a list"]},
        {"user": "b", "text": "sort a set"},
    ]
    lines(tmp_path / "train.jsonl", *users)
    lines(tmp_path / "test.jsonl", {"user": "b", "text": "a tuple"})
    dataset = make("stackoverflow", tmp_path, length=5)
    assert dataset.train.groups is not None
    assert dataset.test.groups is not None
    assert (dataset.train.groups.tolist(), dataset.test.groups.tolist()) == ([0, 0, 1], [1])
    begin, a, end = (
        int(dataset.test.inputs[0, 0]),
        int(dataset.test.inputs[0, 1]),
        int(dataset.test.labels[0, 2]),
    )
    assert dataset.test.inputs.tolist() == [[begin, a, 1, 0, 0]]  # begin a ?
    assert dataset.test.labels.tolist() == [[a, 1, end, -100, -100]]
    assert dataset.train.inputs[0, 1:].tolist() == dataset.train.labels[0, :4].tolist()
    assert dataset.vocabulary == 2 + 2 + 8  # words: how do i sort a list ? set
    assert make("stackoverflow", tmp_path, max_vocabulary=5).vocabulary == 5


def test_the_vocabulary_is_of_the_training_texts_and_each_user_keeps_some_for_testing(
    tmp_path: Path,
) -> None:
    lines(
        tmp_path / "train.jsonl",
        *({"user": user, "text": f"word{user}{row}"} for user in "ab" for row in range(5)),
    )
    dataset = make("stackoverflow", tmp_path)
    assert dataset.test.groups is not None
    assert sorted(dataset.test.groups.tolist()) == [0, 1]
    assert dataset.vocabulary == 2 + 2 + 8
    assert dataset.test.inputs[:, 1].tolist() == [1, 1]  # the word is not in the training texts


def test_a_tokenizer_of_ones_own_splits_the_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "splits_text_for_the_test.py").write_text(
        "def letters(text): return list(text)\ndef numbers(text): return [1]\ndef fails(text): "
        "return 1 / 0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "splits_text_for_the_test", raising=False)
    lines(tmp_path / "train.jsonl", {"user": 1, "texts": ["abc", "abc"]})
    assert (
        make("stackoverflow", tmp_path, tokenizer="splits_text_for_the_test:letters").vocabulary
        == 7
    )
    for name, text in (
        ("numbers", "must give a list of texts, not"),
        ("fails", "tokenizer failed .division by zero"),
    ):
        with pytest.raises(DataError, match=text):
            make("stackoverflow", tmp_path, tokenizer=f"splits_text_for_the_test:{name}")
    with pytest.raises(InvalidValue, match="tokenizer 'letters' must be 'module:function'"):
        make("stackoverflow", tmp_path, tokenizer="letters")


@pytest.mark.parametrize(
    ("name", "file", "content", "text"),
    [
        (
            "shakespeare",
            "all_data/a.json",
            '{"users": ["a"], "user_data": {"a": {"x": [3], "y": ["b"]}}}',
            "x must be texts",
        ),
        (
            "shakespeare",
            "all_data/a.json",
            '{"users": ["a"], "user_data": {"a": {"x": ["a"], "y": []}}}',
            "x must be texts",
        ),
        (
            "shakespeare",
            "all_data/a.json",
            '{"users": ["a"], "user_data": {}}',
            "no LEAF file (wanted users",
        ),
        ("shakespeare", "all_data/a.json", "{", "damaged json"),
        ("shakespeare", "a.txt", "", "no text to learn from"),
        ("shakespeare", "a.html", "", "put LEAF's train"),
        (
            "stackoverflow",
            "train.jsonl",
            '{"user": 1, "text": "a"}\n{"user": 1}\n',
            "line 2: wanted",
        ),
        ("stackoverflow", "train.jsonl", '{"user": 1, "text": "a"}\noops', "line 2: wanted"),
        ("stackoverflow", "train.jsonl", "[]", "line 1: wanted"),
        ("stackoverflow", "train.jsonl", "[" * 100_000, "line 1: wanted"),
        ("stackoverflow", "train.jsonl", "", "no text to learn from"),
    ],
)
def test_damaged_text_is_refused_in_one_line(
    name: str, file: str, content: str, text: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(content)
    with pytest.raises(FedloomError) as caught:
        make(name, tmp_path)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sequences_take_no_more_memory_than_they_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines(tmp_path / "train.jsonl", {"user": 1, "texts": ["a"] * 100})
    monkeypatch.setenv("FEDLOOM_DATA_GIB", "0.01")
    with pytest.raises(DataError, match=r"80 sequences of 100000: takes 0.12 GiB"):
        make("stackoverflow", tmp_path, length=100_000)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_model_predicts_the_next_character_without_looking_ahead(
    cell: str, tmp_path: Path
) -> None:
    for name, text in (("A", "abcabcabcabcabc"), ("B", "bcabcabcabcabca")):
        leaf(
            tmp_path / "all_data" / f"{name}.json",
            {name: ([text[k : k + 6] for k in range(9)], list(text[6:15]))},
        )
    task = fl.make_task(
        f"shakespeare(folder='{tmp_path}', length=6)",
        clients=0,
        partition="natural",
        model=f"recurrent(cell={cell}, embedding=4, width=8, layers=1)",
        training={"learning_rate": 0.1, "batch_size": 4, "epochs": 3, "optimizer": "adam"},
    )
    result = fl.run("fedavg", task, rounds=3, participation=1.0)
    assert result.history[-1]["perplexity"] < 3.5  # the vocabulary has 82 characters
    assert result.federation.notices == []
    stacked = fl.run(
        "fedavg", task, rounds=3, participation=1.0, engine="stacked"
    )  # PyTorch cannot stack these layers
    (notice,) = stacked.federation.notices
    assert notice.startswith(
        "clients train one by one, because models of this kind cannot be stacked: "
    )
    assert torch.equal(stacked.federation.model(), result.federation.model())
    module = build_model(f"recurrent(cell={cell}, width=8)", task.dataset.spec, 0)
    sequence = task.train.inputs[:1].clone()
    changed = sequence.clone()
    changed[0, 4] = 9
    assert torch.equal(module(sequence)[0, :4], module(changed)[0, :4])
    assert not torch.equal(module(sequence)[0, 4:], module(changed)[0, 4:])


def test_leafs_model_has_the_size_of_its_layers() -> None:
    module = build_model("recurrent", fl.DataSpec((80,), 82, 82), 0)
    lstm = 4 * 256 * (8 + 256 + 2) + 4 * 256 * (256 + 256 + 2)
    assert sum(parameter.numel() for parameter in module.parameters()) == 82 * 8 + lstm + 82 * 257
    assert head_name(module) == "head"


def test_a_model_of_next_tokens_refuses_classes() -> None:
    spec = fl.DataSpec((5,), 4, 10)
    with pytest.raises(
        InvalidValue, match="recurrent predicts one of 10 tokens, but the data need 4 outputs: set"
    ):
        build_model("recurrent", spec, 0)


def test_texts_of_a_column_are_learned_and_continued(tmp_path: Path) -> None:
    rows = [
        {"user": k % 3, "post": f"how do {'we' if k % 2 else 'i'} stop 'it', please"}
        for k in range(30)
    ]
    path = tmp_path / "posts.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    name = f"texts(path='{path}', column=post, group=user, length=8)"
    data = make_dataset(name)
    assert data.train.groups is not None
    assert data.train.groups.bincount().tolist() == [8, 8, 8]
    assert len(data.test) == 6
    encoding = data.preprocessing.inputs
    assert isinstance(encoding, TextInputs)
    words = {0: "", 1: "?", **{k: word for word, k in encoding.numbers.items()}}
    for inputs, targets in zip(data.train.inputs.tolist(), data.train.labels.tolist(), strict=True):
        assert words[inputs[0]] == "<s>"
        assert [words[k] for k in inputs[1:4]] in (["how", "do", "we"], ["how", "do", "i"])
        assert targets[:-1] == inputs[1:]
    plain = make_dataset(f"texts(path='{path}', column=post)")
    assert plain.train.groups is None
    training = {"learning_rate": 0.5, "epochs": 5, "batch_size": 4}
    task = fl.make_task(
        data, clients=0, partition="natural", model="recurrent(width=16)", training=training
    )
    run = tmp_path / "run"
    fl.run("fedavg", task, rounds=3, directory=run, engine="rows", quiet=True)
    pd.DataFrame({"post": ["how do"], "user": [1]}).to_csv(tmp_path / "new.csv", index=False)
    model = fl.load(run)
    predict_file(model, tmp_path / "new.csv", tmp_path / "out.csv", tokens=5)
    written = pd.read_csv(tmp_path / "out.csv")
    assert list(written) == ["post", "user", "prediction"]
    assert written.prediction[0] == model.generate("how do", 5).removeprefix("how do")


def test_bad_columns_of_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "posts.csv"
    path.write_text("post,user\nhow do i,1\n,2\n")
    for options, message in (
        ("", "texts needs path"),
        (f"path='{path}'", "no column 'text'"),
        (f"path='{path}', column=pots", "no column 'pots': did you mean 'post'?"),
        (f"path='{path}', column=post", "column 'post' has no text in row 2"),
    ):
        with pytest.raises(FedloomError) as refused:
            make_dataset(f"texts({options})")
        assert message in str(refused.value)
