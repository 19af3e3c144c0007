// Finding a text: in the text of the columns first, which may take several of them, then among the layers. Called by
// `events`. Texts that are not loaded yet are asked for, or a phrase at the end of a long scan would not be found.

import type { App } from "./app";
import { CHUNK } from "./data";
import { short, visible } from "./dom";

const around = (at: number, count: number) => ((at % count) + count) % count;

/** One text of all columns in small letters, blanks as one, and where each column begins in it. */
async function joined({ data }: App): Promise<{ text: string; starts: number[] }> {
  for (let at = 0; at < data.columns; at += CHUNK) if (!data.piece(at)) await data.loadChunk(at / CHUNK);
  const [parts, starts]: [string[], number[]] = [[], []];
  let [length, blank] = [0, false];
  for (let t = 0; t < data.columns; t++) {
    let part = (data.piece(t)?.text ?? "").toLowerCase().replace(/\s+/g, " ");
    if (blank && part.startsWith(" ")) part = part.slice(1);
    if (part) blank = part.endsWith(" ");
    starts.push(length);
    parts.push(part);
    length += part.length;
  }
  return { text: parts.join(""), starts };
}

/** The last column that begins at or before a place in the text. */
function columnAt(starts: number[], place: number): number {
  let [low, high] = [0, starts.length];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= place) low = middle;
    else high = middle;
  }
  return low;
}

/** The columns of the next place where a text stands, beginning behind (or before) the crosshair; null for none. */
async function phrase(app: App, wanted: string, direction: number): Promise<[number, number] | null> {
  const { text, starts } = await joined(app);
  const places: [number, number][] = [];
  for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) {
    const [from, to] = [columnAt(starts, at), columnAt(starts, at + wanted.length - 1)];
    if (places[places.length - 1]?.[0] !== from) places.push([from, to]);
  }
  const now = app.state.column;
  const found = direction > 0 ? places.find(([from]) => from > now) ?? places[0] : [...places].reverse().find(([from]) => from < now) ?? places[places.length - 1];
  return found ?? null;
}

/** Go to the next place or layer that contains a text. */
export async function find(app: App, text: string, direction: number): Promise<void> {
  const wanted = text.trim().toLowerCase().replace(/\s+/g, " ");
  if (!wanted) return;
  const { board, piece } = app.data;
  const found = await phrase(app, wanted, direction);
  if (found) {
    const [from, to] = found;
    const said = Array.from({ length: to - from + 1 }, (_, i) => piece(from + i)?.text ?? "").join("");
    app.goTo(null, from);
    return app.tell(`${board.axis}${from < to ? `s ${from} to ${to}` : ` ${from}`}: ${short(visible(said), 60)}`);
  }
  const from = board.layers.indexOf(app.state.layer.split("[")[0]);
  for (let i = 1; i <= board.layers.length; i++) {
    const layer = board.layers[around(from + direction * i, board.layers.length)];
    if (layer.toLowerCase().includes(wanted)) {
      app.goTo(layer, null);
      return app.tell(`layer ${layer}`);
    }
  }
  app.tell(`No ${board.axis} and no layer contains “${short(text, 40)}”.`);
}
