// The screen: draws whatever follows from the state, each part only where something of it changed (`once`). One App
// has one. A frame must stay below 4 ms of processor time, so texts and details follow a moment later.

import type { App } from "./app";
import { Look } from "./colour";
import { renderDetails } from "./details";
import { Inks, READABLE, drawAxis, drawCells, drawMarks, drawOverlay, drawOverview, drawTracks } from "./heatmap";
import { budget } from "./planes";
import { renderStrip } from "./strip";
import { renderControls } from "./toolbar";
import { renderTree } from "./tree_view";

export const BAND = 32;
const [AXIS, WORDS, NUMBERS, OVERVIEW] = [84, 30, 24, 30]; // columns by their texts, by short names, by numbers
const PAINTS = 1; // tiles that are painted per frame
const REST = 60; // milliseconds after which texts follow the picture
const STREAM = 1000; // milliseconds between two looks at the details while columns stream in: each look asks the server
const FRAMES = 5000;
const DRAWN = "torchfmri-drawn"; // when the first tile was on the screen

export class Screen {
  readonly stats = { frames: [] as number[], missing: 0, drawn: 0 };
  told = false; // whether the status line says something that should stay for a moment
  private drawn: Record<string, string> = {};
  private marked = false;
  private pending = 0;
  private resting = 0;
  private detailed = -STREAM;
  private theirInks: Inks | null = null;

  constructor(private readonly app: App) {}

  draw(): void {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.render();
    });
  }

  /** Draw everything again, in other colours. */
  repaint(): void {
    this.theirInks = null;
    this.drawn = {};
    this.draw();
  }

  /** Whether a part has to be drawn again: its key is another than the last time. */
  once(part: string, key: string): boolean {
    if (this.drawn[part] === key) return false;
    this.drawn[part] = key;
    return true;
  }
  is(part: string, key: string): boolean { return this.drawn[part] === key; }
  forget(part: string): void { this.drawn[part] = ""; }
  keyOf(part: string): string { return this.drawn[part]; }

  /** The colours of the theme; asked for once, because asking makes the browser lay out the page. */
  inks(): Inks {
    if (this.theirInks) return this.theirInks;
    const style = getComputedStyle(this.app.ui.body);
    const get = (name: string) => style.getPropertyValue(`--${name}`).trim();
    return this.theirInks = { ink: get("ink"), soft: get("soft"), line: get("line"), mark: get("mark"), alarm: get("alarm"), back: get("map"), hatch: get("hatch"), none: get("none"), other: get("other"), dark: get("theme") === "dark" };
  }

  get look(): Look {
    const [{ norm, map }, { none, dark }] = [this.app.state, this.inks()];
    return { norm, map, none, dark };
  }

  render(): void {
    const { app } = this;
    if (!app.ready || !app.tree || !app.data.sequence) return;
    const started = performance.now();
    this.renderRows();
    renderControls(app);
    app.viewport.place();
    this.renderMaps();
    renderTree(app);
    // Texts and numbers come after the picture, and while the view moves fast they wait.
    this.resting ||= window.setTimeout(() => {
      this.resting = 0;
      if (!app.ready) return;
      renderStrip(app);
      const [streams, now] = [app.streams && app.state.follow && !app.hover, performance.now()];
      const same = this.once("details of", `${app.data.index} ${!app.data.columns}`) ? 0 : STREAM; // another sequence does not wait
      if (streams && now - this.detailed < same) return void setTimeout(() => this.draw(), STREAM);
      this.detailed = now;
      renderDetails(app);
    }, REST);
    app.connection.watch();
    this.stats.frames.push(performance.now() - started);
    if (this.stats.frames.length > FRAMES) this.stats.frames.splice(0, 1000);
  }

  private renderRows(): void {
    const { app } = this;
    const { state, data } = app;
    // In a training run parameters are rows, too: those without the metric in view are left out.
    const header = data.board.kind === "run" ? app.plane("layers")?.header : null;
    const hidden = header ? header.missing.map((each) => each === header.columns && each > 0) : [];
    const key = JSON.stringify([data.board.id, data.board.layers.length, state.depth, state.toggled, state.voxels, hidden, state.voxels.map((each) => app.plane(each)?.header?.rows)]);
    if (this.once("rows", key)) app.rows = app.tree!.rows(state, hidden.every(Boolean) ? [] : hidden);
    if (app.rowIndex < 0) this.keepCrosshair();
  }

  /** Move a crosshair whose row is not shown any more to the nearest layer above it that is. */
  private keepCrosshair(): void {
    const { app } = this;
    const { state, rows, tree, data: { board } } = app;
    if (!rows.length) return;
    const layer = state.layer.split("[")[0];
    const shown = new Set(rows.map((row) => row.name));
    const plane = layer !== state.layer && shown.has(layer) ? app.plane(layer) : null;
    if (plane && !plane.header && !plane.failed) return; // the names of its voxels are on their way
    let at = board.layers.indexOf(layer);
    while (at >= 0 && !shown.has(board.layers[at])) at = tree!.parents[at];
    app.state = { ...state, layer: at < 0 ? rows[0].name : board.layers[at] };
  }

  private context(canvas: HTMLCanvasElement, height: number, ratio: number): CanvasRenderingContext2D {
    const [w, t] = [Math.round(this.app.scene.width * ratio), Math.round(height * ratio)];
    if (canvas.width !== w) canvas.width = w;
    if (canvas.height !== t) canvas.height = t;
    const c = canvas.getContext("2d")!;
    c.setTransform(1, 0, 0, 1, 0, 0);
    c.clearRect(0, 0, w, t);
    return c;
  }

  private renderMaps(): void {
    const { app } = this;
    const { scene, state, ui, data } = app;
    const inks = this.inks();
    const ratio = window.devicePixelRatio || 1;
    const { look } = this;
    budget.paints = PAINTS;
    budget.late = false;
    let c = this.context(ui.heat, scene.height, ratio);
    const layers = app.plane("layers");
    this.stats.missing = drawCells(c, scene, app.plane, look, state.pool === "mean", inks, ratio).missing;
    this.stats.drawn++;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    const { overlay } = data.sequence;
    if (overlay?.opacity) drawOverlay(c, scene, (metric, plane) => data.whole(metric, plane), overlay, inks);
    drawMarks(c, scene, layers?.header ?? null, app.rowIndex, state.column, inks, app.hover);
    const texts = data.board.axis !== "step";
    const axis = !texts || scene.cell < READABLE ? NUMBERS : data.board.axis === "token" ? AXIS : WORDS;
    if (this.once("axis", String(axis))) ui.axis.style.height = `${axis}px`;
    c = this.context(ui.axis, axis, ratio);
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawAxis(c, scene, data.piece, state.column, inks, axis, texts);
    c = this.context(ui.tracks, BAND * data.bands.length, ratio);
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    const { tracks } = data.sequence;
    if (tracks.length) drawTracks(c, scene, data.plane("tracks", "tracks"), tracks, state.column, inks, BAND);
    c = this.context(ui.overview, OVERVIEW, ratio);
    if (layers) drawOverview(c, scene, layers, look, inks, OVERVIEW, ratio);
    if (budget.late) this.draw();
    this.renderHint();
  }

  private renderHint(): void {
    const { ui, data, rows } = this.app;
    const layers = this.app.plane("layers");
    if (!this.marked && layers?.held) {
      this.marked = true;
      performance.mark(DRAWN);
    }
    ui.heat.dataset.state = layers?.failed ? "failed" : !layers?.header ? "loading" : data.columns ? "drawn" : "empty";
    const hint = layers?.failed || (!layers?.header ? "Loading…" : !data.columns ? `No ${data.board.axis}s yet.` : !rows.length ? "No layers." : "");
    ui.hint.hidden = !hint;
    ui.hint.textContent = hint;
  }
}
