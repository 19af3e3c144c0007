// The live line of a page: what it watches, and what it hears. Only pages with a server have one.
// A column is never lost: the page says from where it needs columns (`from`), and what comes while a header is on
// its way waits in its plane. Whoever has paused is never moved; whoever follows stays at the end.

import type { App } from "./app";
import { NOT_MEASURED } from "./colour";
import { count, h } from "./dom";
import { State, clean } from "./state";
import { Line } from "./transport";

const RATE = 3000; // milliseconds over which tokens per second are counted
const NARROWEST = 10; // pixels of a column while it is followed

export class Connection {
  connected = true;
  private line: Line | null = null;
  private watched = "";
  private arrivals: number[] = [];
  private slower = 0;
  private ticking = 0; // the clock beside what is worked on
  private streamed = -1; // the sequence that this page saw columns being added to

  constructor(private readonly app: App) {}

  /** Tokens per second, of those that the model makes one by one; steps come from files, many at once. */
  get rate(): number {
    const arrivals = this.arrivals.filter((each) => performance.now() - each < RATE);
    return arrivals.length > 1 ? Math.round(arrivals.length / Math.max(0.5, (performance.now() - arrivals[0]) / 1000)) : 0;
  }

  say(message: unknown): void {
    this.line?.say(message);
  }

  open(): void {
    const { app } = this;
    const { banner } = app.ui;
    this.line ??= app.options.transport.listen?.({
      opened: () => {
        const back = !this.connected;
        this.connected = true;
        banner.hidden = true;
        this.watched = "";
        if (back && !app.ready) void app.start();
        app.draw();
      },
      closed: () => {
        this.connected = false;
        banner.hidden = false;
        const shown = app.ready ? `Showing the last ${count(app.data.columns, app.data.board.axis)}. ` : "";
        banner.textContent = `Disconnected. ${shown}Trying again…`;
        app.draw();
      },
      message: (message) => void this.hear(message),
      columns: (frame) => {
        const [number, version, first, columns] = new Uint32Array(frame, 0, 4);
        const [metric, ...planes] = JSON.parse(this.watched || "[]").slice(1) as string[];
        const name = planes[number];
        if (name) app.data.known(name === "tracks" ? "tracks" : metric, name)?.append(version, first, columns, new Uint8Array(frame, 16));
      },
    }) ?? null;
  }

  private async hear(message: any): Promise<void> {
    const { app } = this;
    const { board } = app.data;
    const missed = message.type === "hello" && board && (message.id !== board.id || message.changes !== board.changes);
    if (missed || message.type === "board") await this.openAgain();
    else if (message.type === "state") app.take(clean(message.state));
    else if (message.type === "doing") this.takeDoing(message);
    else if (message.type === "columns" && message.sequence === app.state.sequence && app.data.index === message.sequence) this.takeColumns(message);
  }

  /** The server has other sequences, metrics or findings now. */
  private async openAgain(): Promise<void> {
    const { app } = this;
    const before = app.data.board?.sequences ?? 0;
    await app.data.open(({ sequences, live }) => {
      // Whoever follows the newest goes to the next.
      if (sequences > before && app.state.follow && live && app.state.sequence >= before - 1)
        app.state = { ...app.state, sequence: sequences - 1, first: 0, last: 0, column: 0 };
      return app.state.sequence;
    }).catch(() => undefined);
    this.watched = "";
    app.opened();
    this.stayAtTheEnd();
  }

  private takeDoing(message: { going: boolean; now: string; problem: string }): void {
    const { app } = this;
    if (app.data.board) app.data.board.going = message.going;
    // A short answer may be over before its sequence is known here.
    if (message.going && (app.data.board?.kind !== "run" || app.streams)) this.streamed = app.state.sequence;
    this.stayAtTheEnd();
    const { doing } = app.ui;
    doing.hidden = !message.now && !message.problem;
    doing.className = message.problem ? "doing problem" : "doing";
    const text = [message.problem, message.now].filter(Boolean).join(" · ");
    if (doing.firstChild?.nodeValue !== text) {
      // Gradients of a long answer take minutes without any news: the clock says that it goes on.
      const [clock, since] = [h("span", { "aria-hidden": "true" }), performance.now()];
      doing.replaceChildren(text, clock);
      clearInterval(this.ticking);
      if (message.now) this.ticking = window.setInterval(() => (clock.textContent = `, for ${Math.round((performance.now() - since) / 1000)} s`), 1000);
    }
    app.draw();
  }

  /** Whoever follows a stream is at its end, and stays there when it is over; a page that is opened later begins where something is wrong. */
  private stayAtTheEnd(): void {
    const { app } = this;
    const { board } = app.data;
    // Runs go on side by side; of answers only the newest is written.
    const streamed = board?.kind === "run" ? this.streamed === app.state.sequence : this.streamed >= 0 && app.state.sequence === board?.sequences - 1;
    if (streamed && app.ready && app.state.follow && app.data.board.live && app.data.columns) app.set(this.followed());
  }

  private takeColumns(message: any): void {
    const { app } = this;
    this.streamed = app.state.sequence;
    app.data.put(message.first, message);
    app.data.columns = Math.max(app.data.columns, message.length);
    app.data.sequence.headline = message.headline ?? app.data.sequence.headline;
    const curves = app.data.known("tracks", "tracks")?.header;
    if (curves) curves.tops = message.tops; // exactly: bytes are rounded
    const now = performance.now();
    // Those of a prompt come at once: they say nothing about speed.
    message.pieces.forEach((_: string, i: number) => {
      if (message.generated[i]) this.arrivals.push(now);
    });
    this.arrivals = this.arrivals.filter((each) => now - each < RATE);
    if (app.state.follow) app.set(this.followed());
    app.draw();
    clearTimeout(this.slower);
    this.slower = window.setTimeout(() => app.draw(), RATE); // nothing comes any more, perhaps
  }

  /** What is in view while tokens come: all of them, until they would get too narrow, and the last that was measured. */
  followed(): Partial<State> {
    const { app } = this;
    const { columns } = app.data;
    const row = app.rows[app.rowIndex];
    // The last token of an answer is written and never run.
    const ended = app.data.board.axis === "token" && !app.data.board.going;
    const written = columns > 1 && (ended || (row && app.plane(row.plane)?.code(row.index, columns - 1) === NOT_MEASURED));
    const column = Math.max(0, columns - (written ? 2 : 1));
    const fit = Math.floor(app.scene.width / NARROWEST);
    // A page that was never in front has no width so far.
    return columns <= fit || !fit ? { column, first: 0, last: 0 } : { column, first: columns - fit, last: columns };
  }

  /** Tell the server what is in view, where that has changed. */
  watch(): void {
    const { app } = this;
    // Of a sequence that is on its way it is not known how many columns the page will have.
    if (!this.line || !this.connected || !app.ready || app.data.index !== app.state.sequence) return;
    const planes = ["layers", "tracks", ...app.state.voxels.filter((each) => app.rows.some((row) => row.plane === each))];
    const wanted = JSON.stringify([app.state.sequence, app.state.metric, ...planes]);
    if (wanted === this.watched) return;
    this.watched = wanted;
    this.line.say({ type: "watch", sequence: app.state.sequence, metric: app.state.metric, planes, from: app.data.columns });
  }
}
