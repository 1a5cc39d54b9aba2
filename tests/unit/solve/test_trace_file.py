import json
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import ConfigError
from prfaas.model.cost.curve import cached_tokens
from prfaas.model.cost.lengths import expectation, mean_tokens
from prfaas.solve.files.traces import read_trace


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_a_csv_is_read_by_its_header(tmp_path: Path) -> None:
    traffic = read_trace(written(tmp_path, "t.csv", "timestamp,prompt_tokens,output_tokens\n1,100,10\n2,300,30\n"))
    assert mean_tokens(traffic.lengths) == 200
    assert (traffic.output.mean, traffic.output.squared_cv) == (20, 0.25)
    assert traffic.output.mean_context_tokens == pytest.approx((105 * 10 + 315 * 30) / 40)


def test_a_list_of_numbers_is_a_trace_whose_output_is_inferred(tmp_path: Path) -> None:
    for name in ("t.csv", "t.jsonl"):
        traffic = read_trace(written(tmp_path, name, "100\n300\n"))
        assert mean_tokens(traffic.lengths) == 200
        assert traffic.inferred == ("output tokens (1024 each)",)


def test_mooncake_hash_ids_become_prefix_hits(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1300, "output_length": 9, "hash_ids": [1, 2, 3]},
        {"timestamp": 5, "input_length": 1500, "output_length": 9, "hash_ids": [1, 2, 4]},
        {"timestamp": 5, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]},
        {"timestamp": 9, "input_length": 1400, "output_length": 9, "hash_ids": [7, 2, 4]},
    ]
    traffic = read_trace(written(tmp_path, "t.jsonl", lines(rows)))
    # nothing; the first two blocks; everything but the last token; nothing, since the first block differs
    assert sorted(traffic.lengths.requests[0].tolist()) == [1, 476, 1300, 1400]
    assert expectation(traffic.lengths, cached_tokens) * 4 == pytest.approx(1024 + 1023)


def test_conversations_cache_earlier_text(tmp_path: Path) -> None:
    talk = [("human", 100), ("gpt", 50), ("human", 30), ("gpt", 20), ("human", 5)]
    entry = {"conversations": [{"from": who, "num_tokens": count} for who, count in talk]}
    traffic = read_trace(written(tmp_path, "t.json", json.dumps([entry])))
    assert [tokens.tolist() for tokens in traffic.lengths.requests] == [[30, 100], [150, 0]]
    assert traffic.output.mean == 35


def test_messages_without_counts_are_counted_by_their_characters(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x" * 41}, {"role": "assistant", "content": "y" * 8}]
    more = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y" * 8}]
    text = json.dumps([{"messages": messages}, {"messages": more}])
    traffic = read_trace(written(tmp_path, "t.json", text))
    assert list(traffic.lengths.support) == [11, 100]
    assert "4 characters each" in traffic.inferred[0]


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("t.csv", "", "no requests"),
        ("t.csv", "length\n5\nnan\n", r"line 3: length: 'nan'"),
        ("t.csv", "length\n5\n0\n", "line 3"),
        ("t.csv", "length\n5\nabc\n", "'abc' is not a number"),
        ("t.csv", "size\n5\n", "line 2: none of"),
        ("t.csv", "length\n" + "8192\n" * 9, "8192 tokens; no threshold splits one length"),
        ("t.csv", "timestamp,length\n5,100\n3,200\n", "not ascending: 3 follows 5"),
        ("t.jsonl", '{"length": 4}\n{oops\n', "line 2: not JSON"),
        ("t.jsonl", '"text"\n', "line 1"),
        ("t.jsonl", '{"other": 4}\n', "line 1: none of"),
        ("t.json", "{}", "list of conversations"),
        ("t.json", '[{"talk": []}]', "conversation 1"),
        ("t.json", '[{"messages": [{"role": "user"}]}]', "no text"),
        ("t.json", "[", "not JSON"),
    ],
)
def test_a_bad_trace_is_refused_with_its_place(tmp_path: Path, name: str, text: str, named: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(ConfigError, match=named) as refused:
        read_trace(path)
    assert str(path) in str(refused.value)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(path)
