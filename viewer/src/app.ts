// The viewer itself: one App per page or notebook cell, made by `main`. It holds the state and the data.
// Everything that is shown follows from these two: a control only calls `set`, and `screen` draws what has changed.
// Nobody else may keep a copy of the state, or the page, its address and `view.state` in Python would differ.

import { Connection } from "./connection";
import { Data } from "./data";
import { h } from "./dom";
import { ask, listen } from "./events";
import { Exported, save } from "./exports";
import { Inks } from "./heatmap";
import { Layout, layout } from "./layout";
import { Plane } from "./planes";
import { Row, Tree, beneathBlock } from "./rows";
import { Screen } from "./screen";
import { START, State, clean, fromHash, toHash, toPython } from "./state";
import css from "./style.css";
import { barEnds, renderTitle } from "./toolbar";
import { Transport } from "./transport";
import { Viewport } from "./viewport";

const IDEAS = ["What is the capital of France?", "Why is the sky blue?", "Once upon a time"];

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
  readonly ui: Layout;
  readonly root: ShadowRoot;
  readonly screen: Screen;
  readonly viewport: Viewport;
  readonly connection: Connection;
  rows: Row[] = [];
  tree: Tree | null = null;
  hover: { row: number; column: number } | null = null;
  ready = false;
  private settled = false; // whether there were layers to choose a depth and a place for
  private placed = false; // whether an address, Python or the board said which column to begin at
  private saved = 0;
  private finding = -1;

  constructor(host: HTMLElement, readonly options: Options) {
    this.state = { ...START, ...options.state };
    this.root = host.shadowRoot ?? host.attachShadow({ mode: "open" });
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(css);
    this.root.adoptedStyleSheets = [sheet];
    this.ui = layout();
    this.root.replaceChildren(this.ui.body);
    this.ui.body.classList.toggle("page", options.owns);
    if (options.height) this.ui.body.style.height = `${options.height}px`;
    this.screen = new Screen(this);
    this.viewport = new Viewport(this);
    this.data = new Data(options.transport, () => this.draw());
    this.connection = new Connection(this);
    const theme = safely(() => localStorage.getItem("torchfmri-theme"));
    if (theme) this.ui.body.dataset.theme = theme;
    listen(this, options.owns ? window : this.ui.body);
    void this.start();
  }

  // What tests and other modules read most.
  get stats() { return this.screen.stats; }
  get scene() { return this.viewport.scene; }
  get metric() { return this.data.sequence?.metrics.find((each) => each.name === this.state.metric); }
  /** Whether columns are being added to the sequence in view. */
  get streams() {
    const { board, sequence } = this.data;
    return !!board?.going && (board.kind === "run" ? sequence.going : this.state.sequence === board.sequences - 1);
  }
  /** Whether the metric in view was measured of voxels, too. */
  get hasVoxels() { return !!this.data.sequence?.voxels.includes(this.state.metric); }
  get rowIndex() { return this.rows.findIndex((row) => row.name === this.state.layer); }
  draw(): void { this.screen.draw(); }
  goTo(layer: string | null, column: number | null): void { this.viewport.goTo(layer, column); }
  inks(): Inks { return this.screen.inks(); }

  /** The plane of layers (or of a layer's voxels) for the metric in view. */
  plane = (name: string): Plane | null => (this.state.metric && (name === "layers" || this.hasVoxels) ? this.data.plane(this.state.metric, name) : null);

  // -- opening -------------------------------------------------------------------------------

  async start(): Promise<void> {
    this.cover("Opening…", "Reading what there is to see.");
    try {
      const linked = this.options.owns ? fromHash(location.hash) : {};
      await this.data.open((board) => {
        const asked = { ...clean(board.state ?? {}), ...linked };
        // A chat is opened, and opened again while it answers, at the newest of its answers.
        const again = board.going && (performance.getEntriesByType("navigation")[0] as PerformanceNavigationTiming)?.type === "reload";
        const newest = board.live && board.kind !== "run" && asked.follow !== false && (again || asked.sequence === undefined);
        if (newest) Object.assign(asked, { sequence: Math.max(0, board.sequences - 1), first: 0, last: 0 });
        this.placed = asked.column !== undefined && !(newest && again);
        this.state = { ...this.state, ...asked };
        return this.state.sequence;
      });
    } catch (error) {
      const again = h("button", { class: "primary", onclick: () => void this.start() }, "Try again");
      this.cover("This cannot be shown", String((error as Error).message), again);
      this.connection.open();
      return;
    }
    this.opened();
    this.connection.open();
  }

  opened(): void {
    const { board } = this.data;
    this.ui.prompt.hidden = !board.prompts;
    this.ui.strip.hidden = board.axis !== "token";
    this.ui.search.placeholder = `Find ${board.axis}s or layers  /`;
    this.ui.search.ariaLabel = `Find ${board.axis}s or layers`;
    this.tree = new Tree(board.layers, board.parts, (layer) => this.plane(layer)?.header?.names ?? []);
    this.screen.forget("rows"); // the layers may be others now
    this.ready = false;
    if (!board.sequences) return this.nothingYet();
    const change: Partial<State> = { sequence: Math.min(this.state.sequence, board.sequences - 1) };
    if (!this.settled && !/depth=/.test(this.options.owns ? location.hash : "") && !board.state?.depth && this.state.depth === START.depth)
      change.depth = this.tree.startDepth();
    const metrics = this.data.sequence.metrics.filter((each) => each.shown).map((each) => each.name);
    if (!metrics.includes(this.state.metric)) change.metric = metrics[0] ?? "";
    // A model may itself be a layer, whose name is empty: the same as none was chosen.
    if ((!this.settled && !this.state.layer) || !board.layers.includes(this.state.layer.split("[")[0])) {
      // Begin where something is wrong, if anything is.
      const alarm = this.streams ? undefined : this.data.sequence.health.find((each) => each.severity === "alarm" && (each.layer === null || board.layers.includes(each.layer)));
      change.layer = alarm?.layer ?? board.layers.find((name) => beneathBlock(name) === 0) ?? board.layers[0] ?? "";
      if (alarm) change.column = alarm.column ?? this.state.column;
      else if (!this.settled && !this.placed && board.live && this.state.follow) Object.assign(change, this.connection.followed());
      else if (!this.settled && !this.placed && !board.live) change.column = this.data.sequence.opens ?? 0;
    }
    this.settled ||= board.layers.length > 0;
    if (!metrics.length) {
      return board.kind === "run" && !this.data.columns
        ? this.cover("Waiting for the first step", "The run has begun. Its layers appear here with its first step.")
        : this.cover("No values", "This sequence has no values per layer.");
    }
    this.ready = true;
    this.covered(false);
    this.state = { ...this.state, ...change };
    this.set(this.tree.reveal(this.state.layer, this.state));
  }

  private nothingYet(): void {
    const { board } = this.data;
    renderTitle(this);
    if (board.prompts) {
      const idea = (text: string) => h("button", { onclick: () => ask(this, text) }, text);
      this.cover("Ask something", "Every layer lights up while the model answers. Type a prompt above, or try one of these.", h("div", { class: "ideas" }, ...IDEAS.map(idea)));
      return this.ui.prompt.querySelector("textarea")!.focus();
    }
    if (board.kind === "run") return this.cover("Waiting for the first step", "There is no step of a run so far. It appears here as soon as it is written.");
    if (board.problems?.length) return this.cover("This scan cannot be read", board.problems.join(" "));
    this.cover("Nothing here yet", board.live ? "The first token appears here as soon as the model has read the prompt." : "This scan has no sequences so far. They appear here as soon as they are written.");
  }

  cover(title: string, text: string, ...below: HTMLElement[]): void {
    this.ui.cover.replaceChildren(h("div", { role: "status" }, h("h2", {}, title), h("p", {}, text), ...below));
    this.covered(true);
  }

  private covered(covered: boolean): void {
    this.ui.cover.hidden = !covered;
    this.ui.body.classList.toggle("covered", covered);
  }

  // -- state ---------------------------------------------------------------------------------

  /** Change the state; everything that shows it follows. */
  set(change: Partial<State>): void {
    const before = this.state;
    this.state = { ...before, ...change };
    if (this.ready) this.state.sequence = Math.min(this.state.sequence, Math.max(0, this.data.board.sequences - 1));
    if (this.ready && this.state.sequence === before.sequence && this.data.columns)
      this.state.column = Math.max(0, Math.min(this.state.column, this.data.columns - 1));
    if (this.state.sequence !== before.sequence) void this.turn(this.state.sequence);
    this.draw();
    this.saved ||= window.setTimeout(() => this.share(), this.streams ? 1000 : 200);
  }

  /** Take over a state from an address or from Python, and bring the layer that it names into view. */
  take(change: Partial<State>): void {
    const shown = change.layer !== undefined && this.tree ? this.tree.reveal(change.layer, { ...this.state, ...change }) : {};
    this.set({ ...change, ...shown });
    if (this.ready && change.layer !== undefined) this.viewport.keepInView();
  }

  private share(): void {
    this.saved = 0;
    // On the way to another sequence the layer and the column are still the old one's; its arrival saves again.
    if (this.data.index !== this.state.sequence) return;
    if (this.options.owns) {
      const hash = this.hash();
      if (hash !== location.hash.slice(1)) history.replaceState(null, "", "#" + hash);
    }
    this.options.changed?.(this.state);
    this.connection.say({ type: "state", state: this.state });
  }

  private async turn(sequence: number): Promise<void> {
    try {
      await this.data.choose(sequence);
      if (this.state.sequence !== sequence) return; // another one was chosen meanwhile
      // The steps of two runs have nothing in common: each is opened where it has something to say.
      if (this.data.board.kind === "run") [this.settled, this.placed, this.state] = [false, false, { ...this.state, layer: "" }];
      this.set({ first: 0, last: 0, column: Math.min(this.state.column, Math.max(0, this.data.columns - 1)) });
      this.opened();
    } catch (error) {
      this.cover("This sequence cannot be read", (error as Error).message);
    }
  }

  showMetric(index: number): void {
    const shown = this.data.sequence.metrics.filter((each) => each.shown);
    if (shown[index]) this.set({ metric: shown[index].name });
    else this.tell(`Nothing has the number ${index + 1}: only ${shown.map((each) => each.title).join(", ")} can be shown here.`);
  }

  nextFinding(): void {
    const { health } = this.data.sequence;
    if (!health.length) return this.tell("Nothing was found wrong.");
    this.finding = (this.finding + 1) % health.length;
    const found = health[this.finding];
    this.goTo(found.layer, found.column);
    this.tell(found.text);
  }

  theme(): void {
    const dark = this.ui.body.dataset.theme ? this.ui.body.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.ui.body.dataset.theme = dark ? "light" : "dark";
    safely(() => localStorage.setItem("torchfmri-theme", this.ui.body.dataset.theme!));
    this.screen.repaint();
  }

  /** Say something in the status line. */
  tell(text: string): void {
    this.ui.status.textContent = text;
    this.screen.told = true;
  }

  // -- what can be taken away ----------------------------------------------------------------

  python = () => toPython(this.state, this.data.board);
  link = () => `${location.href.split("#")[0]}#${this.hash()}`;
  private hash = () => toHash(this.state, this.data.board?.state ?? {});

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
    const { board, sequence } = this.data;
    return {
      scene: this.scene, look: this.screen.look, mean: this.state.pool === "mean", inks: this.inks(), planes: this.plane, piece: this.data.piece,
      title: [board.kind === "diff" ? board.title : board.model, this.metric?.title, sequence.text || sequence.name].filter(Boolean).join(" · "),
      axis: board.axis, unit: this.metric?.unit ?? "", nothing: board.missing?.[0] ?? "not measured", bar: barEnds(this),
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

  save(kind: "png" | "svg" | "csv"): Promise<void> { return save(this, kind); }
}

function safely<T>(act: () => T): T | null {
  try {
    return act();
  } catch {
    return null; // storage is off here
  }
}
