"use strict";
// Under the pointer a chart shows the step and the value of each curve there; without this script all else is the same.
for (const svg of document.querySelectorAll("svg.chart")) {
  const frame = svg.dataset;
  const cross = svg.querySelector(".cross");
  const labels = svg.parentElement.querySelectorAll(".legend b");
  const curves = [...svg.querySelectorAll(".curve")].map((curve) => ({
    steps: curve.dataset.steps.split(",").map(Number),
    values: curve.dataset.values.split(","),
  }));
  const nearest = (steps, wanted) =>
    steps.reduce((best, step, index) => (Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? index : best), 0);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const share = Math.min(1, Math.max(0, (x - frame.x0) / (frame.x1 - frame.x0)));
    const step = Number(frame.s0) + share * (frame.s1 - frame.s0);
    curves.forEach((curve, index) => {
      if (!curve.values[0]) return;
      const at = nearest(curve.steps, step);
      labels[index].textContent = `${curve.values[at]} @ ${curve.steps[at]}`;
    });
    const place = Number(frame.x0) + share * (frame.x1 - frame.x0);
    cross.setAttribute("x1", place);
    cross.setAttribute("x2", place);
    cross.style.visibility = "visible";
  });
  svg.addEventListener("pointerleave", () => {
    cross.style.visibility = "hidden";
    for (const label of labels) label.textContent = "";
  });
}
