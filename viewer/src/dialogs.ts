// Keys, help, the picker of sequences, the menu and the table. `events` looks up keys in `KEYS`, and the help lists the
// same table: an action that is not in it cannot be done by keyboard and is not explained.

import type { App } from "./app";
import { Board, CHUNK, isNothing } from "./data";
import { count, exact, h, say, short, visible } from "./dom";
import { closePopup, openPopup } from "./popup";
import { finding, findings, nextChoice, nextMap } from "./toolbar";

interface Key {
  keys: string[];
  name: string;
  does: string;
  act: (app: App, event: KeyboardEvent) => void;
}
const many = (event: KeyboardEvent) => (event.shiftKey ? 10 : 1);

/** Every action has a key; the help lists this table. */
export const KEYS: Key[] = [
  { keys: ["ArrowRight"], name: "→", does: "next column (Shift: ten)", act: (app, e) => app.viewport.move(many(e), 0) },
  { keys: ["ArrowLeft"], name: "←", does: "previous column", act: (app, e) => app.viewport.move(-many(e), 0) },
  { keys: ["ArrowDown"], name: "↓", does: "next row", act: (app, e) => app.viewport.move(0, many(e)) },
  { keys: ["ArrowUp"], name: "↑", does: "previous row", act: (app, e) => app.viewport.move(0, -many(e)) },
  { keys: ["Home"], name: "Home", does: "first column", act: (app) => app.viewport.move(-1e9, 0) },
  { keys: ["End"], name: "End", does: "last column", act: (app) => app.viewport.move(1e9, 0) },
  { keys: ["+", "="], name: "+", does: "zoom in", act: (app) => app.viewport.zoom(1 / 1.5, app.state.column + 0.5) },
  { keys: ["-", "_"], name: "−", does: "zoom out", act: (app) => app.viewport.zoom(1.5, app.state.column + 0.5) },
  { keys: ["0"], name: "0", does: "fit all columns", act: (app) => app.set({ first: 0, last: 0, top: 0 }) },
  { keys: ["1", "2", "3", "4", "5"], name: "1–5", does: "what to show", act: (app, e) => app.showMetric(+e.key - 1) },
  { keys: ["n"], name: "n", does: "colours by row or over all rows", act: (app) => app.set({ norm: app.state.norm === "row" ? "global" : "row" }) },
  { keys: ["m"], name: "m", does: "another colour map", act: (app) => nextMap(app) },
  { keys: ["c"], name: "c", does: "another threshold of a contrast", act: (app) => nextChoice(app) },
  { keys: ["a"], name: "a", does: "zoomed out: largest or mean value", act: (app) => app.set({ pool: app.state.pool === "max" ? "mean" : "max" }) },
  { keys: ["l"], name: "l", does: "blocks, parts, all layers", act: (app) => {
    const all = ["blocks", "parts", "all"] as const;
    app.set({ depth: all[(all.indexOf(app.state.depth) + 1) % 3], toggled: [], top: 0 });
  } },
  { keys: ["Enter", "o"], name: "Enter", does: "unfold or fold the layer", act: (app) => app.viewport.fold() },
  { keys: ["x"], name: "x", does: "expand the layer to its heads and voxels (double click)", act: (app) => app.viewport.expand() },
  { keys: ["/"], name: "/", does: "find text or a layer", act: (app) => app.ui.search.focus() },
  { keys: ["f"], name: "f", does: "next finding", act: (app) => app.nextFinding() },
  { keys: ["s"], name: "s", does: "choose a sequence", act: (app) => openPicker(app) },
  { keys: ["PageDown"], name: "PgDn", does: "next sequence", act: (app) => turn(app, 1) },
  { keys: ["PageUp"], name: "PgUp", does: "previous sequence", act: (app) => turn(app, -1) },
  { keys: [" "], name: "Space", does: "pause or follow", act: (app) => app.viewport.follow() },
  { keys: ["e"], name: "e", does: "export and copy", act: (app) => openMenu(app) },
  { keys: ["t"], name: "t", does: "the same as a table", act: (app) => openTable(app) },
  { keys: ["d"], name: "d", does: "dark or light", act: (app) => app.theme() },
  { keys: ["?"], name: "?", does: "this help", act: (app) => openHelp(app) },
];

/** Whether a sequence that is chosen is followed: runs go on side by side, an earlier text does not. */
const follows = ({ data }: App) => data.board.kind === "run";

function turn(app: App, by: number): void {
  const sequence = app.state.sequence + by;
  if (sequence >= 0 && sequence < app.data.board.sequences) app.set({ sequence, follow: follows(app) });
  else app.tell(by > 0 ? "This is the last one." : "This is the first one.");
}

function whatYouSee({ kind, axis, ends }: Board): string {
  const layers = "each row a layer of the model, from its input at the top to its output at the bottom.";
  const sides = ends ? ` One colour is “${ends[0]}”, the other “${ends[1]}”.` : "";
  if (kind === "contrast")
    return `Each column is a block of the model, each row a kind of layer. Colour is the effect.${sides} Faint cells have a small statistic, outlined ones survive the threshold.`;
  if (kind === "diff") return `Each column is a ${axis}, ${layers} Colour is the difference.${sides}`;
  return `Each column is a ${axis}, ${layers} The brighter a cell, the stronger the layer at that ${axis}.`;
}

export function openHelp(app: App): void {
  const { board } = app.data;
  openPopup(app,
    h("div", { class: "help" },
      h("h2", {}, "What you see"),
      h("p", {}, `${whatYouSee(board)} Hatched cells are NaN or infinite, plain grey ones were ${board.missing?.[0] ?? "not measured"}. Click a cell to read it; drag to move, turn the wheel to zoom, double-click to see inside a layer.`),
      h("dl", {}, ...app.data.sequence.metrics.filter((each) => each.shown).flatMap((each) => [h("dt", {}, each.title), h("dd", {}, `${each.meaning} (${each.unit})`)])),
      h("h2", {}, "Keys"),
      h("dl", { class: "keys" }, ...KEYS.flatMap((each) => [h("dt", {}, h("kbd", {}, each.name)), h("dd", {}, each.does)]))),
    "Help");
}

export function openMenu(app: App): void {
  const items: [string, () => void][] = [
    ["PNG picture", () => void app.save("png")],
    ["SVG drawing", () => void app.save("svg")],
    ["CSV table", () => void app.save("csv")],
    ["Copy Python", () => app.copy(app.python(), "Python")],
    ["Copy link", () => app.copy(app.link(), "The link")],
  ];
  openPopup(app,
    h("div", { class: "menu" }, h("h2", {}, "Export what is in view"),
      ...items.map(([name, act]) => h("button", { onclick: () => { closePopup(app); act(); } }, name))),
    "Export");
}

/** All findings and notes in full, with what to do about them. */
export function openFindings(app: App): void {
  const all = findings(app).map((each) => {
    const item = finding(app, each);
    item.addEventListener("click", () => closePopup(app));
    return h("li", {}, item, each.advice && h("p", { class: "soft" }, each.advice));
  });
  openPopup(app, h("div", { class: "all-findings" }, h("h2", {}, "Findings and notes"), h("ul", {}, ...all)), "Findings");
}

export function openPicker(app: App): void {
  const kind = app.data.board.kind === "run" ? "run" : "sequence";
  const title = kind === "run" ? "Runs" : "Sequences";
  const list = h("ul", { class: "picker" });
  const said = h("p", { class: "soft" });
  let latest = 0;
  const search = async (text: string) => {
    const number = ++latest;
    const answer = await app.data.transport.ask("sequences", { search: text });
    if (number !== latest) return;
    said.textContent = `${count(answer.total, kind)}${answer.total > answer.found.length ? `, the first ${answer.found.length} are listed` : ""}`;
    list.replaceChildren(...answer.found.map((each: any) =>
      h("li", {}, h("button", { "aria-current": each.index === app.state.sequence ? "true" : undefined, onclick: () => { closePopup(app); app.set({ sequence: each.index, follow: follows(app) }); } },
        h("b", { dir: "auto" }, short(visible(each.text || each.name), 70)), each.condition && h("span", { class: "tag" }, short(each.condition, 30)), h("span", { class: "soft" }, count(each.columns, app.data.board.axis))))));
  };
  const input = h("input", { type: "search", placeholder: "Search texts, names and conditions", "aria-label": `Search ${kind}s` });
  input.addEventListener("input", () => void search(input.value));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") list.querySelector("button")?.click();
  });
  const content = h("div", {}, h("h2", {}, title), input, said, list);
  content.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const stops: HTMLElement[] = [input, ...list.querySelectorAll("button")];
    stops[stops.indexOf(app.root.activeElement as HTMLElement) + by]?.focus();
  });
  openPopup(app, content, title);
  void search("");
}

const [MOST_ROWS, MOST_COLUMNS] = [200, 40];

/** Rows in view as a table, for whoever reads better than they see: its columns begin at the crosshair, and buttons lead on. */
export function openTable(app: App): void {
  const { scene, state } = app;
  const [seen, end] = [Math.max(0, Math.floor(scene.first)), Math.min(scene.columns, Math.ceil(scene.first + scene.width / scene.cell))];
  const rows = app.rows.slice(Math.floor(scene.top), Math.floor(scene.top) + MOST_ROWS);
  const fits = end - seen <= MOST_COLUMNS && state.column >= seen && state.column < end;
  let first = fits ? seen : Math.max(0, Math.min(state.column - MOST_COLUMNS / 2, scene.columns - MOST_COLUMNS));
  const [head, body, said] = [h("tr", {}), h("tbody", {}), h("span", { role: "status" })];
  const turn = (by: number) => {
    first = Math.max(0, Math.min(first + by, scene.columns - MOST_COLUMNS));
    void show();
  };
  const before = h("button", { onclick: () => turn(-MOST_COLUMNS) }, `← ${MOST_COLUMNS} before`);
  const after = h("button", { onclick: () => turn(MOST_COLUMNS) }, `${MOST_COLUMNS} after →`);
  const nothing = app.data.board.missing?.[0] ?? "not measured";
  const show = async () => {
    const last = Math.min(scene.columns, first + MOST_COLUMNS, fits && first === seen ? end : Infinity);
    const asked = first;
    [before.disabled, after.disabled] = [first <= 0, last >= scene.columns];
    said.textContent = `${app.metric?.unit ?? ""}; columns ${first} to ${last - 1} of ${scene.columns.toLocaleString("en")}, ${count(rows.length, "row")} in view; –: ${nothing} `;
    const columns = Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i);
    await Promise.all([first, last - 1].map((t) => app.data.loadChunk(Math.floor(Math.max(0, t) / CHUNK))));
    const values = await app.exported().values(first, last);
    if (asked !== first) return; // another part was asked for meanwhile
    head.replaceChildren(h("th", { scope: "col" }, "layer"), ...columns.map((t) =>
      h("th", { scope: "col", "aria-current": t === state.column ? "true" : undefined }, `${t} ${short(visible(app.data.piece(t)?.text ?? ""), 12)}`)));
    body.replaceChildren(...rows.map((row) =>
      h("tr", {}, h("th", { scope: "row" }, row.name || "model"), ...Array.from(values.get(row.name) ?? [], (x, i) => (isNothing(values.get(row.name)!, i) ? h("td", { title: nothing }, "–") : h("td", { title: exact(x) }, say(x)))))));
  };
  openPopup(app,
    h("div", { class: "table" }, h("h2", {}, app.metric?.title ?? ""),
      h("p", { class: "soft" }, said, before, " ", after),
      h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Values" }, h("table", {}, h("thead", {}, head), body))),
    "Table");
  void show();
}
