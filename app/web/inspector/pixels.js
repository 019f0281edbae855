// Pictures made of pictures: signed differences and changes in time, with gain.

// Blue where the lane is darker than the reference, red where it is brighter, grey where equal.
export function signed(lane, reference, gain) {
  const out = new ImageData(lane.width, lane.height);
  const a = lane.data, b = reference.data, o = out.data;
  for (let i = 0; i < a.length; i += 4) {
    const d = 0.299 * (a[i] - b[i]) + 0.587 * (a[i + 1] - b[i + 1]) + 0.114 * (a[i + 2] - b[i + 2]);
    paint(o, i, (d * gain) / 255);
  }
  return out;
}

// Every channel by itself around middle grey.
export function channels(lane, reference, gain) {
  const out = new ImageData(lane.width, lane.height);
  const a = lane.data, b = reference.data, o = out.data;
  for (let i = 0; i < a.length; i += 4) {
    for (let c = 0; c < 3; c += 1) o[i + c] = 128 + gain * (a[i + c] - b[i + c]);
    o[i + 3] = 255;
  }
  return out;
}

// |x_t - x_(t-1)|, mean over channels, from black through orange to white.
export function change(now, before, gain) {
  const out = new ImageData(now.width, now.height);
  for (let i = 0; i < out.data.length; i += 4) heat(out.data, i, (gain * step(now.data, before.data, i)) / 255);
  return out;
}

// ||x_t - x_(t-1)| of the lane - the same of the reference|, as the curve and docs/metrics.md have it.
export function excess(now, before, referenceNow, referenceBefore, gain) {
  const out = new ImageData(now.width, now.height);
  const a = now.data, b = before.data, c = referenceNow.data, d = referenceBefore.data;
  for (let i = 0; i < a.length; i += 4) {
    let sum = 0;
    for (let k = i; k < i + 3; k += 1) sum += Math.abs(Math.abs(a[k] - b[k]) - Math.abs(c[k] - d[k]));
    heat(out.data, i, (gain * sum) / 765);
  }
  return out;
}

export function wiped(left, right, border) {
  const out = new ImageData(new Uint8ClampedArray(left.data), left.width, left.height);
  for (let y = 0; y < left.height; y += 1) {
    const row = y * left.width;
    out.data.set(right.data.subarray((row + border) * 4, (row + left.width) * 4), (row + border) * 4);
  }
  return out;
}

// The colours of a scale from left to right: -1 to 1 where signed, else 0 to 1.
export function ramp(count, isSigned) {
  const out = new ImageData(count, 1);
  for (let n = 0; n < count; n += 1) {
    if (isSigned) paint(out.data, 4 * n, (2 * n) / (count - 1) - 1);
    else heat(out.data, 4 * n, n / (count - 1));
  }
  return out;
}

function step(a, b, i) {
  return (Math.abs(a[i] - b[i]) + Math.abs(a[i + 1] - b[i + 1]) + Math.abs(a[i + 2] - b[i + 2])) / 3;
}

function paint(o, i, value) {
  const v = Math.max(-1, Math.min(1, value));
  const strength = Math.abs(v);
  o[i] = 128 + (v > 0 ? 110 * strength : -112 * strength);
  o[i + 1] = 128 - 100 * strength;
  o[i + 2] = 128 + (v < 0 ? 120 * strength : -112 * strength);
  o[i + 3] = 255;
}

function heat(o, i, value) {
  const v = Math.max(0, Math.min(1, value));
  o[i] = 255 * Math.min(1, 2 * v);
  o[i + 1] = 255 * Math.max(0, Math.min(1, 1.6 * v - 0.3));
  o[i + 2] = 255 * Math.max(0, 3 * v - 2);
  o[i + 3] = 255;
}
