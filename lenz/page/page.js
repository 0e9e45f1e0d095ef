// The sections of the page, from the data that it holds.

const DATA = JSON.parse(document.getElementById("data").textContent);
const SHOWN = 200, ROW = 24; // rows of a table before "show all"; pixels of a row of the list
const body = (id) => document.querySelector(`#${id} .body`);
const put = (id, ...parts) => body(id).replaceChildren(...parts.flat(Infinity).filter(Boolean));
const note = (what) => h("p", { class: "note" }, what);
const cost = (x) => (x.measured ? x.measured.device : x.us);

/** Texts of kernels, decompressed at the first use. */
let unpacked = null;
function heavy() {
  unpacked ||= (async () => {
    const text = atob(document.getElementById("heavy").textContent), packed = new Uint8Array(text.length);
    for (let k = 0; k < text.length; k++) packed[k] = text.charCodeAt(k);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  })();
  return unpacked;
}

/** A table that sorts by its columns and shows some of its rows; columns: [title, value, cell, is a number]. */
function table(columns, rows, options = {}) {
  let order = options.order ?? null, down = true, all = false, wanted = "";
  const inside = h("tbody"), more = h("button", { class: "plain", type: "button", on: { click: () => { all = true; draw(); } } });
  const heads = columns.map(([title, value, , number], k) =>
    h("th", { scope: "col", class: number && "num" }, value ? h("button", { type: "button", on: { click: () => { down = order === k ? !down : !!number; order = k; draw(); } } }, title) : title));
  const draw = () => {
    let found = wanted ? rows.filter((r) => options.text(r).toLowerCase().includes(wanted)) : rows;
    if (order !== null) {
      const value = columns[order][1], sign = down ? -1 : 1;
      const less = (a, b) => (a === b ? 0 : a === null || a === undefined ? 1 : b === null || b === undefined ? -1 : a < b ? -sign : sign);
      found = [...found].sort((a, b) => less(value(a), value(b)));
    }
    heads.forEach((head, k) => (k === order ? head.setAttribute("aria-sort", down ? "descending" : "ascending") : head.removeAttribute("aria-sort")));
    inside.replaceChildren(...(all ? found : found.slice(0, SHOWN)).map((r) => {
      const go = options.pick && (() => options.pick(r));
      return h("tr", { tabindex: go && 0, on: go && { click: go, keydown: (e) => e.key === "Enter" && go() } },
        columns.map(([, value, cell, number, wrap]) => h("td", { class: number ? "num" : wrap ? "wrap" : null }, cell ? cell(r) : String(value(r) ?? ""))));
    }));
    more.hidden = all || found.length <= SHOWN;
    more.textContent = `Show all ${found.length.toLocaleString("en")} rows`;
  };
  const filter = options.text && h("input", { type: "search", placeholder: options.hint, "aria-label": options.hint, on: { input: (e) => { wanted = e.target.value.toLowerCase(); draw(); } } });
  draw();
  return h("div", {}, filter ? h("div", { class: "tools" }, filter) : null, h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), inside)), more);
}
const mono = (what) => h("span", { class: "mono" }, what);

/** The launches and calls in order; the edges of the chosen one; its texts below. */
function steps(graph, index) {
  const rows = graph.steps, users = rows.map(() => []);
  rows.forEach((r, k) => r.needs.forEach((n) => users[n].push(k)));
  const edges = s("svg", { class: "edges", height: rows.length * ROW, "aria-hidden": true });
  const inner = h("div", { class: "inner" }), list = h("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Launches and calls in order" }, inner);
  const below = h("div", {});
  inner.style.height = `${rows.length * ROW}px`;
  let chosen = -1, drawn = "";
  const draw = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 10), last = Math.min(rows.length, first + 40), now = `${first} ${chosen}`;
    if (now === drawn) return;
    drawn = now;
    const made = [];
    for (let k = first; k < last; k++) {
      const r = rows[k], count = r.what === "kernel" ? `${r.nodes_count} node${r.nodes_count === 1 ? "" : "s"}` : r.kind;
      const row = h("div", { class: `row ${r.what}${k === chosen ? " picked" : ""}`, role: "option", id: `step-${k}`, "aria-selected": String(k === chosen), on: { click: () => pick(k) } },
        h("span", { class: "no" }, String(k)), h("span", { class: "dot" }), h("span", { class: "name mono" }, r.name),
        h("span", { class: "from" }, `${count} — ${r.origins.filter((o) => !r.lines.includes(o)).join(", ")}`), h("span", { class: "time" }, micros(cost(r))));
      row.style.top = `${k * ROW}px`;
      made.push(row);
    }
    inner.replaceChildren(...made, edges);
  };
  const arcs = () => {
    const at = (k) => k * ROW + ROW / 2, right = edges.clientWidth || 96;
    const arc = (k, name) => {
      const reach = right - 14 - Math.min(right - 22, 8 + 9 * Math.log2(1 + Math.abs(chosen - k)));
      return s("path", { class: name, d: `M${right - 4} ${at(k)}C${reach} ${at(k)} ${reach} ${at(chosen)} ${right - 4} ${at(chosen)}` });
    };
    edges.replaceChildren(...rows[chosen].needs.map((k) => arc(k, "in")), ...users[chosen].map((k) => arc(k, "out")));
  };
  async function pick(k) {
    chosen = k;
    if (k * ROW < list.scrollTop || (k + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = k * ROW - list.clientHeight / 2;
    list.setAttribute("aria-activedescendant", `step-${k}`);
    draw();
    arcs();
    if (typeof DecompressionStream === "undefined") return below.replaceChildren(note("Lines, IR and code need a browser of 2023 or later."));
    const all = (await heavy())[index];
    if (chosen !== k) return; // another one was chosen meanwhile
    const step = rows[k], kernel = step.what === "kernel" ? all.kernels[step.name] : null;
    below.replaceChildren(h("h3", {}, `Step ${k}: `, mono(step.name)), note(facts(step, users[k])), panes(step, all.steps[k], kernel, DATA.sources));
  }
  list.addEventListener("scroll", draw);
  list.addEventListener("keydown", (e) => {
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -rows.length, End: rows.length };
    if (!(e.key in moves)) return;
    e.preventDefault();
    pick(Math.min(rows.length - 1, Math.max(0, chosen + moves[e.key])));
  });
  const key = h("p", { class: "note" }, "Choose a row, or a row of another table:", ...["kernel", "library", "eager"].flatMap((k) => [h("i", { class: `key ${k}` }), k === "kernel" ? "kernel of lenz" : k === "library" ? "library call" : "eager call"]),
    ". The arcs lead to the steps that it needs (blue) and that need it (orange).");
  const plan = h("details", { on: { toggle: async (e) => { if (e.target.open && !plan.querySelector(".lines")) plan.append(pane("The plan", (await heavy())[index].source.split("\n").map((x) => ({ text: x })), "No plan: the graph runs in eager.")); } } }, h("summary", {}, "The plan as Python: what runs"));
  return { parts: [key, list, below, plan], draw, pick: (k) => { pick(k); document.getElementById("graph-section").scrollIntoView(); list.focus({ preventScroll: true }); }, first: () => rows.length && pick(0) };
}

function facts(x, users) {
  const parts = [`${x.what === "kernel" ? x.kind + " kernel" : x.what === "library" ? "library call" : `eager call (${x.kind})`} on ${x.place}`, `reads ${x.loads.join(", ") || "nothing"}`, `writes ${x.stores.join(", ") || "nothing"}`];
  if (x.mutated_args.length) parts.push(`changes the arguments ${x.mutated_args.join(", ")}`);
  parts.push(`${bytes(x.bytes_read)} in, ${bytes(x.bytes_written)} out, ${count(x.flops)} FLOP`);
  if (x.us !== null) parts.push(`about ${micros(x.us)}`);
  if (x.measured) parts.push(`measured ${micros(x.measured.device)}`);
  parts.push(`needs steps ${x.needs.join(", ") || "none"}; needed by ${users.join(", ") || "none"}`);
  return parts.join("; ");
}

/** One row for each kernel or call and line, over its launches. */
function costs(graph) {
  const found = new Map();
  graph.steps.forEach((x, k) => {
    const line = x.lines.at(-1) || "", key = `${x.name}\n${line}`, row = found.get(key) || { ...x, line, step: k, launches: 0, total: 0, nbytes: 0, work: 0, estimate: x.us === null ? null : 0 };
    row.launches++;
    row.total += cost(x) || 0;
    if (x.us !== null) row.estimate += x.us;
    row.nbytes += x.bytes_read + x.bytes_written;
    row.work += x.flops;
    found.set(key, row);
  });
  for (const r of found.values()) {
    r.gbps = r.measured && r.total ? r.nbytes / r.total / 1e3 : null;
    r.gflops = r.measured && r.total && (r.work || r.what === "kernel") ? r.work / r.total / 1e3 : null;
    r.limit = r.measured && r.total && r.estimate !== null ? r.estimate / r.total : null;
  }
  return [...found.values()];
}
const short = (line) => (line ? line.split("/").slice(-2).join("/") : "");

/** Why a graph has no steps. */
function nothing(graph) {
  return note(graph.skips.length ? "No call is known: the graph runs in eager." : "Nothing is launched: the results are views, arguments or numbers.");
}

function kernels(graph, pick) {
  if (!graph.steps.length) return nothing(graph);
  const timed = graph.steps.some((x) => x.measured);
  const columns = [
    ["name", (r) => r.name, (r) => h("div", { class: "cut mono", title: r.name }, h("i", { class: `key ${r.what}` }), r.name)],
    ["kind", (r) => r.kind], ["line", (r) => r.line, (r) => h("div", { class: "cut", title: r.line }, short(r.line))],
    ["launches", (r) => r.launches, null, true], ["bytes", (r) => r.nbytes, (r) => bytes(r.nbytes), true], ["FLOP", (r) => r.work, (r) => (r.work || r.what === "kernel" ? count(r.work) : "no formula"), true],
    ["estimated", (r) => r.estimate, (r) => micros(r.estimate), true],
  ];
  if (timed) columns.push(
    ["measured", (r) => (r.measured ? r.total : null), (r) => (r.measured ? micros(r.total) : ""), true], ["GB/s", (r) => r.gbps, (r) => (r.gbps === null ? "" : round(r.gbps)), true], ["GFLOP/s", (r) => r.gflops, (r) => (r.gflops === null ? "" : round(r.gflops)), true],
    ["of the limit", (r) => r.limit, (r) => (r.limit === null ? "" : `${(100 * r.limit).toFixed(0)}%`), true], ["launch", (r) => r.measured?.host ?? null, (r) => micros(r.measured?.host), true], ["gap before", (r) => r.measured?.gap ?? null, (r) => micros(r.measured?.gap), true]);
  const order = timed ? 7 : 6, text = (r) => `${r.name} ${r.kind} ${r.line} ${r.origins.join(" ")}`;
  return [table(columns, costs(graph), { order, text, hint: "Filter by name, kind, op or line", pick: (r) => pick(r.step) }),
    timed ? null : note(graph.steps.every((x) => x.us === null) ? "No times: the device is not on the machine that wrote the page." : "Only estimates: the time that the bytes take at the bandwidth of a copy, or the operations at the rate of a matrix product. lenz.explain(fn, profile=10) measures.")];
}

function roof(graph, pick) {
  if (!graph.steps.length) return nothing(graph);
  const rows = costs(graph), timed = rows.filter((r) => r.measured);
  const plots = Object.entries(DATA.machines).map(([place, machine]) => {
    const mine = (timed.length ? timed : rows).filter((r) => r.place === place && r.work > 0 && r.nbytes > 0 && r.total > 0);
    const points = mine.map((r) => ({ ...r, x: r.work / r.nbytes, y: r.work / r.total / 1e3, gbps: r.nbytes / r.total / 1e3, us: r.total }));
    const rest = rows.filter((r) => r.place === place).length - mine.length;
    return h("div", {}, roofline(place, machine, points, pick), rest ? note(`${some(rest, "row")} without floating-point work, or without a known formula for it, ${rest === 1 ? "is" : "are"} not shown.`) : null);
  });
  const why = "No roofline: the device of this graph is not on the machine that wrote the page.";
  return [timed.length || !plots.length ? null : note("No times were measured, so each point lies on the roof. lenz.explain(fn, profile=10) measures."), plots.length ? h("div", { class: "plots" }, plots) : note(why)];
}

function grouped(rows, key) {
  const found = new Map();
  for (const r of rows) found.set(key(r), [...(found.get(key(r)) || []), r]);
  return [...found].sort((a, b) => b[1].length - a[1].length);
}

/** Groups of rows behind their reason, each a table that is made when it is opened. */
function folded(groups, columns, pick) {
  return groups.map(([why, rows], k) => {
    const made = h("details", { on: { toggle: () => { if (made.open && !made.querySelector("table")) made.append(table(columns, rows, { pick })); } } }, h("summary", {}, `${why} (${rows.length.toLocaleString("en")})`));
    if (k === 0 && rows.length <= 12) made.open = true;
    return made;
  });
}

function apart(graph, pick) {
  const rows = graph.apart;
  const parts = folded(grouped(rows, (r) => r.why), [["first", (r) => r.first, (r) => mono(r.first)], ["second", (r) => r.second, (r) => mono(r.second)], ["steps", (r) => r.steps[0], (r) => r.steps.join(" and ")]], (r) => r.steps.length && pick(r.steps.at(-1)));
  if (graph.ended_by) parts.push(note(`The graph ends at a graph break, behind which nothing can join it: ${graph.ended_by}`));
  return parts.length ? parts : note(graph.skips.length ? "The graph runs in eager, which fuses nothing." : "Nothing: all neighbours share a kernel, or there are none.");
}

function calls(graph, pick) {
  const rows = graph.steps.map((x, k) => ({ ...x, step: k, line: x.lines.at(-1) || "" })).filter((x) => x.what !== "kernel");
  const parts = graph.skips.map((why) => note(`The graph runs in eager: ${why}`));
  const groups = grouped(rows, (r) => (r.what === "library" ? `${r.name}: library, by choice` : `${r.name}: in eager, because ${r.kind}`)).sort((a, b) => (a[1][0].what === "eager" ? 0 : 1) - (b[1][0].what === "eager" ? 0 : 1));
  parts.push(...folded(groups, [["step", (r) => r.step, null, true], ["line", (r) => r.line], ["bytes", (r) => r.bytes_read + r.bytes_written, (r) => bytes(r.bytes_read + r.bytes_written), true], ["FLOP", (r) => r.flops, (r) => (r.flops ? count(r.flops) : "no formula"), true], ["time", cost, (r) => micros(cost(r)), true]], (r) => pick(r.step)));
  return parts.length ? parts : note("None: kernels compute all of it.");
}

function memories(graph, pick) {
  if (!graph.timeline.length || !graph.peak) return note(graph.skips.length ? "Not known: eager allocates for itself." : "The graph allocates nothing.");
  const reused = graph.allocs.filter((a) => a.reused_from !== null).length;
  return [memory(graph.timeline, (k) => graph.timeline.length === graph.steps.length && pick(k)), note(`${some(graph.allocs.length, "buffer")}, of which ${reused.toLocaleString("en")} take the memory of a dead one. Arguments, constants and memory inside of libraries are not counted.`)];
}

function times(graph) {
  if (!DATA.profile) return note("No times: lenz.explain(fn, profile=10)(*args) measures 10 calls, as `--profile 10` does on the command line.");
  const mine = DATA.profile.events.filter((e) => e.args.graph === graph.name);
  if (!mine.length) return note("No call of this graph was timed.");
  const kinds = Object.fromEntries(graph.steps.map((x) => [x.name, x.what]));
  const gaps = [], last = {}, order = mine.filter((e) => e.tid !== "host" || mine.every((x) => x.tid === "host"));
  for (const e of order) {
    const before = last[e.tid];
    if (before) gaps.push({ after: before.name, before: e.name, us: e.ts - before.ts - before.dur });
    last[e.tid] = e;
  }
  gaps.sort((a, b) => b.us - a.us);
  return [timeline(mine, kinds), h("h3", {}, "The longest gaps"), gaps.length ? table([["gap", (g) => g.us, (g) => micros(g.us), true], ["after", (g) => g.after, (g) => mono(g.after)], ["before", (g) => g.before, (g) => mono(g.before)]], gaps.slice(0, 10)) : note("There is one launch alone."), note(`Watched calls run by Python and without CUDA graphs, so that gaps are longer than otherwise. ${DATA.profile.summary}`)];
}

function torchSide(graph) {
  const parts = [h("h3", {}, "Symbols")];
  parts.push(graph.symbols.length ? table([["size", (x) => x.name, (x) => mono(x.name)], ["of", (x) => x.sources.join(", ")], ["least", (x) => x.least, null, true], ["most", (x) => x.most ?? "any", null, true], ["in this call", (x) => x.example, null, true]], graph.symbols) : note("None: all sizes are constants of the code. Another size needs another compilation, or dynamic=True."));
  if (graph.facts.length) parts.push(note(`Assumed, until a call breaks it: ${graph.facts.join(", ")}.`));
  parts.push(h("h3", {}, `Guards (${graph.guards || graph.conditions.length})`), graph.conditions.length ? folded(grouped(graph.conditions, (g) => g.kind), [["on", (g) => g.on, (g) => mono(g.on), false, true], ["line", (g) => g.line]]) : note("Not known for this graph: torch keeps its guards with the forward half."));
  parts.push(h("h3", {}, "Recompiles, of all graphs"));
  parts.push(DATA.recompiles.length ? table([["compilation", (r) => r.id], ["of", (r) => r.code, (r) => mono(r.code)], ["guard that failed", (r) => r.guard, (r) => mono(r.guard), false, true], ["what to do", (r) => r.advice, (r) => mono(r.advice), false, true]], DATA.recompiles) : note("None in the calls of this report."));
  return parts;
}

function graphs(graph) {
  const told = graph.cuda_graph ? note(`In the calls of this report: ${graph.cuda_graph}`) : null;
  if (!graph.regions.length) return [told, note("None: option cuda_graphs is off, or the graph has nothing on a GPU. mode=\"reduce-overhead\" turns it on.")];
  return [told, table([["part", (r) => r.kind, (r) => (r.kind === "graph" ? "one CUDA graph" : "outside of graphs")], ["device", (r) => r.device], ["launches and calls", (r) => r.steps.length, null, true], ["why", (r) => r.why, null, false, true], ["first", (r) => r.steps[0], (r) => mono(r.steps[0] || "")]], graph.regions)];
}

function tuning(graph) {
  if (!graph.autotune.length) return note("None: mode=\"max-autotune\" times several tiles of each GPU kernel; kernels of CPUs have one.");
  return graph.autotune.map((t) => h("details", {}, h("summary", {}, t.told + (t.remembered ? " (remembered)" : "")), table([["tile", (x) => x.config, (x) => mono(x.config)], ["time", (x) => x.us, (x) => (x.us === null ? x.why : micros(x.us)), true]], t.tried, { order: null })));
}

function totals(choose) {
  const all = DATA.graphs.flatMap((g) => g.steps), sum = (f) => all.reduce((a, x) => a + (f(x) || 0), 0);
  const seconds = DATA.graphs.flatMap((g) => g.timings).reduce((a, x) => a + x[2], 0), timed = all.length && all.every((x) => x.measured);
  const cards = [
    [DATA.graphs.length, DATA.graphs.length === 1 ? "graph" : "graphs"], [DATA.launches.toLocaleString("en"), "launches and calls in this call"], [`${DATA.ops.kernels} / ${DATA.ops.libraries} / ${DATA.ops.eager}`, "ops in kernels / libraries / eager"],
    [bytes(sum((x) => x.bytes_read + x.bytes_written)), "read and written"], [count(sum((x) => x.flops)), "FLOP"], [all.some((x) => x.us !== null) ? micros(sum((x) => x.us)) : "not here", "estimated by bytes and FLOP"],
    [timed ? micros(sum((x) => x.measured.device)) : "not measured", "on the devices"], [bytes(Math.max(0, ...DATA.graphs.map((g) => g.peak))), "at most, beside the arguments"], [micros(seconds * 1e6), "to compile"],
  ];
  const of = (g, what) => g.steps.filter((x) => x.what === what).length;
  return [h("div", { class: "cards" }, cards.map(([number, what]) => h("div", { class: "card" }, h("b", {}, String(number)), h("span", {}, what)))),
    DATA.graphs.length > 1 ? [h("h3", {}, "Graphs"), table([["graph", (g) => g.title, (g) => mono(g.title)], ["kernels", (g) => of(g, "kernel"), null, true], ["library", (g) => of(g, "library"), null, true], ["eager", (g) => of(g, "eager"), null, true], ["peak", (g) => g.peak, (g) => bytes(g.peak), true], ["ended by", (g) => g.ended_by, null, false, true]], DATA.graphs, { pick: (g) => choose(DATA.graphs.indexOf(g)) })] : null].flat();
}

function start() {
  const select = document.getElementById("graph");
  const show = (k) => {
    const graph = DATA.graphs[k], list = steps(graph, k);
    select.value = String(k);
    put("graph-section", list.parts);
    put("kernels", kernels(graph, list.pick));
    put("roofline", roof(graph, list.pick));
    put("apart", apart(graph, list.pick));
    put("calls", calls(graph, list.pick));
    put("memory", memories(graph, list.pick));
    put("time", times(graph));
    put("compile", graph.timings.length ? flame(graph.timings) : note("Nothing was compiled: the graph runs in eager."));
    put("torch", torchSide(graph));
    put("cuda-graphs", graphs(graph));
    put("tuning", tuning(graph));
    list.draw();
    requestAnimationFrame(() => setTimeout(list.first)); // the tables come first
  };
  const nav = document.querySelector("nav");
  for (const section of document.querySelectorAll("section")) nav.append(h("a", { href: `#${section.id}` }, section.querySelector("h2").textContent));
  put("totals", totals(show));
  if (!DATA.graphs.length) for (const section of document.querySelectorAll("section")) if (section.id !== "totals") put(section.id, note("There is no graph."));
  if (!DATA.graphs.length) return put("graph-section", note("torch captured no graph: the function has no tensor operation, or all of them are at graph breaks. TORCH_LOGS=graph_breaks says where."));
  DATA.graphs.forEach((g, k) => select.append(h("option", { value: String(k) }, g.title)));
  document.getElementById("choose").hidden = DATA.graphs.length < 2;
  select.addEventListener("change", () => show(Number(select.value)));
  show(0);
}
start();
document.documentElement.dataset.ready = "yes";
