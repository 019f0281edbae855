// The pictures: a canvas per pane, one zoom and one place for all of them, pointer and line.
import { make, out } from "./dom.js";

const MOST_ZOOM = 32;

export class Panes {
  constructor(holder, does) {
    this.holder = holder;
    this.does = does; // { pointed(x, y), lined(x0, y0, x1, y1), picked(x, y), dragged(x) }
    this.zoom = 1;
    this.centre = null;
    this.tool = "pan";
    this.cross = null;
    this.line = null;
    this.panes = [];
    this.pictures = [];
    new ResizeObserver(() => this.draw()).observe(holder);
  }

  // heads: [text, small text, lane number or null] per pane.
  build(heads, size) {
    this.size = size;
    this.centre = this.centre || [size[0] / 2, size[1] / 2];
    this.holder.style.setProperty("--count", heads.length);
    this.holder.style.setProperty("--aspect", size[0] / size[1]);
    this.holder.dataset.count = heads.length;
    this.border = null;
    this.panes = heads.map(([text, small, number]) => {
      const canvas = make("canvas", { role: "img", "aria-label": text + " " + small });
      this.listen(canvas);
      const caption = make("figcaption", {}, [
        ...(number === null ? [] : [make("span", { class: "swatch", "data-n": number })]),
        text, make("small", { textContent: small })]);
      return { canvas, small: caption.querySelector("small"),
        node: make("figure", { class: "pane", "data-n": number === null ? "" : number }, [caption, canvas]) };
    });
    this.holder.replaceChildren(...this.panes.map((pane) => pane.node));
    this.pictures = [];
    this.holder.setAttribute("aria-busy", "true");
    this.backs = this.panes.map(() => new OffscreenCanvas(size[0], size[1]));
  }

  forget() {
    this.centre = null;
    this.zoom = 1;
    this.line = this.cross = null;
  }

  // pictures: an ImageData per pane, null where it is still on the way (the last one stays).
  show(pictures, smalls = []) {
    this.holder.setAttribute("aria-busy", String(pictures.some((picture) => !picture)));
    pictures.forEach((picture, index) => {
      if (!picture) return;
      this.pictures[index] = picture;
      this.backs[index].getContext("2d").putImageData(picture, 0, 0);
    });
    smalls.forEach((text, index) => { this.panes[index].small.textContent = text; });
    this.draw();
  }

  draw() {
    if (!this.size) return;
    const [width, height] = this.size;
    out("zoom").textContent = (this.zoom < 10 ? Number(this.zoom.toFixed(1)) : Math.round(this.zoom)) + "\u00d7";
    this.panes.forEach((pane, index) => {
      const canvas = pane.canvas;
      const wide = Math.max(1, Math.round(canvas.clientWidth * devicePixelRatio));
      const high = Math.max(1, Math.round((wide * height) / width));
      if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
      // A finger scrolls the page where there is nothing that it could move.
      canvas.style.touchAction = this.zoom === 1 && this.tool !== "slice" ? "pan-y" : "none";
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      const [left, top, seenWide, seenHigh] = this.seen();
      context.drawImage(this.backs[index], left, top, seenWide, seenHigh, 0, 0, wide, high);
      this.marks(context, wide / seenWide, left, top);
    });
  }

  // The part of the picture that shows: left, top, width, height in its pixels.
  seen() {
    const [width, height] = this.size;
    const wide = width / this.zoom, high = height / this.zoom;
    const clamp = (value, low, most) => Math.min(Math.max(value, low), most);
    this.centre = [clamp(this.centre[0], wide / 2, width - wide / 2), clamp(this.centre[1], high / 2, height - high / 2)];
    return [this.centre[0] - wide / 2, this.centre[1] - high / 2, wide, high];
  }

  marks(context, scale, left, top) {
    const at = (x, y) => [(x + 0.5 - left) * scale, (y + 0.5 - top) * scale];
    if (this.border !== null) {
      const x = (this.border - left) * scale;
      this.stroke(context, [[x, 0], [x, context.canvas.height]]);
    }
    if (this.line) this.stroke(context, [at(this.line[0], this.line[1]), at(this.line[2], this.line[3])]);
    if (this.cross) {
      const [x, y] = at(this.cross[0], this.cross[1]);
      const half = Math.max(scale / 2, 2);
      this.stroke(context, [[x - half, y - half], [x + half, y - half], [x + half, y + half], [x - half, y + half],
        [x - half, y - half]]);
    }
    if (this.box && this.box.frame === this.frame) { // the patch that was asked for, in its frame
      const [left, top, across, down] = this.box.place;
      const [x, y] = at(left - 0.5, top - 0.5);
      const wide = across * scale, high = down * scale;
      this.stroke(context, [[x, y], [x + wide, y], [x + wide, y + high], [x, y + high], [x, y]]);
    }
  }

  // Dark below light: seen on any picture.
  stroke(context, points) {
    for (const [width, style] of [[3.5, "#000"], [1.5, "#fff"]]) {
      context.beginPath();
      points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
      context.lineWidth = width * devicePixelRatio;
      context.strokeStyle = style;
      context.stroke();
    }
  }

  zoomBy(factor, x, y) {
    if (!this.size) return;
    const before = this.zoom;
    this.zoom = Math.min(Math.max(this.zoom * factor, 1), MOST_ZOOM);
    if (x !== undefined) {
      const share = 1 - before / this.zoom; // the pixel under the pointer stays where it is
      this.centre = [this.centre[0] + (x - this.centre[0]) * share, this.centre[1] + (y - this.centre[1]) * share];
    }
    this.draw();
  }

  // Moves the zoomed pictures as far as it takes to show a pixel.
  reveal(x, y) {
    const [left, top, wide, high] = this.seen();
    const into = (centre, place, start, length) =>
      centre + Math.min(0, place - start) + Math.max(0, place + 1 - (start + length));
    this.centre = [into(this.centre[0], x, left, wide), into(this.centre[1], y, top, high)];
    this.draw();
  }

  place(event, canvas) {
    const [left, top, wide, high] = this.seen();
    const box = canvas.getBoundingClientRect();
    return [left + ((event.clientX - box.left) / box.width) * wide, top + ((event.clientY - box.top) / box.height) * high];
  }

  pixel(event, canvas) {
    const [x, y] = this.place(event, canvas);
    return [Math.min(Math.max(Math.floor(x), 0), this.size[0] - 1), Math.min(Math.max(Math.floor(y), 0), this.size[1] - 1)];
  }

  listen(canvas) {
    let from = null;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      from = { pixel: this.pixel(event, canvas), client: [event.clientX, event.clientY], centre: [...this.centre] };
    });
    canvas.addEventListener("pointermove", (event) => {
      const pixel = this.pixel(event, canvas);
      this.does.pointed(...pixel);
      if (!from) return;
      if (this.tool === "slice") this.line = [...from.pixel, ...pixel];
      if (this.tool === "pan" && this.zoom === 1) this.does.dragged(pixel[0]); // nothing to move
      else if (this.tool === "pan") {
        const scale = this.size[0] / this.zoom / canvas.getBoundingClientRect().width;
        this.centre = [from.centre[0] - (event.clientX - from.client[0]) * scale,
          from.centre[1] - (event.clientY - from.client[1]) * scale];
      }
      this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      if (!from) return;
      const pixel = this.pixel(event, canvas);
      if (this.tool === "slice") this.does.lined(...from.pixel, ...pixel);
      if (this.tool === "patch") this.does.picked(...pixel);
      from = null;
    });
    canvas.addEventListener("pointercancel", () => { from = null; });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoomBy(event.deltaY < 0 ? 1.25 : 0.8, ...this.place(event, canvas));
    }, { passive: false });
  }
}
