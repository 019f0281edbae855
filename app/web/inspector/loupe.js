// The loupe: the pixels around one place in every lane, with their values.
import { $, make, out, title } from "./dom.js";
import { cut } from "./data.js";

const SIDE = 9;

// Another clip: what stood here was of the one before.
export function emptyLoupe() {
  out("at").textContent = "";
  out("loupe").replaceChildren();
  $(".loupe > .hint").hidden = false;
}

export function showLoupe(clip, lanes, x, y, frame) {
  out("at").textContent = x + ", " + y + " in frame " + frame;
  $(".loupe > .hint").hidden = true;
  const reference = lanes[0];
  out("loupe").replaceChildren(...lanes.map((picture, index) => {
    const values = picture ? pixel(picture, x, y) : null;
    const base = reference ? pixel(reference, x, y) : null;
    const text = values ? "R " + values[0] + "  G " + values[1] + "  B " + values[2] : "on the way";
    const off = values && base && index > 0
      ? values.map((value, c) => (value - base[c] > 0 ? "+" : "") + (value - base[c])).join(" ") : "";
    return make("div", { class: "one", "data-n": index }, [
      make("div", { class: "lens" }, [patch(picture, x, y)]),
      make("div", {}, [make("b", { textContent: title(clip.lanes[index]) }), text,
        make("div", { class: "hint", textContent: off })])]);
  }));
}

export function pixel(picture, x, y) {
  const i = (y * picture.width + x) * 4;
  return [picture.data[i], picture.data[i + 1], picture.data[i + 2]];
}

function patch(picture, x, y) {
  const canvas = make("canvas", { width: SIDE, height: SIDE, role: "img", "aria-label": "Pixels around it" });
  if (!picture) return canvas;
  const half = (SIDE - 1) / 2;
  const left = Math.max(x - half, 0), top = Math.max(y - half, 0);
  const wide = Math.min(x + half + 1, picture.width) - left, high = Math.min(y + half + 1, picture.height) - top;
  canvas.getContext("2d").putImageData(cut(picture, left, top, wide, high), left - (x - half), top - (y - half));
  return canvas;
}
