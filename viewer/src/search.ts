// Finding a text: among the columns first, then among the layers.

import type { App } from "./app";
import { CHUNK } from "./data";
import { short, visible } from "./dom";

const around = (at: number, count: number) => ((at % count) + count) % count;

/** Go to the next column or layer that contains a text. */
export async function find(app: App, text: string, direction: number): Promise<void> {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return;
  const { columns, board, piece } = app.data;
  for (let i = 1; i <= columns; i++) {
    const column = around(app.state.column + direction * i, columns);
    if (!piece(column)) await app.data.loadChunk(Math.floor(column / CHUNK));
    const found = piece(column)?.text;
    if (found?.toLowerCase().includes(wanted)) {
      app.goTo(null, column);
      return app.tell(`${board.axis} ${column}: ${visible(found)}`);
    }
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
