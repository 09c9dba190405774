// One stream of server-sent events, which reconnects by itself.

import { checkSession } from "./session.js";

const EVENTS = ["cluster", "topics", "topic", "groups", "group", "transactions", "pipelines", "clients", "traces"];
const SILENCE_MS = 8000; // A node sends an event every 3 s. A paused node keeps its connections open, but sends nothing.
const RETRY_MS = 1000;

export class Live {
  constructor(onEvent, onConnection) {
    this.onEvent = onEvent;
    this.onConnection = onConnection;
    this.source = null;
    this.query = null;
    this.retry = null;
    this.heardAt = Date.now();
    setInterval(() => this.#check(), 1000);
  }

  // Subscribes to other events.
  listen(query) {
    if (query === this.query) return;
    this.query = query;
    this.#open();
  }

  #open() {
    clearTimeout(this.retry);
    this.source?.close();
    this.heardAt = Date.now();
    const source = (this.source = new EventSource(`/api/events?${this.query}`));
    source.onopen = () => this.#heard(source);
    // The browser reconnects only after some failures, so reconnect here after all of them.
    source.onerror = () => source === this.source && this.#lost();
    for (const name of EVENTS) {
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        this.#heard(source);
        this.onEvent(name, JSON.parse(event.data));
      });
    }
  }

  #heard(source) {
    if (source !== this.source) return;
    this.heardAt = Date.now();
    this.onConnection(true);
  }

  #lost() {
    this.source?.close();
    this.source = null;
    this.onConnection(false);
    // A stream ends with its session, too.
    checkSession();
    clearTimeout(this.retry);
    this.retry = setTimeout(() => this.#open(), RETRY_MS);
  }

  #check() {
    if (this.source && Date.now() - this.heardAt > SILENCE_MS) this.#lost();
  }
}
