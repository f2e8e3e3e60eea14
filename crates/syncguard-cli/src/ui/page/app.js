"use strict";
// Shows the state that the server sends. Keys are inserted as text only, never as markup.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

let state = null;
let received = 0;
let sort = { by: "acquiredAtMs", descending: false };
// The page of the pager, or null while the table follows the state.
let browsed = null;
let breaking = null;

// The token is in a cookie by now; keep it out of the history and of bookmarks.
if (location.search) history.replaceState(null, "", location.pathname);

const now = () => state.nowMs + (performance.now() - received);

function duration(ms) {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} m ${seconds % 60} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} m`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// The median, and below it the slow ones.
function showPercentiles(id, figures) {
  $(id).textContent = figures ? duration(figures.p50) : "–";
  $(`${id}-more`).textContent = figures
    ? `p90 ${duration(figures.p90)} · p99 ${duration(figures.p99)}` : "";
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function showFigures() {
  $("store").textContent = state.store ?? "";
  $("error").hidden = !state.error;
  $("error").textContent = state.error ?? "";
  $("held").textContent = state.error ? "–" : `${state.held}${state.isPartial ? "+" : ""}`;
  const oldest = Math.min(...state.locks.map((lock) => lock.acquiredAtMs));
  $("oldest").textContent = state.locks.length ? duration(now() - oldest) : "–";
  showPercentiles("hand-overs", state.handOvers);
  showPercentiles("waits", state.waits);
  showPercentiles("holds", state.holds);
}

function showChecks() {
  const items = state.checks.map((check) => {
    const item = element("li", check.severity);
    item.append(element("b", "", check.severity), ` ${check.subject}: ${check.text}`);
    return item;
  });
  $("checks").replaceChildren(...items);
}

function compare(one, two) {
  const [a, b] = [one[sort.by] ?? "", two[sort.by] ?? ""];
  const order = a < b ? -1 : a > b ? 1 : one.shown < two.shown ? -1 : 1;
  return sort.descending ? -order : order;
}

function lockRow(lock) {
  const row = element("tr");
  row.append(element("td", "key", lock.shown));
  row.append(element("td", "", lock.holder ?? "–"));
  row.append(element("td", "number", duration(now() - lock.acquiredAtMs)));
  const left = lock.expiresAtMs - now();
  row.append(element("td", left < 0 ? "number late" : "number", left < 0 ? "expired" : duration(left)));
  row.append(element("td", "number", lock.waiters ?? "–"));
  row.append(element("td", "number", lock.fence ? lock.fence.replace(/^0+(?=.)/, "") : "–"));
  const action = element("td", "action");
  if (state.mayBreak) {
    const button = element("button", "", "Break …");
    button.type = "button";
    button.addEventListener("click", () => askToBreak(lock));
    action.append(button);
  }
  row.append(action);
  return row;
}

function showLocks() {
  const filter = $("filter").value;
  const source = browsed ? browsed.locks : state.locks;
  const rows = source.filter((lock) => browsed || lock.shown.includes(filter)).sort(compare);
  $("locks").replaceChildren(...rows.map(lockRow));
  $("no-locks").hidden = rows.length > 0 || Boolean(state.error);
  $("no-locks").textContent = filter || browsed ? "No lock matches." : "No locks are held.";
  $("pager").hidden = !state.hasMore && !browsed;
  $("first").disabled = !browsed;
  $("next").disabled = browsed ? !browsed.next : !state.hasMore;
  $("range").textContent = browsed
    ? `page ${browsed.number}`
    : `first ${state.locks.length}${state.isPartial ? " of many" : ` of ${state.held}`}`;
  for (const head of document.querySelectorAll("th[data-sort]")) {
    if (head.dataset.sort === sort.by) {
      head.setAttribute("aria-sort", sort.descending ? "descending" : "ascending");
    } else {
      head.removeAttribute("aria-sort");
    }
  }
}

function showTimeline() {
  const rows = state.timeline;
  $("no-timeline").hidden = rows.length > 0;
  if (!rows.length) return $("timeline").replaceChildren();
  const [lane, left, top] = [26, 190, 18];
  const width = Math.max(600, $("timeline").clientWidth);
  const height = top + rows.length * lane + 4;
  const shown = Number($("window").value);
  const [to, from] = [now(), now() - shown];
  const x = (ms) => left + ((Math.max(ms, from) - from) / (to - from)) * (width - left - 8);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  svg.append(shape("title", {}, "Who held which lock when"));
  const hatch = shape("pattern", {
    id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
  });
  hatch.append(shape("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 5 }));
  svg.append(hatch);
  for (let part = 0; part <= 5; part += 1) {
    const at = from + (shown * part) / 5;
    const ago = Math.round((to - at) / 1000);
    const label = part === 5 ? "now" : ago % 60 ? `−${ago} s` : `−${ago / 60} m`;
    const anchor = part === 5 ? "end" : "middle";
    svg.append(shape("line", { class: "lane", x1: x(at), x2: x(at), y1: top - 4, y2: height }));
    svg.append(shape("text", { x: x(at), y: 11, "text-anchor": anchor }, label));
  }
  rows.forEach((row, index) => {
    const y = top + index * lane;
    const key = shape("text", { class: "key", x: 0, y: y + 17 });
    key.textContent = row.shown.length > 24 ? `${row.shown.slice(0, 23)}…` : row.shown;
    key.append(shape("title", {}, row.shown));
    svg.append(key, shape("line", { class: "lane", x1: 0, x2: width, y1: y + lane, y2: y + lane }));
    for (const queue of row.queues) {
      if (queue.toMs < from) continue;
      const strip = shape("rect", {
        class: "wait", x: x(queue.fromMs), y: y + 17, height: 6,
        width: Math.max(2, x(queue.toMs) - x(queue.fromMs)),
      });
      strip.append(shape("title", {}, `up to ${queue.most} waiting`));
      svg.append(strip);
    }
    for (const hold of row.holds) {
      const end = hold.toMs ?? to;
      if (end < from) continue;
      const bar = shape("rect", {
        class: hold.toMs === null ? "hold live" : "hold",
        x: x(hold.fromMs), y: y + 4, rx: 2, height: 12,
        width: Math.max(1.5, x(end) - x(hold.fromMs)),
      });
      const fence = hold.fence ? `fence ${hold.fence.replace(/^0+(?=.)/, "")}, ` : "";
      const waited = hold.waitedMs === null ? "" : `waited ${duration(hold.waitedMs)}, `;
      const holder = hold.holder ? `${hold.holder}: ` : "";
      bar.append(shape("title", {},
        `${holder}${fence}${waited}held for ${duration(end - hold.fromMs)}, ${hold.end ?? "held now"}`));
      svg.append(bar);
      if (hold.end === "expired" || hold.end === "broken") {
        svg.append(shape("rect", {
          class: `mark ${hold.end}`, x: x(end) - 1.5, y: y + 2, width: 3, height: 16, rx: 1,
        }));
      }
    }
  });
  $("timeline").replaceChildren(svg);
}

function show() {
  if (!state) return;
  showFigures();
  showLocks();
  showTimeline();
}

async function browse(after, number) {
  const parameters = new URLSearchParams({ filter: $("filter").value });
  if (after) parameters.set("after", after);
  const response = await fetch(`locks?${parameters}`);
  if (!response.ok) {
    $("range").textContent = await response.text();
    return;
  }
  browsed = { ...(await response.json()), number };
  show();
}

function askToBreak(lock) {
  breaking = lock;
  $("break-key").textContent = lock.shown;
  $("confirmation").value = "";
  $("break-now").disabled = true;
  $("break-result").textContent = "";
  $("break").showModal();
}

async function breakNow() {
  $("break-now").disabled = true;
  const response = await fetch("break", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({
      key: breaking.key,
      lockIdHash: breaking.lockIdHash,
      confirmation: $("confirmation").value,
    }),
  });
  const text = await response.text();
  if (!response.ok) {
    $("break-result").textContent = text;
  } else if (JSON.parse(text).broken) {
    $("break").close();
  } else {
    $("break-result").textContent = "The holder changed; nothing was broken.";
  }
}

for (const head of document.querySelectorAll("th[data-sort]")) {
  head.addEventListener("click", () => {
    const by = head.dataset.sort;
    sort = { by, descending: sort.by === by && !sort.descending };
    show();
  });
}
$("filter").addEventListener("input", () => {
  if (browsed || state?.hasMore) browse(null, 1);
  else show();
});
$("window").addEventListener("change", show);
$("first").addEventListener("click", () => { browsed = null; show(); });
$("next").addEventListener("click", () => browse(browsed?.next, (browsed?.number ?? 0) + 1));
$("confirmation").addEventListener("input", () => {
  $("break-now").disabled = $("confirmation").value !== breaking.shown;
});
$("break-now").addEventListener("click", breakNow);
$("break-cancel").addEventListener("click", () => $("break").close());

const events = new EventSource("events");
events.addEventListener("message", (event) => {
  state = JSON.parse(event.data);
  received = performance.now();
  if (state.nowMs === undefined) return;
  $("status").textContent = state.error ? "the store does not answer" : "live";
  $("status").className = state.error ? "off" : "";
  showChecks();
  show();
});
events.addEventListener("error", () => {
  $("status").textContent = "syncguard ui does not answer; retrying";
  $("status").className = "off";
});
setInterval(() => { if (state?.nowMs !== undefined) show(); }, 1000);
