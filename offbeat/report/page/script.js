"use strict";
/* The report's own script: the theme, charts that are drawn once they come into view, and the table of samples.
   Texts of the run are written as text nodes only. */
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const root = document.documentElement;

  /* ---- theme */
  const system = matchMedia("(prefers-color-scheme: dark)");
  const remember = (theme) => { try { localStorage.setItem("offbeat-theme", theme); } catch { /* a locked browser */ } };
  const remembered = () => { try { return localStorage.getItem("offbeat-theme"); } catch { return null; } };
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  if (remembered()) root.dataset.theme = remembered();

  /* ---- charts */
  const colours = read("colours-data");
  const charts = read("charts-data");
  const drawn = new Map();

  const themed = (item) => {
    if (!isDark()) return item;
    const swap = (value) => {
      if (typeof value === "string") return colours[value] || value;
      if (Array.isArray(value)) return value.map(swap);
      if (value && typeof value === "object") {
        return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, swap(inner)]));
      }
      return value;
    };
    return swap(item);
  };

  const draw = async (place) => {
    const old = drawn.get(place);
    drawn.set(place, null);
    if (old) old.clear();
    place.replaceChildren();
    drawn.set(place, await Bokeh.embed.embed_item(themed(charts[place.dataset.chart]), place.id));
  };

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || drawn.has(entry.target)) continue;
      seen.unobserve(entry.target);
      draw(entry.target);
    }
  }, { rootMargin: "400px" });
  document.querySelectorAll("[data-chart]").forEach((place) => seen.observe(place));

  const redraw = () => [...drawn.keys()].forEach(draw);
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    remember(root.dataset.theme);
    redraw();
  });
  system.addEventListener("change", () => { if (!root.dataset.theme) redraw(); });
  addEventListener("beforeprint", () => document.querySelectorAll("[data-chart]").forEach((place) => {
    if (!drawn.has(place)) draw(place);
  }));

  /* ---- samples */
  const table = document.getElementById("rows");
  if (!table) return;
  const PAGE = 25;
  const data = read("samples-data");
  const at = Object.fromEntries(data.columns.map((name, place) => [name, place]));
  const rows = data.rows.map((row, place) => {
    const get = (name) => row[at[name]];
    const prompt = data.prompts[get("prompt")];
    return {
      place, prompt, kind: get("kind"), step: get("step"), version: get("version"), lag: get("lag"),
      completion: get("completion") || "", reward: get("reward"), parts: get("components") || {},
      finish: get("finish"), tokens: get("tokens"), ordinal: get("ordinal"),
      searched: (prompt + "\n" + (get("completion") || "")).toLowerCase(),
    };
  });
  const rewards = rows.map((row) => row.reward).filter((value) => Number.isFinite(value));
  const lowest = rewards.reduce((a, b) => Math.min(a, b), Infinity);
  const highest = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
  const COLUMNS = [
    ["kind", "kind", ""], ["step", "step", "number"], ["version", "version", "number minor"], ["lag", "lag", "number"],
    ["prompt", "prompt", "wide"], ["completion", "completion", "wide"], ["reward", "reward", "number"],
    ["finish", "end", "minor"], ["tokens", "tokens", "number"],
  ];
  const field = (id) => document.getElementById(id);
  let sort = { key: "step", ascending: false };
  let shown = rows;
  let page = 0;

  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  const marked = (text, wanted) => {
    const made = element("div", "text");
    const lower = text.toLowerCase();
    let from = 0;
    for (let hit = wanted ? lower.indexOf(wanted) : -1; hit >= 0; hit = lower.indexOf(wanted, from)) {
      made.append(text.slice(from, hit), element("mark", "", text.slice(hit, hit + wanted.length)));
      from = hit + wanted.length;
    }
    made.append(text.slice(from));
    return made;
  };

  const number = (value) => (Number.isFinite(value) ? String(Math.round(value * 1e4) / 1e4) : "–");

  const rewardCell = (row) => {
    const cell = element("div", "score");
    const pill = element("span", "reward", number(row.reward));
    const share = highest > lowest ? (row.reward - lowest) / (highest - lowest) : 0.5;
    pill.style.background = `color-mix(in srgb, var(--${share >= 0.5 ? "teal" : "rose"}) ${Math.round(10 + 36 * Math.abs(share - 0.5))}%, transparent)`;
    cell.append(pill);
    for (const [name, value] of Object.entries(row.parts)) {
      cell.append(element("div", "parts", `${name} ${value === null ? "none" : number(value)}`));
    }
    return cell;
  };

  const line = (row, wanted) => {
    const made = element("tr");
    for (const [key, label, name] of COLUMNS) {
      const cell = element("td", name);
      cell.dataset.label = label;
      if (key === "kind") cell.append(element("span", "kind", row.kind));
      else if (key === "prompt" || key === "completion") cell.append(marked(row[key], wanted));
      else if (key === "reward") cell.append(rewardCell(row));
      else cell.append(row[key] === null || row[key] === undefined ? "–" : String(row[key]));
      made.append(cell);
    }
    made.addEventListener("click", () => {
      if (!getSelection().toString()) made.classList.toggle("open");
    });
    return made;
  };

  const compare = (a, b) => {
    const [left, right] = [a[sort.key], b[sort.key]];
    if (left === right) return a.place - b.place;
    if (left === null || left === undefined) return 1;
    if (right === null || right === undefined) return -1;
    return (left < right ? -1 : 1) * (sort.ascending ? 1 : -1);
  };

  const show = () => {
    const wanted = field("search").value.trim().toLowerCase();
    const part = shown.slice(page * PAGE, (page + 1) * PAGE);
    table.tBodies[0].replaceChildren(...part.map((row) => line(row, wanted)));
    const first = shown.length ? page * PAGE + 1 : 0;
    field("count").textContent = `${first} to ${page * PAGE + part.length} of ${shown.length.toLocaleString("en")} completions`;
    field("before").disabled = page === 0;
    field("after").disabled = (page + 1) * PAGE >= shown.length;
    for (const head of table.tHead.rows[0].cells) {
      head.setAttribute("aria-sort", head.dataset.key !== sort.key ? "none" : sort.ascending ? "ascending" : "descending");
    }
  };

  const bound = (id, missing) => (field(id).value === "" ? missing : Number(field(id).value));

  const filter = () => {
    const wanted = field("search").value.trim().toLowerCase();
    const [kind, finish] = [field("kind").value, field("finish").value];
    const [from, to] = [bound("from", -Infinity), bound("to", Infinity)];
    const [least, most] = [bound("least", -Infinity), bound("most", Infinity)];
    shown = rows.filter((row) => (!kind || row.kind === kind) && (!finish || row.finish === finish)
      && row.step >= from && row.step <= to && row.reward >= least && row.reward <= most
      && (!wanted || row.searched.includes(wanted))).sort(compare);
    page = 0;
    show();
  };

  for (const [key, label, name] of COLUMNS) {
    const head = element("th", name);
    head.dataset.key = key;
    head.scope = "col";
    const button = element("button", "", label);
    button.type = "button";
    button.addEventListener("click", () => {
      sort = { key, ascending: sort.key === key ? !sort.ascending : true };
      filter();
    });
    head.append(button);
    table.tHead.rows[0].append(head);
  }
  for (const id of ["kind", "finish"]) {
    for (const value of [...new Set(rows.map((row) => row[id]))].filter(Boolean).sort()) {
      field(id).append(new Option(value, value));
    }
  }
  field("filters").addEventListener("input", filter);
  field("filters").addEventListener("submit", (event) => event.preventDefault());
  field("filters").addEventListener("reset", () => setTimeout(filter));
  field("before").addEventListener("click", () => { page -= 1; show(); });
  field("after").addEventListener("click", () => { page += 1; show(); });
  filter();
})();
