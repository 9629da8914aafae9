// From a column of numbers to colours. Diverging scales have 21 steps with 10 in the middle, the others 11.

export const COLUMNS = {
  advantage: {
    name: "advantage",
    key: "1",
    diverging: true,
    about: "credit: what is reinforced (blue) and what is discouraged (orange)",
  },
  ratio: {
    name: "ratio",
    key: "2",
    diverging: true,
    log: true,
    about: "π_now / π_sampled as the surrogate saw it in the last update; 1 is neutral",
  },
  entropy: { name: "entropy", key: "3", about: "how open the choice was" },
  reward: { name: "reward", key: "4", diverging: true, about: "on the decision that earned it" },
  value: { name: "value", key: "5", diverging: true, centre: "middle", about: "what the critic expected" },
  logp: {
    name: "log-prob",
    key: "6",
    flip: true,
    about: "stronger means less expected by the policy that took it",
  },
  "logp@reference": {
    name: "log-prob of reference",
    key: "7",
    flip: true,
    about: "stronger means less expected by the reference",
  },
  "logp@now": { name: "log-prob now", key: "8", flip: true, about: "under the weights of the last update" },
  "logp@old": {
    name: "log-prob before",
    key: "9",
    flip: true,
    about: "under the weights before the first update",
  },
};

export class Scale {
  constructor(column, records) {
    this.column = column;
    this.kind = COLUMNS[column] ?? { name: column };
    const known = records.flatMap((record) => (record[column] ?? []).filter((v) => v !== null));
    const values = Float64Array.from(known, (v) => (this.kind.log ? Math.log(Math.max(v, 1e-9)) : v)).sort();
    const at = (q) => (values.length ? values[Math.min(values.length - 1, Math.floor(q * values.length))] : 0);
    this.count = values.length;
    this.min = values[0] ?? 0;
    this.max = values.at(-1) ?? 0;
    this.middle = this.kind.centre ? at(0.5) : 0;
    if (this.kind.diverging) {
      const far =
        Math.max(Math.abs(at(0.02) - this.middle), Math.abs(at(0.98) - this.middle)) ||
        Math.max(Math.abs(this.min - this.middle), Math.abs(this.max - this.middle)) ||
        1;
      this.low = this.middle - far;
      this.high = this.middle + far;
    } else {
      this.low = at(0.02);
      this.high = at(0.98) > this.low ? at(0.98) : Math.max(this.max, this.low + 1e-9);
    }
  }

  /** 0…1, where 0.5 is the middle of a diverging scale; nothing where there is no number. */
  place(value) {
    if (value === null || value === undefined) return null;
    const v = this.kind.log ? Math.log(Math.max(value, 1e-9)) : value;
    const p = Math.max(0, Math.min(1, (v - this.low) / (this.high - this.low)));
    return this.kind.flip ? 1 - p : p;
  }

  /** The class that colours a token. */
  shade(value) {
    const p = this.place(value);
    if (p === null) return "";
    return this.kind.diverging ? `d${Math.round(p * 20)}` : `q${Math.round(p * 10)}`;
  }

  ends() {
    const out = this.kind.log ? Math.exp : (v) => v;
    return this.kind.flip ? [out(this.high), out(this.low)] : [out(this.low), out(this.high)];
  }
}
