// What belongs together: the user's lines, the nodes of the graph, the kernel, its emitted code.
//
// A line has keys: "L file:line", "D name" where it defines a buffer, "R name" where it reads one.
// Names of parameters and values become those of buffers, so that all four speak of the same things.

/** The keys of a line of a kernel's IR; `names` maps parameters and values to buffers. */
function irKeys(line, names) {
  const keys = [];
  for (const m of line.matchAll(/(store[^(]*)\(%(a\d+)|load\(%(a\d+)/g)) {
    const name = names.get(m[2] || m[3]);
    if (name) keys.push((m[1] ? "D " : "R ") + name);
  }
  const made = /^\s*(v\d+) = |[{;] (v\d+) = (?:reduce|scan)/.exec(line);
  for (const m of line.matchAll(/\bv\d+\b/g)) {
    const name = names.get(m[0]);
    if (name) keys.push((made && (made[1] || made[2]) === m[0] ? "D " : "R ") + name);
  }
  return keys;
}

/** The keys of each line of Triton's text: parameters have the kernel's names. */
function tritonKeys(lines, names) {
  return lines.map((line) => [...line.matchAll(/tl\.(load|store|atomic_\w+)\((a\d+)/g)].filter((m) => names.has(m[2])).map((m) => (m[1] === "load" ? "R " : "D ") + names.get(m[2])));
}

/** The keys of each line of LLVM's text: addresses are followed back to the parameter. */
function llvmKeys(lines, names) {
  let from = new Map();
  return lines.map((line) => {
    if (line.startsWith("define ")) from = new Map();
    const root = (r) => { const p = /^%p(\d+)$/.exec(r); return p ? names.get("a" + p[1]) : from.get(r); };
    const made = /^\s*(%[\w.]+) = (getelementptr|phi|select) /.exec(line);
    if (made) {
      const found = (line.slice(made[0].length).match(/%[\w.]+/g) || []).map(root).find((x) => x);
      if (found && (made[2] === "getelementptr" || line.includes(" ptr "))) from.set(made[1], found);
      return [];
    }
    const is = /\b(load|store)\b|@llvm\.[\w.]*?(load|store|gather|scatter)/.exec(line);
    if (!is) return [];
    const kind = /load|gather/.test(is[1] || is[2]) ? "R " : "D ";
    return [...new Set((line.match(/%[\w.]+/g) || []).map(root).filter((x) => x))].map((x) => kind + x);
  });
}

/** A pane of lines; each has its text, its keys and, for the user's, its number. */
function pane(title, rows, empty) {
  const lines = h("div", { class: "lines", tabindex: 0, role: "region", "aria-label": title });
  const inside = h("div", {});
  for (const row of rows) {
    const made = h("div", { class: ["l", row.file ? "file" : "", row.faint ? "context" : "", row.keys && row.keys.length ? "linked" : ""].filter(Boolean).join(" ") },
      row.at ? h("span", { class: "at" }, String(row.at)) : null, row.text || " ");
    made.keys = row.keys || [];
    inside.append(made);
  }
  if (!rows.length) inside.append(h("div", { class: "l context" }, empty));
  lines.append(inside);
  return h("div", { class: "pane" }, h("h3", {}, title), lines);
}

/** Light the lines of all panes that share a key with the one under the pointer, or the chosen one. */
function synchronise(panes) {
  const all = () => [...panes.querySelectorAll(".l.linked")];
  let pinned = null;
  const light = (line, scroll) => {
    const own = line ? line.keys : [], defined = own.filter((k) => !k.startsWith("R "));
    const keys = new Set(defined.length ? defined : own);
    for (const other of all()) {
      other.classList.toggle("lit", line !== null && other.keys.some((k) => keys.has(k)));
      other.classList.toggle("from", other === line);
    }
    if (!scroll || !line) return;
    for (const lines of panes.querySelectorAll(".lines")) {
      const first = lines.querySelector(".lit");
      if (first && !lines.contains(line)) lines.scrollTop = first.offsetTop - lines.offsetTop - 40;
    }
  };
  const lineOf = (e) => e.target.closest(".l.linked");
  panes.addEventListener("mouseover", (e) => { const line = lineOf(e); if (line && !pinned) light(line, false); });
  panes.addEventListener("mouseleave", () => { if (!pinned) light(null, false); });
  panes.addEventListener("click", (e) => {
    const line = lineOf(e);
    if (!line) return;
    pinned = line === pinned ? null : line;
    light(pinned, true);
  });
  panes.addEventListener("keydown", (e) => { // in a pane, the arrows move from line to line
    if (!["ArrowDown", "ArrowUp", "Escape"].includes(e.key) || !e.target.classList.contains("lines")) return;
    const lines = [...e.target.querySelectorAll(".l.linked")], at = lines.indexOf(pinned);
    if (!lines.length) return;
    e.preventDefault();
    pinned = e.key === "Escape" ? null : lines[Math.min(lines.length - 1, Math.max(0, at + (e.key === "ArrowDown" ? 1 : -1)))];
    light(pinned, true);
    if (pinned) pinned.scrollIntoView({ block: "nearest" });
  });
}

/** The three columns of a launch or call. */
function panes(step, heavy, kernel, sources) {
  const nodes = heavy.nodes || [], names = new Map(Object.entries(heavy.values || {}));
  for (const [parameter, buffer] of heavy.args || []) names.set(parameter, buffer);
  const keysOf = (n) => [...n.lines.map((l) => "L " + l), ...n.defines.map((d) => "D " + d), ...n.reads.map((r) => "R " + r)];
  const user = [];
  const files = new Map();
  for (const line of step.lines) {
    const colon = line.lastIndexOf(":"), file = line.slice(0, colon);
    files.set(file, (files.get(file) || new Set()).add(line.slice(colon + 1)));
  }
  for (const [file, mine] of files) {
    user.push({ text: file, file: true });
    const known = sources[file] || {}, near = Object.keys(known).map(Number).filter((n) => [...mine].some((m) => Math.abs(n - m) <= 2)).sort((a, b) => a - b);
    const indents = near.filter((n) => known[n].trim()).map((n) => known[n].search(/\S/)), cut = Math.min(...indents, 99);
    let before = null;
    for (const n of near) {
      if (before !== null && n > before + 1) user.push({ text: "⋯", faint: true });
      before = n;
      const key = `L ${file}:${n}`, here = nodes.filter((x) => x.lines.includes(`${file}:${n}`));
      const keys = mine.has(String(n)) ? [key, ...here.flatMap(keysOf)] : [];
      user.push({ at: n, text: known[n].slice(cut) || " ", faint: !mine.has(String(n)), keys });
    }
    if (!near.length) user.push({ text: "(the lines cannot be read here)", faint: true });
  }
  const ir = [];
  for (const n of nodes) n.text.split("\n").forEach((text) => ir.push({ text, keys: keysOf(n) }));
  if (kernel) {
    if (ir.length) ir.push({ text: "" }, { text: "the kernel:", faint: true });
    kernel.ir.trimEnd().split("\n").forEach((text) => ir.push({ text, keys: irKeys(text, names) }));
  }
  const lines = kernel && kernel.code ? kernel.code.trimEnd().split("\n") : [];
  const keys = step.place === "cpu" ? llvmKeys(lines, names) : tritonKeys(lines, names);
  const code = lines.map((text, k) => ({ text, keys: keys[k] }));
  const made = h("div", { class: "panes" },
    pane("Your lines", user, "No line of yours is known."),
    pane(kernel ? "IR: nodes of the graph, then the kernel" : "IR", ir, "A call: it has no IR of its own."),
    pane(kernel ? (step.place === "cpu" ? "Emitted code: LLVM" : "Emitted code: Triton") : "Emitted code", code, "A call: lenz emits no code for it."));
  synchronise(made);
  return made;
}
