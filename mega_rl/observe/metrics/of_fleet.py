"""What engines that sample while the trainer trains show of themselves: a section of its own."""

from __future__ import annotations

from collections.abc import Mapping

from mega_rl.observe.metrics.metric import MetricSpec

METRICS = (
    MetricSpec("fleet/engines", "engines", "in use: neither removed nor out of restarts", "last"),
    MetricSpec("fleet/engines_serving", "engines", "of them with weights, and not just loading others", "last"),
    MetricSpec("fleet/busy_fraction", "fraction", "of the engines' time since the last step in which they sampled"),
    MetricSpec("fleet/loading_fraction", "fraction", "of that time in which they took new weights"),
    MetricSpec("fleet/responses_in_hand", "responses", "under way on engines as the step begins to train", "last"),
    MetricSpec("fleet/responses_waiting", "responses", "of the steps in the air, not yet given to an engine", "last"),
    MetricSpec("fleet/steps_in_the_air", "steps", "begun and not trained, this one included", "last"),
    MetricSpec("fleet/late_answers", "responses", "refused since they came twice or too late, since the start", "last"),
    MetricSpec("fleet/restarts", "restarts", "of engines that died or made no progress, since the start", "last"),
    MetricSpec("fleet/joined", "engines", "that were added while the run went on, since the start", "last"),
    MetricSpec("fleet/left", "engines", "that were removed while the run went on, since the start", "last"),
)
CHARTS: Mapping[str, tuple[str, ...]] = {
    "engines": ("fleet/engines", "fleet/engines_serving"),
    "what engines do": ("fleet/busy_fraction", "fleet/loading_fraction"),
    "responses in the air": ("fleet/responses_in_hand", "fleet/responses_waiting"),
    "changes of the fleet": ("fleet/restarts", "fleet/joined", "fleet/left"),
}
