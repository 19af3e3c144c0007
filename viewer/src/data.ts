// What the page knows of the board: asked once, kept, and brought up to date by live news. Used by every part that
// draws. Answers may come in another order than questions, so each is compared with what is wanted by then.
// What is kept is bounded (`PLANES`, `ROWS`), so that a page of a long scan does not grow.

import { Piece } from "./heatmap";
import { Plane } from "./planes";
import { Panel } from "./panels";
import { Transport } from "./transport";

export const CHUNK = 2048;
const NOTHING = 0x7fc00001; // the bits of the NaN that stands where nothing was measured, as in `desk.py`
const PLANES = 40;
const ROWS = 64;

export interface Metric {
  name: string;
  title: string;
  meaning: string;
  unit: string;
  signed: boolean;
  shown: boolean; // has a button
  top: number; // of a curve: where its bars end; 0: at its largest value
  beside: string; // of a curve: the one over whose bars it is drawn as a line
}
export interface Overlay {
  opacity: string; // metrics; empty where nothing fades, or nothing is outlined
  outline: string;
  meaning: string;
}
export interface Board {
  id: string;
  kind: string;
  axis: string;
  live: boolean; // whether columns may be added
  going?: boolean; // whether they are being added now
  layers: string[];
  types: string[];
  parts: number[];
  sequences: number;
  title: string;
  model: string;
  notes: string[];
  problems?: string[]; // what could not be read
  python: string | string[];
  ends?: [string, string]; // what values below and above 0 mean, where things are compared
  pair?: [string, string]; // what the curves that are lines are of, and those that are bars
  choices?: string[]; // what its sequences are, where they are the same thing judged in several ways
  missing?: [string, string]; // what plain grey cells are, and why, where it is not that nothing was measured
  rows?: string; // what the rows are, where they are no layers in model order
  panels?: boolean; // whether there is more to say about a cell
  prompts?: boolean;
  changes?: number; // how often the server said that it is another
  state?: Record<string, unknown>;
}
export interface Health {
  text: string;
  severity: string;
  layer: string | null;
  column: number | null;
  advice: string;
}
export interface Sequence {
  name: string;
  condition: string;
  text: string; // how it begins
  columns: number;
  overlay: Overlay | null;
  metrics: Metric[];
  tracks: Metric[];
  health: Health[];
  headline: string; // what came out, in a sentence
  panels: Panel[];
  going: boolean; // whether columns are being added to it; known of runs, which may go on side by side
  voxels: string[]; // the metrics that voxels have, too
  opens: number; // the column that a page begins at
}

/** Whether there is no value because nothing was measured: any other NaN was computed by the model. */
export const isNothing = (values: Float32Array, at: number): boolean =>
  Number.isNaN(values[at]) && new Uint32Array(values.buffer, values.byteOffset, values.length)[at] === NOTHING;

export class Data {
  board!: Board;
  sequence!: Sequence;
  columns = 0;
  index = -1; // of the sequence whose data these are; the one in view may still be on its way
  private wanted = -1;
  private planes = new Map<string, Plane>();
  private chunks = new Map<number, (Piece | undefined)[]>();
  private asked = new Map<number, number>(); // chunk -> how many columns there were then
  private loading = new Map<number, Promise<void>>();
  private rows = new Map<string, Promise<Float32Array>>();

  constructor(
    readonly transport: Transport,
    private readonly changed: () => void,
  ) {}

  /** Ask for the board, and for one of its sequences: the one that is chosen, once it is known. */
  async open(choose: (board: Board) => number): Promise<void> {
    this.board = await this.transport.ask("board");
    if (this.board.sequences) await this.choose(Math.min(choose(this.board), this.board.sequences - 1), true);
  }

  /** The curves that have a band of their own. */
  get bands(): Metric[] {
    return this.sequence.tracks.filter((each) => !each.beside);
  }

  async choose(index: number, anew = false): Promise<void> {
    this.wanted = index;
    if (index === this.index && !anew) return;
    const sequence: Sequence = await this.transport.ask("sequence", { sequence: index });
    if (this.wanted !== index) return; // answers may come in another order than questions
    if (index !== this.index) this.chunks.clear();
    this.asked.clear();
    [this.sequence, this.index, this.columns] = [sequence, index, sequence.columns];
    this.rows.clear();
    this.wholes.clear();
    this.planes.clear();
    this.changed();
  }

  /** A plane of the sequence, loading itself. */
  plane(metric: string, name: string): Plane {
    const key = `${metric} ${name}`;
    let plane = this.planes.get(key);
    if (!plane) {
      plane = new Plane(this.transport, { sequence: this.index, metric, plane: name }, this.changed);
      this.planes.set(key, plane);
      if (this.planes.size > PLANES) this.planes.delete(this.planes.keys().next().value!);
      plane.load();
    }
    return plane;
  }

  unpaint(): void {
    this.planes.forEach((plane) => plane.unpaint());
  }

  known(metric: string, name: string): Plane | undefined {
    return this.planes.get(`${metric} ${name}`);
  }

  /** The text of a column; null while it is on its way. */
  piece = (column: number): Piece | null => {
    const number = Math.floor(column / CHUNK);
    const found = this.chunks.get(number)?.[column % CHUNK];
    // Columns that came while the page was not connected are missing in a chunk that is there.
    if (!found && column < this.columns) void this.loadChunk(number);
    return found ?? null;
  };

  async loadChunk(number: number): Promise<void> {
    if (this.loading.has(number)) return this.loading.get(number);
    if (this.asked.get(number) === this.columns || number * CHUNK >= this.columns) return;
    this.asked.set(number, this.columns);
    const answer = this.askChunk(number);
    this.loading.set(number, answer);
    await answer;
  }

  private async askChunk(number: number): Promise<void> {
    const index = this.index;
    try {
      const said = await this.transport.ask("columns", { sequence: index, chunk: number });
      if (index === this.index) this.put(number * CHUNK, said);
    } catch {
      this.asked.delete(number);
    } finally {
      this.loading.delete(number);
    }
    this.changed();
  }

  put(first: number, said: { pieces: string[]; ids: number[]; generated: number[]; special: number[] }): void {
    said.pieces.forEach((text, i) => {
      const number = Math.floor((first + i) / CHUNK);
      let chunk = this.chunks.get(number);
      if (!chunk) this.chunks.set(number, (chunk = []));
      chunk[(first + i) % CHUNK] = { text, id: said.ids[i], generated: !!said.generated[i], special: !!said.special[i] };
    });
  }

  /** All exact values of a small plane, row by row; null while they are on their way. */
  whole(metric: string, plane: string): Float32Array | null {
    const key = `${metric} ${plane} ${this.columns}`;
    const found = this.wholes.get(key);
    if (found === undefined) {
      this.wholes.set(key, null);
      void this.values({ metric, plane }).then((values) => {
        this.wholes.set(key, values);
        this.changed();
      }, () => undefined);
    }
    return found ?? null;
  }
  private wholes = new Map<string, Float32Array | null>();

  /** The exact values of a row, all its columns. */
  row(metric: string, plane: string, row: number): Promise<Float32Array> {
    const key = `${metric} ${plane} ${row} ${this.columns}`;
    let found = this.rows.get(key);
    if (!found) {
      found = this.values({ metric, plane, row });
      this.rows.set(key, found);
      found.catch(() => this.rows.delete(key));
      if (this.rows.size > ROWS) this.rows.delete(this.rows.keys().next().value!);
    }
    return found;
  }

  /** Exact values, row by row. */
  async values(given: { metric: string; plane: string; row?: number; first?: number; last?: number }): Promise<Float32Array> {
    return new Float32Array(await this.transport.bytes("values", { sequence: this.index, ...given }));
  }
}
