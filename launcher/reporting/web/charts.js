// Draws the charts of the page's data with uPlot, and follows the controls above them.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const color = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const view = {axis: "step", smoothing: 0, log: false};
  const plots = [];

  function setTheme(name) {
    root.dataset.theme = name;
    plots.forEach((plot) => plot.redraw(false));
  }
  root.dataset.theme = dark.matches ? "dark" : "light";
  dark.addEventListener("change", () => setTheme(dark.matches ? "dark" : "light"));
  document.getElementById("theme").addEventListener("click", () =>
    setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
  let shown;
  addEventListener("beforeprint", () => { shown = root.dataset.theme; setTheme("light"); });
  addEventListener("afterprint", () => setTheme(shown));

  const number = (value) => {
    if (value == null || !isFinite(value)) return "-";
    const size = Math.abs(value);
    for (const [least, prefix] of [[1e18, ""], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e7, "M"]]) {
      if (size < least) continue;
      if (!prefix) break;
      const unit = prefix === "M" ? 1e6 : least;
      return `${(value / unit).toLocaleString("en", {maximumSignificantDigits: 4})} ${prefix}`;
    }
    if (size !== 0 && (size < 1e-4 || size >= 1e18)) return value.toExponential(2).replace("e+", "e");
    return value.toLocaleString("en", {maximumSignificantDigits: size >= 1e4 ? 7 : 4});
  };
  const duration = (seconds) => {
    if (seconds == null) return "-";
    if (seconds < 60) return `${+seconds.toFixed(1)} s`;
    if (seconds < 7200) return `${+(seconds / 60).toFixed(1)} min`;
    return `${+(seconds / 3600).toFixed(2)} h`;
  };
  const roundSeconds = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200, 86400, 604800];
  const onX = {step: number, time: duration, epoch: number};

  // Exponential moving average without the bias of its start; gaps stay gaps.
  function smoothed(values, weight) {
    let mean = 0, total = 0;
    return values.map((value) => {
      if (value == null) return value;
      mean = weight * mean + (1 - weight) * value;
      total = weight * total + 1 - weight;
      return mean / total;
    });
  }

  function axisOf(panel) {
    return data.groups[panel.series[0].group][view.axis] ? view.axis : "step";
  }

  function aligned(panel, axis) {
    const tables = [], nulls = [];
    for (const one of panel.series) {
      const x = data.groups[one.group][axis] || data.groups[one.group].step;
      const noisy = view.smoothing > 0 && one.kind !== "points" && !panel.steps;
      tables.push([x, one.y]);
      nulls.push([0, 1]);
      if (noisy) {
        tables.push([x, smoothed(one.y, view.smoothing)]);
        nulls.push([0, 1]);
      }
    }
    return uPlot.join(tables, nulls);
  }

  function seriesOf(panel) {
    return panel.series.flatMap((one, index) => {
      const stroke = () => color(`c${(one.color ?? index) % 8}`);
      const made = {
        label: one.label, stroke, width: 1.7, spanGaps: false, value: (_, value) => value == null ? "" : number(value),
        dash: one.dash ? [6, 4] : undefined,
        points: {show: one.kind === "points" || one.y.filter((value) => value != null).length < 3, size: 6, stroke, fill: stroke},
        paths: panel.steps ? uPlot.paths.stepped({align: -1}) : undefined,
      };
      const noisy = view.smoothing > 0 && one.kind !== "points" && !panel.steps;
      if (!noisy) return [made];
      const faint = () => color(`c${(one.color ?? index) % 8}`) + "48";
      return [{...made, label: `${one.label}, measured`, stroke: faint, width: 1}, made];
    });
  }

  // Vertical lines: restarts, skipped steps.
  function drawMarks(panel, axis) {
    return (plot) => {
      const marks = [...(panel.marks || []), ...(data.marks || [])];
      const {ctx, bbox} = plot;
      const ratio = devicePixelRatio;
      ctx.save();
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      for (const mark of marks) {
        const at = mark[axis];
        const {min, max} = plot.scales.x;
        if (at == null || at < min || at > max) continue;
        const place = Math.round(plot.valToPos(at, "x", true));
        ctx.strokeStyle = ctx.fillStyle = color(mark.color || "bad");
        ctx.lineWidth = ratio;
        ctx.setLineDash(mark.tick ? [] : [4 * ratio, 3 * ratio]);
        ctx.beginPath();
        ctx.moveTo(place, mark.tick ? bbox.top + bbox.height - 9 * ratio : bbox.top);
        ctx.lineTo(place, bbox.top + bbox.height);
        ctx.stroke();
        if (!mark.label) continue;
        const fits = place + 4 * ratio + ctx.measureText(mark.label).width < bbox.left + bbox.width;
        ctx.textAlign = fits ? "left" : "right";
        ctx.fillText(mark.label, place + (fits ? 3 : -3) * ratio, bbox.top + 10 * ratio);
      }
      ctx.restore();
    };
  }

  function scaleOf(panel) {
    const values = panel.series.flatMap((one) => one.y).filter((value) => value != null);
    const positive = values.length > 0 && values.every((value) => value > 0);
    if ((view.log || panel.log) && positive) return {distr: 3, log: panel.log || 10};
    const range = (_, low, high) => {
      if (low === high) return [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
      const [from, to] = uPlot.rangeNum(low, high, 0.08, false);
      return [low >= 0 ? Math.max(from, 0) : from, to];
    };
    return {range};
  }

  function chart(place, panel) {
    const box = document.createElement("div");
    box.className = "chart";
    box.append(Object.assign(document.createElement("h3"), {textContent: panel.title}));
    place.append(box);
    const axis = axisOf(panel);
    const line = {stroke: () => color("muted"), grid: {stroke: () => color("grid"), width: 1},
      ticks: {stroke: () => color("grid"), width: 1}, font: "11px system-ui, sans-serif"};
    const wordX = onX[axis];
    const options = {
      width: Math.max(box.clientWidth - 20, 200), height: 230,
      padding: [8, 12, 0, 0],
      series: [{label: axis, value: (_, value) => value == null ? "" : wordX(value)}, ...seriesOf(panel)],
      scales: {x: {time: false}, y: scaleOf(panel)},
      axes: [
        {...line, values: (_, ticks) => ticks.map(wordX), incrs: axis === "time" ? roundSeconds : undefined, space: axis === "time" ? 70 : 55, size: 30},
        {...line, size: 62, values: (_, ticks) => ticks.map((value) => value == null ? "" : number(value))},
      ],
      cursor: {drag: {x: true, y: false}, sync: {key: "run", setSeries: false}},
      hooks: {draw: [drawMarks(panel, axis)]},
      legend: {live: true},
    };
    const plot = new uPlot(options, aligned(panel, axis), box);
    plots.push(plot);
    const legend = box.querySelector(".u-legend");
    if (legend && panel.series.length > 4) { // of many runs, it would be longer than the curves
      const fold = document.createElement("details");
      fold.append(Object.assign(document.createElement("summary"), {textContent: `${panel.series.length} curves`}), legend);
      box.append(fold);
    }
    new ResizeObserver(() => {
      const width = Math.max(box.clientWidth - 20, 200);
      if (Math.abs(width - plot.width) > 1) plot.setSize({width, height: 230});
    }).observe(box);
  }

  function draw() {
    plots.splice(0).forEach((plot) => plot.destroy());
    for (const place of document.querySelectorAll("[data-panels]")) {
      place.replaceChildren();
      for (const panel of data.panels[place.dataset.panels]) chart(place, panel);
    }
  }

  for (const control of document.querySelectorAll("[data-view]")) {
    control.addEventListener("input", () => {
      const name = control.dataset.view;
      view[name] = control.type === "checkbox" ? control.checked : name === "smoothing" ? +control.value : control.value;
      draw();
    });
  }
  draw();
})();
