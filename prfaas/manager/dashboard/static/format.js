// Formats of numbers.

const BITS = ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"];
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB"];
const NO_LIMIT = 2 ** 31 - 1; // Threshold of a plan under which every prompt stays local.

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
export const percent = (ratio) => `${(ratio * 100).toFixed(ratio > 0 && ratio < 0.1 ? 1 : 0)} %`;
export const isNoLimit = (value) => value >= NO_LIMIT;
export const tokens = (value) => (isNoLimit(value) ? "no limit" : count(value));
export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const PRESENT = { weekday: "short", day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short" };
export const present = (at) => new Date(at * 1000).toLocaleString("en-GB", PRESENT);
export const when = (at) => (Date.now() / 1000 - at < 43_200 ? clock(at) : `${new Date(at * 1000).toLocaleDateString("en-GB")} ${clock(at)}`);
export const money = (value) => value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: value && value < 0.1 ? 4 : 2 });

export function rate(perSecond) {
  if (perSecond >= 100) return count(perSecond);
  return perSecond === 0 ? "0" : perSecond.toFixed(perSecond < 10 ? 2 : 1);
}

export function seconds(value) {
  if (!value) return "0 s";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 59.5) return `${value.toFixed(value < 9.95 ? 1 : 0)} s`;
  const whole = Math.round(value);
  return whole % 60 ? `${Math.floor(whole / 60)} min ${whole % 60} s` : `${whole / 60} min`;
}
