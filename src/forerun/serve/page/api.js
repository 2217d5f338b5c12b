/** The server: requests with the API key, errors as one line, and the events of a stream. */

const KEY = "forerun.key"; // of sessionStorage: gone when the tab is

export class ServerError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { name: "ServerError", status, param, retryAfter });
  }
}

export class Server {
  /** `askForKey(wasWrong)` resolves to a key, or to null when the user does not have one. */
  constructor(askForKey) {
    this.askForKey = askForKey;
    this.asking = null;
  }

  /** What is served: model, context, drafters, defaults, version. */
  props() {
    return this.#json("/props");
  }

  /** How the engine is. It never asks for a key: it is called every second. */
  async stats(signal) {
    const response = await this.#send("/stats", { signal });
    if (!response.ok) throw await errorOf(response);
    return response.json();
  }

  /** The chunks of one answer, as they come. Abort the signal to stop the work. */
  async *chat(body, signal) {
    const response = await this.#fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    let ended = false;
    for await (const data of serverEvents(response.body)) {
      if (data === "[DONE]") {
        ended = true;
        break;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message ?? "The server failed.", { param: chunk.error.param });
      yield chunk;
    }
    if (!ended) throw new ServerError("The connection ended before the answer did.");
  }

  async #json(path) {
    return (await this.#fetch(path)).json();
  }

  /** A response that is fine; asks for the key as often as the server does. */
  async #fetch(path, options = {}) {
    for (;;) {
      const response = await this.#send(path, options);
      if (response.ok) return response;
      const error = await errorOf(response);
      if (response.status !== 401 || !(await this.#newKey(response.usedKey))) throw error;
    }
  }

  async #send(path, options = {}) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    try {
      const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin" });
      response.usedKey = key;
      return response;
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached.");
    }
  }

  /** One question at a time, however many requests were refused. */
  async #newKey(used) {
    if (sessionStorage.getItem(KEY) !== used) return true; // another request has got one meanwhile
    this.asking ??= this.askForKey(used !== null).finally(() => {
      this.asking = null;
    });
    const key = await this.asking;
    if (key) sessionStorage.setItem(KEY, key);
    return Boolean(key);
  }
}

async function errorOf(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not ours: a proxy's page, perhaps. The status says enough.
  }
  const retryAfter = Number(response.headers.get("Retry-After")) || null;
  const message = error.message ?? `The server answered ${response.status} ${response.statusText}.`.replace(" .", ".");
  return new ServerError(message, { status: response.status, param: error.param ?? null, retryAfter });
}

/** The data of each server-sent event, for any way the bytes may be cut. Comments (pings) are passed over. */
export async function* serverEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      let read;
      try {
        read = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError("The connection was lost.");
      }
      if (read.done) return;
      rest += read.value;
      // A "\r" at the end may be half of "\r\n": it waits for what comes next.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
