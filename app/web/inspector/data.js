// Clips from the server: their facts, sheets of raw frames (kept while there is room), curves.
const KEPT_BYTES = 384 * 2 ** 20;

export class ServerError extends Error {}

async function answer(response) {
  if (response.ok) return response;
  let line = "The server does not answer. Try again.";
  try {
    line = (await response.json()).error || line;
  } catch (error) { /* not JSON: the line above stands */ }
  throw new ServerError(line);
}

export class Server {
  constructor(session) {
    this.session = session;
  }

  address(what, parameters = {}) {
    return "inspect/api/" + what + "?" + new URLSearchParams({ session: this.session, ...parameters });
  }

  async get(what, parameters) {
    return answer(await fetch(this.address(what, parameters)));
  }

  async post(what, body) {
    const response = await fetch("inspect/api/" + what, { method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ session: this.session, ...body }) });
    return (await answer(response)).json();
  }

  // told(share): how much of the files has been sent; fetch cannot say that.
  async upload(files, told) {
    const form = new FormData();
    for (const file of files) form.append("file", file);
    const response = await new Promise((done, failed) => {
      const request = new XMLHttpRequest();
      request.open("POST", this.address("upload"));
      request.upload.onprogress = (event) => event.lengthComputable && told(event.loaded / event.total);
      request.onload = () => done(new Response(request.responseText, { status: request.status }));
      request.onerror = () => failed(new ServerError("The server does not answer. Try again."));
      request.send(form);
    });
    return (await answer(response)).json();
  }
}

// Pixels of a clip. `frame(lane, t)` is an ImageData or null while its sheet is on the way.
export class Clip {
  constructor(server, reply, arrived) {
    this.server = server;
    this.token = reply.clip;
    this.info = reply.info;
    this.arrived = arrived;
    this.sheets = new Map();
    this.wanted = new Map();
    const [width, height] = this.info.size;
    const one = width * height * 4 * this.info.lanes.length * this.info.sheet_frames;
    this.most = Math.max(3, Math.floor(KEPT_BYTES / one));
  }

  get lanes() { return this.info.lanes; }
  get frames() { return this.info.frames; }
  get sheetCount() { return Math.ceil(this.frames / this.info.sheet_frames); }

  has(t) {
    return this.sheets.has(Math.floor(t / this.info.sheet_frames));
  }

  frame(lane, t) {
    const number = Math.floor(t / this.info.sheet_frames);
    const sheet = this.sheets.get(number);
    if (!sheet) {
      this.fetch(number);
      return null;
    }
    this.sheets.delete(number);
    this.sheets.set(number, sheet);
    const [width, height] = this.info.size;
    const row = (t - number * this.info.sheet_frames) * height;
    return cut(sheet, lane * width, row, width, height);
  }

  ahead(t, count = 2) {
    const number = Math.floor(t / this.info.sheet_frames);
    for (let n = number; n <= Math.min(number + count, this.sheetCount - 1); n += 1) this.fetch(n);
  }

  async fetch(number) {
    if (this.sheets.has(number) || this.wanted.has(number)) return this.wanted.get(number);
    const work = this.load(number);
    this.wanted.set(number, work);
    try {
      await work;
    } finally {
      this.wanted.delete(number);
    }
  }

  async load(number) {
    const response = await this.server.get("sheet", { clip: this.token, number });
    this.sheets.set(number, await pixels(await response.blob()));
    while (this.sheets.size > this.most) this.sheets.delete(this.sheets.keys().next().value);
    this.arrived(number);
  }

  async slice(x0, y0, x1, y1) {
    return pixels(await (await this.server.get("slice", { clip: this.token, x0, y0, x1, y1 })).blob());
  }

  async curves() {
    return (await this.server.get("curves", { clip: this.token })).json();
  }

  get csv() {
    return this.server.address("curves.csv", { clip: this.token });
  }
}

// Exact bytes of a PNG: no colour conversion and no premultiplying on the way.
async function pixels(blob) {
  const bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context.getImageData(0, 0, canvas.width, canvas.height);
}

export function cut(image, left, top, width, height) {
  const out = new ImageData(width, height);
  for (let y = 0; y < height; y += 1) {
    const start = ((top + y) * image.width + left) * 4;
    out.data.set(image.data.subarray(start, start + width * 4), y * width * 4);
  }
  return out;
}
