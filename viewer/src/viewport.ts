// Where things are on the heat map, and how the view and the crosshair move over it. Used by `events`, `dialogs` and
// `screen`. Sizes are whole pixels: a canvas that begins between two is blurred, and its colours are no longer exact.

import type { App } from "./app";
import { Scene } from "./heatmap";
import { State } from "./state";

export const WIDEST = 200; // pixels of a column
const [NARROWEST_ROW, TALLEST_ROW] = [8.5, 140]; // every row has room for its name; what does not fit is scrolled to
const NO_VOXELS: Record<string, string> = { file: "The voxels are not part of this saved page: it would have been too large, or they were not measured." };
const SMALL = 680; // a page that is narrower has its details below the map

export class Viewport {
  scene: Scene = { rows: [], columns: 0, first: 0, cell: 1, top: 0, rowHeight: 10, width: 1, height: 1 };
  private sought: string | null = null; // a row to bring into view once it is known where it is
  private sizes = { width: 0, height: 0 };

  constructor(private readonly app: App) {
    const sized = new ResizeObserver(() => this.measure());
    sized.observe(app.ui.body);
    sized.observe(app.ui.map);
  }

  /** Whole pixels everywhere: a canvas that begins between two would be blurred. */
  private measure(): void {
    const { ui } = this.app;
    const total = ui.stage.clientWidth - 28;
    const small = ui.body.clientWidth <= SMALL;
    const left = total <= 900 ? 130 : Math.round(Math.max(150, Math.min(250, 0.17 * total)));
    const right = small ? 0 : Math.round(Math.max(200, Math.min(420, 0.27 * total)));
    ui.stage.style.gridTemplateColumns = `${left}px ${total - left - right}px ${right}px`;
    const height = Math.floor(ui.map.getBoundingClientRect().height);
    this.sizes = { width: total - left - right, height };
    ui.heat.style.width = `${this.sizes.width}px`;
    ui.heat.style.height = `${height}px`;
    this.app.draw();
  }

  /** Whether a part of the columns is in view, and not all of them. */
  get zoomed(): boolean {
    return this.app.state.last > this.app.state.first;
  }

  place(): void {
    const { width, height } = this.sizes;
    const { state, rows, data: { columns } } = this.app;
    const end = Math.min(state.last, columns); // an address may say anything
    const span = end > state.first ? end - state.first : columns || 1;
    const cell = Math.min(width / span, WIDEST);
    const most = Math.max(0, columns - width / cell);
    const rowHeight = Math.max(NARROWEST_ROW, Math.min(TALLEST_ROW, height / Math.max(1, rows.length)));
    this.scene = {
      rows, columns, width, height, cell, rowHeight,
      first: Math.min(Math.max(0, this.zoomed ? state.first : 0), most),
      top: Math.max(0, Math.min(state.top, rows.length - height / rowHeight)),
    };
    if (this.sought !== null && (this.sought !== state.layer || this.app.rowIndex >= 0)) {
      const found = this.sought === state.layer;
      this.sought = null;
      if (found) this.scroll();
    }
  }

  cellAt(event: MouseEvent): { row: number; column: number } {
    const box = this.app.ui.heat.getBoundingClientRect();
    const { scene } = this;
    const column = Math.floor(scene.first + (event.clientX - box.left) / scene.cell);
    const row = Math.floor(scene.top + (event.clientY - box.top) / scene.rowHeight);
    return { row: row < this.app.rows.length ? row : -1, column: Math.max(0, Math.min(column, this.app.data.columns - 1)) };
  }

  goTo(layer: string | null, column: number | null): void {
    const { app } = this;
    app.hover = null; // the mouse may rest on the map while a search goes elsewhere
    const change: Partial<State> = layer !== null && app.tree ? app.tree.reveal(layer, app.state) : {};
    if (column !== null) change.column = Math.max(0, Math.min(column, app.data.columns - 1));
    app.set({ ...change, follow: false });
    this.keepInView();
  }

  /** Scroll to the crosshair, as far as it is not in view. */
  keepInView(): void {
    const { app } = this;
    app.screen.render();
    if (app.rowIndex >= 0) this.scroll();
    else this.sought = app.state.layer; // a voxel has a row only when the names of its layer's have come
  }

  private scroll(): void {
    const { app, scene } = this;
    const { state, rowIndex: row } = app;
    const change: Partial<State> = {};
    const shown = scene.height / scene.rowHeight;
    if (row < scene.top) change.top = Math.max(0, row);
    else if (row >= Math.floor(scene.top + shown)) change.top = row + 1 - Math.floor(shown);
    if (this.zoomed) {
      const span = state.last - state.first;
      if (state.column < scene.first) [change.first, change.last] = [state.column, state.column + span];
      else if (state.column + 1 > scene.first + span) [change.first, change.last] = [state.column + 1 - span, state.column + 1];
    }
    if (Object.keys(change).length) app.set(change);
  }

  move(columns: number, rows: number): void {
    const { app } = this;
    const row = app.rows[Math.max(0, Math.min(app.rowIndex + rows, app.rows.length - 1))];
    const column = Math.max(0, Math.min(app.state.column + columns, app.data.columns - 1));
    app.set({ layer: row?.name ?? app.state.layer, column, follow: false });
    this.keepInView();
  }

  zoom(factor: number, around: number): void {
    const { scene, app } = this;
    const { columns } = app.data;
    const span = Math.min(columns, Math.max(scene.width / WIDEST, (scene.width / scene.cell) * factor));
    if (span >= columns) return app.set({ first: 0, last: 0, follow: false });
    const share = (around - scene.first) / (scene.width / scene.cell);
    const first = Math.max(0, Math.min(around - share * span, columns - span));
    app.set({ first, last: first + span, follow: false });
  }

  pan(columns: number, rows: number): void {
    const { scene, app } = this;
    const span = scene.width / scene.cell;
    const first = Math.max(0, Math.min(scene.first + columns, app.data.columns - span));
    const moved = this.zoomed ? { first, last: first + span } : {};
    const top = Math.max(0, Math.min(scene.top + rows, app.rows.length - scene.height / scene.rowHeight));
    app.set({ ...moved, top, follow: false });
  }

  /** The column at a place of the overview, in pixels. */
  overviewAt(x: number): number {
    const { scene, app: { data: { columns } } } = this;
    return Math.max(0, Math.min(x / Math.min(WIDEST, scene.width / Math.max(1, columns)), columns));
  }

  /** Whether a column is in the frame of the overview, and the frame is not all of it. */
  frames(column: number): boolean {
    const { scene } = this;
    return this.zoomed && column >= scene.first && column <= scene.first + scene.width / scene.cell;
  }

  /** Show some columns, as many as have room. */
  show(first: number, span: number): void {
    const { app, scene } = this;
    const { columns } = app.data;
    const wide = Math.max(span, scene.width / WIDEST);
    const begin = Math.max(0, Math.min(first, columns - wide));
    if (wide < columns) app.set({ first: begin, last: begin + wide, follow: false });
  }

  /** Unfold or fold the layer at the crosshair. */
  fold(name = this.app.state.layer): void {
    const toggled = new Set(this.app.state.toggled);
    if (!toggled.delete(name)) toggled.add(name);
    this.app.set({ toggled: [...toggled], layer: name });
  }

  /** Show the voxels of the layer at the crosshair, or hide them. */
  expand(name = this.app.state.layer): void {
    const { state, data, tell } = this.app;
    const layer = name.split("[")[0];
    if (state.voxels.includes(layer)) {
      this.app.set({ voxels: state.voxels.filter((each) => each !== layer), layer });
    } else if ((data.board.parts[data.board.layers.indexOf(layer)] ?? 0) > 1) {
      if (!this.app.hasVoxels) return tell.call(this.app, NO_VOXELS[data.transport.name] ?? "This was not measured of the voxels of a layer.");
      this.app.set({ voxels: [...state.voxels, layer], layer });
    } else this.app.tell(`${layer} has only one voxel.`);
  }

  follow(): void {
    const { app } = this;
    app.set({ follow: !app.state.follow, ...(app.state.follow ? {} : app.connection.followed()) });
  }
}
