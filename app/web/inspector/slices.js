// Slices through time: the history of one line of pixels per lane, with the playhead across.
import { $$, input, make, out, title } from "./dom.js";
import { cut } from "./data.js";

export class Slices {
  constructor(seek) {
    this.seek = seek;
    this.clip = null;
    this.asked = 0;
    this.canvases = [];
  }

  open(clip) {
    this.clip = clip;
    const [width, height] = clip.info.size;
    Object.assign(input("row"), { max: height - 1, value: Math.floor(height / 2) });
    Object.assign(input("column"), { max: width - 1, value: Math.floor(width / 2) });
  }

  // The line that the number fields say: a row or a column.
  typed() {
    const [width, height] = this.clip.info.size;
    const inside = (node, most) => Math.min(Math.max(Math.round(Number(node.value)) || 0, 0), most);
    if (input("slice-row").checked) {
      const y = inside(input("row"), height - 1);
      return [0, y, width - 1, y];
    }
    const x = inside(input("column"), width - 1);
    return [x, 0, x, height - 1];
  }

  async show(line) {
    const asked = (this.asked += 1), clip = this.clip;
    const sheet = await clip.slice(...line);
    if (asked !== this.asked || clip !== this.clip) return; // a newer line was drawn meanwhile
    const points = sheet.width / clip.lanes.length;
    const holder = out("slices");
    holder.style.setProperty("--count", clip.lanes.length);
    this.canvases = clip.lanes.map((lane, index) => {
      const picture = cut(sheet, index * points, 0, points, sheet.height);
      const canvas = make("canvas", { width: points, height: sheet.height, role: "img",
        "aria-label": "Slice through time of " + title(lane) + " along (" + line.slice(0, 2) + ") to (" + line.slice(2) + ")" });
      canvas.style.height = Math.min(420, Math.max(160, sheet.height * 2)) + "px";
      canvas.addEventListener("pointerdown", (event) => {
        const box = canvas.getBoundingClientRect();
        this.seek(Math.floor(((event.clientY - box.top) / box.height) * clip.frames));
      });
      return { canvas, picture };
    });
    holder.replaceChildren(...this.canvases.map(({ canvas }, index) => make("figure", { class: "pane", "data-n": index }, [
      make("figcaption", {}, [make("span", { class: "swatch", "data-n": index }), title(clip.lanes[index])]), canvas])));
    this.at(this.frame || 0);
  }

  at(frame) {
    this.frame = frame;
    for (const { canvas, picture } of this.canvases) {
      const context = canvas.getContext("2d");
      context.putImageData(picture, 0, 0);
      context.fillStyle = "#ffffffb0";
      context.fillRect(0, frame, Math.max(2, canvas.width * 0.03), 1);
      context.fillRect(canvas.width - Math.max(2, canvas.width * 0.03), frame, canvas.width, 1);
    }
  }

  clear() {
    this.canvases = [];
    $$("[data-out=slices] figure").forEach((node) => node.remove());
  }
}
