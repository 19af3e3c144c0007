// The details at the crosshair (or below the mouse): the exact value, the row that it is in, and panels about it.
// Numbers here are the stored float32 values, never those of tiles, which are rounded to a byte. The panel is filled
// by several answers; each is dropped if the crosshair has moved on. Drawn by `screen`.

import type { App } from "./app";
import { scaleOf } from "./colour";
import { isNothing } from "./data";
import { breakable, count, exact, h, refill, say, short, visible } from "./dom";
import { RowFacts, bars, factsOf, histogram, standing } from "./facts";
import { Panel, drawPanel } from "./panels";
import { Row } from "./rows";

const NOTHING = "not measured";

export function renderDetails(app: App): void {
  const at = app.hover && app.hover.row >= 0 ? app.hover : { row: app.rowIndex, column: app.state.column };
  const row = app.rows[at.row];
  if (!row || app.data.index !== app.state.sequence) return;
  if (!app.data.columns) {
    if (app.screen.once("details", "")) app.ui.details.replaceChildren();
    return;
  }
  const key = JSON.stringify([row.name, at.column, app.state.metric, app.state.sequence, app.data.columns, app.state.follow, app.streams, app.data.board.id, app.plane(row.plane)?.header?.version, !!app.data.piece(at.column)]);
  if (!app.screen.once("details", key)) return markBeyond(app, row);
  void fill(app, row, at.column, key).catch((error: Error) => {
    app.ui.details.replaceChildren(h("p", {}, error.message));
    app.ui.details.removeAttribute("aria-busy");
  });
}

async function fill(app: App, row: Row, column: number, key: string): Promise<void> {
  const { data, state, ui } = app;
  ui.details.setAttribute("aria-busy", "true"); // what stands there is about another cell
  const values = await data.row(state.metric, row.plane, row.index);
  // While tokens stream in, as little as possible is asked: every question costs the process that scans.
  const curves = app.streams && app.state.follow && data.board.axis === "token" ? [] : data.sequence.tracks;
  const tracks = await Promise.all(curves.map((_, i) => data.row("tracks", "tracks", i)));
  if (!app.screen.is("details", key) || data.index !== state.sequence) return; // the crosshair is elsewhere by now
  const value = values[column];
  const facts = factsOf(values);
  const word = data.board.axis;
  const header = app.plane(row.plane)?.header;
  const missing = isNothing(values, column);
  const shown = missing ? data.board.missing?.[0] ?? NOTHING : say(value);
  const [parts, panels] = [h("div", {}), h("div", {})];
  const own = [
    ...histogram(facts, value, !!header?.logarithmic || (facts.min > 0 && facts.max > 30 * facts.median)),
    h("dl", {}, fact("mean", say(facts.mean)), fact("median", say(facts.median)), fact("std", say(facts.std)),
      facts.nonfinite ? fact("no value", count(facts.nonfinite, word)) : "", facts.zeros ? fact("zeros", String(facts.zeros)) : ""),
    ...curveFacts(app, column, tracks), parts,
  ];
  const further = [panels, ...data.sequence.panels.map((each) => panel(app, each))];
  refill(ui.details,
    ...heading(app, row, column),
    h("div", { class: "value" }, h("b", { title: exact(value) }, shown), h("span", {}, app.metric?.unit ?? "")),
    h("p", { class: "sentence" }, missing ? data.board.missing?.[1] ?? "Nothing was measured here." : sentence(value, facts, word), h("span", { class: "beyond", "data-value": value })),
    // Whether an effect can be believed, and where the others are, comes before how the row runs.
    ...(data.board.kind === "contrast" ? [...further, ...own] : [...own, ...further]),
    h("div", { class: "buttons" },
      h("button", { onclick: () => app.copy(row.name, "The name") }, "Copy name"),
      h("button", { onclick: () => app.copy(app.python(), "Python") }, "Copy Python"),
      h("button", { onclick: () => app.copy(app.link(), "The link") }, "Copy link")));
  markBeyond(app, row);
  if (!app.screen.told) ui.status.textContent = reading(app, row, column, shown);
  app.screen.told = false;
  await fillPanels(app, row, column, key, panels);
  await fillParts(app, row, column, key, parts);
  if (!app.screen.is("details", key)) return;
  Object.assign(ui.details.dataset, { row: row.name, column: String(column) });
  ui.details.removeAttribute("aria-busy");
}

/** Say that the value is beyond the colour bar; the bar changes without anything being asked again. */
function markBeyond(app: App, row: Row): void {
  const mark = app.ui.details.querySelector<HTMLElement>(".beyond");
  const header = app.plane(row.plane)?.header;
  if (!mark || !header) return;
  const [size, bar] = [Math.abs(Number(mark.dataset.value)), scaleOf(header, app.state.norm, row.index).high];
  mark.textContent = Number.isFinite(size) && size > bar ? ` Beyond the colour bar, which ends at ${say(bar)}.` : "";
}

/** A name with its number; what is too long for half of the width gets a line of its own. */
const fact = (name: string, text: string) => h("div", { class: name.length + text.length > 17 ? "long" : "" }, h("dt", {}, name), h("dd", {}, text));

/** The curves at a column. */
function curveFacts({ data }: App, column: number, values: Float32Array[]): HTMLElement[] {
  const { pair, axis } = data.board;
  const facts = values.map((each, i) => {
    const { title, beside } = data.sequence.tracks[i];
    const name = title[0].toLowerCase() + title.slice(1) + (pair && !beside ? `, ${pair[1]}` : "");
    return fact(name, isNothing(each, column) ? NOTHING : say(each[column]));
  });
  return facts.length ? [h("h2", {}, `This ${axis}`), h("dl", { class: pair ? "wide" : "" }, ...facts)] : [];
}

function heading(app: App, row: Row, column: number): HTMLElement[] {
  const { data } = app;
  const word = data.board.axis;
  const piece = data.piece(column);
  const type = row.plane === "layers" ? data.board.types[row.index] : "voxel";
  const written = piece?.generated ? ", written by the model" : piece?.special ? ", special" : "";
  const place = h("div", { class: "place" }, h("code", { title: row.name }, ...breakable(row.name || "model")), h("span", {}, type));
  const said = piece?.text ?? "…";
  // Of two scans one may have ended.
  const { pair } = data.board;
  const [after, before] = said.split(" ≠ ");
  const alone = pair && (before === "∅ " ? pair[1] : after === " ∅" && before ? pair[0] : "");
  const text = visible(data.board.kind === "diff" ? said.replace(/^ +| +$/g, "") || said : said);
  // The text of a step is its number.
  return [place, word === "token"
    ? h("div", { class: "token" }, h("q", { dir: "auto" }, short(text, 120)), h("span", {}, `${word} ${column}${written}${alone ? `, only in ${alone}` : ""}`))
    : h("div", { class: "token" }, h("b", {}, named(word, text)))];
}

/** A column that is no token, by its number or by what it is. */
const named = (word: string, text: string) => (/^\d/.test(text) ? `${word} ${short(text.trim(), 40)}` : short(text, 40));

function reading(app: App, row: Row, column: number, value: string): string {
  const piece = app.data.piece(column);
  const { axis } = app.data.board;
  const text = visible(piece?.text ?? "");
  const place = axis === "token" ? `${axis} ${column}${piece ? ` “${short(text, 30)}”` : ""}` : named(axis, text);
  return `${row.name || "model"}, ${place}: ${value}`;
}

const panel = (app: App, each: Panel) =>
  drawPanel(each, { layers: new Set(app.data.board.layers), goTo: (layer, column) => app.goTo(layer, column) });

/** What other results say about this cell: attention, lenses. */
async function fillPanels(app: App, row: Row, column: number, key: string, box: HTMLElement): Promise<void> {
  if (!app.data.board.panels || app.streams) return;
  const given = { sequence: app.state.sequence, row: row.name, column };
  const answer = await app.data.transport.ask("panels", given).catch((error: Error) => ({ panels: [], error }));
  if (app.screen.is("details", key)) box.replaceChildren(...answer.panels.map((each: Panel) => panel(app, each)));
}

/** The strongest voxels of a layer. */
async function fillParts(app: App, row: Row, column: number, key: string, box: HTMLElement): Promise<void> {
  const { data, state: { metric, sequence } } = app;
  if ((app.streams && app.state.follow) || row.plane !== "layers" || row.parts < 2 || !app.hasVoxels) return;
  const names = (await data.transport.ask("plane", { sequence, metric, plane: row.name }).catch(() => null))?.names;
  const at = names && (await data.values({ metric, plane: row.name, first: column, last: column + 1 }).catch(() => null));
  if (!names || !at || !at.some(Number.isFinite) || !app.screen.is("details", key)) return;
  box.replaceChildren(h("h2", {}, `Strongest of ${row.parts} parts here`), bars(names, at, 5, (name) => app.goTo(name, column)));
}

function sentence(value: number, facts: RowFacts, word: string): string {
  if (!Number.isFinite(value)) return "The value is NaN or infinite.";
  const z = (value - facts.mean) / facts.std;
  if (facts.count === 1) return "The only value in this row.";
  if (facts.min === facts.max) return `All ${count(facts.count, "value")} in this row are the same.`;
  if (!Number.isFinite(z) || facts.count < 3) return `One of ${count(facts.count, "value")} in this row.`;
  const { below, equal, above } = standing(facts.sorted, value);
  const percent = (some: number) => `${Math.floor((100 * some) / facts.count)} %`;
  const place = !above ? "the highest" : !below ? "the lowest" : below >= above ? `higher than ${percent(below)}` : `lower than ${percent(above)}`;
  const ties = equal > 1 ? `, as high as ${count(equal - 1, "other")}` : "";
  return `${place} of this row’s ${word}s${ties} (z ${z < 0 ? "−" : "+"}${Math.abs(z).toFixed(1)}).`;
}
