// Everything by keyboard: frames, views, zoom, the pixel under the loupe, lines and patches.
import { $, title } from "./dom.js";
import { pixel } from "./loupe.js";

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const NAMED = { ",": "back", ".": "forward", "[": "in", "]": "out", "\\": "whole", "+": "larger", "=": "larger",
  "-": "smaller", "0": "fit" };

// does: { state, actions, panes, tokens, view(name), point(x, y), slice(line), stepBy(n), say(text) }
export function listen(does) {
  const { state, actions, panes } = does;
  let begun = null; // where a line of a clip begins that Enter will end

  function beginning() {
    if (panes.tool !== "slice" || (begun && begun.clip !== state.clip)) begun = null;
    return begun && begun.at;
  }

  function move([dx, dy], step) {
    const [width, height] = state.clip.info.size;
    const [x, y] = state.cross || [width >> 1, height >> 1];
    does.point(Math.min(Math.max(x + step * dx, 0), width - 1), Math.min(Math.max(y + step * dy, 0), height - 1));
    panes.reveal(...state.cross);
    const from = beginning();
    if (from) panes.line = [...from, ...state.cross];
    panes.draw();
    const [column, row] = state.cross;
    does.say("Pixel " + column + ", " + row + ": " + state.clip.lanes.map((lane, number) => {
      const picture = state.clip.frame(number, state.frame);
      return title(lane) + " " + (picture ? pixel(picture, column, row).join(" ") : "on the way");
    }).join("; "));
  }

  function enter() {
    if (!state.cross) move([0, 0], 0);
    const [x, y] = state.cross, from = beginning();
    if (panes.tool === "patch") does.tokens.ask(x, y, state.frame);
    else if (from) {
      does.slice([...from, x, y]);
      does.say("Slice from " + from.join(", ") + " to " + x + ", " + y);
      begun = null;
    } else if (panes.tool === "slice") {
      begun = { at: [x, y], clip: state.clip };
      does.say("The line begins at " + x + ", " + y + "; move and press Enter again");
    }
  }

  document.addEventListener("keydown", (event) => {
    // Brackets and backslash are typed with Alt or AltGr on many keyboards, which Windows reports
    // as Ctrl and Alt together.
    const typed = event.altKey && "[]\\".includes(event.key) && event.key.length === 1;
    if (!state.clip || event.metaKey || (!typed && (event.ctrlKey || event.altKey))) return;
    const at = event.target, ranged = at.matches("input[type=range]"), inPanes = at === $(".panes");
    if (at.matches("input[type=number], select, textarea")) return;
    const view = ["side", "wipe", "blink", "difference", "change"][Number(event.key) - 1];
    const arrow = ARROWS[event.key];
    if (NAMED[event.key]) actions[NAMED[event.key]]();
    else if (event.key === " " && !at.matches("button, input, a")) actions.play();
    else if (view && !ranged) does.view(view);
    else if ((event.key === "Home" || event.key === "End") && !ranged) does.stepBy(event.key === "Home" ? -Infinity : Infinity);
    else if (arrow && inPanes) move(arrow, event.shiftKey ? 10 : 1);
    else if (arrow && at.matches(".plot")) does.stepBy(arrow[0] || -arrow[1]);
    else if (event.key === "Enter" && inPanes) enter();
    else return;
    event.preventDefault();
  });
}
