// The head and the foot of the page: what is shown, of what, in which colours, and how it fares. Drawn by `screen`.
// The words at the ends of the colour bar must hold for the cells in view: `barEnds` is also what exports print.

import type { App } from "./app";
import { Header, MAPS, cssColour, mapOf, scaleOf, topName } from "./colour";
import { Health, Metric } from "./data";
import { count, h, refill, say, short, visible } from "./dom";
import { topOf } from "./heatmap";
import { BAND } from "./screen";
import { State } from "./state";

const FINDINGS = 2; // findings that are on the page; the others are one click away

const pressed = (text: string, on: boolean, act: () => void, title = "") =>
  h("button", { "aria-pressed": String(on), onclick: act, title }, text);

export function renderControls(app: App): void {
  const { state, data } = app;
  const { board, sequence } = data;
  const header = app.plane("layers")?.header;
  const own = app.rows[app.rowIndex] && app.plane(app.rows[app.rowIndex].plane)?.header;
  const tracks = sequence.tracks.length ? data.plane("tracks", "tracks").header?.tops : [];
  const live = liveText(app);
  const key = [
    state.sequence, state.metric, state.norm, state.map, state.depth, state.follow, state.layer, board.id, board.sequences, board.model, board.notes, board.problems,
    sequence.name, sequence.headline, sequence.columns, sequence.metrics.length, sequence.health, live, data.columns, app.ui.body.dataset.theme, header?.version, own?.version, tracks,
  ];
  if (!app.screen.once("controls", JSON.stringify(key))) return;
  renderHead(app, live);
  renderChoices(app);
  renderAnswer(app);
  renderHealth(app);
  renderNames(app);
  renderBar(app);
}

/** What the mark beside the title says: nothing where nothing can be added. */
function liveText(app: App): string {
  const { board, sequence } = app.data;
  if (!board.live || !app.connection.connected) return "";
  if (board.kind === "run" && !sequence.going) return "ended";
  if (!board.going) return board.prompts ? "" : "done";
  if (!app.state.follow) return "PAUSED";
  const { rate } = app.connection;
  return `LIVE${rate ? ` ${rate} tok/s` : ""}`;
}

/** What the page shows, beside the mark. */
export function renderTitle({ ui, data: { board, sequence } }: App): void {
  const compares = board.kind === "diff" || board.kind === "contrast";
  const kind = board.prompts ? "chat" : board.kind;
  ui.title.replaceChildren(h("b", {}, "torchfmri"), ` ${kind} `, h("span", {}, compares ? board.title : board.model || sequence?.name || ""), compares ? ` ${board.model}` : "");
  ui.title.title = `${board.title}${board.notes.length ? "\n" + board.notes.join("\n") : ""}`;
}

function renderHead(app: App, live: string): void {
  const { ui, state, data: { board, sequence, columns } } = app;
  renderTitle(app);
  ui.live.hidden = !live;
  ui.live.textContent = live;
  ui.live.classList.toggle("paused", !live.startsWith("LIVE"));
  ui.sequence.hidden = board.kind === "contrast";
  const which = [short(sequence.text || sequence.name, 36), short(sequence.condition, 16), `${state.sequence + 1} of ${board.sequences.toLocaleString("en")} ▾`];
  const said = [...(board.sequences > 1 ? which : []), count(columns, board.axis)].filter(Boolean);
  // Each in a direction of its own: a text that runs from right to left must not turn the numbers behind it around.
  ui.sequence.replaceChildren(...said.flatMap((each, i) => [i ? " · " : "", h("bdi", {}, each)]));
  ui.sequence.disabled = board.sequences < 2;
}

function renderChoices(app: App): void {
  const { ui, state, data: { sequence } } = app;
  const shown = sequence.metrics.filter((each) => each.shown);
  refill(ui.metrics, ...shown.map((each, i) => pressed(each.title, each.name === state.metric, () => app.showMetric(i), `${each.meaning} ${each.unit} (${i + 1})`)));
  ui.meaning.textContent = app.metric?.meaning ?? "";
  ui.meaning.title = app.metric?.meaning ?? "";
  refill(ui.norms,
    pressed("each row", state.norm === "row", () => app.set({ norm: "row" }), "Each row by a scale of its own (n)"),
    pressed("all rows", state.norm === "global", () => app.set({ norm: "global" }), "One scale for all rows (n)"));
  const choices = choicesOf(app);
  ui.choiceLabel.hidden = ui.choices.hidden = !choices.length;
  refill(ui.choices, ...choices.map((each, i) => pressed(each, state.sequence === i, () => app.set({ sequence: i }), "What is outlined, counted and marked (c)")));
  const depths: State["depth"][] = ["blocks", "parts", "all"];
  const folds = app.tree!.folds;
  ui.depthLabel.hidden = ui.depths.hidden = !folds;
  refill(ui.depths, ...depths.map((each) => pressed(each, state.depth === each, () => app.set({ depth: each, toggled: [], top: 0 }), "How deep layers are unfolded (l)")));
}

/** The thresholds of a contrast; a saved page has one of them alone. */
function choicesOf({ data: { board } }: App): string[] {
  return board.choices?.length === board.sequences ? board.choices : [];
}

export function nextChoice(app: App): void {
  const { length } = choicesOf(app);
  if (length) app.set({ sequence: (app.state.sequence + 1) % length });
  else app.tell("There is no threshold here.");
}

/** What came out, in a sentence, and how to read the colours; only what compares has both. */
function renderAnswer(app: App): void {
  const { ui, data: { board, sequence } } = app;
  ui.answer.hidden = !sequence.headline;
  ui.headline.textContent = visible(sequence.headline, false);
  const map = mapOf(true, app.screen.look);
  const swatch = (share: number, text: string) => [h("i", { class: "swatch", style: { background: cssColour(map, share) } }), h("span", {}, text)];
  const { overlay } = sequence;
  refill(ui.legend, ...(!overlay ? [] : [
    ...(board.ends && app.metric?.signed ? [...swatch(0.12, board.ends[0]), ...swatch(0.88, board.ends[1])] : [h("span", {}, "the darker the larger")]),
    overlay.outline && h("i", { class: "swatch survivor" }), h("span", {}, overlay.meaning),
    ...(overlay.opacity ? [h("i", { class: "swatch faint" }), h("span", {}, "fainter: weaker evidence")] : [])]));
}

function renderHealth(app: App): void {
  const { ui } = app;
  const all = findings(app);
  const worst = all.filter((each) => each.severity !== "inform");
  ui.health.hidden = !worst.length;
  ui.allFindings.textContent = count(worst.length, "finding");
  ui.allFindings.className = `all ${worst[0]?.severity}`;
  refill(ui.findings, ...worst.slice(0, FINDINGS).map((each) => finding(app, each)));
  ui.notes.hidden = worst.length === all.length;
  ui.notes.textContent = count(all.length - worst.length, "note");
}

/** What is wrong, and then what only has to be known. */
export function findings({ data: { board, sequence } }: App): Health[] {
  const plain = (severity: string) => (text: string) => ({ text, severity, layer: null, column: null, advice: "" });
  const unread = (board.problems ?? []).map((each) => `not read: ${each}`).map(plain("warn"));
  const all = [...unread, ...sequence.health, ...board.notes.map(plain("inform"))];
  return [...all.filter((each) => each.severity !== "inform"), ...all.filter((each) => each.severity === "inform")];
}

const MARKS: Record<string, string> = { alarm: "✖ ", warn: "▲ " };

/** One finding on one line; its whole text is in its title and in the list of all. */
export function finding(app: App, each: Health): HTMLElement {
  const text = (MARKS[each.severity] ?? "") + each.text;
  const options = { class: `finding ${each.severity}`, title: `${each.text} ${each.advice}`.trim() };
  return each.layer !== null || each.column !== null
    ? h("button", { ...options, onclick: () => app.goTo(each.layer, each.column) }, text)
    : h("span", options, text);
}

function renderNames(app: App): void {
  const { ui, data: { board, bands } } = app;
  ui.trackNames.replaceChildren(...bands.map((each) =>
    h("div", { title: `${each.meaning} (${each.unit})${each.top ? " The bars end at the largest value of what the model wrote; what is higher has a line above it." : ""}`, style: { height: `${BAND}px` } },
      h("span", {}, each.title, !!board.pair && h("small", {}, trackTop(app, each))), !board.pair && h("small", {}, trackTop(app, each)), board.pair && h("small", {}, h("i", { class: "bars-key" }), board.pair[1], h("i", { class: "line-key" }), board.pair[0]))));
  ui.tracks.style.height = ui.trackNames.style.height = `${BAND * bands.length}px`;
  ui.axisTitle.replaceChildren(h("span", {}, board.rows ?? "↑ layers, input at the top"), h("span", {}, `${board.axis}s →`), ui.shownRows);
}

function trackTop({ data }: App, track: Metric): string {
  const { header } = data.plane("tracks", "tracks");
  const top = header && topOf(header, data.sequence.tracks, track);
  const plain = data.sequence.tracks.map((each) => ({ ...each, top: 0 }));
  const beyond = header && (top ?? 0) < topOf(header, plain, plain[data.sequence.tracks.indexOf(track)]);
  return top ? ` to ${say(top)}${track.unit.length < 8 ? " " + track.unit : ""}${beyond ? ", ▔ beyond" : ""}` : "";
}

/** Whether there is anything that a colour stands for. */
const hasValues = (header: Header) => header.nonfinite.some((each, row) => each + header.missing[row] < header.columns);

/** What the ends of the colour bar stand for; a picture that is saved has no row at the crosshair. */
export function barEnds(app: App, crosshair = false): { words: [string, string]; map: string } | null {
  const header = app.plane("layers")?.header;
  if (!header || !app.metric || !hasValues(header)) return null;
  const at = app.rows[app.rowIndex];
  const own = at && app.plane(at.plane)?.header;
  const scale = own ? scaleOf(own, app.state.norm, at.index) : scaleOf(header, app.state.norm, 0);
  const map = mapOf(header.signed, app.screen.look);
  const { ends } = app.data.board;
  const log = scale.logarithmic ? " (log)" : "";
  // Values beyond the ends have the colours of the ends.
  const [least, most] = [`${scale.low ? "≤ " : ""}${say(scale.low)}`, `≥ ${say(scale.high)}`];
  if (app.state.norm === "global") {
    const [low, high] = [least, most];
    return { map, words: ends ? [`${ends[0]} ${low}`, `${high} ${ends[1]}`] : [low, high + log] };
  }
  if (crosshair && own?.tops[at.index]) {
    const [low, high] = [least, `${most}${ends ? " " + ends[1] : ""} in this row${log}`];
    return { map, words: [ends ? `${ends[0]} ${low}` : low, high] };
  }
  const top = `each row’s ${topName(header)} and above`;
  if (ends) return { map, words: [ends[0], `${ends[1]} (to ${top})`] };
  return { map, words: [header.signed ? "minus the same" : scale.logarithmic ? "1/100 of it" : header.lows.some(Boolean) ? "each row’s lowest value" : "0", top + log] };
}

function renderBar(app: App): void {
  const header = app.plane("layers")?.header;
  if (!header || !app.metric) return app.ui.bar.replaceChildren();
  // Rows of a run that have nothing of this metric are not shown.
  const any = (counts: number[]) => counts.some((each) => each > 0 && !(app.data.board.kind === "run" && each === header.columns && counts === header.missing));
  const key = (name: string, text: string) => [h("i", { class: name }), h("span", {}, text)];
  const keys = [...(any(header.nonfinite) ? key("not-finite", "NaN or infinite") : []), ...(any(header.missing) ? key("not-measured", app.data.board.missing?.[0] ?? "not measured") : [])];
  const found = barEnds(app, true);
  if (!found) return refill(app.ui.bar, h("span", {}, "No values"), ...keys);
  const { words, map } = found;
  const strip = h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${Array.from({ length: 17 }, (_, i) => cssColour(map, i / 16))})` } });
  refill(app.ui.bar,
    h("span", { class: "unit", title: app.metric.unit }, app.metric.unit), h("span", { class: "end" }, words[0]), strip,
    h("span", { class: "end", title: app.state.norm === "row" ? `Each row has its own scale, up to its ${topName(header)}; what is beyond has the colour of the end. “all rows” gives them one.` : "One scale for all rows." }, words[1]),
    ...keys,
    h("button", { class: "link", title: "Another colour map (m)", onclick: () => nextMap(app) }, map));
}

export function nextMap(app: App): void {
  app.set({ map: MAPS[(MAPS.indexOf(app.state.map) + 1) % MAPS.length] });
}
