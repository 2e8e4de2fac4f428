// When votes between two models say which is better: a test that holds however often one looks.
//
// The wealth of a gambler who bets on p, averaged over all p evenly, is a martingale where both models are
// equal (p = 1/2), so that it passes 1/alpha with a chance of at most alpha, ever (Ville's inequality). The p
// that it does not refute are an interval that holds at all times (Robbins 1970; Howard et al. 2021).

export const ALPHA = 0.05;
// Models whose chance to win lies this near to one half are called equal.
export const EQUAL_WITHIN = 0.1;

const logs = [0];

// The logarithm of n!.
function log_factorial(n) {
  for (let each = logs.length; each <= n; each += 1) logs.push(logs[each - 1] + Math.log(each));
  return logs[n];
}

/** Logarithm of the evidence against "the first one wins with probability p". */
export function log_evidence(wins, losses, p = 0.5) {
  const mixture = log_factorial(wins) + log_factorial(losses) - log_factorial(wins + losses + 1);
  const chance = (count, of) => (count === 0 ? 0 : count * Math.log(of));
  return mixture - chance(wins, p) - chance(losses, 1 - p);
}

/** Smallest and largest p that the votes do not refute. */
export function interval(wins, losses, alpha = ALPHA) {
  const bound = Math.log(1 / alpha);
  const n = wins + losses;
  const middle = n === 0 ? 0.5 : wins / n;
  const edge = (inside, outside) => {
    if (log_evidence(wins, losses, outside) < bound) return outside;
    for (let step = 0; step < 50; step += 1) {
      const between = (inside + outside) / 2;
      if (log_evidence(wins, losses, between) < bound) inside = between;
      else outside = between;
    }
    return inside;
  };
  return [edge(middle, 1e-12), edge(middle, 1 - 1e-12)];
}

/** What votes say. Ties are no votes for either, and count for nothing but their number.
 *
 * `verdict` is "first", "second", "equal" or "open".
 */
export function judge(wins, losses, alpha = ALPHA) {
  const log_e = log_evidence(wins, losses);
  const [low, high] = interval(wins, losses, alpha);
  let verdict = "open";
  if (log_e >= Math.log(1 / alpha)) verdict = wins > losses ? "first" : "second";
  else if (low > 0.5 - EQUAL_WITHIN && high < 0.5 + EQUAL_WITHIN) verdict = "equal";
  return { verdict, evidence: Math.exp(Math.min(log_e, 700)), needed: 1 / alpha, low, high };
}
