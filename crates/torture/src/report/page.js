"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const tip = document.getElementById("tip");
const COLORS = ["#2f6fdb", "#73a7ff", "#0f8b6d", "#5cc9a7", "#8a4fd0", "#bd93f0", "#c2185b", "#f06292"];
const DARK = matchMedia("(prefers-color-scheme: dark)").matches;

function add(parent, tag, text, attributes) {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  Object.assign(element, attributes || {});
  parent.append(element);
  return element;
}
const seconds = (ms) => (ms / 1000).toFixed(ms < 10000 ? 2 : 1) + " s";
const count = (n) => n.toLocaleString("en-US");

function table(parent, head, rows, numeric) {
  const box = add(parent, "div", null, { className: "scroll" });
  const element = add(box, "table");
  const line = add(element, "tr");
  head.forEach((text, i) => add(line, "th", text, { className: numeric(i) ? "number" : "" }));
  for (const row of rows) {
    const line = add(element, "tr");
    row.forEach((text, i) => add(line, "td", text, { className: numeric(i) ? "number" : "" }));
  }
}

// A timeline: a lane per locker, holds as bars, faults as bands. The wheel zooms, a drag moves.
function timeline(parent, run, key, from, to, marks) {
  const LANE = 16, TOP = 18, LEFT = 128;
  const faults = run.faults.map((f, i) => ({ name: f[0], client: f[1], from: f[2], to: f[3] }));
  const height = TOP + run.lanes.length * LANE + 24;
  const canvas = add(parent, "canvas");
  canvas.style.height = height + "px";
  let view = [from, to];
  const perClient = run.lanes.length / (new Set(run.lanes.map((l) => l.split(",")[0]))).size;
  const x = (t) => LEFT + ((t - view[0]) / (view[1] - view[0])) * (canvas.clientWidth - LEFT - 8);
  function draw() {
    const scale = devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * scale;
    canvas.height = height * scale;
    const c = canvas.getContext("2d");
    c.scale(scale, scale);
    c.font = "11px system-ui, sans-serif";
    const ink = DARK ? "#e6e9ee" : "#1d2430", soft = DARK ? "#9aa4b2" : "#5c6675";
    const bottom = TOP + run.lanes.length * LANE;
    c.save();
    c.beginPath(); c.rect(LEFT, 0, canvas.clientWidth - LEFT, height); c.clip();
    for (const f of faults) {
      const top = f.client === null ? TOP : TOP + f.client * perClient * LANE;
      const tall = f.client === null ? bottom - TOP : perClient * LANE;
      c.fillStyle = f.client === null ? "rgba(232,120,61,.20)" : "rgba(232,163,61,.24)";
      c.fillRect(x(f.from), top, Math.max(1, x(f.to) - x(f.from)), tall);
    }
    for (const [a, b] of marks || []) {
      c.fillStyle = "rgba(198,40,40,.22)";
      c.fillRect(x(a) - 1, TOP - 6, Math.max(3, x(b) - x(a)), bottom - TOP + 12);
    }
    for (const [lane, a, b, fence, how] of key.holds) {
      if (b < view[0] || a > view[1]) continue;
      const left = x(a), wide = Math.max(1, x(b) - left), y = TOP + lane * LANE;
      c.fillStyle = COLORS[lane % COLORS.length];
      c.globalAlpha = how === "expired" ? .55 : 1;
      c.fillRect(left, y + 2, wide, LANE - 4);
      c.globalAlpha = 1;
      if (wide > 8 + 6.2 * String(fence).length) {
        c.fillStyle = "#fff";
        c.fillText(fence, left + 4, y + LANE - 4.5);
      }
    }
    for (const [t] of key.refused) {
      c.strokeStyle = "#c62828";
      c.beginPath(); c.moveTo(x(t) - 3, bottom + 1); c.lineTo(x(t) + 3, bottom + 7);
      c.moveTo(x(t) + 3, bottom + 1); c.lineTo(x(t) - 3, bottom + 7); c.stroke();
    }
    c.strokeStyle = soft; c.setLineDash([3, 3]);
    c.beginPath(); c.moveTo(x(run.calm), TOP - 4); c.lineTo(x(run.calm), bottom); c.stroke();
    c.setLineDash([]);
    c.fillStyle = soft;
    const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 30000, 60000, 300000];
    const step = steps.find((s) => (view[1] - view[0]) / s < 14) || 600000;
    for (let t = Math.ceil(view[0] / step) * step; t <= view[1]; t += step) {
      c.fillText(step < 1000 ? t.toFixed(0) + " ms" : t / 1000 + " s", x(t) + 2, bottom + 19);
      c.fillRect(x(t), bottom, 1, 4);
    }
    c.restore();
    c.fillStyle = ink;
    run.lanes.forEach((lane, i) => c.fillText(lane, 8, TOP + i * LANE + LANE - 4.5));
  }
  const timeAt = (event) => {
    const px = event.clientX - canvas.getBoundingClientRect().left;
    return view[0] + ((px - LEFT) / (canvas.clientWidth - LEFT - 8)) * (view[1] - view[0]);
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const t = timeAt(event), by = event.deltaY > 0 ? 1.3 : 1 / 1.3;
    view = [t - (t - view[0]) * by, t + (view[1] - t) * by];
    draw();
  }, { passive: false });
  let drag = null;
  canvas.addEventListener("pointerdown", (event) => { drag = timeAt(event); canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; });
  canvas.addEventListener("dblclick", () => { view = [from, to]; draw(); });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointermove", (event) => {
    const t = timeAt(event);
    if (drag !== null) { view = [view[0] + drag - t, view[1] + drag - t]; draw(); return; }
    const near = 2 * (view[1] - view[0]) / canvas.clientWidth;
    const lane = Math.floor((event.clientY - canvas.getBoundingClientRect().top - TOP) / LANE);
    const lines = [seconds(t)];
    for (const h of key.holds) {
      if (h[0] === lane && h[1] - near <= t && t <= h[2] + near) {
        lines.push(`${run.lanes[h[0]]}: fence ${h[3]}, ${(h[2] - h[1]).toFixed(1)} ms, ${h[4]}`);
        if (lines.length > 6) break;
      }
    }
    for (const f of faults) {
      if (f.from <= t && t <= f.to) lines.push(f.name + (f.client === null ? "" : ` (client ${f.client + 1})`));
    }
    tip.textContent = lines.join("\n");
    tip.hidden = false;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  addEventListener("resize", draw);
  draw();
}

function gaps(parent, run) {
  if (!run.gaps.length) return;
  const at = (share) => run.gaps[Math.min(run.gaps.length - 1, Math.floor(run.gaps.length * share))];
  add(parent, "h3", "Hand-over of hot keys");
  add(parent, "p", "Time from a release to the next grant, faults included.");
  const edges = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
  const bins = edges.map(() => 0).concat(0);
  for (const gap of run.gaps) {
    const found = edges.findIndex((edge) => gap < edge);
    bins[found < 0 ? edges.length : found] += 1;
  }
  const canvas = add(parent, "canvas");
  canvas.style.height = "110px";
  const scale = devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale; canvas.height = 110 * scale;
  const c = canvas.getContext("2d");
  c.scale(scale, scale);
  c.font = "10px system-ui, sans-serif";
  const wide = canvas.clientWidth / bins.length, most = Math.max(...bins);
  bins.forEach((n, i) => {
    c.fillStyle = COLORS[0];
    c.fillRect(i * wide + 2, 88 - (80 * n) / most, wide - 4, (80 * n) / most);
    c.fillStyle = DARK ? "#9aa4b2" : "#5c6675";
    const text = i < edges.length ? "<" + (edges[i] < 1000 ? edges[i] + " ms" : edges[i] / 1000 + " s") : "more";
    if (wide > 34 || i % 2 === 0) c.fillText(text, i * wide + 3, 102);
  });
  add(parent, "p", `median ${at(.5)} ms, 90 % ${at(.9)} ms, 99 % ${at(.99)} ms`);
}

function violations(parent, run) {
  if (!run.violationCount) return;
  add(parent, "h3", `${count(run.violationCount)} broken promises`, { className: "bad" });
  for (const v of run.violations) {
    const box = add(parent, "div", null, { className: "violation" });
    add(box, "h3", `${v.rule}: ${v.what}` + (v.key === null ? "" : ` (key ${v.key})`));
    add(box, "p", `${v.from.toFixed(1)} ms to ${v.to.toFixed(1)} ms. Repeat the run with:`);
    add(box, "code", run.command);
    const key = run.keys.find((k) => k.key === v.key);
    if (!key || !v.ops.length) continue;
    const first = Math.min(...v.ops.map((o) => o[4])), last = v.to;
    const pad = Math.max(20, (last - first) * .08);
    add(box, "p", "");
    timeline(box, run, key, first - pad, last + pad, [[v.from, v.to]]);
    add(box, "p", "");
    table(box, ["locker", "operation", "lock id", "TTL", "begin", "end", "outcome"],
      v.ops.map((o) => [run.lanes[o[0]], o[1], "#" + o[2], o[3] ? o[3] + " ms" : "", o[4].toFixed(2) + " ms",
        o[5] === null ? "" : o[5].toFixed(2) + " ms", o[6]]), (i) => i === 3 || i === 4 || i === 5);
  }
}

function faultTable(parent, run) {
  const kinds = {};
  for (const [name] of run.faults) kinds[name] = (kinds[name] || 0) + 1;
  add(parent, "h3", "Faults");
  table(parent, ["fault", "times"], Object.entries(kinds).sort().map(([n, c]) => [n, count(c)]), (i) => i === 1);
}

function show() {
  add(main, "h1", "syncguard torture");
  const broken = data.runs.filter((run) => run.violationCount).length;
  const runs = data.runs.length === 1 ? "1 run" : `${data.runs.length} runs`;
  add(main, "p", `syncguard ${data.version}. ${runs}, ` +
    (broken ? `${broken} with broken promises.` : "no promise was broken."), { className: broken ? "bad" : "good" });
  const names = data.runs.length ? data.runs[0].figures.map(([name]) => name) : [];
  table(main, [""].concat(data.runs.map((run) => run.name)),
    names.map((name, i) => [name].concat(data.runs.map((run) => count(run.figures[i][1])))), (i) => i > 0);
  for (const run of data.runs) {
    add(main, "h2", run.name + (run.bug ? `, with the planted bug ${run.bug}` : ""));
    add(main, "p", `${run.store}. ${seconds(run.length)}, ${count(run.faults.length)} faults until ` +
      `${seconds(run.calm)}. Seed ${run.seed}.`);
    add(main, "code", run.command);
    violations(main, run);
    const legend = add(main, "div", null, { className: "legend" });
    run.lanes.forEach((lane, i) => {
      const item = add(legend, "span");
      const dot = add(item, "i"); dot.style.background = COLORS[i % COLORS.length];
      item.append(lane);
    });
    for (const [color, text] of [["rgba(232,163,61,.4)", "a fault at a client"], ["rgba(232,120,61,.4)", "a fault at the store"],
      ["#c62828", "a stale write refused (×)"]]) {
      const item = add(legend, "span");
      const dot = add(item, "i"); dot.style.background = color;
      item.append(text);
    }
    add(main, "p", "Bars are held locks with their fences; a pale bar ended by expiry, or without an answer. The wheel zooms, dragging moves, a double click resets. The dashed line is the end of the faults.");
    for (const key of run.keys) {
      add(main, "h3", `Key ${key.key} (${key.kind}): ${count(key.holds.length)} grants, ` +
        `${count(key.contended)} attempts while held, ${count(key.unknown)} unknown outcomes, ` +
        `${count(key.refused.length)} stale writes refused`);
      timeline(main, run, key, 0, run.length);
    }
    const columns = add(main, "div", null, { className: "columns" });
    gaps(add(columns, "div"), run);
    faultTable(add(columns, "div"), run);
  }
}
show();
