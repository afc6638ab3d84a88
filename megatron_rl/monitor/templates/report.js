"use strict";
// Draws the charts and pages through the samples of one run. All text of the run goes through textContent.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);

  // ------------------------------------------------------------------------------------------------------- charts
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  // Colours arrive as names of custom properties ("c0", "band0"), so that a chart follows the colour scheme.
  const coloured = (value, key) => {
    if (Array.isArray(value)) return value;
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, k)]));
    return (key === "color" || key === "fillcolor") && typeof value === "string" ? css(value) || value : value;
  };

  const axis = (own) => ({
    gridcolor: css("line"), linecolor: css("line"), zeroline: false, automargin: true, ticks: "", fixedrange: false,
    tickfont: { size: 11.5 }, ...own, title: { font: { size: 11.5 }, standoff: 8, ...(own || {}).title },
  });

  const layoutOf = (chart) => {
    const layout = {
      ...chart.layout,
      xaxis: axis({ ...chart.layout.xaxis, showgrid: false, showline: true, hoverformat: "d", tickformat: "d", nticks: 8,
        unifiedhovertitle: { text: chart.layout.xaxis.title.text + " %{x}" } }),
      yaxis: axis({ nticks: 6, ...chart.layout.yaxis }),
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("muted") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 44, r: 12, t: 6, b: 36 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: css("panel"), bordercolor: css("line"), font: { color: css("ink"), size: 12 } },
      showlegend: chart.legend,
      legend: { orientation: "h", x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", traceorder: "normal", font: { size: 12 } },
    };
    if (chart.layout.yaxis2)
      layout.yaxis2 = axis({ nticks: 6, ...chart.layout.yaxis2, overlaying: "y", side: "right", showgrid: false });
    return layout;
  };

  const draw = () => {
    for (const chart of data.charts)
      Plotly.react(byId("chart-" + chart.id), chart.traces.map((trace) => coloured(trace)), layoutOf(chart), {
        displayModeBar: false, responsive: true,
      });
  };
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

  // ------------------------------------------------------------------------------------------------------ samples
  const viewer = byId("viewer");
  if (!viewer) return;
  const state = { kind: data.samples.train.length ? "train" : "eval", step: 0, sample: 0 };
  state.step = data.samples[state.kind].length - 1;

  const FILTERS = {
    all: () => true,
    above: (s, step) => s.reward !== null && s.reward > step.mean,
    below: (s, step) => s.reward !== null && s.reward < step.mean,
    correct: (s) => s.correctness !== null && s.correctness > 0.5,
    wrong: (s) => s.correctness !== null && s.correctness <= 0.5,
    truncated: (s) => s.finish_reason === "length",
  };
  const step = () => data.samples[state.kind][state.step];
  const shown = () => step().samples.filter((s) => FILTERS[byId("filter").value](s, step()));
  const number = (value, digits = 2) => (value === null || value === undefined ? "–" : value.toFixed(digits));

  const element = (tag, text, attributes = {}) => {
    const node = document.createElement(tag);
    node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };

  const facts = (s) => {
    const versions = s.weight_version_first === s.weight_version_last
      ? s.weight_version_first : s.weight_version_first + "–" + s.weight_version_last;
    return [
      ["reward", number(s.reward), "main"],
      ["correctness", number(s.correctness)],
      ...Object.entries(s.components).map(([name, value]) => [name, number(value)]),
      ["right in its group", s.group_correct === null || s.group_size < 2 ? null : s.group_correct + " of " + s.group_size],
      ["tokens", s.response_tokens],
      ["ended by", s.finish_reason],
      ["mean log-prob", s.log_prob_mean === null ? null : number(s.log_prob_mean, 3)],
      ["largest gap to the engine", s.gap_max_abs === null ? null : s.gap_max_abs.toExponential(1)],
      ["weights", versions],
      ["trained on", s.trained === null || state.kind === "eval" ? null : s.trained ? "yes" : "no"],
      ["prompt", s.prompt_id],
      ["source", s.source],
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  };

  // One square per sample, filled by its reward; a gap separates the groups (samples of one prompt).
  const dot = (s, index, all, low, high) => {
    const share = s.reward === null ? 0 : high > low ? (s.reward - low) / (high - low) : 0.5;
    const button = element("button", "", {
      type: "button", title: "reward " + number(s.reward), "aria-label": "sample " + (index + 1) + ", reward " + number(s.reward),
      "aria-current": String(index === state.sample),
    });
    if (index > 0 && all[index - 1].group_id !== s.group_id) button.classList.add("group");
    const fill = document.createElement("i");
    fill.style.height = Math.round(12 + 88 * share) + "%";
    fill.style.opacity = String(0.35 + 0.65 * share);
    button.append(fill);
    button.addEventListener("click", () => { state.sample = index; render(); });
    return button;
  };

  function render() {
    const samples = shown();
    state.sample = Math.max(0, Math.min(state.sample, samples.length - 1));
    const current = samples[state.sample];
    for (const tab of viewer.querySelectorAll(".tabs button"))
      tab.setAttribute("aria-pressed", String(tab.dataset.kind === state.kind));
    byId("step").replaceChildren(...data.samples[state.kind].map((s, i) =>
      element("option", s.step + " (mean reward " + number(s.mean) + ")", { value: i })));
    byId("step").value = String(state.step);
    const rewards = step().samples.map((s) => s.reward).filter((r) => r !== null);
    const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
    byId("dots").replaceChildren(...samples.map((s, i) => dot(s, i, samples, low, high)));
    byId("count").textContent = samples.length
      ? "sample " + (state.sample + 1) + " of " + samples.length + " (the step has " + step().total + ")" : "";
    byId("none").hidden = Boolean(current);
    for (const part of ["#meta", ".texts"]) viewer.querySelector(part).hidden = !current;
    if (!current) return;
    byId("meta").replaceChildren(...facts(current).map(([name, value, role]) => {
      const pair = element("div", "", role ? { class: role } : {});
      pair.append(element("dt", name), element("dd", value));
      return pair;
    }));
    for (const [id, text] of [["prompt", current.prompt], ["response", current.response]]) {
      byId(id).textContent = text;
      byId(id).scrollTop = 0;
    }
    byId("answer").textContent = current.answer ? "Expected: " + current.answer : "";
  }

  const moveSample = (by) => { state.sample = Math.max(0, Math.min(shown().length - 1, state.sample + by)); render(); };
  const moveStep = (by) => {
    state.step = Math.max(0, Math.min(data.samples[state.kind].length - 1, state.step + by));
    render();
  };
  byId("previous").addEventListener("click", () => moveSample(-1));
  byId("next").addEventListener("click", () => moveSample(1));
  byId("filter").addEventListener("change", () => { state.sample = 0; render(); });
  byId("step").addEventListener("change", (event) => { state.step = Number(event.target.value); render(); });
  for (const tab of viewer.querySelectorAll(".tabs button"))
    tab.addEventListener("click", () => {
      state.kind = tab.dataset.kind;
      state.step = data.samples[state.kind].length - 1;
      render();
    });

  // Left and right work whenever the viewer is on screen; up and down only inside it, where they do not scroll the page.
  let visible = false;
  new IntersectionObserver((entries) => { visible = entries[0].isIntersecting; }, { threshold: 0.25 }).observe(viewer);
  document.addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || /^(SELECT|INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
    const inside = viewer.contains(document.activeElement);
    const move = { ArrowLeft: [moveSample, -1], ArrowRight: [moveSample, 1], ArrowUp: [moveStep, -1], ArrowDown: [moveStep, 1] }[event.key];
    if (!move || !(inside || (visible && move[0] === moveSample))) return;
    event.preventDefault();
    move[0](move[1]);
  });
  render();
})();
