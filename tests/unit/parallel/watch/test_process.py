"""How a rank ends: with one sentence where a user can do something."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mega_rl.parallel.watch import process


def ended(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status, and what was written on stderr."""

    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(process.os, "_exit", leave)
    with pytest.raises(SystemExit) as end:
        process.fail(error)
    assert isinstance(end.value.code, int)
    return end.value.code, capsys.readouterr().err


def lack_of_the_host() -> Exception:
    """What torch raises for it."""
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        return error
    raise AssertionError("an exbibyte was there")


@pytest.mark.parametrize(
    ("error", "whose", "keys"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has a total of"),
            "its device's memory (CUDA out of memory. Tried to allocate 2.00 GiB): lower",
            ("rollout.vllm.gpu_memory_utilization", "memory.recompute", "memory.offload"),
        ),
        (RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB"), "its device's memory", ("memory.recompute",)),
        (MemoryError(), "its host's memory (MemoryError): lower", ("reward_workers.num_workers", "memory.offload")),
        (lack_of_the_host(), "its host's memory (", ("checkpoint.async_save",)),
    ],
    ids=["device", "an older torch_npu", "Python", "torch on the host"],
)
def test_a_lack_of_memory_names_what_takes_less(
    error: Exception,
    whose: str,
    keys: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, written = ended(error, monkeypatch, capsys)
    sentence = written.splitlines()[-1]
    assert status == 1 and type(error).__name__ in written  # the traceback says where
    assert sentence.startswith("error: rank 0 on ") and f" ran out of {whose}" in sentence
    assert all(key in sentence for key in (*keys, "trainer.max_tokens_per_microbatch", "tools/plan.py"))


def test_the_lack_of_another_rank_is_not_this_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, written = ended(RuntimeError("rank 1: CUDA out of memory"), monkeypatch, capsys)
    assert status == 1 and written.splitlines()[-1] == "RuntimeError: rank 1: CUDA out of memory"


def test_directories_of_torchrun_go_unless_something_is_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = tmp_path / "torchelastic_a" / "none_b" / "attempt_0"
    for rank in "01":
        (attempt / rank).mkdir(parents=True)
    (attempt / "1" / "stdout.log").touch()  # as --redirects has it
    for rank in "01":
        monkeypatch.setenv(process.ERROR_FILE, str(attempt / rank / "error.json"))
        process.remove_empty_logs()
    assert [path.name for path in attempt.iterdir()] == ["1"]
    (attempt / "1" / "stdout.log").unlink()
    process.remove_empty_logs()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "logs" / "0").mkdir(parents=True)  # of --log-dir
    monkeypatch.setenv(process.ERROR_FILE, str(tmp_path / "logs" / "0" / "error.json"))
    process.remove_empty_logs()
    assert (tmp_path / "logs" / "0").is_dir()
    monkeypatch.delenv(process.ERROR_FILE)
    process.remove_empty_logs()
