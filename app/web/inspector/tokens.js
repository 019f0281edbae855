// Token selection: which patch of the past a clicked patch's query picks, per cache, layer and head.
import { $, input, make, options, out, title } from "./dom.js";

export class Tokens {
  // renew: takes the live run again and shows its newest frame.
  constructor(server, panes, renew) {
    this.server = server;
    this.panes = panes;
    this.renew = renew;
    this.reply = null;
    input("layer").addEventListener("change", () => this.draw());
  }

  open(clip) {
    this.clip = clip;
    this.reply = null;
    $(".layer").hidden = true;
    out("tokens-panel").hidden = !clip.info.live;
    out("tokens-text").textContent = "";
    out("tokens").replaceChildren();
  }

  async ask(x, y, frame, again = false) {
    out("tokens-text").textContent = "Asking the caches\u2026";
    try {
      const reply = await this.server.post("tokens", { x, y, frame: this.clip.info.first + frame });
      this.reply = reply;
      $(".layer").hidden = false;
      options(input("layer"), reply.layers.map((layer) => [String(layer.layer), String(layer.layer)]));
      this.panes.box = { frame, place: reply.patch };
      this.panes.draw();
      this.draw();
    } catch (error) {
      const text = error.message;
      if (!again && text.startsWith("queries are kept") && frame >= (this.clip.info.borders.at(-1) ?? 0)) {
        await this.renew(); // a chunk was on its way when the clip was taken
        return this.ask(x, y, this.clip.frames - 1, true);
      }
      out("tokens-text").textContent = text;
      out("tokens").replaceChildren();
    }
  }

  draw() {
    if (!this.reply) return;
    const layer = this.reply.layers.find((one) => String(one.layer) === input("layer").value) || this.reply.layers[0];
    const reference = layer.lanes[0];
    const other = (pick, head) => pick.frame !== reference.picks[head].frame || pick.box.join() !== reference.picks[head].box.join();
    const shifted = layer.lanes.slice(1).map((lane) => title(lane.lane) + " picks another patch in "
      + lane.picks.filter(other).length + " of " + lane.picks.length + " heads");
    out("tokens-text").textContent = this.reply.note + " " + (shifted.length ? shifted.join("; ") + "." : "");
    out("tokens").style.setProperty("--count", layer.lanes.length);
    out("tokens").replaceChildren(...layer.lanes.map((lane, number) => make("div", { "data-n": number }, [
      make("h3", { textContent: title(lane.lane) }),
      make("div", { class: "heads" }, lane.picks.map((pick, head) => this.picture(pick, head, lane, number > 0 && other(pick, head))))])));
  }

  picture(pick, head, lane, moved) {
    const [width, height] = this.clip.info.size;
    const canvas = make("canvas", { width: width * 2, height: height * 2, role: "img",
      "aria-label": "frame " + pick.frame + ", patch at " + pick.box.slice(0, 2) });
    const t = pick.frame - this.clip.info.first;
    const index = Math.max(0, this.clip.lanes.indexOf(lane.lane));
    const draw = () => {
      const picture = t >= 0 && t < this.clip.frames ? this.clip.frame(index, t) : null;
      const context = canvas.getContext("2d");
      context.imageSmoothingEnabled = false;
      if (picture) {
        const back = new OffscreenCanvas(width, height);
        back.getContext("2d").putImageData(picture, 0, 0);
        context.drawImage(back, 0, 0, width * 2, height * 2);
      } else if (t >= 0 && t < this.clip.frames) this.clip.fetch(Math.floor(t / this.clip.info.sheet_frames)).then(draw);
      for (const [size, style] of [[5, "#000"], [2, "#fff"]]) {
        context.lineWidth = size;
        context.strokeStyle = style;
        context.strokeRect(pick.box[0] * 2, pick.box[1] * 2, pick.box[2] * 2, pick.box[3] * 2);
      }
    };
    draw();
    const text = "head " + head + ": frame " + pick.frame + (t < 0 ? " (before this clip)" : "") + (moved ? ", moved" : "");
    return make("figure", { class: moved ? "other" : "" }, [canvas, make("figcaption", { textContent: text })]);
  }
}
