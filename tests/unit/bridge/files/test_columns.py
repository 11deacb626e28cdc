"""Lists of numbers that leave a JSON document as columns come back as they were."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest

from mega_rl.bridge.files.torch_dist.columns import extract, from_bytes, restore, to_bytes

GENERATOR = random.Random(5)
LOGPROBS = [float(np.float32(GENERATOR.uniform(-20, 0))) for _ in range(300)]
ROWS = [
    {"prompt": "1+1=", "response_ids": list(range(1000 * n, 1000 * n + 50)), "logprobs": LOGPROBS[n : n + 50]}
    for n in range(4)
]
DOCUMENTS = {
    "samples": {"step": 3, "data": {"carried": [ROWS[:2], ROWS[2:]], "stream": {"epoch": 1}}},
    "nothing": {"step": 3, "list": [1, 2, 3], "none": None},
    "exact_numbers": {"large": [2**40 + n for n in range(20)], "fine": [0.1 * n for n in range(20)]},
    "huge_numbers": {"ints": [10**30 + n for n in range(20)], "floats": [1e300] * 20},
    "mixed": {"numbers": [1, 2.0] * 20, "truth": [True] * 20, "words": ["a"] * 20, "nested": [[1] * 20, [2.5] * 20]},
    "infinite": {"numbers": [math.inf, -math.inf] * 20},
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_comes_back_as_it_was(name: str) -> None:
    rest, columns = extract(DOCUMENTS[name])
    read = restore(json.loads(json.dumps(rest)), from_bytes(to_bytes(columns)))
    assert json.dumps(read) == json.dumps(DOCUMENTS[name])


def test_tokens_are_short_columns() -> None:
    rest, columns = extract(DOCUMENTS["samples"])
    assert {name: column.dtype for name, column in columns.items()} == {
        "$ints": np.int32,
        "$ints_ends": np.int64,
        "$floats": np.float32,
        "$floats_ends": np.int64,
    }
    assert rest["data"]["carried"][0][1]["response_ids"] == {"$ints": 1}
    assert len(json.dumps(rest)) < 500


def test_not_a_number_comes_back() -> None:
    rest, columns = extract({"floats": [math.nan] * 20})
    assert columns["$floats"].dtype == np.float32
    assert all(math.isnan(number) for number in restore(rest, columns)["floats"])


def test_no_pickle_is_read() -> None:
    content = to_bytes({"$ints": np.array([{"any": "object"}], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle"):
        from_bytes(content)


def test_a_document_of_before_has_no_columns() -> None:
    """Its lists are in it."""
    assert restore(DOCUMENTS["samples"], {}) == DOCUMENTS["samples"]
