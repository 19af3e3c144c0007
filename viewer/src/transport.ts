// Lines to whoever answers: a server, a notebook's kernel, or the page's own file. `main` chooses one; everybody else
// asks through the interface. All three answer the questions of `desk.py`, so that pages show the same everywhere.

export type Given = Record<string, string | number>;

export interface Transport {
  /** Plain data. Rejects with an Error whose message can be shown. */
  ask(name: string, given?: Given): Promise<any>;
  bytes(name: string, given?: Given): Promise<ArrayBuffer>;
  /** Live news; null where nothing can change. */
  listen?: (line: Listener) => Line;
  prompt?: (text: string) => Promise<void>;
  fetches: number;
  name: string;
}
export interface Listener {
  message(data: any): void;
  columns(frame: ArrayBuffer): void;
  opened(): void;
  closed(): void;
}
export interface Line {
  say(message: unknown): void;
  close(): void;
}

export function query(name: string, given: Given = {}): string {
  const pairs = Object.entries(given).map(([key, value]) => [key, String(value)]);
  pairs.sort(([a], [b]) => (a < b ? -1 : 1));
  return pairs.length ? `${name}?${new URLSearchParams(pairs)}` : name;
}

export class ServerTransport implements Transport {
  fetches = 0;
  name = "server";
  constructor(private base: string) {}

  private async get(name: string, given?: Given): Promise<Response> {
    this.fetches++;
    let response: Response;
    try {
      response = await fetch(this.base + query(name, given));
    } catch {
      throw new Error("The server does not answer.");
    }
    if (!response.ok) {
      const said = await response.json().catch(() => ({}));
      throw new Error(said.error ?? `The server refused (${response.status}).`);
    }
    return response;
  }
  ask = async (name: string, given?: Given) => (await this.get(name, given)).json();
  bytes = async (name: string, given?: Given) => (await this.get(name, given)).arrayBuffer();

  async prompt(text: string): Promise<void> {
    const response = await fetch(this.base + "prompt", {
      method: "POST",
      body: JSON.stringify({ prompt: text }),
    });
    if (!response.ok) throw new Error((await response.json().catch(() => ({}))).error ?? "Refused.");
  }

  /** A line that opens itself again, less and less often, until it is closed. */
  listen(listener: Listener): Line {
    let socket: WebSocket | null = null;
    let wait = 250;
    let over = false;
    const connect = () => {
      if (over) return;
      socket = new WebSocket(location.origin.replace(/^http/, "ws") + this.base + "live");
      socket.binaryType = "arraybuffer";
      socket.onopen = () => {
        wait = 250;
        listener.opened();
      };
      socket.onmessage = (event) => {
        if (typeof event.data === "string") listener.message(JSON.parse(event.data));
        else listener.columns(event.data);
      };
      socket.onclose = () => {
        listener.closed();
        setTimeout(connect, wait);
        wait = Math.min(2 * wait, 4000);
      };
    };
    connect();
    return {
      say: (message) => socket?.readyState === 1 && socket.send(JSON.stringify(message)),
      close: () => {
        over = true;
        socket?.close();
      },
    };
  }
}

/** What anywidget hands to a widget, as far as it is used here. */
export interface KernelModel {
  get(name: string): any;
  set(name: string, value: unknown): void;
  save_changes(): void;
  send(content: unknown): void;
  on(event: string, act: (...args: any[]) => void): void;
}

export class KernelTransport implements Transport {
  fetches = 0;
  name = "kernel";
  answered = false;
  answers: () => void = () => undefined; // called with the first answer
  private waiting = new Map<number, { resolve: (v: any) => void; reject: (e: Error) => void }>();

  constructor(private model: KernelModel) {
    model.on("msg:custom", (content: any, buffers: DataView[]) => {
      if (!this.answered) this.answers();
      this.answered = true;
      const asked = this.waiting.get(content?.number);
      if (!asked) return;
      this.waiting.delete(content.number);
      if (content.error !== undefined) asked.reject(new Error(content.error));
      else if (content.json !== undefined) asked.resolve(JSON.parse(content.json));
      else {
        const view = buffers[0];
        asked.resolve(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
      }
    });
  }
  private put(name: string, given: Given = {}): Promise<any> {
    const number = ++this.fetches;
    const texts = Object.fromEntries(Object.entries(given).map(([k, v]) => [k, String(v)]));
    return new Promise((resolve, reject) => {
      this.waiting.set(number, { resolve, reject });
      this.model.send({ number, name, given: texts });
    });
  }
  ask = (name: string, given?: Given) => this.put(name, given);
  bytes = (name: string, given?: Given) => this.put(name, given);
}

/** Everything is in the page: answers by question, tables whole. */
export class FileTransport implements Transport {
  fetches = 0;
  name = "file";
  constructor(private answers: Record<string, any>) {}

  async ask(name: string, given: Given = {}): Promise<any> {
    if (name === "sequences") {
      const key = Object.keys(this.answers).find((each) => each.startsWith("sequence?"))!;
      const index = Number(new URLSearchParams(key.split("?")[1]).get("sequence"));
      const { name: own, text, columns, condition } = this.answers[key];
      return { total: 1, found: [{ index, name: own, text, columns, condition }] };
    }
    const found = this.answers[query(name, given)];
    if (found === undefined) throw new Error("This is not part of the page that was saved.");
    return found;
  }
  async bytes(name: string, given: Given = {}): Promise<ArrayBuffer> {
    if (name !== "values") return unpack(await this.ask(name, given));
    const { first = 0, last = Infinity, row = -1, ...place } = given as Record<string, any>;
    const header = await this.ask("plane", place);
    const table = new Float32Array(unpack(await this.ask("values", place)));
    const end = Math.min(Number(last), header.columns);
    const rows = Number(row) >= 0 ? [Number(row)] : [...Array(header.rows).keys()];
    const parts = rows.map((r) => table.subarray(r * header.columns + Number(first), r * header.columns + end));
    const result = new Float32Array(rows.length * Math.max(0, end - Number(first)));
    parts.forEach((part, i) => result.set(part, i * part.length));
    return result.buffer;
  }
}

function unpack(text: string): ArrayBuffer {
  return Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer;
}
