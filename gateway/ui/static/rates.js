// Rates and percentiles between two readings of one gateway, computed as `millrace top` computes them, and
// summed over the gateways that have answered.

const seconds = (before, after) => Math.max(1e-9, after.at_s - before.at_s);
// A restart counts from zero.
const increase = (before, after) => (after >= before ? after - before : after);

/** Of the observations between two readings of a histogram, interpolated in the bucket; null without any. */
export function percentile(before, after, share) {
  const earlier = new Map(before.map(([bound, count]) => [bound, count]));
  const counts = after.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = Math.max(0, ...counts.map(([, count]) => count));
  if (total <= 0) return null;
  const wanted = share * total;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (count >= wanted) {
      if (bound === null) return lower;
      const inside = count - below;
      return lower + (bound - lower) * (inside ? (wanted - below) / inside : 1);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

/** Rows of tiers over intervals: [[before, after], ...], one for each gateway. */
export function tier_rows(intervals) {
  const names = [...new Set(intervals.flatMap(([, after]) => after.tiers.map((tier) => tier.name)))];
  return names.map((name) => tier_row(name, intervals));
}

function tier_row(name, intervals) {
  const row = { name, active: 0, requests: 0, refused: 0, tokens: 0, cost: 0, good: 0, judged: 0, met: 0 };
  Object.assign(row, { ttft_p50: null, ttft_p95: null, tpot_p50: null });
  const worst = (known, value) => (value === null ? known : Math.max(known ?? 0, value));
  for (const [before, after] of intervals) {
    const now = after.tiers.find((tier) => tier.name === name);
    if (!now) continue;
    const then = before.tiers.find((tier) => tier.name === name) ?? { ttft_buckets: [], tpot_buckets: [] };
    const rate = (field) => increase(then[field] ?? 0, now[field]) / seconds(before, after);
    row.active += now.active;
    row.requests += rate("num_requests");
    row.refused += rate("num_refused");
    row.tokens += rate("completion_tokens");
    row.cost += rate("cost");
    row.good += rate("num_good");
    row.judged += rate("num_judged");
    row.met += rate("num_met");
    row.ttft_p50 = worst(row.ttft_p50, percentile(then.ttft_buckets, now.ttft_buckets, 0.5));
    row.ttft_p95 = worst(row.ttft_p95, percentile(then.ttft_buckets, now.ttft_buckets, 0.95));
    row.tpot_p50 = worst(row.tpot_p50, percentile(then.tpot_buckets, now.tpot_buckets, 0.5));
  }
  return row;
}

/** Engines as they are now, with the share of prompt tokens that their caches had and preemptions a second. */
export function engine_rows(before, after) {
  return after.engines.map((now) => {
    const then = before.engines.find((engine) => engine.address === now.address) ?? now;
    const asked = increase(then.prefix_queried_tokens, now.prefix_queried_tokens);
    const found = increase(then.prefix_hit_tokens, now.prefix_hit_tokens);
    const preempted = increase(then.num_preemptions, now.num_preemptions) / seconds(before, after);
    return { ...now, hits: asked ? found / asked : null, preempted };
  });
}

/** Sums over tiers and engines. */
export function summary(rows, engines) {
  const sum = (field) => rows.reduce((total, row) => total + row[field], 0);
  return {
    requests: sum("requests"),
    tokens: sum("tokens"),
    active: sum("active"),
    refused: sum("refused"),
    good: sum("good"),
    cost_per_hour: sum("cost") * 3600,
    waiting: engines.reduce((total, engine) => total + engine.num_waiting, 0),
  };
}
