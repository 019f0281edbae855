// What a visitor does, and what the server says.
const player = new Player((block, first) => {
  if (first) return showFigures(block);
  state.ack = Math.max(state.ack, block.n);
  sendSoon();
});

const keys = new Keys(stage, $(".qwm-pad"), () => sendSoon(), pressed, () => stage.blur());
const choices = new Choices(choicesChanged, sceneChosen, pictureChosen);
const worlds = new Worlds(worldPicked);

async function drive() {
  if (state.phase === "live") return resume();
  if (state.phase !== "idle" && state.phase !== "ended") return;
  stage.focus({ preventScroll: true });
  quiet();
  enter("joining");
  await known();
  if (state.phase !== "joining") return;
  const settings = choices.read();
  try {
    const reply = await server.join({ sess: state.session, settings: settings });
    if (!reply.ok) throw Error(reply.error);
    state.place = reply.place;
  } catch (error) {
    enter("idle");
    return refused(error.message || "The server does not answer. Try again.");
  }
  Object.assign(state, { ack: -1, stop: false, run: false, applied: settings, ticket: state.ticket + 1,
    waited: 0, loading: "", stages: [] });
  await send();
  if (!element.isConnected) return;
  trigger("drive", { sess: state.session, settings: settings, ticket: state.ticket });
  enter(state.place > 0 ? "queued" : "loading");
}

function resume() {
  if (state.phase !== "live") return;
  stage.focus({ preventScroll: true });
  state.run = !input("stepmode").checked;
  refresh();
  sendSoon();
}

function pause() {
  if (!state.run) return;
  state.run = false;
  refresh();
  sendSoon();
}

function step() {
  if (state.phase !== "live") return drive();
  state.run = false;
  state.steps += 1;
  beat(state.lastMs);
  refresh();
  sendSoon();
}

function pressed(single) {
  state.pressedAt = performance.now();
  if (state.phase === "idle" || state.phase === "ended") return drive();
  if (state.phase !== "live") return;
  if (single || input("stepmode").checked) {
    state.run = false;
    state.steps += 1;
  } else state.run = true;
  refresh();
  sendSoon();
}

async function reset() {
  if (state.phase !== "live") return drive();
  const settings = choices.read();
  const reply = await server.check({ sess: state.session, settings: settings });
  if (!reply.ok) return refused(reply.error);
  quiet();
  state.before = state.applied;
  state.applied = settings;
  state.resets += 1;
  state.run = false;
  state.stages = [];
  enter("loading");
  sendSoon();
}

// Another prompt for the run that goes on; the picture stays while it is read.
async function changePrompt() {
  if (state.phase !== "live") return;
  const settings = { ...state.applied, prompt: input("prompt").value };
  const reply = await server.check({ sess: state.session, settings: settings });
  if (!reply.ok) return refused(reply.error);
  quiet();
  state.before = state.applied;
  state.applied = settings;
  state.prompts += 1;
  state.run = false;
  state.stages = [];
  enter("loading");
  sendSoon();
}

// Another world was picked. A run goes on in its own until the choices are taken up.
function worldPicked(hello) {
  choices.fill(hello);
  if (state.phase === "idle" || state.phase === "ended") adopt(hello);
  choicesChanged();
  refresh();
}

// The page turns to a world: its keys, lanes and words.
function adopt(hello) {
  state.hello = hello;
  lanes.describe(hello.lanes);
  keys.bind(hello.keys, hello.legend);
  const none = Object.keys(hello.keys).length === 0;
  $(".qwm-pad").hidden = none;
  say("world", hello.world.title.split(": ")[0]);
  say("device", "runs on " + hello.device.toUpperCase());
  say("foot", hello.world.title + " \u00b7 " + hello.world.licence +
    " \u00b7 everything runs on this machine, nothing is sent anywhere");
  if (state.phase === "live") return;
  player.clear();
  lanes.clear();
  player.show(lanes.build(choices.read().lanes, hello.world.size));
  poster();
}

function leave() {
  server.leave({ sess: state.session });
  state.stop = true;
  sendSoon();
  enter("idle");
}

async function download() {
  const button = $('[data-do="download"]');
  button.disabled = true;
  pause();
  say("download", "Packing");
  try {
    if (state.phase === "live") {
      state.flushes += 1;
      await sendSoon();
    }
    const reply = await server.download({ sess: state.session, flushes: state.flushes });
    if (!reply.ok) return refused(reply.error);
    const link = make("a", { href: reply.url, download: reply.name });
    document.body.append(link);
    link.click();
    link.remove();
    tell("The session was packed into " + reply.name);
  } catch (error) {
    complain("The session could not be packed. Try again.");
  } finally {
    say("download", "Download session");
    refresh();
    sendSoon();
  }
}

// The inspector is a page of its own inside this one: its keys and its pictures stay apart.
function inspect() {
  const panel = $(".qwm-inspector"), button = $('[data-do="inspect"]');
  const opens = panel.hidden;
  panel.hidden = !opens;
  button.setAttribute("aria-expanded", opens);
  say("inspect", opens ? "Close inspector" : "Inspect");
  if (!opens) return panel.replaceChildren();
  pause();
  const address = "inspect#" + new URLSearchParams({ session: state.session || "",
    open: state.frames > 0 ? "live" : "" });
  const frame = make("iframe", { src: address, title: "Inspector" });
  frame.addEventListener("load", () => {
    const inner = frame.contentDocument.documentElement;
    new ResizeObserver(() => (frame.style.height = inner.querySelector("body").offsetHeight + 4 + "px"))
      .observe(inner.querySelector("body"));
    frame.contentWindow.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.target.matches("select, input[type=number]")) return;
      inspect();
      button.focus();
    });
    frame.focus();
  });
  panel.replaceChildren(frame);
  panel.scrollIntoView({ block: "start", behavior: calm.matches ? "auto" : "smooth" });
}

async function pictureChosen(file) {
  if (file.size > state.hello.limits.upload)
    return complain("The file is larger than " + bytes(state.hello.limits.upload) + "; choose a smaller one.");
  try {
    await known();
    const sent = await upload(file);
    const reply = await server.picture({ sess: state.session, path: sent.path, settings: choices.read() });
    if (!reply.ok) return refused(reply.error);
    choices.own(reply.picture, reply.shown);
  } catch (error) {
    complain("The file could not be sent; use a PNG, JPEG or WebP picture, or an mp4, webm or mkv video.");
  }
}

function sceneChosen(picture) {
  stage.scrollIntoView({ block: "nearest", behavior: calm.matches ? "auto" : "smooth" });
  if (state.phase === "live" && choices.hello.world.name === state.driven) return reset();
  if (state.phase === "live") return choicesChanged();
  if (state.phase === "idle" || state.phase === "ended") {
    lanes.clear();
    player.clear();
    player.poster(picture);
  }
}

function choicesChanged() {
  const chosen = choices.read();
  const changed = state.phase === "live" && JSON.stringify(chosen) !== JSON.stringify(state.applied);
  $(".qwm-apply").hidden = !changed;
  if ((state.phase === "idle" || state.phase === "ended") && chosen.lanes.length &&
    choices.hello === state.hello) {
    player.show(lanes.build(chosen.lanes, state.hello.world.size));
    poster();
  }
}

const actions = {
  drive: () => {
    if (state.run) return pause();
    stage.scrollIntoView({ block: "nearest" });
    drive();
  },
  veil: () => {
    if (state.phase === "queued") return leave();
    if (state.phase === "gone") return location.reload();
    stage.scrollIntoView({ block: "nearest" });
    return drive();
  },
  step: step,
  reset: reset,
  apply: reset,
  download: download,
  inspect: inspect,
  prompt: changePrompt,
  fetch: () => worlds.fetch(),
  dismiss: quiet,
  dice: () => {
    input("seed").value = Math.floor(Math.random() * 10000);
    choicesChanged();
  },
  theme: () => document.body.classList.toggle("dark"),
};
for (const button of $$("[data-do]")) {
  const action = actions[button.dataset.do];
  // A click must not take the focus from the stage, or Pause would pause twice.
  button.addEventListener("pointerdown", (event) => event.preventDefault());
  button.addEventListener("click", (event) => {
    event.stopPropagation();
    action();
  });
}
stage.addEventListener("pointerdown", (event) => {
  if (event.target.closest("button")) return;
  event.preventDefault();
  drive();
  keys.look(event);
});
stage.addEventListener("keydown", (event) => {
  const free = event.code === "Space" && !("Space" in keys.bindings);
  if (event.target !== stage || (event.code !== "Enter" && !free)) return;
  event.preventDefault();
  if (event.repeat) return;
  if (free && state.run) pause();
  else drive();
});
stage.addEventListener("blur", pause);
stage.addEventListener("focus", refresh);
stage.addEventListener("blur", refresh);
document.addEventListener("visibilitychange", () => document.hidden && pause());
input("stepmode").checked = calm.matches;
input("stepmode").addEventListener("change", () => {
  pause();
  refresh();
});

// What the server says -------------------------------------------------------------------------
const speakers = {
  hello: (message) => {
    state.session = message.session;
    worlds.learn(message);
    if (state.ticket === 0 && lanes.names.length === 0) welcome(message);
    refresh();
    worlds.refresh();
  },
  block: (message) => {
    if (message.run) begin(message);
    state.lastMs = message.run ? 0 : message.ms;
    player.push(message);
    beat(state.run ? state.lastMs : 0);
  },
  error: (message) => {
    complain(message.message);
    enter(state.session === null ? "gone" : "ended"); // without a session only a reload helps
    // The page goes back to the world that worked.
    if (state.driven && choices.hello.world.name !== state.driven) worlds.pick(state.driven);
  },
  notice: (message) => {
    (message.good ? tell : complain)(message.message);
    if (!message.good && state.before) state.applied = state.before;
    if (message.world !== choices.hello.world.name) worlds.pick(message.world);
    if (!message.running) return;
    enter("live");
    if (document.activeElement === stage && !document.hidden) resume();
    sendSoon();
  },
  ended: (message) => {
    if (message.message !== "stopped") tell(message.message);
    enter("ended");
  },
};

// The first block of a run: the lanes are there, the stage takes the keys.
function begin(message) {
  const hello = worlds.hellos[state.applied.world];
  if (hello && hello.world.name !== state.hello.world.name) adopt(hello);
  state.driven = state.applied.world;
  player.clear();
  lanes.clear();
  player.show(lanes.build(message.lanes.map((lane) => lane.name), message.size));
  say("kernels", "Kernels: " + message.run.kernels + ".");
  out("kernels").hidden = false;
  state.frames = 0;
  state.rate = [];
  for (const name of ["fps", "latency"]) say(name, "\u2013");
  say("possible", "");
  enter("live");
  if (document.activeElement === stage && !document.hidden) resume();
  sendSoon();
}

function listen() {
  const message = JSON.parse(props.value);
  if (message.v !== PROTOCOL) {
    complain("This page is older than the server; reload it.");
    return enter("gone");
  }
  if (message.drive !== undefined && message.drive !== state.ticket) return;
  speakers[message.kind](message);
}

function welcome(hello) {
  choices.fill(hello);
  adopt(hello);
  enter("idle");
}

function poster() {
  const shown = $('.qwm-scene[aria-checked="true"] img');
  if (shown) player.poster(shown.src);
}

watch("value", listen);
listen();
