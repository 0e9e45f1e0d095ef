"use strict";
// Elements, numbers and plots. Text only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";

function fill(made, attributes, parts) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "on") for (const [event, run] of Object.entries(value || {})) made.addEventListener(event, run);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...parts.flat(Infinity).filter((p) => p !== null && p !== undefined));
  return made;
}
const h = (name, attributes, ...parts) => fill(document.createElement(name), attributes, parts);
const s = (name, attributes, ...parts) => fill(document.createElementNS(SVG, name), attributes, parts);

const round = (x) => (Number.isInteger(x) && Math.abs(x) < 1000 ? String(x) : x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : x >= 0.01 ? x.toFixed(2) : x.toExponential(1));
function scaled(x, units) {
  let k = 0;
  while (k < units.length - 1 && Math.abs(x) >= units[k + 1][0]) k++;
  return `${round(x / units[k][0])} ${units[k][1]}`;
}
const bytes = (n) => scaled(n, [[1, "B"], [1e3, "kB"], [1e6, "MB"], [1e9, "GB"], [1e12, "TB"]]);
const micros = (us) => (us === null || us === undefined ? "" : us > 0 && us < 0.01 ? "<0.01 µs" : scaled(us, [[1, "µs"], [1e3, "ms"], [1e6, "s"]]));
const count = (n) => scaled(n, [[1, ""], [1e3, "k"], [1e6, "M"], [1e9, "G"], [1e12, "T"]]).trim();
const some = (n, noun, many) => `${n.toLocaleString("en")} ${n === 1 ? noun : many || noun + "s"}`;

function plot(width, height, label, ...parts) {
  return s("svg", { class: width > 1000 ? "plot wide" : "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...parts);
}
const text = (x, y, what, more) => s("text", { x, y, ...(more || {}) }, what);
const told = (what) => s("title", {}, what);

function powers(low, high) {
  const found = [];
  for (let k = Math.ceil(Math.log10(low)); k <= Math.log10(high) + 1e-9; k++) found.push(10 ** k);
  return found;
}

/** GFLOP/s over FLOP/byte, both logarithmic, under the roof of a machine. */
function roofline(place, machine, points, pick) {
  const W = 640, H = 380, left = 56, right = 14, top = 16, low = 40;
  const peaks = Object.entries(machine.gflops).sort((a, b) => b[1] - a[1]);
  const peak = peaks[0][1], ridge = peak / machine.gbps;
  const xs = [0.05, ridge * 8, ...points.map((p) => p.x)], ys = [peak, ...points.map((p) => p.y)];
  const x0 = Math.min(...xs) / 1.5, x1 = Math.max(...xs) * 1.5;
  const y0 = Math.min(x0 * machine.gbps, ...ys) / 1.5, y1 = Math.max(...ys) * 1.8;
  const X = (x) => left + ((W - left - right) * Math.log(x / x0)) / Math.log(x1 / x0);
  const Y = (y) => H - low - ((H - low - top) * Math.log(y / y0)) / Math.log(y1 / y0);
  const parts = [];
  for (const x of powers(x0, x1)) parts.push(s("path", { class: "axis", d: `M${X(x)} ${top}V${H - low}` }), text(X(x), H - low + 14, round(x), { "text-anchor": "middle" }));
  for (const y of powers(y0, y1)) parts.push(s("path", { class: "axis", d: `M${left} ${Y(y)}H${W - right}` }), text(left - 6, Y(y) + 4, count(y), { "text-anchor": "end" }));
  parts.push(text((W + left) / 2, H - 6, "FLOP per byte", { "text-anchor": "middle" }), text(left, 10, `GFLOP/s on ${place}`));
  for (const [name, rate] of peaks) {
    const from = Math.max(x0, rate / machine.gbps);
    parts.push(s("path", { class: "roof", d: `M${X(from)} ${Y(rate)}H${W - right}` }), text(W - right, Y(rate) - 5, `${round(rate)} GFLOP/s in products of ${name}`, { class: "strong", "text-anchor": "end" }));
  }
  parts.push(s("path", { class: "roof", d: `M${X(x0)} ${Y(x0 * machine.gbps)}L${X(ridge)} ${Y(peak)}` }));
  parts.push(text(X(x0) + 8, Y(x0 * machine.gbps * 3) - 10, `${round(machine.gbps)} GB/s`, { class: "strong" }));
  const most = Math.max(...points.map((p) => p.us), 1e-9);
  for (const p of points) {
    const go = () => pick(p.step);
    parts.push(s("circle", { class: `point k-${p.what}`, cx: X(p.x), cy: Y(p.y), r: 3 + 7 * Math.sqrt(p.us / most), tabindex: 0, role: "button", on: { click: go, keydown: (e) => e.key === "Enter" && go() } },
      told(`${p.name}\n${round(p.x)} FLOP/byte, ${round(p.y)} GFLOP/s, ${round(p.gbps)} GB/s, ${micros(p.us)}`)));
  }
  return plot(W, H, `Roofline of ${place}`, ...parts);
}

/** Bytes alive at each step, with the peak. */
function memory(steps, pick) {
  const W = 1200, H = 240, left = 64, right = 14, top = 24, low = 26, n = steps.length;
  const peak = Math.max(...steps.map((m) => m[1]), 1), at = steps.findIndex((m) => m[1] === peak);
  const X = (k) => left + ((W - left - right) * k) / n, Y = (b) => H - low - ((H - low - top) * b) / peak;
  let d = `M${X(0)} ${Y(0)}`;
  steps.forEach((m, k) => (d += `V${Y(m[1]).toFixed(1)}H${X(k + 1).toFixed(1)}`));
  const parts = [0, 0.5, 1].flatMap((f) => [s("path", { class: "axis", d: `M${left} ${Y(peak * f)}H${W - right}` }), text(left - 6, Y(peak * f) + 4, bytes(peak * f), { "text-anchor": "end" })]);
  parts.push(s("path", { class: "area", d: `${d}V${Y(0)}Z` }), s("path", { class: "edge", d }));
  const x = (X(at) + X(at + 1)) / 2, side = x > W / 2 ? "end" : "start";
  parts.push(s("circle", { class: "peak", cx: x, cy: Y(peak), r: 3.5 }), text(x, Y(peak) - 8, `peak ${bytes(peak)} at step ${at}, ${steps[at][0]}`, { class: "strong", "text-anchor": side }));
  parts.push(text(left, H - 8, "step 0"), text(W - right, H - 8, `step ${n - 1}`, { "text-anchor": "end" }));
  const where = (e) => {
    const box = e.currentTarget.getBoundingClientRect(), k = Math.floor((((e.clientX - box.left) / box.width) * W - left) / ((W - left - right) / n));
    return Math.min(n - 1, Math.max(0, k));
  };
  const tip = told("");
  const made = plot(W, H, `Memory over ${n} steps, at most ${bytes(peak)}`, tip, ...parts);
  made.addEventListener("mousemove", (e) => { const k = where(e); tip.textContent = `step ${k}, ${steps[k][0]}: ${bytes(steps[k][1])}`; });
  made.addEventListener("click", (e) => pick(where(e)));
  return made;
}

/** What the host and each device did in one call; the time between launches is shaded. */
function timeline(events, kinds) {
  const W = 1200, left = 64, right = 14, row = 26, lanes = ["host", ...new Set(events.map((e) => e.tid).filter((x) => x !== "host"))];
  const start = Math.min(...events.map((e) => e.ts)), end = Math.max(...events.map((e) => e.ts + e.dur - start), 1e-9), H = 24 + lanes.length * (row + 8) + 20;
  const X = (us) => left + ((W - left - right) * us) / end, Y = (lane) => 24 + lanes.indexOf(lane) * (row + 8), parts = [], last = {};
  for (const lane of lanes) parts.push(text(left - 6, Y(lane) + 17, lane, { "text-anchor": "end" }), s("rect", { class: "k-gap", x: left, y: Y(lane), width: X(end) - left, height: row }));
  for (const e of events) {
    const at = e.ts - start, gap = Math.max(0, at - (last[e.tid] ?? at));
    last[e.tid] = at + e.dur;
    parts.push(s("rect", { class: `bar k-${kinds[e.name] || "library"}`, x: X(at).toFixed(2), y: Y(e.tid), width: Math.max(0.4, X(at + e.dur) - X(at)).toFixed(2), height: row }, told(`${e.name}: ${micros(e.dur)} on the ${e.tid}, ${micros(gap)} after the one before`)));
  }
  for (let k = 0; k <= 4; k++) parts.push(text(X((end * k) / 4), H - 6, micros((end * k) / 4), { "text-anchor": k === 4 ? "end" : k ? "middle" : "start" }));
  parts.push(text(left, 14, `one call: ${micros(end)}; shaded: nothing runs`));
  return plot(W, H, "Host and devices over time", ...parts);
}

/** The compilation as bars: all of it, its parts, their stages. */
function flame(stages) {
  const W = 1200, row = 24, total = stages.reduce((a, x) => a + x[2], 0) || 1e-9, parts = [];
  const groups = new Map();
  for (const [part, stage, seconds] of stages) groups.set(part, [...(groups.get(part) || []), { stage, seconds }]);
  const bar = (x, y, width, color, what, seconds) => {
    const label = `${what} ${micros(seconds * 1e6)}`;
    parts.push(s("g", {}, told(`${label}, ${((100 * seconds) / total).toFixed(1)}%`), s("rect", { class: `bar p${color % 6}`, x, y, width: Math.max(0.4, width), height: row - 1 }),
      width > label.length * 6.2 + 8 ? text(x + 5, y + 16, label, { class: "inbar" }) : null));
  };
  bar(0, 0, W, 0, "compilation", total);
  let x = 0, color = 1;
  for (const [part, inside] of groups) {
    const sum = inside.reduce((a, y) => a + y.seconds, 0);
    bar(x, row, (W * sum) / total, color, part, sum);
    let at = x;
    for (const y of inside) { bar(at, 2 * row, (W * y.seconds) / total, color, y.stage, y.seconds); at += (W * y.seconds) / total; }
    x = at; color++;
  }
  return plot(W, 3 * row, `Compilation: ${micros(total * 1e6)}`, ...parts);
}
