// The page's state: idle, joining, queued, loading, live, ended, gone; and what it tells the server.
const PROTOCOL = 1;
const HEARTBEAT = 500;
const stage = $(".qwm-stage");
const lanes = new Lanes($(".qwm-lanes"));
const gauge = new Gauge(lanes);

const state = {
  phase: "idle", hello: null, session: null, run: false, steps: 0, resets: 0, flushes: 0, prompts: 0, stop: false,
  ack: -1, seq: 0, ticket: 0, applied: null, place: null, loading: "", stages: [], silent: 0,
  ended: "", lastSent: 0, waited: 0, left: null, tokens: 0, frames: 0, rate: [], pressedAt: 0, lastMs: 0,
  before: null, driven: null,
};
