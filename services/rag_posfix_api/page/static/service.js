// Requests to the service that the page came from. Addresses are relative, so that the service may stand behind a path.

export class ServiceError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** The body of one chat request: the passages in their order; null: the service retrieves them from its index. */
export function chatBody(question, passages, mitigation) {
  return {
    model: "default",
    messages: [{ role: "user", content: question }],
    max_tokens: 64,
    temperature: 0,
    documents: passages?.map(toDocument), // undefined is left out of JSON
    posfix: { mitigation, order: "original" },
  };
}

/** A passage as requests have it; the score is that of the search, if there was one. */
export function toDocument(passage) {
  const document = { id: passage.id, text: passage.text };
  if (passage.heading) document.title = passage.heading;
  if (passage.score !== null) document.score = passage.score;
  return document;
}

export class Service {
  constructor(key) {
    this.key = key; // a function: the key may be typed later
  }

  /** What the page needs to know before any key: {ready, key, attention, index}. */
  async facts() {
    return this.json("page/service.json");
  }

  async json(path, body, signal) {
    const response = await this.send(path, body, signal);
    return response.json();
  }

  async send(path, body, signal) {
    const headers = {};
    if (this.key()) headers.authorization = `Bearer ${this.key()}`;
    const options = { headers, signal, credentials: "omit" };
    if (body !== undefined) {
      options.method = "POST";
      options.body = JSON.stringify(body);
      headers["content-type"] = "application/json";
    }
    let response;
    try {
      response = await fetch(path, options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServiceError(0, "unreachable", "The service cannot be reached.");
    }
    if (!response.ok) throw await failure(response);
    return response;
  }

  /** Yields the chunks of a streamed chat completion. */
  async *chat(body, signal) {
    const response = await this.send("v1/chat/completions", { ...body, stream: true }, signal);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServiceError(500, chunk.error.code, chunk.error.message);
      yield chunk;
    }
    throw new ServiceError(0, "cut", "The answer was cut off: the connection was closed.");
  }
}

async function failure(response) {
  const body = await response.json().catch(() => ({}));
  const error = body.error ?? {};
  return new ServiceError(response.status, error.code ?? "", error.message ?? `The service answered ${response.status}.`);
}

/** Yields the data of server-sent events; one event ends with an empty line. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    const complete = waiting.split("\n\n");
    waiting = complete.pop();
    for (const event of complete) {
      const lines = event.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}
