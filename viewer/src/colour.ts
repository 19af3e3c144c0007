// Colours: maps that colour-blind people can read, and how a value becomes a place on one. Used by everything that
// draws: the map, the text, the bar, exports. `decode` and the codes 0 and 1 are the inverse of `tiles.py`: change
// both together. `still.py` colours the still picture of a notebook by the same scales.

/** 33 colours each, between which colours are mixed; of maps that go both ways, two with a pale centre and two with a dark one. */
const STOPS: Record<string, string> = {
  viridis:
    "440154470d6048186a482374472d7b4537814240863e49893b528b375b8d33638d2f6b8e2c728e297a8e26828e23898e21918c1f988b1fa08822a78528ae8032b67a3fbc734ec36b5ec96270cf5784d44b98d83eaddc30c2df23d8e219ece51bfde725",
  cividis:
    "00224e00285b002e6a0533711a386f273e6e32436d3b496c434e6c4b546c535a6d5a5f6e61656f686a716f70737676767d7c788482798c8878938e789b9476a39a74aba072b4a76fbcae6cc4b468cdbb63d5c25edec958e7d150f0d846f9e03afee838",
  batlow:
    "01195908255b0d315d0f3b5f114360134b611752621b59622260612b655e356a59416f534d734d5a7745677b3e747e3882823191862da18a2bb18d2fc09036cf9340dd954de9995cf29d6df9a380fca993fdafa5fdb4b6fdbac7fcc0d8fbc6eafaccfa",
  vik: "001261021f69022b710237790344810551890c5e921c6d9c307da6488db2619ebd7aaec894bed2adcdddc6dbe6dee6e9ece5e0eed9cde9cab8e2baa2dbaa8dd59b79cf8c66c97e53c27041bc622fb2511da33e0d912d06811f06731406650907590008",
  PuOr:
    "2d004b390c5e4518715225845f3a916d529c7b6aa88a7eb39990bfa9a1cbb7b1d5c3c0ddcfcfe5dadcece4e5f0eeeef3f7f7f6f9efe1fce8cdfee1b9fed59ffdc885fdbc6bf7ac52ee9b39e58a20d97b12cb6e0dbd6109ae55069e4c078d43077f3b08",
  berlin:
    "9eb0ff8caef679abed65a7e2519fd34194c13685ad2e76992868862259731d4b61183d4f14303e11242e111a20121214190c09220c022b0e013510004112014d16025b1d086c27117d341e8e422e9e513fae6051be6f63ce7f76df8f89f09f9cffadad",
  managua:
    "ffcf67f5bf62ebb05de1a158d89353ce864fc5794abb6d46b16243a6573f9a4c3d8e423a813939743139692b3c5f2941572949512d544e33624c3c714c47814d5290505e9d546aaa5877b55c83bf6190c8669ed26bacdb71bae476c9ed7cd9f781e7ff",
};
export const MAPS = ["viridis", "cividis", "batlow"];
/** By the map: the ones that go both ways, on a light and on a dark page, where 0 is as the page is. */
const SIGNED_MAPS: Record<string, [string, string]> = { viridis: ["vik", "berlin"], cividis: ["PuOr", "managua"], batlow: ["vik", "berlin"] };
export const mapOf = (signed: boolean, { map, dark }: { map: string; dark: boolean }) => (signed ? SIGNED_MAPS[map][dark ? 1 : 0] : map);
const GLOBAL_DECADES = 4;
const WIDE = 30;

const tables = new Map<string, Uint8Array>();

/** 256 colours of a map as r, g, b. */
export function mapTable(name: string): Uint8Array {
  let table = tables.get(name);
  if (!table) {
    const stops = STOPS[name] ?? STOPS.viridis;
    table = new Uint8Array(256 * 3);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * 32;
      const low = Math.min(Math.floor(at), 31);
      for (let k = 0; k < 3; k++) {
        const [a, b] = [low, low + 1].map((s) => parseInt(stops.substr(6 * s + 2 * k, 2), 16));
        table[3 * i + k] = Math.round(a + (b - a) * (at - low));
      }
    }
    tables.set(name, table);
  }
  return table;
}

export function cssColour(map: string, share: number): string {
  const table = mapTable(map);
  const i = 3 * Math.round(Math.min(Math.max(share, 0), 1) * 255);
  return `rgb(${table[i]} ${table[i + 1]} ${table[i + 2]})`;
}

/** How values are coloured. */
export interface Look {
  norm: string;
  map: string;
  none: string; // the colour of what was not measured, as #rrggbb
  dark: boolean; // the page
}

export interface Header {
  columns: number;
  rows: number;
  levels: number;
  signed: boolean;
  logarithmic: boolean;
  scale: number[];
  limit: number[];
  tops: number[];
  lows: number[]; // where the colours of each row begin, of metrics whose colours follow the value
  nonfinite: number[]; // of each row, how many values are NaN or infinite
  missing: number[]; // and how many were not measured
  low: number;
  high: number;
  version: number;
  names: string[];
}

/** Bytes that are no values; those of values begin above, and 128 is zero. */
export const [NOT_FINITE, NOT_MEASURED] = [0, 1];

/** The value of a byte of a tile; NaN where there is none. */
export function decode(header: Header, row: number, code: number): number {
  if (code <= NOT_MEASURED) return NaN;
  const scale = header.scale[row];
  return scale * Math.sinh(((code - 128) / 126) * Math.asinh(header.limit[row] / scale));
}

/** What the colours run over: from `low` to `high`, of the value or of its logarithm. */
export interface Scale {
  low: number;
  high: number;
  logarithmic: boolean;
  signed: boolean;
}

export function scaleOf(header: Header, norm: string, row: number): Scale {
  const { signed } = header;
  if (norm === "row") {
    const high = header.tops[row] || 1;
    if (signed) return { low: -high, high, logarithmic: false, signed };
    const low = header.logarithmic ? high / 100 : Math.min(header.lows[row], high);
    return { low, high, logarithmic: header.logarithmic, signed };
  }
  const high = header.high;
  if (signed) return { low: -high, high, logarithmic: false, signed };
  const low = Math.max(header.low, high / 10 ** GLOBAL_DECADES);
  if (high < WIDE * low) return { low: 0, high, logarithmic: false, signed };
  return { low, high, logarithmic: true, signed };
}

/** What the colours of a row of so many values end at: its 99.5th percentile, the next lower of the values. */
export function topName({ columns, signed, nonfinite, missing }: Header): string {
  const values = columns - Math.min(...missing.map((each, row) => each + nonfinite[row]));
  const value = signed ? "absolute value" : "value";
  if (values < 4) return `largest ${value}`;
  return values <= 201 ? `second largest ${value}` : `99.5th percentile${signed ? " of absolute values" : ""}`;
}

/** Where a value stands on its scale, from 0 to 1; NaN where there is none. */
export function shareOf(scale: Scale, value: number): number {
  if (!Number.isFinite(value)) return NaN;
  const { low, high } = scale;
  const share = scale.logarithmic
    ? value <= low
      ? 0
      : Math.log(value / low) / Math.log(high / low)
    : (value - low) / (high - low);
  return Math.min(Math.max(share, 0), 1);
}

/** For each row 256 colours as little-endian RGBA; what is not finite is transparent. */
export function lookup(header: Header, rows: number[], look: Look): Uint32Array {
  const { norm, none } = look;
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(none.slice(at, at + 2), 16));
  const blank = (0xff000000 | (b << 16) | (g << 8) | r) >>> 0;
  const table = mapTable(mapOf(header.signed, look));
  const found = new Uint32Array(256 * rows.length);
  rows.forEach((row, place) => {
    const scale = scaleOf(header, norm, row);
    found[256 * place + NOT_MEASURED] = blank;
    for (let code = NOT_MEASURED + 1; code < 256; code++) {
      const i = 3 * Math.round(shareOf(scale, decode(header, row, code)) * 255);
      found[256 * place + code] =
        (0xff000000 | (table[i + 2] << 16) | (table[i + 1] << 8) | table[i]) >>> 0;
    }
  });
  return found;
}
