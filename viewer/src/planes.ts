// Planes: headers and tiles of tables, fetched when they are needed and painted when they are drawn. Kept by `data`,
// drawn by `heatmap`. Codes of different versions of a plane must never be mixed: they mean different values. Tiles and
// pictures are bounded, and few are painted per frame, which keeps a sweep over 100,000 tokens fluent.

import { Header, Look, NOT_FINITE, NOT_MEASURED, lookup } from "./colour";
import { Transport } from "./transport";

export const WIDTH = 256;
const TILES = 96;
const CANVAS_BYTES = 96 << 20;
const LISTS = 3; // lists of rows that are painted: the tree, the overview, and the one before

class Tile {
  readonly pictures = new Map<number[], { key: string; canvas: HTMLCanvasElement }>(); // by list of rows
  used = 0;
  constructor(
    public data: Uint8Array, // row by row
    public columns: number,
  ) {}
}

/** One table: its header, its tiles, and their pictures for the rows in view. */
export class Plane {
  header: Header | null = null;
  failed = "";
  private tiles = new Map<string, Tile | "asked" | "failed">();
  private colours = new Map<number[], { key: string; table: Uint32Array }>();
  private asking = false;
  private early: { version: number; first: number; count: number; codes: Uint8Array }[] = [];

  constructor(
    private readonly transport: Transport,
    readonly place: { sequence: number; metric: string; plane: string },
    private readonly changed: () => void,
  ) {}

  load(): void {
    if (this.asking || this.header || this.failed) return;
    this.asking = true;
    this.transport
      .ask("plane", this.place)
      .then((header: Header) => {
        this.asking = false;
        const nothing = (each: number | null) => each ?? NaN;
        header.tops = header.tops.map(nothing);
        this.header = header;
        this.fetch(header.levels - 1, 0, false); // the whole of it, at once and coarse
        this.catchUp(header);
      })
      .catch((error: Error) => {
        this.asking = false;
        this.failed = error.message;
      })
      .finally(() => this.changed());
  }

  /** Take in what came live while the header was on its way; it may be the last that comes. */
  private catchUp(header: Header): void {
    for (const { version, first, count, codes } of this.early.splice(0)) {
      const skip = Math.max(0, header.columns - first); // what the header knows of
      if (skip >= count) continue;
      const rest = count - skip;
      this.append(version, first + skip, rest, codes.filter((_, i) => i % count >= skip));
    }
  }

  /** Forget the tiles: the table was coded anew, or is another now. */
  renew(): void {
    this.header = null;
    this.tiles.clear();
    this.failed = "";
    this.load();
  }

  /** Forget the pictures of the tiles: the browser has lost them. */
  unpaint(): void {
    for (const tile of this.tiles.values()) if (tile instanceof Tile) tile.pictures.clear();
  }

  columnsAt(level: number): number {
    return Math.ceil((this.header?.columns ?? 0) / 2 ** level);
  }

  private fetch(level: number, x: number, mean: boolean): void {
    const key = `${level}/${x}/${mean}`;
    const header = this.header!;
    if (this.tiles.get(key) === "asked") return;
    const old = this.tiles.get(key);
    if (!(old instanceof Tile)) this.tiles.set(key, "asked");
    const given = { ...this.place, level, x, ...(mean && level ? { pool: "mean" } : {}) };
    this.transport.bytes("tile", given).then(
      (bytes) => {
        if (this.header !== header) return; // it was coded anew meanwhile
        const data = new Uint8Array(bytes);
        const tile = new Tile(data, header.rows ? data.length / header.rows : 0);
        tile.used = ++clock;
        this.tiles.set(key, tile);
        this.forget();
        this.changed();
      },
      () => this.tiles.set(key, "failed"),
    );
  }

  /** A tile with its columns up to `needed`; null while it is on its way. */
  tile(level: number, x: number, needed: number, mean = false): Tile | null {
    const key = `${level}/${x}/${mean && level > 0}`;
    const found = this.tiles.get(key);
    if (!(found instanceof Tile)) {
      if (found === undefined) this.fetch(level, x, mean && level > 0);
      return null;
    }
    if (found.columns < needed && !this.behind.has(key)) {
      this.behind.add(key); // a live table has grown; ask again, but not at every frame
      setTimeout(() => {
        this.behind.delete(key);
        if (this.header) this.fetch(level, x, mean && level > 0);
      }, 100);
    }
    return found;
  }
  private behind = new Set<string>();

  /** Walk over the bytes of a row at a level, as far as they are here. */
  walk(row: number, level: number, from: number, to: number, see: (code: number, at: number) => void): void {
    for (let x = Math.floor(from / WIDTH); x * WIDTH < to; x++) {
      const tile = this.tile(level, x, Math.min(WIDTH, this.columnsAt(level) - x * WIDTH));
      if (!tile) continue;
      const end = Math.min(tile.columns, to - x * WIDTH);
      for (let i = Math.max(0, from - x * WIDTH); i < end; i++) see(tile.data[row * tile.columns + i], x * WIDTH + i);
    }
  }

  /** The bytes of a cell, from the finest level that is here. */
  code(row: number, column: number): number {
    for (let level = 0; level < (this.header?.levels ?? 0); level++) {
      const at = column >> level;
      const tile = this.tiles.get(`${level}/${Math.floor(at / WIDTH)}/false`);
      if (tile instanceof Tile && at % WIDTH < tile.columns)
        return tile.data[row * tile.columns + (at % WIDTH)];
    }
    return 0;
  }

  /** Add columns that came live; what does not fit to the tiles that are here is asked for later. */
  append(version: number, first: number, count: number, codes: Uint8Array): void {
    const header = this.header;
    if (!header) {
      if (this.asking) this.early.push({ version, first, count, codes });
      return;
    }
    if (header.version !== version) {
      this.renew();
      return;
    }
    const known = Math.max(0, header.columns - first); // counted already, where the header came later than the question
    header.columns = Math.max(header.columns, first + count);
    header.levels = 1 + Math.max(0, Math.ceil(Math.log2(header.columns / WIDTH)));
    codes.forEach((code, i) => {
      if (code <= NOT_MEASURED && i % count >= known) (code === NOT_FINITE ? header.nonfinite : header.missing)[Math.floor(i / count)]++;
    });
    for (let level = 0; level < header.levels; level++) {
      const [from, to] = [first >> level, (first + count - 1) >> level];
      for (let x = Math.floor(from / WIDTH); x <= Math.floor(to / WIDTH); x++) {
        const key = `${level}/${x}/false`;
        let tile = this.tiles.get(key);
        if (!(tile instanceof Tile)) {
          if (level || x * WIDTH < first || tile === "asked") continue;
          tile = new Tile(new Uint8Array(0), 0); // the columns begin a tile
        }
        this.tiles.set(key, extend(tile, header.rows, level, x, first, count, codes));
      }
    }
    this.changed();
  }

  /** How the pictures of a look are known: they are painted anew where anything of it changes. */
  private keyOf(look: Look): string {
    return `${look.norm} ${look.map} ${look.none} ${look.dark} ${this.header!.version}`;
  }

  /** Draw rows `from` to `to` of the list `rows` of this plane; returns the pieces not painted. */
  draw(
    c: CanvasRenderingContext2D, rows: number[], from: number, to: number, look: Look, mean: boolean,
    area: { first: number; width: number; y: number; height: number; right: number },
  ): number {
    const header = this.header;
    if (!header || !header.columns || !rows.length) return 0;
    const wanted = Math.max(0, Math.ceil(Math.log2(1 / area.width) - 1e-9));
    const level = Math.min(wanted, header.levels - 1);
    const size = WIDTH * 2 ** level;
    const begin = Math.max(0, Math.floor(area.first / size));
    const end = Math.min(Math.ceil((area.first + area.right / area.width) / size), Math.ceil(header.columns / size));
    let missing = 0;
    for (let x = begin; x < end; x++) {
      const columns = Math.min(WIDTH, this.columnsAt(level) - x * WIDTH);
      if (!this.drawTile(c, level, x, columns, rows, from, to, look, mean, area)) missing++;
    }
    return missing;
  }

  private drawTile(
    c: CanvasRenderingContext2D, level: number, x: number, columns: number, rows: number[], from: number,
    to: number, look: Look, mean: boolean,
    area: { first: number; width: number; y: number; height: number; right: number },
  ): boolean {
    let [at, tile] = [level, this.tile(level, x, columns, mean)];
    // While a tile is on its way, the one above it stands in: coarser, but never blank. The same while
    // more tiles have come than can be painted in one frame.
    const late = tile && budget.paints <= 0 && !this.painted(tile, rows, look);
    if (late && at + 1 < this.header!.levels) {
      tile = null;
      budget.late = true;
    }
    while (!tile && ++at < this.header!.levels) {
      const above = this.tiles.get(`${at}/${x >> (at - level)}/${mean}`) ?? this.tiles.get(`${at}/${x >> (at - level)}/false`);
      if (above instanceof Tile) tile = above;
    }
    if (!tile || !tile.columns) return false;
    const picture = this.paint(tile, rows, look);
    const shift = at - level;
    const start = (x * WIDTH) / 2 ** shift - Math.floor((x >> shift) * WIDTH);
    const count = Math.min(columns / 2 ** shift, tile.columns - start);
    if (count <= 0) return false;
    const left = Math.round((x * WIDTH * 2 ** level - area.first) * area.width);
    const right = Math.round((Math.min((x * WIDTH + count * 2 ** shift) * 2 ** level, this.header!.columns) - area.first) * area.width);
    // The last column of a level may stand for fewer columns than the others.
    const exact = Math.min(count, (this.header!.columns - x * WIDTH * 2 ** level) / 2 ** at);
    c.drawImage(picture, start, from, exact, to - from, left, area.y, right - left, area.height);
    return at === level && tile.columns >= columns;
  }

  private painted(tile: Tile, rows: number[], look: Look): boolean {
    return tile.pictures.get(rows)?.key === this.keyOf(look);
  }

  private paint(tile: Tile, rows: number[], look: Look): HTMLCanvasElement {
    const key = this.keyOf(look);
    tile.used = ++clock;
    const known = tile.pictures.get(rows);
    if (known?.key === key) return known.canvas;
    let colours = this.colours.get(rows);
    if (colours?.key !== key) {
      colours = { key, table: lookup(this.header!, rows, look) };
      remember(this.colours, rows, colours, LISTS);
    }
    budget.paints--;
    const canvas = known?.canvas ?? document.createElement("canvas");
    if (!tile.pictures.size) this.forget();
    canvas.width = tile.columns;
    canvas.height = rows.length;
    const c = canvas.getContext("2d")!;
    const image = c.createImageData(tile.columns, rows.length);
    const pixels = new Uint32Array(image.data.buffer);
    const { table } = colours;
    rows.forEach((row, place) => {
      const from = row * tile.columns;
      for (let i = 0; i < tile.columns; i++)
        pixels[place * tile.columns + i] = table[256 * place + tile.data[from + i]];
    });
    c.putImageData(image, 0, 0);
    remember(tile.pictures, rows, { key, canvas }, LISTS);
    return canvas;
  }

  /** Let go of the tiles that were not drawn for the longest time; the coarsest stays. */
  private forget(): void {
    const last = `${(this.header?.levels ?? 1) - 1}/0/false`;
    const held = [...this.tiles].filter((each): each is [string, Tile] => each[1] instanceof Tile && each[0] !== last);
    const bytes = (this.header?.rows ?? 1) * WIDTH * 5;
    const most = Math.max(8, Math.min(TILES, Math.floor(CANVAS_BYTES / bytes)));
    if (held.length <= most) return;
    held.sort((a, b) => a[1].used - b[1].used);
    for (const [key] of held.slice(0, held.length - most)) this.tiles.delete(key);
  }

  get held(): number {
    return [...this.tiles.values()].filter((each) => each instanceof Tile).length;
  }
}

let clock = 0;

/** Tiles that may still be painted in this frame, and whether some had to wait for the next. */
export const budget = { paints: 2, late: false };

/** Put something into a map that holds the last few. */
function remember<K, V>(map: Map<K, V>, key: K, value: V, most: number): void {
  map.delete(key);
  map.set(key, value);
  if (map.size > most) map.delete(map.keys().next().value!);
}

/** Whether a byte stands for both: what is not finite wins, what was not measured loses. */
function wins(code: number, other: number): boolean {
  if (other === NOT_FINITE || code === NOT_MEASURED) return false;
  return code === NOT_FINITE || other === NOT_MEASURED || Math.abs(code - 128) > Math.abs(other - 128);
}

/** A tile with further columns; at coarser levels the byte of the largest size wins. */
function extend(
  tile: Tile, rows: number, level: number, x: number, first: number, count: number, codes: Uint8Array,
): Tile {
  const start = x * WIDTH;
  const end = Math.min(((first + count - 1) >> level) + 1 - start, WIDTH);
  const columns = Math.max(tile.columns, end);
  if (Math.max((first >> level) - start, 0) > tile.columns) return tile; // something before is missing
  const data = new Uint8Array(rows * columns);
  const fresh = new Uint8Array(columns).fill(1);
  fresh.fill(0, 0, tile.columns);
  for (let row = 0; row < rows; row++) {
    data.set(tile.data.subarray(row * tile.columns, (row + 1) * tile.columns), row * columns);
    let seen = -1;
    for (let i = 0; i < count; i++) {
      const at = ((first + i) >> level) - start;
      if (at < 0 || at >= WIDTH) continue;
      const code = codes[row * count + i];
      const place = row * columns + at;
      if (fresh[at] && at !== seen) data[place] = code;
      else if (level === 0) data[place] = code;
      else if (wins(code, data[place])) data[place] = code;
      seen = at;
    }
  }
  return new Tile(data, columns);
}
