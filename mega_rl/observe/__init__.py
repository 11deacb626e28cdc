"""Watching a run: metrics declared once, timers, and the sinks they go to (console, TensorBoard, JSONL, wandb).

Nothing is imported here: what only counts or times needs none of the libraries of the sinks.
"""
