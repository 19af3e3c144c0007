// The text of the sequence around the crosshair, underlined with the colours of its row. Drawn by `screen`.
// Tokens are spans of one paragraph without a direction of their own, or letters of a Hebrew word would stand in
// the wrong order; special tokens are set apart. At most 400 texts are on the page at once.

import type { App } from "./app";
import { cssColour, decode, mapOf, scaleOf, shareOf } from "./colour";
import { count, h, short, visible } from "./dom";

const [SHOWN, STEP] = [400, 100]; // columns whose texts are on the page, and by how many they move

const CODE = /(‹[0-9a-f ]+›)/; // a character by its code, which stays whole in text from right to left

const [LINE, UNDERLINE] = [24, 7]; // pixels of a line, as in the style sheet, and of the colour below it

export function renderStrip(app: App): void {
  if (app.ui.strip.hidden) return;
  const { state, data } = app;
  const wanted = Math.ceil((state.column + SHOWN / 2) / STEP) * STEP;
  const end = Math.min(data.columns, Math.max(wanted, SHOWN));
  const first = Math.max(0, end - SHOWN);
  const row = app.rows[app.rowIndex];
  const plane = row && app.plane(row.plane);
  for (let t = first; t < end; t += 256) data.piece(t);
  const loaded = !!data.piece(first) && !!data.piece(Math.max(first, end - 1));
  const coded = plane?.header ? plane.code(row.index, state.column) : 0;
  const key = [first, end, state.layer, state.metric, state.norm, state.map, coded, loaded, plane?.header?.version, data.board.id, state.sequence, app.ui.body.dataset.theme];
  if (app.screen.once("strip", JSON.stringify(key))) {
    fill(app, first, end);
    app.screen.forget("now");
  }
  if (app.screen.once("now", `${state.column} ${app.scene.width}`)) mark(app);
}

function fill(app: App, first: number, end: number): void {
  const { state, data, ui } = app;
  const row = app.rows[app.rowIndex];
  const plane = row && app.plane(row.plane);
  const header = plane?.header;
  const scale = header ? scaleOf(header, state.norm, row.index) : null;
  const map = mapOf(!!header?.signed, app.screen.look);
  const spans: HTMLElement[] = [];
  for (let t = first; t < end; t++) {
    const piece = data.piece(t);
    const share = scale ? shareOf(scale, decode(header!, row.index, plane!.code(row.index, t))) : NaN;
    const [own, other] = data.board.kind === "diff" ? (piece?.text ?? "").split(" ≠ ") : [piece?.text ?? ""];
    const text = piece ? short(visible(own, false), 200) : "…";
    const span = h("span", { class: `${piece?.generated ? "g" : ""} ${piece?.special ? "s" : ""} ${other ? "d" : ""}`, title: other && piece!.text.trim(), "data-t": t }, ...text.split(CODE).map((part, i) => (i % 2 ? h("bdi", { dir: "ltr" }, part) : part)));
    if (!Number.isNaN(share)) span.style.setProperty("--c", cssColour(map, share));
    spans.push(span, ...(piece && /\n/.test(piece.text) ? [h("br")] : []));
  }
  ui.strip.replaceChildren(
    first > 0 ? h("em", {}, `… ${count(first, data.board.axis)} before `) : "", ...spans,
    end < data.columns ? h("em", {}, ` … ${count(data.columns - end, data.board.axis)} after`) : "");
  ui.strip.onclick = (event) => {
    const t = (event.target as HTMLElement).closest<HTMLElement>("[data-t]")?.dataset.t;
    if (t !== undefined) app.goTo(null, Number(t));
  };
}

function mark(app: App): void {
  const { strip } = app.ui;
  strip.querySelector(".now")?.classList.remove("now");
  const now = strip.querySelector<HTMLElement>(`[data-t="${app.state.column}"]`);
  now?.classList.add("now");
  if (now && (now.offsetTop < strip.scrollTop || now.offsetTop + 22 > strip.scrollTop + strip.clientHeight)) strip.scrollTop = LINE * Math.floor((now.offsetTop - LINE) / LINE) + UNDERLINE;
}
