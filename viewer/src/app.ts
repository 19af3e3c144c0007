// The viewer: holds the state, turns events into changes of it, and draws what follows from it.

import { MAPS, SIGNED_MAPS, cssColour, decode, scaleOf, shareOf } from "./colour";
import { Data, Health } from "./data";
import { bars, factsOf, histogram, percentile } from "./details";
import { count, exact, h, say, short, shortLeft, visible } from "./dom";
import { Exported, download, toCsv, toPng, toSvg } from "./exports";
import { READABLE, Scene, Inks, drawAxis, drawCells, drawMarks, drawOverview, drawTracks } from "./heatmap";
import { KEYS, openHelp, openMenu, openPicker, openTable } from "./dialogs";
import { Layout, layout } from "./layout";
import { drawPanel } from "./panels";
import { Plane, budget } from "./planes";
import { Row, Tree, beneathBlock } from "./rows";
import { START, State, clean, fromHash, toHash, toPython } from "./state";
import css from "./style.css";
import { Line, Transport } from "./transport";

const [BAND, AXIS, NUMBERS, OVERVIEW] = [32, 84, 24, 30];
const [WIDEST, NARROWEST_ROW, TALLEST_ROW] = [30, 4, 24];
const STRIP = 400;
const PAINTS = 2; // tiles that are painted per frame
const LABEL = 10; // pixels that a label takes

export interface Options {
  transport: Transport;
  state?: Partial<State>;
  /** Whether the address of the page follows the state, and keys work everywhere on the page. */
  owns: boolean;
  changed?: (state: State) => void;
  height?: number;
}

export class App {
  state: State;
  readonly data: Data;
  readonly stats = { frames: [] as number[], missing: 0, drawn: 0 };
  readonly ui: Layout;
  readonly root: ShadowRoot;
  rows: Row[] = [];
  scene: Scene = { rows: [], columns: 0, first: 0, cell: 1, top: 0, rowHeight: 10, width: 1, height: 1 };
  private tree: Tree | null = null;
  private hover: { row: number; column: number } | null = null;
  private line: Line | null = null;
  private watched = "";
  private drawn: Record<string, string> = {};
  private pending = 0;
  private saved = 0;
  private arrivals: number[] = [];
  private connected = true;
  private finding = -1;
  private ready = false;
  private settled = false; // whether there were layers to choose a depth and a place for
  private theirInks: Inks | null = null;
  private sizes = { width: 0, height: 0 };
  private resting = 0;

  constructor(host: HTMLElement, private readonly options: Options) {
    this.state = { ...START, ...options.state };
    this.root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(css);
    this.root.adoptedStyleSheets = [sheet];
    this.ui = layout("token");
    this.root.replaceChildren(this.ui.body);
    this.ui.body.classList.toggle("page", options.owns);
    if (options.height) this.ui.body.style.height = `${options.height}px`;
    this.data = new Data(options.transport, () => this.draw());
    const theme = safely(() => localStorage.getItem("torchfmri-theme"));
    if (theme) this.ui.body.dataset.theme = theme;
    this.listen(options.owns ? window : this.ui.body);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.theirInks = null;
      this.drawn = {};
      this.draw();
    });
    const sized = new ResizeObserver(() => this.measure());
    sized.observe(this.ui.body);
    sized.observe(this.ui.map);
    void this.start();
  }

  // -- opening -------------------------------------------------------------------------------

  private async start(): Promise<void> {
    this.cover("Opening…", "Reading what there is to see.");
    try {
      const linked = this.options.owns ? fromHash(location.hash) : {};
      await this.data.open(linked.sequence ?? this.state.sequence);
      this.state = { ...this.state, ...clean(this.data.board.state ?? {}), ...linked };
      if (this.data.board.sequences) await this.data.choose(Math.min(this.state.sequence, this.data.board.sequences - 1));
    } catch (error) {
      this.cover("This cannot be shown", String((error as Error).message), true);
      if (!this.line) this.connect();
      return;
    }
    this.opened();
    if (!this.line) this.connect();
  }

  private opened(): void {
    const { board } = this.data;
    this.ui.prompt.hidden = !board.prompts;
    this.tree = new Tree(board.layers, board.parts, (layer) => this.plane(layer)?.header?.names ?? []);
    this.drawn.rows = ""; // the layers may be others now
    if (!board.sequences) {
      this.cover(board.prompts ? "Ask something" : "Nothing here yet", board.prompts
        ? "Type a prompt above. Every layer lights up while the model answers."
        : "There are no sequences so far. They appear here as soon as they are written.");
      return;
    }
    const change: Partial<State> = { sequence: Math.min(this.state.sequence, board.sequences - 1) };
    if (!this.settled && !/depth=/.test(this.options.owns ? location.hash : "") && !this.data.board.state?.depth && this.state.depth === START.depth)
      change.depth = this.tree.startDepth();
    const metrics = this.data.sequence.metrics.map((each) => each.name);
    if (!metrics.includes(this.state.metric)) change.metric = metrics[0] ?? "";
    if (!board.layers.includes(this.state.layer.split("[")[0])) {
      change.layer = board.layers.find((name) => beneathBlock(name) === 0) ?? board.layers[0] ?? "";
      if (!this.settled) void this.startColumn();
    }
    this.ready = true;
    this.settled ||= board.layers.length > 0;
    if (!metrics.length) {
      this.cover("No values", "This sequence has no values per layer.");
      return;
    }
    this.ui.cover.hidden = true;
    this.state = { ...this.state, ...change };
    this.set(this.tree.reveal(this.state.layer, this.state));
  }

  /** Begin at the first token that the model wrote, where nothing else is asked for. */
  private async startColumn(): Promise<void> {
    if (this.state.column || this.data.board.live) return;
    await this.data.loadChunk(0);
    for (let t = 0; t < Math.min(this.data.columns, 2048); t++)
      if (this.data.piece(t)?.generated) return this.set({ column: t });
  }

  private cover(title: string, text: string, again = false): void {
    const button = again && h("button", { class: "primary", onclick: () => void this.start() }, "Try again");
    this.ui.cover.replaceChildren(h("div", { role: "status" }, h("h2", {}, title), h("p", {}, text), button));
    this.ui.cover.hidden = false;
  }

  /** Change the state; everything that shows it follows. */
  set(change: Partial<State>): void {
    const before = this.state;
    this.state = { ...before, ...change };
    if (this.ready) this.state.sequence = Math.min(this.state.sequence, Math.max(0, this.data.board.sequences - 1));
    if (this.ready && this.state.sequence === before.sequence && this.data.columns)
      this.state.column = Math.max(0, Math.min(this.state.column, this.data.columns - 1));
    if (this.state.sequence !== before.sequence) void this.turn(this.state.sequence);
    this.draw();
    clearTimeout(this.saved);
    this.saved = window.setTimeout(() => this.share(), 200);
  }

  private share(): void {
    if (this.options.owns) {
      const hash = toHash(this.state);
      if (hash !== location.hash.slice(1)) history.replaceState(null, "", "#" + hash);
    }
    this.options.changed?.(this.state);
    this.line?.say({ type: "state", state: this.state });
  }

  private async turn(sequence: number): Promise<void> {
    try {
      await this.data.choose(sequence);
      this.set({ first: 0, last: 0, column: Math.min(this.state.column, Math.max(0, this.data.columns - 1)) });
      this.opened();
    } catch (error) {
      this.cover("This sequence cannot be read", (error as Error).message);
    }
  }

  /** The plane of layers (or of a layer's voxels) for the metric in view. */
  plane = (name: string): Plane | null => (this.state.metric ? this.data.plane(this.state.metric, name) : null);

  // -- live ----------------------------------------------------------------------------------

  private connect(): void {
    this.line = this.options.transport.listen?.({
      opened: () => {
        const back = !this.connected;
        this.connected = true;
        this.ui.banner.hidden = true;
        this.watched = "";
        if (back && !this.ready) void this.start();
        this.draw();
      },
      closed: () => {
        this.connected = false;
        this.ui.banner.hidden = false;
        const shown = this.ready ? `Showing the last ${count(this.data.columns, this.data.board.axis)}. ` : "";
        this.ui.banner.textContent = `Disconnected. ${shown}Trying again…`;
        this.draw();
      },
      message: (message) => void this.hear(message),
      columns: (frame) => {
        const [number, version, first, columns] = new Uint32Array(frame, 0, 4);
        const [metric, ...planes] = JSON.parse(this.watched || "[]").slice(1) as string[];
        const name = planes[number];
        if (name) this.data.known(name === "tracks" ? "tracks" : metric, name)?.append(version, first, columns, new Uint8Array(frame, 16));
      },
    }) ?? null;
  }

  private async hear(message: any): Promise<void> {
    const { board } = this.data;
    const missed = message.type === "hello" && board && (message.id !== board.id || message.changes !== board.changes);
    if (missed || message.type === "board") {
      const before = this.data.board?.sequences ?? 0;
      await this.data.open(this.state.sequence).catch(() => undefined);
      const last = (this.data.board?.sequences ?? 1) - 1;
      if (last >= before && this.state.follow && this.data.board.live) {
        await this.data.choose(last, true).catch(() => undefined);
        this.state = { ...this.state, sequence: last, first: 0, last: 0, column: 0 };
      }
      this.watched = "";
      this.opened();
    } else if (message.type === "state") {
      this.set(clean(message.state));
    } else if (message.type === "columns" && message.sequence === this.state.sequence) {
      this.data.put(message.first, message);
      this.data.columns = Math.max(this.data.columns, message.length);
      const now = performance.now();
      // Those of a prompt come at once: they say nothing about speed.
      message.pieces.forEach((_: string, i: number) => {
        if (message.generated[i] || this.data.board.axis !== "token") this.arrivals.push(now);
      });
      this.arrivals = this.arrivals.filter((each) => now - each < 3000);
      if (this.state.follow) this.set({ column: this.data.columns - 1, ...this.followed() });
      this.draw();
    }
  }

  /** The columns in view while tokens come: all, until they would get too narrow. */
  private followed(): Partial<State> {
    const fit = Math.floor(this.scene.width / 10);
    return this.data.columns <= fit ? { first: 0, last: 0 } : { first: this.data.columns - fit, last: this.data.columns };
  }

  private watch(): void {
    if (!this.line || !this.connected || !this.ready) return;
    const planes = ["layers", "tracks", ...this.state.voxels.filter((each) => this.rows.some((row) => row.plane === each))];
    const wanted = JSON.stringify([this.state.sequence, this.state.metric, ...planes]);
    if (wanted === this.watched) return;
    this.watched = wanted;
    this.line.say({ type: "watch", sequence: this.state.sequence, metric: this.state.metric, planes, from: this.data.columns });
  }

  // -- geometry ------------------------------------------------------------------------------

  /** Whole pixels everywhere: a canvas that begins between two would be blurred. */
  private measure(): void {
    const total = this.ui.stage.clientWidth - 28;
    const small = this.ui.body.clientWidth <= 900;
    const left = small ? 130 : Math.round(Math.max(150, Math.min(250, 0.17 * total)));
    const right = small ? 0 : Math.round(Math.max(220, Math.min(320, 0.23 * total)));
    this.ui.stage.style.gridTemplateColumns = `${left}px ${total - left - right}px ${right}px`;
    const height = Math.floor(this.ui.map.getBoundingClientRect().height);
    this.sizes = { width: total - left - right, height };
    this.ui.heat.style.width = `${this.sizes.width}px`;
    this.ui.heat.style.height = `${height}px`;
    this.draw();
  }

  private place(): void {
    const { width, height } = this.sizes;
    const { columns } = this.data;
    const span = this.state.last > this.state.first ? this.state.last - this.state.first : columns || 1;
    const cell = Math.min(width / span, this.state.last > this.state.first ? 90 : WIDEST);
    const most = Math.max(0, columns - width / cell);
    const rowHeight = Math.max(NARROWEST_ROW, Math.min(TALLEST_ROW, height / Math.max(1, this.rows.length)));
    this.scene = {
      rows: this.rows, columns, width, height, cell, rowHeight,
      first: Math.min(Math.max(0, this.state.last > this.state.first ? this.state.first : 0), most),
      top: Math.max(0, Math.min(this.state.top, this.rows.length - height / rowHeight)),
    };
  }

  private cellAt(event: MouseEvent): { row: number; column: number } {
    const box = this.ui.heat.getBoundingClientRect();
    const { scene } = this;
    const column = Math.floor(scene.first + (event.clientX - box.left) / scene.cell);
    const row = Math.floor(scene.top + (event.clientY - box.top) / scene.rowHeight);
    return { row: row < this.rows.length ? row : -1, column: Math.max(0, Math.min(column, this.data.columns - 1)) };
  }

  get rowIndex(): number {
    return this.rows.findIndex((row) => row.name === this.state.layer);
  }

  goTo(layer: string | null, column: number | null): void {
    const change: Partial<State> = layer !== null && this.tree ? this.tree.reveal(layer, this.state) : {};
    if (column !== null) change.column = Math.max(0, Math.min(column, this.data.columns - 1));
    this.set({ ...change, follow: false });
    this.keepInView();
  }

  private keepInView(): void {
    this.render();
    const { scene, state } = this;
    const change: Partial<State> = {};
    const row = this.rowIndex;
    const shown = scene.height / scene.rowHeight;
    if (row < scene.top) change.top = row;
    else if (row >= Math.floor(scene.top + shown)) change.top = row + 1 - Math.floor(shown);
    if (state.last > state.first) {
      const span = state.last - state.first;
      if (state.column < scene.first) [change.first, change.last] = [state.column, state.column + span];
      else if (state.column + 1 > scene.first + span) [change.first, change.last] = [state.column + 1 - span, state.column + 1];
    }
    if (Object.keys(change).length) this.set(change);
  }

  zoom(factor: number, around: number): void {
    const { scene } = this;
    const span = Math.min(this.data.columns, Math.max(scene.width / 90, (scene.width / scene.cell) * factor));
    if (span >= this.data.columns) return this.set({ first: 0, last: 0, follow: false });
    const share = (around - scene.first) / (scene.width / scene.cell);
    const first = Math.max(0, Math.min(around - share * span, this.data.columns - span));
    this.set({ first, last: first + span, follow: false });
  }

  private pan(columns: number, rows: number): void {
    const { scene } = this;
    const span = scene.width / scene.cell;
    const first = Math.max(0, Math.min(scene.first + columns, this.data.columns - span));
    const moved = this.state.last > this.state.first ? { first, last: first + span } : {};
    this.set({ ...moved, top: Math.max(0, Math.min(scene.top + rows, this.rows.length - scene.height / scene.rowHeight)), follow: false });
  }

  // -- events --------------------------------------------------------------------------------

  private listen(keys: EventTarget): void {
    const { heat, overview, tree } = this.ui;
    let drag: { x: number; y: number; moved: boolean } | null = null;
    heat.addEventListener("pointermove", (event) => {
      if (drag && event.buttons) {
        const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
        if (drag.moved || Math.hypot(dx, dy) > 4) {
          this.pan(-dx / this.scene.cell, -dy / this.scene.rowHeight);
          drag = { x: event.clientX, y: event.clientY, moved: true };
        }
      }
      this.hover = this.data.columns ? this.cellAt(event) : null;
      this.draw();
    });
    heat.addEventListener("pointerleave", () => {
      this.hover = null;
      this.draw();
    });
    heat.addEventListener("pointerdown", (event) => {
      heat.setPointerCapture(event.pointerId);
      drag = { x: event.clientX, y: event.clientY, moved: false };
    });
    heat.addEventListener("pointerup", (event) => {
      if (drag && !drag.moved && this.data.columns) {
        const { row, column } = this.cellAt(event);
        if (row >= 0) this.set({ layer: this.rows[row].name, column, follow: false });
      }
      drag = null;
    });
    heat.addEventListener("dblclick", () => this.expand());
    heat.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(((event.deltaX || event.deltaY) / this.scene.cell) * 0.5, 0);
      else if (event.ctrlKey || this.rows.length * this.scene.rowHeight <= this.scene.height || event.altKey)
        this.zoom(1.0015 ** event.deltaY, this.scene.first + (event.offsetX / this.scene.cell));
      else this.zoom(1.0015 ** event.deltaY, this.scene.first + event.offsetX / this.scene.cell);
    }, { passive: false });
    tree.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.pan(0, event.deltaY / this.scene.rowHeight / 2);
    }, { passive: false });
    const brush = (event: PointerEvent) => {
      if (!event.buttons) return;
      const at = (event.offsetX / overview.clientWidth) * this.data.columns;
      const span = Math.min(this.scene.width / this.scene.cell, this.data.columns / 2);
      const first = Math.max(0, Math.min(at - span / 2, this.data.columns - span));
      this.set({ first, last: first + span, follow: false });
    };
    overview.addEventListener("pointerdown", brush);
    overview.addEventListener("pointermove", brush);
    keys.addEventListener("keydown", (event) => this.key(event as KeyboardEvent));
    if (this.options.owns)
      window.addEventListener("hashchange", () => this.set({ ...START, depth: this.state.depth, metric: this.state.metric, ...fromHash(location.hash) }));
    this.ui.sequence.addEventListener("click", () => openPicker(this));
    this.ui.exportButton.addEventListener("click", () => this.menu());
    this.ui.tableButton.addEventListener("click", () => openTable(this));
    this.ui.theme.addEventListener("click", () => this.theme());
    this.ui.help.addEventListener("click", () => openHelp(this));
    this.ui.live.addEventListener("click", () => this.set({ follow: !this.state.follow }));
    this.ui.search.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") void this.find(this.ui.search.value, event.shiftKey ? -1 : 1);
      if (event.key === "Escape") this.ui.heat.focus();
    });
    this.ui.prompt.addEventListener("submit", (event) => {
      event.preventDefault();
      const input = this.ui.prompt.querySelector("input")!;
      if (!input.value.trim()) return;
      this.options.transport.prompt!(input.value).then(
        () => {
          input.value = "";
          this.set({ follow: true });
        },
        (error: Error) => this.tell(error.message),
      );
    });
  }

  private key(event: KeyboardEvent): void {
    const target = event.composedPath()[0] as HTMLElement;
    const typing = target instanceof HTMLInputElement || target instanceof HTMLSelectElement;
    if (event.key === "Escape") this.closePopup();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !this.ready) return;
    if (!this.ui.popup.hidden || target.closest?.("aside, .tree button")) {
      if (!this.ui.popup.hidden || ["Enter", " "].includes(event.key)) return;
    }
    if (target instanceof HTMLButtonElement && ["Enter", " "].includes(event.key)) return;
    const act = KEYS.find((each) => each.keys.includes(event.key));
    if (!act) return;
    event.preventDefault();
    act.act(this, event);
  }

  move(columns: number, rows: number): void {
    const row = this.rows[Math.max(0, Math.min(this.rowIndex + rows, this.rows.length - 1))];
    const column = Math.max(0, Math.min(this.state.column + columns, this.data.columns - 1));
    this.set({ layer: row?.name ?? this.state.layer, column, follow: false });
    this.keepInView();
  }

  showMetric(index: number): void {
    const metric = this.data.sequence.metrics[index];
    if (metric) this.set({ metric: metric.name });
  }

  /** Unfold or fold the layer at the crosshair. */
  fold(name = this.state.layer): void {
    const toggled = new Set(this.state.toggled);
    if (!toggled.delete(name)) toggled.add(name);
    this.set({ toggled: [...toggled], layer: name });
  }

  /** Show the voxels of the layer at the crosshair, or hide them. */
  expand(name = this.state.layer): void {
    const layer = name.split("[")[0];
    if (this.state.voxels.includes(layer)) {
      this.set({ voxels: this.state.voxels.filter((each) => each !== layer), layer });
    } else if ((this.data.board.parts[this.data.board.layers.indexOf(layer)] ?? 0) > 1) {
      if (this.data.sequence.voxels === false) return this.tell("The voxels are not part of this saved page: it would have been too large.");
      this.set({ voxels: [...this.state.voxels, layer], layer });
    } else this.tell(`${layer} has only one voxel.`);
  }

  nextFinding(): void {
    const { health } = this.data.sequence;
    if (!health.length) return this.tell("Nothing was found wrong.");
    this.finding = (this.finding + 1) % health.length;
    const found = health[this.finding];
    this.goTo(found.layer, found.column);
    this.tell(found.text);
  }

  follow(): void {
    this.set({ follow: !this.state.follow, ...(this.state.follow ? {} : this.followed()) });
  }

  theme(): void {
    const dark = this.ui.body.dataset.theme ? this.ui.body.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.ui.body.dataset.theme = dark ? "light" : "dark";
    this.theirInks = null;
    safely(() => localStorage.setItem("torchfmri-theme", this.ui.body.dataset.theme!));
    this.drawn = {};
    this.draw();
  }

  /** Go to the next token or layer that contains a text. */
  async find(text: string, direction: number): Promise<void> {
    const wanted = text.trim().toLowerCase();
    if (!wanted) return;
    const { columns, board } = this.data;
    for (let i = 1; i <= columns; i++) {
      const column = (((this.state.column + direction * i) % columns) + columns) % columns;
      if (!this.data.piece(column)) await this.data.loadChunk(Math.floor(column / 2048));
      if (this.data.piece(column)?.text.toLowerCase().includes(wanted)) {
        this.goTo(null, column);
        return this.tell(`${board.axis} ${column}: ${visible(this.data.piece(column)!.text)}`);
      }
    }
    const from = board.layers.indexOf(this.state.layer.split("[")[0]);
    for (let i = 1; i <= board.layers.length; i++) {
      const layer = board.layers[(((from + direction * i) % board.layers.length) + board.layers.length) % board.layers.length];
      if (layer.toLowerCase().includes(wanted)) {
        this.goTo(layer, null);
        return this.tell(`layer ${layer}`);
      }
    }
    this.tell(`No ${board.axis} and no layer contains “${short(text, 40)}”.`);
  }

  // -- popups --------------------------------------------------------------------------------

  popup(content: HTMLElement, name: string): void {
    const close = h("button", { class: "close", "aria-label": "Close", onclick: () => this.closePopup() }, "×");
    const box = h("div", { class: "box", role: "dialog", "aria-modal": "true", "aria-label": name }, close, content);
    this.ui.popup.replaceChildren(box);
    this.ui.popup.hidden = false;
    this.ui.popup.onclick = (event) => event.target === this.ui.popup && this.closePopup();
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Tab") return;
      const stops = [...box.querySelectorAll<HTMLElement>("button, input, [tabindex]")];
      const at = stops.indexOf(this.root.activeElement as HTMLElement);
      event.preventDefault();
      stops[(at + (event.shiftKey ? -1 : 1) + stops.length) % stops.length]?.focus();
    });
    (content.querySelector<HTMLElement>("input, button") ?? close).focus();
  }

  closePopup(): void {
    if (this.ui.popup.hidden) return;
    this.ui.popup.hidden = true;
    this.ui.popup.replaceChildren();
    this.ui.heat.focus();
  }

  tell(text: string): void {
    this.ui.status.textContent = text;
    this.drawn.status = "told";
  }

  menu(): void {
    openMenu(this, [
      ["PNG picture", () => void this.save("png")],
      ["SVG drawing", () => void this.save("svg")],
      ["CSV table", () => void this.save("csv")],
      ["Copy Python", () => this.copy(this.python(), "Python")],
      ["Copy link", () => this.copy(this.link(), "The link")],
    ]);
  }

  python = () => toPython(this.state, this.data.board);
  link = () => `${location.href.split("#")[0]}#${toHash(this.state)}`;

  copy(text: string, what: string): void {
    const old = () => {
      const area = h("textarea", {}, text);
      this.ui.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    };
    (navigator.clipboard?.writeText(text) ?? Promise.reject()).catch(old).then(() => this.tell(`${what} is in the clipboard.`));
  }

  exported(): Exported {
    const rows = this.rows;
    return {
      scene: this.scene, look: this.state, mean: this.state.pool === "mean", inks: this.inks(), planes: this.plane, piece: this.data.piece,
      title: `${this.data.board.model} · ${this.metric?.title ?? ""} · ${this.data.sequence.name}`,
      values: async (first, last) => {
        const found = new Map<string, Float32Array>();
        for (const plane of new Set(rows.map((row) => row.plane))) {
          const values = await this.data.values({ metric: this.state.metric, plane, first, last });
          for (const row of rows)
            if (row.plane === plane) found.set(row.name, values.subarray(row.index * (last - first), (row.index + 1) * (last - first)));
        }
        return found;
      },
    };
  }

  async save(kind: "png" | "svg" | "csv"): Promise<void> {
    this.closePopup();
    try {
      const blob = await { png: toPng, svg: toSvg, csv: toCsv }[kind](this.exported());
      download(blob, `${this.data.board.title.replace(/[^\w.-]+/g, "_")}-${this.state.metric}.${kind}`);
      this.tell(`Saved as ${kind.toUpperCase()}.`);
    } catch (error) {
      this.tell((error as Error).message);
    }
  }

  // -- drawing -------------------------------------------------------------------------------

  get metric() {
    return this.data.sequence?.metrics.find((each) => each.name === this.state.metric);
  }

  /** The colours of the theme; asked for once, because asking makes the browser lay out the page. */
  inks(): Inks {
    if (this.theirInks) return this.theirInks;
    const style = getComputedStyle(this.ui.body);
    const get = (name: string) => style.getPropertyValue(`--${name}`).trim();
    return this.theirInks = { ink: get("ink"), soft: get("soft"), line: get("line"), mark: get("mark"), back: get("map"), hatch: get("hatch"), none: get("none") };
  }

  draw(): void {
    if (this.pending) return;
    this.pending = requestAnimationFrame(() => {
      this.pending = 0;
      this.render();
    });
  }

  private render(): void {
    if (!this.ready || !this.tree || !this.data.sequence) return;
    const started = performance.now();
    const rowsKey = JSON.stringify([this.data.board.id, this.state.depth, this.state.toggled, this.state.voxels, this.state.voxels.map((each) => this.plane(each)?.header?.rows)]);
    if (this.once("rows", rowsKey)) this.rows = this.tree.rows(this.state);
    this.renderControls();
    this.place();
    this.renderMaps();
    this.renderTree();
    // Texts and numbers come after the picture, and while the view moves fast they wait.
    if (!this.resting)
      this.resting = window.setTimeout(() => {
        this.resting = 0;
        this.renderTexts();
      }, 60);
    this.watch();
    this.stats.frames.push(performance.now() - started);
    if (this.stats.frames.length > 5000) this.stats.frames.splice(0, 1000);
  }

  private renderTexts(): void {
    if (!this.data.sequence) return;
    this.renderStrip();
    this.renderDetails();
  }

  /** Whether a part has to be drawn again: its key is another than the last time. */
  private once(part: string, key: string): boolean {
    if (this.drawn[part] === key) return false;
    this.drawn[part] = key;
    return true;
  }

  private renderMaps(): void {
    const { scene, state, ui } = this;
    const inks = this.inks();
    const ratio = window.devicePixelRatio || 1;
    const context = (canvas: HTMLCanvasElement, height: number) => {
      const [w, t] = [Math.round(scene.width * ratio), Math.round(height * ratio)];
      if (canvas.width !== w) canvas.width = w;
      if (canvas.height !== t) canvas.height = t;
      const c = canvas.getContext("2d")!;
      c.setTransform(1, 0, 0, 1, 0, 0);
      c.clearRect(0, 0, w, t);
      return c;
    };
    budget.paints = PAINTS;
    budget.late = false;
    let c = context(ui.heat, scene.height);
    const layers = this.plane("layers");
    this.stats.missing = drawCells(c, scene, this.plane, state, state.pool === "mean", inks, ratio).missing;
    this.stats.drawn++;
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawMarks(c, scene, layers?.header ?? null, this.rowIndex, state.column, inks, this.hover);
    const axis = scene.cell >= READABLE ? AXIS : NUMBERS;
    if (this.once("axis", String(axis))) ui.axis.style.height = `${axis}px`;
    c = context(ui.axis, axis);
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawAxis(c, scene, this.data.piece, state.column, inks, axis);
    c = context(ui.tracks, BAND * this.data.sequence.tracks.length);
    c.setTransform(ratio, 0, 0, ratio, 0, 0);
    const names = this.data.sequence.tracks.map((each) => each.name);
    drawTracks(c, scene, this.data.plane("tracks", "tracks"), names, state.column, inks, BAND);
    c = context(ui.overview, OVERVIEW);
    if (layers) drawOverview(c, scene, layers, state, inks, OVERVIEW, ratio);
    if (budget.late) this.draw();
    ui.heat.dataset.state = layers?.failed ? "failed" : !layers?.header ? "loading" : this.data.columns ? "drawn" : "empty";
    const hint = layers?.failed || (!layers?.header ? "Loading…" : !this.data.columns ? `No ${this.data.board.axis}s yet.` : !this.rows.length ? "No layers." : "");
    ui.hint.hidden = !hint;
    ui.hint.textContent = hint;
  }

  private renderControls(): void {
    const { ui, state, data } = this;
    const { board, sequence } = data;
    const rate = this.arrivals.length > 1 ? Math.round(this.arrivals.length / Math.max(0.5, (performance.now() - this.arrivals[0]) / 1000)) : 0;
    const now = state.follow ? `LIVE${rate ? ` ${rate} ${board.axis === "token" ? "tok" : board.axis + "s"}/s` : ""}` : "PAUSED";
    const ended = board.kind === "scan" && !board.prompts ? "done" : "";
    const live = !board.live || !this.connected ? "" : board.going ? now : ended;
    if (!this.once("controls", JSON.stringify([state.sequence, state.metric, state.norm, state.map, state.depth, state.follow, board.id, board.sequences, board.model, sequence.name, sequence.columns, sequence.metrics.length, sequence.health.length, live, data.columns, this.connected, this.ui.body.dataset.theme, !!this.plane("layers")?.header, this.plane("layers")?.header?.version, data.plane("tracks", "tracks").header?.tops]))) return;
    ui.title.replaceChildren(h("b", {}, "torchfmri"), ` ${board.kind} `, h("span", {}, board.model));
    ui.title.title = `${board.title}${board.notes.length ? "\n" + board.notes.join("\n") : ""}`;
    ui.live.hidden = !live;
    ui.live.textContent = live;
    ui.live.classList.toggle("paused", !state.follow || live === "done");
    ui.sequence.hidden = false;
    const which = [short(sequence.name, 28), short(sequence.condition, 16), `${state.sequence + 1} of ${board.sequences.toLocaleString("en")} ▾`];
    ui.sequence.textContent = [count(data.columns, board.axis), ...(board.sequences > 1 ? which : [])].filter(Boolean).join(" · ");
    const button = (text: string, on: boolean, act: () => void, title = "") =>
      h("button", { "aria-pressed": String(on), onclick: act, title }, text);
    ui.metrics.replaceChildren(...sequence.metrics.map((each, i) => button(each.title, each.name === state.metric, () => this.showMetric(i), `${each.unit} (${i + 1})`)));
    ui.meaning.textContent = this.metric?.meaning ?? "";
    ui.norms.replaceChildren(
      button("each row", state.norm === "row", () => this.set({ norm: "row" }), "Each row by its own 99.5th percentile (n)"),
      button("all rows", state.norm === "global", () => this.set({ norm: "global" }), "One scale for all rows (n)"));
    const depths: State["depth"][] = ["blocks", "parts", "all"];
    ui.depths.replaceChildren(...depths.map((each) => button(each, state.depth === each, () => this.set({ depth: each, toggled: [], top: 0 }), "How deep layers are unfolded (l)")));
    this.renderHealth(sequence.health, board.notes);
    ui.trackNames.replaceChildren(...sequence.tracks.map((each) => h("div", { title: `${each.meaning} (${each.unit})`, style: { height: `${BAND}px` } }, each.title, h("small", {}, this.trackTop(each.name, each.unit)))));
    ui.tracks.style.height = ui.trackNames.style.height = `${BAND * sequence.tracks.length}px`;
    this.renderBar();
  }

  private trackTop(name: string, unit: string): string {
    const header = this.data.plane("tracks", "tracks").header;
    const top = header?.tops[this.data.sequence.tracks.findIndex((each) => each.name === name)];
    return top ? ` to ${say(top)}${unit.length < 8 ? " " + unit : ""}` : "";
  }

  private renderHealth(health: Health[], notes: string[]): void {
    const all = [...health, ...notes.map((text) => ({ text, severity: "inform", layer: null, column: null, advice: "" }))];
    this.ui.health.hidden = !all.length;
    const worst = all.filter((each) => each.severity !== "inform").length;
    const label = worst ? `${count(worst, "finding")}` : "Notes";
    this.ui.health.replaceChildren(h("b", {}, label), ...all.slice(0, 12).map((each) => {
      const jumps = each.layer !== null || each.column !== null;
      const mark = { alarm: "✖ ", warn: "▲ " }[each.severity] ?? "ⓘ ";
      const text = mark + each.text + (each.advice ? ` ${each.advice}` : "");
      return jumps
        ? h("button", { class: each.severity, onclick: () => this.goTo(each.layer, each.column), title: "Go there (f)" }, text)
        : h("span", { class: each.severity }, text);
    }));
  }

  private renderBar(): void {
    const header = this.plane("layers")?.header;
    if (!header || !this.metric) return this.ui.bar.replaceChildren();
    const global = this.state.norm === "global";
    const scale = scaleOf(header, this.state.norm, Math.max(0, this.rows[this.rowIndex]?.plane === "layers" ? this.rows[this.rowIndex].index : 0));
    const map = header.signed ? SIGNED_MAPS[this.state.map] : this.state.map;
    const strip = h("i", { class: "ramp", style: { background: `linear-gradient(90deg, ${Array.from({ length: 17 }, (_, i) => cssColour(map, i / 16))})` } });
    const words = global
      ? [say(scale.low), say(scale.high)]
      : [header.signed ? "−p99.5" : scale.logarithmic ? "1/100 of it" : "0", "the row’s 99.5th percentile"];
    this.ui.bar.replaceChildren(
      h("span", {}, this.metric.unit), h("span", { class: "end" }, words[0]), strip, h("span", { class: "end" }, words[1] + (scale.logarithmic ? " (log)" : "")),
      h("i", { class: "no-value" }), h("span", {}, "no value"),
      h("button", { class: "link", title: "Another colour map (m)", onclick: () => this.nextMap() }, map));
  }

  nextMap(): void {
    this.set({ map: MAPS[(MAPS.indexOf(this.state.map) + 1) % MAPS.length] });
  }

  private renderTree(): void {
    const { scene, state } = this;
    const now = this.rowIndex;
    const key = JSON.stringify([this.drawn.rows, scene.top, scene.rowHeight, scene.height, now]);
    if (!this.once("tree", key)) return;
    const items: HTMLElement[] = [];
    const from = Math.max(0, Math.floor(scene.top));
    const to = Math.min(this.rows.length, Math.ceil(scene.top + scene.height / scene.rowHeight));
    for (const at of labelled(this.rows, from, to, now, LABEL / scene.rowHeight)) {
      const row = this.rows[at];
      const y = (at - scene.top) * scene.rowHeight;
      const isNow = at === now;
      const line = Math.max(12, Math.min(16, scene.rowHeight));
      const act = row.folds ? () => this.fold(row.name) : row.parts > 1 ? () => this.expand(row.name) : null;
      const open = row.folds ? row.open : state.voxels.includes(row.name);
      const item = h("div", {
        role: "treeitem", "aria-level": row.depth + 1, "aria-selected": String(isNow), "aria-expanded": act ? String(open) : undefined,
        class: isNow ? "row now" : "row", title: row.name,
        style: { top: `${Math.max(0, y + scene.rowHeight / 2 - line / 2)}px`, height: `${line}px`, lineHeight: `${line}px`, fontSize: `${Math.max(9.5, Math.min(11.5, scene.rowHeight + 0.5))}px`, paddingLeft: `${6 + Math.min(row.depth, 6) * 10}px` },
      }, h("span", { class: "twist" }, act ? (open ? "▾" : "▸") : ""), h("span", { class: "name" }, row.depth ? row.label : shortLeft(row.label, 30)));
      item.addEventListener("click", () => {
        if (act) act();
        else this.set({ layer: row.name, follow: false });
      });
      items.push(item);
    }
    this.ui.tree.replaceChildren(...items);
  }

  private renderStrip(): void {
    const { state, data, scene } = this;
    const end = Math.min(data.columns, Math.max(state.column + STRIP / 2, STRIP));
    const first = Math.max(0, end - STRIP);
    const row = this.rows[this.rowIndex];
    const plane = row && this.plane(row.plane);
    const header = plane?.header;
    for (let t = first; t < end; t += 256) data.piece(t);
    const loaded = data.piece(first) && data.piece(Math.max(first, end - 1));
    if (this.once("strip", JSON.stringify([first, end, state.layer, state.metric, state.norm, state.map, !!header && plane!.code(row.index, state.column), !!loaded, header?.version, data.board.id, state.sequence, this.ui.body.dataset.theme]))) {
      const scale = header ? scaleOf(header, state.norm, row.index) : null;
      const map = header?.signed ? SIGNED_MAPS[state.map] : state.map;
      const spans = [];
      for (let t = first; t < end; t++) {
        const piece = data.piece(t);
        const share = scale ? shareOf(scale, decode(header!, row.index, plane!.code(row.index, t))) : NaN;
        const text = piece ? short(visible(piece.text, false), 200) : "…";
        const span = h("span", { class: `${piece?.generated ? "g" : ""} ${piece?.special ? "s" : ""}`, "data-t": t, dir: "auto" }, text);
        if (!Number.isNaN(share)) span.style.setProperty("--c", cssColour(map, share));
        spans.push(span, ...(piece && /\n/.test(piece.text) ? [h("br")] : []));
      }
      this.ui.strip.replaceChildren(
        first > 0 ? h("em", {}, `… ${count(first, data.board.axis)} before `) : "", ...spans,
        end < data.columns ? h("em", {}, ` … ${count(data.columns - end, data.board.axis)} after`) : "");
      this.ui.strip.onclick = (event) => {
        const t = (event.target as HTMLElement).dataset?.t;
        if (t !== undefined) this.goTo(null, Number(t));
      };
      this.drawn.now = "";
    }
    if (this.once("now", `${state.column} ${scene.width}`)) {
      this.ui.strip.querySelector(".now")?.classList.remove("now");
      const now = this.ui.strip.querySelector<HTMLElement>(`[data-t="${state.column}"]`);
      now?.classList.add("now");
      if (now && (now.offsetTop < this.ui.strip.scrollTop || now.offsetTop + 22 > this.ui.strip.scrollTop + this.ui.strip.clientHeight))
        this.ui.strip.scrollTop = now.offsetTop - 8;
    }
  }

  private renderDetails(): void {
    const at = this.hover && this.hover.row >= 0 ? this.hover : { row: this.rowIndex, column: this.state.column };
    const row = this.rows[at.row];
    if (!row) return;
    const key = JSON.stringify([row.name, at.column, this.state.metric, this.state.sequence, this.data.columns, this.data.board.id, this.plane(row.plane)?.header?.version]);
    if (!this.once("details", key)) return;
    void this.fillDetails(row, at.column, key).catch((error: Error) => this.ui.details.replaceChildren(h("p", {}, error.message)));
  }

  private async fillDetails(row: Row, column: number, key: string): Promise<void> {
    const { metric, sequence } = this.state;
    const { data } = this;
    const values = await data.row(metric, row.plane, row.index);
    if (this.drawn.details !== key) return;
    const value = values[column];
    const facts = factsOf(values);
    const z = (value - facts.mean) / facts.std;
    const piece = data.piece(column);
    const word = data.board.axis;
    const type = row.plane === "layers" ? data.board.types[row.index] : "voxel";
    const header = this.plane(row.plane)?.header;
    const fact = (name: string, text: string) => h("div", {}, h("dt", {}, name), h("dd", {}, text));
    const tracks = await Promise.all(data.sequence.tracks.map((_, i) => data.row("tracks", "tracks", i)));
    if (this.drawn.details !== key) return;
    const parts = h("div", {});
    this.ui.details.replaceChildren(
      h("div", { class: "place" }, h("code", { title: row.name }, row.name || "model"), h("span", {}, type)),
      h("div", { class: "token" }, h("q", { dir: "auto" }, short(visible(piece?.text ?? "…"), 120)), h("span", {}, `${word} ${column}${piece?.generated ? ", written by the model" : piece?.special ? ", special" : ""}`)),
      h("div", { class: "value" }, h("b", { title: exact(value) }, say(value)), h("span", {}, this.metric?.unit ?? "")),
      h("p", { class: "sentence" }, this.sentence(value, z, facts, word)),
      histogram(facts, value, !!header?.logarithmic || (facts.min > 0 && facts.max > 30 * facts.median)),
      h("dl", {}, ...data.sequence.tracks.map((each, i) => fact(each.title.toLowerCase(), say(tracks[i][column])))),
      h("h3", {}, "This row"),
      h("dl", {}, fact("mean", say(facts.mean)), fact("std", say(facts.std)), fact("min", say(facts.min)), fact("median", say(facts.median)), fact("max", say(facts.max)),
        facts.nonfinite ? fact("no value", count(facts.nonfinite, word)) : "", facts.zeros ? fact("zeros", String(facts.zeros)) : ""),
      parts,
      h("div", { class: "buttons" },
        h("button", { onclick: () => this.copy(row.name, "The name") }, "Copy name"),
        h("button", { onclick: () => this.copy(this.python(), "Python") }, "Copy Python"),
        h("button", { onclick: () => this.copy(this.link(), "The link") }, "Copy link")),
      ...data.sequence.panels.map((each) => drawPanel(each, { layers: new Set(data.board.layers), goTo: (layer) => this.goTo(layer, null) })));
    if (this.drawn.status !== "told") this.ui.status.textContent = `${row.name || "model"}, ${word} ${column} ${piece ? `“${short(visible(piece.text), 30)}”` : ""}: ${say(value)}`;
    this.drawn.status = "";
    if (row.plane === "layers" && row.parts > 1 && data.sequence.voxels !== false) {
      const names = (await data.transport.ask("plane", { sequence, metric, plane: row.name }).catch(() => null))?.names;
      const at = names && (await data.values({ metric, plane: row.name, first: column, last: column + 1 }).catch(() => null));
      if (!names || !at || this.drawn.details !== key) return;
      parts.replaceChildren(h("h3", {}, `Strongest of ${row.parts} parts here`), bars(names, at, 5, (name) => this.goTo(name, column)));
    }
  }

  private sentence(value: number, z: number, facts: ReturnType<typeof factsOf>, word: string): string {
    if (!Number.isFinite(value)) return "There is no value here: it was not measured, or is not finite.";
    if (!Number.isFinite(z) || facts.count < 3) return `One of ${count(facts.count, "value")} in this row.`;
    const share = percentile(facts.sorted, value);
    const words = share >= 99.99 ? "the highest" : share > 50 ? `higher than ${Math.floor(share)} %` : `lower than ${Math.floor(100 - share)} %`;
    return `${words} of the ${word}s in this row (z ${z < 0 ? "−" : "+"}${Math.abs(z).toFixed(1)}).`;
  }
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

function safely<T>(act: () => T): T | null {
  try {
    return act();
  } catch {
    return null; // storage is off here
  }
}
