// The layer tree as it stands beside the heat map: a label for each row that has room for one. Drawn by `screen`; labels
// stand at the height of their row of cells, so both use the same scene.

import type { App } from "./app";
import { h, shortLeft } from "./dom";
import { Row } from "./rows";

const LABEL = 8.5; // pixels that a label takes

export function renderTree(app: App): void {
  const { scene, rows } = app;
  const now = app.rowIndex;
  const key = JSON.stringify([app.screen.keyOf("rows"), scene.top, scene.rowHeight, scene.height, now]);
  if (!app.screen.once("tree", key)) return;
  const from = Math.max(0, Math.floor(scene.top));
  const to = Math.min(rows.length, Math.round(scene.top + scene.height / scene.rowHeight));
  app.ui.tree.replaceChildren(...labelled(rows, from, to, now, LABEL / scene.rowHeight).map((at) => item(app, at, at === now)));
  renderThumb(app);
}

/** Which part of the rows is in view, where not all of them are. */
function renderThumb({ ui, scene, rows }: App): void {
  const [shown, all] = [scene.height / scene.rowHeight, rows.length];
  ui.thumb.hidden = all <= shown + 0.01;
  ui.thumb.style.top = `${(100 * scene.top) / all}%`;
  ui.thumb.style.height = `${(100 * shown) / all}%`;
  ui.shownRows.textContent = ui.thumb.hidden ? "" : `rows ${Math.floor(scene.top) + 1}–${Math.min(all, Math.floor(scene.top + shown))} of ${all}, scroll ↕`;
}

function item(app: App, at: number, isNow: boolean): HTMLElement {
  const { scene, state, data, viewport } = app;
  const row = app.rows[at];
  const line = Math.max(LABEL, Math.min(18, scene.rowHeight));
  const y = (at - scene.top) * scene.rowHeight + scene.rowHeight / 2 - line / 2;
  const act = row.folds ? () => viewport.fold(row.name) : row.parts > 1 ? () => viewport.expand(row.name) : null;
  const open = row.folds ? row.open : state.voxels.includes(row.name);
  const type = row.plane === "layers" ? data.board.types[row.index] : "";
  const found = h("div", {
    role: "treeitem", "aria-level": row.depth + 1, "aria-selected": String(isNow), "aria-expanded": act ? String(open) : undefined,
    class: isNow ? "row now" : "row", title: [row.name || "model", type].filter(Boolean).join(" · "),
    style: {
      top: `${y}px`, height: `${line}px`, lineHeight: `${line}px`,
      fontSize: `${Math.max(9, Math.min(11.5, line - 2))}px`, paddingLeft: `${6 + Math.min(row.depth, 6) * 10}px`,
    },
  },
  h("span", { class: "twist" }, act ? (open ? "▾" : "▸") : ""),
  h("span", { class: "name" }, row.depth ? row.label : shortLeft(row.label, 30)),
  /^\d+$/.test(row.label) && type ? h("span", { class: "type" }, type) : "");
  found.addEventListener("click", () => (act ? act() : app.set({ layer: row.name, follow: false })));
  return found;
}

/** Which rows get a label where not all have room: the one in focus, then the outermost. */
function labelled(rows: Row[], from: number, to: number, now: number, apart: number): number[] {
  const all = Array.from({ length: to - from }, (_, i) => from + i);
  if (apart <= 1) return all;
  const order = [...all].sort((a, b) => Number(b === now) - Number(a === now) || rows[a].depth - rows[b].depth || a - b);
  const taken = new Set<number>();
  const reach = Math.ceil(apart) - 1;
  for (const at of order) {
    let free = true;
    for (let near = at - reach; near <= at + reach && free; near++) free = !taken.has(near);
    if (free) taken.add(at);
  }
  return [...taken].sort((a, b) => a - b);
}
