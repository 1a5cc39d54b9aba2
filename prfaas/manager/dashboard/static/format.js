// Formats of numbers.

const BITS = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"];
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
const OFFLOAD_NOTHING = 2 ** 31 - 1; // Threshold of a plan under which every prompt stays local.

function scaled(value, step, units) {
  let position = 0;
  while (value >= step && position < units.length - 1) {
    value /= step;
    position += 1;
  }
  return `${position && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[position]}`;
}

export const bitRate = (bytesPerSecond) => scaled(bytesPerSecond * 8, 1000, BITS);
export const bytes = (value) => scaled(value, 1024, BYTES);
export const count = (value) => Math.round(value).toLocaleString("en");
export const percent = (ratio) => `${(ratio * 100).toFixed(ratio < 0.1 ? 1 : 0)} %`;
export const tokens = (value) => (value >= OFFLOAD_NOTHING ? "no limit" : count(value));
export const isNoLimit = (value) => value >= OFFLOAD_NOTHING;
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export function seconds(value) {
  if (!value) return "0 s";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}
