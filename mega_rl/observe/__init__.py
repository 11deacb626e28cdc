"""Watching a run: metrics declared once, timers, and the sinks they go to (console, TensorBoard, JSONL, wandb)."""

from __future__ import annotations

from mega_rl.observe.console import before_after_table
from mega_rl.observe.metric import MetricSpec
from mega_rl.observe.metrics import METRICS, Metrics
from mega_rl.observe.observer import Observer
from mega_rl.observe.sinks import read_jsonl
from mega_rl.observe.timers import Timers

__all__ = ["METRICS", "MetricSpec", "Metrics", "Observer", "Timers", "before_after_table", "read_jsonl"]
